//! `state_read_sinfo`, in three steps: read and check, place (`kv_place`), commit. Only commit changes the cache.

use std::fmt::Display;

use super::geometry::{Geometry, TensorGeometry, mismatch};
use super::kv_cache::{KvCache, KvPlanes, StreamPlanes};
use super::kv_place::Found;
use super::kv_write::Scope;
use crate::cells::{CellMeta, SeqSet, Shortage};
use crate::error::{Error, Result};
use crate::state::{Input, Source};
use crate::storage::{CellMap, Placed, Plane, Scatter, TensorBytes};
use crate::types::{CellExt, PosRange, Seq, TOKEN_NULL, Token};

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
        Self { scope, legacy_rotation, flip_cell_ext: false, range: PosRange::ALL, append: false }
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
    pub(super) tensors: Vec<TensorBytes<'a>>,
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
    pub(super) tensors: Vec<TensorBytes<'a>>,
}

impl Geometry {
    /// Reads the section's bytes and checks everything that can be checked without the cells.
    pub fn state_read<'a>(&self, source: &mut Source<'a>, params: ReadParams) -> Result<KvState<'a>> {
        let mut streams = Vec::new();
        let n_stream = self.read_streams(source, params, |source, stream, metas| {
            let mut tensors = Vec::with_capacity(2 * self.n_layer());
            self.read_data(source, metas.len(), params, |source, tensor, bytes| {
                tensors.push(source.tensor(tensor.field(), bytes)?);
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
    /// stand in the input.
    pub(super) fn read_data<I: Input>(
        &self,
        input: &mut I,
        n_cells: usize,
        params: ReadParams,
        mut take: impl FnMut(&mut I, KvTensor, u64) -> Result<()>,
    ) -> Result<()> {
        let v_trans = input.u32("v_trans")?;
        let n_layer = input.u32("n_layer")?;
        if n_layer as usize != self.n_layer() {
            return Err(self.mismatch("mismatched layer count", n_layer, self.n_layer(), None));
        }
        if v_trans != u32::from(self.v_trans) {
            let cache = u32::from(self.v_trans);
            return Err(self.mismatch("incompatible V transposition", v_trans, cache, None));
        }
        if input.version().has_rotation() {
            let n_rot_k = input.u32("n_rot_k")?;
            let n_rot_v = input.u32("n_rot_v")?;
            if n_rot_k != self.n_rot_k {
                return Err(self.mismatch("incompatible key rotation", n_rot_k, self.n_rot_k, None));
            }
            if n_rot_v != self.n_rot_v {
                return Err(self.mismatch("incompatible value rotation", n_rot_v, self.n_rot_v, None));
            }
        } else {
            self.check_legacy_rotation(input, params.legacy_rotation)?;
        }

        let n = n_cells as u64;
        for (layer, k) in self.k.iter().enumerate() {
            self.check_type(input, k, layer, "mismatched key type")?;
            self.check_row_size(input, k, layer, "mismatched key row size")?;
            take(input, KvTensor::K(layer), bytes_of(n, k)?)?;
        }
        for (layer, v) in self.v.iter().enumerate() {
            let Some(v) = v else { continue };
            self.check_type(input, v, layer, "mismatched value type")?;
            if self.v_trans {
                let elem = input.u32("value element size")?;
                let n_embd = input.u32("n_embd_v_gqa")?;
                if elem != v.ggml_type.type_size() {
                    let cache = v.ggml_type.type_size();
                    return Err(self.mismatch("mismatched value element size", elem, cache, Some(layer)));
                }
                if n_embd != v.n_embd {
                    return Err(self.mismatch(
                        "mismatched GQA embedding size",
                        n_embd,
                        v.n_embd,
                        Some(layer),
                    ));
                }
            } else {
                self.check_row_size(input, v, layer, "mismatched value row size")?;
            }
            take(input, KvTensor::V(layer), bytes_of(n, v)?)?;
        }
        Ok(())
    }

    fn check_type(
        &self,
        input: &mut impl Input,
        tensor: &TensorGeometry,
        layer: usize,
        what: &'static str,
    ) -> Result<()> {
        let number = input.i32("ggml type")?;
        if number == tensor.ggml_type.as_i32() {
            return Ok(());
        }
        let state = crate::format::GgmlType::from_i32(number).map_or(number.to_string(), |t| t.to_string());
        Err(self.mismatch(what, state, tensor.ggml_type, Some(layer)))
    }

    fn check_row_size(
        &self,
        input: &mut impl Input,
        tensor: &TensorGeometry,
        layer: usize,
        what: &'static str,
    ) -> Result<()> {
        let row_size = input.u64("row_size")?;
        if row_size == tensor.row_size {
            return Ok(());
        }
        Err(self.mismatch(what, row_size, tensor.row_size, Some(layer)))
    }

    /// Since April 2026 llama.cpp rotates quantised caches by default, but files record it only from version 4:
    /// the same bytes mean one thing or the other, and only the caller can know which.
    fn check_legacy_rotation(&self, input: &impl Input, stated: Option<LegacyRotation>) -> Result<()> {
        let sides = [
            ("incompatible key rotation", self.may_rotate_k, self.n_rot_k),
            ("incompatible value rotation", self.may_rotate_v, self.n_rot_v),
        ];
        for (what, _, n_rot) in sides.into_iter().filter(|&(_, may_rotate, _)| may_rotate) {
            match stated {
                None => {
                    return Err(Error::RotationUnstated {
                        version: input.version().seq_version(),
                        place: format!("section {}", self.name),
                        n_rot_k: self.n_rot_k,
                        n_rot_v: self.n_rot_v,
                    });
                }
                Some(LegacyRotation::Rotated) if n_rot == 0 => {
                    return Err(self.mismatch(what, "a rotation (stated)", n_rot, None));
                }
                Some(LegacyRotation::Plain) if n_rot != 0 => {
                    return Err(self.mismatch(what, "no rotation (stated)", n_rot, None));
                }
                Some(_) => {}
            }
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

fn bytes_of(n_cells: u64, tensor: &TensorGeometry) -> Result<u64> {
    n_cells.checked_mul(tensor.row_size).ok_or_else(|| {
        Error::corrupt(
            "cell_count",
            format_args!("{n_cells} cells of {} bytes", tensor.row_size),
            "a size that fits 64 bits",
        )
    })
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
