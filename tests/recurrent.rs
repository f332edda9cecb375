//! Recurrent states: where they are, what can be cut off them, and what a saved one holds.
#![allow(missing_docs, reason = "a test")]

mod recurrence;
mod support;

use kvstate::context::Shift;
use kvstate::memory::{
    RecurrentLayerParams, RecurrentMemory, RecurrentParams, RecurrentPlanes, SectionParams,
};
use kvstate::storage::{Plane, PlaneShape};
use kvstate::types::{Pos, SeqId, StateFlags};
use kvstate::{Context, ContextParams, Status};
use recurrence::{after, state_of};
use support::{NONE, ON_DEVICE, PARTIAL, kv, place, restore, standard};

fn context(n_seq_max: u32, n_rs_seq: u32) -> Context {
    of(n_seq_max, vec![recurrence::params(n_rs_seq).into()])
}

fn hybrid(n_seq_max: u32, n_rs_seq: u32) -> Context {
    of(n_seq_max, vec![kv(64).into(), recurrence::params(n_rs_seq).into()])
}

fn of(n_seq_max: u32, sections: Vec<SectionParams>) -> Context {
    place::context(ContextParams::new(n_seq_max, sections)).expect("a context")
}

/// Decodes positions of one sequence as one ubatch; the recurrent section is the last.
fn decode(ctx: &mut Context, n_rs_seq: u32, seq: SeqId, positions: impl IntoIterator<Item = Pos>) {
    let seqs = [seq];
    let tokens: Vec<_> = positions.into_iter().map(|pos| (&seqs[..], pos)).collect();
    let section = ctx.n_section() - 1;
    recurrence::decode(ctx, &[(section, n_rs_seq)], &tokens).expect("a slot");
}

fn positions(ctx: &Context, seq: SeqId) -> (Pos, Pos) {
    (ctx.seq_pos_min(seq).expect("a sequence"), ctx.seq_pos_max(seq).expect("a sequence"))
}

fn save(ctx: &mut Context, seq: SeqId, flags: StateFlags) -> Vec<u8> {
    let size = ctx.state_seq_get_size(seq, flags).expect("a size");
    let mut blob = vec![0; usize::try_from(size).expect("it fits")];
    assert_eq!(ctx.state_seq_get_data(&mut blob, seq, flags).expect("a state"), blob.len());
    blob
}

// seq_rm

#[test]
fn a_range_that_leaves_out_the_last_position_changes_nothing() {
    let mut ctx = context(2, 3);
    decode(&mut ctx, 3, 0, 0..10);
    for (p0, p1) in [(0, 9), (3, 9), (10, -1), (10, 20), (5, 5)] {
        assert!(ctx.seq_rm(0, p0, p1).expect("a sequence"), "[{p0}, {p1})");
        assert_eq!(positions(&ctx, 0), (9, 9), "[{p0}, {p1})");
    }
}

#[test]
fn a_range_from_the_start_past_the_end_gives_the_state_up() {
    for (p0, p1) in [(-1, -1), (0, -1), (0, 10), (0, Pos::MAX)] {
        let mut ctx = context(2, 3);
        decode(&mut ctx, 3, 0, 0..10);
        assert!(ctx.seq_rm(0, p0, p1).expect("a sequence"), "[{p0}, {p1})");
        assert_eq!(positions(&ctx, 0), (-1, -1), "[{p0}, {p1})");
    }
}

#[test]
fn the_end_is_cut_off_once_by_as_many_positions_as_there_are_rollback_planes() {
    for cut in 1..=5 {
        let mut ctx = context(2, 3);
        decode(&mut ctx, 3, 0, 0..10);
        let can = cut <= 3;
        assert_eq!(ctx.seq_rm(0, 10 - cut, -1).expect("a sequence"), can, "{cut}");
        let left = if can { 10 - cut } else { 10 };
        assert_eq!(positions(&ctx, 0), (left - 1, left - 1), "{cut}");
        assert_eq!(state_of(&ctx, 0, 0), Some(after(0..left)), "{cut}");
        if can {
            assert!(!ctx.seq_rm(0, left - 1, -1).expect("a sequence"), "a rollback is pending");
            assert_eq!(state_of(&ctx, 0, 0), Some(after(0..left)), "{cut}");
            decode(&mut ctx, 3, 0, [left]);
            assert!(ctx.seq_rm(0, left, -1).expect("a sequence"), "the ubatch has ended it");
        }
    }
}

