//! Bytes that llama.cpp wrote: each state loads, and is written again byte for byte.
//!
//! Every test runs over all fixtures of its kind and names the file that fails.

mod common;
mod place;

use std::fs;
use std::path::Path;

use common::{
    Fixture, SEQUENCE, SESSION, Section, assert_same_bytes, file_bytes, file_of, fixtures, positions,
    saved_session, saved_slot, seq_state, whole_contexts, whole_state,
};
use kvstate::cells::{CellMeta, SeqSet};
use kvstate::context::UbatchToken;
use kvstate::memory::LegacyRotation;
use kvstate::types::{CellExt, Pos, SeqId, StateFlags, TOKEN_NULL, Token};
use kvstate::{Context, ContextParams, Status};

const NONE: StateFlags = StateFlags::empty();
const PARTIAL: StateFlags = StateFlags::PARTIAL_ONLY;

/// Runs `check` over the fixtures that `filter` lets through, and says how many they were.
fn for_each(what: &str, filter: impl Fn(&Fixture) -> bool, mut check: impl FnMut(&Fixture)) {
    let chosen: Vec<_> = fixtures().into_iter().filter(filter).collect();
    assert!(!chosen.is_empty(), "no fixture: {what}");
    chosen.iter().for_each(&mut check);
    println!("{} fixtures: {what}", chosen.len());
}

/// A state of the current layout with its blob.
fn is_current(fixture: &Fixture) -> bool {
    fixture.version() == 4 && fixture.path("bin").is_some()
}

fn is_whole(fixture: &Fixture) -> bool {
    is_current(fixture) && !fixture.is_partial()
}

fn new(params: ContextParams, fixture: &Fixture) -> Context {
    place::context(params).unwrap_or_else(|e| panic!("{}: {e}", fixture.name))
}

fn load(ctx: &mut Context, blob: &[u8], dest: SeqId, flags: StateFlags, fixture: &Fixture) {
    match ctx.state_seq_set_data(blob, dest, flags) {
        Ok(n) => assert_eq!(n, blob.len(), "{}: bytes consumed", fixture.name),
        Err(e) => panic!("{}: {e}", fixture.name),
    }
}

fn without(fixture: &Fixture, change: impl FnOnce(&mut ContextParams)) -> Context {
    let mut params = fixture.params();
    change(&mut params);
    new(params, fixture)
}

// States of the current layout

#[test]
fn a_blob_is_consumed_whole_and_written_again_byte_for_byte() {
    let filter = |f: &Fixture| is_current(f) && !f.is_legacy_partial();
    for_each("blobs written again", filter, |f| {
        let (mut ctx, blob, seq) = (f.context(), f.blob().unwrap(), f.sidecar.seq_id);
        load(&mut ctx, &blob, seq, f.flags(), f);
        assert_eq!(blob.len(), f.set_data_return(), "{}", f.name);
        assert_eq!(positions(&ctx, seq), f.restored_positions(), "{}: positions", f.name);
        assert_same_bytes(&seq_state(&mut ctx, seq, f.flags()), &blob, &f.name);
    });
}

#[test]
fn bytes_behind_a_blob_are_ignored() {
    for_each("blobs with bytes behind", is_whole, |f| {
        let (mut ctx, blob, seq) = (f.context(), f.blob().unwrap(), f.sidecar.seq_id);
        let longer = [&blob[..], b"appendix"].concat();
        assert_eq!(ctx.state_seq_set_data(&longer, seq, NONE).unwrap(), blob.len(), "{}", f.name);
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &blob, &f.name);
    });
}

#[test]
fn a_legacy_partial_blob_is_consumed_changes_nothing_and_is_written_again_as_8_bytes() {
    let filter = |f: &Fixture| is_current(f) && f.is_legacy_partial();
    for_each("legacy partial blobs", filter, |f| {
        let (mut ctx, blob, seq) = (f.context(), f.blob().unwrap(), f.sidecar.seq_id);
        load(&mut ctx, &blob, seq, NONE, f); // its bytes are those of the whole state
        load(&mut ctx, &blob, seq, PARTIAL, f);
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &blob, &f.name);
        assert_same_bytes(&seq_state(&mut ctx, seq, PARTIAL), &blob[..8], &f.name);

        let mut empty = f.context();
        load(&mut empty, &blob, seq, PARTIAL, f);
        assert_eq!(positions(&empty, seq), (-1, -1), "{}", f.name);
    });
}

