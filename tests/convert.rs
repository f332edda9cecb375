//! Files made into files of another layout, type or version.
#![allow(missing_docs, reason = "a test")]

mod common;
mod place;

use std::fs;
use std::path::Path;

use common::{Fixture, SEQUENCE, assert_same_bytes, file_bytes, fixtures, seq_state};
use kvstate::convert::{ConvertParams, Converted, convert};
use kvstate::format::{Checkpoint, CheckpointSpan, GgmlType, Identity};
use kvstate::inspect::{Inspected, inspect};
use kvstate::session::{DraftOutcome, SlotContents, SlotLoadParams};
use kvstate::types::StateFlags;
use kvstate::{Context, ContextParams, Result};

const NONE: StateFlags = StateFlags::empty();
const PARTIAL: StateFlags = StateFlags::PARTIAL_ONLY;

fn converted(from: &Path, to: &Path, params: &ConvertParams) -> Result<Converted> {
    let input = fs::read(from).unwrap();
    let description = inspect(&input).unwrap();
    convert(from, Inspected { input: &input, description: &description }, to, params)
}

const TURNED: ConvertParams = ConvertParams {
    v_trans: Some(true),
    type_k: None,
    type_v: None,
    n_rot_k: None,
    n_rot_v: None,
    legacy_rotation: None,
};

/// Slot files of llama.cpp of which `filter` holds.
fn slots(filter: impl Fn(&Fixture) -> bool) -> Vec<Fixture> {
    fixtures().into_iter().filter(|f| f.path("slot").is_some() && filter(f)).collect()
}

fn fixture(name: &str) -> Fixture {
    fixtures().into_iter().find(|f| f.name == name).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn a_file_of_llama_cpp_turned_and_turned_back_is_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let (there, back) = (folder.path().join("there"), folder.path().join("back"));
    let mut n = 0;
    for f in slots(|f| f.version() == 4 && !f.name.contains("vq")) {
        let path = f.path("slot").unwrap();
        let is_transposed = f.name.contains("vtrans");
        let way = |v_trans| ConvertParams { v_trans: Some(v_trans), ..TURNED };
        converted(&path, &there, &way(!is_transposed)).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        converted(&there, &back, &way(is_transposed)).unwrap();
        assert_same_bytes(&fs::read(&back).unwrap(), &fs::read(&path).unwrap(), &f.name);
        let is_turned = fs::read(&there).unwrap() != fs::read(&back).unwrap();
        assert!(is_turned || f.sidecar.memory == "llama_memory_recurrent", "{}", f.name);
        n += 1;
    }
    assert!(n > 1, "{n} fixtures");
}

#[test]
fn a_file_may_be_converted_in_its_place() {
    let f = fixture("tiny2x64_kf16_vf16_n64_none");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slot");
    fs::copy(f.path("slot").unwrap(), &path).unwrap();
    converted(&path, &path, &TURNED).unwrap();
    converted(&path, &path, &ConvertParams { v_trans: Some(false), ..TURNED }).unwrap();
    assert_same_bytes(&fs::read(&path).unwrap(), &fs::read(f.path("slot").unwrap()).unwrap(), "twice");
}

#[test]
fn what_was_rounded_is_noted() {
    let f = fixture("tiny2x64_kf16_vf16_n64_none");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let params = ConvertParams { type_k: Some(GgmlType::Q8_0), ..TURNED };
    let notes = converted(&f.path("slot").unwrap(), &out, &params).unwrap().notes;
    assert_eq!(
        notes[notes.len() - 2..],
        ["section kv, K of 2 layers: f16 -> q8_0", "section kv, V of 2 layers: rows -> transposed"]
    );
}

#[test]
fn an_old_file_becomes_one_of_the_newest_version() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut n = 0;
    for f in slots(|f| f.version() < 4 && f.rotation().is_none()) {
        let path = f.path("slot").unwrap();
        converted(&path, &out, &ConvertParams::default()).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        let want = file_bytes(SEQUENCE, 4, &f.sidecar.tokens, &f.as_version_4()[8..]);
        assert_same_bytes(&fs::read(&out).unwrap(), &want, &f.name);
        n += 1;
    }
    assert!(n > 0, "no fixture");
}

