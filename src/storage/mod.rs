//! Where tensor bytes live, and how they travel between a cache and a blob.
//!
//! A plane is one layer's K or V of one stream. [`gather`] reads cells of many planes into a blob,
//! [`scatter`] writes a blob's cells into many planes; both check the whole batch before the first byte.

mod host;
mod plane;
mod stream;

use std::ops::Range;
use std::sync::Arc;

pub use plane::{Plane, TensorAccess};

use crate::error::{Error, Result};
use crate::types::{Move, Run};

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
            return Err(format!("{self:?} with {kv_size} cells holds no bytes"));
        }
        if self.span(kv_size).is_none_or(|span| isize::try_from(span).is_err()) {
            return Err(format!("{self:?} with {kv_size} cells spans more bytes than can be addressed"));
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
            Err(format!("{self:?} with {kv_size} cells: cells overlap"))
        }
    }

    /// Calls with the offset and the bytes of every contiguous piece of `channels` of the cells of `runs`, in
    /// blob order.
    fn each_piece(
        &self,
        runs: &[Run],
        channels: &Range<u32>,
        mut call: impl FnMut(u64, usize) -> Result<()>,
    ) -> Result<()> {
        let s = self.strides();
        let is_dense = s.cell_stride == s.elem_size;
        for channel in channels.clone() {
            for run in runs {
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

/// Cells of one plane as they stand in a blob.
///
/// Rows: the rows one after another. Channels: one channel of all the cells, then the next.
#[derive(Clone, Debug)]
pub struct Region<'a> {
    plane: &'a Plane,
    runs: Arc<[Run]>,
    n_cells: u32,
    channels: Range<u32>,
}

impl<'a> Region<'a> {
    /// The cells of `runs`, in that order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a run is empty or leaves the plane, or the runs have more cells than it.
    pub fn new(plane: &'a Plane, runs: &Arc<[Run]>) -> Result<Self> {
        let n_cells = plane.check_runs(runs)?;
        let channels = 0..plane.shape().strides().n_channel;
        Ok(Self { plane, runs: Arc::clone(runs), n_cells, channels })
    }

    /// Bytes of the region in a blob.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // No overflow: cells do not overlap, so this is at most the plane's span.
        self.channel_bytes() * u64::from(self.channels.end - self.channels.start)
    }

    /// Cuts the region into pieces, in blob order, of at most `max` bytes, but at least one row or channel.
    ///
    /// A region without cells has no pieces.
    pub fn split(self, max: u64) -> impl Iterator<Item = Region<'a>> {
        let pieces: Vec<Self> = match self.plane.shape() {
            PlaneShape::Rows { row_size, .. } => cut(&self.runs, at_least_one(max / row_size))
                .into_iter()
                .map(|(runs, n_cells)| Self { runs: runs.into(), n_cells, ..self.clone() })
                .collect(),
            PlaneShape::Channels { .. } if self.n_cells == 0 => Vec::new(),
            PlaneShape::Channels { .. } => {
                let step = at_least_one(max / self.channel_bytes());
                let end = self.channels.end;
                self.channels
                    .clone()
                    .step_by(step as usize)
                    .map(|start| Self {
                        channels: start..end.min(start.saturating_add(step)),
                        ..self.clone()
                    })
                    .collect()
            }
        };
        pieces.into_iter()
    }

    /// The bytes themselves, where they lie in memory just as in a blob: a file write can skip the copy.
    #[must_use]
    pub fn as_contiguous(&self) -> Option<&'a [u8]> {
        match *self.runs {
            [run] => self.plane.contiguous(run, &self.channels),
            _ => None,
        }
    }

    /// The owner's name for the tensor, 0 if it gave none.
    #[must_use]
    pub fn tensor(&self) -> usize {
        self.plane.tensor()
    }

    /// Calls with the offset (from the start of the plane) and the bytes of every contiguous piece, in blob order.
    ///
    /// # Errors
    /// What `call` returns.
    pub fn each_piece(&self, call: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
        self.plane.shape().each_piece(&self.runs, &self.channels, call)
    }

    fn channel_bytes(&self) -> u64 {
        u64::from(self.n_cells) * self.plane.shape().strides().elem_size
    }
}

/// A step of a split, which neither stands still nor passes what a plane can have.
fn at_least_one(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

/// `runs` in pieces of `max` cells, each with its number of cells; only the last may have fewer.
fn cut(runs: &[Run], max: u32) -> Vec<(Vec<Run>, u32)> {
    let mut pieces = Vec::new();
    let (mut piece, mut n_cells) = (Vec::new(), 0);
    for &Run { mut start, mut len } in runs {
        while len > 0 {
            let n = len.min(max - n_cells);
            piece.push(Run { start, len: n });
            n_cells += n;
            start += n;
            len -= n;
            if n_cells == max {
                pieces.push((std::mem::take(&mut piece), max));
                n_cells = 0;
            }
        }
    }
    if n_cells > 0 {
        pieces.push((piece, n_cells));
    }
    pieces
}

/// Writes every region of a batch to its offset (bytes) in `out`.
///
/// # Errors
/// [`Error::BufferTooSmall`] if a region ends past `out`; nothing is written then.
pub fn gather(batch: &[(u64, Region<'_>)], out: &mut [u8]) -> Result<()> {
    let size = out.len() as u64;
    let end = |(offset, region): &(u64, Region<'_>)| offset.saturating_add(region.bytes());
    let need = batch.iter().map(end).max().unwrap_or(0);
    if need > size {
        return Err(Error::BufferTooSmall { need, size });
    }
    for (offset, region) in batch {
        #[expect(clippy::cast_possible_truncation, reason = "both lie inside `out`")]
        let (offset, bytes) = (*offset as usize, region.bytes() as usize);
        region.plane.read(&region.runs, &region.channels, &mut out[offset..][..bytes])?;
    }
    Ok(())
}

/// One plane's part of a restore.
#[derive(Debug)]
pub struct Scatter<'a> {
    /// Where the cells go.
    pub plane: &'a mut Plane,
    /// Which cells of the blob go to which cells of the plane.
    pub moves: &'a [Move],
    /// Cells in the blob.
    pub n_src: u32,
    /// The whole region of the `n_src` cells, in blob order.
    pub src: &'a [u8],
}

/// Writes the moved cells of every part into its plane, and no other byte.
///
/// # Errors
/// [`Error::InvalidArgument`] if `src` is not `n_src` cells, or a move is empty or leaves the blob or the
/// plane; nothing is written then.
pub fn scatter(batch: Vec<Scatter<'_>>) -> Result<()> {
    for part in &batch {
        part.plane.check_write(part.moves, part.n_src, part.src)?;
    }
    for part in batch {
        part.plane.write(part.moves, part.n_src, part.src)?;
    }
    Ok(())
}
