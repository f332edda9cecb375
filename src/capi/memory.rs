//! The memory calls of llama.h.

use std::ptr;

use super::handle::{kvs_context, kvs_memory_t, with_context, with_context_mut};
use super::status::value_or;
use super::{kvs_pos, kvs_seq_id};

/// The memory of ctx, for the kvs_memory_* calls; lives as long as ctx does. NULL: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_get_memory(ctx: *const kvs_context) -> kvs_memory_t {
    // SAFETY: the contract of all calls.
    value_or(ptr::null_mut(), || unsafe { with_context(ctx, |_| Ok(ctx.cast_mut().cast())) })
}

/// Empties every section; with data the tensors are zeroed as well. ON_DEVICE states survive. If it fails (kvs_last_status) with
/// KVS_STATUS_STREAM_CAPTURING, nothing has changed; otherwise no cell is used any more, and not all tensors are zeroed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_clear(mem: kvs_memory_t, data: bool) {
    // SAFETY: a memory handle is its context's.
    value_or((), || unsafe { with_context_mut(mem.cast(), |context| context.clear(data)) });
}

/// Removes the positions [p0, p1) of a sequence. seq_id < 0: of every sequence; p0 < 0: from 0; p1 < 0: to the
/// end. False if a section cannot remove just that range (attention always can), or seq_id is out of range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_rm(
    mem: kvs_memory_t,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
) -> bool {
    // SAFETY: a memory handle is its context's.
    value_or(false, || unsafe { with_context_mut(mem.cast(), |context| context.seq_rm(seq_id, p0, p1)) })
}

/// Gives the cells of seq_id_src in [p0, p1) to seq_id_dst as well. Between streams the sequence is copied at
/// once, cells and data, and replaces seq_id_dst; the range must hold all of it. On failure nothing changes
/// and kvs_last_error says why.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_cp(
    mem: kvs_memory_t,
    seq_id_src: kvs_seq_id,
    seq_id_dst: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
) {
    // SAFETY: a memory handle is its context's.
    value_or((), || unsafe {
        with_context_mut(mem.cast(), |context| context.seq_cp(seq_id_src, seq_id_dst, p0, p1))
    });
}

/// Removes all other sequences from the stream of seq_id (other streams keep theirs, as in llama.cpp).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_keep(mem: kvs_memory_t, seq_id: kvs_seq_id) {
    // SAFETY: a memory handle is its context's.
    value_or((), || unsafe { with_context_mut(mem.cast(), |context| context.seq_keep(seq_id)) });
}

/// Adds delta to the positions [p0, p1) of a sequence; K is rotated later, see shift in kvs_context_params.
/// Cells whose position falls below 0 are freed, a position above INT32_MAX is refused, and cells that are
/// shared with other sequences move in all of them.
/// Refused (nothing changes, kvs_last_error says why) where kvs_memory_can_shift is false.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_add(
    mem: kvs_memory_t,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
    delta: kvs_pos,
) {
    // SAFETY: a memory handle is its context's.
    value_or((), || unsafe {
        with_context_mut(mem.cast(), |context| context.seq_add(seq_id, p0, p1, delta))
    });
}

/// Divides the positions [p0, p1) of a sequence by d >= 1; as kvs_memory_seq_add otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_div(
    mem: kvs_memory_t,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
    d: i32,
) {
    // SAFETY: a memory handle is its context's.
    value_or((), || unsafe { with_context_mut(mem.cast(), |context| context.seq_div(seq_id, p0, p1, d)) });
}

/// Smallest position of a sequence; -1 if it is empty. Of the SWA section where there is one: after a partial
/// state was restored into an empty sequence it says nothing about full attention. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_pos_min(mem: kvs_memory_t, seq_id: kvs_seq_id) -> kvs_pos {
    // SAFETY: a memory handle is its context's.
    value_or(-1, || unsafe { with_context(mem.cast(), |context| context.seq_pos_min(seq_id)) })
}

/// Largest position of a sequence; -1 if it is empty. Of the SWA section where there is one. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_pos_max(mem: kvs_memory_t, seq_id: kvs_seq_id) -> kvs_pos {
    // SAFETY: a memory handle is its context's.
    value_or(-1, || unsafe { with_context(mem.cast(), |context| context.seq_pos_max(seq_id)) })
}

/// Whether positions can be shifted: somebody rotates K, and all sections have the same size. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_can_shift(mem: kvs_memory_t) -> bool {
    // SAFETY: a memory handle is its context's.
    value_or(false, || unsafe { with_context(mem.cast(), |context| Ok(context.can_shift())) })
}
