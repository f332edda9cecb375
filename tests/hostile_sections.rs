//! Bytes that are no state, for every kind of memory beside plain attention: refused, and not a byte or a cell has changed.
#![allow(missing_docs, reason = "a test")]

mod memories;
mod recurrence;
mod support;

use kvstate::Context;
use kvstate::types::StateFlags;
use memories::{DEST, Image, KINDS, Kind, OTHER, context, image};
use support::{NONE, PARTIAL, place};

/// A context, and what it looks like as long as it refuses.
struct Sweep {
    kind: &'static Kind,
    ctx: Context,
    before: Image,
}

impl Sweep {
    fn new(kind: &'static Kind) -> Self {
        let mut ctx = context(kind, 1);
        let before = image(&mut ctx);
        Self { kind, ctx, before }
    }

    /// Whether the bytes are refused; nothing has changed then. Otherwise other sequences have not, and the state saves and restores.
    fn refuses(&mut self, blob: &[u8], flags: StateFlags) -> bool {
        if self.ctx.state_seq_set_data(blob, DEST, flags).is_err() {
            assert!(
                image(&mut self.ctx) == self.before,
                "{}: a refused state has changed something",
                self.kind.name
            );
            return true;
        }
        let other = support::save(&mut self.ctx, OTHER, NONE);
        assert!(other == self.before.states[1], "{}: another sequence has changed", self.kind.name);
        let saved = support::save(&mut self.ctx, DEST, flags);
        support::restore(&mut self.ctx, &saved, DEST, flags);
        assert!(support::save(&mut self.ctx, DEST, flags) == saved, "{}", self.kind.name);
        *self = Self::new(self.kind);
        false
    }
}

/// A blob, and which of its bytes are metadata: those that do not follow the bytes of the planes.
fn blob(kind: &Kind, flags: StateFlags) -> (Vec<u8>, Vec<usize>) {
    let of = |seed| support::save(&mut context(kind, seed), DEST, flags);
    let (blob, others) = (of(2), [of(3), of(4)]);
    let metadata = (0..blob.len()).filter(|&at| others.iter().all(|other| other[at] == blob[at])).collect();
    (blob, metadata)
}

#[test]
fn every_truncation_is_refused_and_changes_nothing() {
    for (kind, flags) in KINDS.iter().flat_map(|kind| [(kind, NONE), (kind, PARTIAL)]) {
        let (blob, _) = blob(kind, flags);
        let mut sweep = Sweep::new(kind);
        assert!(!sweep.refuses(&blob, flags), "{}: the whole state is one", kind.name);
        for len in place::cases(0..blob.len()) {
            assert!(sweep.refuses(&blob[..len], flags), "{}: {len} of {} bytes", kind.name, blob.len());
        }
    }
}

#[test]
fn every_changed_byte_of_metadata_is_refused_and_changes_nothing_or_gives_a_valid_state() {
    for (kind, flags) in KINDS.iter().flat_map(|kind| [(kind, NONE), (kind, PARTIAL)]) {
        let (blob, metadata) = blob(kind, flags);
        let (mut sweep, mut n, mut n_refused) = (Sweep::new(kind), 0, 0);
        for (&at, mask) in place::cases(metadata.iter().flat_map(|at| [(at, 0x01), (at, 0x80), (at, 0xff)])) {
            let mut bad = blob.clone();
            bad[at] ^= mask;
            n += 1;
            n_refused += u32::from(sweep.refuses(&bad, flags));
        }
        assert!(n < 100 || 4 * n_refused > n, "{}: {n_refused} of {n} refused", kind.name);
    }
}

#[test]
fn every_truncation_and_changed_byte_of_a_whole_context_is_refused_and_changes_nothing() {
    for kind in &KINDS {
        let mut sweep = Sweep::new(kind);
        let state = sweep.before.states[2].clone();
        let flips = (0..state.len()).flat_map(|at| [(at, 0x01), (at, 0xff)]).filter(|(at, _)| at % 7 == 0);
        let damaged = flips.map(|(at, mask)| {
            let mut bad = state.clone();
            bad[at] ^= mask;
            bad
        });
        for bad in place::cases((0..state.len()).map(|len| state[..len].to_vec()).chain(damaged)) {
            if sweep.ctx.state_set_data(&bad).is_err() {
                assert!(
                    image(&mut sweep.ctx) == sweep.before,
                    "{}: a refused state has changed something",
                    kind.name
                );
            } else {
                sweep = Sweep::new(kind);
            }
        }
    }
}
