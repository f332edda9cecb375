//! K-shift: turns the K rows of cells by positions, in place.
//!
//! RoPE turns pairs of elements by angles that grow with the position, so K of position p becomes K of position p + n
//! when it is turned by n more. cuda/shift.cu does the same arithmetic in the same order.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::batch::by_device;
use super::cuda::{self, ShiftPart};
use super::hadamard::hadamard;
use super::{Plane, PlaneShape, Transfer};
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::types::RopeType;

/// Bytes of K that are worth another thread.
const THREAD_MIN: u64 = 256 << 10;

/// Bytes that are asked of a remote tensor's owner at once, if they lie together.
const REMOTE_CHUNK: u64 = 64 << 10;

/// Which elements of a K row are turned.
///
/// Invariant, checked by whoever makes one: the pairs lie in a head; heads are whole blocks of a quantised type and
/// whole Hadamard blocks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rotation {
    pub ggml_type: GgmlType,
    pub n_head: u32,
    pub n_embd_head: u32,
    /// The first turned element of a head.
    pub offset: u32,
    /// Turned elements of a head.
    pub n_rope_dims: u32,
    pub rope_type: RopeType,
    /// The row holds each `n_rot_k` elements of RoPE's result as their Walsh-Hadamard transform; 0: as they are.
    pub n_rot_k: u32,
}

/// Cosine and sine of the angle of each pair, a row for each number of positions.
#[derive(Debug)]
pub(crate) struct RotationTable {
    pub n_pair: usize,
    pub angles: Vec<[f32; 2]>,
}

/// A cell, and the row of the table that it is turned by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct ShiftedCell {
    pub cell: u32,
    pub row: u32,
}

/// One plane's part of a shift.
#[derive(Debug)]
pub(crate) struct PlaneShift<'a> {
    pub plane: &'a mut Plane,
    pub rotation: &'a Rotation,
    pub table: &'a RotationTable,
}

/// Why a shift was not done.
#[derive(Debug)]
pub(crate) struct ShiftFailure {
    pub error: Error,
    /// Whether some rows may be turned; which ones is not known then.
    pub rows_changed: bool,
}

/// Turns the rows of `cells`, which ascend, in every plane of the batch.
pub(crate) fn shift(
    batch: Vec<PlaneShift<'_>>,
    cells: &[ShiftedCell],
    transfer: &Transfer,
) -> Result<(), ShiftFailure> {
    for part in &batch {
        part.check(cells).map_err(|error| ShiftFailure { error, rows_changed: false })?;
    }
    let (on_device, batch): (Vec<_>, Vec<_>) = batch.into_iter().partition(PlaneShift::is_for_kernel);
    let mut rows_changed = false;
    for group in by_device(on_device, |part| part.plane.device()) {
        let parts: Vec<_> = group
            .iter()
            .filter_map(|PlaneShift { plane, rotation, table }| {
                Some(ShiftPart { plane: plane.on_device()?, rotation, table })
            })
            .collect();
        cuda::shift(&parts, cells, transfer).map_err(|failure| ShiftFailure {
            rows_changed: failure.rows_changed || rows_changed,
            ..failure
        })?;
        rows_changed = true;
    }
    let (mut bytes, mut is_remote) = (0, false);
    for part in &batch {
        bytes += part.plane.shape().cell_bytes() * cells.len() as u64;
        is_remote |= part.plane.is_remote() || part.plane.on_device().is_some();
    }
    // The calls of a remote tensor's owner come from the thread that calls.
    let worth = if is_remote { 1 } else { usize::try_from(bytes / THREAD_MIN).unwrap_or(usize::MAX) };
    let threads = transfer.threads.count().min(worth).min(batch.len());
    let parts = Mutex::new(batch.into_iter());
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut head = Vec::new();
        while let Some(mut part) = next() {
            part.turn(cells, &mut head, transfer)?;
        }
        Ok(())
    };
    let done = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (1..threads).map_while(spawn).collect();
        let own = work();
        workers.into_iter().fold(own, |done, worker| {
            done.and(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    });
    done.map_err(|error| ShiftFailure { error, rows_changed: true })
}

