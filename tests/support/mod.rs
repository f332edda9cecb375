//! Caches whose every byte is known, and a second reading of the formats.
//!
//! A token's K and V follow from what it is: sequence, position, ext, section, layer. So what a cell holds after
//! a restore can be told right from wrong without trusting the code that moved it.
#![allow(unsafe_code, reason = "planes are written the way engines write them: through raw pointers")]
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::collections::BTreeMap;

use kvstate::cells::CellMeta;
use kvstate::context::{Shift, UbatchToken};
use kvstate::error::{Error, Result};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, TensorParams};
use kvstate::storage::{Plane, PlaneShape};
use kvstate::types::{CellExt, Pos, SeqId, StateFlags, Swa, SwaType};
use kvstate::{Context, ContextParams};

#[path = "../place/mod.rs"]
pub mod place;

pub const NONE: StateFlags = StateFlags::empty();
pub const PARTIAL: StateFlags = StateFlags::PARTIAL_ONLY;
pub const ON_DEVICE: StateFlags = StateFlags::ON_DEVICE;

// Geometries

pub fn tensor(ggml_type: GgmlType, n_embd: u32) -> TensorParams {
    TensorParams { ggml_type, n_embd }
}

/// Two f16 layers, K rows of 8 bytes, V rows of 4.
pub fn kv(kv_size: u32) -> KvParams {
    let layer = LayerParams { k: tensor(GgmlType::F16, 4), v: Some(tensor(GgmlType::F16, 2)) };
    KvParams::new(kv_size, 2, layer)
}

pub fn windowed(kv_size: u32, swa_type: SwaType, n_swa: u32) -> KvParams {
    KvParams { swa: Swa::new(swa_type, n_swa).expect("a window"), ..kv(kv_size) }
}

pub fn standard(kv_size: u32, n_swa: u32) -> KvParams {
    windowed(kv_size, SwaType::Standard, n_swa)
}

pub fn iswa(base: u32, swa: u32, n_swa: u32) -> Vec<KvParams> {
    vec![kv(base), standard(swa, n_swa)]
}

pub fn params(n_seq_max: u32, sections: &[KvParams]) -> ContextParams {
    ContextParams::new(n_seq_max, sections.iter().cloned().map(Into::into).collect())
}

pub fn context(n_seq_max: u32, sections: &[KvParams]) -> Context {
    place::context(params(n_seq_max, sections)).expect("a context")
}

/// One stream per sequence.
pub fn streams(n_seq_max: u32, sections: &[KvParams]) -> Context {
    place::context(ContextParams { unified: false, ..params(n_seq_max, sections) }).expect("a context")
}

pub fn shifting(n_seq_max: u32, sections: &[KvParams], shift: Shift) -> Context {
    place::context(ContextParams { shift, ..params(n_seq_max, sections) }).expect("a context")
}

// Planes

