//! Slot files of a server that keeps its own cells: written from a writer, read through a reader.
#![allow(missing_docs, reason = "a test")]

mod owner;
mod slots;

use slots::support;

use std::fs;
use std::path::{Path, PathBuf};

use kvstate::format::{Checkpoints, FileKind, Identity, Integrity, PartKind};
use kvstate::session::{
    DraftOutcome, Kept, LoadedSlot, SlotContents, SlotLoadParams, StateFile, StateReader, StateWriter, Verify,
};
use kvstate::{Context, Error, Result, Status};
use owner::Owner;
use slots::{DRIVER, TOKENS, checkpoint_states, checkpoints, draft, identity};
use support::{NONE, context, decode, kv, save};
use tempfile::TempDir;

/// A context of one section, with 12 positions in sequence 0.
fn managed() -> Context {
    let mut context = context(2, &[kv(32)]);
    decode(&mut context, 0, 0..12);
    context
}

/// An owner with the same sequence, and another one.
fn owner() -> Owner {
    let owner = Owner::new("kv", &kv(32), 2, true, false);
    for seq in [1, 0] {
        let state = save(&mut managed(), 0, NONE);
        let mut reader = StateReader::of_seq(&state).unwrap();
        reader.plan_kv_cache(&owner.view(), seq, NONE, None).unwrap();
        reader.rewind();
        reader.read_kv_cache(owner.view()).unwrap();
        reader.finish().unwrap();
    }
    owner
}

/// Saves sequence 0 of an owner.
fn save_slot(path: &Path, contents: SlotContents<'_>) -> Result<u64> {
    let owner = owner();
    let view = owner.view();
    let mut writer = StateWriter::new(0);
    writer.write_kv_cache(&view, NONE)?;
    writer.save_slot(path, contents, false)
}

fn saved() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let contents = SlotContents { tokens: &TOKENS, identity: identity(), ..SlotContents::default() };
    let size = save_slot(&path, contents).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), size);
    (dir, path)
}

fn expected(verify: Verify) -> SlotLoadParams<'static> {
    SlotLoadParams { identity: identity(), verify, ..SlotLoadParams::default() }
}

/// Loads into sequence 1 of an owner.
fn load_slot(path: &Path, owner: &Owner, params: SlotLoadParams<'_>) -> Result<LoadedSlot> {
    let file = StateFile::open(path, FileKind::Sequence, params.n_token_capacity)?;
    let mut reader = StateReader::of_slot(&file, params)?;
    reader.plan_kv_cache(&owner.view(), 1, NONE, None)?;
    let slot = reader.slot()?;
    reader.rewind();
    reader.read_kv_cache(owner.view())?;
    reader.finish()?;
    Ok(slot)
}

/// The file is refused for this reason, and the owner is as it was.
fn refusal(path: &Path, params: SlotLoadParams<'_>) -> Error {
    let owner = owner();
    let before = owner.image();
    let error = load_slot(path, &owner, params).expect_err("it is refused");
    assert!(owner.image() == before, "{error}");
    error
}

#[test]
fn what_a_writer_saves_a_context_loads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let states = checkpoint_states(&mut managed());
    let contents = SlotContents {
        tokens: &TOKENS,
        checkpoints: checkpoints(&states),
        draft: None,
        driver: DRIVER,
        identity: identity(),
        sidecar: false,
    };
    save_slot(&path, contents).unwrap();
    let mut target = context(2, &[kv(32)]);
    let loaded = target.slot_load(&path, 0, expected(Verify::Full)).unwrap();
    assert_eq!(loaded.notes, Vec::<String>::new());
    assert_eq!(
        (loaded.tokens, loaded.verified, loaded.identity),
        (TOKENS.to_vec(), Verify::Full, identity())
    );
    assert_eq!((loaded.checkpoints.len(), loaded.driver.as_deref()), (3, Some(DRIVER)));
    assert_eq!(save(&mut target, 0, NONE), save(&mut managed(), 0, NONE));
}