#[test]
fn a_slot_file_gives_its_tokens_and_is_written_again_byte_for_byte() {
    let filter = |f: &Fixture| f.version() == 4 && f.path("slot").is_some();
    for_each("slot files written again", filter, |f| {
        let (mut ctx, seq, path) = (f.context(), f.sidecar.seq_id, f.path("slot").unwrap());
        let bytes = fs::read(&path).unwrap();
        let n_tokens = f.sidecar.tokens.len();
        let loaded =
            ctx.state_seq_load_file(&path, seq, n_tokens).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        assert_eq!(loaded.tokens, f.sidecar.tokens, "{}: tokens", f.name);
        assert_eq!(loaded.state_end, bytes.len() as u64, "{}: end of the state", f.name);
        assert_eq!(positions(&ctx, seq), f.restored_positions(), "{}: positions", f.name);
        assert_same_bytes(&saved_slot(&mut ctx, seq, &loaded.tokens), &bytes, &f.name);
    });
}

#[test]
fn the_state_of_a_whole_context_is_written_again_byte_for_byte() {
    let mut n = 0;
    for (path, f) in whole_contexts("_whole.ctx").into_iter().filter(|(_, f)| f.version() == 4) {
        let (mut ctx, state) = (f.context(), fs::read(&path).unwrap());
        let name = path.display().to_string();
        assert_eq!(
            ctx.state_set_data(&state).unwrap_or_else(|e| panic!("{name}: {e}")),
            state.len(),
            "{name}"
        );
        assert_same_bytes(&whole_state(&mut ctx), &state, &name);
        let session = saved_session(&mut ctx, &f.sidecar.tokens);
        assert_same_bytes(&session, &file_bytes(SESSION, 11, &f.sidecar.tokens, &state), &name);
        n += 1;
    }
    assert!(n > 0, "no fixture");
    println!("{n} fixtures: whole contexts");
}

#[test]
fn a_sequence_of_a_whole_context_is_written_as_its_own_blob() {
    let mut n = 0;
    for (path, sibling) in whole_contexts("_whole.ctx").into_iter().filter(|(_, f)| f.version() == 4) {
        let prefix = path.file_name().unwrap().to_str().unwrap().trim_end_matches("whole.ctx").to_owned();
        let mut ctx = sibling.context();
        ctx.state_set_data(&fs::read(&path).unwrap()).unwrap();
        let of_this_context =
            |f: &Fixture| is_whole(f) && f.name.trim_start_matches("v4_twins/").starts_with(&prefix);
        for f in fixtures().into_iter().filter(of_this_context) {
            assert_same_bytes(&seq_state(&mut ctx, f.sidecar.seq_id, NONE), &f.blob().unwrap(), &f.name);
            n += 1;
        }
    }
    assert!(n > 0, "no fixture");
    println!("{n} fixtures: sequences of whole contexts");
}

// The sliding window

#[test]
fn a_state_keeps_the_cells_that_the_window_masks_and_a_partial_state_only_the_others() {
    let filter = |f: &Fixture| is_whole(f) && f.name.starts_with("unfiltered-");
    for_each("unfiltered pairs", filter, |f| {
        let (mut ctx, blob, seq) = (f.context(), f.blob().unwrap(), f.sidecar.seq_id);
        let partial =
            fs::read(f.path("bin").unwrap().to_str().unwrap().replace("_none", "_partial")).unwrap();
        load(&mut ctx, &blob, seq, NONE, f);
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &blob, &f.name);
        assert_same_bytes(&seq_state(&mut ctx, seq, PARTIAL), &partial, &f.name);
    });
}

