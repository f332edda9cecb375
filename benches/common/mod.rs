//! Caches to measure, and calls timed in turn with a plain copy, write or read of the same bytes.
//!
//! Sequence 0 is the one that is saved. The cells between its cells belong to other sequences, so that a restore
//! finds the same cells again.
#![allow(dead_code, reason = "each bench uses a part")]

pub mod figures;
pub mod hybrid;
pub mod limits;
pub mod resident;
pub mod slot_files;

use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvstate::cells::CellMeta;
use kvstate::context::{Shift, UbatchToken};
use kvstate::format::{Checkpoint, CheckpointSpan, GgmlType};
use kvstate::memory::{KvParams, LayerParams, TensorParams};
use kvstate::session::{SlotContents, SlotLoadParams, Verify};
use kvstate::storage::Threads;
use kvstate::types::{CellExt, Pos, Seq, SeqId, StateFlags};
use kvstate::{Context, ContextParams};
use tempfile::TempDir;

pub const NONE: StateFlags = StateFlags::empty();

/// Sequences that may have tokens.
pub const N_SEQ: SeqId = 64;
/// One more, for copies.
pub const FREE_SEQ: SeqId = N_SEQ;

/// How the cells of the saved sequence lie among those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    OneRun,
    RunsOf16,
    EveryOther,
    /// Each cell is the saved sequence's or the other's by a fixed seed.
    RandomHalf,
}

impl Layout {
    pub const ALL: [Self; 4] = [Self::OneRun, Self::RunsOf16, Self::EveryOther, Self::RandomHalf];

    pub fn name(self) -> &'static str {
        match self {
            Self::OneRun => "one run",
            Self::RunsOf16 => "runs of 16",
            Self::EveryOther => "every other cell",
            Self::RandomHalf => "a random half",
        }
    }

    /// The sequence of each cell, 0 or 1, up to the `n`-th cell of sequence 0.
    pub fn owners(self, n: usize) -> Vec<SeqId> {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut owner = |cell: usize| match self {
            Self::OneRun => 0,
            Self::RunsOf16 => cell / 16 % 2,
            Self::EveryOther => cell % 2,
            Self::RandomHalf => {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                usize::from(random >> 63 == 1)
            }
        };
        let mut owners = Vec::new();
        let mut left = n;
        while left > 0 {
            let owner = owner(owners.len());
            left -= usize::from(owner == 0);
            owners.push(SeqId::from(owner != 0));
        }
        owners
    }
}

/// `n_layer` layers of rows of `n_embd` elements, K and V alike.
pub fn rows(n_layer: usize, ggml_type: GgmlType, n_embd: u32) -> KvParams {
    let tensor = TensorParams { ggml_type, n_embd };
    KvParams::new(256, n_layer, LayerParams { k: tensor, v: Some(tensor) })
}

/// `n_layer` layers of transposed V with `n_embd` channels; K has 32 elements a cell, so that the state is nearly
/// all V.
pub fn transposed(n_layer: usize, ggml_type: GgmlType, n_embd: u32) -> KvParams {
    let k = TensorParams { ggml_type, n_embd: 32 };
    let layer = LayerParams { k, v: Some(TensorParams { ggml_type, n_embd }) };
    KvParams { v_trans: true, ..KvParams::new(256, n_layer, layer) }
}

/// `kv` with the cells that `owners` take, in whole pads of 256.
pub fn fitting(kv: KvParams, owners: &[SeqId]) -> KvParams {
    let n_cells = u32::try_from(owners.len()).expect("fewer cells than that");
    KvParams { kv_size: n_cells.next_multiple_of(256), ..kv }
}

/// A context with the cells of `owners` in use, from cell 0 on; files are not synced.
pub fn filled(kv: KvParams, owners: &[SeqId], threads: usize) -> Context {
    filled_with(kv, owners, threads, false)
}

/// The same; `sync_files` as it is said.
pub fn filled_with(kv: KvParams, owners: &[SeqId], threads: usize, sync_files: bool) -> Context {
    let mut params =
        ContextParams { shift: Shift::Engine, sync_files, ..ContextParams::new(65, vec![kv.into()]) };
    params.threads = Threads::new(threads);
    let mut context = Context::new(params).expect("memory for the cache");
    fill(&mut context, owners);
    context
}

/// Takes the cells of `owners`, from cell 0 on.
pub fn fill(context: &mut Context, owners: &[SeqId]) {
    let seq_ids: Vec<SeqId> = (0..N_SEQ).collect();
    let mut next = vec![0; seq_ids.len()];
    let tokens: Vec<_> = owners
        .iter()
        .map(|&owner| {
            let i = usize::try_from(owner).expect("a sequence of the context");
            let pos = next[i];
            next[i] += 1;
            UbatchToken { pos, ext: CellExt::default(), seq_ids: &seq_ids[i..=i] }
        })
        .collect();
    let slot = context.prepare(&tokens).expect("the cache is large enough");
    context.commit(&slot).expect("nothing happened in between");
}

/// A restore found the cells again that the state was saved from.
pub fn check_owners(context: &Context, owners: &[SeqId]) {
    for (cell, &owner) in (0..).zip(owners) {
        let (CellMeta { seqs, .. }, _) = context.cell(0, 0, cell).expect("in range").expect("in use");
        assert_eq!(seqs.single().map(Seq::id), Some(owner), "sequence of cell {cell}");
    }
}

