//! Planes in host memory.
//!
//! Plane memory is shared with an engine that holds raw pointers into it. So it is read and written through
//! raw pointers only; the one reference into it is what `Plane::contiguous` lends.
#![allow(unsafe_code, reason = "tensor memory belongs to the engine as well: it can only be a raw pointer")]

use std::alloc::{self, Layout};
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::PlaneShape;
use crate::error::{Error, Result};
use crate::types::{Move, Run};

/// Alignment of the planes that are allocated here, bytes: a cache line, and ggml's SIMD.
const ALIGN: usize = 64;

/// Bytes from which on a call of memcpy beats moving single elements.
const MEMCPY_MIN: usize = 16;

/// One layer's K or V of one stream, in host memory.
///
/// Invariant: `grid` is `shape` at memory that is valid for `shape.span(kv_size)` bytes and initialised, and
/// that is written, as far as this crate goes, through `&mut` of this plane only. `shape` passed
/// [`PlaneShape::check`] with `kv_size`.
#[derive(Debug)]
pub struct Plane {
    grid: Grid,
    kv_size: u32,
    shape: PlaneShape,
    /// Keeps the memory, unless it is the caller's.
    _memory: Option<Arc<Allocation>>,
}

// SAFETY: nothing in a Plane is tied to a thread: memory of `Allocation` can be used and freed on any, and
// `adopt` demands the same of the caller's.
unsafe impl Send for Plane {}
// SAFETY: through `&Plane` its memory is only read; `as_ptr` gives an address, whose use is up to `unsafe` code.
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
        Ok(Self { grid: Grid::new(ptr, shape)?, kv_size, shape, _memory: None })
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
            Ok(Self { grid, kv_size, shape, _memory: Some(Arc::clone(&memory)) })
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
    /// allocated it.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.grid.ptr
    }

    /// Zeroes the cells of `runs`, and no byte between them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] as for [`super::Region::new`]; nothing is written then.
    pub fn zero(&mut self, runs: &[Run]) -> Result<()> {
        self.check_runs(runs)?;
        // SAFETY: the runs lie in the plane, which is ours to write.
        unsafe { zero(self.grid, runs) };
        Ok(())
    }

    /// Zeroes every cell, and no byte between cells.
    pub fn zero_all(&mut self) {
        // SAFETY: these are the cells of the plane, which is ours to write.
        unsafe { zero(self.grid, &[Run { start: 0, len: self.kv_size }]) };
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
        let moves = runs.iter().map(|run| Move { src: run.start, dst: run.start, len: run.len });
        // SAFETY: the runs lie in both planes, which are of one shape; this one is ours to write; elements of
        // two planes do not overlap.
        unsafe { copy(self.grid, src.grid, moves) };
        Ok(())
    }

    /// Checks that `runs` are cells of this plane, and counts them.
    pub(super) fn check_runs(&self, runs: &[Run]) -> Result<u32> {
        check_ranges("runs", runs.iter().map(|run| (run.start, run.len)), self.kv_size)
    }

    /// Copies `channels` of the cells of `runs` to `out`, in blob order.
    pub(super) fn read(&self, runs: &[Run], channels: &Range<u32>, out: &mut [u8]) -> Result<()> {
        let n_cells = self.check_runs(runs)?;
        let grid = self.grid.channels(channels);
        let need = u64::from(n_cells) * grid.elem_size as u64 * grid.n_channel as u64;
        if need != out.len() as u64 {
            return Err(Error::BufferTooSmall { need, size: out.len() as u64 });
        }
        let mut dst = 0;
        let moves = runs.iter().map(|run| {
            dst += run.len;
            Move { src: run.start, dst: dst - run.len, len: run.len }
        });
        // SAFETY: the runs lie in the plane and the channels too; `out` has just the bytes of `n_cells` cells,
        // which the moves fill one by one; by `adopt` a `&mut [u8]` does not lie on a plane.
        unsafe { copy(grid.blob(out.as_mut_ptr(), n_cells), grid, moves) };
        Ok(())
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
        let blob = self.grid.blob(src.as_ptr().cast_mut(), n_src);
        // SAFETY: the moves lead from cells of `src`, which is only read, to cells of the plane, which is ours
        // to write; a `&[u8]` does not lie on it: not by `adopt`, nor made by `contiguous`, which borrows it.
        unsafe { copy(self.grid, blob, moves.iter().copied()) };
        Ok(())
    }

    /// `channels` of the cells of `run`, if they lie in memory just as in a blob.
    pub(super) fn contiguous(&self, run: Run, channels: &Range<u32>) -> Option<&[u8]> {
        self.check_runs(&[run]).ok()?;
        let grid = self.grid.channels(channels);
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

/// Memory of the planes of one cache.
#[derive(Debug)]
struct Allocation {
    base: NonNull<u8>,
    layout: Layout,
    /// The first aligned byte.
    start: NonNull<u8>,
}

// SAFETY: an Allocation only frees, which can be done on any thread.
unsafe impl Send for Allocation {}
// SAFETY: nothing can be done through `&Allocation` but to copy addresses.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// `size > 0` zeroed bytes from `start` on.
    fn zeroed(size: u64) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory { what: "the cache", bytes: size };
        // Aligned by hand: a larger alignment would make `alloc_zeroed` write the zeroes, hence touch all pages.
        let layout = usize::try_from(size)
            .ok()
            .and_then(|size| size.checked_add(ALIGN - 1))
            .and_then(|size| Layout::array::<u8>(size).ok())
            .ok_or_else(out_of_memory)?;
        // SAFETY: the layout has at least `ALIGN - 1` bytes.
        let base = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        let gap = base.addr().get().wrapping_neg() % ALIGN;
        // SAFETY: `gap < ALIGN`, and there are `ALIGN - 1` bytes more than asked for.
        let start = unsafe { base.add(gap) };
        Ok(Self { base, layout, start })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Elements in memory: channel `j` of cell `c` at `ptr + j * channel_stride + c * cell_stride` (bytes).
///
/// A plane is one, and a blob as well.
#[derive(Clone, Copy, Debug)]
struct Grid {
    ptr: *mut u8,
    n_channel: usize,
    elem_size: usize,
    cell_stride: usize,
    channel_stride: usize,
}

impl Grid {
    fn new(ptr: NonNull<u8>, shape: PlaneShape) -> Result<Self> {
        let s = shape.strides();
        Ok(Self {
            ptr: ptr.as_ptr(),
            n_channel: s.n_channel as usize,
            elem_size: to_usize(s.elem_size)?,
            cell_stride: to_usize(s.cell_stride)?,
            channel_stride: to_usize(s.channel_stride)?,
        })
    }

    /// These channels alone; not all of them may be left out.
    fn channels(self, channels: &Range<u32>) -> Self {
        let (start, end) = (channels.start as usize, channels.end as usize);
        assert!(start < end && end <= self.n_channel, "a Region has channels of its plane");
        Self { ptr: self.at(start, 0), n_channel: end - start, ..self }
    }

    /// A blob of `n_cells` such cells at `ptr`.
    fn blob(self, ptr: *mut u8, n_cells: u32) -> Self {
        let channel_stride = n_cells as usize * self.elem_size;
        Self { ptr, cell_stride: self.elem_size, channel_stride, ..self }
    }

    /// Address of an element.
    fn at(self, channel: usize, cell: u32) -> *mut u8 {
        self.ptr.wrapping_add(channel * self.channel_stride + cell as usize * self.cell_stride)
    }

    /// Whether the elements of neighbouring cells touch.
    fn is_dense(self) -> bool {
        self.cell_stride == self.elem_size
    }
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::arg("shape", format!("{bytes} bytes cannot be addressed")))
}

