//! Recurrent sections: how they are described, and where an engine reads and writes their states.

use std::ffi::c_void;
use std::ptr;

use super::engine::{KVS_DEVICE_HOST, kvs_plane, plane_or_none};
use super::handle::{
    self, array_mut, host_bytes, host_bytes_mut, kvs_context, kvs_slot, out, with_context, with_context_mut,
};
use super::kv_params::{KVS_TYPE_F32, adopt, device, ggml_type};
use super::params::{self, Params, flag};
use super::status::{kvs_status, status_of};
use super::{kvs_pos, kvs_seq_id};
use crate::error::{Error, Result};
use crate::memory::{
    RecurrentLayerParams, RecurrentMemory, RecurrentParams, RecurrentPlanes, RecurrentSlot, RecurrentTensor,
    SectionParams, TensorParams,
};
use crate::storage::{Plane, PlaneShape};

/// One layer of a recurrent section; one without a state is listed, too. Fill with kvs_recurrent_layer_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_recurrent_layer_params {
    /// sizeof(kvs_recurrent_layer_params), set by the init call.
    pub struct_size: usize,
    /// 1: the layer has R, the state of the convolution. By default 0.
    pub has_r: u32,
    /// 1: the layer has S, the state of the recurrence. By default 0; an S of 0 elements is not the same as none.
    pub has_s: u32,
    /// ggml type of R and P; by default f32.
    pub type_r: i32,
    /// ggml type of S; by default f32.
    pub type_s: i32,
    /// Elements of a row of R.
    pub n_embd_r: u32,
    /// Elements of a row of S.
    pub n_embd_s: u32,
    /// Elements of a row of P, a second row beside R in models with n-gram embeddings; 0: the layer has no P.
    pub n_embd_p: u32,
    /// KVS_DEVICE_HOST (by default), or the number of a CUDA device, as in kvs_kv_layer_params.
    pub device: i32,
    /// Memory of the caller for R (adopted): n_seq_max * (1 + n_rs_seq) rows, one behind the other; NULL: kvstate allocates
    /// (managed), or R has no elements. Either all tensors of a section are adopted or none. It must outlive the context.
    pub r: *mut c_void,
    /// Memory of the caller for S.
    pub s: *mut c_void,
    /// Memory of the caller for P.
    pub p: *mut c_void,
}

/// Recurrent states: one for each sequence, whatever its length. Fill with kvs_recurrent_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_recurrent_params {
    /// sizeof(kvs_recurrent_params), set by the init call.
    pub struct_size: usize,
    /// Number of layers of the model.
    pub n_layer: u32,
    /// Rollback planes: positions by which the end of a sequence can be cut off after a ubatch. By default 0.
    pub n_rs_seq: u32,
    /// The layers, in the order of the model.
    pub layers: *const kvs_recurrent_layer_params,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_recurrent_layer_params {
    const NAME: &'static str = "kvs_recurrent_layer_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            has_r: 0,
            has_s: 0,
            type_r: KVS_TYPE_F32,
            type_s: KVS_TYPE_F32,
            n_embd_r: 0,
            n_embd_s: 0,
            n_embd_p: 0,
            device: KVS_DEVICE_HOST,
            r: ptr::null_mut(),
            s: ptr::null_mut(),
            p: ptr::null_mut(),
        }
    }
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_recurrent_params {
    const NAME: &'static str = "kvs_recurrent_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self { struct_size: 0, n_layer: 0, n_rs_seq: 0, layers: ptr::null() }
    }
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_recurrent_layer_params_init(
    params: *mut kvs_recurrent_layer_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_recurrent_params_init(
    params: *mut kvs_recurrent_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Where a ubatch reads and writes states in a recurrent section. A row counts through all planes of a tensor: row
/// k * n_seq_max + c is the state of cell c, k tokens before its newest one.
///
/// Every row that is read (kvs_slot_sources, kvs_slot_moves) is read before any is written.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_recurrent_slot {
    /// The cell of the first sequence set of the ubatch, those of the others follow it. The ubatch writes the newest state of
    /// each into its cell, and those of the tokens before it k * n_seq_max rows behind that, as far as there are planes and tokens: only these count
    /// for kvs_memory_max_cut.
    pub head: u32,
    /// Sequence sets: tokens whose sequences are the same, in the order in which the ubatch names them first.
    pub n_set: u32,
    /// Rows that have to move.
    pub n_move: u32,
}

/// A row that has to move, in every tensor: its cell is taken by the ubatch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_row_move {
    /// Where it goes.
    pub to: u32,
    /// Where it is.
    pub from: u32,
}

