//! The CUDA driver: found once, called through its own symbols.
//!
//! Nothing links against it. Calls return plain numbers, so that a failure which a newer driver names is one as well.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result};

/// An address in the memory of a device (`CUdeviceptr`).
pub(super) type DevicePtr = u64;

/// A context, stream, event, module or function of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(pub *mut c_void);

// SAFETY: what the driver hands out may be used from every thread.
unsafe impl Send for Handle {}
// SAFETY: as above, and a Handle gives no access by itself.
unsafe impl Sync for Handle {}

impl Handle {
    pub const NULL: Self = Self(ptr::null_mut());
}

/// Codes of the driver that are told apart.
pub(super) mod code {
    pub const OUT_OF_MEMORY: u32 = 2;
    pub const NO_DEVICE: u32 = 100;
    pub const UNSUPPORTED_PTX_VERSION: u32 = 222;
    pub const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
}

/// The oldest driver that takes PTX 8.0, as `cuDriverGetVersion` counts: CUDA 12.0, r525.
const MIN_VERSION: c_int = 12000;
pub(super) const MIN_VERSION_NAME: &str = "12.0 (r525)";

/// Declares the calls: a table of symbols, and a method for each, which checks what the call returns.
macro_rules! calls {
    ($($name:ident = $symbol:literal($($arg:ident: $type:ty),*);)*) => {
        /// The symbols.
        struct Symbols {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Symbols {
            /// Looks all of them up; the name of one that is not there.
            ///
            /// # Safety
            /// The library is a CUDA driver.
            unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the driver has this symbol with this signature, since CUDA 11.2 or longer.
                        *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(|_| $symbol)?
                    },)*
                })
            }
        }

        impl Driver {
            $(
                #[allow(clippy::too_many_arguments, reason = "a launch has them")]
                /// # Safety
                /// The contract of the driver's call; the calling thread has its device's context.
                pub unsafe fn $name(&self, device: i32, $($arg: $type),*) -> Result<()> {
                    // SAFETY: by contract.
                    self.check($symbol, device, unsafe { (self.symbols.$name)($($arg),*) })
                }
            )*
        }
    };
}

calls! {
    device_get_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get = "cuDeviceGet"(out: *mut c_int, ordinal: c_int);
    device_get_attribute = "cuDeviceGetAttribute"(out: *mut c_int, attribute: c_int, handle: c_int);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(out: *mut *mut c_void, handle: c_int);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(handle: c_int);
    ctx_get_current = "cuCtxGetCurrent"(out: *mut *mut c_void);
    ctx_set_current = "cuCtxSetCurrent"(context: *mut c_void);
    module_load_data = "cuModuleLoadData"(out: *mut *mut c_void, image: *const c_void);
    module_get_function = "cuModuleGetFunction"(out: *mut *mut c_void, module: *mut c_void, name: *const c_char);
    module_unload = "cuModuleUnload"(module: *mut c_void);
    stream_create = "cuStreamCreate"(out: *mut *mut c_void, flags: c_uint);
    stream_destroy = "cuStreamDestroy_v2"(stream: *mut c_void);
    stream_synchronize = "cuStreamSynchronize"(stream: *mut c_void);
    stream_wait_event = "cuStreamWaitEvent"(stream: *mut c_void, event: *mut c_void, flags: c_uint);
    stream_get_ctx = "cuStreamGetCtx"(stream: *mut c_void, out: *mut *mut c_void);
    stream_is_capturing = "cuStreamIsCapturing"(stream: *mut c_void, out: *mut c_int);
    event_create = "cuEventCreate"(out: *mut *mut c_void, flags: c_uint);
    event_record = "cuEventRecord"(event: *mut c_void, stream: *mut c_void);
    event_synchronize = "cuEventSynchronize"(event: *mut c_void);
    event_destroy = "cuEventDestroy_v2"(event: *mut c_void);
    mem_alloc = "cuMemAlloc_v2"(out: *mut DevicePtr, size: usize);
    mem_free = "cuMemFree_v2"(ptr: DevicePtr);
    mem_alloc_async = "cuMemAllocAsync"(out: *mut DevicePtr, size: usize, stream: *mut c_void);
    mem_free_async = "cuMemFreeAsync"(ptr: DevicePtr, stream: *mut c_void);
    mem_host_alloc = "cuMemHostAlloc"(out: *mut *mut c_void, size: usize, flags: c_uint);
    mem_free_host = "cuMemFreeHost"(ptr: *mut c_void);
    mem_host_register = "cuMemHostRegister_v2"(ptr: *mut c_void, size: usize, flags: c_uint);
    mem_host_unregister = "cuMemHostUnregister"(ptr: *mut c_void);
    memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(dst: DevicePtr, src: *const c_void, size: usize, stream: *mut c_void);
    memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2"(dst: *mut c_void, src: DevicePtr, size: usize, stream: *mut c_void);
    memset_d8_async = "cuMemsetD8Async"(dst: DevicePtr, value: u8, size: usize, stream: *mut c_void);
    launch_kernel = "cuLaunchKernel"(
        function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: *mut c_void, args: *mut *mut c_void, extra: *mut *mut c_void
    );
}

