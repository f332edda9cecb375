//! What the state calls cost: `cargo bench --bench state`.
//!
//! The first group compares with a plain copy of the same bytes. The second keeps the sequence at 1,024 tokens
//! while the cache grows: the cost must stay.
#![allow(missing_docs, reason = "criterion_group makes an undocumented function")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvstate::context::UbatchToken;
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, TensorParams};
use kvstate::types::{CellExt, StateFlags};
use kvstate::{Context, ContextParams};

const NONE: StateFlags = StateFlags::empty();

/// 8 layers of 4 heads of 128, f16: 16 KiB a token.
fn context(kv_size: u32, v_trans: bool) -> Context {
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 512 };
    let layer = LayerParams { k: tensor, v: Some(tensor) };
    let kv = KvParams { v_trans, ..KvParams::new(kv_size, 8, layer) };
    Context::new(ContextParams::new(64, vec![kv.into()])).expect("geometry")
}

fn decode(context: &mut Context, positions: std::ops::Range<i32>, seq_id: i32) {
    let seq_ids = [seq_id];
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &seq_ids };
    let tokens: Vec<_> = positions.map(token).collect();
    let slot = context.prepare(&tokens).expect("cells");
    context.commit(&slot).expect("fresh");
}

/// Sequence 0 alone, or in every other cell.
fn filled(kv_size: u32, n: i32, v_trans: bool, alternate: bool) -> Context {
    let mut context = context(kv_size, v_trans);
    if alternate {
        for pos in 0..n {
            decode(&mut context, pos..pos + 1, 0);
            decode(&mut context, pos..pos + 1, 1);
        }
    } else {
        decode(&mut context, 0..n, 0);
    }
    context
}

fn state_of(context: &mut Context) -> Vec<u8> {
    let size = context.state_seq_get_size(0, NONE).expect("sequence 0");
    let mut state = vec![0; usize::try_from(size).expect("64 bits")];
    context.state_seq_get_data(&mut state, 0, NONE).expect("it fits");
    state
}

fn against_memcpy(c: &mut Criterion) {
    let mut group = c.benchmark_group("against a plain copy");
    group.sample_size(10);
    for (name, v_trans, alternate) in [
        ("rows, one run", false, false),
        ("rows, every other cell", false, true),
        ("transposed V, one run", true, false),
        ("transposed V, every other cell", true, true),
    ] {
        let mut context = filled(8192, 4096, v_trans, alternate);
        let state = state_of(&mut context);
        let mut out = state.clone();
        group.throughput(Throughput::Bytes(state.len() as u64));
        group.bench_function(format!("{name}: copy"), |b| b.iter(|| out.copy_from_slice(black_box(&state))));
        group.bench_function(format!("{name}: get_size"), |b| {
            b.iter(|| context.state_seq_get_size(black_box(0), NONE));
        });
        group.bench_function(format!("{name}: get_data"), |b| {
            b.iter(|| context.state_seq_get_data(black_box(&mut out), 0, NONE));
        });
        group.bench_function(format!("{name}: set_data"), |b| {
            b.iter(|| context.state_seq_set_data(black_box(&state), 0, NONE));
        });
    }
    group.finish();
}

fn by_cache_size(c: &mut Criterion) {
    let mut group = c.benchmark_group("1024 tokens in a cache of");
    group.sample_size(20);
    for kv_size in [4 << 10, 64 << 10, 256 << 10] {
        let mut context = filled(kv_size, 1024, false, false);
        let mut state = state_of(&mut context);
        group.bench_function(format!("{kv_size}: get_size"), |b| {
            b.iter(|| context.state_seq_get_size(black_box(0), NONE));
        });
        group.bench_function(format!("{kv_size}: get_data"), |b| {
            b.iter(|| context.state_seq_get_data(black_box(&mut state), 0, NONE));
        });
        group.bench_function(format!("{kv_size}: partial checkpoint"), |b| {
            b.iter(|| context.state_seq_get_data(black_box(&mut state), 0, StateFlags::PARTIAL_ONLY));
        });
        group.bench_function(format!("{kv_size}: seq_cp and seq_rm"), |b| {
            b.iter(|| {
                context.seq_cp(0, 1, -1, -1).expect("sequences");
                context.seq_rm(1, -1, -1).expect("sequence");
            });
        });
        group.bench_function(format!("{kv_size}: decode one, cut it"), |b| {
            b.iter(|| {
                decode(&mut context, 1024..1025, 0);
                context.seq_rm(0, 1024, -1).expect("sequence");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, against_memcpy, by_cache_size);
criterion_main!(benches);
