// What a call does when it fails: its return value, its reason, and everything that it leaves alone.

#include "check.h"

static kvs_context *ctx;
static kvs_memory_t mem;

// Sequence 0 has positions 0 to 5, sequence 1 has 0 to 2.
static void open_context(void) {
    ctx = new_context(default_setup(16, 2));
    mem = kvs_get_memory(ctx);
    decode(ctx, 0, 0, 6, NULL);
    decode(ctx, 1, 0, 3, NULL);
}

static void a_null_handle_fails_every_call(void) {
    uint8_t bytes[64] = {0};
    kvs_token token = 0;
    size_t n = 7;
    uint32_t u = 7;
    kvs_pos pos = 0;
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = 1;
    ubatch.pos = &pos;
    kvs_slot *slot = NULL;
    kvs_plane plane;
    kvs_cell cell;
    float row[1];

    NO_HANDLE(kvs_n_stream(NULL), 0);
    NO_HANDLE_STATUS(kvs_set_legacy_rotation(NULL, KVS_LEGACY_ROTATION_PLAIN));
    kvs_transfer_params transfer = kvs_transfer_default_params();
    NO_HANDLE_STATUS(kvs_set_transfer(NULL, &transfer));

    NO_HANDLE(kvs_get_memory(NULL), NULL);
    FAILS_VOID(kvs_memory_clear(NULL, true), KVS_STATUS_INVALID_HANDLE, "");
    NO_HANDLE(kvs_memory_seq_rm(NULL, 0, -1, -1), false);
    FAILS_VOID(kvs_memory_seq_cp(NULL, 0, 1, -1, -1), KVS_STATUS_INVALID_HANDLE, "");
    FAILS_VOID(kvs_memory_seq_keep(NULL, 0), KVS_STATUS_INVALID_HANDLE, "");
    FAILS_VOID(kvs_memory_seq_add(NULL, 0, -1, -1, 1), KVS_STATUS_INVALID_HANDLE, "");
    FAILS_VOID(kvs_memory_seq_div(NULL, 0, -1, -1, 2), KVS_STATUS_INVALID_HANDLE, "");
    NO_HANDLE(kvs_memory_seq_pos_min(NULL, 0), -1);
    NO_HANDLE(kvs_memory_seq_pos_max(NULL, 0), -1);
    NO_HANDLE(kvs_memory_can_shift(NULL), false);

    NO_HANDLE(kvs_state_get_size(NULL), 0);
    NO_HANDLE(kvs_state_get_data(NULL, bytes, sizeof bytes), 0);
    NO_HANDLE(kvs_state_set_data(NULL, bytes, sizeof bytes), 0);
    NO_HANDLE(kvs_state_load_file(NULL, "x", &token, 1, &n), false);
    NO_HANDLE(kvs_state_save_file(NULL, "x", &token, 1), false);
    NO_HANDLE(kvs_state_seq_get_size(NULL, 0), 0);
    NO_HANDLE(kvs_state_seq_get_data(NULL, bytes, sizeof bytes, 0), 0);
    NO_HANDLE(kvs_state_seq_set_data(NULL, bytes, sizeof bytes, 0), 0);
    NO_HANDLE(kvs_state_seq_get_size_ext(NULL, 0, 0), 0);
    NO_HANDLE(kvs_state_seq_get_data_ext(NULL, bytes, sizeof bytes, 0, 0), 0);
    NO_HANDLE(kvs_state_seq_set_data_ext(NULL, bytes, sizeof bytes, 0, 0), 0);
    NO_HANDLE(kvs_state_seq_save_file(NULL, "x", 0, &token, 1), 0);
    NO_HANDLE(kvs_state_seq_load_file(NULL, "x", 0, &token, 1, &n), 0);
    NO_HANDLE(kvs_state_seq_load_file(NULL, "x", 0, NULL, 0, &n), 0);

    NO_HANDLE_STATUS(kvs_slot_prepare(NULL, &ubatch, &slot));
    NO_HANDLE_STATUS(kvs_slot_cells(NULL, 0, &u, 1));
    NO_HANDLE_STATUS(kvs_slot_commit(NULL, NULL));
    NO_HANDLE_STATUS(kvs_n_kv(NULL, 0, 0, 1, &u));
    NO_HANDLE_STATUS(kvs_mask_row(NULL, 0, &ubatch, 0, row, 1));
    NO_HANDLE_STATUS(kvs_kv_plane(NULL, 0, 0, 0, &plane, &plane));
    NO_HANDLE_STATUS(kvs_cell_get(NULL, 0, 0, 0, &cell));
    NO_HANDLE_STATUS(kvs_shift_get(NULL, 0, 0, &u, &pos, 1, &n));
    NO_HANDLE_STATUS(kvs_shift_apply(NULL));
    NO_HANDLE_STATUS(kvs_shift_done(NULL));

    CHECK(n == 7 && u == 7 && slot == NULL);
    FILE *made = fopen("x", "rb");
    CHECK(made == NULL);
}

