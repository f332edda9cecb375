//! The manifest: what the files of the folder were when they were saved, and when their slots were used.
//!
//! It is written last, and never the only thing that says that a file is there: without it, or with one that is older than the
//! files, the folder says what it holds. No path is read from it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::session::replace::{Links, Replacement};
use crate::session::slot::SavedFile;
use crate::session::state_file::open_regular;

/// Its name in the folder.
pub(super) const NAME: &str = "auto-slots.json";

const VERSION: u32 = 1;

/// Larger ones are not read: a slot takes some 200 bytes.
const MAX_BYTES: u64 = 16 << 20;

/// The latest use that counts, 285,000 years from now: numbers of JSON are exact up to there, and there is room for later ones.
pub(super) const LATEST_USE_MS: u64 = 1 << 53;

/// What is known of a slot's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub slot_id: u32,
    /// Words of the token field.
    pub n_tokens: u32,
    /// When the slot was used last, in milliseconds since 1970; no two slots have the same.
    pub last_use_ms: u64,
    /// What its file was when it was saved; none if somebody else saved it.
    pub target: Option<SavedFile>,
    /// The same of its sidecar, if it was saved with one.
    pub sidecar: Option<SavedFile>,
}

/// The entries, by slot.
pub(super) type Entries = BTreeMap<u32, Entry>;

#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    version: u32,
    slots: Vec<Entry>,
}

/// Reads the manifest of a folder; `None` if it has none.
///
/// # Errors
/// The reason for which it cannot be used.
pub(super) fn read(directory: &Path) -> Result<Option<Entries>, String> {
    let mut bytes = Vec::new();
    match open_regular(&directory.join(NAME)) {
        Ok((file, _)) => {
            file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?
        }
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        Err(Error::Io { source, .. }) => return Err(source.to_string()),
        Err(error) => return Err(error.to_string()),
    };
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("more than {MAX_BYTES} bytes"));
    }
    let Version { version } = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("of version {version}, {VERSION} is known"));
    }
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let mut entries = Entries::new();
    for entry in manifest.slots {
        let Entry { slot_id, last_use_ms, .. } = entry;
        if last_use_ms > LATEST_USE_MS {
            return Err(format!(
                "slot {slot_id} has last_use_ms {last_use_ms}, at most {LATEST_USE_MS} is possible"
            ));
        }
        if entries.insert(slot_id, entry).is_some() {
            return Err(format!("slot {slot_id} is there twice"));
        }
    }
    Ok(Some(entries))
}

/// Replaces the manifest of a folder.
pub(super) fn write(directory: &Path, entries: &Entries, sync: bool) -> Result<()> {
    let path = directory.join(NAME);
    let failed = |op, source| Error::Io { op, path: path.display().to_string(), source };
    let manifest = Manifest { version: VERSION, slots: entries.values().cloned().collect() };
    let mut text = serde_json::to_vec_pretty(&manifest).map_err(|error| failed("write", error.into()))?;
    text.push(b'\n');
    let mut file = Replacement::create(&path, Links::Replaced)?;
    file.writer().write_all(&text).map_err(|source| failed("write", source))?;
    file.commit(text.len() as u64, sync)
}
