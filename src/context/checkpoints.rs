//! Checkpoints of a sequence: partial states to go back to, where the sequence itself cannot be cut any more.
//!
//! They lie the closer the nearer they are to the end. When one has to go, it is the one that leaves the smallest gap,
//! measured against the distance from the end: a server that takes back `n` tokens goes back to at most a constant factor of
//! `n` before the end, not to the start of the history.

use std::fmt;

use super::rewind::checked_pos;
use super::{Context, Snapshot, fitting};
use crate::error::{Error, Result};
use crate::format::{self, CheckpointSpan, Cursor};
use crate::memory::{MemoryPlan, RewindObstacle, SavedReach, Scope};
use crate::state::Source;
use crate::types::{Pos, Seq, SeqId, StateFlags};

/// Where checkpoints are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointMemory {
    /// In the memory that the cache is in: a [`Snapshot`] each.
    #[default]
    Cache,
    /// In host memory: the bytes of a state each.
    Host,
}

/// How many checkpoints of a sequence there may be.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointsParams {
    /// Most checkpoints, at least 1 (llama-server's `n_ctx_checkpoints`).
    pub n_max: usize,
    /// Most bytes of all of them; `None`: no bound.
    pub max_bytes: Option<u64>,
    /// So many positions more to compute make no difference; when room is needed, checkpoints that are closer go first.
    /// Llama-server's `checkpoint_min_step` is meant alike.
    pub min_step: u32,
    /// Where they are.
    pub memory: CheckpointMemory,
}

impl Default for CheckpointsParams {
    /// 32, as in llama-server, in the memory of the cache; 256 positions make no difference.
    fn default() -> Self {
        Self { n_max: 32, max_bytes: None, min_step: 256, memory: CheckpointMemory::Cache }
    }
}

/// A partial state of a sequence, and what it was then.
#[derive(Debug)]
pub struct Checkpoint {
    n_tokens: u64,
    pos_min: Pos,
    pos_max: Pos,
    /// Bytes of the state.
    size: u64,
    saved: SavedReach,
    state: State,
}

#[derive(Debug)]
enum State {
    Snapshot(Snapshot),
    Blob(Vec<u8>),
}

impl Checkpoint {
    /// Tokens of the history then, as the caller counts them.
    #[must_use]
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    /// From this position on, every section has the sequence after a restore. Cells that a window masked do not count: they
    /// are not in a checkpoint, even if the cache still had them.
    #[must_use]
    pub fn pos_min(&self) -> Pos {
        self.pos_min
    }

    /// The largest position of the sequence then.
    #[must_use]
    pub fn pos_max(&self) -> Pos {
        self.pos_max
    }

    /// Bytes of its state.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Writes its state to the start of `dst`, as [`Context::state_seq_get_data`] wrote it then; returns its size.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] (`dst` is untouched then), [`Error::Device`].
    pub fn get_data(&self, dst: &mut [u8]) -> Result<usize> {
        match &self.state {
            State::Snapshot(snapshot) => snapshot.get_data(dst, None),
            State::Blob(blob) => {
                fitting(dst, self.size)?.copy_from_slice(blob);
                Ok(blob.len())
            }
        }
    }
}

impl State {
    fn source(&self) -> Result<Source<'_>> {
        match self {
            Self::Snapshot(snapshot) => Ok(Source::snapshot(&snapshot.state)),
            Self::Blob(blob) => blob_source(blob),
        }
    }
}

fn blob_source(blob: &[u8]) -> Result<Source<'_>> {
    let mut metadata = Cursor::new(blob);
    format::read_seq_blob_header(&mut metadata)?;
    Ok(Source::blob(metadata))
}

fn room_for(bytes: u64) -> Result<Vec<u8>> {
    let mut blob = Vec::new();
    let short = |_| Error::OutOfMemory { what: "a checkpoint", bytes };
    blob.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(short)?;
    Ok(blob)
}

/// What a checkpoint is worth for a history that diverges at a position.
#[derive(Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// Restored and cut, the sequence can go on at `pos`.
    Serves {
        /// At most where the history diverges.
        pos: Pos,
    },
    /// It was taken behind the divergence, and does not hold what a token there sees.
    PastDivergence {
        /// Its largest position.
        pos_max: Pos,
        /// Where the history diverges.
        pos: Pos,
    },
    /// After a restore something would be missing: the sections that a partial state leaves out do not reach that far.
    Masked(RewindObstacle),
    /// It cannot be restored into this context: it is of other sections, or cells are missing.
    Unfit(Error),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Serves { pos } => write!(f, "serves at position {pos}"),
            Self::PastDivergence { pos_max, pos } => {
                write!(
                    f,
                    "past the divergence: its largest position is {pos_max}, the history diverges at {pos}"
                )
            }
            Self::Masked(obstacle) => obstacle.fmt(f),
            Self::Unfit(error) => error.fmt(f),
        }
    }
}

