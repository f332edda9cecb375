// The adapter over tensors of a CUDA backend, without one: a context's K and V are moved into buffers whose type is called
// CUDA0, over memory of the emulated driver. States have the bytes that they had in host memory, and the driver's counters
// tell which way they went. Run with the adapter in front of libllama and the emulated driver in the library path.
//
//   cuda_buffers MODEL

#include "access.h"

#include "ggml-backend-impl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <dlfcn.h>

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                     \
        }                                                                     \
    } while (0)

namespace {

using Bytes = std::vector<uint8_t>;

template <typename F> F *driver(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    CHECK(library != nullptr);
    void *symbol = dlsym(library, name);
    CHECK(symbol != nullptr);
    return reinterpret_cast<F *>(symbol);
}

uint64_t to_host() { return driver<uint64_t(const char *)>("fakecuda_count")("bytes_device_to_host"); }
uint64_t to_device() { return driver<uint64_t(const char *)>("fakecuda_count")("bytes_host_to_device"); }

// Makes the primary context of device 0 the thread's.
void open_device() {
    void *context = nullptr;
    CHECK(driver<int(unsigned)>("cuInit")(0) == 0);
    CHECK(driver<int(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0) == 0);
    CHECK(driver<int(void *)>("cuCtxSetCurrent")(context) == 0);
}

void wait() { CHECK(driver<int(void *)>("cuStreamSynchronize")(nullptr) == 0); }

// Where the bytes of a buffer's tensors are.
struct Memory {
    std::string name;
    bool on_device;
    int n_get = 0;
    int n_set = 0;

    uint8_t *allocate(size_t n) const {
        if (!on_device) return static_cast<uint8_t *>(std::calloc(1, n));
        uintptr_t ptr = 0;
        CHECK(driver<int(uintptr_t *, size_t)>("cuMemAlloc_v2")(&ptr, n) == 0);
        return reinterpret_cast<uint8_t *>(ptr);
    }
    void free(uint8_t *ptr) const {
        if (!on_device) return std::free(ptr);
        CHECK(driver<int(uintptr_t)>("cuMemFree_v2")(uintptr_t(ptr)) == 0);
    }
    void get(void *dst, const void *src, size_t n) const {
        if (!on_device) {
            std::memcpy(dst, src, n);
            return;
        }
        CHECK(driver<int(void *, uintptr_t, size_t, void *)>("cuMemcpyDtoHAsync_v2")(dst, uintptr_t(src), n, nullptr) == 0);
        wait();
    }
    void set(void *dst, const void *src, size_t n) const {
        if (!on_device) {
            std::memcpy(dst, src, n);
            return;
        }
        CHECK(driver<int(uintptr_t, const void *, size_t, void *)>("cuMemcpyHtoDAsync_v2")(uintptr_t(dst), src, n, nullptr) == 0);
        wait();
    }
};

Memory &memory_of(ggml_backend_buffer_t buffer) { return *static_cast<Memory *>(buffer->context); }

void *at(const ggml_tensor *tensor, size_t offset) { return static_cast<uint8_t *>(tensor->data) + offset; }

// A backend's buffer, as ggml sees it.
class Buffer {
public:
    Buffer(std::string name, bool on_device) : memory{std::move(name), on_device} {
        type.iface.get_name = [](ggml_backend_buffer_type_t type) {
            return static_cast<Memory *>(type->context)->name.c_str();
        };
        type.iface.get_alignment = [](ggml_backend_buffer_type_t) -> size_t { return 256; };
        type.context = &memory;
        ggml_backend_buffer_i iface = {};
        iface.get_base = [](ggml_backend_buffer_t) -> void * { return nullptr; };
        iface.get_tensor = [](ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *dst, size_t offset, size_t n) {
            ++memory_of(buffer).n_get;
            memory_of(buffer).get(dst, at(tensor, offset), n);
        };
        iface.set_tensor = [](ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *src, size_t offset, size_t n) {
            ++memory_of(buffer).n_set;
            memory_of(buffer).set(at(tensor, offset), src, n);
        };
        iface.memset_tensor = [](ggml_backend_buffer_t buffer, ggml_tensor *tensor, uint8_t value, size_t offset, size_t n) {
            const Bytes bytes(n, value);
            memory_of(buffer).set(at(tensor, offset), bytes.data(), n);
        };
        buffer.reset(ggml_backend_buffer_init(&type, iface, &memory, SIZE_MAX / 2));
    }

    Memory memory;
    ggml_backend_buffer_type type = {};
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer{nullptr, ggml_backend_buffer_free};
};

// K and V of a cache in a buffer of ours, with the data that they had; put back at the end.
class Moved {
public:
    Moved(llama_kv_cache &kv, Buffer &buffer) : buffer(buffer) {
        for (const auto &layer : kv.*member(llama_kv_cache_layers{})) {
            move(layer.k, layer.k_stream);
            move(layer.v, layer.v_stream);
        }
    }
    ~Moved() {
        for (const Old &old : olds) {
            old.tensor->data = old.data;
            old.tensor->buffer = old.buffer;
        }
        for (uint8_t *ptr : allocated) buffer.memory.free(ptr);
    }
    Moved(const Moved &) = delete;
    Moved &operator=(const Moved &) = delete;

private:
    struct Old {
        ggml_tensor *tensor;
        void *data;
        ggml_backend_buffer_t buffer;
    };

