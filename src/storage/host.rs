//! Host memory: allocation, and the copy loops.
//!
//! Plane memory is shared with an engine that holds raw pointers into it. So it is read and written through
//! raw pointers only; the one reference into it is what `Plane::contiguous` lends.
#![allow(unsafe_code, reason = "tensor memory belongs to the engine as well: it can only be a raw pointer")]

use std::alloc::{self, Layout};
use std::ops::Range;
use std::ptr::NonNull;

use super::{PlaneShape, stream};
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

/// Bytes of one plane from which on they go past the cache: more than a file's buffer, which is read again at once.
const STREAM_MIN: usize = 2 << 20;

/// Copies every channel of the moved cells. Channels are outermost: a blob is written from front to back.
///
/// # Safety
/// Both grids have the same channels and element size. The elements of the moved cells are valid for reads in
/// `src` and for writes in `dst`, and those of `src` do not overlap those of `dst`.
pub(super) unsafe fn copy(dst: Grid, src: Grid, moves: impl Iterator<Item = Move>) {
    let (mut runs, mut singles) = (Vec::new(), Singles::default());
    let dense = dst.is_dense() && src.is_dense();
    for m in moves {
        if dense && m.len as usize * src.elem_size >= MEMCPY_MIN {
            runs.push(m);
        } else {
            singles.push(m);
        }
    }
    let order = if dense { singles.order() } else { Order::Pairs };
    let run_bytes = runs.iter().map(|m| m.len as usize).sum::<usize>() * src.elem_size * src.n_channel;
    let copy_run = if run_bytes >= STREAM_MIN { stream::copy_run() } else { plain_copy };
    for channel in 0..src.n_channel {
        for m in &runs {
            let bytes = m.len as usize * src.elem_size;
            // SAFETY: the elements of a dense run are one range of bytes; valid and apart by contract.
            unsafe { copy_run(src.at(channel, m.src), dst.at(channel, m.dst), bytes) };
        }
        // SAFETY: elements of the size that is matched; valid and apart by contract; lists are used for dense
        // grids only.
        unsafe {
            match src.elem_size {
                1 => singles.copy::<1>(&order, dst, src, channel),
                2 => singles.copy::<2>(&order, dst, src, channel),
                4 => singles.copy::<4>(&order, dst, src, channel),
                size => {
                    for (&from, &to) in singles.from.iter().zip(&singles.to) {
                        src.at(channel, from).copy_to_nonoverlapping(dst.at(channel, to), size);
                    }
                }
            }
        }
    }
    if run_bytes >= STREAM_MIN {
        stream::fence();
    }
}

/// Copies a range of bytes, from and to.
pub(super) type CopyRun = unsafe fn(*const u8, *mut u8, usize);

/// # Safety
/// `n` bytes are valid for reads at `from` and for writes at `to`, and do not overlap.
pub(super) unsafe fn plain_copy(from: *const u8, to: *mut u8, n: usize) {
    // SAFETY: by contract.
    unsafe { from.copy_to_nonoverlapping(to, n) };
}

/// Cells of short runs, one by one: without a loop inside the loop there is nothing to mispredict.
#[derive(Debug, Default)]
struct Singles {
    from: Vec<u32>,
    to: Vec<u32>,
}

/// How single cells are walked. One side is a blob as a rule, whose cells follow each other: then only the other
/// side's are looked up.
#[derive(Debug)]
enum Order {
    /// Ranges of the list whose `to` follow each other.
    Gather(Vec<Range<usize>>),
    /// Ranges of the list whose `from` follow each other.
    Scatter(Vec<Range<usize>>),
    Pairs,
}

impl Singles {
    fn push(&mut self, m: Move) {
        self.from.extend(m.src..m.src + m.len);
        self.to.extend(m.dst..m.dst + m.len);
    }

    fn order(&self) -> Order {
        // Shorter ranges on average are not worth their loop.
        const LEAST_LEN: usize = 32;
        let is_few = |ranges: &Vec<_>| ranges.len() <= self.from.len().div_ceil(LEAST_LEN);
        let gather = consecutive(&self.to);
        if is_few(&gather) {
            return Order::Gather(gather);
        }
        let scatter = consecutive(&self.from);
        if is_few(&scatter) { Order::Scatter(scatter) } else { Order::Pairs }
    }

    /// # Safety
    /// As [`copy`], for elements of `SIZE` bytes; an order other than pairs is for dense grids.
    unsafe fn copy<const SIZE: usize>(&self, order: &Order, dst: Grid, src: Grid, channel: usize) {
        const BLOCK: usize = 8;
        let (from, to) = (src.at(channel, 0), dst.at(channel, 0));
        let (ranges, list, is_gather) = match order {
            Order::Gather(ranges) => (ranges, &self.from, true),
            Order::Scatter(ranges) => (ranges, &self.to, false),
            Order::Pairs => {
                for (&from, &to) in self.from.iter().zip(&self.to) {
                    // SAFETY: by contract.
                    unsafe { copy_elem::<SIZE>(src.at(channel, from), dst.at(channel, to)) };
                }
                return;
            }
        };
        for range in ranges {
            let first = if is_gather { self.to[range.start] } else { self.from[range.start] } as usize;
            let cells = &list[range.clone()];
            let blocks = cells.chunks_exact(BLOCK);
            let rest = (first + cells.len() - blocks.remainder().len(), blocks.remainder());
            let blocks = blocks.enumerate().map(|(i, block)| (first + i * BLOCK, block));
            let each = |next: usize, cell: u32| {
                let (a, b) = if is_gather { (cell as usize, next) } else { (next, cell as usize) };
                // SAFETY: by contract; elements of a dense grid lie `SIZE` bytes apart.
                unsafe { copy_elem::<SIZE>(from.wrapping_add(a * SIZE), to.wrapping_add(b * SIZE)) };
            };
            for (next, block) in blocks {
                for (i, &cell) in block.iter().enumerate() {
                    each(next + i, cell);
                }
            }
            for (i, &cell) in rest.1.iter().enumerate() {
                each(rest.0 + i, cell);
            }
        }
    }
}

/// The ranges of `cells` in which each is the successor of the one before.
fn consecutive(cells: &[u32]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (i, &cell) in cells.iter().enumerate() {
        match ranges.last_mut() {
            Some(range) if cells[range.end - 1] + 1 == cell => range.end = i + 1,
            _ => ranges.push(i..i + 1),
        }
    }
    ranges
}

/// Copies an element whose size the compiler knows: two instructions instead of a call.
///
/// # Safety
/// `SIZE` bytes are valid for reads at `from` and for writes at `to`, and do not overlap.
unsafe fn copy_elem<const SIZE: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: by contract; an array of bytes needs no alignment.
    unsafe { to.cast::<[u8; SIZE]>().write(from.cast::<[u8; SIZE]>().read()) }
}
