//! The last appendix of a slot file: whose state it is, and a checksum for each part.
//!
//! ```text
//! u32 'KVSI' | u32 version 1 | u64 payload_len | payload | u32 crc32c of every byte of the file before this field
//!
//! payload: records of u32 tag | u32 len | len bytes; unknown tags are skipped
//!     'MODL' | fingerprint of the model and its settings, the caller's
//!     'GEOM' | u32 n_section, and for each: u32 kind | u32 n_setting | n_setting times: u32 tag | u32 value
//!              u32 n_tensor | n_tensor times: u32 tag | u32 layer | i32 type | u32 n_embd
//!     'SALT' | the caller's
//!     'META' | the caller's
//!     'PART' | u32 kind | u32 crc32c | u64 bytes     once for each part, in order, without a gap, from the start of the file
//!     'SIZE' | u64 bytes of this appendix            the last record: it is found from the end of the file
//! ```
//!
//! The last checksum follows from those of the parts and the bytes of the appendix, so whoever reads nothing but the appendix
//! knows whether it is whole.

use std::fmt;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::Cursor;
use super::appendix::{BoundedRead, PartKind, head, read_head};
use super::crc32c::{crc32c_append, crc32c_combine};
use super::ggml::GgmlType;
use crate::error::{Error, Result};

const VERSION: u32 = 1;

/// Largest payload: identities are fingerprints, not models.
const MAX_PAYLOAD: u64 = 16 << 20;

/// Magic, version and payload length, and the checksum.
const FRAME: u64 = 16 + 4;

/// The record that the payload ends with, and the checksum.
const TAIL: usize = 8 + 8 + 4;

const MODEL: [u8; 4] = *b"MODL";
const GEOMETRY: [u8; 4] = *b"GEOM";
const SALT: [u8; 4] = *b"SALT";
const METADATA: [u8; 4] = *b"META";
const PART: [u8; 4] = *b"PART";
const SIZE: [u8; 4] = *b"SIZE";

/// Whose state a file holds, as the caller says it. What is empty is not said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Fingerprint of the model and its settings.
    pub model: Vec<u8>,
    /// What states must share beside the model, for those who keep them apart.
    pub salt: Vec<u8>,
    /// Anything; it is compared with nothing.
    pub metadata: Vec<u8>,
}

/// Bytes in hexadecimal; of the salt, which may be a secret, what tells it apart.
impl Serialize for Identity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Identity", 3)?;
        fields.serialize_field("model", &hexadecimal(&self.model))?;
        fields.serialize_field("salt", &self.salt_digest())?;
        fields.serialize_field("metadata", &hexadecimal(&self.metadata))?;
        fields.end()
    }
}

impl Identity {
    /// Tells salts apart without showing them.
    #[must_use]
    pub fn salt_digest(&self) -> String {
        if self.salt.is_empty() {
            return "none".to_owned();
        }
        format!("{} bytes of crc32c {:08x}", self.salt.len(), crc32c_append(0, &self.salt))
    }
}

/// Two digits for each byte.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    use fmt::Write;

    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // A string takes everything.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The beginning of a fingerprint, as it stands or in hexadecimal.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(64)];
    if start.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return format!("'{}'", start.escape_ascii());
    }
    hexadecimal(start)
}

/// Four letters: the name of a setting or a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Tag(pub [u8; 4]);

impl Serialize for Tag {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.trim_ascii_end().escape_ascii().fmt(f)
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Type and width of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TensorShape {
    /// Which of the layer's tensors.
    pub tag: Tag,
    /// Its layer.
    pub layer: u32,
    /// Type of the elements.
    pub ggml_type: GgmlType,
    /// Elements of a cell or row.
    pub n_embd: u32,
}

/// What a section's states depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SectionGeometry {
    /// Number of its kind: 1 attention, 2 recurrent, 3 shared, 4 the compressed half of DSV4.
    pub kind: u32,
    /// Settings; one that is not named is 0.
    pub settings: Vec<(Tag, u32)>,
    /// Tensors, in the order of a state.
    pub tensors: Vec<TensorShape>,
}

impl SectionGeometry {
    /// Kind of an attention cache.
    pub const ATTENTION: u32 = 1;
    /// Kind of the states of recurrent layers.
    pub const RECURRENT: u32 = 2;
    /// Kind of a section whose cells are the target's.
    pub const SHARED: u32 = 3;
    /// Kind of the compressed half of a DSV4 memory.
    pub const DSV4: u32 = 4;

