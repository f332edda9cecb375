//! Where new cells go: slots for a ubatch, placement of a restored sequence.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::cell_set::CellSet;
use super::{CellMeta, Cells};
use crate::types::{Pos, PosRange, Seq, Swa};

/// Where the cells of a restored sequence go: `metas[kept[i]]` takes stream cell `cells[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Indices into the state's cells, ascending; the missing ones are dropped.
    pub kept: Vec<u32>,
    /// Stream cells.
    pub cells: Vec<u32>,
}

/// Too few cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Cells of the state that must be placed.
    pub need: u64,
    /// Cells that could be used.
    pub free: u64,
}

/// A search for free cells, possibly as if one sequence were removed already.
struct Search<'a> {
    cells: &'a Cells,
    used: Cow<'a, CellSet>,
    head: u32,
    without: Option<Seq>,
}

impl<'a> Search<'a> {
    fn new(cells: &'a Cells, without: Option<Seq>) -> Self {
        let mut search = Self { cells, used: Cow::Borrowed(&cells.used), head: cells.head, without };
        if let Some(seq) = without {
            for &(_, cell) in cells.seq_cells(seq, PosRange::ALL) {
                if cells.seqs[cell as usize].single() == without {
                    search.used.to_mut().remove(cell);
                    search.head = search.head.min(cell);
                }
            }
        }
        search
    }

    /// Number of empty cells.
    fn n_free(&self) -> usize {
        (self.cells.size - self.used.len()) as usize
    }

    /// The first `n` cells that are empty or that `swa` masks, in search order; fewer if there are not as many.
    fn take(&self, n: usize, swa: Swa) -> Vec<u32> {
        // With much room before the head, fill that first.
        let room = u64::from(self.used.len()) + 2 * n as u64;
        let start = if u64::from(self.head) > room { 0 } else { self.head };
        let size = self.cells.size;
        if swa.is_none() {
            self.used.absent_in(start..size).chain(self.used.absent_in(0..start)).take(n).collect()
        } else {
            (start..size)
                .chain(0..start)
                .filter(|&cell| !self.used.contains(cell) || self.is_reusable(cell, swa))
                .take(n)
                .collect()
        }
    }

    /// Whether a used cell has one sequence only, whose next token does not see it.
    fn is_reusable(&self, cell: u32, swa: Swa) -> bool {
        let mut seqs = self.cells.seqs[cell as usize];
        if let Some(seq) = self.without {
            seqs.remove(seq);
        }
        let pos_max = seqs.single().and_then(|seq| self.cells.seq_pos_max(seq));
        let pos_next = pos_max.and_then(|pos| pos.checked_add(1));
        pos_next.is_some_and(|next| swa.is_masked(self.cells.pos[cell as usize], next))
    }
}

impl Cells {
    /// The cells for `n_tokens` new tokens, not necessarily neighbours; `None` if there are too few.
    ///
    /// These are empty cells, and in a stream with a sliding window also cells that the window has passed.
    #[must_use]
    pub fn find_slot(&self, n_tokens: u32, swa: Swa) -> Option<Vec<u32>> {
        if n_tokens > self.size {
            return None;
        }
        let cells = Search::new(self, None).take(n_tokens as usize, swa);
        (cells.len() == n_tokens as usize).then_some(cells)
    }

    /// Fills `cells`, which must be distinct, with `metas`; the next search starts after the last of them.
    ///
    /// A sequence that loses a cell to this loses all its positions up to that one, so that what is left of it
    /// has no gap.
    pub fn apply(&mut self, cells: &[u32], metas: &[CellMeta]) {
        let Some(&last) = cells.last() else { return };
        let overwritten: Vec<u32> = cells.iter().copied().filter(|&cell| self.used.contains(cell)).collect();
        let mut purged = BTreeMap::<Seq, Pos>::new();
        for (seq, entries) in self.by_seq(&overwritten) {
            purged.extend(entries.last().map(|&(pos, _)| (seq, pos)));
        }
        self.unlist(&overwritten);
        for cell in overwritten {
            self.free(cell);
        }
        for (&cell, meta) in cells.iter().zip(metas) {
            self.fill(cell, meta);
        }
        self.list(cells);
        for (seq, pos) in purged {
            self.seq_rm(seq, PosRange { p0: 0, p1: i64::from(pos) + 1 });
        }
        self.head = last + 1;
    }

    /// Finds cells for a state's `metas` as if sequence `dest` were removed, and changes nothing.
    ///
    /// If the empty cells do not suffice, masked cells of the state are dropped (if `may_drop_masked`), oldest
    /// first and never a part of one position; only then are masked cells of other sequences taken.
    /// The caller removes `dest` and then applies the kept metas.
    ///
    /// # Errors
    /// [`Shortage`] if that does not suffice either.
    pub fn place(
        &self,
        dest: Option<Seq>,
        metas: &[CellMeta],
        swa: Swa,
        may_drop_masked: bool,
    ) -> Result<Placement, Shortage> {
        let search = Search::new(self, dest);
        let n_excess = metas.len().saturating_sub(search.n_free());
        let dropped_to = if may_drop_masked { last_dropped(metas, swa, n_excess) } else { None };

        let kept: Vec<u32> = (0u32..)
            .zip(metas)
            .filter(|(_, meta)| dropped_to.is_none_or(|pos| meta.pos > pos))
            .map(|(i, _)| i)
            .collect();
        let mut cells = search.take(kept.len(), Swa::NONE);
        if cells.len() < kept.len() {
            let n_missing = kept.len() - cells.len();
            let usable = search.take(self.size as usize, swa);
            cells.extend(usable.into_iter().filter(|&cell| search.used.contains(cell)).take(n_missing));
        }
        if cells.len() < kept.len() {
            return Err(Shortage { need: kept.len() as u64, free: cells.len() as u64 });
        }
        Ok(Placement { kept, cells })
    }
}

/// The position up to which `metas` are dropped to get rid of `n_excess` of them, or of as many as are masked.
fn last_dropped(metas: &[CellMeta], swa: Swa, n_excess: usize) -> Option<Pos> {
    let pos_max = metas.iter().map(|meta| meta.pos).max()?;
    let mut masked: Vec<Pos> =
        metas.iter().map(|meta| meta.pos).filter(|&pos| swa.is_masked(pos, pos_max)).collect();
    masked.sort_unstable();
    let n_dropped = n_excess.min(masked.len());
    masked[..n_dropped].last().copied()
}
