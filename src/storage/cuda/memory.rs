//! Memory of devices, and pinned memory of the host.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::{Device, new_event, to_usize, told};
use super::driver::{DevicePtr, Driver, Handle, code, is_out_of_memory};
use crate::error::{Error, Result};

/// Alignment of planes in an allocation, bytes; the driver's own is as large.
pub(super) const ALIGN: u64 = 256;

/// Memory of a device that is ours.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    pub device: Arc<Device>,
    pub ptr: DevicePtr,
    pub size: u64,
    from_pool: bool,
    /// Recorded behind the last use that was queued; NULL: nothing is queued when it is freed.
    last_use: Handle,
}

impl DeviceMemory {
    /// `size > 0` bytes, whatever is in them.
    pub fn new(device: &Arc<Device>, size: u64, what: &'static str) -> Result<Self> {
        let bound = device.bind()?;
        let mut ptr = 0;
        // SAFETY: `ptr` can be written; the context is current.
        let done = unsafe { bound.driver().mem_alloc(device.ordinal(), &raw mut ptr, to_usize(size)?) };
        done.map_err(|error| lack_of(error, what, size))?;
        Ok(Self { device: Arc::clone(device), ptr, size, from_pool: false, last_use: Handle::NULL })
    }

    /// `size > 0` bytes that can be used on `stream` from now on. Where the driver has pools this waits for nothing.
    pub fn on_stream(device: &Arc<Device>, size: u64, what: &'static str, stream: Handle) -> Result<Self> {
        let mut memory = if device.has_pools() {
            let bound = device.bind()?;
            let mut ptr = 0;
            let bytes = to_usize(size)?;
            // SAFETY: `ptr` can be written; the stream is one of the device.
            let done =
                unsafe { bound.driver().mem_alloc_async(device.ordinal(), &raw mut ptr, bytes, stream.0) };
            done.map_err(|error| lack_of(error, what, size))?;
            Self { device: Arc::clone(device), ptr, size, from_pool: true, last_use: Handle::NULL }
        } else {
            Self::new(device, size, what)?
        };
        memory.last_use = new_event(&device.bind()?)?;
        memory.used_on(stream)?;
        Ok(memory)
    }

    /// Notes that it is in use by what is queued on `stream`.
    pub fn used_on(&self, stream: Handle) -> Result<()> {
        self.device.bind()?.record(self.last_use, stream)
    }

    /// Has what is queued on `stream` from now on run after the last use that was noted.
    pub fn wait_on(&self, stream: Handle) -> Result<()> {
        if self.last_use == Handle::NULL {
            return Ok(());
        }
        self.device.bind()?.wait(stream, self.last_use)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let bound = self.device.bind_to_free();
        let (driver, ordinal) = (bound.driver(), bound.ordinal());
        if self.last_use != Handle::NULL {
            told(bound.wait(self.device.stream, self.last_use));
        }
        // SAFETY: it was allocated so, and is freed once, behind its last use.
        told(unsafe {
            if self.from_pool {
                driver.mem_free_async(ordinal, self.ptr, self.device.stream.0)
            } else {
                driver.mem_free(ordinal, self.ptr)
            }
        });
        bound.destroy_event(self.last_use);
    }
}

/// An error of an allocation in our words.
fn lack_of(error: Error, what: &'static str, bytes: u64) -> Error {
    if is_out_of_memory(&error) { Error::OutOfMemory { what, bytes } } else { error }
}

/// Host memory that devices reach by themselves.
#[derive(Debug)]
pub struct PinnedMemory {
    /// Keeps the context that it was allocated in.
    device: Arc<Device>,
    ptr: NonNull<u8>,
    size: usize,
}

// SAFETY: it is memory like any other, and can be freed on every thread.
unsafe impl Send for PinnedMemory {}
// SAFETY: through `&PinnedMemory` it is only read.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// `size > 0` bytes, zeroed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn new(device: &Arc<Device>, size: u64) -> Result<Self> {
        // Usable from every device's context.
        const PORTABLE: u32 = 1;
        let bound = device.bind()?;
        let mut ptr = ptr::null_mut();
        let bytes = to_usize(size)?;
        // SAFETY: `ptr` can be written; the context is current.
        let done = unsafe { bound.driver().mem_host_alloc(device.ordinal(), &raw mut ptr, bytes, PORTABLE) };
        done.map_err(|error| lack_of(error, "pinned memory", size))?;
        let ptr = NonNull::new(ptr.cast::<u8>())
            .ok_or(Error::OutOfMemory { what: "pinned memory", bytes: size })?;
        // SAFETY: that many bytes were allocated.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(Self { device: Arc::clone(device), ptr, size: bytes })
    }

    /// The bytes; the caller sees to it that no device writes them meanwhile.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated, initialised; a transfer writes them through `&mut self` only.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.size) }
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has them.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.size) }
    }

    /// Where they are.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let bound = self.device.bind_to_free();
        // SAFETY: allocated by `mem_host_alloc`, and freed once; transfers that use it were waited for.
        told(unsafe { bound.driver().mem_free_host(bound.ordinal(), self.ptr.as_ptr().cast()) });
    }
}

