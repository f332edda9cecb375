//! K-shift on a device: one launch for the planes of a device.

use std::collections::HashMap;
use std::ptr;

use bytemuck::{Pod, Zeroable};

use super::device::Grid;
use super::driver::DevicePtr;
use super::moves::{Kernel, MAX_GRID_X, MAX_GRID_Y};
use super::plane::DevicePlane;
use crate::storage::Transfer;
use crate::storage::shift::{Rotation, RotationTable, ShiftFailure, ShiftedCell};
use crate::types::RopeType;

/// Elements of a head that the kernel has room for: `KV_SHIFT_MAX_SPAN` of `cuda/shift.cu`.
pub(in crate::storage) const MAX_SPAN: u32 = 1024;

/// `KvShift` of `cuda/shift.cu`, byte for byte.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Shift {
    base: DevicePtr,
    cell_stride: u64,
    cells: DevicePtr,
    angles: DevicePtr,
    n_cells: u32,
    ggml_type: i32,
    n_head: u32,
    n_embd_head: u32,
    offset: u32,
    n_rope_dims: u32,
    is_neox: u32,
    n_rot_k: u32,
}

const _: () = assert!(size_of::<Shift>() == 64);

/// One plane's part of a shift.
#[derive(Debug)]
pub(in crate::storage) struct ShiftPart<'a> {
    pub plane: &'a DevicePlane,
    pub rotation: &'a Rotation,
    pub table: &'a RotationTable,
}

/// Turns the rows of `cells` in every plane, all of one device; the caller's stream waits for it.
pub(in crate::storage) fn shift(
    parts: &[ShiftPart<'_>],
    cells: &[ShiftedCell],
    transfer: &Transfer,
) -> Result<(), ShiftFailure> {
    let before = |error| ShiftFailure { error, rows_changed: false };
    let after = |error| ShiftFailure { error, rows_changed: true };
    let Some(first) = parts.first() else { return Ok(()) };
    let device = &first.plane.device;
    let mut lane = transfer.staging.lane(device).map_err(before)?;
    let bound = device.bind().map_err(before)?;
    let caller = transfer.stream_of(device);
    lane.join(&bound, caller).map_err(before)?;

    // What the kernel reads: shifts, then cells, then the tables, each once.
    let shifts_len = size_of::<Shift>() * parts.len();
    let mut size = shifts_len + size_of_val(cells);
    let mut tables: Vec<(&RotationTable, usize)> = Vec::new();
    let mut places = HashMap::new();
    for ShiftPart { table, .. } in parts {
        places.entry(ptr::from_ref(*table)).or_insert_with(|| {
            tables.push((table, size));
            size += size_of_val(&table.angles[..]);
            tables.len() - 1
        });
    }
    let at = |start: DevicePtr, offset: usize| start + offset as u64;
    let table = lane.upload(&bound, size, |out, start| {
        for (out, ShiftPart { plane, rotation, table }) in out.chunks_exact_mut(size_of::<Shift>()).zip(parts)
        {
            let shift = Shift {
                base: plane.grid.ptr,
                cell_stride: plane.grid.cell_stride,
                cells: at(start, shifts_len),
                angles: at(start, tables[places[&ptr::from_ref(*table)]].1),
                n_cells: u32::try_from(cells.len()).unwrap_or(u32::MAX),
                ggml_type: rotation.ggml_type.as_i32(),
                n_head: rotation.n_head,
                n_embd_head: rotation.n_embd_head,
                offset: rotation.offset,
                n_rope_dims: rotation.n_rope_dims,
                is_neox: u32::from(rotation.rope_type == RopeType::Neox),
                n_rot_k: rotation.n_rot_k,
            };
            out.copy_from_slice(bytemuck::bytes_of(&shift));
        }
        out[shifts_len..][..size_of_val(cells)].copy_from_slice(bytemuck::cast_slice(cells));
        for (table, offset) in &tables {
            out[*offset..][..size_of_val(&table.angles[..])]
                .copy_from_slice(bytemuck::cast_slice(&table.angles));
        }
    });
    let table = table.map_err(before)?;
    for (i, parts) in parts.chunks(MAX_GRID_Y).enumerate() {
        let blocks = parts.iter().map(|part| cells.len() as u64 * u64::from(part.rotation.n_head)).max();
        let grid = Grid::new(blocks.unwrap_or(1).clamp(1, MAX_GRID_X), parts.len());
        let shifts = at(table, i * MAX_GRID_Y * size_of::<Shift>());
        // SAFETY: the shifts were brought there by `compute`, and are of rows of planes of this device.
        unsafe { bound.launch(Kernel::Shift, grid, shifts, lane.compute) }.map_err(after)?;
    }
    lane.release(&bound, caller).map_err(after)
}
