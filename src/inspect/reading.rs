//! Reads one section under one interpretation of its bytes.

use super::cells::{Cell, CellExtLayout};
use super::dsv4;
use super::state::{DataHeader, Dsv4Mode, Section, Shape, Stream, Tensor};
use crate::error::{Error, Result};
use crate::format::{Cursor, GgmlType, StateVersion, Tag, TensorShape};
use crate::types::MAX_SEQ;

/// More layers than any model has: a bound for what a damaged count can cost.
pub(super) const MAX_LAYERS: u32 = 4096;

const K: Tag = Tag(*b"K   ");
const V: Tag = Tag(*b"V   ");
const R: Tag = Tag(*b"R   ");
const P: Tag = Tag(*b"P   ");
const S: Tag = Tag(*b"S   ");

/// What the bytes of a section do not say.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading<'g> {
    Attention { ext: CellExtLayout, v: Layers<'g> },
    Recurrent { tensors: Layers<'g> },
    Dsv4(Dsv4Mode),
    Shared,
}

/// Which tensors a section has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Layers<'g> {
    /// Those of a file's geometry.
    Recorded(&'g [TensorShape]),
    /// So many V; or so many R and S, the first half of which is R, and a P behind the first R.
    Guessed { n: u32, has_p: bool },
}

/// The input up to the end of the state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Input<'a> {
    pub bytes: &'a [u8],
    pub version: StateVersion,
    /// The state of a whole context, not of one sequence.
    pub whole: bool,
}

/// How many cells and tensors may still be looked at. Honest states take a few for each of theirs.
#[derive(Debug)]
pub(super) struct Steps(pub u64);

impl Steps {
    pub fn take(&mut self) -> Result<()> {
        self.0 = self.0.checked_sub(1).ok_or_else(|| {
            Error::corrupt("memory state", "too many interpretations", "one that fits soon")
        })?;
        Ok(())
    }
}

/// Why some bytes are no section, and how far they are one.
#[derive(Debug)]
pub(super) struct Stop {
    pub at: u64,
    pub error: Error,
}

impl Stop {
    /// What ends too early is one as far as it goes, unless it claims more than any file has.
    fn new(input: &Cursor<'_>, error: Error) -> Self {
        let is_cut = matches!(error, Error::Truncated { need, .. } if need < 1 << 40);
        let left = if is_cut { input.left() } else { 0 };
        Self { at: (input.offset() + left) as u64, error }
    }
}