    /// The setting that says how many bytes an ext takes in the cells of an attention section.
    pub const CELL_EXT: Tag = Tag(*b"CEXT");

    /// What a section of that kind is called in messages.
    #[must_use]
    pub fn kind_name(kind: u32) -> String {
        match kind {
            Self::ATTENTION => "attention".to_owned(),
            Self::RECURRENT => "recurrent".to_owned(),
            Self::SHARED => "shared".to_owned(),
            Self::DSV4 => "dsv4".to_owned(),
            other => format!("{other}, unknown"),
        }
    }

    /// The value of a setting.
    #[must_use]
    pub fn setting(&self, tag: Tag) -> Option<u32> {
        self.settings.iter().find(|(other, _)| *other == tag).map(|(_, value)| *value)
    }
}

/// A part of the file, all of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Which.
    pub kind: PartKind,
    /// Checksum of its bytes.
    pub crc32c: u32,
    /// Bytes.
    pub len: u64,
}

/// Identity and integrity of a slot file.
///
/// Invariant of one that was read: the checksum at its end holds, and the parts are the whole of what is before it, the header
/// and the memory state first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Integrity {
    /// Whose state it is.
    pub identity: Identity,
    /// The sections of the target; empty where nobody says them.
    pub geometry: Vec<SectionGeometry>,
    /// The parts of the file, in order.
    pub parts: Vec<Part>,
}

impl Integrity {
    /// Bytes at the end of a file by which the appendix is found.
    pub const TAIL_LEN: usize = TAIL;

    /// Where the appendix begins in a file that has `file_len` bytes and ends with `tail`, if that is its end.
    #[must_use]
    pub fn find(file_len: u64, tail: &[u8; TAIL]) -> Option<u64> {
        let (record, size) = tail.split_first_chunk::<8>()?;
        let size = u64::from_le_bytes(*size.first_chunk()?);
        let is_size = record.starts_with(&SIZE) && record.ends_with(&8_u32.to_le_bytes());
        file_len.checked_sub(size).filter(|_| is_size && size >= TAIL as u64)
    }

    /// Reads the appendix.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Corrupt`] if it is damaged, or of another file.
    pub fn read(input: &mut impl BoundedRead) -> Result<Self> {
        let start = input.offset();
        read_head(input, PartKind::INTEGRITY, VERSION)?;
        let len = input.u64("payload length")?;
        if len > MAX_PAYLOAD {
            let expected = format_args!("at most {MAX_PAYLOAD}");
            return Err(Error::corrupt("payload length", len, expected));
        }
        if len > input.left() {
            let left = input.left();
            return Err(Error::Truncated { field: "payload", offset: input.offset(), need: len, left });
        }
        let mut payload = vec![0; usize::try_from(len).unwrap_or(0)];
        input.read("payload", &mut payload)?;
        let found = Self::parse(&payload)?;
        found.check_parts(start)?;
        let (stored, expected) = (input.u32("checksum")?, found.checksum(&payload));
        if stored != expected {
            let (got, expected) = (format_args!("{stored:08x}"), format_args!("{expected:08x}"));
            return Err(Error::corrupt("crc32c of the file by its parts", got, expected));
        }
        Ok(found)
    }

    fn parse(payload: &[u8]) -> Result<Self> {
        let mut found = Self { identity: Identity::default(), geometry: Vec::new(), parts: Vec::new() };
        let mut records = Cursor::new(payload);
        while Cursor::left(&records) > 0 {
            let tag = records.u32("tag")?.to_le_bytes();
            let len = records.u32("record length")?;
            let bytes = records.bytes("record", len.into())?;
            match tag {
                MODEL => found.identity.model = bytes.to_vec(),
                SALT => found.identity.salt = bytes.to_vec(),
                METADATA => found.identity.metadata = bytes.to_vec(),
                GEOMETRY => found.geometry = read_geometry(bytes)?,
                PART => found.parts.push(read_part(bytes)?),
                _ => {}
            }
        }
        Ok(found)
    }

    fn check_parts(&self, start: u64) -> Result<()> {
        let kinds: Vec<_> = self.parts.iter().take(2).map(|part| part.kind).collect();
        if kinds != [PartKind::HEAD, PartKind::STATE] {
            return Err(Error::corrupt(
                "first parts",
                format_args!("{kinds:?}"),
                "header and tokens, memory state",
            ));
        }
        let end = self.parts.iter().try_fold(0_u64, |end, part| end.checked_add(part.len));
        if end != Some(start) {
            let got = end.map_or_else(|| "more than 64 bits".to_owned(), |end| end.to_string());
            return Err(Error::corrupt("bytes of the parts", got, start));
        }
        Ok(())
    }

