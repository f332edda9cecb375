// The driver's calls about modules and launches.
#include <cstring>

#include "streams.h"

namespace {

struct Launch {
    FunctionP function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    unsigned seed;
    // Each argument's bytes as they were at the call.
    std::vector<std::vector<char>> args;
};

bool within_limits(const Launch &launch) {
    const auto &[gx, gy, gz] = launch.grid;
    const auto &[bx, by, bz] = launch.block;
    const bool grid = gx && gy && gz && gx <= 0x7fffffff && gy <= 65535 && gz <= 65535;
    const bool block = bx && by && bz && bx <= 1024 && by <= 1024 && bz <= 64 && uint64_t(bx) * by * bz <= 1024;
    return grid && block && launch.shared_bytes <= 48 << 10;
}

void copy_args(Launch &launch, void **args) {
    const FakeKernel &kernel = *launch.function->kernel;
    for (unsigned i = 0; i < kernel.n_args; ++i) {
        const char *bytes = static_cast<const char *>(args[i]);
        launch.args.emplace_back(bytes, bytes + kernel.arg_sizes[i]);
    }
}

// What is known of the memory that a launch touches: where its pointers point.
std::vector<Range> pointers(const Launch &launch) {
    std::vector<Range> found;
    const FakeKernel &kernel = *launch.function->kernel;
    for (unsigned i = 0; i < kernel.n_args; ++i) {
        if (!kernel.arg_is_pointer[i]) continue;
        uintptr_t address;
        memcpy(&address, launch.args[i].data(), sizeof address);
        found.push_back({address, 1});
    }
    return found;
}

// A device reaches its own memory and what is pinned; nothing else. Its own becomes readable as far as it is needed.
bool find_for_device(void *device, uintptr_t address, uintptr_t *start, size_t *bytes) {
    Driver &driver = ::driver();
    const std::lock_guard<std::mutex> guard(driver.lock);
    auto *context = static_cast<Context *>(device);
    const Range access{address, *bytes};
    const bool own = context->memory.covers(address);
    auto range = own ? context->memory.usable(access) : driver.pinned.find(access);
    if (!range) return false;
    if (own) range = context->memory.open(access).within(*range);
    *start = range->start;
    *bytes = range->bytes;
    return true;
}

CUresult tell_fault(const Launch &launch, const FakeFault &fault) {
    const Context *owner = driver().context_of(fault.address);
    const char *what = fault.misaligned                       ? "a misaligned address"
                       : owner == launch.function->context ? "memory that is not within an allocation"
                       : owner                                ? "memory of another device"
                                                              : "host memory that is not pinned";
    report("%s on device %d %s %zu bytes at %#lx: %s", launch.function->name.c_str(),
           launch.function->context->ordinal, fault.writes ? "writes" : "reads", fault.bytes,
           fault.address, what);
    return fault.misaligned ? CUDA_ERROR_MISALIGNED_ADDRESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

CUresult run_launch(Lock &lock, Launch &launch) {
    Context &context = *launch.function->context;
    const FakeKernel &kernel = *launch.function->kernel;
    std::vector<void *> args;
    for (auto &arg : launch.args) args.push_back(arg.data());
    FakeLaunch fake{};
    std::copy(launch.grid, launch.grid + 3, fake.grid);
    std::copy(launch.block, launch.block + 3, fake.block);
    fake.has_barrier = launch.function->has_barrier;
    fake.seed = launch.seed;
    fake.args = args.data();
    fake.find = find_for_device;
    fake.device = &context;
    FakeFault fault{};
    lock.unlock();
    const bool good = kernel.run(&kernel, &fake, &fault);
    lock.lock();
    return good ? CUDA_SUCCESS : tell_fault(launch, fault);
}

} // namespace

FAKECUDA_EXPORT CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
    return in_context(__func__, [&](Lock &, Context &context) {
        // Machine code cannot be emulated.
        if (memcmp(image, "\x7f" "ELF", 4) == 0) return CUDA_ERROR_NO_BINARY_FOR_GPU;
        ModuleP module;
        if (const CUresult bad = load_ptx(static_cast<const char *>(image), &context, &module)) return bad;
        *handle = driver().modules.add(module);
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuModuleUnload(CUmodule handle) {
    return at_any_time(__func__, [&](Lock &) {
        Driver &driver = ::driver();
        const ModuleP module = driver.modules.find(handle);
        if (!module) return CUDA_ERROR_INVALID_HANDLE;
        for (const CUfunction function : module->handles) driver.functions.remove(function);
        driver.modules.remove(handle);
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module_handle, const char *name) {
    return in_context(__func__, [&](Lock &, Context &context) {
        const ModuleP module = driver().modules.find(module_handle);
        if (!module || module->context != &context) return CUDA_ERROR_INVALID_HANDLE;
        for (const FunctionP &function : module->functions) {
            if (function->name != name) continue;
            if (!function->kernel) report("%s is not among the kernels of the host build", name);
            if (!function->kernel) return CUDA_ERROR_NOT_FOUND;
            *handle = driver().functions.add(function);
            module->handles.push_back(*handle);
            return CUDA_SUCCESS;
        }
        return CUDA_ERROR_NOT_FOUND;
    });
}

FAKECUDA_EXPORT CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                        CUstream stream_handle, void **args, void **extra) {
    return in_context(__func__, [&](Lock &, Context &context) {
        Driver &driver = ::driver();
        StreamP stream;
        if (const CUresult bad = usable_stream(stream_handle, context, &stream)) return bad;
        const FunctionP function = driver.functions.find(handle);
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        if (function->context != &context || stream->context != &context) return CUDA_ERROR_INVALID_HANDLE;
        if (extra) return CUDA_ERROR_NOT_SUPPORTED;
        auto launch = std::make_shared<Launch>(Launch{function,
                                                      {grid_x, grid_y, grid_z},
                                                      {block_x, block_y, block_z},
                                                      shared_bytes,
                                                      driver.worker.random(),
                                                      {}});
        if (!within_limits(*launch)) {
            report("%s: grid %u x %u x %u, block %u x %u x %u, %u bytes of shared memory are not within the limits",
                   function->name.c_str(), grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes);
            return CUDA_ERROR_INVALID_VALUE;
        }
        copy_args(*launch, args);
        Op work;
        work.uses = pointers(*launch);
        work.run = [launch](Lock &lock) { return run_launch(lock, *launch); };
        driver.worker.push(stream, std::move(work));
        driver.calls.add("launches", 1);
        return CUDA_SUCCESS;
    });
}
