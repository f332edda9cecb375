//! Slot files: what they hold, what comes back, and what is refused or left out by name.
#![allow(missing_docs, reason = "a test")]

mod slots;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use kvstate::context::UbatchToken;
use kvstate::format::{
    Checkpoint, CheckpointSpan, Checkpoints, GgmlType, Identity, Integrity, Part, PartKind,
};
use kvstate::memory::{KvParams, LayerParams};
use kvstate::session::{
    DraftOutcome, Kept, LoadedSlot, Require, SlotContents, SlotLoadParams, Verify, slot_path,
};
use kvstate::storage::{ProgressCallback, Threads};
use kvstate::types::CellExt;
use kvstate::{Context, Error, Status};
use slots::support::{context, decode, image, is_intact, kv, place, positions, save, tensor};
use slots::{
    DRIVER, TOKENS, busy_draft, busy_target, checkpoint_states, checkpoints, draft, identity, load_slot,
    save_slot, target, target_params,
};
use tempfile::TempDir;

/// A folder with the slot file that has everything.
fn saved() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    save_slot(&path);
    (dir, path)
}

fn load(path: &Path) -> LoadedSlot {
    load_slot(path, &mut busy_target(), &mut busy_draft(), Verify::Full).unwrap()
}

/// What the target's own sequence file would be.
fn plain(tokens: &[i32]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plain.bin");
    target().state_seq_save_file(&path, 0, tokens).unwrap();
    fs::read(path).unwrap()
}

fn none() -> SlotLoadParams<'static> {
    SlotLoadParams::default()
}

#[test]
fn a_slot_file_begins_with_the_sequence_file_and_is_as_large_as_the_save_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let size = save_slot(&path);
    let (bytes, plain) = (fs::read(&path).unwrap(), plain(&TOKENS));
    assert_eq!(bytes.len() as u64, size);
    assert_eq!(bytes[..plain.len()], plain);
    assert_eq!(bytes[plain.len()..][..4], *b"SCKP");
    let loaded = busy_target().state_seq_load_file(&path, 1, 5).unwrap();
    assert_eq!((loaded.tokens, loaded.state_end), (TOKENS.to_vec(), plain.len() as u64));
}

#[test]
fn everything_comes_back() {
    let (_dir, path) = saved();
    let (mut into, mut draft_into) = (busy_target(), busy_draft());
    let loaded = load_slot(&path, &mut into, &mut draft_into, Verify::Full).unwrap();

    let mut source = target();
    let states = checkpoint_states(&mut source);
    let owned = checkpoints(&states).into_iter().map(|c| Checkpoint {
        span: c.span,
        target: c.target.to_vec(),
        draft: c.draft.to_vec(),
        driver: c.driver.to_vec(),
    });
    let want = LoadedSlot {
        tokens: TOKENS.to_vec(),
        kept: Kept { pos_min: 0, pos_max: 11, n_cells: 12, n_cut: 0 },
        target_bytes: plain(&[]).len() as u64 - 12,
        append_start: plain(&TOKENS).len() as u64,
        checkpoints: owned.collect(),
        n_checkpoints_in_file: 3,
        draft: DraftOutcome::Restored(save(&mut draft(), 1, slots::support::NONE).len() as u64),
        driver: Some(DRIVER.to_vec()),
        verified: Verify::Full,
        identity: identity(),
        notes: Vec::new(),
    };
    assert_eq!(loaded, want);
    assert_eq!(positions(&into, 0, 1), (0..12).collect::<Vec<_>>());
    assert_eq!(positions(&draft_into, 0, 0), (0..12).collect::<Vec<_>>());
    assert!(is_intact(&into, 1, 0) && is_intact(&draft_into, 0, 1));
    assert_eq!(into.seq_pos_max(1).unwrap(), draft_into.seq_pos_max(0).unwrap());
}

