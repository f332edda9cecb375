// What is run: models, caches, layouts and steps. Every row of `cases` is one case, and its fields are its name.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

enum class Memory { attention, iswa, recurrent, hybrid, hybrid_iswa, hybrid_idx, msa, dsa, dsa_iswa, dsv4 };

// A tiny random model, as llama.cpp's test-llama-archs writes it.
struct Model {
    const char *name;
    Memory memory;
    uint32_t n_swa;
    uint32_t swa_type;  // KVS_SWA_TYPE_*
    bool cell_ext;
    bool has_v;  // MLA and DSV4 have none
    const char *arch;
    // A letter for each layer of the recurrent section: r if it has R and S, p if it has P too, - if it has no state.
    const char *recurrent = "";
};

const Model models[] = {
    {"llama-dense", Memory::attention, 0, 0, false, true, "llama"},
    {"qwen2vl-dense", Memory::attention, 0, 0, true, true, "qwen2vl"},
    {"deepseek2-moe", Memory::attention, 0, 0, false, false, "deepseek2"},
    {"gemma3-dense", Memory::iswa, 32, 1, false, true, "gemma3"},
    {"cohere2-dense", Memory::iswa, 32, 1, false, true, "cohere2"},
    {"gpt-oss-moe", Memory::iswa, 32, 1, false, true, "gpt-oss"},
    {"llama4-moe", Memory::iswa, 8192, 2, false, true, "llama4"},  // chunks
    {"mamba-dense", Memory::recurrent, 0, 0, false, true, "mamba", "rr"},
    {"falcon-h1-dense", Memory::hybrid, 0, 0, false, true, "falcon-h1", "rr"},
    {"qwen3next-moe", Memory::hybrid, 0, 0, false, true, "qwen3next", "r-"},
    {"lfm2-dense", Memory::hybrid_iswa, 32, 1, false, true, "lfm2", "-r"},
    {"qwen4exp-moe", Memory::hybrid_idx, 0, 0, true, true, "qwen4exp", "p-"},
    {"minimax-m3-moe", Memory::msa, 0, 0, false, true, "minimax-m3"},
    {"deepseek32-moe", Memory::dsa, 0, 0, false, false, "deepseek32"},
    {"dots3note-moe", Memory::dsa_iswa, 32, 1, false, false, "dots3note"},
    {"deepseek4-moe", Memory::dsv4, 32, 1, false, false, "deepseek4"},
};

enum Option : unsigned {
    flash = 1,     // flash attention on: V is not transposed
    streams = 2,   // one stream per sequence; without it one cache for all
    swa_full = 4,  // SWA cache of full size
    small = 8,     // part of --small
    yarn = 16,     // positions scaled by YaRN to 1 / 4, of an original context of 256
};

constexpr float yarn_freq_scale = 0.25f;
constexpr uint32_t yarn_n_ctx_orig = 256;
// By how many positions k_shift moves a sequence.
constexpr int32_t k_shift_by = 7;

struct Case {
    const char *steps;
    const char *model;
    const char *types;  // of K and V
    unsigned options;
    const char *layout;

    std::string name() const {
        std::string text = std::string(steps) + " " + model + " " + types;
        if (options & flash) text += " flash";
        if (options & streams) text += " streams";
        if (options & swa_full) text += " swa_full";
        if (options & yarn) text += " yarn";
        return text + " " + layout;
    }
};

