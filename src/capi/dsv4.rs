//! The compressed half of DSV4 memories: how it is described, and where an engine reads and writes it.

use std::ffi::c_void;
use std::ptr;

use super::engine::{kvs_plane, plane_or_none};
use super::handle::{array, host_bytes, host_bytes_mut, kvs_context, out, with_context, with_context_mut};
use super::kv_params::{KVS_TYPE_F16, adopt, device, ggml_type};
use super::params::{self, Params};
use super::status::{kvs_status, status_of};
use super::{KVS_DEVICE_HOST, kvs_seq_id};
use crate::error::{Error, Result};
use crate::format::GgmlType;
use crate::memory::{
    Dsv4Compressor, Dsv4CompressorParams, Dsv4Memory, Dsv4Params, Dsv4Planes, Dsv4Tensor, SectionParams,
    Streams, TensorParams, n_state_planes,
};
use crate::storage::{Plane, PlaneShape};

/// A compressor of DSV4 attention: K with a row for every ratio positions, and the state in which the next row grows. Fill with
/// kvs_dsv4_compressor_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_dsv4_compressor_params {
    /// sizeof(kvs_dsv4_compressor_params), set by the init call.
    pub struct_size: usize,
    /// Positions of a row.
    pub ratio: u32,
    /// Rows of K in each stream.
    pub kv_size: u32,
    /// Numbers of the model's layers that have it, ascending.
    pub layers: *const u32,
    /// How many they are.
    pub n_layer: u32,
    /// ggml type of K; by default f16.
    pub type_k: i32,
    /// Elements of a row of K.
    pub n_embd_k: u32,
    /// Rows of a state.
    pub state_size: u32,
    /// Elements of a row of a state, which is f32.
    pub n_embd_state: u32,
    /// 0.
    pub reserved: u32,
    /// Memory of the caller for K (adopted), zeroed: an address for each layer in layers, of kv_size rows for each stream, one
    /// behind the other. NULL: kvstate allocates (managed). Either all tensors of a section are adopted or none. They must
    /// outlive the context.
    pub k: *const *mut c_void,
    /// The same for a state's sums of values: state_size rows for each stream, and as many again for each rollback plane.
    pub kv: *const *mut c_void,
    /// The same for a state's sums of scores.
    pub score: *const *mut c_void,
}

/// The compressed half of a DSV4 memory. Everything is one stream per sequence (unified 0). Fill with
/// kvs_dsv4_params_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_dsv4_params {
    /// sizeof(kvs_dsv4_params), set by the init call.
    pub struct_size: usize,
    /// Compressed sparse attention.
    pub csa: *const kvs_dsv4_compressor_params,
    /// Heavily compressed attention.
    pub hca: *const kvs_dsv4_compressor_params,
    /// The lightning indexer.
    pub lid: *const kvs_dsv4_compressor_params,
    /// The device of each layer of the model, KVS_DEVICE_HOST or the number of a CUDA device; NULL (by default): host memory.
    /// Adopted memory: any number of a device says that the layer's addresses are of a device, and the driver says of which.
    pub devices: *const i32,
    /// How many they are.
    pub n_device: u32,
    /// Rollback planes: positions by which the end of a sequence can be cut off after a ubatch. By default 0.
    pub n_rs_seq: u32,
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_dsv4_compressor_params {
    const NAME: &'static str = "kvs_dsv4_compressor_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            ratio: 0,
            kv_size: 0,
            layers: ptr::null(),
            n_layer: 0,
            type_k: KVS_TYPE_F16,
            n_embd_k: 0,
            state_size: 0,
            n_embd_state: 0,
            reserved: 0,
            k: ptr::null(),
            kv: ptr::null(),
            score: ptr::null(),
        }
    }
}

// SAFETY: repr(C), struct_size first, integers and raw pointers only.
unsafe impl Params for kvs_dsv4_params {
    const NAME: &'static str = "kvs_dsv4_params";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: 0,
            csa: ptr::null(),
            hca: ptr::null(),
            lid: ptr::null(),
            devices: ptr::null(),
            n_device: 0,
            n_rs_seq: 0,
        }
    }
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_dsv4_compressor_params_init(
    params: *mut kvs_dsv4_compressor_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Fills the struct of struct_size bytes at params with defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_dsv4_params_init(
    params: *mut kvs_dsv4_params,
    struct_size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(params, struct_size) })
}

/// Compressed sparse attention.
pub const KVS_DSV4_CSA: u32 = 0;
/// Heavily compressed attention.
pub const KVS_DSV4_HCA: u32 = 1;
/// The lightning indexer.
pub const KVS_DSV4_LID: u32 = 2;

