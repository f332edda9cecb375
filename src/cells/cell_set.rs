//! A set of cells as a bitmap of two levels.

use std::ops::Range;

/// The set bits of `word`, ascending.
pub(super) fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros());
        word &= word.wrapping_sub(1);
        bit
    })
}

/// Cells of one stream.
///
/// The second level names the words that have a member and those that have no other cell, so that a step over 4,096
/// cells that are all members, or all not, costs what a step over 64 does.
#[derive(Clone, Debug)]
pub(super) struct CellSet {
    words: Vec<u64>,
    /// The words that are not 0.
    occupied: Vec<u64>,
    /// The words of which every bit is set.
    full: Vec<u64>,
    /// Number of members.
    len: u32,
}

impl CellSet {
    /// An empty set that takes the cells `0..size`.
    pub(super) fn new(size: u32) -> Self {
        let n = size.div_ceil(64) as usize;
        let summary = vec![0; n.div_ceil(64)];
        Self { words: vec![0; n], occupied: summary.clone(), full: summary, len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn contains(&self, cell: u32) -> bool {
        has(&self.words, cell)
    }

    pub(super) fn insert(&mut self, cell: u32) {
        if self.contains(cell) {
            return;
        }
        let w = cell / 64;
        self.len += 1;
        set(&mut self.words, cell);
        set(&mut self.occupied, w);
        if self.words[w as usize] == u64::MAX {
            set(&mut self.full, w);
        }
    }

    pub(super) fn remove(&mut self, cell: u32) {
        if !self.contains(cell) {
            return;
        }
        let w = cell / 64;
        self.len -= 1;
        unset(&mut self.words, cell);
        unset(&mut self.full, w);
        if self.words[w as usize] == 0 {
            unset(&mut self.occupied, w);
        }
    }

    /// The largest member.
    pub(super) fn last(&self) -> Option<u32> {
        let (s, summary) = (0u32..).zip(&self.occupied).filter(|(_, summary)| **summary != 0).last()?;
        let w = s * 64 + summary.ilog2();
        Some(w * 64 + self.words[w as usize].ilog2())
    }

    /// The smallest member that is at least `from`.
    pub(super) fn next(&self, from: u32) -> Option<u32> {
        first(&self.words, &self.occupied, 0, from)
    }

    /// The members, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let cell = self.next(from)?;
            from = cell + 1;
            Some(cell)
        })
    }

    /// The cells of `range` that are no members, ascending.
    pub(super) fn absent_in(&self, range: Range<u32>) -> impl Iterator<Item = u32> + '_ {
        let mut from = range.start;
        std::iter::from_fn(move || {
            let cell = first(&self.words, &self.full, u64::MAX, from).filter(|&cell| cell < range.end)?;
            from = cell + 1;
            Some(cell)
        })
    }

    #[cfg(test)]
    pub(super) fn heap_bytes(&self) -> usize {
        8 * (self.words.capacity() + self.occupied.capacity() + self.full.capacity())
    }
}

fn has(words: &[u64], bit: u32) -> bool {
    words[bit as usize / 64] >> (bit % 64) & 1 != 0
}

fn set(words: &mut [u64], bit: u32) {
    words[bit as usize / 64] |= 1 << (bit % 64);
}

fn unset(words: &mut [u64], bit: u32) {
    words[bit as usize / 64] &= !(1 << (bit % 64));
}

/// The first bit from `from` on that differs from those of `others`, which is all zeroes or all ones. `summary` has
/// the bits of `others` exactly where a word is `others`.
fn first(words: &[u64], summary: &[u64], others: u64, from: u32) -> Option<u32> {
    let w = from / 64;
    let found = (words.get(w as usize)? ^ others) & (u64::MAX << (from % 64));
    if found != 0 {
        return Some(w * 64 + found.trailing_zeros());
    }
    let w = first_in(summary, others, w + 1)?;
    let found = words.get(w as usize)? ^ others;
    Some(w * 64 + found.trailing_zeros())
}

/// As [`first`], without a summary.
fn first_in(words: &[u64], others: u64, from: u32) -> Option<u32> {
    let mut searched = u64::MAX << (from % 64);
    for (w, word) in (from / 64..).zip(words.get(from as usize / 64..)?) {
        let found = (word ^ others) & searched;
        if found != 0 {
            return Some(w * 64 + found.trailing_zeros());
        }
        searched = u64::MAX;
    }
    None
}
