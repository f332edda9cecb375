//! Views, writers and readers: over cells and tensors of somebody else, the bytes, the cells and the refusals are
//! those of a managed cache.

mod common;
mod owner;
mod support;

use kvstate::Context;
use kvstate::cells::{CellMeta, SeqSet};
use kvstate::error::{Error, Result};
use kvstate::format::{FileKind, GgmlType};
use kvstate::memory::{KvParams, KvView, LayerParams, SlotInfos, ViewCell};
use kvstate::session::{StateFile, StateReader, StateWriter};
use kvstate::state::DeviceState;
use kvstate::storage::{Plane, PlaneShape};
use kvstate::types::{CellExt, Pos, PosRange, SeqId, StateFlags, SwaType};
use kvstate::{ContextParams, Status};
use owner::{Call, Image, Owner, Tape, Turns};
use proptest::prelude::*;
use proptest::sample::select;
use support::{NONE, ON_DEVICE, PARTIAL, Tok, kv, place, standard, stream_of, tensor, windowed};

/// A managed context, and owners of the same cells and bytes.
struct Pair {
    ctx: Context,
    owners: Vec<Owner>,
}

impl Pair {
    fn new(n_seq_max: u32, unified: bool, sections: &[KvParams], remote: bool) -> Self {
        let params = ContextParams { unified, arch: "llama".into(), ..support::params(n_seq_max, sections) };
        let names: &[&'static str] = if sections.len() == 1 { &["kv"] } else { &["base", "swa"] };
        let owners = names.iter().zip(sections);
        Self {
            ctx: place::context(params).expect("a context"),
            owners: owners.map(|(name, kv)| Owner::new(name, kv, n_seq_max, unified, remote)).collect(),
        }
    }

    /// One section of full attention in one stream.
    fn of(n_seq_max: u32, kv: KvParams) -> Self {
        Self::new(n_seq_max, true, &[kv], false)
    }

    fn take_bytes(&self) {
        self.owners.iter().enumerate().for_each(|(section, owner)| owner.take_bytes(&self.ctx, section));
    }

    fn try_decode(&mut self, toks: &[Tok]) -> Result<()> {
        let cells = support::try_decode(&mut self.ctx, toks)?;
        let stream = stream_of(&self.ctx, toks[0].seqs[0]);
        for (owner, cells) in self.owners.iter().zip(&cells) {
            let meta = |tok: &Tok| {
                let mut seqs = SeqSet::EMPTY;
                tok.seqs.iter().for_each(|&seq| seqs.insert(owner.seq(seq)));
                let ext = if owner.kv.cell_ext { tok.ext } else { CellExt::default() };
                CellMeta { pos: tok.pos, ext, seqs }
            };
            let metas: Vec<CellMeta> = toks.iter().map(meta).collect();
            owner.book.borrow_mut().set(stream, cells, &metas);
        }
        self.take_bytes();
        Ok(())
    }

    fn decode(&mut self, seq: SeqId, positions: impl IntoIterator<Item = Pos>) {
        let toks: Vec<Tok> = positions.into_iter().map(|pos| Tok::new(seq, pos)).collect();
        self.try_decode(&toks).expect("a slot");
    }

    fn rm(&mut self, seq: SeqId, p0: Pos, p1: Pos) {
        assert!(self.ctx.seq_rm(seq, p0, p1).expect("a sequence"));
        for owner in &self.owners {
            let (stream, seq) = (owner.stream_of(seq), owner.seq(seq));
            owner.book.borrow_mut().rm(stream, Some(seq), PosRange::new(p0, p1));
        }
    }

    /// Within a stream.
    fn cp(&mut self, src: SeqId, dst: SeqId, p0: Pos, p1: Pos) {
        self.ctx.seq_cp(src, dst, p0, p1).expect("a copy");
        for owner in &self.owners {
            let (src, dst) = (owner.seq(src), owner.seq(dst));
            let range = PosRange::new(p0, p1);
            for (meta, _) in owner.book.borrow_mut().cells[0].iter_mut().flatten() {
                if meta.seqs.contains(src) && range.contains(meta.pos) {
                    meta.seqs.insert(dst);
                }
            }
        }
    }

    /// Several sequences in turns, with holes, and shared cells where they share a stream.
    fn wear(&mut self) {
        self.decode(0, 0..9);
        self.decode(1, 0..5);
        self.decode(0, 9..13);
        self.rm(1, 2, 4);
        if self.ctx.n_stream() == 1 {
            self.cp(0, 2, 0, 6);
        }
        self.decode(2, 6..9);
        let patches = (0..3).map(|x| Tok { ext: CellExt { x, y: 1, tok: 5 }, ..Tok::new(1, 5) });
        self.try_decode(&patches.collect::<Vec<_>>()).expect("a slot");
        self.rm(0, 0, 1);
    }

    /// Every cell is the same, and its bytes; `used`: of used cells alone.
    #[track_caller]
    fn assert_same(&self, used: bool) {
        for (section, owner) in self.owners.iter().enumerate() {
            for stream in 0..owner.n_stream() {
                let planes = support::planes(&self.ctx, section, stream);
                for cell in 0..owner.kv.kv_size {
                    let want = self.ctx.cell(section, stream, cell).expect("a cell");
                    let got = owner.book.borrow().cells[stream][cell as usize];
                    assert_eq!(got, want, "section {section}, stream {stream}, cell {cell}");
                    if used && want.is_none() {
                        continue;
                    }
                    let want: Vec<_> = planes.iter().map(|plane| support::read_cell(plane, cell)).collect();
                    assert!(owner.read(stream, cell) == want, "bytes of section {section}, cell {cell}");
                }
            }
        }
    }

    fn managed(&mut self, seq: SeqId, flags: StateFlags) -> Vec<u8> {
        support::save(&mut self.ctx, seq, flags)
    }

    /// The state of sequence 0 after it was decoded.
    fn managed_of(mut self, positions: std::ops::Range<Pos>) -> Vec<u8> {
        self.decode(0, positions);
        self.managed(0, NONE)
    }

    fn managed_whole(&mut self) -> Vec<u8> {
        common::whole_state(&mut self.ctx)
    }
}

fn views(owners: &[Owner]) -> Vec<KvView> {
    owners.iter().map(Owner::view).collect()
}

/// What a writer makes of the owners; before the sections of a whole context comes its architecture.
fn try_save(owners: &[Owner], seq: SeqId, flags: StateFlags) -> Result<Vec<u8>> {
    let views = views(owners);
    let mut writer = StateWriter::new(seq);
    if seq == -1 {
        writer.write(&5_u32.to_le_bytes())?;
        writer.write(b"llama")?;
    }
    for view in &views {
        writer.write_kv_cache(view, flags)?;
    }
    let mut blob = vec![0xAA; usize::try_from(writer.size()).expect("a size")];
    assert_eq!(writer.get_data(&mut blob)?, blob.len());
    Ok(blob)
}

fn save(owners: &[Owner], seq: SeqId, flags: StateFlags) -> Vec<u8> {
    try_save(owners, seq, flags).expect("a state")
}

/// What one owner writes in turns.
fn tape(owner: &Owner, seq: SeqId, flags: StateFlags) -> Vec<u8> {
    let view = owner.view();
    let mut tape = Tape { owner, bytes: Vec::new() };
    view.state_write(&mut tape, seq, flags).expect("a state");
    tape.bytes
}

/// Plans every section, then reads every section; bytes consumed.
fn restore(owners: &[Owner], blob: &[u8], dest: SeqId, flags: StateFlags) -> Result<usize> {
    let mut reader = match dest {
        -1 => StateReader::of_whole(blob),
        _ => StateReader::of_seq(blob)?,
    };
    let arch = |reader: &mut StateReader<'_>| if dest == -1 { reader.read(&mut [0; 9]) } else { Ok(()) };
    arch(&mut reader)?;
    for owner in owners {
        reader.plan_kv_cache(&owner.view(), dest, flags, None)?;
    }
    let end = reader.offset();
    reader.rewind();
    arch(&mut reader)?;
    for owner in owners {
        reader.read_kv_cache(owner.view())?;
    }
    reader.finish()?;
    assert_eq!(reader.offset(), end, "planning and reading consume the same bytes");
    Ok(usize::try_from(end).unwrap())
}

/// Reads one owner's section in turns.
fn read_in_turns(turns: &mut Turns<'_>, owner: &Owner, dest: SeqId, flags: StateFlags) -> Result<SlotInfos> {
    turns.memory = owner.memory.clone();
    owner.view().state_read_sinfo(turns, dest, flags, None)
}

fn with_layers(kv_size: u32, layers: Vec<LayerParams>) -> KvParams {
    KvParams { layers, ..kv(kv_size) }
}

fn layer(k: GgmlType, n_k: u32, v: GgmlType, n_v: u32) -> LayerParams {
    LayerParams { k: tensor(k, n_k), v: Some(tensor(v, n_v)) }
}

/// Every kind of cache.
fn geometries(kv_size: u32) -> Vec<(&'static str, KvParams)> {
    use GgmlType as T;
    let plain = kv(kv_size);
    let mla = LayerParams { k: tensor(T::F16, 6), v: None };
    vec![
        ("f16", plain.clone()),
        ("q8_0", with_layers(kv_size, vec![layer(T::Q8_0, 64, T::Q8_0, 32)])),
        ("transposed V", KvParams { v_trans: true, ..plain.clone() }),
        (
            "q8_0 K, transposed V",
            KvParams { v_trans: true, ..with_layers(kv_size, vec![layer(T::Q8_0, 32, T::F16, 3)]) },
        ),
        ("no V", with_layers(kv_size, vec![mla; 2])),
        ("V in one layer of two", with_layers(kv_size, vec![mla, layer(T::F32, 1, T::BF16, 3)])),
        ("ext", KvParams { cell_ext: true, ..plain.clone() }),
        ("rotated", KvParams { n_rot_k: 64, n_rot_v: 32, ..plain }),
        ("standard window", standard(kv_size, 6)),
        ("chunked window", windowed(kv_size, SwaType::Chunked, 5)),
        ("symmetric window", windowed(kv_size, SwaType::Symmetric, 7)),
        (
            "standard window, ext, transposed V",
            KvParams { cell_ext: true, v_trans: true, ..standard(kv_size, 4) },
        ),
    ]
}

/// A worn cache of every kind, unified and in streams, its tensors in host memory and behind calls.
fn each_pair(mut check: impl FnMut(&str, &mut Pair)) {
    for (name, kv) in geometries(40) {
        for (unified, remote) in [(true, false), (true, true), (false, false), (false, true)] {
            let mut pair = Pair::new(3, unified, std::slice::from_ref(&kv), remote);
            pair.wear();
            pair.assert_same(false);
            check(&format!("{name}, unified {unified}, remote {remote}"), &mut pair);
        }
    }
}

/// The error of a plan, which must leave the owners as they were.
#[track_caller]
fn refused(owners: &[Owner], blob: &[u8], dest: SeqId, flags: StateFlags) -> Error {
    let before: Vec<_> = owners.iter().map(Owner::image).collect();
    let calls: Vec<_> = owners.iter().map(Owner::calls).collect();
    let error = restore(owners, blob, dest, flags).expect_err("a refusal");
    assert!(owners.iter().map(Owner::image).eq(before), "a refused restore changed an owner: {error}");
    assert!(owners.iter().map(Owner::calls).eq(calls), "a refused restore called an owner: {error}");
    error
}

// Bytes

#[test]
fn a_sequence_state_is_that_of_a_managed_cache() {
    each_pair(|name, pair| {
        for seq in 0..3 {
            let blob = save(&pair.owners, seq, NONE);
            common::assert_same_bytes(&blob, &pair.managed(seq, NONE), &format!("{name}, sequence {seq}"));
        }
        // A window may have passed some of them.
        if pair.owners[0].kv.swa.is_none() {
            let blob = save(&pair.owners, 1, NONE);
            let mut positions = support::blob_positions(&blob, &[pair.owners[0].kv.clone()]).concat();
            positions.sort_unstable();
            assert_eq!(positions, [0, 1, 4, 5, 5, 5], "{name}");
        }
    });
}

#[test]
fn a_partial_state_is_that_of_a_managed_cache() {
    each_pair(|name, pair| {
        for seq in 0..3 {
            let blob = save(&pair.owners, seq, PARTIAL);
            common::assert_same_bytes(&blob, &pair.managed(seq, PARTIAL), &format!("{name}, sequence {seq}"));
        }
        let kv = pair.owners[0].kv.clone();
        // Of the last position, 12, by hand.
        let first_seen = match kv.swa.swa_type() {
            SwaType::None => 13,
            SwaType::Standard => 13 - kv.swa.n_swa().cast_signed(),
            SwaType::Chunked => 10,
            SwaType::Symmetric => 9,
        };
        let mut seen = pair.owners[0].positions(0);
        seen.retain(|&pos| pos >= first_seen);
        let sections = if kv.swa.is_none() { vec![] } else { vec![kv] };
        let positions = support::blob_positions(&save(&pair.owners, 0, PARTIAL), &sections);
        assert_eq!(positions.concat(), seen, "{name}");
    });
}

#[test]
fn the_state_of_a_whole_context_is_that_of_a_managed_cache() {
    each_pair(|name, pair| {
        common::assert_same_bytes(&save(&pair.owners, -1, NONE), &pair.managed_whole(), name);
    });
}

#[test]
fn a_state_written_in_turns_has_the_same_bytes() {
    each_pair(|name, pair| {
        for flags in [NONE, PARTIAL] {
            let blob = pair.managed(0, flags);
            common::assert_same_bytes(&tape(&pair.owners[0], 0, flags), &blob[8..], name);
        }
        common::assert_same_bytes(&tape(&pair.owners[0], -1, NONE), &pair.managed_whole()[9..], name);
    });
}

#[test]
fn the_order_in_which_cells_are_visited_does_not_matter() {
    each_pair(|name, pair| {
        pair.owners[0].book.borrow_mut().backwards = true;
        for flags in [NONE, PARTIAL] {
            common::assert_same_bytes(&save(&pair.owners, 0, flags), &pair.managed(0, flags), name);
        }
    });
}

#[test]
fn a_pair_of_sections_is_written_one_after_the_other() {
    let mut pair = Pair::new(3, true, &support::iswa(40, 30, 6), false);
    pair.wear();
    let [base, swa] = [0, 1].map(|i| tape(&pair.owners[i], 0, NONE));
    let blob = save(&pair.owners, 0, NONE);
    assert!(blob[8..] == [base, swa].concat());
    assert!(blob == pair.managed(0, NONE));
    let partial = save(&pair.owners, 0, PARTIAL);
    assert!(partial[8..] == tape(&pair.owners[1], 0, PARTIAL));
    assert!(partial == pair.managed(0, PARTIAL));
}

#[test]
fn a_view_reads_what_a_managed_cache_wrote() {
    each_pair(|name, pair| {
        for (flags, dest) in [(NONE, 2), (PARTIAL, 0), (NONE, 0)] {
            let blob = pair.managed(0, flags);
            pair.ctx.state_seq_set_data(&blob, dest, flags).expect(name);
            assert_eq!(restore(&pair.owners, &blob, dest, flags).expect(name), blob.len());
            pair.assert_same(false);
        }
    });
}

#[test]
fn a_view_turns_what_it_reads_of_the_other_layout() {
    for remote in [false, true] {
        let pair = |v_trans| {
            let mut pair = Pair::new(3, true, &[KvParams { v_trans, ..kv(40) }], remote);
            pair.wear();
            pair
        };
        for v_trans in [false, true] {
            let (mut from, mut to) = (pair(!v_trans), pair(v_trans));
            let blob = from.managed(0, NONE);
            for dest in [2, 0] {
                to.ctx.state_seq_set_data(&blob, dest, NONE).expect("a state");
                assert_eq!(restore(&to.owners, &blob, dest, NONE).expect("a state"), blob.len());
                to.assert_same(false);
            }
        }
    }
}

#[test]
fn a_view_that_is_allowed_to_converts_types() {
    for remote in [false, true] {
        let mut from =
            Pair::new(3, true, &[with_layers(40, vec![layer(GgmlType::F16, 32, GgmlType::F16, 3)])], false);
        from.wear();
        let blob = from.managed(0, NONE);
        let q8_0 = with_layers(40, vec![layer(GgmlType::Q8_0, 32, GgmlType::F32, 3)]);
        let params = ContextParams { convert_types: true, ..support::params(3, std::slice::from_ref(&q8_0)) };
        let mut ctx = place::context(params).expect("a context");
        ctx.state_seq_set_data(&blob, 2, NONE).expect("a state");
        let owner = Owner::new("kv", &q8_0, 3, true, remote);
        let refusal = refused(std::slice::from_ref(&owner), &blob, 2, NONE).to_string();
        assert!(refusal.contains("convert_types allows it"), "{refusal}");

        let view = || owner.view().with_convert_types(true);
        let mut reader = StateReader::of_seq(&blob).expect("a state");
        reader.plan_kv_cache(&view(), 2, NONE, None).expect("a plan");
        reader.rewind();
        reader.read_kv_cache(view()).expect("a section");
        reader.finish().expect("a state");
        let held = support::held(&ctx, 0, 2);
        assert_eq!(owner.bytes_of(2), held.iter().map(|held| held.bytes.clone()).collect::<Vec<_>>());
        assert_eq!(owner.positions(2), held.iter().map(|held| held.pos).collect::<Vec<_>>());
    }
}

#[test]
fn a_view_reads_the_state_of_a_whole_context() {
    each_pair(|name, pair| {
        let blob = pair.managed_whole();
        pair.decode(1, 6..9);
        pair.ctx.state_set_data(&blob).expect(name);
        assert_eq!(restore(&pair.owners, &blob, -1, NONE).expect(name), blob.len());
        pair.assert_same(true);
        common::assert_same_bytes(&save(&pair.owners, -1, NONE), &blob, name);
    });
}

#[test]
fn the_state_of_a_whole_context_can_be_read_in_turns() {
    each_pair(|name, pair| {
        let blob = pair.managed_whole();
        pair.ctx.state_set_data(&blob).expect(name);
        let mut turns = Turns { offset: 9, ..Turns::new(&blob, &pair.owners[0]) };
        let slots = read_in_turns(&mut turns, &pair.owners[0], -1, NONE).expect(name);
        assert_eq!(turns.offset, blob.len(), "{name}");
        pair.assert_same(true);
        let count = |stream: &Vec<Option<_>>| u32::try_from(stream.iter().flatten().count()).expect("few");
        let used = pair.owners[0].book.borrow().cells.iter().map(count).collect::<Vec<_>>();
        let identity: SlotInfos = used.into_iter().map(|n| (0..n).collect()).collect();
        assert_eq!(slots, identity, "{name}");
    });
}

#[test]
fn a_state_that_llama_cpp_wrote_goes_through_a_view_byte_for_byte() {
    let mut n = 0;
    for f in common::fixtures()
        .into_iter()
        .filter(|f| f.is_attention() && f.version() == 4 && !f.is_legacy_partial())
    {
        let Some(blob) = f.blob() else { continue };
        let (seq, n_seq_max) = (f.sidecar.seq_id, f.sidecar.n_seq_max);
        let owners: Vec<Owner> = ["base", "swa"]
            .iter()
            .zip(f.sections(f.kv_size()))
            .map(|(name, kv)| Owner::new(name, &kv, n_seq_max, f.sidecar.kv_unified, n % 2 == 1))
            .collect();
        let consumed = restore(&owners, &blob, seq, f.flags());
        assert_eq!(consumed.unwrap_or_else(|e| panic!("{}: {e}", f.name)), blob.len(), "{}", f.name);
        common::assert_same_bytes(&save(&owners, seq, f.flags()), &blob, &f.name);
        n += 1;
    }
    assert!(n > 10, "{n} fixtures");
}

#[test]
fn a_file_is_that_of_a_managed_cache() {
    let dir = tempfile::tempdir().expect("a folder");
    let (managed, viewed) = (dir.path().join("managed"), dir.path().join("viewed"));
    each_pair(|name, pair| {
        let tokens = [3, 1, 4];
        let size = pair.ctx.state_seq_save_file(&managed, 0, &tokens).expect(name);
        let views = views(&pair.owners);
        let mut writer = StateWriter::new(0);
        writer.write_kv_cache(&views[0], NONE).expect(name);
        assert_eq!(writer.save_file(&viewed, &tokens, true).expect(name), size, "{name}");
        let read = |path| std::fs::read(path).expect("a file");
        common::assert_same_bytes(&read(&viewed), &read(&managed), name);
    });
}

#[test]
fn a_file_is_read_with_its_tokens() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("file");
    each_pair(|name, pair| {
        pair.ctx.state_seq_save_file(&path, 0, &[3, 1, 4]).expect(name);
        pair.ctx.state_seq_load_file(&path, 1, 3).expect(name);
        let file = StateFile::open(&path, FileKind::Sequence, 3).expect(name);
        assert_eq!(file.tokens(), [3, 1, 4]);
        let mut reader = StateReader::of_file(&file);
        reader.plan_kv_cache(&pair.owners[0].view(), 1, NONE, None).expect(name);
        assert_eq!(reader.left(), 0, "{name}");
        reader.rewind();
        reader.read_kv_cache(pair.owners[0].view()).expect(name);
        reader.finish().expect(name);
        pair.assert_same(false);
    });
}

