//! A server of one slot that decodes speculatively: a draft model proposes tokens, and the target takes those that it would
//! have chosen itself. Both choose the likeliest, so what comes out is the target's, whatever the draft proposes.
//!
//! The draft model has the target's weights and a cache of half its size, in f16. It sees what the target decodes, as it does: it
//! cannot catch up on a prompt that only the target has (as draft heads cannot, which read the target's hidden states).
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::path::Path;

use kvstate::format::GgmlType;
use kvstate::session::{DraftOutcome, SlotContents, SlotLoadParams, Verify};
use kvstate::types::{Pos, Swa, Token};

use crate::transformer::{Engine, Logits, Setup};

/// Most tokens that are proposed at once.
const MAX_DRAFT: u8 = 8;

/// A target, its draft model, and the tokens that both hold.
pub struct Server {
    target: Engine,
    draft: Engine,
    tokens: Vec<Token>,
    /// State of the driver: how many tokens it proposes, which goes up and down with its luck.
    n_draft: u8,
    n_computed: usize,
    n_drafted: usize,
    n_accepted: usize,
}

fn pos(n: usize) -> Pos {
    Pos::try_from(n).unwrap()
}

impl Server {
    /// With room for a prompt of so many tokens and a conversation about it.
    pub fn start(n_prompt: usize) -> Self {
        let kv_size = u32::try_from(n_prompt + 256).unwrap().next_multiple_of(256);
        let setup = Setup { kv_size, ..Setup::new(Swa::NONE) };
        let draft = Setup { element: GgmlType::F16, ..setup };
        Self {
            target: setup.start(),
            draft: draft.start(),
            tokens: Vec::new(),
            n_draft: 4,
            n_computed: 0,
            n_drafted: 0,
            n_accepted: 0,
        }
    }

    /// Tokens of prompts that the target has computed, tokens that were proposed, and those of them that were taken.
    pub fn counts(&self) -> [usize; 3] {
        [self.n_computed, self.n_drafted, self.n_accepted]
    }

    pub fn reset_counts(&mut self) {
        (self.n_computed, self.n_drafted, self.n_accepted) = (0, 0, 0);
    }

    /// Computes what the cache does not have of `prompt`; returns the `n` tokens that follow. All but the last are then in the
    /// cache.
    pub fn reply(&mut self, prompt: &[Token], n: usize) -> Vec<Token> {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // The last token has to be computed for its logits.
        let n_past = common.min(prompt.len() - 1);
        self.cut(n_past);
        let logits = self.target.decode(0, pos(n_past), &prompt[n_past..]);
        self.draft.decode(0, pos(n_past), &prompt[n_past..]);
        self.n_computed += logits.len();
        self.tokens.extend(&prompt[n_past..]);
        let mut reply = vec![logits[logits.len() - 1].best()];
        while reply.len() < n {
            let next = self.step(reply[reply.len() - 1]);
            reply.extend(next);
        }
        reply.truncate(n);
        self.cut(prompt.len() + n - 1);
        reply
    }

    /// Decodes `token`, which is not in the cache yet, and as many of the draft's proposals as the target would have chosen;
    /// returns these and the target's own token behind them.
    fn step(&mut self, token: Token) -> Vec<Token> {
        let n_past = self.tokens.len();
        let mut batch = vec![token];
        for i in 0..usize::from(self.n_draft) {
            batch.push(self.draft.decode(0, pos(n_past + i), &[batch[i]])[0].best());
        }
        self.draft.decode(0, pos(n_past + batch.len() - 1), &batch[batch.len() - 1..]);
        let chosen: Vec<Token> =
            self.target.decode(0, pos(n_past), &batch).iter().map(Logits::best).collect();
        let n = batch[1..].iter().zip(&chosen).take_while(|(proposed, chosen)| proposed == chosen).count();
        self.n_drafted += batch.len() - 1;
        self.n_accepted += n;
        self.n_draft =
            if n == batch.len() - 1 { MAX_DRAFT.min(self.n_draft + 1) } else { 1.max(self.n_draft - 1) };
        self.tokens.extend(&batch);
        self.cut(n_past + 1 + n);
        chosen[..=n].to_vec()
    }

    /// Keeps the first `n` tokens.
    fn cut(&mut self, n: usize) {
        self.tokens.truncate(n);
        for engine in [&mut self.target, &mut self.draft] {
            assert!(engine.cache.seq_rm(0, pos(n), -1).unwrap());
        }
    }

    pub fn save(&mut self, path: &Path) {
        let contents = SlotContents {
            tokens: &self.tokens,
            draft: Some((&mut self.draft.cache, 0)),
            driver: &[self.n_draft],
            ..SlotContents::default()
        };
        self.target.cache.slot_save(path, 0, contents).unwrap();
    }

    pub fn erase(&mut self) {
        self.cut(0);
        self.n_draft = 4;
    }

    /// Restores a slot, and checks that everything has come back that is wanted.
    pub fn load(&mut self, path: &Path, with_draft: bool) {
        let draft = with_draft.then_some((&mut self.draft.cache, 0));
        let params = SlotLoadParams { draft, verify: Verify::Full, ..SlotLoadParams::default() };
        let slot = self.target.cache.slot_load(path, 0, params).unwrap();
        assert_eq!(matches!(slot.draft, DraftOutcome::Restored(_)), with_draft, "{:?}", slot.draft);
        assert_eq!(slot.driver.is_some(), with_draft);
        if let Some(driver) = slot.driver {
            self.n_draft = driver[0];
        }
        self.tokens = slot.tokens;
        let end = pos(self.tokens.len()) - 1;
        assert_eq!(self.target.cache.seq_pos_max(0).unwrap(), end);
        assert_eq!(self.draft.cache.seq_pos_max(0).unwrap(), if with_draft { end } else { -1 });
    }
}
