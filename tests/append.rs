//! A conversation that is saved in pieces and restored piece by piece is the one that was saved at once.
#![allow(missing_docs, reason = "a test")]

mod recurrence;
mod support;

use std::ops::ControlFlow;

use kvstate::memory::{KvParams, SectionParams};
use kvstate::session::RangeLoadParams;
use kvstate::storage::ProgressCallback;
use kvstate::types::{CellExt, Pos, PosRange, SeqId, StateFlags};
use kvstate::{Context, ContextParams, Error, Result, Status};
use proptest::prelude::*;
use support::{
    NONE, ON_DEVICE, PARTIAL, Tok, context, decode, essence, generate, image, is_intact, iswa, kv, place,
    positions, restore, save, standard, try_decode,
};

fn save_range(ctx: &mut Context, p0: Pos, p1: Pos, flags: StateFlags) -> Vec<u8> {
    let range = PosRange::new(p0, p1);
    let size = ctx.state_seq_get_size_range(0, range, flags).expect("a size");
    let mut blob = vec![0; usize::try_from(size).expect("a size")];
    ctx.state_seq_get_data_range(&mut blob, 0, range, flags).expect("a state");
    blob
}

fn append(ctx: &mut Context, blob: &[u8], dest: SeqId) {
    assert_eq!(ctx.state_seq_append_data(blob, dest, NONE).expect("a restore"), blob.len());
}

/// The error of an append, which must leave everything as it was.
fn refused(ctx: &mut Context, blob: &[u8], dest: SeqId, flags: StateFlags) -> Error {
    let before = image(ctx);
    let error = ctx.state_seq_append_data(blob, dest, flags).expect_err("a refusal");
    assert!(image(ctx) == before, "a refused append changed the context: {error}");
    error
}

/// Saves sequence 0 whenever it has grown to one of `ends`: each time only what is new.
fn pieces(
    ctx: &mut Context,
    ends: &[Pos],
    decode: impl Fn(&mut Context, std::ops::Range<Pos>),
) -> Vec<Vec<u8>> {
    let mut start = 0;
    let mut piece = |&end: &Pos| {
        decode(ctx, start..end);
        let blob = save_range(ctx, start, -1, NONE);
        start = end;
        blob
    };
    ends.iter().map(&mut piece).collect()
}

fn decode_attention(ctx: &mut Context, positions: std::ops::Range<Pos>) {
    decode(ctx, 0, positions);
}

/// Whether pieces, added to an empty cache, are what one save gives: byte for byte after a whole save.
fn assert_pieces_are_the_whole(
    name: &str,
    new: impl Fn() -> Context,
    decode: impl Fn(&mut Context, std::ops::Range<Pos>),
) {
    let mut source = new();
    let pieces = pieces(&mut source, &[5, 6, 17, 20], decode);
    let whole = save(&mut source, 0, NONE);
    let mut into = new();
    for piece in &pieces {
        append(&mut into, piece, 0);
    }
    assert_eq!(into.seq_pos_max(0).expect("a sequence"), 19, "{name}");
    assert!(save(&mut into, 0, NONE) == whole, "{name}");
}

fn with_indexer(source: KvParams) -> Vec<KvParams> {
    let mut indexer = KvParams { mirrors: Some(0), ..source.clone() };
    indexer.layers.truncate(1);
    indexer.layers[0].v = None;
    vec![source, indexer]
}

fn without_v(mut kv: KvParams) -> KvParams {
    kv.layers.iter_mut().for_each(|layer| layer.v = None);
    kv
}

