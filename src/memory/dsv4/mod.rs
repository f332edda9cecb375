//! The compressed half of a DSV4 memory: K of whole blocks of positions, and the states in which the next blocks grow.
//!
//! A row is known by its position alone: no cell says which rows are in use. So whatever a sequence has left behind is zeroed, and
//! the rows of an empty sequence are all zero.

mod geometry;
mod state;

pub use geometry::{Dsv4Compressor, Dsv4CompressorParams, Dsv4Params, Dsv4Tensor};
pub(crate) use geometry::{Dsv4Geometry, n_state_planes};
pub(crate) use state::Dsv4Plan;

use super::geometry::Streams;
use super::planes::{self, SectionMemory};
use super::recurrent::SequenceSet;
use crate::cells::SeqSet;
use crate::error::{Error, Result};
use crate::storage::{self, CellMap, Plane, PlaneShape, Transfer};
use crate::types::{Pos, PosRange, Seq};

/// The planes of the compressed half whose memory belongs to somebody else: those of the layers of csa, hca and lid in turn. All
/// rows are zero when the context is made.
#[derive(Debug, Default)]
pub struct Dsv4Planes {
    /// K: for each layer one plane per stream, of `kv_size` rows.
    pub k: Vec<Plane>,
    /// Sums of values: for each layer one plane per stream, and as many again for each rollback plane, of `state_size` rows.
    pub kv: Vec<Plane>,
    /// Sums of scores: as the sums of values.
    pub score: Vec<Plane>,
}

/// Where the tensors of the compressed half are. Devices are those of the model's layers.
pub type Dsv4Memory = SectionMemory<Dsv4Planes>;

/// The compressed half of a DSV4 memory.
#[derive(Debug)]
pub(crate) struct Dsv4Cache {
    pub geometry: Dsv4Geometry,
    /// By tensor of the geometry, then plane: stream, and `rollback * n_stream + stream` in states.
    planes: Vec<Vec<Plane>>,
    /// By sequence: how many tokens before the newest its state is; above 0 it is pending.
    rollback: Vec<u32>,
    /// By sequence: how many rollback planes behind its state hold states of the tokens before.
    /// `None`: not even the state is there, as in recurrent sections.
    n_older: Vec<Option<u32>>,
    /// The sequences whose rows may not be zero.
    held: SeqSet,
}

impl Dsv4Cache {
    pub fn new(name: &str, params: Dsv4Params, memory: Dsv4Memory, streams: Streams) -> Result<Self> {
        let geometry = Dsv4Geometry::new(params, name, streams)?;
        let planes = match memory {
            SectionMemory::Adopted(planes) => adopted(planes, &geometry)?,
            SectionMemory::Host => allocated(&geometry, |_| Some(None))?,
            SectionMemory::Devices(devices) => allocated(&geometry, |il| devices.get(il as usize).copied())?,
        };
        let none = vec![0; streams.n_stream as usize];
        let n_older = vec![Some(0); none.len()];
        Ok(Self { geometry, planes, rollback: none, n_older, held: SeqSet::EMPTY })
    }

    pub fn planes(&self) -> impl Iterator<Item = &Plane> {
        self.planes.iter().flatten()
    }

    /// A plane of a layer; `None` if there is none.
    pub fn plane(
        &self,
        (compressor, which): (Dsv4Compressor, Dsv4Tensor),
        il: u32,
        stream: usize,
        rollback: u32,
    ) -> Option<&Plane> {
        let n_stream = self.geometry.n_stream as usize;
        let at = self.geometry.index_of((compressor, which), il).filter(|_| stream < n_stream)?;
        self.planes[at].get(rollback as usize * n_stream + stream)
    }

