//! Loading a slot file: everything is read and checked before the target changes; then nothing but the draft can be missing.

use std::ops::Range;
use std::path::Path;

use super::appendices::{Appendices, integrity_at_end, verify_state};
use super::{DraftOutcome, LoadedSlot, SlotLoadParams, Verify, identity, sidecar_path};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{
    Checkpoint, DraftState, FileKind, Identity, Integrity, SEQ_BLOB_HEADER_LEN, read_seq_blob_header,
};
use crate::memory::MemoryPlan;
use crate::session::{StateFile, failed_restore};
use crate::state::Input;
use crate::types::{PosRange, Seq, SeqId, Token};

const NOTHING_COMPARED: &str = "the file has no identity and no checksums: nothing was compared";

/// What becomes of a file without checksums that is damaged behind the memory state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::session) enum Unrecorded {
    /// The damage is left out.
    Taken,
    /// The file is refused: there had been checksums.
    Refused,
}

/// What a file is compared with.
struct Expected<'a> {
    identity: &'a Identity,
    verify: Verify,
    unrecorded: Unrecorded,
    /// The positions that are wanted.
    range: PosRange,
}

/// A restore of the draft's sequence that can be done.
struct DraftRestore<'a> {
    file: &'a StateFile,
    plan: MemoryPlan<'a>,
    /// Bytes of the state.
    bytes: u64,
    /// State of the driver, if it stands beside the draft's.
    driver: Option<Vec<u8>>,
}

