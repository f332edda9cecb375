//! Bytes that are no state, for every kind of memory beside plain attention: refused, and not a byte or a cell has changed.
#![allow(missing_docs, reason = "a test")]

mod recurrence;
mod support;

use kvstate::context::UbatchToken;
use kvstate::format::GgmlType;
use kvstate::memory::{
    Dsv4Compressor, Dsv4CompressorParams, Dsv4Memory, Dsv4Params, Dsv4Tensor, KvParams, RecurrentTensor,
    SectionKind, SectionParams,
};
use kvstate::storage::Plane;
use kvstate::types::{CellExt, Pos, SeqId, StateFlags};
use kvstate::{Context, ContextParams};
use support::{NONE, PARTIAL, kv, noise, place, standard, tensor};

const DEST: SeqId = 0;
const OTHER: SeqId = 1;

struct Kind {
    name: &'static str,
    sections: fn() -> Vec<SectionParams>,
}

/// One layer of K alone.
fn k_only(kv: KvParams) -> KvParams {
    let mut kv = kv;
    kv.layers.truncate(1);
    kv.layers[0].v = None;
    kv
}

fn indexer(source: usize) -> KvParams {
    KvParams { mirrors: Some(source), ..k_only(kv(24)) }
}

fn dsv4() -> SectionParams {
    let compressor = |ratio, layers: &[u32]| Dsv4CompressorParams {
        ratio,
        kv_size: 24 / ratio,
        layers: layers.to_vec(),
        k: tensor(GgmlType::F16, 3),
        state_size: ratio,
        n_embd_state: 2,
    };
    let dsv4 = Dsv4Params {
        csa: compressor(4, &[1]),
        hca: compressor(8, &[2]),
        lid: compressor(4, &[1]),
        n_rs_seq: 1,
    };
    SectionParams::Dsv4 { dsv4, memory: Dsv4Memory::Host }
}

const KINDS: [Kind; 6] = [
    Kind { name: "recurrent", sections: || vec![recurrence::params(2).into()] },
    Kind { name: "hybrid", sections: || vec![k_only(kv(24)).into(), recurrence::params(2).into()] },
    Kind {
        name: "hybrid iSWA",
        sections: || {
            let base = KvParams { layers: Vec::new(), ..kv(24) };
            vec![base.into(), k_only(standard(24, 3)).into(), recurrence::params(2).into()]
        },
    },
    Kind {
        name: "hybrid with indexer",
        sections: || vec![k_only(kv(24)).into(), recurrence::params(2).into(), indexer(0).into()],
    },
    Kind {
        name: "DSA iSWA",
        sections: || vec![k_only(kv(24)).into(), indexer(0).into(), k_only(standard(24, 3)).into()],
    },
    Kind {
        name: "DSV4",
        sections: || {
            vec![KvParams { layers: Vec::new(), ..kv(24) }.into(), k_only(standard(24, 3)).into(), dsv4()]
        },
    },
];

/// Every plane of a context.
fn planes(ctx: &Context) -> Vec<&Plane> {
    let mut found = Vec::new();
    for section in 0..ctx.n_section() {
        match ctx.section_kind(section).expect("a section") {
            SectionKind::Kv => {
                (0..ctx.n_stream() as usize)
                    .for_each(|stream| found.extend(support::planes(ctx, section, stream)));
            }
            SectionKind::Recurrent => {
                let tensors = [RecurrentTensor::R, RecurrentTensor::P, RecurrentTensor::S];
                for layer in (0..99).take_while(|&il| ctx.recurrent_plane(section, il, tensors[0]).is_ok()) {
                    let of_layer =
                        tensors.map(|which| ctx.recurrent_plane(section, layer, which).expect("a layer"));
                    found.extend(of_layer.into_iter().flatten());
                }
            }
            SectionKind::Dsv4 => {
                for compressor in [Dsv4Compressor::Csa, Dsv4Compressor::Hca, Dsv4Compressor::Lid] {
                    for which in [Dsv4Tensor::K, Dsv4Tensor::Kv, Dsv4Tensor::Score] {
                        for (il, stream) in (0..3).flat_map(|il| [(il, 0), (il, 1)]) {
                            let of = |rollback| ctx.dsv4_plane((compressor, which), il, stream, rollback);
                            found.extend([0, 1].into_iter().filter_map(of));
                        }
                    }
                }
            }
            kind => panic!("{kind:?}"),
        }
    }
    found
}

/// Two sequences, and bytes in every plane that follow from `seed`; the last token of the destination is taken back, if that can be.
fn context(kind: &Kind, seed: i64) -> Context {
    let unified = kind.name != "DSV4";
    let params = ContextParams { unified, ..ContextParams::new(2, (kind.sections)()) };
    let mut ctx = place::context(params).expect(kind.name);
    for (seq, len) in [(DEST, 9), (OTHER, 6)] {
        let ids = [seq];
        let tokens: Vec<_> =
            (0..len).map(|pos: Pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &ids }).collect();
        let slot = ctx.prepare(&tokens).expect("a slot");
        ctx.commit(&slot).expect("a slot");
    }
    for (i, plane) in planes(&ctx).into_iter().enumerate() {
        let len = usize::try_from(plane.shape().span(plane.kv_size()).expect("a span")).expect("a span");
        place::write(plane, 0, &noise(&[seed, i.try_into().expect("few")], len));
    }
    ctx.seq_rm(DEST, 8, -1).expect("a sequence");
    ctx
}

