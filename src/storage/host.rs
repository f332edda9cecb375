//! Host memory: allocation, and the copy loops.
//!
//! Plane memory is shared with an engine that holds raw pointers into it. So it is read and written through
//! raw pointers only; the one reference into it is what `Plane::contiguous` lends.
#![allow(unsafe_code, reason = "tensor memory belongs to the engine as well: it can only be a raw pointer")]

use std::alloc::{self, Layout};
use std::ops::Range;
use std::ptr::NonNull;

use super::PlaneShape;
use crate::error::{Error, Result};
use crate::types::{Move, Run};

/// Alignment of the planes that are allocated here, bytes: a cache line, and ggml's SIMD.
pub(super) const ALIGN: usize = 64;

/// Bytes from which on a call of memcpy beats moving single elements.
const MEMCPY_MIN: usize = 16;

/// Memory of the planes of one cache.
#[derive(Debug)]
pub(super) struct Allocation {
    base: NonNull<u8>,
    layout: Layout,
    /// The first aligned byte.
    pub(super) start: NonNull<u8>,
}

// SAFETY: an Allocation only frees, which can be done on any thread.
unsafe impl Send for Allocation {}
// SAFETY: nothing can be done through `&Allocation` but to copy addresses.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// `size > 0` zeroed bytes from `start` on.
    pub(super) fn zeroed(size: u64) -> Result<Self> {
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
pub(super) struct Grid {
    pub(super) ptr: *mut u8,
    pub(super) n_channel: usize,
    pub(super) elem_size: usize,
    pub(super) cell_stride: usize,
    pub(super) channel_stride: usize,
}

impl Grid {
    pub(super) fn new(ptr: NonNull<u8>, shape: PlaneShape) -> Result<Self> {
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
    pub(super) fn channels(self, channels: &Range<u32>) -> Self {
        let (start, end) = (channels.start as usize, channels.end as usize);
        assert!(start < end && end <= self.n_channel, "a Region has channels of its plane");
        Self { ptr: self.at(start, 0), n_channel: end - start, ..self }
    }

    /// A blob of `n_cells` such cells at `ptr`.
    pub(super) fn blob(self, ptr: *mut u8, n_cells: u32) -> Self {
        let channel_stride = n_cells as usize * self.elem_size;
        Self { ptr, cell_stride: self.elem_size, channel_stride, ..self }
    }

    /// Address of an element.
    pub(super) fn at(self, channel: usize, cell: u32) -> *mut u8 {
        self.ptr.wrapping_add(channel * self.channel_stride + cell as usize * self.cell_stride)
    }

    /// Whether the elements of neighbouring cells touch.
    fn is_dense(self) -> bool {
        self.cell_stride == self.elem_size
    }
}

pub(super) fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::arg("shape", format!("{bytes} bytes cannot be addressed")))
}

/// Zeroes every channel of the cells of `runs`.
///
/// # Safety
/// The elements of these cells are valid for writes.
pub(super) unsafe fn zero(grid: Grid, runs: &[Run]) {
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
pub(super) unsafe fn copy(dst: Grid, src: Grid, moves: impl Iterator<Item = Move>) {
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
