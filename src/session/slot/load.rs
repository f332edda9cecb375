//! Loading a slot file: everything is read and checked before the target changes; then nothing but the draft can be missing.

use std::ops::Range;
use std::path::Path;

use super::appendices::{Appendices, Found};
use super::expected::{Expected, Unrecorded};
use super::verifier::Verifier;
use super::{DraftOutcome, LoadedSlot, SlotLoadParams, Verify, sidecar_path};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, DraftState, FileKind, Identity, SEQ_BLOB_HEADER_LEN, read_seq_blob_header};
use crate::memory::{Kept, MemoryPlan};
use crate::session::{StateFile, failed_restore};
use crate::state::Input;
use crate::storage::ProgressCallback;
use crate::types::{PosRange, Seq, SeqId, Token};

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
    /// [`Error::Corrupt`] for header, tokens or memory state that are not what was saved; either for what the file is required to
    /// have. Both contexts are unchanged then.
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
        let mut progress = self.progress.take();
        let slot = self.load_slot_telling(path, dest, params, unrecorded, &mut progress);
        self.progress = self.progress.take().or(progress);
        slot
    }

    /// `progress`, the context's own, hears of one thing: of the verification if all is verified, or else of the restore, for
    /// which it goes back to the context. What it cancels changes nothing.
    fn load_slot_telling(
        &mut self,
        path: &Path,
        dest: SeqId,
        params: SlotLoadParams<'_>,
        unrecorded: Unrecorded,
        progress: &mut Option<ProgressCallback>,
    ) -> Result<LoadedSlot> {
        let SlotLoadParams { n_token_capacity, n_ctx_checkpoints, draft, identity, verify, p1, require } =
            params;
        let range = PosRange { p0: 0, p1: p1.map_or(i64::MAX, i64::from) };
        let seq = self.seq(dest)?;
        let mut draft = draft.map(|(context, seq_id)| Ok((context.seq(seq_id)?, context))).transpose()?;
        let mut expected = Expected::new(identity, verify, require)?;
        (expected.range, expected.unrecorded) = (range, unrecorded);
        let file = StateFile::open(path, FileKind::Sequence, n_token_capacity)?;
        let failed = |error| failed_restore(&file, FileKind::Sequence, error);

        let mut notes = Vec::new();
        let mut verifier = expected.verifier(self.transfer.threads, progress.as_mut());
        let (plan, appendices) =
            self.read_slot(&file, seq, &expected, &mut verifier, &mut notes).map_err(failed)?;
        if !verifier.finish().map_err(failed)? {
            self.progress = progress.take();
        }
        let end = StateEnd { offset: plan.end.offset(), kept: plan.kept() };
        let (mut slot, blob) = read_loaded(&file, end, appendices, &expected, n_ctx_checkpoints, notes);
        let sidecar = if blob.is_none() { open_sidecar(path) } else { None };
        let draft_restore = {
            let draft = draft.as_ref().map(|(seq, context)| (*seq, &**context));
            match (blob, &sidecar) {
                (Some(blob), _) => plan_draft(&file, blob, range, draft).map(Some),
                (None, Some(Ok(sidecar))) => {
                    plan_sidecar(sidecar, (file.tokens(), end.kept), draft, &expected, &mut slot.notes)
                        .map(Some)
                }
                (None, Some(Err(reason))) => Err(reason.clone()),
                (None, None) => Ok(None),
            }
        };

        self.commit_file(&file, &plan).map_err(failed)?;

        let mut converted = self.memory.state_notes(&plan);
        slot.draft = match (draft_restore, &mut draft) {
            (Ok(Some(restore)), Some((_, context))) => {
                slot.driver = restore.driver.or(slot.driver);
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
        if !matches!(slot.draft, DraftOutcome::Restored(_))
            && let Some((seq, context)) = draft
        {
            context.seq_rm(seq.id(), -1, -1)?;
        }
        slot.finish(&file);
        slot.notes.append(&mut converted);
        drop(plan);
        Ok(LoadedSlot { tokens: file.into_tokens(), ..slot })
    }

    /// Reads and checks all but what the appendices hold. Changes nothing.
    fn read_slot<'f>(
        &self,
        file: &'f StateFile,
        seq: Seq,
        expected: &Expected,
        verifier: &mut Verifier<'_>,
        notes: &mut Vec<String>,
    ) -> Result<(MemoryPlan<'f>, Appendices)> {
        let integrity = expected.at_end(file, Some(self), verifier, notes)?;
        let plan = self.plan_file_range(&file.source(), seq, expected.range, false)?;
        let appendices = expected.behind(file, plan.end.offset(), integrity, Some(self), verifier, notes)?;
        Ok((plan, appendices))
    }
}

/// The end of a memory state, and what is restored of it.
#[derive(Clone, Copy)]
pub(super) struct StateEnd {
    pub offset: u64,
    pub kept: Kept,
}

