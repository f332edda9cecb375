//! `state_read_sinfo`, in three steps: read and check, place, commit. Only commit changes the cache.

use std::fmt::Display;

use super::geometry::TensorGeometry;
use super::kv_cache::KvCache;
use super::kv_write::Scope;
use crate::cells::{CellMeta, SeqSet};
use crate::error::{Error, Result};
use crate::state::Source;
use crate::storage::Scatter;
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
    /// Read as if cells had an ext where the cache has none, and the other way round: only to find out why a
    /// state does not fit.
    pub flip_cell_ext: bool,
}

/// A section's bytes, checked against the cache's geometry.
#[derive(Debug)]
pub(crate) struct KvState<'a> {
    /// One per stream of the state.
    streams: Vec<StreamState<'a>>,
}

#[derive(Debug, Default)]
struct StreamState<'a> {
    /// One per cell, in the order of the state. In a sequence state every `seqs` is the destination's.
    metas: Vec<CellMeta>,
    /// The tensors: K of every layer, then V of every layer that has one.
    tensors: Vec<&'a [u8]>,
}

/// What a commit will do to a section.
#[derive(Debug)]
pub(crate) struct KvPlan<'a> {
    scope: Scope,
    streams: Vec<StreamPlan<'a>>,
}

#[derive(Debug)]
struct StreamPlan<'a> {
    stream: usize,
    /// `metas[i]` goes into `cells[i]`.
    metas: Vec<CellMeta>,
    cells: Vec<u32>,
    moves: Vec<Move>,
    /// Cells of the state, those that were dropped included.
    n_src: u32,
    tensors: Vec<&'a [u8]>,
}

