//! `kvstate extract`: the tokens of a file as text, a blob of it as a file of its own.

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kvstate::inspect::{self, Description};
use kvstate::storage::MappedFile;

use crate::{Found, Result, of_file, print, print_json};

/// What to take out of a file.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["tokens", "checkpoint", "draft", "driver"])))]
pub struct Extract {
    /// A sequence file, or a whole context
    file: PathBuf,
    /// Print the token field, a token a line
    #[arg(long)]
    tokens: bool,
    /// Write a checkpoint, by its number from 0
    #[arg(long, value_name = "N", requires = "output")]
    checkpoint: Option<usize>,
    /// Which of the checkpoint's states
    #[arg(long, value_name = "PART", default_value = "target", requires = "checkpoint")]
    part: Part,
    /// Write the draft model's state
    #[arg(long, requires = "output")]
    draft: bool,
    /// Write the speculative driver's state
    #[arg(long, requires = "output")]
    driver: bool,
    /// Print the tokens as JSON
    #[arg(long, requires = "tokens")]
    json: bool,
    /// The file to write; one that is there is replaced
    #[arg(long, short, value_name = "OUT")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Part {
    Target,
    Draft,
    Driver,
}

impl Extract {
    pub fn run(&self) -> Result<Found> {
        if let Some(output) = &self.output {
            not_the_input(&self.file, output)?;
        }
        let input = MappedFile::open(&self.file)?;
        let found = inspect::inspect(&input).map_err(of_file(&self.file))?;
        if self.tokens {
            return self.print_tokens(&input, &found);
        }
        let range = self.blob(&found).map_err(|text| format!("{}: {text}", self.file.display()))?;
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let bytes = input.get(place(range.start)..place(range.end)).unwrap_or_default();
        if let Some(output) = &self.output {
            write_file(output, bytes)?;
        }
        Ok(Found::Fine)
    }

    fn print_tokens(&self, input: &[u8], found: &Description) -> Result<Found> {
        if found.tokens.is_none() {
            return Err(format!("{}: a {} has no tokens", self.file.display(), found.kind.name()).into());
        }
        let tokens: Vec<_> = found.tokens(input).collect();
        if self.json {
            print_json(&tokens)?;
        } else {
            let lines = tokens.iter().fold(String::new(), |text, token| text + &token.to_string() + "\n");
            match &self.output {
                Some(output) => write_file(output, lines.as_bytes())?,
                None => print(&lines)?,
            }
        }
        Ok(Found::Fine)
    }

    fn blob<'a>(&self, found: &'a Description) -> std::result::Result<&'a Range<u64>, String> {
        let appendices = &found.appendices;
        let range = if let Some(number) = self.checkpoint {
            let n = appendices.checkpoints.len();
            let checkpoint = appendices
                .checkpoints
                .get(number)
                .ok_or_else(|| format!("there is no checkpoint {number}: the file has {n}"))?;
            match self.part {
                Part::Target => &checkpoint.target,
                Part::Draft => &checkpoint.draft,
                Part::Driver => &checkpoint.driver,
            }
        } else {
            let state = appendices.draft.as_ref().ok_or("the file has no draft state")?;
            if self.draft { &state.draft } else { &state.driver }
        };
        if range.is_empty() {
            return Err("it is empty".to_owned());
        }
        Ok(range)
    }
}

/// Refuses to write over what is read: a mistyped name would cost the conversation.
pub fn not_the_input(input: &Path, output: &Path) -> Result<()> {
    let resolved = |path: &Path| std::fs::canonicalize(path).ok();
    if resolved(input).is_some_and(|input| Some(input) == resolved(output)) {
        return Err(format!("write {}: it is the file that is read", output.display()).into());
    }
    Ok(())
}

/// Writes a file whole, or leaves the old one. A state is a conversation: nobody else may read it.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |error: std::io::Error| format!("write {}: {error}", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
