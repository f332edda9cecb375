//! Auto-save: slots that are marked, saved while the server goes on, and restored by the next one.
#![allow(missing_docs, reason = "a test")]

mod autosaves;

use std::fs;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use autosaves::slots::support::{context, decode, image, is_intact, iswa, positions};
use autosaves::slots::{DRIVER, TOKENS, busy_draft, busy_target, checkpoint_states, identity, target};
use autosaves::{
    Held, cold, loaded, names, open, params, restore, restore_into, save, save_in_background, slot_ids,
    with_slot,
};
use kvstate::format::Identity;
use kvstate::session::{
    Autosave, AutosaveParams, DraftOutcome, Restored, SlotContents, SlotLoadParams, Verify,
};
use kvstate::storage::{Progress, ProgressCallback};
use kvstate::{Error, Status};
use tempfile::{TempDir, tempdir};

fn opened() -> (TempDir, Autosave) {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    (dir, autosave)
}

fn every(n_tokens: u64) -> (TempDir, Autosave) {
    let dir = tempdir().unwrap();
    let params = AutosaveParams { every_n_tokens: Some(n_tokens), ..params(dir.path()) };
    (dir, Autosave::open(params).unwrap())
}

// From one run to the next

#[test]
fn the_next_run_restores_all_of_a_slot() {
    let (dir, autosave) = opened();
    save(&autosave, 3, &TOKENS);
    drop(autosave);

    let autosave = open(dir.path());
    assert_eq!(slot_ids(&autosave), [3]);
    let (mut into, mut draft) = (busy_target(), busy_draft());
    let Restored::Slot(slot) = restore_into(&autosave, 3, &mut into, &mut draft) else { panic!("cold") };
    assert_eq!((&slot.tokens[..], slot.driver.as_deref()), (&TOKENS[..], Some(DRIVER)));
    assert_eq!((slot.checkpoints.len(), slot.verified, slot.identity), (3, Verify::Full, identity()));
    assert!(matches!(slot.draft, DraftOutcome::Restored(_)), "{:?}", slot.draft);
    assert_eq!(slot.notes, [""; 0]);
    for (context, seq) in [(&into, 1), (&draft, 0)] {
        assert_eq!(positions(context, 0, seq), (0..12).collect::<Vec<_>>());
    }
    assert!(is_intact(&into, 1, 0) && is_intact(&draft, 0, 1));
}

#[test]
fn a_folder_has_the_slots_the_manifest_and_the_lock() {
    let (dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    save(&autosave, 12, &TOKENS);
    assert_eq!(
        names(dir.path()),
        ["auto-slot0.bin", "auto-slot12.bin", "auto-slots.json", "auto-slots.lock"]
    );
}

#[test]
fn a_folder_that_is_not_there_is_created() {
    let dir = tempdir().unwrap();
    let folder = dir.path().join("a/b");
    save(&open(&folder), 0, &TOKENS);
    assert_eq!(slot_ids(&open(&folder)), [0]);
}

#[test]
fn a_folder_that_cannot_be_created_is_named() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = Autosave::open(params(&file)).unwrap_err();
    assert_eq!(error.status(), Status::Io);
    assert!(error.to_string().starts_with(&format!("create the folder {}: ", file.display())), "{error}");
}

#[test]
fn a_slot_is_listed_with_its_tokens_its_bytes_and_its_last_use() {
    let (_dir, autosave) = opened();
    let bytes = [save(&autosave, 1, &TOKENS), save(&autosave, 0, &TOKENS[..2])];
    let slots = autosave.slots();
    let listed: Vec<_> = slots.iter().map(|slot| (slot.slot_id, slot.n_tokens, slot.bytes)).collect();
    assert_eq!(listed, [(0, 2, bytes[1]), (1, 5, bytes[0])]);
    assert!(slots[1].last_use_ms < slots[0].last_use_ms);
}

