//! `state_write`: which cells an attention cache saves, and their bytes.

use std::sync::Arc;

use super::geometry::{Geometry, TensorGeometry};
use super::kv_cache::{KvCache, StreamPlanes, sorted_cells};
use crate::cells::CellMeta;
use crate::error::{Error, Result};
use crate::state::Sink;
use crate::storage::{CellMap, Region};
use crate::types::{Pos, PosRange, Seq, StateFlags, Swa};

/// What a state covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// One sequence.
    Seq(Seq),
    /// The whole context (`seq_id` -1).
    Whole,
}

impl Scope {
    /// The sequence, if it is one.
    pub fn seq(self) -> Option<Seq> {
        match self {
            Self::Seq(seq) => Some(seq),
            Self::Whole => None,
        }
    }
}

/// What a write depends on beside the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteParams {
    pub scope: Scope,
    pub flags: StateFlags,
    /// Most masked cells of an SWA section that a sequence state without `PARTIAL_ONLY` keeps; `None`: all.
    pub max_masked_cells: Option<u32>,
    /// Which positions of a sequence are wanted.
    pub range: PosRange,
}

impl WriteParams {
    fn is_partial(self) -> bool {
        self.flags.contains(StateFlags::PARTIAL_ONLY)
    }

    /// Where the cells begin that a sequence state holds of `entries`, ordered by position.
    ///
    /// Masked cells are left out of partial states alone: any other state may be cut to a prefix after
    /// the restore, and what the end of the sequence masks is inside the window of the prefix.
    pub(super) fn first_kept(self, entries: &[(Pos, u32)], swa: Swa) -> usize {
        let keep_masked = if self.is_partial() { Some(0) } else { self.max_masked_cells };
        let (Some(keep_masked), Some(&(pos_max, _))) = (keep_masked, entries.last()) else { return 0 };
        let first_unmasked = swa.first_unmasked(pos_max);
        let n_masked = entries.partition_point(|&(pos, _)| i64::from(pos) < first_unmasked);
        let mut start = n_masked.saturating_sub(keep_masked as usize);
        // The patches of an image share a position: it is kept as a whole or not at all.
        while start > 0 && start < n_masked && entries[start].0 == entries[start - 1].0 {
            start += 1;
        }
        start
    }
}

/// Cells whose metadata is handed to a sink at a time.
const METAS_AT_ONCE: usize = 4096;

