//! Writers and readers: states that a server composes of sections of its own and of views.

use std::ffi::{c_char, c_void};
use std::rc::Rc;

use super::device::check_device;
use super::handle::{
    Tagged, array, array_mut, free_tagged, host_bytes, host_bytes_mut, into_tagged, out, path, with_tagged,
};
use super::params;
use super::state::{flags_of, size_of_state};
use super::status::{kvs_status, status_of, value_or};
use super::transfer_params::{kvs_transfer_params, transfer};
use super::view::{
    CallerTensors, SlotsOut, access_of, kvs_kv_view, kvs_slot_info, kvs_tensor_access, slots_in,
    tensor_bytes, view_of,
};
use super::{kvs_seq_id, kvs_state_seq_flags, kvs_token};
use crate::error::{Error, Result};
use crate::format::FileKind;
use crate::memory::KvView;
use crate::session::{StateFile, StateReader, StateWriter};
use crate::state::DeviceState;
use crate::storage::{CallerStream, Plane, Transfer};
use crate::types::StateFlags;

/// A state on its way out. Sections are named one after another, in write order; nothing of a tensor is copied
/// before kvs_state_writer_get_data or kvs_state_writer_save_file, which copy all of them in one batch.
///
/// Until it is freed, nobody writes the tensors that were named and what a view points to stays where it is.
pub struct kvs_state_writer {
    /// Declared before what it borrows from.
    pub(super) writer: StateWriter<'static>,
    views: Vec<Rc<KvView>>,
    planes: Vec<Rc<Plane>>,
    access: Option<CallerTensors>,
}

impl Tagged for kvs_state_writer {
    const LIVE: u64 = 0x6b76_735f_7774_7231;
    const NAME: &'static str = "writer";
}

/// A state on its way in. First every section is planned, in write order: read, checked, placed, and nothing
/// changes. Then, from kvs_state_reader_rewind on, the same sections are read in the same order: cells are set,
/// and tensors wait for kvs_state_reader_finish, which copies all of them in one batch. The state has been restored
/// when that has returned KVS_STATUS_OK, and not before.
///
/// The whole of it: plan every section; compare kvs_state_reader_left with 0, since what a state has beyond the
/// cache (a section, V of the last layer) is told by nothing else; rewind; read every section; finish. The README has it as
/// code. Sections of the caller's own are read or skipped while planning, and read in between afterwards.
///
/// Until it is freed, the bytes of the state stay as they are, and the cache is changed through it alone.
pub struct kvs_state_reader {
    /// Declared before what it borrows from.
    pub(super) reader: StateReader<'static>,
    pub(super) file: Option<Rc<StateFile>>,
    pub(super) seq_id: kvs_seq_id,
    pub(super) access: Option<CallerTensors>,
}

impl Tagged for kvs_state_reader {
    const LIVE: u64 = 0x6b76_735f_7264_7231;
    const NAME: &'static str = "reader";
}

/// The tensors of a sequence's ON_DEVICE state.
pub struct kvs_device_state {
    state: DeviceState,
}

impl Tagged for kvs_device_state {
    const LIVE: u64 = 0x6b76_735f_6465_7631;
    const NAME: &'static str = "state";
}

/// Begins the state of a sequence, or with seq_id -1 of a whole context. access: for tensors of
/// kvs_state_writer_write_tensor that kvstate does not reach by itself, NULL if there are none.
///
/// A whole context begins with the name of its architecture, which is the caller's to write: its length in bytes as
/// a little-endian uint32_t, then the bytes, without a NUL (kvs_context_params.arch, if that is who reads it).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_new(
    seq_id: kvs_seq_id,
    access: *const kvs_tensor_access,
    writer_out: *mut *mut kvs_state_writer,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let out = out("writer_out", writer_out)?;
        check_seq_id(seq_id)?;
        *out = into_tagged(kvs_state_writer {
            writer: StateWriter::new(seq_id),
            views: Vec::new(),
            planes: Vec::new(),
            access: access_of(access)?,
        });
        Ok(())
    })
}

