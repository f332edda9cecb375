//! What the data of an attention section says of itself before its tensors, compared with the cache.

use super::convert::Convert;
use super::geometry::{Geometry, TensorGeometry};
use super::kv_read::{LegacyRotation, ReadParams};
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::state::Input;
use crate::storage::{Conversion, TensorLayout};

/// What the data of a stream begins with.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataLayout {
    v_trans: bool,
    rotation: Rotation,
    convert: Convert,
}

/// The rotations of a state.
#[derive(Clone, Copy, Debug)]
enum Rotation {
    /// Those of the cache.
    Same,
    /// As the state says.
    Recorded { n_rot_k: u32, n_rot_v: u32 },
    /// The state does not say it, its caller may.
    Stated(Option<LegacyRotation>),
}

/// What a tensor begins with.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorHead {
    /// Bytes of a cell in the state.
    row_size: u64,
    pub conversion: Option<Conversion>,
}

/// K or V, with what llama.cpp says of one that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    K,
    V,
}

impl Side {
    fn other_type(self) -> &'static str {
        match self {
            Self::K => "mismatched key type",
            Self::V => "mismatched value type",
        }
    }

    fn other_row_size(self) -> &'static str {
        match self {
            Self::K => "mismatched key row size",
            Self::V => "mismatched value row size",
        }
    }

    fn other_rotation(self) -> &'static str {
        match self {
            Self::K => "incompatible key rotation",
            Self::V => "incompatible value rotation",
        }
    }
}

impl TensorHead {
    /// Bytes of so many cells.
    pub fn bytes(&self, n_cells: u64) -> Result<u64> {
        n_cells.checked_mul(self.row_size).ok_or_else(|| {
            let got = format_args!("{n_cells} cells of {} bytes", self.row_size);
            Error::corrupt("cell_count", got, "a size that fits 64 bits")
        })
    }
}

impl Geometry {
    /// Reads what comes before the tensors of a stream.
    pub(super) fn read_layout(&self, input: &mut impl Input, params: ReadParams) -> Result<DataLayout> {
        let convert = params.convert;
        let v_trans = input.u32("v_trans")?;
        let n_layer = input.u32("n_layer")?;
        if n_layer as usize != self.n_layer() {
            return Err(self.mismatch("mismatched layer count", n_layer, self.n_layer(), None));
        }
        let is_same = v_trans == u32::from(self.v_trans);
        if !is_same && (v_trans > 1 || convert == Convert::Nothing) {
            let cache = u32::from(self.v_trans);
            return Err(self.mismatch("incompatible V transposition", v_trans, cache, None));
        }
        let rotation = if input.version().has_rotation() {
            let (n_rot_k, n_rot_v) = (input.u32("n_rot_k")?, input.u32("n_rot_v")?);
            for (side, state, cache) in [(Side::K, n_rot_k, self.n_rot_k), (Side::V, n_rot_v, self.n_rot_v)] {
                if !convert.takes_rotation(state, cache) {
                    let refused = self.mismatch(side.other_rotation(), state, cache, None);
                    return Err(convert.refusal(refused, |convert| convert.takes_rotation(state, cache)));
                }
            }
            Rotation::Recorded { n_rot_k, n_rot_v }
        } else if convert == Convert::Types {
            Rotation::Stated(params.legacy_rotation)
        } else {
            self.check_legacy_rotation(input, params.legacy_rotation)?;
            Rotation::Same
        };
        Ok(DataLayout { v_trans: v_trans == 1, rotation, convert })
    }

    /// Reads what comes before the rows of K.
    pub(super) fn read_k_head(
        &self,
        input: &mut impl Input,
        layer: usize,
        layout: DataLayout,
    ) -> Result<TensorHead> {
        let k = &self.k[layer];
        let ggml_type = self.read_type(input, k, layer, Side::K, layout.convert)?;
        let row_size = self.read_row_size(input, k, ggml_type, layer, Side::K)?;
        let n_rot =
            self.state_rotation(input, layout, Side::K, ggml_type, (self.n_rot_k, self.n_embd_head_k))?;
        let [from, to] = [(ggml_type, n_rot), (k.ggml_type, self.n_rot_k)]
            .map(|(ggml_type, n_rot)| TensorLayout { ggml_type, transposed: false, n_rot });
        let conversion = self.conversion(from, to, k, layer, Side::K)?;
        Ok(TensorHead { row_size, conversion })
    }

    /// Reads what comes before V, by rows or by channels.
    pub(super) fn read_v_head(
        &self,
        input: &mut impl Input,
        layer: usize,
        v: &TensorGeometry,
        layout: DataLayout,
    ) -> Result<TensorHead> {
        let ggml_type = self.read_type(input, v, layer, Side::V, layout.convert)?;
        let row_size = if layout.v_trans {
            self.read_channels(input, v, ggml_type, layer)?
        } else {
            self.read_row_size(input, v, ggml_type, layer, Side::V)?
        };
        let n_rot =
            self.state_rotation(input, layout, Side::V, ggml_type, (self.n_rot_v, self.n_embd_head_v))?;
        let from = TensorLayout { ggml_type, transposed: layout.v_trans, n_rot };
        let to = TensorLayout { ggml_type: v.ggml_type, transposed: self.v_trans, n_rot: self.n_rot_v };
        let conversion = self.conversion(from, to, v, layer, Side::V)?;
        Ok(TensorHead { row_size, conversion })
    }

