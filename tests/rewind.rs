//! Where a sequence can go on: what sections answer from what they hold.
#![allow(clippy::cast_sign_loss, reason = "positions of small histories")]

mod support;
mod transformer;

use kvstate::Context;
use kvstate::error::Error;
use kvstate::memory::RewindObstacle;
use kvstate::types::{Pos, Swa, SwaType};
use proptest::prelude::*;
use support::{PARTIAL, decode, generate, iswa, kv, place, positions, restore, save, windowed};
use transformer::Setup;

const N_SWA: u32 = 8;
const WINDOWS: [SwaType; 3] = [SwaType::Standard, SwaType::Chunked, SwaType::Symmetric];

/// Full attention of 128 cells, and a window of 8 positions in 12 cells: old ones are taken over.
fn tight() -> Context {
    support::context(2, &iswa(128, 12, N_SWA))
}

/// After 64 tokens: the window's section has positions 52 to 63.
fn tight_with_64() -> Context {
    let mut ctx = tight();
    generate(&mut ctx, 0, 0..64);
    assert_eq!(positions(&ctx, 1, 0), (52..64).collect::<Vec<_>>());
    ctx
}

fn obstacle(ctx: &Context, pos: Pos) -> Option<RewindObstacle> {
    ctx.rewind_obstacle(0, pos).expect("an answer")
}

fn gone(section: &str, pos: Pos, need: (Pos, Pos), has: Option<(Pos, Pos)>) -> RewindObstacle {
    RewindObstacle::CellsGone { section: section.to_owned(), pos, need, has }
}

#[test]
fn full_attention_can_be_rewound_to_any_position_up_to_its_end() {
    let mut ctx = support::context(2, &[kv(16)]);
    decode(&mut ctx, 0, 0..10);
    for pos in 0..=10 {
        assert!(ctx.can_rewind(0, pos).expect("an answer"), "{pos}");
        assert_eq!(ctx.rewind_pos(0, pos).expect("a position"), pos);
    }
    assert!(!ctx.can_rewind(0, 11).expect("an answer"));
    assert_eq!(obstacle(&ctx, 12), Some(RewindObstacle::PastEnd { pos: 12, pos_max: 9 }));
    assert_eq!(ctx.rewind_pos(0, Pos::MAX).expect("a position"), 10);
}

#[test]
fn an_empty_sequence_can_be_rewound_to_its_start_alone() {
    let ctx = tight();
    assert_eq!(obstacle(&ctx, 0), None);
    assert_eq!(obstacle(&ctx, 1), Some(RewindObstacle::PastEnd { pos: 1, pos_max: -1 }));
    assert_eq!(ctx.rewind_pos(0, 5).expect("a position"), 0);
}

#[test]
fn a_window_cannot_be_rewound_to_where_cells_that_are_gone_would_be_seen() {
    let ctx = tight_with_64();
    // A token at 59 sees 52 to 58, all that is left; one at 58 would see 51.
    assert_eq!((59..=64).find_map(|pos| obstacle(&ctx, pos)), None);
    assert_eq!(obstacle(&ctx, 58), Some(gone("swa", 58, (51, 57), Some((52, 63)))));
    assert_eq!(obstacle(&ctx, 40), Some(gone("swa", 40, (33, 39), Some((52, 63)))));
    assert_eq!(obstacle(&ctx, 3), Some(gone("swa", 3, (0, 2), Some((52, 63)))));
    assert_eq!(obstacle(&ctx, 0), None);
    let rewind_pos = |pos| ctx.rewind_pos(0, pos).expect("a position");
    assert_eq!([70, 64, 60, 59, 58, 1].map(rewind_pos), [64, 64, 60, 59, 0, 0]);
}

#[test]
fn the_first_token_of_a_chunk_needs_nothing_of_the_chunks_before() {
    let mut ctx = support::context(2, &[kv(128), windowed(12, SwaType::Chunked, N_SWA)]);
    generate(&mut ctx, 0, 0..64);
    assert_eq!(positions(&ctx, 1, 0), (52..64).collect::<Vec<_>>());
    assert_eq!(obstacle(&ctx, 55), Some(gone("swa", 55, (48, 54), Some((52, 63)))));
    let rewind_pos = |pos| ctx.rewind_pos(0, pos).expect("a position");
    assert_eq!([64, 56, 55, 48, 47].map(rewind_pos), [64, 56, 48, 48, 40]);
    assert!(ctx.seq_rm(0, 40, -1).expect("a removal"));
    assert_eq!((positions(&ctx, 1, 0), obstacle(&ctx, 40)), (vec![], None));
}

#[test]
fn a_window_with_a_gap_has_what_is_behind_the_gap() {
    // A checkpoint of 0 and 1 restored over a longer sequence that was not cut, so that full attention has 0 to 21.
    let mut ctx = support::context(2, &[kv(64), windowed(64, SwaType::Chunked, N_SWA)]);
    generate(&mut ctx, 0, 0..2);
    let checkpoint = save(&mut ctx, 0, PARTIAL);
    generate(&mut ctx, 0, 2..22);
    restore(&mut ctx, &checkpoint, 0, PARTIAL);
    assert_eq!(obstacle(&ctx, 16), Some(gone("swa", 16, (15, 15), Some((0, 1)))));
    assert_eq!(ctx.rewind_pos(0, 20).expect("a position"), 2);

    // An engine that goes on at the chunk all the same.
    assert!(ctx.seq_rm(0, 16, -1).expect("a removal"));
    generate(&mut ctx, 0, 16..20);
    assert_eq!(positions(&ctx, 1, 0), [0, 1, 16, 17, 18, 19]);
    assert_eq!(obstacle(&ctx, 20), None);
    for pos in 3..8 {
        assert_eq!(obstacle(&ctx, pos), Some(gone("swa", pos, (0, pos - 1), Some((16, 19)))));
    }
}

