//! Where new cells go: slots for a ubatch, placement of a restored sequence.

use std::collections::BTreeMap;
use std::ops::Range;

use super::seq_set::SeqSet;
use super::set_table::SetId;
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

/// A search for free cells, possibly as if positions of one sequence were removed already.
struct Search<'a> {
    cells: &'a Cells,
    without: Option<(Seq, PosRange)>,
    /// The cells that are empty without these, ascending.
    freed: Vec<u32>,
    head: u32,
}

impl<'a> Search<'a> {
    fn new(cells: &'a Cells, without: Option<(Seq, PosRange)>) -> Self {
        let mut freed = Vec::new();
        if let Some((seq, range)) = without {
            let own = cells.seq_cells(seq, range).iter().map(|&(_, cell)| cell);
            freed.extend(own.filter(|&cell| cells.seqs[cell as usize] == SetId::of(seq)));
            freed.sort_unstable();
        }
        let head = freed.first().map_or(cells.head, |&first| first.min(cells.head));
        Self { cells, without, freed, head }
    }

    /// Number of empty cells.
    fn n_free(&self) -> usize {
        (self.cells.size - self.cells.used.len()) as usize + self.freed.len()
    }

    /// The first `n` cells that are empty or that `swa` masks, in search order; fewer if there are not as many.
    fn take(&self, n: usize, swa: Swa) -> Vec<u32> {
        let size = self.cells.size;
        // With much room before the head, fill that first.
        let n_used = size as usize - self.n_free();
        let start = if self.head as usize > n_used + 2 * n { 0 } else { self.head };
        let mut found = Vec::with_capacity(n.min(size as usize));
        for range in [start..size, 0..start] {
            let n = n - found.len();
            if swa.is_none() {
                found.extend(self.empty_in(range).take(n));
            } else {
                found
                    .extend(range.filter(|&cell| self.is_empty(cell) || self.is_reusable(cell, swa)).take(n));
            }
        }
        found
    }

    /// The empty cells of `range`, ascending.
    fn empty_in(&self, range: Range<u32>) -> impl Iterator<Item = u32> {
        let bound = |cell| self.freed.partition_point(|&freed| freed < cell);
        let mut freed = self.freed[bound(range.start)..bound(range.end)].iter().copied().peekable();
        let mut empty = self.cells.used.absent_in(range).peekable();
        std::iter::from_fn(move || match (empty.peek(), freed.peek()) {
            (Some(a), Some(b)) if a < b => empty.next(),
            (_, Some(_)) => freed.next(),
            _ => empty.next(),
        })
    }

    fn is_empty(&self, cell: u32) -> bool {
        self.cells.seqs[cell as usize] == SetId::EMPTY || self.freed.binary_search(&cell).is_ok()
    }

    /// The `n` used cells of the smallest positions that `swa` masks; fewer if there are not as many. Their
    /// sequences lose all older positions with them, so these are the ones that cost least.
    fn oldest_reusable(&self, n: usize, swa: Swa) -> impl Iterator<Item = u32> {
        let mut masked: Vec<(Pos, u32)> = self
            .cells
            .used
            .iter()
            .filter(|&cell| self.is_reusable(cell, swa))
            .map(|cell| (self.cells.pos[cell as usize], cell))
            .collect();
        masked.sort_unstable();
        masked.into_iter().take(n).map(|(_, cell)| cell)
    }