/// Calls that are made before a device is known, or whose failure is an answer.
struct Probes {
    init: unsafe extern "C" fn(c_uint) -> u32,
    driver_get_version: unsafe extern "C" fn(*mut c_int) -> u32,
    pointer_get_attribute: unsafe extern "C" fn(*mut c_void, c_int, DevicePtr) -> u32,
    get_error_name: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
}

impl Probes {
    /// # Safety
    /// The library is a CUDA driver.
    unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
        // SAFETY: the driver has these symbols with these signatures.
        unsafe {
            Ok(Self {
                init: *library.get(b"cuInit\0").map_err(|_| "cuInit")?,
                driver_get_version: *library
                    .get(b"cuDriverGetVersion\0")
                    .map_err(|_| "cuDriverGetVersion")?,
                pointer_get_attribute: *library
                    .get(b"cuPointerGetAttribute\0")
                    .map_err(|_| "cuPointerGetAttribute")?,
                get_error_name: *library.get(b"cuGetErrorName\0").map_err(|_| "cuGetErrorName")?,
            })
        }
    }
}

/// Why there is no driver.
enum Unusable {
    NoLibrary,
    NoSymbol(&'static str),
    Init { code: u32, name: String },
    TooOld { version: c_int },
}

static DRIVER: OnceLock<Result<Driver, Unusable>> = OnceLock::new();

/// A driver that has been initialised.
pub(super) struct Driver {
    symbols: Symbols,
    probes: Probes,
    version: c_int,
}

impl Driver {
    /// The driver of this process; what was found the first time stays.
    pub fn get() -> Result<&'static Self> {
        let no_cuda = |reason| Err(Error::NoCuda { reason });
        match DRIVER.get_or_init(Self::find) {
            Ok(driver) => Ok(driver),
            Err(Unusable::NoLibrary) => no_cuda(
                "libcuda is not on this machine, or cannot be loaded: install the NVIDIA driver".to_owned(),
            ),
            Err(Unusable::NoSymbol(symbol)) => no_cuda(format!("the driver has no {symbol}")),
            Err(Unusable::Init { code: code::NO_DEVICE, .. }) => {
                Err(Error::NoDevice { device: 0, n_device: 0 })
            }
            Err(Unusable::Init { code, name }) => no_cuda(format!("cuInit: {name} ({code})")),
            Err(Unusable::TooOld { version }) => Err(Self::too_old(*version)),
        }
    }

