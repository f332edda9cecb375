//! Slot files: all of a slot in one file.

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::ptr;

use super::handle::{
    Tagged, array, free_tagged, into_tagged, kvs_context, out, path, string, with_context_mut,
};
use super::params::{self, Params};
use super::snapshot::{kvs_job, transfer_of_job};
use super::state::size_of_state;
use super::status::{kvs_status, status_of, value_or};
use super::transfer_params::kvs_transfer_params;
use super::{kvs_pos, kvs_seq_id, kvs_token};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, CheckpointSpan, Identity};
use crate::session::{DraftOutcome, LoadedSlot, Require, SlotContents, SlotLoadParams, Verify, slot_path};
use crate::types::SeqId;

/// How much of a slot file is compared with its checksums before anything changes: KVS_VERIFY_*.
pub type kvs_verify = i32;

/// Nothing, but for the appendix that holds the checksums.
pub const KVS_VERIFY_NONE: kvs_verify = 0;
/// Header and tokens.
pub const KVS_VERIFY_HEADERS: kvs_verify = 1;
/// Everything: the file is read once for that, and again for what is restored. Whoever changes a slot file replaces it, as a save
/// does: bytes that are overwritten in between are not noticed.
pub const KVS_VERIFY_FULL: kvs_verify = 2;

/// What a slot file has to have to be loaded: bits KVS_REQUIRE_*.
pub type kvs_require = u32;

/// The fingerprint of a model; identity.model names one too then.
pub const KVS_REQUIRE_IDENTITY: kvs_require = 1;
/// Checksums that are whole.
pub const KVS_REQUIRE_CHECKSUMS: kvs_require = 2;

const _: () = assert!(
    KVS_REQUIRE_IDENTITY == Require::IDENTITY.bits() && KVS_REQUIRE_CHECKSUMS == Require::CHECKSUMS.bits()
);

/// What became of the draft state of a slot file: KVS_SLOT_DRAFT_*.
pub type kvs_slot_draft = i32;

/// The file has none.
pub const KVS_SLOT_DRAFT_ABSENT: kvs_slot_draft = 0;
/// It is restored.
pub const KVS_SLOT_DRAFT_RESTORED: kvs_slot_draft = 1;
/// It could not be used: see draft_reason.
pub const KVS_SLOT_DRAFT_DROPPED: kvs_slot_draft = 2;

/// A context checkpoint: where in the sequence it was taken, and its states. Fill with kvs_slot_checkpoint_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_slot_checkpoint {
    /// sizeof(kvs_slot_checkpoint), set by the init call.
    pub struct_size: usize,
    /// Tokens before it, at least 0.
    pub n_tokens: i64,
    /// Positions of the sequence then.
    pub pos_min: kvs_pos,
    /// At least pos_min.
    pub pos_max: kvs_pos,
    /// State of the target, taken with KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY; never empty.
    pub target: *const u8,
    /// Bytes of target.
    pub target_size: usize,
    /// State of the draft model; may be empty.
    pub draft: *const u8,
    /// Bytes of draft.
    pub draft_size: usize,
    /// State of the speculative driver; may be empty.
    pub driver: *const u8,
    /// Bytes of driver.
    pub driver_size: usize,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_slot_checkpoint {
    const NAME: &'static str = "kvs_slot_checkpoint";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            n_tokens: 0,
            pos_min: 0,
            pos_max: 0,
            target: ptr::null(),
            target_size: 0,
            draft: ptr::null(),
            draft_size: 0,
            driver: ptr::null(),
            driver_size: 0,
        }
    }
}

/// Whose state a slot file holds, any bytes. What is empty is not said.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_slot_identity {
    /// Fingerprint of the model and its settings: compared where the file and its reader both have one.
    pub model: *const u8,
    /// Bytes of model.
    pub model_size: usize,
    /// Whoever reads the file has to name the same salt; an empty one too.
    pub salt: *const u8,
    /// Bytes of salt.
    pub salt_size: usize,
    /// The caller's own: compared with nothing, given back.
    pub metadata: *const u8,
    /// Bytes of metadata.
    pub metadata_size: usize,
}

