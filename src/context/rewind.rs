//! Whether a history can be cut, and where: the questions that a server asks before it reuses a prompt.

use super::Context;
use crate::error::{Error, Result};
use crate::memory::RewindObstacle;
use crate::types::{Pos, SeqId};

impl Context {
    /// Whether `seq_rm(seq_id, pos, -1)` would leave a sequence that can go on at `pos`: every token from there on sees what
    /// it would have seen in a fresh run.
    ///
    /// # Errors
    /// [`Error::SeqId`], [`Error::InvalidArgument`] for a position below 0.
    pub fn can_rewind(&self, seq_id: SeqId, pos: Pos) -> Result<bool> {
        Ok(self.rewind_obstacle(seq_id, pos)?.is_none())
    }

    /// Why not; `None` if it can.
    ///
    /// # Errors
    /// As [`Context::can_rewind`].
    pub fn rewind_obstacle(&self, seq_id: SeqId, pos: Pos) -> Result<Option<RewindObstacle>> {
        let seq = self.seq(seq_id)?;
        Ok(self.memory.reach(seq).obstacle(checked_pos(pos)?))
    }

    /// The largest position that is at most `pos` and to which the sequence can be rewound; 0 if all has to be computed anew.
    ///
    /// # Errors
    /// As [`Context::can_rewind`].
    pub fn rewind_pos(&self, seq_id: SeqId, pos: Pos) -> Result<Pos> {
        let seq = self.seq(seq_id)?;
        Ok(self.memory.reach(seq).last_usable(checked_pos(pos)?))
    }
}

pub(super) fn checked_pos(pos: Pos) -> Result<Pos> {
    if pos < 0 {
        return Err(Error::arg("pos", format!("{pos}, positions start at 0")));
    }
    Ok(pos)
}
