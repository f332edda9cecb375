use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::types::{MAX_SEQ, Swa, SwaType};

const A: usize = 0;
const B: usize = 1;

fn seq(i: usize) -> Seq {
    Seq::new(i32::try_from(i).unwrap(), MAX_SEQ).unwrap()
}

fn metas(s: usize, positions: impl IntoIterator<Item = Pos>) -> Vec<CellMeta> {
    let meta = |pos| CellMeta { pos, ext: CellExt::default(), seqs: SeqSet::of(seq(s)) };
    positions.into_iter().map(meta).collect()
}

fn window(n_swa: u32) -> Swa {
    Swa::new(SwaType::Standard, n_swa).unwrap()
}

fn append(cells: &mut Cells, s: usize, positions: impl IntoIterator<Item = Pos>) {
    let metas = metas(s, positions);
    let slot = cells.find_slot(u32::try_from(metas.len()).unwrap(), Swa::NONE).unwrap();
    cells.apply(&slot, &metas);
}

fn positions(cells: &Cells, s: usize) -> Vec<Pos> {
    cells.seq_cells(seq(s), PosRange::ALL).iter().map(|&(pos, _)| pos).collect()
}

/// 8 cells, `a` positions of sequence A and then `b` of sequence B.
fn filled(a: Pos, b: Pos) -> Cells {
    let mut cells = Cells::new(8, 3, false).unwrap();
    append(&mut cells, A, 0..a);
    append(&mut cells, B, 0..b);
    cells
}

#[test]
fn seq_set_has_all_256_sequences() {
    let mut set = SeqSet::EMPTY;
    for i in [255, 0, 64, 63] {
        set.insert(seq(i));
    }
    assert_eq!(set.iter().map(Seq::index).collect::<Vec<_>>(), [0, 63, 64, 255]);
    assert_eq!((set.len(), set.single()), (4, None));
    assert_eq!(SeqSet::from_words(set.words()), set);
    assert_eq!(SeqSet::of(seq(255)).single(), Some(seq(255)));
    set.remove(seq(255));
    assert!(!set.contains(seq(255)) && set.contains(seq(64)));
}

#[test]
fn place_counts_the_destinations_own_cells_as_free() {
    let placed = filled(5, 3).place(Some(seq(A)), &metas(A, 0..5), Swa::NONE, true).unwrap();
    assert_eq!(placed.cells, [0, 1, 2, 3, 4]);
}

#[test]
fn place_leaves_a_cell_that_the_destination_shares() {
    let mut cells = filled(5, 0);
    cells.seq_cp(seq(A), seq(B), PosRange::new(0, 2));
    let placed = cells.place(Some(seq(A)), &metas(A, 0..6), Swa::NONE, true).unwrap();
    assert_eq!(placed.cells, [2, 3, 4, 5, 6, 7]);
}

#[test]
fn place_keeps_masked_cells_while_there_is_room() {
    let placed = filled(0, 3).place(Some(seq(A)), &metas(A, 0..5), window(2), true).unwrap();
    assert_eq!(placed.kept, [0, 1, 2, 3, 4]);
}

#[test]
fn place_drops_masked_cells_oldest_position_first() {
    let blob = metas(A, [3, 0, 1, 2, 4]);
    let placed = filled(0, 5).place(Some(seq(A)), &blob, window(2), true).unwrap();
    assert_eq!(placed.kept, [0, 3, 4]);
}

#[test]
fn place_never_splits_a_position() {
    let blob = metas(A, [0, 0, 0, 1, 2]);
    let placed = filled(0, 4).place(Some(seq(A)), &blob, window(2), true).unwrap();
    assert_eq!(placed.kept, [3, 4]);
}

#[test]
fn place_takes_masked_cells_of_others_only_last_and_purges_them() {
    // B at 0..7 with a window of 3: 0..=4 are masked for its next token. One cell is empty.
    let mut cells = filled(0, 7);
    let blob = metas(A, [0, 1, 2, 8, 9, 10]);
    let placed = cells.place(Some(seq(A)), &blob, window(3), true).unwrap();
    assert_eq!(placed.kept, [3, 4, 5]);
    assert_eq!(placed.cells, [0, 1, 7]);
    cells.seq_rm(seq(A), PosRange::ALL);
    cells.apply(&placed.cells, &blob[3..]);
    assert_eq!(positions(&cells, B), [2, 3, 4, 5, 6]);
}

#[test]
fn place_never_takes_a_shared_cell() {
    let mut cells = filled(0, 8);
    cells.seq_cp(seq(B), seq(2), PosRange::new(0, 3));
    // The next token of B sees 6 and 7; 0..=2 are shared.
    let placed = cells.place(Some(seq(A)), &metas(A, [0; 3]), window(3), true).unwrap();
    assert_eq!(placed.cells, [3, 4, 5]);
    let shortage = cells.place(Some(seq(A)), &metas(A, [0; 4]), window(3), true).unwrap_err();
    assert_eq!(shortage, Shortage { need: 4, free: 3 });
}

