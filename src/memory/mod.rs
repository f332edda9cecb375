//! The memory of a context: sections in write order, and what is done to all of them at once.
//!
//! One attention cache is one section; an iSWA pair is two, full attention first; recurrent states are one more, behind the
//! attention caches. An operation on the memory is done in every section or, where it can be refused, in none.

mod convert;
mod dsv4;
mod geometry;
mod kv_cache;
mod kv_layout;
mod kv_place;
mod kv_read;
mod kv_view;
mod kv_write;
mod planes;
mod presets;
mod range;
mod recurrent;
mod rewind;
mod rope;
mod section;

pub use dsv4::{Dsv4Compressor, Dsv4CompressorParams, Dsv4Memory, Dsv4Params, Dsv4Planes, Dsv4Tensor};
pub use geometry::{KvParams, LayerParams, Streams, TensorParams, swa_kv_size};
pub use kv_cache::{KvMemory, KvPlanes};
pub use kv_read::LegacyRotation;
pub use kv_view::{KvView, SlotInfos, TensorInput, ViewCell, ViewCells};
pub use planes::SectionMemory;
pub use range::Kept;
pub use recurrent::{
    RecurrentLayerParams, RecurrentMemory, RecurrentParams, RecurrentPlanes, RecurrentSlot, RecurrentState,
    RecurrentTensor,
};
pub use rewind::RewindObstacle;
pub use rope::RopeParams;
pub use section::{SectionKind, SectionParams};

pub(crate) use convert::Convert;
pub(crate) use dsv4::{Dsv4Cache, n_state_planes};
pub(crate) use geometry::TensorGeometry;
pub(crate) use kv_cache::KvCache;
pub(crate) use kv_read::ReadParams;
pub(crate) use kv_view::ViewPlan;
pub(crate) use kv_write::{Scope, WriteParams};
pub(crate) use recurrent::{FoundSlot, RecurrentCache, SequenceSet};
pub(crate) use rewind::SavedReach;
pub(crate) use rope::SectionRope;
pub(crate) use section::Section;

use std::ops::Range;

use crate::error::{Error, Result};
use crate::format::StateVersion;
use crate::state::{Input, Sink, Source};
use crate::storage::{self, Plane, ProgressCallback, Scatter, Transfer};
use crate::types::{Pos, PosRange, Seq, StateFlags};
use section::{SHARED, SectionPlan};

