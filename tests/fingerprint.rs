//! Fingerprints of a model and its settings.
#![allow(missing_docs, reason = "a test")]

mod gguf;

use std::fs;
use std::path::{Path, PathBuf};

use gguf::{Gguf, array, string};
use kvstate::error::Error;
use kvstate::session::fingerprint;
use sha2::{Digest, Sha256};

const NO_GGUF: [&str; 0] = [];
const NO_SETTINGS: &[(&str, &str)] = &[];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn written(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).expect("a file");
    path
}

fn of_bytes(bytes: &[u8]) -> kvstate::Result<[u8; 32]> {
    let folder = folder();
    fingerprint(&[written(folder.path(), "model.gguf", bytes)], NO_SETTINGS)
}

/// The message of what keeps a file from having a fingerprint, without its path.
fn refusal(bytes: &[u8]) -> String {
    match of_bytes(bytes).expect_err("it is refused") {
        Error::Gguf { path, source } => {
            assert!(path.ends_with("model.gguf"), "{path}");
            source.to_string()
        }
        other => panic!("another error: {other}"),
    }
}

fn record(tag: &[u8], texts: &[&str]) -> Vec<u8> {
    let texts = texts.iter().flat_map(|text| string(text));
    tag.iter().copied().chain(texts).collect()
}

// What it is of.

#[test]
fn it_is_the_hash_that_the_documentation_says() {
    let gguf = Gguf::model();
    let folder = folder();
    let paths = [
        written(folder.path(), "a", &gguf.file()),
        written(folder.path(), "b", &Gguf { version: 2, ..Gguf::model() }.file()),
    ];
    let settings = [("type_v", "q8_0"), ("rope_freq_scale", ""), ("type_k", "f16")];
    let mut expected = Sha256::new();
    expected.update(b"KVSF\x01\0\0\0");
    for head in [gguf.head(), Gguf { version: 2, ..gguf }.head()] {
        expected.update(b"GGUF");
        expected.update(Sha256::digest(&head));
    }
    expected.update(record(b"PAIR", &["rope_freq_scale", ""]));
    expected.update(record(b"PAIR", &["type_k", "f16"]));
    expected.update(record(b"PAIR", &["type_v", "q8_0"]));
    assert_eq!(fingerprint(&paths, &settings).unwrap()[..], expected.finalize()[..]);
}

#[test]
fn the_order_of_settings_makes_no_difference_and_that_of_files_does() {
    let of = |settings: &[(&str, &str)]| fingerprint(&NO_GGUF, settings).unwrap();
    assert_eq!(of(&[("a", "1"), ("b", "2")]), of(&[("b", "2"), ("a", "1")]));

    let folder = folder();
    let first = written(folder.path(), "first", &Gguf::model().file());
    let second = written(folder.path(), "second", &Gguf { tensors: Vec::new(), ..Gguf::model() }.file());
    let of = |files: [&PathBuf; 2]| fingerprint(&files, NO_SETTINGS).unwrap();
    assert_ne!(of([&first, &second]), of([&second, &first]));
}

#[test]
fn no_two_lists_of_settings_share_one() {
    let lists: [&[(&str, &str)]; 7] = [
        &[("a", "b")],
        &[("a", "")],
        &[("ab", "")],
        &[("b", "a")],
        &[("a", "b"), ("c", "d")],
        &[("a", "bPAIR"), ("c", "d")],
        &[("a", "b"), ("c", "")],
    ];
    let mut all: Vec<_> = lists.iter().map(|list| fingerprint(&NO_GGUF, list).unwrap()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), lists.len());
}

#[test]
fn every_byte_of_the_head_is_part_of_it_and_none_behind() {
    let gguf = Gguf::model();
    let (head, file) = (gguf.head().len(), gguf.file());
    let plain = of_bytes(&file).unwrap();
    for at in 0..file.len() {
        let mut other = file.clone();
        other[at] ^= 1;
        match of_bytes(&other) {
            Ok(fingerprint) => assert_eq!(fingerprint == plain, at >= head, "byte {at} of {head}"),
            Err(_) => assert!(at < head, "byte {at} of {head}"),
        }
    }
}

#[test]
fn of_a_gigabyte_only_the_head_is_read() {
    let folder = folder();
    let path = written(folder.path(), "model.gguf", &Gguf::model().file());
    let file = fs::File::options().write(true).open(&path).expect("the file");
    file.set_len(1 << 30).expect("a sparse file");
    let before = bytes_read();
    fingerprint(&[path], NO_SETTINGS).unwrap();
    let read = bytes_read() - before;
    assert!(read < 64 << 10, "{read} bytes were read");
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").expect("Linux counts them");
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.expect("rchar").parse().expect("a number")
}

