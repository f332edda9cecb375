//! `state_read_sinfo`, in three steps: read and check, place, commit. Only commit changes the cache.

use std::fmt::Display;

use super::convert::{self, Convert};
use super::geometry::{Geometry, mismatch};
use super::kv_cache::{KvCache, KvPlanes, StreamPlanes};
use super::kv_write::Scope;
use crate::cells::{CellMeta, Cells, Placement, SeqSet, Shortage};
use crate::error::{Error, Result};
use crate::state::{Input, Source};
use crate::storage::{CellMap, Conversion, Placed, Plane, Scatter, StateTensor};
use crate::types::{CellExt, Move, PosRange, Seq, TOKEN_NULL, Token};

/// What the caller says about files older than version 4, which do not record rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegacyRotation {
    /// They were made with the rotation that llama.cpp applies to quantised caches by default.
    Rotated,
    /// They were made without rotation.
    Plain,
}

/// How a state is to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadParams {
    pub scope: Scope,
    pub legacy_rotation: Option<LegacyRotation>,
    pub convert: Convert,
    /// Read as if cells had an ext where the cache has none, and the other way round: only to find out why a
    /// state does not fit.
    pub flip_cell_ext: bool,
}

/// A tensor of a stream, by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvTensor {
    K(usize),
    V(usize),
}

impl KvTensor {
    fn field(self) -> &'static str {
        match self {
            Self::K(_) => "K rows",
            Self::V(_) => "V",
        }
    }
}

/// A section's bytes, checked against the cache's geometry.
#[derive(Debug)]
pub(crate) struct KvState<'a> {
    /// Streams of the state, those without cells included.
    pub(super) n_stream: u32,
    /// Those that hold cells.
    pub(super) streams: Vec<StreamState<'a>>,
}

#[derive(Debug)]
pub(super) struct StreamState<'a> {
    /// Its number in the state.
    pub(super) stream: usize,
    /// One per cell, in the order of the state. In a sequence state every `seqs` is the destination's.
    pub(super) metas: Vec<CellMeta>,
    /// The tensors: K of every layer, then V of every layer that has one.
    tensors: Vec<StateTensor<'a>>,
}

/// What a commit will do to a section.
#[derive(Debug)]
pub(crate) struct KvPlan<'a> {
    pub(super) scope: Scope,
    pub(super) streams: Vec<StreamPlan<'a>>,
}

#[derive(Debug)]
pub(super) struct StreamPlan<'a> {
    /// Its number in the state.
    pub(super) src: usize,
    /// The stream that takes the cells.
    pub(super) stream: usize,
    /// `metas[i]` goes into `cells[i]`.
    pub(super) metas: Vec<CellMeta>,
    pub(super) cells: Vec<u32>,
    map: CellMap,
    /// Cells of the state, those that were dropped included.
    n_src: u32,
    tensors: Vec<StateTensor<'a>>,
}

