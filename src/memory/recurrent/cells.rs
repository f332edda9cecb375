//! In which row the state of each sequence is (the cells of `llama_memory_recurrent`).

use std::collections::BTreeMap;

use crate::cells::SeqSet;
use crate::error::{Error, Result};
use crate::types::{MAX_SEQ, Pos, PosRange, Seq};

/// Where the state of a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    pub cell: u32,
    /// The last position that the state has seen.
    pub pos: Pos,
    /// How many tokens before the cell's newest state it is: the number of its rollback plane. Above 0 it is pending: the
    /// next ubatch begins with that plane's row.
    pub rollback: u32,
    /// How many rollback planes behind its row hold states of the tokens before. `None`: its own row does not hold the state of
    /// `pos`, since `seq_rm` went further back than states are kept, nor do those that an engine has computed from it since.
    pub n_older: Option<u32>,
}

/// A state, and the sequences that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldState {
    pub row: u32,
    pub pos: Pos,
    pub seqs: SeqSet,
}

/// Sequences that share their tokens of a ubatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceSet {
    pub seqs: SeqSet,
    /// The last position.
    pub pos: Pos,
    /// Tokens in the ubatch, at least 1.
    pub n_tokens: u32,
}

/// As many cells as sequences, each with a row in every plane; what sequences share a cell they have by copying one another.
///
/// All of it follows from the tails, so a cell can never disagree with its sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecurrentCells {
    /// By sequence.
    tails: Vec<Option<Tail>>,
    n_rs_seq: u32,
    /// Where the search for an empty cell starts.
    head: u32,
}

/// What `seq_rm` does to the state of a sequence.
enum Removal {
    Nothing,
    Leave,
    /// The end is cut off: the state is that of `pos`, so many tokens back.
    Cut {
        pos: Pos,
        rollback: u32,
    },
    Refused,
}

/// Where a ubatch reads and writes states. Rows count through all planes: row `k * n_seq_max + cell` is the state `k` tokens before
/// the newest.
///
/// Every row that is read is read before any is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecurrentSlot {
    /// The cell of the first sequence set of the ubatch; those of the others follow it. The ubatch writes their rows: the newest
    /// state, and those of the tokens before it as far as there are planes and tokens.
    pub head: u32,
    /// By sequence set, in the order of the ubatch: the row of its state, `None` if it begins with zeros.
    pub sources: Vec<Option<u32>>,
    /// Rows of other sequences, which have to make room: `(to, from)`.
    pub moves: Vec<(u32, u32)>,
}

/// Cells for a ubatch, and all cells as they are then.
#[derive(Clone, Debug)]
pub(crate) struct FoundSlot {
    pub slot: RecurrentSlot,
    pub after: RecurrentCells,
}

impl RecurrentCells {
    pub fn new(n_seq_max: u32, n_rs_seq: u32) -> Self {
        Self { tails: vec![None; n_seq_max as usize], n_rs_seq, head: 0 }
    }

    /// Number of cells: one for each sequence.
    pub fn size(&self) -> u32 {
        u32::try_from(self.tails.len()).unwrap_or(MAX_SEQ)
    }

    pub fn tail(&self, seq: Seq) -> Option<Tail> {
        self.tails[seq.index()]
    }

    /// The row of a state in every plane.
    pub fn row(&self, tail: Tail) -> u32 {
        // No overflow: geometry has checked the number of rows.
        tail.rollback * self.size() + tail.cell
    }

    fn seqs(&self) -> impl Iterator<Item = Seq> + use<> {
        let n_seq_max = self.size();
        (0..n_seq_max.cast_signed()).filter_map(move |seq_id| Seq::new(seq_id, n_seq_max))
    }

