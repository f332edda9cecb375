//! What becomes of each file that llama.cpp wrote: `tests/fixtures/results.txt`, and from it the table of the README.
//!
//! Both are compared in every run, the lines of those files that are there. `make fixture-table` writes them; lines of files
//! that are not there stay as they are.
#![allow(missing_docs, reason = "a test")]

mod common;
mod place;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use common::{
    Fixture, SEQUENCE, SESSION, file_bytes, file_of, fixtures, saved_session, saved_slot, seq_state,
    whole_contexts, whole_state,
};
use kvstate::types::StateFlags;

const NONE: StateFlags = StateFlags::empty();
const SAME: &str = "byte for byte";
const VERSION_4: &str = "as version 4";
const LEGACY_PARTIAL: &str = "legacy partial, as 8 bytes";

const HEADER: &str =
    "# file | architecture | sections | what | bytes | crc32c | written again: by `make fixture-table`\n";
const BEGIN: &str = "<!-- made by tests/fixture_table.rs -->\n";
const END: &str = "<!-- to here -->\n";

/// A line of results.txt but for its file, which is the key.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    arch: String,
    sections: String,
    what: String,
    bytes: u64,
    crc32c: u32,
    result: String,
}

impl Line {
    fn of(fixture: &Fixture, what: &str, file: &[u8], result: &str) -> Self {
        let sections = match &*fixture.sidecar.memory {
            "llama_kv_cache" => "attention",
            "llama_kv_cache_iswa" => "attention, window",
            "llama_kv_cache_dsa" | "llama_kv_cache_msa" => "attention, indexer",
            "llama_memory_recurrent" => "recurrent",
            "llama_memory_hybrid" => "attention, recurrent",
            "llama_memory_hybrid_iswa" => "attention, window, recurrent",
            "llama_memory_hybrid_idx" => "attention, recurrent, indexer",
            "llama_kv_cache_dsv4" => "attention, window, DSV4",
            memory => panic!("{}: {memory}", fixture.name),
        };
        Self {
            arch: fixture.sidecar.arch.clone(),
            sections: sections.to_owned(),
            what: what.to_owned(),
            bytes: file.len() as u64,
            crc32c: crc32c::crc32c(file),
            result: result.to_owned(),
        }
    }

    fn parse(line: &str) -> (String, Self) {
        let fields: Vec<&str> = line.split(" | ").collect();
        let [file, arch, sections, what, bytes, crc32c, result] = fields[..] else { panic!("{line}") };
        let [arch, sections, what, result] = [arch, sections, what, result].map(str::to_owned);
        let (bytes, crc32c) =
            (bytes.parse().expect("a size"), u32::from_str_radix(crc32c, 16).expect("a checksum"));
        (file.to_owned(), Self { arch, sections, what, bytes, crc32c, result })
    }

    fn written(&self, file: &str) -> String {
        let Self { arch, sections, what, bytes, crc32c, result } = self;
        format!("{file} | {arch} | {sections} | {what} | {bytes} | {crc32c:08x} | {result}\n")
    }
}

/// The one of `expected` that the bytes are.
fn result_of<'a>(got: &[u8], expected: &[(&[u8], &'a str)], name: &str) -> &'a str {
    let found = expected.iter().find(|(want, _)| got == *want);
    found.unwrap_or_else(|| panic!("{name}: what is written is nothing that was expected")).1
}

fn of_blob(f: &Fixture) -> Option<Line> {
    let (blob, seq) = (f.blob()?, f.sidecar.seq_id);
    let what = if f.is_partial() { "PARTIAL_ONLY" } else { "NONE" };
    let result = if f.is_old() {
        // It has no version, so it is read from a file; a partial state is that of its own sections.
        let mut params = f.params();
        if f.is_partial() {
            params.sections = f.sections_of_state();
        }
        let mut ctx = place::context(params).unwrap();
        let file = file_of(&file_bytes(SEQUENCE, f.version(), &f.sidecar.tokens, &blob[8..]));
        ctx.state_seq_load_file(file.path(), seq, 4096).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        result_of(&seq_state(&mut ctx, seq, NONE), &[(&f.as_version_4(), VERSION_4)], &f.name)
    } else {
        let mut ctx = f.context();
        ctx.state_seq_set_data(&blob, seq, f.flags()).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        let legacy = if f.is_legacy_partial() { &blob[..8] } else { &blob };
        let expected = [(&blob[..], SAME), (legacy, LEGACY_PARTIAL)];
        result_of(&seq_state(&mut ctx, seq, f.flags()), &expected, &f.name)
    };
    Some(Line::of(f, what, &blob, result))
}

fn of_slot_file(f: &Fixture) -> Option<Line> {
    let (path, mut ctx, seq) = (f.path("slot")?, f.context(), f.sidecar.seq_id);
    let loaded = ctx.state_seq_load_file(&path, seq, 4096).unwrap_or_else(|e| panic!("{}: {e}", f.name));
    let (file, got) = (fs::read(&path).unwrap(), saved_slot(&mut ctx, seq, &loaded.tokens));
    let result = if f.is_old() {
        let want = file_bytes(SEQUENCE, 4, &f.sidecar.tokens, &f.as_version_4()[8..]);
        result_of(&got, &[(&want, VERSION_4)], &f.name)
    } else {
        result_of(&got, &[(&file, SAME)], &f.name)
    };
    Some(Line::of(f, "slot file", &file, result))
}

