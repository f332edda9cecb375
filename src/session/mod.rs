//! States in files: sequence files ('ggsq') and whole-context files ('ggsn').
//!
//! A file is written beside its destination, synced, and renamed over it: after a crash there is the old file
//! or the new one. Of a file only the metadata is read before all of it has been checked; then its tensors go from
//! the page cache to the cache, piece by piece.

mod compose;
mod replace;
mod state_file;

use std::path::Path;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{FileHeader, FileKind, StateVersion, token_bytes};
use crate::state::{FileSink, Input, Sink};
use crate::types::{Seq, SeqId, Token};

pub use compose::{StateReader, StateWriter};
pub use state_file::{StateFile, seq_file_token_count, seq_file_tokens};

use replace::Replacement;

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
        let file = StateFile::open(path, kind, n_token_capacity)?;
        let failed = |error| Error::Restore { kind: kind.restored(), source: Box::new(file.failed(error)) };
        let plan = self.plan_file_state(file.source(), seq).map_err(failed)?;
        let left = plan.end.left();
        // A server may append to a sequence file, never to that of a whole context.
        if seq.is_none() && left > 0 {
            return Err(failed(Error::corrupt(
                "did not read all of the session file data",
                format_args!("{left} bytes behind the state"),
                "none",
            )));
        }
        let state_end = plan.end.offset();
        self.commit_file_state(&plan).map_err(failed)?;
        drop(plan);
        Ok(Loaded { tokens: file.into_tokens(), state_end })
    }
}

/// Sinks and sources know no path.
fn with_path(error: Error, path: &Path) -> Error {
    match error {
        Error::Io { op, source, .. } => Error::Io { op, path: path.display().to_string(), source },
        other => other,
    }
}
