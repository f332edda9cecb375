//! A state of rows in a cache of transposed V, and the other way round: always, and without a loss.
#![allow(missing_docs, reason = "a test")]

mod common;
mod place;

use std::fs;

use common::{
    Fixture, SEQUENCE, assert_same_bytes, file_bytes, file_of, fixtures, seq_state, whole_contexts,
    whole_state,
};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, SectionParams, TensorParams};
use kvstate::types::{StateFlags, Swa, SwaType};
use kvstate::{Context, ContextParams};

const NONE: StateFlags = StateFlags::empty();
const N_LAYER: u32 = 2;

/// A cache of f16, or of what `change` makes of it.
fn cache(n_embd: u32, kv_size: u32, v_trans: bool, change: impl Fn(&mut KvParams)) -> Context {
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd };
    let layer = LayerParams { k: tensor, v: Some(tensor) };
    let mut kv = KvParams { v_trans, ..KvParams::new(kv_size, N_LAYER as usize, layer) };
    change(&mut kv);
    place::context(ContextParams::new(4, vec![kv.into()])).unwrap()
}

/// An element, by layer, cell and channel: no two neighbours are equal.
fn element(layer: u32, cell: u32, channel: u32) -> [u8; 2] {
    let bits = (layer << 20 ^ cell << 7 ^ channel).wrapping_mul(0x9e37_79b1) >> 16;
    u16::try_from(bits & 0x7bff).unwrap().to_le_bytes()
}

/// The state of positions `0..n_cells`, of V in rows or in channels, written down by hand.
fn state(n_cells: u32, n_embd: u32, v_trans: bool) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::new();
    let words =
        |out: &mut Vec<u8>, words: &[u32]| words.iter().for_each(|word| out.extend(word.to_le_bytes()));
    words(&mut out, &[0xaf14_3cd8, 0, 1, n_cells]);
    for pos in 0..n_cells {
        words(&mut out, &[pos, 1, 0]);
    }
    words(&mut out, &[u32::from(v_trans), N_LAYER, 0, 0]);
    for layer in 0..N_LAYER {
        words(&mut out, &[1, 2 * n_embd, 0]);
        let cells = (0..n_cells).flat_map(|cell| (0..n_embd).map(move |channel| (cell, channel)));
        cells.for_each(|(cell, channel)| out.extend(element(layer, cell, channel)));
    }
    for layer in N_LAYER..2 * N_LAYER {
        if v_trans {
            words(&mut out, &[1, 2, n_embd]);
            let channels = (0..n_embd).flat_map(|channel| (0..n_cells).map(move |cell| (cell, channel)));
            channels.for_each(|(cell, channel)| out.extend(element(layer, cell, channel)));
        } else {
            words(&mut out, &[1, 2 * n_embd, 0]);
            let cells = (0..n_cells).flat_map(|cell| (0..n_embd).map(move |channel| (cell, channel)));
            cells.for_each(|(cell, channel)| out.extend(element(layer, cell, channel)));
        }
    }
    out
}

/// The same context with V the other way, wherever it can be.
fn turned(fixture: &Fixture) -> ContextParams {
    let mut params = fixture.params();
    for section in &mut params.sections {
        let SectionParams::Kv { kv, .. } = section else { continue };
        let is_quantized = kv.layers.iter().any(|layer| layer.v.is_some_and(|v| v.ggml_type.is_quantized()));
        kv.v_trans = !kv.v_trans && !is_quantized;
    }
    params
}

#[test]
fn every_cell_and_channel_is_where_the_other_layout_has_it() {
    for (n_cells, n_embd) in [(1, 1), (1, 64), (7, 5), (33, 31), (64, 64), (100, 48)] {
        for v_trans in [false, true] {
            let mut ctx = cache(n_embd, 128, v_trans, |_| ());
            let other = state(n_cells, n_embd, !v_trans);
            assert_eq!(ctx.state_seq_set_data(&other, 0, NONE).unwrap(), other.len());
            let what = format!("{n_cells} cells of {n_embd}, v_trans {v_trans}");
            assert_same_bytes(&seq_state(&mut ctx, 0, NONE), &state(n_cells, n_embd, v_trans), &what);
        }
    }
}

#[test]
fn a_large_state_goes_into_holes_between_other_cells_from_memory_and_from_a_file() {
    let (n_cells, n_embd) = (5000, 256);
    for v_trans in [false, true] {
        let (other, want) = (state(n_cells, n_embd, !v_trans), state(n_cells, n_embd, v_trans));
        for from_file in [false, true] {
            let mut ctx = cache(n_embd, 8192, v_trans, |_| ());
            ctx.state_seq_set_data(&state(3000, n_embd, v_trans), 1, NONE).unwrap();
            (0..3000).step_by(3).for_each(|pos| assert!(ctx.seq_rm(1, pos, pos + 1).unwrap()));
            let neighbour = seq_state(&mut ctx, 1, NONE);
            if from_file {
                let file = file_of(&file_bytes(SEQUENCE, 4, &[7], &other[8..]));
                ctx.state_seq_load_file(file.path(), 0, 1).unwrap();
            } else {
                ctx.state_seq_set_data(&other, 0, NONE).unwrap();
            }
            let what = format!("v_trans {v_trans}, file {from_file}");
            assert_same_bytes(&seq_state(&mut ctx, 0, NONE), &want, &what);
            let after = seq_state(&mut ctx, 1, NONE);
            assert_same_bytes(&after, &neighbour, &format!("neighbour, {what}"));
        }
    }
}