/// What [`Checkpoints::resume`] has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The sequence holds the positions below this one, and goes on here; 0: nothing served, it is empty.
    pub pos: Pos,
    /// `n_tokens` of the checkpoint that was restored; `None`: the sequence was cut as it was.
    pub restored: Option<u64>,
}

/// The checkpoints of a sequence, by position. They belong to the history that the sequence has: after
/// [`Checkpoints::resume`] those of positions that are gone are dropped; whoever cuts the sequence himself tells it by
/// [`Checkpoints::truncate`].
///
/// ```
/// use kvstate::context::{Checkpoints, CheckpointsParams, Resumed};
/// # use kvstate::context::UbatchToken;
/// # use kvstate::format::GgmlType;
/// # use kvstate::memory::{KvParams, LayerParams, TensorParams};
/// # use kvstate::types::{CellExt, Pos, Swa, SwaType};
/// # use kvstate::{Context, ContextParams};
/// # fn main() -> kvstate::Result<()> {
/// # let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 64 };
/// # let layer = LayerParams { k: tensor, v: Some(tensor) };
/// # let swa = Swa::new(SwaType::Standard, 8).expect("a window has a size");
/// # let swa = KvParams { swa, ..KvParams::new(16, 1, layer) };
/// # let mut context = Context::new(ContextParams::new(1, vec![KvParams::new(256, 1, layer).into(), swa.into()]))?;
/// # let decode = |context: &mut Context, tokens: std::ops::Range<Pos>| -> kvstate::Result<()> {
/// #     for pos in tokens {
/// #         let token = UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
/// #         context.commit(&context.prepare(&[token])?)?;
/// #     }
/// #     Ok(())
/// # };
/// // A window of 8 positions, and cells for 16.
/// let mut checkpoints = Checkpoints::new(0, CheckpointsParams::default())?;
/// decode(&mut context, 0..32)?;
/// checkpoints.take(&mut context, 32)?;
/// decode(&mut context, 32..64)?;
///
/// // The next prompt shares 40 tokens, of which the window has lost what the 41st sees.
/// assert!(!context.can_rewind(0, 40)?);
/// let resumed = checkpoints.resume(&mut context, 40)?;
/// assert_eq!(resumed, Resumed { pos: 32, restored: Some(32) });
/// assert_eq!(context.seq_pos_max(0)?, 31);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Checkpoints {
    seq_id: SeqId,
    params: CheckpointsParams,
    /// Of strictly growing `pos_max`.
    list: Vec<Checkpoint>,
}

impl Checkpoints {
    /// None yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for `n_max` 0.
    pub fn new(seq_id: SeqId, params: CheckpointsParams) -> Result<Self> {
        if params.n_max == 0 {
            return Err(Error::arg("n_max", "0, at least 1 is possible"));
        }
        Ok(Self { seq_id, params, list: Vec::new() })
    }

    /// The sequence.
    #[must_use]
    pub fn seq_id(&self) -> SeqId {
        self.seq_id
    }

    /// The checkpoints, by position.
    #[must_use]
    pub fn as_slice(&self) -> &[Checkpoint] {
        &self.list
    }

