//! What the compressed half of a DSV4 memory is made of, checked once.

use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::geometry::{Streams, TensorGeometry, TensorParams};

/// A compressor of DSV4 attention: a K cache with a row for every `ratio` positions, and the state in which the next row grows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dsv4CompressorParams {
    /// Positions of a compressed row.
    pub ratio: u32,
    /// Rows of K in each stream.
    pub kv_size: u32,
    /// The layers of the model that have it, ascending.
    pub layers: Vec<u32>,
    /// A row of K.
    pub k: TensorParams,
    /// Rows of a state.
    pub state_size: u32,
    /// Elements of a row of a state, which is f32.
    pub n_embd_state: u32,
}

/// The compressed half of `llama_kv_cache_dsv4`, behind its raw iSWA pair: three compressors. Everything is one stream per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dsv4Params {
    /// Compressed sparse attention.
    pub csa: Dsv4CompressorParams,
    /// Heavily compressed attention.
    pub hca: Dsv4CompressorParams,
    /// The lightning indexer.
    pub lid: Dsv4CompressorParams,
    /// Positions by which the end of a sequence can be cut off after a ubatch; 0: none.
    pub n_rs_seq: u32,
}

/// One of the three compressors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Dsv4Compressor {
    /// Compressed sparse attention.
    Csa,
    /// Heavily compressed attention.
    Hca,
    /// The lightning indexer.
    Lid,
}

impl Dsv4Compressor {
    /// In the order of a state.
    pub(crate) const ALL: [Self; 3] = [Self::Csa, Self::Hca, Self::Lid];

    pub(super) fn name(self) -> &'static str {
        ["csa", "hca", "lid"][self as usize]
    }
}

/// A tensor of a compressor's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dsv4Tensor {
    /// Compressed K.
    K,
    /// The state's sums of values.
    Kv,
    /// The state's sums of scores.
    Score,
}

/// Planes of a state's tensor: more than any engine rolls back is a mistake, which would take memory for every layer.
pub(crate) fn n_state_planes(n_rs_seq: u32, n_stream: u32) -> std::result::Result<u32, String> {
    const MOST: u32 = 1 << 16;
    let planes = n_rs_seq.checked_add(1).and_then(|n| n.checked_mul(n_stream)).filter(|&n| n <= MOST);
    planes.ok_or_else(|| {
        format!("{n_rs_seq} rollback planes of {n_stream} streams, at most {MOST} planes in all")
    })
}

/// A tensor of the section, with a plane for each stream (K) or for each stream and rollback plane (state).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerTensor {
    pub compressor: Dsv4Compressor,
    pub which: Dsv4Tensor,
    /// Number of the layer in the model.
    pub il: u32,
    pub geometry: TensorGeometry,
    /// Rows of a plane.
    pub n_rows: u32,
    pub n_plane: usize,
}

impl LayerTensor {
    pub fn place(&self, name: &str) -> String {
        let which = format!("{:?}", self.which).to_lowercase();
        format!("section {name}, {} {which} of layer {}", self.compressor.name(), self.il)
    }
}

/// The section's geometry. Invariant: everything in it has been checked against everything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dsv4Geometry {
    /// What the section is called in messages.
    pub name: String,
    pub n_stream: u32,
    pub n_rs_seq: u32,
    pub compressors: [Dsv4CompressorParams; 3],
    /// In the order of a state: K of all compressors, then their states, layer by layer.
    pub tensors: Vec<LayerTensor>,
}

