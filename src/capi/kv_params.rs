//! Attention caches as callers describe them: layers, types, windows, RoPE, and memory of the caller.

use std::ffi::{c_char, c_void};
use std::ptr;

use super::KVS_DEVICE_HOST;
use super::handle::array;
use super::params::{self, Params, flag};
use super::status::{kvs_status, status_of};
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::{
    KvMemory, KvParams, KvPlanes, LayerParams, RopeParams, SectionParams, TensorParams, swa_kv_size,
};
use crate::storage::{Plane, PlaneShape};
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
    /// The index of the section whose cells this one takes: an indexer has those of its attention cache, which comes before it
    /// and has the same kv_size, window and ext. -1 (by default): it has cells of its own.
    pub mirrors: i32,
    /// 0.
    pub reserved: u32,
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
            mirrors: -1,
            reserved: 0,
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

/// The attention cache `section`, and RoPE of its layers.
pub(super) unsafe fn kv_section(
    section: &str,
    params: &kvs_kv_params,
    n_stream: u32,
) -> Result<(SectionParams, Vec<Option<RopeParams>>)> {
    // SAFETY: the header demands a valid array.
    let layers = unsafe { params::read_array("layers", params.layers, params.n_layer as usize) }?;
    let name = |field: &str| format!("{section}.{field}");
    let swa_type = SwaType::from_u32(params.swa_type)
        .ok_or_else(|| Error::arg(name("swa_type"), format!("{} is no KVS_SWA_TYPE_*", params.swa_type)))?;
    let swa = Swa::new(swa_type, params.n_swa)
        .ok_or_else(|| Error::arg(name("n_swa"), "0, a window has at least 1 position"))?;
    let kv = KvParams {
        kv_size: params.kv_size,
        layers: layers
            .iter()
            .enumerate()
            .map(|(il, layer)| layer_params(&format!("{section}.layers[{il}]"), layer))
            .collect::<Result<_>>()?,
        swa,
        v_trans: flag(&name("v_trans"), params.v_trans)?,
        n_rot_k: params.n_rot_k,
        n_rot_v: params.n_rot_v,
        n_embd_head_k: params.n_embd_head_k,
        n_embd_head_v: params.n_embd_head_v,
        cell_ext: flag(&name("cell_ext"), params.cell_ext)?,
        mirrors: match params.mirrors {
            -1 => None,
            section => Some(usize::try_from(section).map_err(|_| {
                Error::arg(name("mirrors"), format!("{section}, it is -1 or the index of a section"))
            })?),
        },
    };
    if params.reserved != 0 {
        return Err(Error::arg(name("reserved"), format!("{}, it is 0", params.reserved)));
    }
    // SAFETY: the header demands memory of the sizes described, which outlives the context.
    let memory = unsafe { memory_of(section, &kv, &layers, n_stream) }?;
    let rope = layers.iter().enumerate().map(|(il, layer)| {
        // SAFETY: the header demands valid pointers, or NULL.
        unsafe { rope_params(&format!("{section}.layers[{il}].rope"), layer) }
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
    let tensor = |field: &str, number: i32, n_embd: u32| {
        Ok(TensorParams { ggml_type: ggml_type(&format!("{name}.{field}"), number)?, n_embd })
    };
    let k = tensor("type_k", layer.type_k, layer.n_embd_k_gqa)?;
    let v = match layer.n_embd_v_gqa {
        0 => None,
        n_embd => Some(tensor("type_v", layer.type_v, n_embd)?),
    };
    Ok(LayerParams { k, v })
}

/// The type of a number of ggml's.
pub(super) fn ggml_type(name: &str, number: i32) -> Result<GgmlType> {
    GgmlType::from_i32(number).ok_or_else(|| Error::arg(name, format!("{number} is no ggml type")))
}

/// Refuses what would have no effect: whoever sets it expects one.
fn check_layout(name: &str, layer: LayerParams, raw: &kvs_kv_layer_params, v_trans: bool) -> Result<()> {
    let bad = |field: &str, reason: &str| Err(Error::arg(format!("{name}.{field}"), reason));
    if raw.reserved != 0 {
        return bad("reserved", &format!("{}, it is 0", raw.reserved));
    }
    device(&format!("{name}.device"), raw.device)?;
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

/// The number of a device; `None`: host memory.
pub(super) fn device(name: &str, number: i32) -> Result<Option<i32>> {
    match number {
        KVS_DEVICE_HOST => Ok(None),
        0.. => Ok(Some(number)),
        _ => Err(Error::arg(name, format!("{number}, it is KVS_DEVICE_HOST or the number of a device"))),
    }
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
        let devices = layers.iter().map(|layer| device(name, layer.device));
        return Ok(KvMemory::Devices(devices.collect::<Result<_>>()?));
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

/// Memory of the caller as the plane of a stream.
pub(super) unsafe fn adopt(
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
