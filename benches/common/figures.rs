//! Figures to read: medians and quartiles of what was measured.

use std::time::Duration;

/// Median and quartiles.
#[derive(Clone, Copy)]
pub struct Spread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

impl Spread {
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let n = values.len();
        Self { low: values[n / 4], median: values[n / 2], high: values[n - 1 - n / 4] }
    }
}

/// A figure that misses what it should reach is marked.
pub fn marked(figure: &str, is_reached: bool) -> String {
    if is_reached { figure.to_owned() } else { format!("**{figure} missed**") }
}

#[expect(clippy::cast_precision_loss, reason = "a figure to read")]
pub fn gb_per_s(bytes: usize, times: impl Iterator<Item = Duration>) -> f64 {
    bytes as f64 / Spread::of(times.map(|time| time.as_secs_f64()).collect()).median / 1e9
}

pub fn human(time: f64) -> String {
    match time {
        t if t < 1e-6 => format!("{:.0} ns", t * 1e9),
        t if t < 1e-3 => format!("{:.1} us", t * 1e6),
        t if t < 1.0 => format!("{:.1} ms", t * 1e3),
        t => format!("{t:.2} s"),
    }
}

pub fn median(times: Vec<Duration>) -> f64 {
    Spread::of(times.into_iter().map(|time| time.as_secs_f64()).collect()).median
}

/// Calls once untimed, then `n` times.
pub fn repeat<T>(n: usize, mut call: impl FnMut() -> T) -> Vec<T> {
    call();
    (0..n).map(|_| call()).collect()
}