/// Frees a writer; NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_free(writer: *mut kvs_state_writer) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(writer) });
}

/// Says how the writer moves bytes: n_threads in kvs_state_writer_get_data and _get_on_device too, progress in
/// kvs_state_writer_save_file alone, where a save that is cancelled leaves the file that was there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_set_transfer(
    writer: *mut kvs_state_writer,
    params: *const kvs_transfer_params,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let (threads, progress) = transfer(&params::read(params)?)?;
        with_tagged(writer, |w| {
            w.writer.set_threads(threads);
            w.writer.set_progress(progress);
            Ok(())
        })
    })
}

/// Names the stream of a device that the writer's copies run behind: kvs_stream_set for a writer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_set_stream(
    writer: *mut kvs_state_writer,
    device: i32,
    stream: *mut c_void,
) -> kvs_status {
    // SAFETY: the contract of all calls; the header demands a live stream of the device.
    status_of(|| unsafe {
        let stream = CallerStream::new(check_device(device)?, stream)?;
        with_tagged(writer, |w| {
            w.writer.set_stream(stream);
            Ok(())
        })
    })
}

/// Metadata of a section of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_write(
    writer: *mut kvs_state_writer,
    src: *const c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let bytes = array::<u8>("src", src.cast(), size)?;
        with_tagged(writer, |w| w.writer.write(bytes))
    })
}

/// n bytes of a tensor of the caller's from offset on: data is the tensor's address in host memory or, as its driver then
/// says, in the memory of a CUDA device (kvs_device_of); or NULL, then they are reached through the access, which gets tensor back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_write_tensor(
    writer: *mut kvs_state_writer,
    tensor: *mut c_void,
    data: *mut c_void,
    offset: u64,
    n: u64,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(writer, |w| {
            if n == 0 {
                return Ok(());
            }
            let plane = Rc::new(tensor_bytes(tensor, data, offset, n, w.access.as_ref())?);
            // SAFETY: `planes` keeps it, where it is, until after `writer` is dropped.
            let borrowed: &'static Plane = &*Rc::as_ptr(&plane);
            w.planes.push(plane);
            w.writer.write_tensor(borrowed)
        })
    })
}

/// An attention section: what kvs_kv_cache_state_write would write. KVS_STATE_SEQ_FLAGS_ON_DEVICE makes no
/// difference here: kvs_state_writer_get_on_device does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_write_kv_cache(
    writer: *mut kvs_state_writer,
    view: *const kvs_kv_view,
    flags: kvs_state_seq_flags,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let flags = flags_of(flags)?;
        let view = Rc::new(view_of(view)?);
        with_tagged(writer, |w| {
            // SAFETY: `views` keeps it, where it is, until after `writer` is dropped.
            let borrowed: &'static KvView = &*Rc::as_ptr(&view);
            w.views.push(view);
            w.writer.write_kv_cache(borrowed, flags)
        })
    })
}

/// Bytes that kvs_state_writer_get_data writes: those of all sections, and for a sequence the 8 of the header.
/// 0: failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_size(writer: *mut kvs_state_writer) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_tagged(writer, |w| size_of_state(w.writer.size())) })
}

/// Writes the state to dst, a sequence's with its header; returns the bytes written. 0: failed; dst is untouched if
/// it is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_get_data(
    writer: *mut kvs_state_writer,
    dst: *mut u8,
    size: usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let dst = host_bytes_mut("dst", dst, size)?;
        with_tagged(writer, |w| w.writer.get_data(dst))
    })
}

/// Bytes that kvs_state_writer_get_on_device writes. 0: failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_metadata_size(writer: *mut kvs_state_writer) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_tagged(writer, |w| size_of_state(w.writer.metadata_size()?)) })
}

