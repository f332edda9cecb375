// Makes CUDA C++ of the host's: the words that a kernel's source uses, as the host compiler takes them.
//
// Never do two kernels run at a time here, so where a thread of a grid is stands in plain globals.
#pragma once
#include <math.h>

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace shim {

// The place of the running thread. Read through functions that the compiler may call once: it never changes while a
// kernel's function runs.
extern uint3 thread_idx, block_idx, block_dim, grid_dim;
#define FAKECUDA_PLACE __attribute__((const, noinline, no_sanitize("thread")))
FAKECUDA_PLACE uint3 get_thread_idx();
FAKECUDA_PLACE uint3 get_block_idx();
FAKECUDA_PLACE uint3 get_block_dim();
FAKECUDA_PLACE uint3 get_grid_dim();

// Lets the other threads of the block come here too.
void barrier();

} // namespace shim

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define threadIdx (shim::get_thread_idx())
#define blockIdx (shim::get_block_idx())
#define blockDim (shim::get_block_dim())
#define gridDim (shim::get_grid_dim())
#define __syncthreads() shim::barrier()
