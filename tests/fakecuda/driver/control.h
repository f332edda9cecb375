// Calls for tests: what the emulated driver has seen, and how it is to behave.
#pragma once
#include "cuda.h"

// What the program holds, all devices together.
struct FakeLive {
    uint64_t allocations, bytes;
    uint64_t pinned, pinned_bytes;
    uint64_t streams, events, modules, contexts;
};

extern "C" {
// Calls of a function of the driver, or: calls, launches, pageable_copies, unfinished_use, bytes_host_to_device,
// bytes_device_to_host, bytes_device_to_device, bytes_peer.
uint64_t fakecuda_count(const char *name);
// Counters to 0, no failures to come, no faults of the past.
void fakecuda_reset();
// The nth call of the function from now on fails (1: the next).
void fakecuda_fail(const char *name, unsigned nth, CUresult code);
// The nth call of any function whose failure a program can act on fails.
void fakecuda_fail_at(unsigned nth, CUresult code);
// Failures that came to pass since they were asked for.
unsigned fakecuda_injected();
void fakecuda_live(FakeLive *live);
// Pieces of queued work that have not run; those that are known to touch a range.
uint64_t fakecuda_pending();
uint64_t fakecuda_unfinished_use(uintptr_t start, size_t bytes);
// Runs all that is queued.
void fakecuda_finish();
// False: work is queued.
bool fakecuda_set_mode(bool eager, unsigned seed);
// Memory that allocations of a device may have together. False: no such device.
bool fakecuda_set_memory_limit(int device, size_t bytes);
// devices (before cuInit), driver, cc, pools. False: no such setting.
bool fakecuda_set(const char *name, int value);
// The library of kernels for modules that are loaded from now on. False: the file is none.
bool fakecuda_set_kernels(const char *path);
// Device memory without a queue. False: the bytes are not within an allocation.
bool fakecuda_peek(void *dst, CUdeviceptr src, size_t bytes);
bool fakecuda_poke(CUdeviceptr dst, const void *src, size_t bytes);
}
