//! What a cache on a device costs in calls and bytes, in which order its work runs, and what it does with little memory.
//! On the emulated driver, which counts.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "memory that the library has pinned is used as a slice")]
#![allow(missing_docs, reason = "a test")]

mod gpu;
mod support;

use std::ops::ControlFlow;
use std::sync::{Arc, Barrier};

use gpu::{Engine, alone, no_limit, on_device, same_bytes, staged};
use kvstate::error::{Error, Status};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams};
use kvstate::storage::{self, ProgressCallback, StagingParams, StagingReport};
use kvstate::types::CellExt;
use kvstate::{Context, ContextParams};
use support::place::fakecuda::{Alone, Live};
use support::{NONE, ON_DEVICE, Tok, decode, held, image, place, planes, restore, save};

// Driver calls

const N_LAYER: usize = 32;
const N_PLANE: u64 = 2 * N_LAYER as u64;
const N_CELL: u32 = 8192;
const N_EMBD: u32 = 8;
/// Bytes of a cell in a plane: elements of f16.
const ROW: u64 = 2 * N_EMBD as u64;
/// Bytes of the tensors of the state.
const TENSORS: u64 = N_PLANE * N_CELL as u64 * ROW;
/// Bytes of a staging buffer; planes fill it without a rest, so that chunks can be counted.
const STAGING: u64 = 2 << 20;
const N_CHUNK: u64 = TENSORS / STAGING;
const _: () = assert!(STAGING.is_multiple_of(N_CELL as u64 * ROW) && TENSORS.is_multiple_of(STAGING));
/// Bytes of a move in a table.
const MOVE: u64 = 80;

/// Where the cells of sequence 0 are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cells {
    /// One run at the start.
    Run,
    /// Every other one; those between are of sequence 1.
    EveryOther,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    cells: Cells,
    v_trans: bool,
}

const CASES: [Case; 4] = [
    Case { cells: Cells::Run, v_trans: false },
    Case { cells: Cells::EveryOther, v_trans: false },
    Case { cells: Cells::Run, v_trans: true },
    Case { cells: Cells::EveryOther, v_trans: true },
];

/// Calls of a transfer that are made once: for the current context, the table, and the last wait.
const ONCE: u64 = 11;
/// Calls for a chunk beside its launch and its copies: events of its buffers, and the current context.
const PER_CHUNK: u64 = 9;

impl Case {
    fn params(self) -> (KvParams, Vec<Tok>) {
        let f16 = support::tensor(GgmlType::F16, N_EMBD);
        let kv = KvParams::new(2 * N_CELL, N_LAYER, LayerParams { k: f16, v: Some(f16) });
        let n_seq = if self.cells == Cells::Run { 1 } else { 2 };
        let pos = |n: u32| i32::try_from(n).expect("a position");
        let toks = (0..n_seq * N_CELL).map(|i| Tok::new(pos(i % n_seq), pos(i / n_seq)));
        (KvParams { v_trans: self.v_trans, ..kv }, toks.collect())
    }

    fn on_device(self) -> Context {
        self.fill(staged(on_device(2, &[self.params().0], 0), STAGING, 0))
    }

    /// The state that is expected, from a cache in host memory.
    fn expected(self) -> Vec<u8> {
        save(
            &mut self.fill(Context::new(support::params(2, &[self.params().0])).expect("a context")),
            0,
            NONE,
        )
    }

    fn fill(self, mut ctx: Context) -> Context {
        let toks = self.params().1;
        let ubatch: Vec<_> = toks
            .iter()
            .map(|tok| kvstate::context::UbatchToken {
                pos: tok.pos,
                ext: CellExt::default(),
                seq_ids: &tok.seqs,
            })
            .collect();
        let slot = ctx.prepare(&ubatch).expect("a slot");
        ctx.commit(&slot).expect("cells");
        let span = usize::try_from(2 * u64::from(N_CELL) * ROW).expect("a span");
        let bytes = support::noise(&[1], span + planes(&ctx, 0, 0).len());
        for (i, plane) in planes(&ctx, 0, 0).into_iter().enumerate() {
            place::write(plane, 0, &bytes[i..][..span]);
        }
        ctx
    }

    /// Planes whose cells lie as they do in a blob.
    fn n_direct(self) -> u64 {
        match (self.cells, self.v_trans) {
            (Cells::EveryOther, _) => 0,
            (Cells::Run, true) => N_PLANE / 2,
            (Cells::Run, false) => N_PLANE,
        }
    }

    /// Chunks that a kernel works on. K and V differ in their elements, but no chunk has both.
    fn n_staged_chunk(self) -> u64 {
        N_CHUNK * (N_PLANE - self.n_direct()) / N_PLANE
    }

