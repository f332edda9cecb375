// What an engine does with its cells: slots, planes, memory of its own, shifts.

#include "check.h"

static kvs_slot *prepare(kvs_context *ctx, kvs_pos p) {
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = 1;
    ubatch.pos = &p;
    kvs_slot *slot = NULL;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
    return slot;
}

static void a_slot_is_stale_once_the_cache_has_changed(void) {
    kvs_context *ctx = new_context(default_setup(8, 1));
    kvs_slot *slot = prepare(ctx, 0);
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 0) == -1); // prepare has changed nothing
    CHECK(kvs_slot_commit(ctx, slot) == KVS_STATUS_OK);
    CHECK(kvs_slot_commit(ctx, slot) == KVS_STATUS_STALE);
    CHECK_REASON(KVS_STATUS_STALE, "prepare again");
    kvs_slot_free(slot);

    slot = prepare(ctx, 1);
    CHECK(kvs_memory_seq_rm(kvs_get_memory(ctx), 0, 0, 1));
    state before = save(ctx, -1);
    CHECK(kvs_slot_commit(ctx, slot) == KVS_STATUS_STALE);
    check_unchanged(ctx, before);
    kvs_slot_free(slot);
    kvs_context_free(ctx);
}

static void a_slot_of_another_context_is_refused(void) {
    kvs_context *a = new_context(default_setup(8, 1)), *b = new_context(default_setup(8, 1));
    kvs_slot *slot = prepare(a, 0);
    CHECK(kvs_slot_commit(b, slot) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "another context");
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(b), 0) == -1);
    CHECK(kvs_slot_commit(a, slot) == KVS_STATUS_OK);
    kvs_slot_free(slot);
    kvs_context_free(a);
    kvs_context_free(b);
}

static void a_full_cache_has_no_slot(void) {
    kvs_context *ctx = new_context(default_setup(4, 1));
    decode(ctx, 0, 0, 4, NULL);
    kvs_pos p = 4;
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = 1;
    ubatch.pos = &p;
    kvs_slot *slot = NULL;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_NO_SPACE);
    CHECK(slot == NULL);
    kvs_context_free(ctx);
}

static void the_number_of_cells_asked_for_is_that_of_the_tokens(void) {
    kvs_context *ctx = new_context(default_setup(8, 1));
    kvs_slot *slot = prepare(ctx, 0);
    uint32_t cells[2] = {7, 7};
    CHECK(kvs_slot_cells(slot, 0, cells, 2) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK(kvs_slot_cells(slot, 1, cells, 1) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK(cells[0] == 7 && cells[1] == 7);
    CHECK(kvs_slot_cells(slot, 0, cells, 1) == KVS_STATUS_OK && cells[0] == 0 && cells[1] == 7);
    kvs_slot_free(slot);
    kvs_context_free(ctx);
}

static void a_layer_without_v_has_a_null_plane(void) {
    setup s = default_setup(8, 1);
    s.layer.n_embd_v_gqa = 0;
    kvs_context *ctx = new_context(s);
    kvs_plane k, v;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, &v) == KVS_STATUS_OK);
    CHECK(k.data != NULL && k.ggml_type == KVS_TYPE_F16 && k.n_embd == 4 && k.cell_stride == 8);
    CHECK(v.data == NULL && v.n_embd == 0 && v.cell_stride == 0 && v.channel_stride == 0);
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, NULL) == KVS_STATUS_OK);
    kvs_context_free(ctx);
}

static void a_cell_tells_what_it_holds(void) {
    kvs_context *ctx = new_context(default_setup(8, 256));
    decode(ctx, 0, 3, 2, NULL);
    kvs_memory_seq_cp(kvs_get_memory(ctx), 0, 255, 4, -1);
    kvs_cell cell;
    CHECK(kvs_cell_get(ctx, 0, 0, 1, &cell) == KVS_STATUS_OK);
    CHECK(cell.pos == 4 && cell.shift == 0 && cell.tok == -1 && cell.idx == 1);
    CHECK(cell.seqs[0] == 1 && cell.seqs[1] == 0 && cell.seqs[2] == 0 && cell.seqs[3] == (uint64_t)1 << 63);
    CHECK(kvs_cell_get(ctx, 0, 0, 2, &cell) == KVS_STATUS_OK);
    CHECK(cell.idx == 2 && cell.pos == -1 && cell.seqs[0] == 0 && cell.seqs[3] == 0);
    kvs_context_free(ctx);
}

