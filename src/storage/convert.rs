//! Cells that a blob holds in another layout or type than the plane that they go to.
//!
//! A piece is some cells of all channels, converted through buffers of a thread: no second copy of a tensor is made.

use std::ops::Range;

use super::batch::zeroed;
use super::hadamard::hadamard;
use super::{PlaneShape, TensorBytes};
use crate::error::{Error, Result};
use crate::format::GgmlType;

/// Cells that are converted at once: in channels of the smallest elements, a cache line.
const TILE: usize = 32;

/// How the cells of a tensor are kept, in a blob or in a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Type of the elements.
    pub ggml_type: GgmlType,
    /// Channel after channel, not row after row (`v_trans`).
    pub transposed: bool,
    /// Elements are kept as the Walsh-Hadamard transform of each `n_rot`; 0: as they are.
    pub n_rot: u32,
}

/// A way from one layout to another.
///
/// Invariant: cells of `n_embd` elements can be kept in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversion {
    from: TensorLayout,
    to: TensorLayout,
    n_embd: u32,
}

impl TensorLayout {
    /// Rows of a type, not rotated.
    #[must_use]
    pub fn rows(ggml_type: GgmlType) -> Self {
        Self { ggml_type, transposed: false, n_rot: 0 }
    }

    /// Whether cells of `n_embd` elements can be kept like this.
    #[must_use]
    pub fn holds(&self, n_embd: u32) -> bool {
        let is_whole = |n_rot: u32| n_rot.is_power_of_two() && n_embd.is_multiple_of(n_rot);
        self.ggml_type.row_size(n_embd).is_some()
            && !(self.transposed && self.ggml_type.is_quantized())
            && (self.n_rot == 0 || is_whole(self.n_rot))
    }
}

impl Conversion {
    /// The way between two layouts of cells of `n_embd` elements. `None` if they are the same, if one of them cannot hold such
    /// cells, or if values of a type that is not among [`GgmlType::KV`] would have to change.
    #[must_use]
    pub fn new(from: TensorLayout, to: TensorLayout, n_embd: u32) -> Option<Self> {
        let way = Self { from, to, n_embd };
        let knows = [from, to].iter().all(|layout| GgmlType::KV.contains(&layout.ggml_type));
        (from != to && from.holds(n_embd) && to.holds(n_embd) && (knows || way.is_lossless())).then_some(way)
    }

    /// The blob's layout.
    #[must_use]
    pub fn from(&self) -> TensorLayout {
        self.from
    }

    /// The plane's layout.
    #[must_use]
    pub fn to(&self) -> TensorLayout {
        self.to
    }

    /// Whether only the order of the elements changes.
    #[must_use]
    pub fn is_lossless(&self) -> bool {
        (self.from.ggml_type, self.from.n_rot) == (self.to.ggml_type, self.to.n_rot)
    }

    /// Bytes of a cell in the blob.
    pub(super) fn src_cell_bytes(&self) -> u64 {
        self.from.ggml_type.row_size(self.n_embd).unwrap_or(0)
    }

    /// Channels of the blob, and bytes of an element: a row, if it has rows.
    pub(super) fn src_strides(&self) -> (u32, u64) {
        let Self { from, n_embd, .. } = *self;
        if from.transposed { (n_embd, from.ggml_type.type_size().into()) } else { (1, self.src_cell_bytes()) }
    }

    /// Bytes of cells of the blob.
    pub(super) fn src_bytes(&self, cells: &Range<u32>) -> u64 {
        // No overflow: they are in a blob.
        cells.len() as u64 * self.src_cell_bytes()
    }

    /// Checks that `shape` is that of a plane of the layout that is converted to.
    pub(super) fn check_plane(&self, shape: PlaneShape) -> Result<()> {
        let Self { to, n_embd, .. } = self;
        let fits = match shape {
            PlaneShape::Rows { row_size, .. } => {
                !to.transposed && to.ggml_type.row_size(*n_embd) == Some(row_size)
            }
            PlaneShape::Channels { n_channel, elem_size, .. } => {
                to.transposed && n_channel == *n_embd && elem_size == to.ggml_type.type_size()
            }
        };
        if fits {
            return Ok(());
        }
        Err(Error::arg(
            "conversion",
            format!("gives cells of {n_embd} elements as {to:?}, the plane has {shape}"),
        ))
    }

