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

#[test]
fn the_demo_says_why_it_is_not_on_a_device() {
    let printed = demo("0", "lazy");
    let reason = "The server's cache is in host memory: no CUDA device 0: 0 can be used.\n";
    assert!(printed.starts_with(reason), "{printed}");
    assert!(printed.ends_with("All as in a run that was never interrupted.\n"), "{printed}");
}
