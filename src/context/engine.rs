//! What an engine needs in order to keep its cache here: cells for a ubatch, `n_kv`, the attention mask, and the
//! addresses of K and V.

use std::borrow::Cow;

use super::Context;
use crate::cells::{CellMeta, SeqSet};
use crate::error::{Error, Result};
use crate::memory::LayerParams;
use crate::storage::Plane;
use crate::types::{CellExt, Pos, PosRange, Seq, SeqId};

/// A token of a ubatch.
#[derive(Clone, Copy, Debug)]
pub struct UbatchToken<'a> {
    /// Position, at least 0.
    pub pos: Pos,
    /// Token and M-RoPE position; kept only by sections with ext.
    pub ext: CellExt,
    /// Sequences that the token belongs to: at least one, all of one stream.
    pub seq_ids: &'a [SeqId],
}

/// Cells for the tokens of a ubatch, in every section, for the cache as it was when the slot was prepared.
#[derive(Clone, Debug)]
pub struct Slot {
    context_id: u64,
    generation: u64,
    /// Ascending by stream.
    streams: Vec<StreamTokens>,
    /// By section: the cell of each token, in the order of the ubatch.
    cells: Vec<Vec<u32>>,
}

/// The tokens of a ubatch that go into one stream.
#[derive(Clone, Debug)]
struct StreamTokens {
    stream: usize,
    /// Indices into the ubatch, ascending.
    tokens: Vec<usize>,
    metas: Vec<CellMeta>,
}

impl Slot {
    /// The cell of each token in a section, in the order of the ubatch; `None` for a section that is not there.
    /// The cells of tokens in different streams are cells of those streams.
    #[must_use]
    pub fn cells(&self, section: usize) -> Option<&[u32]> {
        self.cells.get(section).map(Vec::as_slice)
    }
}

impl Context {
    /// Finds cells for a ubatch in every section. Changes nothing: commit the slot, or drop it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::SeqId`] for tokens that make no sense, [`Error::NoSlot`].
    pub fn prepare(&self, ubatch: &[UbatchToken<'_>]) -> Result<Slot> {
        let n_expected = ubatch.len().div_ceil(self.n_stream() as usize);
        let mut streams = Vec::<StreamTokens>::new();
        for (i, token) in ubatch.iter().enumerate() {
            let (stream, meta) = self.check_token(i, token)?;
            let at = streams.binary_search_by_key(&stream, |tokens| tokens.stream).unwrap_or_else(|at| {
                let (tokens, metas) = (Vec::with_capacity(n_expected), Vec::with_capacity(n_expected));
                streams.insert(at, StreamTokens { stream, tokens, metas });
                at
            });
            streams[at].tokens.push(i);
            streams[at].metas.push(meta);
        }
        let mut cells = Vec::with_capacity(self.n_section());
        for kv in self.memory.kv_caches() {
            cells.push(match &streams[..] {
                [StreamTokens { stream, tokens, .. }] => kv.find_slot(*stream, tokens.len())?,
                streams => {
                    let mut cells = vec![0; ubatch.len()];
                    for StreamTokens { stream, tokens, .. } in streams {
                        let found = kv.find_slot(*stream, tokens.len())?;
                        for (&token, cell) in tokens.iter().zip(found) {
                            cells[token] = cell;
                        }
                    }
                    cells
                }
            });
        }
        Ok(Slot { context_id: self.id, generation: self.generation(), streams, cells })
    }

    fn check_token(&self, i: usize, token: &UbatchToken<'_>) -> Result<(usize, CellMeta)> {
        let UbatchToken { pos, ext, seq_ids } = *token;
        if pos < 0 {
            return Err(Error::arg(format!("pos[{i}]"), format!("{pos}, positions start at 0")));
        }
        let mut stream = None;
        let mut seqs = SeqSet::EMPTY;
        for &seq_id in seq_ids {
            let seq = self.seq(seq_id)?;
            let own = self.memory.streams().of(seq);
            if *stream.get_or_insert(own) != own {
                let reason = format!("sequences {} and {seq_id} are in different streams", seq_ids[0]);
                return Err(Error::arg(format!("seq_id[{i}]"), reason));
            }
            seqs.insert(seq);
        }
        let stream =
            stream.ok_or_else(|| Error::arg(format!("n_seq_id[{i}]"), "0, a token belongs to at least 1"))?;
        Ok((stream, CellMeta { pos, ext, seqs }))
    }

    /// Gives the cells of `slot` to its tokens. SWA cells that are taken over leave their sequence, and with
    /// them all its older positions, so that what a sequence holds stays free of gaps.
    ///
    /// # Errors
    /// [`Error::Stale`] if the cache has changed since the slot was prepared; nothing changes then.
    pub fn commit(&mut self, slot: &Slot) -> Result<()> {
        if slot.context_id != self.id {
            return Err(Error::arg("slot", "prepared for another context"));
        }
        if slot.generation != self.generation() {
            return Err(Error::Stale { slot: slot.generation, cache: self.generation() });
        }
        for StreamTokens { stream, tokens, metas } in &slot.streams {
            for (section, cells) in slot.cells.iter().enumerate() {
                let cells: Cow<'_, [u32]> = match slot.streams.len() {
                    1 => cells.into(),
                    _ => tokens.iter().map(|&token| cells[token]).collect(),
                };
                self.apply(section, *stream, &cells, metas);
            }
        }
        Ok(())
    }

