// Sections described from C, DSV4 aside; bytes are where TEST_DEVICE says.

#include "fixture.h"

static kvs_context *new_of(const kvs_section_params *sections, uint32_t n_section, uint32_t n_seq_max, uint32_t unified) {
    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = n_seq_max;
    params.unified = unified;
    params.sections = sections;
    params.n_section = n_section;
    kvs_context *ctx = NULL;
    CHECK(kvs_context_new(&params, &ctx) == KVS_STATUS_OK);
    return ctx;
}

// A pair of attention caches whose full-attention half has no layers, and a layer that is recurrent, with an S of 0 elements.
static kvs_context *new_lfm2(uint32_t n_seq_max, uint32_t unified) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = layer.n_embd_v_gqa = 256;
    layer.device = test_device();
    kvs_kv_params base = kvs_kv_default_params(), swa = window(256, 32);
    base.kv_size = 256;
    swa.n_layer = 1;
    swa.layers = &layer;
    kvs_recurrent_layer_params layers[2] = {kvs_recurrent_layer_default_params(), kvs_recurrent_layer_default_params()};
    layers[1].has_r = layers[1].has_s = 1;
    layers[1].n_embd_r = 512;
    layers[1].device = test_device();
    kvs_recurrent_params recurrent = kvs_recurrent_default_params();
    recurrent.n_layer = 2;
    recurrent.layers = layers;
    kvs_section_params sections[] = {kvs_kv_section(&base), kvs_kv_section(&swa), kvs_recurrent_section(&recurrent)};
    return new_of(sections, 3, n_seq_max, unified);
}

