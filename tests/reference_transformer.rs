//! A transformer answers the same, bit for bit, whether its cache was saved and restored or not.
//!
//! The story of most tests: a prompt, longer than the window, is decoded and then a reply. The sequence is saved,
//! restored and cut to the prompt, and decoding goes on with other tokens. The logits must be those of an engine
//! that decoded the prompt and these tokens and never saved anything.

mod place;
mod transformer;

use kvstate::Context;
use kvstate::format::GgmlType;
use kvstate::storage::CellMap;
use kvstate::types::{Pos, Run, Seq, SeqId, StateFlags, Swa, SwaType, Token};
use transformer::{Engine, Logits, Setup, tokens};

const NONE: StateFlags = StateFlags::empty();
const PARTIAL_ONLY: StateFlags = StateFlags::PARTIAL_ONLY;
const ON_DEVICE: StateFlags = StateFlags::ON_DEVICE;

/// Positions of the windows. The prompt does not end with a chunk, and the reply goes beyond its chunk.
const N_SWA: u32 = 8;
const N_PROMPT: Pos = 20;
const N_REPLY: Pos = 14;

/// A reply after which a cache of this many window cells has none of the prompt's left.
const LONG_REPLY: usize = 60;
const FEW_CELLS: u32 = 32;

fn prompt() -> Vec<Token> {
    tokens(20, 1)
}

fn reply() -> Vec<Token> {
    tokens(14, 2)
}

/// What comes after the prompt in place of the reply.
fn next() -> Vec<Token> {
    tokens(20, 3)
}

fn window(swa_type: SwaType) -> Swa {
    Swa::new(swa_type, N_SWA).unwrap()
}

/// Prompt and next tokens in a fresh cache; the logits of the latter.
fn never_saved(setup: Setup) -> Vec<Logits> {
    let mut engine = setup.start();
    engine.decode(0, 0, &prompt());
    engine.decode(0, N_PROMPT, &next())
}

fn after_prompt_and_reply(setup: Setup) -> Engine {
    let mut engine = setup.start();
    engine.decode(0, 0, &prompt());
    engine.decode(0, N_PROMPT, &reply());
    engine
}

fn save(cache: &mut Context, seq_id: SeqId, flags: StateFlags) -> Vec<u8> {
    let size = usize::try_from(cache.state_seq_get_size(seq_id, flags).unwrap()).unwrap();
    let mut state = vec![0; size];
    assert_eq!(cache.state_seq_get_data(&mut state, seq_id, flags).unwrap(), size);
    state
}

fn restore(cache: &mut Context, state: &[u8], dest: SeqId, flags: StateFlags) {
    assert_eq!(cache.state_seq_set_data(state, dest, flags).unwrap(), state.len());
}

fn cut(cache: &mut Context, seq_id: SeqId, p0: Pos) {
    assert!(cache.seq_rm(seq_id, p0, -1).unwrap());
}

/// The runs of cells in which a sequence lies.
fn runs(cache: &Context, section: usize, stream: usize, seq_id: SeqId) -> Vec<Run> {
    let seq = Seq::new(seq_id, cache.n_seq_max()).unwrap();
    let holds = |&cell: &u32| {
        cache.cell(section, stream, cell).unwrap().is_some_and(|(meta, _)| meta.seqs.contains(seq))
    };
    let n_kv = cache.n_kv(section, stream, 1).unwrap();
    let map = CellMap::of_cells(&(0..n_kv).filter(holds).collect::<Vec<_>>()).unwrap();
    map.moves().iter().map(|m| Run { start: m.dst, len: m.len }).collect()
}

fn empty(engine: &mut Engine) {
    engine.cache.clear(true).unwrap();
}

/// Nothing is left but sequence 2, with holes of three cells between its own.
fn leave_holes(engine: &mut Engine) {
    engine.cache.clear(true).unwrap();
    for i in 0..14 {
        engine.decode(1, 3 * i, &tokens(3, 5));
        engine.decode(2, 5 * i, &tokens(5, 6));
    }
    cut(&mut engine.cache, 1, 0);
}