#[test]
fn a_file_that_is_truncated_after_the_plan_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("file");
    each_pair(|name, pair| {
        pair.ctx.state_seq_save_file(&path, 0, &[]).expect(name);
        let file = StateFile::open(&path, FileKind::Sequence, 0).expect(name);
        let mut reader = StateReader::of_file(&file);
        reader.plan_kv_cache(&pair.owners[0].view(), 1, NONE, None).expect(name);
        reader.rewind();
        reader.read_kv_cache(pair.owners[0].view()).expect(name);
        std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(64)).expect(name);
        let error = reader.finish().expect_err(name).to_string();
        assert_eq!(error, format!("read {}: the file has become shorter", path.display()), "{name}");
    });
}

#[test]
fn a_file_with_more_tokens_than_there_is_room_for_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("file");
    StateWriter::new(0).save_file(&path, &[3, 1, 4], false).expect("a file");
    let error = StateFile::open(&path, FileKind::Sequence, 2).expect_err("too many");
    assert_eq!(error.to_string(), "token count in sequence state file exceeded capacity! 3 > 2");
    let error = StateFile::open(&path, FileKind::Session, 3).expect_err("another kind");
    assert_eq!(error.status(), Status::UnsupportedVersion, "{error}");
}

#[test]
fn a_buffer_that_is_too_small_is_untouched() {
    let mut pair = Pair::of(3, kv(40));
    pair.wear();
    let views = views(&pair.owners);
    let mut writer = StateWriter::new(0);
    writer.write_kv_cache(&views[0], NONE).expect("a section");
    let size = writer.size();
    let mut out = vec![0xAA; usize::try_from(size).expect("a size") - 1];
    let error = writer.get_data(&mut out).expect_err("a byte is missing");
    let text = format!("buffer too small: the state has {size} bytes, the buffer {}", size - 1);
    assert_eq!(error.to_string(), text);
    assert!(out.iter().all(|&byte| byte == 0xAA));
}

