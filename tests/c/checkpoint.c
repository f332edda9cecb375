// Where a sequence can go on, and checkpoints of it, of caches where TEST_DEVICE says: a CUDA device, or host memory.

#include "check.h"

enum { N_SWA = 8, ROW = 8 };

static kvs_context *ctx;
static kvs_memory_t mem;

// Full attention of 128 cells, then a window of 8 positions in 12: old cells are taken over. One layer each.
static kvs_context *new_iswa(uint32_t n_swa) {
    setup s = default_setup(128, 2);
    s.layer.device = test_device();
    s.kv.layers = &s.layer;
    kvs_kv_params swa = s.kv;
    swa.kv_size = 12;
    swa.swa_type = KVS_SWA_TYPE_STANDARD;
    swa.n_swa = n_swa;
    kvs_section_params sections[2] = {s.section, s.section};
    sections[0].kv = &s.kv;
    sections[1].kv = &swa;
    s.context.sections = sections;
    s.context.n_section = 2;
    kvs_context *made = NULL;
    CHECK(kvs_context_new(&s.context, &made) == KVS_STATUS_OK);
    return made;
}

// A token at a time; K and V of the window's cells are the token's position.
static void generate(kvs_pos begin, kvs_pos end) {
    for (kvs_pos pos = begin; pos < end; pos++) {
        kvs_ubatch ubatch = kvs_ubatch_default();
        ubatch.n_tokens = 1;
        ubatch.pos = &pos;
        kvs_slot *slot = NULL;
        CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK && kvs_slot_commit(ctx, slot) == KVS_STATUS_OK);
        uint32_t cell = 0;
        CHECK(kvs_slot_cells(slot, 1, &cell, 1) == KVS_STATUS_OK);
        kvs_slot_free(slot);
        uint8_t row[ROW];
        memset(row, pos, ROW);
        for (int which = KVS_KV_K; which <= KVS_KV_V; which++) {
            CHECK(kvs_kv_set(ctx, 1, 0, 0, which, (uint64_t)cell * ROW, row, ROW) == KVS_STATUS_OK);
        }
    }
}

// The window's cells hold exactly the positions [begin, end) of sequence 0, each with its own K and V.
static void check_window(kvs_pos begin, kvs_pos end) {
    CHECK(kvs_memory_seq_pos_min(mem, 0) == begin && kvs_memory_seq_pos_max(mem, 0) == end - 1);
    for (uint32_t cell = 0; cell < 12; cell++) {
        kvs_cell found;
        CHECK(kvs_cell_get(ctx, 1, 0, cell, &found) == KVS_STATUS_OK);
        if (found.pos < 0) continue;
        for (int which = KVS_KV_K; which <= KVS_KV_V; which++) {
            uint8_t row[ROW], expected[ROW];
            memset(expected, found.pos, ROW);
            CHECK(kvs_kv_get(ctx, 1, 0, 0, which, (uint64_t)cell * ROW, row, ROW) == KVS_STATUS_OK);
            CHECK(memcmp(row, expected, ROW) == 0);
        }
    }
}

static kvs_checkpoints *new_checkpoints(kvs_checkpoint_memory memory) {
    kvs_checkpoints_params params = kvs_checkpoints_default_params();
    params.memory = memory;
    kvs_checkpoints *checkpoints = NULL;
    CHECK(kvs_checkpoints_new(0, &params, &checkpoints) == KVS_STATUS_OK);
    return checkpoints;
}

// 64 tokens of sequence 0, with checkpoints behind 16, 32 and 48.
static kvs_checkpoints *open_with_checkpoints(kvs_checkpoint_memory memory) {
    ctx = new_iswa(N_SWA);
    mem = kvs_get_memory(ctx);
    kvs_checkpoints *checkpoints = new_checkpoints(memory);
    for (kvs_pos end = 16; end <= 48; end += 16) {
        generate(end - 16, end);
        CHECK(kvs_checkpoints_take(checkpoints, ctx, end) == KVS_STATUS_OK);
    }
    generate(48, 64);
    return checkpoints;
}

static void finish(kvs_checkpoints *checkpoints) {
    kvs_checkpoints_free(checkpoints);
    kvs_context_free(ctx);
}

