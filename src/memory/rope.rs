//! RoPE: how K of a layer is turned when its cell moves to another position.

use std::collections::BTreeMap;

use super::geometry::{Geometry, TensorGeometry};
use super::kv_cache::KvCache;
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::storage::{self, PlaneShift, Rotation, RotationTable, ShiftFailure, ShiftedCell, Transfer};
use crate::types::{Pos, RopeType};

/// Cells that are turned at a time: a `seq_div` can give each of them a row of the table.
const CELLS_AT_ONCE: usize = 8192;

/// RoPE of a layer, as the model applies it to K.
///
/// There is no `attn_factor`: K was scaled when it was computed, and a shift only turns it.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParams {
    /// Which elements are turned together.
    pub rope_type: RopeType,
    /// Elements of a head of K.
    pub n_embd_head: u32,
    /// Elements of a head that are turned, an even number.
    pub n_rope_dims: u32,
    /// Elements of a head before those that are turned (MLA caches that begin with the latent part).
    pub n_embd_nope: u32,
    /// Base of the frequencies, of this layer: local layers can have one of their own.
    pub freq_base: f32,
    /// What positions are multiplied with, of this layer: 1 / the scaling factor of the context.
    pub freq_scale: f32,
    /// By what each pair's frequency is divided, `n_rope_dims / 2` factors (llama 3, longrope); empty: 1.
    pub freq_factors: Vec<f32>,
    /// Share of YaRN's extrapolation; 0: positions are scaled alike in every dimension.
    pub ext_factor: f32,
    /// YaRN: pairs that turn more often than this in the original context are extrapolated.
    pub beta_fast: f32,
    /// YaRN: pairs that turn less often than this in the original context are scaled.
    pub beta_slow: f32,
    /// YaRN: the context of the training.
    pub n_ctx_orig: u32,
}

impl RopeParams {
    /// All of each head is turned, with base 10000, not scaled.
    #[must_use]
    pub fn new(rope_type: RopeType, n_embd_head: u32) -> Self {
        Self {
            rope_type,
            n_embd_head,
            n_rope_dims: n_embd_head,
            n_embd_nope: 0,
            freq_base: 10_000.0,
            freq_scale: 1.0,
            freq_factors: Vec::new(),
            ext_factor: 0.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            n_ctx_orig: 0,
        }
    }

    /// The rotation of rows of `k`.
    fn rotation(&self, k: &TensorGeometry, n_rot_k: u32, place: &str) -> Result<Rotation> {
        let bad = |field: &str, reason: String| Err(Error::arg(format!("{place}.{field}"), reason));
        let Self { n_embd_head, n_rope_dims, n_embd_nope, .. } = *self;
        if !GgmlType::KV.contains(&k.ggml_type) {
            return bad("type_k", format!("{} is not converted, and cannot be turned", k.ggml_type));
        }
        if n_embd_head == 0 || !k.n_embd.is_multiple_of(n_embd_head) {
            return bad(
                "n_embd_head",
                format!("{n_embd_head}, the {} elements of K are no whole heads", k.n_embd),
            );
        }
        let block = k.ggml_type.block_size();
        if !n_embd_head.is_multiple_of(block) {
            let reason =
                format!("{n_embd_head} is no multiple of the {block} elements of a {} block", k.ggml_type);
            return bad("n_embd_head", reason);
        }
        if n_rot_k != 0 && !n_embd_head.is_multiple_of(n_rot_k) {
            let reason = format!("{n_embd_head} is no multiple of n_rot_k, which is {n_rot_k}");
            return bad("n_embd_head", reason);
        }
        if n_rope_dims == 0 || !n_rope_dims.is_multiple_of(2) {
            return bad("n_rope_dims", format!("{n_rope_dims}, pairs of elements are turned"));
        }
        if n_embd_nope.checked_add(n_rope_dims).is_none_or(|end| end > n_embd_head) {
            let reason = format!("{n_rope_dims} behind n_embd_nope {n_embd_nope} in heads of {n_embd_head}");
            return bad("n_rope_dims", reason);
        }
        let n_factor = self.freq_factors.len();
        if n_factor != 0 && n_factor != n_rope_dims as usize / 2 {
            return bad("freq_factors", format!("{n_factor} factors for {} pairs", n_rope_dims / 2));
        }
        let positive = |x: f32| x.is_finite() && x > 0.0;
        if let Some(factor) = self.freq_factors.iter().find(|&&factor| !factor.is_finite() || factor == 0.0) {
            return bad("freq_factors", format!("{factor}, frequencies are divided by it"));
        }
        for (field, x) in [("freq_base", self.freq_base), ("freq_scale", self.freq_scale)] {
            if !positive(x) {
                return bad(field, format!("{x}, it is above 0"));
            }
        }
        if !self.ext_factor.is_finite() {
            return bad("ext_factor", format!("{}, it is a number", self.ext_factor));
        }
        if self.ext_factor != 0.0 {
            for (field, x) in [("beta_fast", self.beta_fast), ("beta_slow", self.beta_slow)] {
                if !positive(x) {
                    return bad(
                        field,
                        format!("{x} with YaRN (ext_factor {}), it is above 0", self.ext_factor),
                    );
                }
            }
            if self.n_ctx_orig == 0 {
                return bad("n_ctx_orig", format!("0 with YaRN (ext_factor {})", self.ext_factor));
            }
            if self.freq_base <= 1.0 {
                let reason =
                    format!("{} with YaRN (ext_factor {}), it is above 1", self.freq_base, self.ext_factor);
                return bad("freq_base", reason);
            }
        }
        Ok(Rotation {
            ggml_type: k.ggml_type,
            n_head: k.n_embd / n_embd_head,
            n_embd_head,
            offset: n_embd_nope,
            n_rope_dims,
            rope_type: self.rope_type,
            n_rot_k,
        })
    }

