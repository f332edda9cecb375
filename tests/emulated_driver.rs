//! What the emulated CUDA driver promises to the tests that run on it, through raw calls of the driver.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw calls of the driver")]
#![allow(missing_docs, reason = "a test")]

mod fakecuda;

use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::process::Command;
use std::ptr::null_mut;
use std::thread;

use cudarc::driver::sys::*;
use fakecuda::{Alone, FakeCuda, ILLEGAL_ADDRESS, Live, Mode, OUT_OF_MEMORY, UNKNOWN};

const KV_CU: &str = include_str!("../cuda/kv.cu");
const PTX: &str = include_str!("../cuda/kv.ptx");

/// A call of the driver that has to succeed.
macro_rules! ok {
    ($call:expr) => {
        assert_eq!(code!($call), 0, "{}", stringify!($call))
    };
}

/// The code that a call of the driver returns.
macro_rules! code {
    ($call:expr) => {{
        // SAFETY: the emulation looks at every address and handle; out-pointers are those of locals.
        let result = unsafe { $call };
        result as i32
    }};
}

/// The value that a call of the driver writes through its first argument.
macro_rules! made {
    ($function:ident, $init:expr $(, $arg:expr)*) => {{
        let mut made = $init;
        ok!($function(&raw mut made $(, $arg)*));
        made
    }};
}

// Setting up

/// The driver with the contexts of both devices; the first is current.
struct Devices {
    cuda: Alone,
    contexts: [CUcontext; 2],
    before: Live,
}

impl Devices {
    fn new(mode: Mode) -> Self {
        let cuda = FakeCuda::alone();
        ok!(cuInit(0));
        cuda.set_mode(mode);
        let contexts = [0, 1].map(|device| made!(cuDevicePrimaryCtxRetain, null_mut(), device));
        let before = cuda.live();
        let devices = Self { cuda, contexts, before };
        devices.select(0);
        devices.cuda.reset();
        devices
    }

    fn lazy() -> Self {
        Self::new(Mode::Lazy)
    }

    fn select(&self, device: usize) {
        ok!(cuCtxSetCurrent(self.contexts[device]));
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for device in 0..2 {
            code!(cuDevicePrimaryCtxRelease_v2(device));
        }
        if !thread::panicking() {
            let Live { streams, pinned, .. } = self.before;
            let live = self.cuda.live();
            assert_eq!(
                (live.streams, live.pinned),
                (streams, pinned),
                "streams and pinned ranges after the test"
            );
        }
    }
}

fn alloc(bytes: usize) -> CUdeviceptr {
    made!(cuMemAlloc_v2, 0, bytes)
}

fn stream() -> CUstream {
    made!(cuStreamCreate, null_mut(), CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
}

fn blocking_stream() -> CUstream {
    made!(cuStreamCreate, null_mut(), 0)
}

fn event() -> CUevent {
    made!(cuEventCreate, null_mut(), 2)
}

/// Pinned memory, freed at the end.
struct PinnedBytes {
    at: *mut u8,
    bytes: usize,
}

impl PinnedBytes {
    fn new(bytes: usize, value: u8) -> Self {
        let mut pinned = Self { at: made!(cuMemHostAlloc, null_mut(), bytes, 0).cast(), bytes };
        pinned.fill(value);
        pinned
    }

    fn fill(&mut self, value: u8) {
        // SAFETY: the allocation's own bytes.
        unsafe { self.at.write_bytes(value, self.bytes) };
    }

    fn get(&self) -> Vec<u8> {
        // SAFETY: the allocation's own bytes; volatile, because the device may write them.
        (0..self.bytes).map(|i| unsafe { self.at.add(i).read_volatile() }).collect()
    }

    fn ptr(&self) -> *mut c_void {
        self.at.cast()
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        code!(cuMemFreeHost(self.ptr()));
    }
}

/// The twin of `KvMove` in cuda/kv.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct KvMove {
    src: u64,
    dst: u64,
    src_cell_stride: u64,
    src_channel_stride: u64,
    dst_cell_stride: u64,
    dst_channel_stride: u64,
    src_cells: u64,
    dst_cells: u64,
    n_cells: u32,
    n_channel: u32,
    elem_size: u32,
    reserved: u32,
}

impl KvMove {
    /// Rows of `size` bytes that lie one behind the other on both sides.
    fn rows(src: u64, dst: u64, n_cells: u32, size: u32) -> Self {
        let stride = u64::from(size);
        Self {
            src,
            dst,
            src_cell_stride: stride,
            dst_cell_stride: stride,
            n_cells,
            n_channel: 1,
            elem_size: size,
            ..Self::default()
        }
    }

    fn bytes(&self) -> [u8; 80] {
        // SAFETY: plain numbers without padding.
        unsafe { std::mem::transmute(*self) }
    }
}

fn module(ptx: &str) -> CUmodule {
    let text = CString::new(ptx).expect("no NUL");
    made!(cuModuleLoadData, null_mut(), text.as_ptr().cast())
}