    /// Bytes of all states.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.list.iter().map(Checkpoint::size).sum()
    }

    /// Takes a checkpoint of the sequence as it is, with `n_tokens` in its history.
    ///
    /// Those that are not older than it are dropped, as the history was rewound meanwhile; then as many as `n_max` and
    /// `max_bytes` demand, before memory is taken.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::InvalidArgument`] for a sequence that is empty or cannot go on at its end,
    /// [`Error::CheckpointTooLarge`]; all checkpoints are as before then. [`Error::ShiftFailed`], [`Error::OutOfMemory`],
    /// [`Error::Device`]: those that had to make room are gone.
    pub fn take(&mut self, context: &mut Context, n_tokens: u64) -> Result<&Checkpoint> {
        let seq = context.seq(self.seq_id)?;
        let saved = context.memory.saved_reach(seq);
        let Some((pos_min, pos_max)) = context.memory.saved_positions(seq, &saved) else {
            return Err(Error::arg("seq_id", format!("{}, an empty sequence", self.seq_id)));
        };
        let end = pos_max.saturating_add(1);
        if let Some(obstacle) = context.memory.reach_after(seq, &saved).obstacle(end) {
            return Err(Error::arg(
                "seq_id",
                format!("{}, which cannot go on at its end: {obstacle}", self.seq_id),
            ));
        }
        let need = context.state_seq_get_size(self.seq_id, StateFlags::PARTIAL_ONLY)?;
        self.check_size(need)?;
        self.truncate(pos_max);
        self.make_room(1, need, pos_max);
        let state = self.state_of(context, need)?;
        let at = self.list.len();
        self.list.push(Checkpoint { n_tokens, pos_min, pos_max, size: need, saved, state });
        Ok(&self.list[at])
    }

    /// Adds a checkpoint that was taken before, by the bytes of [`Checkpoint::get_data`]: that of a slot file, say, whose state the
    /// sequence has now. They stay in host memory.
    ///
    /// One with the same largest position is replaced. Then some are dropped as by [`Checkpoints::take`], which may be this one.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::CheckpointTooLarge`], [`Error::InvalidArgument`] for a state that does not end at the largest position
    /// of `span`, or that ends behind the sequence; as [`Context::state_seq_set_data`] for one that cannot be restored. All
    /// checkpoints are as before then.
    pub fn put(&mut self, context: &Context, span: CheckpointSpan, state: &[u8]) -> Result<()> {
        let (seq, size) = (context.seq(self.seq_id)?, state.len() as u64);
        self.check_size(size)?;
        let saved = context.memory.saved_reach_of(seq, &context.plan_partial(&blob_source(state)?, seq)?);
        // A state of full attention alone is empty, whatever positions the sequence had.
        let pos_max = saved.positions().map_or(span.pos_max(), |(_, pos_max)| pos_max);
        if pos_max != span.pos_max() {
            return Err(Error::arg("pos_max", format!("{}, the state ends at {pos_max}", span.pos_max())));
        }
        let end = context.memory.reach(seq).pos_max().unwrap_or(-1);
        if pos_max > end {
            let reason = format!("{pos_max}, behind sequence {}, which ends at {end}", self.seq_id);
            return Err(Error::arg("pos_max", reason));
        }
        let pos_min = context.memory.saved_positions(seq, &saved).map_or(0, |(pos_min, _)| pos_min);
        let mut blob = room_for(size)?;
        blob.extend_from_slice(state);
        let state = State::Blob(blob);
        let at = self.list.partition_point(|checkpoint| checkpoint.pos_max < pos_max);
        if self.list.get(at).is_some_and(|checkpoint| checkpoint.pos_max == pos_max) {
            self.list.remove(at);
        }
        let n_tokens = span.n_tokens().unsigned_abs();
        self.list.insert(at, Checkpoint { n_tokens, pos_min, pos_max, size, saved, state });
        let newest = self.list.last().map_or(pos_max, |checkpoint| checkpoint.pos_max);
        self.make_room(0, 0, newest);
        Ok(())
    }

    fn check_size(&self, need: u64) -> Result<()> {
        match self.params.max_bytes {
            Some(max_bytes) if need > max_bytes => Err(Error::CheckpointTooLarge { need, max_bytes }),
            _ => Ok(()),
        }
    }

    /// Drops those that are missed least, of the ones before `newest`, until so many more of so many bytes have room.
    fn make_room(&mut self, n: usize, bytes: u64, newest: Pos) {
        let max_bytes = self.params.max_bytes.unwrap_or(u64::MAX);
        while self.list.len() + n > self.params.n_max || self.bytes().saturating_add(bytes) > max_bytes {
            let older = self.list.iter().map(|checkpoint| checkpoint.pos_max).take_while(|&pos| pos < newest);
            let Some(missed) = least_missed(&older.collect::<Vec<_>>(), newest, self.params.min_step) else {
                break;
            };
            self.list.remove(missed);
        }
    }

    fn state_of(&self, context: &mut Context, need: u64) -> Result<State> {
        let flags = StateFlags::PARTIAL_ONLY;
        match self.params.memory {
            CheckpointMemory::Cache => context.seq_snapshot(self.seq_id, flags).map(State::Snapshot),
            CheckpointMemory::Host => {
                let mut blob = room_for(need)?;
                blob.resize(usize::try_from(need).unwrap_or(usize::MAX), 0);
                context.state_seq_get_data(&mut blob, self.seq_id, flags)?;
                Ok(State::Blob(blob))
            }
        }
    }

    /// What each checkpoint is worth if the history diverges at `pos`: the first position whose token is another one, or is
    /// to be computed again for its logits.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::InvalidArgument`] for a position below 0.
    pub fn verdicts(&self, context: &Context, pos: Pos) -> Result<Vec<Verdict>> {
        let (seq, pos) = (context.seq(self.seq_id)?, checked_pos(pos)?);
        Ok(self.list.iter().map(|checkpoint| checkpoint.verdict(context, seq, pos)).collect())
    }

    /// Brings the sequence back to the largest position, at most `pos`, from which it can go on as in a fresh run: it is cut
    /// as it is, or the best checkpoint is restored and cut. Checkpoints behind that position are dropped.
    ///
    /// # Errors
    /// As [`Checkpoints::verdicts`], and those of a restore; the checkpoints are as before then.
    pub fn resume(&mut self, context: &mut Context, pos: Pos) -> Result<Resumed> {
        let as_it_is = context.rewind_pos(self.seq_id, pos)?;
        let verdicts = self.verdicts(context, pos)?;
        let serving = self.list.iter().zip(&verdicts).filter_map(|(checkpoint, verdict)| match *verdict {
            Verdict::Serves { pos } if pos > as_it_is => Some((checkpoint, pos)),
            _ => None,
        });
        let best = serving.max_by_key(|&(_, pos)| pos);
        if let Some((checkpoint, _)) = best {
            context.restore_checkpoint(checkpoint, context.seq(self.seq_id)?)?;
        }
        let resumed = Resumed {
            pos: best.map_or(as_it_is, |(_, pos)| pos),
            restored: best.map(|(checkpoint, _)| checkpoint.n_tokens),
        };
        let is_cut = context.seq_rm(self.seq_id, resumed.pos, -1)?;
        debug_assert!(is_cut, "sections can be cut where they say so");
        self.truncate(resumed.pos);
        Ok(resumed)
    }

    /// The history goes on at `pos`: checkpoints that hold that position or a later one are dropped.
    pub fn truncate(&mut self, pos: Pos) {
        let n = self.list.partition_point(|checkpoint| checkpoint.pos_max < pos);
        self.list.truncate(n);
    }
}

