//! Rows of K and V as f32 and back, with the rounding of ggml's reference quantisation.
//!
//! cuda/shift.cu does the same arithmetic in the same order, so that host and device give the same bytes.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "quants have at most 8 bits, and casts of floats saturate"
)]

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::GgmlType;
use crate::error::{Error, Result};

/// Elements of a block, in every type here that has blocks.
const QK: usize = 32;

/// What the quants of `iq4_nl` stand for.
const IQ4_NL_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// An `iq4_nl` block of smaller values is 0.
const IQ4_NL_EPS: f32 = 1e-15;

impl GgmlType {
    /// Reads a row as f32.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a type that is not among [`GgmlType::KV`], or if the row does not have as many
    /// elements as `out`.
    pub fn row_to_f32(self, row: &[u8], out: &mut [f32]) -> Result<()> {
        self.check_row(row.len(), out.len())?;
        match self {
            Self::F32 => convert(row, out, |x| [f32::from_le_bytes(*x)]),
            Self::F16 => halves_to_f32(row, out),
            Self::BF16 => convert(row, out, |x| [bf16::from_le_bytes(*x).to_f32()]),
            Self::Q8_0 => convert(row, out, |[d0, d1, qs @ ..]: &[u8; 34]| {
                let d = from_half([*d0, *d1]);
                block(|i| f32::from(qs[i] as i8) * d)
            }),
            Self::Q4_0 => convert(row, out, |[d0, d1, qs @ ..]: &[u8; 18]| {
                let d = from_half([*d0, *d1]);
                block(|i| f32::from(low_bits(qs, i) as i8 - 8) * d)
            }),
            Self::Q4_1 => convert(row, out, |[d0, d1, m0, m1, qs @ ..]: &[u8; 20]| {
                let (d, m) = (from_half([*d0, *d1]), from_half([*m0, *m1]));
                block(|i| f32::from(low_bits(qs, i)) * d + m)
            }),
            Self::Q5_0 => convert(row, out, |[d0, d1, h0, h1, h2, h3, qs @ ..]: &[u8; 22]| {
                let (d, qh) = (from_half([*d0, *d1]), u32::from_le_bytes([*h0, *h1, *h2, *h3]));
                block(|i| f32::from((low_bits(qs, i) | high_bit(qh, i)) as i8 - 16) * d)
            }),
            Self::Q5_1 => convert(row, out, |[d0, d1, m0, m1, h0, h1, h2, h3, qs @ ..]: &[u8; 24]| {
                let (d, m) = (from_half([*d0, *d1]), from_half([*m0, *m1]));
                let qh = u32::from_le_bytes([*h0, *h1, *h2, *h3]);
                block(|i| f32::from(low_bits(qs, i) | high_bit(qh, i)) * d + m)
            }),
            Self::IQ4_NL => convert(row, out, |[d0, d1, qs @ ..]: &[u8; 18]| {
                let d = from_half([*d0, *d1]);
                block(|i| f32::from(IQ4_NL_VALUES[usize::from(low_bits(qs, i))]) * d)
            }),
            _ => unreachable!("check_row knows the types"),
        }
        Ok(())
    }

    /// Writes f32 as a row.
    ///
    /// The bytes are those of ggml's reference quantisation wherever that is defined: for finite values, in blocks
    /// that are 0 or whose scale has a finite inverse.
    ///
    /// # Errors
    /// As [`GgmlType::row_to_f32`].
    pub fn row_from_f32(self, values: &[f32], row: &mut [u8]) -> Result<()> {
        self.check_row(row.len(), values.len())?;
        match self {
            Self::F32 => convert(values, row, |[x]| x.to_le_bytes()),
            Self::F16 => halves_from_f32(values, row),
            Self::BF16 => convert(values, row, |[x]| bf16::from_f32(*x).to_le_bytes()),
            Self::Q8_0 => convert(values, row, |x| {
                let d = largest(x).abs() / 127.0;
                let inverse = inverse(d);
                let q = block(|i| round(x[i] * inverse) as u8);
                concat::<34>(&[&to_half(d), &q])
            }),
            Self::Q4_0 => convert(values, row, |x| {
                let (d, q) = symmetric(x, 8);
                concat::<18>(&[&to_half(d), &pack(&q)])
            }),
            Self::Q4_1 => convert(values, row, |x| {
                let (d, m, q) = affine(x, 15);
                concat::<20>(&[&to_half(d), &to_half(m), &pack(&q)])
            }),
            Self::Q5_0 => convert(values, row, |x| {
                let (d, q) = symmetric(x, 16);
                concat::<22>(&[&to_half(d), &high_bits(&q), &pack(&q)])
            }),
            Self::Q5_1 => convert(values, row, |x| {
                let (d, m, q) = affine(x, 31);
                concat::<24>(&[&to_half(d), &to_half(m), &high_bits(&q), &pack(&q)])
            }),
            Self::IQ4_NL => convert(values, row, |x| {
                let (d, q) = non_linear(x);
                concat::<18>(&[&to_half(d), &pack(&q)])
            }),
            _ => unreachable!("check_row knows the types"),
        }
        Ok(())
    }