    /// A plane that somebody writes to: from now on the rows of its sequence may not be zero.
    pub fn plane_mut(
        &mut self,
        (compressor, which): (Dsv4Compressor, Dsv4Tensor),
        il: u32,
        seq: Seq,
        rollback: u32,
    ) -> Option<&mut Plane> {
        let at = self.geometry.index_of((compressor, which), il)?;
        let n_stream = self.geometry.n_stream as usize;
        let plane = self.planes[at].get_mut(rollback as usize * n_stream + seq.index())?;
        self.held.insert(seq);
        Some(plane)
    }

    pub fn rollback(&self, seq: Seq) -> u32 {
        self.rollback[seq.index()]
    }

    /// The planes of a stream, in states with all rollback planes.
    fn stream_mut(&mut self, stream: usize) -> impl Iterator<Item = &mut Plane> {
        let n_stream = self.geometry.n_stream as usize;
        self.planes.iter_mut().flat_map(move |planes| planes.iter_mut().skip(stream).step_by(n_stream))
    }

    pub fn zero_all(&mut self, transfer: &Transfer) -> Result<()> {
        self.rollback.fill(0);
        self.n_older.fill(Some(0));
        self.planes.iter_mut().flatten().try_for_each(|plane| plane.zero_all(transfer))?;
        self.held = SeqSet::EMPTY;
        Ok(())
    }

    fn zero(&mut self, seq: Seq, transfer: &Transfer) -> Result<()> {
        (self.rollback[seq.index()], self.n_older[seq.index()]) = (0, Some(0));
        if self.held.contains(seq) {
            self.stream_mut(seq.index()).try_for_each(|plane| plane.zero_all(transfer))?;
            self.held.remove(seq);
        }
        Ok(())
    }

    /// By how many positions the end would be cut off; `pos_max` is the last position of the raw cache.
    fn cut(seq: Option<Seq>, range: PosRange, pos_max: Option<Pos>) -> Option<(Seq, u32)> {
        let (seq, pos_max) = seq.zip(pos_max)?;
        (range.p0 > 0 && range.p0 <= pos_max).then(|| (seq, pos_max.abs_diff(range.p0 - 1)))
    }

    /// Whether just that can be removed: everything, nothing, or once after a ubatch up to `n_rs_seq` positions off the end.
    pub fn can_seq_rm(&self, seq: Option<Seq>, range: PosRange, pos_max: Option<Pos>) -> bool {
        let to_end = range.p1 == i64::MAX;
        match Self::cut(seq, range, pos_max) {
            Some((seq, n)) => to_end && self.rollback(seq) == 0 && n <= self.geometry.n_rs_seq,
            None => to_end && (range.p0 <= 0 || seq.is_some()),
        }
    }

    /// Removes what [`Dsv4Cache::can_seq_rm`] allows.
    pub fn seq_rm(
        &mut self,
        seq: Option<Seq>,
        range: PosRange,
        pos_max: Option<Pos>,
        transfer: &Transfer,
    ) -> Result<()> {
        match (Self::cut(seq, range, pos_max), seq) {
            (Some((seq, n)), _) => {
                self.rollback[seq.index()] = n;
                let n_older = &mut self.n_older[seq.index()];
                *n_older = n_older.and_then(|older| older.checked_sub(n));
            }
            (None, Some(seq)) if range.p0 <= 0 => self.zero(seq, transfer)?,
            (None, None) => self.zero_all(transfer)?,
            (None, Some(_)) => {}
        }
        Ok(())
    }

    pub fn check_seq_cp(range: PosRange) -> Result<()> {
        if range == PosRange::ALL {
            return Ok(());
        }
        let reason =
            format!("[{}, {}), compressed rows are copied of whole sequences only", range.p0, range.p1);
        Err(Error::arg("p0, p1", reason))
    }

