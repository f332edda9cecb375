//! The compressed half of a DSV4 memory: rows that no cell guards, and states with rollback planes.
#![allow(missing_docs, reason = "a test")]

mod support;

use kvstate::format::GgmlType;
use kvstate::memory::{
    Dsv4Compressor, Dsv4CompressorParams, Dsv4Memory, Dsv4Params, Dsv4Planes, Dsv4Tensor, KvParams,
    SectionParams,
};
use kvstate::storage::{Plane, PlaneShape};
use kvstate::types::{Pos, SeqId};
use kvstate::{Context, ContextParams};
use support::{NONE, ON_DEVICE, PARTIAL, kv, noise, place, restore, save, standard, tensor};

const N_RS_SEQ: u32 = 2;

/// Layers that have K: those of csa, hca and lid.
const N_K: i64 = 5;

/// Rows of 4 positions in layers 1 and 3, rows of 16 in layer 2.
fn compressed() -> Dsv4Params {
    let compressor = |ratio, layers: &[u32], state_size| Dsv4CompressorParams {
        ratio,
        kv_size: 64 / ratio,
        layers: layers.to_vec(),
        k: tensor(GgmlType::F16, 6),
        state_size,
        n_embd_state: 3,
    };
    Dsv4Params {
        csa: compressor(4, &[1, 3], 8),
        hca: compressor(16, &[2], 5),
        lid: compressor(4, &[1, 3], 2),
        n_rs_seq: N_RS_SEQ,
    }
}

fn raw() -> [SectionParams; 2] {
    let base = KvParams { layers: Vec::new(), ..kv(64) };
    [base.into(), standard(64, 8).into()]
}

fn params(n_seq_max: u32, dsv4: Dsv4Params) -> ContextParams {
    let [base, swa] = raw();
    let sections = vec![base, swa, SectionParams::Dsv4 { dsv4, memory: Dsv4Memory::Host }];
    ContextParams { unified: false, ..ContextParams::new(n_seq_max, sections) }
}

fn context(n_seq_max: u32) -> Context {
    place::context(params(n_seq_max, compressed())).expect("a context")
}

/// The planes of a stream and rollback plane, with the compressor's ratio for K.
fn planes(ctx: &Context, stream: usize, rollback: u32) -> Vec<(&Plane, Option<u32>)> {
    let mut found = Vec::new();
    for which in [Dsv4Tensor::K, Dsv4Tensor::Kv, Dsv4Tensor::Score] {
        let is_k = which == Dsv4Tensor::K;
        for compressor in [Dsv4Compressor::Csa, Dsv4Compressor::Hca, Dsv4Compressor::Lid] {
            let ratio = if compressor == Dsv4Compressor::Hca { 16 } else { 4 };
            // K has no rollback planes.
            for il in (0..4).filter(|_| !is_k || rollback == 0) {
                let plane = ctx.dsv4_plane((compressor, which), il, stream, rollback);
                found.extend(plane.map(|plane| (plane, is_k.then_some(ratio))));
            }
        }
    }
    found
}

fn stream(seq: SeqId) -> usize {
    usize::try_from(seq).expect("a sequence")
}

/// Decodes positions; then K has a row for each whole block, and rollback plane `k` the state `k` tokens before the last.
fn decode(ctx: &mut Context, seq: SeqId, end: Pos) {
    let first = ctx.seq_pos_max(seq).expect("a sequence") + 1;
    support::decode(ctx, seq, first..end);
    for rollback in 0..=N_RS_SEQ {
        let n_seen = end - rollback.cast_signed();
        // States come behind K, which has no rollback planes.
        let n_k = if rollback == 0 { 0 } else { N_K };
        for (i, (plane, ratio)) in (n_k..).zip(planes(ctx, stream(seq), rollback)) {
            let n_rows = ratio.map_or(plane.kv_size(), |ratio| n_seen.unsigned_abs() / ratio);
            for row in 0..n_rows {
                let of = ratio.map_or(i64::from(n_seen), |_| 1000);
                let len = usize::try_from(plane.shape().cell_bytes()).expect("a row");
                support::write_cell(plane, row, &noise(&[i, of, row.into()], len));
            }
        }
    }
}

/// What a sequence has in the compressed half: K, and its state.
fn held(ctx: &Context, seq: SeqId) -> Vec<Vec<u8>> {
    let rollback = ctx.dsv4_rollback(seq).expect("a sequence");
    let k = planes(ctx, stream(seq), 0).into_iter().filter(|(_, ratio)| ratio.is_some());
    let state = planes(ctx, stream(seq), rollback).into_iter().filter(|(_, ratio)| ratio.is_none());
    k.chain(state).map(|(plane, _)| place::all(plane)).collect()
}