    /// The checksum at the end: of all parts, and of the appendix with this payload before it.
    fn checksum(&self, payload: &[u8]) -> u32 {
        let combine = |crc, part: &Part| crc32c_combine(crc, part.crc32c, part.len);
        let parts = self.parts.iter().fold(0, combine);
        let frame = crc32c_append(parts, &frame_head(payload.len()));
        crc32c_append(frame, payload)
    }

    /// The bytes of the appendix. Their number does not depend on checksums.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the identity is too large.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let Self { identity: Identity { model, salt, metadata }, geometry, parts } = self;
        let mut payload = Vec::new();
        let mut record = |tag: [u8; 4], bytes: &[u8]| {
            payload.extend(tag);
            // Cut short only where the payload is refused below.
            payload.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
            payload.extend(bytes);
        };
        for (tag, bytes) in [(MODEL, model), (SALT, salt), (METADATA, metadata)] {
            if !bytes.is_empty() {
                record(tag, bytes);
            }
        }
        if !geometry.is_empty() {
            record(GEOMETRY, &geometry_bytes(geometry));
        }
        for Part { kind, crc32c, len } in parts {
            let words = u64::from(kind.magic()) | u64::from(*crc32c) << 32;
            record(PART, &[words.to_le_bytes(), len.to_le_bytes()].concat());
        }
        let size = FRAME + payload.len() as u64 + 16;
        payload.extend(SIZE);
        payload.extend(8_u32.to_le_bytes());
        payload.extend(size.to_le_bytes());
        if payload.len() as u64 > MAX_PAYLOAD {
            let reason =
                format!("{} bytes with the geometry, at most {MAX_PAYLOAD} are possible", payload.len());
            return Err(Error::arg("identity", reason));
        }
        let checksum = self.checksum(&payload);
        Ok([&frame_head(payload.len())[..], &payload, &checksum.to_le_bytes()].concat())
    }
}

fn frame_head(payload_len: usize) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&head(PartKind::INTEGRITY, VERSION));
    out[8..].copy_from_slice(&(payload_len as u64).to_le_bytes());
    out
}

fn read_part(bytes: &[u8]) -> Result<Part> {
    let mut input = Cursor::new(bytes);
    let kind = PartKind::from_magic(input.u32("part kind")?);
    Ok(Part { kind, crc32c: input.u32("part crc32c")?, len: input.u64("part length")? })
}

fn read_geometry(bytes: &[u8]) -> Result<Vec<SectionGeometry>> {
    let mut input = Cursor::new(bytes);
    let mut sections = Vec::new();
    for _ in 0..input.u32("n_section")? {
        let kind = input.u32("section kind")?;
        let mut settings = Vec::new();
        for _ in 0..input.u32("n_setting")? {
            settings.push((Tag(input.u32("setting")?.to_le_bytes()), input.u32("value of a setting")?));
        }
        let mut tensors = Vec::new();
        for _ in 0..input.u32("n_tensor")? {
            let tag = Tag(input.u32("tensor")?.to_le_bytes());
            let (layer, number) = (input.u32("layer of a tensor")?, input.i32("type of a tensor")?);
            let ggml_type = GgmlType::from_i32(number)
                .ok_or_else(|| Error::corrupt("type of a tensor", number, "a type of ggml"))?;
            tensors.push(TensorShape { tag, layer, ggml_type, n_embd: input.u32("n_embd of a tensor")? });
        }
        sections.push(SectionGeometry { kind, settings, tensors });
    }
    Ok(sections)
}

fn geometry_bytes(sections: &[SectionGeometry]) -> Vec<u8> {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let mut words = vec![count(sections.len())];
    for SectionGeometry { kind, settings, tensors } in sections {
        words.extend([*kind, count(settings.len())]);
        words.extend(settings.iter().flat_map(|(tag, value)| [u32::from_le_bytes(tag.0), *value]));
        words.push(count(tensors.len()));
        for TensorShape { tag, layer, ggml_type, n_embd } in tensors {
            words.extend([u32::from_le_bytes(tag.0), *layer, ggml_type.as_i32().cast_unsigned(), *n_embd]);
        }
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}
