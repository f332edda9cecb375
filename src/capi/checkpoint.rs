//! Checkpoints of a sequence, and what they are worth.

use std::ffi::c_char;

use super::handle::{
    Tagged, free_tagged, host_bytes_mut, into_tagged, kvs_context, live, out, with_context, with_context_mut,
    with_tagged,
};
use super::memory::{KVS_REASON_SIZE, reason};
use super::params::{self, Params};
use super::slot_file::{self, kvs_slot_checkpoint};
use super::state::size_of_state;
use super::status::{kvs_status, status_of, value_or};
use super::{kvs_pos, kvs_seq_id};
use crate::context::{CheckpointMemory, Checkpoints, CheckpointsParams, Resumed, Verdict};
use crate::error::{Error, Result};

/// Where checkpoints are: KVS_CHECKPOINT_MEMORY_CACHE or _HOST.
pub type kvs_checkpoint_memory = u32;

/// In the memory that the cache is in, a device's or the host's.
pub const KVS_CHECKPOINT_MEMORY_CACHE: kvs_checkpoint_memory = 0;
/// In host memory.
pub const KVS_CHECKPOINT_MEMORY_HOST: kvs_checkpoint_memory = 1;

/// How many checkpoints of a sequence there may be. Fill with kvs_checkpoints_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_checkpoints_params {
    /// sizeof(kvs_checkpoints_params), set by the init call.
    pub struct_size: usize,
    /// Most checkpoints, at least 1; by default 32.
    pub n_max: u32,
    /// So many positions more to compute make no difference; when room is needed, checkpoints that are closer go first. By
    /// default 256.
    pub min_step: u32,
    /// Most bytes of all of them; 0 (by default): no bound.
    pub max_bytes: u64,
    /// Where they are; by default KVS_CHECKPOINT_MEMORY_CACHE.
    pub memory: kvs_checkpoint_memory,
    /// 0.
    pub reserved: u32,
}

// SAFETY: repr(C), struct_size first, integers only.
unsafe impl Params for kvs_checkpoints_params {
    const NAME: &'static str = "kvs_checkpoints_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        let CheckpointsParams { n_max, min_step, .. } = CheckpointsParams::default();
        Self {
            struct_size: 0,
            n_max: u32::try_from(n_max).unwrap_or(u32::MAX),
            min_step,
            max_bytes: 0,
            memory: KVS_CHECKPOINT_MEMORY_CACHE,
            reserved: 0,
        }
    }
}

impl kvs_checkpoints_params {
    fn check(&self) -> Result<CheckpointsParams> {
        if self.reserved != 0 {
            return Err(Error::arg("reserved", format!("{}, it is 0", self.reserved)));
        }
        Ok(CheckpointsParams {
            n_max: self.n_max as usize,
            max_bytes: (self.max_bytes > 0).then_some(self.max_bytes),
            min_step: self.min_step,
            memory: match self.memory {
                KVS_CHECKPOINT_MEMORY_CACHE => CheckpointMemory::Cache,
                KVS_CHECKPOINT_MEMORY_HOST => CheckpointMemory::Host,
                other => return Err(Error::arg("memory", format!("{other}, known are 0 and 1"))),
            },
        })
    }
}

/// A partial state to go back to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_checkpoint {
    /// Tokens of the history then, as the caller counts them.
    pub n_tokens: i64,
    /// Bytes of its state.
    pub size: u64,
    /// From this position on every section has the sequence after a restore: cells that a window masked do not count.
    pub pos_min: kvs_pos,
    /// The largest position of the sequence then.
    pub pos_max: kvs_pos,
}

/// What a checkpoint is worth for a history that diverges.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_checkpoint_verdict {
    /// KVS_CHECKPOINT_SERVES, or why not.
    pub kind: u32,
    /// Where the sequence could go on; 0 if the checkpoint does not serve.
    pub pos: kvs_pos,
    /// The same in words, cut to the size.
    pub text: [c_char; KVS_REASON_SIZE],
}

