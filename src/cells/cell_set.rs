//! A set of cells as a bitmap.

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
#[derive(Clone, Debug)]
pub(super) struct CellSet {
    words: Vec<u64>,
    /// Number of members.
    len: u32,
}

impl CellSet {
    /// An empty set that takes the cells `0..size`.
    pub(super) fn new(size: u32) -> Self {
        Self { words: vec![0; size.div_ceil(64) as usize], len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn contains(&self, cell: u32) -> bool {
        self.words[cell as usize / 64] >> (cell % 64) & 1 != 0
    }

    pub(super) fn insert(&mut self, cell: u32) {
        self.len += u32::from(!self.contains(cell));
        self.words[cell as usize / 64] |= 1 << (cell % 64);
    }

    pub(super) fn remove(&mut self, cell: u32) {
        self.len -= u32::from(self.contains(cell));
        self.words[cell as usize / 64] &= !(1 << (cell % 64));
    }

    /// The largest member.
    pub(super) fn last(&self) -> Option<u32> {
        (0u32..)
            .zip(&self.words)
            .filter(|(_, word)| **word != 0)
            .last()
            .map(|(w, word)| w * 64 + word.ilog2())
    }

    /// The members, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.words).flat_map(|(w, &word)| bits(word).map(move |bit| w * 64 + bit))
    }

    /// The cells of `range` that are no members, ascending; members cost a 64th of a step each.
    pub(super) fn absent_in(&self, range: Range<u32>) -> impl Iterator<Item = u32> + '_ {
        (range.start / 64..range.end.div_ceil(64))
            .flat_map(|w| bits(!self.words[w as usize]).map(move |bit| w * 64 + bit))
            .skip_while(move |cell| *cell < range.start)
            .take_while(move |cell| *cell < range.end)
    }
}
