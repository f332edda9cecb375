// The kernels of cuda/kv.cu and cuda/shift.cu, compiled for the host. A test may give a source with a fault in the place of kv.cu.
#include "shim.h"

#ifndef KERNEL_SOURCE
#define KERNEL_SOURCE "../../../cuda/kv.cu"
#endif
#include KERNEL_SOURCE
#include "../../../cuda/shift.cu"

#include <type_traits>
#include <utility>

#include "abi.h"

bool run_grid(const FakeKernel *kernel, const FakeLaunch *launch, FakeFault *fault);

// What is not a kernel's own work is not watched; kernels are not inlined into it.
#define UNWATCHED __attribute__((no_sanitize("thread")))

namespace {

template <class... Args> struct Signature {
    static constexpr unsigned SIZES[] = {unsigned(sizeof(Args))..., 0};
    static constexpr bool POINTERS[] = {std::is_pointer_v<Args>..., false};
};

template <auto kernel, class... Args, size_t... I>
UNWATCHED void call_with(void **args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<Args> *>(args[I])...);
}

template <auto kernel, class... Args> FakeKernel describe(const char *name, void (*)(Args...)) {
    const auto call = [](void **args) { call_with<kernel, Args...>(args, std::index_sequence_for<Args...>()); };
    return {name, sizeof...(Args), Signature<Args...>::SIZES, Signature<Args...>::POINTERS, call, run_grid};
}

#define KERNEL(name) describe<name>(#name, name)

const FakeKernel KERNELS[] = {
    KERNEL(kv_move_rows), KERNEL(kv_move_1), KERNEL(kv_move_2), KERNEL(kv_move_4), KERNEL(kv_move_8), KERNEL(kv_zero),
    KERNEL(kv_shift_rows),
};

} // namespace

UNWATCHED __attribute__((visibility("default"))) const FakeKernel *fakecuda_kernels(unsigned *n) {
    *n = sizeof KERNELS / sizeof *KERNELS;
    return KERNELS;
}
