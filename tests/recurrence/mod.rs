//! An engine with a recurrent state that tells which tokens it has seen, and in which order.
//!
//! It does with rows what a slot says, nothing else. So a state that is in the wrong row, or was not moved when another took its row,
//! comes to light in its bytes.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use kvstate::Context;
use kvstate::context::UbatchToken;
use kvstate::error::Result;
use kvstate::format::GgmlType;
use kvstate::memory::{RecurrentLayerParams, RecurrentParams, RecurrentSlot, RecurrentTensor, TensorParams};
use kvstate::storage::Plane;
use kvstate::types::{CellExt, Pos, SeqId};

use crate::support::place;

/// Layers with R, S and P, without a state, with R and an S without elements, with S alone.
pub fn params(n_rs_seq: u32) -> RecurrentParams {
    let f32s = |n_embd| Some(TensorParams { ggml_type: GgmlType::F32, n_embd });
    let none = RecurrentLayerParams::default();
    let layers = vec![
        RecurrentLayerParams { r: f32s(3), s: f32s(5), p: Some(2) },
        none,
        RecurrentLayerParams { r: f32s(4), s: f32s(0), p: None },
        RecurrentLayerParams { s: f32s(2), ..none },
    ];
    RecurrentParams { layers, n_rs_seq }
}

/// Bytes of all tensors of one state of [`params`].
pub const STATE_BYTES: usize = 4 * (3 + 2 + 4 + 5 + 2);

/// The state after a token.
pub fn step(state: &[u8], pos: Pos) -> Vec<u8> {
    let seen = |i: usize| {
        u8::try_from((i + 1) * (usize::try_from(pos).expect("a position") + 7) % 251).expect("a byte")
    };
    state.iter().enumerate().map(|(i, byte)| byte.wrapping_mul(31).wrapping_add(seen(i))).collect()
}

/// The planes of a section, in the order of a state.
fn planes(ctx: &Context, section: usize) -> Vec<&Plane> {
    let of = |layer, tensor| ctx.recurrent_plane(section, layer, tensor).expect("a layer");
    let n_layer =
        (0..99).take_while(|&layer| ctx.recurrent_plane(section, layer, RecurrentTensor::R).is_ok());
    let layers: Vec<_> = n_layer.collect();
    let first =
        layers.iter().flat_map(|&layer| [RecurrentTensor::R, RecurrentTensor::P].map(|t| of(layer, t)));
    first.chain(layers.iter().map(|&layer| of(layer, RecurrentTensor::S))).flatten().collect()
}

/// What a row holds, of all tensors one after another.
pub fn read_row(ctx: &Context, section: usize, row: u32) -> Vec<u8> {
    planes(ctx, section)
        .into_iter()
        .flat_map(|plane| {
            let (offset, len) = piece(plane, row);
            place::read(plane, offset, len)
        })
        .collect()
}

fn write_row(ctx: &Context, section: usize, row: u32, mut bytes: &[u8]) {
    for plane in planes(ctx, section) {
        let (offset, len) = piece(plane, row);
        let (piece, rest) = bytes.split_at(len);
        place::write(plane, offset, piece);
        bytes = rest;
    }
}

fn piece(plane: &Plane, row: u32) -> (usize, usize) {
    let kvstate::storage::PlaneShape::Rows { row_size, cell_stride } = plane.shape() else {
        panic!("states are rows")
    };
    let at = |n: u64| usize::try_from(n).expect("an offset");
    (at(u64::from(row) * cell_stride), at(row_size))
}

/// Every byte of the section's planes.
pub fn all_bytes(ctx: &Context, section: usize) -> Vec<u8> {
    planes(ctx, section).into_iter().flat_map(place::all).collect()
}

/// The state of a sequence where the section says that it is.
pub fn state_of(ctx: &Context, section: usize, seq: SeqId) -> Option<Vec<u8>> {
    let state = ctx.recurrent_state(section, seq).expect("a recurrent section")?;
    Some(read_row(ctx, section, state.row))
}

/// Decodes tokens `(sequences, pos)`; recurrent sections of `n_rs_seq` planes beside the first are `sections`.
pub fn decode(ctx: &mut Context, sections: &[(usize, u32)], tokens: &[(&[SeqId], Pos)]) -> Result<()> {
    let ubatch: Vec<_> =
        tokens.iter().map(|&(seq_ids, pos)| UbatchToken { pos, ext: CellExt::default(), seq_ids }).collect();
    let slot = ctx.prepare(&ubatch)?;
    ctx.commit(&slot)?;
    for &(section, n_rs_seq) in sections {
        let cells = slot.cells(section).expect("a section");
        compute(ctx, section, n_rs_seq, slot.recurrent(section).expect("a recurrent section"), tokens, cells);
    }
    Ok(())
}

fn compute(
    ctx: &Context,
    section: usize,
    n_rs_seq: u32,
    slot: &RecurrentSlot,
    tokens: &[(&[SeqId], Pos)],
    cells: &[u32],
) {
    let n_seq_max = ctx.n_seq_max();
    // All rows are read before any is written.
    let moved: Vec<_> = slot.moves.iter().map(|&(to, from)| (to, read_row(ctx, section, from))).collect();
    let mut writes = Vec::new();
    for (cell, source) in (slot.head..).zip(&slot.sources) {
        // The newest first; behind the source's are older ones.
        let mut states = match *source {
            Some(row) => (row..n_seq_max * (1 + n_rs_seq))
                .step_by(n_seq_max as usize)
                .map(|row| read_row(ctx, section, row))
                .collect(),
            None => vec![vec![0; STATE_BYTES]],
        };
        for (&(_, pos), _) in tokens.iter().zip(cells).filter(|&(_, &of)| of == cell) {
            states.insert(0, step(&states[0], pos));
        }
        let rows = (0..=n_rs_seq).map(|plane| plane * n_seq_max + cell);
        writes.extend(rows.zip(states));
    }
    moved.into_iter().chain(writes).for_each(|(row, bytes)| write_row(ctx, section, row, &bytes));
}

/// The state after these positions.
pub fn after(positions: impl IntoIterator<Item = Pos>) -> Vec<u8> {
    positions.into_iter().fold(vec![0; STATE_BYTES], |state, pos| step(&state, pos))
}