impl KvCache {
    /// Reads the section's bytes and checks everything that can be checked without the cells.
    pub fn state_read<'a>(&self, source: &mut Source<'a>, params: ReadParams) -> Result<KvState<'a>> {
        let n_stream = source.metadata.u32("n_stream")?;
        let fits = match params.scope {
            Scope::Whole => n_stream == self.streams.n_stream,
            Scope::Seq(_) => (1..=crate::types::MAX_SEQ).contains(&n_stream),
        };
        if !fits {
            return Err(self.mismatch("n_stream mismatch", n_stream, self.streams.n_stream, None));
        }
        let mut streams = Vec::new();
        let mut holder = None;
        for stream in 0..n_stream {
            let cell_count = source.metadata.u32("cell_count")?;
            if cell_count == 0 {
                streams.push(StreamState::default());
                continue;
            }
            if let (Scope::Seq(_), Some(first)) = (params.scope, holder.replace(stream)) {
                return Err(Error::corrupt(
                    "cell_count",
                    format_args!("streams {first} and {stream} both hold cells"),
                    "one stream in a sequence state",
                ));
            }
            let metas = self.read_metadata(source, cell_count, stream, params)?;
            let tensors = self.read_data(source, cell_count, params)?;
            streams.push(StreamState { metas, tensors });
        }
        Ok(KvState { streams })
    }

    fn read_metadata(
        &self,
        source: &mut Source<'_>,
        cell_count: u32,
        stream: u32,
        params: ReadParams,
    ) -> Result<Vec<CellMeta>> {
        // Nothing is allocated for cells that the input is too short to hold.
        const LEAST_CELL_BYTES: u64 = 12;
        let most = source.metadata.left() as u64 / LEAST_CELL_BYTES;
        if u64::from(cell_count) > most {
            return Err(Error::Truncated {
                field: "cells",
                offset: source.metadata.offset() as u64,
                need: u64::from(cell_count) * LEAST_CELL_BYTES,
                left: source.metadata.left() as u64,
            });
        }
        if params.scope == Scope::Whole && cell_count > self.geometry.kv_size {
            return Err(self.no_space(
                u64::from(cell_count),
                u64::from(self.geometry.kv_size),
                stream as usize,
            ));
        }
        let has_ext = self.geometry.cell_ext != params.flip_cell_ext;
        let mut metas = Vec::new();
        metas.try_reserve_exact(cell_count as usize).map_err(|_| Error::OutOfMemory {
            what: "the cells of the state",
            bytes: u64::from(cell_count) * size_of::<CellMeta>() as u64,
        })?;
        for _ in 0..cell_count {
            let pos = source.metadata.i32("pos")?;
            if pos < 0 {
                return Err(Error::corrupt("pos", pos, "at least 0"));
            }
            let n_seq_id = source.metadata.u32("n_seq_id")?;
            let ext = if has_ext { read_ext(source)? } else { CellExt::default() };
            let seqs = match params.scope {
                Scope::Seq(dest) => {
                    if n_seq_id != 1 {
                        return Err(Error::corrupt("n_seq_id", n_seq_id, "1 in a sequence state"));
                    }
                    source.metadata.i32("seq_id")?;
                    SeqSet::of(dest)
                }
                Scope::Whole => self.read_seq_ids(source, n_seq_id, stream)?,
            };
            metas.push(CellMeta { pos, ext, seqs });
        }
        if has_ext && !source.version.ext_has_token() {
            lift_tokens(&mut metas, source.tokens);
        }
        Ok(metas)
    }

    fn read_seq_ids(&self, source: &mut Source<'_>, n_seq_id: u32, stream: u32) -> Result<SeqSet> {
        let n_seq_max = self.streams.n_seq_max;
        if !(1..=n_seq_max).contains(&n_seq_id) {
            return Err(Error::corrupt("n_seq_id", n_seq_id, format_args!("1 to n_seq_max {n_seq_max}")));
        }
        let mut seqs = SeqSet::EMPTY;
        for _ in 0..n_seq_id {
            let seq_id = source.metadata.i32("seq_id")?;
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

    fn read_data<'a>(
        &self,
        source: &mut Source<'a>,
        cell_count: u32,
        params: ReadParams,
    ) -> Result<Vec<&'a [u8]>> {
        let geometry = &self.geometry;
        let v_trans = source.metadata.u32("v_trans")?;
        let n_layer = source.metadata.u32("n_layer")?;
        if n_layer as usize != geometry.n_layer() {
            return Err(self.mismatch("mismatched layer count", n_layer, geometry.n_layer(), None));
        }
        if v_trans != u32::from(geometry.v_trans) {
            let cache = u32::from(geometry.v_trans);
            return Err(self.mismatch("incompatible V transposition", v_trans, cache, None));
        }
        if source.version.has_rotation() {
            let n_rot_k = source.metadata.u32("n_rot_k")?;
            let n_rot_v = source.metadata.u32("n_rot_v")?;
            if n_rot_k != geometry.n_rot_k {
                return Err(self.mismatch("incompatible key rotation", n_rot_k, geometry.n_rot_k, None));
            }
            if n_rot_v != geometry.n_rot_v {
                return Err(self.mismatch("incompatible value rotation", n_rot_v, geometry.n_rot_v, None));
            }
        } else {
            self.check_legacy_rotation(source, params.legacy_rotation)?;
        }

        let n = u64::from(cell_count);
        let mut tensors = Vec::with_capacity(2 * geometry.n_layer());
        for (layer, k) in geometry.k.iter().enumerate() {
            self.check_type(source, k, layer, "mismatched key type")?;
            self.check_row_size(source, k, layer, "mismatched key row size")?;
            tensors.push(source.tensor("K rows", bytes_of(n, k)?)?);
        }
        for (layer, v) in geometry.v.iter().enumerate() {
            let Some(v) = v else { continue };
            self.check_type(source, v, layer, "mismatched value type")?;
            if geometry.v_trans {
                let elem = source.metadata.u32("value element size")?;
                let n_embd = source.metadata.u32("n_embd_v_gqa")?;
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
                self.check_row_size(source, v, layer, "mismatched value row size")?;
            }
            tensors.push(source.tensor("V", bytes_of(n, v)?)?);
        }
        Ok(tensors)
    }

    fn check_type(
        &self,
        source: &mut Source<'_>,
        tensor: &TensorGeometry,
        layer: usize,
        what: &'static str,
    ) -> Result<()> {
        let number = source.metadata.i32("ggml type")?;
        if number == tensor.ggml_type.as_i32() {
            return Ok(());
        }
        let state = crate::format::GgmlType::from_i32(number).map_or(number.to_string(), |t| t.to_string());
        Err(self.mismatch(what, state, tensor.ggml_type, Some(layer)))
    }

    fn check_row_size(
        &self,
        source: &mut Source<'_>,
        tensor: &TensorGeometry,
        layer: usize,
        what: &'static str,
    ) -> Result<()> {
        let row_size = source.metadata.u64("row_size")?;
        if row_size == tensor.row_size {
            return Ok(());
        }
        Err(self.mismatch(what, row_size, tensor.row_size, Some(layer)))
    }

    /// Since April 2026 llama.cpp rotates quantised caches by default, but files record it only from version 4:
    /// the same bytes mean one thing or the other, and only the caller can know which.
    fn check_legacy_rotation(&self, source: &Source<'_>, stated: Option<LegacyRotation>) -> Result<()> {
        let geometry = &self.geometry;
        let sides = [
            ("incompatible key rotation", geometry.may_rotate_k, geometry.n_rot_k),
            ("incompatible value rotation", geometry.may_rotate_v, geometry.n_rot_v),
        ];
        for (what, _, n_rot) in sides.into_iter().filter(|&(_, may_rotate, _)| may_rotate) {
            match stated {
                None => {
                    return Err(Error::RotationUnstated {
                        version: source.version.seq_version(),
                        place: format!("section {}", self.name),
                        n_rot_k: geometry.n_rot_k,
                        n_rot_v: geometry.n_rot_v,
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

    /// Finds cells for a state. Changes nothing.
    pub fn state_place<'a>(&self, state: KvState<'a>, scope: Scope) -> Result<KvPlan<'a>> {
        let mut streams = Vec::new();
        for (i, StreamState { metas, tensors }) in state.streams.into_iter().enumerate() {
            if metas.is_empty() {
                continue;
            }
            let n_src = u32::try_from(metas.len()).unwrap_or(u32::MAX);
            let plan = match scope {
                Scope::Whole => {
                    let moves = vec![Move { src: 0, dst: 0, len: n_src }];
                    StreamPlan { stream: i, cells: (0..n_src).collect(), metas, moves, n_src, tensors }
                }
                Scope::Seq(dest) => {
                    let stream = self.streams.of(dest);
                    let placement = self.cells[stream]
                        .place(Some(dest), &metas, self.geometry.swa, true)
                        .map_err(|shortage| self.no_space(shortage.need, shortage.free, stream))?;
                    let pairs = placement.kept.iter().copied().zip(placement.cells.iter().copied());
                    let moves = Move::of_pairs(pairs);
                    let metas = placement.kept.iter().map(|&i| metas[i as usize]).collect();
                    StreamPlan { stream, metas, cells: placement.cells, moves, n_src, tensors }
                }
            };
            streams.push(plan);
        }
        Ok(KvPlan { scope, streams })
    }

    /// Replaces the destination by the state.
    pub fn state_commit(&mut self, plan: &KvPlan<'_>) -> Result<()> {
        match plan.scope {
            Scope::Seq(dest) => self.seq_rm(Some(dest), PosRange::ALL),
            Scope::Whole => self.clear(false),
        }
        for stream in &plan.streams {
            self.cells[stream.stream].apply(&stream.cells, &stream.metas);
        }
        let n_layer = self.geometry.n_layer();
        let mut batch = Vec::new();
        let mut k = self.planes.k.chunks_mut(n_layer.max(1));
        let mut v = self.planes.v.chunks_mut(n_layer.max(1));
        let mut next = 0;
        for stream in &plan.streams {
            let skip = stream.stream - next;
            next = stream.stream + 1;
            let k = k.nth(skip).into_iter().flatten();
            let v = v.nth(skip).into_iter().flatten().flatten();
            batch.extend(k.chain(v).zip(&stream.tensors).map(|(plane, &src)| Scatter {
                plane,
                moves: &stream.moves,
                n_src: stream.n_src,
                src,
            }));
        }
        crate::storage::scatter(batch)
    }

    fn mismatch(
        &self,
        what: &'static str,
        state: impl Display,
        cache: impl Display,
        layer: Option<usize>,
    ) -> Error {
        let place = match layer {
            Some(layer) => format!("section {}, layer {layer}", self.name),
            None => format!("section {}", self.name),
        };
        Error::Mismatch { what, state: format!("{state}"), cache: format!("{cache}"), place }
    }

    fn no_space(&self, need: u64, free: u64, stream: usize) -> Error {
        Error::NoSpace { need, free, kv_size: self.geometry.kv_size, place: self.place(stream) }
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

fn read_ext(source: &mut Source<'_>) -> Result<CellExt> {
    let x = source.metadata.i32("ext x")?;
    let y = source.metadata.i32("ext y")?;
    let has_token = source.version.ext_has_token();
    let tok = if has_token { source.metadata.i32("ext tok")? } else { TOKEN_NULL };
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
