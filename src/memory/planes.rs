//! Where the planes of a section are, and how they are allocated.

use crate::error::{Error, Result};
use crate::storage::{Device, Plane, PlaneShape};

/// Where the tensors of a section are. `P` is how the caller hands over tensors of its own.
#[derive(Debug, Default)]
pub enum SectionMemory<P> {
    /// Allocated here, in host memory.
    #[default]
    Host,
    /// Allocated here: the CUDA device of each layer, `None` for host memory.
    Devices(Vec<Option<i32>>),
    /// The caller's.
    Adopted(P),
}

/// Zeroed planes of `n_cells` cells in order, each on its device, those on one device in one allocation.
pub(super) fn allocate(wanted: &[(Option<i32>, PlaneShape)], n_cells: u32) -> Result<Vec<Plane>> {
    let mut planes: Vec<Option<Plane>> = wanted.iter().map(|_| None).collect();
    let mut left: Vec<usize> = (0..wanted.len()).collect();
    while let Some(&first) = left.first() {
        let on = wanted[first].0;
        let (here, elsewhere): (Vec<_>, Vec<_>) = left.into_iter().partition(|&i| wanted[i].0 == on);
        left = elsewhere;
        let shapes: Vec<_> = here.iter().map(|&i| wanted[i].1).collect();
        let allocated = match on {
            Some(ordinal) => Plane::allocate_on(&Device::open(ordinal)?, &shapes, n_cells)?,
            None => Plane::allocate(&shapes, n_cells)?,
        };
        here.into_iter().zip(allocated).for_each(|(i, plane)| planes[i] = Some(plane));
    }
    Ok(planes.into_iter().flatten().collect())
}

/// Checks that there is a device, or none, for every layer of the section called `name`.
pub(super) fn check_devices(devices: &[Option<i32>], n_layer: usize, name: &str) -> Result<()> {
    if devices.len() == n_layer {
        return Ok(());
    }
    let reason = format!("{} for {n_layer} layers", devices.len());
    Err(Error::arg(format!("{name}.devices"), reason))
}

/// Bytes of planes that `counts` holds for.
pub(super) fn bytes<'a>(planes: impl Iterator<Item = &'a Plane>, counts: impl Fn(&Plane) -> bool) -> u64 {
    planes.filter(|plane| counts(plane)).filter_map(|plane| plane.shape().span(plane.kv_size())).sum()
}

/// Whether two planes hold the same bytes per cell, strides aside.
pub(super) fn same_cells(a: PlaneShape, b: PlaneShape) -> bool {
    use PlaneShape::{Channels, Rows};
    match (a, b) {
        (Rows { row_size: a, .. }, Rows { row_size: b, .. }) => a == b,
        (Channels { n_channel: n_a, elem_size: a, .. }, Channels { n_channel: n_b, elem_size: b, .. }) => {
            n_a == n_b && a == b
        }
        _ => false,
    }
}
