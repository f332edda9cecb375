//! `Cells` against a naive model of llama.cpp's rules: full scans, no index, no bitmap.

use std::collections::{BTreeMap, BTreeSet};

use kvstate::cells::{CellMeta, Cells, SeqSet};
use kvstate::types::{CellExt, MAX_SEQ, Pos, PosRange, Seq, SeqId, Swa, SwaType};
use proptest::prelude::*;

/// The sequences, which the model knows by index: one in each word of a set, and a neighbour.
const SEQS: [SeqId; 5] = [0, 1, 64, 130, 255];
const N_SEQ: usize = SEQS.len();

fn seq(i: usize) -> Seq {
    Seq::new(SEQS[i], MAX_SEQ).unwrap()
}

fn indices(seqs: SeqSet) -> BTreeSet<usize> {
    seqs.iter().map(|seq| SEQS.iter().position(|&id| id == seq.id()).unwrap()).collect()
}

#[derive(Clone, Debug, PartialEq)]
struct Cell {
    pos: i64,
    shift: i64,
    ext: CellExt,
    seqs: BTreeSet<usize>,
}

#[derive(Clone, Debug)]
struct Model {
    cells: Vec<Option<Cell>>,
    head: usize,
}

fn masked(swa: Swa, p0: i64, p1: i64) -> bool {
    let n_swa = i64::from(swa.n_swa());
    match swa.swa_type() {
        SwaType::None => false,
        SwaType::Standard => p1 - p0 >= n_swa,
        SwaType::Chunked => p0 < p1 / n_swa * n_swa,
        SwaType::Symmetric => (p1 - p0).abs() > n_swa / 2,
    }
}

impl Model {
    fn cell(&self, i: usize) -> &Cell {
        self.cells[i].as_ref().unwrap()
    }

    fn n_used(&self) -> usize {
        self.cells.iter().flatten().count()
    }

    fn seq_pos(&self, s: usize) -> Vec<i64> {
        self.cells.iter().flatten().filter(|c| c.seqs.contains(&s)).map(|c| c.pos).collect()
    }

    /// Cells of `s` (of any sequence if `None`) in `range`, ascending.
    fn hits(&self, s: Option<usize>, range: PosRange) -> Vec<usize> {
        (0..self.cells.len())
            .filter(|&i| {
                self.cells[i].as_ref().is_some_and(|c| {
                    s.is_none_or(|s| c.seqs.contains(&s)) && c.pos >= i64::from(range.p0) && c.pos < range.p1
                })
            })
            .collect()
    }

    /// Empties the used cells without a sequence and returns the first.
    fn drop_unowned(&mut self) -> Option<usize> {
        let mut first = None;
        for i in 0..self.cells.len() {
            if self.cells[i].as_ref().is_some_and(|c| c.seqs.is_empty()) {
                self.cells[i] = None;
                first = first.or(Some(i));
            }
        }
        first
    }

    fn lower_head(&mut self, first: Option<usize>) {
        self.head = self.head.min(first.unwrap_or(self.head));
    }

    fn seq_rm(&mut self, s: usize, range: PosRange) {
        for i in self.hits(Some(s), range) {
            self.cells[i].as_mut().unwrap().seqs.remove(&s);
        }
        let first = self.drop_unowned();
        self.lower_head(first);
    }

    fn rm(&mut self, range: PosRange) {
        let hits = self.hits(None, range);
        for &i in &hits {
            self.cells[i] = None;
        }
        self.lower_head(hits.first().copied());
    }

    fn seq_cp(&mut self, src: usize, dst: usize, range: PosRange) {
        for i in self.hits(Some(src), range) {
            self.cells[i].as_mut().unwrap().seqs.insert(dst);
        }
    }

    fn seq_keep(&mut self, s: usize) {
        for cell in self.cells.iter_mut().flatten() {
            cell.seqs.retain(|&x| x == s);
        }
        let first = self.drop_unowned();
        self.lower_head(first);
    }

    fn seq_add(&mut self, s: usize, range: PosRange, delta: Pos) -> bool {
        if delta == 0 || i64::from(range.p0) == range.p1 {
            return true;
        }
        let hits = self.hits(Some(s), range);
        if hits.iter().any(|&i| self.cell(i).pos + i64::from(delta) > i64::from(Pos::MAX)) {
            return false;
        }
        let mut first = None;
        for i in hits {
            let cell = self.cells[i].as_mut().unwrap();
            cell.pos += i64::from(delta);
            cell.shift += i64::from(delta);
            if cell.pos < 0 {
                self.cells[i] = None;
                first = first.or(Some(i));
            }
        }
        self.head = first.unwrap_or(0);
        true
    }

