//! States of other types, and of another rotation: refused by name, or converted within bounds.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "small numbers")]

mod common;
mod place;

use common::{file_of, seq_state, whole_state};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, LegacyRotation, RecurrentParams, SectionParams, TensorParams};
use kvstate::session::{SlotContents, SlotLoadParams};
use kvstate::types::StateFlags;
use kvstate::{Context, ContextParams, Status};
use proptest::prelude::*;

const NONE: StateFlags = StateFlags::empty();
const F16: GgmlType = GgmlType::F16;
const F32: GgmlType = GgmlType::F32;
const BF16: GgmlType = GgmlType::BF16;
const Q8_0: GgmlType = GgmlType::Q8_0;

/// Types and rotations of K and V.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    k: GgmlType,
    v: GgmlType,
    v_trans: bool,
    n_rot_k: u32,
    n_rot_v: u32,
}

impl Kind {
    const fn of(ggml_type: GgmlType) -> Self {
        Self { k: ggml_type, v: ggml_type, v_trans: false, n_rot_k: 0, n_rot_v: 0 }
    }
}

const N_EMBD: u32 = 128;

fn params(kind: Kind, convert_types: bool) -> ContextParams {
    let tensor = |ggml_type| TensorParams { ggml_type, n_embd: N_EMBD };
    let layer = LayerParams { k: tensor(kind.k), v: Some(tensor(kind.v)) };
    let Kind { v_trans, n_rot_k, n_rot_v, .. } = kind;
    let kv = KvParams { v_trans, n_rot_k, n_rot_v, n_embd_head_k: 128, ..KvParams::new(64, 2, layer) };
    ContextParams { convert_types, ..ContextParams::new(2, vec![kv.into()]) }
}

fn cache(kind: Kind, convert_types: bool) -> Context {
    place::context(params(kind, convert_types)).unwrap()
}

/// Rows of the type that hold `values`.
fn encoded(ggml_type: GgmlType, values: &[f32]) -> Vec<u8> {
    let size = ggml_type.row_size(u32::try_from(values.len()).unwrap()).unwrap();
    let mut row = vec![0; usize::try_from(size).unwrap()];
    ggml_type.row_from_f32(values, &mut row).unwrap();
    row
}

fn decoded(ggml_type: GgmlType, rows: &[u8]) -> Vec<f32> {
    let n = rows.len() / ggml_type.type_size() as usize * ggml_type.block_size() as usize;
    let mut values = vec![0.0; n];
    ggml_type.row_to_f32(rows, &mut values).unwrap();
    values
}

/// A state of rows whose K and V of each layer are `values`, as llama.cpp writes it.
fn state(kind: Kind, values: &[f32]) -> Vec<u8> {
    let n_cells = u32::try_from(values.len()).unwrap() / N_EMBD;
    let mut out: Vec<u8> = Vec::new();
    let words =
        |out: &mut Vec<u8>, words: &[u32]| words.iter().for_each(|word| out.extend(word.to_le_bytes()));
    words(&mut out, &[0xaf14_3cd8, 0, 1, n_cells]);
    (0..n_cells).for_each(|pos| words(&mut out, &[pos, 1, 0]));
    words(&mut out, &[0, 2, kind.n_rot_k, kind.n_rot_v]);
    for ggml_type in [kind.k, kind.k, kind.v, kind.v] {
        out.extend(ggml_type.as_i32().to_le_bytes());
        out.extend(ggml_type.row_size(N_EMBD).unwrap().to_le_bytes());
        out.extend(encoded(ggml_type, values));
    }
    out
}

/// The values of the four tensors of a state of rows.
fn values_of(kind: Kind, state: &[u8], n_cells: usize) -> [Vec<f32>; 4] {
    let mut at = 16 + 12 * n_cells + 16;
    [kind.k, kind.k, kind.v, kind.v].map(|ggml_type| {
        let size = usize::try_from(ggml_type.row_size(N_EMBD).unwrap()).unwrap() * n_cells;
        let rows = &state[at + 12..at + 12 + size];
        at += 12 + size;
        decoded(ggml_type, rows)
    })
}

fn wave(n_cells: usize) -> Vec<f32> {
    (0..n_cells * N_EMBD as usize).map(|i| ((i * 37 % 1009) as f32 - 504.0) / 64.0).collect()
}

/// The orthonormal Walsh-Hadamard transform by its definition.
fn hadamard(x: &[f32], n: usize) -> Vec<f32> {
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let block = |x: &[f32]| -> Vec<f32> {
        let sum = |i: usize| (0..n).map(|j| f64::from(x[j]) * sign(i, j)).sum::<f64>();
        (0..n).map(|i| (sum(i) / (n as f64).sqrt()) as f32).collect()
    };
    x.chunks(n).flat_map(block).collect()
}

