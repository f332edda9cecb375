//! What is in a file, read without a context: every state that llama.cpp wrote is what its sidecar says.
#![allow(missing_docs, reason = "a test")]

mod common;
mod place;

use std::fs;

use common::{Fixture, Section, fixtures, whole_contexts};
use kvstate::inspect::{self, Basis, CellExtLayout, Description, Kind, Shape, Tensor};

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
fn rows(tensors: &[Tensor], tag: &[u8; 4]) -> Vec<(i32, u64)> {
    let named = tensors.iter().filter(|tensor| tensor.tag.0 == *tag);
    named.map(|tensor| (tensor.ggml_type.as_i32(), tensor.row_size)).collect()
}

/// The layers of the tensors of that name where they are known, with their rows.
fn check_layers(tensors: &[Tensor], tag: &[u8; 4], expected: &[(usize, i32, u64)], name: &str) {
    let found: Vec<_> = tensors.iter().filter(|tensor| tensor.tag.0 == *tag).collect();
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
                    rows(tensors, b"K   "),
                    expected.k_type_rowbytes.clone().unwrap_or_default(),
                    "{name}"
                );
                assert_eq!(
                    rows(tensors, b"V   "),
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
            check_layers(tensors, b"R   ", &expected.r_layer_type_rowbytes, name);
            check_layers(tensors, b"S   ", &expected.s_layer_type_rowbytes, name);
            let p: Vec<_> = expected.p_layer_rowbytes.iter().map(|&(_, row_size)| row_size).collect();
            assert_eq!(rows(tensors, b"P   ").iter().map(|row| row.1).collect::<Vec<_>>(), p, "{name}");
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
