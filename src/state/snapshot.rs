//! A state that was copied: its metadata, and its tensors where the cache has them.

use std::sync::Arc;

use super::{RecordSink, Sink};
use crate::error::{Error, Result};
use crate::storage::{CellMap, Region, TensorBytes, TensorCopies, Transfer};

/// Copies of tensors, read front to back.
#[derive(Clone, Debug)]
pub(super) struct CopiesCursor<'a> {
    copies: &'a TensorCopies,
    offset: u64,
}

impl<'a> CopiesCursor<'a> {
    pub fn new(copies: &'a TensorCopies) -> Self {
        Self { copies, offset: 0 }
    }

    /// The next `n` bytes.
    pub fn tensor(&mut self, field: &'static str, n: u64) -> Result<TensorBytes<'a>> {
        let left = self.copies.bytes() - self.offset;
        let truncated = Error::Truncated { field, offset: self.offset, need: n, left };
        let bytes = self.copies.range(self.offset, n).ok_or(truncated)?;
        self.offset += n;
        Ok(bytes)
    }
}

/// A state that was copied. What happens to the cache afterwards does not change it.
#[derive(Debug)]
pub struct Snapshot {
    metadata: Vec<u8>,
    /// How many bytes of metadata come before each tensor.
    at: Vec<usize>,
    tensors: TensorCopies,
}

impl Snapshot {
    pub(super) fn new(metadata: Vec<u8>, at: Vec<usize>, tensors: TensorCopies) -> Self {
        Self { metadata, at, tensors }
    }

    /// Bytes of the state.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.metadata.len() as u64 + self.tensors.bytes()
    }

    /// Its tensors.
    #[must_use]
    pub fn tensors(&self) -> &TensorCopies {
        &self.tensors
    }

    /// Its metadata.
    #[must_use]
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// Gives everything to `sink`, in order.
    ///
    /// # Errors
    /// Those of the sink.
    pub fn replay<'a>(&'a self, sink: &mut impl Sink<'a>) -> Result<()> {
        let mut map = Arc::new(CellMap::new(Vec::new())?);
        let mut start = 0;
        for (&end, plane) in self.at.iter().zip(self.tensors.planes()) {
            if end > start {
                sink.write(&self.metadata[start..end])?;
                start = end;
            }
            if map.n_cells() != plane.kv_size() {
                map = Arc::new(CellMap::of_run(0, plane.kv_size())?);
            }
            sink.write_tensor(Region::new(plane, &map)?)?;
        }
        if self.metadata.len() > start { sink.write(&self.metadata[start..]) } else { Ok(()) }
    }
}

impl RecordSink<'_> {
    /// Copies the state as it is now; the caller's streams wait for it.
    ///
    /// # Errors
    /// As [`TensorCopies::of`].
    pub fn snapshot(self, transfer: &Transfer) -> Result<Snapshot> {
        let (metadata, regions) = self.into_parts();
        let (at, regions): (Vec<_>, Vec<_>) = regions.into_iter().unzip();
        Ok(Snapshot::new(metadata, at, TensorCopies::of(&regions, transfer)?))
    }
}
