//! Saves in the background: a snapshot goes to memory or to a file while decoding goes on.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::snapshot_file;
use crate::context::Snapshot;
use crate::error::{Error, Result};
use crate::storage::{Progress, ProgressCallback};
use crate::types::Token;

/// What the thread of a job and its owner know of each other.
#[derive(Debug, Default)]
struct Shared {
    is_cancelled: AtomicBool,
    /// Set when the work has ended and nothing of the caller's is used any more.
    is_finished: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
}

/// Says that the work has ended, by a panic too.
struct SetOnDrop(Arc<Shared>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.is_finished.store(true, Ordering::Release);
    }
}

/// A save that runs on a thread of its own. Dropped, it is cancelled and waited for.
#[derive(Debug)]
pub struct Job<T> {
    shared: Arc<Shared>,
    /// `None` when somebody waits or has waited for it.
    thread: Mutex<Option<JoinHandle<Result<T>>>>,
}

impl<T: Send + 'static> Job<T> {
    /// `before`: bytes of `total` that are there before `work` reports its first; `work` counts from 0.
    pub(super) fn spawn(
        before: u64,
        total: u64,
        progress: Option<ProgressCallback>,
        work: impl FnOnce(ProgressCallback) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(Shared { total: AtomicU64::new(total), ..Shared::default() });
        let (mut theirs, ours) = (progress, Arc::clone(&shared));
        let report = ProgressCallback::new(move |Progress { done, total }| {
            let (done, total) = (before + done, before + total);
            ours.done.store(done, Ordering::Relaxed);
            ours.total.store(total, Ordering::Relaxed);
            if ours.is_cancelled.load(Ordering::Relaxed) {
                return ControlFlow::Break(());
            }
            match theirs.as_mut().map(|progress| progress.report(done, total)) {
                Some(Err(_)) => ControlFlow::Break(()),
                Some(Ok(())) | None => ControlFlow::Continue(()),
            }
        });
        let ended = SetOnDrop(Arc::clone(&shared));
        let spawned = thread::Builder::new().name("kvstate save".to_owned()).spawn(move || {
            let result = work(report);
            if result.is_ok() {
                // What is small is never reported.
                ended.0.done.store(ended.0.total.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            drop(ended);
            result
        });
        let thread = spawned.map_err(|source| Error::Io {
            op: "start a thread for",
            path: "a save".to_owned(),
            source,
        })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }
}

impl<T> Job<T> {
    /// Whether it has ended, well or not, whoever waits for it.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.shared.is_finished.load(Ordering::Acquire)
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Shared { done, total, .. } = &*self.shared;
        Progress { done: done.load(Ordering::Relaxed), total: total.load(Ordering::Relaxed) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<JoinHandle<Result<T>>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks it to end: [`Job::wait`] returns [`Error::Cancelled`], unless it was done before.
    pub fn cancel(&self) {
        self.shared.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits for its end. Others can ask and cancel meanwhile.
    ///
    /// # Errors
    /// Those of the save; [`Error::InvalidArgument`] the second time.
    pub fn wait(&self) -> Result<T> {
        let thread = self.lock().take().ok_or_else(|| Error::arg("job", "has been waited for"))?;
        thread.join().unwrap_or_else(|_| Err(Error::Internal("a save in the background panicked".to_owned())))
    }
}

impl<T> Drop for Job<T> {
    fn drop(&mut self) {
        self.cancel();
        // Waited for or not, nobody is left to be told.
        drop(self.wait());
    }
}

impl Snapshot {
    /// Writes the state into `dst`, as [`Snapshot::get_data`], on a thread of its own, which also calls `progress`. The job's
    /// result is `dst` with the state at its start.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`]; [`Error::Io`] if there is no thread to be had.
    pub fn get_data_in_background<B: AsMut<[u8]> + Send + 'static>(
        &self,
        mut dst: B,
        progress: Option<ProgressCallback>,
    ) -> Result<Job<B>> {
        let (need, size) = (self.size(), dst.as_mut().len() as u64);
        if need > size {
            return Err(Error::BufferTooSmall { need, size });
        }
        let snapshot = self.clone();
        let metadata = need - snapshot.state.tensors().bytes();
        Job::spawn(metadata, need, progress, move |mut progress| {
            snapshot.get_data(dst.as_mut(), Some(&mut progress))?;
            Ok(dst)
        })
    }

    /// Writes the state and a token list to a file, as [`crate::Context::state_seq_save_file`] or
    /// [`crate::Context::state_save_file`] would have when it was taken; returns the file's size. With `sync` it waits for the disk.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a partial state, which no file holds; [`Error::Io`], [`Error::Cancelled`],
    /// [`Error::Device`]; a file that was there is untouched then.
    pub fn save_file(
        &self,
        path: impl Into<PathBuf>,
        tokens: &[Token],
        sync: bool,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<u64> {
        snapshot_file(self, &path.into(), tokens, sync, progress)
    }

    /// As [`Snapshot::save_file`], on a thread of its own, which also calls `progress`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a partial state; [`Error::Io`] if there is no thread to be had.
    pub fn save_file_in_background(
        &self,
        path: impl Into<PathBuf>,
        tokens: &[Token],
        sync: bool,
        progress: Option<ProgressCallback>,
    ) -> Result<Job<u64>> {
        super::check_whole(self)?;
        let (snapshot, path, tokens) = (self.clone(), path.into(), tokens.to_vec());
        Job::spawn(0, self.size(), progress, move |mut progress| {
            snapshot_file(&snapshot, &path, &tokens, sync, Some(&mut progress))
        })
    }
}