#[test]
fn a_save_that_keeps_no_masked_cell_is_not_whole() {
    let filter = |f: &Fixture| is_whole(f) && f.name.starts_with("unfiltered-");
    for_each("unfiltered pairs, filtered", filter, |f| {
        let (blob, seq) = (f.blob().unwrap(), f.sidecar.seq_id);
        let partial =
            fs::read(f.path("bin").unwrap().to_str().unwrap().replace("_none", "_partial")).unwrap();
        let mut ctx = without(f, |params| params.max_masked_cells = Some(0));
        load(&mut ctx, &blob, seq, NONE, f);
        let filtered = seq_state(&mut ctx, seq, NONE);
        let swa = &f.sidecar.sections[1];
        let lost = u64::from(swa.cells[0] - 32) * (12 + swa.cell_bytes());
        assert_eq!((blob.len() - filtered.len()) as u64, lost, "{}: bytes lost to the filter", f.name);
        assert!(filtered.ends_with(&partial[8..]), "{}: the window is what is left", f.name);
        assert_same_bytes(&seq_state(&mut ctx, seq, PARTIAL), &partial, &f.name);
    });
}

#[test]
fn a_bound_on_masked_cells_keeps_the_latest_of_them() {
    // With a recurrent section, no other position than its own is usable.
    let filter = |f: &Fixture| is_whole(f) && f.name.starts_with("unfiltered-") && f.is_attention();
    for_each("unfiltered pairs, bounded", filter, |f| {
        let (blob, seq) = (f.blob().unwrap(), f.sidecar.seq_id);
        let mut bounded = without(f, |params| params.max_masked_cells = Some(10));
        load(&mut bounded, &blob, seq, NONE, f);
        let state = seq_state(&mut bounded, seq, NONE);
        let mut ctx = f.context();
        load(&mut ctx, &state, seq, NONE, f);
        let (_, pos_max) = f.restored_positions();
        assert_eq!(positions(&ctx, seq), (pos_max - 32 - 10 + 1, pos_max), "{}", f.name);
    });
}

// Other contexts than the one that wrote the state

/// Restores the blob as sequence `dest` of `params`, and what that context writes as the blob's own sequence:
/// the bytes must be those that llama.cpp wrote.
fn there_and_back(f: &Fixture, params: ContextParams, dest: SeqId) {
    let (mut there, mut back) = (new(params, f), f.context());
    let (blob, seq) = (f.blob().unwrap(), f.sidecar.seq_id);
    load(&mut there, &blob, dest, f.flags(), f);
    assert_eq!(positions(&there, dest), f.restored_positions(), "{}: positions", f.name);
    let state = seq_state(&mut there, dest, f.flags());
    load(&mut back, &state, seq, f.flags(), f);
    assert_same_bytes(&seq_state(&mut back, seq, f.flags()), &blob, &f.name);
}

#[test]
fn a_blob_of_streams_restores_into_a_unified_context_and_back() {
    let filter = |f: &Fixture| is_current(f) && !f.is_legacy_partial() && !f.sidecar.kv_unified;
    for_each("stream blobs in a unified context", filter, |f| {
        there_and_back(f, f.params_with(f.sidecar.n_seq_max, true, f.kv_size()), f.sidecar.seq_id);
    });
}

#[test]
fn a_blob_of_a_unified_context_restores_into_a_stream_and_back() {
    let filter = |f: &Fixture| is_current(f) && !f.is_legacy_partial() && f.sidecar.kv_unified;
    for_each("unified blobs in a stream", filter, |f| {
        there_and_back(f, f.params_with(5, false, f.n_cells().max(1)), f.sidecar.seq_id);
    });
}

#[test]
fn a_blob_restores_into_another_sequence_and_back() {
    let filter = |f: &Fixture| is_current(f) && !f.is_legacy_partial();
    for_each("blobs as another sequence", filter, |f| {
        let n_seq_max = f.sidecar.n_seq_max + 2;
        let params = f.params_with(n_seq_max, f.sidecar.kv_unified, f.kv_size());
        there_and_back(f, params, f.sidecar.n_seq_max.cast_signed() + 1);
    });
}

