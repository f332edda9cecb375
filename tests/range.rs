//! States of a range of positions: what they hold, and where they can end.
#![allow(missing_docs, reason = "a test")]

mod recurrence;
mod support;

use kvstate::context::Shift;
use kvstate::memory::{KvParams, SectionParams};
use kvstate::types::{CellExt, Pos, PosRange, SeqId, StateFlags, SwaType};
use kvstate::{Context, ContextParams, Error, Result, Status};
use proptest::prelude::*;
use support::{
    NONE, ON_DEVICE, PARTIAL, Tok, blob_positions, context, decode, essence, generate, image, iswa, kv,
    place, positions, restore, save, standard, try_decode, windowed,
};

fn try_save(ctx: &mut Context, seq: SeqId, (p0, p1): (Pos, Pos), flags: StateFlags) -> Result<Vec<u8>> {
    let range = PosRange::new(p0, p1);
    let size = ctx.state_seq_get_size_range(seq, range, flags)?;
    let mut blob = vec![0xAA; usize::try_from(size).expect("a size")];
    assert_eq!(ctx.state_seq_get_data_range(&mut blob, seq, range, flags)?, blob.len());
    Ok(blob)
}

fn save_range(ctx: &mut Context, range: (Pos, Pos)) -> Vec<u8> {
    try_save(ctx, 0, range, NONE).expect("a state")
}

#[test]
fn a_range_holds_the_positions_between_its_ends_in_every_section() {
    let sections = iswa(32, 24, 4);
    let mut ctx = context(2, &sections);
    decode(&mut ctx, 0, 0..12);
    for (range, want) in [((3, 7), 3..7), ((-1, 5), 0..5), ((9, -1), 9..12), ((0, 99), 0..12), ((5, 6), 5..6)]
    {
        let blob = save_range(&mut ctx, range);
        let want: Vec<Pos> = want.collect();
        assert_eq!(blob_positions(&blob, &sections), [want.clone(), want], "{range:?}");
    }
}

#[test]
fn all_positions_are_the_whole_state() {
    let mut ctx = context(2, &iswa(32, 24, 4));
    decode(&mut ctx, 0, 0..12);
    let whole = save(&mut ctx, 0, NONE);
    for range in [(-1, -1), (0, 12), (0, Pos::MAX)] {
        assert!(save_range(&mut ctx, range) == whole, "{range:?}");
    }
}

#[test]
fn a_range_is_the_state_of_a_sequence_that_has_nothing_else() {
    let sections = iswa(32, 24, 4);
    let mut ctx = context(2, &sections);
    decode(&mut ctx, 0, 0..12);
    let blob = save_range(&mut ctx, (4, 9));
    ctx.seq_rm(0, 9, -1).expect("a sequence");
    ctx.seq_rm(0, 0, 4).expect("a sequence");
    assert!(save(&mut ctx, 0, NONE) == blob);
    restore(&mut ctx, &blob, 1, NONE);
    assert_eq!((positions(&ctx, 0, 1), positions(&ctx, 1, 1)), ((4..9).collect(), (4..9).collect()));
    assert!(support::is_intact(&ctx, 1, 0));
}

#[test]
fn a_range_without_positions_is_the_state_of_an_empty_sequence() {
    let mut ctx = context(2, &iswa(32, 24, 4));
    let empty = save(&mut ctx, 0, NONE);
    decode(&mut ctx, 0, 0..12);
    for range in [(12, -1), (7, 3), (5, 5), (0, 0)] {
        assert!(save_range(&mut ctx, range) == empty, "{range:?}");
    }
}

#[test]
fn the_patches_of_an_image_are_not_parted() {
    let sections = [KvParams { cell_ext: true, ..kv(32) }];
    let mut ctx = context(1, &sections);
    let patch = |i| Tok { ext: CellExt { x: i % 3, y: i / 3, tok: -1 }, ..Tok::new(0, 4) };
    let toks: Vec<Tok> = (0..4).map(|pos| Tok::new(0, pos)).chain((0..6).map(patch)).collect();
    try_decode(&mut ctx, &toks).expect("a slot");
    decode(&mut ctx, 0, 7..9);
    assert_eq!(blob_positions(&save_range(&mut ctx, (3, 5)), &sections), [[3, 4, 4, 4, 4, 4, 4]]);
    assert_eq!(blob_positions(&save_range(&mut ctx, (5, -1)), &sections), [[7, 8]]);
}

