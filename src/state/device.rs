//! A state whose tensors stay behind (`ON_DEVICE`).

use std::sync::atomic::{AtomicU32, Ordering};

use super::Source;
use crate::error::{Error, Result};
use crate::format::{self, Cursor, SEQ_BLOB_HEADER_LEN};
use crate::storage::TensorCopies;
use crate::types::{SeqId, StateFlags};

/// The tensors of a sequence's state, and the blob that was given out for them.
///
/// The blob is a sequence state's metadata. Beside the sequence, its `seq_id` field tells the states of one sequence
/// apart: two of the same positions have the same metadata, and restoring the one that is gone must fail.
#[derive(Debug)]
pub struct DeviceState {
    metadata: Vec<u8>,
    tensors: TensorCopies,
    /// The blob of a partial state may be the beginning of another state's.
    flags: StateFlags,
}

const HEADER_LEN: usize = 8;
const _: () = assert!(HEADER_LEN as u64 == SEQ_BLOB_HEADER_LEN);

/// Bits of the `seq_id` field that name the sequence; all ids fit.
const SEQ_ID_BITS: u32 = 8;

impl DeviceState {
    /// The header of a blob, unlike that of any other in this process.
    pub(crate) fn header(seq_id: SeqId) -> [u8; HEADER_LEN] {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) << SEQ_ID_BITS;
        format::seq_blob_header(seq_id | number.cast_signed())
    }

    /// The sequence that `blob` was taken of.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Corrupt`] if it does not begin like a sequence state.
    pub(crate) fn seq_id_of(blob: &[u8]) -> Result<SeqId> {
        let field = format::read_seq_blob_header(&mut Cursor::new(blob))?;
        Ok(field & ((1 << SEQ_ID_BITS) - 1))
    }

    /// States are numbered in the order in which they are taken, whatever sequence and context they are of.
    fn number_of(blob: &[u8]) -> Result<u32> {
        let field = format::read_seq_blob_header(&mut Cursor::new(blob))?;
        Ok(field.cast_unsigned() >> SEQ_ID_BITS)
    }

    /// The state behind the blob `metadata`.
    pub(crate) fn new(metadata: Vec<u8>, tensors: TensorCopies, flags: StateFlags) -> Self {
        Self { metadata, tensors, flags }
    }

    /// Its tensors.
    pub(crate) fn tensors(&self) -> &TensorCopies {
        &self.tensors
    }

    /// The state, to be read as `blob` with `flags`.
    ///
    /// # Errors
    /// [`Error::NoDeviceState`] if `blob` is another state's.
    pub(crate) fn source(&self, blob: &[u8], flags: StateFlags) -> Result<Source<'_>> {
        let seq_id = Self::seq_id_of(blob)?;
        let gone = |reason| Error::NoDeviceState { seq_id, reason };
        let (given, live) = (Self::number_of(blob)?, Self::number_of(&self.metadata)?);
        if given > live {
            return Err(gone("the live one is older than the blob"));
        }
        if !blob.starts_with(&self.metadata[..HEADER_LEN]) {
            return Err(gone("a later one has replaced it, or it is of another context"));
        }
        if flags != self.flags {
            return Err(gone("the live one was taken with other flags"));
        }
        if !blob.starts_with(&self.metadata) {
            return Err(gone("the blob is not the one that was given out"));
        }
        let mut metadata = Cursor::new(&self.metadata);
        metadata.bytes("header", SEQ_BLOB_HEADER_LEN)?;
        Ok(Source::beside(metadata, &self.tensors))
    }
}
