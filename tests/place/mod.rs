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
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use kvstate::error::Result;
use kvstate::memory::{
    Dsv4Memory, KvMemory, KvParams, KvPlanes, RecurrentLayerParams, RecurrentMemory, RecurrentParams,
    RecurrentPlanes, SectionParams, TensorParams,
};
use kvstate::storage::{Device, Plane, PlaneShape, StagingParams, alloc_pinned, free_pinned};
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
    pub fn device(self, layer: usize) -> Option<i32> {
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
            devices();
        }
        place
    })
}

/// Devices 0 and 1, or those of them that a real driver has. They are open from now on, not anew for every context.
pub fn devices() -> Vec<i32> {
    static OPEN: OnceLock<Vec<Arc<Device>>> = OnceLock::new();
    let open = OPEN.get_or_init(|| {
        if let Some(cuda) = emulated() {
            let driver = driver();
            cuda.set_mode(match driver.split_once(':') {
                None if driver == "lazy" => Mode::Lazy,
                Some(("eager", seed)) => Mode::Eager { seed: seed.parse().expect("a seed") },
                _ => panic!("KVSTATE_TEST_DRIVER is {driver}"),
            });
        }
        [0, 1].into_iter().filter_map(|ordinal| Device::open(ordinal).ok()).collect()
    });
    open.iter().map(|device| device.ordinal()).collect()
}

fn driver() -> String {
    std::env::var("KVSTATE_TEST_DRIVER").unwrap_or_else(|_| "lazy".to_owned())
}

/// The emulated driver, unless this run is about a real one.
pub fn emulated() -> Option<&'static FakeCuda> {
    static EMULATED: OnceLock<Option<&FakeCuda>> = OnceLock::new();
    *EMULATED.get_or_init(|| (driver() != "real").then(FakeCuda::load))
}

/// The cases of a long loop; with `KVSTATE_TEST_EVERY=N` every `N`th of them, for runs in many places.
pub fn cases<T>(all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
    let every = std::env::var("KVSTATE_TEST_EVERY").map_or(1, |n| n.parse().expect("a number"));
    all.step_by(every)
}

