//! The host's figures as Markdown: `make bench`, or `cargo bench --bench table`.
//!
//! `-- --write docs/performance.md` replaces what stands there below the marker, with `--hybrid` or `--slots` that section alone;
//! `-- --quick` takes 64 MiB and three pairs, to see that everything runs.

mod common;

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use kvstate::format::GgmlType;
use kvstate::memory::KvParams;

use common::figures::{Spread, gb_per_s, human, marked, median, repeat};
use common::hybrid::Hybrid;
use common::resident::{Peak, peak_of};
use common::slot_files;
use common::{Case, FREE_SEQ, Layout, Pair, decode, fitting, limits, rows, timed, transposed};

const MARKER: &str = "<!-- made by benches/table.rs -->";

/// A call, and its time.
type Call<T = Case> = fn(&mut T) -> Duration;

/// The two columns of every row.
const THREADS: [usize; 2] = [1, 2];

/// A section of the page that can be made alone.
struct Section {
    option: &'static str,
    title: &'static str,
    make: fn(&Options) -> String,
}

const ALONE: [Section; 2] = [
    Section { option: "--hybrid", title: "A checkpoint of a hybrid", make: hybrid },
    Section { option: "--slots", title: "Slot files", make: slots },
];

struct Options {
    quick: bool,
    /// Nothing but this section.
    only: Option<&'static Section>,
    /// Nothing but the peaks of memory: what the bench asks of a process of its own.
    memory: bool,
    write: Option<PathBuf>,
}

impl Options {
    fn parse() -> Result<Self, String> {
        let mut options = Self { quick: false, only: None, memory: false, write: None };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--bench" => {} // from cargo
                "--quick" => options.quick = true,
                "--memory" => options.memory = true,
                "--write" => options.write = Some(args.next().ok_or("--write: a file is missing")?.into()),
                _ => {
                    let section = ALONE.iter().find(|section| section.option == arg);
                    let unknown =
                        || format!("{arg}: possible are --quick, --hybrid, --slots and --write FILE");
                    options.only = Some(section.ok_or_else(unknown)?);
                }
            }
        }
        if options.quick && options.write.is_some() {
            return Err("--write: figures of a --quick run mean nothing".into());
        }
        Ok(options)
    }

    /// Tokens of the saved sequence: with rows 128 KiB each.
    fn n_tokens(&self) -> usize {
        if self.quick { 512 } else { 8000 }
    }

    fn n_pairs(&self) -> usize {
        if self.quick { 3 } else { 11 }
    }
}

/// The least ratio that a row should reach, by the number of threads.
type AtLeast = [f64; 2];

/// A row of the first table; a value by the number of threads.
struct Row {
    work: String,
    llama: &'static str,
    at_least: String,
    here: [String; 2],
    gb_per_s: Option<[f64; 2]>,
}

impl Row {
    fn of_pairs(
        work: String,
        llama: &'static str,
        at_least: AtLeast,
        bytes: [usize; 2],
        pairs: &[Vec<Pair>; 2],
    ) -> Self {
        let here = [0, 1].map(|i| {
            let ratio = |pair: &Pair| pair.reference.as_secs_f64() / pair.call.as_secs_f64();
            let Spread { low, median, high } = Spread::of(pairs[i].iter().map(ratio).collect());
            marked(&format!("{median:.2} ({low:.2} to {high:.2})"), median >= at_least[i])
        });
        let gb_per_s = [0, 1].map(|i| gb_per_s(bytes[i], pairs[i].iter().map(|pair| pair.call)));
        let [one, two] = at_least;
        Self { work, llama, at_least: format!("{one:.2} / {two:.2}"), here, gb_per_s: Some(gb_per_s) }
    }
}