/// What a value of a block may be off by after a way from one type to the other, as docs/semantics.md says.
fn bound(to: GgmlType, largest: f32, x: f32) -> f32 {
    match to {
        F32 => 0.0,
        F16 => (x.abs() / 2048.0).max(2.0_f32.powi(-25)),
        BF16 => x.abs() / 256.0,
        Q8_0 => largest / 127.0 * 0.5 + largest / 2000.0,
        GgmlType::Q5_0 => largest / 16.0 * 1.01,
        GgmlType::Q4_0 => largest / 8.0 * 1.01,
        other => panic!("no bound of {other}"),
    }
}

const PAIRED: [GgmlType; 6] = [F32, F16, BF16, Q8_0, GgmlType::Q5_0, GgmlType::Q4_0];

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn values_stay_within_the_bound_of_the_type_that_they_go_to(
        from in proptest::sample::select(&PAIRED[..]),
        to in proptest::sample::select(&PAIRED[..]),
        scale in -6..8_i32,
        values in prop::collection::vec(-1.0_f32..1.0, 3 * N_EMBD as usize),
    ) {
        let values: Vec<f32> = values.iter().map(|x| x * 2.0_f32.powi(scale)).collect();
        let blob = state(Kind::of(from), &values);
        let mut ctx = cache(Kind::of(to), true);
        prop_assert_eq!(ctx.state_seq_set_data(&blob, 0, NONE).unwrap(), blob.len());
        let got = values_of(Kind::of(to), &seq_state(&mut ctx, 0, NONE), 3);
        let kept = decoded(from, &encoded(from, &values));
        for tensor in got {
            for (kept, got) in kept.chunks(32).zip(tensor.chunks(32)) {
                let largest = kept.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                for (x, got) in kept.iter().zip(got) {
                    prop_assert!((x - got).abs() <= bound(to, largest, *x), "{from} -> {to}: {x} became {got}");
                }
            }
        }
    }
}

#[test]
fn what_is_written_is_what_ggml_would_have_quantised() {
    let values = wave(5);
    for from in [F32, F16, BF16] {
        let kept = decoded(from, &encoded(from, &values));
        for to in GgmlType::KV.into_iter().filter(|&to| to != from) {
            let mut ctx = cache(Kind::of(to), true);
            ctx.state_seq_set_data(&state(Kind::of(from), &values), 0, NONE).unwrap();
            assert_eq!(seq_state(&mut ctx, 0, NONE), state(Kind::of(to), &kept), "{from} -> {to}");
        }
    }
}

#[test]
fn q8_0_rounds_half_away_from_zero_by_a_scale_of_a_127th_of_the_largest() {
    // Scale 1: the quants are the values, rounded.
    let mut values = vec![0.0; N_EMBD as usize];
    values[..6].copy_from_slice(&[127.0, 0.5, -0.5, 1.49, -2.5, 3.0]);
    let mut ctx = cache(Kind::of(Q8_0), true);
    ctx.state_seq_set_data(&state(Kind::of(F32), &values), 0, NONE).unwrap();
    let first = 16 + 12 + 16 + 12;
    let row = seq_state(&mut ctx, 0, NONE)[first..first + 8].to_vec();
    assert_eq!(row, [0x00, 0x3c, 127, 1, 255, 1, 253, 3], "an f16 of 1.0, then i8");
}

#[test]
fn a_value_that_f16_does_not_reach_becomes_infinite_as_in_ggml() {
    let mut values = vec![1.0; N_EMBD as usize];
    values[..2].copy_from_slice(&[65519.0, -65520.0]);
    let mut ctx = cache(Kind::of(F16), true);
    ctx.state_seq_set_data(&state(Kind::of(F32), &values), 0, NONE).unwrap();
    let [k, ..] = values_of(Kind::of(F16), &seq_state(&mut ctx, 0, NONE), 1);
    assert_eq!(k[..3], [65504.0, f32::NEG_INFINITY, 1.0]);
}

#[test]
fn what_is_exact_in_both_types_comes_back_byte_for_byte() {
    for (small, large) in [(F16, F32), (BF16, F32)] {
        let blob = state(Kind::of(small), &wave(9));
        let mut wide = cache(Kind { v_trans: true, ..Kind::of(large) }, true);
        wide.state_seq_set_data(&blob, 0, NONE).unwrap();
        let widened = seq_state(&mut wide, 0, NONE);
        let mut ctx = cache(Kind::of(small), true);
        ctx.state_seq_set_data(&widened, 0, NONE).unwrap();
        assert_eq!(seq_state(&mut ctx, 0, NONE), blob, "{small} -> {large} -> {small}");
    }
}

