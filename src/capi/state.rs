//! The state calls of llama.h.

use std::ffi::c_char;

use super::handle::{
    array, array_mut, host_bytes, host_bytes_mut, kvs_context, out, path, with_context, with_context_mut,
};
use super::status::{kvs_status, status_of, value_or};
use super::{kvs_seq_id, kvs_token};
use crate::error::{Error, Result};
use crate::session::{Loaded, seq_file_token_count};
use crate::types::StateFlags;

/// What a sequence state holds and where: KVS_STATE_SEQ_FLAGS_*, combined.
pub type kvs_state_seq_flags = u32;

/// The whole state of the sequence.
pub const KVS_STATE_SEQ_FLAGS_NONE: kvs_state_seq_flags = 0;
/// The older name of KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY.
pub const KVS_STATE_SEQ_FLAGS_SWA_ONLY: kvs_state_seq_flags = 1;
/// Only what kvs_memory_seq_rm cannot roll back: the cells of SWA sections that the window still shows. Of a
/// full-attention cache that is nothing: 8 bytes.
pub const KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY: kvs_state_seq_flags = 1;
/// The tensors stay in memory of the context, the blob holds metadata only. A sequence has one such state: a
/// new one replaces it. The state survives kvs_memory_clear.
pub const KVS_STATE_SEQ_FLAGS_ON_DEVICE: kvs_state_seq_flags = 2;

/// In restores of a sequence: the state's positions, which have to be behind those of the sequence, are added to it instead of
/// replacing it. Not with KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY.
pub const KVS_STATE_SEQ_FLAGS_APPEND: kvs_state_seq_flags = 1 << 16;

/// The flags of every call that restores no sequence of a context.
pub(super) fn flags_of(flags: kvs_state_seq_flags) -> Result<StateFlags> {
    match restore_flags_of(flags)? {
        (flags, false) => Ok(flags),
        (_, true) => Err(Error::arg("flags", "APPEND is for calls that restore a sequence of a context")),
    }
}

/// Flags, and whether the state is added to the sequence.
pub(super) fn restore_flags_of(flags: kvs_state_seq_flags) -> Result<(StateFlags, bool)> {
    let known = StateFlags::all().bits() | KVS_STATE_SEQ_FLAGS_APPEND;
    let of_state = StateFlags::from_bits(flags & !KVS_STATE_SEQ_FLAGS_APPEND);
    let of_state = of_state.ok_or(Error::UnknownFlags { flags, known })?;
    Ok((of_state, flags & KVS_STATE_SEQ_FLAGS_APPEND != 0))
}

pub(super) fn size_of_state(size: u64) -> Result<usize> {
    usize::try_from(size).map_err(|_| Error::OutOfMemory { what: "the state", bytes: size })
}

/// Bytes of the state of the whole context. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_get_size(ctx: *mut kvs_context) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_context(ctx, |context| size_of_state(context.state_get_size()?)) })
}

/// Writes the state of the whole context to dst, which has size bytes; returns the bytes written. 0: failed,
/// dst is untouched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_get_data(ctx: *mut kvs_context, dst: *mut u8, size: usize) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let dst = host_bytes_mut("dst", dst, size)?;
        with_context_mut(ctx, |context| context.state_get_data(dst))
    })
}

/// Replaces all sequences by the state in src; returns the bytes consumed. 0: failed, nothing has changed, with the exception
/// of kvs_state_seq_set_data_ext.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_set_data(ctx: *mut kvs_context, src: *const u8, size: usize) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let src = host_bytes("src", src, size)?;
        with_context_mut(ctx, |context| context.state_set_data(src))
    })
}

