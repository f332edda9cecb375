//! The sink of a save: a recorded state goes to a file at the speed of the page cache.
//!
//! Bytes are gathered into a buffer that stays in the cache and written in whole chunks; what lies in memory as it does
//! in the state is written from where it is.

use std::io::{self, IoSlice, Write};

use bytemuck::{Pod, Zeroable};

use super::sink::{RecordSink, Sink};
use crate::error::{Error, Result};
use crate::format::crc32c_append;
use crate::storage::{self, ProgressCallback, Region, RegionDrain, Threads, Transfer};

/// Bytes of a write, and what the offset of every write is a multiple of: enough to be worth a system call, few enough
/// to be in the second-level cache still.
const CHUNK: usize = 512 << 10;

/// Bytes gathered at a time. A buffer has room for as many behind its chunk: they begin the next one.
const PIECE: usize = 64 << 10;

/// Bytes of a piece that is written from where it lies: of a smaller one too much is copied to keep to whole chunks.
const BORROW_MIN: u64 = 2 * CHUNK as u64;

/// Bytes to write from where they lie between two reports.
const BORROW_MAX: usize = 2 * CHUNK;

/// Writes a recorded state to `out`, which need not buffer.
///
/// # Errors
/// The first [`Error::Io`], without a path; [`Error::Cancelled`], what the owner of a tensor returns.
pub fn write_file(
    record: &RecordSink<'_>,
    out: &mut impl Write,
    transfer: &Transfer,
    progress: Option<&mut ProgressCallback>,
) -> Result<()> {
    let mut writer = FileWriter::new(out, record.bytes(), progress)?;
    writer.record(record, transfer)?;
    writer.finish()
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

/// Bytes and their checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum {
    /// Their number.
    pub len: u64,
    /// Their checksum.
    pub crc32c: u32,
}

impl Checksum {
    fn add(&mut self, bytes: &[u8]) {
        self.len += bytes.len() as u64;
        self.crc32c = crc32c_append(self.crc32c, bytes);
    }
}

/// Fills chunks and writes them.
pub struct FileWriter<'w, W> {
    out: &'w mut W,
    buffer: Buffer,
    /// Bytes in the buffer, less than a chunk between two calls.
    len: usize,
    /// What has been reported of `total`.
    written: u64,
    total: u64,
    progress: Option<&'w mut ProgressCallback>,
    /// Regions on devices of the record that is being written.
    drain: RegionDrain,
    /// How regions in host memory are copied: a buffer at a time.
    transfer: Transfer,
    /// Of what came since the last part ended: computed when the bytes are on their way, and in the cache.
    checksum: Option<Checksum>,
}