// Sections of the caller's own

#[test]
fn sections_of_the_caller_stand_between_views() {
    let mut pair = Pair::new(3, true, &support::iswa(40, 30, 6), false);
    pair.wear();
    let views_out = views(&pair.owners);
    let tensor = &Plane::allocate(&[PlaneShape::dense_rows(6)], 1).expect("memory")[0];
    support::write_cell(tensor, 0, b"tensor");
    let mut writer = StateWriter::new(0);
    writer.write(b"first").expect("metadata");
    writer.write_kv_cache(&views_out[0], NONE).expect("a section");
    writer.write_tensor(tensor).expect("a tensor");
    writer.write(b"middle").expect("metadata");
    writer.write_kv_cache(&views_out[1], NONE).expect("a section");
    // Bytes of a tensor are taken when the state is.
    support::write_cell(tensor, 0, b"TENSOR");
    let mut blob = vec![0; usize::try_from(writer.size()).expect("a size")];
    writer.get_data(&mut blob).expect("a state");
    let [base, swa] = [0, 1].map(|i| tape(&pair.owners[i], 0, NONE));
    let want = [&save(&[], 0, NONE)[..], b"first", &base, b"TENSOR", b"middle", &swa].concat();
    common::assert_same_bytes(&blob, &want, "a composed state");

    let mut reader = StateReader::of_seq(&blob).expect("a state");
    let (mut first, mut middle) = ([0; 5], [0; 6]);
    reader.read(&mut first).expect("metadata");
    reader.plan_kv_cache(&pair.owners[0].view(), 1, NONE, None).expect("a plan");
    reader.skip_tensor(6).expect("a tensor");
    reader.read(&mut middle).expect("metadata");
    assert_eq!((&first, &middle), (b"first", b"middle"));
    reader.plan_kv_cache(&pair.owners[1].view(), 1, NONE, None).expect("a plan");
    assert_eq!((reader.offset(), reader.left()), (blob.len() as u64, 0));
    reader.rewind();
    assert_eq!(reader.offset(), 8);
    reader.read(&mut first).expect("metadata");
    reader.read_kv_cache(pair.owners[0].view()).expect("a section");
    let to = place::allocate(0, PlaneShape::dense_rows(6), 1);
    reader.read_tensor(place::lent(&to)).expect("a tensor");
    assert_eq!(support::read_cell(&to, 0), [0; 6], "the batch is not copied yet");
    reader.read(&mut middle).expect("metadata");
    reader.read_kv_cache(pair.owners[1].view()).expect("a section");
    reader.finish().expect("the batch");
    assert_eq!(support::read_cell(&to, 0), b"TENSOR");
    assert_eq!(tape(&pair.owners[1], 1, NONE).len(), swa.len());
    assert_eq!(pair.owners[0].bytes_of(1), pair.owners[0].bytes_of(0));
}

#[test]
fn reading_past_the_end_is_refused_and_consumes_nothing() {
    let blob = [&save(&[], 0, NONE)[..], b"four"].concat();
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    for error in [reader.read(&mut [0; 5]), reader.skip_tensor(5), reader.skip_tensor(u64::MAX)] {
        assert_eq!(error.expect_err("too many").status(), Status::Truncated);
    }
    assert_eq!((reader.offset(), reader.left(), reader.tensor_bytes()), (8, 4, 0));
    assert_eq!(StateReader::of_seq(&blob[..7]).expect_err("no header").status(), Status::Truncated);
    assert_eq!(StateReader::of_seq(&[0; 8]).expect_err("no state").status(), Status::Corrupt);
}

// Cells that are given

/// A cache of 16 cells whose free ones are 1, 3, 6, 7 and from 8 on, and a state of 4 cells.
fn fragmented() -> (Owner, Vec<u8>) {
    let mut pair = Pair::of(4, kv(16));
    pair.decode(3, 0..4);
    let blob = pair.managed(3, NONE);
    pair.rm(3, -1, -1);
    pair.decode(0, 0..8);
    for pos in [1, 3, 6, 7] {
        pair.rm(0, pos, pos + 1);
    }
    (pair.owners.remove(0), blob)
}

fn in_cells<const N: usize>(streams: [&[u32]; N]) -> SlotInfos {
    streams.map(<[u32]>::to_vec).to_vec()
}

fn plan(owner: &Owner, blob: &[u8], dest: SeqId, sinfos_in: Option<&SlotInfos>) -> Result<SlotInfos> {
    StateReader::of_seq(blob)?.plan_kv_cache(&owner.view(), dest, NONE, sinfos_in)
}

