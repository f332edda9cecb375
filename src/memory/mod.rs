//! The memory of a context: sections in write order, and what is done to all of them at once.
//!
//! One attention cache is one section; an iSWA pair is two, full attention first. An operation on the memory
//! is done in every section or, where it can be refused, in none.

mod geometry;
mod kv_cache;
mod kv_read;
mod kv_view;
mod kv_write;
mod rewind;
mod rope;

pub use geometry::{KvParams, LayerParams, Streams, TensorParams, swa_kv_size};
pub use kv_cache::KvPlanes;
pub use kv_read::LegacyRotation;
pub use kv_view::{KvView, SlotInfos, TensorInput, ViewCell, ViewCells};
pub use rewind::RewindObstacle;
pub use rope::RopeParams;

pub(crate) use kv_cache::KvCache;
pub(crate) use kv_read::{KvPlan, ReadParams};
pub(crate) use kv_view::ViewPlan;
pub(crate) use kv_write::{Scope, WriteParams};
pub(crate) use rewind::SavedReach;
pub(crate) use rope::SectionRope;

use crate::error::{Error, Result};
use crate::format::StateVersion;
use crate::state::{Input, Sink, Source};
use crate::storage::{self, ProgressCallback, Transfer};
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
}

/// Where K and V of an attention cache are.
#[derive(Debug, Default)]
pub enum KvMemory {
    /// Allocated here, in host memory.
    #[default]
    Host,
    /// Allocated here: the CUDA device of each layer, `None` for host memory.
    Devices(Vec<Option<i32>>),
    /// The caller's.
    Adopted(KvPlanes),
}

impl From<KvParams> for SectionParams {
    fn from(kv: KvParams) -> Self {
        Self::Kv { kv, memory: KvMemory::Host }
    }
}

/// A section. Every kind answers the calls below; the memory asks them in write order.
#[derive(Debug)]
enum Section {
    Kv(KvCache),
}

/// What a commit will do, by section; `None` where the state holds nothing of the section.
#[derive(Debug)]
pub(crate) struct MemoryPlan<'a> {
    sections: Vec<Option<SectionPlan<'a>>>,
    /// The input behind the state.
    pub end: Source<'a>,
    /// Sections of an older llama.cpp's partial state that were checked and skipped.
    pub n_legacy_skipped: usize,
}

#[derive(Debug)]
enum SectionPlan<'a> {
    Kv(KvPlan<'a>),
}

/// Sections in write order.
#[derive(Debug)]
pub(crate) struct Memory {
    sections: Vec<Section>,
    streams: Streams,
}

impl Memory {
    pub fn new(params: Vec<SectionParams>, streams: Streams) -> Result<Self> {
        if params.is_empty() {
            return Err(Error::arg("sections", "0 sections, a context has at least one"));
        }
        let is_full = |SectionParams::Kv { kv, .. }: &SectionParams| kv.swa.is_none();
        let full_attention: Vec<bool> = params.iter().map(is_full).collect();
        let name = |i: usize| match full_attention[..] {
            [_] => "kv".to_owned(),
            [true, false] => ["base", "swa"][i].to_owned(),
            _ => format!("kv {i}"),
        };
        let build = |(i, params): (usize, SectionParams)| {
            let SectionParams::Kv { kv, memory } = params;
            KvCache::new(&name(i), &kv, memory, streams).map(Section::Kv)
        };
        let sections = params.into_iter().enumerate().map(build).collect::<Result<_>>()?;
        Ok(Self { sections, streams })
    }

    /// Bytes of the planes on devices.
    pub fn device_bytes(&self) -> u64 {
        self.kv_caches().map(KvCache::device_bytes).sum()
    }

    /// Bytes that were allocated where `on` says.
    pub fn allocated(&self, on: impl Fn(Option<i32>) -> bool) -> u64 {
        self.kv_caches().map(|kv| kv.allocated(&on)).sum()
    }

    pub fn streams(&self) -> Streams {
        self.streams
    }

    /// The attention caches, in write order.
    pub fn kv_caches(&self) -> impl ExactSizeIterator<Item = &KvCache> {
        self.sections.iter().map(|Section::Kv(kv)| kv)
    }

    pub fn kv_caches_mut(&mut self) -> impl ExactSizeIterator<Item = &mut KvCache> {
        self.sections.iter_mut().map(|Section::Kv(kv)| kv)
    }

    pub fn kv_cache(&self, section: usize) -> Result<&KvCache> {
        let n = self.sections.len();
        self.kv_caches()
            .nth(section)
            .ok_or_else(|| Error::arg("section", format!("{section} is out of range [0, {n})")))
    }

