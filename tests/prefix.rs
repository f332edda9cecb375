//! The prompt of a file without its reply: what is kept, what is refused, and how much of the file is read.
#![allow(missing_docs, reason = "a test")]

mod memories;
mod recurrence;
mod slots;
mod transformer;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::{env, fs};

use kvstate::context::UbatchToken;
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, LegacyRotation};
use kvstate::session::{Kept, LoadedRange, RangeLoadParams, SlotContents, SlotLoadParams, Verify};
use kvstate::storage::{ProgressCallback, Threads};
use kvstate::types::{CellExt, Pos, PosRange, SeqId, Swa, SwaType};
use kvstate::{Context, ContextParams, Error, Result, Status};
use slots::support::{
    self, NONE, context, decode, generate, image, is_intact, iswa, kv, place, positions, save, tensor,
};
use slots::{TOKENS, busy_target, target, target_params};
use tempfile::TempDir;
use transformer::{Setup, tokens};

fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("slot.bin");
    (dir, path)
}

fn load_range(ctx: &mut Context, path: &Path, dest: SeqId, range: (Pos, Pos)) -> Result<LoadedRange> {
    let range = PosRange::new(range.0, range.1);
    ctx.state_seq_load_file_range(path, dest, RangeLoadParams { range, ..RangeLoadParams::default() })
}

fn load_prefix(ctx: &mut Context, path: &Path, dest: SeqId, p1: Pos) -> LoadedRange {
    load_range(ctx, path, dest, (0, p1)).expect("a prefix")
}

/// The reason for which a prefix is refused; nothing has changed.
fn refused(ctx: &mut Context, path: &Path, dest: SeqId, range: (Pos, Pos)) -> Error {
    let before = image(ctx);
    let error = load_range(ctx, path, dest, range).expect_err("a refusal");
    assert!(image(ctx) == before, "a refused load changed the context: {error}");
    error
}

const CUT: &str = "failed to restore sequence state: cannot cut at position";

// What is read

const N_CELL: u32 = 8192;
const N_LAYER: u32 = 8;
const N_PREFIX: u32 = N_CELL / 4;

/// Eight f16 layers, the tensors of which take so many MiB.
fn large(v_trans: bool) -> KvParams {
    let mib = env::var("KVSTATE_TEST_SLOT_MIB").map_or(4, |mib| mib.parse().expect("a number of MiB"));
    let n_embd: u32 = mib * ((1 << 20) / N_CELL) / (2 * 2 * N_LAYER);
    let tensor = tensor(GgmlType::F16, n_embd);
    let layer = LayerParams { k: tensor, v: Some(tensor) };
    KvParams { v_trans, ..KvParams::new(N_CELL, N_LAYER as usize, layer) }
}

fn large_context(v_trans: bool) -> Context {
    let params = support::params(1, &[large(v_trans)]);
    let params = ContextParams { threads: Threads::new(1), sync_files: false, ..params };
    place::context(params).expect("a context")
}

/// Where the prompt lies among the cells.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    /// In front.
    First,
    /// Behind the reply.
    Last,
    /// In two runs, with the reply before, between and behind.
    Parted,
}

impl Order {
    /// The position in each cell.
    fn positions(self) -> impl Iterator<Item = Pos> {
        let block = N_CELL / 8;
        let is_prefix = move |cell: u32| match self {
            Self::First => cell < N_PREFIX,
            Self::Last => cell >= N_CELL - N_PREFIX,
            Self::Parted => matches!(cell / block, 2 | 6),
        };
        let (mut prompt, mut reply) = (0.., N_PREFIX..);
        (0..N_CELL).map(move |cell| {
            let next = if is_prefix(cell) { prompt.next() } else { reply.next() };
            Pos::try_from(next.expect("a position")).expect("a position")
        })
    }
}

/// A full cache, each byte of which is known by plane and place.
fn full(v_trans: bool, order: Order) -> Context {
    let mut ctx = large_context(v_trans);
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
    let slot = ctx.prepare(&order.positions().map(token).collect::<Vec<_>>()).expect("a slot");
    ctx.commit(&slot).expect("a slot");
    for (i, plane) in (0..).zip(support::planes(&ctx, 0, 0)) {
        let len = usize::try_from(plane.shape().span(N_CELL).expect("a span")).expect("a span");
        place::write(plane, 0, &support::noise(&[i], len));
    }
    ctx
}