/// A context whose managed memory is where this run has it. Staging buffers are small, so that states take many chunks,
/// unless the test says how large they are.
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
        SectionParams::Recurrent { recurrent, memory: RecurrentMemory::Host } => {
            let memory = recurrent_memory(&recurrent, params.n_seq_max);
            SectionParams::Recurrent { recurrent, memory }
        }
        SectionParams::Dsv4 { dsv4, memory: Dsv4Memory::Host } => {
            let n_layer = [&dsv4.csa, &dsv4.hca, &dsv4.lid].into_iter().flat_map(|of| &of.layers).max();
            let devices = (0..=n_layer.map_or(0, |&il| il as usize)).map(|il| place().device(il));
            SectionParams::Dsv4 { dsv4, memory: Dsv4Memory::Devices(devices.collect()) }
        }
        section => section,
    });
    let small = StagingParams { size: 4096, count: 3 };
    let staging = if params.staging == StagingParams::default() { small } else { params.staging };
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
            let row_size =
                layer.k.ggml_type.row_size(layer.k.n_embd).filter(|&size| size > 0 && kv.kv_size > 0);
            let Some(row_size) = row_size else {
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

fn recurrent_memory(recurrent: &RecurrentParams, n_seq_max: u32) -> RecurrentMemory {
    if place() != Place::Adopted {
        return RecurrentMemory::Devices(
            (0..recurrent.layers.len()).map(|layer| place().device(layer)).collect(),
        );
    }
    let n_rows = n_seq_max * (1 + recurrent.n_rs_seq);
    let plane = |tensor: Option<TensorParams>| {
        let tensor = tensor?;
        let row_size = tensor.ggml_type.row_size(tensor.n_embd).filter(|&size| size > 0)?;
        Some(adopted(n_rows, PlaneShape::Rows { row_size, cell_stride: row_size + 16 }))
    };
    let layers = &recurrent.layers;
    let p = |layer: &RecurrentLayerParams| Some(TensorParams { n_embd: layer.p?, ..layer.r? });
    RecurrentMemory::Adopted(RecurrentPlanes {
        r: layers.iter().map(|layer| plane(layer.r)).collect(),
        s: layers.iter().map(|layer| plane(layer.s)).collect(),
        p: layers.iter().map(|layer| plane(p(layer))).collect(),
    })
}

/// Zeroed memory for tensors of the test's own, where this run has those of a layer.
pub fn allocate(layer: usize, shape: PlaneShape, kv_size: u32) -> Plane {
    let planes = match place().device(layer) {
        None => Plane::allocate(&[shape], kv_size),
        Some(ordinal) => Plane::allocate_on(&Device::open(ordinal).expect("a device"), &[shape], kv_size),
    };
    planes.expect("memory").remove(0)
}

/// The memory of a plane once more, as its owner lends it.
pub fn lent(plane: &Plane) -> Plane {
    // SAFETY: it stays as long as tests use it, one call after another.
    let lent = unsafe {
        match plane.device() {
            None => Plane::adopt(plane.as_ptr(), plane.kv_size(), plane.shape()),
            Some(_) => Plane::adopt_device(plane.as_ptr().addr() as u64, plane.kv_size(), plane.shape()),
        }
    };
    lent.expect("a plane")
}

/// A plane of the test's own memory, which stays until the thread ends.
fn adopted(kv_size: u32, shape: PlaneShape) -> Plane {
    thread_local! {
        static MEMORY: RefCell<Vec<Plane>> = const { RefCell::new(Vec::new()) };
    }
    let plane = allocate(0, shape, kv_size);
    let adopted = lent(&plane);
    MEMORY.with_borrow_mut(|memory| memory.push(plane));
    adopted
}

/// Writes bytes of a plane, as its engine does. They are there when it returns.
pub fn write(plane: &Plane, offset: usize, bytes: &[u8]) {
    let dst = plane.as_ptr().wrapping_add(offset);
    let Some(device) = plane.device() else {
        // SAFETY: callers name bytes of the plane, and nobody else uses it now.
        return unsafe { dst.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    };
    match emulated() {
        // It waits for nothing: a copy that the library has not waited for comes to light.
        Some(cuda) => cuda.poke(dst.addr() as u64, bytes),
        None => in_context(device, || {
            // SAFETY: as above; the context is current. The first call returns when it has read `bytes`.
            unsafe {
                let copied =
                    sys::cuMemcpyHtoD_v2(dst.addr() as u64, bytes.as_ptr().cast::<c_void>(), bytes.len());
                if copied == sys::CUresult::CUDA_SUCCESS { sys::cuCtxSynchronize() } else { copied }
            }
        }),
    }
}

/// Bytes of a plane.
pub fn read(plane: &Plane, offset: usize, len: usize) -> Vec<u8> {
    let src = plane.as_ptr().wrapping_add(offset);
    let mut bytes = vec![0_u8; len];
    let Some(device) = plane.device() else {
        // SAFETY: callers name bytes of the plane, and nobody else uses it now.
        unsafe { src.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        return bytes;
    };
    if let Some(cuda) = emulated() {
        return cuda.peek(src.addr() as u64, len);
    }
    in_context(device, || {
        // SAFETY: as above; the context is current.
        unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), src.addr() as u64, len) }
    });
    bytes
}

/// All bytes of a plane.
pub fn all(plane: &Plane) -> Vec<u8> {
    let span = plane.shape().span(plane.kv_size()).expect("a span");
    read(plane, 0, usize::try_from(span).expect("a span"))
}

/// Bytes in pinned memory, if this run has a device.
pub struct Pinned {
    start: *mut u8,
    len: usize,
    of_device: bool,
}

impl Pinned {
    pub fn new(bytes: &[u8]) -> Self {
        let len = bytes.len();
        // A device is asked for at least one byte.
        let mut held = match place() {
            Place::Host => {
                let start = Box::into_raw(vec![0_u8; len].into_boxed_slice()).cast();
                Self { start, len, of_device: false }
            }
            _ => Self {
                start: alloc_pinned(0, len.max(1) as u64).expect("pinned memory"),
                len,
                of_device: true,
            },
        };
        held.copy_from_slice(bytes);
        held
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes, initialised, and ours.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.of_device {
            free_pinned(self.start.addr()).expect("it was allocated");
        } else {
            // SAFETY: it was a box of so many bytes.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start, self.len)) });
        }
    }
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
