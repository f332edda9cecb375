//! Checkpoints of a sequence: partial states to go back to, where the sequence itself cannot be cut any more.
//!
//! They lie the closer the nearer they are to the end. When one has to go, it is the one that leaves the smallest gap,
//! measured against the distance from the end: a server that takes back `n` tokens goes back to at most a constant factor of
//! `n` before the end, not to the start of the history.

use std::fmt;

use super::rewind::checked_pos;
use super::{Context, Snapshot};
use crate::error::{Error, Result};
use crate::format::{self, Cursor};
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

    fn source(&self) -> Result<Source<'_>> {
        match &self.state {
            State::Snapshot(snapshot) => Ok(Source::snapshot(&snapshot.state)),
            State::Blob(blob) => {
                let mut metadata = Cursor::new(blob);
                format::read_seq_blob_header(&mut metadata)?;
                Ok(Source::blob(metadata))
            }
        }
    }
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
        let max_bytes = self.params.max_bytes.unwrap_or(u64::MAX);
        if need > max_bytes {
            return Err(Error::CheckpointTooLarge { need, max_bytes });
        }
        self.truncate(pos_max);
        while self.list.len() >= self.params.n_max || self.bytes() > max_bytes - need {
            let positions: Vec<Pos> = self.list.iter().map(|checkpoint| checkpoint.pos_max).collect();
            let Some(missed) = least_missed(&positions, pos_max, self.params.min_step) else { break };
            self.list.remove(missed);
        }
        let state = self.state_of(context, need)?;
        let at = self.list.len();
        self.list.push(Checkpoint { n_tokens, pos_min, pos_max, size: need, saved, state });
        Ok(&self.list[at])
    }

    fn state_of(&self, context: &mut Context, need: u64) -> Result<State> {
        let flags = StateFlags::PARTIAL_ONLY;
        match self.params.memory {
            CheckpointMemory::Cache => context.seq_snapshot(self.seq_id, flags).map(State::Snapshot),
            CheckpointMemory::Host => {
                let len = usize::try_from(need).unwrap_or(usize::MAX);
                let mut blob = Vec::new();
                let short = |_| Error::OutOfMemory { what: "a checkpoint", bytes: need };
                blob.try_reserve_exact(len).map_err(short)?;
                blob.resize(len, 0);
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
        let params = self.read_params(Scope::Seq(seq));
        self.memory.state_plan(&checkpoint.source()?, StateFlags::PARTIAL_ONLY, params)
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
