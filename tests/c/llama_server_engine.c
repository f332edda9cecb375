// The engine under llama_server_slots.c: it knows kvstate, and gives the server a context.

#include <kvstate.h>

bool engine_decode(kvs_context *ctx, kvs_seq_id seq_id, kvs_pos p0, int n_tokens);
int server_main(kvs_context *ctx, const char *slot_path, const char *session_path);

static int32_t rotate(void *user_data, uint32_t section, uint32_t stream, const uint32_t *cells,
                      const kvs_pos *shifts, size_t n) {
    (void)user_data, (void)section, (void)stream, (void)cells, (void)shifts, (void)n;
    return 0; // K means nothing here
}

bool engine_decode(kvs_context *ctx, kvs_seq_id seq_id, kvs_pos p0, int n_tokens) {
    for (kvs_pos pos = p0; pos < p0 + n_tokens; pos++) {
        const kvs_seq_id *seq_ids = &seq_id;
        kvs_ubatch ubatch = kvs_ubatch_default();
        ubatch.n_tokens = 1;
        ubatch.pos = &pos;
        ubatch.seq_id = &seq_ids;
        kvs_slot *slot;
        if (kvs_slot_prepare(ctx, &ubatch, &slot) != KVS_STATUS_OK) return false;
        kvs_status status = kvs_slot_commit(ctx, slot);
        kvs_slot_free(slot);
        if (status != KVS_STATUS_OK) return false;
    }
    return true;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = 4;
    layer.n_embd_v_gqa = 4;
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = 64;
    kv.n_layer = 1;
    kv.layers = &layer;
    kvs_section_params section = kvs_section_default_params();
    section.kv = &kv;
    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = 2;
    params.sections = &section;
    params.n_section = 1;
    params.shift = rotate;
    kvs_context *ctx;
    if (kvs_context_new(&params, &ctx) != KVS_STATUS_OK) return 3;
    int status = server_main(ctx, argv[1], argv[2]);
    kvs_context_free(ctx);
    return status;
}
