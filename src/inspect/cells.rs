//! The cells of a section, read where they lie.

use std::ops::RangeInclusive;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::format::Cursor;
use crate::types::{MAX_SEQ, Pos, SeqId, TOKEN_NULL, Token};

/// What a cell holds between its position and its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CellExtLayout {
    /// Nothing.
    None,
    /// Column and row, as in version 2.
    Xy,
    /// Column, row and token.
    XyToken,
}

impl CellExtLayout {
    /// Bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Xy => 8,
            Self::XyToken => 12,
        }
    }

    /// Whether there is nothing.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        matches!(self, Self::None)
    }
}

/// A cell of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell<'a> {
    /// Its position.
    pub pos: Pos,
    /// Column, row and token of an image patch or an n-gram model; the token is [`TOKEN_NULL`] where the layout has none.
    pub ext: Option<(Pos, Pos, Token)>,
    /// Four bytes for each sequence.
    pub(super) seq_ids: &'a [u8],
}

impl<'a> Cell<'a> {
    /// The sequences that have it, as the state names them: in the state of one sequence its own, which a reader ignores;
    /// none in a recurrent section of such a state.
    pub fn seq_ids(&self) -> impl Iterator<Item = SeqId> + use<'a> {
        self.seq_ids.as_chunks::<4>().0.iter().map(|&id| SeqId::from_le_bytes(id))
    }

    /// Reads a cell.
    ///
    /// # Errors
    /// [`Error::Truncated`]; [`Error::Corrupt`] for a negative position, or more sequences than there can be.
    pub(super) fn read(input: &mut Cursor<'a>, layout: CellExtLayout) -> Result<Self> {
        let pos = input.i32("pos")?;
        if pos < 0 {
            return Err(Error::corrupt("pos", pos, "at least 0"));
        }
        let n_seq_id = input.u32("n_seq_id")?;
        if n_seq_id > MAX_SEQ {
            return Err(Error::corrupt("n_seq_id", n_seq_id, format_args!("at most {MAX_SEQ}")));
        }
        let ext = match layout {
            CellExtLayout::None => None,
            CellExtLayout::Xy => Some((input.i32("x")?, input.i32("y")?, TOKEN_NULL)),
            CellExtLayout::XyToken => Some((input.i32("x")?, input.i32("y")?, input.i32("tok")?)),
        };
        let seq_ids = input.bytes("seq_id", 4 * u64::from(n_seq_id))?;
        Ok(Self { pos, ext, seq_ids })
    }

    /// Sequences that have it.
    #[must_use]
    pub const fn n_seq_id(&self) -> usize {
        self.seq_ids.len() / 4
    }
}

/// The cells of a stream, in the order of the state.
#[derive(Clone, Debug)]
pub struct Cells<'a> {
    input: Cursor<'a>,
    layout: CellExtLayout,
    left: u32,
}

impl<'a> Cells<'a> {
    pub(super) const fn new(bytes: &'a [u8], layout: CellExtLayout, n_cells: u32) -> Self {
        Self { input: Cursor::new(bytes), layout, left: n_cells }
    }

    /// Cells one after another whose positions follow each other and that belong to the same sequences, as one run.
    #[must_use]
    pub fn runs(self) -> Runs<'a> {
        Runs { cells: self, next: None }
    }
}

impl<'a> Iterator for Cells<'a> {
    type Item = Cell<'a>;

    fn next(&mut self) -> Option<Cell<'a>> {
        self.left = self.left.checked_sub(1)?;
        // They have been read before; an input that has changed since then ends early.
        Cell::read(&mut self.input, self.layout).ok()
    }
}

/// Neighbouring cells with rising positions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// First and last position; every one between is there.
    pub pos: RangeInclusive<Pos>,
    /// The first of the cells, by its place in the stream.
    pub cell: u32,
    /// The sequences that have all of them.
    pub seq_ids: Vec<SeqId>,
}

/// The runs of a stream's cells.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    cells: Cells<'a>,
    /// The cell that ended the last run, and its place.
    next: Option<(u32, Cell<'a>)>,
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let (first_cell, first) = match self.next.take() {
            Some(next) => next,
            None => (0, self.cells.next()?),
        };
        let (mut last, mut at) = (first.pos, first_cell);
        for cell in self.cells.by_ref() {
            at += 1;
            if last.checked_add(1) != Some(cell.pos) || cell.seq_ids != first.seq_ids {
                self.next = Some((at, cell));
                break;
            }
            last = cell.pos;
        }
        Some(Run { pos: first.pos..=last, cell: first_cell, seq_ids: first.seq_ids().collect() })
    }
}
