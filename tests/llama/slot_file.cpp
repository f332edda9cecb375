// A slot file of kvstate in llama.cpp's own loader, and a sequence file of llama.cpp in kvstate's: the same state both ways.
//
//   slot_file MODEL FOLDER             a model of full attention
//   slot_file MODEL FOLDER adapter     with the adapter in front of llama.cpp, whose files have checksums

#include <llama.h>

#include <kvstate.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, kvs_last_error());         \
            std::exit(1);                                                                                      \
        }                                                                                                      \
    } while (0)

namespace {

constexpr int n_tokens = 64;

using Context = std::unique_ptr<kvs_context, decltype(&kvs_context_free)>;

// The cache that llama.cpp has for the model: f16, V not transposed.
Context new_context(const llama_model *model) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = static_cast<uint32_t>(llama_model_n_embd(model) / llama_model_n_head(model) *
                                               llama_model_n_head_kv(model));
    layer.n_embd_v_gqa = layer.n_embd_k_gqa;
    const std::vector<kvs_kv_layer_params> layers(static_cast<size_t>(llama_model_n_layer(model)), layer);
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = 256;
    kv.n_layer = static_cast<uint32_t>(layers.size());
    kv.layers = layers.data();
    kvs_section_params section = kvs_section_default_params();
    section.kv = &kv;
    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = 2;
    params.sections = &section;
    params.n_section = 1;
    kvs_context *ctx = nullptr;
    CHECK(kvs_context_new(&params, &ctx) == KVS_STATUS_OK);
    return Context(ctx, kvs_context_free);
}

std::vector<char> bytes_of(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// What llama.cpp has of a sequence from the first tensor on; before that cells name their sequence.
std::vector<uint8_t> tensors_of(llama_context *ctx, llama_seq_id seq) {
    constexpr size_t header = 8, counts = 8, cell = 12;
    std::vector<uint8_t> state(llama_state_seq_get_size(ctx, seq));
    CHECK(llama_state_seq_get_data(ctx, state.data(), state.size(), seq) == state.size());
    state.erase(state.begin(), state.begin() + header + counts + n_tokens * cell);
    return state;
}

}  // namespace

int main(int argc, char **argv) {
    CHECK(argc == 3 || argc == 4);
    const bool with_adapter = argc == 4;
    const std::string plain = std::string(argv[2]) + "/plain.bin", slot = std::string(argv[2]) + "/slot.bin";
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
        llama_model_load_from_file(argv[1], llama_model_default_params()), llama_model_free);
    CHECK(model != nullptr);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    const std::unique_ptr<llama_context, decltype(&llama_free)> ctx(llama_init_from_model(model.get(), params), llama_free);
    CHECK(ctx != nullptr);

    std::vector<llama_token> tokens;
    for (int i = 0; i < n_tokens; ++i) tokens.push_back(1 + i * 37 % 90);
    CHECK(llama_decode(ctx.get(), llama_batch_get_one(tokens.data(), n_tokens)) == 0);
    const size_t n_plain = llama_state_seq_save_file(ctx.get(), plain.c_str(), 0, tokens.data(), tokens.size());
    // A file has no header of a blob, and begins with its own and the tokens.
    const size_t n_state = 12 + 4 * tokens.size() + llama_state_seq_get_size(ctx.get(), 0) - 8;
    CHECK(with_adapter ? n_plain > n_state : n_plain == n_state);

    // llama.cpp's file, as the target's and the draft's.
    const Context target = new_context(model.get()), draft = new_context(model.get());
    for (kvs_context *into : {target.get(), draft.get()}) {
        kvs_slot_result result = kvs_slot_result_default();
        CHECK(kvs_slot_load(into, plain.c_str(), 0, nullptr, &result) == KVS_STATUS_OK);
        CHECK(result.n_tokens == tokens.size() && result.verified == KVS_VERIFY_NONE && result.n_note == 1);
        kvs_slot_result_free(&result);
    }

    // And back, with all that llama.cpp passes over.
    uint8_t partial[8];
    kvs_slot_checkpoint checkpoint = kvs_slot_checkpoint_default();
    checkpoint.n_tokens = 32;
    checkpoint.pos_max = 31;
    checkpoint.target = partial;
    checkpoint.target_size = kvs_state_seq_get_data_ext(target.get(), partial, sizeof partial, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    kvs_slot_save_params save = kvs_slot_save_default_params();
    save.tokens = tokens.data();
    save.n_tokens = tokens.size();
    save.checkpoints = &checkpoint;
    save.n_checkpoint = 1;
    save.draft = draft.get();
    size_t n_slot = 0;
    CHECK(kvs_slot_save(target.get(), slot.c_str(), 0, &save, &n_slot) == KVS_STATUS_OK);
    const std::vector<char> before = bytes_of(plain), after = bytes_of(slot);
    CHECK(before.size() == n_plain && after.size() == n_slot && n_slot > 2 * n_state - 1000);
    CHECK(std::memcmp(before.data(), after.data(), n_state) == 0);

    std::vector<llama_token> read(tokens.size());
    size_t n_read = 0;
    CHECK(llama_state_seq_load_file(ctx.get(), slot.c_str(), 1, read.data(), read.size(), &n_read) == n_state);
    CHECK(n_read == tokens.size() && read == tokens);
    CHECK(tensors_of(ctx.get(), 0) == tensors_of(ctx.get(), 1));
    std::printf("slot files: llama.cpp%s reads %zu of %zu bytes and has the same state\n",
                with_adapter ? " with the adapter" : "", n_state, n_slot);
    if (!with_adapter) return 0;

    // Refused before anything changes: a byte that differs, and another model.
    const std::vector<uint8_t> state = tensors_of(ctx.get(), 1);
    const auto is_refused = [&] {
        return llama_state_seq_load_file(ctx.get(), slot.c_str(), 1, read.data(), read.size(), &n_read) == 0 &&
               tensors_of(ctx.get(), 1) == state;
    };
    std::vector<char> damaged = after;
    damaged[n_state - 1] ^= 1;
    std::ofstream(slot, std::ios::binary).write(damaged.data(), static_cast<std::streamsize>(damaged.size()));
    CHECK(is_refused());
    const std::string model_name = "another";
    save.identity.model = reinterpret_cast<const uint8_t *>(model_name.data());
    save.identity.model_size = model_name.size();
    CHECK(kvs_slot_save(target.get(), slot.c_str(), 0, &save, &n_slot) == KVS_STATUS_OK);
    CHECK(is_refused());
}
