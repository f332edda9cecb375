//! Work that is cut into pieces, which some threads do.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use super::ProgressCallback;
use crate::error::Result;

/// How far the work is, told to the caller.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    callback: Option<&'a mut ProgressCallback>,
    done: u64,
    /// Bytes in all.
    pub total: u64,
}

impl<'a> Report<'a> {
    pub fn new(callback: Option<&'a mut ProgressCallback>, total: u64) -> Self {
        Self { callback, done: 0, total }
    }

    /// So many more bytes are done. The end is told once, by [`Report::finish`].
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn add(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        self.tell(self.done)
    }

    fn tell(&mut self, done: u64) -> Result<()> {
        match self.callback.as_deref_mut().filter(|_| done < self.total) {
            Some(callback) => callback.report(done, self.total),
            None => Ok(()),
        }
    }

    /// All is done.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn finish(self) -> Result<()> {
        self.callback.map_or(Ok(()), |callback| callback.report(self.total, self.total))
    }
}

/// Does every piece, on as many threads as can be had, each with buffers of its own; `each` returns its bytes. After an
/// error no further piece is begun.
///
/// # Errors
/// The first of `each`; [`Error::Cancelled`](crate::Error::Cancelled).
pub(crate) fn for_each_piece<T: Send, B: Default>(
    n_threads: usize,
    pieces: impl Iterator<Item = T> + Send,
    mut report: Option<&mut Report<'_>>,
    each: impl Fn(T, &mut B) -> Result<u64> + Sync,
) -> Result<()> {
    let pieces = Mutex::new(pieces);
    let failure = OnceLock::new();
    let done = AtomicU64::new(0);
    let before = report.as_ref().map_or(0, |report| report.done);
    let step = |buffers: &mut B| {
        if failure.get().is_some() {
            return false;
        }
        let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(piece) = piece else { return false };
        match each(piece, buffers) {
            Ok(bytes) => drop(done.fetch_add(bytes, Ordering::Relaxed)),
            // Another one can have failed before: that is the one to tell.
            Err(error) => drop(failure.set(error)),
        }
        true
    };
    let mut steps_of_the_caller = || {
        let mut buffers = B::default();
        while step(&mut buffers) {
            let done = before + done.load(Ordering::Relaxed);
            if let Some(Err(error)) = report.as_deref_mut().map(|report| report.tell(done)) {
                drop(failure.set(error));
            }
        }
    };
    if n_threads == 1 {
        steps_of_the_caller();
    } else {
        thread::scope(|scope| {
            for _ in 1..n_threads {
                let worker = || {
                    let mut buffers = B::default();
                    while step(&mut buffers) {}
                };
                if thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                    break;
                }
            }
            steps_of_the_caller();
        });
    }
    if let Some(report) = report {
        report.done = before + done.into_inner();
    }
    failure.into_inner().map_or(Ok(()), Err)
}