fn load(ptx: &str) -> i32 {
    let text = CString::new(ptx).expect("no NUL");
    let mut module = null_mut();
    code!(cuModuleLoadData(&raw mut module, text.as_ptr().cast()))
}

fn function(module: CUmodule, name: &CStr) -> CUfunction {
    made!(cuModuleGetFunction, null_mut(), module, name.as_ptr())
}

/// Launches a kernel over `moves`, which is an address on the device.
fn launch(function: CUfunction, grid: (u32, u32), block: u32, moves: u64, stream: CUstream) -> i32 {
    let mut moves = moves;
    let mut args = [(&raw mut moves).cast::<c_void>()];
    code!(cuLaunchKernel(function, grid.0, grid.1, 1, block, 1, 1, 0, stream, args.as_mut_ptr(), null_mut()))
}

/// Runs `kv_move_rows` over one move and waits: what the wait returns.
fn run_move(cuda: &FakeCuda, m: &KvMove) -> i32 {
    let moves = alloc(80);
    cuda.poke(moves, &m.bytes());
    let function = function(module(PTX), c"kv_move_rows");
    assert_eq!(launch(function, (4, 1), 64, moves, null_mut()), 0);
    code!(cuStreamSynchronize(null_mut()))
}

/// This test in a process of its own, where `variable` is set.
fn child(test: &str, variable: &str) -> Command {
    let mut child = Command::new(std::env::current_exe().expect("this test"));
    child.args(["--exact", test, "--nocapture"]).env(variable, "1");
    child
}

// Devices and contexts

#[test]
fn two_devices_are_there_and_no_third() {
    let _devices = Devices::lazy();
    assert_eq!(made!(cuDeviceGetCount, 0), 2);
    let mut device = 0;
    assert_eq!(code!(cuDeviceGet(&raw mut device, 2)), CUresult::CUDA_ERROR_INVALID_DEVICE as i32);
}

#[test]
fn errors_have_their_real_names() {
    let _devices = Devices::lazy();
    let mut name = std::ptr::null();
    ok!(cuGetErrorName(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &raw mut name));
    // SAFETY: a C string that lives as long as the driver.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_OUT_OF_MEMORY");
}

#[test]
fn a_call_without_a_current_context_is_refused() {
    let _devices = Devices::lazy();
    ok!(cuCtxSetCurrent(null_mut()));
    let mut ptr = 0;
    assert_eq!(code!(cuMemAlloc_v2(&raw mut ptr, 16)), CUresult::CUDA_ERROR_INVALID_CONTEXT as i32);
}

#[test]
fn a_released_context_cannot_be_made_current() {
    let devices = Devices::lazy();
    ok!(cuDevicePrimaryCtxRelease_v2(1));
    let refused = code!(cuCtxSetCurrent(devices.contexts[1]));
    assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_CONTEXT as i32);
}

#[test]
fn a_driver_without_a_device_says_so() {
    const CHILD: &str = "KVSTATE_NO_DEVICE";
    if std::env::var_os(CHILD).is_some() {
        let _cuda = FakeCuda::load();
        assert_eq!(code!(cuInit(0)), CUresult::CUDA_ERROR_NO_DEVICE as i32);
        let mut count = 0;
        assert_eq!(code!(cuDeviceGetCount(&raw mut count)), CUresult::CUDA_ERROR_NOT_INITIALIZED as i32);
        return;
    }
    let output = child("a_driver_without_a_device_says_so", CHILD).env("FAKECUDA_DEVICES", "0").output();
    let output = output.expect("the child");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_device_has_the_attributes_that_a_test_gives_it() {
    let devices = Devices::lazy();
    let attribute = |which| made!(cuDeviceGetAttribute, 0, which, 1);
    let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    let minor = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    let pools = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    assert_eq!([major, minor, pools].map(attribute), [9, 0, 1]);
    devices.cuda.set("cc", 75);
    devices.cuda.set("pools", 0);
    let other = [major, minor, pools].map(attribute);
    let mut ptr = 0;
    let refused = code!(cuMemAllocAsync(&raw mut ptr, 16, null_mut()));
    devices.cuda.set("cc", 90);
    devices.cuda.set("pools", 1);
    assert_eq!(other, [7, 5, 0]);
    assert_eq!(refused, CUresult::CUDA_ERROR_NOT_SUPPORTED as i32);
}

#[test]
fn a_stream_knows_its_context_and_memory_its_range() {
    let devices = Devices::lazy();
    devices.select(1);
    let (stream, ptr) = (stream(), alloc(100));
    devices.select(0);
    let mut context = null_mut();
    ok!(cuStreamGetCtx(stream, &raw mut context));
    assert_eq!(context, devices.contexts[1]);
    let (mut start, mut bytes) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, ptr + 99));
    assert_eq!((start, bytes), (ptr, 100));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuMemFree_v2(ptr));
}