#[test]
fn a_folder_that_somebody_has_taken_is_refused_until_it_is_given_back() {
    let (dir, autosave) = opened();
    let error = Autosave::open(params(dir.path())).unwrap_err();
    assert_eq!(error.status(), Status::Locked);
    let lock = fs::canonicalize(dir.path()).unwrap().join("auto-slots.lock");
    assert_eq!(
        error.to_string(),
        format!(
            "the folder is in use by another process, or another handle of this one: {} is locked",
            lock.display()
        )
    );
    drop(autosave);
    open(dir.path());
}

// Marks

#[test]
fn a_save_is_due_once_so_many_tokens_have_come_since_the_last() {
    let (_dir, autosave) = every(10);
    assert_eq!([4, 5, 1, 1].map(|n| autosave.mark(0, n)), [false, false, true, true]);
    save(&autosave, 0, &TOKENS);
    assert_eq!([9, 1].map(|n| autosave.mark(0, n)), [false, true]);
    // Each slot for itself.
    assert!(!autosave.mark(1, 9));
}

#[test]
fn without_a_number_of_tokens_no_save_is_due() {
    let (_dir, autosave) = opened();
    assert!(!autosave.mark(0, u64::MAX - 1));
}

#[test]
fn after_a_save_that_failed_the_next_is_due_after_as_many_tokens_again() {
    let (dir, autosave) = every(10);
    fs::create_dir(dir.path().join("auto-slot0.bin")).unwrap();
    assert!(autosave.mark(0, 10));
    let failed = with_slot(&TOKENS, false, |target, contents| autosave.save(0, target, 0, contents));
    assert_eq!(failed.unwrap_err().status(), Status::Io);
    assert_eq!([9, 1].map(|n| autosave.mark(0, n)), [false, true]);
    assert!(autosave.is_dirty(0));
}

#[test]
fn a_slot_is_dirty_from_its_mark_to_its_save() {
    let (_dir, autosave) = opened();
    assert!(!autosave.is_dirty(0));
    autosave.mark(0, 0);
    assert!(autosave.is_dirty(0) && !autosave.is_dirty(1));
    save(&autosave, 0, &TOKENS);
    assert!(!autosave.is_dirty(0));
}

#[test]
fn a_slot_that_is_restored_is_not_dirty() {
    let (_dir, autosave) = every(10);
    save(&autosave, 0, &TOKENS);
    autosave.mark(0, 9);
    loaded(&autosave, 0);
    assert!(!autosave.is_dirty(0) && !autosave.mark(0, 9));
}

#[test]
fn a_slot_that_is_marked_while_it_is_saved_is_dirty_still() {
    let (dir, autosave) = every(10);
    autosave.mark(0, 10);
    let held = Held::hold(dir.path());
    save_in_background(&autosave, 0, &TOKENS);
    // Due, but one runs.
    assert!(!autosave.mark(0, 12));
    held.release();
    autosave.wait(0).unwrap();
    assert!(autosave.is_dirty(0) && autosave.mark(0, 0));
    save(&autosave, 0, &TOKENS);
    assert!(!autosave.is_dirty(0));
}

// In the background

#[test]
fn what_happens_to_the_contexts_during_a_save_is_not_in_the_file() {
    let (dir, autosave) = opened();
    let held = Held::hold(dir.path());
    with_slot(&TOKENS, false, |target, mut contents| {
        let (draft, seq_id) = contents.draft.take().unwrap();
        let contents = SlotContents { draft: Some((draft, seq_id)), ..contents };
        autosave.save_in_background(0, target, 0, contents).unwrap();
        target.clear(true).unwrap();
    });
    held.release();
    let saved = autosave.wait(0).unwrap().unwrap();
    assert_eq!(saved.bytes, fs::metadata(dir.path().join("auto-slot0.bin")).unwrap().len());
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
}