const NOBODY: kvs_slot_identity = kvs_slot_identity {
    model: ptr::null(),
    model_size: 0,
    salt: ptr::null(),
    salt_size: 0,
    metadata: ptr::null(),
    metadata_size: 0,
};

/// What a slot file is to hold beside the state of the target. Fill with kvs_slot_save_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_slot_save_params {
    /// sizeof(kvs_slot_save_params), set by the init call.
    pub struct_size: usize,
    /// The folder of the file. With it, filename is the name of a file and nothing more: one with a separator is refused.
    /// NULL (by default): filename is a path.
    pub directory: *const c_char,
    /// The token field, as it stands: a server's own payload, if it packs one.
    pub tokens: *const kvs_token,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Context checkpoints, oldest first.
    pub checkpoints: *const kvs_slot_checkpoint,
    /// Number of checkpoints.
    pub n_checkpoint: usize,
    /// The draft model's context; NULL (by default): none. Not the target's.
    pub draft: *mut kvs_context,
    /// Its sequence.
    pub draft_seq_id: kvs_seq_id,
    /// 1: the draft's state and driver go into a file of their own, which stands beside the slot file and ends in .drft instead;
    /// 0 by default. A load finds it.
    pub sidecar: u32,
    /// State of the speculative driver; may be empty.
    pub driver: *const u8,
    /// Bytes of driver.
    pub driver_size: usize,
    /// Whose state it is.
    pub identity: kvs_slot_identity,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_slot_save_params {
    const NAME: &'static str = "kvs_slot_save_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            directory: ptr::null(),
            tokens: ptr::null(),
            n_tokens: 0,
            checkpoints: ptr::null(),
            n_checkpoint: 0,
            draft: ptr::null_mut(),
            draft_seq_id: 0,
            sidecar: 0,
            driver: ptr::null(),
            driver_size: 0,
            identity: NOBODY,
        }
    }
}

/// How a slot file is to be loaded. Fill with kvs_slot_load_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_slot_load_params {
    /// sizeof(kvs_slot_load_params), set by the init call.
    pub struct_size: usize,
    /// As in kvs_slot_save_params.
    pub directory: *const c_char,
    /// Most tokens that are taken; by default any number.
    pub n_token_capacity: usize,
    /// Checkpoints to keep, the last ones; 32 by default.
    pub n_ctx_checkpoints: usize,
    /// The draft model's context; NULL (by default): none. Not the target's.
    pub draft: *mut kvs_context,
    /// Its sequence. It is replaced, or empty after the call if there is nothing to restore.
    pub draft_seq_id: kvs_seq_id,
    /// KVS_VERIFY_NONE by default. KVS_VERIFY_FULL reads all of the file, whatever is wanted of it.
    pub verify: kvs_verify,
    /// Only positions below this one are restored, of the target and of the draft, and nothing else of their tensors is read: a
    /// prompt without its reply. Below 0 (by default): all. Checkpoints that have seen others are left out, and so is the
    /// driver's state, if anything is. Refused as in kvs_state_seq_load_file_range.
    pub p1: kvs_pos,
    /// What the file has to have: bits KVS_REQUIRE_*, none by default.
    pub require: kvs_require,
    /// Whose state it has to be. A file that says nothing of it is loaded, and noted, unless it is required to.
    pub identity: kvs_slot_identity,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_slot_load_params {
    const NAME: &'static str = "kvs_slot_load_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        let SlotLoadParams { n_token_capacity, n_ctx_checkpoints, .. } = SlotLoadParams::default();
        Self {
            struct_size: 0,
            directory: ptr::null(),
            n_token_capacity,
            n_ctx_checkpoints,
            draft: ptr::null_mut(),
            draft_seq_id: 0,
            verify: KVS_VERIFY_NONE,
            p1: -1,
            require: 0,
            identity: NOBODY,
        }
    }
}

/// The memory behind a kvs_slot_result.
pub struct kvs_loaded_slot {
    loaded: LoadedSlot,
    checkpoints: Vec<kvs_slot_checkpoint>,
    draft_reason: CString,
    /// What `note_pointers` point to.
    _notes: Vec<CString>,
    note_pointers: Vec<*const c_char>,
}

