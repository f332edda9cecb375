//! What the states of a context depend on, as a slot file says it: `docs/format.md`, 'GEOM'.

use crate::context::Context;
use crate::format::{SectionGeometry, Tag, TensorShape};
use crate::memory::{
    Dsv4Cache, Dsv4Compressor, Dsv4Tensor, KvCache, RecurrentCache, RecurrentTensor, Section, TensorGeometry,
};

/// Bytes that an ext takes in the cells of a state: column, row and token.
const CELL_EXT_LEN: u32 = 12;

/// What the states of a context depend on. V's transposition is not part of it, nor is anything that is only room.
pub(super) fn geometry_of(context: &Context) -> Vec<SectionGeometry> {
    let of_section = |section: &Section| match section {
        Section::Kv(kv) => attention(kv),
        Section::Recurrent(recurrent) => of_recurrent(recurrent),
        Section::Shared => {
            SectionGeometry { kind: SectionGeometry::SHARED, settings: Vec::new(), tensors: Vec::new() }
        }
        Section::Dsv4(dsv4) => of_dsv4(dsv4),
    };
    context.memory.sections().iter().map(of_section).collect()
}

const N_ROT_K: Tag = Tag(*b"ROTK");
const N_ROT_V: Tag = Tag(*b"ROTV");

/// Whether a setting is the size of a Hadamard rotation.
pub(super) fn is_rotation(setting: Tag) -> bool {
    [N_ROT_K, N_ROT_V].contains(&setting)
}

fn attention(kv: &KvCache) -> SectionGeometry {
    let geometry = &kv.geometry;
    let settings = vec![
        (N_ROT_K, geometry.n_rot_k),
        (N_ROT_V, geometry.n_rot_v),
        (SectionGeometry::CELL_EXT, if geometry.cell_ext { CELL_EXT_LEN } else { 0 }),
    ];
    let shape = |tag, layer, tensor: TensorGeometry| TensorShape {
        tag: Tag(tag),
        layer,
        ggml_type: tensor.ggml_type,
        n_embd: tensor.n_embd,
    };
    let k = (0..).zip(&geometry.k).map(|(layer, k)| shape(*b"K   ", layer, *k));
    let v = (0..).zip(&geometry.v).filter_map(|(layer, v)| Some(shape(*b"V   ", layer, (*v)?)));
    let tensors = k.chain(v).collect();
    SectionGeometry { kind: SectionGeometry::ATTENTION, settings, tensors }
}

fn of_recurrent(recurrent: &RecurrentCache) -> SectionGeometry {
    let geometry = &recurrent.geometry;
    let tensors = geometry.tensors.iter().map(|tensor| TensorShape {
        tag: Tag(match tensor.which {
            RecurrentTensor::R => *b"R   ",
            RecurrentTensor::P => *b"P   ",
            RecurrentTensor::S => *b"S   ",
        }),
        // As many layers as the model has, which a u32 counts.
        layer: u32::try_from(tensor.layer).unwrap_or(u32::MAX),
        ggml_type: tensor.geometry.ggml_type,
        n_embd: tensor.geometry.n_embd,
    });
    SectionGeometry {
        kind: SectionGeometry::RECURRENT,
        settings: vec![(Tag(*b"NLAY"), geometry.n_layer)],
        tensors: tensors.collect(),
    }
}

fn of_dsv4(dsv4: &Dsv4Cache) -> SectionGeometry {
    let geometry = &dsv4.geometry;
    let named = |compressor: Dsv4Compressor, letter: u8| {
        let [a, b, c] = *match compressor {
            Dsv4Compressor::Csa => b"CSA",
            Dsv4Compressor::Hca => b"HCA",
            Dsv4Compressor::Lid => b"LID",
        };
        Tag([a, b, c, letter])
    };
    let settings = Dsv4Compressor::ALL.into_iter().flat_map(|compressor| {
        let params = geometry.compressor(compressor);
        [(named(compressor, b'R'), params.ratio), (named(compressor, b'N'), params.state_size)]
    });
    let tensors = geometry.tensors.iter().map(|tensor| TensorShape {
        tag: named(
            tensor.compressor,
            match tensor.which {
                Dsv4Tensor::K => b'K',
                Dsv4Tensor::Kv => b'V',
                Dsv4Tensor::Score => b'S',
            },
        ),
        layer: tensor.il,
        ggml_type: tensor.geometry.ggml_type,
        n_embd: tensor.geometry.n_embd,
    });
    SectionGeometry { kind: SectionGeometry::DSV4, settings: settings.collect(), tensors: tensors.collect() }
}