#[test]
fn a_save_in_the_background_writes_what_a_save_writes() {
    let (dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    save_in_background(&autosave, 1, &TOKENS);
    autosave.flush().unwrap();
    let [first, second] = [0, 1].map(|i| fs::read(dir.path().join(format!("auto-slot{i}.bin"))).unwrap());
    assert!(first == second);
}

#[test]
fn a_save_in_the_background_can_be_watched() {
    let (dir, autosave) = opened();
    assert_eq!(autosave.progress(0), Progress { done: 0, total: 0 });
    let held = Held::hold(dir.path());
    save_in_background(&autosave, 0, &TOKENS);
    assert!(!autosave.is_finished(0) && autosave.is_finished(1));
    let before = autosave.progress(0);
    assert!(before.done == 0 && before.total > 0);
    held.release();
    let saved = autosave.wait(0).unwrap().unwrap();
    assert!(autosave.is_finished(0));
    assert_eq!(saved.bytes, before.total);
    assert_eq!(autosave.wait(0).unwrap(), None);
}

#[test]
fn the_progress_of_a_slot_with_a_sidecar_is_that_of_both_files() {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let sent = std::sync::Arc::clone(&seen);
    let saved = with_slot(&TOKENS, true, |target, contents| {
        target.set_progress(Some(ProgressCallback::new(move |progress| {
            sent.lock().unwrap().push((progress.done, progress.total));
            ControlFlow::Continue(())
        })));
        autosave.save(0, target, 0, contents).unwrap()
    });
    let seen = seen.lock().unwrap();
    let first = fs::metadata(dir.path().join("auto-slot0.bin")).unwrap().len();
    assert!(seen.is_sorted() && seen.iter().all(|&(_, total)| total == saved.bytes), "{seen:?}");
    assert!(seen.contains(&(first, saved.bytes)) && seen.contains(&(saved.bytes, saved.bytes)), "{seen:?}");
}

#[test]
fn a_save_that_is_cancelled_leaves_the_old_file_and_a_dirty_slot() {
    let (dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    let path = dir.path().join("auto-slot0.bin");
    let before = fs::read(&path).unwrap();
    autosave.mark(0, 1);
    let held = Held::hold(dir.path());
    save_in_background(&autosave, 0, &TOKENS[..1]);
    autosave.cancel(0);
    held.release();
    let error = autosave.wait(0).unwrap_err();
    assert_eq!(error.status(), Status::Cancelled);
    assert!(autosave.is_dirty(0) && fs::read(&path).unwrap() == before);
    assert_eq!(names(dir.path()), ["auto-slot0.bin", "auto-slots.json", "auto-slots.lock"]);
}

#[test]
fn a_second_save_of_a_slot_waits_for_the_first() {
    let (dir, autosave) = opened();
    let held = Held::hold(dir.path());
    save_in_background(&autosave, 0, &TOKENS);
    let is_there = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            save(&autosave, 0, &TOKENS[..1]);
            is_there.store(true, Ordering::Release);
        });
        thread::yield_now();
        assert!(!is_there.load(Ordering::Acquire) && !autosave.is_finished(0));
        held.release();
    });
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS[..1]);
    assert_eq!(autosave.wait(0).unwrap(), None);
}

#[test]
fn flush_waits_for_all_and_names_the_one_that_failed() {
    let (dir, autosave) = opened();
    fs::create_dir(dir.path().join("auto-slot1.bin")).unwrap();
    for slot_id in 0..3 {
        save_in_background(&autosave, slot_id, &TOKENS);
    }
    let error = autosave.flush().unwrap_err();
    let path = fs::canonicalize(dir.path()).unwrap().join("auto-slot1.bin");
    assert_eq!(error.to_string(), format!("open {}: is a directory", path.display()));
    assert_eq!([0, 2].map(|slot_id| loaded(&autosave, slot_id).tokens.len()), [5, 5]);
    autosave.flush().unwrap();
}

