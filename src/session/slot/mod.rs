//! Slot files: a sequence file with appendices for all that a server keeps of a slot beside the target's state.
//!
//! In front a slot file is a sequence file, byte for byte, and llama.cpp reads it as one. Behind the memory state come the
//! checkpoints, the draft state, and last the checksums and the identity: `docs/format.md`.

mod appendices;
mod expected;
mod geometry;
mod identity;
mod load;
mod save;
mod snapshot;
mod transfer;
mod verifier;

use std::path::{Path, PathBuf};

use super::temporary::is_temporary;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, Identity};
use crate::memory::Kept;
use crate::types::{Pos, SeqId, Token};

pub use expected::Require;
pub use snapshot::SlotSnapshot;

pub(super) use expected::Unrecorded;
pub(super) use save::{SavedFile, SlotFiles, WrittenSlot};
pub(super) use transfer::OpenedSlot;

/// What a slot file is to hold beside the state of the target's sequence.
#[derive(Debug, Default)]
pub struct SlotContents<'a> {
    /// The token field, as it stands: a server's own payload, if it packs one.
    pub tokens: &'a [Token],
    /// Context checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint<&'a [u8]>>,
    /// The draft model's context and its sequence.
    pub draft: Option<(&'a mut Context, SeqId)>,
    /// State of the speculative driver.
    pub driver: &'a [u8],
    /// Whose state it is.
    pub identity: Identity,
    /// The draft's state and the driver's go into a file of their own, the sidecar, which stands beside the slot file and ends in
    /// `.drft`. It is a slot file too: that of the draft's sequence.
    pub sidecar: bool,
}

/// How much of a file is compared with its checksums before anything changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verify {
    /// Nothing, but for those of the identity and the checksums themselves.
    #[default]
    None,
    /// Header and tokens.
    Headers,
    /// Everything: the file is read once for that, and again for what is restored. Whoever changes a slot file replaces it, as a
    /// save does: bytes that are overwritten in between are not noticed.
    Full,
}

/// How a slot file is to be loaded.
#[derive(Debug)]
pub struct SlotLoadParams<'a> {
    /// Most tokens that the caller takes.
    pub n_token_capacity: usize,
    /// Checkpoints to keep, the last ones.
    pub n_ctx_checkpoints: usize,
    /// The draft model's context and its sequence, which is replaced or, if there is nothing to restore, emptied.
    pub draft: Option<(&'a mut Context, SeqId)>,
    /// Whose state it has to be. The model is compared where both sides say it, the salt always; a file that says nothing of
    /// either is loaded, and noted.
    pub identity: Identity,
    /// What is verified. [`Verify::Full`] reads all of the file, whatever is wanted of it.
    pub verify: Verify,
    /// Only positions below this one are restored, of the target and of the draft: a prompt without its reply. Checkpoints that
    /// have seen others are left out, and so is the state of the speculative driver, if anything is.
    pub p1: Option<Pos>,
    /// What the file has to have to be loaded.
    pub require: Require,
}

impl Default for SlotLoadParams<'_> {
    fn default() -> Self {
        Self {
            n_token_capacity: usize::MAX,
            n_ctx_checkpoints: 32,
            draft: None,
            identity: Identity::default(),
            verify: Verify::default(),
            p1: None,
            require: Require::default(),
        }
    }
}

/// What became of the draft state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftOutcome {
    /// The file has none.
    Absent,
    /// It is restored: so many bytes.
    Restored(u64),
    /// It could not be used, for this reason.
    Dropped(String),
}

/// What a slot file gave. The draft sequence, if one was named, is empty unless its state was restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedSlot {
    /// The token field.
    pub tokens: Vec<Token>,
    /// What was restored of the target's state.
    pub kept: Kept,
    /// Bytes of the target's memory state in the file.
    pub target_bytes: u64,
    /// Where a server that appends to the file once it is saved has begun to: behind the memory state, or behind the checksums if
    /// they come next.
    pub append_start: u64,
    /// The checkpoints that were kept, oldest first.
    pub checkpoints: Vec<Checkpoint<Vec<u8>>>,
    /// Checkpoints of the file.
    pub n_checkpoints_in_file: usize,
    /// The draft state.
    pub draft: DraftOutcome,
    /// State of the speculative driver; `None` if the file has none, or a draft state that was dropped.
    pub driver: Option<Vec<u8>>,
    /// What was verified: [`Verify::None`] if the file has no checksums.
    pub verified: Verify,
    /// What the file says of whose state it is.
    pub identity: Identity,
    /// What is missing, damaged, unknown or converted, in words.
    pub notes: Vec<String>,
}

/// The sidecar of a slot file: a name of its own, or [`Error::InvalidArgument`].
fn sidecar_path(path: &Path) -> Result<PathBuf> {
    let sidecar = path.with_extension("drft");
    if sidecar == path {
        return Err(Error::arg("filename", format!("'{}', which is the name of a sidecar", path.display())));
    }
    Ok(sidecar)
}

/// The path of the slot file `name` in `directory`, for names that come from a client.
///
/// # Errors
/// [`Error::InvalidArgument`] for a name that is empty or names more than a file: one with a separator, and `.` and `..`; and
/// for names of temporary files.
pub fn slot_path(directory: impl AsRef<Path>, name: &str) -> Result<PathBuf> {
    let refused =
        |reason: &str| Err(Error::arg("filename", format!("'{}', {reason}", name.escape_default())));
    if name.is_empty() || name == "." || name == ".." {
        return refused("is not the name of a file");
    }
    // Those of every system, wherever this runs: a name means the same everywhere.
    if name.contains(['/', '\\', ':', '\0']) {
        return refused("a name has no separator");
    }
    if is_temporary(name) {
        return refused("is the name of a temporary file");
    }
    Ok(directory.as_ref().join(name))
}
