//! The folder of an auto-save: its lock, its files, and what is removed when they are too many.
//!
//! Order of steps, and what a process that is killed between two of them leaves:
//!
//! - save: the slot file is renamed into its place, its sidecar, then slots that were used before it are removed for the budget,
//!   then the manifest is renamed. Before the first rename everything is old. After it the slot file is another than the
//!   manifest says, but whole by its own checksums, which is what a restore asks then; a sidecar of other tokens is not used; and
//!   whatever the budget still asks for is removed when the folder is opened again, where the time of the new file counts and not
//!   that of the manifest. So nothing is removed before that for which it makes room is there, and what is removed was used
//!   before all that stays.
//! - remove: the slot file, its sidecar, the manifest. After the first, the manifest names a file that is gone, which makes a cold
//!   start, and the sidecar is an orphan, which the next to open the folder removes. The other way round the file would be found
//!   again: what was removed stays removed.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::manifest::{self, Entries, Entry, LATEST_USE_MS};
use crate::error::{Error, Result};
use crate::session::slot::{SavedFile, WrittenSlot};
use crate::session::{seq_file_token_count, temporary};

const LOCK_NAME: &str = "auto-slots.lock";

/// Milliseconds that the time of a file may lie before it was written: Linux takes that of the clock's last tick, of which there are at
/// least 100 a second.
const FILE_CLOCK_MS: u64 = 10;

/// What keeps others out of the folder.
#[derive(Debug)]
enum Lock {
    /// Until it is dropped, or the process ends.
    Held { _lock: HeldLock },
    /// The file system has no locks.
    Unsupported,
    /// The lock file can be neither opened nor created: nothing is written before it can be.
    Missing,
}

/// A locked file. Dropped, it is unlocked: to close it is not enough while a child has it too, between fork and exec.
#[derive(Debug)]
struct HeldLock(File);

impl Drop for HeldLock {
    fn drop(&mut self) {
        // It is closed next, which has to do then.
        drop(self.0.unlock());
    }
}

/// The files of a folder, and what is known of them.
#[derive(Debug)]
pub(super) struct Folder {
    directory: PathBuf,
    max_bytes: u64,
    sync: bool,
    lock: Lock,
    entries: Entries,
    /// Whether the entries are other than those of the manifest.
    is_changed: bool,
}

/// The names of a slot's files.
pub(super) fn target_path(directory: &Path, slot_id: u32) -> PathBuf {
    directory.join(format!("auto-slot{slot_id}.bin"))
}

pub(super) fn sidecar_path(directory: &Path, slot_id: u32) -> PathBuf {
    directory.join(format!("auto-slot{slot_id}.drft"))
}

/// The slot whose file has this name.
fn slot_of(name: &str, suffix: &str) -> Option<u32> {
    let number = name.strip_prefix("auto-slot")?.strip_suffix(suffix)?;
    number.parse().ok().filter(|slot_id: &u32| slot_id.to_string() == number)
}

fn io_error(op: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { op, path: path.display().to_string(), source }
}

impl Folder {
    /// Takes the folder, and finds out what it holds. `notes` get what is odd.
    ///
    /// # Errors
    /// [`Error::Locked`]; [`Error::Io`] for a folder that can be neither read nor created.
    pub fn open(directory: &Path, max_bytes: u64, sync: bool, notes: &mut Vec<String>) -> Result<Self> {
        let directory = create(directory)?;
        let lock = acquire(&directory, notes).or_else(|error| match error {
            Error::Io { .. } => {
                notes.push(format!("nothing can be saved before this is otherwise: {error}"));
                Ok(Lock::Missing)
            }
            error => Err(error),
        })?;
        let mut folder =
            Self { directory, max_bytes, sync, lock, entries: Entries::new(), is_changed: false };
        folder.find(notes)?;
        if !matches!(folder.lock, Lock::Missing) {
            temporary::remove_stale(&folder.directory);
            folder.evict(None).unwrap_or_else(|error| notes.push(error.to_string()));
        }
        Ok(folder)
    }

