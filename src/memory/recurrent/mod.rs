//! A recurrent section: one state per sequence, whatever its length (`llama_memory_recurrent`).

mod cells;
mod geometry;
mod state;

pub use cells::RecurrentSlot;
pub(crate) use cells::{FoundSlot, SequenceSet};
pub use geometry::{RecurrentLayerParams, RecurrentParams, RecurrentTensor};
pub(crate) use state::RecurrentPlan;

use super::planes::{self, SectionMemory};
use crate::error::{Error, Result};
use crate::storage::{Plane, PlaneShape, Transfer};
use crate::types::{Pos, PosRange, Seq};
use cells::{RecurrentCells, Tail};
use geometry::RecurrentGeometry;

/// The planes of a recurrent section whose memory belongs to somebody else: one entry per layer, `None` where the layer has no
/// such tensor or one without elements. A plane has `n_seq_max * (1 + n_rs_seq)` rows.
#[derive(Debug, Default)]
pub struct RecurrentPlanes {
    /// R.
    pub r: Vec<Option<Plane>>,
    /// S.
    pub s: Vec<Option<Plane>>,
    /// P.
    pub p: Vec<Option<Plane>>,
}

/// Where the tensors of a recurrent section are.
pub type RecurrentMemory = SectionMemory<RecurrentPlanes>;

/// The state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentState {
    /// The last position that it has seen.
    pub pos: Pos,
    /// Its row in every plane.
    pub row: u32,
    /// By how many tokens the sequence was cut back since its last ubatch; the next one ends it.
    pub rollback: u32,
    /// How many rollback planes behind it hold states of the tokens before. `None`: its row does not hold the state of `pos`, for
    /// `seq_rm`, which answers as llama.cpp's, has gone further back than states were kept.
    pub n_older: Option<u32>,
}

/// A recurrent section.
#[derive(Debug)]
pub(crate) struct RecurrentCache {
    pub geometry: RecurrentGeometry,
    cells: RecurrentCells,
    /// As the geometry's tensors; `None` for those without elements.
    planes: Vec<Option<Plane>>,
}

impl RecurrentCache {
    /// A section over the caller's memory, or over memory of its own, zeroed.
    pub fn new(
        name: &str,
        params: &RecurrentParams,
        memory: RecurrentMemory,
        n_seq_max: u32,
    ) -> Result<Self> {
        let geometry = RecurrentGeometry::new(params, name, n_seq_max)?;
        let planes = match memory {
            SectionMemory::Adopted(planes) => adopted(planes, &geometry)?,
            SectionMemory::Host => allocated(&geometry, &vec![None; geometry.n_layer as usize])?,
            SectionMemory::Devices(devices) => allocated(&geometry, &devices)?,
        };
        let cells = RecurrentCells::new(n_seq_max, geometry.n_rs_seq);
        Ok(Self { geometry, cells, planes })
    }

    pub fn has_planes(&self) -> bool {
        !self.geometry.tensors.is_empty()
    }

    /// Every plane.
    pub fn planes(&self) -> impl Iterator<Item = &Plane> {
        self.planes.iter().flatten()
    }

    /// A tensor of a layer; `None` if the layer has none, or one without elements.
    pub fn plane(&self, layer: usize, which: RecurrentTensor) -> Option<&Plane> {
        self.planes[self.geometry.index_of(layer, which)?].as_ref()
    }

    pub fn plane_mut(&mut self, layer: usize, which: RecurrentTensor) -> Option<&mut Plane> {
        self.planes[self.geometry.index_of(layer, which)?].as_mut()
    }

    pub fn state(&self, seq: Seq) -> Option<RecurrentState> {
        let tail @ Tail { pos, rollback, n_older, .. } = self.cells.tail(seq)?;
        Some(RecurrentState { pos, row: self.cells.row(tail), rollback, n_older })
    }

    /// The one position that is known of a sequence.
    pub fn seq_pos(&self, seq: Seq) -> Option<Pos> {
        self.cells.tail(seq).map(|tail| tail.pos)
    }

    /// How many positions can be cut off the end of a sequence so that its state is there; `None`: any.
    pub fn max_cut(&self, seq: Seq) -> Option<u32> {
        let tail = self.cells.tail(seq).filter(|_| self.has_planes())?;
        Some(tail.n_older.filter(|_| tail.rollback == 0).unwrap_or(0))
    }