fn in_turns(owner: &Owner, blob: &[u8], dest: SeqId, sinfos_in: Option<&SlotInfos>) -> Result<SlotInfos> {
    owner.view().state_read_sinfo(&mut Turns::new(blob, owner), dest, NONE, sinfos_in)
}

#[test]
fn a_mirrored_cache_takes_the_cells_of_its_source() {
    let (source, blob) = fragmented();
    let (mut mirror, _) = fragmented();
    mirror.book.borrow_mut().heads[0] = 12;
    let planned = plan(&source, &blob, 2, None).expect("room");
    assert_eq!(planned, in_cells([&[1, 3, 6, 7]]));
    assert_eq!(
        plan(&mirror, &blob, 2, None).expect("room"),
        in_cells([&[12, 13, 14, 15]]),
        "elsewhere on its own"
    );
    assert_eq!(plan(&mirror, &blob, 2, Some(&planned)).expect("room"), planned);

    let read = in_turns(&source, &blob, 2, None).expect("room");
    assert_eq!(read, planned);
    mirror = mirror.copy();
    assert_eq!(in_turns(&mirror, &blob, 2, Some(&read)).expect("room"), read);
    assert_eq!(mirror.cells_of(2), source.cells_of(2));
    assert_eq!(mirror.bytes_of(2), source.bytes_of(2));
    assert_eq!(tape(&mirror, 2, NONE), tape(&source, 2, NONE));
}

#[test]
fn given_cells_are_taken_in_their_order() {
    let (owner, blob) = fragmented();
    let given = vec![vec![9, 3, 10, 1]];
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    assert_eq!(reader.plan_kv_cache(&owner.view(), 2, NONE, Some(&given)).expect("free cells"), given);
    reader.rewind();
    assert_eq!(reader.read_kv_cache(owner.view()).expect("a section"), given);
    reader.finish().expect("the batch");
    let held = |owner: &Owner| [9, 3, 10, 1].map(|cell: u32| owner.book.borrow().cells[0][cell as usize]);
    assert_eq!(held(&owner).map(|cell| cell.expect("used").0.pos), [0, 1, 2, 3]);

    let (turned, _) = fragmented();
    assert_eq!(in_turns(&turned, &blob, 2, Some(&given)).expect("free cells"), given);
    assert_eq!(turned.image(), owner.image());
}

#[test]
fn cells_of_the_destination_itself_can_be_given() {
    let (owner, blob) = fragmented();
    let given = vec![vec![0, 2, 4, 5]];
    assert_eq!(owner.cells_of(0), given[0]);
    assert_eq!(plan(&owner, &blob, 0, Some(&given)).expect("its own"), given);
    let error = plan(&owner, &blob, 1, Some(&given)).expect_err("another's");
    assert_eq!(
        error.to_string(),
        "sinfos_in: cell 0 of the mirrored slot layout is not free (section kv, stream 0)"
    );
}

#[test]
fn given_cells_that_do_not_fit_are_refused_by_name() {
    let not_free = |cell: u32| {
        format!("sinfos_in: cell {cell} of the mirrored slot layout is not free (section kv, stream 0)")
    };
    let layout = |state: usize, cache: usize| {
        format!("mirrored slot layout: the state has {state}, the cache {cache} (section kv)")
    };
    for (given, text) in [
        (vec![vec![1, 3, 6]], layout(4, 3)),
        (vec![vec![1, 3, 6, 7, 8]], layout(4, 5)),
        (vec![vec![]], layout(4, 0)),
        (vec![vec![1, 3, 4, 7]], not_free(4)),
        (vec![vec![1, 3, 6, 1]], not_free(1)),
        (vec![vec![1, 3, 6, 16]], not_free(16)),
        (vec![vec![1, 3, 6, u32::MAX]], not_free(u32::MAX)),
        (
            vec![vec![1, 3, 6, 7], vec![]],
            "streams of the mirrored slot layout: the state has 1, the cache 2 (section kv)".into(),
        ),
        (vec![], layout(4, 0)),
    ] {
        let (owner, blob) = fragmented();
        let before = owner.image();
        let error = plan(&owner, &blob, 2, Some(&given)).expect_err("a refusal");
        assert_eq!(error.to_string(), text, "{given:?}");
        assert_eq!((owner.image(), owner.calls()), (before, vec![]), "{given:?}");

        // The destination is what the call may spoil: it is emptied, and nobody else's cells change.
        let others = (owner.cells_of(0), owner.bytes_of(0));
        let error = in_turns(&owner, &blob, 2, Some(&given)).expect_err("a refusal");
        assert_eq!(error.to_string(), text, "{given:?}");
        assert_eq!(owner.calls().last(), Some(&Call::Clear { seq: Some(2) }), "{given:?}");
        assert_eq!(
            (owner.cells_of(2), (owner.cells_of(0), owner.bytes_of(0))),
            (vec![], others),
            "{given:?}"
        );
    }
}

#[test]
fn cells_given_for_an_empty_stream_are_refused() {
    let (owner, _) = fragmented();
    let empty = save(std::slice::from_ref(&owner), 1, NONE);
    assert_eq!(plan(&owner, &empty, 2, Some(&vec![vec![]])).expect("none are given"), in_cells([&[]]));
    let error = plan(&owner, &empty, 2, Some(&vec![vec![1]])).expect_err("a cell too many");
    assert_eq!(error.to_string(), "mirrored slot layout: the state has 0, the cache 1 (section kv)");
}

#[test]
fn cells_given_for_a_whole_context_are_the_first_ones_of_each_stream() {
    let mut pair = Pair::new(2, false, &[kv(8)], false);
    pair.decode(0, 0..3);
    pair.decode(1, 0..2);
    let blob = pair.managed_whole();
    let plan = |given: SlotInfos| {
        let mut reader = StateReader::of_whole(&blob);
        reader.read(&mut [0; 9])?;
        reader.plan_kv_cache(&pair.owners[0].view(), -1, NONE, Some(&given))
    };
    let first = vec![vec![0, 1, 2], vec![0, 1]];
    assert_eq!(plan(first.clone()).expect("the first cells"), first);
    let error = plan(vec![vec![0, 1, 2], vec![0, 2]]).expect_err("another cell");
    assert_eq!(
        error.to_string(),
        "sinfos_in: cell 2 is given where a whole context has cell 1 (section kv, stream 1)"
    );
    let error = plan(vec![vec![0, 1, 2], vec![0]]).expect_err("a cell too few");
    assert_eq!(error.to_string(), "mirrored slot layout: the state has 2, the cache 1 (section kv)");
}

// Plans

/// Two layers and three cells between those of another sequence.
fn small() -> (Owner, Vec<u8>) {
    let mut pair = Pair::of(3, KvParams { cell_ext: true, ..kv(12) });
    pair.decode(0, 0..3);
    pair.decode(1, 0..3);
    pair.decode(2, 4..7);
    let blob = pair.managed(2, NONE);
    (pair.owners.remove(0), blob)
}

#[test]
fn a_plan_of_damaged_bytes_changes_nothing() {
    let (owner, blob) = small();
    let before = owner.image();
    let unchanged = |what: &str| {
        assert!(owner.image() == before, "{what}");
        assert_eq!(owner.calls(), [], "{what}");
    };
    for len in 0..blob.len() {
        let error = plan(&owner, &blob[..len], 1, None).expect_err("a byte is missing");
        assert_eq!(error.status(), Status::Truncated, "{len} bytes: {error}");
        unchanged(&format!("{len} bytes"));
    }
    // What a state is free to hold: its sequence, positions (at least 0), ext and tensors.
    let (header, cell, data) = (16, 24, 16 + 3 * 24);
    let is_free = |at: usize, xor: u8| match at {
        4..8 => true,
        _ if (header..data).contains(&at) => match (at - header) % cell {
            pos @ 0..4 => pos < 3 || xor < 0x80,
            n_seq_id @ 4..8 => n_seq_id > 7,
            _ => true,
        },
        _ => tensors_of(&blob, data).iter().any(|range| range.contains(&at)),
    };
    for at in 0..blob.len() {
        for xor in [1, 0x80, 0xff] {
            let mut damaged = blob.clone();
            damaged[at] ^= xor;
            let planned = plan(&owner, &damaged, 1, None);
            assert_eq!(planned.is_ok(), is_free(at, xor), "byte {at} xor {xor:#x}: {planned:?}");
            unchanged(&format!("byte {at} xor {xor:#x}"));
        }
    }
}

/// Where the tensors of [`small`]'s state lie: K of two layers, then V, 3 cells each.
fn tensors_of(blob: &[u8], data: usize) -> Vec<std::ops::Range<usize>> {
    let mut at = data + 16;
    let ranges = [8, 8, 4, 4].map(|row| {
        at += 12 + 3 * row;
        at - 3 * row..at
    });
    assert_eq!(at, blob.len());
    ranges.to_vec()
}

#[test]
fn cells_are_set_when_they_are_read_and_tensors_when_all_is_finished() {
    let (owner, blob) = small();
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    let slots = reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect("room");
    assert_eq!((slots, owner.calls()), (in_cells([&[3, 4, 5]]), vec![]));
    reader.rewind();
    let bytes = owner.bytes_of(1);
    assert_eq!(reader.read_kv_cache(owner.view()).expect("a section"), in_cells([&[3, 4, 5]]));
    assert_eq!(owner.calls(), [Call::Apply { stream: 0, seq: Some(1), cells: vec![3, 4, 5] }]);
    assert_eq!((owner.positions(1), owner.bytes_of(1)), (vec![4, 5, 6], bytes));
    reader.finish().expect("the batch");
    assert_eq!(owner.bytes_of(1), owner.bytes_of(2));
    owner.write(0, 3, &owner.read(0, 0));
    reader.finish().expect("there is nothing left");
    assert_eq!(owner.read(0, 3), owner.read(0, 0), "nothing is copied twice");
}

