//! A batch of copies between planes and a blob: checked as a whole, cut into pieces, done by some threads.

#![allow(unsafe_code, reason = "threads write the planes of one batch side by side")]

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use super::file::{read_error, read_exact_at};
use super::host::How;
use super::kernels::Kernels;
use super::region::Rectangle;
use super::{CellMap, Plane, ProgressCallback, Region, Threads};
use crate::error::{Error, Result};

/// Bytes of a piece: few enough to lie in the cache between a file and a plane, enough to be worth a system call.
const PIECE: u64 = 512 << 10;

/// Bytes that are worth another thread: below, its start costs more than it brings.
const THREAD_MIN: u64 = 2 << 20;

/// Bytes of a batch from which on it goes past the cache: a smaller one is found there by who needs it next.
const STREAM_MIN: u64 = 4 << 20;

/// Bytes of a tensor in a blob, wherever they are.
#[derive(Clone, Copy, Debug)]
pub enum TensorBytes<'a> {
    /// In memory.
    Memory(&'a [u8]),
    /// In a file, from `offset` on; read when they are needed.
    File {
        /// The file.
        file: &'a File,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
}

/// One plane's part of a restore.
#[derive(Debug)]
pub struct Scatter<'a> {
    /// Where the cells go.
    pub plane: &'a mut Plane,
    /// Which cells of the blob go to which cells of the plane.
    pub map: &'a CellMap,
    /// Cells in the blob.
    pub n_src: u32,
    /// The whole region of the `n_src` cells, in blob order.
    pub src: TensorBytes<'a>,
}

