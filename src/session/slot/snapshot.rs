//! A slot as it is now, to be written to a file while the contexts go on.

use std::path::{Path, PathBuf};

use super::SlotContents;
use super::geometry::geometry_of;
use super::save::{Contents, SeqState, SlotFiles};
use crate::context::{Context, Snapshot};
use crate::error::Result;
use crate::format::{Checkpoint, Checkpoints, FileKind, Identity, SectionGeometry};
use crate::session::{Job, file_record};
use crate::storage::{ProgressCallback, Threads};
use crate::types::{SeqId, StateFlags, Token};

/// A sequence as it was, and what its states depend on.
#[derive(Clone, Debug)]
struct SeqSnapshot {
    state: Snapshot,
    geometry: Vec<SectionGeometry>,
}

impl SeqSnapshot {
    fn of(context: &mut Context, seq_id: SeqId) -> Result<Self> {
        Ok(Self { state: context.seq_snapshot(seq_id, StateFlags::empty())?, geometry: geometry_of(context) })
    }

    fn state(&self) -> Result<SeqState<'_>> {
        SeqState::of_snapshot(&self.state, &self.geometry)
    }
}

/// All of a slot as it was when it was taken: tensors are copied where the caches are, everything else in host memory. It belongs
/// to nobody, as a [`Snapshot`].
#[derive(Clone, Debug)]
pub struct SlotSnapshot {
    target: SeqSnapshot,
    draft: Option<SeqSnapshot>,
    tokens: Vec<Token>,
    checkpoints: Vec<Checkpoint<Vec<u8>>>,
    driver: Vec<u8>,
    identity: Identity,
    sidecar: bool,
}

impl Context {
    /// Copies a slot as it is now: sequence `seq_id` of this context, and `contents`.
    ///
    /// # Errors
    /// As [`Context::seq_snapshot`], for the draft's context too.
    pub fn slot_snapshot(&mut self, seq_id: SeqId, contents: SlotContents<'_>) -> Result<SlotSnapshot> {
        let SlotContents { tokens, checkpoints, draft, driver, identity, sidecar } = contents;
        let draft = draft.map(|(context, seq_id)| SeqSnapshot::of(context, seq_id)).transpose()?;
        let owned = |checkpoint: Checkpoint<&[u8]>| Checkpoint {
            span: checkpoint.span,
            target: checkpoint.target.to_vec(),
            draft: checkpoint.draft.to_vec(),
            driver: checkpoint.driver.to_vec(),
        };
        Ok(SlotSnapshot {
            target: SeqSnapshot::of(self, seq_id)?,
            draft,
            tokens: tokens.to_vec(),
            checkpoints: checkpoints.into_iter().map(owned).collect(),
            driver: driver.to_vec(),
            identity,
            sidecar,
        })
    }
}

impl SlotSnapshot {
    pub(in crate::session) fn files(&self) -> Result<SlotFiles<'_>> {
        let contents = Contents {
            head: file_record(FileKind::Sequence, &self.tokens)?,
            target: self.target.state()?,
            checkpoints: Checkpoints(self.checkpoints.iter().map(borrowed).collect()),
            draft: self.draft.as_ref().map(SeqSnapshot::state).transpose()?,
            driver: &self.driver,
            identity: &self.identity,
        };
        SlotFiles::new(contents, &self.tokens, self.sidecar)
    }

    /// Bytes of its files.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for what no file can hold, as [`Context::slot_save`].
    pub fn size(&self) -> Result<u64> {
        self.files()?.size()
    }

    /// The same snapshot, whose bytes are copied on this many threads.
    #[must_use]
    pub fn with_threads(mut self, threads: Threads) -> Self {
        self.target.state = self.target.state.with_threads(threads);
        self.draft = self.draft.map(|SeqSnapshot { state, geometry }| SeqSnapshot {
            state: state.with_threads(threads),
            geometry,
        });
        self
    }

    /// Writes what [`Context::slot_save`] would have written when it was taken; returns the same. With `sync` it waits for the
    /// disk.
    ///
    /// # Errors
    /// As [`Context::slot_save`]; a file that was there is untouched then.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        sync: bool,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<u64> {
        self.files()?.save(path.as_ref(), sync, progress)
    }

    /// As [`SlotSnapshot::save`], on a thread of its own, which also calls `progress`.
    ///
    /// # Errors
    /// As [`SlotSnapshot::size`]; [`Error::Io`](crate::Error::Io) if there is no thread to be had.
    pub fn save_in_background(
        self,
        path: impl Into<PathBuf>,
        sync: bool,
        progress: Option<ProgressCallback>,
    ) -> Result<Job<u64>> {
        let (path, total) = (path.into(), self.size()?);
        Job::spawn(0, total, progress, move |mut progress| self.save(path, sync, Some(&mut progress)))
    }
}

fn borrowed(checkpoint: &Checkpoint<Vec<u8>>) -> Checkpoint<&[u8]> {
    let Checkpoint { span, target, draft, driver } = checkpoint;
    Checkpoint { span: *span, target, draft, driver }
}
