//! The text of `kvstate diff`.

use std::fmt::Write;

use kvstate::inspect::{Diff, FieldDiff, SectionDiff, StateDiff, TensorDiff};

use crate::report::{count, or_none};

/// Every difference, one a line; the values of `a` before those of `b`.
pub fn text(diff: &Diff) -> String {
    let mut differ = Lines::default();
    differ.add(diff, "");
    if diff.is_same() {
        differ.values += "no difference\n";
    }
    differ.values + &differ.layout
}

#[derive(Default)]
struct Lines {
    values: String,
    layout: String,
}

/// Adds a line; a string takes everything.
macro_rules! line {
    ($text:expr, $($arg:tt)*) => {
        let _ = writeln!($text, $($arg)*);
    };
}

impl Lines {
    /// `of`: what the states are of, before every place.
    fn add(&mut self, diff: &Diff, of: &str) {
        for FieldDiff { place, field, a, b } in &diff.fields {
            line!(self.values, "{of}{place}: {field}: {a} | {b}");
        }
        if let Some(tokens) = &diff.tokens {
            let (a, b) = (or_none(tokens.a), or_none(tokens.b));
            let n = count(tokens.n_differ, "token");
            line!(self.values, "{of}tokens: {n} differ, the first at {}: {a} | {b}", tokens.index);
        }
        for section in &diff.sections {
            self.section(section, of);
        }
        for StateDiff { place, diff } in &diff.states {
            self.add(diff, &format!("{of}{place}, "));
        }
        for FieldDiff { place, field, a, b } in &diff.layout {
            line!(self.layout, "layout alone: {of}{place}: {field}: {a} | {b}");
        }
    }

    fn section(&mut self, diff: &SectionDiff, of: &str) {
        let SectionDiff { section, stream, n_compared, only_a, only_b, first_only, n_ext, tensors } = diff;
        let place = format!("{of}section {section}, stream {stream}");
        if let Some(first) = first_only {
            line!(
                self.values,
                "{place}: {} in the first alone, {} in the second, the first at position {first}; {} in both",
                count(*only_a, "cell"),
                count(*only_b, "cell"),
                count(*n_compared, "cell"),
            );
        }
        if *n_ext > 0 {
            line!(self.values, "{place}: the ext of {} differs", count(*n_ext, "cell"));
        }
        for TensorDiff { tag, layer, ggml_type, n_values, n_differ, pos, element, a, b } in tensors {
            let layer = layer.map_or_else(String::new, |layer| format!(" of layer {layer}"));
            let what = if ggml_type.is_quantized() { "block" } else { "value" };
            line!(
                self.values,
                "{place}: {tag}{layer}: {n_differ} of {} differ, the first at position {pos}, element {element}: {a} | {b}",
                count(*n_values, what),
            );
        }
    }
}
