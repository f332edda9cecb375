//! A small transformer, an engine that keeps its KV cache in a kvstate context.
//!
//! The model has RMS norms, rotary positions, grouped-query attention and a gated feed-forward layer, with random weights,
//! all in f32; K and V are in the context's planes, as f32 or f16. With a sliding window every other layer has
//! it, as in llama.cpp's iSWA models: section 0 holds the layers with full attention, section 1 the others. In a
//! hybrid every other layer is recurrent, with its states in section 1.
//! A token's logits are the same bits whatever cells its sequence lies in and however tokens are batched.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "sizes and positions of a small model"
)]

mod model;
mod recurrent;
mod vectors;

use std::{fmt, slice};

use kvstate::context::{PendingShift, Shift, UbatchToken};
use kvstate::format::GgmlType;
use kvstate::memory::{
    KvMemory, KvParams, KvPlanes, LayerParams, RecurrentLayerParams, RecurrentParams, RopeParams,
    SectionKind, SectionParams, TensorParams, swa_kv_size,
};
use kvstate::storage::PlaneShape;
use kvstate::types::{CellExt, Pos, RopeType, SeqId, Swa, Token};
use kvstate::{Context, ContextParams};

use crate::place;
use model::{Layer, Model, N_EMBD_KV, N_HEAD_DIM, Random, add, attend, rms_norm, rotate};
use recurrent::{States, StatesOfUbatch};
use vectors::Vectors;

/// Layers of the model.
pub const N_LAYER: usize = 4;
/// Tokens that are decoded at once.
const N_UBATCH: usize = 16;
/// Cells of a stream with full attention, unless a setup says otherwise.
const KV_SIZE: u32 = 256;

/// Random tokens.
pub fn tokens(n: usize, seed: u64) -> Vec<Token> {
    Random::new(seed).tokens(n)
}

/// The logits of the token after the one decoded. Equal if they are the same bits.
#[derive(Clone)]
pub struct Logits(Vec<f32>);

impl Logits {
    pub fn are_finite(&self) -> bool {
        self.0.iter().all(|x| x.is_finite())
    }

    /// The likeliest token.
    pub fn best(&self) -> Token {
        let best = (0..).zip(&self.0).max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.expect("a vocabulary").0
    }

    /// The largest difference of a logit.
    pub fn distance(&self, other: &Self) -> f32 {
        self.0.iter().zip(&other.0).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}

impl PartialEq for Logits {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().map(|x| x.to_bits()).eq(other.0.iter().map(|x| x.to_bits()))
    }
}

impl fmt::Debug for Logits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ..", &self.0[..3])
    }
}

/// How the cache is made.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Layers of the model that are used, the first ones.
    pub n_layer: usize,
    /// Cells of a stream with full attention.
    pub kv_size: u32,
    /// The window of every other layer; [`Swa::NONE`]: all layers have full attention.
    pub swa: Swa,
    /// Every other layer is recurrent instead, with so many rollback planes.
    pub recurrent: Option<u32>,
    /// Cells of a stream with a window.
    pub swa_kv_size: u32,
    pub v_trans: bool,
    pub element: GgmlType,
    pub n_seq_max: u32,
    pub unified: bool,
    pub max_masked_cells: Option<u32>,
    /// Who rotates K after a shift: kvstate, which knows the model's RoPE, or the engine.
    pub rope: bool,
}

impl Setup {
    /// Three sequences in one stream; the window's cells are as many as llama.cpp takes.
    pub fn new(swa: Swa) -> Self {
        let n_seq_max = 3;
        Self {
            n_layer: N_LAYER,
            kv_size: KV_SIZE,
            swa,
            recurrent: None,
            swa_kv_size: swa_kv_size(KV_SIZE, swa.n_swa(), n_seq_max, N_UBATCH as u32, true),
            v_trans: false,
            element: GgmlType::F32,
            n_seq_max,
            unified: true,
            max_masked_cells: None,
            rope: false,
        }
    }

    /// Full attention, and every other layer recurrent.
    pub fn hybrid(n_rs_seq: u32) -> Self {
        Self { recurrent: Some(n_rs_seq), ..Self::new(Swa::NONE) }
    }

    /// The same with V as it is or transposed, in f32 and in f16.
    pub fn layouts(self) -> impl Iterator<Item = Self> {
        [GgmlType::F32, GgmlType::F16]
            .into_iter()
            .flat_map(move |element| [false, true].map(|v_trans| Self { v_trans, element, ..self }))
    }

