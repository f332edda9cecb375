//! Slot files when a save does not end: a process killed at every step, and at random times.
#![cfg(target_os = "linux")]
#![allow(missing_docs, reason = "a test")]

mod cc;
mod slots;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvstate::session::{SlotContents, Verify};
use kvstate::storage::ProgressCallback;
use slots::support::noise;
use slots::{busy_draft, busy_target, draft, identity, load_slot, save_slot, target};
use tempfile::TempDir;

/// Enough for several writes.
const N_DRIVER: usize = 2 << 20;

/// Saves a slot that only the tests of crashes have.
fn save_number(path: &Path, number: i32) {
    let driver = noise(&[number.into()], N_DRIVER);
    let tokens = [number];
    let contents = SlotContents {
        tokens: &tokens,
        draft: Some((&mut draft(), 1)),
        driver: &driver,
        identity: identity(),
        ..SlotContents::default()
    };
    target().slot_save(path, 0, contents).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A folder with the slot of number 1, its bytes, and those of number 2.
fn numbers() -> (TempDir, PathBuf, [Vec<u8>; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let bytes = [2, 1].map(|number| {
        save_number(&path, number);
        fs::read(&path).unwrap()
    });
    let [second, first] = bytes;
    (dir, path, [first, second])
}

/// Which of the two slots is there, by a load that verifies it.
fn loaded_number(path: &Path) -> i32 {
    let loaded = load_slot(path, &mut busy_target(), &mut busy_draft(), Verify::Full).unwrap();
    assert_eq!((loaded.verified, &loaded.notes[..]), (Verify::Full, &[][..]));
    let number = loaded.tokens[0];
    assert!(loaded.driver.unwrap() == noise(&[number.into()], N_DRIVER));
    number
}

/// The same, when nobody saves: it has the bytes too.
fn number_of(path: &Path, bytes: &[Vec<u8>; 2]) -> i32 {
    let number = loaded_number(path);
    assert!(fs::read(path).unwrap() == bytes[usize::try_from(number).unwrap() - 1]);
    number
}

/// Runs only as the child of the tests below.
#[test]
fn killed_child() {
    let Some(path) = std::env::var_os("KVSTATE_TEST_KILLED").map(PathBuf::from) else { return };
    let Ok(first) = std::env::var("KVSTATE_TEST_FIRST") else {
        // The tracer counts steps between these two.
        std::env::set_current_dir(".").unwrap();
        save_number(&path, 2);
        std::env::set_current_dir(".").unwrap();
        return;
    };
    let first: i32 = first.parse().unwrap();
    println!("saves");
    loop {
        save_number(&path, first);
        save_number(&path, 3 - first);
    }
}

fn child(command: &mut Command, path: &Path) {
    command
        .args(["--exact", "killed_child", "--nocapture", "--test-threads=1"])
        .env("KVSTATE_TEST_KILLED", path)
        .stderr(Stdio::null());
}

#[test]
fn a_process_killed_at_any_step_of_a_save_leaves_the_old_file_or_the_new_one_and_the_next_save_cleans_up() {
    let tools = cc::temp_dir();
    let mut compiler = cc::c();
    compiler.arg(cc::repo("tests/crash/kill_at.c"));
    let kill_at = cc::build(compiler, tools.path(), "kill_at");
    let (dir, path, bytes) = numbers();
    let (mut calls, mut seen, mut left_behind) = (BTreeSet::new(), Vec::new(), 0);
    for step in 1.. {
        fs::write(&path, &bytes[0]).unwrap();
        let mut command = Command::new(&kill_at);
        command.arg(step.to_string()).arg(std::env::current_exe().unwrap());
        child(&mut command, &path);
        let output = command.output().unwrap();
        if output.status.code() == Some(77) {
            println!("skipped: processes cannot be traced here");
            return;
        }
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap();
        if last.starts_with("ended after") {
            break;
        }
        let call = last.rsplit_once("call ").expect("a killed process").1.to_owned();
        calls.insert(call);
        seen.push(number_of(&path, &bytes));
        let others: Vec<_> = names(dir.path()).into_iter().filter(|name| name != "slot.bin").collect();
        assert!(others.len() <= 1 && others.iter().all(|name| name.starts_with(".kvstate-")), "{others:?}");
        left_behind += others.len();
        save_number(&path, 1);
        assert_eq!(names(dir.path()), ["slot.bin"], "step {step}");
    }
    assert_eq!(number_of(&path, &bytes), 2);
    // Create, lock, permissions, reserve, five writes, sync, rename, sync.
    assert!(seen.len() >= 10 && calls.len() >= 6, "{seen:?} {calls:?}");
    // The old one before the rename, the new one after it.
    assert!(seen.is_sorted() && seen.contains(&1) && seen.contains(&2), "{seen:?}");
    assert!(left_behind >= 8, "{left_behind}");
}

#[test]
fn a_process_killed_at_random_times_leaves_the_old_file_or_the_new_one() {
    let (dir, path, bytes) = numbers();
    let mut seen = [0, 0];
    // `KVSTATE_TEST_KILLS`: thousands of them, for a run of its own.
    let n: i32 = std::env::var("KVSTATE_TEST_KILLS").map_or(200, |n| n.parse().expect("a number"));
    for round in 0..n {
        let mut child = saver(&path, 1 + round % 2);
        // From 0 to 16 ms, evenly.
        let random = noise(&[round.into()], 2);
        let micros = u64::from(u16::from_le_bytes([random[0], random[1]])) / 4;
        std::thread::sleep(Duration::from_micros(micros));
        child.kill().unwrap();
        child.wait().unwrap();
        seen[usize::try_from(number_of(&path, &bytes)).unwrap() - 1] += 1;
        assert!(names(dir.path()).len() <= 2, "{:?}", names(dir.path()));
    }
    println!("{n} kills left the first slot {} times, the second {} times", seen[0], seen[1]);
    assert!(seen[0] > 10 && seen[1] > 10, "killed before it saved: {seen:?}");
    save_number(&path, 1);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

/// A process that saves the two slots in turn, beginning with one of them, until it is killed.
fn saver(path: &Path, first: i32) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    child(&mut command, path);
    let mut saver =
        command.env("KVSTATE_TEST_FIRST", first.to_string()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(saver.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("saves")));
    saver
}

#[test]
fn two_processes_that_save_to_one_file_do_not_disturb_each_other() {
    let (dir, path, _) = numbers();
    let mut savers = [saver(&path, 1), saver(&path, 2)];
    for _ in 0..50 {
        loaded_number(&path);
    }
    for saver in &mut savers {
        assert!(saver.try_wait().unwrap().is_none(), "a save failed");
        saver.kill().unwrap();
        saver.wait().unwrap();
    }
    save_number(&path, 1);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

// Temporary files

#[test]
fn a_temporary_file_without_a_writer_is_removed_whatever_process_its_name_says() {
    let (dir, path, _) = numbers();
    let own = format!(".kvstate-{}-0000000000000000.tmp", std::process::id());
    fs::write(dir.path().join(&own), b"half").unwrap();
    fs::write(dir.path().join(".kvstate-1-0000000000000000.tmp"), b"half").unwrap();
    save_slot(&path);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

#[test]
fn a_temporary_file_with_a_writer_is_kept() {
    let (dir, path, _) = numbers();
    let other = dir.path().join(".kvstate-1-0000000000000000.tmp");
    let writer = File::create(&other).unwrap();
    writer.lock().unwrap();
    save_slot(&path);
    assert!(other.exists());
    // Not by closing it: a process that another test is about to start may have it open for a moment.
    writer.unlock().unwrap();
    save_slot(&path);
    assert!(!other.exists());
}

#[test]
fn a_save_in_the_middle_of_another_in_the_same_directory_leaves_it_alone() {
    let (dir, path, _) = numbers();
    let (folder, other) = (dir.path().to_owned(), dir.path().join("other.bin"));
    let during = Arc::new(Mutex::new(Vec::new()));
    let sent = Arc::clone(&during);
    let mut source = target();
    source.set_progress(Some(ProgressCallback::new(move |_| {
        save_slot(&other);
        *sent.lock().unwrap() = names(&folder);
        ControlFlow::Continue(())
    })));
    let driver = vec![0; N_DRIVER];
    source.slot_save(&path, 0, SlotContents { driver: &driver, ..SlotContents::default() }).unwrap();
    let during = during.lock().unwrap();
    assert!(during.len() == 3 && during[0].starts_with(".kvstate-"), "{during:?}");
    assert_eq!(names(dir.path()), ["other.bin", "slot.bin"]);
}

#[test]
fn what_only_has_the_name_of_a_temporary_file_is_kept() {
    let (dir, path, _) = numbers();
    fs::create_dir(dir.path().join(".kvstate-folder.tmp")).unwrap();
    std::os::unix::fs::symlink("slot.bin", dir.path().join(".kvstate-link.tmp")).unwrap();
    fs::write(dir.path().join(".kvstate-notes"), b"").unwrap();
    save_slot(&path);
    assert_eq!(names(dir.path()), [".kvstate-folder.tmp", ".kvstate-link.tmp", ".kvstate-notes", "slot.bin"]);
}

#[test]
fn a_slot_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    save_slot(&path);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}
