//! Cells for a ubatch, found and then taken.

use std::borrow::Cow;

use super::Context;
use crate::cells::{CellMeta, SeqSet};
use crate::error::{Error, Result};
use crate::memory::{FoundSlot, KvCache, RecurrentCache, RecurrentSlot, Section, SequenceSet};
use crate::types::{CellExt, Pos, SeqId};

/// A token of a ubatch.
#[derive(Clone, Copy, Debug)]
pub struct UbatchToken<'a> {
    /// Position, at least 0.
    pub pos: Pos,
    /// Token and M-RoPE position; kept only by sections with ext.
    pub ext: CellExt,
    /// Sequences that the token belongs to: at least one, all of one stream.
    pub seq_ids: &'a [SeqId],
}

/// Cells for the tokens of a ubatch, in every section, for the cache as it was when the slot was prepared.
#[derive(Clone, Debug)]
pub struct Slot {
    context_id: u64,
    generation: u64,
    tokens: Tokens,
    sections: Vec<SectionSlot>,
}

/// The tokens of a ubatch, in the two ways in which sections look at them.
#[derive(Clone, Debug, Default)]
struct Tokens {
    /// Ascending by stream.
    streams: Vec<StreamTokens>,
    /// For recurrent and DSV4 sections: the sets of sequences in the order of their first tokens.
    sets: Vec<SequenceSet>,
    /// The set of each token.
    set_of: Vec<usize>,
}

/// The slot in one section.
#[derive(Clone, Debug)]
struct SectionSlot {
    /// The cell of each token, in the order of the ubatch.
    cells: Vec<u32>,
    recurrent: Option<FoundSlot>,
}

/// The tokens of a ubatch that go into one stream.
#[derive(Clone, Debug)]
struct StreamTokens {
    stream: usize,
    /// Indices into the ubatch, ascending.
    tokens: Vec<usize>,
    metas: Vec<CellMeta>,
}

impl Slot {
    /// The cell of each token in a section, in the order of the ubatch; `None` for a section that is not there.
    /// The cells of tokens in different streams are cells of those streams. In a recurrent section it is the cell of the token's
    /// sequences; a shared section has none of its own.
    #[must_use]
    pub fn cells(&self, section: usize) -> Option<&[u32]> {
        self.sections.get(section).map(|slot| &slot.cells[..])
    }

    /// Where a recurrent section reads and writes states; `None` for other sections.
    #[must_use]
    pub fn recurrent(&self, section: usize) -> Option<&RecurrentSlot> {
        self.sections.get(section)?.recurrent.as_ref().map(|found| &found.slot)
    }
}

