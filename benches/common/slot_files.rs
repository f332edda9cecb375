//! Slot files and sequence files beside a plain write and read of the same bytes.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use kvstate::Context;
use kvstate::format::GgmlType;
use kvstate::session::{SlotContents, SlotLoadParams, Verify};
use tempfile::TempDir;

use super::figures::{Spread, gb_per_s, human, marked};
use super::{Layout, NONE, filled_with, fitting, rows, timed};

/// A cache, the state of its sequence 0, and a folder for files of it.
struct SlotFiles {
    context: Context,
    sync: bool,
    state: Vec<u8>,
    dir: TempDir,
}

impl SlotFiles {
    /// `n_tokens` of 128 KiB. With `sync` what is written has reached the disk when a call returns.
    fn new(n_tokens: usize, layout: Layout, threads: usize, sync: bool) -> Self {
        eprintln!("slot files: {}, threads: {threads}, sync: {sync}", layout.name());
        let owners = layout.owners(n_tokens);
        let kv = fitting(rows(32, GgmlType::F16, 1024), &owners);
        let mut context = filled_with(kv, &owners, threads, sync);
        let size = context.state_seq_get_size(0, NONE).expect("sequence 0");
        let mut state = vec![0; usize::try_from(size).expect("64 bits")];
        context.state_seq_get_data(&mut state, 0, NONE).expect("it fits");
        context.state_seq_set_data(&state, 0, NONE).expect("its own state");
        Self { context, sync, state, dir: tempfile::tempdir().expect("a folder") }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("slot.bin")
    }

    /// The next file gets pages of its own, and the disk is not written to meanwhile.
    fn remove(&self) {
        fs::remove_file(self.path()).expect("it was written");
    }

    fn plain_write(&mut self) -> Duration {
        let path = self.path();
        timed(|| {
            let mut file = File::create_new(&path).expect("a new file");
            file.write_all(&self.state).expect("room on the disk");
            if self.sync {
                file.sync_all().expect("a disk");
            }
        })
    }

    /// Without checksums.
    fn save_file(&mut self) -> Duration {
        let path = self.path();
        timed(|| self.context.state_seq_save_file(&path, 0, &[]).expect("room on the disk"))
    }

    /// With checksums.
    fn slot_save(&mut self) -> Duration {
        let path = self.path();
        timed(|| self.context.slot_save(&path, 0, SlotContents::default()).expect("room on the disk"))
    }

    /// Reads as much as the state has.
    fn plain_read(&mut self) -> Duration {
        let path = self.path();
        timed(|| {
            let mut file = File::open(&path).expect("it was saved");
            file.read_exact(&mut self.state).expect("a slot file has more than the state");
        })
    }

    fn load_file(&mut self) -> Duration {
        let path = self.path();
        timed(|| self.context.state_seq_load_file(&path, 0, 0).expect("its own file"))
    }

    fn slot_load(&mut self, verify: Verify) -> Duration {
        let path = self.path();
        let params = SlotLoadParams { verify, ..SlotLoadParams::default() };
        timed(|| self.context.slot_load(&path, 0, params).expect("its own file"))
    }
}

type Call = fn(&mut SlotFiles) -> Duration;

const SAVES: [(&str, Call); 3] = [
    ("a plain write", SlotFiles::plain_write),
    ("state_seq_save_file, without checksums", SlotFiles::save_file),
    ("slot_save, with checksums", SlotFiles::slot_save),
];

const LOADS: [(&str, Call); 5] = [
    ("a plain read", SlotFiles::plain_read),
    ("state_seq_load_file", SlotFiles::load_file),
    ("slot_load, nothing verified", |files| files.slot_load(Verify::None)),
    ("slot_load, header and tokens verified", |files| files.slot_load(Verify::Headers)),
    ("slot_load, all verified", |files| files.slot_load(Verify::Full)),
];

/// Seconds of a call, and those of them that its thread had a core; where the system does not tell, all.
#[derive(Clone, Copy)]
struct Seconds {
    all: f64,
    on_core: f64,
}

