//! Damaged and lying bytes: no panic, no more memory than the input is worth, an error that names the field,
//! and a context that is what it was before.
#![allow(unsafe_code, reason = "the bytes of every plane are compared")]

mod common;
mod peak;
mod place;

use std::fs;
use std::ops::Range;

use common::{Fixture, fixtures_in, positions, repository_folder, seq_state, whole_state};
use kvstate::cells::CellMeta;
use kvstate::context::UbatchToken;
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, TensorParams};
use kvstate::storage::Plane;
use kvstate::types::{CellExt, Pos, SeqId, StateFlags};
use kvstate::{Context, ContextParams, Error, Result, Status};
use peak::peak_of;

const NONE: StateFlags = StateFlags::empty();
const PARTIAL: StateFlags = StateFlags::PARTIAL_ONLY;

/// What a call may take for an input of `len` bytes: cells in memory are larger than in a state, and an
/// input that does not fit is read up to three times to find out why.
fn allowance(len: usize) -> usize {
    16 * len + (64 << 10)
}

// A context with contents

/// Names the case in the output when a check panics.
struct Case<'a>(&'a str, usize, u8);

impl Drop for Case<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: byte {} (xor {:#04x}; 0: truncated there)", self.0, self.1, self.2);
        }
    }
}

/// Every cell and every byte of a cache.
#[derive(Clone, PartialEq)]
struct Contents {
    cells: Vec<Option<(CellMeta, Pos)>>,
    /// By plane.
    bytes: Vec<Vec<u8>>,
}

/// A context that holds an older state of the destination, in cells before and between those of two other
/// sequences. Unused cells hold noise.
struct Bench {
    ctx: Context,
    n_layer: Vec<usize>,
    kv_size: u32,
    dest: SeqId,
    others: Vec<SeqId>,
    before: Contents,
    others_before: Vec<Vec<u8>>,
}

impl Bench {
    fn new(f: &Fixture) -> Self {
        let dest = f.sidecar.seq_id;
        // What is written in streams depends on their number.
        let n_seq_max = f.sidecar.n_seq_max + if f.sidecar.kv_unified { 2 } else { 0 };
        let kv_size = f.n_cells() + 20;
        let ctx = place::context(f.params_with(n_seq_max, f.sidecar.kv_unified, kv_size)).unwrap();
        let n_layer = f.sections(kv_size).iter().map(|kv| kv.layers.len()).collect();
        let others = (0..n_seq_max.cast_signed()).filter(|&seq| seq != dest).take(2).collect();
        let before = Contents { cells: Vec::new(), bytes: Vec::new() };
        let mut bench = Self { ctx, n_layer, kv_size, dest, others, before, others_before: Vec::new() };
        bench.fill();
        bench
    }

    fn fill(&mut self) {
        let (first, last) = (self.others[0], *self.others.last().unwrap());
        let order = [self.dest, self.dest, first, last, self.dest, first];
        for (i, seq) in (0..).zip(order.into_iter().cycle().take(18)) {
            let token = UbatchToken { pos: i, ext: CellExt { x: i, y: i, tok: 100 + i }, seq_ids: &[seq] };
            let slot = self.ctx.prepare(&[token]).unwrap();
            self.ctx.commit(&slot).unwrap();
        }
        let mut x = 1_u64;
        for plane in self.planes() {
            let mut bytes = place::all(plane);
            for byte in &mut bytes {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = x.to_be_bytes()[0];
            }
            place::write(plane, 0, &bytes);
        }
        self.before = self.contents();
        self.others_before = self.others_now();
    }

    fn planes(&self) -> Vec<&Plane> {
        let mut planes = Vec::new();
        for (section, &n_layer) in self.n_layer.iter().enumerate() {
            for stream in 0..self.ctx.n_stream() as usize {
                for layer in 0..n_layer {
                    planes.push(self.ctx.k(section, stream, layer).unwrap());
                    planes.extend(self.ctx.v(section, stream, layer).unwrap());
                }
            }
        }
        planes
    }

