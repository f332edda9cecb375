//! Auto-save when a run does not end: processes killed at every step and at any time, two of them on one folder, disks without room.
#![cfg(target_os = "linux")]
#![allow(missing_docs, reason = "a test")]

mod autosaves;
mod cc;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use autosaves::slots::support::noise;
use autosaves::slots::{TOKENS, identity};
use autosaves::{cold, loaded, names, open, params, restore, save, slot_ids, with_slot};
use kvstate::session::{Autosave, AutosaveParams, DraftOutcome, LoadedSlot, Restored, SlotContents};
use kvstate::{Error, Status};
use tempfile::{TempDir, tempdir};

/// Enough for several writes, in the slot file and in the sidecar.
const N_TOKENS: usize = 140_000;

/// Saves a slot whose tokens and driver follow from a number; one with an odd number in the background.
fn save_number(autosave: &Autosave, slot_id: u32, number: i32, n_tokens: usize) {
    let (tokens, driver) = (vec![number; n_tokens], noise(&[number.into()], 1000));
    let saved = with_slot(&tokens, true, |target, contents| {
        let contents = SlotContents { driver: &driver, ..contents };
        if number % 2 == 0 {
            return autosave.save(slot_id, target, 0, contents);
        }
        autosave.save_in_background(slot_id, target, 0, contents)?;
        Ok(autosave.wait(slot_id)?.unwrap())
    });
    assert_eq!(saved.unwrap().notes, [""; 0]);
}

/// The number of a slot that is whole.
fn number_of(slot: &LoadedSlot) -> i32 {
    let number = slot.tokens[0];
    assert!(slot.tokens.iter().all(|&token| token == number));
    match &slot.draft {
        DraftOutcome::Restored(_) => {
            assert!(slot.driver.as_ref().unwrap() == &noise(&[number.into()], 1000));
        }
        // Killed between the two renames: the target is the newer one, and stands; a sidecar is that of the save before, if there
        // was one.
        DraftOutcome::Dropped(reason) => assert!(reason.contains("of another state"), "{reason}"),
        DraftOutcome::Absent => assert_eq!(slot.driver, None),
    }
    assert_eq!((slot.checkpoints.len(), &slot.identity), (3, &identity()));
    number
}

fn bytes_of(dir: &Path) -> u64 {
    let slots = names(dir).into_iter().filter(|name| !name.starts_with("auto-slots."));
    slots.map(|name| fs::metadata(dir.join(name)).unwrap().len()).sum()
}

