//! A file that holds a state, opened to be read.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::with_path;
use crate::error::{Error, Result};
use crate::format::{Cursor, FileHeader, FileKind, StateVersion, tokens_of};
use crate::state::Source;
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
        let start = FileHeader::LEN as u64 + 4 * self.tokens.len() as u64;
        Source::file(&self.file, start, self.size, self.version, &self.tokens)
    }

    /// An error of reading it, with its name.
    pub(super) fn failed(&self, error: Error) -> Error {
        with_path(error, &self.path)
    }
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

fn open(path: &Path, kind: FileKind) -> Result<(File, u64, FileHeader)> {
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
    let mut source = Source::file(&file, 0, size, StateVersion::CURRENT, &[]);
    let head = source.bytes("header", size.min(FileHeader::LEN as u64)).map_err(|e| with_path(e, path))?;
    let header = FileHeader::read(&mut Cursor::new(&head), kind)?;
    Ok((file, size, header))
}
