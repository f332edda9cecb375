//! Slot files of writers and readers.

use std::ffi::c_char;
use std::rc::Rc;

use super::handle::{into_tagged, out, with_tagged};
use super::kvs_seq_id;
use super::params::{self, Params};
use super::slot_file::{
    contents, file_path, kvs_slot_load_params, kvs_slot_result, kvs_slot_save_params, load_params, result_of,
};
use super::state::size_of_state;
use super::status::{kvs_status, status_of};
use super::transfer::{check_seq_id, kvs_state_reader, kvs_state_writer};
use super::view::{access_of, kvs_tensor_access};
use crate::error::{Error, Result};
use crate::format::FileKind;
use crate::session::{StateFile, StateReader};

/// Writes the state of a sequence, and what params say (NULL: no more than that), to a slot file: kvs_slot_save for a writer. In
/// front it is what kvs_state_writer_save_file writes. sync: wait for the disk before the file is renamed into place. *size_out
/// (NULL: not wanted) is the size of the file.
///
/// draft is NULL in params: a writer's slot file has the target alone, and no sidecar.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_save_slot(
    writer: *mut kvs_state_writer,
    filename: *const c_char,
    params: *const kvs_slot_save_params,
    sync: bool,
    size_out: *mut usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let params = if params.is_null() { kvs_slot_save_params::defaults() } else { params::read(params)? };
        check_no_draft(params.draft.is_null())?;
        let size_out = if size_out.is_null() { None } else { Some(out("size_out", size_out)?) };
        let path = file_path(filename, params.directory)?;
        let contents = contents(&params)?;
        let size = with_tagged(writer, |w| w.writer.save_slot(path, contents, sync))?;
        if let Some(size_out) = size_out {
            *size_out = size_of_state(size)?;
        }
        Ok(())
    })
}

/// Begins to read the state in a slot file, or in any sequence file, which will replace seq_id: kvs_state_reader_open_file with
/// what kvs_slot_load compares. params may be NULL; draft is NULL in it, and p1 below 0: all positions are restored.
///
/// Refused: a file of another model or salt, and what verify finds damaged in header, tokens or memory state. The geometry is not
/// compared: only the caller knows its own sections, and the state says most of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_open_slot(
    seq_id: kvs_seq_id,
    filename: *const c_char,
    params: *const kvs_slot_load_params,
    access: *const kvs_tensor_access,
    reader_out: *mut *mut kvs_state_reader,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let out = out("reader_out", reader_out)?;
        check_seq_id(seq_id)?;
        if seq_id == -1 {
            return Err(Error::arg("seq_id", "-1, a slot file holds one sequence"));
        }
        let params = if params.is_null() { kvs_slot_load_params::defaults() } else { params::read(params)? };
        check_no_draft(params.draft.is_null())?;
        let path = file_path(filename, params.directory)?;
        let params = load_params(&params)?;
        let access = access_of(access)?;
        let file = Rc::new(StateFile::open(path, FileKind::Sequence, params.n_token_capacity)?);
        // SAFETY: `file` keeps it, where it is, until after `reader` is dropped.
        let borrowed: &'static StateFile = &*Rc::as_ptr(&file);
        let reader = StateReader::of_slot(borrowed, params)?;
        *out = into_tagged(kvs_state_reader { reader, file: Some(file), seq_id, access });
        Ok(())
    })
}

/// Fills result with what else a slot file holds, as kvs_slot_load does: to be called once, when every section is planned and
/// before kvs_state_reader_rewind. Identity and checksums that something stands behind are compared now, and the file is refused as
/// by kvs_state_reader_open_slot: nothing has changed then. pos_min and pos_max are those of the views that were planned. A draft
/// state is told as dropped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_slot(
    reader: *mut kvs_state_reader,
    result: *mut kvs_slot_result,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let struct_size = kvs_slot_result::unused(result)?;
        let loaded = with_tagged(reader, |r| r.reader.slot())?;
        params::write(result, kvs_slot_result { struct_size, ..result_of(loaded) })
    })
}

fn check_no_draft(is_null: bool) -> Result<()> {
    if is_null {
        Ok(())
    } else {
        Err(Error::arg("draft", "a slot file of a writer or reader has the target alone"))
    }
}
