//! Loading a slot file: everything is read and checked before the target changes; then nothing but the draft can be missing.

use std::ops::Range;
use std::path::Path;

use super::appendices::{Appendices, Found};
use super::expected::Expected;
use super::{DraftOutcome, LoadedSlot, SlotLoadParams, Verify};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, DraftState, FileKind, Identity, read_seq_blob_header};
use crate::memory::MemoryPlan;
use crate::session::StateFile;
use crate::state::Input;
use crate::types::{Seq, SeqId};

/// A restore that can be done.
struct Restore<'a> {
    plan: MemoryPlan<'a>,
    /// Cells that hold something are overwritten.
    overwrites: bool,
}

impl Context {
    /// Replaces sequence `dest` by the one in a slot file, or in any sequence file, and gives what else the file holds.
    ///
    /// What is damaged behind the memory state is left out, and named in [`LoadedSlot::notes`].
    ///
    /// # Errors
    /// As [`Context::state_seq_load_file`]; [`Error::Mismatch`] for a file of another model, geometry or salt,
    /// [`Error::Corrupt`] for header, tokens or memory state that are not what was saved. Both contexts are unchanged then.
    pub fn slot_load(
        &mut self,
        path: impl AsRef<Path>,
        dest: SeqId,
        params: SlotLoadParams<'_>,
    ) -> Result<LoadedSlot> {
        let SlotLoadParams { n_token_capacity, n_ctx_checkpoints, draft, identity, verify, require } = params;
        let seq = self.seq(dest)?;
        let mut draft = draft.map(|(context, seq_id)| Ok((context.seq(seq_id)?, context))).transpose()?;
        let expected = Expected::new(identity, verify, require)?;
        let file = StateFile::open(path, FileKind::Sequence, n_token_capacity)?;
        let failed = |error| Error::Restore {
            kind: FileKind::Sequence.restored(),
            source: Box::new(file.failed(error)),
        };

        let mut notes = Vec::new();
        let (restore, appendices) = self.read_slot(&file, seq, &expected, &mut notes).map_err(failed)?;
        let state_end = restore.plan.end.offset();
        let (slot, blob) = read_loaded(&file, state_end, appendices, verify, n_ctx_checkpoints, notes);
        let draft_restore =
            plan_draft(&file, blob.clone(), draft.as_ref().map(|(seq, context)| (*seq, &**context)));

        if restore.overwrites {
            file.warm(file.state_start()..state_end, self.progress.as_mut()).map_err(failed)?;
        }
        self.commit_file_state(&restore.plan, !restore.overwrites).map_err(failed)?;

        let outcome = match (draft_restore, &mut draft) {
            (Ok(Some(restore)), Some((_, context))) => {
                let bytes = blob.map_or(0, |blob| blob.end - blob.start);
                match context.commit_file_state(&restore.plan, !restore.overwrites) {
                    Ok(()) => DraftOutcome::Restored(bytes),
                    Err(error) => DraftOutcome::Dropped(file.failed(error).to_string()),
                }
            }
            (Err(error), _) => DraftOutcome::Dropped(file.failed(error).to_string()),
            (Ok(_), _) => DraftOutcome::Absent,
        };
        if !matches!(outcome, DraftOutcome::Restored(_))
            && let Some((seq, context)) = draft
        {
            context.seq_rm(seq.id(), -1, -1)?;
        }
        drop(restore);
        let driver = slot.driver.filter(|_| !matches!(outcome, DraftOutcome::Dropped(_)));
        Ok(LoadedSlot { tokens: file.into_tokens(), draft: outcome, driver, ..slot })
    }

    /// Reads and checks all but what the appendices hold. Changes nothing.
    fn read_slot<'f>(
        &self,
        file: &'f StateFile,
        seq: Seq,
        expected: &Expected,
        notes: &mut Vec<String>,
    ) -> Result<(Restore<'f>, Appendices)> {
        let integrity = expected.at_end(file, Some(self), notes)?;
        let plan = self.plan_file_state(file.source(), Some(seq))?;
        let appendices = expected.behind(file, plan.end.offset(), integrity, Some(self), notes)?;
        let overwrites = self.memory.state_overwrites(&plan);
        Ok((Restore { plan, overwrites }, appendices))
    }
}