static void a_hybrid_writes_again_what_llama_cpp_wrote(void) {
    kvs_context *ctx = new_lfm2(2, 0);
    check_fixture(ctx, "lfm2-dense_kf16_vf16_ns2s_n64_none", 1, KVS_STATE_SEQ_FLAGS_NONE);
    kvs_context_free(ctx);
    ctx = new_lfm2(1, 1);
    check_fixture(ctx, "lfm2-dense_kf16_vf16_n64_none", 0, KVS_STATE_SEQ_FLAGS_NONE);
    check_fixture(ctx, "lfm2-dense_kf16_vf16_n64_partial", 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    kvs_plane plane;
    CHECK(kvs_recurrent_plane(ctx, 2, 1, KVS_RECURRENT_R, &plane) == KVS_STATUS_OK);
    CHECK(plane.device == test_device() && plane.n_embd == 512 && plane.cell_stride == 2048);
    CHECK(plane.ggml_type == KVS_TYPE_F32 && plane.channel_stride == 0 && plane.data != NULL);
    kvs_context_free(ctx);
}

// Recurrent states. The test's engine has one number as its state, the sum of the positions that it has seen and 1 each; every
// element of a row is that number.

enum { N_SEQ = 3, N_RS_SEQ = 2, RECURRENT = 1 };

typedef struct {
    kvs_recurrent_layer_params layers[3];
    kvs_recurrent_params recurrent;
} recurrent_setup;

// R, S and P, then a layer without a state, then R and an S of 0 elements.
static recurrent_setup default_recurrent(void) {
    recurrent_setup s;
    for (int il = 0; il < 3; il++) s.layers[il] = kvs_recurrent_layer_default_params();
    s.layers[0].has_r = s.layers[0].has_s = s.layers[2].has_r = s.layers[2].has_s = 1;
    s.layers[0].n_embd_r = 3;
    s.layers[0].n_embd_s = 5;
    s.layers[0].n_embd_p = 2;
    s.layers[2].n_embd_r = 4;
    s.recurrent = kvs_recurrent_default_params();
    s.recurrent.n_layer = 3;
    s.recurrent.n_rs_seq = N_RS_SEQ;
    return s;
}

// Attention of 32 cells, and recurrent states.
static kvs_status try_new_hybrid(recurrent_setup *r, kvs_context **ctx) {
    setup s = default_setup(32, N_SEQ);
    s.layer.device = test_device();
    s.kv.layers = &s.layer;
    r->recurrent.layers = r->layers;
    kvs_section_params sections[] = {kvs_kv_section(&s.kv), kvs_recurrent_section(&r->recurrent)};
    s.context.sections = sections;
    s.context.n_section = 2;
    return kvs_context_new(&s.context, ctx);
}

static kvs_context *new_hybrid(void) {
    recurrent_setup r = default_recurrent();
    r.layers[0].device = r.layers[2].device = test_device();
    kvs_context *ctx = NULL;
    CHECK(try_new_hybrid(&r, &ctx) == KVS_STATUS_OK);
    return ctx;
}

// A tensor of the recurrent section.
typedef struct {
    uint32_t layer, which, n_embd;
} tensor;

static const tensor TENSORS[] = {{0, KVS_RECURRENT_R, 3}, {0, KVS_RECURRENT_P, 2}, {0, KVS_RECURRENT_S, 5}, {2, KVS_RECURRENT_R, 4}};
enum { N_TENSOR = sizeof TENSORS / sizeof TENSORS[0] };

// What all tensors hold in a row.
static float get_row(kvs_context *ctx, uint32_t row) {
    float first = -1;
    for (int t = 0; t < N_TENSOR; t++) {
        float found[5];
        const size_t size = TENSORS[t].n_embd * sizeof(float);
        CHECK(kvs_recurrent_get(ctx, RECURRENT, TENSORS[t].layer, TENSORS[t].which, row * size, found, size) == KVS_STATUS_OK);
        if (t == 0) first = found[0];
        for (uint32_t i = 0; i < TENSORS[t].n_embd; i++) CHECK(found[i] == first);
    }
    return first;
}

static void set_row(kvs_context *ctx, uint32_t row, float value) {
    const float values[5] = {value, value, value, value, value};
    for (int t = 0; t < N_TENSOR; t++) {
        const size_t size = TENSORS[t].n_embd * sizeof(float);
        CHECK(kvs_recurrent_set(ctx, RECURRENT, TENSORS[t].layer, TENSORS[t].which, row * size, values, size) == KVS_STATUS_OK);
    }
}

static kvs_recurrent_state state_of(kvs_context *ctx, kvs_seq_id seq_id) {
    kvs_recurrent_state s;
    CHECK(kvs_recurrent_state_get(ctx, RECURRENT, seq_id, &s) == KVS_STATUS_OK);
    return s;
}

// The state after the positions [0, end).
static float sum(kvs_pos end) { return (float)(end * (end + 1) / 2); }

static void check_state(kvs_context *ctx, kvs_seq_id seq_id, kvs_pos end) {
    kvs_recurrent_state s = state_of(ctx, seq_id);
    CHECK(s.pos == end - 1 && get_row(ctx, s.row) == sum(end));
}

// Finds cells for n tokens of each of two sequences behind what they hold, of one if they are the same.
static kvs_slot *prepare(kvs_context *ctx, const kvs_seq_id seq_ids[2], uint32_t n) {
    kvs_pos pos[32];
    const kvs_seq_id *of_token[32];
    kvs_ubatch ubatch = kvs_ubatch_default();
    for (int s = 0; s < (seq_ids[0] == seq_ids[1] ? 1 : 2); s++) {
        for (uint32_t i = 0; i < n; i++, ubatch.n_tokens++) {
            pos[ubatch.n_tokens] = kvs_memory_seq_pos_max(kvs_get_memory(ctx), seq_ids[s]) + 1 + (kvs_pos)i;
            of_token[ubatch.n_tokens] = &seq_ids[s];
        }
    }
    ubatch.pos = pos;
    ubatch.seq_id = of_token;
    kvs_slot *slot;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_OK);
    return slot;
}

static void generate(kvs_context *ctx, kvs_seq_id a, kvs_seq_id b, uint32_t n) {
    const kvs_seq_id seq_ids[2] = {a, b};
    kvs_slot *slot = prepare(ctx, seq_ids, n);
    kvs_recurrent_slot rows;
    int64_t sources[2];
    kvs_row_move moves[8];
    CHECK(kvs_slot_recurrent(slot, RECURRENT, &rows) == KVS_STATUS_OK && rows.n_set <= 2 && rows.n_move <= 8);
    CHECK(kvs_slot_sources(slot, RECURRENT, sources, rows.n_set) == KVS_STATUS_OK);
    CHECK(kvs_slot_moves(slot, RECURRENT, moves, rows.n_move) == KVS_STATUS_OK);
    float states[2], moved[8];
    for (uint32_t set = 0; set < rows.n_set; set++) states[set] = sources[set] < 0 ? 0 : get_row(ctx, (uint32_t)sources[set]);
    for (uint32_t i = 0; i < rows.n_move; i++) moved[i] = get_row(ctx, moves[i].from);
    for (uint32_t i = 0; i < rows.n_move; i++) set_row(ctx, moves[i].to, moved[i]);
    for (uint32_t set = 0; set < rows.n_set; set++) {
        kvs_pos pos = kvs_memory_seq_pos_max(kvs_get_memory(ctx), seq_ids[set]);
        for (uint32_t left = n; left-- > 0;) {
            pos++;
            states[set] += (float)(pos + 1);
            if (left <= N_RS_SEQ) set_row(ctx, left * N_SEQ + rows.head + set, states[set]);
        }
    }
    CHECK(kvs_slot_commit(ctx, slot) == KVS_STATUS_OK);
    kvs_slot_free(slot);
}

