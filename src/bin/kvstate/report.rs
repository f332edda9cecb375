//! What `kvstate inspect` says of a file, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

use kvstate::format::{Identity, Integrity};
use kvstate::inspect::{
    self, Basis, Description, Outcome, Run, Section, Shape, Stream, Tensor, Verification, VerifiedPart,
};
use serde::Serialize;

/// Runs of a stream that the text shows unless it is asked for all.
const FEW_RUNS: usize = 8;

/// Columns of a row of the cell map.
const MAP_WIDTH: u64 = 64;

/// Sequences of a stream that get a row in the cell map.
const FEW_SEQUENCES: usize = 8;

/// All that is said of a file.
#[derive(Serialize)]
pub struct Report<'a> {
    #[serde(flatten)]
    description: &'a Description,
    token_list: Vec<i32>,
    /// The cells of each section, by stream.
    cells: Vec<Vec<CellMap>>,
    /// The draft model's state, described as a blob.
    draft_state: Option<Description>,
    verification: &'a Verification,
    #[serde(skip)]
    draft_cells: Vec<Vec<CellMap>>,
}

/// The cells of a stream.
#[derive(Serialize)]
struct CellMap {
    n_cells: u32,
    pos_min: Option<i32>,
    pos_max: Option<i32>,
    /// Positions between the smallest and the largest that no cell has.
    n_missing: u64,
    runs: Vec<Run>,
}

impl CellMap {
    fn new(section: &Section, stream: &Stream, input: &[u8]) -> Self {
        let runs: Vec<_> = section.cells(stream, input).runs().collect();
        let pos_min = runs.iter().map(|run| *run.pos.start()).min();
        let pos_max = runs.iter().map(|run| *run.pos.end()).max();
        let mut spans: Vec<_> = runs.iter().map(|run| (*run.pos.start(), *run.pos.end())).collect();
        spans.sort_unstable();
        let (mut n_missing, mut end) = (0, None);
        for (first, last) in spans {
            if let Some(end) = end.filter(|&end| end < first) {
                n_missing += (i64::from(first) - i64::from(end) - 1).unsigned_abs();
            }
            end = end.max(Some(last));
        }
        Self { n_cells: stream.n_cells, pos_min, pos_max, n_missing, runs }
    }

    fn of(description: &Description, input: &[u8]) -> Vec<Vec<Self>> {
        let of_section = |section: &Section| {
            section.streams.iter().map(|stream| Self::new(section, stream, input)).collect()
        };
        description.state.sections.iter().map(of_section).collect()
    }
}

