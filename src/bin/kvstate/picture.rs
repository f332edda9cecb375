//! The cells of a file as an SVG picture: a lane for each section, stream and sequence, positions along x.

use std::collections::BTreeMap;
use std::fmt::Write;

use kvstate::inspect::{Description, Section};

use crate::report::{count, number};

/// Runs of a lane; with more of them neighbours are drawn as one.
const MAX_RUNS: usize = 500;

/// Lanes of a picture.
const MAX_LANES: usize = 64;

const LEFT: f64 = 190.0;
const WIDTH: f64 = 720.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 56.0;
const LANE: f64 = 26.0;
const BAR: f64 = 16.0;

/// Colours that can be told apart on white and on black; sequences take them in turn.
const COLOURS: [&str; 8] =
    ["#3b82c4", "#d97b29", "#3f9b57", "#c44e52", "#8467b8", "#8c6d5a", "#cf6fa8", "#7a8a2f"];

/// Positions that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    first: i64,
    last: i64,
    /// Other sequences have them too.
    shared: bool,
}

/// One lane: what a sequence has in a stream.
struct Lane {
    name: String,
    colour: &'static str,
    n_cells: u64,
    /// In order.
    runs: Vec<Span>,
    /// Runs that are no further apart than this are drawn as one; 1: only those that touch.
    merged: i64,
}

impl Lane {
    /// Draws as one what is close, until there are few enough.
    fn merge(&mut self) {
        self.runs.sort_unstable();
        // What touches is one in any case.
        let mut gap = 1;
        loop {
            let mut merged: Vec<Span> = Vec::new();
            for &run in &self.runs {
                match merged.last_mut() {
                    Some(open) if run.first - open.last <= gap && (gap > 1 || open.shared == run.shared) => {
                        open.last = open.last.max(run.last);
                        open.shared |= run.shared;
                    }
                    _ => merged.push(run),
                }
            }
            if merged.len() <= MAX_RUNS {
                (self.runs, self.merged) = (merged, gap);
                return;
            }
            gap *= 2;
        }
    }
}

/// The lanes of a section.
fn lanes(number_of: usize, section: &Section, input: &[u8]) -> Vec<Lane> {
    let mut lanes = Vec::new();
    for stream in section.streams.iter().filter(|stream| stream.n_cells > 0) {
        let mut by_sequence: BTreeMap<Option<i32>, Vec<Span>> = BTreeMap::new();
        for run in section.cells(stream, input).runs() {
            let (first, last) = (i64::from(*run.pos.start()), i64::from(*run.pos.end()));
            let of_nobody = run.seq_ids.is_empty().then_some(None);
            for seq in run.seq_ids.iter().copied().map(Some).chain(of_nobody) {
                let shared = run.seq_ids.len() > 1;
                by_sequence.entry(seq).or_default().push(Span { first, last, shared });
            }
        }
        for (seq, runs) in by_sequence {
            let n_cells = runs.iter().map(|run| (run.last - run.first + 1).unsigned_abs()).sum();
            let of_stream =
                if section.streams.len() > 1 { format!(", stream {}", stream.stream) } else { String::new() };
            let of_seq = seq.map_or_else(String::new, |seq| format!(", seq {seq}"));
            let colour = COLOURS[seq.unwrap_or(0).unsigned_abs() as usize % COLOURS.len()];
            let name = format!("{number_of}: {}{of_stream}{of_seq}", section.kind());
            let mut lane = Lane { name, colour, n_cells, runs, merged: 1 };
            lane.merge();
            lanes.push(lane);
        }
    }
    lanes
}

/// Text in XML.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            // What XML cannot hold.
            c if c.is_control() => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

/// Positions along x.
struct Scale {
    first: i64,
    n: i64,
}

impl Scale {
    #[expect(clippy::cast_precision_loss, reason = "positions have 31 bits")]
    fn x(&self, pos: i64) -> f64 {
        LEFT + WIDTH * (pos - self.first) as f64 / self.n as f64
    }

    /// Round positions, ten at most.
    fn ticks(&self) -> impl Iterator<Item = i64> + use<> {
        let steps = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_i64.pow(power)));
        let least = self.n / 10 + 1;
        let step = steps.take(28).find(|&step| step >= least).unwrap_or(1 << 40);
        let (first, end) = (self.first, self.first + self.n);
        (0..).map_while(move |i| {
            (first + step - 1).div_euclid(step).checked_add(i)?.checked_mul(step).filter(|&pos| pos < end)
        })
    }
}

