//! What is in a file, read without a context: every state that llama.cpp wrote is what its sidecar says.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::cast_possible_truncation, reason = "small files")]

mod common;
mod memories;
#[path = "recurrence/mod.rs"]
mod recurrence;
mod slots;

use std::fs;
use std::ops::{ControlFlow, RangeInclusive};

use common::{Fixture, Section, fixtures, whole_contexts};
use kvstate::format::{Integrity, Part, PartKind, SectionGeometry};
use kvstate::inspect::{
    self, Basis, CellExtLayout, Description, Diff, Inspected, Kind, Outcome, SectionDiff, Shape, Tensor,
    TokenDiff, Verification,
};
use kvstate::memory::{KvParams, SectionKind};
use kvstate::session::{SlotContents, SlotLoadParams, Verify};
use kvstate::storage::ProgressCallback;
use kvstate::types::{Pos, SeqId, TOKEN_NULL};
use kvstate::{Context, Error};
use slots::support::{self, NONE, context, decode, kv, place, save};
use slots::{DRIVER, TOKENS, checkpoint_states, identity, save_slot, target};
use tempfile::NamedTempFile;

fn fixture(name: &str) -> Fixture {
    fixtures().into_iter().find(|f| f.name == name).unwrap_or_else(|| panic!("no {name}"))
}

