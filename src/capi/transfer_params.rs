//! How bytes are moved: threads, and who is told how far it is.

use std::ffi::c_void;
use std::ops::ControlFlow;
use std::ptr;

use super::handle::{kvs_context, with_context_mut};
use super::params::{self, Params};
use super::status::{kvs_status, status_of};
use crate::error::{Error, Result};
use crate::storage::{Progress, ProgressCallback, Threads};

/// Told how far the saving or loading of a file is, or a job, on the thread of the call (a job's: its own): done of total
/// bytes, the file's in a save to one, the state's in a save to memory, the state's or its tensors' in a load; total is never
/// 0. done never decreases, and is total once, at the end; how often
/// it is told differs. Returns 0 to go on; anything else cancels, at the end too, and the call fails with
/// KVS_STATUS_CANCELLED. It must not call the library with the same handle, and must not throw or unwind.
pub type kvs_progress_callback =
    Option<unsafe extern "C" fn(user_data: *mut c_void, done: u64, total: u64) -> i32>;

/// How bytes are moved. Fill with kvs_transfer_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_transfer_params {
    /// sizeof(kvs_transfer_params), set by the init call.
    pub struct_size: usize,
    /// Threads that copy, the caller's included; 0 (by default): the cores, at most 4. A small state takes fewer;
    /// tensors that are reached through callbacks, and a file that is saved, take one.
    pub n_threads: u32,
    /// 0.
    pub reserved: u32,
    /// Called while a file is saved or loaded, or a job runs; NULL: nobody is.
    pub progress: kvs_progress_callback,
    /// For progress.
    pub progress_user_data: *mut c_void,
}

// SAFETY: repr(C), struct_size first, integers, raw pointers and a nullable function pointer only.
unsafe impl Params for kvs_transfer_params {
    const NAME: &'static str = "kvs_transfer_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            n_threads: 0,
            reserved: 0,
            progress: None,
            progress_user_data: ptr::null_mut(),
        }
    }
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_transfer_params_init(
    params: *mut kvs_transfer_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Says how the context moves bytes from now on.
///
/// A save that is cancelled leaves the file that was there. A load that is cancelled leaves the context as it was:
/// where it has to overwrite cells that are in use, progress is called while the file is brought into memory, before the
/// first change, and no more after that. Of kvs_slot_load with KVS_VERIFY_FULL it hears how much of the file is verified, and
/// nothing of the restore after it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_set_transfer(
    ctx: *mut kvs_context,
    params: *const kvs_transfer_params,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let (threads, progress) = transfer(&params::read(params)?)?;
        with_context_mut(ctx, |context| {
            context.set_threads(threads);
            context.set_progress(progress);
            Ok(())
        })
    })
}

/// What a callback gets back.
pub(super) struct UserData(pub *mut c_void);

// SAFETY: the header lets a handle move between threads, and its callback with it.
unsafe impl Send for UserData {}

impl UserData {
    pub fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Threads and progress, for a context, a writer or a reader.
pub(super) fn transfer(params: &kvs_transfer_params) -> Result<(Threads, Option<ProgressCallback>)> {
    if params.reserved != 0 {
        return Err(Error::arg("reserved", format!("{}, it is 0", params.reserved)));
    }
    let threads = Threads::new(params.n_threads as usize);
    let user_data = UserData(params.progress_user_data);
    let progress = params.progress.map(|callback| {
        ProgressCallback::new(move |Progress { done, total }| {
            // SAFETY: whoever set the callback vouches for it.
            match unsafe { callback(user_data.get(), done, total) } {
                0 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            }
        })
    });
    Ok((threads, progress))
}