    /// Bytes that tell the kernels what to move: a move for each plane, and which cells, once for all.
    fn table(self, n_moved: u64) -> u64 {
        MOVE * n_moved + if self.cells == Cells::EveryOther { 4 * u64::from(N_CELL) } else { 0 }
    }

    /// A transfer through staging buffers, or straight from or to pinned memory of the caller's.
    fn check_calls(self, cuda: &Alone, copy: &str, is_pinned: bool) {
        let n_staged = N_PLANE - self.n_direct();
        // A plane that is copied from where it is, is so in one piece.
        let n_copy = self.n_direct() + if is_pinned { n_staged } else { self.n_staged_chunk() };
        let n_table = u64::from(n_staged > 0);
        assert_eq!(cuda.count("cuLaunchKernel"), self.n_staged_chunk(), "{self:?}");
        let n_htod = if copy == "cuMemcpyHtoDAsync_v2" { n_table } else { 0 };
        assert_eq!(cuda.count(copy), n_copy + n_htod, "{self:?}");
        assert_eq!(cuda.count("pageable_copies"), 0, "{self:?}");
        let bound = ONCE + N_CHUNK * PER_CHUNK + self.n_staged_chunk() + n_copy;
        assert!(cuda.calls() <= bound, "{self:?}: {} calls, expected at most {bound}", cuda.calls());
    }

    fn check_bytes(self, cuda: &Alone, to_host: u64, to_device: u64) {
        let table = self.table(N_PLANE - self.n_direct());
        let counted =
            ["bytes_device_to_host", "bytes_host_to_device", "bytes_device_to_device", "bytes_peer"]
                .map(|name| cuda.count(name));
        assert_eq!(counted, [to_host, to_device + table, 0, 0], "{self:?}");
    }
}

/// Pinned memory of the library's.
struct Pinned(*mut u8, usize);

impl Pinned {
    fn new(size: usize) -> Self {
        Self(storage::alloc_pinned(0, size as u64).expect("pinned memory"), size)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the allocation, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        storage::free_pinned(self.0.addr()).expect("pinned memory");
    }
}

#[test]
fn a_save_and_a_restore_cost_calls_by_chunks_and_not_by_cells() {
    let cuda = alone();
    for case in CASES {
        let expected = case.expected();
        let mut ctx = case.on_device();
        // The first transfer allocates.
        same_bytes(&save(&mut ctx, 0, NONE), &expected);
        cuda.reset();
        let mut blob = vec![0; expected.len()];
        ctx.state_seq_get_data(&mut blob, 0, NONE).expect("a state");
        case.check_calls(&cuda, "cuMemcpyDtoHAsync_v2", false);
        case.check_bytes(&cuda, TENSORS, 0);
        same_bytes(&blob, &expected);

        // Into free cells: those that were the sequence's.
        ctx.seq_rm(0, -1, -1).expect("a removal");
        ctx.clear_planes(&cuda);
        ctx.state_seq_set_data(&blob, 0, NONE).expect("a restore");
        case.check_calls(&cuda, "cuMemcpyHtoDAsync_v2", false);
        case.check_bytes(&cuda, 0, TENSORS);
        same_bytes(&save(&mut ctx, 0, NONE), &expected);
    }
}

#[test]
fn a_pinned_buffer_is_copied_to_and_from_without_a_stop() {
    let cuda = alone();
    for case in CASES {
        let expected = case.expected();
        let mut ctx = case.on_device();
        let mut pinned = Pinned::new(expected.len());
        save(&mut ctx, 0, NONE);
        cuda.reset();
        ctx.state_seq_get_data(pinned.bytes(), 0, NONE).expect("a state");
        case.check_calls(&cuda, "cuMemcpyDtoHAsync_v2", true);
        case.check_bytes(&cuda, TENSORS, 0);
        // Only the table is waited for: no chunk stops in a pinned buffer of the library's.
        assert!(cuda.count("cuEventSynchronize") <= 1, "{case:?}");
        same_bytes(pinned.bytes(), &expected);

        ctx.seq_rm(0, -1, -1).expect("a removal");
        ctx.clear_planes(&cuda);
        ctx.state_seq_set_data(pinned.bytes(), 0, NONE).expect("a restore");
        case.check_calls(&cuda, "cuMemcpyHtoDAsync_v2", true);
        case.check_bytes(&cuda, 0, TENSORS);
        assert!(cuda.count("cuEventSynchronize") <= 1, "{case:?}");
        same_bytes(&save(&mut ctx, 0, NONE), &expected);
    }
}

/// Calls of work that stays on the device: a lane, an allocation with its event, the table, launches, the ends.
const ON_DEVICE_CALLS: u64 = 40;