#[test]
fn a_state_without_rollback_planes_is_not_cut() {
    let mut ctx = hybrid(2, 0);
    decode(&mut ctx, 0, 0, 0..10);
    let before = save(&mut ctx, 0, NONE);
    assert!(!ctx.seq_rm(0, 9, -1).expect("a sequence"));
    assert_eq!(save(&mut ctx, 0, NONE), before, "nothing has changed in the attention cache either");
    assert_eq!(positions(&ctx, 0), (9, 9));
}

#[test]
fn what_can_be_removed_is_known_before() {
    let mut ctx = hybrid(2, 2);
    decode(&mut ctx, 2, 0, 0..10);
    for (seq, p0, p1) in [(0, 8, -1), (0, 7, -1), (0, 0, 4), (0, -1, -1), (-1, 3, -1)] {
        let can = ctx.can_seq_rm(seq, p0, p1).expect("a sequence");
        assert_eq!(positions(&ctx, 0), (9, 9));
        let mut same = hybrid(2, 2);
        decode(&mut same, 2, 0, 0..10);
        assert_eq!(same.seq_rm(seq, p0, p1).expect("a sequence"), can, "{seq} [{p0}, {p1})");
    }
    assert!(ctx.can_seq_rm(5, 0, -1).is_err());
}

#[test]
fn as_much_can_be_cut_off_as_the_last_ubatch_had_before_its_last_token() {
    let mut ctx = hybrid(3, 3);
    assert_eq!(ctx.max_cut(0).expect("a sequence"), None, "there is no state yet");
    decode(&mut ctx, 3, 0, 0..10);
    assert_eq!(ctx.max_cut(0).expect("a sequence"), Some(3));
    decode(&mut ctx, 3, 0, 10..12);
    assert_eq!(ctx.max_cut(0).expect("a sequence"), Some(1));
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    assert_eq!(ctx.max_cut(1).expect("a sequence"), Some(1));
    let blob = save(&mut ctx, 0, NONE);
    ctx.state_seq_set_data(&blob, 2, NONE).expect("a state");
    assert_eq!(ctx.max_cut(2).expect("a sequence"), Some(0), "a state is restored without those before it");
    assert!(ctx.seq_rm(0, 11, -1).expect("a sequence"));
    assert_eq!(ctx.max_cut(0).expect("a sequence"), Some(0), "a rollback is pending");
    assert!(ctx.max_cut(3).is_err());
}

#[test]
fn a_sequence_that_was_cut_to_where_no_state_is_cannot_go_on() {
    let mut ctx = hybrid(3, 3);
    decode(&mut ctx, 3, 0, 0..10);
    let blob = save(&mut ctx, 0, NONE);
    decode(&mut ctx, 3, 0, 10..11);
    assert!(ctx.seq_rm(0, 9, -1).expect("a sequence"), "as llama.cpp answers");
    let n_older =
        |ctx: &Context, seq| ctx.recurrent_state(1, seq).expect("a section").expect("a state").n_older;
    assert_eq!(n_older(&ctx, 0), None);
    assert!(!ctx.can_rewind(0, 9).expect("a sequence"));
    assert_eq!(ctx.rewind_pos(0, 9).expect("a sequence"), 0);
    let obstacle = ctx.rewind_obstacle(0, 9).expect("a sequence").expect("an obstacle");
    assert_eq!(obstacle.to_string(), "section recurrent has states to go on at no positions, and none for 9");

    // What is copied or computed from it is no better, until it is restored.
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    decode(&mut ctx, 3, 0, 9..12);
    assert_eq!([0, 1].map(|seq| n_older(&ctx, seq)), [None, None]);
    assert!(!ctx.can_rewind(0, 12).expect("a sequence"));
    restore(&mut ctx, &blob, 0, NONE);
    assert_eq!(n_older(&ctx, 0), Some(0));
    assert!(ctx.can_rewind(0, 10).expect("a sequence"));
}

