//! Ranges of a sequence in files: a conversation that is saved in pieces, and a prefix of one.

use std::path::Path;

use super::{StateFile, failed_restore};
use crate::context::Context;
use crate::error::Result;
use crate::format::FileKind;
use crate::memory::Kept;
use crate::state::Input;
use crate::types::{PosRange, SeqId, Token};

/// How a part of a sequence file is to be loaded.
#[derive(Clone, Copy, Debug)]
pub struct RangeLoadParams {
    /// Which positions are wanted; nothing else of the file's tensors is read.
    pub range: PosRange,
    /// They are added to those of the destination, behind which they have to be, and replace them otherwise.
    pub append: bool,
    /// Most tokens that the caller takes.
    pub n_token_capacity: usize,
}

impl Default for RangeLoadParams {
    fn default() -> Self {
        Self { range: PosRange::ALL, append: false, n_token_capacity: usize::MAX }
    }
}

/// What was loaded of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedRange {
    /// The token field, all of it.
    pub tokens: Vec<Token>,
    /// Offset behind the memory state, where appendices begin.
    pub state_end: u64,
    /// What was taken of the state.
    pub kept: Kept,
}

impl Context {
    /// Writes the cells of a sequence that lie in `range`, and tokens, to `path`; returns the size of the file.
    ///
    /// # Errors
    /// As [`Context::state_seq_save_file`]; [`Error::CannotCut`](crate::Error::CannotCut) as in
    /// [`Context::state_seq_get_data_range`].
    pub fn state_seq_save_file_range(
        &mut self,
        path: impl AsRef<Path>,
        seq_id: SeqId,
        range: PosRange,
        tokens: &[Token],
    ) -> Result<u64> {
        let seq = self.seq(seq_id)?;
        self.apply_shifts_of(Some(seq))?;
        self.save_file(path.as_ref(), FileKind::Sequence, tokens, |context, record| {
            context.write_file_range(record, seq, range)
        })
    }

    /// Loads positions of the sequence in the file at `path`: those below the end of the range are what a prompt without its reply
    /// is. Of the tensors only what is wanted is read.
    ///
    /// The sequence can go on where a range ends that cuts the state: a window has to have what a token there sees, of the file
    /// and, if it is added to, of the destination; a recurrent state cannot be cut. Only the end is looked at: a range that begins
    /// behind 0 and replaces the destination leaves a piece, whose next tokens attend to it alone.
    ///
    /// # Errors
    /// As [`Context::state_seq_load_file`]; [`Error::CannotCut`](crate::Error::CannotCut), and
    /// [`Error::PositionsMeet`](crate::Error::PositionsMeet). The context is unchanged then.
    pub fn state_seq_load_file_range(
        &mut self,
        path: impl AsRef<Path>,
        dest: SeqId,
        params: RangeLoadParams,
    ) -> Result<LoadedRange> {
        let RangeLoadParams { range, append, n_token_capacity } = params;
        let seq = self.seq(dest)?;
        let file = StateFile::open(path, FileKind::Sequence, n_token_capacity)?;
        let failed = |error| failed_restore(&file, FileKind::Sequence, error);
        let plan = self.plan_file_range(&file.source(), seq, range, append).map_err(failed)?;
        let (state_end, kept) = (plan.end.offset(), plan.kept());
        self.commit_file(&file, &plan).map_err(failed)?;
        drop(plan);
        Ok(LoadedRange { tokens: file.into_tokens(), state_end, kept })
    }
}