impl Context {
    /// Replaces sequence `dest` by the one in a slot file, or in any sequence file, and gives what else the file holds. If it
    /// holds no draft state, a sidecar that stands beside it is looked for.
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
        self.load_slot(path.as_ref(), dest, params, Unrecorded::Taken)
    }

    pub(in crate::session) fn load_slot(
        &mut self,
        path: &Path,
        dest: SeqId,
        params: SlotLoadParams<'_>,
        unrecorded: Unrecorded,
    ) -> Result<LoadedSlot> {
        let SlotLoadParams { n_token_capacity, n_ctx_checkpoints, draft, identity, verify, p1 } = params;
        let range = PosRange { p0: 0, p1: p1.map_or(i64::MAX, i64::from) };
        let seq = self.seq(dest)?;
        let mut draft = draft.map(|(context, seq_id)| Ok((context.seq(seq_id)?, context))).transpose()?;
        let file = StateFile::open(path, FileKind::Sequence, n_token_capacity)?;
        let expected = Expected { identity: &identity, verify, unrecorded, range };
        let failed = |error| failed_restore(&file, FileKind::Sequence, error);

        let mut notes = Vec::new();
        let (plan, mut appendices) = self.read_slot(&file, seq, &expected, &mut notes).map_err(failed)?;
        let (state_end, kept) = (plan.end.offset(), plan.kept());
        let n_checkpoints_in_file = appendices.checkpoints.len();
        leave_out_behind(range, &mut appendices.checkpoints, &mut notes);
        let checkpoints = read_checkpoints(&file, &appendices.checkpoints, n_ctx_checkpoints, &mut notes);
        let mut driver = read_driver(&file, appendices.draft.as_ref(), &mut notes);
        let blob = appendices.draft.map(|state| state.draft).filter(|blob| !blob.is_empty());
        let sidecar = if blob.is_none() { open_sidecar(path) } else { None };
        let draft_restore = {
            let draft = draft.as_ref().map(|(seq, context)| (*seq, &**context));
            match (blob, &sidecar) {
                (Some(blob), _) => plan_draft(&file, blob, range, draft).map(Some),
                (None, Some(Ok(sidecar))) => {
                    plan_sidecar(sidecar, file.tokens(), draft, &expected, &mut notes).map(Some)
                }
                (None, Some(Err(error))) => Err(error.to_string()),
                (None, None) => Ok(None),
            }
        };

        self.commit_file(&file, &plan).map_err(failed)?;

        let mut converted = self.memory.state_notes(&plan);
        let outcome = match (draft_restore, &mut draft) {
            (Ok(Some(restore)), Some((_, context))) => {
                driver = restore.driver.or(driver);
                let of_draft = context.memory.state_notes(&restore.plan);
                match context.commit_file(restore.file, &restore.plan) {
                    Ok(()) => {
                        converted.extend(of_draft.into_iter().map(|line| format!("draft, {line}")));
                        DraftOutcome::Restored(restore.bytes)
                    }
                    Err(error) => DraftOutcome::Dropped(file.failed(error).to_string()),
                }
            }
            (Err(reason), _) => DraftOutcome::Dropped(reason),
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
        notes.append(&mut converted);
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
        let plan = self.plan_file_range(&file.source(), seq, expected.range, false)?;
        let state_end = plan.end.offset();
        let mut appendices = Appendices::default();
        if integrity.is_none() {
            appendices = Appendices::in_turn(file, state_end, notes);
            if let Some(damage) = appendices.damage.take_if(|_| expected.unrecorded == Unrecorded::Refused) {
                return Err(damage);
            }
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

/// The sidecar of a slot file, if there is one.
fn open_sidecar(path: &Path) -> Option<Result<StateFile>> {
    let sidecar = sidecar_path(path).ok().filter(|sidecar| sidecar.exists())?;
    Some(StateFile::open(sidecar, FileKind::Sequence, usize::MAX))
}

fn no_draft_context() -> Error {
    Error::arg("draft", "no context is named for the draft state of the file")
}

/// What a load of the appendix would do to the draft's sequence.
///
/// # Errors
/// The reason to drop the state.
fn plan_draft<'f>(
    file: &'f StateFile,
    blob: Range<u64>,
    range: PosRange,
    draft: Option<(Seq, &Context)>,
) -> Result<DraftRestore<'f>, String> {
    let plan = || {
        let (seq, context) = draft.ok_or_else(no_draft_context)?;
        let bytes = blob.end - blob.start;
        let mut source = file.part(blob);
        read_seq_blob_header(&mut source)?;
        let plan = context.plan_file_range(&source, seq, range, false)?;
        let left = plan.end.left();
        if left > 0 {
            return Err(Error::corrupt("bytes behind the draft state", left, "none"));
        }
        Ok(DraftRestore { file, plan, bytes, driver: None })
    };
    plan().map_err(|error| file.failed(error).to_string())
}

/// What a load of the sidecar would do to the draft's sequence. Its tokens say whether it belongs to a slot file with `tokens`.
///
/// # Errors
/// The reason to drop the state.
fn plan_sidecar<'f>(
    sidecar: &'f StateFile,
    tokens: &[Token],
    draft: Option<(Seq, &Context)>,
    expected: &Expected<'_>,
    notes: &mut Vec<String>,
) -> Result<DraftRestore<'f>, String> {
    let mut plan = || {
        let (seq, context) = draft.ok_or_else(no_draft_context)?;
        if sidecar.tokens() != tokens {
            let n = sidecar.tokens().len();
            return Err(Error::corrupt(
                "tokens",
                format_args!("{n}, of another state"),
                "those of the slot file",
            ));
        }
        let mut of_sidecar = Vec::new();
        let (plan, appendices) = context.read_slot(sidecar, seq, expected, &mut of_sidecar)?;
        let driver = read_driver(sidecar, appendices.draft.as_ref(), &mut of_sidecar);
        notes.extend(of_sidecar.into_iter().map(|note| format!("sidecar: {note}")));
        // As many as in an appendix, where it is a blob.
        let bytes = SEQ_BLOB_HEADER_LEN + (plan.end.offset() - sidecar.state_start());
        Ok(DraftRestore { file: sidecar, plan, bytes, driver })
    };
    plan().map_err(|error| format!("sidecar {}: {}", sidecar.path().display(), sidecar.failed(error)))
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