    fn check_row(self, bytes: usize, n: usize) -> Result<()> {
        if !Self::KV.contains(&self) {
            return Err(Error::arg("ggml_type", format!("{self} is not converted to f32 and back")));
        }
        let want = u32::try_from(n).ok().and_then(|n| self.row_size(n));
        if want == Some(bytes as u64) {
            return Ok(());
        }
        Err(Error::arg("row", format!("has {bytes} bytes, which are not {n} elements of {self}")))
    }
}

/// `A` elements at a time give `B`.
fn convert<S, D, const A: usize, const B: usize>(src: &[S], dst: &mut [D], each: impl Fn(&[S; A]) -> [D; B]) {
    for (src, dst) in src.as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        *dst = each(src);
    }
}

/// Many at once: processors have an instruction for eight of them.
fn halves_to_f32(row: &[u8], out: &mut [f32]) {
    if let Ok(halves) = bytemuck::try_cast_slice::<_, f16>(row) {
        return halves.convert_to_f32_slice(out);
    }
    // Tensors in a blob lie anywhere.
    let mut aligned = [f16::ZERO; 2 * QK];
    for (row, out) in row.chunks(size_of_val(&aligned)).zip(out.chunks_mut(aligned.len())) {
        bytemuck::cast_slice_mut(&mut aligned)[..row.len()].copy_from_slice(row);
        aligned[..out.len()].convert_to_f32_slice(out);
    }
}

fn halves_from_f32(values: &[f32], row: &mut [u8]) {
    match bytemuck::try_cast_slice_mut::<_, f16>(row) {
        Ok(halves) if !values.iter().any(|x| x.is_nan()) => halves.convert_from_f32_slice(values),
        _ => convert(values, row, |[x]| to_half(*x)),
    }
}

fn block<T>(element: impl Fn(usize) -> T) -> [T; QK] {
    std::array::from_fn(element)
}

