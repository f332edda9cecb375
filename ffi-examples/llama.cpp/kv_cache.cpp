// The members of llama_kv_cache that the adapter replaces.

#include "kv_cache_view.h"

#include <string>
#include <vector>

namespace {

// Layouts in kvstate's form.
struct slots {
    std::vector<std::vector<uint32_t>> idxs;
    std::vector<kvs_slot_info>         infos;

    // Room for a layout.
    slots(uint32_t n_stream, uint32_t kv_size) : idxs(n_stream, std::vector<uint32_t>(kv_size)) { lend(); }

    explicit slots(const llama_kv_cache::slot_info_vec_t & sinfos) {
        for (const auto & sinfo : sinfos) {
            idxs.push_back(sinfo.empty() ? std::vector<uint32_t>() : sinfo.idxs[0]);
        }
        lend();
    }

    // The cells of stream strm hold the sequence, whichever stream they were in.
    llama_kv_cache::slot_info_vec_t to_sinfos(llama_seq_id seq_id, const llama_kv_cache & kv) const {
        llama_kv_cache::slot_info_vec_t sinfos(infos.size());
        for (size_t s = 0; s < infos.size(); ++s) {
            if (infos[s].n == 0) {
                continue;
            }
            const uint32_t strm = seq_id == -1 ? s : kv.get_stream(seq_id);
            sinfos[s].s0 = strm;
            sinfos[s].s1 = strm;
            sinfos[s].resize(1);
            sinfos[s].strm[0] = strm;
            sinfos[s].idxs[0].assign(infos[s].idxs, infos[s].idxs + infos[s].n);
        }
        return sinfos;
    }

private:
    void lend() {
        for (auto & idx : idxs) {
            infos.push_back({ (uint32_t) idx.size(), (uint32_t) idx.size(), idx.data() });
        }
    }
};

} // namespace

void llama_kv_cache::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    kv_cache_view cache(const_cast<llama_kv_cache &>(*this), hparams);

    kvs_status status;
    if (auto * own = dynamic_cast<writer_io *>(&io)) {
        cache.each_tensor([&](const ggml_tensor * tensor, bool is_reached) { own->note(tensor, is_reached); });
        status = kvs_state_writer_write_kv_cache(own->writer, &cache.view, flags);
    } else {
        foreign_io target(io);
        status = kvs_kv_cache_state_write(&cache.view, &target.io, seq_id, flags);
        target.carried.rethrow();
    }
    cache.carried.rethrow();
    check(status);
}

void llama_kv_cache::state_read_sinfo(
        llama_io_read_i & io,
           llama_seq_id   seq_id,
  llama_state_seq_flags   flags,
      slot_info_vec_t *   sinfos_out,
const slot_info_vec_t *   sinfos_in) {
    kv_cache_view cache(*this, hparams);

    slots out(sinfos_out ? n_stream : 0, get_size());
    slots in(sinfos_in ? *sinfos_in : slot_info_vec_t());
    if (sinfos_in && sinfos_in->size() != n_stream) {
        throw std::runtime_error("failed to restore kv cache: mirrored slot layout of " +
                std::to_string(sinfos_in->size()) + " streams for a cache of " + std::to_string(n_stream));
    }
    kvs_slot_info       * slots_out = sinfos_out ? out.infos.data() : nullptr;
    const kvs_slot_info * slots_in  = sinfos_in  ? in.infos.data()  : nullptr;

    kvs_status status;
    if (auto * own = dynamic_cast<reader_io *>(&io)) {
        if (own->planning) {
            own->caches.push_back(this);
        }
        status = own->planning ?
            kvs_state_reader_plan_kv_cache(own->reader, &cache.view, flags, slots_out, slots_in) :
            kvs_state_reader_read_kv_cache(own->reader, &cache.view, slots_out);
    } else {
        foreign_io source(io);
        status = kvs_kv_cache_state_read_sinfo(&cache.view, &source.io, seq_id, flags, slots_out, slots_in);
        source.carried.rethrow();
    }
    cache.carried.rethrow();
    check(status);

    if (sinfos_out) {
        *sinfos_out = out.to_sinfos(seq_id, *this);
    }
}
