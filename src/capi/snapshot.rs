//! Snapshots, and saves in the background.

use std::ffi::c_char;

use super::handle::{
    Tagged, array, free_tagged, host_bytes_mut, into_tagged, kvs_context, live, out, path, with_context_mut,
};
use super::params;
use super::state::{flags_of, size_of_state};
use super::status::{kvs_status, status_of, value_or};
use super::transfer_params::{kvs_transfer_params, transfer};
use super::{kvs_seq_id, kvs_state_seq_flags, kvs_token};
use crate::context::Snapshot;
use crate::error::{Error, Result};
use crate::session::Job;
use crate::storage::{ProgressCallback, Threads};

/// The state of a sequence, or of a whole context, as it was when it was taken: its tensors are copied where the cache is, in
/// the memory of a device or of the host. There may be as many as memory has room for. A snapshot outlives its context.
pub struct kvs_snapshot {
    snapshot: Snapshot,
    /// Whether its files wait for the disk, as those of its context.
    sync: bool,
}

impl Tagged for kvs_snapshot {
    const LIVE: u64 = 0x6b76_735f_736e_7031;
    const NAME: &'static str = "snapshot";
}

/// A save in the background. Calls marked Const may be made from any thread, side by side.
pub struct kvs_job {
    job: AnyJob,
}

impl Tagged for kvs_job {
    const LIVE: u64 = 0x6b76_735f_6a6f_6231;
    const NAME: &'static str = "job";
}

enum AnyJob {
    Data(Job<CallerBuffer>, usize),
    File(Job<u64>),
}

/// Memory that the caller leaves to a job until it has ended.
struct CallerBuffer {
    ptr: *mut u8,
    size: usize,
}

// SAFETY: the header demands that nobody else uses it until the job has ended.
unsafe impl Send for CallerBuffer {}

impl AsMut<[u8]> for CallerBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: it was checked as an array; as above.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.size) }
    }
}

/// Takes a snapshot of a sequence, with flags KVS_STATE_SEQ_FLAGS_NONE or _PARTIAL_ONLY, or with seq_id -1 and
/// KVS_STATE_SEQ_FLAGS_NONE of the whole context (KVS_STATE_SEQ_FLAGS_ON_DEVICE makes no difference for a sequence). Pending
/// shifts are applied first. Nothing leaves a device, and with a stream named by kvs_stream_set nothing is waited for: what is
/// queued on it afterwards runs behind the copy. Free it with kvs_snapshot_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_take(
    ctx: *mut kvs_context,
    seq_id: kvs_seq_id,
    flags: kvs_state_seq_flags,
    snapshot_out: *mut *mut kvs_snapshot,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let snapshot_out = out("snapshot_out", snapshot_out)?;
        let flags = flags_of(flags)?;
        let taken = with_context_mut(ctx, |context| {
            let snapshot = match seq_id {
                -1 if flags.is_empty() => context.snapshot()?,
                -1 => {
                    return Err(Error::arg(
                        "flags",
                        format!("{:#x}, a whole context has none", flags.bits()),
                    ));
                }
                _ => context.seq_snapshot(seq_id, flags)?,
            };
            Ok(kvs_snapshot { snapshot, sync: context.syncs_files() })
        })?;
        *snapshot_out = into_tagged(taken);
        Ok(())
    })
}

/// Frees a snapshot and its memory; NULL is fine. Jobs that it was given to go on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_free(snapshot: *mut kvs_snapshot) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(snapshot) });
}

/// Bytes that kvs_snapshot_get_data writes. 0: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_size(snapshot: *const kvs_snapshot) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { size_of_state(live(snapshot)?.snapshot.size()) })
}

/// Bytes of it in the memory of devices. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_device_size(snapshot: *const kvs_snapshot) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { size_of_state(live(snapshot)?.snapshot.device_bytes()) })
}

/// Replaces sequence dest_seq_id by the state in a snapshot of a sequence, of this context or of another one of the same model;
/// or, with -1, all sequences by those in a snapshot of a whole context. A state like any other: it takes cells that are free or
/// the destination's. If it fails nothing has changed, but for a device that fails in the middle, as kvs_state_seq_set_data_ext
/// says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_restore(
    ctx: *mut kvs_context,
    snapshot: *const kvs_snapshot,
    dest_seq_id: kvs_seq_id,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let snapshot = &live(snapshot)?.snapshot;
        with_context_mut(ctx, |context| match dest_seq_id {
            -1 => context.restore(snapshot),
            _ => context.seq_restore(snapshot, dest_seq_id),
        })
    })
}

/// Writes the state to dst, which has size bytes: those that kvs_state_seq_get_data_ext (or kvs_state_get_data) would have
/// written when it was taken; returns their number. 0: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_get_data(
    snapshot: *const kvs_snapshot,
    dst: *mut u8,
    size: usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { live(snapshot)?.snapshot.get_data(host_bytes_mut("dst", dst, size)?, None) })
}

/// Writes the state and a token list to a file, as kvs_state_seq_save_file (or kvs_state_save_file) would have when it was
/// taken; returns the size of the file. 0: failed, a file that was there is untouched. A partial state has no file. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_save_file(
    snapshot: *const kvs_snapshot,
    filepath: *const c_char,
    tokens: *const kvs_token,
    n_token_count: usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let kvs_snapshot { snapshot, sync } = live(snapshot)?;
        let tokens = array("tokens", tokens, n_token_count)?;
        size_of_state(snapshot.save_file(path("filepath", filepath)?, tokens, *sync, None)?)
    })
}