static kvs_checkpoint checkpoint_at(const kvs_checkpoints *checkpoints, size_t index) {
    kvs_checkpoint checkpoint;
    CHECK(kvs_checkpoints_get(checkpoints, index, &checkpoint) == KVS_STATUS_OK);
    return checkpoint;
}

static void check_verdict(const kvs_checkpoints *checkpoints, size_t index, kvs_pos pos, uint32_t kind, kvs_pos at,
                          const char *text) {
    kvs_checkpoint_verdict verdict;
    CHECK(kvs_checkpoints_verdict(checkpoints, ctx, index, pos, &verdict) == KVS_STATUS_OK);
    CHECK(verdict.kind == kind && verdict.pos == at);
    CHECK(strcmp(verdict.text, text) == 0);
}

static void a_sequence_says_where_it_can_be_rewound(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    CHECK(kvs_memory_can_rewind(mem, 0, 64) && kvs_memory_can_rewind(mem, 0, 59) && kvs_memory_can_rewind(mem, 0, 0));
    CHECK(!kvs_memory_can_rewind(mem, 0, 65) && !kvs_memory_can_rewind(mem, 0, 58));
    CHECK(kvs_memory_rewind_pos(mem, 0, 100) == 64 && kvs_memory_rewind_pos(mem, 0, 60) == 60);
    CHECK(kvs_memory_rewind_pos(mem, 0, 58) == 0 && kvs_memory_rewind_pos(mem, 1, 5) == 0);
    CHECK(kvs_last_status() == KVS_STATUS_OK);
    finish(checkpoints);
}

static void a_sequence_says_why_it_cannot_be_rewound(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    kvs_rewind_obstacle obstacle;
    CHECK(kvs_memory_rewind_obstacle(mem, 0, 40, &obstacle) == KVS_STATUS_OK);
    CHECK(obstacle.kind == KVS_REWIND_CELLS_GONE && obstacle.need_min == 33 && obstacle.need_max == 39);
    CHECK(obstacle.has_min == 52 && obstacle.has_max == 63);
    CHECK(strcmp(obstacle.text, "section swa has positions 52 to 63, and a token at 40 needs positions 33 to 39") == 0);
    CHECK(kvs_memory_rewind_obstacle(mem, 0, 70, &obstacle) == KVS_STATUS_OK);
    CHECK(obstacle.kind == KVS_REWIND_PAST_END && obstacle.has_max == 63);
    CHECK(obstacle.need_min == -1 && obstacle.need_max == -1 && obstacle.has_min == -1);
    CHECK(strcmp(obstacle.text, "position 70 is past the end: the largest position is 63") == 0);
    CHECK(kvs_memory_rewind_obstacle(mem, 0, 60, &obstacle) == KVS_STATUS_OK);
    CHECK(obstacle.kind == KVS_REWIND_POSSIBLE && obstacle.has_max == -1 && obstacle.text[0] == 0);
    finish(checkpoints);
}

