//! The state of a recurrent section: written whole with every flag, read in three steps like attention.

use std::sync::Arc;

use super::RecurrentCache;
use super::cells::{HeldState, RecurrentCells, Tail};
use super::geometry::{LayerTensor, RecurrentGeometry, RecurrentTensor};
use crate::cells::SeqSet;
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::ReadParams;
use crate::memory::convert::{self, Convert};
use crate::memory::geometry::mismatch;
use crate::memory::kv_write::{Scope, count};
use crate::state::{Input, Sink, Source};
use crate::storage::{CellMap, Conversion, Plane, Region, Scatter, StateTensor, TensorLayout};
use crate::types::{Pos, PosRange, Seq};

/// The only layout there is: states are rows.
const S_TRANS: u32 = 0;

/// A section's bytes, checked against its geometry.
#[derive(Debug)]
pub(crate) struct ReadState<'a> {
    /// One per state; in the state of a sequence the set is the destination's.
    states: Vec<(SeqSet, Pos)>,
    /// As the geometry's tensors.
    tensors: Vec<StateTensor<'a>>,
}

/// What a commit will do to a section.
#[derive(Debug)]
pub(crate) struct RecurrentPlan<'a> {
    scope: Scope,
    /// The last position that the state of a sequence has seen.
    pub pos: Option<Pos>,
    /// Positions that it has seen behind the range that is wanted.
    pub n_cut: usize,
    /// The cells as they are then.
    after: RecurrentCells,
    /// The cells that the states take.
    cells: Vec<u32>,
    map: CellMap,
    tensors: Vec<StateTensor<'a>>,
}

