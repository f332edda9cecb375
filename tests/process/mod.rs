//! Processes of a test: its own binary again, in which one test runs alone.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::ffi::OsStr;
use std::process::Command;

/// Begins the lines that a process has for the test that started it.
const SAYS: &str = "says: ";

/// For the test that started this process.
pub fn say(line: &str) {
    println!("\n{SAYS}{line}");
}

/// Runs a test in a process of its own, in which `variable` is set; what it said.
pub fn run(test: &str, variable: &str, value: impl AsRef<OsStr>) -> Vec<String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    output(command.args(["--exact", test, "--nocapture"]).env(variable, value))
}

/// What a command that ends in [`run`]'s test said.
pub fn output(command: &mut Command) -> Vec<String> {
    let output = command.output().unwrap();
    let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{text}{errors}");
    text.lines().filter_map(|line| line.strip_prefix(SAYS)).map(str::to_owned).collect()
}
