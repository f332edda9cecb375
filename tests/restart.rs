//! Slots whose process has ended: what one saves, another restores, and goes on as if nothing had been stopped.
//!
//! Each test starts its own binary twice. All engines have the same weights, so the second process can compute what the first
//! would have answered.
#![allow(missing_docs, reason = "a test")]

mod process;
mod support;
mod transformer;

use std::path::{Path, PathBuf};

use kvstate::format::{Checkpoint, CheckpointSpan};
use kvstate::session::{DraftOutcome, LoadedSlot, SlotContents, SlotLoadParams, Verify};
use kvstate::types::{Pos, Swa, SwaType, Token};
use process::{run, say};
use support::{PARTIAL, place, restore, save};
use transformer::{Engine, Logits, Setup, tokens};

/// The folder of the slots: set in the processes that the tests start.
const FOLDER: &str = "KVSTATE_TEST_RESTART";

fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Runs the test `saves` and then the test `restores`, each in a process of its own; what the second said.
fn restarted(saves: &str, restores: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    run(saves, FOLDER, dir.path());
    run(restores, FOLDER, dir.path())
}

/// Decodes tokens that no cache has been saved for; the logits of those from `from` on.
fn never_stopped(setup: Setup, tokens: &[Token], from: usize) -> Vec<Logits> {
    setup.start().decode(0, 0, tokens).split_off(from)
}

// Checkpoints

const N: usize = 200;
/// Where the next prompt is another one.
const DIVERGES: usize = 100;
/// The checkpoint before that.
const RESUMES: usize = 96;

fn history() -> Vec<Token> {
    tokens(N, 1)
}

/// A hybrid, which has one recurrent state, and a window of 8 in cells for 32, which has lost what position 100 sees.
fn setups_that_cannot_be_cut() -> impl Iterator<Item = (String, Setup)> {
    let window = Swa::new(SwaType::Standard, 8).unwrap();
    let setups = [("hybrid", Setup::hybrid(0)), ("window", Setup { swa_kv_size: 32, ..Setup::new(window) })];
    let layouts =
        setups.into_iter().flat_map(|(name, setup)| setup.layouts().map(move |setup| (name, setup)));
    layouts.enumerate().map(|(i, (name, setup))| (format!("{name}-{i}"), setup))
}

#[test]
fn a_history_that_diverges_resumes_from_the_checkpoint_before_in_a_fresh_process() {
    let said = restarted("saves_with_checkpoints", "resumes_from_a_checkpoint");
    let want: Vec<_> =
        setups_that_cannot_be_cut().map(|(name, _)| format!("{name} from {RESUMES}")).collect();
    assert_eq!(said, want);
}

/// Runs only as a child.
#[test]
fn saves_with_checkpoints() {
    let Some(folder) = folder() else { return };
    for (name, setup) in setups_that_cannot_be_cut() {
        let mut engine = setup.start();
        let mut states = Vec::new();
        for (p0, tokens) in (0..).step_by(16).zip(history().chunks(16)) {
            engine.decode(0, p0, tokens);
            let n_tokens = i64::from(p0) + i64::try_from(tokens.len()).unwrap();
            let (pos_min, pos_max) =
                (engine.cache.seq_pos_min(0).unwrap(), engine.cache.seq_pos_max(0).unwrap());
            let span = CheckpointSpan::new(n_tokens, pos_min, pos_max).unwrap();
            states.push((span, save(&mut engine.cache, 0, PARTIAL)));
        }
        let checkpoints = states
            .iter()
            .map(|(span, target)| Checkpoint { span: *span, target: &target[..], draft: b"", driver: b"" })
            .collect();
        let contents = SlotContents { tokens: &history(), checkpoints, ..SlotContents::default() };
        engine.cache.slot_save(folder.join(name), 0, contents).unwrap();
    }
}

/// Runs only as a child.
#[test]
fn resumes_from_a_checkpoint() {
    let Some(folder) = folder() else { return };
    let prompt = [&history()[..DIVERGES], &tokens(60, 4)].concat();
    for (name, setup) in setups_that_cannot_be_cut() {
        let mut engine = setup.start();
        let params = SlotLoadParams { verify: Verify::Full, ..SlotLoadParams::default() };
        let slot = engine.cache.slot_load(folder.join(&name), 0, params).unwrap();
        assert_eq!((slot.tokens, slot.checkpoints.len()), (history(), N.div_ceil(16)));
        let diverges = Pos::try_from(DIVERGES).unwrap();
        assert!(!engine.cache.can_rewind(0, diverges).unwrap(), "{name}");

        let usable = |checkpoint: &&Checkpoint<Vec<u8>>| {
            checkpoint.span.n_tokens() <= i64::try_from(DIVERGES).unwrap()
        };
        let checkpoint = slot.checkpoints.iter().rev().find(usable).unwrap();
        let n_past = Pos::try_from(checkpoint.span.n_tokens()).unwrap();
        restore(&mut engine.cache, &checkpoint.target, 0, PARTIAL);
        assert!(engine.cache.seq_rm(0, n_past, -1).unwrap(), "{name}");
        assert_eq!(engine.cache.rewind_pos(0, diverges).unwrap(), n_past, "{name}");

        let from = usize::try_from(n_past).unwrap();
        let logits = engine.decode(0, n_past, &prompt[from..]);
        assert_eq!(logits, never_stopped(setup, &prompt, from), "{name}");
        say(&format!("{name} from {n_past}"));
    }
}