/// Nanoseconds that this thread has had a core.
fn on_core() -> Option<f64> {
    fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

/// Seconds of each call in each round. A round makes all of them, the first of one being the second of the next.
fn rounds<const N: usize>(
    n: usize,
    calls: &[(&str, Call); N],
    files: &mut SlotFiles,
    after: fn(&SlotFiles),
) -> [Vec<Seconds>; N] {
    let mut seconds = [const { Vec::new() }; N];
    for round in 0..=n {
        for i in (0..N).map(|i| (i + round) % N) {
            let before = on_core();
            let all = calls[i].1(files).as_secs_f64();
            let on_core = before.zip(on_core()).map_or(all, |(before, after)| (after - before) / 1e9);
            after(files);
            if round > 0 {
                seconds[i].push(Seconds { all, on_core });
            }
        }
    }
    seconds
}

/// Saves and loads of a state of `n_tokens`.
pub fn tables(n_tokens: usize, n_rounds: usize) -> String {
    let mut bytes = 0;
    let columns = [(Layout::OneRun, false), (Layout::EveryOther, false), (Layout::OneRun, true)];
    let saves = columns.map(|(layout, sync)| {
        let mut files = SlotFiles::new(n_tokens, layout, 1, sync);
        bytes = files.state.len();
        rounds(n_rounds, &SAVES, &mut files, SlotFiles::remove)
    });
    let loads = [1, 2].map(|threads| {
        let mut files = SlotFiles::new(n_tokens, Layout::OneRun, threads, false);
        files.slot_save();
        rounds(n_rounds, &LOADS, &mut files, |_| ())
    });

    let mut out = format!("A state of {} MiB; {n_rounds} rounds, each of all calls.\n\n", bytes >> 20);
    out += "| saved | one run | every other cell | one run, synced |\n|---|---|---|---|\n";
    out += &lines(bytes, &SAVES, &saves);
    let mut cost = |name: &str, of: fn(&Seconds) -> f64| {
        let costs = saves.each_ref().map(|[_, save_file, slot_save]| {
            let Spread { low, median, high } = Spread::of(ratios(slot_save, save_file, of));
            let percent = |ratio: f64| 100.0 * (ratio - 1.0);
            let figure = format!("{:.1}% ({:.1} to {:.1})", percent(median), percent(low), percent(high));
            marked(&figure, median < 1.1)
        });
        writeln!(out, "| {name} | {} |", costs.join(" | ")).expect("a string grows");
    };
    cost("checksums cost: time of a save", |seconds| seconds.all);
    cost("checksums cost: time on a core", |seconds| seconds.on_core);
    out += "\n| loaded, page cache warm | 1 thread | 2 threads |\n|---|---|---|\n";
    out + &lines(bytes, &LOADS, &loads)
}

fn ratios(times: &[Seconds], by: &[Seconds], of: fn(&Seconds) -> f64) -> Vec<f64> {
    times.iter().zip(by).map(|(time, by)| of(time) / of(by)).collect()
}

/// A line for each call: the first with its speed, the others with how many times as fast they are.
fn lines<const N: usize>(bytes: usize, calls: &[(&str, Call); N], columns: &[[Vec<Seconds>; N]]) -> String {
    let mut out = String::new();
    for (i, (name, _)) in calls.iter().enumerate() {
        let figures = columns.iter().map(|seconds| {
            let time = Spread::of(seconds[i].iter().map(|seconds| seconds.all).collect()).median;
            if i == 0 {
                return format!(
                    "{}, {:.1} GB/s",
                    human(time),
                    gb_per_s(bytes, [Duration::from_secs_f64(time)].into_iter())
                );
            }
            let Spread { low, median, high } =
                Spread::of(ratios(&seconds[0], &seconds[i], |seconds| seconds.all));
            format!("{median:.2} ({low:.2} to {high:.2}), {}", human(time))
        });
        let figures: Vec<String> = figures.collect();
        writeln!(out, "| {name} | {} |", figures.join(" | ")).expect("a string grows");
    }
    out
}