    /// The driver, if this library or the program around it uses one; it is not loaded for this question.
    pub fn in_use() -> Option<&'static Self> {
        static IS_LOADED: OnceLock<bool> = OnceLock::new();
        let is_loaded = || *IS_LOADED.get_or_init(is_loaded);
        if DRIVER.get().is_some() || is_loaded() { Self::get().ok() } else { None }
    }

    fn find() -> Result<Self, Unusable> {
        // SAFETY: loading the driver runs its initialisers, which is what it is for.
        let library = unsafe {
            if !sys::is_culib_present() {
                return Err(Unusable::NoLibrary);
            }
            sys::culib()
        };
        // SAFETY: it is the driver's library.
        let probes = unsafe { Probes::load(library) }.map_err(Unusable::NoSymbol)?;
        let mut version = 0;
        // SAFETY: `version` can be written. The version is known before anything is initialised.
        let code = unsafe { (probes.driver_get_version)(&raw mut version) };
        if code == 0 && version < MIN_VERSION {
            return Err(Unusable::TooOld { version });
        }
        // SAFETY: the flags have to be 0.
        let code = unsafe { (probes.init)(0) };
        if code != 0 {
            return Err(Unusable::Init { code, name: probes.name(code) });
        }
        // SAFETY: it is the driver's library.
        let symbols = unsafe { Symbols::load(library) }.map_err(Unusable::NoSymbol)?;
        Ok(Self { symbols, probes, version })
    }

    fn too_old(version: c_int) -> Error {
        let driver = format!("{}.{}", version / 1000, version % 1000 / 10);
        Error::DriverTooOld { driver, need: MIN_VERSION_NAME }
    }

    fn check(&self, call: &'static str, device: i32, code: u32) -> Result<()> {
        match code {
            0 => Ok(()),
            code::UNSUPPORTED_PTX_VERSION => Err(Self::too_old(self.version)),
            code => Err(Error::Device { call, device, name: self.probes.name(code), code }),
        }
    }

    /// Which device's memory `addr` is in; `None` for host memory, pinned or not.
    pub fn device_of(&self, addr: DevicePtr) -> Option<i32> {
        const MEMORY_TYPE: c_int = 2;
        const DEVICE_ORDINAL: c_int = 9;
        const DEVICE: c_int = 2;
        let is_device = self.pointer_attribute(MEMORY_TYPE, addr) == Some(DEVICE);
        is_device.then(|| self.pointer_attribute(DEVICE_ORDINAL, addr)).flatten()
    }

    /// Whether the host reads and writes `addr` as well, wherever the driver keeps it.
    pub fn is_managed(&self, addr: DevicePtr) -> bool {
        const IS_MANAGED: c_int = 8;
        self.pointer_attribute(IS_MANAGED, addr) == Some(1)
    }

    /// An attribute that is a number, or a flag; `None` for an address that the driver does not know.
    fn pointer_attribute(&self, which: c_int, addr: DevicePtr) -> Option<c_int> {
        // A flag is a byte of it.
        let mut value: c_int = 0;
        // SAFETY: the attributes that are asked for are no larger; an unknown address is an error.
        let code = unsafe { (self.probes.pointer_get_attribute)((&raw mut value).cast(), which, addr) };
        (code == 0).then_some(value)
    }
}

/// Whether libcuda is in the process already.
fn is_loaded() -> bool {
    #[cfg(unix)]
    {
        use libloading::os::unix::{Library, RTLD_LAZY};
        /// Of glibc and musl.
        const RTLD_NOLOAD: c_int = 4;
        // SAFETY: nothing is loaded, and so nothing initialised.
        unsafe { Library::open(Some("libcuda.so.1"), RTLD_LAZY | RTLD_NOLOAD) }.is_ok()
    }
    #[cfg(windows)]
    {
        libloading::os::windows::Library::open_already_loaded("nvcuda.dll").is_ok()
    }
    #[cfg(not(any(unix, windows)))]
    false
}

impl Probes {
    /// The driver's name for a failure.
    fn name(&self, code: u32) -> String {
        let mut name = ptr::null();
        // SAFETY: `name` can be written; the driver's strings are static.
        unsafe {
            if (self.get_error_name)(code, &raw mut name) == 0 && !name.is_null() {
                return CStr::from_ptr(name).to_string_lossy().into_owned();
            }
        }
        "an unknown error".to_owned()
    }
}

/// Whether a failure is a lack of device memory.
pub(super) fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Device { code: code::OUT_OF_MEMORY, .. })
}
