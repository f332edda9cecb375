//! Creating and freeing contexts.

use std::ffi::{c_char, c_void};
use std::ptr;

use super::handle::{
    array, free_handle, into_handle, kvs_context, out, string, with_context, with_context_mut,
};
use super::params::{self, Params};
use super::status::{kvs_status, status_of, value_or};
use super::transfer_params::UserData;
use super::{KVS_DEVICE_HOST, kvs_pos};
use crate::context::{Context, ContextParams, PendingShift, Shift};
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::{
    KvMemory, KvParams, KvPlanes, LayerParams, LegacyRotation, RopeParams, SectionParams, Streams,
    TensorParams, swa_kv_size,
};
use crate::storage::{Plane, PlaneShape, StagingParams, Threads};
use crate::types::{RopeType, Swa, SwaType};

/// Type numbers of ggml that K and V may have; any other number of ggml's is accepted for its size.
pub const KVS_TYPE_F32: i32 = 0;
/// 16-bit floats.
pub const KVS_TYPE_F16: i32 = 1;
/// 4 bits, blocks of 32 with a scale.
pub const KVS_TYPE_Q4_0: i32 = 2;
/// 4 bits, blocks of 32 with a scale and a minimum.
pub const KVS_TYPE_Q4_1: i32 = 3;
/// 5 bits, blocks of 32 with a scale.
pub const KVS_TYPE_Q5_0: i32 = 6;
/// 5 bits, blocks of 32 with a scale and a minimum.
pub const KVS_TYPE_Q5_1: i32 = 7;
/// 8 bits, blocks of 32 with a scale.
pub const KVS_TYPE_Q8_0: i32 = 8;
/// 4 bits, non-linear, blocks of 32.
pub const KVS_TYPE_IQ4_NL: i32 = 20;
/// bfloat16.
pub const KVS_TYPE_BF16: i32 = 30;

/// Full attention.
pub const KVS_SWA_TYPE_NONE: u32 = 0;
/// A position sees the n_swa latest ones, itself included.
pub const KVS_SWA_TYPE_STANDARD: u32 = 1;
/// A position sees its own chunk of n_swa positions.
pub const KVS_SWA_TYPE_CHUNKED: u32 = 2;
/// A position sees n_swa / 2 positions to either side.
pub const KVS_SWA_TYPE_SYMMETRIC: u32 = 3;

/// A section of the memory: an attention cache, described by kv.
pub const KVS_SECTION_KV: u32 = 1;

/// Nothing is said: files older than version 4 that may be rotated are refused.
pub const KVS_LEGACY_ROTATION_UNSTATED: u32 = 0;
/// Files older than version 4 were made with the rotation that llama.cpp applies to quantised caches.
pub const KVS_LEGACY_ROTATION_ROTATED: u32 = 1;
/// Files older than version 4 were made without rotation.
pub const KVS_LEGACY_ROTATION_PLAIN: u32 = 2;

/// RoPE turns neighbouring elements of a head: 2 * i and 2 * i + 1. The number is llama.h's.
pub const KVS_ROPE_TYPE_NORM: u32 = 0;
/// RoPE turns elements of two halves of a head: i and i + n_rope_dims / 2.
pub const KVS_ROPE_TYPE_NEOX: u32 = 2;

/// RoPE of a layer, as the model applies it to K. Fill with kvs_rope_params_init first.
///
/// There is no attn_factor: K was scaled when it was computed, and a shift only turns it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_rope_params {
    /// sizeof(kvs_rope_params), set by the init call.
    pub struct_size: usize,
    /// KVS_ROPE_TYPE_*, by default NORM. Models whose positions have several parts (M-RoPE) cannot be shifted.
    pub rope_type: u32,
    /// Elements of a head of K.
    pub n_embd_head: u32,
    /// Elements of a head that are turned; 0: all behind n_embd_nope.
    pub n_rope_dims: u32,
    /// Elements of a head before those that are turned (MLA caches that begin with the latent part).
    pub n_embd_nope: u32,
    /// Base of the frequencies, of this layer (local layers can have one of their own); by default 10000.
    pub freq_base: f32,
    /// What positions are multiplied with, of this layer; by default 1.
    pub freq_scale: f32,
    /// By what each pair's frequency is divided, n_rope_dims / 2 factors; NULL: none.
    pub freq_factors: *const f32,
    /// Share of YaRN's extrapolation; by default 0, and the fields below are not looked at.
    pub ext_factor: f32,
    /// YaRN: pairs that turn more often than this in the original context are extrapolated; by default 32.
    pub beta_fast: f32,
    /// YaRN: pairs that turn less often than this in the original context are scaled; by default 1.
    pub beta_slow: f32,
    /// YaRN: the context of the training.
    pub n_ctx_orig: u32,
}