    fn cells(&self) -> impl Iterator<Item = Option<(CellMeta, Pos)>> + '_ {
        (0..self.ctx.n_section()).flat_map(move |section| {
            (0..self.ctx.n_stream() as usize).flat_map(move |stream| {
                (0..self.kv_size).map(move |cell| self.ctx.cell(section, stream, cell).unwrap())
            })
        })
    }

    fn contents(&self) -> Contents {
        Contents { cells: self.cells().collect(), bytes: self.planes().into_iter().map(place::all).collect() }
    }

    fn others_now(&mut self) -> Vec<Vec<u8>> {
        self.others.iter().map(|&seq| seq_state(&mut self.ctx, seq, NONE)).collect()
    }

    fn assert_unchanged(&self) {
        assert!(self.cells().eq(self.before.cells.iter().copied()), "the cells are what they were");
        for (plane, was) in self.planes().into_iter().zip(&self.before.bytes) {
            assert!(place::all(plane) == *was, "the bytes of the planes are what they were");
        }
    }

    /// After a restore of the destination: valid cells, and the other sequences as they were.
    fn assert_restored(&mut self) {
        self.assert_valid();
        let of_another = |cell: Option<(CellMeta, Pos)>| {
            cell.filter(|(meta, _)| self.others.iter().any(|&id| has(meta, id)))
        };
        for (was, is) in self.before.cells.iter().zip(self.cells()) {
            assert_eq!(of_another(*was), of_another(is), "cells of other sequences");
        }
        assert!(self.others_now() == self.others_before, "the other sequences are what they were");
    }

    /// Cells make sense, and agree with the positions that each sequence claims.
    fn assert_valid(&self) {
        let n_seq_max = self.ctx.n_seq_max();
        for (meta, shift) in self.cells().flatten() {
            assert!(meta.pos >= 0 && shift == 0 && !meta.seqs.is_empty(), "{meta:?}");
            assert!(meta.seqs.iter().all(|seq| seq.id().unsigned_abs() < n_seq_max), "{meta:?}");
        }
        // The last section is the one that positions are asked of: the window's, or the only one.
        let n_before = self.ctx.n_stream() as usize * self.kv_size as usize * (self.ctx.n_section() - 1);
        let metas: Vec<_> = self.cells().skip(n_before).flatten().map(|(meta, _)| meta).collect();
        for seq in 0..n_seq_max.cast_signed() {
            let held = metas.iter().filter(|meta| has(meta, seq)).map(|meta| meta.pos);
            let want = (held.clone().min().unwrap_or(-1), held.max().unwrap_or(-1));
            assert_eq!(positions(&self.ctx, seq), want, "positions and cells of sequence {seq} agree");
        }
    }
}

fn has(meta: &CellMeta, seq_id: SeqId) -> bool {
    meta.seqs.iter().any(|seq| seq.id() == seq_id)
}

/// The statuses that bad bytes may give.
fn assert_names_what_is_wrong(error: &Error) {
    let status = error.status();
    let expected = [
        Status::Truncated,
        Status::Corrupt,
        Status::Mismatch,
        Status::NoSpace,
        Status::UnsupportedVersion,
        Status::BufferTooSmall,
    ];
    assert!(expected.contains(&status), "{status:?}: {error}");
    let text = error.to_string();
    let names = text.chars().filter(char::is_ascii_alphabetic).count() >= 3;
    let has_values = text.chars().any(|c| c.is_ascii_digit()) || text.contains("ext");
    assert!(names && has_values, "'{text}' names a field and values");
}

/// Feeds damaged inputs to a context; after one that it takes, to a fresh one.
struct Sweep<'a> {
    fixture: &'a Fixture,
    bench: Bench,
    n_failed: usize,
    n_loaded: usize,
}

