//! Where the caches of the tests are: `KVSTATE_TEST_MEMORY`, host memory if it is not set.
//!
//! | value | K and V |
//! |---|---|
//! | `host` | in host memory |
//! | `managed` | on device 0, allocated by the library |
//! | `adopted` | on device 0, the test's own |
//! | `two-devices` | layers alternate between devices 0 and 1 |
//! | `mixed` | layers alternate between host memory and device 0 |
//!
//! The driver is the emulated one, lazy or, with `KVSTATE_TEST_DRIVER=eager:SEED`, eager; with `KVSTATE_TEST_DRIVER=real` it is
//! the machine's.
#![allow(unsafe_code, reason = "tests write planes the way engines do: by their addresses")]
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::sys;
use kvstate::error::Result;
use kvstate::memory::{KvMemory, KvParams, KvPlanes, SectionParams};
use kvstate::storage::{Device, Plane, PlaneShape, StagingParams};
use kvstate::{Context, ContextParams};

#[path = "../fakecuda/mod.rs"]
pub mod fakecuda;

use fakecuda::{FakeCuda, Mode};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Host,
    Managed,
    Adopted,
    TwoDevices,
    Mixed,
}

impl Place {
    /// The device of a layer.
    fn device(self, layer: usize) -> Option<i32> {
        let odd = layer % 2 == 1;
        match self {
            Self::Host => None,
            Self::Managed | Self::Adopted => Some(0),
            Self::TwoDevices => Some(i32::from(odd)),
            Self::Mixed => odd.then_some(0),
        }
    }
}

/// Where caches are in this run; the driver is loaded if it takes one.
pub fn place() -> Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    *PLACE.get_or_init(|| {
        let name = std::env::var("KVSTATE_TEST_MEMORY").unwrap_or_else(|_| "host".to_owned());
        let place = match &*name {
            "host" => Place::Host,
            "managed" => Place::Managed,
            "adopted" => Place::Adopted,
            "two-devices" => Place::TwoDevices,
            "mixed" => Place::Mixed,
            _ => panic!("KVSTATE_TEST_MEMORY is {name}"),
        };
        if place != Place::Host {
            load_driver();
        }
        place
    })
}

fn load_driver() {
    let driver = std::env::var("KVSTATE_TEST_DRIVER").unwrap_or_else(|_| "lazy".to_owned());
    let mode = match driver.split_once(':') {
        None if driver == "real" => return,
        None if driver == "lazy" => Mode::Lazy,
        Some(("eager", seed)) => Mode::Eager { seed: seed.parse().expect("a seed") },
        _ => panic!("KVSTATE_TEST_DRIVER is {driver}"),
    };
    FakeCuda::load().set_mode(mode);
}

/// A context whose managed memory is where this run has it. Staging buffers are small, so that states take many chunks.
pub fn context(params: ContextParams) -> Result<Context> {
    Context::new(placed(params))
}

pub fn placed(params: ContextParams) -> ContextParams {
    if place() == Place::Host {
        return params;
    }
    let n_stream = if params.unified { 1 } else { params.n_seq_max as usize };
    let sections = params.sections.into_iter().map(|section| match section {
        SectionParams::Kv { kv, memory: KvMemory::Host } => {
            let memory = memory(&kv, n_stream);
            SectionParams::Kv { kv, memory }
        }
        section => section,
    });
    let staging = StagingParams { size: 4096, count: 3 };
    ContextParams { sections: sections.collect(), staging, ..params }
}

