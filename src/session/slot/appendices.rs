//! What stands behind the memory state of a slot file: found, and each appendix read for itself.

use std::ops::Range;

use super::verifier::{Verifier, placed};
use crate::error::{Error, Result};
use crate::format::{BoundedRead, Checkpoint, Checkpoints, DraftState, Integrity, PartKind};
use crate::session::StateFile;

/// The appendices that are whole.
#[derive(Debug, Default)]
pub(super) struct Appendices {
    pub checkpoints: Vec<Checkpoint<Range<u64>>>,
    pub draft: Option<DraftState<Range<u64>>>,
    pub integrity: Option<Found>,
    /// Where nothing lists them, what is wrong with the first that is damaged.
    pub damage: Option<Error>,
}

/// The integrity of a file, and the offset behind it.
#[derive(Debug)]
pub(in crate::session) struct Found {
    pub integrity: Integrity,
    pub end: u64,
}

/// The integrity at the end of the file, if it is there and whole.
pub(super) fn integrity_at_end(file: &StateFile) -> Option<Found> {
    let size = file.size();
    let tail_start = size.checked_sub(Integrity::TAIL_LEN as u64)?;
    let mut tail = [0; Integrity::TAIL_LEN];
    BoundedRead::read(&mut file.part(tail_start..size), "integrity", &mut tail).ok()?;
    let start = Integrity::find(size, &tail).filter(|&start| start >= file.state_start())?;
    let integrity = Integrity::read(&mut file.part(start..size)).ok()?;
    Some(Found { integrity, end: size })
}

impl Appendices {
    /// Reads them by the list of parts: each lies where the list says, whatever is wrong with those before it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the memory state does not end at `state_end`; [`Error::Cancelled`].
    pub fn listed(
        file: &StateFile,
        state_end: u64,
        found_integrity: Found,
        verifier: &mut Verifier<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let mut found = Self::default();
        for (part, range) in placed(&found_integrity.integrity.parts) {
            if part.kind == PartKind::STATE && range.end != state_end {
                return Err(Error::corrupt("end of the memory state", state_end, range.end));
            }
            if matches!(part.kind, PartKind::HEAD | PartKind::STATE) {
                continue;
            }
            let mut read = || {
                verifier.verify(file, part, range.clone())?;
                let mut input = file.part(range.clone());
                if !found.read_next(part.kind, &mut input)? {
                    notes.push(format!("{} of {} bytes: skipped", part.kind, part.len));
                } else if input.left() > 0 {
                    return Err(Error::corrupt("bytes behind the appendix", input.left(), "none"));
                }
                Ok(())
            };
            if let Err(error) = read() {
                if matches!(error, Error::Cancelled { .. }) {
                    return Err(error);
                }
                found.forget(part.kind);
                notes.push(format!("{} are ignored: {}", part.kind, file.failed(error)));
            }
        }
        found.integrity = Some(found_integrity);
        Ok(found)
    }

    /// Reads those from `start` on, one after another. Behind one that is unknown or damaged nobody knows where the next begins.
    pub fn read_in_turn(&mut self, file: &StateFile, mut start: u64, notes: &mut Vec<String>) {
        while start < file.size() {
            let mut input = file.part(start..file.size());
            let left = file.size() - start;
            let kind = BoundedRead::u32(&mut file.part(start..file.size()), "appendix magic");
            let read = kind.and_then(|magic| {
                let kind = PartKind::from_magic(magic);
                Ok((kind, self.read_next(kind, &mut input).inspect_err(|_| self.forget(kind))?))
            });
            match read {
                Ok((_, true)) => start = file.size() - input.left(),
                Ok((kind, false)) => {
                    notes.push(format!("{kind}: it and the {left} bytes from it on are skipped"));
                    break;
                }
                Err(error) => {
                    let error = file.failed(error);
                    notes.push(format!("the {left} bytes from a damaged appendix on are ignored: {error}"));
                    self.damage = Some(error);
                    break;
                }
            }
        }
    }

    /// Where somebody who appends to a file that is already there has begun to: behind the memory state, or behind the integrity
    /// if that comes next.
    pub fn append_start(&self, state_end: u64) -> u64 {
        match &self.integrity {
            Some(Found { integrity, end }) if integrity.parts.len() == 2 => *end,
            _ => state_end,
        }
    }

    /// Reads an appendix; false if it is of an unknown kind.
    fn read_next(&mut self, kind: PartKind, input: &mut impl BoundedRead) -> Result<bool> {
        match kind {
            PartKind::CHECKPOINTS => self.checkpoints = Checkpoints::read(input)?.0,
            PartKind::DRAFT => self.draft = Some(DraftState::read(input)?),
            PartKind::INTEGRITY => {
                let integrity = Integrity::read(input)?;
                self.integrity = Some(Found { integrity, end: input.offset() });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What was read of a damaged appendix counts for nothing.
    fn forget(&mut self, kind: PartKind) {
        match kind {
            PartKind::CHECKPOINTS => self.checkpoints.clear(),
            PartKind::DRAFT => self.draft = None,
            PartKind::INTEGRITY => self.integrity = None,
            _ => {}
        }
    }
}
