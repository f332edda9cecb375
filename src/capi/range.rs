//! States of a range of positions: a conversation in pieces, and prefixes of one.

use std::ffi::c_char;

use super::handle::{
    array, array_mut, host_bytes_mut, kvs_context, out, path, with_context, with_context_mut,
};
use super::state::{flags_of, kvs_state_seq_flags, restore_flags_of, size_of_state};
use super::status::value_or;
use super::{kvs_pos, kvs_seq_id, kvs_token};
use crate::error::{Error, Result};
use crate::session::RangeLoadParams;
use crate::types::PosRange;

/// Bytes of the state of the positions p0 <= pos < p1 of a sequence: exactly what kvs_state_seq_get_data_range writes. p0 < 0:
/// from 0; p1 < 0: to the end. 0: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_get_size_range(
    ctx: *mut kvs_context,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
    flags: kvs_state_seq_flags,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let (flags, range) = (flags_of(flags)?, PosRange::new(p0, p1));
        with_context(ctx, |context| size_of_state(context.state_seq_get_size_range(seq_id, range, flags)?))
    })
}

/// Writes the state of the positions p0 <= pos < p1 of a sequence, in every section, to dst, which has size bytes; returns the
/// bytes written. 0: failed; dst is untouched if it is too small.
///
/// It is a state like any other, of a sequence that has these positions and no others: every reader of states reads it, and
/// KVS_STATE_SEQ_FLAGS_APPEND adds it to the pieces before. A recurrent section, or the compressed half of a DSV4 memory, has one
/// state: that of the end of the range, which has to be there, as for kvs_memory_can_rewind; KVS_STATUS_CANNOT_CUT otherwise. So
/// the pieces of a hybrid are saved while each of them is the end. A section with a window has what the window has not lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_get_data_range(
    ctx: *mut kvs_context,
    dst: *mut u8,
    size: usize,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
    flags: kvs_state_seq_flags,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let (flags, range) = (flags_of(flags)?, PosRange::new(p0, p1));
        let dst = host_bytes_mut("dst", dst, size)?;
        with_context_mut(ctx, |context| context.state_seq_get_data_range(dst, seq_id, range, flags))
    })
}

/// kvs_state_seq_save_file, of the positions p0 <= pos < p1: see kvs_state_seq_get_data_range. The tokens are stored as they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_save_file_range(
    ctx: *mut kvs_context,
    filepath: *const c_char,
    seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
    tokens: *const kvs_token,
    n_token_count: usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let path = path("filepath", filepath)?;
        let tokens = array("tokens", tokens, n_token_count)?;
        let range = PosRange::new(p0, p1);
        let save =
            |context: &mut crate::Context| context.state_seq_save_file_range(path, seq_id, range, tokens);
        size_of_state(with_context_mut(ctx, save)?)
    })
}

/// kvs_state_seq_load_file, of the positions p0 <= pos < p1 of the file alone: p1 is where a prompt ends and its reply begins. flags
/// are KVS_STATE_SEQ_FLAGS_NONE, which replaces dest_seq_id, or KVS_STATE_SEQ_FLAGS_APPEND, which adds to it. Of the tensors nothing
/// else is read. 0: failed, nothing has changed and nothing was written.
///
/// All tokens of the file are given, at most n_token_capacity; *n_token_kept_out of them, from the first on, belong to positions
/// before p1, if the list has one for each cell (0 if nothing was restored). Both counts may be NULL; tokens_out may not.
///
/// If p1 cuts the state, the sequence can go on at p1, as kvs_memory_can_rewind says it; otherwise the call is refused with
/// KVS_STATUS_CANNOT_CUT: a recurrent state knows its end alone, and a window may have lost what a token at p1 sees. A
/// checkpoint is the way back there. Only the end is looked at: with p0 > 0 and flags NONE the sequence is a piece
/// without its beginning, and its next tokens attend to that piece alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_load_file_range(
    ctx: *mut kvs_context,
    filepath: *const c_char,
    dest_seq_id: kvs_seq_id,
    p0: kvs_pos,
    p1: kvs_pos,
    flags: kvs_state_seq_flags,
    tokens_out: *mut kvs_token,
    n_token_capacity: usize,
    n_token_count_out: *mut usize,
    n_token_kept_out: *mut usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let path = path("filepath", filepath)?;
        let (flags, append) = restore_flags_of(flags)?;
        if !flags.is_empty() {
            let names: Vec<_> = flags.iter_names().map(|(name, _)| name).collect();
            return Err(Error::arg("flags", format!("{}: a file holds a whole state", names.join(" | "))));
        }
        let tokens_out = array_mut("tokens_out", tokens_out, n_token_capacity)?;
        let range = PosRange::new(p0, p1);
        let params = RangeLoadParams { range, append, n_token_capacity };
        let load =
            |context: &mut crate::Context| context.state_seq_load_file_range(path, dest_seq_id, params);
        let loaded = with_context_mut(ctx, load)?;
        let n_tokens = loaded.tokens.len();
        tokens_out[..n_tokens].copy_from_slice(&loaded.tokens);
        give(n_token_count_out, n_tokens)?;
        give(n_token_kept_out, loaded.kept.n_tokens(n_tokens))?;
        size_of_state(loaded.state_end)
    })
}

unsafe fn give(to: *mut usize, value: usize) -> Result<()> {
    if !to.is_null() {
        // SAFETY: the contract of all calls.
        unsafe { *out("n_token_out", to)? = value };
    }
    Ok(())
}