/// What a load gives beside the states of target and draft and the tokens; and where the draft's state is, if the file has one.
pub(super) fn read_loaded(
    file: &StateFile,
    end: StateEnd,
    appendices: Appendices,
    expected: &Expected,
    n_ctx_checkpoints: usize,
    mut notes: Vec<String>,
) -> (LoadedSlot, Option<Range<u64>>) {
    let append_start = appendices.append_start(end.offset);
    let Appendices { checkpoints: mut all, draft, integrity, .. } = appendices;
    let n_checkpoints_in_file = all.len();
    leave_out_behind(expected.range, &mut all, &mut notes);
    let checkpoints = read_checkpoints(file, &all, n_ctx_checkpoints, &mut notes);
    let driver = read_driver(file, draft.as_ref(), end.kept, &mut notes);
    let (verified, identity) = match integrity {
        Some(Found { integrity, .. }) => (expected.verify, integrity.identity),
        None => (Verify::None, Identity::default()),
    };
    let slot = LoadedSlot {
        tokens: Vec::new(),
        kept: end.kept,
        target_bytes: end.offset - file.state_start(),
        append_start,
        checkpoints,
        n_checkpoints_in_file,
        draft: DraftOutcome::Absent,
        driver,
        verified,
        identity,
        notes,
    };
    (slot, draft.map(|state| state.draft).filter(|blob| !blob.is_empty()))
}

impl LoadedSlot {
    /// Says in the log what is amiss. The driver's state goes with the draft's.
    pub(super) fn finish(&mut self, file: &StateFile) {
        for note in &self.notes {
            log::warn!("{}: {note}", file.path().display());
        }
        if matches!(self.draft, DraftOutcome::Dropped(_)) {
            self.driver = None;
        }
    }
}

/// The sidecar of a slot file, if there is one.
fn open_sidecar(path: &Path) -> Option<Result<StateFile, String>> {
    let sidecar = sidecar_path(path).ok().filter(|sidecar| sidecar.exists())?;
    Some(
        StateFile::open(&sidecar, FileKind::Sequence, usize::MAX)
            .map_err(|error| of_sidecar(&sidecar, &error)),
    )
}

fn of_sidecar(path: &Path, error: &Error) -> String {
    format!("sidecar {}: {error}", path.display())
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

/// What a load of the sidecar would do to the draft's sequence. Its tokens say whether it belongs to a slot file with `tokens`, of
/// whose state `kept` is restored.
///
/// # Errors
/// The reason to drop the state.
fn plan_sidecar<'f>(
    sidecar: &'f StateFile,
    (tokens, kept): (&[Token], Kept),
    draft: Option<(Seq, &Context)>,
    expected: &Expected,
    notes: &mut Vec<String>,
) -> Result<DraftRestore<'f>, String> {
    let mut plan = || {
        let (seq, context) = draft.ok_or_else(no_draft_context)?;
        if let Some(differ) = first_difference(sidecar.tokens(), tokens) {
            return Err(differ);
        }
        let mut of_sidecar = Vec::new();
        let mut verifier = expected.verifier(context.transfer.threads, None);
        let (plan, appendices) = context.read_slot(sidecar, seq, expected, &mut verifier, &mut of_sidecar)?;
        let driver = read_driver(sidecar, appendices.draft.as_ref(), kept, &mut of_sidecar);
        notes.extend(of_sidecar.into_iter().map(|note| format!("sidecar: {note}")));
        // As many as in an appendix, where it is a blob.
        let bytes = SEQ_BLOB_HEADER_LEN + (plan.end.offset() - sidecar.state_start());
        Ok(DraftRestore { file: sidecar, plan, bytes, driver })
    };
    plan().map_err(|error| of_sidecar(sidecar.path(), &sidecar.failed(error)))
}

/// Says where the tokens of a sidecar are others than those of its slot file; what they are is the user's.
fn first_difference(sidecar: &[Token], slot: &[Token]) -> Option<Error> {
    if let Some(at) = sidecar.iter().zip(slot).position(|(of_sidecar, of_slot)| of_sidecar != of_slot) {
        let got = format_args!("of another state from the one at {at} on");
        return Some(Error::corrupt("tokens", got, "those of the slot file"));
    }
    let got = format_args!("{}, of another state", sidecar.len());
    let expected = format_args!("{}, that of the slot file", slot.len());
    (sidecar.len() != slot.len()).then(|| Error::corrupt("number of tokens", got, expected))
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
    // Who takes none has other ways to read them.
    if first > 0 && n > 0 {
        notes.push(format!("{first} of {} checkpoints are left out: {n} are kept", all.len()));
    }
    all[first..].iter().map(read).collect::<Result<_>>().unwrap_or_else(|error| {
        notes.push(format!("checkpoints are ignored: {}", file.failed(error)));
        Vec::new()
    })
}

/// The state of the speculative driver, which is of the end of the target's sequence and of nothing else.
fn read_driver(
    file: &StateFile,
    state: Option<&DraftState<Range<u64>>>,
    kept: Kept,
    notes: &mut Vec<String>,
) -> Option<Vec<u8>> {
    let range = &state?.driver;
    if range.is_empty() {
        return None;
    }
    if kept.n_cut > 0 {
        let reason = "it has seen positions that are cut off";
        notes.push(format!("the state of the speculative driver is left out: {reason}"));
        return None;
    }
    read_blob(file, range)
        .inspect_err(|error| notes.push(format!("the state of the speculative driver is ignored: {error}")))
        .ok()
}
