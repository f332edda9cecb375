//! The source of a restore: metadata in order, tensors in place or beside it.

use crate::error::Result;
use crate::format::{Cursor, StateVersion};
use crate::types::Token;

/// A state that is read once, front to back. Nothing is copied: tensors are slices of the input.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    /// The blob, or the metadata of an `ON_DEVICE` blob.
    pub metadata: Cursor<'a>,
    /// The tensors of an `ON_DEVICE` blob; `None` if they lie among the metadata.
    pub tensors: Option<Cursor<'a>>,
    /// Layout of the memory state.
    pub version: StateVersion,
    /// The token list of the file that holds the state; older layouts need it to know a cell's token.
    pub tokens: &'a [Token],
}

impl<'a> Source<'a> {
    /// A blob in memory: the current layout, tensors in place.
    #[must_use]
    pub fn blob(metadata: Cursor<'a>) -> Self {
        Self { metadata, tensors: None, version: StateVersion::CURRENT, tokens: &[] }
    }

    /// The next `n` bytes of tensors.
    ///
    /// # Errors
    /// [`crate::Error::Truncated`] if fewer are left.
    pub fn tensor(&mut self, field: &'static str, n: u64) -> Result<&'a [u8]> {
        self.tensors.as_mut().unwrap_or(&mut self.metadata).bytes(field, n)
    }
}
