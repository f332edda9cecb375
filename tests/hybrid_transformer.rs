//! A hybrid of attention and recurrent layers answers the same, bit for bit, whether its memory was saved and restored
//! or not.
#![allow(missing_docs, reason = "a test")]

mod support;
mod transformer;

use kvstate::context::{CheckpointMemory, Checkpoints, CheckpointsParams, Resumed};
use kvstate::types::{Pos, SeqId, Token};
use support::{NONE, ON_DEVICE, PARTIAL, place, restore, save};
use transformer::{Engine, Logits, Setup, tokens};

/// Tokens of the history, and where it diverges.
const N: Pos = 64;
const DIVERGES: usize = 40;

fn history() -> Vec<Token> {
    tokens(64, 1)
}

/// Tokens in one stream and in streams, with every layout of the attention cache.
fn setups(n_rs_seq: u32) -> impl Iterator<Item = Setup> {
    [true, false].into_iter().flat_map(move |unified| Setup { unified, ..Setup::hybrid(n_rs_seq) }.layouts())
}

/// Decodes tokens that no cache has been saved for; the logits of those from `from` on.
fn never_saved(setup: Setup, tokens: &[Token], from: usize) -> Vec<Logits> {
    setup.start().decode(0, 0, tokens).split_off(from)
}

fn after(setup: Setup, tokens: &[Token]) -> Engine {
    let mut engine = setup.start();
    engine.decode(0, 0, tokens);
    engine
}

/// Decodes `n` tokens behind `token`, each the likeliest.
fn generate(
    engine: &mut Engine,
    seq_id: SeqId,
    p0: Pos,
    mut token: Token,
    n: Pos,
) -> (Vec<Token>, Vec<Logits>) {
    let mut generated = (Vec::new(), Vec::new());
    for pos in p0..p0 + n {
        let logits = engine.decode(seq_id, pos, &[token]).remove(0);
        token = logits.best();
        generated.0.push(token);
        generated.1.push(logits);
    }
    generated
}

// The model

#[test]
fn logits_do_not_depend_on_the_size_of_batches() {
    for n_rs_seq in [0, 3] {
        let setup = Setup::hybrid(n_rs_seq);
        let mut engine = setup.start();
        let one_by_one: Vec<Logits> =
            (0..).zip(history()).flat_map(|(pos, token)| engine.decode(0, pos, &[token])).collect();
        assert!(one_by_one.iter().all(Logits::are_finite));
        assert_eq!(one_by_one, never_saved(setup, &history(), 0), "n_rs_seq {n_rs_seq}");
    }
}

/// The attention of one history with the recurrent states of another.
#[test]
fn logits_depend_on_the_recurrent_states() {
    let mut engine = after(Setup::hybrid(0), &history());
    let other = save(&mut after(Setup::hybrid(0), &tokens(64, 2)).cache, 0, PARTIAL);
    restore(&mut engine.cache, &other, 0, PARTIAL);
    let next = tokens(1, 3);
    let want = never_saved(Setup::hybrid(0), &[history(), next.clone()].concat(), 64);
    assert!(engine.decode(0, N, &next)[0].distance(&want[0]) > 0.1);
}

// Checkpoints

/// Checkpoints behind 16, 32 and 48 of 64 tokens; the next prompt shares 40.
#[test]
fn a_history_that_diverges_goes_on_exactly_from_the_best_checkpoint() {
    let other = [&history()[..DIVERGES], &tokens(24, 4)].concat();
    for setup in setups(0) {
        for memory in [CheckpointMemory::Cache, CheckpointMemory::Host] {
            let mut engine = setup.start();
            let params = CheckpointsParams { memory, ..CheckpointsParams::default() };
            let mut checkpoints = Checkpoints::new(0, params).unwrap();
            for (p0, tokens) in (0..).step_by(16).zip(history().chunks(16)) {
                engine.decode(0, p0, tokens);
                if p0 < 48 {
                    checkpoints.take(&mut engine.cache, u64::from(p0.unsigned_abs()) + 16).unwrap();
                }
            }
            assert_eq!(engine.cache.rewind_pos(0, 40).unwrap(), 0, "{setup:?}");

            let resumed = checkpoints.resume(&mut engine.cache, 40).unwrap();
            assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) }, "{setup:?}");
            let logits = engine.decode(0, 32, &other[32..]);
            assert_eq!(logits, never_saved(setup, &other, 32), "{memory:?} {setup:?}");
        }
    }
}

