//! Byte layouts: bounded reading, versions and headers, ggml types. No I/O, no cache.
//!
//! All integers are little-endian and unaligned. The layouts are llama.cpp's, read from its source
//! (b11434) and checked against states that it wrote; those of [`DraftState`] and [`Integrity`] are kvstate's own.

mod appendix;
mod checkpoints;
mod crc32c;
mod cursor;
mod draft_state;
mod ggml;
mod gguf;
mod header;
mod integrity;
mod quants;

pub use appendix::{BoundedRead, PartKind};
pub use checkpoints::{Checkpoint, CheckpointSpan, Checkpoints};
pub use crc32c::{crc32c_append, crc32c_combine};
pub use cursor::Cursor;
pub use draft_state::DraftState;
pub use ggml::GgmlType;
pub use gguf::skip_gguf_head;
pub use header::{
    FileHeader, FileKind, SEQ_BLOB_HEADER_LEN, SEQ_BLOB_MAGIC, StateVersion, token_bytes, tokens_of,
};
pub use integrity::{Identity, Integrity, Part, SectionGeometry, Tag, TensorShape};

pub(crate) use header::{read_seq_blob_header, seq_blob_header};
pub(crate) use integrity::{hexadecimal, printable};
