//! K-shift by RoPE: what a cache holds after it, against arithmetic in f64.
#![allow(missing_docs, reason = "a test")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "sizes and positions of small caches, and values that a row is made of"
)]

mod support;

use std::sync::{Arc, Mutex};

use kvstate::context::Shift;
use kvstate::format::GgmlType;
use kvstate::memory::{KvMemory, KvParams, KvPlanes, LayerParams, RopeParams, SectionParams, TensorParams};
use kvstate::storage::{Plane, PlaneShape, TensorAccess, Threads};
use kvstate::types::{Pos, RopeType, Swa, SwaType};
use kvstate::{Context, ContextParams, Error, Result};
use support::{NONE, decode, noise, params, read_cell, save, write_cell};

/// A layer of K in `n_head` heads, without V.
fn layer(ggml_type: GgmlType, n_embd: u32) -> LayerParams {
    LayerParams { k: TensorParams { ggml_type, n_embd }, v: None }
}

fn context(kv: KvParams, rope: Vec<Option<RopeParams>>) -> Context {
    let shift = Shift::Rope(vec![rope]);
    support::place::context(ContextParams { shift, ..params(2, &[kv]) }).unwrap()
}

fn error(kv: KvParams, rope: RopeParams) -> String {
    let shift = Shift::Rope(vec![vec![Some(rope); kv.layers.len()]]);
    Context::new(ContextParams { shift, ..params(2, &[kv]) }).unwrap_err().to_string()
}

/// Values of about 1, with a few that are larger, as K has them.
fn values(seed: i64, n: usize) -> Vec<f32> {
    let bytes = noise(&[seed], 2 * n);
    let value = |[a, b]: &[u8; 2]| (f32::from(*a) - 127.5) / 64.0 * if *b < 8 { 6.0 } else { 1.0 };
    bytes.as_chunks().0.iter().map(value).collect()
}

fn encoded(ggml_type: GgmlType, values: &[f32]) -> Vec<u8> {
    let n = u32::try_from(values.len()).unwrap();
    let mut row = vec![0; usize::try_from(ggml_type.row_size(n).unwrap()).unwrap()];
    ggml_type.row_from_f32(values, &mut row).unwrap();
    row
}

fn decoded(ggml_type: GgmlType, row: &[u8]) -> Vec<f32> {
    let n = row.len() / ggml_type.type_size() as usize * ggml_type.block_size() as usize;
    let mut values = vec![0.0; n];
    ggml_type.row_to_f32(row, &mut values).unwrap();
    values
}

/// The Walsh-Hadamard transform by its definition: the sign of (i, j) is the parity of the bits that both have.
fn hadamard(x: &[f64], n: usize) -> Vec<f64> {
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let element =
        |x: &[f64], i: usize| -> f64 { (0..n).map(|j| sign(i, j) * x[j]).sum::<f64>() / (n as f64).sqrt() };
    x.chunks(n).flat_map(|x| (0..n).map(|i| element(x, i)).collect::<Vec<_>>()).collect()
}

/// How many positions pair `i` sees when the position moves by 1: scaling, factors and YaRN as in the paper.
fn positions_of_pair(rope: &RopeParams, i: u32) -> f64 {
    let factor = rope.freq_factors.get(i as usize).map_or(1.0, |&factor| f64::from(factor));
    let scaled = f64::from(rope.freq_scale);
    if rope.ext_factor == 0.0 {
        return scaled / factor;
    }
    let dims = f64::from(rope.n_rope_dims);
    let pair_that_turns = |times: f32| {
        let wavelength = f64::from(rope.n_ctx_orig) / f64::from(times);
        dims / 2.0 * (wavelength / std::f64::consts::TAU).ln() / f64::from(rope.freq_base).ln()
    };
    let (fast, slow) = (pair_that_turns(rope.beta_fast).floor(), pair_that_turns(rope.beta_slow).ceil());
    let mix = (1.0 - (f64::from(i) - fast.max(0.0)) / (slow.min(dims - 1.0) - fast.max(0.0))).clamp(0.0, 1.0);
    let mix = mix * f64::from(rope.ext_factor);
    (scaled * (1.0 - mix) + mix) / factor
}