/// Writes a sequence's metadata to dst, as a state with KVS_STATE_SEQ_FLAGS_ON_DEVICE; returns the bytes written. The
/// tensors are in *state_out, which the caller frees. The seq_id field of the header holds more than the sequence:
/// it tells states apart. flags: those that the sections were written with. 0: failed, nothing is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_get_on_device(
    writer: *mut kvs_state_writer,
    dst: *mut u8,
    size: usize,
    flags: kvs_state_seq_flags,
    state_out: *mut *mut kvs_device_state,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let flags = flags_of(flags)?;
        let dst = host_bytes_mut("dst", dst, size)?;
        let out = out("state_out", state_out)?;
        let (len, state) =
            with_tagged(writer, |w| w.writer.get_on_device(dst, flags | StateFlags::ON_DEVICE))?;
        *out = into_tagged(kvs_device_state { state });
        Ok(len)
    })
}

/// Frees what kvs_state_writer_get_on_device gave; NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_device_state_free(state: *mut kvs_device_state) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(state) });
}

/// Writes the state and a token list to a file, as kvs_state_seq_save_file does, or kvs_state_save_file for a whole
/// context; returns the size of the file. sync: wait for the disk before the file is renamed into place. 0: failed, a
/// file that was there is untouched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_writer_save_file(
    writer: *mut kvs_state_writer,
    filepath: *const c_char,
    tokens: *const kvs_token,
    n_token_count: usize,
    sync: bool,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let path = path("filepath", filepath)?;
        let tokens = array("tokens", tokens, n_token_count)?;
        with_tagged(writer, |w| size_of_state(w.writer.save_file(path, tokens, sync)?))
    })
}

/// Begins to read the state of a sequence, which will replace seq_id, or with -1 that of a whole context, which
/// begins with the name of its architecture, to be read and compared by the caller. access: as for
/// kvs_state_writer_new.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_new(
    seq_id: kvs_seq_id,
    src: *const u8,
    size: usize,
    access: *const kvs_tensor_access,
    reader_out: *mut *mut kvs_state_reader,
) -> kvs_status {
    // SAFETY: the contract of all calls; the header demands that src stays until the reader is freed.
    status_of(|| unsafe {
        let out = out("reader_out", reader_out)?;
        check_seq_id(seq_id)?;
        let src: &'static [u8] = host_bytes("src", src, size)?;
        let reader = if seq_id == -1 { StateReader::of_whole(src) } else { StateReader::of_seq(src)? };
        let access = access_of(access)?;
        *out = into_tagged(kvs_state_reader { reader, file: None, seq_id, access });
        Ok(())
    })
}

/// Begins to read the state in a file of at most n_token_capacity tokens (sequence files 2 to 4, with seq_id -1
/// whole-context files 9 to 11). Its tensors are read in kvs_state_reader_finish: a file that is truncated before is an
/// error there (a save of kvstate never truncates).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_open_file(
    seq_id: kvs_seq_id,
    filepath: *const c_char,
    n_token_capacity: usize,
    access: *const kvs_tensor_access,
    reader_out: *mut *mut kvs_state_reader,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let path = path("filepath", filepath)?;
        let out = out("reader_out", reader_out)?;
        check_seq_id(seq_id)?;
        let access = access_of(access)?;
        let kind = if seq_id == -1 { FileKind::Session } else { FileKind::Sequence };
        let file = Rc::new(StateFile::open(path, kind, n_token_capacity)?);
        // SAFETY: `file` keeps it, where it is, until after `reader` is dropped.
        let borrowed: &'static StateFile = &*Rc::as_ptr(&file);
        let reader = StateReader::of_file(borrowed);
        let file = Some(file);
        *out = into_tagged(kvs_state_reader { reader, file, seq_id, access });
        Ok(())
    })
}