static void a_slot_says_which_rows_a_ubatch_reads_and_writes(void) {
    kvs_context *ctx = new_hybrid();
    for (kvs_seq_id seq_id = 0; seq_id < N_SEQ; seq_id++) generate(ctx, seq_id, seq_id, 4);
    for (kvs_seq_id seq_id = 0; seq_id < N_SEQ; seq_id++) {
        kvs_recurrent_state s = state_of(ctx, seq_id);
        CHECK(s.pos == 3 && s.row == (uint32_t)seq_id && s.rollback == 0 && s.n_older == N_RS_SEQ);
        check_state(ctx, seq_id, 4);
    }
    // The cell between those of the two sequences makes room, with its rollback planes.
    const kvs_seq_id seq_ids[2] = {0, 2};
    kvs_slot *slot = prepare(ctx, seq_ids, 1);
    kvs_recurrent_slot rows;
    int64_t sources[2];
    kvs_row_move moves[3];
    uint32_t cells[2];
    CHECK(kvs_slot_recurrent(slot, RECURRENT, &rows) == KVS_STATUS_OK);
    CHECK(rows.head == 0 && rows.n_set == 2 && rows.n_move == 3);
    CHECK(kvs_slot_sources(slot, RECURRENT, sources, 2) == KVS_STATUS_OK && sources[0] == 0 && sources[1] == 2);
    CHECK(kvs_slot_moves(slot, RECURRENT, moves, 3) == KVS_STATUS_OK);
    for (uint32_t k = 0; k < 3; k++) CHECK(moves[k].from == k * N_SEQ + 1 && moves[k].to == k * N_SEQ + 2);
    CHECK(kvs_slot_cells(slot, RECURRENT, cells, 2) == KVS_STATUS_OK && cells[0] == 0 && cells[1] == 1);
    kvs_slot_free(slot);

    generate(ctx, 0, 2, 1);
    check_state(ctx, 0, 5);
    check_state(ctx, 1, 4);
    check_state(ctx, 2, 5);
    CHECK(state_of(ctx, 1).row == 2 && state_of(ctx, 2).row == 1);
    // A sequence without a state begins with zeros.
    CHECK(kvs_memory_seq_rm(kvs_get_memory(ctx), 1, -1, -1) && state_of(ctx, 1).pos == -1);
    const kvs_seq_id one[2] = {1, 1};
    slot = prepare(ctx, one, 1);
    CHECK(kvs_slot_sources(slot, RECURRENT, sources, 1) == KVS_STATUS_OK && sources[0] == -1);
    kvs_slot_free(slot);
    kvs_context_free(ctx);
}

