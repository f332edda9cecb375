//! Where two states differ: by field where their shapes do, by section, layer, tensor and position where their values do.
//!
//! Cells are compared by position, wherever they lie, and transposed V with V in rows: the same values in another layout are
//! no difference.

use std::cmp::Ordering;
use std::fmt;

use half::{bf16, f16};
use serde::Serialize;

use super::cells::Cell;
use super::state::{Section, Shape, Stream, Tensor};
use super::{Basis, Description, Kind, slice};
use crate::error::Result;
use crate::format::{GgmlType, Tag};
use crate::storage::ProgressCallback;
use crate::types::{Pos, Token};

/// An input and what was found in it.
#[derive(Clone, Copy, Debug)]
pub struct Inspected<'a> {
    /// The bytes.
    pub input: &'a [u8],
    /// What [`inspect`](super::inspect) said of them.
    pub description: &'a Description,
}

/// The differences of two inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// Values that differ in shape: what they are of is not compared further.
    pub fields: Vec<FieldDiff>,
    /// What differs in layout alone: the same values stand elsewhere.
    pub layout: Vec<FieldDiff>,
    /// The token fields.
    pub tokens: Option<TokenDiff>,
    /// The cells and tensors of sections that were compared and differ.
    pub sections: Vec<SectionDiff>,
    /// The states of checkpoints and of the draft that are not the same bytes.
    pub states: Vec<StateDiff>,
}

/// What differs between two states that are parts of files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StateDiff {
    /// Which: `checkpoint 0, target`.
    pub place: String,
    /// What differs in them.
    pub diff: Diff,
}

/// A field with both values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldDiff {
    /// Of what.
    pub place: String,
    /// Which.
    pub field: &'static str,
    /// Its value in the first input.
    pub a: String,
    /// Its value in the second.
    pub b: String,
}

/// Token fields that differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenDiff {
    /// Places where they differ, those that one of them does not have included.
    pub n_differ: u64,
    /// The first.
    pub index: u64,
    /// The first's token there.
    pub a: Option<Token>,
    /// The second's.
    pub b: Option<Token>,
}

/// A section whose cells or tensors differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SectionDiff {
    /// Its number.
    pub section: usize,
    /// Its stream, in the first input.
    pub stream: u32,
    /// Cells, or rows, that both have.
    pub n_compared: u64,
    /// Cells that the first alone has.
    pub only_a: u64,
    /// Cells that the second alone has.
    pub only_b: u64,
    /// The smallest position that one alone has.
    pub first_only: Option<Pos>,
    /// Cells of both whose ext differs.
    pub n_ext: u64,
    /// Tensors with values that differ.
    pub tensors: Vec<TensorDiff>,
}

/// A tensor whose values differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorDiff {
    /// Which of the layer's.
    pub tag: Tag,
    /// Its layer, where it is known.
    pub layer: Option<u32>,
    /// Type of the elements.
    pub ggml_type: GgmlType,
    /// Values that were compared: elements, or blocks of a quantised type.
    pub n_values: u64,
    /// Those that differ.
    pub n_differ: u64,
    /// Position of the first cell with one; of a tensor without cells, the row.
    pub pos: i64,
    /// The first element there, or the first of a block.
    pub element: u64,
    /// Its value in the first input; the bytes of a block.
    pub a: Value,
    /// Its value in the second.
    pub b: Value,
}

/// An element, or the bytes of one that has no value of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    ggml_type: GgmlType,
    bytes: Vec<u8>,
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.ggml_type, self.bytes.first_chunk(), self.bytes.first_chunk()) {
            (GgmlType::F32, Some(bytes), _) => f32::from_le_bytes(*bytes).fmt(f),
            (GgmlType::F16, _, Some(bytes)) => f16::from_le_bytes(*bytes).fmt(f),
            (GgmlType::BF16, _, Some(bytes)) => bf16::from_le_bytes(*bytes).fmt(f),
            _ => f.write_str(&crate::format::hexadecimal(&self.bytes)),
        }
    }
}