impl Checkpoint {
    fn verdict(&self, context: &Context, seq: Seq, pos: Pos) -> Verdict {
        if let Err(error) = context.plan_checkpoint(self, seq) {
            return Verdict::Unfit(error);
        }
        let reach = context.memory.reach_after(seq, &self.saved);
        let last = pos.min(self.pos_max.saturating_add(1));
        match (reach.last_usable(last), reach.obstacle(last)) {
            (0, _) if self.pos_max >= pos => Verdict::PastDivergence { pos_max: self.pos_max, pos },
            (0, Some(obstacle)) => Verdict::Masked(obstacle),
            (pos, _) => Verdict::Serves { pos },
        }
    }
}

impl Context {
    fn plan_checkpoint<'a>(&self, checkpoint: &'a Checkpoint, seq: Seq) -> Result<MemoryPlan<'a>> {
        self.memory.check_saved(seq, &checkpoint.saved)?;
        self.plan_partial(&checkpoint.state.source()?, seq)
    }

    fn plan_partial<'a>(&self, source: &Source<'a>, seq: Seq) -> Result<MemoryPlan<'a>> {
        self.memory.state_plan(source, StateFlags::PARTIAL_ONLY, self.read_params(Scope::Seq(seq)))
    }

    fn restore_checkpoint(&mut self, checkpoint: &Checkpoint, seq: Seq) -> Result<()> {
        let plan = self.plan_checkpoint(checkpoint, seq)?;
        self.changed();
        self.memory.state_commit(&plan, &self.transfer, None)
    }
}

/// Which of `positions`, ascending and below `newest`, is missed least. Position -1, the empty sequence, is always there.
///
/// Without it, what diverges just before the next one goes back to the one before: measured from the end, by the factor of the
/// two distances. That factor only shrinks as the history grows.
fn least_missed(positions: &[Pos], newest: Pos, min_step: u32) -> Option<usize> {
    // Of 33 bits at most, so that products fit.
    let behind = |pos: Pos| u128::from(newest.abs_diff(pos)) + u128::from(min_step.max(1));
    let factor = |i: usize| {
        let previous = if i == 0 { -1 } else { positions[i - 1] };
        let next = positions.get(i + 1).map_or(newest, |&next| next);
        (behind(previous), behind(next))
    };
    (0..positions.len()).min_by(|&i, &j| {
        let ((a, b), (c, d)) = (factor(i), factor(j));
        (a * d).cmp(&(c * b))
    })
}
