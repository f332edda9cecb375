//! The model without its cache: weights, and the arithmetic on one vector.

use kvstate::types::{Pos, Token};

/// Different tokens.
pub const N_VOCAB: usize = 64;
/// Width of the residual stream.
pub const N_EMBD: usize = 32;
/// Width of a head, of query, key and value.
pub const N_HEAD_DIM: usize = 8;
/// Query heads.
const N_HEAD: usize = N_EMBD / N_HEAD_DIM;
/// Key and value heads: two query heads share one.
pub const N_HEAD_KV: usize = N_HEAD / 2;
/// Width of a key, and of a value, of all heads.
pub const N_EMBD_KV: usize = N_HEAD_KV * N_HEAD_DIM;
/// Width of the feed-forward layer.
const N_FF: usize = 64;

/// Seeded random numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn bits(&mut self) -> u16 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 48) as u16
    }

    /// In [-1, 1).
    fn weight(&mut self) -> f32 {
        f32::from(self.bits()) / 32768.0 - 1.0
    }

    pub fn tokens(&mut self, n: usize) -> Vec<Token> {
        (0..n).map(|_| Token::from(self.bits() as u8 % N_VOCAB as u8)).collect()
    }
}

/// A linear map, row by row.
pub struct Matrix {
    n_in: usize,
    weights: Vec<f32>,
}

impl Matrix {
    /// Random, such that what comes out is about as large as what goes in.
    fn random(n_in: usize, n_out: usize, random: &mut Random) -> Self {
        let scale = (3.0 / n_in as f32).sqrt();
        Self { n_in, weights: (0..n_in * n_out).map(|_| random.weight() * scale).collect() }
    }

    pub fn times(&self, x: &[f32]) -> Vec<f32> {
        self.weights.chunks(self.n_in).map(|row| dot(row, x)).collect()
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.weights[i * self.n_in..][..self.n_in]
    }
}

/// The weights of a layer.
pub struct Layer {
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub attention_out: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Layer {
    fn random(random: &mut Random) -> Self {
        Self {
            query: Matrix::random(N_EMBD, N_EMBD, random),
            key: Matrix::random(N_EMBD, N_EMBD_KV, random),
            value: Matrix::random(N_EMBD, N_EMBD_KV, random),
            attention_out: Matrix::random(N_EMBD, N_EMBD, random),
            gate: Matrix::random(N_EMBD, N_FF, random),
            up: Matrix::random(N_EMBD, N_FF, random),
            down: Matrix::random(N_FF, N_EMBD, random),
        }
    }

    /// down(silu(gate(x)) * up(x))
    pub fn feed_forward(&self, x: &[f32]) -> Vec<f32> {
        let silu = |g: f32| g / (1.0 + (-g).exp());
        let hidden: Vec<f32> =
            self.gate.times(x).into_iter().zip(self.up.times(x)).map(|(g, u)| silu(g) * u).collect();
        self.down.times(&hidden)
    }
}

/// All weights.
pub struct Model {
    embedding: Matrix,
    pub layers: Vec<Layer>,
    output: Matrix,
}

impl Model {
    pub fn random(n_layer: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        Self {
            embedding: Matrix::random(N_EMBD, N_VOCAB, &mut random),
            layers: (0..n_layer).map(|_| Layer::random(&mut random)).collect(),
            output: Matrix::random(N_EMBD, N_VOCAB, &mut random),
        }
    }

    pub fn embed(&self, token: Token) -> Vec<f32> {
        self.embedding.row(usize::try_from(token).unwrap()).to_vec()
    }

    pub fn logits(&self, x: &[f32]) -> Vec<f32> {
        self.output.times(&rms_norm(x))
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// x += y
pub fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// `x` at a mean square of 1.
pub fn rms_norm(x: &[f32]) -> Vec<f32> {
    let scale = (dot(x, x) / x.len() as f32 + 1e-6).sqrt().recip();
    x.iter().map(|x| x * scale).collect()
}

/// Rotates every head of `x` by `n_pos` positions (NEOX pairs). Rotating a key of position p by n more gives, but for
/// rounding, the key of position p + n: this is what a K-shift does.
pub fn rotate(x: &mut [f32], n_pos: Pos) {
    const HALF: usize = N_HEAD_DIM / 2;
    for head in x.chunks_mut(N_HEAD_DIM) {
        for i in 0..HALF {
            let frequency = 10_000_f32.powf(-(i as f32) / HALF as f32);
            let (sin, cos) = (n_pos as f32 * frequency).sin_cos();
            let (a, b) = (head[i], head[i + HALF]);
            (head[i], head[i + HALF]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }
}

/// Attention of one token: for each head, the values, weighted by how well their keys fit the query.
///
/// Sums run in the order of `keys`: in position order, the result is the same bits wherever the cells lie.
pub fn attend(query: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>]) -> Vec<f32> {
    let mut out = vec![0.0; N_EMBD];
    for (head, out) in out.chunks_mut(N_HEAD_DIM).enumerate() {
        let query = &query[head * N_HEAD_DIM..][..N_HEAD_DIM];
        let kv = head * N_HEAD_KV / N_HEAD * N_HEAD_DIM..(head * N_HEAD_KV / N_HEAD + 1) * N_HEAD_DIM;
        let scores: Vec<f32> =
            keys.iter().map(|key| dot(query, &key[kv.clone()]) / (N_HEAD_DIM as f32).sqrt()).collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f32 = weights.iter().sum();
        for (weight, value) in weights.iter().zip(values) {
            for (out, value) in out.iter_mut().zip(&value[kv.clone()]) {
                *out += weight / total * value;
            }
        }
    }
    out
}

/// What a token reads of a recurrent state: for each head, the values whose keys fit the query.
pub fn read_state(query: &[f32], sums: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; N_EMBD];
    for (head, out) in out.chunks_mut(N_HEAD_DIM).enumerate() {
        let query = &query[head * N_HEAD_DIM..][..N_HEAD_DIM];
        let sums = &sums[head * N_HEAD_KV / N_HEAD * N_HEAD_DIM * N_HEAD_DIM..];
        for (query, values) in query.iter().zip(sums.chunks(N_HEAD_DIM)) {
            out.iter_mut().zip(values).for_each(|(out, value)| *out += query * value);
        }
    }
    out
}
