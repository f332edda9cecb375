//! Where the cells of a state go, and what a commit does to cells.

use super::geometry::Geometry;
use super::kv_cache::KvCache;
use super::kv_read::{KvPlan, KvState, ReadParams, StreamPlan, StreamState};
use super::kv_write::Scope;
use super::rewind::whole_end;
use crate::cells::{CellMeta, Cells, Placement};
use crate::error::{Error, Result};
use crate::storage::CellMap;
use crate::types::{Move, Pos, PosRange, Seq};

/// What the section of a state has of its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Cells that lie behind the range that is wanted.
    pub n_cut: usize,
    /// The largest position, wanted or not.
    pub pos_max: Option<Pos>,
}

impl KvState<'_> {
    /// Leaves out the cells whose positions are not wanted.
    fn keep(&mut self, range: PosRange) {
        if range.is_everything() {
            return;
        }
        for state in &mut self.streams {
            let is_cut = |meta: &CellMeta| i64::from(meta.pos) >= range.p1;
            self.found = Found {
                n_cut: state.metas.iter().filter(|&meta| is_cut(meta)).count(),
                pos_max: state.metas.iter().map(|meta| meta.pos).max(),
            };
            let wanted: Vec<u32> = (0..)
                .zip(&state.metas)
                .filter(|(_, meta)| range.contains(meta.pos))
                .map(|(i, _)| i)
                .collect();
            state.metas.retain(|meta| range.contains(meta.pos));
            state.wanted = Some(wanted);
        }
    }
}

impl<'a> KvState<'a> {
    /// Finds cells for a state. `place` is asked for those of a sequence, with the stream that takes them.
    pub(super) fn place(
        self,
        geometry: &Geometry,
        scope: Scope,
        mut place: impl FnMut(usize, Seq, &StreamState<'a>) -> Result<Placement>,
    ) -> Result<KvPlan<'a>> {
        let mut streams = Vec::new();
        for state in self.streams {
            let n_src = state.n_src;
            let (stream, Placement { mut kept, cells }) = match scope {
                Scope::Whole => {
                    let all: Vec<u32> = (0..n_src).collect();
                    (state.stream, Placement { kept: all.clone(), cells: all })
                }
                Scope::Seq(dest) => {
                    let stream = geometry.streams.of(dest);
                    (stream, place(stream, dest, &state)?)
                }
            };
            let StreamState { stream: src, mut metas, wanted, tensors, .. } = state;
            if kept.len() < metas.len() {
                metas = kept.iter().map(|&i| metas[i as usize]).collect();
            }
            if let Some(wanted) = wanted {
                for i in &mut kept {
                    *i = wanted[*i as usize];
                }
            }
            let map = CellMap::new(Move::of_pairs(kept.into_iter().zip(cells.iter().copied())))?;
            streams.push(StreamPlan { src, stream, metas, cells, map, n_src, tensors });
        }
        Ok(KvPlan { scope, removed: PosRange::ALL, found: self.found, streams })
    }
}

impl StreamPlan<'_> {
    /// Which of the state's cells are kept, in order.
    fn kept(&self) -> impl Iterator<Item = u32> + '_ {
        self.map.moves().iter().flat_map(|m| m.src..m.src + m.len)
    }
}