/// What is asked of one layout of one kind of V, and what llama.cpp gave (`get_data`, `set_data`).
struct Target {
    is_transposed: bool,
    layout: Layout,
    llama: [&'static str; 2],
    get_data: AtLeast,
    set_data: AtLeast,
}

/// In the order of the table. Compress and expand are of AVX-512; 2-byte elements need VBMI2.
fn targets() -> Vec<Target> {
    #[cfg(target_arch = "x86_64")]
    let compresses = std::is_x86_feature_detected!("avx512vbmi2");
    #[cfg(not(target_arch = "x86_64"))]
    let compresses = false;
    let rows = |layout, llama, at_least| Target {
        is_transposed: false,
        layout,
        llama,
        get_data: at_least,
        set_data: at_least,
    };
    let transposed =
        |layout, llama, get_data, set_data| Target { is_transposed: true, layout, llama, get_data, set_data };
    let holes = if compresses { [0.6, 0.85] } else { [0.28, 0.5] };
    vec![
        rows(Layout::OneRun, ["11.3 GB/s, 0.92", "12.5 GB/s, 1.02"], [0.95, 1.15]),
        rows(Layout::RunsOf16, ["9.5 GB/s, 0.77", "9.9 GB/s, 0.80"], [0.9, 1.1]),
        rows(Layout::EveryOther, ["6.3 GB/s, 0.51", "6.9 GB/s, 0.56"], [0.55, 1.0]),
        rows(Layout::RandomHalf, ["", ""], [0.55, 1.0]),
        transposed(Layout::OneRun, ["10.7 GB/s, 0.87", "11.1 GB/s, 0.90"], [0.95, 1.1], [0.95, 1.1]),
        transposed(Layout::RunsOf16, ["1.0 GB/s, 0.08", "1.0 GB/s, 0.08"], [0.5, 0.75], [0.5, 0.75]),
        transposed(Layout::EveryOther, ["0.03 GB/s, 0.003", "0.035 GB/s, 0.003"], holes, [0.3, 0.5]),
        transposed(Layout::RandomHalf, ["", ""], holes, [0.3, 0.5]),
    ]
}

/// What one cache gives, with one number of threads.
struct Measured {
    bytes: usize,
    get_data: Vec<Pair>,
    set_data: Vec<Pair>,
    get_size: f64,
    partial: f64,
    partial_size: u64,
}

fn case_of(n_tokens: usize, is_transposed: bool, layout: Layout, threads: usize) -> Case {
    let owners = layout.owners(n_tokens);
    let kv = if is_transposed { transposed(32, GgmlType::F16, 1024) } else { rows(32, GgmlType::F16, 1024) };
    Case::new(fitting(kv, &owners), &owners, threads)
}

fn measure(options: &Options, target: &Target, threads: usize) -> Measured {
    let Target { is_transposed, layout, .. } = *target;
    eprintln!("{}: {}, threads: {threads}", kind(is_transposed), layout.name());
    let mut case = case_of(options.n_tokens(), is_transposed, layout, threads);
    let n = options.n_pairs();
    Measured {
        bytes: case.state.len(),
        get_data: repeat(n, || case.get_data()),
        set_data: repeat(n, || case.set_data()),
        get_size: median(repeat(101, || case.get_size_alone())),
        partial: median(repeat(101, || case.partial_checkpoint())),
        partial_size: case.partial_size(),
    }
}

/// Saves and loads of a quarter of the tokens: larger files make the system write others back meanwhile.
fn measure_files(options: &Options, threads: usize) -> (usize, Vec<Pair>, Vec<Pair>) {
    eprintln!("files, threads: {threads}");
    let mut case = case_of(options.n_tokens() / 4, false, Layout::OneRun, threads);
    let saves = repeat(options.n_pairs(), || case.save_file());
    case.save_file_alone();
    let loads = repeat(options.n_pairs(), || case.load_file());
    (case.state.len(), saves, loads)
}

/// Of a quarter of the tokens, as in [`measure_files`].
fn slots(options: &Options) -> String {
    let n_rounds = if options.quick { 3 } else { 21 };
    format!("{}\n\n{}", machine(), slot_files::tables(options.n_tokens() / 4, n_rounds))
}

fn kind(is_transposed: bool) -> &'static str {
    if is_transposed { "transposed V" } else { "rows" }
}

