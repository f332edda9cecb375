//! The text of `kvstate diff`.

use std::fmt::Write;

use kvstate::inspect::{Diff, FieldDiff, SectionDiff, TensorDiff};

use crate::report::{count, or_none};

/// Every difference, one a line; the values of `a` before those of `b`.
pub fn text(diff: &Diff) -> String {
    let mut text = String::new();
    for FieldDiff { place, field, a, b } in &diff.fields {
        line(&mut text, format_args!("{place}: {field}: {a} | {b}"));
    }
    if let Some(tokens) = &diff.tokens {
        let (a, b) = (or_none(tokens.a), or_none(tokens.b));
        let n = count(tokens.n_differ, "token");
        line(&mut text, format_args!("tokens: {n} differ, the first at {}: {a} | {b}", tokens.index));
    }
    for section in &diff.sections {
        section_lines(&mut text, section);
    }
    if diff.is_same() {
        text += "no difference\n";
    }
    for FieldDiff { place, field, a, b } in &diff.layout {
        line(&mut text, format_args!("layout alone: {place}: {field}: {a} | {b}"));
    }
    text
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    // A string takes everything.
    let _ = writeln!(text, "{line}");
}

fn section_lines(text: &mut String, diff: &SectionDiff) {
    let SectionDiff { section, stream, n_compared, only_a, only_b, first_only, n_ext, tensors } = diff;
    let place = format!("section {section}, stream {stream}");
    if let Some(first) = first_only {
        line(
            text,
            format_args!(
                "{place}: {} in the first alone, {} in the second, the first at position {first}; {} in both",
                count(*only_a, "cell"),
                count(*only_b, "cell"),
                count(*n_compared, "cell"),
            ),
        );
    }
    if *n_ext > 0 {
        line(text, format_args!("{place}: the ext of {} differs", count(*n_ext, "cell")));
    }
    for TensorDiff { tag, layer, ggml_type, n_values, n_differ, pos, element, a, b } in tensors {
        let layer = layer.map_or_else(String::new, |layer| format!(" of layer {layer}"));
        let what = if ggml_type.is_quantized() { "block" } else { "value" };
        line(
            text,
            format_args!(
                "{place}: {tag}{layer}: {n_differ} of {} differ, the first at position {pos}, element {element}: {a} | {b}",
                count(*n_values, what),
            ),
        );
    }
}
