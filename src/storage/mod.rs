//! Where tensor bytes live, and how they travel between a cache and a blob.
//!
//! A plane is one layer's K or V of one stream. [`gather`] reads cells of many planes into a blob,
//! [`scatter`] writes a blob's cells into many planes; both check the whole batch before the first byte.
//!
//! Downwards: `batch` parts a batch by where its planes are, and cuts what is on the host into pieces for threads; `host` walks
//! the cells of a piece, `kernels` copy. What is on a CUDA device is `cuda`'s.

mod batch;
mod cell_map;
mod convert;
mod copies;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod drain;
mod file;
mod hadamard;
mod host;
mod kernels;
#[cfg(feature = "cli")]
mod mapped;
mod pieces;
mod plane;
mod region;
mod shift;
mod tensor;
mod transfer;
mod wanted;

use std::fmt;
use std::ops::Range;

pub use batch::{
    Fetched, Placed, Scatter, copy_cells, copy_regions, gather, prepare, reserve, scatter, zero_cells,
};
pub use cell_map::CellMap;
pub use convert::{Conversion, TensorLayout};
pub use copies::TensorCopies;
pub use cuda::{
    CallerStream, Device, Staging, StagingParams, StagingReport, alloc_pinned, free_pinned, register_host,
    unregister_host,
};
pub(crate) use drain::RegionDrain;
pub(crate) use file::{read_error, read_exact_at};
#[cfg(feature = "cli")]
pub use mapped::MappedFile;
pub(crate) use pieces::{Report, for_each_piece};
pub use plane::{Plane, TensorAccess};
pub use region::Region;
pub(crate) use shift::{PlaneShift, Rotation, RotationTable, ShiftFailure, ShiftedCell, shift};
pub use tensor::{StateTensor, TensorBytes};
pub use transfer::{Progress, ProgressCallback, Threads, Transfer};
pub use wanted::{WantedCells, file_ranges};

use crate::error::Result;
use crate::types::Run;

/// The kernels that copy on this machine: "avx512", "avx2", "neon" or "plain". The environment variable
/// `KVSTATE_KERNELS` can name others, which is for tests and for reports of bugs.
#[must_use]
pub fn kernels() -> &'static str {
    kernels::Kernels::get().name
}

/// How the bytes of one plane are laid out. All sizes and strides are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneShape {
    /// K, and V with flash attention: the row of cell `r` lies at `r * cell_stride`.
    Rows {
        /// Bytes of a row.
        row_size: u64,
        /// From a row to the next, at least `row_size`.
        cell_stride: u64,
    },
    /// Transposed V: channel `j` of cell `c` lies at `j * channel_stride + c * cell_stride`.
    Channels {
        /// Channels of a cell (`n_embd_v_gqa`).
        n_channel: u32,
        /// Bytes of an element: one channel of one cell.
        elem_size: u32,
        /// From a cell to the next.
        cell_stride: u64,
        /// From a channel to the next.
        channel_stride: u64,
    },
}

impl fmt::Display for PlaneShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows { row_size, cell_stride } => write!(f, "rows of {row_size} bytes {cell_stride} apart"),
            Self::Channels { n_channel, elem_size, cell_stride, channel_stride } => write!(
                f,
                "{n_channel} channels of {elem_size}-byte elements, cells {cell_stride} and channels \
                 {channel_stride} apart"
            ),
        }
    }
}

/// Both shapes as one: rows are a single channel whose elements are rows.
#[derive(Clone, Copy)]
struct Strides {
    n_channel: u32,
    elem_size: u64,
    cell_stride: u64,
    channel_stride: u64,
}

impl PlaneShape {
    /// Rows of `row_size` bytes without gaps.
    #[must_use]
    pub const fn dense_rows(row_size: u64) -> Self {
        Self::Rows { row_size, cell_stride: row_size }
    }

    /// Channels of `kv_size` elements of `elem_size` bytes without gaps.
    #[must_use]
    pub const fn dense_channels(n_channel: u32, elem_size: u32, kv_size: u32) -> Self {
        Self::Channels {
            n_channel,
            elem_size,
            cell_stride: elem_size as u64,
            channel_stride: elem_size as u64 * kv_size as u64,
        }
    }

    /// Bytes of one cell in a blob.
    #[must_use]
    pub const fn cell_bytes(&self) -> u64 {
        match *self {
            Self::Rows { row_size, .. } => row_size,
            Self::Channels { n_channel, elem_size, .. } => n_channel as u64 * elem_size as u64,
        }
    }

    /// Bytes from the start of cell 0 to the end of the last byte of `kv_size` cells; `None` on overflow.
    #[must_use]
    pub fn span(&self, kv_size: u32) -> Option<u64> {
        let s = self.strides();
        if kv_size == 0 || self.cell_bytes() == 0 {
            return Some(0);
        }
        let last_channel = u64::from(s.n_channel - 1).checked_mul(s.channel_stride)?;
        let last_cell = u64::from(kv_size - 1).checked_mul(s.cell_stride)?;
        last_channel.checked_add(last_cell)?.checked_add(s.elem_size)
    }

    /// Whether `kv_size` cells can lie like this in memory.
    ///
    /// # Errors
    /// The reason why not: nothing to hold, more bytes than an address space has, or cells that overlap.
    pub fn check(&self, kv_size: u32) -> Result<(), String> {
        let s = self.strides();
        if kv_size == 0 || self.cell_bytes() == 0 {
            return Err(format!("{self} hold no bytes with {kv_size} cells"));
        }
        if self.span(kv_size).is_none_or(|span| isize::try_from(span).is_err()) {
            return Err(format!("{self}: {kv_size} cells span more bytes than can be addressed"));
        }
        // Either channel follows channel, each with all its cells, or cell follows cell.
        let steps_over = |outer: u64, count: u32, inner: u64| {
            inner >= s.elem_size && u64::from(count).checked_mul(inner).is_some_and(|bytes| outer >= bytes)
        };
        if steps_over(s.channel_stride, kv_size, s.cell_stride)
            || steps_over(s.cell_stride, s.n_channel, s.channel_stride)
        {
            Ok(())
        } else {
            Err(format!("{self}: {kv_size} cells overlap"))
        }
    }

    /// Calls with the offset and the bytes of every contiguous piece of `channels` of the cells of `runs`, in
    /// blob order.
    fn each_piece(
        &self,
        runs: &(impl Iterator<Item = Run> + Clone),
        channels: Range<u32>,
        mut call: impl FnMut(u64, usize) -> Result<()>,
    ) -> Result<()> {
        let s = self.strides();
        let is_dense = s.cell_stride == s.elem_size;
        for channel in channels {
            for run in runs.clone() {
                let (n_pieces, cells) = if is_dense { (1, run.len) } else { (run.len, 1) };
                for cell in run.start..run.start + n_pieces {
                    // No overflow: the cells lie in the plane, whose span can be addressed.
                    let offset = u64::from(channel) * s.channel_stride + u64::from(cell) * s.cell_stride;
                    #[expect(clippy::cast_possible_truncation, reason = "the span can be addressed")]
                    call(offset, (u64::from(cells) * s.elem_size) as usize)?;
                }
            }
        }
        Ok(())
    }

    fn strides(&self) -> Strides {
        match *self {
            Self::Rows { row_size, cell_stride } => {
                Strides { n_channel: 1, elem_size: row_size, cell_stride, channel_stride: row_size }
            }
            Self::Channels { n_channel, elem_size, cell_stride, channel_stride } => {
                Strides { n_channel, elem_size: elem_size.into(), cell_stride, channel_stride }
            }
        }
    }
}
