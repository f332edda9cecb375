//! Whose state a slot file holds, compared before anything changes.

use super::geometry::{geometry_of, is_rotation};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{GgmlType, Identity, Integrity, SectionGeometry, Tag, TensorShape, printable};
use crate::memory::Convert;

/// Compares the identity of a file with that of its reader; says what could not be compared. The geometry is, where both the file
/// and the reader, which is a context then, have one: every state says most of it once more.
///
/// # Errors
/// [`Error::Mismatch`] for another model, salt or geometry.
pub(super) fn check(
    file: &Integrity,
    reader: &Identity,
    context: Option<&Context>,
    notes: &mut Vec<String>,
) -> Result<()> {
    let Identity { model, .. } = &file.identity;
    match (model.is_empty(), reader.model.is_empty()) {
        (false, false) => same("model", model, &reader.model, |model| printable(model), place)?,
        (true, false) => notes.push("the file names no model: not compared".to_owned()),
        (false, true) => notes.push("the file names a model, the caller none: not compared".to_owned()),
        (true, true) => {}
    }
    // It may be a secret, and is not shown.
    if file.identity.salt != reader.salt {
        let [state, cache] = [&file.identity, reader].map(Identity::salt_digest);
        return Err(Error::Mismatch { what: "salt", state, cache, place: place() });
    }
    match context {
        Some(context) if !file.geometry.is_empty() => check_geometry(&file.geometry, context),
        _ => Ok(()),
    }
}

/// The error of a file that names no model.
pub(super) fn no_model(reader: &Identity) -> Error {
    let state = "none, and it is required".to_owned();
    Error::Mismatch { what: "model", state, cache: printable(&reader.model), place: place() }
}

/// The place of a mismatch that is of no section.
fn place() -> String {
    "identity of the slot file".to_owned()
}

fn check_geometry(file: &[SectionGeometry], context: &Context) -> Result<()> {
    let cache = geometry_of(context);
    same("sections", &file.len(), &cache.len(), usize::to_string, place)?;
    for ((file, cache), of) in file.iter().zip(&cache).zip(context.memory.sections()) {
        check_section(file, cache, of.name(), context.convert)?;
    }
    Ok(())
}

/// What differs and is converted passes: the state says the same once more, and is asked more closely.
fn check_section(
    file: &SectionGeometry,
    cache: &SectionGeometry,
    name: &str,
    convert: Convert,
) -> Result<()> {
    let section = || format!("section {name}");
    same("kind of section", &file.kind, &cache.kind, |kind| SectionGeometry::kind_name(*kind), section)?;
    // One that is not named is 0.
    let value = |settings: &[(Tag, u32)], tag| {
        settings.iter().find(|(other, _)| *other == tag).map_or(0, |(_, value)| *value)
    };
    for &(tag, _) in cache.settings.iter().chain(&file.settings) {
        let (state, reader) = (value(&file.settings, tag), value(&cache.settings, tag));
        let takes = |convert: Convert| is_rotation(tag) && convert.takes_rotation(state, reader);
        if !takes(convert) {
            same("setting", &state, &reader, u32::to_string, || format!("section {name}, {tag}"))
                .map_err(|refused| convert.refusal(refused, takes))?;
        }
    }
    for (file, cache) in file.tensors.iter().zip(&cache.tensors) {
        let which = |tensor: &TensorShape| (tensor.tag, tensor.layer);
        same("tensor", &which(file), &which(cache), |(tag, il)| format!("{tag} of layer {il}"), section)?;
        let place = || format!("section {name}, {} of layer {}", cache.tag, cache.layer);
        let shape = |tensor: &TensorShape| (tensor.ggml_type, tensor.n_embd);
        let takes = |convert: Convert| {
            file.n_embd == cache.n_embd && convert.takes_type(file.ggml_type, cache.ggml_type)
        };
        if !takes(convert) {
            let show = |(ggml_type, n): &(GgmlType, u32)| format!("{} x {n}", ggml_type.name());
            same("shape", &shape(file), &shape(cache), show, place)
                .map_err(|refused| convert.refusal(refused, takes))?;
        }
    }
    same("number of tensors", &file.tensors.len(), &cache.tensors.len(), usize::to_string, section)
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
