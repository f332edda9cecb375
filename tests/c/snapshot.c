// Snapshots, and saves in the background, of caches where TEST_DEVICE says: a CUDA device, or host memory.

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

enum { KV_SIZE = 256, N_TOKENS = 192, ROW = 4096 };

static kvs_context *ctx;
static kvs_memory_t mem;

// Large enough for a save of several pieces: 192 cells of sequence 0, 16 of sequence 1.
static kvs_context *new_large(void) {
    setup s = default_setup(KV_SIZE, 3);
    s.layer.type_k = s.layer.type_v = KVS_TYPE_F32;
    s.layer.n_embd_k_gqa = s.layer.n_embd_v_gqa = ROW / 4;
    s.layer.device = test_device();
    s.context.staging_size = 64 << 10;
    return new_context(s);
}

// Gives every byte of K and V of the cells [begin, end) a value that depends on seed.
static void write_rows(uint32_t begin, uint32_t end, uint32_t seed) {
    uint8_t *rows = malloc((size_t)(end - begin) * ROW);
    CHECK(rows != NULL);
    for (int which = KVS_KV_K; which <= KVS_KV_V; which++) {
        for (size_t i = 0; i < (size_t)(end - begin) * ROW; i++) {
            rows[i] = (uint8_t)((i * 2654435761u + seed * 97u + (uint32_t)which) >> 13);
        }
        CHECK(kvs_kv_set(ctx, 0, 0, 0, which, (uint64_t)begin * ROW, rows, (size_t)(end - begin) * ROW) == 0);
    }
    free(rows);
}

static void open_large(void) {
    ctx = new_large();
    mem = kvs_get_memory(ctx);
    for (uint32_t at = 0; at < N_TOKENS; at += 48) decode(ctx, 0, (kvs_pos)at, 48, NULL);
    decode(ctx, 1, 0, 16, NULL);
    write_rows(0, N_TOKENS + 16, 1);
}

// What a server does next: other tokens, in cells that the sequence had.
static void change(void) {
    CHECK(kvs_memory_seq_rm(mem, 0, 100, -1));
    decode(ctx, 0, 100, 40, NULL);
    write_rows(0, KV_SIZE, 2);
}

static kvs_snapshot *take(kvs_seq_id seq_id, kvs_state_seq_flags flags) {
    kvs_snapshot *snapshot = NULL;
    CHECK(kvs_snapshot_take(ctx, seq_id, flags, &snapshot) == KVS_STATUS_OK);
    return snapshot;
}

static state data_of(const kvs_snapshot *snapshot) {
    state s = {NULL, kvs_snapshot_size(snapshot)};
    CHECK(s.size > 0);
    s.data = malloc(s.size);
    CHECK(s.data != NULL && kvs_snapshot_get_data(snapshot, s.data, s.size) == s.size);
    return s;
}

static bool equal(state a, state b) { return a.size == b.size && memcmp(a.data, b.data, a.size) == 0; }

static state contents(const char *path) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    state s = {malloc(8 << 20), 0};
    CHECK(s.data != NULL);
    s.size = fread(s.data, 1, 8 << 20, file);
    CHECK(s.size > 0 && s.size < 8 << 20);
    fclose(file);
    return s;
}

static bool is_there(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file != NULL) fclose(file);
    return file != NULL;
}