#[test]
fn on_device_states_and_snapshots_move_nothing_but_the_table() {
    let cuda = alone();
    for case in CASES {
        let expected = case.expected();
        let mut ctx = case.on_device();
        save(&mut ctx, 0, NONE);
        let check = |what: &str| {
            let bytes = ["bytes_device_to_host", "bytes_host_to_device", "bytes_device_to_device"];
            assert_eq!(bytes.map(|name| cuda.count(name)), [0, case.table(N_PLANE), 0], "{case:?}: {what}");
            let n_kind = 1 + u64::from(case.v_trans);
            assert_eq!(cuda.count("cuLaunchKernel"), n_kind, "{case:?}: {what}");
            assert!(cuda.calls() <= ON_DEVICE_CALLS, "{case:?}: {what}: {} calls", cuda.calls());
        };
        let mut blob =
            vec![0; usize::try_from(ctx.state_seq_get_size(0, ON_DEVICE).expect("a size")).expect("small")];
        cuda.reset();
        ctx.state_seq_get_data(&mut blob, 0, ON_DEVICE).expect("a state");
        check("an ON_DEVICE save");
        cuda.reset();
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        check("a snapshot");
        assert_eq!((snapshot.device_bytes(), snapshot.size()), (TENSORS, expected.len() as u64));

        ctx.seq_rm(0, -1, -1).expect("a removal");
        ctx.clear_planes(&cuda);
        ctx.state_seq_set_data(&blob, 0, ON_DEVICE).expect("a restore");
        check("an ON_DEVICE restore");
        same_bytes(&save(&mut ctx, 0, NONE), &expected);

        ctx.seq_rm(0, -1, -1).expect("a removal");
        ctx.clear_planes(&cuda);
        ctx.seq_restore(&snapshot, 0).expect("a restore");
        check("a restore of a snapshot");
        same_bytes(&save(&mut ctx, 0, NONE), &expected);
    }
}

#[test]
fn a_file_is_written_and_read_through_pinned_memory() {
    let cuda = alone();
    let dir = tempfile::tempdir().expect("a folder");
    for case in CASES {
        let expected = case.expected();
        let mut ctx = case.on_device();
        save(&mut ctx, 0, NONE);
        let path = dir.path().join("state");
        cuda.reset();
        ctx.state_seq_save_file(&path, 0, &[]).expect("a file");
        assert_eq!(cuda.count("pageable_copies"), 0, "{case:?}");
        case.check_bytes(&cuda, TENSORS, 0);

        ctx.seq_rm(0, -1, -1).expect("a removal");
        ctx.clear_planes(&cuda);
        ctx.state_seq_load_file(&path, 0, 0).expect("a restore");
        assert_eq!(cuda.count("pageable_copies"), 0, "{case:?}");
        case.check_bytes(&cuda, 0, TENSORS);
        same_bytes(&save(&mut ctx, 0, NONE), &expected);
    }
}

trait ClearPlanes {
    /// Overwrites the planes, so that what a restore does not write is seen, and starts to count.
    fn clear_planes(&self, cuda: &Alone);
}

impl ClearPlanes for Context {
    fn clear_planes(&self, cuda: &Alone) {
        for plane in planes(self, 0, 0) {
            let span = plane.shape().span(plane.kv_size()).expect("a span");
            cuda.poke(plane.as_ptr().addr() as u64, &vec![0xEE; usize::try_from(span).expect("small")]);
        }
        cuda.reset();
    }
}

// Bytes

/// Sections of every way in which cells lie: rows and transposed V, elements of 2, 4, 8 and 34 bytes.
fn geometries() -> impl Iterator<Item = KvParams> {
    let types = [(GgmlType::F16, 4), (GgmlType::F32, 3), (GgmlType::F16, 1), (GgmlType::Q8_0, 32)];
    types.into_iter().flat_map(|(ggml_type, n_embd)| {
        let tensor = support::tensor(ggml_type, n_embd);
        let kv = KvParams::new(16, 3, LayerParams { k: tensor, v: Some(tensor) });
        let can_trans = !ggml_type.is_quantized();
        [false, true]
            .into_iter()
            .filter(move |&v_trans| can_trans || !v_trans)
            .map(move |v_trans| KvParams { v_trans, ..kv.clone() })
    })
}