fn described(bytes: &[u8], name: &str) -> Description {
    let found = inspect::inspect(bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(
        matches!(found.state.basis, Basis::Guessed { .. }),
        "{name}: {:?}, sections {:?}",
        found.state.basis,
        found.state.sections
    );
    found
}

/// Type and bytes of a row of the tensors of that name.
fn rows(tensors: &[Tensor], tag: [u8; 4]) -> Vec<(i32, u64)> {
    let named = tensors.iter().filter(|tensor| tensor.tag.0 == tag);
    named.map(|tensor| (tensor.ggml_type.as_i32(), tensor.row_size)).collect()
}

/// The layers of the tensors of that name where they are known, with their rows.
fn check_layers(tensors: &[Tensor], tag: [u8; 4], expected: &[(usize, i32, u64)], name: &str) {
    let found: Vec<_> = tensors.iter().filter(|tensor| tensor.tag.0 == tag).collect();
    assert_eq!(found.len(), expected.len(), "{name}");
    for (tensor, &(layer, ggml_type, row_size)) in found.iter().zip(expected) {
        assert_eq!((tensor.ggml_type.as_i32(), tensor.row_size), (ggml_type, row_size), "{name}");
        assert!(tensor.layer.is_none_or(|found| found as usize == layer), "{name}: {tensor:?}");
    }
}

/// Compares a section with what the sidecar says of it; `cells` unless the state is of more than one sequence.
fn check_section(found: &inspect::Section, expected: &Section, is_whole: bool, name: &str) {
    let cells: Vec<_> = found.streams.iter().map(|stream| stream.n_cells).collect();
    match &found.shape {
        Shape::Attention { cell_ext, data } => {
            assert!(expected.is_attention(), "{name}");
            if !is_whole {
                assert_eq!(cells, expected.cells, "{name}: cells");
            }
            let Some(data) = data else { return assert_eq!(found.n_cells(), 0, "{name}") };
            assert_eq!(!cell_ext.is_empty(), expected.cell_ext, "{name}: ext");
            let tensors = &found.streams.iter().find(|stream| stream.n_cells > 0).unwrap().tensors;
            if expected.n_layer > 0 || expected.v_trans.is_some() {
                assert_eq!(data.n_layer as usize, expected.n_layer, "{name}: layers");
                assert_eq!(Some(u32::from(data.v_trans)), expected.v_trans, "{name}: v_trans");
                assert_eq!((data.n_rot_k, data.n_rot_v), (expected.n_rot_k, expected.n_rot_v), "{name}");
                assert_eq!(
                    rows(tensors, *b"K   "),
                    expected.k_type_rowbytes.clone().unwrap_or_default(),
                    "{name}"
                );
                assert_eq!(
                    rows(tensors, *b"V   "),
                    expected.v_type_rowbytes.clone().unwrap_or_default(),
                    "{name}"
                );
                assert!(
                    tensors.iter().all(|t| t.transposed == (data.v_trans && t.tag.0 == *b"V   ")),
                    "{name}"
                );
            }
        }
        Shape::Recurrent { n_layer } => {
            assert_eq!(expected.kind, "recurrent", "{name}");
            if !is_whole {
                assert_eq!(cells, expected.cells, "{name}: states");
            }
            assert_eq!(*n_layer as usize, expected.n_layer, "{name}");
            let tensors = &found.streams[0].tensors;
            check_layers(tensors, *b"R   ", &expected.r_layer_type_rowbytes, name);
            check_layers(tensors, *b"S   ", &expected.s_layer_type_rowbytes, name);
            let p: Vec<_> = expected.p_layer_rowbytes.iter().map(|&(_, row_size)| row_size).collect();
            assert_eq!(rows(tensors, *b"P   ").iter().map(|row| row.1).collect::<Vec<_>>(), p, "{name}");
        }
        shape => panic!("{name}: {shape:?}"),
    }
}

/// Compares the compressed half of a DSV4 memory with the sidecar's sections of it.
fn check_dsv4(found: &inspect::Section, expected: &[Section], name: &str) {
    let Shape::Dsv4 { caches, compressors } = &found.shape else { panic!("{name}: {:?}", found.shape) };
    let of_kind = |kind| expected.iter().filter(move |section| section.kind == kind);
    let caches: Vec<_> = caches.iter().map(|cache| cache.name.to_lowercase()).collect();
    let expected_caches: Vec<_> = of_kind("dsv4_k_cache").map(|section| section.name.clone()).collect();
    assert_eq!(caches, expected_caches, "{name}");
    let states = compressors.iter().map(|c| (c.name.to_lowercase(), c.ratio, c.state_size, c.n_embd_state));
    let expected_states =
        of_kind("dsv4_compressor").map(|s| (s.name.clone(), s.ratio, s.state_size, s.n_embd_state));
    assert!(states.eq(expected_states), "{name}");
    let mut tensors = found.streams[0].tensors.iter();
    for section in expected.iter().filter(|section| !section.layers.is_empty()) {
        for layer in &section.layers {
            for shape in &layer[1..] {
                let tensor = tensors.next().unwrap_or_else(|| panic!("{name}: too few tensors"));
                assert_eq!(u64::from(tensor.layer.unwrap()), layer[0].as_u64().unwrap(), "{name}");
                assert_eq!(tensor.row_size, shape["rowbytes"].as_u64().unwrap(), "{name}");
                assert_eq!(tensor.n_rows, shape["rows"].as_u64().unwrap(), "{name}");
                assert_eq!(tensor.n_embd(), shape["ne0"].as_u64().unwrap(), "{name}");
            }
        }
    }
    assert_eq!(tensors.next(), None, "{name}");
}

fn check(found: &Description, f: &Fixture, is_whole: bool, name: &str) {
    let expected = &f.sidecar.sections;
    let of_dsv4 = |section: &&Section| section.kind.starts_with("dsv4_");
    let plain: Vec<_> = expected.iter().filter(|section| !of_dsv4(section)).collect();
    let dsv4: Vec<_> = expected.iter().filter(of_dsv4).cloned().collect();
    let sections = &found.state.sections;
    assert_eq!(sections.len(), plain.len() + usize::from(!dsv4.is_empty()), "{name}: {sections:?}");
    for (section, expected) in sections.iter().zip(&plain) {
        check_section(section, expected, is_whole, name);
    }
    if !dsv4.is_empty() {
        assert!(found.state.dsv4_mode.is_some(), "{name}");
        check_dsv4(&sections[plain.len()], &dsv4, name);
    }
    // Versions differ in the data of attention alone; what is the same in all counts as the newest.
    let has_data =
        |section: &inspect::Section| matches!(section.shape, Shape::Attention { data: Some(_), .. });
    let has_ext = |section: &inspect::Section| matches!(section.shape, Shape::Attention { cell_ext, .. } if cell_ext != CellExtLayout::None);
    if found.version.is_some()
        || (sections.iter().any(has_data) && (f.version() == 4 || sections.iter().any(has_ext)))
    {
        assert_eq!(found.state.version.seq_version(), f.version(), "{name}: version");
    }
    assert_eq!(found.state.bytes.end, found.bytes, "{name}");
}

#[test]
fn a_blob_is_what_its_sidecar_says() {
    let mut n = 0;
    for f in fixtures() {
        let Some(blob) = f.blob() else { continue };
        let found = described(&blob, &f.name);
        assert_eq!((found.kind, found.seq_id), (Kind::SequenceState, Some(f.sidecar.seq_id)), "{}", f.name);
        check(&found, &f, false, &f.name);
        n += 1;
    }
    println!("{n} blobs");
    assert!(n > 0);
}

#[test]
fn a_sequence_file_is_what_its_sidecar_says() {
    let mut n = 0;
    for f in fixtures() {
        let Some(path) = f.path("slot") else { continue };
        let bytes = fs::read(path).unwrap();
        let found = described(&bytes, &f.name);
        assert_eq!((found.kind, found.version), (Kind::SequenceFile, Some(f.version())), "{}", f.name);
        assert!(found.tokens(&bytes).eq(f.sidecar.tokens.iter().copied()), "{}", f.name);
        check(&found, &f, false, &f.name);
        n += 1;
    }
    println!("{n} sequence files");
    assert!(n > 0);
}

#[test]
fn a_whole_context_is_what_the_sidecar_of_its_sequences_says() {
    let mut n = 0;
    for (suffix, kind) in [("_whole.ctx", Kind::ContextState), ("_session.bin", Kind::SessionFile)] {
        for (path, f) in whole_contexts(suffix) {
            let (bytes, name) = (fs::read(&path).unwrap(), path.display().to_string());
            let found = described(&bytes, &name);
            assert_eq!((found.kind, found.arch.as_deref()), (kind, Some(&*f.sidecar.arch)), "{name}");
            check(&found, &f, true, &name);
            n += 1;
        }
    }
    println!("{n} whole contexts");
    assert!(n > 0);
}

// Cells

/// The first stream with cells of a section.
fn cells<'a>(found: &Description, section: usize, input: &'a [u8]) -> inspect::Cells<'a> {
    let section = &found.state.sections[section];
    section.cells(section.streams.iter().find(|stream| stream.n_cells > 0).unwrap(), input)
}

