//! The sink of a save: a recorded state goes to a file at the speed of the page cache.
//!
//! Bytes are gathered into a buffer that stays in the cache and written in whole chunks; what lies in memory as it does
//! in the state is written from where it is.

use std::io::Write;
use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use bytemuck::{Pod, Zeroable};

use super::sink::{RecordSink, Sink};
use crate::error::{Error, Result};
use crate::storage::{self, ProgressCallback, Region, Threads};

/// Bytes of a write, and what the offset of every write is a multiple of: enough to be worth a system call, few enough
/// to be in the second-level cache still.
const CHUNK: usize = 512 << 10;

/// Bytes gathered at a time. A buffer has room for as many behind its chunk: they begin the next one.
const PIECE: usize = 64 << 10;

/// Bytes of a piece that is written from where it lies: of a smaller one too much is copied to keep to whole chunks.
const BORROW_MIN: u64 = 2 * CHUNK as u64;

/// Bytes to write from where they lie between two reports.
const BORROW_MAX: usize = 2 * CHUNK;

/// Bytes to gather that are worth a thread that writes meanwhile.
const THREAD_MIN: u64 = 4 << 20;

/// Buffers beside a thread that writes: one is filled, one is written, one waits.
const BUFFERS: usize = 3;

/// Writes a recorded state to `out`, which need not buffer. With more than one thread another one writes: whoever owns
/// a tensor is called from this one.
///
/// # Errors
/// The first [`Error::Io`], without a path; [`Error::Cancelled`], what the owner of a tensor returns.
pub fn write_file<W: Write + Send>(
    record: &RecordSink<'_>,
    out: &mut W,
    threads: Threads,
    mut progress: Option<&mut ProgressCallback>,
) -> Result<()> {
    let total = record.bytes();
    let mut written = None;
    if threads.count() > 1 && record.scattered_bytes() >= THREAD_MIN {
        written = write_beside(record, out, progress.as_deref_mut());
    }
    written.unwrap_or_else(|| {
        let done = AtomicU64::new(0);
        let output = Output::Here(Writer { out, done: &done });
        FileSink::new(output, &done, total, progress.as_deref_mut())?.write_all(record)
    })?;
    progress.map_or(Ok(()), |progress| progress.report(total, total))
}

/// As [`write_file`] on two threads; `None` if the second cannot be had.
fn write_beside<'a, W: Write + Send>(
    record: &RecordSink<'a>,
    out: &mut W,
    progress: Option<&mut ProgressCallback>,
) -> Option<Result<()>> {
    let done = &AtomicU64::new(0);
    thread::scope(|scope| {
        let (chunks, queue) = mpsc::sync_channel::<Chunk<'a>>(1);
        let (spare, spares) = mpsc::channel();
        let give_back = spare.clone();
        let writer = move || {
            let mut writer = Writer { out, done };
            for chunk in queue {
                writer.write(chunk.bytes())?;
                if let Chunk::Filled(buffer, _) = chunk {
                    // Nobody waits for it after the last chunk.
                    drop(give_back.send(buffer));
                }
            }
            Ok(())
        };
        let writer = thread::Builder::new().spawn_scoped(scope, writer).ok()?;
        let filled = (1..BUFFERS)
            .try_for_each(|_| {
                drop(spare.send(Buffer::new()?));
                Ok(())
            })
            .and_then(|()| {
                drop(spare);
                let output = Output::Beside { chunks, spares };
                FileSink::<W>::new(output, done, record.bytes(), progress)?.write_all(record)
            });
        // If it failed, that was first: this thread has only missed it.
        let written: Result<()> = writer.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        Some(written.and(filled))
    })
}

/// A page: the kernel copies fastest from where pages begin.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Room for a chunk and the piece behind it.
struct Buffer(Vec<Page>);

impl Buffer {
    fn new() -> Result<Self> {
        let mut buffer = Self(Vec::new());
        buffer.reserve(CHUNK + PIECE)?;
        Ok(buffer)
    }

    /// Makes it longer if it does not have `n` bytes: for a single element that is larger than a piece.
    fn reserve(&mut self, n: usize) -> Result<()> {
        let n_pages = n.div_ceil(size_of::<Page>());
        if n_pages > self.0.len() {
            let out_of_memory = |_| Error::OutOfMemory { what: "the file buffer", bytes: n as u64 };
            self.0.try_reserve_exact(n_pages - self.0.len()).map_err(out_of_memory)?;
            self.0.resize(n_pages, Page::zeroed());
        }
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// What is written at once.
enum Chunk<'a> {
    /// So many bytes of a buffer.
    Filled(Buffer, usize),
    /// Bytes of the cache.
    Borrowed(&'a [u8]),
}

impl Chunk<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Filled(buffer, len) => &buffer.bytes()[..*len],
            Self::Borrowed(bytes) => bytes,
        }
    }
}

