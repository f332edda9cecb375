//! Auto-save: a folder that keeps the slots of a server.

use std::ffi::{CString, c_char};
use std::ptr;

use super::handle::{Tagged, free_tagged, into_tagged, kvs_context, live, out, path};
use super::kvs_seq_id;
use super::params::{self, Params};
use super::slot_file::{
    kvs_slot_load_params, kvs_slot_result, kvs_slot_save_params, result_of, with_contents, with_load_params,
};
use super::state::size_of_state;
use super::status::{kvs_status, status_of, value_or};
use crate::error::{Error, Result};
use crate::session::{Autosave, AutosaveParams, DraftOutcome, Kept, LoadedSlot, Restored, Verify};

/// Which folder keeps the slots, and how much of them. Fill with kvs_autosave_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_autosave_params {
    /// sizeof(kvs_autosave_params), set by the init call.
    pub struct_size: usize,
    /// The folder, which is created if it is not there.
    pub directory: *const c_char,
    /// Most bytes of all slot files, without the temporary one of a save that runs; 0 (by default): no bound.
    pub max_bytes: u64,
    /// kvs_autosave_mark says that a save is due after so many tokens; 0 (by default): never.
    pub every_n_tokens: u64,
    /// 1: saves do not wait for the disk, whatever unsynced_files of the context is; 0 by default.
    pub unsynced_files: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_autosave_params {
    const NAME: &'static str = "kvs_autosave_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            directory: ptr::null(),
            max_bytes: 0,
            every_n_tokens: 0,
            unsynced_files: 0,
            reserved: 0,
        }
    }
}

/// A slot that the folder has. Fill with kvs_autosaved_slot_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_autosaved_slot {
    /// sizeof(kvs_autosaved_slot), set by the init call.
    pub struct_size: usize,
    /// The slot.
    pub slot_id: u32,
    /// Words of its token field.
    pub n_tokens: u32,
    /// Bytes of its files.
    pub size: u64,
    /// When it was used last, in milliseconds since 1970.
    pub last_use_ms: u64,
}

// SAFETY: repr(C), struct_size first, integers only.
unsafe impl Params for kvs_autosaved_slot {
    const NAME: &'static str = "kvs_autosaved_slot";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self { struct_size: 0, slot_id: 0, n_tokens: 0, size: 0, last_use_ms: 0 }
    }
}

/// A folder that keeps slots from one run of a server to the next: slot N in auto-slotN.bin, a slot file as any other, and on
/// request its draft in auto-slotN.drft. All calls but kvs_autosave_free are Const: they may be made from any thread, side by
/// side, also while one waits.
///
/// Whatever is wrong with a file costs a cold start and nothing else.
pub struct kvs_autosave {
    autosave: Autosave,
    notes: Vec<CString>,
}

impl Tagged for kvs_autosave {
    const LIVE: u64 = 0x6b76_735f_6175_7431;
    const NAME: &'static str = "autosave";
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_params_init(
    params: *mut kvs_autosave_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at slot with zeroes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosaved_slot_init(
    slot: *mut kvs_autosaved_slot,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(slot, struct_size) })
}

/// Takes a folder, and finds out what it holds: by its manifest, and by the files themselves where that is missing, damaged, or
/// of a later version. What killed processes have left behind, and slots that are too many for max_bytes, are removed.
/// KVS_STATUS_LOCKED if another process, or another handle, has taken it: the end of a process, however it comes, gives it back.
/// A folder that cannot be written can be opened: restores work, saves fail and say why. Free it with kvs_autosave_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_open(
    params: *const kvs_autosave_params,
    autosave_out: *mut *mut kvs_autosave,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let autosave_out = out("autosave_out", autosave_out)?;
        let params = params::read(params)?;
        if params.reserved != 0 {
            return Err(Error::arg("reserved", format!("{}, it is 0", params.reserved)));
        }
        let some = |value: u64| (value > 0).then_some(value);
        let autosave = Autosave::open(AutosaveParams {
            directory: path("directory", params.directory)?.to_owned(),
            max_bytes: some(params.max_bytes),
            every_n_tokens: some(params.every_n_tokens),
            sync: !params::flag("unsynced_files", params.unsynced_files)?,
        })?;
        let note = |note: &String| CString::new(note.replace('\0', "\\0")).unwrap_or_default();
        let notes = autosave.notes().iter().map(note).collect();
        *autosave_out = into_tagged(kvs_autosave { autosave, notes });
        Ok(())
    })
}