static void the_end_is_cut_off_as_far_as_there_are_rollback_planes(void) {
    kvs_context *ctx = new_hybrid();
    kvs_memory_t mem = kvs_get_memory(ctx);
    CHECK(kvs_memory_max_cut(mem, 1) == INT32_MAX);
    generate(ctx, 1, 1, 8);
    CHECK(kvs_memory_max_cut(mem, 1) == 2);
    state before = save(ctx, -1);
    kvs_clear_last_error();
    CHECK(!kvs_memory_can_seq_rm(mem, 1, 5, -1) && !kvs_memory_seq_rm(mem, 1, 5, -1));
    CHECK(kvs_memory_can_seq_rm(mem, 1, 2, 4) && kvs_memory_can_seq_rm(mem, 1, 6, -1));
    CHECK(!kvs_memory_can_seq_rm(mem, -1, 6, -1) && kvs_memory_can_seq_rm(mem, -1, -1, -1));
    CHECK(kvs_last_status() == KVS_STATUS_OK);
    check_unchanged(ctx, before);

    CHECK(kvs_memory_seq_rm(mem, 1, 6, -1) && kvs_memory_seq_pos_max(mem, 1) == 5);
    kvs_recurrent_state s = state_of(ctx, 1);
    CHECK(s.rollback == 2 && s.row == 2 * N_SEQ && s.n_older == 0 && kvs_memory_max_cut(mem, 1) == 0);
    check_state(ctx, 1, 6);
    CHECK(!kvs_memory_can_seq_rm(mem, 1, 5, -1));
    // A state is that of the rollback plane, and a restored one has none pending.
    state cut = save(ctx, 1);
    CHECK(kvs_state_seq_set_data(ctx, cut.data, cut.size, 2) == cut.size);
    free(cut.data);
    CHECK(state_of(ctx, 2).rollback == 0);
    check_state(ctx, 2, 6);
    generate(ctx, 1, 2, 1);
    check_state(ctx, 1, 7);
    check_state(ctx, 2, 7);
    CHECK(state_of(ctx, 1).rollback == 0);
    BAD(kvs_memory_can_seq_rm(mem, 3, 0, -1), false, "seq_id 3 is out of range [0, 3)");
    BAD(kvs_memory_max_cut(mem, 3), -1, "seq_id 3 is out of range [0, 3)");
    kvs_context_free(ctx);
}

static void a_hybrid_resumes_at_a_checkpoint(void) {
    kvs_context *ctx = new_hybrid();
    kvs_checkpoints *checkpoints = NULL;
    CHECK(kvs_checkpoints_new(0, NULL, &checkpoints) == KVS_STATUS_OK);
    for (kvs_pos end = 8; end <= 16; end += 8) {
        generate(ctx, 0, 0, 8);
        CHECK(kvs_checkpoints_take(checkpoints, ctx, end) == KVS_STATUS_OK);
    }
    kvs_checkpoint first, second;
    CHECK(kvs_checkpoints_get(checkpoints, 0, &first) == KVS_STATUS_OK);
    CHECK(kvs_checkpoints_get(checkpoints, 1, &second) == KVS_STATUS_OK);
    // It does not grow with the history, and has nothing of attention.
    CHECK(first.size == second.size && first.pos_min == 7 && first.pos_max == 7);
    generate(ctx, 0, 0, 8);
    CHECK(!kvs_memory_can_rewind(kvs_get_memory(ctx), 0, 12));
    kvs_pos pos = -1;
    int64_t n_tokens = -1;
    CHECK(kvs_checkpoints_resume(checkpoints, ctx, 12, &pos, &n_tokens) == KVS_STATUS_OK && pos == 8 && n_tokens == 8);
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 0) == 7);
    check_state(ctx, 0, 8);
    generate(ctx, 0, 0, 4);
    check_state(ctx, 0, 12);
    kvs_checkpoints_free(checkpoints);
    kvs_context_free(ctx);
}

static void bytes_of_recurrent_states_that_are_not_there_are_refused(void) {
    kvs_context *ctx = new_hybrid();
    float row[5] = {7};
    // 9 rows of 3 elements.
    BAD_STATUS(kvs_recurrent_get(ctx, RECURRENT, 0, KVS_RECURRENT_R, 104, row, 8), "offset: 8 bytes at 104 of a plane of 108");
    BAD_STATUS(kvs_recurrent_set(ctx, RECURRENT, 0, KVS_RECURRENT_R, 108, row, 1), "offset: 1 bytes at 108 of a plane of 108");
    BAD_STATUS(kvs_recurrent_get(ctx, RECURRENT, 0, KVS_RECURRENT_R, UINT64_MAX, row, 8), "of a plane of 108");
    BAD_STATUS(kvs_recurrent_get(ctx, 0, 0, 0, 0, row, 4), "section: 0 is kv, not recurrent");
    BAD_STATUS(kvs_recurrent_set(ctx, 2, 0, 0, 0, row, 4), "section: 2 is out of range [0, 2)");
    BAD_STATUS(kvs_recurrent_set(ctx, RECURRENT, 3, 0, 0, row, 4), "layer: 3 is out of range [0, 3)");
    BAD_STATUS(kvs_recurrent_get(ctx, RECURRENT, 0, 3, 0, row, 4), "which: 3 is no KVS_RECURRENT_*");
    BAD_STATUS(kvs_recurrent_set(ctx, RECURRENT, 0, 3, 0, row, 4), "which: 3 is no KVS_RECURRENT_*");
    BAD_STATUS(kvs_recurrent_get(ctx, RECURRENT, 1, KVS_RECURRENT_R, 0, row, 4), "which: R, of which layer 1 has no elements");
    BAD_STATUS(kvs_recurrent_set(ctx, RECURRENT, 2, KVS_RECURRENT_S, 0, row, 4), "which: S, of which layer 2 has no elements");
    BAD_STATUS(kvs_recurrent_get(ctx, RECURRENT, 0, 0, 0, NULL, 4), "dst: NULL");
    BAD_STATUS(kvs_recurrent_set(ctx, RECURRENT, 0, 0, 0, NULL, 4), "src: NULL");
    CHECK(row[0] == 7);
    CHECK(kvs_recurrent_get(ctx, RECURRENT, 0, KVS_RECURRENT_R, 0, row, 4) == KVS_STATUS_OK && row[0] == 0);
    kvs_context_free(ctx);
}

