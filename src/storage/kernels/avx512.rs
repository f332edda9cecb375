//! AVX-512 with VBMI2: 64-byte stores past the cache, compression and expansion by a mask.

use std::arch::x86_64::{
    __m512i, _bzhi_u32, _bzhi_u64, _mm512_loadu_si512, _mm512_mask_blend_epi8, _mm512_mask_blend_epi16,
    _mm512_mask_blend_epi32, _mm512_mask_storeu_epi8, _mm512_mask_storeu_epi16, _mm512_mask_storeu_epi32,
    _mm512_maskz_compress_epi8, _mm512_maskz_compress_epi16, _mm512_maskz_compress_epi32,
    _mm512_maskz_expand_epi8, _mm512_maskz_expand_epi16, _mm512_maskz_expand_epi32, _mm512_maskz_loadu_epi8,
    _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_epi32, _mm512_permutexvar_epi8, _mm512_permutexvar_epi16,
    _mm512_permutexvar_epi32, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_sub_epi8, _mm512_sub_epi16, _mm512_sub_epi32,
};

use super::{AHEAD, Block, Kernels, prefetch};

pub(super) static KERNELS: Kernels = Kernels {
    name: "avx512",
    stream,
    compress: [compress_1, compress_2, compress_4],
    compress_stream: [compress_stream_1, compress_stream_2, compress_stream_4],
    expand: [expand_1, expand_2, expand_4],
};

/// Bytes of a step: four cache lines.
const STEP: usize = 256;

