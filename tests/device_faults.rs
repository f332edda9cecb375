//! Every call of the driver fails once, in everything that a cache on a device does: the error names the call, nothing leaks,
//! the cache is what docs/semantics.md promises, and the next call works.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(missing_docs, reason = "a test")]

mod gpu;
mod support;

use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use gpu::{Engine, alone, no_context, on_device, staged};
use kvstate::context::{Checkpoint, Checkpoints, CheckpointsParams, Shift, Snapshot};
use kvstate::error::{Error, Result, Status};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, RopeParams};
use kvstate::types::{Pos, RopeType, SeqId, StateFlags};
use kvstate::{Context, ContextParams, storage};
use support::place::fakecuda::{Alone, LAUNCH_FAILED, OUT_OF_MEMORY, UNKNOWN};
use support::{
    Held, Image, NONE, ON_DEVICE, decode, held, image, kv, planes, restore, save, standard, tensor,
};
use tempfile::TempDir;

const CODES: [(i32, &str); 3] = [
    (OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
    (LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"),
    (UNKNOWN, "CUDA_ERROR_UNKNOWN"),
];

/// The calls that the library makes and whose failure it can act on. Those that give things back are not failed: nobody could
/// do better than to go on.
const CALLS: [&str; 24] = [
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemHostAlloc",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemsetD8Async",
    "cuLaunchKernel",
    "cuMemHostRegister_v2",
    "cuPointerGetAttribute",
];

/// What a call is tried on.
trait Scene {
    fn act(&mut self) -> Result<()>;

    /// It has been done.
    fn check_done(&self);

    /// It has failed.
    fn check_failed(&self);
}

/// Lets each call of the driver in `act` fail, one at a time and in each way.
fn each_failure<S: Scene>(cuda: &Alone, make: impl Fn() -> S) {
    each_failure_but(cuda, &[], make);
}

/// As [`each_failure`]; a failure of `unnoticed` may go unnoticed: one where something is given back or dropped when all has been
/// done, or memory for a snapshot, which is asked for once more when staging has been freed.
fn each_failure_but<S: Scene>(cuda: &Alone, unnoticed: &[&str], make: impl Fn() -> S) {
    // Which calls there are.
    let mut scene = make();
    no_context();
    cuda.reset();
    scene.act().expect("no failure");
    let counts = CALLS.map(|call| (call, cuda.count(call)));
    scene.check_done();
    drop(scene);
    assert!(counts.iter().map(|(_, n)| n).sum::<u64>() >= 3, "{counts:?}");
    let before = cuda.live();
    for (code, name) in CODES {
        for (call, n) in counts {
            for nth in 1..=u32::try_from(n).expect("few") {
                let what = format!("{call} {nth} of {n}: {name}");
                let mut scene = make();
                no_context();
                cuda.reset();
                cuda.fail(call, nth, code);
                let result = scene.act();
                assert_eq!(cuda.injected(), 1, "{what}");
                cuda.reset();
                if let Err(error) = result {
                    check_error(&error, call, (code, name), &what);
                    scene.check_failed();
                } else {
                    // With the last two the current context of the caller's thread is given back.
                    let may = [unnoticed, &["cuCtxGetCurrent", "cuCtxSetCurrent"]].concat();
                    assert!(may.contains(&call), "{what}: went unnoticed");
                    scene.check_done();
                }
                scene.act().unwrap_or_else(|error| panic!("{what}: the next call fails: {error}"));
                scene.check_done();
                drop(scene);
                cuda.finish();
                assert_eq!(cuda.live(), before, "{what}: a leak");
            }
        }
    }
}

fn check_error(error: &Error, call: &str, (code, name): (i32, &str), what: &str) {
    let text = error.to_string();
    match error.status() {
        Status::OutOfMemory => {
            let allocates = ["cuMemAlloc_v2", "cuMemAllocAsync", "cuMemHostAlloc"].contains(&call);
            assert!(allocates && code == OUT_OF_MEMORY && text.contains("out of memory: "), "{what}: {text}");
        }
        Status::Device => {
            let expected = [0, 1].map(|device| format!("{call} on device {device}: {name} ({code})"));
            assert!(expected.iter().any(|expected| text.contains(expected)), "{what}: {text}");
        }
        // Its reason is the device's.
        Status::ShiftFailed => {
            let expected = format!("{call} on device 0: {name} ({code})");
            assert!(text.contains(&expected) || text.contains("out of memory: "), "{what}: {text}");
        }
        status => panic!("{what}: {status:?}: {text}"),
    }
}

// Contexts

/// Two sections of two layers: the sequences 0 and 1 have five and three cells in each, 2 has none.
fn filled(kv_size: u32) -> Context {
    filled_with(on_device(3, &[kv(kv_size), standard(kv_size, 8)], 0))
}

fn filled_with(params: ContextParams) -> Context {
    // A chunk is a few rows.
    let mut ctx = staged(params, 64, 2);
    decode(&mut ctx, 0, 0..5);
    decode(&mut ctx, 1, 0..3);
    ctx
}

/// All sequences in all sections.
fn contents(ctx: &Context) -> Vec<Vec<Held>> {
    (0..ctx.n_section()).flat_map(|section| (0..3).map(move |seq| held(ctx, section, seq))).collect()
}

/// Used cells with their bytes, and where the next token goes.
fn used(ctx: &Context) -> Image {
    let mut image = image(ctx);
    image.cells.retain(|_, cell| cell.meta.is_some());
    image
}

fn held_everywhere(ctx: &Context, seq: SeqId) -> Vec<Vec<Held>> {
    (0..ctx.n_section()).map(|section| held(ctx, section, seq)).collect()
}

/// A sequence is in no section, and no cell that nobody uses holds anything.
fn is_zeroed(ctx: &Context, seq: SeqId) -> bool {
    held_everywhere(ctx, seq).iter().all(Vec::is_empty)
        && image(ctx)
            .cells
            .values()
            .filter(|cell| cell.meta.is_none())
            .all(|cell| cell.bytes.iter().flatten().all(|&byte| byte == 0))
}

// Scenes

/// A scene of a context and what a call does to it.
struct Case<A, D, F> {
    ctx: Context,
    before: Image,
    act: A,
    is_done: D,
    is_as_promised: F,
}

impl<A, D, F> Scene for Case<A, D, F>
where
    A: FnMut(&mut Context) -> Result<()>,
    D: Fn(&Context) -> bool,
    F: Fn(&Context, &Image) -> bool,
{
    fn act(&mut self) -> Result<()> {
        (self.act)(&mut self.ctx)
    }

    fn check_done(&self) {
        assert!((self.is_done)(&self.ctx), "what was to be done is not: {:?}", contents(&self.ctx));
    }

    fn check_failed(&self) {
        let is_kept = (self.is_as_promised)(&self.ctx, &self.before);
        assert!(is_kept, "a failed call left {:?}", contents(&self.ctx));
    }
}

/// What failed has changed nothing that is in use.
fn nothing(ctx: &Context, before: &Image) -> bool {
    used(ctx) == *before
}

fn case<A, D, F>(ctx: Context, act: A, is_done: D, is_as_promised: F) -> Case<A, D, F>
where
    A: FnMut(&mut Context) -> Result<()>,
    D: Fn(&Context) -> bool,
    F: Fn(&Context, &Image) -> bool,
{
    let before = used(&ctx);
    Case { ctx, before, act, is_done, is_as_promised }
}

/// A call that reads: what it gave has to be `expected`.
fn reads<T: PartialEq + 'static>(
    ctx: Context,
    expected: T,
    mut read: impl FnMut(&mut Context) -> Result<T>,
) -> impl Scene {
    let got = std::rc::Rc::new(std::cell::RefCell::new(None));
    let result = std::rc::Rc::clone(&got);
    case(
        ctx,
        move |ctx| {
            got.replace(None);
            got.replace(Some(read(ctx)?));
            Ok(())
        },
        move |_| result.borrow().as_ref() == Some(&expected),
        nothing,
    )
}

fn state(ctx: &mut Context, flags: StateFlags) -> Result<Vec<u8>> {
    let mut blob = vec![0; usize::try_from(ctx.state_seq_get_size(0, flags)?).expect("small")];
    ctx.state_seq_get_data(&mut blob, 0, flags)?;
    Ok(blob)
}

fn bytes_of(snapshot: &Snapshot) -> Result<Vec<u8>> {
    let mut blob = vec![0; usize::try_from(snapshot.size()).expect("small")];
    snapshot.get_data(&mut blob, None)?;
    Ok(blob)
}

/// A state of sequence 0 of another context.
fn foreign() -> Vec<u8> {
    let mut ctx = Context::new(support::params(3, &[kv(32), standard(32, 8)])).expect("a context");
    decode(&mut ctx, 1, 0..2);
    decode(&mut ctx, 0, 0..5);
    save(&mut ctx, 0, NONE)
}

/// What the cells of sequence 0 hold in every context here.
fn expected(seq: SeqId) -> Vec<Vec<Held>> {
    let ctx = filled_with(support::params(3, &[kv(32), standard(32, 8)]));
    held_everywhere(&ctx, seq)
}

/// The device stays open between the scenes.
fn open() -> (Alone, std::sync::Arc<storage::Device>) {
    let cuda = alone();
    let device = storage::Device::open(0).expect("device 0");
    (cuda, device)
}

// Creation

struct Creation(Option<Context>);

impl Scene for Creation {
    fn act(&mut self) -> Result<()> {
        self.0 = None;
        self.0 = Some(Context::new(on_device(3, &[kv(16), standard(8, 4)], 0))?);
        Ok(())
    }

    fn check_done(&self) {
        let ctx = self.0.as_ref().expect("a context");
        assert!(is_zeroed(ctx, 0));
    }

    fn check_failed(&self) {
        assert!(self.0.is_none());
    }
}

#[test]
fn a_context_is_created_or_leaves_nothing() {
    let cuda = alone();
    // With the first context the device is opened, and closed with the last.
    each_failure(&cuda, || Creation(None));
    assert_eq!(cuda.live().contexts, 0);
}

// Saves

#[test]
fn a_save_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let expected = save(&mut filled(16), 0, NONE);
    each_failure(&cuda, || reads(filled(16), expected.clone(), |ctx| state(ctx, NONE)));
}

