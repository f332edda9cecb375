//! States in files: sequence files ('ggsq') and whole-context files ('ggsn').
//!
//! A file is written beside its destination, synced, and renamed over it: after a crash there is the old file
//! or the new one. Of a file only the metadata is read before all of it has been checked; then its tensors go from
//! the page cache to the cache, piece by piece.

mod autosave;
mod compose;
mod fingerprint;
mod job;
mod range;
mod replace;
mod slot;
mod state_file;
mod temporary;

use std::path::Path;

use crate::context::{Context, Snapshot};
use crate::error::{Error, Result};
use crate::format::{FileHeader, FileKind, StateVersion, token_bytes};
use crate::memory::MemoryPlan;
use crate::state::{Input, RecordSink, Sink, write_file};
use crate::storage::{ProgressCallback, Transfer};
use crate::types::{PosRange, SeqId, StateFlags, Token};

pub use crate::memory::Kept;
pub use autosave::{Autosave, AutosaveParams, AutosavedSlot, Restored, Saved};
pub use compose::{StateReader, StateWriter};
pub use fingerprint::{FINGERPRINT_LEN, fingerprint};
pub use job::Job;
pub use range::{LoadedRange, RangeLoadParams};
pub use slot::{
    DraftOutcome, LoadedSlot, Require, SlotContents, SlotLoadParams, SlotSnapshot, Verify, slot_path,
};
pub use state_file::{StateFile, seq_file_token_count, seq_file_tokens};

use replace::{Links, Replacement};

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
    /// [`Error::SeqId`], [`Error::ShiftFailed`], [`Error::Io`], [`Error::Cancelled`]; a file that was there is untouched
    /// then.
    pub fn state_seq_save_file(
        &mut self,
        path: impl AsRef<Path>,
        seq_id: SeqId,
        tokens: &[Token],
    ) -> Result<u64> {
        self.state_seq_save_file_range(path, seq_id, PosRange::ALL, tokens)
    }

    /// Replaces sequence `dest` by the one in the file at `path`.
    ///
    /// # Errors
    /// As [`Context::state_seq_set_data`], [`Error::UnknownVersion`], [`Error::TokenCapacity`] for more than
    /// `n_token_capacity` tokens, [`Error::RotationUnstated`], [`Error::Io`], [`Error::Cancelled`]; the context is
    /// unchanged then. Only where the state has to take cells that are in use, and the file fails although all of it
    /// had been in memory a moment before, is the destination empty.
    pub fn state_seq_load_file(
        &mut self,
        path: impl AsRef<Path>,
        dest: SeqId,
        n_token_capacity: usize,
    ) -> Result<Loaded> {
        let params = RangeLoadParams { n_token_capacity, ..RangeLoadParams::default() };
        let LoadedRange { tokens, state_end, .. } = self.state_seq_load_file_range(path, dest, params)?;
        Ok(Loaded { tokens, state_end })
    }

    /// Writes the whole context and its tokens to `path`; returns the size of the file.
    ///
    /// # Errors
    /// As [`Context::state_seq_save_file`].
    pub fn state_save_file(&mut self, path: impl AsRef<Path>, tokens: &[Token]) -> Result<u64> {
        self.apply_shifts_of(None)?;
        self.save_file(path.as_ref(), FileKind::Session, tokens, |context, record| {
            context.write_file_state(record, None)
        })
    }

    /// Replaces all sequences by those in the file at `path`, which must hold nothing else.
    ///
    /// # Errors
    /// As [`Context::state_seq_load_file`].
    pub fn state_load_file(&mut self, path: impl AsRef<Path>, n_token_capacity: usize) -> Result<Loaded> {
        let file = StateFile::open(path, FileKind::Session, n_token_capacity)?;
        let failed = |error| failed_restore(&file, FileKind::Session, error);
        let plan = self.plan_file_state(file.source(), None).map_err(failed)?;
        // A server may append to a sequence file, never to that of a whole context.
        let left = plan.end.left();
        if left > 0 {
            return Err(failed(Error::corrupt(
                "did not read all of the session file data",
                format_args!("{left} bytes behind the state"),
                "none",
            )));
        }
        let state_end = plan.end.offset();
        self.commit_file(&file, &plan).map_err(failed)?;
        drop(plan);
        Ok(Loaded { tokens: file.into_tokens(), state_end })
    }

    fn save_file(
        &mut self,
        path: &Path,
        kind: FileKind,
        tokens: &[Token],
        write: impl for<'a> FnOnce(&'a Self, &mut RecordSink<'a>) -> Result<()>,
    ) -> Result<u64> {
        let mut progress = self.progress.take();
        let save = || {
            let mut record = file_record(kind, tokens)?;
            write(self, &mut record)?;
            replace_file(path, &record, self.sync_files, &self.transfer, progress.as_mut())
        };
        let saved = save();
        self.progress = progress;
        saved
    }

    /// Does what was planned of the state in a file.
    fn commit_file(&mut self, file: &StateFile, plan: &MemoryPlan<'_>) -> Result<()> {
        // Cells that are overwritten cannot be had back: the disk is asked, and the callback heard, before.
        let overwrites = self.memory.state_overwrites(plan);
        if overwrites {
            let ranges = self.memory.state_file_ranges(plan)?;
            file.warm(&ranges, self.progress.as_mut())?;
        }
        self.commit_file_state(plan, !overwrites)
    }
}