impl Dsv4Geometry {
    pub fn new(params: Dsv4Params, name: &str, streams: Streams) -> Result<Self> {
        let bad = |field: String, reason: String| Err(Error::arg(format!("{name}.{field}"), reason));
        if streams.n_stream != streams.n_seq_max {
            let reason = format!("{} stream for {} sequences", streams.n_stream, streams.n_seq_max);
            return Err(Error::arg("unified", reason + ", DSV4 has one for each"));
        }
        let Dsv4Params { csa, hca, lid, n_rs_seq } = params;
        let compressors = [csa, hca, lid];
        let n_state_planes = n_state_planes(n_rs_seq, streams.n_stream)
            .map_err(|reason| Error::arg(format!("{name}.n_rs_seq"), reason))?;
        let mut k = Vec::new();
        let mut states = Vec::new();
        for (compressor, params) in Dsv4Compressor::ALL.into_iter().zip(&compressors) {
            let of = compressor.name();
            let sizes = [
                ("ratio", params.ratio),
                ("kv_size", params.kv_size),
                ("state_size", params.state_size),
                ("n_embd_state", params.n_embd_state),
            ];
            if let Some((field, _)) = sizes.into_iter().find(|&(_, size)| size == 0) {
                return bad(format!("{of}.{field}"), "0".into());
            }
            if !params.layers.is_sorted_by(|a, b| a < b) {
                return bad(format!("{of}.layers"), format!("{:?}, they ascend", params.layers));
            }
            let place = |field: &'static str| move || format!("{name}.{of}.{field}");
            let row = TensorGeometry::new(params.k, place("k"))?;
            let state = TensorParams { ggml_type: GgmlType::F32, n_embd: params.n_embd_state };
            let state = TensorGeometry::new(state, place("n_embd_state"))?;
            let tensor = |which, il, geometry, n_rows, n_plane| LayerTensor {
                compressor,
                which,
                il,
                geometry,
                n_rows,
                n_plane,
            };
            for &il in &params.layers {
                k.push(tensor(Dsv4Tensor::K, il, row, params.kv_size, streams.n_stream as usize));
                for which in [Dsv4Tensor::Kv, Dsv4Tensor::Score] {
                    states.push(tensor(which, il, state, params.state_size, n_state_planes as usize));
                }
            }
        }
        k.append(&mut states);
        Ok(Self { name: name.to_owned(), n_stream: streams.n_stream, n_rs_seq, compressors, tensors: k })
    }

    /// Whether there is a row for every block of as many positions.
    pub fn check_rows(&self, n_pos: u32) -> Result<()> {
        for (compressor, params) in Dsv4Compressor::ALL.into_iter().zip(&self.compressors) {
            let need = n_pos / params.ratio;
            if params.kv_size < need && !params.layers.is_empty() {
                let reason =
                    format!("{}, {n_pos} positions in rows of {} need {need}", params.kv_size, params.ratio);
                return Err(Error::arg(format!("{}.{}.kv_size", self.name, compressor.name()), reason));
            }
        }
        Ok(())
    }

    pub fn compressor(&self, which: Dsv4Compressor) -> &Dsv4CompressorParams {
        &self.compressors[which as usize]
    }

    /// A tensor of a compressor in a layer of the model.
    pub fn tensor(&self, (compressor, which): (Dsv4Compressor, Dsv4Tensor), il: u32) -> Result<TensorParams> {
        let found = self.index_of((compressor, which), il);
        found.map(|at| self.tensors[at].geometry.into()).ok_or_else(|| {
            let layers = &self.compressor(compressor).layers;
            Error::arg("layer", format!("{il} has no {}, the layers {layers:?} have", compressor.name()))
        })
    }

    /// Its place among all tensors.
    pub fn index_of(&self, (compressor, which): (Dsv4Compressor, Dsv4Tensor), il: u32) -> Option<usize> {
        let wanted = |t: &LayerTensor| t.compressor == compressor && t.which == which && t.il == il;
        self.tensors.iter().position(wanted)
    }

    /// The tensors of one kind of a compressor, with their places among all.
    pub fn tensors_of(
        &self,
        compressor: Dsv4Compressor,
        is_state: bool,
    ) -> impl Iterator<Item = (usize, &LayerTensor)> {
        self.tensors
            .iter()
            .enumerate()
            .filter(move |(_, t)| t.compressor == compressor && (t.which != Dsv4Tensor::K) == is_state)
    }
}