impl Geometry {
    /// Writes what a state holds of one stream: `cells`, ascending, with their metas, and their bytes in the
    /// stream's planes.
    pub(super) fn write_stream<'a>(
        &self,
        sink: &mut impl Sink<'a>,
        scope: Scope,
        mut metas: impl Iterator<Item = CellMeta> + Clone,
        cells: &[u32],
        planes: StreamPlanes<'a>,
    ) -> Result<()> {
        sink.write_u32(count(cells.len())?)?;
        if cells.is_empty() {
            return Ok(());
        }
        // Not all at once: a sink may have to hold what it is given. One that only counts does not ask for it.
        let mut counted = metas.clone();
        for cells in cells.chunks(METAS_AT_ONCE) {
            let n_seq_id = |meta: CellMeta| meta.seqs.len() as usize;
            let n_seq_ids = match scope {
                Scope::Seq(_) => cells.len(),
                Scope::Whole => counted.by_ref().take(cells.len()).map(n_seq_id).sum(),
            };
            let words_per_cell = if self.cell_ext { 5 } else { 2 };
            sink.write_with(4 * (words_per_cell * cells.len() + n_seq_ids), |out| {
                let mut words = out.as_chunks_mut().0.iter_mut();
                for meta in metas.by_ref().take(cells.len()) {
                    self.write_meta(&mut words, scope, meta);
                }
            })?;
        }
        self.write_data(sink, cells, planes)
    }

    fn write_meta<'w>(
        &self,
        words: &mut impl Iterator<Item = &'w mut [u8; 4]>,
        scope: Scope,
        meta: CellMeta,
    ) {
        let mut put = |value: i32| {
            if let Some(word) = words.next() {
                *word = value.to_le_bytes();
            }
        };
        put(meta.pos);
        put(match scope {
            Scope::Seq(_) => 1,
            Scope::Whole => meta.seqs.len().cast_signed(),
        });
        if self.cell_ext {
            put(meta.ext.x);
            put(meta.ext.y);
            put(meta.ext.tok);
        }
        match scope {
            Scope::Seq(seq) => put(seq.id()),
            Scope::Whole => meta.seqs.iter().for_each(|seq| put(seq.id())),
        }
    }

    fn write_data<'a>(
        &self,
        sink: &mut impl Sink<'a>,
        cells: &[u32],
        planes: StreamPlanes<'a>,
    ) -> Result<()> {
        let map = Arc::new(CellMap::of_cells(cells)?);
        sink.write_u32(u32::from(self.v_trans))?;
        sink.write_u32(count(self.n_layer())?)?;
        sink.write_u32(self.n_rot_k)?;
        sink.write_u32(self.n_rot_v)?;
        for (tensor, plane) in self.k.iter().zip(planes.k) {
            write_rows(sink, tensor, Region::new(plane, &map)?)?;
        }
        for (tensor, plane) in self.v.iter().zip(planes.v) {
            let (Some(tensor), Some(plane)) = (tensor, plane) else { continue };
            if self.v_trans {
                sink.write_i32(tensor.ggml_type.as_i32())?;
                sink.write_u32(tensor.ggml_type.type_size())?;
                sink.write_u32(tensor.n_embd)?;
                sink.write_tensor(Region::new(plane, &map)?)?;
            } else {
                write_rows(sink, tensor, Region::new(plane, &map)?)?;
            }
        }
        Ok(())
    }
}

impl KvCache {
    /// The cells of `stream` that a state holds, ascending.
    fn selected(&self, stream: usize, params: WriteParams) -> Vec<u32> {
        let cells = self.cells(stream);
        match params.scope {
            Scope::Whole => cells.used_cells().collect(),
            Scope::Seq(seq) if self.geometry.streams.of(seq) != stream => Vec::new(),
            Scope::Seq(seq) => {
                let entries = cells.seq_cells(seq, params.range);
                sorted_cells(&entries[params.first_kept(entries, self.geometry.swa)..])
            }
        }
    }

    /// Writes the section.
    pub fn state_write<'a>(&'a self, sink: &mut impl Sink<'a>, params: WriteParams) -> Result<()> {
        if !self.geometry.writes(params.flags) {
            return Ok(());
        }
        sink.write_u32(self.geometry.streams.n_stream)?;
        for stream in 0..self.cells.len() {
            let cells = self.selected(stream, params);
            let metas = cells.iter().filter_map(|&cell| self.cells[stream].meta(cell));
            let planes = self.planes.stream(stream, self.geometry.n_layer());
            self.geometry.write_stream(sink, params.scope, metas, &cells, planes)?;
        }
        Ok(())
    }

    /// Streams whose pending shifts a write would save unapplied.
    pub fn shifted_streams_of(&self, params: WriteParams) -> Vec<usize> {
        if !self.geometry.writes(params.flags) {
            return Vec::new();
        }
        let would_save = |&stream: &usize| {
            let cells = self.cells(stream);
            cells.has_shift() && self.selected(stream, params).iter().any(|&cell| cells.shift(cell) != 0)
        };
        (0..self.cells.len()).filter(would_save).collect()
    }
}

fn write_rows<'a>(sink: &mut impl Sink<'a>, tensor: &TensorGeometry, rows: Region<'a>) -> Result<()> {
    sink.write_i32(tensor.ggml_type.as_i32())?;
    sink.write_u64(tensor.row_size)?;
    sink.write_tensor(rows)
}

pub(super) fn count(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::arg("count", format!("{n} does not fit the format's 32 bits")))
}