// Sequence 1 is the one that is saved. Layouts:
//   contiguous   100 tokens, more than a window
//   short        24 tokens, less than a window: nothing is masked
//   long         300 tokens: an SWA cache of 256 cells wraps
//   interleaved  60 tokens, every third cell
//   holes        the same, after its neighbours were removed
//   shared       100 tokens, all shared with another sequence, which goes on
//   shifted      100 tokens, moved by 7 positions, the rotation applied by a decode
//   late         100 tokens from position 8122, over the end of a chunk of llama4's
//   image        20 tokens, an image of 4 x 4 cells that share a position (M-RoPE), 20 tokens
//   emptied      100 tokens, all removed
const std::vector<Case> cases = {
    // Attention: types, transposition, streams, layouts.
    {"round_trip", "llama-dense", "f16/f16", small, "contiguous"},
    {"round_trip", "llama-dense", "f16/f16", flash, "contiguous"},
    {"round_trip", "llama-dense", "f16/f16", flash | streams, "contiguous"},
    {"round_trip", "llama-dense", "f16/f16", streams, "interleaved"},
    {"round_trip", "llama-dense", "f16/f16", flash, "interleaved"},
    {"round_trip", "llama-dense", "f16/f16", small, "holes"},
    {"round_trip", "llama-dense", "f16/f16", flash, "holes"},
    {"round_trip", "llama-dense", "f16/f16", 0, "shared"},
    {"round_trip", "llama-dense", "f16/f16", 0, "shifted"},
    {"round_trip", "llama-dense", "f16/f16", flash | streams, "shifted"},
    {"round_trip", "llama-dense", "f16/f16", 0, "emptied"},
    {"round_trip", "llama-dense", "f16/f16", flash | streams, "emptied"},
    {"round_trip", "llama-dense", "q8_0/q8_0", flash | small, "contiguous"},
    {"round_trip", "llama-dense", "q8_0/q8_0", flash | streams, "interleaved"},
    {"round_trip", "llama-dense", "q4_0/q4_0", flash, "holes"},
    {"round_trip", "llama-dense", "q4_0/q8_0", flash, "shifted"},
    {"round_trip", "llama-dense", "q8_0/f16", 0, "contiguous"},
    {"round_trip", "llama-dense", "q4_0/f16", streams, "interleaved"},
    {"round_trip", "qwen2vl-dense", "f16/f16", 0, "interleaved"},
    {"round_trip", "qwen2vl-dense", "f16/f16", flash | streams, "contiguous"},
    {"round_trip", "qwen2vl-dense", "f16/f16", 0, "image"},
    {"round_trip", "qwen2vl-dense", "f16/f16", flash | streams, "image"},
    {"round_trip", "deepseek2-moe", "f16/f16", 0, "holes"},
    {"round_trip", "deepseek2-moe", "f16/f16", flash, "contiguous"},
    // Windows.
    {"round_trip", "gemma3-dense", "f16/f16", 0, "contiguous"},
    {"round_trip", "gemma3-dense", "f16/f16", flash, "contiguous"},
    {"round_trip", "gemma3-dense", "f16/f16", swa_full | small, "contiguous"},
    {"round_trip", "gemma3-dense", "f16/f16", flash | streams, "contiguous"},
    {"round_trip", "gemma3-dense", "f16/f16", streams, "interleaved"},
    {"round_trip", "gemma3-dense", "f16/f16", swa_full, "holes"},
    {"round_trip", "gemma3-dense", "f16/f16", 0, "short"},
    {"round_trip", "gemma3-dense", "f16/f16", flash, "short"},
    {"round_trip", "gemma3-dense", "f16/f16", 0, "long"},
    {"round_trip", "gemma3-dense", "f16/f16", flash | streams, "long"},
    {"round_trip", "gemma3-dense", "f16/f16", swa_full, "long"},
    {"round_trip", "gemma3-dense", "f16/f16", swa_full, "shifted"},
    {"round_trip", "gemma3-dense", "f16/f16", swa_full, "shared"},
    {"round_trip", "gemma3-dense", "f16/f16", 0, "emptied"},
    {"round_trip", "gemma3-dense", "q8_0/q8_0", flash, "long"},
    {"round_trip", "gemma3-dense", "q4_0/q4_0", flash | swa_full, "interleaved"},
    {"round_trip", "gemma3-dense", "q8_0/f16", streams, "contiguous"},
    {"round_trip", "cohere2-dense", "f16/f16", 0, "contiguous"},
    {"round_trip", "cohere2-dense", "f16/f16", flash | swa_full, "holes"},
    {"round_trip", "gpt-oss-moe", "f16/f16", 0, "contiguous"},
    {"round_trip", "gpt-oss-moe", "f16/f16", flash | streams, "long"},
    {"round_trip", "llama4-moe", "f16/f16", 0, "contiguous"},
    {"round_trip", "llama4-moe", "f16/f16", flash | streams, "interleaved"},
    {"round_trip", "llama4-moe", "f16/f16", 0, "late"},
    {"round_trip", "llama4-moe", "f16/f16", flash | streams, "late"},
    // Other memories.
    {"round_trip", "mamba-dense", "f16/f16", small, "contiguous"},
    {"round_trip", "mamba-dense", "f16/f16", streams, "interleaved"},
    {"round_trip", "mamba-dense", "f16/f16", 0, "emptied"},
    {"round_trip", "falcon-h1-dense", "f16/f16", small, "contiguous"},
    {"round_trip", "falcon-h1-dense", "f16/f16", flash, "interleaved"},
    {"round_trip", "falcon-h1-dense", "f16/f16", 0, "emptied"},
    {"round_trip", "qwen3next-moe", "f16/f16", flash, "contiguous"},
    {"round_trip", "qwen3next-moe", "f16/f16", streams, "contiguous"},
    {"round_trip", "lfm2-dense", "f16/f16", 0, "contiguous"},
    {"round_trip", "qwen4exp-moe", "f16/f16", flash, "contiguous"},
    {"round_trip", "qwen4exp-moe", "f16/f16", flash, "holes"},
    {"round_trip", "minimax-m3-moe", "f16/f16", 0, "contiguous"},
    {"round_trip", "minimax-m3-moe", "f16/f16", flash, "interleaved"},
    {"round_trip", "deepseek32-moe", "f16/f16", flash, "contiguous"},
    {"round_trip", "dots3note-moe", "f16/f16", flash, "contiguous"},
    {"round_trip", "deepseek4-moe", "f16/f16", flash, "contiguous"},
    {"round_trip", "deepseek4-moe", "f16/f16", flash, "short"},

    // A prompt of 60 tokens and a reply of 40; save, restore, cut the reply off, go on.
    {"cut", "llama-dense", "f16/f16", 0, "contiguous"},
    {"cut", "gemma3-dense", "f16/f16", swa_full | small, "contiguous"},
    {"cut", "gemma3-dense", "f16/f16", 0, "contiguous"},
    {"cut", "gemma3-dense", "f16/f16", flash | swa_full, "contiguous"},
    {"cut", "gemma3-dense", "f16/f16", streams | swa_full, "contiguous"},
    {"cut", "cohere2-dense", "f16/f16", swa_full, "contiguous"},
    {"cut", "cohere2-dense", "f16/f16", flash, "contiguous"},
    {"cut", "gpt-oss-moe", "f16/f16", swa_full, "contiguous"},
    {"cut", "llama4-moe", "f16/f16", swa_full, "late"},
    {"cut", "dots3note-moe", "f16/f16", swa_full, "contiguous"},

    // A save between seq_add, or seq_cp to another stream, and the next decode.
    {"pending_shift", "llama-dense", "f16/f16", small, "contiguous"},
    {"pending_shift", "llama-dense", "f16/f16", flash | streams, "contiguous"},
    {"pending_shift", "llama-dense", "q8_0/q8_0", flash, "contiguous"},
    {"pending_shift", "gemma3-dense", "f16/f16", swa_full, "contiguous"},
    {"pending_shift", "gemma3-dense", "f16/f16", swa_full, "short"},
    {"pending_shift", "cohere2-dense", "f16/f16", swa_full, "short"},
    {"pending_copy", "llama-dense", "f16/f16", streams | small, "contiguous"},
    {"pending_copy", "gemma3-dense", "f16/f16", flash | streams, "contiguous"},

    // K of a sequence that was moved by 7 positions: rotated by llama.cpp in a decode, and by kvstate.
    {"k_shift", "llama-dense", "f16/f16", small, "contiguous"},
    {"k_shift", "llama-dense", "f16/f16", flash | streams, "holes"},
    {"k_shift", "llama-dense", "q8_0/q8_0", flash | small, "contiguous"},
    {"k_shift", "llama-dense", "q4_0/f16", 0, "contiguous"},
    {"k_shift", "llama-dense", "f16/f16", yarn, "contiguous"},
    {"k_shift", "llama-dense", "q8_0/q8_0", flash | yarn, "contiguous"},
    {"k_shift", "gemma3-dense", "f16/f16", swa_full, "contiguous"},
    {"k_shift", "gpt-oss-moe", "q8_0/q8_0", flash | swa_full, "short"},
    {"k_shift", "deepseek2-moe", "f16/f16", 0, "contiguous"},

    // 230 of 256 cells of the window's cache belong to others.
    {"crowded", "gemma3-dense", "f16/f16", 0, "contiguous"},
    {"crowded", "cohere2-dense", "f16/f16", flash, "contiguous"},
    {"crowded", "gpt-oss-moe", "f16/f16", 0, "long"},

    // What seq_rm answers for one range or another, right after a restore.
    {"removals", "llama-dense", "f16/f16", flash, "contiguous"},
    {"removals", "gemma3-dense", "f16/f16", flash, "contiguous"},
    {"removals", "mamba-dense", "f16/f16", small, "contiguous"},
    {"removals", "falcon-h1-dense", "f16/f16", flash | small, "contiguous"},
    {"removals", "qwen3next-moe", "f16/f16", flash | streams, "contiguous"},
    {"removals", "lfm2-dense", "f16/f16", 0, "contiguous"},
    {"removals", "qwen4exp-moe", "f16/f16", flash, "contiguous"},
    {"removals", "minimax-m3-moe", "f16/f16", flash, "contiguous"},
    {"removals", "deepseek32-moe", "f16/f16", flash, "contiguous"},
    {"removals", "dots3note-moe", "f16/f16", flash, "contiguous"},
    {"removals", "deepseek4-moe", "f16/f16", flash | small, "contiguous"},

    // Ranges of the sequence that kvstate writes alone, as states and as files.
    {"pieces", "llama-dense", "f16/f16", small, "contiguous"},
    {"pieces", "llama-dense", "q8_0/q8_0", flash | streams | small, "interleaved"},
    {"pieces", "qwen2vl-dense", "f16/f16", flash, "image"},
    {"pieces", "deepseek2-moe", "f16/f16", 0, "contiguous"},
    {"pieces", "gemma3-dense", "f16/f16", small, "short"},
    {"pieces", "gpt-oss-moe", "f16/f16", flash | streams, "short"},
    {"pieces", "minimax-m3-moe", "f16/f16", flash, "contiguous"},
    {"pieces", "dots3note-moe", "f16/f16", flash, "short"},
    {"pieces", "mamba-dense", "f16/f16", 0, "contiguous"},
    {"pieces", "falcon-h1-dense", "f16/f16", flash | small, "contiguous"},
    {"pieces", "deepseek4-moe", "f16/f16", flash, "short"},

    {"refusals", "llama-dense", "f16/f16", small, "contiguous"},
    {"refusals", "llama-dense", "f16/f16", flash | streams, "contiguous"},
    {"refusals", "qwen2vl-dense", "f16/f16", 0, "contiguous"},
    {"refusals", "deepseek2-moe", "f16/f16", flash, "contiguous"},
    {"refusals", "gemma3-dense", "f16/f16", small, "contiguous"},
    {"refusals", "gemma3-dense", "f16/f16", flash | swa_full, "contiguous"},
    {"refusals", "mamba-dense", "f16/f16", small, "contiguous"},
    {"refusals", "falcon-h1-dense", "f16/f16", small, "contiguous"},
    {"refusals", "qwen3next-moe", "f16/f16", flash, "contiguous"},
    {"refusals", "lfm2-dense", "f16/f16", 0, "contiguous"},
    {"refusals", "qwen4exp-moe", "f16/f16", flash, "contiguous"},
    {"refusals", "minimax-m3-moe", "f16/f16", 0, "contiguous"},
    {"refusals", "deepseek32-moe", "f16/f16", flash, "contiguous"},
    {"refusals", "dots3note-moe", "f16/f16", flash, "contiguous"},
    {"refusals", "deepseek4-moe", "f16/f16", flash, "contiguous"},

    {"on_device", "llama-dense", "f16/f16", small, "contiguous"},
    {"on_device", "llama-dense", "q8_0/q8_0", flash | streams, "interleaved"},
    {"on_device", "gemma3-dense", "f16/f16", flash, "contiguous"},
    {"on_device", "mamba-dense", "f16/f16", 0, "contiguous"},
    {"on_device", "falcon-h1-dense", "f16/f16", 0, "contiguous"},
    {"on_device", "deepseek4-moe", "f16/f16", flash, "contiguous"},
    {"on_device_refusals", "llama-dense", "f16/f16", small, "contiguous"},
    {"on_device_refusals", "gemma3-dense", "f16/f16", flash, "contiguous"},
    {"on_device_refusals", "mamba-dense", "f16/f16", 0, "contiguous"},
    {"on_device_refusals", "falcon-h1-dense", "f16/f16", 0, "contiguous"},

    {"exceptions", "llama-dense", "f16/f16", flash | small, "short"},
    {"exceptions", "llama-dense", "f16/f16", 0, "short"},
    {"exceptions", "gemma3-dense", "f16/f16", flash, "short"},
    {"exceptions", "mamba-dense", "f16/f16", 0, "short"},
    {"exceptions", "falcon-h1-dense", "f16/f16", flash, "short"},
    {"exceptions", "minimax-m3-moe", "f16/f16", flash, "short"},
    {"exceptions", "deepseek32-moe", "f16/f16", flash, "short"},
    {"exceptions", "deepseek4-moe", "f16/f16", flash, "short"},
};