#[test]
fn a_short_prompt_has_no_checkpoints_and_its_draft_state_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let contents = SlotContents { draft: Some((&mut draft(), 1)), driver: DRIVER, ..SlotContents::default() };
    target().slot_save(&path, 0, contents).unwrap();
    let mut into = busy_draft();
    let params = SlotLoadParams { draft: Some((&mut into, 0)), ..none() };
    let loaded = busy_target().slot_load(&path, 1, params).unwrap();
    assert_eq!((loaded.checkpoints.len(), loaded.driver), (0, Some(DRIVER.to_vec())));
    assert_eq!(into.seq_pos_max(0).unwrap(), 11);
}

#[test]
fn a_driver_without_a_draft_model_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    target().slot_save(&path, 0, SlotContents { driver: DRIVER, ..SlotContents::default() }).unwrap();
    let loaded = busy_target().slot_load(&path, 1, none()).unwrap();
    assert_eq!((loaded.draft, loaded.driver), (DraftOutcome::Absent, Some(DRIVER.to_vec())));
}

#[test]
fn the_last_checkpoints_are_kept_and_the_others_counted() {
    let (_dir, path) = saved();
    let params = SlotLoadParams { n_ctx_checkpoints: 2, identity: identity(), ..none() };
    let loaded = busy_target().slot_load(&path, 1, params).unwrap();
    let n_tokens: Vec<_> = loaded.checkpoints.iter().map(|c| c.span.n_tokens()).collect();
    assert_eq!((n_tokens, loaded.n_checkpoints_in_file), (vec![8, 12], 3));
    assert!(loaded.notes.contains(&"1 of 3 checkpoints are left out: 2 are kept".to_owned()));
}

