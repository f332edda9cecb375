//! A file as memory, for programs that look into it.
#![allow(unsafe_code, reason = "a file that is mapped can change under its reader")]

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use crate::error::{Error, Result};

/// A file that is mapped into memory, to be read.
///
/// kvstate replaces files by renaming, so one that is mapped stays as it is. Another program may write into it: then its
/// bytes change under the reader, who must take each of them as it is when it is read. One that truncates the file ends the
/// process with SIGBUS where it reads what is gone. So servers read files, and only tools map them.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |op| move |source| Error::Io { op, path: path.display().to_string(), source };
        // Before it is opened, which would wait for the other end of a pipe.
        let metadata = std::fs::metadata(path).map_err(failed("open"))?;
        if metadata.is_dir() {
            return Err(failed("read")(std::io::ErrorKind::IsADirectory.into()));
        }
        if !metadata.is_file() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
            return Err(failed("read")(source));
        }
        let file = File::open(path).map_err(failed("open"))?;
        // SAFETY: the map is read-only and lives as long as this value, which gives it out by reference only. Its bytes are
        // untrusted in any case: whoever reads them checks what was read, and no reference to them is of a type that some
        // bytes are not valid for.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed("map"))?;
        Ok(Self(map))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
