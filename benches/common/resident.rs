//! How much memory a call needs beyond what was there before it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Most bytes that a call had in memory beyond what was there before.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// All pages, by the kernel's high-water mark. Pages of a mapped file count, although they are the page cache's.
    pub resident: u64,
    /// Pages that no file is behind, looked at every half millisecond: a copy of a large state takes longer.
    pub anonymous: u64,
}

/// Runs `call`. `None` where the system has no `/proc` that tells.
pub fn peak_of(call: impl FnOnce()) -> Option<Peak> {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let sampler = scope.spawn(|| most_anonymous(&is_done));
        // The first sample has to be there before the call begins.
        thread::sleep(Duration::from_millis(5));
        let resident = most_resident(call);
        is_done.store(true, Ordering::Release);
        Some(Peak { resident: resident?, anonymous: sampler.join().ok()?? })
    })
}

fn most_resident(call: impl FnOnce()) -> Option<u64> {
    // "5" sets the mark back to what is resident now.
    std::fs::write("/proc/self/clear_refs", "5").ok()?;
    let before = status("VmRSS")?;
    call();
    Some(status("VmHWM")?.saturating_sub(before))
}

fn most_anonymous(is_done: &AtomicBool) -> Option<u64> {
    let before = status("RssAnon")?;
    let mut most = before;
    while !is_done.load(Ordering::Acquire) {
        most = most.max(status("RssAnon")?);
        thread::sleep(Duration::from_micros(500));
    }
    Some(most - before)
}

/// A field of `/proc/self/status` that is in kB, in bytes.
fn status(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