#[test]
fn destroyed_handles_are_refused() {
    let _devices = Devices::lazy();
    let (stream, event, module) = (stream(), event(), module(PTX));
    let kernel = function(module, c"kv_zero");
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuEventDestroy_v2(event));
    ok!(cuModuleUnload(module));
    let codes = [
        code!(cuStreamSynchronize(stream)),
        code!(cuStreamDestroy_v2(stream)),
        code!(cuEventRecord(event, null_mut())),
        launch(kernel, (1, 1), 32, 0, null_mut()),
    ];
    assert_eq!(codes, [CUresult::CUDA_ERROR_INVALID_HANDLE as i32; 4]);
}

#[test]
fn pointers_know_their_device_and_allocation() {
    let devices = Devices::lazy();
    devices.select(1);
    let ptr = alloc(1000);
    let attribute = |which: CUpointer_attribute, at: u64| {
        let mut value = 0u64;
        let result = code!(cuPointerGetAttribute((&raw mut value).cast(), which, at));
        (result, value)
    };
    assert_eq!(attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr + 999), (0, 1));
    assert_eq!(attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr), (0, 2));
    assert_eq!(attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ptr + 500), (0, ptr));
    assert_eq!(attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, ptr), (0, 1000));
    assert_eq!(
        attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT, ptr),
        (0, devices.contexts[1] as u64)
    );
    assert_eq!(
        attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr + 1000).0,
        1,
        "one past the end"
    );
    let pinned = PinnedBytes::new(16, 0);
    assert_eq!(attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned.at as u64), (0, 1));
    ok!(cuMemFree_v2(ptr));
}

#[test]
fn work_with_a_stream_or_function_of_another_device_is_refused() {
    let devices = Devices::lazy();
    let function_0 = function(module(PTX), c"kv_zero");
    let moves = alloc(80);
    devices.select(1);
    let stream_1 = stream();
    let invalid_handle = CUresult::CUDA_ERROR_INVALID_HANDLE as i32;
    assert_eq!(launch(function_0, (1, 1), 32, moves, null_mut()), invalid_handle, "a function");
    devices.select(0);
    assert_eq!(launch(function_0, (1, 1), 32, moves, stream_1), invalid_handle, "a stream");
    let event_0 = event();
    assert_eq!(code!(cuEventRecord(event_0, stream_1)), invalid_handle, "an event");
    ok!(cuStreamWaitEvent(stream_1, event_0, 0));
    ok!(cuStreamDestroy_v2(stream_1));
}

#[test]
fn a_kernel_that_reaches_into_another_device_ends_with_an_illegal_address() {
    let devices = Devices::lazy();
    let dst = alloc(64);
    devices.select(1);
    let src = alloc(64);
    devices.select(0);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(src, dst, 1, 64)), ILLEGAL_ADDRESS);
}

