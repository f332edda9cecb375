// An inference engine that keeps its KV cache in kvstate: the transformer computes; kvstate says where K and
// V of a token go and which cells it sees, and saves and restores all of it.

#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvstate.h"
#include "transformer.hpp"

namespace demo {

// Turns a failure of the library into an exception with its reason. What counts as failure is in the type: a
// kvs_status is 0 on success; calls with llama.cpp's names return a size or a bool, which is 0 on failure.
inline void check(kvs_status status) {
    if (status != KVS_STATUS_OK) {
        throw std::runtime_error(kvs_last_error());
    }
}

inline void check(bool ok) {
    if (!ok) {
        throw std::runtime_error(kvs_last_error());
    }
}

inline size_t check(size_t size) {
    check(size != 0);
    return size;
}

struct Free {
    void operator()(kvs_context *ctx) const { kvs_context_free(ctx); }
    void operator()(kvs_slot *slot) const { kvs_slot_free(slot); }
    void operator()(kvs_snapshot *snapshot) const { kvs_snapshot_free(snapshot); }
    void operator()(kvs_job *job) const { kvs_job_free(job); }
};
using Context = std::unique_ptr<kvs_context, Free>;
using Slot = std::unique_ptr<kvs_slot, Free>;
using Snapshot = std::unique_ptr<kvs_snapshot, Free>;
using Job = std::unique_ptr<kvs_job, Free>;

using Tokens = std::vector<kvs_token>;
using Bytes = std::vector<uint8_t>;

// An attention cache whose layers are all alike.
inline kvs_kv_params kv_params(uint32_t kv_size, const std::vector<kvs_kv_layer_params> &layers) {
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = kv_size;
    kv.n_layer = uint32_t(layers.size());
    kv.layers = layers.data();
    return kv;
}

inline std::vector<kvs_kv_layer_params> layer_params(uint32_t n_layer, int32_t type, uint32_t n_embd,
                                                     int32_t device = KVS_DEVICE_HOST) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.device = device;
    layer.type_k = layer.type_v = type;
    layer.n_embd_k_gqa = layer.n_embd_v_gqa = n_embd;
    return std::vector<kvs_kv_layer_params>(n_layer, layer);
}

inline Context new_context(const std::vector<kvs_kv_params> &kvs, uint32_t n_seq_max, const char *arch) {
    std::vector<kvs_section_params> sections(kvs.size(), kvs_section_default_params());
    for (size_t i = 0; i < kvs.size(); ++i) {
        sections[i].kv = &kvs[i];
    }
    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = n_seq_max;
    params.sections = sections.data();
    params.n_section = uint32_t(sections.size());
    params.arch = arch;
    kvs_context *ctx = nullptr;
    check(kvs_context_new(&params, &ctx));
    return Context(ctx);
}

// K and V of a layer on a device, as this engine, which has no kernels of its own, works on them: it gets the
// rows, computes on the host, and sets what it has written.
class RowsOnDevice {
public:
    RowsOnDevice(kvs_context *ctx, uint32_t section, uint32_t layer, uint32_t n_rows, size_t stride)
        : ctx(ctx), section(section), layer(layer), stride(stride), k(n_rows * stride), v(n_rows * stride) {
        check(kvs_kv_get(ctx, section, 0, layer, KVS_KV_K, 0, k.data(), k.size()));
        check(kvs_kv_get(ctx, section, 0, layer, KVS_KV_V, 0, v.data(), v.size()));
    }

    LayerCache cache() { return {k.data(), v.data(), stride, stride, nullptr, nullptr}; }

    void set(const std::vector<uint32_t> &cells) const {
        for (const uint32_t cell : cells) {
            const size_t offset = cell * stride;
            check(kvs_kv_set(ctx, section, 0, layer, KVS_KV_K, offset, &k[offset], stride));
            check(kvs_kv_set(ctx, section, 0, layer, KVS_KV_V, offset, &v[offset], stride));
        }
    }

private:
    kvs_context *ctx;
    uint32_t section;
    uint32_t layer;
    size_t stride;
    std::vector<std::byte> k;
    std::vector<std::byte> v;
};

class Engine {
public:
    static constexpr uint32_t n_ctx = 1024;
    static constexpr uint32_t n_swa = 64;
    static constexpr uint32_t n_seq_max = 2;

    // Sections come in the order of llama.cpp's iSWA: full attention, then the sliding window.
    enum Section : uint32_t { full, swa, n_section };

    // swa_cells: n_ctx, or fewer: then cells that the window has left are used again.
    // device: of the cache; the transformer computes on the host whichever it is.
    Engine(const Transformer &model, uint32_t n_ubatch, uint32_t swa_cells, int32_t device = KVS_DEVICE_HOST)
        : model(model), n_ubatch(n_ubatch), device(device) {
        const auto layers =
            layer_params(Transformer::n_layer / n_section, KVS_TYPE_F32, Transformer::n_embd_kv, device);
        std::vector<kvs_kv_params> kvs = {kv_params(n_ctx, layers), kv_params(swa_cells, layers)};
        kvs[swa].swa_type = KVS_SWA_TYPE_STANDARD;
        kvs[swa].n_swa = n_swa;
        context = new_context(kvs, n_seq_max, "demo");
    }

    kvs_context *ctx() const { return context.get(); }
    kvs_memory_t memory() const { return kvs_get_memory(ctx()); }
    kvs_pos n_past(kvs_seq_id seq) const { return kvs_memory_seq_pos_max(memory(), seq) + 1; }

