//! Every call of the driver fails once while a memory of several sections is restored or changed: all sections are as they were, or
//! the destination is empty in all of them.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(missing_docs, reason = "a test")]

mod gpu;
mod memories;
mod recurrence;
mod support;

use std::sync::Arc;

use kvstate::memory::{Dsv4Memory, KvMemory, RecurrentMemory, SectionParams};
use kvstate::storage;
use kvstate::{Context, ContextParams, Status};
use memories::{DEST, KINDS, Kind, OTHER, image, params};
use support::place::fakecuda::{Alone, LAUNCH_FAILED};
use support::{NONE, save};

fn on_device(section: SectionParams) -> SectionParams {
    match section {
        SectionParams::Kv { kv, .. } => {
            let memory = KvMemory::Devices(vec![Some(0); kv.layers.len()]);
            SectionParams::Kv { kv, memory }
        }
        SectionParams::Recurrent { recurrent, .. } => {
            let memory = RecurrentMemory::Devices(vec![Some(0); recurrent.layers.len()]);
            SectionParams::Recurrent { recurrent, memory }
        }
        SectionParams::Dsv4 { dsv4, .. } => {
            SectionParams::Dsv4 { dsv4, memory: Dsv4Memory::Devices(vec![Some(0); 4]) }
        }
        section => section,
    }
}

/// A filled context on device 0.
fn context(kind: &Kind) -> Context {
    let params = params(kind);
    let sections = params.sections.into_iter().map(on_device).collect();
    memories::filled(gpu::staged(ContextParams { sections, ..params }, 64, 2), 1)
}

/// The device stays open between contexts.
fn open() -> (Alone, Arc<storage::Device>) {
    let cuda = gpu::alone();
    let device = storage::Device::open(0).expect("device 0");
    (cuda, device)
}

/// A state of other bytes.
fn foreign(kind: &Kind) -> Vec<u8> {
    save(&mut memories::context(kind, 2), DEST, NONE)
}

/// Lets each call of the driver in `act` fail, in a context of `make`; `check` sees it afterwards, and whether `act` failed.
fn each_failure(
    cuda: &Alone,
    make: impl Fn() -> Context,
    name: &str,
    act: impl Fn(&mut Context) -> kvstate::Result<()>,
    check: impl Fn(&mut Context, bool),
) {
    let mut n_failed = 0;
    for nth in 1.. {
        let mut ctx = make();
        cuda.reset();
        cuda.fail_at(nth, LAUNCH_FAILED);
        let result = act(&mut ctx);
        let injected = cuda.injected();
        cuda.reset();
        if let Err(error) = &result {
            assert_eq!(error.status(), Status::Device, "{name}: {error}");
            n_failed += 1;
        }
        check(&mut ctx, result.is_err());
        if injected == 0 {
            assert!(result.is_ok(), "{}", name);
            break;
        }
    }
    assert!(n_failed > 5, "{name}: {n_failed} failures");
}

#[test]
fn a_restore_over_a_sequence_fails_in_every_section_or_in_none() {
    let (cuda, _device) = open();
    for kind in &KINDS {
        let blob = foreign(kind);
        let before = image(&mut context(kind)).states;
        let empty = {
            let mut ctx = context(kind);
            ctx.seq_rm(DEST, -1, -1).expect("a sequence");
            save(&mut ctx, DEST, NONE)
        };
        each_failure(
            &cuda,
            || context(kind),
            kind.name,
            |ctx| ctx.state_seq_set_data(&blob, DEST, NONE).map(drop),
            |ctx, failed| {
                let state = save(ctx, DEST, NONE);
                if failed {
                    assert!(state == before[0] || state == empty, "{}: half a state", kind.name);
                    assert!(
                        state == before[0] || ctx.seq_pos_max(DEST).expect("a sequence") == -1,
                        "{}",
                        kind.name
                    );
                } else {
                    assert!(state[8..] == blob[8..], "{}", kind.name);
                }
                assert!(save(ctx, OTHER, NONE) == before[1], "{}: another sequence has changed", kind.name);
            },
        );
    }
}

#[test]
fn a_restore_into_an_empty_sequence_fails_and_the_cache_stays() {
    let (cuda, _device) = open();
    for kind in &KINDS {
        let blob = foreign(kind);
        let make = || {
            let mut ctx = context(kind);
            ctx.seq_rm(DEST, -1, -1).expect("a sequence");
            ctx
        };
        let before = image(&mut make()).states;
        let act = |ctx: &mut Context| ctx.state_seq_set_data(&blob, DEST, NONE).map(drop);
        each_failure(&cuda, make, kind.name, act, |ctx, failed| {
            if failed {
                assert!(image(ctx).states == before, "{}", kind.name);
            } else {
                assert!(save(ctx, DEST, NONE)[8..] == blob[8..], "{}", kind.name);
            }
            assert!(save(ctx, OTHER, NONE) == before[1], "{}: another sequence has changed", kind.name);
        });
    }
}