/// K of a row, moved by `shift` positions, in f64.
fn turned(row: &[f32], rope: &RopeParams, n_rot_k: u32, shift: Pos) -> Vec<f64> {
    let x: Vec<f64> = row.iter().copied().map(f64::from).collect();
    let transformed = |x: Vec<f64>| if n_rot_k == 0 { x } else { hadamard(&x, n_rot_k as usize) };
    let mut x = transformed(x);
    for head in x.chunks_mut(rope.n_embd_head as usize) {
        let head = &mut head[rope.n_embd_nope as usize..][..rope.n_rope_dims as usize];
        for i in 0..rope.n_rope_dims / 2 {
            let frequency = f64::from(rope.freq_base).powf(-2.0 * f64::from(i) / f64::from(rope.n_rope_dims));
            let angle = f64::from(shift) * frequency * positions_of_pair(rope, i);
            let i = i as usize;
            let (a, b) = match rope.rope_type {
                RopeType::Normal => (2 * i, 2 * i + 1),
                RopeType::Neox => (i, i + rope.n_rope_dims as usize / 2),
            };
            (head[a], head[b]) = (
                head[a] * angle.cos() - head[b] * angle.sin(),
                head[a] * angle.sin() + head[b] * angle.cos(),
            );
        }
    }
    transformed(x)
}

/// The largest error that writing `block` as `ggml_type` may make: half of what lies between two values of the type.
fn half_step(ggml_type: GgmlType, block: &[f64]) -> f64 {
    let largest = block.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
    let low = block.iter().copied().fold(f64::MAX, f64::min);
    let range = block.iter().copied().fold(f64::MIN, f64::max) - low;
    // The scale, and the minimum, are halves: relative 2^-11. What is multiplied with them is at most `largest`.
    let half = largest * 2.0_f64.powi(-10);
    match ggml_type {
        GgmlType::F32 => largest * 1e-6,
        GgmlType::F16 => largest * 2.0_f64.powi(-11) + 1e-6,
        GgmlType::BF16 => largest * 2.0_f64.powi(-8),
        GgmlType::Q8_0 => largest / 127.0 / 2.0 + half,
        // One more step: the side opposite of the largest value has one quant less.
        GgmlType::Q4_0 => largest / 8.0 + half,
        GgmlType::Q5_0 => largest / 16.0 + half,
        GgmlType::Q4_1 => range / 15.0 / 2.0 + half,
        GgmlType::Q5_1 => range / 31.0 / 2.0 + half,
        // The widest gap is 24 of 127, and least squares may move the scale by a tenth.
        _ => largest * (12.0 / 127.0 + 0.1) + half,
    }
}

fn assert_close(ggml_type: GgmlType, row: &[u8], want: &[f64], what: &str) {
    let got = decoded(ggml_type, row);
    assert_eq!(got.len(), want.len());
    let block = ggml_type.block_size().max(32) as usize;
    for (i, (got, want)) in got.chunks(block).zip(want.chunks(block)).enumerate() {
        let bound = half_step(ggml_type, want) * 1.0001;
        for (j, (got, want)) in got.iter().zip(want).enumerate() {
            let off = (f64::from(*got) - want).abs();
            assert!(
                off <= bound,
                "{what}: element {j} of block {i} is {got}, not {want} (off {off}, bound {bound})"
            );
        }
    }
}

