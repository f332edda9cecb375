//! Copies of tensors: what a snapshot, or an `ON_DEVICE` state, keeps.
#![allow(unsafe_code, reason = "bytes of several planes of one allocation are lent as one slice")]

use std::slice;

use super::cuda::DevicePlane;
use super::{Plane, Region, TensorBytes, Transfer, copy_regions};
use crate::error::{Error, Result};

/// The tensors of a state one after another, each in host memory or on the device of the plane that it was taken of.
///
/// They are read like a range of bytes: in other pieces than those in which they were written, if need be.
#[derive(Debug, Default)]
pub struct TensorCopies {
    /// Dense planes; those in one memory touch.
    planes: Vec<Plane>,
    /// Where each begins among all bytes.
    starts: Vec<u64>,
    bytes: u64,
}

impl TensorCopies {
    /// Copies regions; the caller's streams wait for it, and nobody else.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`], what the owner of a remote tensor returns.
    pub fn of(regions: &[Region<'_>], transfer: &Transfer) -> Result<Self> {
        let planes = copy_regions(regions, transfer)?;
        let mut bytes = 0;
        let starts = planes.iter().map(|plane| {
            let start = bytes;
            bytes += plane.dense_bytes();
            start
        });
        Ok(Self { starts: starts.collect(), planes, bytes })
    }

    /// The copies, in order.
    #[must_use]
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// Bytes of them all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of those in the memory of devices.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.planes.iter().filter(|plane| plane.device().is_some()).map(Plane::dense_bytes).sum()
    }

    /// `len` bytes from `offset` on; `None` if there are not so many.
    #[must_use]
    pub fn range(&self, offset: u64, len: u64) -> Option<TensorBytes<'_>> {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        is_inside.then(|| match self.host_range(offset, len) {
            Some(bytes) => TensorBytes::Memory(bytes),
            None => TensorBytes::Copies { copies: self, offset, len },
        })
    }

    /// What a range has of each plane: the plane, the offset in it and the bytes.
    fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = (&Plane, u64, u64)> {
        let first = self.starts.partition_point(|&start| start <= offset).saturating_sub(1);
        let of_plane = move |(plane, &start): (&'_ Plane, &u64)| {
            let skip = offset.saturating_sub(start);
            let end = (offset + len).min(start + plane.dense_bytes());
            (start + skip, skip, end.saturating_sub(start + skip))
        };
        let planes = self.planes[first..].iter().zip(&self.starts[first..]);
        planes.map_while(move |(plane, start)| {
            let (at, skip, n) = of_plane((plane, start));
            (at < offset + len).then_some((plane, skip, n))
        })
    }

    /// The address of a range that lies in one memory, and its first plane.
    fn address(&self, offset: u64, len: u64) -> Option<(&Plane, usize)> {
        let mut pieces = self.pieces(offset, len);
        let (first, skip, n) = pieces.next()?;
        let start = first.as_ptr().addr().checked_add(usize::try_from(skip).ok()?)?;
        let mut end = start.checked_add(usize::try_from(n).ok()?)?;
        for (plane, _, n) in pieces {
            if plane.device() != first.device() || plane.as_ptr().addr() != end {
                return None;
            }
            end = end.checked_add(usize::try_from(n).ok()?)?;
        }
        Some((first, start))
    }

    fn host_range(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let (first, start) = self.address(offset, len).filter(|(first, _)| first.device().is_none())?;
        let skip = start - first.as_ptr().addr();
        let len = usize::try_from(len).ok()?;
        // SAFETY: so many bytes from there on are those of planes that touch, of the one host allocation of these copies, whose
        // pointers may reach all of it; they are initialised, and nobody writes them while `&self` lasts.
        Some(unsafe { slice::from_raw_parts(first.as_ptr().add(skip), len) })
    }

    /// A range that lies in one memory of this device, as the first bytes of a plane there.
    pub(super) fn on_device(&self, ordinal: i32, offset: u64, len: u64) -> Option<DevicePlane> {
        let (first, start) =
            self.address(offset, len).filter(|(first, _)| first.device() == Some(ordinal))?;
        Some(first.on_device()?.starting_at(start as u64))
    }

    /// A range brought to the host.
    pub(super) fn to_host(&self, offset: u64, len: u64, transfer: &Transfer) -> Result<Vec<u8>> {
        let mut bytes = super::batch::zeroed(len, "a snapshot on its way to another device")?;
        // The copies are touched by nobody's work.
        let transfer = transfer.detached();
        let mut rest = &mut bytes[..];
        for (plane, skip, n) in self.pieces(offset, len) {
            let n = usize::try_from(n).map_err(|_| Error::OutOfMemory { what: "a snapshot", bytes: n })?;
            let (piece, behind) = rest.split_at_mut(n);
            rest = behind;
            plane.get(skip, piece, &transfer)?;
        }
        Ok(bytes)
    }
}
