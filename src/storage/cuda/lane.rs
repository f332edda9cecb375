//! Lanes: the streams and the staging buffers that a transfer runs through, kept from one to the next.

use std::ffi::{c_int, c_void};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::device::{Bound, Device, new_event, new_stream, to_usize, told};
use super::driver::{DevicePtr, Handle};
use super::memory::{DeviceMemory, PinnedMemory};
use super::moves::{Launch, Table};
use crate::error::{Error, Result};

/// Bytes of a staging buffer, if nobody says how many.
const DEFAULT_SIZE: u64 = 32 << 20;

/// Pinned buffers, if nobody says how many: one is filled, one is read, two wait.
const DEFAULT_COUNT: usize = 4;

/// Staging buffers on the device: a kernel works on one while the other is copied.
const N_DEVICE: usize = 2;

/// Lanes of a device that are kept when nobody uses them: one for calls, one for a save in the background.
const MAX_IDLE: usize = 2;

/// Bytes below which a lack of memory is no longer answered by smaller buffers.
const MIN_SIZE: u64 = 64 << 10;

/// A stream of the caller's, on which its work with the cache runs.
#[derive(Clone, Debug)]
pub struct CallerStream {
    device: Arc<Device>,
    handle: Handle,
}

impl CallerStream {
    /// The stream `handle` (a `CUstream` or `cudaStream_t`) of a device. NULL and the driver's other two numbers for
    /// default streams are streams as well.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is a stream of another device or context; those of [`Device::open`].
    ///
    /// # Safety
    /// It is a live stream, as long as it is named.
    pub unsafe fn new(ordinal: i32, handle: *mut c_void) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let bound = device.bind()?;
        // SAFETY: the stream is live, by contract.
        if !unsafe { bound.owns(Handle(handle))? } {
            let reason = format!("{handle:p} is no stream of the primary context of device {ordinal}");
            return Err(Error::arg("stream", reason));
        }
        drop(bound);
        Ok(Self { device, handle: Handle(handle) })
    }

    /// Which device it is on.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.device.ordinal()
    }

    /// As [`CallerStream::check`], by itself.
    pub(in crate::storage) fn check_now(&self) -> Result<()> {
        self.check(&self.device.bind()?)
    }

    /// Checks that work can be ordered behind it.
    pub(super) fn check(&self, bound: &Bound<'_>) -> Result<()> {
        let mut is_capturing: c_int = 0;
        // SAFETY: the stream is live, by contract; `is_capturing` can be written.
        unsafe { bound.driver().stream_is_capturing(self.ordinal(), self.handle.0, &raw mut is_capturing)? };
        if is_capturing == 0 {
            return Ok(());
        }
        Err(Error::arg(
            "stream",
            format!("the one of device {} is being captured into a graph", self.ordinal()),
        ))
    }
}

/// How large staging buffers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingParams {
    /// Bytes of a buffer; 0: 32 MiB.
    pub size: u64,
    /// Pinned buffers, at least 2; 0: 4. On the device there are 2 of the same size.
    pub count: usize,
}

/// Bytes that staging takes at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingReport {
    /// In the memory of devices.
    pub device: u64,
    /// Of pinned host memory.
    pub pinned: u64,
}

/// The lanes of a context, idle ones; a transfer takes one, or opens one.
#[derive(Debug, Default)]
pub struct Staging {
    params: StagingParams,
    /// No state is larger, so no buffer needs to be. `None`: nobody knows.
    largest_state: Option<u64>,
    idle: Mutex<Vec<Lane>>,
    report: Mutex<StagingReport>,
}

impl Staging {
    /// Lanes with buffers of this size. `largest_state`: bytes that no state exceeds.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for fewer than 2 pinned buffers.
    pub fn new(params: StagingParams, largest_state: Option<u64>) -> Result<Self> {
        if params.count == 1 {
            return Err(Error::arg(
                "n_staging",
                "1, a buffer is filled while another one is emptied: at least 2",
            ));
        }
        Ok(Self { params, largest_state, ..Self::default() })
    }

    /// What is allocated; what a transfer under way has added counts when it ends.
    #[must_use]
    pub fn report(&self) -> StagingReport {
        *self.lock_report()
    }