// Memory of the caller: two streams of 8 cells; rows of K with gaps between cells and streams; V with gaps between
// cells, channels and streams, transposed or not. 0xa5 lies in the gaps.

enum { N_CELL = 8, N_STREAM = 2, N_EMBD = 4, ELEM = 2, CANARY = 0xa5, MEMORY = 2048 };
enum { K_CELL = 24, K_STREAM = 8 * 24 + 40 };
enum { VT_CELL = 6, VT_CHANNEL = 8 * 6 + 14, VT_STREAM = 4 * (8 * 6 + 14) + 50 };
enum { V_CELL = 10, V_STREAM = 8 * 10 + 6 };

typedef struct {
    bool v_trans;
    uint8_t k[MEMORY], v[MEMORY];
} memory;

static setup setup_of_two_streams(bool v_trans) {
    setup s = default_setup(N_CELL, N_STREAM);
    s.context.unified = 0;
    s.kv.v_trans = v_trans;
    return s;
}

static setup adopt(memory *m, bool v_trans) {
    memset(m, CANARY, sizeof *m);
    m->v_trans = v_trans;
    setup s = setup_of_two_streams(v_trans);
    s.layer.k = m->k;
    s.layer.k_cell_stride = K_CELL;
    s.layer.k_stream_stride = K_STREAM;
    s.layer.v = m->v;
    s.layer.v_cell_stride = v_trans ? VT_CELL : V_CELL;
    s.layer.v_channel_stride = v_trans ? VT_CHANNEL : 0;
    s.layer.v_stream_stride = v_trans ? VT_STREAM : V_STREAM;
    return s;
}

static uint8_t *k_byte(memory *m, uint32_t stream, uint32_t cell, uint32_t i) {
    return m->k + stream * K_STREAM + cell * K_CELL + i;
}

static uint8_t *v_byte(memory *m, uint32_t stream, uint32_t cell, uint32_t i) {
    if (m->v_trans) return m->v + stream * VT_STREAM + i / ELEM * VT_CHANNEL + cell * VT_CELL + i % ELEM;
    return m->v + stream * V_STREAM + cell * V_CELL + i;
}

static uint8_t k_value(uint32_t stream, uint32_t cell, uint32_t i) { return (uint8_t)(1 + stream * 97 + cell * 11 + i); }
static uint8_t v_value(uint32_t stream, uint32_t cell, uint32_t i) { return (uint8_t)(128 ^ k_value(stream, cell, i)); }

// Fills the cells that the test uses: 5 in stream 0, 3 in stream 1.
static uint32_t n_used(uint32_t stream) { return stream == 0 ? 5 : 3; }

// Every used cell holds its value (or zero), every other cell `other`, and the gaps hold what they held.
static void check_memory(memory *m, bool zeroed, uint8_t other) {
    static memory expected;
    memset(&expected, CANARY, sizeof expected);
    expected.v_trans = m->v_trans;
    for (uint32_t stream = 0; stream < N_STREAM; stream++) {
        for (uint32_t cell = 0; cell < N_CELL; cell++) {
            for (uint32_t i = 0; i < N_EMBD * ELEM; i++) {
                bool used = cell < n_used(stream) && !zeroed;
                *k_byte(&expected, stream, cell, i) = used ? k_value(stream, cell, i) : other;
                *v_byte(&expected, stream, cell, i) = used ? v_value(stream, cell, i) : other;
            }
        }
    }
    CHECK(memcmp(m->k, expected.k, MEMORY) == 0);
    CHECK(memcmp(m->v, expected.v, MEMORY) == 0);
}