/// Replaces all sequences by those in a whole-context file (versions 9 to 11) and gives its tokens, at most
/// n_token_capacity of them; n_token_count_out may be NULL. False: failed, nothing has changed and nothing was
/// written. A file that is truncated meanwhile: as for kvs_state_seq_load_file. A device that fails: as for
/// kvs_state_seq_set_data_ext.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_load_file(
    ctx: *mut kvs_context,
    path_session: *const c_char,
    tokens_out: *mut kvs_token,
    n_token_capacity: usize,
    n_token_count_out: *mut usize,
) -> bool {
    // SAFETY: the contract of all calls.
    value_or(false, || unsafe {
        let path = path("path_session", path_session)?;
        let tokens_out = array_mut("tokens_out", tokens_out, n_token_capacity)?;
        let loaded = with_context_mut(ctx, |context| context.state_load_file(path, tokens_out.len()))?;
        give_tokens(&loaded, tokens_out, n_token_count_out)?;
        Ok(true)
    })
}

/// Writes the whole context and a token list to a file (version 11): beside it, synced, then renamed over it.
/// False: failed, a file that was there is untouched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_save_file(
    ctx: *mut kvs_context,
    path_session: *const c_char,
    tokens: *const kvs_token,
    n_token_count: usize,
) -> bool {
    // SAFETY: the contract of all calls.
    value_or(false, || unsafe {
        let path = path("path_session", path_session)?;
        let tokens = array("tokens", tokens, n_token_count)?;
        with_context_mut(ctx, |context| context.state_save_file(path, tokens))?;
        Ok(true)
    })
}

/// kvs_state_seq_get_size_ext with KVS_STATE_SEQ_FLAGS_NONE. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_get_size(ctx: *mut kvs_context, seq_id: kvs_seq_id) -> usize {
    // SAFETY: passed on.
    unsafe { kvs_state_seq_get_size_ext(ctx, seq_id, KVS_STATE_SEQ_FLAGS_NONE) }
}

/// Frees the tensors of the sequence's live state that was taken with KVS_STATE_SEQ_FLAGS_ON_DEVICE, if there is one: its blob
/// can no longer be restored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_drop_on_device(
    ctx: *mut kvs_context,
    seq_id: kvs_seq_id,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { with_context_mut(ctx, |context| context.drop_device_state(seq_id)) })
}

/// kvs_state_seq_get_data_ext with KVS_STATE_SEQ_FLAGS_NONE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_get_data(
    ctx: *mut kvs_context,
    dst: *mut u8,
    size: usize,
    seq_id: kvs_seq_id,
) -> usize {
    // SAFETY: passed on.
    unsafe { kvs_state_seq_get_data_ext(ctx, dst, size, seq_id, KVS_STATE_SEQ_FLAGS_NONE) }
}

/// kvs_state_seq_set_data_ext with KVS_STATE_SEQ_FLAGS_NONE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_set_data(
    ctx: *mut kvs_context,
    src: *const u8,
    size: usize,
    dest_seq_id: kvs_seq_id,
) -> usize {
    // SAFETY: passed on.
    unsafe { kvs_state_seq_set_data_ext(ctx, src, size, dest_seq_id, KVS_STATE_SEQ_FLAGS_NONE) }
}

/// Writes a sequence and a token list to a file (version 4): beside it, synced, then renamed over it. Returns
/// the size of the file. 0: failed, a file that was there is untouched.
///
/// filepath is a regular file or nothing yet; symbolic links are followed. A new file has mode 0600, an old one
/// keeps its mode. A process that is killed meanwhile may leave a file .kvstate-*.tmp beside it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_save_file(
    ctx: *mut kvs_context,
    filepath: *const c_char,
    seq_id: kvs_seq_id,
    tokens: *const kvs_token,
    n_token_count: usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let path = path("filepath", filepath)?;
        let tokens = array("tokens", tokens, n_token_count)?;
        let len = with_context_mut(ctx, |context| context.state_seq_save_file(path, seq_id, tokens))?;
        size_of_state(len)
    })
}

