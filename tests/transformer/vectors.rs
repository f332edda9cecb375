//! The vectors that a plane holds, one per cell, read and written as an engine does: at their addresses.
#![allow(unsafe_code, reason = "an engine reaches K and V by address")]

use half::f16;
use kvstate::format::GgmlType;
use kvstate::storage::{Plane, PlaneShape};

/// The vectors of a plane: the key, or the value, of each cell.
///
/// Invariant: the plane lives in the context whose engine, or whose shift callback, owns these vectors.
#[derive(Clone, Copy)]
pub struct Vectors {
    start: *mut u8,
    shape: PlaneShape,
    kv_size: u32,
    element: GgmlType,
}

// SAFETY: the address is as good on one thread as on another, and the plane itself may move between them.
unsafe impl Send for Vectors {}

impl Vectors {
    pub fn of(plane: &Plane, element: GgmlType) -> Self {
        Self { start: plane.as_ptr(), shape: plane.shape(), kv_size: plane.kv_size(), element }
    }

    fn elem_size(self) -> usize {
        self.element.type_size() as usize
    }

    /// Elements of a vector.
    pub fn len(self) -> usize {
        usize::try_from(self.shape.cell_bytes()).unwrap() / self.elem_size()
    }

    /// Where an element of a cell's vector lies; rows have their elements together, channels do not.
    fn at(self, cell: u32, element: usize) -> *mut u8 {
        assert!(cell < self.kv_size && element < self.len());
        let (cell, index) = (u64::from(cell), element as u64);
        let offset = match self.shape {
            PlaneShape::Rows { cell_stride, .. } => cell * cell_stride + index * self.elem_size() as u64,
            PlaneShape::Channels { cell_stride, channel_stride, .. } => {
                cell * cell_stride + index * channel_stride
            }
        };
        // SAFETY: the cell and the element are the plane's, so the offset is inside its memory.
        unsafe { self.start.add(usize::try_from(offset).unwrap()) }
    }

    /// The vector of a cell.
    pub fn read(self, cell: u32) -> Vec<f32> {
        let element = |i| {
            let at = self.at(cell, i);
            // SAFETY: `at` is one whole element, initialised, and nobody writes it: engines read between calls.
            unsafe {
                match self.element {
                    GgmlType::F16 => at.cast::<f16>().read_unaligned().to_f32(),
                    _ => at.cast::<f32>().read_unaligned(),
                }
            }
        };
        (0..self.len()).map(element).collect()
    }

    /// Sets the vector of a cell.
    pub fn write(self, cell: u32, vector: &[f32]) {
        assert_eq!(vector.len(), self.len());
        for (i, &value) in vector.iter().enumerate() {
            let at = self.at(cell, i);
            // SAFETY: `at` is one whole element, and nobody else uses it: engines write between calls of the
            // context, or in its shift callback, and on the context's thread.
            unsafe {
                match self.element {
                    GgmlType::F16 => at.cast::<f16>().write_unaligned(f16::from_f32(value)),
                    _ => at.cast::<f32>().write_unaligned(value),
                }
            }
        }
    }
}