static void a_null_argument_fails_every_call(void) {
    open_context();
    size_t n = 7;
    kvs_token token = 0;
    kvs_pos pos = 0;
    kvs_ubatch ubatch = kvs_ubatch_default();
    kvs_slot *slot = NULL;
    setup s = default_setup(4, 1);
    state before = save(ctx, -1);

    BAD_STATUS(kvs_rope_params_init(NULL, sizeof(kvs_rope_params)), "kvs_rope_params: NULL");
    BAD_STATUS(kvs_kv_layer_params_init(NULL, sizeof s.layer), "kvs_kv_layer_params: NULL");
    BAD_STATUS(kvs_kv_params_init(NULL, sizeof s.kv), "kvs_kv_params: NULL");
    BAD_STATUS(kvs_section_params_init(NULL, sizeof s.section), "kvs_section_params: NULL");
    BAD_STATUS(kvs_context_params_init(NULL, sizeof s.context), "kvs_context_params: NULL");
    BAD_STATUS(kvs_ubatch_init(NULL, sizeof ubatch), "kvs_ubatch: NULL");
    BAD_STATUS(kvs_transfer_params_init(NULL, sizeof(kvs_transfer_params)), "kvs_transfer_params: NULL");
    BAD_STATUS(kvs_set_transfer(ctx, NULL), "kvs_transfer_params: NULL");

    kvs_context *other = NULL;
    BAD_STATUS(kvs_context_new(NULL, &other), "kvs_context_params: NULL");
    BAD_STATUS(kvs_context_new(&s.context, NULL), "ctx_out: NULL");
    BAD_STATUS(kvs_context_new(&s.context, &other), "sections: NULL");
    s.context.sections = &s.section;
    BAD_STATUS(kvs_context_new(&s.context, &other), "sections[0].kv: NULL, in a section of kind 1");
    s.section.kv = &s.kv;
    BAD_STATUS(kvs_context_new(&s.context, &other), "layers: NULL");
    CHECK(other == NULL);

    BAD(kvs_state_get_data(ctx, NULL, 4), 0, "dst: NULL");
    BAD(kvs_state_set_data(ctx, NULL, 4), 0, "src: NULL");
    BAD(kvs_state_load_file(ctx, NULL, &token, 1, &n), false, "path_session: NULL");
    BAD(kvs_state_load_file(ctx, "x", NULL, 1, &n), false, "tokens_out: NULL");
    BAD(kvs_state_save_file(ctx, NULL, &token, 1), false, "path_session: NULL");
    BAD(kvs_state_save_file(ctx, "x", NULL, 1), false, "tokens: NULL");
    BAD(kvs_state_seq_get_data(ctx, NULL, 4, 0), 0, "dst: NULL");
    BAD(kvs_state_seq_set_data(ctx, NULL, 4, 0), 0, "src: NULL");
    BAD(kvs_state_seq_get_data_ext(ctx, NULL, 4, 0, 0), 0, "dst: NULL");
    BAD(kvs_state_seq_set_data_ext(ctx, NULL, 4, 0, 0), 0, "src: NULL");
    BAD(kvs_state_seq_save_file(ctx, NULL, 0, &token, 1), 0, "filepath: NULL");
    BAD(kvs_state_seq_save_file(ctx, "x", 0, NULL, 1), 0, "tokens: NULL");
    BAD(kvs_state_seq_load_file(ctx, NULL, 0, &token, 1, &n), 0, "filepath: NULL");

    BAD_STATUS(kvs_slot_prepare(ctx, NULL, &slot), "kvs_ubatch: NULL");
    BAD_STATUS(kvs_slot_prepare(ctx, &ubatch, NULL), "slot_out: NULL");
    ubatch.n_tokens = 1;
    BAD_STATUS(kvs_slot_prepare(ctx, &ubatch, &slot), "pos: NULL");
    CHECK(slot == NULL);
    ubatch.pos = &pos;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
    BAD_STATUS(kvs_slot_cells(slot, 0, NULL, 1), "cells: NULL");
    NO_HANDLE_STATUS(kvs_slot_commit(ctx, NULL));
    NO_HANDLE_STATUS(kvs_slot_commit(NULL, slot));
    kvs_slot_free(slot);
    BAD_STATUS(kvs_n_kv(ctx, 0, 0, 1, NULL), "n_kv_out: NULL");
    float row[16];
    BAD_STATUS(kvs_mask_row(ctx, 0, NULL, 0, row, 16), "kvs_ubatch: NULL");
    BAD_STATUS(kvs_mask_row(ctx, 0, &ubatch, 0, NULL, 16), "row: NULL");
    BAD_STATUS(kvs_kv_plane(ctx, 0, 0, 0, NULL, NULL), "k_out: NULL");
    BAD_STATUS(kvs_cell_get(ctx, 0, 0, 0, NULL), "cell_out: NULL");
    BAD_STATUS(kvs_shift_get(ctx, 0, 0, NULL, NULL, 0, NULL), "n_out: NULL");

    CHECK(n == 7);
    check_unchanged(ctx, before);
    kvs_context_free(ctx);
}