fn concat<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    let mut out = [0; N];
    let mut at = 0;
    for part in parts {
        out[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    out
}

fn from_half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// Rounds to even; like ggml, all NaNs become one.
fn to_half(x: f32) -> [u8; 2] {
    let nan = f16::from_bits(0x7e00 | if x.is_sign_negative() { 0x8000 } else { 0 });
    if x.is_nan() { nan } else { f16::from_f32(x) }.to_le_bytes()
}

/// The lower half of a block is in the low bits of the bytes, the upper half in the high bits.
fn low_bits(qs: &[u8], i: usize) -> u8 {
    if i < QK / 2 { qs[i] & 15 } else { qs[i - QK / 2] >> 4 }
}

fn pack(q: &[u8; QK]) -> [u8; QK / 2] {
    std::array::from_fn(|i| q[i] & 15 | q[i + QK / 2] << 4)
}

/// The fifth bit of a quant, in its place.
fn high_bit(qh: u32, i: usize) -> u8 {
    (qh >> i & 1) as u8 * 16
}

fn high_bits(q: &[u8; QK]) -> [u8; 4] {
    q.iter().rev().fold(0_u32, |qh, q| qh << 1 | u32::from(q >> 4)).to_le_bytes()
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Half away from 0, kept in the range of an i8.
fn round(x: f32) -> i8 {
    let x = x.clamp(-128.0, 127.0);
    let whole = x as i8;
    let rest = x - f32::from(whole);
    whole + i8::from(rest >= 0.5) - i8::from(rest <= -0.5)
}

/// Towards 0, kept in `0..=max`.
fn quant(x: f32, max: u8) -> u8 {
    (x as i32).clamp(0, i32::from(max)) as u8
}

/// The first of the values that are furthest from 0.
fn largest(x: &[f32; QK]) -> f32 {
    x.iter().fold(0.0, |largest: f32, &x| if largest.abs() < x.abs() { x } else { largest })
}

/// Scale and quants around `zero`; the largest value is quant 0.
fn symmetric(x: &[f32; QK], zero: u8) -> (f32, [u8; QK]) {
    let d = largest(x) / -f32::from(zero);
    let inverse = inverse(d);
    (d, block(|i| quant(x[i] * inverse + (f32::from(zero) + 0.5), 2 * zero - 1)))
}

/// Scale, minimum and quants in `0..=max`.
fn affine(x: &[f32; QK], max: u8) -> (f32, f32, [u8; QK]) {
    let low = x.iter().fold(f32::MAX, |low, &x| if x < low { x } else { low });
    let high = x.iter().fold(-f32::MAX, |high, &x| if x > high { x } else { high });
    let d = (high - low) / f32::from(max);
    let inverse = inverse(d);
    (d, low, block(|i| quant((x[i] - low) * inverse + 0.5, max)))
}

/// Scale and quants of `iq4_nl`: the largest value sets the quants, then least squares, weighted with the square of
/// each value, the scale.
fn non_linear(x: &[f32; QK]) -> (f32, [u8; QK]) {
    let largest = largest(x);
    if largest.abs() < IQ4_NL_EPS {
        return (0.0, [0; QK]);
    }
    let inverse = 1.0 / (largest / f32::from(IQ4_NL_VALUES[0]));
    let q = block(|i| nearest(x[i] * inverse));
    let (mut products, mut squares) = (0.0, 0.0);
    for (&x, &q) in x.iter().zip(&q) {
        let (q, weight) = (f32::from(IQ4_NL_VALUES[usize::from(q)]), x * x);
        products += weight * q * x;
        squares += weight * q * q;
    }
    (if squares > 0.0 { products / squares } else { 0.0 }, q)
}

/// The index of the nearest of [`IQ4_NL_VALUES`], of the larger one in the middle.
fn nearest(x: f32) -> u8 {
    let value = |i: usize| f32::from(IQ4_NL_VALUES[i]);
    let above = (1..15).find(|&i| x < value(i)).unwrap_or(15);
    let nearest = if x - value(above - 1) < value(above) - x { above - 1 } else { above };
    nearest as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Vec<u8> {
        let path = format!("{}/tests/fixtures/quants/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    fn encoded(ggml_type: GgmlType, values: &[f32]) -> Vec<u8> {
        let n = u32::try_from(values.len()).unwrap();
        let mut row = vec![0xAA; usize::try_from(ggml_type.row_size(n).unwrap()).unwrap()];
        ggml_type.row_from_f32(values, &mut row).unwrap();
        row
    }

    fn decoded(ggml_type: GgmlType, row: &[u8], n: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; n];
        ggml_type.row_to_f32(row, &mut values).unwrap();
        values
    }

    #[test]
    fn rows_are_the_bytes_and_the_values_of_ggml() {
        let values = floats(&fixture("values.bin"));
        for ggml_type in GgmlType::KV {
            if ggml_type == GgmlType::F32 {
                continue;
            }
            let row = fixture(&format!("{}.bin", ggml_type.name()));
            let mine = encoded(ggml_type, &values);
            let block = ggml_type.type_size() as usize;
            for (i, (mine, ggml)) in mine.chunks(block).zip(row.chunks(block)).enumerate() {
                assert_eq!(mine, ggml, "block {i} of {ggml_type}");
            }
            let ggml = floats(&fixture(&format!("{}_values.bin", ggml_type.name())));
            assert_eq!(bits(&decoded(ggml_type, &row, values.len())), bits(&ggml), "{ggml_type}");
        }
    }

    #[test]
    fn halves_are_the_same_wherever_their_row_lies() {
        let values = floats(&fixture("values.bin"));
        let row = fixture("f16.bin");
        let mut memory = vec![0; row.len() + 2];
        for start in [0, 1] {
            let place = &mut memory[start..][..row.len()];
            GgmlType::F16.row_from_f32(&values, place).unwrap();
            assert_eq!(*place, row[..], "from byte {start}");
            let want = floats(&fixture("f16_values.bin"));
            assert_eq!(
                bits(&decoded(GgmlType::F16, &memory[start..][..row.len()], values.len())),
                bits(&want)
            );
        }
    }

    #[test]
    fn f32_rows_keep_every_bit() {
        let values = [0.0, -0.0, f32::MIN_POSITIVE / 3.0, f32::MAX, f32::NEG_INFINITY, f32::NAN];
        let row = encoded(GgmlType::F32, &values);
        assert_eq!(bits(&decoded(GgmlType::F32, &row, values.len())), bits(&values));
    }

    #[test]
    fn halves_round_to_even_and_keep_signs_infinities_and_subnormals() {
        let tie = 1.0 + 1.0 / 2048.0; // between 1 and its successor
        let cases = [
            (0.0, 0x0000),
            (-0.0, 0x8000),
            (tie, 0x3c00),
            (tie + 1.0 / 1024.0, 0x3c02),
            (65504.0, 0x7bff),
            (65520.0, 0x7c00),
            (f32::NEG_INFINITY, 0xfc00),
            (f32::from_bits(0x7f80_0001), 0x7e00),
            (f32::from_bits(0xffff_ffff), 0xfe00),
            (2.0_f32.powi(-24), 0x0001),
            (2.0_f32.powi(-25), 0x0000),
            (1.5 * 2.0_f32.powi(-25), 0x0001),
        ];
        for (x, half) in cases {
            assert_eq!(encoded(GgmlType::F16, &[x]), u16::to_le_bytes(half), "{x}");
        }
        assert!(decoded(GgmlType::F16, &[0x01, 0x7c], 1)[0].is_nan());
        assert_eq!(decoded(GgmlType::F16, &[0x01, 0x80], 1), [-(2.0_f32.powi(-24))]);
    }

    #[test]
    fn bf16_rounds_to_even_and_keeps_signs_infinities_and_nans() {
        let cases = [
            (-0.0, 0x8000),
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
            (f32::from_bits(0x7f80_0001), 0x7fc0),
        ];
        for (x, bits) in cases {
            assert_eq!(encoded(GgmlType::BF16, &[x]), u16::to_le_bytes(bits), "{x}");
        }
    }

    #[test]
    fn a_block_of_zeroes_is_zeroes() {
        for ggml_type in GgmlType::KV {
            for zero in [0.0, -0.0] {
                let values = [zero; QK];
                let row = encoded(ggml_type, &values);
                assert!(decoded(ggml_type, &row, QK).iter().all(|&x| x == 0.0), "{ggml_type}: {row:?}");
            }
        }
    }

    #[test]
    fn values_that_no_scale_fits_do_not_panic() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -f32::MAX, 1e-40, -1e-40] {
            for others in [0.5, x, -x] {
                let mut values = [others; QK];
                values[7] = x;
                for ggml_type in GgmlType::KV {
                    decoded(ggml_type, &encoded(ggml_type, &values), QK);
                }
            }
        }
    }

    #[test]
    fn a_row_of_another_length_or_type_is_refused() {
        let refusal = |ggml_type: GgmlType, bytes: usize, n: usize| {
            ggml_type.row_to_f32(&vec![0; bytes], &mut vec![0.0; n]).unwrap_err().to_string()
        };
        assert_eq!(
            refusal(GgmlType::Q8_0, 34, 33),
            "row: has 34 bytes, which are not 33 elements of 8 (q8_0)"
        );
        assert_eq!(refusal(GgmlType::F16, 8, 3), "row: has 8 bytes, which are not 3 elements of 1 (f16)");
        let q2_k = GgmlType::from_i32(10).unwrap();
        assert_eq!(refusal(q2_k, 84, 256), "ggml_type: 10 (q2_K) is not converted to f32 and back");
    }
}