/// Begins kvs_snapshot_get_data on a thread of its own. dst is the job's until it has ended: kvs_job_poll says 1, or
/// kvs_job_wait or kvs_job_free has returned. params: NULL, or threads and a progress callback, which is called on the job's
/// thread. Free the job with kvs_job_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_get_data_start(
    snapshot: *const kvs_snapshot,
    dst: *mut u8,
    size: usize,
    params: *const kvs_transfer_params,
    job_out: *mut *mut kvs_job,
) -> kvs_status {
    // SAFETY: the contract of all calls; dst is left to the job.
    status_of(|| unsafe {
        let job_out = out("job_out", job_out)?;
        let (snapshot, progress) = background(snapshot, params)?;
        host_bytes_mut("dst", dst, size)?;
        let (buffer, state) = (CallerBuffer { ptr: dst, size }, size_of_state(snapshot.size())?);
        let job = snapshot.get_data_in_background(buffer, progress)?;
        *job_out = into_tagged(kvs_job { job: AnyJob::Data(job, state) });
        Ok(())
    })
}

/// Begins kvs_snapshot_save_file on a thread of its own; the path and the tokens are copied. params and the job: as for
/// kvs_snapshot_get_data_start.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_snapshot_save_file_start(
    snapshot: *const kvs_snapshot,
    filepath: *const c_char,
    tokens: *const kvs_token,
    n_token_count: usize,
    params: *const kvs_transfer_params,
    job_out: *mut *mut kvs_job,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let job_out = out("job_out", job_out)?;
        let tokens = array("tokens", tokens, n_token_count)?;
        let path = path("filepath", filepath)?;
        let sync = live(snapshot)?.sync;
        let (snapshot, progress) = background(snapshot, params)?;
        let job = snapshot.save_file_in_background(path, tokens, sync, progress)?;
        *job_out = into_tagged(kvs_job::of_file(job));
        Ok(())
    })
}

impl kvs_job {
    pub(super) fn of_file(job: Job<u64>) -> Self {
        Self { job: AnyJob::File(job) }
    }
}

/// What a job works on: a snapshot that copies as the caller says, and its progress callback.
unsafe fn background(
    snapshot: *const kvs_snapshot,
    params: *const kvs_transfer_params,
) -> Result<(Snapshot, Option<ProgressCallback>)> {
    // SAFETY: passed on.
    let snapshot = unsafe { live(snapshot) }?.snapshot.clone();
    // SAFETY: passed on.
    Ok(match unsafe { transfer_of_job(params) }? {
        Some((threads, progress)) => (snapshot.with_threads(threads), progress),
        None => (snapshot, None),
    })
}

/// How a job moves its bytes, if the caller says so.
pub(super) unsafe fn transfer_of_job(
    params: *const kvs_transfer_params,
) -> Result<Option<(Threads, Option<ProgressCallback>)>> {
    if params.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on.
    transfer(&unsafe { params::read(params) }?).map(Some)
}

/// Whether the job has ended, well or not: 1 or 0; -1: no live handle. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_job_poll(job: *const kvs_job) -> i32 {
    // SAFETY: the contract of all calls.
    value_or(-1, || unsafe {
        Ok(i32::from(match &live(job)?.job {
            AnyJob::Data(job, _) => job.is_finished(),
            AnyJob::File(job) => job.is_finished(),
        }))
    })
}

/// Bytes done of total. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_job_progress(
    job: *const kvs_job,
    done_out: *mut u64,
    total_out: *mut u64,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let progress = match &live(job)?.job {
            AnyJob::Data(job, _) => job.progress(),
            AnyJob::File(job) => job.progress(),
        };
        let (done_out, total_out) = (out("done_out", done_out)?, out("total_out", total_out)?);
        (*done_out, *total_out) = (progress.done, progress.total);
        Ok(())
    })
}

/// Asks the job to end: kvs_job_wait fails with KVS_STATUS_CANCELLED then, unless it was done before. What a cancelled
/// job has written to dst is no state; a file that was there is untouched. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_job_cancel(job: *const kvs_job) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        match &live(job)?.job {
            AnyJob::Data(job, _) => job.cancel(),
            AnyJob::File(job) => job.cancel(),
        }
        Ok(())
    })
}

/// Waits for the job's end; *size_out (NULL: not wanted) is then what the blocking call would have returned. Fails with the
/// reason of the save. A job is waited for once, by one thread: a second wait is KVS_STATUS_INVALID_ARGUMENT. Others may poll and
/// cancel it meanwhile. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_job_wait(job: *const kvs_job, size_out: *mut usize) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let size = match &live(job)?.job {
            AnyJob::Data(job, size) => job.wait().map(|_| *size)?,
            AnyJob::File(job) => size_of_state(job.wait()?)?,
        };
        if !size_out.is_null() {
            *size_out = size;
        }
        Ok(())
    })
}

/// Frees a job; one that has not ended is cancelled and waited for. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_job_free(job: *mut kvs_job) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(job) });
}
