//! A context: the memory of one model's sequences, and the states that are taken of it.

mod checkpoints;
mod engine;
mod rewind;
mod snapshot;

pub use checkpoints::{Checkpoint, CheckpointMemory, Checkpoints, CheckpointsParams, Resumed, Verdict};
pub use engine::{Slot, UbatchToken};
pub use snapshot::Snapshot;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cells::{CellMeta, SeqSet};
use crate::error::{Error, Result};
use crate::format::{self, Cursor, SEQ_BLOB_HEADER_LEN};
use crate::memory::{
    KvCache, LegacyRotation, Memory, MemoryPlan, ReadParams, RopeParams, Scope, SectionParams, SectionRope,
    Streams, WriteParams,
};
use crate::state::{CountSink, DeviceSink, DeviceState, Input, Sink, SliceSink, Source};
use crate::storage::{
    CallerStream, ProgressCallback, Staging, StagingParams, StagingReport, TensorCopies, Threads, Transfer,
};
use crate::types::{Pos, PosRange, Seq, SeqId, StateFlags};

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
            max_masked_cells: None,
            sync_files: true,
            threads: Threads::default(),
            progress: None,
            staging: StagingParams::default(),
        }
    }
}

/// Cells of one stream of one section whose K rows have to be rotated.
#[derive(Debug)]
pub struct PendingShift<'a> {
    /// Section, in write order.
    pub section: usize,
    /// Stream.
    pub stream: usize,
    /// Cells, ascending.
    pub cells: &'a [u32],
    /// By how many positions each cell's K has to be rotated forward; never 0.
    pub shifts: &'a [Pos],
}

/// Rotates the K rows of the cells named, in every layer of the section, or says why it cannot.
pub type ShiftCallback = Box<dyn FnMut(PendingShift<'_>) -> Result<(), String> + Send>;

/// Who rotates K after `seq_add` and `seq_div`.
#[derive(Default)]
pub enum Shift {
    /// Nobody: `can_shift` is false and shifts are refused.
    #[default]
    None,
    /// The engine, in its own graph: it promises to ask [`Context::pending_shifts`] and to call
    /// [`Context::shift_done`] before the next decode or save.
    Engine,
    /// This callback, called before rows with a pending shift are written into a state.
    Callback(ShiftCallback),
    /// kvstate, before rows with a pending shift are written into a state and in [`Context::apply_pending_shifts`]: RoPE
    /// of each layer of each section, `None` for layers without. `n_rot_k` is looked at in [`crate::memory::KvParams`].
    ///
    /// Models whose positions have several parts (M-RoPE) cannot be shifted, here as in llama.cpp.
    Rope(Vec<Vec<Option<RopeParams>>>),
}

impl std::fmt::Debug for Shift {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Engine => "Engine",
            Self::Callback(_) => "Callback",
            Self::Rope(_) => "Rope",
        })
    }
}

/// A [`Shift`] that was checked against the sections.
enum Shifter {
    None,
    Engine,
    Callback(ShiftCallback),
    /// By section.
    Rope(Vec<SectionRope>),
}

impl std::fmt::Debug for Shifter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Engine => f.write_str("Engine"),
            Self::Callback(_) => f.write_str("Callback"),
            Self::Rope(sections) => sections.fmt(f),
        }
    }
}

impl Shifter {
    fn new(shift: Shift, memory: &Memory) -> Result<Self> {
        Ok(match shift {
            Shift::None => Self::None,
            Shift::Engine => Self::Engine,
            Shift::Callback(callback) => Self::Callback(callback),
            Shift::Rope(sections) => {
                let caches = memory.kv_caches();
                if sections.len() != caches.len() {
                    let reason = format!("{} sections for a context of {}", sections.len(), caches.len());
                    return Err(Error::arg("rope", reason));
                }
                let section = |(kv, layers): (&KvCache, &Vec<_>)| SectionRope::new(&kv.geometry, layers);
                Self::Rope(caches.zip(&sections).map(section).collect::<Result<_>>()?)
            }
        })
    }
}

