//! What a memory state holds: sections, streams, and where each tensor lies.

use std::ops::Range;

use serde::Serialize;

use super::cells::{CellExtLayout, Cells};
use crate::format::{GgmlType, StateVersion, Tag};

/// A memory state. Offsets count from the start of the input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct State {
    /// Where it lies. Of one that is not understood, what is.
    pub bytes: Range<u64>,
    /// Its layout, as the file says; of a blob, the newest that fits.
    pub version: StateVersion,
    /// What a DSV4 memory says of its state.
    pub dsv4_mode: Option<Dsv4Mode>,
    /// In the order of the bytes.
    pub sections: Vec<Section>,
    /// How the bytes were understood.
    pub basis: Basis,
}

/// How the bytes of a memory state were understood: they do not say whether cells have an ext, which layers have a V, or
/// what kind a section is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// By the geometry in the file.
    Recorded,
    /// The one of these interpretations that is most like a memory of llama.cpp; all fit to the exact end.
    Guessed {
        /// How many fit; those that were looked for.
        n_fit: usize,
    },
    /// No interpretation fits. What is shown fits as far as it goes.
    Incomplete {
        /// What is wrong behind it.
        reason: String,
    },
}

/// Which parts of a DSV4 memory a state holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Dsv4Mode {
    /// All.
    Full,
    /// Windows and compressor states.
    Partial,
}

/// A section of a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// What it is.
    pub shape: Shape,
    /// Where it lies.
    pub bytes: Range<u64>,
    /// Its streams; one of a recurrent section.
    pub streams: Vec<Stream>,
}

/// What a section says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Shape {
    /// An attention cache.
    Attention {
        /// What cells hold beside position and sequences.
        cell_ext: CellExtLayout,
        /// What stands before the tensors; `None` if no stream holds cells.
        data: Option<DataHeader>,
    },
    /// States of recurrent layers.
    Recurrent {
        /// Layers of the model.
        n_layer: u32,
    },
    /// Cells of the target, which writes them.
    Shared,
    /// The compressed half of a DSV4 memory.
    Dsv4 {
        /// The compressed K caches; none in a partial state.
        caches: Vec<Dsv4Cache>,
        /// The states of the compressors.
        compressors: Vec<Dsv4State>,
    },
}

/// What stands before the tensors of an attention section; all streams say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DataHeader {
    /// V is transposed.
    pub v_trans: bool,
    /// Layers of the section.
    pub n_layer: u32,
    /// Rotation of K; `None` before version 4.
    pub n_rot_k: Option<u32>,
    /// Rotation of V; `None` before version 4.
    pub n_rot_v: Option<u32>,
}

/// A compressed K cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Dsv4Cache {
    /// Of which compressor, as in [`Tag`]s: `CSA`, `HCA`, `LID`.
    pub name: &'static str,
    /// Rows.
    pub n_rows: u32,
    /// Layers.
    pub n_layer: u32,
}

/// The state of a compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Dsv4State {
    /// Of which compressor, as in [`Tag`]s: `CSA`, `HCA`, `LID`.
    pub name: &'static str,
    /// Positions of a compressed row.
    pub ratio: u32,
    /// Rows.
    pub state_size: u32,
    /// Elements of a row.
    pub n_embd_state: u32,
    /// Layers.
    pub n_layer: u32,
}

/// A stream of a section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stream {
    /// Its number in the state.
    pub stream: u32,
    /// Cells.
    pub n_cells: u32,
    /// Where the cells' metadata lies.
    pub cells: Range<u64>,
    /// In the order of the bytes: K of every layer, then V; R and P, then S.
    pub tensors: Vec<Tensor>,
}

/// A tensor of one layer in one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// Which of the layer's, as in a file's geometry: `K`, `V`, `R`, `P`, `S`, `CSAK` and so on.
    pub tag: Tag,
    /// Its layer, where it is known.
    pub layer: Option<u32>,
    /// Type of the elements.
    pub ggml_type: GgmlType,
    /// Bytes of a row: of one cell.
    pub row_size: u64,
    /// Rows.
    pub n_rows: u64,
    /// One channel of all rows, then the next.
    pub transposed: bool,
    /// Where the rows begin.
    pub offset: u64,
}

impl Tensor {
    /// Where the rows lie.
    #[must_use]
    pub const fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + self.row_size * self.n_rows
    }

    /// Elements of a row.
    #[must_use]
    pub fn n_embd(&self) -> u64 {
        self.row_size / u64::from(self.ggml_type.type_size()) * u64::from(self.ggml_type.block_size())
    }
}

impl Section {
    /// What kind of section it is, in a word.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self.shape {
            Shape::Attention { .. } => "attention",
            Shape::Recurrent { .. } => "recurrent",
            Shape::Shared => "shared",
            Shape::Dsv4 { .. } => "dsv4",
        }
    }

    /// The cells of a stream of this section. `input`: what was inspected.
    #[must_use]
    pub fn cells<'a>(&self, stream: &Stream, input: &'a [u8]) -> Cells<'a> {
        let layout = match self.shape {
            Shape::Attention { cell_ext, .. } => cell_ext,
            _ => CellExtLayout::None,
        };
        Cells::new(super::slice(input, &stream.cells), layout, stream.n_cells)
    }

    /// Cells of all streams.
    #[must_use]
    pub fn n_cells(&self) -> u64 {
        self.streams.iter().map(|stream| u64::from(stream.n_cells)).sum()
    }
}