#[test]
fn a_save_through_lanes_that_are_there_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let expected = save(&mut filled(16), 0, NONE);
    let make = || {
        let mut ctx = filled(16);
        save(&mut ctx, 0, NONE);
        reads(ctx, expected.clone(), |ctx| state(ctx, NONE))
    };
    each_failure(&cuda, make);
}

#[test]
fn a_save_of_the_whole_context_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let whole = |ctx: &mut Context| {
        let mut blob = vec![0; usize::try_from(ctx.state_get_size()?).expect("small")];
        ctx.state_get_data(&mut blob)?;
        Ok(blob)
    };
    let expected = whole(&mut filled(16)).expect("a state");
    each_failure(&cuda, || reads(filled(16), expected.clone(), whole));
}

#[test]
fn an_on_device_save_fails_and_the_state_before_it_is_there() {
    let (cuda, _device) = open();
    let make = || {
        let mut ctx = filled(16);
        let mut live = save(&mut ctx, 0, ON_DEVICE);
        let act = move |ctx: &mut Context| {
            ctx.seq_rm(2, -1, -1)?;
            match state(ctx, ON_DEVICE) {
                Ok(blob) => live = blob,
                Err(error) => {
                    restore(ctx, &live, 2, ON_DEVICE);
                    assert_eq!(held_everywhere(ctx, 2), expected(0));
                    ctx.seq_rm(2, -1, -1)?;
                    return Err(error);
                }
            }
            ctx.state_seq_set_data(&live, 2, ON_DEVICE).map(drop)
        };
        let is_as_promised = |ctx: &Context, before: &Image| used(ctx).cells == before.cells;
        case(ctx, act, |ctx| held_everywhere(ctx, 2) == expected(0), is_as_promised)
    };
    each_failure_but(&cuda, &["cuStreamWaitEvent", "cuMemAllocAsync"], make);
}