impl<'a> Sweep<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        Self { fixture, bench: Bench::new(fixture), n_failed: 0, n_loaded: 0 }
    }

    /// `load` reads the damaged input of `len` bytes.
    fn check(
        &mut self,
        len: usize,
        load: impl FnOnce(&mut Context, SeqId) -> Result<usize>,
        loaded: impl FnOnce(&mut Bench, usize),
    ) {
        let dest = self.bench.dest;
        let (result, peak) = peak_of(|| load(&mut self.bench.ctx, dest));
        assert!(peak <= allowance(len), "{peak} bytes of memory for an input of {len}");
        match result {
            Err(error) => {
                assert_names_what_is_wrong(&error);
                self.bench.assert_unchanged();
                self.n_failed += 1;
            }
            Ok(n) => {
                assert!(n <= len, "{n} bytes consumed of {len}");
                self.bench.assert_valid();
                loaded(&mut self.bench, n);
                self.bench = Bench::new(self.fixture);
                self.n_loaded += 1;
            }
        }
    }

    fn check_blob(&mut self, damaged: &[u8], original: &[u8]) {
        let flags = self.fixture.flags();
        self.check(
            damaged.len(),
            |ctx, dest| ctx.state_seq_set_data(damaged, dest, flags),
            |bench, n| {
                bench.assert_restored();
                // What was taken is what is written. The ids of a source sequence are not kept.
                if flags == NONE {
                    let state = seq_state(&mut bench.ctx, bench.dest, flags);
                    assert!(state == damaged[..n] || state == *original, "what was read is what is written");
                }
            },
        );
    }

    /// After all the failures, the intact blob restores as it does in a context that has seen none of them.
    fn finish(mut self, blob: &[u8]) {
        let mut fresh = Bench::new(self.fixture);
        for bench in [&mut self.bench, &mut fresh] {
            let n = bench.ctx.state_seq_set_data(blob, bench.dest, self.fixture.flags()).unwrap();
            assert_eq!(n, blob.len(), "{}", self.fixture.name);
        }
        assert!(self.bench.contents() == fresh.contents(), "{}", self.fixture.name);
        assert!(whole_state(&mut self.bench.ctx) == whole_state(&mut fresh.ctx), "{}", self.fixture.name);
    }
}

// Where the metadata is

/// Ranges of the metadata of a version-4 blob: everything but the tensors.
fn metadata_of(f: &Fixture, blob: &[u8]) -> Vec<Range<usize>> {
    let u32_at = |at: usize| u32::from_le_bytes(blob[at..at + 4].try_into().unwrap());
    let mut ranges = Vec::new();
    let (mut start, mut at) = (0, 8);
    for section in &f.sidecar.sections {
        let kv = f.section(section, 1);
        let n_stream = u32_at(at);
        at += 4;
        for _ in 0..n_stream {
            let n = u32_at(at) as usize;
            at += 4;
            if n == 0 {
                continue;
            }
            at += n * if section.cell_ext { 24 } else { 12 } + 16;
            let tensors = kv.layers.iter().map(|layer| layer.k).chain(kv.layers.iter().filter_map(|l| l.v));
            for TensorParams { ggml_type, n_embd } in tensors {
                ranges.push(start..at + 12);
                start = at + 12 + n * usize::try_from(ggml_type.row_size(n_embd).unwrap()).unwrap();
                at = start;
            }
        }
    }
    assert_eq!(at, blob.len(), "{}: the layout that this test knows", f.name);
    ranges.push(start..at);
    ranges.retain(|range| !range.is_empty());
    ranges
}

/// The version-4 blobs of the repository.
fn blobs() -> Vec<(Fixture, Vec<u8>)> {
    let all = fixtures_in(&repository_folder()).into_iter().filter(|f| f.is_attention() && f.version() == 4);
    all.filter_map(|f| f.blob().map(|blob| (f, blob))).collect()
}

const SMALL: usize = 40_000;

#[test]
fn every_truncation_of_a_blob_is_refused_and_changes_nothing() {
    let (mut n, mut n_failed) = (0, 0);
    for (f, blob) in blobs() {
        // Of large blobs every length that ends in metadata, and some others.
        let metadata = metadata_of(&f, &blob);
        let is_metadata = |len: &usize| metadata.iter().any(|range| range.contains(len));
        let mut sweep = Sweep::new(&f);
        let lens = (0..blob.len()).filter(|len| blob.len() < SMALL || len % 61 == 0 || is_metadata(len));
        for len in place::cases(lens) {
            // 8 bytes are a whole partial state of full attention, the older build's data merely bytes behind.
            if f.is_legacy_partial() && len >= 8 {
                continue;
            }
            let _case = Case(&f.name, len, 0);
            sweep.check_blob(&blob[..len], &blob);
        }
        assert_eq!(sweep.n_loaded, 0, "{}: no part of a state is a state", f.name);
        n += 1;
        n_failed += sweep.n_failed;
        sweep.finish(&blob);
    }
    println!("{n} blobs, {n_failed} truncations");
}

