//! The examples of the README are programs: they compile without warnings and run.
#![allow(missing_docs, reason = "a test")]

mod cc;
mod fakecuda;

use std::fs;
use std::process::Command;

use cc::{Link, build, link, repo, run, temp_dir};
use fakecuda::FakeCuda;

/// The one code block of the README in a language.
fn example(language: &str) -> String {
    example_of("README.md", language)
}

fn example_of(path: &str, language: &str) -> String {
    let readme = fs::read_to_string(repo(path)).expect(path);
    let opening = format!("```{language}\n");
    let mut blocks = readme.split(&opening).skip(1);
    let block = blocks.next().and_then(|rest| rest.split("```").next());
    assert!(blocks.next().is_none(), "more than one block of {language}");
    block.unwrap_or_else(|| panic!("no block of {language}")).to_owned()
}

fn compiled(language: &str, compiler: Command, how: Link) -> String {
    run_source(&format!("example.{language}"), &example(language), compiler, how)
}

fn run_source(name: &str, text: &str, mut compiler: Command, how: Link) -> String {
    let dir = temp_dir();
    let source = dir.path().join(name);
    fs::write(&source, text).expect("the source");
    compiler.arg(&source);
    link(&mut compiler, how);
    run(&mut Command::new(build(compiler, dir.path(), "example")))
}

#[test]
fn the_c_example_saves_restores_and_is_refused() {
    for how in [Link::Dynamic, Link::Static] {
        let printed = compiled("c", cc::c(), how);
        assert!(printed.contains("bytes, positions 0 to 2"), "{printed}");
        assert!(printed.contains("refused: truncated state"), "{printed}");
    }
}

/// Two runs of a server with one slot, which computes 5,000 tokens and is saved twice.
const MAIN_OF_AUTOSAVE: &str = r#"
static kvs_context *new_context(void) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = layer.n_embd_v_gqa = 4;
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = 32;
    kv.n_layer = 1;
    kv.layers = &layer;
    kvs_section_params section = kvs_kv_section(&kv);
    kvs_context_params params = kvs_context_default_params();
    params.sections = &section;
    params.n_section = 1;
    kvs_context *ctx = NULL;
    return kvs_context_new(&params, &ctx) == KVS_STATUS_OK ? ctx : NULL;
}

int main(void) {
    static slot first = {.tokens = {5, 6, 7}, .n_tokens = 3}, second;
    kvs_context *ctx = new_context();
    kvs_autosave *autosave = open_folder("slots");
    restore_slot(autosave, ctx, &first);
    after_batch(autosave, ctx, &first, 5000);
    after_batch(autosave, ctx, &first, 1);
    at_the_end(autosave, ctx, &first, 1);
    autosave = open_folder("slots");
    restore_slot(autosave, ctx, &second);
    printf("%zu tokens, the last %d\n", second.n_tokens, second.tokens[2]);
    at_the_end(autosave, ctx, &second, 1);
    kvs_context_free(ctx);
}
"#;

#[test]
fn the_example_of_auto_save_keeps_a_slot_from_one_run_to_the_next() {
    let dir = temp_dir();
    let source = dir.path().join("autosave.c");
    fs::write(&source, example_of("docs/autosave.md", "c") + MAIN_OF_AUTOSAVE).expect("the source");
    let mut compiler = cc::c();
    compiler.arg(&source);
    link(&mut compiler, Link::Dynamic);
    let printed = run(Command::new(build(compiler, dir.path(), "autosave")).current_dir(dir.path()));
    assert_eq!(printed, "3 tokens, the last 7\n");
}

/// Two cells of sequence 0, saved and restored as sequence 1 of the same cache; then a state cut short.
const MAIN_OF_A_VIEW: &str = r#"
#include <stdio.h>
#include <string.h>

enum { N = 4 };
static kvs_cell cells[N] = {{.pos = 5, .seqs = {1}}, {.pos = 6, .seqs = {1}}, {.pos = -1}, {.pos = -1}};
static float k[N] = {1.5f, 2.5f};
static int n_clear;

static int visit(void *user, uint32_t stream, kvs_seq_id seq, kvs_visit_each each, void *arg) {
    (void)user, (void)stream;
    int stop = 0;
    for (uint32_t i = 0; i < N && !stop; i++) {
        cells[i].idx = i;
        if (cells[i].pos >= 0 && (seq < 0 || cells[i].seqs[0] >> seq & 1)) stop = each(arg, &cells[i]);
    }
    return stop;
}