/// Fills `cells` of every layer with values, moves position 0 on by `shift`, saves; the rows before and after, by layer.
fn rows_around_a_shift(context: &mut Context, n_layer: usize, shift: Pos) -> Vec<[Vec<u8>; 2]> {
    let cells = decode(context, 0, 0..4);
    let cell = cells[0][3];
    let rows: Vec<Vec<u8>> = (0..n_layer)
        .map(|il| {
            let k = context.layer(0, il).unwrap().k;
            let row = encoded(k.ggml_type, &values(il as i64, k.n_embd as usize));
            for &cell in &cells[0] {
                write_cell(context.k(0, 0, il).unwrap(), cell, &row);
            }
            row
        })
        .collect();
    context.seq_add(0, 3, -1, shift).unwrap();
    context.apply_pending_shifts().unwrap();
    for (il, row) in rows.iter().enumerate() {
        let plane = context.k(0, 0, il).unwrap();
        assert!(
            (0..3).all(|i| read_cell(plane, cells[0][i]) == *row),
            "layer {il}: a cell that was not moved"
        );
    }
    let after = |il| read_cell(context.k(0, 0, il).unwrap(), cell);
    rows.into_iter().enumerate().map(|(il, row)| [row, after(il)]).collect()
}

fn check(ggml_type: GgmlType, rope: &RopeParams, n_rot_k: u32, n_head: u32, shift: Pos) -> [Vec<u8>; 2] {
    let kv = KvParams { n_rot_k, ..KvParams::new(64, 1, layer(ggml_type, n_head * rope.n_embd_head)) };
    let mut context = context(kv, vec![Some(rope.clone())]);
    let [before, after] = rows_around_a_shift(&mut context, 1, shift).remove(0);
    let want = turned(&decoded(ggml_type, &before), rope, n_rot_k, shift);
    assert_close(ggml_type, &after, &want, &format!("{ggml_type} {rope:?} n_rot_k {n_rot_k} by {shift}"));
    [before, after]
}

const BOTH: [RopeType; 2] = [RopeType::Normal, RopeType::Neox];

#[test]
fn k_of_every_type_is_turned_within_the_precision_of_the_type() {
    for rope_type in BOTH {
        for ggml_type in GgmlType::KV {
            for shift in [1, 1000, -3] {
                let [before, after] = check(ggml_type, &RopeParams::new(rope_type, 64), 0, 3, shift);
                assert_ne!(before, after);
            }
        }
    }
}

#[test]
fn bases_scales_factors_and_yarn_are_those_of_the_layer() {
    let plain = RopeParams::new(RopeType::Neox, 64);
    let factors = (0..32).map(|i| 1.0 + i as f32 / 8.0).collect();
    let yarn = RopeParams { ext_factor: 1.0, freq_scale: 0.25, n_ctx_orig: 4096, ..plain.clone() };
    let layers = [
        RopeParams { freq_base: 1e6, ..plain.clone() },
        RopeParams { freq_scale: 0.125, ..plain.clone() },
        RopeParams { freq_factors: factors, ..plain.clone() },
        yarn.clone(),
        RopeParams {
            ext_factor: 0.5,
            beta_fast: 16.0,
            beta_slow: 2.0,
            rope_type: RopeType::Normal,
            ..yarn.clone()
        },
        plain,
    ];
    let kv = KvParams::new(64, layers.len(), layer(GgmlType::F32, 128));
    let mut context = context(kv, layers.iter().cloned().map(Some).collect());
    let rows = rows_around_a_shift(&mut context, layers.len(), 500);
    for (rope, [before, after]) in layers.iter().zip(rows) {
        assert_close(
            GgmlType::F32,
            &after,
            &turned(&decoded(GgmlType::F32, &before), rope, 0, 500),
            &format!("{rope:?}"),
        );
    }
    let mixes: Vec<f64> = (0..32).map(|i| positions_of_pair(&yarn, i)).collect();
    assert_eq!((mixes[0], mixes[31]), (1.0, 0.25));
    assert!(mixes.iter().any(|&mix| mix > 0.3 && mix < 0.9), "a ramp between: {mixes:?}");
}

