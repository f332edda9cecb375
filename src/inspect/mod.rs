//! What is in a file or a blob, read without a context.
//!
//! [`inspect`] describes a sequence file, the file of a whole context, or a state in memory: header, tokens, sections, cells,
//! where each tensor lies, and the appendices. [`verify`] says which part of it is damaged, [`diff`] where two differ.
//!
//! A memory state does not say everything that it takes to read it: whether cells have an ext, which layers have a V, what kind a
//! section is of. A slot file has that in its geometry. Of other files the interpretation is looked for under which the
//! state ends exactly where it has to, and [`Basis`] says so.
//!
//! Nothing is copied from the input but names and identities; a description takes a few bytes for each tensor.

mod appendices;
mod cells;
mod diff;
mod dsv4;
mod reading;
mod search;
mod state;
mod verify;

use std::ops::Range;

use serde::Serialize;

pub use appendices::{Appendices, Damage};
pub use cells::{Cell, CellExtLayout, Cells, Run, Runs};
pub use state::{Basis, DataHeader, Dsv4Cache, Dsv4Mode, Dsv4State, Section, Shape, State, Stream, Tensor};

pub use diff::{Diff, FieldDiff, Inspected, SectionDiff, StateDiff, TensorDiff, TokenDiff, Value, diff};
pub use verify::{Outcome, Verification, VerifiedPart, verify};

use crate::error::{Error, Result};
use crate::format::{
    Cursor, FileHeader, FileKind, SEQ_BLOB_HEADER_LEN, SEQ_BLOB_MAGIC, StateVersion, tokens_of,
};
use crate::types::{SeqId, Token};
use search::{Known, understand};

/// What an input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A file of one sequence ('ggsq'): `llama_state_seq_save_file`, or a slot file.
    SequenceFile,
    /// A file of a whole context ('ggsn'): `llama_state_save_file`.
    SessionFile,
    /// The state of one sequence: `llama_state_seq_get_data_ext`.
    SequenceState,
    /// The state of a whole context: `llama_state_get_data`. It begins with the length of the model's architecture.
    ContextState,
}

impl Kind {
    /// In words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SequenceFile => "sequence file",
            Self::SessionFile => "whole-context file",
            Self::SequenceState => "sequence state",
            Self::ContextState => "whole-context state",
        }
    }
}

/// What is in a file or a blob. Offsets count from its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Description {
    /// What it is.
    pub kind: Kind,
    /// Its bytes.
    pub bytes: u64,
    /// The version that a file names.
    pub version: Option<u32>,
    /// The sequence that a blob names; a reader ignores it.
    pub seq_id: Option<SeqId>,
    /// Where the token field lies; files alone have one.
    pub tokens: Option<Range<u64>>,
    /// The model's architecture, of a whole context.
    pub arch: Option<String>,
    /// The memory state.
    pub state: State,
    /// What follows it.
    pub appendices: Appendices,
}

impl Description {
    /// The token field. `input`: what was inspected.
    pub fn tokens<'a>(&self, input: &'a [u8]) -> impl Iterator<Item = Token> + use<'a> {
        tokens_of(slice(input, self.tokens.as_ref().unwrap_or(&(0..0))))
    }
}

/// Those bytes of the input; none of one that has become shorter.
fn slice<'a>(input: &'a [u8], range: &Range<u64>) -> &'a [u8] {
    let place = |at: u64| usize::try_from(at).ok();
    let range = place(range.start).zip(place(range.end));
    range.and_then(|(start, end)| input.get(start..end)).unwrap_or_default()
}

/// Longest name of an architecture; those of llama.cpp have less than half of it.
const MAX_ARCH: u32 = 64;

/// Describes a file, or a state in memory.
///
/// # Errors
/// [`Error::UnknownVersion`] for a file that is of no known kind or version; [`Error::Truncated`] for one that ends before its memory
/// state. A memory state that does not make sense is described as far as it does: [`Basis::Incomplete`].
pub fn inspect(input: &[u8]) -> Result<Description> {
    let mut cursor = Cursor::new(input);
    let magic = cursor.clone().u32("magic")?;
    if magic == FileKind::Sequence.magic() {
        return sequence_file(input, cursor);
    }
    if magic == FileKind::Session.magic() {
        let header = FileHeader::read(&mut cursor, FileKind::Session)?;
        let tokens = token_field(&mut cursor, header)?;
        let arch = arch(&mut cursor)?;
        let state = understand(Known::whole_context(input, cursor.offset() as u64), &[header.version]);
        return Ok(Description {
            kind: Kind::SessionFile,
            version: Some(header.version.session_version()),
            tokens: Some(tokens),
            arch: Some(arch),
            ..Description::of_state(input, state)
        });
    }
    if magic == SEQ_BLOB_MAGIC {
        return blob(input);
    }
    if let Some(found) = context_state(input) {
        return Ok(found);
    }
    cursor.u32("magic")?;
    let version = cursor.u32("version").unwrap_or(0);
    Err(Error::UnknownVersion { kind: FileKind::Sequence.name(), magic, version })
}