/// The state of a sequence in a recurrent section.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_recurrent_state {
    /// The last position that it has seen; -1: there is none, and the fields below are 0.
    pub pos: kvs_pos,
    /// Its row in every tensor.
    pub row: u32,
    /// By how many tokens the sequence was cut back since its last ubatch; the next one ends it.
    pub rollback: u32,
    /// How many rollback planes behind it hold states of the tokens before. -1: the row does not hold the state of pos, for
    /// kvs_memory_seq_rm, which answers as llama.cpp's, has gone further back than states were kept (kvs_memory_max_cut).
    pub n_older: i32,
}

/// The recurrent part of a slot. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_recurrent(
    slot: *const kvs_slot,
    section: u32,
    recurrent_out: *mut kvs_recurrent_slot,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let found = recurrent(slot, section)?;
        let count = |n: usize| u32::try_from(n).map_err(|_| Error::Internal(format!("{n} rows")));
        let (n_set, n_move) = (count(found.sources.len())?, count(found.moves.len())?);
        *out("recurrent_out", recurrent_out)? = kvs_recurrent_slot { head: found.head, n_set, n_move };
        Ok(())
    })
}

/// The row that the state of each sequence set is in before the ubatch; -1: it begins with zeros. n is n_set. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_sources(
    slot: *const kvs_slot,
    section: u32,
    rows: *mut i64,
    n: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let sources = &recurrent(slot, section)?.sources;
        let rows = exactly("rows", rows, n, ("n_set", sources.len()))?;
        for (row, source) in rows.iter_mut().zip(sources) {
            *row = source.map_or(-1, i64::from);
        }
        Ok(())
    })
}

/// The rows that have to move before the ubatch writes. n is n_move. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_moves(
    slot: *const kvs_slot,
    section: u32,
    moves: *mut kvs_row_move,
    n: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let found = &recurrent(slot, section)?.moves;
        let moves = exactly("moves", moves, n, ("n_move", found.len()))?;
        for (to_move, &(to, from)) in moves.iter_mut().zip(found) {
            *to_move = kvs_row_move { to, from };
        }
        Ok(())
    })
}

/// Where the state of a sequence is in a recurrent section. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_recurrent_state_get(
    ctx: *const kvs_context,
    section: u32,
    seq_id: kvs_seq_id,
    state_out: *mut kvs_recurrent_state,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let found = with_context(ctx, |context| context.recurrent_state(section as usize, seq_id))?;
        let none = kvs_recurrent_state { pos: -1, row: 0, rollback: 0, n_older: 0 };
        *out("state_out", state_out)? = found.map_or(none, |state| kvs_recurrent_state {
            pos: state.pos,
            row: state.row,
            rollback: state.rollback,
            n_older: state.n_older.map_or(-1, u32::cast_signed),
        });
        Ok(())
    })
}

/// R of a layer.
pub const KVS_RECURRENT_R: u32 = 0;
/// P of a layer.
pub const KVS_RECURRENT_P: u32 = 1;
/// S of a layer.
pub const KVS_RECURRENT_S: u32 = 2;