#[test]
fn a_truncated_legacy_partial_blob_is_its_first_8_bytes() {
    for (f, blob) in blobs().into_iter().filter(|(f, _)| f.is_legacy_partial()) {
        let mut bench = Bench::new(&f);
        for len in (8..blob.len()).step_by(37) {
            let _case = Case(&f.name, len, 0);
            assert_eq!(bench.ctx.state_seq_set_data(&blob[..len], bench.dest, PARTIAL).unwrap(), 8);
            bench.assert_unchanged();
        }
    }
}

#[test]
fn every_flip_in_the_metadata_of_a_blob_is_refused_or_gives_valid_cells() {
    let (mut n, mut n_failed, mut n_loaded) = (0, 0, 0);
    for (f, blob) in blobs() {
        let mut sweep = Sweep::new(&f);
        let mut damaged = blob.clone();
        for at in place::cases(metadata_of(&f, &blob).into_iter().flatten()) {
            for flip in [0xff, 0x01, 0x80] {
                let _case = Case(&f.name, at, flip);
                damaged[at] ^= flip;
                sweep.check_blob(&damaged, &blob);
                damaged[at] ^= flip;
            }
        }
        n += 1;
        n_failed += sweep.n_failed;
        n_loaded += sweep.n_loaded;
        sweep.finish(&blob);
    }
    println!("{n} blobs, {n_failed} flips refused, {n_loaded} loaded");
}

#[test]
fn a_flip_in_the_tensors_of_a_blob_is_another_state_and_is_written_as_such() {
    for (f, blob) in blobs() {
        let metadata = metadata_of(&f, &blob);
        let mut sweep = Sweep::new(&f);
        let mut damaged = blob.clone();
        // Every byte of a small blob, a hundred of a large one.
        let step = if blob.len() < SMALL { 1 } else { blob.len() / 100 };
        let tensors = (0..blob.len()).step_by(step);
        for at in place::cases(tensors.filter(|at| !metadata.iter().any(|range| range.contains(at)))) {
            let _case = Case(&f.name, at, 0xff);
            damaged[at] ^= 0xff;
            sweep.check_blob(&damaged, &blob);
            damaged[at] ^= 0xff;
        }
        assert_eq!(sweep.n_failed, 0, "{}: tensors hold any bytes", f.name);
    }
}

#[test]
fn a_damaged_slot_file_is_refused_and_changes_nothing_or_gives_valid_cells() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged");
    let files = fixtures_in(&repository_folder())
        .into_iter()
        .filter(|f| f.is_attention() && f.path("slot").is_some());
    let (mut n, mut n_failed, mut n_loaded) = (0, 0, 0);
    for f in files {
        let slot = fs::read(f.path("slot").unwrap()).unwrap();
        if slot.len() > SMALL {
            continue;
        }
        let mut sweep = Sweep::new(&f);
        let mut load = |damaged: &[u8]| {
            fs::write(&path, damaged).unwrap();
            let load = |ctx: &mut Context, dest| {
                let loaded = ctx.state_seq_load_file(&path, dest, 4096)?;
                Ok(usize::try_from(loaded.state_end).unwrap())
            };
            sweep.check(damaged.len(), load, |bench, _| bench.assert_restored());
        };
        // The header, the tokens, the metadata before the first tensor.
        let metadata = 12 + 4 * f.sidecar.tokens.len() + 8 + 12 * f.n_cells() as usize + 28;
        for len in place::cases((0..slot.len()).filter(|&len| len < metadata || len % 61 == 0)) {
            let _case = Case(&f.name, len, 0);
            load(&slot[..len]);
        }
        let mut damaged = slot.clone();
        for at in place::cases(0..metadata) {
            for flip in [0xff, 0x01, 0x80] {
                let _case = Case(&f.name, at, flip);
                damaged[at] ^= flip;
                load(&damaged);
                damaged[at] ^= flip;
            }
        }
        n += 1;
        n_failed += sweep.n_failed;
        n_loaded += sweep.n_loaded;
    }
    assert!(n >= 4, "slot files");
    println!("{n} slot files, {n_failed} damaged refused, {n_loaded} loaded");
}

