// llama.cpp's io over kvstate's writer and reader, and the other way round.
#pragma once

#include "kvstate.h"
#include "layout.h"

#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

// Throws what kvstate says went wrong.
inline void check(kvs_status status) {
    if (status != KVS_STATUS_OK) {
        throw std::runtime_error(kvs_last_error());
    }
}

// Tensors that kvstate does not reach by itself are reached through ggml's backends.
const kvs_tensor_access & backend_access();

// Where kvstate reaches a tensor by itself.
struct tensor_place {
    void *  data;   // NULL: it does not
    int32_t device; // of CUDA, or KVS_DEVICE_HOST
};
tensor_place place_of(const ggml_tensor * tensor);

// The tensor's bytes, if the host can read and write them.
void * host_data(const ggml_tensor * tensor);

// Collects a state. llama_kv_cache::state_write knows it and hands over a view.
class writer_io : public llama_io_write_i {
public:
    explicit writer_io(llama_seq_id seq_id) { check(kvs_state_writer_new(seq_id, &backend_access(), &writer)); }
    ~writer_io() override { kvs_state_writer_free(writer); }
    writer_io(const writer_io &) = delete;
    writer_io & operator=(const writer_io &) = delete;

    void write(const void * src, size_t size) override { check(kvs_state_writer_write(writer, src, size)); }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        void * data = place_of(tensor).data;
        note(tensor, data);
        check(kvs_state_writer_write_tensor(writer, tensor, data, offset, size));
    }
    size_t n_bytes() override { return kvs_state_writer_size(writer); }

    // Looks at a tensor of the state, which kvstate reaches by itself or not.
    void note(const ggml_tensor * tensor, bool is_reached) {
        all_on_device = all_on_device && !host_data(tensor) && !ggml_is_quantized(tensor->type);
        all_reached   = all_reached && is_reached;
    }

    // Whether kvstate would bring tensors of a device to the host that llama.cpp can keep there: it keeps those that are
    // not quantised.
    bool is_for_llama_cpp() const { return all_on_device && !all_reached; }

    kvs_state_writer * writer = nullptr;

private:
    bool all_on_device = true;
    bool all_reached   = true;
};

// Gives a state, first to be planned and then to be read. llama_kv_cache::state_read_sinfo knows it.
class reader_io : public llama_io_read_i {
public:
    // Takes the reader over.
    explicit reader_io(kvs_state_reader * reader) : reader(reader) {}
    ~reader_io() override { kvs_state_reader_free(reader); }
    reader_io(const reader_io &) = delete;
    reader_io & operator=(const reader_io &) = delete;

    void read(void * dst, size_t size) override { check(kvs_state_reader_read(reader, dst, size)); }
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        check(kvs_state_reader_read_tensor(reader, tensor, place_of(tensor).data, offset, size));
    }
    size_t n_bytes() override { return kvs_state_reader_offset(reader); }

    // Passes over the bytes of a tensor while planning.
    void skip_tensor(size_t size) { check(kvs_state_reader_skip_tensor(reader, size)); }

    kvs_state_reader * reader;
    bool planning = true;
    // Those that were planned.
    std::vector<llama_kv_cache *> caches;
};

// An exception of a callback on its way around kvstate, which must not see it.
class carried_exception {
public:
    // Runs a callback's body; 0, or 1 if it has thrown.
    template <typename F> int run(F && body) {
        try {
            body();
            return 0;
        } catch (...) {
            error = std::current_exception();
            return 1;
        }
    }

    // After the call of kvstate: throws what the callback threw.
    void rethrow() {
        if (error) {
            std::rethrow_exception(std::exchange(error, nullptr));
        }
    }

private:
    std::exception_ptr error;
};

// Somebody else's io for kvstate: a file, a device, a collector.
class foreign_io {
public:
    explicit foreign_io(llama_io_write_i & io);
    explicit foreign_io(llama_io_read_i & io);

    kvs_io io;
    carried_exception carried;

private:
    llama_io_write_i * out = nullptr;
    llama_io_read_i  * in  = nullptr;
};