/// Where R, P or S (which: KVS_RECURRENT_*) of a layer of a recurrent section lies: row r is cell r of the plane. data is NULL
/// and n_embd 0 if the layer has no such tensor, or one without elements. The addresses stay as long as the context does. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_recurrent_plane(
    ctx: *const kvs_context,
    section: u32,
    layer: u32,
    which: u32,
    plane_out: *mut kvs_plane,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let which = recurrent_tensor(which)?;
        let found = with_context(ctx, |context| {
            let (section, layer) = (section as usize, layer as usize);
            let plane = context.recurrent_plane(section, layer, which)?;
            let tensor = context.recurrent_tensor(section, layer, which)?;
            Ok(plane_or_none(plane.zip(tensor)))
        })?;
        *out("plane_out", plane_out)? = found;
        Ok(())
    })
}

/// Copies size bytes of R, P or S (which: KVS_RECURRENT_*) of a layer of a recurrent section to dst, from offset on: bytes from
/// row 0, laid out as kvs_recurrent_plane tells. For programs without CUDA code, and for looking: it waits for each copy. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_recurrent_get(
    ctx: *const kvs_context,
    section: u32,
    layer: u32,
    which: u32,
    offset: u64,
    dst: *mut c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let dst = host_bytes_mut("dst", dst.cast(), size)?;
        let which = recurrent_tensor(which)?;
        with_context(ctx, |context| {
            context.recurrent_get((section as usize, layer as usize), which, offset, dst)
        })
    })
}

/// Copies size bytes from src into R, P or S, as kvs_recurrent_get the other way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_recurrent_set(
    ctx: *mut kvs_context,
    section: u32,
    layer: u32,
    which: u32,
    offset: u64,
    src: *const c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let src = host_bytes("src", src.cast(), size)?;
        let which = recurrent_tensor(which)?;
        with_context_mut(ctx, |context| {
            context.recurrent_set((section as usize, layer as usize), which, offset, src)
        })
    })
}

fn recurrent_tensor(which: u32) -> Result<RecurrentTensor> {
    match which {
        KVS_RECURRENT_R => Ok(RecurrentTensor::R),
        KVS_RECURRENT_P => Ok(RecurrentTensor::P),
        KVS_RECURRENT_S => Ok(RecurrentTensor::S),
        _ => Err(Error::arg("which", format!("{which} is no KVS_RECURRENT_*"))),
    }
}

unsafe fn recurrent<'a>(slot: *const kvs_slot, section: u32) -> Result<&'a RecurrentSlot> {
    // SAFETY: passed on.
    let slot = unsafe { handle::slot(slot) }?;
    let found = slot.recurrent(section as usize);
    found.ok_or_else(|| Error::arg("section", format!("{section} is no recurrent section of the slot")))
}

/// The caller's array, which has as many elements as there are.
unsafe fn exactly<'a, T>(
    name: &str,
    array: *mut T,
    n: usize,
    (count, has): (&str, usize),
) -> Result<&'a mut [T]> {
    if n != has {
        return Err(Error::arg("n", format!("{n}, {count} is {has}")));
    }
    // SAFETY: passed on.
    unsafe { array_mut(name, array, n) }
}

/// The recurrent section `name`.
pub(super) unsafe fn recurrent_section(
    name: &str,
    params: &kvs_recurrent_params,
    n_seq_max: u32,
) -> Result<SectionParams> {
    let list = format!("{name}.layers");
    // SAFETY: the header demands a valid array.
    let raw = unsafe { params::read_array(&list, params.layers, params.n_layer as usize) }?;
    let layers = raw.iter().enumerate().map(|(il, layer)| layer_params(&format!("{list}[{il}]"), layer));
    let recurrent = RecurrentParams { layers: layers.collect::<Result<_>>()?, n_rs_seq: params.n_rs_seq };
    // SAFETY: the header demands memory of the sizes described, which outlives the context.
    let memory = unsafe { memory_of(name, &recurrent, &raw, n_seq_max) }?;
    Ok(SectionParams::Recurrent { recurrent, memory })
}