#[test]
fn by_default_other_types_and_rotations_are_refused_with_the_way_to_allow_them() {
    let table = [
        (
            Kind::of(F16),
            Kind { k: Q8_0, ..Kind::of(F16) },
            "mismatched key type: the state has 1 (f16), the cache 8 (q8_0) (section kv, layer 0; convert_types allows it)",
        ),
        (
            Kind::of(Q8_0),
            Kind { k: Q8_0, v_trans: true, ..Kind::of(F16) },
            "mismatched value type: the state has 8 (q8_0), the cache 1 (f16) (section kv, layer 0; convert_types allows it)",
        ),
        (
            Kind { n_rot_k: 64, ..Kind::of(Q8_0) },
            Kind::of(Q8_0),
            "incompatible key rotation: the state has 64, the cache 0 (section kv; convert_types allows it)",
        ),
        (
            Kind::of(Q8_0),
            Kind { n_rot_v: 64, ..Kind::of(Q8_0) },
            "incompatible value rotation: the state has 0, the cache 64 (section kv; convert_types allows it)",
        ),
    ];
    for (from, to, text) in table {
        let blob = state(from, &wave(2));
        let mut ctx = cache(to, false);
        ctx.state_seq_set_data(&blob, 0, NONE).unwrap_err();
        let before = whole_state(&mut ctx);
        let error = ctx.state_seq_set_data(&blob, 0, NONE).unwrap_err();
        assert_eq!(error.to_string(), text);
        assert_eq!(whole_state(&mut ctx), before);
        let mut ctx = cache(to, true);
        assert_eq!(ctx.state_seq_set_data(&blob, 0, NONE).unwrap(), blob.len(), "{text}");
    }
}

#[test]
fn types_that_hold_no_k_are_refused_even_where_types_are_converted() {
    let mut blob = state(Kind::of(F16), &wave(1));
    blob[16 + 12 + 16] = 24; // i8
    let error = cache(Kind::of(F16), true).state_seq_set_data(&blob, 0, NONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "mismatched key type: the state has 24 (i8), the cache 1 (f16) (section kv, layer 0)"
    );
}

#[test]
fn a_row_size_of_another_type_is_compared_with_that_of_its_own() {
    let mut blob = state(Kind::of(F16), &wave(1));
    blob[16 + 12 + 16 + 4] = 2;
    let error = cache(Kind::of(Q8_0), true).state_seq_set_data(&blob, 0, NONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "mismatched key row size: the state has 258, the cache 256 (section kv, layer 0)"
    );
}

#[test]
fn rotations_that_are_none_or_do_not_fit_a_row_are_refused() {
    for n_rot in [3, 48, 256, u32::MAX] {
        let blob = state(Kind { n_rot_k: n_rot, ..Kind::of(Q8_0) }, &wave(1));
        let error = cache(Kind::of(Q8_0), true).state_seq_set_data(&blob, 0, NONE).unwrap_err();
        assert_eq!(error.status(), Status::Mismatch);
        let text = error.to_string();
        assert!(text.starts_with(&format!("incompatible key rotation: the state has {n_rot}, ")), "{text}");
    }
}

#[test]
fn a_rotated_row_is_turned_back_and_a_plain_one_is_rotated() {
    let values = wave(3);
    let plain = Kind::of(F32);
    let rotated = Kind { n_rot_k: 128, n_rot_v: 64, ..plain };
    for (from, to) in [(plain, rotated), (rotated, plain)] {
        let mut ctx = cache(to, true);
        ctx.state_seq_set_data(&state(from, &values), 0, NONE).unwrap();
        let [k, _, v, _] = values_of(to, &seq_state(&mut ctx, 0, NONE), 3);
        for (got, want) in [(k, hadamard(&values, 128)), (v, hadamard(&values, 64))] {
            let off = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            assert!(off < 1e-5, "off by {off}");
        }
    }
}

#[test]
fn rows_of_one_rotation_are_not_turned_on_the_way_to_another_type() {
    let values = wave(3);
    let of = |ggml_type| Kind { n_rot_k: 128, n_rot_v: 64, ..Kind::of(ggml_type) };
    let mut ctx = cache(of(Q8_0), true);
    ctx.state_seq_set_data(&state(of(F16), &values), 0, NONE).unwrap();
    assert_eq!(seq_state(&mut ctx, 0, NONE), state(of(Q8_0), &decoded(F16, &encoded(F16, &values))));
}