    /// Frees the buffers that are not in use; they come again when they are needed.
    pub fn free(&self) {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        let mut report = self.lock_report();
        for bytes in idle.iter().map(Lane::bytes) {
            report.device -= bytes.device;
            report.pinned -= bytes.pinned;
        }
    }

    fn lock_report(&self) -> std::sync::MutexGuard<'_, StagingReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane on `device`: of those that are idle the last one, which has what was prepared for it.
    pub(super) fn lane(self: &Arc<Self>, device: &Arc<Device>) -> Result<LaneGuard> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let at = idle.iter().rposition(|lane| lane.device.ordinal() == device.ordinal());
        let lane = at.map(|at| idle.swap_remove(at));
        drop(idle);
        let lane = lane.map_or_else(|| Lane::open(device), Ok)?;
        Ok(LaneGuard { staging: Arc::clone(self), taken_with: lane.bytes(), lane: Some(lane) })
    }
}

/// A pinned buffer.
#[derive(Debug)]
pub(super) struct PinnedBuffer {
    pub memory: PinnedMemory,
    /// Recorded behind the last copy from or to it.
    pub copied: Handle,
}

/// A staging buffer on the device.
#[derive(Debug)]
pub(super) struct DeviceBuffer {
    pub memory: DeviceMemory,
    /// Recorded behind what empties it: it may be filled again after that.
    pub emptied: Handle,
    /// Recorded behind what fills it.
    pub filled: Handle,
}

/// What one transfer on one device runs through.
#[derive(Debug)]
pub(super) struct Lane {
    pub device: Arc<Device>,
    /// Kernels.
    pub compute: Handle,
    /// Copies over the link.
    pub copy: Handle,
    joined: Handle,
    pub pinned: Vec<PinnedBuffer>,
    pub buffers: Vec<DeviceBuffer>,
    table: Option<(PinnedMemory, DeviceMemory)>,
    /// Recorded behind the copy of the table: its pinned memory may be written again after that.
    table_copied: Handle,
    /// Work is queued that nobody has waited for.
    is_busy: bool,
}

impl Lane {
    fn open(device: &Arc<Device>) -> Result<Self> {
        let bound = device.bind()?;
        // From here on its drop destroys what there is.
        let mut lane = Self {
            device: Arc::clone(device),
            compute: Handle::NULL,
            copy: Handle::NULL,
            joined: Handle::NULL,
            pinned: Vec::new(),
            buffers: Vec::new(),
            table: None,
            table_copied: Handle::NULL,
            is_busy: false,
        };
        lane.compute = new_stream(&bound)?;
        lane.copy = new_stream(&bound)?;
        lane.joined = new_event(&bound)?;
        lane.table_copied = new_event(&bound)?;
        Ok(lane)
    }

