//! Temporary files, beside those that they will replace.
//!
//! Whoever writes one holds its lock (of `flock`, where there is that), which the system takes back from a process that ends, in
//! whatever way. So one whose lock can be had has no writer any more, whatever its name says of processes that may be of another
//! container, or have been replaced by others of the same number.

use std::fs::{self, File, TryLockError};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::Path;

use tempfile::{NamedTempFile, TempPath};

const PREFIX: &str = ".kvstate-";
const SUFFIX: &str = ".tmp";

/// Whether a file of this name may be removed at any time.
pub(super) fn is_temporary(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// Creates a file in `folder` under a name that no other process or thread has. Not `tempfile::Builder`: it asks for the current
/// thread's id, whose block valgrind then reports as possibly lost in every C program that saves a file.
pub(super) fn create_in(folder: &Path) -> io::Result<NamedTempFile> {
    // Absolute, so that it is found again if the process changes its directory meanwhile.
    let folder = std::path::absolute(folder)?;
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    loop {
        // The process id, because a fork inherits the random state; and a name can be left over from a process
        // that was killed.
        let random = RandomState::new().build_hasher().finish();
        let path = folder.join(format!("{PREFIX}{}-{random:016x}{SUFFIX}", std::process::id()));
        let file = match options.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            file => file?,
        };
        let is_ours = match file.try_lock() {
            // Somebody may have taken it for stale before it was locked.
            Ok(()) => path.exists(),
            Err(TryLockError::WouldBlock) => false,
            // Where nothing can be locked, nobody takes anything for stale.
            Err(TryLockError::Error(_)) => true,
        };
        if is_ours {
            return Ok(NamedTempFile::from_parts(file, TempPath::try_from_path(path)?));
        }
    }
}

/// Removes the files in `folder` that a process which was killed has left. Failure is no reason not to save.
pub(super) fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_candidate = entry.file_name().to_str().is_some_and(is_temporary)
            && entry.file_type().is_ok_and(|file_type| file_type.is_file());
        if !is_candidate {
            continue;
        }
        let path = entry.path();
        // Some network file systems lock only what can be written; a file may have the mode of one that cannot be.
        let opened = File::options().read(true).write(true).open(&path).or_else(|_| File::open(&path));
        let Ok(file) = opened else { continue };
        if file.try_lock().is_ok() && fs::remove_file(&path).is_ok() {
            log::info!("{} was left by a save that did not end: removed", path.display());
        }
    }
}