/// One layer of an attention cache. Fill with kvs_kv_layer_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_kv_layer_params {
    /// sizeof(kvs_kv_layer_params), set by the init call.
    pub struct_size: usize,
    /// ggml type of K; by default f16.
    pub type_k: i32,
    /// ggml type of V; by default f16.
    pub type_v: i32,
    /// Elements of one cell of K, all heads together.
    pub n_embd_k_gqa: u32,
    /// Elements of one cell of V; 0: the layer has no V (MLA).
    pub n_embd_v_gqa: u32,
    /// Memory of the caller for K (adopted), first cell of stream 0; NULL: kvstate allocates (managed). Either
    /// all layers of a context's section are adopted or none. It must outlive the context. Elements of two tensors must not
    /// overlap, which nobody checks.
    pub k: *mut c_void,
    /// Memory of the caller for V.
    pub v: *mut c_void,
    /// Bytes from one cell of K to the next; 0: the size of a row. Strides are for adopted memory only.
    pub k_cell_stride: u64,
    /// Bytes from one stream of K to the next; 0: kv_size cells. Streams may not interleave.
    pub k_stream_stride: u64,
    /// Bytes from one cell of V to the next; 0: the size of a row, or of an element if V is transposed.
    pub v_cell_stride: u64,
    /// Bytes from one channel of transposed V to the next; 0: kv_size elements.
    pub v_channel_stride: u64,
    /// Bytes from one stream of V to the next; 0: all of one stream's V.
    pub v_stream_stride: u64,
    /// KVS_DEVICE_HOST (by default), or the number of a CUDA device, whose memory kvstate allocates. Adopted memory: any number
    /// of a device says that k and v are addresses of devices; the driver says of which, and they may be of two.
    pub device: i32,
    /// 0.
    pub reserved: u32,
    /// How kvstate rotates K after kvs_memory_seq_add and seq_div. NULL in all layers of a context: it does not;
    /// NULL in some: K of these does not depend on the position.
    pub rope: *const kvs_rope_params,
}

/// An attention cache. Fill with kvs_kv_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_kv_params {
    /// sizeof(kvs_kv_params), set by the init call.
    pub struct_size: usize,
    /// Cells of each stream.
    pub kv_size: u32,
    /// Number of layers.
    pub n_layer: u32,
    /// The layers, in the order of the model.
    pub layers: *const kvs_kv_layer_params,
    /// KVS_SWA_TYPE_*, by default none. The rule of a partial state looks at this, never at the model.
    pub swa_type: u32,
    /// Size of the window in positions.
    pub n_swa: u32,
    /// 1: V is transposed, channel by channel (flash attention off).
    pub v_trans: u32,
    /// 1: cells carry an ext, x, y and token (n_pos_per_embd > 1, or n-gram embeddings).
    pub cell_ext: u32,
    /// Size of the Hadamard rotation applied to K, as llama.cpp does for quantised caches; 0: none.
    pub n_rot_k: u32,
    /// Size of the Hadamard rotation applied to V; 0: none.
    pub n_rot_v: u32,
    /// Elements of one head of K, 0: unknown. Only files older than version 4 need it.
    pub n_embd_head_k: u32,
    /// Elements of one head of V, 0: unknown.
    pub n_embd_head_v: u32,
}

/// A section of the memory. Fill with kvs_section_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_section_params {
    /// sizeof(kvs_section_params), set by the init call.
    pub struct_size: usize,
    /// KVS_SECTION_KV.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
    /// The attention cache.
    pub kv: *const kvs_kv_params,
}

/// Rotates the K rows of n cells of a stream of a section, in every layer: each cell of the array cells by the
/// number of positions at the same index of shifts, forward (negative: back; never 0). Returns 0 if it did.
/// Called from calls that write a state, before K is read; it must not call the library with the same context.
pub type kvs_shift_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        section: u32,
        stream: u32,
        cells: *const u32,
        shifts: *const kvs_pos,
        n: usize,
    ) -> i32,
