//! Caches on device 0 of the emulated driver, and the streams of the engine that uses them.
#![allow(unsafe_code, reason = "raw calls of the driver, as engines make them")]
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys;
use kvstate::memory::{KvMemory, KvParams, SectionParams};
use kvstate::storage::{CallerStream, Plane, StagingParams, Threads};
use kvstate::{Context, ContextParams};

use crate::support::place::fakecuda::{Alone, FakeCuda, Mode};

/// The driver for one test, lazy or, with `KVSTATE_TEST_DRIVER=eager:SEED`, eager.
pub fn alone() -> Alone {
    let cuda = FakeCuda::alone();
    // SAFETY: the flags have to be 0.
    ok(unsafe { sys::cuInit(0) });
    no_limit(&cuda);
    let mode = std::env::var("KVSTATE_TEST_DRIVER").unwrap_or_default();
    if let Some(seed) = mode.strip_prefix("eager:") {
        cuda.set_mode(Mode::Eager { seed: seed.parse().expect("a seed") });
    }
    cuda
}

/// Device 0 has room for all that tests allocate.
pub fn no_limit(cuda: &Alone) {
    cuda.set_memory_limit(0, 1 << 30);
}

/// The calling thread has no current context, as at its start.
pub fn no_context() {
    // SAFETY: NULL is none.
    ok(unsafe { sys::cuCtxSetCurrent(null_mut()) });
}

/// Sections whose layers are all on `device`.
pub fn on_device(n_seq_max: u32, sections: &[KvParams], device: i32) -> ContextParams {
    let section = |kv: &KvParams| SectionParams::Kv {
        kv: kv.clone(),
        memory: KvMemory::Devices(vec![Some(device); kv.layers.len()]),
    };
    ContextParams {
        threads: Threads::new(1),
        ..ContextParams::new(n_seq_max, sections.iter().map(section).collect())
    }
}

/// A context with staging buffers of this size.
pub fn staged(params: ContextParams, size: u64, count: usize) -> Context {
    Context::new(ContextParams { staging: StagingParams { size, count }, ..params }).expect("a context")
}

/// A stream of the engine's on device 0, in the primary context, and pinned memory for its copies.
#[derive(Debug)]
pub struct Engine {
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Not one of the driver's default streams.
    is_own: bool,
    pinned: *mut c_void,
}

impl Engine {
    pub const PINNED: usize = 4096;

    pub fn new() -> Self {
        let (mut context, mut stream, mut pinned) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the out-parameters can be written.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
            ok(sys::cuCtxSetCurrent(context));
            ok(sys::cuStreamCreate(&raw mut stream, 1));
            ok(sys::cuMemHostAlloc(&raw mut pinned, Self::PINNED, 0));
        }
        Self { context, stream, is_own: true, pinned }
    }

    /// On a default stream: 0, 1: the legacy one; 2: the one of the thread.
    pub fn on_default_stream(number: usize) -> Self {
        let engine = Self::new();
        // SAFETY: the stream is the engine's.
        ok(unsafe { sys::cuStreamDestroy_v2(engine.stream) });
        let mut engine = engine;
        (engine.stream, engine.is_own) = (std::ptr::without_provenance_mut(number), false);
        engine
    }

    /// Begins to capture the work on the stream into a graph.
    pub fn begin_capture(&self) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live stream.
        ok(unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) });
    }

    /// Ends it; the graph is of no interest.
    pub fn end_capture(&self) {
        let mut graph = null_mut();
        // SAFETY: a live stream; `graph` can be written.
        ok(unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) });
    }

    pub fn stream(&self) -> CallerStream {
        // SAFETY: it lives as long as the engine, which outlives the context in every test.
        unsafe { CallerStream::new(0, self.stream.cast()) }.expect("a stream of device 0")
    }

    /// Queues a write of all bytes of a plane.
    pub fn fill(&self, plane: &Plane, value: u8) {
        let span = plane.shape().span(plane.kv_size()).expect("a span");
        // SAFETY: they are the plane's bytes.
        unsafe {
            ok(sys::cuCtxSetCurrent(self.context));
            ok(sys::cuMemsetD8Async(
                address(plane),
                value,
                usize::try_from(span).expect("small"),
                self.stream,
            ));
        }
    }

    /// Queues a read of the first bytes of a plane.
    pub fn fetch(&self, plane: &Plane, len: usize) {
        assert!(len <= Self::PINNED);
        // SAFETY: both sides have the bytes.
        unsafe {
            ok(sys::cuCtxSetCurrent(self.context));
            ok(sys::cuMemcpyDtoHAsync_v2(self.pinned, address(plane), len, self.stream));
        }
    }

    /// What [`Engine::fetch`] has brought, once the stream has been waited for, and nothing else.
    pub fn fetched(&self, len: usize) -> Vec<u8> {
        self.synchronize();
        // SAFETY: the allocation's own bytes, which nothing writes any more.
        unsafe { std::slice::from_raw_parts(self.pinned.cast::<u8>(), len).to_vec() }
    }

    pub fn synchronize(&self) {
        // SAFETY: a live stream.
        unsafe {
            ok(sys::cuCtxSetCurrent(self.context));
            ok(sys::cuStreamSynchronize(self.stream));
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamSynchronize(self.stream);
            if self.is_own {
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
            let _ = sys::cuMemFreeHost(self.pinned);
            let _ = sys::cuCtxSetCurrent(null_mut());
            let _ = sys::cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

fn address(plane: &Plane) -> u64 {
    plane.as_ptr().addr() as u64
}

#[track_caller]
fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// Says where two states differ, without their megabytes.
#[track_caller]
pub fn same_bytes(got: &[u8], expected: &[u8]) {
    assert_eq!(got.len(), expected.len());
    if let Some(at) = got.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("byte {at} of {} is {}, expected {}", got.len(), got[at], expected[at]);
    }
}
