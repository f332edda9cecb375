//! A file that holds a state, opened to be read.

use std::fs::{self, File};
use std::io;
#[cfg(target_os = "linux")]
use std::io::IoSliceMut;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::with_path;
use crate::error::{Error, Result};
use crate::format::{Cursor, FileHeader, FileKind, StateVersion, crc32c_append, crc32c_combine, tokens_of};
use crate::state::Source;
use crate::storage::{ProgressCallback, Report, Threads, for_each_piece, read_error, read_exact_at};
use crate::types::Token;

/// A sequence file, or the file of a whole context. Its tensors are read when they are needed.
#[derive(Debug)]
pub struct StateFile {
    file: File,
    path: PathBuf,
    size: u64,
    version: StateVersion,
    tokens: Vec<Token>,
}

impl StateFile {
    /// Opens a file and reads its tokens.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::UnknownVersion`], [`Error::Truncated`], [`Error::TokenCapacity`] for more than
    /// `n_token_capacity` tokens.
    pub fn open(path: impl AsRef<Path>, kind: FileKind, n_token_capacity: usize) -> Result<Self> {
        let path = path.as_ref();
        let (file, size, header) = open(path, kind)?;
        let count = u64::from(header.n_tokens);
        if header.n_tokens as usize > n_token_capacity {
            return Err(Error::TokenCapacity { kind: kind.name(), count, capacity: n_token_capacity as u64 });
        }
        let start = FileHeader::LEN as u64;
        let tokens = Source::file(&file, start, size, header.version, &[])
            .bytes("tokens", count * 4)
            .map_err(|error| with_path(error, path))?;
        let tokens = tokens_of(&tokens).collect();
        Ok(Self { file, path: path.to_owned(), size, version: header.version, tokens })
    }

    /// The token field.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    pub(super) fn into_tokens(self) -> Vec<Token> {
        self.tokens
    }

    /// The state, behind header and tokens.
    pub(super) fn source(&self) -> Source<'_> {
        Source::file(&self.file, self.state_start(), self.size, self.version, &self.tokens)
    }

    /// Brings bytes of a state into the page cache: so that a disk that fails, or a file that has been
    /// truncated, is noticed while nothing depends on it. What is there already is not read.
    pub(super) fn warm(
        &self,
        ranges: &[Range<u64>],
        mut progress: Option<&mut ProgressCallback>,
    ) -> Result<()> {
        const STEP: u64 = 1 << 20;
        let total = ranges.iter().map(|range| range.end - range.start).sum();
        let (mut buffer, mut done) = (Vec::new(), 0);
        for &Range { start, end } in ranges {
            let mut at = start;
            while at < end {
                let next = end.min(at + STEP);
                if !is_cached(&self.file, at..next) {
                    buffer.resize(usize::try_from(next - at).unwrap_or(0), 0);
                    read_exact_at(&self.file, &mut buffer, at).map_err(read_error)?;
                }
                done += next - at;
                at = next;
                if let Some(progress) = progress.as_deref_mut() {
                    progress.report(done, total)?;
                }
            }
        }
        Ok(())
    }

    /// Offset behind header and tokens.
    pub(super) fn state_start(&self) -> u64 {
        FileHeader::LEN as u64 + 4 * self.tokens.len() as u64
    }

    /// Bytes of the file.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// These bytes of the file, which must lie in it, as they are laid out in a state of the current version.
    pub(super) fn part(&self, range: Range<u64>) -> Source<'_> {
        Source::file(&self.file, range.start, range.end, StateVersion::CURRENT, &[])
    }

    /// Checksum of these bytes, which the report is told of.
    pub(super) fn crc32c(&self, range: Range<u64>, threads: Threads, report: &mut Report<'_>) -> Result<u32> {
        const PIECE: u64 = 4 << 20;
        /// Few enough bytes to be in the cache when their checksum is computed.
        const STEP: u64 = 256 << 10;
        let len = range.end - range.start;
        let starts = (0..len.div_ceil(PIECE)).map(|i| range.start + i * PIECE);
        let sums: Vec<AtomicU32> = starts.clone().map(|_| AtomicU32::new(0)).collect();
        let piece = |start| start..range.end.min(start + PIECE);
        let pieces = starts.clone().map(piece).zip(&sums);
        for_each_piece(threads.worth(len), pieces, Some(report), |(piece, sum), buffer: &mut Vec<u8>| {
            let (mut crc, mut at) = (0, piece.start);
            while at < piece.end {
                let next = piece.end.min(at + STEP);
                buffer.resize(usize::try_from(next - at).unwrap_or(0), 0);
                read_exact_at(&self.file, buffer, at).map_err(read_error)?;
                crc = crc32c_append(crc, buffer);
                at = next;
            }
            sum.store(crc, Ordering::Relaxed);
            Ok(piece.end - piece.start)
        })?;
        let sums = sums.into_iter().map(AtomicU32::into_inner).zip(starts.map(piece));
        Ok(sums.fold(0, |crc, (sum, piece)| crc32c_combine(crc, sum, piece.end - piece.start)))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error of reading it, with its name.
    pub(super) fn failed(&self, error: Error) -> Error {
        with_path(error, &self.path)
    }
}