#[test]
fn a_file_save_fails_and_the_old_file_stays() {
    let (cuda, _device) = open();
    let dir = tempfile::tempdir().expect("a folder");
    let new_file = dir.path().join("new");
    filled(16).state_seq_save_file(&new_file, 0, &[1, 2]).expect("a file");
    let (new, path) = (fs::read(new_file).expect("a file"), dir.path().join("state"));
    let make = || {
        fs::write(&path, b"the old file").expect("a file");
        let (new, done, failed, path) = (new.clone(), path.clone(), path.clone(), path.clone());
        case(
            filled(16),
            move |ctx| ctx.state_seq_save_file(&path, 0, &[1, 2]).map(drop),
            move |_| fs::read(&done).is_ok_and(|bytes| bytes == new),
            move |ctx, before| {
                nothing(ctx, before) && fs::read(&failed).is_ok_and(|bytes| bytes == b"the old file")
            },
        )
    };
    each_failure_but(&cuda, &["cuStreamSynchronize"], make);
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 2, "files are left behind");
}

// Restores

/// What a restore over cells that are in use may leave: everything as it was, or the destination empty, its cells zeroed, and
/// the other sequence intact.
fn all_or_empty(ctx: &Context, before: &Image) -> bool {
    nothing(ctx, before) || (is_zeroed(ctx, 0) && held_everywhere(ctx, 1) == expected(1))
}

