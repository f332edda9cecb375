//! A bar for work that takes a while: on stderr, and on a terminal alone.

use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressStyle};
use kvstate::storage::{Progress, ProgressCallback};

/// Fewer bytes are read before anybody has seen a bar.
const LONG: u64 = 256 << 20;

/// A bar for what is done, which appears when the work is long.
pub fn bar(what: &'static str) -> ProgressCallback {
    let mut bar: Option<ProgressBar> = None;
    ProgressCallback::new(move |Progress { done, total }| {
        if total >= LONG {
            let bar = bar.get_or_insert_with(|| {
                // Hidden where stderr is no terminal.
                let bar = ProgressBar::new(total).with_message(what);
                let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}";
                let style = ProgressStyle::with_template(template);
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                bar
            });
            bar.set_position(done);
            if done == total {
                bar.finish_and_clear();
            }
        }
        ControlFlow::Continue(())
    })
}