#[test]
fn a_window_has_what_it_has_not_lost() {
    let sections = iswa(64, 8, 4);
    let mut ctx = context(1, &sections);
    generate(&mut ctx, 0, 0..20);
    assert_eq!(positions(&ctx, 1, 0), (12..20).collect::<Vec<_>>());
    let blob = save_range(&mut ctx, (10, 15));
    assert_eq!(blob_positions(&blob, &sections), [(10..15).collect::<Vec<_>>(), (12..15).collect()]);
}

#[test]
fn masked_cells_are_those_of_the_end_of_the_range() {
    let sections = iswa(32, 32, 4);
    let params = ContextParams { max_masked_cells: Some(2), ..support::params(1, &sections) };
    let mut ctx = place::context(params).expect("a context");
    decode(&mut ctx, 0, 0..20);
    let blob = save_range(&mut ctx, (0, 10));
    assert_eq!(blob_positions(&blob, &sections)[1], (4..10).collect::<Vec<_>>());
}

#[test]
fn a_partial_state_of_a_range_is_the_checkpoint_of_its_end() {
    for swa_type in [SwaType::Standard, SwaType::Chunked, SwaType::Symmetric] {
        let sections = [kv(32), windowed(32, swa_type, 4)];
        let mut ctx = context(1, &sections);
        decode(&mut ctx, 0, 0..9);
        let checkpoint = save(&mut ctx, 0, PARTIAL);
        decode(&mut ctx, 0, 9..15);
        assert!(try_save(&mut ctx, 0, (0, 9), PARTIAL).expect("a state") == checkpoint, "{swa_type:?}");
    }
}

#[test]
fn the_tensors_of_a_range_can_stay_on_the_device() {
    let mut ctx = context(2, &[kv(32)]);
    decode(&mut ctx, 0, 0..12);
    let blob = try_save(&mut ctx, 0, (3, 8), ON_DEVICE).expect("a state");
    restore(&mut ctx, &blob, 1, ON_DEVICE);
    assert_eq!(positions(&ctx, 0, 1), (3..8).collect::<Vec<_>>());
    assert!(support::is_intact(&ctx, 1, 0));
}

#[test]
fn a_shift_of_cells_outside_the_range_is_left_pending() {
    let mut ctx = support::shifting(1, &[kv(32)], Shift::Callback(Box::new(|_| Err("not now".into()))));
    decode(&mut ctx, 0, 0..12);
    ctx.seq_add(0, 8, -1, 3).expect("a shift");
    save_range(&mut ctx, (0, 8));
    let error = try_save(&mut ctx, 0, (0, 12), NONE).expect_err("a shift that fails");
    assert!(matches!(error, Error::ShiftFailed { n_cells: 4, .. }), "{error}");
}

#[test]
fn a_sequence_that_is_not_there_is_named() {
    let mut ctx = context(2, &[kv(8)]);
    let error = try_save(&mut ctx, 2, (0, -1), NONE).expect_err("a sequence id");
    assert_eq!(error.to_string(), "seq_id 2 is out of range [0, 2)");
    let error = ctx.state_seq_get_data_range(&mut [0; 9], 0, PosRange::ALL, NONE).expect_err("a buffer");
    assert_eq!(error.status(), Status::BufferTooSmall);
}

// Recurrent states

const N_RS_SEQ: u32 = 2;

fn hybrid() -> Context {
    let sections = SectionParams::hybrid(kv(32), recurrence::params(N_RS_SEQ));
    place::context(ContextParams::new(2, sections)).expect("a context")
}

fn decode_hybrid(ctx: &mut Context, positions: std::ops::Range<Pos>) {
    let tokens: Vec<(&[SeqId], Pos)> = positions.map(|pos| (&[0][..], pos)).collect();
    recurrence::decode(ctx, &[(1, N_RS_SEQ)], &tokens).expect("a slot");
}

#[test]
fn a_range_of_a_hybrid_holds_the_recurrent_state_of_its_end() {
    let mut ctx = hybrid();
    decode_hybrid(&mut ctx, 0..10);
    let blob = save_range(&mut ctx, (6, -1));
    restore(&mut ctx, &blob, 1, NONE);
    assert_eq!(positions(&ctx, 0, 1), (6..10).collect::<Vec<_>>());
    assert_eq!(recurrence::state_of(&ctx, 1, 1), Some(recurrence::after(0..10)));
}

