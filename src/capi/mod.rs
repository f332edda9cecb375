//! The C ABI: translates arguments, catches panics, records errors; everything else is below.
//!
//! The header is made from these modules by cbindgen, so their comments are written for its readers.
#![allow(unsafe_code, reason = "this is where pointers of C callers become references")]
#![allow(non_camel_case_types, reason = "C names")]
#![allow(clippy::doc_markdown, reason = "the comments become the C header's")]
#![allow(clippy::missing_safety_doc, reason = "the header states the contract of all calls once, at its top")]

mod autosave;
mod checkpoint;
mod context;
mod device;
mod dsv4;
mod engine;
mod fingerprint;
mod handle;
mod ids;
mod kv_params;
mod log;
mod memory;
mod params;
mod range;
mod recurrent;
mod sections;
mod slot_file;
mod slot_transfer;
mod snapshot;
mod state;
mod status;
mod transfer;
mod transfer_params;
mod view;

pub use self::autosave::*;
pub use self::checkpoint::*;
pub use self::context::*;
pub use self::device::*;
pub use self::dsv4::*;
pub use self::engine::*;
pub use self::fingerprint::*;
pub use self::handle::{kvs_context, kvs_memory, kvs_memory_t, kvs_slot};
pub use self::ids::*;
pub use self::kv_params::*;
pub use self::log::*;
pub use self::memory::*;
pub use self::range::*;
pub use self::recurrent::*;
pub use self::sections::*;
pub use self::slot_file::*;
pub use self::slot_transfer::*;
pub use self::snapshot::*;
pub use self::state::*;
pub use self::status::*;
pub use self::transfer::*;
pub use self::transfer_params::*;
pub use self::view::*;
