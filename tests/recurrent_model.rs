//! Random operations on recurrent states against a naive model: each sequence has a list of states, one for each token that it has seen.
#![allow(missing_docs, reason = "a test")]

mod recurrence;
mod support;

use kvstate::types::{Pos, SeqId};
use kvstate::{Context, ContextParams};
use proptest::prelude::*;
use support::{NONE, ON_DEVICE, PARTIAL, place, save};

const N_SEQ: usize = 4;
const N_RS_SEQ: u32 = 3;

/// What is done to a context; sequences are indices.
#[derive(Clone, Debug)]
enum Op {
    /// So many tokens of each sequence, in one ubatch.
    Decode(Vec<(usize, usize)>),
    /// One token of two sequences that share it.
    DecodeShared(usize, usize),
    /// So many positions off the end.
    Cut(usize, Pos),
    Rm(usize),
    RmAll,
    Cp(usize, usize),
    Keep(usize),
    Add(usize, Pos),
    Div(usize, i32),
    /// Saved, and restored as another one, with flags.
    Copy(usize, usize, u32),
    /// The whole context, saved and restored.
    Whole,
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let seq = || 0..N_SEQ;
    prop_oneof![
        8 => (Just((0..N_SEQ).collect::<Vec<_>>()).prop_shuffle(), prop::collection::vec(1..6_usize, 1..=N_SEQ))
            .prop_map(|(seqs, lens)| Op::Decode(seqs.into_iter().zip(lens).collect())),
        1 => (seq(), seq()).prop_map(|(a, b)| Op::DecodeShared(a, b)),
        4 => (seq(), 1..6).prop_map(|(seq, n)| Op::Cut(seq, n)),
        1 => seq().prop_map(Op::Rm),
        1 => Just(Op::RmAll),
        3 => (seq(), seq()).prop_map(|(a, b)| Op::Cp(a, b)),
        1 => seq().prop_map(Op::Keep),
        1 => (seq(), -6..6).prop_map(|(seq, delta)| Op::Add(seq, delta)),
        1 => (seq(), 1..3).prop_map(|(seq, d)| Op::Div(seq, d)),
        4 => (seq(), seq(), 0..4_u32).prop_map(|(a, b, flags)| Op::Copy(a, b, flags)),
        1 => Just(Op::Whole),
        1 => Just(Op::Clear),
    ]
}

/// A sequence as it should be.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sequence {
    pos: Option<Pos>,
    /// The newest last.
    states: Vec<Vec<u8>>,
    /// Who has had the same row since the last ubatch: positions of these move together.
    row: usize,
    /// By so many tokens, since the last ubatch.
    rollback: usize,
}

struct Model {
    seqs: Vec<Sequence>,
    next_row: usize,
}

impl Model {
    fn new() -> Self {
        Self { seqs: vec![Sequence::default(); N_SEQ], next_row: 1 }
    }

    fn row(&mut self) -> usize {
        self.next_row += 1;
        self.next_row
    }

    fn decode(&mut self, seq: usize, n: usize) -> Vec<Pos> {
        let row = self.row();
        let own = &mut self.seqs[seq];
        let first = own.pos.map_or(0, |pos| pos + 1);
        // The planes before the one that it goes on from are lost.
        let n_planes = N_RS_SEQ as usize + 1 - own.rollback;
        own.states.drain(..own.states.len().saturating_sub(n_planes));
        let positions: Vec<Pos> = (first..).take(n).collect();
        let mut newest = own.states.last().cloned().unwrap_or(vec![0; recurrence::STATE_BYTES]);
        for &pos in &positions {
            newest = recurrence::step(&newest, pos);
            own.states.push(newest.clone());
        }
        (own.pos, own.row, own.rollback) = (positions.last().copied(), row, 0);
        positions
    }

    /// Whether it can be cut, and whether what is left is known: states before a restore, or before a rollback, are not there any
    /// more.
    fn cut(&mut self, seq: usize, n: Pos) -> (bool, bool) {
        let own = &mut self.seqs[seq];
        let Some(pos) = own.pos else { return (true, true) };
        let p0 = pos - n + 1;
        if p0 <= 0 {
            *own = Sequence::default();
            return (true, true);
        }
        if own.rollback > 0 || n.unsigned_abs() > N_RS_SEQ {
            return (false, true);
        }
        own.rollback = usize::try_from(n).expect("a count");
        let left = own.states.len().saturating_sub(own.rollback);
        own.states.truncate(left);
        own.pos = Some(p0 - 1);
        (true, left > 0)
    }

    fn map_pos(&mut self, seq: usize, new_pos: impl Fn(Pos) -> Pos) {
        let Sequence { pos: Some(_), row, .. } = self.seqs[seq] else { return };
        for own in self.seqs.iter_mut().filter(|own| own.row == row) {
            own.pos = own.pos.map(&new_pos);
            if own.pos.is_some_and(|pos| pos < 0) {
                *own = Sequence::default();
            }
        }
    }
}

