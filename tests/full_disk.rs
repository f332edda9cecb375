//! Where no file can be written: a named error, the old file whole, nothing left beside it, and the next save works. Of both kinds
//! of file, those of a sequence and those of a slot.
#![cfg(target_os = "linux")]
#![allow(missing_docs, reason = "a test")]

mod process;
mod slots;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use kvstate::session::SlotContents;
use kvstate::{Result, Status};
use process::{output, say};
use slots::target;

/// Bytes of a file, about: enough for several writes.
const LARGE: usize = 2 << 20;

type Save = fn(&Path) -> Result<u64>;

const SAVES: [(&str, Save); 2] = [
    ("sequence.bin", |path| target().state_seq_save_file(path, 0, &vec![0; LARGE / 4])),
    ("slot.bin", |path| {
        let driver = vec![0; LARGE];
        target().slot_save(path, 0, SlotContents { driver: &driver, ..SlotContents::default() })
    }),
];

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A save fails: `what` of the file for this reason. Whatever was in its folder is as it was.
#[track_caller]
fn assert_refused(save: Save, path: &Path, what: &str, reason: &str) {
    let folder = path.parent().unwrap();
    let before = names(folder);
    let old = fs::read(path).unwrap();
    let error = save(path).unwrap_err();
    assert_eq!(error.status(), Status::Io);
    let text = format!("{what} {}: {reason}", path.display());
    assert!(error.to_string().starts_with(&text), "{error}, not: {text}");
    assert!(fs::read(path).unwrap() == old);
    assert_eq!(names(folder), before);
}

/// A folder with a file of each kind.
fn saved() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, save) in SAVES {
        assert!(save(&dir.path().join(name)).unwrap() > LARGE as u64);
    }
    dir
}

/// Set in the processes that the tests start.
const FOLDER: &str = "KVSTATE_TEST_FULL_DISK";

fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Runs a test behind a line of shell, whose $1 is the folder; what it said.
fn behind(program: &str, arguments: &[&str], script: &str, test: &str, folder: &Path) -> Vec<String> {
    let script = format!(r#"{script} && exec "$2" --exact {test} --nocapture"#);
    let mut command = Command::new(program);
    command.args(arguments).args(["-c", &script, "sh"]).arg(folder).arg(std::env::current_exe().unwrap());
    output(command.env(FOLDER, folder))
}

const IN_A_MOUNT_NAMESPACE: [&str; 3] = ["--mount", "--map-root-user", "sh"];

/// Whether file systems can be mounted in a namespace of its own.
fn can_mount() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let mut unshare = Command::new("unshare");
    unshare.args(IN_A_MOUNT_NAMESPACE).args(["-c", r#"mount -t tmpfs tmpfs "$1""#, "sh"]).arg(dir.path());
    let can_mount = unshare.output().is_ok_and(|output| output.status.success());
    if !can_mount {
        println!("skipped: no mount namespace can be had here");
    }
    can_mount
}

#[test]
fn a_full_disk_is_named_and_there_is_room_again_for_the_next_save() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = r#"mount -t tmpfs -o size=7m tmpfs "$1""#;
    assert_eq!(
        behind("unshare", &IN_A_MOUNT_NAMESPACE, mount, "saves_on_a_small_disk", dir.path()),
        ["saved"]
    );
}

/// Runs only as a child.
#[test]
fn saves_on_a_small_disk() {
    let Some(folder) = folder() else { return };
    for (name, save) in SAVES {
        let path = folder.join(name);
        save(&path).unwrap();
        let ballast = folder.join("ballast");
        fs::write(&ballast, vec![0; 4 << 20]).unwrap();
        assert_refused(save, &path, "reserve room for", "No space left on device");
        fs::remove_file(&ballast).unwrap();
        save(&path).unwrap();
        fs::remove_file(&path).unwrap();
    }
    say("saved");
}

#[test]
fn a_read_only_disk_is_named() {
    if !can_mount() {
        return;
    }
    let dir = saved();
    let mount = r#"mount --bind "$1" "$1" && mount -o remount,bind,ro "$1""#;
    let said = behind("unshare", &IN_A_MOUNT_NAMESPACE, mount, "saves_on_a_read_only_disk", dir.path());
    assert_eq!(said, ["refused"]);
    for (name, save) in SAVES {
        save(&dir.path().join(name)).unwrap();
    }
}

/// Runs only as a child.
#[test]
fn saves_on_a_read_only_disk() {
    let Some(folder) = folder() else { return };
    for (name, save) in SAVES {
        let what = "create a temporary file beside";
        assert_refused(save, &folder.join(name), what, "Read-only file system");
    }
    say("refused");
}

/// A limit of the process. What cannot be reserved for another reason than a full disk is left to the writes.
#[test]
fn a_write_that_fails_in_the_middle_is_named() {
    let dir = saved();
    // 1 MiB, in blocks of 512 bytes; the signal would end the process.
    let limit = "trap '' XFSZ && ulimit -f 2048";
    assert_eq!(behind("sh", &[], limit, "saves_below_a_limit", dir.path()), ["refused"]);
}

/// Runs only as a child.
#[test]
fn saves_below_a_limit() {
    let Some(folder) = folder() else { return };
    for (name, save) in SAVES {
        assert_refused(save, &folder.join(name), "write", "File too large");
    }
    say("refused");
}

#[test]
fn no_file_that_can_be_opened_is_named_and_the_next_save_works() {
    let dir = saved();
    assert_eq!(behind("sh", &[], "ulimit -n 40", "saves_without_files", dir.path()), ["saved"]);
}

/// Runs only as a child.
#[test]
fn saves_without_files() {
    let Some(folder) = folder() else { return };
    for (name, save) in SAVES {
        let path = folder.join(name);
        let old = fs::read(&path).unwrap();
        let open: Vec<_> = (0..40).map_while(|_| File::open("/dev/null").ok()).collect();
        let error = save(&path).unwrap_err();
        drop(open);
        assert_eq!(error.status(), Status::Io);
        let text = format!("create a temporary file beside {}: Too many open files", path.display());
        assert!(error.to_string().starts_with(&text), "{error}");
        assert!(fs::read(&path).unwrap() == old);
        save(&path).unwrap();
    }
    assert_eq!(names(&folder), ["sequence.bin", "slot.bin"]);
    say("saved");
}

#[test]
fn a_missing_directory_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for (name, save) in SAVES {
        let path = dir.path().join("nowhere").join(name);
        let error = save(&path).unwrap_err();
        assert_eq!(error.status(), Status::Io);
        let text = format!("create a temporary file beside {}: No such file or directory", path.display());
        assert!(error.to_string().starts_with(&text), "{error}");
    }
    assert!(names(dir.path()).is_empty());
}
