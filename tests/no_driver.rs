//! Machines whose CUDA cannot be used, as programs meet them: a named status, a reason that says what to do, and host memory
//! that works all the same.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(missing_docs, reason = "a test")]

mod cc;
mod fakecuda;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use fakecuda::FakeCuda;
use kvstate::capi::{KVS_STATUS_DRIVER_TOO_OLD, KVS_STATUS_NO_CUDA, KVS_STATUS_NO_DEVICE};

/// What a program finds when it looks for libcuda.
struct Machine<'a> {
    /// Where it looks first.
    libraries: Option<&'a Path>,
    environment: &'a [(&'a str, &'a str)],
}

impl Machine<'_> {
    /// Has a C program and a Python program ask for `device`.
    fn refuses(&self, device: i32, status: i32, text: &str) {
        let dir = cc::temp_dir();
        let mut compiler = cc::c();
        compiler.arg(cc::repo("tests/c/no_driver.c"));
        cc::link(&mut compiler, cc::Link::Dynamic);
        let exe = cc::build(compiler, dir.path(), "no_driver");
        self.run(&mut Command::new(exe), device, status, text);

        if Command::new("python3").arg("--version").output().is_err() {
            eprintln!("skipped: there is no python3");
            return;
        }
        let mut python = Command::new("python3");
        python.env("KVSTATE_LIB", cc::dylib()).env("PYTHONPATH", cc::repo("ffi-examples/python"));
        python.arg("-B").arg(cc::repo("tests/python/no_driver.py"));
        self.run(&mut python, device, status, text);
    }

    fn run(&self, program: &mut Command, device: i32, status: i32, text: &str) {
        program.args([&device.to_string(), &status.to_string(), text]).env_remove("LD_LIBRARY_PATH");
        if let Some(libraries) = self.libraries {
            program.env("LD_LIBRARY_PATH", libraries);
        }
        let Output { status, stdout, stderr } =
            program.envs(self.environment.iter().copied()).output().expect("a program");
        let said = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(status.success(), "{program:?}: {status}\n{said}");
    }
}

fn emulated(environment: &[(&str, &str)], device: i32, status: i32, text: &str) {
    let cuda = FakeCuda::load();
    let kernels = cuda.kernels.to_str().expect("UTF-8");
    let environment = [environment, &[("FAKECUDA_KERNELS", kernels)]].concat();
    Machine { libraries: Some(&cuda.folder), environment: &environment }.refuses(device, status, text);
}

#[test]
fn without_libcuda_a_context_on_a_device_is_refused() {
    let has_driver = Command::new("ldconfig").arg("-p").output();
    if has_driver.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("libcuda.so")) {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    Machine { libraries: None, environment: &[] }.refuses(
        0,
        KVS_STATUS_NO_CUDA,
        "CUDA cannot be used: libcuda is not on this machine, or cannot be loaded: install the NVIDIA driver",
    );
}

#[test]
fn with_a_libcuda_that_is_none_a_context_on_a_device_is_refused() {
    let dir = cc::temp_dir();
    for name in ["libcuda.so", "libcuda.so.1"] {
        fs::write(dir.path().join(name), b"no library").expect("a file");
    }
    Machine { libraries: Some(dir.path()), environment: &[] }.refuses(
        0,
        KVS_STATUS_NO_CUDA,
        "libcuda is not on this machine, or cannot be loaded",
    );
}

#[test]
fn with_a_driver_without_a_device_a_context_on_one_is_refused() {
    emulated(&[("FAKECUDA_DEVICES", "0")], 3, KVS_STATUS_NO_DEVICE, "no CUDA device 3: 0 can be used");
}

#[test]
fn with_a_driver_that_is_too_old_a_context_on_a_device_is_refused() {
    emulated(
        &[("FAKECUDA_DRIVER", "11080")],
        0,
        KVS_STATUS_DRIVER_TOO_OLD,
        "the CUDA driver is too old: it is of CUDA 11.8, 12.0 (r525) or later is needed",
    );
}

#[test]
fn a_device_that_does_not_run_the_kernels_is_refused() {
    emulated(
        &[("FAKECUDA_CC", "52")],
        0,
        KVS_STATUS_NO_DEVICE,
        "CUDA device 0 has compute capability 5.2, 6.0 or later is needed",
    );
}

#[test]
fn a_device_that_is_not_there_is_named_beside_how_many_are() {
    emulated(&[], 7, KVS_STATUS_NO_DEVICE, "no CUDA device 7: 2 can be used");
}