#[test]
fn a_restore_into_free_cells_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let blob = foreign();
    let make = || {
        let act = |ctx: &mut Context| {
            ctx.seq_rm(2, -1, -1)?;
            ctx.state_seq_set_data(&blob, 2, NONE).map(drop)
        };
        case(filled(16), act, |ctx| held_everywhere(ctx, 2) == expected(0), nothing)
    };
    each_failure(&cuda, make);
}

#[test]
fn a_restore_over_used_cells_fails_and_leaves_all_or_an_empty_destination() {
    let (cuda, _device) = open();
    let blob = foreign();
    let make = || {
        // No cell is free.
        let act = |ctx: &mut Context| ctx.state_seq_set_data(&blob, 0, NONE).map(drop);
        case(filled(8), act, |ctx| held_everywhere(ctx, 0) == expected(0), all_or_empty)
    };
    each_failure(&cuda, make);
}

// Conversion

/// The sections of `filled` in another layout, and in other types.
fn converted(kv_size: u32) -> [KvParams; 2] {
    let layer = LayerParams { k: tensor(GgmlType::F32, 4), v: Some(tensor(GgmlType::BF16, 2)) };
    let swa = KvParams { layers: vec![layer; 2], ..standard(kv_size, 8) };
    [KvParams { v_trans: true, ..kv(kv_size) }, swa]
}

/// What a context in host memory makes of the sequences of `filled`, and of `foreign` in sequence 2.
fn expected_converted() -> [Vec<Vec<Held>>; 2] {
    let params = ContextParams { convert_types: true, ..support::params(3, &converted(16)) };
    let mut ctx = filled_with(params);
    restore(&mut ctx, &foreign(), 2, NONE);
    [1, 2].map(|seq| held_everywhere(&ctx, seq))
}

fn converting(kv_size: u32) -> Context {
    filled_with(ContextParams { convert_types: true, ..on_device(3, &converted(kv_size), 0) })
}

#[test]
fn a_converting_restore_into_free_cells_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let (blob, [_, expected]) = (foreign(), expected_converted());
    let make = || {
        let act = |ctx: &mut Context| {
            ctx.seq_rm(2, -1, -1)?;
            ctx.state_seq_set_data(&blob, 2, NONE).map(drop)
        };
        case(converting(16), act, |ctx| held_everywhere(ctx, 2) == expected, nothing)
    };
    each_failure(&cuda, make);
}

