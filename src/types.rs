//! The field's words as types: positions, sequences, flags, sliding windows.

use bitflags::bitflags;

/// Position of a token in its sequence (`llama_pos`). Cells hold positions `>= 0`.
pub type Pos = i32;

/// Sequence id as callers give it (`llama_seq_id`): `0..n_seq_max`, or -1 where a call says so.
pub type SeqId = i32;

/// Token id (`llama_token`).
pub type Token = i32;

/// The token of a cell that was filled from an embedding (`LLAMA_TOKEN_NULL`).
pub const TOKEN_NULL: Token = -1;

/// Most sequences that one context can tell apart (`LLAMA_MAX_SEQ`).
pub const MAX_SEQ: u32 = 256;

bitflags! {
    /// What a sequence state holds and where (`llama_state_seq_flags`, the values of llama.h).
    ///
    /// Bits that are not listed here are refused; flags of our own will start at bit 16.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct StateFlags: u32 {
        /// Only what `seq_rm` cannot roll back: SWA cells in the window, recurrent states.
        /// A full-attention cache writes nothing.
        const PARTIAL_ONLY = 1;
        /// Tensor bytes stay in memory that the context owns; the blob holds metadata only.
        const ON_DEVICE = 2;
    }
}

/// How a sliding window hides old positions (`llama_swa_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u32)]
pub enum SwaType {
    /// Full attention: nothing is ever masked.
    #[default]
    None = 0,
    /// A position sees the `n_swa` latest ones, itself included.
    Standard = 1,
    /// A position sees its own chunk of `n_swa` positions.
    Chunked = 2,
    /// A position sees `n_swa / 2` positions to either side.
    Symmetric = 3,
}

impl SwaType {
    /// The type with llama.cpp's number `value`.
    #[must_use]
    pub const fn from_u32(value: u32) -> Option<Self> {
        match value {
            0 => Some(Self::None),
            1 => Some(Self::Standard),
            2 => Some(Self::Chunked),
            3 => Some(Self::Symmetric),
            _ => None,
        }
    }
}

/// A sliding window: its type and its size in positions.
///
/// Invariant: `n_swa > 0` unless the type is [`SwaType::None`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Swa {
    swa_type: SwaType,
    n_swa: u32,
}

impl Swa {
    /// Full attention.
    pub const NONE: Self = Self { swa_type: SwaType::None, n_swa: 0 };

    /// A window of `n_swa` positions; `None` if a real window has no size.
    #[must_use]
    pub const fn new(swa_type: SwaType, n_swa: u32) -> Option<Self> {
        match swa_type {
            SwaType::None => Some(Self { swa_type, n_swa }),
            _ if n_swa == 0 => None,
            _ => Some(Self { swa_type, n_swa }),
        }
    }

    /// The kind of window.
    #[must_use]
    pub const fn swa_type(self) -> SwaType {
        self.swa_type
    }

    /// The size of the window in positions.
    #[must_use]
    pub const fn n_swa(self) -> u32 {
        self.n_swa
    }

    /// Whether this is full attention.
    #[must_use]
    pub const fn is_none(self) -> bool {
        matches!(self.swa_type, SwaType::None)
    }

    /// Whether a token at `p1` does not see the cell at `p0` (`is_masked_swa`).
    #[must_use]
    pub fn is_masked(self, p0: Pos, p1: Pos) -> bool {
        let half = i64::from(self.n_swa / 2);
        i64::from(p0) < self.first_unmasked(p1)
            || (self.swa_type == SwaType::Symmetric && i64::from(p0) > i64::from(p1) + half)
    }

    /// The smallest position that a token at `p1` sees: every earlier one is masked.
    ///
    /// In a sequence whose largest position is `p1`, the masked cells are exactly those before it.
    #[must_use]
    pub fn first_unmasked(self, p1: Pos) -> i64 {
        let (p1, n_swa) = (i64::from(p1), i64::from(self.n_swa));
        match self.swa_type {
            SwaType::None => i64::MIN,
            SwaType::Standard => p1 - n_swa + 1,
            SwaType::Chunked => p1 / n_swa * n_swa,
            SwaType::Symmetric => p1 - n_swa / 2,
        }
    }