#[test]
fn it_begins_with_the_file_that_a_writer_saves_without_it() {
    let (dir, path) = saved();
    let plain = dir.path().join("plain.bin");
    let owner = owner();
    let view = owner.view();
    let mut writer = StateWriter::new(0);
    writer.write_kv_cache(&view, NONE).unwrap();
    let size = usize::try_from(writer.save_file(&plain, &TOKENS, false).unwrap()).unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes[..size], fs::read(&plain).unwrap());
    assert_eq!(bytes[size..][..4], *b"KVSI");
}

#[test]
fn what_a_context_saves_a_reader_loads_but_for_the_draft() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let mut from = managed();
    let states = checkpoint_states(&mut from);
    let (tokens, identity) = (&TOKENS[..], identity());
    let contents =
        SlotContents { tokens, checkpoints: checkpoints(&states), identity, ..SlotContents::default() };
    from.slot_save(&path, 0, contents).unwrap();
    let owner = owner();
    let loaded = load_slot(&path, &owner, expected(Verify::Full)).unwrap();
    let mut target = context(2, &[kv(32)]);
    assert_eq!(loaded, target.slot_load(&path, 1, expected(Verify::Full)).unwrap());
    assert_eq!((loaded.checkpoints.len(), loaded.draft), (3, DraftOutcome::Absent));
    assert_eq!(loaded.kept, Kept { pos_min: 0, pos_max: 11, n_cells: 12, n_cut: 0 });
    assert_eq!(owner.positions(1), (0..12).collect::<Vec<_>>());
    assert_eq!(owner.bytes_of(1), owner.bytes_of(0));

    let contents = SlotContents { draft: Some((&mut draft(), 1)), driver: DRIVER, ..SlotContents::default() };
    from.slot_save(&path, 0, contents).unwrap();
    let loaded = load_slot(&path, &owner, SlotLoadParams::default()).unwrap();
    assert!(matches!(loaded.draft, DraftOutcome::Dropped(reason) if reason.contains("target's alone")));
    assert_eq!(loaded.driver, None);
}

#[test]
fn a_plain_file_loads_with_a_note() {
    let (dir, _) = saved();
    let path = dir.path().join("plain.bin");
    let size = managed().state_seq_save_file(&path, 0, &TOKENS).unwrap();
    let loaded = load_slot(&path, &owner(), expected(Verify::Full)).unwrap();
    assert_eq!(loaded.notes, ["the file has no identity and no checksums: nothing was compared"]);
    assert_eq!((loaded.verified, loaded.append_start), (Verify::None, size));
}

#[test]
fn a_file_of_another_model_or_salt_is_refused() {
    let (_dir, path) = saved();
    let other = |identity| refusal(&path, SlotLoadParams { identity, ..SlotLoadParams::default() });
    let error = other(Identity { model: b"gemma 4".to_vec(), ..identity() });
    let text = "failed to restore sequence state: model: the state has 'gemma 3', the cache 'gemma 4' (identity of the slot file)";
    assert_eq!((error.to_string(), error.status()), (text.to_owned(), Status::Mismatch));
    let error = other(Identity { salt: b"another".to_vec(), ..identity() });
    assert!(error.to_string().contains("salt: the state has 6 bytes of crc32c"), "{error}");
}

#[test]
fn a_byte_flipped_in_header_tokens_or_state_is_refused_and_one_behind_them_ignored() {
    let (_dir, path) = saved();
    let good = fs::read(&path).unwrap();
    let start = Integrity::find(good.len() as u64, good.last_chunk().unwrap()).unwrap();
    let mut owner = owner();
    let before = owner.image();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&path, bad).unwrap();
        let loaded = load_slot(&path, &owner, expected(Verify::Full));
        if (at as u64) < start {
            let error = loaded.expect_err("it is refused");
            assert!(owner.image() == before, "byte {at}: {error}");
        } else {
            assert_eq!(loaded.expect("the state stands").verified, Verify::None, "byte {at}");
            owner = self::owner();
        }
    }
}

