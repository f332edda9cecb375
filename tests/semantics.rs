//! The rules of docs/semantics.md, one test each.
#![allow(missing_docs, reason = "a test")]

mod place;

use std::sync::{Arc, Mutex};

use kvstate::context::{PendingShift, Shift, UbatchToken};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, TensorParams};
use kvstate::types::{CellExt, Pos, Seq, SeqId, StateFlags, Swa, SwaType};
use kvstate::{Context, ContextParams, Error, Status};

const NONE: StateFlags = StateFlags::empty();
const PARTIAL: StateFlags = StateFlags::PARTIAL_ONLY;
const ON_DEVICE: StateFlags = StateFlags::ON_DEVICE;

/// Bytes of a cell's metadata, and of its K and V.
const META: u64 = 12;
const KV: u64 = 2 * 16;
/// Bytes of a section beside its cells: counts, then the data header, then type and row size of K and V.
const SECTION: u64 = 8 + 16 + 2 * 12;

fn kv(kv_size: u32, swa: Swa) -> KvParams {
    let tensor = TensorParams { ggml_type: GgmlType::F32, n_embd: 4 };
    KvParams { swa, ..KvParams::new(kv_size, 1, LayerParams { k: tensor, v: Some(tensor) }) }
}

fn window(swa_type: SwaType, n_swa: u32) -> Swa {
    Swa::new(swa_type, n_swa).unwrap()
}

fn standard(n_swa: u32) -> Swa {
    window(SwaType::Standard, n_swa)
}

fn params(n_seq_max: u32, sections: &[KvParams]) -> ContextParams {
    ContextParams::new(n_seq_max, sections.iter().cloned().map(Into::into).collect())
}

fn context(n_seq_max: u32, sections: &[KvParams]) -> Context {
    place::context(params(n_seq_max, sections)).unwrap()
}

fn full(kv_size: u32) -> Context {
    context(4, &[kv(kv_size, Swa::NONE)])
}

fn iswa(base: u32, swa: u32, n_swa: u32) -> Context {
    context(4, &[kv(base, Swa::NONE), kv(swa, standard(n_swa))])
}

fn decode(context: &mut Context, seq_id: SeqId, positions: impl IntoIterator<Item = Pos>) {
    let seq_ids = [seq_id];
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &seq_ids };
    let tokens: Vec<_> = positions.into_iter().map(token).collect();
    let slot = context.prepare(&tokens).unwrap();
    context.commit(&slot).unwrap();
}

fn save(context: &mut Context, seq_id: SeqId, flags: StateFlags) -> Vec<u8> {
    let size = usize::try_from(context.state_seq_get_size(seq_id, flags).unwrap()).unwrap();
    let mut state = vec![0; size];
    assert_eq!(context.state_seq_get_data(&mut state, seq_id, flags).unwrap(), size);
    state
}

fn whole(context: &mut Context) -> Vec<u8> {
    let mut state = vec![0; usize::try_from(context.state_get_size().unwrap()).unwrap()];
    context.state_get_data(&mut state).unwrap();
    state
}

/// Positions of a sequence in a section, ascending; a cell counts once.
fn positions(context: &Context, section: usize, seq_id: SeqId) -> Vec<Pos> {
    let seq = Seq::new(seq_id, context.n_seq_max()).unwrap();
    let stream = if context.n_stream() == 1 { 0 } else { seq.index() };
    let mut all: Vec<Pos> = (0..context.n_kv(section, stream, 1).unwrap())
        .filter_map(|cell| context.cell(section, stream, cell).unwrap())
        .filter(|(meta, _)| meta.seqs.contains(seq))
        .map(|(meta, _)| meta.pos)
        .collect();
    all.sort_unstable();
    all
}

fn range(context: &Context, seq_id: SeqId) -> (Pos, Pos) {
    (context.seq_pos_min(seq_id).unwrap(), context.seq_pos_max(seq_id).unwrap())
}

/// Asserts that a call fails and leaves the whole context as it was.
fn fails<T: std::fmt::Debug>(
    context: &mut Context,
    call: impl FnOnce(&mut Context) -> Result<T, Error>,
) -> Error {
    let before = whole(context);
    let error = call(context).unwrap_err();
    assert_eq!(whole(context), before);
    error
}

// What a section writes

#[test]
fn a_partial_state_of_full_attention_is_8_bytes_and_its_restore_changes_nothing() {
    let mut context = full(64);
    decode(&mut context, 0, 0..40);
    let state = save(&mut context, 0, PARTIAL);
    assert_eq!(state, [0xd8, 0x3c, 0x14, 0xaf, 0, 0, 0, 0]);
    decode(&mut context, 0, 40..50);
    let before = whole(&mut context);
    assert_eq!(context.state_seq_set_data(&state, 0, PARTIAL).unwrap(), 8);
    assert_eq!(whole(&mut context), before);
}

