//! From which positions a sequence can go on: what servers ask before they cut a history.
//!
//! A position is usable if every token of the rest sees what it saw before: a section that has dropped cells which a token
//! there would attend to must say so. What a window has lost shows beside full attention, which drops nothing: the positions that
//! both have from the end back. Gaps that a caller made are his own.

use super::kv_write::{Scope, WriteParams};
use super::section::SectionPlan;
use super::{Dsv4Cache, KvCache, Memory, MemoryPlan, RecurrentCache, Section};
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
    /// A section keeps states of a few positions only, and of none that the sequence could go on from there.
    #[error("section {section} has states to go on at {}, and none for {pos}", words(*.has))]
    NoState {
        /// Name of the section.
        section: String,
        /// The position.
        pos: Pos,
        /// First and last position to go on at; `None`: there is no state.
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
    /// The position of the state, and first and last position to go on at, behind the states that are there.
    States { pos_max: Option<Pos>, has: Option<(Pos, Pos)> },
    /// It has nothing, and needs nothing.
    Nothing,
}

/// What a state of a section is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    FullAttention,
    Window(Swa),
    States,
    Nothing,
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::FullAttention => f.write_str("full attention"),
            Self::Window(swa) => write!(f, "{:?}, n_swa {}", swa.swa_type(), swa.n_swa()),
            Self::States => f.write_str("states"),
            Self::Nothing => f.write_str("nothing"),
        }
    }
}

impl Reach {
    /// Behind the state of `pos_max`, if it is there, or up to `max_cut` positions before that.
    pub(super) fn of_states(pos_max: Option<Pos>, is_there: bool, max_cut: u32) -> Self {
        let has = pos_max.filter(|_| is_there).map(|pos| {
            let last = pos.saturating_add(1);
            (last.saturating_sub_unsigned(max_cut).max(1), last)
        });
        Self::States { pos_max, has }
    }

    fn shape(self) -> Shape {
        match self {
            Self::Kv { swa, .. } if swa.is_none() => Shape::FullAttention,
            Self::Kv { swa, .. } => Shape::Window(swa),
            Self::States { .. } => Shape::States,
            Self::Nothing => Shape::Nothing,
        }
    }

    /// First and last position that are known.
    fn positions(self) -> Option<(Pos, Pos)> {
        match self {
            Self::Kv { has, .. } => has,
            Self::States { pos_max, .. } => pos_max.map(|pos| (pos, pos)),
            Self::Nothing => None,
        }
    }

    fn pos_max(self) -> Option<Pos> {
        self.positions().map(|(_, last)| last)
    }

    /// Why the section cannot go on at `pos`; `None`: it can. From 0 every section can.
    pub(super) fn obstacle(self, section: &str, pos: Pos) -> Option<RewindObstacle> {
        let section = || section.to_owned();
        match self {
            Self::Kv { swa, has } => {
                // The first token of a chunk sees nothing; what ends before it would be a gap from then on.
                let ends_before = |(_, last): &(Pos, Pos)| *last < pos - 1;
                let last_one = || has.filter(ends_before).map(|_| (pos - 1, pos - 1));
                let need = swa.seen_before(pos).or_else(last_one)?;
                let is_whole = has.is_some_and(|(first, last)| first <= need.0 && last >= need.1);
                (!is_whole).then(|| RewindObstacle::CellsGone { section: section(), pos, need, has })
            }
            Self::States { has, .. } => {
                let is_there = pos == 0 || has.is_some_and(|(first, last)| (first..=last).contains(&pos));
                (!is_there).then(|| RewindObstacle::NoState { section: section(), pos, has })
            }
            Self::Nothing => None,
        }
    }

