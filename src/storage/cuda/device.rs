//! A device: its primary context, which ggml and torch use as well, and the kernels in it.

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use super::driver::{DevicePtr, Driver, Handle};
use super::moves::Kernel;
use crate::error::{Error, Result};

/// What NVRTC makes of the sources in `cuda`, for devices from compute capability 6.0 on; each ends with a NUL.
const PTX: [&CStr; 2] = [
    c_str(concat!(include_str!("../../../cuda/kv.ptx"), "\0")),
    c_str(concat!(include_str!("../../../cuda/shift.ptx"), "\0")),
];

const fn c_str(text: &str) -> &CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("PTX with a NUL inside"),
    }
}

/// Blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    x: u32,
    y: u32,
}

impl Grid {
    /// Both are small.
    pub fn new(x: u64, y: usize) -> Self {
        Self { x: u32::try_from(x).unwrap_or(u32::MAX), y: u32::try_from(y).unwrap_or(u32::MAX) }
    }
}

/// A device that is in use; there is one of each number in a process.
pub struct Device {
    driver: &'static Driver,
    ordinal: i32,
    /// The driver's own number for it.
    handle: c_int,
    context: Handle,
    modules: [Handle; PTX.len()],
    functions: [Handle; Kernel::ALL.len()],
    has_pools: bool,
    /// For what belongs to no transfer: zeroing, freeing. Ordered after nothing of the caller's.
    pub(super) stream: Handle,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device {}", self.ordinal)
    }
}

/// While it lives, the calling thread's current context is the device's; then it is the caller's again.
pub(super) struct Bound<'a> {
    device: &'a Device,
    previous: *mut c_void,
    /// It is about the thread that made it.
    not_send: PhantomData<*mut ()>,
}

impl Device {
    /// The device of this number, opened if nobody uses it yet.
    ///
    /// # Errors
    /// [`Error::NoCuda`], [`Error::NoDevice`], [`Error::DriverTooOld`], [`Error::Device`].
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        static OPEN: LazyLock<Mutex<HashMap<i32, Weak<Device>>>> = LazyLock::new(Mutex::default);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(Self::retain(ordinal)?);
        open.insert(ordinal, Arc::downgrade(&device));
        Ok(device)
    }

    fn retain(ordinal: i32) -> Result<Self> {
        const MEMORY_POOLS_SUPPORTED: c_int = 115;
        let driver = Driver::get().map_err(|error| match error {
            // A driver without devices does not know which one was asked for.
            Error::NoDevice { n_device, .. } => Error::NoDevice { device: ordinal, n_device },
            error => error,
        })?;
        let mut n_device = 0;
        // SAFETY: `n_device` can be written.
        unsafe { driver.device_get_count(ordinal, &raw mut n_device)? };
        if !(0..n_device).contains(&ordinal) {
            return Err(Error::NoDevice { device: ordinal, n_device });
        }
        let (mut handle, mut has_pools, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: the out-parameters can be written, the ordinal is one of a device.
        unsafe {
            driver.device_get(ordinal, &raw mut handle, ordinal)?;
            driver.device_get_attribute(ordinal, &raw mut has_pools, MEMORY_POOLS_SUPPORTED, handle)?;
            driver.primary_ctx_retain(ordinal, &raw mut context, handle)?;
        }
        // From here on its drop releases what there is.
        let mut device = Self {
            driver,
            ordinal,
            handle,
            context: Handle(context),
            modules: [Handle::NULL; PTX.len()],
            functions: [Handle::NULL; Kernel::ALL.len()],
            has_pools: has_pools != 0,
            stream: Handle::NULL,
        };
        device.load()?;
        Ok(device)
    }

    fn load(&mut self) -> Result<()> {
        let mut modules = self.modules;
        let mut functions = self.functions;
        let bound = self.bind()?;
        let mut load = || {
            for (module, ptx) in modules.iter_mut().zip(PTX) {
                // SAFETY: the PTX ends with a NUL; `module` can be written; the context is current.
                unsafe {
                    bound.driver().module_load_data(self.ordinal, &raw mut module.0, ptx.as_ptr().cast())?;
                }
            }
            for (function, kernel) in functions.iter_mut().zip(Kernel::ALL) {
                let module = modules[usize::from(kernel == Kernel::Shift)];
                let name = kernel.name().as_ptr();
                // SAFETY: as above, and the module was loaded.
                unsafe {
                    bound.driver().module_get_function(self.ordinal, &raw mut function.0, module.0, name)?;
                }
            }
            new_stream(&bound)
        };
        let loaded = load();
        drop(bound);
        self.modules = modules;
        self.functions = functions;
        self.stream = loaded?;
        Ok(())
    }

    /// The device whose memory `addr` is in; `None` if it is in no device's. Without a driver there is none.
    #[must_use]
    pub fn ordinal_of(addr: u64) -> Option<i32> {
        Driver::get().ok()?.device_of(addr)
    }

    /// The device whose memory `addr` is in, if the host cannot reach it there. Does not load a driver.
    pub(in crate::storage) fn hiding(addr: u64) -> Option<i32> {
        let driver = Driver::in_use()?;
        driver.device_of(addr).filter(|_| !driver.is_managed(addr))
    }

    /// Its number, as the driver counts.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Makes the device's context the calling thread's.
    pub(super) fn bind(&self) -> Result<Bound<'_>> {
        let mut previous = ptr::null_mut();
        // SAFETY: `previous` can be written; the context is retained.
        unsafe {
            self.driver.ctx_get_current(self.ordinal, &raw mut previous)?;
            if previous != self.context.0 {
                self.driver.ctx_set_current(self.ordinal, self.context.0)?;
            }
        }
        Ok(Bound { device: self, previous, not_send: PhantomData })
    }

    /// As [`Device::bind`], for giving things back: if it fails, the calls that do so are tried all the same.
    pub(super) fn bind_to_free(&self) -> Bound<'_> {
        self.bind().unwrap_or_else(|error| {
            log::debug!("{error}");
            // SAFETY: the context is retained.
            told(unsafe { self.driver.ctx_set_current(self.ordinal, self.context.0) });
            Bound { device: self, previous: ptr::null_mut(), not_send: PhantomData }
        })
    }

    /// Zeroes `size` bytes at `ptr`, and waits for it.
    pub(super) fn zero(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        let bound = self.bind()?;
        // SAFETY: the caller owns these bytes of the device.
        unsafe { bound.driver().memset_d8_async(self.ordinal, ptr, 0, to_usize(size)?, self.stream.0)? };
        bound.synchronize(self.stream)
    }

    pub(super) fn has_pools(&self) -> bool {
        self.has_pools
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let bound = self.bind_to_free();
        bound.destroy_stream(self.stream);
        for module in self.modules.into_iter().filter(|&module| module != Handle::NULL) {
            // SAFETY: the module is this device's, and nothing of it runs any more: what ran kept the device.
            told(unsafe { self.driver.module_unload(self.ordinal, module.0) });
        }
        drop(bound);
        // SAFETY: it was retained once.
        told(unsafe { self.driver.primary_ctx_release(self.ordinal, self.handle) });
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if self.previous != self.device.context.0 {
            // SAFETY: it was this thread's current context before.
            told(unsafe { self.device.driver.ctx_set_current(self.device.ordinal, self.previous) });
        }
    }
}

