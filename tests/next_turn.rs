//! The turn after a restart: what a server has to compute, and what its speculative decoding is worth, with a slot file and without.
//!
//! The figures of the README: `make restart-figures` writes them. Those of the shorter conversation are compared in every run.
#![allow(missing_docs, reason = "a test")]

mod place;
mod process;
mod speculation;
mod transformer;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

use kvstate::types::Token;
use process::{run, say};
use speculation::Server;
use transformer::tokens;

const BEGIN: &str = "<!-- made by tests/next_turn.rs -->\n";
const END: &str = "<!-- to here -->\n";

/// Prompts of the table; the first is that of every run.
const PROMPTS: [usize; 2] = [500, 5900];
const N_REPLY: usize = 40;

/// Set in the processes that the tests start: the folder of the slot, and how long its prompt is.
const FOLDER: &str = "KVSTATE_TEST_NEXT_TURN";

fn folder() -> Option<(PathBuf, usize)> {
    let value = env::var(FOLDER).ok()?;
    let (n_prompt, folder) = value.split_once(' ')?;
    Some((folder.into(), n_prompt.parse().unwrap()))
}

/// The user's second message.
fn message() -> Vec<Token> {
    tokens(20, 12)
}

/// What a turn has cost and given.
#[derive(Clone, Debug, PartialEq)]
struct Turn {
    n_computed: usize,
    n_drafted: usize,
    n_accepted: usize,
    reply: String,
}

impl Turn {
    /// Another message behind `conversation`, and the reply to it.
    fn take(server: &mut Server, conversation: &[Token]) -> Self {
        server.reset_counts();
        let reply = server.reply(&[conversation, &message()].concat(), N_REPLY);
        let [n_computed, n_drafted, n_accepted] = server.counts();
        Self { n_computed, n_drafted, n_accepted, reply: format!("{reply:?}").replace(' ', "") }
    }

    fn say(&self) {
        say(&format!("{} {} {} {}", self.n_computed, self.n_drafted, self.n_accepted, self.reply));
    }

    fn of(said: &str) -> Self {
        let words: Vec<_> = said.split(' ').collect();
        let [n_computed, n_drafted, n_accepted] = [0, 1, 2].map(|i| words[i].parse().unwrap());
        Self { n_computed, n_drafted, n_accepted, reply: words[3].to_owned() }
    }

    #[expect(clippy::cast_precision_loss, reason = "a figure to read")]
    fn acceptance(&self) -> String {
        format!("{:.0}%", 100.0 * self.n_accepted as f64 / self.n_drafted as f64)
    }
}

/// The same turn of one conversation, in processes of which only the first has computed the one before.
#[derive(Debug)]
struct Turns {
    never_stopped: Turn,
    erased: Turn,
    with_draft: Turn,
    without_draft: Turn,
    cold: Turn,
}

impl Turns {
    fn after(n_prompt: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let value = format!("{n_prompt} {}", dir.path().display());
        let turns = |test| run(test, FOLDER, &value).iter().map(|said| Turn::of(said)).collect::<Vec<_>>();
        let [never_stopped, erased] = turns("serves_and_saves").try_into().unwrap();
        let [with_draft, without_draft] = turns("restores").try_into().unwrap();
        let [cold] = turns("starts_cold").try_into().unwrap();
        Self { never_stopped, erased, with_draft, without_draft, cold }
    }

    fn line(&self, n_prompt: usize) -> String {
        let Self { never_stopped, with_draft, without_draft, cold, .. } = self;
        format!(
            "| {} | {} | {} | {} | {} | {} |\n",
            grouped(n_prompt),
            grouped(cold.n_computed),
            grouped(with_draft.n_computed),
            never_stopped.acceptance(),
            with_draft.acceptance(),
            without_draft.acceptance()
        )
    }
}

/// With a comma between thousands.
fn grouped(n: usize) -> String {
    if n < 1000 { n.to_string() } else { format!("{},{:03}", n / 1000, n % 1000) }
}