#[test]
fn every_type_of_value_is_passed_over() {
    let values = [
        (0, vec![1]),
        (1, vec![1]),
        (2, vec![1, 2]),
        (3, vec![1, 2]),
        (4, vec![1, 2, 3, 4]),
        (5, vec![1, 2, 3, 4]),
        (6, vec![1, 2, 3, 4]),
        (7, vec![1]),
        (8, string("text")),
        (9, array(5, 3, &[0; 12])),
        (9, array(8, 2, &[string("a"), string("")].concat())),
        (9, array(12, 0, &[])),
        (10, vec![0; 8]),
        (11, vec![0; 8]),
        (12, vec![0; 8]),
    ];
    for (number, value) in values {
        let gguf = Gguf { values: vec![("key".to_owned(), number, value)], ..Gguf::model() };
        let mut behind = gguf.file();
        let plain = of_bytes(&behind).unwrap_or_else(|error| panic!("type {number}: {error}"));
        behind.push(7);
        assert_eq!(of_bytes(&behind).unwrap(), plain, "type {number}");
    }
}

// What has none.

#[test]
fn every_truncation_of_the_head_is_refused() {
    let gguf = Gguf::model();
    for n in 0..gguf.head().len() {
        let message = refusal(&gguf.head()[..n]);
        assert!(message.contains("expected at most"), "{n} bytes: {message}");
    }
}

#[test]
fn what_is_no_gguf_of_version_2_or_3_is_refused() {
    let version = |version| refusal(&Gguf { version, ..Gguf::model() }.file());
    assert_eq!(version(1), "unknown (magic, version) for GGUF file: 46554747, 00000001");
    assert_eq!(version(4), "unknown (magic, version) for GGUF file: 46554747, 00000004");
    // That of the other byte order.
    assert_eq!(version(3 << 24), "unknown (magic, version) for GGUF file: 46554747, 03000000");
    assert_eq!(refusal(b"ggsq\x04\0\0\0"), "GGUF magic: 71736767 (expected 46554747)");
}

#[test]
fn lengths_beyond_the_file_are_refused_before_anything_is_read_for_them() {
    let of = |number, value| {
        refusal(&Gguf { values: vec![("key".to_owned(), number, value)], ..Gguf::model() }.head())
    };
    let huge = u64::MAX.to_le_bytes().to_vec();
    assert!(of(8, huge).starts_with("value: 18446744073709551615 bytes at offset 47 (expected at most "));
    assert!(of(9, array(10, u64::MAX, &[])).starts_with("array: 18446744073709551615 bytes at offset "));
    // So many strings end with the file.
    assert!(of(9, array(8, u64::MAX, &[])).starts_with("string of an array: "));
}

#[test]
fn a_head_beyond_256_mib_is_refused_without_being_read() {
    let folder = folder();
    let value = ((1_u64 << 28) + 1).to_le_bytes().to_vec();
    let gguf = Gguf { values: vec![("key".to_owned(), 8, value)], ..Gguf::model() };
    let path = written(folder.path(), "model.gguf", &gguf.head());
    fs::File::options().write(true).open(&path).expect("the file").set_len(1 << 30).expect("a sparse file");
    let before = bytes_read();
    let error = fingerprint(&[path], NO_SETTINGS).unwrap_err().to_string();
    assert!(error.contains("value: 268435457 bytes at offset 47 (expected at most 268435409)"), "{error}");
    assert!(bytes_read() - before < 64 << 10);
}

#[test]
fn types_that_gguf_does_not_have_are_refused() {
    let of = |number, value| {
        refusal(&Gguf { values: vec![("key".to_owned(), number, value)], ..Gguf::model() }.file())
    };
    assert_eq!(of(13, vec![0; 8]), "type of a value: 13 (expected a type of GGUF)");
    assert_eq!(of(9, array(99, 1, &[0; 8])), "type of a value: 99 (expected a type of GGUF)");
    let nested = "type of a value: an array in an array (expected a number or a string)";
    assert_eq!(of(9, array(9, 1, &array(0, 1, &[0]))), nested);
}

#[test]
fn a_tensor_of_five_dimensions_is_refused() {
    let tensors = vec![("weight".to_owned(), vec![1; 5])];
    let message = refusal(&Gguf { tensors, ..Gguf::model() }.file());
    assert_eq!(message, "n_dim: 5 (expected at most 4)");
}

#[test]
fn what_cannot_be_read_is_named() {
    let folder = folder();
    let missing = folder.path().join("missing.gguf");
    let error = fingerprint(&[&missing], NO_SETTINGS).unwrap_err();
    assert!(
        matches!(&error, Error::Io { op: "open", path, .. } if *path == missing.display().to_string()),
        "{error}"
    );
    let error = fingerprint(&[folder.path()], NO_SETTINGS).unwrap_err();
    assert!(matches!(error, Error::Io { op: "read", .. }), "{error}");
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let of = |settings: &[(&str, &str)]| fingerprint(&NO_GGUF, settings).unwrap_err().to_string();
    assert_eq!(of(&[("a", "2"), ("b", ""), ("a", "1")]), "settings: 'a' comes twice, as '1' and '2'");
    assert_eq!(of(&[("", "x")]), "settings: the key of 'x' is empty");
    assert_eq!(of(&[]), "settings: no GGUF and no setting is named");
}
