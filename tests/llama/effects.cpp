// Two of the effects that scripts/llama-effects shows, measured in this process: whatever state code libllama has.
// Prints the largest difference of a logit after a prompt was saved, restored, and cut, and the bytes of a partial
// checkpoint of a full-attention cache. Public headers only.
//
//     effects cut MODEL          "cut <largest difference>"
//     effects checkpoint MODEL   "checkpoint <bytes>"

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "effects: %s failed\n", what);
    std::exit(1);
}

struct Free {
    void operator()(llama_model * model) const { llama_model_free(model); }
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};
using Model   = std::unique_ptr<llama_model, Free>;
using Context = std::unique_ptr<llama_context, Free>;

Context context_of(llama_model * model, uint32_t n_ctx) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = n_ctx;
    params.n_batch         = 512;
    params.swa_full        = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    Context ctx(llama_init_from_model(model, params));
    if (!ctx) {
        fail("llama_init_from_model");
    }
    return ctx;
}

// Decodes tokens behind position n_past; the logits of the last one.
std::vector<float> decode(llama_context * ctx, const std::vector<llama_token> & tokens, llama_pos n_past) {
    llama_batch batch = llama_batch_init(512, 0, 1);
    for (size_t i = 0; i < tokens.size();) {
        batch.n_tokens = 0;
        for (; i < tokens.size() && batch.n_tokens < 512; ++i) {
            const int32_t j = batch.n_tokens++;
            batch.token[j]     = tokens[i];
            batch.pos[j]       = n_past + static_cast<llama_pos>(i);
            batch.n_seq_id[j]  = 1;
            batch.seq_id[j][0] = 0;
            batch.logits[j]    = i + 1 == tokens.size();
        }
        if (llama_decode(ctx, batch) != 0) {
            fail("llama_decode");
        }
    }
    const float * logits = llama_get_logits_ith(ctx, -1);
    std::vector<float> out(logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
    llama_batch_free(batch);
    return out;
}

std::vector<llama_token> random_tokens(const llama_model * model, size_t n) {
    std::mt19937 random(1);
    std::vector<llama_token> tokens(n);
    for (llama_token & token : tokens) {
        token = static_cast<llama_token>(random() % llama_vocab_n_tokens(llama_model_get_vocab(model)));
    }
    return tokens;
}

// A prompt and a reply; saved and restored in between or not; cut back to the prompt; one more token.
std::vector<float> after_the_cut(llama_model * model, size_t n_prompt, size_t n_reply, bool restored) {
    const Context ctx = context_of(model, static_cast<uint32_t>(n_prompt + n_reply + 256));
    const std::vector<llama_token> tokens = random_tokens(model, n_prompt + n_reply);
    decode(ctx.get(), tokens, 0);
    llama_memory_t memory = llama_get_memory(ctx.get());
    if (restored) {
        std::vector<uint8_t> state(llama_state_seq_get_size(ctx.get(), 0));
        if (llama_state_seq_get_data(ctx.get(), state.data(), state.size(), 0) != state.size()) {
            fail("llama_state_seq_get_data");
        }
        llama_memory_clear(memory, true);
        if (llama_state_seq_set_data(ctx.get(), state.data(), state.size(), 0) != state.size()) {
            fail("llama_state_seq_set_data");
        }
    }
    llama_memory_seq_rm(memory, 0, static_cast<llama_pos>(n_prompt), -1);
    return decode(ctx.get(), {tokens[0]}, static_cast<llama_pos>(n_prompt));
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        fail("effects cut|checkpoint MODEL: the command line");
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model_params params = llama_model_default_params();
    const Model model(llama_model_load_from_file(argv[2], params));
    if (!model) {
        fail("llama_model_load_from_file");
    }
    if (argv[1] == std::string("cut")) {
        // The reply hides what the window of the prompt's end still sees.
        const size_t n_swa    = static_cast<size_t>(llama_model_n_swa(model.get()));
        const size_t n_prompt = 2 * n_swa, n_reply = n_swa / 2 + 1;
        const std::vector<float> never    = after_the_cut(model.get(), n_prompt, n_reply, false);
        const std::vector<float> restored = after_the_cut(model.get(), n_prompt, n_reply, true);
        float largest = 0;
        for (size_t i = 0; i < never.size(); ++i) {
            largest = std::max(largest, std::fabs(never[i] - restored[i]));
        }
        std::printf("cut %g\n", static_cast<double>(largest));
    } else {
        const Context ctx = context_of(model.get(), 512);
        decode(ctx.get(), random_tokens(model.get(), 200), 0);
        std::printf("checkpoint %zu\n",
                    llama_state_seq_get_size_ext(ctx.get(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
    }
    return 0;
}