#[test]
fn a_range_can_end_where_a_rollback_plane_has_the_state() {
    let mut ctx = hybrid();
    decode_hybrid(&mut ctx, 0..10);
    for p1 in [8, 9] {
        let blob = save_range(&mut ctx, (0, p1));
        restore(&mut ctx, &blob, 1, NONE);
        assert_eq!(ctx.seq_pos_max(1).expect("a sequence"), p1 - 1);
        assert_eq!(recurrence::state_of(&ctx, 1, 1), Some(recurrence::after(0..p1)));
    }
}

#[test]
fn a_range_that_ends_before_the_recurrent_states_is_refused_by_name() {
    let mut ctx = hybrid();
    decode_hybrid(&mut ctx, 0..10);
    let before = image_of(&ctx);
    let error = try_save(&mut ctx, 0, (0, 7), NONE).expect_err("a refusal");
    let text = "cannot cut at position 7: section recurrent has states to go on at positions 8 to 10, and none for 7";
    assert_eq!((error.to_string().as_str(), error.status()), (text, Status::CannotCut));
    assert_eq!(image_of(&ctx), before);
}

#[test]
fn a_range_behind_the_recurrent_state_is_empty() {
    let mut ctx = hybrid();
    let empty = save(&mut ctx, 0, NONE);
    decode_hybrid(&mut ctx, 0..10);
    assert!(save_range(&mut ctx, (10, -1)) == empty);
}

/// The bytes of attention and of states.
fn image_of(ctx: &Context) -> (Vec<Vec<u8>>, Vec<u8>) {
    let attention = support::planes(ctx, 0, 0).into_iter().map(place::all).collect();
    (attention, recurrence::all_bytes(ctx, 1))
}

// Files

#[test]
fn a_file_of_a_range_is_a_sequence_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("piece.bin");
    let mut ctx = context(2, &iswa(32, 24, 4));
    decode(&mut ctx, 0, 0..12);
    let size = ctx.state_seq_save_file_range(&path, 0, PosRange::new(4, 9), &[5, 6]).expect("a file");
    assert_eq!(std::fs::metadata(&path).expect("a file").len(), size);
    let loaded = ctx.state_seq_load_file(&path, 1, 2).expect("a file");
    assert_eq!((loaded.tokens, loaded.state_end), (vec![5, 6], size));
    assert_eq!(positions(&ctx, 0, 1), (4..9).collect::<Vec<_>>());
    assert!(support::is_intact(&ctx, 1, 0));
}

#[test]
fn a_file_of_a_range_that_cannot_be_had_leaves_the_old_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("piece.bin");
    std::fs::write(&path, b"old").expect("a file");
    let mut ctx = hybrid();
    decode_hybrid(&mut ctx, 0..10);
    let error = ctx.state_seq_save_file_range(&path, 0, PosRange::new(0, 3), &[]).expect_err("a refusal");
    assert_eq!(error.status(), Status::CannotCut);
    assert_eq!(std::fs::read(&path).expect("a file"), b"old");
}

proptest! {
    #[test]
    fn any_range_of_a_fragmented_cache_holds_its_positions(
        taken in prop::collection::vec(0..40_i32, 0..20), p0 in -2..45_i32, p1 in -2..45_i32,
    ) {
        let sections = [kv(96), standard(96, 6)];
        let mut ctx = context(2, &sections);
        for pos in 0..40 {
            decode(&mut ctx, 0, [pos]);
            decode(&mut ctx, 1, [pos]);
        }
        for pos in taken {
            ctx.seq_rm(0, pos, pos + 1).expect("a sequence");
        }
        let before = image(&ctx);
        let blob = save_range(&mut ctx, (p0, p1));
        prop_assert!(image(&ctx) == before);
        let range = PosRange::new(p0, p1);
        let want = |section| -> Vec<Pos> {
            positions(&ctx, section, 0).into_iter().filter(|&pos| range.contains(pos)).collect()
        };
        let want = [want(0), want(1)];
        let mut got = blob_positions(&blob, &sections);
        for positions in &mut got {
            positions.sort_unstable();
        }
        prop_assert_eq!(got, want);
        restore(&mut ctx, &blob, 1, NONE);
        prop_assert!(support::is_intact(&ctx, 1, 0));
        let again = save(&mut ctx, 1, NONE);
        prop_assert!(essence(&again, &sections) == essence(&blob, &sections));
    }
}
