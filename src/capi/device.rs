//! CUDA devices: streams, pinned memory, what memory is taken, and bytes of K and V for programs without CUDA code.

use std::ffi::{c_int, c_void};

use super::handle::{array, array_mut, kvs_context, out, with_context, with_context_mut};
use super::params::{self, Params};
use super::status::{status_of, value_or};
use super::{KVS_DEVICE_HOST, kvs_status};
use crate::error::{Error, Result};
use crate::storage::{CallerStream, Device, alloc_pinned, free_pinned, register_host, unregister_host};

/// Bytes of memory that a context has taken. Adopted memory is not counted, and neither are snapshots, which belong to nobody:
/// kvs_snapshot_size and kvs_snapshot_device_size tell of them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_memory_usage {
    /// sizeof(kvs_memory_usage), set by the init call.
    pub struct_size: usize,
    /// K and V in host memory. Pages that were never written are no memory yet.
    pub kv_host: u64,
    /// K and V in the memory of devices.
    pub kv_device: u64,
    /// Tensors of the ON_DEVICE states of all sequences, in host memory.
    pub on_device_states_host: u64,
    /// Tensors of the ON_DEVICE states of all sequences, in the memory of devices.
    pub on_device_states_device: u64,
    /// Staging buffers, pinned host memory.
    pub staging_pinned: u64,
    /// Staging buffers in the memory of devices.
    pub staging_device: u64,
}

// SAFETY: repr(C), struct_size first, integers only.
unsafe impl Params for kvs_memory_usage {
    const NAME: &'static str = "kvs_memory_usage";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            kv_host: 0,
            kv_device: 0,
            on_device_states_host: 0,
            on_device_states_device: 0,
            staging_pinned: 0,
            staging_device: 0,
        }
    }
}

/// Fills the struct of struct_size bytes at usage with zeroes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_usage_init(
    usage: *mut kvs_memory_usage,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(usage, struct_size) })
}

/// Tells what memory the context has taken. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_memory_usage_get(
    ctx: *const kvs_context,
    usage: *mut kvs_memory_usage,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let struct_size = params::read(usage)?.struct_size;
        let found = with_context(ctx, |context| Ok(context.memory_usage()))?;
        let filled = kvs_memory_usage {
            struct_size,
            kv_host: found.kv_host,
            kv_device: found.kv_device,
            on_device_states_host: found.device_states_host,
            on_device_states_device: found.device_states_device,
            staging_pinned: found.staging.pinned,
            staging_device: found.staging.device,
        };
        params::write(usage, filled)
    })
}

/// Whether a CUDA device can be used: opens it and gives it back. KVS_STATUS_NO_CUDA, KVS_STATUS_NO_DEVICE and
/// KVS_STATUS_DRIVER_TOO_OLD say why not; contexts in host memory work all the same.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_device_check(device: i32) -> kvs_status {
    status_of(|| Device::open(device).map(drop))
}

/// The CUDA device whose memory ptr is in, as its driver says; KVS_DEVICE_HOST: no device's, or there is no driver. Pinned
/// memory is the host's.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_device_of(ptr: *const c_void) -> i32 {
    value_or(KVS_DEVICE_HOST, || Ok(Device::ordinal_of(ptr.addr() as u64).unwrap_or(KVS_DEVICE_HOST)))
}

/// Names the stream (a CUstream or cudaStream_t of the device's primary context; NULL is the default stream) on which the
/// caller's work on a device runs. From now on calls that read or write K or V there run behind what is queued on
/// it, and what is queued on it later runs behind them; calls that give bytes to the host, or take them from there, wait for
/// the device too. It stays alive until another one is named, kvs_stream_clear is called, or the context is freed. A stream
/// that is being captured into a graph makes those calls fail, with nothing changed. KVS_STATUS_INVALID_ARGUMENT for a stream
/// of another device or context.
///
/// Without one, the caller's work on the device has to be done before a call, and every call waits for its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_stream_set(
    ctx: *mut kvs_context,
    device: i32,
    stream: *mut c_void,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_context_mut(ctx, |context| {
            // SAFETY: the header demands a live stream of the device.
            context.set_stream(CallerStream::new(check_device(device)?, stream)?);
            Ok(())
        })
    })
}

