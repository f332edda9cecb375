//! A build without the feature `cuda`.
#![cfg(not(feature = "cuda"))]
#![allow(missing_docs, reason = "a test")]
#![allow(unsafe_code, reason = "streams are the caller's")]

use kvstate::error::Status;
use kvstate::format::GgmlType;
use kvstate::memory::{KvMemory, KvParams, LayerParams, SectionParams, TensorParams};
use kvstate::storage::CallerStream;
use kvstate::{Context, ContextParams};

fn context(memory: KvMemory) -> kvstate::error::Result<Context> {
    let f16 = TensorParams { ggml_type: GgmlType::F16, n_embd: 4 };
    let kv = KvParams::new(8, 1, LayerParams { k: f16, v: Some(f16) });
    Context::new(ContextParams::new(1, vec![SectionParams::Kv { kv, memory }]))
}

#[test]
fn a_context_on_a_device_is_refused_and_one_in_host_memory_is_not() {
    let error = context(KvMemory::Devices(vec![Some(0)])).expect_err("a refusal");
    assert_eq!(error.status(), Status::NoCuda);
    assert_eq!(error.to_string(), "CUDA cannot be used: this build has no feature 'cuda'");
    context(KvMemory::Devices(vec![None])).expect("host memory");
    context(KvMemory::Host).expect("host memory");
}

#[test]
fn no_stream_can_be_named() {
    // SAFETY: nothing is done with it.
    let error = unsafe { CallerStream::new(0, std::ptr::null_mut()) }.expect_err("a refusal");
    assert_eq!(error.status(), Status::NoCuda);
}