impl<'w, W: Write> FileWriter<'w, W> {
    /// Writes to `out`, which need not buffer, `total` bytes in all.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(out: &'w mut W, total: u64, progress: Option<&'w mut ProgressCallback>) -> Result<Self> {
        Ok(Self {
            out,
            buffer: Buffer::new()?,
            len: 0,
            written: 0,
            total,
            progress,
            drain: RegionDrain::default(),
            transfer: Transfer::with_threads(Threads::new(1)),
            checksum: None,
        })
    }

    /// The same, with a checksum for each part.
    #[must_use]
    pub fn with_checksums(self) -> Self {
        Self { checksum: Some(Checksum::default()), ..self }
    }

    /// The same, for a file of several: `progress` is told of the `bytes` of those before it too.
    #[must_use]
    pub fn reporting_from(self, bytes: u64) -> Self {
        Self { written: bytes, ..self }
    }

    /// Writes a recorded state.
    ///
    /// # Errors
    /// As [`write_file`].
    pub fn record(&mut self, record: &RecordSink<'_>, transfer: &Transfer) -> Result<()> {
        self.drain = RegionDrain::new(&record.regions(), transfer)?;
        record.replay(self)
    }

    /// Writes bytes, many of them from where they lie.
    ///
    /// # Errors
    /// As [`write_file`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if (bytes.len() as u64) < BORROW_MIN {
            return self.write(bytes);
        }
        let missing = if self.len > 0 { CHUNK - self.len } else { 0 };
        let (head, bytes) = bytes.split_at(missing);
        self.write(head)?;
        let (whole, tail) = bytes.split_at(bytes.len() - bytes.len() % CHUNK);
        // What was written is still in the second-level cache when its checksum is computed.
        let step = if self.checksum.is_some() { CHUNK } else { BORROW_MAX };
        whole.chunks(step).try_for_each(|bytes| self.send_borrowed(bytes))?;
        self.write(tail)
    }

    /// Ends a part; returns its checksum, if checksums are wanted.
    pub fn end_part(&mut self) -> Option<Checksum> {
        self.checksum.as_mut().map(std::mem::take)
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// As [`write_file`].
    pub fn finish(mut self) -> Result<()> {
        if self.len > 0 { self.send(self.len) } else { Ok(()) }
    }

    /// Adds `n` bytes, which `fill` writes.
    fn push(&mut self, n: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.buffer.reserve(self.len.saturating_add(n))?;
        let bytes = &mut self.buffer.bytes_mut()[self.len..][..n];
        fill(bytes)?;
        if let Some(checksum) = &mut self.checksum {
            checksum.add(bytes);
        }
        self.len += n;
        if self.len < CHUNK { Ok(()) } else { self.send(self.len - self.len % CHUNK) }
    }

    /// Writes the first `n` bytes of the buffer; the others begin the next chunk.
    fn send(&mut self, n: usize) -> Result<()> {
        self.out.write_all(&self.buffer.bytes()[..n]).map_err(write_error)?;
        self.buffer.bytes_mut().copy_within(n..self.len, 0);
        self.len -= n;
        self.report(n)
    }

    /// Writes whole chunks from where they lie; the buffer is empty.
    fn send_borrowed(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(write_error)?;
        // Not before: the write waits less for memory than a checksum does, and leaves the bytes in the cache.
        if let Some(checksum) = &mut self.checksum {
            checksum.add(bytes);
        }
        self.report(bytes.len())
    }

    fn report(&mut self, n: usize) -> Result<()> {
        self.written += n as u64;
        match &mut self.progress {
            Some(progress) => progress.report(self.written, self.total),
            None => Ok(()),
        }
    }
}

/// Writes all of several slices with as few calls as it takes.
fn write_all(out: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match out.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut slices, n),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The path is added by the session, which knows it.
fn write_error(source: std::io::Error) -> Error {
    Error::Io { op: "write", path: String::new(), source }
}

impl<'a, W: Write> Sink<'a> for FileWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        bytes.chunks(PIECE).try_for_each(|piece| {
            self.push(piece.len(), |out| {
                out.copy_from_slice(piece);
                Ok(())
            })
        })
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        if region.device().is_some() {
            let Self { out, buffer, len, written, total, progress, drain, checksum, .. } = self;
            return drain.region(&region, |bytes| {
                if let Some(checksum) = checksum {
                    checksum.add(bytes);
                }
                // From where the device has put them, behind what is in the buffer.
                let mut slices = [IoSlice::new(&buffer.bytes()[..*len]), IoSlice::new(bytes)];
                write_all(*out, &mut slices).map_err(write_error)?;
                *written += (*len + bytes.len()) as u64;
                *len = 0;
                progress.as_deref_mut().map_or(Ok(()), |progress| progress.report(*written, *total))
            });
        }
        if region.bytes() >= BORROW_MIN
            && let Some(bytes) = region.as_contiguous()
        {
            return self.bytes(bytes);
        }
        let transfer = self.transfer.clone();
        region.split(PIECE as u64).try_for_each(|piece| {
            let n = usize::try_from(piece.bytes()).unwrap_or(usize::MAX);
            self.push(n, |out| storage::gather(&[(0, piece)], out, &transfer, None))
        })
    }
}