#[test]
fn what_is_not_turned_keeps_its_bytes() {
    for (ggml_type, n_embd_nope) in [(GgmlType::F16, 24), (GgmlType::BF16, 0), (GgmlType::Q8_0, 32)] {
        for rope_type in BOTH {
            let rope = RopeParams { n_rope_dims: 32, n_embd_nope, ..RopeParams::new(rope_type, 96) };
            let [before, after] = check(ggml_type, &rope, 0, 2, 77);
            let bytes = |elements: u32| usize::try_from(ggml_type.row_size(elements).unwrap()).unwrap();
            let turned = bytes(n_embd_nope)..bytes(n_embd_nope + 32);
            for (before, after) in before.chunks(bytes(96)).zip(after.chunks(bytes(96))) {
                assert_eq!(before[..turned.start], after[..turned.start], "{ggml_type}");
                assert_eq!(before[turned.end..], after[turned.end..], "{ggml_type}");
                assert_ne!(before[turned.clone()], after[turned.clone()], "{ggml_type}");
            }
        }
    }
}

#[test]
fn a_cache_that_holds_the_hadamard_transform_of_k_is_turned_inside_it() {
    for ggml_type in [GgmlType::F32, GgmlType::F16, GgmlType::Q8_0, GgmlType::Q4_0] {
        for (n_embd_head, n_rot_k) in [(128, 128), (128, 64), (64, 64)] {
            check(ggml_type, &RopeParams::new(RopeType::Normal, n_embd_head), n_rot_k, 2, 9);
        }
        // Only half of each block is turned: all of it changes.
        let partial = RopeParams { n_rope_dims: 32, ..RopeParams::new(RopeType::Neox, 128) };
        check(ggml_type, &partial, 64, 2, 9);
        // The latent part of MLA, and its own blocks, stay.
        let mla = RopeParams { n_rope_dims: 64, n_embd_nope: 128, ..RopeParams::new(RopeType::Normal, 192) };
        let [before, after] = check(ggml_type, &mla, 64, 1, 9);
        let nope = usize::try_from(ggml_type.row_size(128).unwrap()).unwrap();
        assert_eq!(before[..nope], after[..nope]);
        assert_ne!(before[nope..], after[nope..]);
    }
}

#[test]
fn there_and_back_is_where_it_was_within_the_precision_of_the_type() {
    for ggml_type in GgmlType::KV {
        let kv = KvParams::new(64, 1, layer(ggml_type, 64));
        let rope = RopeParams::new(RopeType::Neox, 64);
        let mut context = context(kv, vec![Some(rope.clone())]);
        let [before, there] = rows_around_a_shift(&mut context, 1, 41).remove(0);
        let want = turned(&decoded(ggml_type, &there), &rope, 0, -41);
        context.seq_add(0, 44, -1, -41).unwrap();
        context.apply_pending_shifts().unwrap();
        let back = read_cell(context.k(0, 0, 0).unwrap(), 3);
        assert_close(ggml_type, &back, &want, &format!("{ggml_type} back"));
        let off = |a: &[u8], b: &[u8]| {
            decoded(ggml_type, a)
                .iter()
                .zip(decoded(ggml_type, b))
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max)
        };
        assert!(off(&before, &back) < off(&before, &there) / 2.0, "{ggml_type}");
    }
}

#[test]
fn a_shift_and_its_reverse_that_was_pending_change_no_byte() {
    let mut context = context(
        KvParams::new(64, 1, layer(GgmlType::Q4_0, 64)),
        vec![Some(RopeParams::new(RopeType::Normal, 64))],
    );
    decode(&mut context, 0, 0..10);
    let before = support::image(&context).cells;
    context.seq_add(0, 0, -1, 12).unwrap();
    context.seq_add(0, 0, -1, -12).unwrap();
    context.apply_pending_shifts().unwrap();
    assert_eq!(support::image(&context).cells, before);
}