    /// Copies rows, states and a pending rollback.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq, transfer: &Transfer) -> Result<()> {
        if !self.held.contains(src) {
            return self.zero(dst, transfer);
        }
        self.held.insert(dst);
        let n_stream = self.geometry.n_stream as usize;
        for (tensor, planes) in self.geometry.tensors.iter().zip(&mut self.planes) {
            let map = CellMap::of_run(0, tensor.n_rows)?;
            let pair = |planes| -> Option<(&mut Plane, &Plane)> {
                let [dst, src] = <[Plane]>::get_disjoint_mut(planes, [dst.index(), src.index()]).ok()?;
                Some((dst, src))
            };
            storage::copy_cells(planes.chunks_mut(n_stream).filter_map(pair).collect(), &map, transfer)?;
        }
        self.rollback[dst.index()] = self.rollback(src);
        self.n_older[dst.index()] = self.n_older[src.index()];
        Ok(())
    }

    /// Whether there is anything of the sequence.
    pub fn holds(&self, seq: Seq) -> bool {
        self.held.contains(seq)
    }

    /// How many positions can be cut off the end of a sequence so that its states are there.
    pub fn max_cut(&self, seq: Seq) -> u32 {
        self.n_older[seq.index()].filter(|_| self.rollback(seq) == 0).unwrap_or(0)
    }

    /// Whether the state of the sequence is one of its positions, and not of others that `seq_rm` took off.
    pub fn is_there(&self, seq: Seq) -> bool {
        self.held.contains(seq) && self.n_older[seq.index()].is_some()
    }

    /// A ubatch has tokens of these sequences: their rollbacks end.
    pub fn apply(&mut self, sets: &[SequenceSet]) {
        for &SequenceSet { seqs, n_tokens, .. } in sets {
            for seq in seqs.iter() {
                self.rollback[seq.index()] = 0;
                let n_older = &mut self.n_older[seq.index()];
                *n_older = n_older.map(|_| n_tokens.saturating_sub(1).min(self.geometry.n_rs_seq));
                self.held.insert(seq);
            }
        }
    }
}

/// Planes on the devices of their layers; `device` is `None` for a layer that nobody has named.
fn allocated(
    geometry: &Dsv4Geometry,
    device: impl Fn(u32) -> Option<Option<i32>>,
) -> Result<Vec<Vec<Plane>>> {
    let allocate = |tensor: &geometry::LayerTensor| {
        let on = device(tensor.il).ok_or_else(|| {
            let reason = format!("none for layer {}", tensor.il);
            Error::arg(format!("{}.devices", geometry.name), reason)
        })?;
        let shape = PlaneShape::dense_rows(tensor.geometry.row_size);
        planes::allocate(&vec![(on, shape); tensor.n_plane], tensor.n_rows)
    };
    geometry.tensors.iter().map(allocate).collect()
}

fn adopted(planes: Dsv4Planes, geometry: &Dsv4Geometry) -> Result<Vec<Vec<Plane>>> {
    let Dsv4Planes { k, kv, score } = planes;
    let mut left = [k.into_iter(), kv.into_iter(), score.into_iter()];
    let of = |which: Dsv4Tensor| match which {
        Dsv4Tensor::K => 0,
        Dsv4Tensor::Kv => 1,
        Dsv4Tensor::Score => 2,
    };
    let take = |tensor: &geometry::LayerTensor| {
        let planes: Vec<Plane> = left[of(tensor.which)].by_ref().take(tensor.n_plane).collect();
        let shape = PlaneShape::dense_rows(tensor.geometry.row_size);
        let fits =
            |plane: &Plane| plane.kv_size() == tensor.n_rows && planes::same_cells(plane.shape(), shape);
        if planes.len() == tensor.n_plane && planes.iter().all(fits) {
            return Ok(planes);
        }
        let want = format!(
            "{} planes of {} rows of {} bytes",
            tensor.n_plane, tensor.n_rows, tensor.geometry.row_size
        );
        Err(Error::arg(tensor.place(&geometry.name), format!("is not {want}")))
    };
    let taken = geometry.tensors.iter().map(take).collect::<Result<_>>()?;
    match left.iter().map(ExactSizeIterator::len).sum::<usize>() {
        0 => Ok(taken),
        n => Err(Error::arg(format!("{}.planes", geometry.name), format!("{n} that no layer has"))),
    }
}
