//! What may follow the memory state in a sequence file: appendices, each of which begins with a magic.
//!
//! Only the appendices of [`Checkpoints`](super::Checkpoints), [`DraftState`](super::DraftState) and
//! [`Integrity`](super::Integrity) are known. Nothing says how long another one is, but for the list of parts in
//! [`Integrity`](super::Integrity).

use std::fmt;
use std::ops::Range;

use serde::{Serialize, Serializer};

use super::Cursor;
use crate::error::{Error, Result};

/// Bytes that are read once, front to back; no read passes the end, and one that fails may have consumed some of them.
pub trait BoundedRead {
    /// The next bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`], and what keeps the input from giving them.
    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()>;

    /// Passes over the next `n` bytes; returns where they lie.
    ///
    /// # Errors
    /// [`Error::Truncated`].
    fn skip(&mut self, field: &'static str, n: u64) -> Result<Range<u64>>;

    /// Where the next byte lies.
    fn offset(&self) -> u64;

    /// Bytes that are left.
    fn left(&self) -> u64;

    /// The next u32.
    ///
    /// # Errors
    /// As [`BoundedRead::read`].
    fn u32(&mut self, field: &'static str) -> Result<u32> {
        let mut out = [0; 4];
        self.read(field, &mut out)?;
        Ok(u32::from_le_bytes(out))
    }

    /// The next u64.
    ///
    /// # Errors
    /// As [`BoundedRead::read`].
    fn u64(&mut self, field: &'static str) -> Result<u64> {
        let mut out = [0; 8];
        self.read(field, &mut out)?;
        Ok(u64::from_le_bytes(out))
    }

    /// A u64 length and so many bytes, which are passed over; returns where they lie.
    ///
    /// # Errors
    /// As [`BoundedRead::skip`].
    fn blob(&mut self, field: &'static str) -> Result<Range<u64>> {
        let len = self.u64(field)?;
        self.skip(field, len)
    }
}

impl BoundedRead for Cursor<'_> {
    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.bytes(field, out.len() as u64)?);
        Ok(())
    }

    fn skip(&mut self, field: &'static str, n: u64) -> Result<Range<u64>> {
        let start = BoundedRead::offset(self);
        self.bytes(field, n)?;
        Ok(start..start + n)
    }

    fn offset(&self) -> u64 {
        Cursor::offset(self) as u64
    }

    fn left(&self) -> u64 {
        Cursor::left(self) as u64
    }
}

/// A part of a sequence file, by four letters: those of an appendix are its magic.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PartKind([u8; 4]);

impl PartKind {
    /// File header and token field.
    pub const HEAD: Self = Self(*b"HEAD");
    /// The memory state.
    pub const STATE: Self = Self(*b"KVST");
    /// [`Checkpoints`](super::Checkpoints).
    pub const CHECKPOINTS: Self = Self(*b"SCKP");
    /// [`DraftState`](super::DraftState).
    pub const DRAFT: Self = Self(*b"SDFT");
    /// [`Integrity`](super::Integrity).
    pub const INTEGRITY: Self = Self(*b"KVSI");

    /// The part whose four letters are this little-endian number.
    #[must_use]
    pub const fn from_magic(magic: u32) -> Self {
        Self(magic.to_le_bytes())
    }

    /// The four letters as a little-endian number.
    #[must_use]
    pub const fn magic(self) -> u32 {
        u32::from_le_bytes(self.0)
    }
}

impl Serialize for PartKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for PartKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HEAD => f.write_str("header and tokens"),
            Self::STATE => f.write_str("memory state"),
            Self::CHECKPOINTS => f.write_str("checkpoints"),
            Self::DRAFT => f.write_str("draft state"),
            Self::INTEGRITY => f.write_str("integrity"),
            Self(letters) => write!(f, "unknown appendix '{}'", letters.escape_ascii()),
        }
    }
}

impl fmt::Debug for PartKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads the magic and the version of an appendix.
pub(super) fn read_head(input: &mut impl BoundedRead, kind: PartKind, version: u32) -> Result<()> {
    let wrong = |field, got: u32, expected: u32| {
        Err(Error::corrupt(field, format_args!("{got:08x}"), format_args!("{expected:08x}")))
    };
    let magic = input.u32("appendix magic")?;
    if magic != kind.magic() {
        return wrong("appendix magic", magic, kind.magic());
    }
    let found = input.u32("appendix version")?;
    if found != version {
        return wrong("appendix version", found, version);
    }
    Ok(())
}

/// The magic and the version of an appendix.
pub(super) fn head(kind: PartKind, version: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&kind.magic().to_le_bytes());
    out[4..].copy_from_slice(&version.to_le_bytes());
    out
}
