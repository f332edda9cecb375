//! ggml's tensor types: numbers, names, block and type sizes.

use std::ffi::CStr;

use serde::{Serialize, Serializer};

/// A ggml tensor type. Values of `n` elements are stored as `n / block_size` blocks of `type_size` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(u8);

struct Traits {
    /// NUL-terminated, so that C callers can have it as it is.
    name: &'static CStr,
    block_size: u32,
    type_size: u32,
    /// Values are packed in blocks with a scale, so one element has no bytes of its own.
    quantized: bool,
}

/// By ggml's number; gaps are types that ggml removed.
const TRAITS: [Option<Traits>; 43] = {
    const fn plain(name: &'static CStr, type_size: u32) -> Traits {
        Traits { name, block_size: 1, type_size, quantized: false }
    }
    const fn quant(name: &'static CStr, block_size: u32, type_size: u32) -> Traits {
        Traits { name, block_size, type_size, quantized: true }
    }
    [
        Some(plain(c"f32", 4)),
        Some(plain(c"f16", 2)),
        Some(quant(c"q4_0", 32, 18)),
        Some(quant(c"q4_1", 32, 20)),
        None,
        None,
        Some(quant(c"q5_0", 32, 22)),
        Some(quant(c"q5_1", 32, 24)),
        Some(quant(c"q8_0", 32, 34)),
        Some(quant(c"q8_1", 32, 36)),
        Some(quant(c"q2_K", 256, 84)),
        Some(quant(c"q3_K", 256, 110)),
        Some(quant(c"q4_K", 256, 144)),
        Some(quant(c"q5_K", 256, 176)),
        Some(quant(c"q6_K", 256, 210)),
        Some(quant(c"q8_K", 256, 292)),
        Some(quant(c"iq2_xxs", 256, 66)),
        Some(quant(c"iq2_xs", 256, 74)),
        Some(quant(c"iq3_xxs", 256, 98)),
        Some(quant(c"iq1_s", 256, 50)),
        Some(quant(c"iq4_nl", 32, 18)),
        Some(quant(c"iq3_s", 256, 110)),
        Some(quant(c"iq2_s", 256, 82)),
        Some(quant(c"iq4_xs", 256, 136)),
        Some(plain(c"i8", 1)),
        Some(plain(c"i16", 2)),
        Some(plain(c"i32", 4)),
        Some(plain(c"i64", 8)),
        Some(plain(c"f64", 8)),
        Some(quant(c"iq1_m", 256, 56)),
        Some(plain(c"bf16", 2)),
        None,
        None,
        None,
        Some(quant(c"tq1_0", 256, 54)),
        Some(quant(c"tq2_0", 256, 66)),
        None,
        None,
        None,
        Some(quant(c"mxfp4", 32, 17)),
        Some(quant(c"nvfp4", 64, 36)),
        Some(quant(c"q1_0", 128, 18)),
        Some(quant(c"q2_0", 64, 18)),
    ]
};

impl GgmlType {
    /// 32-bit floats.
    pub const F32: Self = Self(0);
    /// 16-bit floats.
    pub const F16: Self = Self(1);
    /// 4 bits, blocks of 32 with a scale.
    pub const Q4_0: Self = Self(2);
    /// 4 bits, blocks of 32 with a scale and a minimum.
    pub const Q4_1: Self = Self(3);
    /// 5 bits, blocks of 32 with a scale.
    pub const Q5_0: Self = Self(6);
    /// 5 bits, blocks of 32 with a scale and a minimum.
    pub const Q5_1: Self = Self(7);
    /// 8 bits, blocks of 32 with a scale.
    pub const Q8_0: Self = Self(8);
    /// 4 bits, non-linear, blocks of 32.
    pub const IQ4_NL: Self = Self(20);
    /// bfloat16.
    pub const BF16: Self = Self(30);

    /// The types that llama.cpp accepts for K and V.
    pub const KV: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::IQ4_NL,
    ];

    /// The type with ggml's number `value`; `None` for numbers that ggml does not use.
    #[must_use]
    pub fn from_i32(value: i32) -> Option<Self> {
        let number = u8::try_from(value).ok()?;
        TRAITS.get(usize::from(number))?.as_ref().map(|_| Self(number))
    }

    /// ggml's number.
    #[must_use]
    pub const fn as_i32(self) -> i32 {
        self.0 as i32
    }

    const fn traits(self) -> &'static Traits {
        match &TRAITS[self.0 as usize] {
            Some(traits) => traits,
            None => unreachable!(), // numbers without traits are never constructed
        }
    }

    /// ggml's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default() // all names are ASCII
    }

    /// ggml's name, NUL-terminated.
    #[must_use]
    pub const fn c_name(self) -> &'static CStr {
        self.traits().name
    }

    /// Elements of one block.
    #[must_use]
    pub const fn block_size(self) -> u32 {
        self.traits().block_size
    }

    /// Bytes of one block.
    #[must_use]
    pub const fn type_size(self) -> u32 {
        self.traits().type_size
    }

    /// Whether values are packed in blocks.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        self.traits().quantized
    }

    /// Bytes of a row of `n` elements; `None` if `n` is no whole number of blocks.
    #[must_use]
    pub const fn row_size(self, n: u32) -> Option<u64> {
        if !n.is_multiple_of(self.block_size()) {
            return None;
        }
        Some((n / self.block_size()) as u64 * self.type_size() as u64)
    }
}

impl Serialize for GgmlType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl std::fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.as_i32(), self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_ggml_removed_or_never_had_are_no_types() {
        for number in [-1, 4, 5, 31, 32, 33, 36, 37, 38, 43, 255, 256] {
            assert_eq!(GgmlType::from_i32(number), None, "{number}");
        }
    }

    #[test]
    fn row_sizes_of_every_type_that_holds_k_and_v() {
        let rows = GgmlType::KV.map(|t| (t.name(), t.row_size(256).unwrap()));
        assert_eq!(
            rows,
            [
                ("f32", 1024),
                ("f16", 512),
                ("bf16", 512),
                ("q8_0", 272),
                ("q4_0", 144),
                ("q4_1", 160),
                ("q5_0", 176),
                ("q5_1", 192),
                ("iq4_nl", 144)
            ]
        );
        assert_eq!(GgmlType::Q8_0.row_size(48), None);
    }
}