>;

/// A context. Fill with kvs_context_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_context_params {
    /// sizeof(kvs_context_params), set by the init call.
    pub struct_size: usize,
    /// Sequences, 1 to 256; by default 1.
    pub n_seq_max: u32,
    /// 1 (by default): all sequences share one stream of kv_size cells; 0: each has a stream of kv_size cells.
    pub unified: u32,
    /// The sections in write order: one attention cache, or full attention and then SWA (iSWA). The order is that
    /// of the states that are to be read.
    pub sections: *const kvs_section_params,
    /// Number of sections.
    pub n_section: u32,
    /// KVS_LEGACY_ROTATION_*.
    pub legacy_rotation: u32,
    /// Architecture name, in whole-context states; NULL: empty.
    pub arch: *const c_char,
    /// Rotates K after kvs_memory_seq_add and seq_div, where no layer has rope; NULL: nobody does.
    pub shift: kvs_shift_callback,
    /// For shift.
    pub shift_user_data: *mut c_void,
    /// 1, with shift NULL and no rope: the engine promises to rotate what kvs_shift_get lists and to call kvs_shift_done
    /// before the next decode or save. A save with shifts pending fails; a decode is not checked.
    pub shift_by_engine: u32,
    /// Most masked cells beyond the window that a state with KVS_STATE_SEQ_FLAGS_NONE keeps of an SWA section.
    /// UINT32_MAX (by default): all, so that the restored sequence can be cut to any prefix.
    pub max_masked_cells: u32,
    /// 1: a saved file is renamed into place without waiting for the disk, as llama.cpp writes its own. It survives a
    /// crash of the process all the same; after one of the machine it may be damaged. By default 0.
    pub unsynced_files: u32,
    /// Pinned staging buffers between host and CUDA devices, 2 to 64; 0 (by default): 4.
    pub n_staging: u32,
    /// Bytes of one staging buffer; 0 (by default): 32 MiB. A buffer is no larger than the cache is on devices, and no smaller
    /// than a transposed channel or a row. There are 2 more of them on each device.
    ///
    /// They are allocated when the first state is moved, smaller if memory is short. Jobs that run side by side have a
    /// set each. Two sets for each device are kept for what comes next, until the context and its last snapshot and job are
    /// freed.
    pub staging_size: u64,
}

// SAFETY: repr(C), struct_size first, integers, floats and raw pointers only.
unsafe impl Params for kvs_rope_params {
    const NAME: &'static str = "kvs_rope_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        let rope = RopeParams::new(RopeType::Normal, 0);
        Self {
            struct_size: 0,
            rope_type: KVS_ROPE_TYPE_NORM,
            n_embd_head: 0,
            n_rope_dims: 0,
            n_embd_nope: 0,
            freq_base: rope.freq_base,
            freq_scale: rope.freq_scale,
            freq_factors: ptr::null(),
            ext_factor: rope.ext_factor,
            beta_fast: rope.beta_fast,
            beta_slow: rope.beta_slow,
            n_ctx_orig: rope.n_ctx_orig,
        }
    }
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_kv_layer_params {
    const NAME: &'static str = "kvs_kv_layer_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            type_k: KVS_TYPE_F16,
            type_v: KVS_TYPE_F16,
            n_embd_k_gqa: 0,
            n_embd_v_gqa: 0,
            k: ptr::null_mut(),
            v: ptr::null_mut(),
            k_cell_stride: 0,
            k_stream_stride: 0,
            v_cell_stride: 0,
            v_channel_stride: 0,
            v_stream_stride: 0,
            device: KVS_DEVICE_HOST,
            reserved: 0,
            rope: ptr::null(),
        }
    }
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_kv_params {
    const NAME: &'static str = "kvs_kv_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            kv_size: 0,
            n_layer: 0,
            layers: ptr::null(),
            swa_type: KVS_SWA_TYPE_NONE,
            n_swa: 0,
            v_trans: 0,
            cell_ext: 0,
            n_rot_k: 0,
            n_rot_v: 0,
            n_embd_head_k: 0,
            n_embd_head_v: 0,
        }
    }
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_section_params {
    const NAME: &'static str = "kvs_section_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self { struct_size: 0, kind: KVS_SECTION_KV, reserved: 0, kv: ptr::null() }
    }
}