fn copy(from: &Path, to: &Path) {
    for name in names(from) {
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// Runs a test of this binary that does something only as a child.
fn child(command: &mut Command, test: &str, dir: &Path) {
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("KVSTATE_TEST_CHILD", dir)
        .stderr(Stdio::null());
}

/// The folder of a child; `None` in the run that is a test.
fn folder_of_child() -> Option<PathBuf> {
    std::env::var_os("KVSTATE_TEST_CHILD").map(PathBuf::from)
}

// Killed at every step

/// A folder with three slots: 0 was used longest ago, 2 last.
fn three_slots() -> TempDir {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    for (slot_id, number) in [(0, 1), (1, 10), (2, 20)] {
        save_number(&autosave, slot_id, number, N_TOKENS);
    }
    dir
}

/// Waits for the disk, and has room for three slots.
fn full(dir: &Path) -> AutosaveParams {
    let max_bytes =
        Some(std::env::var("KVSTATE_TEST_BYTES").map_or_else(|_| bytes_of(dir), |n| n.parse().unwrap()));
    AutosaveParams { max_bytes, ..AutosaveParams::new(dir) }
}

/// Runs only as a child: slot 0 is used and grows, so that slot 1 has to go; slot 2 is removed.
#[test]
fn killed_child() {
    let Some(dir) = folder_of_child() else { return };
    // The tracer counts steps between these two.
    std::env::set_current_dir(".").unwrap();
    let autosave = Autosave::open(full(&dir)).unwrap();
    autosave.mark(0, 1);
    save_number(&autosave, 0, 2, N_TOKENS + 10);
    autosave.remove(2).unwrap();
    drop(autosave);
    std::env::set_current_dir(".").unwrap();
}

#[test]
fn a_process_killed_at_any_step_leaves_every_slot_old_or_new_and_whole() {
    let tools = cc::temp_dir();
    let mut compiler = cc::c();
    compiler.arg(cc::repo("tests/crash/kill_at.c"));
    let kill_at = cc::build(compiler, tools.path(), "kill_at");
    let before = three_slots();
    let max_bytes = bytes_of(before.path());
    let (mut calls, mut seen, mut dropped) = (BTreeSet::new(), Vec::new(), 0);
    for step in 1.. {
        let dir = tempdir().unwrap();
        copy(before.path(), dir.path());
        let mut command = Command::new(&kill_at);
        command.arg(step.to_string()).arg(std::env::current_exe().unwrap());
        command.env("KVSTATE_TEST_BYTES", max_bytes.to_string());
        child(&mut command, "killed_child", dir.path());
        let output = command.output().unwrap();
        if output.status.code() == Some(77) {
            println!("skipped: processes cannot be traced here");
            return;
        }
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap().to_owned();

        let autosave =
            Autosave::open(AutosaveParams { max_bytes: Some(max_bytes), ..params(dir.path()) }).unwrap();
        let slot = loaded(&autosave, 0);
        dropped += usize::from(matches!(slot.draft, DraftOutcome::Dropped(_)));
        let numbers = [1, 2].map(|slot_id| match restore(&autosave, slot_id) {
            Restored::Slot(slot) => Some(number_of(&slot)),
            Restored::Cold(notes) => {
                assert_eq!(notes, [""; 0], "step {step}");
                None
            }
        });
        let now = (number_of(&slot), numbers[0], numbers[1]);
        // Nothing is half there, and nothing of it stays.
        assert!(bytes_of(dir.path()) <= max_bytes, "step {step}");
        save(&autosave, 3, &TOKENS);
        autosave.flush().unwrap();
        let strange = |name: &String| name.starts_with(".kvstate-");
        assert!(!names(dir.path()).iter().any(strange), "{:?}", names(dir.path()));
        if last.starts_with("ended after") {
            assert_eq!(now, (2, None, None));
            break;
        }
        calls.insert(last.rsplit_once("call ").expect("a killed process").1.to_owned());
        seen.push(now);
    }
    // One after another, and never back: the new slot is there before the old one goes.
    let order = [(1, Some(10), Some(20)), (2, None, Some(20)), (2, None, None)];
    let at = |now| order.iter().position(|&known| known == now).unwrap_or_else(|| panic!("{now:?}"));
    assert!(seen.iter().map(|&now| at(now)).is_sorted(), "{seen:?}");
    assert!(order.iter().all(|now| seen.contains(now)), "{seen:?}");
    // Lock, two temporary files with their locks, rooms, writes and syncs, renames, the manifest, what is removed.
    assert!(seen.len() >= 30 && calls.len() >= 6, "{} {calls:?}", seen.len());
    assert!(dropped >= 1, "{seen:?}");
}

// Killed at any time

/// Runs only as a child: saves one of three slots after the other, where two have room, until it is killed; says what is saved.
#[test]
fn saving_child() {
    let Some(dir) = folder_of_child() else { return };
    let first: i32 = std::env::var("KVSTATE_TEST_FIRST").unwrap().parse().unwrap();
    let autosave = Autosave::open(AutosaveParams { sync: first % 2 == 0, ..full(&dir) }).unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "\nsaves").unwrap();
    for number in first.. {
        let slot_id = u32::from(noise(&[number.into()], 1)[0] % 3);
        save_number(&autosave, slot_id, number, N_TOKENS);
        writeln!(out, "{slot_id} has {number}").unwrap();
    }
}

#[test]
fn a_process_killed_at_any_time_leaves_what_it_said_was_saved() {
    let n_kills = std::env::var("KVSTATE_TEST_KILLS").map_or(40, |n| n.parse().unwrap());
    let dir = tempdir().unwrap();
    save_number(&open(dir.path()), 2, 2, N_TOKENS);
    let max_bytes = 2 * bytes_of(dir.path());
    let (mut saved, mut n_saved) = (BTreeMap::from([(2, 2)]), 0);
    for round in 0..n_kills {
        let mut command = Command::new(std::env::current_exe().unwrap());
        child(&mut command, "saving_child", dir.path());
        let first = saved.values().max().unwrap() + 1;
        command.env("KVSTATE_TEST_FIRST", first.to_string()).env("KVSTATE_TEST_BYTES", max_bytes.to_string());
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut said = String::new();
        while !said.ends_with("saves\n") {
            assert!(out.read_line(&mut said).unwrap() > 0, "{said}");
        }
        // In the middle of the first save, the second, or the third: a save takes some 16 ms.
        for _ in 0..round % 3 {
            out.read_line(&mut said).unwrap();
        }
        let random = noise(&[i64::from(round)], 2);
        std::thread::sleep(Duration::from_micros(u64::from(u16::from_le_bytes([random[0], random[1]])) / 4));
        process.kill().unwrap();
        process.wait().unwrap();
        out.read_to_string(&mut said).unwrap();
        let said = said.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')?.split_once(" has "));
        for (slot_id, number) in said {
            saved.insert(slot_id.parse().unwrap(), number.parse().unwrap());
            n_saved += 1;
        }

        let autosave =
            Autosave::open(AutosaveParams { max_bytes: Some(max_bytes), ..params(dir.path()) }).unwrap();
        assert!(bytes_of(dir.path()) <= max_bytes);
        let found: BTreeMap<u32, i32> = slot_ids(&autosave)
            .into_iter()
            .map(|slot_id| (slot_id, number_of(&loaded(&autosave, slot_id))))
            .collect();
        // Each is what was said, or the one that came after it; and those that were used last are there.
        for (slot_id, number) in &found {
            assert!(
                saved.get(slot_id).is_none_or(|said| number >= said),
                "round {round}: {found:?}, said {saved:?}"
            );
        }
        let newest = *saved.values().max().unwrap();
        assert!(found.values().any(|&number| number >= newest), "round {round}: {found:?}, said {saved:?}");
        assert!(!found.is_empty() && found.len() <= 2, "round {round}: {found:?}");
        saved = found;
    }
    println!("killed {n_kills} times, between {n_saved} saves");
    assert!(n_saved >= n_kills / 2, "{n_saved}");
}

// Two processes

/// Runs only as a child: keeps the folder until it is killed.
#[test]
fn keeping_child() {
    let Some(dir) = folder_of_child() else { return };
    let _autosave = open(&dir);
    println!("\nkeeps");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn a_second_process_is_refused_until_the_first_has_ended_however_it_ends() {
    let dir = tempdir().unwrap();
    save(&open(dir.path()), 0, &TOKENS);
    let keeper = |dir: &Path| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        child(&mut command, "keeping_child", dir);
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(keeper.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "keeps"));
        keeper
    };
    for is_killed in [false, true] {
        let mut keeper = keeper(dir.path());
        let error = Autosave::open(params(dir.path())).unwrap_err();
        assert!(matches!(&error, Error::Locked { path } if path.ends_with("auto-slots.lock")), "{error}");
        if is_killed {
            keeper.kill().unwrap();
        } else {
            drop(keeper.stdin.take());
        }
        keeper.wait().unwrap();
        assert_eq!(loaded(&open(dir.path()), 0).tokens, TOKENS);
    }
}