static void states_of_the_caller_are_read_and_written_where_they_are(void) {
    static float r0[N_SEQ * 3 * 3], s0[N_SEQ * 3 * 5], p0[N_SEQ * 3 * 2], r2[N_SEQ * 3 * 4];
    recurrent_setup r = default_recurrent();
    r.layers[0].r = r0;
    r.layers[0].s = s0;
    r.layers[0].p = p0;
    r.layers[2].r = r2;
    kvs_context *ctx = NULL;
    CHECK(try_new_hybrid(&r, &ctx) == KVS_STATUS_OK);
    kvs_context *managed = new_hybrid();
    generate(ctx, 2, 2, 4);
    generate(managed, 2, 2, 4);
    CHECK(r0[0] == sum(4) && s0[4] == sum(4) && p0[1] == sum(4) && r2[3] == sum(4) && r0[3] == 0);
    state own = save(ctx, 2);
    check_unchanged(managed, save(ctx, -1));
    CHECK(kvs_state_seq_set_data(ctx, own.data, own.size, 0) == own.size);
    CHECK(state_of(ctx, 0).row == 1 && r0[3] == sum(4) && r2[7] == sum(4));
    free(own.data);
    kvs_context_free(managed);
    kvs_context_free(ctx);
}

static void recurrent_states_that_make_no_sense_are_refused(void) {
    static float memory[64];
    const struct {
        size_t field;
        uint32_t value;
        const char *reason;
    } cases[] = {
#define FIELD(name) offsetof(kvs_recurrent_layer_params, name)
        {FIELD(has_r), 2, "sections[1].layers[0].has_r: 2, it is 0 or 1"},
        {FIELD(has_s), 3, "sections[1].layers[0].has_s: 3, it is 0 or 1"},
        {FIELD(has_r), 0, "sections[1].layers[0].n_embd_r: 3, while has_r is 0"},
        {FIELD(has_s), 0, "sections[1].layers[0].n_embd_s: 5, while has_s is 0"},
        {FIELD(type_r), 999, "sections[1].layers[0].type_r: 999 is no ggml type"},
        {FIELD(type_s), 999, "sections[1].layers[0].type_s: 999 is no ggml type"},
        {FIELD(type_s), KVS_TYPE_Q8_0, "recurrent.layer 0.s.n_embd: 5 is no multiple of the 32 elements of a q8_0 block"},
        {FIELD(device), (uint32_t)-2, "sections[1].layers[0].device: -2, it is KVS_DEVICE_HOST or the number of a device"},
#undef FIELD
    };
    kvs_context *ctx = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        recurrent_setup r = default_recurrent();
        memcpy((uint8_t *)&r.layers[0] + cases[i].field, &cases[i].value, sizeof cases[i].value);
        BAD_STATUS(try_new_hybrid(&r, &ctx), cases[i].reason);
    }
    recurrent_setup r = default_recurrent();
    r.layers[0].has_r = r.layers[0].n_embd_r = 0;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[0].n_embd_p: 2, while has_r is 0");
    r = default_recurrent();
    r.layers[1].r = memory;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[1].r: given, while n_embd_r is 0");
    r = default_recurrent();
    r.layers[2].s = memory;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[2].s: given, while n_embd_s is 0");
    r = default_recurrent();
    r.layers[1].p = memory;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[1].p: given, while n_embd_p is 0");
    r = default_recurrent();
    r.layers[0].r = memory;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[0].s: NULL, while other layers of the section are adopted");
    r.layers[0].type_r = KVS_TYPE_Q8_0;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[0].n_embd_r: 3 elements are no whole blocks of 8 (q8_0)");
    r = default_recurrent();
    r.recurrent.n_rs_seq = UINT32_MAX;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "recurrent.n_rs_seq: 4294967295 rollback planes of 3 rows");
    r.layers[0].r = memory;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].n_rs_seq: 4294967295 rollback planes of 3 rows");
    r = default_recurrent();
    r.layers[1].struct_size = 8;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "sections[1].layers[1].struct_size: 8");
    r.layers[0].struct_size = 8;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "kvs_recurrent_layer_params.struct_size: 8");
    r = default_recurrent();
    r.recurrent.struct_size = 8;
    BAD_STATUS(try_new_hybrid(&r, &ctx), "kvs_recurrent_params.struct_size: 8");
    CHECK(ctx == NULL);
}