impl Geometry {
    /// Reads the section's bytes and checks everything that can be checked without the cells.
    pub fn state_read<'a>(&self, source: &mut Source<'a>, params: ReadParams) -> Result<KvState<'a>> {
        let mut streams = Vec::new();
        // Who keeps the tensors elsewhere moves them as they are.
        let convert = if source.tensors_elsewhere().is_some() { Convert::Nothing } else { params.convert };
        let params = ReadParams { convert, ..params };
        let n_stream = self.read_streams(source, params, |source, stream, metas| {
            let mut tensors = Vec::with_capacity(2 * self.n_layer());
            self.read_data(source, metas.len(), params, |source, tensor, bytes, conversion| {
                tensors.push(StateTensor { bytes: source.tensor(tensor.field(), bytes)?, conversion });
                Ok(())
            })?;
            streams.push(StreamState { stream: stream as usize, metas, tensors });
            Ok(())
        })?;
        Ok(KvState { n_stream, streams })
    }

    /// Reads a section up to the data of each stream that holds cells, for which `each` is called with the
    /// stream of the state and its cells, in order. Returns the number of streams of the state.
    pub(super) fn read_streams<I: Input>(
        &self,
        input: &mut I,
        params: ReadParams,
        mut each: impl FnMut(&mut I, u32, Vec<CellMeta>) -> Result<()>,
    ) -> Result<u32> {
        let n_stream = input.u32("n_stream")?;
        let fits = match params.scope {
            Scope::Whole => n_stream == self.streams.n_stream,
            Scope::Seq(_) => (1..=crate::types::MAX_SEQ).contains(&n_stream),
        };
        if !fits {
            return Err(self.mismatch("n_stream mismatch", n_stream, self.streams.n_stream, None));
        }
        let mut holder = None;
        for stream in 0..n_stream {
            let cell_count = input.u32("cell_count")?;
            if cell_count == 0 {
                continue;
            }
            if let (Scope::Seq(_), Some(first)) = (params.scope, holder.replace(stream)) {
                return Err(Error::corrupt(
                    "cell_count",
                    format_args!("streams {first} and {stream} both hold cells"),
                    "one stream in a sequence state",
                ));
            }
            let metas = self.read_metadata(input, cell_count, stream, params)?;
            each(input, stream, metas)?;
        }
        Ok(n_stream)
    }

    /// The cells of one stream of a state.
    fn read_metadata(
        &self,
        input: &mut impl Input,
        cell_count: u32,
        stream: u32,
        params: ReadParams,
    ) -> Result<Vec<CellMeta>> {
        // Nothing is allocated for cells that the input is too short to hold.
        const LEAST_CELL_BYTES: u64 = 12;
        let need = u64::from(cell_count) * LEAST_CELL_BYTES;
        let left = input.left();
        if let Some(left) = left.filter(|&left| left < need) {
            return Err(Error::Truncated { field: "cells", offset: input.offset(), need, left });
        }
        // Of input whose end is not known, no more is believed than the cache can hold.
        if (params.scope == Scope::Whole || left.is_none()) && cell_count > self.kv_size {
            return Err(self.no_space(u64::from(cell_count), u64::from(self.kv_size), stream as usize));
        }
        let has_ext = self.cell_ext != params.flip_cell_ext;
        let mut metas = Vec::new();
        metas.try_reserve_exact(cell_count as usize).map_err(|_| Error::OutOfMemory {
            what: "the cells of the state",
            bytes: u64::from(cell_count) * size_of::<CellMeta>() as u64,
        })?;
        for _ in 0..cell_count {
            let pos = input.i32("pos")?;
            if pos < 0 {
                return Err(Error::corrupt("pos", pos, "at least 0"));
            }
            let n_seq_id = input.u32("n_seq_id")?;
            let ext = if has_ext { read_ext(input)? } else { CellExt::default() };
            let seqs = match params.scope {
                Scope::Seq(dest) => {
                    if n_seq_id != 1 {
                        return Err(Error::corrupt("n_seq_id", n_seq_id, "1 in a sequence state"));
                    }
                    input.i32("seq_id")?;
                    SeqSet::of(dest)
                }
                Scope::Whole => self.read_seq_ids(input, n_seq_id, stream)?,
            };
            metas.push(CellMeta { pos, ext, seqs });
        }
        if has_ext && !input.version().ext_has_token() {
            lift_tokens(&mut metas, input.tokens());
        }
        Ok(metas)
    }

    fn read_seq_ids(&self, input: &mut impl Input, n_seq_id: u32, stream: u32) -> Result<SeqSet> {
        let n_seq_max = self.streams.n_seq_max;
        if !(1..=n_seq_max).contains(&n_seq_id) {
            return Err(Error::corrupt("n_seq_id", n_seq_id, format_args!("1 to n_seq_max {n_seq_max}")));
        }
        let mut seqs = SeqSet::EMPTY;
        for _ in 0..n_seq_id {
            let seq_id = input.i32("seq_id")?;
            let seq = Seq::new(seq_id, n_seq_max).ok_or_else(|| {
                Error::corrupt("seq_id", seq_id, format_args!("a sequence in [0, {n_seq_max})"))
            })?;
            if self.streams.of(seq) != stream as usize {
                return Err(Error::corrupt("seq_id", seq_id, format_args!("a sequence of stream {stream}")));
            }
            if seqs.contains(seq) {
                return Err(Error::corrupt("seq_id", format_args!("{seq_id} twice in one cell"), "once"));
            }
            seqs.insert(seq);
        }
        Ok(seqs)
    }

    /// Reads the data of a stream of `n_cells` cells; `take` is called with the bytes of each tensor where they
    /// stand in the input, and with how they become those of the cache.
    pub(super) fn read_data<I: Input>(
        &self,
        input: &mut I,
        n_cells: usize,
        params: ReadParams,
        mut take: impl FnMut(&mut I, KvTensor, u64, Option<Conversion>) -> Result<()>,
    ) -> Result<()> {
        let layout = self.read_layout(input, params)?;
        let n = n_cells as u64;
        for layer in 0..self.n_layer() {
            let head = self.read_k_head(input, layer, layout)?;
            take(input, KvTensor::K(layer), head.bytes(n)?, head.conversion)?;
        }
        for (layer, v) in self.v.iter().enumerate() {
            let Some(v) = v else { continue };
            let head = self.read_v_head(input, layer, v, layout)?;
            take(input, KvTensor::V(layer), head.bytes(n)?, head.conversion)?;
        }
        Ok(())
    }

    pub(super) fn mismatch(
        &self,
        what: &'static str,
        state: impl Display,
        cache: impl Display,
        layer: Option<usize>,
    ) -> Error {
        mismatch(&self.name, what, state, cache, layer)
    }

    fn no_space(&self, need: u64, free: u64, stream: usize) -> Error {
        Error::NoSpace { need, free, kv_size: self.kv_size, place: self.place(stream) }
    }

    pub(super) fn shortage(&self, shortage: Shortage, stream: usize) -> Error {
        self.no_space(shortage.need, shortage.free, stream)
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
            let n_src = u32::try_from(state.metas.len()).unwrap_or(u32::MAX);
            let (stream, Placement { kept, cells }) = match scope {
                Scope::Whole => {
                    let all: Vec<u32> = (0..n_src).collect();
                    (state.stream, Placement { kept: all.clone(), cells: all })
                }
                Scope::Seq(dest) => {
                    let stream = geometry.streams.of(dest);
                    (stream, place(stream, dest, &state)?)
                }
            };
            let map = CellMap::new(Move::of_pairs(kept.iter().copied().zip(cells.iter().copied())))?;
            let StreamState { stream: src, mut metas, tensors } = state;
            if kept.len() < metas.len() {
                metas = kept.iter().map(|&i| metas[i as usize]).collect();
            }
            streams.push(StreamPlan { src, stream, metas, cells, map, n_src, tensors });
        }
        Ok(KvPlan { scope, streams })
    }
}

