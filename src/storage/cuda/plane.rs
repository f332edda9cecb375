//! Planes in the memory of a device.

use std::sync::Arc;

use super::device::Device;
use super::driver::DevicePtr;
use super::memory::{ALIGN, DeviceMemory};
use super::moves::elem_size;
use crate::error::{Error, Result};
use crate::storage::region::Rectangle;
use crate::storage::{PlaneShape, Transfer};
use crate::types::Run;

/// Elements in the memory of a device: channel `j` of cell `c` at `ptr + j * channel_stride + c * cell_stride`.
#[derive(Clone, Copy, Debug)]
pub(in crate::storage) struct DeviceGrid {
    pub ptr: DevicePtr,
    pub n_channel: u32,
    pub elem_size: u32,
    pub cell_stride: u64,
    pub channel_stride: u64,
}

impl DeviceGrid {
    fn new(ptr: DevicePtr, shape: PlaneShape) -> Result<Self> {
        let s = shape.strides();
        Ok(Self {
            ptr,
            n_channel: s.n_channel,
            elem_size: elem_size(s.elem_size)?,
            cell_stride: s.cell_stride,
            channel_stride: s.channel_stride,
        })
    }

    /// Address of an element, which lies in the plane.
    pub fn at(&self, channel: u32, cell: u32) -> DevicePtr {
        self.ptr + u64::from(channel) * self.channel_stride + u64::from(cell) * self.cell_stride
    }

    /// Every channel of the blob cells below `n_cells`.
    pub fn all(&self, n_cells: u32) -> Rectangle {
        Rectangle { channels: 0..self.n_channel, cells: 0..n_cells, elem_size: self.elem_size.into() }
    }

    /// Where the bytes of `block` start, if they lie there just as in a blob; `run`: its cells in the plane.
    pub fn contiguous(&self, run: Run, block: &Rectangle) -> Option<DevicePtr> {
        let one_channel = run.len == 1 || self.cell_stride == u64::from(self.elem_size);
        let n_channel = block.channels.end - block.channels.start;
        let all_channels = n_channel == 1 || self.channel_stride == block.channel_bytes();
        (one_channel && all_channels).then(|| self.at(block.channels.start, run.start))
    }
}

/// A plane in the memory of a device.
#[derive(Clone, Debug)]
pub(in crate::storage) struct DevicePlane {
    pub device: Arc<Device>,
    pub grid: DeviceGrid,
    /// `None`: the memory is the caller's.
    pub(super) allocation: Option<Arc<DeviceMemory>>,
}

impl DevicePlane {
    /// The caller's memory at `ptr`, on whatever device it is.
    pub fn adopt(ptr: DevicePtr, kv_size: u32, shape: PlaneShape) -> Result<Self> {
        super::probe()?;
        let Some(ordinal) = Device::ordinal_of(ptr) else {
            return Err(Error::arg("ptr", format!("{ptr:#x} is no memory of a device")));
        };
        // One allocation can be several mappings, so where it ends is not asked for.
        let span = shape.span(kv_size).unwrap_or(u64::MAX);
        let last = ptr.checked_add(span - 1);
        if last.and_then(Device::ordinal_of) != Some(ordinal) {
            let reason = format!("the {span} bytes from {ptr:#x} on leave the memory of device {ordinal}");
            return Err(Error::arg("ptr", reason));
        }
        Ok(Self { device: Device::open(ordinal)?, grid: DeviceGrid::new(ptr, shape)?, allocation: None })
    }

    /// Whether the memory is ours.
    pub fn is_allocated(&self) -> bool {
        self.allocation.is_some()
    }

    /// Zeroed planes of `kv_size` cells, one for each shape, all in one allocation.
    pub fn allocate(device: &Arc<Device>, shapes: &[PlaneShape], kv_size: u32) -> Result<Vec<Self>> {
        let (offsets, size) = offsets_of(shapes, kv_size);
        let memory = Arc::new(DeviceMemory::new(device, size, "the cache on the device")?);
        device.zero(memory.ptr, size)?;
        Self::in_memory(&memory, shapes, &offsets)
    }

