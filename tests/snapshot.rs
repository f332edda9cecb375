//! Snapshots: the state of one moment, whatever becomes of the cache; and saves in the background.

mod common;
mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::whole_state;
use kvstate::context::{Snapshot, UbatchToken};
use kvstate::error::Error;
use kvstate::format::GgmlType;
use kvstate::memory::{KvMemory, KvParams, LayerParams, SectionParams};
use kvstate::storage::{
    CellMap, Device, Plane, PlaneShape, Progress, ProgressCallback, Region, Scatter, StagingParams,
    TensorCopies, Transfer, scatter,
};
use kvstate::types::{CellExt, SeqId, StateFlags};
use kvstate::{Context, ContextParams, Status};
use support::place::{self, Place};
use support::{NONE, ON_DEVICE, PARTIAL, decode, held, image, kv, save};

/// What is saved: a sequence with flags, or the whole context.
#[derive(Clone, Copy, Debug)]
enum What {
    Seq(SeqId, StateFlags),
    Whole,
}

const ALL: [What; 4] = [What::Seq(0, NONE), What::Seq(0, PARTIAL), What::Seq(1, NONE), What::Whole];

impl What {
    fn blocking(self, ctx: &mut Context) -> Vec<u8> {
        match self {
            Self::Seq(seq, flags) => save(ctx, seq, flags),
            Self::Whole => whole_state(ctx),
        }
    }

    fn blocking_file(self, ctx: &mut Context, path: &Path) -> u64 {
        match self {
            Self::Seq(seq, _) => ctx.state_seq_save_file(path, seq, &[7, 8]),
            Self::Whole => ctx.state_save_file(path, &[7, 8]),
        }
        .expect("a file")
    }

    fn snapshot(self, ctx: &mut Context) -> Snapshot {
        match self {
            Self::Seq(seq, flags) => ctx.seq_snapshot(seq, flags),
            Self::Whole => ctx.snapshot(),
        }
        .expect("a snapshot")
    }
}

/// Three sequences, with holes between their cells and with shared ones, before a window.
fn sections() -> Vec<KvParams> {
    let transposed = KvParams { v_trans: true, ..support::standard(40, 6) };
    vec![kv(40), transposed]
}

fn worn() -> Context {
    let mut ctx = support::context(4, &sections());
    wear(&mut ctx);
    ctx
}

fn wear(ctx: &mut Context) {
    decode(ctx, 0, 0..7);
    decode(ctx, 1, 0..5);
    decode(ctx, 0, 7..12);
    assert!(ctx.seq_rm(1, 1, 3).expect("a removal"));
    ctx.seq_cp(0, 2, 0, 4).expect("a copy");
}

/// Megabytes, so that a save has several reports to make.
fn large() -> Context {
    let tensor = support::tensor(GgmlType::F16, 2048);
    let kv = KvParams::new(512, 1, LayerParams { k: tensor, v: Some(tensor) });
    let staging = StagingParams { size: 256 << 10, count: 2 };
    let mut ctx = place::context(ContextParams { staging, ..support::params(2, &[kv]) }).expect("a context");
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
    let slot = ctx.prepare(&(0..512).map(token).collect::<Vec<_>>()).expect("a slot");
    ctx.commit(&slot).expect("a slot");
    ctx
}

fn bytes(snapshot: &Snapshot) -> Vec<u8> {
    let mut out = vec![0xAA; usize::try_from(snapshot.size()).expect("a size")];
    assert_eq!(snapshot.get_data(&mut out, None).expect("a state"), out.len());
    out
}