#[test]
fn a_division_turns_each_cell_by_its_own_shift() {
    let rope = RopeParams::new(RopeType::Neox, 32);
    // More cells than are turned at a time.
    let n: Pos = 9000;
    let kv = KvParams::new(9216, 2, layer(GgmlType::F32, 32));
    let mut context = context(kv, vec![Some(rope.clone()), None]);
    let cells = decode(&mut context, 0, 0..n).remove(0);
    let row = values(5, 32);
    for &cell in &cells {
        write_cell(context.k(0, 0, 0).unwrap(), cell, &encoded(GgmlType::F32, &row));
    }
    let other = read_cell(context.k(0, 0, 1).unwrap(), cells[100]);
    context.seq_div(0, 0, -1, 4).unwrap();
    context.apply_pending_shifts().unwrap();
    for pos in (0..n).step_by(53).chain([n - 1]) {
        let after = read_cell(context.k(0, 0, 0).unwrap(), cells[pos as usize]);
        assert_close(
            GgmlType::F32,
            &after,
            &turned(&row, &rope, 0, pos / 4 - pos),
            &format!("position {pos}"),
        );
    }
    assert_eq!(read_cell(context.k(0, 0, 1).unwrap(), cells[100]), other, "a layer without RoPE");
    assert_eq!(context.pending_shifts(0, 0).unwrap().count(), 0);
}

#[test]
fn a_save_holds_turned_rows_and_is_the_state_of_a_shift_by_hand() {
    let kv = KvParams::new(64, 2, layer(GgmlType::F16, 64));
    let rope = vec![Some(RopeParams::new(RopeType::Normal, 32)); 2];
    let mut shifted = context(kv.clone(), rope.clone());
    decode(&mut shifted, 0, 0..20);
    let mut by_hand = context(kv, rope);
    decode(&mut by_hand, 0, 0..20);

    assert!(shifted.can_shift());
    assert!(shifted.seq_rm(0, 2, 9).unwrap());
    shifted.seq_add(0, 9, -1, -7).unwrap();
    let state = save(&mut shifted, 0, NONE);
    assert_eq!(shifted.pending_shifts(0, 0).unwrap().count(), 0);
    assert_eq!(save(&mut shifted, 0, NONE), state, "a second save turns nothing");

    // The same rows, each turned in a context of its own, written over a sequence that was decoded at its place.
    let rows: Vec<Vec<Vec<u8>>> = (0..2)
        .map(|il| (0..20).map(|cell| read_cell(shifted.k(0, 0, il).unwrap(), cell)).collect())
        .collect();
    let unturned = by_hand.k(0, 0, 0).map(|plane| read_cell(plane, 9)).unwrap();
    assert_ne!(unturned, rows[0][9]);
    let mut single = context(
        KvParams::new(64, 1, layer(GgmlType::F16, 64)),
        vec![Some(RopeParams::new(RopeType::Normal, 32))],
    );
    decode(&mut single, 0, 7..8);
    write_cell(single.k(0, 0, 0).unwrap(), 0, &unturned);
    single.seq_add(0, 0, -1, -7).unwrap();
    single.apply_pending_shifts().unwrap();
    assert_eq!(read_cell(single.k(0, 0, 0).unwrap(), 0), rows[0][9]);

    by_hand.clear(true).unwrap();
    decode(&mut by_hand, 0, (0..2).chain(90..97).chain(2..13));
    by_hand.seq_rm(0, 90, 97).unwrap();
    for (il, rows) in rows.iter().enumerate() {
        for (cell, row) in (0..20).zip(rows) {
            write_cell(by_hand.k(0, 0, il).unwrap(), cell, row);
        }
    }
    assert_eq!(save(&mut by_hand, 0, NONE), state);
}