impl KvCache {
    /// Finds cells for a state. Changes nothing. Where a window is added to, `full_attention` is what the destination will have
    /// there, by position.
    pub fn state_place<'a>(
        &self,
        mut state: KvState<'a>,
        params: ReadParams,
        full_attention: &[(Pos, u32)],
    ) -> Result<KvPlan<'a>> {
        state.keep(params.range);
        let swa = self.geometry.swa;
        let mut removed = if params.append { PosRange { p0: 0, p1: 0 } } else { PosRange::ALL };
        let mut plan = state.place(&self.geometry, params.scope, |stream, dest, state| {
            let cells = &self.cells[stream];
            let placement = if params.append && !state.metas.is_empty() {
                let from = self.whole_from(dest, &state.metas, full_attention)?;
                cells.place_behind(dest, &state.metas, swa, from).map(|(range, placement)| {
                    removed = range;
                    placement
                })
            } else {
                let dest = Some(dest).filter(|_| !params.append);
                cells.place(dest, &state.metas, swa, true)
            };
            placement.map_err(|shortage| self.geometry.shortage(shortage, stream))
        })?;
        plan.removed = removed;
        Ok(plan)
    }

    /// From where on the destination and `metas`, which have to be behind it, have what full attention has: older cells of a window are worth
    /// nothing behind a gap.
    fn whole_from(&self, dest: Seq, metas: &[CellMeta], full_attention: &[(Pos, u32)]) -> Result<Pos> {
        let own = self.seq_cells(dest).seq_cells(dest, PosRange::ALL);
        let Some(&(pos_max, _)) = own.last() else { return Ok(0) };
        if let Some(pos) = metas.iter().map(|meta| meta.pos).min().filter(|&pos| pos <= pos_max) {
            return Err(Error::PositionsMeet {
                pos,
                pos_max,
                place: format!("section {}", self.geometry.name),
            });
        }
        if self.geometry.swa.is_none() {
            return Ok(0);
        }
        let all = after(own, PosRange { p0: 0, p1: 0 }, metas);
        Ok(whole_end(&all, full_attention).map_or(0, |(first, _)| first))
    }

    /// What the destination will have, by position.
    pub fn entries_after(&self, plan: &KvPlan<'_>, dest: Seq) -> Vec<(Pos, u32)> {
        let own = self.seq_cells(dest).seq_cells(dest, PosRange::ALL);
        after(own, plan.removed, plan.streams.iter().flat_map(|stream| &stream.metas))
    }

    /// Puts a state into the cells that its source's state takes. Changes nothing.
    pub fn state_place_beside<'a>(
        &self,
        state: KvState<'a>,
        scope: Scope,
        source: &KvPlan<'_>,
    ) -> Result<KvPlan<'a>> {
        let geometry = &self.geometry;
        let layout = |got: usize, want: usize| geometry.mismatch("mirrored slot layout", got, want, None);
        if state.streams.len() != source.streams.len() {
            return Err(layout(state.streams.len(), source.streams.len()));
        }
        for (own, source) in state.streams.iter().zip(&source.streams) {
            if own.stream != source.src {
                return Err(geometry.mismatch("mirrored stream", own.stream, source.src, None));
            }
            if own.n_src != source.n_src {
                return Err(layout(own.n_src as usize, source.n_src as usize));
            }
            for (own, source) in source.kept().map(|i| &own.metas[i as usize]).zip(&source.metas) {
                if own.pos != source.pos {
                    return Err(geometry.mismatch("mirrored pos", own.pos, source.pos, None));
                }
                if own.seqs != source.seqs {
                    return Err(geometry.mismatch(
                        "mirrored n_seq_id",
                        own.seqs.len(),
                        source.seqs.len(),
                        None,
                    ));
                }
            }
        }
        let mut sources = source.streams.iter();
        let mut plan = state.place(geometry, scope, |_, _, state| {
            let source = sources.next().filter(|source| source.src == state.stream);
            let source = source.ok_or_else(|| layout(state.metas.len(), 0))?;
            Ok(Placement { kept: source.kept().collect(), cells: source.cells.clone() })
        })?;
        plan.removed = source.removed;
        Ok(plan)
    }

    /// Whether the state takes cells that hold something, the destination's own included.
    pub fn state_overwrites(&self, plan: &KvPlan<'_>) -> bool {
        plan.streams.iter().any(|stream| {
            let cells = self.cells(stream.stream);
            stream.cells.iter().any(|&cell| cells.is_used(cell))
        })
    }

    /// Replaces the cells of the destination by those of the state, or adds these.
    pub fn state_apply(&mut self, plan: &KvPlan<'_>) {
        match plan.scope {
            Scope::Seq(dest) => self.seq_rm(Some(dest), plan.removed),
            Scope::Whole => self.cells.iter_mut().for_each(Cells::clear),
        }
        for stream in &plan.streams {
            self.cells[stream.stream].apply(&stream.cells, &stream.metas);
        }
    }

    /// Empties the destination.
    pub fn state_forget(&mut self, plan: &KvPlan<'_>) {
        match plan.scope {
            Scope::Seq(dest) => self.seq_rm(Some(dest), PosRange::ALL),
            Scope::Whole => self.cells.iter_mut().for_each(Cells::clear),
        }
    }
}

/// Cells by position without those of `removed`, and then those of `metas`.
fn after<'m>(
    own: &[(Pos, u32)],
    removed: PosRange,
    metas: impl IntoIterator<Item = &'m CellMeta>,
) -> Vec<(Pos, u32)> {
    let kept = own.iter().copied().filter(|&(pos, _)| !removed.contains(pos));
    let mut all: Vec<_> = kept.chain(metas.into_iter().map(|meta| (meta.pos, 0))).collect();
    all.sort_unstable();
    all
}
