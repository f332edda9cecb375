//! Reading untrusted bytes with every length checked.

use crate::error::{Error, Result};

/// A position in bytes that are read once, front to back. No read passes the end.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Bytes read so far.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes not read yet.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.bytes.len() - self.offset
    }

    /// The next `n` bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`] if fewer are left; nothing is consumed then.
    pub fn bytes(&mut self, field: &'static str, n: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.offset..];
        match usize::try_from(n).ok().and_then(|n| rest.get(..n)) {
            Some(out) => {
                self.offset += out.len();
                Ok(out)
            }
            None => {
                Err(Error::Truncated { field, offset: self.offset as u64, need: n, left: rest.len() as u64 })
            }
        }
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(field, N as u64)?);
        Ok(out)
    }

    /// The next u32.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the bytes end before it does.
    pub fn u32(&mut self, field: &'static str) -> Result<u32> {
        self.array(field).map(u32::from_le_bytes)
    }

    /// The next i32.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the bytes end before it does.
    pub fn i32(&mut self, field: &'static str) -> Result<i32> {
        self.array(field).map(i32::from_le_bytes)
    }

    /// The next u64.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the bytes end before it does.
    pub fn u64(&mut self, field: &'static str) -> Result<u64> {
        self.array(field).map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_past_the_end_names_the_field_and_consumes_nothing() {
        let mut cursor = Cursor::new(&[1, 0, 0, 0, 9]);
        assert_eq!(cursor.u32("n_stream").unwrap(), 1);
        let error = cursor.u32("cell_count").unwrap_err();
        assert_eq!(error.to_string(), "truncated state: cell_count needs 4 bytes at offset 4, 1 are left");
        assert_eq!((cursor.offset(), cursor.left()), (4, 1));
        assert!(cursor.bytes("rows", u64::MAX).is_err());
        assert_eq!(cursor.bytes("rows", 1).unwrap(), [9]);
    }
}