#[test]
fn peer_copies_move_bytes_between_devices() {
    let devices = Devices::lazy();
    let [context_0, context_1] = devices.contexts;
    let src = alloc(64);
    devices.cuda.poke(src, &[7; 64]);
    devices.select(1);
    let dst = alloc(64);
    let wrong = code!(cuMemcpyPeerAsync(dst, context_0, src, context_0, 64, null_mut()));
    assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE as i32, "the memory is not the named context's");
    ok!(cuMemcpyPeerAsync(dst, context_1, src, context_0, 32, null_mut()));
    ok!(cuMemcpyDtoDAsync_v2(dst + 32, src + 32, 32, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(devices.cuda.peek(dst, 64), [7; 64]);
    assert_eq!(devices.cuda.count("bytes_peer"), 64);
}

// Order

#[test]
fn lazy_work_has_not_happened_until_somebody_waits() {
    let devices = Devices::lazy();
    let (ptr, pinned, stream) = (alloc(64), PinnedBytes::new(64, 1), stream());
    ok!(cuMemsetD8Async(ptr, 9, 64, stream));
    ok!(cuMemcpyDtoHAsync_v2(pinned.ptr(), ptr, 64, stream));
    assert_eq!(pinned.get(), [1; 64], "before the wait");
    assert_eq!(devices.cuda.pending(), 2);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(pinned.get(), [9; 64], "after the wait");
    ok!(cuStreamDestroy_v2(stream));
}

#[test]
fn lazy_work_runs_only_what_it_is_ordered_after() {
    let devices = Devices::lazy();
    let (ptr, a, b) = (alloc(64), stream(), stream());
    devices.cuda.poke(ptr, &[1; 64]);
    let event = event();
    ok!(cuMemsetD8Async(ptr, 2, 32, a));
    ok!(cuEventRecord(event, a));
    ok!(cuMemsetD8Async(ptr + 32, 3, 32, a));
    ok!(cuStreamWaitEvent(b, event, 0));
    ok!(cuStreamSynchronize(b));
    assert_eq!(devices.cuda.peek(ptr, 64), [[2; 32], [1; 32]].concat(), "up to the event, not beyond");
    ok!(cuStreamSynchronize(a));
    assert_eq!(devices.cuda.peek(ptr, 64), [[2; 32], [3; 32]].concat());
    for stream in [a, b] {
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn a_missing_wait_between_streams_gives_old_bytes() {
    let devices = Devices::lazy();
    let (ptr, pinned, a, b) = (alloc(64), PinnedBytes::new(64, 1), stream(), stream());
    devices.cuda.poke(ptr, &[5; 64]);
    ok!(cuMemsetD8Async(ptr, 6, 64, a));
    ok!(cuMemcpyDtoHAsync_v2(pinned.ptr(), ptr, 64, b));
    ok!(cuStreamSynchronize(b));
    assert_eq!(pinned.get(), [5; 64]);
    for stream in [a, b] {
        ok!(cuStreamSynchronize(stream));
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn a_poll_says_not_ready_first_and_has_the_work_run() {
    let devices = Devices::lazy();
    let (ptr, stream, event) = (alloc(64), stream(), event());
    ok!(cuMemsetD8Async(ptr, 2, 64, stream));
    ok!(cuEventRecord(event, stream));
    assert_eq!(code!(cuEventQuery(event)), CUresult::CUDA_ERROR_NOT_READY as i32);
    while code!(cuEventQuery(event)) != 0 {
        thread::yield_now();
    }
    assert_eq!(devices.cuda.peek(ptr, 64), [2; 64]);
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuEventDestroy_v2(event));
}

#[test]
fn the_legacy_stream_is_ordered_against_blocking_streams_only() {
    let devices = Devices::lazy();
    let (ptr, blocking, free) = (alloc(64), blocking_stream(), stream());
    devices.cuda.poke(ptr, &[0; 64]);
    ok!(cuMemsetD8Async(ptr, 1, 16, blocking));
    ok!(cuMemsetD8Async(ptr + 16, 1, 16, free));
    let per_thread: CUstream = std::ptr::without_provenance_mut(2);
    ok!(cuMemsetD8Async(ptr + 32, 1, 16, per_thread));
    ok!(cuMemsetD8Async(ptr + 48, 1, 16, null_mut()));
    ok!(cuStreamSynchronize(std::ptr::without_provenance_mut(1)));
    assert_eq!(devices.cuda.peek(ptr, 64), [[1; 16], [0; 16], [1; 16], [1; 16]].concat());
    ok!(cuMemsetD8Async(ptr, 2, 16, null_mut()));
    ok!(cuMemsetD8Async(ptr + 16, 2, 16, blocking));
    ok!(cuStreamSynchronize(blocking));
    assert_eq!(devices.cuda.peek(ptr, 16), [2; 16], "a blocking stream waits for the legacy one");
    for stream in [blocking, free] {
        ok!(cuStreamDestroy_v2(stream));
    }
    ok!(cuCtxSynchronize());
}

#[test]
fn eager_work_runs_without_a_wait() {
    let devices = Devices::new(Mode::Eager { seed: 1 });
    let ptr = alloc(64);
    ok!(cuMemsetD8Async(ptr, 4, 64, null_mut()));
    while devices.cuda.pending() > 0 {
        thread::yield_now();
    }
    assert_eq!(devices.cuda.peek(ptr, 64), [4; 64]);
}

#[test]
fn a_pinned_buffer_that_is_used_again_too_early_gives_wrong_bytes() {
    for seed in 1..=5 {
        let devices = Devices::new(Mode::Eager { seed });
        let (dst, mut pinned) = (alloc(16 * 64), PinnedBytes::new(64, 0));
        for i in 0..16 {
            pinned.fill(i);
            ok!(cuMemcpyHtoDAsync_v2(dst + 64 * u64::from(i), pinned.ptr(), 64, null_mut()));
        }
        ok!(cuCtxSynchronize());
        let right: Vec<u8> = (0..16).flat_map(|i| [i; 64]).collect();
        assert_ne!(devices.cuda.peek(dst, 16 * 64), right, "seed {seed}");
    }
}

#[test]
fn pageable_memory_may_be_used_again_at_once() {
    for mode in [Mode::Lazy, Mode::Eager { seed: 3 }] {
        let devices = Devices::new(mode);
        let (ptr, mut bytes) = (alloc(64), vec![3u8; 64]);
        ok!(cuMemcpyHtoDAsync_v2(ptr, bytes.as_ptr().cast(), 64, null_mut()));
        bytes.fill(0);
        ok!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), ptr, 64, null_mut()));
        assert_eq!(bytes, [3; 64], "{mode:?}");
        assert_eq!(devices.cuda.count("pageable_copies"), 2);
    }
}

#[test]
fn registered_memory_is_pinned_until_it_is_unregistered() {
    let devices = Devices::lazy();
    let (ptr, mut bytes) = (alloc(64), vec![3u8; 64]);
    ok!(cuMemHostRegister_v2(bytes.as_mut_ptr().cast(), 64, 0));
    assert_eq!((devices.cuda.live().pinned, devices.cuda.live().pinned_bytes), (1, 64));
    ok!(cuMemcpyHtoDAsync_v2(ptr, bytes.as_ptr().cast(), 64, null_mut()));
    assert_eq!(devices.cuda.count("pageable_copies"), 0);
    ok!(cuCtxSynchronize());
    ok!(cuMemHostUnregister(bytes.as_mut_ptr().cast()));
    let again = code!(cuMemHostUnregister(bytes.as_mut_ptr().cast()));
    assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as i32);
}