    fn seq_div(&mut self, s: usize, range: PosRange, d: i32) -> bool {
        if d < 1 {
            return false;
        }
        for i in self.hits(Some(s), range) {
            let cell = self.cells[i].as_mut().unwrap();
            cell.shift += cell.pos / i64::from(d) - cell.pos;
            cell.pos /= i64::from(d);
        }
        true
    }

    fn seq_cp_from(&mut self, other: &Self, src: usize, dst: usize) {
        self.cells = other
            .cells
            .iter()
            .map(|c| c.clone().filter(|c| c.seqs.contains(&src)))
            .map(|c| c.map(|c| Cell { seqs: BTreeSet::from([dst]), ..c }))
            .collect();
        self.head = other.head;
    }

    fn can_use(&self, i: usize, swa: Swa) -> bool {
        let Some(cell) = &self.cells[i] else { return true };
        if cell.seqs.len() != 1 {
            return false;
        }
        let s = *cell.seqs.first().unwrap();
        let next = self.seq_pos(s).into_iter().max().unwrap() + 1;
        next <= i64::from(Pos::MAX) && masked(swa, cell.pos, next)
    }

    fn find_slot(&self, n: usize, swa: Swa) -> Option<Vec<u32>> {
        let size = self.cells.len();
        let mut at = if self.head > self.n_used() + 2 * n { 0 } else { self.head };
        let mut found = Vec::new();
        for _ in 0..size {
            if found.len() == n {
                break;
            }
            at %= size;
            if self.can_use(at, swa) {
                found.push(u32::try_from(at).unwrap());
            }
            at += 1;
        }
        (found.len() == n).then_some(found)
    }

    fn apply(&mut self, cells: &[u32], metas: &[CellMeta], has_ext: bool) {
        let mut lost = BTreeMap::new();
        for (&i, meta) in cells.iter().zip(metas) {
            let new = Cell {
                pos: i64::from(meta.pos),
                shift: 0,
                ext: if has_ext { meta.ext } else { CellExt::default() },
                seqs: indices(meta.seqs),
            };
            if let Some(old) = self.cells[i as usize].replace(new) {
                for s in old.seqs {
                    let p = lost.entry(s).or_insert(old.pos);
                    *p = old.pos.max(*p);
                }
            }
        }
        for (s, pos) in lost {
            self.seq_rm(s, PosRange { p0: 0, p1: pos + 1 });
        }
        if let Some(&last) = cells.last() {
            self.head = last as usize + 1;
        }
    }

    /// The rule of `place`, one position dropped at a time. The error is (need, free).
    fn place(
        &self,
        dest: Option<usize>,
        metas: &[CellMeta],
        swa: Swa,
        may_drop: bool,
    ) -> Result<(Vec<u32>, Vec<u32>), (u64, u64)> {
        let mut after = self.clone();
        if let Some(dest) = dest {
            after.seq_rm(dest, PosRange::ALL);
        }
        let pos = |i: &u32| i64::from(metas[*i as usize].pos);
        let mut kept: Vec<u32> = (0..u32::try_from(metas.len()).unwrap()).collect();
        let pos_max = kept.iter().map(pos).max().unwrap_or(0);
        loop {
            if let Some(cells) = after.find_slot(kept.len(), Swa::NONE) {
                return Ok((kept, cells));
            }
            match kept.iter().map(pos).min() {
                Some(oldest) if may_drop && masked(swa, oldest, pos_max) => kept.retain(|i| pos(i) > oldest),
                _ => break,
            }
        }
        // Every empty cell, and of the used ones those of the smallest positions.
        let mut usable: Vec<(i64, usize)> = (0..after.cells.len())
            .filter(|&i| after.can_use(i, swa))
            .map(|i| (after.cells[i].as_ref().map_or(-1, |cell| cell.pos), i))
            .collect();
        if usable.len() < kept.len() {
            return Err((kept.len() as u64, usable.len() as u64));
        }
        usable.sort_unstable();
        let mut cells: Vec<u32> =
            usable[..kept.len()].iter().map(|&(_, i)| u32::try_from(i).unwrap()).collect();
        cells.sort_unstable();
        Ok((kept, cells))
    }
}

