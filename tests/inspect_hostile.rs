//! Damaged and lying bytes that are looked into: no panic, and no more memory than the input is worth.
#![allow(missing_docs, reason = "a test")]

mod peak;
mod slots;

use std::fs;
use std::path::Path;

use kvstate::format::SectionGeometry;
use kvstate::inspect::{self, Basis, Inspected};
use kvstate::session::Verify;
use peak::peak_of;
use slots::save_slot;

/// What a look may take: descriptions of tensors are larger than the least that a state can say of one.
fn allowance(len: usize) -> usize {
    16 * len + (64 << 10)
}

/// Does everything that can be done with these bytes; whether they were understood.
fn look(input: &[u8], name: &str) -> bool {
    let (found, peak) = peak_of(|| {
        let found = inspect::inspect(input).ok();
        if let Some(description) = &found {
            for section in &description.state.sections {
                for stream in &section.streams {
                    let n_cells = section.cells(stream, input).count();
                    assert_eq!(n_cells, stream.n_cells as usize, "{name}");
                    // Runs follow each other and hold all cells.
                    let runs = section.cells(stream, input).runs();
                    let n: i64 =
                        runs.map(|run| i64::from(*run.pos.end()) - i64::from(*run.pos.start()) + 1).sum();
                    assert_eq!(n, i64::from(stream.n_cells), "{name}");
                    for tensor in &stream.tensors {
                        assert!(tensor.bytes().end <= input.len() as u64, "{name}: {tensor:?}");
                    }
                }
            }
        }
        found
    });
    assert!(peak <= allowance(input.len()), "{name}: {peak} bytes for {}", input.len());
    let ((), peak) = peak_of(|| drop(inspect::verify(input, Verify::Full, None)));
    assert!(peak <= allowance(input.len()), "{name}: {peak} bytes to verify {}", input.len());
    found.is_some_and(|found| !matches!(found.state.basis, Basis::Incomplete { .. }))
}

/// Every truncation, and a flip in every byte.
fn damage(good: &[u8], every: usize, name: &str) {
    assert!(look(good, name), "{name}");
    for len in (0..good.len()).step_by(every) {
        look(&good[..len], &format!("{name}, cut at {len}"));
    }
    let mut bytes = good.to_vec();
    for at in (0..good.len()).step_by(every) {
        let bit = 1 << (at / every % 8);
        bytes[at] ^= bit;
        look(&bytes, &format!("{name}, flipped at {at}"));
        bytes[at] ^= bit;
    }
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

/// All places, or with the longer files one of so many.
fn every(n: usize) -> usize {
    if std::env::var_os("KVSTATE_TEST_ALL").is_some() { 1 } else { n }
}

#[test]
fn every_flip_and_truncation_of_a_slot_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    save_slot(file.path());
    damage(&fs::read(file.path()).unwrap(), 1, "slot file");
}

#[test]
fn every_flip_and_truncation_of_states_of_llama_cpp() {
    damage(&fixture("tiny2x64_kf16_vf16_ns4s_seq3_empty_none.bin"), 1, "no cells");
    damage(&fixture("tiny2x64_kf16_vf16_ns4u_seq2_none.bin"), 1, "attention");
    damage(&fixture("tiny2x64_kf16_vf16_vtrans_ns4u_seq2_none.bin"), 1, "transposed V");
    damage(&fixture("lfm2-dense_kf16_vf16_n64_partial.bin"), every(13), "window and recurrent");
    damage(&fixture("deepseek4-moe_kf16_vf16_n64_partial.bin"), every(31), "DSV4");
    damage(&fixture("v2/tiny2x64_kf16_vf16_n64_whole.ctx"), every(13), "a whole context of version 2");
    damage(&fixture("v2/qwen2vl_mrope2d_none.slot"), every(31), "ext of version 2");
}

#[test]
fn counts_that_claim_more_than_there_is_cost_nothing() {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let magic = 0xaf14_3cd8;
    for (name, claim) in [
        ("cells", vec![magic, 0, 1, u32::MAX]),
        ("streams", vec![magic, 0, 256]),
        ("layers", vec![magic, 0, 1, 1, 0, 1, 0, 0, 4096, 0, 0]),
        ("recurrent layers", vec![magic, 0, 0, 0, 4096]),
        ("sequences of a cell", vec![4, 0x7473_6574, 1, 1, 0, 256]),
        ("tokens", vec![0x6767_7371, 4, u32::MAX]),
        ("architecture", vec![64]),
    ] {
        for filler in [0_u8, 1, 0xff] {
            let mut input = words(&claim);
            input.resize(200_000, filler);
            look(&input, &format!("{name}, then {filler}"));
        }
    }
    // One section after another that can be read in many ways: layers of no bytes, states of no cells.
    let empty = [&words(&[magic, 0])[..], &words(&[1, 0]).repeat(20_000)].concat();
    look(&empty, "sections without cells");
    let zeros = vec![0; 400_000];
    look(&zeros, "zeros");
    look(&[&words(&[magic, 0])[..], &zeros].concat(), "zeros as a state");
    let states = [&words(&[magic, 0])[..], &words(&[0, 0, 4, 0, 0, 0, 0, 0, 0]).repeat(5_000)].concat();
    look(&states, "states without rows");
}

#[test]
fn a_geometry_of_more_sections_than_any_memory_has_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    save_slot(file.path());
    let bytes = fs::read(file.path()).unwrap();
    let found = inspect::inspect(&bytes).unwrap();
    let start = usize::try_from(found.appendices.parts[4].1.start).unwrap();
    let mut integrity = found.appendices.integrity.unwrap();
    let shared = SectionGeometry { kind: SectionGeometry::SHARED, settings: Vec::new(), tensors: Vec::new() };
    integrity.geometry = vec![shared; 100_000];
    let lying = [&bytes[..start], &integrity.to_bytes().unwrap()].concat();
    assert!(!look(&lying, "100,000 sections"));
    let found = inspect::inspect(&lying).unwrap();
    let Basis::Incomplete { reason } = &found.state.basis else { panic!("{:?}", found.state.basis) };
    assert_eq!(reason, "sections: 100000 (expected at most 256)");
}

#[test]
fn damaged_states_are_compared_with_whole_ones() {
    let good = fixture("tiny2x64_kf16_vf16_ns4u_seq2_none.bin");
    let of_good = inspect::inspect(&good).unwrap();
    let mut bytes = good.clone();
    let mut n = 0;
    for at in 8..good.len() {
        bytes[at] ^= 0x40;
        if let Ok(of_bytes) = inspect::inspect(&bytes) {
            let [a, b] = [(&good, &of_good), (&bytes, &of_bytes)]
                .map(|(input, description)| Inspected { input, description });
            let found = inspect::diff(a, b, None).unwrap();
            n += usize::from(!found.is_same());
        }
        bytes[at] ^= 0x40;
    }
    // All but the sequence ids of cells, which are a matter of taste.
    assert_eq!(n, good.len() - 8 - 4 * 17);
}
