// Private members that the adapter reads and that have no getter. An explicit instantiation may name them; a member
// that is renamed or changes its type fails to compile here or where it is used.
#pragma once

#include "llama-context.h"
#include "llama-kv-cache.h"

template <typename Tag, auto Member> struct reveal {
    friend constexpr auto member(Tag) { return Member; }
};

#define REVEAL(cls, name)                               \
    struct cls##_##name {                               \
        friend constexpr auto member(cls##_##name);     \
    };                                                  \
    template struct reveal<cls##_##name, &cls::name>

REVEAL(llama_kv_cache, layers);
REVEAL(llama_kv_cache, n_rot_k);
REVEAL(llama_kv_cache, n_rot_v);
REVEAL(llama_kv_cache, n_swa);
REVEAL(llama_kv_cache, other);
REVEAL(llama_kv_cache, seq_to_stream);
REVEAL(llama_kv_cache, swa_type);
REVEAL(llama_kv_cache, v_cells_impl);
REVEAL(llama_kv_cache, v_heads);
REVEAL(llama_kv_cache, v_trans);
REVEAL(llama_context, mem_storage);

#undef REVEAL
