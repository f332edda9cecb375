#include "io.h"

#include "ggml-backend.h"

const kvs_tensor_access & backend_access() {
    static const kvs_tensor_access access = {
        /*.user =*/ nullptr,
        /*.get  =*/ [](void *, void * tensor, uint64_t offset, uint64_t n, void * dst) {
            ggml_backend_tensor_get(static_cast<ggml_tensor *>(tensor), dst, offset, n);
            return 0;
        },
        /*.set  =*/ [](void *, void * tensor, uint64_t offset, uint64_t n, const void * src) {
            ggml_backend_tensor_set(static_cast<ggml_tensor *>(tensor), src, offset, n);
            return 0;
        },
    };
    return access;
}

void * host_data(const ggml_tensor * tensor) {
#ifdef KVSTATE_LLAMA_REMOTE
    // for tests without a GPU: as if every tensor were on one
    (void) tensor;
    return nullptr;
#endif
    return tensor->buffer && ggml_backend_buffer_is_host(tensor->buffer) ? tensor->data : nullptr;
}

foreign_io::foreign_io(llama_io_write_i & target) : io(kvs_io_default()), out(&target) {
    io.user  = this;
    io.write = [](void * user, const void * src, size_t size) {
        auto & self = *static_cast<foreign_io *>(user);
        return self.carried.run([&] { self.out->write(src, size); });
    };
    io.write_tensor = [](void * user, void * tensor, uint64_t offset, uint64_t n) {
        auto & self = *static_cast<foreign_io *>(user);
        return self.carried.run([&] { self.out->write_tensor(static_cast<ggml_tensor *>(tensor), offset, n); });
    };
}

foreign_io::foreign_io(llama_io_read_i & source) : io(kvs_io_default()), in(&source) {
    io.user = this;
    io.read = [](void * user, void * dst, size_t size) {
        auto & self = *static_cast<foreign_io *>(user);
        return self.carried.run([&] { self.in->read(dst, size); });
    };
    io.read_tensor = [](void * user, void * tensor, uint64_t offset, uint64_t n) {
        auto & self = *static_cast<foreign_io *>(user);
        return self.carried.run([&] { self.in->read_tensor(static_cast<ggml_tensor *>(tensor), offset, n); });
    };
}