/// Begins to read a sequence's ON_DEVICE state, whose metadata is src. flags as they were, with
/// KVS_STATE_SEQ_FLAGS_ON_DEVICE or without. state: what kvs_state_writer_get_on_device gave for it, which must
/// outlive the reader; refused if it is another blob's.
///
/// state NULL: the caller keeps the tensors itself. The state can be planned then, which drops no cell, and
/// kvs_state_reader_tensor_bytes says how many bytes its tensors have; it cannot be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_new_on_device(
    seq_id: kvs_seq_id,
    src: *const u8,
    size: usize,
    flags: kvs_state_seq_flags,
    state: *mut kvs_device_state,
    access: *const kvs_tensor_access,
    reader_out: *mut *mut kvs_state_reader,
) -> kvs_status {
    // SAFETY: the contract of all calls; the header demands that src and state stay until the reader is freed.
    status_of(|| unsafe {
        let out = out("reader_out", reader_out)?;
        let n_seq_max = crate::types::MAX_SEQ;
        if crate::types::Seq::new(seq_id, n_seq_max).is_none() {
            return Err(Error::SeqId { seq_id, n_seq_max });
        }
        let flags = flags_of(flags)?;
        let src: &'static [u8] = host_bytes("src", src, size)?;
        let reader = if state.is_null() {
            StateReader::of_metadata(src)?
        } else {
            let kept: &'static DeviceState = &*with_tagged(state, |s| Ok(&raw const s.state))?;
            StateReader::of_device(src, flags | StateFlags::ON_DEVICE, kept)?
        };
        let (file, access) = (None, access_of(access)?);
        *out = into_tagged(kvs_state_reader { reader, file, seq_id, access });
        Ok(())
    })
}

/// Says how the reader moves bytes: n_threads in kvs_state_reader_finish. progress is not called: by then the cells are
/// the state's, and their data has to follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_set_transfer(
    reader: *mut kvs_state_reader,
    params: *const kvs_transfer_params,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let (threads, _) = transfer(&params::read(params)?)?;
        with_tagged(reader, |r| {
            r.reader.set_threads(threads);
            Ok(())
        })
    })
}

/// Bytes of the tensors planned so far, of a reader of kvs_state_reader_new_on_device; otherwise 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_tensor_bytes(reader: *mut kvs_state_reader) -> u64 {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_tagged(reader, |r| Ok(r.reader.tensor_bytes())) })
}

/// Frees a reader; what was read and not finished is dropped. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_free(reader: *mut kvs_state_reader) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(reader) });
}

/// The tokens of the file, none for a state in memory: valid until the reader is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_tokens(
    reader: *mut kvs_state_reader,
    tokens_out: *mut *const kvs_token,
    n_token_count_out: *mut usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let (tokens_out, count_out) =
            (out("tokens_out", tokens_out)?, out("n_token_count_out", n_token_count_out)?);
        with_tagged(reader, |r| {
            let tokens = r.file.as_deref().map_or(&[][..], StateFile::tokens);
            (*tokens_out, *count_out) = (tokens.as_ptr(), tokens.len());
            Ok(())
        })
    })
}

/// Bytes consumed, from the start of the state in memory or of the file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_offset(reader: *mut kvs_state_reader) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_tagged(reader, |r| Ok(size(r.reader.offset()))) })
}

/// Bytes that are left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_left(reader: *mut kvs_state_reader) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_tagged(reader, |r| Ok(size(r.reader.left()))) })
}

/// Goes back to the first section, to read what was planned. Nothing can be planned after it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_rewind(reader: *mut kvs_state_reader) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(reader, |r| {
            r.reader.rewind();
            Ok(())
        })
    })
}

/// Forgets what was planned, read or failed and goes back to the first section. legacy_partial: full-attention
/// sections are expected in a partial state, to be checked and dropped. Plan a partial state again like this if bytes are left
/// after it was planned: older llama.cpp wrote them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_restart(
    reader: *mut kvs_state_reader,
    legacy_partial: bool,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(reader, |r| {
            r.reader.restart(legacy_partial);
            Ok(())
        })
    })
}

/// Names the stream of a device that the reader's copies run behind: kvs_stream_set for a reader.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_set_stream(
    reader: *mut kvs_state_reader,
    device: i32,
    stream: *mut c_void,
) -> kvs_status {
    // SAFETY: the contract of all calls; the header demands a live stream of the device.
    status_of(|| unsafe {
        let stream = CallerStream::new(check_device(device)?, stream)?;
        with_tagged(reader, |r| {
            r.reader.set_stream(stream);
            Ok(())
        })
    })
}