/// Writes every region of a batch to its offset (bytes) in `out`.
///
/// # Errors
/// [`Error::BufferTooSmall`] if a region ends past `out`; nothing is written then. What the owner of a remote
/// tensor returns.
pub fn gather(batch: &[(u64, Region<'_>)], out: &mut [u8], threads: Threads) -> Result<()> {
    let size = out.len() as u64;
    let end = |(offset, region): &(u64, Region<'_>)| offset.saturating_add(region.bytes());
    let need = batch.iter().map(end).max().unwrap_or(0);
    if need > size {
        return Err(Error::BufferTooSmall { need, size });
    }
    if batch.is_empty() {
        return Ok(());
    }
    let in_order = batch.windows(2).all(|pair| end(&pair[0]) <= pair[1].0);
    if !in_order {
        return batch.iter().try_for_each(|(offset, region)| {
            let out = &mut out[index(*offset)..][..index(region.bytes())];
            gather(&[(0, region.clone())], out, threads)
        });
    }
    let work = Work::new(
        batch.iter().map(|(_, region)| region.bytes()).sum(),
        batch.iter().any(|(_, region)| region.plane.is_remote()),
        threads,
    );
    // One after another in `out`, the pieces are slices of it that lie apart.
    let (mut out, mut at) = (out, 0);
    let pieces = batch.iter().flat_map(|(offset, region)| {
        region.block.clone().split(PIECE).scan(*offset, move |next, block| {
            let start = *next;
            *next += block.bytes();
            Some((start, region, block))
        })
    });
    let pieces = pieces.map(|(offset, region, block)| {
        let (_, from_offset) = std::mem::take(&mut out).split_at_mut(index(offset - at));
        let (piece, rest) = from_offset.split_at_mut(index(block.bytes()));
        (out, at) = (rest, offset + block.bytes());
        (region, block, piece)
    });
    work.run(pieces, None, |(region, block, out), _| {
        region.plane.read(&region.map, &block, out, work.how)?;
        Ok(block.bytes())
    })
}

/// Writes the moved cells of every part into its plane, and no other byte.
///
/// # Errors
/// [`Error::InvalidArgument`] if `src` is not `n_src` cells, or a map leaves the blob or the plane; nothing is
/// written then. [`Error::Io`] if a file cannot be read, [`Error::Cancelled`], and what the owner of a remote tensor
/// returns: some cells are written then, and some not.
pub fn scatter(
    batch: &mut [Scatter<'_>],
    threads: Threads,
    progress: Option<&mut ProgressCallback>,
) -> Result<()> {
    for part in &*batch {
        part.plane.check_write(part.map, part.n_src, part.src.len())?;
    }
    let work = Work::new(
        batch.iter().map(|part| part.src.len()).sum(),
        batch.iter().any(|part| part.plane.is_remote()),
        threads,
    );
    let pieces = batch.iter().flat_map(|part| {
        Rectangle::new(part.plane.shape(), 0..part.n_src).split(PIECE).scan(0, move |next, block| {
            let start = *next;
            *next += block.bytes();
            Some((start, part, block))
        })
    });
    work.run(pieces, progress, |(start, part, block), buffer| {
        let src = part.src.piece(start, block.bytes(), buffer)?;
        // SAFETY: the planes are borrowed for writing by `batch`, and of all pieces only this one has cells of its
        // rectangle.
        unsafe { part.plane.write(part.map, &block, src, work.how)? };
        Ok(block.bytes())
    })
}

impl<'a> TensorBytes<'a> {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `len` bytes from `start` on, in `buffer` if they have to be read.
    fn piece<'b>(&self, start: u64, len: u64, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]>
    where
        'a: 'b,
    {
        match *self {
            Self::Memory(bytes) => Ok(&bytes[index(start)..][..index(len)]),
            Self::File { file, offset, .. } => {
                buffer
                    .try_reserve(index(len).saturating_sub(buffer.len()))
                    .map_err(|_| Error::OutOfMemory { what: "the file buffer", bytes: len })?;
                if buffer.len() < index(len) {
                    buffer.resize(index(len), 0);
                }
                let piece = &mut buffer[..index(len)];
                read_exact_at(file, piece, offset + start).map_err(read_error)?;
                Ok(piece)
            }
        }
    }
}

/// Offsets inside what is in memory, and sizes of pieces.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it lies in memory")
}

/// How a batch is done.
#[derive(Clone, Copy, Debug)]
struct Work {
    total: u64,
    threads: usize,
    how: How,
}

impl Work {
    /// The calls of a remote tensor's owner come from the thread that calls.
    fn new(total: u64, is_remote: bool, threads: Threads) -> Self {
        let worth = usize::try_from(total / THREAD_MIN).unwrap_or(usize::MAX);
        let threads = if is_remote || worth <= 1 { 1 } else { threads.count().min(worth) };
        Self { total, threads, how: How { kernels: Kernels::get(), streams: total >= STREAM_MIN } }
    }

    /// Does every piece, on as many threads as can be had; `each` returns its bytes. After an error no further piece is
    /// begun.
    fn run<T: Send>(
        &self,
        pieces: impl Iterator<Item = T> + Send,
        mut progress: Option<&mut ProgressCallback>,
        each: impl Fn(T, &mut Vec<u8>) -> Result<u64> + Sync,
    ) -> Result<()> {
        let pieces = Mutex::new(pieces);
        let failure = OnceLock::new();
        let done = AtomicU64::new(0);
        let step = |buffer: &mut Vec<u8>| {
            if failure.get().is_some() {
                return false;
            }
            let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(piece) = piece else { return false };
            match each(piece, buffer) {
                Ok(bytes) => drop(done.fetch_add(bytes, Ordering::Relaxed)),
                // Another one can have failed before: that is the one to tell.
                Err(error) => drop(failure.set(error)),
            }
            true
        };
        let mut steps_of_the_caller = || {
            let mut buffer = Vec::new();
            while step(&mut buffer) {
                let done = done.load(Ordering::Relaxed);
                // The end is told once, when every thread is there.
                if let Some(progress) = progress.as_deref_mut().filter(|_| done < self.total)
                    && let Err(error) = progress.report(done, self.total)
                {
                    drop(failure.set(error));
                }
            }
        };
        if self.threads == 1 {
            steps_of_the_caller();
        } else {
            thread::scope(|scope| {
                for _ in 1..self.threads {
                    let worker = || {
                        let mut buffer = Vec::new();
                        while step(&mut buffer) {}
                    };
                    if thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                        break;
                    }
                }
                steps_of_the_caller();
            });
        }
        match (failure.into_inner(), progress) {
            (Some(error), _) => Err(error),
            (None, Some(progress)) => progress.report(self.total, self.total),
            (None, None) => Ok(()),
        }
    }
}
