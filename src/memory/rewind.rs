//! From which positions a sequence can go on: what servers ask before they cut a history.
//!
//! A position is usable if every token of the rest sees what it saw before: a section that has dropped cells which a token
//! there would attend to must say so. Sections drop cells from the oldest on and make no gaps, so the smallest and largest
//! positions tell. Gaps that a caller made are his own.

use super::kv_write::{Scope, WriteParams};
use super::{KvCache, Memory, Section};
use crate::error::{Error, Result};
use crate::types::{Pos, PosRange, Seq, StateFlags, Swa};

/// Why a sequence cannot be cut at a position and go on there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RewindObstacle {
    /// The sequence does not reach that far.
    #[error("position {pos} is past the end: the largest position is {pos_max}")]
    PastEnd {
        /// The position.
        pos: Pos,
        /// The largest position of the sequence, -1 if it is empty.
        pos_max: Pos,
    },
    /// A section no longer has what a token at that position sees.
    #[error("section {section} has {}, and a token at {pos} needs positions {} to {}", words(*.has), need.0, need.1)]
    CellsGone {
        /// Name of the section.
        section: String,
        /// The position.
        pos: Pos,
        /// First and last position that are needed.
        need: (Pos, Pos),
        /// First and last position that are there; `None`: nothing.
        has: Option<(Pos, Pos)>,
    },
}

fn words(has: Option<(Pos, Pos)>) -> String {
    has.map_or_else(|| "no positions".to_owned(), |(first, last)| format!("positions {first} to {last}"))
}

/// What decides from where a section can go on with a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reach {
    /// First and last position that a window, or full attention, can look back on.
    Kv { swa: Swa, has: Option<(Pos, Pos)> },
}

impl Reach {
    fn pos_max(self) -> Option<Pos> {
        match self {
            Self::Kv { has, .. } => has.map(|(_, last)| last),
        }
    }

    /// The positions that a token at `pos` needs and the section does not have all of; `None`: it can go on there.
    fn missing(self, pos: Pos) -> Option<(Pos, Pos)> {
        match self {
            Self::Kv { swa, has } => {
                let need = swa.seen_before(pos)?;
                let is_whole = has.is_some_and(|(first, last)| first <= need.0 && last >= need.1);
                (!is_whole).then_some(need)
            }
        }
    }

    /// The largest position that is at most `at_most` and from which the section can go on. From 0 every section can.
    fn last_usable(self, at_most: Pos) -> Pos {
        match self {
            Self::Kv { swa, has } => {
                // Below the end what is seen begins no later, but for a chunk: its first token sees nothing before it.
                let end = has.and_then(|(_, last)| last.checked_add(1)).unwrap_or(0);
                let chunk = Pos::try_from(swa.first_unmasked(at_most)).unwrap_or(0);
                let usable = [at_most, end.min(at_most), chunk.clamp(0, at_most)]
                    .into_iter()
                    .filter(|&pos| self.missing(pos).is_none());
                usable.max().unwrap_or(0)
            }
        }
    }
}

impl KvCache {
    fn reach(&self, seq: Seq) -> Reach {
        Reach::Kv { swa: self.geometry.swa, has: self.seq_pos_min(seq).zip(self.seq_pos_max(seq)) }
    }

    /// As it is after a restore of the state that would be written now; `None` where that has nothing of the section.
    fn saved_reach(&self, seq: Seq, params: WriteParams) -> Option<Reach> {
        let swa = self.geometry.swa;
        self.geometry.writes(params.flags).then(|| {
            let entries = self.seq_cells(seq).seq_cells(seq, PosRange::ALL);
            let kept = &entries[params.first_kept(entries, swa)..];
            Reach::Kv { swa, has: kept.first().zip(kept.last()).map(|(first, last)| (first.0, last.0)) }
        })
    }
}

/// From where a sequence could go on after a partial state was restored, by section. `None`: as far as the section can then.
#[derive(Clone, Debug)]
pub(crate) struct SavedReach(Vec<Option<Reach>>);

/// From where a sequence can go on: all sections of a memory together.
#[derive(Debug)]
pub(crate) struct SeqReach<'a>(Vec<(&'a str, Reach)>);

