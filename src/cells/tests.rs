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