    /// The folder, by a path that stays the same.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Compares the manifest with the files: what is there counts.
    fn find(&mut self, notes: &mut Vec<String>) -> Result<()> {
        let (mut targets, mut sidecars) = (BTreeSet::new(), BTreeSet::new());
        let failed = |source| io_error("list", &self.directory, source);
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some(name) = name.to_str() else { continue };
            targets.extend(slot_of(name, ".bin"));
            sidecars.extend(slot_of(name, ".drft"));
        }
        let recorded = manifest::read(&self.directory).unwrap_or_else(|reason| {
            notes.push(format!("{} is not used: {reason}", self.directory.join(manifest::NAME).display()));
            None
        });
        let recorded = recorded.unwrap_or_default();
        for (&slot_id, entry) in &recorded {
            if !targets.contains(&slot_id) {
                let target = target_path(&self.directory, slot_id);
                notes.push(format!("{} is gone: slot {slot_id} starts cold", target.display()));
            } else if entry.sidecar.is_some() && !sidecars.contains(&slot_id) {
                let sidecar = sidecar_path(&self.directory, slot_id);
                let sidecar = sidecar.display();
                notes.push(format!("{sidecar} is gone: the draft of slot {slot_id} starts empty"));
            }
        }
        for &slot_id in &targets {
            match self.found(slot_id, recorded.get(&slot_id)) {
                Ok(entry) => drop(self.entries.insert(slot_id, entry)),
                Err(error) => notes.push(error.to_string()),
            }
        }
        self.is_changed = self.entries != recorded;
        if !matches!(self.lock, Lock::Missing) {
            for &slot_id in sidecars.difference(&targets) {
                let orphan = sidecar_path(&self.directory, slot_id);
                match remove_file(&orphan) {
                    Ok(()) => log::info!("{} had no slot file beside it: removed", orphan.display()),
                    Err(error) => notes.push(error.to_string()),
                }
            }
        }
        Ok(())
    }

    /// What is there of a slot, of which the manifest knows this. A file that is another was saved later, or by another program:
    /// it was used then, whatever the manifest says, and has to outlive what was used before.
    fn found(&self, slot_id: u32, recorded: Option<&Entry>) -> Result<Entry> {
        let path = target_path(&self.directory, slot_id);
        let metadata = fs::metadata(&path).map_err(|source| io_error("look at", &path, source))?;
        if metadata.is_dir() {
            return Err(io_error("look at", &path, ErrorKind::IsADirectory.into()));
        }
        if let Some(entry) = recorded
            && SavedFile::of(&path).ok() == entry.target
        {
            return Ok(entry.clone());
        }
        let modified = metadata.modified().map_err(|source| io_error("look at", &path, source))?;
        let modified = modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let modified =
            u64::try_from(modified).unwrap_or(u64::MAX).saturating_add(FILE_CLOCK_MS).min(LATEST_USE_MS);
        Ok(Entry {
            slot_id,
            // What is no slot file takes room all the same, and has no tokens.
            n_tokens: seq_file_token_count(&path).unwrap_or_default(),
            last_use_ms: recorded.map_or(0, |entry| entry.last_use_ms).max(modified),
            target: recorded.and_then(|entry| entry.target),
            sidecar: recorded.and_then(|entry| entry.sidecar),
        })
    }

    /// What is known of a slot, whose file may have come from somebody else meanwhile.
    pub fn look(&mut self, slot_id: u32) -> Option<Entry> {
        if !self.entries.contains_key(&slot_id) {
            self.entries.insert(slot_id, self.found(slot_id, None).ok()?);
            self.is_changed = true;
        }
        self.entries.get(&slot_id).cloned()
    }

    /// Bytes of a slot's files, as they are: what a link points to is not in the folder.
    pub fn bytes_of(&self, slot_id: u32) -> u64 {
        let paths = [target_path(&self.directory, slot_id), sidecar_path(&self.directory, slot_id)];
        let found = paths.iter().filter_map(|path| fs::symlink_metadata(path).ok());
        found.filter(|metadata| !metadata.is_dir()).map(|metadata| metadata.len()).sum()
    }

    /// Whether `need` bytes of a slot that was used at that time fit beside those of slots that were used later.
    ///
    /// # Errors
    /// [`Error::OverBudget`]; [`Error::Locked`] and [`Error::Io`], if there was no lock to be had so far.
    pub fn check_save(&mut self, slot_id: u32, need: u64, last_use_ms: u64) -> Result<()> {
        let others = self.entries.values().filter(|entry| entry.slot_id != slot_id);
        let newer: u64 = others
            .filter(|other| other.last_use_ms > last_use_ms)
            .map(|other| self.bytes_of(other.slot_id))
            .sum();
        if newer.saturating_add(need) > self.max_bytes {
            return Err(Error::OverBudget { slot_id, need, newer, max_bytes: self.max_bytes });
        }
        self.check_lock()
    }

    /// Tries again to take the folder, if that was not possible so far.
    fn check_lock(&mut self) -> Result<()> {
        if matches!(self.lock, Lock::Missing) {
            self.lock = acquire(&self.directory, &mut Vec::new())?;
        }
        Ok(())
    }

    /// Puts the files of a slot into their places. `notes` get what failed afterwards.
    ///
    /// # Errors
    /// As [`Folder::check_save`], as other slots may have been saved meanwhile; [`Error::Io`] of the renames.
    pub fn put(
        &mut self,
        written: WrittenSlot,
        (slot_id, n_tokens, last_use_ms): (u32, u32, u64),
        notes: &mut Vec<String>,
    ) -> Result<()> {
        self.check_save(slot_id, written.bytes(), last_use_ms)?;
        let saved = written.persist(self.sync)?;
        let entry =
            Entry { slot_id, n_tokens, last_use_ms, target: Some(saved.target), sidecar: saved.sidecar };
        self.entries.insert(slot_id, entry);
        self.is_changed = true;
        let mut note = |done: Result<()>| done.unwrap_or_else(|error| notes.push(error.to_string()));
        if saved.sidecar.is_none() {
            note(remove_file(&sidecar_path(&self.directory, slot_id)));
        }
        note(self.evict(Some(slot_id)));
        note(self.write_manifest());
        Ok(())
    }

    /// Removes slots, those first that were used longest ago, until the others fit; never `keep`.
    ///
    /// # Errors
    /// [`Error::Io`]: it goes on with the next, and returns the last.
    fn evict(&mut self, keep: Option<u32>) -> Result<()> {
        let mut total: u64 = self.entries.keys().map(|&slot_id| self.bytes_of(slot_id)).sum();
        let others = self.entries.values().filter(|entry| Some(entry.slot_id) != keep);
        let mut oldest_first: Vec<_> = others.map(|entry| (entry.last_use_ms, entry.slot_id)).collect();
        oldest_first.sort_unstable();
        let mut evicted = Ok(());
        for (_, slot_id) in oldest_first {
            if total <= self.max_bytes {
                break;
            }
            let (bytes, max_bytes) = (self.bytes_of(slot_id), self.max_bytes);
            match self.remove_files(slot_id) {
                Ok(()) => {
                    log::info!(
                        "slot {slot_id} is removed: {total} bytes are more than max_bytes {max_bytes}, and it was used longest ago"
                    );
                    total -= bytes;
                }
                Err(error) => evicted = Err(error),
            }
        }
        evicted
    }

    /// Removes a slot.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Locked`], if there was no lock to be had so far.
    pub fn remove(&mut self, slot_id: u32) -> Result<()> {
        self.check_lock()?;
        self.remove_files(slot_id)?;
        self.write_manifest()
    }

    fn remove_files(&mut self, slot_id: u32) -> Result<()> {
        remove_file(&target_path(&self.directory, slot_id))?;
        self.is_changed |= self.entries.remove(&slot_id).is_some();
        remove_file(&sidecar_path(&self.directory, slot_id))
    }

    /// A slot was used.
    pub fn used(&mut self, slot_id: u32, last_use_ms: u64) {
        if let Some(entry) = self.entries.get_mut(&slot_id).filter(|entry| entry.last_use_ms < last_use_ms) {
            entry.last_use_ms = last_use_ms;
            self.is_changed = true;
        }
    }

    /// Brings the manifest up to date.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Locked`], if there was no lock to be had so far.
    pub fn write_manifest(&mut self) -> Result<()> {
        if !self.is_changed {
            return Ok(());
        }
        self.check_lock()?;
        manifest::write(&self.directory, &self.entries, self.sync)?;
        self.is_changed = false;
        Ok(())
    }
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(io_error("remove", path, source)),
        _ => Ok(()),
    }
}

/// Creates the folder, its owner's alone, if it is not there.
fn create(directory: &Path) -> Result<PathBuf> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory).map_err(|source| io_error("create the folder", directory, source))?;
    fs::canonicalize(directory).map_err(|source| io_error("open", directory, source))
}

/// # Errors
/// [`Error::Locked`], [`Error::Io`].
fn acquire(directory: &Path, notes: &mut Vec<String>) -> Result<Lock> {
    let path = directory.join(LOCK_NAME);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(&path).map_err(|source| io_error("lock", &path, source))?;
    match file.try_lock() {
        Ok(()) => Ok(Lock::Held { _lock: HeldLock(file) }),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { path: path.display().to_string() }),
        Err(TryLockError::Error(source)) => {
            notes.push(format!(
                "no lock can be had, so that nobody notices a second process: {}",
                io_error("lock", &path, source)
            ));
            Ok(Lock::Unsupported)
        }
    }
}