#[test]
fn a_file_of_llama_cpp_loads_with_a_note() {
    let kv = KvParams::new(
        64,
        2,
        LayerParams { k: tensor(GgmlType::F16, 64), v: Some(tensor(GgmlType::F16, 64)) },
    );
    let mut into = context(1, &[kv]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny2x64_kf16_vf16_n64_none.slot");
    let params = SlotLoadParams { identity: identity(), verify: Verify::Full, ..none() };
    let loaded = into.slot_load(&path, 0, params).unwrap();
    assert_eq!((loaded.tokens.len(), loaded.target_bytes), (64, 33_876 - 12 - 64 * 4));
    assert_eq!((loaded.verified, loaded.draft), (Verify::None, DraftOutcome::Absent));
    assert_eq!(loaded.notes, ["the file has no identity and no checksums: nothing was compared"]);
    assert_eq!(into.seq_pos_max(0).unwrap(), 63);
}

#[test]
fn checkpoints_of_llama_server_are_read_without_checksums() {
    let (_dir, path) = saved();
    let span = CheckpointSpan::new(4, 0, 3).unwrap();
    let mut bytes = plain(&TOKENS);
    Checkpoints(vec![Checkpoint { span, target: &b"partial"[..], draft: b"", driver: b"" }])
        .write(|piece| {
            bytes.extend(piece);
            Ok(())
        })
        .unwrap();
    fs::write(&path, bytes).unwrap();
    let loaded = load(&path);
    assert_eq!(loaded.checkpoints.len(), 1);
    assert_eq!((loaded.checkpoints[0].span, &loaded.checkpoints[0].target[..]), (span, &b"partial"[..]));
    assert_eq!(loaded.notes, ["the file has no identity and no checksums: nothing was compared"]);
}

// The draft

/// Loads where the draft state cannot be restored: the target is there, and the draft's sequence is empty.
fn drops_draft(path: &Path, draft: &mut Context) -> LoadedSlot {
    let mut into = busy_target();
    let loaded = load_slot(path, &mut into, draft, Verify::Full).unwrap();
    assert!(is_intact(&into, 1, 0));
    assert_eq!((into.seq_pos_max(1).unwrap(), draft.seq_pos_max(0).unwrap()), (11, -1));
    loaded
}

#[test]
fn a_draft_state_that_does_not_fit_is_dropped_with_its_driver_and_the_target_stands() {
    let (_dir, path) = saved();
    let wide = LayerParams { k: tensor(GgmlType::F16, 8), v: Some(tensor(GgmlType::F16, 2)) };
    let mut other = context(2, &[KvParams::new(16, 2, wide)]);
    decode(&mut other, 0, 0..3);
    let loaded = drops_draft(&path, &mut other);
    let DraftOutcome::Dropped(reason) = loaded.draft else { panic!("{loaded:?}") };
    assert_eq!(reason, "mismatched key row size: the state has 8, the cache 16 (section kv, layer 0)",);
    assert_eq!((loaded.driver, loaded.checkpoints.len()), (None, 3));
}

#[test]
fn a_draft_state_for_which_there_is_no_room_is_dropped() {
    let (_dir, path) = saved();
    let mut small = context(2, &[kv(10)]);
    decode(&mut small, 0, 0..3);
    let loaded = drops_draft(&path, &mut small);
    assert!(
        matches!(&loaded.draft, DraftOutcome::Dropped(reason) if reason.contains("12 available cells")),
        "{loaded:?}"
    );
}

#[test]
fn a_draft_state_without_a_context_for_it_is_dropped() {
    let (_dir, path) = saved();
    let loaded =
        busy_target().slot_load(&path, 1, SlotLoadParams { identity: identity(), ..none() }).unwrap();
    let reason = "draft: no context is named for the draft state of the file".to_owned();
    assert_eq!((loaded.draft, loaded.driver), (DraftOutcome::Dropped(reason), None));
}

#[test]
fn a_file_without_a_draft_state_empties_the_drafts_sequence() {
    let (_dir, path) = saved();
    fs::write(&path, plain(&TOKENS)).unwrap();
    assert_eq!(drops_draft(&path, &mut busy_draft()).draft, DraftOutcome::Absent);
}

#[test]
fn a_load_that_is_refused_leaves_target_and_draft_as_they_were() {
    let (_dir, path) = saved();
    let mut small = context(2, &slots::support::iswa(8, 16, 4));
    decode(&mut small, 1, 0..3);
    let mut draft = busy_draft();
    let before = (image(&small), image(&draft));
    let error = load_slot(&path, &mut small, &mut draft, Verify::None).unwrap_err();
    assert_eq!(error.status(), Status::NoSpace);
    assert!((image(&small), image(&draft)) == before);
}

// Snapshots

#[test]
fn a_snapshot_of_a_slot_writes_what_a_save_would_have_written() {
    let (dir, path) = saved();
    let (mut target, mut draft) = (target(), draft());
    let states = checkpoint_states(&mut target);
    for sidecar in [false, true] {
        let contents = SlotContents {
            tokens: &TOKENS,
            checkpoints: checkpoints(&states),
            draft: Some((&mut draft, 1)),
            driver: DRIVER,
            identity: identity(),
            sidecar,
        };
        let snapshot = target.slot_snapshot(0, contents).unwrap().with_threads(Threads::new(1));
        let (first, second) = (dir.path().join("first.bin"), dir.path().join("second.bin"));
        let bytes = snapshot.save(&first, false, None).unwrap();
        assert_eq!(bytes, snapshot.size().unwrap());
        assert_eq!(snapshot.save_in_background(&second, false, None).unwrap().wait().unwrap(), bytes);
        assert!(fs::read(&first).unwrap() == fs::read(&second).unwrap());
        assert_eq!(fs::read(&first).unwrap() == fs::read(&path).unwrap(), !sidecar);
        assert_eq!(load(&second), load(&path));
    }
}

#[test]
fn a_snapshot_of_a_slot_does_not_change_with_the_contexts() {
    let (_dir, path) = saved();
    let want = load(&path);
    let (mut target, mut draft) = (target(), draft());
    let states = checkpoint_states(&mut target);
    let contents = SlotContents {
        tokens: &TOKENS,
        checkpoints: checkpoints(&states),
        draft: Some((&mut draft, 1)),
        driver: DRIVER,
        identity: identity(),
        sidecar: false,
    };
    let snapshot = target.slot_snapshot(0, contents).unwrap();
    target.clear(true).unwrap();
    draft.clear(true).unwrap();
    drop((target, draft));
    snapshot.save(&path, false, None).unwrap();
    assert_eq!(load(&path), want);
}

#[test]
fn a_save_of_a_snapshot_that_is_cancelled_leaves_the_old_files() {
    let (dir, path) = saved();
    let before = fs::read(&path).unwrap();
    let mut draft = draft();
    let contents = SlotContents { draft: Some((&mut draft, 1)), sidecar: true, ..SlotContents::default() };
    let snapshot = target().slot_snapshot(0, contents).unwrap();
    let mut cancel = ProgressCallback::new(|_| ControlFlow::Break(()));
    let error = snapshot.save(&path, false, Some(&mut cancel)).unwrap_err();
    assert_eq!(error.status(), Status::Cancelled);
    assert!(fs::read(&path).unwrap() == before && fs::read_dir(dir.path()).unwrap().count() == 1);
}

// Identity

/// The reason for which a load is refused, before anything changes.
fn refused(path: &Path, into: &mut Context, identity: Identity) -> String {
    let before = image(into);
    let error = into.slot_load(path, 1, SlotLoadParams { identity, ..none() }).unwrap_err();
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    assert!(image(into) == before);
    error.to_string()
}

#[test]
fn a_file_of_another_model_is_refused_by_name() {
    let (_dir, path) = saved();
    let other = Identity { model: b"\x00\xff".to_vec(), ..identity() };
    assert_eq!(
        refused(&path, &mut busy_target(), other),
        "failed to restore sequence state: model: the state has 'gemma 3', the cache 00ff (identity of the slot file)"
    );
}

#[test]
fn a_file_with_another_salt_is_refused_and_the_salt_is_not_shown() {
    let (_dir, path) = saved();
    let other = Identity { salt: Vec::new(), ..identity() };
    assert_eq!(
        refused(&path, &mut busy_target(), other),
        format!(
            "failed to restore sequence state: salt: the state has 6 bytes of crc32c {:08x}, the cache none \
             (identity of the slot file)",
            crc32c::crc32c(b"tenant")
        )
    );
}

#[test]
fn a_file_of_other_types_or_rotation_is_refused_by_section_and_layer() {
    let (_dir, path) = saved();
    let reason = |change: fn(&mut Vec<KvParams>)| {
        let mut sections = target_params();
        change(&mut sections);
        let reason = refused(&path, &mut context(2, &sections), identity());
        reason.replace("failed to restore sequence state: ", "")
    };
    assert_eq!(
        reason(|s| s[1].layers[1].k = tensor(GgmlType::BF16, 4)),
        "shape: the state has f16 x 4, the cache bf16 x 4 (section swa, K of layer 1; convert_types allows it)"
    );
    assert_eq!(
        reason(|s| s[0].layers[0].v = None),
        "tensor: the state has V of layer 0, the cache V of layer 1 (section base)"
    );
    assert_eq!(
        reason(|s| s[0].n_rot_k = 64),
        "setting: the state has 0, the cache 64 (section base, ROTK; convert_types allows it)"
    );
    assert_eq!(
        reason(|s| s[0].n_rot_v = 64),
        "setting: the state has 0, the cache 64 (section base, ROTV; convert_types allows it)"
    );
    assert_eq!(
        reason(|s| s[1].layers.truncate(1)),
        "tensor: the state has K of layer 1, the cache V of layer 0 (section swa)"
    );
    assert_eq!(
        reason(|s| s.truncate(1)),
        "sections: the state has 2, the cache 1 (identity of the slot file)"
    );
}

#[test]
fn a_model_that_only_one_side_names_is_noted() {
    let (_dir, path) = saved();
    let nameless = Identity { model: Vec::new(), ..identity() };
    let loaded = busy_target()
        .slot_load(
            &path,
            1,
            SlotLoadParams { identity: nameless.clone(), draft: Some((&mut busy_draft(), 0)), ..none() },
        )
        .unwrap();
    assert_eq!(loaded.notes, ["the file names a model, the caller none: not compared"]);
    let contents = SlotContents { identity: nameless, ..SlotContents::default() };
    target().slot_save(&path, 0, contents).unwrap();
    assert_eq!(load(&path).notes, ["the file names no model: not compared"]);
}

// What a file has to have

/// What a load that requires something of the file at `path` is refused with.
fn required(path: &Path, require: Require, identity: Identity) -> Error {
    let mut target = busy_target();
    let before = image(&target);
    let params = SlotLoadParams { identity, require, ..none() };
    let error = target.slot_load(path, 1, params).expect_err("it is refused");
    assert!(image(&target) == before);
    error
}

#[test]
fn a_file_without_an_identity_is_refused_where_one_is_required() {
    let (_dir, path) = saved();
    let model = Identity { model: b"gemma 3".to_vec(), ..Identity::default() };
    let missing = "failed to restore sequence state: model: the state has none, and it is required, the cache 'gemma 3' \
        (identity of the slot file)";
    // Checksums without a model, then neither.
    target().slot_save(&path, 0, SlotContents::default()).unwrap();
    let error = required(&path, Require::IDENTITY, model.clone());
    assert_eq!((error.to_string(), error.status()), (missing.to_owned(), Status::Mismatch));
    fs::write(&path, plain(&TOKENS)).unwrap();
    assert_eq!(required(&path, Require::IDENTITY, model).to_string(), missing);
}

#[test]
fn a_file_without_checksums_is_refused_where_they_are_required() {
    let (_dir, path) = saved();
    let mut damaged = fs::read(&path).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    for (bytes, missing) in [(plain(&TOKENS), "none"), (damaged, "none that are whole: ")] {
        fs::write(&path, bytes).unwrap();
        let error = required(&path, Require::CHECKSUMS, Identity::default());
        let (text, expected) = (error.to_string(), "(expected those of a slot file, which are required)");
        assert!(
            text.starts_with(&format!("failed to restore sequence state: checksums: {missing}")),
            "{text}"
        );
        assert!(text.ends_with(expected) && error.status() == Status::Corrupt, "{text}");
    }
}

#[test]
fn a_file_that_has_what_is_required_is_loaded() {
    let (_dir, path) = saved();
    let params = || SlotLoadParams { identity: identity(), require: Require::all(), ..none() };
    assert_eq!(busy_target().slot_load(&path, 1, params()).unwrap().identity, identity());
    // Also where something stands behind it.
    fs::write(&path, [&fs::read(&path).unwrap()[..], b"WHATever"].concat()).unwrap();
    assert_eq!(busy_target().slot_load(&path, 1, params()).unwrap().identity, identity());
}

#[test]
fn who_requires_an_identity_names_a_model() {
    let (_dir, path) = saved();
    let nameless = Identity { model: Vec::new(), ..identity() };
    let error = required(&path, Require::IDENTITY, nameless);
    assert_eq!(error.to_string(), "require: an identity is required, and the caller names no model");
}

// What is unknown

/// A file with these appendices between the memory state and the checksums.
fn with_appendices(path: &Path, appendices: &[&[u8]]) {
    let mut bytes = plain(&TOKENS);
    let head = 12 + 4 * TOKENS.len();
    let part = |kind, bytes: &[u8]| Part { kind, crc32c: crc32c::crc32c(bytes), len: bytes.len() as u64 };
    let mut parts = vec![part(PartKind::HEAD, &bytes[..head]), part(PartKind::STATE, &bytes[head..])];
    for appendix in appendices {
        let magic = u32::from_le_bytes(*appendix.first_chunk().unwrap());
        parts.push(part(PartKind::from_magic(magic), appendix));
        bytes.extend(*appendix);
    }
    // The geometry of a target like any other.
    let geometry = integrity_of(&saved().1).geometry;
    bytes.extend(Integrity { identity: identity(), geometry, parts }.to_bytes().unwrap());
    fs::write(path, bytes).unwrap();
}

fn integrity_of(path: &Path) -> Integrity {
    let bytes = fs::read(path).unwrap();
    let start = Integrity::find(bytes.len() as u64, bytes.last_chunk().unwrap()).unwrap();
    let mut input = kvstate::format::Cursor::new(&bytes);
    input.bytes("before", start).unwrap();
    Integrity::read(&mut input).unwrap()
}

const CHECKPOINT: &[u8] = b"SCKP\x01\0\0\0\x01\0\0\0\x04\0\0\0\0\0\0\0\0\0\0\0\x03\0\0\0\x01\0\0\0\0\0\0\0!\
    \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

#[test]
fn an_unknown_appendix_is_skipped_where_the_checksums_list_it() {
    let (_dir, path) = saved();
    with_appendices(&path, &[b"WHATever", CHECKPOINT]);
    let loaded = load(&path);
    assert_eq!(loaded.notes, ["unknown appendix 'WHAT' of 8 bytes: skipped"]);
    assert_eq!((loaded.checkpoints.len(), loaded.verified), (1, Verify::Full));
}

#[test]
fn behind_an_unknown_appendix_nothing_is_read_without_checksums() {
    let (_dir, path) = saved();
    fs::write(&path, [&plain(&TOKENS), &b"WHATever"[..], CHECKPOINT].concat()).unwrap();
    let loaded = load(&path);
    assert_eq!(loaded.checkpoints.len(), 0);
    let skipped =
        format!("unknown appendix 'WHAT': it and the {} bytes from it on are skipped", 8 + CHECKPOINT.len());
    assert_eq!(loaded.notes[0], skipped);
}

#[test]
fn bytes_behind_the_checksums_leave_them_as_they_are() {
    let (_dir, path) = saved();
    fs::write(&path, [&fs::read(&path).unwrap()[..], b"WHATever"].concat()).unwrap();
    let loaded = load(&path);
    assert_eq!(loaded.notes, ["unknown appendix 'WHAT': it and the 8 bytes from it on are skipped"]);
    assert_eq!((loaded.verified, loaded.checkpoints.len()), (Verify::Full, 3));
    // The identity too.
    let other = Identity { model: b"another".to_vec(), ..identity() };
    assert!(refused(&path, &mut busy_target(), other).contains("model: "));
}

#[test]
fn an_appendix_with_bytes_behind_it_is_left_out() {
    let (_dir, path) = saved();
    with_appendices(&path, &[&[CHECKPOINT, b"!"].concat()]);
    let loaded = load(&path);
    assert_eq!(loaded.notes, ["checkpoints are ignored: bytes behind the appendix: 1 (expected none)"]);
    assert_eq!(loaded.checkpoints.len(), 0);
}

#[test]
fn a_memory_state_that_ends_elsewhere_than_the_checksums_say_is_refused() {
    let (_dir, path) = saved();
    let mut bytes = plain(&TOKENS);
    bytes.push(0);
    let head = 12 + 4 * TOKENS.len();
    let part = |kind, bytes: &[u8]| Part { kind, crc32c: crc32c::crc32c(bytes), len: bytes.len() as u64 };
    let parts = vec![part(PartKind::HEAD, &bytes[..head]), part(PartKind::STATE, &bytes[head..])];
    let geometry = integrity_of(&path).geometry;
    let end = bytes.len();
    bytes.extend(Integrity { identity: identity(), geometry, parts }.to_bytes().unwrap());
    fs::write(&path, bytes).unwrap();
    let error = load_slot(&path, &mut busy_target(), &mut busy_draft(), Verify::None).unwrap_err();
    let text =
        format!("failed to restore sequence state: end of the memory state: {} (expected {end})", end - 1);
    assert_eq!(error.to_string(), text);
}

// Saving

#[test]
fn the_checksums_are_those_of_the_bytes_however_they_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    // Alone in the cache, tensors are written from where they lie; every other cell, they are gathered.
    for every in [1, 2] {
        let layer = LayerParams { k: tensor(GgmlType::F16, 1024), v: Some(tensor(GgmlType::F16, 512)) };
        let mut large = context(2, &[KvParams::new(768, 2, layer)]);
        let token = |i: i32| UbatchToken {
            pos: i / every,
            ext: CellExt::default(),
            seq_ids: if i % every == 0 { &[0] } else { &[1] },
        };
        let slot = large.prepare(&(0..768).map(token).collect::<Vec<_>>()).unwrap();
        large.commit(&slot).unwrap();
        for plane in slots::support::planes(&large, 0, 0) {
            let n = usize::try_from(plane.shape().span(768).unwrap()).unwrap();
            place::write(plane, 0, &slots::support::noise(&[every.into()], n));
        }
        // Larger than what is gathered at a time.
        let blob = slots::support::noise(&[7], 3 << 20);
        let span = CheckpointSpan::new(1, 0, 0).unwrap();
        let contents = SlotContents {
            checkpoints: vec![Checkpoint { span, target: &blob[..], draft: &blob[..99], driver: b"" }],
            draft: Some((&mut draft(), 1)),
            ..SlotContents::default()
        };
        let size = large.slot_save(&path, 0, contents).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, size);
        let mut start = 0;
        for part in integrity_of(&path).parts {
            let end = start + usize::try_from(part.len).unwrap();
            assert_eq!(crc32c::crc32c(&bytes[start..end]), part.crc32c, "{} of every {every}", part.kind);
            start = end;
        }
        let (before, last) = bytes.split_last_chunk().unwrap();
        assert_eq!(u32::from_le_bytes(*last), crc32c::crc32c(before));
        let plain = dir.path().join("plain.bin");
        let n = large.state_seq_save_file(&plain, 0, &[]).unwrap();
        assert!(fs::read(plain).unwrap() == bytes[..usize::try_from(n).unwrap()]);
    }
}

