//! A small owner of cells and tensors, as llama.cpp is one: full scans over plain vectors.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvstate::Context;
use kvstate::cells::CellMeta;
use kvstate::error::{Error, Result};
use kvstate::format::StateVersion;
use kvstate::memory::{KvParams, KvPlanes, KvView, TensorInput, TensorParams, ViewCell, ViewCells};
use kvstate::state::{Input, Sink};
use kvstate::storage::{Plane, PlaneShape, Region, TensorAccess};
use kvstate::types::{Pos, PosRange, Seq, SeqId, Token};

use crate::support::{self, place};

/// What the owner's calls return when they are told to fail.
pub const CODE: i32 = 7;

fn failure(name: &'static str) -> Error {
    Error::Callback { name, code: CODE }
}

/// Counts down, and fails from zero on.
#[derive(Debug)]
struct Fuse(AtomicUsize);

impl Fuse {
    fn new() -> Self {
        Self(AtomicUsize::new(usize::MAX))
    }

    fn burn(&self, name: &'static str) -> Result<()> {
        let left = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| failure(name))
    }
}

/// K of every layer, stream after stream, then V likewise. A tensor's name is its index and 1.
#[derive(Debug)]
pub struct Memory {
    planes: Vec<Option<Plane>>,
    gets: Fuse,
    sets: Fuse,
}

impl Memory {
    /// Calls of `get` and `set` that succeed before they fail.
    pub fn fail_after(&self, gets: usize, sets: usize) {
        self.gets.0.store(gets, Ordering::Relaxed);
        self.sets.0.store(sets, Ordering::Relaxed);
    }

    /// The plane that has `n` bytes at `offset`.
    fn plane(&self, tensor: usize, offset: u64, n: usize) -> (&Plane, usize) {
        let plane = self.planes[tensor - 1].as_ref().expect("a tensor with a name");
        let span = plane.shape().span(plane.kv_size()).expect("it is allocated");
        assert!(offset + n as u64 <= span, "{n} bytes at {offset} of {span}");
        (plane, usize::try_from(offset).expect("an offset"))
    }

    fn read(&self, tensor: usize, offset: u64, out: &mut [u8]) {
        let (plane, offset) = self.plane(tensor, offset, out.len());
        out.copy_from_slice(&place::read(plane, offset, out.len()));
    }

    fn write(&self, tensor: usize, offset: u64, bytes: &[u8]) {
        let (plane, offset) = self.plane(tensor, offset, bytes.len());
        place::write(plane, offset, bytes);
    }
}

impl TensorAccess for Memory {
    fn get(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.gets.burn("get")?;
        self.read(tensor, offset, out);
        Ok(())
    }

    fn set(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.sets.burn("set")?;
        self.write(tensor, offset, bytes);
        Ok(())
    }
}

/// A call that changes cells.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Apply { stream: usize, seq: Option<SeqId>, cells: Vec<u32> },
    Clear { seq: Option<SeqId> },
}

/// The cells of every stream, with the shift that is pending.
#[derive(Clone, Debug, Default)]
pub struct Book {
    pub cells: Vec<Vec<Option<(CellMeta, Pos)>>>,
    pub heads: Vec<u32>,
    pub calls: Vec<Call>,
    /// Told to a visitor instead of the truth.
    pub lie: Option<Vec<ViewCell>>,
    pub backwards: bool,
    /// The call with this name fails.
    pub failing: Option<&'static str>,
}

impl Book {
    fn fail(&self, name: &'static str) -> Result<()> {
        if self.failing == Some(name) { Err(failure(name)) } else { Ok(()) }
    }

    fn used(&self, stream: usize, seq: Option<Seq>) -> Vec<ViewCell> {
        let mut used = Vec::new();
        for (cell, held) in (0..).zip(&self.cells[stream]) {
            let Some((meta, shift)) = *held else { continue };
            if seq.is_none_or(|seq| meta.seqs.contains(seq)) {
                used.push(ViewCell { cell, meta, shift });
            }
        }
        used
    }