#[test]
fn states_through_many_chunks_are_those_of_host_memory() {
    let _cuda = alone();
    // With more pinned buffers than staging buffers on the device, either can be what has to be waited for.
    for (kv, n_pinned) in geometries().flat_map(|kv| [(kv.clone(), 2), (kv, 4)]) {
        let mut host = Context::new(support::params(3, std::slice::from_ref(&kv))).expect("a context");
        let mut ctx = staged(on_device(3, &[kv], 0), 48, n_pinned);
        for ctx in [&mut host, &mut ctx] {
            decode(ctx, 2, 0..1);
            for pos in 0..4 {
                decode(ctx, pos % 2, [pos / 2]);
            }
            decode(ctx, 0, 4..8);
        }
        for seq in [0, 1] {
            let blob = save(&mut host, seq, NONE);
            same_bytes(&save(&mut ctx, seq, NONE), &blob);
            ctx.seq_rm(seq, -1, -1).expect("a removal");
            restore(&mut ctx, &blob, seq, NONE);
            assert_eq!(held(&ctx, 0, seq), held(&host, 0, seq));

            let mut pinned = Pinned::new(blob.len());
            ctx.state_seq_get_data(pinned.bytes(), seq, NONE).expect("a state");
            same_bytes(pinned.bytes(), &blob);
            ctx.seq_rm(seq, -1, -1).expect("a removal");
            restore(&mut ctx, pinned.bytes(), seq, NONE);
            assert_eq!(held(&ctx, 0, seq), held(&host, 0, seq));
        }
    }
}

// Order

/// Two sequences of four tokens in a unified cache of two layers, or in streams of their own.
fn small(unified: bool, engine: &Engine) -> Context {
    let params = ContextParams { unified, ..on_device(2, &[support::kv(16)], 0) };
    // Buffers of a few rows: every state takes many chunks.
    let mut ctx = staged(params, 16, 2);
    decode(&mut ctx, 0, 0..4);
    decode(&mut ctx, 1, 0..4);
    ctx.set_stream(engine.stream());
    ctx
}

/// All that the state of sequence 0 holds, read from its blob by a host context.
fn state_of(blob: &[u8]) -> Vec<support::Held> {
    let mut ctx = Context::new(support::params(2, &[support::kv(16)])).expect("a context");
    restore(&mut ctx, blob, 0, NONE);
    held(&ctx, 0, 0)
}

/// Whether every byte of K and V is `value`.
fn is_all(state: &[support::Held], value: u8) -> bool {
    !state.is_empty() && state.iter().flat_map(|held| held.bytes.iter().flatten()).all(|&byte| byte == value)
}

fn fill_all(engine: &Engine, ctx: &Context, value: u8) {
    (0..ctx.n_stream() as usize)
        .flat_map(|stream| planes(ctx, 0, stream))
        .for_each(|plane| engine.fill(plane, value));
}

/// Saves sequence 0 in some way; what the state holds.
type Read<'a> = dyn Fn(&mut Context) -> Vec<support::Held> + 'a;