#[test]
fn a_reader_that_is_dropped_leaves_the_tensors_alone() {
    let (owner, blob) = small();
    let bytes = owner.bytes_of(1);
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect("room");
    reader.rewind();
    reader.read_kv_cache(owner.view()).expect("a section");
    drop(reader);
    assert_eq!(owner.bytes_of(1), bytes);
}

#[test]
fn a_section_is_read_only_as_it_was_planned() {
    let mut pair = Pair::new(3, true, &support::iswa(40, 30, 6), false);
    pair.wear();
    let blob = pair.managed(0, NONE);
    let before: Vec<_> = pair.owners.iter().map(Owner::image).collect();
    let [base, swa] = [0, 1].map(|i| move |owners: &[Owner]| owners[i].view());
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    let is_refused = |reader: &mut StateReader<'_>, view: KvView, name: &str| {
        let offset = reader.offset();
        let error = reader.read_kv_cache(view).expect_err("not as planned");
        assert_eq!(error.to_string(), format!("view: section {name} is not the next that was planned"));
        assert_eq!(reader.offset(), offset);
    };
    is_refused(&mut reader, base(&pair.owners), "base");
    reader.plan_kv_cache(&base(&pair.owners), 1, NONE, None).expect("room");
    reader.plan_kv_cache(&swa(&pair.owners), 1, NONE, None).expect("room");
    is_refused(&mut reader, base(&pair.owners), "base"); // not rewound
    reader.rewind();
    is_refused(&mut reader, swa(&pair.owners), "swa");
    is_refused(&mut reader, Owner::new("base", &kv(41), 3, true, false).view(), "base");
    is_refused(&mut reader, Owner::new("base", &kv(40), 4, true, false).view(), "base");
    assert!(pair.owners.iter().map(Owner::image).eq(before));

    reader.read_kv_cache(base(&pair.owners)).expect("the first");
    is_refused(&mut reader, base(&pair.owners), "base");
    reader.read_kv_cache(swa(&pair.owners)).expect("the second");
    is_refused(&mut reader, swa(&pair.owners), "swa");
    reader.finish().expect("the batch");
    pair.ctx.state_seq_set_data(&blob, 1, NONE).expect("a restore");
    pair.assert_same(false);
}

#[test]
fn a_plan_that_fails_consumes_nothing_and_can_be_made_again() {
    let (owner, blob) = small();
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    let error = reader.plan_kv_cache(&owner.view(), 3, NONE, None).expect_err("no such sequence");
    assert_eq!(error.to_string(), "seq_id 3 is out of range [0, 3)");
    let other = Owner::new("kv", &kv(12), 3, true, false);
    assert!(reader.plan_kv_cache(&other.view(), 1, NONE, None).is_err());
    assert_eq!(reader.offset(), 8);
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect("room");
    assert_eq!(reader.left(), 0);
}

#[test]
fn a_legacy_partial_state_is_checked_and_dropped_when_that_is_said() {
    let (owner, blob) = small();
    let before = owner.image();
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    let slots = reader.plan_kv_cache(&owner.view(), 1, PARTIAL, None).expect("nothing to read");
    assert_eq!((slots, reader.left()), (vec![vec![]], blob.len() as u64 - 8));
    reader.restart(true);
    assert_eq!(reader.offset(), 8);
    let slots = reader.plan_kv_cache(&owner.view(), 1, PARTIAL, None).expect("a section to drop");
    assert_eq!((slots, reader.left()), (vec![vec![]], 0));
    reader.rewind();
    assert_eq!(reader.read_kv_cache(owner.view()).expect("dropped"), in_cells([&[]]));
    reader.finish().expect("nothing");
    assert_eq!((reader.left(), owner.image(), owner.calls()), (0, before, vec![]));

    // It is checked all the same, and a restart forgets what was said.
    let mut reader = StateReader::of_seq(&blob[..blob.len() - 1]).expect("a state");
    reader.restart(true);
    let error = reader.plan_kv_cache(&owner.view(), 1, PARTIAL, None).expect_err("a byte is missing");
    assert_eq!(error.status(), Status::Truncated);
    reader.restart(false);
    reader.plan_kv_cache(&owner.view(), 1, PARTIAL, None).expect("nothing to read");
    assert_eq!(reader.offset(), 8);
}

#[test]
fn a_legacy_partial_state_that_llama_cpp_wrote_is_consumed() {
    let mut n = 0;
    for f in common::fixtures()
        .into_iter()
        .filter(|f| f.is_attention() && f.version() == 4 && f.is_legacy_partial())
    {
        let Some(blob) = f.blob() else { continue };
        let sections = f.sections(f.kv_size());
        let owner = |section| Owner::new("kv", section, f.sidecar.n_seq_max, f.sidecar.kv_unified, false);
        let owners: Vec<_> = sections.iter().map(owner).collect();
        let mut reader = StateReader::of_seq(&blob).expect("a state");
        reader.restart(true);
        for owner in &owners {
            reader
                .plan_kv_cache(&owner.view(), f.sidecar.seq_id, PARTIAL, None)
                .unwrap_or_else(|e| panic!("{}: {e}", f.name));
        }
        assert_eq!(reader.left(), 0, "{}", f.name);
        assert!(owners.iter().all(|owner| owner.calls().is_empty()), "{}", f.name);
        n += 1;
    }
    assert!(n > 0, "no fixture");
}

#[test]
fn a_restart_forgets_what_was_planned() {
    let (owner, blob) = small();
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect("room");
    reader.restart(false);
    assert!(reader.read_kv_cache(owner.view()).is_err());
    reader.plan_kv_cache(&owner.view(), 2, NONE, None).expect("room");
    reader.rewind();
    reader.read_kv_cache(owner.view()).expect("the second plan");
    assert_eq!(owner.calls(), [Call::Apply { stream: 0, seq: Some(2), cells: vec![6, 7, 8] }]);

    // What was read waits for no batch any more.
    let bytes = owner.bytes_of(2);
    owner.write(0, 6, &owner.read(0, 3));
    let changed = owner.bytes_of(2);
    reader.restart(false);
    reader.plan_kv_cache(&owner.view(), 1, PARTIAL, None).expect("nothing to read");
    reader.rewind();
    reader.read_kv_cache(owner.view()).expect("nothing");
    reader.finish().expect("nothing");
    assert!(bytes != changed && owner.bytes_of(2) == changed);
}

#[test]
fn a_failure_of_apply_is_that_of_the_read() {
    let (owner, blob) = small();
    owner.book.borrow_mut().failing = Some("apply");
    let error = restore(&[owner], &blob, 1, NONE).expect_err("apply fails");
    assert_eq!(error.to_string(), "apply of the caller failed: 7");
    assert_eq!(error.status(), Status::Callback);
}

// Tensors behind calls

fn remote() -> (Owner, Vec<u8>) {
    let mut pair = Pair::new(3, true, &[kv(12)], true);
    pair.decode(0, 0..3);
    pair.decode(1, 0..3);
    let blob = pair.managed(0, NONE);
    (pair.owners.remove(0), blob)
}

#[test]
fn a_tensor_that_cannot_be_read_fails_the_state() {
    let (owner, blob) = remote();
    owner.memory.fail_after(0, usize::MAX);
    let owners = [owner];
    // With gaps between rows, every row of two layers' K and V is a call of its own.
    for n in 0..12 {
        owners[0].memory.fail_after(n, usize::MAX);
        let error = try_save(&owners, 0, NONE).expect_err("get fails");
        assert_eq!(error.to_string(), "get of the caller failed: 7", "call {n}");
    }
    owners[0].memory.fail_after(12, usize::MAX);
    assert!(save(&owners, 0, NONE) == blob);
}

#[test]
fn a_file_is_as_it_was_if_a_tensor_cannot_be_read() {
    let (owner, _) = remote();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("file");
    std::fs::write(&path, b"before").expect("a file");
    let view = owner.view();
    let mut writer = StateWriter::new(0);
    writer.write_kv_cache(&view, NONE).expect("a section");
    owner.memory.fail_after(5, usize::MAX);
    let error = writer.save_file(&path, &[1], true).expect_err("get fails");
    assert_eq!(error.to_string(), "get of the caller failed: 7");
    assert_eq!(std::fs::read(&path).expect("a file"), b"before");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1, "nothing lies beside it");
}

#[test]
fn a_tensor_that_cannot_be_written_fails_the_batch() {
    let (owner, blob) = remote();
    for n in 0..12 {
        let owner = owner.copy();
        owner.memory.fail_after(usize::MAX, n);
        let error = restore(&[owner], &blob, 1, NONE).expect_err("set fails");
        assert_eq!(error.to_string(), "set of the caller failed: 7", "call {n}");
    }
    owner.memory.fail_after(usize::MAX, 12);
    restore(std::slice::from_ref(&owner), &blob, 1, NONE).expect("one call for each row");
    assert_eq!(owner.bytes_of(1), owner.bytes_of(0));
}

