//! A state that a server composes of sections of its own and of attention caches that kvstate views.
//!
//! Everything is collected first: a save copies the tensors of all sections in one batch when all of them have
//! been named, and a restore reads, checks and places every section before the first change.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use super::StateFile;
use super::slot::OpenedSlot;
use crate::error::{Error, Result};
use crate::format::{self, Cursor, FileKind, SEQ_BLOB_HEADER_LEN};
use crate::memory::{Kept, KvView, SlotInfos, ViewPlan};
use crate::state::{CountSink, DeviceSink, DeviceState, Input, RecordSink, Sink, SliceSink, Source};
use crate::storage::{
    self, CallerStream, CellMap, Plane, ProgressCallback, Region, Scatter, TensorBytes, Threads, Transfer,
};
use crate::types::{SeqId, StateFlags, Token};

/// A state on its way out. `'a`: the memory of the tensors.
#[derive(Debug)]
pub struct StateWriter<'a> {
    /// -1: the whole context.
    pub(super) seq_id: SeqId,
    pub(super) record: RecordSink<'a>,
    pub(super) transfer: Transfer,
    pub(super) progress: Option<ProgressCallback>,
}

impl<'a> StateWriter<'a> {
    /// Collects the state of a sequence, or with -1 of a whole context.
    #[must_use]
    pub fn new(seq_id: SeqId) -> Self {
        Self { seq_id, record: RecordSink::default(), transfer: Transfer::shared(), progress: None }
    }

    /// Copies on this many threads.
    pub fn set_threads(&mut self, threads: Threads) {
        self.transfer.threads = threads;
    }

    /// Names the stream on which the caller's work on a device runs; see [`crate::Context::set_stream`].
    pub fn set_stream(&mut self, stream: CallerStream) {
        self.transfer.set_stream(stream);
    }

    /// Calls `progress` while a file is saved.
    pub fn set_progress(&mut self, progress: Option<ProgressCallback>) {
        self.progress = progress;
    }

    /// Takes metadata.
    ///
    /// # Errors
    /// None at present.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.record.write(bytes)
    }

    /// Takes the bytes of a plane of one cell; they are copied when the state is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the plane has another number of cells.
    pub fn write_tensor(&mut self, plane: &'a Plane) -> Result<()> {
        self.record.write_tensor(Region::new(plane, &Arc::new(CellMap::of_run(0, 1)?))?)
    }

    /// Takes an attention section.
    ///
    /// # Errors
    /// As [`KvView::state_write`].
    pub fn write_kv_cache(&mut self, view: &'a KvView, flags: StateFlags) -> Result<()> {
        view.state_write(&mut self.record, self.seq_id, flags)
    }

    /// Bytes that [`StateWriter::get_data`] writes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.record.bytes() + self.blob_header().len() as u64
    }

    /// Writes the state to the start of `dst`: a sequence's with its header, as `llama_state_seq_get_data` does.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] (`dst` is untouched then), and what the owner of a tensor returns.
    pub fn get_data(&self, dst: &mut [u8]) -> Result<usize> {
        let (need, size) = (self.size(), dst.len() as u64);
        if need > size {
            return Err(Error::BufferTooSmall { need, size });
        }
        let mut sink = SliceSink::new(dst);
        sink.write(&self.blob_header())?;
        self.record.replay(&mut sink)?;
        sink.finish(&self.transfer)
    }

    /// Bytes that [`StateWriter::get_on_device`] writes.
    ///
    /// # Errors
    /// None at present.
    pub fn metadata_size(&self) -> Result<u64> {
        let mut sink = CountSink::default();
        self.record.replay(&mut sink)?;
        Ok(sink.metadata + SEQ_BLOB_HEADER_LEN)
    }

    /// Writes a sequence's metadata to the start of `dst`, as a state with [`StateFlags::ON_DEVICE`]; the tensors
    /// are in what it returns beside the bytes written.
    ///
    /// # Errors
    /// As [`StateWriter::get_data`], and [`Error::InvalidArgument`] for a whole context.
    pub fn get_on_device(&self, dst: &mut [u8], flags: StateFlags) -> Result<(usize, DeviceState)> {
        if self.seq_id == -1 {
            return Err(Error::arg("seq_id", "-1, a whole context has no ON_DEVICE state"));
        }
        let (need, size) = (self.metadata_size()?, dst.len() as u64);
        if need > size {
            return Err(Error::BufferTooSmall { need, size });
        }
        let mut sink = DeviceSink::new(dst);
        sink.write(&DeviceState::header(self.seq_id))?;
        self.record.replay(&mut sink)?;
        let (len, tensors) = sink.finish(&self.transfer)?;
        Ok((len, DeviceState::new(dst[..len].to_vec(), tensors, flags)))
    }

    /// Writes the state and a token list to a file, beside it, then renamed over it; returns the file's size. With
    /// `sync` it waits for the disk before.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Cancelled`], and what the owner of a tensor returns; a file that was there is untouched then.
    pub fn save_file(&mut self, path: impl AsRef<Path>, tokens: &[Token], sync: bool) -> Result<u64> {
        let path = path.as_ref();
        let kind = if self.seq_id == -1 { FileKind::Session } else { FileKind::Sequence };
        let mut record = super::file_record(kind, tokens)?;
        self.record.replay(&mut record)?;
        super::replace_file(path, &record, sync, &self.transfer, self.progress.as_mut())
    }

    fn blob_header(&self) -> Vec<u8> {
        if self.seq_id == -1 { Vec::new() } else { format::seq_blob_header(self.seq_id).to_vec() }
    }
}