impl SeqReach<'_> {
    fn pos_max(&self) -> Option<Pos> {
        self.0.iter().filter_map(|(_, reach)| reach.pos_max()).max()
    }

    /// Why a sequence cannot be cut at `pos`, which is at least 0, and go on there.
    pub fn obstacle(&self, pos: Pos) -> Option<RewindObstacle> {
        let pos_max = self.pos_max().unwrap_or(-1);
        if i64::from(pos) > i64::from(pos_max) + 1 {
            return Some(RewindObstacle::PastEnd { pos, pos_max });
        }
        self.0.iter().find_map(|&(section, reach)| match reach {
            Reach::Kv { has, .. } => {
                let need = reach.missing(pos)?;
                Some(RewindObstacle::CellsGone { section: section.to_owned(), pos, need, has })
            }
        })
    }

    /// The largest position that is at most `at_most`, which is at least 0, and has no obstacle.
    pub fn last_usable(&self, at_most: Pos) -> Pos {
        let end = self.pos_max().map_or(0, |pos| pos.saturating_add(1));
        let mut pos = at_most.min(end);
        // Each section lowers it to what it can; what all of them leave alone, all can.
        loop {
            let lowered = self.0.iter().fold(pos, |pos, (_, reach)| reach.last_usable(pos));
            if lowered == pos {
                return pos;
            }
            pos = lowered;
        }
    }
}

impl Memory {
    /// From where `seq` can go on as it is.
    pub fn reach(&self, seq: Seq) -> SeqReach<'_> {
        SeqReach(
            self.sections.iter().map(|Section::Kv(kv)| (kv.geometry.name.as_str(), kv.reach(seq))).collect(),
        )
    }

    /// From where it could go on after the restore of a partial state, which must be of as many sections.
    pub fn reach_after(&self, seq: Seq, saved: &SavedReach) -> SeqReach<'_> {
        let mut reach = self.reach(seq);
        for ((_, live), saved) in reach.0.iter_mut().zip(&saved.0) {
            *live = saved.unwrap_or(*live);
        }
        reach
    }

    /// What [`Memory::reach_after`] needs to know of a partial state that is written now.
    pub fn saved_reach(&self, seq: Seq) -> SavedReach {
        let flags = StateFlags::PARTIAL_ONLY;
        let params = WriteParams { scope: Scope::Seq(seq), flags, max_masked_cells: None };
        SavedReach(self.sections.iter().map(|Section::Kv(kv)| kv.saved_reach(seq, params)).collect())
    }

    /// Whether a partial state is of sections like these: what it can be cut to depends on their windows.
    pub fn check_saved(&self, saved: &SavedReach) -> Result<()> {
        if saved.0.len() != self.sections.len() {
            return Err(Error::Mismatch {
                what: "mismatched number of sections",
                state: saved.0.len().to_string(),
                cache: self.sections.len().to_string(),
                place: "checkpoint".into(),
            });
        }
        let window = |swa: Swa| (!swa.is_none()).then_some(swa);
        let saved_window = |saved: Option<Reach>| saved.and_then(|Reach::Kv { swa, .. }| window(swa));
        let mut sections = self.kv_caches().zip(&saved.0);
        let other = sections.find(|(kv, saved)| saved_window(**saved) != window(kv.geometry.swa));
        let Some((kv, saved)) = other else { return Ok(()) };
        let words = |swa: Option<Swa>| {
            swa.map_or("none".to_owned(), |swa| format!("{:?}, n_swa {}", swa.swa_type(), swa.n_swa()))
        };
        Err(Error::Mismatch {
            what: "mismatched window",
            state: words(saved_window(*saved)),
            cache: words(window(kv.geometry.swa)),
            place: format!("section {}", kv.geometry.name),
        })
    }

    /// From where on all of `seq` would be there if a partial state that is written now were restored, and its largest
    /// position; `None` if it is empty.
    pub fn saved_positions(&self, seq: Seq, saved: &SavedReach) -> Option<(Pos, Pos)> {
        let reaches = self.reach_after(seq, saved);
        let has = reaches.0.iter().filter_map(|&(_, Reach::Kv { has, .. })| has);
        has.reduce(|(first, last), (a, b)| (first.max(a), last.max(b)))
    }
}
