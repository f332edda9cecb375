//! The appendix with the live draft state of a slot.
//!
//! ```text
//! u32 'SDFT' | u32 version 1 | u64 len + draft blob (flags NONE) | u64 len + driver blob
//! ```

use std::ops::Range;

use serde::Serialize;

use super::appendix::{BoundedRead, PartKind, head, read_head};
use crate::error::Result;

const VERSION: u32 = 1;

/// What speculative decoding needs to go on. `B`: the blobs, as where they lie in the input, or by their lengths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DraftState<B> {
    /// State of the draft model's sequence, with its header; empty if there is no draft model.
    pub draft: B,
    /// State of the speculative driver; may be empty.
    pub driver: B,
}

impl DraftState<Range<u64>> {
    /// Reads the appendix, whose blobs are passed over.
    ///
    /// # Errors
    /// [`Error::Truncated`](crate::Error::Truncated), [`Error::Corrupt`](crate::Error::Corrupt).
    pub fn read(input: &mut impl BoundedRead) -> Result<Self> {
        read_head(input, PartKind::DRAFT, VERSION)?;
        Ok(Self { draft: input.blob("draft state")?, driver: input.blob("driver state")? })
    }
}

impl DraftState<u64> {
    /// What comes before each of the two blobs.
    #[must_use]
    pub fn heads(&self) -> ([u8; 16], [u8; 8]) {
        let mut first = [0; 16];
        first[..8].copy_from_slice(&head(PartKind::DRAFT, VERSION));
        first[8..].copy_from_slice(&self.draft.to_le_bytes());
        (first, self.driver.to_le_bytes())
    }
}