fn id(seq: usize) -> SeqId {
    SeqId::try_from(seq).expect("a sequence")
}

fn context() -> Context {
    place::context(ContextParams::new(4, vec![recurrence::params(N_RS_SEQ).into()])).expect("a context")
}

fn check(ctx: &Context, model: &Model, op: &Op) {
    for (seq, own) in model.seqs.iter().enumerate() {
        let pos = own.pos.unwrap_or(-1);
        assert_eq!(ctx.seq_pos_min(id(seq)).unwrap(), pos, "sequence {seq} after {op:?}");
        assert_eq!(ctx.seq_pos_max(id(seq)).unwrap(), pos, "sequence {seq} after {op:?}");
        let state = recurrence::state_of(ctx, 0, id(seq));
        assert_eq!(state.as_ref(), own.states.last(), "sequence {seq} after {op:?}");
    }
}

fn run(ops: &[Op]) {
    let (mut ctx, mut model) = (context(), Model::new());
    let section = [(0, N_RS_SEQ)];
    for op in ops {
        match *op {
            Op::Decode(ref seqs) => {
                let ids: Vec<[SeqId; 1]> = seqs.iter().map(|&(seq, _)| [id(seq)]).collect();
                let positions = seqs.iter().map(|&(seq, n)| model.decode(seq, n));
                let tokens: Vec<(&[SeqId], Pos)> = ids
                    .iter()
                    .zip(positions)
                    .flat_map(|(ids, positions)| positions.into_iter().map(move |pos| (&ids[..], pos)))
                    .collect();
                recurrence::decode(&mut ctx, &section, &tokens).expect("a slot");
            }
            Op::DecodeShared(a, b) => {
                let positions = model.decode(a.min(b), 1);
                model.seqs[a.max(b)] = model.seqs[a.min(b)].clone();
                let ids = [id(a), id(b)];
                recurrence::decode(&mut ctx, &section, &[(&ids, positions[0])]).expect("a slot");
            }
            Op::Cut(seq, n) => {
                let pos = ctx.seq_pos_max(id(seq)).unwrap();
                let (can, is_known) = model.cut(seq, n);
                assert_eq!(ctx.seq_rm(id(seq), pos - n + 1, -1).unwrap(), can, "{op:?}");
                if !is_known {
                    // Its older states are not in the planes, and a server that cuts into them is on its own.
                    assert!(ctx.seq_rm(id(seq), -1, -1).unwrap());
                    model.seqs[seq] = Sequence::default();
                }
            }
            Op::Rm(seq) => {
                assert!(ctx.seq_rm(id(seq), -1, -1).unwrap());
                model.seqs[seq] = Sequence::default();
            }
            Op::RmAll => {
                assert!(ctx.seq_rm(-1, -1, -1).unwrap());
                model = Model::new();
            }
            Op::Cp(src, dst) => {
                ctx.seq_cp(id(src), id(dst), -1, -1).unwrap();
                model.seqs[dst] = model.seqs[src].clone();
            }
            Op::Keep(seq) => {
                ctx.seq_keep(id(seq)).unwrap();
                let kept = model.seqs[seq].clone();
                model.seqs.fill(Sequence::default());
                model.seqs[seq] = kept;
            }
            Op::Add(seq, delta) => {
                ctx.seq_add(id(seq), -1, -1, delta).unwrap();
                model.map_pos(seq, |pos| pos + delta);
            }
            Op::Div(seq, d) => {
                ctx.seq_div(id(seq), -1, -1, d).unwrap();
                model.map_pos(seq, |pos| pos / d);
            }
            Op::Copy(src, dst, flags) => {
                let flags = [NONE, PARTIAL, ON_DEVICE, PARTIAL | ON_DEVICE][flags as usize];
                let blob = save(&mut ctx, id(src), flags);
                support::restore(&mut ctx, &blob, id(dst), flags);
                let row = model.row();
                let Sequence { pos, states, .. } = model.seqs[src].clone();
                let states = states.last().cloned().into_iter().collect();
                model.seqs[dst] = Sequence { pos, states, row, rollback: 0 };
            }
            Op::Whole => {
                let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
                ctx.state_get_data(&mut state).unwrap();
                assert_eq!(ctx.state_set_data(&state).unwrap(), state.len());
                for seq in 0..N_SEQ {
                    // Those that shared a row and were cut back differently have rows of their own now.
                    let row = ctx.recurrent_state(0, id(seq)).unwrap().map_or(0, |state| state.row as usize);
                    let own = &mut model.seqs[seq];
                    own.states = own.states.last().cloned().into_iter().collect();
                    (own.row, own.rollback) = (usize::MAX - row, 0);
                }
            }
            Op::Clear => {
                ctx.clear(true).unwrap();
                model = Model::new();
            }
        }
        check(&ctx, &model, op);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn states_are_those_of_the_tokens_that_were_kept(ops in prop::collection::vec(op(), 1..30)) {
        run(&ops);
    }
}
