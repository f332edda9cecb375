//! Status codes, and the reason of the last failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result, Status};

/// What a call returns that is not one of llama.cpp's: KVS_STATUS_OK or a reason. kvs_last_error() says more.
pub type kvs_status = i32;

/// Done.
pub const KVS_STATUS_OK: kvs_status = 0;
/// An argument or a parameter makes no sense; the message names it.
pub const KVS_STATUS_INVALID_ARGUMENT: kvs_status = 1;
/// A handle is NULL, or of another kind; a freed one is noticed where its memory still shows it.
pub const KVS_STATUS_INVALID_HANDLE: kvs_status = 2;
/// An internal error in an earlier call left the context unusable; kvs_context_free still works.
pub const KVS_STATUS_POISONED: kvs_status = 3;
/// A buffer of the caller is too small; it is untouched.
pub const KVS_STATUS_BUFFER_TOO_SMALL: kvs_status = 4;
/// The bytes end before the state does.
pub const KVS_STATUS_TRUNCATED: kvs_status = 5;
/// The bytes are no state, or hold a value that no state can hold.
pub const KVS_STATUS_CORRUPT: kvs_status = 6;
/// A file of a version that is not read.
pub const KVS_STATUS_UNSUPPORTED_VERSION: kvs_status = 7;
/// The state was made with another geometry than the cache has.
pub const KVS_STATUS_MISMATCH: kvs_status = 8;
/// A file older than version 4 does not say whether K and V are rotated: see legacy_rotation.
pub const KVS_STATUS_ROTATION_UNSTATED: kvs_status = 9;
/// Too few cells that can be used.
pub const KVS_STATUS_NO_SPACE: kvs_status = 10;
/// The ON_DEVICE state behind a blob is gone or was replaced by a later one.
pub const KVS_STATUS_NO_DEVICE_STATE: kvs_status = 11;
/// Positions cannot be shifted in this context.
pub const KVS_STATUS_CANNOT_SHIFT: kvs_status = 12;
/// Shifts are pending and could not be applied.
pub const KVS_STATUS_SHIFT_FAILED: kvs_status = 13;
/// The cache changed between prepare and commit, or between plan and read.
pub const KVS_STATUS_STALE: kvs_status = 14;
/// An operating-system call on a file failed.
pub const KVS_STATUS_IO: kvs_status = 15;
/// Memory for the cache or a state could not be had. (Small allocations are not checked: where not even those
/// can be had, the process ends, as Rust programs do.)
pub const KVS_STATUS_OUT_OF_MEMORY: kvs_status = 16;
/// A bug in kvstate was caught at the boundary.
pub const KVS_STATUS_INTERNAL: kvs_status = 17;
/// A callback of the caller returned something other than 0.
pub const KVS_STATUS_CALLBACK: kvs_status = 18;
/// The progress callback, or kvs_job_cancel, asked for an end.
pub const KVS_STATUS_CANCELLED: kvs_status = 19;
/// There is no CUDA driver that can be used, or this build has no CUDA. Contexts in host memory work.
pub const KVS_STATUS_NO_CUDA: kvs_status = 20;
/// There is no device of that number.
pub const KVS_STATUS_NO_DEVICE: kvs_status = 21;
/// The CUDA driver is older than the kernels need, which is CUDA 12.0 (r525).
pub const KVS_STATUS_DRIVER_TOO_OLD: kvs_status = 22;
/// A call of the device's driver failed; the message has the driver's name for it.
pub const KVS_STATUS_DEVICE: kvs_status = 23;
/// The caller's stream is being captured into a graph: nothing can be ordered behind it, and nothing was changed.
pub const KVS_STATUS_STREAM_CAPTURING: kvs_status = 24;
/// Another process, or another handle of this one, keeps the folder.
pub const KVS_STATUS_LOCKED: kvs_status = 25;
/// The files of a slot would take more bytes than those of the folder may.
pub const KVS_STATUS_OVER_BUDGET: kvs_status = 26;
/// A state that is to be added to a sequence does not begin behind its end.
pub const KVS_STATUS_POSITIONS_MEET: kvs_status = 27;
/// A section cannot go on at the end of the range, or prefix, that is wanted.
pub const KVS_STATUS_CANNOT_CUT: kvs_status = 28;

struct LastError {
    status: kvs_status,
    text: CString,
}

thread_local! {
    static LAST_ERROR: RefCell<LastError> =
        RefCell::new(LastError { status: KVS_STATUS_OK, text: CString::default() });
}

/// The reason of the calling thread's last failure: names the field and both values. Empty if none failed.
/// Valid until the thread's next failing call or kvs_clear_last_error.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.text.as_ptr())
}

/// The status of the calling thread's last failure, for calls that return 0 or false: KVS_STATUS_OK if none
/// failed.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_last_status() -> kvs_status {
    LAST_ERROR.with_borrow(|last| last.status)
}

/// Forgets the calling thread's last failure: for calls that return nothing, so that kvs_last_status() tells
/// afterwards whether they failed.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_clear_last_error() {
    LAST_ERROR.with_borrow_mut(|last| {
        *last = LastError { status: KVS_STATUS_OK, text: CString::default() };
    });
}

/// Records a failure for kvs_last_error and sends one line to the log.
fn record(error: &Error) -> kvs_status {
    let status = error.status() as kvs_status;
    let text = error.to_string();
    log::error!("{text}");
    // Made before the old text is dropped, so that its address is another one, as the header says.
    let text = CString::new(text.replace('\0', "\\0")).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = LastError { status, text });
    status
}

/// Runs a call; no panic leaves it.
pub(super) fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Error::Internal(text.unwrap_or_else(|| "a panic without a message".to_owned())))
    })
}

/// Runs a call that fails with a value of its return type.
pub(super) fn value_or<T>(failure: T, call: impl FnOnce() -> Result<T>) -> T {
    caught(call).unwrap_or_else(|error| {
        record(&error);
        failure
    })
}

/// Runs a call that returns a status.
pub(super) fn status_of(call: impl FnOnce() -> Result<()>) -> kvs_status {
    match caught(call) {
        Ok(()) => Status::Ok as kvs_status,
        Err(error) => record(&error),
    }
}
