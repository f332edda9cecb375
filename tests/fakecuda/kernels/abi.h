// What the driver and the library of kernels agree on.
#pragma once
#include <cstddef>
#include <cstdint>

struct FakeLaunch;
struct FakeFault;

struct FakeKernel {
    const char *name;
    unsigned n_args;
    const unsigned *arg_sizes;  // [n_args]
    const bool *arg_is_pointer; // [n_args]
    // One thread.
    void (*call)(void **args);
    // A grid. False: `fault` says why it ended early.
    bool (*run)(const FakeKernel *kernel, const FakeLaunch *launch, FakeFault *fault);
};

struct FakeLaunch {
    unsigned grid[3];
    unsigned block[3];
    // Threads of a block wait for each other: they need stacks of their own.
    bool has_barrier;
    unsigned seed;
    void **args;
    // The memory that the device may use around the `*bytes` at an address: false if they are not in any.
    bool (*find)(void *device, uintptr_t address, uintptr_t *start, size_t *bytes);
    void *device;
};

// The access that ended a launch.
struct FakeFault {
    uintptr_t address;
    size_t bytes;
    bool writes;
    bool misaligned;
};

extern "C" const FakeKernel *fakecuda_kernels(unsigned *n);