static void checkpoints_tell_what_they_cover(void) {
    for (uint32_t memory = KVS_CHECKPOINT_MEMORY_CACHE; memory <= KVS_CHECKPOINT_MEMORY_HOST; memory++) {
        kvs_checkpoints *checkpoints = open_with_checkpoints(memory);
        const size_t size = kvs_state_seq_get_size_ext(ctx, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        CHECK(kvs_checkpoints_count(checkpoints) == 3 && kvs_checkpoints_size(checkpoints) == 3 * size);
        for (size_t i = 0; i < 3; i++) {
            kvs_checkpoint checkpoint = checkpoint_at(checkpoints, i);
            const kvs_pos end = 16 * (kvs_pos)(i + 1);
            CHECK(checkpoint.n_tokens == end && checkpoint.size == size);
            CHECK(checkpoint.pos_min == end - N_SWA && checkpoint.pos_max == end - 1);
        }
        finish(checkpoints);
    }
}

static void a_history_that_diverges_resumes_at_the_best_checkpoint(void) {
    for (uint32_t memory = KVS_CHECKPOINT_MEMORY_CACHE; memory <= KVS_CHECKPOINT_MEMORY_HOST; memory++) {
        kvs_checkpoints *checkpoints = open_with_checkpoints(memory);
        kvs_pos pos = -7;
        int64_t n_tokens = -7;
        CHECK(kvs_checkpoints_resume(checkpoints, ctx, 60, &pos, &n_tokens) == KVS_STATUS_OK);
        CHECK(pos == 60 && n_tokens == -1 && kvs_checkpoints_count(checkpoints) == 3);
        check_window(52, 60);
        CHECK(kvs_checkpoints_resume(checkpoints, ctx, 40, &pos, &n_tokens) == KVS_STATUS_OK);
        CHECK(pos == 32 && n_tokens == 32 && kvs_checkpoints_count(checkpoints) == 2);
        check_window(24, 32);
        // n_tokens is not always wanted; nothing serves here.
        CHECK(kvs_checkpoints_resume(checkpoints, ctx, 10, &pos, NULL) == KVS_STATUS_OK);
        CHECK(pos == 0 && kvs_memory_seq_pos_max(mem, 0) == -1 && kvs_checkpoints_count(checkpoints) == 0);
        finish(checkpoints);
    }
}

static void a_checkpoint_says_why_it_does_not_serve(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_HOST);
    check_verdict(checkpoints, 1, 40, KVS_CHECKPOINT_SERVES, 32, "serves at position 32");
    check_verdict(checkpoints, 2, 40, KVS_CHECKPOINT_PAST_DIVERGENCE, 0,
                  "past the divergence: its largest position is 47, the history diverges at 40");
    CHECK(kvs_memory_seq_rm(mem, 0, 20, -1));
    check_verdict(checkpoints, 1, 40, KVS_CHECKPOINT_MASKED, 0,
                  "section base has positions 0 to 19, and a token at 32 needs positions 0 to 31");
    kvs_context_free(ctx);
    ctx = new_iswa(N_SWA + 1);
    check_verdict(checkpoints, 1, 40, KVS_CHECKPOINT_UNFIT, 0,
                  "mismatched window: the state has Standard, n_swa 8, the cache Standard, n_swa 9 (section swa)");
    finish(checkpoints);
}

static void checkpoints_keep_to_their_number_and_bytes(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    kvs_checkpoints_params params = kvs_checkpoints_default_params();
    CHECK(params.n_max == 32 && params.min_step == 256 && params.max_bytes == 0 && params.memory == 0);
    const size_t size = checkpoint_at(checkpoints, 0).size;
    kvs_checkpoints_free(checkpoints);
    for (int by_bytes = 0; by_bytes <= 1; by_bytes++) {
        params.n_max = by_bytes ? 32 : 2;
        params.max_bytes = by_bytes ? 2 * size : 0;
        CHECK(kvs_checkpoints_new(0, &params, &checkpoints) == KVS_STATUS_OK);
        kvs_memory_clear(mem, false);
        for (kvs_pos pos = 0; pos < 64; pos += 16) {
            generate(pos, pos + 16);
            CHECK(kvs_checkpoints_take(checkpoints, ctx, pos + 16) == KVS_STATUS_OK);
        }
        CHECK(kvs_checkpoints_count(checkpoints) == 2 && kvs_checkpoints_size(checkpoints) == 2 * size);
        CHECK(checkpoint_at(checkpoints, 1).n_tokens == 64);
        CHECK(kvs_checkpoints_truncate(checkpoints, 63) == KVS_STATUS_OK);
        CHECK(kvs_checkpoints_count(checkpoints) == 1);
        kvs_checkpoints_free(checkpoints);
    }
    params.max_bytes = size - 1;
    CHECK(kvs_checkpoints_new(0, &params, &checkpoints) == KVS_STATUS_OK);
    FAILS(kvs_checkpoints_take(checkpoints, ctx, 64), KVS_STATUS_OUT_OF_MEMORY, KVS_STATUS_OUT_OF_MEMORY,
          " does not fit max_bytes: ");
    finish(checkpoints);
}

static void checkpoints_outlive_their_context(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    kvs_context_free(ctx);
    CHECK(checkpoint_at(checkpoints, 2).pos_max == 47);
    ctx = new_iswa(N_SWA);
    mem = kvs_get_memory(ctx);
    generate(0, 64);
    kvs_pos pos = 0;
    CHECK(kvs_checkpoints_resume(checkpoints, ctx, 50, &pos, NULL) == KVS_STATUS_OK && pos == 48);
    check_window(40, 48);
    finish(checkpoints);
}

