//! `state_read_sinfo`, in three steps: read and check, place (`kv_place`), commit. Only commit changes the cache.

use std::fmt::Display;

use super::convert::{self, Convert};
use super::geometry::{Geometry, mismatch};
use super::kv_cache::{KvCache, KvPlanes, StreamPlanes};
use super::kv_place::Found;
use super::kv_write::Scope;
use crate::cells::{CellMeta, SeqSet, Shortage};
use crate::error::{Error, Result};
use crate::state::{Input, Source};
use crate::storage::{CellMap, Conversion, Placed, Plane, Scatter, StateTensor};
use crate::types::{CellExt, Pos, PosRange, Seq, TOKEN_NULL, Token};

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
    /// Which positions of the state of a sequence are wanted.
    pub range: PosRange,
    /// They are added to those of the destination, which they replace otherwise.
    pub append: bool,
}

impl ReadParams {
    /// To replace all of `scope` by all of a state.
    pub fn new(scope: Scope, legacy_rotation: Option<LegacyRotation>) -> Self {
        Self {
            scope,
            legacy_rotation,
            convert: Convert::Nothing,
            flip_cell_ext: false,
            range: PosRange::ALL,
            append: false,
        }
    }
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
    pub(super) found: Found,
    /// Those that hold cells.
    pub(super) streams: Vec<StreamState<'a>>,
}

#[derive(Debug)]
pub(super) struct StreamState<'a> {
    /// Its number in the state.
    pub(super) stream: usize,
    /// One per cell, in the order of the state. In a sequence state every `seqs` is the destination's.
    pub(super) metas: Vec<CellMeta>,
    /// Which of the state's cells `metas` are; `None`: all.
    pub(super) wanted: Option<Vec<u32>>,
    /// Cells of the state.
    pub(super) n_src: u32,
    /// The tensors: K of every layer, then V of every layer that has one.
    pub(super) tensors: Vec<StateTensor<'a>>,
}

/// What a commit will do to a section.
#[derive(Debug)]
pub(crate) struct KvPlan<'a> {
    pub(super) scope: Scope,
    /// Positions that a destination sequence gives up.
    pub(super) removed: PosRange,
    /// What the state has of its sequence.
    pub(super) found: Found,
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
    pub(super) map: CellMap,
    /// Cells of the state, those that were dropped included.
    pub(super) n_src: u32,
    pub(super) tensors: Vec<StateTensor<'a>>,
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
            let n_src = u32::try_from(metas.len()).unwrap_or(u32::MAX);
            streams.push(StreamState { stream: stream as usize, metas, wanted: None, n_src, tensors });
            Ok(())
        })?;
        Ok(KvState { n_stream, found: Found::default(), streams })
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

impl<'a> KvPlan<'a> {
    /// The largest position that is taken.
    pub(super) fn pos_max(&self) -> Option<Pos> {
        self.streams.iter().flat_map(|stream| &stream.metas).map(|meta| meta.pos).max()
    }

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