    /// Pieces of a blob of `n_src` cells, which have at most `max` bytes on either side, but at least one cell.
    pub(super) fn pieces(&self, n_src: u32, max: u64) -> impl Iterator<Item = Range<u32>> + use<> {
        let cell = self.src_cell_bytes().max(self.to.ggml_type.row_size(self.n_embd).unwrap_or(0));
        let end = if cell == 0 { 0 } else { n_src };
        let step = u32::try_from(max / cell.max(1)).unwrap_or(u32::MAX).max(1);
        (0..end).step_by(step as usize).map(move |start| start..end.min(start.saturating_add(step)))
    }

    /// Cells `cells` of a blob of `n_src` cells, as a blob of the plane would hold just these.
    pub(super) fn convert<'b>(
        &self,
        src: &TensorBytes<'_>,
        n_src: u32,
        cells: &Range<u32>,
        buffers: &'b mut Buffers,
    ) -> Result<&'b [u8]> {
        let Self { from, to, .. } = *self;
        let Buffers { src: src_buffer, out, tile } = buffers;
        let n_cells = cells.len();
        let out = resized(out, n_cells * self.row_bytes(to))?;
        let (src, stride) = self.read(src, n_src, cells, src_buffer)?;
        let n_embd = self.n_embd as usize;
        if self.is_lossless() {
            let elem = from.ggml_type.type_size();
            if from.transposed {
                transpose(elem, (src, stride), (out, self.row_bytes(to)), (n_embd, n_cells))?;
            } else {
                transpose(elem, (src, stride), (out, n_cells * elem as usize), (n_cells, n_embd))?;
            }
            return Ok(out);
        }
        for first in (0..n_cells).step_by(TILE) {
            let n = TILE.min(n_cells - first);
            self.convert_tile((src, stride), (out, n_cells), first..first + n, tile)?;
        }
        Ok(out)
    }

    /// Cells `cells` of a piece of `n_cells`, by way of f32.
    fn convert_tile(
        &self,
        (src, stride): (&[u8], usize),
        (out, n_cells): (&mut [u8], usize),
        cells: Range<usize>,
        tile: &mut Tile,
    ) -> Result<()> {
        let Self { from, to, n_embd } = *self;
        let (from_row, to_row) = (self.row_bytes(from), self.row_bytes(to));
        let n = cells.len();
        let rows = if from.transposed {
            let elem = from.ggml_type.type_size();
            let rows = resized(&mut tile.src, n * from_row)?;
            let src = &src[cells.start * elem as usize..];
            transpose(elem, (src, stride), (rows, from_row), (n_embd as usize, n))?;
            &*rows
        } else {
            &src[cells.start * stride..cells.end * stride]
        };
        tile.values.resize(n_embd as usize, 0.0);
        let rows_out = if to.transposed {
            resized(&mut tile.out, n * to_row)?
        } else {
            &mut out[cells.start * to_row..cells.end * to_row]
        };
        for (src, dst) in rows.chunks_exact(from_row).zip(rows_out.chunks_exact_mut(to_row)) {
            from.ggml_type.row_to_f32(src, &mut tile.values)?;
            if from.n_rot != to.n_rot {
                hadamard(&mut tile.values, from.n_rot);
                hadamard(&mut tile.values, to.n_rot);
            }
            to.ggml_type.row_from_f32(&tile.values, dst)?;
        }
        if to.transposed {
            let elem = to.ggml_type.type_size();
            let out = &mut out[cells.start * elem as usize..];
            transpose(elem, (&tile.out, to_row), (out, n_cells * elem as usize), (n, n_embd as usize))?;
        }
        Ok(())
    }

    /// Bytes of a cell, which are in memory.
    fn row_bytes(&self, layout: TensorLayout) -> usize {
        layout.ggml_type.row_size(self.n_embd).and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
    }

    /// Cells of the blob, from memory where they are, and how many bytes it is from one row, or channel, to the next.
    fn read<'b>(
        &self,
        src: &'b TensorBytes<'_>,
        n_src: u32,
        cells: &Range<u32>,
        buffer: &'b mut Vec<u8>,
    ) -> Result<(&'b [u8], usize)> {
        let (start, len) = (u64::from(cells.start), cells.len());
        if !self.from.transposed {
            let row = self.src_cell_bytes();
            return Ok((src.piece(start * row, len as u64 * row, buffer)?, self.row_bytes(self.from)));
        }
        let elem = self.from.ggml_type.type_size() as usize;
        if let TensorBytes::Memory(bytes) = *src {
            return Ok((&bytes[cells.start as usize * elem..], n_src as usize * elem));
        }
        let buffer = resized(buffer, self.n_embd as usize * len * elem)?;
        for (channel, out) in (0..).zip(buffer.chunks_exact_mut(len * elem)) {
            // No overflow: it is an offset in the blob.
            src.read((channel * u64::from(n_src) + start) * elem as u64, out)?;
        }
        Ok((buffer, len * elem))
    }
}

