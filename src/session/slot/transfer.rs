//! Slot files of states that a server composes itself: of its own sections and of views.

use std::path::Path;

use super::appendices::Found;
use super::expected::Expected;
use super::load::{StateEnd, read_loaded};
use super::save::{Contents, SeqState, SlotFiles};
use super::{DraftOutcome, LoadedSlot, SlotContents, SlotLoadParams};
use crate::error::{Error, Result};
use crate::format::{Checkpoints, FileKind};
use crate::session::{StateFile, StateReader, StateWriter, failed_restore, file_record};
use crate::state::RecordSink;
use crate::storage::Threads;

const TARGET_ALONE: &str = "a state of views is the target's alone: no draft context can be named";

impl StateWriter<'_> {
    /// Writes the state of a sequence and `contents` to a slot file, as [`Context::slot_save`](crate::Context::slot_save) does, but
    /// for the geometry, which only the caller knows. With `sync` it waits for the disk before it renames the file.
    ///
    /// # Errors
    /// As [`StateWriter::save_file`]; [`Error::InvalidArgument`] for a whole context, a draft context, a checkpoint without a
    /// state, or an identity of more than 16 MiB.
    pub fn save_slot(
        &mut self,
        path: impl AsRef<Path>,
        contents: SlotContents<'_>,
        sync: bool,
    ) -> Result<u64> {
        let SlotContents { tokens, checkpoints, draft, driver, identity, .. } = contents;
        if self.seq_id == -1 {
            return Err(Error::arg("seq_id", "-1, a slot file holds one sequence"));
        }
        if draft.is_some() {
            return Err(Error::arg("draft", TARGET_ALONE));
        }
        let mut record = RecordSink::default();
        self.record.replay(&mut record)?;
        let contents = Contents {
            head: file_record(FileKind::Sequence, tokens)?,
            target: SeqState::of_record(self.seq_id, record, &self.transfer),
            checkpoints: Checkpoints(checkpoints),
            draft: None,
            driver,
            identity: &identity,
        };
        SlotFiles::new(contents, tokens, false)?.save(path.as_ref(), sync, self.progress.as_mut())
    }
}

/// A slot file whose state is being read by a [`StateReader`].
#[derive(Debug)]
pub(in crate::session) struct OpenedSlot {
    expected: Expected,
    n_ctx_checkpoints: usize,
    /// What is at the end of the file: it has been compared.
    found: Option<Found>,
    notes: Vec<String>,
}

impl<'a> StateReader<'a> {
    /// Reads the state in a slot file, or in any sequence file. Identity and checksums at its end are compared now; what stands in
    /// between in [`StateReader::slot`]. The token capacity of `params` was that of [`StateFile::open`].
    ///
    /// # Errors
    /// [`Error::Restore`] with [`Error::Mismatch`] for a file of another model or salt, [`Error::Corrupt`] for header, tokens or
    /// memory state that are not what was saved; [`Error::InvalidArgument`] for a draft context, or a part of the positions.
    pub fn of_slot(file: &'a StateFile, params: SlotLoadParams<'_>) -> Result<Self> {
        let SlotLoadParams { n_ctx_checkpoints, draft, identity, verify, p1, require, .. } = params;
        if draft.is_some() {
            return Err(Error::arg("draft", TARGET_ALONE));
        }
        if let Some(p1) = p1 {
            return Err(Error::arg("p1", format!("{p1}, a reader restores all positions")));
        }
        let expected = Expected::new(identity, verify, require)?;
        let mut notes = Vec::new();
        let found = expected
            .at_end(file, None, &mut expected.verifier(Threads::default(), None), &mut notes)
            .map_err(|error| failed_restore(file, FileKind::Sequence, error))?;
        let mut reader = Self::of_file(file);
        reader.slot = Some(OpenedSlot { expected, n_ctx_checkpoints, found, notes });
        Ok(reader)
    }

    /// What else the slot file holds: to be called when all sections are planned, and before anything changes. Identity and
    /// checksums that something stands behind are compared now. [`LoadedSlot::kept`] is what the views that were planned take.
    ///
    /// # Errors
    /// As [`StateReader::of_slot`]; [`Error::InvalidArgument`] for a reader of something else, one that has been rewound, or a
    /// second call.
    pub fn slot(&mut self) -> Result<LoadedSlot> {
        if self.reading {
            return Err(Error::arg(
                "reader",
                "it was rewound: the slot is asked for when the state is planned",
            ));
        }
        let (Some(file), Some(slot)) = (self.file, self.slot.take()) else {
            return Err(Error::arg(
                "reader",
                "it was not opened as a slot, or the slot has been given already",
            ));
        };
        let OpenedSlot { expected, n_ctx_checkpoints, found, mut notes } = slot;
        let end = StateEnd { offset: self.offset(), kept: self.kept() };
        let mut verifier = expected.verifier(self.transfer.threads, None);
        let appendices = expected
            .behind(file, end.offset, found, None, &mut verifier, &mut notes)
            .map_err(|error| failed_restore(file, FileKind::Sequence, error))?;
        let (mut slot, draft) = read_loaded(file, end, appendices, &expected, n_ctx_checkpoints, notes);
        if draft.is_some() {
            slot.draft = DraftOutcome::Dropped(TARGET_ALONE.to_owned());
        }
        slot.finish(file);
        Ok(LoadedSlot { tokens: file.tokens().to_vec(), ..slot })
    }
}
