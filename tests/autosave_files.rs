//! Auto-save: what is in the folder, and what becomes of a folder that is not as it was left.
#![allow(missing_docs, reason = "a test")]

mod autosaves;

use std::fs;
use std::path::{Path, PathBuf};

use autosaves::slots::support::kv;
use autosaves::slots::{DRIVER, TOKENS, busy_draft, busy_target, draft, identity, load_slot, target};
use autosaves::{
    bounded, cold, loaded, names, open, params, restore_into, save, save_with_sidecar, slot_ids, with_slot,
};
use kvstate::format::{GgmlType, Integrity, PartKind};
use kvstate::memory::{KvParams, LayerParams};
use kvstate::session::{Autosave, DraftOutcome, LoadedSlot, Restored, SlotContents, SlotLoadParams, Verify};
use kvstate::{Context, Error, Status};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

const UNCOMPARED: &str = "the file has no identity and no checksums: nothing was compared";

fn target_file(dir: &Path) -> PathBuf {
    dir.join("auto-slot0.bin")
}

fn sidecar_file(dir: &Path) -> PathBuf {
    dir.join("auto-slot0.drft")
}

fn manifest_file(dir: &Path) -> PathBuf {
    dir.join("auto-slots.json")
}

/// A folder that a run has left with slot 0.
fn left() -> TempDir {
    let dir = tempdir().unwrap();
    save(&open(dir.path()), 0, &TOKENS);
    dir
}

/// The same with a sidecar.
fn left_with_sidecar() -> TempDir {
    let dir = tempdir().unwrap();
    save_with_sidecar(&open(dir.path()), 0, &TOKENS);
    dir
}

/// Opens a folder about which there is something to say.
fn noted(dir: &Path) -> (Autosave, Vec<String>) {
    let autosave = Autosave::open(params(dir)).unwrap();
    let real = fs::canonicalize(dir).unwrap();
    let notes =
        autosave.notes().iter().map(|note| note.replace(&format!("{}/", real.display()), "")).collect();
    (autosave, notes)
}

fn reasons(dir: &Path) -> Vec<String> {
    let real = fs::canonicalize(dir).unwrap();
    let (autosave, _) = noted(dir);
    cold(&autosave, 0).iter().map(|note| note.replace(&format!("{}/", real.display()), "")).collect()
}