    /// Planes that are filled on the device's own streams, each of its shape and number of cells, in one allocation.
    pub fn allocate_copies(device: &Arc<Device>, shapes: &[(PlaneShape, u32)]) -> Result<Vec<Self>> {
        // They touch: a range of them is a range of the memory.
        let (offsets, size) = offsets(shapes.iter().map(|&(shape, kv_size)| shape.span(kv_size)), 1);
        let memory = DeviceMemory::on_stream(device, size, "a snapshot on the device", device.stream)?;
        let shapes: Vec<_> = shapes.iter().map(|&(shape, _)| shape).collect();
        Self::in_memory(&Arc::new(memory), &shapes, &offsets)
    }

    /// The same memory from another address on.
    pub fn starting_at(&self, ptr: DevicePtr) -> Self {
        Self { grid: DeviceGrid { ptr, ..self.grid }, ..self.clone() }
    }

    /// Bytes from `offset` on, which lie in the plane.
    pub fn get(&self, offset: u64, out: &mut [u8], transfer: &Transfer) -> Result<()> {
        let mut lane = transfer.staging.lane(&self.device)?;
        let bound = self.device.bind()?;
        lane.join(&bound, transfer.stream_of(&self.device))?;
        // SAFETY: `out` is borrowed until the copy has been waited for, here or in the drop of the lane.
        unsafe { lane.to_host(&bound, out.as_mut_ptr(), self.grid.ptr + offset, out.len() as u64)? };
        lane.wait(&bound)
    }

    /// Writes bytes from `offset` on, which lie in the plane.
    pub fn set(&self, offset: u64, bytes: &[u8], transfer: &Transfer) -> Result<()> {
        let mut lane = transfer.staging.lane(&self.device)?;
        let bound = self.device.bind()?;
        lane.join(&bound, transfer.stream_of(&self.device))?;
        // SAFETY: `bytes` are borrowed until the copy has been waited for, here or in the drop of the lane.
        unsafe { lane.to_device(&bound, self.grid.ptr + offset, bytes.as_ptr(), bytes.len() as u64)? };
        lane.wait(&bound)
    }

    /// Zeroes `size` bytes from the start on, and waits for it.
    pub fn zero(&self, size: u64, transfer: &Transfer) -> Result<()> {
        let mut lane = transfer.staging.lane(&self.device)?;
        let bound = self.device.bind()?;
        let caller = transfer.stream_of(&self.device);
        lane.join(&bound, caller)?;
        lane.zero(&bound, self.grid.ptr, size)?;
        lane.release(&bound, caller)
    }

    pub(super) fn in_memory(
        memory: &Arc<DeviceMemory>,
        shapes: &[PlaneShape],
        offsets: &[u64],
    ) -> Result<Vec<Self>> {
        let plane = |(&shape, offset): (&PlaneShape, &u64)| {
            let grid = DeviceGrid::new(memory.ptr + offset, shape)?;
            Ok(Self { device: Arc::clone(&memory.device), grid, allocation: Some(Arc::clone(memory)) })
        };
        shapes.iter().zip(offsets).map(plane).collect()
    }
}

/// Where planes of these shapes lie in an allocation, and its size, at least 1.
fn offsets_of(shapes: &[PlaneShape], kv_size: u32) -> (Vec<u64>, u64) {
    offsets(shapes.iter().map(|shape| shape.span(kv_size)), ALIGN)
}

/// Where pieces of these sizes lie in an allocation, at multiples of `align`, and its size, at least 1.
fn offsets(sizes: impl Iterator<Item = Option<u64>>, align: u64) -> (Vec<u64>, u64) {
    let mut size = 0_u64;
    let offsets = sizes.map(|bytes| {
        let offset = size;
        let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(align));
        size = size.saturating_add(bytes.unwrap_or(u64::MAX));
        offset
    });
    let offsets = offsets.collect();
    (offsets, size.max(1))
}
