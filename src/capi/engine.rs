//! Cells for a ubatch, masks, and the addresses of K and V: for an engine that keeps its cache here.

use std::ffi::c_void;
use std::ptr;

use super::handle::{
    self, array, array_mut, free_slot, into_slot_handle, kvs_context, kvs_slot, out, with_context,
    with_context_mut,
};
use super::params::{self, Params};
use super::status::{kvs_status, status_of, value_or};
use super::{kvs_pos, kvs_seq_id, kvs_token};
use crate::context::{Context, UbatchToken};
use crate::error::{Error, Result};
use crate::memory::TensorParams;
use crate::storage::{Plane, PlaneShape};
use crate::types::{CellExt, TOKEN_NULL};

/// A ubatch, with the arrays of llama_batch. Fill with kvs_ubatch_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_ubatch {
    /// sizeof(kvs_ubatch), set by the init call.
    pub struct_size: usize,
    /// Number of tokens.
    pub n_tokens: u32,
    /// 0.
    pub reserved: u32,
    /// Position of each token.
    pub pos: *const kvs_pos,
    /// Number of sequences of each token, at least 1; NULL: 1 each.
    pub n_seq_id: *const i32,
    /// Sequences of each token; NULL: sequence 0. Those of one token are in one stream; tokens of one ubatch may
    /// be in different streams, and the cells of each are counted within its own.
    pub seq_id: *const *const kvs_seq_id,
    /// Token ids, kept by sections with cell_ext; NULL: embeddings.
    pub token: *const kvs_token,
    /// M-RoPE columns, kept by sections with cell_ext; NULL: 0.
    pub x: *const kvs_pos,
    /// M-RoPE rows, kept by sections with cell_ext; NULL: 0.
    pub y: *const kvs_pos,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_ubatch {
    const NAME: &'static str = "kvs_ubatch";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            n_tokens: 0,
            reserved: 0,
            pos: ptr::null(),
            n_seq_id: ptr::null(),
            seq_id: ptr::null(),
            token: ptr::null(),
            x: ptr::null(),
            y: ptr::null(),
        }
    }
}

/// The plane is in host memory.
pub const KVS_DEVICE_HOST: i32 = -1;

/// K or V of one layer in one stream. Rows: cell c is the row at data + c * cell_stride. Transposed V: channel
/// j of cell c is at data + j * channel_stride + c * cell_stride.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_plane {
    /// In a view: the caller's handle of the tensor (ggml_tensor *), which its callbacks get back. NULL in a plane
    /// that kvstate gives out.
    pub tensor: *mut c_void,
    /// Address of cell 0; NULL if the layer has no V. In a view also if the bytes are reached through the callbacks
    /// of kvs_tensor_access alone, whose offsets count from cell 0.
    pub data: *mut c_void,
    /// KVS_DEVICE_HOST, or the number of a CUDA device, whose memory data is in. In a view any number of a device says
    /// that, and the driver says which it is.
    pub device: i32,
    /// ggml type.
    pub ggml_type: i32,
    /// Elements of one cell, as in a state: a tensor padded beyond them has larger strides. 0: the layer has no
    /// such tensor.
    pub n_embd: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes from one cell to the next.
    pub cell_stride: u64,
    /// Bytes from one channel to the next; 0 for rows.
    pub channel_stride: u64,
}

/// What is known of a cell.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_cell {
    /// Index in its stream.
    pub idx: u32,
    /// Position; -1 if the cell is empty.
    pub pos: kvs_pos,
    /// Positions by which K still has to be rotated forward.
    pub shift: kvs_pos,
    /// M-RoPE column.
    pub x: kvs_pos,
    /// M-RoPE row.
    pub y: kvs_pos,
    /// Token; -1 if unknown, or if the cell came from an embedding.
    pub tok: kvs_token,
    /// Its sequences: bit s % 64 of seqs[s / 64] for sequence s.
    pub seqs: [u64; 4],
}

/// Fills the struct of struct_size bytes at ubatch with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_ubatch_init(ubatch: *mut kvs_ubatch, struct_size: usize) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(ubatch, struct_size) })
}

/// Finds a cell for each token of a ubatch in every section, as llama.cpp would. The cache does not change:
/// commit the slot or leave it, then free it with kvs_slot_free. *slot_out is written only on success;
/// KVS_STATUS_NO_SPACE if there are too few cells. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_prepare(
    ctx: *const kvs_context,
    ubatch: *const kvs_ubatch,
    slot_out: *mut *mut kvs_slot,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let slot_out = out("slot_out", slot_out)?;
        let tokens = tokens(ubatch)?;
        let slot = with_context(ctx, |context| context.prepare(&tokens))?;
        *slot_out = into_slot_handle(slot);
        Ok(())
    })
}

