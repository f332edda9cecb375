//! Auto-save: a folder that keeps the slots of a server from one run to the next.
//!
//! Each slot has a slot file of its own there, under a name that follows from its number, which any reader of slot files takes.
//! Whatever goes wrong costs a cold start and nothing else: `docs/autosave.md`.

mod folder;
mod manifest;
mod restore;
mod save;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Job;
use crate::error::Result;
use crate::storage::Progress;
use folder::Folder;

pub use restore::Restored;
pub use save::Saved;

/// Which folder keeps the slots, and how much of them.
#[derive(Clone, Debug)]
pub struct AutosaveParams {
    /// The folder, which is created if it is not there. Nobody else keeps slots in it meanwhile.
    pub directory: PathBuf,
    /// Most bytes of all slot files, without the temporary one of a save that runs; `None`: no bound.
    pub max_bytes: Option<u64>,
    /// A save is due after so many tokens; `None`: never.
    pub every_n_tokens: Option<u64>,
    /// Whether saves wait for the disk.
    pub sync: bool,
}

impl AutosaveParams {
    /// Without bounds, and with saves that wait for the disk when somebody asks for them.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), max_bytes: None, every_n_tokens: None, sync: true }
    }
}

/// A slot that the folder has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutosavedSlot {
    /// The slot.
    pub slot_id: u32,
    /// Words of its token field.
    pub n_tokens: u32,
    /// Bytes of its files.
    pub bytes: u64,
    /// When it was used last, in milliseconds since 1970.
    pub last_use_ms: u64,
}

/// A folder that keeps slots, for as long as this is there. Its calls may be made from any thread, side by side.
///
/// Dropped, it waits for the saves that run, and leaves the folder to others.
///
/// ```
/// # use kvstate::context::UbatchToken;
/// # use kvstate::format::GgmlType;
/// # use kvstate::memory::{KvParams, LayerParams, TensorParams};
/// # use kvstate::types::CellExt;
/// use kvstate::session::{Autosave, AutosaveParams, Restored, SlotContents, SlotLoadParams};
/// # use kvstate::{Context, ContextParams};
/// # fn main() -> kvstate::Result<()> {
/// # let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 64 };
/// # let new = || {
/// #     let kv = KvParams::new(256, 2, LayerParams { k: tensor, v: Some(tensor) });
/// #     Context::new(ContextParams::new(2, vec![kv.into()]))
/// # };
/// # let mut context = new()?;
/// # let prompt: Vec<_> = (0..9).map(|pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] }).collect();
/// # context.commit(&context.prepare(&prompt)?)?;
/// # let folder = tempfile::tempdir().expect("a folder");
/// let params = AutosaveParams { max_bytes: Some(1 << 30), every_n_tokens: Some(1024), ..AutosaveParams::new(folder.path()) };
/// let autosave = Autosave::open(params.clone())?;
/// // After each batch; slot 0 is sequence 0 here.
/// let tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13];
/// if autosave.mark(0, 9) {
///     let contents = SlotContents { tokens: &tokens, ..SlotContents::default() };
///     autosave.save_in_background(0, &mut context, 0, contents)?;
/// }
/// // At the end, what is not saved yet.
/// if autosave.is_dirty(0) {
///     let contents = SlotContents { tokens: &tokens, ..SlotContents::default() };
///     autosave.save(0, &mut context, 0, contents)?;
/// }
/// autosave.flush()?;
/// drop(autosave);
///
/// // The next run.
/// let autosave = Autosave::open(params)?;
/// # let mut context = new()?;
/// for slot in autosave.slots() {
///     match autosave.restore(slot.slot_id, &mut context, 0, SlotLoadParams::default())? {
///         Restored::Slot(loaded) => assert_eq!(loaded.tokens, tokens),
///         Restored::Cold(notes) => panic!("{notes:?}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Autosave {
    shared: Arc<Shared>,
    every_n_tokens: u64,
    notes: Vec<String>,
    slots: Mutex<BTreeMap<u32, Arc<Slot>>>,
}

/// What saves in the background share with the owner.
#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    sync: bool,
    /// Held for moments only: a server marks slots between two batches.
    uses: Mutex<Uses>,
    /// Held while files are renamed and removed; never by who waits for a save.
    folder: Mutex<Folder>,
}

/// When slots were used, and what of them is not saved.
#[derive(Debug, Default)]
struct Uses {
    slots: BTreeMap<u32, Use>,
    /// The last use of all.
    last_ms: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Use {
    last_use_ms: u64,
    is_dirty: bool,
    /// Tokens since the state that was saved last.
    unsaved: u64,
    /// Those of them that a save was begun for, whatever became of it.
    begun: u64,
}

/// A slot of the server.
#[derive(Debug, Default)]
struct Slot {
    /// Saves, restores and removals of a slot, and waits for them, go one after another.
    turn: Mutex<()>,
    job: Mutex<Option<Arc<Job<Saved>>>>,
}

/// A panic elsewhere leaves nothing half done: what is behind a lock changes in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uses {
    /// Now, and after every use before.
    fn tick(&mut self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.last_ms = now.max(self.last_ms.saturating_add(1));
        self.last_ms
    }

    fn touch(&mut self, slot_id: u32) -> &mut Use {
        let now = self.tick();
        let slot = self.slots.entry(slot_id).or_default();
        slot.last_use_ms = now;
        slot
    }