static int apply(void *user, uint32_t stream, kvs_seq_id seq, uint32_t n, const kvs_cell *to) {
    (void)user, (void)stream, (void)seq;
    for (uint32_t i = 0; i < n; i++) cells[to[i].idx] = to[i];
    return 0;
}

static int clear(void *user, kvs_seq_id seq) {
    (void)user, (void)seq;
    n_clear++;
    return 0;
}

int main(void) {
    const kvs_plane plane = {k, k, KVS_DEVICE_HOST, KVS_TYPE_F32, 1, 0, sizeof k[0], 0};
    kvs_kv_view view = kvs_kv_view_default();
    view.kv_size = N;
    view.n_seq_max = 2;
    view.n_layer = 1;
    view.k = &plane;
    view.visit = visit;
    view.apply = apply;
    view.clear = clear;
    uint8_t state[256];
    const size_t size = save(&view, 0, state, sizeof state);
    if (restore(&view, 1, state, size - 1) != KVS_STATUS_TRUNCATED) return 1;
    if (restore(&view, 1, state, size) != KVS_STATUS_OK) return 2;
    printf("%d %g, %d %g, cleared %d\n", cells[2].pos, k[2], cells[3].pos, k[3], n_clear);
    return 0;
}
"#;

#[test]
fn the_example_of_a_view_saves_and_restores_a_cache_of_the_callers() {
    let printed = run_source("view.c", &(example("c view") + MAIN_OF_A_VIEW), cc::c(), Link::Dynamic);
    assert_eq!(printed, "5 1.5, 6 2.5, cleared 0\n");
}

/// Two tokens of sequence 1, one after the other.
const MAIN_OF_A_HYBRID: &str = r#"
#include <stdio.h>

int main(void) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = layer.n_embd_v_gqa = 64;
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = 16;
    kv.n_layer = 1;
    kv.layers = &layer;
    kvs_recurrent_layer_params layers[2] = {kvs_recurrent_layer_default_params(), kvs_recurrent_layer_default_params()};
    layers[1].has_r = layers[1].has_s = 1;
    layers[1].n_embd_r = 8;
    layers[1].n_embd_s = 32;
    kvs_recurrent_params recurrent = kvs_recurrent_default_params();
    recurrent.n_layer = 2;
    recurrent.layers = layers;
    kvs_context *ctx = NULL;
    if (new_hybrid(&kv, &recurrent, 2, &ctx)) return 1;
    const kvs_seq_id one = 1, *seq_id = &one;
    for (kvs_pos pos = 0; pos < 2; pos++) {
        kvs_ubatch ubatch = kvs_ubatch_default();
        ubatch.n_tokens = 1;
        ubatch.pos = &pos;
        ubatch.seq_id = &seq_id;
        kvs_slot *slot = NULL;
        int64_t from;
        uint32_t to;
        if (kvs_slot_prepare(ctx, &ubatch, &slot) || rows_of(slot, 1, &from, &to)) return 2;
        if (kvs_slot_commit(ctx, slot)) return 3;
        kvs_slot_free(slot);
        printf("%d to %u\n", (int)from, to);
    }
    printf("position %d\n", kvs_memory_seq_pos_max(kvs_get_memory(ctx), 1));
    kvs_context_free(ctx);
    return 0;
}
"#;

#[test]
fn the_example_of_a_hybrid_says_which_rows_a_token_reads_and_writes() {
    let printed = run_source("hybrid.c", &(example("c hybrid") + MAIN_OF_A_HYBRID), cc::c(), Link::Dynamic);
    assert_eq!(printed, "-1 to 0\n0 to 0\nposition 1\n");
}

/// Saves a sequence of a cache where the example puts it, clears it while the save runs, and loads the file.
const MAIN_ON_A_GPU: &str = r#"
int main(void) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = layer.n_embd_v_gqa = 64;
    layer.device = cache_device();
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = 16;
    kv.n_layer = 1;
    kv.layers = &layer;
    kvs_section_params section = kvs_section_default_params();
    section.kv = &kv;
    kvs_context_params params = kvs_context_default_params();
    params.sections = &section;
    params.n_section = 1;
    kvs_context *ctx = NULL;
    if (kvs_context_new(&params, &ctx)) return 1;
    const kvs_pos pos[3] = {0, 1, 2};
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = 3;
    ubatch.pos = pos;
    kvs_slot *slot = NULL;
    if (kvs_slot_prepare(ctx, &ubatch, &slot) || kvs_slot_commit(ctx, slot)) return 2;
    kvs_slot_free(slot);
    const kvs_token tokens[3] = {7, 8, 9};
    kvs_token loaded[3];
    kvs_job *job = begin_save(ctx, 0, tokens, 3, "slot");
    kvs_memory_clear(kvs_get_memory(ctx), true);
    const size_t size = end_save(job);
    size_t n = 0;
    if (size == 0 || kvs_state_seq_load_file(ctx, "slot", 0, loaded, 3, &n) != size) return 3;
    if (begin_save(ctx, 5, tokens, 3, "slot") != NULL || end_save(begin_save(ctx, 0, NULL, 0, "no/slot")) != 0) return 4;
    printf("device %d, %d tokens, position %d\n", layer.device, (int)n, kvs_memory_seq_pos_max(kvs_get_memory(ctx), 0));
    kvs_context_free(ctx);
    return 0;
}
"#;

