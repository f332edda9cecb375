// Ranges of positions: a conversation in pieces, and the prompt of a file without its reply.

#include "check.h"

enum { N_TOKENS = 12 };

static kvs_context *ctx;
static kvs_memory_t mem;
static kvs_token tokens[N_TOKENS], found[N_TOKENS];

// Tokens of a sequence, each with a K and a V of its own.
static void decode_rows(kvs_seq_id seq_id, kvs_pos p0, uint32_t n) {
    uint32_t cells[64];
    decode(ctx, seq_id, p0, n, cells);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t at = (uint8_t)((uint32_t)p0 + i);
        const uint8_t k[8] = {1, at}, v[8] = {2, at};
        CHECK(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_K, cells[i] * 8, k, 8) == KVS_STATUS_OK);
        CHECK(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_V, cells[i] * 8, v, 8) == KVS_STATUS_OK);
    }
}

static setup setup_of(uint32_t kv_size) {
    setup s = default_setup(kv_size, 3);
    s.layer.device = test_device();
    return s;
}

// Sequence 0 has positions 0 to 11.
static void open_context(void) {
    ctx = new_context(setup_of(64));
    mem = kvs_get_memory(ctx);
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = 100 + i;
    decode_rows(0, 0, N_TOKENS);
}

static state save_range(kvs_pos p0, kvs_pos p1) {
    state s;
    s.size = kvs_state_seq_get_size_range(ctx, 0, p0, p1, KVS_STATE_SEQ_FLAGS_NONE);
    CHECK(s.size > 0);
    s.data = malloc(s.size);
    CHECK(s.data != NULL);
    CHECK(kvs_state_seq_get_data_range(ctx, s.data, s.size, 0, p0, p1, KVS_STATE_SEQ_FLAGS_NONE) == s.size);
    return s;
}

static bool has(kvs_seq_id seq_id, kvs_pos pos_min, kvs_pos pos_max) {
    return kvs_memory_seq_pos_min(mem, seq_id) == pos_min && kvs_memory_seq_pos_max(mem, seq_id) == pos_max;
}

// Forgets which sequence a state is of: after the magic, and of each cell behind n_stream and cell_count.
static void forget_sequence(state s) {
    uint32_t cell_count;
    memcpy(&cell_count, s.data + 12, 4);
    memset(s.data + 4, 0, 4);
    for (uint32_t i = 0; i < cell_count; i++) memset(s.data + 16 + 12 * i + 8, 0, 4);
}

static void check_equal(state a, state b) {
    forget_sequence(a);
    forget_sequence(b);
    CHECK(a.size == b.size && memcmp(a.data, b.data, a.size) == 0);
    free(a.data);
    free(b.data);
}

static size_t append(state s, kvs_seq_id dest) {
    return kvs_state_seq_set_data_ext(ctx, s.data, s.size, dest, KVS_STATE_SEQ_FLAGS_APPEND);
}

static size_t load_prefix(kvs_pos p1, size_t *n, size_t *n_kept) {
    return kvs_state_seq_load_file_range(ctx, "slot.bin", 1, 0, p1, KVS_STATE_SEQ_FLAGS_NONE, found, N_TOKENS, n, n_kept);
}

static void a_range_is_the_state_of_its_positions(void) {
    open_context();
    check_equal(save_range(-1, -1), save(ctx, 0));
    state piece = save_range(3, 7);
    // Header of 8, n_stream and cell_count, 4 cells of 12, v_trans and n_layer, n_rot_k and n_rot_v, and K and V: type, row size and
    // 4 rows of 8.
    CHECK(piece.size == 8 + 8 + 4 * 12 + 16 + 2 * (4 + 8 + 4 * 8));
    CHECK(kvs_state_seq_set_data(ctx, piece.data, piece.size, 1) == piece.size && has(1, 3, 6) && has(0, 0, 11));
    check_equal(piece, save(ctx, 1));
    state none = save_range(12, -1);
    CHECK(kvs_state_seq_set_data(ctx, none.data, none.size, 1) == none.size && has(1, -1, -1));
    free(none.data);
    kvs_context_free(ctx);
}