/// Frees the staging buffers on devices and of pinned memory that writers and readers share and that are not in use. They are
/// allocated when one of those first moves bytes of a device, and stay for the next. What contexts have is not touched.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_shared_staging_free() {
    value_or((), || {
        Transfer::shared().staging.free();
        Ok(())
    });
}

/// Metadata of a section of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_read(
    reader: *mut kvs_state_reader,
    dst: *mut c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let dst = array_mut::<u8>("dst", dst.cast(), size)?;
        with_tagged(reader, |r| r.reader.read(dst))
    })
}

/// Passes over n bytes of a tensor of the caller's, while the state is planned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_skip_tensor(reader: *mut kvs_state_reader, n: u64) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { with_tagged(reader, |r| r.reader.skip_tensor(n)) })
}

/// The next n bytes go to a tensor of the caller's from offset on, with the batch of kvs_state_reader_finish. data:
/// as for kvs_state_writer_write_tensor. Refused before kvs_state_reader_rewind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_read_tensor(
    reader: *mut kvs_state_reader,
    tensor: *mut c_void,
    data: *mut c_void,
    offset: u64,
    n: u64,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(reader, |r| {
            if n == 0 {
                return Ok(());
            }
            let plane = tensor_bytes(tensor, data, offset, n, r.access.as_ref())?;
            r.reader.read_tensor(plane)
        })
    })
}

/// Reads, checks and places the next attention section; nothing changes, and if it fails, nothing is consumed.
/// flags: those that the state was written with, which it does not tell: with others it passes over a section, or
/// looks for one that is not there. sinfos_out, sinfos_in: as for kvs_kv_cache_state_read_sinfo.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_plan_kv_cache(
    reader: *mut kvs_state_reader,
    view: *const kvs_kv_view,
    flags: kvs_state_seq_flags,
    sinfos_out: *mut kvs_slot_info,
    sinfos_in: *const kvs_slot_info,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let flags = flags_of(flags)?;
        let c_view = params::read(view)?;
        let view = view_of(view)?;
        let mut out = SlotsOut::new(&c_view, sinfos_out)?;
        let given = slots_in(&c_view, sinfos_in)?;
        with_tagged(reader, |r| {
            let slots = r.reader.plan_kv_cache(&view, r.seq_id, flags, given.as_ref())?;
            out.give(&slots)
        })
    })
}

/// Does what was planned for the next attention section: its cells are set through apply, its tensors wait for
/// kvs_state_reader_finish. view: of the cache that it was planned for, with the same planes; user may be another.
/// sinfos_out: gets the cells that the plan found.
///
/// Refused, with nothing changed: another view (KVS_STATUS_INVALID_ARGUMENT), cells that another sequence holds since
/// the plan (KVS_STATUS_STALE). If clear or apply fails, the cells are what they have left, the data is as it was, and
/// the reader serves no further than kvs_state_reader_restart: clear the destination in every section.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_read_kv_cache(
    reader: *mut kvs_state_reader,
    view: *const kvs_kv_view,
    sinfos_out: *mut kvs_slot_info,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let c_view = params::read(view)?;
        let view = view_of(view)?;
        let mut out = SlotsOut::new(&c_view, sinfos_out)?;
        with_tagged(reader, |r| {
            let slots = r.reader.read_kv_cache(view)?;
            out.give(&slots)
        })
    })
}

/// Copies the tensors of everything that was read, in one batch. Fails if a section that was planned has not been
/// read, if one has failed, or if nothing of the state was looked at. If it fails, cells may be set whose data is not
/// there: clear the destination in every section.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_state_reader_finish(reader: *mut kvs_state_reader) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { with_tagged(reader, |r| r.reader.finish()) })
}

/// -1, or a sequence that some context may have; which ones a view has, it checks itself.
pub(super) fn check_seq_id(seq_id: kvs_seq_id) -> Result<()> {
    let n_seq_max = crate::types::MAX_SEQ;
    if seq_id == -1 || crate::types::Seq::new(seq_id, n_seq_max).is_some() {
        return Ok(());
    }
    Err(Error::SeqId { seq_id, n_seq_max })
}

/// As a `size_t`, which has 64 bits wherever the crate builds.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