/// Zeroes every channel of the cells of `runs`.
///
/// # Safety
/// The elements of these cells are valid for writes.
unsafe fn zero(grid: Grid, runs: &[Run]) {
    for channel in 0..grid.n_channel {
        for run in runs {
            if grid.is_dense() {
                // SAFETY: the elements of a dense run are one range of bytes; valid by contract.
                unsafe { grid.at(channel, run.start).write_bytes(0, run.len as usize * grid.elem_size) };
            } else {
                for cell in run.start..run.start + run.len {
                    // SAFETY: one element, valid by contract.
                    unsafe { grid.at(channel, cell).write_bytes(0, grid.elem_size) };
                }
            }
        }
    }
}

/// Copies every channel of the moved cells. Channels are outermost: a blob is written from front to back.
///
/// # Safety
/// Both grids have the same channels and element size. The elements of the moved cells are valid for reads in
/// `src` and for writes in `dst`, and those of `src` do not overlap those of `dst`.
unsafe fn copy(dst: Grid, src: Grid, moves: impl Iterator<Item = Move>) {
    // Cells of short runs one by one: without a loop inside the loop there is nothing to mispredict.
    let (mut runs, mut cells) = (Vec::new(), Vec::new());
    let dense = dst.is_dense() && src.is_dense();
    for m in moves {
        if dense && m.len as usize * src.elem_size >= MEMCPY_MIN {
            runs.push(m);
        } else {
            cells.extend((0..m.len).map(|i| (m.src + i, m.dst + i)));
        }
    }
    for channel in 0..src.n_channel {
        for m in &runs {
            let bytes = m.len as usize * src.elem_size;
            // SAFETY: the elements of a dense run are one range of bytes; valid and apart by contract.
            unsafe { src.at(channel, m.src).copy_to_nonoverlapping(dst.at(channel, m.dst), bytes) };
        }
        let pairs = cells.iter().map(|&(from, to)| (src.at(channel, from), dst.at(channel, to)));
        // SAFETY: pairs of elements, of the size that is matched; valid and apart by contract.
        unsafe {
            match src.elem_size {
                1 => pairs.for_each(|(from, to)| copy_elem::<1>(from, to)),
                2 => pairs.for_each(|(from, to)| copy_elem::<2>(from, to)),
                4 => pairs.for_each(|(from, to)| copy_elem::<4>(from, to)),
                size => pairs.for_each(|(from, to)| from.copy_to_nonoverlapping(to, size)),
            }
        }
    }
}

/// Copies an element whose size the compiler knows: two instructions instead of a call.
///
/// # Safety
/// `SIZE` bytes are valid for reads at `from` and for writes at `to`, and do not overlap.
unsafe fn copy_elem<const SIZE: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: by contract; an array of bytes needs no alignment.
    unsafe { to.cast::<[u8; SIZE]>().write(from.cast::<[u8; SIZE]>().read()) }
}