/// Compressed K.
pub const KVS_DSV4_K: u32 = 0;
/// A state's sums of values.
pub const KVS_DSV4_STATE_KV: u32 = 1;
/// A state's sums of scores.
pub const KVS_DSV4_STATE_SCORE: u32 = 2;

/// Where a tensor (which: KVS_DSV4_K or _STATE_*) of a compressor (KVS_DSV4_CSA, _HCA, _LID) lies in a layer, by its number in
/// the model: its plane of a stream, and of states of a rollback plane. Row r is cell r. The addresses stay as
/// long as the context does. Const.
///
/// A ubatch reads and writes the streams of its sequences, which have their numbers. It goes on from the states in the plane of
/// kvs_dsv4_rollback, leaves the newest ones in plane 0 and those k tokens before in plane k, as far as there are planes and
/// tokens, and writes row pos / ratio of K for each block of ratio positions that ends in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_dsv4_plane(
    ctx: *const kvs_context,
    compressor: u32,
    which: u32,
    layer: u32,
    stream: u32,
    rollback: u32,
    plane_out: *mut kvs_plane,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let what = dsv4_tensor(compressor, which)?;
        let found = with_context(ctx, |context| {
            let plane = context.checked_dsv4_plane(what, (layer, stream as usize, rollback))?;
            Ok(plane_or_none(Some((plane, context.dsv4_tensor(what, layer)?))))
        })?;
        *out("plane_out", plane_out)? = found;
        Ok(())
    })
}

/// Copies size bytes of a plane, named as in kvs_dsv4_plane, to dst, from offset on: bytes from row 0. For programs without CUDA
/// code, and for looking: it waits for each copy. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_dsv4_get(
    ctx: *const kvs_context,
    compressor: u32,
    which: u32,
    layer: u32,
    stream: u32,
    rollback: u32,
    offset: u64,
    dst: *mut c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let dst = host_bytes_mut("dst", dst.cast(), size)?;
        let what = dsv4_tensor(compressor, which)?;
        with_context(ctx, |context| context.dsv4_get(what, (layer, stream as usize, rollback), offset, dst))
    })
}

/// Copies size bytes from src into a plane, as kvs_dsv4_get the other way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_dsv4_set(
    ctx: *mut kvs_context,
    compressor: u32,
    which: u32,
    layer: u32,
    stream: u32,
    rollback: u32,
    offset: u64,
    src: *const c_void,
    size: usize,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let src = host_bytes("src", src.cast(), size)?;
        let what = dsv4_tensor(compressor, which)?;
        with_context_mut(ctx, |context| {
            context.dsv4_set(what, (layer, stream as usize, rollback), offset, src)
        })
    })
}

fn dsv4_tensor(compressor: u32, which: u32) -> Result<(Dsv4Compressor, Dsv4Tensor)> {
    let compressor = match compressor {
        KVS_DSV4_CSA => Dsv4Compressor::Csa,
        KVS_DSV4_HCA => Dsv4Compressor::Hca,
        KVS_DSV4_LID => Dsv4Compressor::Lid,
        _ => return Err(Error::arg("compressor", format!("{compressor} is none of KVS_DSV4_*"))),
    };
    let which = match which {
        KVS_DSV4_K => Dsv4Tensor::K,
        KVS_DSV4_STATE_KV => Dsv4Tensor::Kv,
        KVS_DSV4_STATE_SCORE => Dsv4Tensor::Score,
        _ => return Err(Error::arg("which", format!("{which} is none of KVS_DSV4_*"))),
    };
    Ok((compressor, which))
}

/// The rollback plane that the states of a sequence are in until its next ubatch: ask before the slot is committed. Const.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_dsv4_rollback(
    ctx: *const kvs_context,
    seq_id: kvs_seq_id,
    rollback_out: *mut u32,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let rollback = with_context(ctx, |context| context.dsv4_rollback(seq_id))?;
        *out("rollback_out", rollback_out)? = rollback;
        Ok(())
    })
}