#[test]
fn a_whole_state_keeps_the_cells_that_the_window_masks_and_a_partial_one_does_not() {
    let mut context = context(1, &[kv(64, standard(8))]);
    decode(&mut context, 0, 0..30);
    assert_eq!(context.state_seq_get_size(0, NONE).unwrap(), 8 + SECTION + 30 * (META + KV));
    assert_eq!(context.state_seq_get_size(0, PARTIAL).unwrap(), 8 + SECTION + 8 * (META + KV));
}

#[test]
fn a_partial_state_holds_exactly_what_the_last_position_sees() {
    for (swa, seen) in [
        (window(SwaType::Standard, 8), 22..30),
        (window(SwaType::Chunked, 8), 24..30),
        (window(SwaType::Symmetric, 8), 25..30),
        (window(SwaType::Symmetric, 9), 25..30),
    ] {
        let mut source = context(1, &[kv(64, swa)]);
        decode(&mut source, 0, 0..30);
        let state = save(&mut source, 0, PARTIAL);
        let mut target = context(1, &[kv(64, swa)]);
        target.state_seq_set_data(&state, 0, PARTIAL).unwrap();
        assert_eq!(positions(&target, 0, 0), seen.collect::<Vec<_>>(), "{swa:?}");
    }
}

#[test]
fn the_masks_of_the_four_windows() {
    let masked = |swa_type, p0, p1| window(swa_type, 8).is_masked(p0, p1);
    assert!(!masked(SwaType::None, 0, Pos::MAX));
    assert!(masked(SwaType::Standard, 2, 10) && !masked(SwaType::Standard, 3, 10));
    assert!(masked(SwaType::Chunked, 7, 10) && !masked(SwaType::Chunked, 8, 10));
    assert!(masked(SwaType::Symmetric, 5, 10) && !masked(SwaType::Symmetric, 6, 10));
    assert!(masked(SwaType::Symmetric, 15, 10) && !masked(SwaType::Symmetric, 14, 10));
    assert_eq!(Swa::new(SwaType::Standard, 0), None);
}

#[test]
fn a_partial_state_of_an_iswa_pair_is_its_window_alone() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 0, 0..30);
    assert_eq!(context.state_seq_get_size(0, PARTIAL).unwrap(), 8 + SECTION + 8 * (META + KV));
    assert_eq!(context.state_seq_get_size(0, NONE).unwrap(), 8 + 2 * (SECTION + 30 * (META + KV)));
}

#[test]
fn masked_cells_of_a_whole_state_can_be_bounded_newest_first() {
    let sections = [kv(64, standard(8))];
    let mut source =
        place::context(ContextParams { max_masked_cells: Some(5), ..params(1, &sections) }).unwrap();
    decode(&mut source, 0, 0..30);
    let state = save(&mut source, 0, NONE);
    let mut target = context(1, &sections);
    target.state_seq_set_data(&state, 0, NONE).unwrap();
    assert_eq!(range(&target, 0), (17, 29));
}

#[test]
fn a_bound_on_masked_cells_leaves_a_position_whole_or_out() {
    let sections = [kv(64, standard(4))];
    let mut source =
        place::context(ContextParams { max_masked_cells: Some(2), ..params(1, &sections) }).unwrap();
    decode(&mut source, 0, [0, 1, 1, 1, 2, 3, 4, 5, 6]);
    let state = save(&mut source, 0, NONE);
    let mut target = context(1, &sections);
    target.state_seq_set_data(&state, 0, NONE).unwrap();
    assert_eq!(positions(&target, 0, 0), [2, 3, 4, 5, 6]);
}

// Restores

#[test]
fn a_restore_replaces_its_destination_and_touches_no_other_sequence() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    decode(&mut context, 1, 5..9);
    decode(&mut context, 2, 0..3);
    let state = save(&mut context, 0, NONE);
    assert_eq!(context.state_seq_set_data(&state, 1, NONE).unwrap(), state.len());
    for (seq_id, held) in [(0, 0..10), (1, 0..10), (2, 0..3)] {
        assert_eq!(positions(&context, 0, seq_id), held.collect::<Vec<_>>());
    }
}

#[test]
fn an_empty_sequence_restores_to_an_empty_destination() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 1, 0..10);
    let state = save(&mut context, 0, NONE);
    assert_eq!(state.len(), 8 + 2 * 8);
    assert_eq!(context.state_seq_set_data(&state, 1, NONE).unwrap(), state.len());
    assert_eq!(range(&context, 1), (-1, -1));
    assert_eq!(positions(&context, 0, 1), [0; 0]);
}

