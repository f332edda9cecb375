//! kvstate keeps the KV cache of an inference server and saves, restores, checkpoints and files the state of one
//! sequence of it, with llama.cpp's exact bytes and calls.
//!
//! This page shows the crate's two ways to hold a cache. From C and C++ the same is done through
//! `include/kvstate.h`, whose calls are those of llama.h with `kvs_` for `llama_`.
//!
//! # Words
//!
//! They are llama.cpp's. A **section** is one cache of a model's memory: an attention cache, one half of an
//! iSWA pair (full attention, then sliding window), an indexer that takes the cells of an attention cache, the states of
//! recurrent layers, or the compressed half of a DSV4 memory. A **cell** holds K and V of one token in every layer of its
//! section; it has a **position** and belongs to one sequence or more. Cells of a section lie in one **stream**
//! that all sequences share (unified), or in a stream for each sequence. A **plane** is the memory of one
//! layer's K or V in one stream: a row per cell, or for transposed V (`v_trans`) a channel after the other.
//!
//! # Managed: kvstate has the memory
//!
//! The engine asks for cells ([`Context::prepare`]), takes them ([`Context::commit`]), writes K and V of its
//! tokens into them ([`Context::k`], [`Context::v`] give the addresses), and attends to what
//! [`Context::mask_row`] shows.
//!
//! ```
//! use kvstate::context::UbatchToken;
//! use kvstate::format::GgmlType;
//! use kvstate::memory::{KvParams, LayerParams, TensorParams, swa_kv_size};
//! use kvstate::types::{CellExt, StateFlags, Swa, SwaType};
//! use kvstate::{Context, ContextParams, Error};
//!
//! # fn main() -> kvstate::Result<()> {
//! // Two layers of full attention and two with a window of 128 positions, f16, 64 elements a cell.
//! let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 64 };
//! let layer = LayerParams { k: tensor, v: Some(tensor) };
//! let base = KvParams::new(4096, 2, layer);
//! let swa = KvParams {
//!     swa: Swa::new(SwaType::Standard, 128).expect("a window has a size"),
//!     ..KvParams::new(swa_kv_size(4096, 128, 4, 512, true), 2, layer)
//! };
//! let mut context = Context::new(ContextParams::new(4, vec![base.into(), swa.into()]))?;
//!
//! // A prompt of 300 tokens in sequence 0. An engine computes K and V into the cells that it gets.
//! let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
//! let prompt: Vec<_> = (0..300).map(token).collect();
//! let slot = context.prepare(&prompt)?;
//! context.commit(&slot)?;
//! assert_eq!(slot.cells(0).map(<[u32]>::len), Some(300));
//!
//! // A checkpoint holds only what seq_rm cannot roll back: the 128 cells in the window.
//! let mut size = |flags| context.state_seq_get_size(0, flags);
//! let (whole, checkpoint) = (size(StateFlags::empty())?, size(StateFlags::PARTIAL_ONLY)?);
//! assert!(checkpoint < whole / 3);
//!
//! // The state of sequence 0 becomes sequence 3. The restored sequence can be cut to any prefix.
//! let mut state = vec![0; usize::try_from(whole).expect("it fits in memory")];
//! context.state_seq_get_data(&mut state, 0, StateFlags::empty())?;
//! let consumed = context.state_seq_set_data(&state, 3, StateFlags::empty())?;
//! assert_eq!(consumed, state.len());
//! context.seq_rm(3, 200, -1)?;
//! assert_eq!((context.seq_pos_min(3)?, context.seq_pos_max(3)?), (0, 199));
//!
//! // Bad input is an error that says what is wrong, and changes nothing.
//! let error = context.state_seq_set_data(&state[..1000], 3, StateFlags::empty()).unwrap_err();
//! assert!(matches!(error, Error::Truncated { .. }), "{error}");
//! assert_eq!(context.seq_pos_max(3)?, 199);
//! # Ok(())
//! # }
//! ```
//!
//! # Recurrent layers, and other memories
//!
//! [`SectionParams`](memory::SectionParams) has a call for each of llama.cpp's memories, which puts their sections in write order.
//! A recurrent state cannot be rolled back with `seq_rm`, so a checkpoint holds it; of full attention it holds nothing.
//!
//! ```
//! use kvstate::context::UbatchToken;
//! use kvstate::format::GgmlType;
//! use kvstate::memory::{KvParams, LayerParams, RecurrentParams, SectionParams, TensorParams};
//! use kvstate::types::{CellExt, StateFlags};
//! use kvstate::{Context, ContextParams};
//!
//! # fn main() -> kvstate::Result<()> {
//! let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 64 };
//! let attention = KvParams::new(4096, 2, LayerParams { k: tensor, v: Some(tensor) });
//! let recurrent = RecurrentParams::new(6, 96, 512);
//! let mut context = Context::new(ContextParams::new(4, SectionParams::hybrid(attention, recurrent)))?;
//!
//! let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
//! let slot = context.prepare(&(0..32).map(token).collect::<Vec<_>>())?;
//! let states = slot.recurrent(1).expect("section 1 is recurrent");
//! // The engine begins with zeros, and writes the state after the ubatch to row 0 of R and S.
//! assert_eq!((&states.sources[..], states.head), (&[None][..], 0));
//! context.commit(&slot)?;
//!
//! let size = context.state_seq_get_size(0, StateFlags::PARTIAL_ONLY)?;
//! let mut checkpoint = vec![0; usize::try_from(size).expect("it fits in memory")];
//! context.state_seq_get_data(&mut checkpoint, 0, StateFlags::PARTIAL_ONLY)?;
//!
//! // The sequence goes on, and the next request shares its first 32 tokens only.
//! context.commit(&context.prepare(&(32..40).map(token).collect::<Vec<_>>())?)?;
//! assert!(!context.seq_rm(0, 32, -1)?, "the state has seen the others too");
//! context.state_seq_set_data(&checkpoint, 0, StateFlags::PARTIAL_ONLY)?;
//! assert!(context.seq_rm(0, 32, -1)?, "attention is cut, the state is that of the checkpoint");
//! assert_eq!((context.seq_pos_min(0)?, context.seq_pos_max(0)?), (31, 31));
//! # Ok(())
//! # }
//! ```
//!
//! # Adopted: the engine has the memory
//!
//! Its tensors stay where they are; kvstate is told where each plane begins and how it is laid out, and keeps
//! the cells. Everything else is as above.
//!
//! ```
//! use kvstate::format::GgmlType;
//! use kvstate::memory::{KvMemory, KvParams, KvPlanes, LayerParams, SectionParams, TensorParams};
//! use kvstate::storage::{Plane, PlaneShape};
//! use kvstate::{Context, ContextParams};
//!
//! # fn main() -> kvstate::Result<()> {
//! const KV_SIZE: u32 = 256;
//! let tensor = TensorParams { ggml_type: GgmlType::F32, n_embd: 16 };
//! let params = KvParams {
//!     v_trans: true,
//!     ..KvParams::new(KV_SIZE, 1, LayerParams { k: tensor, v: Some(tensor) })
//! };
//!
//! // The engine's tensors: K has a row of 16 floats for each cell, V a row of 256 cells for each channel.
//! let mut k = vec![0.0_f32; 16 * KV_SIZE as usize];
//! let mut v = vec![0.0_f32; 16 * KV_SIZE as usize];
//! // SAFETY: both tensors outlive the context, are as large as the shapes say, and are not touched while a
//! // call of the context runs.
//! let planes = unsafe {
//!     KvPlanes {
//!         k: vec![Plane::adopt(k.as_mut_ptr().cast(), KV_SIZE, PlaneShape::dense_rows(64))?],
//!         v: vec![Some(Plane::adopt(v.as_mut_ptr().cast(), KV_SIZE, PlaneShape::dense_channels(16, 4, KV_SIZE))?)],
//!     }
//! };
//! let section = SectionParams::Kv { kv: params, memory: KvMemory::Adopted(planes) };
//! let mut context = Context::new(ContextParams::new(1, vec![section]))?;
//! context.clear(true)?;
//! # drop(context);
//! # let _ = (k, v);
//! # Ok(())
//! # }
//! ```
//!
//! # Devices and snapshots
//!
//! With the feature `cuda` (on by default; it links nothing) the planes of a layer may be in the memory of a CUDA device:
//! [`KvMemory::Devices`](memory::KvMemory::Devices) names one for each layer, and
//! [`Plane::adopt_device`](storage::Plane::adopt_device) takes the engine's own memory.
//! [`Context::set_stream`](Context::set_stream) names the stream that copies are ordered with. Everything above stays as it
//! is; `docs/gpu.md` has the rest.
//!
//! A [`Snapshot`](context::Snapshot) is the state of a sequence, copied where the cache is, in host memory too. It can be
//! restored anywhere, and saved in the background by a [`Job`](session::Job) while the cache goes on changing.
//!
//! ```
//! # use kvstate::context::UbatchToken;
//! # use kvstate::format::GgmlType;
//! # use kvstate::memory::{KvParams, LayerParams, TensorParams};
//! # use kvstate::types::{CellExt, StateFlags};
//! # use kvstate::{Context, ContextParams};
//! # fn main() -> kvstate::Result<()> {
//! # let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 64 };
//! # let kv = KvParams::new(256, 2, LayerParams { k: tensor, v: Some(tensor) });
//! # let mut context = Context::new(ContextParams::new(2, vec![kv.into()]))?;
//! # let prompt: Vec<_> = (0..9).map(|pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] }).collect();
//! # context.commit(&context.prepare(&prompt)?)?;
//! let snapshot = context.seq_snapshot(0, StateFlags::empty())?;
//! let buffer = vec![0; usize::try_from(snapshot.size()).expect("it fits in memory")];
//! let job = snapshot.get_data_in_background(buffer, None)?;
//! context.clear(true)?; // the server goes on
//! let state = job.wait()?;
//! context.seq_restore(&snapshot, 1)?;
//! context.state_seq_set_data(&state, 0, StateFlags::empty())?;
//! assert_eq!((context.seq_pos_max(0)?, context.seq_pos_max(1)?), (8, 8));
//! # Ok(())
//! # }
//! ```
//!
//! # Slot files
//!
//! [`Context::slot_save`] writes all that a server keeps of a slot into one file, [`Context::slot_load`] gives it back and says what
//! could not be: the draft model's sequence, checkpoints, the speculative driver's state, whose state it is.
//!
//! ```
//! # use kvstate::context::UbatchToken;
//! # use kvstate::format::GgmlType;
//! # use kvstate::memory::{KvParams, LayerParams, TensorParams};
//! # use kvstate::types::CellExt;
//! use kvstate::format::Identity;
//! use kvstate::session::{DraftOutcome, SlotContents, SlotLoadParams, Verify};
//! # use kvstate::{Context, ContextParams};
//! # fn main() -> kvstate::Result<()> {
//! # let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 64 };
//! # let new = || {
//! #     let kv = KvParams::new(256, 2, LayerParams { k: tensor, v: Some(tensor) });
//! #     Context::new(ContextParams::new(2, vec![kv.into()]))
//! # };
//! # let (mut target, mut draft) = (new()?, new()?);
//! # let prompt: Vec<_> = (0..9).map(|pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] }).collect();
//! # target.commit(&target.prepare(&prompt)?)?;
//! # draft.commit(&draft.prepare(&prompt)?)?;
//! # let folder = tempfile::tempdir().expect("a folder");
//! let path = kvstate::session::slot_path(&folder, "slot.bin")?;
//! let identity = Identity { model: b"gemma-3-270m".to_vec(), ..Identity::default() };
//! let contents = SlotContents {
//!     tokens: &[5, 6, 7, 8, 9, 10, 11, 12, 13],
//!     draft: Some((&mut draft, 0)),
//!     driver: b"its state",
//!     identity: identity.clone(),
//!     ..SlotContents::default()
//! };
//! target.slot_save(&path, 0, contents)?;
//!
//! let params =
//!     SlotLoadParams { draft: Some((&mut draft, 1)), identity, verify: Verify::Full, ..SlotLoadParams::default() };
//! let slot = target.slot_load(&path, 1, params)?;
//! assert!(matches!(slot.draft, DraftOutcome::Restored(_)));
//! assert_eq!((slot.tokens.len(), slot.driver.as_deref(), slot.verified), (9, Some(&b"its state"[..]), Verify::Full));
//! assert_eq!((target.seq_pos_max(1)?, draft.seq_pos_max(1)?), (8, 8));
//! # Ok(())
//! # }
//! ```
//!
//! [`session::Autosave`] keeps a folder of slot files, from one run of a server to the next.
//!
//! # Where things are
//!
//! The floors, each of which uses only those before it:
//!
//! | floor | what it knows |
//! |---|---|
//! | [`error`], [`types`] | one error enum with stable codes; positions, flags, windows, runs |
//! | [`format`](mod@format) | byte layouts: bounded reading, headers and versions, appendices, ggml types |
//! | [`cells`] | the metadata of cells, slots for a ubatch, placement of a restore |
//! | [`storage`] | where tensor bytes live, on the host or (`storage::cuda`) on devices; gather and scatter in one batch |
//! | [`state`] | sinks and sources: count, slice, file, snapshot |
//! | [`memory`] | sections: which cells a state holds, and how it is written and read |
//! | [`context`] | the memory of one model, its states, and what an engine needs |
//! | [`session`] | files, slot files, saves in the background, and folders of slots |
//! | [`inspect`] | what is in a file, without a context |
//! | [`convert`] | a file made into one of another layout or type |
//! | [`capi`] | the C ABI |

/// The Rust example of the README, which is run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!(
    "kvstate needs a 64-bit little-endian target: the bytes of states are little-endian, and their sizes have 64 bits"
);

pub mod capi;
pub mod cells;
pub mod context;
pub mod convert;
pub mod error;
pub mod format;
pub mod inspect;
pub mod memory;
pub mod session;
pub mod state;
pub mod storage;
pub mod types;

pub use context::{Context, ContextParams};
pub use error::{Error, Result, Status};