impl StreamPlan<'_> {
    /// Which of the state's cells are kept, in order.
    fn kept(&self) -> impl Iterator<Item = u32> + '_ {
        self.map.moves().iter().flat_map(|m| m.src..m.src + m.len)
    }
}

impl<'a> KvPlan<'a> {
    /// What is converted, in words.
    pub(super) fn notes(&self, geometry: &Geometry) -> Vec<String> {
        let names = (0..).map(|i| if i < geometry.n_layer() { "K" } else { "V" });
        let stream = self.streams.first();
        let tensors = stream.into_iter().flat_map(|stream| &stream.tensors);
        convert::notes(&geometry.name, names.zip(tensors.map(|tensor| tensor.conversion)))
    }

    /// What [`KvPlan::scatter`] will write.
    pub(super) fn placed<'p>(&'p self, planes: &'p KvPlanes, n_layer: usize) -> Vec<Placed<'p>>
    where
        'a: 'p,
    {
        let of_stream = |stream: &'p StreamPlan<'a>| {
            let StreamPlanes { k, v } = planes.stream(stream.stream, n_layer);
            let planes = k.iter().chain(v.iter().flatten());
            planes.zip(&stream.tensors).map(|(plane, &src)| Placed {
                plane,
                map: &stream.map,
                n_src: stream.n_src,
                src,
            })
        };
        self.streams.iter().flat_map(of_stream).collect()
    }