#[test]
fn a_state_restores_whatever_the_numbers_of_streams_are() {
    let sections = [kv(16, Swa::NONE), kv(16, standard(4))];
    let streams =
        |n_seq_max| place::context(ContextParams { unified: false, ..params(n_seq_max, &sections) }).unwrap();
    let mut sources = [streams(5), streams(2), context(3, &sections)];
    for source in &mut sources {
        decode(source, 1, 0..9);
        let state = save(source, 1, NONE);
        for target in &mut [streams(3), streams(1), context(2, &sections)] {
            let dest = target.n_seq_max().cast_signed() - 1;
            assert_eq!(target.state_seq_set_data(&state, dest, NONE).unwrap(), state.len());
            assert_eq!(positions(target, 0, dest), (0..9).collect::<Vec<_>>());
        }
    }
}

#[test]
fn positions_may_repeat_and_have_gaps() {
    let held = [3, 3, 3, 3, 9, 20, 21];
    let mut context = full(32);
    decode(&mut context, 0, held);
    let state = save(&mut context, 0, NONE);
    context.state_seq_set_data(&state, 2, NONE).unwrap();
    assert_eq!(positions(&context, 0, 2), held);
}

#[test]
fn the_cells_of_a_restore_need_not_be_neighbours() {
    let mut context = full(20);
    for pos in 0..10 {
        decode(&mut context, 0, [pos]);
        decode(&mut context, 1, [pos]);
    }
    let state = save(&mut context, 0, NONE);
    context.seq_rm(0, -1, -1).unwrap();
    context.state_seq_set_data(&state, 2, NONE).unwrap();
    assert_eq!(positions(&context, 0, 2), (0..10).collect::<Vec<_>>());
    assert_eq!(save(&mut context, 2, NONE)[8..16], state[8..16]);
}

#[test]
fn bytes_behind_a_state_are_ignored_and_not_consumed() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 0, 0..10);
    for flags in [NONE, PARTIAL] {
        let mut state = save(&mut context, 0, flags);
        let len = state.len();
        state.extend([0xff; 100]);
        assert_eq!(context.state_seq_set_data(&state, 1, flags).unwrap(), len);
    }
}

#[test]
fn a_partial_state_of_an_older_llama_cpp_is_checked_skipped_and_counted() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    // Until b11434 a partial state of full attention held all of it.
    let legacy = save(&mut context, 0, NONE);
    let before = whole(&mut context);
    assert_eq!(context.state_seq_set_data(&legacy, 0, PARTIAL).unwrap(), legacy.len());
    assert_eq!(context.state_seq_set_data(&legacy[..legacy.len() - 1], 0, PARTIAL).unwrap(), 8);
    assert_eq!(whole(&mut context), before);
}

#[test]
fn a_restore_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut context = full(16);
    decode(&mut context, 0, 0..10);
    let state = save(&mut context, 0, NONE);
    let error = fails(&mut context, |context| context.state_seq_set_data(&state, 1, NONE));
    assert_eq!(
        error.to_string(),
        "failed to find 10 available cells in kv cache: 6 of 16 can be used (section kv, stream 0)"
    );
}

#[test]
fn the_second_section_that_does_not_fit_leaves_the_first_as_it_was() {
    let mut source = iswa(64, 64, 40);
    decode(&mut source, 0, 0..30);
    let state = save(&mut source, 0, NONE);
    let mut target = iswa(64, 16, 40);
    decode(&mut target, 0, 0..5);
    let error = fails(&mut target, |target| target.state_seq_set_data(&state, 0, NONE));
    assert!(error.to_string().contains("(section swa, stream 0)"), "{error}");
}

// Placement under a window

#[test]
fn the_cells_of_the_destination_count_as_free() {
    let mut context = full(10);
    decode(&mut context, 0, 0..10);
    let state = save(&mut context, 0, NONE);
    assert_eq!(context.state_seq_set_data(&state, 0, NONE).unwrap(), state.len());
}

#[test]
fn a_small_window_cache_drops_the_oldest_masked_cells_of_the_state() {
    let mut source = iswa(64, 64, 8);
    decode(&mut source, 0, 0..30);
    let state = save(&mut source, 0, NONE);
    let mut target = iswa(64, 12, 8);
    assert_eq!(target.state_seq_set_data(&state, 0, NONE).unwrap(), state.len());
    assert_eq!(positions(&target, 0, 0), (0..30).collect::<Vec<_>>());
    assert_eq!(positions(&target, 1, 0), (18..30).collect::<Vec<_>>());
}

#[test]
fn masked_cells_of_others_are_taken_last_oldest_first_and_leave_no_gap() {
    let mut source = iswa(64, 64, 8);
    decode(&mut source, 0, 0..30);
    let state = save(&mut source, 0, NONE);
    let mut target = iswa(64, 24, 8);
    decode(&mut target, 1, 0..20);
    // 4 cells are empty, the 8 that sequence 0 sees have to be placed: 4 of sequence 1 go, the oldest.
    assert_eq!(target.state_seq_set_data(&state, 0, NONE).unwrap(), state.len());
    assert_eq!(positions(&target, 1, 0), (22..30).collect::<Vec<_>>());
    assert_eq!(positions(&target, 1, 1), (4..20).collect::<Vec<_>>());
    assert_eq!(positions(&target, 0, 1), (0..20).collect::<Vec<_>>());
}