#[test]
fn the_end_waits_for_a_save_that_runs() {
    let (dir, autosave) = opened();
    let held = Held::hold(dir.path());
    save_in_background(&autosave, 0, &TOKENS);
    let end = thread::spawn(|| drop(autosave));
    held.release();
    end.join().unwrap();
    assert_eq!(loaded(&open(dir.path()), 0).tokens, TOKENS);
}

#[test]
fn slots_are_marked_saved_and_restored_side_by_side() {
    let (_dir, autosave) = opened();
    thread::scope(|scope| {
        for slot_id in 0..4 {
            let autosave = &autosave;
            scope.spawn(move || {
                for n in 1..=4 {
                    autosave.mark(slot_id, 1);
                    if n % 2 == 0 {
                        save(autosave, slot_id, &TOKENS[..n]);
                    } else {
                        save_in_background(autosave, slot_id, &TOKENS[..n]);
                    }
                    assert_eq!(loaded(autosave, slot_id).tokens.len(), n);
                }
            });
        }
    });
    assert_eq!(slot_ids(&autosave), [0, 1, 2, 3]);
}

// What does not fit

#[test]
fn a_slot_that_the_folder_does_not_have_is_a_cold_start_without_a_reason() {
    let (_dir, autosave) = opened();
    assert_eq!(cold(&autosave, 0), [""; 0]);
}