/// What a thread converts through.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    src: Vec<u8>,
    out: Vec<u8>,
    tile: Tile,
}

#[derive(Debug, Default)]
struct Tile {
    src: Vec<u8>,
    values: Vec<f32>,
    out: Vec<u8>,
}

/// The first `len` bytes of a buffer, which grows if need be. What they hold is anything.
fn resized(buffer: &mut Vec<u8>, len: usize) -> Result<&mut [u8]> {
    if buffer.len() < len {
        *buffer = zeroed(len as u64, "the buffer of a conversion")?;
    }
    Ok(&mut buffer[..len])
}

/// A matrix of elements of `elem` bytes: its bytes, and how many of them it is from one row to the next.
type Matrix<T> = (T, usize);

/// Writes `n_row` rows of `n_col` elements as `n_col` rows of `n_row`.
fn transpose(
    elem: u32,
    src: Matrix<&[u8]>,
    dst: Matrix<&mut [u8]>,
    (n_row, n_col): (usize, usize),
) -> Result<()> {
    match elem {
        1 => transpose_elements::<1>(src, dst, n_row, n_col),
        2 => transpose_elements::<2>(src, dst, n_row, n_col),
        4 => transpose_elements::<4>(src, dst, n_row, n_col),
        8 => transpose_elements::<8>(src, dst, n_row, n_col),
        other => return Err(Error::Internal(format!("elements of {other} bytes are not transposed"))),
    }
    Ok(())
}

/// Rows and columns of a block whose elements stay in registers.
const BLOCK: usize = 8;

fn transpose_elements<const E: usize>(
    (src, src_stride): Matrix<&[u8]>,
    (dst, dst_stride): Matrix<&mut [u8]>,
    n_row: usize,
    n_col: usize,
) {
    // Tiles whose lines of either side stay in the cache.
    for rows in tiles(n_row) {
        for cols in tiles(n_col) {
            for row in rows.clone().step_by(BLOCK) {
                for col in cols.clone().step_by(BLOCK) {
                    let (n_row, n_col) = (BLOCK.min(rows.end - row), BLOCK.min(cols.end - col));
                    let mut block = [[[0_u8; E]; BLOCK]; BLOCK];
                    for (i, block) in block.iter_mut().enumerate().take(n_row) {
                        let src = src[(row + i) * src_stride + col * E..][..n_col * E].as_chunks().0;
                        match <&[_; BLOCK]>::try_from(src) {
                            Ok(src) => *block = *src,
                            Err(_) => block[..n_col].copy_from_slice(src),
                        }
                    }
                    for j in 0..n_col {
                        let column: [[u8; E]; BLOCK] = std::array::from_fn(|i| block[i][j]);
                        let dst = dst[(col + j) * dst_stride + row * E..][..n_row * E].as_chunks_mut().0;
                        match <&mut [_; BLOCK]>::try_from(&mut *dst) {
                            Ok(dst) => *dst = column,
                            Err(_) => dst.copy_from_slice(&column[..n_row]),
                        }
                    }
                }
            }
        }
    }
}

fn tiles(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(TILE).map(move |start| start..n.min(start + TILE))
}
