//! What a restore wants of a tensor in a file: what is left out is not read.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use super::batch::Placed;
use super::file::{read_error, read_exact_at};
use super::{CellMap, StateTensor, TensorBytes};
use crate::error::Result;
use crate::types::Move;

/// Bytes that are read along between wanted ones: about what a system call costs.
const GAP: u64 = 4096;

/// The cells of a blob that a restore reads of a file, which stand for a blob of their own.
///
/// Invariant: the runs ascend in the blob and, without gaps, in the narrowed one, of which the map leaves out what is read along.
#[derive(Debug)]
pub struct WantedCells {
    /// Where the cells go, as cells of the narrowed blob.
    map: CellMap,
    /// From cells of the blob (`src`) to those of the narrowed one (`dst`).
    runs: Vec<Move>,
    /// Cells of the blob.
    n_src: u32,
    /// Cells of the narrowed one.
    n_wanted: u32,
    elem_size: u64,
    n_channel: u32,
}

impl WantedCells {
    /// What `map` leaves of `n_src` cells; `None`: nothing worth leaving out.
    fn new(map: &CellMap, n_src: u32, (n_channel, elem_size): (u32, u64)) -> Result<Option<Self>> {
        let gap = GAP.checked_div(elem_size).map_or(0, |cells| u32::try_from(cells).unwrap_or(u32::MAX));
        let mut spans: Vec<Range<u32>> = Vec::new();
        for m in map.moves() {
            match spans.last_mut() {
                Some(last) if m.src - last.end <= gap => last.end = m.src + m.len,
                _ => spans.push(m.src..m.src + m.len),
            }
        }
        // From a channel to the next it is the cells behind the last span and before the first.
        if let (Some(first), Some(last)) = (spans.first().cloned(), spans.last().cloned())
            && n_channel > 1
            && n_src - last.end + first.start <= gap
        {
            if let Some(first) = spans.first_mut() {
                first.start = 0;
            }
            if let Some(last) = spans.last_mut() {
                last.end = n_src;
            }
        }
        let n_wanted: u32 = spans.iter().map(|span| span.end - span.start).sum();
        if n_wanted == n_src {
            return Ok(None);
        }
        let mut dst = 0;
        let run = |span: Range<u32>| {
            let len = span.end - span.start;
            dst += len;
            Move { src: span.start, dst: dst - len, len }
        };
        let runs: Vec<Move> = spans.into_iter().map(run).collect();
        let narrowed = |m: &Move| {
            let run = &runs[runs.partition_point(|run| run.src <= m.src) - 1];
            Move { src: run.dst + (m.src - run.src), ..*m }
        };
        let map = CellMap::new(map.moves().iter().map(narrowed).collect())?;
        Ok(Some(Self { map, runs, n_src, n_wanted, elem_size, n_channel }))
    }

    /// Bytes of the narrowed blob.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.n_wanted) * self.elem_size * u64::from(self.n_channel)
    }

    /// Where the narrowed blob's bytes from `start` on lie in the whole one, in order, and neighbours as one.
    fn ranges(&self, start: u64, len: u64) -> Vec<Range<u64>> {
        let channel_bytes = u64::from(self.n_wanted) * self.elem_size;
        let (mut at, end) = (start, start + len);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        while at < end {
            let (channel, in_channel) = (at / channel_bytes, at % channel_bytes);
            let cell = in_channel / self.elem_size;
            let run = &self.runs[self.runs.partition_point(|run| u64::from(run.dst) <= cell) - 1];
            let skip = in_channel - u64::from(run.dst) * self.elem_size;
            let n = (u64::from(run.len) * self.elem_size - skip).min(end - at);
            let from = (channel * u64::from(self.n_src) + u64::from(run.src)) * self.elem_size + skip;
            match ranges.last_mut() {
                Some(last) if last.end == from => last.end += n,
                _ => ranges.push(from..from + n),
            }
            at += n;
        }
        ranges
    }

    /// Reads the narrowed blob's bytes from `start` on, of the tensor at `offset` of a file.
    pub(super) fn read(&self, file: &File, offset: u64, start: u64, out: &mut [u8]) -> Result<()> {
        let mut rest = out;
        for range in self.ranges(start, rest.len() as u64) {
            let n = usize::try_from(range.end - range.start).unwrap_or(rest.len());
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(n);
            read_exact_at(file, piece, offset + range.start).map_err(read_error)?;
            rest = behind;
        }
        Ok(())
    }
}

/// What is wanted of each part of a batch; `None`: the whole tensor.
///
/// The parts of a stream share their map, so most of them share what follows from it.
#[derive(Debug)]
pub(super) struct WantedBatch(Vec<Option<Arc<WantedCells>>>);

impl WantedBatch {
    pub fn new<'p>(parts: impl Iterator<Item = Placed<'p>>) -> Result<Self> {
        type Key = (*const CellMap, u32, u64, u32);
        let mut made: Vec<(Key, Option<Arc<WantedCells>>)> = Vec::new();
        let mut wanted_of = |part: Placed<'p>| {
            if !matches!(part.src.bytes, TensorBytes::File { .. }) || part.map.n_cells() == part.n_src {
                return Ok(None);
            }
            let strides @ (n_channel, elem_size) = part.src.strides(part.plane);
            let key = (std::ptr::from_ref(part.map), part.n_src, elem_size, n_channel);
            if let Some((_, wanted)) = made.iter().find(|(other, _)| *other == key) {
                return Ok(wanted.clone());
            }
            let wanted = WantedCells::new(part.map, part.n_src, strides)?.map(Arc::new);
            made.push((key, wanted.clone()));
            Ok(wanted)
        };
        Ok(Self(parts.map(&mut wanted_of).collect::<Result<_>>()?))
    }

    /// Each part with what is wanted of it alone.
    pub fn narrow<'p>(
        &'p self,
        parts: impl Iterator<Item = Placed<'p>> + 'p,
    ) -> impl Iterator<Item = Placed<'p>> + 'p {
        parts.zip(&self.0).map(|(part, wanted)| match (part.src.bytes, wanted) {
            (TensorBytes::File { file, offset, .. }, Some(cells)) => Placed {
                map: &cells.map,
                n_src: cells.n_wanted,
                src: StateTensor { bytes: TensorBytes::Cells { file, offset, cells }, ..part.src },
                ..part
            },
            _ => part,
        })
    }
}

/// Which bytes of files a [`super::scatter`] reads, in order for each part.
///
/// # Errors
/// None at present.
pub fn file_ranges<'p>(parts: impl Iterator<Item = Placed<'p>>) -> Result<Vec<Range<u64>>> {
    let parts: Vec<_> = parts.collect();
    let wanted = WantedBatch::new(parts.iter().copied())?;
    let mut ranges = Vec::new();
    for part in wanted.narrow(parts.iter().copied()) {
        match part.src.bytes {
            TensorBytes::File { offset, len, .. } => ranges.push(offset..offset + len),
            TensorBytes::Cells { offset, cells, .. } => {
                let of_tensor = cells.ranges(0, cells.len()).into_iter();
                ranges.extend(of_tensor.map(|range| offset + range.start..offset + range.end));
            }
            TensorBytes::Memory(_) | TensorBytes::Copies { .. } => {}
        }
    }
    Ok(ranges)
}
