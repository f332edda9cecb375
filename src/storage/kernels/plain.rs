//! Without any instruction that not every machine has.

use super::{Block, Kernels};

pub(super) static KERNELS: Kernels = Kernels {
    name: "plain",
    stream: copy_run,
    compress: [compress::<1>, compress::<2>, compress::<4>],
    compress_stream: [compress::<1>, compress::<2>, compress::<4>],
    expand: [expand::<1>, expand::<2>, expand::<4>],
};

pub(super) unsafe fn copy_run(from: *const u8, to: *mut u8, n: usize) {
    // SAFETY: by contract.
    unsafe { from.copy_to_nonoverlapping(to, n) };
}

pub(super) unsafe fn compress<const SIZE: usize>(
    plane: *const u8,
    _kv_size: u32,
    blocks: &[Block],
    blob: *mut u8,
) {
    for &block in blocks {
        each_element(block, |cell, at, n| {
            let (from, to) = (plane.wrapping_add(cell * SIZE), blob.wrapping_add(at * SIZE));
            // SAFETY: elements of the block, by contract.
            unsafe { copy_elements::<SIZE>(from, to, n) };
        });
    }
}

pub(super) unsafe fn expand<const SIZE: usize>(plane: *mut u8, blocks: &[Block], blob: *const u8) {
    for &block in blocks {
        each_element(block, |cell, at, n| {
            let (from, to) = (blob.wrapping_add(at * SIZE), plane.wrapping_add(cell * SIZE));
            // SAFETY: elements of the block, by contract.
            unsafe { copy_elements::<SIZE>(from, to, n) };
        });
    }
}

/// Calls with the cell of the stream and of the blob, and with 8 or 1, their number.
#[inline]
fn each_element(block: Block, mut call: impl FnMut(usize, usize, usize)) {
    let mut at = block.blob as usize;
    for (octet, mut mask) in block.mask.to_le_bytes().into_iter().enumerate() {
        let first = block.cell as usize + 8 * octet;
        if mask == u8::MAX {
            call(first, at, 8);
            at += 8;
            continue;
        }
        while mask != 0 {
            call(first + mask.trailing_zeros() as usize, at, 1);
            at += 1;
            mask &= mask - 1;
        }
    }
}

/// Copies 8 elements or 1, whose size the compiler knows: a few instructions instead of a call.
#[inline]
unsafe fn copy_elements<const SIZE: usize>(from: *const u8, to: *mut u8, n: usize) {
    // SAFETY: by contract of the caller; an array of bytes needs no alignment.
    unsafe {
        if n == 8 {
            to.cast::<[[u8; SIZE]; 8]>().write(from.cast::<[[u8; SIZE]; 8]>().read());
        } else {
            to.cast::<[u8; SIZE]>().write(from.cast::<[u8; SIZE]>().read());
        }
    }
}