/// The cell of each token in a section, in the order of the ubatch; n is the number of tokens. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_cells(
    slot: *const kvs_slot,
    section: u32,
    cells: *mut u32,
    n: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let found = handle::slot(slot)?.cells(section as usize);
        let found = found.ok_or_else(|| Error::arg("section", format!("{section} is out of range")))?;
        if n != found.len() {
            return Err(Error::arg("n", format!("{n}, the ubatch has {} tokens", found.len())));
        }
        array_mut("cells", cells, n)?.copy_from_slice(found);
        Ok(())
    })
}

/// Gives the cells of slot to its tokens: call it before K and V of the ubatch are written into the cells.
/// KVS_STATUS_STALE if the cache has changed since kvs_slot_prepare; nothing changes then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_commit(ctx: *mut kvs_context, slot: *const kvs_slot) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let slot = handle::slot(slot)?;
        with_context_mut(ctx, |context| context.commit(slot))
    })
}

/// Frees a slot, committed or not. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_free(slot: *mut kvs_slot) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_slot(slot) });
}

/// Cells that attention has to look at in a stream of a section: up to the last used one, padded to a multiple
/// of n_pad (llama.cpp: 256), at most kv_size; of an empty stream n_pad. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_n_kv(
    ctx: *const kvs_context,
    section: u32,
    stream: u32,
    n_pad: u32,
    n_kv_out: *mut u32,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let n_kv = with_context(ctx, |context| context.n_kv(section as usize, stream as usize, n_pad))?;
        *out("n_kv_out", n_kv_out)? = n_kv;
        Ok(())
    })
}

/// The mask row of token i of a ubatch against the first n_kv cells of its stream in a section: 0 where the
/// token attends, -INFINITY where it does not. Causal, symmetric windows too. Call it after kvs_slot_commit:
/// the token attends to itself and to those before it in the ubatch. n_kv is what kvs_n_kv gives, or any number
/// up to kv_size that leaves out no cell that the token attends to. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_mask_row(
    ctx: *const kvs_context,
    section: u32,
    ubatch: *const kvs_ubatch,
    i: u32,
    row: *mut f32,
    n_kv: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let ubatch = read(ubatch)?;
        if i >= ubatch.n_tokens {
            return Err(Error::arg("i", format!("{i}, the ubatch has {} tokens", ubatch.n_tokens)));
        }
        let token = token(&ubatch, i as usize)?;
        let row = array_mut("row", row, n_kv)?;
        with_context(ctx, |context| context.mask_row(section as usize, &token, row))
    })
}

/// Where K and V of a layer lie in a stream of a section; layers are counted within the section. v_out may be
/// NULL. The addresses stay as long as the context does: no call moves a plane. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_plane(
    ctx: *const kvs_context,
    section: u32,
    stream: u32,
    layer: u32,
    k_out: *mut kvs_plane,
    v_out: *mut kvs_plane,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let (section, stream, layer) = (section as usize, stream as usize, layer as usize);
        let (k, v) = with_context(ctx, |context| {
            let params = context.layer(section, layer)?;
            let k = plane(context.k(section, stream, layer)?, params.k);
            let v = context.v(section, stream, layer)?.zip(params.v).map(|(v, params)| plane(v, params));
            Ok((k, v))
        })?;
        *out("k_out", k_out)? = k;
        if !v_out.is_null() {
            let none = kvs_plane { device: k.device, ggml_type: k.ggml_type, ..NO_PLANE };
            *out("v_out", v_out)? = v.unwrap_or(none);
        }
        Ok(())
    })
}

/// What is known of a cell. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_cell_get(
    ctx: *const kvs_context,
    section: u32,
    stream: u32,
    cell: u32,
    cell_out: *mut kvs_cell,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let found = with_context(ctx, |context| context.cell(section as usize, stream as usize, cell))?;
        let empty = kvs_cell { idx: cell, pos: -1, shift: 0, x: 0, y: 0, tok: TOKEN_NULL, seqs: [0; 4] };
        *out("cell_out", cell_out)? = found.map_or(empty, |(meta, shift)| kvs_cell {
            idx: cell,
            pos: meta.pos,
            shift,
            x: meta.ext.x,
            y: meta.ext.y,
            tok: meta.ext.tok,
            seqs: meta.seqs.words(),
        });
        Ok(())
    })
}

/// The cells of a stream of a section whose K has to be rotated, and by how many positions each. *n_out is
/// their number; with too small a capacity nothing else is written (KVS_STATUS_BUFFER_TOO_SMALL), so ask with
/// capacity 0 first. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_shift_get(
    ctx: *const kvs_context,
    section: u32,
    stream: u32,
    cells: *mut u32,
    shifts: *mut kvs_pos,
    capacity: usize,
    n_out: *mut usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let n_out = out("n_out", n_out)?;
        let pending: Vec<(u32, kvs_pos)> = with_context(ctx, |context| {
            Ok(context.pending_shifts(section as usize, stream as usize)?.collect())
        })?;
        if pending.len() > capacity {
            *n_out = pending.len();
            return Err(Error::BufferTooSmall { need: pending.len() as u64, size: capacity as u64 });
        }
        let cells = array_mut("cells", cells, pending.len())?;
        let shifts = array_mut("shifts", shifts, pending.len())?;
        for ((cell, shift), &pending) in cells.iter_mut().zip(shifts).zip(&pending) {
            (*cell, *shift) = pending;
        }
        *n_out = pending.len();
        Ok(())
    })
}