#[test]
fn a_save_that_is_cancelled_or_refused_leaves_the_old_file_and_nothing_beside_it() {
    let (dir, path) = saved();
    let old = fs::read(&path).unwrap();
    let mut source = target();
    source.set_progress(Some(ProgressCallback::new(|_| ControlFlow::Break(()))));
    let error = source.slot_save(&path, 0, SlotContents::default()).unwrap_err();
    assert_eq!(error.status(), Status::Cancelled);
    source.set_progress(None);
    let empty =
        Checkpoint { span: CheckpointSpan::new(1, 0, 0).unwrap(), target: &b""[..], draft: b"", driver: b"" };
    let contents = SlotContents { checkpoints: vec![empty], ..SlotContents::default() };
    let error = source.slot_save(&path, 0, contents).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { ref name, .. } if name == "checkpoints[0].target"),
        "{error}"
    );
    let contents = SlotContents { draft: Some((&mut draft(), 7)), ..SlotContents::default() };
    let error = source.slot_save(&path, 0, contents).unwrap_err();
    assert_eq!(error.to_string(), "seq_id 7 is out of range [0, 2)");
    assert_eq!(fs::read(&path).unwrap(), old);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_name_that_is_too_long_for_a_sidecar_is_refused_before_the_slot_file_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    // 255 bytes are the most that a name has: this one has 253, its sidecar's 256.
    let path = dir.path().join(format!("{}.b", "s".repeat(251)));
    target().slot_save(&path, 0, SlotContents::default()).unwrap();
    let old = fs::read(&path).unwrap();
    let mut draft = draft();
    let contents = SlotContents { draft: Some((&mut draft, 1)), sidecar: true, ..SlotContents::default() };
    let error = target().slot_save(&path, 0, contents).unwrap_err();
    let sidecar = path.with_extension("drft");
    assert!(error.to_string().starts_with(&format!("open {}: ", sidecar.display())), "{error}");
    assert_eq!(fs::read(&path).unwrap(), old);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_name_from_a_client_is_that_of_a_file_in_the_directory() {
    assert_eq!(slot_path("slots", "auto-slot0.bin").unwrap(), Path::new("slots/auto-slot0.bin"));
    for (name, reason) in [
        ("", "filename: '', is not the name of a file"),
        (".", "filename: '.', is not the name of a file"),
        ("..", "filename: '..', is not the name of a file"),
        ("../slot.bin", "filename: '../slot.bin', a name has no separator"),
        ("a\\b", "filename: 'a\\\\b', a name has no separator"),
        ("c:slot", "filename: 'c:slot', a name has no separator"),
        ("a\0b", "filename: 'a\\u{0}b', a name has no separator"),
        (".kvstate-1-2.tmp", "filename: '.kvstate-1-2.tmp', is the name of a temporary file"),
    ] {
        assert_eq!(slot_path("slots", name).unwrap_err().to_string(), reason);
    }
}
