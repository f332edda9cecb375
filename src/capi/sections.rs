//! Sections of a memory as callers describe them.

use std::ptr;

use super::dsv4::{dsv4_section, kvs_dsv4_params};
use super::handle::{kvs_context, with_context};
use super::kv_params::{kv_section, kvs_kv_params};
use super::params::{self, Params};
use super::recurrent::{kvs_recurrent_params, recurrent_section};
use super::status::{kvs_status, status_of, value_or};
use crate::error::{Error, Result};
use crate::memory::{RopeParams, SectionKind, SectionParams, Streams};

/// An attention cache, described by kv.
pub const KVS_SECTION_KV: u32 = 1;
/// States of recurrent or linear-attention layers, described by recurrent.
pub const KVS_SECTION_RECURRENT: u32 = 2;
/// Layers of a draft that read the cells of the target's cache: the draft's states have nothing of them.
pub const KVS_SECTION_SHARED: u32 = 3;
/// The compressed half of a DSV4 memory, behind its raw pair of attention caches, described by dsv4.
pub const KVS_SECTION_DSV4: u32 = 4;

/// A section of the memory. Fill with kvs_section_params_init first, or use the inline kvs_kv_section and its like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_section_params {
    /// sizeof(kvs_section_params), set by the init call.
    pub struct_size: usize,
    /// KVS_SECTION_*, by default KVS_SECTION_KV.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// The attention cache; NULL in sections of another kind, as are the descriptions below.
    pub kv: *const kvs_kv_params,
    /// The recurrent states.
    pub recurrent: *const kvs_recurrent_params,
    /// The compressed half of a DSV4 memory.
    pub dsv4: *const kvs_dsv4_params,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_section_params {
    const NAME: &'static str = "kvs_section_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            kind: KVS_SECTION_KV,
            reserved: 0,
            kv: ptr::null(),
            recurrent: ptr::null(),
            dsv4: ptr::null(),
        }
    }
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_section_params_init(
    params: *mut kvs_section_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// The kind of a section, KVS_SECTION_*; 0: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_section_kind(ctx: *const kvs_context, section: u32) -> u32 {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe {
        let kind = with_context(ctx, |context| context.section_kind(section as usize))?;
        Ok(match kind {
            SectionKind::Kv => KVS_SECTION_KV,
            SectionKind::Recurrent => KVS_SECTION_RECURRENT,
            SectionKind::Shared => KVS_SECTION_SHARED,
            SectionKind::Dsv4 => KVS_SECTION_DSV4,
        })
    })
}

/// The section, and RoPE of its layers where K is turned.
pub(super) unsafe fn section_params(
    i: usize,
    section: &kvs_section_params,
    streams: Streams,
) -> Result<(SectionParams, Vec<Option<RopeParams>>)> {
    let name = format!("sections[{i}]");
    check(&name, section)?;
    // SAFETY: the header demands valid structs, and memory of the sizes described.
    unsafe {
        Ok(match section.kind {
            KVS_SECTION_KV => return kv_section(&name, &params::read(section.kv)?, streams.n_stream),
            KVS_SECTION_RECURRENT => {
                let params = params::read(section.recurrent)?;
                (recurrent_section(&name, &params, streams.n_seq_max)?, Vec::new())
            }
            KVS_SECTION_SHARED => (SectionParams::Shared, Vec::new()),
            KVS_SECTION_DSV4 => (dsv4_section(&name, &params::read(section.dsv4)?, streams)?, Vec::new()),
            kind => return Err(Error::arg(name + ".kind", format!("{kind} is no KVS_SECTION_*"))),
        })
    }
}

/// Refuses a description that is missing, and one that would have no effect.
fn check(name: &str, section: &kvs_section_params) -> Result<()> {
    let bad = |field: &str, reason: String| Err(Error::arg(format!("{name}.{field}"), reason));
    if section.reserved != 0 {
        return bad("reserved", format!("{}, only 0 has a meaning", section.reserved));
    }
    let descriptions = [
        ("kv", KVS_SECTION_KV, section.kv.is_null()),
        ("recurrent", KVS_SECTION_RECURRENT, section.recurrent.is_null()),
        ("dsv4", KVS_SECTION_DSV4, section.dsv4.is_null()),
    ];
    for (field, kind, is_null) in descriptions {
        if kind == section.kind && is_null {
            return bad(field, format!("NULL, in a section of kind {kind}"));
        }
        if kind != section.kind && !is_null {
            return bad(field, format!("given, in a section of kind {}", section.kind));
        }
    }
    Ok(())
}
