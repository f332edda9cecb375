//! Fingerprints of a model and its settings.

use std::ffi::c_char;

use super::handle::{array, array_mut, path, string};
use super::status::{kvs_status, status_of};
use crate::error::Result;
use crate::session::{FINGERPRINT_LEN, fingerprint};

/// Bytes of a fingerprint.
pub const KVS_FINGERPRINT_SIZE: usize = 32;

const _: () = assert!(KVS_FINGERPRINT_SIZE == FINGERPRINT_LEN);

/// A setting that states depend on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_setting {
    /// Its name, not empty.
    pub key: *const c_char,
    /// Its value.
    pub value: *const c_char,
}

/// The fingerprint of a model and its settings, for model in kvs_slot_identity: KVS_FINGERPRINT_SIZE bytes.
///
/// ggufs: the paths of the model's files, each file of one that is split, and of what else goes into its states, such as
/// adapters; their order counts. Of each the head is read, metadata and the names, types and shapes of tensors, not their data:
/// models that differ in nothing else need a setting that tells them apart. settings: in any order; a key that comes twice is
/// refused. Either may be empty. docs/format.md says how the fingerprint is computed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_fingerprint(
    ggufs: *const *const c_char,
    n_gguf: usize,
    settings: *const kvs_setting,
    n_setting: usize,
    fingerprint_out: *mut u8,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let ggufs = array("ggufs", ggufs, n_gguf)?;
        let ggufs = ggufs.iter().map(|gguf| path("ggufs", *gguf)).collect::<Result<Vec<_>>>()?;
        let settings = array("settings", settings, n_setting)?;
        let settings = settings
            .iter()
            .map(|setting| {
                Ok((string("key", setting.key)?.to_bytes(), string("value", setting.value)?.to_bytes()))
            })
            .collect::<Result<Vec<_>>>()?;
        let out = array_mut("fingerprint_out", fingerprint_out, KVS_FINGERPRINT_SIZE)?;
        out.copy_from_slice(&fingerprint(&ggufs, &settings)?);
        Ok(())
    })
}