/// Refuses what would have no effect, as well: whoever sets it expects one.
fn layer_params(name: &str, raw: &kvs_recurrent_layer_params) -> Result<RecurrentLayerParams> {
    device(&format!("{name}.device"), raw.device)?;
    let tensor = |(has, has_value): (&str, u32), (ggml, number), (width, n_embd): (&str, u32)| {
        if flag(&format!("{name}.{has}"), has_value)? {
            let ggml_type = ggml_type(&format!("{name}.{ggml}"), number)?;
            return Ok(Some(TensorParams { ggml_type, n_embd }));
        }
        if n_embd != 0 {
            return Err(Error::arg(format!("{name}.{width}"), format!("{n_embd}, while {has} is 0")));
        }
        Ok(None)
    };
    let r = tensor(("has_r", raw.has_r), ("type_r", raw.type_r), ("n_embd_r", raw.n_embd_r))?;
    let s = tensor(("has_s", raw.has_s), ("type_s", raw.type_s), ("n_embd_s", raw.n_embd_s))?;
    let p = (raw.n_embd_p != 0).then_some(raw.n_embd_p);
    if let (Some(n_embd), None) = (p, r) {
        return Err(Error::arg(format!("{name}.n_embd_p"), format!("{n_embd}, while has_r is 0")));
    }
    let without_elements =
        [("r", raw.r, raw.n_embd_r), ("s", raw.s, raw.n_embd_s), ("p", raw.p, raw.n_embd_p)];
    for (field, memory, n_embd) in without_elements {
        if n_embd == 0 && !memory.is_null() {
            return Err(Error::arg(format!("{name}.{field}"), format!("given, while n_embd_{field} is 0")));
        }
    }
    Ok(RecurrentLayerParams { r, s, p })
}

/// Where the tensors are: on the devices named, or where the caller has them.
unsafe fn memory_of(
    name: &str,
    recurrent: &RecurrentParams,
    layers: &[kvs_recurrent_layer_params],
    n_seq_max: u32,
) -> Result<RecurrentMemory> {
    if layers.iter().all(|layer| layer.r.is_null() && layer.s.is_null() && layer.p.is_null()) {
        let devices = layers.iter().map(|layer| device(name, layer.device));
        return Ok(RecurrentMemory::Devices(devices.collect::<Result<_>>()?));
    }
    let n_rows = recurrent.n_rs_seq.checked_add(1).and_then(|planes| planes.checked_mul(n_seq_max));
    let n_rows = n_rows.ok_or_else(|| {
        let reason = format!("{} rollback planes of {n_seq_max} rows", recurrent.n_rs_seq);
        Error::arg(format!("{name}.n_rs_seq"), reason)
    })?;
    let mut planes = RecurrentPlanes::default();
    for (il, (layer, raw)) in recurrent.layers.iter().zip(layers).enumerate() {
        let plane =
            |field: &str, memory: *mut c_void, tensor: Option<TensorParams>| -> Result<Option<Plane>> {
                let Some(tensor) = tensor.filter(|tensor| tensor.n_embd > 0) else { return Ok(None) };
                let row_size = tensor.ggml_type.row_size(tensor.n_embd).ok_or_else(|| {
                    let reason =
                        format!("{} elements are no whole blocks of {}", tensor.n_embd, tensor.ggml_type);
                    Error::arg(format!("{name}.layers[{il}].n_embd_{field}"), reason)
                })?;
                let place = format!("{name}.layers[{il}].{field}");
                let shape = PlaneShape::dense_rows(row_size);
                // SAFETY: passed on.
                unsafe { adopt(&place, (memory, raw.device), 0, 0, n_rows, shape) }.map(Some)
            };
        let p = layer.r.zip(layer.p).map(|(r, n_embd)| TensorParams { n_embd, ..r });
        planes.r.push(plane("r", raw.r, layer.r)?);
        planes.s.push(plane("s", raw.s, layer.s)?);
        planes.p.push(plane("p", raw.p, p)?);
    }
    Ok(RecurrentMemory::Adopted(planes))
}
