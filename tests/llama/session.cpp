#include "session.hpp"

#include <stdexcept>

static ggml_type type_of(const std::string &name) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
        if (name == ggml_type_name(type)) return type;
    }
    throw std::runtime_error("no type " + name);
}

Session::Session(llama_model *model, const Case &the_case, uint32_t n_ctx) {
    const std::string types = the_case.types;
    const size_t slash = types.find('/');
    const bool one_stream = !(the_case.options & streams);

    llama_context_params params = llama_context_default_params();
    params.n_ctx = one_stream ? n_ctx : n_ctx * n_seq;
    params.n_batch = 512;
    params.n_ubatch = 64;
    params.n_seq_max = n_seq;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = type_of(types.substr(0, slash));
    params.type_v = type_of(types.substr(slash + 1));
    params.flash_attn_type =
        the_case.options & flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified = one_stream;
    params.swa_full = the_case.options & swa_full;
    if (the_case.options & yarn) {
        params.rope_scaling_type = LLAMA_ROPE_SCALING_TYPE_YARN;
        params.rope_freq_scale = yarn_freq_scale;
        params.yarn_orig_ctx = yarn_n_ctx_orig;
    }
    ctx_.reset(llama_init_from_model(model, params));
    if (!ctx_) throw std::runtime_error("no context for " + the_case.name());
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
}

llama_token Session::token(llama_seq_id seq, llama_pos pos) const {
    uint32_t x = static_cast<uint32_t>(pos) * 2654435761u + static_cast<uint32_t>(seq) * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    return static_cast<llama_token>((x >> 8) % static_cast<uint32_t>(n_vocab_));
}

std::vector<llama_token> Session::tokens(llama_seq_id seq, int n) const {
    std::vector<llama_token> list;
    for (llama_pos pos = 0; pos < n; ++pos) list.push_back(token(seq, pos));
    return list;
}

// One token of a batch: its sequence and position.
struct Place {
    llama_seq_id seq;
    llama_pos pos;
};

static bool decode_batch(const Session &session, const std::vector<Place> &places) {
    llama_batch batch = llama_batch_init(static_cast<int32_t>(places.size()), 0, 1);
    for (const Place &place : places) {
        const int32_t i = batch.n_tokens++;
        batch.token[i] = session.token(place.seq, place.pos);
        batch.pos[i] = place.pos;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = place.seq;
        batch.logits[i] = batch.n_tokens == static_cast<int32_t>(places.size());
    }
    const int32_t status = llama_decode(session.ctx(), batch);
    llama_batch_free(batch);
    return status == 0;
}

Logits Session::decode(llama_seq_id seq, llama_pos p0, int n) {
    std::vector<Place> places;
    for (llama_pos pos = p0; pos < p0 + n; ++pos) places.push_back({seq, pos});
    if (!decode_batch(*this, places)) return {};
    const float *logits = llama_get_logits_ith(ctx(), -1);
    return Logits(logits, logits + n_vocab_);
}

bool Session::decode_image(llama_seq_id seq, llama_pos p0, int side) {
    const int32_t n = side * side;
    const int32_t n_embd = llama_model_n_embd_inp(llama_get_model(ctx()));
    llama_batch batch = llama_batch_init(n, n_embd, 1);
    // M-RoPE: time, row and column of each cell, and a fourth that text has no use for.
    std::vector<llama_pos> pos(static_cast<size_t>(4 * n), 0);
    for (int32_t i = 0; i < n; ++i) {
        pos[i] = p0;
        pos[n + i] = p0 + i / side;
        pos[2 * n + i] = p0 + i % side;
        for (int32_t j = 0; j < n_embd; ++j) {
            batch.embd[i * n_embd + j] =
                static_cast<float>(token(seq, i * n_embd + j) - n_vocab_ / 2) / static_cast<float>(n_vocab_);
        }
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = 0;
    }
    llama_pos *const own_pos = batch.pos;
    batch.pos = pos.data();
    batch.n_tokens = n;
    const int32_t status = llama_decode(ctx(), batch);
    batch.pos = own_pos;
    llama_batch_free(batch);
    return status == 0;
}

void Session::fill(const std::string &layout) {
    const auto decoded = [](bool ok) {
        if (!ok) throw std::runtime_error("the prompt could not be decoded");
    };
    if (layout == "interleaved" || layout == "holes") {
        std::vector<Place> places;
        for (llama_pos pos = 0; pos < 60; ++pos) {
            for (const llama_seq_id seq : {0, saved_seq, other_seq}) places.push_back({seq, pos});
        }
        decoded(decode_batch(*this, places));
        if (layout == "holes") {
            llama_memory_seq_rm(memory(), 0, -1, -1);
            llama_memory_seq_rm(memory(), other_seq, -1, -1);
        }
        return;
    }
    if (layout == "image") {
        decoded(!decode(saved_seq, 0, 20).empty());
        decoded(decode_image(saved_seq, 20, 4));
        decoded(!decode(saved_seq, 24, 20).empty());
        return;
    }
    const int n = layout == "short" ? 24 : layout == "long" ? 300 : 100;
    decoded(!decode(saved_seq, first_pos(layout), n).empty());
    if (layout == "shared") {
        llama_memory_seq_cp(memory(), saved_seq, other_seq, -1, -1);
        decoded(!decode(other_seq, n, 10).empty());
    }
    if (layout == "shifted") {
        llama_memory_seq_add(memory(), saved_seq, 0, -1, 7);
        decoded(!decode(saved_seq, n + 7, 1).empty());
    }
    if (layout == "emptied") llama_memory_seq_rm(memory(), saved_seq, -1, -1);
}

Logits Session::go_on(llama_seq_id seq, llama_pos p0) {
    Logits all;
    for (llama_pos pos = p0; pos < p0 + 4; ++pos) {
        const Logits logits = decode(seq, pos, 1);
        if (logits.empty()) return {};
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

Bytes Session::get(llama_seq_id seq, llama_state_seq_flags flags) {
    Bytes state(llama_state_seq_get_size_ext(ctx(), seq, flags));
    const size_t n = llama_state_seq_get_data_ext(ctx(), state.data(), state.size(), seq, flags);
    if (n != state.size()) {
        throw std::runtime_error("get_size says " + std::to_string(state.size()) + ", get_data wrote " +
                                 std::to_string(n));
    }
    return state;
}

size_t Session::set(const Bytes &state, llama_seq_id seq, llama_state_seq_flags flags) {
    return llama_state_seq_set_data_ext(ctx(), state.data(), state.size(), seq, flags);
}

Bytes Session::get_whole() {
    Bytes state(llama_state_get_size(ctx()));
    const size_t n = llama_state_get_data(ctx(), state.data(), state.size());
    if (n != state.size()) {
        throw std::runtime_error("state_get_size says " + std::to_string(state.size()) + ", get_data wrote " +
                                 std::to_string(n));
    }
    return state;
}

size_t Session::set_whole(const Bytes &state) {
    return llama_state_set_data(ctx(), state.data(), state.size());
}

std::vector<Bytes> Session::snapshot() {
    std::vector<Bytes> all;
    for (llama_seq_id seq = 0; seq < static_cast<llama_seq_id>(n_seq); ++seq) all.push_back(get(seq));
    all.push_back(get_whole());
    return all;
}
