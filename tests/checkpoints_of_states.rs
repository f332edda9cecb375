//! Where sequences with recurrent and compressed states can go on, and what checkpoints of them are good for.
#![allow(missing_docs, reason = "a test")]

mod memories;
mod recurrence;
mod support;

use kvstate::context::{CheckpointMemory, Checkpoints, CheckpointsParams, Resumed};
use kvstate::format::CheckpointSpan;
use kvstate::memory::SectionParams;
use kvstate::types::{Pos, StateFlags};
use kvstate::{Context, ContextParams};
use recurrence::{after, state_of};
use support::{kv, place, positions};

const MEMORIES: [CheckpointMemory; 2] = [CheckpointMemory::Cache, CheckpointMemory::Host];

fn hybrid(n_rs_seq: u32) -> Context {
    let sections = SectionParams::hybrid(kv(128), recurrence::params(n_rs_seq));
    place::context(ContextParams::new(2, sections)).expect("a context")
}

/// One ubatch of sequence 0; the recurrent section is the last.
fn decode(ctx: &mut Context, n_rs_seq: u32, positions: std::ops::Range<Pos>) {
    let tokens: Vec<_> = positions.map(|pos| (&[0][..], pos)).collect();
    let section = ctx.n_section() - 1;
    recurrence::decode(ctx, &[(section, n_rs_seq)], &tokens).expect("a slot");
}

fn obstacle(ctx: &Context, pos: Pos) -> String {
    ctx.rewind_obstacle(0, pos).expect("a sequence").map_or(String::new(), |obstacle| obstacle.to_string())
}

/// 64 tokens, with checkpoints behind 16, 32 and 48.
fn with_checkpoints(memory: CheckpointMemory) -> (Context, Checkpoints) {
    let mut ctx = hybrid(0);
    let params = CheckpointsParams { memory, ..CheckpointsParams::default() };
    let mut taken = Checkpoints::new(0, params).expect("parameters");
    for n in [16, 32, 48] {
        decode(&mut ctx, 0, n - 16..n);
        taken.take(&mut ctx, u64::try_from(n).expect("a count")).expect("a checkpoint");
    }
    decode(&mut ctx, 0, 48..64);
    (ctx, taken)
}

#[test]
fn without_rollback_planes_a_hybrid_goes_on_at_its_end_or_its_start() {
    let mut ctx = hybrid(0);
    decode(&mut ctx, 0, 0..10);
    let usable: Vec<Pos> = (0..12).filter(|&pos| ctx.can_rewind(0, pos).expect("a sequence")).collect();
    assert_eq!(usable, [0, 10]);
    assert_eq!(ctx.rewind_pos(0, 9).expect("a sequence"), 0);
    assert_eq!(
        obstacle(&ctx, 9),
        "section recurrent has states to go on at positions 10 to 10, and none for 9"
    );
    assert_eq!(obstacle(&ctx, 11), "position 11 is past the end: the largest position is 9");
}

/// The last ubatch has left the states of its tokens in the planes, and a rollback is possible once.
#[test]
fn with_rollback_planes_a_hybrid_goes_on_at_the_positions_of_its_last_ubatch() {
    let mut ctx = hybrid(3);
    decode(&mut ctx, 3, 0..10);
    let usable = |ctx: &Context| -> Vec<Pos> {
        (0..12).filter(|&pos| ctx.can_rewind(0, pos).expect("a sequence")).collect()
    };
    assert_eq!(usable(&ctx), [0, 7, 8, 9, 10]);
    assert_eq!(ctx.rewind_pos(0, 8).expect("a sequence"), 8);
    assert!(ctx.seq_rm(0, 8, -1).expect("a sequence"));
    assert_eq!(usable(&ctx), [0, 8]);
    assert_eq!(state_of(&ctx, 1, 0), Some(after(0..8)));
}

