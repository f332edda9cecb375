#include "identity.h"

#include "io.h"

#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-model.h"

#include <map>
#include <string>
#include <vector>

std::array<uint8_t, KVS_FINGERPRINT_SIZE> fingerprint_of(const llama_context & ctx) {
    const llama_model & model = ctx.get_model();
    // a tensor that two backends have is there twice
    std::map<std::string, std::string> settings;
    for (const auto & [key, value] : model.gguf_kv) {
        settings["metadata " + key] = value;
    }
    for (const auto & [name, tensor] : model.tensors_by_name) {
        std::string & shape = settings["tensor " + name];
        shape = ggml_type_name(tensor->type);
        for (const int64_t ne : tensor->ne) {
            shape += " " + std::to_string(ne);
        }
    }
    const llama_cparams & cparams = ctx.get_cparams();
    settings["rope_freq_base"]   = std::to_string(cparams.rope_freq_base);
    settings["rope_freq_scale"]  = std::to_string(cparams.rope_freq_scale);
    settings["yarn_orig_ctx"]    = std::to_string(cparams.n_ctx_orig_yarn);
    settings["yarn_ext_factor"]  = std::to_string(cparams.yarn_ext_factor);
    settings["yarn_attn_factor"] = std::to_string(cparams.yarn_attn_factor);
    settings["yarn_beta_fast"]   = std::to_string(cparams.yarn_beta_fast);
    settings["yarn_beta_slow"]   = std::to_string(cparams.yarn_beta_slow);

    std::vector<kvs_setting> list;
    for (const auto & [key, value] : settings) {
        list.push_back({ key.c_str(), value.c_str() });
    }
    std::array<uint8_t, KVS_FINGERPRINT_SIZE> fingerprint;
    check(kvs_fingerprint(nullptr, 0, list.data(), list.size(), fingerprint.data()));
    return fingerprint;
}