fn restored_and_cut(setup: Setup, flags: StateFlags, make_room: fn(&mut Engine)) -> Vec<Logits> {
    let mut engine = after_prompt_and_reply(setup);
    let state = save(&mut engine.cache, 0, flags);
    make_room(&mut engine);
    restore(&mut engine.cache, &state, 0, flags);
    cut(&mut engine.cache, 0, N_PROMPT);
    engine.decode(0, N_PROMPT, &next())
}

fn assert_restores_exactly(swa: Swa, make_room: fn(&mut Engine)) {
    for setup in Setup::new(swa).layouts() {
        assert_eq!(restored_and_cut(setup, NONE, make_room), never_saved(setup), "{setup:?}");
    }
}

/// The end of the reply masks all of the prompt, so the first token after the prompt misses its window.
fn assert_filter_shows(swa: Swa) {
    for setup in Setup::new(swa).layouts() {
        let filtered = Setup { max_masked_cells: Some(0), ..setup };
        let distance = restored_and_cut(filtered, NONE, empty)[0].distance(&never_saved(setup)[0]);
        assert!(distance > 0.1, "{distance}: {setup:?}");
    }
}

// The model

#[test]
fn logits_depend_on_the_oldest_visible_token() {
    let mut engine = Setup::new(Swa::NONE).start();
    let logits = engine.decode(0, 0, &prompt());
    let mut other = prompt();
    other[0] = (other[0] + 1) % 64;
    let other_logits = engine.decode(1, 0, &other);
    assert!(logits.iter().all(Logits::are_finite));
    assert!(logits[19].distance(&other_logits[19]) > 1e-3);
}

#[test]
fn logits_do_not_depend_on_the_size_of_batches() {
    let setup = Setup::new(window(SwaType::Standard));
    let together = setup.start().decode(0, 0, &prompt());
    let mut engine = setup.start();
    let one_by_one: Vec<Logits> =
        (0..).zip(prompt()).flat_map(|(pos, token)| engine.decode(0, pos, &[token])).collect();
    assert_eq!(one_by_one, together);
}

#[test]
fn the_window_has_more_cells_than_positions() {
    assert_eq!(Setup::new(window(SwaType::Standard)).swa_kv_size, 256);
    assert!(prompt().len() > N_SWA as usize);
}

// Save, restore, cut

#[test]
fn full_attention_goes_on_exactly() {
    assert_restores_exactly(Swa::NONE, empty);
}

#[test]
fn standard_window_goes_on_exactly() {
    assert_restores_exactly(window(SwaType::Standard), empty);
}

#[test]
fn chunked_window_goes_on_exactly() {
    assert_restores_exactly(window(SwaType::Chunked), empty);
}

#[test]
fn symmetric_window_goes_on_exactly() {
    assert_restores_exactly(window(SwaType::Symmetric), empty);
}

#[test]
fn full_attention_goes_on_exactly_in_scattered_cells() {
    assert_restores_exactly(Swa::NONE, leave_holes);
}

#[test]
fn standard_window_goes_on_exactly_in_scattered_cells() {
    assert_restores_exactly(window(SwaType::Standard), leave_holes);
}

#[test]
fn chunked_window_goes_on_exactly_in_scattered_cells() {
    assert_restores_exactly(window(SwaType::Chunked), leave_holes);
}

#[test]
fn symmetric_window_goes_on_exactly_in_scattered_cells() {
    assert_restores_exactly(window(SwaType::Symmetric), leave_holes);
}

#[test]
fn scattered_cells_are_scattered() {
    let mut engine = after_prompt_and_reply(Setup::new(window(SwaType::Standard)));
    let state = save(&mut engine.cache, 0, NONE);
    leave_holes(&mut engine);
    restore(&mut engine.cache, &state, 0, NONE);
    for section in 0..2 {
        let runs = runs(&engine.cache, section, 0, 0);
        assert_eq!(runs.iter().map(|run| run.len).sum::<u32>(), 34);
        assert_eq!(runs[..11], [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80].map(|start| Run { start, len: 3 }));
    }
}

