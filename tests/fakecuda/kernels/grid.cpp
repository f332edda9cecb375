// Runs a grid: blocks and threads one after another in a shuffled order, every access looked at.
#include "shim.h"

#include <ucontext.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "abi.h"

namespace shim {

uint3 thread_idx, block_idx, block_dim, grid_dim;

uint3 get_thread_idx() { return thread_idx; }
uint3 get_block_idx() { return block_idx; }
uint3 get_block_dim() { return block_dim; }
uint3 get_grid_dim() { return grid_dim; }

} // namespace shim

namespace {

struct Span {
    uintptr_t start;
    size_t bytes;
    bool contains(uintptr_t address, size_t n) const { return address - start < bytes && n <= bytes - (address - start); }
};

// All of it outlives a launch, because a fault leaves one by longjmp.
struct Running {
    const FakeKernel *kernel;
    const FakeLaunch *launch;
    FakeFault *fault;
    jmp_buf out;
    // What was found lately; a kernel goes back and forth between a few allocations.
    Span recent[8];
    unsigned next_recent;
    Span last_read, last_written;
    Span stack;

    std::vector<unsigned> blocks, threads;
    // Threads that wait for each other.
    std::vector<ucontext_t> fibers;
    std::vector<char> fiber_stacks;
    std::vector<bool> ended;
    ucontext_t scheduler;
    unsigned fiber;
};
Running running;

constexpr size_t FIBER_STACK = 64 << 10;
constexpr size_t KERNEL_STACK = 1 << 20;

// Linker symbols: where this library lies, with its __shared__ and __constant__ data.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;

bool own_memory(uintptr_t address, size_t bytes) {
    const Span library{uintptr_t(&__ehdr_start), size_t(&_end - &__ehdr_start)};
    const Span fibers{uintptr_t(running.fiber_stacks.data()), running.fiber_stacks.size()};
    return running.stack.contains(address, bytes) || library.contains(address, bytes) ||
           fibers.contains(address, bytes);
}

[[noreturn]] void end_launch(FakeFault fault) {
    *running.fault = fault;
    longjmp(running.out, 1);
}

void check_slowly(uintptr_t address, size_t bytes, bool writes) {
    Span span{0, bytes};
    if (own_memory(address, bytes)) return;
    const FakeLaunch &launch = *running.launch;
    if (!launch.find(launch.device, address, &span.start, &span.bytes)) end_launch({address, bytes, writes, false});
    running.recent[running.next_recent++ % std::size(running.recent)] = span;
}

void check(const void *at, size_t bytes, bool writes, size_t alignment) {
    const auto address = uintptr_t(at);
    Span &last = writes ? running.last_written : running.last_read;
    if (address % alignment != 0) end_launch({address, bytes, writes, true});
    if (last.contains(address, bytes)) return;
    for (const Span &span : running.recent) {
        if (!span.contains(address, bytes)) continue;
        last = span;
        return;
    }
    check_slowly(address, bytes, writes);
}

void place_thread(unsigned t) {
    const uint3 dim = shim::block_dim;
    shim::thread_idx = {t % dim.x, t / dim.x % dim.y, t / dim.x / dim.y};
}

void run_block_straight() {
    for (const unsigned t : running.threads) {
        place_thread(t);
        running.kernel->call(running.launch->args);
    }
}

void fiber_main() {
    const unsigned self = running.fiber;
    running.kernel->call(running.launch->args);
    running.ended[self] = true;
    swapcontext(&running.fibers[self], &running.scheduler);
}

void start_fibers() {
    const size_t n = running.threads.size();
    running.fibers.resize(n);
    running.fiber_stacks.resize(n * FIBER_STACK);
    running.ended.assign(n, false);
    for (size_t t = 0; t < n; ++t) {
        ucontext_t &fiber = running.fibers[t];
        getcontext(&fiber);
        fiber.uc_stack.ss_sp = &running.fiber_stacks[t * FIBER_STACK];
        fiber.uc_stack.ss_size = FIBER_STACK;
        fiber.uc_link = nullptr;
        makecontext(&fiber, fiber_main, 0);
    }
}

// Each round brings every thread to its next barrier.
void run_block_with_barriers() {
    start_fibers();
    for (bool alive = true; alive;) {
        alive = false;
        for (const unsigned t : running.threads) {
            if (running.ended[t]) continue;
            place_thread(t);
            running.fiber = t;
            swapcontext(&running.scheduler, &running.fibers[t]);
            alive |= !running.ended[t];
        }
    }
}

void shuffled(std::vector<unsigned> &order, size_t n, std::mt19937 &random) {
    order.resize(n);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
}

void prepare(const FakeLaunch &launch) {
    const uint3 grid{launch.grid[0], launch.grid[1], launch.grid[2]};
    const uint3 block{launch.block[0], launch.block[1], launch.block[2]};
    std::mt19937 random(launch.seed);
    shuffled(running.blocks, size_t(grid.x) * grid.y * grid.z, random);
    shuffled(running.threads, size_t(block.x) * block.y * block.z, random);
    shim::grid_dim = grid;
    shim::block_dim = block;
    std::fill(std::begin(running.recent), std::end(running.recent), Span{});
    running.last_read = running.last_written = {};
}

} // namespace

void shim::barrier() {
    if (!running.launch->has_barrier) {
        fprintf(stderr, "fakecuda: %s has a barrier that its PTX does not have\n", running.kernel->name);
        abort();
    }
    const unsigned self = running.fiber;
    swapcontext(&running.fibers[self], &running.scheduler);
}

bool run_grid(const FakeKernel *kernel, const FakeLaunch *launch, FakeFault *fault) {
    running.kernel = kernel;
    running.launch = launch;
    running.fault = fault;
    prepare(*launch);
    // What the kernel has on the stack lies below here.
    const auto here = uintptr_t(__builtin_frame_address(0));
    running.stack = {here - KERNEL_STACK, KERNEL_STACK};
    if (setjmp(running.out) != 0) return false;
    const uint3 grid = shim::grid_dim;
    for (const unsigned b : running.blocks) {
        shim::block_idx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        running.launch->has_barrier ? run_block_with_barriers() : run_block_straight();
    }
    return true;
}

// kernels.cpp is compiled for ThreadSanitizer, whose runtime these stand in for: the compiler calls one at every access
// to memory that is not a kernel's own variable. Hidden, so that a real runtime in the process is left alone.
#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define ACCESS(n)                                                                         \
    HOOK __tsan_read##n(void *at) { check(at, n, false, n); }                             \
    HOOK __tsan_write##n(void *at) { check(at, n, true, n); }                             \
    HOOK __tsan_unaligned_read##n(void *at) { check(at, n, false, 1); }                   \
    HOOK __tsan_unaligned_write##n(void *at) { check(at, n, true, 1); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK __tsan_read_range(void *at, size_t bytes) { check(at, bytes, false, 1); }
HOOK __tsan_write_range(void *at, size_t bytes) { check(at, bytes, true, 1); }
HOOK __tsan_init() {}