impl Serialize for Value {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Diff {
    /// Whether both hold the same, in whatever layout.
    #[must_use]
    pub fn is_same(&self) -> bool {
        self.fields.is_empty()
            && self.tokens.is_none()
            && self.sections.is_empty()
            && self.states.iter().all(|state| state.diff.is_same())
    }
}

/// Compares two inputs.
///
/// # Errors
/// [`Error::Cancelled`](crate::Error::Cancelled).
pub fn diff(a: Inspected<'_>, b: Inspected<'_>, progress: Option<&mut ProgressCallback>) -> Result<Diff> {
    let mut found = Diff::default();
    let states = found.heads(a, b);
    let tensors = a.description.state.sections.iter().flat_map(|section| &section.streams);
    let of_target: u64 =
        tensors.flat_map(|stream| &stream.tensors).map(|tensor| tensor.bytes().end - tensor.offset).sum();
    let of_states: u64 = states.iter().map(|(_, [a, _])| a.len() as u64).sum();
    let mut compared = Compared { a, b, done: 0, total: of_target + of_states, progress };
    compared.sections(&mut found)?;
    for (place, inputs) in states {
        compared.state(&mut found, place, inputs)?;
    }
    Ok(found)
}

/// Whether a kind holds all sequences.
fn is_whole(kind: Kind) -> bool {
    matches!(kind, Kind::SessionFile | Kind::ContextState)
}

impl Diff {
    /// Notes a field that differs; whether it is the same.
    #[expect(clippy::needless_pass_by_value, reason = "values are made for the call")]
    fn field<T: PartialEq + ToString>(
        &mut self,
        place: impl Into<String>,
        field: &'static str,
        a: T,
        b: T,
    ) -> bool {
        if a == b {
            return true;
        }
        self.fields.push(FieldDiff { place: place.into(), field, a: a.to_string(), b: b.to_string() });
        false
    }

    #[expect(clippy::needless_pass_by_value, reason = "values are made for the call")]
    fn layout<T: PartialEq + ToString>(&mut self, place: &str, field: &'static str, a: T, b: T) {
        if a != b {
            self.layout.push(FieldDiff {
                place: place.to_owned(),
                field,
                a: a.to_string(),
                b: b.to_string(),
            });
        }
    }

    /// All but the states. Gives those of checkpoints and draft that have to be compared, with their places.
    fn heads<'a>(&mut self, a: Inspected<'a>, b: Inspected<'a>) -> Vec<(String, [&'a [u8]; 2])> {
        let mut states = Vec::new();
        let (of_a, of_b) = (a.description, b.description);
        let all = |kind: Kind| if is_whole(kind) { "a whole context" } else { "one sequence" };
        self.field("input", "state of", all(of_a.kind), all(of_b.kind));
        if let (Some(arch_a), Some(arch_b)) = (&of_a.arch, &of_b.arch) {
            self.field("input", "arch", arch_a.clone(), arch_b.clone());
        }
        if of_a.tokens.is_some() && of_b.tokens.is_some() {
            self.tokens = token_diff(a, b);
        }
        let (appendices_a, appendices_b) = (&of_a.appendices, &of_b.appendices);
        let (n_a, n_b) = (appendices_a.checkpoints.len(), appendices_b.checkpoints.len());
        self.field("appendices", "checkpoints", n_a, n_b);
        let checkpoints = appendices_a.checkpoints.iter().zip(&appendices_b.checkpoints);
        for (number, (x, y)) in checkpoints.enumerate() {
            let place = format!("checkpoint {number}");
            let span = |span: crate::format::CheckpointSpan| {
                format!("{} tokens, positions {} to {}", span.n_tokens(), span.pos_min(), span.pos_max())
            };
            self.field(&*place, "taken after", span(x.span), span(y.span));
            states.push((format!("{place}, target"), [slice(a.input, &x.target), slice(b.input, &y.target)]));
            states.push((format!("{place}, draft"), [slice(a.input, &x.draft), slice(b.input, &y.draft)]));
            self.bytes(place, "driver", [slice(a.input, &x.driver), slice(b.input, &y.driver)]);
        }
        let has = |there: bool| if there { "there" } else { "absent" };
        self.field(
            "appendices",
            "draft state",
            has(appendices_a.draft.is_some()),
            has(appendices_b.draft.is_some()),
        );
        if let (Some(x), Some(y)) = (&appendices_a.draft, &appendices_b.draft) {
            let drafts = [slice(a.input, &x.draft), slice(b.input, &y.draft)];
            states.push(("draft state".to_owned(), drafts));
            self.bytes("draft state", "driver", [slice(a.input, &x.driver), slice(b.input, &y.driver)]);
        }
        states
    }

    /// Bytes that only their writer understands.
    fn bytes(&mut self, place: impl Into<String>, field: &'static str, [a, b]: [&[u8]; 2]) {
        let Some(at) = first_difference(a, b) else { return };
        let show = |bytes: &[u8]| match bytes.get(at) {
            Some(byte) => format!("{} bytes, {byte:02x} at {at}", bytes.len()),
            None => format!("{} bytes", bytes.len()),
        };
        self.field(place, field, show(a), show(b));
    }
}

