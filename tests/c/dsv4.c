// The compressed half of DSV4 memories, described from C, where TEST_DEVICE says.

#include "fixture.h"

static kvs_dsv4_compressor_params compressor(uint32_t ratio, const uint32_t *layer, uint32_t n_embd_k, uint32_t state_size,
                                             uint32_t n_embd_state) {
    kvs_dsv4_compressor_params params = kvs_dsv4_compressor_default_params();
    params.ratio = ratio;
    params.kv_size = 256 / ratio;
    params.layers = layer;
    params.n_layer = 1;
    params.n_embd_k = n_embd_k;
    params.state_size = state_size;
    params.n_embd_state = n_embd_state;
    return params;
}

// As the fixture has it; change what the test is about, then call try_new_dsv4.
typedef struct {
    kvs_kv_layer_params layers[4];
    uint32_t csa_layer, hca_layer;
    int32_t devices[4];
    kvs_dsv4_compressor_params csa, hca, lid;
    kvs_dsv4_params dsv4;
} dsv4_setup;

static dsv4_setup default_dsv4(void) {
    dsv4_setup s;
    for (int il = 0; il < 4; il++) {
        s.layers[il] = kvs_kv_layer_default_params();
        s.layers[il].n_embd_k_gqa = 64;
        s.layers[il].device = s.devices[il] = test_device();
    }
    s.csa_layer = 2;
    s.hca_layer = 3;
    s.csa = compressor(4, NULL, 64, 8, 128);
    s.hca = compressor(128, NULL, 64, 128, 64);
    s.lid = compressor(4, NULL, 128, 8, 256);
    s.dsv4 = kvs_dsv4_default_params();
    s.dsv4.n_device = 4;
    return s;
}

static kvs_status try_new_dsv4(dsv4_setup *s, kvs_context **ctx) {
    kvs_kv_params base = kvs_kv_default_params(), swa = window(256, 32);
    base.kv_size = 256;
    swa.layers = s->layers;
    swa.n_layer = 4;
    s->csa.layers = s->lid.layers = &s->csa_layer;
    s->hca.layers = &s->hca_layer;
    s->dsv4.csa = &s->csa;
    s->dsv4.hca = &s->hca;
    if (s->dsv4.lid == NULL) s->dsv4.lid = &s->lid;
    if (s->dsv4.n_device > 0) s->dsv4.devices = s->devices;
    kvs_section_params sections[] = {kvs_kv_section(&base), kvs_kv_section(&swa), kvs_dsv4_section(&s->dsv4)};
    kvs_context_params params = kvs_context_default_params();
    params.unified = 0;
    params.sections = sections;
    params.n_section = 3;
    return kvs_context_new(&params, ctx);
}

static void a_dsv4_memory_writes_again_what_llama_cpp_wrote(void) {
    dsv4_setup s = default_dsv4();
    kvs_context *ctx = NULL;
    CHECK(try_new_dsv4(&s, &ctx) == KVS_STATUS_OK);
    CHECK(kvs_section_kind(ctx, 1) == KVS_SECTION_KV && kvs_section_kind(ctx, 2) == KVS_SECTION_DSV4);
    check_fixture(ctx, "deepseek4-moe_kf16_vf16_n64_none", 0, KVS_STATE_SEQ_FLAGS_NONE);
    check_fixture(ctx, "deepseek4-moe_kf16_vf16_n64_partial", 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    kvs_context_free(ctx);
}

static void a_dsv4_memory_says_where_its_tensors_are(void) {
    dsv4_setup s = default_dsv4();
    s.dsv4.n_device = 0;
    s.dsv4.n_rs_seq = 2;
    kvs_context *ctx = NULL;
    CHECK(try_new_dsv4(&s, &ctx) == KVS_STATUS_OK);
    kvs_plane k, state;
    CHECK(kvs_dsv4_plane(ctx, KVS_DSV4_LID, KVS_DSV4_K, 2, 0, 0, &k) == KVS_STATUS_OK);
    CHECK(k.data != NULL && k.device == KVS_DEVICE_HOST);
    CHECK(k.ggml_type == KVS_TYPE_F16 && k.n_embd == 128 && k.cell_stride == 256);
    for (uint32_t rollback = 0; rollback <= 2; rollback++) {
        CHECK(kvs_dsv4_plane(ctx, KVS_DSV4_HCA, KVS_DSV4_STATE_SCORE, 3, 0, rollback, &state) == KVS_STATUS_OK);
        CHECK(state.ggml_type == KVS_TYPE_F32 && state.n_embd == 64 && state.cell_stride == 256);
    }
    BAD_STATUS(kvs_dsv4_plane(ctx, 3, 0, 2, 0, 0, &k), "compressor: 3 is none of KVS_DSV4_*");
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, 3, 2, 0, 0, &k), "which: 3 is none of KVS_DSV4_*");
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, 0, 3, 0, 0, &k), "layer: 3 has no csa, the layers [2] have");
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, 0, 2, 1, 0, &k), "stream: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, KVS_DSV4_STATE_KV, 2, 0, 3, &k), "rollback: 3, of Kv there is no such plane");
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, KVS_DSV4_K, 2, 0, 1, &k), "rollback: 1, of K there is no such plane");
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, 0, 2, 0, 0, NULL), "plane_out: NULL");
    CHECK(k.n_embd == 128);

    decode(ctx, 0, 0, 8, NULL);
    kvs_memory_t mem = kvs_get_memory(ctx);
    CHECK(kvs_memory_max_cut(mem, 0) == 2 && !kvs_memory_can_seq_rm(mem, 0, 5, -1));
    CHECK(kvs_memory_can_seq_rm(mem, 0, 6, -1) && kvs_memory_seq_rm(mem, 0, 6, -1));
    uint32_t rollback = 7;
    CHECK(kvs_dsv4_rollback(ctx, 0, &rollback) == KVS_STATUS_OK && rollback == 2);
    BAD_STATUS(kvs_dsv4_rollback(ctx, 1, &rollback), "seq_id 1 is out of range [0, 1)");
    BAD_STATUS(kvs_dsv4_rollback(ctx, 0, NULL), "rollback_out: NULL");
    kvs_context_free(ctx);

    ctx = new_context(default_setup(8, 1));
    BAD_STATUS(kvs_dsv4_plane(ctx, 0, 0, 2, 0, 0, &k), "ctx: a context without a DSV4 section");
    CHECK(kvs_dsv4_rollback(ctx, 0, &rollback) == KVS_STATUS_OK && rollback == 0);
    kvs_context_free(ctx);
}

