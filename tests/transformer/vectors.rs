//! The vectors that a plane holds, one per cell, read and written as an engine does: at their addresses.

use half::f16;
use kvstate::format::GgmlType;
use kvstate::storage::{Plane, PlaneShape};

use crate::place;

/// The vectors of a plane: the key, or the value, of each cell. The plane lives in the context whose engine, or whose
/// shift callback, owns these vectors.
pub struct Vectors {
    plane: Plane,
    element: GgmlType,
}

impl Vectors {
    pub fn of(plane: &Plane, element: GgmlType) -> Self {
        Self { plane: place::lent(plane), element }
    }

    fn elem_size(&self) -> usize {
        self.element.type_size() as usize
    }

    /// Elements of a vector.
    pub fn len(&self) -> usize {
        usize::try_from(self.plane.shape().cell_bytes()).unwrap() / self.elem_size()
    }

    /// Offset of a cell's first element, and from each element to the next: rows have them together, channels do not.
    fn at(&self, cell: u32) -> (usize, usize) {
        assert!(cell < self.plane.kv_size());
        let (start, step) = match self.plane.shape() {
            PlaneShape::Rows { cell_stride, .. } => (u64::from(cell) * cell_stride, self.elem_size() as u64),
            PlaneShape::Channels { cell_stride, channel_stride, .. } => {
                (u64::from(cell) * cell_stride, channel_stride)
            }
        };
        (usize::try_from(start).unwrap(), usize::try_from(step).unwrap())
    }

    /// The vector of a cell.
    pub fn read(&self, cell: u32) -> Vec<f32> {
        let (start, step) = self.at(cell);
        let bytes = place::read(&self.plane, start, (self.len() - 1) * step + self.elem_size());
        let element = |bytes: &[u8]| match self.element {
            GgmlType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
        bytes.chunks(step).map(element).collect()
    }

    /// Sets the vector of a cell.
    pub fn write(&self, cell: u32, vector: &[f32]) {
        assert_eq!(vector.len(), self.len());
        let (start, step) = self.at(cell);
        let element = |value: &f32| match self.element {
            GgmlType::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        let elements: Vec<Vec<u8>> = vector.iter().map(element).collect();
        if step == self.elem_size() {
            place::write(&self.plane, start, &elements.concat());
        } else {
            elements
                .iter()
                .enumerate()
                .for_each(|(i, element)| place::write(&self.plane, start + i * step, element));
        }
    }
}
