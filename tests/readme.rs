//! The examples of the README are programs: they compile without warnings and run.
#![allow(missing_docs, reason = "a test")]

mod cc;

use std::fs;
use std::process::Command;

use cc::{Link, build, link, repo, run, temp_dir};

/// The one code block of the README in a language.
fn example(language: &str) -> String {
    let readme = fs::read_to_string(repo("README.md")).expect("README.md");
    let opening = format!("```{language}\n");
    let mut blocks = readme.split(&opening).skip(1);
    let block = blocks.next().and_then(|rest| rest.split("```").next());
    assert!(blocks.next().is_none(), "more than one block of {language}");
    block.unwrap_or_else(|| panic!("no block of {language}")).to_owned()
}

fn compiled(language: &str, mut compiler: Command, how: Link) -> String {
    let dir = temp_dir();
    let source = dir.path().join(format!("example.{language}"));
    fs::write(&source, example(language)).expect("the source");
    compiler.arg(&source);
    link(&mut compiler, how);
    run(&mut Command::new(build(compiler, dir.path(), "example")))
}

#[test]
fn the_c_example_saves_restores_and_is_refused() {
    for how in [Link::Dynamic, Link::Static] {
        let printed = compiled("c", cc::c(), how);
        assert!(printed.contains("bytes, positions 0 to 2"), "{printed}");
        assert!(printed.contains("refused: truncated state"), "{printed}");
    }
}

#[test]
fn the_cpp_example_takes_a_checkpoint_of_the_window_alone() {
    let printed = compiled("cpp", cc::cpp(), Link::Dynamic);
    // 128 cells of one layer: 12 bytes of metadata, K and V of 128 bytes each.
    let checkpoint = 8 + 8 + 128 * 12 + 16 + 2 * (12 + 128 * 128);
    assert!(printed.ends_with(&format!("checkpoint {checkpoint}\n")), "{printed}");
}

#[test]
fn the_python_example_saves_restores_and_is_refused() {
    let printed = run(Command::new("python3")
        .args(["-c", &example("python")])
        .env("PYTHONPATH", repo("ffi-examples/python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("KVSTATE_LIB", cc::dylib()));
    assert!(printed.contains("bytes, positions 0 to 2"), "{printed}");
    assert!(printed.contains("refused: truncated state"), "{printed}");
}