// The ranges of removals, of 100 positions from 0.
struct Range {
    const char *name;
    int32_t p0, p1;
};
const Range ranges[] = {
    {"all", -1, -1},        {"all_by_number", 0, 100}, {"nothing", 100, -1},    {"behind", 120, 130},
    {"last", 99, -1},       {"last_three", 97, 100},   {"tail", 60, -1},        {"from_one", 1, -1},
    {"first", -1, 1},       {"head", 0, 50},           {"head_long", -1, 98},   {"middle", 40, 60},
    {"middle_one", 50, 51}, {"all_but_last", 0, 99},   {"beyond", 0, 1 << 20},  {"empty", 50, 50},
};

const Model *find_model(const std::string &name);

// The sections of a memory in write order: an attention cache (a), one with a window (w), an indexer on the cells of the first
// section (i), recurrent states (r), the compressed half of DSV4 (c).
inline std::string sections_of(Memory memory) {
    switch (memory) {
        case Memory::attention: return "a";
        case Memory::iswa: return "aw";
        case Memory::recurrent: return "r";
        case Memory::hybrid: return "ar";
        case Memory::hybrid_iswa: return "awr";
        case Memory::hybrid_idx: return "ari";
        case Memory::msa:
        case Memory::dsa: return "ai";
        case Memory::dsa_iswa: return "aiw";
        case Memory::dsv4: return "awc";
    }
    return "";
}

// The ranges of pieces, in fifths of the positions.
struct Piece {
    const char *name;
    int32_t from, to;
};

// A recurrent or compressed state is of its end: there are no pieces before it.
inline std::vector<Piece> pieces_of(Memory memory) {
    if (sections_of(memory).find_first_of("rc") != std::string::npos) return {{"tail", 3, 5}};
    return {{"head", 0, 3}, {"middle", 1, 2}, {"tail", 3, 5}};
}

// How many attention caches the memory is made of; 0: not only of those.
inline size_t attention_sections(Memory memory) {
    const std::string sections = sections_of(memory);
    return sections.find_first_of("rc") == std::string::npos ? sections.size() : 0;
}

// Whether a section of the memory has a window: if all are attention caches, the last one.
inline bool has_window(Memory memory) { return sections_of(memory).find('w') != std::string::npos; }

// Whether all of the memory is full attention: seq_rm rolls it back, so that a partial state is empty.
inline bool all_full_attention(Memory memory) {
    return memory == Memory::attention || memory == Memory::msa || memory == Memory::dsa;
}