#[derive(Clone, Debug)]
enum Op {
    Decode { seqs: Vec<usize>, start: Pos, step: Pos, n: u32 },
    Overwrite { s: usize, start: Pos, first: u32, stride: u32, n: u32 },
    Restore { dest: Option<usize>, start: Pos, repeat: Pos, reverse: bool, n: u32, may_drop: bool },
    SeqRm(usize, PosRange),
    Rm(PosRange),
    SeqCp(usize, usize, PosRange),
    SeqKeep(usize),
    SeqAdd(usize, PosRange, Pos),
    SeqDiv(usize, PosRange, i32),
    SeqCpFrom(usize, usize),
    ShiftDone,
    Clear,
}

fn ranges() -> impl Strategy<Value = PosRange> {
    (-1..24, -1..24).prop_map(|(p0, p1)| PosRange::new(p0, p1))
}

fn ops() -> impl Strategy<Value = Op> {
    let s = || 0..N_SEQ;
    let decode = (prop::collection::vec(s(), 1..4), -2..24, 0..3, 0..8u32)
        .prop_map(|(seqs, start, step, n)| Op::Decode { seqs, start, step, n });
    let restore = (prop::option::weighted(0.9, s()), 0..24, 1..4, any::<bool>(), 0..40u32, any::<bool>())
        .prop_map(|(dest, start, repeat, reverse, n, may_drop)| Op::Restore {
            dest,
            start,
            repeat,
            reverse,
            n,
            may_drop,
        });
    let delta = prop_oneof![9 => -12..12, 1 => Just(Pos::MAX), 1 => Just(Pos::MIN)];
    prop_oneof![
        8 => decode,
        2 => (s(), 0..24, 0..8u32, 1..3u32, 0..4u32)
            .prop_map(|(s, start, first, stride, n)| Op::Overwrite { s, start, first, stride, n }),
        4 => restore,
        3 => (s(), ranges()).prop_map(|(s, r)| Op::SeqRm(s, r)),
        1 => ranges().prop_map(Op::Rm),
        4 => (s(), s(), ranges()).prop_map(|(a, b, r)| Op::SeqCp(a, b, r)),
        1 => s().prop_map(Op::SeqKeep),
        4 => (s(), ranges(), delta).prop_map(|(s, r, d)| Op::SeqAdd(s, r, d)),
        2 => (s(), ranges(), 0..4).prop_map(|(s, r, d)| Op::SeqDiv(s, r, d)),
        1 => (s(), s()).prop_map(|(a, b)| Op::SeqCpFrom(a, b)),
        1 => Just(Op::ShiftDone),
        1 => Just(Op::Clear),
    ]
}

/// `n` cells of `seqs`; the ext tells every cell from every other.
fn metas(seqs: &[usize], n: u32, pos: impl Fn(Pos) -> Pos) -> Vec<CellMeta> {
    let mut set = SeqSet::EMPTY;
    for &s in seqs {
        set.insert(seq(s));
    }
    (0..n.cast_signed())
        .map(|i| CellMeta { pos: pos(i), ext: CellExt { x: i, y: pos(i), tok: 100 + i }, seqs: set })
        .collect()
}

fn run(cells: &mut Cells, model: &mut Model, op: &Op, swa: Swa) {
    let has_ext = cells.has_ext();
    match *op {
        Op::Decode { ref seqs, start, step, n } => {
            // A negative start appends.
            let next = cells.seq_pos_max(seq(seqs[0])).map_or(0, |p| p.saturating_add(1).min(1 << 20));
            let start = if start < 0 { next } else { start };
            if let Some(slot) = cells.find_slot(n, swa) {
                let metas = metas(seqs, n, |i| start + i * step);
                cells.apply(&slot, &metas);
                model.apply(&slot, &metas, has_ext);
            }
        }
        Op::Overwrite { s, start, first, stride, n } => {
            let slot: Vec<u32> = (0..n).map(|i| first + i * stride).filter(|&i| i < cells.size()).collect();
            let metas = metas(&[s], u32::try_from(slot.len()).unwrap(), |i| start + i);
            cells.apply(&slot, &metas);
            model.apply(&slot, &metas, has_ext);
        }
        Op::Restore { dest, start, repeat, reverse, n, may_drop } => {
            let last = n.cast_signed() - 1;
            let metas =
                metas(&[dest.unwrap_or(0)], n, |i| start + if reverse { last - i } else { i } / repeat);
            let placed = cells.place(dest.map(seq), &metas, swa, may_drop);
            let expected = model.place(dest, &metas, swa, may_drop);
            assert_eq!(
                placed.as_ref().map(|p| (p.kept.clone(), p.cells.clone())).map_err(|e| (e.need, e.free)),
                expected
            );
            if let Ok(placed) = placed {
                let kept: Vec<CellMeta> = placed.kept.iter().map(|&i| metas[i as usize]).collect();
                if let Some(dest) = dest {
                    cells.seq_rm(seq(dest), PosRange::ALL);
                    model.seq_rm(dest, PosRange::ALL);
                }
                cells.apply(&placed.cells, &kept);
                model.apply(&placed.cells, &kept, has_ext);
            }
        }
        Op::SeqRm(s, range) => {
            cells.seq_rm(seq(s), range);
            model.seq_rm(s, range);
        }
        Op::Rm(range) => {
            cells.rm(range);
            model.rm(range);
        }
        Op::SeqCp(src, dst, range) => {
            cells.seq_cp(seq(src), seq(dst), range);
            model.seq_cp(src, dst, range);
        }
        Op::SeqKeep(s) => {
            cells.seq_keep(seq(s));
            model.seq_keep(s);
        }
        Op::SeqAdd(s, range, delta) => {
            assert_eq!(cells.seq_add(seq(s), range, delta).is_ok(), model.seq_add(s, range, delta));
        }
        Op::SeqDiv(s, range, d) => {
            assert_eq!(cells.seq_div(seq(s), range, d).is_ok(), model.seq_div(s, range, d));
        }
        Op::SeqCpFrom(src, dst) => {
            cells.seq_cp_from(&cells.clone(), seq(src), seq(dst));
            model.seq_cp_from(&model.clone(), src, dst);
        }
        Op::ShiftDone => {
            cells.shift_done();
            model.cells.iter_mut().flatten().for_each(|c| c.shift = 0);
        }
        Op::Clear => {
            cells.clear();
            *model = Model { cells: vec![None; model.cells.len()], head: 0 };
        }
    }
}

