//! The state of a sequence, or of a range of its positions, in memory.

use super::{Context, consumed, fitting};
use crate::error::{Error, Result};
use crate::format::{self, Cursor, SEQ_BLOB_HEADER_LEN};
use crate::memory::{MemoryPlan, ReadParams, Scope, WriteParams};
use crate::state::{CountSink, DeviceSink, DeviceState, Sink, SliceSink, Source};
use crate::types::{PosRange, Seq, SeqId, StateFlags};

impl Context {
    /// Bytes that [`Context::state_seq_get_data`] will write.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn state_seq_get_size(&self, seq_id: SeqId, flags: StateFlags) -> Result<u64> {
        self.state_seq_get_size_range(seq_id, PosRange::ALL, flags)
    }

    /// Bytes that [`Context::state_seq_get_data_range`] will write.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::CannotCut`].
    pub fn state_seq_get_size_range(&self, seq_id: SeqId, range: PosRange, flags: StateFlags) -> Result<u64> {
        self.blob_len(self.range_params(self.seq(seq_id)?, range, flags)?)
    }

    /// Writes the state of a sequence to the start of `dst`; returns its size. With
    /// [`StateFlags::ON_DEVICE`] the tensors stay in the context and replace the sequence's earlier ones.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::BufferTooSmall`] (`dst` is untouched then), [`Error::ShiftFailed`],
    /// [`Error::OutOfMemory`].
    pub fn state_seq_get_data(&mut self, dst: &mut [u8], seq_id: SeqId, flags: StateFlags) -> Result<usize> {
        self.state_seq_get_data_range(dst, seq_id, PosRange::ALL, flags)
    }

    /// Writes the cells of a sequence that lie in `range`, as a state that every reader of states reads: a piece of it, to be
    /// restored alone or added to the pieces before by [`Context::state_seq_append_data`]. Returns its size.
    ///
    /// A recurrent section has the state of the end of the range, which has to be there: that of the newest position, or one in a
    /// rollback plane.
    ///
    /// # Errors
    /// As [`Context::state_seq_get_data`]; [`Error::CannotCut`] for a range that ends where there is no state.
    pub fn state_seq_get_data_range(
        &mut self,
        dst: &mut [u8],
        seq_id: SeqId,
        range: PosRange,
        flags: StateFlags,
    ) -> Result<usize> {
        let params = self.range_params(self.seq(seq_id)?, range, flags)?;
        let need = self.blob_len(params)?;
        let dst = fitting(dst, need)?;
        self.check_streams_of(params)?;
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
        let params = self.read_params(Scope::Seq(self.seq(dest)?));
        self.set_data(src, flags, params)
    }

    /// Adds the state in `src`, whose positions are all behind those of sequence `dest`, to it; returns the bytes consumed. Into
    /// an empty sequence it is [`Context::state_seq_set_data`].
    ///
    /// A recurrent section then has the state's own, which is that of the later end. If a window section has too few empty cells,
    /// those go first that the new end masks; what it has lost between the two goes with all before it.
    ///
    /// # Errors
    /// [`Error::PositionsMeet`]; [`Error::InvalidArgument`] for a partial state, without which the sections would end at
    /// different positions; and as [`Context::state_seq_set_data`]. The context is unchanged then, byte for byte.
    pub fn state_seq_append_data(&mut self, src: &[u8], dest: SeqId, flags: StateFlags) -> Result<usize> {
        let scope = Scope::Seq(self.seq(dest)?);
        if flags.contains(StateFlags::PARTIAL_ONLY) {
            return Err(Error::arg(
                "flags",
                "APPEND with PARTIAL_ONLY: only whole states are added to a sequence",
            ));
        }
        self.set_data(src, flags, ReadParams { append: true, ..self.read_params(scope) })
    }

    fn set_data(&mut self, src: &[u8], flags: StateFlags, params: ReadParams) -> Result<usize> {
        let source = if flags.contains(StateFlags::ON_DEVICE) {
            let seq_id = DeviceState::seq_id_of(src)?;
            let none = Error::NoDeviceState { seq_id, reason: "none was taken" };
            self.device_states.get(&seq_id).ok_or(none)?.source(src, flags)?
        } else {
            let mut metadata = Cursor::new(src);
            format::read_seq_blob_header(&mut metadata)?;
            Source::blob(metadata)
        };
        let plan = self.memory.state_plan(&source, flags, params)?;
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

    fn blob_len(&self, params: WriteParams) -> Result<u64> {
        let mut sink = CountSink::default();
        self.memory.state_write(&mut sink, params)?;
        let tensors = if params.flags.contains(StateFlags::ON_DEVICE) { 0 } else { sink.tensors };
        Ok(SEQ_BLOB_HEADER_LEN + sink.metadata + tensors)
    }

    fn range_params(&self, seq: Seq, range: PosRange, flags: StateFlags) -> Result<WriteParams> {
        self.memory.check_range(seq, range)?;
        Ok(WriteParams { range, ..self.write_params(Scope::Seq(seq), flags) })
    }

    // For the session floor: a state inside a file has no blob header.

    pub(crate) fn write_file_range<'a>(
        &'a self,
        sink: &mut impl Sink<'a>,
        seq: Seq,
        range: PosRange,
    ) -> Result<()> {
        let params = self.range_params(seq, range, StateFlags::empty())?;
        self.memory.state_write(sink, params)
    }

    /// What the wanted positions of a sequence's state would do, replacing those of `dest` or behind them.
    pub(crate) fn plan_file_range<'a>(
        &self,
        source: &Source<'a>,
        dest: Seq,
        range: PosRange,
        append: bool,
    ) -> Result<MemoryPlan<'a>> {
        let params = ReadParams { range, append, ..self.read_params(Scope::Seq(dest)) };
        self.memory.state_plan(source, StateFlags::empty(), params)
    }
}