/// Bytes that follow from `seed` alone.
pub fn noise(seed: &[i64], n: usize) -> Vec<u8> {
    let mix = |h: u64| {
        let h = (h ^ (h >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let h = (h ^ (h >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        h ^ (h >> 31)
    };
    let start =
        seed.iter().fold(1, |h: u64, &word| mix(h.wrapping_add(word.cast_unsigned()).wrapping_mul(3)));
    (0..n as u64).map(|i| mix(start.wrapping_add(i + 1)).to_le_bytes()[3]).collect()
}

/// Offset and length of each piece of a cell.
fn pieces(plane: &Plane, cell: u32) -> Vec<(usize, usize)> {
    let at = |n: u64| usize::try_from(n).expect("an offset");
    match plane.shape() {
        PlaneShape::Rows { row_size, cell_stride } => vec![(at(u64::from(cell) * cell_stride), at(row_size))],
        PlaneShape::Channels { n_channel, elem_size, cell_stride, channel_stride } => {
            (0..u64::from(n_channel))
                .map(|channel| {
                    (at(channel * channel_stride + u64::from(cell) * cell_stride), elem_size as usize)
                })
                .collect()
        }
    }
}

pub fn write_cell(plane: &Plane, cell: u32, bytes: &[u8]) {
    let mut rest = bytes;
    for (offset, len) in pieces(plane, cell) {
        let (piece, tail) = rest.split_at(len);
        rest = tail;
        place::write(plane, offset, piece);
    }
    assert!(rest.is_empty());
}

pub fn read_cell(plane: &Plane, cell: u32) -> Vec<u8> {
    let pieces = pieces(plane, cell);
    let start = pieces[0].0;
    let end = pieces.last().map_or(start, |&(offset, len)| offset + len);
    let bytes = place::read(plane, start, end - start);
    pieces.into_iter().flat_map(|(offset, len)| &bytes[offset - start..][..len]).copied().collect()
}

/// A cell of a plane whose bytes are `all`.
fn cell_of(all: &[u8], plane: &Plane, cell: u32) -> Vec<u8> {
    pieces(plane, cell).into_iter().flat_map(|(offset, len)| &all[offset..][..len]).copied().collect()
}

/// What a stand-in for a rotation does.
pub fn add_to_byte(byte: *mut u8, n: u8) {
    // SAFETY: tests pass bytes of a plane, while nobody else uses the plane.
    unsafe { *byte = (*byte).wrapping_add(n) };
}

fn cell_len(plane: &Plane) -> usize {
    pieces(plane, 0).iter().map(|&(_, len)| len).sum()
}

/// K and V of every layer of a stream, in the order of a state.
pub fn planes(ctx: &Context, section: usize, stream: usize) -> Vec<&Plane> {
    let n_layer = (0..1000).take_while(|&layer| ctx.layer(section, layer).is_ok()).count();
    let k = (0..n_layer).map(|layer| ctx.k(section, stream, layer).expect("K"));
    k.chain((0..n_layer).filter_map(|layer| ctx.v(section, stream, layer).expect("V"))).collect()
}

pub fn kv_size(ctx: &Context, section: usize) -> u32 {
    ctx.n_kv(section, 0, u32::MAX).expect("kv_size")
}

pub fn stream_of(ctx: &Context, seq: SeqId) -> usize {
    if ctx.n_stream() == 1 { 0 } else { usize::try_from(seq).expect("a sequence") }
}

// Decoding

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tok {
    pub pos: Pos,
    pub ext: CellExt,
    pub seqs: Vec<SeqId>,
}

impl Tok {
    pub fn new(seq: SeqId, pos: Pos) -> Self {
        Self { pos, ext: CellExt { x: 0, y: 0, tok: pos.wrapping_add(1000 * (seq + 1)) }, seqs: vec![seq] }
    }
}

/// What a plane holds of a token.
pub fn token_bytes(tok: &Tok, section: usize, plane: usize, len: usize) -> Vec<u8> {
    let CellExt { x, y, .. } = tok.ext;
    let id = [i64::from(tok.seqs[0]), tok.pos.into(), x.into(), y.into()];
    noise(&[&id[..], &[section.try_into().expect("few"), plane.try_into().expect("few")]].concat(), len)
}

/// Decodes a ubatch: cells, then K and V. Returns the cells of each section.
pub fn try_decode(ctx: &mut Context, toks: &[Tok]) -> Result<Vec<Vec<u32>>> {
    let ubatch: Vec<_> =
        toks.iter().map(|t| UbatchToken { pos: t.pos, ext: t.ext, seq_ids: &t.seqs }).collect();
    let slot = ctx.prepare(&ubatch)?;
    ctx.commit(&slot)?;
    let cells: Vec<Vec<u32>> =
        (0..ctx.n_section()).map(|section| slot.cells(section).expect("a section").to_vec()).collect();
    for (section, cells) in cells.iter().enumerate() {
        for (tok, &cell) in toks.iter().zip(cells) {
            for (i, plane) in planes(ctx, section, stream_of(ctx, tok.seqs[0])).into_iter().enumerate() {
                write_cell(plane, cell, &token_bytes(tok, section, i, cell_len(plane)));
            }
        }
    }
    Ok(cells)
}

/// Decodes `positions` of `seq` as one ubatch.
pub fn decode(ctx: &mut Context, seq: SeqId, positions: impl IntoIterator<Item = Pos>) -> Vec<Vec<u32>> {
    let toks: Vec<Tok> = positions.into_iter().map(|pos| Tok::new(seq, pos)).collect();
    try_decode(ctx, &toks).expect("a slot")
}

/// Decodes `positions` of `seq` one by one, as generation does: an SWA cache reuses masked cells.
pub fn generate(ctx: &mut Context, seq: SeqId, positions: impl IntoIterator<Item = Pos>) {
    for pos in positions {
        decode(ctx, seq, [pos]);
    }
}

// Looking

/// A token as a cache holds it: K and V of every layer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held {
    pub pos: Pos,
    pub x: Pos,
    pub y: Pos,
    pub tok: i32,
    pub bytes: Vec<Vec<u8>>,
}

/// Everything that a sequence holds in a section, by position.
pub fn held(ctx: &Context, section: usize, seq: SeqId) -> Vec<Held> {
    let mut out: Vec<Held> = held_in_cell_order(ctx, section, seq);
    out.sort();
    out
}

pub fn held_in_cell_order(ctx: &Context, section: usize, seq: SeqId) -> Vec<Held> {
    let stream = stream_of(ctx, seq);
    let planes = planes(ctx, section, stream);
    let all: Vec<_> = planes.iter().map(|plane| place::all(plane)).collect();
    let mut out = Vec::new();
    for cell in 0..kv_size(ctx, section) {
        let Some((meta, _)) = ctx.cell(section, stream, cell).expect("a cell") else { continue };
        if meta.seqs.iter().any(|s| s.id() == seq) {
            let bytes = planes.iter().zip(&all).map(|(plane, all)| cell_of(all, plane, cell)).collect();
            let CellExt { x, y, tok } = meta.ext;
            out.push(Held { pos: meta.pos, x, y, tok, bytes });
        }
    }
    out
}

/// The positions of a sequence in a section, ascending.
pub fn positions(ctx: &Context, section: usize, seq: SeqId) -> Vec<Pos> {
    held(ctx, section, seq).into_iter().map(|held| held.pos).collect()
}

/// Whether every token of `seq` has the bytes that it was decoded with, as a token of `origin`.
pub fn is_intact(ctx: &Context, seq: SeqId, origin: SeqId) -> bool {
    (0..ctx.n_section()).all(|section| {
        held(ctx, section, seq).iter().all(|held| {
            let ext = CellExt { x: held.x, y: held.y, tok: held.tok };
            let tok = Tok { pos: held.pos, ext, seqs: vec![origin] };
            held.bytes.iter().enumerate().all(|(i, b)| *b == token_bytes(&tok, section, i, b.len()))
        })
    })
}

/// A cell, used or not, with its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct CellImage {
    pub meta: Option<(CellMeta, Pos)>,
    pub bytes: Vec<Vec<u8>>,
}

/// All that there is to see of a context: two equal ones behave alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// By section, stream, cell.
    pub cells: BTreeMap<(usize, usize, u32), CellImage>,
    /// Where the next token of the first sequence would go: this shows the search head.
    pub next: Option<Vec<Vec<u32>>>,
}

pub fn image(ctx: &Context) -> Image {
    let mut cells = BTreeMap::new();
    for section in 0..ctx.n_section() {
        for stream in 0..ctx.n_stream() as usize {
            let planes = planes(ctx, section, stream);
            let all: Vec<_> = planes.iter().map(|plane| place::all(plane)).collect();
            for cell in 0..kv_size(ctx, section) {
                let meta = ctx.cell(section, stream, cell).expect("a cell");
                let bytes = planes.iter().zip(&all).map(|(plane, all)| cell_of(all, plane, cell)).collect();
                cells.insert((section, stream, cell), CellImage { meta, bytes });
            }
        }
    }
    let probe = UbatchToken { pos: 0, ext: CellExt::default(), seq_ids: &[0] };
    let slot = ctx.prepare(&[probe]).ok();
    let next = slot.map(|slot| {
        (0..ctx.n_section()).map(|section| slot.cells(section).expect("a section").to_vec()).collect()
    });
    Image { cells, next }
}

// States

/// The state of a sequence; its size is the size that was announced.
pub fn save(ctx: &mut Context, seq: SeqId, flags: StateFlags) -> Vec<u8> {
    let size = ctx.state_seq_get_size(seq, flags).expect("a size");
    let mut blob = vec![0xAA; usize::try_from(size).expect("a size")];
    assert_eq!(ctx.state_seq_get_data(&mut blob, seq, flags).expect("a state"), blob.len());
    blob
}

/// Restores and demands that the whole blob is consumed.
pub fn restore(ctx: &mut Context, blob: &[u8], dest: SeqId, flags: StateFlags) {
    assert_eq!(ctx.state_seq_set_data(blob, dest, flags).expect("a restore"), blob.len());
}

/// The error of a restore, which must leave everything as it was.
pub fn refused(ctx: &mut Context, blob: &[u8], dest: SeqId, flags: StateFlags) -> Error {
    let before = image(ctx);
    let error = ctx.state_seq_set_data(blob, dest, flags).expect_err("a refusal");
    assert!(image(ctx) == before, "a refused restore changed the context: {error}");
    error
}

// A second reading of the format, from formats.md

/// One cell of a state. `seqs` as the state names them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlobCell {
    pub pos: Pos,
    pub ext: Option<[i32; 3]>,
    pub seqs: Vec<SeqId>,
    /// K of every layer, then V; gathered from the channels where V is transposed.
    pub bytes: Vec<Vec<u8>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobStream {
    pub cells: Vec<BlobCell>,
    /// `v_trans`, `n_layer`, `n_rot_k`, `n_rot_v`.
    pub header: [u32; 4],
    /// Type and size of each tensor: row size, or element size and channels.
    pub tensors: Vec<(i32, u64)>,
}

pub struct Words<'a>(pub &'a [u8]);