static void adopted_memory_round_trips(bool v_trans) {
    static memory m;
    kvs_context *adopted = new_context(adopt(&m, v_trans));
    kvs_context *managed = new_context(setup_of_two_streams(v_trans));
    CHECK(kvs_n_stream(adopted) == N_STREAM);
    for (uint32_t stream = 0; stream < N_STREAM; stream++) {
        decode(adopted, (kvs_seq_id)stream, 0, n_used(stream), NULL);
        decode(managed, (kvs_seq_id)stream, 0, n_used(stream), NULL);
        kvs_plane k, v, own_k, own_v;
        CHECK(kvs_kv_plane(managed, 0, stream, 0, &k, &v) == KVS_STATUS_OK);
        CHECK(kvs_kv_plane(adopted, 0, stream, 0, &own_k, &own_v) == KVS_STATUS_OK);
        CHECK(own_k.data == k_byte(&m, stream, 0, 0) && own_k.cell_stride == K_CELL && own_k.channel_stride == 0);
        CHECK(own_v.data == v_byte(&m, stream, 0, 0));
        CHECK(own_v.channel_stride == (v_trans ? VT_CHANNEL : 0));
        for (uint32_t cell = 0; cell < n_used(stream); cell++) {
            for (uint32_t i = 0; i < N_EMBD * ELEM; i++) {
                *k_byte(&m, stream, cell, i) = k_value(stream, cell, i);
                *v_byte(&m, stream, cell, i) = v_value(stream, cell, i);
                ((uint8_t *)k.data)[cell * k.cell_stride + i] = k_value(stream, cell, i);
                size_t at = v_trans ? i / ELEM * v.channel_stride + cell * v.cell_stride + i % ELEM
                                    : cell * v.cell_stride + i;
                ((uint8_t *)v.data)[at] = v_value(stream, cell, i);
            }
        }
    }
    check_memory(&m, false, CANARY);

    // The bytes of a state do not depend on where K and V lie.
    state whole = save(adopted, -1), same = save(managed, -1), one = save(adopted, 1), same_one = save(managed, 1);
    CHECK(whole.size == same.size && memcmp(whole.data, same.data, whole.size) == 0);
    CHECK(one.size == same_one.size && memcmp(one.data, same_one.data, one.size) == 0);
    check_memory(&m, false, CANARY);

    // Clearing zeroes all cells; restoring brings back those that the state holds.
    kvs_memory_clear(kvs_get_memory(adopted), true);
    check_memory(&m, true, 0);
    CHECK(kvs_state_set_data(adopted, whole.data, whole.size) == whole.size);
    check_memory(&m, false, 0);
    CHECK(kvs_state_seq_set_data(adopted, one.data, one.size, 1) == one.size);
    check_memory(&m, false, 0);

    kvs_context_free(adopted);
    check_memory(&m, false, 0); // it was never the library's
    kvs_context_free(managed);
    free(whole.data), free(same.data), free(one.data), free(same_one.data);
}

static void adopted_rows_round_trip_and_gaps_are_untouched(void) { adopted_memory_round_trips(false); }
static void adopted_transposed_v_round_trips_and_gaps_are_untouched(void) { adopted_memory_round_trips(true); }

static void strides_that_make_cells_overlap_are_refused(void) {
    static memory m;
    kvs_context *ctx = NULL;
    setup s = adopt(&m, false);
    s.layer.k_cell_stride = N_EMBD * ELEM - 1;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    s = adopt(&m, false);
    s.layer.k_stream_stride = K_CELL;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "stream stride");
    s = adopt(&m, false);
    s.layer.v = NULL;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "sections[0].layers[0].v: NULL");
    CHECK(ctx == NULL);
    check_memory(&m, true, CANARY);
}

// The shift callback.

typedef struct {
    int n_calls, answer;
    uint32_t section, stream, cells[8];
    kvs_pos shifts[8];
    size_t n;
} rotation;

static int32_t rotate(void *user_data, uint32_t section, uint32_t stream, const uint32_t *cells,
                      const kvs_pos *shifts, size_t n) {
    rotation *r = user_data;
    r->n_calls++;
    r->section = section;
    r->stream = stream;
    r->n = n;
    for (size_t i = 0; i < n && i < 8; i++) {
        r->cells[i] = cells[i];
        r->shifts[i] = shifts[i];
    }
    return r->answer;
}