/// K, and states.
fn split(mut held: Vec<Vec<u8>>) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let states = held.split_off(usize::try_from(N_K).expect("few"));
    assert_eq!(states.len(), 10);
    (held, states)
}

fn is_zero(ctx: &Context, seq: SeqId) -> bool {
    let rows = (0..=N_RS_SEQ).flat_map(|rollback| planes(ctx, stream(seq), rollback));
    rows.map(|(plane, _)| place::all(plane)).all(|bytes| bytes.iter().all(|&byte| byte == 0))
}

/// What a context of its own holds of as many positions.
fn fresh(end: Pos) -> Vec<Vec<u8>> {
    let mut ctx = context(1);
    decode(&mut ctx, 0, end);
    held(&ctx, 0)
}

fn positions(ctx: &Context, seq: SeqId) -> (Pos, Pos) {
    (ctx.seq_pos_min(seq).expect("a sequence"), ctx.seq_pos_max(seq).expect("a sequence"))
}

// Operations

#[test]
fn a_range_with_an_end_is_refused() {
    let mut ctx = context(2);
    decode(&mut ctx, 0, 20);
    for (p0, p1) in [(0, 5), (0, 20), (19, 20), (25, 30), (3, 3)] {
        assert!(!ctx.seq_rm(0, p0, p1).expect("a sequence"), "[{p0}, {p1})");
    }
    assert_eq!(positions(&ctx, 0), (19, 19), "and only the last position is usable");
    assert!(ctx.seq_rm(0, 20, -1).expect("a sequence"), "nothing is behind the end");
}

#[test]
fn the_end_is_cut_off_once_by_as_many_positions_as_there_are_rollback_planes() {
    for cut in 1..=3 {
        let mut ctx = context(2);
        decode(&mut ctx, 1, 20);
        let can = cut <= 2;
        assert_eq!(ctx.seq_rm(1, 20 - cut, -1).expect("a sequence"), can, "{cut}");
        assert_eq!(positions(&ctx, 1).1, if can { 19 - cut } else { 19 });
        if can {
            assert_eq!(ctx.dsv4_rollback(1).expect("a sequence"), cut.unsigned_abs());
            assert!(!ctx.seq_rm(1, 19 - cut, -1).expect("a sequence"), "a rollback is pending");
            decode(&mut ctx, 1, 21);
            assert_eq!(ctx.dsv4_rollback(1).expect("a sequence"), 0);
        }
    }
}

#[test]
fn as_much_can_be_cut_off_as_the_last_ubatch_had_before_its_last_token() {
    let mut ctx = context(2);
    decode(&mut ctx, 0, 20);
    assert_eq!(ctx.max_cut(0).expect("a sequence"), Some(2));
    decode(&mut ctx, 0, 21);
    assert_eq!(ctx.max_cut(0).expect("a sequence"), Some(0));
    decode(&mut ctx, 0, 23);
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    assert_eq!(ctx.max_cut(1).expect("a sequence"), Some(1));
    let blob = save(&mut ctx, 0, NONE);
    restore(&mut ctx, &blob, 1, NONE);
    assert_eq!(ctx.max_cut(1).expect("a sequence"), Some(0));
}

#[test]
fn a_sequence_that_was_cut_to_where_no_state_is_cannot_go_on() {
    let mut ctx = context(2);
    decode(&mut ctx, 0, 20);
    let blob = save(&mut ctx, 0, NONE);
    decode(&mut ctx, 0, 21);
    assert!(ctx.seq_rm(0, 20, -1).expect("a sequence"), "as llama.cpp answers");
    assert!(!ctx.can_rewind(0, 20).expect("a sequence"));
    ctx.seq_cp(0, 1, -1, -1).expect("sequences");
    decode(&mut ctx, 0, 23);
    for seq in [0, 1] {
        let end = ctx.seq_pos_max(seq).expect("a sequence") + 1;
        assert!(!ctx.can_rewind(seq, end).expect("a sequence"), "{seq}");
    }
    restore(&mut ctx, &blob, 0, NONE);
    assert!(ctx.can_rewind(0, 20).expect("a sequence"));
}