static void bytes_of_a_dsv4_memory_are_set_and_got(void) {
    dsv4_setup s = default_dsv4();
    s.dsv4.n_rs_seq = 1;
    kvs_context *ctx = NULL;
    CHECK(try_new_dsv4(&s, &ctx) == KVS_STATUS_OK);
    decode(ctx, 0, 0, 8, NULL);
    // CSA has rows of K of 128 bytes in layer 2, one for 4 positions.
    uint8_t row[128], found[128], zero[128] = {0};
    memset(row, 0x5a, sizeof row);
    CHECK(kvs_dsv4_set(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 128, row, 128) == KVS_STATUS_OK);
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 128, found, 128) == KVS_STATUS_OK);
    CHECK(memcmp(found, row, 128) == 0);
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 0, found, 128) == KVS_STATUS_OK && memcmp(found, zero, 128) == 0);
    CHECK(kvs_dsv4_set(ctx, KVS_DSV4_HCA, KVS_DSV4_STATE_KV, 3, 0, 1, 0, row, 128) == KVS_STATUS_OK);
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_HCA, KVS_DSV4_STATE_KV, 3, 0, 1, 0, found, 128) == KVS_STATUS_OK && found[127] == 0x5a);
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_HCA, KVS_DSV4_STATE_KV, 3, 0, 0, 0, found, 128) == KVS_STATUS_OK && memcmp(found, zero, 128) == 0);

    // The second block of 4 positions is in the state, and is zero again once its sequence is gone.
    state blob = save(ctx, 0);
    CHECK(kvs_memory_seq_rm(kvs_get_memory(ctx), 0, -1, -1));
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 128, found, 128) == KVS_STATUS_OK && memcmp(found, zero, 128) == 0);
    CHECK(kvs_state_seq_set_data(ctx, blob.data, blob.size, 0) == blob.size);
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 128, found, 128) == KVS_STATUS_OK && memcmp(found, row, 128) == 0);
    free(blob.data);
    // Also where nothing was decoded.
    CHECK(kvs_memory_seq_rm(kvs_get_memory(ctx), 0, -1, -1));
    CHECK(kvs_dsv4_set(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 0, row, 128) == KVS_STATUS_OK);
    CHECK(kvs_memory_seq_rm(kvs_get_memory(ctx), 0, -1, -1));
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 0, found, 128) == KVS_STATUS_OK && memcmp(found, zero, 128) == 0);

    BAD_STATUS(kvs_dsv4_get(ctx, 3, 0, 2, 0, 0, 0, found, 1), "compressor: 3 is none of KVS_DSV4_*");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 3, 2, 0, 0, 0, row, 1), "which: 3 is none of KVS_DSV4_*");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 0, 3, 0, 0, 0, row, 1), "layer: 3 has no csa, the layers [2] have");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 0, 2, 1, 0, 0, row, 1), "stream: 1 is out of range [0, 1)");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 0, 2, 0, 1, 0, row, 1), "rollback: 1, of K there is no such plane");
    BAD_STATUS(kvs_dsv4_get(ctx, 0, KVS_DSV4_STATE_KV, 2, 0, 2, 0, found, 1), "rollback: 2, of Kv there is no such plane");
    BAD_STATUS(kvs_dsv4_get(ctx, 0, 0, 2, 0, 0, 64 * 128 - 1, found, 2), "offset: 2 bytes at 8191 of a plane of 8192");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 0, 2, 0, 0, UINT64_MAX, row, 2), "of a plane of 8192");
    BAD_STATUS(kvs_dsv4_get(ctx, 0, 0, 2, 0, 0, 0, NULL, 1), "dst: NULL");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 0, 2, 0, 0, 0, NULL, 1), "src: NULL");
    kvs_context_free(ctx);

    ctx = new_context(default_setup(8, 1));
    BAD_STATUS(kvs_dsv4_get(ctx, 0, 0, 2, 0, 0, 0, found, 1), "ctx: a context without a DSV4 section");
    BAD_STATUS(kvs_dsv4_set(ctx, 0, 0, 2, 0, 0, 0, row, 1), "ctx: a context without a DSV4 section");
    kvs_context_free(ctx);
}

