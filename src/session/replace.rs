//! Replacing a file so that a crash leaves the old one or the new one.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::temporary;
use crate::error::{Error, Result};

/// What becomes of a symbolic link that has the name of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Links {
    /// The file behind it is replaced.
    Followed,
    /// It is replaced itself: nothing outside the folder is written.
    Replaced,
}

/// A file that is being written beside the one that it will replace. Dropped without commit, it is removed.
#[derive(Debug)]
pub(super) struct Replacement {
    file: NamedTempFile,
    path: PathBuf,
}

impl Replacement {
    /// Starts to write what will stand at `path`, with the permissions of the file that is there. A new one is
    /// its owner's alone: a state is a conversation.
    pub fn create(path: &Path, links: Links) -> Result<Self> {
        let (path, permissions) = resolve(path, links).map_err(|source| io_error("open", path, source))?;
        // Before room is asked for, which they may take.
        temporary::remove_stale(directory(&path));
        let create = || {
            let file = temporary::create_in(directory(&path))?;
            if let Some(permissions) = permissions {
                file.as_file().set_permissions(permissions)?;
            }
            Ok(file)
        };
        let file = create().map_err(|source| io_error("create a temporary file beside", &path, source))?;
        Ok(Self { file, path })
    }

    /// Has the disk set aside `bytes`, which makes writing them faster, and too few of them an error before the
    /// first. What cannot be done here is left to the writes.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::{Errno, retry_on_intr};

        match retry_on_intr(|| fallocate(self.file.as_file(), FallocateFlags::empty(), 0, bytes)) {
            Err(error @ (Errno::NOSPC | Errno::DQUOT)) => {
                Err(io_error("reserve room for", &self.path, error.into()))
            }
            _ => Ok(()),
        }
    }

    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "it does something elsewhere")]
    pub fn reserve(&self, _: u64) -> Result<()> {
        Ok(())
    }

    pub fn writer(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Syncs the data, renames the file of `len` bytes into place, syncs the directory; without `sync` only renames.
    pub fn commit(self, len: u64, sync: bool) -> Result<()> {
        self.sync_data(len, sync)?;
        self.persist(sync)
    }

    /// Syncs the data of the file, which has `len` bytes; without `sync` only looks at it.
    pub fn sync_data(&self, len: u64, sync: bool) -> Result<()> {
        let Self { file, path } = self;
        let found = file.as_file().metadata().map_err(|source| io_error("look at", path, source))?.len();
        if found != len {
            let reason = format!("somebody has changed it: it has {found} bytes, {len} were written");
            return Err(io_error("keep the temporary file of", path, io::Error::other(reason)));
        }
        if sync {
            file.as_file().sync_all().map_err(|source| io_error("sync", path, source))?;
        }
        Ok(())
    }

    /// Renames the file, whose data has been synced, into place, and with `sync` syncs the directory.
    pub fn persist(self, sync: bool) -> Result<()> {
        let Self { file, path } = self;
        file.persist(&path).map_err(|error| io_error("rename into", &path, error.error))?;
        if !sync {
            return Ok(());
        }
        // Directories cannot be opened for syncing everywhere; the rename stands without it.
        if let Ok(directory) = File::open(directory(&path)) {
            match directory.sync_all() {
                Err(source) if source.kind() != io::ErrorKind::InvalidInput => {
                    return Err(io_error("sync the directory of", &path, source));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The path that the file will have, and the permissions of the one that is there. What is neither a regular file nor a link
/// (a directory, a device, a pipe) is never replaced, and a name that no file can have is found out before anything is written.
fn resolve(path: &Path, links: Links) -> io::Result<(PathBuf, Option<Permissions>)> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() && links == Links::Replaced => Ok((path.to_owned(), None)),
        Ok(metadata) if metadata.is_symlink() => match fs::metadata(path) {
            Ok(metadata) => regular(fs::canonicalize(path)?, &metadata),
            // A link to a file that is not there yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok((directory(path).join(fs::read_link(path)?), None))
            }
            Err(error) => Err(error),
        },
        Ok(metadata) => regular(fs::canonicalize(path)?, &metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((path.to_owned(), None)),
        Err(error) => Err(error),
    }
}

fn regular(path: PathBuf, metadata: &Metadata) -> io::Result<(PathBuf, Option<Permissions>)> {
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((path, Some(metadata.permissions())))
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn io_error(op: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { op, path: path.display().to_string(), source }
}
