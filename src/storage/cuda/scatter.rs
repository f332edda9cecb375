//! From the host, or from a copy on the device, to planes of a device.
//!
//! The way of a gather back: a pinned buffer is filled, a copy brings it to the device, and kernels bring its elements to
//! their cells, or the copy itself does where cells are neighbours.

use std::ptr;
use std::sync::Arc;

use super::chunks::{Chunk, Part, Way, largest_element, plan};
use super::device::{Bound, Device, to_usize};
use super::driver::{DevicePtr, Handle};
use super::lane::{Lane, LaneGuard};
use super::memory::{DeviceMemory, is_pinned};
use super::moves::{Group, Table};
use super::plane::DevicePlane;
use crate::error::Result;
use crate::storage::batch::copy_slices;
use crate::storage::pieces::Report;
use crate::storage::{CellMap, TensorBytes, Transfer};

/// Allocates what [`scatter`] of `staged`, [`scatter_local`] of the others and, if they fail, [`zero_cells`] will need, and checks
/// that they can wait for the caller. All are of one device.
pub(in crate::storage) fn prepare(
    parts: &[Part<'_>],
    staged: &[Part<'_>],
    transfer: &Transfer,
) -> Result<()> {
    let Some(first) = parts.first() else { return Ok(()) };
    let device = &first.plane.device;
    let mut lane = transfer.staging.lane(device)?;
    let bound = device.bind()?;
    let mut table = Table::default();
    if !staged.is_empty() {
        lane.stage(&bound, largest_element(staged), staged.iter().map(|part| part.block.bytes()).sum())?;
        (table, _) = plan(staged, Way::Scatter, lane.capacity(), &lane.buffer_ptrs());
    }
    // As large as that of a scatter from the device: a move for each plane, and the same cells.
    let (mut zeroes, mut group) = (Table::default(), Group::default());
    for part in parts {
        zeroes.zero(&mut group, &part.plane.grid, part.map);
    }
    zeroes.add(group);
    lane.reserve_table(&bound, table.size().max(zeroes.size()))?;
    transfer.stream_of(device).map_or(Ok(()), |stream| stream.check(&bound))
}

/// Writes the moved cells of each part, all of one device, from its blob in `srcs`, which lies on the host.
pub(in crate::storage) fn scatter(
    parts: &[Part<'_>],
    srcs: &[TensorBytes<'_>],
    transfer: &Transfer,
    report: &mut Report<'_>,
) -> Result<()> {
    let Some(first) = parts.first() else { return Ok(()) };
    let device = &first.plane.device;
    let mut lane = transfer.staging.lane(device)?;
    let bound = device.bind()?;
    let total = parts.iter().map(|part| part.block.bytes()).sum();
    lane.stage(&bound, largest_element(parts), total)?;
    let (mut table, chunks) = plan(parts, Way::Scatter, lane.capacity(), &lane.buffer_ptrs());
    lane.join(&bound, transfer.stream_of(device))?;
    let table = lane.upload_moves(&bound, &mut table)?;
    let is_direct = srcs.iter().all(|src| matches!(src, TensorBytes::Memory(bytes) if is_pinned(bytes)));
    let mut fill = Fill { lane, table, chunks, srcs };
    for i in 0..fill.chunks.len() {
        if is_direct {
            fill.queue_pinned(&bound, i)?;
        } else {
            fill.queue(&bound, i, transfer)?;
        }
        report.add(fill.chunks[i].len)?;
    }
    // The caller may free the bytes, and has to be told of a failure.
    fill.lane.wait(&bound)
}

/// Chunks on their way to the planes.
struct Fill<'a> {
    lane: LaneGuard,
    table: DevicePtr,
    chunks: Vec<Chunk>,
    srcs: &'a [TensorBytes<'a>],
}

impl Fill<'_> {
    /// Fills a pinned buffer with a chunk, and queues its way to the planes.
    fn queue(&mut self, bound: &Bound<'_>, i: usize, transfer: &Transfer) -> Result<()> {
        let chunk = &self.chunks[i];
        let n_pinned = self.lane.pinned.len();
        let buffer = &mut self.lane.pinned[i % n_pinned];
        if i >= n_pinned {
            // SAFETY: a live event of the device.
            unsafe { bound.driver().event_synchronize(bound.ordinal(), buffer.copied.0)? };
        }
        fill_buffer(chunk, self.srcs, buffer.memory.bytes_mut(), transfer)?;
        let buffer = &self.lane.pinned[i % n_pinned];
        let staging = self.empty_buffer(bound, i)?;
        let from = |at: u64| to_usize(at).map(|at| buffer.memory.as_ptr().cast_const().wrapping_add(at));
        for (at, len) in chunk.staged() {
            // SAFETY: the range is one of the chunk, which fits the buffer; it is not filled again before `copied`.
            unsafe { self.lane.to_device(bound, staging + at, from(at)?, len)? };
        }
        for piece in &chunk.pieces {
            if let Some(ptr) = piece.in_plane {
                // SAFETY: as above.
                unsafe { self.lane.to_device(bound, ptr, from(piece.at)?, piece.len)? };
            }
        }
        bound.record(buffer.copied, self.lane.copy)?;
        self.scatter(bound, i)
    }

    /// Queues the way of a chunk to the planes from where its bytes are, which is pinned memory.
    fn queue_pinned(&mut self, bound: &Bound<'_>, i: usize) -> Result<()> {
        let staging = self.empty_buffer(bound, i)?;
        for piece in &self.chunks[i].pieces {
            let TensorBytes::Memory(src) = self.srcs[piece.part] else { continue };
            let src = &src[to_usize(piece.start)?..][..to_usize(piece.len)?];
            let dst = piece.in_plane.unwrap_or(staging + piece.at);
            // SAFETY: `src` is borrowed until the copies have been waited for, by the caller or in the drop of the lane.
            unsafe { self.lane.to_device(bound, dst, src.as_ptr(), piece.len)? };
        }
        self.scatter(bound, i)
    }

    /// The staging buffer of a chunk, to be filled by what `copy` does next.
    fn empty_buffer(&self, bound: &Bound<'_>, i: usize) -> Result<DevicePtr> {
        let buffer = &self.lane.buffers[i % self.lane.buffers.len()];
        if i >= self.lane.buffers.len() {
            bound.wait(self.lane.copy, buffer.emptied)?;
        }
        Ok(buffer.memory.ptr)
    }

    /// Queues the kernels of a chunk behind its copies.
    fn scatter(&self, bound: &Bound<'_>, i: usize) -> Result<()> {
        let buffer = &self.lane.buffers[i % self.lane.buffers.len()];
        if !self.chunks[i].launches.is_empty() {
            bound.record(buffer.filled, self.lane.copy)?;
            bound.wait(self.lane.compute, buffer.filled)?;
            self.lane.launch(bound, &self.chunks[i].launches, self.table)?;
        }
        bound.record(buffer.emptied, self.lane.compute)
    }
}

fn fill_buffer(
    chunk: &Chunk,
    srcs: &[TensorBytes<'_>],
    buffer: &mut [u8],
    transfer: &Transfer,
) -> Result<()> {
    let (mut buffer, mut copies) = (buffer, Vec::new());
    for piece in &chunk.pieces {
        let (out, rest) = std::mem::take(&mut buffer).split_at_mut(to_usize(piece.len)?);
        buffer = rest;
        match srcs[piece.part] {
            TensorBytes::Memory(bytes) => {
                copies.push((out, &bytes[to_usize(piece.start)?..][..to_usize(piece.len)?]));
            }
            ref src => src.read(piece.start, out)?,
        }
    }
    copy_slices(copies, transfer.threads)
}

/// A part whose blob lies on the same device as its plane.
#[derive(Debug)]
pub(in crate::storage) struct LocalPart<'a> {
    pub part: Part<'a>,
    /// A plane that is the blob: dense, with as many cells.
    pub blob: &'a DevicePlane,
}

/// Writes the moved cells of each part from its blob on the device; all are of one device.
pub(in crate::storage) fn scatter_local(parts: &[LocalPart<'_>], transfer: &Transfer) -> Result<()> {
    let Some(first) = parts.first() else { return Ok(()) };
    let device = &first.part.plane.device;
    let mut lane = transfer.staging.lane(device)?;
    let bound = device.bind()?;
    lane.join(&bound, transfer.stream_of(device))?;
    wait_for_blobs(lane.compute, parts.iter().map(|part| part.blob))?;
    let (mut table, mut group) = (Table::default(), Group::default());
    for LocalPart { part, blob } in parts {
        table.scatter(&mut group, &part.plane.grid, part.map, &part.block, blob.grid.ptr);
    }
    run(&mut lane, &bound, &mut table, group)?;
    lane.wait(&bound)
}

/// Writes the blob of each part to its plane on the same device, all on one, without waiting for it: the caller's stream
/// does.
pub(in crate::storage) fn gather_local(parts: &[LocalPart<'_>], transfer: &Transfer) -> Result<()> {
    let Some(first) = parts.first() else { return Ok(()) };
    let device = &first.part.plane.device;
    let mut lane = transfer.staging.lane(device)?;
    let bound = device.bind()?;
    let caller = transfer.stream_of(device);
    lane.join(&bound, caller)?;
    wait_for_blobs(lane.compute, parts.iter().map(|part| part.blob))?;
    let (mut table, mut group) = (Table::default(), Group::default());
    for LocalPart { part, blob } in parts {
        table.gather(&mut group, &part.plane.grid, part.map, &part.block, blob.grid.ptr);
    }
    run(&mut lane, &bound, &mut table, group)?;
    allocations(parts.iter().map(|part| part.blob)).try_for_each(|memory| memory.used_on(lane.compute))?;
    lane.release(&bound, caller)
}

/// Copies the cells that `map` names between planes of one device, `(dst, src)`; the caller's stream waits for it.
pub(in crate::storage) fn copy_cells(
    pairs: &[(&DevicePlane, &DevicePlane)],
    map: &CellMap,
    transfer: &Transfer,
) -> Result<()> {
    in_place(pairs.first().map(|(dst, _)| &dst.device), transfer, |table, group| {
        for (dst, src) in pairs {
            table.copy(group, &dst.grid, &src.grid, map);
        }
    })
}

/// Zeroes the cells of planes of one device that their maps name; the caller's stream waits for it.
pub(in crate::storage) fn zero_cells(parts: &[(&DevicePlane, &CellMap)], transfer: &Transfer) -> Result<()> {
    in_place(parts.first().map(|(plane, _)| &plane.device), transfer, |table, group| {
        for (plane, map) in parts {
            table.zero(group, &plane.grid, map);
        }
    })
}

fn in_place(
    device: Option<&Arc<Device>>,
    transfer: &Transfer,
    fill: impl FnOnce(&mut Table, &mut Group),
) -> Result<()> {
    let Some(device) = device else { return Ok(()) };
    let mut lane = transfer.staging.lane(device)?;
    let bound = device.bind()?;
    let caller = transfer.stream_of(device);
    lane.join(&bound, caller)?;
    let (mut table, mut group) = (Table::default(), Group::default());
    fill(&mut table, &mut group);
    run(&mut lane, &bound, &mut table, group)?;
    lane.release(&bound, caller)
}

fn run(lane: &mut Lane, bound: &Bound<'_>, table: &mut Table, group: Group) -> Result<()> {
    let launches = table.add(group);
    let at = lane.upload_moves(bound, table)?;
    lane.launch(bound, &launches, at)
}

/// Has `stream` run behind what fills blobs.
pub(super) fn wait_for_blobs<'a>(stream: Handle, blobs: impl Iterator<Item = &'a DevicePlane>) -> Result<()> {
    allocations(blobs).try_for_each(|memory| memory.wait_on(stream))
}

/// The allocations of blobs, once each: those in one are neighbours.
fn allocations<'a>(blobs: impl Iterator<Item = &'a DevicePlane>) -> impl Iterator<Item = &'a DeviceMemory> {
    let mut last = ptr::null();
    blobs.filter_map(|blob| blob.allocation.as_deref()).filter(move |&memory| {
        let before = std::mem::replace(&mut last, ptr::from_ref(memory));
        !ptr::eq(before, memory)
    })
}