impl<'a> Input<'a> {
    pub fn at(&self, offset: u64) -> Result<Cursor<'a>> {
        let mut cursor = Cursor::new(self.bytes);
        cursor.bytes("section", offset)?;
        Ok(cursor)
    }

    /// Runs `read` on the input from there on; an error with the place that it got to.
    fn from<T>(&self, at: u64, read: impl FnOnce(&mut Cursor<'a>) -> Result<T>) -> Result<T, Stop> {
        let mut input = self.at(at).map_err(|error| Stop { at, error })?;
        read(&mut input).map_err(|error| Stop::new(&input, error))
    }

    pub fn read(&self, at: u64, reading: Reading<'_>, steps: &mut Steps) -> Result<Section, Stop> {
        self.from(at, |input| self.section(input, reading, steps))
    }

    fn section(&self, input: &mut Cursor<'a>, reading: Reading<'_>, steps: &mut Steps) -> Result<Section> {
        let at = input.offset() as u64;
        let (shape, streams) = match reading {
            Reading::Attention { ext, v } => self.attention(input, ext, v, steps)?,
            Reading::Recurrent { tensors } => self.recurrent(input, tensors, steps)?,
            Reading::Dsv4(mode) => dsv4::read(input, mode, steps)?,
            Reading::Shared => (Shape::Shared, Vec::new()),
        };
        Ok(Section { shape, bytes: at..input.offset() as u64, streams })
    }

    /// Layers of an attention section, how many entries like those of V follow its K, and why no more; `None` without cells.
    pub fn probe_v(
        &self,
        at: u64,
        ext: CellExtLayout,
        steps: &mut Steps,
    ) -> Result<Option<(u32, u32, Option<Stop>)>, Stop> {
        self.from(at, |input| {
            for _ in 0..n_stream(input)? {
                let (n_cells, _) = self.cells(input, ext, steps)?;
                if n_cells == 0 {
                    continue;
                }
                let data = self.data_header(input)?;
                for layer in 0..data.n_layer {
                    tensor(input, K, Some(layer), n_cells.into(), steps)?;
                }
                for n_v in 0..data.n_layer {
                    if let Err(error) = v(input, data, None, n_cells, steps) {
                        return Ok(Some((data.n_layer, n_v, Some(Stop::new(input, error)))));
                    }
                }
                return Ok(Some((data.n_layer, data.n_layer, None)));
            }
            Ok(None)
        })
    }

    /// How many entries like those of R and S a recurrent section can have, and why no more.
    pub fn probe_recurrent(
        &self,
        at: u64,
        has_p: bool,
        steps: &mut Steps,
    ) -> Result<(u32, Option<Stop>), Stop> {
        self.from(at, |input| {
            let (n_cells, n_layer) = self.recurrent_head(input, steps)?;
            let mut n = 0;
            if has_p {
                let r = tensor(input, R, None, n_cells.into(), steps)?;
                p(input, r.ggml_type, None, n_cells, steps)?;
                n = 1;
            }
            while n < 2 * n_layer {
                if let Err(error) = tensor(input, R, None, n_cells.into(), steps) {
                    return Ok((n, Some(Stop::new(input, error))));
                }
                n += 1;
            }
            Ok((n, None))
        })
    }

    /// Passes over the cells of a stream; how many they are, and where.
    fn cells(
        &self,
        input: &mut Cursor<'a>,
        ext: CellExtLayout,
        steps: &mut Steps,
    ) -> Result<(u32, std::ops::Range<u64>)> {
        let n_cells = input.u32("cell_count")?;
        let start = input.offset() as u64;
        for _ in 0..n_cells {
            steps.take()?;
            let n_seq_id = Cell::read(input, ext)?.n_seq_id();
            if n_seq_id == 0 || (!self.whole && n_seq_id != 1) {
                let expected = if self.whole { "at least 1" } else { "1 in a sequence state" };
                return Err(Error::corrupt("n_seq_id", n_seq_id, expected));
            }
        }
        Ok((n_cells, start..input.offset() as u64))
    }

    fn data_header(&self, input: &mut Cursor<'_>) -> Result<DataHeader> {
        let v_trans = input.u32("v_trans")?;
        if v_trans > 1 {
            return Err(Error::corrupt("v_trans", v_trans, "0 or 1"));
        }
        let n_layer = n_layer(input)?;
        let mut n_rot = |field| {
            if !self.version.has_rotation() {
                return Ok(None);
            }
            let n_rot = input.u32(field)?;
            if n_rot != 0 && !n_rot.is_power_of_two() {
                return Err(Error::corrupt(field, n_rot, "a power of 2, or 0"));
            }
            Ok(Some(n_rot))
        };
        let (n_rot_k, n_rot_v) = (n_rot("n_rot_k")?, n_rot("n_rot_v")?);
        Ok(DataHeader { v_trans: v_trans == 1, n_layer, n_rot_k, n_rot_v })
    }

    fn attention(
        &self,
        input: &mut Cursor<'a>,
        cell_ext: CellExtLayout,
        layers: Layers<'_>,
        steps: &mut Steps,
    ) -> Result<(Shape, Vec<Stream>)> {
        let mut streams: Vec<Stream> = Vec::new();
        let mut data: Option<DataHeader> = None;
        for stream in 0..n_stream(input)? {
            let (n_cells, cells) = self.cells(input, cell_ext, steps)?;
            let mut tensors = Vec::new();
            if n_cells > 0 {
                if !self.whole && data.is_some() {
                    let got = format_args!("{n_cells} in stream {stream} too");
                    return Err(Error::corrupt("cell_count", got, "one stream in a sequence state"));
                }
                let header = self.data_header(input)?;
                if let Some(first) = data.replace(header).filter(|first| *first != header) {
                    let (got, expected) = (format_args!("{header:?}"), format_args!("{first:?}"));
                    return Err(Error::corrupt("data of another stream", got, expected));
                }
                for layer in 0..header.n_layer {
                    tensors.push(tensor(input, K, Some(layer), n_cells.into(), steps)?);
                }
                for layer in v_layers(layers, header.n_layer) {
                    tensors.push(v(input, header, layer, n_cells, steps)?);
                }
                let shape = |tensor: &Tensor| (tensor.tag, tensor.ggml_type, tensor.row_size);
                let first = streams.iter().find(|stream| stream.n_cells > 0);
                if first.is_some_and(|first| !first.tensors.iter().map(shape).eq(tensors.iter().map(shape))) {
                    return Err(Error::corrupt("tensors", "differ between streams", "the same"));
                }
            }
            streams.push(Stream { stream, n_cells, cells, tensors });
        }
        Ok((Shape::Attention { cell_ext, data }, streams))
    }

    fn recurrent_head(&self, input: &mut Cursor<'a>, steps: &mut Steps) -> Result<(u32, u32)> {
        let n_cells = input.u32("cell_count")?;
        let max = if self.whole { MAX_SEQ } else { 1 };
        if n_cells > max {
            return Err(Error::corrupt("cell_count", n_cells, format_args!("at most {max}")));
        }
        for _ in 0..n_cells {
            steps.take()?;
            let n_seq_id = Cell::read(input, CellExtLayout::None)?.n_seq_id();
            if self.whole == (n_seq_id == 0) {
                let expected = if self.whole { "at least 1" } else { "0 in a sequence state" };
                return Err(Error::corrupt("n_seq_id", n_seq_id, expected));
            }
        }
        let s_trans = input.u32("s_trans")?;
        if s_trans != 0 {
            return Err(Error::corrupt("s_trans", s_trans, 0));
        }
        Ok((n_cells, n_layer(input)?))
    }

    fn recurrent(
        &self,
        input: &mut Cursor<'a>,
        layers: Layers<'_>,
        steps: &mut Steps,
    ) -> Result<(Shape, Vec<Stream>)> {
        let start = input.offset() as u64 + 4;
        let (n_cells, n_layer) = self.recurrent_head(input, steps)?;
        let cells = start..input.offset() as u64 - 8;
        let mut tensors: Vec<Tensor> = Vec::new();
        for (tag, layer) in recurrent_layers(layers, n_layer) {
            tensors.push(if tag == P {
                let ggml_type = tensors.last().map_or(GgmlType::F32, |r| r.ggml_type);
                p(input, ggml_type, layer, n_cells, steps)?
            } else {
                tensor(input, tag, layer, n_cells.into(), steps)?
            });
        }
        Ok((Shape::Recurrent { n_layer }, vec![Stream { stream: 0, n_cells, cells, tensors }]))
    }
}

