//! Pending shifts: who rotates K after positions were moved, and when.

use super::Context;
use crate::cells::SeqSet;
use crate::error::{Error, Result};
use crate::memory::{KvCache, Memory, RopeParams, Scope, Section, SectionRope, WriteParams};
use crate::types::{Pos, PosRange, Seq, StateFlags};

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
    /// of each layer of each section, `None` for layers without; no layers for a recurrent section. `n_rot_k` is looked at in [`crate::memory::KvParams`].
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
pub(super) enum Shifter {
    None,
    Engine,
    Callback(ShiftCallback),
    /// By section; `None` where no K is turned.
    Rope(Vec<Option<SectionRope>>),
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
    pub(super) fn new(shift: Shift, memory: &Memory) -> Result<Self> {
        Ok(match shift {
            Shift::None => Self::None,
            Shift::Engine => Self::Engine,
            Shift::Callback(callback) => Self::Callback(callback),
            Shift::Rope(sections) => {
                let n_section = memory.sections().len();
                if sections.len() != n_section {
                    let reason = format!("{} sections for a context of {n_section}", sections.len());
                    return Err(Error::arg("rope", reason));
                }
                let of_section = |(section, layers): (&Section, &Vec<_>)| match section {
                    Section::Kv(kv) => SectionRope::new(&kv.geometry, layers).map(Some),
                    _ if layers.is_empty() => Ok(None),
                    _ => {
                        let reason = format!("{} layers for section {}", layers.len(), section.name());
                        Err(Error::arg("rope", reason + ", in which no K is turned"))
                    }
                };
                Self::Rope(memory.sections().iter().zip(&sections).map(of_section).collect::<Result<_>>()?)
            }
        })
    }
}

impl Context {
    pub(super) fn check_can_shift(&self) -> Result<()> {
        let reason = if matches!(self.shifter, Shifter::None) && self.memory.kv_caches().next().is_some() {
            "the context has no RoPE, no shift callback and no promise of the engine to rotate K"
        } else if self.memory.dsv4().is_some() {
            "compressed rows are of the positions that they were made of"
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
    /// [`Error::ShiftFailed`], [`Error::OutOfMemory`], [`Error::StreamCapturing`]; the shifts that were not applied stay pending.
    /// If a device or a remote tensor's owner fails where K may be rotated in part, the sequences that had it are emptied, as
    /// the error says.
    pub fn apply_pending_shifts(&mut self) -> Result<()> {
        self.apply_shifts(KvCache::shifted_streams)
    }

    /// Applies every pending shift of the streams that a write would save with unrotated rows.
    pub(super) fn apply_shifts_before(&mut self, params: WriteParams) -> Result<()> {
        self.apply_shifts(|kv| kv.shifted_streams_of(params))
    }

    fn apply_shifts(&mut self, streams: impl Fn(&KvCache) -> Vec<usize>) -> Result<()> {
        for section in 0..self.n_section() {
            let shifted = self.memory.sections()[section].as_kv().map_or(Vec::new(), &streams);
            shifted.into_iter().try_for_each(|stream| self.apply_shifts_of_stream(section, stream))?;
        }
        Ok(())
    }

    fn apply_shifts_of_stream(&mut self, section: usize, stream: usize) -> Result<()> {
        let kv = self.memory.kv_cache_mut(section)?;
        let (cells, shifts): (Vec<u32>, Vec<Pos>) = kv.shifted(stream).unzip();
        let mut emptied = SeqSet::EMPTY;
        let place = kv.geometry.place(stream);
        let failed = |reason| Error::ShiftFailed { n_cells: cells.len(), reason, place };
        let applied = match &mut self.shifter {
            Shifter::Callback(rotate) => {
                rotate(PendingShift { section, stream, cells: &cells, shifts: &shifts }).map_err(failed)
            }
            Shifter::Rope(sections) => sections[section].as_ref().map_or(Ok(()), |rope| {
                kv.turn_shifted(stream, rope, &self.transfer).map_err(|failure| match failure.error {
                    _ if failure.rows_changed => {
                        emptied = kv.shifted_seqs(stream);
                        failed(format!("{}; its sequences are emptied", failure.error))
                    }
                    // The caller can do something about these.
                    error @ (Error::OutOfMemory { .. } | Error::StreamCapturing { .. }) => error,
                    error => failed(error.to_string()),
                })
            }),
            Shifter::None | Shifter::Engine => {
                Err(failed("the engine promised to rotate K and to call shift_done before a save".into()))
            }
        };
        if applied.is_ok() {
            kv.shift_done(stream);
        }
        for seq in emptied.iter() {
            self.memory.seq_rm(Some(seq), PosRange::ALL, &self.transfer)?;
            self.changed();
        }
        applied
    }

    pub(crate) fn apply_shifts_of(&mut self, seq: Option<Seq>) -> Result<()> {
        let scope = seq.map_or(Scope::Whole, Scope::Seq);
        self.apply_shifts_before(self.write_params(scope, StateFlags::empty()))
    }
}
