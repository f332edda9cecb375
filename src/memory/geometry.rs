//! What an attention section is made of, checked once.

use std::fmt::Display;

use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::storage::PlaneShape;
use crate::types::{MAX_SEQ, Seq, StateFlags, Swa};

/// One tensor of a layer: type and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorParams {
    /// Type of the elements.
    pub ggml_type: GgmlType,
    /// Elements of one cell (`n_embd_k_gqa` or `n_embd_v_gqa`), a whole number of blocks.
    pub n_embd: u32,
}

/// One layer of an attention section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerParams {
    /// Keys.
    pub k: TensorParams,
    /// Values; `None` in MLA layers, whose values are part of K.
    pub v: Option<TensorParams>,
}

/// An attention cache (`llama_kv_cache`): one section of a context's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvParams {
    /// Cells of each stream.
    pub kv_size: u32,
    /// The layers, in the order of the model.
    pub layers: Vec<LayerParams>,
    /// The sliding window; [`Swa::NONE`] for full attention.
    pub swa: Swa,
    /// Whether V is transposed (flash attention off): channel-major, unquantised types only.
    pub v_trans: bool,
    /// Size of the Hadamard rotation applied to K; 0 if none.
    pub n_rot_k: u32,
    /// Size of the Hadamard rotation applied to V; 0 if none.
    pub n_rot_v: u32,
    /// Elements of one K head, 0 if unknown. Only old files need it: a quantised cache whose head size is a
    /// multiple of 64 may be rotated without the file saying so.
    pub n_embd_head_k: u32,
    /// Elements of one V head, 0 if unknown.
    pub n_embd_head_v: u32,
    /// Whether cells carry an ext: M-RoPE position and token (`n_pos_per_embd > 1` or n-gram embeddings).
    pub cell_ext: bool,
    /// The section whose cells this one takes, by its place in the write order: an indexer beside its attention cache. Both have
    /// the same `kv_size`, window and ext, and that one comes first.
    pub mirrors: Option<usize>,
}

impl KvParams {
    /// A full-attention cache of `n_layer` equal layers, not transposed, not rotated.
    #[must_use]
    pub fn new(kv_size: u32, n_layer: usize, layer: LayerParams) -> Self {
        Self {
            kv_size,
            layers: vec![layer; n_layer],
            swa: Swa::NONE,
            v_trans: false,
            n_rot_k: 0,
            n_rot_v: 0,
            n_embd_head_k: 0,
            n_embd_head_v: 0,
            cell_ext: false,
            mirrors: None,
        }
    }
}

/// Cells of an SWA cache as llama.cpp sizes it: the window of every sequence in the stream and one ubatch,
/// at most `kv_size`, padded to 256.
#[must_use]
pub fn swa_kv_size(kv_size: u32, n_swa: u32, n_seq_max: u32, n_ubatch: u32, unified: bool) -> u32 {
    let windows = u64::from(n_swa) * u64::from(if unified { n_seq_max } else { 1 });
    let cells = (windows + u64::from(n_ubatch)).min(u64::from(kv_size));
    u32::try_from(cells.next_multiple_of(256)).unwrap_or(u32::MAX)
}

/// How sequences share streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Sequences of the context, `1..=MAX_SEQ`.
    pub n_seq_max: u32,
    /// 1 (unified), or one stream per sequence.
    pub n_stream: u32,
}

impl Streams {
    pub(crate) fn new(n_seq_max: u32, unified: bool) -> Result<Self> {
        if !(1..=MAX_SEQ).contains(&n_seq_max) {
            return Err(Error::arg("n_seq_max", format!("{n_seq_max} is out of range [1, {MAX_SEQ}]")));
        }
        Ok(Self { n_seq_max, n_stream: if unified { 1 } else { n_seq_max } })
    }

    /// The stream that holds `seq`'s cells.
    #[must_use]
    pub fn of(self, seq: Seq) -> usize {
        if self.n_stream == 1 { 0 } else { seq.index() }
    }
}

/// K or V of one layer: sizes in a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorGeometry {
    pub ggml_type: GgmlType,
    pub n_embd: u32,
    /// Bytes of one cell.
    pub row_size: u64,
}

impl From<TensorGeometry> for TensorParams {
    fn from(geometry: TensorGeometry) -> Self {
        Self { ggml_type: geometry.ggml_type, n_embd: geometry.n_embd }
    }
}

impl TensorGeometry {
    pub(super) fn new(params: TensorParams, place: impl Fn() -> String) -> Result<Self> {
        if params.n_embd == 0 {
            return Err(Error::arg(format!("{}.n_embd", place()), "0 elements per cell"));
        }
        Self::of_any_width(params, place)
    }

    /// A tensor that may have no elements.
    pub(super) fn of_any_width(params: TensorParams, place: impl Fn() -> String) -> Result<Self> {
        let TensorParams { ggml_type, n_embd } = params;
        let row_size = ggml_type.row_size(n_embd).ok_or_else(|| {
            Error::arg(
                format!("{}.n_embd", place()),
                format!(
                    "{n_embd} is no multiple of the {} elements of a {} block",
                    ggml_type.block_size(),
                    ggml_type.name()
                ),
            )
        })?;
        Ok(Self { ggml_type, n_embd, row_size })
    }

    /// Densely packed in memory.
    pub fn dense_shape(&self, transposed: bool, kv_size: u32) -> PlaneShape {
        if transposed {
            PlaneShape::dense_channels(self.n_embd, self.ggml_type.type_size(), kv_size)
        } else {
            PlaneShape::dense_rows(self.row_size)
        }
    }
}