/// The same model in host memory and on every device, under names.
fn everywhere(sections: &[KvParams]) -> Vec<(String, Context)> {
    let memories = place::devices().into_iter().map(Some).chain([None]);
    let context = |device: Option<i32>| {
        let sections = sections.iter().map(|kv| {
            let memory = device
                .map_or(KvMemory::Host, |ordinal| KvMemory::Devices(vec![Some(ordinal); kv.layers.len()]));
            SectionParams::Kv { kv: kv.clone(), memory }
        });
        let staging = StagingParams { size: 64, count: 2 };
        let params = ContextParams { staging, ..ContextParams::new(4, sections.collect()) };
        (format!("device {device:?}"), Context::new(params).expect("a context"))
    };
    memories.map(context).collect()
}

// The moment

/// What happens to a context, and what it is called.
type Change<'a> = (&'static str, &'a dyn Fn(&mut Context));

#[test]
fn a_snapshot_has_the_bytes_of_a_save_of_the_same_moment_whatever_happens_next() {
    let mut ctx = worn();
    let other = save(&mut worn(), 1, NONE);
    let mut taken: Vec<(String, Vec<u8>, Snapshot)> = Vec::new();
    let changes: [Change<'_>; 6] = [
        ("nothing", &|_| ()),
        ("a decode", &|ctx| drop(decode(ctx, 0, 12..18))),
        ("a removal", &|ctx| assert!(ctx.seq_rm(0, 2, 9).expect("a removal"))),
        ("a restore", &|ctx| support::restore(ctx, &other, 0, NONE)),
        ("another sequence in its cells", &|ctx| drop(decode(ctx, 3, 0..9))),
        ("zeroes", &|ctx| ctx.clear(true).expect("zeroes")),
    ];
    for (name, change) in changes {
        change(&mut ctx);
        for what in ALL {
            let expected = what.blocking(&mut ctx);
            taken.push((format!("{what:?} after {name}"), expected, what.snapshot(&mut ctx)));
        }
        for (name, expected, snapshot) in &taken {
            assert_eq!(snapshot.size(), expected.len() as u64, "{name}");
            assert!(bytes(snapshot) == *expected, "{name}");
        }
    }
    // Any goes first, and none needs the context.
    drop(ctx);
    while !taken.is_empty() {
        drop(taken.remove(taken.len() / 2));
        for (name, expected, snapshot) in &taken {
            assert!(bytes(snapshot) == *expected, "{name}");
        }
    }
}

#[test]
fn a_snapshot_of_nothing_is_a_state_without_cells() {
    let mut ctx = support::context(4, &sections());
    for what in ALL {
        let expected = what.blocking(&mut ctx);
        let snapshot = what.snapshot(&mut ctx);
        assert!(bytes(&snapshot) == expected, "{what:?}");
        assert_eq!(snapshot.device_bytes(), 0, "{what:?}");
    }
}

#[test]
fn a_clone_is_the_same_snapshot_and_outlives_it() {
    let mut ctx = worn();
    let snapshot = What::Whole.snapshot(&mut ctx);
    let (expected, clone) = (bytes(&snapshot), snapshot.clone());
    drop(snapshot);
    ctx.clear(true).expect("zeroes");
    assert!(bytes(&clone) == expected);
}

#[test]
fn a_snapshot_says_what_it_is_of_and_where_it_is() {
    let mut ctx = worn();
    let snapshot = ctx.seq_snapshot(1, PARTIAL | ON_DEVICE).expect("a snapshot");
    assert_eq!((snapshot.seq_id(), snapshot.flags()), (Some(1), PARTIAL));
    let snapshot = ctx.snapshot().expect("a snapshot");
    assert_eq!((snapshot.seq_id(), snapshot.flags()), (None, NONE));
    // 15 cells of each section, two layers with K of 8 bytes and V of 4.
    let tensors = 2 * 15 * 2 * 12;
    let on_device = match place::place() {
        Place::Host => 0,
        Place::Mixed => tensors / 2,
        Place::Managed | Place::Adopted | Place::TwoDevices => tensors,
    };
    assert_eq!(snapshot.device_bytes(), on_device);
}

