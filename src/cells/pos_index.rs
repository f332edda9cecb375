//! The cells of one sequence, ordered by position.

use std::ops::Range;

use crate::types::{Pos, PosRange};

/// `(pos, cell)` of every cell of one sequence, sorted.
///
/// The cell is part of the key: positions repeat in M-RoPE images and between the steps of a context shift.
#[derive(Clone, Debug, Default)]
pub(super) struct PosIndex {
    entries: Vec<(Pos, u32)>,
    /// How many are sorted: all but those that were pushed since the last `sort`.
    n_sorted: usize,
}

impl PosIndex {
    pub(super) fn as_slice(&self) -> &[(Pos, u32)] {
        &self.entries
    }

    fn bounds(&self, range: PosRange) -> Range<usize> {
        let start = self.entries.partition_point(|&(pos, _)| pos < range.p0);
        let end = self.entries.partition_point(|&(pos, _)| i64::from(pos) < range.p1);
        start..end.max(start)
    }

    /// The entries whose position lies in `range`.
    pub(super) fn range(&self, range: PosRange) -> &[(Pos, u32)] {
        &self.entries[self.bounds(range)]
    }

    /// Takes the entries of `range` out.
    pub(super) fn take(&mut self, range: PosRange) -> Vec<(Pos, u32)> {
        let bounds = self.bounds(range);
        self.n_sorted -= bounds.len();
        self.entries.drain(bounds).collect()
    }

    /// Adds new entries in any order. They count once they are sorted.
    pub(super) fn push(&mut self, entries: impl IntoIterator<Item = (Pos, u32)>) {
        self.entries.extend(entries);
    }

    /// Puts what was pushed in its place. Costs what was pushed where that comes last, as in decoding.
    #[expect(
        clippy::stable_sort_primitive,
        reason = "only the stable sort merges sorted runs in linear time"
    )]
    pub(super) fn sort(&mut self) {
        let (old, new) = self.entries.split_at_mut(self.n_sorted);
        new.sort();
        if let (Some(last), Some(first)) = (old.last(), new.first())
            && last > first
        {
            let at = old.partition_point(|entry| entry < first);
            self.entries[at..].sort();
        }
        self.n_sorted = self.entries.len();
    }

    /// Moves each entry in `range` to the position that `new_pos` gives for it; below 0 it goes.
    #[expect(clippy::stable_sort_primitive, reason = "as in `sort`")]
    pub(super) fn map(&mut self, range: PosRange, mut new_pos: impl FnMut(Pos, u32) -> Pos) {
        let Range { start, end } = self.bounds(range);
        let mut kept = start;
        for i in start..end {
            let (pos, cell) = self.entries[i];
            let pos = new_pos(pos, cell);
            if pos >= 0 {
                self.entries[kept] = (pos, cell);
                kept += 1;
            }
        }
        self.entries.drain(kept..end);
        let with_neighbours = start.saturating_sub(1)..(kept + 1).min(self.entries.len());
        if !self.entries[with_neighbours].is_sorted() {
            self.entries.sort();
        }
        self.n_sorted = self.entries.len();
    }

    #[cfg(test)]
    pub(super) fn heap_bytes(&self) -> usize {
        size_of::<(Pos, u32)>() * self.entries.capacity()
    }
}