// Draft models

const DRIVER: &[u8] = b"drafts 5 tokens, 117 of 208 were taken";

fn target_setup() -> Setup {
    Setup::new(Swa::NONE)
}

/// The first two layers of the target.
fn draft_setup() -> Setup {
    Setup { n_layer: 2, ..target_setup() }
}

fn prompt(n: usize) -> Vec<Token> {
    tokens(n, 7)
}

const LONG: usize = 50;
/// Too short for a checkpoint.
const SHORT: usize = 3;

/// Runs only as a child: a target and its draft model after a long prompt, and after a short one.
#[test]
fn saves_with_a_draft() {
    let Some(folder) = folder() else { return };
    for n in [LONG, SHORT] {
        let [mut target, mut draft] = [target_setup(), draft_setup()].map(Setup::start);
        target.decode(0, 0, &prompt(n));
        draft.decode(0, 0, &prompt(n));
        let contents = SlotContents {
            tokens: &prompt(n),
            draft: Some((&mut draft.cache, 0)),
            driver: DRIVER,
            ..SlotContents::default()
        };
        target.cache.slot_save(folder.join(n.to_string()), 0, contents).unwrap();
    }
}

/// The slot of `n` tokens, as sequence 1 of fresh engines.
fn load_with(folder: &Path, n: usize, draft_setup: Setup) -> (Engine, Engine, LoadedSlot) {
    let [mut target, mut draft] = [target_setup(), draft_setup].map(Setup::start);
    // Cells of their own are taken already.
    target.decode(0, 0, &tokens(5, 8));
    draft.decode(1, 0, &tokens(9, 8));
    let params = SlotLoadParams {
        draft: Some((&mut draft.cache, 1)),
        verify: Verify::Full,
        ..SlotLoadParams::default()
    };
    let slot = target.cache.slot_load(folder.join(n.to_string()), 1, params).unwrap();
    assert_eq!(slot.tokens, prompt(n));
    (target, draft, slot)
}

/// Sequence 1 goes on behind `n` tokens as in an engine that was never stopped.
fn assert_goes_on(engine: &mut Engine, setup: Setup, n: usize) {
    let next = tokens(10, 9);
    let want = never_stopped(setup, &[prompt(n), next.clone()].concat(), n);
    assert_eq!(engine.decode(1, Pos::try_from(n).unwrap(), &next), want);
}

#[test]
fn target_draft_and_driver_go_on_in_a_fresh_process() {
    assert_eq!(restarted("saves_with_a_draft", "restores_a_draft"), ["pos_max 49 and 49", "pos_max 2 and 2"]);
}

/// Runs only as a child.
#[test]
fn restores_a_draft() {
    let Some(folder) = folder() else { return };
    for n in [LONG, SHORT] {
        let (mut target, mut draft, slot) = load_with(&folder, n, draft_setup());
        assert!(matches!(slot.draft, DraftOutcome::Restored(_)), "{slot:?}");
        assert_eq!((slot.driver.as_deref(), slot.checkpoints.len()), (Some(DRIVER), 0));
        let [target_max, draft_max] = [&target, &draft].map(|engine| engine.cache.seq_pos_max(1).unwrap());
        say(&format!("pos_max {target_max} and {draft_max}"));
        assert_goes_on(&mut target, target_setup(), n);
        assert_goes_on(&mut draft, draft_setup(), n);
    }
}

#[test]
fn a_draft_of_another_model_is_dropped_in_a_fresh_process_and_the_target_goes_on() {
    let reason = "mismatched layer count: the state has 2, the cache 3 (section kv)";
    assert_eq!(restarted("saves_with_a_draft", "drops_a_draft"), [reason; 2]);
}

/// Runs only as a child.
#[test]
fn drops_a_draft() {
    let Some(folder) = folder() else { return };
    for n in [LONG, SHORT] {
        let other = Setup { n_layer: 3, ..target_setup() };
        let (mut target, draft, slot) = load_with(&folder, n, other);
        let DraftOutcome::Dropped(reason) = slot.draft else { panic!("{slot:?}") };
        assert_eq!((slot.driver, draft.cache.seq_pos_max(1).unwrap()), (None, -1));
        assert_goes_on(&mut target, target_setup(), n);
        say(&reason);
    }
}