    void move(ggml_tensor *tensor, const std::vector<ggml_tensor *> &streams) {
        if (!tensor) return;
        auto *old = static_cast<uint8_t *>(tensor->data);
        uint8_t *data = buffer.memory.allocate(ggml_nbytes(tensor));
        allocated.push_back(data);
        buffer.memory.set(data, old, ggml_nbytes(tensor));
        for (ggml_tensor *view : streams) {
            point(view, data + (static_cast<uint8_t *>(view->data) - old));
        }
        point(tensor, data);
    }

    void point(ggml_tensor *tensor, uint8_t *data) {
        olds.push_back({tensor, tensor->data, tensor->buffer});
        tensor->data = data;
        tensor->buffer = buffer.buffer.get();
    }

    Buffer &buffer;
    std::vector<Old> olds;
    std::vector<uint8_t *> allocated;
};

constexpr llama_seq_id seq = 1;

Bytes get(llama_context *ctx, llama_state_seq_flags flags) {
    Bytes state(llama_state_seq_get_size_ext(ctx, seq, flags));
    CHECK(!state.empty());
    CHECK(llama_state_seq_get_data_ext(ctx, state.data(), state.size(), seq, flags) == state.size());
    return state;
}

// The state comes back into an empty cache, cell after cell.
void restore(llama_context *ctx, const Bytes &state, llama_state_seq_flags flags) {
    llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
    CHECK(llama_state_seq_set_data_ext(ctx, state.data(), state.size(), seq, flags) == state.size());
}

void decode(llama_context *ctx, llama_seq_id of, llama_pos pos) {
    llama_batch batch = llama_batch_init(1, 0, 1);
    batch.n_tokens = 1;
    batch.token[0] = (pos * 7 + of) % 100;
    batch.pos[0] = pos;
    batch.n_seq_id[0] = 1;
    batch.seq_id[0][0] = of;
    batch.logits[0] = false;
    CHECK(llama_decode(ctx, batch) == 0);
    llama_batch_free(batch);
}

struct Traffic {
    uint64_t to_host = ::to_host(), to_device = ::to_device();
    uint64_t host_bytes() const { return ::to_host() - to_host; }
    uint64_t device_bytes() const { return ::to_device() - to_device; }
};

// A save and a restore of a cache in a buffer, and which way they go.
void run(llama_context *ctx, const Bytes &expected, const char *name, bool on_device, bool in_batch) {
    auto *kv = dynamic_cast<llama_kv_cache *>(llama_get_memory(ctx));
    CHECK(kv != nullptr);
    Buffer buffer(name, on_device);
    const Moved moved(*kv, buffer);
    Traffic save;
    CHECK(get(ctx, 0) == expected);
    CHECK((buffer.memory.n_get == 0) == in_batch);
    // Once over the link, whether in a batch or run by run; of a device that is none, nothing.
    const uint64_t saved = save.host_bytes();
    const int n_get = buffer.memory.n_get;
    CHECK((saved > expected.size() / 2) == on_device && saved <= expected.size());

    Traffic load;
    restore(ctx, expected, 0);
    CHECK((buffer.memory.n_set == 0) == in_batch);
    CHECK((load.device_bytes() > expected.size() / 2) == on_device && load.device_bytes() < 2 * expected.size());
    CHECK(get(ctx, 0) == expected);

    // By calls of ggml it is llama.cpp's own business, with buffers of the backend's.
    if (in_batch) {
        const Traffic kept;
        const Bytes blob = get(ctx, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
        CHECK(blob.size() < expected.size() / 2);
        restore(ctx, blob, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
        CHECK(kept.host_bytes() == 0 && kept.device_bytes() < expected.size() / 2);
        CHECK(get(ctx, 0) == expected);
    }
    std::printf("%-11s %s: a save of %zu bytes %s, %d gets, %llu bytes to the host\n", name,
                on_device ? "on a device" : "on the host", expected.size(), in_batch ? "in a batch" : "by calls of ggml", n_get,
                static_cast<unsigned long long>(saved));
}

}  // namespace

int main(int, char **argv) {
    open_device();
    llama_log_set([](ggml_log_level level, const char *text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
    }, nullptr);
    llama_model_params model_params = llama_model_default_params();
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
        llama_model_load_from_file(argv[1], model_params), llama_model_free);
    CHECK(model != nullptr);
    for (const bool flash : {true, false}) {  // rows of V, and V transposed
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 512;
        params.n_seq_max = 2;
        params.kv_unified = true;
        params.n_threads = params.n_threads_batch = 1;
        params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        const std::unique_ptr<llama_context, decltype(&llama_free)> ctx(
            llama_init_from_model(model.get(), params), llama_free);
        CHECK(ctx != nullptr);
        // Every other cell is the sequence's.
        for (llama_pos pos = 0; pos < 200; ++pos) {
            decode(ctx.get(), seq, pos);
            decode(ctx.get(), 0, pos);
        }
        const Bytes scattered = get(ctx.get(), 0);
        run(ctx.get(), scattered, "CUDA0", true, true);
        run(ctx.get(), scattered, "CUDA0", false, false);     // another library's idea of CUDA
        run(ctx.get(), scattered, "CUDA0_Split", true, false);  // split between devices
        run(ctx.get(), scattered, "CUDA_Host", true, false);
        run(ctx.get(), scattered, "ROCm0", true, false);
        CHECK(get(ctx.get(), 0) == scattered);
    }
    std::puts("test result: ok. 10 passed; 0 failed;");
}