    /// The largest position that is at most `at_most` and from which the section can go on.
    fn last_usable(self, at_most: Pos) -> Pos {
        match self {
            Self::Kv { swa, has } => {
                // Below the end what is seen begins no later, but for a chunk: its first token sees nothing before it.
                let end = has.and_then(|(_, last)| last.checked_add(1)).unwrap_or(0);
                let chunk = Pos::try_from(swa.first_unmasked(at_most)).unwrap_or(0);
                let usable = [at_most, end.min(at_most), chunk.clamp(0, at_most)]
                    .into_iter()
                    .filter(|&pos| self.obstacle("", pos).is_none());
                usable.max().unwrap_or(0)
            }
            Self::States { has, .. } => {
                has.filter(|&(first, _)| first <= at_most).map_or(0, |(_, last)| last.min(at_most))
            }
            Self::Nothing => at_most,
        }
    }
}

/// First and last position of the longest end of `entries`, cells of a window by position, in which nothing is missing that `all`,
/// by position as well, has.
pub(super) fn whole_end(entries: &[(Pos, u32)], all: &[(Pos, u32)]) -> Option<(Pos, Pos)> {
    let (&(first, _), &(last, _)) = entries.first().zip(entries.last())?;
    let start = all.partition_point(|&(pos, _)| pos < first);
    let all = &all[start..all.partition_point(|&(pos, _)| pos <= last)];
    // Sections are filled together, so as many are the same ones: the usual case, without a look at each.
    if all.len() == entries.len() {
        return Some((first, last));
    }
    let mut left = all.iter().map(|&(pos, _)| pos).rev().peekable();
    let is_there = move |pos: &Pos| {
        let is_missing = left.peek().is_some_and(|other| other > pos);
        left.next_if_eq(pos);
        !is_missing
    };
    let first = entries.iter().map(|&(pos, _)| pos).rev().take_while(is_there).last();
    first.map(|first| (first, last))
}

impl KvCache {
    /// `all`: the cells of full attention, if there is such a section.
    fn reach(&self, seq: Seq, all: &[(Pos, u32)]) -> Reach {
        let swa = self.geometry.swa;
        let has = if swa.is_none() {
            self.seq_pos_min(seq).zip(self.seq_pos_max(seq))
        } else {
            whole_end(self.seq_cells(seq).seq_cells(seq, PosRange::ALL), all)
        };
        Reach::Kv { swa, has }
    }

    /// As it is after a restore of the state that would be written now; `None` where that has nothing of the section.
    fn saved_reach(&self, seq: Seq, params: WriteParams, all: &[(Pos, u32)]) -> Option<Reach> {
        let swa = self.geometry.swa;
        self.geometry.writes(params.flags).then(|| {
            let entries = self.seq_cells(seq).seq_cells(seq, PosRange::ALL);
            let kept = &entries[params.first_kept(entries, swa)..];
            Reach::Kv { swa, has: whole_end(kept, all) }
        })
    }
}

impl RecurrentCache {
    fn reach(&self, seq: Seq) -> Reach {
        if self.has_planes() {
            let is_there = self.state(seq).is_some_and(|state| state.n_older.is_some());
            Reach::of_states(self.seq_pos(seq), is_there, self.max_cut(seq).unwrap_or(0))
        } else {
            Reach::Nothing
        }
    }
}

impl Dsv4Cache {
    /// `pos_max`: of the raw cache.
    fn reach(&self, seq: Seq, pos_max: Option<Pos>) -> Reach {
        Reach::of_states(pos_max.filter(|_| self.holds(seq)), self.is_there(seq), self.max_cut(seq))
    }
}

/// What a section's cells are held against.
#[derive(Clone, Copy)]
struct Neighbours<'a> {
    full_attention: &'a [(Pos, u32)],
    /// The last position of DSV4's raw cache.
    raw_pos_max: Option<Pos>,
}

impl Section {
    fn reach(&self, seq: Seq, of: Neighbours<'_>) -> Reach {
        match self {
            Self::Kv(kv) => kv.reach(seq, of.full_attention),
            Self::Recurrent(recurrent) => recurrent.reach(seq),
            Self::Dsv4(dsv4) => dsv4.reach(seq, of.raw_pos_max),
            Self::Shared => Reach::Nothing,
        }
    }