/// What the target's own sequence file would be.
fn plain(tokens: &[i32]) -> Vec<u8> {
    let dir = tempdir().unwrap();
    let path = dir.path().join("plain.bin");
    target().state_seq_save_file(&path, 0, tokens).unwrap();
    fs::read(path).unwrap()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The size of a file and the checksum that it ends with.
fn mark(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap();
    json!({ "bytes": bytes.len(), "crc32c": u32::from_le_bytes(*bytes.last_chunk().unwrap()) })
}

// Slot files

#[test]
fn the_file_of_a_slot_is_the_slot_file_that_a_save_writes() {
    let (dir, other) = (left(), tempdir().unwrap());
    let path = other.path().join("slot.bin");
    with_slot(&TOKENS, false, |target, contents| target.slot_save(&path, 0, contents)).unwrap();
    assert!(fs::read(target_file(dir.path())).unwrap() == fs::read(&path).unwrap());
    // Back into the folder of an auto-save, under any number.
    fs::copy(&path, dir.path().join("auto-slot5.bin")).unwrap();
    let autosave = open(dir.path());
    assert_eq!(slot_ids(&autosave), [0, 5]);
    assert_eq!(loaded(&autosave, 5), loaded(&autosave, 0));
}

#[test]
fn a_servers_own_calls_read_a_slot() {
    let dir = left();
    let (path, plain) = (target_file(dir.path()), plain(&TOKENS));
    assert!(fs::read(&path).unwrap()[..plain.len()] == plain);
    let file = busy_target().state_seq_load_file(&path, 1, 5).unwrap();
    assert_eq!((file.tokens, file.state_end), (TOKENS.to_vec(), plain.len() as u64));
    let slot = load_slot(&path, &mut busy_target(), &mut busy_draft(), Verify::Full).unwrap();
    assert_eq!(slot, loaded(&open(dir.path()), 0));
}

#[test]
fn a_file_of_llama_server_is_found_and_restored_with_a_note() {
    let dir = tempdir().unwrap();
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny2x64_kf16_vf16_n64_none.slot");
    fs::copy(&fixture, dir.path().join("auto-slot2.bin")).unwrap();
    let autosave = open(dir.path());
    let slots = autosave.slots();
    assert_eq!((slots[0].slot_id, slots[0].n_tokens, slots[0].bytes), (2, 64, 33_876));

    let tensor = autosaves::slots::support::tensor(GgmlType::F16, 64);
    let mut into = autosaves::slots::support::context(
        1,
        &[KvParams::new(64, 2, LayerParams { k: tensor, v: Some(tensor) })],
    );
    let restored = autosave.restore(2, &mut into, 0, SlotLoadParams::default()).unwrap();
    let Restored::Slot(slot) = restored else { panic!("{restored:?}") };
    assert_eq!((slot.tokens.len(), &slot.notes[..]), (64, &[UNCOMPARED.to_owned()][..]));
    assert_eq!(into.seq_pos_max(0).unwrap(), 63);
}

#[test]
fn a_file_that_a_server_puts_there_while_the_folder_is_open_is_restored() {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    fs::write(target_file(dir.path()), plain(&TOKENS)).unwrap();
    assert_eq!((loaded(&autosave, 0).tokens, slot_ids(&autosave)), (TOKENS.to_vec(), vec![0]));
}

#[test]
fn a_file_that_a_server_has_replaced_is_taken_with_a_note() {
    let dir = left();
    let [old, new] = [fs::read(target_file(dir.path())).unwrap(), plain(&[7, 8])];
    fs::write(target_file(dir.path()), &new).unwrap();
    let slot = loaded(&open(dir.path()), 0);
    assert_eq!((&slot.tokens[..], slot.notes.len()), (&[7, 8][..], 2));
    let sum = |bytes: &[u8]| u32::from_le_bytes(*bytes.last_chunk().unwrap());
    let note = format!(
        "auto-slot0.bin is not the file of the manifest: it has {} bytes with the checksum {:08x}, that had {} bytes with the \
         checksum {:08x}",
        new.len(),
        sum(&new),
        old.len(),
        sum(&old)
    );
    assert!(slot.notes[0].ends_with(&note), "{}", slot.notes[0]);
    assert_eq!(slot.notes[1], UNCOMPARED);
}

#[test]
fn a_save_that_the_manifest_came_too_late_for_is_taken_with_a_note() {
    let dir = left();
    let manifest = fs::read(manifest_file(dir.path())).unwrap();
    save(&open(dir.path()), 0, &[1, 2, 3]);
    fs::write(manifest_file(dir.path()), manifest).unwrap();
    let slot = loaded(&open(dir.path()), 0);
    assert_eq!((&slot.tokens[..], slot.verified, slot.notes.len()), (&[1, 2, 3][..], Verify::Full, 1));
    assert!(slot.notes[0].contains("is not the file of the manifest"), "{:?}", slot.notes);
}

#[test]
fn a_file_that_is_gone_is_a_note_and_a_cold_start() {
    let dir = left();
    fs::remove_file(target_file(dir.path())).unwrap();
    let (autosave, notes) = noted(dir.path());
    assert_eq!(notes, ["auto-slot0.bin is gone: slot 0 starts cold"]);
    assert_eq!((slot_ids(&autosave), cold(&autosave, 0).len()), (vec![], 0));
}

#[test]
fn a_file_that_goes_while_the_folder_is_open_is_a_cold_start() {
    let dir = left();
    let autosave = open(dir.path());
    fs::remove_file(target_file(dir.path())).unwrap();
    let notes = cold(&autosave, 0);
    assert!(notes.len() == 1 && notes[0].contains("auto-slot0.bin: No such file"), "{notes:?}");
}

#[test]
fn a_truncated_file_is_a_cold_start_unless_what_is_left_is_whole() {
    let dir = left();
    let bytes = fs::read(target_file(dir.path())).unwrap();
    let start = Integrity::find(bytes.len() as u64, bytes.last_chunk().unwrap()).unwrap();
    let mut input = kvstate::format::Cursor::new(&bytes);
    input.bytes("before", start).unwrap();
    let parts = Integrity::read(&mut input).unwrap().parts;
    // The ends of what a server may have written: the memory state, and each appendix.
    let ends: Vec<u64> = parts
        .iter()
        .scan(0, |end, part| {
            *end += part.len;
            Some((part.kind, *end))
        })
        .filter(|(kind, _)| *kind != PartKind::HEAD)
        .map(|(_, end)| end)
        .collect();
    assert_eq!(ends.len(), 3);
    for len in 0..bytes.len() as u64 {
        fs::write(target_file(dir.path()), &bytes[..usize::try_from(len).unwrap()]).unwrap();
        let mut into = busy_target();
        let restored = restore_into(&open(dir.path()), 0, &mut into, &mut busy_draft());
        let is_whole = ends.contains(&len);
        match &restored {
            Restored::Slot(slot) => assert!(is_whole && slot.notes.len() == 2, "{len}: {:?}", slot.notes),
            Restored::Cold(notes) => {
                assert!(!is_whole && notes.len() == 2, "{len}: {notes:?}");
                assert!(notes[0].contains("is not the file of the manifest"), "{len}: {notes:?}");
                assert_eq!(into.seq_pos_max(1).unwrap(), 4, "{len}");
            }
        }
    }
}

#[test]
fn a_file_whose_end_is_damaged_is_a_cold_start() {
    let dir = left();
    let bytes = fs::read(target_file(dir.path())).unwrap();
    for at in [bytes.len() - 1, bytes.len() - 20, bytes.len() - 100] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(target_file(dir.path()), damaged).unwrap();
        assert!(reasons(dir.path()).last().unwrap().contains("failed to restore sequence state"), "{at}");
    }
}

