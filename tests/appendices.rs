//! The appendices of slot files, byte by byte: what they hold, and what is refused.
#![allow(missing_docs, reason = "a test")]

use kvstate::format::{
    BoundedRead, Checkpoint, CheckpointSpan, Checkpoints, Cursor, DraftState, GgmlType, Identity, Integrity,
    Part, PartKind, SectionGeometry, Tag, TensorShape,
};
use kvstate::{Error, Status};

fn le32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn blob(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// Two checkpoints, written here by hand.
fn checkpoints() -> Vec<u8> {
    [
        &le32(&[0x504b_4353, 1, 2, 16, 0, 4, 15])[..],
        &blob(b"first"),
        &blob(b""),
        &blob(b"dr"),
        &le32(&[32, 0, 20, 31]),
        &blob(b"second target"),
        &blob(b"draft"),
        &blob(b""),
    ]
    .concat()
}

fn span(n_tokens: i64, pos_min: i32, pos_max: i32) -> CheckpointSpan {
    CheckpointSpan::new(n_tokens, pos_min, pos_max).unwrap()
}

fn written(checkpoints: &[Checkpoint<&[u8]>]) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    Checkpoints(checkpoints.to_vec()).write(|piece| {
        bytes.extend(piece);
        Ok(())
    })?;
    Ok(bytes)
}

#[test]
fn checkpoints_are_written_in_llama_servers_layout() {
    let first =
        Checkpoint { span: span(16, 4, 15), target: &b"first"[..], draft: &b""[..], driver: &b"dr"[..] };
    let second = Checkpoint {
        span: span(32, 20, 31),
        target: &b"second target"[..],
        draft: &b"draft"[..],
        driver: &b""[..],
    };
    assert_eq!(written(&[first, second]).unwrap(), checkpoints());
}

#[test]
fn checkpoints_are_read_by_where_their_blobs_lie() {
    let bytes = checkpoints();
    let mut input = Cursor::new(&bytes);
    let Checkpoints(all) = Checkpoints::read(&mut input).unwrap();
    assert_eq!(BoundedRead::left(&input), 0);
    let place = |n: u64| usize::try_from(n).unwrap();
    let at = |range: &std::ops::Range<u64>| &bytes[place(range.start)..place(range.end)];
    let found: Vec<_> = all.iter().map(|c| (c.span, at(&c.target), at(&c.draft), at(&c.driver))).collect();
    assert_eq!(
        found,
        [
            (span(16, 4, 15), &b"first"[..], &b""[..], &b"dr"[..]),
            (span(32, 20, 31), &b"second target"[..], &b"draft"[..], &b""[..]),
        ]
    );
}

#[test]
fn every_truncation_of_checkpoints_is_an_error() {
    let bytes = checkpoints();
    for len in 0..bytes.len() {
        let error = Checkpoints::read(&mut Cursor::new(&bytes[..len])).unwrap_err();
        assert_eq!(error.status(), Status::Truncated, "{len}: {error}");
    }
}

#[test]
fn a_count_of_checkpoints_beyond_the_file_is_refused_before_anything_is_allocated() {
    let bytes = le32(&[0x504b_4353, 1, u32::MAX]);
    let error = Checkpoints::read(&mut Cursor::new(&bytes)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "truncated state: checkpoints needs 171798691800 bytes at offset 12, 0 are left"
    );
}

#[test]
fn values_that_no_checkpoint_has_are_refused_with_both() {
    let with = |at: usize, value: u32| {
        let mut bytes = checkpoints();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        Checkpoints::read(&mut Cursor::new(&bytes)).unwrap_err().to_string()
    };
    assert_eq!(with(0, 0x1234_5678), "appendix magic: 12345678 (expected 504b4353)");
    assert_eq!(with(4, 2), "appendix version: 00000002 (expected 00000001)");
    assert_eq!(with(16, u32::MAX), "checkpoint n_tokens: -4294967280 (expected at least 0)");
    assert_eq!(with(20, 16), "checkpoint pos_min: 16 (expected at most pos_max 15)");
    let empty = [&le32(&[0x504b_4353, 1, 1, 0, 0, 0, 0])[..], &[0; 24]].concat();
    let error = Checkpoints::read(&mut Cursor::new(&empty)).unwrap_err();
    assert_eq!(error.to_string(), "target checkpoint: 0 bytes (expected a partial state)");
}