#[test]
fn a_blob_restores_into_exactly_as_many_cells_as_it_has() {
    let filter = |f: &Fixture| is_whole(f) && f.n_cells() > 0;
    for_each("blobs in tight caches", filter, |f| {
        there_and_back(
            f,
            f.params_with(f.sidecar.n_seq_max, f.sidecar.kv_unified, f.n_cells()),
            f.sidecar.seq_id,
        );
    });
}

#[test]
fn a_state_changes_its_stream_counts_and_nothing_else_in_a_unified_context() {
    let filter =
        |f: &Fixture| is_whole(f) && !f.sidecar.kv_unified && f.is_attention() && f.sections(1).len() == 1;
    for_each("stream blobs rewritten unified", filter, |f| {
        let (blob, seq) = (f.blob().unwrap(), f.sidecar.seq_id);
        let mut ctx = new(f.params_with(f.sidecar.n_seq_max, true, f.kv_size()), f);
        load(&mut ctx, &blob, seq, NONE, f);
        // n_stream, then a count of 0 for every stream but the sequence's own.
        let (n_stream, own) = (f.sidecar.n_seq_max as usize, usize::try_from(seq).unwrap());
        let body = &blob[12 + 4 * own..blob.len() - 4 * (n_stream - 1 - own)];
        let want = [&blob[..8], &1_u32.to_le_bytes(), body].concat();
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &want, &f.name);
    });
}

#[test]
fn a_state_takes_cells_between_those_of_another_sequence() {
    let filter = |f: &Fixture| is_whole(f) && f.n_cells() > 0 && f.sidecar.kv_unified && !f.is_dsv4();
    for_each("blobs in scattered cells", filter, |f| {
        let n = f.n_cells();
        let (seq, other) = (f.sidecar.seq_id, f.sidecar.seq_id + 1);
        let mut ctx = new(f.params_with(f.sidecar.n_seq_max + 2, true, 2 * n), f);
        // The two sequences in turn; then the odd cells are left.
        let ids = [[seq], [other]];
        let ubatch: Vec<UbatchToken<'_>> = (0..2 * n)
            .map(|cell| UbatchToken {
                pos: (cell / 2).cast_signed(),
                ext: CellExt::default(),
                seq_ids: &ids[cell as usize % 2],
            })
            .collect();
        let slot = ctx.prepare(&ubatch).unwrap();
        ctx.commit(&slot).unwrap();
        let before = seq_state(&mut ctx, other, NONE);

        let blob = f.blob().unwrap();
        load(&mut ctx, &blob, seq, NONE, f);
        let sections = f.sidecar.sections.iter().enumerate().filter(|(_, section)| section.is_attention());
        for (section, cells) in sections.map(|(i, section)| (i, section.cells[0])) {
            let seqs: Vec<_> = (0..2 * n)
                .filter_map(|cell| ctx.cell(section, 0, cell).unwrap().map(|(meta, _)| (cell, meta.seqs)))
                .filter(|(_, seqs)| *seqs == seq_set(&ctx, seq))
                .map(|(cell, _)| cell)
                .collect();
            let even: Vec<_> = (0..cells).map(|i| 2 * i).collect();
            assert_eq!(seqs, even, "{}: cells of section {section}", f.name);
        }
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &blob, &f.name);
        assert_same_bytes(&seq_state(&mut ctx, other, NONE), &before, &f.name);
    });
}

fn seq_set(ctx: &Context, seq_id: SeqId) -> SeqSet {
    SeqSet::of(kvstate::types::Seq::new(seq_id, ctx.n_seq_max()).unwrap())
}

#[test]
fn an_empty_state_empties_the_destination() {
    let filter = |f: &Fixture| is_whole(f) && f.n_cells() == 0;
    for_each("empty states", filter, |f| {
        let (mut ctx, blob, seq) = (f.context(), f.blob().unwrap(), f.sidecar.seq_id);
        let ids = [seq];
        let token = UbatchToken { pos: 3, ext: CellExt::default(), seq_ids: &ids };
        let slot = ctx.prepare(&[token]).unwrap();
        ctx.commit(&slot).unwrap();
        assert_eq!(positions(&ctx, seq), (3, 3));
        load(&mut ctx, &blob, seq, NONE, f);
        assert_eq!(positions(&ctx, seq), (-1, -1), "{}", f.name);
    });
}