#[test]
fn a_section_without_states_is_cut_anywhere() {
    let mut ctx = of(
        2,
        vec![
            kv(64).into(),
            RecurrentParams { layers: vec![RecurrentLayerParams::default(); 3], n_rs_seq: 2 }.into(),
        ],
    );
    let seqs = [0];
    let tokens: Vec<_> = (0..10).map(|pos| (&seqs[..], pos)).collect();
    recurrence::decode(&mut ctx, &[], &tokens).expect("a slot");
    assert!(ctx.seq_rm(0, 2, -1).expect("a sequence"));
    assert_eq!(positions(&ctx, 0), (1, 1));
    assert!(ctx.seq_rm(0, 1, -1).expect("a sequence"), "nothing is pending");
    assert_eq!(positions(&ctx, 0), (0, 0));
}

#[test]
fn every_sequence_is_removed_whole_or_not_at_all() {
    let mut ctx = context(3, 3);
    decode(&mut ctx, 3, 0, 0..4);
    decode(&mut ctx, 3, 1, 0..7);
    assert!(!ctx.seq_rm(-1, 2, -1).expect("all sequences"));
    assert!(!ctx.seq_rm(-1, 0, 3).expect("all sequences"));
    assert!(ctx.seq_rm(-1, 2, 2).expect("all sequences"), "an empty range");
    assert_eq!((positions(&ctx, 0), positions(&ctx, 1)), ((3, 3), (6, 6)));
    assert!(ctx.seq_rm(-1, -1, -1).expect("all sequences"));
    assert_eq!((positions(&ctx, 0), positions(&ctx, 1)), ((-1, -1), (-1, -1)));
}

#[test]
fn a_sequence_out_of_range_is_an_error() {
    let mut ctx = context(2, 0);
    assert_eq!(ctx.seq_rm(2, -1, -1).unwrap_err().to_string(), "seq_id 2 is out of range [0, 2)");
    assert_eq!(ctx.recurrent_state(0, 2).unwrap_err().status(), Status::InvalidArgument);
}

// Copies, and where states are

#[test]
fn a_copied_sequence_has_the_state_until_one_of_the_two_goes_on() {
    let mut ctx = context(3, 0);
    decode(&mut ctx, 0, 0, 0..5);
    ctx.seq_cp(0, 2, -1, -1).expect("sequences");
    assert_eq!(ctx.recurrent_state(0, 2).unwrap(), ctx.recurrent_state(0, 0).unwrap());
    decode(&mut ctx, 0, 2, [5, 6]);
    assert_eq!((positions(&ctx, 0), positions(&ctx, 2)), ((4, 4), (6, 6)));
    assert_eq!(state_of(&ctx, 0, 0), Some(after(0..5)));
    assert_eq!(state_of(&ctx, 0, 2), Some(after(0..7)));
}

#[test]
fn a_copy_of_a_sequence_without_a_state_has_none() {
    let mut ctx = context(2, 0);
    decode(&mut ctx, 0, 1, 0..5);
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    assert_eq!(positions(&ctx, 1), (-1, -1));
}

#[test]
fn a_rollback_of_one_of_two_that_share_a_state_leaves_the_other_as_it_is() {
    let mut ctx = context(2, 2);
    decode(&mut ctx, 2, 0, 0..5);
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    assert!(ctx.seq_rm(1, 3, -1).expect("a sequence"));
    assert_eq!((positions(&ctx, 0), positions(&ctx, 1)), ((4, 4), (2, 2)));
    assert_eq!(state_of(&ctx, 0, 0), Some(after(0..5)));
    assert_eq!(state_of(&ctx, 0, 1), Some(after(0..3)));
    decode(&mut ctx, 2, 0, [5]);
    assert_eq!(state_of(&ctx, 0, 1), Some(after(0..3)), "the ubatch of the other one took a cell of its own");
}

#[test]
fn a_copy_of_a_rolled_back_sequence_is_rolled_back() {
    let mut ctx = context(2, 2);
    decode(&mut ctx, 2, 0, 0..5);
    assert!(ctx.seq_rm(0, 3, -1).expect("a sequence"));
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    decode(&mut ctx, 2, 1, [3]);
    assert_eq!(state_of(&ctx, 0, 1), Some(after(0..4)));
    assert_eq!(state_of(&ctx, 0, 0), Some(after(0..3)));
}

#[test]
fn a_kept_sequence_is_the_only_one() {
    let mut ctx = context(3, 0);
    (0..3).for_each(|seq| decode(&mut ctx, 0, seq, 0..=seq));
    ctx.seq_keep(1).expect("a sequence");
    assert_eq!([0, 1, 2].map(|seq| positions(&ctx, seq).0), [-1, 1, -1]);
    assert_eq!(state_of(&ctx, 0, 1), Some(after(0..2)));
}

