//! A hybrid of 48 layers with a sequence of any length, and its partial checkpoint.

use std::hint::black_box;
use std::time::Duration;

use kvstate::context::Shift;
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, RecurrentLayerParams, RecurrentParams, SectionParams};
use kvstate::storage::Threads;
use kvstate::types::{Pos, StateFlags};
use kvstate::{Context, ContextParams};

use super::{Pair, decode, rows, timed};

const PARTIAL: StateFlags = StateFlags::PARTIAL_ONLY;

const N_LAYER: usize = 48;
/// Every fourth layer has attention.
const N_LAYER_ATTENTION: usize = N_LAYER / 4;
/// Elements of R: three tokens of 4,096.
const N_EMBD_R: u32 = 3 * 4096;
/// Elements of S: 16 heads of 128 x 128, 1 MiB.
const N_EMBD_S: u32 = 16 * 128 * 128;

/// The hybrid with one sequence, and memory for another checkpoint of it. Every byte that a call touches has been touched
/// before.
pub struct Hybrid {
    context: Context,
    checkpoint: Vec<u8>,
    out: Vec<u8>,
}

impl Hybrid {
    pub fn new(n_tokens: Pos) -> Self {
        let attention =
            KvParams { kv_size: n_tokens.unsigned_abs(), ..rows(N_LAYER_ATTENTION, GgmlType::F16, 64) };
        let mut recurrent = RecurrentParams::new(N_LAYER, N_EMBD_R, N_EMBD_S);
        recurrent.layers.iter_mut().skip(3).step_by(4).for_each(|il| *il = RecurrentLayerParams::default());
        let params = ContextParams {
            shift: Shift::Engine,
            threads: Threads::new(1),
            ..ContextParams::new(1, SectionParams::hybrid(attention, recurrent))
        };
        let mut context = Context::new(params).expect("memory for the states");
        decode(&mut context, 0, 0, n_tokens);
        let size = context.state_seq_get_size(0, PARTIAL).expect("sequence 0");
        let mut checkpoint = vec![0; usize::try_from(size).expect("64 bits")];
        context.state_seq_get_data(&mut checkpoint, 0, PARTIAL).expect("it fits");
        context.state_seq_set_data(&checkpoint, 0, PARTIAL).expect("its own state");
        assert_eq!(context.seq_pos_max(0).expect("sequence 0"), n_tokens - 1);
        let out = checkpoint.clone();
        Self { context, checkpoint, out }
    }

    pub fn checkpoint_bytes(&self) -> usize {
        self.checkpoint.len()
    }

    pub fn copy(&mut self) -> Duration {
        timed(|| black_box(&mut self.out).copy_from_slice(black_box(&self.checkpoint)))
    }

    pub fn get_size_alone(&mut self) -> Duration {
        timed(|| self.context.state_seq_get_size(black_box(0), PARTIAL).expect("sequence 0"))
    }

    pub fn get_data_alone(&mut self) -> Duration {
        timed(|| self.context.state_seq_get_data(&mut self.out, 0, PARTIAL).expect("it fits"))
    }

    pub fn set_data_alone(&mut self) -> Duration {
        timed(|| self.context.state_seq_set_data(&self.checkpoint, 0, PARTIAL).expect("its own state"))
    }

    pub fn get_data(&mut self) -> Pair {
        Pair { reference: self.copy(), call: self.get_data_alone() }
    }

    pub fn set_data(&mut self) -> Pair {
        Pair { reference: self.copy(), call: self.set_data_alone() }
    }
}