// SAFETY: repr(C), struct_size first, integers, raw pointers and a nullable function pointer only.
unsafe impl Params for kvs_context_params {
    const NAME: &'static str = "kvs_context_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            n_seq_max: 1,
            unified: 1,
            sections: ptr::null(),
            n_section: 0,
            legacy_rotation: KVS_LEGACY_ROTATION_UNSTATED,
            arch: ptr::null(),
            shift: None,
            shift_user_data: ptr::null_mut(),
            shift_by_engine: 0,
            max_masked_cells: u32::MAX,
            unsynced_files: 0,
            n_staging: 0,
            staging_size: 0,
        }
    }
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_rope_params_init(
    params: *mut kvs_rope_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_layer_params_init(
    params: *mut kvs_kv_layer_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_params_init(params: *mut kvs_kv_params, struct_size: usize) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
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

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_context_params_init(
    params: *mut kvs_context_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Creates a context; params and everything it points to (but not adopted memory) may go afterwards. *ctx_out
/// is written only on success. Free it with kvs_context_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_context_new(
    params: *const kvs_context_params,
    ctx_out: *mut *mut kvs_context,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let ctx_out = out("ctx_out", ctx_out)?;
        let context = Context::new(context_params(&params::read(params)?)?)?;
        *ctx_out = into_handle(context);
        Ok(())
    })
}

/// Frees a context and what it owns; adopted memory is the caller's. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_context_free(ctx: *mut kvs_context) {
    // SAFETY: the contract of all calls.
    value_or((), || unsafe { free_handle(ctx) });
}

/// Number of streams: 1, or one per sequence. Sequence s is in stream 0, or in stream s. 0: failed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_n_stream(ctx: *const kvs_context) -> u32 {
    // SAFETY: the contract of all calls.
    value_or(0, || unsafe { with_context(ctx, |context| Ok(context.n_stream())) })
}

/// States what files older than version 4 leave open: KVS_LEGACY_ROTATION_*.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_set_legacy_rotation(ctx: *mut kvs_context, rotation: u32) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let rotation = legacy_rotation(rotation)?;
        with_context_mut(ctx, |context| {
            context.set_legacy_rotation(rotation);
            Ok(())
        })
    })
}

/// Cells of an SWA section as llama.cpp sizes it: the windows of the sequences of one stream and a ubatch, at
/// most kv_size, padded to 256.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_swa_kv_size(
    kv_size: u32,
    n_swa: u32,
    n_seq_max: u32,
    n_ubatch: u32,
    unified: bool,
) -> u32 {
    swa_kv_size(kv_size, n_swa, n_seq_max, n_ubatch, unified)
}

/// Bytes of n elements of a ggml type; 0: no such type, or no whole number of its blocks.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_row_size(ggml_type: i32, n: u32) -> u64 {
    GgmlType::from_i32(ggml_type).and_then(|ggml_type| ggml_type.row_size(n)).unwrap_or(0)
}

/// Name of a ggml type, as ggml has it ("f16", "q8_0"); NULL: no such type.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_type_name(ggml_type: i32) -> *const c_char {
    GgmlType::from_i32(ggml_type).map_or(ptr::null(), |ggml_type| ggml_type.c_name().as_ptr())
}

/// Version of the library: major * 10000 + minor * 100 + patch.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_version() -> u32 {
    let part = |text: &str| text.parse().unwrap_or(0);
    part(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + part(env!("CARGO_PKG_VERSION_PATCH"))
}

pub(super) fn flag(name: &str, value: u32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::arg(name, format!("{value}, it is 0 or 1"))),
    }
}

pub(super) fn legacy_rotation(value: u32) -> Result<Option<LegacyRotation>> {
    match value {
        KVS_LEGACY_ROTATION_UNSTATED => Ok(None),
        KVS_LEGACY_ROTATION_ROTATED => Ok(Some(LegacyRotation::Rotated)),
        KVS_LEGACY_ROTATION_PLAIN => Ok(Some(LegacyRotation::Plain)),
        _ => Err(Error::arg("legacy_rotation", format!("{value} is no KVS_LEGACY_ROTATION_*"))),
    }
}