#[test]
fn cells_that_another_sequence_still_sees_are_never_taken() {
    let mut source = iswa(64, 64, 8);
    decode(&mut source, 0, 0..30);
    let state = save(&mut source, 0, NONE);
    let mut target = iswa(64, 10, 8);
    decode(&mut target, 1, 0..8);
    let error = fails(&mut target, |target| target.state_seq_set_data(&state, 0, NONE));
    assert_eq!(
        error.to_string(),
        "failed to find 8 available cells in kv cache: 3 of 10 can be used (section swa, stream 0)"
    );
}

// ON_DEVICE

#[test]
fn an_on_device_state_is_metadata_survives_clear_and_restores_anywhere() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 0, 0..10);
    let size = context.state_seq_get_size(0, ON_DEVICE).unwrap();
    assert_eq!(size, 8 + 2 * (SECTION + 10 * META));
    let plain = save(&mut context, 0, NONE);
    let state = save(&mut context, 0, ON_DEVICE);
    context.clear(true).unwrap();
    assert_eq!(context.state_seq_set_data(&state, 3, ON_DEVICE).unwrap(), state.len());
    context.seq_cp(3, 0, -1, -1).unwrap();
    assert_eq!(save(&mut context, 0, NONE), plain);
}

#[test]
fn a_later_on_device_state_of_a_sequence_replaces_the_earlier_one() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    let earlier = save(&mut context, 0, ON_DEVICE);
    decode(&mut context, 0, 10..12);
    let later = save(&mut context, 0, ON_DEVICE);
    let error = fails(&mut context, |context| context.state_seq_set_data(&earlier, 1, ON_DEVICE));
    assert_eq!(
        error.to_string(),
        "no device state of sequence 0: a later one has replaced it, or it is of another context"
    );
    context.state_seq_set_data(&later, 1, ON_DEVICE).unwrap();
}

#[test]
fn an_on_device_state_that_was_replaced_by_one_of_the_same_positions_is_never_mistaken_for_it() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    let earlier = save(&mut context, 0, ON_DEVICE);
    let later = save(&mut context, 0, ON_DEVICE);
    assert_eq!(earlier.len(), later.len());
    let error = fails(&mut context, |context| context.state_seq_set_data(&earlier, 1, ON_DEVICE));
    assert_eq!(
        error.to_string(),
        "no device state of sequence 0: a later one has replaced it, or it is of another context"
    );
    assert_eq!(context.state_seq_set_data(&later, 1, ON_DEVICE).unwrap(), later.len());
}

#[test]
fn a_blob_of_other_flags_than_the_live_on_device_state_is_named() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    let partial = save(&mut context, 0, PARTIAL | ON_DEVICE);
    let error = fails(&mut context, |context| context.state_seq_set_data(&partial, 1, ON_DEVICE));
    assert_eq!(error.to_string(), "no device state of sequence 0: the live one was taken with other flags");
}

#[test]
fn an_on_device_state_that_was_never_taken_is_named() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    let state = save(&mut context, 0, ON_DEVICE);
    let mut other = full(64);
    let error = other.state_seq_set_data(&state, 0, ON_DEVICE).unwrap_err();
    assert_eq!(error.to_string(), "no device state of sequence 0: none was taken");
    assert_eq!(error.status(), Status::NoDeviceState);
}

#[test]
fn on_device_and_partial_combine() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 0, 0..20);
    let state = save(&mut context, 0, PARTIAL | ON_DEVICE);
    assert_eq!(state.len() as u64, 8 + SECTION + 8 * META);
    context.state_seq_set_data(&state, 1, PARTIAL | ON_DEVICE).unwrap();
    assert_eq!(range(&context, 1), (12, 19));
    assert_eq!(positions(&context, 0, 1), [0; 0]);
}

// Buffers

#[test]
fn a_larger_buffer_is_fine_and_a_smaller_one_stays_untouched() {
    let mut context = full(64);
    decode(&mut context, 0, 0..10);
    let size = save(&mut context, 0, NONE).len();
    let mut large = vec![0xaa; size + 9];
    assert_eq!(context.state_seq_get_data(&mut large, 0, NONE).unwrap(), size);
    assert_eq!(large[size..], [0xaa; 9]);
    let mut small = vec![0xaa; size - 1];
    let error = context.state_seq_get_data(&mut small, 0, NONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("buffer too small: the state has {size} bytes, the buffer {}", size - 1)
    );
    assert!(small.iter().all(|&byte| byte == 0xaa));
}