/// A step of a restore that was planned.
#[derive(Debug)]
struct Planned<'a> {
    /// Offset of the section.
    start: u64,
    /// What comes behind it.
    end: Source<'a>,
    plan: ViewPlan<'a>,
}

/// What waits for the batch.
#[derive(Debug)]
enum Pending<'a> {
    Kv(Box<KvView>, ViewPlan<'a>),
    Tensor(Plane, TensorBytes<'a>),
}

/// A state on its way in. `'a`: the bytes of the state.
///
/// First every attention section is planned, in order, and what lies between them is read or skipped; nothing
/// changes meanwhile. Then, from [`StateReader::rewind`] on, the same sections are read in the same order: cells
/// are set at once, tensors wait for [`StateReader::finish`], which alone says that the state has been restored.
#[derive(Debug)]
pub struct StateReader<'a> {
    start: Source<'a>,
    source: Source<'a>,
    /// Since the rewind, what was planned is read.
    pub(super) reading: bool,
    /// Sections that were planned, those that have been read since included.
    n_planned: usize,
    planned: VecDeque<Planned<'a>>,
    pending: Vec<Pending<'a>>,
    /// What failed, and is not made good by a later call: the state can no longer be finished.
    failed: Option<String>,
    /// Full-attention sections of partial states, which older llama.cpp wrote, are read and dropped.
    legacy_partial: bool,
    pub(super) transfer: Transfer,
    /// Where the state is, if it is in a file.
    pub(super) file: Option<&'a StateFile>,
    /// What else that file holds, if it is read as a slot.
    pub(super) slot: Option<OpenedSlot>,
}

impl<'a> StateReader<'a> {
    /// Reads the state of a sequence as `llama_state_seq_get_data` writes it.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Corrupt`] if it does not begin like one.
    pub fn of_seq(src: &'a [u8]) -> Result<Self> {
        let mut metadata = Cursor::new(src);
        format::read_seq_blob_header(&mut metadata)?;
        Ok(Self::of_source(Source::blob(metadata)))
    }

    /// Reads a sequence's `ON_DEVICE` state, whose metadata is `blob`.
    ///
    /// # Errors
    /// [`Error::NoDeviceState`] if `state` is another blob's, or was taken with other flags.
    pub fn of_device(blob: &[u8], flags: StateFlags, state: &'a DeviceState) -> Result<Self> {
        state.source(blob, flags).map(Self::of_source)
    }

    /// Reads the metadata of a sequence's `ON_DEVICE` state, whose tensors somebody else keeps: it can be planned,
    /// not read.
    ///
    /// # Errors
    /// As [`StateReader::of_seq`].
    pub fn of_metadata(metadata: &'a [u8]) -> Result<Self> {
        let Self { source, .. } = Self::of_seq(metadata)?;
        Ok(Self::of_source(source.without_tensors()))
    }

