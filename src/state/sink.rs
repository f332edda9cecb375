//! Sinks: count, slice, record, device.

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::storage::{self, ProgressCallback, Region, TensorCopies, Transfer};

/// Takes a state's bytes in order. `'a` is the cache that the regions point into.
pub trait Sink<'a> {
    /// Takes metadata.
    ///
    /// # Errors
    /// If the sink cannot hold or write it.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Takes the bytes of cells of one plane. They may be copied only when the sink is finished.
    ///
    /// # Errors
    /// If the sink cannot hold or write them.
    fn write_tensor(&mut self, region: Region<'a>) -> Result<()>;

    /// Takes `n` bytes of metadata, which `fill` writes.
    ///
    /// # Errors
    /// As [`Sink::write`].
    fn write_with(&mut self, n: usize, fill: impl FnOnce(&mut [u8])) -> Result<()>
    where
        Self: Sized,
    {
        let mut bytes = vec![0; n];
        fill(&mut bytes);
        self.write(&bytes)
    }

    /// Takes a little-endian u32.
    ///
    /// # Errors
    /// As [`Sink::write`].
    fn write_u32(&mut self, value: u32) -> Result<()> {
        self.write(&value.to_le_bytes())
    }

    /// Takes a little-endian i32.
    ///
    /// # Errors
    /// As [`Sink::write`].
    fn write_i32(&mut self, value: i32) -> Result<()> {
        self.write(&value.to_le_bytes())
    }

    /// Takes a little-endian u64.
    ///
    /// # Errors
    /// As [`Sink::write`].
    fn write_u64(&mut self, value: u64) -> Result<()> {
        self.write(&value.to_le_bytes())
    }
}

/// Counts.
#[derive(Debug, Default)]
pub struct CountSink {
    /// Bytes of metadata so far.
    pub metadata: u64,
    /// Bytes of tensors so far.
    pub tensors: u64,
}

impl Sink<'_> for CountSink {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.metadata += bytes.len() as u64;
        Ok(())
    }

    fn write_tensor(&mut self, region: Region<'_>) -> Result<()> {
        self.tensors += region.bytes();
        Ok(())
    }

    fn write_with(&mut self, n: usize, _: impl FnOnce(&mut [u8])) -> Result<()> {
        self.metadata += n as u64;
        Ok(())
    }
}

/// Finds out on which devices the tensors are.
#[derive(Debug, Default)]
pub struct OnDevices {
    /// Their numbers, once each.
    pub devices: BTreeSet<i32>,
}

impl Sink<'_> for OnDevices {
    fn write(&mut self, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn write_tensor(&mut self, region: Region<'_>) -> Result<()> {
        self.devices.extend(region.device());
        Ok(())
    }

    fn write_with(&mut self, _: usize, _: impl FnOnce(&mut [u8])) -> Result<()> {
        Ok(())
    }
}

/// Fills a buffer: metadata at once, all tensors in one batch at the end.
#[derive(Debug)]
pub struct SliceSink<'a, 'out> {
    out: &'out mut [u8],
    len: usize,
    batch: Vec<(u64, Region<'a>)>,
}

impl<'out> SliceSink<'_, 'out> {
    /// Fills `out` from its start.
    pub fn new(out: &'out mut [u8]) -> Self {
        Self { out, len: 0, batch: Vec::new() }
    }

    /// The next `n` bytes of the buffer.
    fn take(&mut self, n: u64) -> Result<&mut [u8]> {
        let size = self.out.len() as u64;
        let need = (self.len as u64).saturating_add(n);
        let end = usize::try_from(need).ok().filter(|&end| end <= self.out.len());
        let end = end.ok_or(Error::BufferTooSmall { need, size })?;
        let start = std::mem::replace(&mut self.len, end);
        Ok(&mut self.out[start..end])
    }

    /// Copies the tensors; returns the bytes of the whole state.
    ///
    /// # Errors
    /// As [`storage::gather`].
    pub fn finish(self, transfer: &Transfer) -> Result<usize> {
        self.finish_reporting(transfer, None)
    }