#[test]
fn a_state_on_the_device_goes_on_exactly() {
    for swa in [Swa::NONE, window(SwaType::Standard), window(SwaType::Chunked)] {
        for setup in Setup::new(swa).layouts() {
            assert_eq!(restored_and_cut(setup, ON_DEVICE, leave_holes), never_saved(setup), "{setup:?}");
        }
    }
}

#[test]
fn any_shorter_prefix_goes_on_exactly() {
    let setup = Setup::new(window(SwaType::Standard));
    let mut engine = after_prompt_and_reply(setup);
    let state = save(&mut engine.cache, 0, NONE);
    let tokens = [prompt(), reply()].concat();
    for (n, p0) in (0..=N_PROMPT + N_REPLY).enumerate() {
        restore(&mut engine.cache, &state, 0, NONE);
        cut(&mut engine.cache, 0, p0);
        let logits = engine.decode(0, p0, &next());

        let mut fresh = setup.start();
        fresh.decode(0, 0, &tokens[..n]);
        assert_eq!(logits, fresh.decode(0, p0, &next()), "cut to {p0}");
    }
}

// The mask filter, which llama.cpp applies to every state

#[test]
fn the_mask_filter_changes_the_logits_of_a_standard_window() {
    assert_filter_shows(window(SwaType::Standard));
}

#[test]
fn the_mask_filter_changes_the_logits_of_a_chunked_window() {
    assert_filter_shows(window(SwaType::Chunked));
}

#[test]
fn the_mask_filter_changes_the_logits_of_a_symmetric_window() {
    assert_filter_shows(window(SwaType::Symmetric));
}

#[test]
fn the_mask_filter_does_not_touch_full_attention() {
    let setup = Setup { max_masked_cells: Some(0), ..Setup::new(Swa::NONE) };
    assert_eq!(restored_and_cut(setup, NONE, empty), never_saved(setup));
}

/// The token after the prompt sees 7 positions before it, which end 14 before the reply's end.
#[test]
fn the_prompt_is_whole_with_one_masked_cell_less_than_the_reply() {
    let setup = Setup::new(window(SwaType::Standard));
    let bounded = |n| Setup { max_masked_cells: Some(n), ..setup };
    assert_eq!(restored_and_cut(bounded(13), NONE, empty), never_saved(setup));
    assert_ne!(restored_and_cut(bounded(12), NONE, empty)[0], never_saved(setup)[0]);
}

// Checkpoints

/// Window cells of the prompt are gone after the long reply, so that only a checkpoint leads back.
fn few_cells(swa: Swa) -> impl Iterator<Item = Setup> {
    Setup { swa_kv_size: FEW_CELLS, ..Setup::new(swa) }.layouts()
}

/// A checkpoint behind the prompt, a long reply, back to the checkpoint.
fn back_to_the_checkpoint(setup: Setup, flags: StateFlags) -> Engine {
    let mut engine = setup.start();
    engine.decode(0, 0, &prompt());
    let checkpoint = save(&mut engine.cache, 0, flags);
    engine.decode(0, N_PROMPT, &tokens(LONG_REPLY, 4));
    cut(&mut engine.cache, 0, N_PROMPT);
    restore(&mut engine.cache, &checkpoint, 0, flags);
    engine
}

fn assert_checkpoint_is_exact(swa: Swa, flags: StateFlags) {
    for setup in few_cells(swa) {
        let logits = back_to_the_checkpoint(setup, flags).decode(0, N_PROMPT, &next());
        assert_eq!(logits, never_saved(setup), "{setup:?}");
    }
}

#[test]
fn a_checkpoint_of_full_attention_goes_on_exactly() {
    assert_checkpoint_is_exact(Swa::NONE, PARTIAL_ONLY);
}

#[test]
fn a_checkpoint_of_a_standard_window_goes_on_exactly() {
    assert_checkpoint_is_exact(window(SwaType::Standard), PARTIAL_ONLY);
}

#[test]
fn a_checkpoint_of_a_chunked_window_goes_on_exactly() {
    assert_checkpoint_is_exact(window(SwaType::Chunked), PARTIAL_ONLY);
}

