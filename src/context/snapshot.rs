//! Snapshots: states that are copied where the cache is, as many as memory has room for.

use std::sync::Arc;

use super::{Context, fitting};
use crate::error::{Error, Result};
use crate::format::{self, SEQ_BLOB_HEADER_LEN};
use crate::memory::Scope;
use crate::state::{self, RecordSink, Sink, SliceSink, Source};
use crate::storage::{ProgressCallback, Threads, Transfer};
use crate::types::{SeqId, StateFlags};

/// The state of a sequence, or of the whole context, at the time when it was taken.
///
/// Its tensors are in the memory that the cache is in, its bytes are those that a save would have written then. It belongs to
/// nobody: it outlives the context, moves between threads, and can be restored any number of times. A clone is the same snapshot.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) state: Arc<state::Snapshot>,
    /// `None`: the whole context.
    seq_id: Option<SeqId>,
    flags: StateFlags,
    /// Its memory is touched by nobody else's work, so there are no streams to wait for.
    pub(crate) transfer: Transfer,
}

impl Snapshot {
    /// The sequence that it was taken of; `None`: the whole context.
    #[must_use]
    pub fn seq_id(&self) -> Option<SeqId> {
        self.seq_id
    }

    /// The flags that it was taken with.
    #[must_use]
    pub fn flags(&self) -> StateFlags {
        self.flags
    }

    /// Bytes that [`Snapshot::get_data`] writes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.state.bytes() + self.header_len()
    }

    /// Bytes that it takes in the memory of devices.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.state.tensors().device_bytes()
    }

    /// The same snapshot, whose bytes are copied on this many threads.
    #[must_use]
    pub fn with_threads(mut self, threads: Threads) -> Self {
        self.transfer.threads = threads;
        self
    }

    fn header_len(&self) -> u64 {
        if self.seq_id.is_some() { SEQ_BLOB_HEADER_LEN } else { 0 }
    }

    /// Writes the state to the start of `dst`, with the bytes of [`Context::state_seq_get_data`] or
    /// [`Context::state_get_data`]; returns its size.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] (`dst` is untouched then), [`Error::Device`], [`Error::Cancelled`].
    pub fn get_data(&self, dst: &mut [u8], progress: Option<&mut ProgressCallback>) -> Result<usize> {
        let mut sink = SliceSink::new(fitting(dst, self.size())?);
        if let Some(seq_id) = self.seq_id {
            sink.write(&format::seq_blob_header(seq_id))?;
        }
        self.state.replay(&mut sink)?;
        sink.finish_reporting(&self.transfer, progress)
    }
}

impl Context {
    /// Copies the state of a sequence as it is now. On devices nothing leaves them, and only the caller's streams wait for the
    /// copy. [`StateFlags::ON_DEVICE`] makes no difference.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::ShiftFailed`], [`Error::OutOfMemory`], [`Error::Device`].
    pub fn seq_snapshot(&mut self, seq_id: SeqId, flags: StateFlags) -> Result<Snapshot> {
        let flags = flags.difference(StateFlags::ON_DEVICE);
        let params = self.write_params(Scope::Seq(self.seq(seq_id)?), flags);
        self.apply_shifts_before(params)?;
        let mut record = RecordSink::default();
        self.memory.state_write(&mut record, params)?;
        let state = record.snapshot(&self.transfer)?;
        Ok(self.snapshot_of(state, Some(seq_id), flags))
    }

    /// Copies the state of the whole context as it is now.
    ///
    /// # Errors
    /// As [`Context::seq_snapshot`].
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.apply_shifts_before(self.write_params(Scope::Whole, StateFlags::empty()))?;
        let mut record = RecordSink::default();
        self.write_whole(&mut record)?;
        let state = record.snapshot(&self.transfer)?;
        Ok(self.snapshot_of(state, None, StateFlags::empty()))
    }

    fn snapshot_of(&self, state: state::Snapshot, seq_id: Option<SeqId>, flags: StateFlags) -> Snapshot {
        Snapshot { state: Arc::new(state), seq_id, flags, transfer: self.transfer.detached() }
    }

    /// Replaces sequence `dest` by the state in a snapshot of a sequence, of this context or of another one with the same
    /// model.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a snapshot of a whole context, and as [`Context::state_seq_set_data`].
    pub fn seq_restore(&mut self, snapshot: &Snapshot, dest: SeqId) -> Result<()> {
        if snapshot.seq_id.is_none() {
            return Err(Error::arg("snapshot", "is of a whole context, which is no state of a sequence"));
        }
        let scope = Scope::Seq(self.seq(dest)?);
        let source = Source::snapshot(&snapshot.state);
        let plan = self.memory.state_plan(&source, snapshot.flags, self.read_params(scope))?;
        self.changed();
        self.memory.state_commit(&plan, &self.transfer, None)
    }

    /// Replaces all sequences by those in a snapshot of a whole context.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a snapshot of a sequence, and as [`Context::state_set_data`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        if snapshot.seq_id.is_some() {
            return Err(Error::arg("snapshot", "is of a sequence: restore it as one"));
        }
        let plan = self.plan_whole(Source::snapshot(&snapshot.state))?;
        self.changed();
        self.memory.state_commit(&plan, &self.transfer, None)
    }
}
