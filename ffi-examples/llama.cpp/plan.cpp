#include "plan.h"

#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace {

[[noreturn]] void refuse(const std::string & what, uint64_t state, uint64_t expected) {
    throw std::runtime_error(what + ": the state has " + std::to_string(state) + ", expected " +
            std::to_string(expected));
}

// Remembers what a section writes: its metadata, write by write. Other sections of the same shape have the same.
class shape_io : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        const auto * bytes = static_cast<const char *>(src);
        fields.emplace_back(bytes, bytes + size);
        n_written += size;
        if (fields.size() == n_fields_max) {
            throw enough();
        }
    }
    void write_tensor(ggml_tensor *, size_t, size_t size) override { n_written += size; }
    size_t n_bytes() override { return n_written; }

    struct enough {};

    std::vector<std::string> fields;
    size_t n_fields_max = SIZE_MAX;

private:
    size_t n_written = 0;
};

class planner {
public:
    planner(reader_io & io, llama_seq_id seq_id, llama_state_seq_flags flags) :
        io(io), seq_id(seq_id), flags(flags), partial(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {}

    // The order, and what a partial state leaves out, are those of each state_read.
    bool memory(llama_memory_i * mem) {
        if (auto * kv = dynamic_cast<llama_kv_cache *>(mem)) {
            attention(kv);
        } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
            this->iswa(iswa);
        } else if (auto * dsa = dynamic_cast<llama_kv_cache_dsa *>(mem)) {
            this->dsa(dsa);
        } else if (auto * dsa_iswa = dynamic_cast<llama_kv_cache_dsa_iswa *>(mem)) {
            if (!partial) {
                this->dsa(dsa_iswa->get_dsa());
            }
            attention(dsa_iswa->get_swa());
        } else if (auto * msa = dynamic_cast<llama_kv_cache_msa *>(mem)) {
            attention(msa->get_base());
            attention(msa->get_idx());
        } else if (auto * idx = dynamic_cast<llama_memory_hybrid_idx *>(mem)) {
            hybrid_idx(idx);
        } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(mem)) {
            if (!partial) {
                attention(hybrid->get_mem_attn());
            }
            recurrent(hybrid->get_mem_recr());
        } else if (auto * hybrid_iswa = dynamic_cast<llama_memory_hybrid_iswa *>(mem)) {
            this->iswa(hybrid_iswa->get_mem_attn());
            recurrent(hybrid_iswa->get_mem_recr());
        } else if (auto * recr = dynamic_cast<llama_memory_recurrent *>(mem)) {
            recurrent(recr);
        } else if (auto * dsv4 = dynamic_cast<llama_kv_cache_dsv4 *>(mem)) {
            this->dsv4(dsv4);
        } else {
            return false;
        }
        return true;
    }