/// Gives cells to `n` tokens of a sequence, from position `pos` on: time of prepare and commit.
pub fn decode(context: &mut Context, seq_id: SeqId, pos: Pos, n: Pos) -> Duration {
    let seq_ids = [seq_id];
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &seq_ids };
    let tokens: Vec<_> = (pos..pos + n).map(token).collect();
    timed(|| {
        let slot = context.prepare(&tokens).expect("cells");
        context.commit(&slot).expect("nothing happened in between");
    })
}

pub fn timed<T>(call: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let out = call();
    let time = start.elapsed();
    black_box(out);
    time
}

/// A call, and right before it the plain copy, write or read of the same bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub reference: Duration,
    pub call: Duration,
}

/// A cache, the state of its sequence 0, and memory for another state of it.
///
/// Every byte that a call touches has been touched before.
pub struct Case {
    pub context: Context,
    pub state: Vec<u8>,
    out: Vec<u8>,
    dir: TempDir,
}

impl Case {
    pub fn new(kv: KvParams, owners: &[SeqId], threads: usize) -> Self {
        let mut context = filled(kv, owners, threads);
        let size = context.state_seq_get_size(0, NONE).expect("sequence 0");
        let mut state = vec![0; usize::try_from(size).expect("64 bits")];
        context.state_seq_get_data(&mut state, 0, NONE).expect("it fits");
        context.state_seq_set_data(&state, 0, NONE).expect("its own state");
        check_owners(&context, owners);
        let out = state.clone();
        Self { context, state, out, dir: tempfile::tempdir().expect("a folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn copy(&mut self) -> Duration {
        timed(|| black_box(&mut self.out).copy_from_slice(black_box(&self.state)))
    }

    pub fn get_size_alone(&mut self) -> Duration {
        timed(|| self.context.state_seq_get_size(black_box(0), NONE).expect("sequence 0"))
    }

    pub fn get_data_alone(&mut self) -> Duration {
        timed(|| self.context.state_seq_get_data(&mut self.out, 0, NONE).expect("it fits"))
    }

    pub fn set_data_alone(&mut self) -> Duration {
        timed(|| self.context.state_seq_set_data(&self.state, 0, NONE).expect("its own state"))
    }

    /// The file must not be there, so that it gets new pages.
    pub fn save_file_alone(&mut self) -> Duration {
        let path = self.path("saved");
        timed(|| self.context.state_seq_save_file(&path, 0, &[]).expect("room on the disk"))
    }

    pub fn load_file_alone(&mut self) -> Duration {
        let path = self.path("saved");
        timed(|| self.context.state_seq_load_file(&path, 0, 0).expect("its own file"))
    }

    /// With a checkpoint as large as the state.
    pub fn slot_save_alone(&mut self) -> Duration {
        let path = self.path("saved");
        let span = CheckpointSpan::new(1, 0, 0).expect("a span");
        let checkpoint = Checkpoint { span, target: &self.state[..], draft: &[][..], driver: &[][..] };
        let contents = SlotContents { checkpoints: vec![checkpoint], ..SlotContents::default() };
        timed(|| self.context.slot_save(&path, 0, contents).expect("room on the disk"))
    }

    /// Verified, without the checkpoint.
    pub fn slot_load_alone(&mut self) -> Duration {
        let path = self.path("saved");
        let params =
            SlotLoadParams { n_ctx_checkpoints: 0, verify: Verify::Full, ..SlotLoadParams::default() };
        timed(|| self.context.slot_load(&path, 0, params).expect("its own file"))
    }

    pub fn remove_saved(&self) {
        std::fs::remove_file(self.path("saved")).expect("it was saved");
    }

    pub fn partial_checkpoint(&mut self) -> Duration {
        let flags = StateFlags::PARTIAL_ONLY;
        timed(|| self.context.state_seq_get_data(&mut self.out, black_box(0), flags).expect("it fits"))
    }

    pub fn partial_size(&self) -> u64 {
        self.context.state_seq_get_size(0, StateFlags::PARTIAL_ONLY).expect("sequence 0")
    }

    pub fn get_size(&mut self) -> Pair {
        Pair { reference: self.copy(), call: self.get_size_alone() }
    }

    pub fn get_data(&mut self) -> Pair {
        Pair { reference: self.copy(), call: self.get_data_alone() }
    }

    pub fn set_data(&mut self) -> Pair {
        Pair { reference: self.copy(), call: self.set_data_alone() }
    }

    /// Against a plain write. Both files are new, and removed before they reach the disk.
    pub fn save_file(&mut self) -> Pair {
        let path = self.path("plain");
        let reference = timed(|| {
            let mut file = File::create_new(&path).expect("a new file");
            file.write_all(&self.state).expect("room on the disk");
        });
        std::fs::remove_file(&path).expect("it was written");
        let call = self.save_file_alone();
        self.remove_saved();
        Pair { reference, call }
    }

    /// Against a plain read of the file that [`Case::save_file_alone`] left.
    pub fn load_file(&mut self) -> Pair {
        let path = self.path("saved");
        let reference = timed(|| {
            let mut file = File::open(&path).expect("it was saved");
            // The headers of a file and of a blob differ by a few bytes.
            let len = usize::try_from(file.metadata().expect("it is open").len()).expect("64 bits");
            let len = len.min(self.out.len());
            file.read_exact(&mut self.out[..len]).expect("it is that long");
        });
        Pair { reference, call: self.load_file_alone() }
    }
}
