//! From planes of a device to the host.
//!
//! Kernels bring scattered cells of a chunk into a staging buffer of the device, a copy brings the chunk to a pinned
//! buffer, and whoever wants the bytes takes them from there: three stages that work on three chunks at a time.

use std::sync::Arc;

use super::chunks::{Chunk, Part, Way, largest_element, plan};
use super::device::{Bound, to_usize};
use super::driver::DevicePtr;
use super::lane::LaneGuard;
use super::memory::is_pinned;
use super::scatter::wait_for_blobs;
use crate::error::Result;
use crate::storage::Transfer;
use crate::storage::batch::copy_slices;
use crate::storage::pieces::Report;

/// Chunks of a batch of one device on their way to the host, in order.
#[derive(Debug)]
pub(in crate::storage) struct Drain {
    lane: LaneGuard,
    table: DevicePtr,
    chunks: Vec<Chunk>,
    /// Chunks that were queued.
    queued: usize,
    /// Chunks that were taken; their pinned buffers can be filled again, but for the last one's while it is in use.
    taken: usize,
    /// Index of the next piece in the last chunk that was taken; 0: all of it has been given out.
    piece: usize,
}

/// The next bytes of a part's blob.
#[derive(Debug)]
struct Arrived<'a> {
    /// Index of the part.
    part: usize,
    bytes: &'a [u8],
}

impl Drain {
    /// Begins to bring the blobs of `parts`, which are all of one device, to the host.
    pub fn new(parts: &[Part<'_>], transfer: &Transfer) -> Result<Self> {
        let device = &parts.first().expect("a batch has parts").plane.device;
        let mut lane = transfer.staging.lane(device)?;
        let bound = device.bind()?;
        let total = parts.iter().map(|part| part.block.bytes()).sum();
        lane.stage(&bound, largest_element(parts), total)?;
        let (mut table, chunks) = plan(parts, Way::Gather, lane.capacity(), &lane.buffer_ptrs());
        lane.join(&bound, transfer.stream_of(device))?;
        for stream in [lane.compute, lane.copy] {
            wait_for_blobs(stream, parts.iter().map(|part| part.plane))?;
        }
        let table = lane.upload_moves(&bound, &mut table)?;
        Ok(Self { lane, table, chunks, queued: 0, taken: 0, piece: 0 })
    }

    /// Waits for the next chunk; false: all have arrived. The one before has been used.
    fn arrive(&mut self) -> Result<bool> {
        let device = Arc::clone(&self.lane.device);
        let bound = device.bind()?;
        while self.queued < self.chunks.len() && self.queued - self.taken < self.lane.pinned.len() {
            self.queue(&bound)?;
        }
        if self.taken == self.chunks.len() {
            self.lane.wait(&bound)?;
            return Ok(false);
        }
        let buffer = &self.lane.pinned[self.taken % self.lane.pinned.len()];
        // SAFETY: a live event of the device.
        unsafe { bound.driver().event_synchronize(bound.ordinal(), buffer.copied.0)? };
        self.taken += 1;
        Ok(true)
    }

    /// The next chunk, when it has arrived; `None`: all have. Its bytes are there until the next call.
    fn next_chunk(&mut self) -> Result<Option<Vec<Arrived<'_>>>> {
        if !self.arrive()? {
            return Ok(None);
        }
        let bytes = self.lane.pinned[(self.taken - 1) % self.lane.pinned.len()].memory.bytes();
        let arrived = self.chunks[self.taken - 1].pieces.iter().map(|piece| {
            let at = to_usize(piece.at)?;
            Ok(Arrived { part: piece.part, bytes: &bytes[at..][..to_usize(piece.len)?] })
        });
        arrived.collect::<Result<_>>().map(Some)
    }

    /// The next piece, when it has arrived; empty: all have. Its bytes are there until the next call.
    pub fn next_piece(&mut self) -> Result<&[u8]> {
        if self.piece == 0 && !self.arrive()? {
            return Ok(&[]);
        }
        let chunk = &self.chunks[self.taken - 1];
        let piece = chunk.pieces[self.piece];
        self.piece = (self.piece + 1) % chunk.pieces.len();
        let buffer = &self.lane.pinned[(self.taken - 1) % self.lane.pinned.len()];
        Ok(&buffer.memory.bytes()[to_usize(piece.at)?..][..to_usize(piece.len)?])
    }