fn table(options: &Options) -> String {
    let (mut gets, mut sets, mut others) = (Vec::new(), Vec::new(), Vec::new());
    let mut copies = Vec::new();
    let mut mib = [0; 2];
    for target in targets() {
        let measured = THREADS.map(|threads| measure(options, &target, threads));
        let bytes = [0, 1].map(|i| measured[i].bytes);
        mib[usize::from(target.is_transposed)] = bytes[0] >> 20;
        copies.extend(measured.iter().flat_map(|m| m.get_data.iter().map(|pair| (m.bytes, pair.reference))));
        let name = format!("{}, {}", kind(target.is_transposed), target.layout.name());
        let row = |call: &str, llama, at_least, pairs: [&Vec<Pair>; 2]| {
            Row::of_pairs(format!("{call}, {name}"), llama, at_least, bytes, &pairs.map(Clone::clone))
        };
        let [one, two] = &measured;
        gets.push(row("get_data", target.llama[0], target.get_data, [&one.get_data, &two.get_data]));
        sets.push(row("set_data", target.llama[1], target.set_data, [&one.set_data, &two.set_data]));
        if target.is_transposed && target.layout == Layout::EveryOther {
            others.push(Row {
                work: format!("get_size, {name}"),
                llama: "187 ms",
                at_least: "under 0.2 ms".into(),
                here: [0, 1].map(|i| marked(&human(measured[i].get_size), measured[i].get_size < 0.2e-3)),
                gb_per_s: None,
            });
        }
        if !target.is_transposed && target.layout == Layout::OneRun {
            others.push(Row {
                work: "partial checkpoint, full attention".into(),
                llama: "all of the state",
                at_least: "8 bytes, under 1 us".into(),
                here: [one, two].map(|m| {
                    let figure = format!("{} bytes, {}", m.partial_size, human(m.partial));
                    marked(&figure, m.partial_size == 8 && m.partial < 1e-6)
                }),
                gb_per_s: None,
            });
        }
    }
    let [(bytes_1, saves_1, loads_1), (bytes_2, saves_2, loads_2)] =
        THREADS.map(|threads| measure_files(options, threads));
    let row = |work: &str, llama, at_least, pairs| {
        let work = format!("{work} ({} MiB)", bytes_1 >> 20);
        Row::of_pairs(work, llama, at_least, [bytes_1, bytes_2], &pairs)
    };
    others.extend([
        row("save_file without fsync, against a plain write", "0.58", [0.95; 2], [saves_1, saves_2]),
        row("load_file, page cache warm, against a plain read", "1.1", [1.0, 1.5], [loads_1, loads_2]),
    ]);

    // The checkpoint last.
    others.sort_by_key(|row| row.work.starts_with("partial"));

    let copy = copies.iter().map(|&(bytes, time)| gb_per_s(bytes, [time].into_iter())).collect();
    let Spread { low, median, high } = Spread::of(copy);
    let mut out = format!(
        "A plain copy in the same run: {median:.1} GB/s ({low:.1} to {high:.1}). {} pairs each; a state of {} MiB with \
         rows, of {} MiB with transposed V.\n\n",
        options.n_pairs(),
        mib[0],
        mib[1],
    );
    out += "| work | llama.cpp | at least, 1 / 2 threads | here, 1 thread | here, 2 threads | GB/s here, 1 / 2 |\n";
    out += "|---|---|---|---|---|---|\n";
    for Row { work, llama, at_least, here: [one, two], gb_per_s } in gets.iter().chain(&sets).chain(&others) {
        let speed = gb_per_s.map_or(String::new(), |[one, two]| format!("{one:.1} / {two:.1}"));
        writeln!(out, "| {work} | {llama} | {at_least} | {one} | {two} | {speed} |").expect("a string grows");
    }
    out
}

/// Costs of a sequence of 1,024 tokens, alone in caches of growing size. The caches are measured in turn.
fn flatness(options: &Options) -> String {
    const N: i32 = 1024;
    let calls: [(&str, Call); 7] = [
        ("get_size", Case::get_size_alone),
        ("get_data", Case::get_data_alone),
        ("set_data", Case::set_data_alone),
        ("seq_cp and seq_rm of the copy", |case| {
            timed(|| {
                case.context.seq_cp(0, FREE_SEQ, -1, -1).expect("one stream");
                case.context.seq_rm(FREE_SEQ, -1, -1).expect("a sequence of the context");
            })
        }),
        ("seq_rm of the last 64", |case| {
            let time = timed(|| case.context.seq_rm(0, N - 64, -1).expect("sequence 0"));
            decode(&mut case.context, 0, N - 64, 64);
            time
        }),
        ("prepare and commit of 1", |case| decode_and_cut(case, N, 1)),
        ("prepare and commit of 512", |case| decode_and_cut(case, N, 512)),
    ];
    // The small ones only show that it runs.
    let sizes: &[u32] = if options.quick { &[4 << 10, 64 << 10] } else { &[4 << 10, 64 << 10, 1 << 20] };
    let n_rounds = if options.quick { 11 } else { 201 };
    eprintln!("1,024 tokens in caches of {sizes:?} cells");
    let mut cases: Vec<Case> = sizes
        .iter()
        .map(|&kv_size| {
            let kv = KvParams { kv_size, ..rows(2, GgmlType::F16, 512) };
            Case::new(kv, &[0; N as usize], THREADS[1])
        })
        .collect();

    let sizes: Vec<String> = sizes.iter().map(|kv_size| format!("{}K cells", kv_size >> 10)).collect();
    let mut out = header("1,024 tokens of 4 KiB in a cache of", &sizes);
    for (name, call) in calls {
        out += &in_turn(name, n_rounds, &mut cases, call);
    }
    out
}