/// The first place where one has something else than the other, or nothing.
fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let at = a.iter().zip(b).position(|(a, b)| a != b);
    at.or_else(|| (a.len() != b.len()).then(|| a.len().min(b.len())))
}

fn token_diff(a: Inspected<'_>, b: Inspected<'_>) -> Option<TokenDiff> {
    let (mut of_a, mut of_b) = (a.description.tokens(a.input), b.description.tokens(b.input));
    let mut found: Option<TokenDiff> = None;
    for index in 0.. {
        let (a, b) = (of_a.next(), of_b.next());
        if a.is_none() && b.is_none() {
            break;
        }
        if a != b {
            found.get_or_insert(TokenDiff { n_differ: 0, index, a, b }).n_differ += 1;
        }
    }
    found
}

/// What is compared, and how far that is.
struct Compared<'a, 'p> {
    a: Inspected<'a>,
    b: Inspected<'a>,
    done: u64,
    total: u64,
    progress: Option<&'p mut ProgressCallback>,
}

/// A cell or row of both inputs.
#[derive(Clone, Copy)]
struct Pair {
    /// Position of the cell; number of the row where there are no cells.
    pos: i64,
    a: u64,
    b: u64,
}

impl<'a> Compared<'a, '_> {
    fn sections(&mut self, found: &mut Diff) -> Result<()> {
        let (a, b) = (&self.a.description.state, &self.b.description.state);
        found.layout("memory state", "version", a.version.seq_version(), b.version.seq_version());
        let (a, b) = (&a.sections, &b.sections);
        found.field("memory state", "sections", a.len(), b.len());
        for (number, (a, b)) in a.iter().zip(b).enumerate() {
            self.section(found, number, a, b)?;
        }
        Ok(())
    }

    /// A state of a checkpoint or a draft: by its values if both are understood, else by its bytes.
    fn state(&mut self, found: &mut Diff, place: String, [a, b]: [&[u8]; 2]) -> Result<()> {
        self.done += a.len() as u64;
        if a == b {
            return self.report();
        }
        let understood =
            |blob| super::blob(blob).ok().filter(|of| !matches!(of.state.basis, Basis::Incomplete { .. }));
        let (Some(of_a), Some(of_b)) = (understood(a), understood(b)) else {
            found.bytes(place, "bytes", [a, b]);
            return self.report();
        };
        let mut diff = Diff::default();
        let (a, b) = (Inspected { input: a, description: &of_a }, Inspected { input: b, description: &of_b });
        Compared { a, b, done: 0, total: 0, progress: None }.sections(&mut diff)?;
        if diff != Diff::default() {
            found.states.push(StateDiff { place, diff });
        }
        self.report()
    }

    fn report(&mut self) -> Result<()> {
        self.progress.as_deref_mut().map_or(Ok(()), |progress| progress.report(self.done, self.total))
    }

    fn section(&mut self, found: &mut Diff, number: usize, a: &Section, b: &Section) -> Result<()> {
        let place = format!("section {number}");
        if !found.field(&*place, "kind", a.kind(), b.kind()) {
            return Ok(());
        }
        match (&a.shape, &b.shape) {
            (
                Shape::Attention { data: Some(x), cell_ext: ext_a },
                Shape::Attention { data: Some(y), cell_ext: ext_b },
            ) => {
                found.field(&*place, "n_layer", x.n_layer, y.n_layer);
                found.field(&*place, "cell ext", !ext_a.is_empty(), !ext_b.is_empty());
                found.layout(&place, "v_trans", x.v_trans, y.v_trans);
                for (field, x, y) in [("n_rot_k", x.n_rot_k, y.n_rot_k), ("n_rot_v", x.n_rot_v, y.n_rot_v)] {
                    // Versions before 4 do not say.
                    if let (Some(x), Some(y)) = (x, y) {
                        found.field(&*place, field, x, y);
                    }
                }
            }
            (Shape::Recurrent { n_layer: x }, Shape::Recurrent { n_layer: y }) => {
                found.field(&*place, "n_layer", x, y);
            }
            _ => {}
        }
        found.layout(&place, "streams", a.streams.len(), b.streams.len());
        if is_whole(self.a.description.kind) && a.streams.len() != b.streams.len() {
            found.field(&*place, "streams", a.streams.len(), b.streams.len());
            return Ok(());
        }
        for (of_a, of_b) in stream_pairs(a, b, is_whole(self.a.description.kind)) {
            let diff = self.stream(found, number, (a, of_a), (b, of_b))?;
            if diff.only_a + diff.only_b + diff.n_ext > 0 || !diff.tensors.is_empty() {
                found.sections.push(diff);
            }
        }
        Ok(())
    }

    fn stream(
        &mut self,
        found: &mut Diff,
        section: usize,
        (a, of_a): (&Section, Option<&Stream>),
        (b, of_b): (&Section, Option<&Stream>),
    ) -> Result<SectionDiff> {
        let stream = of_a.or(of_b).map_or(0, |stream| stream.stream);
        let mut diff = SectionDiff {
            section,
            stream,
            n_compared: 0,
            only_a: 0,
            only_b: 0,
            first_only: None,
            n_ext: 0,
            tensors: Vec::new(),
        };
        let has_cells = !matches!(a.shape, Shape::Dsv4 { .. });
        let mut pairs = if has_cells { self.cells(&mut diff, (a, of_a), (b, of_b)) } else { Vec::new() };
        let (Some(of_a), Some(of_b)) = (of_a, of_b) else { return Ok(diff) };
        if of_a.tensors.is_empty() || of_b.tensors.is_empty() {
            return Ok(diff);
        }
        let place = |tensor: &Tensor| match tensor.layer {
            Some(layer) => format!("section {section}, {} of layer {layer}", tensor.tag),
            None => format!("section {section}, {}", tensor.tag),
        };
        found.field(format!("section {section}"), "tensors", of_a.tensors.len(), of_b.tensors.len());
        for (x, y) in of_a.tensors.iter().zip(&of_b.tensors) {
            let shape =
                |tensor: &Tensor| format!("{} x {} {}", tensor.tag, tensor.n_embd(), tensor.ggml_type.name());
            let is_same = found.field(place(x), "shape", shape(x), shape(y));
            if !has_cells {
                found.field(place(x), "rows", x.n_rows, y.n_rows);
                let rows = 0..x.n_rows.min(y.n_rows);
                pairs = rows.map(|row| Pair { pos: row.cast_signed(), a: row, b: row }).collect();
                diff.n_compared = diff.n_compared.max(pairs.len() as u64);
            }
            if is_same {
                let values = (Values::new(self.a.input, x), Values::new(self.b.input, y));
                diff.tensors.extend(tensor_diff(&values.0, &values.1, &pairs));
            }
            self.done += x.bytes().end - x.offset;
            self.report()?;
        }
        Ok(diff)
    }

    /// The cells that both have, by position.
    fn cells(
        &self,
        diff: &mut SectionDiff,
        (a, of_a): (&Section, Option<&Stream>),
        (b, of_b): (&Section, Option<&Stream>),
    ) -> Vec<Pair> {
        let by_sequence = is_whole(self.a.description.kind);
        let sorted = |section: &Section, stream: Option<&Stream>, input: &'a [u8]| {
            let cells = stream.map(|stream| section.cells(stream, input)).into_iter().flatten();
            let mut cells: Vec<(Cell<'a>, u64)> = cells.zip(0..).collect();
            cells.sort_by_key(|(cell, place)| (key(cell, by_sequence), cell.ext, *place));
            cells
        };
        let mut of_a = sorted(a, of_a, self.a.input).into_iter().peekable();
        let mut of_b = sorted(b, of_b, self.b.input).into_iter().peekable();
        let mut pairs = Vec::new();
        loop {
            let key = |next: Option<&(Cell<'a>, u64)>| next.map(|(cell, _)| key(cell, by_sequence));
            // What is there comes before the end.
            let order = match (key(of_a.peek()), key(of_b.peek())) {
                (None, None) => break,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(key_a), Some(key_b)) => key_a.cmp(&key_b),
            };
            let cell_a = of_a.next_if(|_| order.is_le());
            let cell_b = of_b.next_if(|_| order.is_ge());
            match (cell_a, cell_b) {
                (Some((cell_a, a)), Some((cell_b, b))) => {
                    pairs.push(Pair { pos: cell_a.pos.into(), a, b });
                    // An ext without a token says nothing of it.
                    let ext = |cell: &Cell<'_>| cell.ext.map(|(x, y, _)| (x, y));
                    diff.n_ext += u64::from(ext(&cell_a) != ext(&cell_b));
                }
                (one, other) => {
                    diff.only_a += u64::from(one.is_some());
                    diff.only_b += u64::from(other.is_some());
                    diff.first_only = diff.first_only.or(one.or(other).map(|(cell, _)| cell.pos));
                }
            }
        }
        diff.n_compared = pairs.len() as u64;
        pairs
    }
}