#[test]
fn a_removed_sequence_leaves_no_row_behind() {
    let mut ctx = context(3);
    (0..3).for_each(|seq| decode(&mut ctx, seq, 20));
    assert!(ctx.seq_rm(1, -1, -1).expect("a sequence"));
    assert_eq!(positions(&ctx, 1), (-1, -1));
    assert!(is_zero(&ctx, 1));
    assert!(held(&ctx, 2) == fresh(20));
    assert!(!ctx.seq_rm(-1, 5, -1).expect("all sequences"));
    assert!(ctx.seq_rm(-1, 0, -1).expect("all sequences"));
    assert!((0..3).all(|seq| is_zero(&ctx, seq)));
}

#[test]
fn an_emptied_cache_has_no_row_left_whether_data_is_to_be_zeroed_or_not() {
    let mut ctx = context(2);
    decode(&mut ctx, 1, 20);
    assert!(ctx.seq_rm(1, 19, -1).expect("a sequence"));
    ctx.clear(false).expect("an empty cache");
    assert!(is_zero(&ctx, 1));
    assert_eq!(ctx.dsv4_rollback(1).expect("a sequence"), 0);
}

#[test]
fn a_copy_has_rows_states_and_a_pending_rollback() {
    let mut ctx = context(3);
    decode(&mut ctx, 0, 20);
    decode(&mut ctx, 2, 40);
    assert!(ctx.seq_rm(0, 18, -1).expect("a sequence"));
    ctx.seq_cp(0, 2, -1, -1).expect("sequences");
    assert_eq!((positions(&ctx, 2), ctx.dsv4_rollback(2).expect("a sequence")), ((17, 17), 2));
    assert!(held(&ctx, 2) == held(&ctx, 0));
    ctx.seq_cp(1, 2, -1, -1).expect("sequences");
    assert!(is_zero(&ctx, 2), "a copy of nothing is nothing");
    let error = ctx.seq_cp(0, 1, 0, 20).unwrap_err();
    assert_eq!(error.to_string(), "p0, p1: [0, 20), compressed rows are copied of whole sequences only");
}

#[test]
fn a_kept_sequence_is_the_only_one() {
    let mut ctx = context(3);
    (0..3).for_each(|seq| decode(&mut ctx, seq, 20));
    ctx.seq_keep(1).expect("a sequence");
    assert_eq!([0, 1, 2].map(|seq| positions(&ctx, seq).1), [-1, 19, -1]);
    assert!(is_zero(&ctx, 0) && is_zero(&ctx, 2));
    assert!(held(&ctx, 1) == fresh(20));
}

#[test]
fn positions_cannot_be_shifted() {
    let shift = kvstate::context::Shift::Engine;
    let mut ctx = place::context(ContextParams { shift, ..params(1, compressed()) }).expect("a context");
    let error = ctx.seq_add(0, 0, -1, 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot shift positions: compressed rows are of the positions that they were made of"
    );
}

// States

#[test]
fn a_state_has_the_rows_of_whole_blocks_and_restores_over_a_longer_one() {
    let mut ctx = context(2);
    decode(&mut ctx, 0, 19);
    let blob = save(&mut ctx, 0, NONE);
    for longer in [0, 40] {
        let mut other = context(3);
        decode(&mut other, 1, longer);
        restore(&mut other, &blob, 1, NONE);
        assert_eq!(positions(&other, 1), (18, 18));
        assert!(held(&other, 1) == fresh(19), "over {longer}");
        assert_eq!(save(&mut other, 1, NONE).len(), blob.len() + 2 * 4);
    }
}

#[test]
fn a_partial_state_has_the_window_and_the_states_and_leaves_rows_as_they_are() {
    let mut ctx = context(1);
    decode(&mut ctx, 0, 19);
    let (whole, partial) = (save(&mut ctx, 0, NONE), save(&mut ctx, 0, PARTIAL));
    assert!(partial.len() < whole.len());
    decode(&mut ctx, 0, 23);
    restore(&mut ctx, &partial, 0, PARTIAL);
    assert_eq!(positions(&ctx, 0), (18, 18));
    let (k, states) = split(held(&ctx, 0));
    assert!(k == split(fresh(23)).0, "K of whole blocks");
    assert!(states == split(fresh(19)).1, "states");
}

#[test]
fn a_state_with_a_pending_rollback_is_the_rolled_back_one_and_a_restore_ends_it() {
    let mut ctx = context(1);
    decode(&mut ctx, 0, 21);
    assert!(ctx.seq_rm(0, 19, -1).expect("a sequence"));
    let blob = save(&mut ctx, 0, NONE);
    restore(&mut ctx, &blob, 0, NONE);
    assert_eq!(ctx.dsv4_rollback(0).expect("a sequence"), 0);
    assert!(split(held(&ctx, 0)).1 == split(fresh(19)).1);
}