#[test]
fn a_converting_restore_over_used_cells_fails_and_leaves_all_or_an_empty_destination() {
    let (cuda, _device) = open();
    let (blob, [other, expected]) = (foreign(), expected_converted());
    let make = || {
        // No cell is free.
        let act = |ctx: &mut Context| ctx.state_seq_set_data(&blob, 0, NONE).map(drop);
        case(
            converting(8),
            act,
            |ctx| held_everywhere(ctx, 0) == expected,
            |ctx, before| nothing(ctx, before) || (is_zeroed(ctx, 0) && held_everywhere(ctx, 1) == other),
        )
    };
    each_failure(&cuda, make);
}

#[test]
fn a_converting_load_of_a_file_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let (_dir, path) = file();
    let expected = {
        let params = ContextParams { convert_types: true, ..support::params(3, &converted(16)) };
        let mut ctx = filled_with(params);
        ctx.state_seq_load_file(&path, 2, 0).expect("a state");
        held_everywhere(&ctx, 2)
    };
    let make = || {
        let act = |ctx: &mut Context| {
            ctx.seq_rm(2, -1, -1)?;
            ctx.state_seq_load_file(&path, 2, 0).map(drop)
        };
        case(converting(16), act, |ctx| held_everywhere(ctx, 2) == expected, nothing)
    };
    each_failure(&cuda, make);
}

// Files

/// A file of sequence 0.
fn file() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("state");
    filled_with(support::params(3, &[kv(32), standard(32, 8)]))
        .state_seq_save_file(&path, 0, &[])
        .expect("a file");
    (dir, path)
}

#[test]
fn a_file_load_into_free_cells_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let (_dir, path) = file();
    let make = || {
        let act = |ctx: &mut Context| {
            ctx.seq_rm(2, -1, -1)?;
            ctx.state_seq_load_file(&path, 2, 0).map(drop)
        };
        case(filled(16), act, |ctx| held_everywhere(ctx, 2) == expected(0), nothing)
    };
    each_failure(&cuda, make);
}

#[test]
fn a_file_load_over_used_cells_fails_and_leaves_all_or_an_empty_destination() {
    let (cuda, _device) = open();
    let (_dir, path) = file();
    let make = || {
        let act = |ctx: &mut Context| ctx.state_seq_load_file(&path, 0, 0).map(drop);
        case(filled(8), act, |ctx| held_everywhere(ctx, 0) == expected(0), all_or_empty)
    };
    each_failure(&cuda, make);
}

// Snapshots

#[test]
fn a_snapshot_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let mut ctx = filled(16);
    let blob = save(&mut ctx, 0, NONE);
    drop(ctx);
    // It is read when nothing fails any more.
    let make = || {
        let taken = std::rc::Rc::new(std::cell::RefCell::new(None::<Snapshot>));
        let result = std::rc::Rc::clone(&taken);
        let act = move |ctx: &mut Context| {
            taken.replace(None);
            taken.replace(Some(ctx.seq_snapshot(0, NONE)?));
            Ok(())
        };
        let is_done = {
            let blob = blob.clone();
            move |_: &Context| {
                result.borrow().as_ref().is_some_and(|taken| bytes_of(taken).expect("a state") == blob)
            }
        };
        case(filled(16), act, is_done, nothing)
    };
    each_failure_but(&cuda, &["cuMemAllocAsync"], make);
}

#[test]
fn a_restore_of_a_snapshot_into_free_cells_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    let make = || {
        let mut ctx = filled(16);
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        let act = move |ctx: &mut Context| {
            ctx.seq_rm(2, -1, -1)?;
            ctx.seq_restore(&snapshot, 2)
        };
        case(ctx, act, |ctx| held_everywhere(ctx, 2) == expected(0), nothing)
    };
    each_failure(&cuda, make);
}

#[test]
fn a_restore_of_a_snapshot_over_used_cells_fails_and_leaves_all_or_an_empty_destination() {
    let (cuda, _device) = open();
    let make = || {
        let mut ctx = filled(8);
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        let act = move |ctx: &mut Context| ctx.seq_restore(&snapshot, 0);
        case(ctx, act, |ctx| held_everywhere(ctx, 0) == expected(0), all_or_empty)
    };
    each_failure(&cuda, make);
}

