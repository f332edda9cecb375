//! The memory of NVIDIA GPUs, through the CUDA driver.
//!
//! `driver` finds libcuda; `device` opens one, with the kernels of the folder `cuda`; `memory` is what is allocated; `plane` is
//! where K and V lie. A batch is cut into `chunks`, described to the kernels by `moves`, and runs through a `lane`; `gather` and
//! `scatter` are the two ways.
//!
//! Order. A transfer runs on streams of its own, behind what the caller has queued on the stream that it names
//! ([`CallerStream`]). Calls that end on the host wait for the device; a snapshot, a copy between streams and a clear do not, and
//! the caller's stream goes on behind them. Without a named stream the caller's work on the device has to be done before a call, and
//! every call waits.
#![allow(unsafe_code, reason = "the driver is a C library, and device memory is addresses")]

mod chunks;
mod device;
mod driver;
mod gather;
mod lane;
mod memory;
mod moves;
mod plane;
mod scatter;
mod shift;

pub use device::Device;
pub use lane::{CallerStream, Staging, StagingParams, StagingReport};
pub use memory::{alloc_pinned, free_pinned, probe, register_host, unregister_host};

pub(super) use chunks::Part;
pub(super) use gather::{Drain, gather};
pub(super) use plane::DevicePlane;
pub(super) use scatter::{LocalPart, copy_cells, gather_local, prepare, scatter, scatter_local, zero_cells};
pub(super) use shift::{MAX_SPAN, ShiftPart, shift};
