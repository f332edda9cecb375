//! The state of a DSV4 memory: a header before the raw pair, and the compressed half behind it.

use std::fmt::Display;
use std::sync::Arc;

use super::geometry::{Dsv4Compressor, Dsv4Geometry, LayerTensor};
use super::{Dsv4Cache, Dsv4Tensor};
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::ReadParams;
use crate::memory::convert::{self, Convert};
use crate::memory::kv_write::{Scope, WriteParams, count};
use crate::state::{Input, Sink, Source};
use crate::storage::{CellMap, Conversion, Plane, Region, Scatter, StateTensor, TensorLayout};
use crate::types::{Pos, Seq, StateFlags};

const MAGIC: u32 = 0x3456_5344; // "DSV4"
const VERSION: u32 = 1;
const MODE_FULL: u32 = 0;
const MODE_PARTIAL: u32 = 1;
const K_CACHE_VERSION: u32 = 2;
/// The older one always has all rows.
const K_CACHE_VERSION_ALL_ROWS: u32 = 1;
const STATE_VERSION: u32 = 1;

/// What a commit will do to the section.
#[derive(Debug)]
pub(crate) struct Dsv4Plan<'a> {
    /// The streams that are restored.
    streams: Vec<usize>,
    /// Whether K is restored, and all else of the streams zeroed.
    full: bool,
    /// As the geometry's tensors; in a partial state without K.
    tensors: Vec<Option<TensorPlan<'a>>>,
    /// As the geometry's tensors: all rows of a plane.
    all_rows: Vec<CellMap>,
}

#[derive(Debug)]
struct TensorPlan<'a> {
    /// Of rows, as many as the state has.
    rows: CellMap,
    /// Those behind them.
    rest: CellMap,
    /// By stream.
    srcs: Vec<StateTensor<'a>>,
}

fn mode(flags: StateFlags) -> u32 {
    if flags.contains(StateFlags::PARTIAL_ONLY) { MODE_PARTIAL } else { MODE_FULL }
}

/// Rows of K that positions up to `pos_max` have filled.
fn n_filled(pos_max: Option<Pos>, ratio: u32, kv_size: u32) -> u32 {
    let n_pos = pos_max.map_or(0, |pos| u64::from(pos.unsigned_abs()) + 1);
    u32::try_from(n_pos / u64::from(ratio)).unwrap_or(u32::MAX).min(kv_size)
}

/// A map of no rows is a map.
fn run(start: u32, end: u32) -> Result<CellMap> {
    if start < end { CellMap::of_run(start, end - start) } else { CellMap::new(Vec::new()) }
}