static void free_calls_take_null(void) {
    kvs_context_free(NULL);
    kvs_slot_free(NULL);
    CHECK(kvs_last_status() == KVS_STATUS_OK);
    CHECK(kvs_last_error()[0] == '\0');
}

static void arrays_of_no_elements_may_be_null(void) {
    open_context();
    kvs_ubatch ubatch = kvs_ubatch_default();
    kvs_slot *slot = NULL;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
    CHECK(kvs_slot_cells(slot, 0, NULL, 0) == KVS_STATUS_OK);
    kvs_slot_free(slot);
    size_t n = 7;
    CHECK(kvs_shift_get(ctx, 0, 0, NULL, NULL, 0, &n) == KVS_STATUS_OK);
    CHECK(n == 0);
    kvs_context_free(ctx);
}

static void unknown_flag_bits_are_refused(void) {
    open_context();
    state before = save(ctx, -1);
    uint8_t bytes[4096];
    const kvs_state_seq_flags unknown[] = {4, 1 << 17, (kvs_state_seq_flags)1 << 31, 7};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        BAD(kvs_state_seq_get_size_ext(ctx, 0, unknown[i]), 0, "unknown state flags");
        BAD(kvs_state_seq_get_data_ext(ctx, bytes, sizeof bytes, 0, unknown[i]), 0, "unknown state flags");
        BAD(kvs_state_seq_set_data_ext(ctx, bytes, sizeof bytes, 0, unknown[i]), 0, "unknown state flags");
    }
    BAD(kvs_state_seq_get_size_ext(ctx, 0, KVS_STATE_SEQ_FLAGS_APPEND), 0, "APPEND is for calls that restore");
    BAD(kvs_state_seq_get_data_ext(ctx, bytes, sizeof bytes, 0, KVS_STATE_SEQ_FLAGS_APPEND), 0, "APPEND is for calls that restore");
    check_unchanged(ctx, before);
    kvs_context_free(ctx);
}

static void sequence_ids_out_of_range_are_refused(void) {
    open_context();
    state before = save(ctx, -1), sequence = save(ctx, 0);
    const kvs_seq_id bad[] = {-1, 2, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        kvs_seq_id id = bad[i];
        kvs_token token = 0;
        size_t n = 7;
        BAD(kvs_state_seq_get_size(ctx, id), 0, "out of range [0, 2)");
        BAD(kvs_state_seq_get_data(ctx, sequence.data, sequence.size, id), 0, "out of range [0, 2)");
        BAD(kvs_state_seq_set_data(ctx, sequence.data, sequence.size, id), 0, "out of range [0, 2)");
        BAD(kvs_state_seq_save_file(ctx, "x", id, &token, 1), 0, "out of range [0, 2)");
        BAD(kvs_state_seq_load_file(ctx, "x", id, &token, 1, &n), 0, "out of range [0, 2)");
        BAD(kvs_memory_seq_pos_min(mem, id), -1, "out of range [0, 2)");
        BAD(kvs_memory_seq_pos_max(mem, id), -1, "out of range [0, 2)");
        FAILS_VOID(kvs_memory_seq_cp(mem, 0, id, -1, -1), KVS_STATUS_INVALID_ARGUMENT, "out of range");
        FAILS_VOID(kvs_memory_seq_cp(mem, id, 0, -1, -1), KVS_STATUS_INVALID_ARGUMENT, "out of range");
        FAILS_VOID(kvs_memory_seq_keep(mem, id), KVS_STATUS_INVALID_ARGUMENT, "out of range");
        FAILS_VOID(kvs_memory_seq_add(mem, id, -1, -1, 1), KVS_STATUS_INVALID_ARGUMENT, "out of range");
        FAILS_VOID(kvs_memory_seq_div(mem, id, -1, -1, 2), KVS_STATUS_INVALID_ARGUMENT, "out of range");
        if (id > 0) BAD(kvs_memory_seq_rm(mem, id, -1, -1), false, "out of range [0, 2)"); // below 0: all of them

        kvs_pos pos = 0;
        const kvs_seq_id *seq_ids = &bad[i];
        kvs_ubatch ubatch = kvs_ubatch_default();
        ubatch.n_tokens = 1;
        ubatch.pos = &pos;
        ubatch.seq_id = &seq_ids;
        kvs_slot *slot = NULL;
        BAD_STATUS(kvs_slot_prepare(ctx, &ubatch, &slot), "out of range [0, 2)");
        CHECK(slot == NULL);
    }
    free(sequence.data);
    check_unchanged(ctx, before);
    kvs_context_free(ctx);
}

