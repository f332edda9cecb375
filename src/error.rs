//! One error type for every floor, with codes that are part of the C ABI.

use std::fmt::Display;

use crate::types::{Pos, SeqId};

/// Result of every fallible call of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Status codes of the C ABI (`kvs_status`). Numbers never change meaning; retired ones stay reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// An argument or a parameter makes no sense; the message names it.
    InvalidArgument = 1,
    /// The handle is NULL, freed, or of another kind.
    InvalidHandle = 2,
    /// A panic inside an earlier call left the handle unusable; only free works.
    Poisoned = 3,
    /// The caller's buffer is too small.
    BufferTooSmall = 4,
    /// The bytes end before the state does.
    Truncated = 5,
    /// The bytes are no state, or hold a value that no state can hold.
    Corrupt = 6,
    /// A file of a version that is not read.
    UnsupportedVersion = 7,
    /// The state was made with another geometry than the cache has.
    Mismatch = 8,
    /// A file older than version 4 does not say whether its K and V are rotated, and nobody else did.
    RotationUnstated = 9,
    /// Too few free cells.
    NoSpace = 10,
    /// The `ON_DEVICE` state behind a blob is gone or is another one.
    NoDeviceState = 11,
    /// Positions cannot be shifted in this context.
    CannotShift = 12,
    /// Shifts are pending and could not be applied.
    ShiftFailed = 13,
    /// The cache changed between prepare and commit, or between plan and read.
    Stale = 14,
    /// An operating-system call on a file failed.
    Io = 15,
    /// Memory for the cache or a state could not be had.
    OutOfMemory = 16,
    /// A panic was caught at the C boundary: a bug in kvstate.
    Internal = 17,
    /// A call into the caller failed.
    Callback = 18,
    /// The progress callback, or the caller of a background save, asked for an end.
    Cancelled = 19,
    /// There is no CUDA driver that can be used, or this build has no CUDA.
    NoCuda = 20,
    /// There is no device of that number that can be used.
    NoDevice = 21,
    /// The driver is older than the kernels need.
    DriverTooOld = 22,
    /// A call of the device's driver failed.
    Device = 23,
    /// The caller's stream is being captured into a graph, so nothing can be ordered behind it.
    StreamCapturing = 24,
    /// Another process, or another handle of this one, keeps the folder.
    Locked = 25,
    /// The files would take more bytes than they may.
    OverBudget = 26,
    /// A state that is to be added to a sequence does not begin behind its end.
    PositionsMeet = 27,
    /// A section cannot go on at the end of the range, or prefix, that is wanted.
    CannotCut = 28,
}

