//! An attention cache: the cells of its streams, and the planes that hold K and V (`llama_kv_cache`).

use super::geometry::{Geometry, KvParams, Streams};
use super::planes::{self, SectionMemory};
use crate::cells::{CellMeta, Cells, SeqSet};
use crate::error::{Error, Result};
use crate::storage::{self, CellMap, Plane, Transfer};
use crate::types::{Pos, PosRange, Seq};

/// The planes of an attention cache whose memory belongs to somebody else.
///
/// Both lists are stream-major: entry `stream * n_layer + layer`.
#[derive(Debug, Default)]
pub struct KvPlanes {
    /// Keys.
    pub k: Vec<Plane>,
    /// Values; `None` for layers without V.
    pub v: Vec<Option<Plane>>,
}

/// Where K and V of an attention cache are.
pub type KvMemory = SectionMemory<KvPlanes>;

/// The planes of one stream, one per layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamPlanes<'a> {
    pub k: &'a [Plane],
    pub v: &'a [Option<Plane>],
}

impl KvPlanes {
    pub(super) fn stream(&self, stream: usize, n_layer: usize) -> StreamPlanes<'_> {
        let layers = stream * n_layer..(stream + 1) * n_layer;
        StreamPlanes { k: &self.k[layers.clone()], v: &self.v[layers] }
    }
}

/// An attention cache, one stream or one per sequence.
#[derive(Debug)]
pub(crate) struct KvCache {
    pub geometry: Geometry,
    /// One per stream.
    pub(super) cells: Vec<Cells>,
    pub(super) planes: KvPlanes,
}

impl KvCache {
    /// A cache over the caller's memory, or over memory of its own, zeroed.
    pub fn new(name: &str, params: &KvParams, memory: KvMemory, streams: Streams) -> Result<Self> {
        let geometry = Geometry::new(params, name, streams)?;
        let planes = match memory {
            SectionMemory::Adopted(planes) => check_adopted(planes, &geometry)?,
            SectionMemory::Host => allocate(&geometry, &vec![None; geometry.n_layer()])?,
            SectionMemory::Devices(devices) => allocate(&geometry, &devices)?,
        };
        let cells = (0..streams.n_stream)
            .map(|_| Cells::new(geometry.kv_size, streams.n_seq_max, geometry.cell_ext))
            .collect::<Result<_>>()?;
        Ok(Self { geometry, cells, planes })
    }

    /// The cells of a stream, which must be below `n_stream`.
    pub fn cells(&self, stream: usize) -> &Cells {
        &self.cells[stream]
    }

    pub fn seq_cells(&self, seq: Seq) -> &Cells {
        &self.cells[self.geometry.streams.of(seq)]
    }

    fn seq_cells_mut(&mut self, seq: Seq) -> &mut Cells {
        &mut self.cells[self.geometry.streams.of(seq)]
    }

    /// K of a layer; both indices must be in range.
    pub fn k(&self, stream: usize, layer: usize) -> &Plane {
        &self.planes.k[stream * self.geometry.n_layer() + layer]
    }

    /// V of a layer, if it has one; both indices must be in range.
    pub fn v(&self, stream: usize, layer: usize) -> Option<&Plane> {
        self.planes.v[stream * self.geometry.n_layer() + layer].as_ref()
    }

    /// Every plane.
    pub fn planes(&self) -> impl Iterator<Item = &Plane> {
        let KvPlanes { k, v } = &self.planes;
        k.iter().chain(v.iter().flatten())
    }

    /// K or V of a layer, to be written; the indices must be in range.
    pub fn plane_mut(&mut self, stream: usize, layer: usize, is_v: bool) -> Option<&mut Plane> {
        let at = stream * self.geometry.n_layer() + layer;
        if is_v { self.planes.v[at].as_mut() } else { Some(&mut self.planes.k[at]) }
    }

    /// Empties every cell.
    pub fn forget(&mut self) {
        self.cells.iter_mut().for_each(Cells::clear);
    }

    /// Zeroes K and V of every cell.
    pub fn zero_all(&mut self, transfer: &Transfer) -> Result<()> {
        let KvPlanes { k, v } = &mut self.planes;
        k.iter_mut().chain(v.iter_mut().flatten()).try_for_each(|plane| plane.zero_all(transfer))
    }