static void a_snapshot_is_what_a_save_was_when_it_was_taken(void) {
    open_large();
    state sequence = save(ctx, 0), whole = save(ctx, -1), partial = {malloc(64), 0};
    partial.size = kvs_state_seq_get_data_ext(ctx, partial.data, 64, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    kvs_snapshot *snapshots[] = {take(0, 0), take(-1, 0), take(0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY)};
    change();
    kvs_memory_clear(mem, true);
    const state expected[] = {sequence, whole, partial};
    for (int i = 0; i < 3; i++) {
        state found = data_of(snapshots[i]);
        CHECK(equal(found, expected[i]));
        free(found.data);
        free(expected[i].data);
        kvs_snapshot_free(snapshots[i]);
    }
    kvs_context_free(ctx);
}

static void a_snapshot_is_restored_into_another_sequence_and_another_context(void) {
    open_large();
    state before = save(ctx, 0);
    kvs_snapshot *snapshot = take(0, 0);
    change();
    // Its cells come to lie in the order of their positions, as they did before.
    kvs_memory_clear(mem, true);
    CHECK(kvs_snapshot_restore(ctx, snapshot, 2) == KVS_STATUS_OK);
    CHECK(kvs_memory_seq_pos_max(mem, 2) == N_TOKENS - 1 && kvs_memory_seq_pos_max(mem, 0) == -1);
    kvs_context *other = new_large();
    CHECK(kvs_snapshot_restore(other, snapshot, 1) == KVS_STATUS_OK);
    // A state names its sequence: as sequence 0 again it has the same bytes.
    state restored[] = {save(ctx, 2), save(other, 1)};
    for (int i = 0; i < 2; i++) {
        kvs_memory_clear(kvs_get_memory(other), true);
        CHECK(kvs_state_seq_set_data(other, restored[i].data, restored[i].size, 0) == before.size);
        state again = save(other, 0);
        CHECK(equal(again, before));
        free(again.data);
        free(restored[i].data);
    }
    free(before.data);
    kvs_snapshot_free(snapshot);
    kvs_context_free(other);
    kvs_context_free(ctx);
}

static void a_snapshot_of_the_whole_context_replaces_all_sequences(void) {
    open_large();
    state before = save(ctx, -1);
    kvs_snapshot *snapshot = take(-1, 0);
    change();
    CHECK(kvs_memory_seq_rm(mem, 1, -1, -1));
    CHECK(kvs_snapshot_restore(ctx, snapshot, -1) == KVS_STATUS_OK);
    check_unchanged(ctx, before);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void a_snapshot_outlives_its_context(void) {
    open_large();
    state before = save(ctx, 0);
    kvs_snapshot *snapshot = take(0, 0);
    kvs_context_free(ctx);
    state found = data_of(snapshot);
    CHECK(equal(found, before));
    free(found.data);
    free(before.data);
    kvs_snapshot_free(snapshot);
}

static void a_file_of_a_snapshot_is_that_of_a_save_when_it_was_taken(void) {
    open_large();
    const kvs_token tokens[3] = {7, 8, 9};
    CHECK(kvs_state_seq_save_file(ctx, "sequence", 0, tokens, 3) > 0);
    CHECK(kvs_state_save_file(ctx, "whole", tokens, 3));
    kvs_snapshot *sequence = take(0, 0), *whole = take(-1, 0);
    change();
    state files[] = {contents("sequence"), contents("whole")};
    CHECK(kvs_snapshot_save_file(sequence, "sequence", tokens, 3) == files[0].size);
    CHECK(kvs_snapshot_save_file(whole, "whole", tokens, 3) == files[1].size);
    state again[] = {contents("sequence"), contents("whole")};
    for (int i = 0; i < 2; i++) {
        CHECK(equal(again[i], files[i]));
        free(again[i].data);
        free(files[i].data);
    }
    kvs_snapshot_free(sequence);
    kvs_snapshot_free(whole);
    kvs_context_free(ctx);
}

static void a_job_without_tensors_is_done_at_its_end(void) {
    open_large();
    kvs_snapshot *snapshot = take(0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    uint8_t bytes[8];
    kvs_job *job = NULL;
    size_t size = 0;
    uint64_t done = 0, total = 0;
    CHECK(kvs_snapshot_get_data_start(snapshot, bytes, sizeof bytes, NULL, &job) == KVS_STATUS_OK);
    CHECK(kvs_job_wait(job, &size) == KVS_STATUS_OK && size == 8);
    CHECK(kvs_job_progress(job, &done, &total) == KVS_STATUS_OK && done == 8 && total == 8);
    kvs_job_free(job);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void what_a_snapshot_takes_is_where_its_cache_is(void) {
    open_large();
    kvs_snapshot *snapshot = take(1, 0);
    CHECK(kvs_snapshot_device_size(snapshot) == (test_device() < 0 ? 0 : 16 * 2 * ROW));
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

// Jobs

// What progress was told; while `hold` is set it does not return, `cancel_at` bytes cancel.
static struct {
    atomic_bool hold, is_inside;
    atomic_int n_calls;
    atomic_ullong done, total;
    uint64_t cancel_at;
} told;

static int32_t progress(void *user_data, uint64_t done, uint64_t total) {
    CHECK(user_data == &told && done <= total && done >= told.done);
    told.done = done;
    told.total = total;
    told.n_calls++;
    told.is_inside = true;
    while (told.hold) {
        const struct timespec moment = {0, 1000000};
        nanosleep(&moment, NULL);
    }
    return done >= told.cancel_at ? 5 : 0;
}

static kvs_transfer_params watched(bool hold, uint64_t cancel_at) {
    told.hold = hold;
    told.is_inside = false;
    told.n_calls = 0;
    told.done = told.total = 0;
    told.cancel_at = cancel_at;
    kvs_transfer_params params = kvs_transfer_default_params();
    params.progress = progress;
    params.progress_user_data = &told;
    return params;
}

static void wait_until_inside(void) {
    while (!told.is_inside) {
        const struct timespec moment = {0, 1000000};
        nanosleep(&moment, NULL);
    }
}

static void a_save_in_the_background_has_the_bytes_of_a_blocking_one(void) {
    open_large();
    const kvs_token tokens[2] = {3, 4};
    state before = save(ctx, 0);
    CHECK(kvs_state_seq_save_file(ctx, "blocking", 0, tokens, 2) > 0);
    kvs_snapshot *snapshot = take(0, 0);
    state found = {calloc(1, before.size), before.size};
    CHECK(found.data != NULL);
    kvs_transfer_params params = watched(false, UINT64_MAX);
    kvs_job *job = NULL, *file_job = NULL;
    CHECK(kvs_snapshot_get_data_start(snapshot, found.data, found.size, &params, &job) == KVS_STATUS_OK);
    CHECK(kvs_snapshot_save_file_start(snapshot, "background", tokens, 2, NULL, &file_job) == KVS_STATUS_OK);
    change();
    size_t size = 0, file_size = 0;
    CHECK(kvs_job_wait(job, &size) == KVS_STATUS_OK && size == before.size);
    CHECK(kvs_job_wait(file_job, &file_size) == KVS_STATUS_OK);
    CHECK(kvs_job_poll(job) == 1 && kvs_job_poll(file_job) == 1);
    CHECK(equal(found, before));
    CHECK(told.n_calls > 1 && told.done == before.size && told.total == before.size);
    uint64_t done = 0, total = 0;
    CHECK(kvs_job_progress(file_job, &done, &total) == KVS_STATUS_OK && done == file_size && total == file_size);
    state files[] = {contents("blocking"), contents("background")};
    CHECK(equal(files[0], files[1]) && files[0].size == file_size);
    free(files[0].data);
    free(files[1].data);
    free(found.data);
    free(before.data);
    kvs_job_free(job);
    kvs_job_free(file_job);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void a_job_goes_on_without_its_snapshot_and_its_context(void) {
    open_large();
    state before = save(ctx, 0);
    state found = {calloc(1, before.size), before.size};
    kvs_snapshot *snapshot = take(0, 0);
    kvs_transfer_params params = watched(true, UINT64_MAX);
    kvs_job *job = NULL;
    CHECK(kvs_snapshot_get_data_start(snapshot, found.data, found.size, &params, &job) == KVS_STATUS_OK);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
    told.hold = false;
    size_t size = 0;
    CHECK(kvs_job_wait(job, &size) == KVS_STATUS_OK && size == before.size && equal(found, before));
    kvs_job_free(job);
    free(found.data);
    free(before.data);
}

static void progress_cancels_a_job(void) {
    open_large();
    kvs_snapshot *snapshot = take(0, 0);
    const size_t old = kvs_snapshot_save_file(snapshot, "slot", NULL, 0);
    kvs_transfer_params params = watched(false, 1);
    kvs_job *job = NULL;
    CHECK(kvs_snapshot_save_file_start(snapshot, "slot", (const kvs_token[]){1}, 1, &params, &job) == KVS_STATUS_OK);
    size_t size = 7;
    FAILS(kvs_job_wait(job, &size), KVS_STATUS_CANCELLED, KVS_STATUS_CANCELLED, "cancelled after");
    CHECK(size == 7 && told.n_calls == 1 && kvs_job_poll(job) == 1);
    state file = contents("slot");
    CHECK(file.size == old);
    free(file.data);
    kvs_job_free(job);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void *wait_for(void *job) {
    size_t size = 0;
    FAILS(kvs_job_wait(job, &size), KVS_STATUS_CANCELLED, KVS_STATUS_CANCELLED, "cancelled after");
    return NULL;
}

static void a_job_is_polled_and_cancelled_while_another_thread_waits(void) {
    open_large();
    kvs_snapshot *snapshot = take(0, 0);
    kvs_transfer_params params = watched(true, UINT64_MAX);
    kvs_job *job = NULL;
    CHECK(kvs_snapshot_save_file_start(snapshot, "slot", NULL, 0, &params, &job) == KVS_STATUS_OK);
    wait_until_inside();
    CHECK(kvs_job_poll(job) == 0);
    pthread_t waiter;
    CHECK(pthread_create(&waiter, NULL, wait_for, job) == 0);
    // The waiter has taken the job once a second wait is refused.
    size_t size = 7;
    const struct timespec moment = {0, 20000000};
    nanosleep(&moment, NULL);
    BAD_STATUS(kvs_job_wait(job, &size), "has been waited for");
    CHECK(size == 7 && kvs_job_poll(job) == 0);
    uint64_t done = 0, total = 0;
    CHECK(kvs_job_progress(job, &done, &total) == KVS_STATUS_OK && done == told.done && total == told.total);
    CHECK(done > 0 && done < total);
    CHECK(kvs_job_cancel(job) == KVS_STATUS_OK);
    told.hold = false;
    CHECK(pthread_join(waiter, NULL) == 0);
    CHECK(kvs_job_poll(job) == 1 && !is_there("slot"));
    kvs_job_free(job);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void *let_go(void *unused) {
    const struct timespec moment = {0, 20000000};
    nanosleep(&moment, NULL);
    told.hold = false;
    return unused;
}

static void a_job_that_is_freed_is_cancelled(void) {
    open_large();
    kvs_snapshot *snapshot = take(0, 0);
    kvs_transfer_params params = watched(true, UINT64_MAX);
    kvs_job *job = NULL;
    CHECK(kvs_snapshot_save_file_start(snapshot, "slot", NULL, 0, &params, &job) == KVS_STATUS_OK);
    wait_until_inside();
    pthread_t other;
    CHECK(pthread_create(&other, NULL, let_go, NULL) == 0);
    kvs_job_free(job);
    // It was waited for, and ended at the call after the one that was under way.
    CHECK(!told.hold && told.n_calls == 1 && !is_there("slot"));
    CHECK(pthread_join(other, NULL) == 0);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void a_save_that_fails_in_the_background_fails_the_wait(void) {
    open_large();
    kvs_snapshot *snapshot = take(0, 0);
    kvs_job *job = NULL;
    CHECK(kvs_snapshot_save_file_start(snapshot, "none/slot", NULL, 0, NULL, &job) == KVS_STATUS_OK);
    size_t size = 7;
    FAILS(kvs_job_wait(job, &size), KVS_STATUS_IO, KVS_STATUS_IO, "none");
    CHECK(size == 7);
    BAD_STATUS(kvs_job_wait(job, &size), "job: has been waited for");
    kvs_job_free(job);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

// Failures

static void a_snapshot_that_does_not_fit_changes_nothing(void) {
    open_large();
    state before = save(ctx, -1);
    kvs_snapshot *sequence = take(0, 0), *whole = take(-1, 0);
    BAD_STATUS(kvs_snapshot_restore(ctx, sequence, 3), "seq_id 3 is out of range [0, 3)");
    BAD_STATUS(kvs_snapshot_restore(ctx, sequence, -2), "seq_id -2 is out of range [0, 3)");
    BAD_STATUS(kvs_snapshot_restore(ctx, sequence, -1), "snapshot: is of a sequence");
    BAD_STATUS(kvs_snapshot_restore(ctx, whole, 0), "snapshot: is of a whole context");
    FAILS(kvs_snapshot_restore(ctx, sequence, 2), KVS_STATUS_NO_SPACE, KVS_STATUS_NO_SPACE, "192 available cells");
    check_unchanged(ctx, before);

    setup s = default_setup(KV_SIZE, 1);
    s.layer.device = test_device();
    kvs_context *narrow = new_context(s);
    FAILS(kvs_snapshot_restore(narrow, sequence, 0), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH, "mismatched key type");
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(narrow), 0) == -1);
    kvs_context_free(narrow);
    kvs_snapshot_free(sequence);
    kvs_snapshot_free(whole);
    kvs_context_free(ctx);
}

static void what_makes_no_snapshot_is_refused(void) {
    open_large();
    kvs_snapshot *snapshot = NULL;
    BAD_STATUS(kvs_snapshot_take(ctx, 3, 0, &snapshot), "seq_id 3 is out of range [0, 3)");
    BAD_STATUS(kvs_snapshot_take(ctx, -2, 0, &snapshot), "seq_id -2 is out of range [0, 3)");
    BAD_STATUS(kvs_snapshot_take(ctx, 0, 8, &snapshot), "unknown state flags 0x8");
    BAD_STATUS(kvs_snapshot_take(ctx, -1, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY, &snapshot),
               "flags: 0x1, a whole context has none");
    CHECK(snapshot == NULL);
    kvs_context_free(ctx);
}

static void a_buffer_that_is_too_small_is_untouched(void) {
    open_large();
    kvs_snapshot *snapshot = take(1, 0);
    const size_t size = kvs_snapshot_size(snapshot);
    uint8_t *dst = calloc(1, size);
    kvs_job *job = NULL;
    FAILS(kvs_snapshot_get_data(snapshot, dst, size - 1), 0, KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    FAILS(kvs_snapshot_get_data_start(snapshot, dst, size - 1, NULL, &job), KVS_STATUS_BUFFER_TOO_SMALL,
          KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    CHECK(job == NULL);
    for (size_t i = 0; i < size; i++) CHECK(dst[i] == 0);
    free(dst);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void a_partial_snapshot_has_no_file(void) {
    open_large();
    kvs_snapshot *snapshot = take(0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    kvs_job *job = NULL;
    BAD(kvs_snapshot_save_file(snapshot, "slot", NULL, 0), 0, "snapshot: is partial");
    BAD_STATUS(kvs_snapshot_save_file_start(snapshot, "slot", NULL, 0, NULL, &job), "snapshot: is partial");
    CHECK(job == NULL && !is_there("slot"));
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

static void a_handle_that_is_none_fails_every_call(void) {
    open_large();
    kvs_snapshot *snapshot = take(1, 0);
    kvs_job *job = NULL;
    uint8_t bytes[8];
    size_t size = 7;
    uint64_t done = 7, total = 7;
    CHECK(kvs_snapshot_save_file_start(snapshot, "slot", NULL, 0, NULL, &job) == KVS_STATUS_OK);
    kvs_snapshot *const no_snapshots[] = {NULL, (kvs_snapshot *)job, (kvs_snapshot *)ctx};
    kvs_job *const no_jobs[] = {NULL, (kvs_job *)snapshot, (kvs_job *)ctx};
    kvs_job *started = NULL;
    for (int i = 0; i < 3; i++) {
        const kvs_snapshot *s = no_snapshots[i];
        NO_HANDLE(kvs_snapshot_size(s), 0);
        NO_HANDLE(kvs_snapshot_device_size(s), 0);
        NO_HANDLE(kvs_snapshot_get_data(s, bytes, sizeof bytes), 0);
        NO_HANDLE(kvs_snapshot_save_file(s, "x", NULL, 0), 0);
        NO_HANDLE_STATUS(kvs_snapshot_restore(ctx, s, 0));
        NO_HANDLE_STATUS(kvs_snapshot_get_data_start(s, bytes, sizeof bytes, NULL, &started));
        NO_HANDLE_STATUS(kvs_snapshot_save_file_start(s, "x", NULL, 0, NULL, &started));
        const kvs_job *j = no_jobs[i];
        NO_HANDLE(kvs_job_poll(j), -1);
        NO_HANDLE_STATUS(kvs_job_progress(j, &done, &total));
        NO_HANDLE_STATUS(kvs_job_cancel(j));
        NO_HANDLE_STATUS(kvs_job_wait(j, &size));
        if (i == 0) continue;
        FAILS_VOID(kvs_snapshot_free(no_snapshots[i]), KVS_STATUS_INVALID_HANDLE, "snapshot is not a live handle");
        FAILS_VOID(kvs_job_free(no_jobs[i]), KVS_STATUS_INVALID_HANDLE, "job is not a live handle");
    }
    kvs_snapshot *taken = NULL;
    NO_HANDLE_STATUS(kvs_snapshot_take(NULL, 0, 0, &taken));
    NO_HANDLE_STATUS(kvs_snapshot_restore(NULL, snapshot, 0));
    CHECK(taken == NULL && started == NULL && size == 7 && done == 7 && total == 7 && !is_there("x"));
    kvs_clear_last_error();
    kvs_snapshot_free(NULL);
    kvs_job_free(NULL);
    kvs_job_free(job);
    kvs_snapshot_free(snapshot);
    CHECK(kvs_last_status() == KVS_STATUS_OK);
    kvs_context_free(ctx);
}

static void a_null_argument_fails_every_call(void) {
    open_large();
    kvs_snapshot *snapshot = take(1, 0);
    kvs_job *job = NULL;
    uint8_t bytes[8];
    uint64_t done = 7;
    BAD_STATUS(kvs_snapshot_take(ctx, 0, 0, NULL), "snapshot_out: NULL");
    BAD(kvs_snapshot_get_data(snapshot, NULL, 8), 0, "dst: NULL");
    BAD(kvs_snapshot_save_file(snapshot, NULL, NULL, 0), 0, "filepath: NULL");
    BAD(kvs_snapshot_save_file(snapshot, "x", NULL, 1), 0, "tokens: NULL");
    BAD_STATUS(kvs_snapshot_get_data_start(snapshot, NULL, 8, NULL, &job), "dst: NULL");
    BAD_STATUS(kvs_snapshot_get_data_start(snapshot, bytes, 8, NULL, NULL), "job_out: NULL");
    BAD_STATUS(kvs_snapshot_save_file_start(snapshot, NULL, NULL, 0, NULL, &job), "filepath: NULL");
    BAD_STATUS(kvs_snapshot_save_file_start(snapshot, "x", NULL, 1, NULL, &job), "tokens: NULL");
    BAD_STATUS(kvs_snapshot_save_file_start(snapshot, "x", NULL, 0, NULL, NULL), "job_out: NULL");
    kvs_transfer_params params = kvs_transfer_default_params();
    params.reserved = 1;
    BAD_STATUS(kvs_snapshot_save_file_start(snapshot, "x", NULL, 0, &params, &job), "reserved: 1");
    params.struct_size = 0;
    BAD_STATUS(kvs_snapshot_get_data_start(snapshot, bytes, 8, &params, &job), "kvs_transfer_params.struct_size");
    CHECK(job == NULL && !is_there("x"));

    CHECK(kvs_snapshot_save_file_start(snapshot, "slot", NULL, 0, NULL, &job) == KVS_STATUS_OK);
    BAD_STATUS(kvs_job_progress(job, NULL, &done), "done_out: NULL");
    BAD_STATUS(kvs_job_progress(job, &done, NULL), "total_out: NULL");
    CHECK(done == 7);
    // The size is not always wanted.
    CHECK(kvs_job_wait(job, NULL) == KVS_STATUS_OK && is_there("slot"));
    kvs_job_free(job);
    kvs_snapshot_free(snapshot);
    kvs_context_free(ctx);
}

MAIN(CASE(a_snapshot_is_what_a_save_was_when_it_was_taken),
     CASE(a_snapshot_is_restored_into_another_sequence_and_another_context),
     CASE(a_snapshot_of_the_whole_context_replaces_all_sequences), CASE(a_snapshot_outlives_its_context),
     CASE(a_file_of_a_snapshot_is_that_of_a_save_when_it_was_taken), CASE(what_a_snapshot_takes_is_where_its_cache_is),
     CASE(a_job_without_tensors_is_done_at_its_end),
     CASE(a_save_in_the_background_has_the_bytes_of_a_blocking_one),
     CASE(a_job_goes_on_without_its_snapshot_and_its_context), CASE(progress_cancels_a_job),
     CASE(a_job_is_polled_and_cancelled_while_another_thread_waits), CASE(a_job_that_is_freed_is_cancelled),
     CASE(a_save_that_fails_in_the_background_fails_the_wait), CASE(a_snapshot_that_does_not_fit_changes_nothing),
     CASE(what_makes_no_snapshot_is_refused), CASE(a_buffer_that_is_too_small_is_untouched),
     CASE(a_partial_snapshot_has_no_file), CASE(a_handle_that_is_none_fails_every_call),
     CASE(a_null_argument_fails_every_call))
