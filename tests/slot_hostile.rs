//! Slot files that are not what was saved: every byte of every part flipped, and every truncation.
#![allow(missing_docs, reason = "a test")]

mod slots;

use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use kvstate::format::{Cursor, Integrity, PartKind};
use kvstate::session::{DraftOutcome, LoadedSlot, Verify};
use kvstate::{Context, Error, Status};
use slots::support::{Image, image, is_intact, place};
use slots::{DRIVER, TOKENS, busy_draft, busy_target, load_slot, save_slot};
use tempfile::TempDir;

/// A slot file, the places of its parts, and contexts to load it into.
struct Hostile {
    _dir: TempDir,
    path: PathBuf,
    good: Vec<u8>,
    parts: Vec<(PartKind, Range<usize>)>,
    target: Context,
    draft: Context,
    before: (Image, Image),
}

impl Hostile {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slot.bin");
        save_slot(&path);
        let good = fs::read(&path).unwrap();
        let start = Integrity::find(good.len() as u64, good.last_chunk().unwrap()).unwrap();
        let mut input = Cursor::new(&good);
        input.bytes("before", start).unwrap();
        let mut parts = Vec::new();
        let mut end = 0;
        for part in Integrity::read(&mut input).unwrap().parts {
            let start = end;
            end += usize::try_from(part.len).unwrap();
            parts.push((part.kind, start..end));
        }
        parts.push((PartKind::INTEGRITY, end..good.len()));
        let (target, draft) = (busy_target(), busy_draft());
        let before = (image(&target), image(&draft));
        Self { _dir: dir, path, good, parts, target, draft, before }
    }

    fn part_of(&self, at: usize) -> PartKind {
        self.parts.iter().find(|(_, range)| range.contains(&at)).expect("a part").0
    }

    fn start_of(&self, kind: PartKind) -> usize {
        self.parts.iter().find(|(found, _)| *found == kind).expect("a part").1.start
    }

    /// Loads these bytes; what is refused has changed nothing, what is loaded is taken away again.
    fn load(&mut self, bytes: &[u8], verify: Verify) -> Result<LoadedSlot, Error> {
        fs::write(&self.path, bytes).unwrap();
        let loaded = load_slot(&self.path, &mut self.target, &mut self.draft, verify);
        match &loaded {
            Err(_) => assert!((image(&self.target), image(&self.draft)) == self.before),
            Ok(loaded) => {
                let draft_end = self.draft.seq_pos_max(0).unwrap();
                match loaded.draft {
                    // What was not verified may be anything.
                    DraftOutcome::Restored(_) => assert!(verify < Verify::Full || draft_end == 11),
                    _ => assert_eq!(draft_end, -1),
                }
                assert!(verify < Verify::Full || is_intact(&self.target, 1, 0));
                (self.target, self.draft) = (busy_target(), busy_draft());
                self.before = (image(&self.target), image(&self.draft));
            }
        }
        loaded
    }
}

fn has_checkpoints(loaded: &LoadedSlot) -> bool {
    loaded.checkpoints.len() == 3 && loaded.checkpoints.iter().all(|c| c.draft == b"draft")
}

fn has_draft(loaded: &LoadedSlot) -> bool {
    matches!(loaded.draft, DraftOutcome::Restored(_)) && loaded.driver.as_deref() == Some(DRIVER)
}

#[test]
fn a_verified_load_refuses_or_drops_exactly_the_part_with_a_flipped_byte() {
    let mut hostile = Hostile::new();
    for at in place::cases(0..hostile.good.len()) {
        let mut bytes = hostile.good.clone();
        bytes[at] ^= 1 << (at % 8);
        let part = hostile.part_of(at);
        let loaded = hostile.load(&bytes, Verify::Full);
        let loaded = match part {
            PartKind::HEAD | PartKind::STATE => {
                let error = loaded.expect_err("a damaged state");
                // A count or a version has a reason of its own.
                let is_version = part == PartKind::HEAD && at < 12;
                let text = format!(
                    "crc32c of {}",
                    if part == PartKind::HEAD { "header and tokens" } else { "the memory state" }
                );
                assert!(is_version || error.to_string().contains(&text), "byte {at}: {error}");
                continue;
            }
            _ => loaded.expect("a state"),
        };
        assert_eq!(loaded.tokens, TOKENS);
        let (checkpoints, draft) = (part != PartKind::CHECKPOINTS, part != PartKind::DRAFT);
        assert_eq!(
            (has_checkpoints(&loaded), has_draft(&loaded)),
            (checkpoints, draft),
            "byte {at}: {loaded:?}"
        );
        let verified = if part == PartKind::INTEGRITY { Verify::None } else { Verify::Full };
        assert_eq!(loaded.verified, verified, "byte {at}");
        assert!(!loaded.notes.is_empty(), "byte {at}");
    }
}

#[test]
fn an_unverified_load_of_a_flipped_byte_never_fails_badly() {
    let mut hostile = Hostile::new();
    for verify in [Verify::None, Verify::Headers] {
        for at in place::cases(0..hostile.good.len()) {
            let mut bytes = hostile.good.clone();
            bytes[at] = !bytes[at];
            let part = hostile.part_of(at);
            match (part, hostile.load(&bytes, verify)) {
                // Tensors and tokens carry no meaning that could be wrong.
                (PartKind::HEAD, result) => assert!(verify == Verify::None || result.is_err(), "byte {at}"),
                (PartKind::STATE, _) => {}
                (_, result) => assert_eq!(result.expect("a state").tokens, TOKENS, "byte {at}"),
            }
        }
    }
}

#[test]
fn a_truncated_file_gives_what_is_whole_in_it() {
    let mut hostile = Hostile::new();
    let [state, checkpoints, draft, integrity] =
        [PartKind::STATE, PartKind::CHECKPOINTS, PartKind::DRAFT, PartKind::INTEGRITY]
            .map(|kind| hostile.start_of(kind));
    assert!(state < checkpoints && checkpoints < draft && draft < integrity);
    for verify in [Verify::None, Verify::Full] {
        for len in place::cases(0..hostile.good.len()) {
            let bytes = hostile.good[..len].to_vec();
            let loaded = hostile.load(&bytes, verify);
            if len < checkpoints {
                let status = loaded.expect_err("a truncated state").status();
                assert_eq!(status, Status::Truncated, "{len}");
                continue;
            }
            let loaded = loaded.expect("a state");
            assert_eq!(
                (has_checkpoints(&loaded), has_draft(&loaded)),
                (len >= draft, len >= integrity),
                "{len}"
            );
            assert_eq!(loaded.verified, Verify::None);
            let cut = ![checkpoints, draft, integrity].contains(&len);
            assert_eq!(
                loaded.notes.iter().any(|note| note.contains("damaged appendix")),
                cut,
                "{len}: {loaded:?}"
            );
        }
    }
}

#[test]
fn random_bytes_behind_the_state_never_fail_a_load() {
    let mut hostile = Hostile::new();
    let start = hostile.start_of(PartKind::CHECKPOINTS);
    for round in 0..300_i64 {
        let mut bytes = hostile.good[..start].to_vec();
        // Under a magic that is known, in turn.
        let magic: &[u8] = [b"SCKP\x01\0\0\0", b"SDFT\x01\0\0\0", b"KVSI\x01\0\0\0", b"????????"]
            [usize::try_from(round % 4).unwrap()];
        bytes.extend(magic);
        bytes.extend(slots::support::noise(&[round], 64));
        let loaded = hostile.load(&bytes, Verify::Full).expect("a state");
        assert!(!loaded.notes.is_empty(), "{round}");
    }
}