fn runs(found: &Description, section: usize, input: &[u8]) -> Vec<(RangeInclusive<Pos>, u32, Vec<SeqId>)> {
    let runs = cells(found, section, input).runs();
    runs.map(|run| (run.pos, run.cell, run.seq_ids)).collect()
}

#[test]
fn a_hole_in_a_sequence_ends_a_run() {
    let f = fixture("tiny2x64_kf16_vf16_hole_none");
    let blob = f.blob().unwrap();
    let found = described(&blob, &f.name);
    assert_eq!(runs(&found, 0, &blob), [(0..=19, 0, vec![0]), (30..=63, 20, vec![0])]);
}

#[test]
fn a_cell_has_its_place_in_the_image_and_its_token() {
    let f = fixture("v4_twins/qwen2vl_mrope2d_none");
    let blob = f.blob().unwrap();
    let found = described(&blob, &f.name);
    let ext: Vec<_> = cells(&found, 0, &blob).map(|cell| (cell.pos, cell.ext.unwrap())).collect();
    assert_eq!(ext.len(), 40);
    // Text, then an image: it has one position, columns and rows, and no token.
    assert_eq!(ext[0].0, 0);
    let image: Vec<_> = ext.iter().filter(|(_, (.., tok))| *tok == TOKEN_NULL).map(|(pos, _)| *pos).collect();
    assert!(!image.is_empty() && image.iter().all(|pos| *pos == image[0]), "{ext:?}");
}

#[test]
fn cells_of_a_whole_context_name_every_sequence_that_has_them() {
    let mut ctx = context(3, &[kv(16)]);
    decode(&mut ctx, 0, 0..4);
    ctx.seq_cp(0, 2, 1, 3).unwrap();
    decode(&mut ctx, 1, [7]);
    let state = whole(&mut ctx);
    let found = described(&state, "shared cells");
    let expected = [(0..=0, 0, vec![0]), (1..=2, 1, vec![0, 2]), (3..=3, 3, vec![0]), (7..=7, 4, vec![1])];
    assert_eq!(runs(&found, 0, &state), expected);
}

fn whole(ctx: &mut Context) -> Vec<u8> {
    let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
    ctx.state_get_data(&mut state).unwrap();
    state
}

// Every memory

