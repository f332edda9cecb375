// K-shift on the GPU: turns the K rows of cells by positions, in place. The rules of kv.cu hold here too.
//
// src/storage/shift.rs and src/format/quants.rs are the host's twins: the same operations in the same order, none of them
// fused, so that host and device give the same bytes.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// One plane's part of a shift. The host's twin is `Rotation` with addresses.
struct KvShift {
    u64 base;         // address of cell 0
    u64 cell_stride;  // bytes
    u64 cells;        // address of KvShiftedCell[n_cells]
    u64 angles;       // address of f32[n_row][n_rope_dims / 2][2]: cosine and sine
    u32 n_cells;
    u32 type;         // ggml's number: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl
    u32 n_head;
    u32 n_embd_head;
    u32 offset;       // first turned element of a head
    u32 n_rope_dims;  // turned elements of a head
    u32 is_neox;      // 0: pairs 2i, 2i + 1; 1: pairs i, i + n_rope_dims / 2
    u32 n_rot_k;      // size of the Hadamard transform; 0: none
};

struct KvShiftedCell {
    u32 cell;
    u32 row;          // of angles
};

// Elements of a head between the first and the last block that has a turned one: the host checks it.
#define KV_SHIFT_MAX_SPAN 1024

#define QK 32  // elements of a block, in every type here that has blocks

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, IQ4_NL = 20, BF16 = 30 };

// Arithmetic that no compiler fuses.

#ifdef __CUDACC__
static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
static __device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
static __device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
static __device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
#else  // the host's compiler, with -ffp-contract=off
static __device__ __forceinline__ float mul(float a, float b) { return a * b; }
static __device__ __forceinline__ float add(float a, float b) { return a + b; }
static __device__ __forceinline__ float sub(float a, float b) { return a - b; }
static __device__ __forceinline__ float div(float a, float b) { return a / b; }
static __device__ __forceinline__ float root(float a) { return __builtin_sqrtf(a); }
#endif

static __device__ __forceinline__ float magnitude(float x) { return x < 0.0f ? -x : x; }
static __device__ __forceinline__ float inverse(float d) { return d == 0.0f ? 0.0f : div(1.0f, d); }

union Bits {
    float f;
    u32 u;
};

static __device__ __forceinline__ float float_of(u32 u) {
    Bits bits;
    bits.u = u;
    return bits.f;
}

static __device__ __forceinline__ u32 bits_of(float f) {
    Bits bits;
    bits.f = f;
    return bits.u;
}

static __device__ __forceinline__ float from_half(u32 h) {
    const u32 sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | (mantissa ? 0x400000 : 0) | mantissa << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    const float subnormal = mul((float) mantissa, 1.0f / 16777216.0f);
    return float_of(sign | bits_of(subnormal));
}

// Rounds to even; all NaNs become one.
static __device__ __forceinline__ u32 to_half(float x) {
    const u32 sign = bits_of(x) >> 16 & 0x8000, u = bits_of(x) & 0x7fffffff;
    if (u > 0x7f800000) return sign | 0x7e00;
    if (u >= 0x477ff000) return sign | 0x7c00;
    if (u >= 0x38800000) return sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
    if (u < 0x33000000) return sign;
    const u32 shift = 126 - (u >> 23), mantissa = (u & 0x7fffff) | 0x800000;
    const u32 h = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
    return sign | (h + (rest > middle || (rest == middle && (h & 1))));
}

