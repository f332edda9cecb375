//! The kinds of sections, and the one place where each operation asks them.

use super::dsv4::{Dsv4Cache, Dsv4Memory, Dsv4Params, Dsv4Plan};
use super::kv_cache::{KvCache, KvMemory};
use super::kv_read::{KvPlan, ReadParams};
use super::kv_write::WriteParams;
use super::recurrent::{RecurrentCache, RecurrentMemory, RecurrentParams, RecurrentPlan};
use super::{KvParams, Streams};
use crate::error::Result;
use crate::state::{Sink, Source};
use crate::storage::{CellMap, Plane, Scatter, Transfer};
use crate::types::{Pos, PosRange, Seq, StateFlags};

/// What a section is made of.
#[derive(Debug)]
#[non_exhaustive]
pub enum SectionParams {
    /// An attention cache.
    Kv {
        /// Geometry.
        kv: KvParams,
        /// Where K and V are.
        memory: KvMemory,
    },
    /// States of recurrent or linear-attention layers.
    Recurrent {
        /// Geometry.
        recurrent: RecurrentParams,
        /// Where R, S and P are.
        memory: RecurrentMemory,
    },
    /// Layers of a draft that read the cells of the target's cache: the draft's state has nothing of them, and positions and cells
    /// are to be asked of the target.
    Shared,
    /// The compressed half of a DSV4 memory, behind its raw pair of attention caches.
    Dsv4 {
        /// Geometry.
        dsv4: Dsv4Params,
        /// Where K and states are.
        memory: Dsv4Memory,
    },
}

impl From<Dsv4Params> for SectionParams {
    fn from(dsv4: Dsv4Params) -> Self {
        Self::Dsv4 { dsv4, memory: Dsv4Memory::Host }
    }
}

/// What kind a section is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SectionKind {
    /// [`SectionParams::Kv`].
    Kv,
    /// [`SectionParams::Recurrent`].
    Recurrent,
    /// [`SectionParams::Shared`]: writes nothing, restores nothing.
    Shared,
    /// [`SectionParams::Dsv4`].
    Dsv4,
}

impl From<KvParams> for SectionParams {
    fn from(kv: KvParams) -> Self {
        Self::Kv { kv, memory: KvMemory::Host }
    }
}

impl From<RecurrentParams> for SectionParams {
    fn from(recurrent: RecurrentParams) -> Self {
        Self::Recurrent { recurrent, memory: RecurrentMemory::Host }
    }
}

/// What a shared section is called in messages.
pub(super) const SHARED: &str = "shared";

/// A section of a context's memory.
#[derive(Debug)]
pub(crate) enum Section {
    Kv(KvCache),
    Recurrent(RecurrentCache),
    Shared,
    Dsv4(Dsv4Cache),
}