#[test]
fn a_capturing_stream_says_so_and_takes_no_work() {
    let devices = Devices::lazy();
    let (ptr, blocking) = (alloc(64), blocking_stream());
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    ok!(cuStreamBeginCapture_v2(blocking, mode));
    let status = made!(capture_status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, blocking);
    assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    let refused = code!(cuMemsetD8Async(ptr, 0, 64, blocking));
    assert_eq!(refused, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as i32);
    let implicit = code!(cuMemsetD8Async(ptr, 0, 64, null_mut()));
    assert_eq!(implicit, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as i32);
    let mut graph = null_mut();
    ok!(cuStreamEndCapture(blocking, &raw mut graph));
    ok!(cuMemsetD8Async(ptr, 0, 64, blocking));
    ok!(cuStreamDestroy_v2(blocking));
    drop(devices);
}

/// With the out-pointer first, for `made!`.
unsafe fn capture_status(status: *mut CUstreamCaptureStatus, stream: CUstream) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuStreamIsCapturing(stream, status) }
}

// Memory

#[test]
fn fresh_memory_is_poisoned_and_addresses_are_not_given_twice() {
    let devices = Devices::lazy();
    let first = alloc(300);
    assert_eq!(devices.cuda.peek(first, 300), [0xCD; 300]);
    ok!(cuMemFree_v2(first));
    assert_ne!(alloc(300), first);
}

#[test]
fn a_copy_past_the_end_is_refused() {
    let _devices = Devices::lazy();
    let (ptr, mut bytes) = (alloc(100), vec![0u8; 101]);
    let refused = code!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), ptr, 101, null_mut()));
    assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_VALUE as i32);
}

#[test]
fn a_kernel_one_byte_past_the_end_ends_with_an_illegal_address_that_stays() {
    let devices = Devices::lazy();
    let (src, dst) = (alloc(100), alloc(99));
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(src, dst, 100, 1)), ILLEGAL_ADDRESS);
    let mut ptr = 0;
    assert_eq!(code!(cuMemAlloc_v2(&raw mut ptr, 16)), ILLEGAL_ADDRESS, "every later call");
    devices.select(1);
    ok!(cuCtxSynchronize());
    devices.cuda.reset();
    devices.select(0);
    ok!(cuCtxSynchronize());
}

#[test]
fn a_kernel_within_bounds_moves_its_bytes() {
    let devices = Devices::lazy();
    let (src, dst) = (alloc(400), alloc(400));
    let bytes: Vec<u8> = (0..=255).cycle().take(400).collect();
    devices.cuda.poke(src, &bytes);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(src, dst, 25, 16)), 0);
    assert_eq!(devices.cuda.peek(dst, 400), bytes);
}

#[test]
fn a_kernel_may_use_pinned_host_memory_and_no_other() {
    let devices = Devices::lazy();
    let (dst, pinned, pageable) = (alloc(64), PinnedBytes::new(64, 8), vec![8u8; 64]);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(pinned.at as u64, dst, 1, 64)), 0);
    assert_eq!(devices.cuda.peek(dst, 64), [8; 64]);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(pageable.as_ptr() as u64, dst, 1, 64)), ILLEGAL_ADDRESS);
}

#[test]
fn a_misaligned_access_is_told() {
    let devices = Devices::lazy();
    let (src, dst, moves) = (alloc(64), alloc(64), alloc(80));
    let m = KvMove { src: src + 2, elem_size: 4, ..KvMove::rows(src, dst, 4, 4) };
    devices.cuda.poke(moves, &m.bytes());
    let function = function(module(PTX), c"kv_move_4");
    assert_eq!(launch(function, (1, 1), 32, moves, null_mut()), 0);
    assert_eq!(code!(cuCtxSynchronize()), CUresult::CUDA_ERROR_MISALIGNED_ADDRESS as i32);
}

#[test]
fn memory_that_is_freed_is_gone() {
    let devices = Devices::lazy();
    let (src, dst) = (alloc(64), alloc(64));
    ok!(cuMemFree_v2(src));
    assert_eq!(code!(cuMemFree_v2(src)), CUresult::CUDA_ERROR_INVALID_VALUE as i32, "again");
    let copy = code!(cuMemcpyDtoDAsync_v2(dst, src, 64, null_mut()));
    assert_eq!(copy, CUresult::CUDA_ERROR_INVALID_VALUE as i32);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(src, dst, 1, 64)), ILLEGAL_ADDRESS);
}

