#include "io.h"

#include "ggml-backend.h"
#include "llama-impl.h"

#include <cctype>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

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

// For tests without a GPU: as if every tensor were where only ggml's calls reach it.
#ifdef KVSTATE_LLAMA_REMOTE
static constexpr bool ALL_REMOTE = true;
#else
static constexpr bool ALL_REMOTE = false;
#endif

void * host_data(const ggml_tensor * tensor) {
    return !ALL_REMOTE && tensor->buffer && ggml_backend_buffer_is_host(tensor->buffer) ? tensor->data : nullptr;
}

namespace {

// A buffer of one CUDA device, by ggml's name for its type: CUDA0. Pinned memory (CUDA_Host) and tensors that are split
// between devices have other names.
bool is_named_cuda(const ggml_tensor * tensor) {
    const char * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(tensor->buffer));
    if (std::strncmp(name, "CUDA", 4) != 0 || name[4] == '\0') {
        return false;
    }
    for (name += 4; *name; ++name) {
        if (!std::isdigit(static_cast<unsigned char>(*name))) {
            return false;
        }
    }
    return true;
}

// Whether kvstate works on a device, found out once for each.
bool is_usable(int32_t device) {
    static std::mutex mutex;
    static std::map<int32_t, kvs_status> statuses;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = statuses.find(device);
    if (known != statuses.end()) {
        return known->second == KVS_STATUS_OK;
    }
    const kvs_status status = kvs_device_check(device);
    statuses[device] = status;
    if (status != KVS_STATUS_OK) {
        LLAMA_LOG_WARN("kvstate: tensors of CUDA device %d go through ggml, run by run: %s\n", device, kvs_last_error());
    }
    return status == KVS_STATUS_OK;
}

} // namespace

tensor_place place_of(const ggml_tensor * tensor) {
    if (void * data = host_data(tensor)) {
        return { data, KVS_DEVICE_HOST };
    }
    if (!ALL_REMOTE && tensor->buffer && is_named_cuda(tensor)) {
        // other libraries call their devices CUDA as well: the driver has to know the address
        const int32_t device = kvs_device_of(tensor->data);
        if (device == KVS_DEVICE_HOST) {
            static const bool said = (LLAMA_LOG_WARN("kvstate: tensors of %s are in no CUDA device's memory that "
                    "kvstate knows: they go through ggml, run by run\n", ggml_backend_buffer_name(tensor->buffer)), true);
            (void) said;
        } else if (is_usable(device)) {
            return { tensor->data, device };
        }
    }
    return { nullptr, KVS_DEVICE_HOST };
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