static void pieces_that_are_added_are_the_whole(void) {
    open_context();
    const kvs_pos ends[4] = {0, 5, 6, 12};
    for (int i = 0; i < 3; i++) {
        state piece = save_range(ends[i], ends[i + 1]);
        CHECK(append(piece, 1) == piece.size && has(1, 0, ends[i + 1] - 1));
        free(piece.data);
    }
    check_equal(save(ctx, 1), save(ctx, 0));
    kvs_context_free(ctx);
}

static void positions_that_meet_are_refused(void) {
    open_context();
    state piece = save_range(4, 9), before = save(ctx, -1);
    FAILS(append(piece, 0), 0, KVS_STATUS_POSITIONS_MEET,
          "position 4 of the state is not behind 11, the last one of the sequence (section kv)");
    check_unchanged(ctx, before);
    free(piece.data);
    kvs_context_free(ctx);
}

static void a_file_of_a_range_is_a_sequence_file(void) {
    open_context();
    const size_t size = kvs_state_seq_save_file_range(ctx, "slot.bin", 0, 5, -1, tokens + 5, 7);
    size_t n = 0;
    CHECK(size > 0 && kvs_state_seq_load_file(ctx, "slot.bin", 1, found, N_TOKENS, &n) == size);
    CHECK(n == 7 && memcmp(found, tokens + 5, 7 * sizeof *tokens) == 0 && has(1, 5, 11));
    check_equal(save(ctx, 1), save_range(5, -1));
    // Behind the first piece.
    state first = save_range(0, 5);
    CHECK(kvs_state_seq_set_data(ctx, first.data, first.size, 2) == first.size);
    free(first.data);
    CHECK(kvs_state_seq_load_file_range(ctx, "slot.bin", 2, 0, -1, KVS_STATE_SEQ_FLAGS_APPEND, found, N_TOKENS, NULL, NULL) == size);
    check_equal(save(ctx, 2), save(ctx, 0));
    kvs_context_free(ctx);
}

static void the_prompt_of_a_file_is_loaded_without_the_reply(void) {
    open_context();
    const size_t size = kvs_state_seq_save_file(ctx, "slot.bin", 0, tokens, N_TOKENS);
    size_t n = 0, n_kept = 0;
    CHECK(size > 0 && load_prefix(7, &n, &n_kept) == size);
    CHECK(n == N_TOKENS && n_kept == 7 && memcmp(found, tokens, sizeof tokens) == 0 && has(1, 0, 6));
    check_equal(save(ctx, 1), save_range(0, 7));
    CHECK(load_prefix(-1, &n, &n_kept) == size && n_kept == N_TOKENS && has(1, 0, 11));
    CHECK(load_prefix(0, NULL, &n_kept) == size && n_kept == 0 && has(1, -1, -1));
    CHECK(load_prefix(99, NULL, NULL) == size && has(1, 0, 11));
    kvs_context_free(ctx);
}

static void a_slot_is_loaded_up_to_a_position(void) {
    open_context();
    kvs_slot_save_params params = kvs_slot_save_default_params();
    params.tokens = tokens;
    params.n_tokens = N_TOKENS;
    CHECK(kvs_slot_save(ctx, "slot.bin", 0, &params, NULL) == KVS_STATUS_OK);
    kvs_slot_load_params load = kvs_slot_load_default_params();
    CHECK(load.p1 == -1);
    load.p1 = 7;
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(ctx, "slot.bin", 1, &load, &result) == KVS_STATUS_OK && has(1, 0, 6));
    CHECK(result.n_tokens == N_TOKENS && result.n_token_kept == 7 && result.pos_min == 0 && result.pos_max == 6);
    kvs_slot_result_free(&result);
    load.p1 = -1;
    CHECK(kvs_slot_load(ctx, "slot.bin", 1, &load, &result) == KVS_STATUS_OK && has(1, 0, 11));
    CHECK(result.n_token_kept == N_TOKENS && result.pos_max == 11);
    kvs_slot_result_free(&result);
    load.p1 = 0;
    CHECK(kvs_slot_load(ctx, "slot.bin", 1, &load, &result) == KVS_STATUS_OK && has(1, -1, -1));
    CHECK(result.n_token_kept == 0 && result.pos_min == -1 && result.pos_max == -1);
    kvs_slot_result_free(&result);
    kvs_context_free(ctx);
}