// Shifts

type Calls = Arc<Mutex<Vec<(usize, usize, Vec<u32>, Vec<Pos>)>>>;

fn recording(calls: &Calls) -> Shift {
    let calls = Arc::clone(calls);
    Shift::Callback(Box::new(move |PendingShift { section, stream, cells, shifts }| {
        calls.lock().unwrap().push((section, stream, cells.to_vec(), shifts.to_vec()));
        Ok(())
    }))
}

fn shifting(sections: &[KvParams], shift: Shift) -> Context {
    place::context(ContextParams { shift, ..params(4, sections) }).unwrap()
}

#[test]
fn pending_shifts_are_applied_once_before_k_is_written() {
    let calls = Calls::default();
    let mut context = shifting(&[kv(64, Swa::NONE)], recording(&calls));
    decode(&mut context, 0, 0..6);
    context.seq_rm(0, 1, 3).unwrap();
    context.seq_add(0, 3, -1, -2).unwrap();
    assert_eq!(context.pending_shifts(0, 0).unwrap().collect::<Vec<_>>(), [(3, -2), (4, -2), (5, -2)]);
    let size = context.state_seq_get_size(0, NONE).unwrap();
    assert!(calls.lock().unwrap().is_empty());
    assert_eq!(save(&mut context, 0, NONE).len() as u64, size);
    assert_eq!(save(&mut context, 0, NONE).len() as u64, size);
    assert_eq!(*calls.lock().unwrap(), [(0, 0, vec![3, 4, 5], vec![-2, -2, -2])]);
    assert_eq!(context.pending_shifts(0, 0).unwrap().count(), 0);
}

#[test]
fn shifts_of_rows_that_are_not_written_stay_pending() {
    let calls = Calls::default();
    let mut context = shifting(&[kv(64, Swa::NONE)], recording(&calls));
    decode(&mut context, 0, 0..6);
    decode(&mut context, 1, 0..6);
    context.seq_add(0, 0, -1, 1).unwrap();
    save(&mut context, 0, PARTIAL);
    save(&mut context, 1, NONE);
    assert!(calls.lock().unwrap().is_empty());
    whole(&mut context);
    assert_eq!(calls.lock().unwrap().len(), 1);
}

#[test]
fn a_division_is_pending_as_new_minus_old_position() {
    let mut context = shifting(&[kv(64, Swa::NONE)], Shift::Engine);
    decode(&mut context, 0, 0..6);
    context.seq_div(0, 4, -1, 2).unwrap();
    assert_eq!(positions(&context, 0, 0), [0, 1, 2, 2, 2, 3]);
    assert_eq!(context.pending_shifts(0, 0).unwrap().collect::<Vec<_>>(), [(4, -2), (5, -3)]);
}

#[test]
fn an_engine_that_did_not_rotate_cannot_save() {
    let mut context = shifting(&[kv(64, Swa::NONE)], Shift::Engine);
    decode(&mut context, 0, 0..6);
    context.seq_add(0, 4, -1, 10).unwrap();
    let mut state = vec![0; usize::try_from(context.state_seq_get_size(0, NONE).unwrap()).unwrap()];
    let error = context.state_seq_get_data(&mut state, 0, NONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 cells have a pending shift: the engine promised to rotate K and to call shift_done before a save \
         (section kv, stream 0)"
    );
    context.shift_done();
    assert_eq!(context.state_seq_get_data(&mut state, 0, NONE).unwrap(), state.len());
}

#[test]
fn a_callback_that_fails_fails_the_save_and_the_shift_stays_pending() {
    let mut context = shifting(&[kv(64, Swa::NONE)], Shift::Callback(Box::new(|_| Err("no stream".into()))));
    decode(&mut context, 0, 0..6);
    context.seq_add(0, 4, -1, 10).unwrap();
    let mut state = vec![0xaa; usize::try_from(context.state_seq_get_size(0, NONE).unwrap()).unwrap()];
    let error = context.state_seq_get_data(&mut state, 0, NONE).unwrap_err();
    assert_eq!(error.status(), Status::ShiftFailed);
    assert!(state.iter().all(|&byte| byte == 0xaa));
    assert_eq!(context.pending_shifts(0, 0).unwrap().count(), 2);
}

#[test]
fn nobody_to_rotate_k_means_no_shift() {
    let mut context = full(64);
    decode(&mut context, 0, 0..6);
    assert!(!context.can_shift());
    let add = fails(&mut context, |context| context.seq_add(0, 0, -1, 1));
    let div = fails(&mut context, |context| context.seq_div(0, 0, -1, 2));
    assert_eq!((add.status(), div.status()), (Status::CannotShift, Status::CannotShift));
    // What moves nothing is no shift.
    context.seq_add(0, 0, -1, 0).unwrap();
    context.seq_add(0, 3, 3, 5).unwrap();
    context.seq_div(0, 0, -1, 1).unwrap();
}

