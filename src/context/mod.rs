//! A context: the memory of one model's sequences, and the states that are taken of it.

mod checkpoints;
mod engine;
mod range;
mod rewind;
mod shift;
mod slot;
mod snapshot;

pub use checkpoints::{Checkpoint, CheckpointMemory, Checkpoints, CheckpointsParams, Resumed, Verdict};
pub use shift::{PendingShift, Shift, ShiftCallback};
pub use slot::{Slot, UbatchToken};
pub use snapshot::Snapshot;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::format::Cursor;
use crate::memory::{
    Convert, KvCache, LegacyRotation, Memory, MemoryPlan, ReadParams, Scope, SectionKind, SectionParams,
    Streams, WriteParams,
};
use crate::state::{CountSink, DeviceState, Input, OnDevices, Sink, SliceSink, Source};
use crate::storage::{
    CallerStream, ProgressCallback, Staging, StagingParams, StagingReport, TensorCopies, Threads, Transfer,
};
use crate::types::{Pos, PosRange, Seq, SeqId, StateFlags};
use shift::Shifter;

/// What a context is made of.
#[derive(Debug)]
pub struct ContextParams {
    /// Sequences, `1..=256`.
    pub n_seq_max: u32,
    /// One stream for all sequences (true), or one stream of `kv_size` cells per sequence.
    pub unified: bool,
    /// Architecture name, written into whole-context states and compared when they are read.
    pub arch: String,
    /// The sections, in write order.
    pub sections: Vec<SectionParams>,
    /// How pending position shifts reach K.
    pub shift: Shift,
    /// What files older than version 4 leave open; see [`LegacyRotation`].
    pub legacy_rotation: Option<LegacyRotation>,
    /// Whether states of other types, or of another rotation (`n_rot_k`, `n_rot_v`), are converted to those of the cache, which
    /// rounds; otherwise they are refused. What loses nothing is always converted: transposed V to rows, and back.
    pub convert_types: bool,
    /// Most masked cells beyond the window that a sequence state without `PARTIAL_ONLY` keeps of an SWA
    /// section. `None`: all, so that the restored sequence can be cut to any prefix.
    pub max_masked_cells: Option<u32>,
    /// Whether a save waits for the disk before the file is renamed into place.
    pub sync_files: bool,
    /// Threads that copy tensors.
    pub threads: Threads,
    /// Called while a file is saved or loaded, which it can cancel: a save leaves the old file then, a load the
    /// context as it was. The bytes that it is told of are those of the file in a save, of the tensors in a load into
    /// free cells; in a load over cells that are in use, those that are brought into memory before the first change.
    pub progress: Option<ProgressCallback>,
    /// Buffers between host and devices.
    pub staging: StagingParams,
}

impl ContextParams {
    /// A unified context of `n_seq_max` sequences that cannot shift positions.
    #[must_use]
    pub fn new(n_seq_max: u32, sections: Vec<SectionParams>) -> Self {
        Self {
            n_seq_max,
            unified: true,
            arch: String::new(),
            sections,
            shift: Shift::None,
            legacy_rotation: None,
            convert_types: false,
            max_masked_cells: None,
            sync_files: true,
            threads: Threads::default(),
            progress: None,
            staging: StagingParams::default(),
        }
    }
}

/// Bytes of memory that a context has taken. Adopted memory is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Planes of the sections in host memory; pages that were never written are no memory yet.
    pub kv_host: u64,
    /// Planes of the sections in the memory of devices.
    pub kv_device: u64,
    /// Tensors of `ON_DEVICE` states in host memory.
    pub device_states_host: u64,
    /// Tensors of `ON_DEVICE` states in the memory of devices.
    pub device_states_device: u64,
    /// Staging buffers.
    pub staging: StagingReport,
}