impl Dsv4Cache {
    /// What comes before the raw pair.
    pub fn write_header<'a>(sink: &mut impl Sink<'a>, flags: StateFlags) -> Result<()> {
        [MAGIC, VERSION, mode(flags)].into_iter().try_for_each(|word| sink.write_u32(word))
    }

    /// Checks what comes before the raw pair.
    pub fn read_header(source: &mut Source<'_>, flags: StateFlags) -> Result<()> {
        let magic = source.u32("DSV4 magic")?;
        if magic != MAGIC {
            return Err(Error::corrupt(
                "DSV4 magic",
                format_args!("{magic:08x}"),
                format_args!("{MAGIC:08x}"),
            ));
        }
        check(source, "DSV4 version", VERSION)?;
        check(source, "DSV4 mode", mode(flags))
    }

    /// Writes the section; of a sequence, as it was at the end of the range. `pos_max` is the last position of the sequence in
    /// the raw cache.
    pub fn state_write<'a>(
        &'a self,
        sink: &mut impl Sink<'a>,
        params: WriteParams,
        pos_max: Option<Pos>,
    ) -> Result<()> {
        let WriteParams { scope, flags, range, .. } = params;
        let end = pos_max.map(|pos| range.last_up_to(pos).unwrap_or(pos));
        let cut = pos_max.zip(end).map_or(0, |(pos, end)| pos.abs_diff(end));
        let pos_max = end;
        let streams = self.geometry.streams(scope);
        let n_stream = count(streams.len())?;
        for compressor in Dsv4Compressor::ALL.into_iter().filter(|_| mode(flags) == MODE_FULL) {
            let of = self.geometry.compressor(compressor);
            let n_rows = match scope {
                Scope::Seq(_) => n_filled(pos_max, of.ratio, of.kv_size),
                Scope::Whole => of.kv_size,
            };
            let head = [K_CACHE_VERSION, n_rows, n_stream, count(of.layers.len())?];
            head.into_iter().try_for_each(|word| sink.write_u32(word))?;
            for (i, tensor) in self.geometry.tensors_of(compressor, false) {
                sink.write_u32(tensor.il)?;
                let planes = streams.iter().map(|&stream| &self.planes[i][stream]);
                write_tensor(sink, tensor, n_rows, planes)?;
            }
        }
        for compressor in Dsv4Compressor::ALL {
            let of = self.geometry.compressor(compressor);
            let size = [of.ratio, of.state_size, of.n_embd_state];
            let words = [STATE_VERSION].into_iter().chain(size).chain([n_stream, count(of.layers.len())?]);
            words.into_iter().try_for_each(|word| sink.write_u32(word))?;
            for (i, tensor) in self.geometry.tensors_of(compressor, true) {
                if tensor.which == Dsv4Tensor::Kv {
                    sink.write_u32(tensor.il)?;
                }
                let all = self.geometry.n_stream as usize;
                let of_stream =
                    |&stream: &usize| &self.planes[i][(self.rollback[stream] + cut) as usize * all + stream];
                write_tensor(sink, tensor, tensor.n_rows, streams.iter().map(of_stream))?;
            }
        }
        Ok(())
    }

    /// Whether the state takes rows that hold something.
    pub fn state_overwrites(&self, plan: &Dsv4Plan<'_>) -> bool {
        self.held.iter().any(|seq| plan.streams.contains(&seq.index()))
    }

    pub fn state_apply(&mut self, plan: &Dsv4Plan<'_>) {
        for seq in plan.seqs(self.geometry.n_stream) {
            (self.rollback[seq.index()], self.n_older[seq.index()]) = (0, Some(0));
            self.held.insert(seq);
        }
    }

    /// Empties the destination. Its rows are still to be zeroed.
    pub fn state_forget(&mut self, plan: &Dsv4Plan<'_>) {
        plan.seqs(self.geometry.n_stream).for_each(|seq| self.rollback[seq.index()] = 0);
    }

    /// What is converted, in words.
    pub fn state_notes(&self, plan: &Dsv4Plan<'_>) -> Vec<String> {
        let tensors = self.geometry.tensors.iter().zip(&plan.tensors).filter_map(|(tensor, plan)| {
            let name = match tensor.which {
                Dsv4Tensor::K => "compressed K",
                Dsv4Tensor::Kv | Dsv4Tensor::Score => "compressor state",
            };
            Some((name, plan.as_ref()?.srcs.first()?.conversion))
        });
        convert::notes(&self.geometry.name, tensors)
    }

    /// The tensors' part of the commit.
    pub fn state_scatter<'p>(&'p mut self, plan: &'p Dsv4Plan<'_>) -> Vec<Scatter<'p>> {
        let mut batch = Vec::new();
        for (planes, tensor) in self.planes.iter_mut().zip(&plan.tensors) {
            let Some(TensorPlan { rows, srcs, .. }) = tensor else { continue };
            let wanted = planes.iter_mut().enumerate().filter(|(i, _)| plan.streams.contains(i));
            let parts = wanted.map(|(_, plane)| plane).zip(srcs).filter(|_| rows.n_cells() > 0);
            batch.extend(parts.map(|(plane, &src)| Scatter { plane, map: rows, n_src: rows.n_cells(), src }));
        }
        batch
    }

    /// What the state does not have of the rows of its streams: K behind the last row, and rollback planes.
    pub fn state_rest<'p>(&'p mut self, plan: &'p Dsv4Plan<'_>) -> Vec<(&'p mut Plane, &'p CellMap)> {
        let n_stream = self.geometry.n_stream as usize;
        let mut rest = Vec::new();
        for ((planes, tensor), all) in self.planes.iter_mut().zip(&plan.tensors).zip(&plan.all_rows) {
            let Some(tensor) = tensor.as_ref().filter(|_| plan.full) else { continue };
            let wanted =
                planes.iter_mut().enumerate().filter(|(i, _)| plan.streams.contains(&(i % n_stream)));
            rest.extend(wanted.map(|(i, plane)| (plane, if i < n_stream { &tensor.rest } else { all })));
        }
        rest.retain(|(_, map)| map.n_cells() > 0);
        rest
    }

    /// All rows of the streams.
    pub fn state_cells<'p>(&'p mut self, plan: &'p Dsv4Plan<'_>) -> Vec<(&'p mut Plane, &'p CellMap)> {
        let n_stream = self.geometry.n_stream as usize;
        let of_tensor = |(planes, all): (&'p mut Vec<Plane>, &'p CellMap)| {
            let wanted =
                planes.iter_mut().enumerate().filter(|(i, _)| plan.streams.contains(&(i % n_stream)));
            wanted.map(move |(_, plane)| (plane, all)).collect::<Vec<_>>()
        };
        self.planes.iter_mut().zip(&plan.all_rows).flat_map(of_tensor).collect()
    }
}