#[test]
fn a_tensor_that_cannot_be_written_fails_the_batch_that_turns_it() {
    let blob = Pair::new(3, true, &[KvParams { v_trans: true, ..kv(12) }], true).managed_of(0..3);
    let (mut n_failed, mut owner) = (0, remote().0);
    loop {
        owner.memory.fail_after(usize::MAX, n_failed);
        match restore(std::slice::from_ref(&owner), &blob, 2, NONE) {
            Ok(_) => break,
            Err(error) => assert_eq!(error.to_string(), "set of the caller failed: 7", "call {n_failed}"),
        }
        n_failed += 1;
        owner = remote().0;
    }
    // A row that another layout was turned to is a call of its own, too.
    assert_eq!(n_failed, 12);
    assert_eq!(owner.positions(2), [0, 1, 2]);
}

#[test]
fn a_state_whose_tensors_are_elsewhere_is_planned_and_not_read() {
    each_pair(|name, pair| {
        for flags in [NONE, PARTIAL] {
            let whole = pair.managed(0, flags);
            let metadata = pair.managed(0, flags | ON_DEVICE);
            let mut reader = StateReader::of_metadata(&metadata).expect(name);
            assert_eq!(reader.tensor_bytes(), 0);
            let slots = reader.plan_kv_cache(&pair.owners[0].view(), 1, flags, None).expect(name);
            let in_place = StateReader::of_seq(&whole)
                .and_then(|mut reader| reader.plan_kv_cache(&pair.owners[0].view(), 1, flags, None));
            assert_eq!(slots, in_place.expect(name), "{name}");
            assert_eq!(reader.tensor_bytes(), (whole.len() - metadata.len()) as u64, "{name}");
            assert_eq!(reader.left(), 0, "{name}");
            reader.skip_tensor(5).expect("they are only counted");
            assert_eq!(reader.tensor_bytes(), (whole.len() - metadata.len()) as u64 + 5, "{name}");
            reader.rewind();
            assert_eq!(reader.tensor_bytes(), 0, "{name}");
            let error = reader.read_kv_cache(pair.owners[0].view()).expect_err("nothing to read");
            let text = "reader: the tensors of this state are not here: it can be planned only";
            assert_eq!(error.to_string(), text);
            let plane = Plane::allocate(&[PlaneShape::dense_rows(1)], 1).expect("memory").remove(0);
            assert_eq!(reader.read_tensor(plane).expect_err("nothing to read").to_string(), text);
            assert_eq!(pair.owners[0].calls(), []);
        }
    });
}

/// What stays on the device, with its blob.
fn keep(owner: &Owner, seq: SeqId, flags: StateFlags) -> (Vec<u8>, DeviceState) {
    let view = owner.view();
    let mut writer = StateWriter::new(seq);
    writer.write_kv_cache(&view, flags).expect("a section");
    let mut blob = vec![0xAA; usize::try_from(writer.metadata_size().expect("a size")).expect("a size")];
    let (len, state) = writer.get_on_device(&mut blob, flags | ON_DEVICE).expect("a state");
    assert_eq!(len, blob.len());
    (blob, state)
}

#[test]
fn a_state_that_stayed_behind_comes_back_with_its_tensors() {
    each_pair(|name, pair| {
        for flags in [NONE, PARTIAL] {
            let (blob, state) = keep(&pair.owners[0], 0, flags);
            // Apart from the number in the header it is what a context gives.
            let managed = pair.managed(0, flags | ON_DEVICE);
            assert!(blob[..4] == managed[..4] && blob[8..] == managed[8..], "{name}");

            let whole = pair.managed(0, flags);
            pair.ctx.state_seq_set_data(&whole, 1, flags).expect(name);
            let mut reader = StateReader::of_device(&blob, flags | ON_DEVICE, &state).expect(name);
            reader.plan_kv_cache(&pair.owners[0].view(), 1, flags, None).expect(name);
            assert_eq!((reader.left(), reader.tensor_bytes()), (0, 0), "{name}");
            reader.rewind();
            reader.read_kv_cache(pair.owners[0].view()).expect(name);
            reader.finish().expect(name);
            pair.assert_same(false);
        }
    });
}

#[test]
fn masked_cells_of_a_state_that_stayed_behind_are_dropped_if_a_plan_lacks_room() {
    let (owner, blob) = too_large();
    let large = Owner::new("kv", &standard(32, 4), 2, true, false);
    restore(std::slice::from_ref(&large), &blob, 0, NONE).expect("room");
    let (blob, state) = keep(&large, 0, NONE);
    let mut reader = StateReader::of_device(&blob, ON_DEVICE, &state).expect("a state");
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect("room for the window");
    reader.rewind();
    reader.read_kv_cache(owner.view()).expect("a section");
    reader.finish().expect("the batch");
    assert_eq!(owner.positions(1), (4..20).collect::<Vec<_>>());
    assert!(owner.bytes_of(1) == large.bytes_of(0)[4..]);
}

#[test]
fn a_state_that_stayed_behind_is_refused_for_another_blob() {
    let (owner, whole) = small();
    let (blob, state) = keep(&owner, 2, NONE);
    let (later, _) = keep(&owner, 2, NONE);
    let mut damaged = blob.clone();
    damaged[16] ^= 1;
    for (blob, flags, reason) in [
        (&later, ON_DEVICE, "the live one is older than the blob"),
        (&blob, ON_DEVICE | PARTIAL, "the live one was taken with other flags"),
        (&damaged, ON_DEVICE, "the blob is not the one that was given out"),
    ] {
        let error = StateReader::of_device(blob, flags, &state).expect_err("another state");
        assert_eq!(error.to_string(), format!("no device state of sequence 2: {reason}"));
    }
    let error = StateReader::of_device(&whole, ON_DEVICE, &state).expect_err("another state");
    assert_eq!(error.status(), Status::NoDeviceState, "{error}");
}

#[test]
fn nothing_stays_behind_of_a_whole_context_or_if_the_buffer_is_too_small() {
    let (owner, _) = small();
    let view = owner.view();
    let error = StateWriter::new(-1).get_on_device(&mut [0; 64], ON_DEVICE).expect_err("a whole context");
    assert_eq!(error.to_string(), "seq_id: -1, a whole context has no ON_DEVICE state");
    let mut writer = StateWriter::new(0);
    writer.write_kv_cache(&view, NONE).expect("a section");
    let size = usize::try_from(writer.metadata_size().expect("a size")).expect("a size");
    let mut out = vec![0xAA; size - 1];
    let error = writer.get_on_device(&mut out, ON_DEVICE).expect_err("a byte is missing");
    let text = format!("buffer too small: the state has {size} bytes, the buffer {}", size - 1);
    assert_eq!(error.to_string(), text);
    assert!(out.iter().all(|&byte| byte == 0xAA));
}

// In turns

#[test]
fn input_that_fails_leaves_an_empty_destination_and_others_untouched() {
    let (owner, blob) = small();
    let mut n_calls = usize::MAX;
    for calls_left in 0.. {
        let owner = owner.copy();
        let others = [0, 2].map(|seq| (owner.cells_of(seq), owner.bytes_of(seq)));
        let cells = owner.cells_of(1);
        let mut turns = Turns { calls_left, ..Turns::new(&blob, &owner) };
        let Err(error) = owner.view().state_read_sinfo(&mut turns, 1, NONE, None) else {
            n_calls = calls_left;
            break;
        };
        let text = error.to_string();
        assert!(
            text == "read of the caller failed: 7" || text == "read_tensor of the caller failed: 7",
            "{text}"
        );
        assert_eq!(owner.calls().last(), Some(&Call::Clear { seq: Some(1) }), "call {calls_left}");
        assert!(owner.cells_of(1).is_empty(), "call {calls_left}");
        let zeroes = |bytes: Vec<Vec<u8>>| bytes.concat().iter().all(|&byte| byte == 0);
        assert!(cells.iter().all(|&cell| zeroes(owner.read(0, cell))), "call {calls_left}");
        assert_eq!([0, 2].map(|seq| (owner.cells_of(seq), owner.bytes_of(seq))), others, "call {calls_left}");
    }
    // Counts, 6 words a cell, the header of the data, type and size of each tensor, and its rows one by one.
    assert_eq!(n_calls, 2 + 3 * 6 + 4 + 4 * 2 + 4 * 3);
}

#[test]
fn input_that_fails_leaves_an_empty_cache_if_all_was_to_be_replaced() {
    let (owner, _) = small();
    let blob = save(std::slice::from_ref(&owner), -1, NONE);
    for calls_left in [0, 1, 40, 60, 100] {
        let owner = owner.copy();
        let mut turns = Turns { calls_left, offset: 9, ..Turns::new(&blob, &owner) };
        owner.view().state_read_sinfo(&mut turns, -1, NONE, None).expect_err("the input fails");
        let Image { cells, heads, bytes } = owner.image();
        assert!(cells.concat().iter().all(Option::is_none), "call {calls_left}");
        assert_eq!(heads, [0], "call {calls_left}");
        assert!(bytes.concat().concat().iter().all(|&byte| byte == 0), "call {calls_left}");
    }
}

#[test]
fn the_reason_is_that_of_the_input_even_if_clear_fails_too() {
    let (owner, blob) = small();
    owner.book.borrow_mut().failing = Some("clear");
    let mut turns = Turns { calls_left: 3, ..Turns::new(&blob, &owner) };
    let error = owner.view().state_read_sinfo(&mut turns, 1, NONE, None).expect_err("the input fails");
    assert_eq!(error.to_string(), "read of the caller failed: 7");
}