static kvs_context *new_shifting(rotation *r, uint32_t n_seq_max, uint32_t unified) {
    setup s = default_setup(8, n_seq_max);
    s.context.unified = unified;
    s.context.shift = rotate;
    s.context.shift_user_data = r;
    kvs_context *ctx = new_context(s);
    CHECK(kvs_memory_can_shift(kvs_get_memory(ctx)));
    return ctx;
}

static void the_shift_callback_gets_the_shifted_cells_before_a_save(void) {
    rotation r = {0};
    kvs_context *ctx = new_shifting(&r, 2, 0);
    decode(ctx, 1, 0, 6, NULL);
    kvs_memory_seq_add(kvs_get_memory(ctx), 1, 2, 5, 10);
    kvs_memory_seq_add(kvs_get_memory(ctx), 1, 5, 6, -1);
    CHECK(r.n_calls == 0); // nothing is rotated before it has to be
    CHECK(kvs_state_seq_get_size(ctx, 1) > 0 && r.n_calls == 0);
    free(save(ctx, 0).data);
    CHECK(r.n_calls == 0); // another sequence's cells

    free(save(ctx, 1).data);
    CHECK(r.n_calls == 1 && r.section == 0 && r.stream == 1 && r.n == 4);
    CHECK(r.cells[0] == 2 && r.cells[1] == 3 && r.cells[2] == 4 && r.cells[3] == 5);
    CHECK(r.shifts[0] == 10 && r.shifts[1] == 10 && r.shifts[2] == 10 && r.shifts[3] == -1);
    free(save(ctx, 1).data);
    CHECK(r.n_calls == 1); // it is done
    kvs_context_free(ctx);
}

static void a_partial_state_of_full_attention_rotates_nothing(void) {
    rotation r = {0};
    kvs_context *ctx = new_shifting(&r, 1, 1);
    decode(ctx, 0, 0, 6, NULL);
    kvs_memory_seq_add(kvs_get_memory(ctx), 0, 2, -1, 3);
    uint8_t partial[8];
    CHECK(kvs_state_seq_get_data_ext(ctx, partial, sizeof partial, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 8);
    CHECK(r.n_calls == 0);
    kvs_context_free(ctx);
}

static void a_save_fails_if_the_shift_callback_does(void) {
    rotation r = {.answer = 7};
    kvs_context *ctx = new_shifting(&r, 1, 1);
    decode(ctx, 0, 0, 6, NULL);
    kvs_memory_seq_div(kvs_get_memory(ctx), 0, 2, -1, 2);
    uint8_t bytes[1024];
    CHECK(kvs_state_seq_get_data(ctx, bytes, sizeof bytes, 0) == 0);
    CHECK_REASON(KVS_STATUS_SHIFT_FAILED, "the shift callback returned 7");
    r.answer = 0;
    free(save(ctx, 0).data); // the shifts were still pending
    CHECK(r.n_calls == 2 && r.n == 4 && r.shifts[0] == -1 && r.shifts[3] == -3);
    kvs_context_free(ctx);
}

static void nobody_who_rotates_means_no_shifts(void) {
    kvs_context *ctx = new_context(default_setup(8, 1));
    decode(ctx, 0, 0, 6, NULL);
    CHECK(!kvs_memory_can_shift(kvs_get_memory(ctx)));
    kvs_memory_seq_add(kvs_get_memory(ctx), 0, 2, -1, 3);
    CHECK_REASON(KVS_STATUS_CANNOT_SHIFT, "cannot shift positions");
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 0) == 5);
    kvs_context_free(ctx);
}

// Where K of layer 0 lies.
static float *k_row(kvs_context *ctx, uint32_t cell) {
    kvs_plane k, v;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, &v) == KVS_STATUS_OK);
    return (float *)((char *)k.data + cell * k.cell_stride);
}

static kvs_context *new_with_rope(kvs_rope_params *rope) {
    setup s = default_setup(8, 1);
    s.layer.type_k = KVS_TYPE_F32;
    s.layer.rope = rope;
    kvs_context *ctx = new_context(s);
    CHECK(kvs_memory_can_shift(kvs_get_memory(ctx)));
    decode(ctx, 0, 0, 6, NULL);
    float row[4] = {1, 0, 0, 1};
    memcpy(k_row(ctx, 5), row, sizeof row);
    kvs_memory_seq_add(kvs_get_memory(ctx), 0, 5, -1, 2);
    return ctx;
}

