// An inference engine that keeps its KV cache in kvstate: the transformer computes; kvstate says where K and
// V of a token go and which cells it sees, and saves and restores all of it.

#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
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
    void operator()(kvs_job *job) const { kvs_job_free(job); }
};
using Context = std::unique_ptr<kvs_context, Free>;
using Slot = std::unique_ptr<kvs_slot, Free>;
using Job = std::unique_ptr<kvs_job, Free>;

using Tokens = std::vector<kvs_token>;
using Bytes = std::vector<uint8_t>;

// A partial state of a sequence, and its positions when it was taken.
struct Checkpoint {
    kvs_pos pos_min = -1;
    kvs_pos pos_max = -1;
    Bytes state;
};
// By the number of tokens before them.
using Checkpoints = std::map<size_t, Checkpoint>;

using Fingerprint = std::array<uint8_t, KVS_FINGERPRINT_SIZE>;

// What a slot file is to hold beside the state. It points to what it is made of, which has to outlive it.
class SlotToSave {
public:
    SlotToSave(const Tokens &tokens, const Checkpoints &taken, const Fingerprint &model) {
        for (const auto &[n_tokens, checkpoint] : taken) {
            kvs_slot_checkpoint &to = checkpoints.emplace_back(kvs_slot_checkpoint_default());
            to.n_tokens = int64_t(n_tokens);
            to.pos_min = checkpoint.pos_min;
            to.pos_max = checkpoint.pos_max;
            to.target = checkpoint.state.data();
            to.target_size = checkpoint.state.size();
        }
        params.tokens = tokens.data();
        params.n_tokens = tokens.size();
        params.checkpoints = checkpoints.data();
        params.n_checkpoint = checkpoints.size();
        params.identity.model = model.data();
        params.identity.model_size = model.size();
    }
    SlotToSave(const SlotToSave &) = delete;
    SlotToSave &operator=(const SlotToSave &) = delete;

    const kvs_slot_save_params *get() const { return &params; }

private:
    std::vector<kvs_slot_checkpoint> checkpoints;
    kvs_slot_save_params params = kvs_slot_save_default_params();
};

// What a careful server asks of a slot file: that it is this model's, and that every byte is as it was saved.
// Points to the fingerprint.
inline kvs_slot_load_params careful(const Fingerprint &model) {
    kvs_slot_load_params params = kvs_slot_load_default_params();
    params.verify = KVS_VERIFY_FULL;
    params.require = KVS_REQUIRE_IDENTITY | KVS_REQUIRE_CHECKSUMS;
    params.identity.model = model.data();
    params.identity.model_size = model.size();
    return params;
}

// Loads a slot file, and holds what it gave beside the state.
class LoadedSlot {
public:
    LoadedSlot(kvs_context *ctx, const std::string &file, kvs_seq_id seq,
               const kvs_slot_load_params &params) {
        check(kvs_slot_load(ctx, file.c_str(), seq, &params, &result));
    }
    ~LoadedSlot() { kvs_slot_result_free(&result); }
    LoadedSlot(const LoadedSlot &) = delete;
    LoadedSlot &operator=(const LoadedSlot &) = delete;

    const kvs_slot_result *operator->() const { return &result; }

    Tokens tokens() const { return Tokens(result.tokens, result.tokens + result.n_token_kept); }

    Checkpoints checkpoints() const {
        Checkpoints restored;
        for (size_t i = 0; i < result.n_checkpoint; ++i) {
            const kvs_slot_checkpoint &from = result.checkpoints[i];
            restored[size_t(from.n_tokens)] = {from.pos_min, from.pos_max,
                                               Bytes(from.target, from.target + from.target_size)};
        }
        return restored;
    }

private:
    kvs_slot_result result = kvs_slot_result_default();
};

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

    Checkpoint checkpoint(kvs_seq_id seq) {
        return {kvs_memory_seq_pos_min(memory(), seq), kvs_memory_seq_pos_max(memory(), seq),
                save(seq, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY)};
    }

    // Whose states these are: of use to an engine with the same weights and settings alone. Of a model that
    // has a file, that would be named too.
    Fingerprint fingerprint() const {
        const std::string values[] = {std::to_string(model.seed), std::to_string(Transformer::n_layer),
                                      std::to_string(Transformer::n_embd), std::to_string(n_swa)};
        const kvs_setting settings[] = {{"seed", values[0].c_str()},   {"n_layer", values[1].c_str()},
                                        {"n_embd", values[2].c_str()}, {"n_swa", values[3].c_str()},
                                        {"type_k", "f32"},             {"type_v", "f32"}};
        Fingerprint fingerprint;
        check(kvs_fingerprint(nullptr, 0, settings, std::size(settings), fingerprint.data()));
        return fingerprint;
    }

    // Returns the size of the file.
    size_t save_slot(const std::string &file, kvs_seq_id seq, const SlotToSave &slot) {
        size_t size = 0;
        check(kvs_slot_save(ctx(), file.c_str(), seq, slot.get(), &size));
        return size;
    }

    // The same on a thread of its own, of the slot as it is now.
    Job save_slot_start(const std::string &file, kvs_seq_id seq, const SlotToSave &slot) {
        kvs_job *job = nullptr;
        check(kvs_slot_save_start(ctx(), file.c_str(), seq, slot.get(), nullptr, &job));
        return Job(job);
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
