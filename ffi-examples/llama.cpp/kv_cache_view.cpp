#include "kv_cache_view.h"

#include "access.h"

#include "llama-batch.h"
#include "llama-hparams.h"

#include <bitset>
#include <cstring>

namespace {

// bitset keeps bit i in bit i % 64 of word i / 64: seen, not promised, so it is tried once.
bool bitset_is_words() {
    std::bitset<LLAMA_MAX_SEQ> bits;
    bits.set(70);
    uint64_t words[4];
    std::memcpy(words, &bits, sizeof(words));
    return words[0] == 0 && words[1] == uint64_t(1) << 6 && words[2] == 0 && words[3] == 0;
}

void to_words(const llama_kv_cells::seq_set_t & seqs, uint64_t (&words)[4]) {
    static const bool is_words = bitset_is_words();
    if (is_words) {
        std::memcpy(words, &seqs, sizeof(words));
        return;
    }
    for (size_t s = 0; s < seqs.size(); ++s) {
        words[s / 64] |= uint64_t(seqs.test(s)) << (s % 64);
    }
}

kvs_cell to_cell(const llama_kv_cells & cells, uint32_t idx) {
    const llama_kv_cell_ext & ext = cells.ext_get(idx);
    kvs_cell cell = { idx, cells.pos_get(idx), cells.get_shift(idx), ext.x, ext.y, ext.tok, {} };
    to_words(cells.seq_get_all(idx), cell.seqs);
    return cell;
}

llama_kv_cell_ext to_ext(const kvs_cell & cell) {
    llama_kv_cell_ext ext;
    ext.x   = cell.x;
    ext.y   = cell.y;
    ext.tok = cell.tok;
    return ext;
}

kvs_plane to_plane(ggml_tensor * tensor, uint32_t n_embd, uint64_t cell_stride, uint64_t channel_stride) {
    const tensor_place place = place_of(tensor);
    return { tensor, place.data, place.device, tensor->type, n_embd, 0, cell_stride, channel_stride };
}

std::vector<llama_kv_cells> & cells_of(llama_kv_cache & kv) {
    return *(kv.*member(llama_kv_cache_v_cells_impl{}));
}

} // namespace

kv_cache_view::kv_cache_view(llama_kv_cache & kv, const llama_hparams & hparams) :
        view(kvs_kv_view_default()), kv(kv), hparams(hparams) {
    const auto & layers  = kv.*member(llama_kv_cache_layers{});
    const bool   v_trans = kv.*member(llama_kv_cache_v_trans{});

    view.user      = this;
    view.n_stream  = kv.get_n_stream();
    view.kv_size   = kv.get_size();
    // a unified cache takes any sequence id below LLAMA_MAX_SEQ, whatever n_seq_max the context was given
    view.n_seq_max = (kv.*member(llama_kv_cache_seq_to_stream{})).size();
    view.n_layer   = layers.size();
    view.n_swa     = kv.*member(llama_kv_cache_n_swa{});
    view.swa_type  = kv.*member(llama_kv_cache_swa_type{});
    view.v_trans   = v_trans;
    view.n_rot_k   = kv.*member(llama_kv_cache_n_rot_k{});
    view.n_rot_v   = kv.*member(llama_kv_cache_n_rot_v{});
    view.cell_ext  = kv.has_cell_ext();
    view.shared    = (kv.*member(llama_kv_cache_other{})) != nullptr;
    view.head      = (kv.*member(llama_kv_cache_v_heads{})).data();
    view.access    = &backend_access();

    for (uint32_t s = 0; s < view.n_stream; ++s) {
        for (const auto & layer : layers) {
            ggml_tensor * tk = layer.k_stream[s];
            ggml_tensor * tv = layer.v_stream[s];
            k.push_back(to_plane(tk, hparams.n_embd_k_gqa(layer.il), tk->nb[1], 0));
            if (!tv) {
                v.push_back({});
            } else if (v_trans) {
                // channel after channel, of all the cells each, padded channels last
                const uint64_t size_el = ggml_type_size(tv->type);
                v.push_back(to_plane(tv, hparams.n_embd_v_gqa(layer.il), size_el, size_el * view.kv_size));
            } else {
                v.push_back(to_plane(tv, hparams.n_embd_v_gqa(layer.il), tv->nb[1], 0));
            }
        }
    }
    view.k = k.data();
    view.v = v.data();

    view.visit = [](void * user, uint32_t stream, kvs_seq_id seq_id, kvs_visit_each each, void * arg) {
        auto & self = *static_cast<kv_cache_view *>(user);
        int stop = 0;
        const int failed = self.carried.run([&] { stop = self.visit(stream, seq_id, each, arg); });
        return failed ? failed : stop;
    };
    view.apply = [](void * user, uint32_t stream, kvs_seq_id seq_id, uint32_t n, const kvs_cell * cells) {
        auto & self = *static_cast<kv_cache_view *>(user);
        return self.carried.run([&] {
            if (seq_id == -1) {
                self.apply_all(stream, cells, n);
            } else {
                self.apply_seq(stream, seq_id, cells, n);
            }
        });
    };
    view.clear = [](void * user, kvs_seq_id seq_id) {
        auto & self = *static_cast<kv_cache_view *>(user);
        return self.carried.run([&] { self.kv.state_clear(seq_id); });
    };
}