/// Whether these bytes of a file are in the page cache: one byte is asked for in each of the pieces in which the
/// system reads ahead, the last, which a truncated file does not have.
#[cfg(target_os = "linux")]
fn is_cached(file: &File, range: Range<u64>) -> bool {
    use rustix::io::{ReadWriteFlags, preadv2};

    const READ_AHEAD: u64 = 128 << 10;
    let mut byte = [0];
    let mut at = range.start;
    while at < range.end {
        at = range.end.min(at + READ_AHEAD);
        let mut bytes = [IoSliceMut::new(&mut byte)];
        if preadv2(file, &mut bytes, at - 1, ReadWriteFlags::NOWAIT) != Ok(1) {
            return false;
        }
    }
    true
}

/// It cannot be known.
#[cfg(not(target_os = "linux"))]
fn is_cached(_: &File, _: Range<u64>) -> bool {
    false
}

/// The number of tokens in the sequence file at `path`, checked against the size of the file.
///
/// # Errors
/// [`Error::UnknownVersion`], [`Error::Truncated`], [`Error::Io`].
pub fn seq_file_token_count(path: impl AsRef<Path>) -> Result<u32> {
    let (file, size, header) = open(path.as_ref(), FileKind::Sequence)?;
    let mut source = Source::file(&file, FileHeader::LEN as u64, size, header.version, &[]);
    source.tensor("tokens", u64::from(header.n_tokens) * 4)?;
    Ok(header.n_tokens)
}

/// The token field of the sequence file at `path`, as it stands: a server's own payload, if it packs one.
///
/// # Errors
/// As [`seq_file_token_count`].
pub fn seq_file_tokens(path: impl AsRef<Path>) -> Result<Vec<Token>> {
    StateFile::open(path, FileKind::Sequence, usize::MAX).map(StateFile::into_tokens)
}

/// Opens a file to be read; returns its size too.
pub(super) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let failed = |op| move |source| Error::Io { op, path: path.display().to_string(), source };
    // Before it is opened, which would wait for the other end of a pipe.
    let metadata = fs::metadata(path).map_err(failed("open"))?;
    if metadata.is_dir() {
        return Err(failed("read")(io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        return Err(failed("read")(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    let file = File::open(path).map_err(failed("open"))?;
    let size = file.metadata().map_err(failed("read"))?.len();
    Ok((file, size))
}

fn open(path: &Path, kind: FileKind) -> Result<(File, u64, FileHeader)> {
    let (file, size) = open_regular(path)?;
    let mut source = Source::file(&file, 0, size, StateVersion::CURRENT, &[]);
    let head = source.bytes("header", size.min(FileHeader::LEN as u64)).map_err(|e| with_path(e, path))?;
    let header = FileHeader::read(&mut Cursor::new(&head), kind)?;
    Ok((file, size, header))
}
