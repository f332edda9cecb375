//! What a caller says about transfers: on how many threads, through which buffers, behind which streams, and whether to go on.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};
use std::thread;

use super::cuda::{CallerStream, Device, Staging};
use crate::error::{Error, Result};

/// Threads that copy, the caller's included. What is too small for them takes fewer.
///
/// By default as many as the machine has cores, at most 4: more do not make memory faster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Threads(Option<NonZeroUsize>);

impl Threads {
    /// At most `n`; 0: the default.
    #[must_use]
    pub const fn new(n: usize) -> Self {
        Self(NonZeroUsize::new(n))
    }

    /// Threads to use at most.
    #[must_use]
    pub fn count(self) -> usize {
        // Asking the system reads files.
        static DEFAULT: LazyLock<usize> =
            LazyLock::new(|| thread::available_parallelism().map_or(1, NonZeroUsize::get).min(4));
        self.0.map_or_else(|| *DEFAULT, NonZeroUsize::get)
    }

    /// Threads for so many bytes: below 2 MiB for each, the start of another costs more than it brings.
    pub(crate) fn worth(self, bytes: u64) -> usize {
        const THREAD_MIN: u64 = 2 << 20;
        let worth = usize::try_from(bytes / THREAD_MIN).unwrap_or(usize::MAX);
        // The machine is not asked where one is enough.
        if worth <= 1 { 1 } else { self.count().min(worth) }
    }
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are moved.
    pub done: u64,
    /// Bytes to move.
    pub total: u64,
}

/// Told how far a transfer is, on the thread of the call: `done` never decreases, and is `total` once, at the end.
pub struct ProgressCallback(Box<dyn FnMut(Progress) -> ControlFlow<()> + Send>);

impl ProgressCallback {
    /// Calls `report`, which cancels the transfer with [`ControlFlow::Break`].
    pub fn new(report: impl FnMut(Progress) -> ControlFlow<()> + Send + 'static) -> Self {
        Self(Box::new(report))
    }

    /// Reports.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub(crate) fn report(&mut self, done: u64, total: u64) -> Result<()> {
        // Nobody has to divide by it.
        if total == 0 {
            return Ok(());
        }
        match (self.0)(Progress { done, total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Cancelled { done, total }),
        }
    }
}

impl fmt::Debug for ProgressCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProgressCallback")
    }
}

/// How tensor bytes are moved.
#[derive(Clone, Debug, Default)]
pub struct Transfer {
    /// Threads that copy on the host.
    pub threads: Threads,
    /// Buffers between host and devices.
    pub staging: Arc<Staging>,
    /// The caller's streams, at most one on each device.
    streams: Vec<CallerStream>,
}

impl Transfer {
    /// Copies on this many threads, through these buffers.
    #[must_use]
    pub fn new(threads: Threads, staging: Staging) -> Self {
        Self { threads, staging: Arc::new(staging), streams: Vec::new() }
    }

    /// Through buffers that all who have none of their own share, one after another or side by side; they stay until
    /// [`Staging::free`].
    #[must_use]
    pub fn shared() -> Self {
        static SHARED: LazyLock<Arc<Staging>> = LazyLock::new(Arc::default);
        Self { staging: Arc::clone(&SHARED), ..Self::default() }
    }

    /// Copies on this many threads, through buffers of the default size.
    #[must_use]
    pub fn with_threads(threads: Threads) -> Self {
        Self { threads, ..Self::default() }
    }

    /// Names the stream on which the caller's work on its device runs from now on.
    pub fn set_stream(&mut self, stream: CallerStream) {
        self.clear_stream(stream.ordinal());
        self.streams.push(stream);
    }

    /// From now on no stream is named on this device.
    pub fn clear_stream(&mut self, ordinal: i32) {
        self.streams.retain(|stream| stream.ordinal() != ordinal);
    }

    /// Whether any stream is named.
    pub(crate) fn has_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Checks that work can be ordered behind the caller's streams of `devices`, before anything is changed or written.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], [`Error::Device`].
    pub(crate) fn check_streams(&self, devices: impl IntoIterator<Item = i32>) -> Result<()> {
        if self.streams.is_empty() {
            return Ok(());
        }
        let devices: BTreeSet<i32> = devices.into_iter().collect();
        let mut streams = self.streams.iter().filter(|stream| devices.contains(&stream.ordinal()));
        streams.try_for_each(CallerStream::check_now)
    }

    /// The same without the caller's streams: for memory that the caller's work does not touch.
    #[must_use]
    pub(crate) fn detached(&self) -> Self {
        Self { streams: Vec::new(), ..self.clone() }
    }

    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "devices need it"))]
    pub(super) fn stream_of(&self, device: &Device) -> Option<&CallerStream> {
        self.streams.iter().find(|stream| stream.ordinal() == device.ordinal())
    }
}