    /// Bytes of a chunk: of the smallest buffer.
    pub fn capacity(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.memory.size).min().unwrap_or(0)
    }

    pub fn buffer_ptrs(&self) -> Vec<DevicePtr> {
        self.buffers.iter().map(|buffer| buffer.memory.ptr).collect()
    }

    /// Runs what is queued from now on after the caller's work so far.
    pub fn join(&mut self, bound: &Bound<'_>, caller: Option<&CallerStream>) -> Result<()> {
        self.is_busy = true;
        let Some(caller) = caller else { return Ok(()) };
        caller.check(bound)?;
        bound.record(self.joined, caller.handle)?;
        bound.wait(self.compute, self.joined)?;
        bound.wait(self.copy, self.joined)
    }

    /// Runs the caller's work from now on after what is queued on `compute`; without a stream of the caller's, waits
    /// for it here.
    pub fn release(&mut self, bound: &Bound<'_>, caller: Option<&CallerStream>) -> Result<()> {
        let Some(caller) = caller else { return self.wait(bound) };
        bound.record(self.joined, self.compute)?;
        bound.wait(caller.handle, self.joined)?;
        // A lane is taken again only for work on its own streams, behind this.
        self.is_busy = false;
        Ok(())
    }

    /// Waits for all that is queued.
    pub fn wait(&mut self, bound: &Bound<'_>) -> Result<()> {
        let copied = bound.synchronize(self.copy);
        let computed = bound.synchronize(self.compute);
        self.is_busy = false;
        copied.and(computed)
    }

    /// Has room for a table of `size` bytes.
    pub fn reserve_table(&mut self, bound: &Bound<'_>, size: usize) -> Result<()> {
        let room = self.table.as_ref().map_or(0, |(_, memory)| memory.size);
        if (size as u64) <= room {
            return Ok(());
        }
        bound.synchronize(self.compute)?;
        self.table = None;
        let room = (size as u64).next_power_of_two().max(4096);
        let memory = DeviceMemory::new(&self.device, room, "the table of a transfer")?;
        self.table = Some((PinnedMemory::new(&self.device, room)?, memory));
        Ok(())
    }

    /// Brings a table of `size` bytes to the device, for launches on `compute`; returns where it is, as `write` is told.
    pub fn upload(
        &mut self,
        bound: &Bound<'_>,
        size: usize,
        write: impl FnOnce(&mut [u8], DevicePtr),
    ) -> Result<DevicePtr> {
        if size == 0 {
            return Ok(0);
        }
        self.reserve_table(bound, size)?;
        // SAFETY: a live event of the device.
        unsafe { bound.driver().event_synchronize(bound.ordinal(), self.table_copied.0)? };
        let (pinned, memory) = self.table.as_mut().expect("it has just been made, or was there");
        let ptr = memory.ptr;
        write(&mut pinned.bytes_mut()[..size], ptr);
        // SAFETY: both sides have that many bytes; the pinned ones are not written before `table_copied`.
        unsafe {
            let src = pinned.as_ptr().cast_const().cast();
            bound.driver().memcpy_htod_async(bound.ordinal(), ptr, src, size, self.compute.0)?;
        }
        bound.record(self.table_copied, self.compute)?;
        Ok(ptr)
    }

    /// Brings a table of moves to the device.
    pub fn upload_moves(&mut self, bound: &Bound<'_>, table: &mut Table) -> Result<DevicePtr> {
        self.upload(bound, table.size(), |out, ptr| table.write(out, ptr))
    }

    /// Queues launches of the table at `table`.
    pub fn launch(&self, bound: &Bound<'_>, launches: &[Launch], table: DevicePtr) -> Result<()> {
        launches.iter().try_for_each(|launch| {
            // SAFETY: the table was brought there by `compute`, and its moves were made for memory of this device.
            unsafe { bound.launch(launch.kernel, launch.grid, table + launch.offset, self.compute) }
        })
    }

    /// Zeroes `len` bytes of a plane at `dst`.
    pub fn zero(&self, bound: &Bound<'_>, dst: DevicePtr, len: u64) -> Result<()> {
        // SAFETY: they lie in a plane of the device.
        unsafe { bound.driver().memset_d8_async(bound.ordinal(), dst, 0, to_usize(len)?, self.compute.0) }
    }

    /// Copies `len` bytes of the device at `src` to the host.
    ///
    /// # Safety
    /// `dst` can be written until the copy has been waited for.
    pub unsafe fn to_host(&self, bound: &Bound<'_>, dst: *mut u8, src: DevicePtr, len: u64) -> Result<()> {
        // SAFETY: by contract; the bytes lie in a plane or a buffer of the device.
        unsafe {
            bound.driver().memcpy_dtoh_async(bound.ordinal(), dst.cast(), src, to_usize(len)?, self.copy.0)
        }
    }

    /// Copies `len` bytes of the host to the device at `dst`.
    ///
    /// # Safety
    /// `src` is not written until the copy has been waited for.
    pub unsafe fn to_device(
        &self,
        bound: &Bound<'_>,
        dst: DevicePtr,
        src: *const u8,
        len: u64,
    ) -> Result<()> {
        // SAFETY: by contract; the bytes lie in a plane or a buffer of the device.
        unsafe {
            bound.driver().memcpy_htod_async(bound.ordinal(), dst, src.cast(), to_usize(len)?, self.copy.0)
        }
    }

    fn bytes(&self) -> StagingReport {
        let table = self.table.as_ref().map_or(0, |(_, memory)| memory.size);
        let pinned: usize = self.pinned.iter().map(|buffer| buffer.memory.bytes().len()).sum();
        let device: u64 = self.buffers.iter().map(|buffer| buffer.memory.size).sum();
        StagingReport { device: device + table, pinned: pinned as u64 + table }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let bound = self.device.bind_to_free();
        // What is queued uses the buffers.
        told(bound.synchronize(self.copy));
        told(bound.synchronize(self.compute));
        self.pinned.iter().for_each(|buffer| bound.destroy_event(buffer.copied));
        for buffer in &self.buffers {
            bound.destroy_event(buffer.emptied);
            bound.destroy_event(buffer.filled);
        }
        bound.destroy_event(self.joined);
        bound.destroy_event(self.table_copied);
        bound.destroy_stream(self.copy);
        bound.destroy_stream(self.compute);
    }
}

