//! What of a state may differ from the cache that it is restored to, and what is said of it.

use crate::error::Error;
use crate::format::GgmlType;
use crate::storage::{Conversion, TensorLayout};

/// What a restore may convert: the one rule, for states and for what slot files say of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Convert {
    /// Nothing: the tensors do not come by here.
    Nothing,
    /// The order of elements, which loses nothing.
    #[default]
    Layout,
    /// Types and rotations as well, which rounds.
    Types,
}

impl Convert {
    /// What a caller allows.
    pub fn allowing(types: bool) -> Self {
        if types { Self::Types } else { Self::Layout }
    }

    /// Whether a tensor of type `state` may become one of type `cache`.
    pub fn takes_type(self, state: GgmlType, cache: GgmlType) -> bool {
        let is_known = |ggml_type| GgmlType::KV.contains(&ggml_type);
        state == cache || (self == Self::Types && is_known(state) && is_known(cache))
    }

    /// Whether rotated elements may become elements of another rotation.
    pub fn takes_rotation(self, state: u32, cache: u32) -> bool {
        let is_known = |n_rot: u32| n_rot == 0 || n_rot.is_power_of_two();
        state == cache || (self == Self::Types && is_known(state) && is_known(cache))
    }

    /// The refusal of what was refused only because types are not to be converted says so.
    pub fn refusal(self, error: Error, takes: impl Fn(Self) -> bool) -> Error {
        match error {
            Error::Mismatch { what, state, cache, place } if self == Self::Layout && takes(Self::Types) => {
                Error::Mismatch { what, state, cache, place: format!("{place}; convert_types allows it") }
            }
            other => other,
        }
    }
}

/// What was converted, in words: one line for all layers of which the same is true.
///
/// `tensors` are names of tensors with their conversions, in order: "K" of each layer, then "V".
pub(super) fn notes<'a>(
    section: &str,
    tensors: impl Iterator<Item = (&'a str, Option<Conversion>)>,
) -> Vec<String> {
    let mut found: Vec<(&str, TensorLayout, TensorLayout, usize)> = Vec::new();
    for (name, conversion) in tensors {
        let Some(conversion) = conversion else { continue };
        let (from, to) = (conversion.from(), conversion.to());
        match found.iter_mut().find(|other| (other.0, other.1, other.2) == (name, from, to)) {
            Some((.., n_layer)) => *n_layer += 1,
            None => found.push((name, from, to, 1)),
        }
    }
    let line = |(name, from, to, n_layer): &(&str, TensorLayout, TensorLayout, usize)| {
        let layers = if *n_layer == 1 { "layer" } else { "layers" };
        let [from, to] = [(from, to), (to, from)].map(|(layout, other)| words(*layout, *other));
        format!("section {section}, {name} of {n_layer} {layers}: {from} -> {to}")
    };
    found.iter().map(line).collect()
}

/// A layout, as far as it differs from another.
fn words(layout: TensorLayout, other: TensorLayout) -> String {
    let mut words = Vec::new();
    if layout.ggml_type != other.ggml_type {
        words.push(layout.ggml_type.name().to_owned());
    }
    if layout.transposed != other.transposed {
        words.push(if layout.transposed { "transposed" } else { "rows" }.to_owned());
    }
    if layout.n_rot != other.n_rot {
        words.push(if layout.n_rot == 0 {
            "plain".to_owned()
        } else {
            format!("rotated by {}", layout.n_rot)
        });
    }
    words.join(", ")
}
