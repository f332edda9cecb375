//! One small operation, for `scripts/instructions` to count the instructions of.
//!
//! `instructions OPERATION KV_SIZE` builds a cache of that many cells and runs the operation once, in
//! `counted_operation`; without arguments it prints the operations.

use std::hint::black_box;

use kvstate::context::{Shift, UbatchToken};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, RecurrentParams, SectionParams, TensorParams};
use kvstate::types::{CellExt, Pos, SeqId, StateFlags};
use kvstate::{Context, ContextParams};

const NONE: StateFlags = StateFlags::empty();

/// Tokens of sequence 0, where the operation says nothing else.
const N: Pos = 1024;

/// Header; one state and its position; then R and S of four layers, each with type and row size.
const HYBRID_CHECKPOINT: usize = 8 + 12 + 8 + 4 * (12 + 36 * 4 + 12 + 64 * 4);

/// Sequences of the cache.
const N_SEQ: SeqId = 64;

struct Operation {
    name: &'static str,
    /// Of so many cells.
    context: fn(u32) -> Context,
    run: fn(&mut Context),
}

const OPERATIONS: [Operation; 12] = [
    operation("state_seq_get_size, one run", |context| {
        let _ = black_box(context.state_seq_get_size(0, NONE));
    }),
    Operation {
        context: alternate,
        ..operation("state_seq_get_size, every other cell", |context| {
            let _ = black_box(context.state_seq_get_size(0, NONE));
        })
    },
    operation("state_seq_get_data, partial, full attention", |context| {
        let _ = black_box(context.state_seq_get_data(&mut [0; 8], 0, StateFlags::PARTIAL_ONLY));
    }),
    Operation {
        context: hybrid,
        ..operation("partial checkpoint of a hybrid, saved and restored", |context| {
            let mut checkpoint = [0; HYBRID_CHECKPOINT];
            let flags = StateFlags::PARTIAL_ONLY;
            assert_eq!(context.state_seq_get_data(&mut checkpoint, 0, flags).ok(), Some(HYBRID_CHECKPOINT));
            assert_eq!(context.state_seq_set_data(&checkpoint, 0, flags).ok(), Some(HYBRID_CHECKPOINT));
        })
    },
    operation("seq_pos_max", |context| {
        let _ = black_box(context.seq_pos_max(0));
    }),
    operation("seq_cp and seq_rm of 1,024 cells", |context| {
        context.seq_cp(0, 1, -1, -1).expect("sequences");
        context.seq_rm(1, -1, -1).expect("a sequence");
    }),
    operation("seq_rm of a tail of 16", |context| {
        context.seq_rm(0, N - 16, -1).expect("a sequence");
    }),
    operation("seq_add of 1,024 cells", |context| {
        context.seq_add(0, -1, -1, 7).expect("no overflow");
    }),
    operation("prepare of 1 token", |context| {
        let _ = black_box(context.prepare(&[token(N)]));
    }),
    operation("prepare and commit of 1 token", |context| decode(context, &[token(N)])),
    operation("prepare and commit of 512 tokens", |context| {
        let mut tokens = [token(0); 512];
        (N..).zip(&mut tokens).for_each(|(pos, token)| token.pos = pos);
        decode(context, &tokens);
    }),
    operation("seq_cp of 1,024 cells to 63 sequences", |context| {
        (1..N_SEQ).for_each(|dst| context.seq_cp(0, dst, -1, -1).expect("sequences"));
    }),
];

const fn operation(name: &'static str, run: fn(&mut Context)) -> Operation {
    Operation { name, context: alone, run }
}

/// The function that callgrind counts.
#[inline(never)]
fn counted_operation(run: fn(&mut Context), context: &mut Context) {
    run(context);
}

fn token(pos: Pos) -> UbatchToken<'static> {
    UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] }
}

fn decode(context: &mut Context, tokens: &[UbatchToken<'_>]) {
    let slot = context.prepare(tokens).expect("cells");
    context.commit(&slot).expect("fresh");
}

/// Two layers of 128 bytes a cell: a million cells that nobody writes to cost no memory.
fn attention(kv_size: u32) -> KvParams {
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 32 };
    KvParams::new(kv_size, 2, LayerParams { k: tensor, v: Some(tensor) })
}

fn new(sections: Vec<SectionParams>) -> Context {
    let params = ContextParams { shift: Shift::Engine, ..ContextParams::new(N_SEQ.unsigned_abs(), sections) };
    Context::new(params).expect("a geometry")
}

/// Sequence 0 alone.
fn alone(kv_size: u32) -> Context {
    let mut context = new(vec![attention(kv_size).into()]);
    (0..N).for_each(|pos| decode(&mut context, &[token(pos)]));
    context
}

/// Sequence 1 has every other cell.
fn alternate(kv_size: u32) -> Context {
    let mut context = new(vec![attention(kv_size).into()]);
    for pos in 0..N {
        decode(&mut context, &[token(pos)]);
        decode(&mut context, &[UbatchToken { seq_ids: &[1], ..token(pos) }]);
    }
    context
}

/// Sequence 0 has every cell, and four recurrent states of 400 bytes.
fn hybrid(kv_size: u32) -> Context {
    let mut context = new(SectionParams::hybrid(attention(kv_size), RecurrentParams::new(4, 36, 64)));
    let tokens: Vec<_> = (0..kv_size.cast_signed()).map(token).collect();
    tokens.chunks(4096).for_each(|tokens| decode(&mut context, tokens));
    context
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [name, kv_size] = &args[..] else {
        for operation in &OPERATIONS {
            println!("{}", operation.name);
        }
        return;
    };
    let operation = OPERATIONS.iter().find(|operation| operation.name == name).expect("an operation's name");
    let mut context = (operation.context)(kv_size.parse().expect("a number of cells"));
    counted_operation(black_box(operation.run), &mut context);
}