// Indexers and shared layers

// MLA attention, and its lightning indexer on the same cells.
static kvs_status try_new_dsa(int32_t mirrors, uint32_t reserved, kvs_context **ctx) {
    setup s = default_setup(16, 2);
    s.layer.n_embd_v_gqa = 0;
    s.layer.device = test_device();
    s.kv.layers = &s.layer;
    kvs_kv_params lid = s.kv;
    lid.mirrors = mirrors;
    lid.reserved = reserved;
    kvs_section_params sections[] = {kvs_kv_section(&s.kv), kvs_kv_section(&lid)};
    s.context.sections = sections;
    s.context.n_section = 2;
    return kvs_context_new(&s.context, ctx);
}

static void an_indexer_sits_on_the_cells_of_its_attention_cache(void) {
    kvs_context *ctx = NULL;
    CHECK(try_new_dsa(0, 0, &ctx) == KVS_STATUS_OK);
    kvs_memory_t mem = kvs_get_memory(ctx);
    // The cells of sequence 0 lie between those of sequence 1.
    for (kvs_pos pos = 0; pos < 6; pos++) {
        decode(ctx, 0, pos, 1, NULL);
        decode(ctx, 1, pos, 1, NULL);
    }
    for (uint64_t cell = 0; cell < 12; cell++) {
        uint8_t row[8];
        memset(row, (int)cell, sizeof row);
        CHECK(kvs_kv_set(ctx, 1, 0, 0, KVS_KV_K, 8 * cell, row, 8) == KVS_STATUS_OK);
    }
    state blob = save(ctx, 0);
    CHECK(kvs_memory_seq_rm(mem, 0, -1, -1) && kvs_memory_seq_rm(mem, 1, 5, -1));
    CHECK(kvs_state_seq_set_data(ctx, blob.data, blob.size, 0) == blob.size);
    for (uint32_t cell = 0; cell < 16; cell++) {
        kvs_cell attention, indexer;
        CHECK(kvs_cell_get(ctx, 0, 0, cell, &attention) == KVS_STATUS_OK);
        CHECK(kvs_cell_get(ctx, 1, 0, cell, &indexer) == KVS_STATUS_OK);
        CHECK(attention.pos == indexer.pos && attention.seqs[0] == indexer.seqs[0]);
        if (indexer.seqs[0] != 1) continue;
        uint8_t row[8];
        CHECK(kvs_kv_get(ctx, 1, 0, 0, KVS_KV_K, 8 * (uint64_t)cell, row, 8) == KVS_STATUS_OK);
        CHECK(row[0] == 2 * indexer.pos && row[7] == 2 * indexer.pos);
    }
    free(blob.data);
    kvs_context_free(ctx);

    ctx = NULL;
    BAD_STATUS(try_new_dsa(-2, 0, &ctx), "sections[1].mirrors: -2, it is -1 or the index of a section");
    BAD_STATUS(try_new_dsa(1, 0, &ctx), "mirrors: 1 is no attention cache before section 1");
    BAD_STATUS(try_new_dsa(2, 0, &ctx), "mirrors: 2 is no attention cache before section 1");
    BAD_STATUS(try_new_dsa(INT32_MAX, 0, &ctx), "mirrors: 2147483647 is no attention cache before section 1");
    BAD_STATUS(try_new_dsa(-1, 1, &ctx), "sections[1].reserved: 1, it is 0");
    CHECK(ctx == NULL);
}

