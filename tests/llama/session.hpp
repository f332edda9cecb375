// A llama.cpp context with the calls that the steps are made of. Public headers only.

#pragma once

#include "cases.hpp"
#include "results.hpp"

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

// The sequence that is saved.
constexpr llama_seq_id saved_seq = 1;
constexpr llama_seq_id other_seq = 2;
constexpr uint32_t n_seq = 4;

// Where the saved sequence begins.
inline llama_pos first_pos(const std::string &layout) { return layout == "late" ? 8122 : 0; }

class Session {
public:
    // n_ctx: cells of a stream.
    Session(llama_model *model, const Case &the_case, uint32_t n_ctx = 512);

    llama_context *ctx() const { return ctx_.get(); }
    llama_memory_t memory() const { return llama_get_memory(ctx_.get()); }
    llama_pos pos_min(llama_seq_id seq) const { return llama_memory_seq_pos_min(memory(), seq); }
    llama_pos pos_max(llama_seq_id seq) const { return llama_memory_seq_pos_max(memory(), seq); }

    // n tokens of a sequence from position p0; the logits of the last one, nothing if it could not be decoded.
    Logits decode(llama_seq_id seq, llama_pos p0, int n);
    // side x side embeddings at position p0.
    bool decode_image(llama_seq_id seq, llama_pos p0, int side);
    void fill(const std::string &layout);
    // Four tokens, one by one, from position p0.
    Logits go_on(llama_seq_id seq, llama_pos p0);

    Bytes get(llama_seq_id seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_NONE);
    size_t set(const Bytes &state, llama_seq_id seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_NONE);
    Bytes get_whole();
    size_t set_whole(const Bytes &state);
    // Every sequence and the whole context.
    std::vector<Bytes> snapshot();

    llama_token token(llama_seq_id seq, llama_pos pos) const;
    std::vector<llama_token> tokens(llama_seq_id seq, int n) const;

private:
    std::unique_ptr<llama_context, decltype(&llama_free)> ctx_{nullptr, llama_free};
    int n_vocab_ = 0;
};