/// `12,345`.
pub fn number(n: impl Into<u64>) -> String {
    let digits = n.into().to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 cell`, `12,345 cells`.
pub fn count(n: impl Into<u64>, what: &str) -> String {
    let n = n.into();
    format!("{} {what}{}", number(n), if n == 1 { "" } else { "s" })
}

/// The value, or that there is none.
pub fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

fn place(range: &Range<u64>) -> String {
    format!("{} at {}", count(range.end - range.start, "byte"), number(range.start))
}

/// A part of a file and what was found of it.
pub fn part_line(VerifiedPart { part, bytes, outcome }: &VerifiedPart) -> String {
    let part = part.map_or_else(|| "rest".to_owned(), |part| part.to_string());
    let outcome = match outcome {
        Outcome::Whole => "whole".to_owned(),
        Outcome::Plausible => "its structure makes sense".to_owned(),
        Outcome::Unknown => "not compared".to_owned(),
        Outcome::Damaged(reason) => format!("damaged: {reason}"),
    };
    format!("  {part:<18} {}: {outcome}\n", place(bytes))
}

impl<'a> Report<'a> {
    pub fn new(input: &[u8], description: &'a Description, verification: &'a Verification) -> Self {
        let slice = |range: &Range<u64>| {
            let at = |place: u64| usize::try_from(place).unwrap_or(usize::MAX);
            input.get(at(range.start)..at(range.end)).unwrap_or_default()
        };
        let draft = description.appendices.draft.as_ref().map(|state| slice(&state.draft));
        let draft_state = draft.and_then(|blob| inspect::blob(blob).ok());
        Self {
            description,
            token_list: description.tokens(input).collect(),
            cells: CellMap::of(description, input),
            draft_cells: draft_state
                .as_ref()
                .map_or_else(Vec::new, |of| CellMap::of(of, draft.unwrap_or_default())),
            draft_state,
            verification,
        }
    }

    /// The report as text; `all_runs`: every run of cells, not the first few.
    pub fn text(&self, name: &str, all_runs: bool) -> String {
        let mut text = Text { out: String::new(), all_runs };
        let of = self.description;
        let version = of.version.map_or_else(String::new, |version| format!(" of version {version}"));
        text.line(format_args!("{name}: {}{version}, {}", of.kind.name(), count(of.bytes, "byte")));
        if let Some(arch) = &of.arch {
            text.field("architecture", arch);
        }
        if let Some(seq_id) = of.seq_id {
            text.field("source sequence", &seq_id.to_string());
        }
        if let Some(range) = &of.tokens {
            let payload = if self.token_list.first() == Some(&-1) { ", a payload of the server" } else { "" };
            let n = (range.end - range.start) / 4;
            text.field("tokens", &format!("{}{payload}, {}", number(n), place(range)));
        }
        text.state(of, &self.cells, "");
        text.appendices(self);
        if let Some(integrity) = &of.appendices.integrity {
            text.identity(integrity);
        }
        text.verification(self.verification);
        text.out
    }
}

struct Text {
    out: String,
    all_runs: bool,
}

impl Text {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // A string takes everything.
        let _ = writeln!(self.out, "{line}");
    }

    fn field(&mut self, name: &str, value: &str) {
        self.line(format_args!("{name:<18} {value}"));
    }

    fn state(&mut self, of: &Description, cells: &[Vec<CellMap>], indent: &str) {
        let state = &of.state;
        let basis = match &state.basis {
            Basis::Recorded => "read by the geometry in the file".to_owned(),
            Basis::Guessed { n_fit: 1 } => "guessed, one interpretation fits".to_owned(),
            Basis::Guessed { n_fit } => format!("guessed, the most plausible of {n_fit} that fit"),
            Basis::Incomplete { reason } => format!("understood so far; then: {reason}"),
        };
        let layout = if of.version.is_none() {
            format!(", layout of version {}", state.version.seq_version())
        } else {
            String::new()
        };
        let mode =
            state.dsv4_mode.map_or_else(String::new, |mode| format!(", DSV4, {mode:?}").to_lowercase());
        self.field(
            &format!("{indent}memory state"),
            &format!("{}{layout}{mode}; {basis}", place(&state.bytes)),
        );
        for (number, (section, cells)) in state.sections.iter().zip(cells).enumerate() {
            self.section(number, section, cells, indent);
        }
    }

    fn section(&mut self, number_of: usize, section: &Section, cells: &[CellMap], indent: &str) {
        let shape = match &section.shape {
            Shape::Attention { cell_ext, data } => {
                let ext = if cell_ext.is_empty() { "no ext" } else { "cells with ext" };
                match data {
                    None => "attention, no cells".to_owned(),
                    Some(data) => format!(
                        "attention, {}, V {}, n_rot_k {}, n_rot_v {}, {ext}",
                        count(data.n_layer, "layer"),
                        if data.v_trans { "transposed" } else { "in rows" },
                        data.n_rot_k.map_or_else(|| "not recorded".to_owned(), |n| n.to_string()),
                        data.n_rot_v.map_or_else(|| "not recorded".to_owned(), |n| n.to_string()),
                    ),
                }
            }
            Shape::Recurrent { n_layer } => format!("recurrent, {} of the model", count(*n_layer, "layer")),
            Shape::Shared => "shared with the target".to_owned(),
            Shape::Dsv4 { caches, compressors } => {
                let caches = caches.iter().map(|c| format!("{} {}", c.name, count(c.n_rows, "row")));
                let states = compressors.iter().map(|c| format!("{} 1:{}", c.name, c.ratio));
                let [caches, states] = [caches.collect::<Vec<_>>(), states.collect()];
                format!("compressed, K {}; states {}", caches.join(", "), states.join(", "))
            }
        };
        self.field(&format!("{indent}section {number_of}"), &format!("{shape}; {}", place(&section.bytes)));
        let n_empty = section.streams.iter().filter(|stream| stream.n_cells == 0).count();
        for (stream, cells) in section.streams.iter().zip(cells) {
            if stream.n_cells > 0 {
                self.stream(stream, cells, indent);
            }
            self.tensors(&stream.tensors, indent);
        }
        if n_empty > 0 && !matches!(section.shape, Shape::Dsv4 { .. }) {
            let n_empty = count(n_empty as u64, "stream");
            self.field(&format!("{indent}  other streams"), &format!("{n_empty} without cells"));
        }
    }

    fn stream(&mut self, stream: &Stream, cells: &CellMap, indent: &str) {
        let (Some(first), Some(last)) = (cells.pos_min, cells.pos_max) else { return };
        let missing = match cells.n_missing {
            0 => String::new(),
            n => format!(", {} missing between", number(n)),
        };
        self.field(
            &format!("{indent}  stream {}", stream.stream),
            &format!("{}, {}{missing}", count(stream.n_cells, "cell"), positions(first, last)),
        );
        self.map(cells, first, last, indent);
        let n_shown = if self.all_runs { cells.runs.len() } else { FEW_RUNS };
        if cells.runs.len() == 1 && !self.all_runs {
            return;
        }
        for run in cells.runs.iter().take(n_shown) {
            let (first, last) = (run.pos.start(), run.pos.end());
            let seqs: Vec<_> = run.seq_ids.iter().map(ToString::to_string).collect();
            let seqs = if seqs.is_empty() { String::new() } else { format!(", sequence {}", seqs.join(" ")) };
            let positions = positions(*first, *last);
            self.field(&format!("{indent}    cell {}", run.cell), &format!("{positions}{seqs}"));
        }
        if cells.runs.len() > n_shown {
            let n = number((cells.runs.len() - n_shown) as u64);
            self.field(&format!("{indent}    ..."), &format!("{n} more runs: --cells shows them"));
        }
    }

    /// A row for each sequence: which positions its cells have.
    fn map(&mut self, cells: &CellMap, first: i32, last: i32, indent: &str) {
        let mut sequences: Vec<i32> = cells.runs.iter().flat_map(|run| run.seq_ids.iter().copied()).collect();
        sequences.sort_unstable();
        sequences.dedup();
        let rows: Vec<Option<i32>> =
            if sequences.is_empty() { vec![None] } else { sequences.iter().copied().map(Some).collect() };
        for seq in rows.iter().take(FEW_SEQUENCES) {
            let has = |run: &&Run| seq.is_none_or(|seq| run.seq_ids.contains(&seq));
            let map = map_row(cells.runs.iter().filter(has), first, last);
            let name = seq.map_or_else(String::new, |seq| format!("seq {seq}"));
            self.field(&format!("{indent}    {name}"), &map);
        }
        if rows.len() > FEW_SEQUENCES {
            let n = count((rows.len() - FEW_SEQUENCES) as u64, "more sequence");
            self.field(&format!("{indent}    ..."), &n);
        }
    }

    /// Neighbours of the same name and shape on one line.
    fn tensors(&mut self, tensors: &[Tensor], indent: &str) {
        let shape = |t: &Tensor| (t.tag, t.ggml_type, t.row_size, t.n_rows, t.transposed);
        for group in tensors.chunk_by(|a, b| shape(a) == shape(b)) {
            let (first, last) = (&group[0], &group[group.len() - 1]);
            let layers = match (first.layer, last.layer) {
                (Some(a), Some(b)) if a == b => format!("layer {a}"),
                (Some(a), Some(b)) => format!("layers {a} to {b}"),
                _ => count(group.len() as u64, "layer"),
            };
            self.field(
                &format!("{indent}    {}", first.tag),
                &format!(
                    "{layers}: {} x {}, {} of {}{}, from {}",
                    first.ggml_type.name(),
                    number(first.n_embd()),
                    count(first.n_rows, "row"),
                    count(first.row_size, "byte"),
                    if first.transposed { ", transposed" } else { "" },
                    number(first.offset),
                ),
            );
        }
    }

    fn appendices(&mut self, report: &Report<'_>) {
        let appendices = &report.description.appendices;
        if !appendices.checkpoints.is_empty() {
            self.field("checkpoints", &number(appendices.checkpoints.len() as u64));
        }
        for (i, checkpoint) in appendices.checkpoints.iter().enumerate() {
            let span = checkpoint.span;
            let size = |range: &Range<u64>| number(range.end - range.start);
            self.field(
                &format!("  checkpoint {i}"),
                &format!(
                    "{} tokens, positions {} to {}; target {}, draft {}, driver {}",
                    span.n_tokens(),
                    span.pos_min(),
                    span.pos_max(),
                    count(checkpoint.target.end - checkpoint.target.start, "byte"),
                    size(&checkpoint.draft),
                    size(&checkpoint.driver),
                ),
            );
        }
        if let Some(draft) = &appendices.draft {
            let driver = count(draft.driver.end - draft.driver.start, "byte");
            self.field("draft state", &format!("{}; driver {driver}", place(&draft.draft)));
            if let Some(of) = &report.draft_state {
                self.state(of, &report.draft_cells, "  ");
            }
        }
    }

    fn identity(&mut self, Integrity { identity, .. }: &Integrity) {
        let Identity { model, metadata, .. } = identity;
        for (name, bytes) in [("model", model), ("metadata", metadata)] {
            if !bytes.is_empty() {
                self.field(name, &shown(bytes));
            }
        }
        self.field("salt", &identity.salt_digest());
    }

    fn verification(&mut self, found: &Verification) {
        let verdict = match (found.is_whole(), found.has_checksums) {
            (true, true) if found.parts.iter().all(|part| part.outcome == Outcome::Whole) => {
                "all parts are whole"
            }
            (true, true) => "nothing is damaged, as far as was compared",
            (true, false) => "none in the file; its structure makes sense",
            (false, _) => "damaged",
        };
        self.field("checksums", verdict);
        for part in found.parts.iter().filter(|_| found.has_checksums || !found.is_whole()) {
            self.out += &part_line(part);
        }
    }
}

/// A fingerprint as it stands, or in hexadecimal.
fn shown(bytes: &[u8]) -> String {
    if bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return format!("'{}'", bytes.escape_ascii());
    }
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn positions(first: i32, last: i32) -> String {
    if first == last { format!("position {first}") } else { format!("positions {first} to {last}") }
}

/// `#`: cells for every position, `+`: for some, `.`: for none.
fn map_row<'r>(runs: impl Iterator<Item = &'r Run>, first: i32, last: i32) -> String {
    let place = |pos: i32| (i64::from(pos) - i64::from(first)).unsigned_abs();
    let n_pos = place(last) + 1;
    let width = n_pos.min(MAP_WIDTH);
    let start = |column: u64| (n_pos * column).div_ceil(width);
    let mut held = BTreeMap::<u64, u64>::new();
    for run in runs {
        let (mut at, end) = (place(*run.pos.start()), place(*run.pos.end()) + 1);
        while at < end {
            let column = at * width / n_pos;
            let next = start(column + 1).min(end);
            *held.entry(column).or_default() += next - at;
            at = next;
        }
    }
    let column = |column: u64| match held.get(&column) {
        None => '.',
        // Positions that several cells have count more than once.
        Some(&n) if n >= start(column + 1) - start(column) => '#',
        Some(_) => '+',
    };
    (0..width).map(column).collect()
}
