//! A file's bytes without reading them: a read-only mapping.
#![allow(unsafe_code, reason = "mapping a file is unsafe; this is the only place that does")]

use std::fs::{self, File};
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A file, mapped. A file of no bytes has no mapping.
#[derive(Debug)]
pub(super) struct FileView {
    map: Option<Mmap>,
}

impl FileView {
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |op| move |source| Error::Io { op, path: path.display().to_string(), source };
        // Before it is opened, which would wait for the other end of a pipe.
        let metadata = fs::metadata(path).map_err(failed("open"))?;
        if metadata.is_dir() {
            return Err(failed("read")(std::io::ErrorKind::IsADirectory.into()));
        }
        if !metadata.is_file() {
            let reason = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
            return Err(failed("read")(reason));
        }
        let file = File::open(path).map_err(failed("open"))?;
        if file.metadata().map_err(failed("read"))?.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is private to this call of the library and only read. The bytes are untrusted and
        // every value is checked before use, so a writer that changes them meanwhile can spoil the state but
        // no invariant. State files are replaced by renaming, never changed in place, by kvstate itself;
        // truncating one while it is loaded is outside the contract of the load calls.
        let map = unsafe { Mmap::map(&file) }.map_err(failed("map"))?;
        Ok(Self { map: Some(map) })
    }

    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