/// What a commit will do, by section.
#[derive(Debug)]
pub(crate) struct MemoryPlan<'a> {
    sections: Vec<SectionPlan<'a>>,
    /// The input behind the state.
    pub end: Source<'a>,
    /// Sections of an older llama.cpp's partial state that were checked and skipped.
    pub n_legacy_skipped: usize,
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
        let names = names(&params);
        let build = |(params, name): (SectionParams, String)| Section::new(&name, params, streams);
        let sections = params.into_iter().zip(names).map(build).collect::<Result<_>>()?;
        let memory = Self { sections, streams };
        memory.check_mirrors()?;
        memory.check_dsv4()?;
        Ok(memory)
    }

    fn check_mirrors(&self) -> Result<()> {
        for (i, section) in self.sections.iter().enumerate() {
            let Some((kv, source)) = section.as_kv().and_then(|kv| Some((kv, kv.geometry.mirrors?))) else {
                continue;
            };
            let attention = self.sections[..i].get(source).and_then(Section::as_kv);
            let source = attention.ok_or_else(|| {
                let reason = format!("{source} is no attention cache before section {i}");
                Error::arg(format!("{}.mirrors", section.name()), reason)
            })?;
            kv.geometry.check_mirrors(&source.geometry)?;
        }
        Ok(())
    }

    /// The header of a DSV4 state is that of all its sections, and the compressed rows are those of all positions.
    fn check_dsv4(&self) -> Result<()> {
        match (self.dsv4(), &self.sections[..]) {
            (None, _) => Ok(()),
            (_, [Section::Kv(base), Section::Kv(_), Section::Dsv4(dsv4)]) => {
                dsv4.geometry.check_rows(base.geometry.kv_size)
            }
            (Some(_), sections) => {
                let names: Vec<_> = sections.iter().map(Section::name).collect();
                let reason = format!(
                    "{}; DSV4 is a pair of attention caches and the compressed half",
                    names.join(", ")
                );
                Err(Error::arg("sections", reason))
            }
        }
    }

    /// Bytes of the planes on devices.
    pub fn device_bytes(&self) -> u64 {
        planes::bytes(self.planes(), |plane| plane.device().is_some())
    }

    /// The device of each plane that is on one.
    pub fn devices(&self) -> impl Iterator<Item = i32> + '_ {
        self.planes().filter_map(Plane::device)
    }

    /// Bytes that were allocated where `on` says.
    pub fn allocated(&self, on: impl Fn(Option<i32>) -> bool) -> u64 {
        planes::bytes(self.planes(), |plane| plane.is_allocated() && on(plane.device()))
    }

    fn planes(&self) -> impl Iterator<Item = &Plane> {
        self.sections.iter().flat_map(Section::planes)
    }

    pub fn streams(&self) -> Streams {
        self.streams
    }

    /// The sections, in write order.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    pub fn section_mut(&mut self, section: usize) -> Option<&mut Section> {
        self.sections.get_mut(section)
    }

    /// The attention caches, in write order.
    pub fn kv_caches(&self) -> impl Iterator<Item = &KvCache> {
        self.sections.iter().filter_map(Section::as_kv)
    }

    pub fn kv_caches_mut(&mut self) -> impl Iterator<Item = &mut KvCache> {
        self.sections.iter_mut().filter_map(Section::as_kv_mut)
    }

    fn recurrent_caches(&self) -> impl Iterator<Item = &RecurrentCache> {
        self.sections.iter().filter_map(Section::as_recurrent)
    }

    pub fn section(&self, section: usize) -> Result<&Section> {
        let n = self.sections.len();
        let found = self.sections.get(section);
        found.ok_or_else(|| Error::arg("section", format!("{section} is out of range [0, {n})")))
    }

    pub fn kv_cache(&self, section: usize) -> Result<&KvCache> {
        let found = self.section(section)?;
        let other = || Error::arg("section", format!("{section} is {}, no attention cache", found.name()));
        found.as_kv().ok_or_else(other)
    }

    pub fn kv_cache_mut(&mut self, section: usize) -> Result<&mut KvCache> {
        self.kv_cache(section)?;
        let found = self.sections.get_mut(section).and_then(Section::as_kv_mut);
        found.ok_or_else(|| Error::Internal(format!("section {section} is gone")))
    }

    pub fn recurrent_cache(&self, section: usize) -> Result<&RecurrentCache> {
        let found = self.section(section)?;
        let other = || Error::arg("section", format!("{section} is {}, not recurrent", found.name()));
        found.as_recurrent().ok_or_else(other)
    }

    pub fn recurrent_cache_mut(&mut self, section: usize) -> Result<&mut RecurrentCache> {
        self.recurrent_cache(section)?;
        let found = self.sections.get_mut(section).and_then(Section::as_recurrent_mut);
        found.ok_or_else(|| Error::Internal(format!("section {section} is gone")))
    }

    // Sequence operations: all sections or none.

    pub fn clear(&mut self, data: bool, transfer: &Transfer) -> Result<()> {
        all(self.sections.iter_mut().map(|section| section.clear(data, transfer)))
    }

    /// The last position of a sequence in attention.
    fn raw_pos_max(&self, seq: Option<Seq>) -> Option<Pos> {
        self.position_section()?.seq_pos_max(seq?)
    }

    /// Whether every section can remove just that.
    pub fn can_seq_rm(&self, seq: Option<Seq>, range: PosRange) -> bool {
        let pos_max = self.raw_pos_max(seq);
        self.sections.iter().all(|section| section.can_seq_rm(seq, range, pos_max))
    }

    /// How many positions can be cut off the end of a sequence so that its states are there; `None`: any.
    pub fn max_cut(&self, seq: Seq) -> Option<u32> {
        self.sections.iter().filter_map(|section| section.max_cut(seq)).min()
    }

    /// False, and nothing has changed, if a section cannot remove just that. If it fails, it is removed, and rows that are not used
    /// any more may not be zero.
    pub fn seq_rm(&mut self, seq: Option<Seq>, range: PosRange, transfer: &Transfer) -> Result<bool> {
        if !self.can_seq_rm(seq, range) {
            return Ok(false);
        }
        let pos_max = self.raw_pos_max(seq);
        all(self.sections.iter_mut().map(|section| section.seq_rm(seq, range, pos_max, transfer)))?;
        Ok(true)
    }

    /// Whether [`Memory::seq_cp`] can be done.
    pub fn check_seq_cp(&self, src: Seq, dst: Seq, range: PosRange) -> Result<()> {
        self.sections.iter().try_for_each(|section| section.check_seq_cp(src, dst, range))
    }

    /// If it fails, the destination is empty.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq, range: PosRange, transfer: &Transfer) -> Result<()> {
        let mut sections = self.sections.iter_mut();
        let copied = sections.try_for_each(|section| section.seq_cp(src, dst, range, transfer));
        if copied.is_err() {
            // Nothing can be had back of what it held. What went wrong first is what the caller has to know.
            if let Err(error) = self.seq_rm(Some(dst), PosRange::ALL, transfer) {
                log::error!("the rows of a sequence that could not be copied are not zeroed: {error}");
            }
        }
        copied
    }

    pub fn seq_keep(&mut self, seq: Seq, transfer: &Transfer) -> Result<()> {
        if self.dsv4().is_none() {
            self.sections.iter_mut().for_each(|section| section.seq_keep(seq));
            return Ok(());
        }
        let n_seq_max = self.streams.n_seq_max;
        let others = (0..n_seq_max.cast_signed()).filter_map(|seq_id| Seq::new(seq_id, n_seq_max));
        let others: Vec<Seq> = others.filter(|&other| other != seq).collect();
        all(others.into_iter().map(|other| self.seq_rm(Some(other), PosRange::ALL, transfer).map(drop)))
    }

    /// The compressed half of a DSV4 memory.
    pub fn dsv4(&self) -> Option<&Dsv4Cache> {
        self.sections.iter().find_map(Section::as_dsv4)
    }

    pub fn dsv4_mut(&mut self) -> Option<&mut Dsv4Cache> {
        self.sections.iter_mut().find_map(Section::as_dsv4_mut)
    }

    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        self.sections.iter().try_for_each(|section| section.check_seq_add(seq, range, delta))?;
        self.sections.iter_mut().try_for_each(|section| section.seq_add(seq, range, delta))
    }

    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) -> Result<()> {
        self.sections.iter_mut().try_for_each(|section| section.seq_div(seq, range, d))
    }

    /// The attention cache that knows which positions are usable: the window's, where there is one.
    fn position_section(&self) -> Option<&KvCache> {
        self.kv_caches().find(|kv| !kv.geometry.swa.is_none()).or_else(|| self.kv_caches().next())
    }

    /// From where a sequence is usable: attention cannot go on without the recurrent state, nor the other way round.
    ///
    /// An empty half counts as -1, so that a sequence whose recurrent state alone was restored does not look usable.
    pub fn seq_pos_min(&self, seq: Seq) -> Option<Pos> {
        if self.dsv4().is_some() {
            // Compressed rows cannot go back within the window.
            return self.seq_pos_max(seq);
        }
        let attention = self.position_section().map(|kv| kv.seq_pos_min(seq));
        let recurrent = self.recurrent_caches().map(|recurrent| recurrent.seq_pos(seq));
        attention.into_iter().chain(recurrent).max().flatten()
    }

    pub fn seq_pos_max(&self, seq: Seq) -> Option<Pos> {
        let attention = self.position_section().map(|kv| kv.seq_pos_max(seq));
        let recurrent = self.recurrent_caches().map(|recurrent| recurrent.seq_pos(seq));
        attention.into_iter().chain(recurrent).min().flatten()
    }

    /// Sections of different sizes lose cells at different times: a shift would leave them out of step.
    pub fn sections_have_equal_size(&self) -> bool {
        let mut sizes = self.kv_caches().map(|kv| kv.geometry.kv_size);
        let first = sizes.next();
        sizes.all(|size| Some(size) == first)
    }

    // State

    pub fn state_write<'a>(&'a self, sink: &mut impl Sink<'a>, params: WriteParams) -> Result<()> {
        let pos_max = self.raw_pos_max(params.scope.seq());
        self.sections.iter().try_for_each(|section| section.write_header(sink, params.flags))?;
        self.sections.iter().try_for_each(|section| section.state_write(sink, params, pos_max))
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
        self.sections.iter().try_for_each(|section| section.read_header(&mut source, flags))?;
        for section in &self.sections {
            let mut plan = SectionPlan::Nothing;
            if section.writes(flags) {
                let full_attention = self.full_attention_after(section, params, &sections);
                plan = section.state_plan(&mut source, flags, params, &sections, &full_attention)?;
            } else if let Some(kv) = section.as_kv().filter(|_| legacy) {
                kv.geometry.state_read(&mut source, params)?;
                n_legacy_skipped += 1;
            }
            sections.push(plan);
        }
        self.check_end(&sections, params)?;
        Ok(MemoryPlan { sections, end: source, n_legacy_skipped })
    }

    /// What a commit converts, in words.
    pub fn state_notes(&self, plan: &MemoryPlan<'_>) -> Vec<String> {
        self.sections
            .iter()
            .zip(&plan.sections)
            .flat_map(|(section, plan)| section.state_notes(plan))
            .collect()
    }

    /// Whether a commit overwrites cells that hold something: it cannot be taken back then.
    pub fn state_overwrites(&self, plan: &MemoryPlan<'_>) -> bool {
        self.sections.iter().zip(&plan.sections).any(|(section, plan)| section.state_overwrites(plan))
    }

    /// Which bytes of files a commit will read.
    pub fn state_file_ranges(&mut self, plan: &MemoryPlan<'_>) -> Result<Vec<Range<u64>>> {
        let batch: Vec<_> =
            self.planned(plan).flat_map(|(section, plan)| section.state_scatter(plan)).collect();
        storage::file_ranges(batch.iter().map(Scatter::placed))
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
        if log::log_enabled!(log::Level::Info) {
            self.state_notes(plan).iter().for_each(|note| log::info!("converted: {note}"));
        }
        // Cells that are taken from others are taken first, so that nobody is left with tensors that are not his.
        let overwrites = self.state_overwrites(plan);
        let mut fetched = None;
        if overwrites {
            // What can be missing for the transfer is missed now, when nothing has been taken.
            let batch: Vec<_> =
                self.planned(plan).flat_map(|(section, plan)| section.state_scatter(plan)).collect();
            fetched = Some(storage::prepare(&batch, transfer)?);
            drop(batch);
            self.planned(plan).for_each(|(section, plan)| section.state_apply(plan));
        }
        let mut batch: Vec<_> =
            self.planned(plan).flat_map(|(section, plan)| section.state_scatter(plan)).collect();
        let scattered = match fetched {
            Some(fetched) => fetched.scatter(&mut batch, transfer, progress),
            None => storage::scatter(&mut batch, transfer, progress),
        };
        drop(batch);
        let copied = scattered.and_then(|()| {
            let rest = self.planned(plan).flat_map(|(section, plan)| section.state_rest(plan));
            storage::zero_cells(rest.collect(), transfer)
        });
        if copied.is_ok() {
            if !overwrites {
                self.planned(plan).for_each(|(section, plan)| section.state_apply(plan));
            }
            return Ok(());
        }
        if overwrites {
            self.planned(plan).for_each(|(section, plan)| section.state_forget(plan));
        }
        // Cells that were free may hold anything.
        let touched = self.planned(plan).filter(|(section, _)| overwrites || !section.has_cells());
        let cells = touched.flat_map(|(section, plan)| section.state_cells(plan)).collect();
        // What went wrong first is what the caller has to know.
        if let Err(error) = storage::zero_cells(cells, transfer) {
            log::error!("the cells of a state that could not be restored are not zeroed: {error}");
        }
        copied
    }

    fn planned<'p>(
        &'p mut self,
        plan: &'p MemoryPlan<'_>,
    ) -> impl Iterator<Item = (&'p mut Section, &'p SectionPlan<'p>)> {
        self.sections.iter_mut().zip(&plan.sections)
    }
}

