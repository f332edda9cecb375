#include "control.h"

#include <cstring>

#include "driver.h"

namespace {

// Driver and lock for one control call.
struct Held {
    Driver &driver = ::driver();
    Lock lock{driver.lock};
};

char *view_of(const Driver &driver, CUdeviceptr ptr, size_t bytes) {
    const Context *context = driver.context_of(ptr);
    return context && context->memory.held({ptr, bytes}) ? context->memory.view(ptr) : nullptr;
}

} // namespace

FAKECUDA_EXPORT uint64_t fakecuda_count(const char *name) { return Held().driver.calls.count(name); }

FAKECUDA_EXPORT void fakecuda_reset() {
    Held held;
    held.driver.calls.reset();
    for (const auto &context : held.driver.contexts) context->sticky = CUDA_SUCCESS;
}

FAKECUDA_EXPORT void fakecuda_fail(const char *name, unsigned nth, CUresult code) {
    Held().driver.calls.fail(name, nth, code);
}

FAKECUDA_EXPORT void fakecuda_fail_at(unsigned nth, CUresult code) { Held().driver.calls.fail_at(nth, code); }

FAKECUDA_EXPORT unsigned fakecuda_injected() { return Held().driver.calls.injected(); }

FAKECUDA_EXPORT void fakecuda_live(FakeLive *live) {
    Held held;
    const Driver &driver = held.driver;
    *live = {};
    for (const auto &context : driver.contexts) {
        live->allocations += context->memory.live_count();
        live->bytes += context->memory.live_bytes();
        live->contexts += context->retained;
    }
    live->pinned = driver.pinned.count();
    live->pinned_bytes = driver.pinned.bytes();
    live->streams = driver.streams.size();
    live->events = driver.events.size();
    live->modules = driver.modules.size();
}

FAKECUDA_EXPORT uint64_t fakecuda_pending() { return Held().driver.worker.pending(); }

FAKECUDA_EXPORT uint64_t fakecuda_unfinished_use(uintptr_t start, size_t bytes) {
    return Held().driver.worker.unfinished_use({start, bytes});
}

FAKECUDA_EXPORT void fakecuda_finish() {
    Held held;
    held.driver.worker.finish_all(held.lock);
}

FAKECUDA_EXPORT bool fakecuda_set_mode(bool eager, unsigned seed) {
    Held held;
    if (held.driver.worker.pending() != 0) return false;
    held.driver.worker.set_mode(eager ? Mode::Eager : Mode::Lazy, seed);
    return true;
}

FAKECUDA_EXPORT bool fakecuda_set_memory_limit(int device, size_t bytes) {
    Held held;
    auto &contexts = held.driver.contexts;
    if (device < 0 || size_t(device) >= contexts.size()) return false;
    contexts[size_t(device)]->memory.limit = bytes;
    return true;
}

FAKECUDA_EXPORT bool fakecuda_set(const char *name, int value) {
    Held held;
    Settings &settings = held.driver.settings;
    const std::string setting = name;
    if (setting == "devices") {
        settings.devices = value;
    } else if (setting == "driver") {
        settings.driver_version = value;
    } else if (setting == "cc") {
        settings.compute_capability = value;
    } else if (setting == "pools") {
        settings.memory_pools = value != 0;
    } else {
        return false;
    }
    return true;
}

FAKECUDA_EXPORT bool fakecuda_set_kernels(const char *path) { return Held().driver.kernels.load(path); }

FAKECUDA_EXPORT bool fakecuda_peek(void *dst, CUdeviceptr src, size_t bytes) {
    Held held;
    const char *at = view_of(held.driver, src, bytes);
    if (at) memcpy(dst, at, bytes);
    return at;
}

FAKECUDA_EXPORT bool fakecuda_poke(CUdeviceptr dst, const void *src, size_t bytes) {
    Held held;
    char *at = view_of(held.driver, dst, bytes);
    if (at) memcpy(at, src, bytes);
    return at;
}