static bool is_near(const float *row, float a, float b, float c, float d) {
    const float want[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if (!(row[i] - want[i] < 1e-6f && want[i] - row[i] < 1e-6f)) return false;
    }
    return true;
}

static void k_is_rotated_by_the_rope_of_its_layer(void) {
    const float cos_2 = -0.41614684f, sin_2 = 0.90929743f, cos_1 = 0.54030231f, sin_1 = 0.84147098f;
    const float factors[2] = {1, 0.02f}; // 2 positions, base 10000: the second pair turns by 1 as well
    kvs_rope_params rope = kvs_rope_default_params();
    rope.n_embd_head = 4;
    rope.freq_factors = factors;

    kvs_context *ctx = new_with_rope(&rope);
    CHECK(is_near(k_row(ctx, 5), 1, 0, 0, 1));
    CHECK(kvs_shift_apply(ctx) == KVS_STATUS_OK);
    CHECK(is_near(k_row(ctx, 5), cos_2, sin_2, -sin_1, cos_1));
    size_t n = 9;
    CHECK(kvs_shift_get(ctx, 0, 0, NULL, NULL, 0, &n) == KVS_STATUS_OK && n == 0);
    CHECK(kvs_shift_apply(ctx) == KVS_STATUS_OK); // nothing is left
    CHECK(is_near(k_row(ctx, 5), cos_2, sin_2, -sin_1, cos_1));
    kvs_context_free(ctx);

    // A save rotates what it writes; one head of two elements, halves.
    rope.rope_type = KVS_ROPE_TYPE_NEOX;
    rope.n_rope_dims = 2;
    rope.n_embd_nope = 2;
    rope.freq_factors = NULL;
    rope.freq_scale = 0.5f;
    ctx = new_with_rope(&rope);
    free(save(ctx, 0).data);
    CHECK(is_near(k_row(ctx, 5), 1, 0, -sin_1, cos_1));
    kvs_context_free(ctx);
}

static void rope_that_does_not_fit_is_refused(void) {
    kvs_rope_params rope = kvs_rope_default_params();
    rope.n_embd_head = 4;
    setup s = default_setup(8, 1);
    s.layer.rope = &rope;
    kvs_context *ctx = NULL;

    rope.rope_type = 8;
    BAD_STATUS(try_new_context(&s, &ctx), "sections[0].layers[0].rope.rope_type: 8 is no KVS_ROPE_TYPE_*");
    rope.rope_type = KVS_ROPE_TYPE_NORM;
    const float factor = 1;
    rope.freq_factors = &factor;
    rope.n_rope_dims = 1 << 20; // so many factors are not read
    BAD_STATUS(try_new_context(&s, &ctx), "rope.n_rope_dims: 1048576 behind n_embd_nope 0 in heads of 4");
    rope.freq_factors = NULL;
    rope.n_rope_dims = 0;
    rope.struct_size = 0;
    BAD_STATUS(try_new_context(&s, &ctx), "kvs_rope_params.struct_size");
    rope.struct_size = sizeof rope;
    s.context.shift_by_engine = 1;
    BAD_STATUS(try_new_context(&s, &ctx), "shift_by_engine: given beside rope");
    s.context.shift_by_engine = 0;
    s.context.shift = rotate;
    BAD_STATUS(try_new_context(&s, &ctx), "shift: given beside rope");
    CHECK(ctx == NULL);
}

static void shifts_are_not_applied_by_the_library_where_the_engine_does_it(void) {
    setup s = default_setup(8, 1);
    s.context.shift_by_engine = 1;
    kvs_context *ctx = new_context(s);
    decode(ctx, 0, 0, 6, NULL);
    CHECK(kvs_shift_apply(ctx) == KVS_STATUS_OK); // nothing to do
    kvs_memory_seq_add(kvs_get_memory(ctx), 0, 4, -1, 3);
    FAILS(kvs_shift_apply(ctx), KVS_STATUS_SHIFT_FAILED, KVS_STATUS_SHIFT_FAILED, "2 cells have a pending shift");
    kvs_context_free(ctx);

    rotation r = {0};
    ctx = new_shifting(&r, 1, 1);
    decode(ctx, 0, 0, 6, NULL);
    kvs_memory_seq_add(kvs_get_memory(ctx), 0, 4, -1, 3);
    CHECK(kvs_shift_apply(ctx) == KVS_STATUS_OK && r.n_calls == 1 && r.n == 2);
    kvs_context_free(ctx);
}