/// A lane that is in use; it goes back to the others.
#[derive(Debug)]
pub(super) struct LaneGuard {
    staging: Arc<Staging>,
    /// Bytes that the report has of it.
    taken_with: StagingReport,
    lane: Option<Lane>,
}

impl LaneGuard {
    /// Has the lane have its staging buffers, for chunks of at least `min` bytes and a transfer of `total`.
    pub fn stage(&mut self, bound: &Bound<'_>, min: u64, total: u64) -> Result<()> {
        let StagingParams { size, count } = self.staging.params;
        let count = if count == 0 { DEFAULT_COUNT } else { count };
        let wanted = if size == 0 { DEFAULT_SIZE } else { size };
        let largest = self.staging.largest_state;
        let mut size = wanted.min(largest.unwrap_or(0).max(total).max(1)).max(min);
        // Where nobody knows how large states are, buffers grow with what is moved.
        let enough = if largest.is_some() { min } else { size };
        if self.capacity() >= enough && !self.pinned.is_empty() {
            return Ok(());
        }
        loop {
            self.free_buffers(bound);
            match self.allocate_buffers(bound, size, count) {
                Err(Error::OutOfMemory { .. }) if size / 2 >= min.max(MIN_SIZE) => {
                    size /= 2;
                    log::info!(
                        "device {}: staging buffers of {size} bytes, for lack of memory",
                        bound.ordinal()
                    );
                }
                Err(error) => {
                    self.free_buffers(bound);
                    return Err(error);
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    fn allocate_buffers(&mut self, bound: &Bound<'_>, size: u64, count: usize) -> Result<()> {
        let device = Arc::clone(&self.device);
        for _ in 0..N_DEVICE {
            let memory = DeviceMemory::new(&device, size, "a staging buffer on the device")?;
            self.buffers.push(DeviceBuffer { memory, emptied: Handle::NULL, filled: Handle::NULL });
        }
        for _ in 0..count {
            let memory = PinnedMemory::new(&device, size)?;
            self.pinned.push(PinnedBuffer { memory, copied: Handle::NULL });
        }
        let Lane { buffers, pinned, .. } = &mut **self;
        let events = buffers.iter_mut().flat_map(|b| [&mut b.emptied, &mut b.filled]);
        for event in events.chain(pinned.iter_mut().map(|b| &mut b.copied)) {
            *event = new_event(bound)?;
        }
        Ok(())
    }

    fn free_buffers(&mut self, bound: &Bound<'_>) {
        for buffer in self.buffers.drain(..) {
            bound.destroy_event(buffer.emptied);
            bound.destroy_event(buffer.filled);
        }
        self.pinned.drain(..).for_each(|buffer| bound.destroy_event(buffer.copied));
    }
}

impl Deref for LaneGuard {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        self.lane.as_ref().expect("it is there until the drop")
    }
}

impl DerefMut for LaneGuard {
    fn deref_mut(&mut self) -> &mut Lane {
        self.lane.as_mut().expect("it is there until the drop")
    }
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        // An error left work behind. A lane that cannot even be waited for is given up.
        let device = Arc::clone(&lane.device);
        let is_lost = lane.is_busy && device.bind().and_then(|bound| lane.wait(&bound)).is_err();
        let mut idle = self.staging.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let n_idle = idle.iter().filter(|lane| lane.device.ordinal() == device.ordinal()).count();
        let is_kept = !is_lost && n_idle < MAX_IDLE;
        let (before, after) =
            (self.taken_with, if is_kept { lane.bytes() } else { StagingReport::default() });
        let mut report = self.staging.lock_report();
        report.device = report.device + after.device - before.device;
        report.pinned = report.pinned + after.pinned - before.pinned;
        drop(report);
        if is_kept {
            idle.push(lane);
        }
    }
}
