//! Slot files of every kind of memory beside plain attention.
#![allow(missing_docs, reason = "a test")]

mod memories;
mod recurrence;
mod support;

use std::path::Path;

use kvstate::memory::{RecurrentLayerParams, RecurrentParams, SectionKind, SectionParams};
use kvstate::session::{LoadedSlot, SlotContents, SlotLoadParams, Verify};
use kvstate::{Context, ContextParams, Error, Status};
use memories::{DEST, KINDS, OTHER, context, image, params};
use support::{NONE, place, save};

fn load(path: &Path, into: &mut Context) -> Result<LoadedSlot, Error> {
    into.slot_load(path, DEST, SlotLoadParams { verify: Verify::Full, ..SlotLoadParams::default() })
}

#[test]
fn a_slot_file_gives_back_every_section() {
    for kind in &KINDS {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slot.bin");
        let mut from = context(kind, 1);
        from.slot_save(&path, DEST, SlotContents::default()).unwrap();

        let mut into = context(kind, 2);
        let other = save(&mut into, OTHER, NONE);
        let loaded = load(&path, &mut into).expect(kind.name);
        assert_eq!((loaded.verified, loaded.notes), (Verify::Full, Vec::new()), "{}", kind.name);
        assert_eq!(save(&mut into, DEST, NONE), save(&mut from, DEST, NONE), "{}", kind.name);
        assert_eq!(save(&mut into, OTHER, NONE), other, "{}", kind.name);
    }
}

/// What the slot file of a kind is refused with by a memory that differs in one thing.
fn reason(name: &str, change: fn(&mut Vec<SectionParams>)) -> String {
    let kind = KINDS.iter().find(|kind| kind.name == name).expect("a kind");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    context(kind, 1).slot_save(&path, DEST, SlotContents::default()).unwrap();

    let mut params = params(kind);
    change(&mut params.sections);
    let mut into = memories::filled(place::context(params).unwrap(), 2);
    let before = image(&mut into);
    let error = load(&path, &mut into).unwrap_err();
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    assert!(image(&mut into) == before, "{error}");
    error
        .to_string()
        .replace("failed to restore sequence state: ", "")
        .replace(&format!(" ({})", path.display()), "")
}

fn recurrent(sections: &mut [SectionParams]) -> &mut RecurrentParams {
    sections
        .iter_mut()
        .find_map(|section| match section {
            SectionParams::Recurrent { recurrent, .. } => Some(recurrent),
            _ => None,
        })
        .expect("a recurrent section")
}

#[test]
fn a_file_of_other_recurrent_states_is_refused_by_tensor() {
    let text = reason("hybrid", |sections| {
        recurrent(sections).layers[0].r.as_mut().unwrap().n_embd += 1;
    });
    assert_eq!(text, "shape: the state has f32 x 3, the cache f32 x 4 (section recurrent, R of layer 0)");
    let text = reason("hybrid", |sections| recurrent(sections).layers[0].s = None);
    assert_eq!(text, "tensor: the state has S of layer 0, the cache S of layer 2 (section recurrent)");
    let text = reason("hybrid", |sections| recurrent(sections).layers.push(RecurrentLayerParams::default()));
    assert_eq!(text, "setting: the state has 4, the cache 5 (section recurrent, NLAY)");
}

#[test]
fn a_file_of_another_dsv4_memory_is_refused_by_compressor() {
    let change = |sections: &mut Vec<SectionParams>| {
        let Some(SectionParams::Dsv4 { dsv4, .. }) = sections.last_mut() else { panic!("DSV4") };
        dsv4.hca.state_size += 1;
    };
    assert_eq!(reason("DSV4", change), "setting: the state has 8, the cache 9 (section dsv4, HCAN)");
}

#[test]
fn a_file_of_another_kind_of_memory_is_refused_by_section() {
    let change = |sections: &mut Vec<SectionParams>| sections.truncate(1);
    assert_eq!(
        reason("hybrid", change),
        "sections: the state has 2, the cache 1 (identity of the slot file)"
    );
    let change = |sections: &mut Vec<SectionParams>| sections.swap(0, 1);
    assert_eq!(
        reason("hybrid", change),
        "kind of section: the state has attention, the cache recurrent (section recurrent)"
    );
}

#[test]
fn a_rollback_plane_more_or_fewer_is_no_other_memory() {
    let kind = &KINDS[1];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let mut from = context(kind, 1);
    from.slot_save(&path, DEST, SlotContents::default()).unwrap();
    let mut sections = (kind.sections)();
    recurrent(&mut sections).n_rs_seq = 0;
    let mut into = place::context(ContextParams::new(2, sections)).unwrap();
    assert_eq!(into.section_kind(1).unwrap(), SectionKind::Recurrent);
    load(&path, &mut into).unwrap();
    assert_eq!(save(&mut into, DEST, NONE), save(&mut from, DEST, NONE));
}
