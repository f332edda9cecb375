//! Sets of sequences by number, so that a cell holds 4 bytes and not 32.

use std::collections::HashMap;

use super::seq_set::{SeqSet, UP_TO_ONE};
use crate::types::{MAX_SEQ, Seq};

/// A set of sequences: none, one of them, or an entry of a [`SetTable`]. Of one table, equal ids are equal sets.
#[derive(Clone, Copy, bytemuck::Zeroable, Debug, Default, PartialEq, Eq)]
pub(super) struct SetId(u32);

impl SetId {
    pub(super) const EMPTY: Self = Self(0);

    /// The set of `seq` alone.
    pub(super) fn of(seq: Seq) -> Self {
        Self(seq.id().cast_unsigned() + 1)
    }

    /// The only member, if there is exactly one.
    pub(super) fn single(self) -> Option<Seq> {
        Seq::new(self.0.cast_signed().wrapping_sub(1), MAX_SEQ)
    }

    fn of_entry(i: usize) -> Self {
        Self(u32::try_from(i).map_or(u32::MAX, |i| i + MAX_SEQ + 1))
    }

    /// Its entry in the table, if it has one.
    fn entry(self) -> Option<usize> {
        self.0.checked_sub(MAX_SEQ + 1).map(|i| i as usize)
    }
}

/// The sets of two and more sequences that cells belong to.
#[derive(Clone, Debug, Default)]
pub(super) struct SetTable {
    entries: Vec<Entry>,
    /// Entries without cells.
    vacant: Vec<SetId>,
    /// The entries that have cells.
    ids: HashMap<SeqSet, SetId>,
    /// The set that was asked for last: neighbouring cells mostly belong to the same sequences.
    last: SetId,
}

#[derive(Clone, Debug)]
struct Entry {
    set: SeqSet,
    /// Number of cells that belong to exactly these sequences.
    n_cells: usize,
}

impl SetTable {
    pub(super) fn get(&self, id: SetId) -> SeqSet {
        *UP_TO_ONE.get(id.0 as usize).unwrap_or_else(|| &self.entries[id.0 as usize - UP_TO_ONE.len()].set)
    }

    pub(super) fn contains(&self, id: SetId, seq: Seq) -> bool {
        self.get(id).contains(seq)
    }

    /// The id of `set` for `n_cells` cells more, at least one, which keep it until they are released.
    pub(super) fn hold(&mut self, set: SeqSet, n_cells: usize) -> SetId {
        if set.is_empty() {
            return SetId::EMPTY;
        }
        if let Some(seq) = set.single() {
            return SetId::of(seq);
        }
        if self.last.entry().is_none_or(|i| self.entries[i].n_cells == 0 || self.entries[i].set != set) {
            self.last = self.ids.get(&set).copied().unwrap_or_else(|| self.enter(set));
        }
        if let Some(i) = self.last.entry() {
            self.entries[i].n_cells += n_cells;
        }
        self.last
    }

    /// `n_cells` cells do not belong to `id` any more.
    pub(super) fn release(&mut self, id: SetId, n_cells: usize) {
        let Some(i) = id.entry() else { return };
        let entry = &mut self.entries[i];
        entry.n_cells -= n_cells;
        if entry.n_cells == 0 {
            self.ids.remove(&entry.set);
            self.vacant.push(id);
        }
    }

    fn enter(&mut self, set: SeqSet) -> SetId {
        let entry = Entry { set, n_cells: 0 };
        let id = self.vacant.pop().unwrap_or(SetId::of_entry(self.entries.len()));
        match id.entry().and_then(|i| self.entries.get_mut(i)) {
            Some(vacant) => *vacant = entry,
            None => self.entries.push(entry),
        }
        self.ids.insert(set, id);
        id
    }

    /// Number of entries, vacant ones included.
    #[cfg(test)]
    pub(super) fn n_entries(&self) -> usize {
        self.entries.len()
    }

    /// Number of entries that have cells.
    #[cfg(test)]
    pub(super) fn n_held(&self) -> usize {
        self.ids.len()
    }
}