private:
    void attention(llama_kv_cache * kv) { kv->state_read_sinfo(io, seq_id, flags, nullptr, nullptr); }

    void iswa(llama_kv_cache_iswa * kv) {
        if (!partial) {
            attention(kv->get_base());
        }
        attention(kv->get_swa());
    }

    void dsa(llama_kv_cache_dsa * kv) {
        attention(kv->get_mla());
        attention(kv->get_lid());
    }

    void hybrid_idx(llama_memory_hybrid_idx * mem) {
        llama_kv_cache::slot_info_vec_t sinfos;
        if (!partial) {
            mem->get_mem_attn()->state_read_sinfo(io, seq_id, flags, mem->get_mem_idx() ? &sinfos : nullptr, nullptr);
        }
        recurrent(mem->get_mem_recr());
        if (!partial && mem->get_mem_idx()) {
            mem->get_mem_idx()->state_read_sinfo(io, seq_id, flags, nullptr, &sinfos);
        }
    }

    // The rows of all layers are sized by what the section itself writes.
    void recurrent(llama_memory_recurrent * mem) {
        shape_io shape;
        mem->state_write(shape, std::max(seq_id, 0), flags);
        auto field = shape.fields.begin();

        const uint32_t n_cells     = get<uint32_t>();
        const uint32_t n_cells_max = seq_id == -1 ? mem->size : 1;
        if (n_cells > n_cells_max) {
            throw std::runtime_error("recurrent cells: the state has " + std::to_string(n_cells) + ", at most " +
                    std::to_string(n_cells_max) + " can be");
        }
        std::vector<bool> seen(mem->rs_idx.size());
        for (uint32_t i = 0; i < n_cells; ++i) {
            recurrent_cell(seen);
        }

        uint32_t n_own;
        std::memcpy(&n_own, (field++)->data(), sizeof(n_own));
        field += 2 * n_own;
        // then s_trans, the number of layers, and for each tensor its type (not for P) and its row size
        for (; field != shape.fields.end(); ++field) {
            same(*field, "recurrent layout");
            if (field->size() == sizeof(uint64_t)) {
                uint64_t row_size;
                std::memcpy(&row_size, field->data(), sizeof(row_size));
                io.skip_tensor(row_size * n_cells);
            }
        }
    }

    // seen: sequences that have a state already.
    void recurrent_cell(std::vector<bool> & seen) {
        const llama_pos pos = get<llama_pos>();
        if (pos < 0) {
            throw std::runtime_error("pos of a recurrent cell: " + std::to_string(pos) + ", expected at least 0");
        }
        const uint32_t n_seq_id = get<uint32_t>();
        if (seq_id >= 0) {
            if (n_seq_id != 0) {
                refuse("n_seq_id of a recurrent cell", n_seq_id, 0);
            }
            return;
        }
        for (uint32_t j = 0; j < n_seq_id; ++j) {
            const llama_seq_id id = get<llama_seq_id>();
            if (id < 0 || (size_t) id >= seen.size() || seen[id]) {
                throw std::runtime_error("seq_id of a recurrent cell: " + std::to_string(id) + ", expected one of " +
                        std::to_string(seen.size()) + " sequences, each once");
            }
            seen[id] = true;
        }
    }

    void dsv4(llama_kv_cache_dsv4 * mem) {
        shape_io head;
        head.n_fields_max = 3;
        try {
            mem->state_write(head, seq_id, flags);
        } catch (const shape_io::enough &) {
        }
        same(head.fields[0], "DSV4 magic");
        same(head.fields[1], "DSV4 version");
        same(head.fields[2], "DSV4 mode");

        iswa(mem->get_raw());
        if (!partial) {
            compressed(mem->get_csa());
            compressed(mem->get_hca());
            compressed(mem->get_lid());
        }
        compressor(mem->get_csa_state(), mem->get_rs_idx());
        compressor(mem->get_hca_state(), mem->get_rs_idx());
        compressor(mem->get_lid_state(), mem->get_rs_idx());
    }

    void compressed(const llama_kv_cache * kv) {
        const uint32_t version = get<uint32_t>();
        const uint32_t n_rows  = get<uint32_t>();
        if (version != 1 && version != 2) {
            refuse("version of a compressed cache", version, 2);
        }
        if (version == 1 ? n_rows != kv->get_size() : n_rows > kv->get_size()) {
            refuse("rows of a compressed cache", n_rows, kv->get_size());
        }
        const uint32_t ns = seq_id == -1 ? kv->get_n_stream() : 1;
        same<uint32_t>(ns, "streams of a compressed cache");
        const auto layers = kv->get_layer_ids();
        same<uint32_t>(layers.size(), "layers of a compressed cache");
        for (const uint32_t il : layers) {
            const ggml_tensor * k = kv->get_k_storage(il);
            const uint64_t row_size = ggml_row_size(k->type, k->ne[0]);
            same<uint32_t>(il, "layer of a compressed cache");
            same<int32_t >(k->type, "type of a compressed cache");
            same<uint64_t>(k->ne[0], "width of a compressed cache");
            same<uint64_t>(n_rows, "rows of a compressed layer");
            same<uint64_t>(row_size, "row size of a compressed cache");
            io.skip_tensor(row_size * n_rows * ns);
        }
    }

    // Its size depends on nothing but the geometry, so it is what this one would write. A type, a width, a number of
    // rows and their size come before each tensor.
    void compressor(const llama_dsv4_comp_state * state, const std::vector<uint32_t> & rs_idx) {
        shape_io shape;
        state->state_write(shape, seq_id, flags, rs_idx);
        uint64_t last[2] = {};
        size_t n_wide = 0;
        for (const std::string & field : shape.fields) {
            same(field, "DSV4 compressor layout");
            if (field.size() != sizeof(uint64_t)) {
                n_wide = 0;
                continue;
            }
            uint64_t value;
            std::memcpy(&value, field.data(), sizeof(value));
            last[0] = std::exchange(last[1], value);
            if (++n_wide == 3) {
                const uint32_t ns = seq_id == -1 ? state->get_n_stream() : 1;
                io.skip_tensor(last[0] * last[1] * ns);
            }
        }
    }

    template <typename T> T get() {
        T value;
        io.read(&value, sizeof(value));
        return value;
    }

    template <typename T> void same(T expected, const char * what) {
        const T value = get<T>();
        if (value != expected) {
            refuse(what, value, expected);
        }
    }

    // One field, of the bytes that this section writes.
    void same(const std::string & expected, const char * what) {
        std::string bytes(expected.size(), '\0');
        io.read(&bytes[0], bytes.size());
        if (bytes != expected) {
            uint64_t values[2] = {};
            std::memcpy(&values[0], bytes.data(), std::min(bytes.size(), sizeof(uint64_t)));
            std::memcpy(&values[1], expected.data(), std::min(expected.size(), sizeof(uint64_t)));
            refuse(what, values[0], values[1]);
        }
    }

    reader_io & io;
    const llama_seq_id          seq_id;
    const llama_state_seq_flags flags;
    const bool                  partial;
};

} // namespace

bool plan_restore(llama_memory_i & memory, reader_io & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    io.planning = true;
    const bool known = planner(io, seq_id, flags).memory(&memory);
    // llama.cpp wrote full attention into partial states until October 2026
    const bool left = kvs_state_reader_left(io.reader) > 0 && (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (known && left) {
        check(kvs_state_reader_restart(io.reader, true));
        bool legacy = false;
        try {
            legacy = planner(io, seq_id, flags).memory(&memory) && kvs_state_reader_left(io.reader) == 0;
        } catch (const std::exception &) {
            // then it is not one
        }
        if (!legacy) {
            check(kvs_state_reader_restart(io.reader, false));
            planner(io, seq_id, flags).memory(&memory);
        }
    }
    return known;
}