fn compare(cells: &Cells, model: &Model, swa: Swa) {
    let seen: Vec<Option<Cell>> = (0..cells.size())
        .map(|i| {
            cells.meta(i).map(|meta| Cell {
                pos: i64::from(meta.pos),
                shift: i64::from(cells.shift(i)),
                ext: meta.ext,
                seqs: indices(meta.seqs),
            })
        })
        .collect();
    assert_eq!(seen, model.cells);
    assert_eq!(cells.head() as usize, model.head);
    assert_eq!(cells.n_used() as usize, model.n_used());
    let used = model.hits(None, PosRange::ALL);
    assert_eq!(cells.used_max_p1() as usize, used.last().map_or(0, |i| i + 1));
    assert!(cells.used_cells().eq(used.iter().map(|&i| u32::try_from(i).unwrap())));
    let shifted: Vec<(usize, i64)> =
        used.iter().map(|&i| (i, model.cell(i).shift)).filter(|&(_, shift)| shift != 0).collect();
    assert!(cells.shifted().map(|(i, shift)| (i as usize, i64::from(shift))).eq(shifted.iter().copied()));
    assert_eq!(cells.has_shift(), !shifted.is_empty());
    for s in 0..N_SEQ {
        let pos = model.seq_pos(s);
        assert_eq!(cells.seq_len(seq(s)), pos.len());
        assert_eq!(cells.seq_pos_min(seq(s)).map(i64::from), pos.iter().min().copied());
        assert_eq!(cells.seq_pos_max(seq(s)).map(i64::from), pos.iter().max().copied());
        for range in [PosRange::ALL, PosRange::new(3, 9), PosRange::new(5, 2)] {
            let mut expected: Vec<(i64, usize)> =
                model.hits(Some(s), range).into_iter().map(|i| (model.cell(i).pos, i)).collect();
            expected.sort_unstable();
            let seen = cells.seq_cells(seq(s), range).iter().map(|&(pos, i)| (i64::from(pos), i as usize));
            assert!(seen.eq(expected));
        }
    }
    for n in [0, 1, 2, 5, 8, 16, 33] {
        assert_eq!(cells.find_slot(n, swa), model.find_slot(n as usize, swa), "find_slot({n})");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cells_do_what_llama_cpp_does(
        // Up to three words of the bitmap now and then.
        size in prop_oneof![4 => 8..32u32, 1 => 60..140u32],
        has_ext in any::<bool>(),
        swa_type in 0..4u32,
        n_swa in 1..8u32,
        ops in prop::collection::vec(ops(), 1..40),
    ) {
        let swa = Swa::new(SwaType::from_u32(swa_type).unwrap(), n_swa).unwrap();
        let mut cells = Cells::new(size, MAX_SEQ, has_ext).unwrap();
        let mut model = Model { cells: vec![None; size as usize], head: 0 };
        for op in &ops {
            run(&mut cells, &mut model, op, swa);
            compare(&cells, &model, swa);
        }
    }
}