/// All that a load gives beside the states of target and draft; and where the draft's state is, if the file has one.
pub(in crate::session) fn read_loaded(
    file: &StateFile,
    state_end: u64,
    appendices: Appendices,
    verify: Verify,
    n_ctx_checkpoints: usize,
    mut notes: Vec<String>,
) -> (LoadedSlot, Option<Range<u64>>) {
    let append_start = appendices.append_start(state_end);
    let Appendices { checkpoints: all, draft, integrity } = appendices;
    let checkpoints = read_checkpoints(file, &all, n_ctx_checkpoints, &mut notes);
    let driver = read_driver(file, draft.as_ref(), &mut notes);
    for note in &notes {
        log::warn!("{}: {note}", file.path().display());
    }
    let (verified, identity) = match integrity {
        Some(Found { integrity, .. }) => (verify, integrity.identity),
        None => (Verify::None, Identity::default()),
    };
    let slot = LoadedSlot {
        tokens: Vec::new(),
        target_bytes: state_end - file.state_start(),
        append_start,
        checkpoints,
        n_checkpoints_in_file: all.len(),
        draft: DraftOutcome::Absent,
        driver,
        verified,
        identity,
        notes,
    };
    (slot, draft.map(|state| state.draft).filter(|blob| !blob.is_empty()))
}

/// What a load would do to the draft's sequence; `None` if there is no state.
///
/// # Errors
/// The reason to drop the state.
fn plan_draft<'f>(
    file: &'f StateFile,
    blob: Option<Range<u64>>,
    draft: Option<(Seq, &Context)>,
) -> Result<Option<Restore<'f>>> {
    let Some(blob) = blob else { return Ok(None) };
    let Some((seq, context)) = draft else {
        return Err(Error::arg("draft", "no context is named for the draft state of the file"));
    };
    let mut source = file.part(blob.clone());
    read_seq_blob_header(&mut source)?;
    let plan = context.plan_file_state(source, Some(seq))?;
    let left = plan.end.left();
    if left > 0 {
        return Err(Error::corrupt("bytes behind the draft state", left, "none"));
    }
    let overwrites = context.memory.state_overwrites(&plan);
    if overwrites {
        file.warm(blob, None)?;
    }
    Ok(Some(Restore { plan, overwrites }))
}

fn read_blob(file: &StateFile, range: &Range<u64>) -> Result<Vec<u8>> {
    file.part(range.clone()).bytes("appendix", range.end - range.start)
}

/// The last `n` checkpoints.
fn read_checkpoints(
    file: &StateFile,
    all: &[Checkpoint<Range<u64>>],
    n: usize,
    notes: &mut Vec<String>,
) -> Vec<Checkpoint<Vec<u8>>> {
    let read = |Checkpoint { span, target, draft, driver }: &Checkpoint<Range<u64>>| {
        Ok(Checkpoint {
            span: *span,
            target: read_blob(file, target)?,
            draft: read_blob(file, draft)?,
            driver: read_blob(file, driver)?,
        })
    };
    let first = all.len().saturating_sub(n);
    // Who takes none has other ways to read them.
    if first > 0 && n > 0 {
        notes.push(format!("{first} of {} checkpoints are left out: {n} are kept", all.len()));
    }
    all[first..].iter().map(read).collect::<Result<_>>().unwrap_or_else(|error| {
        notes.push(format!("checkpoints are ignored: {}", file.failed(error)));
        Vec::new()
    })
}

fn read_driver(
    file: &StateFile,
    state: Option<&DraftState<Range<u64>>>,
    notes: &mut Vec<String>,
) -> Option<Vec<u8>> {
    let range = &state?.driver;
    if range.is_empty() {
        return None;
    }
    read_blob(file, range)
        .inspect_err(|error| notes.push(format!("the state of the speculative driver is ignored: {error}")))
        .ok()
}