#[test]
fn a_file_whose_state_is_damaged_is_a_cold_start_if_it_is_verified() {
    let dir = left();
    let mut bytes = fs::read(target_file(dir.path())).unwrap();
    let in_state = plain(&TOKENS).len() - 1;
    bytes[in_state] ^= 1;
    fs::write(target_file(dir.path()), bytes).unwrap();
    let notes = reasons(dir.path());
    assert!(notes.len() == 1 && notes[0].contains("crc32c of the memory state"), "{notes:?}");
}

// The manifest

#[test]
fn the_manifest_says_what_the_files_were_and_when_slots_were_used() {
    let dir = left();
    let autosave = open(dir.path());
    save_with_sidecar(&autosave, 7, &TOKENS[..2]);
    let slots = autosave.slots();
    drop(autosave);
    let want = json!({ "version": 1, "slots": [
        { "slot_id": 0, "n_tokens": 5, "last_use_ms": slots[0].last_use_ms, "target": mark(&target_file(dir.path())),
          "sidecar": null },
        { "slot_id": 7, "n_tokens": 2, "last_use_ms": slots[1].last_use_ms,
          "target": mark(&dir.path().join("auto-slot7.bin")), "sidecar": mark(&dir.path().join("auto-slot7.drft")) },
    ]});
    assert_eq!(json_of(&manifest_file(dir.path())), want);
}

#[test]
fn uses_are_in_the_manifest_once_it_is_flushed() {
    let dir = left();
    let autosave = open(dir.path());
    let before = json_of(&manifest_file(dir.path()));
    autosave.mark(0, 1);
    assert_eq!(json_of(&manifest_file(dir.path())), before);
    autosave.flush().unwrap();
    let after = json_of(&manifest_file(dir.path()));
    assert_eq!(after["slots"][0]["last_use_ms"], json!(autosave.slots()[0].last_use_ms));
    assert_ne!(after, before);
}

#[test]
fn a_manifest_that_is_missing_is_made_again_from_the_files() {
    let dir = left();
    fs::remove_file(manifest_file(dir.path())).unwrap();
    let autosave = open(dir.path());
    assert_eq!((slot_ids(&autosave), loaded(&autosave, 0).notes), (vec![0], vec![]));
    drop(autosave);
    let manifest = json_of(&manifest_file(dir.path()));
    assert_eq!(
        (&manifest["slots"][0]["n_tokens"], &manifest["slots"][0]["target"]),
        (&json!(5), &Value::Null)
    );
}

#[test]
fn what_another_program_saved_is_taken_as_it_is_by_each_run() {
    let dir = tempdir().unwrap();
    let damaged = [&plain(&TOKENS)[..], b"SCKP\x01\0"].concat();
    fs::write(target_file(dir.path()), damaged).unwrap();
    for _ in 0..2 {
        let slot = loaded(&open(dir.path()), 0);
        assert_eq!((slot.tokens.len(), slot.notes.len()), (5, 2));
        assert!(
            slot.notes[0].starts_with("the 6 bytes from a damaged appendix on are ignored"),
            "{:?}",
            slot.notes
        );
    }
}

/// Opens a folder with this manifest: what is said of it. The slot is there all the same.
fn said_of_manifest(text: &[u8]) -> String {
    let dir = left();
    fs::write(manifest_file(dir.path()), text).unwrap();
    let (autosave, notes) = noted(dir.path());
    assert_eq!((notes.len(), slot_ids(&autosave), loaded(&autosave, 0).tokens.len()), (1, vec![0], 5));
    notes[0].strip_prefix("auto-slots.json is not used: ").unwrap().to_owned()
}

#[test]
fn a_manifest_that_is_damaged_is_a_note_and_the_files_count() {
    let text = fs::read(manifest_file(left().path())).unwrap();
    for len in (0..text.len() - 2).step_by(7) {
        said_of_manifest(&text[..len]);
    }
    let reason = said_of_manifest(b"\xff\x00");
    assert!(reason.contains("line 1"), "{reason}");
}

