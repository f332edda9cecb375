// How bytes are moved: threads, progress, cancelling.

#include "check.h"

static kvs_context *ctx;
static kvs_memory_t mem;

// What progress was told; it cancels once `cancel_at` bytes are done.
static struct {
    int n_calls, n_ends;
    uint64_t done, total, cancel_at;
} told;

static int32_t progress(void *user_data, uint64_t done, uint64_t total) {
    CHECK(user_data == &told);
    CHECK(done >= told.done && done <= total);
    told.n_calls++;
    told.n_ends += done == total;
    told.done = done;
    told.total = total;
    return done >= told.cancel_at ? 3 : 0;
}

static kvs_transfer_params transfer(uint32_t n_threads, uint64_t cancel_at) {
    memset(&told, 0, sizeof told);
    told.cancel_at = cancel_at;
    kvs_transfer_params params = kvs_transfer_default_params();
    params.n_threads = n_threads;
    params.progress = progress;
    params.progress_user_data = &told;
    return params;
}

static void set_transfer(uint64_t cancel_at) {
    kvs_transfer_params params = transfer(2, cancel_at);
    CHECK(kvs_set_transfer(ctx, &params) == KVS_STATUS_OK);
}

// Sequence 0 has positions 0 to 5, sequence 1 has 0 to 2, and no other cell is free.
static void open_context(void) {
    ctx = new_context(default_setup(9, 2));
    mem = kvs_get_memory(ctx);
    decode(ctx, 0, 0, 6, NULL);
    decode(ctx, 1, 0, 3, NULL);
}

static size_t file_size(const char *path) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    CHECK(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    fclose(file);
    return (size_t)size;
}

static void a_save_and_a_load_report_until_their_end(void) {
    open_context();
    const kvs_token tokens[2] = {5, 6};
    kvs_token room[2];
    set_transfer(UINT64_MAX);
    const size_t size = kvs_state_seq_save_file(ctx, "slot", 0, tokens, 2);
    CHECK(size > 0 && told.n_ends == 1 && told.total == size && told.done == size);
    set_transfer(UINT64_MAX);
    CHECK(kvs_state_seq_load_file(ctx, "slot", 0, room, 2, NULL) == size);
    CHECK(told.n_ends == 1 && told.done == told.total && told.total > 0);
    // Nobody is told any more.
    kvs_transfer_params defaults = kvs_transfer_default_params();
    CHECK(kvs_set_transfer(ctx, &defaults) == KVS_STATUS_OK);
    told.n_calls = 0;
    CHECK(kvs_state_seq_save_file(ctx, "slot", 0, tokens, 2) == size && told.n_calls == 0);
    kvs_context_free(ctx);
}

static void a_cancelled_save_leaves_the_old_file(void) {
    open_context();
    const size_t size = kvs_state_seq_save_file(ctx, "slot", 0, NULL, 0);
    set_transfer(0);
    FAILS(kvs_state_seq_save_file(ctx, "slot", 1, NULL, 0), 0, KVS_STATUS_CANCELLED, "cancelled after");
    FAILS(kvs_state_save_file(ctx, "slot", NULL, 0), false, KVS_STATUS_CANCELLED, "cancelled after");
    CHECK(file_size("slot") == size);
    kvs_context_free(ctx);
}

static void a_cancelled_load_leaves_the_context(void) {
    open_context();
    kvs_token token;
    CHECK(kvs_state_seq_save_file(ctx, "slot", 1, NULL, 0) > 0);
    state before = save(ctx, -1);
    // Over the cells of sequence 0, then into cells that are free.
    for (kvs_seq_id dest = 0; dest < 2; dest++) {
        if (dest == 1) {
            CHECK(kvs_memory_seq_rm(mem, 1, -1, -1));
            free(before.data);
            before = save(ctx, -1);
        }
        set_transfer(0);
        FAILS(kvs_state_seq_load_file(ctx, "slot", dest, &token, 1, NULL), 0, KVS_STATUS_CANCELLED, "cancelled after");
        CHECK(told.n_calls == 1);
    }
    check_unchanged(ctx, before);
    kvs_context_free(ctx);
}

static void a_writer_reports_and_can_be_cancelled(void) {
    uint8_t tensor[64] = {7};
    kvs_state_writer *writer = NULL;
    CHECK(kvs_state_writer_new(0, NULL, &writer) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_write_tensor(writer, NULL, tensor, 0, sizeof tensor) == KVS_STATUS_OK);
    kvs_transfer_params params = transfer(1, UINT64_MAX);
    CHECK(kvs_state_writer_set_transfer(writer, &params) == KVS_STATUS_OK);
    const size_t size = kvs_state_writer_save_file(writer, "slot", NULL, 0, false);
    CHECK(size == 12 + sizeof tensor && told.n_ends == 1 && told.total == size);
    params = transfer(1, 0);
    CHECK(kvs_state_writer_set_transfer(writer, &params) == KVS_STATUS_OK);
    FAILS(kvs_state_writer_save_file(writer, "new", NULL, 0, false), 0, KVS_STATUS_CANCELLED, "cancelled after");
    CHECK(fopen("new", "rb") == NULL);
    kvs_state_writer_free(writer);
}

static void a_reader_takes_threads_and_reports_nothing(void) {
    uint8_t bytes[64], tensor[64] = {0};
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)i;
    kvs_state_reader *reader = NULL;
    CHECK(kvs_state_reader_new(-1, bytes, sizeof bytes, NULL, &reader) == KVS_STATUS_OK);
    kvs_transfer_params params = transfer(2, 0);
    CHECK(kvs_state_reader_set_transfer(reader, &params) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_rewind(reader) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_read_tensor(reader, NULL, tensor, 0, sizeof tensor) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_finish(reader) == KVS_STATUS_OK);
    CHECK(told.n_calls == 0 && memcmp(tensor, bytes, sizeof tensor) == 0);
    kvs_state_reader_free(reader);
}

static void what_is_reserved_is_zero(void) {
    open_context();
    kvs_transfer_params params = kvs_transfer_default_params();
    params.reserved = 1;
    BAD_STATUS(kvs_set_transfer(ctx, &params), "reserved: 1");
    params.reserved = 0;
    params.struct_size--;
    BAD_STATUS(kvs_set_transfer(ctx, &params), "kvs_transfer_params.struct_size");
    kvs_context_free(ctx);
}

MAIN(CASE(a_save_and_a_load_report_until_their_end), CASE(a_cancelled_save_leaves_the_old_file),
     CASE(a_cancelled_load_leaves_the_context), CASE(a_writer_reports_and_can_be_cancelled),
     CASE(a_reader_takes_threads_and_reports_nothing), CASE(what_is_reserved_is_zero))