/// What makes two cells the same; the state of one sequence may call it anything.
fn key<'a>(cell: &Cell<'a>, by_sequence: bool) -> (Pos, &'a [u8]) {
    (cell.pos, if by_sequence { cell.seq_ids } else { &[] })
}

/// The streams that are compared: of the state of one sequence those that hold something, wherever they are.
fn stream_pairs<'a>(
    a: &'a Section,
    b: &'a Section,
    is_whole: bool,
) -> Vec<(Option<&'a Stream>, Option<&'a Stream>)> {
    let holds = |stream: &&Stream| is_whole || stream.n_cells > 0 || !stream.tensors.is_empty();
    let of_a: Vec<_> = a.streams.iter().filter(holds).collect();
    let of_b: Vec<_> = b.streams.iter().filter(holds).collect();
    let n = of_a.len().max(of_b.len());
    (0..n).map(|i| (of_a.get(i).copied(), of_b.get(i).copied())).collect()
}

/// The values of a tensor, one after another as bytes.
struct Values<'a> {
    bytes: &'a [u8],
    tensor: &'a Tensor,
    /// Bytes of a value.
    size: usize,
}

impl<'a> Values<'a> {
    fn new(input: &'a [u8], tensor: &'a Tensor) -> Self {
        Self { bytes: slice(input, &tensor.bytes()), tensor, size: tensor.ggml_type.type_size() as usize }
    }