#[test]
fn a_checkpoint_of_a_symmetric_window_goes_on_exactly() {
    assert_checkpoint_is_exact(window(SwaType::Symmetric), PARTIAL_ONLY);
}

#[test]
fn a_checkpoint_on_the_device_goes_on_exactly() {
    for swa in [Swa::NONE, window(SwaType::Standard), window(SwaType::Chunked)] {
        assert_checkpoint_is_exact(swa, ON_DEVICE | PARTIAL_ONLY);
    }
}

#[test]
fn without_the_checkpoint_the_long_reply_cannot_be_taken_back() {
    let setup = few_cells(window(SwaType::Standard)).next().unwrap();
    let mut engine = setup.start();
    engine.decode(0, 0, &prompt());
    engine.decode(0, N_PROMPT, &tokens(LONG_REPLY, 4));
    assert!(engine.cache.seq_pos_min(0).unwrap() > N_PROMPT);
    cut(&mut engine.cache, 0, N_PROMPT);
    assert!(engine.decode(0, N_PROMPT, &next())[0].distance(&never_saved(setup)[0]) > 0.1);
}

#[test]
fn a_checkpoint_of_full_attention_is_8_bytes() {
    let mut engine = after_prompt_and_reply(Setup::new(Swa::NONE));
    assert_eq!(save(&mut engine.cache, 0, PARTIAL_ONLY).len(), 8);
}

#[test]
fn a_checkpoint_holds_the_cells_in_the_window_alone() {
    let mut engine = back_to_the_checkpoint(Setup::new(window(SwaType::Standard)), PARTIAL_ONLY);
    let n_cells =
        |cache: &Context, section| runs(cache, section, 0, 0).iter().map(|run| run.len).sum::<u32>();
    assert_eq!([n_cells(&engine.cache, 0), n_cells(&engine.cache, 1)], [20, 8]);
    // Header, n_stream and cell_count; pos, n_seq_id and seq_id of a cell; v_trans, n_layer, n_rot_k and n_rot_v;
    // K and V of two layers: type, row size and 8 rows of 16 f32.
    let size = 8 + 8 + 8 * 12 + 16 + 4 * (4 + 8 + 8 * 64);
    assert_eq!(save(&mut engine.cache, 0, PARTIAL_ONLY).len(), size);
}

#[test]
fn ten_checkpoints_in_a_row_give_the_same_logits() {
    for swa in [Swa::NONE, window(SwaType::Standard), window(SwaType::Chunked)] {
        let setup = few_cells(swa).next().unwrap();
        let want = never_saved(setup);
        let mut engine = setup.start();
        engine.decode(0, 0, &prompt());
        for round in 0..10 {
            let checkpoint = save(&mut engine.cache, 0, PARTIAL_ONLY);
            for tokens in [tokens(LONG_REPLY, 10 + round), next()] {
                let logits = engine.decode(0, N_PROMPT, &tokens);
                assert!(tokens != next() || logits == want, "{swa:?}, round {round}");
                cut(&mut engine.cache, 0, N_PROMPT);
                restore(&mut engine.cache, &checkpoint, 0, PARTIAL_ONLY);
            }
        }
    }
}

// Files, other contexts, other sequences, other streams

#[test]
fn a_slot_file_goes_on_exactly_in_another_context() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    for swa in [Swa::NONE, window(SwaType::Standard), window(SwaType::Chunked)] {
        for setup in Setup::new(swa).layouts() {
            let tokens = [prompt(), reply()].concat();
            after_prompt_and_reply(setup).cache.state_seq_save_file(&path, 0, &tokens).unwrap();

            let mut other = setup.start();
            leave_holes(&mut other);
            let loaded = other.cache.state_seq_load_file(&path, 0, tokens.len()).unwrap();
            assert_eq!(loaded.tokens, tokens);
            cut(&mut other.cache, 0, N_PROMPT);
            assert_eq!(other.decode(0, N_PROMPT, &next()), never_saved(setup), "{setup:?}");
        }
    }
}

