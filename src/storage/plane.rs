//! A plane: one layer's K or V of one stream, wherever its bytes are.
#![allow(unsafe_code, reason = "planes own or borrow raw memory; the copy loops are in `host`")]

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::cuda::{self, Device, DevicePlane};
use super::host::{self, ALIGN, Allocation, Grid, How, to_usize};
use super::kernels::Kernels;
use super::region::Rectangle;
use super::{CellMap, PlaneShape, Transfer};
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
    Host { grid: Grid, allocation: Option<Arc<Allocation>> },
    /// In the memory of a device.
    Device(DevicePlane),
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
    /// [`Error::InvalidArgument`] if `ptr` is NULL or, as far as a driver that is in use knows, memory of a device alone, or
    /// if `shape` does not pass [`PlaneShape::check`].
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
        if let Some(device) = Device::hiding(ptr.addr().get() as u64) {
            let reason = format!("{ptr:p} is memory of device {device}, and adopted as memory of the host");
            return Err(Error::arg("ptr", reason));
        }
        let memory = Memory::Host { grid: Grid::new(ptr, shape)?, allocation: None };
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

    /// Takes the caller's memory of a CUDA device, whichever it is on, as a plane; it is left as it is, and not freed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `ptr` is no address in a device's memory, or the plane ends outside it, or `shape` does not pass
    /// [`PlaneShape::check`] or has rows of 4 GiB; those of [`Device::open`].
    ///
    /// # Safety
    /// For the life of the plane, the `shape.span(kv_size)` bytes at `ptr` are memory of the device's primary context,
    /// and no element of another plane lies on an element of this one. What else is done with them is ordered before and behind
    /// the calls that use the plane: by the stream that [`Transfer::set_stream`] names, or by waiting.
    pub unsafe fn adopt_device(ptr: u64, kv_size: u32, shape: PlaneShape) -> Result<Self> {
        shape.check(kv_size).map_err(|reason| Error::arg("shape", reason))?;
        Ok(Self::of_device(DevicePlane::adopt(ptr, kv_size, shape)?, kv_size, shape))
    }

    /// Whether `ptr` is memory of a device that the host does not reach, as far as a driver that is in use knows.
    #[must_use]
    pub fn is_on_device(ptr: *const u8) -> bool {
        Device::hiding(ptr.addr() as u64).is_some()
    }

    /// A plane of a device. Its memory has the `shape.span(kv_size)` bytes.
    pub(super) fn of_device(plane: DevicePlane, kv_size: u32, shape: PlaneShape) -> Self {
        Self { memory: Memory::Device(plane), kv_size, shape, tensor: 0 }
    }

    /// As [`Plane::allocate`], in the memory of a device.
    ///
    /// # Errors
    /// As [`Plane::allocate`], and those of [`Device::open`].
    pub fn allocate_on(device: &Arc<Device>, shapes: &[PlaneShape], kv_size: u32) -> Result<Vec<Self>> {
        shapes
            .iter()
            .try_for_each(|shape| shape.check(kv_size))
            .map_err(|reason| Error::arg("shape", reason))?;
        if shapes.is_empty() {
            return Ok(Vec::new());
        }
        let planes = DevicePlane::allocate(device, shapes, kv_size)?;
        Ok(planes
            .into_iter()
            .zip(shapes)
            .map(|(plane, &shape)| Self::of_device(plane, kv_size, shape))
            .collect())
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
        let shapes: Vec<_> = shapes.iter().map(|&shape| (shape, kv_size)).collect();
        Self::allocate_each(&shapes, ALIGN as u64, "the cache")
    }

    /// Planes of copies, each with a number of cells of its own; in their allocation they touch.
    pub(super) fn allocate_copies(shapes: &[(PlaneShape, u32)]) -> Result<Vec<Self>> {
        Self::allocate_each(shapes, 1, "a snapshot")
    }

    /// Planes at multiples of `align`, a power of 2 up to [`ALIGN`]; `what` for messages.
    fn allocate_each(shapes: &[(PlaneShape, u32)], align: u64, what: &'static str) -> Result<Vec<Self>> {
        let mut offsets = Vec::with_capacity(shapes.len());
        let mut size = 0_u64;
        for (shape, kv_size) in shapes {
            shape.check(*kv_size).map_err(|reason| Error::arg("shape", reason))?;
            offsets.push(size);
            let span = shape.span(*kv_size).and_then(|span| span.checked_next_multiple_of(align));
            size = size.saturating_add(span.unwrap_or(u64::MAX));
        }
        if shapes.is_empty() {
            return Ok(Vec::new());
        }
        let memory = Arc::new(Allocation::zeroed(size, what)?);
        let plane = |(&(shape, kv_size), offset): (&(PlaneShape, u32), u64)| {
            let offset = to_usize(offset)?;
            // SAFETY: the allocation has `size` bytes from its aligned start on, and `offset + span` lies in it.
            let ptr = unsafe { memory.start.add(offset) };
            let grid = Grid::new(ptr, shape)?;
            let memory = Memory::Host { grid, allocation: Some(Arc::clone(&memory)) };
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
    /// allocated it. An address of the device if [`Plane::device`] names one; NULL if the plane is remote.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.memory {
            Memory::Host { grid, .. } => grid.ptr,
            Memory::Device(plane) => {
                std::ptr::without_provenance_mut(usize::try_from(plane.grid.ptr).unwrap_or(0))
            }
            Memory::Remote(_) => std::ptr::null_mut(),
        }
    }

    /// Whether its memory was allocated here.
    pub(crate) fn is_allocated(&self) -> bool {
        match &self.memory {
            Memory::Host { allocation, .. } => allocation.is_some(),
            Memory::Device(plane) => plane.is_allocated(),
            Memory::Remote(_) => false,
        }
    }

    /// The CUDA device whose memory it is in; `None` for host memory and for remote planes.
    #[must_use]
    pub fn device(&self) -> Option<i32> {
        self.on_device().map(|plane| plane.device.ordinal())
    }

    pub(super) fn on_device(&self) -> Option<&DevicePlane> {
        match &self.memory {
            Memory::Device(plane) => Some(plane),
            Memory::Host { .. } | Memory::Remote(_) => None,
        }
    }

    /// Whether both are on one device.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        self.device().is_some() && self.device() == other.device()
    }

    /// Its bytes from `offset` on, wherever they are: for engines without kernels of their own, and for looking.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are not all the plane's, [`Error::Device`], what a remote plane's owner returns.
    pub fn get(&self, offset: u64, out: &mut [u8], transfer: &Transfer) -> Result<()> {
        self.check_span(offset, out.len())?;
        match &self.memory {
            Memory::Host { grid, .. } => {
                let src = grid.ptr.wrapping_add(to_usize(offset)?);
                // SAFETY: the bytes are the plane's, and by `adopt` a `&mut [u8]` does not lie on it.
                unsafe { src.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
                Ok(())
            }
            Memory::Device(plane) => plane.get(offset, out, transfer),
            Memory::Remote(access) => access.get(self.tensor, offset, out),
        }
    }

    /// Writes its bytes from `offset` on.
    ///
    /// # Errors
    /// As [`Plane::get`].
    pub fn set(&mut self, offset: u64, bytes: &[u8], transfer: &Transfer) -> Result<()> {
        self.check_span(offset, bytes.len())?;
        match &self.memory {
            Memory::Host { grid, .. } => {
                let dst = grid.ptr.wrapping_add(to_usize(offset)?);
                // SAFETY: the bytes are the plane's, which is ours to write, and by `adopt` a `&[u8]` does not lie on it.
                unsafe { bytes.as_ptr().copy_to_nonoverlapping(dst, bytes.len()) };
                Ok(())
            }
            Memory::Device(plane) => plane.set(offset, bytes, transfer),
            Memory::Remote(access) => access.set(self.tensor, offset, bytes),
        }
    }

    fn check_span(&self, offset: u64, len: usize) -> Result<()> {
        let span = self.shape.span(self.kv_size).unwrap_or(0);
        if offset.checked_add(len as u64).is_some_and(|end| end <= span) {
            return Ok(());
        }
        Err(Error::arg("offset", format!("{len} bytes at {offset} of a plane of {span}")))
    }

    /// Bytes of all its cells.
    pub(super) fn dense_bytes(&self) -> u64 {
        // No overflow: cells do not overlap, so this is at most the span.
        self.shape.cell_bytes() * u64::from(self.kv_size)
    }

    /// All its bytes, if it is in host memory and has no gaps.
    pub(super) fn as_bytes(&self) -> Option<&[u8]> {
        self.contiguous(Run { start: 0, len: self.kv_size }, &(0..self.shape.strides().n_channel))
    }

    /// All its bytes, to be written, if it is in host memory of ours and has no gaps. For planes that nobody has the address
    /// of yet.
    pub(super) fn as_bytes_mut(&mut self) -> Option<&mut [u8]> {
        let len = self.as_bytes()?.len();
        match &self.memory {
            Memory::Host { grid, allocation: Some(_) } => {
                // SAFETY: so many bytes, initialised; a plane that was just allocated has been shown to nobody.
                Some(unsafe { slice::from_raw_parts_mut(grid.ptr, len) })
            }
            _ => None,
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

    /// Zeroes every cell, and no byte between cells.
    ///
    /// # Errors
    /// [`Error::Device`]; what the owner of a remote plane returns.
    pub fn zero_all(&mut self, transfer: &Transfer) -> Result<()> {
        let all = CellMap::of_run(0, self.kv_size)?;
        let Memory::Device(plane) = &self.memory else { return self.zero(&all) };
        let span = self.shape.span(self.kv_size).unwrap_or(0);
        if self.shape.cell_bytes().checked_mul(self.kv_size.into()) == Some(span) {
            plane.zero(span, transfer)
        } else {
            cuda::zero_cells(&[(plane, &all)], transfer)
        }
    }

    /// Zeroes the cells that `map` names, in host memory or through its owner's calls.
    pub(super) fn zero(&mut self, map: &CellMap) -> Result<()> {
        self.check_cells(map)?;
        let runs = map.runs_in(0..map.src_end());
        match &self.memory {
            Memory::Host { grid, .. } => {
                for run in runs {
                    // SAFETY: the cells are the plane's, which is ours to write.
                    unsafe { host::zero(*grid, run) };
                }
                Ok(())
            }
            Memory::Remote(access) => {
                let zeroes = vec![0; 1 << 16];
                let channels = 0..self.shape.strides().n_channel;
                self.shape.each_piece(&runs, channels, |mut offset, mut bytes| {
                    while bytes > 0 {
                        let n = bytes.min(zeroes.len());
                        access.set(self.tensor, offset, &zeroes[..n])?;
                        offset += n as u64;
                        bytes -= n;
                    }
                    Ok(())
                })
            }
            Memory::Device(_) => Err(self.elsewhere()),
        }
    }

    /// Host code was to reach memory of a device.
    fn elsewhere(&self) -> Error {
        Error::Internal(format!("{self:?} is not in host memory"))
    }

    /// Checks that the cells that `map` names can be copied from `src`.
    pub(super) fn check_copy(&self, src: &Self, map: &CellMap) -> Result<()> {
        let cells = |plane: &Self| (Rectangle::new(plane.shape, 0..1), plane.kv_size);
        if cells(src) != cells(self) {
            let of = |plane: &Self| format!("{} cells of {}", plane.kv_size, plane.shape);
            return Err(Error::arg("src", format!("is {} (expected {})", of(src), of(self))));
        }
        if src.is_remote() || self.is_remote() {
            return Err(Error::arg("src", "is remote, and its owner has no call to copy between tensors"));
        }
        self.check_cells(map)
    }

    /// Copies the cells that `map` names, which passed [`Plane::check_copy`], from another plane in host memory.
    pub(super) fn copy_cells_from(&mut self, src: &Self, map: &CellMap) -> Result<()> {
        let (Memory::Host { grid: to, .. }, Memory::Host { grid: from, .. }) = (&self.memory, &src.memory)
        else {
            return Err(self.elsewhere());
        };
        self.check_copy(src, map)?;
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
            Memory::Device(_) => Err(self.elsewhere()),
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

    /// Checks that the map's cells are those of a blob of `n_src`, and of this plane.
    pub(super) fn check_write(&self, map: &CellMap, n_src: u32) -> Result<()> {
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
            Memory::Device(_) => Err(self.elsewhere()),
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