    /// Cells that attention has to look at in a stream of a section: up to the last used one, padded to a
    /// multiple of `n_pad` (llama.cpp: 256), at most `kv_size`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a section or stream that is not there.
    pub fn n_kv(&self, section: usize, stream: usize, n_pad: u32) -> Result<u32> {
        let kv = self.kv_cache(section, stream)?;
        let used = kv.cells(stream).used_max_p1().max(1);
        Ok(used.checked_next_multiple_of(n_pad.max(1)).unwrap_or(u32::MAX).min(kv.geometry.kv_size))
    }

    /// The mask row of a token against the cells of its stream: 0 where it attends, negative infinity where it
    /// does not (other sequences, later positions, outside the window, empty cells). Causal; M-RoPE patches of
    /// one position see those before them in reading order. The first sequence of the token counts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a section that is not there, for a token that makes no sense, and if `row`
    /// is longer than the stream or ends before a cell that the token attends to; [`Error::SeqId`].
    pub fn mask_row(&self, section: usize, token: &UbatchToken<'_>, row: &mut [f32]) -> Result<()> {
        let (stream, meta) = self.check_token(0, token)?;
        let kv = self.kv_cache(section, stream)?;
        let seq: Seq = self.seq(token.seq_ids[0])?;
        if row.len() > kv.geometry.kv_size as usize {
            let reason = format!("{}, the section has {} cells", row.len(), kv.geometry.kv_size);
            return Err(Error::arg("n_kv", reason));
        }
        let first = kv.geometry.swa.first_unmasked(meta.pos).max(0);
        let seen = PosRange { p0: Pos::try_from(first).unwrap_or(Pos::MAX), p1: i64::from(meta.pos) + 1 };
        let cells = kv.cells(stream);
        row.fill(f32::NEG_INFINITY);
        for &(pos, cell) in cells.seq_cells(seq, seen) {
            let later_patch = pos == meta.pos
                && cells.has_ext()
                && cells.meta(cell).is_some_and(|other| other.ext.is_2d_gt(meta.ext.x, meta.ext.y));
            if later_patch {
                continue;
            }
            let n_kv = row.len();
            *row.get_mut(cell as usize).ok_or_else(|| {
                Error::arg(
                    "n_kv",
                    format!("a row of {n_kv} ends before cell {cell}, which position {pos} holds"),
                )
            })? = 0.0;
        }
        Ok(())
    }

    /// What a cell holds, and its pending shift; `None` if it is empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range.
    pub fn cell(&self, section: usize, stream: usize, cell: u32) -> Result<Option<(CellMeta, Pos)>> {
        let kv = self.kv_cache(section, stream)?;
        if cell >= kv.geometry.kv_size {
            return Err(Error::arg("cell", format!("{cell} is out of range [0, {})", kv.geometry.kv_size)));
        }
        let cells = kv.cells(stream);
        Ok(cells.meta(cell).map(|meta| (meta, cells.shift(cell))))
    }

    /// Types and widths of a layer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range.
    pub fn layer(&self, section: usize, layer: usize) -> Result<LayerParams> {
        self.check_layer(section, layer)?;
        let geometry = &self.memory.kv_cache(section)?.geometry;
        Ok(LayerParams { k: geometry.k[layer].into(), v: geometry.v[layer].map(Into::into) })
    }

    /// K of a layer in a stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range.
    pub fn k(&self, section: usize, stream: usize, layer: usize) -> Result<&Plane> {
        self.check_layer(section, layer)?;
        Ok(self.kv_cache(section, stream)?.k(stream, layer))
    }

    /// V of a layer in a stream; `None` if the layer has none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range.
    pub fn v(&self, section: usize, stream: usize, layer: usize) -> Result<Option<&Plane>> {
        self.check_layer(section, layer)?;
        Ok(self.kv_cache(section, stream)?.v(stream, layer))
    }

    /// Copies bytes of K, or of V, of a layer (section, stream, layer) from `offset` (bytes from cell 0) on, wherever they are.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range, a layer without V, or bytes outside the plane;
    /// [`Error::Device`].
    pub fn kv_get(
        &self,
        (section, stream, layer): (usize, usize, usize),
        is_v: bool,
        offset: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let plane =
            if is_v { self.v(section, stream, layer)? } else { Some(self.k(section, stream, layer)?) };
        plane.ok_or_else(|| no_v(layer))?.get(offset, out, &self.transfer)
    }

    /// Writes bytes of K, or of V, of a layer.
    ///
    /// # Errors
    /// As [`Context::kv_get`].
    pub fn kv_set(
        &mut self,
        (section, stream, layer): (usize, usize, usize),
        is_v: bool,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        self.check_stream(stream)?;
        self.check_layer(section, layer)?;
        let kv = self.memory.kv_caches_mut().nth(section);
        let plane = kv.and_then(|kv| kv.plane_mut(stream, layer, is_v));
        plane.ok_or_else(|| no_v(layer))?.set(offset, bytes, &self.transfer)
    }

    fn check_layer(&self, section: usize, layer: usize) -> Result<()> {
        let n_layer = self.memory.kv_cache(section)?.geometry.n_layer();
        if layer < n_layer {
            return Ok(());
        }
        Err(Error::arg("layer", format!("{layer} is out of range [0, {n_layer})")))
    }
}

fn no_v(layer: usize) -> Error {
    Error::arg("which", format!("V, and layer {layer} has none"))
}