/// Writes, and counts what is written.
struct Writer<'w, W> {
    out: &'w mut W,
    done: &'w AtomicU64,
}

impl<W: Write> Writer<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // The path is added by the session, which knows it.
        let failed = |source| Error::Io { op: "write", path: String::new(), source };
        self.out.write_all(bytes).map_err(failed)?;
        self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// Who writes.
enum Output<'w, 'a, W> {
    Here(Writer<'w, W>),
    /// A thread: chunks go there, and their buffers come back.
    Beside {
        chunks: SyncSender<Chunk<'a>>,
        spares: Receiver<Buffer>,
    },
}

/// Fills chunks.
struct FileSink<'w, 'a, W> {
    output: Output<'w, 'a, W>,
    buffer: Buffer,
    /// Bytes in the buffer, less than a chunk between two calls.
    len: usize,
    done: &'w AtomicU64,
    total: u64,
    progress: Option<&'w mut ProgressCallback>,
}

impl<'w, 'a, W: Write> FileSink<'w, 'a, W> {
    fn new(
        output: Output<'w, 'a, W>,
        done: &'w AtomicU64,
        total: u64,
        progress: Option<&'w mut ProgressCallback>,
    ) -> Result<Self> {
        Ok(Self { output, buffer: Buffer::new()?, len: 0, done, total, progress })
    }

    fn write_all(mut self, record: &RecordSink<'a>) -> Result<()> {
        record.replay(&mut self)?;
        if self.len > 0 { self.send(self.len) } else { Ok(()) }
    }

    /// Adds `n` bytes, which `fill` writes.
    fn push(&mut self, n: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.buffer.reserve(self.len.saturating_add(n))?;
        fill(&mut self.buffer.bytes_mut()[self.len..][..n])?;
        self.len += n;
        if self.len < CHUNK { Ok(()) } else { self.send(self.len - self.len % CHUNK) }
    }

    /// Writes the first `n` bytes of the buffer; the others begin the next chunk.
    fn send(&mut self, n: usize) -> Result<()> {
        let rest = n..self.len;
        self.len = rest.len();
        match &mut self.output {
            Output::Here(writer) => {
                writer.write(&self.buffer.bytes()[..n])?;
                self.buffer.bytes_mut().copy_within(rest, 0);
            }
            Output::Beside { chunks, spares } => {
                let mut next = spares.recv().map_err(|_| writer_stopped())?;
                next.bytes_mut()[..rest.len()].copy_from_slice(&self.buffer.bytes()[rest]);
                let filled = std::mem::replace(&mut self.buffer, next);
                chunks.send(Chunk::Filled(filled, n)).map_err(|_| writer_stopped())?;
            }
        }
        self.report()
    }

    /// Writes whole chunks of the cache; the buffer is empty.
    fn send_borrowed(&mut self, bytes: &'a [u8]) -> Result<()> {
        match &mut self.output {
            Output::Here(writer) => writer.write(bytes)?,
            Output::Beside { chunks, .. } => {
                chunks.send(Chunk::Borrowed(bytes)).map_err(|_| writer_stopped())?;
            }
        }
        self.report()
    }

    /// Reports what is written, but not the end, which is not reached before the last chunk is known to be.
    fn report(&mut self) -> Result<()> {
        let done = self.done.load(Ordering::Relaxed);
        match &mut self.progress {
            Some(progress) if done < self.total => progress.report(done, self.total),
            _ => Ok(()),
        }
    }
}

/// Never told: the writer has an error of its own.
fn writer_stopped() -> Error {
    Error::Internal("the thread that writes a file has ended".into())
}

impl<'a, W: Write> Sink<'a> for FileSink<'_, 'a, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        bytes.chunks(PIECE).try_for_each(|piece| {
            self.push(piece.len(), |out| {
                out.copy_from_slice(piece);
                Ok(())
            })
        })
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        if region.bytes() >= BORROW_MIN
            && let Some(bytes) = region.as_contiguous()
        {
            let missing = if self.len > 0 { CHUNK - self.len } else { 0 };
            let (head, bytes) = bytes.split_at(missing);
            self.write(head)?;
            let (whole, tail) = bytes.split_at(bytes.len() - bytes.len() % CHUNK);
            whole.chunks(BORROW_MAX).try_for_each(|bytes| self.send_borrowed(bytes))?;
            return self.write(tail);
        }
        region.split(PIECE as u64).try_for_each(|piece| {
            let n = usize::try_from(piece.bytes()).unwrap_or(usize::MAX);
            self.push(n, |out| storage::gather(&[(0, piece)], out, Threads::new(1)))
        })
    }
}