/// The state of a whole context, which has no magic: if it begins like one.
fn context_state(input: &[u8]) -> Option<Description> {
    let mut cursor = Cursor::new(input);
    let arch = arch(&mut cursor).ok()?;
    let state = understand(Known::whole_context(input, cursor.offset() as u64), &NEWEST_FIRST);
    // Without a name, anything that begins with zeros does.
    if arch.is_empty() && matches!(state.basis, Basis::Incomplete { .. }) {
        return None;
    }
    let of_state = Description::of_state(input, state);
    Some(Description { kind: Kind::ContextState, arch: Some(arch), ..of_state })
}

/// A blob does not say which version it is of.
const NEWEST_FIRST: [StateVersion; 3] = [StateVersion::V4, StateVersion::V3, StateVersion::V2];

/// Describes the state of a sequence in memory: also those in the appendices of a slot file.
///
/// # Errors
/// [`Error::Truncated`], [`Error::Corrupt`] for another magic.
pub fn blob(input: &[u8]) -> Result<Description> {
    let seq_id = crate::format::read_seq_blob_header(&mut Cursor::new(input))?;
    let known = Known {
        bytes: input,
        start: SEQ_BLOB_HEADER_LEN,
        whole: false,
        is_file: false,
        may_end_before: false,
        geometry: None,
    };
    let state = understand(known, &NEWEST_FIRST);
    Ok(Description { seq_id: Some(seq_id), ..Description::of_state(input, state) })
}

fn sequence_file(input: &[u8], mut cursor: Cursor<'_>) -> Result<Description> {
    let header = FileHeader::read(&mut cursor, FileKind::Sequence)?;
    let tokens = token_field(&mut cursor, header)?;
    let mut appendices = Appendices::at_end(input, FileHeader::LEN as u64);
    // The list says where the state is, whatever the header says.
    let listed = appendices.state_by_list();
    let known = Known {
        bytes: listed.as_ref().map_or(input, |state| slice(input, &(0..state.end))),
        start: listed.as_ref().map_or(cursor.offset() as u64, |state| state.start),
        whole: false,
        is_file: true,
        may_end_before: listed.is_none(),
        geometry: appendices.integrity.as_ref().map(|integrity| &integrity.geometry[..]),
    };
    let state = understand(known, &[header.version]);
    let is_understood = !matches!(state.basis, Basis::Incomplete { .. });
    appendices.read(input, is_understood.then_some(state.bytes.end));
    Ok(Description {
        kind: Kind::SequenceFile,
        version: Some(header.version.seq_version()),
        tokens: Some(tokens),
        appendices,
        ..Description::of_state(input, state)
    })
}

impl Description {
    /// Of the state of a sequence, with nothing around it.
    fn of_state(input: &[u8], state: State) -> Self {
        Self {
            kind: Kind::SequenceState,
            bytes: input.len() as u64,
            version: None,
            seq_id: None,
            tokens: None,
            arch: None,
            state,
            appendices: Appendices::default(),
        }
    }
}

impl<'a> Known<'a> {
    /// It has no appendices, and takes all that is left.
    fn whole_context(bytes: &'a [u8], start: u64) -> Self {
        Self { bytes, start, whole: true, is_file: true, may_end_before: false, geometry: None }
    }
}

fn token_field(cursor: &mut Cursor<'_>, header: FileHeader) -> Result<Range<u64>> {
    let start = cursor.offset() as u64;
    cursor.bytes("tokens", 4 * u64::from(header.n_tokens))?;
    Ok(start..cursor.offset() as u64)
}

/// The name of an architecture.
fn arch(cursor: &mut Cursor<'_>) -> Result<String> {
    let len = cursor.u32("arch length")?;
    if len > MAX_ARCH {
        return Err(Error::corrupt("arch length", len, format_args!("at most {MAX_ARCH}")));
    }
    let name = cursor.bytes("arch", len.into())?;
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err(Error::corrupt("arch", name.escape_ascii(), "a name"));
    }
    Ok(String::from_utf8_lossy(name).into_owned())
}