#[test]
fn a_damaged_whole_context_is_refused_and_changes_nothing_or_gives_valid_cells() {
    let all = fixtures_in(&repository_folder());
    for name in ["tiny2x64_kf16_vf16_n64", "tiny2x64_kf16_vf16_vtrans_ns4u"] {
        let state = fs::read(repository_folder().join(format!("{name}_whole.ctx"))).unwrap();
        let mut f = all.iter().find(|f| f.name.starts_with(&format!("{name}_"))).unwrap().clone();
        f.sidecar.sections[0].cells = vec![128]; // those of all sequences
        let mut sweep = Sweep::new(&f);
        let mut check = |damaged: &[u8]| {
            let load = |ctx: &mut Context, _| ctx.state_set_data(damaged);
            sweep.check(damaged.len(), load, |_, _| {});
        };
        for len in place::cases((0..state.len()).filter(|len| len % 7 == 0 || *len < 3000)) {
            let _case = Case(name, len, 0);
            check(&state[..len]);
        }
        let mut damaged = state.clone();
        for at in place::cases(0..2000) {
            for flip in [0xff, 0x01, 0x80] {
                let _case = Case(name, at, flip);
                damaged[at] ^= flip;
                check(&damaged);
                damaged[at] ^= flip;
            }
        }
        println!("{name}: {} damaged refused, {} loaded", sweep.n_failed, sweep.n_loaded);
    }
}

#[test]
fn a_header_that_claims_huge_numbers_takes_no_memory() {
    for (f, blob) in blobs().into_iter().filter(|(f, _)| f.n_cells() > 0 && !f.is_legacy_partial()) {
        let mut sweep = Sweep::new(&f);
        let (first, ext) = (metadata_of(&f, &blob)[0].clone(), f.sidecar.sections[0].cell_ext);
        let n_cells = f.n_cells() as usize;
        let cells_end = first.end - 28;
        let cell_count = cells_end - n_cells * if ext { 24 } else { 12 } - 4;
        let fields = [
            ("n_stream", 8),
            ("cell_count", cell_count),
            ("n_seq_id", cell_count + 8),
            ("n_layer", cells_end + 4),
            ("row_size", first.end - 8),
        ];
        for (field, at) in fields {
            let _case = Case(&f.name, at, 0);
            for value in
                [u32::MAX, i32::MAX.cast_unsigned(), 1 << 24, 256, u32::try_from(blob.len() / 12).unwrap()]
            {
                let mut lying = blob.clone();
                lying[at..at + 4].copy_from_slice(&value.to_le_bytes());
                let n_failed = sweep.n_failed;
                sweep.check_blob(&lying, &blob);
                assert_eq!(sweep.n_failed, n_failed + 1, "{}: {field} {value}", f.name);
            }
        }
        sweep.finish(&blob);
    }
}

// The name of each lie

/// A blob under construction: words of a version-4 state.
#[derive(Clone)]
struct Words(Vec<u8>);