#[test]
fn a_free_that_overtakes_a_copy_is_told() {
    for mode in [Mode::Lazy, Mode::Eager { seed: 2 }] {
        let devices = Devices::new(mode);
        let (pinned, a, b) = (PinnedBytes::new(64, 0), stream(), stream());
        let ptr = made!(cuMemAllocAsync, 0, 64, a);
        ok!(cuStreamSynchronize(a));
        // In a queue behind a large one, so that it has not run in eager mode either.
        let large = alloc(64 << 20);
        ok!(cuMemsetD8Async(large, 1, 64 << 20, a));
        ok!(cuMemcpyDtoHAsync_v2(pinned.ptr(), ptr, 64, a));
        assert_eq!(code!(cuMemFreeAsync(ptr, b)), ILLEGAL_ADDRESS, "{mode:?}");
        assert_eq!(devices.cuda.count("unfinished_use"), 1);
        devices.cuda.finish();
        for stream in [a, b] {
            ok!(cuStreamDestroy_v2(stream));
        }
    }
}

#[test]
fn a_free_that_overtakes_a_kernel_makes_it_fail() {
    let devices = Devices::lazy();
    let (dst, moves, a, b) = (alloc(64), alloc(80), stream(), stream());
    let src = made!(cuMemAllocAsync, 0, 64, a);
    devices.cuda.poke(moves, &KvMove::rows(src, dst, 1, 64).bytes());
    let kernel = function(module(PTX), c"kv_move_rows");
    ok!(cuStreamSynchronize(a));
    assert_eq!(launch(kernel, (1, 1), 32, moves, a), 0);
    ok!(cuMemFreeAsync(src, b));
    assert_eq!(code!(cuStreamSynchronize(a)), ILLEGAL_ADDRESS);
    for stream in [a, b] {
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn a_free_that_is_ordered_after_the_work_is_right() {
    let devices = Devices::lazy();
    let (dst, a, b, event) = (alloc(64), stream(), stream(), event());
    let src = made!(cuMemAllocAsync, 0, 64, a);
    ok!(cuMemcpyDtoDAsync_v2(dst, src, 64, a));
    ok!(cuEventRecord(event, a));
    ok!(cuStreamWaitEvent(b, event, 0));
    ok!(cuMemFreeAsync(src, b));
    ok!(cuCtxSynchronize());
    assert_eq!(devices.cuda.peek(dst, 64), [0xCD; 64]);
    assert_eq!(devices.cuda.count("unfinished_use"), 0);
    for stream in [a, b] {
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn memory_of_a_stream_is_not_there_for_another_that_does_not_wait() {
    let devices = Devices::lazy();
    let (a, b) = (stream(), stream());
    let ptr = made!(cuMemAllocAsync, 0, 64, a);
    ok!(cuMemsetD8Async(ptr, 1, 64, b));
    assert_eq!(code!(cuStreamSynchronize(b)), ILLEGAL_ADDRESS);
    devices.cuda.reset();
    devices.cuda.finish();
    for stream in [a, b] {
        ok!(cuStreamDestroy_v2(stream));
    }
}

#[test]
fn pinned_memory_that_is_freed_under_a_copy_is_told() {
    let devices = Devices::lazy();
    let (ptr, pinned) = (alloc(64), PinnedBytes::new(64, 0));
    ok!(cuMemcpyHtoDAsync_v2(ptr, pinned.ptr(), 64, null_mut()));
    assert_eq!(devices.cuda.unfinished_use(pinned.at as u64, 1), 1);
    assert_eq!(code!(cuMemFreeHost(pinned.ptr())), ILLEGAL_ADDRESS);
    assert_eq!(devices.cuda.count("unfinished_use"), 1);
}

#[test]
fn the_limit_of_a_device_is_kept() {
    let devices = Devices::lazy();
    let held = devices.cuda.live().bytes;
    devices.select(1);
    let (mut free, mut total) = (0, 0);
    devices.cuda.set_memory_limit(1, 1 << 40);
    ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    let used = total - free;
    devices.cuda.set_memory_limit(1, used + 1000);
    let (first, mut second) = (alloc(600), 0);
    assert_eq!(code!(cuMemAlloc_v2(&raw mut second, 401)), OUT_OF_MEMORY);
    let second = alloc(400);
    assert_eq!(devices.cuda.live().bytes, held + 1000);
    for ptr in [first, second] {
        ok!(cuMemFree_v2(ptr));
    }
    devices.cuda.set_memory_limit(1, 8 << 30);
    assert_eq!(devices.cuda.live().bytes, held);
}

#[test]
fn host_code_that_touches_device_memory_dies_with_a_message() {
    const CHILD: &str = "KVSTATE_TOUCH_DEVICE_MEMORY";
    if std::env::var_os(CHILD).is_some() {
        let _devices = Devices::lazy();
        let ptr = alloc(64);
        // SAFETY: none; it has to fail.
        let byte = unsafe { (ptr as *const u8).read_volatile() };
        unreachable!("it read {byte}");
    }
    let mut child = child("host_code_that_touches_device_memory_dies_with_a_message", CHILD);
    let output = child.output().expect("the child");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("fakecuda: host code touched device memory at 0x"), "{said}");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(11), "{said}");
}

// Modules and launches

#[test]
fn ptx_is_checked_against_driver_device_and_source() {
    let devices = Devices::lazy();
    assert_eq!(load(PTX), 0);
    devices.cuda.set("driver", 11080);
    assert_eq!(load(PTX), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as i32, "a driver of CUDA 11.8");
    devices.cuda.set("driver", 12080);
    devices.cuda.set("cc", 52);
    assert_eq!(load(PTX), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as i32, "compute capability 5.2");
    devices.cuda.set("cc", 90);
    let other = PTX.replace(".param .u64 kv_zero_param_0", ".param .u32 kv_zero_param_0");
    assert_ne!(other, PTX);
    assert_eq!(load(&other), CUresult::CUDA_ERROR_INVALID_PTX as i32, "another parameter");
    assert_eq!(load("no PTX"), CUresult::CUDA_ERROR_INVALID_PTX as i32, "no PTX");
}

#[test]
fn a_kernel_that_is_not_there_is_not_found() {
    let _devices = Devices::lazy();
    let module = module(PTX);
    let mut function = null_mut();
    let result = code!(cuModuleGetFunction(&raw mut function, module, c"kv_move_3".as_ptr()));
    assert_eq!(result, CUresult::CUDA_ERROR_NOT_FOUND as i32);
    ok!(cuModuleUnload(module));
}

#[test]
fn launches_have_limits() {
    let _devices = Devices::lazy();
    let (kernel, moves) = (function(module(PTX), c"kv_zero"), alloc(80));
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE as i32;
    assert_eq!(launch(kernel, (0, 1), 32, moves, null_mut()), invalid, "no blocks");
    assert_eq!(launch(kernel, (1, 65536), 32, moves, null_mut()), invalid, "too many in y");
    assert_eq!(launch(kernel, (1, 1), 1025, moves, null_mut()), invalid, "too many threads");
}

#[test]
fn every_kernel_of_the_source_is_in_the_host_build() {
    let _devices = Devices::lazy();
    let module = module(PTX);
    let names: Vec<_> =
        PTX.lines().filter_map(|line| line.split_once(".entry ")).map(|(_, rest)| rest).collect();
    assert!(names.len() >= 6, "{names:?}");
    for name in names {
        let name = CString::new(name.trim_end_matches('(')).expect("no NUL");
        function(module, &name);
    }
}

#[test]
fn a_launch_keeps_the_arguments_of_its_call() {
    let devices = Devices::lazy();
    let (ptr, moves, kernel) = (alloc(64), alloc(80), function(module(PTX), c"kv_zero"));
    devices.cuda.poke(moves, &KvMove::rows(0, ptr, 4, 16).bytes());
    // The variable that the argument is read from is gone when the kernel runs.
    assert_eq!(launch(kernel, (1, 1), 32, moves, null_mut()), 0);
    assert_eq!(devices.cuda.peek(ptr, 64), [0xCD; 64]);
    ok!(cuCtxSynchronize());
    assert_eq!(devices.cuda.peek(ptr, 64), [0; 64]);
}

/// Kernels of a changed source, until the end.
struct OtherKernels<'a>(&'a FakeCuda);

impl<'a> OtherKernels<'a> {
    fn new(cuda: &'a FakeCuda, source: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("kv.cu");
        fs::write(&path, source).expect("the source");
        cuda.set_kernels(&fakecuda::kernels(&path));
        Self(cuda)
    }
}

impl Drop for OtherKernels<'_> {
    fn drop(&mut self) {
        self.0.set_kernels(&self.0.kernels);
    }
}