static void indices_out_of_range_are_refused(void) {
    open_context();
    uint32_t u = 7;
    size_t n = 7;
    kvs_plane plane;
    kvs_cell cell;
    BAD_STATUS(kvs_n_kv(ctx, 1, 0, 1, &u), "section");
    BAD_STATUS(kvs_n_kv(ctx, 0, 1, 1, &u), "stream");
    BAD_STATUS(kvs_kv_plane(ctx, 1, 0, 0, &plane, NULL), "section");
    BAD_STATUS(kvs_kv_plane(ctx, 0, 1, 0, &plane, NULL), "stream");
    BAD_STATUS(kvs_kv_plane(ctx, 0, 0, 1, &plane, NULL), "layer");
    BAD_STATUS(kvs_cell_get(ctx, 1, 0, 0, &cell), "section");
    BAD_STATUS(kvs_cell_get(ctx, 0, 1, 0, &cell), "stream");
    BAD_STATUS(kvs_cell_get(ctx, 0, 0, 16, &cell), "cell");
    BAD_STATUS(kvs_shift_get(ctx, 1, 0, NULL, NULL, 0, &n), "section");
    BAD_STATUS(kvs_shift_get(ctx, 0, UINT32_MAX, NULL, NULL, 0, &n), "stream");
    CHECK(u == 7 && n == 7);
    kvs_context_free(ctx);
}