    // Computes tokens behind what the sequence holds; gives the logits of each.
    std::vector<Vector> decode(kvs_seq_id seq, const Tokens &tokens) {
        std::vector<Vector> logits;
        for (size_t done = 0; done < tokens.size(); done += n_ubatch) {
            const size_t end = std::min(tokens.size(), done + n_ubatch);
            for (Vector &row : decode_ubatch(seq, Tokens(tokens.begin() + done, tokens.begin() + end))) {
                logits.push_back(std::move(row));
            }
        }
        return logits;
    }

    // The state of a sequence. flags: all of it, or only what kvs_memory_seq_rm cannot roll back.
    Bytes save(kvs_seq_id seq, kvs_state_seq_flags flags) {
        Bytes state(check(kvs_state_seq_get_size_ext(ctx(), seq, flags)));
        check(kvs_state_seq_get_data_ext(ctx(), state.data(), state.size(), seq, flags));
        return state;
    }

    void restore(kvs_seq_id seq, const Bytes &state, kvs_state_seq_flags flags) {
        check(kvs_state_seq_set_data_ext(ctx(), state.data(), state.size(), seq, flags));
    }

    Snapshot snapshot(kvs_seq_id seq) {
        kvs_snapshot *taken = nullptr;
        check(kvs_snapshot_take(ctx(), seq, KVS_STATE_SEQ_FLAGS_NONE, &taken));
        return Snapshot(taken);
    }

    void remove_tail(kvs_seq_id seq, kvs_pos from) { check(kvs_memory_seq_rm(memory(), seq, from, -1)); }

private:
    std::vector<Vector> decode_ubatch(kvs_seq_id seq, const Tokens &tokens) {
        std::vector<kvs_pos> positions(tokens.size());
        for (size_t i = 0; i < tokens.size(); ++i) {
            positions[i] = n_past(seq) + kvs_pos(i);
        }
        const std::vector<const kvs_seq_id *> seq_ids(tokens.size(), &seq);
        kvs_ubatch ubatch = kvs_ubatch_default();
        ubatch.n_tokens = uint32_t(tokens.size());
        ubatch.pos = positions.data();
        ubatch.seq_id = seq_ids.data();

        kvs_slot *found = nullptr;
        check(kvs_slot_prepare(ctx(), &ubatch, &found));
        const Slot slot(found);
        // From here on the cells belong to these tokens, and masks show them; their rows are written below.
        check(kvs_slot_commit(ctx(), slot.get()));

        std::vector<uint32_t> cells[n_section];
        std::vector<std::vector<uint32_t>> seen[n_section];
        for (uint32_t section = 0; section < n_section; ++section) {
            cells[section].resize(tokens.size());
            check(kvs_slot_cells(slot.get(), section, cells[section].data(), tokens.size()));
            seen[section] = seen_cells(section, ubatch);
        }
        std::vector<LayerCache> caches;
        std::vector<RowsOnDevice> on_device;
        on_device.reserve(Transformer::n_layer);
        for (uint32_t il = 0; il < Transformer::n_layer; ++il) {
            const Section section = section_of(il);
            if (device == KVS_DEVICE_HOST) {
                caches.push_back(layer_cache(section, il / 2));
            } else {
                on_device.emplace_back(ctx(), section, il / 2, n_kv(section), row_size);
                caches.push_back(on_device.back().cache());
            }
            caches.back().cells = &cells[section];
            caches.back().seen = &seen[section];
        }
        const std::vector<Vector> logits = model.forward(tokens, positions, caches);
        for (uint32_t il = 0; il < on_device.size(); ++il) {
            on_device[il].set(cells[section_of(il)]);
        }
        return logits;
    }

    // Layers alternate: window, full, window, full.
    static Section section_of(uint32_t il) { return il % 2 == 0 ? swa : full; }

    uint32_t n_kv(uint32_t section) const {
        uint32_t n_kv = 0;
        check(kvs_n_kv(ctx(), section, 0, 256, &n_kv));
        return n_kv;
    }

    // The cells that each token of a ubatch attends to, in the order of their positions: a restored sequence
    // lies in other cells than before, and floats must still be summed in the same order.
    std::vector<std::vector<uint32_t>> seen_cells(uint32_t section, const kvs_ubatch &ubatch) const {
        const uint32_t n_kv = this->n_kv(section);
        std::vector<kvs_pos> positions(n_kv);
        for (uint32_t cell = 0; cell < n_kv; ++cell) {
            kvs_cell known;
            check(kvs_cell_get(ctx(), section, 0, cell, &known));
            positions[cell] = known.pos;
        }
        std::vector<std::vector<uint32_t>> seen(ubatch.n_tokens);
        Vector mask(n_kv);
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            check(kvs_mask_row(ctx(), section, &ubatch, i, mask.data(), n_kv));
            for (uint32_t cell = 0; cell < n_kv; ++cell) {
                if (mask[cell] == 0.0f) {
                    seen[i].push_back(cell);
                }
            }
            std::sort(seen[i].begin(), seen[i].end(),
                      [&](uint32_t a, uint32_t b) { return positions[a] < positions[b]; });
        }
        return seen;
    }

    LayerCache layer_cache(uint32_t section, uint32_t layer_of_section) const {
        kvs_plane k;
        kvs_plane v;
        check(kvs_kv_plane(ctx(), section, 0, layer_of_section, &k, &v));
        return {static_cast<std::byte *>(k.data),
                static_cast<std::byte *>(v.data),
                size_t(k.cell_stride),
                size_t(v.cell_stride),
                nullptr,
                nullptr};
    }

    static constexpr size_t row_size = Transformer::n_embd_kv * sizeof(float);

    const Transformer &model;
    uint32_t n_ubatch;
    int32_t device;
    Context context;
};

}  // namespace demo
