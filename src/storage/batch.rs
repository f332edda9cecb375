//! A batch of copies between planes and a blob: checked as a whole, cut into pieces, done by some threads.

#![allow(unsafe_code, reason = "threads write the planes of one batch side by side")]

use std::sync::Arc;

use super::convert::{Buffers, Conversion};
use super::cuda::{self, DevicePlane, LocalPart, Part};
use super::host::How;
use super::kernels::Kernels;
use super::pieces::{Report, for_each_piece};
use super::region::Rectangle;
use super::wanted::WantedBatch;
use super::{CellMap, Plane, ProgressCallback, Region, StateTensor, TensorBytes, Threads, Transfer};
use crate::error::{Error, Result};

/// Bytes of a piece: few enough to lie in the cache between a file and a plane, enough to be worth a system call.
const PIECE: u64 = 512 << 10;

/// Bytes of a converted piece on its way to a device, or to calls of a tensor's owner: each way there costs more.
const STAGED_PIECE: u64 = 32 << 20;

/// Bytes of a batch from which on it goes past the cache: a smaller one is found there by who needs it next.
const STREAM_MIN: u64 = 4 << 20;

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
    pub src: StateTensor<'a>,
}

/// Writes every region of a batch to its offset (bytes) in `out`.
///
/// # Errors
/// [`Error::BufferTooSmall`] if a region ends past `out`; nothing is written then. What the owner of a remote
/// tensor returns; [`Error::Device`], [`Error::Cancelled`].
pub fn gather(
    batch: &[(u64, Region<'_>)],
    out: &mut [u8],
    transfer: &Transfer,
    progress: Option<&mut ProgressCallback>,
) -> Result<()> {
    let size = out.len() as u64;
    let end = |(offset, region): &(u64, Region<'_>)| offset.saturating_add(region.bytes());
    let need = batch.iter().map(end).max().unwrap_or(0);
    if need > size {
        return Err(Error::BufferTooSmall { need, size });
    }
    if batch.is_empty() {
        return Ok(());
    }
    let mut report = Report::new(progress, batch.iter().map(|(_, region)| region.bytes()).sum());
    let in_order = batch.windows(2).all(|pair| end(&pair[0]) <= pair[1].0);
    if !in_order {
        batch.iter().try_for_each(|(offset, region)| {
            let out = &mut out[index(*offset)..][..index(region.bytes())];
            gather_each(vec![(region, out)], transfer, &mut report)
        })?;
        return report.finish();
    }
    // One after another in `out`, the regions are slices of it that lie apart.
    let (mut out, mut at) = (out, 0);
    let parts = batch.iter().map(|(offset, region)| {
        let (_, from_offset) = std::mem::take(&mut out).split_at_mut(index(offset - at));
        let (part, rest) = from_offset.split_at_mut(index(region.bytes()));
        (out, at) = (rest, offset + region.bytes());
        (region, part)
    });
    gather_each(parts.collect(), transfer, &mut report)?;
    report.finish()
}

/// Writes every region to its bytes.
fn gather_each(
    parts: Vec<(&Region<'_>, &mut [u8])>,
    transfer: &Transfer,
    report: &mut Report<'_>,
) -> Result<()> {
    let (on_host, on_device): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|(region, _)| region.plane.on_device().is_none());
    for group in by_device(on_device, |(region, _)| region.device()) {
        let (regions, outs): (Vec<_>, Vec<_>) = group.into_iter().unzip();
        let parts: Vec<_> = regions.iter().filter_map(|region| region.device_part()).collect();
        cuda::gather(&parts, outs, transfer, report)?;
    }
    let work = Work::new(
        on_host.iter().map(|(region, _)| region.bytes()).sum(),
        on_host.iter().any(|(region, _)| region.plane.is_remote()),
        transfer.threads,
    );
    let pieces = on_host.into_iter().flat_map(|(region, out)| {
        region.block.clone().split(PIECE).scan(out, move |rest, block| {
            let (piece, behind) = std::mem::take(rest).split_at_mut(index(block.bytes()));
            *rest = behind;
            Some((region, block, piece))
        })
    });
    for_each_piece(work.threads, pieces, Some(report), |(region, block, out), (): &mut ()| {
        region.plane.read(&region.map, &block, out, work.how)?;
        Ok(block.bytes())
    })
}

/// A copy of every region, as a plane that has just its cells: in host memory, or on the device where the region is. The caller's
/// streams wait for it; nobody else does.
///
/// # Errors
/// [`Error::OutOfMemory`], and as [`gather`].
pub fn copy_regions(regions: &[Region<'_>], transfer: &Transfer) -> Result<Vec<Plane>> {
    let mut copies: Vec<Option<Plane>> = regions.iter().map(|_| None).collect();
    let (on_host, on_device): (Vec<_>, Vec<_>) =
        (0..regions.len()).partition(|&i| regions[i].plane.on_device().is_none());
    let shapes = |of: &[usize]| -> Vec<_> { of.iter().map(|&i| regions[i].dense_shape()).collect() };
    for group in by_device(on_device, |&i| regions[i].device()) {
        let Some(device) = group.first().and_then(|&i| regions[i].plane.on_device()) else { continue };
        let allocate = || DevicePlane::allocate_copies(&device.device, &shapes(&group));
        let planes = match allocate() {
            // Buffers that nobody uses may be what is missing.
            Err(Error::OutOfMemory { .. }) => {
                transfer.staging.free();
                allocate()?
            }
            planes => planes?,
        };
        let parts: Vec<_> = group
            .iter()
            .zip(&planes)
            .filter_map(|(&i, blob)| Some(LocalPart { part: regions[i].device_part()?, blob }))
            .collect();
        cuda::gather_local(&parts, transfer)?;
        for ((&i, plane), (shape, kv_size)) in group.iter().zip(planes).zip(shapes(&group)) {
            copies[i] = Some(Plane::of_device(plane, kv_size, shape));
        }
    }
    let mut planes = Plane::allocate_copies(&shapes(&on_host))?;
    let parts =
        on_host.iter().zip(&mut planes).filter_map(|(&i, plane)| Some((&regions[i], plane.as_bytes_mut()?)));
    gather_each(parts.collect(), transfer, &mut Report::new(None, 0))?;
    on_host.into_iter().zip(planes).for_each(|(i, plane)| copies[i] = Some(plane));
    Ok(copies.into_iter().flatten().collect())
}

/// A part of a [`scatter`] that is planned.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    /// The plane that it will write.
    pub plane: &'a Plane,
    /// As in [`Scatter`].
    pub map: &'a CellMap,
    /// As in [`Scatter`].
    pub n_src: u32,
    /// As in [`Scatter`].
    pub src: StateTensor<'a>,
}

impl Scatter<'_> {
    fn check(&self) -> Result<()> {
        self.src.check(self.plane, self.n_src)?;
        self.plane.check_write(self.map, self.n_src)
    }

    /// It, planned.
    #[must_use]
    pub fn placed(&self) -> Placed<'_> {
        Placed { plane: self.plane, map: self.map, n_src: self.n_src, src: self.src }
    }
}

/// What a [`scatter`] needs and had before it began: bytes of one device that go to another, or to the host.
#[derive(Debug)]
pub struct Fetched(Vec<Option<Vec<u8>>>);

impl Fetched {
    fn new(batch: &[Scatter<'_>], transfer: &Transfer) -> Result<Self> {
        let fetch = |part: &Scatter<'_>| match part.src.bytes {
            TensorBytes::Copies { copies, offset, len } if part.src.beside(part.plane).is_none() => {
                copies.to_host(offset, len, transfer).map(Some)
            }
            _ => Ok(None),
        };
        batch.iter().map(fetch).collect::<Result<_>>().map(Self)
    }
}

/// Sees to it that what a [`scatter`] will need of devices can be had: buffers, and streams that can be waited for.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::Device`], [`Error::StreamCapturing`].
pub fn reserve(batch: &[Placed<'_>], transfer: &Transfer) -> Result<()> {
    if batch.iter().all(|part| part.plane.on_device().is_none()) {
        return Ok(());
    }
    let wanted = WantedBatch::new(batch.iter().copied())?;
    let narrowed = wanted.narrow(batch.iter().copied()).filter(|part| part.map.n_cells() > 0);
    let on_device: Vec<_> = narrowed.filter(|part| part.plane.on_device().is_some()).collect();
    for group in by_device(on_device, |part| part.plane.device()) {
        let (mut parts, mut staged) = (Vec::new(), Vec::new());
        for part in &group {
            let Some(plane) = part.plane.on_device() else { continue };
            let block = Rectangle::new(part.plane.shape(), 0..part.n_src);
            parts.push(Part { plane, map: part.map, block });
            if part.src.beside(part.plane).is_none() {
                staged.extend(parts.last().cloned());
            }
        }
        cuda::prepare(&parts, &staged, transfer)?;
    }
    Ok(())
}

/// As [`reserve`], and fetches what lies on other devices, for [`Fetched::scatter`] of the same batch.
///
/// # Errors
/// Those of [`reserve`].
pub fn prepare(batch: &[Scatter<'_>], transfer: &Transfer) -> Result<Fetched> {
    let placed: Vec<_> = batch.iter().map(Scatter::placed).collect();
    reserve(&placed, transfer)?;
    Fetched::new(batch, transfer)
}

/// Writes the moved cells of every part into its plane, and no other byte.
///
/// # Errors
/// [`Error::InvalidArgument`] if `src` is not `n_src` cells, or a map leaves the blob or the plane; nothing is
/// written then. [`Error::Io`] if a file cannot be read, [`Error::Cancelled`], [`Error::Device`], and what the owner of a
/// remote tensor returns: some cells are written then, and some not.
pub fn scatter(
    batch: &mut [Scatter<'_>],
    transfer: &Transfer,
    progress: Option<&mut ProgressCallback>,
) -> Result<()> {
    for part in &*batch {
        part.check()?;
    }
    Fetched::new(batch, transfer)?.scatter(batch, transfer, progress)
}

impl Fetched {
    /// As [`scatter`], of the batch that was prepared.
    ///
    /// # Errors
    /// Those of [`scatter`].
    pub fn scatter(
        self,
        batch: &mut [Scatter<'_>],
        transfer: &Transfer,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<()> {
        for part in &*batch {
            part.check()?;
        }
        let wanted = WantedBatch::new(batch.iter().map(Scatter::placed))?;
        let narrowed: Vec<_> = wanted.narrow(batch.iter().map(Scatter::placed)).collect();
        let mut report = Report::new(progress, narrowed.iter().map(|part| part.src.bytes.len()).sum());
        // What lies on a device goes to a plane there by itself.
        let beside: Vec<_> = batch.iter().map(|part| part.src.beside(part.plane)).collect();
        let fetched = self.0;
        let parts = narrowed.iter().zip(&fetched).zip(&beside).map(|((part, fetched), beside)| {
            let StateTensor { bytes, conversion } = part.src;
            let src = fetched.as_deref().map_or(bytes, TensorBytes::Memory);
            let beside = beside.as_ref();
            Source { plane: part.plane, map: part.map, n_src: part.n_src, src, conversion, beside }
        });
        let parts = parts.filter(|part| part.map.n_cells() > 0);
        let (converted, parts): (Vec<_>, Vec<_>) = parts.partition(|part| part.conversion.is_some());
        scatter_converted(&converted, transfer, &mut report)?;
        let parts = parts.into_iter();
        let (on_host, on_device): (Vec<_>, Vec<_>) = parts.partition(|part| part.plane.on_device().is_none());
        for group in by_device(on_device, |part| part.plane.device()) {
            let (mut parts, mut srcs, mut local, mut local_bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
            for Source { plane, map, n_src, src, beside, .. } in group {
                let Some(on_device) = plane.on_device() else { continue };
                let part = Part { plane: on_device, map, block: Rectangle::new(plane.shape(), 0..n_src) };
                if let Some(blob) = beside {
                    local_bytes += src.len();
                    local.push(LocalPart { part, blob });
                } else {
                    parts.push(part);
                    srcs.push(src);
                }
            }
            cuda::scatter_local(&local, transfer)?;
            report.add(local_bytes)?;
            cuda::scatter(&parts, &srcs, transfer, &mut report)?;
        }
        let work = Work::new(
            on_host.iter().map(|part| part.src.len()).sum(),
            on_host.iter().any(|part| part.plane.is_remote()),
            transfer.threads,
        );
        let pieces = on_host.iter().flat_map(|part| {
            Rectangle::new(part.plane.shape(), 0..part.n_src).split(PIECE).scan(0, move |next, block| {
                let start = *next;
                *next += block.bytes();
                Some((start, part, block))
            })
        });
        for_each_piece(work.threads, pieces, Some(&mut report), |(start, part, block), buffer| {
            let src = part.src.piece(start, block.bytes(), buffer)?;
            // SAFETY: the planes are borrowed for writing by `batch`, and of all pieces only this one has cells of its
            // rectangle.
            unsafe { part.plane.write(part.map, &block, src, work.how)? };
            Ok(block.bytes())
        })?;
        report.finish()
    }
}

/// A part of a restore whose plane `batch` has borrowed for writing.
struct Source<'a> {
    plane: &'a Plane,
    map: &'a CellMap,
    n_src: u32,
    /// On the host, or `beside`.
    src: TensorBytes<'a>,
    conversion: Option<Conversion>,
    /// The bytes, on the device of the plane.
    beside: Option<&'a DevicePlane>,
}

/// Writes the parts that have a conversion, whose planes are borrowed for writing, a piece at a time.
fn scatter_converted(parts: &[Source<'_>], transfer: &Transfer, report: &mut Report<'_>) -> Result<()> {
    let parts = parts.iter().filter_map(|part| Some((part, part.conversion?)));
    let (on_host, elsewhere): (Vec<_>, Vec<_>) =
        parts.partition(|(part, _)| part.plane.on_device().is_none() && !part.plane.is_remote());
    let work = Work::new(on_host.iter().map(|(part, _)| part.src.len()).sum(), false, transfer.threads);
    let pieces = on_host.iter().flat_map(|&(part, conversion)| {
        // Channels of a file are read one by one: they are to be worth it.
        let max = if matches!(part.src, TensorBytes::File { .. } | TensorBytes::Cells { .. }) {
            8 * PIECE
        } else {
            PIECE
        };
        conversion.pieces(part.n_src, max).map(move |cells| (part, conversion, cells))
    });
    for_each_piece(work.threads, pieces, Some(report), |(part, conversion, cells), buffers| {
        let bytes = conversion.convert(&part.src, part.n_src, &cells, buffers)?;
        let block = Rectangle::new(part.plane.shape(), cells.clone());
        // SAFETY: the planes are borrowed for writing, and of all pieces only this one has these cells.
        unsafe { part.plane.write(part.map, &block, bytes, work.how)? };
        Ok(conversion.src_bytes(&cells))
    })?;
    let mut buffers = Buffers::default();
    for (part, conversion) in elsewhere {
        for cells in conversion.pieces(part.n_src, STAGED_PIECE) {
            let bytes = conversion.convert(&part.src, part.n_src, &cells, &mut buffers)?;
            let block = Rectangle::new(part.plane.shape(), cells.clone());
            match part.plane.on_device() {
                Some(plane) => {
                    let part = Part { plane, map: part.map, block };
                    cuda::scatter(
                        &[part],
                        &[TensorBytes::Memory(bytes)],
                        transfer,
                        &mut Report::new(None, 0),
                    )?;
                }
                // SAFETY: as above.
                None => unsafe { part.plane.write(part.map, &block, bytes, work.how)? },
            }
            report.add(conversion.src_bytes(&cells))?;
        }
    }
    Ok(())
}

/// Copies the cells that `map` names between planes, `(dst, src)`, of which each pair has one shape (`seq_cp` across
/// streams).
///
/// # Errors
/// [`Error::InvalidArgument`] if a pair differs in shape or size, or the map leaves a plane; nothing is written
/// then. [`Error::Device`].
pub fn copy_cells(pairs: Vec<(&mut Plane, &Plane)>, map: &CellMap, transfer: &Transfer) -> Result<()> {
    pairs.iter().try_for_each(|(dst, src)| dst.check_copy(src, map))?;
    let mut on_device = Vec::new();
    for (dst, src) in pairs {
        if dst.on_device().is_some() && src.is_beside(dst) {
            on_device.push((&*dst, src));
        } else if dst.on_device().is_some() || src.on_device().is_some() {
            copy_through_host(dst, src, map, transfer)?;
        } else {
            dst.copy_cells_from(src, map)?;
        }
    }
    for group in by_device(on_device, |(dst, _)| dst.device()) {
        let pairs: Vec<_> =
            group.iter().filter_map(|(dst, src)| dst.on_device().zip(src.on_device())).collect();
        cuda::copy_cells(&pairs, map, transfer)?;
    }
    Ok(())
}

/// Between two devices, or a device and the host.
fn copy_through_host(dst: &mut Plane, src: &Plane, map: &CellMap, transfer: &Transfer) -> Result<()> {
    let cells: Vec<u32> = map.moves().iter().flat_map(|m| m.dst..m.dst + m.len).collect();
    let map = Arc::new(CellMap::of_cells(&cells)?);
    let region = Region::new(src, &map)?;
    let mut blob = zeroed(region.bytes(), "a copy between streams")?;
    gather(&[(0, region)], &mut blob, transfer, None)?;
    let part =
        Scatter { plane: dst, map: &map, n_src: map.n_cells(), src: TensorBytes::Memory(&blob).into() };
    scatter(&mut [part], transfer, None)
}

/// Zeroes the cells of every plane that its map names.
///
/// # Errors
/// [`Error::InvalidArgument`] if a map leaves a plane; nothing is written then. [`Error::Device`], and what the owner of a
/// remote tensor returns.
pub fn zero_cells(parts: Vec<(&mut Plane, &CellMap)>, transfer: &Transfer) -> Result<()> {
    parts.iter().try_for_each(|(plane, map)| plane.check_cells(map))?;
    let (on_host, on_device): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|(plane, _)| plane.on_device().is_none());
    for (plane, map) in on_host {
        plane.zero(map)?;
    }
    let on_device = on_device.into_iter().map(|(plane, map)| (&*plane, map)).collect();
    for group in by_device(on_device, |(plane, _)| plane.device()) {
        let parts: Vec<_> =
            group.iter().filter_map(|(plane, map)| Some((plane.on_device()?, *map))).collect();
        cuda::zero_cells(&parts, transfer)?;
    }
    Ok(())
}

/// What is on each device, in the order in which devices come up; each of `all` is on one.
pub(super) fn by_device<T>(all: Vec<T>, device: impl Fn(&T) -> Option<i32>) -> Vec<Vec<T>> {
    let mut groups: Vec<(i32, Vec<T>)> = Vec::new();
    for one in all {
        let Some(ordinal) = device(&one) else { continue };
        match groups.iter_mut().find(|(of, _)| *of == ordinal) {
            Some((_, group)) => group.push(one),
            None => groups.push((ordinal, vec![one])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Copies slices that lie apart, `(to, from)` of the same length, on some threads.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "devices need it"))]
pub(super) fn copy_slices(copies: Vec<(&mut [u8], &[u8])>, threads: Threads) -> Result<()> {
    let work = Work::new(copies.iter().map(|(to, _)| to.len() as u64).sum(), false, threads);
    let pieces =
        copies.into_iter().flat_map(|(to, from)| to.chunks_mut(index(PIECE)).zip(from.chunks(index(PIECE))));
    for_each_piece(work.threads, pieces, None, |(to, from), (): &mut ()| {
        to.copy_from_slice(from);
        Ok(to.len() as u64)
    })
}

/// `n` zero bytes, or an error where `vec!` would abort.
pub(super) fn zeroed(n: u64, what: &'static str) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let len = usize::try_from(n).unwrap_or(usize::MAX);
    out.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { what, bytes: n })?;
    out.resize(len, 0);
    Ok(out)
}

/// Offsets inside what is in memory, and sizes of pieces.
pub(super) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it lies in memory")
}

/// How a batch is done.
#[derive(Clone, Copy, Debug)]
struct Work {
    threads: usize,
    how: How,
}

impl Work {
    /// The calls of a remote tensor's owner come from the thread that calls.
    fn new(total: u64, is_remote: bool, threads: Threads) -> Self {
        let threads = if is_remote { 1 } else { threads.worth(total) };
        Self { threads, how: How { kernels: Kernels::get(), streams: total >= STREAM_MIN } }
    }
}
