//! A small GGUF, as llama.cpp writes them.
#![allow(dead_code, reason = "each test binary uses a part")]

pub struct Gguf {
    pub version: u32,
    /// Key, type, the bytes of the value.
    pub values: Vec<(String, u32, Vec<u8>)>,
    /// Name and dimensions.
    pub tensors: Vec<(String, Vec<u64>)>,
}

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The value of an array.
pub fn array(number: u32, n: u64, values: &[u8]) -> Vec<u8> {
    [&number.to_le_bytes()[..], &n.to_le_bytes(), values].concat()
}

impl Gguf {
    pub fn model() -> Self {
        let tokens = ["<s>", "a", "b"].map(string).concat();
        Self {
            version: 3,
            values: vec![
                ("general.architecture".to_owned(), 8, string("llama")),
                ("llama.block_count".to_owned(), 4, 2_u32.to_le_bytes().to_vec()),
                ("tokenizer.ggml.tokens".to_owned(), 9, array(8, 3, &tokens)),
                ("tokenizer.ggml.scores".to_owned(), 9, array(6, 3, &[0; 12])),
            ],
            tensors: vec![
                ("token_embd.weight".to_owned(), vec![8, 3]),
                ("output_norm.weight".to_owned(), vec![8]),
            ],
        }
    }

    /// All before the data of the tensors.
    pub fn head(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, number, value) in &self.values {
            out.extend(string(key));
            out.extend(number.to_le_bytes());
            out.extend(value);
        }
        for (offset, (name, ne)) in (0_u64..).step_by(96).zip(&self.tensors) {
            out.extend(string(name));
            out.extend(u32::try_from(ne.len()).unwrap_or(u32::MAX).to_le_bytes());
            out.extend(ne.iter().flat_map(|ne| ne.to_le_bytes()));
            // f32.
            out.extend(0_u32.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out
    }

    /// The file, with data from a multiple of 32 bytes on.
    pub fn file(&self) -> Vec<u8> {
        let mut out = self.head();
        out.resize(out.len().next_multiple_of(32) + 128, 0x3f);
        out
    }
}
