//! Cutting a batch into chunks that fit a staging buffer.

use super::driver::DevicePtr;
use super::moves::{Group, Launch, Table};
use super::plane::DevicePlane;
use crate::storage::CellMap;
use crate::storage::region::Rectangle;
use crate::types::Run;

/// Bytes from which on what lies in a plane as it does in a blob is copied from where it is: of less, many copies cost more
/// than one launch.
const COPY_MIN: u64 = 64 << 10;

/// One plane's part of a batch.
#[derive(Clone, Debug)]
pub(in crate::storage) struct Part<'a> {
    pub plane: &'a DevicePlane,
    pub map: &'a CellMap,
    pub block: Rectangle,
}

/// Neighbouring bytes of a part's blob, in a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Index of the part.
    pub part: usize,
    /// Offset in the part's blob.
    pub start: u64,
    pub len: u64,
    /// Offset in the chunk.
    pub at: u64,
    /// Where the bytes are in the plane, if they lie there as they do in the blob. Else a kernel brings them to the
    /// staging buffer, or away from it.
    pub in_plane: Option<DevicePtr>,
}

/// What goes through a staging buffer at a time; pieces lie in it one after another, without gaps.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    pub pieces: Vec<Piece>,
    pub len: u64,
    pub launches: Vec<Launch>,
}

impl Chunk {
    /// Ranges of the chunk that go through the staging buffer of the device.
    pub fn staged(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for piece in self.pieces.iter().filter(|piece| piece.in_plane.is_none()) {
            match ranges.last_mut() {
                Some((at, len)) if *at + *len == piece.at => *len += piece.len,
                _ => ranges.push((piece.at, piece.len)),
            }
        }
        ranges
    }
}

/// Which way a batch goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Gather,
    Scatter,
}

/// Bytes of the largest element of a batch: a chunk has room for at least that.
pub(super) fn largest_element(parts: &[Part<'_>]) -> u64 {
    parts.iter().map(|part| part.block.elem_size).max().unwrap_or(0)
}

/// Cuts `parts` into chunks of at most `capacity` bytes. Chunk `i` goes through the staging buffer at
/// `buffers[i % buffers.len()]`.
pub(super) fn plan(
    parts: &[Part<'_>],
    way: Way,
    capacity: u64,
    buffers: &[DevicePtr],
) -> (Table, Vec<Chunk>) {
    let mut plan = Plan {
        way,
        buffers,
        table: Table::default(),
        chunks: Vec::new(),
        chunk: Chunk::default(),
        group: Group::default(),
    };
    // Small enough that what is left of a chunk's room is little, large enough that the pieces are few.
    let unit = (capacity / 4).max(1);
    for (i, part) in parts.iter().enumerate() {
        if let Some(ptr) = contiguous(part, &part.block).filter(|_| part.block.bytes() >= COPY_MIN) {
            let mut start = 0;
            while start < part.block.bytes() {
                if plan.chunk.len == capacity {
                    plan.close();
                }
                let len = (part.block.bytes() - start).min(capacity - plan.chunk.len);
                plan.push(Piece { part: i, start, len, at: plan.chunk.len, in_plane: Some(ptr + start) });
                start += len;
            }
            continue;
        }
        let mut start = 0;
        for block in part.block.clone().split(unit) {
            let len = block.bytes();
            if part.map.moves_in(block.cells.clone()).next().is_some() {
                if plan.chunk.len + len > capacity {
                    plan.close();
                }
                let in_plane = contiguous(part, &block).filter(|_| len >= COPY_MIN);
                let at = plan.chunk.len;
                if in_plane.is_none() {
                    plan.stage(part, &block, at);
                }
                plan.push(Piece { part: i, start, len, at, in_plane });
            }
            start += len;
        }
    }
    plan.close();
    (plan.table, plan.chunks)
}

struct Plan<'a> {
    way: Way,
    buffers: &'a [DevicePtr],
    table: Table,
    chunks: Vec<Chunk>,
    chunk: Chunk,
    group: Group,
}

impl Plan<'_> {
    fn push(&mut self, piece: Piece) {
        self.chunk.len += piece.len;
        self.chunk.pieces.push(piece);
    }

    /// Has a kernel move `block` between the plane and `at` in the chunk's staging buffer.
    fn stage(&mut self, part: &Part<'_>, block: &Rectangle, at: u64) {
        let blob = self.buffers[self.chunks.len() % self.buffers.len()] + at;
        let grid = &part.plane.grid;
        match self.way {
            Way::Gather => self.table.gather(&mut self.group, grid, part.map, block, blob),
            Way::Scatter => self.table.scatter(&mut self.group, grid, part.map, block, blob),
        }
    }

    /// Begins the next chunk.
    fn close(&mut self) {
        let group = std::mem::take(&mut self.group);
        let mut chunk = std::mem::take(&mut self.chunk);
        if !chunk.pieces.is_empty() {
            chunk.launches = self.table.add(group);
            self.chunks.push(chunk);
        }
    }
}

/// Where all the bytes of a block are in the plane, if they lie there as they do in the blob.
fn contiguous(part: &Part<'_>, block: &Rectangle) -> Option<DevicePtr> {
    let mut moves = part.map.moves_in(block.cells.clone());
    let first = moves.next()?;
    let is_all = moves.next().is_none() && first.len == block.cells.end - block.cells.start;
    part.plane.grid.contiguous(Run { start: first.dst, len: first.len }, block).filter(|_| is_all)
}