#[test]
fn a_slot_of_another_model_is_a_cold_start_and_nothing_changes() {
    let (_dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    let (mut into, mut draft) = (busy_target(), busy_draft());
    let before = (image(&into), image(&draft));
    let other = Identity { model: b"another".to_vec(), ..identity() };
    let load = SlotLoadParams { draft: Some((&mut draft, 0)), identity: other, ..SlotLoadParams::default() };
    let Restored::Cold(notes) = autosave.restore(0, &mut into, 1, load).unwrap() else { panic!("restored") };
    let reason = "failed to restore sequence state: model: the state has 'gemma 3', the cache 'another' \
                  (identity of the slot file)";
    assert_eq!(notes, [reason]);
    assert!((image(&into), image(&draft)) == before);
}

#[test]
fn a_slot_that_names_a_model_is_restored_for_a_caller_that_names_none_and_says_so() {
    let (_dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    let nameless = Identity { model: Vec::new(), ..identity() };
    let (mut into, mut draft) = (busy_target(), busy_draft());
    let load =
        SlotLoadParams { draft: Some((&mut draft, 0)), identity: nameless, ..SlotLoadParams::default() };
    let Restored::Slot(slot) = autosave.restore(0, &mut into, 1, load).unwrap() else { panic!("cold") };
    assert_eq!(slot.notes, ["the file names a model, the caller none: not compared"]);
    assert_eq!(
        (slot.tokens, into.seq_pos_max(1).unwrap()),
        (TOKENS.to_vec(), target().seq_pos_max(0).unwrap())
    );
}

#[test]
fn a_slot_for_which_there_is_no_room_is_a_cold_start_and_nothing_changes() {
    let (_dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    let mut small = context(2, &iswa(8, 16, 4));
    decode(&mut small, 1, 0..3);
    let before = image(&small);
    let Restored::Cold(notes) = restore_into(&autosave, 0, &mut small, &mut busy_draft()) else {
        panic!("restored")
    };
    assert!(notes.len() == 1 && notes[0].contains("failed to find 12 available cells"), "{notes:?}");
    assert!(image(&small) == before);
}

#[test]
fn a_draft_that_does_not_fit_is_dropped_and_the_target_stands() {
    let (_dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    let mut small = context(2, &[autosaves::slots::support::kv(10)]);
    let restored = restore_into(&autosave, 0, &mut busy_target(), &mut small);
    let Restored::Slot(slot) = restored else { panic!("{restored:?}") };
    assert!(matches!(slot.draft, DraftOutcome::Dropped(_)) && slot.driver.is_none());
}

#[test]
fn sequences_that_are_not_there_are_the_callers_errors() {
    let (dir, autosave) = opened();
    let load = SlotLoadParams::default();
    assert!(matches!(autosave.restore(0, &mut target(), 2, load), Err(Error::SeqId { seq_id: 2, .. })));
    let mut draft = busy_draft();
    let load = SlotLoadParams { draft: Some((&mut draft, 9)), ..SlotLoadParams::default() };
    assert!(matches!(autosave.restore(0, &mut target(), 0, load), Err(Error::SeqId { seq_id: 9, .. })));
    let contents = SlotContents::default;
    assert!(matches!(autosave.save(0, &mut target(), 2, contents()), Err(Error::SeqId { seq_id: 2, .. })));
    let begun = autosave.save_in_background(0, &mut target(), 2, contents());
    assert!(matches!(begun, Err(Error::SeqId { seq_id: 2, .. })));
    assert_eq!(names(dir.path()), ["auto-slots.lock"]);
}

#[test]
fn what_no_file_can_hold_is_refused_before_a_save_begins() {
    let (_dir, autosave) = opened();
    let mut source = target();
    let mut states = checkpoint_states(&mut source);
    states[1].1.clear();
    let contents =
        || SlotContents { checkpoints: autosaves::slots::checkpoints(&states), ..SlotContents::default() };
    for error in [
        autosave.save(0, &mut source, 0, contents()).unwrap_err(),
        autosave.save_in_background(0, &mut source, 0, contents()).unwrap_err(),
    ] {
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.to_string().starts_with("checkpoints[1].target: 0 bytes"), "{error}");
    }
}

#[test]
fn a_restore_that_the_progress_callback_cancels_is_no_cold_start() {
    let (_dir, autosave) = opened();
    save(&autosave, 0, &TOKENS);
    let mut into = busy_target();
    let before = image(&into);
    into.set_progress(Some(ProgressCallback::new(|_| ControlFlow::Break(()))));
    let load = SlotLoadParams { identity: identity(), ..SlotLoadParams::default() };
    assert_eq!(autosave.restore(0, &mut into, 1, load).unwrap_err().status(), Status::Cancelled);
    assert!(image(&into) == before);
}

// Removal

#[test]
fn a_slot_that_is_removed_is_gone_for_the_next_run_too() {
    let (dir, autosave) = opened();
    autosaves::save_with_sidecar(&autosave, 0, &TOKENS);
    save(&autosave, 1, &TOKENS);
    autosave.remove(0).unwrap();
    autosave.remove(7).unwrap();
    assert_eq!((slot_ids(&autosave), restore(&autosave, 0)), (vec![1], Restored::Cold(Vec::new())));
    assert_eq!(names(dir.path()), ["auto-slot1.bin", "auto-slots.json", "auto-slots.lock"]);
    drop(autosave);
    assert_eq!(slot_ids(&open(dir.path())), [1]);
}

#[test]
fn a_slot_that_is_removed_while_it_is_saved_is_not_there_afterwards() {
    let (dir, autosave) = opened();
    let held = Held::hold(dir.path());
    save_in_background(&autosave, 0, &TOKENS);
    thread::scope(|scope| {
        scope.spawn(|| autosave.remove(0).unwrap());
        held.release();
    });
    assert_eq!((slot_ids(&autosave), autosave.wait(0).unwrap()), (vec![], None));
}

#[test]
fn a_slot_that_cannot_be_removed_is_named() {
    let (dir, autosave) = opened();
    let path = dir.path().join("auto-slot0.bin");
    fs::create_dir(&path).unwrap();
    let error = autosave.remove(0).unwrap_err();
    assert_eq!(error.status(), Status::Io);
    let path = fs::canonicalize(path).unwrap();
    assert!(error.to_string().starts_with(&format!("remove {}: ", path.display())), "{error}");
}
