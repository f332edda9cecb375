//! A set of sequences.

use super::cell_set::bits;
use crate::types::{MAX_SEQ, Seq};

/// The sequences that a cell belongs to: one bit for each of [`MAX_SEQ`].
#[derive(Clone, Copy, bytemuck::Zeroable, Debug, Default, PartialEq, Eq)]
pub struct SeqSet([u64; 4]);

impl SeqSet {
    /// No sequence.
    pub const EMPTY: Self = Self([0; 4]);

    /// Only `seq`.
    #[must_use]
    pub fn of(seq: Seq) -> Self {
        let mut set = Self::EMPTY;
        set.insert(seq);
        set
    }

    /// The set whose sequence `i` is bit `i % 64` of word `i / 64`.
    #[must_use]
    pub const fn from_words(words: [u64; 4]) -> Self {
        Self(words)
    }

    /// The words that [`SeqSet::from_words`] takes.
    #[must_use]
    pub const fn words(self) -> [u64; 4] {
        self.0
    }

    /// Whether `seq` is a member.
    #[must_use]
    pub const fn contains(self, seq: Seq) -> bool {
        self.0[seq.index() / 64] >> (seq.index() % 64) & 1 != 0
    }

    /// Adds `seq`.
    pub const fn insert(&mut self, seq: Seq) {
        self.0[seq.index() / 64] |= 1 << (seq.index() % 64);
    }

    /// Takes `seq` out.
    pub const fn remove(&mut self, seq: Seq) {
        self.0[seq.index() / 64] &= !(1 << (seq.index() % 64));
    }

    /// Whether there is no member.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::EMPTY
    }

    /// Number of members.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.into_iter().map(u64::count_ones).sum()
    }

    /// The only member, if there is exactly one.
    #[must_use]
    pub fn single(self) -> Option<Seq> {
        if self.len() == 1 { self.iter().next() } else { None }
    }

    /// The members, ascending.
    pub fn iter(self) -> impl Iterator<Item = Seq> {
        (0u32..)
            .zip(self.0)
            .flat_map(|(w, word)| bits(word).map(move |bit| w * 64 + bit))
            .filter_map(|index| Seq::new(index.cast_signed(), MAX_SEQ))
    }
}