#[test]
fn a_fault_in_a_kernel_gives_wrong_bytes() {
    let devices = Devices::lazy();
    let (src, dst) = (alloc(64), alloc(64));
    devices.cuda.poke(src, &[1; 64]);
    let right = "cell_of(m.dst_cells, i) * m.dst_cell_stride";
    assert!(KV_CU.contains(right));
    let wrong = KV_CU.replace(right, "cell_of(m.dst_cells, i + 1) * m.dst_cell_stride");
    let _kernels = OtherKernels::new(&devices.cuda, &wrong);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(src, dst, 3, 16)), 0);
    assert_eq!(devices.cuda.peek(dst, 64), [[0xCD; 16], [1; 16], [1; 16], [1; 16]].concat());
}

#[test]
fn threads_of_a_block_wait_for_each_other_at_a_barrier() {
    let devices = Devices::lazy();
    let (dst, moves) = (alloc(128), alloc(80));
    devices.cuda.poke(moves, &KvMove { dst, ..KvMove::default() }.bytes());
    let head = KV_CU.find("extern \"C\" __global__ void kv_zero").expect("kv_zero");
    let source = String::from(&KV_CU[..head])
        + r#"extern "C" __global__ void kv_zero(const KvMove * moves) {
            __shared__ u32 given[32];
            given[threadIdx.x] = threadIdx.x + 1;
            __syncthreads();
            ((u32 *) moves[0].dst)[threadIdx.x] = given[31 - threadIdx.x];
        }"#;
    let _kernels = OtherKernels::new(&devices.cuda, &source);
    let (before, kv_zero) = PTX.split_at(PTX.find(".entry kv_zero").expect("kv_zero"));
    let ptx = String::from(before) + &kv_zero.replacen('{', "{ bar.sync 0;", 1);
    let kernel = function(module(&ptx), c"kv_zero");
    assert_eq!(launch(kernel, (1, 1), 32, moves, null_mut()), 0);
    ok!(cuCtxSynchronize());
    let expected: Vec<u8> = (1..=32u32).rev().flat_map(u32::to_le_bytes).collect();
    assert_eq!(devices.cuda.peek(dst, 128), expected);
}