    pub fn rm(&mut self, stream: usize, seq: Option<Seq>, range: PosRange) {
        for cell in self.used(stream, seq).into_iter().filter(|cell| range.contains(cell.meta.pos)) {
            let held = &mut self.cells[stream][cell.cell as usize];
            if let (Some(seq), Some((meta, _))) = (seq, &mut *held) {
                meta.seqs.remove(seq);
                if !meta.seqs.is_empty() {
                    continue;
                }
            }
            *held = None;
            self.heads[stream] = self.heads[stream].min(cell.cell);
        }
    }

    /// Sets cells as a decode does: who loses a cell loses all its positions up to there.
    pub fn set(&mut self, stream: usize, cells: &[u32], metas: &[CellMeta]) {
        let mut purged = BTreeMap::<Seq, Pos>::new();
        for (&cell, &meta) in cells.iter().zip(metas) {
            if let Some((old, _)) = self.cells[stream][cell as usize].replace((meta, 0)) {
                for seq in old.seqs.iter() {
                    let pos = purged.entry(seq).or_insert(old.pos);
                    *pos = old.pos.max(*pos);
                }
            }
        }
        for (seq, pos) in purged {
            self.rm(stream, Some(seq), PosRange { p0: 0, p1: i64::from(pos) + 1 });
        }
        self.heads[stream] = cells.last().map_or(self.heads[stream], |last| last + 1);
    }
}

#[derive(Debug)]
struct OwnCells(Owner);

impl ViewCells for OwnCells {
    fn visit(
        &self,
        stream: usize,
        seq: Option<Seq>,
        each: &mut dyn FnMut(ViewCell) -> Result<()>,
    ) -> Result<()> {
        let book = self.0.book.borrow();
        book.fail("visit")?;
        let mut cells = book.lie.clone().unwrap_or_else(|| book.used(stream, seq));
        if book.backwards {
            cells.reverse();
        }
        cells.into_iter().try_for_each(each)
    }

    fn head(&self, stream: usize) -> u32 {
        self.0.book.borrow().heads[stream]
    }

    fn apply(&mut self, stream: usize, seq: Option<Seq>, cells: &[u32], metas: &[CellMeta]) -> Result<()> {
        let mut book = self.0.book.borrow_mut();
        book.fail("apply")?;
        book.calls.push(Call::Apply { stream, seq: seq.map(Seq::id), cells: cells.to_vec() });
        book.rm(stream, seq, PosRange::ALL);
        book.set(stream, cells, metas);
        Ok(())
    }

    fn clear(&mut self, seq: Option<Seq>) -> Result<()> {
        let mut book = self.0.book.borrow_mut();
        book.fail("clear")?;
        book.calls.push(Call::Clear { seq: seq.map(Seq::id) });
        for stream in 0..book.cells.len() {
            for cell in book.used(stream, seq) {
                if seq.is_none() || cell.meta.seqs.single() == seq {
                    self.0.zero(stream, cell.cell);
                }
            }
            book.rm(stream, seq, PosRange::ALL);
            if seq.is_none() {
                book.heads[stream] = 0;
            }
        }
        Ok(())
    }
}

/// All that there is to see: every cell and every byte, and where searches start.
#[derive(Debug, PartialEq)]
pub struct Image {
    pub cells: Vec<Vec<Option<(CellMeta, Pos)>>>,
    pub heads: Vec<u32>,
    /// By cell, stream after stream.
    pub bytes: Vec<Vec<Vec<u8>>>,
}

/// An attention cache. A clone is the same cache; [`Owner::copy`] is another one.
#[derive(Clone, Debug)]
pub struct Owner {
    pub name: &'static str,
    pub kv: KvParams,
    pub n_seq_max: u32,
    pub unified: bool,
    /// Tensors are reached through calls only.
    pub remote: bool,
    pub book: Rc<RefCell<Book>>,
    pub memory: Arc<Memory>,
}

