//! Reads at an offset, which leave the file's own position alone: threads share the file.

use std::fs::File;
use std::io;

use crate::error::Error;

/// Fills `out` with the bytes of `file` from `offset` on.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Fills `out` with the bytes of `file` from `offset` on.
#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => (out, offset) = (&mut out[n..], offset + n as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The path is added by the session, which knows it.
pub(crate) fn read_error(source: io::Error) -> Error {
    let source = match source.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(source.kind(), "the file has become shorter"),
        _ => source,
    };
    Error::Io { op: "read", path: String::new(), source }
}