int kv_cache_view::visit(uint32_t stream, llama_seq_id seq_id, kvs_visit_each each, void * arg) const {
    const llama_kv_cells & cells = cells_of(kv)[stream];
    if (seq_id >= 0) {
        for (const auto & [_, idx] : cells.seq_pos_get(seq_id)) {
            const kvs_cell cell = to_cell(cells, idx);
            if (const int stop = each(arg, &cell)) {
                return stop;
            }
        }
        return 0;
    }
    const uint32_t end = cells.used_max_p1();
    for (uint32_t idx = cells.used_min(); idx < end; ++idx) {
        if (cells.is_empty(idx)) {
            continue;
        }
        const kvs_cell cell = to_cell(cells, idx);
        if (const int stop = each(arg, &cell)) {
            return stop;
        }
    }
    return 0;
}

// As a decode of these positions would set them: apply_ubatch knows the purge rule.
void kv_cache_view::apply_seq(uint32_t stream, llama_seq_id seq_id, const kvs_cell * cells, uint32_t n) {
    kv.seq_rm(seq_id, -1, -1);
    if (n == 0) {
        return;
    }

    llama_batch_allocr balloc(hparams.n_pos_per_embd());
    llama_ubatch ubatch = balloc.ubatch_reserve(n, 1);
    ubatch.seq_id_unq[0] = seq_id;

    llama_kv_cache::slot_info sinfo;
    sinfo.s0 = stream;
    sinfo.s1 = stream;
    sinfo.resize(1);
    sinfo.strm[0] = stream;
    sinfo.idxs[0].resize(n);

    for (uint32_t i = 0; i < n; ++i) {
        sinfo.idxs[0][i]   = cells[i].idx;
        ubatch.pos[i]      = cells[i].pos;
        ubatch.token[i]    = cells[i].tok;
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i]   = &seq_id;
    }
    kv.apply_ubatch(sinfo, ubatch);

    // the ubatch has no room for an ext that another cache's cells have
    llama_kv_cells & own = cells_of(kv)[stream];
    for (uint32_t i = 0; i < n; ++i) {
        own.ext_set(cells[i].idx, to_ext(cells[i]));
    }
}

// The stream is empty.
void kv_cache_view::apply_all(uint32_t stream, const kvs_cell * cells, uint32_t n) {
    llama_kv_cells & own = cells_of(kv)[stream];
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t idx = cells[i].idx;
        own.pos_set(idx, cells[i].pos);
        own.ext_set(idx, to_ext(cells[i]));
        for (uint32_t s = 0; s < LLAMA_MAX_SEQ; ++s) {
            if (cells[i].seqs[s / 64] >> (s % 64) & 1) {
                own.seq_add(idx, s);
            }
        }
    }
    (kv.*member(llama_kv_cache_v_heads{}))[stream] = n ? cells[n - 1].idx + 1 : 0;
}