/// Cells of positions across the prompt, its ends and those of its runs among them.
fn sampled(ctx: &Context) -> Vec<(Pos, u32)> {
    let wanted = [0, 1, 500, 1023, 1024, 1500, 2046, 2047];
    let cell = |cell| ctx.cell(0, 0, cell).expect("a cell").map(|(meta, _)| (meta.pos, cell));
    let mut found: Vec<_> = (0..N_CELL).filter_map(cell).filter(|(pos, _)| wanted.contains(pos)).collect();
    found.sort_unstable();
    assert_eq!(found.len(), wanted.len());
    found
}

fn assert_same_prompt(loaded: &Context, source: &Context) {
    assert_eq!(loaded.seq_pos_max(0).expect("a sequence"), 2047);
    let planes = || support::planes(loaded, 0, 0).into_iter().zip(support::planes(source, 0, 0));
    for ((pos, to), (_, from)) in sampled(loaded).into_iter().zip(sampled(source)) {
        let is_same =
            |(to_plane, from_plane)| support::read_cell(to_plane, to) == support::read_cell(from_plane, from);
        assert!(planes().all(is_same), "position {pos}");
    }
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").expect("Linux counts them");
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.expect("rchar").parse().expect("a number")
}

/// What a load gives, and the bytes that it read.
fn counted<T>(load: impl FnOnce() -> T) -> (T, u64) {
    let before = bytes_read();
    let loaded = load();
    (loaded, bytes_read() - before)
}

/// A quarter of the tensors, and all metadata: 12 bytes for each cell of each of `n` states, and some for each tensor.
fn assert_a_quarter(what: &str, read: u64, size: u64, n: u64) {
    let metadata = n * (12 * u64::from(N_CELL) + 4096 * 2 * u64::from(N_LAYER) + (64 << 10));
    let permille = 1000 * read / size;
    eprintln!("{what}: {read} of {size} bytes were read, {}.{} %", permille / 10, permille % 10);
    assert!(size / 5 < read && read <= size / 4 + metadata, "{what}: {read} of {size} bytes");
}

#[test]
fn a_quarter_of_the_positions_is_a_quarter_of_the_bytes_read() {
    for order in [Order::First, Order::Last, Order::Parted] {
        for saved in [false, true] {
            let (_dir, path) = folder();
            let mut source = full(saved, order);
            let size = source.state_seq_save_file(&path, 0, &[]).expect("a file");
            for loaded in [false, true] {
                let mut into = large_context(loaded);
                let (range, read) = counted(|| load_prefix(&mut into, &path, 0, 2048));
                assert_eq!(
                    range.kept,
                    Kept { pos_min: 0, pos_max: 2047, n_cells: 2048, n_cut: 3 * N_PREFIX as usize }
                );
                assert_same_prompt(&into, &source);
                let layout = |v_trans| if v_trans { "transposed V" } else { "rows" };
                let what = format!("{} into {}, {order:?}", layout(saved), layout(loaded));
                assert_a_quarter(&what, read, size, 1);
            }
        }
    }
}

#[test]
fn a_prefix_of_a_slot_reads_a_quarter_of_the_draft_state_too_and_all_if_all_is_verified() {
    let (_dir, path) = folder();
    let mut draft = full(true, Order::First);
    let contents = SlotContents { draft: Some((&mut draft, 0)), ..SlotContents::default() };
    let mut source = full(false, Order::First);
    let size = source.slot_save(&path, 0, contents).expect("a file");
    for verify in [Verify::None, Verify::Headers, Verify::Full] {
        let (mut into, mut draft_into) = (large_context(false), large_context(true));
        let draft_context = Some((&mut draft_into, 0));
        let params =
            SlotLoadParams { p1: Some(2048), verify, draft: draft_context, ..SlotLoadParams::default() };
        let (loaded, read) = counted(|| into.slot_load(&path, 0, params).expect("a slot"));
        assert_eq!(loaded.verified, verify);
        assert_same_prompt(&into, &source);
        assert_same_prompt(&draft_into, &draft);
        if verify == Verify::Full {
            assert!(read > size, "{read} of {size} bytes");
        } else {
            assert_a_quarter(&format!("a slot, {verify:?}"), read, size, 2);
        }
    }
}

// The next logits

const N_PROMPT: Pos = 20;