    /// The sequences of a cell.
    fn owners(&self, cell: u32) -> impl Iterator<Item = Seq> + '_ {
        self.seqs().filter(move |&seq| self.tail(seq).is_some_and(|tail| tail.cell == cell))
    }

    pub fn is_used(&self, cell: u32) -> bool {
        self.owners(cell).next().is_some()
    }

    /// By cell: how many sequences have it.
    fn n_owners(&self) -> Vec<u32> {
        let mut n_owners = vec![0; self.tails.len()];
        self.tails.iter().flatten().for_each(|tail| n_owners[tail.cell as usize] += 1);
        n_owners
    }

    /// Every state once, by cell.
    pub fn states(&self) -> Vec<HeldState> {
        let mut states = BTreeMap::<(u32, u32, Pos), SeqSet>::new();
        for seq in self.seqs() {
            if let Some(Tail { cell, pos, rollback, .. }) = self.tail(seq) {
                states.entry((cell, rollback, pos)).or_default().insert(seq);
            }
        }
        let held =
            |((cell, rollback, pos), seqs)| HeldState { row: rollback * self.size() + cell, pos, seqs };
        states.into_iter().map(held).collect()
    }

    pub fn clear(&mut self) {
        self.tails.fill(None);
        self.head = 0;
    }

    /// `seq` gives up its state. The next search starts at its cell at the latest, if that is empty now.
    pub fn leave(&mut self, seq: Seq) {
        if let Some(tail) = self.tails[seq.index()].take()
            && !self.is_used(tail.cell)
        {
            self.head = self.head.min(tail.cell);
        }
    }

    fn removal(&self, seq: Seq, range: PosRange, has_planes: bool) -> Removal {
        let Some(tail) = self.tail(seq).filter(|tail| range.contains(tail.pos)) else {
            return Removal::Nothing;
        };
        if range.p0 == 0 {
            return Removal::Leave;
        }
        let pos = range.p0 - 1;
        let cut = tail.pos.abs_diff(pos);
        match (has_planes, tail.rollback) {
            (false, _) => Removal::Cut { pos, rollback: 0 },
            (true, 0) if cut <= self.n_rs_seq => Removal::Cut { pos, rollback: cut },
            _ => Removal::Refused,
        }
    }

    /// Whether [`RecurrentCells::seq_rm`] can be done. A state without planes can be cut anywhere.
    pub fn can_seq_rm(&self, seq: Option<Seq>, range: PosRange, has_planes: bool) -> bool {
        match seq {
            Some(seq) => !matches!(self.removal(seq, range, has_planes), Removal::Refused),
            None => range.is_everything() || i64::from(range.p0) == range.p1,
        }
    }

    /// Removes what [`RecurrentCells::can_seq_rm`] allows, and otherwise nothing.
    pub fn seq_rm(&mut self, seq: Option<Seq>, range: PosRange, has_planes: bool) {
        let Some(seq) = seq else {
            if range.is_everything() {
                self.seqs().for_each(|seq| self.leave(seq));
            }
            return;
        };
        match self.removal(seq, range, has_planes) {
            Removal::Leave => self.leave(seq),
            Removal::Cut { pos, rollback } => {
                if let Some(tail) = &mut self.tails[seq.index()] {
                    (tail.pos, tail.rollback) = (pos, rollback);
                    tail.n_older = tail.n_older.and_then(|n| n.checked_sub(rollback));
                }
            }
            Removal::Nothing | Removal::Refused => {}
        }
    }

    /// `dst` has the state of `src` now, a pending rollback included.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq) {
        self.tails[dst.index()] = self.tail(src);
    }

    pub fn seq_keep(&mut self, seq: Seq) {
        let kept = self.tail(seq);
        self.tails.fill(None);
        self.tails[seq.index()] = kept;
        let first_empty = (0..self.size()).find(|&cell| kept.is_none_or(|tail| tail.cell != cell));
        self.head = first_empty.map_or(self.head, |cell| self.head.min(cell));
    }

    /// The sequences whose position an operation on `seq` moves: those that share its cell, as far as they are in range.
    fn moved(&self, seq: Seq, range: PosRange) -> Vec<Seq> {
        let in_range = |seq: Seq| self.tail(seq).filter(|tail| range.contains(tail.pos));
        let Some(tail) = in_range(seq) else { return Vec::new() };
        self.owners(tail.cell).filter(|&owner| in_range(owner).is_some()).collect()
    }

    /// Whether [`RecurrentCells::seq_add`] can be done.
    pub fn check_seq_add(&self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        let positions = self.moved(seq, range).into_iter().filter_map(|seq| self.tail(seq));
        match positions.map(|tail| tail.pos).find(|pos| pos.checked_add(delta).is_none()) {
            Some(pos) => Err(Error::PosOverflow { pos, delta }),
            None => Ok(()),
        }
    }

    /// Moves positions; a state that gets below 0 is given up, as cells of attention are.
    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) {
        self.map_pos(seq, range, |pos| pos.saturating_add(delta));
    }

    /// `d` is at least 1.
    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) {
        self.map_pos(seq, range, |pos| pos / d);
    }

    fn map_pos(&mut self, seq: Seq, range: PosRange, new_pos: impl Fn(Pos) -> Pos) {
        for seq in self.moved(seq, range) {
            let Some(tail) = &mut self.tails[seq.index()] else { continue };
            tail.pos = new_pos(tail.pos);
            if tail.pos < 0 {
                self.leave(seq);
            }
        }
    }

    /// What is in one cell is in the other one now.
    fn swap(&mut self, a: u32, b: u32) {
        for tail in self.tails.iter_mut().flatten() {
            tail.cell = match tail.cell {
                cell if cell == a => b,
                cell if cell == b => a,
                cell => cell,
            };
        }
    }

    /// Neighbouring cells for the sequence sets of a ubatch, in order, with the last position of each; `None` if there are
    /// too few. Sequences of one set have one state from now on, that of the first of them.
    ///
    /// Cell for cell as llama.cpp: a set keeps the cell that is its own, the others take empty ones, and then cells are swapped
    /// until the sets are in a row.
    pub fn find_slot(&self, sets: &[SequenceSet]) -> Option<FoundSlot> {
        let size = self.size();
        let mut after = self.clone();
        if sets.is_empty() {
            let slot = RecurrentSlot { head: self.head, sources: Vec::new(), moves: Vec::new() };
            return Some(FoundSlot { slot, after });
        }
        let mut n_owners = self.n_owners();
        let n_used = n_owners.iter().filter(|&&n| n > 0).count();
        if after.head as usize > n_used + 2 * sets.len() {
            after.head = 0;
        }
        let first_of = |seqs: SeqSet| seqs.iter().next();
        for SequenceSet { seqs, .. } in sets {
            // They share the first one's state.
            for tail in seqs.iter().skip(1).filter_map(|seq| after.tails[seq.index()].take()) {
                n_owners[tail.cell as usize] -= 1;
            }
        }
        // Where the state of each cell is now.
        let mut rows: Vec<Option<u32>> =
            (0..).zip(&n_owners).map(|(cell, &n)| (n > 0).then_some(cell)).collect();
        let mut search = after.head;
        let mut min = size;
        let mut sources = Vec::with_capacity(sets.len());
        for &SequenceSet { seqs, pos, n_tokens } in sets {
            let seq = first_of(seqs)?;
            let tail = after.tail(seq);
            sources.push(tail.map(|tail| self.row(tail)));
            let cell = match tail {
                Some(tail) if n_owners[tail.cell as usize] == 1 => tail.cell,
                _ => {
                    let mut from_search = (0..size).map(|i| (search + i) % size);
                    let cell = from_search.find(|&cell| n_owners[cell as usize] == 0)?;
                    search = cell + 1;
                    n_owners[cell as usize] = 1;
                    if let Some(tail) = tail {
                        n_owners[tail.cell as usize] -= 1;
                    }
                    cell
                }
            };
            let is_lost = tail.is_some_and(|tail| tail.n_older.is_none());
            let n_older = (!is_lost).then(|| n_tokens.saturating_sub(1).min(self.n_rs_seq));
            after.tails[seq.index()] = Some(Tail { cell, pos, rollback: 0, n_older });
            min = min.min(cell);
        }
        for (set, to) in sets.iter().zip(min..) {
            let from = after.tail(first_of(set.seqs)?)?.cell;
            rows.swap(to as usize, from as usize);
            after.swap(to, from);
        }
        for SequenceSet { seqs, .. } in sets {
            let tail = after.tail(first_of(*seqs)?);
            seqs.iter().for_each(|seq| after.tails[seq.index()] = tail);
        }
        after.head = min;
        let n_sets = u32::try_from(sets.len()).ok()?;
        let is_of_ubatch = |cell: u32| (min..min + n_sets).contains(&cell);
        let others = (0..size).zip(&rows).filter_map(|(cell, &row)| Some((cell, row?)));
        let others = others.filter(|&(cell, row)| cell != row && !is_of_ubatch(cell));
        let moves = others
            .flat_map(|(cell, row)| (0..=self.n_rs_seq).map(move |k| (k * size + cell, k * size + row)))
            .collect();
        Some(FoundSlot { slot: RecurrentSlot { head: min, sources, moves }, after })
    }

    /// The cells with `seq` replaced by a state of `pos`, and its cell.
    pub fn place(&self, seq: Seq, pos: Pos) -> Option<(Self, u32)> {
        let mut without = self.clone();
        without.leave(seq);
        let found = without.find_slot(&[SequenceSet { seqs: SeqSet::of(seq), pos, n_tokens: 1 }])?;
        Some((found.after, found.slot.head))
    }

    /// The cells with the state of `seq` replaced by a later one, of `pos`, and its cell: an empty one, so that the older state is
    /// whole until then. Its own, or those of [`RecurrentCells::place`], where there is none.
    pub fn place_behind(&self, seq: Seq, pos: Pos) -> Option<(Self, u32)> {
        let size = self.size();
        let from_head = (0..size).map(|i| (self.head + i) % size);
        let Some(cell) = from_head.into_iter().find(|&cell| !self.is_used(cell)) else {
            return self.place(seq, pos);
        };
        let mut after = self.clone();
        after.leave(seq);
        after.tails[seq.index()] = Some(Tail { cell, pos, rollback: 0, n_older: Some(0) });
        Some((after, cell))
    }

    /// The cells with these states alone, the first in cell 0.
    pub fn of_states(&self, states: &[(SeqSet, Pos)]) -> Self {
        let mut cells = Self::new(self.size(), self.n_rs_seq);
        for (&(seqs, pos), cell) in states.iter().zip(0..) {
            let tail = Tail { cell, pos, rollback: 0, n_older: Some(0) };
            seqs.iter().for_each(|seq| cells.tails[seq.index()] = Some(tail));
        }
        cells
    }
}