unsafe fn context_params(params: &kvs_context_params) -> Result<ContextParams> {
    let unified = flag("unified", params.unified)?;
    let n_stream = Streams::new(params.n_seq_max, unified)?.n_stream;
    // SAFETY: the header demands an array of n_section structs.
    let sections = unsafe { params::read_array("sections", params.sections, params.n_section as usize) }?;
    let sections = sections.iter().enumerate();
    // SAFETY: the header demands valid pointers in it.
    let sections = sections.map(|(i, section)| unsafe { section_params(i, section, n_stream) });
    let (sections, rope): (_, Vec<_>) = sections.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let arch = if params.arch.is_null() {
        String::new()
    } else {
        // SAFETY: the header demands a string.
        let arch = unsafe { string("arch", params.arch) }?;
        arch.to_str().map_err(|_| Error::arg("arch", "not UTF-8"))?.to_owned()
    };
    Ok(ContextParams {
        threads: Threads::default(),
        progress: None,
        staging: StagingParams { size: params.staging_size, count: params.n_staging as usize },
        n_seq_max: params.n_seq_max,
        unified,
        arch,
        sections,
        shift: shift(params, rope)?,
        legacy_rotation: legacy_rotation(params.legacy_rotation)?,
        max_masked_cells: (params.max_masked_cells != u32::MAX).then_some(params.max_masked_cells),
        sync_files: !flag("unsynced_files", params.unsynced_files)?,
    })
}

fn shift(params: &kvs_context_params, rope: Vec<Vec<Option<RopeParams>>>) -> Result<Shift> {
    let by_engine = flag("shift_by_engine", params.shift_by_engine)?;
    if rope.iter().flatten().any(Option::is_some) {
        if params.shift.is_some() || by_engine {
            let name = if by_engine { "shift_by_engine" } else { "shift" };
            return Err(Error::arg(name, "given beside rope of layers: one of them rotates K"));
        }
        return Ok(Shift::Rope(rope));
    }
    let Some(callback) = params.shift else {
        return Ok(if by_engine { Shift::Engine } else { Shift::None });
    };
    if by_engine {
        return Err(Error::arg("shift_by_engine", "1 beside a shift callback: one of them rotates K"));
    }
    let user_data = UserData(params.shift_user_data);
    Ok(Shift::Callback(Box::new(move |pending: PendingShift<'_>| {
        let PendingShift { section, stream, cells, shifts } = pending;
        // SAFETY: the caller of kvs_context_new vouches for the callback; the arrays are `n` long.
        let code = unsafe {
            callback(
                user_data.get(),
                u32::try_from(section).unwrap_or(u32::MAX),
                u32::try_from(stream).unwrap_or(u32::MAX),
                cells.as_ptr(),
                shifts.as_ptr(),
                cells.len(),
            )
        };
        if code == 0 { Ok(()) } else { Err(format!("the shift callback returned {code}")) }
    })))
}

/// The section, and RoPE of its layers.
unsafe fn section_params(
    i: usize,
    section: &kvs_section_params,
    n_stream: u32,
) -> Result<(SectionParams, Vec<Option<RopeParams>>)> {
    if section.kind != KVS_SECTION_KV {
        let reason = format!("{} is no KVS_SECTION_*", section.kind);
        return Err(Error::arg(format!("sections[{i}].kind"), reason));
    }
    if section.reserved != 0 {
        let reason = format!("{}, only 0 has a meaning", section.reserved);
        return Err(Error::arg(format!("sections[{i}].reserved"), reason));
    }
    // SAFETY: the header demands a valid struct and array.
    let (params, layers) = unsafe {
        let params = params::read(section.kv)?;
        (params, params::read_array("layers", params.layers, params.n_layer as usize)?)
    };
    let name = |field: &str| format!("sections[{i}].{field}");
    let swa_type = SwaType::from_u32(params.swa_type)
        .ok_or_else(|| Error::arg(name("swa_type"), format!("{} is no KVS_SWA_TYPE_*", params.swa_type)))?;
    let swa = Swa::new(swa_type, params.n_swa)
        .ok_or_else(|| Error::arg(name("n_swa"), "0, a window has at least 1 position"))?;
    let kv = KvParams {
        kv_size: params.kv_size,
        layers: layers
            .iter()
            .enumerate()
            .map(|(il, layer)| layer_params(&format!("sections[{i}].layers[{il}]"), layer))
            .collect::<Result<_>>()?,
        swa,
        v_trans: flag(&name("v_trans"), params.v_trans)?,
        n_rot_k: params.n_rot_k,
        n_rot_v: params.n_rot_v,
        n_embd_head_k: params.n_embd_head_k,
        n_embd_head_v: params.n_embd_head_v,
        cell_ext: flag(&name("cell_ext"), params.cell_ext)?,
        mirrors: None,
    };
    // SAFETY: the header demands memory of the sizes described, which outlives the context.
    let memory = unsafe { memory_of(&format!("sections[{i}]"), &kv, &layers, n_stream) }?;
    let rope = layers.iter().enumerate().map(|(il, layer)| {
        // SAFETY: the header demands valid pointers, or NULL.
        unsafe { rope_params(&format!("sections[{i}].layers[{il}].rope"), layer) }
    });
    Ok((SectionParams::Kv { kv, memory }, rope.collect::<Result<_>>()?))
}