static void a_buffer_that_is_too_small_is_untouched(void) {
    open_context();
    size_t size = kvs_state_seq_get_size(ctx, 0), whole = kvs_state_get_size(ctx);
    uint8_t *bytes = malloc(whole);
    CHECK(bytes != NULL);
    memset(bytes, 0xa5, whole);
    FAILS(kvs_state_seq_get_data(ctx, bytes, size - 1, 0), 0, KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    FAILS(kvs_state_seq_get_data_ext(ctx, bytes, 7, 0, KVS_STATE_SEQ_FLAGS_ON_DEVICE), 0,
          KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    FAILS(kvs_state_get_data(ctx, bytes, whole - 1), 0, KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    for (size_t i = 0; i < whole; i++) CHECK(bytes[i] == 0xa5);
    // A larger one is fine; what is behind the state stays.
    CHECK(kvs_state_seq_get_data(ctx, bytes, whole, 0) == size);
    for (size_t i = size; i < whole; i++) CHECK(bytes[i] == 0xa5);
    free(bytes);
    kvs_context_free(ctx);
}

static void out_parameters_are_untouched_on_failure(void) {
    open_context();
    char path[] = "/tmp/kvstate-abi-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0);
    kvs_token tokens[3] = {1, 2, 3}, room[3] = {-7, -7, -7};
    size_t n = 7;
    CHECK(kvs_state_seq_save_file(ctx, path, 0, tokens, 3) > 0);
    FAILS(kvs_state_seq_load_file(ctx, path, 1, room, 2, &n), 0, KVS_STATUS_BUFFER_TOO_SMALL, "exceeded capacity");
    FAILS(kvs_state_load_file(ctx, path, room, 3, &n), false, KVS_STATUS_UNSUPPORTED_VERSION, "session file");
    FAILS(kvs_state_seq_load_file(ctx, "/no/such/file", 1, room, 3, &n), 0, KVS_STATUS_IO, "/no/such/file");
    FAILS(kvs_state_seq_load_file(ctx, "/no/such/file", 1, NULL, 0, &n), 0, KVS_STATUS_IO, "/no/such/file");
    CHECK(n == 7 && room[0] == -7 && room[1] == -7 && room[2] == -7);
    CHECK(kvs_state_seq_load_file(ctx, path, 1, NULL, 0, &n) > 0 && n == 3);
    CHECK(kvs_state_seq_load_file(ctx, path, 1, room, 3, &n) > 0 && room[2] == 3);
    CHECK(kvs_memory_seq_pos_max(mem, 1) == 5);
    remove(path);
    kvs_context_free(ctx);
}

static void a_context_works_on_after_failed_calls(void) {
    open_context();
    state before = save(ctx, -1), sequence = save(ctx, 0);
    for (int i = 0; i < 3; i++) {
        FAILS(kvs_state_seq_set_data(ctx, sequence.data, sequence.size - 1, 0), 0, KVS_STATUS_TRUNCATED, "truncated");
        FAILS(kvs_state_set_data(ctx, before.data, before.size - 1), 0, KVS_STATUS_TRUNCATED, "truncated");
        FAILS_VOID(kvs_memory_seq_add(mem, 0, 2, -1, 1), KVS_STATUS_CANNOT_SHIFT, "cannot shift positions");
        FAILS_VOID(kvs_memory_seq_div(mem, 0, 2, -1, 0), KVS_STATUS_INVALID_ARGUMENT, "d: 0");
    }
    CHECK(kvs_state_seq_set_data(ctx, sequence.data, sequence.size, 0) == sequence.size);
    state again = save(ctx, 0);
    CHECK(again.size == sequence.size && memcmp(again.data, sequence.data, again.size) == 0);
    free(again.data);
    free(sequence.data);
    check_unchanged(ctx, before);
    kvs_context_free(ctx);
}

static int n_lines;
static char last_line[512];

static void count_lines(int32_t level, const char *text, void *user_data) {
    CHECK(level == KVS_LOG_ERROR);
    CHECK(user_data == &n_lines);
    CHECK(strchr(text, '\n') == NULL);
    snprintf(last_line, sizeof last_line, "%s", text);
    n_lines++;
}

static void each_failure_is_one_log_line(void) {
    open_context();
    CHECK(kvs_log_set(count_lines, &n_lines) == KVS_STATUS_OK);
    CHECK(kvs_state_seq_get_size(ctx, 5) == 0);
    CHECK(n_lines == 1 && strcmp(last_line, kvs_last_error()) == 0);
    CHECK(kvs_context_new(NULL, NULL) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK(n_lines == 2 && strcmp(last_line, kvs_last_error()) == 0);
    kvs_memory_seq_keep(mem, 9);
    CHECK(n_lines == 3 && strcmp(last_line, kvs_last_error()) == 0);
    CHECK(kvs_state_seq_get_size(ctx, 0) > 0); // a success says nothing
    CHECK(n_lines == 3);
    CHECK(kvs_log_set(NULL, NULL) == KVS_STATUS_OK);
    CHECK(kvs_state_seq_get_size(ctx, 5) == 0);
    CHECK(n_lines == 3);
    kvs_context_free(ctx);
}

static void a_success_leaves_the_last_reason(void) {
    open_context();
    CHECK(kvs_last_status() == KVS_STATUS_OK && kvs_last_error()[0] == '\0');
    CHECK(kvs_state_seq_get_size(ctx, 5) == 0);
    CHECK(kvs_state_seq_get_size(ctx, 0) > 0);
    kvs_memory_seq_keep(mem, 0);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "seq_id 5");
    kvs_clear_last_error();
    kvs_memory_seq_keep(mem, 0);
    CHECK(kvs_last_status() == KVS_STATUS_OK && kvs_last_error()[0] == '\0');
    kvs_context_free(ctx);
}

MAIN(CASE(a_null_handle_fails_every_call), CASE(a_null_argument_fails_every_call), CASE(free_calls_take_null),
     CASE(arrays_of_no_elements_may_be_null), CASE(unknown_flag_bits_are_refused),
     CASE(sequence_ids_out_of_range_are_refused), CASE(indices_out_of_range_are_refused),
     CASE(a_buffer_that_is_too_small_is_untouched), CASE(out_parameters_are_untouched_on_failure),
     CASE(a_context_works_on_after_failed_calls), CASE(each_failure_is_one_log_line),
     CASE(a_success_leaves_the_last_reason))