#[test]
fn the_example_of_a_gpu_saves_in_the_background_with_and_without_one() {
    let cuda = FakeCuda::load();
    let dir = temp_dir();
    fs::write(dir.path().join("gpu.c"), example("c gpu") + MAIN_ON_A_GPU).expect("the source");
    let mut compiler = cc::c();
    compiler.arg(dir.path().join("gpu.c"));
    link(&mut compiler, Link::Dynamic);
    let exe = build(compiler, dir.path(), "gpu");
    for (devices, device) in [("0", -1), ("1", 0)] {
        let printed = run(Command::new(&exe)
            .current_dir(dir.path())
            .env("LD_LIBRARY_PATH", &cuda.folder)
            .env("FAKECUDA_KERNELS", &cuda.kernels)
            .env("FAKECUDA_DEVICES", devices));
        assert_eq!(printed, format!("device {device}, 3 tokens, position 2\n"));
    }
}

#[test]
fn the_cpp_example_takes_a_checkpoint_of_the_window_alone() {
    let printed = compiled("cpp", cc::cpp(), Link::Dynamic);
    // 128 cells of one layer: 12 bytes of metadata, K and V of 128 bytes each.
    let checkpoint = 8 + 8 + 128 * 12 + 16 + 2 * (12 + 128 * 128);
    assert!(printed.ends_with(&format!("checkpoint {checkpoint}\n")), "{printed}");
}

#[test]
fn the_python_example_saves_restores_and_is_refused() {
    let printed = run_python("python");
    assert!(printed.contains("bytes, positions 0 to 2"), "{printed}");
    assert!(printed.contains("refused: truncated state"), "{printed}");
}

#[test]
fn the_python_example_of_a_slot_outlives_its_run() {
    assert_eq!(run_python("python slots"), "restored 35 tokens\npositions 0 to 19\n");
}

fn run_python(language: &str) -> String {
    let dir = temp_dir();
    run(Command::new("python3")
        .args(["-c", &example(language)])
        .current_dir(dir.path())
        .env("PYTHONPATH", repo("ffi-examples/python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("KVSTATE_LIB", cc::dylib()))
}

/// The cells of the line of a table that begins with `name`.
fn line<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("| {name} |")));
    line.unwrap_or_else(|| panic!("no line of {name}"))
        .trim_end_matches('|')
        .split('|')
        .map(str::trim)
        .collect()
}

/// What docs/performance.md says, where the bench writes it, is what the README says.
#[test]
fn the_figures_of_a_hybrid_are_those_of_the_bench() {
    let [readme, page] =
        ["README.md", "docs/performance.md"].map(|name| fs::read_to_string(repo(name)).expect(name));
    let (_, made) = page.split_once("<!-- made by benches/table.rs -->").expect("the marker");
    let section = |text: &str, title: &str| text.split_once(title).expect(title).1.to_owned();
    let bench = section(made, "\n## A checkpoint of a hybrid\n");
    let readme = section(&readme, "A partial checkpoint of a hybrid");

    let lengths: Vec<_> = line(&readme, "tokens");
    assert_eq!(lengths.len(), 3);
    let lengths_of_bench: Vec<_> = line(&bench, "a partial checkpoint after");
    let bytes = line(&readme, "bytes");
    let times = line(&readme, "saved / restored");
    let copies = line(&readme, "a plain copy of these bytes");
    for i in 0..lengths.len() {
        assert_eq!(format!("{} tokens", lengths[i]), lengths_of_bench[i]);
        assert_eq!(bytes[i].replace(',', ""), line(&bench, "bytes")[i]);
        let (saved, restored) = (line(&bench, "get_data")[i], line(&bench, "set_data")[i]);
        assert_eq!(times[i], format!("{} / {restored}", saved.trim_end_matches(" ms")));
        assert_eq!(copies[i], line(&bench, "a plain copy of it")[i]);
    }
}