unsafe fn rope_params(name: &str, layer: &kvs_kv_layer_params) -> Result<Option<RopeParams>> {
    let rope = layer.rope;
    if rope.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on.
    let raw = unsafe { params::read(rope) }?;
    let rope_type = match raw.rope_type {
        KVS_ROPE_TYPE_NORM => RopeType::Normal,
        KVS_ROPE_TYPE_NEOX => RopeType::Neox,
        other => {
            return Err(Error::arg(format!("{name}.rope_type"), format!("{other} is no KVS_ROPE_TYPE_*")));
        }
    };
    let n_rope_dims = match raw.n_rope_dims {
        0 => raw.n_embd_head.saturating_sub(raw.n_embd_nope),
        n_rope_dims => n_rope_dims,
    };
    // What is too many for the row is refused later, and not read.
    let freq_factors = if raw.freq_factors.is_null() || n_rope_dims > layer.n_embd_k_gqa {
        Vec::new()
    } else {
        // SAFETY: the header demands n_rope_dims / 2 factors.
        unsafe { array("freq_factors", raw.freq_factors, n_rope_dims as usize / 2) }?.to_vec()
    };
    Ok(Some(RopeParams {
        rope_type,
        n_embd_head: raw.n_embd_head,
        n_rope_dims,
        n_embd_nope: raw.n_embd_nope,
        freq_base: raw.freq_base,
        freq_scale: raw.freq_scale,
        freq_factors,
        ext_factor: raw.ext_factor,
        beta_fast: raw.beta_fast,
        beta_slow: raw.beta_slow,
        n_ctx_orig: raw.n_ctx_orig,
    }))
}

fn layer_params(name: &str, layer: &kvs_kv_layer_params) -> Result<LayerParams> {
    let ggml_type = |field: &str, number: i32| {
        GgmlType::from_i32(number)
            .ok_or_else(|| Error::arg(format!("{name}.{field}"), format!("{number} is no ggml type")))
    };
    let k = TensorParams { ggml_type: ggml_type("type_k", layer.type_k)?, n_embd: layer.n_embd_k_gqa };
    let v = match layer.n_embd_v_gqa {
        0 => None,
        n_embd => Some(TensorParams { ggml_type: ggml_type("type_v", layer.type_v)?, n_embd }),
    };
    Ok(LayerParams { k, v })
}

/// Refuses what would have no effect: whoever sets it expects one.
fn check_layout(name: &str, layer: LayerParams, raw: &kvs_kv_layer_params, v_trans: bool) -> Result<()> {
    let bad = |field: &str, reason: &str| Err(Error::arg(format!("{name}.{field}"), reason));
    if raw.reserved != 0 {
        return bad("reserved", &format!("{}, it is 0", raw.reserved));
    }
    if raw.device < KVS_DEVICE_HOST {
        return bad("device", &format!("{}, it is KVS_DEVICE_HOST or the number of a device", raw.device));
    }
    if raw.k.is_null() && (raw.k_cell_stride != 0 || raw.k_stream_stride != 0) {
        return bad("k", "NULL with strides, which only adopted memory has");
    }
    if raw.v.is_null() && (raw.v_cell_stride != 0 || raw.v_channel_stride != 0 || raw.v_stream_stride != 0) {
        return bad("v", "NULL with strides, which only adopted memory has");
    }
    if layer.v.is_none() && !raw.v.is_null() {
        return bad("v", "given, while n_embd_v_gqa is 0");
    }
    if !v_trans && raw.v_channel_stride != 0 {
        return bad("v_channel_stride", "given, while V is not transposed");
    }
    Ok(())
}

