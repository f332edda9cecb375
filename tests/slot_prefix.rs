//! A slot file up to a position: what of its parts goes with the prompt, and what is left out or refused.
#![allow(missing_docs, reason = "a test")]

mod memories;
mod recurrence;
mod slots;

use std::fs;
use std::path::{Path, PathBuf};

use kvstate::memory::{SectionKind, SectionParams};
use kvstate::session::{
    DraftOutcome, Kept, LoadedSlot, SlotContents, SlotLoadParams, StateFile, StateReader, Verify,
};
use kvstate::types::Pos;
use kvstate::{Context, ContextParams, Result, Status};
use slots::support::{self, context, decode, image, is_intact, iswa, kv, place, positions};
use slots::{DRIVER, TOKENS, busy_draft, busy_target, draft, identity, save_slot, target};
use tempfile::TempDir;

fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("slot.bin");
    (dir, path)
}

fn load_slot(path: &Path, target: &mut Context, draft: &mut Context, p1: Pos) -> Result<LoadedSlot> {
    let params = SlotLoadParams {
        draft: Some((draft, 0)),
        identity: identity(),
        verify: Verify::Full,
        p1: Some(p1),
        ..SlotLoadParams::default()
    };
    target.slot_load(path, 1, params)
}

const NO_DRIVER: &str =
    "the state of the speculative driver is left out: it has seen positions that are cut off";

#[test]
fn a_slot_is_cut_with_its_draft_and_without_later_checkpoints_and_the_driver() {
    let (_dir, path) = folder();
    save_slot(&path);
    let (mut into, mut draft_into) = (busy_target(), busy_draft());
    let loaded = load_slot(&path, &mut into, &mut draft_into, 8).expect("a slot");
    assert_eq!(
        (&loaded.tokens[..], loaded.kept),
        (&TOKENS[..], Kept { pos_min: 0, pos_max: 7, n_cells: 8, n_cut: 4 })
    );
    let spans: Vec<_> = loaded.checkpoints.iter().map(|c| c.span.n_tokens()).collect();
    assert_eq!((spans, loaded.n_checkpoints_in_file), (vec![4, 8], 3));
    assert!(matches!(loaded.draft, DraftOutcome::Restored(_)), "{loaded:?}");
    assert_eq!((loaded.driver, loaded.verified), (None, Verify::Full));
    assert_eq!(
        loaded.notes,
        ["1 of 3 checkpoints are left out: they reach position 8 or further", NO_DRIVER]
    );
    assert_eq!(
        [positions(&into, 0, 1), positions(&into, 1, 1)],
        [(); 2].map(|()| (0..8).collect::<Vec<_>>())
    );
    assert_eq!(positions(&draft_into, 0, 0), (0..8).collect::<Vec<_>>());
    assert!(is_intact(&into, 1, 0) && is_intact(&draft_into, 0, 1));
}

#[test]
fn a_prefix_at_the_end_or_beyond_is_the_whole_slot() {
    let (_dir, path) = folder();
    save_slot(&path);
    let whole = slots::load_slot(&path, &mut busy_target(), &mut busy_draft(), Verify::Full).expect("a slot");
    assert_eq!(whole.driver.as_deref(), Some(DRIVER));
    for p1 in [12, 13, Pos::MAX] {
        assert_eq!(load_slot(&path, &mut busy_target(), &mut busy_draft(), p1).expect("a slot"), whole);
    }
}

#[test]
fn a_prefix_of_nothing_leaves_empty_sequences() {
    let (_dir, path) = folder();
    save_slot(&path);
    let (mut into, mut draft_into) = (busy_target(), busy_draft());
    let loaded = load_slot(&path, &mut into, &mut draft_into, 0).expect("a slot");
    assert_eq!(loaded.kept, Kept { n_cut: 12, ..Kept::NOTHING });
    assert_eq!((loaded.checkpoints.len(), loaded.driver), (0, None));
    assert_eq!([into.seq_pos_max(1).unwrap(), draft_into.seq_pos_max(0).unwrap()], [-1, -1]);
}

