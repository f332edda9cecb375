//! Checkpoints: what they cover, which are kept, and how they lead back where a sequence cannot be rewound.

#![allow(
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "positions of small histories"
)]

mod support;
mod transformer;

use kvstate::context::{Checkpoint, CheckpointMemory, Checkpoints, CheckpointsParams, Resumed, Verdict};
use kvstate::format::CheckpointSpan;
use kvstate::memory::KvParams;
use kvstate::types::{Pos, SeqId, StateFlags, Swa, SwaType};
use kvstate::{Context, Status};
use proptest::prelude::*;
use support::{PARTIAL, decode, generate, image, is_intact, iswa, kv, place, positions, restore, save};
use transformer::Setup;

const N_SWA: u32 = 8;
const MEMORIES: [CheckpointMemory; 2] = [CheckpointMemory::Cache, CheckpointMemory::Host];

/// Full attention of 128 cells, and a window of 8 positions in 12 cells: old ones are taken over.
fn tight() -> Context {
    support::context(2, &iswa(128, 12, N_SWA))
}

/// 64 tokens of sequence 0, and room for the window of another.
fn roomy_with_64() -> Context {
    let mut ctx = support::context(3, &iswa(128, 40, N_SWA));
    generate(&mut ctx, 0, 0..64);
    assert!(ctx.seq_rm(0, 0, 40).expect("a removal"));
    ctx
}

/// After 64 tokens: the window's section has positions 52 to 63.
fn tight_with_64() -> Context {
    let mut ctx = tight();
    generate(&mut ctx, 0, 0..64);
    assert_eq!(positions(&ctx, 1, 0), (52..64).collect::<Vec<_>>());
    ctx
}

fn checkpoints(params: CheckpointsParams) -> Checkpoints {
    Checkpoints::new(0, params).expect("parameters")
}

fn at_most(n_max: usize) -> Checkpoints {
    spaced(n_max, 1)
}

fn spaced(n_max: usize, min_step: u32) -> Checkpoints {
    checkpoints(CheckpointsParams { n_max, min_step, ..CheckpointsParams::default() })
}

/// 64 tokens, with checkpoints behind 16, 32 and 48.
fn with_checkpoints(memory: CheckpointMemory) -> (Context, Checkpoints) {
    let mut ctx = tight();
    let mut taken = checkpoints(CheckpointsParams { memory, ..CheckpointsParams::default() });
    for n in [16, 32, 48] {
        generate(&mut ctx, 0, n - 16..n);
        taken.take(&mut ctx, n.try_into().expect("few")).expect("a checkpoint");
    }
    generate(&mut ctx, 0, 48..64);
    (ctx, taken)
}

fn spans(taken: &Checkpoints) -> Vec<(u64, Pos, Pos)> {
    let span = |checkpoint: &Checkpoint| (checkpoint.n_tokens(), checkpoint.pos_min(), checkpoint.pos_max());
    taken.as_slice().iter().map(span).collect()
}

fn n_tokens(taken: &Checkpoints) -> Vec<u64> {
    taken.as_slice().iter().map(Checkpoint::n_tokens).collect()
}

// What a checkpoint is

#[test]
fn a_checkpoint_covers_the_window_and_not_what_the_cache_still_has() {
    for memory in MEMORIES {
        let (ctx, taken) = with_checkpoints(memory);
        assert_eq!(spans(&taken), [(16, 8, 15), (32, 24, 31), (48, 40, 47)]);
        assert_eq!((ctx.seq_pos_min(0).expect("a position"), taken.seq_id()), (52, 0));
    }
}

#[test]
fn a_checkpoint_has_the_size_of_a_partial_state() {
    let mut ctx = tight_with_64();
    let size = ctx.state_seq_get_size(0, PARTIAL).expect("a size");
    for memory in MEMORIES {
        let mut taken = checkpoints(CheckpointsParams { memory, ..CheckpointsParams::default() });
        assert_eq!(taken.take(&mut ctx, 64).expect("a checkpoint").size(), size);
        assert_eq!(taken.bytes(), size);
    }
}

#[test]
fn a_checkpoint_of_full_attention_covers_all_of_it_in_8_bytes() {
    let mut ctx = support::context(2, &[kv(64)]);
    decode(&mut ctx, 0, 0..40);
    let mut taken = at_most(3);
    let checkpoint = taken.take(&mut ctx, 40).expect("a checkpoint");
    assert_eq!((checkpoint.pos_min(), checkpoint.pos_max(), checkpoint.size()), (0, 39, 8));
}