#[test]
fn a_state_on_the_device_comes_back() {
    let mut ctx = context(2);
    decode(&mut ctx, 0, 19);
    for flags in [ON_DEVICE, PARTIAL | ON_DEVICE] {
        let blob = save(&mut ctx, 0, flags);
        decode(&mut ctx, 0, 21);
        restore(&mut ctx, &blob, 0, flags);
        assert!(split(held(&ctx, 0)).1 == split(fresh(19)).1);
    }
}

#[test]
fn a_whole_context_comes_back_with_its_rollbacks_done() {
    let mut ctx = context(3);
    decode(&mut ctx, 0, 19);
    decode(&mut ctx, 2, 33);
    assert!(ctx.seq_rm(2, 32, -1).expect("a sequence"));
    let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
    ctx.state_get_data(&mut state).expect("a state");
    let mut other = context(3);
    decode(&mut other, 1, 7);
    assert_eq!(other.state_set_data(&state).expect("a state"), state.len());
    assert_eq!([0, 1, 2].map(|seq| positions(&other, seq).1), [18, -1, 31]);
    assert!(held(&other, 0) == fresh(19));
    assert!(split(held(&other, 2)).1 == split(fresh(32)).1);
    assert!(is_zero(&other, 1));
}

#[test]
fn a_state_of_the_older_version_has_all_rows_of_k() {
    let mut ctx = context(1);
    decode(&mut ctx, 0, 63);
    decode(&mut ctx, 0, 64);
    let mut blob = save(&mut ctx, 0, NONE);
    let mut versions = 0;
    for at in 0..blob.len() - 16 {
        // Version, rows, streams, and layers of the three caches.
        let words = |words: [u32; 4]| words.map(u32::to_le_bytes).concat();
        if blob[at..at + 16] == words([2, 16, 1, 2]) || blob[at..at + 16] == words([2, 4, 1, 1]) {
            blob[at] = 1;
            versions += 1;
        }
    }
    assert_eq!(versions, 3);
    restore(&mut ctx, &blob, 0, NONE);
    assert!(held(&ctx, 0) == fresh(64));
}

#[test]
fn states_that_do_not_fit_are_refused_by_name() {
    let mut ctx = context(1);
    decode(&mut ctx, 0, 19);
    let (blob, before) = (save(&mut ctx, 0, NONE), held(&ctx, 0));
    let mut refused = |at: usize, value: u32, want: &str| {
        let mut bad = blob.clone();
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = ctx.state_seq_set_data(&bad, 0, NONE).unwrap_err();
        assert_eq!(error.to_string(), want);
        assert!(held(&ctx, 0) == before, "nothing has changed: {want}");
    };
    refused(8, 7, "DSV4 magic: 00000007 (expected 34565344)");
    refused(12, 2, "DSV4 version: 2 (expected 1)");
    refused(16, 1, "DSV4 mode: 1 (expected 0)");
    // Header, the raw pair of 19 cells: one without layers, one with two layers of K and V.
    let k = 20 + (8 + 12 * 19 + 16) + (8 + 12 * 19 + 16 + 4 * 12 + 19 * 24);
    refused(k, 3, "DSV4 K cache version: 3 (expected 1 or 2)");
    refused(k + 4, 17, "mismatched rows of compressed K: the state has 17, the cache 16 (section dsv4, csa)");
    refused(k + 8, 2, "n_stream mismatch: the state has 2, the cache 1 (section dsv4, csa)");
    refused(k + 12, 3, "mismatched layer count: the state has 3, the cache 2 (section dsv4, csa)");
    refused(k + 16, 2, "mismatched layer: the state has 2, the cache 1 (section dsv4, csa)");
    let of = "(section dsv4, csa k of layer 1)";
    let allowed = "(section dsv4, csa k of layer 1; convert_types allows it)";
    refused(k + 20, 0, &format!("mismatched type: the state has 0 (f32), the cache 1 (f16) {allowed}"));
    refused(k + 24, 5, &format!("mismatched width: the state has 5, the cache 6 {of}"));
    refused(k + 32, 3, &format!("mismatched rows: the state has 3, the cache 4 {of}"));
    refused(k + 40, 4, &format!("mismatched row size: the state has 4, the cache 12 {of}"));
    let csa = 16 + 2 * (4 + 28 + 4 * 12);
    let hca = 16 + 4 + 28 + 12;
    let states = k + 2 * csa + hca;
    refused(states, 2, "DSV4 state version: 2 (expected 1)");
    refused(states + 4, 8, "mismatched ratio: the state has 8, the cache 4 (section dsv4, csa)");
    refused(states + 8, 9, "mismatched state size: the state has 9, the cache 8 (section dsv4, csa)");
    refused(states + 12, 4, "mismatched state width: the state has 4, the cache 3 (section dsv4, csa)");
}