#[test]
fn checkpoints_that_make_no_sense_are_not_written() {
    assert_eq!(
        CheckpointSpan::new(-1, 0, 0).unwrap_err().to_string(),
        "n_tokens: -1, a checkpoint has at least 0"
    );
    assert_eq!(CheckpointSpan::new(1, 5, 4).unwrap_err().to_string(), "pos_min: 5, above pos_max 4");
    let empty = Checkpoint { span: span(1, 0, 0), target: &b""[..], draft: &b""[..], driver: &b""[..] };
    assert_eq!(
        written(&[empty]).unwrap_err().to_string(),
        "checkpoints[0].target: 0 bytes, a checkpoint has a partial state of the target"
    );
}

#[test]
fn a_draft_state_is_two_blobs_behind_its_heads() {
    let (first, second) = DraftState { draft: 3, driver: 2 }.heads();
    let bytes = [&first[..], b"abc", &second, b"de"].concat();
    assert_eq!(bytes, [&le32(&[0x5446_4453, 1])[..], &blob(b"abc"), &blob(b"de")].concat());
    let read = DraftState::read(&mut Cursor::new(&bytes)).unwrap();
    assert_eq!(read, DraftState { draft: 16..19, driver: 27..29 });
    for len in 0..bytes.len() {
        let error = DraftState::read(&mut Cursor::new(&bytes[..len])).unwrap_err();
        assert_eq!(error.status(), Status::Truncated, "{len}: {error}");
    }
}

// Integrity

/// What stands before the appendix in these tests: 5 bytes of a header, 7 of a state.
const BEFORE: &[u8] = b"headrstate..";

fn integrity() -> Integrity {
    let part = |kind, bytes: &[u8]| Part { kind, crc32c: crc32c::crc32c(bytes), len: bytes.len() as u64 };
    Integrity {
        identity: Identity { model: b"model".to_vec(), salt: b"salt".to_vec(), metadata: Vec::new() },
        geometry: vec![SectionGeometry {
            kind: 1,
            settings: vec![(Tag(*b"ROTK"), 64)],
            tensors: vec![TensorShape { tag: Tag(*b"K   "), layer: 2, ggml_type: GgmlType::F16, n_embd: 8 }],
        }],
        parts: vec![part(PartKind::HEAD, &BEFORE[..5]), part(PartKind::STATE, &BEFORE[5..])],
    }
}

fn read(file: &[u8]) -> Result<Integrity, Error> {
    let tail = file.last_chunk().expect("a tail");
    let start = Integrity::find(file.len() as u64, tail).expect("an appendix");
    let mut input = Cursor::new(file);
    BoundedRead::skip(&mut input, "before", start)?;
    Integrity::read(&mut input)
}

fn file() -> Vec<u8> {
    [BEFORE, &integrity().to_bytes().unwrap()].concat()
}

#[test]
fn the_last_word_is_the_checksum_of_every_byte_before_it() {
    let file = file();
    let (before, last) = file.split_last_chunk::<4>().unwrap();
    assert_eq!(u32::from_le_bytes(*last), crc32c::crc32c(before));
}