#[test]
fn a_buffer_that_is_too_small_is_refused_and_one_that_is_larger_keeps_its_end() {
    let mut ctx = worn();
    for what in ALL {
        let snapshot = what.snapshot(&mut ctx);
        let (size, expected) = (usize::try_from(snapshot.size()).expect("a size"), bytes(&snapshot));
        let mut out = vec![0xAA; size - 1];
        let error = snapshot.get_data(&mut out, None).expect_err("a byte too few");
        assert!(
            matches!(error, Error::BufferTooSmall { need, size: s } if (need, s) == (size as u64, size as u64 - 1)),
            "{error}"
        );
        assert!(out.iter().all(|&byte| byte == 0xAA), "nothing is written");
        let error = snapshot.get_data_in_background(out, None).expect_err("a byte too few");
        assert_eq!(error.status(), Status::BufferTooSmall);

        let mut out = vec![0xAA; size + 3];
        assert_eq!(snapshot.get_data(&mut out, None).expect("a state"), size);
        assert!(out == [&expected[..], &[0xAA; 3]].concat());
    }
}

#[test]
fn an_on_device_state_survives_what_happens_to_the_cache() {
    let mut ctx = worn();
    let expected: Vec<_> = (0..2).map(|section| held(&ctx, section, 0)).collect();
    let state = save(&mut ctx, 0, ON_DEVICE);
    ctx.clear(true).expect("zeroes");
    decode(&mut ctx, 3, 0..20);
    support::restore(&mut ctx, &state, 0, ON_DEVICE);
    assert!((0..2).map(|section| held(&ctx, section, 0)).eq(expected));
    assert!(support::is_intact(&ctx, 3, 3));
}

// Restores

#[test]
fn a_snapshot_restores_as_its_bytes_do_into_any_sequence() {
    for what in [What::Seq(0, NONE), What::Seq(0, PARTIAL)] {
        let What::Seq(_, flags) = what else { continue };
        for dest in 0..4 {
            let (mut ctx, mut by_bytes) = (worn(), worn());
            let snapshot = what.snapshot(&mut ctx);
            let blob = bytes(&snapshot);
            for ctx in [&mut ctx, &mut by_bytes] {
                decode(ctx, 1, 5..9);
                assert!(ctx.seq_rm(0, 3, 5).expect("a removal"));
            }
            ctx.seq_restore(&snapshot, dest).expect("a restore");
            support::restore(&mut by_bytes, &blob, dest, flags);
            assert!(image(&ctx) == image(&by_bytes), "{what:?} to {dest}");
        }
    }
    let (mut ctx, mut by_bytes) = (worn(), worn());
    let snapshot = ctx.snapshot().expect("a snapshot");
    decode(&mut ctx, 3, 0..9);
    decode(&mut by_bytes, 3, 0..9);
    ctx.restore(&snapshot).expect("a restore");
    by_bytes.state_set_data(&bytes(&snapshot)).expect("a restore");
    assert!(image(&ctx) == image(&by_bytes), "the whole context");
}

#[test]
fn a_snapshot_restores_from_every_memory_into_every_other() {
    let sections = sections();
    for (from, mut source) in everywhere(&sections) {
        wear(&mut source);
        let (seq, whole) = (What::Seq(0, NONE).snapshot(&mut source), What::Whole.snapshot(&mut source));
        let expected: Vec<_> = (0..4).map(|seq| [0, 1].map(|section| held(&source, section, seq))).collect();
        drop(source);
        for (to, mut ctx) in everywhere(&sections) {
            decode(&mut ctx, 2, 0..10);
            assert!(ctx.seq_rm(2, 3, 7).expect("a removal"));
            let others = [0, 1].map(|section| held(&ctx, section, 2));
            ctx.seq_restore(&seq, 3).expect("a restore");
            assert!([0, 1].map(|section| held(&ctx, section, 3)) == expected[0], "{from} to {to}");
            assert!(
                [0, 1].map(|section| held(&ctx, section, 2)) == others,
                "{from} to {to}: another sequence"
            );
            ctx.restore(&whole).expect("a restore");
            let now: Vec<_> = (0..4).map(|seq| [0, 1].map(|section| held(&ctx, section, seq))).collect();
            assert!(now == expected, "{from} to {to}: the whole context");
        }
    }
}

