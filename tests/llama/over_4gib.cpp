#include "over_4gib.hpp"

#include <kvstate.h>

#include <sys/mman.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

namespace {

// One layer of f16: 1 Mi cells, and 2,304 channels of 2 MiB each: 4.5 GiB of V. Above 4 GiB a 32-bit offset wraps
// (stock llama.cpp computes one).
constexpr uint32_t n_cell = 1 << 20;
constexpr uint32_t n_channel = 2304;
constexpr uint64_t v_size = uint64_t{n_cell} * n_channel * 2;
constexpr uint64_t max_resident = 1 << 20;  // KiB

// Memory that takes room only where it was written.
class Sparse {
public:
    explicit Sparse(uint64_t size) : size_(size) {
        data_ = static_cast<uint8_t *>(
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (data_ == MAP_FAILED)
            throw std::runtime_error("no address space for " + std::to_string(size) + " bytes");
        madvise(data_, size, MADV_NOHUGEPAGE);
    }
    ~Sparse() { munmap(data_, size_); }
    Sparse(const Sparse &) = delete;

    uint8_t *data() const { return data_; }
    uint64_t size() const { return size_; }

private:
    uint8_t *data_;
    uint64_t size_;
};

// Gives back, again and again, the pages between two parts of a mapping that are kept: everything written there
// is zero anyway.
class Discard {
public:
    Discard(const Sparse &memory, uint64_t keep_front, uint64_t keep_back)
        : thread_([this, &memory, keep_front, keep_back] {
              while (!stop_) {
                  madvise(memory.data() + keep_front, memory.size() - keep_front - keep_back, MADV_DONTNEED);
                  std::this_thread::sleep_for(std::chrono::milliseconds(10));
              }
          }) {}
    ~Discard() {
        stop_ = true;
        thread_.join();
    }

private:
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

using Context = std::unique_ptr<kvs_context, decltype(&kvs_context_free)>;

Context context_over(const Sparse &k, const Sparse &v) {
    kvs_kv_layer_params layer = kvs_kv_layer_default_params();
    layer.n_embd_k_gqa = 1;
    layer.n_embd_v_gqa = n_channel;
    layer.k = k.data();
    layer.v = v.data();
    kvs_kv_params kv = kvs_kv_default_params();
    kv.kv_size = n_cell;
    kv.n_layer = 1;
    kv.layers = &layer;
    kv.v_trans = 1;
    kvs_section_params section = kvs_section_default_params();
    section.kv = &kv;
    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = 2;
    params.sections = &section;
    params.n_section = 1;
    kvs_context *raw = nullptr;
    if (kvs_context_new(&params, &raw) != KVS_STATUS_OK) throw std::runtime_error(kvs_last_error());
    return Context(raw, kvs_context_free);
}

void decode(const Context &context, kvs_seq_id seq, uint32_t n) {
    std::vector<kvs_pos> pos(n);
    std::vector<const kvs_seq_id *> seq_ids(n, &seq);
    for (uint32_t i = 0; i < n; ++i) pos[i] = static_cast<kvs_pos>(i);
    kvs_ubatch ubatch = kvs_ubatch_default();
    ubatch.n_tokens = n;
    ubatch.pos = pos.data();
    ubatch.seq_id = seq_ids.data();
    kvs_slot *slot = nullptr;
    if (kvs_slot_prepare(context.get(), &ubatch, &slot) != KVS_STATUS_OK)
        throw std::runtime_error(kvs_last_error());
    const kvs_status status = kvs_slot_commit(context.get(), slot);
    kvs_slot_free(slot);
    if (status != KVS_STATUS_OK) throw std::runtime_error(kvs_last_error());
}

// Where channel j of a cell lies in V.
uint64_t at(uint64_t channel, uint64_t cell) { return (channel * n_cell + cell) * 2; }

// A short sequence at the end of a large cache: channels above 2,048 lie beyond 4 GiB.
void offsets(Report &report) {
    constexpr uint32_t n = 64;
    const Sparse k(uint64_t{n_cell} * 2), v(v_size), k2(uint64_t{n_cell} * 2), v2(v_size);
    const Context context = context_over(k, v), other = context_over(k2, v2);
    decode(context, 0, n_cell - n);
    decode(context, 1, n);
    const auto mark = [](uint64_t channel, uint64_t i) {
        return static_cast<uint8_t>(channel * 7 + i * 13 + 1);
    };
    for (uint64_t channel = 0; channel < n_channel; ++channel) {
        for (uint64_t i = 0; i < n; ++i) v.data()[at(channel, n_cell - n + i)] = mark(channel, i);
    }
    std::vector<uint8_t> state(kvs_state_seq_get_size(context.get(), 1));
    report.equal("get_data of a sequence whose V lies beyond 4 GiB",
                 kvs_state_seq_get_data(context.get(), state.data(), state.size(), 1), state.size());
    uint64_t equal = 0;
    const uint8_t *written = state.data() + state.size() - uint64_t{n_channel} * n * 2;
    for (uint64_t channel = 0; channel < n_channel; ++channel) {
        for (uint64_t i = 0; i < n; ++i) equal += written[(channel * n + i) * 2] == mark(channel, i);
    }
    report.equal("elements of V in that state that are right", equal, uint64_t{n_channel} * n);

    decode(other, 0, n_cell - n);
    report.equal("set_data of it", kvs_state_seq_set_data(other.get(), state.data(), state.size(), 1),
                 state.size());
    equal = 0;
    for (uint64_t channel = 0; channel < n_channel; ++channel) {
        for (uint64_t i = 0; i < n; ++i) equal += v2.data()[at(channel, n_cell - n + i)] == mark(channel, i);
    }
    report.equal("elements of V that are right after it", equal, uint64_t{n_channel} * n);
}

// Every cell of the cache in one state of more than 4 GiB. Almost all of it is zero and is given back as it is
// written; its front, with the cells, and its end stay.
void sizes(Report &report) {
    constexpr uint64_t keep_front = 64 << 20, keep_back = 4 << 20;
    const uint64_t last = at(n_channel - 1, n_cell - 1);
    const Sparse k(uint64_t{n_cell} * 2), v(v_size);
    v.data()[0] = 11;
    v.data()[last] = 22;
    v.data()[last + 1] = 33;
    const Context context = context_over(k, v);
    decode(context, 0, n_cell);

    const uint64_t size = kvs_state_seq_get_size(context.get(), 0);
    report.holds("get_size is more than 4 GiB", size > v_size && size < v_size + keep_front,
                 std::to_string(size), "a little over " + std::to_string(v_size));
    const Sparse state(size + 4096);
    uint64_t written;
    {
        const Discard discard(state, keep_front, keep_back);
        written = kvs_state_seq_get_data(context.get(), state.data(), size, 0);
    }
    report.equal("get_data of more than 4 GiB", written, size);
    report.equal("the first element of V in it", int{state.data()[size - v_size]}, 11);
    report.equal("the last byte but one in it", int{state.data()[size - 2]}, 22);
    report.equal("the last byte in it", int{state.data()[size - 1]}, 33);
    report.equal("nothing is written behind it", int{state.data()[size]}, 0);

    const Sparse k2(uint64_t{n_cell} * 2), v2(v_size);
    const Context other = context_over(k2, v2);
    uint64_t consumed;
    {
        const Discard discard(v2, keep_back, keep_back);
        consumed = kvs_state_seq_set_data(other.get(), state.data(), size, 1);
    }
    report.equal("set_data of more than 4 GiB", consumed, size);
    report.equal("the last position after it", kvs_memory_seq_pos_max(kvs_get_memory(other.get()), 1),
                 n_cell - 1);
    report.equal("the first element of V after it", int{v2.data()[0]}, 11);
    report.equal("the last byte but one of V after it", int{v2.data()[last]}, 22);
    report.equal("the last byte of V after it", int{v2.data()[last + 1]}, 33);
}

}  // namespace

void over_4gib(Report &report) {
    offsets(report);
    sizes(report);
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    report.holds("resident memory stays under 1 GiB (" + std::to_string(usage.ru_maxrss) + " KiB)",
                 static_cast<uint64_t>(usage.ru_maxrss) < max_resident,
                 std::to_string(usage.ru_maxrss) + " KiB", "at most " + std::to_string(max_resident) + " KiB");
}