/// KV cache and states of a model's sequences. One call at a time; may move between threads.
#[derive(Debug)]
pub struct Context {
    /// Tells the slots of two contexts apart.
    id: u64,
    pub(crate) memory: Memory,
    arch: String,
    shifter: Shifter,
    legacy_rotation: Option<LegacyRotation>,
    pub(crate) convert: Convert,
    max_masked_cells: Option<u32>,
    pub(crate) sync_files: bool,
    pub(crate) transfer: Transfer,
    pub(crate) progress: Option<ProgressCallback>,
    /// The one live `ON_DEVICE` state of each sequence.
    device_states: HashMap<SeqId, DeviceState>,
    /// Counts changes of cells, so that a slot knows whether it was prepared for the cache as it is.
    generation: u64,
}

impl Context {
    /// Builds the sections and allocates what is managed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the parameter that does not fit, [`Error::OutOfMemory`].
    pub fn new(params: ContextParams) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let streams = Streams::new(params.n_seq_max, params.unified)?;
        let memory = Memory::new(params.sections, streams)?;
        let staging = Staging::new(params.staging, Some(memory.device_bytes()))?;
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            shifter: Shifter::new(params.shift, &memory)?,
            memory,
            arch: params.arch,
            legacy_rotation: params.legacy_rotation,
            convert: Convert::allowing(params.convert_types),
            max_masked_cells: params.max_masked_cells,
            sync_files: params.sync_files,
            transfer: Transfer::new(params.threads, staging),
            progress: params.progress,
            device_states: HashMap::new(),
            generation: 0,
        })
    }

    /// Number of sequences.
    #[must_use]
    pub fn n_seq_max(&self) -> u32 {
        self.memory.streams().n_seq_max
    }

    /// Number of streams: 1, or one per sequence.
    #[must_use]
    pub fn n_stream(&self) -> u32 {
        self.memory.streams().n_stream
    }

    /// Number of sections.
    #[must_use]
    pub fn n_section(&self) -> usize {
        self.memory.sections().len()
    }

    /// What kind a section is of.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a section that is not there.
    pub fn section_kind(&self, section: usize) -> Result<SectionKind> {
        Ok(self.memory.section(section)?.kind())
    }

    /// Copies on this many threads from now on.
    pub fn set_threads(&mut self, threads: Threads) {
        self.transfer.threads = threads;
    }

    /// Names the stream on which the engine's work on a device runs, from now on: calls that read or write the cache there are
    /// ordered behind it, and it behind them. Without one, that work has to be done before every call.
    pub fn set_stream(&mut self, stream: CallerStream) {
        self.transfer.set_stream(stream);
    }

    /// From now on no stream is named on this device.
    pub fn clear_stream(&mut self, device: i32) {
        self.transfer.clear_stream(device);
    }

    /// The memory that the context has taken.
    #[must_use]
    pub fn memory_usage(&self) -> MemoryUsage {
        let states = || self.device_states.values().map(DeviceState::tensors);
        let device_states_device = states().map(TensorCopies::device_bytes).sum();
        MemoryUsage {
            kv_host: self.memory.allocated(|device| device.is_none()),
            kv_device: self.memory.allocated(|device| device.is_some()),
            device_states_host: states().map(TensorCopies::bytes).sum::<u64>() - device_states_device,
            device_states_device,
            staging: self.transfer.staging.report(),
        }
    }

    /// Frees the staging buffers that are not in use; they come again when they are needed.
    pub fn free_staging(&mut self) {
        self.transfer.staging.free();
    }

    /// Frees the tensors of the live `ON_DEVICE` state of a sequence, if there is one: its blob can no longer be restored.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn drop_device_state(&mut self, seq_id: SeqId) -> Result<()> {
        self.seq(seq_id)?;
        self.device_states.remove(&seq_id);
        Ok(())
    }

    /// Whether a save waits for the disk.
    pub(crate) fn syncs_files(&self) -> bool {
        self.sync_files
    }

    /// Calls `progress` while a file is saved or loaded, from now on.
    pub fn set_progress(&mut self, progress: Option<ProgressCallback>) {
        self.progress = progress;
    }

    /// States what files older than version 4 leave open.
    pub fn set_legacy_rotation(&mut self, rotation: Option<LegacyRotation>) {
        self.legacy_rotation = rotation;
    }

    pub(crate) fn seq(&self, seq_id: SeqId) -> Result<Seq> {
        let n_seq_max = self.n_seq_max();
        Seq::new(seq_id, n_seq_max).ok_or(Error::SeqId { seq_id, n_seq_max })
    }

    fn changed(&mut self) {
        self.generation += 1;
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    // Sequences

    /// Empties every section; with `data` the tensors are zeroed as well. `ON_DEVICE` states survive.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`]; nothing has changed then. If memory of a
    /// device, or memory that is reached through calls of its owner, cannot be zeroed; no cell is used any more all the same.
    pub fn clear(&mut self, data: bool) -> Result<()> {
        if data || self.memory.dsv4().is_some() {
            self.transfer.check_streams(self.memory.devices())?;
        }
        self.changed();
        self.memory.clear(data, &self.transfer)
    }

    /// Removes the positions `[p0, p1)` of a sequence; -1 as `seq_id`, `p0` or `p1` means every sequence, from
    /// the start, to the end. False, and nothing changes in any section, if one cannot remove just that range: a recurrent state
    /// can be given up whole, or go back by up to `n_rs_seq` positions once after a ubatch; attention can remove any range.
    ///
    /// # Errors
    /// [`Error::SeqId`]; nothing has changed then. In a DSV4 memory also [`Error::Device`] if rows cannot be zeroed; they are not
    /// used any more all the same.
    pub fn seq_rm(&mut self, seq_id: SeqId, p0: Pos, p1: Pos) -> Result<bool> {
        let seq = if seq_id < 0 { None } else { Some(self.seq(seq_id)?) };
        self.check_removal()?;
        self.changed();
        self.memory.seq_rm(seq, PosRange::new(p0, p1), &self.transfer)
    }

    /// Rows of a DSV4 memory are zeroed when they are left, in the order of the caller's streams.
    fn check_removal(&self) -> Result<()> {
        if self.memory.dsv4().is_some() { self.transfer.check_streams(self.memory.devices()) } else { Ok(()) }
    }

    /// Whether [`Context::seq_rm`] would remove just that.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn can_seq_rm(&self, seq_id: SeqId, p0: Pos, p1: Pos) -> Result<bool> {
        let seq = if seq_id < 0 { None } else { Some(self.seq(seq_id)?) };
        Ok(self.memory.can_seq_rm(seq, PosRange::new(p0, p1)))
    }

    /// How many positions can be cut off the end of a sequence so that what is left has its states; `None`: any number, as far as
    /// recurrent and compressed states go. [`Context::seq_rm`] answers as llama.cpp does, which is true for up to `n_rs_seq`
    /// positions, though fewer may have been in the last ubatch, and none since a restore.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn max_cut(&self, seq_id: SeqId) -> Result<Option<u32>> {
        Ok(self.memory.max_cut(self.seq(seq_id)?))
    }

    /// Gives the cells of `src` in `[p0, p1)` to `dst` as well, and in recurrent sections its state, whatever the range. Between streams, where nothing can be shared,
    /// the sequence is copied at once and replaces `dst`; the range must hold all of it.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::InvalidArgument`] for part of a sequence between streams; nothing has
    /// changed then.
    pub fn seq_cp(&mut self, src: SeqId, dst: SeqId, p0: Pos, p1: Pos) -> Result<()> {
        let (src, dst) = (self.seq(src)?, self.seq(dst)?);
        if src == dst {
            return Ok(());
        }
        let range = PosRange::new(p0, p1);
        self.memory.check_seq_cp(src, dst, range)?;
        if self.n_stream() > 1 {
            self.transfer.check_streams(self.memory.devices())?;
        }
        self.changed();
        self.memory.seq_cp(src, dst, range, &self.transfer)
    }

    /// Removes every other sequence from the stream of `seq_id`; as in llama.cpp, other streams keep theirs.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn seq_keep(&mut self, seq_id: SeqId) -> Result<()> {
        let seq = self.seq(seq_id)?;
        self.check_removal()?;
        self.changed();
        self.memory.seq_keep(seq, &self.transfer)
    }

    /// Moves the positions `[p0, p1)` of a sequence by `delta`; the rotation of K is pending until it is
    /// applied. Cells whose position falls below 0 are freed; cells shared with other sequences move in all.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::CannotShift`], [`Error::PosOverflow`]; nothing has changed then.
    pub fn seq_add(&mut self, seq_id: SeqId, p0: Pos, p1: Pos, delta: Pos) -> Result<()> {
        let (seq, range) = (self.seq(seq_id)?, PosRange::new(p0, p1));
        if delta == 0 || range.is_empty() {
            return Ok(());
        }
        self.check_can_shift()?;
        self.memory.seq_add(seq, range, delta)?;
        self.changed();
        Ok(())
    }

    /// Divides the positions `[p0, p1)` of a sequence by `d >= 1`; as [`Context::seq_add`] otherwise.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::InvalidArgument`], [`Error::CannotShift`]; nothing has changed then.
    pub fn seq_div(&mut self, seq_id: SeqId, p0: Pos, p1: Pos, d: i32) -> Result<()> {
        let (seq, range) = (self.seq(seq_id)?, PosRange::new(p0, p1));
        if d < 1 {
            return Err(Error::arg("d", format!("{d}, at least 1 is possible")));
        }
        if d == 1 || range.is_empty() {
            return Ok(());
        }
        self.check_can_shift()?;
        self.memory.seq_div(seq, range, d)?;
        self.changed();
        Ok(())
    }

    /// Smallest position of a sequence, -1 if it is empty. Of the SWA section, where there is one; beside a recurrent section the
    /// larger of the two.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn seq_pos_min(&self, seq_id: SeqId) -> Result<Pos> {
        Ok(self.memory.seq_pos_min(self.seq(seq_id)?).unwrap_or(-1))
    }

    /// Largest position of a sequence, -1 if it is empty. Of the SWA section, where there is one; beside a recurrent section the
    /// smaller of the two, so that a half that is empty shows.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn seq_pos_max(&self, seq_id: SeqId) -> Result<Pos> {
        Ok(self.memory.seq_pos_max(self.seq(seq_id)?).unwrap_or(-1))
    }

    fn write_params(&self, scope: Scope, flags: StateFlags) -> WriteParams {
        let range = PosRange::ALL;
        WriteParams { scope, flags, max_masked_cells: self.max_masked_cells, range }
    }

    fn read_params(&self, scope: Scope) -> ReadParams {
        let Self { legacy_rotation, convert, .. } = *self;
        ReadParams { convert, ..ReadParams::new(scope, legacy_rotation) }
    }

    // The state of the whole context

    /// Bytes that [`Context::state_get_data`] will write.
    ///
    /// # Errors
    /// None at present.
    pub fn state_get_size(&self) -> Result<u64> {
        let mut sink = CountSink::default();
        self.write_whole(&mut sink)?;
        Ok(sink.metadata + sink.tensors)
    }

    /// Writes the state of the whole context to the start of `dst`; returns its size.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] (`dst` is untouched then), [`Error::ShiftFailed`].
    pub fn state_get_data(&mut self, dst: &mut [u8]) -> Result<usize> {
        let dst = fitting(dst, self.state_get_size()?)?;
        let params = self.write_params(Scope::Whole, StateFlags::empty());
        self.check_streams_of(params)?;
        self.apply_shifts_before(params)?;
        let mut sink = SliceSink::new(dst);
        self.write_whole(&mut sink)?;
        sink.finish(&self.transfer)
    }

    /// Replaces all sequences by the state in `src`; returns the bytes consumed.
    ///
    /// # Errors
    /// As [`Context::state_seq_set_data`]; the context is unchanged then, byte for byte.
    pub fn state_set_data(&mut self, src: &[u8]) -> Result<usize> {
        let plan = self.plan_whole(Source::blob(Cursor::new(src)))?;
        self.generation += 1;
        self.memory.state_commit(&plan, &self.transfer, None)?;
        Ok(consumed(&plan))
    }

    fn write_whole<'a>(&'a self, sink: &mut impl Sink<'a>) -> Result<()> {
        let arch_len = u32::try_from(self.arch.len())
            .map_err(|_| Error::arg("arch", format!("a name of {} bytes", self.arch.len())))?;
        sink.write_u32(arch_len)?;
        sink.write(self.arch.as_bytes())?;
        self.memory.state_write(sink, self.write_params(Scope::Whole, StateFlags::empty()))
    }

    fn plan_whole<'a>(&self, mut source: Source<'a>) -> Result<MemoryPlan<'a>> {
        let arch_len = source.u32("arch length")?;
        let arch = source.bytes("arch", u64::from(arch_len))?;
        if arch != self.arch.as_bytes() {
            return Err(Error::Mismatch {
                what: "wrong model arch",
                state: format!("'{}'", String::from_utf8_lossy(&arch[..arch.len().min(64)])),
                cache: format!("'{}'", self.arch),
                place: "whole context".into(),
            });
        }
        self.memory.state_plan(&source, StateFlags::empty(), self.read_params(Scope::Whole))
    }

    /// Checks the streams of devices that a state has tensors on, before the first byte of it is written.
    fn check_streams_of(&self, params: WriteParams) -> Result<()> {
        if !self.transfer.has_streams() {
            return Ok(());
        }
        let mut sink = OnDevices::default();
        self.memory.state_write(&mut sink, params)?;
        self.transfer.check_streams(sink.devices)
    }

    // For the session floor: a state inside a file has no blob header.

    pub(crate) fn write_file_state<'a>(&'a self, sink: &mut impl Sink<'a>, seq: Option<Seq>) -> Result<()> {
        match seq {
            Some(seq) => self.write_file_range(sink, seq, PosRange::ALL),
            None => self.write_whole(sink),
        }
    }

    /// What the state of a file would do: of a sequence to be read as `dest`, or of the whole context.
    pub(crate) fn plan_file_state<'a>(
        &self,
        source: Source<'a>,
        dest: Option<Seq>,
    ) -> Result<MemoryPlan<'a>> {
        match dest {
            Some(dest) => self.plan_file_range(&source, dest, PosRange::ALL, false),
            None => self.plan_whole(source),
        }
    }

    /// Does what was planned. With `reports` it can be cancelled, which [`Memory::state_overwrites`] forbids.
    pub(crate) fn commit_file_state(&mut self, plan: &MemoryPlan<'_>, reports: bool) -> Result<()> {
        self.generation += 1;
        let progress = self.progress.as_mut().filter(|_| reports);
        self.memory.state_commit(plan, &self.transfer, progress)
    }

    pub(crate) fn check_stream(&self, stream: usize) -> Result<()> {
        let n_stream = self.n_stream();
        if stream < n_stream as usize {
            return Ok(());
        }
        Err(Error::arg("stream", format!("{stream} is out of range [0, {n_stream})")))
    }

    pub(crate) fn kv_cache(&self, section: usize, stream: usize) -> Result<&KvCache> {
        self.check_stream(stream)?;
        self.memory.kv_cache(section)
    }
}

/// Offset behind a state in memory.
fn consumed(plan: &MemoryPlan<'_>) -> usize {
    usize::try_from(plan.end.offset()).expect("it lies in memory")
}

fn fitting(dst: &mut [u8], need: u64) -> Result<&mut [u8]> {
    let size = dst.len() as u64;
    let len = usize::try_from(need).unwrap_or(usize::MAX);
    dst.get_mut(..len).ok_or(Error::BufferTooSmall { need, size })
}
