//! Restoring a slot: whatever does not fit is a cold start that says why.

use super::folder::sidecar_path;
use super::{Autosave, lock};
use crate::context::Context;
use crate::error::{Result, Status};
use crate::session::slot::{LoadedSlot, SavedFile, SlotLoadParams, Unrecorded};
use crate::types::SeqId;

/// What a folder gave of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is one for each restore")]
pub enum Restored {
    /// The slot is restored.
    Slot(LoadedSlot),
    /// Nothing has changed, for these reasons; none if the folder has no such slot.
    Cold(Vec<String>),
}

impl Autosave {
    /// Restores a slot into sequence `dest` of `context`, as [`Context::slot_load`] would its file. The slot is not dirty then.
    ///
    /// A file that is another than the manifest says is taken if it is whole: it was saved after the manifest was written, or by
    /// another program. Of one that has lost its checksums nothing may be damaged.
    ///
    /// # Errors
    /// [`Error::SeqId`](crate::Error::SeqId), [`Error::Cancelled`](crate::Error::Cancelled): what is the caller's. Everything else is [`Restored::Cold`].
    pub fn restore(
        &self,
        slot_id: u32,
        context: &mut Context,
        dest: SeqId,
        params: SlotLoadParams<'_>,
    ) -> Result<Restored> {
        context.seq(dest)?;
        if let Some((draft, seq_id)) = &params.draft {
            draft.seq(*seq_id)?;
        }
        let slot = self.slot(slot_id);
        let _turn = lock(&slot.turn);
        // What the folder has counts, saved a moment ago or not.
        drop(slot.wait());

        let path = self.shared.path(slot_id);
        let Some(entry) = self.shared.folder().look(slot_id) else { return Ok(Restored::Cold(Vec::new())) };
        let mut notes = Vec::new();
        // One that cannot be read is no start at all, for the reason that its load says.
        if let (Some(saved), Ok(found)) = (entry.target, SavedFile::of(&path))
            && found != saved
        {
            notes.push(format!(
                "{} is not the file of the manifest: it has {found}, that had {saved}",
                path.display()
            ));
        }
        // What was saved here has had checksums.
        let unrecorded = if entry.target.is_some() { Unrecorded::Refused } else { Unrecorded::Taken };
        let sidecar = sidecar_path(&self.shared.directory, slot_id);
        if entry.sidecar.is_some() && !sidecar.exists() {
            notes.push(format!("{} is gone: the draft starts empty", sidecar.display()));
        }
        match context.load_slot(&path, dest, params, unrecorded) {
            Ok(mut loaded) => {
                for note in &notes {
                    log::warn!("{note}");
                }
                notes.append(&mut loaded.notes);
                lock(&self.shared.uses).restored(slot_id);
                Ok(Restored::Slot(LoadedSlot { notes, ..loaded }))
            }
            Err(error) if error.status() == Status::Cancelled => Err(error),
            Err(error) => {
                notes.push(error.to_string());
                for note in &notes {
                    log::warn!("slot {slot_id} starts cold: {note}");
                }
                Ok(Restored::Cold(notes))
            }
        }
    }
}