/// Costs of a partial checkpoint of a hybrid whose sequence grows, measured in turn.
#[expect(clippy::cast_precision_loss, reason = "a figure to read")]
fn hybrid(options: &Options) -> String {
    let calls: [(&str, Call<Hybrid>); 4] = [
        ("get_size", Hybrid::get_size_alone),
        ("get_data", Hybrid::get_data_alone),
        ("set_data", Hybrid::set_data_alone),
        ("a plain copy of it", Hybrid::copy),
    ];
    let lengths: &[i32] = if options.quick { &[1 << 10, 32 << 10] } else { &[1 << 10, 32 << 10, 256 << 10] };
    let n_rounds = if options.quick { 3 } else { 51 };
    eprintln!("checkpoints of a hybrid after {lengths:?} tokens");
    let mut cases: Vec<Hybrid> = lengths.iter().map(|&n_tokens| Hybrid::new(n_tokens)).collect();
    let lengths: Vec<String> = lengths.iter().map(|n_tokens| format!("{}K tokens", n_tokens >> 10)).collect();
    let mut out = header("a partial checkpoint after", &lengths);
    let sizes: Vec<f64> = cases.iter().map(|case| case.checkpoint_bytes() as f64).collect();
    let columns: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    let last = sizes[sizes.len() - 1] / sizes[0];
    writeln!(out, "| bytes | {} | {last:.2} |", columns.join(" | ")).expect("a string grows");
    for (name, call) in calls {
        out += &in_turn(name, n_rounds, &mut cases, call);
    }
    out
}

/// The first lines of a table with a column for each size.
fn header(what: &str, sizes: &[String]) -> String {
    let rule = "|---".repeat(sizes.len() + 2);
    format!("| {what} | {} | largest / smallest |\n{rule}|\n", sizes.join(" | "))
}

/// A line of it: medians of a call, made in each of the cases in turn.
fn in_turn<T>(name: &str, n_rounds: usize, cases: &mut [T], call: Call<T>) -> String {
    let rounds = repeat(n_rounds, || cases.iter_mut().map(call).collect::<Vec<_>>());
    let times: Vec<f64> =
        (0..cases.len()).map(|i| median(rounds.iter().map(|round| round[i]).collect())).collect();
    let columns: Vec<String> = times.iter().map(|&time| human(time)).collect();
    format!("| {name} | {} | {:.2} |\n", columns.join(" | "), times[times.len() - 1] / times[0])
}

fn decode_and_cut(case: &mut Case, pos: i32, n_tokens: i32) -> Duration {
    let time = decode(&mut case.context, 0, pos, n_tokens);
    case.context.seq_rm(0, pos, -1).expect("sequence 0");
    time
}

fn memory(options: &Options) -> String {
    let mut out =
        String::from("| call | state | resident (VmHWM) | of that anonymous |\n|---|---|---|---|\n");
    for (is_transposed, layout) in [(false, Layout::OneRun), (true, Layout::EveryOther)] {
        eprintln!("memory: {}, {}", kind(is_transposed), layout.name());
        let mut case = case_of(options.n_tokens(), is_transposed, layout, THREADS[1]);
        let calls: [(&str, Call); 4] = [
            ("get_data", Case::get_data_alone),
            ("set_data", Case::set_data_alone),
            ("save_file", Case::save_file_alone),
            ("load_file", Case::load_file_alone),
        ];
        for (name, call) in calls {
            let state = case.state.len() >> 20;
            let peak = peak_of(|| {
                call(&mut case);
            });
            let figures = peak.map_or("not known without Linux' /proc | ".into(), |peak| {
                let Peak { resident, anonymous } = peak;
                format!("{} KiB | {} KiB", resident >> 10, anonymous >> 10)
            });
            let kind = kind(is_transposed);
            writeln!(out, "| {name}, {kind}, {} | {state} MiB | {figures} |", layout.name())
                .expect("a string grows");
        }
    }
    out
}

