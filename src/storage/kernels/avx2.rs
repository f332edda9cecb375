//! AVX2: 32-byte stores past the cache, shuffles of 16 bytes.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_loadl_epi64, _mm_loadu_si128, _mm_shuffle_epi8, _mm_storel_epi64, _mm_storeu_si128,
    _mm256_loadu_si256, _mm256_stream_si256,
};

use super::shuffle::{PATTERNS, lanes};
use super::{AHEAD, Block, Kernels, plain, prefetch};

pub(super) static KERNELS: Kernels = Kernels {
    name: "avx2",
    stream,
    compress: [compress::<1>, compress::<2>, compress::<4>],
    compress_stream: [compress::<1>, compress::<2>, compress::<4>],
    expand: [plain::expand::<1>, plain::expand::<2>, plain::expand::<4>],
};

/// Bytes of a step: two cache lines, each written whole.
const STEP: usize = 128;

#[target_feature(enable = "avx2")]
#[expect(clippy::cast_ptr_alignment, reason = "loads need none; the head aligns the stores")]
unsafe fn stream(mut from: *const u8, mut to: *mut u8, mut left: usize) {
    // Shorter runs are mostly head and tail.
    if left < 2 * STEP {
        // SAFETY: by contract.
        unsafe { from.copy_to_nonoverlapping(to, left) };
        return;
    }
    let head = to.align_offset(64);
    // SAFETY: by contract: head < 64 < left, each step is within the bytes that are left, and `to` is aligned to
    // a cache line from the head on.
    unsafe {
        from.copy_to_nonoverlapping(to, head);
        (from, to, left) = (from.add(head), to.add(head), left - head);
        while left >= STEP {
            let (source, target) = (from.cast::<__m256i>(), to.cast::<__m256i>());
            // Written out: a helper without the feature would not be inlined.
            let w0 = _mm256_loadu_si256(source);
            let w1 = _mm256_loadu_si256(source.add(1));
            let w2 = _mm256_loadu_si256(source.add(2));
            let w3 = _mm256_loadu_si256(source.add(3));
            _mm256_stream_si256(target, w0);
            _mm256_stream_si256(target.add(1), w1);
            _mm256_stream_si256(target.add(2), w2);
            _mm256_stream_si256(target.add(3), w3);
            (from, to, left) = (from.add(STEP), to.add(STEP), left - STEP);
        }
        from.copy_to_nonoverlapping(to, left);
    }
}

#[target_feature(enable = "avx2,popcnt")]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_ptr_alignment,
    reason = "a few bits; unaligned stores"
)]
unsafe fn compress<const SIZE: usize>(plane: *const u8, kv_size: u32, blocks: &[Block], blob: *mut u8) {
    let patterns = &PATTERNS[SIZE.ilog2() as usize];
    let lanes = const { lanes(SIZE) };
    for block in blocks {
        // Whole blocks are loaded.
        if u64::from(block.cell) + 64 > u64::from(kv_size) {
            // SAFETY: by contract.
            unsafe { plain::compress::<SIZE>(plane, kv_size, &[*block], blob) };
            continue;
        }
        let from = plane.wrapping_add(block.cell as usize * SIZE);
        let mut to = blob.wrapping_add(block.blob as usize * SIZE);
        prefetch(from.wrapping_add(AHEAD), 64 * SIZE);
        for group in 0..64 / lanes {
            let mask = (block.mask >> (group * lanes)) as usize & ((1 << lanes) - 1);
            let pattern = &patterns[mask];
            let from = from.wrapping_add(group * lanes * SIZE);
            // SAFETY: the 64 elements of the block are elements of the channel; 16 bytes are written, at most where
            // elements of the block or the slack are.
            unsafe {
                let pattern = _mm_loadu_si128(pattern.as_ptr().cast());
                if SIZE == 1 {
                    let picked = _mm_shuffle_epi8(_mm_loadl_epi64(from.cast()), pattern);
                    _mm_storel_epi64(to.cast::<__m128i>(), picked);
                } else {
                    let picked = _mm_shuffle_epi8(_mm_loadu_si128(from.cast()), pattern);
                    _mm_storeu_si128(to.cast::<__m128i>(), picked);
                }
            }
            to = to.wrapping_add(mask.count_ones() as usize * SIZE);
        }
    }
}
