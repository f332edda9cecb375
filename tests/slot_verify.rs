//! The verification of slot files of many pieces: by several threads, heard by a progress callback, and cancelled.
#![allow(missing_docs, reason = "a test")]

mod slots;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kvstate::format::{Checkpoint, CheckpointSpan, Cursor, GgmlType, Integrity};
use kvstate::memory::{KvParams, LayerParams};
use kvstate::session::{LoadedSlot, SlotContents, SlotLoadParams, Verify};
use kvstate::storage::{Progress, ProgressCallback, Threads};
use kvstate::{Context, Result, Status};
use slots::support::{context, decode, image, noise, tensor};
use tempfile::TempDir;

/// Bytes of which one thread makes the checksum at a time.
const PIECE: usize = 4 << 20;
const N_CELL: i32 = 210;

/// 64 KiB for each cell.
fn wide() -> Context {
    let layer = LayerParams { k: tensor(GgmlType::F16, 8192), v: Some(tensor(GgmlType::F16, 8192)) };
    context(2, &[KvParams::new(512, 2, layer)])
}

/// Another conversation is in sequence 1.
fn busy() -> Context {
    let mut busy = wide();
    decode(&mut busy, 1, 0..5);
    busy
}

/// A file with a memory state and a checkpoint of several pieces each; the parts' lengths.
fn saved() -> (TempDir, PathBuf, Vec<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let mut target = wide();
    decode(&mut target, 0, 0..N_CELL);
    let blob = noise(&[7], 2 * PIECE + 99);
    let span = CheckpointSpan::new(1, 0, 0).unwrap();
    let contents = SlotContents {
        checkpoints: vec![Checkpoint { span, target: &blob[..], draft: b"", driver: b"" }],
        ..SlotContents::default()
    };
    target.slot_save(&path, 0, contents).unwrap();
    let bytes = fs::read(&path).unwrap();
    let start = Integrity::find(bytes.len() as u64, bytes.last_chunk().unwrap()).unwrap();
    let mut input = Cursor::new(&bytes);
    input.bytes("before", start).unwrap();
    let parts = Integrity::read(&mut input).unwrap().parts;
    let lens: Vec<_> = parts.iter().map(|part| usize::try_from(part.len).unwrap()).collect();
    assert!(lens[1] > 3 * PIECE && lens[2] > 2 * PIECE, "{lens:?}");
    (dir, path, lens)
}

fn load(path: &Path, into: &mut Context, verify: Verify) -> Result<LoadedSlot> {
    into.slot_load(path, 1, SlotLoadParams { verify, ..SlotLoadParams::default() })
}

#[test]
fn a_flipped_bit_in_any_piece_is_found_by_any_number_of_threads() {
    let (_dir, path, lens) = saved();
    let good = fs::read(&path).unwrap();
    let (state, checkpoints) = (lens[0], lens[0] + lens[1]);
    let mut into = busy();
    let before = image(&into);
    for n_threads in [1, 3] {
        into.set_threads(Threads::new(n_threads));
        for at in [state, state + PIECE - 1, state + PIECE, state + 3 * PIECE, checkpoints - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, bad).unwrap();
            let error = load(&path, &mut into, Verify::Full).unwrap_err().to_string();
            assert!(error.contains("crc32c of the memory state"), "byte {at}: {error}");
            assert!(image(&into) == before, "byte {at}");
        }
        for at in [checkpoints + PIECE, checkpoints + 2 * PIECE] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, bad).unwrap();
            let loaded = load(&path, &mut busy(), Verify::Full).unwrap();
            assert_eq!(loaded.checkpoints.len(), 0);
            assert!(loaded.notes[0].contains("ignored: crc32c"), "byte {at}: {:?}", loaded.notes);
        }
        fs::write(&path, &good).unwrap();
        let loaded = load(&path, &mut busy(), Verify::Full).unwrap();
        assert_eq!((loaded.checkpoints.len(), loaded.verified), (1, Verify::Full));
    }
}

/// A callback that notes what it hears and cancels the nth call.
fn hears(cancel_at: usize) -> (ProgressCallback, Arc<Mutex<Vec<Progress>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let callback = {
        let heard = heard.clone();
        ProgressCallback::new(move |progress| {
            let mut heard = heard.lock().unwrap();
            heard.push(progress);
            if heard.len() == cancel_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    };
    (callback, heard)
}

#[test]
fn progress_hears_how_much_of_the_file_is_verified_and_then_nothing() {
    let (_dir, path, lens) = saved();
    let total = lens.iter().sum::<usize>() as u64;
    for mut into in [wide(), busy()] {
        into.set_threads(Threads::new(1));
        let (callback, heard) = hears(usize::MAX);
        into.set_progress(Some(callback));
        load(&path, &mut into, Verify::Full).unwrap();
        let heard = heard.lock().unwrap();
        assert!(heard.iter().all(|progress| progress.total == total), "{heard:?}");
        assert!(heard.is_sorted_by(|a, b| a.done < b.done), "{heard:?}");
        // A piece of each part at a time, and the end.
        let n_pieces: usize = lens.iter().map(|len| len.div_ceil(PIECE)).sum();
        assert_eq!((heard.len(), heard.last().map(|last| last.done)), (n_pieces, Some(total)));
    }
}

#[test]
fn without_a_verification_of_all_progress_hears_the_restore() {
    let (_dir, path, _) = saved();
    let tensors = u64::from(N_CELL.unsigned_abs()) * (64 << 10);
    for verify in [Verify::None, Verify::Headers] {
        let mut into = busy();
        let (callback, heard) = hears(usize::MAX);
        into.set_progress(Some(callback));
        load(&path, &mut into, verify).unwrap();
        let heard = heard.lock().unwrap();
        assert_eq!(heard.last(), Some(&Progress { done: tensors, total: tensors }));
    }
}

#[test]
fn a_verification_that_is_cancelled_changes_nothing_and_is_no_damage() {
    let (_dir, path, lens) = saved();
    let n_pieces: usize = lens.iter().map(|len| len.div_ceil(PIECE)).sum();
    let mut into = busy();
    into.set_threads(Threads::new(1));
    let before = image(&into);
    for cancel_at in 1..=n_pieces {
        let (callback, heard) = hears(cancel_at);
        into.set_progress(Some(callback));
        let error = load(&path, &mut into, Verify::Full).unwrap_err();
        assert_eq!(error.status(), Status::Cancelled, "{error}");
        assert_eq!(heard.lock().unwrap().len(), cancel_at);
        assert!(image(&into) == before, "{cancel_at}");
    }
    // A callback stays the context's.
    let (callback, heard) = hears(1);
    into.set_progress(Some(callback));
    load(&path, &mut into, Verify::Full).unwrap_err();
    load(&path, &mut into, Verify::Full).unwrap();
    assert_eq!(heard.lock().unwrap().len(), 1 + n_pieces);
}