impl<'a> Words<'a> {
    pub fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("4 bytes"))
    }
    pub fn i32(&mut self) -> i32 {
        self.u32().cast_signed()
    }
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("8 bytes"))
    }
}

/// Reads a section: by stream, `None` where it holds no cell.
pub fn read_section(words: &mut Words<'_>, kv: &KvParams) -> Vec<Option<BlobStream>> {
    let n_stream = words.u32();
    (0..n_stream).map(|_| read_stream(words, kv)).collect()
}

fn read_stream(words: &mut Words<'_>, kv: &KvParams) -> Option<BlobStream> {
    let n = words.u32() as usize;
    if n == 0 {
        return None;
    }
    let mut cells = Vec::new();
    for _ in 0..n {
        let pos = words.i32();
        let n_seq_id = words.u32();
        let ext = kv.cell_ext.then(|| [words.i32(), words.i32(), words.i32()]);
        let seqs = (0..n_seq_id).map(|_| words.i32()).collect();
        cells.push(BlobCell { pos, ext, seqs, bytes: Vec::new() });
    }
    let header = [words.u32(), words.u32(), words.u32(), words.u32()];
    let mut tensors = Vec::new();
    let n_v = kv.layers.iter().filter(|layer| layer.v.is_some()).count();
    for i in 0..kv.layers.len() + n_v {
        let ggml_type = words.i32();
        if i >= kv.layers.len() && header[0] == 1 {
            let (elem, n_channel) = (words.u32() as usize, words.u32() as usize);
            tensors.push((ggml_type, (elem * n_channel) as u64));
            let channels: Vec<&[u8]> = (0..n_channel).map(|_| words.take(elem * n)).collect();
            for (c, cell) in cells.iter_mut().enumerate() {
                cell.bytes.push(channels.iter().flat_map(|ch| &ch[c * elem..][..elem]).copied().collect());
            }
        } else {
            let row_size = words.u64();
            tensors.push((ggml_type, row_size));
            for cell in &mut cells {
                cell.bytes.push(words.take(usize::try_from(row_size).expect("a row")).to_vec());
            }
        }
    }
    Some(BlobStream { cells, header, tensors })
}