/// [`memory`] in a process whose allocator keeps nothing that was freed: what it kept would hide what a call needs.
fn memory_of_a_new_process(options: &Options) -> Result<String, String> {
    let run = || {
        Command::new(std::env::current_exe()?)
            .arg("--memory")
            .args(options.quick.then_some("--quick"))
            .env("MALLOC_MMAP_THRESHOLD_", "65536")
            .env("MALLOC_TRIM_THRESHOLD_", "0")
            .stderr(Stdio::inherit())
            .output()
    };
    let output = run().map_err(|error| format!("--memory: {error}"))?;
    if !output.status.success() {
        return Err(format!("--memory: {}", output.status));
    }
    String::from_utf8(output.stdout).map_err(|error| format!("--memory: {error}"))
}

/// CPU, cores, memory, kernel, as far as `/proc` tells.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(':').nth(1))
            .map_or("unknown".to_owned(), |value| value.trim().to_owned())
    };
    let kib: u64 = field(&read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0);
    let release = read("/proc/sys/kernel/osrelease");
    format!(
        "{}, {} cores, {} GiB; Linux {}; kernels: {}.",
        field(&read("/proc/cpuinfo"), "model name"),
        std::thread::available_parallelism().map_or(0, usize::from),
        (kib + (1 << 19)) >> 20,
        release.split('-').next().unwrap_or_default().trim(),
        kvstate::storage::kernels()
    )
}

/// What memory gives at most to copies that touch more lines than they move bytes.
fn limits(options: &Options) -> String {
    let n = if options.quick { 64 << 20 } else { 512 << 20 };
    let (mut from, mut to) = (vec![1_u8; n], vec![2_u8; n]);
    let mut out =
        "| each line of a memory | 1 thread | 2 threads | GB/s, 1 / 2 |\n|---|---|---|---|\n".to_owned();
    for (name, work) in [
        ("is loaded", limits::load as fn(&mut [u8], usize) -> Duration),
        ("is loaded and stored", limits::load_and_store),
    ] {
        let pairs = THREADS.map(|threads| {
            repeat(options.n_pairs(), || Pair {
                reference: timed(|| to.copy_from_slice(&from)),
                call: work(&mut from, threads),
            })
        });
        let ratios = pairs.each_ref().map(|pairs| {
            let ratio = |pair: &Pair| pair.reference.as_secs_f64() / pair.call.as_secs_f64();
            let Spread { low, median, high } = Spread::of(pairs.iter().map(ratio).collect());
            format!("{median:.2} ({low:.2} to {high:.2})")
        });
        let [one, two] = pairs.each_ref().map(|pairs| gb_per_s(n, pairs.iter().map(|pair| pair.call)));
        let _ = writeln!(out, "| {name} | {} | {} | {one:.1} / {two:.1} |", ratios[0], ratios[1]);
    }
    out
}

fn report(options: &Options) -> Result<String, String> {
    Ok(format!(
        "{}\n\n## Speed\n\n{}\n## Limits\n\n{}\n## A sequence in a large cache\n\n{}\n\
         ## A checkpoint of a hybrid\n\n{}\n## Slot files\n\n{}\n## Peak extra memory\n\n{}",
        machine(),
        table(options),
        limits(options),
        flatness(options),
        hybrid(options),
        slots(options),
        memory_of_a_new_process(options)?
    ))
}

/// `page` with `report` in place of what is below the marker, or below the title of `only` there.
fn replaced(page: &str, only: Option<&Section>, report: &str) -> Result<String, String> {
    let split = |text: &'_ str, at: &str| -> Result<[String; 2], String> {
        let (above, below) = text.split_once(at).ok_or_else(|| format!("{at:?} is not there"))?;
        Ok([format!("{above}{at}"), below.to_owned()])
    };
    let [above, below] = split(page, MARKER)?;
    let Some(section) = only else { return Ok(format!("{above}\n\n{report}")) };
    let [before, old] = split(&below, &format!("\n## {}\n", section.title))?;
    let after = old.find("\n## ").map_or("", |at| &old[at..]);
    Ok(format!("{above}{before}\n{report}{after}"))
}

fn run() -> Result<(), String> {
    let options = Options::parse()?;
    if options.memory {
        print!("{}", memory(&options));
        return Ok(());
    }
    let page = match &options.write {
        None => None,
        Some(path) => {
            let named = |error: String| format!("{}: {error}", path.display());
            let page = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
            replaced(&page, options.only, "").map_err(named)?; // rather now than after minutes
            Some((path, page))
        }
    };
    let report = match options.only {
        Some(section) => (section.make)(&options),
        None => report(&options)?,
    };
    print!("{report}");
    let Some((path, page)) = page else { return Ok(()) };
    fs::write(path, replaced(&page, options.only, &report)?)
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