/// Where K and V are: on the devices named, or where the caller has them.
unsafe fn memory_of(
    name: &str,
    kv: &KvParams,
    layers: &[kvs_kv_layer_params],
    n_stream: u32,
) -> Result<KvMemory> {
    for (il, (layer, raw)) in kv.layers.iter().zip(layers).enumerate() {
        check_layout(&format!("{name}.layers[{il}]"), *layer, raw, kv.v_trans)?;
    }
    if layers.iter().all(|layer| layer.k.is_null() && layer.v.is_null()) {
        let devices = layers.iter().map(|layer| (layer.device != KVS_DEVICE_HOST).then_some(layer.device));
        return Ok(KvMemory::Devices(devices.collect()));
    }
    let mut planes = KvPlanes::default();
    for stream in 0..n_stream {
        for (il, (layer, raw)) in kv.layers.iter().zip(layers).enumerate() {
            let place = |field: &str| format!("{name}.layers[{il}].{field}");
            let or = |stride: u64, dense: u64| if stride == 0 { dense } else { stride };
            let row_size = |tensor: TensorParams, field: &str| {
                tensor.ggml_type.row_size(tensor.n_embd).filter(|&size| size > 0).ok_or_else(|| {
                    let reason =
                        format!("{} elements are no whole blocks of {}", tensor.n_embd, tensor.ggml_type);
                    Error::arg(place(field), reason)
                })
            };
            let size = row_size(layer.k, "n_embd_k_gqa")?;
            let shape = PlaneShape::Rows { row_size: size, cell_stride: or(raw.k_cell_stride, size) };
            // SAFETY: passed on.
            planes.k.push(unsafe {
                adopt(&place("k"), (raw.k, raw.device), raw.k_stream_stride, stream, kv.kv_size, shape)
            }?);
            let Some(v) = layer.v else {
                planes.v.push(None);
                continue;
            };
            let size = row_size(v, "n_embd_v_gqa")?;
            let shape = if kv.v_trans {
                let elem_size = v.ggml_type.type_size();
                let cell_stride = or(raw.v_cell_stride, u64::from(elem_size));
                let dense = cell_stride.saturating_mul(u64::from(kv.kv_size));
                let channel_stride = or(raw.v_channel_stride, dense);
                PlaneShape::Channels { n_channel: v.n_embd, elem_size, cell_stride, channel_stride }
            } else {
                PlaneShape::Rows { row_size: size, cell_stride: or(raw.v_cell_stride, size) }
            };
            // SAFETY: passed on.
            let v = unsafe {
                adopt(&place("v"), (raw.v, raw.device), raw.v_stream_stride, stream, kv.kv_size, shape)
            }?;
            planes.v.push(Some(v));
        }
    }
    Ok(KvMemory::Adopted(planes))
}

unsafe fn adopt(
    name: &str,
    (base, device): (*mut c_void, i32),
    stream_stride: u64,
    stream: u32,
    kv_size: u32,
    shape: PlaneShape,
) -> Result<Plane> {
    if base.is_null() {
        return Err(Error::arg(name, "NULL, while other layers of the section are adopted"));
    }
    shape.check(kv_size).map_err(|reason| Error::arg(name, reason))?;
    let span = shape.span(kv_size).unwrap_or(u64::MAX);
    let step = if stream_stride == 0 { span } else { stream_stride };
    if step < span {
        return Err(Error::arg(name, format!("a stream stride of {step} bytes for streams of {span}")));
    }
    let offset = step.checked_mul(u64::from(stream)).and_then(|offset| isize::try_from(offset).ok());
    let start = offset.and_then(|offset| base.addr().checked_add_signed(offset));
    let end = start.and_then(|start| start.checked_add(usize::try_from(span).ok()?));
    let (Some(offset), Some(_)) = (offset, end) else {
        return Err(Error::arg(name, "the address and the streams behind it do not fit in memory"));
    };
    // SAFETY: the header demands memory for all streams at `base`, so the offset stays inside it, and that it
    // is used by nobody else while a call that reads or writes K or V runs.
    unsafe {
        let start = base.cast::<u8>().wrapping_offset(offset);
        match device {
            KVS_DEVICE_HOST => Plane::adopt(start, kv_size, shape),
            _ => Plane::adopt_device(start.addr() as u64, kv_size, shape),
        }
    }
    .map_err(|error| match error {
        Error::InvalidArgument { reason, .. } => Error::arg(name, reason),
        other => other,
    })
}