#[test]
fn sections_of_different_sizes_cannot_shift() {
    let sizes = |swa| shifting(&[kv(64, Swa::NONE), kv(swa, standard(8))], Shift::Engine);
    assert!(sizes(64).can_shift());
    assert!(!sizes(32).can_shift());
}

#[test]
fn a_shift_below_0_frees_the_cell_and_one_above_the_largest_position_is_refused() {
    let mut context = shifting(&[kv(64, Swa::NONE), kv(64, standard(8))], Shift::Engine);
    decode(&mut context, 0, 0..6);
    context.seq_add(0, 0, -1, -2).unwrap();
    assert_eq!(positions(&context, 0, 0), [0, 1, 2, 3]);
    assert_eq!(positions(&context, 1, 0), [0, 1, 2, 3]);
    let error = context.seq_add(0, 0, -1, Pos::MAX).unwrap_err();
    assert_eq!(error.to_string(), "position 3 shifted by 2147483647 leaves the range of positions");
    assert_eq!(positions(&context, 0, 0), [0, 1, 2, 3]);
}

#[test]
fn a_division_by_less_than_1_is_refused() {
    let mut context = shifting(&[kv(64, Swa::NONE)], Shift::Engine);
    decode(&mut context, 0, 0..6);
    for d in [0, -3] {
        assert_eq!(context.seq_div(0, 0, -1, d).unwrap_err().status(), Status::InvalidArgument);
    }
}

// Sequence operations

#[test]
fn positions_are_those_of_the_window_where_there_is_one() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 0, 0..20);
    let checkpoint = save(&mut context, 0, PARTIAL);
    context.state_seq_set_data(&checkpoint, 0, PARTIAL).unwrap();
    assert_eq!(range(&context, 0), (12, 19));
    assert_eq!(positions(&context, 0, 0).len(), 20);
    assert_eq!(range(&context, 3), (-1, -1));
}

#[test]
fn seq_rm_takes_a_range_of_one_sequence_or_of_all() {
    let mut context = iswa(64, 64, 8);
    decode(&mut context, 0, 0..6);
    decode(&mut context, 1, 0..6);
    assert!(context.seq_rm(0, 2, 4).unwrap());
    assert_eq!(positions(&context, 0, 0), [0, 1, 4, 5]);
    assert!(context.seq_rm(-1, 4, -1).unwrap());
    for section in 0..2 {
        assert_eq!(positions(&context, section, 0), [0, 1]);
        assert_eq!(positions(&context, section, 1), [0, 1, 2, 3]);
    }
}

#[test]
fn seq_cp_shares_cells_within_a_stream() {
    let mut context = full(8);
    decode(&mut context, 0, 0..8);
    context.seq_cp(0, 1, 2, 6).unwrap();
    assert_eq!(positions(&context, 0, 1), [2, 3, 4, 5]);
    context.seq_rm(0, -1, -1).unwrap();
    assert_eq!(positions(&context, 0, 1), [2, 3, 4, 5]);
}

#[test]
fn seq_cp_between_streams_copies_a_whole_sequence_at_once() {
    let sections = [kv(16, Swa::NONE), kv(16, standard(4))];
    let mut context = place::context(ContextParams { unified: false, ..params(3, &sections) }).unwrap();
    decode(&mut context, 0, 0..9);
    decode(&mut context, 2, 0..2);
    // A state gives the tensors contents that can be told from zeroes.
    let mut state = save(&mut context, 0, NONE);
    // V of the last section, and behind it the counts of streams 1 and 2.
    let v = state.len() - 8 - 16 * 9..state.len() - 8;
    for (i, byte) in state[v.clone()].iter_mut().enumerate() {
        *byte = u8::try_from(i).unwrap();
    }
    context.state_seq_set_data(&state, 0, NONE).unwrap();

    let error = fails(&mut context, |context| context.seq_cp(0, 2, 3, 6));
    assert_eq!(error.status(), Status::InvalidArgument);
    context.seq_cp(0, 2, -1, -1).unwrap();
    let copy = save(&mut context, 2, NONE);
    assert_eq!(copy[copy.len() - 16 * 9..], state[v]);
    assert_eq!(positions(&context, 0, 2), (0..9).collect::<Vec<_>>());
}

#[test]
fn seq_keep_leaves_one_sequence() {
    let mut context = full(16);
    decode(&mut context, 0, 0..3);
    decode(&mut context, 1, 0..4);
    context.seq_cp(1, 2, -1, -1).unwrap();
    context.seq_keep(1).unwrap();
    assert_eq!([0, 1, 2].map(|seq_id| context.seq_pos_max(seq_id).unwrap()), [-1, 3, -1]);
}