#[test]
fn masked_cells_that_are_still_there_can_be_gone_back_to() {
    for swa_type in WINDOWS {
        let mut ctx = support::context(2, &[kv(64), windowed(64, swa_type, N_SWA)]);
        generate(&mut ctx, 0, 0..40);
        assert_eq!((0..=40).find_map(|pos| obstacle(&ctx, pos)), None, "{swa_type:?}");
    }
}

#[test]
fn a_partial_state_in_an_empty_sequence_misses_full_attention() {
    // The window's section has room for both sequences.
    let mut ctx = support::context(2, &iswa(128, 80, N_SWA));
    generate(&mut ctx, 0, 0..64);
    let checkpoint = save(&mut ctx, 0, PARTIAL);
    restore(&mut ctx, &checkpoint, 1, PARTIAL);
    let missing = ctx.rewind_obstacle(1, 64).expect("an answer");
    assert_eq!(missing, Some(gone("base", 64, (0, 63), None)));
    assert_eq!(ctx.rewind_pos(1, 64).expect("a position"), 0);
}

#[test]
fn an_obstacle_is_told_in_words() {
    let ctx = tight_with_64();
    let words = |pos| obstacle(&ctx, pos).map(|obstacle| obstacle.to_string());
    assert_eq!(words(66).as_deref(), Some("position 66 is past the end: the largest position is 63"));
    assert_eq!(
        words(40).as_deref(),
        Some("section swa has positions 52 to 63, and a token at 40 needs positions 33 to 39")
    );
}

#[test]
fn questions_that_make_no_sense_are_refused() {
    let ctx = tight();
    let asked = [ctx.rewind_obstacle(2, 0).map(drop), ctx.rewind_pos(-1, 0).map(drop)];
    let error = |asked: Result<(), Error>| asked.unwrap_err().to_string();
    assert_eq!(asked.map(error), ["seq_id 2 is out of range [0, 2)", "seq_id -1 is out of range [0, 2)"]);
    let asked = [ctx.can_rewind(0, -1).map(drop), ctx.rewind_pos(0, -2).map(drop)];
    assert_eq!(asked.map(error), ["pos: -1, positions start at 0", "pos: -2, positions start at 0"]);
}

#[derive(Clone, Debug)]
enum Step {
    Generate(Pos),
    Batch(Pos),
    Cut(Pos),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![(1..20).prop_map(Step::Generate), (1..6).prop_map(Step::Batch), (0..60).prop_map(Step::Cut),]
}

/// The definition: every earlier position that a token at `pos` sees is in a cell.
fn naive_can_rewind(ctx: &Context, swas: &[Swa], end: Pos, pos: Pos) -> bool {
    pos <= end
        && swas.iter().enumerate().all(|(section, swa)| {
            let held = positions(ctx, section, 0);
            (0..pos).all(|p| swa.is_masked(p, pos) || held.contains(&p))
        })
}

proptest! {
    #[test]
    fn a_rewind_can_go_on_exactly_where_all_that_is_seen_is_there(
        swa_type in prop::sample::select(WINDOWS.as_slice()),
        n_swa in 1_u32..10,
        steps in prop::collection::vec(step(), 1..8),
    ) {
        let sections = [kv(256), windowed(16, swa_type, n_swa)];
        let swas = sections.clone().map(|kv| kv.swa);
        let mut ctx = support::context(1, &sections);
        let mut end = 0;
        for step in steps {
            match step {
                Step::Generate(n) => {
                    generate(&mut ctx, 0, end..end + n);
                    end += n;
                }
                Step::Batch(n) => {
                    decode(&mut ctx, 0, end..end + n);
                    end += n;
                }
                // Only as far as it can go on: what is decoded behind a hole would hide it.
                Step::Cut(pos) => {
                    end = ctx.rewind_pos(0, pos).expect("a position");
                    prop_assert!(ctx.seq_rm(0, end, -1).expect("a removal"));
                }
            }
        }
        let mut last = 0;
        for pos in 0..end + 3 {
            let can = naive_can_rewind(&ctx, &swas, end, pos);
            if can {
                last = pos;
            }
            prop_assert_eq!(ctx.can_rewind(0, pos).expect("an answer"), can, "{}", pos);
            prop_assert_eq!(ctx.rewind_pos(0, pos).expect("a position"), last, "{}", pos);
        }
    }
}

/// What the questions are about: where they say yes the logits are those of a fresh run, where they say no they are not.
#[test]
fn logits_are_those_of_a_fresh_run_exactly_where_a_rewind_can_go_on() {
    let history = transformer::tokens(64, 1);
    let next = transformer::tokens(1, 3);
    let swas = WINDOWS.map(|swa_type| Swa::new(swa_type, N_SWA).expect("a window"));
    let setups = swas.map(|swa| Setup { swa_kv_size: 24, ..Setup::new(swa) });
    for setup in setups {
        let mut answers = Vec::new();
        for pos in 36..=60 {
            let mut engine = setup.start();
            engine.decode(0, 0, &history);
            let can = engine.cache.can_rewind(0, pos).expect("an answer");
            assert!(engine.cache.seq_rm(0, pos, -1).expect("a removal"));
            let logits = engine.decode(0, pos, &next);

            let mut fresh = setup.start();
            fresh.decode(0, 0, &history[..pos as usize]);
            assert_eq!(logits == fresh.decode(0, pos, &next), can, "{setup:?}, {pos}");
            answers.push(can);
        }
        assert!(answers.contains(&true) && answers.contains(&false), "{setup:?}");
    }
}