/// What can be seen of a context.
#[derive(PartialEq)]
struct Image {
    planes: Vec<Vec<u8>>,
    states: Vec<Vec<u8>>,
}

fn image(ctx: &mut Context) -> Image {
    let planes = planes(ctx).into_iter().map(place::all).collect();
    let mut whole = vec![0; usize::try_from(ctx.state_get_size().expect("a size")).expect("a size")];
    ctx.state_get_data(&mut whole).expect("a state");
    let seqs = [DEST, OTHER].map(|seq| support::save(ctx, seq, NONE));
    Image { planes, states: seqs.into_iter().chain([whole]).collect() }
}

/// A context, and what it looks like as long as it refuses.
struct Sweep {
    kind: &'static Kind,
    ctx: Context,
    before: Image,
}

impl Sweep {
    fn new(kind: &'static Kind) -> Self {
        let mut ctx = context(kind, 1);
        let before = image(&mut ctx);
        Self { kind, ctx, before }
    }

    /// Whether the bytes are refused; nothing has changed then. Otherwise other sequences have not, and the state saves and restores.
    fn refuses(&mut self, blob: &[u8], flags: StateFlags) -> bool {
        let other = &self.before.states[1];
        match self.ctx.state_seq_set_data(blob, DEST, flags) {
            Err(_) => {
                assert!(
                    image(&mut self.ctx) == self.before,
                    "{}: a refused state has changed something",
                    self.kind.name
                );
                true
            }
            Ok(_) => {
                assert!(
                    support::save(&mut self.ctx, OTHER, NONE) == *other,
                    "{}: another sequence",
                    self.kind.name
                );
                let saved = support::save(&mut self.ctx, DEST, flags);
                support::restore(&mut self.ctx, &saved, DEST, flags);
                assert!(support::save(&mut self.ctx, DEST, flags) == saved, "{}", self.kind.name);
                *self = Self::new(self.kind);
                false
            }
        }
    }
}

/// A blob, and which of its bytes are metadata: those that do not follow the bytes of the planes.
fn blob(kind: &Kind, flags: StateFlags) -> (Vec<u8>, Vec<usize>) {
    let of = |seed| support::save(&mut context(kind, seed), DEST, flags);
    let (blob, others) = (of(2), [of(3), of(4)]);
    let metadata = (0..blob.len()).filter(|&at| others.iter().all(|other| other[at] == blob[at])).collect();
    (blob, metadata)
}

#[test]
fn every_truncation_is_refused_and_changes_nothing() {
    for (kind, flags) in KINDS.iter().flat_map(|kind| [(kind, NONE), (kind, PARTIAL)]) {
        let (blob, _) = blob(kind, flags);
        let mut sweep = Sweep::new(kind);
        assert!(!sweep.refuses(&blob, flags), "{}: the whole state is one", kind.name);
        for len in place::cases(0..blob.len()) {
            assert!(sweep.refuses(&blob[..len], flags), "{}: {len} of {} bytes", kind.name, blob.len());
        }
    }
}

#[test]
fn every_changed_byte_of_metadata_is_refused_and_changes_nothing_or_gives_a_valid_state() {
    for (kind, flags) in KINDS.iter().flat_map(|kind| [(kind, NONE), (kind, PARTIAL)]) {
        let (blob, metadata) = blob(kind, flags);
        let (mut sweep, mut n_refused) = (Sweep::new(kind), 0);
        for (&at, mask) in place::cases(metadata.iter().flat_map(|at| [(at, 0x01), (at, 0x80), (at, 0xff)])) {
            let mut bad = blob.clone();
            bad[at] ^= mask;
            n_refused += usize::from(sweep.refuses(&bad, flags));
        }
        assert!(n_refused > 30, "{}: {n_refused} of {} refused", kind.name, 3 * metadata.len());
    }
}

#[test]
fn every_truncation_and_changed_byte_of_a_whole_context_is_refused_and_changes_nothing() {
    for kind in &KINDS {
        let mut sweep = Sweep::new(kind);
        let state = sweep.before.states[2].clone();
        let flips = (0..state.len()).flat_map(|at| [(at, 0x01), (at, 0xff)]).filter(|(at, _)| at % 7 == 0);
        let damaged = flips.map(|(at, mask)| {
            let mut bad = state.clone();
            bad[at] ^= mask;
            bad
        });
        for bad in place::cases((0..state.len()).map(|len| state[..len].to_vec()).chain(damaged)) {
            if sweep.ctx.state_set_data(&bad).is_err() {
                assert!(
                    image(&mut sweep.ctx) == sweep.before,
                    "{}: a refused state has changed something",
                    kind.name
                );
            } else {
                sweep = Sweep::new(kind);
            }
        }
    }
}