#[test]
fn ten_rounds_from_one_position_give_the_same_tokens() {
    let (prompt, last) = (&history()[..20], history()[20]);
    for setup in setups(0) {
        for flags in [PARTIAL, PARTIAL | ON_DEVICE] {
            let want = generate(&mut after(setup, prompt), 0, 20, last, 6);
            let mut engine = after(setup, prompt);
            for round in 0..10 {
                let checkpoint = save(&mut engine.cache, 0, flags);
                let pos = engine.cache.seq_pos_max(0).unwrap();
                assert_eq!(
                    generate(&mut engine, 0, pos + 1, last, 6),
                    want,
                    "round {round} {flags:?} {setup:?}"
                );
                restore(&mut engine.cache, &checkpoint, 0, flags);
                assert!(engine.cache.seq_rm(0, pos + 1, -1).unwrap(), "round {round} {flags:?} {setup:?}");
                assert_eq!(engine.cache.seq_pos_max(0).unwrap(), 19, "round {round} {flags:?} {setup:?}");
            }
        }
    }
}

// Whole states

#[test]
fn a_whole_state_goes_on_exactly_in_another_context() {
    let tokens = [history(), tokens(20, 5)].concat();
    for setup in setups(0) {
        let state = save(&mut after(setup, &history()).cache, 0, NONE);
        for unified in [true, false] {
            let mut other = Setup { unified, ..setup }.start();
            // Cells and a row of its own are taken already.
            other.decode(0, 0, &history()[..7]);
            restore(&mut other.cache, &state, 2, NONE);
            assert_eq!(other.decode(2, N, &tokens[64..]), never_saved(setup, &tokens, 64), "{setup:?}");
        }
    }
}

// Rollback planes

/// Planes for 3 tokens; the last ubatch has 16.
#[test]
fn the_last_tokens_are_cut_off_and_decoding_goes_on_exactly() {
    let other = [&history()[..62], &tokens(20, 6)].concat();
    for setup in setups(3) {
        let mut engine = after(setup, &history());
        assert!(!engine.cache.seq_rm(0, 60, -1).unwrap(), "4 tokens");
        assert!(engine.cache.seq_rm(0, 62, -1).unwrap(), "2 tokens");
        assert_eq!(engine.decode(0, 62, &other[62..]), never_saved(setup, &other, 62), "{setup:?}");
    }
}

#[test]
fn a_state_with_a_pending_rollback_goes_on_exactly_in_another_context() {
    let other = [&history()[..62], &tokens(20, 6)].concat();
    for setup in setups(3) {
        let mut engine = after(setup, &history());
        assert!(engine.cache.seq_rm(0, 62, -1).unwrap());
        let state = save(&mut engine.cache, 0, NONE);
        let mut there = setup.start();
        restore(&mut there.cache, &state, 1, NONE);
        assert_eq!(there.decode(1, 62, &other[62..]), never_saved(setup, &other, 62), "{setup:?}");
    }
}

// Sequences side by side

/// Sequences 0 and 2 need neighbouring rows, so that of 1 between them moves, with its rollback planes.
#[test]
fn a_sequence_whose_row_has_to_move_goes_on_exactly() {
    let [a, b, c] = [1, 2, 3].map(|seed| tokens(24, seed));
    for setup in setups(2) {
        let mut engine = setup.start();
        for (seq_id, tokens) in (0..).zip([&a, &b, &c]) {
            engine.decode(seq_id, 0, &tokens[..16]);
        }
        assert!(engine.cache.seq_rm(1, 15, -1).unwrap());
        let row = engine.cache.recurrent_state(1, 1).unwrap().unwrap().row;
        let together = engine.decode_ubatch(&[(0, 16, a[16]), (2, 16, c[16])]);
        assert_ne!(engine.cache.recurrent_state(1, 1).unwrap().unwrap().row, row, "{setup:?}");
        assert_eq!(
            together,
            [&a, &c].map(|tokens| never_saved(setup, &tokens[..17], 16).remove(0)),
            "{setup:?}"
        );
        assert_eq!(engine.decode(1, 15, &b[15..]), never_saved(setup, &b, 15), "{setup:?}");
        assert_eq!(engine.decode(2, 17, &c[17..]), never_saved(setup, &c, 17), "{setup:?}");
    }
}
