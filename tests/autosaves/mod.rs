//! Folders of auto-saved slots, and saves that stand still while a test looks at them.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, Once};

use kvstate::Context;
use kvstate::session::{
    Autosave, AutosaveParams, LoadedSlot, Restored, SlotContents, SlotLoadParams, Verify,
};

#[path = "../slots/mod.rs"]
pub mod slots;

use slots::{busy_draft, busy_target, checkpoint_states, checkpoints, draft, identity, target};

/// Without waits for the disk: what a crash leaves is a matter of its own tests.
pub fn params(dir: &Path) -> AutosaveParams {
    AutosaveParams { sync: false, ..AutosaveParams::new(dir) }
}

pub fn open(dir: &Path) -> Autosave {
    let autosave = Autosave::open(params(dir)).unwrap();
    assert_eq!(autosave.notes(), [""; 0]);
    autosave
}

pub fn bounded(dir: &Path, max_bytes: u64) -> Autosave {
    Autosave::open(AutosaveParams { max_bytes: Some(max_bytes), ..params(dir) }).unwrap()
}

/// All that there is of a slot, given to `save`: the target's sequence 0, the draft's 1.
pub fn with_slot<T>(
    tokens: &[i32],
    sidecar: bool,
    save: impl FnOnce(&mut Context, SlotContents<'_>) -> T,
) -> T {
    let (mut target, mut draft) = (target(), draft());
    let states = checkpoint_states(&mut target);
    let contents = SlotContents {
        tokens,
        checkpoints: checkpoints(&states),
        draft: Some((&mut draft, 1)),
        driver: slots::DRIVER,
        identity: identity(),
        sidecar,
    };
    save(&mut target, contents)
}

/// Saves a slot with these tokens; returns the bytes of its files.
pub fn save(autosave: &Autosave, slot_id: u32, tokens: &[i32]) -> u64 {
    let saved =
        with_slot(tokens, false, |target, contents| autosave.save(slot_id, target, 0, contents)).unwrap();
    assert_eq!(saved.notes, [""; 0]);
    saved.bytes
}

/// The same with a sidecar.
pub fn save_with_sidecar(autosave: &Autosave, slot_id: u32, tokens: &[i32]) -> u64 {
    with_slot(tokens, true, |target, contents| autosave.save(slot_id, target, 0, contents)).unwrap().bytes
}

pub fn save_in_background(autosave: &Autosave, slot_id: u32, tokens: &[i32]) {
    with_slot(tokens, false, |target, contents| autosave.save_in_background(slot_id, target, 0, contents))
        .unwrap();
}

/// Restores a slot into sequence 1 of a target and 0 of a draft in which others are at work.
pub fn restore_into(
    autosave: &Autosave,
    slot_id: u32,
    target: &mut Context,
    draft: &mut Context,
) -> Restored {
    let params = SlotLoadParams {
        draft: Some((draft, 0)),
        identity: identity(),
        verify: Verify::Full,
        ..SlotLoadParams::default()
    };
    autosave.restore(slot_id, target, 1, params).unwrap()
}

pub fn restore(autosave: &Autosave, slot_id: u32) -> Restored {
    restore_into(autosave, slot_id, &mut busy_target(), &mut busy_draft())
}

pub fn loaded(autosave: &Autosave, slot_id: u32) -> LoadedSlot {
    match restore(autosave, slot_id) {
        Restored::Slot(loaded) => loaded,
        Restored::Cold(notes) => panic!("{notes:?}"),
    }
}

/// The reasons of a cold start.
pub fn cold(autosave: &Autosave, slot_id: u32) -> Vec<String> {
    match restore(autosave, slot_id) {
        Restored::Slot(loaded) => panic!("{loaded:?}"),
        Restored::Cold(notes) => notes,
    }
}

/// The slots that a folder says it has.
pub fn slot_ids(autosave: &Autosave) -> Vec<u32> {
    autosave.slots().iter().map(|slot| slot.slot_id).collect()
}

pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Holds saves in a folder: each save looks for what killed ones have left there before it writes, and logs what it finds; the
/// logger of this process does not return while the folder is held.
#[derive(Debug)]
pub struct Held(PathBuf);

static HELD: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static RELEASED: Condvar = Condvar::new();

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let text = record.args().to_string();
        if text.contains("was left by a save") {
            let is_held =
                |held: &Vec<PathBuf>| held.iter().any(|dir| text.starts_with(dir.to_str().unwrap()));
            drop(RELEASED.wait_while(HELD.lock().unwrap(), |held| is_held(held)));
        }
    }

    fn flush(&self) {}
}

impl Held {
    pub fn hold(dir: &Path) -> Self {
        static LOGGER: Once = Once::new();
        LOGGER.call_once(|| {
            log::set_logger(&Logger).unwrap();
            log::set_max_level(log::LevelFilter::Info);
        });
        let dir = fs::canonicalize(dir).unwrap();
        HELD.lock().unwrap().push(dir.clone());
        fs::write(dir.join(".kvstate-1-0000000000000000.tmp"), b"left").unwrap();
        Self(dir)
    }

    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.lock().unwrap().retain(|dir| *dir != self.0);
        RELEASED.notify_all();
    }
}