static __device__ __forceinline__ u32 to_bf16(float x) {
    const u32 u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return u >> 16 | 0x40;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// Bytes that need not be aligned.

static __device__ __forceinline__ u32 load_2(const u8 * src) { return src[0] | (u32) src[1] << 8; }

static __device__ __forceinline__ u32 load_4(const u8 * src) { return load_2(src) | load_2(src + 2) << 16; }

static __device__ __forceinline__ void store_2(u8 * dst, u32 value) {
    dst[0] = (u8) value;
    dst[1] = (u8) (value >> 8);
}

static __device__ __forceinline__ void store_4(u8 * dst, u32 value) {
    store_2(dst, value);
    store_2(dst + 2, value >> 16);
}

// Types

static __device__ __forceinline__ bool is_quantized(u32 type) { return type != F32 && type != F16 && type != BF16; }

static __device__ __forceinline__ u32 block_size(u32 type) { return is_quantized(type) ? QK : 1; }

static __device__ __forceinline__ u32 type_size(u32 type) {
    switch (type) {
        case F32: return 4;
        case F16:
        case BF16: return 2;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        default: return 18;  // q4_0, iq4_nl
    }
}

static __device__ __forceinline__ float iq4_nl_value(u32 q) {
    const signed char values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return (float) values[q];
}

// The lower half of a block is in the low bits of the bytes, the upper half in the high bits.
static __device__ __forceinline__ u32 low_bits(const u8 * qs, u32 i) {
    return i < QK / 2 ? qs[i] & 15 : qs[i - QK / 2] >> 4;
}

static __device__ __forceinline__ u32 high_bit(u32 qh, u32 i) { return (qh >> i & 1) << 4; }

// Element i of a row.
static __device__ __forceinline__ float load(u32 type, const u8 * row, u32 i) {
    const u8 * block = row + (u64) (i / block_size(type)) * type_size(type);
    const u32 j = i % QK;
    switch (type) {
        case F32: return float_of(load_4(block));
        case F16: return from_half(load_2(block));
        case BF16: return float_of(load_2(block) << 16);
        default: break;
    }
    const float d = from_half(load_2(block));
    switch (type) {
        case Q8_0: return mul((float) (signed char) block[2 + j], d);
        case Q4_0: return mul((float) ((int) low_bits(block + 2, j) - 8), d);
        case Q4_1: return add(mul((float) low_bits(block + 4, j), d), from_half(load_2(block + 2)));
        case Q5_0: return mul((float) ((int) (low_bits(block + 6, j) | high_bit(load_4(block + 2), j)) - 16), d);
        case Q5_1:
            return add(mul((float) (low_bits(block + 8, j) | high_bit(load_4(block + 4), j)), d),
                       from_half(load_2(block + 2)));
        default: return mul(iq4_nl_value(low_bits(block + 2, j)), d);  // iq4_nl
    }
}

// Towards 0, kept in 0..max.
static __device__ __forceinline__ u32 quant(float x, u32 max) {
    if (!(x >= 1.0f)) return 0;
    return x >= (float) max ? max : (u32) x;
}

// Half away from 0, kept in -128..127.
static __device__ __forceinline__ int rounded(float x) {
    if (x >= 127.0f) return 127;
    if (x <= -128.0f) return -128;
    if (x != x) return 0;
    const int whole = (int) x;
    const float rest = sub(x, (float) whole);
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

// The index of the nearest value of iq4_nl, of the larger one in the middle.
static __device__ __forceinline__ u32 nearest(float x) {
    u32 above = 1;
    while (above < 15 && !(x < iq4_nl_value(above))) above++;
    return sub(x, iq4_nl_value(above - 1)) < sub(iq4_nl_value(above), x) ? above - 1 : above;
}

// Blocks of n elements, which is QK: as a variable, since loops of a known length are unrolled into a large kernel.

// The first of the values that are furthest from 0.
// x: [n]
static __device__ __forceinline__ float largest(const float * x, u32 n) {
    float largest = 0.0f;
    for (u32 i = 0; i < n; i++) {
        if (magnitude(largest) < magnitude(x[i])) largest = x[i];
    }
    return largest;
}

// In the order of i, so that the upper half finds the lower.
// qs: [n / 2]
static __device__ __forceinline__ void store_nibble(u8 * qs, u32 n, u32 i, u32 q) {
    if (i < n / 2) {
        qs[i] = (u8) (q & 15);
    } else {
        qs[i - n / 2] |= (u8) (q << 4);
    }
}

// Scale and quants around `zero`; the largest value is quant 0.
// x: [n]. d_out: [2]. qs: [n / 2]. Returns the fifth bits.
static __device__ __forceinline__ u32 symmetric(const float * x, u32 n, u32 zero, u8 * d_out, u8 * qs) {
    const float d = div(largest(x, n), -(float) zero), scale = inverse(d), middle = (float) zero + 0.5f;
    u32 qh = 0;
    for (u32 i = 0; i < n; i++) {
        const u32 q = quant(add(mul(x[i], scale), middle), 2 * zero - 1);
        store_nibble(qs, n, i, q);
        qh |= (q >> 4) << i;
    }
    store_2(d_out, to_half(d));
    return qh;
}

// Scale, minimum and quants in 0..max.
// x: [n]. d_out: [4], scale and minimum. qs: [n / 2]. Returns the fifth bits.
static __device__ __forceinline__ u32 affine(const float * x, u32 n, u32 max, u8 * d_out, u8 * qs) {
    float low = 3.40282347e+38f, high = -3.40282347e+38f;
    for (u32 i = 0; i < n; i++) {
        if (x[i] < low) low = x[i];
        if (x[i] > high) high = x[i];
    }
    const float d = div(sub(high, low), (float) max), scale = inverse(d);
    u32 qh = 0;
    for (u32 i = 0; i < n; i++) {
        const u32 q = quant(add(mul(sub(x[i], low), scale), 0.5f), max);
        store_nibble(qs, n, i, q);
        qh |= (q >> 4) << i;
    }
    store_2(d_out, to_half(d));
    store_2(d_out + 2, to_half(low));
    return qh;
}

// x: [n]. block: [18]
static __device__ __forceinline__ void store_iq4_nl(const float * x, u32 n, u8 * block) {
    const float most = largest(x, n);
    if (magnitude(most) < 1e-15f) {
        for (u32 i = 0; i < 18; i++) block[i] = 0;
        return;
    }
    const float scale = div(1.0f, div(most, iq4_nl_value(0)));
    float products = 0.0f, squares = 0.0f;
    for (u32 i = 0; i < n; i++) {
        const u32 index = nearest(mul(x[i], scale));
        const float q = iq4_nl_value(index), weighted = mul(mul(x[i], x[i]), q);
        products = add(products, mul(weighted, x[i]));
        squares = add(squares, mul(weighted, q));
        store_nibble(block + 2, n, i, index);
    }
    store_2(block, to_half(squares > 0.0f ? div(products, squares) : 0.0f));
}

// x: [n]. block: [type_size(type)]
static __device__ __forceinline__ void store_block(u32 type, const float * x, u32 n, u8 * block) {
    switch (type) {
        case Q8_0: {
            const float d = div(magnitude(largest(x, n)), 127.0f), scale = inverse(d);
            for (u32 i = 0; i < n; i++) block[2 + i] = (u8) rounded(mul(x[i], scale));
            store_2(block, to_half(d));
            break;
        }
        case Q4_0: symmetric(x, n, 8, block, block + 2); break;
        case Q4_1: affine(x, n, 15, block, block + 4); break;
        case Q5_0: store_4(block + 2, symmetric(x, n, 16, block, block + 6)); break;
        case Q5_1: store_4(block + 4, affine(x, n, 31, block, block + 8)); break;
        default: store_iq4_nl(x, n, block); break;
    }
}

// By all threads of the block. x: [n] in shared memory, n a multiple of n_rot.
static __device__ __forceinline__ void hadamard(float * x, u32 n, u32 n_rot) {
    if (n_rot == 0) return;
    for (u32 half = 1; half < n_rot; half *= 2) {
        for (u32 p = threadIdx.x; p < n / 2; p += blockDim.x) {
            const u32 i = p / half * 2 * half + p % half;
            const float a = x[i], b = x[i + half];
            x[i] = add(a, b);
            x[i + half] = sub(a, b);
        }
        __syncthreads();
    }
    const float scale = div(1.0f, root((float) n_rot));
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        x[i] = mul(x[i], scale);
    }
    __syncthreads();
}

// Turns the heads of cells, a block for each.
// shifts: [gridDim.y]. grid: x = cells and heads, any number of blocks; y = planes. block: any number of threads.
extern "C" __global__ void kv_shift_rows(const KvShift * shifts) {
    __shared__ float x[KV_SHIFT_MAX_SPAN];
    const KvShift s = shifts[blockIdx.y];
    const KvShiftedCell * cells = (const KvShiftedCell *) s.cells;  // [n_cells]
    const u32 n_pair = s.n_rope_dims / 2;
    const u32 per_block = block_size(s.type);
    // Whole blocks around what is turned.
    const u32 unit = s.n_rot_k > per_block ? s.n_rot_k : per_block;
    const u32 start = s.offset / unit * unit;
    const u32 n = (s.offset + s.n_rope_dims + unit - 1) / unit * unit - start;
    const u32 step = s.is_neox ? 1 : 2, gap = s.is_neox ? n_pair : 1;
    const u64 n_unit = (u64) s.n_cells * s.n_head;
    for (u64 i = blockIdx.x; i < n_unit; i += gridDim.x) {
        const KvShiftedCell cell = cells[i / s.n_head];
        const u32 first = (u32) (i % s.n_head) * s.n_embd_head + start;
        u8 * row = (u8 *) s.base + cell.cell * s.cell_stride + (u64) (first / per_block) * type_size(s.type);
        const float * angles = (const float *) s.angles + (u64) cell.row * n_pair * 2;  // [n_pair][2]

        for (u32 j = threadIdx.x; j < n; j += blockDim.x) {
            x[j] = load(s.type, row, j);
        }
        __syncthreads();
        hadamard(x, n, s.n_rot_k);
        for (u32 p = threadIdx.x; p < n_pair; p += blockDim.x) {
            const u32 a_at = s.offset - start + p * step, b_at = a_at + gap;
            const float a = x[a_at], b = x[b_at], cosine = angles[2 * p], sine = angles[2 * p + 1];
            x[a_at] = sub(mul(a, cosine), mul(b, sine));
            x[b_at] = add(mul(a, sine), mul(b, cosine));
        }
        __syncthreads();
        hadamard(x, n, s.n_rot_k);
        switch (s.type) {
            case F32:
                for (u32 j = threadIdx.x; j < n; j += blockDim.x) store_4(row + 4 * j, bits_of(x[j]));
                break;
            case F16:
                for (u32 j = threadIdx.x; j < n; j += blockDim.x) store_2(row + 2 * j, to_half(x[j]));
                break;
            case BF16:
                for (u32 j = threadIdx.x; j < n; j += blockDim.x) store_2(row + 2 * j, to_bf16(x[j]));
                break;
            default:
                for (u32 b = threadIdx.x; b < n / per_block; b += blockDim.x) {
                    store_block(s.type, x + b * per_block, per_block, row + b * type_size(s.type));
                }
        }
        __syncthreads();
    }
}
