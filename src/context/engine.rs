//! What an engine needs in order to keep its cache here: `n_kv`, the attention mask, where states are, and the addresses of
//! planes.

use super::{Context, UbatchToken};
use crate::cells::CellMeta;
use crate::error::{Error, Result};
use crate::memory::{
    Dsv4Compressor, Dsv4Tensor, LayerParams, RecurrentCache, RecurrentState, RecurrentTensor, TensorParams,
};
use crate::storage::Plane;
use crate::types::{Pos, PosRange, Seq, SeqId};

impl Context {
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
        let plane = self.memory.kv_cache_mut(section)?.plane_mut(stream, layer, is_v);
        plane.ok_or_else(|| no_v(layer))?.set(offset, bytes, &self.transfer)
    }

    /// R, S or P of a layer of a recurrent section; `None` if the layer has none, or one without elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range.
    pub fn recurrent_plane(
        &self,
        section: usize,
        layer: usize,
        tensor: RecurrentTensor,
    ) -> Result<Option<&Plane>> {
        Ok(self.checked_recurrent(section, layer)?.plane(layer, tensor))
    }

    /// A recurrent section that has the layer.
    fn checked_recurrent(&self, section: usize, layer: usize) -> Result<&RecurrentCache> {
        let recurrent = self.memory.recurrent_cache(section)?;
        let n_layer = recurrent.geometry.n_layer;
        if layer < n_layer as usize {
            return Ok(recurrent);
        }
        Err(Error::arg("layer", format!("{layer} is out of range [0, {n_layer})")))
    }

    /// Type and width of R, S or P of a layer of a recurrent section; `None` if the layer has none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range.
    pub fn recurrent_tensor(
        &self,
        section: usize,
        layer: usize,
        tensor: RecurrentTensor,
    ) -> Result<Option<TensorParams>> {
        Ok(self.checked_recurrent(section, layer)?.geometry.tensor(layer, tensor))
    }

    /// Copies bytes of R, S or P of a layer (section, layer) from `offset` (bytes from row 0) on, wherever they are.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an index that is out of range, a tensor that the layer does not have, or bytes outside the
    /// plane; [`Error::Device`].
    pub fn recurrent_get(
        &self,
        (section, layer): (usize, usize),
        tensor: RecurrentTensor,
        offset: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let plane = self.recurrent_plane(section, layer, tensor)?;
        plane.ok_or_else(|| no_bytes(layer, tensor))?.get(offset, out, &self.transfer)
    }

    /// Writes bytes of R, S or P of a layer.
    ///
    /// # Errors
    /// As [`Context::recurrent_get`].
    pub fn recurrent_set(
        &mut self,
        (section, layer): (usize, usize),
        tensor: RecurrentTensor,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        self.checked_recurrent(section, layer)?;
        let plane = self.memory.recurrent_cache_mut(section)?.plane_mut(layer, tensor);
        plane.ok_or_else(|| no_bytes(layer, tensor))?.set(offset, bytes, &self.transfer)
    }

    /// Where the state of a sequence is in a recurrent section; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a section that is not there, or not recurrent; [`Error::SeqId`].
    pub fn recurrent_state(&self, section: usize, seq_id: SeqId) -> Result<Option<RecurrentState>> {
        Ok(self.memory.recurrent_cache(section)?.state(self.seq(seq_id)?))
    }

    /// A plane of a layer (its number in the model) of the compressed half of a DSV4 memory, in a stream and, for states, a rollback
    /// plane; `None` if there is none.
    #[must_use]
    pub fn dsv4_plane(
        &self,
        (compressor, tensor): (Dsv4Compressor, Dsv4Tensor),
        il: u32,
        stream: usize,
        rollback: u32,
    ) -> Option<&Plane> {
        self.memory.dsv4()?.plane((compressor, tensor), il, stream, rollback)
    }

    /// Type and width of a tensor of a layer (its number in the model) of the compressed half of a DSV4 memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a memory without DSV4, and for a layer that does not have the tensor.
    pub fn dsv4_tensor(
        &self,
        (compressor, tensor): (Dsv4Compressor, Dsv4Tensor),
        il: u32,
    ) -> Result<TensorParams> {
        let none = || Error::arg("ctx", "a context without a DSV4 section");
        self.memory.dsv4().ok_or_else(none)?.geometry.tensor((compressor, tensor), il)
    }

    pub(crate) fn checked_dsv4_plane(
        &self,
        (compressor, tensor): (Dsv4Compressor, Dsv4Tensor),
        (il, stream, rollback): (u32, usize, u32),
    ) -> Result<&Plane> {
        self.dsv4_tensor((compressor, tensor), il)?;
        self.check_stream(stream)?;
        let plane = self.dsv4_plane((compressor, tensor), il, stream, rollback);
        plane.ok_or_else(|| no_rollback(tensor, rollback))
    }

    /// Copies bytes of a plane (layer, stream, rollback plane) of the compressed half of a DSV4 memory from `offset` (bytes from
    /// row 0) on, wherever they are.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a memory without DSV4, for a plane that is not there, or bytes outside of it;
    /// [`Error::Device`].
    pub fn dsv4_get(
        &self,
        (compressor, tensor): (Dsv4Compressor, Dsv4Tensor),
        place: (u32, usize, u32),
        offset: u64,
        out: &mut [u8],
    ) -> Result<()> {
        self.checked_dsv4_plane((compressor, tensor), place)?.get(offset, out, &self.transfer)
    }

    /// Writes bytes of a plane of the compressed half of a DSV4 memory.
    ///
    /// # Errors
    /// As [`Context::dsv4_get`].
    pub fn dsv4_set(
        &mut self,
        (compressor, tensor): (Dsv4Compressor, Dsv4Tensor),
        (il, stream, rollback): (u32, usize, u32),
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        self.checked_dsv4_plane((compressor, tensor), (il, stream, rollback))?;
        // A stream is its sequence's: DSV4 has one for each.
        let seq = self.seq(SeqId::try_from(stream).unwrap_or(SeqId::MAX))?;
        let dsv4 = self.memory.dsv4_mut();
        let plane = dsv4.and_then(|dsv4| dsv4.plane_mut((compressor, tensor), il, seq, rollback));
        plane.ok_or_else(|| no_rollback(tensor, rollback))?.set(offset, bytes, &self.transfer)
    }

    /// The rollback plane that the states of a sequence are in, until the next ubatch: an engine asks before it commits the slot.
    /// 0 in a memory without DSV4.
    ///
    /// # Errors
    /// [`Error::SeqId`].
    pub fn dsv4_rollback(&self, seq_id: SeqId) -> Result<u32> {
        let seq = self.seq(seq_id)?;
        Ok(self.memory.dsv4().map_or(0, |dsv4| dsv4.rollback(seq)))
    }

    fn check_layer(&self, section: usize, layer: usize) -> Result<()> {
        let n_layer = self.memory.kv_cache(section)?.geometry.n_layer();
        if layer < n_layer {
            return Ok(());
        }
        Err(Error::arg("layer", format!("{layer} is out of range [0, {n_layer})")))
    }
}

fn no_bytes(layer: usize, tensor: RecurrentTensor) -> Error {
    Error::arg("which", format!("{tensor:?}, of which layer {layer} has no elements"))
}

fn no_rollback(tensor: Dsv4Tensor, rollback: u32) -> Error {
    Error::arg("rollback", format!("{rollback}, of {tensor:?} there is no such plane"))
}

fn no_v(layer: usize) -> Error {
    Error::arg("which", format!("V, and layer {layer} has none"))
}