#[test]
fn what_reads_the_cache_runs_behind_the_callers_stream() {
    let _cuda = alone();
    let engine = Engine::new();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("state");
    let ways: [(&str, &Read<'_>); 5] = [
        ("a save", &|ctx| state_of(&save(ctx, 0, NONE))),
        ("a save to pinned memory", &|ctx| {
            let mut pinned = Pinned::new(
                usize::try_from(ctx.state_seq_get_size(0, NONE).expect("a size")).expect("small"),
            );
            ctx.state_seq_get_data(pinned.bytes(), 0, NONE).expect("a state");
            state_of(pinned.bytes())
        }),
        ("an ON_DEVICE save", &|ctx| {
            let blob = save(ctx, 0, ON_DEVICE);
            restore(ctx, &blob, 1, ON_DEVICE);
            held(ctx, 0, 1)
        }),
        ("a file", &|ctx| {
            ctx.state_seq_save_file(&path, 0, &[]).expect("a file");
            let mut ctx = Context::new(support::params(2, &[support::kv(16)])).expect("a context");
            ctx.state_seq_load_file(&path, 0, 0).expect("a restore");
            held(&ctx, 0, 0)
        }),
        ("a snapshot", &|ctx| {
            let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
            let mut blob = vec![0; usize::try_from(snapshot.size()).expect("small")];
            snapshot.get_data(&mut blob, None).expect("a state");
            state_of(&blob)
        }),
    ];
    for (value, (what, read)) in (1..).zip(ways) {
        let mut ctx = small(true, &engine);
        fill_all(&engine, &ctx, value);
        let state = read(&mut ctx);
        assert!(is_all(&state, value), "{what} has bytes from before the work that was queued: {state:?}");
    }
}

#[test]
fn what_is_copied_from_where_it_is_runs_behind_the_callers_stream() {
    let _cuda = alone();
    let engine = Engine::new();
    // 64 KiB of K in one run.
    let f16 = support::tensor(GgmlType::F16, 2048);
    let kv = KvParams::new(16, 1, LayerParams { k: f16, v: None });
    let mut ctx = staged(on_device(1, &[kv], 0), 64 << 10, 2);
    decode(&mut ctx, 0, 0..16);
    ctx.set_stream(engine.stream());
    save(&mut ctx, 0, NONE);
    engine.fill(planes(&ctx, 0, 0)[0], 0xAB);
    let blob = save(&mut ctx, 0, NONE);
    assert!(blob.ends_with(&vec![0xAB; 64 << 10]));

    engine.fill(planes(&ctx, 0, 0)[0], 0xCD);
    restore(&mut ctx, &blob, 0, NONE);
    engine.synchronize();
    assert!(is_all(&held(&ctx, 0, 0), 0xAB));
}

#[test]
fn what_writes_the_cache_runs_behind_the_callers_stream() {
    let _cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(true, &engine);
    let (blob, before) = (save(&mut ctx, 0, NONE), held(&ctx, 0, 0));
    fill_all(&engine, &ctx, 0xAB);
    restore(&mut ctx, &blob, 0, NONE);
    engine.synchronize();
    assert_eq!(held(&ctx, 0, 0), before);
    assert!(is_all(&held(&ctx, 0, 1), 0xAB));

    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    fill_all(&engine, &ctx, 0xCD);
    ctx.seq_restore(&snapshot, 0).expect("a restore");
    engine.synchronize();
    assert_eq!(held(&ctx, 0, 0), before);

    fill_all(&engine, &ctx, 0xEF);
    ctx.clear(true).expect("zeroes");
    engine.synchronize();
    for plane in planes(&ctx, 0, 0) {
        assert!(place::all(plane).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn the_callers_stream_goes_on_behind_a_snapshot() {
    let cuda = alone();
    let engine = Engine::new();
    for seq in [Some(0), None] {
        let mut ctx = small(true, &engine);
        let take = |ctx: &mut Context| match seq {
            Some(seq) => ctx.seq_snapshot(seq, NONE),
            None => ctx.snapshot(),
        };
        let mut expected =
            vec![0; usize::try_from(take(&mut ctx).expect("a snapshot").size()).expect("small")];
        take(&mut ctx).expect("a snapshot").get_data(&mut expected, None).expect("a state");

        let snapshot = take(&mut ctx).expect("a snapshot");
        // The engine decodes on: it overwrites the cells, and waits for nothing but its own stream.
        fill_all(&engine, &ctx, 0xAB);
        engine.synchronize();
        cuda.finish();
        let mut blob = vec![0; expected.len()];
        snapshot.get_data(&mut blob, None).expect("a state");
        same_bytes(&blob, &expected);
    }
}

#[test]
fn the_callers_stream_goes_on_behind_an_on_device_save() {
    let cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(true, &engine);
    let before = held(&ctx, 0, 0);
    let blob = save(&mut ctx, 0, ON_DEVICE);
    fill_all(&engine, &ctx, 0xAB);
    engine.synchronize();
    cuda.finish();
    restore(&mut ctx, &blob, 0, ON_DEVICE);
    assert_eq!(held(&ctx, 0, 0), before);
}

#[test]
fn the_callers_stream_goes_on_behind_a_copy_and_a_clear() {
    let _cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(false, &engine);
    let (from, to) = (planes(&ctx, 0, 0), planes(&ctx, 0, 1));
    // Four rows of K of the first layer.
    let expected = place::read(from[0], 0, 32);
    assert_ne!(place::read(to[0], 0, 32), expected);
    ctx.seq_cp(0, 1, -1, -1).expect("a copy");
    engine.fetch(planes(&ctx, 0, 1)[0], 32);
    assert_eq!(engine.fetched(32), expected);

    ctx.clear(true).expect("zeroes");
    engine.fetch(planes(&ctx, 0, 1)[0], 32);
    assert_eq!(engine.fetched(32), [0; 32]);
}

#[test]
fn default_streams_are_streams() {
    let cuda = alone();
    for number in [0, 1, 2] {
        let engine = Engine::on_default_stream(number);
        let mut ctx = small(true, &engine);
        fill_all(&engine, &ctx, 0xAB);
        assert!(is_all(&state_of(&save(&mut ctx, 0, NONE)), 0xAB), "a save behind stream {number}");
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        fill_all(&engine, &ctx, 0xCD);
        engine.synchronize();
        cuda.finish();
        let mut blob = vec![0; usize::try_from(snapshot.size()).expect("small")];
        snapshot.get_data(&mut blob, None).expect("a state");
        assert!(is_all(&state_of(&blob), 0xAB), "a snapshot before stream {number} went on");
        assert!(is_all(&held(&ctx, 0, 0), 0xCD), "work on stream {number}");
    }
}

#[test]
fn a_stream_that_is_being_captured_is_refused_and_nothing_changes() {
    let _cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(true, &engine);
    ctx.clear_stream(0);
    let (blob, before) = (save(&mut ctx, 0, NONE), image(&ctx));
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("state");
    ctx.set_stream(engine.stream());
    engine.begin_capture();
    let mut untouched = vec![0xAA; 4096];
    let errors = [
        ctx.clear(true),
        ctx.state_get_data(&mut untouched).map(drop),
        ctx.state_seq_get_data(&mut untouched, 0, NONE).map(drop),
        ctx.state_seq_get_data(&mut blob.clone(), 0, ON_DEVICE).map(drop),
        ctx.seq_snapshot(0, NONE).map(drop),
        ctx.snapshot().map(drop),
        ctx.state_seq_save_file(&path, 0, &[]).map(drop),
        ctx.state_seq_set_data(&blob, 1, NONE).map(drop),
        ctx.seq_restore(&snapshot, 1),
        ctx.kv_set((0, 0, 0), false, 0, &[0; 8]),
    ];
    for (i, result) in errors.into_iter().enumerate() {
        let error = result.expect_err("a stream under capture");
        assert_eq!(error.status(), Status::InvalidArgument, "{i}: {error}");
        assert_eq!(error.to_string(), "stream: the one of device 0 is being captured into a graph", "{i}");
    }
    assert!(!path.exists());
    assert_eq!(untouched, vec![0xAA; 4096]);
    engine.end_capture();
    assert!(image(&ctx) == before);
    // The snapshot is nobody's, and its bytes are to be had whatever the stream does.
    assert_eq!(state_of(&save(&mut ctx, 0, NONE)), state_of(&blob));
}

#[test]
fn a_copy_between_streams_of_the_cache_is_refused_under_capture_and_nothing_changes() {
    let _cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(false, &engine);
    ctx.clear_stream(0);
    let before = image(&ctx);
    ctx.set_stream(engine.stream());
    engine.begin_capture();
    let error = ctx.seq_cp(0, 1, -1, -1).expect_err("a stream under capture");
    assert_eq!(error.to_string(), "stream: the one of device 0 is being captured into a graph");
    engine.end_capture();
    assert!(image(&ctx) == before);
}

#[test]
fn a_restore_is_done_when_it_returns() {
    let cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(true, &engine);
    let blob = save(&mut ctx, 0, NONE);
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    restore(&mut ctx, &blob, 1, NONE);
    assert_eq!(cuda.pending(), 0, "of a restore");
    ctx.seq_restore(&snapshot, 1).expect("a restore");
    assert_eq!(cuda.pending(), 0, "of a restore of a snapshot");
}

/// A background save reads the snapshot, on streams of its own, while the engine decodes on.
#[test]
fn a_background_save_has_the_bytes_of_a_blocking_one_of_the_same_moment() {
    let _cuda = alone();
    let engine = Engine::new();
    let mut ctx = small(true, &engine);
    let blocking = save(&mut ctx, 0, NONE);
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    fill_all(&engine, &ctx, 0xAB);
    let job = snapshot.get_data_in_background(vec![0; blocking.len()], None).expect("a job");
    fill_all(&engine, &ctx, 0xCD);
    engine.synchronize();
    same_bytes(&job.wait().expect("a state"), &blocking);
    assert!(is_all(&held(&ctx, 0, 0), 0xCD));
}

// Memory

const MIB: u64 = 1 << 20;

/// Eight planes of 256 KiB; two sequences in every other cell.
fn two_mib(staging: StagingParams) -> Context {
    let f16 = support::tensor(GgmlType::F16, 32);
    let kv = KvParams::new(4096, 4, LayerParams { k: f16, v: Some(f16) });
    let params = ContextParams { staging, ..on_device(2, &[kv], 0) };
    let mut ctx = Context::new(params).expect("a context");
    let seqs = [[0], [1]];
    let toks: Vec<_> = (0..4096)
        .map(|i| kvstate::context::UbatchToken {
            pos: i / 2,
            ext: CellExt::default(),
            seq_ids: &seqs[usize::from(i % 2 == 1)],
        })
        .collect();
    let slot = ctx.prepare(&toks).expect("a slot");
    ctx.commit(&slot).expect("cells");
    for (i, plane) in (0..).zip(planes(&ctx, 0, 0)) {
        place::write(plane, 0, &support::noise(&[i], 256 << 10));
    }
    ctx
}

/// The device has room for what is allocated now and `more` bytes.
fn limit(cuda: &Alone, more: u64) {
    cuda.set_memory_limit(0, usize::try_from(cuda.live().bytes + more).expect("small"));
}

fn staging_of(cuda: &Alone, cache: Live) -> StagingReport {
    let Live { bytes, pinned_bytes, .. } = cuda.live();
    StagingReport { device: bytes - cache.bytes, pinned: pinned_bytes - cache.pinned_bytes }
}

#[test]
fn staging_is_allocated_once_as_large_as_was_asked_for_and_reported() {
    let cuda = alone();
    let before = cuda.live();
    for (size, count, expected_size, expected_count) in [
        (64 << 10, 3, 64 << 10, 3),
        (MIB, 2, MIB, 2),
        // The default is larger than any state of this cache.
        (0, 0, 2 * MIB, 4),
    ] {
        let mut ctx = two_mib(StagingParams { size, count });
        let cache = cuda.live();
        assert_eq!(ctx.memory_usage().staging, StagingReport::default());
        let blob = save(&mut ctx, 0, NONE);
        // A move for each piece of a quarter of a buffer, and the cells, in a table whose size is a power of two.
        let n_move = MIB / (expected_size / 4).min(128 << 10);
        let table = (MOVE * n_move + 4 * 2048).next_power_of_two();
        let expected = StagingReport {
            device: 2 * expected_size + table,
            pinned: expected_count * expected_size + table,
        };
        assert_eq!(ctx.memory_usage().staging, expected, "{size} bytes, {count} buffers");
        assert_eq!(staging_of(&cuda, cache), expected);
        let held = cuda.live();
        restore(&mut ctx, &blob, 0, NONE);
        save(&mut ctx, 0, NONE);
        assert_eq!(cuda.live(), held, "nothing more for a second transfer");
        drop(ctx);
        assert_eq!(cuda.live(), before);
    }
}

/// Each of them has a set of buffers while it runs; those of two are kept for what comes next.
#[test]
fn staging_of_jobs_side_by_side_is_kept_for_two() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams { size: 64 << 10, count: 2 });
    let cache = cuda.live();
    let blob = save(&mut ctx, 0, NONE);
    let one = ctx.memory_usage().staging;
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    let all_run = Arc::new(Barrier::new(4));
    let jobs = [0; 4].map(|_| {
        let all_run = Arc::clone(&all_run);
        let mut is_first = true;
        let progress = ProgressCallback::new(move |_| {
            if std::mem::take(&mut is_first) {
                all_run.wait();
            }
            ControlFlow::Continue(())
        });
        snapshot.get_data_in_background(vec![0; blob.len()], Some(progress)).expect("a job")
    });
    for job in jobs {
        same_bytes(&job.wait().expect("a state"), &blob);
    }
    drop(snapshot);
    cuda.finish();
    let kept = ctx.memory_usage().staging;
    assert_eq!(kept, staging_of(&cuda, cache));
    assert!(kept.pinned > one.pinned && kept.pinned <= 2 * one.pinned, "{kept:?}, one set is {one:?}");
    assert!(kept.device > one.device && kept.device <= 2 * one.device, "{kept:?}, one set is {one:?}");
}

#[test]
fn one_pinned_buffer_is_refused() {
    let params = ContextParams {
        staging: StagingParams { size: 0, count: 1 },
        ..support::params(1, &[support::kv(16)])
    };
    let error = Context::new(params).expect_err("a refusal");
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(error.to_string().contains("n_staging: 1"), "{error}");
}

#[test]
fn with_little_memory_chunks_are_smaller() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams::default());
    let expected = save(&mut ctx, 0, NONE);
    drop(ctx);

    let mut ctx = two_mib(StagingParams::default());
    let cache = cuda.live();
    // Twice 2 MiB and 1 MiB do not fit, twice 256 KiB and the table do.
    limit(&cuda, 800 << 10);
    cuda.reset();
    let blob = save(&mut ctx, 0, NONE);
    same_bytes(&blob, &expected);
    assert_eq!(cuda.count("cuLaunchKernel"), MIB / (256 << 10));
    assert_eq!(ctx.memory_usage().staging, staging_of(&cuda, cache));
    assert!(
        (512 << 10..=800 << 10).contains(&ctx.memory_usage().staging.device),
        "{:?}",
        ctx.memory_usage().staging
    );
    assert!(
        (MIB..MIB + (64 << 10)).contains(&ctx.memory_usage().staging.pinned),
        "{:?}",
        ctx.memory_usage().staging
    );

    ctx.seq_rm(0, -1, -1).expect("a removal");
    restore(&mut ctx, &blob, 0, NONE);
    same_bytes(&save(&mut ctx, 0, NONE), &expected);
    no_limit(&cuda);
}

