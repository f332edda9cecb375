//! Saving a slot: its files are written while nobody waits, and put into their places under the folder's lock.

use std::sync::Arc;

use super::{Autosave, Shared, lock};
use crate::context::Context;
use crate::error::Result;
use crate::session::Job;
use crate::session::replace::Links;
use crate::session::slot::{SlotContents, SlotFiles};
use crate::storage::ProgressCallback;
use crate::types::SeqId;

/// A slot that was saved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Bytes of its files.
    pub bytes: u64,
    /// What could not be done beside it, in words: the slot itself is saved.
    pub notes: Vec<String>,
}

/// A save that is about to run: what of the slot it will have.
#[derive(Clone, Copy)]
struct Begun {
    slot_id: u32,
    n_tokens: u32,
    /// Tokens that were not saved before.
    unsaved: u64,
    /// The last use that it knows of.
    use_ms: u64,
}

impl Autosave {
    /// Saves a slot: sequence `seq_id` of `context`, and `contents`. Slots that were used longest ago make room for it. If a save
    /// of it runs in the background, that is waited for first.
    ///
    /// # Errors
    /// As [`Context::slot_save`]; [`Error::OverBudget`](crate::Error::OverBudget) if it does not fit beside slots that were used
    /// later; [`Error::Locked`](crate::Error::Locked) in a folder that could not be written when it was opened. Its old file
    /// stands then, and every other.
    pub fn save(
        &self,
        slot_id: u32,
        context: &mut Context,
        seq_id: SeqId,
        contents: SlotContents<'_>,
    ) -> Result<Saved> {
        let slot = self.slot(slot_id);
        let _turn = lock(&slot.turn);
        // It has been logged if it failed, and what is saved now is newer.
        drop(slot.wait());
        let begun = self.shared.begin(slot_id, contents.tokens);
        context.with_slot_files(seq_id, contents, |files, progress| self.shared.save(begun, files, progress))
    }

    /// Takes a snapshot of a slot, and saves it as [`Autosave::save`] on a thread of its own: the contexts may go on. What becomes
    /// of it is said by [`Autosave::wait`], and logged if it fails. A save of the slot that still runs is waited for first.
    ///
    /// # Errors
    /// As [`Context::slot_snapshot`]; as [`Autosave::save`] for what is known before anything is written;
    /// [`Error::Io`](crate::Error::Io) if there is no thread to be had.
    pub fn save_in_background(
        &self,
        slot_id: u32,
        context: &mut Context,
        seq_id: SeqId,
        contents: SlotContents<'_>,
    ) -> Result<()> {
        let slot = self.slot(slot_id);
        let _turn = lock(&slot.turn);
        drop(slot.wait());
        let begun = self.shared.begin(slot_id, contents.tokens);
        let snapshot = context.slot_snapshot(seq_id, contents)?;
        let total = snapshot.size()?;
        self.shared.folder().check_save(slot_id, total, begun.use_ms)?;
        let shared = Arc::clone(&self.shared);
        let job = Job::spawn(0, total, None, move |mut progress| {
            let saved = snapshot.files().and_then(|files| shared.save(begun, &files, Some(&mut progress)));
            saved.inspect_err(|error| log::warn!("slot {slot_id} is not saved: {error}"))
        })?;
        *lock(&slot.job) = Some(Arc::new(job));
        Ok(())
    }

    /// Waits for the save of a slot in the background; `None` if there is none that nobody has waited for.
    ///
    /// # Errors
    /// As [`Autosave::save`], [`Error::Cancelled`](crate::Error::Cancelled): the slot is dirty still, and its old file stands.
    pub fn wait(&self, slot_id: u32) -> Result<Option<Saved>> {
        let slot = self.slot(slot_id);
        let _turn = lock(&slot.turn);
        slot.wait()
    }

    /// Waits for all saves in the background, and brings the manifest up to date with what was used.
    ///
    /// # Errors
    /// That of the last save that failed, or of the manifest; all are waited for.
    pub fn flush(&self) -> Result<()> {
        let slot_ids: Vec<u32> = lock(&self.slots).keys().copied().collect();
        let mut flushed = Ok(());
        for slot_id in slot_ids {
            flushed = self.wait(slot_id).map(drop).and(flushed);
        }
        flushed.and(self.shared.folder().write_manifest())
    }
}

impl Shared {
    /// A save begins of what the slot is now. It is a use, if the slot was not marked since the last save.
    fn begin(&self, slot_id: u32, tokens: &[i32]) -> Begun {
        let mut uses = lock(&self.uses);
        let slot = match uses.slots.get_mut(&slot_id) {
            Some(slot) if slot.is_dirty => slot,
            _ => uses.touch(slot_id),
        };
        slot.begun = slot.unsaved;
        // As many as a file has: a save of more fails.
        let n_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        Begun { slot_id, n_tokens, unsaved: slot.unsaved, use_ms: slot.last_use_ms }
    }

    fn save(
        &self,
        begun: Begun,
        files: &SlotFiles<'_>,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<Saved> {
        let Begun { slot_id, n_tokens, unsaved, use_ms } = begun;
        self.folder().check_save(slot_id, files.size()?, use_ms)?;
        let written = files.write(&self.path(slot_id), Links::Replaced, progress)?;
        written.sync_data(self.sync)?;
        let mut saved = Saved { bytes: written.bytes(), notes: Vec::new() };
        // It may have been used meanwhile, as may others.
        let last_use_ms = lock(&self.uses).slots.get(&slot_id).map_or(use_ms, |slot| slot.last_use_ms);
        self.folder().put(written, (slot_id, n_tokens, last_use_ms), &mut saved.notes)?;
        for note in &saved.notes {
            log::warn!("slot {slot_id} is saved, but: {note}");
        }
        if let Some(slot) = lock(&self.uses).slots.get_mut(&slot_id) {
            slot.unsaved -= unsaved;
            slot.begun -= unsaved;
            slot.is_dirty = slot.last_use_ms > use_ms;
        }
        Ok(saved)
    }
}