static void a_prefix_whose_window_is_gone_is_refused(void) {
    setup s = setup_of(8);
    s.kv.swa_type = KVS_SWA_TYPE_STANDARD;
    s.kv.n_swa = 4;
    ctx = new_context(s);
    mem = kvs_get_memory(ctx);
    for (kvs_pos pos = 0; pos < 20; pos++) decode_rows(0, pos, 1);
    CHECK(has(0, 12, 19));
    CHECK(kvs_state_seq_save_file(ctx, "slot.bin", 0, NULL, 0) > 0);
    CHECK(kvs_memory_seq_rm(mem, 0, 19, -1));
    state before = save(ctx, -1);
    const char *reason = "cannot cut at position 14: section kv has positions 12 to 13, and a token at 14 needs positions 11 to 13";
    FAILS(load_prefix(14, NULL, NULL), 0, KVS_STATUS_CANNOT_CUT, reason);
    kvs_slot_load_params load = kvs_slot_load_default_params();
    load.p1 = 14;
    kvs_slot_result result = kvs_slot_result_default();
    FAILS(kvs_slot_load(ctx, "slot.bin", 0, &load, &result), KVS_STATUS_CANNOT_CUT, KVS_STATUS_CANNOT_CUT, reason);
    CHECK(result.memory == NULL);
    check_unchanged(ctx, before);
    load.p1 = 15;
    CHECK(kvs_slot_load(ctx, "slot.bin", 0, &load, &result) == KVS_STATUS_OK && has(0, 12, 14));
    kvs_slot_result_free(&result);
    kvs_context_free(ctx);
}