#[test]
fn a_snapshot_of_the_other_kind_is_refused_and_changes_nothing() {
    let mut ctx = worn();
    let (seq, whole) = (What::Seq(0, NONE).snapshot(&mut ctx), What::Whole.snapshot(&mut ctx));
    let before = image(&ctx);
    let error = ctx.seq_restore(&whole, 1).expect_err("of a whole context");
    assert_eq!(error.to_string(), "snapshot: is of a whole context, which is no state of a sequence");
    let error = ctx.restore(&seq).expect_err("of a sequence");
    assert_eq!(error.to_string(), "snapshot: is of a sequence: restore it as one");
    let error = ctx.seq_restore(&seq, 4).expect_err("no such sequence");
    assert_eq!(error.to_string(), "seq_id 4 is out of range [0, 4)");
    assert!(image(&ctx) == before);
}

#[test]
fn a_snapshot_of_another_model_or_without_room_is_refused_and_changes_nothing() {
    let snapshot = What::Seq(0, NONE).snapshot(&mut worn());
    let mut shallow = sections();
    shallow[0].layers.pop();
    for other in [shallow, vec![kv(8), sections().remove(1)]] {
        let mut ctx = support::context(4, &other);
        decode(&mut ctx, 0, 0..3);
        let before = image(&ctx);
        let by_bytes = ctx.state_seq_set_data(&bytes(&snapshot), 0, NONE).expect_err("a refusal");
        let error = ctx.seq_restore(&snapshot, 0).expect_err("a refusal");
        assert_eq!(error.status(), by_bytes.status());
        assert!(image(&ctx) == before, "{error}");
    }
}

// Files and the background

/// A file that was there before.
fn old_file() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("slot.bin");
    fs::write(&path, b"old").expect("a file");
    (dir, path)
}

fn assert_old_alone(dir: &tempfile::TempDir, path: &Path) {
    assert_eq!(fs::read(path).expect("the file"), b"old");
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 1, "nothing lies beside it");
}

#[test]
fn a_file_of_a_snapshot_is_that_of_a_save_of_the_same_moment() {
    for what in [What::Seq(0, NONE), What::Whole] {
        let mut ctx = worn();
        let (dir, path) = old_file();
        let size = what.blocking_file(&mut ctx, &path);
        let expected = fs::read(&path).expect("the file");
        let snapshot = what.snapshot(&mut ctx);
        ctx.clear(true).expect("zeroes");
        for sync in [false, true] {
            let (one, two) = (dir.path().join("one"), dir.path().join("two"));
            assert_eq!(snapshot.save_file(&one, &[7, 8], sync, None).expect("a file"), size);
            let job = snapshot.save_file_in_background(&two, &[7, 8], sync, None).expect("a job");
            assert_eq!(job.wait().expect("a file"), size);
            for file in [one, two] {
                assert!(fs::read(file).expect("the file") == expected, "{what:?}, sync {sync}");
            }
        }
    }
}

#[test]
fn a_partial_state_goes_to_no_file() {
    let snapshot = What::Seq(0, PARTIAL).snapshot(&mut worn());
    let (dir, path) = old_file();
    let blocking = snapshot.save_file(&path, &[], false, None).expect_err("a partial state");
    let background = snapshot.save_file_in_background(&path, &[], false, None).expect_err("a partial state");
    for error in [blocking, background] {
        assert_eq!(error.to_string(), "snapshot: is partial, and a file holds a whole state");
    }
    assert_old_alone(&dir, &path);
}