#[test]
fn a_sequence_that_was_cut_to_where_no_state_is_has_no_checkpoint() {
    let mut ctx = hybrid(3);
    let mut taken = Checkpoints::new(0, CheckpointsParams::default()).expect("parameters");
    decode(&mut ctx, 3, 0..8);
    taken.take(&mut ctx, 8).expect("a checkpoint");
    decode(&mut ctx, 3, 8..10);
    assert!(ctx.seq_rm(0, 7, -1).expect("a sequence"), "as llama.cpp answers");
    let error = taken.take(&mut ctx, 7).unwrap_err();
    assert_eq!(
        error.to_string(),
        "seq_id: 0, which cannot go on at its end: section recurrent has states to go on at no positions, and none for 7"
    );
    assert_eq!(taken.resume(&mut ctx, 7).expect("a sequence"), Resumed { pos: 0, restored: None });
}

#[test]
fn a_history_that_diverges_goes_on_at_the_checkpoint_before() {
    for memory in MEMORIES {
        let (mut ctx, mut taken) = with_checkpoints(memory);
        let spans: Vec<_> =
            taken.as_slice().iter().map(|c| (c.pos_min(), c.pos_max(), c.n_tokens())).collect();
        assert_eq!(spans, [(15, 15, 16), (31, 31, 32), (47, 47, 48)]);
        let words: Vec<_> =
            taken.verdicts(&ctx, 40).expect("a sequence").iter().map(ToString::to_string).collect();
        assert_eq!(
            words,
            [
                "serves at position 16",
                "serves at position 32",
                "past the divergence: its largest position is 47, the history diverges at 40"
            ]
        );
        let resumed = taken.resume(&mut ctx, 40).expect("a checkpoint");
        assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) });
        assert_eq!(state_of(&ctx, 1, 0), Some(after(0..32)));
        assert_eq!(positions(&ctx, 0, 0), (0..32).collect::<Vec<_>>());
        assert_eq!(taken.as_slice().len(), 2);
        // The other tokens make another state.
        decode(&mut ctx, 0, 32..40);
        assert_eq!(state_of(&ctx, 1, 0), Some(after(0..40)));
    }
}

/// Attention of the cache does not reach a checkpoint's end any more.
#[test]
fn a_checkpoint_whose_attention_is_gone_does_not_serve() {
    for memory in MEMORIES {
        let (mut ctx, mut taken) = with_checkpoints(memory);
        ctx.clear(false).expect("host metadata");
        decode(&mut ctx, 0, 0..20);
        let words: Vec<_> =
            taken.verdicts(&ctx, 40).expect("a sequence").iter().map(ToString::to_string).collect();
        assert_eq!(words[0], "serves at position 16");
        assert_eq!(words[1], "section kv has positions 0 to 19, and a token at 32 needs positions 0 to 31");
        let resumed = taken.resume(&mut ctx, 18).expect("a checkpoint");
        assert_eq!(resumed, Resumed { pos: 16, restored: Some(16) });
        assert_eq!(state_of(&ctx, 1, 0), Some(after(0..16)));
    }
}

#[test]
fn a_checkpoint_of_states_is_as_large_at_any_length() {
    let size = |n_tokens: Pos| {
        let mut ctx = hybrid(0);
        for start in (0..n_tokens).step_by(32) {
            decode(&mut ctx, 0, start..start + 32);
        }
        let mut taken = Checkpoints::new(0, CheckpointsParams::default()).expect("parameters");
        taken.take(&mut ctx, 0).expect("a checkpoint").size()
    };
    assert_eq!([size(32), size(64), size(128)], [size(32); 3]);
}

#[test]
fn checkpoints_of_another_kind_of_memory_are_unfit() {
    let (_, taken) = with_checkpoints(CheckpointMemory::Cache);
    let other = support::context(2, &[kv(128), kv(128)]);
    let words: Vec<_> =
        taken.verdicts(&other, 40).expect("a sequence").iter().map(ToString::to_string).collect();
    assert_eq!(
        words,
        ["mismatched kind of section: the state has states, the cache full attention (section kv 1)"; 3]
    );
}