    /// Queues the next chunk's way to its pinned buffer.
    fn queue(&mut self, bound: &Bound<'_>) -> Result<()> {
        let chunk = &self.chunks[self.queued];
        let pinned = &self.lane.pinned[self.queued % self.lane.pinned.len()];
        let staged = self.gather(bound)?;
        let to = |at: u64| to_usize(at).map(|at| pinned.memory.as_ptr().wrapping_add(at));
        for (at, len) in chunk.staged() {
            // SAFETY: the range is one of the chunk, which fits the buffer; it is read when `copied` has been waited for,
            // and filled again when it was taken.
            unsafe { self.lane.to_host(bound, to(at)?, staged + at, len)? };
        }
        for piece in &chunk.pieces {
            if let Some(ptr) = piece.in_plane {
                // SAFETY: as above.
                unsafe { self.lane.to_host(bound, to(piece.at)?, ptr, piece.len)? };
            }
        }
        bound.record(pinned.copied, self.lane.copy)?;
        self.emptied(bound)
    }

    /// Queues the kernels of the next chunk; returns where its staging buffer is. What `copy` does next runs behind
    /// them.
    fn gather(&self, bound: &Bound<'_>) -> Result<DevicePtr> {
        let chunk = &self.chunks[self.queued];
        let buffer = &self.lane.buffers[self.queued % self.lane.buffers.len()];
        if !chunk.launches.is_empty() {
            if self.queued >= self.lane.buffers.len() {
                bound.wait(self.lane.compute, buffer.emptied)?;
            }
            self.lane.launch(bound, &chunk.launches, self.table)?;
            bound.record(buffer.filled, self.lane.compute)?;
            bound.wait(self.lane.copy, buffer.filled)?;
        }
        Ok(buffer.memory.ptr)
    }

    /// The copies of the next chunk are queued.
    fn emptied(&mut self, bound: &Bound<'_>) -> Result<()> {
        let buffer = &self.lane.buffers[self.queued % self.lane.buffers.len()];
        bound.record(buffer.emptied, self.lane.copy)?;
        self.queued += 1;
        Ok(())
    }

    /// Has the device write the blobs to `outs`, one for each part, and waits for it. They are pinned.
    fn write_to(&mut self, outs: &mut [&mut [u8]], report: &mut Report<'_>) -> Result<()> {
        let device = Arc::clone(&self.lane.device);
        let bound = device.bind()?;
        while self.queued < self.chunks.len() {
            let staged = self.gather(&bound)?;
            for piece in &self.chunks[self.queued].pieces {
                let out = &mut outs[piece.part][to_usize(piece.start)?..][..to_usize(piece.len)?];
                let src = piece.in_plane.unwrap_or(staged + piece.at);
                // SAFETY: `out` is borrowed until the copies have been waited for, in this call or in the drop of the
                // lane.
                unsafe { self.lane.to_host(&bound, out.as_mut_ptr(), src, piece.len)? };
            }
            self.emptied(&bound)?;
        }
        // The copies run by themselves: what can be told is how many there were.
        let bytes = self.chunks.iter().map(|chunk| chunk.len).sum();
        self.lane.wait(&bound)?;
        report.add(bytes)
    }
}

/// Writes the blob of each part, all of one device, to its `out`.
pub(in crate::storage) fn gather(
    parts: &[Part<'_>],
    mut outs: Vec<&mut [u8]>,
    transfer: &Transfer,
    report: &mut Report<'_>,
) -> Result<()> {
    let mut drain = Drain::new(parts, transfer)?;
    if outs.iter().all(|out| is_pinned(out)) {
        return drain.write_to(&mut outs, report);
    }
    while let Some(arrived) = drain.next_chunk()? {
        let copies = arrived.into_iter().map(|Arrived { part, bytes, .. }| {
            // Pieces arrive in order and without gaps.
            let (out, rest) = std::mem::take(&mut outs[part]).split_at_mut(bytes.len());
            outs[part] = rest;
            (out, bytes)
        });
        let copies: Vec<_> = copies.collect();
        let bytes = copies.iter().map(|(out, _)| out.len() as u64).sum();
        copy_slices(copies, transfer.threads)?;
        report.add(bytes)?;
    }
    Ok(())
}