#[test]
fn the_sequences_of_a_ubatch_are_in_neighbouring_rows_and_the_others_make_room() {
    let mut ctx = context(3, 1);
    (0..3).for_each(|seq| decode(&mut ctx, 1, seq, 0..4 + seq));
    assert!(ctx.seq_rm(1, 4, -1).expect("a sequence"), "a pending rollback moves along");
    let (a, b) = ([2], [0]);
    recurrence::decode(&mut ctx, &[(0, 1)], &[(&a, 6), (&b, 4), (&a, 7)]).expect("a slot");
    let rows = [2, 0, 1].map(|seq| ctx.recurrent_state(0, seq).unwrap().unwrap().row);
    assert_eq!(rows, [0, 1, 3 + 2]);
    assert_eq!(state_of(&ctx, 0, 2), Some(after(0..8)));
    assert_eq!(state_of(&ctx, 0, 0), Some(after(0..5)));
    assert_eq!(state_of(&ctx, 0, 1), Some(after(0..4)));
}

#[test]
fn sequences_that_share_tokens_share_the_state_of_the_first() {
    let mut ctx = context(3, 0);
    decode(&mut ctx, 0, 0, 0..3);
    decode(&mut ctx, 0, 1, 0..9);
    let both = [0, 1];
    recurrence::decode(&mut ctx, &[(0, 0)], &[(&both, 3)]).expect("a slot");
    assert_eq!(ctx.recurrent_state(0, 0).unwrap(), ctx.recurrent_state(0, 1).unwrap());
    assert_eq!(state_of(&ctx, 0, 1), Some(after(0..4)));
}

#[test]
fn a_sequence_is_in_one_set_of_a_ubatch() {
    let mut ctx = context(3, 0);
    let (both, one) = ([0, 1], [1]);
    let error = recurrence::decode(&mut ctx, &[], &[(&both, 0), (&one, 1)]).unwrap_err();
    assert_eq!(error.to_string(), "seq_id[1]: sequence 1 has tokens in this ubatch that others do not share");
    assert_eq!(positions(&ctx, 0), (-1, -1));
}

// Positions

#[test]
fn positions_move_with_the_state_and_no_k_has_to_be_rotated() {
    let mut ctx = context(2, 0);
    decode(&mut ctx, 0, 0, 0..10);
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    assert!(ctx.can_shift());
    ctx.seq_add(0, 5, -1, 100).expect("a shift");
    assert_eq!(
        (positions(&ctx, 0), positions(&ctx, 1)),
        ((109, 109), (109, 109)),
        "as shared cells of attention"
    );
    ctx.seq_div(0, 0, -1, 10).expect("a shift");
    ctx.seq_add(0, 11, -1, 7).expect("a shift");
    assert_eq!(positions(&ctx, 0), (10, 10), "out of the range");
    assert_eq!(state_of(&ctx, 0, 0), Some(after(0..10)));
    let error = ctx.seq_add(0, 0, -1, Pos::MAX).unwrap_err();
    assert_eq!(error.to_string(), "position 10 shifted by 2147483647 leaves the range of positions");
    ctx.seq_add(0, 0, -1, -11).expect("a shift");
    assert_eq!(positions(&ctx, 0), (-1, -1), "below 0 it is given up");
}

#[test]
fn a_hybrid_shifts_if_somebody_rotates_k() {
    assert!(!hybrid(2, 0).can_shift());
    let sections = vec![kv(64).into(), recurrence::params(0).into()];
    let mut ctx = place::context(ContextParams { shift: Shift::Engine, ..ContextParams::new(2, sections) })
        .expect("a context");
    decode(&mut ctx, 0, 0, 0..10);
    ctx.seq_add(0, 0, -1, 5).expect("a shift");
    assert_eq!(positions(&ctx, 0), (14, 14));
    let overflow = ctx.seq_add(0, 14, -1, Pos::MAX).unwrap_err();
    assert_eq!(overflow.status(), Status::InvalidArgument);
    assert_eq!(positions(&ctx, 0), (14, 14));
}