// The checkpoint at an index as a slot file takes it; its state is in `state`.
static kvs_slot_checkpoint stored_at(const kvs_checkpoints *checkpoints, size_t index, uint8_t *state, size_t size) {
    const kvs_checkpoint checkpoint = checkpoint_at(checkpoints, index);
    CHECK(checkpoint.size <= size);
    CHECK(kvs_checkpoints_get_data(checkpoints, index, state, size) == checkpoint.size);
    kvs_slot_checkpoint stored = kvs_slot_checkpoint_default();
    stored.n_tokens = checkpoint.n_tokens;
    stored.pos_min = checkpoint.pos_min;
    stored.pos_max = checkpoint.pos_max;
    stored.target = state;
    stored.target_size = checkpoint.size;
    return stored;
}

static void checkpoints_go_through_a_slot_file_to_another_context(void) {
    for (kvs_checkpoint_memory memory = KVS_CHECKPOINT_MEMORY_CACHE; memory <= KVS_CHECKPOINT_MEMORY_HOST; memory++) {
        kvs_checkpoints *checkpoints = open_with_checkpoints(memory);
        uint8_t states[3][4096];
        kvs_slot_checkpoint stored[3];
        for (size_t i = 0; i < 3; i++) stored[i] = stored_at(checkpoints, i, states[i], sizeof states[i]);
        kvs_slot_save_params params = kvs_slot_save_default_params();
        params.checkpoints = stored;
        params.n_checkpoint = 3;
        CHECK(kvs_slot_save(ctx, "slot.bin", 0, &params, NULL) == KVS_STATUS_OK);
        finish(checkpoints);

        ctx = new_iswa(N_SWA);
        mem = kvs_get_memory(ctx);
        kvs_slot_result result = kvs_slot_result_default();
        CHECK(kvs_slot_load(ctx, "slot.bin", 0, NULL, &result) == KVS_STATUS_OK && result.n_checkpoint == 3);
        checkpoints = new_checkpoints(memory);
        for (size_t i = 0; i < 3; i++) {
            CHECK(kvs_checkpoints_put(checkpoints, ctx, &result.checkpoints[i]) == KVS_STATUS_OK);
        }
        kvs_slot_result_free(&result);
        CHECK(kvs_checkpoints_count(checkpoints) == 3 && checkpoint_at(checkpoints, 0).pos_min == 16 - N_SWA);
        kvs_pos pos = 0;
        int64_t n_tokens = 0;
        CHECK(kvs_checkpoints_resume(checkpoints, ctx, 40, &pos, &n_tokens) == KVS_STATUS_OK);
        CHECK(pos == 32 && n_tokens == 32);
        check_window(24, 32);
        finish(checkpoints);
    }
}

static void a_checkpoint_that_does_not_belong_to_the_sequence_is_refused(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    uint8_t state_bytes[4096];
    const kvs_slot_checkpoint stored = stored_at(checkpoints, 2, state_bytes, sizeof state_bytes);
    state before = save(ctx, -1);
    kvs_slot_checkpoint other = stored;
    other.pos_max = 46;
    BAD_STATUS(kvs_checkpoints_put(checkpoints, ctx, &other), "pos_max: 46, the state ends at 47");
    other = stored;
    other.pos_min = 48;
    BAD_STATUS(kvs_checkpoints_put(checkpoints, ctx, &other), "pos_min: 48, above pos_max 47");
    other = stored;
    other.n_tokens = -1;
    BAD_STATUS(kvs_checkpoints_put(checkpoints, ctx, &other), "n_tokens: -1, a checkpoint has at least 0");
    other = stored;
    other.struct_size = 0;
    BAD_STATUS(kvs_checkpoints_put(checkpoints, ctx, &other), "kvs_slot_checkpoint.struct_size: 0");
    other = stored;
    other.target = NULL;
    BAD_STATUS(kvs_checkpoints_put(checkpoints, ctx, &other), "target: NULL");
    other = stored;
    other.target_size--;
    FAILS(kvs_checkpoints_put(checkpoints, ctx, &other), KVS_STATUS_TRUNCATED, KVS_STATUS_TRUNCATED, "truncated state: ");
    CHECK(kvs_checkpoints_count(checkpoints) == 3);
    check_unchanged(ctx, before);
    finish(checkpoints);
}