#[test]
fn a_whole_context_goes_on_exactly_in_another_context() {
    for setup in Setup::new(window(SwaType::Standard)).layouts() {
        let mut engine = after_prompt_and_reply(setup);
        engine.decode(1, 0, &next());
        let mut state = vec![0; usize::try_from(engine.cache.state_get_size().unwrap()).unwrap()];
        engine.cache.state_get_data(&mut state).unwrap();

        let mut other = setup.start();
        leave_holes(&mut other);
        assert_eq!(other.cache.state_set_data(&state).unwrap(), state.len());
        cut(&mut other.cache, 0, N_PROMPT);
        assert_eq!(other.decode(0, N_PROMPT, &next()), never_saved(setup), "{setup:?}");
        assert_eq!(other.decode(1, 20, &reply()), engine.decode(1, 20, &reply()), "{setup:?}");
    }
}

#[test]
fn another_sequence_goes_on_exactly() {
    for setup in Setup::new(window(SwaType::Standard)).layouts() {
        let mut engine = after_prompt_and_reply(setup);
        let state = save(&mut engine.cache, 0, NONE);
        restore(&mut engine.cache, &state, 2, NONE);
        cut(&mut engine.cache, 2, N_PROMPT);
        assert_eq!(engine.decode(2, N_PROMPT, &next()), never_saved(setup), "{setup:?}");
    }
}

#[test]
fn another_stream_goes_on_exactly() {
    for swa in [Swa::NONE, window(SwaType::Standard), window(SwaType::Chunked)] {
        for setup in Setup::new(swa).layouts() {
            let streams = Setup { unified: false, ..setup };
            let mut engine = after_prompt_and_reply(streams);
            let state = save(&mut engine.cache, 0, NONE);
            engine.decode(2, 0, &next());
            restore(&mut engine.cache, &state, 2, NONE);
            cut(&mut engine.cache, 2, N_PROMPT);
            assert_eq!(engine.decode(2, N_PROMPT, &next()), never_saved(setup), "{setup:?}");
        }
    }
}

#[test]
fn a_state_moves_between_one_stream_and_streams() {
    for unified in [true, false] {
        let setup = Setup { unified, ..Setup::new(window(SwaType::Standard)) };
        let state = save(&mut after_prompt_and_reply(setup).cache, 0, NONE);
        let mut other = Setup { unified: !unified, ..setup }.start();
        restore(&mut other.cache, &state, 1, NONE);
        cut(&mut other.cache, 1, N_PROMPT);
        assert_eq!(other.decode(1, N_PROMPT, &next()), never_saved(setup), "from unified = {unified}");
    }
}

#[test]
fn a_sequence_goes_on_undisturbed_while_another_is_saved_and_restored() {
    for unified in [true, false] {
        for setup in Setup::new(window(SwaType::Standard)).layouts() {
            let setup = Setup { unified, ..setup };
            let alone = setup.start().decode(1, 0, &tokens(60, 7));

            let mut engine = setup.start();
            let mut logits = Vec::new();
            for (round, tokens) in (0..).zip(tokens(60, 7).chunks(6)) {
                engine.decode(0, 6 * round, &transformer::tokens(6, 8));
                let state = save(&mut engine.cache, 0, NONE);
                logits.extend(engine.decode(1, 6 * round, tokens));
                restore(&mut engine.cache, &state, 0, NONE);
            }
            assert_eq!(logits, alone, "{setup:?}");
        }
    }
}

// Pending shifts

/// As a server does when the context is full: positions 4 to 9 go, and the rest moves up. K is not rotated yet.
fn after_a_context_shift(setup: Setup) -> Engine {
    let mut engine = setup.start();
    engine.decode(1, 0, &prompt());
    engine.decode(1, N_PROMPT, &reply());
    assert!(engine.cache.seq_rm(1, 4, 10).unwrap());
    engine.cache.seq_add(1, 10, -1, -6).unwrap();
    engine
}

const N_SHIFTED: Pos = N_PROMPT + N_REPLY - 6;

