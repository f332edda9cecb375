//! The cells of one sequence, ordered by position.

use std::ops::Range;

use crate::types::{Pos, PosRange};

/// `(pos, cell)` of every cell of one sequence, sorted.
///
/// The cell is part of the key: positions repeat in M-RoPE images and between the steps of a context shift.
#[derive(Clone, Debug, Default)]
pub(super) struct PosIndex(Vec<(Pos, u32)>);

impl PosIndex {
    pub(super) fn as_slice(&self) -> &[(Pos, u32)] {
        &self.0
    }

    fn bounds(&self, range: PosRange) -> Range<usize> {
        let start = self.0.partition_point(|&(pos, _)| pos < range.p0);
        let end = self.0.partition_point(|&(pos, _)| i64::from(pos) < range.p1);
        start..end.max(start)
    }

    /// The entries whose position lies in `range`.
    pub(super) fn range(&self, range: PosRange) -> &[(Pos, u32)] {
        &self.0[self.bounds(range)]
    }

    /// Takes the entries of `range` out.
    pub(super) fn take(&mut self, range: PosRange) -> Vec<(Pos, u32)> {
        let bounds = self.bounds(range);
        self.0.drain(bounds).collect()
    }

    /// Adds `entries`, which must be sorted and new.
    #[expect(
        clippy::stable_sort_primitive,
        reason = "only the stable sort merges sorted runs in linear time"
    )]
    pub(super) fn insert_all(&mut self, entries: &[(Pos, u32)]) {
        let Some(first) = entries.first() else { return };
        let at = self.0.partition_point(|entry| entry < first);
        self.0.extend(entries);
        // Decoding appends: the new entries are all that is left to sort. Otherwise these are two sorted runs.
        self.0[at..].sort();
    }

    /// Takes out `entries`, which must be sorted and present.
    pub(super) fn remove_all(&mut self, entries: &[(Pos, u32)]) {
        let Some(first) = entries.first() else { return };
        let at = self.0.partition_point(|entry| entry < first);
        if self.0[at..].starts_with(entries) {
            self.0.drain(at..at + entries.len());
        } else {
            let mut gone = entries.iter().peekable();
            self.0.retain(|entry| gone.next_if_eq(&entry).is_none());
        }
    }
}