    /// First and last of the earlier positions that a token at `pos` sees; `None`: it sees none.
    #[must_use]
    pub fn seen_before(self, pos: Pos) -> Option<(Pos, Pos)> {
        let first = Pos::try_from(self.first_unmasked(pos).max(0)).ok()?;
        (first < pos).then(|| (first, pos - 1))
    }
}

/// What a cell knows beyond its position: the M-RoPE position and the token (`llama_kv_cell_ext`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellExt {
    /// Column of an image patch.
    pub x: Pos,
    /// Row of an image patch.
    pub y: Pos,
    /// Token of the cell; [`TOKEN_NULL`] if it came from an embedding.
    pub tok: Token,
}

impl Default for CellExt {
    fn default() -> Self {
        Self { x: 0, y: 0, tok: TOKEN_NULL }
    }
}

impl CellExt {
    /// Whether this patch comes after (`x`, `y`) in reading order.
    #[must_use]
    pub fn is_2d_gt(self, x: Pos, y: Pos) -> bool {
        self.y > y || (self.y == y && self.x > x)
    }
}

/// Which elements of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeType {
    /// Neighbours: `2 * i` and `2 * i + 1` (ggml's `NORMAL`).
    Normal,
    /// Halves: `i` and `i + n_rope_dims / 2` (ggml's `NEOX`).
    Neox,
}

/// A sequence index that was checked: below the context's `n_seq_max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq(u8);

impl Seq {
    /// Checks `seq_id` against `n_seq_max` (at most [`MAX_SEQ`]).
    #[must_use]
    pub fn new(seq_id: SeqId, n_seq_max: u32) -> Option<Self> {
        let index = u8::try_from(seq_id).ok()?;
        (u32::from(index) < n_seq_max).then_some(Self(index))
    }

    /// The index, for arrays of `n_seq_max` entries.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The id, as callers and blobs spell it.
    #[must_use]
    pub const fn id(self) -> SeqId {
        self.0 as SeqId
    }
}

/// A half-open range of positions `[p0, p1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PosRange {
    /// First position.
    pub p0: Pos,
    /// One past the last position; `i64` so that "to the end" includes the largest position.
    pub p1: i64,
}

impl PosRange {
    /// Every position.
    pub const ALL: Self = Self { p0: 0, p1: i64::MAX };

    /// llama.cpp's spelling: `p0 < 0` is from 0, `p1 < 0` is to the end.
    #[must_use]
    pub fn new(p0: Pos, p1: Pos) -> Self {
        Self { p0: p0.max(0), p1: if p1 < 0 { i64::MAX } else { i64::from(p1) } }
    }

    /// Whether `pos` lies in the range.
    #[must_use]
    pub fn contains(self, pos: Pos) -> bool {
        pos >= self.p0 && i64::from(pos) < self.p1
    }

    /// Whether every position lies in the range.
    #[must_use]
    pub fn is_everything(self) -> bool {
        self.p0 == 0 && self.p1 >= i64::from(Pos::MAX)
    }

    /// The largest of its positions that is at most `pos`, which is at least 0.
    #[must_use]
    pub fn last_up_to(self, pos: Pos) -> Option<Pos> {
        let last = Pos::try_from(self.p1 - 1).unwrap_or(Pos::MAX).min(pos);
        self.contains(last).then_some(last)
    }

    /// Whether no position lies in the range.
    #[must_use]
    pub fn is_empty(self) -> bool {
        i64::from(self.p0) >= self.p1
    }
}

/// A run of neighbouring cells of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First cell.
    pub start: u32,
    /// Number of cells, at least 1.
    pub len: u32,
}

/// A run of cells that moves: `len` neighbours at `src` (in a blob) go to neighbours at `dst` (in a cache).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// First cell in the blob, counted among the blob's cells.
    pub src: u32,
    /// First cell in the stream.
    pub dst: u32,
    /// Number of cells, at least 1.
    pub len: u32,
}

impl Move {
    /// The moves that bring blob cell `pairs[i].0` to stream cell `pairs[i].1`.
    #[must_use]
    pub fn of_pairs(pairs: impl IntoIterator<Item = (u32, u32)>) -> Vec<Self> {
        let mut moves: Vec<Self> = Vec::new();
        for (src, dst) in pairs {
            match moves.last_mut() {
                Some(last) if last.src + last.len == src && last.dst + last.len == dst => last.len += 1,
                _ => moves.push(Self { src, dst, len: 1 }),
            }
        }
        moves
    }
}