#[test]
fn a_manifest_of_a_later_version_is_a_note_and_the_files_count() {
    assert_eq!(said_of_manifest(br#"{"version": 2, "places": []}"#), "of version 2, 1 is known");
}

#[test]
fn a_manifest_that_names_a_slot_twice_is_a_note_and_the_files_count() {
    let mut manifest = json_of(&manifest_file(left().path()));
    let entry = manifest["slots"][0].clone();
    manifest["slots"].as_array_mut().unwrap().push(entry);
    assert_eq!(said_of_manifest(manifest.to_string().as_bytes()), "slot 0 is there twice");
}

#[test]
fn a_manifest_of_the_far_future_is_a_note_and_the_files_count() {
    let mut manifest = json_of(&manifest_file(left().path()));
    manifest["slots"][0]["last_use_ms"] = json!(u64::MAX);
    assert_eq!(
        said_of_manifest(manifest.to_string().as_bytes()),
        "slot 0 has last_use_ms 18446744073709551615, at most 9007199254740992 is possible"
    );
}

#[test]
fn whatever_a_manifest_says_a_file_that_is_whole_is_restored() {
    let dir = left();
    let text = fs::read(manifest_file(dir.path())).unwrap();
    for at in 0..text.len() {
        let mut flipped = text.clone();
        flipped[at] ^= 1 << (at % 7);
        fs::write(manifest_file(dir.path()), flipped).unwrap();
        let (autosave, _) = noted(dir.path());
        assert_eq!(loaded(&autosave, 0).tokens, TOKENS, "byte {at}");
        autosave.mark(0, 1);
        save(&autosave, 0, &TOKENS);
        assert!(!autosave.is_dirty(0), "byte {at}");
    }
}

#[test]
fn a_manifest_of_more_than_16_mib_is_not_read() {
    assert_eq!(said_of_manifest(&vec![b' '; (16 << 20) + 1]), "more than 16777216 bytes");
}

#[test]
fn fields_that_are_unknown_in_a_manifest_are_passed_over() {
    let dir = left();
    let mut manifest = json_of(&manifest_file(dir.path()));
    manifest["writer"] = json!("a later one");
    manifest["slots"][0]["name"] = json!("Ada");
    fs::write(manifest_file(dir.path()), manifest.to_string()).unwrap();
    assert_eq!(loaded(&open(dir.path()), 0).notes, [""; 0]);
}

#[test]
fn a_manifest_that_cannot_be_written_is_a_note_and_the_slot_is_saved() {
    let dir = tempdir().unwrap();
    fs::create_dir(manifest_file(dir.path())).unwrap();
    let (autosave, notes) = noted(dir.path());
    assert_eq!(notes, ["auto-slots.json is not used: is a directory"]);
    let saved = with_slot(&TOKENS, false, |target, contents| autosave.save(0, target, 0, contents)).unwrap();
    assert!(
        saved.notes.len() == 1 && saved.notes[0].ends_with("auto-slots.json: is a directory"),
        "{:?}",
        saved.notes
    );
    assert!(!autosave.is_dirty(0));
    let error = autosave.flush().unwrap_err();
    assert_eq!(error.status(), Status::Io);
    drop(autosave);
    assert_eq!(loaded(&noted(dir.path()).0, 0).tokens, TOKENS);
}

// Sidecars

#[test]
fn a_sidecar_has_the_draft_and_the_slot_file_everything_else() {
    let dir = left_with_sidecar();
    let autosave = open(dir.path());
    assert_eq!(
        names(dir.path()),
        ["auto-slot0.bin", "auto-slot0.drft", "auto-slots.json", "auto-slots.lock"]
    );
    let kinds = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        let start = Integrity::find(bytes.len() as u64, bytes.last_chunk().unwrap()).unwrap();
        let mut input = kvstate::format::Cursor::new(&bytes);
        input.bytes("before", start).unwrap();
        let parts = Integrity::read(&mut input).unwrap().parts;
        parts.iter().map(|part| part.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(&target_file(dir.path())), [PartKind::HEAD, PartKind::STATE, PartKind::CHECKPOINTS]);
    assert_eq!(kinds(&sidecar_file(dir.path())), [PartKind::HEAD, PartKind::STATE, PartKind::DRAFT]);

    let (mut into, mut draft) = (busy_target(), busy_draft());
    let Restored::Slot(slot) = restore_into(&autosave, 0, &mut into, &mut draft) else { panic!("cold") };
    assert_eq!((slot.checkpoints.len(), slot.driver.as_deref(), slot.notes.len()), (3, Some(DRIVER), 0));
    assert!(matches!(slot.draft, DraftOutcome::Restored(_)));
    assert_eq!((into.seq_pos_max(1).unwrap(), draft.seq_pos_max(0).unwrap()), (11, 11));
}

#[test]
fn a_sidecar_is_a_sequence_file_of_the_draft_model() {
    let (dir, other) = (left_with_sidecar(), tempdir().unwrap());
    let path = other.path().join("draft.bin");
    let n = draft().state_seq_save_file(&path, 1, &TOKENS).unwrap();
    let n = usize::try_from(n).unwrap();
    assert!(fs::read(sidecar_file(dir.path())).unwrap()[..n] == fs::read(&path).unwrap());
    let mut into = busy_draft();
    into.state_seq_load_file(sidecar_file(dir.path()), 1, 5).unwrap();
    assert_eq!(into.seq_pos_max(1).unwrap(), 11);
    // And the other way round: one that a server has saved.
    fs::copy(&path, sidecar_file(dir.path())).unwrap();
    let mut into = busy_draft();
    let Restored::Slot(slot) = restore_into(&open(dir.path()), 0, &mut busy_target(), &mut into) else {
        panic!("cold")
    };
    assert_eq!(slot.notes, [format!("sidecar: {UNCOMPARED}")]);
    assert_eq!(into.seq_pos_max(0).unwrap(), 11);
}

#[test]
fn a_sidecar_beside_any_slot_file_is_found_at_load() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let bytes = with_slot(&TOKENS, true, |target, contents| target.slot_save(&path, 0, contents)).unwrap();
    assert_eq!(names(dir.path()), ["slot.bin", "slot.drft"]);
    let len = |name| fs::metadata(dir.path().join(name)).unwrap().len();
    assert_eq!(bytes, len("slot.bin") + len("slot.drft"));
    let mut draft = busy_draft();
    let slot = load_slot(&path, &mut busy_target(), &mut draft, Verify::Full).unwrap();
    assert_eq!(
        (slot.driver.as_deref(), slot.notes.len(), draft.seq_pos_max(0).unwrap()),
        (Some(DRIVER), 0, 11)
    );
    assert!(matches!(slot.draft, DraftOutcome::Restored(_)));
}

#[test]
fn a_file_that_has_the_name_of_a_sidecar_has_none() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("slot.drft");
    let error =
        with_slot(&TOKENS, true, |target, contents| target.slot_save(&path, 0, contents)).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
    assert_eq!(error.to_string(), format!("filename: '{}', which is the name of a sidecar", path.display()));
    assert_eq!(names(dir.path()), [""; 0]);
    with_slot(&TOKENS, false, |target, contents| target.slot_save(&path, 0, contents)).unwrap();
    load_slot(&path, &mut busy_target(), &mut busy_draft(), Verify::Full).unwrap();
}

