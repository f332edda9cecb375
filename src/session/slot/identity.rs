//! Whose state a slot file holds, compared before anything changes.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{GgmlType, Identity, Integrity, LayerGeometry, SectionGeometry};

/// What the states of a context depend on.
pub(super) fn geometry_of(context: &Context) -> Vec<SectionGeometry> {
    let sections = context.memory.kv_caches().map(|kv| {
        let geometry = &kv.geometry;
        let layers = geometry.k.iter().zip(&geometry.v).map(|(k, v)| LayerGeometry {
            k: (k.ggml_type, k.n_embd),
            v: v.map(|v| (v.ggml_type, v.n_embd)),
        });
        SectionGeometry {
            v_trans: geometry.v_trans,
            n_rot_k: geometry.n_rot_k,
            n_rot_v: geometry.n_rot_v,
            layers: layers.collect(),
        }
    });
    sections.collect()
}

/// Compares the identity of a file with that of its reader; says what could not be compared.
///
/// # Errors
/// [`Error::Mismatch`] for another model, salt or geometry.
pub(super) fn check(
    file: &Integrity,
    reader: &Identity,
    context: &Context,
    notes: &mut Vec<String>,
) -> Result<()> {
    let Identity { model, salt, .. } = &file.identity;
    match (model.is_empty(), reader.model.is_empty()) {
        (false, false) => same("model", model, &reader.model, |model| printable(model), place)?,
        (true, false) => notes.push("the file names no model: not compared".to_owned()),
        (false, true) => notes.push("the file names a model, the caller none: not compared".to_owned()),
        (true, true) => {}
    }
    // It may be a secret, and is not shown.
    same("salt", salt, &reader.salt, |salt| digest(salt), place)?;
    check_geometry(&file.geometry, context)
}

/// The place of a mismatch that is of no section.
fn place() -> String {
    "identity of the slot file".to_owned()
}

fn check_geometry(file: &[SectionGeometry], context: &Context) -> Result<()> {
    let cache = geometry_of(context);
    same("sections", &file.len(), &cache.len(), usize::to_string, place)?;
    for ((file, cache), kv) in file.iter().zip(&cache).zip(context.memory.kv_caches()) {
        let section = || format!("section {}", kv.geometry.name);
        same("v_trans", &file.v_trans, &cache.v_trans, |v_trans| u32::from(*v_trans).to_string(), section)?;
        same("n_rot_k", &file.n_rot_k, &cache.n_rot_k, u32::to_string, section)?;
        same("n_rot_v", &file.n_rot_v, &cache.n_rot_v, u32::to_string, section)?;
        same("layers", &file.layers.len(), &cache.layers.len(), usize::to_string, section)?;
        for (il, (file, cache)) in file.layers.iter().zip(&cache.layers).enumerate() {
            let layer = || format!("{}, layer {il}", section());
            let tensor = |(ggml_type, n_embd): &(GgmlType, u32)| format!("{} x {n_embd}", ggml_type.name());
            same("K", &file.k, &cache.k, tensor, layer)?;
            same("V", &file.v, &cache.v, |v| v.as_ref().map_or_else(|| "none".to_owned(), tensor), layer)?;
        }
    }
    Ok(())
}

fn same<T: PartialEq>(
    what: &'static str,
    state: &T,
    reader: &T,
    show: impl Fn(&T) -> String,
    place: impl Fn() -> String,
) -> Result<()> {
    if state == reader {
        return Ok(());
    }
    Err(Error::Mismatch { what, state: show(state), cache: show(reader), place: place() })
}

/// The beginning of a fingerprint, as it stands or in hexadecimal.
fn printable(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(64)];
    if start.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return format!("'{}'", start.escape_ascii());
    }
    start.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// Tells salts apart without showing them.
fn digest(salt: &[u8]) -> String {
    if salt.is_empty() {
        return "none".to_owned();
    }
    format!("{} bytes of crc32c {:08x}", salt.len(), crc32c::crc32c(salt))
}