/// What a commit will do to a section.
#[derive(Debug)]
pub(super) enum SectionPlan<'a> {
    /// The state holds nothing of it.
    Nothing,
    Kv(KvPlan<'a>),
    Recurrent(RecurrentPlan<'a>),
    Dsv4(Dsv4Plan<'a>),
}

impl SectionPlan<'_> {
    /// Whether it brings no cells.
    fn is_empty(&self) -> bool {
        match self {
            Self::Kv(plan) => plan.streams.iter().all(|stream| stream.cells.is_empty()),
            Self::Nothing => true,
            Self::Recurrent(_) | Self::Dsv4(_) => false,
        }
    }

    /// Whether the state has cells, of which not all may be wanted.
    fn leaves_out(&self) -> bool {
        matches!(self, Self::Kv(plan) if plan.found.pos_max.is_some())
    }
}

impl Section {
    pub fn new(name: &str, params: SectionParams, streams: Streams) -> Result<Self> {
        Ok(match params {
            SectionParams::Kv { kv, memory } => Self::Kv(KvCache::new(name, &kv, memory, streams)?),
            SectionParams::Recurrent { recurrent, memory } => {
                Self::Recurrent(RecurrentCache::new(name, &recurrent, memory, streams.n_seq_max)?)
            }
            SectionParams::Shared => Self::Shared,
            SectionParams::Dsv4 { dsv4, memory } => Self::Dsv4(Dsv4Cache::new(name, dsv4, memory, streams)?),
        })
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Kv(kv) => &kv.geometry.name,
            Self::Recurrent(recurrent) => &recurrent.geometry.name,
            Self::Shared => SHARED,
            Self::Dsv4(dsv4) => &dsv4.geometry.name,
        }
    }

    pub fn kind(&self) -> SectionKind {
        match self {
            Self::Kv(_) => SectionKind::Kv,
            Self::Recurrent(_) => SectionKind::Recurrent,
            Self::Shared => SectionKind::Shared,
            Self::Dsv4(_) => SectionKind::Dsv4,
        }
    }

    pub fn as_kv(&self) -> Option<&KvCache> {
        match self {
            Self::Kv(kv) => Some(kv),
            _ => None,
        }
    }

    pub fn as_kv_mut(&mut self) -> Option<&mut KvCache> {
        match self {
            Self::Kv(kv) => Some(kv),
            _ => None,
        }
    }

    pub fn as_recurrent(&self) -> Option<&RecurrentCache> {
        match self {
            Self::Recurrent(recurrent) => Some(recurrent),
            _ => None,
        }
    }

    pub fn as_recurrent_mut(&mut self) -> Option<&mut RecurrentCache> {
        match self {
            Self::Recurrent(recurrent) => Some(recurrent),
            _ => None,
        }
    }

    pub fn as_dsv4(&self) -> Option<&Dsv4Cache> {
        match self {
            Self::Dsv4(dsv4) => Some(dsv4),
            _ => None,
        }
    }

    pub fn as_dsv4_mut(&mut self) -> Option<&mut Dsv4Cache> {
        match self {
            Self::Dsv4(dsv4) => Some(dsv4),
            _ => None,
        }
    }

    /// Every plane.
    pub fn planes(&self) -> Box<dyn Iterator<Item = &Plane> + '_> {
        match self {
            Self::Kv(kv) => Box::new(kv.planes()),
            Self::Recurrent(recurrent) => Box::new(recurrent.planes()),
            Self::Shared => Box::new(std::iter::empty()),
            Self::Dsv4(dsv4) => Box::new(dsv4.planes()),
        }
    }

    /// How many positions can be cut off the end of a sequence so that its state is there; `None`: any.
    pub fn max_cut(&self, seq: Seq) -> Option<u32> {
        match self {
            Self::Kv(_) | Self::Shared => None,
            Self::Recurrent(recurrent) => recurrent.max_cut(seq),
            Self::Dsv4(dsv4) => Some(dsv4.max_cut(seq)),
        }
    }

    // Sequences. `pos_max` is the last position that attention knows of the sequence.

    /// Nothing is held any more. What no cell guards is zeroed with `data` or without.
    pub fn clear(&mut self, data: bool, transfer: &Transfer) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.forget(),
            Self::Recurrent(recurrent) => recurrent.forget(),
            Self::Shared | Self::Dsv4(_) => {}
        }
        match self {
            Self::Kv(kv) if data => kv.zero_all(transfer),
            Self::Recurrent(recurrent) if data => recurrent.zero_all(transfer),
            Self::Dsv4(dsv4) => dsv4.zero_all(transfer),
            Self::Kv(_) | Self::Recurrent(_) | Self::Shared => Ok(()),
        }
    }

    /// Whether [`Section::seq_rm`] can remove just that.
    pub fn can_seq_rm(&self, seq: Option<Seq>, range: PosRange, pos_max: Option<Pos>) -> bool {
        match self {
            Self::Kv(_) | Self::Shared => true,
            Self::Recurrent(recurrent) => recurrent.can_seq_rm(seq, range),
            Self::Dsv4(dsv4) => dsv4.can_seq_rm(seq, range, pos_max),
        }
    }

    /// If it fails, rows that are not used any more may not be zero.
    pub fn seq_rm(
        &mut self,
        seq: Option<Seq>,
        range: PosRange,
        pos_max: Option<Pos>,
        transfer: &Transfer,
    ) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.seq_rm(seq, range),
            Self::Recurrent(recurrent) => recurrent.seq_rm(seq, range),
            Self::Shared => {}
            Self::Dsv4(dsv4) => return dsv4.seq_rm(seq, range, pos_max, transfer),
        }
        Ok(())
    }

    /// Whether [`Section::seq_cp`] can be done.
    pub fn check_seq_cp(&self, src: Seq, dst: Seq, range: PosRange) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.check_seq_cp(src, dst, range),
            Self::Recurrent(_) | Self::Shared => Ok(()),
            Self::Dsv4(_) => Dsv4Cache::check_seq_cp(range),
        }
    }

    pub fn seq_cp(&mut self, src: Seq, dst: Seq, range: PosRange, transfer: &Transfer) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.seq_cp(src, dst, range, transfer),
            Self::Recurrent(recurrent) => {
                recurrent.seq_cp(src, dst);
                Ok(())
            }
            Self::Shared => Ok(()),
            Self::Dsv4(dsv4) => dsv4.seq_cp(src, dst, transfer),
        }
    }

    /// In a DSV4 memory, the others are removed instead.
    pub fn seq_keep(&mut self, seq: Seq) {
        match self {
            Self::Kv(kv) => kv.seq_keep(seq),
            Self::Recurrent(recurrent) => recurrent.seq_keep(seq),
            Self::Shared | Self::Dsv4(_) => {}
        }
    }

    /// Whether [`Section::seq_add`] can be done.
    pub fn check_seq_add(&self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.check_seq_add(seq, range, delta),
            Self::Recurrent(recurrent) => recurrent.check_seq_add(seq, range, delta),
            Self::Shared | Self::Dsv4(_) => Ok(()),
        }
    }

    /// A DSV4 memory cannot be shifted, so it is not asked.
    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.seq_add(seq, range, delta)?,
            Self::Recurrent(recurrent) => recurrent.seq_add(seq, range, delta),
            Self::Shared | Self::Dsv4(_) => {}
        }
        Ok(())
    }

    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.seq_div(seq, range, d)?,
            Self::Recurrent(recurrent) => recurrent.seq_div(seq, range, d),
            Self::Shared | Self::Dsv4(_) => {}
        }
        Ok(())
    }

    // States

    /// Whether the section has bytes in a state with these flags.
    pub fn writes(&self, flags: StateFlags) -> bool {
        match self {
            Self::Kv(kv) => kv.geometry.writes(flags),
            Self::Recurrent(_) | Self::Dsv4(_) => true,
            Self::Shared => false,
        }
    }

    /// Writes what comes before all sections.
    pub fn write_header<'a>(&self, sink: &mut impl Sink<'a>, flags: StateFlags) -> Result<()> {
        match self {
            Self::Dsv4(_) => Dsv4Cache::write_header(sink, flags),
            _ => Ok(()),
        }
    }

    /// Checks what comes before all sections.
    pub fn read_header(&self, source: &mut Source<'_>, flags: StateFlags) -> Result<()> {
        match self {
            Self::Dsv4(_) => Dsv4Cache::read_header(source, flags),
            _ => Ok(()),
        }
    }

    /// Writes the section.
    pub fn state_write<'a>(
        &'a self,
        sink: &mut impl Sink<'a>,
        params: WriteParams,
        pos_max: Option<Pos>,
    ) -> Result<()> {
        match self {
            Self::Kv(kv) => kv.state_write(sink, params),
            Self::Recurrent(recurrent) => recurrent.state_write(sink, params.scope, params.range),
            Self::Shared => Ok(()),
            Self::Dsv4(dsv4) => dsv4.state_write(sink, params, pos_max),
        }
    }

    /// Reads, checks and places the section's bytes. Changes nothing. `before` are the plans of the sections before it,
    /// `full_attention` is what the destination will have there, if it is needed.
    pub(super) fn state_plan<'a>(
        &self,
        source: &mut Source<'a>,
        flags: StateFlags,
        params: ReadParams,
        before: &[SectionPlan<'_>],
        full_attention: &[(Pos, u32)],
    ) -> Result<SectionPlan<'a>> {
        Ok(match self {
            Self::Kv(kv) => {
                let read = kv.geometry.state_read(source, params)?;
                let mirrored = kv.geometry.mirrors.and_then(|section| before.get(section));
                SectionPlan::Kv(match mirrored {
                    Some(SectionPlan::Kv(mirrored)) => kv.state_place_beside(read, params.scope, mirrored)?,
                    _ => kv.state_place(read, params, full_attention)?,
                })
            }
            Self::Recurrent(recurrent) => {
                let read = recurrent.geometry.state_read(source, params.scope, params.convert)?;
                SectionPlan::Recurrent(recurrent.state_place(read, params)?)
            }
            Self::Shared => SectionPlan::Nothing,
            Self::Dsv4(dsv4) => {
                let mut plan = dsv4.geometry.state_plan(source, params, flags)?;
                let is_empty = before.iter().all(SectionPlan::is_empty);
                // Nothing is added to what the destination has.
                if is_empty && params.append {
                    return Ok(SectionPlan::Nothing);
                }
                if is_empty && before.iter().any(SectionPlan::leaves_out) {
                    plan.leave_out()?;
                }
                SectionPlan::Dsv4(plan)
            }
        })
    }

    /// What the commit converts, in words.
    pub(super) fn state_notes(&self, plan: &SectionPlan<'_>) -> Vec<String> {
        match (self, plan) {
            (Self::Kv(kv), SectionPlan::Kv(plan)) => plan.notes(&kv.geometry),
            (Self::Recurrent(recurrent), SectionPlan::Recurrent(plan)) => recurrent.state_notes(plan),
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_notes(plan),
            _ => Vec::new(),
        }
    }

    /// Whether the commit takes cells that hold something, the destination's own included.
    pub(super) fn state_overwrites(&self, plan: &SectionPlan<'_>) -> bool {
        match (self, plan) {
            (Self::Kv(kv), SectionPlan::Kv(plan)) => kv.state_overwrites(plan),
            (Self::Recurrent(recurrent), SectionPlan::Recurrent(plan)) => recurrent.state_overwrites(plan),
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_overwrites(plan),
            _ => false,
        }
    }

    /// Replaces what the destination holds by the state.
    pub(super) fn state_apply(&mut self, plan: &SectionPlan<'_>) {
        match (self, plan) {
            (Self::Kv(kv), SectionPlan::Kv(plan)) => kv.state_apply(plan),
            (Self::Recurrent(recurrent), SectionPlan::Recurrent(plan)) => recurrent.state_apply(plan),
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_apply(plan),
            _ => {}
        }
    }

    /// Empties the destination.
    pub(super) fn state_forget(&mut self, plan: &SectionPlan<'_>) {
        match (self, plan) {
            (Self::Kv(kv), SectionPlan::Kv(plan)) => kv.state_forget(plan),
            (Self::Recurrent(recurrent), SectionPlan::Recurrent(plan)) => recurrent.state_forget(plan),
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_forget(plan),
            _ => {}
        }
    }

    /// The tensors' part of the commit.
    pub(super) fn state_scatter<'p>(&'p mut self, plan: &'p SectionPlan<'_>) -> Vec<Scatter<'p>> {
        match (self, plan) {
            (Self::Kv(kv), SectionPlan::Kv(plan)) => kv.state_scatter(plan),
            (Self::Recurrent(recurrent), SectionPlan::Recurrent(plan)) => recurrent.state_scatter(plan),
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_scatter(plan),
            _ => Vec::new(),
        }
    }

    /// The cells that the state would have, in every plane.
    pub(super) fn state_cells<'p>(
        &'p mut self,
        plan: &'p SectionPlan<'_>,
    ) -> Vec<(&'p mut Plane, &'p CellMap)> {
        match (self, plan) {
            (Self::Kv(kv), SectionPlan::Kv(plan)) => kv.state_cells(plan),
            (Self::Recurrent(recurrent), SectionPlan::Recurrent(plan)) => recurrent.state_cells(plan),
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_cells(plan),
            _ => Vec::new(),
        }
    }

    /// What the destination has held beside the state's cells, where no cell says what is used.
    pub(super) fn state_rest<'p>(
        &'p mut self,
        plan: &'p SectionPlan<'_>,
    ) -> Vec<(&'p mut Plane, &'p CellMap)> {
        match (self, plan) {
            (Self::Dsv4(dsv4), SectionPlan::Dsv4(plan)) => dsv4.state_rest(plan),
            _ => Vec::new(),
        }
    }

    /// Whether a cell says which of the planes' bytes are used.
    pub(super) fn has_cells(&self) -> bool {
        !matches!(self, Self::Dsv4(_))
    }
}
