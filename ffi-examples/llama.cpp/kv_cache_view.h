// A kvstate view of a llama_kv_cache.
#pragma once

#include "io.h"

#include <vector>

// It refers to itself: it stays where it is.
class kv_cache_view {
public:
    kv_cache_view(llama_kv_cache & kv, const llama_hparams & hparams);
    kv_cache_view(const kv_cache_view &) = delete;
    kv_cache_view & operator=(const kv_cache_view &) = delete;

    // call(tensor, whether kvstate reaches it by itself)
    template <typename F> void each_tensor(F && call) const {
        for (const auto * planes : { &k, &v }) {
            for (const kvs_plane & plane : *planes) {
                if (plane.tensor) {
                    call(static_cast<const ggml_tensor *>(plane.tensor), plane.data != nullptr);
                }
            }
        }
    }

    kvs_kv_view view;
    carried_exception carried;

private:
    int  visit(uint32_t stream, llama_seq_id seq_id, kvs_visit_each each, void * arg) const;
    void apply_seq(uint32_t stream, llama_seq_id seq_id, const kvs_cell * cells, uint32_t n);
    void apply_all(uint32_t stream, const kvs_cell * cells, uint32_t n);

    llama_kv_cache & kv;
    const llama_hparams & hparams;
    std::vector<kvs_plane> k;
    std::vector<kvs_plane> v;
};