impl Tagged for kvs_loaded_slot {
    const LIVE: u64 = 0x6b76_735f_6c64_7331;
    const NAME: &'static str = "result.memory";
}

/// What a slot file gave. Fill with kvs_slot_result_init before the load; everything that it points to is freed by
/// kvs_slot_result_free.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_slot_result {
    /// sizeof(kvs_slot_result), set by the init call.
    pub struct_size: usize,
    /// The token field.
    pub tokens: *const kvs_token,
    /// Number of tokens.
    pub n_tokens: usize,
    /// So many of them, from the first on, belong to what was restored, if the list has one for each cell; all of them if nothing
    /// was cut, and 0 if nothing was restored.
    pub n_token_kept: usize,
    /// Positions that were restored of the target; -1: none.
    pub pos_min: kvs_pos,
    /// The largest.
    pub pos_max: kvs_pos,
    /// Bytes of the target's memory state in the file.
    pub target_size: u64,
    /// Where a server that appends to the file once it is saved has begun to: behind the memory state, or behind the checksums if
    /// they come next.
    pub append_start: u64,
    /// The checkpoints that were kept, oldest first.
    pub checkpoints: *const kvs_slot_checkpoint,
    /// Their number.
    pub n_checkpoint: usize,
    /// Number of checkpoints in the file, of those that can be read: 0 if their part is damaged.
    pub n_checkpoint_in_file: usize,
    /// KVS_SLOT_DRAFT_*.
    pub draft: kvs_slot_draft,
    /// What was verified: KVS_VERIFY_NONE if the file has no checksums. A damaged part behind the memory state is left out, and
    /// noted.
    pub verified: kvs_verify,
    /// Why the draft state was dropped; otherwise empty.
    pub draft_reason: *const c_char,
    /// Bytes of the draft state, if it is restored.
    pub draft_size: u64,
    /// State of the speculative driver; empty if the file has none, or a draft state that was dropped.
    pub driver: *const u8,
    /// Bytes of driver.
    pub driver_size: usize,
    /// Whose state the file says that it is.
    pub identity: kvs_slot_identity,
    /// What is missing, damaged or unknown, in words.
    pub notes: *const *const c_char,
    /// Number of notes.
    pub n_note: usize,
    /// What kvs_slot_result_free frees; NULL if nothing was loaded.
    pub memory: *mut kvs_loaded_slot,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_slot_result {
    const NAME: &'static str = "kvs_slot_result";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            tokens: ptr::null(),
            n_tokens: 0,
            n_token_kept: 0,
            pos_min: 0,
            pos_max: 0,
            target_size: 0,
            append_start: 0,
            checkpoints: ptr::null(),
            n_checkpoint: 0,
            n_checkpoint_in_file: 0,
            draft: KVS_SLOT_DRAFT_ABSENT,
            verified: KVS_VERIFY_NONE,
            draft_reason: ptr::null(),
            draft_size: 0,
            driver: ptr::null(),
            driver_size: 0,
            identity: NOBODY,
            notes: ptr::null(),
            n_note: 0,
            memory: ptr::null_mut(),
        }
    }
}

impl kvs_slot_result {
    /// The size of the caller's struct, which holds nothing.
    pub(super) unsafe fn unused(result: *const Self) -> Result<usize> {
        // SAFETY: passed on.
        let Self { struct_size, memory, .. } = unsafe { params::read(result) }?;
        if memory.is_null() {
            return Ok(struct_size);
        }
        Err(Error::arg("result", "holds what an earlier load gave: free it first"))
    }
}

/// Fills the struct of struct_size bytes at checkpoint with zeroes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_checkpoint_init(
    checkpoint: *mut kvs_slot_checkpoint,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(checkpoint, struct_size) })
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_save_params_init(
    params: *mut kvs_slot_save_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_load_params_init(
    params: *mut kvs_slot_load_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at result with zeroes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_result_init(
    result: *mut kvs_slot_result,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(result, struct_size) })
}