/// Restored and cut, the sequence can go on.
pub const KVS_CHECKPOINT_SERVES: u32 = 0;
/// It was taken behind the divergence, and does not hold what a token there sees.
pub const KVS_CHECKPOINT_PAST_DIVERGENCE: u32 = 1;
/// After a restore something would be missing that a token sees.
pub const KVS_CHECKPOINT_MASKED: u32 = 2;
/// It cannot be restored into this context: it is of other sections, or cells are missing.
pub const KVS_CHECKPOINT_UNFIT: u32 = 3;

/// The checkpoints of one sequence, by position. They belong to the history that the sequence has, and outlive the context. One
/// call at a time may use them; calls marked Const may run side by side.
pub struct kvs_checkpoints {
    checkpoints: Checkpoints,
}

impl Tagged for kvs_checkpoints {
    const LIVE: u64 = 0x6b76_735f_6370_7431;
    const NAME: &'static str = "checkpoints";
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_params_init(
    params: *mut kvs_checkpoints_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Makes room for the checkpoints of a sequence; params NULL: the defaults. Free it with kvs_checkpoints_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_new(
    seq_id: kvs_seq_id,
    params: *const kvs_checkpoints_params,
    checkpoints_out: *mut *mut kvs_checkpoints,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let checkpoints_out = out("checkpoints_out", checkpoints_out)?;
        let params =
            if params.is_null() { kvs_checkpoints_params::defaults() } else { params::read(params)? };
        let checkpoints = Checkpoints::new(seq_id, params.check()?)?;
        *checkpoints_out = into_tagged(kvs_checkpoints { checkpoints });
        Ok(())
    })
}

/// Frees them all; NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_free(checkpoints: *mut kvs_checkpoints) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_tagged(checkpoints) });
}

/// Takes a checkpoint of the sequence as it is, with n_tokens tokens in its history. Those that are not behind it are replaced:
/// the history was rewound meanwhile. Others make room before memory is taken, as n_max and max_bytes demand: those whose loss
/// leaves the smallest gap, measured against its distance from the end. Fails for a sequence that is empty or cannot go on at
/// its end, and with KVS_STATUS_OUT_OF_MEMORY for a checkpoint that alone exceeds max_bytes; no checkpoint is lost then. If
/// memory or a device fails, those that made room are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_take(
    checkpoints: *mut kvs_checkpoints,
    ctx: *mut kvs_context,
    n_tokens: i64,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(checkpoints, |handle| {
            let n_tokens = u64::try_from(n_tokens)
                .map_err(|_| Error::arg("n_tokens", format!("{n_tokens}, at least 0 is possible")))?;
            // SAFETY: as above.
            with_context_mut(ctx, |context| handle.checkpoints.take(context, n_tokens).map(drop))
        })
    })
}

/// Adds a checkpoint that was taken before, such as one that kvs_slot_load gave back, for the sequence that was restored with it: its
/// target is copied to host memory and stays there; its draft and driver are the caller's. pos_min is taken from the state, where that
/// has positions. One with the same pos_max is replaced; then others make room as in kvs_checkpoints_take, or this one itself. Fails
/// for a pos_max behind the end of the sequence or other than the state's, and as kvs_state_seq_set_data for a state that cannot be
/// restored into ctx; ctx does not change, and no checkpoint is lost then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_put(
    checkpoints: *mut kvs_checkpoints,
    ctx: *const kvs_context,
    checkpoint: *const kvs_slot_checkpoint,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(checkpoints, |handle| {
            // SAFETY: as above.
            let checkpoint = slot_file::checkpoint(&params::read(checkpoint)?)?;
            // SAFETY: as above.
            with_context(ctx, |context| handle.checkpoints.put(context, checkpoint.span, checkpoint.target))
        })
    })
}

