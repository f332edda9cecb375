//! A tensor of a state: where its bytes are, and how they become those of a plane.

use std::fs::File;

use super::batch::index;
use super::convert::Conversion;
use super::cuda::DevicePlane;
use super::file::{read_error, read_exact_at};
use super::{Plane, TensorCopies, WantedCells};
use crate::error::{Error, Result};

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
    /// Cells of a tensor in a file that begins at `offset`, one after another.
    Cells {
        /// The file.
        file: &'a File,
        /// Offset of the first byte of the tensor.
        offset: u64,
        /// Which cells.
        cells: &'a WantedCells,
    },
    /// Among copies of tensors, not all of them in host memory.
    Copies {
        /// The copies.
        copies: &'a TensorCopies,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
}

/// A tensor of a state that goes to planes.
#[derive(Clone, Copy, Debug)]
pub struct StateTensor<'a> {
    /// The whole region of the state's cells, in blob order.
    pub bytes: TensorBytes<'a>,
    /// How they become what the planes hold; `None`: as they are.
    pub conversion: Option<Conversion>,
}

impl<'a> From<TensorBytes<'a>> for StateTensor<'a> {
    fn from(bytes: TensorBytes<'a>) -> Self {
        Self { bytes, conversion: None }
    }
}

impl StateTensor<'_> {
    /// The bytes where they are, if that is the device of `plane` and they go there as they are.
    pub(super) fn beside(&self, plane: &Plane) -> Option<DevicePlane> {
        match (self.bytes, self.conversion) {
            (TensorBytes::Copies { copies, offset, len }, None) => {
                copies.on_device(plane.device()?, offset, len)
            }
            _ => None,
        }
    }

    /// Channels of the bytes, and bytes of an element: a row, if they are rows. They go to `plane`.
    pub(super) fn strides(&self, plane: &Plane) -> (u32, u64) {
        if let Some(conversion) = &self.conversion {
            return conversion.src_strides();
        }
        let strides = plane.shape().strides();
        (strides.n_channel, strides.elem_size)
    }

    /// Checks what a restore of `n_src` cells to `plane` demands of the bytes.
    pub(super) fn check(&self, plane: &Plane, n_src: u32) -> Result<()> {
        let cell_bytes = match &self.conversion {
            Some(conversion) => {
                conversion.check_plane(plane.shape())?;
                conversion.src_cell_bytes()
            }
            None => plane.shape().cell_bytes(),
        };
        let bytes = self.bytes.len();
        if u64::from(n_src).checked_mul(cell_bytes) == Some(bytes) {
            return Ok(());
        }
        Err(Error::arg("src", format!("has {bytes} bytes (expected {n_src} cells of {cell_bytes} bytes)")))
    }
}

impl<'a> TensorBytes<'a> {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::File { len, .. } | Self::Copies { len, .. } => *len,
            Self::Cells { cells, .. } => cells.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `len` bytes from `start` on, in `buffer` if they have to be read.
    pub(super) fn piece<'b>(&self, start: u64, len: u64, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]>
    where
        'a: 'b,
    {
        match *self {
            Self::Memory(bytes) => Ok(&bytes[index(start)..][..index(len)]),
            Self::Copies { .. } => Err(Error::Internal(format!("{self:?} was not brought to the host"))),
            Self::File { .. } | Self::Cells { .. } => {
                buffer
                    .try_reserve(index(len).saturating_sub(buffer.len()))
                    .map_err(|_| Error::OutOfMemory { what: "the file buffer", bytes: len })?;
                if buffer.len() < index(len) {
                    buffer.resize(index(len), 0);
                }
                let piece = &mut buffer[..index(len)];
                self.read(start, piece)?;
                Ok(piece)
            }
        }
    }

    /// Reads the bytes from `start` on into `out`.
    pub(super) fn read(&self, start: u64, out: &mut [u8]) -> Result<()> {
        match *self {
            Self::File { file, offset, .. } => read_exact_at(file, out, offset + start).map_err(read_error),
            Self::Cells { file, offset, cells } => cells.read(file, offset, start, out),
            _ => self.piece(start, out.len() as u64, &mut Vec::new()).map(|bytes| out.copy_from_slice(bytes)),
        }
    }
}
