//! `state_write`: which cells an attention cache saves, and their bytes.

use super::geometry::TensorGeometry;
use super::kv_cache::{KvCache, shared_runs, sorted_cells};
use crate::error::{Error, Result};
use crate::state::Sink;
use crate::storage::Region;
use crate::types::{PosRange, Seq, StateFlags};

/// What a state covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// One sequence.
    Seq(Seq),
    /// The whole context (`seq_id` -1).
    Whole,
}

/// What a write depends on beside the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteParams {
    pub scope: Scope,
    pub flags: StateFlags,
    /// Most masked cells of an SWA section that a sequence state without `PARTIAL_ONLY` keeps; `None`: all.
    pub max_masked_cells: Option<u32>,
}

impl WriteParams {
    fn is_partial(self) -> bool {
        self.flags.contains(StateFlags::PARTIAL_ONLY)
    }
}

impl KvCache {
    /// Whether the section has bytes in a state with these flags. Full attention is rolled back with
    /// `seq_rm`, so a partial state has nothing of it, not even `n_stream`.
    pub fn writes(&self, flags: StateFlags) -> bool {
        !(flags.contains(StateFlags::PARTIAL_ONLY) && self.geometry.swa.is_none())
    }

    /// The cells of `stream` that a state holds, ascending.
    ///
    /// Masked cells are left out of partial states alone: any other state may be cut to a prefix after
    /// the restore, and what the end of the sequence masks is inside the window of the prefix.
    fn selected(&self, stream: usize, params: WriteParams) -> Vec<u32> {
        let cells = self.cells(stream);
        let seq = match params.scope {
            Scope::Whole => return cells.used_cells().collect(),
            Scope::Seq(seq) if self.streams.of(seq) != stream => return Vec::new(),
            Scope::Seq(seq) => seq,
        };
        let entries = cells.seq_cells(seq, PosRange::ALL);
        let keep_masked = if params.is_partial() { Some(0) } else { params.max_masked_cells };
        let (Some(keep_masked), Some(&(pos_max, _))) = (keep_masked, entries.last()) else {
            return sorted_cells(entries);
        };
        let first_unmasked = self.geometry.swa.first_unmasked(pos_max);
        let n_masked = entries.partition_point(|&(pos, _)| i64::from(pos) < first_unmasked);
        let mut start = n_masked.saturating_sub(keep_masked as usize);
        // The patches of an image share a position: it is kept as a whole or not at all.
        while start > 0 && start < n_masked && entries[start].0 == entries[start - 1].0 {
            start += 1;
        }
        sorted_cells(&entries[start..])
    }

    /// Writes the section.
    pub fn state_write<'a>(&'a self, sink: &mut impl Sink<'a>, params: WriteParams) -> Result<()> {
        if !self.writes(params.flags) {
            return Ok(());
        }
        sink.write_u32(self.streams.n_stream)?;
        for stream in 0..self.cells.len() {
            let cells = self.selected(stream, params);
            sink.write_u32(count(cells.len())?)?;
            if !cells.is_empty() {
                self.write_metadata(sink, stream, &cells, params.scope)?;
                self.write_data(sink, stream, &cells)?;
            }
        }
        Ok(())
    }

    fn write_metadata<'a>(
        &'a self,
        sink: &mut impl Sink<'a>,
        stream: usize,
        cells: &[u32],
        scope: Scope,
    ) -> Result<()> {
        for meta in cells.iter().filter_map(|&cell| self.cells[stream].meta(cell)) {
            sink.write_i32(meta.pos)?;
            sink.write_u32(match scope {
                Scope::Seq(_) => 1,
                Scope::Whole => meta.seqs.len(),
            })?;
            if self.geometry.cell_ext {
                sink.write_i32(meta.ext.x)?;
                sink.write_i32(meta.ext.y)?;
                sink.write_i32(meta.ext.tok)?;
            }
            match scope {
                Scope::Seq(seq) => sink.write_i32(seq.id())?,
                Scope::Whole => meta.seqs.iter().try_for_each(|seq| sink.write_i32(seq.id()))?,
            }
        }
        Ok(())
    }

    fn write_data<'a>(&'a self, sink: &mut impl Sink<'a>, stream: usize, cells: &[u32]) -> Result<()> {
        let geometry = &self.geometry;
        let runs = shared_runs(cells);

        sink.write_u32(u32::from(geometry.v_trans))?;
        sink.write_u32(count(geometry.n_layer())?)?;
        sink.write_u32(geometry.n_rot_k)?;
        sink.write_u32(geometry.n_rot_v)?;
        for (layer, tensor) in geometry.k.iter().enumerate() {
            write_rows(sink, tensor, Region::new(self.k(stream, layer), &runs)?)?;
        }
        for (layer, tensor) in geometry.v.iter().enumerate() {
            let (Some(tensor), Some(plane)) = (tensor, self.v(stream, layer)) else { continue };
            if geometry.v_trans {
                sink.write_i32(tensor.ggml_type.as_i32())?;
                sink.write_u32(tensor.ggml_type.type_size())?;
                sink.write_u32(tensor.n_embd)?;
                sink.write_tensor(Region::new(plane, &runs)?)?;
            } else {
                write_rows(sink, tensor, Region::new(plane, &runs)?)?;
            }
        }
        Ok(())
    }

    /// Streams whose pending shifts a write would save unapplied.
    pub fn pending_shifts(&self, params: WriteParams) -> Vec<usize> {
        if !self.writes(params.flags) {
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

fn count(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::arg("count", format!("{n} does not fit the format's 32 bits")))
}