#[test]
fn states_are_saved_in_the_background_while_decoding_goes_on() {
    let mut ctx = worn();
    let mut jobs = Vec::new();
    for round in 0..4 {
        for what in ALL {
            let expected = what.blocking(&mut ctx);
            let room = vec![0; expected.len() + round];
            let job = what.snapshot(&mut ctx).get_data_in_background(room, None).expect("a job");
            jobs.push((what, expected, job));
        }
        let last = 12 + 2 * i32::try_from(round).expect("few");
        decode(&mut ctx, 0, last..last + 2);
        assert!(ctx.seq_rm(0, last - 8, last - 7).expect("a removal"));
    }
    ctx.clear(true).expect("zeroes");
    drop(ctx);
    for (what, expected, job) in jobs.into_iter().rev() {
        let size = job.progress().total;
        let out = job.wait().expect("a state");
        assert!(out[..expected.len()] == expected, "{what:?}");
        assert_eq!(size, expected.len() as u64);
        assert!(job.is_finished());
        assert_eq!(job.wait().expect_err("twice").to_string(), "job: has been waited for");
    }
}

/// A callback that notes every report.
fn noted() -> (ProgressCallback, Arc<Mutex<Vec<Progress>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let theirs = Arc::clone(&seen);
    let callback = ProgressCallback::new(move |progress| {
        theirs.lock().expect("the list").push(progress);
        ControlFlow::Continue(())
    });
    (callback, seen)
}

#[test]
fn a_job_reports_its_bytes_and_the_end_once() {
    let snapshot = What::Whole.snapshot(&mut worn());
    let (dir, path) = old_file();
    for to_file in [false, true] {
        let (callback, seen) = noted();
        let (total, progress) = if to_file {
            let job = snapshot.save_file_in_background(&path, &[], false, Some(callback)).expect("a job");
            (job.wait().expect("a file"), job.progress())
        } else {
            let room = vec![0; usize::try_from(snapshot.size()).expect("a size")];
            let job = snapshot.get_data_in_background(room, Some(callback)).expect("a job");
            job.wait().expect("a state");
            (snapshot.size(), job.progress())
        };
        let seen = seen.lock().expect("the list");
        assert_eq!(progress.done, progress.total);
        assert_eq!(seen.last(), Some(&progress), "to a file: {to_file}");
        assert!(seen.windows(2).all(|pair| pair[0].done < pair[1].done), "{seen:?}");
        assert!(
            seen.iter().all(|report| report.total == progress.total && report.total <= total),
            "{seen:?}"
        );
    }
    drop(dir);
}

/// A callback that stops a job at its first report until something is sent.
fn held_up() -> (ProgressCallback, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (started, has_started) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let callback = ProgressCallback::new(move |_| {
        let _ = started.send(());
        let _ = may_go_on.recv();
        ControlFlow::Continue(())
    });
    (callback, has_started, go_on)
}

#[test]
fn a_job_that_is_cancelled_leaves_the_file_that_was_there() {
    let snapshot = What::Seq(0, NONE).snapshot(&mut large());
    let (dir, path) = old_file();
    let (callback, has_started, go_on) = held_up();
    let job = snapshot.save_file_in_background(&path, &[1], false, Some(callback)).expect("a job");
    has_started.recv().expect("a report");
    assert!(!job.is_finished());
    job.cancel();
    drop(go_on);
    match job.wait() {
        Err(Error::Cancelled { done, total }) => assert!(done < total, "{done} of {total}"),
        other => panic!("{other:?}"),
    }
    assert!(job.is_finished());
    assert_old_alone(&dir, &path);
    assert!(bytes(&snapshot).len() as u64 == snapshot.size(), "the snapshot is as good as before");
}