#[test]
fn sequences_keep_their_names_and_streams_in_all_parts_of_a_slot_file() {
    let f = fixture("gemma3-dense_kf16_vf16_n64_none");
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("slot"), folder.path().join("out"));
    let blob = f.blob().unwrap();
    let loaded = |unified, seq_id| {
        let mut ctx = Context::new(ContextParams { n_seq_max: 4, unified, ..f.params() }).unwrap();
        ctx.state_seq_set_data(&blob, seq_id, NONE).unwrap();
        ctx
    };
    for (unified, [seq, draft_seq]) in [(true, [3, 1]), (false, [1, 3])] {
        let (mut target, mut draft) = (loaded(unified, seq), loaded(!unified, draft_seq));
        let partial = [seq_state(&mut target, seq, PARTIAL), seq_state(&mut draft, draft_seq, NONE)];
        let span = CheckpointSpan::new(64, 0, 63).unwrap();
        let contents = SlotContents {
            tokens: &[7; 64],
            checkpoints: vec![Checkpoint { span, target: &partial[0][..], draft: &partial[1], driver: b"" }],
            draft: Some((&mut draft, draft_seq)),
            driver: b"",
            identity: Identity::default(),
            sidecar: false,
        };
        target.slot_save(&path, seq, contents).unwrap();
        converted(&path, &out, &ConvertParams::default()).unwrap();
        assert_same_bytes(&fs::read(&out).unwrap(), &fs::read(&path).unwrap(), "as it was");
    }
}

#[test]
fn target_draft_and_checkpoints_of_a_slot_file_are_converted_and_the_rest_stays() {
    let f = fixture("gemma3-dense_kf16_vf16_n64_none");
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("slot"), folder.path().join("out"));
    let blob = f.blob().unwrap();
    let loaded = || {
        let mut ctx = f.context();
        ctx.state_seq_set_data(&blob, f.sidecar.seq_id, NONE).unwrap();
        ctx
    };
    let (mut target, mut draft) = (loaded(), loaded());
    let partial = seq_state(&mut target, 0, PARTIAL);
    let identity = Identity { model: b"gemma".to_vec(), salt: b"salt".to_vec(), metadata: b"meta".to_vec() };
    let span = CheckpointSpan::new(64, 0, 63).unwrap();
    let contents = SlotContents {
        tokens: &[7; 64],
        checkpoints: vec![Checkpoint { span, target: &partial[..], draft: &[], driver: b"then" }],
        draft: Some((&mut draft, 0)),
        driver: b"now",
        identity: identity.clone(),
        sidecar: false,
    };
    target.slot_save(&path, 0, contents).unwrap();

    let to = ConvertParams { type_k: Some(GgmlType::F32), v_trans: Some(true), ..ConvertParams::default() };
    let notes = converted(&path, &out, &to).unwrap().notes;
    assert!(notes.iter().any(|note| note.ends_with("f16 -> f32")), "{notes:?}");

    // Into the geometry that it is for, which refuses any other.
    let new = || -> Context {
        let mut params: ContextParams = f.params();
        for section in &mut params.sections {
            let kvstate::memory::SectionParams::Kv { kv, .. } = section else { continue };
            kv.v_trans = true;
            kv.layers.iter_mut().for_each(|layer| layer.k.ggml_type = GgmlType::F32);
        }
        Context::new(params).unwrap()
    };
    let (mut target, mut draft) = (new(), new());
    let params = SlotLoadParams {
        draft: Some((&mut draft, 0)),
        identity: identity.clone(),
        ..SlotLoadParams::default()
    };
    let slot = target.slot_load(&out, 0, params).unwrap();
    assert_eq!((slot.tokens, slot.notes, slot.identity), (vec![7; 64], Vec::new(), identity));
    assert_eq!(slot.driver.as_deref(), Some(&b"now"[..]));
    assert!(matches!(slot.draft, DraftOutcome::Restored(_)));
    let [checkpoint] = &slot.checkpoints[..] else { panic!("one checkpoint") };
    assert_eq!((checkpoint.span, &checkpoint.driver[..]), (span, &b"then"[..]));
    assert_eq!(checkpoint.target, seq_state(&mut target, 0, PARTIAL));

    // f32 holds every f16: the way back is exact.
    converted(&out, &out, &ConvertParams { type_k: Some(GgmlType::F16), v_trans: Some(false), ..to })
        .unwrap();
    assert_same_bytes(&fs::read(&out).unwrap(), &fs::read(&path).unwrap(), "the way back");
}

#[test]
fn what_cannot_be_converted_is_refused_and_the_old_file_stands() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    fs::write(&out, b"old").unwrap();
    let quantized = slots(|f| f.version() == 4 && f.name.contains("vq8_0")).remove(0).path("slot").unwrap();
    let plain = fixture("tiny2x64_kf16_vf16_n64_none");
    let table = [
        (quantized, TURNED, "kv.v_trans: V of layer 0 is 8 (q8_0), and quantised V cannot be transposed"),
        (
            plain.path("slot").unwrap(),
            ConvertParams { n_rot_k: Some(3), ..ConvertParams::default() },
            "n_rot_k: 3, which does not divide rows of 64",
        ),
        (
            plain.path("bin").unwrap(),
            TURNED,
            "from: a sequence state without the header of a file; only files are converted",
        ),
    ];
    for (from, params, text) in table {
        assert_eq!(converted(&from, &out, &params).unwrap_err().to_string(), text);
        assert_eq!(fs::read(&out).unwrap(), b"old");
    }
}