    pub fn forget(&mut self) {
        self.cells.clear();
    }

    pub fn zero_all(&mut self, transfer: &Transfer) -> Result<()> {
        self.planes.iter_mut().flatten().try_for_each(|plane| plane.zero_all(transfer))
    }

    pub fn can_seq_rm(&self, seq: Option<Seq>, range: PosRange) -> bool {
        self.cells.can_seq_rm(seq, range, self.has_planes())
    }

    pub fn seq_rm(&mut self, seq: Option<Seq>, range: PosRange) {
        let has_planes = self.has_planes();
        self.cells.seq_rm(seq, range, has_planes);
    }

    /// A state cannot be copied in part: `dst` has all of it.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq) {
        self.cells.seq_cp(src, dst);
    }

    pub fn seq_keep(&mut self, seq: Seq) {
        self.cells.seq_keep(seq);
    }

    pub fn check_seq_add(&self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        self.cells.check_seq_add(seq, range, delta)
    }

    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) {
        self.cells.seq_add(seq, range, delta);
    }

    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) {
        self.cells.seq_div(seq, range, d);
    }

    /// Cells for the sequence sets of a ubatch, with the last position of each. Changes nothing.
    pub fn find_slot(&self, sets: &[SequenceSet]) -> Result<FoundSlot> {
        self.cells.find_slot(sets).ok_or_else(|| Error::NoSlot {
            n_tokens: sets.len() as u64,
            kv_size: self.geometry.n_seq_max,
            place: self.geometry.place(),
        })
    }

    /// Takes the cells that were found.
    pub fn apply(&mut self, slot: &FoundSlot) {
        self.cells = slot.after.clone();
    }
}

/// The planes of layers on these devices, those on one device in one allocation.
fn allocated(geometry: &RecurrentGeometry, devices: &[Option<i32>]) -> Result<Vec<Option<Plane>>> {
    planes::check_devices(devices, geometry.n_layer as usize, &geometry.name)?;
    let with_bytes = || geometry.tensors.iter().filter(|tensor| tensor.geometry.row_size > 0);
    let wanted: Vec<_> = with_bytes()
        .map(|tensor| (devices[tensor.layer], PlaneShape::dense_rows(tensor.geometry.row_size)))
        .collect();
    let mut planes = planes::allocate(&wanted, geometry.n_rows)?.into_iter();
    let plane = |tensor: &geometry::LayerTensor| {
        if tensor.geometry.row_size > 0 { planes.next() } else { None }
    };
    Ok(geometry.tensors.iter().map(plane).collect())
}

fn adopted(planes: RecurrentPlanes, geometry: &RecurrentGeometry) -> Result<Vec<Option<Plane>>> {
    let RecurrentGeometry { name, n_layer, n_rows, .. } = geometry;
    let RecurrentPlanes { mut r, mut s, mut p } = planes;
    for (field, got) in [("r", r.len()), ("s", s.len()), ("p", p.len())] {
        if got != *n_layer as usize {
            return Err(Error::arg(format!("{name}.{field}"), format!("{got} planes for {n_layer} layers")));
        }
    }
    let mut taken = Vec::with_capacity(geometry.tensors.len());
    for tensor in &geometry.tensors {
        let (field, of) = match tensor.which {
            RecurrentTensor::R => ("r", &mut r),
            RecurrentTensor::S => ("s", &mut s),
            RecurrentTensor::P => ("p", &mut p),
        };
        let plane = of[tensor.layer].take();
        let row_size = tensor.geometry.row_size;
        let fits = match &plane {
            None => row_size == 0,
            Some(plane) => {
                plane.kv_size() == *n_rows
                    && planes::same_cells(plane.shape(), PlaneShape::dense_rows(row_size))
            }
        };
        if !fits {
            return Err(Error::arg(
                format!("{name}.layer {}.{field}", tensor.layer),
                format!("the plane is not {n_rows} rows of {row_size} bytes"),
            ));
        }
        taken.push(plane);
    }
    let left = [("r", &r), ("s", &s), ("p", &p)];
    match left.iter().find_map(|(field, of)| Some((field, of.iter().position(Option::is_some)?))) {
        Some((field, layer)) => {
            Err(Error::arg(format!("{name}.layer {layer}.{field}"), "a plane for a layer without it"))
        }
        None => Ok(taken),
    }
}
