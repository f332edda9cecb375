//! Indexers, which take the cells of their attention cache, and drafts that read the target's.
#![allow(missing_docs, reason = "a test")]

mod recurrence;
mod support;

use kvstate::context::UbatchToken;
use kvstate::memory::{KvParams, SectionKind, SectionParams};
use kvstate::types::{CellExt, Pos, SeqId, Swa};
use kvstate::{Context, ContextParams, Status};
use support::{
    NONE, ON_DEVICE, PARTIAL, held_in_cell_order, image, kv, place, refused, restore, save, standard,
};

/// `source`, and an indexer of other tensors on its cells.
fn with_indexer(source: KvParams) -> [KvParams; 2] {
    let mut indexer = KvParams { mirrors: Some(0), ..source.clone() };
    indexer.layers.truncate(1);
    indexer.layers[0].v = None;
    [source, indexer]
}

/// The cells of a sequence in each section.
fn cells(ctx: &Context, seq: SeqId) -> Vec<Vec<u32>> {
    (0..ctx.n_section()).map(|section| cells_of(ctx, section, seq)).collect()
}

fn cells_of(ctx: &Context, section: usize, seq: SeqId) -> Vec<u32> {
    let is_held = |&cell: &u32| {
        let meta = ctx.cell(section, 0, cell).expect("a cell");
        meta.is_some_and(|(meta, _)| meta.seqs.iter().any(|s| s.id() == seq))
    };
    (0..support::kv_size(ctx, section)).filter(is_held).collect()
}

/// Full, but for cells between those of sequence 0: as many as `n_free`.
fn fragment(ctx: &mut Context, n_free: Pos) {
    let ids = [[0], [1]];
    let tokens: Vec<_> = (0..2 * n_free)
        .map(|i| UbatchToken { pos: i, ext: CellExt::default(), seq_ids: &ids[usize::from(i % 2 == 1)] })
        .collect();
    let slot = ctx.prepare(&tokens).expect("a slot");
    ctx.commit(&slot).expect("a slot");
    assert!(ctx.seq_rm(1, -1, -1).expect("a sequence"));
}

#[test]
fn an_indexer_takes_the_cells_of_its_attention_cache() {
    let mut ctx = support::context(3, &with_indexer(kv(24)));
    fragment(&mut ctx, 9);
    let cells = support::decode(&mut ctx, 1, 0..7);
    assert_eq!(cells[0], [1, 3, 5, 7, 9, 11, 13]);
    assert_eq!(cells[1], cells[0]);
}

#[test]
fn a_restored_indexer_sits_on_the_cells_of_its_attention_cache() {
    let mut source = support::context(1, &with_indexer(kv(24)));
    support::decode(&mut source, 0, 0..7);
    let blob = save(&mut source, 0, NONE);
    let mut ctx = support::context(3, &with_indexer(kv(24)));
    fragment(&mut ctx, 9);
    restore(&mut ctx, &blob, 2, NONE);
    let odd: Vec<u32> = (0..7).map(|i| 2 * i + 1).collect();
    assert_eq!(cells(&ctx, 2), [odd.clone(), odd]);
    assert!(support::is_intact(&ctx, 2, 0));
    assert_eq!(save(&mut ctx, 2, NONE)[8..].len(), blob[8..].len());
}

#[test]
fn a_restored_indexer_drops_the_masked_cells_that_its_attention_cache_drops() {
    let mut source = support::context(1, &with_indexer(standard(24, 4)));
    support::decode(&mut source, 0, 0..12);
    let blob = save(&mut source, 0, NONE);
    let mut ctx = support::context(2, &with_indexer(standard(24, 4)));
    support::decode(&mut ctx, 1, 0..16);
    restore(&mut ctx, &blob, 0, NONE);
    let positions: Vec<Vec<Pos>> = (0..2).map(|section| support::positions(&ctx, section, 0)).collect();
    assert_eq!(positions, [(4..12).collect::<Vec<_>>(), (4..12).collect()]);
    assert_eq!(cells(&ctx, 0)[0], cells(&ctx, 0)[1]);
    assert!(support::is_intact(&ctx, 0, 0));
}