#[test]
fn a_snapshot_of_another_device_over_used_cells_fails_and_leaves_all_or_an_empty_destination() {
    let (cuda, _device) = open();
    let _other = storage::Device::open(1).expect("device 1");
    let mut source = filled_with(on_device(3, &[kv(16), standard(16, 8)], 1));
    let snapshot = source.seq_snapshot(0, NONE).expect("a snapshot");
    drop(source);
    // What has to come from the other device is there before a cell is taken.
    let mut ctx = filled(8);
    let before = used(&ctx);
    cuda.fail("cuMemcpyDtoHAsync_v2", 1, UNKNOWN);
    ctx.seq_restore(&snapshot, 0).expect_err("a copy that fails");
    assert_eq!(used(&ctx), before);
    drop(ctx);
    cuda.reset();
    let make = || {
        let snapshot = snapshot.clone();
        let act = move |ctx: &mut Context| ctx.seq_restore(&snapshot, 0);
        case(filled(8), act, |ctx| held_everywhere(ctx, 0) == expected(0), all_or_empty)
    };
    each_failure(&cuda, make);
}

// Checkpoints

/// What is done with checkpoints, and what is in the way.
struct WithCheckpoints {
    ctx: Context,
    taken: Checkpoints,
    act: fn(&mut Context, &mut Checkpoints) -> Result<()>,
    is_done: fn(&Context, &Checkpoints) -> bool,
    is_as_promised: fn(&Context, &Checkpoints) -> bool,
}

impl WithCheckpoints {
    /// One checkpoint behind 8 tokens, then 12 more: the window's cells before 8 are taken over.
    fn new(
        act: fn(&mut Context, &mut Checkpoints) -> Result<()>,
        is_done: fn(&Context, &Checkpoints) -> bool,
        is_as_promised: fn(&Context, &Checkpoints) -> bool,
    ) -> Self {
        let mut ctx = staged(on_device(3, &[kv(32), standard(12, 4)], 0), 64, 2);
        let mut taken = Checkpoints::new(0, CheckpointsParams::default()).expect("parameters");
        decode(&mut ctx, 0, 0..8);
        taken.take(&mut ctx, 8).expect("a checkpoint");
        support::generate(&mut ctx, 0, 8..20);
        Self { ctx, taken, act, is_done, is_as_promised }
    }
}

impl Scene for WithCheckpoints {
    fn act(&mut self) -> Result<()> {
        (self.act)(&mut self.ctx, &mut self.taken)
    }

    fn check_done(&self) {
        assert!((self.is_done)(&self.ctx, &self.taken), "{:?}: {:?}", self.taken, contents(&self.ctx));
    }

    fn check_failed(&self) {
        assert!((self.is_as_promised)(&self.ctx, &self.taken), "{:?}: {:?}", self.taken, contents(&self.ctx));
    }
}

fn ends(taken: &Checkpoints) -> Vec<u64> {
    taken.as_slice().iter().map(Checkpoint::n_tokens).collect()
}

/// Positions in both sections, which hold what was decoded there.
fn positions_are(ctx: &Context, base: Range<Pos>, swa: Range<Pos>) -> bool {
    [base, swa]
        .into_iter()
        .enumerate()
        .all(|(section, range)| support::positions(ctx, section, 0).into_iter().eq(range))
        && support::is_intact(ctx, 0, 0)
}

#[test]
fn a_checkpoint_fails_and_those_before_it_stay() {
    let (cuda, _device) = open();
    each_failure_but(&cuda, &["cuMemAllocAsync"], || {
        WithCheckpoints::new(
            |ctx, taken| taken.take(ctx, 20).map(drop),
            |_, taken| ends(taken) == [8, 20],
            |ctx, taken| ends(taken) == [8] && positions_are(ctx, 0..20, 8..20),
        )
    });
}