/// Ranges of host memory that are known to be pinned, by start.
static PINNED: Mutex<BTreeMap<usize, Pinned>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Pinned {
    size: usize,
    /// Keeps the memory; `None` if it is the caller's, who had it registered.
    allocation: Option<PinnedMemory>,
    /// Keeps the context in which it is known.
    device: Arc<Device>,
}

/// Whether a device reaches all of these bytes by itself.
pub(super) fn is_pinned(bytes: &[u8]) -> bool {
    let start = bytes.as_ptr().addr();
    let pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
    let before = pinned.range(..=start).next_back();
    before.is_some_and(|(&at, range)| start - at <= range.size && bytes.len() <= range.size - (start - at))
}

/// Pinned memory of `size > 0` bytes, zeroed, which [`free_pinned`] frees: a state that goes there, or comes from there, is moved by
/// the device without a copy on the host.
///
/// # Errors
/// Those of [`Device::open`], [`Error::OutOfMemory`].
pub fn alloc_pinned(ordinal: i32, size: u64) -> Result<*mut u8> {
    let device = Device::open(ordinal)?;
    let allocation = PinnedMemory::new(&device, size)?;
    let ptr = allocation.as_ptr();
    let range = Pinned { size: allocation.size, allocation: Some(allocation), device };
    PINNED.lock().unwrap_or_else(PoisonError::into_inner).insert(ptr.addr(), range);
    Ok(ptr)
}

/// Frees what [`alloc_pinned`] gave.
///
/// # Errors
/// [`Error::InvalidArgument`] if it gave no such memory.
pub fn free_pinned(addr: usize) -> Result<()> {
    take(addr, true).map(drop)
}

/// Pins `size` bytes at `ptr`, which are the caller's, until [`unregister_host`].
///
/// # Errors
/// [`Error::InvalidArgument`] for no bytes, or some that are pinned already; those of [`Device::open`]; [`Error::Device`].
///
/// # Safety
/// They are the caller's, and stay until they are unregistered.
pub unsafe fn register_host(ordinal: i32, ptr: *mut u8, size: usize) -> Result<()> {
    const PORTABLE: u32 = 1;
    if ptr.is_null() || size == 0 {
        return Err(Error::arg("ptr", format!("{size} bytes at {ptr:p}, nothing to pin")));
    }
    let device = Device::open(ordinal)?;
    let bound = device.bind()?;
    // SAFETY: by contract.
    let done = unsafe { bound.driver().mem_host_register(ordinal, ptr.cast::<c_void>(), size, PORTABLE) };
    done.map_err(|error| match error {
        Error::Device { code: code::HOST_MEMORY_ALREADY_REGISTERED, .. } => {
            Error::arg("ptr", format!("some of the {size} bytes at {ptr:p} are pinned already"))
        }
        error => error,
    })?;
    drop(bound);
    let range = Pinned { size, allocation: None, device };
    PINNED.lock().unwrap_or_else(PoisonError::into_inner).insert(ptr.addr(), range);
    Ok(())
}

/// Ends what [`register_host`] began.
///
/// # Errors
/// [`Error::InvalidArgument`] if nothing was registered there, [`Error::Device`].
pub fn unregister_host(addr: usize) -> Result<()> {
    let range = take(addr, false)?;
    let bound = range.device.bind()?;
    let ptr = ptr::with_exposed_provenance_mut(addr);
    // SAFETY: it was registered, and is no longer known to be pinned.
    unsafe { bound.driver().mem_host_unregister(bound.ordinal(), ptr) }
}

/// Forgets a range, which must be of this kind.
fn take(addr: usize, is_ours: bool) -> Result<Pinned> {
    let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
    match pinned.get(&addr) {
        Some(range) if range.allocation.is_some() == is_ours => {
            Ok(pinned.remove(&addr).expect("it was just there"))
        }
        _ => {
            let how = if is_ours { "allocated" } else { "registered" };
            Err(Error::arg("ptr", format!("{addr:#x}, no pinned memory was {how} there")))
        }
    }
}

/// Whether a driver can be had at all.
///
/// # Errors
/// Why not.
pub fn probe() -> Result<()> {
    Driver::get().map(drop)
}
