//! `kvstate`: shows, checks and compares files and states of a KV cache.
//!
//! Exit codes: 0 all is well, 1 an error, 2 wrong usage, 3 something is damaged, or differs.

mod convert;
mod differences;
mod extract;
mod picture;
mod progress;
mod report;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use kvstate::Error;
use kvstate::inspect::{self, Inspected, Outcome, Verification};
use kvstate::session::Verify;
use kvstate::storage::MappedFile;
use serde::Serialize;

/// Shows, checks and compares files and states of a KV cache: sequence files, slot files, whole contexts, blobs.
///
/// Exit codes: 0 all is well, 1 an error, 2 wrong usage, 3 something is damaged, or differs.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Says what is in a file: tokens, sections, cells, checkpoints, draft state, identity, and whether it is whole
    Inspect {
        /// A sequence file, a whole context, or a state in memory as it was written to a file
        file: PathBuf,
        /// Draw the cells of every section and stream to this file
        #[arg(long, value_name = "OUT")]
        svg: Option<PathBuf>,
        /// Print JSON, with every run of cells and the place of every tensor
        #[arg(long)]
        json: bool,
        /// Print every run of cells, not the first few
        #[arg(long)]
        cells: bool,
        /// What is compared with the checksums of the file
        #[arg(long, value_name = "LEVEL", default_value = "full")]
        verify: Level,
    },
    /// Says which part of a file is damaged: by its checksums, or by its structure if it has none
    Verify {
        /// The files
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// What is compared with the checksums
        #[arg(long, default_value = "full")]
        level: Level,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Compares two files: tokens, cells by position, tensors by section, layer and cell
    Diff {
        /// The first
        a: PathBuf,
        /// The second
        b: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Takes something out of a file: the tokens, or a blob
    Extract(extract::Extract),
    /// Writes a file anew: in the newest version, with V transposed or not, with other types of K and V
    Convert(convert::Convert),
}

#[derive(Clone, Copy, ValueEnum)]
enum Level {
    /// Nothing but the checksums themselves
    None,
    /// Header and tokens
    Headers,
    /// Everything
    Full,
}

impl From<Level> for Verify {
    fn from(level: Level) -> Self {
        match level {
            Level::None => Self::None,
            Level::Headers => Self::Headers,
            Level::Full => Self::Full,
        }
    }
}

/// How a command ends that did its work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Fine,
    /// Damage, or a difference.
    Wrong,
}

impl Found {
    fn unless(is_fine: bool) -> Self {
        if is_fine { Self::Fine } else { Self::Wrong }
    }
}

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let found = match Arguments::parse().command {
        Command::Inspect { file, svg, json, cells, verify } => {
            inspect(&file, svg.as_deref(), json, cells, verify.into())
        }
        Command::Verify { files, level, json } => verify(&files, level.into(), json),
        Command::Diff { a, b, json } => diff(&a, &b, json),
        Command::Extract(extract) => extract.run(),
        Command::Convert(convert) => convert.run(),
    };
    match found {
        Ok(Found::Fine) => ExitCode::SUCCESS,
        Ok(Found::Wrong) => ExitCode::from(3),
        Err(error) => {
            eprintln!("kvstate: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints all that a command has to say. Whoever closes the pipe has read enough.
fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn print_json(value: &impl Serialize) -> Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// The error of a file, with its name.
fn of_file(path: &Path) -> impl Fn(Error) -> String + '_ {
    move |error| match error {
        // It has the name.
        Error::Io { .. } => error.to_string(),
        error => format!("{}: {error}", path.display()),
    }
}

fn inspect(file: &Path, svg: Option<&Path>, json: bool, cells: bool, level: Verify) -> Result<Found> {
    if let Some(out) = svg {
        extract::not_the_input(file, out)?;
    }
    let input = MappedFile::open(file)?;
    let description = inspect::inspect(&input).map_err(of_file(file))?;
    let verification =
        inspect::verify(&input, level, Some(&mut progress::bar("verifying"))).map_err(of_file(file))?;
    let report = report::Report::new(&input, &description, &verification);
    if let Some(out) = svg {
        let title = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        extract::write_file(out, picture::svg(&title, &input, &description).as_bytes())?;
    }
    if json {
        print_json(&report)?;
    } else {
        print(&report.text(&file.display().to_string(), cells))?;
    }
    Ok(Found::unless(verification.is_whole()))
}

/// What `verify` found of a file.
#[derive(Serialize)]
struct Verified {
    file: String,
    error: Option<String>,
    verification: Option<Verification>,
}

fn verify(files: &[PathBuf], level: Verify, json: bool) -> Result<Found> {
    let mut all = Vec::new();
    let (mut is_whole, mut has_failed) = (true, false);
    for file in files {
        let verified = MappedFile::open(file)
            .and_then(|input| inspect::verify(&input, level, Some(&mut progress::bar("verifying"))))
            .map_err(of_file(file));
        is_whole &= verified.as_ref().is_ok_and(Verification::is_whole);
        has_failed |= verified.is_err();
        let file = file.display().to_string();
        all.push(match verified {
            Ok(verification) => Verified { file, error: None, verification: Some(verification) },
            Err(error) => Verified { file, error: Some(error), verification: None },
        });
    }
    if json {
        print_json(&all)?;
    } else {
        print(&all.iter().map(verified_text).collect::<String>())?;
    }
    let failed = || {
        let errors: Vec<_> = all.iter().filter_map(|verified| verified.error.clone()).collect();
        errors.join("\nkvstate: ")
    };
    // Damage is worth more than a file that could not be opened.
    let is_damaged = all.iter().filter_map(|v| v.verification.as_ref()).any(|v| !v.is_whole());
    match (has_failed, is_damaged) {
        (true, false) => Err(failed().into()),
        (true, true) => {
            eprintln!("kvstate: {}", failed());
            Ok(Found::Wrong)
        }
        (false, _) => Ok(Found::unless(is_whole)),
    }
}

fn verified_text(Verified { file, verification, .. }: &Verified) -> String {
    let Some(found) = verification else { return String::new() };
    let damaged: Vec<_> =
        found.parts.iter().filter(|part| matches!(part.outcome, Outcome::Damaged(_))).collect();
    let verdict = match (damaged.len(), found.has_checksums) {
        (0, true) if found.parts.iter().all(|part| part.outcome == Outcome::Whole) => "whole",
        (0, true) => "whole as far as was compared",
        (0, false) => "no checksums; the structure makes sense",
        _ => "damaged",
    };
    let mut text = format!("{file}: {verdict}\n");
    for part in damaged {
        text += &report::part_line(part);
    }
    text
}

fn diff(a: &Path, b: &Path, json: bool) -> Result<Found> {
    let (input_a, input_b) = (MappedFile::open(a)?, MappedFile::open(b)?);
    let of_a = inspect::inspect(&input_a).map_err(of_file(a))?;
    let of_b = inspect::inspect(&input_b).map_err(of_file(b))?;
    for (path, description) in [(a, &of_a), (b, &of_b)] {
        if let inspect::Basis::Incomplete { reason } = &description.state.basis {
            return Err(format!("{}: the memory state is not understood: {reason}", path.display()).into());
        }
    }
    let (a, b) = (
        Inspected { input: &input_a, description: &of_a },
        Inspected { input: &input_b, description: &of_b },
    );
    let found = inspect::diff(a, b, Some(&mut progress::bar("comparing")))?;
    if json {
        print_json(&found)?;
    } else {
        print(&differences::text(&found))?;
    }
    Ok(Found::unless(found.is_same()))
}
