//! States in files: sequence files ('ggsq') and whole-context files ('ggsn').
//!
//! A file is written beside its destination, synced, and renamed over it: after a crash there is the old file
//! or the new one. A file is read through a mapping: tensors go from the page cache to the cache.

mod compose;
mod replace;
mod view;

use std::path::Path;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Cursor, FileHeader, FileKind, StateVersion, token_bytes, tokens_of};
use crate::state::{FileSink, Sink, Source, Tensors};
use crate::types::{Seq, SeqId, Token};
pub use compose::{StateFile, StateReader, StateWriter};

use replace::Replacement;
use view::FileView;

/// What a loaded file held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The token field.
    pub tokens: Vec<Token>,
    /// Offset behind the memory state, where appendices begin.
    pub state_end: u64,
}

impl Context {
    /// Writes a sequence and its tokens to `path`; returns the size of the file.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::ShiftFailed`], [`Error::Io`]; a file that was there is untouched then.
    pub fn state_seq_save_file(
        &mut self,
        path: impl AsRef<Path>,
        seq_id: SeqId,
        tokens: &[Token],
    ) -> Result<u64> {
        let seq = self.seq(seq_id)?;
        self.save_file(path.as_ref(), FileKind::Sequence, Some(seq), tokens)
    }

    /// Replaces sequence `dest` by the one in the file at `path`.
    ///
    /// # Errors
    /// As [`Context::state_seq_set_data`], [`Error::UnknownVersion`], [`Error::TokenCapacity`] for more than
    /// `n_token_capacity` tokens, [`Error::RotationUnstated`], [`Error::Io`]; the context is unchanged then.
    pub fn state_seq_load_file(
        &mut self,
        path: impl AsRef<Path>,
        dest: SeqId,
        n_token_capacity: usize,
    ) -> Result<Loaded> {
        let seq = self.seq(dest)?;
        self.load_file(path.as_ref(), FileKind::Sequence, Some(seq), n_token_capacity)
    }

    /// Writes the whole context and its tokens to `path`; returns the size of the file.
    ///
    /// # Errors
    /// As [`Context::state_seq_save_file`].
    pub fn state_save_file(&mut self, path: impl AsRef<Path>, tokens: &[Token]) -> Result<u64> {
        self.save_file(path.as_ref(), FileKind::Session, None, tokens)
    }

    /// Replaces all sequences by those in the file at `path`, which must hold nothing else.
    ///
    /// # Errors
    /// As [`Context::state_seq_load_file`].
    pub fn state_load_file(&mut self, path: impl AsRef<Path>, n_token_capacity: usize) -> Result<Loaded> {
        self.load_file(path.as_ref(), FileKind::Session, None, n_token_capacity)
    }

    fn save_file(&mut self, path: &Path, kind: FileKind, seq: Option<Seq>, tokens: &[Token]) -> Result<u64> {
        let n_tokens = u32::try_from(tokens.len())
            .map_err(|_| Error::arg("n_token_count", format!("{} does not fit 32 bits", tokens.len())))?;
        self.apply_shifts_of(seq)?;
        let mut file = Replacement::create(path)?;
        let mut sink = FileSink::new(file.writer());
        let written = sink
            .write(&FileHeader { kind, version: StateVersion::CURRENT, n_tokens }.to_bytes())
            .and_then(|()| sink.write(&token_bytes(tokens)))
            .and_then(|()| self.write_file_state(&mut sink, seq))
            .and_then(|()| sink.finish());
        let (_, len) = written.map_err(|error| with_path(error, path))?;
        file.commit(self.sync_files)?;
        Ok(len)
    }

    fn load_file(
        &mut self,
        path: &Path,
        kind: FileKind,
        seq: Option<Seq>,
        n_token_capacity: usize,
    ) -> Result<Loaded> {
        let file = FileView::open(path)?;
        let mut cursor = Cursor::new(file.bytes());
        let header = FileHeader::read(&mut cursor, kind)?;
        let count = u64::from(header.n_tokens);
        if header.n_tokens as usize > n_token_capacity {
            return Err(Error::TokenCapacity { kind: kind.name(), count, capacity: n_token_capacity as u64 });
        }
        let tokens: Vec<Token> = tokens_of(cursor.bytes("tokens", count * 4)?).collect();
        let source =
            Source { metadata: cursor, tensors: Tensors::InPlace, version: header.version, tokens: &tokens };
        let state_end = match seq {
            Some(dest) => self.read_file_state(&source, dest),
            None => self.read_whole(source, true),
        };
        let state_end = state_end
            .map_err(|error| Error::Restore { kind: kind.restored(), source: Box::new(error) })?
            as u64;
        Ok(Loaded { tokens, state_end })
    }
}

/// The number of tokens in the sequence file at `path`, checked against the size of the file.
///
/// # Errors
/// [`Error::UnknownVersion`], [`Error::Truncated`], [`Error::Io`].
pub fn seq_file_token_count(path: impl AsRef<Path>) -> Result<u32> {
    let file = FileView::open(path.as_ref())?;
    let mut cursor = Cursor::new(file.bytes());
    let header = FileHeader::read(&mut cursor, FileKind::Sequence)?;
    cursor.bytes("tokens", u64::from(header.n_tokens) * 4)?;
    Ok(header.n_tokens)
}

/// The token field of the sequence file at `path`, as it stands: a server's own payload, if it packs one.
///
/// # Errors
/// As [`seq_file_token_count`].
pub fn seq_file_tokens(path: impl AsRef<Path>) -> Result<Vec<Token>> {
    let file = FileView::open(path.as_ref())?;
    let mut cursor = Cursor::new(file.bytes());
    let header = FileHeader::read(&mut cursor, FileKind::Sequence)?;
    Ok(tokens_of(cursor.bytes("tokens", u64::from(header.n_tokens) * 4)?).collect())
}

/// The sink knows no path.
fn with_path(error: Error, path: &Path) -> Error {
    match error {
        Error::Io { op, source, .. } => Error::Io { op, path: path.display().to_string(), source },
        other => other,
    }
}
