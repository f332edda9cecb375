//! A recurrent layer: linear attention over what a token and the one before it say, and its states in the planes.

use kvstate::Context;
use kvstate::format::GgmlType;
use kvstate::memory::{RecurrentLayerParams, RecurrentParams, RecurrentSlot, RecurrentTensor};

use super::model::{Layer, N_EMBD, N_HEAD_DIM, N_HEAD_KV, add, read_state, rms_norm};
use super::vectors::Vectors;

/// Keys times values, of each head.
const N_EMBD_S: usize = N_HEAD_KV * N_HEAD_DIM * N_HEAD_DIM;

pub fn layer() -> RecurrentLayerParams {
    RecurrentParams::new(1, N_EMBD as u32, N_EMBD_S as u32).layers[0]
}

/// What a layer remembers of the tokens that it has seen.
#[derive(Clone)]
struct State {
    /// The input of the last token (R).
    last: Vec<f32>,
    /// The sum of the tokens' keys times values, in which older ones fade (S).
    sums: Vec<f32>,
}

impl State {
    fn zeros() -> Self {
        Self { last: vec![0.0; N_EMBD], sums: vec![0.0; N_EMBD_S] }
    }

    /// Takes a token in; returns what it reads.
    fn step(&mut self, layer: &Layer, x: &[f32]) -> Vec<f32> {
        let x = rms_norm(x);
        let mut shifted = x.clone();
        add(&mut shifted, &self.last);
        let (key, value) = (layer.key.times(&shifted), layer.value.times(&shifted));
        for (i, sum) in self.sums.iter_mut().enumerate() {
            let (head, row, column) =
                (i / (N_HEAD_DIM * N_HEAD_DIM), i / N_HEAD_DIM % N_HEAD_DIM, i % N_HEAD_DIM);
            *sum = 0.95 * *sum + key[head * N_HEAD_DIM + row] * value[head * N_HEAD_DIM + column];
        }
        let read = rms_norm(&read_state(&layer.query.times(&x), &self.sums));
        self.last = x;
        read
    }
}

/// The planes of a layer.
pub struct States {
    r: Vectors,
    s: Vectors,
    n_seq_max: u32,
    n_rows: u32,
}

impl States {
    pub fn of(cache: &Context, section: usize, layer: usize) -> Self {
        let plane = |tensor| cache.recurrent_plane(section, layer, tensor).unwrap().unwrap();
        let r = plane(RecurrentTensor::R);
        Self {
            n_seq_max: cache.n_seq_max(),
            n_rows: r.kv_size(),
            s: Vectors::of(plane(RecurrentTensor::S), GgmlType::F32),
            r: Vectors::of(r, GgmlType::F32),
        }
    }

    fn read(&self, row: u32) -> State {
        State { last: self.r.read(row), sums: self.s.read(row) }
    }

    fn write(&self, row: u32, state: &State) {
        self.r.write(row, &state.last);
        self.s.write(row, &state.sums);
    }
}

/// A layer's states, and where a ubatch reads and writes them.
pub struct StatesOfUbatch<'a> {
    pub planes: States,
    pub slot: &'a RecurrentSlot,
    /// The cell of each token.
    pub cells: &'a [u32],
}

impl StatesOfUbatch<'_> {
    /// Takes the tokens of the ubatch in; returns what each reads.
    pub fn decode(&self, layer: &Layer, hidden: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let Self { planes, slot, cells } = self;
        // Every row that is read is read before any is written.
        let moved: Vec<_> = slot.moves.iter().map(|&(to, from)| (to, planes.read(from))).collect();
        // By sequence, the state before its tokens and those after each.
        let mut states: Vec<Vec<State>> = slot
            .sources
            .iter()
            .map(|source| vec![source.map_or_else(State::zeros, |row| planes.read(row))])
            .collect();
        let read = hidden
            .iter()
            .zip(*cells)
            .map(|(x, cell)| {
                let states = &mut states[(cell - slot.head) as usize];
                let mut state = states[states.len() - 1].clone();
                let read = state.step(layer, x);
                states.push(state);
                read
            })
            .collect();
        for (row, state) in &moved {
            planes.write(*row, state);
        }
        for (cell, states) in (slot.head..).zip(&states) {
            let rows = (cell..planes.n_rows).step_by(planes.n_seq_max as usize);
            rows.zip(states[1..].iter().rev()).for_each(|(row, state)| planes.write(row, state));
        }
        read
    }
}