impl Owner {
    pub fn new(name: &'static str, kv: &KvParams, n_seq_max: u32, unified: bool, remote: bool) -> Self {
        let n_stream = if unified { 1 } else { n_seq_max as usize };
        let shapes = |of: &dyn Fn(usize) -> Option<PlaneShape>| -> Vec<Option<PlaneShape>> {
            (0..n_stream).flat_map(|_| (0..kv.layers.len()).map(of)).collect()
        };
        let k = shapes(&|layer| Some(shape(kv.layers[layer].k, false, kv.kv_size)));
        let v = shapes(&|layer| kv.layers[layer].v.map(|v| shape(v, kv.v_trans, kv.kv_size)));
        let layers = (0..kv.layers.len()).cycle();
        let allocate = |(shape, layer): (Option<PlaneShape>, usize)| {
            shape.map(|shape| place::allocate(layer, shape, kv.kv_size))
        };
        let planes = k.into_iter().chain(v).zip(layers).map(allocate).collect();
        Self {
            name,
            kv: kv.clone(),
            n_seq_max,
            unified,
            remote,
            book: Rc::new(RefCell::new(Book {
                cells: vec![vec![None; kv.kv_size as usize]; n_stream],
                heads: vec![0; n_stream],
                ..Book::default()
            })),
            memory: Arc::new(Memory { planes, gets: Fuse::new(), sets: Fuse::new() }),
        }
    }

    pub fn copy(&self) -> Self {
        let copy = Self::new(self.name, &self.kv, self.n_seq_max, self.unified, self.remote);
        copy.book.replace(self.book.borrow().clone());
        for stream in 0..self.n_stream() {
            for cell in 0..self.kv.kv_size {
                copy.write(stream, cell, &self.read(stream, cell));
            }
        }
        copy
    }

    pub fn n_stream(&self) -> usize {
        if self.unified { 1 } else { self.n_seq_max as usize }
    }

    pub fn stream_of(&self, seq: SeqId) -> usize {
        if self.unified { 0 } else { usize::try_from(seq).expect("a sequence") }
    }

    pub fn seq(&self, seq: SeqId) -> Seq {
        Seq::new(seq, self.n_seq_max).expect("a sequence")
    }

    pub fn view(&self) -> KvView {
        let plane = |(i, plane): (usize, &Option<Plane>)| {
            let plane = plane.as_ref()?;
            let (kv_size, shape) = (plane.kv_size(), plane.shape());
            Some(if self.remote {
                Plane::remote(self.memory.clone(), i + 1, kv_size, shape).expect("a plane")
            } else {
                place::lent(plane).named(i + 1)
            })
        };
        let mut planes = self.memory.planes.iter().enumerate().map(plane);
        let n = self.n_stream() * self.kv.layers.len();
        let planes = KvPlanes { k: planes.by_ref().take(n).flatten().collect(), v: planes.collect() };
        let cells = Box::new(OwnCells(self.clone()));
        KvView::new(self.name, &self.kv, self.n_seq_max, self.unified, planes, cells).expect("a view")
    }

    /// The planes of a stream, in the order of a state.
    fn planes(&self, stream: usize) -> impl Iterator<Item = &Plane> {
        let n_layer = self.kv.layers.len();
        let n = self.n_stream() * n_layer;
        let layers = stream * n_layer..(stream + 1) * n_layer;
        let (k, v) = self.memory.planes.split_at(n);
        k[layers.clone()].iter().chain(&v[layers]).flatten()
    }

    /// K and V of every layer of a cell.
    pub fn read(&self, stream: usize, cell: u32) -> Vec<Vec<u8>> {
        self.planes(stream).map(|plane| support::read_cell(plane, cell)).collect()
    }

    pub fn write(&self, stream: usize, cell: u32, bytes: &[Vec<u8>]) {
        self.planes(stream).zip(bytes).for_each(|(plane, bytes)| support::write_cell(plane, cell, bytes));
    }

    fn zero(&self, stream: usize, cell: u32) {
        let zeroes: Vec<Vec<u8>> = self.read(stream, cell).iter().map(|bytes| vec![0; bytes.len()]).collect();
        self.write(stream, cell, &zeroes);
    }

    /// Takes over every byte of a managed section.
    pub fn take_bytes(&self, ctx: &Context, section: usize) {
        for stream in 0..self.n_stream() {
            for cell in 0..self.kv.kv_size {
                let bytes: Vec<Vec<u8>> = support::planes(ctx, section, stream)
                    .into_iter()
                    .map(|plane| support::read_cell(plane, cell))
                    .collect();
                self.write(stream, cell, &bytes);
            }
        }
    }

