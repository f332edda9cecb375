//! Parts of a slot file compared with their checksums.

use std::ops::Range;

use super::Verify;
use crate::error::{Error, Result};
use crate::format::{Integrity, Part, PartKind};
use crate::session::StateFile;
use crate::storage::{ProgressCallback, Report, Threads};

/// Reads parts of a file up to a level, and says how far it is if that is all of the file.
#[derive(Debug)]
pub(in crate::session) struct Verifier<'a> {
    level: Verify,
    threads: Threads,
    /// Of no bytes, until the parts are known and all of them are verified.
    report: Report<'a>,
}

/// The parts of a file with where they lie.
pub(super) fn placed(parts: &[Part]) -> impl Iterator<Item = (Part, Range<u64>)> + '_ {
    parts.iter().scan(0, |start, &part| {
        let range = *start..*start + part.len;
        *start = range.end;
        Some((part, range))
    })
}

impl<'a> Verifier<'a> {
    pub fn new(level: Verify, threads: Threads, callback: Option<&'a mut ProgressCallback>) -> Self {
        Self { level, threads, report: Report::new(callback, 0) }
    }

    /// Verifies what a restore cannot do without.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Io`], [`Error::Cancelled`].
    pub(super) fn verify_state(&mut self, file: &StateFile, integrity: &Integrity) -> Result<()> {
        if self.level >= Verify::Full {
            self.report.total = integrity.parts.iter().map(|part| part.len).sum();
        }
        let of_state = |part: &Part| matches!(part.kind, PartKind::HEAD | PartKind::STATE);
        placed(&integrity.parts)
            .filter(|(part, _)| of_state(part))
            .try_for_each(|(part, range)| self.verify(file, part, range))
    }

    /// Compares a part with its checksum, if the level wants it.
    ///
    /// # Errors
    /// As [`Verifier::verify_state`].
    pub(super) fn verify(&mut self, file: &StateFile, part: Part, range: Range<u64>) -> Result<()> {
        let level = if part.kind == PartKind::HEAD { Verify::Headers } else { Verify::Full };
        if self.level < level {
            return Ok(());
        }
        let found = file.crc32c(range, self.threads, &mut self.report)?;
        if found == part.crc32c {
            return Ok(());
        }
        let field = match part.kind {
            PartKind::HEAD => "crc32c of header and tokens",
            PartKind::STATE => "crc32c of the memory state",
            _ => "crc32c",
        };
        Err(Error::corrupt(field, format_args!("{found:08x}"), format_args!("{:08x}", part.crc32c)))
    }

    /// Nothing is left to verify. Returns whether there was anything of which a callback is told.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn finish(self) -> Result<bool> {
        let is_told = self.report.total > 0;
        self.report.finish()?;
        Ok(is_told)
    }
}