impl Context {
    /// Finds cells for a ubatch in every section. Changes nothing: commit the slot, or drop it.
    ///
    /// With a recurrent section, sequences may share tokens only if they share all of the ubatch's; each set of sequences takes
    /// one cell.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::SeqId`] for tokens that make no sense, [`Error::NoSlot`].
    pub fn prepare(&self, ubatch: &[UbatchToken<'_>]) -> Result<Slot> {
        let mut tokens = Tokens::default();
        let n_expected = ubatch.len().div_ceil(self.n_stream() as usize);
        for (i, token) in ubatch.iter().enumerate() {
            let (stream, meta) = self.check_token(i, token)?;
            let streams = &mut tokens.streams;
            let at = streams.binary_search_by_key(&stream, |tokens| tokens.stream).unwrap_or_else(|at| {
                let (tokens, metas) = (Vec::with_capacity(n_expected), Vec::with_capacity(n_expected));
                streams.insert(at, StreamTokens { stream, tokens, metas });
                at
            });
            streams[at].tokens.push(i);
            streams[at].metas.push(meta);
        }
        if self.memory.sections().iter().any(|section| !matches!(section, Section::Kv(_) | Section::Shared)) {
            tokens.find_sets(ubatch.len())?;
        }
        let mut sections = Vec::<SectionSlot>::with_capacity(self.n_section());
        for section in self.memory.sections() {
            let slot = match section {
                Section::Kv(kv) => match kv.geometry.mirrors.and_then(|source| sections.get(source)) {
                    Some(source) => source.clone(),
                    None => tokens.slot_in_kv(kv)?,
                },
                Section::Recurrent(recurrent) => tokens.slot_in_recurrent(recurrent)?,
                Section::Shared | Section::Dsv4(_) => SectionSlot { cells: Vec::new(), recurrent: None },
            };
            sections.push(slot);
        }
        Ok(Slot { context_id: self.id, generation: self.generation(), tokens, sections })
    }

    pub(super) fn check_token(&self, i: usize, token: &UbatchToken<'_>) -> Result<(usize, CellMeta)> {
        let UbatchToken { pos, ext, seq_ids } = *token;
        if pos < 0 {
            return Err(Error::arg(format!("pos[{i}]"), format!("{pos}, positions start at 0")));
        }
        let mut stream = None;
        let mut seqs = SeqSet::EMPTY;
        for &seq_id in seq_ids {
            let seq = self.seq(seq_id)?;
            let own = self.memory.streams().of(seq);
            if *stream.get_or_insert(own) != own {
                let reason = format!("sequences {} and {seq_id} are in different streams", seq_ids[0]);
                return Err(Error::arg(format!("seq_id[{i}]"), reason));
            }
            seqs.insert(seq);
        }
        let stream =
            stream.ok_or_else(|| Error::arg(format!("n_seq_id[{i}]"), "0, a token belongs to at least 1"))?;
        Ok((stream, CellMeta { pos, ext, seqs }))
    }

    /// Gives the cells of `slot` to its tokens. SWA cells that are taken over leave their sequence, and with
    /// them all its older positions, so that what a sequence holds stays free of gaps.
    ///
    /// # Errors
    /// [`Error::Stale`] if the cache has changed since the slot was prepared; nothing changes then.
    pub fn commit(&mut self, slot: &Slot) -> Result<()> {
        if slot.context_id != self.id {
            return Err(Error::arg("slot", "prepared for another context"));
        }
        if slot.generation != self.generation() {
            return Err(Error::Stale { slot: slot.generation, cache: self.generation() });
        }
        self.changed();
        for (i, of_section) in slot.sections.iter().enumerate() {
            match self.memory.section_mut(i) {
                Some(Section::Kv(kv)) => slot.tokens.take_in_kv(kv, &of_section.cells),
                Some(Section::Recurrent(recurrent)) => {
                    of_section.recurrent.iter().for_each(|found| recurrent.apply(found));
                }
                Some(Section::Dsv4(dsv4)) => dsv4.apply(&slot.tokens.sets),
                Some(Section::Shared) | None => {}
            }
        }
        Ok(())
    }
}

impl Tokens {
    /// Finds the sets of sequences, none of which may have a sequence of another.
    fn find_sets(&mut self, n_tokens: usize) -> Result<()> {
        let mut of_token = vec![(SeqSet::EMPTY, 0); n_tokens];
        for StreamTokens { tokens, metas, .. } in &self.streams {
            tokens.iter().zip(metas).for_each(|(&token, meta)| of_token[token] = (meta.seqs, meta.pos));
        }
        let mut seen = SeqSet::EMPTY;
        for (i, (seqs, pos)) in of_token.into_iter().enumerate() {
            let at = self.sets.iter().position(|set| set.seqs == seqs).unwrap_or(self.sets.len());
            if at == self.sets.len() {
                if let Some(seq) = seqs.iter().find(|&seq| seen.contains(seq)) {
                    let reason =
                        format!("sequence {} has tokens in this ubatch that others do not share", seq.id());
                    return Err(Error::arg(format!("seq_id[{i}]"), reason));
                }
                seqs.iter().for_each(|seq| seen.insert(seq));
                self.sets.push(SequenceSet { seqs, pos, n_tokens: 0 });
            }
            let set = &mut self.sets[at];
            (set.pos, set.n_tokens) = (pos, set.n_tokens + 1);
            self.set_of.push(at);
        }
        Ok(())
    }

    fn slot_in_kv(&self, kv: &KvCache) -> Result<SectionSlot> {
        let cells = match &self.streams[..] {
            [StreamTokens { stream, tokens, .. }] => kv.find_slot(*stream, tokens.len())?,
            streams => {
                let mut cells = vec![0; streams.iter().map(|stream| stream.tokens.len()).sum()];
                for StreamTokens { stream, tokens, .. } in streams {
                    let found = kv.find_slot(*stream, tokens.len())?;
                    tokens.iter().zip(found).for_each(|(&token, cell)| cells[token] = cell);
                }
                cells
            }
        };
        Ok(SectionSlot { cells, recurrent: None })
    }

    fn slot_in_recurrent(&self, recurrent: &RecurrentCache) -> Result<SectionSlot> {
        let found = recurrent.find_slot(&self.sets)?;
        let row: Vec<u32> = (found.slot.head..).take(self.sets.len()).collect();
        let cells = self.set_of.iter().map(|&set| row[set]).collect();
        Ok(SectionSlot { cells, recurrent: Some(found) })
    }

    fn take_in_kv(&self, kv: &mut KvCache, cells: &[u32]) {
        for StreamTokens { stream, tokens, metas } in &self.streams {
            let cells: Cow<'_, [u32]> = match self.streams.len() {
                1 => cells.into(),
                _ => tokens.iter().map(|&token| cells[token]).collect(),
            };
            kv.apply(*stream, &cells, metas);
        }
    }
}