// An arena of zeros for each tensor: kv_size or state_size rows for one stream, and a rollback plane of the states.
typedef struct {
    void *k, *kv, *score;
} tensors;

static void adopt(kvs_dsv4_compressor_params *of, tensors *at) {
    const size_t k = of->kv_size * kvs_row_size(of->type_k, of->n_embd_k);
    const size_t state = 2 * of->state_size * (size_t)of->n_embd_state * sizeof(float);
    *at = (tensors){calloc(1, k), calloc(1, state), calloc(1, state)};
    of->k = &at->k;
    of->kv = &at->kv;
    of->score = &at->score;
}

static void a_dsv4_memory_is_adopted(void) {
    dsv4_setup s = default_dsv4();
    s.dsv4.n_device = 0;
    s.dsv4.n_rs_seq = 1;
    tensors csa, hca, lid;
    adopt(&s.csa, &csa);
    adopt(&s.hca, &hca);
    adopt(&s.lid, &lid);
    kvs_context *ctx = NULL;
    CHECK(try_new_dsv4(&s, &ctx) == KVS_STATUS_OK);
    check_fixture(ctx, "deepseek4-moe_kf16_vf16_n64_none", 0, KVS_STATE_SEQ_FLAGS_NONE);
    kvs_plane plane;
    CHECK(kvs_dsv4_plane(ctx, KVS_DSV4_HCA, KVS_DSV4_STATE_KV, 3, 0, 1, &plane) == KVS_STATUS_OK);
    CHECK(plane.data == (char *)hca.kv + 128 * 64 * sizeof(float));
    uint8_t row[128];
    CHECK(kvs_dsv4_get(ctx, KVS_DSV4_CSA, KVS_DSV4_K, 2, 0, 0, 128, row, 128) == KVS_STATUS_OK);
    CHECK(memcmp(row, (char *)csa.k + 128, 128) == 0);
    const uint8_t zero[128] = {0};
    CHECK(memcmp(row, zero, 128) != 0);
    kvs_context_free(ctx);

    ctx = NULL;
    s.lid.score = NULL;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.lid.score: NULL");
    void *none = NULL;
    s.lid.score = &none;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.lid.score[0]: NULL, while other layers of the section are adopted");
    s.csa.k = s.csa.kv = s.csa.score = NULL;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.csa.k: NULL");
    CHECK(ctx == NULL);
    const tensors all[] = {csa, hca, lid};
    for (int i = 0; i < 3; i++) {
        free(all[i].k);
        free(all[i].kv);
        free(all[i].score);
    }
}

static void a_dsv4_memory_that_makes_no_sense_is_refused(void) {
    kvs_context *ctx = NULL;
    dsv4_setup s = default_dsv4();
    s.csa.type_k = 999;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.csa.type_k: 999 is no ggml type");
    s = default_dsv4();
    s.hca.reserved = 1;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.hca.reserved: 1, it is 0");
    s = default_dsv4();
    s.devices[1] = -2;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.devices[1]: -2, it is KVS_DEVICE_HOST or");
    s = default_dsv4();
    s.dsv4.n_device = 3;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "dsv4.devices: none for layer 3");
    s = default_dsv4();
    s.dsv4.n_rs_seq = UINT32_MAX - 1;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "dsv4.n_rs_seq: 4294967294 rollback planes of 1 streams, at most 65536 planes in all");
    s = default_dsv4();
    s.lid.ratio = 0;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "dsv4.lid.ratio: 0");
    s = default_dsv4();
    kvs_dsv4_compressor_params lid = s.lid;
    lid.n_layer = 2;
    s.dsv4.lid = &lid;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "sections[2].dsv4.lid.layers: NULL");
    lid.struct_size = 0;
    BAD_STATUS(try_new_dsv4(&s, &ctx), "kvs_dsv4_compressor_params.struct_size: 0");
    kvs_dsv4_params none = kvs_dsv4_default_params();
    kvs_section_params section = kvs_dsv4_section(&none);
    kvs_context_params params = kvs_context_default_params();
    params.sections = &section;
    params.n_section = 1;
    BAD_STATUS(kvs_context_new(&params, &ctx), "sections[0].dsv4.csa: NULL");
    CHECK(ctx == NULL);
}

MAIN(CASE(a_dsv4_memory_writes_again_what_llama_cpp_wrote),
     CASE(a_dsv4_memory_says_where_its_tensors_are),
     CASE(bytes_of_a_dsv4_memory_are_set_and_got),
     CASE(a_dsv4_memory_is_adopted),
     CASE(a_dsv4_memory_that_makes_no_sense_is_refused))
