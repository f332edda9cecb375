//! The numbers that callers name things by.

/// Position of a token in its sequence.
pub type kvs_pos = i32;
/// Sequence id, below n_seq_max.
pub type kvs_seq_id = i32;
/// Token id.
pub type kvs_token = i32;
