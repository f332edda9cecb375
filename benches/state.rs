//! What the calls cost: `cargo bench --bench state`.
//!
//! State calls are ratios: the time of a call divided by that of a plain copy of the state (a plain write, a plain
//! read) right before it, so that a busy machine slows both. Sequence operations are times.
#![allow(missing_docs, reason = "criterion_group makes an undocumented function")]

mod common;

use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter};
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use kvstate::Context;
use kvstate::format::GgmlType;
use kvstate::memory::KvParams;
use kvstate::types::SeqId;

use common::hybrid::Hybrid;
use common::{Case, FREE_SEQ, Layout, N_SEQ, Pair, decode, filled, fitting, rows, timed, transposed};

/// What a machine with few cores has; more do not speed up a copy much.
const THREADS: usize = 2;

/// Time of a call divided by the time of its reference.
struct Ratio;

impl Measurement for Ratio {
    type Intermediate = ();
    type Value = f64;

    fn start(&self) {}

    fn end(&self, (): ()) -> f64 {
        unreachable!("a ratio is measured with iter_custom")
    }

    fn add(&self, a: &f64, b: &f64) -> f64 {
        a + b
    }

    fn zero(&self) -> f64 {
        0.0
    }

    fn to_f64(&self, value: &f64) -> f64 {
        *value
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

impl ValueFormatter for Ratio {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        if typical >= 1e-3 {
            return "x";
        }
        for value in values {
            *value *= 1e6;
        }
        "x 1e-6"
    }

    fn scale_throughputs(&self, typical: f64, _: &Throughput, values: &mut [f64]) -> &'static str {
        self.scale_values(typical, values)
    }

    fn scale_for_machines(&self, _: &mut [f64]) -> &'static str {
        "x"
    }
}

fn bench_pairs<T>(group: &mut BenchmarkGroup<'_, Ratio>, name: &str, case: &mut T, call: fn(&mut T) -> Pair) {
    let mut ratio = || {
        let Pair { reference, call } = call(case);
        call.as_secs_f64() / reference.as_secs_f64()
    };
    group.bench_function(name, |b| b.iter_custom(|iters| (0..iters).map(|_| ratio()).sum()));
}

fn bench_memory(group: &mut BenchmarkGroup<'_, Ratio>, name: &str, case: &mut Case) {
    bench_pairs(group, &format!("{name}: get_size"), case, Case::get_size);
    bench_pairs(group, &format!("{name}: get_data"), case, Case::get_data);
    bench_pairs(group, &format!("{name}: set_data"), case, Case::set_data);
}

fn bench_files(group: &mut BenchmarkGroup<'_, Ratio>, name: &str, case: &mut Case) {
    bench_pairs(group, &format!("{name}: save_file"), case, Case::save_file);
    case.save_file_alone();
    bench_pairs(group, &format!("{name}: load_file"), case, Case::load_file);
}

fn case_of(kv: KvParams, layout: Layout, n: usize) -> Case {
    let owners = layout.owners(n);
    Case::new(fitting(kv, &owners), &owners, THREADS)
}

/// 8,000 tokens; rows of 32 layers x 8 heads x 128, and half of that transposed.
fn large(c: &mut Criterion<Ratio>) {
    let mut group = c.benchmark_group("8000 tokens");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for layout in Layout::ALL {
        let is_filed = matches!(layout, Layout::OneRun | Layout::EveryOther);
        let kinds =
            [("rows", rows(32, GgmlType::F16, 1024)), ("transposed V", transposed(32, GgmlType::F16, 1024))];
        for (kind, kv) in kinds {
            let mut case = case_of(kv, layout, 8000);
            let name = format!("{kind}, {}", layout.name());
            bench_memory(&mut group, &name, &mut case);
            if is_filed {
                bench_files(&mut group, &name, &mut case);
            }
        }
    }
}

/// 64 MiB of each type; quantised V cannot be transposed.
fn types(c: &mut Criterion<Ratio>) {
    let mut group = c.benchmark_group("64 MiB");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for layout in [Layout::OneRun, Layout::EveryOther] {
        for (ggml_type, n) in [(GgmlType::F16, 4096), (GgmlType::Q8_0, 7710), (GgmlType::F32, 2048)] {
            let name = |kind: &str| format!("{} {kind}, {}", ggml_type.name(), layout.name());
            bench_memory(&mut group, &name("rows"), &mut case_of(rows(4, ggml_type, 1024), layout, n));
            if !ggml_type.is_quantized() {
                let kv = transposed(8, ggml_type, 1024);
                bench_memory(&mut group, &name("transposed V"), &mut case_of(kv, layout, n));
            }
        }
    }
}

