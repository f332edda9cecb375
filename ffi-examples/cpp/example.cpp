// The KV cache of a model with sliding-window attention: filled, saved to memory and to a slot file, brought
// back. It takes no arguments, and writes only below a temporary directory of its own.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvstate.h"

static void check(bool ok) {
    if (!ok) throw std::runtime_error(kvs_last_error());
}

int main() try {
    // One layer with full attention, one with a window of 32; K and V of a cell are 64 x f32.
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.type_k = layer.type_v = KVS_TYPE_F32;
    layer.n_embd_k_gqa = layer.n_embd_v_gqa = 64;
    kvs_kv_params kv[2];
    kvs_section_params sections[2];
    for (int i = 0; i < 2; ++i) {
        kv[i] = kvs_kv_default_params();
        kv[i].kv_size = 256;
        kv[i].n_layer = 1;
        kv[i].layers = &layer;
        sections[i] = kvs_section_default_params();
        sections[i].kv = &kv[i];
    }
    kv[1].swa_type = KVS_SWA_TYPE_STANDARD;
    kv[1].n_swa = 32;
    kvs_context_params params = kvs_context_default_params();
    params.sections = sections;
    params.n_section = 2;
    kvs_context *new_ctx = nullptr;
    check(kvs_context_new(&params, &new_ctx) == KVS_STATUS_OK);
    const std::unique_ptr<kvs_context, void (*)(kvs_context *)> owner(new_ctx, kvs_context_free);
    kvs_context *ctx = owner.get();

    // Decode 100 tokens of sequence 0: take cells, then write K and V where kvstate says.
    const uint32_t n_tokens = 100;
    std::vector<kvs_token> tokens(n_tokens, 7);
    std::vector<kvs_pos> positions(n_tokens);
    for (uint32_t i = 0; i < n_tokens; ++i) positions[i] = kvs_pos(i);
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = n_tokens;
    ubatch.pos = positions.data();
    kvs_slot *new_slot = nullptr;
    check(kvs_slot_prepare(ctx, &ubatch, &new_slot) == KVS_STATUS_OK);
    const std::unique_ptr<kvs_slot, void (*)(kvs_slot *)> slot(new_slot, kvs_slot_free);
    check(kvs_slot_commit(ctx, slot.get()) == KVS_STATUS_OK);
    for (uint32_t section = 0; section < 2; ++section) {
        std::vector<uint32_t> cells(n_tokens);
        check(kvs_slot_cells(slot.get(), section, cells.data(), n_tokens) == KVS_STATUS_OK);
        kvs_plane planes[2];  // K and V
        check(kvs_kv_plane(ctx, section, 0, 0, &planes[0], &planes[1]) == KVS_STATUS_OK);
        for (uint32_t i = 0; i < n_tokens; ++i) {
            const std::vector<float> row(64, float(i));  // your model's
            for (const kvs_plane &plane : planes) {
                char *cell = static_cast<char *>(plane.data) + cells[i] * plane.cell_stride;
                std::memcpy(cell, row.data(), row.size() * sizeof(float));
            }
        }
    }

    // To memory and back: all of it, and the part that seq_rm cannot bring back (the window).
    std::vector<uint8_t> state(kvs_state_seq_get_size(ctx, 0));
    check(kvs_state_seq_get_data(ctx, state.data(), state.size(), 0) == state.size());
    const kvs_state_seq_flags partial = KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    std::vector<uint8_t> window(kvs_state_seq_get_size_ext(ctx, 0, partial));
    check(kvs_state_seq_get_data_ext(ctx, window.data(), window.size(), 0, partial) == window.size());
    kvs_memory_clear(kvs_get_memory(ctx), true);
    check(kvs_state_seq_set_data(ctx, state.data(), state.size(), 0) == state.size());
    std::printf("state: %zu bytes, checkpoint: %zu bytes\n", state.size(), window.size());

    // To a slot file with a checkpoint, and back. llama.cpp reads it too.
    std::string directory = std::filesystem::temp_directory_path() / "kvstate-example-XXXXXX";
    if (mkdtemp(directory.data()) == nullptr) throw std::runtime_error("no temporary directory");
    const std::string file = directory + "/example.slot";
    kvs_slot_checkpoint checkpoint = kvs_slot_checkpoint_default();
    checkpoint.n_tokens = n_tokens;
    checkpoint.pos_max = kvs_pos(n_tokens) - 1;
    checkpoint.target = window.data();
    checkpoint.target_size = window.size();
    const std::string model = "the fingerprint of your model";  // kvs_fingerprint makes one
    const auto identity = reinterpret_cast<const uint8_t *>(model.data());
    kvs_slot_save_params save = kvs_slot_save_default_params();
    save.tokens = tokens.data();
    save.n_tokens = n_tokens;
    save.checkpoints = &checkpoint;
    save.n_checkpoint = 1;
    save.identity.model = identity;
    save.identity.model_size = model.size();
    size_t file_size = 0;
    check(kvs_slot_save(ctx, file.c_str(), 0, &save, &file_size) == KVS_STATUS_OK);

    kvs_memory_clear(kvs_get_memory(ctx), true);
    kvs_slot_load_params load = kvs_slot_load_default_params();
    load.verify = KVS_VERIFY_FULL;
    load.require = KVS_REQUIRE_IDENTITY | KVS_REQUIRE_CHECKSUMS;
    load.identity = save.identity;
    kvs_slot_result result = kvs_slot_result_default();
    check(kvs_slot_load(ctx, file.c_str(), 0, &load, &result) == KVS_STATUS_OK);
    const std::unique_ptr<kvs_slot_result, void (*)(kvs_slot_result *)> loaded(&result, kvs_slot_result_free);
    std::printf("file: %zu bytes, %zu tokens kept, positions %d to %d, %zu checkpoint\n", file_size,
                loaded->n_token_kept, loaded->pos_min, loaded->pos_max, loaded->n_checkpoint);
    std::filesystem::remove_all(directory);

    // Bytes that are no whole state are refused, and the cache keeps what it held.
    const size_t refused = kvs_state_seq_set_data(ctx, state.data(), state.size() / 2, 0);
    std::printf("half a state: %zu, %s\n", refused, kvs_last_error());
    std::vector<uint8_t> again(state.size());
    check(kvs_state_seq_get_data(ctx, again.data(), again.size(), 0) == again.size());
    return again == state ? 0 : 1;
} catch (const std::exception &error) {
    std::fprintf(stderr, "example: %s\n", error.what());
    return 1;
}
