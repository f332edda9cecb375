//! The source of a restore: metadata in order, tensors in place or beside it, in memory or in a file.

use std::fs::File;
use std::ops::Range;

use super::snapshot::{CopiesCursor, Snapshot};
use crate::error::{Error, Result};
use crate::format::{self, Cursor, StateVersion};
use crate::storage::{TensorBytes, TensorCopies, read_error, read_exact_at};
use crate::types::Token;

/// Where a state's tensors are.
#[derive(Clone, Debug)]
enum Tensors<'a> {
    /// Among the metadata.
    InPlace,
    /// One after another beside it: an `ON_DEVICE` blob.
    Beside(CopiesCursor<'a>),
    /// Kept by somebody else: they are only counted, in bytes, and read as nothing.
    Elsewhere(u64),
}

/// Where a state's metadata is.
#[derive(Clone, Debug)]
enum Metadata<'a> {
    Memory(Cursor<'a>),
    File(FileCursor<'a>),
}

/// A state that is read once, front to back. No tensor is copied, or read from a file, before it is needed.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    metadata: Metadata<'a>,
    tensors: Tensors<'a>,
    version: StateVersion,
    /// The token list of the file that holds the state; older layouts need it to know a cell's token.
    tokens: &'a [Token],
}

impl<'a> Source<'a> {
    /// A state in memory: the current layout, tensors in place.
    #[must_use]
    pub fn blob(metadata: Cursor<'a>) -> Self {
        Self {
            metadata: Metadata::Memory(metadata),
            tensors: Tensors::InPlace,
            version: StateVersion::CURRENT,
            tokens: &[],
        }
    }

    /// A state in memory, whose tensors lie beside it.
    pub(super) fn beside(metadata: Cursor<'a>, tensors: &'a TensorCopies) -> Self {
        Self { tensors: Tensors::Beside(CopiesCursor::new(tensors)), ..Self::blob(metadata) }
    }

    /// A state that was copied.
    #[must_use]
    pub fn snapshot(snapshot: &'a Snapshot) -> Self {
        Self::beside(Cursor::new(snapshot.metadata()), snapshot.tensors())
    }

    /// The state in a file of `size` bytes, from `offset` on.
    #[must_use]
    pub fn file(file: &'a File, offset: u64, size: u64, version: StateVersion, tokens: &'a [Token]) -> Self {
        let metadata = Metadata::File(FileCursor { file, size, offset, window: Vec::new(), window_start: 0 });
        Self { metadata, tensors: Tensors::InPlace, version, tokens }
    }

    /// The state with its tensors kept by somebody else.
    #[must_use]
    pub fn without_tensors(self) -> Self {
        Self { tensors: Tensors::Elsewhere(0), ..self }
    }

    /// The state as one of another version.
    #[must_use]
    pub fn as_version(&self, version: StateVersion) -> Self {
        Self { version, ..self.clone() }
    }

    /// Bytes of tensors that were passed so far, if somebody else keeps them.
    #[must_use]
    pub fn tensors_elsewhere(&self) -> Option<u64> {
        match self.tensors {
            Tensors::Elsewhere(bytes) => Some(bytes),
            Tensors::InPlace | Tensors::Beside(_) => None,
        }
    }

