//! Which cells of a blob are which cells of a stream.

use std::ops::Range;
use std::sync::OnceLock;

use super::kernels::Block;
use crate::error::{Error, Result};
use crate::types::{Move, Run};

/// Cells of a run from which on its elements are copied as one: below, elements are picked block by block.
const LONG_RUN: u32 = 256;

/// Which cells of a blob are which cells of a stream: checked once, used for every plane of the stream.
///
/// Invariant: no move is empty; those of the blob ascend without overlap; no cell of the stream is named twice.
#[derive(Debug)]
pub struct CellMap {
    moves: Vec<Move>,
    n_cells: u32,
    src_end: u32,
    dst_end: u32,
    steps: OnceLock<Vec<Step>>,
}

/// How elements of a few bytes are walked, in blob order.
#[derive(Debug)]
enum Step {
    /// A long run, copied as one.
    Run(Move),
    /// Cells picked one by one; never empty.
    Blocks(Vec<Block>),
}

impl Step {
    fn blob_start(&self) -> u32 {
        match self {
            Self::Run(m) => m.src,
            Self::Blocks(blocks) => blocks.first().map_or(0, |block| block.blob),
        }
    }

    fn blob_end(&self) -> u32 {
        match self {
            Self::Run(m) => m.src + m.len,
            Self::Blocks(blocks) => blocks.last().map_or(0, |block| block.blob_end()),
        }
    }
}

/// What a range of the blob's cells holds of a step.
pub(super) enum StepIn<'a> {
    Run(Move),
    Blocks(&'a [Block]),
}

impl CellMap {
    /// The map of `moves`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a move is empty or ends past the largest index, if those of the blob do not
    /// ascend, or if a cell of the stream is named twice.
    pub fn new(moves: Vec<Move>) -> Result<Self> {
        let bad = |reason: String| Err(Error::arg("moves", reason));
        let (mut n_cells, mut src_end, mut dst_end) = (0, 0, 0);
        let mut ascends = true;
        for &Move { src, dst, len } in &moves {
            let (Some(src_stop), Some(dst_stop)) = (src.checked_add(len), dst.checked_add(len)) else {
                return bad(format!("{len} cells from {src} to {dst} leave the range of cells"));
            };
            if len == 0 || src < src_end {
                return bad(format!(
                    "{len} cells at {src} of the blob (expected at least 1 from {src_end} on)"
                ));
            }
            ascends &= dst >= dst_end;
            // No overflow: they lie apart below `src_end`.
            n_cells += len;
            src_end = src_stop;
            dst_end = dst_end.max(dst_stop);
        }
        if !ascends {
            let mut cells: Vec<(u32, u32)> = moves.iter().map(|m| (m.dst, m.dst + m.len)).collect();
            cells.sort_unstable();
            if let Some(pair) = cells.windows(2).find(|pair| pair[1].0 < pair[0].1) {
                return bad(format!("cell {} of the stream is named twice", pair[1].0));
            }
        }
        Ok(Self { moves, n_cells, src_end, dst_end, steps: OnceLock::new() })
    }

    /// The map that brings blob cell `i` to `cells[i]`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a cell is named twice.
    pub fn of_cells(cells: &[u32]) -> Result<Self> {
        Self::new(Move::of_pairs((0..).zip(cells.iter().copied())))
    }

    /// The map that brings `len` blob cells to the cells from `start` on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has no cells.
    pub fn of_run(start: u32, len: u32) -> Result<Self> {
        Self::new(vec![Move { src: 0, dst: start, len }])
    }

    /// Number of cells that are moved.
    #[must_use]
    pub fn n_cells(&self) -> u32 {
        self.n_cells
    }

    /// One past the last blob cell that is named.
    #[must_use]
    pub fn src_end(&self) -> u32 {
        self.src_end
    }

    /// One past the largest cell of the stream that is named.
    #[must_use]
    pub fn dst_end(&self) -> u32 {
        self.dst_end
    }

    /// The moves, in blob order.
    #[must_use]
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// What `range` of the blob's cells holds of each move.
    pub(super) fn moves_in(&self, range: Range<u32>) -> impl Iterator<Item = Move> + Clone + '_ {
        let first = self.moves.partition_point(|m| m.src + m.len <= range.start);
        let clip = move |m: &Move| {
            let skip = range.start.saturating_sub(m.src);
            let len = (m.src + m.len).min(range.end).checked_sub(m.src + skip)?;
            (len > 0).then_some(Move { src: m.src + skip, dst: m.dst + skip, len })
        };
        self.moves[first..].iter().map_while(clip)
    }

    /// The cells of the stream that `range` of the blob's cells names, in blob order.
    pub(super) fn runs_in(&self, range: Range<u32>) -> impl Iterator<Item = Run> + Clone + '_ {
        self.moves_in(range).map(|m| Run { start: m.dst, len: m.len })
    }

    /// Calls with what `range` of the blob's cells holds of each step, in blob order.
    pub(super) fn each_step_in(&self, range: Range<u32>, mut call: impl FnMut(StepIn<'_>)) {
        let steps = self.steps();
        let first = steps.partition_point(|step| step.blob_end() <= range.start);
        for step in &steps[first..] {
            match step {
                Step::Run(m) if m.src >= range.end => break,
                Step::Run(_) => {
                    // Runs are moves, so the first of the range is this one or none.
                    let start = step.blob_start().max(range.start);
                    self.moves_in(start..range.end.min(step.blob_end())).for_each(|m| call(StepIn::Run(m)));
                }
                Step::Blocks(blocks) => {
                    let start = blocks.partition_point(|block| block.blob_end() <= range.start);
                    let end = blocks.partition_point(|block| block.blob < range.end);
                    // Only the first and the last can stick out.
                    let is_inside =
                        |block: &Block| block.blob >= range.start && block.blob_end() <= range.end;
                    let mut blocks = &blocks[start..end.max(start)];
                    if let Some((first, rest)) = blocks.split_first().filter(|(first, _)| !is_inside(first)) {
                        call(StepIn::Blocks(&[first.clip(range.start, range.end)]));
                        blocks = rest;
                    }
                    match blocks.split_last() {
                        Some((last, rest)) if !is_inside(last) => {
                            call(StepIn::Blocks(rest));
                            call(StepIn::Blocks(&[last.clip(range.start, range.end)]));
                        }
                        _ => call(StepIn::Blocks(blocks)),
                    }
                }
            }
        }
    }

    /// The moves as steps of elements; found once.
    fn steps(&self) -> &[Step] {
        self.steps.get_or_init(|| {
            let mut steps = Vec::new();
            for &m in &self.moves {
                if m.len >= LONG_RUN {
                    steps.push(Step::Run(m));
                    continue;
                }
                if !matches!(steps.last(), Some(Step::Blocks(_))) {
                    steps.push(Step::Blocks(Vec::new()));
                }
                if let Some(Step::Blocks(blocks)) = steps.last_mut() {
                    append(blocks, m);
                }
            }
            steps
        })
    }
}

/// Adds the cells of a move to `blocks`.
fn append(blocks: &mut Vec<Block>, Move { mut src, mut dst, mut len }: Move) {
    while len > 0 {
        let last = blocks.last_mut().filter(|last| last.can_take(src, dst));
        let n = if let Some(block) = last {
            block.add(dst, len)
        } else {
            let mut block = Block { cell: dst, blob: src, mask: 0 };
            let n = block.add(dst, len);
            blocks.push(block);
            n
        };
        (src, dst, len) = (src + n, dst + n, len - n);
    }
}