    pub fn image(&self) -> Image {
        let book = self.book.borrow();
        let bytes = (0..self.n_stream())
            .flat_map(|stream| (0..self.kv.kv_size).map(move |cell| self.read(stream, cell)))
            .collect();
        Image { cells: book.cells.clone(), heads: book.heads.clone(), bytes }
    }

    /// The cells of a sequence, ascending.
    pub fn cells_of(&self, seq: SeqId) -> Vec<u32> {
        let book = self.book.borrow();
        book.used(self.stream_of(seq), Some(self.seq(seq))).iter().map(|cell| cell.cell).collect()
    }

    /// The positions of a sequence, in the order of its cells.
    pub fn positions(&self, seq: SeqId) -> Vec<Pos> {
        let book = self.book.borrow();
        book.used(self.stream_of(seq), Some(self.seq(seq))).iter().map(|cell| cell.meta.pos).collect()
    }

    /// K and V of a sequence's cells, ascending.
    pub fn bytes_of(&self, seq: SeqId) -> Vec<Vec<Vec<u8>>> {
        let stream = self.stream_of(seq);
        self.cells_of(seq).into_iter().map(|cell| self.read(stream, cell)).collect()
    }

    pub fn calls(&self) -> Vec<Call> {
        self.book.borrow().calls.clone()
    }
}

/// With gaps between cells, and between channels.
fn shape(tensor: TensorParams, transposed: bool, kv_size: u32) -> PlaneShape {
    let TensorParams { ggml_type, n_embd } = tensor;
    if transposed {
        let elem_size = ggml_type.type_size();
        let cell_stride = u64::from(elem_size) + 1;
        let channel_stride = u64::from(kv_size) * cell_stride + 3;
        return PlaneShape::Channels { n_channel: n_embd, elem_size, cell_stride, channel_stride };
    }
    let row_size = ggml_type.row_size(n_embd).expect("whole blocks");
    PlaneShape::Rows { row_size, cell_stride: row_size + 5 }
}

/// `llama_io_write_i`: takes a section's bytes in turns, tensors by name.
pub struct Tape<'o> {
    pub owner: &'o Owner,
    pub bytes: Vec<u8>,
}

impl<'a> Sink<'a> for Tape<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        region.each_piece(|offset, n| {
            let start = self.bytes.len();
            self.bytes.resize(start + n, 0);
            self.owner.memory.read(region.tensor(), offset, &mut self.bytes[start..]);
            Ok(())
        })
    }
}

/// `llama_io_read_i`: gives a state's bytes in turns, and fails when its calls are used up.
pub struct Turns<'b> {
    pub bytes: &'b [u8],
    pub offset: usize,
    pub calls_left: usize,
    pub memory: Arc<Memory>,
}

impl<'b> Turns<'b> {
    /// From behind the header of a sequence's state on.
    pub fn new(blob: &'b [u8], owner: &Owner) -> Self {
        Self { bytes: blob, offset: 8, calls_left: usize::MAX, memory: Arc::clone(&owner.memory) }
    }

    fn next(&mut self, name: &'static str, n: usize) -> Result<&'b [u8]> {
        self.calls_left = self.calls_left.checked_sub(1).ok_or(failure(name))?;
        let rest = &self.bytes[self.offset..];
        let bytes = rest.get(..n).ok_or_else(|| failure(name))?;
        self.offset += n;
        Ok(bytes)
    }
}

impl Input for Turns<'_> {
    fn read(&mut self, _: &'static str, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.next("read", out.len())?);
        Ok(())
    }

    fn left(&self) -> Option<u64> {
        None
    }

    fn offset(&self) -> u64 {
        self.offset as u64
    }

    fn version(&self) -> StateVersion {
        StateVersion::CURRENT
    }

    fn tokens(&self) -> &[Token] {
        &[]
    }
}

impl TensorInput for Turns<'_> {
    fn read_tensor(&mut self, tensor: usize, offset: u64, bytes: usize) -> Result<()> {
        let bytes = self.next("read_tensor", bytes)?;
        self.memory.write(tensor, offset, bytes);
        Ok(())
    }
}