    /// Values of a row.
    fn n(&self) -> u64 {
        self.tensor.row_size / self.size as u64
    }

    fn get(&self, row: u64, value: u64) -> &'a [u8] {
        let index =
            if self.tensor.transposed { value * self.tensor.n_rows + row } else { row * self.n() + value };
        let start = usize::try_from(index).unwrap_or(usize::MAX).saturating_mul(self.size);
        self.bytes.get(start..start.saturating_add(self.size)).unwrap_or_default()
    }

    /// The values of a row, if they lie together.
    fn row(&self, row: u64) -> Option<&'a [u8]> {
        let start = row * self.tensor.row_size;
        (!self.tensor.transposed).then(|| slice(self.bytes, &(start..start + self.tensor.row_size)))
    }
}

fn tensor_diff(a: &Values<'_>, b: &Values<'_>, pairs: &[Pair]) -> Option<TensorDiff> {
    let (n, tensor) = (a.n(), a.tensor);
    let mut n_differ = 0;
    // The least pair, and in it the least value.
    let mut first: Option<(usize, u64)> = None;
    let mut compare = |i: usize, value: u64| {
        if a.get(pairs[i].a, value) != b.get(pairs[i].b, value) {
            n_differ += 1;
            first = Some(first.map_or((i, value), |first| first.min((i, value))));
        }
    };
    if a.tensor.transposed || b.tensor.transposed {
        // Channel by channel, as they lie.
        (0..n).for_each(|value| (0..pairs.len()).for_each(|i| compare(i, value)));
    } else {
        let differ = |&i: &usize| a.row(pairs[i].a) != b.row(pairs[i].b);
        (0..pairs.len()).filter(differ).for_each(|i| (0..n).for_each(|value| compare(i, value)));
    }
    let (i, value) = first?;
    let of = |values: &Values<'_>, row| Value {
        ggml_type: tensor.ggml_type,
        bytes: values.get(row, value).to_vec(),
    };
    Some(TensorDiff {
        tag: tensor.tag,
        layer: tensor.layer,
        ggml_type: tensor.ggml_type,
        n_values: n * pairs.len() as u64,
        n_differ,
        pos: pairs[i].pos,
        element: value * u64::from(tensor.ggml_type.block_size()),
        a: of(a, pairs[i].a),
        b: of(b, pairs[i].b),
    })
}