#[test]
fn without_a_draft_the_driver_stays_in_the_slot_file() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let contents = SlotContents { driver: DRIVER, sidecar: true, ..SlotContents::default() };
    target().slot_save(&path, 0, contents).unwrap();
    assert_eq!(names(dir.path()), ["slot.bin"]);
    let slot = busy_target().slot_load(&path, 1, SlotLoadParams::default()).unwrap();
    assert_eq!((slot.draft, slot.driver.as_deref()), (DraftOutcome::Absent, Some(DRIVER)));
}

/// Restores the target without the draft: the reason.
fn dropped(dir: &Path, draft: &mut Context) -> (LoadedSlot, String) {
    let mut into = busy_target();
    let Restored::Slot(slot) = restore_into(&noted(dir).0, 0, &mut into, draft) else { panic!("cold") };
    assert_eq!((into.seq_pos_max(1).unwrap(), draft.seq_pos_max(0).unwrap()), (11, -1));
    let DraftOutcome::Dropped(reason) = slot.draft.clone() else { panic!("{:?}", slot.draft) };
    assert_eq!((slot.driver.as_ref(), slot.checkpoints.len()), (None, 3));
    let real = fs::canonicalize(dir).unwrap();
    (slot, reason.replace(&format!("{}/", real.display()), ""))
}

#[test]
fn a_sidecar_of_another_save_is_dropped_and_the_target_stands() {
    let dir = left_with_sidecar();
    let old = fs::read(sidecar_file(dir.path())).unwrap();
    save_with_sidecar(&open(dir.path()), 0, &[7, 8, 9]);
    fs::write(sidecar_file(dir.path()), old).unwrap();
    assert_eq!(
        dropped(dir.path(), &mut busy_draft()).1,
        "sidecar auto-slot0.drft: tokens: of another state from the one at 0 on (expected those of the slot file)"
    );
    save_with_sidecar(&open(dir.path()), 0, &TOKENS[..4]);
    let shorter = fs::read(sidecar_file(dir.path())).unwrap();
    save_with_sidecar(&open(dir.path()), 0, &TOKENS);
    fs::write(sidecar_file(dir.path()), shorter).unwrap();
    assert_eq!(
        dropped(dir.path(), &mut busy_draft()).1,
        "sidecar auto-slot0.drft: number of tokens: 4, of another state (expected 5, that of the slot file)"
    );
}