// Files of older builds

#[test]
fn a_slot_file_of_an_older_build_is_written_as_its_version_4_twin() {
    let filter = |f: &Fixture| f.is_old() && f.path("slot").is_some();
    for_each("old slot files", filter, |f| {
        let (mut ctx, seq, path) = (f.context(), f.sidecar.seq_id, f.path("slot").unwrap());
        let loaded = ctx.state_seq_load_file(&path, seq, 4096).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        assert_eq!(loaded.tokens, f.sidecar.tokens, "{}: tokens", f.name);
        assert_eq!(loaded.state_end, fs::metadata(&path).unwrap().len(), "{}: end of the state", f.name);
        assert_eq!(positions(&ctx, seq), f.restored_positions(), "{}: positions", f.name);
        let twin = f.as_version_4();
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &twin, &f.name);
        let saved = saved_slot(&mut ctx, seq, &loaded.tokens);
        assert_same_bytes(&saved, &file_bytes(SEQUENCE, 4, &loaded.tokens, &twin[8..]), &f.name);
        if let Some(slot) = f.twin_of(&path).filter(|_| !f.was_computed_otherwise()) {
            assert_same_bytes(&saved, &fs::read(slot).unwrap(), &f.name);
        }
    });
}

#[test]
fn a_blob_of_an_older_build_in_a_file_of_its_version_is_written_as_its_version_4_twin() {
    let filter = |f: &Fixture| f.is_old() && f.path("bin").is_some();
    for_each("old blobs", filter, |f| {
        let (blob, seq) = (f.blob().unwrap(), f.sidecar.seq_id);
        // A partial state of an iSWA cache is the state of its window half alone.
        let mut params = f.params();
        if f.is_partial() {
            params.sections = f.sections_of_state();
        }
        let mut ctx = new(params, f);
        let file = file_of(&file_bytes(SEQUENCE, f.version(), &f.sidecar.tokens, &blob[8..]));
        let loaded =
            ctx.state_seq_load_file(file.path(), seq, 4096).unwrap_or_else(|e| panic!("{}: {e}", f.name));
        assert_eq!(loaded.state_end, fs::metadata(file.path()).unwrap().len(), "{}", f.name);
        // llama.cpp had the empty half beside it.
        let is_alone = f.is_partial() && f.sidecar.memory == "llama_memory_hybrid";
        let want = if is_alone { (63, 63) } else { f.restored_positions() };
        assert_eq!(positions(&ctx, seq), want, "{}: positions", f.name);
        assert_same_bytes(&seq_state(&mut ctx, seq, NONE), &f.as_version_4(), &f.name);
    });
}

#[test]
fn an_old_blob_in_memory_is_refused_as_of_an_older_layout() {
    // It has no version field; an empty one or a partial one of full attention is the same in all versions.
    // So is a recurrent state alone.
    let filter = |f: &Fixture| {
        let has_attention = f.sidecar.sections.iter().any(Section::is_attention);
        f.is_old() && f.n_cells() > 0 && !f.is_legacy_partial() && f.blob().is_some() && has_attention
    };
    for_each("old blobs in memory", filter, |f| {
        let mut ctx = f.context();
        let error = ctx.state_seq_set_data(&f.blob().unwrap(), f.sidecar.seq_id, f.flags()).unwrap_err();
        assert!(error.to_string().starts_with("older layout: the state has version "), "{}: {error}", f.name);
    });
}

