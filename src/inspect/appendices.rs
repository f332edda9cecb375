//! What follows the memory state of a sequence file: each part with its place, and what is in it.

use std::ops::Range;

use serde::Serialize;

use super::slice;
use crate::error::{Error, Result};
use crate::format::{BoundedRead, Checkpoint, Checkpoints, Cursor, DraftState, Integrity, Part, PartKind};

/// The parts of a sequence file behind its memory state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Appendices {
    /// Context checkpoints, oldest first. Offsets count from the start of the file.
    pub checkpoints: Vec<Checkpoint<Range<u64>>>,
    /// The draft model's state, and that of the speculative driver.
    pub draft: Option<DraftState<Range<u64>>>,
    /// Identity, geometry and checksums.
    pub integrity: Option<Integrity>,
    /// Every part of the file that was found, with its place; without [`Integrity`] those behind the memory state.
    pub parts: Vec<(PartKind, Range<u64>)>,
    /// What could not be read.
    pub damage: Vec<Damage>,
}

/// A part that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Which; `None` if it is not known.
    pub part: Option<PartKind>,
    /// Where it lies, or what is left of the file from it on.
    pub bytes: Range<u64>,
    /// Why.
    pub reason: String,
}

/// A cursor over the input up to the end of a part.
fn cursor<'a>(input: &'a [u8], range: &Range<u64>) -> Result<Cursor<'a>> {
    let mut cursor = Cursor::new(slice(input, &(0..range.end)));
    cursor.bytes("appendix", range.start)?;
    Ok(cursor)
}

impl Appendices {
    /// Reads the integrity at the end of the file, if it is there.
    pub(super) fn at_end(input: &[u8], state_start: u64) -> Self {
        let mut found = Self::default();
        let len = input.len() as u64;
        let tail = input.last_chunk::<{ Integrity::TAIL_LEN }>();
        let start = tail.and_then(|tail| Integrity::find(len, tail)).filter(|&start| start >= state_start);
        if let Some(start) = start {
            found.read_integrity(input, start..len);
        }
        found
    }

    fn read_integrity(&mut self, input: &[u8], range: Range<u64>) {
        match cursor(input, &range).and_then(|mut input| Ok((Integrity::read(&mut input)?, input.offset()))) {
            Ok((integrity, end)) => {
                let placed = integrity.parts.iter().scan(0, |start, part: &Part| {
                    let range = *start..*start + part.len;
                    *start = range.end;
                    Some((part.kind, range))
                });
                self.parts = placed.chain([(PartKind::INTEGRITY, range.start..end as u64)]).collect();
                self.integrity = Some(integrity);
            }
            Err(error) => self.damaged(Some(PartKind::INTEGRITY), range, &error),
        }
    }

    fn damaged(&mut self, part: Option<PartKind>, bytes: Range<u64>, error: &Error) {
        self.damage.push(Damage { part, bytes, reason: error.to_string() });
    }

    /// Where the list of parts has the memory state.
    pub(super) fn state_by_list(&self) -> Option<Range<u64>> {
        self.parts.iter().find(|(kind, _)| *kind == PartKind::STATE).map(|(_, range)| range.clone())
    }

    /// Reads the appendices: by the list of parts, or one after another from the end of the memory state.
    pub(super) fn read(&mut self, input: &[u8], state_end: Option<u64>) {
        if self.integrity.is_some() {
            self.read_listed(input);
        } else if let Some(start) = state_end {
            self.read_in_turn(input, start);
        }
    }

    fn read_listed(&mut self, input: &[u8]) {
        for (kind, range) in self.parts.clone() {
            let read = cursor(input, &range).and_then(|mut input| {
                let is_known = self.read_part(kind, &mut input)?;
                let left = Cursor::left(&input);
                if is_known && left > 0 {
                    return Err(Error::corrupt("bytes behind the appendix", left, "none"));
                }
                Ok(())
            });
            if let Err(error) = read {
                self.damaged(Some(kind), range, &error);
            }
        }
    }

    /// Behind one that is unknown or damaged nobody knows where the next begins.
    fn read_in_turn(&mut self, input: &[u8], mut start: u64) {
        let len = input.len() as u64;
        // The size at its end may be what is damaged: then it is met on the way.
        let at_end = self.damage.pop();
        while start < len {
            let rest = start..len;
            if let Some(damage) = at_end.clone().filter(|damage| damage.bytes.start == start) {
                return self.damage.push(damage);
            }
            let kind = cursor(input, &rest).and_then(|mut input| Cursor::u32(&mut input, "appendix magic"));
            let kind = match kind {
                Ok(magic) => PartKind::from_magic(magic),
                Err(error) => return self.damaged(None, rest, &error),
            };
            if kind == PartKind::INTEGRITY {
                // Somebody has written something behind it.
                self.read_integrity(input, rest.clone());
                if self.integrity.is_some() {
                    (self.checkpoints, self.draft) = (Vec::new(), None);
                    return self.read_listed(input);
                }
                return;
            }
            let read = cursor(input, &rest)
                .and_then(|mut input| Ok((self.read_part(kind, &mut input)?, BoundedRead::offset(&input))));
            match read {
                Ok((true, end)) => {
                    self.parts.push((kind, start..end));
                    start = end;
                }
                Ok((false, _)) => {
                    let error = Error::corrupt("appendix magic", kind, "a known appendix");
                    return self.damaged(Some(kind), rest, &error);
                }
                Err(error) => return self.damaged(Some(kind), rest, &error),
            }
        }
    }

    /// Reads a part; false if it is of an unknown kind. Nothing is kept of one that is damaged.
    fn read_part(&mut self, kind: PartKind, input: &mut Cursor<'_>) -> Result<bool> {
        match kind {
            PartKind::CHECKPOINTS => self.checkpoints = Checkpoints::read(input)?.0,
            PartKind::DRAFT => self.draft = Some(DraftState::read(input)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}
