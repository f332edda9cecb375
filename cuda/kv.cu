// The kernels of the cache on the GPU. No #include and nothing beyond plain CUDA C++, so that NVRTC, nvcc and, with a shim, the
// host compiler of the tests take the same text.
//
// A plane is one layer's K or V of one stream; a blob is what a state holds of it. Both are grids of elements: channel j
// of cell c lies at base + j * channel_stride + c * cell_stride. Rows are grids of one channel whose elements are rows.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// Elements that go from one grid to another. The host's twin is `Move` in src/storage/cuda/moves.rs. Sizes and strides in bytes.
struct KvMove {
    u64 src;                 // address of channel 0 of cell 0
    u64 dst;                 // address of channel 0 of cell 0
    u64 src_cell_stride;
    u64 src_channel_stride;
    u64 dst_cell_stride;
    u64 dst_channel_stride;
    u64 src_cells;           // address of u32[n_cells]: which cells; 0: the first n_cells
    u64 dst_cells;           // address of u32[n_cells]: where to; 0: the first n_cells
    u32 n_cells;
    u32 n_channel;
    u32 elem_size;
    u32 reserved;
};

static __device__ __forceinline__ u64 cell_of(u64 cells, u32 i) {
    return cells ? ((const u32 *) cells)[i] : i;
}

template <typename T>
static __device__ __forceinline__ void copy_as(u8 * dst, const u8 * src, u32 n, u32 lane, u32 n_lane) {
    for (u32 i = lane; i < n / (u32) sizeof(T); i += n_lane) {
        ((T *) dst)[i] = ((const T *) src)[i];
    }
}

// n bytes by n_lane threads, in the widest words that addresses and size allow.
static __device__ __forceinline__ void copy_row(u8 * dst, const u8 * src, u32 n, u32 lane, u32 n_lane) {
    const u64 bits = (u64) dst | (u64) src | n;
    if ((bits & 15) == 0) {
        copy_as<uint4>(dst, src, n, lane, n_lane);
    } else if ((bits & 3) == 0) {
        copy_as<u32>(dst, src, n, lane, n_lane);
    } else if ((bits & 1) == 0) {
        copy_as<u16>(dst, src, n, lane, n_lane);
    } else {
        copy_as<u8>(dst, src, n, lane, n_lane);
    }
}

template <typename T>
static __device__ __forceinline__ void zero_as(u8 * dst, u32 n, u32 lane, u32 n_lane) {
    for (u32 i = lane; i < n / (u32) sizeof(T); i += n_lane) {
        ((T *) dst)[i] = T();
    }
}

static __device__ __forceinline__ void zero_row(u8 * dst, u32 n, u32 lane, u32 n_lane) {
    const u64 bits = (u64) dst | n;
    if ((bits & 15) == 0) {
        zero_as<uint4>(dst, n, lane, n_lane);
    } else if ((bits & 1) == 0) {
        zero_as<u16>(dst, n, lane, n_lane);
    } else {
        zero_as<u8>(dst, n, lane, n_lane);
    }
}

// Calls each(channel, i) for the elements that are this warp's, those of all blocks a warp each.
template <typename F>
static __device__ __forceinline__ void by_warp(const KvMove & m, F each) {
    const u64 n_row = (u64) m.n_cells * m.n_channel;
    const u32 n_warp = blockDim.x / 32;
    for (u64 row = (u64) blockIdx.x * n_warp + threadIdx.x / 32; row < n_row; row += (u64) gridDim.x * n_warp) {
        const u64 channel = m.n_channel == 1 ? 0 : row / m.n_cells;
        each(channel, (u32) (row - channel * m.n_cells));
    }
}

static __device__ __forceinline__ u8 * dst_of(const KvMove & m, u64 channel, u32 i) {
    return (u8 *) m.dst + channel * m.dst_channel_stride + cell_of(m.dst_cells, i) * m.dst_cell_stride;
}

// Any elements, a warp for each.
// moves: [gridDim.y]. grid: x = elements, any number of blocks; y = moves. block: a multiple of 32.
extern "C" __global__ void kv_move_rows(const KvMove * moves) {
    const KvMove m = moves[blockIdx.y];
    by_warp(m, [&](u64 channel, u32 i) {
        const u8 * src = (const u8 *) m.src + channel * m.src_channel_stride + cell_of(m.src_cells, i) * m.src_cell_stride;
        copy_row(dst_of(m, channel, i), src, m.elem_size, threadIdx.x % 32, 32);
    });
}

// Elements of one word T, a thread for each; addresses and strides are multiples of its size.
template <typename T>
static __device__ __forceinline__ void move_elements(const KvMove & m) {
    for (u32 channel = blockIdx.x; channel < m.n_channel; channel += gridDim.x) {
        const u64 src = m.src + channel * m.src_channel_stride;
        const u64 dst = m.dst + channel * m.dst_channel_stride;
        for (u32 i = threadIdx.x; i < m.n_cells; i += blockDim.x) {
            *(T *) (dst + cell_of(m.dst_cells, i) * m.dst_cell_stride) =
                *(const T *) (src + cell_of(m.src_cells, i) * m.src_cell_stride);
        }
    }
}

// moves: [gridDim.y]. grid: x = channels, any number of blocks; y = moves. block: any number of threads.
extern "C" __global__ void kv_move_1(const KvMove * moves) { move_elements<u8>(moves[blockIdx.y]); }
extern "C" __global__ void kv_move_2(const KvMove * moves) { move_elements<u16>(moves[blockIdx.y]); }
extern "C" __global__ void kv_move_4(const KvMove * moves) { move_elements<u32>(moves[blockIdx.y]); }
extern "C" __global__ void kv_move_8(const KvMove * moves) { move_elements<u64>(moves[blockIdx.y]); }

// Zeroes the elements on the side of dst, a warp for each; the side of src is not looked at.
// moves: [gridDim.y]. grid: x = elements, any number of blocks; y = moves. block: a multiple of 32.
extern "C" __global__ void kv_zero(const KvMove * moves) {
    const KvMove m = moves[blockIdx.y];
    by_warp(m, [&](u64 channel, u32 i) { zero_row(dst_of(m, channel, i), m.elem_size, threadIdx.x % 32, 32); });
}