#[test]
fn states_of_every_memory_are_told_from_their_bytes_alone() {
    for kind in &memories::KINDS {
        let mut ctx = memories::context(kind, 1);
        let sections: Vec<_> = (0..ctx.n_section()).map(|i| ctx.section_kind(i).unwrap()).collect();
        for state in [save(&mut ctx, 0, NONE), whole(&mut ctx)] {
            let found = described(&state, kind.name);
            let kinds: Vec<_> = found.state.sections.iter().map(inspect::Section::kind).collect();
            let expected: Vec<_> = sections
                .iter()
                .map(|kind| match kind {
                    SectionKind::Kv => "attention",
                    SectionKind::Recurrent => "recurrent",
                    SectionKind::Dsv4 => "dsv4",
                    kind => panic!("{kind:?}"),
                })
                .collect();
            assert_eq!(kinds, expected, "{}", kind.name);
            assert_eq!(found.state.bytes.end, state.len() as u64, "{}", kind.name);
        }
    }
}

#[test]
fn a_slot_file_of_every_memory_is_read_by_its_geometry() {
    for kind in &memories::KINDS {
        let mut ctx = memories::context(kind, 1);
        let file = NamedTempFile::new().unwrap();
        ctx.slot_save(file.path(), 0, SlotContents { tokens: &TOKENS, ..SlotContents::default() }).unwrap();
        let bytes = fs::read(file.path()).unwrap();
        let found = inspect::inspect(&bytes).unwrap();
        assert_eq!(found.state.basis, Basis::Recorded, "{}", kind.name);
        let geometry = &found.appendices.integrity.as_ref().unwrap().geometry;
        assert_eq!(found.state.sections.len(), geometry.len(), "{}", kind.name);
        for (section, recorded) in found.state.sections.iter().zip(geometry) {
            assert_eq!(section.kind(), SectionGeometry::kind_name(recorded.kind), "{}", kind.name);
            let held = section.streams.iter().flat_map(|stream| &stream.tensors);
            let mut named: Vec<_> = held.map(|tensor| (tensor.tag.0, tensor.layer.unwrap())).collect();
            let mut expected: Vec<_> =
                recorded.tensors.iter().map(|tensor| (tensor.tag.0, tensor.layer)).collect();
            if section.kind() == "dsv4" {
                named.sort_unstable();
                expected.sort_unstable();
            }
            assert_eq!(named, expected, "{}", kind.name);
        }
    }
}

// Slot files

/// A slot file with everything.
fn slot_file() -> Vec<u8> {
    let file = NamedTempFile::new().unwrap();
    save_slot(file.path());
    fs::read(file.path()).unwrap()
}

#[test]
fn a_slot_file_shows_its_parts_checkpoints_draft_and_identity() {
    let bytes = slot_file();
    let found = inspect::inspect(&bytes).unwrap();
    assert_eq!(
        (found.kind, found.version, &found.state.basis),
        (Kind::SequenceFile, Some(4), &Basis::Recorded)
    );
    assert!(found.tokens(&bytes).eq(TOKENS));
    let appendices = &found.appendices;
    let kinds: Vec<_> = appendices.parts.iter().map(|(kind, _)| *kind).collect();
    let [head, state] = [PartKind::HEAD, PartKind::STATE];
    assert_eq!(kinds, [head, state, PartKind::CHECKPOINTS, PartKind::DRAFT, PartKind::INTEGRITY]);
    let ends: Vec<_> = appendices.parts.iter().map(|(_, range)| range.end).collect();
    let starts: Vec<_> = appendices.parts.iter().map(|(_, range)| range.start).collect();
    assert_eq!((starts[0], &starts[1..]), (0, &ends[..4]), "without a gap");
    assert_eq!(*ends.last().unwrap(), bytes.len() as u64);
    assert_eq!(found.state.bytes, appendices.parts[1].1);

    let spans: Vec<_> =
        appendices.checkpoints.iter().map(|c| (c.span.n_tokens(), c.span.pos_max())).collect();
    assert_eq!(spans, [(4, 3), (8, 7), (12, 11)]);
    let states = checkpoint_states(&mut target());
    let at = |range: &std::ops::Range<u64>| &bytes[range.start as usize..range.end as usize];
    assert_eq!(at(&appendices.checkpoints[2].target), states[2].1);
    assert_eq!(at(&appendices.checkpoints[0].draft), b"draft");
    let draft = appendices.draft.as_ref().unwrap();
    assert_eq!(at(&draft.driver), DRIVER);
    let of_draft = inspect::blob(at(&draft.draft)).unwrap();
    assert_eq!(runs(&of_draft, 0, at(&draft.draft)), [(0..=11, 0, vec![1])]);
    assert_eq!(appendices.integrity.as_ref().unwrap().identity, identity());
    assert_eq!(appendices.damage, []);
}