static void a_shared_section_has_nothing_in_a_state(void) {
    setup s = default_setup(16, 1);
    s.kv.layers = &s.layer;
    kvs_section_params sections[] = {kvs_kv_section(&s.kv), kvs_shared_section()};
    kvs_context *draft = new_of(sections, 2, 1, 1), *alone = new_of(sections, 1, 1, 1);
    CHECK(kvs_section_kind(draft, 0) == KVS_SECTION_KV && kvs_section_kind(draft, 1) == KVS_SECTION_SHARED);
    decode(draft, 0, 0, 5, NULL);
    decode(alone, 0, 0, 5, NULL);
    state blob = save(draft, 0);
    check_unchanged(alone, save(draft, -1));
    CHECK(kvs_state_seq_set_data(draft, blob.data, blob.size, 0) == blob.size);
    free(blob.data);
    kvs_context_free(alone);
    kvs_context_free(draft);
}

// Arguments

static void a_section_is_described_by_what_its_kind_names(void) {
    setup s = default_setup(16, 1);
    s.kv.layers = &s.layer;
    recurrent_setup r = default_recurrent();
    r.recurrent.layers = r.layers;
    kvs_dsv4_params dsv4 = kvs_dsv4_default_params();
    kvs_section_params section = kvs_section_default_params();
    s.context.sections = &section;
    kvs_context *ctx = NULL;
    for (uint32_t kind = 0; kind <= 5; kind += 5) {
        section.kind = kind;
        BAD_STATUS(kvs_context_new(&s.context, &ctx), kind ? "sections[0].kind: 5 is no" : "sections[0].kind: 0 is no");
    }
    section = kvs_recurrent_section(NULL);
    BAD_STATUS(kvs_context_new(&s.context, &ctx), "sections[0].recurrent: NULL, in a section of kind 2");
    section = kvs_dsv4_section(NULL);
    BAD_STATUS(kvs_context_new(&s.context, &ctx), "sections[0].dsv4: NULL, in a section of kind 4");
    section = kvs_shared_section();
    section.kv = &s.kv;
    BAD_STATUS(kvs_context_new(&s.context, &ctx), "sections[0].kv: given, in a section of kind 3");
    section = kvs_kv_section(&s.kv);
    section.recurrent = &r.recurrent;
    BAD_STATUS(kvs_context_new(&s.context, &ctx), "sections[0].recurrent: given, in a section of kind 1");
    section = kvs_recurrent_section(&r.recurrent);
    section.dsv4 = &dsv4;
    BAD_STATUS(kvs_context_new(&s.context, &ctx), "sections[0].dsv4: given, in a section of kind 2");
    CHECK(ctx == NULL);
}