    /// As [`SliceSink::finish`], telling how far it is.
    ///
    /// # Errors
    /// As [`storage::gather`].
    pub fn finish_reporting(
        self,
        transfer: &Transfer,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<usize> {
        storage::gather(&self.batch, self.out, transfer, progress)?;
        Ok(self.len)
    }
}

impl<'a> Sink<'a> for SliceSink<'a, '_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.take(bytes.len() as u64)?.copy_from_slice(bytes);
        Ok(())
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        let offset = self.len as u64;
        self.take(region.bytes())?;
        self.batch.push((offset, region));
        Ok(())
    }

    fn write_with(&mut self, n: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        fill(self.take(n as u64)?);
        Ok(())
    }
}

/// Remembers a state, to be given to another sink when all of it is known: nothing of a tensor is copied.
#[derive(Debug, Default)]
pub struct RecordSink<'a> {
    metadata: Vec<u8>,
    /// Each region, and how many bytes of metadata come before it.
    regions: Vec<(usize, Region<'a>)>,
    bytes: u64,
}

impl<'a> RecordSink<'a> {
    /// Bytes of the state so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes with `n` more: no more than a buffer or a file can have.
    fn bytes_with(&self, n: u64) -> Result<u64> {
        let bytes = self.bytes.saturating_add(n);
        if i64::try_from(bytes).is_ok() {
            Ok(bytes)
        } else {
            Err(Error::OutOfMemory { what: "a state", bytes })
        }
    }

    /// The regions, in order.
    pub(super) fn regions(&self) -> impl Iterator<Item = &Region<'a>> + Clone {
        self.regions.iter().map(|(_, region)| region)
    }

    /// The metadata, and the regions with the bytes of metadata before each.
    pub(super) fn into_parts(self) -> (Vec<u8>, Vec<(usize, Region<'a>)>) {
        (self.metadata, self.regions)
    }

    /// Gives everything to `sink`, in order.
    ///
    /// # Errors
    /// Those of the sink.
    pub fn replay(&self, sink: &mut impl Sink<'a>) -> Result<()> {
        let mut start = 0;
        for (end, region) in &self.regions {
            if *end > start {
                sink.write(&self.metadata[start..*end])?;
                start = *end;
            }
            sink.write_tensor(region.clone())?;
        }
        if self.metadata.len() > start { sink.write(&self.metadata[start..]) } else { Ok(()) }
    }
}

impl<'a> Sink<'a> for RecordSink<'a> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let n = bytes.len() as u64;
        let no_memory = |_| Error::OutOfMemory { what: "the metadata of a state", bytes: n };
        self.metadata.try_reserve(bytes.len()).map_err(no_memory)?;
        self.bytes = self.bytes_with(n)?;
        self.metadata.extend_from_slice(bytes);
        Ok(())
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        self.bytes = self.bytes_with(region.bytes())?;
        self.regions.push((self.metadata.len(), region));
        Ok(())
    }
}

/// Splits a state: metadata into the caller's buffer, tensors into copies that stay where the cache is (`ON_DEVICE`).
#[derive(Debug)]
pub struct DeviceSink<'a, 'out> {
    metadata: SliceSink<'a, 'out>,
    regions: Vec<Region<'a>>,
}

impl<'out> DeviceSink<'_, 'out> {
    /// Puts the metadata into `out`.
    pub fn new(out: &'out mut [u8]) -> Self {
        Self { metadata: SliceSink::new(out), regions: Vec::new() }
    }

    /// Copies the tensors; returns the bytes of the metadata, and the copies.
    ///
    /// # Errors
    /// As [`storage::copy_regions`].
    pub fn finish(self, transfer: &Transfer) -> Result<(usize, TensorCopies)> {
        let tensors = TensorCopies::of(&self.regions, transfer)?;
        Ok((self.metadata.finish(transfer)?, tensors))
    }
}

impl<'a> Sink<'a> for DeviceSink<'a, '_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.metadata.write(bytes)
    }

    fn write_with(&mut self, n: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.metadata.write_with(n, fill)
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        self.regions.push(region);
        Ok(())
    }
}
