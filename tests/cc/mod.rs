//! Compiles C and C++ programs against the library that `cargo test` has just built, and runs them.
#![allow(dead_code, reason = "no test uses all of it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Warnings are errors in everything that is compiled here.
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// What a C program that links libkvstate.a has to name behind it.
pub const NATIVE_LIBS: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// A file of the repository.
pub fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The folder with this test's own executable: cargo compiles rlib, cdylib and staticlib in one go, so what lies
/// here was built from the sources that the test was built from.
pub fn lib_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's executable");
    exe.parent().expect("its folder").to_owned()
}

/// libkvstate.so.
pub fn dylib() -> PathBuf {
    existing(lib_dir().join("libkvstate.so"))
}

/// libkvstate.a.
pub fn staticlib() -> PathBuf {
    existing(lib_dir().join("libkvstate.a"))
}

fn existing(path: PathBuf) -> PathBuf {
    assert!(path.is_file(), "{} is not there: cargo did not build it with the test", path.display());
    path
}

/// A folder of its own, gone after the test.
pub fn temp_dir() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// How a program is linked.
#[derive(Clone, Copy)]
pub enum Link {
    Dynamic,
    Static,
}

/// A C11 compiler.
pub fn c() -> Command {
    let mut cc = Command::new("cc");
    cc.arg("-std=c11").arg("-D_POSIX_C_SOURCE=200809L").args(WARNINGS).arg("-I").arg(repo("include"));
    cc
}

/// A C++17 compiler.
pub fn cpp() -> Command {
    let mut cc = Command::new("g++");
    cc.arg("-std=c++17").args(WARNINGS).arg("-I").arg(repo("include"));
    cc
}

/// Adds what links kvstate, behind the sources.
pub fn link(cc: &mut Command, how: Link) -> &mut Command {
    match how {
        Link::Dynamic => {
            let dir = dylib().parent().expect("its folder").to_owned();
            cc.arg("-L").arg(&dir).arg("-lkvstate").arg(format!("-Wl,-rpath,{}", dir.display()))
        }
        Link::Static => cc.arg(staticlib()).args(NATIVE_LIBS),
    }
    .arg("-pthread")
}

/// Compiles to an executable called `name` in `dir`.
pub fn build(mut cc: Command, dir: &Path, name: &str) -> PathBuf {
    let exe = dir.join(name);
    run(cc.arg("-o").arg(&exe));
    exe
}

/// Compiles a source text without linking.
pub fn compiles(mut cc: Command, dir: &Path, name: &str, text: &str) -> Output {
    let source = dir.join(name);
    fs::write(&source, text).expect("the source");
    cc.arg("-fsyntax-only").arg(source).output().expect("a compiler")
}

/// Runs a command that has to succeed; returns its standard output.
pub fn run(command: &mut Command) -> String {
    // cargo's search path has its other folder of libraries first, where an older build may lie.
    if command.get_envs().all(|(name, _)| name != "LD_LIBRARY_PATH") {
        command.env_remove("LD_LIBRARY_PATH");
    }
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}