#[test]
fn cells_with_an_ext_are_read_as_the_geometry_says() {
    for cell_ext in [false, true] {
        let mut ctx = context(1, &[KvParams { cell_ext, ..kv(8) }]);
        decode(&mut ctx, 0, 0..3);
        let file = NamedTempFile::new().unwrap();
        ctx.slot_save(file.path(), 0, SlotContents::default()).unwrap();
        let bytes = fs::read(file.path()).unwrap();
        let found = inspect::inspect(&bytes).unwrap();
        let recorded = &found.appendices.integrity.as_ref().unwrap().geometry[0];
        assert_eq!(recorded.setting(SectionGeometry::CELL_EXT), Some(if cell_ext { 12 } else { 0 }));
        assert_eq!(found.state.basis, Basis::Recorded);
        assert_eq!(
            cells(&found, 0, &bytes).filter(|cell| cell.ext.is_some()).count(),
            if cell_ext { 3 } else { 0 }
        );
    }
}

#[test]
fn a_slot_file_of_another_cell_ext_is_refused_by_name() {
    let mut with = context(1, &[KvParams { cell_ext: true, ..kv(8) }]);
    decode(&mut with, 0, 0..3);
    let file = NamedTempFile::new().unwrap();
    with.slot_save(file.path(), 0, SlotContents::default()).unwrap();
    let error = context(1, &[kv(8)]).slot_load(file.path(), 0, SlotLoadParams::default()).unwrap_err();
    assert!(
        error.to_string().contains("setting: the state has 12, the cache 0 (section kv, CEXT)"),
        "{error}"
    );
}

#[test]
fn appendices_without_a_list_are_found_one_after_another() {
    let whole = slot_file();
    let integrity = inspect::inspect(&whole).unwrap().appendices.parts[4].1.start as usize;
    // As a server writes it that knows no integrity.
    let found = described(&whole[..integrity], "without integrity");
    let kinds: Vec<_> = found.appendices.parts.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [PartKind::CHECKPOINTS, PartKind::DRAFT]);
    assert_eq!((found.appendices.checkpoints.len(), found.appendices.integrity), (3, None));

    // Something behind the integrity, which is met on the way.
    let found = inspect::inspect(&[&whole[..], b"more"].concat()).unwrap();
    assert_eq!(found.appendices.parts.len(), 5);
    assert!(found.appendices.draft.is_some());
}

// Verification

fn outcome_of(found: &Verification, kind: PartKind) -> &Outcome {
    &found.parts.iter().find(|part| part.part == Some(kind)).unwrap_or_else(|| panic!("no {kind}")).outcome
}

#[test]
fn a_whole_slot_file_verifies_as_far_as_it_was_asked() {
    let bytes = slot_file();
    let full = inspect::verify(&bytes, Verify::Full, None).unwrap();
    assert!(full.has_checksums && full.parts.iter().all(|part| part.outcome == Outcome::Whole), "{full:?}");
    let headers = inspect::verify(&bytes, Verify::Headers, None).unwrap();
    assert_eq!(outcome_of(&headers, PartKind::HEAD), &Outcome::Whole);
    assert_eq!(outcome_of(&headers, PartKind::STATE), &Outcome::Plausible);
    assert!(headers.is_whole());
}

#[test]
fn a_flip_in_any_byte_damages_the_part_that_it_lies_in_and_no_other() {
    let mut bytes = slot_file();
    let parts = inspect::inspect(&bytes).unwrap().appendices.parts;
    for at in 0..bytes.len() {
        let kind = parts.iter().find(|(_, range)| range.contains(&(at as u64))).unwrap().0;
        bytes[at] ^= 1 << (at % 8);
        match inspect::verify(&bytes, Verify::Full, None) {
            // The checksums may be the ones that are damaged; then the structure is all there is.
            Ok(found) if kind == PartKind::INTEGRITY => {
                let others = found.parts.iter().filter(|part| part.part != Some(PartKind::INTEGRITY));
                assert!(others.clone().all(|part| part.outcome == Outcome::Plausible), "{at}: {found:?}");
                assert!(!found.is_whole(), "{at}: {found:?}");
            }
            Ok(found) => {
                for part in &found.parts {
                    let is_damaged = matches!(part.outcome, Outcome::Damaged(_));
                    assert_eq!(is_damaged, part.part == Some(kind), "{at}: {found:?}");
                }
            }
            Err(error) => panic!("{at}: {error}"),
        }
        bytes[at] ^= 1 << (at % 8);
    }
}