/// The conversation that is saved: a prompt and its reply.
fn conversation(server: &mut Server, n_prompt: usize) -> Vec<Token> {
    let prompt = tokens(n_prompt, 11);
    let reply = server.reply(&prompt, N_REPLY);
    [prompt, reply].concat()
}

const SLOT: &str = "slot.bin";
const CONVERSATION: &str = "conversation.json";

/// Runs only as a child: saves a slot, and takes the next turn; then erases, restores, and takes it again.
#[test]
fn serves_and_saves() {
    let Some((folder, n_prompt)) = folder() else { return };
    let mut server = Server::start(n_prompt);
    let conversation = conversation(&mut server, n_prompt);
    fs::write(folder.join(CONVERSATION), serde_json::to_vec(&conversation).unwrap()).unwrap();
    server.save(&folder.join(SLOT));
    Turn::take(&mut server, &conversation).say();
    server.erase();
    server.load(&folder.join(SLOT), true);
    Turn::take(&mut server, &conversation).say();
}

fn saved_conversation(folder: &Path) -> Vec<Token> {
    serde_json::from_slice(&fs::read(folder.join(CONVERSATION)).unwrap()).unwrap()
}

/// Runs only as a child: restores the slot, with the draft state and without.
#[test]
fn restores() {
    let Some((folder, n_prompt)) = folder() else { return };
    for with_draft in [true, false] {
        let mut server = Server::start(n_prompt);
        server.load(&folder.join(SLOT), with_draft);
        Turn::take(&mut server, &saved_conversation(&folder)).say();
    }
}

/// Runs only as a child: there is no slot.
#[test]
fn starts_cold() {
    let Some((folder, n_prompt)) = folder() else { return };
    Turn::take(&mut Server::start(n_prompt), &saved_conversation(&folder)).say();
}

fn readme_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")
}

/// The README in three pieces, of which the middle one is the table.
fn readme() -> [String; 3] {
    let text = fs::read_to_string(readme_path()).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("a marker");
    let (table, after) = rest.split_once(END).expect("a marker");
    [format!("{before}{BEGIN}"), table.to_owned(), format!("{END}{after}")]
}

const HEADER: &str = "| prompt | tokens computed, cold start | restored | drafts accepted, never stopped | restored | \
    restored without the draft state |\n|---|---|---|---|---|---|\n";

#[test]
fn a_restored_slot_answers_the_next_turn_as_if_it_had_never_been_stopped() {
    let is_written = env::var_os("KVSTATE_WRITE_FIGURES").is_some();
    let n = if is_written { PROMPTS.len() } else { 1 };
    let mut table = HEADER.to_owned();
    for n_prompt in &PROMPTS[..n] {
        let turns = Turns::after(*n_prompt);
        println!("{n_prompt} tokens: {turns:?}");
        let Turns { never_stopped, erased, with_draft, without_draft, cold } = &turns;
        // All of the conversation, or what is new: the last token of the reply and the message.
        assert_eq!(cold.n_computed, n_prompt + N_REPLY + message().len());
        assert_eq!(never_stopped.n_computed, 1 + message().len());
        assert_eq!((erased, with_draft), (never_stopped, never_stopped));
        assert_eq!(without_draft.n_computed, never_stopped.n_computed);
        for turn in [without_draft, cold] {
            assert_eq!(turn.reply, never_stopped.reply, "{turns:?}");
        }
        let [with, without] = [with_draft, without_draft].map(|turn| turn.n_accepted * 1000 / turn.n_drafted);
        assert!(with > without + 100, "{turns:?}");
        table.write_str(&turns.line(*n_prompt)).unwrap();
    }
    let [before, old, after] = readme();
    if is_written {
        fs::write(readme_path(), before + &table + &after).unwrap();
    } else {
        assert!(old.starts_with(&table), "`make restart-figures` writes the README's table:\n{table}");
    }
}