#[test]
fn a_damaged_sidecar_is_dropped_and_the_target_stands() {
    let dir = left_with_sidecar();
    let bytes = fs::read(sidecar_file(dir.path())).unwrap();
    for at in [0, 13, 60, 100] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(sidecar_file(dir.path()), damaged).unwrap();
        dropped(dir.path(), &mut busy_draft());
    }
    for damaged in [&bytes[..4], &bytes[..40], b"another file"] {
        fs::write(sidecar_file(dir.path()), damaged).unwrap();
        let reason = dropped(dir.path(), &mut busy_draft()).1;
        assert!(reason.starts_with("sidecar auto-slot0.drft: "), "{reason}");
    }
}

#[test]
fn a_sidecar_of_another_draft_model_is_dropped_by_name() {
    let dir = left_with_sidecar();
    let mut other = kv(16);
    other.layers[0].k = autosaves::slots::support::tensor(GgmlType::BF16, 4);
    let mut other = autosaves::slots::support::context(2, &[other]);
    let reason = dropped(dir.path(), &mut other).1;
    assert_eq!(
        reason,
        "sidecar auto-slot0.drft: shape: the state has f16 x 4, the cache bf16 x 4 (section kv, K of layer 0; convert_types allows it)"
    );
}

#[test]
fn a_sidecar_without_a_context_for_it_is_dropped() {
    let dir = left_with_sidecar();
    let load = SlotLoadParams { identity: identity(), ..SlotLoadParams::default() };
    let restored = open(dir.path()).restore(0, &mut busy_target(), 1, load).unwrap();
    let Restored::Slot(slot) = restored else { panic!("{restored:?}") };
    let DraftOutcome::Dropped(reason) = slot.draft else { panic!("{:?}", slot.draft) };
    assert!(reason.ends_with("draft: no context is named for the draft state of the file"), "{reason}");
}

#[test]
fn a_sidecar_that_is_gone_is_a_note() {
    let dir = left_with_sidecar();
    fs::remove_file(sidecar_file(dir.path())).unwrap();
    let (autosave, notes) = noted(dir.path());
    assert_eq!(notes, ["auto-slot0.drft is gone: the draft of slot 0 starts empty"]);
    let slot = loaded(&autosave, 0);
    assert!(slot.draft == DraftOutcome::Absent && slot.notes.len() == 1, "{slot:?}");
    assert!(slot.notes[0].ends_with("auto-slot0.drft is gone: the draft starts empty"), "{slot:?}");
}

#[test]
fn a_save_without_a_sidecar_removes_the_old_one() {
    let dir = left_with_sidecar();
    save(&open(dir.path()), 0, &TOKENS);
    assert_eq!(names(dir.path()), ["auto-slot0.bin", "auto-slots.json", "auto-slots.lock"]);
}

#[test]
fn a_slot_whose_sidecar_cannot_be_written_keeps_its_old_files() {
    let dir = left();
    let before = fs::read(target_file(dir.path())).unwrap();
    fs::create_dir(sidecar_file(dir.path())).unwrap();
    let (autosave, _) = noted(dir.path());
    let error = with_slot(&[7], true, |target, contents| autosave.save(0, target, 0, contents)).unwrap_err();
    assert!(error.to_string().ends_with("auto-slot0.drft: is a directory"), "{error}");
    assert!(fs::read(target_file(dir.path())).unwrap() == before);
}

// What else is in the folder

#[test]
fn what_is_left_of_others_is_removed_when_the_folder_is_opened() {
    let dir = left();
    fs::write(dir.path().join("auto-slot9.drft"), b"an orphan").unwrap();
    fs::write(dir.path().join(".kvstate-1-0000000000000000.tmp"), b"half").unwrap();
    open(dir.path());
    assert_eq!(names(dir.path()), ["auto-slot0.bin", "auto-slots.json", "auto-slots.lock"]);
}

#[test]
fn what_only_looks_like_a_slot_is_left_alone() {
    let dir = left();
    let others = [
        "auto-slot.bin",
        "auto-slot01.bin",
        "auto-slot-1.bin",
        "auto-slot99999999999.bin",
        "notes.txt",
        "x.drft",
    ];
    for name in others {
        fs::write(dir.path().join(name), b"another").unwrap();
    }
    let autosave = bounded(dir.path(), 1);
    assert_eq!(slot_ids(&autosave), [0; 0]);
    for name in others {
        assert!(dir.path().join(name).exists(), "{name}");
    }
}