static void what_makes_no_sense_is_refused(void) {
    open_context();
    CHECK(kvs_state_seq_save_file(ctx, "slot.bin", 0, tokens, N_TOKENS) > 0);
    const size_t size = kvs_state_seq_get_size_range(ctx, 0, 0, 4, KVS_STATE_SEQ_FLAGS_NONE);
    uint8_t data[256] = {7};
    CHECK(size < sizeof data);
    state before = save(ctx, -1);
    const kvs_state_seq_flags append_flag = KVS_STATE_SEQ_FLAGS_APPEND, unknown = 4;
    BAD(kvs_state_seq_get_size_range(ctx, 3, 0, 4, 0), 0, "seq_id 3 is out of range [0, 3)");
    BAD(kvs_state_seq_get_size_range(ctx, 0, 0, 4, append_flag), 0, "APPEND is for calls that restore");
    BAD(kvs_state_seq_get_size_range(ctx, 0, 0, 4, unknown), 0, "unknown state flags 0x4");
    BAD(kvs_state_seq_get_data_range(ctx, data, sizeof data, -1, 0, 4, 0), 0, "seq_id -1 is out of range [0, 3)");
    BAD(kvs_state_seq_get_data_range(ctx, data, sizeof data, 0, 0, 4, append_flag), 0, "APPEND is for calls that restore");
    FAILS(kvs_state_seq_get_data_range(ctx, data, size - 1, 0, 0, 4, 0), 0, KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    CHECK(data[0] == 7);
    BAD(kvs_state_seq_save_file_range(ctx, "other.bin", 3, 0, 4, tokens, 4), 0, "seq_id 3 is out of range [0, 3)");
    FAILS(kvs_state_seq_save_file_range(ctx, "missing/other.bin", 0, 0, 4, tokens, 4), 0, KVS_STATUS_IO, "missing");

    size_t n = 77, n_kept = 88;
    kvs_token out[N_TOKENS] = {55};
    BAD(kvs_state_seq_load_file_range(ctx, "slot.bin", 3, 0, 4, 0, out, N_TOKENS, &n, &n_kept), 0, "seq_id 3 is out of range [0, 3)");
    BAD(kvs_state_seq_load_file_range(ctx, "slot.bin", 1, 0, 4, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY, out, N_TOKENS, &n, &n_kept), 0,
        "flags: PARTIAL_ONLY: a file holds a whole state");
    BAD(kvs_state_seq_load_file_range(ctx, "slot.bin", 1, 0, 4, KVS_STATE_SEQ_FLAGS_ON_DEVICE | append_flag, out, N_TOKENS, &n, &n_kept),
        0, "flags: ON_DEVICE: a file holds a whole state");
    BAD(kvs_state_seq_load_file_range(ctx, "slot.bin", 1, 0, 4, unknown, out, N_TOKENS, &n, &n_kept), 0, "unknown state flags 0x4");
    FAILS(kvs_state_seq_load_file_range(ctx, "slot.bin", 0, 0, 4, append_flag, out, N_TOKENS, &n, &n_kept), 0,
          KVS_STATUS_POSITIONS_MEET, "position 0 of the state is not behind 11");
    FAILS(kvs_state_seq_load_file_range(ctx, "slot.bin", 1, 0, 4, 0, out, 11, &n, &n_kept), 0, KVS_STATUS_BUFFER_TOO_SMALL,
          "token count in sequence state file exceeded capacity! 12 > 11");
    FAILS(kvs_state_seq_load_file_range(ctx, "missing.bin", 1, 0, 4, 0, out, N_TOKENS, &n, &n_kept), 0, KVS_STATUS_IO, "missing.bin");
    BAD(append((state){.data = data, .size = size}, 3), 0, "seq_id 3 is out of range [0, 3)");
    CHECK(n == 77 && n_kept == 88 && out[0] == 55);

    state partial = {data, kvs_state_seq_get_data_ext(ctx, data, sizeof data, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY)};
    CHECK(partial.size == 8);
    BAD(kvs_state_seq_set_data_ext(ctx, data, 8, 1, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY | append_flag), 0,
        "APPEND with PARTIAL_ONLY: only whole states are added to a sequence");
    check_unchanged(ctx, before);
    kvs_context_free(ctx);
}

static void a_null_argument_fails_every_call(void) {
    open_context();
    CHECK(kvs_state_seq_save_file(ctx, "slot.bin", 0, tokens, N_TOKENS) > 0);
    uint8_t data[8];
    NO_HANDLE(kvs_state_seq_get_size_range(NULL, 0, 0, 4, 0), 0);
    NO_HANDLE(kvs_state_seq_get_data_range(NULL, data, sizeof data, 0, 0, 4, 0), 0);
    NO_HANDLE(kvs_state_seq_save_file_range(NULL, "slot.bin", 0, 0, 4, tokens, 4), 0);
    NO_HANDLE(kvs_state_seq_load_file_range(NULL, "slot.bin", 0, 0, 4, 0, found, N_TOKENS, NULL, NULL), 0);
    BAD(kvs_state_seq_get_data_range(ctx, NULL, 8, 0, 0, 4, 0), 0, "dst: NULL");
    BAD(kvs_state_seq_save_file_range(ctx, NULL, 0, 0, 4, tokens, 4), 0, "filepath: NULL");
    BAD(kvs_state_seq_save_file_range(ctx, "slot.bin", 0, 0, 4, NULL, 4), 0, "tokens: NULL");
    BAD(kvs_state_seq_load_file_range(ctx, NULL, 0, 0, 4, 0, found, N_TOKENS, NULL, NULL), 0, "filepath: NULL");
    BAD(kvs_state_seq_load_file_range(ctx, "slot.bin", 0, 0, 4, 0, NULL, N_TOKENS, NULL, NULL), 0, "tokens_out: NULL");
    CHECK(has(0, 0, 11));
    kvs_context_free(ctx);
}

MAIN(CASE(a_range_is_the_state_of_its_positions), CASE(pieces_that_are_added_are_the_whole), CASE(positions_that_meet_are_refused),
     CASE(a_file_of_a_range_is_a_sequence_file), CASE(the_prompt_of_a_file_is_loaded_without_the_reply),
     CASE(a_slot_is_loaded_up_to_a_position), CASE(a_prefix_whose_window_is_gone_is_refused),
     CASE(what_makes_no_sense_is_refused), CASE(a_null_argument_fails_every_call))
