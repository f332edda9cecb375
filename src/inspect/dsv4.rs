//! Reads the compressed half of a DSV4 memory, which says everything of itself.

use super::reading::{Steps, ggml_type, n_layer, n_stream, skip_rows};
use super::state::{Dsv4Cache, Dsv4Mode, Dsv4State, Shape, Stream, Tensor};
use crate::error::{Error, Result};
use crate::format::{Cursor, Tag};

/// Reads the compressed half: its caches, if the state is whole, then the states of the compressors.
pub(super) fn read(
    input: &mut Cursor<'_>,
    mode: Dsv4Mode,
    steps: &mut Steps,
) -> Result<(Shape, Vec<Stream>)> {
    let mut all = Vec::new();
    let mut caches = Vec::new();
    let of_dsv4: [(&'static str, [Tag; 3]); 3] = [
        ("CSA", [Tag(*b"CSAK"), Tag(*b"CSAV"), Tag(*b"CSAS")]),
        ("HCA", [Tag(*b"HCAK"), Tag(*b"HCAV"), Tag(*b"HCAS")]),
        ("LID", [Tag(*b"LIDK"), Tag(*b"LIDV"), Tag(*b"LIDS")]),
    ];
    for (name, [k, ..]) in of_dsv4.into_iter().filter(|_| mode == Dsv4Mode::Full) {
        let version = input.u32("DSV4 K cache version")?;
        if !(1..=2).contains(&version) {
            return Err(Error::corrupt("DSV4 K cache version", version, "1 or 2"));
        }
        let n_rows = input.u32("n_rows")?;
        let n_stream = n_stream(input)?;
        let n_layer = n_layer(input)?;
        for _ in 0..n_layer {
            let il = input.u32("layer")?;
            tensor(input, &mut all, (k, il), n_rows, n_stream, steps)?;
        }
        caches.push(Dsv4Cache { name, n_rows, n_layer });
    }
    let mut compressors = Vec::new();
    for (name, [_, kv, score]) in of_dsv4 {
        let version = input.u32("DSV4 state version")?;
        if version != 1 {
            return Err(Error::corrupt("DSV4 state version", version, 1));
        }
        let (ratio, state_size) = (input.u32("ratio")?, input.u32("state size")?);
        let n_embd_state = input.u32("state width")?;
        let n_stream = n_stream(input)?;
        let n_layer = n_layer(input)?;
        for _ in 0..n_layer {
            let il = input.u32("layer")?;
            tensor(input, &mut all, (kv, il), state_size, n_stream, steps)?;
            tensor(input, &mut all, (score, il), state_size, n_stream, steps)?;
        }
        compressors.push(Dsv4State { name, ratio, state_size, n_embd_state, n_layer });
    }
    let at = input.offset() as u64;
    let streams =
        (0..).zip(all).map(|(stream, tensors)| Stream { stream, n_cells: 0, cells: at..at, tensors });
    Ok((Shape::Dsv4 { caches, compressors }, streams.collect()))
}

/// A tensor of a compressor; its rows go to the streams in turn.
fn tensor(
    input: &mut Cursor<'_>,
    streams: &mut Vec<Vec<Tensor>>,
    (tag, layer): (Tag, u32),
    n_rows: u32,
    n_stream: u32,
    steps: &mut Steps,
) -> Result<()> {
    let ggml_type = ggml_type(input)?;
    let (n_embd, rows, row_size) = (input.u64("width")?, input.u64("rows")?, input.u64("row_size")?);
    if rows != u64::from(n_rows) {
        return Err(Error::corrupt("rows", rows, n_rows));
    }
    let expected = u32::try_from(n_embd).ok().and_then(|n_embd| ggml_type.row_size(n_embd));
    if expected != Some(row_size) {
        return Err(Error::corrupt(
            "row_size",
            row_size,
            format_args!("that of {n_embd} {}", ggml_type.name()),
        ));
    }
    streams.resize_with(streams.len().max(n_stream as usize), Vec::new);
    for stream in streams.iter_mut().take(n_stream as usize) {
        steps.take()?;
        let offset = input.offset() as u64;
        skip_rows(input, row_size, rows)?;
        let layer = Some(layer);
        stream.push(Tensor { tag, layer, ggml_type, row_size, n_rows: rows, transposed: false, offset });
    }
    Ok(())
}