/// Writes a slot file: sequence seq_id and what params say (NULL: no more than that). In front it is what
/// kvs_state_seq_save_file writes, and llama.cpp reads it. *size_out (NULL: not wanted) is the size of the file.
///
/// The file is written beside filename, synced, then renamed over it, as by kvs_state_seq_save_file. Files that a process
/// which was killed has left in that folder (.kvstate-*.tmp) are removed; those of a living one are not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_save(
    ctx: *mut kvs_context,
    filename: *const c_char,
    seq_id: kvs_seq_id,
    params: *const kvs_slot_save_params,
    size_out: *mut usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let params = if params.is_null() { kvs_slot_save_params::defaults() } else { params::read(params)? };
        let size_out = if size_out.is_null() { None } else { Some(out("size_out", size_out)?) };
        let path = file_path(filename, params.directory)?;
        let size =
            with_contents(ctx, &params, |context, contents| context.slot_save(path, seq_id, contents))?;
        if let Some(size_out) = size_out {
            *size_out = size_of_state(size)?;
        }
        Ok(())
    })
}

/// Begins kvs_slot_save on a thread of its own, of the slot as it is now: its states are copied where the caches are, all that
/// params point to in host memory, and both contexts may go on, or be freed. transfer: NULL, or threads and a progress callback,
/// which is called on the job's thread. *size_out of kvs_job_wait is the size of the file. Free the job with kvs_job_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_save_start(
    ctx: *mut kvs_context,
    filename: *const c_char,
    seq_id: kvs_seq_id,
    params: *const kvs_slot_save_params,
    transfer: *const kvs_transfer_params,
    job_out: *mut *mut kvs_job,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let job_out = out("job_out", job_out)?;
        let params = if params.is_null() { kvs_slot_save_params::defaults() } else { params::read(params)? };
        let path = file_path(filename, params.directory)?;
        let transfer = transfer_of_job(transfer)?;
        let (snapshot, sync) = with_contents(ctx, &params, |context, contents| {
            Ok((context.slot_snapshot(seq_id, contents)?, context.syncs_files()))
        })?;
        let (snapshot, progress) = match transfer {
            Some((threads, progress)) => (snapshot.with_threads(threads), progress),
            None => (snapshot, None),
        };
        let job = snapshot.save_in_background(path, sync, progress)?;
        *job_out = into_tagged(kvs_job::of_file(job));
        Ok(())
    })
}

/// Replaces sequence dest_seq_id by the one in a slot file, or in any sequence file (versions 2 to 4), and fills result with
/// what else the file holds. params may be NULL.
///
/// Refused, and nothing has changed in either context: a file of another model, salt or geometry, one that has not what require
/// asks for, a state that does not fit, and what KVS_VERIFY_* finds damaged in header, tokens or memory state. What is damaged or
/// unknown behind the memory state is left out and said in notes. A draft state that does not fit is dropped: the draft's sequence
/// is empty then, and the target stands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_load(
    ctx: *mut kvs_context,
    filename: *const c_char,
    dest_seq_id: kvs_seq_id,
    params: *const kvs_slot_load_params,
    result: *mut kvs_slot_result,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let params = if params.is_null() { kvs_slot_load_params::defaults() } else { params::read(params)? };
        let struct_size = kvs_slot_result::unused(result)?;
        let path = file_path(filename, params.directory)?;
        let loaded =
            with_load_params(ctx, &params, |context, params| context.slot_load(path, dest_seq_id, params))?;
        params::write(result, kvs_slot_result { struct_size, ..result_of(loaded) })
    })
}

/// Frees what a result points to, and fills it with zeroes. A result of no load is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_slot_result_free(result: *mut kvs_slot_result) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe {
        let kvs_slot_result { memory, struct_size, .. } = params::read(result)?;
        free_tagged(memory)?;
        params::init(result, struct_size)
    });
}

/// What a slot file is to hold, but for the draft's state.
pub(super) unsafe fn contents<'a>(params: &kvs_slot_save_params) -> Result<SlotContents<'a>> {
    // SAFETY: passed on.
    unsafe {
        let checkpoints = params::read_array("checkpoints", params.checkpoints, params.n_checkpoint)?;
        Ok(SlotContents {
            tokens: array("tokens", params.tokens, params.n_tokens)?,
            checkpoints: checkpoints.iter().map(|c| checkpoint(c)).collect::<Result<_>>()?,
            draft: None,
            driver: array("driver", params.driver, params.driver_size)?,
            identity: identity(&params.identity)?,
            sidecar: params::flag("sidecar", params.sidecar)?,
        })
    }
}