    /// Removes positions of one sequence, or of every sequence.
    pub fn seq_rm(&mut self, seq: Option<Seq>, range: PosRange) {
        match seq {
            Some(seq) => self.seq_cells_mut(seq).seq_rm(seq, range),
            None => self.cells.iter_mut().for_each(|cells| cells.rm(range)),
        }
    }

    /// Whether [`KvCache::seq_cp`] can be done: across streams only whole sequences are copied.
    pub fn check_seq_cp(&self, src: Seq, dst: Seq, range: PosRange) -> Result<()> {
        let cells = self.seq_cells(src);
        let covers = |pos: Option<Pos>| pos.is_none_or(|pos| range.contains(pos));
        let whole = covers(cells.seq_pos_min(src)) && covers(cells.seq_pos_max(src));
        if whole || self.geometry.streams.of(src) == self.geometry.streams.of(dst) {
            return Ok(());
        }
        Err(Error::arg(
            "p0, p1",
            format!(
                "between streams only whole sequences are copied, [{}, {}) leaves out positions of sequence {}",
                range.p0,
                range.p1,
                src.id()
            ),
        ))
    }

    /// Shares cells within a stream; between streams copies the sequence, cells and data, at once.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq, range: PosRange, transfer: &Transfer) -> Result<()> {
        let (s0, s1) = (self.geometry.streams.of(src), self.geometry.streams.of(dst));
        if s0 == s1 {
            self.cells[s0].seq_cp(src, dst, range);
            return Ok(());
        }
        let [from, to] = self.cells.get_disjoint_mut([s0, s1]).expect("two different streams");
        to.clear();
        to.seq_cp_from(from, src, dst);
        let map = CellMap::of_cells(&sorted_cells(from.seq_cells(src, PosRange::ALL)))?;
        let KvPlanes { k, v } = &mut self.planes;
        let [to_k, from_k] = streams_of(k, [s1, s0], self.geometry.n_layer());
        let [to_v, from_v] = streams_of(v, [s1, s0], self.geometry.n_layer());
        let v = to_v.iter_mut().zip(from_v.iter()).filter_map(|(to, from)| to.as_mut().zip(from.as_ref()));
        storage::copy_cells(to_k.iter_mut().zip(from_k.iter()).chain(v).collect(), &map, transfer)
    }

    /// In every stream; llama.cpp looks at that of `seq` only.
    pub fn seq_keep(&mut self, seq: Seq) {
        self.cells.iter_mut().for_each(|cells| cells.seq_keep(seq));
    }

    /// Whether [`KvCache::seq_add`] can be done.
    pub fn check_seq_add(&self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        match self.seq_cells(seq).seq_cells(seq, range).last() {
            Some(&(pos, _)) if pos.checked_add(delta).is_none() => Err(Error::PosOverflow { pos, delta }),
            _ => Ok(()),
        }
    }

    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        self.seq_cells_mut(seq).seq_add(seq, range, delta)
    }

    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) -> Result<()> {
        self.seq_cells_mut(seq).seq_div(seq, range, d)
    }

    pub fn seq_pos_min(&self, seq: Seq) -> Option<Pos> {
        self.seq_cells(seq).seq_pos_min(seq)
    }

    pub fn seq_pos_max(&self, seq: Seq) -> Option<Pos> {
        self.seq_cells(seq).seq_pos_max(seq)
    }

    /// The cell of each token of `metas` in `stream`, or why there is none. Changes nothing.
    pub fn find_slot(&self, stream: usize, n_tokens: usize) -> Result<Vec<u32>> {
        let slot = u32::try_from(n_tokens)
            .ok()
            .and_then(|n_tokens| self.cells[stream].find_slot(n_tokens, self.geometry.swa));
        slot.ok_or_else(|| Error::NoSlot {
            n_tokens: n_tokens as u64,
            kv_size: self.geometry.kv_size,
            place: self.geometry.place(stream),
        })
    }

    /// Gives `cells` of `stream` to tokens.
    pub fn apply(&mut self, stream: usize, cells: &[u32], metas: &[CellMeta]) {
        self.cells[stream].apply(cells, metas);
    }

    /// Cells with a pending shift, by stream.
    pub fn shifted(&self, stream: usize) -> impl Iterator<Item = (u32, Pos)> + '_ {
        self.cells[stream].shifted()
    }

    /// Streams with a pending shift.
    pub fn shifted_streams(&self) -> Vec<usize> {
        (0..self.cells.len()).filter(|&stream| self.cells[stream].has_shift()).collect()
    }

    /// The sequences of the cells of a stream with a pending shift.
    pub fn shifted_seqs(&self, stream: usize) -> SeqSet {
        let mut seqs = SeqSet::EMPTY;
        let metas = self.shifted(stream).filter_map(|(cell, _)| self.cells[stream].meta(cell));
        metas.flat_map(|meta| meta.seqs.iter()).for_each(|seq| seqs.insert(seq));
        seqs
    }

    pub fn shift_done(&mut self, stream: usize) {
        self.cells[stream].shift_done();
    }
}