#[test]
fn what_a_server_appends_is_looked_for_where_the_save_has_ended() {
    let (_dir, path) = saved();
    let size = fs::metadata(&path).unwrap().len();
    let loaded = load_slot(&path, &owner(), expected(Verify::Full)).unwrap();
    assert_eq!((loaded.append_start, loaded.notes), (size, Vec::new()));

    // As newer llama-server does.
    let states = checkpoint_states(&mut managed());
    let mut bytes = fs::read(&path).unwrap();
    Checkpoints(checkpoints(&states))
        .write(|piece| {
            bytes.extend(piece);
            Ok(())
        })
        .unwrap();
    fs::write(&path, &bytes).unwrap();
    let loaded = load_slot(&path, &owner(), expected(Verify::Full)).unwrap();
    assert_eq!((loaded.append_start, loaded.checkpoints.len()), (size, 3));
    assert_eq!((loaded.verified, loaded.notes), (Verify::Full, Vec::new()));
    let loaded = context(2, &[kv(32)]).slot_load(&path, 1, expected(Verify::Full)).unwrap();
    assert_eq!((loaded.append_start, loaded.checkpoints.len()), (size, 3));

    // The checksums are no longer at the end, and hold.
    let middle = 12 + 4 * TOKENS.len() + 100;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = refusal(&path, expected(Verify::Full));
    assert!(error.to_string().contains("crc32c of the memory state"), "{error}");
}

#[test]
fn checkpoints_that_the_caller_reads_itself_are_not_noted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let states = checkpoint_states(&mut managed());
    let contents =
        SlotContents { checkpoints: checkpoints(&states), identity: identity(), ..SlotContents::default() };
    save_slot(&path, contents).unwrap();
    let params = SlotLoadParams { n_ctx_checkpoints: 0, ..expected(Verify::Full) };
    let loaded = load_slot(&path, &owner(), params).unwrap();
    assert_eq!((loaded.checkpoints.len(), loaded.n_checkpoints_in_file), (0, 3));
    assert_eq!(loaded.notes, Vec::<String>::new());
    // They begin where the memory state ends.
    let start = usize::try_from(loaded.append_start).unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes[start..][..4], PartKind::CHECKPOINTS.magic().to_le_bytes());
}

#[test]
fn a_reader_that_starts_over_still_knows_the_slot() {
    let (_dir, path) = saved();
    let file = StateFile::open(&path, FileKind::Sequence, 5).unwrap();
    let owner = owner();
    let mut reader = StateReader::of_slot(&file, expected(Verify::Full)).unwrap();
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).unwrap();
    reader.restart(false);
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).unwrap();
    assert_eq!(reader.slot().unwrap().verified, Verify::Full);
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let (_dir, path) = saved();
    let refused = |result: Result<u64>| result.unwrap_err().to_string();
    let whole = StateWriter::new(-1).save_slot(&path, SlotContents::default(), false);
    assert_eq!(refused(whole), "seq_id: -1, a slot file holds one sequence");
    let mut draft = draft();
    let contents = SlotContents { draft: Some((&mut draft, 1)), ..SlotContents::default() };
    let alone = "draft: a state of views is the target's alone: no draft context can be named";
    assert_eq!(refused(save_slot(&path, contents)), alone);

    let file = StateFile::open(&path, FileKind::Sequence, 5).unwrap();
    let params = SlotLoadParams { draft: Some((&mut draft, 0)), ..SlotLoadParams::default() };
    assert_eq!(StateReader::of_slot(&file, params).unwrap_err().to_string(), alone);
    let params = SlotLoadParams { p1: Some(4), ..SlotLoadParams::default() };
    let error = StateReader::of_slot(&file, params).unwrap_err();
    assert_eq!(error.to_string(), "p1: 4, a reader restores all positions");
    let mut reader = StateReader::of_file(&file);
    let not_a_slot = "reader: it was not opened as a slot, or the slot has been given already";
    assert_eq!(reader.slot().unwrap_err().to_string(), not_a_slot);
    let owner = owner();
    let mut reader = StateReader::of_slot(&file, expected(Verify::None)).unwrap();
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).unwrap();
    reader.slot().unwrap();
    assert_eq!(reader.slot().unwrap_err().to_string(), not_a_slot);
    reader.rewind();
    let rewound = "reader: it was rewound: the slot is asked for when the state is planned";
    assert_eq!(reader.slot().unwrap_err().to_string(), rewound);
}