/// Loads a session file and compares what is written with the version-4 state of the same context.
fn check_old_session(f: &Fixture, session: &Path, tokens: &[Token], twin: &[u8], name: &str) {
    let mut ctx = f.context();
    let loaded = ctx.state_load_file(session, tokens.len()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(loaded.tokens, tokens, "{name}: tokens");
    assert_eq!(loaded.state_end, fs::metadata(session).unwrap().len(), "{name}: end of the state");
    assert_same_bytes(&whole_state(&mut ctx), twin, name);
    assert_same_bytes(&saved_session(&mut ctx, tokens), &file_bytes(SESSION, 11, tokens, twin), name);
}

#[test]
fn a_whole_context_of_an_older_build_in_a_session_file_is_written_as_its_version_4_twin() {
    let mut n = 0;
    for (path, f) in whole_contexts("_whole.ctx").into_iter().filter(|(_, f)| f.is_old()) {
        let name = path.display().to_string();
        let twin = f.twin_of(&path).unwrap_or_else(|| panic!("{name} has no twin"));
        let tokens = &f.sidecar.tokens;
        let session = file_of(&file_bytes(SESSION, f.version() + 7, tokens, &fs::read(&path).unwrap()));
        check_old_session(&f, session.path(), tokens, &fs::read(twin).unwrap(), &name);
        n += 1;
    }
    assert!(n > 0, "no fixture");
    println!("{n} fixtures: old whole contexts");
}

#[test]
fn a_session_file_of_an_older_build_is_written_as_its_version_4_twin() {
    let mut n = 0;
    for (path, f) in whole_contexts("_session.bin") {
        let name = path.display().to_string();
        let whole = path.to_str().unwrap().replace("_session.bin", "_whole.ctx");
        let twin = f.twin_of(Path::new(&whole)).unwrap_or_else(|| panic!("{name} has no twin"));
        check_old_session(&f, &path, &f.sidecar.tokens, &fs::read(twin).unwrap(), &name);
        n += 1;
    }
    assert!(n > 0, "no fixture");
    println!("{n} fixtures: old session files");
}

#[test]
fn cells_of_a_version_2_image_get_the_tokens_of_the_file() {
    let filter = |f: &Fixture| f.name == "v2/qwen2vl_mrope2d_none";
    for_each("version-2 image", filter, |f| {
        let mut ctx = f.context();
        ctx.state_seq_load_file(f.path("slot").unwrap(), 0, 40).unwrap();
        let cell = |i| ctx.cell(0, 0, i).unwrap().unwrap().0;
        let meta = |pos: Pos, x: Pos, y: Pos, tok: Token| CellMeta {
            pos,
            ext: CellExt { x, y, tok },
            seqs: seq_set(&ctx, 0),
        };
        assert_eq!(cell(0), meta(0, 0, 0, 20));
        assert_eq!(cell(7), meta(7, 7, 7, 27));
        assert_eq!(cell(8), meta(8, 8, 8, TOKEN_NULL));
        assert_eq!(cell(31), meta(8, 13, 11, TOKEN_NULL));
        assert_eq!(cell(39), meta(21, 21, 21, 27));
    });
}

// Refusals

/// The error of loading the fixture's slot file (or its blob in one) into a context that `change` has changed.
fn refusal(f: &Fixture, change: impl FnOnce(&mut ContextParams)) -> (Status, String) {
    let mut ctx = without(f, change);
    let file = match f.path("slot") {
        Some(path) => fs::read(path).unwrap(),
        None => file_bytes(SEQUENCE, f.version(), &f.sidecar.tokens, &f.blob().unwrap()[8..]),
    };
    let file = file_of(&file);
    let error = ctx.state_seq_load_file(file.path(), f.sidecar.seq_id, 4096).expect_err(&f.name);
    assert_eq!(positions(&ctx, f.sidecar.seq_id), (-1, -1), "{}: nothing was restored", f.name);
    (error.status(), error.to_string())
}

#[test]
fn an_old_quantised_file_is_refused_until_its_rotation_is_stated() {
    for_each("rotation unstated", Fixture::must_state_rotation, |f| {
        let (status, text) = refusal(f, |params| params.legacy_rotation = None);
        let n_rot = if f.name.contains("norot") { 0 } else { 64 };
        assert_eq!(status, Status::RotationUnstated, "{}", f.name);
        assert_eq!(
            text,
            format!(
                "failed to restore sequence state: the rotation of K and V is not recorded in a version-{} file \
                 and has to be stated: set legacy_rotation to rotated or plain \
                 (section kv: cache has n_rot_k {n_rot}, n_rot_v {n_rot})",
                f.version()
            ),
            "{}",
            f.name
        );
    });
}

#[test]
fn an_old_file_stated_plain_is_refused_by_a_rotated_cache() {
    let filter = |f: &Fixture| f.rotation() == Some(LegacyRotation::Rotated);
    for_each("rotated, stated plain", filter, |f| {
        let (status, text) = refusal(f, |params| params.legacy_rotation = Some(LegacyRotation::Plain));
        assert_eq!(status, Status::Mismatch, "{}", f.name);
        assert_eq!(
            text,
            "failed to restore sequence state: incompatible key rotation: \
             the state has no rotation (stated), the cache 64 (section kv; convert_types allows it)",
            "{}",
            f.name
        );
    });
}

#[test]
fn an_old_file_stated_rotated_is_refused_by_a_plain_cache() {
    let filter = |f: &Fixture| f.rotation() == Some(LegacyRotation::Plain);
    for_each("plain, stated rotated", filter, |f| {
        let (status, text) = refusal(f, |params| params.legacy_rotation = Some(LegacyRotation::Rotated));
        assert_eq!(status, Status::Mismatch, "{}", f.name);
        assert_eq!(
            text,
            "failed to restore sequence state: incompatible key rotation: \
             the state has a rotation (stated), the cache 0 (section kv; convert_types allows it)",
            "{}",
            f.name
        );
    });
}

#[test]
fn a_version_4_state_of_another_rotation_is_refused() {
    let filter = |f: &Fixture| is_whole(f) && f.sections(1).first().is_some_and(|kv| kv.n_rot_k != 0);
    for_each("rotated states in plain caches", filter, |f| {
        let mut params = f.params();
        params.sections = f.sections_with(f.kv_size(), |kv| (kv.n_rot_k, kv.n_rot_v) = (0, 0));
        let error =
            new(params, f).state_seq_set_data(&f.blob().unwrap(), f.sidecar.seq_id, NONE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "incompatible key rotation: the state has 64, the cache 0 (section kv; convert_types allows it)",
            "{}",
            f.name
        );
    });
}

#[test]
fn a_file_of_a_cache_with_the_other_cell_ext_is_refused_by_that_name() {
    let has_cells = |f: &Fixture| f.n_cells() > 0 && !f.is_partial() && !f.sections(1).is_empty();
    let has_file = |f: &Fixture| f.path("slot").is_some() || f.path("bin").is_some();
    for_each(
        "other cell ext",
        |f| has_cells(f) && has_file(f),
        |f| {
            let (status, text) = refusal(f, |params| {
                params.sections = f.sections_with(f.kv_size(), |kv| kv.cell_ext = !kv.cell_ext);
            });
            assert_eq!(status, Status::Mismatch, "{}", f.name);
            assert!(
                text.starts_with("failed to restore sequence state: mismatched cell ext: "),
                "{}: {text}",
                f.name
            );
        },
    );
}

#[test]
fn a_whole_context_of_other_streams_is_refused() {
    let mut n = 0;
    for (path, f) in whole_contexts("_whole.ctx").into_iter().filter(|(_, f)| f.version() == 4) {
        if f.sidecar.n_seq_max == 1 {
            continue;
        }
        let mut ctx = new(f.params_with(f.sidecar.n_seq_max, !f.sidecar.kv_unified, f.kv_size()), &f);
        let error = ctx.state_set_data(&fs::read(&path).unwrap()).unwrap_err().to_string();
        let (state, cache) = if f.sidecar.kv_unified { (1, 4) } else { (4, 1) };
        let want = format!("n_stream mismatch: the state has {state}, the cache {cache} (section kv)");
        assert_eq!(error, want, "{}", path.display());
        n += 1;
    }
    assert!(n > 0, "no fixture");
    println!("{n} fixtures: whole contexts with other streams");
}
