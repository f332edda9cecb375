//! Regions on devices, brought to the host a chunk at a time.

use super::cuda::Drain;
use super::{Region, Transfer};
use crate::error::{Error, Result};

/// Regions on devices on their way to the host, for whoever takes their bytes in order. All are under way at once; no more of
/// them is on the host at a time than fits the staging buffers.
#[derive(Debug, Default)]
pub(crate) struct RegionDrain {
    /// One for each device.
    drains: Vec<(i32, Drain)>,
}

impl RegionDrain {
    /// Begins with those of `regions` that are on a device.
    pub fn new<'a>(
        regions: &(impl Iterator<Item = &'a Region<'a>> + Clone),
        transfer: &Transfer,
    ) -> Result<Self> {
        let mut drains: Vec<(i32, Drain)> = Vec::new();
        for ordinal in regions.clone().filter_map(Region::device) {
            if drains.iter().any(|(of, _)| *of == ordinal) {
                continue;
            }
            let of_device = regions.clone().filter(|region| region.device() == Some(ordinal));
            let parts: Vec<_> = of_device.filter_map(Region::device_part).collect();
            drains.push((ordinal, Drain::new(&parts, transfer)?));
        }
        Ok(Self { drains })
    }

    /// Gives the bytes of a region on a device, the next of its device, to `take`, piece by piece.
    pub fn region(&mut self, region: &Region<'_>, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let drain = self.drains.iter_mut().find(|(of, _)| Some(*of) == region.device());
        let (_, drain) = drain.ok_or_else(|| Error::Internal(format!("{region:?} was not begun with")))?;
        let mut left = region.bytes();
        while left > 0 {
            let bytes = drain.next_piece()?;
            take(bytes)?;
            left = left.checked_sub(bytes.len() as u64).filter(|_| !bytes.is_empty()).ok_or_else(|| {
                Error::Internal(format!("{} bytes came for the last {left} of a region", bytes.len()))
            })?;
        }
        Ok(())
    }
}