#[test]
fn damaged_bytes_in_turns_end_in_an_error_or_a_state_and_touch_no_other_sequence() {
    let (owner, blob) = small();
    for at in 8..blob.len() {
        for xor in [1, 0x80, 0xff] {
            let owner = owner.copy();
            let others = [0, 2].map(|seq| (owner.cells_of(seq), owner.bytes_of(seq)));
            let mut damaged = blob.clone();
            damaged[at] ^= xor;
            let planned = plan(&owner, &damaged, 1, None);
            let read = in_turns(&owner, &damaged, 1, None);
            assert_eq!(read.is_ok(), planned.is_ok(), "byte {at} xor {xor:#x}: {read:?}");
            assert_eq!(owner.cells_of(1).len(), if read.is_ok() { 3 } else { 0 }, "byte {at} xor {xor:#x}");
            assert_eq!([0, 2].map(|seq| (owner.cells_of(seq), owner.bytes_of(seq))), others);
        }
    }
}

#[test]
fn a_sequence_out_of_range_is_refused_before_anything_is_cleared() {
    let (owner, blob) = small();
    for seq_id in [3, -2, 256] {
        let error = in_turns(&owner, &blob, seq_id, None).expect_err("no such sequence");
        assert_eq!(error.to_string(), format!("seq_id {seq_id} is out of range [0, 3)"));
        let error = try_save(std::slice::from_ref(&owner), seq_id, NONE).expect_err("no such sequence");
        assert_eq!(error.to_string(), format!("seq_id {seq_id} is out of range [0, 3)"));
    }
    assert_eq!(owner.calls(), []);
}

// Placement

/// 20 cells of a window of 4, for a cache of 16.
fn too_large() -> (Owner, Vec<u8>) {
    let mut pair = Pair::of(2, standard(32, 4));
    pair.decode(0, 0..20);
    (Owner::new("kv", &standard(16, 4), 2, true, false), pair.managed(0, NONE))
}

#[test]
fn masked_cells_of_a_state_are_dropped_oldest_first_if_a_plan_lacks_room() {
    let (owner, blob) = too_large();
    assert_eq!(
        plan(&owner, &blob, 1, None).expect("room for the window"),
        vec![(0..16).collect::<Vec<u32>>()]
    );
    assert_eq!(restore(std::slice::from_ref(&owner), &blob, 1, NONE).expect("room"), blob.len());
    assert_eq!(owner.positions(1), (4..20).collect::<Vec<_>>());
    let toks: Vec<Tok> = (4..20).map(|pos| Tok::new(0, pos)).collect();
    let bytes: Vec<Vec<Vec<u8>>> = toks
        .iter()
        .map(|tok| {
            [8, 8, 4, 4].iter().enumerate().map(|(i, &n)| support::token_bytes(tok, 0, i, n)).collect()
        })
        .collect();
    assert_eq!(owner.bytes_of(1), bytes, "the cells that are kept have their own bytes");
}

#[test]
fn nothing_is_dropped_in_turns_or_if_the_tensors_are_elsewhere() {
    let (owner, blob) = too_large();
    let text = "failed to find 20 available cells in kv cache: 16 of 16 can be used (section kv, stream 0)";
    assert_eq!(in_turns(&owner, &blob, 1, None).expect_err("no room").to_string(), text);
    // A state that the cache could hold, if it were not for cells that others see.
    let mut pair = Pair::of(2, standard(16, 4));
    pair.decode(0, 0..14);
    let blob = pair.managed(0, NONE);
    pair.rm(0, 3, -1);
    let error = in_turns(&pair.owners[0], &blob, 1, None).expect_err("no room");
    assert_eq!(error.to_string(), text.replace("20 avail", "14 avail").replace(": 16 of", ": 13 of"));
    assert_eq!(plan(&pair.owners[0], &blob, 1, None).expect("room for the window")[0].len(), 13);

    let mut pair = Pair::of(2, standard(32, 4));
    pair.decode(0, 0..20);
    let metadata = pair.managed(0, ON_DEVICE);
    let mut reader = StateReader::of_metadata(&metadata).expect("a state");
    let error = reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect_err("no room");
    assert_eq!(error.to_string(), text);
}

#[test]
fn masked_cells_of_others_are_taken_with_all_their_older_positions() {
    let mut source = Pair::of(2, standard(16, 6));
    source.decode(1, 2..8);
    let blob = source.managed(1, NONE);
    let mut pair = Pair::of(2, standard(16, 6));
    pair.decode(0, 0..12);
    pair.ctx.state_seq_set_data(&blob, 1, NONE).expect("room");
    let slots = in_turns(&pair.owners[0], &blob, 1, None).expect("room");
    assert_eq!(slots, in_cells([&[0, 1, 12, 13, 14, 15]]));
    assert_eq!(pair.owners[0].positions(0), (2..12).collect::<Vec<_>>());
    pair.assert_same(false);
}

#[test]
fn a_plan_that_takes_masked_cells_of_others_is_stale_once_they_hold_something_else() {
    let mut source = Pair::of(2, standard(16, 6));
    source.decode(1, 2..8);
    let blob = source.managed(1, NONE);
    let mut pair = Pair::of(2, standard(16, 6));
    pair.decode(0, 0..12);
    let owner = &pair.owners[0];
    let mut reader = StateReader::of_seq(&blob).expect("a state");
    reader.plan_kv_cache(&owner.view(), 1, NONE, None).expect("room");
    reader.rewind();
    let hold = |pos| owner.book.borrow_mut().cells[0][1].as_mut().expect("a used cell").0.pos = pos;
    hold(12);
    let error = reader.read_kv_cache(owner.view()).expect_err("cell 1 is inside the window now");
    assert_eq!((error.status(), owner.calls()), (Status::Stale, vec![]));
    hold(1);
    reader.read_kv_cache(owner.view()).expect("as planned");
    reader.finish().expect("the batch");
    assert_eq!(owner.cells_of(1), [0, 1, 12, 13, 14, 15]);
}

#[test]
fn a_state_of_other_streams_is_told_by_the_stream_it_names() {
    let mut pair = Pair::new(4, false, &[kv(8)], false);
    pair.decode(2, 0..3);
    let blob = pair.managed(2, NONE);
    let unified = Owner::new("kv", &kv(8), 4, true, false);
    assert_eq!(plan(&unified, &blob, 1, None).expect("room"), in_cells([&[], &[], &[0, 1, 2]]));
    let given = vec![vec![], vec![], vec![4, 5, 6], vec![]];
    assert_eq!(plan(&unified, &blob, 1, Some(&given)).expect("room")[2], given[2]);
    assert_eq!(in_turns(&unified, &blob, 1, Some(&given)).expect("room")[2], given[2]);
    let error = plan(&unified, &blob, 1, Some(&vec![vec![4, 5, 6]])).expect_err("another stream");
    assert_eq!(error.to_string(), "mirrored slot layout: the state has 3, the cache 0 (section kv)");
}

#[test]
fn an_empty_sequence_empties_its_destination() {
    let (owner, _) = small();
    owner.book.borrow_mut().rm(0, Some(owner.seq(0)), PosRange::ALL);
    let blob = save(std::slice::from_ref(&owner), 0, NONE);
    assert_eq!(blob.len(), 16);
    let turned = owner.copy();
    restore(std::slice::from_ref(&owner), &blob, 1, NONE).expect("an empty state");
    assert_eq!(in_turns(&turned, &blob, 1, None).expect("an empty state"), in_cells([&[]]));
    for owner in [owner, turned] {
        assert_eq!(owner.calls(), [Call::Apply { stream: 0, seq: Some(1), cells: vec![] }]);
        assert_eq!((owner.cells_of(1), owner.cells_of(2)), (vec![], vec![6, 7, 8]));
    }
}

#[test]
fn a_shared_view_writes_and_reads_nothing() {
    let (owner, blob) = small();
    let view = owner.view().shared();
    for flags in [NONE, PARTIAL] {
        for seq in [-1, 0, 2] {
            let mut tape = Tape { owner: &owner, bytes: Vec::new() };
            view.state_write(&mut tape, seq, flags).expect("nothing");
            assert!(tape.bytes.is_empty());
        }
        let mut turns = Turns { calls_left: 0, ..Turns::new(&blob, &owner) };
        let slots = owner.view().shared().state_read_sinfo(&mut turns, 1, flags, None).expect("nothing");
        assert_eq!(slots, in_cells([&[]]));
        for legacy_partial in [false, true] {
            let mut reader = StateReader::of_seq(&blob).expect("a state");
            reader.restart(legacy_partial);
            assert_eq!(reader.plan_kv_cache(&view, 1, flags, None).expect("nothing"), in_cells([&[]]));
            reader.rewind();
            assert_eq!(reader.read_kv_cache(owner.view().shared()).expect("nothing"), in_cells([&[]]));
            assert_eq!(reader.offset(), 8);
        }
    }
    assert_eq!(owner.calls(), []);
}

#[test]
fn a_pending_shift_does_not_change_what_is_saved() {
    let (owner, blob) = small();
    for (_, shift) in owner.book.borrow_mut().cells[0].iter_mut().flatten() {
        *shift = 3;
    }
    assert!(save(std::slice::from_ref(&owner), 2, NONE) == blob);
}

// Owners that lie

