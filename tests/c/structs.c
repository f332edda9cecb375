// Structs that start with their size.

#include "check.h"

static void a_size_below_the_first_version_is_refused(void) {
    kvs_kv_params params;
    memset(&params, 0xa5, sizeof params);
    kvs_kv_params before = params;
    CHECK(kvs_kv_params_init(&params, sizeof params - 1) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "kvs_kv_params.struct_size");
    CHECK(memcmp(&params, &before, sizeof params) == 0);

    setup s = default_setup(8, 1);
    s.kv.struct_size = sizeof s.kv - 1;
    kvs_context *ctx = NULL;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "kvs_kv_params.struct_size");
    CHECK(ctx == NULL);
}

static void a_struct_that_was_not_filled_is_refused(void) {
    kvs_context_params params;
    memset(&params, 0, sizeof params);
    kvs_context *ctx = NULL;
    CHECK(kvs_context_new(&params, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "kvs_context_params_init");
    CHECK(ctx == NULL);
}

// The struct of a program that was compiled against a later header.
typedef struct {
    kvs_context_params known;
    uint64_t later[2];
} later_params;

static kvs_status new_from_later(later_params *params, kvs_context **ctx) {
    setup s = default_setup(8, 1);
    s.kv.layers = &s.layer;
    s.section.kv = &s.kv;
    params->known.sections = &s.section;
    params->known.n_section = 1;
    return kvs_context_new(&params->known, ctx);
}

static void a_larger_struct_is_accepted_if_what_is_unknown_is_zero(void) {
    later_params params;
    CHECK(kvs_context_params_init(&params.known, sizeof params) == KVS_STATUS_OK);
    CHECK(params.known.struct_size == sizeof params);
    kvs_context *ctx = NULL;
    CHECK(new_from_later(&params, &ctx) == KVS_STATUS_OK);
    kvs_context_free(ctx);
}

static void a_larger_struct_is_refused_if_something_unknown_is_set(void) {
    later_params params;
    CHECK(kvs_context_params_init(&params.known, sizeof params) == KVS_STATUS_OK);
    params.later[1] = (uint64_t)1 << 63;
    kvs_context *ctx = NULL;
    CHECK(new_from_later(&params, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "kvs_context_params.struct_size");
    CHECK(ctx == NULL);
}

static void init_writes_as_many_bytes_as_it_is_told(void) {
    struct {
        later_params params;
        uint8_t behind[16];
    } memory;
    memset(&memory, 0xa5, sizeof memory);
    CHECK(kvs_context_params_init(&memory.params.known, sizeof memory.params) == KVS_STATUS_OK);
    CHECK(memory.params.later[0] == 0 && memory.params.later[1] == 0);
    for (size_t i = 0; i < sizeof memory.behind; i++) CHECK(memory.behind[i] == 0xa5);
}

static void the_inline_defaults_are_those_of_the_init_calls(void) {
    kvs_context_params params = kvs_context_default_params();
    CHECK(params.struct_size == sizeof params);
    CHECK(params.n_seq_max == 1 && params.unified == 1 && params.max_masked_cells == UINT32_MAX);
    CHECK(params.sections == NULL && params.shift == NULL && params.arch == NULL);
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    CHECK(layer.type_k == KVS_TYPE_F16 && layer.type_v == KVS_TYPE_F16 && layer.k == NULL);
    CHECK(layer.rope == NULL);
    kvs_rope_params rope = kvs_rope_default_params();
    CHECK(rope.struct_size == sizeof rope && rope.rope_type == KVS_ROPE_TYPE_NORM && rope.freq_factors == NULL);
    CHECK(rope.n_embd_head == 0 && rope.n_rope_dims == 0 && rope.n_embd_nope == 0 && rope.n_ctx_orig == 0);
    CHECK(rope.freq_base == 10000 && rope.freq_scale == 1 && rope.ext_factor == 0);
    CHECK(rope.beta_fast == 32 && rope.beta_slow == 1);
    kvs_section_params section = kvs_section_default_params();
    CHECK(section.kind == KVS_SECTION_KV && section.reserved == 0);
    CHECK(section.kv == NULL && section.recurrent == NULL && section.dsv4 == NULL);
    kvs_kv_params kv = kvs_kv_default_params();
    CHECK(kv.struct_size == sizeof kv && kv.mirrors == -1 && kv.reserved == 0);
    kvs_recurrent_layer_params recurrent_layer = kvs_recurrent_layer_default_params();
    CHECK(recurrent_layer.struct_size == sizeof recurrent_layer && !recurrent_layer.has_r && !recurrent_layer.has_s);
    CHECK(recurrent_layer.type_r == KVS_TYPE_F32 && recurrent_layer.type_s == KVS_TYPE_F32 && recurrent_layer.n_embd_p == 0);
    CHECK(recurrent_layer.device == KVS_DEVICE_HOST && recurrent_layer.r == NULL && recurrent_layer.s == NULL);
    kvs_recurrent_params recurrent = kvs_recurrent_default_params();
    CHECK(recurrent.struct_size == sizeof recurrent && recurrent.n_rs_seq == 0 && recurrent.layers == NULL);
    kvs_dsv4_compressor_params compressor = kvs_dsv4_compressor_default_params();
    CHECK(compressor.struct_size == sizeof compressor && compressor.type_k == KVS_TYPE_F16 && compressor.layers == NULL);
    kvs_dsv4_params dsv4 = kvs_dsv4_default_params();
    CHECK(dsv4.struct_size == sizeof dsv4 && dsv4.csa == NULL && dsv4.devices == NULL && dsv4.n_rs_seq == 0);
    CHECK(kvs_ubatch_default().struct_size == sizeof(kvs_ubatch));
    kvs_transfer_params transfer = kvs_transfer_default_params();
    CHECK(transfer.struct_size == sizeof transfer);
    CHECK(transfer.n_threads == 0 && transfer.progress == NULL);
    CHECK(layer.device == KVS_DEVICE_HOST && layer.reserved == 0 && params.n_staging == 0 && params.staging_size == 0);
    kvs_memory_usage usage = kvs_memory_usage_default();
    CHECK(usage.struct_size == sizeof usage);
    CHECK(usage.kv_host == 0 && usage.kv_device == 0 && usage.staging_pinned == 0 && usage.staging_device == 0);
}

static void memory_usage_is_filled_as_far_as_it_is_known(void) {
    struct {
        kvs_memory_usage known;
        uint64_t later[2];
    } usage;
    memset(&usage, 0xa5, sizeof usage);
    BAD_STATUS(kvs_memory_usage_init(NULL, sizeof usage), "kvs_memory_usage: NULL");
    BAD_STATUS(kvs_memory_usage_init(&usage.known, sizeof usage.known - 1), "kvs_memory_usage.struct_size");
    CHECK(kvs_memory_usage_init(&usage.known, sizeof usage) == KVS_STATUS_OK);
    CHECK(usage.later[0] == 0 && usage.later[1] == 0 && usage.known.struct_size == sizeof usage);
    kvs_context *ctx = new_context(default_setup(8, 1));
    CHECK(kvs_memory_usage_get(ctx, &usage.known) == KVS_STATUS_OK);
    CHECK(usage.known.struct_size == sizeof usage && usage.known.kv_host == 2 * 8 * 8);
    CHECK(usage.later[0] == 0 && usage.later[1] == 0);
    usage.later[1] = 1;
    BAD_STATUS(kvs_memory_usage_get(ctx, &usage.known), "kvs_memory_usage.struct_size");
    kvs_context_free(ctx);
}

static void the_elements_of_an_array_have_one_size(void) {
    setup s = default_setup(8, 1);
    kvs_kv_layer_params layers[2] = {s.layer, s.layer};
    layers[1].struct_size += 8;
    s.kv.layers = layers;
    s.kv.n_layer = 2;
    s.section.kv = &s.kv;
    s.context.sections = &s.section;
    kvs_context *ctx = NULL;
    CHECK(kvs_context_new(&s.context, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "layers[1].struct_size");
}

static void reserved_fields_are_zero(void) {
    setup s = default_setup(8, 1);
    s.section.reserved = 1;
    kvs_context *ctx = NULL;
    CHECK(try_new_context(&s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "sections[0].reserved");
    s.section.reserved = 0;
    s.layer.reserved = 1;
    BAD_STATUS(try_new_context(&s, &ctx), "layers[0].reserved");
    s.layer.reserved = 0;
    s.layer.device = -2;
    BAD_STATUS(try_new_context(&s, &ctx), "layers[0].device: -2");
    s.layer.device = KVS_DEVICE_HOST;
    s.context.n_staging = 1;
    BAD_STATUS(try_new_context(&s, &ctx), "n_staging: 1");
    CHECK(ctx == NULL);

    ctx = new_context(default_setup(8, 1));
    kvs_pos pos = 0;
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = 1;
    ubatch.pos = &pos;
    ubatch.reserved = 1;
    kvs_slot *slot = NULL;
    CHECK(kvs_slot_prepare(ctx, &ubatch, &slot) == KVS_STATUS_INVALID_ARGUMENT);
    CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, "reserved");
    CHECK(slot == NULL);
    kvs_context_free(ctx);
}

static void layouts_without_effect_are_refused(void) {
    static float memory[64];
    struct {
        setup s;
        const char *reason;
    } cases[6];
    for (int i = 0; i < 6; i++) cases[i].s = default_setup(8, 1);
    cases[0].s.layer.k_cell_stride = 8;
    cases[0].reason = "layers[0].k: NULL with strides";
    cases[1].s.layer.v_stream_stride = 64;
    cases[1].reason = "layers[0].v: NULL with strides";
    cases[2].s.layer.n_embd_v_gqa = 0;
    cases[2].s.layer.k = cases[2].s.layer.v = memory;
    cases[2].reason = "layers[0].v: given, while n_embd_v_gqa is 0";
    cases[3].s.layer.k = memory;
    cases[3].s.layer.v = memory + 32;
    cases[3].s.layer.v_channel_stride = 64;
    cases[3].reason = "layers[0].v_channel_stride: given, while V is not transposed";
    cases[4].s.layer.k = (void *)(UINTPTR_MAX - 15);
    cases[4].s.layer.v = memory;
    cases[4].reason = "layers[0].k: the address and the streams behind it";
    cases[5].s.layer.k = memory;
    cases[5].reason = "layers[0].v: NULL, while other layers";
    for (int i = 0; i < 6; i++) {
        kvs_context *ctx = NULL;
        CHECK(try_new_context(&cases[i].s, &ctx) == KVS_STATUS_INVALID_ARGUMENT);
        CHECK_REASON(KVS_STATUS_INVALID_ARGUMENT, cases[i].reason);
        CHECK(ctx == NULL);
    }
}

static void structs_may_go_once_the_context_is_there(void) {
    setup *s = malloc(sizeof *s);
    CHECK(s != NULL);
    *s = default_setup(8, 1);
    char arch[] = "gone";
    s->context.arch = arch;
    kvs_context *ctx = NULL;
    CHECK(try_new_context(s, &ctx) == KVS_STATUS_OK);
    memset(s, 0xa5, sizeof *s);
    free(s);
    memset(arch, 0, sizeof arch);
    decode(ctx, 0, 0, 3, NULL);
    state whole = save(ctx, -1);
    CHECK(memcmp(whole.data, "\4\0\0\0gone", 8) == 0);
    free(whole.data);
    kvs_context_free(ctx);
}

MAIN(CASE(a_size_below_the_first_version_is_refused), CASE(a_struct_that_was_not_filled_is_refused),
     CASE(a_larger_struct_is_accepted_if_what_is_unknown_is_zero),
     CASE(a_larger_struct_is_refused_if_something_unknown_is_set), CASE(init_writes_as_many_bytes_as_it_is_told),
     CASE(the_inline_defaults_are_those_of_the_init_calls), CASE(memory_usage_is_filled_as_far_as_it_is_known), CASE(the_elements_of_an_array_have_one_size),
     CASE(reserved_fields_are_zero), CASE(layouts_without_effect_are_refused), CASE(structs_may_go_once_the_context_is_there))