#[test]
fn the_memory_of_a_checkpoint_does_not_grow_with_the_history() {
    let mut ctx = support::context(1, &iswa(4096, 64, 32));
    let mut taken = at_most(8);
    let mut sizes = Vec::new();
    let mut end = 0;
    for n in [64, 512, 4096] {
        while end < n {
            decode(&mut ctx, 0, end..end + 16);
            end += 16;
        }
        sizes.push(taken.take(&mut ctx, 1).expect("a checkpoint").size());
    }
    assert_eq!(sizes, [sizes[0]; 3]);
    // 32 cells of two layers, 8 bytes of K and 4 of V, and 12 of metadata; the fields around them.
    assert_eq!(sizes[0], 32 * (2 * 12 + 12) + 8 + 4 + 4 + 16 + 2 * 2 * 12);
}

// Going back

#[test]
fn a_sequence_that_can_be_cut_is_cut_without_a_checkpoint() {
    for memory in MEMORIES {
        let (mut ctx, mut taken) = with_checkpoints(memory);
        let resumed = taken.resume(&mut ctx, 60).expect("a way back");
        assert_eq!(resumed, Resumed { pos: 60, restored: None });
        assert_eq!(positions(&ctx, 0, 0), (0..60).collect::<Vec<_>>());
        assert_eq!(positions(&ctx, 1, 0), (52..60).collect::<Vec<_>>());
        assert_eq!(n_tokens(&taken), [16, 32, 48]);
    }
}

#[test]
fn the_best_checkpoint_is_restored_and_the_rest_is_cut() {
    for memory in MEMORIES {
        let (mut ctx, mut taken) = with_checkpoints(memory);
        let resumed = taken.resume(&mut ctx, 40).expect("a way back");
        assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) });
        assert_eq!(positions(&ctx, 0, 0), (0..32).collect::<Vec<_>>());
        assert_eq!(positions(&ctx, 1, 0), (24..32).collect::<Vec<_>>());
        assert!(is_intact(&ctx, 0, 0));
        assert_eq!(n_tokens(&taken), [16, 32]);
    }
}

#[test]
fn a_checkpoint_can_be_gone_back_to_more_than_once() {
    for memory in MEMORIES {
        let (mut ctx, mut taken) = with_checkpoints(memory);
        for _ in 0..3 {
            let resumed = taken.resume(&mut ctx, 40).expect("a way back");
            assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) });
            generate(&mut ctx, 0, 32..64);
        }
        assert!(is_intact(&ctx, 0, 0));
    }
}