    /// The angle, in radians, by which a position turns each pair.
    fn frequencies(&self) -> Vec<f64> {
        let n_dims = f64::from(self.n_rope_dims);
        let scale = f64::from(self.freq_scale);
        let ramp = self.yarn_ramp();
        (0..self.n_rope_dims / 2)
            .map(|i| {
                let factor = self.freq_factors.get(i as usize).map_or(1.0, |&factor| f64::from(factor));
                let original = f64::from(self.freq_base).powf(-2.0 * f64::from(i) / n_dims) / factor;
                let extrapolated =
                    if self.ext_factor == 0.0 { 0.0 } else { ramp(i) * f64::from(self.ext_factor) };
                original * (scale * (1.0 - extrapolated) + extrapolated)
            })
            .collect()
    }

    /// How much of each pair YaRN extrapolates: 1 for pairs that turn fast, 0 for slow ones, a ramp between.
    fn yarn_ramp(&self) -> impl Fn(u32) -> f64 {
        // In f32 as ggml does, so that the ramp begins and ends at the same pairs.
        #[expect(clippy::cast_precision_loss, reason = "as ggml")]
        let pair_with_turns = |n_turn: f32| {
            let n_ctx_orig = self.n_ctx_orig as f32;
            self.n_rope_dims as f32 * (n_ctx_orig / (n_turn * 2.0 * std::f32::consts::PI)).ln()
                / (2.0 * self.freq_base.ln())
        };
        let first = f64::from(pair_with_turns(self.beta_fast).floor().max(0.0));
        // ggml's bound is the last dimension, though pairs are compared with it.
        let last = f64::from(pair_with_turns(self.beta_slow).ceil()).min(f64::from(self.n_rope_dims - 1));
        move |i| 1.0 - ((f64::from(i) - first) / (last - first).max(0.001)).clamp(0.0, 1.0)
    }
}

/// Rotation and index of the frequencies.
type LayerRope = (Rotation, usize);

/// The rotations of a section's layers.
#[derive(Debug)]
pub(crate) struct SectionRope {
    /// `None`: K does not depend on its position.
    layers: Vec<Option<LayerRope>>,
    /// Mostly the same for all layers, or one of two.
    frequencies: Vec<Vec<f64>>,
}

impl SectionRope {
    pub fn new(geometry: &Geometry, layers: &[Option<RopeParams>]) -> Result<Self> {
        let Geometry { name, k, n_rot_k, .. } = geometry;
        if layers.len() != k.len() {
            let reason = format!("{} layers in a section of {}", layers.len(), k.len());
            return Err(Error::arg(format!("{name}.rope"), reason));
        }
        let mut all = Vec::<Vec<f64>>::new();
        let mut layer = |(il, (params, k)): (usize, (&Option<RopeParams>, &TensorGeometry))| {
            let Some(params) = params else { return Ok(None) };
            let rotation = params.rotation(k, *n_rot_k, &format!("{name}.layer {il}.rope"))?;
            let frequencies = params.frequencies();
            let index = all.iter().position(|known| *known == frequencies).unwrap_or_else(|| {
                all.push(frequencies);
                all.len() - 1
            });
            Ok(Some((rotation, index)))
        };
        let layers = layers.iter().zip(k).enumerate().map(&mut layer).collect::<Result<_>>()?;
        Ok(Self { layers, frequencies: all })
    }
}

impl KvCache {
    /// Turns K of every cell of a stream with a pending shift.
    pub fn turn_shifted(
        &mut self,
        stream: usize,
        rope: &SectionRope,
        transfer: &Transfer,
    ) -> Result<(), ShiftFailure> {
        let n_layer = self.geometry.n_layer();
        let shifted: Vec<(u32, Pos)> = self.shifted(stream).collect();
        for (chunk, shifted) in shifted.chunks(CELLS_AT_ONCE).enumerate() {
            let (cells, shifts) = table_rows(shifted);
            let tables: Vec<_> =
                rope.frequencies.iter().map(|frequencies| RotationTable::new(frequencies, &shifts)).collect();
            let planes = self.planes.k[stream * n_layer..][..n_layer].iter_mut();
            let batch = planes
                .zip(&rope.layers)
                .filter_map(|(plane, layer)| {
                    let (rotation, table) = layer.as_ref()?;
                    Some(PlaneShift { plane, rotation, table: &tables[*table] })
                })
                .collect();
            storage::shift(batch, &cells, transfer).map_err(|failure| ShiftFailure {
                rows_changed: failure.rows_changed || chunk > 0,
                ..failure
            })?;
        }
        Ok(())
    }
}

/// The different shifts, each a row of the table, and the row of each cell.
fn table_rows(shifted: &[(u32, Pos)]) -> (Vec<ShiftedCell>, Vec<Pos>) {
    let mut rows = BTreeMap::new();
    let mut shifts = Vec::new();
    let cells = shifted.iter().map(|&(cell, shift)| {
        let row = *rows.entry(shift).or_insert_with(|| {
            shifts.push(shift);
            u32::try_from(shifts.len() - 1).expect("cells are counted in 32 bits")
        });
        ShiftedCell { cell, row }
    });
    (cells.collect(), shifts)
}