    /// An engine with an empty cache. All engines have the same weights.
    pub fn start(self) -> Engine {
        let sections = if let Some(n_rs_seq) = self.recurrent {
            let recurrent = RecurrentParams { layers: recurrent_layers(self.n_layer), n_rs_seq };
            SectionParams::hybrid(self.section(self.kv_size, Swa::NONE, self.n_layer / 2), recurrent)
        } else if self.swa.is_none() {
            vec![self.section(self.kv_size, Swa::NONE, self.n_layer)]
        } else {
            SectionParams::iswa(
                self.section(self.kv_size, Swa::NONE, self.n_layer / 2),
                self.section(self.swa_kv_size, self.swa, self.n_layer / 2),
            )
        };
        let keys: Vec<Vec<Vectors>> = sections.iter().map(|section| self.keys(section)).collect();
        let n_stream = self.n_stream();
        let shift = move |PendingShift { section, stream, cells, shifts }: PendingShift<'_>| {
            let n_layer = keys[section].len() / n_stream;
            for keys in &keys[section][stream * n_layer..][..n_layer] {
                for (&cell, &shift) in cells.iter().zip(shifts) {
                    rotate_key(keys, cell, shift);
                }
            }
            Ok(())
        };
        let rope = Some(RopeParams::new(RopeType::Neox, N_HEAD_DIM as u32));
        let n_rope = |section: &SectionParams| match section {
            SectionParams::Kv { kv, .. } => kv.layers.len(),
            _ => 0,
        };
        let ropes = sections.iter().map(|section| vec![rope.clone(); n_rope(section)]).collect();
        let params = ContextParams {
            unified: self.unified,
            shift: if self.rope { Shift::Rope(ropes) } else { Shift::Callback(Box::new(shift)) },
            max_masked_cells: self.max_masked_cells,
            ..ContextParams::new(self.n_seq_max, sections)
        };
        let mut model = Model::random(N_LAYER, 1);
        model.layers.truncate(self.n_layer);
        Engine { cache: place::context(params).unwrap(), model, rope: self.rope }
    }

    fn n_stream(self) -> usize {
        if self.unified { 1 } else { self.n_seq_max as usize }
    }

    /// A section over memory of the engine's, as the shift callback has to know where K lies.
    fn section(self, kv_size: u32, swa: Swa, n_layer: usize) -> SectionParams {
        let tensor = TensorParams { ggml_type: self.element, n_embd: N_EMBD_KV as u32 };
        let layer = LayerParams { k: tensor, v: Some(tensor) };
        let kv = KvParams { swa, v_trans: self.v_trans, ..KvParams::new(kv_size, n_layer, layer) };

        let elem_size = self.element.type_size();
        let rows = PlaneShape::dense_rows(u64::from(tensor.n_embd * elem_size));
        let channels = PlaneShape::dense_channels(tensor.n_embd, elem_size, kv_size);
        let n_plane = self.n_stream() * n_layer;
        let allocate =
            |shape| (0..n_plane).map(move |plane| place::allocate(plane % n_layer, shape, kv_size));
        let v = allocate(if self.v_trans { channels } else { rows });
        let planes = KvPlanes { k: allocate(rows).collect(), v: v.map(Some).collect() };
        SectionParams::Kv { kv, memory: KvMemory::Adopted(planes) }
    }

    /// The keys of a section, stream-major.
    fn keys(self, section: &SectionParams) -> Vec<Vectors> {
        let SectionParams::Kv { memory: KvMemory::Adopted(planes), .. } = section else { return Vec::new() };
        planes.k.iter().map(|plane| Vectors::of(plane, self.element)).collect()
    }
}

/// The layers of the model: every other has a state.
fn recurrent_layers(n_layer: usize) -> Vec<RecurrentLayerParams> {
    (0..n_layer)
        .map(|il| if is_other(il) { recurrent::layer() } else { RecurrentLayerParams::default() })
        .collect()
}

/// Whether a layer is one of those that have a window, or are recurrent.
fn is_other(il: usize) -> bool {
    il.is_multiple_of(2)
}

fn rotate_key(keys: &Vectors, cell: u32, n_pos: Pos) {
    let mut key = keys.read(cell);
    rotate(&mut key, n_pos);
    keys.write(cell, &key);
}

/// The model and its cache.
pub struct Engine {
    pub cache: Context,
    model: Model,
    rope: bool,
}

impl Engine {
    /// Decodes tokens of a sequence from position `p0` on; returns the logits after each of them.
    pub fn decode(&mut self, seq_id: SeqId, p0: Pos, tokens: &[Token]) -> Vec<Logits> {
        let tokens: Vec<_> = (p0..).zip(tokens).map(|(pos, &token)| (seq_id, pos, token)).collect();
        tokens.chunks(N_UBATCH).flat_map(|tokens| self.decode_ubatch(tokens)).collect()
    }