#[test]
fn a_hybrid_is_usable_where_both_halves_are() {
    let mut ctx = hybrid(2, 0);
    decode(&mut ctx, 0, 0, 0..64);
    assert_eq!(positions(&ctx, 0), (63, 63));
    let partial = save(&mut ctx, 0, PARTIAL);
    ctx.clear(true).expect("an empty cache");
    assert_eq!(positions(&ctx, 0), (-1, -1));
    ctx.state_seq_set_data(&partial, 0, PARTIAL).expect("a state");
    assert_eq!(positions(&ctx, 0), (63, -1), "the recurrent state alone is no history to go on from");
}

#[test]
fn a_hybrid_with_a_window_is_usable_at_the_position_of_its_state() {
    let mut ctx = of(2, vec![kv(64).into(), standard(64, 8).into(), recurrence::params(0).into()]);
    decode(&mut ctx, 0, 0, 0..20);
    assert_eq!(positions(&ctx, 0), (19, 19));
}

// States

#[test]
fn a_state_is_the_same_with_every_flag_and_whole_in_another_sequence() {
    let mut ctx = context(3, 1);
    decode(&mut ctx, 1, 0, 0..10);
    let blob = save(&mut ctx, 0, NONE);
    // Header, count, pos and n_seq_id, s_trans and n_layer, two heads of R, one of P, three of S.
    assert_eq!(blob.len(), 8 + 4 + 8 + 8 + 2 * 12 + 8 + 3 * 12 + recurrence::STATE_BYTES);
    assert_eq!(save(&mut ctx, 0, PARTIAL), blob);
    for (seq, flags) in [(1, NONE), (2, PARTIAL)] {
        assert_eq!(ctx.state_seq_set_data(&blob, seq, flags).expect("a state"), blob.len());
        assert_eq!(state_of(&ctx, 0, seq), Some(after(0..10)));
        assert_eq!(positions(&ctx, seq), (9, 9));
    }
}

#[test]
fn a_state_with_a_pending_rollback_is_the_rolled_back_one_and_a_restore_ends_it() {
    let mut ctx = context(2, 3);
    decode(&mut ctx, 3, 0, 0..10);
    assert!(ctx.seq_rm(0, 8, -1).expect("a sequence"));
    let blob = save(&mut ctx, 0, PARTIAL);
    assert_eq!(ctx.recurrent_state(0, 0).unwrap().unwrap().rollback, 2);
    ctx.state_seq_set_data(&blob, 0, PARTIAL).expect("a state");
    assert_eq!(ctx.recurrent_state(0, 0).unwrap().unwrap().rollback, 0);
    assert_eq!(state_of(&ctx, 0, 0), Some(after(0..8)));
    let mut fresh = context(2, 0);
    decode(&mut fresh, 0, 0, 0..8);
    assert_eq!(save(&mut fresh, 0, PARTIAL), blob);
}

#[test]
fn a_state_kept_on_the_device_comes_back() {
    let mut ctx = hybrid(2, 2);
    decode(&mut ctx, 2, 0, 0..10);
    assert!(ctx.seq_rm(0, 9, -1).expect("a sequence"));
    let want = save(&mut ctx, 0, NONE);
    let blob = save(&mut ctx, 0, PARTIAL | ON_DEVICE);
    decode(&mut ctx, 2, 0, 9..20);
    ctx.state_seq_set_data(&blob, 0, PARTIAL | ON_DEVICE).expect("a state");
    assert!(ctx.seq_rm(0, 9, -1).expect("a sequence"));
    assert_eq!(save(&mut ctx, 0, NONE), want);
}

#[test]
fn a_snapshot_of_a_hybrid_restores_elsewhere() {
    let mut ctx = hybrid(2, 0);
    decode(&mut ctx, 0, 0, 0..10);
    let blob = save(&mut ctx, 0, NONE);
    let snapshot = ctx.seq_snapshot(0, NONE).expect("a snapshot");
    let mut other = hybrid(1, 4);
    other.seq_restore(&snapshot, 0).expect("a state");
    assert_eq!(save(&mut other, 0, NONE), blob);
}

#[test]
fn a_whole_context_keeps_what_sequences_share_and_what_is_rolled_back() {
    let mut ctx = context(4, 2);
    decode(&mut ctx, 2, 0, 0..5);
    decode(&mut ctx, 2, 2, 0..9);
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    ctx.seq_cp(0, 3, -1, -1).expect("sequences");
    assert!(ctx.seq_rm(3, 4, -1).expect("a sequence"));
    let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
    ctx.state_get_data(&mut state).expect("a state");
    let mut other = context(4, 0);
    decode(&mut other, 0, 3, 0..2);
    assert_eq!(other.state_set_data(&state).expect("a state"), state.len());
    for (seq, len) in [(0, 5), (1, 5), (2, 9), (3, 4)] {
        assert_eq!(positions(&other, seq), (len - 1, len - 1), "{seq}");
        assert_eq!(state_of(&other, 0, seq), Some(after(0..len)), "{seq}");
    }
    assert_eq!(other.recurrent_state(0, 0).unwrap(), other.recurrent_state(0, 1).unwrap());
}