#[target_feature(enable = "avx512f,avx512bw,bmi2")]
#[expect(clippy::cast_ptr_alignment, reason = "loads need none; the head aligns the stores")]
#[expect(clippy::cast_possible_truncation, reason = "at most 64")]
unsafe fn stream(mut from: *const u8, mut to: *mut u8, mut left: usize) {
    // Shorter runs are mostly head and tail.
    if left < 128 {
        // SAFETY: by contract.
        unsafe { from.copy_to_nonoverlapping(to, left) };
        return;
    }
    let head = to.align_offset(64);
    // SAFETY: by contract: head < 64 < left, masks leave out what is not among the bytes that are left, and `to` is
    // aligned to a cache line from the head on.
    unsafe {
        let mask = _bzhi_u64(u64::MAX, head as u32);
        _mm512_mask_storeu_epi8(to.cast(), mask, _mm512_maskz_loadu_epi8(mask, from.cast()));
        (from, to, left) = (from.add(head), to.add(head), left - head);
        while left >= STEP {
            let (source, target) = (from.cast::<__m512i>(), to.cast::<__m512i>());
            if left >= AHEAD + STEP {
                prefetch(from.wrapping_add(AHEAD), STEP);
            }
            // Written out: a helper without the feature would not be inlined.
            let w0 = _mm512_loadu_si512(source);
            let w1 = _mm512_loadu_si512(source.add(1));
            let w2 = _mm512_loadu_si512(source.add(2));
            let w3 = _mm512_loadu_si512(source.add(3));
            _mm512_stream_si512(target, w0);
            _mm512_stream_si512(target.add(1), w1);
            _mm512_stream_si512(target.add(2), w2);
            _mm512_stream_si512(target.add(3), w3);
            (from, to, left) = (from.add(STEP), to.add(STEP), left - STEP);
        }
        while left >= 64 {
            _mm512_stream_si512(to.cast::<__m512i>(), _mm512_loadu_si512(from.cast()));
            (from, to, left) = (from.add(64), to.add(64), left - 64);
        }
        let mask = _bzhi_u64(u64::MAX, left as u32);
        _mm512_mask_storeu_epi8(to.cast(), mask, _mm512_maskz_loadu_epi8(mask, from.cast()));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
unsafe fn compress_1(plane: *const u8, _kv_size: u32, blocks: &[Block], blob: *mut u8) {
    for block in blocks {
        let from = plane.wrapping_add(block.cell as usize);
        let to = blob.wrapping_add(block.blob as usize);
        prefetch(from.wrapping_add(AHEAD), 64);
        // SAFETY: by contract; the load is of the elements alone, the store ends in the slack.
        unsafe {
            let elements = _mm512_maskz_loadu_epi8(block.mask, from.cast());
            _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi8(block.mask, elements));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
#[expect(clippy::cast_possible_truncation, reason = "half a mask at a time")]
unsafe fn compress_2(plane: *const u8, _kv_size: u32, blocks: &[Block], blob: *mut u8) {
    for block in blocks {
        let from = plane.wrapping_add(2 * block.cell as usize);
        let to = blob.wrapping_add(2 * block.blob as usize);
        let (low, high) = (block.mask as u32, (block.mask >> 32) as u32);
        prefetch(from.wrapping_add(AHEAD), 128);
        // SAFETY: by contract; loads are of the elements alone, stores end in the slack.
        unsafe {
            let elements = _mm512_maskz_loadu_epi16(low, from.cast());
            _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi16(low, elements));
            let to = to.wrapping_add(2 * low.count_ones() as usize);
            let elements = _mm512_maskz_loadu_epi16(high, from.wrapping_add(64).cast());
            _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi16(high, elements));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
#[expect(clippy::cast_possible_truncation, reason = "a quarter of a mask at a time")]
unsafe fn compress_4(plane: *const u8, _kv_size: u32, blocks: &[Block], blob: *mut u8) {
    for block in blocks {
        let mut from = plane.wrapping_add(4 * block.cell as usize);
        let mut to = blob.wrapping_add(4 * block.blob as usize);
        prefetch(from.wrapping_add(AHEAD), 256);
        for quarter in 0..4 {
            let mask = (block.mask >> (16 * quarter)) as u16;
            // SAFETY: by contract; the load is of the elements alone, the store ends in the slack.
            unsafe {
                let elements = _mm512_maskz_loadu_epi32(mask, from.cast());
                _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi32(mask, elements));
            }
            from = from.wrapping_add(64);
            to = to.wrapping_add(4 * mask.count_ones() as usize);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,bmi2,popcnt")]
unsafe fn expand_1(plane: *mut u8, blocks: &[Block], blob: *const u8) {
    for block in blocks {
        let to = plane.wrapping_add(block.cell as usize);
        prefetch(to.wrapping_add(AHEAD), 64);
        let from = blob.wrapping_add(block.blob as usize);
        // SAFETY: by contract; load and store are of the elements alone.
        unsafe {
            let elements = _mm512_maskz_loadu_epi8(_bzhi_u64(u64::MAX, block.mask.count_ones()), from.cast());
            _mm512_mask_storeu_epi8(to.cast(), block.mask, _mm512_maskz_expand_epi8(block.mask, elements));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,bmi2,popcnt")]
#[expect(clippy::cast_possible_truncation, reason = "half a mask at a time")]
unsafe fn expand_2(plane: *mut u8, blocks: &[Block], blob: *const u8) {
    for block in blocks {
        let mut to = plane.wrapping_add(2 * block.cell as usize);
        let mut from = blob.wrapping_add(2 * block.blob as usize);
        prefetch(to.wrapping_add(AHEAD), 128);
        for half in 0..2 {
            let mask = (block.mask >> (32 * half)) as u32;
            // SAFETY: by contract; load and store are of the elements alone.
            unsafe {
                let elements = _mm512_maskz_loadu_epi16(_bzhi_u32(u32::MAX, mask.count_ones()), from.cast());
                _mm512_mask_storeu_epi16(to.cast(), mask, _mm512_maskz_expand_epi16(mask, elements));
            }
            to = to.wrapping_add(64);
            from = from.wrapping_add(2 * mask.count_ones() as usize);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,bmi2,popcnt")]
#[expect(clippy::cast_possible_truncation, reason = "a quarter of a mask at a time")]
unsafe fn expand_4(plane: *mut u8, blocks: &[Block], blob: *const u8) {
    for block in blocks {
        let mut to = plane.wrapping_add(4 * block.cell as usize);
        let mut from = blob.wrapping_add(4 * block.blob as usize);
        prefetch(to.wrapping_add(AHEAD), 256);
        for quarter in 0..4 {
            let mask = (block.mask >> (16 * quarter)) as u16;
            // SAFETY: by contract; load and store are of the elements alone.
            unsafe {
                let among = _bzhi_u32(u32::MAX, mask.count_ones()) as u16;
                let elements = _mm512_maskz_loadu_epi32(among, from.cast());
                _mm512_mask_storeu_epi32(to.cast(), mask, _mm512_maskz_expand_epi32(mask, elements));
            }
            to = to.wrapping_add(64);
            from = from.wrapping_add(4 * mask.count_ones() as usize);
        }
    }
}

/// Compresses like the kernels above, with stores past the cache: a line is put together in a register, so that it is
/// written whole and once. The parts of lines at both ends are written through the cache.
///
/// `$mask` has a bit for each of the elements of a register, which are `$size` bytes.
macro_rules! compress_stream {
    ($name:ident, $through_cache:ident, $size:literal, $mask:ty, $word:ty,
     $load:ident, $compress:ident, $permute:ident, $sub:ident, $set:ident, $blend:ident, $store:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
        #[expect(clippy::cast_possible_truncation, reason = "part of a mask")]
        #[allow(clippy::cast_possible_wrap, clippy::unnecessary_cast, reason = "one body for three widths")]
        unsafe fn $name(plane: *const u8, kv_size: u32, blocks: &[Block], blob: *mut u8) {
            const LANES: usize = 64 / $size;
            static LANE: [$word; LANES] = {
                let mut lanes = [0; LANES];
                let mut lane: $word = 0;
                while (lane as usize) < LANES {
                    lanes[lane as usize] = lane;
                    lane += 1;
                }
                lanes
            };
            if !blob.addr().is_multiple_of($size) {
                // SAFETY: by contract.
                unsafe { $through_cache(plane, kv_size, blocks, blob) };
                return;
            }
            let Some(first) = blocks.first() else { return };
            let to = blob.wrapping_add($size * first.blob as usize);
            // The first lanes of the first line are not ours.
            let mut skip = (to.addr() % 64) / $size;
            let mut line = to.wrapping_sub(to.addr() % 64);
            let mut held = skip;
            let lane = load_lanes(&LANE);
            let mut acc = lane;
            for block in blocks {
                let mut from = plane.wrapping_add($size * block.cell as usize);
                prefetch(from.wrapping_add(AHEAD), 64 * $size);
                for part in 0..$size {
                    let mask = (block.mask >> (part * LANES)) as $mask;
                    // SAFETY: by contract; the load is of the elements alone, and the line is full of elements of the
                    // blocks but for the lanes that are skipped.
                    unsafe {
                        let elements = $compress(mask, $load(mask, from.cast()));
                        let placed = $permute($sub(lane, $set(held as _)), elements);
                        let filled = $blend(<$mask>::MAX << held, acc, placed);
                        held += mask.count_ones() as usize;
                        if held < LANES {
                            acc = filled;
                        } else {
                            if skip == 0 {
                                _mm512_stream_si512(line.cast(), filled);
                            } else {
                                $store(line.cast(), <$mask>::MAX << skip, filled);
                                skip = 0;
                            }
                            line = line.wrapping_add(64);
                            acc = placed;
                            held -= LANES;
                        }
                    }
                    from = from.wrapping_add(64);
                }
            }
            if held > skip {
                let mask = (<$mask>::MAX << skip) & !(<$mask>::MAX << held);
                // SAFETY: by contract; the lanes from `skip` to `held` are elements of the blocks.
                unsafe { $store(line.cast(), mask, acc) };
            }
        }
    };
}

#[target_feature(enable = "avx512f")]
fn load_lanes<T>(lanes: &T) -> __m512i {
    const { assert!(size_of::<T>() == 64) };
    // SAFETY: it has 64 bytes.
    unsafe { _mm512_loadu_si512((&raw const *lanes).cast()) }
}

compress_stream!(
    compress_stream_1,
    compress_1,
    1,
    u64,
    u8,
    _mm512_maskz_loadu_epi8,
    _mm512_maskz_compress_epi8,
    _mm512_permutexvar_epi8,
    _mm512_sub_epi8,
    _mm512_set1_epi8,
    _mm512_mask_blend_epi8,
    _mm512_mask_storeu_epi8
);
compress_stream!(
    compress_stream_2,
    compress_2,
    2,
    u32,
    u16,
    _mm512_maskz_loadu_epi16,
    _mm512_maskz_compress_epi16,
    _mm512_permutexvar_epi16,
    _mm512_sub_epi16,
    _mm512_set1_epi16,
    _mm512_mask_blend_epi16,
    _mm512_mask_storeu_epi16
);
compress_stream!(
    compress_stream_4,
    compress_4,
    4,
    u16,
    u32,
    _mm512_maskz_loadu_epi32,
    _mm512_maskz_compress_epi32,
    _mm512_permutexvar_epi32,
    _mm512_sub_epi32,
    _mm512_set1_epi32,
    _mm512_mask_blend_epi32,
    _mm512_mask_storeu_epi32
);