/// Waits for the saves that run (kvs_autosave_cancel ends one sooner), and gives the folder back. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_free(autosave: *mut kvs_autosave) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(autosave) });
}

/// What was odd when the folder was opened, in words; NULL behind the last note. Valid until the handle is freed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_note(autosave: *const kvs_autosave, i: usize) -> *const c_char {
    // SAFETY: the contract of all calls.
    value_or(ptr::null(), || unsafe {
        Ok(live(autosave)?.notes.get(i).map_or(ptr::null(), |note| note.as_ptr()))
    })
}

/// Number of slots that the folder has. 0: none, or failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_count(autosave: *const kvs_autosave) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { Ok(live(autosave)?.autosave.slots().len()) })
}

/// Slot i of those that the folder has, by number. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_get(
    autosave: *const kvs_autosave,
    i: usize,
    slot: *mut kvs_autosaved_slot,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let struct_size = params::read(slot)?.struct_size;
        let slots = live(autosave)?.autosave.slots();
        let found = slots.get(i);
        let found =
            found.ok_or_else(|| Error::arg("i", format!("{i} is out of range [0, {})", slots.len())))?;
        params::write(
            slot,
            kvs_autosaved_slot {
                struct_size,
                slot_id: found.slot_id,
                n_tokens: found.n_tokens,
                size: found.bytes,
                last_use_ms: found.last_use_ms,
            },
        )
    })
}

/// Slot slot_id has been used and is another than its file: n_tokens tokens were computed since the last call. Returns whether a
/// save is due: every_n_tokens have come together since the last that was begun, and none runs. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_mark(
    autosave: *const kvs_autosave,
    slot_id: u32,
    n_tokens: u64,
) -> bool {
    // SAFETY: the contract of all calls.
    value_or(false, || unsafe { Ok(live(autosave)?.autosave.mark(slot_id, n_tokens)) })
}

/// Whether the slot was marked since the state that its file has: at the end of a run these are the slots to save. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_is_dirty(autosave: *const kvs_autosave, slot_id: u32) -> bool {
    // SAFETY: the contract of all calls.
    value_or(false, || unsafe { Ok(live(autosave)?.autosave.is_dirty(slot_id)) })
}

/// Saves a slot: sequence seq_id and what params say (NULL: no more than that; directory must be NULL). *size_out (NULL: not
/// wanted) is the size of its files.
///
/// The slots that were used longest ago make room for it, once it is there. KVS_STATUS_OVER_BUDGET: it does not fit beside slots
/// that were used later. If it fails its old file stands, and every other. A save of the slot in the background is waited for
/// first. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_save(
    autosave: *const kvs_autosave,
    ctx: *mut kvs_context,
    slot_id: u32,
    seq_id: kvs_seq_id,
    params: *const kvs_slot_save_params,
    size_out: *mut usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let autosave = &live(autosave)?.autosave;
        let size_out = if size_out.is_null() { None } else { Some(out("size_out", size_out)?) };
        let saved = with_contents(ctx, &save_params(params)?, |context, contents| {
            autosave.save(slot_id, context, seq_id, contents)
        })?;
        if let Some(size_out) = size_out {
            *size_out = size_of_state(saved.bytes)?;
        }
        Ok(())
    })
}

/// Takes a snapshot of a slot and begins kvs_autosave_save of it on a thread of its own: the contexts may go on, and everything
/// that params point to is copied. A save of the slot that still runs is waited for first. Its failure is said by
/// kvs_autosave_wait, and logged. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_save_start(
    autosave: *const kvs_autosave,
    ctx: *mut kvs_context,
    slot_id: u32,
    seq_id: kvs_seq_id,
    params: *const kvs_slot_save_params,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let autosave = &live(autosave)?.autosave;
        with_contents(ctx, &save_params(params)?, |context, contents| {
            autosave.save_in_background(slot_id, context, seq_id, contents)
        })
    })
}

/// Whether no save of the slot runs in the background: 1 or 0; -1: no live handle. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_poll(autosave: *const kvs_autosave, slot_id: u32) -> i32 {
    // SAFETY: the contract of all calls.
    value_or(-1, || unsafe { Ok(i32::from(live(autosave)?.autosave.is_finished(slot_id))) })
}

