// The driver's calls about devices, primary contexts and errors.
#include <cstring>

#include "driver.h"
#include "guard.h"

namespace {

Context *device_context(CUdevice device) {
    const auto &contexts = driver().contexts;
    return device >= 0 && size_t(device) < contexts.size() ? contexts[size_t(device)].get() : nullptr;
}

void create_devices() {
    Driver &driver = ::driver();
    for (int i = 0; i < driver.settings.devices; ++i) {
        auto context = std::make_unique<Context>();
        context->ordinal = i;
        context->legacy = driver.worker.add_stream(context.get(), true);
        driver.contexts.push_back(std::move(context));
    }
    watch_host_accesses();
}

int attribute(int which) {
    const Settings &settings = driver().settings;
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 16;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return settings.compute_capability / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return settings.compute_capability % 10;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return settings.memory_pools;
    default: return 0;
    }
}

struct ErrorText {
    CUresult code;
    const char *name;
    const char *text;
};

#define ERROR(name, text) {CUDA_ERROR_##name, "CUDA_ERROR_" #name, text}
constexpr ErrorText ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    ERROR(INVALID_VALUE, "invalid argument"),
    ERROR(OUT_OF_MEMORY, "out of memory"),
    ERROR(NOT_INITIALIZED, "initialization error"),
    ERROR(DEINITIALIZED, "driver shutting down"),
    ERROR(NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(INVALID_DEVICE, "invalid device ordinal"),
    ERROR(INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(INVALID_CONTEXT, "invalid device context"),
    ERROR(NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(UNSUPPORTED_PTX_VERSION, "the provided PTX was compiled with an unsupported toolchain."),
    ERROR(INVALID_HANDLE, "invalid resource handle"),
    ERROR(NOT_FOUND, "named symbol not found"),
    ERROR(NOT_READY, "device not ready"),
    ERROR(ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(MISALIGNED_ADDRESS, "misaligned address"),
    ERROR(LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(NOT_SUPPORTED, "operation not supported"),
    ERROR(STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(UNKNOWN, "unknown error"),
};
#undef ERROR

const ErrorText *error_text(CUresult code) {
    for (const ErrorText &error : ERRORS) {
        if (error.code == code) return &error;
    }
    return nullptr;
}

} // namespace

FAKECUDA_EXPORT CUresult cuInit(unsigned) {
    return at_any_time(__func__, [](Lock &) {
        Driver &driver = ::driver();
        if (driver.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
        if (!driver.initialised) create_devices();
        driver.initialised = true;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDriverGetVersion(int *version) {
    return at_any_time(__func__, [&](Lock &) {
        *version = driver().settings.driver_version;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDeviceGetCount(int *count) {
    return initialised(__func__, [&](Lock &) {
        *count = int(driver().contexts.size());
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    return initialised(__func__, [&](Lock &) {
        if (!device_context(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
        *device = ordinal;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    return initialised(__func__, [&](Lock &) {
        if (!device_context(device)) return CUDA_ERROR_INVALID_DEVICE;
        snprintf(name, size_t(size), "Emulated device %d", device);
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    return initialised(__func__, [&](Lock &) {
        const Context *context = device_context(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        *bytes = context->memory.limit;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDeviceGetAttribute(int *value, int which, CUdevice device) {
    return initialised(__func__, [&](Lock &) {
        if (!device_context(device)) return CUDA_ERROR_INVALID_DEVICE;
        *value = attribute(which);
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return initialised(__func__, [&](Lock &) {
        Context *found = device_context(device);
        if (!found) return CUDA_ERROR_INVALID_DEVICE;
        ++found->retained;
        *context = found;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return at_any_time(__func__, [&](Lock &) {
        Context *context = device_context(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        --context->retained;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    return at_any_time(__func__, [&](Lock &) {
        *context = current_context;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    return at_any_time(__func__, [&](Lock &) {
        if (context && context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        current_context = context;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    return in_context(__func__, [&](Lock &, Context &context) {
        *device = context.ordinal;
        return CUDA_SUCCESS;
    });
}

FAKECUDA_EXPORT CUresult cuCtxSynchronize() {
    return in_context(__func__, [](Lock &lock, Context &context) {
        if (driver().worker.capturing(&context)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        driver().worker.finish_all(lock, &context);
        return context.sticky;
    });
}

FAKECUDA_EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    const ErrorText *error = error_text(code);
    *name = error ? error->name : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKECUDA_EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    const ErrorText *error = error_text(code);
    *text = error ? error->text : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