static void parameters_that_make_no_sense_are_refused(void) {
    kvs_checkpoints *checkpoints = NULL;
    kvs_checkpoints_params params = kvs_checkpoints_default_params();
    params.n_max = 0;
    BAD_STATUS(kvs_checkpoints_new(0, &params, &checkpoints), "n_max: 0, at least 1 is possible");
    params = kvs_checkpoints_default_params();
    params.memory = 2;
    BAD_STATUS(kvs_checkpoints_new(0, &params, &checkpoints), "memory: 2, known are 0 and 1");
    params = kvs_checkpoints_default_params();
    params.reserved = 1;
    BAD_STATUS(kvs_checkpoints_new(0, &params, &checkpoints), "reserved: 1, it is 0");
    params.struct_size = 0;
    BAD_STATUS(kvs_checkpoints_new(0, &params, &checkpoints), "kvs_checkpoints_params.struct_size: 0");
    CHECK(checkpoints == NULL);
    BAD_STATUS(kvs_checkpoints_params_init(NULL, sizeof params), "kvs_checkpoints_params: NULL");
    // Without parameters they are the defaults.
    CHECK(kvs_checkpoints_new(0, NULL, &checkpoints) == KVS_STATUS_OK);
    kvs_checkpoints_free(checkpoints);
}

static void arguments_out_of_range_change_nothing(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    state before = save(ctx, -1);
    kvs_checkpoint checkpoint;
    kvs_checkpoint_verdict verdict;
    kvs_rewind_obstacle obstacle;
    kvs_pos pos = 7;
    int64_t n_tokens = 7;
    BAD_STATUS(kvs_checkpoints_take(checkpoints, ctx, -1), "n_tokens: -1, at least 0 is possible");
    BAD_STATUS(kvs_checkpoints_resume(checkpoints, ctx, -1, &pos, &n_tokens), "pos: -1, positions start at 0");
    BAD_STATUS(kvs_checkpoints_get(checkpoints, 3, &checkpoint), "index: 3 is out of range [0, 3)");
    uint8_t bytes[1] = {7};
    BAD(kvs_checkpoints_get_data(checkpoints, 3, bytes, 1), 0, "index: 3 is out of range [0, 3)");
    FAILS(kvs_checkpoints_get_data(checkpoints, 0, bytes, 1), 0, KVS_STATUS_BUFFER_TOO_SMALL, " bytes");
    CHECK(bytes[0] == 7);
    BAD_STATUS(kvs_checkpoints_verdict(checkpoints, ctx, 3, 0, &verdict), "index: 3 is out of range [0, 3)");
    BAD_STATUS(kvs_checkpoints_verdict(checkpoints, ctx, 0, -1, &verdict), "pos: -1, positions start at 0");
    BAD(kvs_memory_can_rewind(mem, 0, -1), false, "pos: -1, positions start at 0");
    BAD(kvs_memory_rewind_pos(mem, 2, 0), -1, "seq_id 2 is out of range [0, 2)");
    BAD_STATUS(kvs_memory_rewind_obstacle(mem, -1, 0, &obstacle), "seq_id -1 is out of range [0, 2)");
    CHECK(pos == 7 && n_tokens == 7 && kvs_checkpoints_count(checkpoints) == 3);
    check_unchanged(ctx, before);
    finish(checkpoints);
}