#[test]
fn threads_give_the_bytes_of_one() {
    // Threads turn K on the host; devices have none to spare, and the emulated one takes its time.
    let n: Pos = if support::place::place() == support::place::Place::Host { 2000 } else { 200 };
    let after = |threads| {
        let kv = KvParams::new(2048, 5, layer(GgmlType::Q8_0, 256));
        let mut context = context(kv, vec![Some(RopeParams::new(RopeType::Neox, 128)); 5]);
        context.set_threads(Threads::new(threads));
        decode(&mut context, 0, 0..n);
        context.seq_add(0, n / 2, -1, -n / 4).unwrap();
        context.apply_pending_shifts().unwrap();
        save(&mut context, 0, NONE)
    };
    assert!(after(1) == after(3));
}

#[test]
fn rows_of_gaps_between_cells_are_untouched() {
    let shape = PlaneShape::Rows { row_size: 64, cell_stride: 80 };
    let mut memory = vec![0x5A_u8; 80 * 8];
    // SAFETY: the memory outlives the context, has eight cells, and is not touched during its calls.
    #[allow(unsafe_code, reason = "adopted memory")]
    let plane = unsafe { Plane::adopt(memory.as_mut_ptr(), 8, shape) }.unwrap();
    let section = SectionParams::Kv {
        kv: KvParams::new(8, 1, layer(GgmlType::F16, 32)),
        memory: KvMemory::Adopted(KvPlanes { k: vec![plane], v: vec![None] }),
    };
    let shift = Shift::Rope(vec![vec![Some(RopeParams::new(RopeType::Neox, 32))]]);
    let mut context = Context::new(ContextParams { shift, ..ContextParams::new(1, vec![section]) }).unwrap();
    decode(&mut context, 0, 0..8);
    context.seq_add(0, 0, -1, 3).unwrap();
    context.apply_pending_shifts().unwrap();
    drop(context);
    for cell in memory.chunks(80) {
        assert!(cell[..64].iter().any(|&byte| byte != 0x5A));
        assert!(cell[64..].iter().all(|&byte| byte == 0x5A));
    }
}

// Tensors behind calls of their owner

#[derive(Debug, Default)]
struct Owner {
    bytes: Mutex<Vec<u8>>,
    /// Calls of `get` and of `set` that work.
    calls_left: Mutex<[usize; 2]>,
}

impl Owner {
    fn count(&self, call: usize) -> Result<()> {
        let left = &mut self.calls_left.lock().unwrap()[call];
        *left = left.checked_sub(1).ok_or_else(|| Error::Callback { name: ["get", "set"][call], code: 7 })?;
        Ok(())
    }
}