#[test]
fn pieces_of_attention_are_the_whole() {
    let transposed = KvParams { v_trans: true, ..kv(32) };
    for (name, sections) in [
        ("rows", vec![kv(32)]),
        ("transposed V", vec![transposed.clone()]),
        ("no V", vec![without_v(kv(32))]),
        ("cells with ext", vec![KvParams { cell_ext: true, ..kv(32) }]),
        ("a window alone", vec![standard(32, 4)]),
        ("iSWA", iswa(32, 24, 4)),
        ("iSWA, transposed", vec![transposed.clone(), KvParams { v_trans: true, ..standard(24, 4) }]),
        ("an indexer", with_indexer(kv(32))),
        ("an indexer beside a window", with_indexer(standard(32, 4))),
    ] {
        assert_pieces_are_the_whole(name, || context(2, &sections), decode_attention);
        assert_pieces_are_the_whole(name, || support::streams(2, &sections), decode_attention);
    }
}

#[test]
fn pieces_of_a_window_that_keeps_no_masked_cells_are_the_whole() {
    let new = || {
        let params = ContextParams { max_masked_cells: Some(0), ..support::params(1, &iswa(32, 10, 4)) };
        place::context(params).expect("a context")
    };
    assert_pieces_are_the_whole("no masked cells", new, |ctx, positions| generate(ctx, 0, positions));
}

#[test]
fn pieces_of_images_are_the_whole() {
    let sections = [KvParams { cell_ext: true, ..kv(64) }];
    assert_pieces_are_the_whole(
        "images",
        || context(1, &sections),
        |ctx, positions| {
            let patch = |pos, i| Tok { ext: CellExt { x: i, y: pos, tok: -1 }, ..Tok::new(0, pos) };
            let toks: Vec<Tok> =
                positions.flat_map(|pos| (0..=pos % 3).map(move |i| patch(pos, i))).collect();
            try_decode(ctx, &toks).expect("a slot");
        },
    );
}

#[test]
fn pieces_restored_in_a_fragmented_cache_hold_the_same_in_other_cells() {
    let sections = iswa(64, 64, 4);
    let mut source = context(2, &sections);
    let mut start = 0;
    let mut pieces = Vec::new();
    for end in [7, 9, 20] {
        for pos in start..end {
            decode(&mut source, 0, [pos]);
            decode(&mut source, 1, [pos]);
        }
        source.seq_rm(1, start, start + 2).expect("a sequence");
        pieces.push(save_range(&mut source, start, -1, NONE));
        start = end;
    }
    let mut into = context(3, &sections);
    for pos in 0..12 {
        decode(&mut into, 0, [pos]);
        decode(&mut into, 1, [pos]);
    }
    into.seq_rm(0, -1, -1).expect("a sequence");
    for piece in &pieces {
        append(&mut into, piece, 2);
    }
    let whole = essence(&save(&mut source, 0, NONE), &sections);
    let mut appended = essence(&save(&mut into, 2, NONE), &sections);
    // The source has used cells again that its window masks, which were in the first piece.
    let streams = appended.iter_mut().flatten().zip(whole.iter().flatten());
    streams.for_each(|(appended, whole)| appended.cells.retain(|cell| cell.pos >= whole.cells[0].pos));
    assert!(appended == whole);
    assert!(is_intact(&into, 1, 1) && is_intact(&into, 2, 0));
}

// Recurrent states

fn assert_pieces_with_states_are_the_whole(
    name: &str,
    sections: &dyn Fn() -> Vec<SectionParams>,
    of_states: usize,
) {
    let new = || place::context(ContextParams::new(2, sections())).expect("a context");
    assert_pieces_are_the_whole(name, new, |ctx, positions| {
        let tokens: Vec<(&[SeqId], Pos)> = positions.map(|pos| (&[0][..], pos)).collect();
        recurrence::decode(ctx, &[(of_states, 1)], &tokens).expect("a slot");
    });
}

#[test]
fn pieces_of_recurrent_states_and_of_hybrids_are_the_whole() {
    let recurrent = || recurrence::params(1);
    assert_pieces_with_states_are_the_whole("recurrent", &|| vec![recurrent().into()], 0);
    assert_pieces_with_states_are_the_whole("hybrid", &|| SectionParams::hybrid(kv(32), recurrent()), 1);
    let iswa = || vec![kv(32).into(), standard(24, 4).into(), recurrent().into()];
    assert_pieces_with_states_are_the_whole("hybrid iSWA", &iswa, 2);
}

