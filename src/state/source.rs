//! The source of a restore: metadata in order, tensors in place or beside it.

use crate::error::Result;
use crate::format::{Cursor, StateVersion};
use crate::types::Token;

/// Where a state's tensors are.
#[derive(Clone, Debug)]
pub enum Tensors<'a> {
    /// Among the metadata.
    InPlace,
    /// One after another beside it: an `ON_DEVICE` blob.
    Beside(Cursor<'a>),
    /// Kept by somebody else: they are only counted, in bytes, and read as nothing.
    Elsewhere(u64),
}

/// A state that is read once, front to back. Nothing is copied: tensors are slices of the input.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    /// The blob, or the metadata of an `ON_DEVICE` blob.
    pub metadata: Cursor<'a>,
    /// Where the tensors are.
    pub tensors: Tensors<'a>,
    /// Layout of the memory state.
    pub version: StateVersion,
    /// The token list of the file that holds the state; older layouts need it to know a cell's token.
    pub tokens: &'a [Token],
}

impl<'a> Source<'a> {
    /// A blob in memory: the current layout, tensors in place.
    #[must_use]
    pub fn blob(metadata: Cursor<'a>) -> Self {
        Self { metadata, tensors: Tensors::InPlace, version: StateVersion::CURRENT, tokens: &[] }
    }

    /// The next `n` bytes of tensors.
    ///
    /// # Errors
    /// [`crate::Error::Truncated`] if fewer are left.
    pub fn tensor(&mut self, field: &'static str, n: u64) -> Result<&'a [u8]> {
        match &mut self.tensors {
            Tensors::InPlace => self.metadata.bytes(field, n),
            Tensors::Beside(tensors) => tensors.bytes(field, n),
            Tensors::Elsewhere(bytes) => {
                *bytes = bytes.saturating_add(n);
                Ok(&[])
            }
        }
    }
}

/// A state's metadata in order, wherever it comes from.
pub trait Input {
    /// The next bytes.
    ///
    /// # Errors
    /// [`crate::Error::Truncated`], or whatever keeps the input from giving them.
    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()>;

    /// Bytes that are left; `None` if that cannot be known.
    fn left(&self) -> Option<u64>;

    /// Bytes read so far.
    fn offset(&self) -> u64;

    /// Layout of the memory state.
    fn version(&self) -> StateVersion;

    /// The token list of the file that holds the state.
    fn tokens(&self) -> &[Token];

    /// The next u32.
    ///
    /// # Errors
    /// As [`Input::read`].
    fn u32(&mut self, field: &'static str) -> Result<u32> {
        let mut out = [0; 4];
        self.read(field, &mut out)?;
        Ok(u32::from_le_bytes(out))
    }

    /// The next i32.
    ///
    /// # Errors
    /// As [`Input::read`].
    fn i32(&mut self, field: &'static str) -> Result<i32> {
        let mut out = [0; 4];
        self.read(field, &mut out)?;
        Ok(i32::from_le_bytes(out))
    }

    /// The next u64.
    ///
    /// # Errors
    /// As [`Input::read`].
    fn u64(&mut self, field: &'static str) -> Result<u64> {
        let mut out = [0; 8];
        self.read(field, &mut out)?;
        Ok(u64::from_le_bytes(out))
    }
}

impl Input for Source<'_> {
    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.metadata.bytes(field, out.len() as u64)?);
        Ok(())
    }

    fn left(&self) -> Option<u64> {
        Some(self.metadata.left() as u64)
    }

    fn offset(&self) -> u64 {
        self.metadata.offset() as u64
    }

    fn version(&self) -> StateVersion {
        self.version
    }

    fn tokens(&self) -> &[Token] {
        self.tokens
    }
}