/// A whole context as `state_get_data` gives it; an old one is read from a file.
fn of_whole_context(path: &Path, f: &Fixture) -> Line {
    let (state, name) = (fs::read(path).unwrap(), path.display().to_string());
    let mut ctx = f.context();
    let result = if f.is_old() {
        let session = file_of(&file_bytes(SESSION, f.version() + 7, &f.sidecar.tokens, &state));
        ctx.state_load_file(session.path(), 4096).unwrap_or_else(|e| panic!("{name}: {e}"));
        let twin = fs::read(f.twin_of(path).unwrap_or_else(|| panic!("{name} has no twin"))).unwrap();
        result_of(&whole_state(&mut ctx), &[(&twin, VERSION_4)], &name)
    } else {
        ctx.state_set_data(&state).unwrap_or_else(|e| panic!("{name}: {e}"));
        result_of(&whole_state(&mut ctx), &[(&state, SAME)], &name)
    };
    Line::of(f, "whole context", &state, result)
}

fn of_session_file(path: &Path, f: &Fixture) -> Line {
    let (file, name) = (fs::read(path).unwrap(), path.display().to_string());
    let mut ctx = f.context();
    let loaded = ctx.state_load_file(path, 4096).unwrap_or_else(|e| panic!("{name}: {e}"));
    let whole = PathBuf::from(name.replace("_session.bin", "_whole.ctx"));
    let twin = fs::read(f.twin_of(&whole).unwrap_or_else(|| panic!("{name} has no twin"))).unwrap();
    let want = file_bytes(SESSION, 11, &f.sidecar.tokens, &twin);
    let result = result_of(&saved_session(&mut ctx, &loaded.tokens), &[(&want, VERSION_4)], &name);
    Line::of(f, "session file", &file, result)
}

/// A line for every file that is there.
fn measured() -> BTreeMap<String, Line> {
    let mut lines = BTreeMap::new();
    for f in fixtures() {
        lines.extend(of_blob(&f).map(|line| (format!("{}.bin", f.name), line)));
        lines.extend(of_slot_file(&f).map(|line| (format!("{}.slot", f.name), line)));
    }
    let file = |path: &Path| path.strip_prefix(common::folder()).unwrap().to_str().unwrap().to_owned();
    for (path, f) in whole_contexts("_whole.ctx") {
        lines.insert(file(&path), of_whole_context(&path, &f));
    }
    for (path, f) in whole_contexts("_session.bin") {
        lines.insert(file(&path), of_session_file(&path, &f));
    }
    lines
}

fn recorded() -> BTreeMap<String, Line> {
    let text = fs::read_to_string(results_path()).unwrap_or_default();
    text.lines().filter(|line| !line.starts_with('#')).map(Line::parse).collect()
}

fn results_path() -> PathBuf {
    common::repository_folder().join("results.txt")
}

fn readme_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")
}

fn is_writing() -> bool {
    std::env::var_os("KVSTATE_WRITE_FIXTURES").is_some()
}

/// How many, their bytes, and what becomes of them if it is not the same bytes.
fn cell(lines: &[&Line]) -> String {
    let Some(first) = lines.first() else { return String::new() };
    assert!(lines.iter().all(|line| line.result == first.result), "{lines:?}");
    let bytes = grouped(lines.iter().map(|line| line.bytes).sum());
    let result = if first.result == LEGACY_PARTIAL { "; written as 8 bytes" } else { "" };
    format!("{}: {bytes}{result}", lines.len())
}

/// 12,345
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn table(lines: &BTreeMap<String, Line>) -> String {
    let mut archs = BTreeMap::<&str, Vec<&Line>>::new();
    for line in lines.values() {
        archs.entry(&line.arch).or_default().push(line);
    }
    let mut out =
        "| architecture | sections | NONE | PARTIAL_ONLY | slot files | whole contexts | of versions 2 and 3 |\n\
         |---|---|---|---|---|---|---|\n"
            .to_owned();
    for (arch, lines) in archs {
        let (old, current): (Vec<&Line>, Vec<&Line>) =
            lines.iter().partition(|line| line.result == VERSION_4);
        let of =
            |what: &str| -> Vec<&Line> { current.iter().copied().filter(|line| line.what == what).collect() };
        let cells =
            [of("NONE"), of("PARTIAL_ONLY"), of("slot file"), of("whole context"), old].map(|of| cell(&of));
        writeln!(out, "| {arch} | {} | {} |", lines[0].sections, cells.join(" | ")).unwrap();
    }
    out
}

#[test]
fn every_file_gives_what_is_recorded_of_it() {
    let (mut recorded, measured) = (recorded(), measured());
    if is_writing() {
        recorded.extend(measured.clone());
        let lines: String = recorded.iter().map(|(file, line)| line.written(file)).collect();
        fs::write(results_path(), HEADER.to_owned() + &lines).unwrap();
        write_table(&recorded);
    }
    for (file, line) in &measured {
        assert_eq!(recorded.get(file), Some(line), "{file}: run `make fixture-table` and look at the diff");
    }
    println!("{} of {} files", measured.len(), recorded.len());
}

/// The README up to its table, the table, and what follows.
fn readme() -> (String, String, String) {
    let text = fs::read_to_string(readme_path()).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the start of the table");
    let (table, after) = rest.split_once(END).expect("the end of the table");
    (before.to_owned(), table.to_owned(), after.to_owned())
}

fn write_table(lines: &BTreeMap<String, Line>) {
    let (before, _, after) = readme();
    fs::write(readme_path(), [&before, BEGIN, &table(lines), END, &after].concat()).unwrap();
}

#[test]
fn the_table_of_the_readme_is_that_of_the_results() {
    // The other test writes it.
    if !is_writing() {
        assert!(readme().1 == table(&recorded()), "README.md is out of date: run `make fixture-table`");
    }
}
