// The driver's calls about memory and copies.
#include <cstring>

#include "streams.h"

namespace {

// One side of a copy: where the bytes are when the copy runs.
struct Side {
    // Device memory: whose. Null: the host's.
    Context *context = nullptr;
    bool pinned = false;
    Range range;
    // Bytes of pageable memory, kept from when the copy was queued.
    std::shared_ptr<std::vector<char>> staged;

    bool pageable() const { return !context && !pinned; }

    // Null: the memory is gone, or not yet there.
    char *resolve() const {
        if (staged) return staged->data();
        if (context) return context->memory.usable(range) ? context->memory.view(range.start) : nullptr;
        if (pinned && !driver().pinned.find(range)) return nullptr;
        return reinterpret_cast<char *>(range.start);
    }
};

Side host_side(const void *ptr, size_t bytes) {
    const Range range{uintptr_t(ptr), bytes};
    return {nullptr, driver().pinned.find(range).has_value(), range, nullptr};
}

CUresult device_side(CUdeviceptr ptr, size_t bytes, Side *side) {
    const Range range{ptr, bytes};
    Context *context = driver().context_of(ptr);
    if (!context || !context->memory.held(range)) {
        report("%zu bytes at %#llx are not within an allocation", bytes, ptr);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *side = {context, false, range, nullptr};
    return CUDA_SUCCESS;
}

CUresult gone(const Side &side) {
    report("queued work ran when its %zu bytes at %#lx were not there", side.range.bytes, side.range.start);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

CUresult move_bytes(Lock &lock, const Side &to, const Side &from) {
    char *dst = to.resolve();
    const char *src = from.resolve();
    if (!dst || !src) return gone(dst ? from : to);
    lock.unlock();
    memmove(dst, src, to.range.bytes);
    lock.lock();
    return CUDA_SUCCESS;
}

const char *direction(const Side &to, const Side &from) {
    if (!to.context) return "bytes_device_to_host";
    if (!from.context) return "bytes_host_to_device";
    return to.context == from.context ? "bytes_device_to_device" : "bytes_peer";
}

// `waits`: the call returns when the host's side may be used again, as the calls without a stream do.
CUresult copy(Lock &lock, const StreamP &stream, Side to, Side from, bool waits) {
    Driver &driver = ::driver();
    driver.calls.add(direction(to, from), to.range.bytes);
    const bool pageable = to.pageable() || from.pageable();
    if (pageable) driver.calls.add("pageable_copies", 1);
    // The real driver keeps pageable bytes before it returns, but waits for those that it writes.
    if (from.pageable()) {
        const auto *bytes = reinterpret_cast<const char *>(from.range.start);
        from.staged = std::make_shared<std::vector<char>>(bytes, bytes + from.range.bytes);
    }
    Op work;
    if (!from.staged) work.uses.push_back(from.range);
    work.uses.push_back(to.range);
    work.run = [to, from](Lock &lock) { return move_bytes(lock, to, from); };
    const OpP op = driver.worker.push(stream, std::move(work));
    if (to.pageable() || (waits && !from.staged)) driver.worker.finish(lock, op);
    return stream->context->sticky;
}

CUresult host_to_device(Lock &lock, Context &context, CUdeviceptr dst, const void *src, size_t bytes, CUstream handle,
                        bool waits) {
    StreamP stream;
    Side to;
    if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
    if (bytes == 0) return CUDA_SUCCESS;
    if (const CUresult bad = device_side(dst, bytes, &to)) return bad;
    return copy(lock, stream, to, host_side(src, bytes), waits);
}

CUresult device_to_host(Lock &lock, Context &context, void *dst, CUdeviceptr src, size_t bytes, CUstream handle,
                        bool waits) {
    StreamP stream;
    Side from;
    if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
    if (bytes == 0) return CUDA_SUCCESS;
    if (const CUresult bad = device_side(src, bytes, &from)) return bad;
    return copy(lock, stream, host_side(dst, bytes), from, waits);
}

// Between devices too: addresses are unified.
CUresult device_to_device(Lock &lock, Context &context, CUdeviceptr dst, CUdeviceptr src, size_t bytes,
                          CUstream handle, Context *dst_context = nullptr, Context *src_context = nullptr) {
    StreamP stream;
    Side to, from;
    if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
    if (bytes == 0) return CUDA_SUCCESS;
    if (const CUresult bad = device_side(dst, bytes, &to)) return bad;
    if (const CUresult bad = device_side(src, bytes, &from)) return bad;
    const bool named = (!dst_context || dst_context == to.context) && (!src_context || src_context == from.context);
    return named ? copy(lock, stream, to, from, false) : CUDA_ERROR_INVALID_VALUE;
}

CUresult set_bytes(Context &context, CUdeviceptr dst, unsigned char value, size_t bytes, CUstream handle) {
    StreamP stream;
    Side to;
    if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
    if (bytes == 0) return CUDA_SUCCESS;
    if (const CUresult bad = device_side(dst, bytes, &to)) return bad;
    if (to.context != stream->context) return CUDA_ERROR_INVALID_VALUE;
    Op work;
    work.uses.push_back(to.range);
    work.run = [to, value](Lock &lock) {
        char *dst = to.resolve();
        if (!dst) return gone(to);
        lock.unlock();
        memset(dst, value, to.range.bytes);
        lock.lock();
        return CUDA_SUCCESS;
    };
    driver().worker.push(stream, std::move(work));
    return CUDA_SUCCESS;
}

// Memory is given back while work that may still run touches it.
CUresult check_unused(Context &context, Range range, const OpP &after) {
    const size_t n = driver().worker.unfinished_use(range, after);
    if (n == 0) return CUDA_SUCCESS;
    report("%zu bytes at %#lx are freed under queued work: %zu uses of them", range.bytes, range.start, n);
    driver().calls.add("unfinished_use", n);
    return context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
}

Range whole(const Context &context, CUdeviceptr ptr) {
    const auto range = context.memory.held({ptr, 1});
    return range && range->start == ptr ? *range : Range{};
}

} // namespace

FAKECUDA_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes) {
    return in_context(__func__, [&](Lock &, Context &context) { return context.memory.allocate(bytes, true, ptr); });
}

FAKECUDA_EXPORT CUresult cuMemFree_v2(CUdeviceptr ptr) {
    return at_any_time(__func__, [&](Lock &lock) {
        if (ptr == 0) return CUDA_SUCCESS;
        Context *context = driver().context_of(ptr);
        if (!context || whole(*context, ptr).bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        // As the real call does, though not by its word.
        driver().worker.finish_all(lock, context);
        const Range range = whole(*context, ptr);
        if (range.bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        check_unused(*context, range, nullptr);
        context->memory.retire(ptr);
        context->memory.release(ptr);
        return context->sticky;
    });
}

FAKECUDA_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *ptr, size_t bytes, CUstream handle) {
    return in_context(__func__, [&](Lock &, Context &context) {
        StreamP stream;
        if (const CUresult bad = usable_stream(handle, context, &stream)) return bad;
        if (!driver().settings.memory_pools) return CUDA_ERROR_NOT_SUPPORTED;
        Context *owner = stream->context;
        if (const CUresult bad = owner->memory.allocate(bytes, false, ptr)) return bad;
        Op work;
        work.run = [owner, at = *ptr](Lock &) {
            owner->memory.make_ready(at);
            return CUDA_SUCCESS;
        };
        driver().worker.push(stream, std::move(work));
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream handle) {
    return at_any_time(__func__, [&](Lock &) {
        if (!current_context) return CUDA_ERROR_INVALID_CONTEXT;
        if (ptr == 0) return CUDA_SUCCESS;
        StreamP stream;
        const CUresult bad = any_stream(handle, *current_context, &stream);
        if (bad == CUDA_ERROR_INVALID_HANDLE || bad == CUDA_ERROR_INVALID_CONTEXT) return bad;
        Context *context = stream->context;
        const Range range = whole(*context, ptr);
        if (range.bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        Op work;
        work.frees = true;
        work.run = [context, ptr](Lock &) {
            context->memory.release(ptr);
            return CUDA_SUCCESS;
        };
        const OpP op = driver().worker.push(stream, std::move(work));
        context->memory.retire(ptr);
        check_unused(*context, range, op);
        return context->sticky;
    });
}

FAKECUDA_EXPORT CUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned) {
    return in_context(__func__, [&](Lock &, Context &) { return driver().pinned.allocate(bytes, ptr); });
}

FAKECUDA_EXPORT CUresult cuMemFreeHost(void *ptr) {
    return at_any_time(__func__, [&](Lock &) {
        if (!current_context) return CUDA_ERROR_INVALID_CONTEXT;
        const auto range = driver().pinned.find({uintptr_t(ptr), 1});
        const CUresult unused = range ? check_unused(*current_context, *range, nullptr) : CUDA_SUCCESS;
        const CUresult freed = driver().pinned.free(ptr);
        return freed ? freed : unused;
    });
}

FAKECUDA_EXPORT CUresult cuMemHostRegister_v2(void *ptr, size_t bytes, unsigned) {
    return in_context(__func__, [&](Lock &, Context &) { return driver().pinned.add({uintptr_t(ptr), bytes}); });
}

FAKECUDA_EXPORT CUresult cuMemHostUnregister(void *ptr) {
    return at_any_time(__func__, [&](Lock &) {
        if (!current_context) return CUDA_ERROR_INVALID_CONTEXT;
        const auto range = driver().pinned.find({uintptr_t(ptr), 1});
        const CUresult unused = range ? check_unused(*current_context, *range, nullptr) : CUDA_SUCCESS;
        const CUresult removed = driver().pinned.remove(uintptr_t(ptr));
        return removed ? removed : unused;
    });
}

FAKECUDA_EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    return in_context(__func__, [&](Lock &, Context &context) {
        const size_t limit = context.memory.limit, live = context.memory.live_bytes();
        *free = limit > live ? limit - live : 0;
        *total = limit;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr ptr) {
    return in_context(__func__, [&](Lock &, Context &) {
        const Context *context = driver().context_of(ptr);
        const auto range = context ? context->memory.held({ptr, 1}) : std::nullopt;
        if (!range) return CUDA_ERROR_NOT_FOUND;
        if (start) *start = range->start;
        if (bytes) *bytes = range->bytes;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuPointerGetAttribute(void *out, int which, CUdeviceptr ptr) {
    return initialised(__func__, [&](Lock &) {
        Context *context = driver().context_of(ptr);
        const auto range = context ? context->memory.held({ptr, 1}) : driver().pinned.find({ptr, 1});
        if (!range) return CUDA_ERROR_INVALID_VALUE;
        switch (which) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<Context **>(out) = context; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned *>(out) = context ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<bool *>(out) = false; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(out) = context ? context->ordinal : 0; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<CUdeviceptr *>(out) = range->start; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t *>(out) = range->bytes; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
        }
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        return host_to_device(lock, context, dst, src, bytes, stream, false);
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        return device_to_host(lock, context, dst, src, bytes, stream, false);
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        return device_to_device(lock, context, dst, src, bytes, stream);
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                                           CUcontext src_context, size_t bytes, CUstream stream) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        if (!dst_context || !src_context) return CUDA_ERROR_INVALID_CONTEXT;
        return device_to_device(lock, context, dst, src, bytes, stream, dst_context, src_context);
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        return host_to_device(lock, context, dst, src, bytes, nullptr, true);
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        return device_to_host(lock, context, dst, src, bytes, nullptr, true);
    });
}

FAKECUDA_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    return in_context(__func__, [&](Lock &lock, Context &context) {
        return device_to_device(lock, context, dst, src, bytes, nullptr);
    });
}

FAKECUDA_EXPORT CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
    return in_context(__func__, [&](Lock &, Context &context) { return set_bytes(context, dst, value, bytes, stream); });
}

FAKECUDA_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t bytes) {
    return in_context(__func__, [&](Lock &, Context &context) { return set_bytes(context, dst, value, bytes, nullptr); });
}