/// A token at 47 sees 40 to 46, which are in the checkpoint behind 48: its last token alone is computed again.
#[test]
fn a_checkpoint_behind_the_divergence_serves_where_it_has_the_window() {
    let (mut ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    let resumed = taken.resume(&mut ctx, 47).expect("a way back");
    assert_eq!(resumed, Resumed { pos: 47, restored: Some(48) });
    assert_eq!(positions(&ctx, 1, 0), (40..47).collect::<Vec<_>>());
    assert_eq!(n_tokens(&taken), [16, 32]);
}

#[test]
fn without_a_checkpoint_that_serves_the_sequence_is_emptied() {
    let (mut ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    let resumed = taken.resume(&mut ctx, 14).expect("a way back");
    assert_eq!(resumed, Resumed { pos: 0, restored: None });
    assert_eq!((positions(&ctx, 0, 0), positions(&ctx, 1, 0)), (vec![], vec![]));
    assert_eq!(n_tokens(&taken), [0_u64; 0]);
}

#[test]
fn going_back_leaves_other_sequences_alone() {
    let mut ctx = support::context(2, &iswa(128, 40, N_SWA));
    let mut taken = at_most(4);
    generate(&mut ctx, 0, 0..16);
    taken.take(&mut ctx, 16).expect("a checkpoint");
    generate(&mut ctx, 1, 0..5);
    generate(&mut ctx, 0, 16..64);
    let before = positions(&ctx, 1, 1);
    assert_eq!(taken.resume(&mut ctx, 20).expect("a way back").restored, Some(16));
    assert_eq!((positions(&ctx, 0, 1), positions(&ctx, 1, 1)), ((0..5).collect(), before));
    assert!(is_intact(&ctx, 1, 1));
}

#[test]
fn a_way_back_that_makes_no_sense_changes_nothing() {
    let (mut ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    let before = image(&ctx);
    let error = taken.resume(&mut ctx, -1).unwrap_err();
    assert_eq!(error.to_string(), "pos: -1, positions start at 0");
    assert_eq!((image(&ctx) == before, n_tokens(&taken)), (true, vec![16, 32, 48]));
    assert_eq!(taken.verdicts(&ctx, -1).unwrap_err().status(), Status::InvalidArgument);
}

// Why a checkpoint does not serve

fn told(verdicts: &[Verdict]) -> Vec<String> {
    verdicts.iter().map(Verdict::to_string).collect()
}

fn past(pos_max: Pos, pos: Pos) -> String {
    format!("past the divergence: its largest position is {pos_max}, the history diverges at {pos}")
}

fn serves(pos: Pos) -> String {
    format!("serves at position {pos}")
}

#[test]
fn a_checkpoint_past_the_divergence_says_so() {
    let (ctx, taken) = with_checkpoints(CheckpointMemory::Host);
    let verdicts = |pos| told(&taken.verdicts(&ctx, pos).expect("verdicts"));
    assert_eq!(verdicts(64), [serves(16), serves(32), serves(48)]);
    assert_eq!(verdicts(40), [serves(16), serves(32), past(47, 40)]);
    assert_eq!(verdicts(31), [serves(16), serves(31), past(47, 31)]);
    assert_eq!(verdicts(0), [past(15, 0), past(31, 0), past(47, 0)]);
}

#[test]
fn a_checkpoint_without_the_full_attention_before_it_says_so() {
    let (mut ctx, taken) = with_checkpoints(CheckpointMemory::Cache);
    assert!(ctx.seq_rm(0, 20, -1).expect("a removal"));
    assert_eq!(
        told(&taken.verdicts(&ctx, 40).expect("verdicts")),
        [
            serves(16),
            "section base has positions 0 to 19, and a token at 32 needs positions 0 to 31".to_owned(),
            past(47, 40)
        ]
    );
}

fn unfit(taken: &Checkpoints, sections: &[KvParams]) -> Vec<String> {
    let mut ctx = support::context(2, sections);
    generate(&mut ctx, 0, 0..64);
    let before = image(&ctx);
    let verdicts = taken.verdicts(&ctx, 64).expect("verdicts");
    assert!(verdicts.iter().all(|verdict| matches!(verdict, Verdict::Unfit(_))), "{verdicts:?}");
    assert!(image(&ctx) == before);
    told(&verdicts)
}

#[test]
fn a_checkpoint_of_other_sections_says_so() {
    for memory in MEMORIES {
        let (mut ctx, mut taken) = with_checkpoints(memory);
        assert_eq!(taken.resume(&mut ctx, 16).expect("a way back").restored, Some(16));
        assert_eq!(
            unfit(&taken, &[kv(128)]),
            ["mismatched number of sections: the state has 2, the cache 1 (checkpoint)"]
        );
        assert_eq!(
            unfit(&taken, &iswa(128, 40, 9)),
            ["mismatched window: the state has Standard, n_swa 8, the cache Standard, n_swa 9 (section swa)"]
        );
        assert_eq!(
            unfit(&taken, &[kv(128), kv(128)]),
            ["mismatched window: the state has Standard, n_swa 8, the cache full attention (section kv 1)"]
        );
        let one_layer = |kv: KvParams| KvParams { layers: kv.layers[..1].to_vec(), ..kv };
        assert_eq!(
            unfit(&taken, &[kv(128), one_layer(support::standard(40, N_SWA))]),
            ["mismatched layer count: the state has 2, the cache 1 (section swa)"]
        );
    }
}

#[test]
fn a_checkpoint_without_room_says_so_and_the_sequence_is_emptied() {
    let (mut ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    assert!(ctx.seq_rm(0, 32, -1).expect("a removal"));
    generate(&mut ctx, 1, 0..12);
    let verdicts = taken.verdicts(&ctx, 32).expect("verdicts");
    let no_space =
        "failed to find 8 available cells in kv cache: 5 of 12 can be used (section swa, stream 0)";
    assert_eq!(told(&verdicts), [no_space; 3]);
    assert_eq!(taken.resume(&mut ctx, 32).expect("a way back"), Resumed { pos: 0, restored: None });
    assert_eq!(positions(&ctx, 1, 1), (0..12).collect::<Vec<_>>());
}

// Checkpoints that were taken before

fn bytes_of(checkpoint: &Checkpoint) -> Vec<u8> {
    let mut state = vec![0xee; usize::try_from(checkpoint.size()).expect("a size")];
    assert_eq!(checkpoint.get_data(&mut state).expect("a state"), state.len());
    state
}

/// As a slot file has it.
fn stored(checkpoint: &Checkpoint) -> (CheckpointSpan, Vec<u8>) {
    let n_tokens = checkpoint.n_tokens().cast_signed();
    let span = CheckpointSpan::new(n_tokens, checkpoint.pos_min(), checkpoint.pos_max());
    (span.expect("a span"), bytes_of(checkpoint))
}

fn stored_of(taken: &Checkpoints) -> Vec<(CheckpointSpan, Vec<u8>)> {
    taken.as_slice().iter().map(stored).collect()
}

/// Another process, which has restored the sequence.
fn restored_beside(ctx: &mut Context) -> Context {
    let mut other = tight();
    restore(&mut other, &save(ctx, 0, StateFlags::empty()), 0, StateFlags::empty());
    other
}

#[test]
fn a_checkpoint_is_the_bytes_of_a_partial_state() {
    for memory in MEMORIES {
        let mut ctx = tight_with_64();
        let mut taken = checkpoints(CheckpointsParams { memory, ..CheckpointsParams::default() });
        let checkpoint = taken.take(&mut ctx, 64).expect("a checkpoint");
        let state = bytes_of(checkpoint);
        let mut short = vec![7; state.len() - 1];
        let error = checkpoint.get_data(&mut short).unwrap_err();
        assert_eq!((error.status(), short), (Status::BufferTooSmall, vec![7; state.len() - 1]));
        assert_eq!(state, save(&mut ctx, 0, PARTIAL));
    }
}

#[test]
fn checkpoints_that_are_put_lead_back_as_those_that_were_taken() {
    for memory in MEMORIES {
        let (mut ctx, taken) = with_checkpoints(memory);
        let mut other = restored_beside(&mut ctx);
        let mut put = checkpoints(CheckpointsParams { memory, ..CheckpointsParams::default() });
        // In whatever order.
        for (span, state) in stored_of(&taken).iter().rev() {
            put.put(&other, *span, state).expect("a checkpoint");
        }
        assert_eq!((spans(&put), put.bytes()), (spans(&taken), taken.bytes()));
        for pos in 0..65 {
            let worth = |taken: &Checkpoints, ctx| told(&taken.verdicts(ctx, pos).expect("verdicts"));
            assert_eq!(worth(&put, &other), worth(&taken, &ctx));
        }
        let resumed = put.resume(&mut other, 40).expect("a way back");
        assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) });
        assert_eq!(positions(&other, 0, 0), (0..32).collect::<Vec<_>>());
        assert_eq!(positions(&other, 1, 0), (24..32).collect::<Vec<_>>());
        assert!(is_intact(&other, 0, 0));
        generate(&mut other, 0, 32..48);
        put.take(&mut other, 48).expect("a checkpoint");
        assert_eq!(n_tokens(&put), [16, 32, 48]);
    }
}

#[test]
fn a_checkpoint_of_full_attention_is_put_with_the_positions_that_are_told() {
    let mut ctx = support::context(2, &[kv(64)]);
    decode(&mut ctx, 0, 0..40);
    let mut taken = at_most(3);
    let (span, state) = stored(taken.take(&mut ctx, 40).expect("a checkpoint"));
    decode(&mut ctx, 0, 40..50);
    let mut put = at_most(3);
    put.put(&ctx, span, &state).expect("a checkpoint");
    assert_eq!(spans(&put), [(40, 0, 39)]);
}

#[test]
fn a_checkpoint_that_is_put_replaces_that_of_the_same_position() {
    let (ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    let (_, state) = stored(&taken.as_slice()[1]);
    taken.put(&ctx, CheckpointSpan::new(33, 0, 31).expect("a span"), &state).expect("a checkpoint");
    assert_eq!(spans(&taken), [(16, 8, 15), (33, 24, 31), (48, 40, 47)]);
}

#[test]
fn checkpoints_that_are_put_keep_to_their_number_and_bytes() {
    let (ctx, taken) = with_checkpoints(CheckpointMemory::Cache);
    let all = stored_of(&taken);
    let size = taken.as_slice()[0].size();
    let by_number = CheckpointsParams { n_max: 2, min_step: 1, ..CheckpointsParams::default() };
    let by_bytes = CheckpointsParams { n_max: 9, max_bytes: Some(3 * size - 1), ..by_number };
    for params in [by_number, by_bytes] {
        let mut put = checkpoints(params);
        for (span, state) in &all {
            put.put(&ctx, *span, state).expect("a checkpoint");
        }
        // What diverges far from the end has far to go anyway.
        assert_eq!(n_tokens(&put), [32, 48]);
        // The one that is missed least can be the one that is put.
        put.put(&ctx, all[0].0, &all[0].1).expect("no error");
        assert_eq!(n_tokens(&put), [32, 48]);
    }
    let mut none = checkpoints(CheckpointsParams { max_bytes: Some(size - 1), ..by_number });
    let error = none.put(&ctx, all[0].0, &all[0].1).unwrap_err();
    assert_eq!((error.status(), none.as_slice().len()), (Status::OutOfMemory, 0));
}

#[test]
fn a_checkpoint_that_does_not_belong_to_the_sequence_is_refused() {
    let (ctx, mut taken) = with_checkpoints(CheckpointMemory::Host);
    let (span, state) = stored(&taken.as_slice()[2]);
    let reason = |taken: &mut Checkpoints, ctx: &Context, span, state: &[u8]| {
        let before = image(ctx);
        let error = taken.put(ctx, span, state).expect_err("it is refused").to_string();
        assert!(image(ctx) == before);
        error
    };
    let other_span = CheckpointSpan::new(48, 40, 46).expect("a span");
    assert_eq!(reason(&mut taken, &ctx, other_span, &state), "pos_max: 46, the state ends at 47");
    let mut short = tight();
    generate(&mut short, 0, 0..40);
    let behind = "pos_max: 47, behind sequence 0, which ends at 39";
    assert_eq!(reason(&mut taken, &short, span, &state), behind);
    let behind = "pos_max: 47, behind sequence 0, which ends at -1";
    assert_eq!(reason(&mut taken, &tight(), span, &state), behind);
    let one_layer = |kv: KvParams| KvParams { layers: kv.layers[..1].to_vec(), ..kv };
    let mut other = support::context(2, &[kv(128), one_layer(support::standard(40, N_SWA))]);
    generate(&mut other, 0, 0..64);
    let layers = "mismatched layer count: the state has 2, the cache 1 (section swa)";
    assert_eq!(reason(&mut taken, &other, span, &state), layers);
    for len in 0..state.len() {
        let error = taken.put(&ctx, span, &state[..len]).expect_err("it is cut off");
        assert_eq!(error.status(), Status::Truncated, "{error}");
    }
    assert_eq!(spans(&taken), [(16, 8, 15), (32, 24, 31), (48, 40, 47)]);
    let mut of_other = Checkpoints::new(2, CheckpointsParams::default()).expect("parameters");
    assert_eq!(reason(&mut of_other, &ctx, span, &state), "seq_id 2 is out of range [0, 2)");
}

// What is kept

#[test]
fn a_checkpoint_at_the_same_position_replaces_the_older_one() {
    let (mut ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    for n_tokens in [64, 65] {
        taken.take(&mut ctx, n_tokens).expect("a checkpoint");
    }
    assert_eq!(n_tokens(&taken), [16, 32, 48, 65]);
}

#[test]
fn a_checkpoint_at_an_earlier_position_tells_that_the_history_was_rewound() {
    let (mut ctx, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    ctx.clear(false).expect("an empty context");
    generate(&mut ctx, 0, 0..20);
    taken.take(&mut ctx, 20).expect("a checkpoint");
    assert_eq!(n_tokens(&taken), [16, 20]);
}

#[test]
fn checkpoints_of_positions_that_are_gone_are_dropped() {
    let (_, mut taken) = with_checkpoints(CheckpointMemory::Cache);
    taken.truncate(48);
    assert_eq!(n_tokens(&taken), [16, 32, 48]);
    taken.truncate(47);
    assert_eq!(n_tokens(&taken), [16, 32]);
    taken.truncate(0);
    assert_eq!((taken.as_slice().len(), taken.bytes()), (0, 0));
}

/// Takes a checkpoint of a sequence that has a token at 0 and one before `end`, whatever is between.
fn take_at(taken: &mut Checkpoints, ctx: &mut Context, end: Pos) {
    if end > 1 && ctx.seq_pos_max(0).expect("a position") < 0 {
        decode(ctx, 0, [0]);
    }
    decode(ctx, 0, [end - 1]);
    taken.take(ctx, end.try_into().expect("positive")).expect("a checkpoint");
}

#[test]
fn checkpoints_lie_the_closer_the_nearer_they_are_to_the_end() {
    let mut ctx = support::context(1, &[kv(256)]);
    let mut taken = spaced(6, 100);
    (1..=128).for_each(|i| take_at(&mut taken, &mut ctx, 100 * i));
    let behind: Vec<u64> = n_tokens(&taken).iter().map(|n| 12_800 - n).collect();
    assert_eq!(behind, [5600, 2600, 1000, 600, 200, 0]);
}

#[test]
fn of_one_checkpoint_the_newest_stays() {
    let mut ctx = support::context(1, &[kv(64)]);
    let mut taken = at_most(1);
    for end in [3, 9, 12] {
        take_at(&mut taken, &mut ctx, end);
    }
    assert_eq!(n_tokens(&taken), [12]);
}

proptest! {
    /// With `n` checkpoints: whatever diverges, the best that was ever taken is kept, or one that is further from the end than
    /// the divergence by a factor of at most ((end + s) / s)^(2 / n), where s is the step, which counts as no distance.
    #[test]
    fn going_back_costs_at_most_a_constant_factor_of_what_is_taken_back(
        n_max in 1_usize..12,
        min_step in prop::sample::select([1_u32, 10, 1000].as_slice()),
        steps in prop::collection::vec(prop_oneof![1..4_i32, 1..100_i32, 1..20_000_i32], 1..120),
    ) {
        let mut ctx = support::context(1, &[kv(128)]);
        let mut taken = spaced(n_max, min_step);
        let s = f64::from(min_step);
        let mut ends = Vec::new();
        for step in steps {
            let end = ends.last().unwrap_or(&0) + step;
            take_at(&mut taken, &mut ctx, end);
            ends.push(end);
            let kept = n_tokens(&taken);
            prop_assert_eq!((kept.len(), kept.last()), (n_max.min(ends.len()), Some(&(end as u64))));
            let factor = ((f64::from(end) + s) / s).powf(2.0 / n_max as f64);
            for at in ends.iter().flat_map(|&end| [end - 1, end]) {
                let best_taken = ends.iter().copied().filter(|&end| end <= at).max().unwrap_or(0);
                let best_kept = kept.iter().map(|&n| n as Pos).filter(|&end| end <= at).max().unwrap_or(0);
                let behind = |pos| f64::from(end - pos) + s;
                prop_assert!(
                    best_kept == best_taken || behind(best_kept) <= factor * behind(at) * (1.0 + 1e-9),
                    "{:?}: from {} to {}, not {}", kept, at, best_kept, best_taken
                );
            }
        }
    }
}

#[test]
fn checkpoints_make_room_before_a_new_one_takes_memory() {
    for memory in MEMORIES {
        let mut ctx = tight();
        generate(&mut ctx, 0, 0..16);
        let size = ctx.state_seq_get_size(0, PARTIAL).expect("a size");
        let max_bytes = Some(3 * size + size / 2);
        let mut taken = checkpoints(CheckpointsParams { n_max: 32, max_bytes, min_step: 16, memory });
        for n in [16, 32, 48, 64, 80, 96] {
            let end = ctx.seq_pos_max(0).expect("a position") + 1;
            generate(&mut ctx, 0, end..n);
            taken.take(&mut ctx, n.try_into().expect("few")).expect("a checkpoint");
        }
        assert_eq!((n_tokens(&taken), taken.bytes()), (vec![48, 80, 96], 3 * size), "{memory:?}");
    }
}

#[test]
fn a_checkpoint_that_exceeds_the_budget_alone_is_refused_and_drops_nothing() {
    let mut ctx = tight();
    let max_bytes = Some(200);
    let mut taken = checkpoints(CheckpointsParams { max_bytes, ..CheckpointsParams::default() });
    generate(&mut ctx, 0, 0..3);
    taken.take(&mut ctx, 3).expect("a checkpoint");
    generate(&mut ctx, 0, 3..16);
    let size = ctx.state_seq_get_size(0, PARTIAL).expect("a size");
    let error = taken.take(&mut ctx, 16).unwrap_err();
    assert_eq!(error.to_string(), format!("a checkpoint of {size} bytes does not fit max_bytes: 200"));
    assert_eq!((error.status(), n_tokens(&taken)), (Status::OutOfMemory, vec![3]));
}

#[test]
fn no_checkpoints_at_all_are_refused() {
    let params = CheckpointsParams { n_max: 0, ..CheckpointsParams::default() };
    let error = Checkpoints::new(0, params).unwrap_err();
    assert_eq!(error.to_string(), "n_max: 0, at least 1 is possible");
}

#[test]
fn a_sequence_without_a_usable_end_has_no_checkpoint() {
    let mut ctx = roomy_with_64();
    let refused = |ctx: &mut Context, seq_id: SeqId| {
        let mut taken = Checkpoints::new(seq_id, CheckpointsParams::default()).expect("parameters");
        let error = taken.take(ctx, 1).unwrap_err().to_string();
        assert_eq!(taken.as_slice().len(), 0);
        error
    };
    assert_eq!(refused(&mut ctx, 3), "seq_id 3 is out of range [0, 3)");
    assert_eq!(refused(&mut ctx, 1), "seq_id: 1, an empty sequence");
    let checkpoint = save(&mut ctx, 0, PARTIAL);
    restore(&mut ctx, &checkpoint, 1, PARTIAL);
    assert_eq!(
        refused(&mut ctx, 1),
        "seq_id: 1, which cannot go on at its end: section base has no positions, and a token at 64 needs \
         positions 0 to 63"
    );
}

// The transformer

/// A cache of which the window's cells before the last ubatches are gone.
fn setups() -> impl Iterator<Item = Setup> {
    let swas =
        [SwaType::Standard, SwaType::Symmetric].map(|swa_type| Swa::new(swa_type, N_SWA).expect("a window"));
    swas.into_iter().flat_map(|swa| Setup { swa_kv_size: 24, ..Setup::new(swa) }.layouts())
}

#[test]
fn a_history_that_diverges_goes_on_from_a_checkpoint_with_the_logits_of_a_fresh_run() {
    let history = transformer::tokens(64, 1);
    let mut other = history.clone();
    other.splice(40.., transformer::tokens(20, 2));
    for (setup, memory) in setups().flat_map(|setup| MEMORIES.map(|memory| (setup, memory))) {
        let fresh = setup.start().decode(0, 0, &other);

        let mut engine = setup.start();
        let mut taken = checkpoints(CheckpointsParams { memory, ..CheckpointsParams::default() });
        for n in [16, 32, 48] {
            engine.decode(0, n - 16, &history[n as usize - 16..n as usize]);
            taken.take(&mut engine.cache, n as u64).expect("a checkpoint");
        }
        engine.decode(0, 48, &history[48..]);

        let resumed = taken.resume(&mut engine.cache, 40).expect("a way back");
        assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) }, "{setup:?}");
        assert_eq!(engine.decode(0, 32, &other[32..]), fresh[32..], "{setup:?}, {memory:?}");
    }
}

/// The checkpoint is behind the divergence, and has the chunk before it.
#[test]
fn a_history_goes_on_inside_the_chunk_of_a_checkpoint() {
    let swa = Swa::new(SwaType::Chunked, N_SWA).expect("a window");
    let history = transformer::tokens(80, 1);
    let mut other = history[..44].to_vec();
    other.extend(transformer::tokens(20, 2));
    for setup in (Setup { swa_kv_size: 24, ..Setup::new(swa) }).layouts() {
        let fresh = setup.start().decode(0, 0, &other);
        let mut engine = setup.start();
        let mut taken = at_most(2);
        engine.decode(0, 0, &history[..48]);
        taken.take(&mut engine.cache, 48).expect("a checkpoint");
        engine.decode(0, 48, &history[48..]);
        assert_eq!(engine.cache.rewind_pos(0, 44).expect("a position"), 40);
        let resumed = taken.resume(&mut engine.cache, 44).expect("a way back");
        assert_eq!(resumed, Resumed { pos: 44, restored: Some(48) });
        assert_eq!(engine.decode(0, 44, &other[44..]), fresh[44..], "{setup:?}");
    }
}
