// States that llama.cpp wrote, from tests/fixtures.

#ifndef KVSTATE_TEST_FIXTURE_H
#define KVSTATE_TEST_FIXTURE_H

#include "check.h"

static inline state read_fixture(const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s.bin", FIXTURES, name);
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 0, SEEK_END) == 0);
    state s;
    s.size = (size_t)ftell(file);
    s.data = malloc(s.size);
    rewind(file);
    CHECK(s.data != NULL && fread(s.data, 1, s.size, file) == s.size);
    fclose(file);
    return s;
}

// The state is consumed and written again byte for byte.
static inline void check_fixture(kvs_context *ctx, const char *name, kvs_seq_id seq_id, uint32_t flags) {
    state blob = read_fixture(name);
    CHECK(kvs_state_seq_set_data_ext(ctx, blob.data, blob.size, seq_id, flags) == blob.size);
    CHECK(kvs_state_seq_get_size_ext(ctx, seq_id, flags) == blob.size);
    uint8_t *again = malloc(blob.size);
    CHECK(again != NULL && kvs_state_seq_get_data_ext(ctx, again, blob.size, seq_id, flags) == blob.size);
    CHECK(memcmp(again, blob.data, blob.size) == 0);
    CHECK(kvs_memory_seq_pos_min(kvs_get_memory(ctx), seq_id) == 63 && kvs_memory_seq_pos_max(kvs_get_memory(ctx), seq_id) == 63);
    free(again);
    free(blob.data);
}

static inline kvs_kv_params window(uint32_t kv_size, uint32_t n_swa) {
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = kv_size;
    kv.swa_type = KVS_SWA_TYPE_STANDARD;
    kv.n_swa = n_swa;
    return kv;
}

#endif