#[test]
fn every_state_of_llama_cpp_comes_back_byte_for_byte_from_the_other_layout() {
    let is_mine = |f: &Fixture| f.version() == 4 && f.path("bin").is_some() && !f.is_legacy_partial();
    let mut n = 0;
    for f in fixtures().iter().filter(|f| is_mine(f)) {
        let (blob, seq, flags) = (f.blob().unwrap(), f.sidecar.seq_id, f.flags());
        let mut other = place::context(turned(f)).unwrap();
        let consumed = other.state_seq_set_data(&blob, seq, flags);
        assert_eq!(consumed.unwrap_or_else(|e| panic!("{}: {e}", f.name)), blob.len(), "{}", f.name);
        let turned = seq_state(&mut other, seq, flags);
        let mut ctx = f.context();
        ctx.state_seq_set_data(&turned, seq, flags).unwrap();
        assert_same_bytes(&seq_state(&mut ctx, seq, flags), &blob, &f.name);
        n += 1;
    }
    assert!(n > 30, "{n} fixtures");
}

#[test]
fn a_whole_context_comes_back_byte_for_byte_from_the_other_layout() {
    let mut n = 0;
    for (path, f) in whole_contexts("_whole.ctx").into_iter().filter(|(_, f)| !f.is_old()) {
        let whole = fs::read(&path).unwrap();
        let mut other = place::context(turned(&f)).unwrap();
        other.state_set_data(&whole).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        let turned = whole_state(&mut other);
        let mut ctx = f.context();
        ctx.state_set_data(&turned).unwrap();
        assert_same_bytes(&whole_state(&mut ctx), &whole, &f.name);
        n += 1;
    }
    assert!(n > 0, "no fixture");
}

#[test]
fn what_a_window_drops_is_dropped_in_the_other_layout_as_well() {
    let window = |kv: &mut KvParams| kv.swa = Swa::new(SwaType::Standard, 16).unwrap();
    let large = state(100, 48, false);
    let mut rows = cache(48, 32, false, window);
    rows.state_seq_set_data(&large, 0, NONE).unwrap();
    let kept = seq_state(&mut rows, 0, NONE);
    assert!(kept.len() < large.len() / 2, "cells were dropped");

    let mut channels = cache(48, 32, true, window);
    channels.state_seq_set_data(&large, 0, NONE).unwrap();
    let turned = seq_state(&mut channels, 0, NONE);
    rows.clear(true).unwrap();
    rows.state_seq_set_data(&turned, 0, NONE).unwrap();
    assert_same_bytes(&seq_state(&mut rows, 0, NONE), &kept, "by way of channels");
}

#[test]
fn a_state_that_ends_early_changes_nothing_in_the_other_layout() {
    for v_trans in [false, true] {
        let mut ctx = cache(5, 32, v_trans, |_| ());
        ctx.state_seq_set_data(&state(9, 5, v_trans), 0, NONE).unwrap();
        let (before, other) = (whole_state(&mut ctx), state(7, 5, !v_trans));
        for len in 0..other.len() {
            ctx.state_seq_set_data(&other[..len], 0, NONE).unwrap_err();
        }
        let file = file_of(&file_bytes(SEQUENCE, 4, &[], &other[8..other.len() - 1]));
        ctx.state_seq_load_file(file.path(), 0, 0).unwrap_err();
        assert_same_bytes(&whole_state(&mut ctx), &before, "the context");
    }
}

#[test]
fn no_byte_of_a_state_of_the_other_layout_makes_a_restore_crash() {
    let other = state(3, 5, true);
    let mut ctx = cache(5, 16, false, |_| ());
    for at in 0..other.len() {
        for flip in [1, 0x80, 0xff] {
            let mut bytes = other.clone();
            bytes[at] ^= flip;
            if ctx.state_seq_set_data(&bytes, 0, NONE).is_ok() {
                seq_state(&mut ctx, 0, NONE);
            }
        }
    }
}

#[test]
fn a_snapshot_is_restored_in_the_other_layout() {
    let mut rows = cache(48, 128, false, |_| ());
    rows.state_seq_set_data(&state(100, 48, false), 0, NONE).unwrap();
    let snapshot = rows.seq_snapshot(0, NONE).unwrap();
    let mut channels = cache(48, 128, true, |_| ());
    channels.seq_restore(&snapshot, 0).unwrap();
    assert_same_bytes(&seq_state(&mut channels, 0, NONE), &state(100, 48, true), "channels");
}

#[test]
fn a_transposition_that_is_none_is_refused() {
    let mut bytes = state(2, 4, false);
    let v_trans = 16 + 2 * 12;
    bytes[v_trans] = 2;
    let error = cache(4, 8, true, |_| ()).state_seq_set_data(&bytes, 0, NONE).unwrap_err();
    assert_eq!(error.to_string(), "incompatible V transposition: the state has 2, the cache 1 (section kv)");
}
