//! Save, restore, save again: over geometries, types, streams, fragmentation, windows and ways.
//!
//! The oracle knows the masking rules and counts cells; which cell a token gets is left to the library.

mod support;

use kvstate::cells::SeqSet;
use kvstate::error::Error;
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams};
use kvstate::types::{CellExt, Pos, Seq, SeqId, StateFlags, Swa, SwaType};
use kvstate::{Context, ContextParams};
use proptest::prelude::*;
use proptest::sample::select;
use support::{Held, Image, NONE, ON_DEVICE, Tok, held, image, kv_size, stream_of, tensor};

/// A context that can be built more than once.
#[derive(Clone, Debug)]
struct Setup {
    n_seq_max: u32,
    unified: bool,
    sections: Vec<KvParams>,
    max_masked_cells: Option<u32>,
}

impl Setup {
    fn context(&self) -> Context {
        let params = support::params(self.n_seq_max, &self.sections);
        let Self { unified, max_masked_cells, .. } = *self;
        support::place::context(ContextParams { unified, max_masked_cells, arch: "llama".into(), ..params })
            .unwrap()
    }
}

/// What happens to a context before the save. Sequences are taken modulo `n_seq_max`.
#[derive(Clone, Debug)]
enum Op {
    /// A ubatch of `n` tokens behind the end, every `step`-th position, each `patches` times.
    Decode {
        seq: SeqId,
        shared_with: Option<SeqId>,
        n: Pos,
        step: Pos,
        patches: Pos,
    },
    Rm {
        seq: SeqId,
        p0: Pos,
        p1: Pos,
    },
    Cp {
        src: SeqId,
        dst: SeqId,
        p0: Pos,
        p1: Pos,
    },
}

/// How a state travels.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Bytes,
    File,
    Device,
}

#[derive(Clone, Debug)]
struct Case {
    from: Setup,
    from_ops: Vec<Op>,
    /// Another context; `None`: restore into the same.
    to: Option<(Setup, Vec<Op>)>,
    src: SeqId,
    dest: SeqId,
    flags: StateFlags,
    way: Way,
}

fn tensors(v_trans: bool) -> impl Strategy<Value = LayerParams> {
    let types = |quantized: bool| {
        select(GgmlType::KV.into_iter().filter(|t| quantized || !t.is_quantized()).collect::<Vec<_>>())
    };
    let k = (types(true), 1_u32..4).prop_map(|(t, n)| tensor(t, n * t.block_size()));
    let v = (types(!v_trans), 1_u32..4).prop_map(|(t, n)| tensor(t, n * t.block_size()));
    (k, proptest::option::weighted(0.9, v)).prop_map(|(k, v)| LayerParams { k, v })
}

fn window() -> impl Strategy<Value = Swa> {
    let types = select(vec![SwaType::Standard, SwaType::Chunked, SwaType::Symmetric]);
    (types, 1_u32..9).prop_map(|(swa_type, n_swa)| Swa::new(swa_type, n_swa).unwrap())
}

fn section(cell_ext: bool, v_trans: bool) -> impl Strategy<Value = KvParams> {
    let rotations = select(vec![0_u32, 64]);
    (4_u32..40, proptest::collection::vec(tensors(v_trans), 0..3), rotations.clone(), rotations).prop_map(
        move |(kv_size, layers, n_rot_k, n_rot_v)| KvParams {
            layers,
            v_trans,
            n_rot_k,
            n_rot_v,
            cell_ext,
            ..support::kv(kv_size)
        },
    )
}

/// Full attention, a windowed cache, or an iSWA pair.
fn sections() -> impl Strategy<Value = Vec<KvParams>> {
    (any::<bool>(), any::<bool>()).prop_flat_map(|(ext, v_trans)| {
        let kv = || section(ext, v_trans);
        prop_oneof![
            kv().prop_map(|kv| vec![kv]),
            (kv(), window()).prop_map(|(kv, swa)| vec![KvParams { swa, ..kv }]),
            (kv(), kv(), window()).prop_map(|(base, kv, swa)| vec![base, KvParams { swa, ..kv }]),
        ]
    })
}

