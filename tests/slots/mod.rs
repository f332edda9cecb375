//! A slot with all that a slot file can hold: an iSWA target, a draft model, checkpoints, a driver.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::path::Path;

use kvstate::format::{Checkpoint, CheckpointSpan, Identity};
use kvstate::memory::KvParams;
use kvstate::session::{LoadedSlot, SlotContents, SlotLoadParams, Verify};
use kvstate::{Context, Result};

#[path = "../support/mod.rs"]
pub mod support;

use support::{PARTIAL, context, decode, iswa, kv, save};

/// A server's own payload: a header of -1, and what nobody looks at.
pub const TOKENS: [i32; 5] = [-1, 1, 2, 77, 78];
pub const DRIVER: &[u8] = b"the driver";

pub fn target_params() -> Vec<KvParams> {
    iswa(32, 16, 4)
}

/// The target: 12 positions in sequence 0.
pub fn target() -> Context {
    let mut target = context(2, &target_params());
    decode(&mut target, 0, 0..12);
    target
}

/// A context like the target's in which another conversation is in sequence 1.
pub fn busy_target() -> Context {
    let mut target = context(2, &target_params());
    decode(&mut target, 1, 0..5);
    target
}

/// The draft model: 12 positions in sequence 1.
pub fn draft() -> Context {
    let mut draft = context(2, &[kv(16)]);
    decode(&mut draft, 1, 0..12);
    draft
}

/// A draft model with another conversation in sequence 0.
pub fn busy_draft() -> Context {
    let mut draft = context(2, &[kv(16)]);
    decode(&mut draft, 0, 0..3);
    draft
}

pub fn identity() -> Identity {
    Identity { model: b"gemma 3".to_vec(), salt: b"tenant".to_vec(), metadata: b"slot 0".to_vec() }
}

/// The state of a checkpoint, and where it was taken: after every 4 tokens.
pub fn checkpoint_states(target: &mut Context) -> Vec<(CheckpointSpan, Vec<u8>)> {
    let span = |n: i32| CheckpointSpan::new(n.into(), 0, n - 1).unwrap();
    [4, 8, 12].map(|n| (span(n), save(target, 0, PARTIAL))).into()
}

pub fn checkpoints(states: &[(CheckpointSpan, Vec<u8>)]) -> Vec<Checkpoint<&[u8]>> {
    states
        .iter()
        .map(|(span, target)| Checkpoint { span: *span, target: &target[..], draft: b"draft", driver: b"" })
        .collect()
}

/// Saves everything; returns the size.
pub fn save_slot(path: &Path) -> u64 {
    let (mut target, mut draft) = (target(), draft());
    let states = checkpoint_states(&mut target);
    let contents = SlotContents {
        tokens: &TOKENS,
        checkpoints: checkpoints(&states),
        draft: Some((&mut draft, 1)),
        driver: DRIVER,
        identity: identity(),
        sidecar: false,
    };
    target.slot_save(path, 0, contents).unwrap()
}

/// Loads into sequence 1 of `target` and sequence 0 of `draft`.
pub fn load_slot(
    path: &Path,
    target: &mut Context,
    draft: &mut Context,
    verify: Verify,
) -> Result<LoadedSlot> {
    let params =
        SlotLoadParams { draft: Some((draft, 0)), identity: identity(), verify, ..SlotLoadParams::default() };
    target.slot_load(path, 1, params)
}