#[test]
fn without_room_for_the_smallest_buffers_nothing_changes() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams::default());
    let blob = save(&mut ctx, 0, NONE);
    drop(ctx);

    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("state");
    let mut ctx = two_mib(StagingParams::default());
    let (before, cache) = (image(&ctx), cuda.live());
    limit(&cuda, 100 << 10);
    let mut out = vec![0; blob.len()];
    let errors = [
        ctx.state_seq_get_data(&mut out, 0, NONE).expect_err("a save"),
        // It would overwrite the cells of the sequence.
        ctx.state_seq_set_data(&blob, 0, NONE).expect_err("a restore"),
        ctx.state_seq_save_file(&path, 0, &[]).expect_err("a file"),
    ];
    for error in errors {
        assert_eq!(error.status(), Status::OutOfMemory, "{error}");
        assert_eq!(error.to_string(), "out of memory: a staging buffer on the device needs 65536 bytes");
    }
    assert!(!path.exists());
    assert!(image(&ctx) == before);
    let Live { allocations, pinned, .. } = cuda.live();
    assert_eq!((allocations, pinned), (cache.allocations, cache.pinned));

    no_limit(&cuda);
    same_bytes(&save(&mut ctx, 0, NONE), &blob);
}

/// The kernels' table is the last thing that is allocated for a restore, and it may be what does not fit.
#[test]
fn without_room_for_the_table_a_restore_changes_nothing() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams::default());
    let blob = save(&mut ctx, 0, NONE);
    drop(ctx);

    let mut ctx = two_mib(StagingParams { size: 64 << 10, count: 2 });
    let before = image(&ctx);
    limit(&cuda, 128 << 10);
    let error = ctx.state_seq_set_data(&blob, 0, NONE).expect_err("a restore");
    assert_eq!(error.status(), Status::OutOfMemory, "{error}");
    assert!(image(&ctx) == before);
    no_limit(&cuda);
    restore(&mut ctx, &blob, 0, NONE);
    assert!(image(&ctx).cells == before.cells);
}