    /// The slot is what its file says.
    fn restored(&mut self, slot_id: u32) {
        let last_use_ms = self.tick();
        self.slots.insert(slot_id, Use { last_use_ms, ..Use::default() });
    }
}

impl Shared {
    fn path(&self, slot_id: u32) -> PathBuf {
        folder::target_path(&self.directory, slot_id)
    }

    /// The folder, which knows of every use.
    fn folder(&self) -> MutexGuard<'_, Folder> {
        let mut folder = lock(&self.folder);
        for (&slot_id, slot) in &lock(&self.uses).slots {
            folder.used(slot_id, slot.last_use_ms);
        }
        folder
    }
}

impl Autosave {
    /// Takes a folder, and finds out what it holds: by its manifest, and by the files themselves where that is missing, damaged,
    /// or of a later version. Files that killed processes have left behind, and slots that are too many for `max_bytes`, are
    /// removed.
    ///
    /// A folder that cannot be written can be opened all the same: restores work, saves fail and say why.
    ///
    /// # Errors
    /// [`Error::Locked`](crate::Error::Locked) if somebody else has taken it, [`Error::Io`](crate::Error::Io) if it can be
    /// neither read nor created.
    pub fn open(params: AutosaveParams) -> Result<Self> {
        let AutosaveParams { directory, max_bytes, every_n_tokens, sync } = params;
        let mut notes = Vec::new();
        let folder = Folder::open(&directory, max_bytes.unwrap_or(u64::MAX), sync, &mut notes)?;
        for note in &notes {
            log::warn!("{note}");
        }
        let last_ms = folder.entries().values().map(|entry| entry.last_use_ms).max().unwrap_or_default();
        let shared = Shared {
            directory: folder.directory().to_owned(),
            sync,
            uses: Mutex::new(Uses { last_ms, ..Uses::default() }),
            folder: Mutex::new(folder),
        };
        Ok(Self {
            shared: Arc::new(shared),
            every_n_tokens: every_n_tokens.unwrap_or(u64::MAX),
            notes,
            slots: Mutex::default(),
        })
    }

    /// What was odd when the folder was opened, in words.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The folder, by a path that stays the same.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.shared.directory
    }

    /// What the folder has, by slot.
    #[must_use]
    pub fn slots(&self) -> Vec<AutosavedSlot> {
        let folder = self.shared.folder();
        let slot = |entry: &manifest::Entry| AutosavedSlot {
            slot_id: entry.slot_id,
            n_tokens: entry.n_tokens,
            bytes: folder.bytes_of(entry.slot_id),
            last_use_ms: entry.last_use_ms,
        };
        folder.entries().values().map(slot).collect()
    }

    /// A slot has been used, and is another than its file: `n_tokens` tokens were computed, or any other number to that effect.
    /// Returns whether a save is due, which it is once so many have come together since the last that was begun, unless that one
    /// still runs.
    pub fn mark(&self, slot_id: u32, n_tokens: u64) -> bool {
        let is_due = {
            let mut uses = lock(&self.shared.uses);
            let slot = uses.touch(slot_id);
            slot.is_dirty = true;
            slot.unsaved = slot.unsaved.saturating_add(n_tokens);
            slot.unsaved - slot.begun >= self.every_n_tokens
        };
        is_due && self.is_finished(slot_id)
    }

    /// Whether a slot was marked since the state that its file has.
    #[must_use]
    pub fn is_dirty(&self, slot_id: u32) -> bool {
        lock(&self.shared.uses).slots.get(&slot_id).is_some_and(|slot| slot.is_dirty)
    }

    /// Removes a slot from the folder; one that it does not have is fine. A save of it that runs is cancelled.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn remove(&self, slot_id: u32) -> Result<()> {
        self.cancel(slot_id);
        let slot = self.slot(slot_id);
        let _turn = lock(&slot.turn);
        // Saved after all or not, it goes.
        drop(slot.wait());
        self.shared.folder().remove(slot_id)
    }

    /// Whether no save of a slot runs in the background.
    #[must_use]
    pub fn is_finished(&self, slot_id: u32) -> bool {
        self.job(slot_id).is_none_or(|job| job.is_finished())
    }

    /// How far the save of a slot in the background is, or was when it ended; 0 of 0 if there is none to be waited for.
    #[must_use]
    pub fn progress(&self, slot_id: u32) -> Progress {
        self.job(slot_id).map_or(Progress { done: 0, total: 0 }, |job| job.progress())
    }

    /// Asks the save of a slot in the background to end: its old file stands, unless it was done before.
    pub fn cancel(&self, slot_id: u32) {
        if let Some(job) = self.job(slot_id) {
            job.cancel();
        }
    }

    fn slot(&self, slot_id: u32) -> Arc<Slot> {
        Arc::clone(lock(&self.slots).entry(slot_id).or_default())
    }

    fn job(&self, slot_id: u32) -> Option<Arc<Job<Saved>>> {
        let slot = lock(&self.slots).get(&slot_id).cloned()?;
        lock(&slot.job).clone()
    }
}

impl Slot {
    /// Waits for the save that was begun last, if nobody has: the caller has the turn.
    fn wait(&self) -> Result<Option<Saved>> {
        // Others see the job until it has ended.
        let job = lock(&self.job).clone();
        let saved = job.map(|job| job.wait()).transpose();
        *lock(&self.job) = None;
        saved
    }
}

impl Drop for Autosave {
    fn drop(&mut self) {
        // Nobody is left to be told; what went wrong has been logged.
        drop(self.flush());
    }
}