static void an_engine_that_rotates_asks_and_says_when_it_has(void) {
    setup s = default_setup(8, 1);
    s.context.shift_by_engine = 1;
    kvs_context *ctx = new_context(s);
    decode(ctx, 0, 0, 6, NULL);
    kvs_memory_seq_add(kvs_get_memory(ctx), 0, 4, -1, 3);

    uint32_t cells[4] = {7, 7, 7, 7};
    kvs_pos shifts[4] = {7, 7, 7, 7};
    size_t n = 0;
    CHECK(kvs_shift_get(ctx, 0, 0, NULL, NULL, 0, &n) == KVS_STATUS_BUFFER_TOO_SMALL && n == 2);
    n = 9;
    CHECK(kvs_shift_get(ctx, 0, 0, NULL, shifts, 4, &n) == KVS_STATUS_INVALID_ARGUMENT && n == 9);
    CHECK(kvs_shift_get(ctx, 0, 0, cells, NULL, 4, &n) == KVS_STATUS_INVALID_ARGUMENT && n == 9);
    CHECK(cells[0] == 7 && shifts[0] == 7);
    CHECK(kvs_shift_get(ctx, 0, 0, cells, shifts, 4, &n) == KVS_STATUS_OK && n == 2);
    CHECK(cells[0] == 4 && cells[1] == 5 && cells[2] == 7);
    CHECK(shifts[0] == 3 && shifts[1] == 3 && shifts[2] == 7);
    kvs_cell cell;
    CHECK(kvs_cell_get(ctx, 0, 0, 4, &cell) == KVS_STATUS_OK && cell.pos == 7 && cell.shift == 3);

    uint8_t bytes[1024];
    CHECK(kvs_state_seq_get_data(ctx, bytes, sizeof bytes, 0) == 0);
    CHECK_REASON(KVS_STATUS_SHIFT_FAILED, "shift_done");
    CHECK(kvs_shift_done(ctx) == KVS_STATUS_OK);
    CHECK(kvs_shift_get(ctx, 0, 0, NULL, NULL, 0, &n) == KVS_STATUS_OK && n == 0);
    CHECK(kvs_state_seq_get_data(ctx, bytes, sizeof bytes, 0) > 0);
    kvs_context_free(ctx);
}

static void a_callback_and_a_promise_of_the_engine_exclude_each_other(void) {
    setup s = default_setup(8, 1);
    s.context.shift = rotate;
    s.context.shift_by_engine = 1;
    kvs_context *ctx = NULL;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "shift_by_engine");
}

MAIN(CASE(a_slot_is_stale_once_the_cache_has_changed), CASE(a_slot_of_another_context_is_refused),
     CASE(a_full_cache_has_no_slot), CASE(the_number_of_cells_asked_for_is_that_of_the_tokens),
     CASE(a_layer_without_v_has_a_null_plane), CASE(a_cell_tells_what_it_holds),
     CASE(adopted_rows_round_trip_and_gaps_are_untouched),
     CASE(adopted_transposed_v_round_trips_and_gaps_are_untouched),
     CASE(strides_that_make_cells_overlap_are_refused),
     CASE(the_shift_callback_gets_the_shifted_cells_before_a_save),
     CASE(a_partial_state_of_full_attention_rotates_nothing), CASE(a_save_fails_if_the_shift_callback_does),
     CASE(nobody_who_rotates_means_no_shifts), CASE(k_is_rotated_by_the_rope_of_its_layer),
     CASE(rope_that_does_not_fit_is_refused),
     CASE(shifts_are_not_applied_by_the_library_where_the_engine_does_it),
     CASE(an_engine_that_rotates_asks_and_says_when_it_has),
     CASE(a_callback_and_a_promise_of_the_engine_exclude_each_other))
