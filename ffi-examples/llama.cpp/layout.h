// What the adapter takes for granted of llama.cpp's classes. When one of them changes, this file fails to compile;
// nothing is found out at run time. README.md says what to look at for each line.
#pragma once

#include "llama-context.h"
#include "llama-io.h"
#include "llama-kv-cache.h"
#include "llama-kv-cells.h"

#include <type_traits>

// Members that are replaced: a changed signature would be another symbol, and the original would run unnoticed.
static_assert(std::is_same_v<decltype(&llama_kv_cache::state_write),
        void (llama_kv_cache::*)(llama_io_write_i &, llama_seq_id, llama_state_seq_flags) const>);
static_assert(std::is_same_v<decltype(&llama_kv_cache::state_read_sinfo),
        void (llama_kv_cache::*)(llama_io_read_i &, llama_seq_id, llama_state_seq_flags,
                llama_kv_cache::slot_info_vec_t *, const llama_kv_cache::slot_info_vec_t *)>);

// Exported calls that are taken over.
static_assert(std::is_same_v<decltype(&llama_state_get_size), size_t (*)(llama_context *)>);
static_assert(std::is_same_v<decltype(&llama_state_get_data), size_t (*)(llama_context *, uint8_t *, size_t)>);
static_assert(std::is_same_v<decltype(&llama_state_set_data), size_t (*)(llama_context *, const uint8_t *, size_t)>);
static_assert(std::is_same_v<decltype(&llama_state_save_file),
        bool (*)(llama_context *, const char *, const llama_token *, size_t)>);
static_assert(std::is_same_v<decltype(&llama_state_load_file),
        bool (*)(llama_context *, const char *, llama_token *, size_t, size_t *)>);
static_assert(std::is_same_v<decltype(&llama_state_seq_get_size_ext),
        size_t (*)(llama_context *, llama_seq_id, llama_state_seq_flags)>);
static_assert(std::is_same_v<decltype(&llama_state_seq_get_data_ext),
        size_t (*)(llama_context *, uint8_t *, size_t, llama_seq_id, llama_state_seq_flags)>);
static_assert(std::is_same_v<decltype(&llama_state_seq_set_data_ext),
        size_t (*)(llama_context *, const uint8_t *, size_t, llama_seq_id, llama_state_seq_flags)>);
static_assert(std::is_same_v<decltype(&llama_state_seq_save_file),
        size_t (*)(llama_context *, const char *, llama_seq_id, const llama_token *, size_t)>);
static_assert(std::is_same_v<decltype(&llama_state_seq_load_file),
        size_t (*)(llama_context *, const char *, llama_seq_id, llama_token *, size_t, size_t *)>);

// Formats: another version has other bytes.
static_assert(LLAMA_STATE_SEQ_VERSION == 4);
static_assert(LLAMA_STATE_SEQ_FLAGS_NONE == 0);
static_assert(LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY == 1);
static_assert(LLAMA_STATE_SEQ_FLAGS_ON_DEVICE == 2);
static_assert(LLAMA_SWA_TYPE_NONE == 0 && LLAMA_SWA_TYPE_STANDARD == 1 && LLAMA_SWA_TYPE_CHUNKED == 2 &&
        LLAMA_SWA_TYPE_SYMMETRIC == 3);
static_assert(sizeof(llama_pos) == 4 && sizeof(llama_token) == 4 && sizeof(llama_seq_id) == 4);

// Cells: what a kvs_cell carries is all there is.
static_assert(std::is_same_v<decltype(llama_kv_cell_ext::x), llama_pos>);
static_assert(std::is_same_v<decltype(llama_kv_cell_ext::y), llama_pos>);
static_assert(std::is_same_v<decltype(llama_kv_cell_ext::tok), llama_token>);
static_assert(sizeof(llama_kv_cell_ext) == 12, "a new field has to travel in kvs_cell");
static_assert(LLAMA_MAX_SEQ == 256 && sizeof(llama_kv_cells::seq_set_t) == 32);
static_assert(std::is_same_v<decltype(&llama_kv_cells::seq_pos_get),
        const std::set<std::pair<llama_pos, uint32_t>> & (llama_kv_cells::*)(llama_seq_id) const>);

// Where restored cells are.
static_assert(std::is_same_v<decltype(llama_kv_cache::slot_info::strm), std::vector<llama_seq_id>>);
static_assert(std::is_same_v<decltype(llama_kv_cache::slot_info::idxs), std::vector<std::vector<uint32_t>>>);

// Where the bytes go: a new virtual of these has to be passed on.
static_assert(std::is_same_v<decltype(&llama_io_write_i::write_tensor),
        void (llama_io_write_i::*)(ggml_tensor *, size_t, size_t)>);
static_assert(std::is_same_v<decltype(&llama_io_read_i::read_tensor),
        void (llama_io_read_i::*)(ggml_tensor *, size_t, size_t)>);
static_assert(std::is_same_v<decltype(&llama_context::memory_update), bool (llama_context::*)(bool)>);