impl Words {
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn i32(self, value: i32) -> Self {
        self.u32(value.cast_unsigned())
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn rows(mut self, n: usize) -> Self {
        self.0.extend(std::iter::repeat_n(0x5a, n));
        self
    }
}

/// The fields of a state of two cells, one layer of 4 f16 elements; by default they are what the cache has.
#[derive(Clone, Copy)]
struct State {
    magic: u32,
    n_stream: u32,
    cell_count: u32,
    pos: i32,
    n_seq_id: u32,
    v_trans: u32,
    n_layer: u32,
    n_rot_k: u32,
    n_rot_v: u32,
    k_type: i32,
    k_row_size: u64,
    v_type: i32,
    v_row_size: u64,
    v_element_size: u32,
    n_embd_v_gqa: u32,
    /// The stream again, cells and all.
    second_stream: bool,
}

const ROW_MAJOR: State = State {
    magic: 0xaf14_3cd8,
    n_stream: 1,
    cell_count: 2,
    pos: 0,
    n_seq_id: 1,
    v_trans: 0,
    n_layer: 1,
    n_rot_k: 0,
    n_rot_v: 0,
    k_type: 1,
    k_row_size: 8,
    v_type: 1,
    v_row_size: 8,
    v_element_size: 2,
    n_embd_v_gqa: 4,
    second_stream: false,
};

const TRANSPOSED: State = State { v_trans: 1, ..ROW_MAJOR };

impl State {
    fn bytes(self, transposed: bool) -> Vec<u8> {
        let mut words = Words(Vec::new()).u32(self.magic).i32(0).u32(self.n_stream);
        for _ in 0..=u32::from(self.second_stream) {
            words = words.u32(self.cell_count);
            words = words.i32(self.pos).u32(self.n_seq_id).i32(0);
            words = words.i32(7).u32(1).i32(0);
            words = words.u32(self.v_trans).u32(self.n_layer).u32(self.n_rot_k).u32(self.n_rot_v);
            words = words.i32(self.k_type).u64(self.k_row_size).rows(16).i32(self.v_type);
            words = if transposed {
                words.u32(self.v_element_size).u32(self.n_embd_v_gqa).rows(16)
            } else {
                words.u64(self.v_row_size).rows(16)
            };
        }
        words.0
    }
}

fn small_params(n_seq_max: u32, unified: bool, kv_size: u32, v_trans: bool) -> ContextParams {
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 4 };
    let mut kv = KvParams::new(kv_size, 1, LayerParams { k: tensor, v: Some(tensor) });
    kv.v_trans = v_trans;
    let mut params = ContextParams::new(n_seq_max, vec![kv.into()]);
    params.unified = unified;
    params.arch = "llama".into();
    params
}

fn assert_refused_as(state: State, transposed: bool, text: &str) {
    let mut ctx = place::context(small_params(1, true, 8, transposed)).unwrap();
    let error = ctx.state_seq_set_data(&state.bytes(transposed), 0, NONE).expect_err(text);
    assert_eq!(error.to_string(), text);
    assert_eq!(positions(&ctx, 0), (-1, -1), "nothing was restored: {text}");
}

#[test]
fn the_states_of_the_table_are_whole_without_their_lies() {
    for (state, transposed) in [(ROW_MAJOR, false), (TRANSPOSED, true)] {
        let mut ctx = place::context(small_params(1, true, 8, transposed)).unwrap();
        let bytes = state.bytes(transposed);
        assert_eq!(ctx.state_seq_set_data(&bytes, 0, NONE).unwrap(), bytes.len());
        assert_eq!(seq_state(&mut ctx, 0, NONE), bytes);
    }
}

#[test]
fn a_lie_in_a_field_is_refused_with_the_field_and_both_values() {
    let s = ROW_MAJOR;
    let table = [
        (State { magic: 0x1234, ..s }, "wrong sequence state magic: 00001234 (expected af143cd8)"),
        (State { n_stream: 0, ..s }, "n_stream mismatch: the state has 0, the cache 1 (section kv)"),
        (State { n_stream: 257, ..s }, "n_stream mismatch: the state has 257, the cache 1 (section kv)"),
        (State { n_stream: 2, ..s }, "truncated state: cell_count needs 4 bytes at offset 112, 0 are left"),
        (
            State { n_stream: 2, second_stream: true, ..s },
            "cell_count: streams 0 and 1 both hold cells (expected one stream in a sequence state)",
        ),
        (
            State { cell_count: u32::MAX, ..s },
            "truncated state: cells needs 51539607540 bytes at offset 16, 96 are left",
        ),
        (State { pos: -1, ..s }, "pos: -1 (expected at least 0)"),
        (State { pos: i32::MIN, ..s }, "pos: -2147483648 (expected at least 0)"),
        (State { n_seq_id: 0, ..s }, "n_seq_id: 0 (expected 1 in a sequence state)"),
        (State { n_seq_id: 2, ..s }, "n_seq_id: 2 (expected 1 in a sequence state)"),
        (
            State { v_trans: 1, ..s },
            "mismatched value element size: the state has 8, the cache 2 (section kv, layer 0)",
        ),
        (
            State { v_trans: 2, ..s },
            "incompatible V transposition: the state has 2, the cache 0 (section kv)",
        ),
        (State { n_layer: 2, ..s }, "mismatched layer count: the state has 2, the cache 1 (section kv)"),
        (
            State { n_rot_k: 64, ..s },
            "incompatible key rotation: the state has 64, the cache 0 (section kv; convert_types allows it)",
        ),
        (
            State { n_rot_v: 128, ..s },
            "incompatible value rotation: the state has 128, the cache 0 (section kv; convert_types allows it)",
        ),
        (
            State { k_type: 8, ..s },
            "mismatched key type: the state has 8 (q8_0), the cache 1 (f16) (section kv, layer 0; convert_types allows it)",
        ),
        (
            State { k_type: -1, ..s },
            "mismatched key type: the state has -1, the cache 1 (f16) (section kv, layer 0)",
        ),
        (
            State { k_row_size: 16, ..s },
            "mismatched key row size: the state has 16, the cache 8 (section kv, layer 0)",
        ),
        (
            State { k_row_size: u64::MAX, ..s },
            "mismatched key row size: the state has 18446744073709551615, the cache 8 (section kv, layer 0)",
        ),
        (
            State { v_type: 0, ..s },
            "mismatched value type: the state has 0 (f32), the cache 1 (f16) (section kv, layer 0; convert_types allows it)",
        ),
        (
            State { v_row_size: 4, ..s },
            "mismatched value row size: the state has 4, the cache 8 (section kv, layer 0)",
        ),
    ];
    for (state, text) in table {
        assert_refused_as(state, false, text);
    }
}