pub(super) fn n_stream(input: &mut Cursor<'_>) -> Result<u32> {
    let n_stream = input.u32("n_stream")?;
    if !(1..=MAX_SEQ).contains(&n_stream) {
        return Err(Error::corrupt("n_stream", n_stream, format_args!("1 to {MAX_SEQ}")));
    }
    Ok(n_stream)
}

pub(super) fn n_layer(input: &mut Cursor<'_>) -> Result<u32> {
    let n_layer = input.u32("n_layer")?;
    if n_layer > MAX_LAYERS {
        return Err(Error::corrupt("n_layer", n_layer, format_args!("at most {MAX_LAYERS}")));
    }
    Ok(n_layer)
}

pub(super) fn ggml_type(input: &mut Cursor<'_>) -> Result<GgmlType> {
    let number = input.i32("ggml type")?;
    GgmlType::from_i32(number).ok_or_else(|| Error::corrupt("ggml type", number, "a type of ggml"))
}

/// A tensor of rows: type, bytes of a row, rows.
fn tensor(
    input: &mut Cursor<'_>,
    tag: Tag,
    layer: Option<u32>,
    n_rows: u64,
    steps: &mut Steps,
) -> Result<Tensor> {
    steps.take()?;
    let ggml_type = ggml_type(input)?;
    // Only a recurrent layer can be without a state of its own.
    rows(input, tag, layer, ggml_type, n_rows, tag == R || tag == S)
}

