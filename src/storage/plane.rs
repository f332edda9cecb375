//! A plane: one layer's K or V of one stream, wherever its bytes are.
#![allow(unsafe_code, reason = "planes own or borrow raw memory; the copy loops are in `host`")]

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::host::{self, ALIGN, Allocation, Grid, How, to_usize};
use super::kernels::Kernels;
use super::region::Rectangle;
use super::{CellMap, PlaneShape};
use crate::error::{Error, Result};
use crate::types::Run;

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
    pub(crate) fn tensor(&self) -> usize {
        self.tensor
    }

    /// Whether it is reached through calls of its owner.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self.memory, Memory::Remote(_))
    }

    /// The row of a cell, to be changed in place; `None` without such a row in host memory.
    pub(super) fn row_mut(&mut self, cell: u32) -> Option<&mut [u8]> {
        let (Memory::Host { grid, .. }, PlaneShape::Rows { .. }) = (&self.memory, self.shape) else {
            return None;
        };
        // SAFETY: the row lies in the plane, which is initialised, and only `&mut self` writes or lends it meanwhile.
        (cell < self.kv_size).then(|| unsafe { slice::from_raw_parts_mut(grid.at(0, cell), grid.elem_size) })
    }

    /// Asks the owner of a remote plane for bytes.
    pub(super) fn remote_get(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let Memory::Remote(access) = &self.memory else { return Err(Error::Internal(format!("{self:?}"))) };
        access.get(self.tensor, offset, out)
    }

    /// Gives bytes to the owner of a remote plane.
    pub(super) fn remote_set(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let Memory::Remote(access) = &self.memory else { return Err(Error::Internal(format!("{self:?}"))) };
        access.set(self.tensor, offset, bytes)
    }

    /// Zeroes every cell, and no byte between cells.
    ///
    /// # Errors
    /// If the plane is remote and its owner's call fails.
    pub fn zero_all(&mut self) -> Result<()> {
        let all = Run { start: 0, len: self.kv_size };
        match &self.memory {
            Memory::Host { grid, .. } => {
                // SAFETY: the run is all of the plane, which is ours to write.
                unsafe { host::zero(*grid, all) };
                Ok(())
            }
            Memory::Remote(access) => {
                let zeroes = vec![0; 1 << 16];
                let channels = 0..self.shape.strides().n_channel;
                self.shape.each_piece(&[all].into_iter(), channels, |mut offset, mut bytes| {
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

    /// Copies the cells of the stream that `map` names from another plane to the same cells of this one (`seq_cp`
    /// across streams).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `src` has another shape or size, or the map leaves the plane; nothing is written
    /// then.
    pub fn copy_cells_from(&mut self, src: &Self, map: &CellMap) -> Result<()> {
        if (src.shape, src.kv_size) != (self.shape, self.kv_size) {
            let of = |plane: &Self| format!("{} cells of {}", plane.kv_size, plane.shape);
            return Err(Error::arg("src", format!("is {} (expected {})", of(src), of(self))));
        }
        self.check_cells(map)?;
        let (Memory::Host { grid: to, .. }, Memory::Host { grid: from, .. }) = (&self.memory, &src.memory)
        else {
            return Err(Error::arg("src", "is remote, and its owner has no call to copy between tensors"));
        };
        let how = How { kernels: Kernels::get(), streams: false };
        // SAFETY: the cells lie in both planes, which are of one shape; this one is ours to write; elements of
        // two planes do not overlap.
        unsafe { how.copy_plane(*to, *from, map.runs_in(0..map.src_end())) };
        Ok(())
    }

    /// Checks that the map names cells of this plane.
    pub(super) fn check_cells(&self, map: &CellMap) -> Result<()> {
        if map.dst_end() <= self.kv_size {
            return Ok(());
        }
        let last = map.dst_end() - 1;
        Err(Error::arg("map", format!("cell {last} is not among the {} of the plane", self.kv_size)))
    }

    /// Copies the blob's cells of `block` to `out`, in blob order.
    pub(super) fn read(&self, map: &CellMap, block: &Rectangle, out: &mut [u8], how: How) -> Result<()> {
        self.check_block(map, block, out.len())?;
        match &self.memory {
            Memory::Host { grid, .. } => {
                let grid = grid.channels(&block.channels);
                // SAFETY: the map's cells lie in the plane and the channels too, as was checked; `out` has just the
                // bytes of the block; by `adopt` a `&mut [u8]` does not lie on a plane.
                unsafe { how.gather(grid, self.kv_size, map, block.cells.clone(), out.as_mut_ptr()) };
                Ok(())
            }
            Memory::Remote(access) => {
                let mut out = out;
                let runs = map.runs_in(block.cells.clone());
                self.shape.each_piece(&runs, block.channels.clone(), |offset, bytes| {
                    let (piece, rest) = std::mem::take(&mut out).split_at_mut(bytes);
                    out = rest;
                    access.get(self.tensor, offset, piece)
                })
            }
        }
    }

    /// Checks what a restore of `n_src` cells of `bytes` bytes demands.
    pub(super) fn check_write(&self, map: &CellMap, n_src: u32, bytes: u64) -> Result<()> {
        let need = u64::from(n_src).checked_mul(self.shape.cell_bytes());
        if need != Some(bytes) {
            let cells = format!("{n_src} cells of {} bytes", self.shape.cell_bytes());
            return Err(Error::arg("src", format!("has {bytes} bytes (expected {cells})")));
        }
        if map.src_end() > n_src {
            let last = map.src_end() - 1;
            return Err(Error::arg("map", format!("cell {last} is not among the {n_src} of the blob")));
        }
        self.check_cells(map)
    }

    /// Copies the blob's cells of `block`, which are `src`, to cells of the plane.
    ///
    /// # Safety
    /// The plane is borrowed for writing, and no other call reads or writes the cells of the block meanwhile.
    pub(super) unsafe fn write(&self, map: &CellMap, block: &Rectangle, src: &[u8], how: How) -> Result<()> {
        self.check_block(map, block, src.len())?;
        match &self.memory {
            Memory::Host { grid, .. } => {
                let grid = grid.channels(&block.channels);
                // SAFETY: the map's cells lie in the plane, as was checked, which the caller may write; `src` has just
                // the bytes of the block; a `&[u8]` does not lie on a plane: not by `adopt`, nor made by `contiguous`,
                // which borrows it.
                unsafe { how.scatter(grid, map, block.cells.clone(), src.as_ptr()) };
                Ok(())
            }
            Memory::Remote(access) => {
                let cells = u64::from(block.cells.end - block.cells.start);
                for channel in block.channels.clone() {
                    for m in map.moves_in(block.cells.clone()) {
                        // No overflow, and all inside `src`: it has the bytes of the block, which the moves are of.
                        let at = u64::from(channel - block.channels.start) * cells
                            + u64::from(m.src - block.cells.start);
                        let mut at = to_usize(at * block.elem_size)?;
                        let run = Run { start: m.dst, len: m.len };
                        self.shape.each_piece(
                            &[run].into_iter(),
                            channel..channel + 1,
                            |offset, bytes| {
                                at += bytes;
                                access.set(self.tensor, offset, &src[at - bytes..at])
                            },
                        )?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Checks that a piece of a batch fits the plane and its bytes. Always so: it is what `unsafe` code relies on.
    fn check_block(&self, map: &CellMap, block: &Rectangle, bytes: usize) -> Result<()> {
        let s = self.shape.strides();
        let fits = block.channels.end <= s.n_channel
            && block.elem_size == s.elem_size
            && block.bytes() == bytes as u64
            && map.dst_end() <= self.kv_size;
        if fits { Ok(()) } else { Err(Error::Internal(format!("{block:?} of {bytes} bytes in {self:?}"))) }
    }

    /// `channels` of the cells of `run`, which are the plane's, if they lie in memory just as in a blob.
    pub(super) fn contiguous(&self, run: Run, channels: &Range<u32>) -> Option<&[u8]> {
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