#[test]
fn a_truncated_slot_file_is_whole_only_where_a_shorter_one_would_end() {
    let bytes = slot_file();
    let found = inspect::inspect(&bytes).unwrap();
    let parts = &found.appendices.parts;
    // Behind a part, a section, or the K of a section, as if it had no V.
    let mut ends: Vec<_> = parts[1..].iter().map(|(_, range)| range.end).collect();
    for section in &found.state.sections {
        let tensors = &section.streams[0].tensors;
        ends.push(section.bytes.end);
        ends.extend(tensors.iter().filter(|tensor| tensor.layer == Some(1)).map(|tensor| tensor.bytes().end));
        ends.extend(
            tensors.iter().filter(|tensor| tensor.tag.0 == *b"V   ").map(|tensor| tensor.bytes().end),
        );
    }
    for len in 0..bytes.len() as u64 {
        let Ok(found) = inspect::verify(&bytes[..len as usize], Verify::Full, None) else {
            // Nothing can be said of less than header and tokens.
            assert!(len < parts[0].1.end, "{len}");
            continue;
        };
        assert!(!found.has_checksums, "{len}");
        assert_eq!(found.is_whole(), ends.contains(&len), "{len}: {found:?}");
    }
}

#[test]
fn a_file_without_checksums_is_checked_by_its_structure() {
    let bytes = fs::read(fixture("tiny2x64_kf16_vf16_n64_none").path("slot").unwrap()).unwrap();
    let found = inspect::verify(&bytes, Verify::Full, None).unwrap();
    assert!(!found.has_checksums && found.is_whole());
    assert_eq!(outcome_of(&found, PartKind::STATE), &Outcome::Plausible);
    let found = inspect::verify(&bytes[..bytes.len() - 1], Verify::Full, None).unwrap();
    assert!(
        matches!(outcome_of(&found, PartKind::STATE), Outcome::Damaged(reason) if reason.contains("truncated"))
    );
}

#[test]
fn verification_is_told_how_far_it_is_and_can_be_cancelled() {
    let bytes = slot_file();
    let mut cancel = ProgressCallback::new(|progress| {
        assert!(progress.done <= progress.total);
        ControlFlow::Break(())
    });
    let error = inspect::verify(&bytes, Verify::Full, Some(&mut cancel)).unwrap_err();
    assert!(matches!(error, Error::Cancelled { .. }), "{error}");
}

// What is not understood

#[test]
fn a_state_that_is_cut_short_is_shown_as_far_as_it_goes() {
    let f = fixture("gemma3-dense_kf16_vf16_n64_none");
    let blob = f.blob().unwrap();
    let whole = described(&blob, &f.name);
    let found = inspect::inspect(&blob[..blob.len() - 1]).unwrap();
    let Basis::Incomplete { reason } = &found.state.basis else { panic!("{:?}", found.state.basis) };
    assert!(reason.starts_with("truncated state: "), "{reason}");
    assert_eq!(found.state.sections, whole.state.sections[..1]);
    assert_eq!(found.state.bytes.end, whole.state.sections[0].bytes.end);
}

