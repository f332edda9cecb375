//! The appendix with the context checkpoints of a slot, as llama-server writes it.
//!
//! ```text
//! u32 'SCKP' | u32 version 1 | u32 count
//! repeat count, oldest first:
//!     i64 n_tokens | i32 pos_min | i32 pos_max
//!     u64 len + target blob (PARTIAL_ONLY, never empty) | u64 len + draft blob | u64 len + driver blob
//! ```

use std::ops::Range;

use serde::Serialize;

use super::appendix::{BoundedRead, PartKind, head, read_head};
use crate::error::{Error, Result};
use crate::types::Pos;

const VERSION: u32 = 1;

/// Bytes of a checkpoint whose blobs are empty.
const MIN_LEN: u64 = 40;

/// Where in the sequence a checkpoint was taken.
///
/// Invariant: `n_tokens >= 0`, `pos_min <= pos_max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointSpan {
    n_tokens: i64,
    pos_min: Pos,
    pos_max: Pos,
}

impl CheckpointSpan {
    /// After `n_tokens` tokens, when the sequence had these positions.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative count, or positions in the wrong order.
    pub fn new(n_tokens: i64, pos_min: Pos, pos_max: Pos) -> Result<Self> {
        if n_tokens < 0 {
            return Err(Error::arg("n_tokens", format!("{n_tokens}, a checkpoint has at least 0")));
        }
        if pos_min > pos_max {
            return Err(Error::arg("pos_min", format!("{pos_min}, above pos_max {pos_max}")));
        }
        Ok(Self { n_tokens, pos_min, pos_max })
    }

    /// Tokens of the sequence before the checkpoint.
    #[must_use]
    pub const fn n_tokens(self) -> i64 {
        self.n_tokens
    }

    /// Smallest position of the sequence then.
    #[must_use]
    pub const fn pos_min(self) -> Pos {
        self.pos_min
    }

    /// Largest position of the sequence then.
    #[must_use]
    pub const fn pos_max(self) -> Pos {
        self.pos_max
    }

    fn read(input: &mut impl BoundedRead) -> Result<Self> {
        let n_tokens = input.u64("checkpoint n_tokens")?.cast_signed();
        let pos_min = input.u32("checkpoint pos_min")?.cast_signed();
        let pos_max = input.u32("checkpoint pos_max")?.cast_signed();
        if n_tokens < 0 {
            return Err(Error::corrupt("checkpoint n_tokens", n_tokens, "at least 0"));
        }
        if pos_min > pos_max {
            return Err(Error::corrupt(
                "checkpoint pos_min",
                pos_min,
                format_args!("at most pos_max {pos_max}"),
            ));
        }
        Ok(Self { n_tokens, pos_min, pos_max })
    }

    fn to_bytes(self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.n_tokens.to_le_bytes());
        out[8..12].copy_from_slice(&self.pos_min.to_le_bytes());
        out[12..].copy_from_slice(&self.pos_max.to_le_bytes());
        out
    }
}

/// A checkpoint. `B`: its blobs, as bytes or as where they lie in the input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checkpoint<B> {
    /// Where it was taken.
    pub span: CheckpointSpan,
    /// State of the target, `PARTIAL_ONLY`; never empty.
    pub target: B,
    /// State of the draft model; may be empty.
    pub draft: B,
    /// State of the speculative driver; may be empty.
    pub driver: B,
}

/// Checkpoints of one sequence, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoints<B>(pub Vec<Checkpoint<B>>);

impl Checkpoints<Range<u64>> {
    /// Reads the appendix, whose blobs are passed over.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Corrupt`].
    pub fn read(input: &mut impl BoundedRead) -> Result<Self> {
        read_head(input, PartKind::CHECKPOINTS, VERSION)?;
        let count = input.u32("checkpoint count")?;
        let (need, left) = (u64::from(count) * MIN_LEN, input.left());
        if need > left {
            return Err(Error::Truncated { field: "checkpoints", offset: input.offset(), need, left });
        }
        let mut all = Vec::new();
        for _ in 0..count {
            let span = CheckpointSpan::read(input)?;
            let target = input.blob("target checkpoint")?;
            if target.is_empty() {
                return Err(Error::corrupt("target checkpoint", "0 bytes", "a partial state"));
            }
            let draft = input.blob("draft checkpoint")?;
            let driver = input.blob("driver checkpoint")?;
            all.push(Checkpoint { span, target, draft, driver });
        }
        Ok(Self(all))
    }
}

impl Checkpoints<&[u8]> {
    /// Gives the appendix to `out`, piece by piece.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a checkpoint without a target state, and what `out` returns.
    pub fn write(&self, mut out: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let n = self.0.len();
        let count = u32::try_from(n)
            .map_err(|_| Error::arg("checkpoints", format!("{n} of them do not fit 32 bits")))?;
        out(&head(PartKind::CHECKPOINTS, VERSION))?;
        out(&count.to_le_bytes())?;
        for (i, Checkpoint { span, target, draft, driver }) in self.0.iter().enumerate() {
            if target.is_empty() {
                let reason = "0 bytes, a checkpoint has a partial state of the target";
                return Err(Error::arg(format!("checkpoints[{i}].target"), reason));
            }
            out(&span.to_bytes())?;
            for blob in [target, draft, driver] {
                out(&(blob.len() as u64).to_le_bytes())?;
                out(blob)?;
            }
        }
        Ok(())
    }
}