/// Runs only as the child of the test below.
#[test]
fn no_locks_child() {
    let Some(dir) = folder_of_child() else { return };
    let autosave = Autosave::open(params(&dir)).unwrap();
    let note = "no lock can be had, so that nobody notices a second process: lock ";
    assert!(autosave.notes().len() == 1 && autosave.notes()[0].starts_with(note), "{:?}", autosave.notes());
    assert!(autosave.notes()[0].contains("Operation not supported"), "{:?}", autosave.notes());
    save(&autosave, 0, &TOKENS);
    Autosave::open(params(&dir)).unwrap();
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
    println!("went on");
}

#[test]
fn where_there_are_no_locks_that_is_said_and_it_goes_on() {
    let (tools, dir) = (cc::temp_dir(), tempdir().unwrap());
    let mut compiler = cc::c();
    compiler.args(["-shared", "-fPIC"]).arg(cc::repo("tests/crash/no_locks.c"));
    let no_locks = cc::build(compiler, tools.path(), "no_locks.so");
    let mut command = Command::new(std::env::current_exe().unwrap());
    child(&mut command, "no_locks_child", dir.path());
    let output = command.env("LD_PRELOAD", no_locks).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("went on"), "{text}");
}

// Where nothing can be written

#[test]
fn a_full_disk_and_a_read_only_one_cost_no_slot() {
    // File systems of their own, in a mount namespace of its own.
    let script = r#"
        mkdir "$1/full" "$1/ro" &&
        mount -t tmpfs -o size=2m tmpfs "$1/full" && cp "$1/slots/"* "$1/full" &&
        mount -t tmpfs tmpfs "$1/ro" && cp "$1/slots/"* "$1/ro" && mount -o remount,ro "$1/ro" &&
        exec "$2" --exact no_room_child --nocapture"#;
    let dir = tempdir().unwrap();
    save(&open(&dir.path().join("slots")), 0, &TOKENS);
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .env("KVSTATE_TEST_CHILD", dir.path())
        .output();
    let Ok(output) = output else {
        println!("skipped: there is no unshare");
        return;
    };
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if text.contains("unshare failed") || text.contains("mount:") {
        println!("skipped: no mount namespace can be had here: {text}");
        return;
    }
    assert!(output.status.success() && text.contains("no slot lost"), "{text}");
}