    fn saved_reach(&self, seq: Seq, params: WriteParams, of: Neighbours<'_>) -> Option<Reach> {
        match (self, self.reach(seq, of)) {
            (Self::Kv(kv), _) => kv.saved_reach(seq, params, of.full_attention),
            // One state is saved, the one that the sequence has now.
            (_, Reach::States { pos_max, has }) => {
                Some(Reach::States { pos_max, has: has.map(|(_, last)| (last, last)) })
            }
            (_, reach) => Some(reach),
        }
    }

    /// From where it could go on after a restore of what was saved; `None`: that had nothing of the section.
    fn reach_after(&self, live: Reach, saved: Option<Reach>) -> Reach {
        match (self, saved) {
            (_, None) => live,
            // Compressed rows are not in a partial state: those in the cache have to reach as far.
            (Self::Dsv4(_), Some(saved)) if live.pos_max() < saved.pos_max() => {
                Reach::States { pos_max: live.pos_max(), has: None }
            }
            (_, Some(saved)) => saved,
        }
    }
}

/// From where a sequence could go on after a partial state was restored, by section. `None`: as far as the section can then.
#[derive(Clone, Debug)]
pub(crate) struct SavedReach(Vec<Option<Reach>>);

/// From where a sequence can go on: all sections of a memory together.
#[derive(Debug)]
pub(crate) struct SeqReach<'a>(pub(super) Vec<(&'a str, Reach)>);

impl SavedReach {
    /// From where on all that was saved is there, and its largest position; `None`: nothing was, as of full attention.
    pub fn positions(&self) -> Option<(Pos, Pos)> {
        whole(self.0.iter().flatten().copied())
    }
}

/// From where on every section has something, and the largest position.
fn whole(reaches: impl Iterator<Item = Reach>) -> Option<(Pos, Pos)> {
    let has = reaches.filter_map(Reach::positions);
    has.reduce(|(first, last), (a, b)| (first.max(a), last.max(b)))
}