#[test]
fn an_older_recurrent_state_is_not_added() {
    let new =
        || place::context(ContextParams::new(2, vec![recurrence::params(0).into()])).expect("a context");
    let mut ctx = new();
    recurrence::decode(&mut ctx, &[(0, 0)], &[(&[0], 0), (&[0], 1)]).expect("a slot");
    let older = save(&mut ctx, 0, NONE);
    recurrence::decode(&mut ctx, &[(0, 0)], &[(&[0], 2)]).expect("a slot");
    let before = recurrence::all_bytes(&ctx, 0);
    let error = ctx.state_seq_append_data(&older, 0, NONE).expect_err("a refusal");
    assert_eq!(
        error.to_string(),
        "position 1 of the state is not behind 2, the last one of the sequence (section recurrent)"
    );
    assert_eq!(recurrence::all_bytes(&ctx, 0), before);
}

#[test]
fn a_state_that_other_sequences_share_stays_theirs() {
    let mut ctx =
        place::context(ContextParams::new(3, vec![recurrence::params(0).into()])).expect("a context");
    recurrence::decode(&mut ctx, &[(0, 0)], &[(&[0], 0), (&[0], 1)]).expect("a slot");
    ctx.seq_cp(0, 1, -1, -1).expect("a sequence");
    recurrence::decode(&mut ctx, &[(0, 0)], &[(&[0], 2)]).expect("a slot");
    let later = save(&mut ctx, 0, NONE);
    ctx.seq_cp(1, 2, -1, -1).expect("a sequence");
    append(&mut ctx, &later, 2);
    assert_eq!(recurrence::state_of(&ctx, 0, 1), Some(recurrence::after(0..2)));
    assert_eq!(recurrence::state_of(&ctx, 0, 2), Some(recurrence::after(0..3)));
}

// What is refused, and what is not

/// A context with positions 0 to 9 in sequence 0, and the state of 6 to 13.
fn with_overlap() -> (Context, Vec<u8>) {
    let mut source = context(1, &iswa(32, 24, 4));
    decode(&mut source, 0, 0..14);
    let mut ctx = context(2, &iswa(32, 24, 4));
    decode(&mut ctx, 0, 0..10);
    (ctx, save_range(&mut source, 6, -1, NONE))
}

#[test]
fn positions_that_meet_are_refused_by_name() {
    let (mut ctx, overlap) = with_overlap();
    let error = refused(&mut ctx, &overlap, 0, NONE);
    let text = "position 6 of the state is not behind 9, the last one of the sequence (section base)";
    assert_eq!((error.to_string().as_str(), error.status()), (text, Status::PositionsMeet));
}

#[test]
fn earlier_positions_are_refused_like_those_that_meet() {
    let mut ctx = context(1, &[kv(32)]);
    decode(&mut ctx, 0, 0..10);
    let earlier = save_range(&mut ctx, 0, 4, NONE);
    ctx.seq_rm(0, 0, 4).expect("a sequence");
    assert!(matches!(refused(&mut ctx, &earlier, 0, NONE), Error::PositionsMeet { pos: 0, pos_max: 9, .. }));
}

#[test]
fn into_an_empty_sequence_an_append_is_a_restore() {
    let (mut ctx, state) = with_overlap();
    append(&mut ctx, &state, 1);
    let appended = image(&ctx);
    ctx.seq_rm(1, -1, -1).expect("a sequence");
    restore(&mut ctx, &state, 1, NONE);
    assert_eq!(image(&ctx).cells.len(), appended.cells.len());
    assert_eq!(positions(&ctx, 0, 1), (6..14).collect::<Vec<_>>());
}