impl RecurrentCache {
    /// Writes the section; of a sequence, its state at the end of `range`. A state before the newest is the row of its rollback
    /// plane.
    pub fn state_write<'a>(&'a self, sink: &mut impl Sink<'a>, scope: Scope, range: PosRange) -> Result<()> {
        let states = match scope {
            Scope::Whole => self.cells.states(),
            Scope::Seq(seq) => {
                let held = |tail: Tail| {
                    let pos = range.last_up_to(tail.pos)?;
                    let cut = if self.has_planes() { tail.pos.abs_diff(pos) } else { 0 };
                    let tail = Tail { rollback: tail.rollback + cut, ..tail };
                    Some(HeldState { row: self.cells.row(tail), pos, seqs: SeqSet::of(seq) })
                };
                self.cells.tail(seq).and_then(held).into_iter().collect()
            }
        };
        sink.write_u32(count(states.len())?)?;
        for HeldState { pos, seqs, .. } in &states {
            sink.write_i32(*pos)?;
            // The state of a sequence does not say whose it is.
            let seqs = if scope == Scope::Whole { *seqs } else { SeqSet::EMPTY };
            sink.write_u32(seqs.len())?;
            seqs.iter().try_for_each(|seq| sink.write_i32(seq.id()))?;
        }
        sink.write_u32(S_TRANS)?;
        sink.write_u32(self.geometry.n_layer)?;
        if !self.has_planes() {
            return Ok(());
        }
        let rows: Vec<u32> = states.iter().map(|state| state.row).collect();
        let map = Arc::new(CellMap::of_cells(&rows)?);
        for (LayerTensor { which, geometry, .. }, plane) in self.geometry.tensors.iter().zip(&self.planes) {
            if *which != RecurrentTensor::P {
                sink.write_i32(geometry.ggml_type.as_i32())?;
            }
            sink.write_u64(geometry.row_size)?;
            if let Some(plane) = plane.as_ref().filter(|_| !rows.is_empty()) {
                sink.write_tensor(Region::new(plane, &map)?)?;
            }
        }
        Ok(())
    }

    /// Finds a cell for a state. Changes nothing.
    pub fn state_place<'a>(&self, read: ReadState<'a>, params: ReadParams) -> Result<RecurrentPlan<'a>> {
        let ReadState { states, tensors } = read;
        let ReadParams { scope, range, append, .. } = params;
        let pos = states.first().filter(|_| scope != Scope::Whole).map(|&(_, pos)| pos);
        let n_cut = pos.map_or(0, |pos| usize::try_from(i64::from(pos) + 1 - range.p1).unwrap_or(0));
        // One without planes is as good as one of an earlier position.
        let pos = if self.has_planes() { pos } else { pos.and_then(|pos| range.last_up_to(pos)) };
        let pos = pos.filter(|&pos| pos >= range.p0 && !range.is_empty());
        let (after, cells) = match (scope, pos) {
            (Scope::Seq(seq), None) => {
                let mut after = self.cells.clone();
                if !append {
                    after.leave(seq);
                }
                (after, Vec::new())
            }
            (Scope::Seq(seq), Some(pos)) => {
                let tail = self.cells.tail(seq).filter(|_| append);
                if let Some(Tail { pos: pos_max, .. }) = tail.filter(|tail| pos <= tail.pos) {
                    return Err(Error::PositionsMeet { pos, pos_max, place: self.geometry.place() });
                }
                let found =
                    if append { self.cells.place_behind(seq, pos) } else { self.cells.place(seq, pos) };
                let (after, cell) = found.ok_or_else(|| self.geometry.no_space(1, 0))?;
                (after, vec![cell])
            }
            (Scope::Whole, _) => (self.cells.of_states(&states), (0..count(states.len())?).collect()),
        };
        let map = CellMap::of_cells(&cells)?;
        Ok(RecurrentPlan { scope, pos, n_cut, after, cells, map, tensors })
    }

    /// Whether the state takes a cell that holds something, the destination's own included.
    pub fn state_overwrites(&self, plan: &RecurrentPlan<'_>) -> bool {
        plan.cells.iter().any(|&cell| self.cells.is_used(cell))
    }

    pub fn state_apply(&mut self, plan: &RecurrentPlan<'_>) {
        self.cells = plan.after.clone();
    }

    /// Empties the destination.
    pub fn state_forget(&mut self, plan: &RecurrentPlan<'_>) {
        match plan.scope {
            Scope::Seq(seq) => self.cells.leave(seq),
            Scope::Whole => self.cells.clear(),
        }
    }

    /// What is converted, in words.
    pub fn state_notes(&self, plan: &RecurrentPlan<'_>) -> Vec<String> {
        let names = self.geometry.tensors.iter().map(|tensor| match tensor.which {
            RecurrentTensor::R => "R",
            RecurrentTensor::P => "P",
            RecurrentTensor::S => "S",
        });
        let conversions = plan.tensors.iter().map(|tensor| tensor.conversion);
        convert::notes(&self.geometry.name, names.zip(conversions))
    }

    /// The tensors' part of the commit.
    pub fn state_scatter<'p>(&'p mut self, plan: &'p RecurrentPlan<'_>) -> Vec<Scatter<'p>> {
        let n_src = plan.map.n_cells();
        let part = |(plane, &src): (&'p mut Option<Plane>, &'p StateTensor<'_>)| {
            let plane = plane.as_mut().filter(|_| n_src > 0)?;
            Some(Scatter { plane, map: &plan.map, n_src, src })
        };
        self.planes.iter_mut().zip(&plan.tensors).filter_map(part).collect()
    }

    /// The rows that the state would have, in every plane.
    pub fn state_cells<'p>(&'p mut self, plan: &'p RecurrentPlan<'_>) -> Vec<(&'p mut Plane, &'p CellMap)> {
        self.planes.iter_mut().flatten().map(|plane| (plane, &plan.map)).collect()
    }
}

