//! What the memory of this machine gives to loops that do nothing but load, or load and store, whole cache lines.
#![allow(unsafe_code, reason = "a prefetch")]

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a line.
const LINE: usize = 64;

/// Bytes ahead that are fetched: without, a core waits at the beginning of every page.
const AHEAD: usize = 4096;

/// Loads every line of `bytes` on some threads.
pub fn load(bytes: &mut [u8], threads: usize) -> Duration {
    side_by_side(bytes, threads, |part| {
        let mut sum = [0_u64; LINE / 8];
        each_line(part, |line| {
            for (sum, word) in sum.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        });
        black_box(sum);
    })
}

/// Loads every line of `bytes` and stores a part of it, on some threads.
pub fn load_and_store(bytes: &mut [u8], threads: usize) -> Duration {
    side_by_side(bytes, threads, |part| each_line(part, |line| line[0] = line[0].wrapping_add(1)))
}

fn each_line(bytes: &mut [u8], mut call: impl FnMut(&mut [u8])) {
    for line in bytes.chunks_exact_mut(LINE) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 has SSE; a prefetch reads nothing, at whatever address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
        }
        call(line);
    }
}

fn side_by_side(bytes: &mut [u8], threads: usize, work: impl Fn(&mut [u8]) + Sync) -> Duration {
    let part = bytes.len().div_ceil(threads).next_multiple_of(LINE);
    let start = Instant::now();
    thread::scope(|scope| {
        for part in bytes.chunks_mut(part) {
            scope.spawn(|| work(part));
        }
    });
    start.elapsed()
}
