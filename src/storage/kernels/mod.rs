//! The copies that the machine is chosen for: runs past the cache, and elements picked out of a plane.
//!
//! [`plain`] is the meaning of every kernel; the others are held equal to it by the tests.
#![allow(unsafe_code, reason = "kernels work on raw memory")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod shuffle;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

/// Up to 64 cells of a stream that follow each other in a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// The first of 64 cells of the stream.
    pub cell: u32,
    /// The blob cell of the first bit that is set.
    pub blob: u32,
    /// Which of the 64 are meant; bit 0 always.
    pub mask: u64,
}

impl Block {
    /// Number of cells.
    pub fn len(self) -> u32 {
        self.mask.count_ones()
    }

    /// One past the blob cell of the last bit.
    pub fn blob_end(self) -> u32 {
        self.blob + self.len()
    }

    /// Whether blob cell `src` can follow, as cell `dst` of the stream.
    pub fn can_take(self, src: u32, dst: u32) -> bool {
        let is_behind = dst.checked_sub(self.cell).is_some_and(|bit| bit < 64 && self.mask >> bit == 0);
        is_behind && src == self.blob_end()
    }

    /// Takes cells from `dst` on, as many of `len` as it reaches.
    pub fn add(&mut self, dst: u32, len: u32) -> u32 {
        let bit = dst - self.cell;
        let n = len.min(64 - bit);
        self.mask |= (u64::MAX >> (64 - n)) << bit;
        n
    }

    /// What blob cells `start..end` are of it, which must be some.
    pub fn clip(self, start: u32, end: u32) -> Self {
        let mut mask = self.mask;
        for _ in end.min(self.blob_end())..self.blob_end() {
            mask ^= 1 << mask.ilog2();
        }
        for _ in self.blob..start.max(self.blob) {
            mask &= mask - 1;
        }
        let skip = mask.trailing_zeros();
        Self { cell: self.cell + skip, blob: start.max(self.blob), mask: mask >> skip }
    }
}

/// Copies a range of bytes, from and to.
pub(super) type CopyRun = unsafe fn(*const u8, *mut u8, usize);

/// Copies the elements of `blocks` between one channel of a plane (the address of its cell 0, and its number of
/// cells) and the blob (the address of its cell 0, which need not be a real one).
pub(super) type Compress = unsafe fn(plane: *const u8, kv_size: u32, blocks: &[Block], blob: *mut u8);
/// See [`Compress`].
pub(super) type Expand = unsafe fn(plane: *mut u8, blocks: &[Block], blob: *const u8);

/// Bytes behind the elements of a blob that [`Kernels::compress`] may write as well.
pub(super) const SLACK: usize = 64;

/// Bytes ahead that are fetched while elements are picked or put: the machine's own prefetch ends with a page, and the
/// next page has to be looked up as well.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 4096;

/// Elements that have kernels, bytes: the index of a list of kernels is the logarithm.
const ELEM_SIZES: [usize; 3] = [1, 2, 4];

/// Copies for one kind of machine.
///
/// # Safety
/// Of every kernel: the machine has what its name says; the bytes of the range, or of the elements of the blocks,
/// are valid on both sides and do not overlap. `compress` demands that all `kv_size` elements of the channel are
/// valid for reads, and [`SLACK`] bytes behind the last element for writes.
#[derive(Debug)]
pub(super) struct Kernels {
    /// What it takes.
    pub name: &'static str,
    /// Copies a run with stores that go past the cache; [`fence`] makes them visible.
    pub stream: CopyRun,
    /// From a plane to a blob; elements of 1, 2 and 4 bytes.
    compress: [Compress; 3],
    /// The same, past the cache if it can; [`fence`] makes them visible.
    compress_stream: [Compress; 3],
    /// From a blob to a plane, no other byte of it; elements of 1, 2 and 4 bytes.
    expand: [Expand; 3],
}

impl Kernels {
    /// The kernel for elements of `elem_size` bytes, if there is one; with `streams` for more than the cache holds.
    pub fn compress(&self, elem_size: usize, streams: bool) -> Option<Compress> {
        let kernels = if streams { &self.compress_stream } else { &self.compress };
        ELEM_SIZES.iter().position(|&size| size == elem_size).map(|i| kernels[i])
    }

    /// As [`Kernels::compress`], the other way.
    pub fn expand(&self, elem_size: usize) -> Option<Expand> {
        ELEM_SIZES.iter().position(|&size| size == elem_size).map(|i| self.expand[i])
    }

    /// All that this machine can run, the plain ones first, the best last.
    pub fn all() -> Vec<&'static Self> {
        let mut all = vec![&plain::KERNELS];
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("popcnt") {
            all.push(&avx2::KERNELS);
            if std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512vbmi")
                && std::is_x86_feature_detected!("avx512vbmi2")
                && std::is_x86_feature_detected!("bmi2")
            {
                all.push(&avx512::KERNELS);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(&neon::KERNELS);
        }
        all
    }

    /// The best of [`Kernels::all`], or those that the environment variable `KVSTATE_KERNELS` names, so that tests
    /// and reports of bugs can try the others.
    pub fn get() -> &'static Self {
        static CHOSEN: OnceLock<&Kernels> = OnceLock::new();
        CHOSEN.get_or_init(|| {
            let all = Self::all();
            let best = all[all.len() - 1];
            let Some(wanted) = std::env::var_os("KVSTATE_KERNELS") else { return best };
            all.iter().copied().find(|kernels| wanted == kernels.name).unwrap_or_else(|| {
                log::warn!(
                    "KVSTATE_KERNELS={}: not on this machine, {} is used",
                    wanted.display(),
                    best.name
                );
                best
            })
        })
    }
}

/// Makes streamed bytes visible like any others: before a copy ends.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Asks for `n` bytes that will soon be read.
#[inline]
pub(super) fn prefetch(from: *const u8, n: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..n).step_by(64) {
        // SAFETY: every x86-64 has SSE; a prefetch reads nothing, at whatever address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                from.wrapping_add(line).cast(),
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, n);
}