fn setup() -> impl Strategy<Value = Setup> {
    let max_masked_cells = proptest::option::weighted(0.2, 0_u32..6);
    (1_u32..5, any::<bool>(), sections(), max_masked_cells).prop_map(
        |(n_seq_max, unified, sections, max_masked_cells)| Setup {
            n_seq_max,
            unified,
            sections,
            max_masked_cells,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let seq = || 0_i32..4;
    prop_oneof![
        5 => (seq(), proptest::option::weighted(0.2, seq()), 1_i32..9, 1_i32..3, select(vec![1, 1, 1, 3]))
            .prop_map(|(seq, shared_with, n, step, patches)| Op::Decode { seq, shared_with, n, step, patches }),
        2 => (seq(), -1_i32..16, -1_i32..16).prop_map(|(seq, p0, p1)| Op::Rm { seq, p0, p1 }),
        1 => (seq(), seq(), -1_i32..8, -1_i32..16).prop_map(|(src, dst, p0, p1)| Op::Cp { src, dst, p0, p1 }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op(), 1..14)
}

/// The same model in another context: other sizes, streams and sequences.
fn sibling(from: Setup) -> impl Strategy<Value = Setup> {
    let sizes = proptest::collection::vec(3_u32..40, from.sections.len());
    (sizes, any::<bool>(), 1_u32..5).prop_map(move |(sizes, unified, n_seq_max)| {
        let mut to = Setup { n_seq_max, unified, ..from.clone() };
        for (section, size) in to.sections.iter_mut().zip(sizes) {
            section.kv_size = size;
        }
        to
    })
}

fn case() -> impl Strategy<Value = Case> {
    let from = (setup(), ops(), any::<bool>());
    let way = select(vec![Way::Bytes, Way::Bytes, Way::Bytes, Way::File, Way::Device]);
    let how = (0_i32..4, 0_i32..4, any::<bool>(), way);
    (from, how).prop_flat_map(|((from, from_ops, same), (src, dest, partial, way))| {
        let to = if same || way == Way::Device {
            Just(None).boxed()
        } else {
            (sibling(from.clone()), ops()).prop_map(Some).boxed()
        };
        let flags = if partial && way != Way::File { StateFlags::PARTIAL_ONLY } else { NONE };
        let flags = if way == Way::Device { flags | ON_DEVICE } else { flags };
        to.prop_map(move |to| {
            let (from, from_ops) = (from.clone(), from_ops.clone());
            let n_seq_max = to.as_ref().map_or(from.n_seq_max, |(setup, _)| setup.n_seq_max).cast_signed();
            let src = src % from.n_seq_max.cast_signed();
            Case { from, from_ops, to, src, dest: dest % n_seq_max, flags, way }
        })
    })
}

fn run(ctx: &mut Context, ops: &[Op]) {
    let n = ctx.n_seq_max().cast_signed();
    for op in ops {
        match *op {
            Op::Decode { seq, shared_with, n: n_tokens, step, patches } => {
                let seq = seq % n;
                let mut seqs = vec![seq];
                seqs.extend(shared_with.map(|s| s % n).filter(|&s| s != seq && ctx.n_stream() == 1));
                let next = seqs.iter().map(|&s| ctx.seq_pos_max(s).unwrap() + 1).max().unwrap();
                let mut toks = Vec::new();
                for i in 0..n_tokens {
                    let pos = next + i * step;
                    toks.extend((0..patches).map(|x| {
                        let ext = CellExt { x, y: pos % 3, tok: pos + 7 };
                        Tok { pos, ext, seqs: seqs.clone() }
                    }));
                }
                // A full cache takes no more.
                let _ = support::try_decode(ctx, &toks);
            }
            Op::Rm { seq, p0, p1 } => assert!(ctx.seq_rm(seq % n, p0, p1).unwrap()),
            Op::Cp { src, dst, p0, p1 } => {
                // Between streams a part is refused.
                let _ = ctx.seq_cp(src % n, dst % n, p0, p1);
            }
        }
    }
}

// The rules, once more

fn masked(swa: Swa, p0: Pos, p1: Pos) -> bool {
    let n_swa = swa.n_swa().cast_signed();
    match swa.swa_type() {
        SwaType::None => false,
        SwaType::Standard => p1 - p0 >= n_swa,
        SwaType::Chunked => p0 < (p1 / n_swa) * n_swa,
        SwaType::Symmetric => p1 - p0 > n_swa / 2 || p1 - p0 < -(n_swa / 2),
    }
}

/// What a state holds of a section's sequence, by position; `None`: the section writes nothing.
fn saved(setup: &Setup, section: usize, all: &[Held], flags: StateFlags) -> Option<Vec<Held>> {
    let swa = setup.sections[section].swa;
    let partial = flags.contains(StateFlags::PARTIAL_ONLY);
    if partial && swa.is_none() {
        return None;
    }
    let pos_max = all.last().map_or(0, |held| held.pos);
    let (old, mut kept): (Vec<Held>, Vec<Held>) =
        all.iter().cloned().partition(|held| masked(swa, held.pos, pos_max));
    let bound = if partial { 0 } else { setup.max_masked_cells.map_or(usize::MAX, |n| n as usize) };
    let mut n_kept = 0;
    for position in old.chunk_by(|a, b| a.pos == b.pos).rev() {
        if n_kept + position.len() > bound {
            break;
        }
        n_kept += position.len();
        kept.extend_from_slice(position);
    }
    kept.sort();
    Some(kept)
}

#[derive(Debug, PartialEq)]
enum Fate {
    Skipped,
    /// `purging`: masked cells of other sequences are needed.
    Restored {
        kept: Vec<Held>,
        purging: bool,
    },
    TooSmall,
}

fn fate(to: &Context, swa: Swa, section: usize, dest: SeqId, state: Option<&[Held]>) -> Fate {
    let Some(state) = state else { return Fate::Skipped };
    let stream = stream_of(to, dest);
    let (mut n_free, mut n_reusable) = (0, 0);
    for cell in 0..kv_size(to, section) {
        let meta = to.cell(section, stream, cell).unwrap().map(|(meta, _)| meta);
        let others: Vec<SeqId> =
            meta.iter().flat_map(|meta| meta.seqs.iter()).map(Seq::id).filter(|&s| s != dest).collect();
        match (meta, &others[..]) {
            (_, []) => n_free += 1,
            (Some(meta), &[other]) => {
                let pos_max = held(to, section, other).last().unwrap().pos;
                n_reusable += usize::from(masked(swa, meta.pos, pos_max + 1));
            }
            _ => {}
        }
    }
    let pos_max = state.last().map_or(0, |held| held.pos);
    let mut kept = state;
    while kept.len() > n_free && masked(swa, kept[0].pos, pos_max) {
        kept = &kept[kept.iter().take_while(|held| held.pos == kept[0].pos).count()..];
    }
    if kept.len() > n_free + n_reusable {
        return Fate::TooSmall;
    }
    Fate::Restored { kept: kept.to_vec(), purging: kept.len() > n_free }
}

fn without(mut seqs: SeqSet, dest: SeqId) -> SeqSet {
    seqs.iter().filter(|s| s.id() == dest).for_each(|s| seqs.remove(s));
    seqs
}

/// The other sequences' cells are where they were, with what they held.
fn assert_others_untouched(before: &Image, after: &Image, section: usize, dest: SeqId) {
    for (at, old) in before.cells.iter().filter(|(at, _)| at.0 == section) {
        let Some((meta, shift)) = old.meta else { continue };
        let others = without(meta.seqs, dest);
        if others.is_empty() {
            continue;
        }
        let new = &after.cells[at];
        let (new_meta, new_shift) = new.meta.expect("a cell of another sequence is gone");
        assert_eq!(
            (new_meta.pos, new_meta.ext, new_meta.seqs, new_shift),
            (meta.pos, meta.ext, others, shift)
        );
        assert!(new.bytes == old.bytes, "{at:?} holds other bytes");
    }
}

/// A restore that takes cells of others leaves none empty that was empty or the destination's own.
fn assert_empty_cells_first(before: &Image, after: &Image, section: usize, stream: usize, dest: SeqId) {
    let own = |image: &Image, at| {
        let seqs = image.cells[at].meta.map_or(SeqSet::EMPTY, |(meta, _)| meta.seqs);
        (without(seqs, dest).is_empty(), !seqs.is_empty())
    };
    for at in before.cells.keys().filter(|at| (at.0, at.1) == (section, stream)) {
        if own(before, at).0 {
            assert_eq!(own(after, at), (true, true), "{at:?} is left empty while others lose cells");
        }
    }
}

/// Others have lost masked cells at most, oldest first, and no position in part.
fn assert_others_purged(to: &Context, swa: Swa, before: &[Vec<Held>], section: usize, dest: SeqId) {
    for (seq, old) in (0..).zip(before).filter(|&(seq, _)| seq != dest) {
        let new = held(to, section, seq);
        assert!(old.ends_with(&new), "sequence {seq} is no suffix of what it was");
        let lost = &old[..old.len() - new.len()];
        if let Some(last) = lost.last() {
            assert!(
                masked(swa, last.pos, old.last().unwrap().pos + 1),
                "sequence {seq} lost what it still sees"
            );
            assert!(new.first().is_none_or(|first| first.pos > last.pos));
        }
    }
}

fn of_all_sequences(ctx: &Context) -> Vec<Vec<Vec<Held>>> {
    let n = ctx.n_seq_max().cast_signed();
    (0..ctx.n_section()).map(|section| (0..n).map(|seq| held(ctx, section, seq)).collect()).collect()
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// The reason, without the words about the file around it.
fn reason(error: Error) -> Error {
    match error {
        Error::Restore { source, .. } => *source,
        other => other,
    }
}

/// The blob holds these tokens, section by section.
fn assert_holds<'a>(blob: &[u8], written: &[KvParams], states: impl Iterator<Item = &'a Vec<Held>>) {
    let read = support::essence(blob, written);
    for ((stream, want), kv) in read.iter().zip(states).zip(written) {
        let cells = stream.iter().flat_map(|stream| &stream.cells);
        let got: Vec<_> = cells.map(|cell| (cell.pos, cell.ext, &cell.bytes)).collect();
        let ext = |held: &Held| kv.cell_ext.then_some([held.x, held.y, held.tok]);
        let want: Vec<_> = want.iter().map(|held| (held.pos, ext(held), &held.bytes)).collect();
        let pos = |cells: &[(Pos, _, _)]| cells.iter().map(|cell| cell.0).collect::<Vec<_>>();
        assert_eq!(pos(&got), pos(&want), "the blob holds other positions than the rule says");
        assert!(got == want, "the blob holds other bytes than the tokens");
    }
}

fn round_trip(case: &Case) {
    let Case { from: setup, src, dest, flags, way, .. } = case;
    let (src, dest, flags) = (*src, *dest, *flags);
    let mut from = setup.context();
    run(&mut from, &case.from_ops);

    // The save
    let before_save = image(&from);
    let states: Vec<Option<Vec<Held>>> = (0..from.n_section())
        .map(|section| saved(setup, section, &held(&from, section, src), flags))
        .collect();
    let blob = support::save(&mut from, src, flags);
    let dir = directory();
    let path = dir.path().join("state");
    if *way == Way::File {
        let len = from.state_seq_save_file(&path, src, &[5, 6, 7]).unwrap();
        let file = std::fs::read(&path).unwrap();
        assert_eq!(len, file.len() as u64);
        assert!(file[24..] == blob[8..], "a file holds another state than memory");
    }
    assert!(image(&from) == before_save, "a save changed the context");
    let written: Vec<KvParams> =
        setup.sections.iter().zip(&states).filter(|(_, s)| s.is_some()).map(|(kv, _)| kv.clone()).collect();
    if *way != Way::Device {
        assert_holds(&blob, &written, states.iter().flatten());
    }

    // The restore
    let (setup, mut to) = match &case.to {
        Some((setup, ops)) => {
            let mut to = setup.context();
            run(&mut to, ops);
            (setup, to)
        }
        None => (setup, from),
    };
    let swa = |section: usize| setup.sections[section].swa;
    let fates: Vec<Fate> = states
        .iter()
        .enumerate()
        .map(|(section, state)| fate(&to, swa(section), section, dest, state.as_deref()))
        .collect();
    let before = image(&to);
    let tokens_before = of_all_sequences(&to);
    let restored = if *way == Way::File {
        to.state_seq_load_file(&path, dest, 3).map(|loaded| {
            assert_eq!(loaded.tokens, [5, 6, 7]);
            usize::try_from(loaded.state_end).unwrap() - 16
        })
    } else {
        to.state_seq_set_data(&blob, dest, flags)
    };

    if fates.contains(&Fate::TooSmall) {
        let error = reason(restored.expect_err("more cells than there are"));
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert!(image(&to) == before, "a refused restore changed the context");
        return;
    }
    assert_eq!(restored.expect("a restore"), blob.len());
    let after = image(&to);
    for (section, fate) in fates.iter().enumerate() {
        match fate {
            Fate::TooSmall => unreachable!("returned above"),
            Fate::Skipped => {
                let of = |image: &Image| {
                    image.cells.clone().into_iter().filter(|(at, _)| at.0 == section).collect::<Vec<_>>()
                };
                assert!(of(&before) == of(&after), "a section that the state lacks has changed");
            }
            Fate::Restored { kept, purging } => {
                assert!(held(&to, section, dest) == *kept, "section {section} holds other tokens");
                if *purging {
                    assert_others_purged(&to, swa(section), &tokens_before[section], section, dest);
                    assert_empty_cells_first(&before, &after, section, stream_of(&to, dest), dest);
                } else {
                    assert_others_untouched(&before, &after, section, dest);
                }
            }
        }
    }
    let position_section = setup.sections.iter().position(|kv| !kv.swa.is_none()).unwrap_or(0);
    let now = held(&to, position_section, dest);
    assert_eq!(to.seq_pos_min(dest).unwrap(), now.first().map_or(-1, |held| held.pos));
    assert_eq!(to.seq_pos_max(dest).unwrap(), now.last().map_or(-1, |held| held.pos));

    // The second save
    let whole = fates.iter().zip(&states).all(|(fate, state)| match fate {
        Fate::Skipped => true,
        Fate::Restored { kept, .. } => Some(kept) == state.as_ref(),
        Fate::TooSmall => false,
    });
    if whole && *way != Way::Device {
        let again = support::save(&mut to, dest, flags);
        assert!(support::essence(&again, &written) == support::essence(&blob, &written), "saved otherwise");
        // Where the search for cells wraps around, the cells of the second state are in another order.
        let order = |blob: &[u8]| support::blob_positions(blob, &written);
        let is_one_run = |order: &[Vec<Pos>]| order.iter().all(|pos| pos.is_sorted_by(|a, b| a < b));
        let same_order = order(&again) == order(&blob) && is_one_run(&order(&blob));
        if same_order && case.from.unified && setup.unified {
            assert!(support::renamed(&again, &written, src) == blob, "the bytes differ");
        }
    }
}

/// What a whole context holds, stream by stream, in the order of cells.
fn used(image: &Image) -> Vec<((usize, usize), support::CellImage)> {
    let used = image.cells.iter().filter(|(_, cell)| cell.meta.is_some());
    used.map(|(&(section, stream, _), cell)| ((section, stream), cell.clone())).collect()
}

fn whole_round_trip(setup: &Setup, from_ops: &[Op], sizes: &[u32], to_ops: &[Op], by_file: bool) {
    let mut from = setup.context();
    run(&mut from, from_ops);
    let mut to_setup = setup.clone();
    for (section, size) in to_setup.sections.iter_mut().zip(sizes) {
        section.kv_size = *size;
    }
    let mut to = to_setup.context();
    run(&mut to, to_ops);
    let before = image(&to);

    let state = used(&image(&from));
    let mut blob = vec![0; usize::try_from(from.state_get_size().unwrap()).unwrap()];
    assert_eq!(from.state_get_data(&mut blob).unwrap(), blob.len());
    assert!(used(&image(&from)) == state, "a save changed the context");

    let restored = if by_file {
        let dir = directory();
        let path = dir.path().join("session");
        assert_eq!(from.state_save_file(&path, &[1, 2]).unwrap(), 20 + blob.len() as u64);
        to.state_load_file(&path, 2).map(|loaded| usize::try_from(loaded.state_end).unwrap() - 20)
    } else {
        to.state_set_data(&blob)
    };
    let too_small = (0..setup.sections.len()).any(|section| {
        (0..to.n_stream() as usize).any(|stream| {
            state.iter().filter(|(at, _)| *at == (section, stream)).count() > sizes[section] as usize
        })
    });
    if too_small {
        let error = reason(restored.expect_err("more cells than there are"));
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert!(image(&to) == before, "a refused restore changed the context");
        return;
    }
    assert_eq!(restored.expect("a restore"), blob.len());
    assert!(used(&image(&to)) == state, "other cells than were saved");
    let mut again = vec![0; usize::try_from(to.state_get_size().unwrap()).unwrap()];
    assert_eq!(to.state_get_data(&mut again).unwrap(), blob.len());
    assert!(again == blob, "saved otherwise");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 6000,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_sequence_comes_back_as_it_was_saved_and_others_stay_as_they_are(case in case()) {
        round_trip(&case);
    }

    #[test]
    fn a_whole_context_comes_back_as_it_was_saved(
        (setup, sizes) in setup().prop_flat_map(|setup| {
            let n = setup.sections.len();
            (Just(setup), proptest::collection::vec(3_u32..40, n))
        }),
        from_ops in ops(),
        to_ops in ops(),
        by_file in any::<bool>(),
    ) {
        whole_round_trip(&setup, &from_ops, &sizes, &to_ops, by_file);
    }
}
