//! A state that was copied: its metadata, and its tensors where the cache has them.

use std::sync::Arc;

use super::{RecordSink, Sink};
use crate::error::{Error, Result};
use crate::storage::{self, CellMap, Plane, Region, TensorBytes, Transfer};

/// Copies of the tensors of a state, in its order: each in host memory, or on the device of the plane that it was taken of.
#[derive(Debug, Default)]
pub struct TensorCopies(Vec<Plane>);

impl TensorCopies {
    /// Copies regions; the caller's streams wait for it.
    ///
    /// # Errors
    /// As [`storage::copy_regions`].
    pub fn of(regions: &[Region<'_>], transfer: &Transfer) -> Result<Self> {
        storage::copy_regions(regions, transfer).map(Self)
    }

    /// Bytes of them all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|plane| TensorBytes::Plane(plane).len()).sum()
    }

    /// Bytes of those in the memory of devices.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        let on_device = self.0.iter().filter(|plane| plane.device().is_some());
        on_device.map(|plane| TensorBytes::Plane(plane).len()).sum()
    }
}

/// Copies of tensors, read one after another.
#[derive(Clone, Debug)]
pub(super) struct CopiesCursor<'a> {
    left: &'a [Plane],
    /// Bytes that were read.
    offset: u64,
}

impl<'a> CopiesCursor<'a> {
    pub fn new(copies: &'a TensorCopies) -> Self {
        Self { left: &copies.0, offset: 0 }
    }

    /// The next tensor, which has to have `n` bytes: what is read has been written so.
    pub fn tensor(&mut self, field: &'static str, n: u64) -> Result<TensorBytes<'a>> {
        let Some((plane, left)) = self.left.split_first() else {
            return Err(Error::Truncated { field, offset: self.offset, need: n, left: 0 });
        };
        let bytes = TensorBytes::Plane(plane);
        if bytes.len() != n {
            return Err(Error::corrupt(
                field,
                format_args!("{} bytes", bytes.len()),
                format_args!("{n} bytes"),
            ));
        }
        (self.left, self.offset) = (left, self.offset + n);
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
        for (&end, plane) in self.at.iter().zip(&self.tensors.0) {
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
    /// As [`storage::copy_regions`].
    pub fn snapshot(self, transfer: &Transfer) -> Result<Snapshot> {
        let (metadata, regions) = self.into_parts();
        let (at, regions): (Vec<_>, Vec<_>) = regions.into_iter().unzip();
        Ok(Snapshot::new(metadata, at, TensorCopies::of(&regions, transfer)?))
    }
}