fn memory(kv: &KvParams, n_stream: usize) -> KvMemory {
    let place = place();
    let devices: Vec<_> = (0..kv.layers.len()).map(|layer| place.device(layer)).collect();
    if place != Place::Adopted {
        return KvMemory::Devices(devices);
    }
    let mut planes = KvPlanes::default();
    for _ in 0..n_stream {
        for layer in &kv.layers {
            let Some(row_size) = layer.k.ggml_type.row_size(layer.k.n_embd).filter(|&size| size > 0) else {
                // What the library has to say of it, it says of managed memory as well.
                return KvMemory::Devices(devices);
            };
            // A gap behind every row.
            planes.k.push(adopted(kv.kv_size, PlaneShape::Rows { row_size, cell_stride: row_size + 16 }));
            planes.v.push(layer.v.map(|v| {
                let elem_size = v.ggml_type.type_size();
                adopted(
                    kv.kv_size,
                    if kv.v_trans {
                        let channel_stride = u64::from(elem_size) * u64::from(kv.kv_size + 3);
                        let cell_stride = elem_size.into();
                        PlaneShape::Channels { n_channel: v.n_embd, elem_size, cell_stride, channel_stride }
                    } else {
                        PlaneShape::dense_rows(v.ggml_type.row_size(v.n_embd).unwrap_or(1).max(1))
                    },
                )
            }));
        }
    }
    KvMemory::Adopted(planes)
}

/// A plane of the test's own memory, which stays until the thread ends.
fn adopted(kv_size: u32, shape: PlaneShape) -> Plane {
    thread_local! {
        static MEMORY: RefCell<Vec<Plane>> = const { RefCell::new(Vec::new()) };
    }
    let device = Device::open(0).expect("device 0");
    let plane = Plane::allocate_on(&device, &[shape], kv_size).expect("memory").remove(0);
    let address = plane.as_ptr().addr() as u64;
    MEMORY.with_borrow_mut(|memory| memory.push(plane));
    // SAFETY: it is memory of the device, and no context of another thread uses it.
    unsafe { Plane::adopt_device(address, kv_size, shape) }.expect("a plane")
}

/// Writes bytes of a plane, as its engine does.
pub fn write(plane: &Plane, offset: usize, bytes: &[u8]) {
    let dst = plane.as_ptr().wrapping_add(offset);
    match plane.device() {
        // SAFETY: callers name bytes of the plane, and nobody else uses it now.
        None => unsafe { dst.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) },
        Some(device) => in_context(device, || {
            // SAFETY: as above; the context is current. The copy from pageable memory may return before the bytes have
            // arrived, and the library waits for no stream that is not named.
            unsafe {
                let copied =
                    sys::cuMemcpyHtoD_v2(dst.addr() as u64, bytes.as_ptr().cast::<c_void>(), bytes.len());
                if copied == sys::CUresult::CUDA_SUCCESS {
                    sys::cuStreamSynchronize(std::ptr::null_mut())
                } else {
                    copied
                }
            }
        }),
    }
}

/// Bytes of a plane.
pub fn read(plane: &Plane, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0_u8; len];
    let src = plane.as_ptr().wrapping_add(offset);
    match plane.device() {
        // SAFETY: callers name bytes of the plane, and nobody else uses it now.
        None => unsafe { src.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) },
        Some(device) => in_context(device, || {
            // SAFETY: as above; the context is current.
            unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), src.addr() as u64, len) }
        }),
    }
    bytes
}

/// All bytes of a plane.
pub fn all(plane: &Plane) -> Vec<u8> {
    let span = plane.shape().span(plane.kv_size()).expect("a span");
    read(plane, 0, usize::try_from(span).expect("a span"))
}

/// A call of the driver with the device's primary context, which the library has retained.
fn in_context(ordinal: i32, call: impl FnOnce() -> sys::CUresult) {
    // SAFETY: out-parameters can be written; the context is released after the call, and the library has it still.
    let result = unsafe {
        let (mut device, mut context, mut before) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        let _ = sys::cuDeviceGet(&raw mut device, ordinal);
        let _ = sys::cuDevicePrimaryCtxRetain(&raw mut context, device);
        let _ = sys::cuCtxGetCurrent(&raw mut before);
        let _ = sys::cuCtxSetCurrent(context);
        let result = call();
        let _ = sys::cuCtxSetCurrent(before);
        let _ = sys::cuDevicePrimaryCtxRelease_v2(device);
        result
    };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}