/// Sequence 0 has 1,024 tokens: alone in a large cache, and among 64 sequences that decode in turn.
fn small(c: &mut Criterion<Ratio>) {
    let mut group = c.benchmark_group("1024 tokens");
    group.sample_size(20).sampling_mode(SamplingMode::Flat);
    let kv = KvParams { kv_size: 256 << 10, ..rows(4, GgmlType::F16, 512) };
    for (name, owners) in [("256K cells", vec![0; 1024]), ("64 sequences", in_turn(1024))] {
        let mut case = Case::new(kv.clone(), &owners, THREADS);
        bench_memory(&mut group, name, &mut case);
        bench_files(&mut group, name, &mut case);
    }
}

/// A partial checkpoint holds the recurrent states alone, whatever the length of the sequence.
fn hybrid(c: &mut Criterion<Ratio>) {
    let mut group = c.benchmark_group("checkpoint of a hybrid");
    group.sample_size(20).sampling_mode(SamplingMode::Flat);
    for n_tokens in [1 << 10, 32 << 10, 256 << 10] {
        let mut case = Hybrid::new(n_tokens);
        let name = |call: &str| format!("{}K tokens: {call}", n_tokens >> 10);
        bench_pairs(&mut group, &name("get_data"), &mut case, Hybrid::get_data);
        bench_pairs(&mut group, &name("set_data"), &mut case, Hybrid::set_data);
    }
}

/// Cells of 64 sequences of `n` tokens each, one token after the other.
fn in_turn(n: usize) -> Vec<SeqId> {
    (0..N_SEQ).cycle().take(n * 64).collect()
}

/// Times of operations on sequence 0 of 8,000 tokens, or of 4,096 among 64 sequences that fill 256K cells but for the
/// last 512. What an operation does is undone, untimed.
fn sequences(c: &mut Criterion) {
    let mut among_64 = in_turn(4096);
    among_64.truncate(among_64.len() - 512);
    let tiny = rows(1, GgmlType::F16, 32);
    for layout in Layout::ALL {
        let owners = layout.owners(8000);
        // Free cells behind, for find_slot.
        let kv = KvParams { kv_size: fitting(tiny.clone(), &owners).kv_size + 1024, ..tiny.clone() };
        bench_sequence(c, layout.name(), filled(kv, &owners, THREADS), 8000);
    }
    let kv = KvParams { kv_size: 256 << 10, ..tiny };
    bench_sequence(c, "64 sequences in 256K cells", filled(kv, &among_64, THREADS), 4088);
}

fn bench_sequence(c: &mut Criterion, name: &str, mut context: Context, n: i32) {
    let mut group = c.benchmark_group(format!("sequence, {name}"));
    let mut bench = |name: &str, call: fn(&mut Context, i32) -> Duration| {
        group.bench_function(name, |b| {
            b.iter_custom(|iters| (0..iters).map(|_| call(&mut context, n)).sum());
        });
    };
    bench("get_size", |context, _| {
        timed(|| context.state_seq_get_size(0, common::NONE).expect("sequence 0"))
    });
    bench("seq_pos_max", |context, _| timed(|| context.seq_pos_max(0).expect("sequence 0")));
    bench("seq_cp", |context, _| {
        let time = timed(|| context.seq_cp(0, FREE_SEQ, -1, -1).expect("one stream"));
        context.seq_rm(FREE_SEQ, -1, -1).expect("a sequence of the context");
        time
    });
    bench("seq_rm of a copy", |context, _| {
        context.seq_cp(0, FREE_SEQ, -1, -1).expect("one stream");
        timed(|| context.seq_rm(FREE_SEQ, -1, -1).expect("a sequence of the context"))
    });
    bench("seq_rm of the last 64", |context, n| {
        let time = timed(|| context.seq_rm(0, n - 64, -1).expect("sequence 0"));
        decode(context, 0, n - 64, 64);
        time
    });
    bench("seq_add", |context, _| {
        let time = timed(|| context.seq_add(0, 0, -1, 1).expect("the engine shifts"));
        context.seq_add(0, 0, -1, -1).expect("the engine shifts");
        context.shift_done();
        time
    });
    bench("find_slot of 1", |context, n| decode_and_cut(context, n, 1));
    bench("find_slot of 512", |context, n| decode_and_cut(context, n, 512));
    // Only the first call drops the other sequences. The cells between those of sequence 0 are free from then on.
    bench("seq_keep beside a copy", |context, _| {
        context.seq_cp(0, FREE_SEQ, -1, -1).expect("one stream");
        timed(|| context.seq_keep(0).expect("sequence 0"))
    });
    bench("find_slot of 512 in the holes", |context, n| decode_and_cut(context, n, 512));
}

/// Time of prepare and commit of `n_tokens`.
fn decode_and_cut(context: &mut Context, pos: i32, n_tokens: i32) -> Duration {
    let time = decode(context, 0, pos, n_tokens);
    context.seq_rm(0, pos, -1).expect("sequence 0");
    time
}

criterion_group! {
    name = ratios;
    config = Criterion::default()
        .with_measurement(Ratio)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500));
    targets = large, types, small, hybrid
}
criterion_group! {
    name = times;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = sequences
}
criterion_main!(ratios, times);
