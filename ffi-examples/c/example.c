// One sequence in an iSWA cache: decoded, saved, restored, checkpointed, filed.
//
//     cc -std=c11 -I include ffi-examples/c/example.c -L target/release -lkvstate -o example && ./example DIR
//
// The states go to files in DIR (default: here). ffi-examples/python/example.py does the same and writes the same
// bytes.

#include <kvstate.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_LAYER = 2, N_EMBD = 32, N_UBATCH = 8, N_SECTION = 2 };

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, kvs_last_error());
    exit(1);
}

static void check(const char *what, bool ok) {
    if (!ok) die(what);
}

// A model with full-attention and sliding-window layers: two sections, the SWA one smaller.
static kvs_context *new_context(void) {
    kvs_kv_layer_params layers[N_LAYER];
    for (int il = 0; il < N_LAYER; il++) {
        layers[il] = kvs_kv_layer_default_params(); // f16; k and v NULL: kvstate allocates
        layers[il].n_embd_k_gqa = N_EMBD;
        layers[il].n_embd_v_gqa = N_EMBD;
    }
    kvs_kv_params base = kvs_kv_default_params();
    base.kv_size = 64;
    base.n_layer = N_LAYER;
    base.layers = layers;
    kvs_kv_params swa = base;
    swa.kv_size = 48;
    swa.swa_type = KVS_SWA_TYPE_STANDARD;
    swa.n_swa = 8;
    kvs_section_params sections[N_SECTION] = {kvs_section_default_params(), kvs_section_default_params()};
    sections[0].kv = &base;
    sections[1].kv = &swa;
    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = 2;
    params.sections = sections;
    params.n_section = N_SECTION;
    params.arch = "example";
    kvs_context *ctx;
    check("kvs_context_new", kvs_context_new(&params, &ctx) == KVS_STATUS_OK);
    return ctx;
}

// Stands in for what a model computes: bytes that depend on the layer and the position.
static void write_row(const kvs_plane *plane, uint32_t cell, int salt, kvs_pos pos) {
    uint8_t *row = (uint8_t *)plane->data + cell * plane->cell_stride;
    uint64_t n = kvs_row_size(plane->ggml_type, plane->n_embd);
    for (uint64_t i = 0; i < n; i++) row[i] = (uint8_t)(salt * 57 + pos * 31 + (int)i);
}

// Decodes n tokens of sequence 0 from position p0, a ubatch at a time.
static void decode(kvs_context *ctx, kvs_pos p0, uint32_t n) {
    for (uint32_t done = 0; done < n; done += N_UBATCH) {
        kvs_pos pos[N_UBATCH];
        kvs_ubatch ubatch = kvs_ubatch_default();
        ubatch.n_tokens = n - done < N_UBATCH ? n - done : N_UBATCH;
        ubatch.pos = pos;
        for (uint32_t i = 0; i < ubatch.n_tokens; i++) pos[i] = p0 + (kvs_pos)(done + i);

        kvs_slot *slot;
        check("kvs_slot_prepare", kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
        check("kvs_slot_commit", kvs_slot_commit(ctx, slot) == KVS_STATUS_OK);
        for (uint32_t section = 0; section < N_SECTION; section++) {
            uint32_t cells[N_UBATCH];
            check("kvs_slot_cells", kvs_slot_cells(slot, section, cells, ubatch.n_tokens) == KVS_STATUS_OK);
            for (uint32_t il = 0; il < N_LAYER; il++) {
                kvs_plane k, v;
                check("kvs_kv_plane", kvs_kv_plane(ctx, section, 0, il, &k, &v) == KVS_STATUS_OK);
                int salt = (int)(section * N_LAYER + il) * 2;
                for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
                    write_row(&k, cells[i], salt, pos[i]);
                    write_row(&v, cells[i], salt + 1, pos[i]);
                }
            }
        }
        kvs_slot_free(slot);
    }
}

typedef struct {
    uint8_t *data;
    size_t size;
} state;

static state save(kvs_context *ctx, kvs_state_seq_flags flags) {
    state s = {NULL, kvs_state_seq_get_size_ext(ctx, 0, flags)};
    check("kvs_state_seq_get_size_ext", s.size > 0);
    check("malloc", (s.data = malloc(s.size)) != NULL);
    check("kvs_state_seq_get_data_ext", kvs_state_seq_get_data_ext(ctx, s.data, s.size, 0, flags) == s.size);
    return s;
}

static const char *path_in(const char *dir, const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void write_file(const char *path, state s) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(s.data, 1, s.size, file) != s.size || fclose(file) != 0) perror(path), exit(1);
}

int main(int argc, char **argv) {
    const char *dir = argc > 1 ? argv[1] : ".";
    kvs_context *ctx = new_context();
    kvs_memory_t mem = kvs_get_memory(ctx);

    decode(ctx, 0, 20);
    state whole = save(ctx, KVS_STATE_SEQ_FLAGS_NONE);
    write_file(path_in(dir, "sequence.bin"), whole);
    printf("saved positions %d to %d: %zu bytes\n", kvs_memory_seq_pos_min(mem, 0), kvs_memory_seq_pos_max(mem, 0),
           whole.size);

    kvs_memory_clear(mem, true);
    check("restore", kvs_state_seq_set_data(ctx, whole.data, whole.size, 0) == whole.size);
    state again = save(ctx, KVS_STATE_SEQ_FLAGS_NONE);
    check("compare", again.size == whole.size && memcmp(again.data, whole.data, whole.size) == 0);
    printf("cleared, restored and saved again: the same bytes\n");

    // A checkpoint holds what seq_rm cannot bring back. Go on, then go back: cut, and restore the window.
    state checkpoint = save(ctx, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    write_file(path_in(dir, "checkpoint.bin"), checkpoint);
    decode(ctx, 20, 30);
    kvs_memory_seq_rm(mem, 0, 20, -1);
    check("go back", kvs_state_seq_set_data_ext(ctx, checkpoint.data, checkpoint.size, 0,
                                                KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY) == checkpoint.size);
    printf("went back to the checkpoint of %zu bytes: positions %d to %d\n", checkpoint.size,
           kvs_memory_seq_pos_min(mem, 0), kvs_memory_seq_pos_max(mem, 0));

    kvs_token tokens[20], loaded[32];
    for (int i = 0; i < 20; i++) tokens[i] = 1000 + i;
    const char *slot_path = path_in(dir, "slot.bin");
    size_t n_written = kvs_state_seq_save_file(ctx, slot_path, 0, tokens, 20), n_token = 0;
    check("kvs_state_seq_save_file", n_written > 0);
    size_t n_read = kvs_state_seq_load_file(ctx, slot_path, 1, loaded, 32, &n_token);
    check("kvs_state_seq_load_file", n_read == n_written);
    printf("slot file of %zu bytes loaded into sequence 1: %zu tokens, the last one %d\n", n_read, n_token,
           loaded[n_token - 1]);

    whole.data[8] ^= 1; // a state is untrusted input
    check("refuse", kvs_state_seq_set_data(ctx, whole.data, whole.size, 0) == 0);
    printf("damaged state refused with status %d: %s\n", kvs_last_status(), kvs_last_error());

    free(whole.data), free(again.data), free(checkpoint.data);
    kvs_context_free(ctx);
}
