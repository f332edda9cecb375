//! What stands for `cuda` in a build without it: the same names, and no device to use them with.
#![allow(unsafe_code, reason = "what is unsafe with devices is so without, for callers to compile with both")]
#![allow(dead_code, reason = "nothing of it is ever used")]

use std::ffi::c_void;
use std::sync::Arc;

use super::pieces::Report;
use super::region::Rectangle;
use super::shift::{Rotation, RotationTable, ShiftFailure, ShiftedCell};
use super::{CellMap, PlaneShape, TensorBytes, Transfer};
use crate::error::{Error, Result};

fn none<T>() -> Result<T> {
    Err(Error::NoCuda { reason: "this build has no feature 'cuda'".to_owned() })
}

/// A CUDA device; there is none.
#[derive(Debug)]
pub enum Device {}

impl Device {
    /// Fails.
    ///
    /// # Errors
    /// [`Error::NoCuda`].
    pub fn open(_: i32) -> Result<Arc<Self>> {
        none()
    }

    /// No memory is in a device's.
    ///
    /// # Errors
    /// None.
    pub fn ordinal_of(_: u64) -> Result<Option<i32>> {
        Ok(None)
    }

    /// Whether it works.
    ///
    /// # Errors
    /// None.
    pub fn check(&self) -> Result<()> {
        match *self {}
    }

    pub(super) fn hiding(_: u64) -> Option<i32> {
        None
    }

    /// Its number.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        match *self {}
    }
}

/// A stream of the caller's; there is none.
#[derive(Clone, Debug)]
pub enum CallerStream {}

impl CallerStream {
    /// Fails.
    ///
    /// # Errors
    /// [`Error::NoCuda`].
    ///
    /// # Safety
    /// None is demanded.
    pub unsafe fn new(_: i32, _: *mut c_void) -> Result<Self> {
        none()
    }

    /// Which device it is on.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        match *self {}
    }

    pub(super) fn check_now(&self) -> Result<()> {
        match *self {}
    }
}

/// How large staging buffers are; there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingParams {
    /// Bytes of a buffer.
    pub size: u64,
    /// Pinned buffers.
    pub count: usize,
}

/// Bytes that staging takes at present: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingReport {
    /// In the memory of devices.
    pub device: u64,
    /// Of pinned host memory.
    pub pinned: u64,
}

/// No buffers.
#[derive(Debug, Default)]
pub struct Staging;

impl Staging {
    /// No buffers.
    ///
    /// # Errors
    /// None.
    pub fn new(_: StagingParams, _: Option<u64>) -> Result<Self> {
        Ok(Self)
    }

    /// There is nothing to free.
    pub fn free(&self) {}

    /// Nothing is allocated.
    #[must_use]
    pub fn report(&self) -> StagingReport {
        StagingReport::default()
    }
}

/// Fails.
///
/// # Errors
/// [`Error::NoCuda`].
pub fn alloc_pinned(_: i32, _: u64) -> Result<*mut u8> {
    none()
}

/// Fails.
///
/// # Errors
/// [`Error::NoCuda`].
pub fn free_pinned(_: usize) -> Result<()> {
    none()
}

/// Fails.
///
/// # Errors
/// [`Error::NoCuda`].
///
/// # Safety
/// None is demanded.
pub unsafe fn register_host(_: i32, _: *mut u8, _: usize) -> Result<()> {
    none()
}

/// Fails.
///
/// # Errors
/// [`Error::NoCuda`].
pub fn unregister_host(_: usize) -> Result<()> {
    none()
}

#[derive(Clone, Debug)]
pub(super) struct DevicePlane {
    pub device: Arc<Device>,
    pub grid: DeviceGrid,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceGrid {
    pub ptr: u64,
}

impl DevicePlane {
    pub fn adopt(_: u64, _: u32, _: PlaneShape) -> Result<Self> {
        none()
    }

    pub fn allocate(device: &Arc<Device>, _: &[PlaneShape], _: u32) -> Result<Vec<Self>> {
        match **device {}
    }

    pub fn allocate_copies(device: &Arc<Device>, _: &[(PlaneShape, u32)]) -> Result<Vec<Self>> {
        match **device {}
    }

    pub fn starting_at(&self, _: u64) -> Self {
        match *self.device {}
    }

    pub fn is_allocated(&self) -> bool {
        match *self.device {}
    }

    pub fn get(&self, _: u64, _: &mut [u8], _: &Transfer) -> Result<()> {
        match *self.device {}
    }

    pub fn set(&self, _: u64, _: &[u8], _: &Transfer) -> Result<()> {
        match *self.device {}
    }

    pub fn zero(&self, _: u64, _: &Transfer) -> Result<()> {
        match *self.device {}
    }
}

#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    pub plane: &'a DevicePlane,
    pub map: &'a CellMap,
    pub block: Rectangle,
}

#[derive(Debug)]
pub(super) struct LocalPart<'a> {
    pub part: Part<'a>,
    pub blob: &'a DevicePlane,
}

pub(super) const MAX_SPAN: u32 = 1024;

#[derive(Debug)]
pub(super) struct ShiftPart<'a> {
    pub plane: &'a DevicePlane,
    pub rotation: &'a Rotation,
    pub table: &'a RotationTable,
}

pub(super) fn shift(_: &[ShiftPart<'_>], _: &[ShiftedCell], _: &Transfer) -> Result<(), ShiftFailure> {
    none().map_err(|error| ShiftFailure { error, rows_changed: false })
}

/// Nothing is on its way.
#[derive(Debug)]
pub(super) enum Drain {}

impl Drain {
    pub fn new(_: &[Part<'_>], _: &Transfer) -> Result<Self> {
        none()
    }

    pub fn next_piece(&mut self) -> Result<&[u8]> {
        match *self {}
    }
}

pub(super) fn gather(_: &[Part<'_>], _: Vec<&mut [u8]>, _: &Transfer, _: &mut Report<'_>) -> Result<()> {
    none()
}

pub(super) fn gather_local(_: &[LocalPart<'_>], _: &Transfer) -> Result<()> {
    none()
}

pub(super) fn prepare(_: &[Part<'_>], _: &[Part<'_>], _: &Transfer) -> Result<()> {
    none()
}

pub(super) fn scatter(
    parts: &[Part<'_>],
    _: &[TensorBytes<'_>],
    _: &Transfer,
    _: &mut Report<'_>,
) -> Result<()> {
    if parts.is_empty() { Ok(()) } else { none() }
}

pub(super) fn scatter_local(parts: &[LocalPart<'_>], _: &Transfer) -> Result<()> {
    if parts.is_empty() { Ok(()) } else { none() }
}

pub(super) fn copy_cells(_: &[(&DevicePlane, &DevicePlane)], _: &CellMap, _: &Transfer) -> Result<()> {
    none()
}

pub(super) fn zero_cells(_: &[(&DevicePlane, &CellMap)], _: &Transfer) -> Result<()> {
    none()
}