/// The planes of two different streams.
fn streams_of<T>(planes: &mut [T], streams: [usize; 2], n_layer: usize) -> [&mut [T]; 2] {
    let layers = streams.map(|stream| stream * n_layer..(stream + 1) * n_layer);
    planes.get_disjoint_mut(layers).expect("two different streams")
}

/// The cells of position index entries, ascending.
pub(super) fn sorted_cells(entries: &[(Pos, u32)]) -> Vec<u32> {
    let mut cells: Vec<u32> = entries.iter().map(|&(_, cell)| cell).collect();
    if !cells.is_sorted() {
        cells.sort_unstable();
    }
    cells
}

/// Planes of layers on these devices, those of a stream on one device in one allocation.
fn allocate(geometry: &Geometry, devices: &[Option<i32>]) -> Result<KvPlanes> {
    planes::check_devices(devices, geometry.n_layer(), &geometry.name)?;
    let k = geometry.k.iter().zip(devices).map(|(k, &on)| (on, k.dense_shape(false, geometry.kv_size)));
    let v = geometry
        .v
        .iter()
        .zip(devices)
        .filter_map(|(v, &on)| v.map(|v| (on, v.dense_shape(geometry.v_trans, geometry.kv_size))));
    let wanted: Vec<_> = k.chain(v).collect();
    let mut planes = KvPlanes::default();
    for _ in 0..geometry.streams.n_stream {
        let mut allocated = planes::allocate(&wanted, geometry.kv_size)?.into_iter();
        planes.k.extend(allocated.by_ref().take(geometry.n_layer()));
        planes.v.extend(geometry.v.iter().map(|v| if v.is_some() { allocated.next() } else { None }));
    }
    Ok(planes)
}

pub(super) fn check_adopted(planes: KvPlanes, geometry: &Geometry) -> Result<KvPlanes> {
    let Geometry { name, streams, .. } = geometry;
    let n_layer = geometry.n_layer();
    let want = streams.n_stream as usize * n_layer;
    for (field, got) in [("k", planes.k.len()), ("v", planes.v.len())] {
        if got != want {
            return Err(Error::arg(
                format!("{name}.{field}"),
                format!("{got} planes for {} streams of {n_layer} layers", streams.n_stream),
            ));
        }
    }
    for (i, (k, v)) in planes.k.iter().zip(&planes.v).enumerate() {
        let (stream, layer) = (i / n_layer, i % n_layer);
        let want_k = geometry.k[layer].dense_shape(false, geometry.kv_size);
        let want_v = geometry.v[layer].map(|v| v.dense_shape(geometry.v_trans, geometry.kv_size));
        let k_fits = k.kv_size() == geometry.kv_size && planes::same_cells(k.shape(), want_k);
        let v_fits = match (v, want_v) {
            (None, None) => true,
            (Some(v), Some(want)) => v.kv_size() == geometry.kv_size && planes::same_cells(v.shape(), want),
            _ => false,
        };
        for (field, fits) in [("k", k_fits), ("v", v_fits)] {
            if !fits {
                return Err(Error::arg(
                    format!("{name}.layer {layer}.{field}"),
                    format!("the plane of stream {stream} does not fit the layer's type, width and kv_size"),
                ));
            }
        }
    }
    Ok(planes)
}