#[test]
fn a_partial_state_is_not_read_as_a_whole_one() {
    let mut ctx = context(1);
    decode(&mut ctx, 0, 19);
    let partial = save(&mut ctx, 0, PARTIAL);
    let error = ctx.state_seq_set_data(&partial, 0, NONE).unwrap_err();
    assert_eq!(error.to_string(), "DSV4 mode: 1 (expected 0)");
    assert_eq!(positions(&ctx, 0), (18, 18));
}

// Geometries

#[test]
fn geometries_that_make_no_sense_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Dsv4Params), want: &str| {
        let mut dsv4 = compressed();
        change(&mut dsv4);
        assert_eq!(Context::new(params(2, dsv4)).unwrap_err().to_string(), want);
    };
    refused(&|dsv4| dsv4.csa.ratio = 0, "dsv4.csa.ratio: 0");
    refused(&|dsv4| dsv4.hca.kv_size = 0, "dsv4.hca.kv_size: 0");
    refused(&|dsv4| dsv4.csa.kv_size = 15, "dsv4.csa.kv_size: 15, 64 positions in rows of 4 need 16");
    refused(&|dsv4| dsv4.lid.state_size = 0, "dsv4.lid.state_size: 0");
    refused(&|dsv4| dsv4.lid.n_embd_state = 0, "dsv4.lid.n_embd_state: 0");
    refused(&|dsv4| dsv4.csa.layers = vec![3, 3], "dsv4.csa.layers: [3, 3], they ascend");
    refused(&|dsv4| dsv4.csa.k.n_embd = 0, "dsv4.csa.k.n_embd: 0 elements per cell");
    refused(
        &|dsv4| dsv4.n_rs_seq = u32::MAX,
        "dsv4.n_rs_seq: 4294967295 rollback planes of 2 streams, at most 65536 planes in all",
    );
    let unified = ContextParams { unified: true, ..params(2, compressed()) };
    let error = Context::new(unified).unwrap_err();
    assert_eq!(error.to_string(), "unified: 1 stream for 2 sequences, DSV4 has one for each");
    let mut alone = params(2, compressed());
    alone.sections.remove(1);
    let error = Context::new(alone).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sections: kv, dsv4; DSV4 is a pair of attention caches and the compressed half"
    );
}

#[test]
fn memory_that_does_not_fit_is_refused_by_name() {
    let with = |memory| {
        let [base, swa] = raw();
        let sections = vec![base, swa, SectionParams::Dsv4 { dsv4: compressed(), memory }];
        Context::new(ContextParams { unified: false, ..ContextParams::new(2, sections) })
    };
    let error = with(Dsv4Memory::Devices(vec![None; 2])).unwrap_err();
    assert_eq!(error.to_string(), "dsv4.devices: none for layer 3");
    let planes = |n: usize, n_rows, row_size| -> Vec<Plane> {
        Plane::allocate(&vec![PlaneShape::dense_rows(row_size); n], n_rows).expect("memory")
    };
    // Layers of csa, hca and lid; two streams, and in states two rollback planes more.
    let k = || [planes(4, 16, 12), planes(2, 4, 12), planes(4, 16, 12)].into_iter().flatten().collect();
    let states = || [planes(12, 8, 12), planes(6, 5, 12), planes(12, 2, 12)].into_iter().flatten().collect();
    let fitting = || Dsv4Planes { k: k(), kv: states(), score: states() };
    assert!(with(Dsv4Memory::Adopted(fitting())).is_ok());
    let mut short = fitting();
    short.k.pop();
    let error = with(Dsv4Memory::Adopted(short)).unwrap_err();
    assert_eq!(error.to_string(), "section dsv4, lid k of layer 3: is not 2 planes of 16 rows of 12 bytes");
    let mut long = fitting();
    long.kv.append(&mut planes(1, 2, 12));
    let error = with(Dsv4Memory::Adopted(long)).unwrap_err();
    assert_eq!(error.to_string(), "dsv4.planes: 1 that no layer has");
}