#[test]
fn integrity_is_written_as_documented() {
    let bytes = integrity().to_bytes().unwrap();
    let record = |tag: &[u8; 4], bytes: &[u8]| {
        [&tag[..], &u32::try_from(bytes.len()).unwrap().to_le_bytes(), bytes].concat()
    };
    let part = |kind: &[u8; 4], bytes: &[u8]| {
        let crc = crc32c::crc32c(bytes).to_le_bytes();
        record(b"PART", &[kind, &crc[..], &(bytes.len() as u64).to_le_bytes()].concat())
    };
    let payload = [
        record(b"MODL", b"model"),
        record(b"SALT", b"salt"),
        record(
            b"GEOM",
            &le32(&[1, 1, 1, u32::from_le_bytes(*b"ROTK"), 64, 1, u32::from_le_bytes(*b"K   "), 2, 1, 8]),
        ),
        part(b"HEAD", &BEFORE[..5]),
        part(b"KVST", &BEFORE[5..]),
        record(b"SIZE", &(bytes.len() as u64).to_le_bytes()),
    ]
    .concat();
    assert_eq!(bytes[..8], le32(&[0x4953_564b, 1]));
    assert_eq!(bytes[8..bytes.len() - 4], blob(&payload));
}

#[test]
fn integrity_is_found_from_the_end_and_gives_back_what_was_written() {
    assert_eq!(read(&file()).unwrap(), integrity());
}

#[test]
fn every_flipped_bit_of_integrity_is_noticed() {
    let good = file();
    for at in BEFORE.len()..good.len() {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            let found = Integrity::find(bytes.len() as u64, bytes.last_chunk().unwrap());
            // Either it is not found where it is, or it is found and refused.
            if found == Some(BEFORE.len() as u64) {
                assert!(read(&bytes).is_err(), "bit {bit} of byte {at}");
            }
        }
    }
}

#[test]
fn every_truncation_of_integrity_is_an_error() {
    let good = file();
    for len in BEFORE.len()..good.len() {
        let mut input = Cursor::new(&good[..len]);
        BoundedRead::skip(&mut input, "before", BEFORE.len() as u64).unwrap();
        assert_eq!(Integrity::read(&mut input).unwrap_err().status(), Status::Truncated, "{len}");
    }
}

#[test]
fn integrity_of_another_file_is_refused() {
    let bytes = [b"one more".as_slice(), &file()].concat();
    let error = read(&bytes).unwrap_err();
    assert_eq!(error.to_string(), "bytes of the parts: 12 (expected 20)");
}

#[test]
fn parts_that_do_not_begin_with_header_and_state_are_refused() {
    let mut other = integrity();
    other.parts.swap(0, 1);
    let error = read(&[BEFORE, &other.to_bytes().unwrap()].concat()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "first parts: [memory state, header and tokens] (expected header and tokens, memory state)"
    );
}

#[test]
fn unknown_records_are_skipped() {
    // A record of four letters that nobody knows, before all others; lengths and checksum as they have to be.
    let known = integrity().to_bytes().unwrap();
    let extra = [b"WHAT".as_slice(), &3_u32.to_le_bytes(), b"???"].concat();
    let payload_len = known.len() as u64 - 20 + extra.len() as u64;
    let mut bytes = [&known[..8], &payload_len.to_le_bytes(), &extra, &known[16..known.len() - 12]].concat();
    bytes.extend((payload_len + 20).to_le_bytes());
    let mut file = [BEFORE, &bytes].concat();
    file.extend(crc32c::crc32c(&file).to_le_bytes());
    assert_eq!(read(&file).unwrap(), integrity());
}

#[test]
fn an_identity_that_is_no_fingerprint_is_refused() {
    let mut large = integrity();
    large.identity.metadata = vec![0; 16 << 20];
    let error = large.to_bytes().unwrap_err().to_string();
    assert!(
        error.starts_with("identity: 16777") && error.ends_with("at most 16777216 are possible"),
        "{error}"
    );
}

#[test]
fn a_payload_length_beyond_reason_is_refused_before_anything_is_allocated() {
    let bytes = [&le32(&[0x4953_564b, 1])[..], &u64::MAX.to_le_bytes()].concat();
    let error = Integrity::read(&mut Cursor::new(&bytes)).unwrap_err();
    assert_eq!(error.to_string(), "payload length: 18446744073709551615 (expected at most 16777216)");
}
