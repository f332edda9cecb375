// Bytes of K and V, and what memory they take, where TEST_DEVICE says: on a CUDA device, or in host memory.

#include "check.h"

static kvs_context *ctx;

// 8 cells of 4 f16 elements: rows of 8 bytes, planes of 64.
static void open_context(void) {
    setup s = default_setup(8, 2);
    s.layer.device = test_device();
    ctx = new_context(s);
}

static void what_is_set_is_got_and_saved(void) {
    open_context();
    uint32_t cells[2];
    decode(ctx, 0, 0, 2, cells);
    uint8_t row[8] = {1, 2, 3, 4, 5, 6, 7, 8}, found[16], zero[8] = {0};
    const uint64_t at = cells[1] * 8;
    CHECK(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_K, at, row, 8) == KVS_STATUS_OK);
    row[0] = 9;
    CHECK(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_V, at, row, 8) == KVS_STATUS_OK);
    CHECK(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_V, at - 8, found, 16) == KVS_STATUS_OK);
    CHECK(memcmp(found, zero, 8) == 0 && memcmp(found + 8, row, 8) == 0);
    // Parts of rows too.
    CHECK(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, at + 3, found, 2) == KVS_STATUS_OK && found[0] == 4 && found[1] == 5);
    state s = save(ctx, 0);
    CHECK(memcmp(s.data + s.size - 8, row, 8) == 0);
    free(s.data);
    kvs_context_free(ctx);
}

static void bytes_outside_a_plane_are_refused(void) {
    open_context();
    uint8_t bytes[65] = {5};
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, 0, bytes, 65), "offset: 65 bytes at 0 of a plane of 64");
    BAD_STATUS(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_V, 60, bytes, 5), "offset: 5 bytes at 60 of a plane of 64");
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, UINT64_MAX, bytes, 2), "of a plane of 64");
    CHECK(bytes[0] == 5);
    CHECK(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, 64, NULL, 0) == KVS_STATUS_OK);
    CHECK(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_K, 0, NULL, 0) == KVS_STATUS_OK);
    kvs_context_free(ctx);
}

static void planes_that_are_not_there_are_refused(void) {
    open_context();
    uint8_t byte = 5;
    BAD_STATUS(kvs_kv_get(ctx, 1, 0, 0, KVS_KV_K, 0, &byte, 1), "section: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_kv_get(ctx, 0, 1, 0, KVS_KV_K, 0, &byte, 1), "stream: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 1, KVS_KV_V, 0, &byte, 1), "layer: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 0, 2, 0, &byte, 1), "which: 2 is no KVS_KV_*");
    BAD_STATUS(kvs_kv_set(ctx, 1, 0, 0, KVS_KV_K, 0, &byte, 1), "section: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_kv_set(ctx, 0, 1, 0, KVS_KV_K, 0, &byte, 1), "stream: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_kv_set(ctx, 0, 0, 1, KVS_KV_V, 0, &byte, 1), "layer: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_kv_set(ctx, 0, 0, 0, -1, 0, &byte, 1), "which: -1 is no KVS_KV_*");
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, 0, NULL, 1), "dst: NULL");
    BAD_STATUS(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_K, 0, NULL, 1), "src: NULL");
    NO_HANDLE_STATUS(kvs_kv_get(NULL, 0, 0, 0, KVS_KV_K, 0, &byte, 1));
    NO_HANDLE_STATUS(kvs_kv_set(NULL, 0, 0, 0, KVS_KV_K, 0, &byte, 1));
    CHECK(byte == 5);
    kvs_context_free(ctx);

    setup s = default_setup(8, 1);
    s.layer.device = test_device();
    s.layer.n_embd_v_gqa = 0;
    ctx = new_context(s);
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_V, 0, &byte, 1), "which: V, and layer 0 has none");
    BAD_STATUS(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_V, 0, &byte, 1), "which: V, and layer 0 has none");
    kvs_context_free(ctx);
}

static void the_memory_that_is_taken_is_told(void) {
    open_context();
    decode(ctx, 0, 0, 3, NULL);
    const bool on_device = test_device() >= 0;
    kvs_memory_usage usage = kvs_memory_usage_default();
    CHECK(kvs_memory_usage_get(ctx, &usage) == KVS_STATUS_OK);
    CHECK(usage.struct_size == sizeof usage);
    CHECK(usage.kv_host == (on_device ? 0 : 128) && usage.kv_device == (on_device ? 128 : 0));
    CHECK(usage.on_device_states_host == 0 && usage.on_device_states_device == 0);
    CHECK(usage.staging_pinned == 0 && usage.staging_device == 0);

    uint8_t blob[256];
    CHECK(kvs_state_seq_get_data_ext(ctx, blob, sizeof blob, 0, KVS_STATE_SEQ_FLAGS_ON_DEVICE) > 0);
    CHECK(kvs_memory_usage_get(ctx, &usage) == KVS_STATUS_OK);
    CHECK(usage.on_device_states_host == (on_device ? 0 : 2 * 3 * 8));
    CHECK(usage.on_device_states_device == (on_device ? 2 * 3 * 8 : 0));
    state s = save(ctx, 0);
    free(s.data);
    CHECK(kvs_memory_usage_get(ctx, &usage) == KVS_STATUS_OK);
    CHECK((usage.staging_pinned > 0) == on_device && (usage.staging_device > 0) == on_device);

    NO_HANDLE_STATUS(kvs_memory_usage_get(NULL, &usage));
    BAD_STATUS(kvs_memory_usage_get(ctx, NULL), "kvs_memory_usage: NULL");
    usage.struct_size--;
    BAD_STATUS(kvs_memory_usage_get(ctx, &usage), "kvs_memory_usage.struct_size");
    kvs_context_free(ctx);
}

MAIN(CASE(what_is_set_is_got_and_saved), CASE(bytes_outside_a_plane_are_refused),
     CASE(planes_that_are_not_there_are_refused), CASE(the_memory_that_is_taken_is_told))