#[test]
fn an_empty_state_adds_nothing() {
    for sections in [vec![kv(32)], iswa(32, 24, 4), with_indexer(kv(32))] {
        let mut ctx = context(2, &sections);
        decode(&mut ctx, 0, 0..10);
        let empty = save_range(&mut ctx, 10, -1, NONE);
        let before = image(&ctx);
        append(&mut ctx, &empty, 0);
        assert!(image(&ctx) == before);
    }
}

#[test]
fn a_partial_state_is_not_added() {
    let (mut ctx, _) = with_overlap();
    let partial = save(&mut ctx, 0, PARTIAL);
    let error = refused(&mut ctx, &partial, 1, PARTIAL);
    assert_eq!(
        error.to_string(),
        "flags: APPEND with PARTIAL_ONLY: only whole states are added to a sequence"
    );
}

#[test]
fn a_state_on_the_device_is_added() {
    let mut ctx = context(2, &iswa(32, 24, 4));
    decode(&mut ctx, 0, 0..10);
    let first = save_range(&mut ctx, 0, 6, NONE);
    let second = save_range(&mut ctx, 6, -1, ON_DEVICE);
    append(&mut ctx, &first, 1);
    ctx.state_seq_append_data(&second, 1, ON_DEVICE).expect("a restore");
    assert_eq!(positions(&ctx, 0, 1), (0..10).collect::<Vec<_>>());
    assert!(is_intact(&ctx, 1, 0));
}

#[test]
fn a_state_for_which_there_is_no_room_beside_the_sequence_is_refused() {
    let mut source = context(1, &[kv(32)]);
    decode(&mut source, 0, 0..20);
    let state = save_range(&mut source, 10, -1, NONE);
    let mut ctx = context(1, &[kv(16)]);
    decode(&mut ctx, 0, 0..10);
    let error = refused(&mut ctx, &state, 0, NONE);
    assert!(matches!(error, Error::NoSpace { need: 10, free: 6, kv_size: 16, .. }), "{error}");
}

#[test]
fn every_truncation_of_a_piece_is_refused() {
    let mut source = context(1, &iswa(32, 24, 4));
    decode(&mut source, 0, 0..10);
    let state = save_range(&mut source, 6, -1, NONE);
    let mut ctx = context(1, &iswa(32, 24, 4));
    decode(&mut ctx, 0, 0..6);
    for len in 0..state.len() {
        let error = refused(&mut ctx, &state[..len], 0, NONE);
        assert!(matches!(error.status(), Status::Truncated | Status::Corrupt | Status::Mismatch), "{error}");
    }
}

// Windows

#[test]
fn a_window_with_room_keeps_what_it_has() {
    let mut source = context(1, &iswa(64, 64, 4));
    decode(&mut source, 0, 0..30);
    let state = save_range(&mut source, 20, -1, NONE);
    let mut ctx = context(1, &iswa(64, 32, 4));
    decode(&mut ctx, 0, 0..20);
    append(&mut ctx, &state, 0);
    assert_eq!(positions(&ctx, 1, 0), (0..30).collect::<Vec<_>>());
    assert!(is_intact(&ctx, 0, 0));
}

#[test]
fn a_window_without_room_gives_up_the_oldest_cells_that_the_new_end_masks() {
    let mut source = context(1, &iswa(64, 64, 4));
    decode(&mut source, 0, 0..30);
    let state = save_range(&mut source, 20, -1, NONE);
    let mut ctx = context(1, &iswa(64, 24, 4));
    decode(&mut ctx, 0, 0..20);
    append(&mut ctx, &state, 0);
    assert_eq!(positions(&ctx, 1, 0), (6..30).collect::<Vec<_>>());
    assert_eq!(positions(&ctx, 0, 0), (0..30).collect::<Vec<_>>());
    assert!(is_intact(&ctx, 0, 0));
}