/// Bytes done of total of the save in the background, until it has been waited for; 0 of 0 if there is none. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_progress(
    autosave: *const kvs_autosave,
    slot_id: u32,
    done_out: *mut u64,
    total_out: *mut u64,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let progress = live(autosave)?.autosave.progress(slot_id);
        let (done_out, total_out) = (out("done_out", done_out)?, out("total_out", total_out)?);
        (*done_out, *total_out) = (progress.done, progress.total);
        Ok(())
    })
}

/// Asks the save in the background to end: kvs_autosave_wait fails with KVS_STATUS_CANCELLED then, and the old file stands,
/// unless it was done before. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_cancel(autosave: *const kvs_autosave, slot_id: u32) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        live(autosave)?.autosave.cancel(slot_id);
        Ok(())
    })
}

/// Waits for the save of the slot in the background, and fails for its reason; *size_out (NULL: not wanted) is then what
/// kvs_autosave_save would have given, or 0 if there was none that nobody has waited for. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_wait(
    autosave: *const kvs_autosave,
    slot_id: u32,
    size_out: *mut usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let saved = live(autosave)?.autosave.wait(slot_id)?;
        if !size_out.is_null() {
            *out("size_out", size_out)? = size_of_state(saved.map_or(0, |saved| saved.bytes))?;
        }
        Ok(())
    })
}

/// Waits for all saves in the background, and brings the manifest up to date with what was used. Fails for the reason of the last
/// save that failed, after all of them. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_flush(autosave: *const kvs_autosave) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { live(autosave)?.autosave.flush() })
}

/// Replaces sequence dest_seq_id by that of a slot, as kvs_slot_load from its file (params: as there, and directory must be
/// NULL), and fills result. The slot is not dirty then. *restored_out is 1, or 0 for a cold start: nothing has changed then, and
/// the notes of the result say why; there are none if the folder has no such slot. Either way the result is to be freed.
///
/// Fails only for what is the caller's: arguments, and a progress callback that cancels. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_restore(
    autosave: *const kvs_autosave,
    ctx: *mut kvs_context,
    slot_id: u32,
    dest_seq_id: kvs_seq_id,
    params: *const kvs_slot_load_params,
    result: *mut kvs_slot_result,
    restored_out: *mut i32,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let autosave = &live(autosave)?.autosave;
        let restored_out = out("restored_out", restored_out)?;
        let params = if params.is_null() { kvs_slot_load_params::defaults() } else { params::read(params)? };
        no_directory(params.directory)?;
        let struct_size = kvs_slot_result::unused(result)?;
        let restored = with_load_params(ctx, &params, |context, params| {
            autosave.restore(slot_id, context, dest_seq_id, params)
        })?;
        let (is_restored, loaded) = match restored {
            Restored::Slot(loaded) => (1, loaded),
            Restored::Cold(notes) => (0, cold(notes)),
        };
        params::write(result, kvs_slot_result { struct_size, ..result_of(loaded) })?;
        *restored_out = is_restored;
        Ok(())
    })
}

/// Removes a slot from the folder; one that it does not have is fine. A save of it in the background is cancelled. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_autosave_remove(autosave: *const kvs_autosave, slot_id: u32) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { live(autosave)?.autosave.remove(slot_id) })
}

unsafe fn save_params(params: *const kvs_slot_save_params) -> Result<kvs_slot_save_params> {
    if params.is_null() {
        return Ok(kvs_slot_save_params::defaults());
    }
    // SAFETY: passed on.
    let params = unsafe { params::read(params) }?;
    no_directory(params.directory)?;
    Ok(params)
}

fn no_directory(directory: *const c_char) -> Result<()> {
    if directory.is_null() {
        return Ok(());
    }
    Err(Error::arg("directory", "given, while the folder is that of kvs_autosave_open"))
}

/// What a cold start gives.
fn cold(notes: Vec<String>) -> LoadedSlot {
    LoadedSlot {
        tokens: Vec::new(),
        kept: Kept::NOTHING,
        target_bytes: 0,
        append_start: 0,
        checkpoints: Vec::new(),
        n_checkpoints_in_file: 0,
        draft: DraftOutcome::Absent,
        driver: None,
        verified: Verify::None,
        identity: crate::format::Identity::default(),
        notes,
    }
}
