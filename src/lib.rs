//! kvstate

pub mod cells;
pub mod error;
pub mod storage;
pub mod types;