#[test]
fn place_without_leave_to_drop_keeps_every_cell_or_refuses() {
    let cells = filled(0, 5);
    let shortage = cells.place(Some(seq(A)), &metas(A, 0..5), window(5), false).unwrap_err();
    assert_eq!(shortage, Shortage { need: 5, free: 4 });
}

#[test]
fn place_refuses_what_does_not_fit() {
    let shortage = filled(2, 5).place(Some(seq(A)), &metas(A, 0..4), Swa::NONE, true).unwrap_err();
    assert_eq!(shortage, Shortage { need: 4, free: 3 });
}

#[test]
fn seq_rm_lowers_the_head_to_the_first_freed_cell() {
    let mut cells = filled(4, 2);
    cells.seq_rm(seq(A), PosRange::new(1, 3));
    assert_eq!((cells.head(), cells.n_used(), cells.used_max_p1()), (1, 4, 6));
}

#[test]
fn seq_add_frees_cells_that_get_below_zero() {
    let mut cells = filled(4, 2);
    cells.seq_add(seq(A), PosRange::ALL, -2).unwrap();
    assert_eq!(positions(&cells, A), [0, 1]);
    assert_eq!(cells.shifted().collect::<Vec<_>>(), [(2, -2), (3, -2)]);
    assert_eq!(cells.head(), 0);
}

#[test]
fn seq_add_that_overflows_changes_nothing() {
    let mut cells = filled(4, 2);
    let err = cells.seq_add(seq(A), PosRange::ALL, Pos::MAX - 2).unwrap_err();
    assert!(matches!(err, Error::PosOverflow { pos: 3, .. }));
    assert_eq!(positions(&cells, A), [0, 1, 2, 3]);
    assert!(!cells.has_shift());
    assert_eq!(cells.head(), 6);
}

#[test]
fn shared_cells_move_in_all_their_sequences() {
    let mut cells = filled(4, 0);
    cells.seq_cp(seq(A), seq(B), PosRange::new(2, -1));
    cells.seq_add(seq(A), PosRange::ALL, 10).unwrap();
    assert_eq!(positions(&cells, B), [12, 13]);
}

#[test]
fn a_shift_and_its_reverse_leave_nothing_to_rotate() {
    let mut cells = filled(4, 0);
    cells.seq_add(seq(A), PosRange::ALL, 10).unwrap();
    cells.seq_add(seq(A), PosRange::ALL, -10).unwrap();
    assert!(!cells.has_shift());
}

#[test]
fn seq_div_shifts_by_new_less_old() {
    let mut cells = filled(4, 0);
    cells.seq_div(seq(A), PosRange::new(2, -1), 2).unwrap();
    assert_eq!(positions(&cells, A), [0, 1, 1, 1]);
    assert_eq!(cells.shifted().collect::<Vec<_>>(), [(2, -1), (3, -2)]);
    assert_eq!(
        cells.seq_div(seq(A), PosRange::ALL, 0).unwrap_err().status(),
        crate::error::Status::InvalidArgument
    );
}

#[test]
fn seq_cp_from_brings_cells_shifts_and_head() {
    let mut other = filled(3, 2);
    other.seq_add(seq(B), PosRange::ALL, 5).unwrap();
    let mut cells = filled(8, 0);
    cells.seq_cp_from(&other, seq(B), seq(2));
    assert_eq!(cells.used_cells().collect::<Vec<_>>(), [3, 4]);
    assert_eq!(cells.seq_cells(seq(2), PosRange::ALL), [(5, 3), (6, 4)]);
    assert_eq!(cells.shifted().collect::<Vec<_>>(), [(3, 5), (4, 5)]);
    assert_eq!((cells.head(), cells.seq_len(seq(A))), (other.head(), 0));
}

#[test]
fn find_slot_wraps_and_goes_back_to_the_start_when_there_is_room_before_the_head() {
    let mut cells = Cells::new(8, 1, false).unwrap();
    cells.apply(&[5], &metas(A, [0]));
    assert_eq!(cells.find_slot(3, Swa::NONE).unwrap(), [6, 7, 0]);
    assert_eq!(cells.find_slot(2, Swa::NONE).unwrap(), [0, 1]);
    assert_eq!(cells.find_slot(8, Swa::NONE), None);
}

#[test]
fn an_empty_slot_changes_nothing() {
    let mut cells = filled(3, 0);
    assert_eq!(cells.find_slot(0, Swa::NONE), Some(Vec::new()));
    cells.apply(&[], &[]);
    assert_eq!((cells.head(), cells.n_used()), (3, 3));
}

fn set_of(members: impl IntoIterator<Item = usize>) -> SeqSet {
    let mut set = SeqSet::EMPTY;
    members.into_iter().for_each(|i| set.insert(seq(i)));
    set
}