/// Why the state in a file was not restored.
fn failed_restore(file: &StateFile, kind: FileKind, error: Error) -> Error {
    Error::Restore { kind: kind.restored(), source: Box::new(file.failed(error)) }
}

/// Sinks and sources know no path.
fn with_path(error: Error, path: &Path) -> Error {
    match error {
        Error::Io { op, source, .. } => Error::Io { op, path: path.display().to_string(), source },
        other => other,
    }
}

/// A file holds whole states only.
fn check_whole(snapshot: &Snapshot) -> Result<()> {
    if snapshot.flags().contains(StateFlags::PARTIAL_ONLY) {
        return Err(Error::arg("snapshot", "is partial, and a file holds a whole state"));
    }
    Ok(())
}

/// Writes a snapshot to a file.
fn snapshot_file(
    snapshot: &Snapshot,
    path: &Path,
    tokens: &[Token],
    sync: bool,
    progress: Option<&mut ProgressCallback>,
) -> Result<u64> {
    check_whole(snapshot)?;
    let kind = if snapshot.seq_id().is_some() { FileKind::Sequence } else { FileKind::Session };
    let mut record = file_record(kind, tokens)?;
    snapshot.state.replay(&mut record)?;
    replace_file(path, &record, sync, &snapshot.transfer, progress)
}

/// What a file has before its state.
fn file_record<'a>(kind: FileKind, tokens: &[Token]) -> Result<RecordSink<'a>> {
    let n_tokens = u32::try_from(tokens.len())
        .map_err(|_| Error::arg("n_token_count", format!("{} does not fit 32 bits", tokens.len())))?;
    let mut record = RecordSink::default();
    record.write(&FileHeader { kind, version: StateVersion::CURRENT, n_tokens }.to_bytes())?;
    record.write(&token_bytes(tokens))?;
    Ok(record)
}

/// Writes a recorded file beside `path`, then renames it over what is there; returns its size.
fn replace_file(
    path: &Path,
    record: &RecordSink<'_>,
    sync: bool,
    transfer: &Transfer,
    progress: Option<&mut ProgressCallback>,
) -> Result<u64> {
    let mut file = Replacement::create(path, Links::Followed)?;
    file.reserve(record.bytes())?;
    write_file(record, file.writer(), transfer, progress).map_err(|error| with_path(error, path))?;
    file.commit(record.bytes(), sync)?;
    Ok(record.bytes())
}