    /// Decodes tokens, each of a sequence and at a position, in one ubatch; returns the logits after each of them.
    pub fn decode_ubatch(&mut self, tokens: &[(SeqId, Pos, Token)]) -> Vec<Logits> {
        self.rotate_shifted();
        let ubatch: Vec<UbatchToken<'_>> = tokens
            .iter()
            .map(|(seq_id, pos, _)| UbatchToken {
                pos: *pos,
                ext: CellExt::default(),
                seq_ids: slice::from_ref(seq_id),
            })
            .collect();
        let slot = self.cache.prepare(&ubatch).unwrap();
        self.cache.commit(&slot).unwrap();
        let visible: Vec<Vec<Vec<u32>>> = self
            .kv_sections()
            .map(|section| ubatch.iter().map(|token| self.visible_cells(section, token)).collect())
            .collect();

        let mut hidden: Vec<Vec<f32>> = tokens.iter().map(|&(_, _, token)| self.model.embed(token)).collect();
        for (il, layer) in self.model.layers.iter().enumerate() {
            let (section, _) = self.home_of_layer(il);
            let mixed = match slot.recurrent(section) {
                Some(states) => {
                    let cells = slot.cells(section).unwrap();
                    let states =
                        StatesOfUbatch { slot: states, cells, planes: States::of(&self.cache, section, il) };
                    states.decode(layer, &hidden)
                }
                None => self.attention(
                    il,
                    layer,
                    (&ubatch, slot.cells(section).unwrap()),
                    &visible[section],
                    &hidden,
                ),
            };
            for (x, mixed) in hidden.iter_mut().zip(mixed) {
                add(x, &layer.attention_out.times(&mixed));
                let normed = rms_norm(x);
                add(x, &layer.feed_forward(&normed));
            }
        }
        hidden.iter().map(|x| Logits(self.model.logits(x))).collect()
    }

    /// Writes K and V of tokens to their cells; returns what each token gathers from the cells that it sees.
    fn attention(
        &self,
        il: usize,
        layer: &Layer,
        (ubatch, cells): (&[UbatchToken<'_>], &[u32]),
        visible: &[Vec<u32>],
        hidden: &[Vec<f32>],
    ) -> Vec<Vec<f32>> {
        let (section, index) = self.home_of_layer(il);
        let planes: Vec<_> = ubatch
            .iter()
            .map(|token| self.keys_and_values(section, self.stream_of(token.seq_ids[0]), index))
            .collect();
        for (((x, token), &cell), (keys, values)) in hidden.iter().zip(ubatch).zip(cells).zip(&planes) {
            let x = rms_norm(x);
            let mut key = layer.key.times(&x);
            rotate(&mut key, token.pos);
            keys.write(cell, &key);
            values.write(cell, &layer.value.times(&x));
        }
        let tokens = hidden.iter().zip(ubatch).zip(visible).zip(&planes);
        tokens
            .map(|(((x, token), visible), (keys, values))| {
                let mut query = layer.query.times(&rms_norm(x));
                rotate(&mut query, token.pos);
                let keys: Vec<_> = visible.iter().map(|&cell| keys.read(cell)).collect();
                let values: Vec<_> = visible.iter().map(|&cell| values.read(cell)).collect();
                attend(&query, &keys, &values)
            })
            .collect()
    }

    /// The cells that a token attends to, in position order, not in the order in which they lie.
    fn visible_cells(&self, section: usize, token: &UbatchToken<'_>) -> Vec<u32> {
        let stream = self.stream_of(token.seq_ids[0]);
        let n_kv = self.cache.n_kv(section, stream, 256).unwrap();
        let mut mask = vec![f32::NAN; n_kv as usize];
        self.cache.mask_row(section, token, &mut mask).unwrap();
        let mut cells: Vec<u32> =
            (0..n_kv).zip(mask).filter(|&(_, m)| m == 0.0).map(|(cell, _)| cell).collect();
        cells.sort_by_key(|&cell| self.cache.cell(section, stream, cell).unwrap().unwrap().0.pos);
        cells
    }

    /// Rotates the keys whose positions were changed, as an engine does at its next decode.
    fn rotate_shifted(&mut self) {
        if self.rope {
            return self.cache.apply_pending_shifts().unwrap();
        }
        for section in self.kv_sections() {
            for stream in 0..self.cache.n_stream() as usize {
                let pending: Vec<_> = self.cache.pending_shifts(section, stream).unwrap().collect();
                for il in (0..self.model.layers.len()).filter(|&il| self.home_of_layer(il).0 == section) {
                    let (keys, _) = self.keys_and_values(section, stream, self.home_of_layer(il).1);
                    for &(cell, shift) in &pending {
                        rotate_key(&keys, cell, shift);
                    }
                }
            }
        }
        self.cache.shift_done();
    }

    /// The sections with K and V, which come first.
    fn kv_sections(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.cache.n_section())
            .filter(|&section| self.cache.section_kind(section).unwrap() == SectionKind::Kv)
    }

    /// Section of a layer of the model, and its index there if that has K and V.
    fn home_of_layer(&self, il: usize) -> (usize, usize) {
        match self.cache.n_section() {
            1 => (0, il),
            _ => (usize::from(is_other(il)), il / 2),
        }
    }

    fn stream_of(&self, seq_id: SeqId) -> usize {
        if self.cache.n_stream() == 1 { 0 } else { usize::try_from(seq_id).unwrap() }
    }

    fn keys_and_values(&self, section: usize, stream: usize, index: usize) -> (Vectors, Vectors) {
        let element = self.cache.layer(section, index).unwrap().k.ggml_type;
        let k = self.cache.k(section, stream, index).unwrap();
        let v = self.cache.v(section, stream, index).unwrap().unwrap();
        (Vectors::of(k, element), Vectors::of(v, element))
    }
}