static void arguments_that_make_no_sense_fail_every_call(void) {
    kvs_context *ctx = new_hybrid();
    const kvs_seq_id one[2] = {0, 0};
    kvs_slot *slot = prepare(ctx, one, 1);
    kvs_recurrent_slot rows = {7, 7, 7};
    kvs_recurrent_state s = {7, 7, 7, 7};
    kvs_row_move moves[1];
    int64_t sources[1] = {7};
    kvs_plane plane;
    plane.n_embd = 7;
    uint32_t rollback = 7;
    BAD(kvs_section_kind(ctx, 2), 0, "section: 2 is out of range [0, 2)");
    BAD_STATUS(kvs_slot_recurrent(slot, 0, &rows), "section: 0 is no recurrent section of the slot");
    BAD_STATUS(kvs_slot_sources(slot, 2, sources, 1), "section: 2 is no recurrent section of the slot");
    BAD_STATUS(kvs_slot_sources(slot, RECURRENT, sources, 2), "n: 2, n_set is 1");
    BAD_STATUS(kvs_slot_moves(slot, RECURRENT, moves, 1), "n: 1, n_move is 0");
    BAD_STATUS(kvs_recurrent_state_get(ctx, 0, 0, &s), "section: 0 is kv, not recurrent");
    BAD_STATUS(kvs_recurrent_state_get(ctx, RECURRENT, 3, &s), "seq_id 3 is out of range [0, 3)");
    BAD_STATUS(kvs_recurrent_plane(ctx, 0, 0, 0, &plane), "section: 0 is kv, not recurrent");
    BAD_STATUS(kvs_recurrent_plane(ctx, RECURRENT, 3, 0, &plane), "layer: 3 is out of range [0, 3)");
    BAD_STATUS(kvs_recurrent_plane(ctx, RECURRENT, 0, 3, &plane), "which: 3 is no KVS_RECURRENT_*");
    BAD_STATUS(kvs_slot_recurrent(slot, RECURRENT, NULL), "recurrent_out: NULL");
    BAD_STATUS(kvs_slot_sources(slot, RECURRENT, NULL, 1), "rows: NULL");
    BAD_STATUS(kvs_recurrent_state_get(ctx, RECURRENT, 0, NULL), "state_out: NULL");
    BAD_STATUS(kvs_recurrent_plane(ctx, RECURRENT, 0, 0, NULL), "plane_out: NULL");
    NO_HANDLE(kvs_section_kind(NULL, 0), 0);
    NO_HANDLE(kvs_memory_can_seq_rm(NULL, 0, 0, -1), false);
    NO_HANDLE(kvs_memory_max_cut(NULL, 0), -1);
    NO_HANDLE_STATUS(kvs_slot_recurrent(NULL, RECURRENT, &rows));
    NO_HANDLE_STATUS(kvs_slot_sources((kvs_slot *)ctx, RECURRENT, sources, 1));
    NO_HANDLE_STATUS(kvs_slot_moves(NULL, RECURRENT, moves, 0));
    NO_HANDLE_STATUS(kvs_recurrent_state_get(NULL, RECURRENT, 0, &s));
    NO_HANDLE_STATUS(kvs_recurrent_plane(NULL, RECURRENT, 0, 0, &plane));
    NO_HANDLE_STATUS(kvs_recurrent_get(NULL, RECURRENT, 0, 0, 0, sources, 4));
    NO_HANDLE_STATUS(kvs_recurrent_set(NULL, RECURRENT, 0, 0, 0, sources, 4));
    NO_HANDLE_STATUS(kvs_dsv4_get(NULL, 0, 0, 0, 0, 0, 0, sources, 4));
    NO_HANDLE_STATUS(kvs_dsv4_set(NULL, 0, 0, 0, 0, 0, 0, sources, 4));
    NO_HANDLE_STATUS(kvs_dsv4_plane(NULL, 0, 0, 0, 0, 0, &plane));
    NO_HANDLE_STATUS(kvs_dsv4_rollback(NULL, 0, &rollback));
    CHECK(rows.head == 7 && s.pos == 7 && sources[0] == 7 && plane.n_embd == 7 && rollback == 7);
    BAD_STATUS(kvs_recurrent_params_init(NULL, sizeof(kvs_recurrent_params)), "kvs_recurrent_params: NULL");
    BAD_STATUS(kvs_recurrent_layer_params_init(NULL, sizeof(kvs_recurrent_layer_params)), "kvs_recurrent_layer_params: NULL");
    BAD_STATUS(kvs_dsv4_params_init(NULL, sizeof(kvs_dsv4_params)), "kvs_dsv4_params: NULL");
    BAD_STATUS(kvs_dsv4_compressor_params_init(NULL, sizeof(kvs_dsv4_compressor_params)), "kvs_dsv4_compressor_params: NULL");
    kvs_slot_free(slot);
    kvs_context_free(ctx);
}

MAIN(CASE(a_hybrid_writes_again_what_llama_cpp_wrote), CASE(a_slot_says_which_rows_a_ubatch_reads_and_writes),
     CASE(the_end_is_cut_off_as_far_as_there_are_rollback_planes),
     CASE(a_hybrid_resumes_at_a_checkpoint), CASE(bytes_of_recurrent_states_that_are_not_there_are_refused),
     CASE(states_of_the_caller_are_read_and_written_where_they_are),
     CASE(recurrent_states_that_make_no_sense_are_refused), CASE(an_indexer_sits_on_the_cells_of_its_attention_cache),
     CASE(a_shared_section_has_nothing_in_a_state), CASE(a_section_is_described_by_what_its_kind_names),
     CASE(arguments_that_make_no_sense_fail_every_call))