#[test]
fn an_old_file_is_turned_by_the_rotation_that_is_stated() {
    let values = wave(2);
    let mut version_3 = state(Kind::of(Q8_0), &values);
    version_3.drain(16 + 24 + 8..16 + 24 + 16);
    let file = file_of(&common::file_bytes(SEQUENCE, 3, &[], &version_3[8..]));
    let load = |stated: Option<LegacyRotation>| {
        let params = ContextParams { legacy_rotation: stated, ..params(Kind::of(F32), true) };
        let mut ctx = place::context(params).unwrap();
        ctx.state_seq_load_file(file.path(), 0, 0).map(|_| seq_state(&mut ctx, 0, NONE))
    };
    assert_eq!(load(None).unwrap_err().status(), Status::RotationUnstated);
    let kept = decoded(Q8_0, &encoded(Q8_0, &values));
    let plain = load(Some(LegacyRotation::Plain)).unwrap();
    assert_eq!(plain, state(Kind::of(F32), &kept));
    let [k, _, v, _] = values_of(Kind::of(F32), &load(Some(LegacyRotation::Rotated)).unwrap(), 2);
    for (got, want) in [(k, hadamard(&kept, 128)), (v, hadamard(&kept, 64))] {
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-5));
    }
}

#[test]
fn recurrent_states_are_converted_row_by_row() {
    let section = |ggml_type| {
        let mut recurrent = RecurrentParams::new(2, 32, 64);
        for layer in &mut recurrent.layers {
            layer.r = layer.r.map(|r| TensorParams { ggml_type, ..r });
            layer.s = layer.s.map(|s| TensorParams { ggml_type, ..s });
        }
        SectionParams::from(recurrent)
    };
    let new = |ggml_type, convert_types| {
        let params = ContextParams::new(1, vec![section(ggml_type)]);
        place::context(ContextParams { convert_types, ..params }).unwrap()
    };
    let blob = |ggml_type: GgmlType| {
        let mut out: Vec<u8> = Vec::new();
        for word in [0xaf14_3cd8_u32, 0, 1, 7, 0, 0, 2] {
            out.extend(word.to_le_bytes());
        }
        for n in [32, 32, 64, 64] {
            out.extend(ggml_type.as_i32().to_le_bytes());
            out.extend(ggml_type.row_size(n).unwrap().to_le_bytes());
            out.extend(encoded(ggml_type, &wave(1)[..n as usize]));
        }
        out
    };
    let error = new(F16, false).state_seq_set_data(&blob(F32), 0, NONE).unwrap_err();
    assert!(error.to_string().contains("convert_types allows it"), "{error}");
    for (from, to) in [(F32, F16), (F16, F32), (F32, BF16)] {
        let mut ctx = new(to, true);
        ctx.state_seq_set_data(&blob(from), 0, NONE).unwrap();
        assert_eq!(seq_state(&mut ctx, 0, NONE), blob(to), "{from} -> {to}");
    }
}

const SEQUENCE: u32 = common::SEQUENCE;

#[test]
fn a_slot_file_says_what_was_converted_and_draft_and_target_follow_one_rule() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slot");
    let loaded =
        |ctx: &mut Context| ctx.state_seq_set_data(&state(Kind::of(F16), &wave(4)), 0, NONE).unwrap();
    let (mut target, mut draft) = (cache(Kind::of(F16), false), cache(Kind::of(F16), false));
    loaded(&mut target);
    loaded(&mut draft);
    let contents =
        SlotContents { tokens: &[1, 2, 3, 4], draft: Some((&mut draft, 0)), ..SlotContents::default() };
    target.slot_save(&path, 0, contents).unwrap();

    let other = Kind { k: Q8_0, n_rot_k: 128, v_trans: true, ..Kind::of(F16) };
    let mut refusing = cache(other, false);
    let error = refusing.slot_load(&path, 1, SlotLoadParams::default()).unwrap_err();
    assert_eq!(error.status(), Status::Mismatch);
    assert!(error.to_string().contains("convert_types allows it"), "{error}");

    let (mut target, mut draft) = (cache(other, true), cache(Kind::of(Q8_0), true));
    let params = SlotLoadParams { draft: Some((&mut draft, 1)), ..SlotLoadParams::default() };
    let slot = target.slot_load(&path, 1, params).unwrap();
    assert_eq!(
        slot.notes,
        [
            "section kv, K of 2 layers: f16, plain -> q8_0, rotated by 128",
            "section kv, V of 2 layers: rows -> transposed",
            "draft, section kv, K of 2 layers: f16 -> q8_0",
            "draft, section kv, V of 2 layers: f16 -> q8_0",
        ]
    );
    assert_eq!(draft.seq_pos_max(1).unwrap(), 3);
}