/// A save of slot 0 that cannot be done: the reason, in the foreground and in the background. Its old file stands.
fn failed_save(autosave: &Autosave, n_tokens: usize) -> String {
    let before =
        (names(autosave.directory()), fs::read(autosave.directory().join("auto-slot0.bin")).unwrap());
    let tokens = vec![1; n_tokens];
    autosave.mark(0, 1);
    let failed =
        with_slot(&tokens, false, |target, contents| autosave.save(0, target, 0, contents)).unwrap_err();
    let begun =
        with_slot(&tokens, false, |target, contents| autosave.save_in_background(0, target, 0, contents));
    let again = begun.and_then(|()| autosave.wait(0)).unwrap_err();
    assert_eq!((failed.status(), failed.to_string()), (Status::Io, again.to_string()));
    assert!(autosave.is_dirty(0));
    assert!(
        (names(autosave.directory()), fs::read(autosave.directory().join("auto-slot0.bin")).unwrap())
            == before
    );
    failed.to_string()
}

/// Runs only as the child of the test above.
#[test]
fn no_room_child() {
    let Some(dir) = folder_of_child() else { return };

    let full = dir.join("full");
    let autosave = open(&full);
    let reason = failed_save(&autosave, 1 << 20);
    let path = full.join("auto-slot0.bin");
    assert!(
        reason.starts_with(&format!("reserve room for {}: No space left on device", path.display())),
        "{reason}"
    );
    // Not even room for a name's page.
    let mut filler = File::create(full.join("filler")).unwrap();
    while filler.write(&[0; 4096]).is_ok() {}
    failed_save(&autosave, 5);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
    drop(autosave);
    let autosave = open(&full);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
    drop(filler);
    fs::remove_file(full.join("filler")).unwrap();
    save(&autosave, 0, &TOKENS[..2]);
    drop(autosave);
    assert_eq!(loaded(&open(&full), 0).tokens, TOKENS[..2]);

    let ro = dir.join("ro");
    let autosave = Autosave::open(params(&ro)).unwrap();
    let lock = format!("lock {}: Read-only file system (os error 30)", ro.join("auto-slots.lock").display());
    assert_eq!(autosave.notes(), [format!("nothing can be saved before this is otherwise: {lock}")]);
    assert_eq!(failed_save(&autosave, 5), lock);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
    assert_eq!(autosave.remove(0).unwrap_err().to_string(), lock);
    assert_eq!(autosave.flush().unwrap_err().to_string(), lock);
    assert_eq!(slot_ids(&autosave), [0]);
    // It is otherwise now.
    assert!(Command::new("mount").args(["-o", "remount,rw"]).arg(&ro).status().unwrap().success());
    let other = open(&ro);
    let taken = with_slot(&TOKENS, false, |target, contents| autosave.save(0, target, 0, contents));
    assert_eq!(taken.unwrap_err().status(), Status::Locked);
    drop(other);
    save(&autosave, 0, &TOKENS[..2]);
    assert!(matches!(Autosave::open(params(&ro)), Err(Error::Locked { .. })));
    println!("no slot lost");
}

#[test]
fn no_file_that_can_be_opened_costs_no_slot() {
    let dir = tempdir().unwrap();
    save(&open(dir.path()), 0, &TOKENS);
    let output = Command::new("sh")
        .args(["-c", r#"ulimit -n 40 && exec "$1" --exact no_files_child --nocapture"#, "sh"])
        .arg(std::env::current_exe().unwrap())
        .env("KVSTATE_TEST_CHILD", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("no slot lost"), "{text}");
    assert_eq!(loaded(&open(dir.path()), 0).tokens, TOKENS[..2]);
}

/// Runs only as the child of the test above.
#[test]
fn no_files_child() {
    let Some(dir) = folder_of_child() else { return };
    let other = tempdir().unwrap();
    let autosave = open(&dir);
    let before = (names(&dir), fs::read(dir.join("auto-slot0.bin")).unwrap());
    let open_files: Vec<_> = (0..40).map_while(|_| File::open("/dev/null").ok()).collect();
    let failed =
        with_slot(&[1], false, |target, contents| autosave.save(0, target, 0, contents)).unwrap_err();
    let refused = Autosave::open(params(other.path())).unwrap_err();
    let notes = cold(&autosave, 0);
    drop(open_files);
    for reason in [failed.to_string(), refused.to_string(), notes[0].clone()] {
        assert!(reason.contains("Too many open files"), "{reason}");
    }
    assert_eq!((failed.status(), refused.status()), (Status::Io, Status::Io));
    assert!((names(&dir), fs::read(dir.join("auto-slot0.bin")).unwrap()) == before);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
    save(&autosave, 0, &TOKENS[..2]);
    println!("no slot lost");
}