#[test]
fn after_the_prompt_of_a_file_the_next_logits_are_those_of_a_fresh_run() {
    let (_dir, path) = folder();
    let (prompt, reply, next) = (tokens(20, 1), tokens(14, 2), tokens(20, 3));
    let window = |swa_type| Swa::new(swa_type, 8).expect("a window");
    let windows = [SwaType::Standard, SwaType::Chunked, SwaType::Symmetric].map(window);
    for setup in [Swa::NONE].into_iter().chain(windows).flat_map(|swa| Setup::new(swa).layouts()) {
        let mut fresh = setup.start();
        fresh.decode(0, 0, &prompt);
        let want = fresh.decode(0, N_PROMPT, &next);

        let mut saved = setup.start();
        saved.decode(0, 0, &prompt);
        saved.decode(0, N_PROMPT, &reply);
        saved.cache.slot_save(&path, 0, SlotContents::default()).expect("a file");
        // V turned over on the way, or not; in one stream or in several.
        for (v_trans, unified) in [(setup.v_trans, true), (!setup.v_trans, false)] {
            let setup = Setup { v_trans, unified, ..setup };
            let mut other = setup.start();
            other.decode(1, 0, &tokens(9, 5));
            load_prefix(&mut other.cache, &path, 0, N_PROMPT);
            assert_eq!(other.decode(0, N_PROMPT, &next), want, "{setup:?}");
            // Over a conversation that is longer.
            let params = SlotLoadParams { p1: Some(N_PROMPT), ..SlotLoadParams::default() };
            other.cache.slot_load(&path, 0, params).expect("a slot");
            assert_eq!(other.decode(0, N_PROMPT, &next), want, "{setup:?}, a slot");
        }
    }
}

#[test]
fn any_prefix_of_a_file_goes_on_as_a_fresh_run() {
    let (_dir, path) = folder();
    let setup = Setup::new(Swa::new(SwaType::Standard, 8).expect("a window"));
    let (history, next) = (tokens(34, 1), tokens(3, 3));
    let mut saved = setup.start();
    saved.decode(0, 0, &history);
    saved.cache.state_seq_save_file(&path, 0, &history).expect("a file");
    let mut other = setup.start();
    for (n, p1) in (0..=34).enumerate() {
        let loaded = load_prefix(&mut other.cache, &path, 0, p1);
        assert_eq!((loaded.kept.n_tokens(34), loaded.tokens.len()), (n, 34));
        let mut fresh = setup.start();
        fresh.decode(0, 0, &history[..n]);
        assert_eq!(other.decode(0, p1, &next), fresh.decode(0, p1, &next), "below {p1}");
    }
}

// What is kept

#[test]
fn a_prefix_is_what_a_cut_of_the_whole_leaves() {
    for (sections, streams) in [(iswa(64, 48, 4), false), (iswa(64, 48, 4), true), (vec![kv(64)], true)] {
        let new = || if streams { support::streams(2, &sections) } else { context(2, &sections) };
        let (_dir, path) = folder();
        let mut source = new();
        for pos in 0..24 {
            decode(&mut source, 1, [pos]);
            decode(&mut source, 0, [pos]);
        }
        source.seq_rm(0, 7, 9).expect("a sequence");
        source.state_seq_save_file(&path, 1, &[]).expect("a file");
        for p1 in 0..=25 {
            let (mut cut, mut prefix) = (new(), new());
            cut.state_seq_load_file(&path, 0, 0).expect("a file");
            cut.seq_rm(0, p1, -1).expect("a sequence");
            decode(&mut prefix, 0, 0..5);
            let kept = load_prefix(&mut prefix, &path, 0, p1).kept;
            let (pos_min, pos_max) = if p1 == 0 { (-1, -1) } else { (0, p1.min(24) - 1) };
            let n_cells = usize::try_from(p1.min(24)).expect("a number");
            assert_eq!(kept, Kept { pos_min, pos_max, n_cells, n_cut: 24 - n_cells });
            assert!(save(&mut prefix, 0, NONE) == save(&mut cut, 0, NONE), "below {p1}");
            assert!(is_intact(&prefix, 0, 1));
        }
    }
}