impl SeqReach<'_> {
    pub fn pos_max(&self) -> Option<Pos> {
        self.0.iter().filter_map(|(_, reach)| reach.pos_max()).max()
    }

    /// Why a sequence cannot be cut at `pos`, which is at least 0, and go on there.
    pub fn obstacle(&self, pos: Pos) -> Option<RewindObstacle> {
        let pos_max = self.pos_max().unwrap_or(-1);
        if i64::from(pos) > i64::from(pos_max) + 1 {
            return Some(RewindObstacle::PastEnd { pos, pos_max });
        }
        self.0.iter().find_map(|&(section, reach)| reach.obstacle(section, pos))
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
    fn neighbours(&self, seq: Seq) -> Neighbours<'_> {
        let mut full_attention = self.kv_caches().filter(|kv| kv.geometry.swa.is_none());
        Neighbours {
            full_attention: full_attention
                .next()
                .map_or(&[], |kv| kv.seq_cells(seq).seq_cells(seq, PosRange::ALL)),
            raw_pos_max: self.raw_pos_max(Some(seq)),
        }
    }

    /// From where `seq` can go on as it is.
    pub fn reach(&self, seq: Seq) -> SeqReach<'_> {
        let of = self.neighbours(seq);
        let of_section = |section: &Section| section.reach(seq, of);
        SeqReach(self.sections.iter().map(|section| (section.name(), of_section(section))).collect())
    }

    /// From where it could go on after the restore of a partial state, which must be of as many sections.
    pub fn reach_after(&self, seq: Seq, saved: &SavedReach) -> SeqReach<'_> {
        let mut reach = self.reach(seq);
        for ((section, (_, live)), saved) in self.sections.iter().zip(&mut reach.0).zip(&saved.0) {
            *live = section.reach_after(*live, *saved);
        }
        reach
    }

    /// What [`Memory::reach_after`] needs to know of a partial state that is written now.
    pub fn saved_reach(&self, seq: Seq) -> SavedReach {
        let flags = StateFlags::PARTIAL_ONLY;
        let range = PosRange::ALL;
        let params = WriteParams { scope: Scope::Seq(seq), flags, max_masked_cells: None, range };
        let of = self.neighbours(seq);
        SavedReach(self.sections.iter().map(|section| section.saved_reach(seq, params, of)).collect())
    }

    /// The same of a state that was written before, and is planned.
    pub fn saved_reach_of(&self, seq: Seq, plan: &MemoryPlan<'_>) -> SavedReach {
        let full_attention = self.neighbours(seq).full_attention;
        SavedReach(self.planned_reach(&plan.sections, seq, full_attention).collect())
    }

    /// What each section can look back on of what a plan gives `dest`; `None`: nothing is planned of it, or it is full attention.
    pub(super) fn planned_reach<'p>(
        &'p self,
        plans: &'p [SectionPlan<'_>],
        dest: Seq,
        full_attention: &'p [(Pos, u32)],
    ) -> impl Iterator<Item = Option<Reach>> + 'p {
        let raw_pos_max = plans.iter().filter_map(|plan| match plan {
            // Those behind the range that is wanted are looked for only where there is one.
            SectionPlan::Kv(plan) => plan.found.pos_max.max(plan.pos_max()),
            _ => None,
        });
        let raw_pos_max = raw_pos_max.max();
        self.sections.iter().zip(plans).map(move |(section, plan)| match (section, plan) {
            (Section::Kv(kv), SectionPlan::Kv(plan)) if !kv.geometry.swa.is_none() => {
                let has = whole_end(&kv.entries_after(plan, dest), full_attention);
                Some(Reach::Kv { swa: kv.geometry.swa, has })
            }
            (Section::Kv(_), _) => None,
            (Section::Recurrent(recurrent), SectionPlan::Recurrent(plan)) if recurrent.has_planes() => {
                Some(Reach::of_states(plan.pos, true, 0))
            }
            (Section::Dsv4(_), SectionPlan::Dsv4(_)) => Some(Reach::of_states(raw_pos_max, true, 0)),
            (Section::Recurrent(_) | Section::Dsv4(_) | Section::Shared, _) => Some(Reach::Nothing),
        })
    }

    /// Whether a partial state is of sections like these: what it can be cut to depends on their kinds and windows.
    pub fn check_saved(&self, seq: Seq, saved: &SavedReach) -> Result<()> {
        let mismatch =
            |what, state: String, cache: String, place| Err(Error::Mismatch { what, state, cache, place });
        let live = self.reach(seq).0;
        if saved.0.len() != live.len() {
            let (state, cache) = (saved.0.len().to_string(), live.len().to_string());
            return mismatch("mismatched number of sections", state, cache, "checkpoint".into());
        }
        for ((section, live), saved) in live.into_iter().zip(&saved.0) {
            let (saved, live) = (saved.map_or(Shape::FullAttention, Reach::shape), live.shape());
            if saved != live {
                let is_attention =
                    [saved, live].iter().all(|s| matches!(s, Shape::FullAttention | Shape::Window(_)));
                let what = if is_attention { "mismatched window" } else { "mismatched kind of section" };
                return mismatch(what, saved.to_string(), live.to_string(), format!("section {section}"));
            }
        }
        Ok(())
    }

    /// From where on all of `seq` would be there if a partial state that is written now were restored, and its largest
    /// position; `None` if it is empty.
    pub fn saved_positions(&self, seq: Seq, saved: &SavedReach) -> Option<(Pos, Pos)> {
        whole(self.reach_after(seq, saved).0.into_iter().map(|(_, reach)| reach))
    }
}