impl TensorAccess for Owner {
    fn get(&self, _: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.count(0)?;
        out.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..out.len()]);
        Ok(())
    }

    fn set(&self, _: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.count(1)?;
        self.bytes.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Sequence 0 has positions 0 to 4 and 10 to 14, in cells 0 to 9; the second half moves back by 5. Sequence 1 has cell 10.
fn remote(owner: &Arc<Owner>, shape: PlaneShape) -> Context {
    let plane = Plane::remote(Arc::<Owner>::clone(owner), 0, 16, shape).unwrap();
    let section = SectionParams::Kv {
        kv: KvParams::new(16, 1, layer(GgmlType::Q8_0, 64)),
        memory: KvMemory::Adopted(KvPlanes { k: vec![plane], v: vec![None] }),
    };
    let shift = Shift::Rope(vec![vec![Some(RopeParams::new(RopeType::Normal, 64))]]);
    let mut context = Context::new(ContextParams { shift, ..ContextParams::new(2, vec![section]) }).unwrap();
    for (seq, positions) in [(0, vec![0, 1, 2, 3, 4, 10, 11, 12, 13, 14]), (1, vec![0])] {
        let tokens: Vec<_> = positions.into_iter().map(|pos| support::Tok::new(seq, pos)).collect();
        let ubatch: Vec<_> = tokens
            .iter()
            .map(|t| kvstate::context::UbatchToken { pos: t.pos, ext: t.ext, seq_ids: &t.seqs })
            .collect();
        let slot = context.prepare(&ubatch).unwrap();
        context.commit(&slot).unwrap();
    }
    context.seq_add(0, 10, -1, -5).unwrap();
    context
}

fn owner(cell_stride: usize) -> Arc<Owner> {
    let row = encoded(GgmlType::Q8_0, &values(3, 64));
    let cell = [&row[..], &vec![0x5A; cell_stride - row.len()]].concat();
    Arc::new(Owner { bytes: Mutex::new(cell.repeat(16)), calls_left: Mutex::new([100; 2]) })
}

#[test]
fn rows_of_a_remote_tensor_are_fetched_turned_and_given_back() {
    let row = encoded(GgmlType::Q8_0, &values(3, 64));
    let want = turned(&decoded(GgmlType::Q8_0, &row), &RopeParams::new(RopeType::Normal, 64), 0, -5);
    for (cell_stride, calls) in [(68, 1), (80, 5)] {
        let owner = owner(cell_stride);
        let shape = PlaneShape::Rows { row_size: 68, cell_stride: cell_stride as u64 };
        let mut context = remote(&owner, shape);
        context.apply_pending_shifts().unwrap();
        assert_eq!(*owner.calls_left.lock().unwrap(), [100 - calls; 2], "rows that lie together go at once");
        for (i, cell) in owner.bytes.lock().unwrap().chunks(cell_stride).enumerate() {
            if (5..10).contains(&i) {
                assert_close(GgmlType::Q8_0, &cell[..68], &want, &format!("cell {i}"));
            } else {
                assert_eq!(cell[..68], row, "cell {i}");
            }
            assert!(cell[68..].iter().all(|&byte| byte == 0x5A));
        }
    }
}

#[test]
fn an_owner_that_fails_half_way_costs_the_sequence_that_was_shifted_and_no_other() {
    let owner = owner(80);
    let mut context = remote(&owner, PlaneShape::Rows { row_size: 68, cell_stride: 80 });
    owner.calls_left.lock().unwrap()[1] = 2;
    let error = context.apply_pending_shifts().unwrap_err();
    assert!(matches!(error, Error::ShiftFailed { n_cells: 5, .. }), "{error}");
    assert!(error.to_string().contains("its sequences are emptied"), "{error}");
    assert_eq!((context.seq_pos_max(0).unwrap(), context.seq_pos_max(1).unwrap()), (-1, 0));
    assert_eq!(context.pending_shifts(0, 0).unwrap().count(), 0);
    context.apply_pending_shifts().unwrap();
}

// Sections

#[test]
fn sections_are_turned_by_their_own_rope_if_they_have_the_same_size() {
    let base = KvParams::new(64, 1, layer(GgmlType::F32, 32));
    let swa = KvParams { swa: Swa::new(SwaType::Standard, 16).unwrap(), ..base.clone() };
    let local = RopeParams { freq_base: 100.0, ..RopeParams::new(RopeType::Neox, 32) };
    let global = RopeParams { freq_base: 1e6, ..local.clone() };
    let shift = || Shift::Rope(vec![vec![Some(global.clone())], vec![Some(local.clone())]]);
    let mut context =
        support::place::context(ContextParams { shift: shift(), ..params(1, &[base.clone(), swa.clone()]) })
            .unwrap();
    decode(&mut context, 0, 0..8);
    let row = values(2, 32);
    for section in 0..2 {
        write_cell(context.k(section, 0, 0).unwrap(), 7, &encoded(GgmlType::F32, &row));
    }
    context.seq_add(0, 7, -1, 50).unwrap();
    save(&mut context, 0, NONE);
    for (section, rope) in [&global, &local].into_iter().enumerate() {
        let after = read_cell(context.k(section, 0, 0).unwrap(), 7);
        assert_close(GgmlType::F32, &after, &turned(&row, rope, 0, 50), &format!("section {section}"));
    }

    let small = KvParams { kv_size: 32, ..swa };
    let context =
        support::place::context(ContextParams { shift: shift(), ..params(1, &[base, small]) }).unwrap();
    assert!(!context.can_shift());
}

// Refusals

#[test]
fn rope_that_does_not_fit_the_layer_is_refused() {
    let f16 = || KvParams::new(8, 1, layer(GgmlType::F16, 96));
    let rope = RopeParams::new(RopeType::Neox, 48);
    let refused = |rope: RopeParams, want: &str| {
        assert_eq!(error(f16(), rope), format!("kv.layer 0.rope.{want}"));
    };
    let with = |change: &dyn Fn(&mut RopeParams)| {
        let mut rope = rope.clone();
        change(&mut rope);
        rope
    };
    refused(with(&|r| r.n_embd_head = 64), "n_embd_head: 64, the 96 elements of K are no whole heads");
    refused(with(&|r| r.n_embd_head = 0), "n_embd_head: 0, the 96 elements of K are no whole heads");
    refused(with(&|r| r.n_rope_dims = 47), "n_rope_dims: 47, pairs of elements are turned");
    refused(with(&|r| r.n_rope_dims = 0), "n_rope_dims: 0, pairs of elements are turned");
    refused(with(&|r| r.n_embd_nope = 2), "n_rope_dims: 48 behind n_embd_nope 2 in heads of 48");
    refused(
        with(&|r| r.n_embd_nope = u32::MAX),
        "n_rope_dims: 48 behind n_embd_nope 4294967295 in heads of 48",
    );
    refused(with(&|r| r.freq_factors = vec![1.0; 23]), "freq_factors: 23 factors for 24 pairs");
    refused(with(&|r| r.freq_factors = vec![0.0; 24]), "freq_factors: 0, frequencies are divided by it");
    refused(with(&|r| r.freq_base = 0.0), "freq_base: 0, it is above 0");
    refused(with(&|r| r.freq_scale = f32::NAN), "freq_scale: NaN, it is above 0");
    refused(with(&|r| r.ext_factor = f32::INFINITY), "ext_factor: inf, it is a number");
    refused(with(&|r| r.ext_factor = 1.0), "n_ctx_orig: 0 with YaRN (ext_factor 1)");
    let yarn = with(&|r| (r.ext_factor, r.n_ctx_orig, r.beta_slow) = (1.0, 4096, -1.0));
    refused(yarn, "beta_slow: -1 with YaRN (ext_factor 1), it is above 0");

    let q8_0 = KvParams::new(8, 1, layer(GgmlType::Q8_0, 96));
    assert_eq!(
        error(q8_0, rope.clone()),
        "kv.layer 0.rope.n_embd_head: 48 is no multiple of the 32 elements of a 8 (q8_0) block"
    );
    assert_eq!(
        error(KvParams { n_rot_k: 64, ..f16() }, rope),
        "kv.layer 0.rope.n_embd_head: 48 is no multiple of n_rot_k, which is 64"
    );
    let i32 = KvParams::new(8, 1, layer(GgmlType::from_i32(26).unwrap(), 96));
    assert_eq!(
        error(i32, RopeParams::new(RopeType::Neox, 48)),
        "kv.layer 0.rope.type_k: 26 (i32) is not converted, and cannot be turned"
    );
}

#[test]
fn rope_of_another_number_of_layers_or_sections_is_refused() {
    let refusal = |rope: Vec<Vec<Option<RopeParams>>>| {
        let kv = KvParams::new(8, 2, layer(GgmlType::F16, 32));
        Context::new(ContextParams { shift: Shift::Rope(rope), ..params(1, &[kv]) }).unwrap_err().to_string()
    };
    assert_eq!(refusal(vec![vec![None]]), "kv.rope: 1 layers in a section of 2");
    assert_eq!(refusal(vec![]), "rope: 0 sections for a context of 1");
}