#[test]
fn a_state_that_its_geometry_does_not_describe_is_not_guessed() {
    let file = NamedTempFile::new().unwrap();
    let mut ctx = context(1, &[kv(8)]);
    decode(&mut ctx, 0, 0..3);
    ctx.slot_save(file.path(), 0, SlotContents::default()).unwrap();
    let bytes = fs::read(file.path()).unwrap();
    let found = inspect::inspect(&bytes).unwrap();
    // The state of another cache under the same geometry: its K is f32.
    let (parts, integrity) = (&found.appendices.parts, found.appendices.integrity.clone().unwrap());
    let mut state = bytes[..parts[1].1.end as usize].to_vec();
    let k = found.state.sections[0].streams[0].tensors[0].offset as usize - 12;
    state[k..k + 4].copy_from_slice(&0_i32.to_le_bytes());
    let crc = |range: std::ops::Range<usize>| kvstate::format::crc32c_append(0, &state[range]);
    let head = parts[0].1.end as usize;
    let part = |kind, range: std::ops::Range<usize>| Part {
        kind,
        crc32c: crc(range.clone()),
        len: range.len() as u64,
    };
    let parts = vec![part(PartKind::HEAD, 0..head), part(PartKind::STATE, head..state.len())];
    let appendix = Integrity { parts, ..integrity }.to_bytes().unwrap();
    let lying = [&state[..], &appendix].concat();
    let found = inspect::inspect(&lying).unwrap();
    let Basis::Incomplete { reason } = &found.state.basis else { panic!("{:?}", found.state.basis) };
    assert_eq!(reason, "tensor: K of layer 0: f32 x 2 (expected K of layer 0: f16 x 4)");
    // Its checksums hold all the same, which is said.
    let verified = inspect::verify(&lying, Verify::Full, None).unwrap();
    let outcome = outcome_of(&verified, PartKind::STATE);
    assert!(
        matches!(outcome, Outcome::Damaged(text) if text.starts_with("its checksum holds, but tensor: ")),
        "{outcome:?}"
    );
}

#[test]
fn what_is_no_state_is_refused_with_its_magic() {
    let error = inspect::inspect(b"GGUF\x03\0\0\0").unwrap_err();
    assert_eq!(error.to_string(), "unknown (magic, version) for sequence state file: 46554747, 00000003");
    assert!(matches!(inspect::inspect(&[]), Err(Error::Truncated { .. })));
}

// Differences

/// The differences of two inputs, each of which is understood.
fn diff(a: &[u8], b: &[u8]) -> Diff {
    let [of_a, of_b] = [a, b].map(|input| inspect::inspect(input).unwrap());
    let inspected = |input, description| Inspected { input, description };
    inspect::diff(inspected(a, &of_a), inspected(b, &of_b), None).unwrap()
}

#[test]
fn a_file_differs_in_nothing_from_itself() {
    let bytes = slot_file();
    assert_eq!(diff(&bytes, &bytes), Diff::default());
}

#[test]
fn the_same_values_in_another_order_of_cells_are_no_difference() {
    let [mut a, mut b] = [(); 2].map(|()| context(2, &[kv(16)]));
    decode(&mut a, 0, 0..8);
    // The second half first, behind cells of another sequence.
    decode(&mut b, 1, 0..3);
    decode(&mut b, 0, 4..8);
    decode(&mut b, 0, 0..4);
    let [a, b] = [&mut a, &mut b].map(|ctx| save(ctx, 0, NONE));
    assert_ne!(a, b);
    assert_eq!(diff(&a, &b), Diff::default());
}

#[test]
fn transposed_v_is_compared_with_v_in_rows() {
    let [mut plain, mut transposed] =
        [false, true].map(|v_trans| context(1, &[KvParams { v_trans, ..kv(16) }]));
    for ctx in [&mut plain, &mut transposed] {
        decode(ctx, 0, 0..6);
    }
    let plain = save(&mut plain, 0, NONE);
    let mut transposed = save(&mut transposed, 0, NONE);
    let found = diff(&plain, &transposed);
    assert!(found.is_same(), "{found:?}");
    assert_eq!((found.layout.len(), found.layout[0].field), (1, "v_trans"));

    // The last value of the last channel: position 5, element 1 of V in layer 1.
    *transposed.last_mut().unwrap() ^= 1;
    let found = diff(&plain, &transposed);
    let [SectionDiff { section: 0, tensors, .. }] = &found.sections[..] else { panic!("{found:?}") };
    let [v] = &tensors[..] else { panic!("{tensors:?}") };
    assert_eq!((v.tag.0, v.layer, v.n_differ, v.pos, v.element), (*b"V   ", Some(1), 1, 5, 1));
}

