//! The head of a GGUF, the file of a model: all but the data of its tensors.
//!
//! ```text
//! 'GGUF' | u32 version (2, 3) | u64 n_tensor | u64 n_kv
//! n_kv times:     string key | u32 type | value
//! n_tensor times: string name | u32 n_dim | u64 ne[n_dim] | u32 ggml type | u64 offset
//!
//! string: u64 len | bytes        value of type array: u32 type | u64 n | n values, which are no arrays
//! ```

use std::ops::Range;

use super::BoundedRead;
use crate::error::{Error, Result};

const MAGIC: u32 = u32::from_le_bytes(*b"GGUF");
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Dimensions of a ggml tensor.
const MAX_DIMS: u32 = 4;

/// Passes over the head of a GGUF; returns its bytes. What keys and tensors mean, and their types, is not looked at.
///
/// # Errors
/// [`Error::UnknownVersion`], [`Error::Corrupt`], and those of `input`.
pub fn skip_gguf_head(input: &mut impl BoundedRead) -> Result<u64> {
    let start = input.offset();
    let (magic, version) = (input.u32("GGUF magic")?, input.u32("GGUF version")?);
    if magic != MAGIC {
        return Err(Error::corrupt("GGUF magic", format_args!("{magic:08x}"), format_args!("{MAGIC:08x}")));
    }
    if !matches!(version, 2 | 3) {
        return Err(Error::UnknownVersion { kind: "GGUF", magic, version });
    }
    let (n_tensor, n_kv) = (input.u64("n_tensor")?, input.u64("n_kv")?);
    // However large the counts are: each of what they count has bytes, and those end.
    for _ in 0..n_kv {
        input.blob("key")?;
        match input.u32("type of a value")? {
            ARRAY => skip_array(input),
            STRING => input.blob("value"),
            number => input.skip("value", value_size(number)?),
        }?;
    }
    for _ in 0..n_tensor {
        input.blob("name of a tensor")?;
        let n_dim = input.u32("n_dim")?;
        if n_dim > MAX_DIMS {
            return Err(Error::corrupt("n_dim", n_dim, format_args!("at most {MAX_DIMS}")));
        }
        // Dimensions, type, offset.
        input.skip("a tensor", u64::from(n_dim) * 8 + 4 + 8)?;
    }
    Ok(input.offset() - start)
}

fn skip_array(input: &mut impl BoundedRead) -> Result<Range<u64>> {
    let (number, n) = (input.u32("type of an array")?, input.u64("length of an array")?);
    if number != STRING {
        return input.skip("array", value_size(number)?.saturating_mul(n));
    }
    let start = input.offset();
    for _ in 0..n {
        input.blob("string of an array")?;
    }
    Ok(start..input.offset())
}

/// Bytes of a number.
fn value_size(number: u32) -> Result<u64> {
    match number {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        ARRAY => Err(Error::corrupt("type of a value", "an array in an array", "a number or a string")),
        _ => Err(Error::corrupt("type of a value", number, "a type of GGUF")),
    }
}
