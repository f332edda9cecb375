//! Host memory: allocation, and the walk of a copy.
//!
//! Plane memory is shared with an engine that holds raw pointers into it. So it is read and written through
//! raw pointers only; the one reference into it is what `Plane::contiguous` lends.
#![allow(unsafe_code, reason = "tensor memory belongs to the engine as well: it can only be a raw pointer")]

use std::alloc::{self, Layout};
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;

use super::PlaneShape;
use super::cell_map::{CellMap, StepIn};
use super::kernels::{self, Block, Compress, Kernels, SLACK};
use crate::error::{Error, Result};
use crate::types::{Move, Run};

/// Alignment of the planes that are allocated here, bytes: a cache line, and ggml's SIMD.
pub(super) const ALIGN: usize = 64;

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
    pub(super) fn zeroed(size: u64, what: &'static str) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory { what, bytes: size };
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

    /// The blob cells `cells` of such elements, at `ptr`.
    fn blob(self, ptr: *mut u8, cells: &Range<u32>) -> Self {
        let channel_stride = (cells.end - cells.start) as usize * self.elem_size;
        let ptr = ptr.wrapping_sub(cells.start as usize * self.elem_size);
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

/// Zeroes every channel of the cells of `run`.
///
/// # Safety
/// The elements of these cells are valid for writes.
pub(super) unsafe fn zero(grid: Grid, run: Run) {
    for channel in 0..grid.n_channel {
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

/// How bytes are copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub kernels: &'static Kernels,
    /// Runs go past the cache: what is larger than it would only push out what is needed.
    pub streams: bool,
}

/// Bytes from which on a run is streamed: a shorter one is mostly the parts of cache lines at its ends.
const STREAM_RUN_MIN: usize = 256;

/// Cells and channels of a tile: where one side goes through them across the order of its memory, it finds the tile's
/// cache lines still there.
const TILE: u32 = 64;

/// Picks the elements of `blocks` out of a channel (the address of its cell 0, its number of cells, the bytes of an
/// element) to a blob (the address of its cell 0).
///
/// A kernel may write [`SLACK`] bytes behind what it picks. They lie before `end` and are overwritten later, or the
/// elements take a way round.
///
/// # Safety
/// The elements are valid on both sides; so are the bytes of the blob up to `end`.
unsafe fn pick(
    compress: Compress,
    (channel, kv_size, elem_size): (*const u8, u32, usize),
    blocks: &[Block],
    blob: *mut u8,
    end: *mut u8,
) {
    // The blob's cell 0 need not be at a real address.
    let behind = |block: &Block| blob.addr().wrapping_add(block.blob_end() as usize * elem_size);
    let room_behind = |block: &Block| end.addr().wrapping_sub(behind(block));
    let n_last = blocks.iter().rev().take_while(|block| room_behind(block) < SLACK).count();
    let (blocks, last) = blocks.split_at(blocks.len() - n_last);
    // SAFETY: by contract; there is slack.
    unsafe { compress(channel, kv_size, blocks, blob) };
    for block in last {
        let mut room = [0_u8; 64 * MAX_PICKED_ELEM + SLACK];
        let start = block.blob as usize * elem_size;
        let at_start = room.as_mut_ptr().wrapping_sub(start);
        // SAFETY: by contract; the room has that of 64 elements, and the slack.
        unsafe {
            compress(channel, kv_size, slice::from_ref(block), at_start);
            room.as_ptr().copy_to_nonoverlapping(blob.wrapping_add(start), block.len() as usize * elem_size);
        }
    }
}

/// Bytes of the largest element that has a kernel.
const MAX_PICKED_ELEM: usize = 4;

/// Bytes of a row to fetch ahead: the machine's own prefetch follows a row, but does not find the next.
const PREFETCH: usize = 2048;

impl How {
    /// Copies blob cells `cells` of every channel of a plane of `kv_size` cells to `out`, in blob order.
    ///
    /// # Safety
    /// The plane is valid for reads, `out` for writes of the elements of these cells, which do not overlap; the cells
    /// of the map lie in the plane.
    pub unsafe fn gather(self, plane: Grid, kv_size: u32, map: &CellMap, cells: Range<u32>, out: *mut u8) {
        let blob = plane.blob(out, &cells);
        match self.kernels.compress(plane.elem_size, self.streams).filter(|_| plane.is_dense()) {
            Some(compress) => {
                let end = blob.at(plane.n_channel - 1, cells.end);
                for channel in 0..plane.n_channel {
                    map.each_step_in(cells.clone(), |step| match step {
                        // SAFETY: the elements of a dense run are one range of bytes; valid by contract.
                        StepIn::Run(m) => unsafe {
                            let bytes = m.len as usize * plane.elem_size;
                            kernels::prefetch(plane.at(channel + 1, m.dst), PREFETCH.min(bytes));
                            self.copy_run(plane.at(channel, m.dst), blob.at(channel, m.src), bytes);
                        },
                        StepIn::Blocks(blocks) => {
                            let elements = (plane.at(channel, 0).cast_const(), kv_size, plane.elem_size);
                            // SAFETY: by contract; what is behind the blocks in `out` is written later.
                            unsafe { pick(compress, elements, blocks, blob.at(channel, 0), end) };
                        }
                    });
                }
            }
            // SAFETY: by contract.
            None => unsafe { self.copy_cells(blob, plane, &map.moves_in(cells), false) },
        }
        self.fence();
    }

    /// Copies blob cells `cells` of every channel from `src`, which holds just these in blob order, to a plane.
    ///
    /// # Safety
    /// As [`How::gather`], the other way round.
    pub unsafe fn scatter(self, plane: Grid, map: &CellMap, cells: Range<u32>, src: *const u8) {
        let blob = plane.blob(src.cast_mut(), &cells);
        match self.kernels.expand(plane.elem_size).filter(|_| plane.is_dense()) {
            Some(expand) => {
                for channel in 0..plane.n_channel {
                    map.each_step_in(cells.clone(), |step| match step {
                        // SAFETY: the elements of a dense run are one range of bytes; valid by contract.
                        StepIn::Run(m) => unsafe {
                            let bytes = m.len as usize * plane.elem_size;
                            self.copy_run(blob.at(channel, m.src), plane.at(channel, m.dst), bytes);
                        },
                        // SAFETY: by contract.
                        StepIn::Blocks(blocks) => unsafe {
                            expand(plane.at(channel, 0), blocks, blob.at(channel, 0));
                        },
                    });
                }
            }
            // SAFETY: by contract.
            None => unsafe { self.copy_cells(plane, blob, &map.moves_in(cells), true) },
        }
        self.fence();
    }

    /// Copies cells of a plane to the same cells of another one of the same shape.
    ///
    /// # Safety
    /// The cells of the runs are valid for reads in `src` and for writes in `dst`, and do not overlap.
    pub unsafe fn copy_plane(self, dst: Grid, src: Grid, runs: impl Iterator<Item = Run> + Clone) {
        let moves = runs.map(|run| Move { src: run.start, dst: run.start, len: run.len });
        // SAFETY: by contract.
        unsafe { self.copy_cells(dst, src, &moves, true) };
        self.fence();
    }

    /// Copies moved cells whose elements have no kernel. A blob is on the `src` side of the moves; `to_stream` says
    /// whether that is `src`.
    ///
    /// # Safety
    /// The cells are valid on both sides, and do not overlap.
    unsafe fn copy_cells(
        self,
        dst: Grid,
        src: Grid,
        moves: &(impl Iterator<Item = Move> + Clone),
        to_stream: bool,
    ) {
        let ends = |m: Move| if to_stream { (m.src, m.dst) } else { (m.dst, m.src) };
        let elem_size = src.elem_size;
        if dst.is_dense() && src.is_dense() {
            for channel in 0..src.n_channel {
                let mut ahead = moves.clone().skip(1);
                for m in moves.clone() {
                    if let Some(next) = ahead.next() {
                        kernels::prefetch(
                            src.at(channel, ends(next).0),
                            PREFETCH.min(next.len as usize * elem_size),
                        );
                    }
                    let (from, to) = ends(m);
                    // SAFETY: the elements of a dense run are one range of bytes; valid by contract.
                    unsafe {
                        self.copy_run(src.at(channel, from), dst.at(channel, to), m.len as usize * elem_size);
                    }
                }
            }
            return;
        }
        for channels in (0..src.n_channel).step_by(TILE as usize) {
            let channels = channels..src.n_channel.min(channels + TILE as usize);
            for m in moves.clone() {
                for skip in (0..m.len).step_by(TILE as usize) {
                    let len = (m.len - skip).min(TILE);
                    let (from, to) = ends(m);
                    for channel in channels.clone() {
                        let from = (src.at(channel, from + skip).cast_const(), src.cell_stride);
                        let to = (dst.at(channel, to + skip), dst.cell_stride);
                        // SAFETY: elements of cells of the move; valid by contract.
                        unsafe { self.copy_elements(from, to, elem_size, len) };
                    }
                }
            }
        }
    }

    /// Copies `len` elements whose addresses are a stride apart.
    ///
    /// # Safety
    /// They are valid on both sides, and do not overlap.
    unsafe fn copy_elements(
        self,
        from: (*const u8, usize),
        to: (*mut u8, usize),
        elem_size: usize,
        len: u32,
    ) {
        for i in 0..len as usize {
            let (from, to) = (from.0.wrapping_add(i * from.1), to.0.wrapping_add(i * to.1));
            // SAFETY: an element, valid by contract; an array of bytes needs no alignment.
            unsafe {
                match elem_size {
                    1 => to.write(from.read()),
                    2 => to.cast::<[u8; 2]>().write(from.cast::<[u8; 2]>().read()),
                    4 => to.cast::<[u8; 4]>().write(from.cast::<[u8; 4]>().read()),
                    size => self.copy_run(from, to, size),
                }
            }
        }
    }

    /// # Safety
    /// `n` bytes are valid for reads at `from` and for writes at `to`, and do not overlap.
    unsafe fn copy_run(self, from: *const u8, to: *mut u8, n: usize) {
        // SAFETY: by contract.
        unsafe {
            if self.streams && n >= STREAM_RUN_MIN {
                (self.kernels.stream)(from, to, n);
            } else {
                from.copy_to_nonoverlapping(to, n);
            }
        }
    }

    fn fence(self) {
        if self.streams {
            kernels::fence();
        }
    }
}
