//! A set of sequences.

use super::cell_set::bits;
use crate::types::{MAX_SEQ, Seq};

/// The sequences that a cell belongs to: one bit for each of [`MAX_SEQ`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SeqSet([u64; 4]);

/// The empty set, then those of one sequence each, by sequence. A set that is put together in memory, a word into
/// zeroes, makes the processor wait when it is loaded as a whole.
pub(super) static UP_TO_ONE: [SeqSet; MAX_SEQ as usize + 1] = {
    let mut sets = [SeqSet::EMPTY; MAX_SEQ as usize + 1];
    let mut i = 0;
    while i < MAX_SEQ as usize {
        sets[i + 1].0[i / 64] = 1 << (i % 64);
        i += 1;
    }
    sets
};

impl SeqSet {
    /// No sequence.
    pub const EMPTY: Self = Self([0; 4]);

    /// Only `seq`.
    #[must_use]
    pub const fn of(seq: Seq) -> Self {
        UP_TO_ONE[seq.index() + 1]
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
        *self = self.union(Self::of(seq));
    }

    /// Takes `seq` out.
    pub const fn remove(&mut self, seq: Seq) {
        self.0[seq.index() / 64] &= !(1 << (seq.index() % 64));
    }

    /// The members of either.
    pub(super) const fn union(self, other: Self) -> Self {
        let (a, b) = (self.0, other.0);
        Self([a[0] | b[0], a[1] | b[1], a[2] | b[2], a[3] | b[3]])
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
        let mut words = (0u32..).zip(self.0).filter(|(_, word)| *word != 0);
        let (w, word) = words.next()?;
        let is_single = word.is_power_of_two() && words.next().is_none();
        is_single.then(|| w * 64 + word.ilog2()).and_then(|i| Seq::new(i.cast_signed(), MAX_SEQ))
    }

    /// The members, ascending.
    pub fn iter(self) -> impl Iterator<Item = Seq> {
        (0u32..)
            .zip(self.0)
            .flat_map(|(w, word)| bits(word).map(move |bit| w * 64 + bit))
            .filter_map(|index| Seq::new(index.cast_signed(), MAX_SEQ))
    }
}
