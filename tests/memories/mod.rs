//! Small memories of every kind beside plain attention, filled with known bytes.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use kvstate::context::UbatchToken;
use kvstate::format::GgmlType;
use kvstate::memory::{
    Dsv4Compressor, Dsv4CompressorParams, Dsv4Params, Dsv4Tensor, KvParams, RecurrentTensor, SectionKind,
    SectionParams,
};
use kvstate::storage::Plane;
use kvstate::types::{CellExt, Pos, SeqId};
use kvstate::{Context, ContextParams};

use crate::recurrence;
use crate::support::{self, NONE, kv, noise, place, standard, tensor};

pub const DEST: SeqId = 0;
pub const OTHER: SeqId = 1;

#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    pub sections: fn() -> Vec<SectionParams>,
}

/// One layer of K alone.
fn k_only(kv: KvParams) -> KvParams {
    let mut kv = kv;
    kv.layers.truncate(1);
    kv.layers[0].v = None;
    kv
}

fn without_layers() -> KvParams {
    KvParams { layers: Vec::new(), ..kv(24) }
}

fn compressed() -> Dsv4Params {
    let compressor = |ratio, layers: &[u32]| Dsv4CompressorParams {
        ratio,
        kv_size: 24 / ratio,
        layers: layers.to_vec(),
        k: tensor(GgmlType::F16, 3),
        state_size: ratio,
        n_embd_state: 2,
    };
    Dsv4Params { csa: compressor(4, &[1]), hca: compressor(8, &[2]), lid: compressor(4, &[1]), n_rs_seq: 1 }
}

pub const KINDS: [Kind; 8] = [
    Kind { name: "recurrent", sections: || vec![recurrence::params(2).into()] },
    Kind { name: "hybrid", sections: || SectionParams::hybrid(k_only(kv(24)), recurrence::params(2)) },
    Kind {
        name: "hybrid iSWA",
        sections: || {
            SectionParams::hybrid_iswa(without_layers(), k_only(standard(24, 3)), recurrence::params(2))
        },
    },
    Kind {
        name: "hybrid with indexer",
        sections: || SectionParams::hybrid_indexed(kv(24), recurrence::params(2), k_only(kv(24))),
    },
    Kind { name: "DSA", sections: || SectionParams::dsa(kv(24), k_only(kv(24))) },
    Kind {
        name: "DSA iSWA",
        sections: || SectionParams::dsa_iswa(k_only(kv(24)), k_only(kv(24)), k_only(standard(24, 3))),
    },
    Kind { name: "MSA", sections: || SectionParams::msa(standard(24, 3), standard(24, 3)) },
    Kind {
        name: "DSV4",
        sections: || SectionParams::dsv4(without_layers(), k_only(standard(24, 3)), compressed()),
    },
];

/// Every plane of a context.
pub fn planes(ctx: &Context) -> Vec<&Plane> {
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
pub fn context(kind: &Kind, seed: i64) -> Context {
    filled(place::context(params(kind)).expect(kind.name), seed)
}

pub fn params(kind: &Kind) -> ContextParams {
    // DSV4 has one stream for each sequence.
    let unified = kind.name != "DSV4";
    ContextParams { unified, ..ContextParams::new(2, (kind.sections)()) }
}

/// An empty context, filled like that.
pub fn filled(mut ctx: Context, seed: i64) -> Context {
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
#[derive(Debug, PartialEq)]
pub struct Image {
    pub planes: Vec<Vec<u8>>,
    /// Those of the two sequences, and that of the whole context.
    pub states: Vec<Vec<u8>>,
}

pub fn image(ctx: &mut Context) -> Image {
    let planes = planes(ctx).into_iter().map(place::all).collect();
    let mut whole = vec![0; usize::try_from(ctx.state_get_size().expect("a size")).expect("a size")];
    ctx.state_get_data(&mut whole).expect("a state");
    let seqs = [DEST, OTHER].map(|seq| support::save(ctx, seq, NONE));
    Image { planes, states: seqs.into_iter().chain([whole]).collect() }
}