/// Draws the cells of a file.
pub fn svg(title: &str, input: &[u8], of: &Description) -> String {
    let sections = of.state.sections.iter().enumerate();
    let mut lanes: Vec<Lane> = sections.flat_map(|(number, section)| lanes(number, section, input)).collect();
    let n_left_out = lanes.len().saturating_sub(MAX_LANES);
    lanes.truncate(MAX_LANES);
    let checkpoints = &of.appendices.checkpoints;

    let spans = lanes.iter().flat_map(|lane| lane.runs.iter().map(|run| (run.first, run.last)));
    let taken = checkpoints.iter().map(|c| (i64::from(c.span.pos_min()), i64::from(c.span.pos_max())));
    let (first, last) = spans.chain(taken).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or_default();
    let scale = Scale { first, n: last - first + 1 };
    let mut notes: Vec<String> = lanes
        .iter()
        .filter(|lane| lane.merged > 1)
        .map(|lane| {
            let gap = number(lane.merged.unsigned_abs() - 1);
            format!("{}: runs with at most {gap} positions between them are drawn as one", lane.name)
        })
        .collect();
    if n_left_out > 0 {
        notes.push(format!("{} are left out", count(n_left_out as u64, "more lane")));
    }
    if lanes.is_empty() {
        notes.push("no cells".to_owned());
    }
    if lanes.iter().any(|lane| lane.runs.iter().any(|run| run.shared)) {
        notes.push("pale: cells that several sequences have".to_owned());
    }

    let mut out = String::new();
    draw(&mut out, title, of, &lanes, &scale, &notes);
    out
}

#[expect(clippy::cast_precision_loss, reason = "few lanes and notes")]
fn draw(out: &mut String, title: &str, of: &Description, lanes: &[Lane], scale: &Scale, notes: &[String]) {
    let checkpoints = &of.appendices.checkpoints;
    let rows = lanes.len() + usize::from(!checkpoints.is_empty());
    let bottom = TOP + LANE * rows as f64;
    let height = bottom + 34.0 + 16.0 * notes.len() as f64;
    let width = LEFT + WIDTH + RIGHT;
    let mut line = |line: std::fmt::Arguments<'_>| {
        // A string takes everything.
        let _ = writeln!(out, "{line}");
    };
    line(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="12">"#
    ));
    // The page's own background, and greys that are seen on white and on black.
    line(format_args!(
        "<style>text{{fill:#767676}}.t{{font-size:14px;font-weight:bold}}.g{{stroke:#767676;stroke-opacity:.3}}\
         .l{{fill:#767676;fill-opacity:.12}}.c{{stroke:#767676;stroke-width:1.5}}</style>"
    ));
    let size = count(of.bytes, "byte");
    line(format_args!(r#"<text class="t" x="12" y="22">{}</text>"#, escaped(title)));
    line(format_args!(r#"<text x="12" y="40">{}, {size}</text>"#, of.kind.name()));
    for pos in scale.ticks() {
        let x = scale.x(pos);
        line(format_args!(
            r#"<line class="g" x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{:.1}"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{pos}</text>"#,
            bottom + 4.0,
            bottom + 18.0
        ));
    }
    for (i, lane) in lanes.iter().enumerate() {
        let y = TOP + LANE * i as f64 + (LANE - BAR) / 2.0;
        let text_y = y + BAR - 4.0;
        line(format_args!(r#"<text x="12" y="{text_y:.1}">{}</text>"#, escaped(&lane.name)));
        line(format_args!(r#"<rect class="l" x="{LEFT}" y="{y:.1}" width="{WIDTH}" height="{BAR}"/>"#));
        for &Span { first, last, shared } in &lane.runs {
            let (x, end) = (scale.x(first), scale.x(last + 1));
            // One position is seen, however many there are.
            let width = (end - x).max(0.75);
            let opacity = if shared { r#" fill-opacity=".5""# } else { "" };
            line(format_args!(
                r#"<rect x="{x:.2}" y="{y:.1}" width="{width:.2}" height="{BAR}" fill="{}"{opacity}><title>{first} to {last}</title></rect>"#,
                lane.colour
            ));
        }
        if let (Some(first), Some(last)) = (lane.runs.first(), lane.runs.iter().map(|run| run.last).max()) {
            line(format_args!(
                r#"<text x="{:.1}" y="{text_y:.1}">{}, {} to {last}</text>"#,
                LEFT + WIDTH + 10.0,
                count(lane.n_cells, "cell"),
                first.first
            ));
        }
    }
    if !checkpoints.is_empty() {
        let y = TOP + LANE * lanes.len() as f64 + LANE / 2.0;
        line(format_args!(r#"<text x="12" y="{:.1}">checkpoints</text>"#, y + 4.0));
        // Those that lie on one another are drawn once.
        let mut drawn = None;
        for checkpoint in checkpoints {
            let (from, to) = (
                scale.x(checkpoint.span.pos_min().into()),
                scale.x(i64::from(checkpoint.span.pos_max()) + 1),
            );
            let place = format!("{from:.1} {to:.1}");
            if drawn.as_ref() == Some(&place) {
                continue;
            }
            line(format_args!(
                r#"<path class="c" d="M{to:.1} {:.1}V{:.1}M{from:.1} {y:.1}H{to:.1}"><title>{} tokens</title></path>"#,
                y - 7.0,
                y + 7.0,
                checkpoint.span.n_tokens()
            ));
            drawn = Some(place);
        }
        let n = checkpoints.len() as u64;
        line(format_args!(
            r#"<text x="{:.1}" y="{:.1}">{}</text>"#,
            LEFT + WIDTH + 10.0,
            y + 4.0,
            count(n, "checkpoint")
        ));
    }
    for (i, note) in notes.iter().enumerate() {
        let y = bottom + 36.0 + 16.0 * i as f64;
        line(format_args!(r#"<text x="12" y="{y:.1}">{}</text>"#, escaped(note)));
    }
    line(format_args!("</svg>"));
}