/// Runs a save of what params say.
pub(super) unsafe fn with_contents<T>(
    ctx: *mut kvs_context,
    params: &kvs_slot_save_params,
    save: impl FnOnce(&mut Context, SlotContents<'_>) -> Result<T>,
) -> Result<T> {
    // SAFETY: passed on.
    unsafe {
        let contents = contents(params)?;
        with_target_and_draft(ctx, (params.draft, params.draft_seq_id), |context, draft| {
            save(context, SlotContents { draft, ..contents })
        })
    }
}

/// How a slot is loaded, but for the draft.
pub(super) unsafe fn load_params<'a>(params: &kvs_slot_load_params) -> Result<SlotLoadParams<'a>> {
    let kvs_slot_load_params { n_token_capacity, n_ctx_checkpoints, verify, p1, require, .. } = *params;
    let verify = match verify {
        KVS_VERIFY_NONE => Verify::None,
        KVS_VERIFY_HEADERS => Verify::Headers,
        KVS_VERIFY_FULL => Verify::Full,
        other => {
            return Err(Error::arg("verify", format!("{other} is out of range [0, {KVS_VERIFY_FULL}]")));
        }
    };
    let p1 = (p1 >= 0).then_some(p1);
    let known = Require::all().bits();
    let require = Require::from_bits(require)
        .ok_or_else(|| Error::arg("require", format!("{require:#x} (known: {known:#x})")))?;
    // SAFETY: passed on.
    let identity = unsafe { identity(&params.identity) }?;
    Ok(SlotLoadParams { n_token_capacity, n_ctx_checkpoints, draft: None, identity, verify, p1, require })
}

/// Runs a load as params say.
pub(super) unsafe fn with_load_params<T>(
    ctx: *mut kvs_context,
    params: &kvs_slot_load_params,
    load: impl FnOnce(&mut Context, SlotLoadParams<'_>) -> Result<T>,
) -> Result<T> {
    // SAFETY: passed on.
    unsafe {
        let load_params = load_params(params)?;
        with_target_and_draft(ctx, (params.draft, params.draft_seq_id), |context, draft| {
            load(context, SlotLoadParams { draft, ..load_params })
        })
    }
}

/// Runs a call on the target's context and, if there is one, the draft's.
unsafe fn with_target_and_draft<T>(
    target: *mut kvs_context,
    (draft, seq_id): (*mut kvs_context, SeqId),
    call: impl FnOnce(&mut Context, Option<(&mut Context, SeqId)>) -> Result<T>,
) -> Result<T> {
    if draft.is_null() {
        // SAFETY: passed on.
        return unsafe { with_context_mut(target, |target| call(target, None)) };
    }
    if ptr::eq(target, draft) {
        return Err(Error::arg("draft", "is the target's context"));
    }
    // SAFETY: passed on; they are two handles.
    unsafe {
        with_context_mut(target, |target| {
            with_context_mut(draft, |draft| call(target, Some((draft, seq_id))))
        })
    }
}

pub(super) unsafe fn file_path(filename: *const c_char, directory: *const c_char) -> Result<PathBuf> {
    // SAFETY: passed on.
    unsafe {
        if directory.is_null() {
            return path("filename", filename).map(Into::into);
        }
        let name = string("filename", filename)?.to_str().map_err(|_| Error::arg("filename", "not UTF-8"))?;
        slot_path(path("directory", directory)?, name)
    }
}

unsafe fn identity(identity: &kvs_slot_identity) -> Result<Identity> {
    // SAFETY: passed on.
    unsafe {
        Ok(Identity {
            model: array("model", identity.model, identity.model_size)?.to_vec(),
            salt: array("salt", identity.salt, identity.salt_size)?.to_vec(),
            metadata: array("metadata", identity.metadata, identity.metadata_size)?.to_vec(),
        })
    }
}

pub(super) unsafe fn checkpoint<'a>(checkpoint: &kvs_slot_checkpoint) -> Result<Checkpoint<&'a [u8]>> {
    let kvs_slot_checkpoint { n_tokens, pos_min, pos_max, .. } = *checkpoint;
    // SAFETY: passed on.
    unsafe {
        Ok(Checkpoint {
            span: CheckpointSpan::new(n_tokens, pos_min, pos_max)?,
            target: array("target", checkpoint.target, checkpoint.target_size)?,
            draft: array("draft", checkpoint.draft, checkpoint.draft_size)?,
            driver: array("driver", checkpoint.driver, checkpoint.driver_size)?,
        })
    }
}

/// The result for C callers; what it points to is in its memory.
pub(super) fn result_of(loaded: LoadedSlot) -> kvs_slot_result {
    let text = |text: &str| CString::new(text.replace('\0', "\\0")).unwrap_or_default();
    let notes: Vec<_> = loaded.notes.iter().map(|note| text(note)).collect();
    let draft_reason = match &loaded.draft {
        DraftOutcome::Dropped(reason) => text(reason),
        DraftOutcome::Absent | DraftOutcome::Restored(_) => CString::default(),
    };
    let checkpoints = loaded.checkpoints.iter().map(|c| kvs_slot_checkpoint {
        struct_size: size_of::<kvs_slot_checkpoint>(),
        n_tokens: c.span.n_tokens(),
        pos_min: c.span.pos_min(),
        pos_max: c.span.pos_max(),
        target: c.target.as_ptr(),
        target_size: c.target.len(),
        draft: c.draft.as_ptr(),
        draft_size: c.draft.len(),
        driver: c.driver.as_ptr(),
        driver_size: c.driver.len(),
    });
    let memory = kvs_loaded_slot {
        checkpoints: checkpoints.collect(),
        draft_reason,
        note_pointers: notes.iter().map(|note| note.as_ptr()).collect(),
        _notes: notes,
        loaded,
    };
    // The heap memory of vectors and strings stays where it is when their owner moves.
    let kvs_loaded_slot { loaded, checkpoints, draft_reason, note_pointers, .. } = &memory;
    let driver = loaded.driver.as_deref().unwrap_or_default();
    let Identity { model, salt, metadata } = &loaded.identity;
    let (draft, draft_size) = match loaded.draft {
        DraftOutcome::Absent => (KVS_SLOT_DRAFT_ABSENT, 0),
        DraftOutcome::Restored(bytes) => (KVS_SLOT_DRAFT_RESTORED, bytes),
        DraftOutcome::Dropped(_) => (KVS_SLOT_DRAFT_DROPPED, 0),
    };
    let result = kvs_slot_result {
        struct_size: 0,
        tokens: loaded.tokens.as_ptr(),
        n_tokens: loaded.tokens.len(),
        n_token_kept: loaded.kept.n_tokens(loaded.tokens.len()),
        pos_min: loaded.kept.pos_min,
        pos_max: loaded.kept.pos_max,
        target_size: loaded.target_bytes,
        append_start: loaded.append_start,
        checkpoints: checkpoints.as_ptr(),
        n_checkpoint: checkpoints.len(),
        n_checkpoint_in_file: loaded.n_checkpoints_in_file,
        draft,
        verified: match loaded.verified {
            Verify::None => KVS_VERIFY_NONE,
            Verify::Headers => KVS_VERIFY_HEADERS,
            Verify::Full => KVS_VERIFY_FULL,
        },
        draft_reason: draft_reason.as_ptr(),
        draft_size,
        driver: driver.as_ptr(),
        driver_size: driver.len(),
        identity: kvs_slot_identity {
            model: model.as_ptr(),
            model_size: model.len(),
            salt: salt.as_ptr(),
            salt_size: salt.len(),
            metadata: metadata.as_ptr(),
            metadata_size: metadata.len(),
        },
        notes: note_pointers.as_ptr(),
        n_note: note_pointers.len(),
        memory: ptr::null_mut(),
    };
    kvs_slot_result { memory: into_tagged(memory), ..result }
}
