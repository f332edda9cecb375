//! A region: what a state holds of one plane.

use std::ops::Range;
use std::sync::Arc;

use super::cuda::Part;
use super::{CellMap, Plane, PlaneShape};
use crate::error::{Error, Result};
use crate::types::Run;

/// Cells of one plane as they stand in a blob.
///
/// Rows: the rows one after another. Channels: one channel of all the cells, then the next.
#[derive(Clone, Debug)]
pub struct Region<'a> {
    pub(super) plane: &'a Plane,
    pub(super) map: Arc<CellMap>,
    pub(super) block: Rectangle,
}

/// Some of the blob cells of some of the channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rectangle {
    pub channels: Range<u32>,
    pub cells: Range<u32>,
    pub elem_size: u64,
}

impl Rectangle {
    /// Blob cells `cells` of every channel of planes of this shape.
    pub fn new(shape: PlaneShape, cells: Range<u32>) -> Self {
        let s = shape.strides();
        Self { channels: 0..s.n_channel, cells, elem_size: s.elem_size }
    }

    pub fn channel_bytes(&self) -> u64 {
        u64::from(self.cells.end - self.cells.start) * self.elem_size
    }

    pub fn bytes(&self) -> u64 {
        // No overflow: cells do not overlap, so this is at most the span of a plane, or the size of a blob.
        self.channel_bytes() * u64::from(self.channels.end - self.channels.start)
    }

    /// Pieces, in blob order, of at most `max` bytes, but at least one element; each is one range of the blob: whole
    /// channels, or a part of one. None of what has no bytes.
    pub fn split(self, max: u64) -> impl Iterator<Item = Self> {
        let at_least_one = |count: u64| u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let (cell_step, channel_step) = match self.channel_bytes() {
            0 => (0, 0),
            bytes if bytes <= max => (u32::MAX, at_least_one(max / bytes)),
            _ => (at_least_one(max / self.elem_size), 1),
        };
        let steps = |range: Range<u32>, step: u32| {
            let end = if step == 0 { range.start } else { range.end };
            (range.start..end)
                .step_by(step.max(1) as usize)
                .map(move |start| start..range.end.min(start.saturating_add(step)))
        };
        let Self { channels, cells, elem_size } = self;
        steps(channels, channel_step).flat_map(move |channels| {
            steps(cells.clone(), cell_step).map(move |cells| Self {
                channels: channels.clone(),
                cells,
                elem_size,
            })
        })
    }
}

impl<'a> Region<'a> {
    /// The cells of `map`, in blob order, which must fill the blob.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the map leaves out cells of the blob, or leaves the plane.
    pub fn new(plane: &'a Plane, map: &Arc<CellMap>) -> Result<Self> {
        if map.n_cells() != map.src_end() {
            let reason = format!("{} cells of a blob of {}", map.n_cells(), map.src_end());
            return Err(Error::arg("map", reason));
        }
        plane.check_cells(map)?;
        let block = Rectangle::new(plane.shape(), 0..map.n_cells());
        Ok(Self { plane, map: Arc::clone(map), block })
    }

    /// Bytes of the region in a blob.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Cuts the region into pieces, in blob order, of at most `max` bytes, but at least one row or element.
    ///
    /// A region without cells has no pieces.
    pub fn split(self, max: u64) -> impl Iterator<Item = Region<'a>> {
        let Self { plane, map, block } = self;
        block.split(max).map(move |block| Self { plane, map: Arc::clone(&map), block })
    }

    /// The bytes themselves, where they lie in memory just as in a blob: a file write can skip the copy.
    #[must_use]
    pub fn as_contiguous(&self) -> Option<&'a [u8]> {
        let mut runs = self.runs();
        let run = runs.next()?;
        if runs.next().is_some() { None } else { self.plane.contiguous(run, &self.block.channels) }
    }

    /// The CUDA device that it is on; `None` for host memory and for remote planes.
    #[must_use]
    pub fn device(&self) -> Option<i32> {
        self.plane.device()
    }

    /// What a device has to know of it, if it is on one.
    pub(super) fn device_part(&self) -> Option<Part<'_>> {
        let plane = self.plane.on_device()?;
        Some(Part { plane, map: &self.map, block: self.block.clone() })
    }

    /// Shape and number of cells of a plane that has just these bytes.
    pub(super) fn dense_shape(&self) -> (PlaneShape, u32) {
        let Rectangle { channels, cells, elem_size } = &self.block;
        let n_cells = cells.end - cells.start;
        let shape = match self.plane.shape() {
            PlaneShape::Rows { row_size, .. } => PlaneShape::dense_rows(row_size),
            PlaneShape::Channels { .. } => PlaneShape::dense_channels(
                channels.end - channels.start,
                u32::try_from(*elem_size).expect("it was 32 bits"),
                n_cells,
            ),
        };
        (shape, n_cells)
    }

    /// The owner's name for the tensor, 0 if it gave none.
    #[must_use]
    pub fn tensor(&self) -> usize {
        self.plane.tensor()
    }

    /// Calls with the offset (from the start of the plane) and the bytes of every contiguous piece, in blob order.
    ///
    /// # Errors
    /// What `call` returns.
    pub fn each_piece(&self, call: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
        self.plane.shape().each_piece(&self.runs(), self.block.channels.clone(), call)
    }

    fn runs(&self) -> impl Iterator<Item = Run> + Clone + '_ {
        self.map.runs_in(self.block.cells.clone())
    }
}