    pub fn kv_cache_mut(&mut self, section: usize) -> Result<&mut KvCache> {
        let n = self.sections.len();
        self.kv_caches_mut()
            .nth(section)
            .ok_or_else(|| Error::arg("section", format!("{section} is out of range [0, {n})")))
    }

    // Sequence operations: all sections or none.

    pub fn clear(&mut self, data: bool, transfer: &Transfer) -> Result<()> {
        self.kv_caches_mut().for_each(KvCache::forget);
        if !data {
            return Ok(());
        }
        self.kv_caches_mut().try_for_each(|kv| kv.zero_all(transfer))
    }

    /// Attention can remove any range.
    pub fn seq_rm(&mut self, seq: Option<Seq>, range: PosRange) -> bool {
        self.kv_caches_mut().for_each(|kv| kv.seq_rm(seq, range));
        true
    }

    /// Whether [`Memory::seq_cp`] can be done.
    pub fn check_seq_cp(&self, src: Seq, dst: Seq, range: PosRange) -> Result<()> {
        self.kv_caches().try_for_each(|kv| kv.check_seq_cp(src, dst, range))
    }

    /// If it fails, the destination is empty.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq, range: PosRange, transfer: &Transfer) -> Result<()> {
        let copied = self.kv_caches_mut().try_for_each(|kv| kv.seq_cp(src, dst, range, transfer));
        if copied.is_err() {
            // Nothing can be had back of what it held.
            self.seq_rm(Some(dst), PosRange::ALL);
        }
        copied
    }

    pub fn seq_keep(&mut self, seq: Seq) {
        self.kv_caches_mut().for_each(|kv| kv.seq_keep(seq));
    }

    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        self.kv_caches().try_for_each(|kv| kv.check_seq_add(seq, range, delta))?;
        self.kv_caches_mut().try_for_each(|kv| kv.seq_add(seq, range, delta))
    }

    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) -> Result<()> {
        self.kv_caches_mut().try_for_each(|kv| kv.seq_div(seq, range, d))
    }

    /// The section that knows which positions are usable: the window's, where there is one.
    fn position_section(&self) -> Option<&KvCache> {
        self.kv_caches().find(|kv| !kv.geometry.swa.is_none()).or_else(|| self.kv_caches().next())
    }

    pub fn seq_pos_min(&self, seq: Seq) -> Option<Pos> {
        self.position_section().and_then(|kv| kv.seq_pos_min(seq))
    }

    pub fn seq_pos_max(&self, seq: Seq) -> Option<Pos> {
        self.position_section().and_then(|kv| kv.seq_pos_max(seq))
    }

    /// Sections of different sizes lose cells at different times: a shift would leave them out of step.
    pub fn sections_have_equal_size(&self) -> bool {
        let mut sizes = self.kv_caches().map(|kv| kv.geometry.kv_size);
        let first = sizes.next();
        sizes.all(|size| Some(size) == first)
    }

    // State

    pub fn state_write<'a>(&'a self, sink: &mut impl Sink<'a>, params: WriteParams) -> Result<()> {
        self.kv_caches().try_for_each(|kv| kv.state_write(sink, params))
    }

    /// Reads, checks and places every section. Changes nothing.
    ///
    /// Until October 2026 llama.cpp wrote full attention into partial states as well. Such a state is known by
    /// the bytes that are left when it is read the right way, and none when it is read the old way.
    pub fn state_plan<'a>(
        &self,
        source: &Source<'a>,
        flags: StateFlags,
        params: ReadParams,
    ) -> Result<MemoryPlan<'a>> {
        let plan = self.plan_sections(source.clone(), flags, params, false);
        let bytes_left = plan.as_ref().map_or(u64::MAX, |plan| plan.end.left());
        if bytes_left > 0 && self.kv_caches().any(|kv| !kv.geometry.writes(flags)) {
            let legacy = self.plan_sections(source.clone(), flags, params, true);
            if let Some(legacy) = legacy.ok().filter(|legacy| legacy.end.left() == 0) {
                return Ok(legacy);
            }
        }
        plan.map_err(|error| self.explain(error, source, flags, params))
    }

    /// What is really wrong with a state whose fields make no sense: it may be of an older layout, or have the
    /// other kind of cells, which no field tells. If it fits that way to the last byte, that is the reason.
    fn explain(&self, error: Error, source: &Source<'_>, flags: StateFlags, params: ReadParams) -> Error {
        let fits = |source: &Source<'_>, params: ReadParams| {
            self.plan_sections(source.clone(), flags, params, false).is_ok_and(|plan| plan.end.left() == 0)
        };
        for version in [StateVersion::V3, StateVersion::V2] {
            let older = source.as_version(version);
            let stated = |rotation| ReadParams { legacy_rotation: Some(rotation), ..params };
            if source.version() == StateVersion::CURRENT
                && (fits(&older, stated(LegacyRotation::Rotated))
                    || fits(&older, stated(LegacyRotation::Plain)))
            {
                return Error::Mismatch {
                    what: "older layout",
                    state: format!("version {}", version.seq_version()),
                    cache: format!("version {}", StateVersion::CURRENT.seq_version()),
                    place: "a state in memory has no version field: older ones are read from files".into(),
                };
            }
        }
        let flipped = ReadParams { flip_cell_ext: true, ..params };
        let Some(kv) = self.kv_caches().next().filter(|_| fits(source, flipped)) else { return error };
        let words = |ext: bool| if ext { "x, y and token of each cell" } else { "none" };
        Error::Mismatch {
            what: "mismatched cell ext",
            state: words(!kv.geometry.cell_ext).to_owned(),
            cache: words(kv.geometry.cell_ext).to_owned(),
            place: format!("section {}", kv.geometry.name),
        }
    }

    fn plan_sections<'a>(
        &self,
        mut source: Source<'a>,
        flags: StateFlags,
        params: ReadParams,
        legacy: bool,
    ) -> Result<MemoryPlan<'a>> {
        let mut sections = Vec::with_capacity(self.sections.len());
        let mut n_legacy_skipped = 0;
        for kv in self.kv_caches() {
            if kv.geometry.writes(flags) {
                let state = kv.geometry.state_read(&mut source, params)?;
                sections.push(Some(SectionPlan::Kv(kv.state_place(state, params.scope)?)));
            } else {
                if legacy {
                    kv.geometry.state_read(&mut source, params)?;
                    n_legacy_skipped += 1;
                }
                sections.push(None);
            }
        }
        Ok(MemoryPlan { sections, end: source, n_legacy_skipped })
    }

    /// Whether a commit overwrites cells that hold something: it cannot be taken back then.
    pub fn state_overwrites(&self, plan: &MemoryPlan<'_>) -> bool {
        self.planned(plan).any(|(kv, plan)| kv.state_overwrites(plan))
    }

    /// Does what was planned, the tensors of all sections in one batch.
    ///
    /// If that fails, the memory is as it was; a destination whose cells had to be overwritten is empty.
    pub fn state_commit(
        &mut self,
        plan: &MemoryPlan<'_>,
        transfer: &Transfer,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<()> {
        // Cells that are taken from others are taken first, so that nobody is left with tensors that are not his.
        let overwrites = self.state_overwrites(plan);
        let mut fetched = None;
        if overwrites {
            // What can be missing for the transfer is missed now, when nothing has been taken.
            let batch: Vec<_> =
                self.planned_mut(plan).flat_map(|(kv, plan)| kv.state_scatter(plan)).collect();
            fetched = Some(storage::prepare(&batch, transfer)?);
            drop(batch);
            self.planned_mut(plan).for_each(|(kv, plan)| kv.state_apply(plan));
        }
        let mut batch: Vec<_> =
            self.planned_mut(plan).flat_map(|(kv, plan)| kv.state_scatter(plan)).collect();
        let scattered = match fetched {
            Some(fetched) => fetched.scatter(&mut batch, transfer, progress),
            None => storage::scatter(&mut batch, transfer, progress),
        };
        drop(batch);
        if !overwrites && scattered.is_ok() {
            self.planned_mut(plan).for_each(|(kv, plan)| kv.state_apply(plan));
        }
        if overwrites && scattered.is_err() {
            self.planned_mut(plan).for_each(|(kv, plan)| kv.state_forget(plan));
            // What went wrong first is what the caller has to know.
            let cells: Vec<_> = self.planned_mut(plan).flat_map(|(kv, plan)| kv.state_cells(plan)).collect();
            if let Err(error) = storage::zero_cells(cells, transfer) {
                log::error!("the cells of a state that could not be restored are not zeroed: {error}");
            }
        }
        scattered
    }

    fn planned<'p>(
        &'p self,
        plan: &'p MemoryPlan<'_>,
    ) -> impl Iterator<Item = (&'p KvCache, &'p KvPlan<'p>)> {
        self.kv_caches().zip(&plan.sections).filter_map(|(kv, plan)| {
            let SectionPlan::Kv(plan) = plan.as_ref()?;
            Some((kv, plan))
        })
    }

    fn planned_mut<'p>(
        &'p mut self,
        plan: &'p MemoryPlan<'_>,
    ) -> impl Iterator<Item = (&'p mut KvCache, &'p KvPlan<'p>)> {
        self.kv_caches_mut().zip(&plan.sections).filter_map(|(kv, plan)| {
            let SectionPlan::Kv(plan) = plan.as_ref()?;
            Some((kv, plan))
        })
    }
}