    /// The tensors' part of the commit.
    pub(super) fn scatter<'p>(&'p self, planes: &'p mut KvPlanes, n_layer: usize) -> Vec<Scatter<'p>>
    where
        'a: 'p,
    {
        let mut batch = Vec::new();
        let mut k = planes.k.chunks_mut(n_layer.max(1));
        let mut v = planes.v.chunks_mut(n_layer.max(1));
        let mut next = 0;
        for stream in &self.streams {
            let skip = stream.stream - next;
            next = stream.stream + 1;
            let k = k.nth(skip).into_iter().flatten();
            let v = v.nth(skip).into_iter().flatten().flatten();
            batch.extend(k.chain(v).zip(&stream.tensors).map(|(plane, &src)| Scatter {
                plane,
                map: &stream.map,
                n_src: stream.n_src,
                src,
            }));
        }
        batch
    }
}

impl KvCache {
    /// Finds cells for a state. Changes nothing.
    pub fn state_place<'a>(&self, state: KvState<'a>, scope: Scope) -> Result<KvPlan<'a>> {
        state.place(&self.geometry, scope, |stream, dest, state| {
            self.cells[stream]
                .place(Some(dest), &state.metas, self.geometry.swa, true)
                .map_err(|shortage| self.geometry.shortage(shortage, stream))
        })
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
            if own.metas.len() != source.n_src as usize {
                return Err(layout(own.metas.len(), source.n_src as usize));
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
        state.place(geometry, scope, |_, _, state| {
            let source = sources.next().filter(|source| source.src == state.stream);
            let source = source.ok_or_else(|| layout(state.metas.len(), 0))?;
            Ok(Placement { kept: source.kept().collect(), cells: source.cells.clone() })
        })
    }

    /// Whether the state takes cells that hold something, the destination's own included.
    pub fn state_overwrites(&self, plan: &KvPlan<'_>) -> bool {
        plan.streams.iter().any(|stream| {
            let cells = self.cells(stream.stream);
            stream.cells.iter().any(|&cell| cells.is_used(cell))
        })
    }

    /// Replaces the cells of the destination by those of the state.
    pub fn state_apply(&mut self, plan: &KvPlan<'_>) {
        self.state_forget(plan);
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

    /// The cells that the state would have, in every plane.
    pub fn state_cells<'p>(&'p mut self, plan: &'p KvPlan<'_>) -> Vec<(&'p mut Plane, &'p CellMap)> {
        let parts = plan.scatter(&mut self.planes, self.geometry.n_layer());
        parts.into_iter().map(|Scatter { plane, map, .. }| (plane, map)).collect()
    }

    /// The tensors' part of the commit.
    pub fn state_scatter<'p>(&'p mut self, plan: &'p KvPlan<'_>) -> Vec<Scatter<'p>> {
        plan.scatter(&mut self.planes, self.geometry.n_layer())
    }
}

fn read_ext(input: &mut impl Input) -> Result<CellExt> {
    let x = input.i32("ext x")?;
    let y = input.i32("ext y")?;
    let has_token = input.version().ext_has_token();
    let tok = if has_token { input.i32("ext tok")? } else { TOKEN_NULL };
    Ok(CellExt { x, y, tok })
}

/// Gives the cells of a version-2 state the tokens of the file's list.
///
/// The list has one entry per cell in the order of decoding, which is the order of the cells in position;
/// the patches of an image share a position, so positions are no index into it. When some cells are gone the
/// list no longer lines up, and positions are the better index: they agree as long as no image comes before.
fn lift_tokens(metas: &mut [CellMeta], tokens: &[Token]) {
    let mut order: Vec<usize> = (0..metas.len()).collect();
    order.sort_by_key(|&i| metas[i].pos);
    let aligned = metas.len() == tokens.len();
    for (rank, i) in order.into_iter().enumerate() {
        let index = if aligned { rank } else { usize::try_from(metas[i].pos).unwrap_or(usize::MAX) };
        metas[i].ext.tok = tokens.get(index).copied().unwrap_or(TOKEN_NULL);
    }
}
