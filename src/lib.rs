//! kvstate

pub mod capi;
pub mod cells;
pub mod context;
pub mod error;
pub mod format;
pub mod memory;
pub mod session;
pub mod state;
pub mod storage;
pub mod types;

pub use context::{Context, ContextParams};
pub use error::{Error, Result, Status};