    /// Whether a used cell has one sequence only, whose next token does not see it.
    fn is_reusable(&self, cell: u32, swa: Swa) -> bool {
        let seqs = self.cells.seqs[cell as usize];
        let single = match self.without {
            None => seqs.single(),
            Some((_, range)) if !range.contains(self.cells.pos[cell as usize]) => seqs.single(),
            Some((seq, _)) => {
                let mut seqs = self.cells.sets.get(seqs);
                seqs.remove(seq);
                seqs.single()
            }
        };
        let pos_max = single.and_then(|seq| self.cells.seq_pos_max(seq));
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
        let mut purged = BTreeMap::<Seq, PosRange>::new();
        for &cell in cells.iter().filter(|&&cell| self.used.contains(cell)) {
            let p1 = i64::from(self.pos[cell as usize]) + 1;
            for seq in self.sets.get(self.seqs[cell as usize]).iter() {
                let range = purged.entry(seq).or_insert(PosRange { p0: 0, p1 });
                range.p1 = range.p1.max(p1);
            }
        }
        for (&seq, &range) in &purged {
            self.seq_rm(seq, range);
        }
        let mut listed = SeqSet::EMPTY;
        let mut left = cells;
        for metas in metas.chunk_by(|a, b| a.seqs == b.seqs) {
            let cells;
            (cells, left) = left.split_at(metas.len());
            let seqs = metas[0].seqs;
            let id = self.sets.hold(seqs, metas.len());
            for (&cell, meta) in cells.iter().zip(metas) {
                self.fill(cell, meta, id);
            }
            for seq in seqs.iter() {
                let entries = cells.iter().zip(metas).map(|(&cell, meta)| (meta.pos, cell));
                self.index[seq.index()].push(entries);
            }
            listed = listed.union(seqs);
        }
        listed.iter().for_each(|seq| self.index[seq.index()].sort());
        // New tokens at positions that their sequence has lost go as well.
        for (seq, range) in purged {
            self.seq_rm(seq, range);
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
        self.place_without(dest.map(|dest| (dest, PosRange::ALL)), metas, swa, may_drop_masked)
    }

    /// Finds cells for `metas`, which are behind those of sequence `dest` and will be added to them, as if `dest` had lost its
    /// positions below `from`. Changes nothing.
    ///
    /// If the empty cells do not suffice, cells of `dest` that its new end masks are given up, oldest first and never a part of one
    /// position; then as in [`Cells::place`]. The caller removes the positions that are returned from `dest`, and then applies
    /// the kept metas.
    ///
    /// # Errors
    /// [`Shortage`] if that does not suffice either.
    pub fn place_behind(
        &self,
        dest: Seq,
        metas: &[CellMeta],
        swa: Swa,
        from: Pos,
    ) -> Result<(PosRange, Placement), Shortage> {
        let mut removed = PosRange { p0: 0, p1: from.into() };
        let n_free = Search::new(self, Some((dest, removed))).n_free();
        let mut n_excess = metas.len().saturating_sub(n_free);
        let first_unmasked = metas.iter().map(|meta| swa.first_unmasked(meta.pos)).max().unwrap_or(i64::MIN);
        let masked = self.seq_cells(dest, PosRange { p0: from, p1: first_unmasked });
        for position in masked.chunk_by(|a, b| a.0 == b.0) {
            if n_excess == 0 {
                break;
            }
            removed.p1 = i64::from(position[0].0) + 1;
            let is_freed = |&&(_, cell): &&(Pos, u32)| self.seqs[cell as usize] == SetId::of(dest);
            n_excess = n_excess.saturating_sub(position.iter().filter(is_freed).count());
        }
        Ok((removed, self.place_without(Some((dest, removed)), metas, swa, true)?))
    }

    fn place_without(
        &self,
        without: Option<(Seq, PosRange)>,
        metas: &[CellMeta],
        swa: Swa,
        may_drop_masked: bool,
    ) -> Result<Placement, Shortage> {
        let search = Search::new(self, without);
        let n_excess = metas.len().saturating_sub(search.n_free());
        let dropped_to = if may_drop_masked { last_dropped(metas, swa, n_excess) } else { None };

        let kept: Vec<u32> = (0u32..)
            .zip(metas)
            .filter(|(_, meta)| dropped_to.is_none_or(|pos| meta.pos > pos))
            .map(|(i, _)| i)
            .collect();
        let mut cells = search.take(kept.len(), Swa::NONE);
        if cells.len() < kept.len() {
            cells.extend(search.oldest_reusable(kept.len() - cells.len(), swa));
            cells.sort_unstable();
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
