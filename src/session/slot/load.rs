//! Loading a slot file: everything is read and checked before the target changes; then nothing but the draft can be missing.

use std::ops::Range;
use std::path::Path;

use super::appendices::{Appendices, integrity_at_end, verify_state};
use super::{DraftOutcome, LoadedSlot, SlotLoadParams, Verify, identity};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, DraftState, FileKind, Identity, Integrity, read_seq_blob_header};
use crate::memory::MemoryPlan;
use crate::session::{StateFile, failed_restore};
use crate::state::Input;
use crate::types::{PosRange, Seq, SeqId};

const NOTHING_COMPARED: &str = "the file has no identity and no checksums: nothing was compared";

/// What a file is compared with.
struct Expected<'a> {
    identity: &'a Identity,
    verify: Verify,
    /// The positions that are wanted.
    range: PosRange,
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
        let SlotLoadParams { n_token_capacity, n_ctx_checkpoints, draft, identity, verify, p1 } = params;
        let range = PosRange { p0: 0, p1: p1.map_or(i64::MAX, i64::from) };
        let seq = self.seq(dest)?;
        let mut draft = draft.map(|(context, seq_id)| Ok((context.seq(seq_id)?, context))).transpose()?;
        let file = StateFile::open(path, FileKind::Sequence, n_token_capacity)?;
        let expected = Expected { identity: &identity, verify, range };
        let failed = |error| failed_restore(&file, FileKind::Sequence, error);

        let mut notes = Vec::new();
        let (plan, mut appendices) = self.read_slot(&file, seq, &expected, &mut notes).map_err(failed)?;
        let (state_end, kept) = (plan.end.offset(), plan.kept());
        let n_checkpoints_in_file = appendices.checkpoints.len();
        leave_out_behind(range, &mut appendices.checkpoints, &mut notes);
        let checkpoints = read_checkpoints(&file, &appendices.checkpoints, n_ctx_checkpoints, &mut notes);
        let mut driver = read_driver(&file, appendices.draft.as_ref(), &mut notes);
        if kept.n_cut > 0 && driver.take().is_some() {
            notes.push(
                "the state of the speculative driver is of the end that was cut off: left out".to_owned(),
            );
        }
        let blob = appendices.draft.map(|state| state.draft).filter(|blob| !blob.is_empty());
        let draft_restore =
            plan_draft(&file, blob.clone(), range, draft.as_ref().map(|(seq, context)| (*seq, &**context)));

        self.commit_file(&file, &plan).map_err(failed)?;

        let outcome = match (draft_restore, &mut draft) {
            (Ok(Some(plan)), Some((_, context))) => {
                let bytes = blob.map_or(0, |blob| blob.end - blob.start);
                match context.commit_file(&file, &plan) {
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
        let is_dropped = matches!(outcome, DraftOutcome::Dropped(_));
        for note in &notes {
            log::warn!("{}: {note}", file.path().display());
        }
        let target_bytes = state_end - file.state_start();
        let (verified, identity) = match appendices.integrity {
            Some(Integrity { identity, .. }) => (verify, identity),
            None => (Verify::None, Identity::default()),
        };
        drop(plan);
        Ok(LoadedSlot {
            tokens: file.into_tokens(),
            kept,
            target_bytes,
            checkpoints,
            n_checkpoints_in_file,
            draft: outcome,
            driver: driver.filter(|_| !is_dropped),
            verified,
            identity,
            notes,
        })
    }

    /// Reads and checks all but what the appendices hold. Changes nothing.
    fn read_slot<'f>(
        &self,
        file: &'f StateFile,
        seq: Seq,
        expected: &Expected<'_>,
        notes: &mut Vec<String>,
    ) -> Result<(MemoryPlan<'f>, Appendices)> {
        let check = |integrity: &Integrity, notes: &mut Vec<String>| {
            identity::check(integrity, expected.identity, self, notes)?;
            verify_state(file, integrity, expected.verify)
        };
        let mut integrity = integrity_at_end(file);
        if let Some(integrity) = &integrity {
            check(integrity, notes)?;
        }
        let plan = self.plan_file_range(file.source(), seq, expected.range, false)?;
        let state_end = plan.end.offset();
        let mut appendices = Appendices::default();
        if integrity.is_none() {
            appendices = Appendices::in_turn(file, state_end, notes);
            // Something stands behind it.
            integrity = appendices.integrity.take();
            match &integrity {
                Some(integrity) => check(integrity, notes)?,
                None => notes.push(NOTHING_COMPARED.to_owned()),
            }
        }
        if let Some(integrity) = integrity {
            appendices = Appendices::listed(file, state_end, integrity, expected.verify, notes)?;
        }
        Ok((plan, appendices))
    }
}

/// What a load would do to the draft's sequence; `None` if there is no state.
///
/// # Errors
/// The reason to drop the state.
fn plan_draft<'f>(
    file: &'f StateFile,
    blob: Option<Range<u64>>,
    range: PosRange,
    draft: Option<(Seq, &Context)>,
) -> Result<Option<MemoryPlan<'f>>> {
    let Some(blob) = blob else { return Ok(None) };
    let Some((seq, context)) = draft else {
        return Err(Error::arg("draft", "no context is named for the draft state of the file"));
    };
    let mut source = file.part(blob);
    read_seq_blob_header(&mut source)?;
    let plan = context.plan_file_range(source, seq, range, false)?;
    let left = plan.end.left();
    if left > 0 {
        return Err(Error::corrupt("bytes behind the draft state", left, "none"));
    }
    Ok(Some(plan))
}

/// Checkpoints that have seen positions that were cut off.
fn leave_out_behind(range: PosRange, checkpoints: &mut Vec<Checkpoint<Range<u64>>>, notes: &mut Vec<String>) {
    let n = checkpoints.len();
    checkpoints.retain(|checkpoint| i64::from(checkpoint.span.pos_max()) < range.p1);
    if checkpoints.len() < n {
        let n_behind = n - checkpoints.len();
        notes.push(format!(
            "{n_behind} of {n} checkpoints are left out: they reach position {} or further",
            range.p1
        ));
    }
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
    if first > 0 {
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