#[test]
fn a_partial_state_has_of_an_indexer_what_it_has_of_its_attention_cache() {
    let mut ctx = support::context(1, &with_indexer(kv(24)));
    support::decode(&mut ctx, 0, 0..7);
    let partial = save(&mut ctx, 0, PARTIAL);
    assert_eq!(partial.len(), 8);
    restore(&mut ctx, &partial, 0, PARTIAL);
    assert!(support::is_intact(&ctx, 0, 0));

    let mut windowed = support::context(1, &with_indexer(standard(24, 4)));
    support::decode(&mut windowed, 0, 0..7);
    let partial = save(&mut windowed, 0, PARTIAL);
    assert_eq!(
        support::blob_positions(&partial, &with_indexer(standard(24, 4))),
        [[3, 4, 5, 6], [3, 4, 5, 6]]
    );
}

/// The state of an attention cache, and one of an indexer, put together.
fn composed(kv_positions: &[Pos], indexer_positions: &[Pos]) -> Vec<u8> {
    let [source, indexer] = with_indexer(kv(24));
    let alone = |params: KvParams, positions: &[Pos]| {
        let mut ctx = support::context(1, &[KvParams { mirrors: None, ..params }]);
        support::decode(&mut ctx, 0, positions.iter().copied());
        save(&mut ctx, 0, NONE)
    };
    [&alone(source, kv_positions)[..], &alone(indexer, indexer_positions)[8..]].concat()
}

#[test]
fn an_indexer_of_other_cells_than_its_attention_cache_is_refused() {
    let mut ctx = support::context(2, &with_indexer(kv(24)));
    support::decode(&mut ctx, 0, 0..3);
    restore(&mut ctx, &composed(&[0, 1, 2, 3], &[0, 1, 2, 3]), 1, NONE);
    for (kv_positions, indexer_positions, want) in [
        (&[0, 1, 2][..], &[0, 1][..], "mirrored slot layout: the state has 2, the cache 3 (section indexer)"),
        (&[0, 1], &[0, 1, 2], "mirrored slot layout: the state has 3, the cache 2 (section indexer)"),
        (&[0, 1], &[], "mirrored slot layout: the state has 0, the cache 1 (section indexer)"),
        (&[], &[0, 1], "mirrored slot layout: the state has 1, the cache 0 (section indexer)"),
        (&[0, 1, 5], &[0, 1, 4], "mirrored pos: the state has 4, the cache 5 (section indexer)"),
    ] {
        let blob = composed(kv_positions, indexer_positions);
        let error = refused(&mut ctx, &blob, 1, NONE);
        assert_eq!(error.to_string(), want);
    }
}

#[test]
fn a_whole_context_with_an_indexer_comes_back() {
    let mut ctx = support::context(3, &with_indexer(kv(24)));
    support::decode(&mut ctx, 0, 0..7);
    support::decode(&mut ctx, 2, 0..4);
    ctx.seq_cp(0, 1, 0, 5).expect("sequences");
    let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
    ctx.state_get_data(&mut state).expect("a state");
    let mut other = support::context(3, &with_indexer(kv(24)));
    assert_eq!(other.state_set_data(&state).expect("a state"), state.len());
    assert!(image(&other).cells == image(&ctx).cells);
}

#[test]
fn a_state_on_the_device_comes_back_with_its_indexer() {
    let mut ctx = support::streams(2, &with_indexer(kv(24)));
    support::decode(&mut ctx, 0, 0..7);
    let blob = save(&mut ctx, 0, ON_DEVICE);
    ctx.clear(true).expect("empty");
    restore(&mut ctx, &blob, 1, ON_DEVICE);
    assert_eq!(held_in_cell_order(&ctx, 1, 1).len(), 7);
    assert!(support::is_intact(&ctx, 1, 0));
}

#[test]
fn a_hybrid_with_an_indexer_saves_its_recurrent_state_between_the_two() {
    let [attention, indexer] = with_indexer(kv(24));
    let sections = || vec![attention.clone().into(), recurrence::params(0).into(), indexer.clone().into()];
    let context = || place::context(ContextParams::new(2, sections())).expect("a context");
    let mut ctx = context();
    let tokens: Vec<_> = (0..6).map(|pos| (&[0][..], pos)).collect();
    recurrence::decode(&mut ctx, &[(1, 0)], &tokens).expect("a slot");
    let (blob, partial) = (save(&mut ctx, 0, NONE), save(&mut ctx, 0, PARTIAL));
    let recurrent = partial.len() - 8;
    assert_eq!(&blob[blob.len() - recurrent - indexer_bytes(6)..][..recurrent], &partial[8..]);
    let mut other = context();
    restore(&mut other, &blob, 1, NONE);
    assert_eq!((other.seq_pos_min(1).unwrap(), other.seq_pos_max(1).unwrap()), (5, 5));
    assert_eq!(recurrence::state_of(&other, 1, 1), Some(recurrence::after(0..6)));
    assert_eq!(cells_of(&other, 0, 1), cells_of(&other, 2, 1));
}