#[test]
fn a_lie_about_transposed_v_is_refused_with_the_field_and_both_values() {
    let s = TRANSPOSED;
    let table = [
        (
            State { v_trans: 0, ..s },
            "mismatched value row size: the state has 17179869186, the cache 8 (section kv, layer 0)",
        ),
        (
            State { v_trans: 2, ..s },
            "incompatible V transposition: the state has 2, the cache 1 (section kv)",
        ),
        (
            State { v_type: 30, ..s },
            "mismatched value type: the state has 30 (bf16), the cache 1 (f16) (section kv, layer 0; convert_types allows it)",
        ),
        (
            State { v_element_size: 4, ..s },
            "mismatched value element size: the state has 4, the cache 2 (section kv, layer 0)",
        ),
        (
            State { n_embd_v_gqa: 8, ..s },
            "mismatched GQA embedding size: the state has 8, the cache 4 (section kv, layer 0)",
        ),
    ];
    for (state, text) in table {
        assert_refused_as(state, true, text);
    }
}

#[test]
fn a_state_with_more_cells_than_the_stream_is_refused_with_both_numbers() {
    let mut ctx = place::context(small_params(1, true, 1, false)).unwrap();
    let error = ctx.state_seq_set_data(&ROW_MAJOR.bytes(false), 0, NONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to find 2 available cells in kv cache: 1 of 1 can be used (section kv, stream 0)"
    );
}

#[test]
fn a_sequence_that_the_context_does_not_have_is_refused_by_name() {
    let mut ctx = place::context(small_params(2, true, 8, false)).unwrap();
    for (seq, text) in [(-1, "seq_id -1 is out of range [0, 2)"), (2, "seq_id 2 is out of range [0, 2)")] {
        let error = ctx.state_seq_set_data(&ROW_MAJOR.bytes(false), seq, NONE).unwrap_err();
        assert_eq!(error.to_string(), text);
    }
}

/// A whole-context state of one stream with one cell of position 0 in the sequences given.
fn whole(arch: &[u8], n_stream: u32, empty_before: u32, n_seq_id: u32, seq_ids: &[SeqId]) -> Vec<u8> {
    let mut words = Words(Vec::new()).u32(u32::try_from(arch.len()).unwrap());
    words.0.extend(arch);
    words = words.u32(n_stream);
    for _ in 0..empty_before {
        words = words.u32(0);
    }
    words = words.u32(1).i32(0).u32(n_seq_id);
    for &seq_id in seq_ids {
        words = words.i32(seq_id);
    }
    words = words.u32(0).u32(1).u32(0).u32(0).i32(1).u64(8).rows(8).i32(1).u64(8).rows(8);
    for _ in empty_before + 1..n_stream {
        words = words.u32(0);
    }
    words.0
}