#[test]
fn a_pending_shift_is_in_the_saved_state() {
    for swa in [Swa::NONE, window(SwaType::Standard)] {
        for unified in [true, false] {
            for setup in Setup::new(swa).layouts() {
                let setup = Setup { unified, ..setup };
                let want = after_a_context_shift(setup).decode(1, N_SHIFTED, &next());

                let mut engine = after_a_context_shift(setup);
                let state = save(&mut engine.cache, 1, NONE);
                engine.cache.clear(true).unwrap();
                restore(&mut engine.cache, &state, 1, NONE);
                assert_eq!(engine.cache.pending_shifts(0, usize::from(!unified)).unwrap().count(), 0);
                assert_eq!(engine.decode(1, N_SHIFTED, &next()), want, "{setup:?}");
            }
        }
    }
}

#[test]
fn saving_a_pending_shift_does_not_disturb_the_sequence() {
    let setup = Setup::new(window(SwaType::Standard));
    let want = after_a_context_shift(setup).decode(1, N_SHIFTED, &next());
    let mut engine = after_a_context_shift(setup);
    save(&mut engine.cache, 1, NONE);
    save(&mut engine.cache, 1, NONE);
    assert_eq!(engine.decode(1, N_SHIFTED, &next()), want);
}

#[test]
fn a_shift_that_is_not_applied_changes_the_logits() {
    let setup = Setup::new(Swa::NONE);
    let want = after_a_context_shift(setup).decode(1, N_SHIFTED, &next());
    let mut engine = after_a_context_shift(setup);
    assert_eq!(engine.cache.pending_shifts(0, 0).unwrap().count(), 24);
    engine.cache.shift_done();
    assert!(engine.decode(1, N_SHIFTED, &next())[0].distance(&want[0]) > 0.01);
}

/// How far logits are from those of a run that had the prompt where the shift moves it to, with and without K turned
/// by kvstate.
fn distances_after_moving_all(setup: Setup, by: Pos) -> [f32; 2] {
    let mut recomputed = setup.start();
    recomputed.decode(1, by, &prompt());
    let want = recomputed.decode(1, by + N_PROMPT, &next());
    [true, false].map(|is_applied| {
        let mut engine = setup.start();
        engine.decode(1, 0, &prompt());
        engine.cache.seq_add(1, 0, -1, by).unwrap();
        if !is_applied {
            engine.cache.shift_done();
        }
        let logits = engine.decode(1, by + N_PROMPT, &next());
        logits.iter().zip(&want).map(|(got, want)| got.distance(want)).fold(0.0, f32::max)
    })
}

#[test]
fn k_that_kvstate_has_turned_gives_the_logits_of_a_recomputed_run() {
    for swa in [Swa::NONE, window(SwaType::Standard)] {
        for setup in Setup::new(swa).layouts() {
            let setup = Setup { rope: true, ..setup };
            let tolerance = if setup.element == GgmlType::F32 { 1e-4 } else { 1e-2 };
            for by in [1, 40, 3000] {
                let [applied, left_out] = distances_after_moving_all(setup, by);
                assert!(applied < tolerance, "{applied} by {by}, {setup:?}");
                assert!(left_out > 0.1, "{left_out} by {by} without the shift, {setup:?}");
            }
        }
    }
}

#[test]
fn kvstate_turns_k_of_a_context_shift_as_the_engine_does() {
    for setup in Setup::new(window(SwaType::Standard)).layouts() {
        let tolerance = if setup.element == GgmlType::F32 { 1e-4 } else { 1e-2 };
        let want = after_a_context_shift(setup).decode(1, N_SHIFTED, &next());
        let setup = Setup { rope: true, ..setup };
        let mut engine = after_a_context_shift(setup);
        let state = save(&mut engine.cache, 1, NONE);
        engine.cache.clear(true).unwrap();
        restore(&mut engine.cache, &state, 1, NONE);
        for (got, want) in engine.decode(1, N_SHIFTED, &next()).iter().zip(&want) {
            assert!(got.distance(want) < tolerance, "{} {setup:?}", got.distance(want));
        }
    }
}