#[test]
fn a_state_without_cells_empties_the_destination() {
    let mut ctx = hybrid(2, 1);
    let empty = save(&mut ctx, 0, NONE);
    decode(&mut ctx, 1, 1, 0..5);
    assert_eq!(ctx.state_seq_set_data(&empty, 1, NONE).expect("a state"), empty.len());
    assert_eq!(positions(&ctx, 1), (-1, -1));
    assert_eq!(ctx.recurrent_state(1, 1).unwrap(), None);
}

#[test]
fn a_last_section_that_does_not_fit_leaves_the_first_as_it_was() {
    let mut ctx = hybrid(2, 0);
    decode(&mut ctx, 0, 0, 0..10);
    let blob = save(&mut ctx, 0, NONE);
    let mut other = recurrence::params(0);
    other.layers[3].s.as_mut().expect("S").n_embd = 3;
    let mut target = of(2, vec![kv(64).into(), other.into()]);
    recurrence::decode(&mut target, &[], &[(&[0], 0), (&[0], 1)]).expect("a slot");
    let before = save(&mut target, 0, NONE);
    let error = target.state_seq_set_data(&blob, 0, NONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "mismatched s row size: the state has 8, the cache 12 (section recurrent, layer 3)"
    );
    assert_eq!(save(&mut target, 0, NONE), before);
}

// What cannot be

#[test]
fn states_that_do_not_fit_are_refused_by_name() {
    let mut ctx = context(2, 0);
    decode(&mut ctx, 0, 0, 0..10);
    let blob = save(&mut ctx, 0, NONE);
    let mut refused = |at: usize, value: u32, want: &str| {
        let mut bad = blob.clone();
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = ctx.state_seq_set_data(&bad, 1, NONE).unwrap_err();
        assert_eq!(error.to_string(), want);
    };
    refused(8, 2, "cell_count: 2 (expected at most 1 state of a sequence)");
    refused(12, u32::MAX, "pos: -1 (expected at least 0)");
    refused(16, 1, "n_seq_id: 1 (expected 0 in the recurrent state of a sequence)");
    refused(20, 1, "incompatible s transposition: the state has 1, the cache 0 (section recurrent)");
    refused(24, 5, "mismatched layer count: the state has 5, the cache 4 (section recurrent)");
    refused(
        28,
        1,
        "mismatched r type: the state has 1 (f16), the cache 0 (f32) (section recurrent, layer 0; convert_types allows it)",
    );
    refused(32, 8, "mismatched r row size: the state has 8, the cache 12 (section recurrent, layer 0)");
    refused(52, 4, "mismatched ple row size: the state has 4, the cache 8 (section recurrent, layer 0)");
    let s = 52 + 8 + 8 + 12 + 16;
    refused(
        s,
        8,
        "mismatched s type: the state has 8 (q8_0), the cache 0 (f32) (section recurrent, layer 0; convert_types allows it)",
    );
    assert_eq!(positions(&ctx, 1), (-1, -1));
}

#[test]
fn whole_contexts_that_do_not_fit_are_refused_by_name() {
    let mut ctx = context(2, 0);
    decode(&mut ctx, 0, 0, 0..10);
    decode(&mut ctx, 0, 1, 0..5);
    let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
    ctx.state_get_data(&mut state).expect("a state");
    let mut refused = |at: usize, value: u32, want: &str| {
        let mut bad = state.clone();
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        assert_eq!(ctx.state_set_data(&bad).unwrap_err().to_string(), want);
    };
    // Length of the name, count; then pos, n_seq_id and seq_id of each state.
    refused(4, 3, "failed to find 3 available cells in kv cache: 2 of 2 can be used (section recurrent)");
    refused(12, 0, "n_seq_id: 0 (expected 1 to n_seq_max 2)");
    refused(16, 2, "seq_id: 2 (expected a sequence in [0, 2))");
    refused(28, 0, "seq_id: 0 twice (expected one state of a sequence)");
    assert_eq!((positions(&ctx, 0), positions(&ctx, 1)), ((9, 9), (4, 4)));
}