#[test]
fn none_and_single_sequences_take_no_entry_of_the_table() {
    let mut table = SetTable::default();
    assert_eq!(table.hold(SeqSet::EMPTY, 1), SetId::EMPTY);
    for i in [0, 63, 64, 255] {
        let id = table.hold(SeqSet::of(seq(i)), 1);
        assert_eq!((id, id.single()), (SetId::of(seq(i)), Some(seq(i))));
        assert_eq!(table.get(id), SeqSet::of(seq(i)));
        assert!(table.contains(id, seq(i)) && !table.contains(id, seq(1)));
    }
    assert_eq!((SetId::EMPTY.single(), table.get(SetId::EMPTY)), (None, SeqSet::EMPTY));
    assert_eq!(table.n_entries(), 0);
}

#[test]
fn equal_sets_are_one_entry_that_goes_with_its_last_cell() {
    let mut table = SetTable::default();
    let (a, b) = (set_of([0, 255]), set_of(0..256));
    let id = table.hold(a, 2);
    assert_eq!((table.hold(b, 1) == id, table.hold(a, 1), table.n_entries()), (false, id, 2));
    assert_eq!((table.get(id), id.single(), table.contains(id, seq(255))), (a, None, true));
    table.release(id, 2);
    assert_eq!(table.get(id), a);
    table.release(id, 1);
    let reused = table.hold(set_of([1, 2]), 1);
    assert_eq!((reused, table.get(reused), table.n_entries()), (id, set_of([1, 2]), 2));
    assert_ne!(table.hold(a, 1), id);
}

#[test]
fn cells_of_many_sequences_leave_no_set_behind() {
    let mut cells = Cells::new(64, 256, false).unwrap();
    append(&mut cells, A, 0..64);
    for i in 1..256 {
        // Of 64 lengths, so that no two cells belong to the same sequences at the end.
        cells.seq_cp(seq(A), seq(i), PosRange { p0: 0, p1: i64::try_from(i % 64).unwrap() });
    }
    assert_eq!(cells.meta(10).unwrap().seqs, set_of((0..256).filter(|i| *i == A || i % 64 > 10)));
    // One entry more: a cell holds its new set before it leaves the old one.
    assert_eq!((cells.sets.n_held(), cells.sets.n_entries()), (63, 64));
    cells.seq_add(seq(A), PosRange::ALL, 5).unwrap();
    assert_eq!(positions(&cells, 255), (5..68).collect::<Vec<_>>());
    cells.seq_keep(seq(255));
    assert_eq!((cells.sets.n_held(), cells.n_used(), cells.seq_len(seq(A))), (0, 63, 0));
    assert_eq!(cells.meta(0).unwrap().seqs, SeqSet::of(seq(255)));
}

/// Heap bytes of the cells alone: what the docs of `Cells` state.
fn bytes_of_cells(cells: &Cells) -> usize {
    // Every field is named, so that a new one cannot be forgotten.
    let Cells { size: _, pos, ext, seqs, sets: _, used, index: _, shift, shifted, head: _, has_ext: _ } =
        cells;
    size_of_val(&pos[..])
        + size_of_val(&ext[..])
        + size_of_val(&seqs[..])
        + size_of_val(&shift[..])
        + used.heap_bytes()
        + shifted.heap_bytes()
}

#[test]
fn cells_take_the_bytes_that_their_docs_state() {
    let mut cells = Cells::new(1024, 2, false).unwrap();
    assert_eq!(bytes_of_cells(&cells), 8480);
    append(&mut cells, A, 0..1024);
    assert_eq!((bytes_of_cells(&cells), cells.index[A].heap_bytes()), (8480, 8 * 1024));
    cells.seq_cp(seq(A), seq(B), PosRange::ALL);
    assert_eq!((bytes_of_cells(&cells), cells.index[B].heap_bytes()), (8480, 8 * 1024));
    cells.seq_add(seq(A), PosRange::ALL, 1).unwrap();
    assert_eq!(bytes_of_cells(&cells), 8480 + 4 * 1024);
    assert_eq!(bytes_of_cells(&Cells::new(1024, 2, true).unwrap()), 8480 + 12 * 1024);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Up to three words of the second level.
    #[test]
    fn a_cell_set_is_a_set(
        size in prop_oneof![Just(64u32), Just(4096), Just(4097), 1..10_000u32],
        changes in prop::collection::vec((any::<bool>(), 0..10_000u32, prop_oneof![1..4u32, 1..10_000u32]), 1..12),
        from in 0..10_000u32,
    ) {
        let mut set = CellSet::new(size);
        let mut model = BTreeSet::new();
        let from = from % size;
        for (insert, start, n) in changes {
            for cell in start % size..size.min(start % size + n) {
                if insert {
                    set.insert(cell);
                    model.insert(cell);
                } else {
                    set.remove(cell);
                    model.remove(&cell);
                }
            }
            prop_assert_eq!(set.len() as usize, model.len());
            prop_assert_eq!(set.last(), model.last().copied());
            prop_assert_eq!(set.next(from), model.range(from..).next().copied());
            prop_assert!(set.iter().eq(model.iter().copied()));
            for range in [0..size, from..size, 0..from] {
                let absent = range.clone().filter(|cell| !model.contains(cell));
                prop_assert!(set.absent_in(range).eq(absent));
            }
        }
    }
}
