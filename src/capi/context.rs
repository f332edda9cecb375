//! Creating and freeing contexts.

use std::ffi::{c_char, c_void};
use std::ptr;

use super::handle::{free_handle, into_handle, kvs_context, out, string, with_context, with_context_mut};
use super::kvs_pos;
use super::params::{self, Params, flag};
use super::sections::{kvs_section_params, section_params};
use super::status::{kvs_status, status_of, value_or};
use super::transfer_params::UserData;
use crate::context::{Context, ContextParams, PendingShift, Shift};
use crate::error::{Error, Result};
use crate::memory::{LegacyRotation, RopeParams, Streams};
use crate::storage::{StagingParams, Threads};

/// Nothing is said: files older than version 4 that may be rotated are refused.
pub const KVS_LEGACY_ROTATION_UNSTATED: u32 = 0;
/// Files older than version 4 were made with the rotation that llama.cpp applies to quantised caches.
pub const KVS_LEGACY_ROTATION_ROTATED: u32 = 1;
/// Files older than version 4 were made without rotation.
pub const KVS_LEGACY_ROTATION_PLAIN: u32 = 2;

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
    /// The sections in write order, which is that of the states that are to be read: full attention before SWA (iSWA), an
    /// indexer behind its attention cache, recurrent states behind attention (in hybrids with an indexer before that), and the
    /// compressed half of DSV4 last. Only indexers and DSV4 are held to it: it is the engine's order that counts.
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
    /// 1: states of other types, or of another rotation (n_rot_k, n_rot_v), are converted to those of the cache, which rounds:
    /// docs/semantics.md. 0 (by default): they are refused. V is turned from rows to channels (v_trans) and back in any case.
    pub convert_types: u32,
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
            convert_types: 0,
            n_staging: 0,
            staging_size: 0,
        }
    }
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

/// Version of the library: major * 10000 + minor * 100 + patch.
#[unsafe(no_mangle)]
pub extern "C" fn kvs_version() -> u32 {
    let part = |text: &str| text.parse().unwrap_or(0);
    part(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + part(env!("CARGO_PKG_VERSION_PATCH"))
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
    let streams = Streams::new(params.n_seq_max, unified)?;
    // SAFETY: the header demands an array of n_section structs.
    let sections = unsafe { params::read_array("sections", params.sections, params.n_section as usize) }?;
    let sections = sections.iter().enumerate();
    // SAFETY: the header demands valid pointers in it.
    let sections = sections.map(|(i, section)| unsafe { section_params(i, section, streams) });
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
        convert_types: flag("convert_types", params.convert_types)?,
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