/// Does all of them; the first error is told.
fn all(results: impl Iterator<Item = Result<()>>) -> Result<()> {
    results.fold(Ok(()), Result::and)
}

/// What the sections are called in messages.
fn names(params: &[SectionParams]) -> Vec<String> {
    let is_full = |params: &SectionParams| match params {
        SectionParams::Kv { kv, .. } if kv.mirrors.is_none() => Some(kv.swa.is_none()),
        _ => None,
    };
    let attention: Vec<bool> = params.iter().filter_map(is_full).collect();
    let kv_name = |i: usize| match attention[..] {
        [_] => "kv".to_owned(),
        [true, false] => ["base", "swa"][i].to_owned(),
        _ => format!("kv {i}"),
    };
    let mut n_kv = 0;
    let name = |params: &SectionParams| match params {
        SectionParams::Kv { kv: KvParams { mirrors: Some(source), .. }, .. } => match attention[..] {
            [_] => "indexer".to_owned(),
            _ => format!("indexer of {source}"),
        },
        SectionParams::Kv { .. } => {
            n_kv += 1;
            kv_name(n_kv - 1)
        }
        SectionParams::Recurrent { .. } => "recurrent".to_owned(),
        SectionParams::Shared => SHARED.to_owned(),
        SectionParams::Dsv4 { .. } => "dsv4".to_owned(),
    };
    params.iter().map(name).collect()
}
