//! K-shift on a device and in host memory: the same bytes.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(missing_docs, reason = "a test")]

mod support;

use kvstate::context::Shift;
use kvstate::format::GgmlType;
use kvstate::memory::{KvMemory, KvParams, LayerParams, RopeParams, SectionParams};
use kvstate::types::{Pos, RopeType};
use kvstate::{Context, ContextParams};
use support::{decode, noise, place, read_cell, tensor, write_cell};

const N_CELL: u32 = 8;

/// A layer of K, and how it is turned.
#[derive(Clone, Debug)]
struct Layer {
    ggml_type: GgmlType,
    n_head: u32,
    rope: RopeParams,
}

/// Every type, pairing, number of heads and size of what is not turned, as layers of one cache.
fn layers() -> Vec<Layer> {
    // Elements of a head, those before the turned ones, turned ones.
    const HEADS: [[u32; 3]; 5] = [[128, 0, 128], [128, 0, 32], [128, 32, 64], [128, 64, 64], [256, 128, 96]];
    let mut layers = Vec::new();
    for ggml_type in GgmlType::KV {
        for rope_type in [RopeType::Normal, RopeType::Neox] {
            for n_head in [1, 3] {
                for [n_embd_head, n_embd_nope, n_rope_dims] in HEADS {
                    let rope =
                        RopeParams { n_embd_nope, n_rope_dims, ..RopeParams::new(rope_type, n_embd_head) };
                    layers.push(Layer { ggml_type, n_head, rope });
                }
            }
        }
    }
    layers
}

fn context(layers: &[Layer], n_rot_k: u32, device: Option<i32>) -> Context {
    let layer = |layer: &Layer| LayerParams {
        k: tensor(layer.ggml_type, layer.n_head * layer.rope.n_embd_head),
        v: None,
    };
    let kv = KvParams {
        layers: layers.iter().map(layer).collect(),
        n_rot_k,
        ..KvParams::new(N_CELL, 1, layer(&layers[0]))
    };
    let memory = KvMemory::Devices(vec![device; layers.len()]);
    let rope = layers.iter().map(|layer| Some(layer.rope.clone())).collect();
    let sections = vec![SectionParams::Kv { kv, memory }];
    let params = ContextParams { shift: Shift::Rope(vec![rope]), ..ContextParams::new(1, sections) };
    let mut context = Context::new(params).expect("a context");
    let cells = decode(&mut context, 0, 0..Pos::try_from(N_CELL).expect("few")).remove(0);
    for (il, layer) in layers.iter().enumerate() {
        for &cell in &cells {
            write_cell(context.k(0, 0, il).expect("K"), cell, &row(layer, il, cell));
        }
    }
    context
}

/// Values as K has them; in one row all are 0, in one they are the least magnitudes that halves tell apart.
fn row(layer: &Layer, il: usize, cell: u32) -> Vec<u8> {
    let n = layer.n_head * layer.rope.n_embd_head;
    let scale = match cell {
        4 => 0.0,
        5 => 1e-8,
        _ => 1.0 / 64.0,
    };
    let bytes = noise(&[i64::try_from(il).expect("few"), cell.into()], 2 * n as usize);
    let value = |[a, b]: &[u8; 2]| (f32::from(*a) - 127.5) * scale * if *b < 8 { 6.0 } else { 1.0 };
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(value).collect();
    let mut row = vec![0; usize::try_from(layer.ggml_type.row_size(n).expect("blocks")).expect("small")];
    layer.ggml_type.row_from_f32(&values, &mut row).expect("a row");
    row
}

/// Shifts of several sizes, in both directions, and none for the first cells.
fn shift(context: &mut Context) {
    for (p0, delta) in [(3, 1000), (1005, 7), (1013, -4)] {
        context.seq_add(0, p0, -1, delta).expect("a shift");
    }
    context.apply_pending_shifts().expect("a shift");
}

fn compare(n_rot_k: u32) {
    let device = *place::devices().first().expect("a device");
    let layers = layers();
    let [mut host, mut on_device] = [None, Some(device)].map(|device| context(&layers, n_rot_k, device));
    let launches = || place::emulated().map_or(0, |cuda| cuda.count("cuLaunchKernel"));
    let before = launches();
    [&mut host, &mut on_device].into_iter().for_each(shift);
    assert!(place::emulated().is_none() || launches() > before, "a kernel turns what is on the device");
    for (il, layer) in layers.iter().enumerate() {
        let [host, on_device] = [&host, &on_device].map(|context| context.k(0, 0, il).expect("K"));
        let mut n_changed = 0;
        for cell in 0..N_CELL {
            let [want, got] = [host, on_device].map(|k| read_cell(k, cell));
            if let Some(at) = want.iter().zip(&got).position(|(want, got)| want != got) {
                let (got, want) = (got[at], want[at]);
                panic!(
                    "{layer:?}, n_rot_k {n_rot_k}, cell {cell}: byte {at} is {got} on the device, {want} on the host"
                );
            }
            n_changed += u32::from(want != row(layer, il, cell));
        }
        assert!(n_changed >= N_CELL / 2, "{layer:?}, n_rot_k {n_rot_k}: {n_changed} cells were turned");
    }
}

#[test]
fn k_as_it_is_has_the_same_bytes_on_both() {
    compare(0);
}

#[test]
fn the_hadamard_transform_of_64_has_the_same_bytes_on_both() {
    compare(64);
}

#[test]
fn the_hadamard_transform_of_128_has_the_same_bytes_on_both() {
    compare(128);
}