impl PlaneShift<'_> {
    fn check(&self, cells: &[ShiftedCell]) -> Result<()> {
        let Self { plane, rotation, table } = self;
        let row_size = rotation.ggml_type.row_size(rotation.n_head * rotation.n_embd_head);
        let is_row =
            matches!(plane.shape(), PlaneShape::Rows { row_size: size, .. } if Some(size) == row_size);
        let cells_fit = cells.last().is_none_or(|last| last.cell < plane.kv_size());
        let n_row = table.angles.len() / table.n_pair;
        let rows_fit = cells.iter().all(|cell| (cell.row as usize) < n_row);
        if is_row && cells_fit && rows_fit && table.n_pair == rotation.n_pair() {
            return Ok(());
        }
        Err(Error::Internal(format!("{rotation:?} of {} cells by {n_row} rows in {plane:?}", cells.len())))
    }

    /// Whether a kernel of a device does it.
    fn is_for_kernel(&self) -> bool {
        let Range { start, end } = self.rotation.span();
        self.plane.on_device().is_some() && end - start <= cuda::MAX_SPAN
    }

    fn turn(&mut self, cells: &[ShiftedCell], head: &mut Vec<f32>, transfer: &Transfer) -> Result<()> {
        let Self { plane, rotation, table } = self;
        if plane.is_remote() || plane.on_device().is_some() {
            return self.turn_elsewhere(cells, head, transfer);
        }
        for cell in cells {
            let row = plane.row_mut(cell.cell).ok_or_else(|| Error::Internal(format!("no row {cell:?}")))?;
            rotation.turn(row, table.row(cell.row), head)?;
        }
        Ok(())
    }

    /// Rows that are not in host memory: they are fetched, turned, and brought back.
    fn turn_elsewhere(
        &mut self,
        cells: &[ShiftedCell],
        head: &mut Vec<f32>,
        transfer: &Transfer,
    ) -> Result<()> {
        let Self { plane, rotation, table } = self;
        let PlaneShape::Rows { row_size, cell_stride } = plane.shape() else { return Ok(()) };
        let row_len = usize::try_from(row_size).expect("a plane can be addressed");
        let at_once = usize::try_from((REMOTE_CHUNK / row_size).max(1)).expect("few");
        let is_dense = row_size == cell_stride;
        let mut bytes = Vec::new();
        for run in cells.chunk_by(|a, b| is_dense && a.cell + 1 == b.cell) {
            for cells in run.chunks(at_once) {
                bytes.resize(cells.len() * row_len, 0);
                let offset = u64::from(cells[0].cell) * cell_stride;
                plane.get(offset, &mut bytes, transfer)?;
                for (cell, row) in cells.iter().zip(bytes.chunks_exact_mut(row_len)) {
                    rotation.turn(row, table.row(cell.row), head)?;
                }
                plane.set(offset, &bytes, transfer)?;
            }
        }
        Ok(())
    }
}

impl RotationTable {
    /// For `shifts` positions each, with pairs that turn by `frequencies` a position.
    pub fn new(frequencies: &[f64], shifts: &[i32]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "rounded once, for host and device")]
        let angle = |shift: i32, frequency: f64| {
            let (sin, cos) = (f64::from(shift) * frequency).sin_cos();
            [cos as f32, sin as f32]
        };
        let row = |&shift: &i32| frequencies.iter().map(move |&frequency| angle(shift, frequency));
        Self { n_pair: frequencies.len(), angles: shifts.iter().flat_map(row).collect() }
    }

    fn row(&self, row: u32) -> &[[f32; 2]] {
        &self.angles[row as usize * self.n_pair..][..self.n_pair]
    }
}

impl Rotation {
    pub fn n_pair(&self) -> usize {
        self.n_rope_dims as usize / 2
    }

    /// The elements of a head that are decoded and written again: whole blocks around those that are turned.
    fn span(&self) -> Range<u32> {
        let unit = self.n_rot_k.max(1).max(self.ggml_type.block_size());
        let end = (self.offset + self.n_rope_dims).next_multiple_of(unit);
        self.offset / unit * unit..end
    }

    /// Turns a row; what is outside the span keeps its bytes.
    fn turn(&self, row: &mut [u8], angles: &[[f32; 2]], head: &mut Vec<f32>) -> Result<()> {
        let span = self.span();
        let bytes_of = |elements: u32| {
            elements as usize / self.ggml_type.block_size() as usize * self.ggml_type.type_size() as usize
        };
        head.resize(span.len(), 0.0);
        for row in row.chunks_exact_mut(bytes_of(self.n_embd_head)) {
            let bytes = &mut row[bytes_of(span.start)..bytes_of(span.end)];
            self.ggml_type.row_to_f32(bytes, head)?;
            hadamard(head, self.n_rot_k);
            self.turn_pairs(&mut head[(self.offset - span.start) as usize..], angles);
            hadamard(head, self.n_rot_k);
            self.ggml_type.row_from_f32(head, bytes)?;
        }
        Ok(())
    }

    fn turn_pairs(&self, x: &mut [f32], angles: &[[f32; 2]]) {
        let turn = |a: &mut f32, b: &mut f32, &[cos, sin]: &[f32; 2]| {
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        };
        match self.rope_type {
            RopeType::Normal => {
                x.as_chunks_mut().0.iter_mut().zip(angles).for_each(|([a, b], angle)| turn(a, b, angle));
            }
            RopeType::Neox => {
                let (a, b) = x.split_at_mut(self.n_pair());
                a.iter_mut().zip(b).zip(angles).for_each(|((a, b), angle)| turn(a, b, angle));
            }
        }
    }
}