/// Reads a sequence state of these sections; the source sequence and each section's streams.
pub fn read_blob(blob: &[u8], sections: &[KvParams]) -> (SeqId, Vec<Vec<Option<BlobStream>>>) {
    let mut words = Words(blob);
    assert_eq!(words.u32(), 0xaf14_3cd8);
    let source = words.i32();
    let sections = sections.iter().map(|kv| read_section(&mut words, kv)).collect();
    assert!(words.0.is_empty(), "{} bytes too many", words.0.len());
    (source, sections)
}

/// The positions of each section of a sequence state, in the order of its cells.
pub fn blob_positions(blob: &[u8], sections: &[KvParams]) -> Vec<Vec<Pos>> {
    let (_, sections) = read_blob(blob, sections);
    let positions = |streams: Vec<Option<BlobStream>>| {
        streams.into_iter().flatten().flat_map(|stream| stream.cells).map(|cell| cell.pos).collect()
    };
    sections.into_iter().map(positions).collect()
}

/// What a sequence state says apart from names and order: sequence ids, streams, and the order of cells.
pub fn essence(blob: &[u8], sections: &[KvParams]) -> Vec<Option<BlobStream>> {
    let (_, sections) = read_blob(blob, sections);
    let one = |streams: Vec<Option<BlobStream>>| {
        let mut holders = streams.into_iter().flatten();
        let mut stream = holders.next()?;
        assert!(holders.next().is_none(), "a sequence state with cells in two streams");
        for cell in &mut stream.cells {
            assert_eq!(cell.seqs.len(), 1);
            cell.seqs.clear();
        }
        stream.cells.sort();
        Some(stream)
    };
    sections.into_iter().map(one).collect()
}

/// The state with another sequence in its header and cells.
pub fn renamed(blob: &[u8], sections: &[KvParams], seq: SeqId) -> Vec<u8> {
    let mut out = blob.to_vec();
    let name = seq.to_le_bytes();
    out[4..8].copy_from_slice(&name);
    let mut words = Words(&blob[8..]);
    for kv in sections {
        let mut ahead = Words(words.0);
        let n_stream = ahead.u32();
        for _ in 0..n_stream {
            let start = blob.len() - ahead.0.len() + 4;
            let n = read_stream(&mut ahead, kv).map_or(0, |stream| stream.cells.len());
            let cell_len = if kv.cell_ext { 24 } else { 12 };
            for c in 0..n {
                let end = start + (c + 1) * cell_len;
                out[end - 4..end].copy_from_slice(&name);
            }
        }
        words = ahead;
    }
    out
}