/// Every kind of memory comes back to a checkpoint, as it was then.
#[test]
fn a_checkpoint_of_every_kind_of_memory_brings_its_state_back() {
    for kind in &memories::KINDS {
        for memory in MEMORIES {
            let mut ctx = memories::context(kind, 1);
            let end = ctx.seq_pos_max(memories::DEST).expect("a sequence") + 1;
            let params = CheckpointsParams { memory, ..CheckpointsParams::default() };
            let mut taken = Checkpoints::new(memories::DEST, params).expect("parameters");
            taken.take(&mut ctx, 9).unwrap_or_else(|error| panic!("{}: {error}", kind.name));
            let before = memories::image(&mut ctx);
            let resumed = taken.resume(&mut ctx, end).expect(kind.name);
            assert_eq!(resumed, Resumed { pos: end, restored: None }, "{}", kind.name);
            let verdicts = taken.verdicts(&ctx, end).expect(kind.name);
            assert_eq!(verdicts[0].to_string(), format!("serves at position {end}"), "{}", kind.name);
            assert!(memories::image(&mut ctx) == before, "{}", kind.name);
            // Nothing is left of it.
            ctx.seq_rm(memories::DEST, -1, -1).expect(kind.name);
            assert_eq!(ctx.rewind_pos(memories::DEST, end).expect(kind.name), 0, "{}", kind.name);
        }
    }
}

/// As those that were taken, of every kind of memory.
#[test]
fn a_checkpoint_of_every_kind_of_memory_is_put_by_its_bytes() {
    for kind in &memories::KINDS {
        for memory in MEMORIES {
            let mut ctx = memories::context(kind, 1);
            let params = CheckpointsParams { memory, ..CheckpointsParams::default() };
            let [mut taken, mut put] =
                [params, params].map(|params| Checkpoints::new(memories::DEST, params).expect("parameters"));
            let checkpoint = taken.take(&mut ctx, 9).expect(kind.name);
            let mut state = vec![0; usize::try_from(checkpoint.size()).expect("a size")];
            checkpoint.get_data(&mut state).expect(kind.name);
            let (pos_min, pos_max) = (checkpoint.pos_min(), checkpoint.pos_max());
            let span = CheckpointSpan::new(9, 0, pos_max).expect("a span");
            put.put(&ctx, span, &state).unwrap_or_else(|error| panic!("{}: {error}", kind.name));
            let [checkpoint] = put.as_slice() else { panic!("{}", kind.name) };
            let found = (checkpoint.n_tokens(), checkpoint.pos_min(), checkpoint.pos_max());
            assert_eq!(found, (9, pos_min, pos_max), "{}", kind.name);
            for pos in 0..pos_max + 3 {
                let [worth, expected] = [&put, &taken]
                    .map(|checkpoints| checkpoints.verdicts(&ctx, pos).expect(kind.name)[0].to_string());
                assert_eq!(worth, expected, "{}, {pos}", kind.name);
            }
        }
    }
}

#[test]
fn a_hybrid_of_another_process_goes_on_at_a_checkpoint_that_is_put() {
    for memory in MEMORIES {
        let (mut ctx, taken) = with_checkpoints(memory);
        let mut other = hybrid(0);
        support::restore(
            &mut other,
            &support::save(&mut ctx, 0, StateFlags::empty()),
            0,
            StateFlags::empty(),
        );
        let mut put = Checkpoints::new(0, CheckpointsParams::default()).expect("parameters");
        for checkpoint in taken.as_slice() {
            let mut state = vec![0; usize::try_from(checkpoint.size()).expect("a size")];
            checkpoint.get_data(&mut state).expect("a state");
            let n_tokens = checkpoint.n_tokens().cast_signed();
            let span = CheckpointSpan::new(n_tokens, checkpoint.pos_min(), checkpoint.pos_max());
            put.put(&other, span.expect("a span"), &state).expect("a checkpoint");
        }
        let resumed = put.resume(&mut other, 40).expect("a checkpoint");
        assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) });
        assert_eq!(state_of(&other, 1, 0), Some(after(0..32)));
    }
}
