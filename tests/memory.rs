//! No call holds a second copy of the state. A process of its own: the kernel counts memory by process.
#![cfg(target_os = "linux")] // the figures are those of Linux' /proc
#![allow(missing_docs, reason = "a test")]

#[path = "../benches/common/mod.rs"]
mod common;

use common::resident::{Peak, peak_of};
use common::{Case, Layout, rows};
use kvstate::format::GgmlType;

const STATE: u64 = 128 << 20;
/// Metadata and fixed buffers.
const ALLOWED: u64 = 8 << 20;

#[test]
fn save_and_restore_in_memory_and_in_files_hold_no_second_copy_of_the_state() {
    // 4 layers of 8 heads of 128: 16 KiB a token.
    let owners = Layout::EveryOther.owners(8192);
    let mut case = Case::new(common::fitting(rows(4, GgmlType::F16, 1024), &owners), &owners, 2);
    assert!(case.state.len() as u64 > STATE);

    let mut peak = |name: &str, call: fn(&mut Case) -> std::time::Duration| -> Peak {
        let peak = peak_of(|| {
            call(&mut case);
        })
        .expect("/proc");
        println!("{name}: {} KiB, {} KiB of them anonymous", peak.resident >> 10, peak.anonymous >> 10);
        peak
    };
    let get_data = peak("get_data", Case::get_data_alone);
    let set_data = peak("set_data", Case::set_data_alone);
    let save_file = peak("save_file", Case::save_file_alone);
    let load_file = peak("load_file", Case::load_file_alone);
    let slot_save = peak("slot_save", Case::slot_save_alone);
    let slot_load = peak("slot_load", Case::slot_load_alone);

    for (name, Peak { resident, .. }) in [
        ("get_data", get_data),
        ("set_data", set_data),
        ("save_file", save_file),
        ("load_file", load_file),
        ("slot_save", slot_save),
        ("slot_load", slot_load),
    ] {
        assert!(resident < ALLOWED, "{name}: {resident} bytes more than before, {ALLOWED} are allowed");
    }
}
