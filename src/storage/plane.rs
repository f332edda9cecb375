//! A plane: one layer's K or V of one stream, wherever its bytes are.
#![allow(unsafe_code, reason = "planes own or borrow raw memory; the copy loops are in `host`")]

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::PlaneShape;
use super::host::{self, ALIGN, Allocation, Grid, to_usize};
use crate::error::{Error, Result};
use crate::types::{Move, Run};

/// How the owner of a tensor gives and takes its bytes. Offsets are in bytes, from the tensor's start.
pub trait TensorAccess: Send + Sync + std::fmt::Debug {
    /// Fills `out` with the bytes of `tensor` from `offset` on.
    ///
    /// # Errors
    /// Whatever keeps the owner from it; the state is not written then.
    fn get(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Writes `bytes` to `tensor` from `offset` on.
    ///
    /// # Errors
    /// Whatever keeps the owner from it; the destination is emptied then.
    fn set(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// Where a plane's bytes are.
#[derive(Debug)]
enum Memory {
    /// In host memory, which is kept unless it is the caller's.
    Host { grid: Grid, _allocation: Option<Arc<Allocation>> },
    /// Behind calls of their owner.
    Remote(Arc<dyn TensorAccess>),
}

/// One layer's K or V of one stream.
///
/// Invariant: a host `grid` is `shape` at memory that is valid for `shape.span(kv_size)` bytes and initialised,
/// and that is written, as far as this crate goes, through `&mut` of this plane only. `shape` passed
/// [`PlaneShape::check`] with `kv_size`.
#[derive(Debug)]
pub struct Plane {
    memory: Memory,
    kv_size: u32,
    shape: PlaneShape,
    /// The owner's name for it.
    tensor: usize,
}

// SAFETY: nothing in a Plane is tied to a thread: memory of `Allocation` can be used and freed on any, `adopt`
// demands the same of the caller's, and `TensorAccess` is Send.
unsafe impl Send for Plane {}
// SAFETY: through `&Plane` its memory is only read; `as_ptr` gives an address, whose use is up to `unsafe` code;
// `TensorAccess` is Sync.
unsafe impl Sync for Plane {}

impl Plane {
    /// Takes the caller's memory as a plane; it is left as it is, and not freed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `ptr` is NULL or `shape` does not pass [`PlaneShape::check`].
    ///
    /// # Safety
    /// For the life of the plane, the `shape.span(kv_size)` bytes at `ptr` are valid for reads and writes from
    /// any thread and initialised, and no element of another plane lies on an element of this one. While a call
    /// reads the plane, or a slice lent by [`super::Region::as_contiguous`] lives, nobody else writes them; while
    /// a call writes the plane, nobody else reads or writes them. No other Rust reference to them is passed in.
    pub unsafe fn adopt(ptr: *mut u8, kv_size: u32, shape: PlaneShape) -> Result<Self> {
        let Some(ptr) = NonNull::new(ptr) else {
            return Err(Error::arg("ptr", "is NULL"));
        };
        shape.check(kv_size).map_err(|reason| Error::arg("shape", reason))?;
        let memory = Memory::Host { grid: Grid::new(ptr, shape)?, _allocation: None };
        Ok(Self { memory, kv_size, shape, tensor: 0 })
    }

    /// A tensor that can be reached through calls of its owner only: memory of a device, say.
    ///
    /// `tensor` is the owner's name for it. Offsets in the calls count from cell 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `shape` does not pass [`PlaneShape::check`].
    pub fn remote(
        access: Arc<dyn TensorAccess>,
        tensor: usize,
        kv_size: u32,
        shape: PlaneShape,
    ) -> Result<Self> {
        shape.check(kv_size).map_err(|reason| Error::arg("shape", reason))?;
        Ok(Self { memory: Memory::Remote(access), kv_size, shape, tensor })
    }

    /// The plane with its owner's name for the tensor, which [`super::Region::tensor`] gives back.
    #[must_use]
    pub fn named(self, tensor: usize) -> Self {
        Self { tensor, ..self }
    }

    /// Zeroed planes of `kv_size` cells, one for each shape, all in one allocation.
    ///
    /// Each starts at a multiple of 64 bytes. Pages that are never written cost no memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a shape does not pass [`PlaneShape::check`], [`Error::OutOfMemory`] if
    /// the memory cannot be had.
    pub fn allocate(shapes: &[PlaneShape], kv_size: u32) -> Result<Vec<Self>> {
        let mut offsets = Vec::with_capacity(shapes.len());
        let mut size = 0_u64;
        for shape in shapes {
            shape.check(kv_size).map_err(|reason| Error::arg("shape", reason))?;
            offsets.push(size);
            let span = shape.span(kv_size).and_then(|span| span.checked_next_multiple_of(ALIGN as u64));
            size = size.saturating_add(span.unwrap_or(u64::MAX));
        }
        if shapes.is_empty() {
            return Ok(Vec::new());
        }
        let memory = Arc::new(Allocation::zeroed(size)?);
        let plane = |(&shape, offset): (&PlaneShape, u64)| {
            let offset = to_usize(offset)?;
            // SAFETY: the allocation has `size` bytes from its aligned start on, and `offset + span` lies in it.
            let ptr = unsafe { memory.start.add(offset) };
            let grid = Grid::new(ptr, shape)?;
            let memory = Memory::Host { grid, _allocation: Some(Arc::clone(&memory)) };
            Ok(Self { memory, kv_size, shape, tensor: 0 })
        };
        shapes.iter().zip(offsets).map(plane).collect()
    }

    /// Number of cells.
    #[must_use]
    pub fn kv_size(&self) -> u32 {
        self.kv_size
    }

    /// How the bytes lie.
    #[must_use]
    pub fn shape(&self) -> PlaneShape {
        self.shape
    }

    /// Address of cell 0, for engines. They use the plane's memory on the terms of [`Plane::adopt`], whoever
    /// allocated it. NULL if the plane is remote.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.memory {
            Memory::Host { grid, .. } => grid.ptr,
            Memory::Remote(_) => std::ptr::null_mut(),
        }
    }

    /// The owner's name for the tensor, 0 if it gave none.
    pub(super) fn tensor(&self) -> usize {
        self.tensor
    }

    /// Zeroes the cells of `runs`, and no byte between them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] as for [`super::Region::new`]; nothing is written then.
    pub fn zero(&mut self, runs: &[Run]) -> Result<()> {
        self.check_runs(runs)?;
        match &self.memory {
            Memory::Host { grid, .. } => {
                // SAFETY: the runs lie in the plane, which is ours to write.
                unsafe { host::zero(*grid, runs) };
                Ok(())
            }
            Memory::Remote(access) => {
                let zeroes = vec![0; 1 << 16];
                let channels = 0..self.shape.strides().n_channel;
                self.shape.each_piece(runs, &channels, |mut offset, mut bytes| {
                    while bytes > 0 {
                        let n = bytes.min(zeroes.len());
                        access.set(self.tensor, offset, &zeroes[..n])?;
                        offset += n as u64;
                        bytes -= n;
                    }
                    Ok(())
                })
            }
        }
    }

    /// Zeroes every cell, and no byte between cells.
    ///
    /// # Errors
    /// If the plane is remote and its owner's call fails.
    pub fn zero_all(&mut self) -> Result<()> {
        self.zero(&[Run { start: 0, len: self.kv_size }])
    }

    /// Copies the cells of `runs` from another plane to the same cells of this one (`seq_cp` across streams).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `src` has another shape or size, and as for [`super::Region::new`];
    /// nothing is written then.
    pub fn copy_cells_from(&mut self, src: &Self, runs: &[Run]) -> Result<()> {
        if (src.shape, src.kv_size) != (self.shape, self.kv_size) {
            let of = |plane: &Self| format!("{:?} with {} cells", plane.shape, plane.kv_size);
            return Err(Error::arg("src", format!("is {} (expected {})", of(src), of(self))));
        }
        self.check_runs(runs)?;
        let (Memory::Host { grid: to, .. }, Memory::Host { grid: from, .. }) = (&self.memory, &src.memory)
        else {
            return Err(Error::arg("src", "is remote, and its owner has no call to copy between tensors"));
        };
        let moves = runs.iter().map(|run| Move { src: run.start, dst: run.start, len: run.len });
        // SAFETY: the runs lie in both planes, which are of one shape; this one is ours to write; elements of
        // two planes do not overlap.
        unsafe { host::copy(*to, *from, moves) };
        Ok(())
    }

    /// Checks that `runs` are cells of this plane, and counts them.
    pub(super) fn check_runs(&self, runs: &[Run]) -> Result<u32> {
        check_ranges("runs", runs.iter().map(|run| (run.start, run.len)), self.kv_size)
    }

    /// Copies `channels` of the cells of `runs` to `out`, in blob order.
    pub(super) fn read(&self, runs: &[Run], channels: &Range<u32>, out: &mut [u8]) -> Result<()> {
        let n_cells = self.check_runs(runs)?;
        let n_channel = u64::from(channels.end - channels.start);
        let need = u64::from(n_cells) * self.shape.strides().elem_size * n_channel;
        if need != out.len() as u64 {
            return Err(Error::BufferTooSmall { need, size: out.len() as u64 });
        }
        match &self.memory {
            Memory::Host { grid, .. } => {
                let grid = grid.channels(channels);
                let mut dst = 0;
                let moves = runs.iter().map(|run| {
                    dst += run.len;
                    Move { src: run.start, dst: dst - run.len, len: run.len }
                });
                // SAFETY: the runs lie in the plane and the channels too; `out` has just the bytes of `n_cells`
                // cells, which the moves fill one by one; by `adopt` a `&mut [u8]` does not lie on a plane.
                unsafe { host::copy(grid.blob(out.as_mut_ptr(), n_cells), grid, moves) };
                Ok(())
            }
            Memory::Remote(access) => {
                let mut out = out;
                self.shape.each_piece(runs, channels, |offset, bytes| {
                    let (piece, rest) = std::mem::take(&mut out).split_at_mut(bytes);
                    out = rest;
                    access.get(self.tensor, offset, piece)
                })
            }
        }
    }

    /// Checks what [`Plane::write`] demands.
    pub(super) fn check_write(&self, moves: &[Move], n_src: u32, src: &[u8]) -> Result<()> {
        let need = u64::from(n_src).checked_mul(self.shape.cell_bytes());
        if need != Some(src.len() as u64) {
            let cells = format!("{n_src} cells of {} bytes", self.shape.cell_bytes());
            return Err(Error::arg("src", format!("has {} bytes (expected {cells})", src.len())));
        }
        check_ranges("moves.dst", moves.iter().map(|m| (m.dst, m.len)), self.kv_size)?;
        check_ranges("moves.src", moves.iter().map(|m| (m.src, m.len)), n_src)?;
        Ok(())
    }

    /// Copies cells of `src`, which are `n_src` in blob order, to cells of the plane.
    pub(super) fn write(&mut self, moves: &[Move], n_src: u32, src: &[u8]) -> Result<()> {
        self.check_write(moves, n_src, src)?;
        match &self.memory {
            Memory::Host { grid, .. } => {
                let blob = grid.blob(src.as_ptr().cast_mut(), n_src);
                // SAFETY: the moves lead from cells of `src`, which is only read, to cells of the plane, which is
                // ours to write; a `&[u8]` does not lie on it: not by `adopt`, nor made by `contiguous`, which
                // borrows it.
                unsafe { host::copy(*grid, blob, moves.iter().copied()) };
                Ok(())
            }
            Memory::Remote(access) => {
                // No overflow, and all inside `src`: it has the bytes of `n_src` cells, which the moves name.
                let s = self.shape.strides();
                let n_src = u64::from(n_src);
                for channel in 0..s.n_channel {
                    for m in moves {
                        let mut at = to_usize((u64::from(channel) * n_src + u64::from(m.src)) * s.elem_size)?;
                        let run = Run { start: m.dst, len: m.len };
                        self.shape.each_piece(&[run], &(channel..channel + 1), |offset, bytes| {
                            at += bytes;
                            access.set(self.tensor, offset, &src[at - bytes..at])
                        })?;
                    }
                }
                Ok(())
            }
        }
    }

    /// `channels` of the cells of `run`, if they lie in memory just as in a blob.
    pub(super) fn contiguous(&self, run: Run, channels: &Range<u32>) -> Option<&[u8]> {
        self.check_runs(&[run]).ok()?;
        let Memory::Host { grid, .. } = &self.memory else { return None };
        let grid = grid.channels(channels);
        let bytes = run.len as usize * grid.elem_size;
        let one_channel = run.len == 1 || grid.cell_stride == grid.elem_size;
        let all_channels = grid.n_channel == 1 || grid.channel_stride == bytes;
        (one_channel && all_channels).then(|| {
            // SAFETY: without gaps, the elements of these cells are this many bytes of the plane from the first
            // on; they are initialised, and nobody writes them while `&self` lasts.
            unsafe { slice::from_raw_parts(grid.at(0, run.start), bytes * grid.n_channel) }
        })
    }
}

/// Checks that none of the ranges (start, len) is empty or leaves `0..size`, and that they have no more than
/// `size` cells together, which they return.
fn check_ranges(name: &str, ranges: impl Iterator<Item = (u32, u32)>, size: u32) -> Result<u32> {
    let mut n_cells = 0_u32;
    for (start, len) in ranges {
        if len == 0 || start.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::arg(name, format!("{len} cells at {start} are not among {size} cells")));
        }
        match n_cells.checked_add(len) {
            Some(sum) if sum <= size => n_cells = sum,
            _ => return Err(Error::arg(name, format!("have more than {size} cells"))),
        }
    }
    Ok(n_cells)
}