#[test]
fn a_window_that_has_room_for_less_than_the_state_has_the_newest_of_it() {
    let mut source = context(1, &iswa(64, 64, 4));
    decode(&mut source, 0, 0..30);
    let state = save_range(&mut source, 10, -1, NONE);
    let mut ctx = context(1, &iswa(64, 12, 4));
    decode(&mut ctx, 0, 0..10);
    append(&mut ctx, &state, 0);
    assert_eq!(positions(&ctx, 1, 0), (18..30).collect::<Vec<_>>());
    assert!(is_intact(&ctx, 0, 0) && ctx.can_rewind(0, 22).expect("an answer"));
}

#[test]
fn what_a_window_has_before_a_gap_goes() {
    let mut source = context(1, &iswa(64, 8, 4));
    generate(&mut source, 0, 0..20);
    let first = save_range(&mut source, 0, -1, NONE);
    generate(&mut source, 0, 20..40);
    let second = save_range(&mut source, 20, -1, NONE);
    let mut ctx = context(1, &iswa(64, 64, 4));
    append(&mut ctx, &first, 0);
    assert_eq!(positions(&ctx, 1, 0), (12..20).collect::<Vec<_>>());
    append(&mut ctx, &second, 0);
    assert_eq!(positions(&ctx, 1, 0), (32..40).collect::<Vec<_>>());
    assert_eq!(positions(&ctx, 0, 0), (0..40).collect::<Vec<_>>());
}

// Files

#[test]
fn a_later_part_of_a_file_is_added() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("slot.bin");
    let (mut ctx, _) = with_overlap();
    let mut source = context(1, &iswa(32, 24, 4));
    decode(&mut source, 0, 0..14);
    source.state_seq_save_file(&path, 0, &[1, 2, 3]).expect("a file");
    let mut load = |p0| -> Result<_> {
        let params = RangeLoadParams { range: PosRange::new(p0, 13), append: true, n_token_capacity: 3 };
        ctx.state_seq_load_file_range(&path, 0, params)
    };
    assert_eq!(load(9).expect_err("position 9 is there").status(), Status::PositionsMeet);
    let loaded = load(10).expect("a file");
    assert_eq!((loaded.kept.pos_min, loaded.kept.pos_max, loaded.kept.n_cut), (10, 12, 1));
    assert_eq!(positions(&ctx, 0, 0), (0..13).collect::<Vec<_>>());
    assert!(is_intact(&ctx, 0, 0));
}

#[test]
fn a_cancelled_append_leaves_the_sequence_as_it_was() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("slot.bin");
    let (mut ctx, _) = with_overlap();
    let mut source = context(1, &iswa(32, 24, 4));
    decode(&mut source, 0, 0..14);
    source.state_seq_save_file_range(&path, 0, PosRange::new(10, -1), &[]).expect("a file");
    ctx.set_progress(Some(ProgressCallback::new(|_| ControlFlow::Break(()))));
    let before = ctx.state_seq_get_size(0, NONE).expect("a size");
    let state = save(&mut ctx, 0, NONE);
    let params = RangeLoadParams { append: true, ..RangeLoadParams::default() };
    let error = ctx.state_seq_load_file_range(&path, 0, params).expect_err("a cancelled load");
    assert_eq!(error.status(), Status::Cancelled);
    assert_eq!(ctx.state_seq_get_size(0, NONE).expect("a size"), before);
    assert!(save(&mut ctx, 0, NONE) == state);
}

proptest! {
    #[test]
    fn any_pieces_are_the_whole(mut ends in prop::collection::btree_set(1..60_i32, 1..9), v_trans: bool, unified: bool) {
        ends.insert(60);
        let ends: Vec<Pos> = ends.into_iter().collect();
        let params = |kv| KvParams { v_trans, ..kv };
        let sections = [params(kv(64)), params(standard(64, 5))];
        let new = || if unified { context(2, &sections) } else { support::streams(2, &sections) };
        let mut source = new();
        let pieces = pieces(&mut source, &ends, decode_attention);
        let mut into = new();
        for piece in &pieces {
            append(&mut into, piece, 0);
        }
        prop_assert!(save(&mut into, 0, NONE) == save(&mut source, 0, NONE));
    }
}