impl Bound<'_> {
    pub fn driver(&self) -> &'static Driver {
        self.device.driver
    }

    pub fn ordinal(&self) -> i32 {
        self.device.ordinal
    }

    /// Whether a stream is one of the device's primary context.
    ///
    /// # Safety
    /// It is a live stream.
    pub unsafe fn owns(&self, stream: Handle) -> Result<bool> {
        let mut context = ptr::null_mut();
        // SAFETY: by contract; `context` can be written. Default streams are those of the current context, which is the device's.
        unsafe { self.driver().stream_get_ctx(self.ordinal(), stream.0, &raw mut context)? };
        Ok(context == self.device.context.0)
    }

    pub fn synchronize(&self, stream: Handle) -> Result<()> {
        // SAFETY: a live stream of the device.
        unsafe { self.driver().stream_synchronize(self.ordinal(), stream.0) }
    }

    pub fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: a live event and a live stream of the device.
        unsafe { self.driver().event_record(self.ordinal(), event.0, stream.0) }
    }

    /// What is queued on `stream` from now on runs after what was recorded in `event`.
    pub fn wait(&self, stream: Handle, event: Handle) -> Result<()> {
        // SAFETY: a live event and a live stream of the device.
        unsafe { self.driver().stream_wait_event(self.ordinal(), stream.0, event.0, 0) }
    }

    pub fn destroy_stream(&self, stream: Handle) {
        if stream != Handle::NULL {
            // SAFETY: a live stream of ours; what is queued on it is still done.
            told(unsafe { self.driver().stream_destroy(self.ordinal(), stream.0) });
        }
    }

    pub fn destroy_event(&self, event: Handle) {
        if event != Handle::NULL {
            // SAFETY: a live event of ours.
            told(unsafe { self.driver().event_destroy(self.ordinal(), event.0) });
        }
    }

    /// Queues a kernel, a row of blocks for each entry of its table.
    ///
    /// # Safety
    /// The table is there by then, and its entries are about memory of the device.
    pub unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        mut table: DevicePtr,
        stream: Handle,
    ) -> Result<()> {
        const THREADS: c_uint = 256;
        let function = self.device.functions[kernel as usize];
        let mut args = [(&raw mut table).cast::<c_void>()];
        // SAFETY: the kernels take one pointer; the rest by contract.
        unsafe {
            self.driver().launch_kernel(
                self.ordinal(),
                function.0,
                grid.x,
                grid.y,
                1,
                THREADS,
                1,
                1,
                0,
                stream.0,
                args.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }
}

/// A stream that waits for no other, not even the default one.
pub(super) fn new_stream(bound: &Bound<'_>) -> Result<Handle> {
    const NON_BLOCKING: c_uint = 1;
    let mut stream = ptr::null_mut();
    // SAFETY: `stream` can be written; the context is current.
    unsafe { bound.driver().stream_create(bound.ordinal(), &raw mut stream, NON_BLOCKING)? };
    Ok(Handle(stream))
}

pub(super) fn new_event(bound: &Bound<'_>) -> Result<Handle> {
    const DISABLE_TIMING: c_uint = 2;
    let mut event = ptr::null_mut();
    // SAFETY: `event` can be written; the context is current.
    unsafe { bound.driver().event_create(bound.ordinal(), &raw mut event, DISABLE_TIMING)? };
    Ok(Handle(event))
}

/// For what nobody can be told of: a destructor fails when the device is lost, which another call has told.
pub(super) fn told(result: Result<()>) {
    if let Err(error) = result {
        log::debug!("{error}");
    }
}

pub(super) fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::arg("bytes", format!("{bytes} cannot be addressed")))
}