/// Brings the sequence back to the largest position, at most pos, from which it can go on as in a fresh run: it is cut as it is,
/// or the best checkpoint is restored and cut. pos is the first position whose token is another one, or is to be computed again
/// for its logits. The sequence then holds exactly the positions below *pos_out; 0: nothing served, it is empty. *n_tokens_out
/// (NULL: not wanted) is n_tokens of the checkpoint that was restored, -1 without one. Checkpoints behind that position are
/// dropped. On failure the checkpoints are as before, and the sequence as after a kvs_snapshot_restore that fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_resume(
    checkpoints: *mut kvs_checkpoints,
    ctx: *mut kvs_context,
    pos: kvs_pos,
    pos_out: *mut kvs_pos,
    n_tokens_out: *mut i64,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let pos_out = out("pos_out", pos_out)?;
        let n_tokens_out =
            if n_tokens_out.is_null() { None } else { Some(out("n_tokens_out", n_tokens_out)?) };
        let Resumed { pos, restored } = with_tagged(checkpoints, |handle| {
            // SAFETY: as above.
            with_context_mut(ctx, |context| handle.checkpoints.resume(context, pos))
        })?;
        *pos_out = pos;
        if let Some(n_tokens_out) = n_tokens_out {
            *n_tokens_out = restored.map_or(-1, in_i64);
        }
        Ok(())
    })
}

/// Tells that the history goes on at pos: checkpoints that hold that position or a later one are dropped. Whoever cuts the
/// sequence himself says so; kvs_checkpoints_resume does it alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_truncate(
    checkpoints: *mut kvs_checkpoints,
    pos: kvs_pos,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        with_tagged(checkpoints, |handle| {
            handle.checkpoints.truncate(pos);
            Ok(())
        })
    })
}

/// How many there are. 0 on failure. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_count(checkpoints: *const kvs_checkpoints) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { Ok(live(checkpoints)?.checkpoints.as_slice().len()) })
}

/// Bytes of all their states. 0 on failure. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_size(checkpoints: *const kvs_checkpoints) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { size_of_state(live(checkpoints)?.checkpoints.bytes()) })
}

/// Tells of the checkpoint at an index, in the order of positions. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_get(
    checkpoints: *const kvs_checkpoints,
    index: usize,
    checkpoint_out: *mut kvs_checkpoint,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let checkpoint = one(live(checkpoints)?.checkpoints.as_slice(), index)?;
        *out("checkpoint_out", checkpoint_out)? = kvs_checkpoint {
            n_tokens: in_i64(checkpoint.n_tokens()),
            size: checkpoint.size(),
            pos_min: checkpoint.pos_min(),
            pos_max: checkpoint.pos_max(),
        };
        Ok(())
    })
}

/// Writes the state of the checkpoint at an index, kvs_checkpoint.size bytes, as kvs_state_seq_get_data with
/// KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY wrote it then: the target of a kvs_slot_checkpoint. Returns its size. 0: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_get_data(
    checkpoints: *const kvs_checkpoints,
    index: usize,
    dst: *mut u8,
    size: usize,
) -> usize {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let checkpoint = one(live(checkpoints)?.checkpoints.as_slice(), index)?;
        checkpoint.get_data(host_bytes_mut("dst", dst, size)?)
    })
}

/// What the checkpoint at an index is worth if the history diverges at pos. Changes nothing. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_checkpoints_verdict(
    checkpoints: *const kvs_checkpoints,
    ctx: *const kvs_context,
    index: usize,
    pos: kvs_pos,
    verdict_out: *mut kvs_checkpoint_verdict,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let checkpoints = &live(checkpoints)?.checkpoints;
        let verdicts = with_context(ctx, |context| checkpoints.verdicts(context, pos))?;
        let verdict = one(&verdicts, index)?;
        let (kind, pos) = match *verdict {
            Verdict::Serves { pos } => (KVS_CHECKPOINT_SERVES, pos),
            Verdict::PastDivergence { .. } => (KVS_CHECKPOINT_PAST_DIVERGENCE, 0),
            Verdict::Masked(_) => (KVS_CHECKPOINT_MASKED, 0),
            Verdict::Unfit(_) => (KVS_CHECKPOINT_UNFIT, 0),
        };
        *out("verdict_out", verdict_out)? = kvs_checkpoint_verdict { kind, pos, text: reason(verdict) };
        Ok(())
    })
}

fn one<T>(all: &[T], index: usize) -> Result<&T> {
    let n = all.len();
    all.get(index).ok_or_else(|| Error::arg("index", format!("{index} is out of range [0, {n})")))
}

/// It came from an `i64`.
fn in_i64(n_tokens: u64) -> i64 {
    n_tokens.try_into().unwrap_or(i64::MAX)
}
