//! Where a state's bytes go to and come from.
//!
//! A section writes itself once, into a [`Sink`]: metadata as bytes, tensors as [`Region`]s. What the sink
//! does with them (count, copy into a buffer, write a file) is no concern of the section, so size and data
//! cannot disagree. A [`Source`] is the way back.
//!
//! [`Region`]: crate::storage::Region

mod device;
mod file_sink;
mod sink;
mod snapshot;
mod source;

pub use device::DeviceState;
pub use file_sink::{Checksum, FileWriter, write_file};
pub use sink::{CountSink, DeviceSink, OnDevices, RecordSink, Sink, SliceSink};
pub use snapshot::Snapshot;
pub use source::{Input, Source};
