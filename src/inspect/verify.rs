//! Says which part of a file is damaged.

use std::ops::Range;

use serde::Serialize;

use super::appendices::{Appendices, Damage};
use super::state::Basis;
use super::{inspect, slice};
use crate::error::Result;
use crate::format::{Part, PartKind, crc32c_append};
use crate::session::Verify;
use crate::storage::ProgressCallback;

/// What was found of each part of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Whether the file has checksums; one without can be checked for its structure only.
    pub has_checksums: bool,
    /// In the order of the bytes.
    pub parts: Vec<VerifiedPart>,
}

/// A part, and whether it is what was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerifiedPart {
    /// Which; `None` where nobody can know.
    pub part: Option<PartKind>,
    /// Where it lies.
    pub bytes: Range<u64>,
    /// What was found.
    pub outcome: Outcome,
}

/// What is known of a part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its checksum holds.
    Whole,
    /// Its structure makes sense; no checksum was compared.
    Plausible,
    /// No checksum was compared, and nothing else is known: it is of an unknown kind, or the header is damaged.
    Unknown,
    /// It is damaged, and how.
    Damaged(String),
}

impl Verification {
    /// Whether nothing is damaged, as far as was compared.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !self.parts.iter().any(|part| matches!(part.outcome, Outcome::Damaged(_)))
    }
}

/// Compares the parts of an input with its checksums, as far as `level` says, and checks their structure.
///
/// # Errors
/// As [`inspect`], for an input without checksums; [`Error::Cancelled`](crate::Error::Cancelled).
pub fn verify(
    input: &[u8],
    level: Verify,
    mut progress: Option<&mut ProgressCallback>,
) -> Result<Verification> {
    let inspected = inspect(input);
    // A damaged header does not hide the checksums at the end.
    let at_end;
    let found = if let Ok(found) = &inspected {
        &found.appendices
    } else {
        at_end = Appendices::at_end(input, 0);
        &at_end
    };
    let Some(integrity) = &found.integrity else { return inspected.map(|found| by_structure(&found)) };
    let mut problems: Vec<(PartKind, String)> = Vec::new();
    match &inspected {
        Ok(description) => {
            problems.extend(named(&found.damage));
            let head_len = integrity.parts.first().map_or(0, |head| head.len);
            if let Basis::Incomplete { reason } = &description.state.basis {
                problems.push((PartKind::STATE, reason.clone()));
            }
            let end = description.tokens.as_ref().map_or(0, |tokens| tokens.end);
            if end != head_len {
                problems.push((PartKind::HEAD, format!("the tokens end at {end}, not at {head_len}")));
            }
        }
        Err(error) => problems.push((PartKind::HEAD, error.to_string())),
    }

    // Without the header nobody can know how the memory state is to be read.
    let has_head = !problems.iter().any(|(of, _)| *of == PartKind::HEAD);
    let wanted = |part: &Part| match part.kind {
        PartKind::HEAD => level >= Verify::Headers,
        _ => level >= Verify::Full,
    };
    let total = integrity.parts.iter().filter(|part| wanted(part)).map(|part| part.len).sum();
    let mut done = 0;
    let mut parts = Vec::new();
    for ((kind, range), part) in found.parts.iter().zip(&integrity.parts) {
        let problem = problems.iter().find(|(of, _)| of == kind).map(|(_, text)| text.clone());
        let is_known =
            matches!(*kind, PartKind::HEAD | PartKind::STATE | PartKind::CHECKPOINTS | PartKind::DRAFT);
        let outcome = if wanted(part) {
            let crc = crc32c(slice(input, range), &mut done, total, progress.as_deref_mut())?;
            match problem {
                _ if crc != part.crc32c => {
                    Outcome::Damaged(format!("crc32c {crc:08x} (expected {:08x})", part.crc32c))
                }
                Some(_) if *kind == PartKind::STATE && !has_head => Outcome::Whole,
                // It was saved so: its writer is at fault, not the disk.
                Some(text) => Outcome::Damaged(format!("its checksum holds, but {text}")),
                None => Outcome::Whole,
            }
        } else {
            match problem {
                Some(_) if *kind == PartKind::STATE && !has_head => Outcome::Unknown,
                Some(text) => Outcome::Damaged(text),
                None if is_known => Outcome::Plausible,
                None => Outcome::Unknown,
            }
        };
        parts.push(VerifiedPart { part: Some(*kind), bytes: range.clone(), outcome });
    }
    // Its checksum is compared whenever it is read.
    let rest = found.parts.iter().skip(integrity.parts.len());
    parts.extend(rest.map(|(kind, range)| VerifiedPart {
        part: Some(*kind),
        bytes: range.clone(),
        outcome: Outcome::Whole,
    }));
    let behind = parts.last().map_or(0, |part| part.bytes.end)..input.len() as u64;
    if !behind.is_empty() {
        let text = "bytes behind the last appendix, which no checksum covers".to_owned();
        parts.push(VerifiedPart { part: None, bytes: behind, outcome: Outcome::Damaged(text) });
    }
    Ok(Verification { has_checksums: true, parts })
}

fn named(damage: &[Damage]) -> impl Iterator<Item = (PartKind, String)> + '_ {
    damage.iter().filter_map(|damage| Some((damage.part?, damage.reason.clone())))
}

/// What can be said of an input without checksums.
fn by_structure(found: &super::Description) -> Verification {
    let plausible = |part, bytes: &Range<u64>| VerifiedPart {
        part: Some(part),
        bytes: bytes.clone(),
        outcome: Outcome::Plausible,
    };
    let mut parts = vec![plausible(PartKind::HEAD, &(0..found.state.bytes.start))];
    let mut state = plausible(PartKind::STATE, &found.state.bytes);
    if let Basis::Incomplete { reason } = &found.state.basis {
        state.bytes.end = found.bytes;
        state.outcome = Outcome::Damaged(reason.clone());
    }
    parts.push(state);
    parts.extend(found.appendices.parts.iter().map(|(kind, bytes)| plausible(*kind, bytes)));
    parts.extend(found.appendices.damage.iter().map(|Damage { part, bytes, reason }| VerifiedPart {
        part: *part,
        bytes: bytes.clone(),
        outcome: Outcome::Damaged(reason.clone()),
    }));
    parts.sort_by_key(|part| part.bytes.start);
    Verification { has_checksums: false, parts }
}

fn crc32c(
    bytes: &[u8],
    done: &mut u64,
    total: u64,
    mut progress: Option<&mut ProgressCallback>,
) -> Result<u32> {
    let mut crc = 0;
    for piece in bytes.chunks(1 << 20) {
        crc = crc32c_append(crc, piece);
        *done += piece.len() as u64;
        if let Some(progress) = progress.as_deref_mut() {
            progress.report(*done, total)?;
        }
    }
    Ok(crc)
}