static void a_handle_that_is_none_fails_every_call(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    kvs_checkpoint checkpoint;
    kvs_checkpoint_verdict verdict;
    kvs_rewind_obstacle obstacle;
    kvs_pos pos = 7;
    uint8_t bytes[4096];
    const kvs_slot_checkpoint stored = stored_at(checkpoints, 0, bytes, sizeof bytes);
    kvs_checkpoints *no_checkpoints[] = {NULL, (kvs_checkpoints *)ctx};
    for (int i = 0; i < 2; i++) {
        NO_HANDLE_STATUS(kvs_checkpoints_take(no_checkpoints[i], ctx, 1));
        NO_HANDLE_STATUS(kvs_checkpoints_resume(no_checkpoints[i], ctx, 1, &pos, NULL));
        NO_HANDLE_STATUS(kvs_checkpoints_truncate(no_checkpoints[i], 0));
        NO_HANDLE(kvs_checkpoints_count(no_checkpoints[i]), 0);
        NO_HANDLE(kvs_checkpoints_size(no_checkpoints[i]), 0);
        NO_HANDLE_STATUS(kvs_checkpoints_get(no_checkpoints[i], 0, &checkpoint));
        NO_HANDLE(kvs_checkpoints_get_data(no_checkpoints[i], 0, bytes, sizeof bytes), 0);
        NO_HANDLE_STATUS(kvs_checkpoints_put(no_checkpoints[i], ctx, &stored));
        NO_HANDLE_STATUS(kvs_checkpoints_verdict(no_checkpoints[i], ctx, 0, 1, &verdict));
    }
    FAILS_VOID(kvs_checkpoints_free((kvs_checkpoints *)ctx), KVS_STATUS_INVALID_HANDLE,
               "checkpoints is not a live handle");
    NO_HANDLE_STATUS(kvs_checkpoints_take(checkpoints, NULL, 1));
    NO_HANDLE_STATUS(kvs_checkpoints_put(checkpoints, NULL, &stored));
    NO_HANDLE_STATUS(kvs_checkpoints_resume(checkpoints, NULL, 1, &pos, NULL));
    NO_HANDLE_STATUS(kvs_checkpoints_verdict(checkpoints, NULL, 0, 1, &verdict));
    NO_HANDLE(kvs_memory_can_rewind(NULL, 0, 0), false);
    NO_HANDLE(kvs_memory_rewind_pos(NULL, 0, 0), -1);
    NO_HANDLE_STATUS(kvs_memory_rewind_obstacle(NULL, 0, 0, &obstacle));
    kvs_clear_last_error();
    kvs_checkpoints_free(NULL);
    CHECK(kvs_last_status() == KVS_STATUS_OK && pos == 7 && kvs_checkpoints_count(checkpoints) == 3);
    finish(checkpoints);
}

static void a_null_argument_fails_every_call(void) {
    kvs_checkpoints *checkpoints = open_with_checkpoints(KVS_CHECKPOINT_MEMORY_CACHE);
    state before = save(ctx, -1);
    BAD_STATUS(kvs_checkpoints_new(0, NULL, NULL), "checkpoints_out: NULL");
    BAD_STATUS(kvs_checkpoints_resume(checkpoints, ctx, 40, NULL, NULL), "pos_out: NULL");
    BAD_STATUS(kvs_checkpoints_get(checkpoints, 0, NULL), "checkpoint_out: NULL");
    BAD(kvs_checkpoints_get_data(checkpoints, 0, NULL, 4096), 0, "dst: NULL");
    BAD_STATUS(kvs_checkpoints_put(checkpoints, ctx, NULL), "kvs_slot_checkpoint: NULL");
    BAD_STATUS(kvs_checkpoints_verdict(checkpoints, ctx, 0, 40, NULL), "verdict_out: NULL");
    BAD_STATUS(kvs_memory_rewind_obstacle(mem, 0, 0, NULL), "obstacle_out: NULL");
    CHECK(kvs_checkpoints_count(checkpoints) == 3);
    check_unchanged(ctx, before);
    finish(checkpoints);
}

MAIN(CASE(a_sequence_says_where_it_can_be_rewound), CASE(a_sequence_says_why_it_cannot_be_rewound),
     CASE(checkpoints_tell_what_they_cover), CASE(a_history_that_diverges_resumes_at_the_best_checkpoint),
     CASE(a_checkpoint_says_why_it_does_not_serve), CASE(checkpoints_keep_to_their_number_and_bytes),
     CASE(checkpoints_outlive_their_context), CASE(checkpoints_go_through_a_slot_file_to_another_context),
     CASE(a_checkpoint_that_does_not_belong_to_the_sequence_is_refused), CASE(parameters_that_make_no_sense_are_refused),
     CASE(arguments_out_of_range_change_nothing), CASE(a_handle_that_is_none_fails_every_call),
     CASE(a_null_argument_fails_every_call))