/// Everything that can go wrong. Each message names the field and both values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument or parameter out of its range.
    #[error("{name}: {reason}")]
    InvalidArgument {
        /// The argument, as the caller spells it.
        name: String,
        /// What it is and what it has to be.
        reason: String,
    },
    /// A sequence id outside `0..n_seq_max`.
    #[error("seq_id {seq_id} is out of range [0, {n_seq_max})")]
    SeqId {
        /// The id that was given.
        seq_id: SeqId,
        /// One past the largest.
        n_seq_max: u32,
    },
    /// Flag bits that have no meaning.
    #[error("unknown state flags {flags:#x} (known: {known:#x})")]
    UnknownFlags {
        /// All bits that were given.
        flags: u32,
        /// All bits that are known.
        known: u32,
    },
    /// A handle that is NULL, freed, or of another kind.
    #[error("{name} is not a live handle")]
    InvalidHandle {
        /// The argument.
        name: &'static str,
    },
    /// A handle that an earlier panic left unusable.
    #[error("the context is poisoned by an earlier internal error; only free works")]
    Poisoned,
    /// A buffer that does not hold the state.
    #[error("buffer too small: the state has {need} bytes, the buffer {size}")]
    BufferTooSmall {
        /// Bytes of the state.
        need: u64,
        /// Bytes of the buffer.
        size: u64,
    },
    /// Input that ends too early.
    #[error("truncated state: {field} needs {need} bytes at offset {offset}, {left} are left")]
    Truncated {
        /// What was to be read.
        field: &'static str,
        /// Where, in bytes from the start of the input.
        offset: u64,
        /// Bytes that it takes.
        need: u64,
        /// Bytes that are there.
        left: u64,
    },
    /// A value that no valid state holds.
    #[error("{field}: {got} (expected {expected})")]
    Corrupt {
        /// What was read.
        field: &'static str,
        /// Its value.
        got: String,
        /// What it has to be.
        expected: String,
    },
    /// A file whose magic or version is unknown; `kind` is "sequence state", "session" or "GGUF".
    #[error("unknown (magic, version) for {kind} file: {magic:08x}, {version:08x}")]
    UnknownVersion {
        /// "sequence state", "session" or "GGUF".
        kind: &'static str,
        /// First word of the file.
        magic: u32,
        /// Second word of the file.
        version: u32,
    },
    /// A state whose geometry differs from the cache's; `what` is llama.cpp's own text where it has one.
    #[error("{what}: the state has {state}, the cache {cache} ({place})")]
    Mismatch {
        /// The field.
        what: &'static str,
        /// Value in the state.
        state: String,
        /// Value in the cache.
        cache: String,
        /// Section and layer.
        place: String,
    },
    /// An old file that does not say whether it is rotated.
    #[error(
        "the rotation of K and V is not recorded in a version-{version} file and has to be stated: \
         set legacy_rotation to rotated or plain ({place}: cache has n_rot_k {n_rot_k}, n_rot_v {n_rot_v})"
    )]
    RotationUnstated {
        /// Version of the sequence layout.
        version: u32,
        /// Section.
        place: String,
        /// Rotation of the cache's K.
        n_rot_k: u32,
        /// Rotation of the cache's V.
        n_rot_v: u32,
    },
    /// Too few cells for a state.
    #[error("failed to find {need} available cells in kv cache: {free} of {kv_size} can be used ({place})")]
    NoSpace {
        /// Cells of the state that must be placed.
        need: u64,
        /// Cells that could be used.
        free: u64,
        /// Cells of the stream.
        kv_size: u32,
        /// Section and stream.
        place: String,
    },
    /// No slot for a ubatch.
    #[error("failed to find a slot for {n_tokens} tokens in a stream of {kv_size} cells ({place})")]
    NoSlot {
        /// Tokens of the ubatch in that stream.
        n_tokens: u64,
        /// Cells of the stream.
        kv_size: u32,
        /// Section and stream.
        place: String,
    },
    /// More tokens in a file than the caller has room for; `kind` as in [`Error::UnknownVersion`].
    #[error("token count in {kind} file exceeded capacity! {count} > {capacity}")]
    TokenCapacity {
        /// "sequence state" or "session".
        kind: &'static str,
        /// Tokens in the file.
        count: u64,
        /// Room of the caller.
        capacity: u64,
    },
    /// A file that could not be restored; the source says why.
    #[error("failed to restore {kind}: {source}")]
    Restore {
        /// "sequence state" or "session".
        kind: &'static str,
        /// The reason.
        source: Box<Error>,
    },
    /// A model's file that cannot be read as a GGUF; the source says why.
    #[error("{path}: {source}")]
    Gguf {
        /// The file.
        path: String,
        /// The reason.
        source: Box<Error>,
    },
    /// An `ON_DEVICE` blob whose tensors are gone.
    #[error("no device state of sequence {seq_id}: {reason}")]
    NoDeviceState {
        /// Source sequence, as the blob names it.
        seq_id: SeqId,
        /// What is there instead.
        reason: &'static str,
    },
    /// Positions cannot be shifted.
    #[error("cannot shift positions: {reason}")]
    CannotShift {
        /// Why.
        reason: &'static str,
    },
    /// A shift that leaves the range of positions.
    #[error("position {pos} shifted by {delta} leaves the range of positions")]
    PosOverflow {
        /// A cell's position.
        pos: Pos,
        /// What was to be added.
        delta: Pos,
    },
    /// Pending shifts that could not be applied before a write.
    #[error("{n_cells} cells have a pending shift: {reason} ({place})")]
    ShiftFailed {
        /// Cells with a pending shift.
        n_cells: usize,
        /// What failed.
        reason: String,
        /// Section and stream.
        place: String,
    },
    /// A slot that was prepared before the cache changed.
    #[error("the slot was prepared at generation {slot}, the cache is at {cache}: prepare again")]
    Stale {
        /// Generation of the slot.
        slot: u64,
        /// Generation of the cache.
        cache: u64,
    },
    /// A state that was planned before the cache changed.
    #[error("cell {cell} is held by another sequence since the state was planned: plan again ({place})")]
    StalePlan {
        /// A cell that was found for the state.
        cell: u32,
        /// Section and stream.
        place: String,
    },
    /// A state that is to be added to a sequence, and does not begin behind its end.
    #[error("position {pos} of the state is not behind {pos_max}, the last one of the sequence ({place})")]
    PositionsMeet {
        /// First position of the state.
        pos: Pos,
        /// Last position of the sequence.
        pos_max: Pos,
        /// Section.
        place: String,
    },
    /// A range, or a prefix, at whose end a section cannot go on.
    #[error("cannot cut at position {p1}: {reason}")]
    CannotCut {
        /// The end of the range.
        p1: i64,
        /// What is missing, and where.
        reason: String,
    },
    /// A failed file operation.
    #[error("{op} {path}: {source}")]
    Io {
        /// What was tried.
        op: &'static str,
        /// On which path.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Memory that could not be had.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: u64,
    },
    /// A checkpoint that is larger than all checkpoints of its sequence may be.
    #[error("a checkpoint of {need} bytes does not fit max_bytes: {max_bytes}")]
    CheckpointTooLarge {
        /// Bytes of its state.
        need: u64,
        /// Bytes that the checkpoints may take.
        max_bytes: u64,
    },
    /// A call into the owner of cells, tensors or bytes that failed.
    #[error("{name} of the caller failed: {code}")]
    Callback {
        /// Which call.
        name: &'static str,
        /// What it returned.
        code: i32,
    },
    /// A transfer that the progress callback ended.
    #[error("cancelled after {done} of {total} bytes")]
    Cancelled {
        /// Bytes that had been moved.
        done: u64,
        /// Bytes to move.
        total: u64,
    },
    /// CUDA that cannot be used.
    #[error("CUDA cannot be used: {reason}")]
    NoCuda {
        /// Why.
        reason: String,
    },
    /// A device that is not there.
    #[error("no CUDA device {device}: {n_device} can be used")]
    NoDevice {
        /// Its number.
        device: i32,
        /// Devices that are there.
        n_device: i32,
    },
    /// A driver that does not know the kernels' language.
    #[error("the CUDA driver is too old: it is of CUDA {driver}, {need} or later is needed")]
    DriverTooOld {
        /// Version of CUDA that the driver is of.
        driver: String,
        /// Version that is needed.
        need: &'static str,
    },
    /// A call of the device's driver that failed.
    #[error("{call} on device {device}: {name} ({code})")]
    Device {
        /// Which call; a failure of work that was queued earlier may be told by a later one.
        call: &'static str,
        /// Number of the device, -1 if the call is about none.
        device: i32,
        /// The driver's name for the failure.
        name: String,
        /// Its number.
        code: u32,
    },
    /// A device whose hardware does not run the kernels.
    #[error("CUDA device {device} has compute capability {capability}, {need} or later is needed")]
    DeviceTooOld {
        /// Its number.
        device: i32,
        /// What it has.
        capability: String,
        /// What the kernels need.
        need: &'static str,
    },
    /// A stream that nothing can be ordered behind.
    #[error("the stream of device {device} is being captured into a graph")]
    StreamCapturing {
        /// Number of the device.
        device: i32,
    },
    /// A folder that somebody else keeps.
    #[error("the folder is in use by another process, or another handle of this one: {path} is locked")]
    Locked {
        /// The lock file.
        path: String,
    },
    /// Files for which there is no room in their folder's budget.
    #[error(
        "slot {slot_id}: {need} bytes do not fit max_bytes: {max_bytes}, beside {newer} bytes of slots used later"
    )]
    OverBudget {
        /// The slot.
        slot_id: u32,
        /// Bytes of its files.
        need: u64,
        /// Bytes of the files of slots that were used later.
        newer: u64,
        /// Bytes that the files of the folder may take.
        max_bytes: u64,
    },
    /// A caught panic.
    #[error("internal error: {0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub(crate) fn arg(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { name: name.into(), reason: reason.into() }
    }

    /// An [`Error::Corrupt`].
    pub(crate) fn corrupt(field: &'static str, got: impl Display, expected: impl Display) -> Self {
        Self::Corrupt { field, got: format!("{got}"), expected: format!("{expected}") }
    }

    /// The stable code of this error.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            Self::InvalidArgument { .. } | Self::SeqId { .. } | Self::UnknownFlags { .. } => {
                Status::InvalidArgument
            }
            Self::PosOverflow { .. } => Status::InvalidArgument,
            Self::InvalidHandle { .. } => Status::InvalidHandle,
            Self::Poisoned => Status::Poisoned,
            Self::BufferTooSmall { .. } | Self::TokenCapacity { .. } => Status::BufferTooSmall,
            Self::Truncated { .. } => Status::Truncated,
            Self::Corrupt { .. } => Status::Corrupt,
            Self::UnknownVersion { .. } => Status::UnsupportedVersion,
            Self::Mismatch { .. } => Status::Mismatch,
            Self::RotationUnstated { .. } => Status::RotationUnstated,
            Self::NoSpace { .. } | Self::NoSlot { .. } => Status::NoSpace,
            Self::Restore { source, .. } | Self::Gguf { source, .. } => source.status(),
            Self::NoDeviceState { .. } => Status::NoDeviceState,
            Self::CannotShift { .. } => Status::CannotShift,
            Self::ShiftFailed { .. } => Status::ShiftFailed,
            Self::Stale { .. } | Self::StalePlan { .. } => Status::Stale,
            Self::PositionsMeet { .. } => Status::PositionsMeet,
            Self::CannotCut { .. } => Status::CannotCut,
            Self::Io { .. } => Status::Io,
            Self::OutOfMemory { .. } | Self::CheckpointTooLarge { .. } => Status::OutOfMemory,
            Self::Callback { .. } => Status::Callback,
            Self::Cancelled { .. } => Status::Cancelled,
            Self::NoCuda { .. } => Status::NoCuda,
            Self::NoDevice { .. } | Self::DeviceTooOld { .. } => Status::NoDevice,
            Self::DriverTooOld { .. } => Status::DriverTooOld,
            Self::Device { .. } => Status::Device,
            Self::StreamCapturing { .. } => Status::StreamCapturing,
            Self::Locked { .. } => Status::Locked,
            Self::OverBudget { .. } => Status::OverBudget,
            Self::Internal(_) => Status::Internal,
        }
    }
}