#[test]
fn a_callback_cancels_its_job() {
    let snapshot = What::Seq(0, NONE).snapshot(&mut worn());
    let (dir, path) = old_file();
    let cancel = || ProgressCallback::new(|_| ControlFlow::Break(()));
    let file = snapshot.save_file_in_background(&path, &[], false, Some(cancel())).expect("a job");
    assert_eq!(file.wait().expect_err("cancelled").status(), Status::Cancelled);
    assert_old_alone(&dir, &path);
    let memory = snapshot.get_data_in_background(bytes(&snapshot), Some(cancel())).expect("a job");
    assert_eq!(memory.wait().expect_err("cancelled").status(), Status::Cancelled);
    let blocking = snapshot.get_data(&mut bytes(&snapshot), Some(&mut cancel())).expect_err("cancelled");
    assert_eq!(blocking.status(), Status::Cancelled);
}

#[test]
fn a_job_that_is_dropped_is_cancelled_and_waited_for() {
    let snapshot = What::Whole.snapshot(&mut large());
    let (dir, path) = old_file();
    let (callback, has_started, go_on) = held_up();
    let job = snapshot.save_file_in_background(&path, &[], false, Some(callback)).expect("a job");
    has_started.recv().expect("a report");
    drop(snapshot);
    let other = std::thread::spawn(move || drop(job));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!other.is_finished(), "the job is held up");
    drop(go_on);
    other.join().expect("the drop");
    assert_old_alone(&dir, &path);
}

#[test]
fn a_job_whose_file_cannot_be_says_so() {
    let snapshot = What::Whole.snapshot(&mut worn());
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("missing/slot.bin");
    let job = snapshot.save_file_in_background(&path, &[], false, None).expect("a job");
    let error = job.wait().expect_err("no folder");
    assert_eq!(error.status(), Status::Io);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[test]
fn copies_are_read_in_other_pieces_than_they_were_written() {
    let at = |n: u64| usize::try_from(n).expect("small");
    let transfer = Transfer::default();
    let allocate = |row_size: u64, kv_size: u32, on_host: bool| {
        let shapes = [PlaneShape::dense_rows(row_size)];
        let planes = match place::place() {
            Place::Host => Plane::allocate(&shapes, kv_size),
            Place::Mixed if on_host => Plane::allocate(&shapes, kv_size),
            _ => Plane::allocate_on(&Device::open(0).expect("device 0"), &shapes, kv_size),
        };
        planes.expect("a plane").remove(0)
    };
    let mut planes =
        [allocate(3, 4, true), allocate(16, 2, false), allocate(5, 1, true), allocate(2, 9, false)];
    let mut bytes = Vec::new();
    for (i, plane) in planes.iter_mut().enumerate() {
        let size = plane.shape().span(plane.kv_size()).expect("a span");
        let own = support::noise(&[i64::try_from(i).expect("few")], at(size));
        plane.set(0, &own, &transfer).expect("bytes");
        bytes.extend(own);
    }
    let region = |plane| {
        let plane: &Plane = plane;
        Region::new(plane, &Arc::new(CellMap::of_run(0, plane.kv_size()).expect("a run"))).expect("a region")
    };
    let copies = TensorCopies::of(&planes.iter().map(region).collect::<Vec<_>>(), &transfer).expect("copies");
    drop(planes);
    assert_eq!(copies.bytes(), bytes.len() as u64);
    for start in place::cases(0..bytes.len() as u64) {
        for len in place::cases(1..=bytes.len() as u64 - start) {
            let n_cells = u32::try_from(len).expect("small");
            let mut plane = allocate(1, n_cells, start.is_multiple_of(2));
            let map = CellMap::of_run(0, n_cells).expect("a run");
            let src = copies.range(start, len).expect("a range");
            scatter(
                &mut [Scatter { plane: &mut plane, map: &map, n_src: n_cells, src: src.into() }],
                &transfer,
                None,
            )
            .expect("a scatter");
            let mut out = vec![0; at(len)];
            plane.get(0, &mut out, &transfer).expect("bytes");
            assert_eq!(out, bytes[at(start)..][..at(len)], "{len} bytes from {start} on");
        }
    }
    assert!(copies.range(1, bytes.len() as u64).is_none());
    assert!(copies.range(u64::MAX, 2).is_none());
}