#[test]
fn a_prefix_of_nothing_leaves_out_all_of_every_memory() {
    for kind in &memories::KINDS {
        let (_dir, path) = folder();
        let mut source = memories::context(kind, 1);
        let n_tokens =
            usize::try_from(source.seq_pos_max(memories::DEST).expect("a sequence") + 1).expect("tokens");
        let tokens = vec![7; n_tokens];
        let mut draft = draft();
        let contents = SlotContents {
            tokens: &tokens,
            draft: Some((&mut draft, 1)),
            driver: DRIVER,
            ..SlotContents::default()
        };
        source.slot_save(&path, memories::DEST, contents).expect(kind.name);
        let (mut into, mut draft_into) = (memories::context(kind, 2), busy_draft());
        let params =
            SlotLoadParams { p1: Some(0), draft: Some((&mut draft_into, 0)), ..SlotLoadParams::default() };
        let loaded = into.slot_load(&path, memories::DEST, params).expect(kind.name);
        assert_eq!((loaded.tokens.len(), loaded.kept.n_tokens(n_tokens)), (n_tokens, 0), "{}", kind.name);
        assert_eq!((loaded.driver, &loaded.notes[..]), (None, &[NO_DRIVER.to_owned()][..]), "{}", kind.name);
        assert_eq!(into.seq_pos_max(memories::DEST).expect("a sequence"), -1, "{}", kind.name);
        assert_eq!(draft_into.seq_pos_max(0).expect("a sequence"), -1, "{}", kind.name);
    }
}

#[test]
fn a_token_that_is_not_decoded_yet_counts_where_nothing_is_cut() {
    // One for each of 12 cells, and one that has been sampled.
    let pending = [7; 13];
    for (seq_id, p1, n_kept) in [(0, 8, 8), (0, 12, 13), (0, 13, 13), (0, 0, 0), (1, 12, 0)] {
        let (_dir, path) = folder();
        let contents = SlotContents { tokens: &pending, ..SlotContents::default() };
        let mut source = target();
        if seq_id == 1 {
            source.seq_rm(1, -1, -1).expect("an empty sequence");
        }
        source.slot_save(&path, seq_id, contents).expect("a file");
        let params = SlotLoadParams { p1: Some(p1), ..SlotLoadParams::default() };
        let loaded = busy_target().slot_load(&path, 1, params).expect("a slot");
        assert_eq!(loaded.kept.n_tokens(loaded.tokens.len()), n_kept, "sequence {seq_id} below {p1}");
    }
}

#[test]
fn a_draft_that_cannot_be_cut_is_dropped_and_the_target_stands() {
    let hybrid = || {
        let sections = SectionParams::hybrid(kv(32), recurrence::params(0));
        place::context(ContextParams::new(2, sections)).expect("a context")
    };
    let lossy = || context(2, &iswa(32, 12, 4));
    let states = "section recurrent has states to go on at positions 12 to 12, and none for 8";
    let window = "section swa has positions 6 to 7, and a token at 8 needs positions 5 to 7";
    for (new, reason) in [(&hybrid as &dyn Fn() -> Context, states), (&lossy, window)] {
        let (_dir, path) = folder();
        let mut draft = new();
        generate_tokens(&mut draft, 12);
        let contents = SlotContents {
            draft: Some((&mut draft, 1)),
            driver: DRIVER,
            identity: identity(),
            ..SlotContents::default()
        };
        target().slot_save(&path, 0, contents).expect("a file");
        let (mut into, mut draft_into) = (busy_target(), new());
        generate_tokens(&mut draft_into, 3);
        let loaded = load_slot(&path, &mut into, &mut draft_into, 8).expect("a slot");
        assert_eq!(loaded.draft, DraftOutcome::Dropped(format!("cannot cut at position 8: {reason}")));
        assert_eq!((loaded.driver, loaded.kept.pos_max), (None, 7));
        assert_eq!(draft_into.seq_pos_max(0).expect("a sequence"), -1);
        assert!(is_intact(&into, 1, 0));
    }
}