// Counters, failures

#[test]
fn bytes_launches_and_calls_are_counted() {
    let devices = Devices::lazy();
    let (a, b, pinned) = (alloc(64), alloc(64), PinnedBytes::new(64, 0));
    let before = devices.cuda.calls();
    ok!(cuMemcpyHtoDAsync_v2(a, pinned.ptr(), 40, null_mut()));
    ok!(cuMemcpyDtoDAsync_v2(b, a, 30, null_mut()));
    ok!(cuMemcpyDtoHAsync_v2(pinned.ptr(), b, 20, null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(devices.cuda.calls() - before, 4);
    let counts =
        ["cuCtxSynchronize", "bytes_host_to_device", "bytes_device_to_device", "bytes_device_to_host"];
    assert_eq!(counts.map(|name| devices.cuda.count(name)), [1, 40, 30, 20]);
    assert_eq!(run_move(&devices.cuda, &KvMove::rows(a, b, 1, 64)), 0);
    assert_eq!(devices.cuda.count("launches"), 1);
}

#[test]
fn the_nth_call_of_a_function_fails_once() {
    let devices = Devices::lazy();
    devices.cuda.fail("cuMemAlloc_v2", 2, OUT_OF_MEMORY);
    let mut ptr = 0;
    let codes = [1, 2, 3].map(|_| code!(cuMemAlloc_v2(&raw mut ptr, 16)));
    assert_eq!(codes, [0, OUT_OF_MEMORY, 0]);
    assert_eq!(devices.cuda.injected(), 1);
}

#[test]
fn the_nth_call_of_any_function_fails_but_none_that_gives_back() {
    let devices = Devices::lazy();
    let (ptr, stream) = (alloc(16), stream());
    devices.cuda.fail_at(2, UNKNOWN);
    ok!(cuMemsetD8Async(ptr, 0, 16, stream));
    ok!(cuMemFree_v2(ptr));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuCtxSetCurrent(devices.contexts[0]));
    assert_eq!(devices.cuda.injected(), 0);
    assert_eq!(code!(cuCtxSynchronize()), UNKNOWN);
    assert_eq!(devices.cuda.injected(), 1);
}

#[test]
fn what_is_held_is_counted_until_it_is_given_back() {
    let devices = Devices::lazy();
    let before = devices.cuda.live();
    let (ptr, stream, event, module) = (alloc(10), stream(), event(), module(PTX));
    let held = devices.cuda.live();
    let expected = Live {
        allocations: before.allocations + 1,
        bytes: before.bytes + 10,
        streams: before.streams + 1,
        events: before.events + 1,
        modules: before.modules + 1,
        ..before
    };
    assert_eq!(held, expected);
    ok!(cuMemFreeAsync(ptr, stream));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuEventDestroy_v2(event));
    ok!(cuModuleUnload(module));
    assert_eq!(devices.cuda.live(), before);
}

#[test]
fn four_threads_with_streams_of_their_own_get_their_own_bytes() {
    for mode in [Mode::Lazy, Mode::Eager { seed: 9 }] {
        let devices = Devices::new(mode);
        let contexts = devices.contexts.map(|context| context as usize);
        thread::scope(|scope| {
            for i in 0..4u8 {
                scope.spawn(move || {
                    ok!(cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(contexts[usize::from(i % 2)])));
                    let (stream, pinned) = (stream(), PinnedBytes::new(256, 0));
                    for round in 0..50u8 {
                        let ptr = made!(cuMemAllocAsync, 0, 256, stream);
                        ok!(cuMemsetD8Async(ptr, i * 50 + round, 256, stream));
                        ok!(cuMemcpyDtoHAsync_v2(pinned.ptr(), ptr, 256, stream));
                        ok!(cuMemFreeAsync(ptr, stream));
                        ok!(cuStreamSynchronize(stream));
                        assert_eq!(pinned.get(), [i * 50 + round; 256]);
                    }
                    ok!(cuStreamDestroy_v2(stream));
                });
            }
        });
        assert_eq!(devices.cuda.live(), devices.before, "{mode:?}");
    }
}

/// For scripts that run other programs with the driver.
#[test]
#[ignore = "tests nothing"]
fn where_the_driver_is() {
    let cuda = FakeCuda::load();
    println!("\nlibraries: {}\nkernels: {}", cuda.folder.display(), cuda.kernels.display());
}
