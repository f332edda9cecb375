//! Blob and file headers, and what each version of a state holds.

use serde::{Serialize, Serializer};

use super::{BoundedRead, Cursor};
use crate::error::{Error, Result};
use crate::types::{SeqId, Token};

/// First word of a sequence blob in memory.
pub const SEQ_BLOB_MAGIC: u32 = 0xaf14_3cd8;

/// Bytes of a sequence blob's header: magic and source sequence.
pub const SEQ_BLOB_HEADER_LEN: u64 = 8;

/// The layout of a memory state. Blobs in memory are always [`StateVersion::CURRENT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateVersion {
    /// Sequence version 2, session version 9 (until August 2026): ext without the token, no rotation.
    V2,
    /// Sequence version 3, session version 10: ext with the token, no rotation.
    V3,
    /// Sequence version 4, session version 11 (from October 2026): rotation recorded.
    V4,
}

/// As its number in sequence files.
impl Serialize for StateVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.seq_version())
    }
}

impl StateVersion {
    /// The version that is written.
    pub const CURRENT: Self = Self::V4;

    /// The version number in sequence files.
    #[must_use]
    pub const fn seq_version(self) -> u32 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
            Self::V4 => 4,
        }
    }

    /// The version number in whole-context files.
    #[must_use]
    pub const fn session_version(self) -> u32 {
        self.seq_version() + 7
    }

    /// Whether the KV data header holds `n_rot_k` and `n_rot_v`.
    #[must_use]
    pub const fn has_rotation(self) -> bool {
        matches!(self, Self::V4)
    }

    /// Whether a cell's ext holds its token beside x and y.
    #[must_use]
    pub const fn ext_has_token(self) -> bool {
        !matches!(self, Self::V2)
    }
}

/// The two kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// One sequence: `llama_state_seq_save_file`.
    Sequence,
    /// The whole context: `llama_state_save_file`.
    Session,
}

impl FileKind {
    /// First word of the file: 'ggsq' or 'ggsn'.
    #[must_use]
    pub const fn magic(self) -> u32 {
        match self {
            Self::Sequence => 0x6767_7371,
            Self::Session => 0x6767_736e,
        }
    }

    /// The name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sequence => "sequence state",
            Self::Session => "session",
        }
    }

    /// What is restored from it, in messages.
    #[must_use]
    pub const fn restored(self) -> &'static str {
        match self {
            Self::Sequence => "sequence state",
            Self::Session => "session state",
        }
    }

    const fn version_number(self, version: StateVersion) -> u32 {
        match self {
            Self::Sequence => version.seq_version(),
            Self::Session => version.session_version(),
        }
    }
}

/// The start of a file: magic, version, token count. The tokens follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHeader {
    /// Which kind of file.
    pub kind: FileKind,
    /// Layout of the memory state in it.
    pub version: StateVersion,
    /// Number of tokens (i32 words) after the header.
    pub n_tokens: u32,
}

impl FileHeader {
    /// Bytes of the header.
    pub const LEN: usize = 12;

    /// Reads the header of a file of `kind`.
    ///
    /// # Errors
    /// [`Error::UnknownVersion`] for another magic or a version that is not read, [`Error::Truncated`].
    pub fn read(cursor: &mut Cursor<'_>, kind: FileKind) -> Result<Self> {
        let magic = cursor.u32("file magic")?;
        let number = cursor.u32("file version")?;
        let version = [StateVersion::V2, StateVersion::V3, StateVersion::V4]
            .into_iter()
            .find(|&version| magic == kind.magic() && number == kind.version_number(version))
            .ok_or(Error::UnknownVersion { kind: kind.name(), magic, version: number })?;
        let n_tokens = cursor.u32("token count")?;
        Ok(Self { kind, version, n_tokens })
    }

    /// The header's bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let words = [self.kind.magic(), self.kind.version_number(self.version), self.n_tokens];
        for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }
}

/// The bytes of a sequence blob's header.
pub(crate) fn seq_blob_header(seq_id: SeqId) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&SEQ_BLOB_MAGIC.to_le_bytes());
    out[4..].copy_from_slice(&seq_id.to_le_bytes());
    out
}

/// Reads a sequence blob's header; returns the source sequence as the blob names it (any value).
pub(crate) fn read_seq_blob_header(input: &mut impl BoundedRead) -> Result<SeqId> {
    let magic = input.u32("sequence state magic")?;
    if magic != SEQ_BLOB_MAGIC {
        return Err(Error::corrupt(
            "wrong sequence state magic",
            format_args!("{magic:08x}"),
            format_args!("{SEQ_BLOB_MAGIC:08x}"),
        ));
    }
    Ok(input.u32("seq_id")?.cast_signed())
}

/// The tokens in the token field of a file.
pub fn tokens_of(bytes: &[u8]) -> impl Iterator<Item = Token> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|&word| Token::from_le_bytes(word))
}

/// The token field that holds `tokens`.
#[must_use]
pub fn token_bytes(tokens: &[Token]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_an_unknown_version_is_refused_with_llama_cpps_text() {
        let bytes = [0x71, 0x73, 0x67, 0x67, 5, 0, 0, 0, 0, 0, 0, 0];
        let error = FileHeader::read(&mut Cursor::new(&bytes), FileKind::Sequence).unwrap_err();
        assert_eq!(error.to_string(), "unknown (magic, version) for sequence state file: 67677371, 00000005");
    }

    #[test]
    fn versions_2_to_4_and_9_to_11_are_read() {
        for version in [StateVersion::V2, StateVersion::V3, StateVersion::V4] {
            for kind in [FileKind::Sequence, FileKind::Session] {
                let header = FileHeader { kind, version, n_tokens: 7 };
                let bytes = header.to_bytes();
                assert_eq!(FileHeader::read(&mut Cursor::new(&bytes), kind).unwrap(), header);
            }
        }
        assert_eq!(StateVersion::CURRENT.session_version(), 11);
    }
}