/// The engine has rotated K of everything that kvs_shift_get lists, in all streams and sections.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_shift_done(ctx: *mut kvs_context) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_context_mut(ctx, |context| {
            context.shift_done();
            Ok(())
        })
    })
}

/// Rotates K of everything that kvs_shift_get lists, in all streams and sections, by rope of the layers or by the
/// shift callback. An engine calls it before it decodes; a save does it for what it writes.
///
/// Where it fails, the shifts that were not applied stay pending. If the owner of a tensor fails where K may be rotated
/// in part, the sequences that had it are emptied, as kvs_last_error says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_shift_apply(ctx: *mut kvs_context) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { with_context_mut(ctx, Context::apply_pending_shifts) })
}

/// A tensor that is not there.
const NO_PLANE: kvs_plane = kvs_plane {
    tensor: ptr::null_mut(),
    data: ptr::null_mut(),
    device: KVS_DEVICE_HOST,
    ggml_type: 0,
    n_embd: 0,
    reserved: 0,
    cell_stride: 0,
    channel_stride: 0,
};

pub(super) fn plane_or_none(found: Option<(&Plane, TensorParams)>) -> kvs_plane {
    found.map_or(NO_PLANE, |(found, params)| plane(found, params))
}

fn plane(plane: &Plane, params: TensorParams) -> kvs_plane {
    let (cell_stride, channel_stride) = match plane.shape() {
        PlaneShape::Rows { cell_stride, .. } => (cell_stride, 0),
        PlaneShape::Channels { cell_stride, channel_stride, .. } => (cell_stride, channel_stride),
    };
    kvs_plane {
        tensor: ptr::null_mut(),
        data: plane.as_ptr().cast(),
        device: plane.device().unwrap_or(KVS_DEVICE_HOST),
        ggml_type: params.ggml_type.as_i32(),
        n_embd: params.n_embd,
        reserved: 0,
        cell_stride,
        channel_stride,
    }
}

unsafe fn read(ubatch: *const kvs_ubatch) -> Result<kvs_ubatch> {
    // SAFETY: passed on.
    let ubatch = unsafe { params::read(ubatch) }?;
    match ubatch.reserved {
        0 => Ok(ubatch),
        reserved => Err(Error::arg("reserved", format!("{reserved}, only 0 has a meaning"))),
    }
}

unsafe fn tokens<'a>(ubatch: *const kvs_ubatch) -> Result<Vec<UbatchToken<'a>>> {
    // SAFETY: passed on.
    let ubatch = unsafe { read(ubatch) }?;
    // SAFETY: passed on.
    (0..ubatch.n_tokens as usize).map(|i| unsafe { token(&ubatch, i) }).collect()
}

/// Token `i`, which must be below n_tokens.
unsafe fn token<'a>(ubatch: &kvs_ubatch, i: usize) -> Result<UbatchToken<'a>> {
    const SEQ_0: &[kvs_seq_id] = &[0];
    let n = ubatch.n_tokens as usize;
    // SAFETY: the header demands arrays of n_tokens elements, or NULL.
    let optional = |name: &str, ptr: *const i32, default: i32| unsafe {
        if ptr.is_null() { Ok(default) } else { Ok(array(name, ptr, n)?[i]) }
    };
    // SAFETY: as above; each list of sequences has n_seq_id entries.
    let (pos, seq_ids) = unsafe {
        let pos = array("pos", ubatch.pos, n)?[i];
        let n_seq_id = optional("n_seq_id", ubatch.n_seq_id, 1)?;
        let n_seq_id = usize::try_from(n_seq_id).map_err(|_| {
            Error::arg(format!("n_seq_id[{i}]"), format!("{n_seq_id}, at least 1 is possible"))
        })?;
        let seq_ids = if ubatch.seq_id.is_null() {
            if n_seq_id != 1 {
                let reason = format!("{n_seq_id}, without seq_id a token has 1 sequence");
                return Err(Error::arg(format!("n_seq_id[{i}]"), reason));
            }
            SEQ_0
        } else {
            array("seq_id", array("seq_id", ubatch.seq_id, n)?[i], n_seq_id)?
        };
        (pos, seq_ids)
    };
    let ext = CellExt {
        x: optional("x", ubatch.x, 0)?,
        y: optional("y", ubatch.y, 0)?,
        tok: optional("token", ubatch.token, TOKEN_NULL)?,
    };
    Ok(UbatchToken { pos, ext, seq_ids })
}