#[test]
fn a_snapshot_is_restored_without_staging() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams::default());
    let before = image(&ctx);
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    limit(&cuda, 0);
    // Over the cells of the sequence.
    ctx.seq_restore(&snapshot, 0).expect("a restore");
    assert!(image(&ctx).cells == before.cells);
    no_limit(&cuda);
}

#[test]
fn a_snapshot_that_does_not_fit_leaves_the_others() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams { size: 64 << 10, count: 2 });
    let expected = save(&mut ctx, 0, NONE);
    let before = image(&ctx);
    let first = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    let device_blob = save(&mut ctx, 0, ON_DEVICE);
    let held = cuda.live();
    limit(&cuda, MIB - 1);
    let mut out = vec![0; device_blob.len()];
    let errors = [
        ctx.seq_snapshot(0, NONE).expect_err("a snapshot"),
        ctx.snapshot().expect_err("a snapshot"),
        ctx.state_seq_get_data(&mut out, 0, ON_DEVICE).expect_err("a state"),
    ];
    for (error, bytes) in errors.into_iter().zip([MIB, 2 * MIB, MIB]) {
        assert_eq!(error.status(), Status::OutOfMemory, "{error}");
        assert_eq!(error.to_string(), format!("out of memory: a snapshot on the device needs {bytes} bytes"));
    }
    assert_eq!(cuda.live(), held);
    assert!(image(&ctx) == before);
    let mut blob = vec![0; expected.len()];
    first.get_data(&mut blob, None).expect("a state");
    same_bytes(&blob, &expected);
    restore(&mut ctx, &device_blob, 0, ON_DEVICE);
    same_bytes(&save(&mut ctx, 0, NONE), &expected);
    no_limit(&cuda);
}