#[test]
fn a_prefix_of_llama_cpps_file_is_what_a_cut_of_the_whole_leaves() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for (name, ggml_type, n_embd, n_rot) in [
        ("tiny2x64_kf16_vf16_n64_none.slot", GgmlType::F16, 64, 0),
        ("v3/tiny2x128h64_kq8_0_vq8_0_n64_none.slot", GgmlType::Q8_0, 64, 64),
    ] {
        let path = fixtures.join(name);
        let tensor = tensor(ggml_type, n_embd);
        let new = || {
            let layer = LayerParams { k: tensor, v: Some(tensor) };
            let kv = KvParams { n_rot_k: n_rot, n_rot_v: n_rot, ..KvParams::new(64, 2, layer) };
            let legacy_rotation = Some(LegacyRotation::Rotated);
            place::context(ContextParams { legacy_rotation, ..support::params(1, &[kv]) }).expect("a context")
        };
        let (mut cut, mut prefix) = (new(), new());
        let whole = cut.state_seq_load_file(&path, 0, 64).expect(name);
        cut.seq_rm(0, 16, -1).expect("a sequence");
        let loaded = load_prefix(&mut prefix, &path, 0, 16);
        assert_eq!((&loaded.tokens, loaded.state_end), (&whole.tokens, whole.state_end));
        assert_eq!(
            (loaded.kept, loaded.kept.n_tokens(64)),
            (Kept { pos_min: 0, pos_max: 15, n_cells: 16, n_cut: 48 }, 16)
        );
        assert!(save(&mut prefix, 0, NONE) == save(&mut cut, 0, NONE), "{name}");
    }
}

#[test]
fn a_range_in_the_middle_replaces_the_sequence() {
    let (_dir, path) = folder();
    target().state_seq_save_file(&path, 0, &[]).expect("a file");
    let mut into = busy_target();
    let loaded = load_range(&mut into, &path, 1, (4, 9)).expect("a range");
    assert_eq!(loaded.kept, Kept { pos_min: 4, pos_max: 8, n_cells: 5, n_cut: 3 });
    assert_eq!([positions(&into, 0, 1), positions(&into, 1, 1)], [[4, 5, 6, 7, 8]; 2]);
    assert!(is_intact(&into, 1, 0));
}

#[test]
fn a_range_without_positions_empties_the_sequence() {
    for kind in &memories::KINDS {
        let (_dir, path) = folder();
        memories::context(kind, 1).state_seq_save_file(&path, memories::DEST, &[]).expect("a file");
        let mut empty = place::context(memories::params(kind)).expect("a context");
        let want = save(&mut empty, memories::DEST, NONE);
        for range in [(0, 0), (5, 5), (7, 3), (8, -1)] {
            let mut into = memories::context(kind, 2);
            let other = save(&mut into, memories::OTHER, NONE);
            let loaded = load_range(&mut into, &path, memories::DEST, range).expect("nothing");
            assert_eq!((loaded.kept.pos_min, loaded.kept.pos_max), (-1, -1), "{}", kind.name);
            assert!(save(&mut into, memories::DEST, NONE) == want, "{}, {range:?}", kind.name);
            assert!(save(&mut into, memories::OTHER, NONE) == other, "{}, {range:?}", kind.name);
        }
    }
}

// Where a prefix cannot end

#[test]
fn a_window_that_has_lost_what_the_next_token_sees_is_refused_by_name() {
    let (_dir, path) = folder();
    let sections = iswa(64, 8, 4);
    let mut source = context(1, &sections);
    generate(&mut source, 0, 0..20);
    source.state_seq_save_file(&path, 0, &[]).expect("a file");
    let mut into = context(1, &sections);
    decode(&mut into, 0, 0..3);
    let error = refused(&mut into, &path, 0, (0, 14));
    let reason = "section swa has positions 12 to 13, and a token at 14 needs positions 11 to 13";
    assert_eq!((error.to_string(), error.status()), (format!("{CUT} 14: {reason}"), Status::CannotCut));
    load_prefix(&mut into, &path, 0, 15);
    assert_eq!([positions(&into, 0, 0), positions(&into, 1, 0)], [(0..15).collect(), vec![12, 13, 14]]);
    // What is not cut is as it was, whatever its window has lost.
    load_prefix(&mut into, &path, 0, 20);
    assert_eq!(positions(&into, 1, 0), (12..20).collect::<Vec<_>>());
}

#[test]
fn a_range_that_leaves_out_what_the_next_token_sees_is_refused_by_name() {
    let (_dir, path) = folder();
    target().state_seq_save_file(&path, 0, &[]).expect("a file");
    let error = refused(&mut busy_target(), &path, 1, (8, 9));
    let reason = "section swa has positions 8 to 8, and a token at 9 needs positions 6 to 8";
    assert_eq!(error.to_string(), format!("{CUT} 9: {reason}"));
}