/// Bytes of memory that a context has taken. Adopted memory is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// K and V in host memory; pages that were never written are no memory yet.
    pub kv_host: u64,
    /// K and V in the memory of devices.
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
        self.memory.kv_caches().len()
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
    /// [`Error::InvalidArgument`] for a stream that is being captured into a graph; nothing has changed then. If memory of a
    /// device, or memory that is reached through calls of its owner, cannot be zeroed; no cell is used any more all the same.
    pub fn clear(&mut self, data: bool) -> Result<()> {
        if data {
            self.transfer.check_streams()?;
        }
        self.changed();
        self.memory.clear(data, &self.transfer)
    }

    /// Removes the positions `[p0, p1)` of a sequence; -1 as `seq_id`, `p0` or `p1` means every sequence, from
    /// the start, to the end. False if a section cannot remove just that range (attention always can).
    ///
    /// # Errors
    /// [`Error::SeqId`]; nothing has changed then.
    pub fn seq_rm(&mut self, seq_id: SeqId, p0: Pos, p1: Pos) -> Result<bool> {
        let seq = if seq_id < 0 { None } else { Some(self.seq(seq_id)?) };
        self.changed();
        Ok(self.memory.seq_rm(seq, PosRange::new(p0, p1)))
    }

    /// Gives the cells of `src` in `[p0, p1)` to `dst` as well. Between streams, where nothing can be shared,
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
            self.transfer.check_streams()?;
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
        self.changed();
        self.memory.seq_keep(seq);
        Ok(())
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

    /// Smallest position of a sequence, -1 if it is empty. Of the SWA section, where there is one.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn seq_pos_min(&self, seq_id: SeqId) -> Result<Pos> {
        Ok(self.memory.seq_pos_min(self.seq(seq_id)?).unwrap_or(-1))
    }

    /// Largest position of a sequence, -1 if it is empty. Of the SWA section, where there is one.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn seq_pos_max(&self, seq_id: SeqId) -> Result<Pos> {
        Ok(self.memory.seq_pos_max(self.seq(seq_id)?).unwrap_or(-1))
    }

    // Shifts

    fn check_can_shift(&self) -> Result<()> {
        let reason = if matches!(self.shifter, Shifter::None) {
            "the context has no RoPE, no shift callback and no promise of the engine to rotate K"
        } else if !self.memory.sections_have_equal_size() {
            "the sections have different sizes, so they do not lose the same cells"
        } else {
            return Ok(());
        };
        Err(Error::CannotShift { reason })
    }

    /// Whether positions can be shifted: somebody rotates K, and all sections have the same size.
    #[must_use]
    pub fn can_shift(&self) -> bool {
        self.check_can_shift().is_ok()
    }

    /// Cells of a stream of a section with a pending shift, ascending, each with the positions by which its K
    /// has to be rotated forward.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a section or stream that is not there.
    pub fn pending_shifts(
        &self,
        section: usize,
        stream: usize,
    ) -> Result<impl Iterator<Item = (u32, Pos)> + '_> {
        self.check_stream(stream)?;
        Ok(self.memory.kv_cache(section)?.shifted(stream))
    }

    /// The engine has rotated K of everything that [`Context::pending_shifts`] lists.
    pub fn shift_done(&mut self) {
        self.changed();
        for kv in self.memory.kv_caches_mut() {
            (0..kv.geometry.streams.n_stream as usize).for_each(|stream| kv.shift_done(stream));
        }
    }

    /// Rotates K of every cell with a pending shift now, by RoPE or the callback: an engine calls it before it decodes.
    ///
    /// # Errors
    /// [`Error::ShiftFailed`]; the shifts that were not applied stay pending. If a remote tensor's owner fails where K
    /// may be rotated in part, the sequences that had it are emptied, as the error says.
    pub fn apply_pending_shifts(&mut self) -> Result<()> {
        self.apply_shifts(KvCache::shifted_streams)
    }

    /// Applies every pending shift of the streams that a write would save with unrotated rows.
    fn apply_shifts_before(&mut self, params: WriteParams) -> Result<()> {
        self.apply_shifts(|kv| kv.shifted_streams_of(params))
    }

    fn apply_shifts(&mut self, streams: impl Fn(&KvCache) -> Vec<usize>) -> Result<()> {
        for section in 0..self.n_section() {
            for stream in streams(self.memory.kv_cache(section)?) {
                self.apply_shifts_of_stream(section, stream)?;
            }
        }
        Ok(())
    }

    fn apply_shifts_of_stream(&mut self, section: usize, stream: usize) -> Result<()> {
        let kv = self.memory.kv_cache_mut(section)?;
        let (cells, shifts): (Vec<u32>, Vec<Pos>) = kv.shifted(stream).unzip();
        let mut emptied = SeqSet::EMPTY;
        let applied = match &mut self.shifter {
            Shifter::Callback(rotate) => {
                rotate(PendingShift { section, stream, cells: &cells, shifts: &shifts })
            }
            Shifter::Rope(sections) => {
                kv.turn_shifted(stream, &sections[section], &self.transfer).map_err(|failure| {
                    if !failure.rows_changed {
                        return failure.error.to_string();
                    }
                    emptied = kv.shifted_seqs(stream);
                    format!("{}; its sequences are emptied", failure.error)
                })
            }
            Shifter::None | Shifter::Engine => {
                Err("the engine promised to rotate K and to call shift_done before a save".into())
            }
        };
        let place = kv.geometry.place(stream);
        if applied.is_ok() {
            kv.shift_done(stream);
        }
        for seq in emptied.iter() {
            self.memory.seq_rm(Some(seq), PosRange::ALL);
            self.changed();
        }
        applied.map_err(|reason| Error::ShiftFailed { n_cells: cells.len(), reason, place })
    }

    // The state of a sequence

    fn write_params(&self, scope: Scope, flags: StateFlags) -> WriteParams {
        WriteParams { scope, flags, max_masked_cells: self.max_masked_cells }
    }

    fn read_params(&self, scope: Scope) -> ReadParams {
        ReadParams { scope, legacy_rotation: self.legacy_rotation, flip_cell_ext: false }
    }

    /// Bytes that [`Context::state_seq_get_data`] will write.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn state_seq_get_size(&self, seq_id: SeqId, flags: StateFlags) -> Result<u64> {
        let mut sink = CountSink::default();
        self.memory.state_write(&mut sink, self.write_params(Scope::Seq(self.seq(seq_id)?), flags))?;
        let tensors = if flags.contains(StateFlags::ON_DEVICE) { 0 } else { sink.tensors };
        Ok(SEQ_BLOB_HEADER_LEN + sink.metadata + tensors)
    }

    /// Writes the state of a sequence to the start of `dst`; returns its size. With
    /// [`StateFlags::ON_DEVICE`] the tensors stay in the context and replace the sequence's earlier ones.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::BufferTooSmall`] (`dst` is untouched then), [`Error::ShiftFailed`],
    /// [`Error::OutOfMemory`].
    pub fn state_seq_get_data(&mut self, dst: &mut [u8], seq_id: SeqId, flags: StateFlags) -> Result<usize> {
        let params = self.write_params(Scope::Seq(self.seq(seq_id)?), flags);
        let need = self.state_seq_get_size(seq_id, flags)?;
        let dst = fitting(dst, need)?;
        self.transfer.check_streams()?;
        self.apply_shifts_before(params)?;
        if flags.contains(StateFlags::ON_DEVICE) {
            let mut sink = DeviceSink::new(dst);
            sink.write(&DeviceState::header(seq_id))?;
            self.memory.state_write(&mut sink, params)?;
            let (len, tensors) = sink.finish(&self.transfer)?;
            self.device_states.insert(seq_id, DeviceState::new(dst.to_vec(), tensors, flags));
            Ok(len)
        } else {
            let mut sink = SliceSink::new(dst);
            sink.write(&format::seq_blob_header(seq_id))?;
            self.memory.state_write(&mut sink, params)?;
            sink.finish(&self.transfer)
        }
    }

    /// Replaces sequence `dest` by the state in `src`, in every section that the state holds; returns the
    /// bytes consumed. Bytes behind the state are ignored.
    ///
    /// # Errors
    /// Every way in which the bytes may not be a state of this cache, [`Error::NoSpace`], and
    /// [`Error::NoDeviceState`]; the context is unchanged then, byte for byte.
    pub fn state_seq_set_data(&mut self, src: &[u8], dest: SeqId, flags: StateFlags) -> Result<usize> {
        let scope = Scope::Seq(self.seq(dest)?);
        let source = if flags.contains(StateFlags::ON_DEVICE) {
            let seq_id = DeviceState::seq_id_of(src)?;
            let none = Error::NoDeviceState { seq_id, reason: "none was taken" };
            self.device_states.get(&seq_id).ok_or(none)?.source(src, flags)?
        } else {
            let mut metadata = Cursor::new(src);
            format::read_seq_blob_header(&mut metadata)?;
            Source::blob(metadata)
        };
        let plan = self.memory.state_plan(&source, flags, self.read_params(scope))?;
        if plan.n_legacy_skipped > 0 {
            log::info!(
                "a partial state of an older llama.cpp holds {} full-attention sections: checked and skipped",
                plan.n_legacy_skipped
            );
        }
        self.generation += 1;
        self.memory.state_commit(&plan, &self.transfer, None)?;
        Ok(consumed(&plan))
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
        self.transfer.check_streams()?;
        self.apply_shifts_before(self.write_params(Scope::Whole, StateFlags::empty()))?;
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

    // For the session floor: a state inside a file has no blob header.

    pub(crate) fn write_file_state<'a>(&'a self, sink: &mut impl Sink<'a>, seq: Option<Seq>) -> Result<()> {
        match seq {
            Some(seq) => {
                self.memory.state_write(sink, self.write_params(Scope::Seq(seq), StateFlags::empty()))
            }
            None => self.write_whole(sink),
        }
    }

    pub(crate) fn apply_shifts_of(&mut self, seq: Option<Seq>) -> Result<()> {
        let scope = seq.map_or(Scope::Whole, Scope::Seq);
        self.apply_shifts_before(self.write_params(scope, StateFlags::empty()))
    }

    /// What the state of a file would do: of a sequence to be read as `dest`, or of the whole context.
    pub(crate) fn plan_file_state<'a>(
        &self,
        source: Source<'a>,
        dest: Option<Seq>,
    ) -> Result<MemoryPlan<'a>> {
        match dest {
            Some(dest) => {
                let params = self.read_params(Scope::Seq(dest));
                self.memory.state_plan(&source, StateFlags::empty(), params)
            }
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

    pub(crate) fn apply(&mut self, section: usize, stream: usize, cells: &[u32], metas: &[CellMeta]) {
        self.generation += 1;
        if let Some(kv) = self.memory.kv_caches_mut().nth(section) {
            kv.apply(stream, cells, metas);
        }
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