#[test]
fn a_cache_that_does_not_fit_is_refused_and_leaves_nothing() {
    let cuda = alone();
    let device = storage::Device::open(0).expect("device 0");
    let before = cuda.live();
    limit(&cuda, 1000);
    let error = Context::new(on_device(2, &[support::kv(64)], 0)).expect_err("a refusal");
    // Two layers of K rows of 8 bytes and V rows of 4.
    assert_eq!(error.to_string(), "out of memory: the cache on the device needs 1536 bytes");
    assert_eq!(error.status(), Status::OutOfMemory);
    no_limit(&cuda);
    drop(Context::new(on_device(2, &[support::kv(64)], 0)).expect("a context"));
    assert_eq!(cuda.live(), before);
    drop(device);
}

#[test]
fn a_cancelled_transfer_leaves_nothing() {
    let cuda = alone();
    let mut ctx = two_mib(StagingParams { size: 64 << 10, count: 2 });
    let expected = save(&mut ctx, 0, NONE);
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    let held = cuda.live();
    let mut out = vec![0; expected.len()];
    let mut calls = 0;
    let mut progress = ProgressCallback::new(move |_| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let error = snapshot.get_data(&mut out, Some(&mut progress)).expect_err("cancelled");
    assert!(matches!(error, Error::Cancelled { total: MIB, .. }), "{error}");
    assert_eq!((cuda.live(), cuda.pending()), (held, 0));
    snapshot.get_data(&mut out, None).expect("a state");
    same_bytes(&out, &expected);
}
