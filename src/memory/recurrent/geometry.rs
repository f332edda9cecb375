//! What a recurrent section is made of, checked once.

use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::geometry::{TensorGeometry, TensorParams};

/// One layer of a recurrent section.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecurrentLayerParams {
    /// R, the state of the convolution (`n_embd_r`); `None` if the layer has none.
    pub r: Option<TensorParams>,
    /// S, the state of the recurrence (`n_embd_s`, which may be 0); `None` if the layer has none.
    pub s: Option<TensorParams>,
    /// Elements of P, a second row of R's type in models with n-gram embeddings; `None` if the layer has none.
    pub p: Option<u32>,
}

/// States of a recurrent or linear-attention model (`llama_memory_recurrent`): one section of a context's memory.
///
/// It has as many cells as the context has sequences. A plane has a row for each, and `n_rs_seq` times as many behind them: row
/// `k * n_seq_max + cell` is the state `k` tokens before the newest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecurrentParams {
    /// The layers of the model, those without a state included.
    pub layers: Vec<RecurrentLayerParams>,
    /// Positions by which the end of a sequence can be cut off after a ubatch; 0: none.
    pub n_rs_seq: u32,
}

impl RecurrentParams {
    /// `n_layer` equal layers with R and S of f32, as llama.cpp has them.
    #[must_use]
    pub fn new(n_layer: usize, n_embd_r: u32, n_embd_s: u32) -> Self {
        let tensor = |n_embd| Some(TensorParams { ggml_type: GgmlType::F32, n_embd });
        let layer = RecurrentLayerParams { r: tensor(n_embd_r), s: tensor(n_embd_s), p: None };
        Self { layers: vec![layer; n_layer], n_rs_seq: 0 }
    }
}

/// A tensor of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentTensor {
    /// The state of the convolution.
    R,
    /// The second row of models with n-gram embeddings.
    P,
    /// The state of the recurrence.
    S,
}

impl RecurrentTensor {
    /// What llama.cpp says of one of another type, and of another size.
    pub(super) fn mismatches(self) -> (&'static str, &'static str) {
        match self {
            Self::R => ("mismatched r type", "mismatched r row size"),
            Self::P => ("mismatched ple type", "mismatched ple row size"),
            Self::S => ("mismatched s type", "mismatched s row size"),
        }
    }

    pub(super) fn field(self) -> &'static str {
        match self {
            Self::R => "R rows",
            Self::P => "P rows",
            Self::S => "S rows",
        }
    }
}

/// A tensor of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerTensor {
    pub layer: usize,
    pub which: RecurrentTensor,
    pub geometry: TensorGeometry,
}

/// A section's geometry. Invariant: everything in it has been checked against everything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecurrentGeometry {
    /// What the section is called in messages.
    pub name: String,
    /// One cell for each.
    pub n_seq_max: u32,
    /// 0 in a section without planes, which can be cut anywhere.
    pub n_rs_seq: u32,
    /// Those of the model.
    pub n_layer: u32,
    /// In the order of a state: R and P of every layer, then S.
    pub tensors: Vec<LayerTensor>,
    /// Rows of a plane.
    pub n_rows: u32,
}

impl RecurrentGeometry {
    pub fn new(params: &RecurrentParams, name: &str, n_seq_max: u32) -> Result<Self> {
        let n_layer = u32::try_from(params.layers.len())
            .map_err(|_| Error::arg(format!("{name}.n_layer"), format!("{}", params.layers.len())))?;
        let tensor = |layer: usize, which, params| {
            let place = || format!("{name}.layer {layer}.{which:?}").to_lowercase();
            let geometry = TensorGeometry::of_any_width(params, place)?;
            Ok(LayerTensor { layer, which, geometry })
        };
        let mut tensors = Vec::new();
        for (layer, RecurrentLayerParams { r, p, .. }) in params.layers.iter().enumerate() {
            if let Some(r) = *r {
                tensors.push(tensor(layer, RecurrentTensor::R, r)?);
            }
            let Some(n_embd) = *p else { continue };
            let ggml_type = r.map(|r| r.ggml_type).ok_or_else(|| {
                Error::arg(
                    format!("{name}.layer {layer}.p"),
                    format!("{n_embd} elements in a layer without R"),
                )
            })?;
            tensors.push(tensor(layer, RecurrentTensor::P, TensorParams { ggml_type, n_embd })?);
        }
        for (layer, params) in params.layers.iter().enumerate() {
            if let Some(s) = params.s {
                tensors.push(tensor(layer, RecurrentTensor::S, s)?);
            }
        }
        let n_rs_seq = if tensors.is_empty() { 0 } else { params.n_rs_seq };
        let n_rows = n_rs_seq.checked_add(1).and_then(|planes| planes.checked_mul(n_seq_max));
        let n_rows = n_rows.ok_or_else(|| {
            let reason = format!("{n_rs_seq} rollback planes of {n_seq_max} rows");
            Error::arg(format!("{name}.n_rs_seq"), reason)
        })?;
        Ok(Self { name: name.to_owned(), n_seq_max, n_rs_seq, n_layer, tensors, n_rows })
    }

    /// A tensor of a layer; `None` if the layer has none.
    pub fn tensor(&self, layer: usize, which: RecurrentTensor) -> Option<TensorParams> {
        self.index_of(layer, which).map(|at| self.tensors[at].geometry.into())
    }

    /// Its place among all tensors.
    pub fn index_of(&self, layer: usize, which: RecurrentTensor) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.layer == layer && tensor.which == which)
    }

    pub fn place(&self) -> String {
        format!("section {}", self.name)
    }
}