/// Replaces sequence dest_seq_id by the one in a sequence file (versions 2 to 4) and gives its tokens;
/// n_token_count_out may be NULL. Returns the offset behind the state, where appendices begin. 0: failed,
/// nothing has changed and nothing was written. With tokens_out NULL only the token count is reported, checked
/// against the size of the file, and no state is loaded; 12 is returned, the size of the header before the
/// tokens.
///
/// A file that is truncated while it is loaded is an error (a save of kvstate never truncates one). A state
/// takes the cells that are free without dest_seq_id. Where those hold something, mostly dest_seq_id itself, the file is
/// read into memory first: only if it cannot be read again then, dest_seq_id is empty after the failure. A device that fails: as
/// for kvs_state_seq_set_data_ext.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_load_file(
    ctx: *mut kvs_context,
    filepath: *const c_char,
    dest_seq_id: kvs_seq_id,
    tokens_out: *mut kvs_token,
    n_token_capacity: usize,
    n_token_count_out: *mut usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let path = path("filepath", filepath)?;
        if tokens_out.is_null() {
            let count = with_context(ctx, |_| seq_file_token_count(path))?;
            *out("n_token_count_out", n_token_count_out)? = count as usize;
            return Ok(crate::format::FileHeader::LEN);
        }
        let tokens_out = array_mut("tokens_out", tokens_out, n_token_capacity)?;
        let load =
            |context: &mut crate::Context| context.state_seq_load_file(path, dest_seq_id, tokens_out.len());
        let loaded = with_context_mut(ctx, load)?;
        give_tokens(&loaded, tokens_out, n_token_count_out)?;
        size_of_state(loaded.state_end)
    })
}

/// Bytes of a sequence's state with these flags: exactly what kvs_state_seq_get_data_ext writes. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_get_size_ext(
    ctx: *mut kvs_context,
    seq_id: kvs_seq_id,
    flags: kvs_state_seq_flags,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let flags = flags_of(flags)?;
        with_context(ctx, |context| size_of_state(context.state_seq_get_size(seq_id, flags)?))
    })
}

/// Writes a sequence's state to dst, which has size bytes; returns the bytes written. 0: failed; dst is
/// untouched if it is too small. Pending shifts are applied first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_get_data_ext(
    ctx: *mut kvs_context,
    dst: *mut u8,
    size: usize,
    seq_id: kvs_seq_id,
    flags: kvs_state_seq_flags,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let flags = flags_of(flags)?;
        let dst = host_bytes_mut("dst", dst, size)?;
        with_context_mut(ctx, |context| context.state_seq_get_data(dst, seq_id, flags))
    })
}

/// Replaces sequence dest_seq_id by the state in src, in every section that the state holds; returns the bytes
/// consumed (bytes behind the state are ignored). 0: failed, nothing has changed. flags as they were for
/// kvs_state_seq_get_data_ext, and KVS_STATE_SEQ_FLAGS_APPEND to add the state to the sequence: refused with
/// KVS_STATUS_POSITIONS_MEET unless all of its positions are behind those of the sequence.
///
/// One exception, for every call that restores: if the driver of a device fails while cells that are in use are written over,
/// dest_seq_id (or, of a whole context, every sequence) is empty afterwards. All that can be known before is refused before.
///
/// To go back to a checkpoint that was taken with KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY after n positions: restore it,
/// then kvs_memory_seq_rm(mem, seq_id, n, -1), since full attention still holds what came later (or the other way
/// round). No checkpoint is
/// needed while kvs_memory_seq_pos_min shows that the window before n is still there.
///
/// The tensors of a state carry no checksum: bytes that were damaged there are restored as they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_seq_set_data_ext(
    ctx: *mut kvs_context,
    src: *const u8,
    size: usize,
    dest_seq_id: kvs_seq_id,
    flags: kvs_state_seq_flags,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let (flags, append) = restore_flags_of(flags)?;
        let src = host_bytes("src", src, size)?;
        with_context_mut(ctx, |context| {
            if append {
                context.state_seq_append_data(src, dest_seq_id, flags)
            } else {
                context.state_seq_set_data(src, dest_seq_id, flags)
            }
        })
    })
}

unsafe fn give_tokens(loaded: &Loaded, tokens_out: &mut [kvs_token], count_out: *mut usize) -> Result<()> {
    tokens_out[..loaded.tokens.len()].copy_from_slice(&loaded.tokens);
    if !count_out.is_null() {
        // SAFETY: the contract of all calls.
        unsafe { *out("n_token_count_out", count_out)? = loaded.tokens.len() };
    }
    Ok(())
}