impl RecurrentGeometry {
    /// Reads the section's bytes and checks everything that can be checked without the cells.
    pub fn state_read<'a>(
        &self,
        source: &mut Source<'a>,
        scope: Scope,
        convert: Convert,
    ) -> Result<ReadState<'a>> {
        let states = self.read_metadata(source, scope)?;
        let s_trans = source.u32("s_trans")?;
        let n_layer = source.u32("n_layer")?;
        if n_layer != self.n_layer {
            return Err(self.mismatch("mismatched layer count", n_layer, self.n_layer, None));
        }
        if s_trans != S_TRANS {
            return Err(self.mismatch("incompatible s transposition", s_trans, S_TRANS, None));
        }
        let mut tensors = Vec::with_capacity(self.tensors.len());
        // P has no type of its own: it is of the type of its layer's R, which comes before it.
        let mut ggml_type = GgmlType::F32;
        for LayerTensor { layer, which, geometry } in &self.tensors {
            let (other_type, other_size) = which.mismatches();
            if *which != RecurrentTensor::P {
                let number = source.i32("ggml type")?;
                let state = GgmlType::from_i32(number);
                let takes =
                    |convert: Convert| state.filter(|&state| convert.takes_type(state, geometry.ggml_type));
                ggml_type = takes(convert).ok_or_else(|| {
                    let state = state.map_or(number.to_string(), |state| state.to_string());
                    let refused = self.mismatch(other_type, state, geometry.ggml_type, Some(*layer));
                    convert.refusal(refused, |convert| takes(convert).is_some())
                })?;
            }
            let row_size = source.u64("row_size")?;
            let expected = ggml_type.row_size(geometry.n_embd);
            if Some(row_size) != expected {
                let expected = expected.unwrap_or(geometry.row_size);
                return Err(self.mismatch(other_size, row_size, expected, Some(*layer)));
            }
            // No overflow: rows are at most 4 GiB elements, states at most as many as sequences.
            let bytes = row_size.saturating_mul(states.len() as u64);
            let [from, to] = [ggml_type, geometry.ggml_type].map(TensorLayout::rows);
            let conversion = Conversion::new(from, to, geometry.n_embd);
            tensors.push(StateTensor { bytes: source.tensor(which.field(), bytes)?, conversion });
        }
        Ok(ReadState { states, tensors })
    }

    fn read_metadata(&self, source: &mut Source<'_>, scope: Scope) -> Result<Vec<(SeqSet, Pos)>> {
        let cell_count = source.u32("cell_count")?;
        if scope != Scope::Whole && cell_count > 1 {
            return Err(Error::corrupt("cell_count", cell_count, "at most 1 state of a sequence"));
        }
        if cell_count > self.n_seq_max {
            return Err(self.no_space(cell_count, self.n_seq_max));
        }
        let mut seen = SeqSet::EMPTY;
        (0..cell_count)
            .map(|_| {
                let pos = source.i32("pos")?;
                if pos < 0 {
                    return Err(Error::corrupt("pos", pos, "at least 0"));
                }
                let n_seq_id = source.u32("n_seq_id")?;
                let seqs = match scope {
                    Scope::Seq(_) if n_seq_id != 0 => {
                        return Err(Error::corrupt(
                            "n_seq_id",
                            n_seq_id,
                            "0 in the recurrent state of a sequence",
                        ));
                    }
                    Scope::Seq(dest) => SeqSet::of(dest),
                    Scope::Whole => self.read_seq_ids(source, n_seq_id, &mut seen)?,
                };
                Ok((seqs, pos))
            })
            .collect()
    }

    /// The sequences of a state, none of which may be in `seen`: a sequence has one state.
    fn read_seq_ids(&self, source: &mut Source<'_>, n_seq_id: u32, seen: &mut SeqSet) -> Result<SeqSet> {
        let n_seq_max = self.n_seq_max;
        if !(1..=n_seq_max).contains(&n_seq_id) {
            return Err(Error::corrupt("n_seq_id", n_seq_id, format_args!("1 to n_seq_max {n_seq_max}")));
        }
        let mut seqs = SeqSet::EMPTY;
        for _ in 0..n_seq_id {
            let seq_id = source.i32("seq_id")?;
            let seq = Seq::new(seq_id, n_seq_max).ok_or_else(|| {
                Error::corrupt("seq_id", seq_id, format_args!("a sequence in [0, {n_seq_max})"))
            })?;
            if seen.contains(seq) {
                return Err(Error::corrupt(
                    "seq_id",
                    format_args!("{seq_id} twice"),
                    "one state of a sequence",
                ));
            }
            seen.insert(seq);
            seqs.insert(seq);
        }
        Ok(seqs)
    }

    fn mismatch(
        &self,
        what: &'static str,
        state: impl std::fmt::Display,
        cache: impl std::fmt::Display,
        layer: Option<usize>,
    ) -> Error {
        mismatch(&self.name, what, state, cache, layer)
    }

    fn no_space(&self, need: u32, free: u32) -> Error {
        Error::NoSpace { need: need.into(), free: free.into(), kv_size: self.n_seq_max, place: self.place() }
    }
}
