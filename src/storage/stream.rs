//! Copies whose stores go past the cache: what is larger than it would only push out what is needed.
#![allow(unsafe_code, reason = "intrinsics on raw memory")]

use super::host::CopyRun;

/// The best copy of a run that this machine has.
pub(super) fn copy_run() -> CopyRun {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx") {
        return avx::copy_run;
    }
    super::host::plain_copy
}

/// Makes streamed bytes visible like any others: before a copy ends.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};

    /// Bytes of a step: two cache lines, each written whole.
    const STEP: usize = 128;

    /// # Safety
    /// The machine has AVX; `n` bytes are valid for reads at `from` and for writes at `to`, and do not overlap.
    pub(super) unsafe fn copy_run(from: *const u8, to: *mut u8, n: usize) {
        // SAFETY: by contract.
        unsafe { stream(from, to, n) };
    }

    #[target_feature(enable = "avx")]
    #[expect(clippy::cast_ptr_alignment, reason = "loads need none; the head aligns the stores")]
    unsafe fn stream(mut from: *const u8, mut to: *mut u8, mut left: usize) {
        // Shorter runs are mostly head and tail.
        if left < 8 * STEP {
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
}