/// A section's geometry. Invariant: everything in it has been checked against everything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// "kv", or "base" and "swa": the section's name in messages.
    pub name: String,
    pub streams: Streams,
    pub kv_size: u32,
    pub swa: Swa,
    pub v_trans: bool,
    pub n_rot_k: u32,
    pub n_rot_v: u32,
    /// As in [`KvParams`].
    pub n_embd_head_k: u32,
    pub n_embd_head_v: u32,
    pub cell_ext: bool,
    pub mirrors: Option<usize>,
    pub k: Vec<TensorGeometry>,
    pub v: Vec<Option<TensorGeometry>>,
    /// Whether llama.cpp may have rotated K (V) of such a cache without recording it, before version 4.
    pub may_rotate_k: bool,
    pub may_rotate_v: bool,
}

impl Geometry {
    /// Checks `params` of the section called `name`.
    pub fn new(params: &KvParams, name: &str, streams: Streams) -> Result<Self> {
        let bad = |field: &str, reason: String| Err(Error::arg(format!("{name}.{field}"), reason));
        if params.kv_size == 0 {
            return bad("kv_size", "0 cells".into());
        }
        if !params.swa.is_none() && i32::try_from(params.swa.n_swa()).is_err() {
            return bad("n_swa", format!("{} exceeds the largest position", params.swa.n_swa()));
        }
        for (field, n_rot) in [("n_rot_k", params.n_rot_k), ("n_rot_v", params.n_rot_v)] {
            if n_rot != 0 && !n_rot.is_power_of_two() {
                return bad(field, format!("{n_rot}, the size of a Hadamard rotation is a power of 2"));
            }
        }
        let mut k = Vec::with_capacity(params.layers.len());
        let mut v = Vec::with_capacity(params.layers.len());
        for (il, layer) in params.layers.iter().enumerate() {
            k.push(TensorGeometry::new(layer.k, || format!("{name}.layer {il}.k"))?);
            let geometry =
                layer.v.map(|v| TensorGeometry::new(v, || format!("{name}.layer {il}.v"))).transpose()?;
            if let Some(v) = geometry.filter(|v| params.v_trans && v.ggml_type.is_quantized()) {
                return bad(
                    "v_trans",
                    format!("V of layer {il} is {}, and quantised V cannot be transposed", v.ggml_type),
                );
            }
            v.push(geometry);
        }
        let may_rotate = |quantized: bool, n_rot: u32, head: u32| {
            n_rot != 0 || (quantized && (head == 0 || head.is_multiple_of(64)))
        };
        let quantized_k = k.iter().any(|t| t.ggml_type.is_quantized());
        let quantized_v = v.iter().flatten().any(|t| t.ggml_type.is_quantized());
        Ok(Self {
            name: name.to_owned(),
            streams,
            kv_size: params.kv_size,
            swa: params.swa,
            v_trans: params.v_trans,
            n_rot_k: params.n_rot_k,
            n_rot_v: params.n_rot_v,
            n_embd_head_k: params.n_embd_head_k,
            n_embd_head_v: params.n_embd_head_v,
            cell_ext: params.cell_ext,
            mirrors: params.mirrors,
            may_rotate_k: may_rotate(quantized_k, params.n_rot_k, params.n_embd_head_k),
            may_rotate_v: may_rotate(quantized_v, params.n_rot_v, params.n_embd_head_v),
            k,
            v,
        })
    }

    pub fn n_layer(&self) -> usize {
        self.k.len()
    }

    /// Checks that the section can take the cells of `source`.
    pub fn check_mirrors(&self, source: &Self) -> Result<()> {
        let bad = |field: &str, own: String, other: String| {
            let reason = format!("{own}, and section {}, which it mirrors, has {other}", source.name);
            Err(Error::arg(format!("{}.{field}", self.name), reason))
        };
        if source.mirrors.is_some() {
            return bad("mirrors", "an indexer".into(), "cells of another section".into());
        }
        if self.kv_size != source.kv_size {
            return bad("kv_size", self.kv_size.to_string(), source.kv_size.to_string());
        }
        if self.swa.swa_type() != source.swa.swa_type() {
            let [own, other] = [self, source].map(|geometry| format!("{:?}", geometry.swa.swa_type()));
            return bad("swa_type", own, other);
        }
        if self.swa != source.swa {
            return bad("n_swa", self.swa.n_swa().to_string(), source.swa.n_swa().to_string());
        }
        if self.cell_ext != source.cell_ext {
            return bad("cell_ext", self.cell_ext.to_string(), source.cell_ext.to_string());
        }
        Ok(())
    }

    /// Names a stream in messages.
    pub fn place(&self, stream: usize) -> String {
        format!("section {}, stream {stream}", self.name)
    }

    /// Whether the section has bytes in a state with these flags. Full attention is rolled back with
    /// `seq_rm`, so a partial state has nothing of it, not even `n_stream`.
    pub fn writes(&self, flags: StateFlags) -> bool {
        !(flags.contains(StateFlags::PARTIAL_ONLY) && self.swa.is_none())
    }
}

/// A state of another geometry than the section called `name`.
pub(super) fn mismatch(
    name: &str,
    what: &'static str,
    state: impl Display,
    cache: impl Display,
    layer: Option<usize>,
) -> Error {
    let place = match layer {
        Some(layer) => format!("section {name}, layer {layer}"),
        None => format!("section {name}"),
    };
    Error::Mismatch { what, state: format!("{state}"), cache: format!("{cache}"), place }
}