#[test]
fn going_back_to_a_checkpoint_fails_and_can_be_tried_again() {
    let (cuda, _device) = open();
    each_failure(&cuda, || {
        WithCheckpoints::new(
            |ctx, taken| taken.resume(ctx, 9).map(drop),
            |ctx, taken| ends(taken) == [8] && positions_are(ctx, 0..8, 4..8),
            |ctx, taken| {
                let window = [8..20, 0..0].into_iter().any(|window| positions_are(ctx, 0..20, window));
                ends(taken) == [8] && window
            },
        )
    });
}

#[test]
fn reading_a_snapshot_fails_and_the_snapshot_stays() {
    let (cuda, _device) = open();
    let blob = save(&mut filled(16), 0, NONE);
    let make = || {
        let mut ctx = filled(16);
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        reads(ctx, blob.clone(), move |_| bytes_of(&snapshot))
    };
    each_failure(&cuda, make);
}

#[test]
fn a_background_save_fails_and_the_snapshot_stays() {
    let (cuda, _device) = open();
    let blob = save(&mut filled(16), 0, NONE);
    let make = || {
        let mut ctx = filled(16);
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        let size = blob.len();
        reads(ctx, blob.clone(), move |_| snapshot.get_data_in_background(vec![0; size], None)?.wait())
    };
    each_failure(&cuda, make);
}

#[test]
fn a_background_save_to_a_file_fails_and_the_old_file_stays() {
    let (cuda, _device) = open();
    let dir = tempfile::tempdir().expect("a folder");
    let new_file = dir.path().join("new");
    filled(16).state_seq_save_file(&new_file, 0, &[1, 2]).expect("a file");
    let (new, path) = (fs::read(new_file).expect("a file"), dir.path().join("state"));
    let make = || {
        fs::write(&path, b"the old file").expect("a file");
        let (new, done, failed, path) = (new.clone(), path.clone(), path.clone(), path.clone());
        let mut ctx = filled(16);
        let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
        case(
            ctx,
            move |_| snapshot.save_file_in_background(&path, &[1, 2], false, None)?.wait().map(drop),
            move |_| fs::read(&done).is_ok_and(|bytes| bytes == new),
            move |ctx, before| {
                nothing(ctx, before) && fs::read(&failed).is_ok_and(|bytes| bytes == b"the old file")
            },
        )
    };
    each_failure_but(&cuda, &["cuStreamSynchronize"], make);
}

// The rest

#[test]
fn clearing_the_data_fails_and_no_cell_is_used() {
    let (cuda, _device) = open();
    let make = || {
        let act = |ctx: &mut Context| ctx.clear(true);
        let is_empty = |ctx: &Context, _: &Image| used(ctx).cells.is_empty();
        case(filled(16), act, |ctx| (0..3).all(|seq| is_zeroed(ctx, seq)), is_empty)
    };
    each_failure(&cuda, make);
}

/// Sequence 0 of every section is three positions further, and K of it to be rotated.
fn shifted(params: ContextParams) -> Context {
    let rope = || vec![Some(RopeParams::new(RopeType::Normal, 4)); 2];
    let mut ctx = filled_with(ContextParams { shift: Shift::Rope(vec![rope(), rope()]), ..params });
    ctx.seq_add(0, 0, -1, 3).expect("a shift");
    ctx
}

#[test]
fn a_shift_fails_and_is_pending_or_has_emptied_what_it_half_rotated() {
    let (cuda, _device) = open();
    let sections = [kv(16), standard(16, 8)];
    let mut host = shifted(support::params(3, &sections));
    let before = held_everywhere(&host, 0);
    host.apply_pending_shifts().expect("memory of the host");
    let after = held_everywhere(&host, 0);
    assert!(before.iter().zip(&after).all(|(before, after)| before != after));
    let n_emptied = std::cell::Cell::new(0);
    each_failure(&cuda, || {
        let is_emptied = std::rc::Rc::new(std::cell::Cell::new(false));
        let may_be_empty = std::rc::Rc::clone(&is_emptied);
        let is_done = {
            let after = after.clone();
            move |ctx: &Context| {
                let held = held_everywhere(ctx, 0);
                held == after || (may_be_empty.get() && held.iter().all(Vec::is_empty))
            }
        };
        let (before, after, n_emptied) = (&before, &after, &n_emptied);
        let is_as_promised = move |ctx: &Context, _: &Image| {
            let held = held_everywhere(ctx, 0);
            is_emptied.set(held.iter().all(Vec::is_empty));
            n_emptied.set(n_emptied.get() + u32::from(is_emptied.get()));
            // Each section is rotated by itself.
            let is_whole = (0..held.len()).all(|s| {
                let is_pending = ctx.pending_shifts(s, 0).expect("a stream").next().is_some();
                held[s] == if is_pending { &before[s] } else { &after[s] }.as_slice()
            });
            (is_emptied.get() || is_whole) && held_everywhere(ctx, 1) == expected(1)
        };
        let ctx = shifted(on_device(3, &sections, 0));
        case(ctx, Context::apply_pending_shifts, is_done, is_as_promised)
    });
    assert!(n_emptied.get() > 0, "no failure came after the first row was rotated");
}

