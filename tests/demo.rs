//! The demo, a server's day, on the host and on a device: it fails if a step differs from a run that was never interrupted.
#![allow(missing_docs, reason = "a test")]

mod cc;
mod fakecuda;

use std::process::Command;

use cc::{Link, build, link, repo, run, temp_dir};
use fakecuda::FakeCuda;

/// What the demo prints with a driver of so many devices.
fn demo(devices: &str, mode: &str) -> String {
    let cuda = FakeCuda::load();
    let dir = temp_dir();
    let mut compiler = cc::cpp();
    compiler.arg("-O1").arg(repo("ffi-examples/cpp/demo.cpp"));
    link(&mut compiler, Link::Dynamic);
    let mut demo = Command::new(build(compiler, dir.path(), "demo"));
    demo.arg(repo("tests/fixtures/tiny2x64_kf16_vf16_n64_none.slot"))
        .env("LD_LIBRARY_PATH", &cuda.folder)
        .env("FAKECUDA_KERNELS", &cuda.kernels)
        .env("FAKECUDA_DEVICES", devices)
        .env("FAKECUDA_MODE", mode);
    run(&mut demo)
}

#[test]
fn the_demo_is_on_the_device_where_there_is_one() {
    for mode in ["lazy", "eager"] {
        let printed = demo("1", mode);
        assert!(printed.starts_with("The server's cache is on CUDA device 0.\n"), "{printed}");
        assert!(printed.ends_with("All as in a run that was never interrupted.\n"), "{printed}");
    }
}

/// The line of the report that begins with these words.
fn line<'a>(printed: &'a str, begin: &str) -> &'a str {
    let line = printed.lines().find(|line| line.trim_start().starts_with(begin));
    line.unwrap_or_else(|| panic!("no line of {begin:?}: {printed}"))
}

/// The reason that stands below such a line.
fn reason<'a>(printed: &'a str, begin: &str) -> &'a str {
    let mut lines = printed.lines().skip_while(|line| !line.trim_start().starts_with(begin));
    lines.nth(1).unwrap_or_else(|| panic!("nothing below {begin:?}: {printed}"))
}

#[test]
fn the_second_process_of_the_demo_goes_back_to_a_checkpoint_of_the_slot_file() {
    let printed = demo("0", "lazy");
    let loaded = "slot file loaded beside the other user's sequence";
    assert!(line(&printed, loaded).ends_with("yes"), "{printed}");
    let restored = "360 tokens; checkpoints at 64, 128, 192, 256, 300; every byte verified";
    assert_eq!(reason(&printed, loaded).trim(), restored);

    let (_, edited) =
        printed.split_once("There the user edits token 210.").expect("the edit of the second process");
    line(edited, "back to the checkpoint at 192, seq_rm behind it ");
    assert!(line(edited, "the rest of the prompt").ends_with(" 108  yes"), "{printed}");
    assert!(line(edited, "with seq_rm alone").ends_with("no, as it must be"), "{printed}");
    assert!(line(edited, "another answer").ends_with("yes"), "{printed}");
}

#[test]
fn the_demo_names_what_is_damaged_and_what_is_anothers() {
    let printed = demo("0", "lazy");
    for (file, named) in [
        ("half a file", "truncated state"),
        ("one bit flipped, in a tensor", "crc32c of the memory state"),
        ("one bit flipped, in a checkpoint", "checkpoints are ignored: crc32c"),
        ("a file of a model with other weights", "model: the state has"),
        ("llama.cpp's file, of another model", "mismatched key type"),
        ("a file without identity and checksums", "checksums: none"),
    ] {
        assert!(line(&printed, file).ends_with("yes"), "{file}: {printed}");
        assert!(reason(&printed, file).contains(named), "{file}: {printed}");
    }
    assert!(
        line(&printed, "if nothing is verified, the next message").ends_with("no, as it must be"),
        "{printed}"
    );
}

#[test]
fn the_demo_says_why_it_is_not_on_a_device() {
    let printed = demo("0", "lazy");
    let reason = "The server's cache is in host memory: no CUDA device 0: 0 can be used.\n";
    assert!(printed.starts_with(reason), "{printed}");
    assert!(printed.ends_with("All as in a run that was never interrupted.\n"), "{printed}");
}