#[test]
fn seq_keep_leaves_no_other_sequence_in_another_stream() {
    let params = ContextParams { unified: false, ..params(2, &[kv(16, Swa::NONE)]) };
    let mut context = place::context(params).unwrap();
    decode(&mut context, 0, 0..3);
    decode(&mut context, 1, 0..4);
    context.seq_keep(1).unwrap();
    assert_eq!([0, 1].map(|seq_id| context.seq_pos_max(seq_id).unwrap()), [-1, 3]);
}

#[test]
fn a_sequence_out_of_range_is_refused_everywhere() {
    let mut context = full(16);
    for seq_id in [-1, 4, 256, SeqId::MAX] {
        assert!(context.seq_cp(0, seq_id, -1, -1).is_err());
        assert!(context.seq_keep(seq_id).is_err());
        assert!(context.seq_add(seq_id, 0, 1, 1).is_err());
        assert!(context.seq_pos_min(seq_id).is_err());
        assert!(context.state_seq_get_size(seq_id, NONE).is_err());
        assert!(context.state_seq_set_data(&[], seq_id, NONE).is_err());
        let error = context.state_seq_get_data(&mut [], seq_id, NONE).unwrap_err();
        assert_eq!(error.to_string(), format!("seq_id {seq_id} is out of range [0, 4)"));
    }
    assert!(context.seq_rm(4, -1, -1).is_err());
}

// An engine

#[test]
fn a_slot_is_good_for_the_cache_as_it_was_and_for_its_own_context_only() {
    let mut context = full(16);
    let token = UbatchToken { pos: 0, ext: CellExt::default(), seq_ids: &[0] };
    let slot = context.prepare(&[token]).unwrap();
    assert_eq!(full(16).commit(&slot).unwrap_err().to_string(), "slot: prepared for another context");
    decode(&mut context, 1, [0]);
    assert_eq!(context.commit(&slot).unwrap_err().status(), Status::Stale);
    let slot = context.prepare(&[token]).unwrap();
    context.commit(&slot).unwrap();
    assert_eq!(context.commit(&slot).unwrap_err().status(), Status::Stale);
}

#[test]
fn a_ubatch_that_makes_no_sense_or_has_no_room_is_refused() {
    let streams = place::context(ContextParams { unified: false, ..params(2, &[kv(4, Swa::NONE)]) }).unwrap();
    let token = |pos, seq_ids| UbatchToken { pos, ext: CellExt::default(), seq_ids };
    for (tokens, status) in [
        (vec![token(-1, &[0][..])], Status::InvalidArgument),
        (vec![token(0, &[])], Status::InvalidArgument),
        (vec![token(0, &[2])], Status::InvalidArgument),
        (vec![token(0, &[0, 1])], Status::InvalidArgument),
        ((0..5).map(|pos| token(pos, &[1][..])).collect(), Status::NoSpace),
    ] {
        assert_eq!(streams.prepare(&tokens).unwrap_err().status(), status, "{tokens:?}");
    }
}

#[test]
fn a_mask_shows_the_own_sequence_up_to_the_token_and_inside_the_window() {
    let mut context = iswa(8, 8, 2);
    decode(&mut context, 0, [0, 1]);
    decode(&mut context, 1, [0]);
    decode(&mut context, 0, [2, 3]);
    let token = UbatchToken { pos: 2, ext: CellExt::default(), seq_ids: &[0] };
    let seen = |section| {
        let mut row = [0.5; 6];
        context.mask_row(section, &token, &mut row).unwrap();
        row.map(|value| if value == 0.0 { 1 } else { i32::from(value == f32::NEG_INFINITY) - 1 })
    };
    assert_eq!(seen(0), [1, 1, 0, 1, 0, 0]);
    assert_eq!(seen(1), [0, 1, 0, 1, 0, 0]);
    let longer = context.mask_row(0, &token, &mut [0.0; 9]).unwrap_err();
    assert_eq!(longer.to_string(), "n_kv: 9, the section has 8 cells");
    assert!(
        context.mask_row(0, &token, &mut [0.0; 3]).unwrap_err().to_string().contains("ends before cell 3")
    );
}

#[test]
fn a_patch_of_an_image_sees_those_before_it_in_reading_order() {
    let mut context = context(1, &[KvParams { cell_ext: true, ..kv(8, Swa::NONE) }]);
    let patch = |x, y| UbatchToken { pos: 5, ext: CellExt { x, y, tok: -1 }, seq_ids: &[0] };
    let image = [patch(0, 0), patch(1, 0), patch(0, 1), patch(1, 1)];
    let slot = context.prepare(&image).unwrap();
    context.commit(&slot).unwrap();
    let mut row = [0.0; 4];
    context.mask_row(0, &image[2], &mut row).unwrap();
    assert_eq!(row.map(|value| value == 0.0), [true, true, true, false]);
}