/// Streams of their own for three sequences.
fn streams() -> Context {
    filled_with(ContextParams { unified: false, ..on_device(3, &[kv(8), standard(8, 8)], 0) })
}

#[test]
fn a_copy_between_streams_fails_and_the_destination_is_empty() {
    let (cuda, _device) = open();
    let make = || {
        let act = |ctx: &mut Context| ctx.seq_cp(0, 1, -1, -1);
        let is_as_promised = |ctx: &Context, _: &Image| {
            held_everywhere(ctx, 1).iter().all(Vec::is_empty) && held_everywhere(ctx, 0) == expected(0)
        };
        case(streams(), act, |ctx| held_everywhere(ctx, 1) == expected(0), is_as_promised)
    };
    each_failure(&cuda, make);
}

#[test]
fn calls_behind_the_callers_stream_fail_and_keep_their_promises() {
    let (cuda, _device) = open();
    let engine = Engine::new();
    let blob = foreign();
    let with_stream = |kv_size: u32| {
        let mut ctx = filled(kv_size);
        ctx.set_stream(engine.stream());
        ctx
    };
    each_failure(&cuda, || reads(with_stream(16), blob_of_filled(), |ctx| state(ctx, NONE)));
    each_failure(&cuda, || {
        let act = |ctx: &mut Context| ctx.state_seq_set_data(&blob, 0, NONE).map(drop);
        // The cells are zeroed behind the stream.
        let is_as_promised = |ctx: &Context, before: &Image| {
            engine.synchronize();
            all_or_empty(ctx, before)
        };
        case(with_stream(8), act, |ctx| held_everywhere(ctx, 0) == expected(0), is_as_promised)
    });
    each_failure_but(&cuda, &["cuStreamWaitEvent", "cuMemAllocAsync"], || {
        reads(with_stream(16), blob_of_filled(), |ctx| {
            let snapshot = ctx.seq_snapshot(0, NONE)?;
            bytes_of(&snapshot)
        })
    });
    each_failure(&cuda, || {
        let act = |ctx: &mut Context| ctx.clear(true);
        let is_done = |ctx: &Context| {
            engine.synchronize();
            (0..3).all(|seq| is_zeroed(ctx, seq))
        };
        // A stream that cannot be asked is noticed before anything is cleared.
        let is_as_promised =
            |ctx: &Context, before: &Image| used(ctx).cells.is_empty() || nothing(ctx, before);
        case(with_stream(16), act, is_done, is_as_promised)
    });
}

fn blob_of_filled() -> Vec<u8> {
    save(&mut filled(16), 0, NONE)
}

#[test]
fn reading_and_writing_a_plane_fails_and_leaves_nothing_behind() {
    let (cuda, _device) = open();
    let make = || {
        let ctx = filled(16);
        let expected = support::place::read(planes(&ctx, 0, 0)[0], 8, 16);
        reads(ctx, expected, |ctx| {
            let mut bytes = vec![0; 16];
            planes(ctx, 0, 0)[0].get(8, &mut bytes, &storage::Transfer::default())?;
            Ok(bytes)
        })
    };
    each_failure_but(&cuda, &["cuStreamSynchronize"], make);
}