#[test]
fn a_file_that_is_no_slot_file_is_a_cold_start_and_takes_room() {
    let dir = tempdir().unwrap();
    fs::write(target_file(dir.path()), b"no").unwrap();
    let autosave = open(dir.path());
    let slot = &autosave.slots()[0];
    assert_eq!((slot.n_tokens, slot.bytes), (0, 2));
    assert_eq!(cold(&autosave, 0).len(), 1);
    save(&autosave, 0, &TOKENS);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
}

#[cfg(unix)]
fn make_pipe(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[cfg(unix)]
#[test]
fn a_pipe_of_the_name_of_a_slot_is_a_cold_start_and_is_never_waited_for() {
    let dir = left();
    fs::remove_file(target_file(dir.path())).unwrap();
    make_pipe(&target_file(dir.path()));
    assert_eq!(reasons(dir.path()), ["read auto-slot0.bin: not a regular file"]);
    let error = with_slot(&[7], false, |target, contents| open(dir.path()).save(0, target, 0, contents));
    assert!(error.unwrap_err().to_string().ends_with("auto-slot0.bin: not a regular file"));
}

#[cfg(unix)]
#[test]
fn a_pipe_of_the_name_of_the_manifest_is_a_note_and_the_files_count() {
    let dir = left();
    fs::remove_file(manifest_file(dir.path())).unwrap();
    make_pipe(&manifest_file(dir.path()));
    let (autosave, notes) = noted(dir.path());
    assert_eq!(notes, ["auto-slots.json is not used: not a regular file"]);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
}

#[test]
fn a_folder_of_the_name_of_a_slot_takes_no_room_and_no_slot_is_removed_for_it() {
    let dir = left();
    let bytes = fs::metadata(target_file(dir.path())).unwrap().len();
    fs::create_dir(dir.path().join("auto-slot1.bin")).unwrap();
    let params = kvstate::session::AutosaveParams { max_bytes: Some(bytes + 100), ..params(dir.path()) };
    let autosave = Autosave::open(params).unwrap();
    let notes = autosave.notes();
    assert!(notes.len() == 1 && notes[0].ends_with("auto-slot1.bin: is a directory"), "{notes:?}");
    assert_eq!(autosave.slots().iter().map(|slot| slot.slot_id).collect::<Vec<_>>(), [0]);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
}

#[cfg(unix)]
#[test]
fn a_save_replaces_links_and_writes_nothing_outside_the_folder() {
    let outside = tempdir().unwrap();
    let dir = left_with_sidecar();
    for path in [target_file(dir.path()), sidecar_file(dir.path()), manifest_file(dir.path())] {
        let other = outside.path().join(path.file_name().unwrap());
        fs::write(&other, b"of somebody else").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
    }
    save_with_sidecar(&noted(dir.path()).0, 0, &TOKENS);
    for path in [target_file(dir.path()), sidecar_file(dir.path()), manifest_file(dir.path())] {
        assert!(fs::symlink_metadata(&path).unwrap().is_file(), "{}", path.display());
        let other = outside.path().join(path.file_name().unwrap());
        assert_eq!(fs::read(other).unwrap(), b"of somebody else");
    }
    assert_eq!(names(outside.path()), ["auto-slot0.bin", "auto-slot0.drft", "auto-slots.json"]);
    assert_eq!(loaded(&open(dir.path()), 0).tokens, TOKENS);
}

#[cfg(unix)]
#[test]
fn a_link_takes_no_more_room_than_it_has_itself() {
    let outside = tempdir().unwrap();
    let dir = left();
    let other = outside.path().join("slot");
    fs::rename(target_file(dir.path()), &other).unwrap();
    std::os::unix::fs::symlink(&other, target_file(dir.path())).unwrap();
    let autosave = open(dir.path());
    assert_eq!(autosave.slots()[0].bytes, other.as_os_str().len() as u64);
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
    autosave.remove(0).unwrap();
    assert!(other.exists());
}

#[cfg(unix)]
#[test]
fn folder_and_files_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempdir().unwrap();
    let folder = dir.path().join("slots");
    save_with_sidecar(&open(&folder), 0, &TOKENS);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    for name in names(&folder) {
        assert_eq!(mode(&folder.join(&name)), 0o600, "{name}");
    }
}

// The budget

/// Bytes of a slot with five tokens.
fn size() -> u64 {
    fs::metadata(target_file(left().path())).unwrap().len()
}

#[test]
fn slots_that_were_used_longest_ago_make_room() {
    let dir = tempdir().unwrap();
    let autosave = bounded(dir.path(), 3 * size());
    for slot_id in 0..3 {
        save(&autosave, slot_id, &TOKENS);
    }
    // Slot 0 is restored, and slot 1 works.
    loaded(&autosave, 0);
    autosave.mark(1, 1);
    save(&autosave, 3, &TOKENS);
    assert_eq!(slot_ids(&autosave), [0, 1, 3]);
    save(&autosave, 4, &TOKENS);
    assert_eq!(slot_ids(&autosave), [1, 3, 4]);
    assert_eq!(names(dir.path()).len(), 3 + 2);
}

