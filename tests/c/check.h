// What the C tests share: checks, cases by name, and small contexts.

#ifndef CHECK_H
#define CHECK_H

#include <kvstate.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                        \
    do {                                                                                                        \
        if (!(condition)) {                                                                                     \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, kvs_last_error()); \
            exit(1);                                                                                            \
        }                                                                                                       \
    } while (0)

// The call failed for this reason.
#define CHECK_REASON(status, text)                              \
    do {                                                        \
        CHECK(kvs_last_status() == (status));                   \
        CHECK(strstr(kvs_last_error(), (text)) != NULL);        \
    } while (0)

// The call returns its failure value, for this reason.
#define FAILS(call, failure, status, text) \
    do {                                   \
        kvs_clear_last_error();            \
        CHECK((call) == (failure));        \
        CHECK_REASON(status, text);        \
    } while (0)

#define FAILS_VOID(call, status, text) \
    do {                               \
        kvs_clear_last_error();        \
        call;                          \
        CHECK_REASON(status, text);    \
    } while (0)

#define NO_HANDLE(call, failure) FAILS(call, failure, KVS_STATUS_INVALID_HANDLE, " is not a live handle")
#define NO_HANDLE_STATUS(call) NO_HANDLE(call, KVS_STATUS_INVALID_HANDLE)
#define BAD(call, failure, text) FAILS(call, failure, KVS_STATUS_INVALID_ARGUMENT, text)
#define BAD_STATUS(call, text) BAD(call, KVS_STATUS_INVALID_ARGUMENT, text)

typedef struct {
    const char *name;
    void (*run)(void);
} test_case;

#define CASE(name) {#name, name}

// Runs the case that is named; without a name, lists them all.
static inline int run_case(int argc, char **argv, const test_case *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (argc < 2) {
            puts(cases[i].name);
        } else if (strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    }
    return argc < 2 ? 0 : 2;
}

#define MAIN(...)                                                            \
    int main(int argc, char **argv) {                                        \
        const test_case cases[] = {__VA_ARGS__};                             \
        return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);  \
    }

// Where the caches of a test are: the CUDA device of TEST_DEVICE, or host memory without it.
static inline int32_t test_device(void) {
    const char *device = getenv("TEST_DEVICE");
    return device == NULL ? KVS_DEVICE_HOST : atoi(device);
}

// A cache of one f16 layer, 4 elements of K and of V; change what the test is about, then call new_context.
typedef struct {
    kvs_kv_layer_params layer;
    kvs_kv_params kv;
    kvs_section_params section;
    kvs_context_params context;
} setup;

static inline setup default_setup(uint32_t kv_size, uint32_t n_seq_max) {
    setup s;
    s.layer = kvs_kv_layer_default_params();
    s.layer.n_embd_k_gqa = 4;
    s.layer.n_embd_v_gqa = 4;
    s.kv = kvs_kv_default_params();
    s.kv.kv_size = kv_size;
    s.kv.n_layer = 1;
    s.section = kvs_section_default_params();
    s.context = kvs_context_default_params();
    s.context.n_seq_max = n_seq_max;
    s.context.n_section = 1;
    return s;
}

static inline kvs_status try_new_context(setup *s, kvs_context **ctx) {
    s->kv.layers = &s->layer;
    s->section.kv = &s->kv;
    s->context.sections = &s->section;
    return kvs_context_new(&s->context, ctx);
}

static inline kvs_context *new_context(setup s) {
    kvs_context *ctx = NULL;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_OK);
    return ctx;
}

// Gives cells to n tokens of a sequence from position p0; cells may be NULL.
static inline void decode(kvs_context *ctx, kvs_seq_id seq_id, kvs_pos p0, uint32_t n, uint32_t *cells) {
    kvs_pos pos[64];
    const kvs_seq_id *seq_ids[64];
    CHECK(n <= 64);
    for (uint32_t i = 0; i < n; i++) {
        pos[i] = p0 + (kvs_pos)i;
        seq_ids[i] = &seq_id;
    }
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = n;
    ubatch.pos = pos;
    ubatch.seq_id = seq_ids;
    kvs_slot *slot;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
    CHECK(kvs_slot_commit(ctx, slot) == KVS_STATUS_OK);
    if (cells != NULL) CHECK(kvs_slot_cells(slot, 0, cells, n) == KVS_STATUS_OK);
    kvs_slot_free(slot);
}

typedef struct {
    uint8_t *data;
    size_t size;
} state;

// The state of a sequence, or of the whole context if seq_id is -1.
static inline state save(kvs_context *ctx, kvs_seq_id seq_id) {
    state s;
    s.size = seq_id < 0 ? kvs_state_get_size(ctx) : kvs_state_seq_get_size(ctx, seq_id);
    CHECK(s.size > 0);
    s.data = malloc(s.size);
    CHECK(s.data != NULL);
    size_t n = seq_id < 0 ? kvs_state_get_data(ctx, s.data, s.size) : kvs_state_seq_get_data(ctx, s.data, s.size, seq_id);
    CHECK(n == s.size);
    return s;
}

// The whole context holds what it held when `before` was taken; frees it.
static inline void check_unchanged(kvs_context *ctx, state before) {
    state now = save(ctx, -1);
    CHECK(now.size == before.size && memcmp(now.data, before.data, now.size) == 0);
    free(now.data);
    free(before.data);
}

#endif