#[test]
fn geometries_that_make_no_sense_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut RecurrentParams), want: &str| {
        let mut params = recurrence::params(0);
        change(&mut params);
        let error = Context::new(ContextParams::new(2, vec![params.into()])).unwrap_err();
        assert_eq!(error.to_string(), want);
    };
    refused(&|params| params.layers[3].p = Some(2), "recurrent.layer 3.p: 2 elements in a layer without R");
    refused(&|params| params.n_rs_seq = u32::MAX, "recurrent.n_rs_seq: 4294967295 rollback planes of 2 rows");
    refused(
        &|params| params.layers[0].r.as_mut().expect("R").ggml_type = kvstate::format::GgmlType::Q8_0,
        "recurrent.layer 0.r.n_embd: 3 is no multiple of the 32 elements of a q8_0 block",
    );
}

#[test]
fn memory_that_does_not_fit_is_refused_by_name() {
    let rows = |n_rows, row_size| {
        let shape = PlaneShape::dense_rows(row_size);
        Some(Plane::allocate(&[shape], n_rows).expect("memory").remove(0))
    };
    let fitting = || RecurrentPlanes {
        r: vec![rows(6, 12), None, rows(6, 16), None],
        s: vec![rows(6, 20), None, None, rows(6, 8)],
        p: vec![rows(6, 8), None, None, None],
    };
    let adopt = |planes| {
        let memory = RecurrentMemory::Adopted(planes);
        let section = SectionParams::Recurrent { recurrent: recurrence::params(2), memory };
        Context::new(ContextParams::new(2, vec![section]))
    };
    assert!(adopt(fitting()).is_ok());
    let refused = |change: &dyn Fn(&mut RecurrentPlanes), want: &str| {
        let mut planes = fitting();
        change(&mut planes);
        assert_eq!(adopt(planes).unwrap_err().to_string(), want);
    };
    refused(&|planes| drop(planes.p.pop()), "recurrent.p: 3 planes for 4 layers");
    refused(&|planes| planes.r[2] = None, "recurrent.layer 2.r: the plane is not 6 rows of 16 bytes");
    refused(&|planes| planes.s[3] = rows(2, 8), "recurrent.layer 3.s: the plane is not 6 rows of 8 bytes");
    refused(&|planes| planes.p[0] = rows(6, 4), "recurrent.layer 0.p: the plane is not 6 rows of 8 bytes");
    refused(&|planes| planes.p[1] = rows(6, 4), "recurrent.layer 1.p: a plane for a layer without it");
    refused(&|planes| planes.s[2] = rows(6, 4), "recurrent.layer 2.s: the plane is not 6 rows of 0 bytes");
    let memory = RecurrentMemory::Devices(vec![None; 3]);
    let section = SectionParams::Recurrent { recurrent: recurrence::params(2), memory };
    let error = Context::new(ContextParams::new(2, vec![section])).unwrap_err();
    assert_eq!(error.to_string(), "recurrent.devices: 3 for 4 layers");
}

#[test]
fn rope_of_a_recurrent_section_is_refused_by_name() {
    let with = |recurrent| {
        let sections = vec![kv(64).into(), recurrence::params(0).into()];
        let shift = Shift::Rope(vec![vec![None, None], recurrent]);
        Context::new(ContextParams { shift, ..ContextParams::new(2, sections) })
    };
    assert!(with(vec![]).expect("a context").can_shift());
    let error = with(vec![None]).unwrap_err();
    assert_eq!(error.to_string(), "rope: 1 layers for section recurrent, in which no K is turned");
}

#[test]
fn attention_and_recurrent_sections_are_told_apart() {
    let ctx = hybrid(2, 0);
    let error = ctx.k(1, 0, 0).unwrap_err();
    assert_eq!(error.to_string(), "section: 1 is recurrent, no attention cache");
    let error = ctx.recurrent_state(0, 0).unwrap_err();
    assert_eq!(error.to_string(), "section: 0 is kv, not recurrent");
    let error = ctx.recurrent_plane(1, 4, kvstate::memory::RecurrentTensor::R).unwrap_err();
    assert_eq!(error.to_string(), "layer: 4 is out of range [0, 4)");
}