impl Dsv4Plan<'_> {
    /// Brings no rows: of the positions that they are of none is wanted.
    pub fn leave_out(&mut self) -> Result<()> {
        for (tensor, all) in self.tensors.iter_mut().zip(&self.all_rows) {
            if let Some(tensor) = tensor {
                (tensor.rows, tensor.rest) = (run(0, 0)?, run(0, all.n_cells())?);
            }
        }
        Ok(())
    }

    fn seqs(&self, n_stream: u32) -> impl Iterator<Item = Seq> {
        self.streams.iter().filter_map(move |&stream| Seq::new(i32::try_from(stream).ok()?, n_stream))
    }
}

impl Dsv4Geometry {
    fn streams(&self, scope: Scope) -> Vec<usize> {
        match scope {
            Scope::Seq(seq) => vec![seq.index()],
            Scope::Whole => (0..self.n_stream as usize).collect(),
        }
    }

    /// Reads the section's bytes, checks them, and says where they go: rows have their places.
    pub fn state_plan<'a>(
        &self,
        source: &mut Source<'a>,
        params: ReadParams,
        flags: StateFlags,
    ) -> Result<Dsv4Plan<'a>> {
        let ReadParams { scope, convert, .. } = params;
        let streams = self.streams(scope);
        let full = mode(flags) == MODE_FULL;
        let mut tensors: Vec<Option<TensorPlan<'a>>> = self.tensors.iter().map(|_| None).collect();
        for compressor in Dsv4Compressor::ALL.into_iter().filter(|_| full) {
            let of = self.compressor(compressor);
            let version = source.u32("DSV4 K cache version")?;
            if !(K_CACHE_VERSION_ALL_ROWS..=K_CACHE_VERSION).contains(&version) {
                return Err(Error::corrupt("DSV4 K cache version", version, "1 or 2"));
            }
            let n_rows = source.u32("n_rows")?;
            if n_rows > of.kv_size || (version == K_CACHE_VERSION_ALL_ROWS && n_rows != of.kv_size) {
                return Err(self.mismatch(
                    "mismatched rows of compressed K",
                    n_rows,
                    of.kv_size,
                    compressor.name(),
                ));
            }
            self.read_counts(source, &streams, compressor)?;
            for (i, tensor) in self.tensors_of(compressor, false) {
                self.read_il(source, tensor)?;
                tensors[i] = Some(self.read_tensor(source, tensor, (n_rows, streams.len()), convert)?);
            }
        }
        for compressor in Dsv4Compressor::ALL {
            let of = self.compressor(compressor);
            check(source, "DSV4 state version", STATE_VERSION)?;
            for (what, want) in [
                ("mismatched ratio", of.ratio),
                ("mismatched state size", of.state_size),
                ("mismatched state width", of.n_embd_state),
            ] {
                let got = source.u32(what)?;
                if got != want {
                    return Err(self.mismatch(what, got, want, compressor.name()));
                }
            }
            self.read_counts(source, &streams, compressor)?;
            for (i, tensor) in self.tensors_of(compressor, true) {
                if tensor.which == Dsv4Tensor::Kv {
                    self.read_il(source, tensor)?;
                }
                tensors[i] =
                    Some(self.read_tensor(source, tensor, (tensor.n_rows, streams.len()), convert)?);
            }
        }
        let all_rows = self.tensors.iter().map(|tensor| run(0, tensor.n_rows)).collect::<Result<_>>()?;
        Ok(Dsv4Plan { streams, full, tensors, all_rows })
    }

    fn read_counts(&self, source: &mut Source<'_>, streams: &[usize], of: Dsv4Compressor) -> Result<()> {
        let n_stream = source.u32("n_stream")?;
        if n_stream as usize != streams.len() {
            return Err(self.mismatch("n_stream mismatch", n_stream, streams.len(), of.name()));
        }
        let n_layer = source.u32("n_layer")?;
        let want = self.compressor(of).layers.len();
        if n_layer as usize != want {
            return Err(self.mismatch("mismatched layer count", n_layer, want, of.name()));
        }
        Ok(())
    }

    fn read_il(&self, source: &mut Source<'_>, tensor: &LayerTensor) -> Result<()> {
        let il = source.u32("layer")?;
        if il == tensor.il {
            return Ok(());
        }
        Err(self.mismatch("mismatched layer", il, tensor.il, tensor.compressor.name()))
    }

    fn read_tensor<'a>(
        &self,
        source: &mut Source<'a>,
        tensor: &LayerTensor,
        (n_rows, n_stream): (u32, usize),
        convert: Convert,
    ) -> Result<TensorPlan<'a>> {
        let place = || tensor.place(&self.name);
        let mismatch =
            |what, state: String, cache: String| Error::Mismatch { what, state, cache, place: place() };
        let number = source.i32("ggml type")?;
        let (state, own) = (GgmlType::from_i32(number), tensor.geometry.ggml_type);
        // llama.cpp rotates quantised rows, and their state does not say so.
        let takes = |convert: Convert| {
            let as_rotated = |state: &GgmlType| state.is_quantized() == own.is_quantized();
            state.filter(|&state| convert.takes_type(state, own)).filter(as_rotated)
        };
        let ggml_type = takes(convert).ok_or_else(|| {
            let state = state.map_or(number.to_string(), |state| state.to_string());
            let refused = mismatch("mismatched type", state, own.to_string());
            convert.refusal(refused, |convert| takes(convert).is_some())
        })?;
        let n_embd = tensor.geometry.n_embd;
        let row_size = ggml_type.row_size(n_embd).unwrap_or(tensor.geometry.row_size);
        for (what, want) in [
            ("mismatched width", u64::from(n_embd)),
            ("mismatched rows", u64::from(n_rows)),
            ("mismatched row size", row_size),
        ] {
            let got = source.u64(what)?;
            if got != want {
                return Err(mismatch(what, got.to_string(), want.to_string()));
            }
        }
        // No overflow: rows of 32-bit widths.
        let bytes = row_size.saturating_mul(n_rows.into());
        let [from, to] = [ggml_type, own].map(TensorLayout::rows);
        let conversion = Conversion::new(from, to, n_embd);
        let src = |_| Ok(StateTensor { bytes: source.tensor("DSV4 rows", bytes)?, conversion });
        let srcs = (0..n_stream).map(src).collect::<Result<_>>()?;
        Ok(TensorPlan { rows: run(0, n_rows)?, rest: run(n_rows, tensor.n_rows)?, srcs })
    }

    fn mismatch(&self, what: &'static str, state: impl Display, cache: impl Display, of: &str) -> Error {
        let place = format!("section {}, {of}", self.name);
        Error::Mismatch { what, state: state.to_string(), cache: cache.to_string(), place }
    }
}

fn check(source: &mut Source<'_>, field: &'static str, want: u32) -> Result<()> {
    let got = source.u32(field)?;
    if got == want { Ok(()) } else { Err(Error::corrupt(field, got, want)) }
}

fn write_tensor<'a>(
    sink: &mut impl Sink<'a>,
    tensor: &LayerTensor,
    n_rows: u32,
    planes: impl Iterator<Item = &'a Plane>,
) -> Result<()> {
    sink.write_i32(tensor.geometry.ggml_type.as_i32())?;
    sink.write_u64(tensor.geometry.n_embd.into())?;
    sink.write_u64(n_rows.into())?;
    sink.write_u64(tensor.geometry.row_size)?;
    if n_rows == 0 {
        return Ok(());
    }
    let map = Arc::new(run(0, n_rows)?);
    planes.into_iter().try_for_each(|plane| sink.write_tensor(Region::new(plane, &map)?))
}