#[test]
fn a_lie_in_a_whole_context_is_refused_with_the_field_and_both_values() {
    let refusal = |unified: bool, state: &[u8]| {
        let mut ctx = place::context(small_params(3, unified, 8, false)).unwrap();
        let error = ctx.state_set_data(state).expect_err("a lie").to_string();
        assert_eq!(positions(&ctx, 0), (-1, -1), "nothing was restored: {error}");
        error
    };
    let table = [
        (
            true,
            whole(b"qwen2", 1, 0, 1, &[0]),
            "wrong model arch: the state has 'qwen2', the cache 'llama' (whole context)",
        ),
        (
            true,
            whole(b"llama", 3, 0, 1, &[0]),
            "n_stream mismatch: the state has 3, the cache 1 (section kv)",
        ),
        (
            false,
            whole(b"llama", 1, 0, 1, &[0]),
            "n_stream mismatch: the state has 1, the cache 3 (section kv)",
        ),
        (true, whole(b"llama", 1, 0, 0, &[]), "n_seq_id: 0 (expected 1 to n_seq_max 3)"),
        (true, whole(b"llama", 1, 0, 4, &[0, 1, 2, 3]), "n_seq_id: 4 (expected 1 to n_seq_max 3)"),
        (true, whole(b"llama", 1, 0, 1, &[3]), "seq_id: 3 (expected a sequence in [0, 3))"),
        (true, whole(b"llama", 1, 0, 1, &[-1]), "seq_id: -1 (expected a sequence in [0, 3))"),
        (true, whole(b"llama", 1, 0, 2, &[1, 1]), "seq_id: 1 twice in one cell (expected once)"),
        (false, whole(b"llama", 3, 1, 1, &[2]), "seq_id: 2 (expected a sequence of stream 1)"),
    ];
    for (unified, state, text) in table {
        assert_eq!(refusal(unified, &state), text);
    }
    for (unified, state) in
        [(true, whole(b"llama", 1, 0, 2, &[0, 2])), (false, whole(b"llama", 3, 1, 1, &[1]))]
    {
        let mut ctx = place::context(small_params(3, unified, 8, false)).unwrap();
        assert_eq!(ctx.state_set_data(&state).unwrap(), state.len(), "the table's states without their lies");
    }
}

#[test]
fn a_lie_in_a_file_header_is_refused_with_the_field_and_both_values() {
    let refusal = |magic: u32, version: u32, n_tokens: u32, state: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut words = Words(Vec::new()).u32(magic).u32(version).u32(n_tokens).i32(7);
        words.0.extend(state);
        fs::write(file.path(), words.0).unwrap();
        let mut ctx = place::context(small_params(1, true, 8, false)).unwrap();
        let loaded = if magic == 0x6767_736e {
            ctx.state_load_file(file.path(), 4)
        } else {
            ctx.state_seq_load_file(file.path(), 0, 4)
        };
        loaded.expect_err("a lie").to_string()
    };
    let state = &ROW_MAJOR.bytes(false)[8..];
    let whole = whole(b"llama", 1, 0, 1, &[0]);
    let longer = [&whole[..], b"more"].concat();
    let table = [
        (
            refusal(0x6767_6d6c, 4, 1, state),
            "unknown (magic, version) for sequence state file: 67676d6c, 00000004",
        ),
        (
            refusal(0x6767_7371, 5, 1, state),
            "unknown (magic, version) for sequence state file: 67677371, 00000005",
        ),
        (refusal(0x6767_736e, 4, 1, &whole), "unknown (magic, version) for session file: 6767736e, 00000004"),
        (refusal(0x6767_7371, 4, 5, state), "token count in sequence state file exceeded capacity! 5 > 4"),
        (
            refusal(0x6767_736e, 11, u32::MAX, &whole),
            "token count in session file exceeded capacity! 4294967295 > 4",
        ),
        (
            refusal(0x6767_7371, 4, 1, &state[..2]),
            "failed to restore sequence state: truncated state: n_stream needs 4 bytes at offset 16, 2 are left",
        ),
        (
            refusal(0x6767_736e, 11, 1, &longer),
            "failed to restore session state: did not read all of the session file data: \
             4 bytes behind the state (expected none)",
        ),
    ];
    for (got, want) in table {
        assert_eq!(got, want);
    }
}
