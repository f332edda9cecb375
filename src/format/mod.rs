//! Byte layouts: bounded reading, versions and headers, ggml types. No I/O, no cache.
//!
//! All integers are little-endian and unaligned. The layouts are llama.cpp's, read from its source
//! (b11434) and checked against states that it wrote.

mod cursor;
mod ggml;
mod header;
mod quants;

pub use cursor::Cursor;
pub use ggml::GgmlType;
pub use header::{
    FileHeader, FileKind, SEQ_BLOB_HEADER_LEN, SEQ_BLOB_MAGIC, StateVersion, token_bytes, tokens_of,
};
pub(crate) use header::{read_seq_blob_header, seq_blob_header};