/// Tokens of sequences 0 and 1, as generation has them.
fn generate_tokens(ctx: &mut Context, n: Pos) {
    for pos in 0..n {
        for seq in [0, 1] {
            if ctx.section_kind(1).expect("a section") == SectionKind::Kv {
                decode(ctx, seq, [pos]);
            } else {
                recurrence::decode(ctx, &[(1, 0)], &[(&[seq], pos)]).expect("a slot");
            }
        }
    }
}

#[test]
fn a_target_that_cannot_be_cut_is_refused_and_the_draft_stays() {
    let (_dir, path) = folder();
    let kind = &memories::KINDS[1];
    memories::context(kind, 1).slot_save(&path, memories::DEST, SlotContents::default()).expect("a file");
    let (mut into, mut draft_into) = (memories::context(kind, 2), busy_draft());
    let (before, draft_before) = (memories::image(&mut into), image(&draft_into));
    let draft = Some((&mut draft_into, 0));
    let params = SlotLoadParams { p1: Some(4), draft, ..SlotLoadParams::default() };
    let error = into.slot_load(&path, memories::DEST, params).expect_err("a refusal");
    let reason = "section recurrent has states to go on at positions 8 to 8, and none for 4";
    assert_eq!(
        (error.to_string(), error.status()),
        (format!("failed to restore sequence state: cannot cut at position 4: {reason}"), Status::CannotCut)
    );
    assert!(memories::image(&mut into) == before && image(&draft_into) == draft_before);
}

#[test]
fn the_draft_in_a_sidecar_is_cut_and_its_driver_left_out() {
    let (_dir, path) = folder();
    let mut draft = draft();
    let contents = SlotContents {
        draft: Some((&mut draft, 1)),
        driver: DRIVER,
        identity: identity(),
        sidecar: true,
        ..SlotContents::default()
    };
    target().slot_save(&path, 0, contents).expect("files");
    let mut draft_into = busy_draft();
    let loaded = load_slot(&path, &mut busy_target(), &mut draft_into, 8).expect("a slot");
    assert!(matches!(loaded.draft, DraftOutcome::Restored(_)), "{loaded:?}");
    assert_eq!((loaded.driver, loaded.notes), (None, vec![format!("sidecar: {NO_DRIVER}")]));
    assert_eq!(positions(&draft_into, 0, 0), (0..8).collect::<Vec<_>>());
    assert!(is_intact(&draft_into, 0, 1));
}

#[test]
fn a_full_verification_sees_damage_behind_the_prefix() {
    let (_dir, path) = folder();
    save_slot(&path);
    let mut bytes = fs::read(&path).expect("a file");
    let (_plain_dir, plain) = folder();
    let end = target().state_seq_save_file(&plain, 0, &TOKENS).expect("a file");
    bytes[usize::try_from(end).expect("a size") - 1] ^= 1;
    fs::write(&path, bytes).expect("a file");
    let (mut into, mut draft_into) = (busy_target(), busy_draft());
    let before = image(&into);
    let error = load_slot(&path, &mut into, &mut draft_into, 4).expect_err("a refusal");
    assert!(error.to_string().contains("crc32c of the memory state"), "{error}");
    assert!(image(&into) == before);
    let params = SlotLoadParams { identity: identity(), p1: Some(4), ..SlotLoadParams::default() };
    assert_eq!(into.slot_load(&path, 1, params).expect("a slot").kept.pos_max, 3);
    assert!(is_intact(&into, 1, 0));
}

#[test]
fn a_reader_takes_no_prefix() {
    let (_dir, path) = folder();
    save_slot(&path);
    let file = StateFile::open(&path, kvstate::format::FileKind::Sequence, 5).expect("a file");
    let params = SlotLoadParams { identity: identity(), p1: Some(4), ..SlotLoadParams::default() };
    let error = StateReader::of_slot(&file, params).expect_err("a refusal");
    assert_eq!(error.to_string(), "p1: 4, a reader restores all positions");
}