/// The compressed half that `section` describes.
pub(super) unsafe fn dsv4_section(
    section: &str,
    params: &kvs_dsv4_params,
    streams: Streams,
) -> Result<SectionParams> {
    // SAFETY: the header demands valid structs and arrays.
    unsafe {
        let read = |field: &str, raw| Compressor::read(format!("{section}.dsv4.{field}"), raw);
        let compressors = [read("csa", params.csa)?, read("hca", params.hca)?, read("lid", params.lid)?];
        let [csa, hca, lid] = compressors.each_ref().map(|of| of.params.clone());
        let dsv4 = Dsv4Params { csa, hca, lid, n_rs_seq: params.n_rs_seq };

        let name = format!("{section}.dsv4.devices");
        let devices = array(&name, params.devices, params.n_device as usize)?;
        let memory = if compressors.iter().any(Compressor::is_adopted) {
            let n_state_planes = n_state_planes(dsv4.n_rs_seq, streams.n_stream)
                .map_err(|reason| Error::arg(format!("{section}.dsv4.n_rs_seq"), reason))?;
            let mut planes = Dsv4Planes::default();
            for of in &compressors {
                let Dsv4CompressorParams { k, kv_size, state_size, n_embd_state, .. } = of.params;
                let state = TensorParams { ggml_type: GgmlType::F32, n_embd: n_embd_state };
                let adopt = |field, tensors, row, n_rows, n_plane| {
                    of.adopt(field, tensors, row, (n_rows, n_plane), devices)
                };
                planes.k.append(&mut adopt("k", of.raw.k, k, kv_size, streams.n_stream)?);
                planes.kv.append(&mut adopt("kv", of.raw.kv, state, state_size, n_state_planes)?);
                planes.score.append(&mut adopt("score", of.raw.score, state, state_size, n_state_planes)?);
            }
            Dsv4Memory::Adopted(planes)
        } else if devices.is_empty() {
            Dsv4Memory::Host
        } else {
            let numbers = devices.iter().enumerate();
            let numbers = numbers.map(|(il, &number)| device(&format!("{name}[{il}]"), number));
            Dsv4Memory::Devices(numbers.collect::<Result<_>>()?)
        };
        Ok(SectionParams::Dsv4 { dsv4, memory })
    }
}

/// A compressor as it is described.
struct Compressor {
    /// In messages.
    name: String,
    raw: kvs_dsv4_compressor_params,
    params: Dsv4CompressorParams,
}

impl Compressor {
    unsafe fn read(name: String, raw: *const kvs_dsv4_compressor_params) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::arg(name, "NULL"));
        }
        // SAFETY: passed on.
        let raw = unsafe { params::read(raw) }?;
        if raw.reserved != 0 {
            return Err(Error::arg(format!("{name}.reserved"), format!("{}, it is 0", raw.reserved)));
        }
        // SAFETY: the header demands n_layer numbers.
        let layers = unsafe { array(&format!("{name}.layers"), raw.layers, raw.n_layer as usize) }?;
        let params = Dsv4CompressorParams {
            ratio: raw.ratio,
            kv_size: raw.kv_size,
            layers: layers.to_vec(),
            k: TensorParams {
                ggml_type: ggml_type(&format!("{name}.type_k"), raw.type_k)?,
                n_embd: raw.n_embd_k,
            },
            state_size: raw.state_size,
            n_embd_state: raw.n_embd_state,
        };
        Ok(Self { name, raw, params })
    }

    fn is_adopted(&self) -> bool {
        [self.raw.k, self.raw.kv, self.raw.score].iter().any(|tensors| !tensors.is_null())
    }

    /// The planes of a tensor in all layers, which are the caller's.
    unsafe fn adopt(
        &self,
        field: &str,
        tensors: *const *mut c_void,
        row: TensorParams,
        (n_rows, n_plane): (u32, u32),
        devices: &[i32],
    ) -> Result<Vec<Plane>> {
        let Self { name, params, .. } = self;
        // SAFETY: the header demands an address for each layer.
        let tensors = unsafe { array(&format!("{name}.{field}"), tensors, params.layers.len())? };
        let row_size = row.ggml_type.row_size(row.n_embd).ok_or_else(|| {
            let reason = format!("{}, no whole number of blocks of {}", row.n_embd, row.ggml_type);
            Error::arg(format!("{name}.n_embd_k"), reason)
        })?;
        let mut planes = Vec::new();
        for (i, (&il, &base)) in params.layers.iter().zip(tensors).enumerate() {
            let place = format!("{name}.{field}[{i}]");
            let device = devices.get(il as usize).copied().unwrap_or(KVS_DEVICE_HOST);
            for plane in 0..n_plane {
                let shape = PlaneShape::dense_rows(row_size);
                // SAFETY: the header demands memory of all planes at `base`.
                planes.push(unsafe { adopt(&place, (base, device), 0, plane, n_rows, shape)? });
            }
        }
        Ok(planes)
    }
}