#[test]
fn n_kv_reaches_to_the_last_used_cell_padded_and_at_most_the_cache() {
    let mut context = full(600);
    assert_eq!(context.n_kv(0, 0, 256).unwrap(), 256);
    decode(&mut context, 0, 0..257);
    assert_eq!(context.n_kv(0, 0, 256).unwrap(), 512);
    assert_eq!(context.n_kv(0, 0, 1).unwrap(), 257);
    decode(&mut context, 0, 257..520);
    assert_eq!(context.n_kv(0, 0, 256).unwrap(), 600);
    assert!(context.n_kv(1, 0, 256).is_err() && context.n_kv(0, 1, 256).is_err());
}

#[test]
fn a_ubatch_takes_over_cells_that_its_window_has_passed() {
    let mut context = context(1, &[kv(8, standard(4))]);
    decode(&mut context, 0, 0..8);
    decode(&mut context, 0, [8, 9]);
    assert_eq!(positions(&context, 0, 0), (2..10).collect::<Vec<_>>());
}

// Geometry

#[test]
fn a_geometry_that_does_not_fit_itself_is_refused_by_field() {
    let bad = |change: &dyn Fn(&mut KvParams)| {
        let mut kv = kv(8, Swa::NONE);
        change(&mut kv);
        place::context(params(1, &[kv])).unwrap_err().to_string()
    };
    let q8 = |n_embd| TensorParams { ggml_type: GgmlType::Q8_0, n_embd };
    assert_eq!(bad(&|kv| kv.kv_size = 0), "kv.kv_size: 0 cells");
    assert_eq!(
        bad(&|kv| kv.layers[0].k = q8(48)),
        "kv.layer 0.k.n_embd: 48 is no multiple of the 32 elements of a q8_0 block"
    );
    assert_eq!(bad(&|kv| kv.layers[0].k.n_embd = 0), "kv.layer 0.k.n_embd: 0 elements per cell");
    assert_eq!(
        bad(&|kv| {
            kv.v_trans = true;
            kv.layers[0].v = Some(q8(64));
        }),
        "kv.v_trans: V of layer 0 is 8 (q8_0), and quantised V cannot be transposed"
    );
    assert_eq!(bad(&|kv| kv.n_rot_k = 3), "kv.n_rot_k: 3, the size of a Hadamard rotation is a power of 2");
    for n_seq_max in [0, 257] {
        let error = place::context(params(n_seq_max, &[kv(8, Swa::NONE)])).unwrap_err();
        assert_eq!(error.to_string(), format!("n_seq_max: {n_seq_max} is out of range [1, 256]"));
    }
    assert!(place::context(params(1, &[])).is_err());
}

#[test]
fn cells_cost_no_memory_until_they_are_used() {
    // Its 2.5 GiB of metadata and the time to write them would be felt.
    let tensor = TensorParams { ggml_type: GgmlType::F32, n_embd: 1 };
    let kv = KvParams::new(1 << 26, 1, LayerParams { k: tensor, v: None });
    match Context::new(params(1, &[kv])) {
        Ok(mut context) => decode(&mut context, 0, 0..3),
        Err(error) => assert_eq!(error.status(), Status::OutOfMemory),
    }
}

#[test]
fn a_cache_that_memory_does_not_hold_is_an_error() {
    let tensor = TensorParams { ggml_type: GgmlType::F32, n_embd: 1 << 30 };
    let kv = KvParams::new(u32::MAX, 1, LayerParams { k: tensor, v: None });
    let error = Context::new(params(1, &[kv])).unwrap_err();
    assert!(matches!(error.status(), Status::OutOfMemory | Status::InvalidArgument), "{error}");
}

#[test]
fn transposed_v_of_more_than_4_gib_a_layer_keeps_its_channels_apart() {
    let (n_channel, kv_size) = (4096_u16, 1 << 20);
    let tensor = |n_embd| TensorParams { ggml_type: GgmlType::F16, n_embd };
    let layer = LayerParams { k: tensor(1), v: Some(tensor(u32::from(n_channel))) };
    let kv = KvParams { v_trans: true, ..KvParams::new(kv_size, 1, layer) };
    // 8 GiB of addresses; only the pages of the cells in use are ever touched.
    let mut context = match Context::new(params(2, &[kv])) {
        Ok(context) => context,
        Err(error) => return println!("skipped: {error}"),
    };
    decode(&mut context, 0, 0..3);
    let mut state = save(&mut context, 0, NONE);
    let v = state.len() - usize::from(n_channel) * 3 * 2;
    for (i, element) in state[v..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *element = u16::try_from(i).unwrap().to_le_bytes();
    }
    context.state_seq_set_data(&state, 0, NONE).unwrap();
    assert_eq!(save(&mut context, 0, NONE), state);
}
