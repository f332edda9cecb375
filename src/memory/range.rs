//! States of a part of a sequence: where one can end, and what is kept of it.

use super::kv_read::KvPlan;
use super::kv_view::ViewPlan;
use super::rewind::{Reach, RewindObstacle};
use super::section::SectionPlan;
use super::{Memory, MemoryPlan, ReadParams, Scope, Section};
use crate::error::{Error, Result};
use crate::types::{Pos, PosRange, Seq};

/// What a restore has taken of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Smallest position, -1 if there is none: of full attention, where there is such a section.
    pub pos_min: Pos,
    /// Largest position, -1 if there is none.
    pub pos_max: Pos,
    /// Cells that were restored, or positions if the state has no cells.
    pub n_cells: usize,
    /// Cells of the state behind the range that was wanted, or positions if it has no cells.
    pub n_cut: usize,
}

impl Kept {
    /// Nothing.
    pub const NOTHING: Self = Self { pos_min: -1, pos_max: -1, n_cells: 0, n_cut: 0 };

    /// Tokens at the start of a list of `n_tokens` that belong to what was restored, if it has one for each cell; a token that has
    /// been sampled and not decoded yet may follow.
    #[must_use]
    pub fn n_tokens(&self, n_tokens: usize) -> usize {
        if self.pos_max < 0 {
            return 0;
        }
        if self.n_cut == 0 {
            return n_tokens;
        }
        let before_the_cut = n_tokens.saturating_sub(self.n_cut);
        // Cells are counted where none is missing in front, as those that a window has forgotten.
        if self.pos_min == 0 { before_the_cut.min(self.n_cells) } else { before_the_cut }
    }

    /// What views will take.
    pub(crate) fn of_views<'a>(plans: impl Iterator<Item = &'a ViewPlan<'a>>) -> Self {
        Self::of_cells(plans.filter_map(ViewPlan::kv))
    }

    /// What is taken of the section with the most cells.
    fn of_cells<'a>(plans: impl Iterator<Item = &'a KvPlan<'a>>) -> Self {
        let mut kept = Self::NOTHING;
        for plan in plans {
            kept.n_cut = kept.n_cut.max(plan.found.n_cut);
            let metas = || plan.streams.iter().flat_map(|stream| &stream.metas).map(|meta| meta.pos);
            let n = metas().count();
            if let Some((min, max)) = metas().min().zip(metas().max()).filter(|_| n > kept.n_cells) {
                (kept.pos_min, kept.pos_max, kept.n_cells) = (min, max, n);
            }
        }
        kept
    }
}

fn cannot_cut(p1: i64, obstacle: &RewindObstacle) -> Error {
    Error::CannotCut { p1, reason: obstacle.to_string() }
}

impl Memory {
    /// Whether a state can be written of positions of `seq`: those that hold states of a few positions have to have that of its end.
    pub fn check_range(&self, seq: Seq, range: PosRange) -> Result<()> {
        // The end of the whole sequence is always there, and each save without a range asks: it should cost nothing.
        if range.is_empty() || range.is_everything() {
            return Ok(());
        }
        for (section, (name, reach)) in self.sections.iter().zip(self.reach(seq).0) {
            let Reach::States { pos_max: Some(pos_max), .. } = reach else { continue };
            // What positions a compressed row is of cannot be told without them.
            if matches!(section, Section::Dsv4(_)) && range.p0 > pos_max {
                let reason = format!("{}, the last position of section {name} is {pos_max}", range.p0);
                return Err(Error::arg("p0", reason));
            }
            let end = Pos::try_from(range.p1).ok().filter(|&p1| p1 <= pos_max);
            if let Some(obstacle) = end.and_then(|p1| reach.obstacle(name, p1)) {
                return Err(cannot_cut(range.p1, &obstacle));
            }
        }
        Ok(())
    }

    /// What the destination will have in full attention, by position, if `section` is a window that is added to.
    pub(super) fn full_attention_after(
        &self,
        section: &Section,
        params: ReadParams,
        plans: &[SectionPlan<'_>],
    ) -> Vec<(Pos, u32)> {
        let is_window = section.as_kv().is_some_and(|kv| !kv.geometry.swa.is_none());
        match params.scope {
            Scope::Seq(dest) if params.append && is_window => self.full_attention_of(plans, dest),
            Scope::Seq(_) | Scope::Whole => Vec::new(),
        }
    }

    fn full_attention_of(&self, plans: &[SectionPlan<'_>], dest: Seq) -> Vec<(Pos, u32)> {
        let planned = self.sections.iter().zip(plans).find_map(|(section, plan)| match (section, plan) {
            (Section::Kv(kv), SectionPlan::Kv(plan)) if kv.geometry.swa.is_none() => Some((kv, plan)),
            _ => None,
        });
        planned.map_or(Vec::new(), |(kv, plan)| kv.entries_after(plan, dest))
    }

    /// Whether the sequence can go on where the wanted positions end, if the state has others behind them.
    pub(super) fn check_end(&self, plans: &[SectionPlan<'_>], params: ReadParams) -> Result<()> {
        let (Scope::Seq(dest), Ok(p1)) = (params.scope, Pos::try_from(params.range.p1)) else {
            return Ok(());
        };
        // Nothing goes on anywhere, as from 0.
        if params.range.is_empty() {
            return Ok(());
        }
        let is_behind = |pos: Option<Pos>| pos.is_some_and(|pos| pos >= p1);
        let is_cut = |plan: &SectionPlan<'_>| match plan {
            SectionPlan::Kv(plan) => plan.found.n_cut > 0,
            SectionPlan::Recurrent(plan) => is_behind(plan.pos),
            SectionPlan::Dsv4(_) | SectionPlan::Nothing => false,
        };
        if !plans.iter().any(is_cut) {
            return Ok(());
        }
        let full_attention = self.full_attention_of(plans, dest);
        for (section, reach) in self.sections.iter().zip(self.planned_reach(plans, dest, &full_attention)) {
            // Of full attention everything below is there.
            if let Some(obstacle) = reach.and_then(|reach| reach.obstacle(section.name(), p1)) {
                return Err(cannot_cut(params.range.p1, &obstacle));
            }
        }
        Ok(())
    }
}

impl MemoryPlan<'_> {
    /// What will be taken of the state of a sequence.
    pub fn kept(&self) -> Kept {
        let mut kept = Kept::of_cells(self.sections.iter().filter_map(|plan| match plan {
            SectionPlan::Kv(plan) => Some(plan),
            SectionPlan::Recurrent(_) | SectionPlan::Dsv4(_) | SectionPlan::Nothing => None,
        }));
        for plan in &self.sections {
            if let SectionPlan::Recurrent(plan) = plan
                && kept.n_cells == 0
            {
                let pos = plan.pos.unwrap_or(-1);
                (kept.pos_min, kept.pos_max) = (pos, pos);
                kept.n_cells = usize::try_from(pos + 1).unwrap_or(0);
                if kept.n_cut == 0 {
                    kept.n_cut = plan.n_cut;
                }
            }
        }
        kept
    }
}
