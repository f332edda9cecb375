// What threads may do.

#include "check.h"

#include <pthread.h>

static kvs_context *ctx;

static void run_two(void *(*run)(void *)) {
    pthread_t threads[2];
    int numbers[2] = {0, 1};
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, run, &numbers[i]) == 0);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void *fail_in_a_thread(void *unused) {
    CHECK(kvs_last_status() == KVS_STATUS_OK && kvs_last_error()[0] == '\0');
    CHECK(kvs_state_seq_get_size(ctx, 55) == 0);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "seq_id 55 is out of range [0, 2)");
    return unused;
}

static void the_last_error_is_per_thread(void) {
    ctx = new_context(default_setup(16, 2));
    CHECK(kvs_state_seq_get_size(ctx, 44) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fail_in_a_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "seq_id 44 is out of range [0, 2)");
    kvs_context_free(ctx);
}

static void *const_calls(void *number) {
    kvs_seq_id seq_id = *(int *)number;
    kvs_pos pos = 6;
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = 1;
    ubatch.pos = &pos;
    for (int i = 0; i < 2000; i++) {
        size_t n;
        uint32_t n_kv;
        kvs_slot *slot;
        kvs_plane k, v;
        kvs_cell cell;
        float row[16];
        CHECK(kvs_n_stream(ctx) == 1);
        CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), seq_id) == (seq_id == 0 ? 5 : 2));
        CHECK(kvs_memory_seq_pos_min(kvs_get_memory(ctx), seq_id) == 0);
        CHECK(!kvs_memory_can_shift(kvs_get_memory(ctx)));
        CHECK(kvs_state_seq_get_size(ctx, seq_id) < kvs_state_get_size(ctx));
        CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
        kvs_slot_free(slot);
        CHECK(kvs_n_kv(ctx, 0, 0, 4, &n_kv) == KVS_STATUS_OK && n_kv == 12);
        CHECK(kvs_mask_row(ctx, 0, &ubatch, 0, row, n_kv) == KVS_STATUS_OK && row[0] == 0.0f && row[6] < 0.0f);
        CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, &v) == KVS_STATUS_OK);
        CHECK(kvs_cell_get(ctx, 0, 0, 8, &cell) == KVS_STATUS_OK && cell.pos == 2 && cell.seqs[0] == 2);
        CHECK(kvs_shift_get(ctx, 0, 0, NULL, NULL, 0, &n) == KVS_STATUS_OK && n == 0);
        CHECK(kvs_state_seq_get_size(ctx, 10 + seq_id) == 0); // so may calls that fail
    }
    return NULL;
}

static void const_calls_run_side_by_side(void) {
    ctx = new_context(default_setup(16, 2));
    decode(ctx, 0, 0, 6, NULL);
    decode(ctx, 1, 0, 3, NULL);
    run_two(const_calls);
    kvs_context_free(ctx);
}

static void *own_context(void *number) {
    kvs_context *own = new_context(default_setup(16, 2));
    for (int i = 0; i < 200; i++) {
        kvs_memory_clear(kvs_get_memory(own), true);
        decode(own, 0, 0, 6, NULL);
        state s = save(own, 0);
        CHECK(kvs_state_seq_set_data(own, s.data, s.size, 1) == s.size);
        CHECK(kvs_memory_seq_pos_max(kvs_get_memory(own), 1) == 5);
        free(s.data);
    }
    kvs_context_free(own);
    return number;
}

static void two_contexts_are_independent(void) { run_two(own_context); }

static void *use_and_free(void *unused) {
    decode(ctx, 0, 6, 2, NULL);
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 0) == 7);
    kvs_context_free(ctx);
    return unused;
}

static void a_context_moves_between_threads(void) {
    ctx = new_context(default_setup(16, 2));
    decode(ctx, 0, 0, 6, NULL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_and_free, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

MAIN(CASE(the_last_error_is_per_thread), CASE(const_calls_run_side_by_side), CASE(two_contexts_are_independent),
     CASE(a_context_moves_between_threads))
