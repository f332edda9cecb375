//! The log callback.

use std::ffi::{CString, c_char, c_void};
use std::sync::{OnceLock, RwLock};

use super::status::{kvs_status, status_of};
use crate::error::Error;

/// A call failed, or something was damaged.
pub const KVS_LOG_ERROR: i32 = 1;
/// Something was odd, and was dealt with.
pub const KVS_LOG_WARN: i32 = 2;
/// Worth knowing.
pub const KVS_LOG_INFO: i32 = 3;

/// Takes one line without a line end. level: KVS_LOG_*. May be called from any thread that calls the library;
/// must not call the library.
pub type kvs_log_callback =
    Option<unsafe extern "C" fn(level: i32, text: *const c_char, user_data: *mut c_void)>;

struct Target {
    callback: unsafe extern "C" fn(i32, *const c_char, *mut c_void),
    user_data: *mut c_void,
}

// SAFETY: the header demands a callback and user_data that any thread may use.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

static TARGET: RwLock<Option<Target>> = RwLock::new(None);

/// Whether the process's logger is `Forward`; set on the first call.
static IS_OURS: OnceLock<bool> = OnceLock::new();

/// Forwards the crate's log records; those of other crates are not ours to show.
struct Forward;

impl log::Log for Forward {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target().starts_with("kvstate")
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            log::Level::Error => KVS_LOG_ERROR,
            log::Level::Warn => KVS_LOG_WARN,
            _ => KVS_LOG_INFO,
        };
        let text = CString::new(record.args().to_string().replace('\0', "\\0")).unwrap_or_default();
        // Held during the call: once kvs_log_set returns, nobody is inside the callback that it replaced.
        let target = TARGET.read();
        if let Some(Target { callback, user_data }) = target.as_deref().ok().and_then(Option::as_ref) {
            // SAFETY: kvs_log_set's caller vouches for both until they are replaced.
            unsafe { callback(level, text.as_ptr(), *user_data) };
        }
    }

    fn flush(&self) {}
}

/// Sends the library's log lines to callback; NULL: nowhere, as at the start. One per process. When it returns,
/// no thread is inside the earlier callback.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_log_set(callback: kvs_log_callback, user_data: *mut c_void) -> kvs_status {
    status_of(|| {
        let mut target = TARGET.write().map_err(|_| Error::Internal("the log is poisoned".into()))?;
        *target = callback.map(|callback| Target { callback, user_data });
        // A Rust program that has a logger of its own keeps it, and its level.
        let is_ours = *IS_OURS.get_or_init(|| log::set_logger(&Forward).is_ok());
        if !is_ours {
            return Err(Error::arg("callback", "the program has a logger already, which gets the lines"));
        }
        log::set_max_level(match *target {
            Some(_) => log::LevelFilter::Info,
            None => log::LevelFilter::Off,
        });
        Ok(())
    })
}