/// From now on no stream is named on the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_stream_clear(ctx: *mut kvs_context, device: i32) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_context_mut(ctx, |context| {
            context.clear_stream(check_device(device)?);
            Ok(())
        })
    })
}

/// Allocates size bytes of pinned host memory, zeroed. States of devices, whichever, go into it and come from it without
/// another copy on the host, several times as fast. device: the one in whose context it is allocated; every device reaches
/// it. Free it with kvs_pinned_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_pinned_alloc(device: i32, size: usize, ptr_out: *mut *mut c_void) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let ptr_out = out("ptr_out", ptr_out)?;
        if size == 0 {
            return Err(Error::arg("size", "0 bytes"));
        }
        *ptr_out = alloc_pinned(check_device(device)?, size as u64)?.cast();
        Ok(())
    })
}

/// Frees what kvs_pinned_alloc gave, which no job may still write to; NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_pinned_free(ptr: *mut c_void) -> kvs_status {
    status_of(|| if ptr.is_null() { Ok(()) } else { free_pinned(ptr.addr()) })
}

/// Pins size bytes of the caller's own memory at ptr, as kvs_pinned_alloc allocates them, until kvs_host_unregister.
/// KVS_STATUS_INVALID_ARGUMENT if some of them are pinned already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_host_register(device: i32, ptr: *mut c_void, size: usize) -> kvs_status {
    // SAFETY: the contract of all calls; the header demands memory that stays until it is unregistered.
    status_of(|| unsafe { register_host(check_device(device)?, ptr.cast(), size) })
}

/// Ends what kvs_host_register began at ptr.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_host_unregister(ptr: *mut c_void) -> kvs_status {
    status_of(|| unregister_host(ptr.addr()))
}

/// K of a layer, for kvs_kv_get and kvs_kv_set.
pub const KVS_KV_K: c_int = 0;
/// V of a layer.
pub const KVS_KV_V: c_int = 1;

/// Copies size bytes of K or V (KVS_KV_*) of a layer in a stream of a section to dst, from offset on: bytes from cell 0, laid
/// out as kvs_kv_plane tells. For programs without CUDA code, and for looking: it waits for each copy. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_get(
    ctx: *const kvs_context,
    section: u32,
    stream: u32,
    layer: u32,
    which: c_int,
    offset: u64,
    dst: *mut c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let dst = array_mut::<u8>("dst", dst.cast(), size)?;
        let is_v = is_v(which)?;
        with_context(ctx, |context| {
            context.kv_get((section as usize, stream as usize, layer as usize), is_v, offset, dst)
        })
    })
}

/// Copies size bytes from src into K or V, as kvs_kv_get the other way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_set(
    ctx: *mut kvs_context,
    section: u32,
    stream: u32,
    layer: u32,
    which: c_int,
    offset: u64,
    src: *const c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let src = array::<u8>("src", src.cast(), size)?;
        let is_v = is_v(which)?;
        with_context_mut(ctx, |context| {
            context.kv_set((section as usize, stream as usize, layer as usize), is_v, offset, src)
        })
    })
}

fn is_v(which: c_int) -> Result<bool> {
    match which {
        KVS_KV_K => Ok(false),
        KVS_KV_V => Ok(true),
        _ => Err(Error::arg("which", format!("{which} is no KVS_KV_*"))),
    }
}

pub(super) fn check_device(device: i32) -> Result<i32> {
    if device >= 0 {
        Ok(device)
    } else {
        Err(Error::arg("device", format!("{device}, devices are counted from 0")))
    }
}
