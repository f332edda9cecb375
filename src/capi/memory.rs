//! The memory calls of llama.h, and the questions that servers have about rewinding.

use std::ffi::c_char;
use std::fmt::Display;
use std::ptr;

use super::handle::{kvs_context, kvs_memory_t, out, with_context, with_context_mut};
use super::status::{kvs_status, status_of, value_or};
use super::{kvs_pos, kvs_seq_id};
use crate::memory::RewindObstacle;

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
/// end. False, and nothing removed, if a section cannot remove just that range: attention always can; a recurrent or compressed
/// state goes back by up to n_rs_seq positions, once after a ubatch. That is llama.cpp's answer, which does not ask whether
/// there is a state of that position: kvs_memory_max_cut and kvs_memory_can_rewind do. Such an answer is no failure and leaves
/// kvs_last_error alone; a seq_id out of range is one.
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

/// Whether kvs_memory_seq_rm would remove just that range. False on failure, too. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_can_seq_rm(
    mem: kvs_memory_t,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
) -> bool {
    // SAFETY: a memory handle is its context's.
    value_or(false, || unsafe { with_context(mem.cast(), |context| context.can_seq_rm(seq_id, p0, p1)) })
}

/// How many positions can be cut off the end of a sequence so that what is left has its recurrent and compressed states;
/// INT32_MAX: any number. kvs_memory_seq_rm answers as llama.cpp does, which is true for up to n_rs_seq positions, though fewer
/// may have been in the last ubatch, and none since a restore; a sequence that was cut further back cannot go on
/// (kvs_memory_can_rewind) until it is restored or emptied. -1: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_max_cut(mem: kvs_memory_t, seq_id: kvs_seq_id) -> i32 {
    // SAFETY: a memory handle is its context's.
    value_or(-1, || unsafe {
        let n = with_context(mem.cast(), |context| context.max_cut(seq_id))?;
        Ok(n.and_then(|n| i32::try_from(n).ok()).unwrap_or(i32::MAX))
    })
}

/// Gives the cells of seq_id_src in [p0, p1) to seq_id_dst as well; a recurrent state, which is of all its positions, whatever
/// the range is. Between streams the sequence is copied at
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

/// Removes all other sequences (llama.cpp leaves those whose attention cells are in another stream).
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

/// Smallest position of a sequence; -1 if it is empty. Of attention caches that of the SWA section where there is one: after a
/// partial state was restored into an empty sequence it says nothing about full attention. Beside recurrent states the larger
/// one of both, and of DSV4 the largest position. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_seq_pos_min(mem: kvs_memory_t, seq_id: kvs_seq_id) -> kvs_pos {
    // SAFETY: a memory handle is its context's.
    value_or(-1, || unsafe { with_context(mem.cast(), |context| context.seq_pos_min(seq_id)) })
}

/// Largest position of a sequence; -1 if it is empty. Of the SWA section where there is one; beside recurrent states the smaller
/// one of both. Below the smallest where they have no position in common. Const.
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

/// Bytes of the text of a reason, its NUL included.
pub const KVS_REASON_SIZE: usize = 160;

/// Why a sequence cannot be rewound to a position.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_rewind_obstacle {
    /// KVS_REWIND_POSSIBLE, or why not. The fields below are set where it says so, and -1 otherwise.
    pub kind: u32,
    /// First position that a token at the wanted one needs (CELLS_GONE).
    pub need_min: kvs_pos,
    /// The last one (CELLS_GONE).
    pub need_max: kvs_pos,
    /// First position that the section has (CELLS_GONE), or can go on at (NO_STATE); -1: none.
    pub has_min: kvs_pos,
    /// Last position that the section has (CELLS_GONE) or can go on at (NO_STATE), or the sequence has (PAST_END); -1: none.
    pub has_max: kvs_pos,
    /// The same in words, with the section, cut to the size; empty for KVS_REWIND_POSSIBLE.
    pub text: [c_char; KVS_REASON_SIZE],
}

/// Nothing is in the way.
pub const KVS_REWIND_POSSIBLE: u32 = 0;
/// The sequence does not reach that far.
pub const KVS_REWIND_PAST_END: u32 = 1;
/// A section no longer has what a token at that position sees.
pub const KVS_REWIND_CELLS_GONE: u32 = 2;
/// A section keeps states of a few positions only (recurrent layers), and none to go on from there.
pub const KVS_REWIND_NO_STATE: u32 = 3;

/// Whether kvs_memory_seq_rm(mem, seq_id, pos, -1) would leave a sequence that can go on at pos: every token from there on sees
/// what it would have seen in a fresh run. False on failure, too. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_can_rewind(mem: kvs_memory_t, seq_id: kvs_seq_id, pos: kvs_pos) -> bool {
    // SAFETY: a memory handle is its context's.
    value_or(false, || unsafe { with_context(mem.cast(), |context| context.can_rewind(seq_id, pos)) })
}

/// The largest position, at most pos, to which the sequence can be rewound; 0: all has to be computed anew. -1: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_rewind_pos(
    mem: kvs_memory_t,
    seq_id: kvs_seq_id,
    pos: kvs_pos,
) -> kvs_pos {
    // SAFETY: a memory handle is its context's.
    value_or(-1, || unsafe { with_context(mem.cast(), |context| context.rewind_pos(seq_id, pos)) })
}

/// Why a sequence cannot be rewound to pos. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_rewind_obstacle(
    mem: kvs_memory_t,
    seq_id: kvs_seq_id,
    pos: kvs_pos,
    obstacle_out: *mut kvs_rewind_obstacle,
) -> kvs_status {
    // SAFETY: a memory handle is its context's.
    status_of(|| unsafe {
        let obstacle_out = out("obstacle_out", obstacle_out)?;
        let obstacle = with_context(mem.cast(), |context| context.rewind_obstacle(seq_id, pos))?;
        let text = obstacle.as_ref().map_or([0; KVS_REASON_SIZE], reason);
        let (kind, need, has) = match obstacle {
            None => (KVS_REWIND_POSSIBLE, (-1, -1), (-1, -1)),
            Some(RewindObstacle::PastEnd { pos_max, .. }) => (KVS_REWIND_PAST_END, (-1, -1), (-1, pos_max)),
            Some(RewindObstacle::CellsGone { need, has, .. }) => {
                (KVS_REWIND_CELLS_GONE, need, has.unwrap_or((-1, -1)))
            }
            Some(RewindObstacle::NoState { has, .. }) => {
                (KVS_REWIND_NO_STATE, (-1, -1), has.unwrap_or((-1, -1)))
            }
        };
        let ((need_min, need_max), (has_min, has_max)) = (need, has);
        *obstacle_out = kvs_rewind_obstacle { kind, need_min, need_max, has_min, has_max, text };
        Ok(())
    })
}

/// A reason as a string of C, cut to what fits.
pub(super) fn reason(words: &impl Display) -> [c_char; KVS_REASON_SIZE] {
    let mut text = [0; KVS_REASON_SIZE];
    for (to, byte) in text[..KVS_REASON_SIZE - 1].iter_mut().zip(words.to_string().into_bytes()) {
        *to = byte.cast_signed();
    }
    text
}