#[test]
fn states_of_an_end_have_no_prefix_and_other_sections_do() {
    for kind in &memories::KINDS {
        let (_dir, path) = folder();
        let mut source = memories::context(kind, 1);
        source.state_seq_save_file(&path, memories::DEST, &[]).expect("a file");
        let mut into = memories::context(kind, 2);
        let before = memories::image(&mut into);
        let has_states = !kind.name.contains("SA");
        match load_range(&mut into, &path, memories::DEST, (0, 5)) {
            Ok(_) => {
                assert!(!has_states, "{}", kind.name);
                source.seq_rm(memories::DEST, 5, -1).expect("a sequence");
            }
            Err(error) => {
                assert!(has_states && error.status() == Status::CannotCut, "{}: {error}", kind.name);
                assert!(memories::image(&mut into) == before, "{}", kind.name);
                load_prefix(&mut into, &path, memories::DEST, 8);
            }
        }
        let [loaded, want] = [&mut into, &mut source].map(|ctx| save(ctx, memories::DEST, NONE));
        assert!(loaded == want, "{}", kind.name);
    }
}

// What is refused, and changes nothing

#[test]
fn files_and_arguments_that_make_no_sense_are_refused() {
    let (dir, path) = folder();
    target().state_seq_save_file(&path, 0, &TOKENS).expect("a file");
    let mut into = busy_target();
    let error = refused(&mut into, &path, 2, (0, 4));
    assert_eq!(error.to_string(), "seq_id 2 is out of range [0, 2)");
    let missing = dir.path().join("missing.bin");
    assert_eq!(refused(&mut into, &missing, 1, (0, 4)).status(), Status::Io);
    assert_eq!(refused(&mut into, dir.path(), 1, (0, 4)).status(), Status::Io);
    let context_file = dir.path().join("context.bin");
    target().state_save_file(&context_file, &[]).expect("a file");
    assert_eq!(refused(&mut into, &context_file, 1, (0, 4)).status(), Status::UnsupportedVersion);

    let before = image(&into);
    let range = PosRange::new(0, 4);
    let params = RangeLoadParams { range, n_token_capacity: 4, ..RangeLoadParams::default() };
    let error = into.state_seq_load_file_range(&path, 1, params).expect_err("a refusal");
    assert!(matches!(error, Error::TokenCapacity { count: 5, capacity: 4, .. }), "{error}");
    assert!(image(&into) == before);
}

#[test]
fn a_cache_of_another_shape_or_without_room_is_refused() {
    let (_dir, path) = folder();
    target().state_seq_save_file(&path, 0, &TOKENS).expect("a file");
    let mut narrow = target_params();
    narrow[1].layers[1].k = tensor(GgmlType::F16, 8);
    let error = refused(&mut context(2, &narrow), &path, 1, (0, 4));
    assert_eq!(error.status(), Status::Mismatch);
    // The prefix alone has to fit.
    let mut small = context(2, &iswa(8, 8, 4));
    let Error::Restore { source, .. } = refused(&mut small, &path, 1, (0, 9)) else { panic!("no reason") };
    assert!(matches!(*source, Error::NoSpace { need: 9, free: 8, .. }), "{source}");
    load_prefix(&mut small, &path, 1, 8);
    assert!(is_intact(&small, 1, 0));
}

#[test]
fn every_truncation_is_refused_whatever_is_wanted() {
    let (_dir, path) = folder();
    target().state_seq_save_file(&path, 0, &TOKENS).expect("a file");
    let bytes = fs::read(&path).expect("a file");
    let mut into = busy_target();
    for len in (0..bytes.len()).rev().step_by(7) {
        fs::write(&path, &bytes[..len]).expect("a file");
        let error = refused(&mut into, &path, 1, (0, 4));
        let status = error.status();
        assert!(matches!(status, Status::Truncated | Status::UnsupportedVersion), "{len}: {error}");
    }
}

#[test]
fn a_cancelled_prefix_leaves_the_sequence_as_it_was() {
    let (_dir, path) = folder();
    target().state_seq_save_file(&path, 0, &TOKENS).expect("a file");
    let mut into = busy_target();
    into.set_progress(Some(ProgressCallback::new(|_| ControlFlow::Break(()))));
    let before = save(&mut into, 1, NONE);
    let error = load_range(&mut into, &path, 1, (0, 8)).expect_err("a cancelled load");
    assert_eq!(error.status(), Status::Cancelled);
    assert!(save(&mut into, 1, NONE) == before && is_intact(&into, 1, 1));
}