    fn read_type(
        &self,
        input: &mut impl Input,
        tensor: &TensorGeometry,
        layer: usize,
        side: Side,
        convert: Convert,
    ) -> Result<GgmlType> {
        let number = input.i32("ggml type")?;
        let state = GgmlType::from_i32(number);
        let takes = |convert: Convert| state.filter(|&state| convert.takes_type(state, tensor.ggml_type));
        takes(convert).ok_or_else(|| {
            let state = state.map_or(number.to_string(), |state| state.to_string());
            let refused = self.mismatch(side.other_type(), state, tensor.ggml_type, Some(layer));
            convert.refusal(refused, |convert| takes(convert).is_some())
        })
    }

    fn read_row_size(
        &self,
        input: &mut impl Input,
        tensor: &TensorGeometry,
        ggml_type: GgmlType,
        layer: usize,
        side: Side,
    ) -> Result<u64> {
        let row_size = input.u64("row_size")?;
        match ggml_type.row_size(tensor.n_embd) {
            Some(expected) if expected == row_size => Ok(row_size),
            expected => {
                let expected = expected.unwrap_or(tensor.row_size);
                Err(self.mismatch(side.other_row_size(), row_size, expected, Some(layer)))
            }
        }
    }

    /// Returns the bytes of a cell.
    fn read_channels(
        &self,
        input: &mut impl Input,
        v: &TensorGeometry,
        ggml_type: GgmlType,
        layer: usize,
    ) -> Result<u64> {
        let elem = input.u32("value element size")?;
        let n_embd = input.u32("n_embd_v_gqa")?;
        if elem != ggml_type.type_size() {
            let cache = ggml_type.type_size();
            return Err(self.mismatch("mismatched value element size", elem, cache, Some(layer)));
        }
        if n_embd != v.n_embd {
            return Err(self.mismatch("mismatched GQA embedding size", n_embd, v.n_embd, Some(layer)));
        }
        Ok(u64::from(elem) * u64::from(n_embd))
    }

    /// How a tensor of the state becomes one of the cache; `None`: it is one.
    fn conversion(
        &self,
        from: TensorLayout,
        to: TensorLayout,
        tensor: &TensorGeometry,
        layer: usize,
        side: Side,
    ) -> Result<Option<Conversion>> {
        if from == to {
            return Ok(None);
        }
        let conversion = Conversion::new(from, to, tensor.n_embd);
        conversion.map(Some).ok_or_else(|| {
            // Types were compared: what a tensor of the state can still not be is transposed and quantised, or rotated.
            if from.transposed && from.ggml_type.is_quantized() {
                let state = format!("{}, transposed", from.ggml_type);
                return self.mismatch(side.other_type(), state, to.ggml_type, Some(layer));
            }
            self.mismatch(side.other_rotation(), from.n_rot, to.n_rot, Some(layer))
        })
    }

    /// Since April 2026 llama.cpp rotates quantised caches by default, but files record it only from version 4:
    /// the same bytes mean one thing or the other, and only the caller can know which.
    fn check_legacy_rotation(&self, input: &impl Input, stated: Option<LegacyRotation>) -> Result<()> {
        let sides = [(Side::K, self.may_rotate_k, self.n_rot_k), (Side::V, self.may_rotate_v, self.n_rot_v)];
        for (side, _, n_rot) in sides.into_iter().filter(|&(_, may_rotate, _)| may_rotate) {
            let refused = |state| {
                let refused = self.mismatch(side.other_rotation(), state, n_rot, None);
                Err(Convert::Layout.refusal(refused, |_| true))
            };
            match stated {
                None => return Err(self.rotation_unstated(input)),
                Some(LegacyRotation::Rotated) if n_rot == 0 => return refused("a rotation (stated)"),
                Some(LegacyRotation::Plain) if n_rot != 0 => return refused("no rotation (stated)"),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// How a tensor of the state is rotated. `cache` and `n_embd_head` are the rotation of the cache and the elements of a head, 0 if
    /// unknown.
    fn state_rotation(
        &self,
        input: &impl Input,
        layout: DataLayout,
        side: Side,
        ggml_type: GgmlType,
        (cache, n_embd_head): (u32, u32),
    ) -> Result<u32> {
        let is_k = side == Side::K;
        let stated = match layout.rotation {
            Rotation::Same => return Ok(cache),
            Rotation::Recorded { n_rot_k, n_rot_v } => return Ok(if is_k { n_rot_k } else { n_rot_v }),
            Rotation::Stated(stated) => stated,
        };
        let may_rotate = cache != 0 || (ggml_type.is_quantized() && n_embd_head.is_multiple_of(64));
        match stated.filter(|_| may_rotate) {
            None if may_rotate => Err(self.rotation_unstated(input)),
            None | Some(LegacyRotation::Plain) => Ok(0),
            Some(LegacyRotation::Rotated) if cache != 0 => Ok(cache),
            // As llama.cpp chooses it: for K the largest power of 2 in a head.
            Some(LegacyRotation::Rotated) if !is_k => Ok(64),
            Some(LegacyRotation::Rotated) if n_embd_head != 0 => Ok(1 << n_embd_head.trailing_zeros()),
            Some(LegacyRotation::Rotated) => {
                let state = "a rotation (stated) of unknown size: n_embd_head_k is 0";
                Err(self.mismatch(side.other_rotation(), state, cache, None))
            }
        }
    }

    fn rotation_unstated(&self, input: &impl Input) -> Error {
        Error::RotationUnstated {
            version: input.version().seq_version(),
            place: format!("section {}", self.name),
            n_rot_k: self.n_rot_k,
            n_rot_v: self.n_rot_v,
        }
    }
}