#[test]
fn a_slot_in_its_own_place_needs_no_more_room() {
    let dir = tempdir().unwrap();
    let autosave = bounded(dir.path(), 2 * size());
    for slot_id in [0, 1, 0, 1] {
        save(&autosave, slot_id, &TOKENS);
    }
    assert_eq!(slot_ids(&autosave), [0, 1]);
}

#[test]
fn what_was_used_last_counts_in_the_next_run() {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    for slot_id in 0..3 {
        save(&autosave, slot_id, &TOKENS);
    }
    loaded(&autosave, 0);
    drop(autosave);
    let autosave = bounded(dir.path(), 2 * size());
    assert_eq!(slot_ids(&autosave), [0, 2]);
    drop(autosave);
    assert_eq!(slot_ids(&open(dir.path())), [0, 2]);
}

#[test]
fn a_file_that_is_newer_than_the_manifest_was_used_when_it_was_written() {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    save(&autosave, 0, &TOKENS);
    save(&autosave, 1, &TOKENS);
    let manifest = fs::read(manifest_file(dir.path())).unwrap();
    save(&autosave, 0, &[1, 2, 3, 4, 6]);
    drop(autosave);
    fs::write(manifest_file(dir.path()), manifest).unwrap();
    let autosave = bounded(dir.path(), size());
    assert_eq!((slot_ids(&autosave), loaded(&autosave, 0).tokens), (vec![0], vec![1, 2, 3, 4, 6]));
}

#[test]
fn a_sidecar_takes_room_and_goes_with_its_slot() {
    let dir = tempdir().unwrap();
    let autosave = open(dir.path());
    let bytes = save_with_sidecar(&autosave, 0, &TOKENS);
    save(&autosave, 1, &TOKENS);
    drop(autosave);
    drop(bounded(dir.path(), bytes + size()));
    assert!(sidecar_file(dir.path()).exists());
    drop(bounded(dir.path(), bytes + size() - 1));
    assert_eq!(names(dir.path()), ["auto-slot1.bin", "auto-slots.json", "auto-slots.lock"]);
}

#[test]
fn a_slot_that_is_larger_than_the_budget_is_refused_and_its_old_file_stands() {
    let dir = tempdir().unwrap();
    let autosave = bounded(dir.path(), size());
    save(&autosave, 0, &TOKENS);
    let long = [1; 6];
    for background in [false, true] {
        let refused = with_slot(&long, false, |target, contents| {
            if background {
                autosave.save_in_background(0, target, 0, contents)
            } else {
                autosave.save(0, target, 0, contents).map(drop)
            }
        });
        let error = refused.unwrap_err();
        assert_eq!(error.status(), Status::OverBudget);
        let text = format!(
            "slot 0: {} bytes do not fit max_bytes: {}, beside 0 bytes of slots used later",
            size() + 4,
            size()
        );
        assert_eq!(error.to_string(), text);
    }
    assert_eq!(loaded(&autosave, 0).tokens, TOKENS);
}

#[test]
fn a_slot_is_refused_where_only_slots_that_were_used_later_could_make_room() {
    let dir = tempdir().unwrap();
    let autosave = bounded(dir.path(), 2 * size());
    // All work, and slot 0 least recently; at the end each is saved.
    for slot_id in 0..3 {
        autosave.mark(slot_id, 5);
    }
    save(&autosave, 1, &TOKENS);
    save(&autosave, 2, &TOKENS);
    let refused = with_slot(&TOKENS, false, |target, contents| autosave.save(0, target, 0, contents));
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::OverBudget { slot_id: 0, newer, .. } if newer == 2 * size()), "{error}");
    assert_eq!((slot_ids(&autosave), autosave.is_dirty(0)), (vec![1, 2], true));
}

#[test]
fn the_slots_that_were_used_last_are_kept_in_whatever_order_they_are_saved() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let dir = tempdir().unwrap();
        let autosave = bounded(dir.path(), 2 * size());
        for slot_id in 0..4 {
            autosave.mark(slot_id, 5);
        }
        for slot_id in order {
            let saved =
                with_slot(&TOKENS, false, |target, contents| autosave.save(slot_id, target, 0, contents));
            assert!(saved.is_ok_and(|saved| saved.notes.is_empty()) || slot_id < 2, "{order:?}");
        }
        assert_eq!(slot_ids(&autosave), [2, 3], "{order:?}");
    }
}
