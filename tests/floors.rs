//! The floors of the crate: a file uses only floors below its own, and `unsafe` stays where it belongs.
#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};

/// From the bottom. `error` and `types` share a floor.
const FLOORS: [&[&str]; 11] = [
    &["error", "types"],
    &["format"],
    &["cells"],
    &["storage"],
    &["state"],
    &["memory"],
    &["context"],
    &["session"],
    &["inspect"],
    &["convert"],
    &["capi"],
];

/// What the crate's root gives another name.
const REEXPORTS: [(&str, &str); 5] = [
    ("Context", "context"),
    ("ContextParams", "context"),
    ("Error", "error"),
    ("Result", "error"),
    ("Status", "error"),
];

const UNSAFE: [&str; 3] = ["capi/", "storage/", "session/view.rs"];

fn height(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    let mut folders: Vec<PathBuf> = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).expect("inside src").to_str().expect("UTF-8").to_owned();
                all.push((name, fs::read_to_string(&path).expect("a source")));
            }
        }
    }
    all.sort();
    all
}

/// The floor that a file belongs to; none for lib.rs and programs.
fn module_of(file: &str) -> Option<&str> {
    let module = file.split('/').next()?.trim_end_matches(".rs");
    (module != "lib" && module != "bin").then_some(module)
}

/// The source without comments, strings and characters, line by line as it was.
fn code_of(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if c == '"' {
            string_len(rest)
        } else if let Some(raw) = rest.strip_prefix("r#\"") {
            raw.find("\"#").map_or(rest.len(), |end| end + 5)
        } else if rest.starts_with("'\"'") {
            3
        } else {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        };
        out.extend(rest[..skip].chars().filter(|&c| c == '\n'));
        rest = &rest[skip..];
    }
    out
}

fn string_len(text: &str) -> usize {
    let mut escaped = false;
    for (i, c) in text.char_indices().skip(1) {
        match c {
            '\\' if !escaped => escaped = true,
            '"' if !escaped => return i + 1,
            _ => escaped = false,
        }
    }
    text.len()
}

fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// Modules that paths from the crate's root name, with the line: `crate::a::b`, `crate::{a, b::c}`.
fn uses(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        let path = &code[at + "crate::".len()..];
        let Some(list) = path.strip_prefix('{') else {
            found.push((line, identifier(path).to_owned()));
            continue;
        };
        let mut depth = 0;
        let mut start = true;
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                c if c.is_whitespace() => {}
                _ if start && depth == 0 => {
                    found.push((line, identifier(&list[i..]).to_owned()));
                    start = false;
                }
                _ => {}
            }
        }
    }
    found
}

/// What is wrong with a file, with file and line.
fn broken_floors(file: &str, text: &str) -> Vec<String> {
    let Some(module) = module_of(file) else { return Vec::new() };
    let Some(own) = height(module) else { return vec![format!("src/{file}: {module} is on no floor")] };
    let mut broken = Vec::new();
    for (line, name) in uses(&code_of(text)) {
        let used =
            REEXPORTS.iter().find(|(alias, _)| *alias == name).map_or(name.as_str(), |(_, module)| module);
        let Some(floor) = height(used) else {
            broken.push(format!("src/{file}:{line}: {used} is on no floor"));
            continue;
        };
        if floor > own {
            broken.push(format!("src/{file}:{line}: {module} uses {used}, which is not below it"));
        }
    }
    broken
}

fn misplaced_unsafe(file: &str, text: &str) -> Vec<String> {
    if UNSAFE.iter().any(|place| file.starts_with(place)) {
        return Vec::new();
    }
    let code = code_of(text);
    let word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices("unsafe")
        .filter(|&(at, token)| !code[..at].ends_with(word) && !code[at + token.len()..].starts_with(word))
        .map(|(at, _)| {
            let line = code[..at].matches('\n').count() + 1;
            format!("src/{file}:{line}: unsafe belongs in {}", UNSAFE.join(", "))
        })
        .collect()
}

#[test]
fn a_floor_uses_only_floors_below_it() {
    let sources = sources();
    assert!(sources.len() > 20, "found {} files only", sources.len());
    let broken: Vec<String> = sources.iter().flat_map(|(file, text)| broken_floors(file, text)).collect();
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn unsafe_is_in_capi_storage_and_the_file_view_alone() {
    let misplaced: Vec<String> =
        sources().iter().flat_map(|(file, text)| misplaced_unsafe(file, text)).collect();
    assert!(misplaced.is_empty(), "\n{}", misplaced.join("\n"));
}

#[test]
fn every_module_of_the_crate_is_on_a_floor() {
    for (file, _) in sources() {
        if let Some(module) = module_of(&file) {
            assert!(height(module).is_some(), "src/{file}: {module} is on no floor");
        }
    }
}

#[test]
fn a_path_to_a_higher_floor_is_named_with_file_and_line() {
    let up = |text| broken_floors("cells/mod.rs", text);
    let memory = ["src/cells/mod.rs:2: cells uses memory, which is not below it"];
    assert_eq!(up("\nuse crate::memory::Memory;"), memory);
    assert_eq!(up("\nfn f() -> crate::memory::Memory {}"), memory);
    assert_eq!(up("\nuse crate::{error::Error, memory::{Memory, Scope}, types::Pos};"), memory);
    assert_eq!(up("\npub(in crate::memory) fn f() {}"), memory);
    assert_eq!(
        up("fn f() -> crate::Context {}"),
        ["src/cells/mod.rs:1: cells uses context, which is not below it"]
    );
    assert_eq!(up("use crate::new::X;"), ["src/cells/mod.rs:1: new is on no floor"]);
}

#[test]
fn comments_strings_and_lower_floors_are_fine() {
    for text in [
        "// use crate::memory::Memory;",
        "/* crate::capi::x */",
        "let s = \"crate::memory \\\" crate::capi::x\";",
        "let s = r#\"crate::capi::x\"#;",
        "use crate::error::{Error, Result};\nuse crate::types::Pos;\nuse crate::cells::SeqSet;",
        "let x = some_crate::memory::X;",
    ] {
        assert_eq!(broken_floors("cells/mod.rs", text), [""; 0], "{text}");
    }
}

#[test]
fn an_unsafe_token_is_named_with_file_and_line() {
    let text = "// unsafe\n#![deny(unsafe_code)]\nlet s = \"unsafe\";\nunsafe { f() }";
    assert_eq!(
        misplaced_unsafe("memory/mod.rs", text),
        ["src/memory/mod.rs:4: unsafe belongs in capi/, storage/, session/view.rs"]
    );
    assert_eq!(misplaced_unsafe("storage/host.rs", text), [""; 0]);
    assert_eq!(misplaced_unsafe("session/view.rs", text), [""; 0]);
    assert_eq!(misplaced_unsafe("session/mod.rs", text).len(), 1);
}