/// `n_stream`, `cell_count`, cells, four words, and one tensor of f16 rows of 4.
fn indexer_bytes(n_cells: usize) -> usize {
    4 + 4 + 12 * n_cells + 16 + 12 + 8 * n_cells
}

#[test]
fn an_indexer_that_does_not_fit_its_attention_cache_is_refused_by_name() {
    let refused = |change: &dyn Fn(&mut [KvParams; 2]), want: &str| {
        let mut sections = with_indexer(standard(24, 4));
        change(&mut sections);
        let error = Context::new(support::params(2, &sections)).unwrap_err();
        assert_eq!(error.to_string(), want);
    };
    refused(
        &|[_, indexer]| indexer.kv_size = 23,
        "indexer.kv_size: 23, and section kv, which it mirrors, has 24",
    );
    refused(
        &|[_, indexer]| indexer.swa = Swa::NONE,
        "indexer.swa_type: None, and section kv, which it mirrors, has Standard",
    );
    refused(
        &|[_, indexer]| indexer.swa = standard(24, 5).swa,
        "indexer.n_swa: 5, and section kv, which it mirrors, has 4",
    );
    refused(
        &|[_, indexer]| indexer.cell_ext = true,
        "indexer.cell_ext: true, and section kv, which it mirrors, has false",
    );
    refused(
        &|[_, indexer]| indexer.mirrors = Some(1),
        "indexer.mirrors: 1 is no attention cache before section 1",
    );
    let [source, indexer] = with_indexer(kv(24));
    let twice = KvParams { mirrors: Some(1), ..indexer.clone() };
    let error = Context::new(support::params(2, &[source, indexer, twice])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "indexer.mirrors: an indexer, and section indexer, which it mirrors, has cells of another section"
    );
    let after_recurrent = vec![recurrence::params(0).into(), KvParams { mirrors: Some(0), ..kv(24) }.into()];
    let error = Context::new(ContextParams::new(2, after_recurrent)).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
}

#[test]
fn a_shared_section_writes_nothing_and_says_what_it_is() {
    let mut ctx = place::context(ContextParams::new(2, vec![SectionParams::Shared])).expect("a context");
    assert_eq!(ctx.section_kind(0).expect("a section"), SectionKind::Shared);
    let slot =
        ctx.prepare(&[UbatchToken { pos: 0, ext: CellExt::default(), seq_ids: &[0] }]).expect("a slot");
    assert_eq!(slot.cells(0), Some(&[][..]), "the target has the cells");
    ctx.commit(&slot).expect("a slot");
    let blob = save(&mut ctx, 0, NONE);
    assert_eq!(blob.len(), 8);
    restore(&mut ctx, &blob, 1, NONE);
    assert_eq!(ctx.seq_pos_max(0).expect("a sequence"), -1);
    assert!(ctx.seq_rm(0, 3, 5).expect("a sequence"));
    let error = ctx.cell(0, 0, 0).unwrap_err();
    assert_eq!(error.to_string(), "section: 0 is shared, no attention cache");
}

#[test]
fn a_draft_with_cells_of_its_own_beside_the_targets_writes_its_own() {
    let sections = || vec![SectionParams::Shared, kv(24).into()];
    let context = || place::context(ContextParams::new(2, sections())).expect("a context");
    let mut ctx = context();
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
    let slot = ctx.prepare(&[token(0), token(1)]).expect("a slot");
    ctx.commit(&slot).expect("a slot");
    let blob = save(&mut ctx, 0, NONE);
    let mut alone = support::context(2, &[kv(24)]);
    restore(&mut alone, &blob, 0, NONE);
    assert_eq!(alone.seq_pos_max(0).expect("a sequence"), 1);
    let mut other = context();
    restore(&mut other, &blob, 1, NONE);
    assert_eq!(other.seq_pos_max(1).expect("a sequence"), 1);
}