#[test]
fn a_value_that_differs_is_named_by_section_layer_position_and_element() {
    let mut ctx = target();
    let a = save(&mut ctx, 0, NONE);
    let found = inspect::inspect(&a).unwrap();
    let k = found.state.sections[1].streams[0].tensors[1];
    let mut b = a.clone();
    // Row 2, element 3; and all of row 4.
    let row = |row: u64| (k.offset + row * k.row_size) as usize;
    b[row(2) + 6..row(2) + 8].copy_from_slice(&half::f16::from_f32(1.5).to_le_bytes());
    b[row(4)..row(5)].iter_mut().for_each(|byte| *byte ^= 0x10);
    let found = diff(&a, &b);
    let [SectionDiff { section: 1, n_compared: 12, tensors, .. }] = &found.sections[..] else {
        panic!("{found:?}")
    };
    let [tensor] = &tensors[..] else { panic!("{tensors:?}") };
    assert_eq!((tensor.tag.0, tensor.layer, tensor.n_differ), (*b"K   ", Some(1), 5));
    assert_eq!((tensor.pos, tensor.element, &*tensor.b.to_string()), (2, 3, "1.5"));
    let was = half::f16::from_le_bytes([a[row(2) + 6], a[row(2) + 7]]);
    assert_eq!(tensor.a.to_string(), was.to_string());
}

#[test]
fn a_block_of_a_quantised_type_is_shown_as_its_bytes() {
    let a = fixture("tiny2x64_kq4_0_vq8_0_n64_none").blob().unwrap();
    let found = inspect::inspect(&a).unwrap();
    let k = found.state.sections[0].streams[0].tensors[0];
    let mut b = a.clone();
    // The second block of row 1.
    let at = (k.offset + k.row_size) as usize + 18;
    b[at] ^= 1;
    let found = diff(&a, &b);
    let tensor = &found.sections[0].tensors[0];
    assert_eq!((tensor.n_differ, tensor.pos, tensor.element), (1, 1, 32));
    assert!(tensor.a.to_string().starts_with(&format!("{:02x}{:02x}", a[at], a[at + 1])), "{}", tensor.a);
    assert_eq!(tensor.b.to_string().len(), 2 * 18);
}

#[test]
fn cells_that_one_alone_has_are_counted_and_the_first_is_named() {
    let [mut a, mut b] = [(); 2].map(|()| context(1, &[kv(16)]));
    decode(&mut a, 0, 0..8);
    decode(&mut b, 0, (0..5).chain(7..9));
    let found = diff(&save(&mut a, 0, NONE), &save(&mut b, 0, NONE));
    let [SectionDiff { n_compared: 6, only_a: 2, only_b: 1, first_only: Some(5), tensors, .. }] =
        &found.sections[..]
    else {
        panic!("{found:?}")
    };
    assert_eq!(tensors[..], []);
}

#[test]
fn shapes_tokens_and_appendices_that_differ_are_named_with_both_values() {
    let f = |name: &str| fixture(name).blob().unwrap();
    let found = diff(&f("tiny2x64_kf16_vf16_n64_none"), &f("tiny2x64_kq4_0_vq8_0_n64_none"));
    let fields: Vec<_> =
        found.fields.iter().map(|d| format!("{}: {}: {} | {}", d.place, d.field, d.a, d.b)).collect();
    assert_eq!(fields[0], "section 0, K of layer 0: shape: K x 64 f16 | K x 64 q4_0");
    assert_eq!(fields.len(), 4);

    let a = slot_file();
    let mut b = a.clone();
    b[16..20].copy_from_slice(&9_i32.to_le_bytes());
    let driver = inspect::inspect(&a).unwrap().appendices.draft.unwrap().driver;
    b[driver.start as usize + 4] ^= 0x20;
    let found = diff(&a, &b);
    assert_eq!(found.tokens, Some(TokenDiff { n_differ: 1, index: 1, a: Some(1), b: Some(9) }));
    let [field] = &found.fields[..] else { panic!("{found:?}") };
    assert_eq!((&*field.place, field.field), ("draft state", "driver"));
    assert_eq!((&*field.a, &*field.b), ("10 bytes, 64 at 4", "10 bytes, 44 at 4"));
}

#[test]
fn the_state_of_one_sequence_is_the_same_in_every_stream_and_under_every_name() {
    let mut unified = context(4, &[kv(16)]);
    let mut streams = support::streams(4, &[kv(16)]);
    for ctx in [&mut unified, &mut streams] {
        decode(ctx, 0, 0..5);
    }
    unified.seq_cp(0, 3, -1, -1).unwrap();
    let found = diff(&save(&mut unified, 3, NONE), &save(&mut streams, 0, NONE));
    assert!(found.is_same(), "{found:?}");
    assert_eq!((found.layout.len(), found.layout[0].field), (1, "streams"));
}
