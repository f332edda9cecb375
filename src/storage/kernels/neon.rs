//! NEON: shuffles of 16 bytes. There is no store past the cache to be had; the system's memcpy knows its machine.

use std::arch::aarch64::{
    vcombine_u8, vdup_n_u8, vld1_u8, vld1q_u8, vqtbl1_u8, vqtbl1q_u8, vst1_u8, vst1q_u8,
};

use super::shuffle::{PATTERNS, lanes};
use super::{Block, Kernels, plain};

pub(super) static KERNELS: Kernels = Kernels {
    name: "neon",
    stream: plain::copy_run,
    compress: [compress::<1>, compress::<2>, compress::<4>],
    compress_stream: [compress::<1>, compress::<2>, compress::<4>],
    expand: [plain::expand::<1>, plain::expand::<2>, plain::expand::<4>],
};

#[target_feature(enable = "neon")]
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
        for group in 0..64 / lanes {
            let mask = (block.mask >> (group * lanes)) as usize & ((1 << lanes) - 1);
            let pattern = &patterns[mask];
            let from = from.wrapping_add(group * lanes * SIZE);
            // SAFETY: the 64 elements of the block are elements of the channel; 16 bytes are written, at most where
            // elements of the block or the slack are.
            unsafe {
                if SIZE == 1 {
                    let elements = vcombine_u8(vld1_u8(from), vdup_n_u8(0));
                    vst1_u8(to, vqtbl1_u8(elements, vld1_u8(pattern.as_ptr())));
                } else {
                    vst1q_u8(to, vqtbl1q_u8(vld1q_u8(from), vld1q_u8(pattern.as_ptr())));
                }
            }
            to = to.wrapping_add(mask.count_ones() as usize * SIZE);
        }
    }
}