    /// The next `n` bytes of metadata.
    ///
    /// # Errors
    /// [`Error::Truncated`] if fewer are left, [`Error::OutOfMemory`].
    pub fn bytes(&mut self, field: &'static str, n: u64) -> Result<Vec<u8>> {
        let (offset, left) = (self.offset(), self.left());
        let len = usize::try_from(n).ok().filter(|_| n <= left);
        let len = len.ok_or(Error::Truncated { field, offset, need: n, left })?;
        let mut out = Vec::new();
        out.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { what: field, bytes: n })?;
        out.resize(len, 0);
        self.read(field, &mut out)?;
        Ok(out)
    }

    /// Bytes that are left.
    #[must_use]
    pub fn left(&self) -> u64 {
        match &self.metadata {
            Metadata::Memory(cursor) => cursor.left() as u64,
            Metadata::File(cursor) => cursor.left(),
        }
    }

    /// The next `n` bytes of tensors.
    ///
    /// # Errors
    /// [`Error::Truncated`] if fewer are left.
    pub fn tensor(&mut self, field: &'static str, n: u64) -> Result<TensorBytes<'a>> {
        let memory = match (&mut self.tensors, &mut self.metadata) {
            (Tensors::Beside(tensors), _) => return tensors.tensor(field, n),
            (Tensors::Elsewhere(bytes), _) => {
                *bytes = bytes.saturating_add(n);
                &[]
            }
            (Tensors::InPlace, Metadata::Memory(cursor)) => cursor.bytes(field, n)?,
            (Tensors::InPlace, Metadata::File(cursor)) => {
                let offset = cursor.skip(field, n)?;
                return Ok(TensorBytes::File { file: cursor.file, offset, len: n });
            }
        };
        Ok(TensorBytes::Memory(memory))
    }
}

/// A position in a file that is read once, front to back, a little at a time.
#[derive(Clone, Debug)]
struct FileCursor<'a> {
    file: &'a File,
    size: u64,
    offset: u64,
    /// Bytes that were read ahead, from `window_start` on.
    window: Vec<u8>,
    window_start: u64,
}

impl FileCursor<'_> {
    /// Bytes to read at once: metadata is small, and tensors lie between.
    const WINDOW: u64 = 4096;

    fn left(&self) -> u64 {
        self.size.saturating_sub(self.offset)
    }

    /// Passes over `n` bytes; returns where they start.
    fn skip(&mut self, field: &'static str, n: u64) -> Result<u64> {
        let (offset, left) = (self.offset, self.left());
        if n > left {
            return Err(Error::Truncated { field, offset, need: n, left });
        }
        self.offset += n;
        Ok(offset)
    }

    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()> {
        let n = out.len() as u64;
        let offset = self.skip(field, n)?;
        let in_window = |cursor: &Self| {
            let start = usize::try_from(offset.checked_sub(cursor.window_start)?).ok()?;
            cursor.window.get(start..)?.get(..out.len()).map(|_| start)
        };
        let start = match in_window(self) {
            Some(start) => start,
            None if n >= Self::WINDOW => return read_exact_at(self.file, out, offset).map_err(read_error),
            None => {
                let len = Self::WINDOW.min(self.size - offset);
                self.window.resize(usize::try_from(len).unwrap_or(0), 0);
                self.window_start = offset;
                read_exact_at(self.file, &mut self.window, offset).map_err(|source| {
                    self.window.clear();
                    read_error(source)
                })?;
                0
            }
        };
        out.copy_from_slice(&self.window[start..][..out.len()]);
        Ok(())
    }
}

/// A state's metadata in order, wherever it comes from.
pub trait Input {
    /// The next bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`], or whatever keeps the input from giving them.
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
        match &mut self.metadata {
            Metadata::Memory(cursor) => out.copy_from_slice(cursor.bytes(field, out.len() as u64)?),
            Metadata::File(cursor) => cursor.read(field, out)?,
        }
        Ok(())
    }

    fn left(&self) -> Option<u64> {
        Some(Source::left(self))
    }

    fn offset(&self) -> u64 {
        match &self.metadata {
            Metadata::Memory(cursor) => cursor.offset() as u64,
            Metadata::File(cursor) => cursor.offset,
        }
    }

    fn version(&self) -> StateVersion {
        self.version
    }

    fn tokens(&self) -> &[Token] {
        self.tokens
    }
}

impl format::BoundedRead for Source<'_> {
    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()> {
        Input::read(self, field, out)
    }

    fn skip(&mut self, field: &'static str, n: u64) -> Result<Range<u64>> {
        let start = Input::offset(self);
        self.tensor(field, n)?;
        Ok(start..start + n)
    }

    fn offset(&self) -> u64 {
        Input::offset(self)
    }

    fn left(&self) -> u64 {
        Source::left(self)
    }
}
