//! The tests of caches on devices fail when the library is wrong: it is built with one fault after another.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A fault: the text `right`, which is in `file` once, becomes `wrong`.
struct Fault {
    what: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const FAULTS: [Fault; 13] = [
    Fault {
        what: "a staging buffer is filled by kernels before it was copied away",
        file: "src/storage/cuda/gather.rs",
        right: "bound.wait(self.lane.compute, buffer.emptied)?;",
        wrong: "",
    },
    Fault {
        what: "a staging buffer is filled by a copy before kernels have emptied it",
        file: "src/storage/cuda/scatter.rs",
        right: "bound.wait(self.lane.copy, buffer.emptied)?;",
        wrong: "",
    },
    Fault {
        what: "a pinned buffer is filled before it was copied to the device",
        file: "src/storage/cuda/scatter.rs",
        right: "unsafe { bound.driver().event_synchronize(bound.ordinal(), buffer.copied.0)? };",
        wrong: "",
    },
    Fault {
        what: "kernels work on a staging buffer before it was filled",
        file: "src/storage/cuda/scatter.rs",
        right: "bound.wait(self.lane.compute, buffer.filled)?;",
        wrong: "",
    },
    Fault {
        what: "pinned memory is read before the copy to it",
        file: "src/storage/cuda/gather.rs",
        right: "unsafe { bound.driver().event_synchronize(bound.ordinal(), buffer.copied.0)? };",
        wrong: "",
    },
    Fault {
        what: "kernels do not wait for the caller's stream",
        file: "src/storage/cuda/lane.rs",
        right: "bound.wait(self.compute, self.joined)?;",
        wrong: "",
    },
    Fault {
        what: "copies do not wait for the caller's stream",
        file: "src/storage/cuda/lane.rs",
        right: "bound.wait(self.copy, self.joined)",
        wrong: "Ok(())",
    },
    Fault {
        what: "the caller's stream does not wait for a snapshot",
        file: "src/storage/cuda/lane.rs",
        right: "bound.wait(caller.handle, self.joined)?;",
        wrong: "",
    },
    Fault {
        what: "a restore returns before it is done",
        file: "src/storage/cuda/lane.rs",
        right: "let computed = bound.synchronize(self.compute);",
        wrong: "let computed = Ok(());",
    },
    Fault {
        what: "a kernel is off by one row",
        file: "cuda/kv.cu",
        right: "return cells ? ((const u32 *) cells)[i] : i;",
        wrong: "return cells ? ((const u32 *) cells)[i] : i + 1;",
    },
    Fault {
        what: "a list of cells is off by one row",
        file: "src/storage/cuda/moves.rs",
        right: "self.cells.extend(map.moves().iter().flat_map(|m| m.dst..m.dst + m.len));",
        wrong: "self.cells.extend(map.moves().iter().flat_map(|m| m.dst + 1..m.dst + 1 + m.len));",
    },
    Fault {
        what: "a kernel has the wrong width of elements",
        file: "cuda/kv.cu",
        right: "kv_move_8(const KvMove * moves) { move_elements<u64>",
        wrong: "kv_move_8(const KvMove * moves) { move_elements<u32>",
    },
    Fault {
        what: "the kernel of another width is chosen",
        file: "src/storage/cuda/moves.rs",
        right: "4 if is_aligned => Kernel::Elements4,",
        wrong: "4 if is_aligned => Kernel::Elements2,",
    },
];

/// Tests of tests/device.rs that are quick.
const TESTS: [&str; 5] =
    ["many_chunks", "callers_stream", "a_restore_is_done", "background", "little_memory"];

/// The driver of each run: lazy, and five orders of an eager one.
const DRIVERS: [&str; 6] = ["lazy", "eager:1", "eager:2", "eager:3", "eager:4", "eager:5"];

/// A copy of the crate, with what tests/device.rs needs of it.
struct Copy {
    folder: PathBuf,
    target: PathBuf,
}

impl Copy {
    fn new() -> Self {
        let tmp = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted");
        let copy = Self { folder: tmp.join("kvstate"), target: tmp.join("target") };
        if copy.folder.exists() {
            fs::remove_dir_all(&copy.folder).expect("an old copy");
        }
        for part in ["src", "cuda", "include", "tests", "build.rs", "Cargo.lock"] {
            copy_all(&repo(part), &copy.folder.join(part));
        }
        // Nothing but a Rust library, without what only the header and other tests depend on.
        let manifest = fs::read_to_string(repo("Cargo.toml")).expect("Cargo.toml");
        let manifest = manifest.replace(r#"["rlib", "cdylib", "staticlib"]"#, r#"["rlib"]"#);
        let unused = ["cbindgen", "criterion", "proptest"];
        let is_kept = |line: &&str| !unused.iter().any(|name| line.starts_with(&format!("{name} = ")));
        let lines: Vec<_> = manifest.lines().filter(is_kept).collect();
        let manifest = lines.join("\n").replace("[[bench]]", "[[package.metadata.bench]]");
        fs::write(copy.folder.join("Cargo.toml"), manifest + "\n[workspace]\n").expect("Cargo.toml");
        copy
    }

    fn cargo(&self) -> Command {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .current_dir(&self.folder)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo.args(["test", "--quiet", "--offline", "--test", "device"]);
        cargo
    }

    fn build(&self, what: &str) {
        let output = self.cargo().arg("--no-run").output().expect("cargo");
        assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Whether the tests pass; what they said.
    fn passes(&self, driver: &str) -> (bool, String) {
        let output = self.cargo().arg("--").args(TESTS).env("KVSTATE_TEST_DRIVER", driver).output();
        let output = output.expect("cargo");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn copy_all(from: &Path, to: &Path) {
    if !from.is_dir() {
        fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
        fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
        return;
    }
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        if entry.file_name() != "fixtures" {
            copy_all(&entry.path(), &to.join(entry.file_name()));
        }
    }
}

#[test]
#[ignore = "builds the library for every fault, minutes: a step of scripts/test --all"]
fn every_planted_fault_is_caught() {
    let copy = Copy::new();
    copy.build("the library as it is");
    for driver in DRIVERS {
        let (is_passed, said) = copy.passes(driver);
        assert!(is_passed, "without a fault, {driver}: {said}");
    }
    let mut missed = Vec::new();
    for Fault { what, file, right, wrong } in FAULTS {
        let path = copy.folder.join(file);
        let text = fs::read_to_string(&path).expect("a source");
        assert_eq!(
            text.matches(right).count(),
            1,
            "{file} has '{right}' that often: look for it, and at the fault"
        );
        fs::write(&path, text.replace(right, wrong)).expect("a source");
        copy.build(what);
        let caught = DRIVERS.into_iter().find_map(|driver| {
            let (is_passed, said) = copy.passes(driver);
            (!is_passed).then_some((driver, said))
        });
        match caught {
            Some((driver, said)) => {
                let tests = said.lines().filter_map(|line| line.strip_prefix("    "));
                println!("{what}: caught, {driver}: {}", tests.collect::<Vec<_>>().join(", "));
            }
            None => missed.push(what),
        }
        fs::write(&path, text).expect("a source");
    }
    assert!(missed.is_empty(), "not caught: {missed:#?}");
}