    /// Reads the state of a whole context.
    #[must_use]
    pub fn of_whole(src: &'a [u8]) -> Self {
        Self::of_source(Source::blob(Cursor::new(src)))
    }

    /// Reads the state in a file.
    #[must_use]
    pub fn of_file(file: &'a StateFile) -> Self {
        Self { file: Some(file), ..Self::of_source(file.source()) }
    }

    fn of_source(source: Source<'a>) -> Self {
        Self {
            start: source.clone(),
            source,
            reading: false,
            n_planned: 0,
            planned: VecDeque::new(),
            pending: Vec::new(),
            failed: None,
            legacy_partial: false,
            transfer: Transfer::shared(),
            file: None,
            slot: None,
        }
    }

    /// An error of reading the state, with the name of the file.
    fn named(&self, error: Error) -> Error {
        match self.file {
            Some(file) => file.failed(error),
            None => error,
        }
    }

    /// Copies on this many threads.
    pub fn set_threads(&mut self, threads: Threads) {
        self.transfer.threads = threads;
    }

    /// Names the stream on which the caller's work on a device runs; see [`crate::Context::set_stream`].
    pub fn set_stream(&mut self, stream: CallerStream) {
        self.transfer.set_stream(stream);
    }

    /// Bytes consumed, header included.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.source.offset()
    }

    /// Bytes that are left.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.source.left()
    }

    /// What will be taken by the views that were planned.
    pub(super) fn kept(&self) -> Kept {
        Kept::of_views(self.planned.iter().map(|planned| &planned.plan))
    }

    /// Goes back to the first section, to read what was planned.
    pub fn rewind(&mut self) {
        self.source = self.start.clone();
        self.reading = true;
    }

    /// Starts over: forgets what was planned and read. With `legacy_partial`, full-attention sections of partial states
    /// are expected: llama.cpp wrote them until October 2026.
    pub fn restart(&mut self, legacy_partial: bool) {
        *self = Self {
            legacy_partial,
            transfer: self.transfer.clone(),
            file: self.file,
            slot: self.slot.take(),
            ..Self::of_source(self.start.clone())
        };
    }

    /// The next bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`].
    pub fn read(&mut self, out: &mut [u8]) -> Result<()> {
        Input::read(&mut self.source, "metadata", out)
    }

    /// Bytes of tensors that were planned so far, of a state whose tensors somebody else keeps; otherwise 0.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.source.tensors_elsewhere().unwrap_or(0)
    }

    /// Passes over `n` bytes of a tensor.
    ///
    /// # Errors
    /// [`Error::Truncated`].
    pub fn skip_tensor(&mut self, n: u64) -> Result<()> {
        self.source.tensor("tensor", n).map(drop)
    }

    /// The next bytes go to a plane of one cell, with the batch.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::InvalidArgument`] if the tensors are not here, or before
    /// [`StateReader::rewind`].
    pub fn read_tensor(&mut self, plane: Plane) -> Result<()> {
        self.check_tensors_are_here()?;
        if !self.reading {
            let reason = "tensors are read after the rewind: while the state is planned, they are skipped";
            return Err(Error::arg("reader", reason));
        }
        let bytes = self.source.tensor("tensor", plane.shape().cell_bytes())?;
        self.pending.push(Pending::Tensor(plane, bytes));
        Ok(())
    }

    /// Reads, checks and places the next section. Changes nothing. Returns the cells found, by stream.
    ///
    /// # Errors
    /// Every way in which the bytes may not be a state of the cache, [`Error::NoSpace`], [`Error::SeqId`], what
    /// the owner's calls return; [`Error::OutOfMemory`], [`Error::Device`] and [`Error::StreamCapturing`] if the copies to a
    /// device would lack something; [`Error::InvalidArgument`] after [`StateReader::rewind`].
    pub fn plan_kv_cache(
        &mut self,
        view: &KvView,
        seq_id: SeqId,
        flags: StateFlags,
        sinfos_in: Option<&SlotInfos>,
    ) -> Result<SlotInfos> {
        if self.reading {
            return Err(Error::arg("reader", "it was rewound to be read: restart it to plan again"));
        }
        let mut source = self.source.clone();
        // Until a section is planned here after all, there is nothing to finish.
        self.failed = Some(format!("section {} could not be planned", view.name()));
        let plan = view.state_plan(&mut source, seq_id, flags, sinfos_in, self.legacy_partial);
        let plan = plan.map_err(|error| self.named(error))?;
        if self.source.tensors_elsewhere().is_none() {
            storage::reserve(&view.placed(&plan), &self.transfer)?;
        }
        self.failed = None;
        let start = std::mem::replace(&mut self.source, source).offset();
        let slots = plan.slots.clone();
        self.planned.push_back(Planned { start, end: self.source.clone(), plan });
        self.n_planned += 1;
        Ok(slots)
    }

    /// Does what was planned for the next section: sets its cells; its tensors wait for the batch. Returns the
    /// cells, by stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the next section that was planned is another one, or another cache's, and
    /// [`Error::StalePlan`] if its cells are no longer to be had: nothing has changed then. What the owner's calls
    /// return: if that was its apply or clear, the destination is what they have left of it, and only
    /// [`StateReader::restart`] makes the reader usable again.
    pub fn read_kv_cache(&mut self, mut view: KvView) -> Result<SlotInfos> {
        self.check_tensors_are_here()?;
        self.check_not_failed()?;
        let is_here = |next: &&Planned<'_>| self.reading && next.start == self.source.offset();
        let mut next = None;
        if let Some(planned) = self.planned.front().filter(is_here).filter(|next| next.plan.is_of(&view)) {
            view.check_plan(&planned.plan)?;
            next = self.planned.pop_front();
        }
        let Planned { end, plan, .. } = next.ok_or_else(|| {
            Error::arg("view", format!("section {} is not the next that was planned", view.name()))
        })?;
        self.source = end;
        view.commit_cells(&plan).inspect_err(|_| {
            self.failed = Some(format!("the cells of section {} could not be set", view.name()));
        })?;
        let slots = plan.slots.clone();
        self.pending.push(Pending::Kv(Box::new(view), plan));
        Ok(slots)
    }

    fn check_not_failed(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |failed| {
            Err(Error::arg("reader", format!("{failed}: restart it to begin again")))
        })
    }

    fn check_tensors_are_here(&self) -> Result<()> {
        if self.source.tensors_elsewhere().is_some() {
            let reason = "the tensors of this state are not here: it can be planned only";
            return Err(Error::arg("reader", reason));
        }
        Ok(())
    }

    /// Copies the tensors of everything that was read, in one batch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if not all that was planned has been read, if planning or reading has failed, or
    /// if nothing of the state was looked at. What the owner of a tensor returns. In each case cells may be set whose
    /// data is not there: empty them.
    pub fn finish(&mut self) -> Result<()> {
        self.check_not_failed()?;
        if let Some(next) = self.planned.front() {
            let (i, n) = (self.n_planned - self.planned.len() + 1, self.n_planned);
            let reason = format!("section {i} of {n} was planned and not read ({})", next.plan.name());
            return Err(Error::arg("reader", reason));
        }
        // A state without sections has nothing to plan, and one of the caller's own sections is only read.
        if self.n_planned == 0 && self.offset() == self.start.offset() && self.left() > 0 {
            let reason = format!("nothing was planned, and the state has {} bytes", self.left());
            return Err(Error::arg("reader", reason));
        }
        let one = CellMap::of_run(0, 1)?;
        let mut batch = Vec::new();
        for pending in &mut self.pending {
            match pending {
                Pending::Kv(view, plan) => batch.extend(view.scatter(plan)),
                Pending::Tensor(plane, src) => {
                    batch.push(Scatter { plane, map: &one, n_src: 1, src: (*src).into() });
                }
            }
        }
        let scattered = storage::scatter(&mut batch, &self.transfer, None);
        self.pending.clear();
        scattered.map_err(|error| {
            self.failed = Some("its tensors could not all be copied".into());
            self.named(error)
        })
    }
}