#[test]
fn what_a_visit_tells_is_checked() {
    let (owner, blob) = small();
    let lies = |cells: &[(u32, Pos, &[usize])]| {
        let told = cells.iter().map(|&(cell, pos, seq_ids)| {
            let mut words = [0; 4];
            for &seq_id in seq_ids {
                words[seq_id / 64] |= 1 << (seq_id % 64);
            }
            let meta = CellMeta { pos, ext: CellExt::default(), seqs: SeqSet::from_words(words) };
            ViewCell { cell, meta, shift: 0 }
        });
        owner.book.borrow_mut().lie = Some(told.collect());
        [
            try_save(std::slice::from_ref(&owner), 2, NONE).expect_err("a lie").to_string(),
            // The whole stream is visited for a search, whoever is named.
            plan(&owner, &blob, 1, None).map_or_else(|error| error.to_string(), |_| String::new()),
        ]
    };
    let all: Vec<(u32, Pos, &[usize])> = (0..12).map(|cell| (cell, 0, &[2][..])).collect();
    for (told, text) in [
        (vec![(12, 0, &[2][..])], "kv.visit: cell 12 is out of range [0, 12)"),
        (vec![(u32::MAX, 0, &[2])], "kv.visit: cell 4294967295 is out of range [0, 12)"),
        (vec![(5, 0, &[2]), (4, 0, &[2]), (5, 1, &[2])], "kv.visit: cell 5 was visited twice"),
        (vec![(5, -1, &[2])], "kv.visit: cell 5 has position -1, used cells have at least 0"),
        (vec![(5, Pos::MIN, &[2])], "kv.visit: cell 5 has position -2147483648, used cells have at least 0"),
        (vec![(5, 0, &[2, 3])], "kv.visit: cell 5 has none, or not only, of the 3 sequences of the cache"),
        (vec![(5, 0, &[2, 255])], "kv.visit: cell 5 has none, or not only, of the 3 sequences of the cache"),
        ([&all[..], &all[..1]].concat(), "kv.visit: cell 0 is one more than the 12 cells of the stream"),
    ] {
        assert_eq!(lies(&told), [text, text], "{told:?}");
    }
    let text = "kv.visit: cell 5 does not belong to the sequence that is visited";
    assert_eq!(lies(&[(5, 0, &[1])]), [text, ""]);
    let nobody = "kv.visit: cell 5 has none, or not only, of the 3 sequences of the cache";
    assert_eq!(lies(&[(5, 0, &[])]), [text, nobody]);
    assert_eq!(owner.calls(), []);
}

#[test]
fn a_visit_that_fails_fails_the_call() {
    let (owner, blob) = small();
    owner.book.borrow_mut().failing = Some("visit");
    let error = try_save(std::slice::from_ref(&owner), 2, NONE).expect_err("visit fails");
    assert_eq!(error.to_string(), "visit of the caller failed: 7");
    assert_eq!(plan(&owner, &blob, 1, None).expect_err("visit fails").status(), Status::Callback);
    assert_eq!(owner.calls(), []);
}

// The two ways in, against a managed cache

/// What happens to both. Sequences are taken modulo `n_seq_max`.
#[derive(Clone, Debug)]
enum Op {
    Decode { seq: SeqId, shared_with: Option<SeqId>, n: Pos, patches: Pos },
    Rm { seq: SeqId, p0: Pos, p1: Pos },
    Cp { src: SeqId, dst: SeqId, p0: Pos, p1: Pos },
    Restore { src: SeqId, dest: SeqId, partial: bool, in_turns: bool },
    Whole { in_turns: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let seq = || 0_i32..4;
    prop_oneof![
        6 => (seq(), proptest::option::weighted(0.2, seq()), 1_i32..9, select(vec![1, 1, 1, 3]))
            .prop_map(|(seq, shared_with, n, patches)| Op::Decode { seq, shared_with, n, patches }),
        3 => (seq(), -1_i32..16, -1_i32..16).prop_map(|(seq, p0, p1)| Op::Rm { seq, p0, p1 }),
        1 => (seq(), seq(), -1_i32..8, -1_i32..16).prop_map(|(src, dst, p0, p1)| Op::Cp { src, dst, p0, p1 }),
        6 => (seq(), seq(), any::<bool>(), any::<bool>())
            .prop_map(|(src, dest, partial, in_turns)| Op::Restore { src, dest, partial, in_turns }),
        1 => any::<bool>().prop_map(|in_turns| Op::Whole { in_turns }),
    ]
}

/// One section of any kind, or full attention and a window.
fn sections() -> impl Strategy<Value = Vec<KvParams>> {
    (4_u32..30, 4_u32..30, any::<bool>(), any::<prop::sample::Index>(), any::<prop::sample::Index>())
        .prop_map(|(base, swa, two, i, j)| {
            let (full, windows): (Vec<_>, Vec<_>) =
                geometries(base).into_iter().map(|(_, kv)| kv).partition(|kv| kv.swa.is_none());
            let window = || KvParams { kv_size: swa, cell_ext: false, ..j.get(&windows).clone() };
            let one = || i.get(&[&full[..], &windows].concat()).clone();
            if two {
                vec![KvParams { cell_ext: false, ..i.get(&full).clone() }, window()]
            } else {
                vec![one()]
            }
        })
}

impl Pair {
    fn run(&mut self, op: &Op) {
        let n = self.ctx.n_seq_max().cast_signed();
        match *op {
            Op::Decode { seq, shared_with, n: n_tokens, patches } => {
                let mut seqs = vec![seq % n];
                seqs.extend(shared_with.map(|s| s % n).filter(|&s| s != seqs[0] && self.ctx.n_stream() == 1));
                let next = seqs.iter().map(|&s| self.ctx.seq_pos_max(s).unwrap() + 1).max().unwrap();
                let tok = |i: Pos| {
                    let ext = CellExt { x: i % patches, y: i % 3, tok: next + i };
                    Tok { pos: next + i / patches, ext, seqs: seqs.clone() }
                };
                // A full cache takes no more.
                let _ = self.try_decode(&(0..n_tokens * patches).map(tok).collect::<Vec<_>>());
            }
            Op::Rm { seq, p0, p1 } => self.rm(seq % n, p0, p1),
            Op::Cp { src, dst, p0, p1 } if self.ctx.n_stream() == 1 => self.cp(src % n, dst % n, p0, p1),
            Op::Cp { .. } => {}
            Op::Restore { src, dest, partial, in_turns } => {
                self.restore_both(src % n, dest % n, if partial { PARTIAL } else { NONE }, in_turns);
            }
            Op::Whole { in_turns } => {
                let blob = self.managed_whole();
                assert!(save(&self.owners, -1, NONE) == blob, "the whole context is written otherwise");
                self.ctx.state_set_data(&blob).unwrap();
                if in_turns {
                    let mut turns = Turns { offset: 9, ..Turns::new(&blob, &self.owners[0]) };
                    for owner in &self.owners {
                        read_in_turns(&mut turns, owner, -1, NONE).unwrap();
                    }
                    assert_eq!(turns.offset, blob.len());
                } else {
                    assert_eq!(restore(&self.owners, &blob, -1, NONE).unwrap(), blob.len());
                }
                self.assert_same(true);
                self.take_bytes();
            }
        }
    }

    fn restore_both(&mut self, src: SeqId, dest: SeqId, flags: StateFlags, in_turns: bool) {
        let blob = self.managed(src, flags);
        assert!(save(&self.owners, src, flags) == blob, "sequence {src} is written otherwise");
        let written: Vec<KvParams> = self
            .owners
            .iter()
            .map(|owner| owner.kv.clone())
            .filter(|kv| flags == NONE || !kv.swa.is_none())
            .collect();
        let n_cells: Vec<usize> = support::blob_positions(&blob, &written).iter().map(Vec::len).collect();

        let turned: Vec<Owner> = self.owners.iter().map(Owner::copy).collect();
        let mut turns = Turns::new(&blob, &turned[0]);
        let read: Vec<_> = turned.iter().map(|owner| read_in_turns(&mut turns, owner, dest, flags)).collect();

        let managed = self.ctx.state_seq_set_data(&blob, dest, flags);
        let held: Vec<usize> = self
            .owners
            .iter()
            .enumerate()
            .filter(|(_, owner)| flags == NONE || !owner.kv.swa.is_none())
            .map(|(section, _)| support::positions(&self.ctx, section, dest).len())
            .collect();
        match managed {
            Err(managed) => {
                let error = refused(&self.owners, &blob, dest, flags);
                assert_eq!(error.to_string(), managed.to_string());
                assert!(read.iter().any(Result::is_err), "in turns it fits");
            }
            // All of the state fits, so nothing had to be dropped, which is not done in turns.
            Ok(_) if held == n_cells && in_turns => {
                assert!(read.iter().all(Result::is_ok), "in turns: {read:?}");
                assert_eq!(turns.offset, blob.len());
                self.owners = turned;
            }
            Ok(n) => assert_eq!(restore(&self.owners, &blob, dest, flags).unwrap(), n),
        }
        self.assert_same(false);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        max_shrink_iters: 1000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_view_and_a_managed_cache_stay_the_same(
        sections in sections(),
        n_seq_max in 1_u32..5,
        unified in any::<bool>(),
        remote in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..20),
    ) {
        let mut pair = Pair::new(n_seq_max, unified, &sections, remote);
        for op in &ops {
            pair.run(op);
        }
    }
}