/// P has R's type.
fn p(
    input: &mut Cursor<'_>,
    ggml_type: GgmlType,
    layer: Option<u32>,
    n_cells: u32,
    steps: &mut Steps,
) -> Result<Tensor> {
    steps.take()?;
    rows(input, P, layer, ggml_type, n_cells.into(), false)
}

fn rows(
    input: &mut Cursor<'_>,
    tag: Tag,
    layer: Option<u32>,
    ggml_type: GgmlType,
    n_rows: u64,
    may_be_empty: bool,
) -> Result<Tensor> {
    let row_size = input.u64("row_size")?;
    let type_size = u64::from(ggml_type.type_size());
    if !row_size.is_multiple_of(type_size) || (row_size == 0 && !may_be_empty) {
        let expected = format_args!("a multiple of {type_size}, for {}", ggml_type.name());
        return Err(Error::corrupt("row_size", row_size, expected));
    }
    let offset = input.offset() as u64;
    skip_rows(input, row_size, n_rows)?;
    Ok(Tensor { tag, layer, ggml_type, row_size, n_rows, transposed: false, offset })
}

pub(super) fn skip_rows(input: &mut Cursor<'_>, row_size: u64, n_rows: u64) -> Result<()> {
    input.bytes("rows", row_size.saturating_mul(n_rows)).map(|_| ())
}

/// V of a layer, as rows or transposed.
fn v(
    input: &mut Cursor<'_>,
    data: DataHeader,
    layer: Option<u32>,
    n_cells: u32,
    steps: &mut Steps,
) -> Result<Tensor> {
    if !data.v_trans {
        return tensor(input, V, layer, n_cells.into(), steps);
    }
    steps.take()?;
    let ggml_type = ggml_type(input)?;
    let (elem, n_embd) = (input.u32("value element size")?, input.u32("n_embd_v_gqa")?);
    if elem != ggml_type.type_size() || ggml_type.is_quantized() {
        let expected = format_args!("that of unquantised {}", ggml_type.name());
        return Err(Error::corrupt("value element size", elem, expected));
    }
    if n_embd == 0 {
        return Err(Error::corrupt("n_embd_v_gqa", n_embd, "at least 1"));
    }
    let (row_size, n_rows) = (u64::from(elem) * u64::from(n_embd), u64::from(n_cells));
    let offset = input.offset() as u64;
    skip_rows(input, row_size, n_rows)?;
    Ok(Tensor { tag: V, layer, ggml_type, row_size, n_rows, transposed: true, offset })
}

/// The layers that have a V.
fn v_layers(layers: Layers<'_>, n_layer: u32) -> Vec<Option<u32>> {
    match layers {
        Layers::Recorded(tensors) => {
            tensors.iter().filter(|tensor| tensor.tag == V).map(|tensor| Some(tensor.layer)).collect()
        }
        Layers::Guessed { n, .. } if n == n_layer => (0..n).map(Some).collect(),
        Layers::Guessed { n, .. } => vec![None; n as usize],
    }
}

/// The tensors of a recurrent section, in order.
fn recurrent_layers(layers: Layers<'_>, n_layer: u32) -> Vec<(Tag, Option<u32>)> {
    match layers {
        Layers::Recorded(tensors) => tensors.iter().map(|tensor| (tensor.tag, Some(tensor.layer))).collect(),
        Layers::Guessed { n, has_p } => {
            let n_r = n.div_ceil(2);
            let all = |i: u32| Some(i).filter(|_| n == 2 * n_layer);
            let r = (0..n_r).map(|i| (R, all(i)));
            let s = (0..n - n_r).map(|i| (S, all(i)));
            let mut found: Vec<_> = r.chain(s).collect();
            if has_p && !found.is_empty() {
                // llama.cpp has it in the first layer alone.
                found.insert(1, (P, Some(0)));
                found[0].1 = Some(0);
            }
            found
        }
    }
}
