//! The view: `state_write` and `state_read_sinfo` over cells and tensors that the caller owns.

use std::ffi::{c_char, c_int, c_void};

use super::context::{KVS_LEGACY_ROTATION_UNSTATED, legacy_rotation};
use super::handle::string;
use super::params::{self, Params, flag};
use super::state::flags_of;
use super::status::{caught, kvs_status, status_of};
use super::{KVS_DEVICE_HOST, kvs_cell, kvs_plane, kvs_seq_id};
use crate::cells::{CellMeta, SeqSet};
use crate::error::{Error, Result};
use crate::format::{GgmlType, StateVersion};
use crate::memory::{
    KvParams, KvPlanes, KvView, LayerParams, SlotInfos, Streams, TensorInput, TensorParams, ViewCell,
    ViewCells,
};
use crate::state::{Input, Sink};
use crate::storage::{Plane, PlaneShape, Region, TensorAccess};
use crate::types::{CellExt, Seq, Swa, SwaType, Token};

/// The cells of one stream of a state, in the order of the state.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_slot_info {
    /// Number of cells, 0 for a stream without.
    pub n: u32,
    /// As sinfos_out: what idxs has room for, at least kv_size. As sinfos_in: ignored.
    pub capacity: u32,
    /// The cells; NULL only as sinfos_in with n 0.
    pub idxs: *mut u32,
}

/// Calls that reach tensors which are in no host memory. They return 0, or anything else to fail; neither throws.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_tensor_access {
    /// Passed back.
    pub user: *mut c_void,
    /// Copies n bytes of the tensor from offset on to dst.
    pub get: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            tensor: *mut c_void,
            offset: u64,
            n: u64,
            dst: *mut c_void,
        ) -> c_int,
    >,
    /// Copies n bytes from src to the tensor from offset on.
    pub set: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            tensor: *mut c_void,
            offset: u64,
            n: u64,
            src: *const c_void,
        ) -> c_int,
    >,
}

/// Takes one cell; 0: go on. Anything else: stop, and return it.
pub type kvs_visit_each = Option<unsafe extern "C" fn(arg: *mut c_void, cell: *const kvs_cell) -> c_int>;

/// An attention cache whose cells and tensors are the caller's (llama_kv_cache). Fill with kvs_kv_view_init first.
///
/// Its callbacks return 0, or anything else to fail, which ends the call with KVS_STATUS_CALLBACK. They must not
/// throw or unwind: catch, keep the exception, and throw it again after the call has returned. They run on the
/// thread of the call, during the call; get of the access also during kvs_state_writer_get_data, _save_file and
/// _get_on_device, set during kvs_state_reader_finish. Calls with the writer or the reader of the call that
/// they run in are refused.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_kv_view {
    /// sizeof(kvs_kv_view), set by the init call.
    pub struct_size: usize,
    /// Passed to visit, apply and clear.
    pub user: *mut c_void,
    /// What the section is called in messages; by default "kv".
    pub name: *const c_char,
    /// 1 (unified), or one stream per sequence.
    pub n_stream: u32,
    /// Cells of each stream.
    pub kv_size: u32,
    /// Sequences. With several streams, sequence s lives in stream s.
    pub n_seq_max: u32,
    /// Number of layers.
    pub n_layer: u32,
    /// Size of the window in positions.
    pub n_swa: u32,
    /// KVS_SWA_TYPE_* of this cache, never the model's.
    pub swa_type: u32,
    /// 1: V is transposed.
    pub v_trans: u32,
    /// Size of the Hadamard rotation applied to K; 0: none.
    pub n_rot_k: u32,
    /// Size of the Hadamard rotation applied to V; 0: none.
    pub n_rot_v: u32,
    /// 1: states carry x, y and token of each cell.
    pub cell_ext: u32,
    /// 1: the cells are another cache's, which saves them. Nothing is written or read: planes and callbacks may be
    /// NULL.
    pub shared: u32,
    /// K, stream-major: [n_stream * n_layer].
    pub k: *const kvs_plane,
    /// V, likewise; NULL: no layer has V.
    pub v: *const kvs_plane,
    /// Where the search for free cells starts in each stream, n_stream of them, at most kv_size (which is cell 0
    /// again); NULL: at cell 0.
    pub head: *const u32,
    /// For planes whose data is NULL; all planes have data if this is NULL.
    pub access: *const kvs_tensor_access,
    /// Calls each(arg, cell) once for every cell of seq in stream, or with seq -1 for every used cell, in any
    /// order (ascending is fastest), and returns at once what it returns if that is not 0. The cell's seqs are all of
    /// its sequences, whichever is visited. A pending shift is not applied: see kvs_kv_cache_state_write.
    pub visit: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            stream: u32,
            seq: kvs_seq_id,
            each: kvs_visit_each,
            arg: *mut c_void,
        ) -> c_int,
    >,
    /// Replaces seq by n cells, whose idx says where and whose seqs is seq alone. They are empty, or the
    /// sequence's own, or hold one other sequence whose window has passed them: that one loses them and all its
    /// older positions (the purge rule of llama_kv_cache::apply_ubatch). x, y and tok are set as given, shift is 0, the
    /// next search starts after the last cell. n is 0 for an empty sequence.
    ///
    /// seq -1: everything is replaced. clear has been called with -1; then each stream that is to hold cells gets
    /// one call, whose seqs name the sequences of each cell.
    pub apply: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            stream: u32,
            seq: kvs_seq_id,
            n: u32,
            cells: *const kvs_cell,
        ) -> c_int,
    >,
    /// Removes seq (-1: everything) and zeroes the data of the cells that only it used.
    pub clear: Option<unsafe extern "C" fn(user: *mut c_void, seq: kvs_seq_id) -> c_int>,
    /// KVS_LEGACY_ROTATION_*, for a reader of files older than version 4.
    pub legacy_rotation: u32,
    /// 1: a reader converts K and V of other types or of another rotation, which rounds; 0: it refuses them.
    pub convert_types: u32,
}

// SAFETY: repr(C), usize first; integers, pointers and nullable function pointers.
unsafe impl Params for kvs_kv_view {
    const NAME: &'static str = "kvs_kv_view";
    const MIN_SIZE: usize = std::mem::offset_of!(Self, legacy_rotation);

    fn defaults() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            user: std::ptr::null_mut(),
            name: std::ptr::null(),
            n_stream: 1,
            kv_size: 0,
            n_seq_max: 1,
            n_layer: 0,
            n_swa: 0,
            swa_type: 0,
            v_trans: 0,
            n_rot_k: 0,
            n_rot_v: 0,
            cell_ext: 0,
            shared: 0,
            k: std::ptr::null(),
            v: std::ptr::null(),
            head: std::ptr::null(),
            access: std::ptr::null(),
            visit: None,
            apply: None,
            clear: None,
            legacy_rotation: KVS_LEGACY_ROTATION_UNSTATED,
            convert_types: 0,
        }
    }
}

/// Where a state's bytes go to or come from in turns (llama_io_write_i, llama_io_read_i). Fill with kvs_io_init
/// first. The calls return 0, or anything else to fail, which ends the call with KVS_STATUS_CALLBACK; they must
/// not throw or unwind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvs_io {
    /// sizeof(kvs_io), set by the init call.
    pub struct_size: usize,
    /// Passed back.
    pub user: *mut c_void,
    /// Takes metadata.
    pub write: Option<unsafe extern "C" fn(user: *mut c_void, src: *const c_void, size: usize) -> c_int>,
    /// Takes n bytes of the caller's tensor from offset on.
    pub write_tensor:
        Option<unsafe extern "C" fn(user: *mut c_void, tensor: *mut c_void, offset: u64, n: u64) -> c_int>,
    /// Gives metadata.
    pub read: Option<unsafe extern "C" fn(user: *mut c_void, dst: *mut c_void, size: usize) -> c_int>,
    /// Moves the next n bytes to the caller's tensor, from offset on.
    pub read_tensor:
        Option<unsafe extern "C" fn(user: *mut c_void, tensor: *mut c_void, offset: u64, n: u64) -> c_int>,
}

// SAFETY: repr(C), usize first; pointers and nullable function pointers.
unsafe impl Params for kvs_io {
    const NAME: &'static str = "kvs_io";
    const MIN_SIZE: usize = size_of::<Self>();

    fn defaults() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            user: std::ptr::null_mut(),
            write: None,
            write_tensor: None,
            read: None,
            read_tensor: None,
        }
    }
}

/// Fills a view with defaults: one stream, full attention, no layers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_view_init(view: *mut kvs_kv_view, struct_size: usize) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(view, struct_size) })
}

/// Fills an io with NULLs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_io_init(io: *mut kvs_io, struct_size: usize) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe { params::init(io, struct_size) })
}

/// llama_kv_cache::state_write: writes the section of one sequence, or of all with seq_id -1, through io, which
/// needs write and write_tensor. What is selected is up to the flags and the view's own window: docs/semantics.md.
///
/// A pending shift (kvs_cell.shift) is not applied: positions are the new ones and K is written as it is, with a
/// warning in the log, since nothing here tells a save from a question for its size. Apply shifts before a save.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_cache_state_write(
    view: *const kvs_kv_view,
    io: *const kvs_io,
    seq_id: kvs_seq_id,
    flags: super::kvs_state_seq_flags,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let flags = flags_of(flags)?;
        let view = view_of(view)?;
        let mut sink = IoSink::new(params::read(io)?)?;
        view.state_write(&mut sink, seq_id, flags)
    })
}

/// llama_kv_cache::state_read_sinfo: reads the section through io, which needs read and read_tensor, and replaces
/// sequence seq_id, or everything with -1. Cells are searched as docs/semantics.md says, or are those of sinfos_in.
///
/// sinfos_out and sinfos_in are NULL or have n_stream entries, by stream of the state. sinfos_in: a mirrored cache
/// takes the cells of its source; the state must have as many streams then. sinfos_out: gets the cells used; each
/// entry has room for kv_size.
///
/// Metadata and tensors come in turns, so this call cannot refuse a bad state before anything changes, as
/// kvs_state_reader_plan_kv_cache does: once something has been read, a failure leaves the destination empty and its
/// data zero. If clear fails as well, that is in the log: kvs_last_error has what failed first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvs_kv_cache_state_read_sinfo(
    view: *const kvs_kv_view,
    io: *const kvs_io,
    seq_id: kvs_seq_id,
    flags: super::kvs_state_seq_flags,
    sinfos_out: *mut kvs_slot_info,
    sinfos_in: *const kvs_slot_info,
) -> kvs_status {
    // SAFETY: the contract of all calls.
    status_of(|| unsafe {
        let flags = flags_of(flags)?;
        let c_view = params::read(view)?;
        let mut view = view_of(view)?;
        let mut out = SlotsOut::new(&c_view, sinfos_out)?;
        let given = slots_in(&c_view, sinfos_in)?;
        let mut input = IoInput::new(params::read(io)?)?;
        let slots = view.state_read_sinfo(&mut input, seq_id, flags, given.as_ref())?;
        out.give(&slots)
    })
}

/// A view of the caller's cache. Its arrays are copied, what they point to is not.
pub(super) unsafe fn view_of(view: *const kvs_kv_view) -> Result<KvView> {
    // SAFETY: the contract of all calls.
    let c = unsafe { params::read(view) }?;
    let name = if c.name.is_null() {
        "kv".to_owned()
    } else {
        // SAFETY: the contract of all calls.
        unsafe { string("view.name", c.name) }?.to_string_lossy().into_owned()
    };
    if c.n_stream != 1 && c.n_stream != c.n_seq_max {
        let reason = format!("{} with n_seq_max {}, it is 1 or as many", c.n_stream, c.n_seq_max);
        return Err(Error::arg("view.n_stream", reason));
    }
    Streams::new(c.n_seq_max, c.n_stream == 1)?;
    if c.kv_size == 0 {
        return Err(Error::arg("view.kv_size", "0, a stream has cells"));
    }
    if c.n_layer > MAX_LAYER {
        return Err(Error::arg("view.n_layer", format!("{}, at most {MAX_LAYER}", c.n_layer)));
    }
    let v_trans = flag("view.v_trans", c.v_trans)?;
    let cell_ext = flag("view.cell_ext", c.cell_ext)?;
    let shared = flag("view.shared", c.shared)?;
    let legacy_rotation = legacy_rotation(c.legacy_rotation)?;
    let convert_types = flag("view.convert_types", c.convert_types)?;
    // Nothing of a shared cache is looked at.
    let n_layer = if shared { 0 } else { c.n_layer as usize };
    let n_planes = c.n_stream as usize * n_layer;
    // SAFETY: the contract of all calls.
    let k = unsafe { super::handle::array("view.k", c.k, n_planes) }?;
    // SAFETY: the contract of all calls.
    let v = if c.v.is_null() { &[] } else { unsafe { super::handle::array("view.v", c.v, n_planes) }? };
    // SAFETY: the contract of all calls.
    let access = unsafe { access_of(c.access) }?;

    let mut layers = Vec::new();
    for (i, k) in k.iter().take(n_layer).enumerate() {
        let v = v.get(i).filter(|v| v.n_embd != 0);
        layers.push(LayerParams {
            k: tensor_params("k", i, k)?,
            v: v.map(|v| tensor_params("v", i, v)).transpose()?,
        });
    }
    let mut planes = KvPlanes::default();
    for (i, plane) in k.iter().enumerate() {
        same_in_all_streams("k", i, k, n_layer)?;
        same_in_all_streams("v", i, v, n_layer)?;
        let shape = rows(layers[i % n_layer].k, plane);
        // SAFETY: the contract of all calls: the tensors outlive the view's use.
        planes.k.push(unsafe { plane_of("k", i, plane, c.kv_size, shape, access.as_ref()) }?);
        planes.v.push(match (layers[i % n_layer].v, v.get(i)) {
            (Some(params), Some(plane)) => {
                let shape = if v_trans { channels(params, plane) } else { rows(params, plane) };
                // SAFETY: as above.
                Some(unsafe { plane_of("v", i, plane, c.kv_size, shape, access.as_ref()) }?)
            }
            _ => None,
        });
    }
    let swa_type = SwaType::from_u32(c.swa_type)
        .ok_or_else(|| Error::arg("view.swa_type", format!("{}, it is 0 to 3", c.swa_type)))?;
    let swa = Swa::new(swa_type, c.n_swa)
        .ok_or_else(|| Error::arg("view.n_swa", "0, a sliding window has a size"))?;
    let params = KvParams {
        layers,
        swa,
        v_trans,
        n_rot_k: c.n_rot_k,
        n_rot_v: c.n_rot_v,
        cell_ext,
        ..KvParams::new(c.kv_size, 0, no_layer())
    };
    let heads = if c.head.is_null() {
        vec![0; c.n_stream as usize]
    } else {
        // SAFETY: the contract of all calls.
        unsafe { super::handle::array("view.head", c.head, c.n_stream as usize) }?.to_vec()
    };
    if let Some((i, head)) = heads.iter().enumerate().find(|&(_, &head)| head > c.kv_size) {
        let reason = format!("{head}, at most kv_size {}", c.kv_size);
        return Err(Error::arg(format!("view.head[{i}]"), reason));
    }
    let given = [("visit", c.visit.is_some()), ("apply", c.apply.is_some()), ("clear", c.clear.is_some())];
    if let Some((name, _)) = given.iter().find(|&&(_, is_given)| !is_given && !shared) {
        return Err(Error::arg(format!("view.{name}"), "NULL"));
    }
    let cells = CallerCells { user: c.user, visit: c.visit, apply: c.apply, clear: c.clear, heads };
    let view = KvView::new(&name, &params, c.n_seq_max, c.n_stream == 1, planes, Box::new(cells))?
        .with_legacy_rotation(legacy_rotation)
        .with_convert_types(convert_types);
    Ok(if shared { view.shared() } else { view })
}

/// More than any model has: an `n_layer` beyond it was never set.
const MAX_LAYER: u32 = 1 << 16;

/// Stands for the layers until they are known.
fn no_layer() -> LayerParams {
    LayerParams { k: TensorParams { ggml_type: GgmlType::F16, n_embd: 1 }, v: None }
}

fn tensor_params(field: &str, layer: usize, plane: &kvs_plane) -> Result<TensorParams> {
    let ggml_type = GgmlType::from_i32(plane.ggml_type).ok_or_else(|| {
        Error::arg(
            format!("view.{field}[{layer}].ggml_type"),
            format!("{} is no type of ggml", plane.ggml_type),
        )
    })?;
    let n_embd = plane.n_embd;
    if n_embd == 0 || ggml_type.row_size(n_embd).is_none() {
        let block = ggml_type.block_size();
        let reason = format!("{n_embd}, cells hold blocks of {block} elements of {ggml_type}, at least one");
        return Err(Error::arg(format!("view.{field}[{layer}].n_embd"), reason));
    }
    Ok(TensorParams { ggml_type, n_embd })
}

/// A layer is described by its plane in stream 0.
fn same_in_all_streams(field: &str, i: usize, planes: &[kvs_plane], n_layer: usize) -> Result<()> {
    let (Some(plane), Some(first)) = (planes.get(i), planes.get(i % n_layer)) else { return Ok(()) };
    for (name, value, expected) in [
        ("n_embd", i64::from(plane.n_embd), i64::from(first.n_embd)),
        ("ggml_type", plane.ggml_type.into(), first.ggml_type.into()),
    ] {
        // The type of a tensor that is not there means nothing.
        if value != expected && (name == "n_embd" || first.n_embd != 0) {
            let reason = format!("{value}, in stream 0 it is {expected}");
            return Err(Error::arg(format!("view.{field}[{i}].{name}"), reason));
        }
    }
    Ok(())
}

fn rows(params: TensorParams, plane: &kvs_plane) -> PlaneShape {
    // `tensor_params` has refused what is no whole number of blocks.
    let row_size = params.ggml_type.row_size(params.n_embd).unwrap_or(0);
    PlaneShape::Rows { row_size, cell_stride: plane.cell_stride }
}

fn channels(params: TensorParams, plane: &kvs_plane) -> PlaneShape {
    PlaneShape::Channels {
        n_channel: params.n_embd,
        elem_size: params.ggml_type.type_size(),
        cell_stride: plane.cell_stride,
        channel_stride: plane.channel_stride,
    }
}

unsafe fn plane_of(
    field: &str,
    i: usize,
    plane: &kvs_plane,
    kv_size: u32,
    shape: PlaneShape,
    access: Option<&CallerTensors>,
) -> Result<Plane> {
    let bad = |error| match error {
        Error::InvalidArgument { name, reason } => Error::arg(format!("view.{field}[{i}].{name}"), reason),
        other => other,
    };
    if plane.device < KVS_DEVICE_HOST {
        let reason = format!("{}, it is {KVS_DEVICE_HOST} or the number of a device", plane.device);
        return Err(Error::arg(format!("view.{field}[{i}].device"), reason));
    }
    if plane.reserved != 0 {
        return Err(Error::arg(
            format!("view.{field}[{i}].reserved"),
            format!("{}, it is 0", plane.reserved),
        ));
    }
    let tensor = plane.tensor.expose_provenance();
    if plane.data.is_null() {
        let access = access.ok_or_else(|| {
            Error::arg(format!("view.{field}[{i}].data"), "NULL, and the view has no access")
        })?;
        let access = CallerTensors { base: 0, ..*access };
        return Plane::remote(std::sync::Arc::new(access), tensor, kv_size, shape).map_err(bad);
    }
    // SAFETY: passed on to the caller of the view.
    let adopted = unsafe {
        match plane.device {
            KVS_DEVICE_HOST => Plane::adopt(plane.data.cast(), kv_size, shape),
            _ => Plane::adopt_device(plane.data.addr() as u64, kv_size, shape),
        }
    };
    adopted.map(|plane| plane.named(tensor)).map_err(bad)
}

fn failed(name: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error::Callback { name, code }) }
}

/// The caller's cells. The calls are there unless the view is shared, which makes none.
#[derive(Debug)]
struct CallerCells {
    user: *mut c_void,
    visit: Option<unsafe extern "C" fn(*mut c_void, u32, kvs_seq_id, kvs_visit_each, *mut c_void) -> c_int>,
    apply: Option<unsafe extern "C" fn(*mut c_void, u32, kvs_seq_id, u32, *const kvs_cell) -> c_int>,
    clear: Option<unsafe extern "C" fn(*mut c_void, kvs_seq_id) -> c_int>,
    heads: Vec<u32>,
}

/// What `visit` hands through the caller.
struct Visit<'a> {
    each: &'a mut dyn FnMut(ViewCell) -> Result<()>,
    error: Option<Error>,
}

unsafe extern "C" fn visit_each(arg: *mut c_void, cell: *const kvs_cell) -> c_int {
    // SAFETY: `arg` is what CallerCells::visit gave, on whose stack it is; the header demands that it is passed on.
    let visit = unsafe { &mut *arg.cast::<Visit<'_>>() };
    let result = caught(|| {
        // SAFETY: the header demands a cell.
        let cell =
            unsafe { cell.as_ref() }.ok_or_else(|| Error::arg("visit", "each was called without a cell"))?;
        (visit.each)(ViewCell {
            cell: cell.idx,
            meta: CellMeta {
                pos: cell.pos,
                ext: CellExt { x: cell.x, y: cell.y, tok: cell.tok },
                seqs: SeqSet::from_words(cell.seqs),
            },
            shift: cell.shift,
        })
    });
    match result {
        Ok(()) => 0,
        Err(error) => {
            visit.error = Some(error);
            1
        }
    }
}

/// A call of the caller's.
fn given<F>(name: &str, call: Option<F>) -> Result<F> {
    call.ok_or_else(|| Error::arg(name, "NULL"))
}

fn seq_id_of(seq: Option<Seq>) -> kvs_seq_id {
    seq.map_or(-1, Seq::id)
}

impl ViewCells for CallerCells {
    fn visit(
        &self,
        stream: usize,
        seq: Option<Seq>,
        each: &mut dyn FnMut(ViewCell) -> Result<()>,
    ) -> Result<()> {
        let mut visit = Visit { each, error: None };
        let arg = (&raw mut visit).cast();
        let stream = u32::try_from(stream).unwrap_or(u32::MAX);
        // SAFETY: the header demands a callback that can be called like this, and does not throw.
        let code = unsafe {
            given("view.visit", self.visit)?(self.user, stream, seq_id_of(seq), Some(visit_each), arg)
        };
        match visit.error {
            Some(error) => Err(error),
            None => failed("visit", code),
        }
    }

    fn head(&self, stream: usize) -> u32 {
        self.heads.get(stream).copied().unwrap_or(0)
    }

    fn apply(&mut self, stream: usize, seq: Option<Seq>, cells: &[u32], metas: &[CellMeta]) -> Result<()> {
        let cells: Vec<kvs_cell> = cells
            .iter()
            .zip(metas)
            .map(|(&idx, meta)| kvs_cell {
                idx,
                pos: meta.pos,
                shift: 0,
                x: meta.ext.x,
                y: meta.ext.y,
                tok: meta.ext.tok,
                seqs: meta.seqs.words(),
            })
            .collect();
        let stream = u32::try_from(stream).unwrap_or(u32::MAX);
        let n = u32::try_from(cells.len()).unwrap_or(u32::MAX);
        // SAFETY: as in visit; `cells` has n elements.
        failed("apply", unsafe {
            given("view.apply", self.apply)?(self.user, stream, seq_id_of(seq), n, cells.as_ptr())
        })
    }

    fn clear(&mut self, seq: Option<Seq>) -> Result<()> {
        // SAFETY: as in visit.
        failed("clear", unsafe { given("view.clear", self.clear)?(self.user, seq_id_of(seq)) })
    }
}

/// The caller's tensors that are in no host memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallerTensors {
    user: *mut c_void,
    get: unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64, *mut c_void) -> c_int,
    set: unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64, *const c_void) -> c_int,
    /// Where the plane begins in its tensor.
    base: u64,
}

// SAFETY: `user` and the callbacks are used on the thread of a call only, and the header says which.
unsafe impl Send for CallerTensors {}
// SAFETY: as above.
unsafe impl Sync for CallerTensors {}

/// The caller's access, if it has one.
pub(super) unsafe fn access_of(access: *const kvs_tensor_access) -> Result<Option<CallerTensors>> {
    if access.is_null() {
        return Ok(None);
    }
    // SAFETY: the contract of all calls.
    let c = unsafe { super::handle::array("access", access, 1) }?[0];
    Ok(Some(CallerTensors {
        user: c.user,
        get: c.get.ok_or_else(|| Error::arg("access.get", "NULL"))?,
        set: c.set.ok_or_else(|| Error::arg("access.set", "NULL"))?,
        base: 0,
    }))
}

/// `n` bytes of a tensor from `offset` on, as a plane of one cell: in host memory or a device's from `data` on, or through
/// the caller's access.
pub(super) unsafe fn tensor_bytes(
    tensor: *mut c_void,
    data: *mut c_void,
    offset: u64,
    n: u64,
    access: Option<&CallerTensors>,
) -> Result<Plane> {
    let end = offset.checked_add(n);
    let end = end.ok_or_else(|| Error::arg("offset", format!("{offset}, with n {n} the end overflows")))?;
    let shape = PlaneShape::dense_rows(n);
    if data.is_null() {
        let access = access.ok_or_else(|| Error::arg("data", "NULL, and there is no access"))?;
        let access = CallerTensors { base: offset, ..*access };
        return Plane::remote(std::sync::Arc::new(access), tensor.expose_provenance(), 1, shape);
    }
    let fits = (data.addr() as u64).checked_add(end).is_some();
    let offset = usize::try_from(offset).ok().filter(|_| fits).ok_or_else(|| {
        Error::arg("offset", format!("{offset}, with n {n} the end of the tensor at {data:p} overflows"))
    })?;
    let start = data.cast::<u8>().wrapping_add(offset);
    // SAFETY: the header demands that these bytes, whose end does not wrap around, are the tensor's until the writer
    // or reader is freed.
    let plane = unsafe {
        if Plane::is_on_device(start) {
            Plane::adopt_device(start.addr() as u64, 1, shape)
        } else {
            Plane::adopt(start, 1, shape)
        }
    };
    plane.map(|plane| plane.named(tensor.expose_provenance()))
}

impl TensorAccess for CallerTensors {
    fn get(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let tensor = std::ptr::with_exposed_provenance_mut(tensor);
        let (n, dst) = (out.len() as u64, out.as_mut_ptr().cast());
        // SAFETY: the header demands a callback that can be called like this; `out` has n bytes.
        failed("get", unsafe { (self.get)(self.user, tensor, self.base + offset, n, dst) })
    }

    fn set(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let tensor = std::ptr::with_exposed_provenance_mut(tensor);
        let (n, src) = (bytes.len() as u64, bytes.as_ptr().cast());
        // SAFETY: as in get.
        failed("set", unsafe { (self.set)(self.user, tensor, self.base + offset, n, src) })
    }
}

/// A sink that hands everything to the caller's io.
struct IoSink {
    user: *mut c_void,
    write: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int,
    write_tensor: unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64) -> c_int,
}

impl IoSink {
    fn new(io: kvs_io) -> Result<Self> {
        Ok(Self {
            user: io.user,
            write: given("io.write", io.write)?,
            write_tensor: given("io.write_tensor", io.write_tensor)?,
        })
    }
}

impl<'a> Sink<'a> for IoSink {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // SAFETY: the header demands a callback that can be called like this.
        failed("write", unsafe { (self.write)(self.user, bytes.as_ptr().cast(), bytes.len()) })
    }

    fn write_tensor(&mut self, region: Region<'a>) -> Result<()> {
        let tensor = std::ptr::with_exposed_provenance_mut(region.tensor());
        region.each_piece(|offset, bytes| {
            // SAFETY: as in write.
            failed("write_tensor", unsafe { (self.write_tensor)(self.user, tensor, offset, bytes as u64) })
        })
    }
}

/// Input from the caller's io.
struct IoInput {
    user: *mut c_void,
    read: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int,
    read_tensor: unsafe extern "C" fn(*mut c_void, *mut c_void, u64, u64) -> c_int,
    offset: u64,
}

impl IoInput {
    fn new(io: kvs_io) -> Result<Self> {
        Ok(Self {
            user: io.user,
            read: given("io.read", io.read)?,
            read_tensor: given("io.read_tensor", io.read_tensor)?,
            offset: 0,
        })
    }
}

impl Input for IoInput {
    fn read(&mut self, _: &'static str, out: &mut [u8]) -> Result<()> {
        // SAFETY: the header demands a callback that can be called like this.
        failed("read", unsafe { (self.read)(self.user, out.as_mut_ptr().cast(), out.len()) })?;
        self.offset += out.len() as u64;
        Ok(())
    }

    fn left(&self) -> Option<u64> {
        None
    }

    fn offset(&self) -> u64 {
        self.offset
    }

    fn version(&self) -> StateVersion {
        StateVersion::CURRENT
    }

    fn tokens(&self) -> &[Token] {
        &[]
    }
}

impl TensorInput for IoInput {
    fn read_tensor(&mut self, tensor: usize, offset: u64, bytes: usize) -> Result<()> {
        let tensor = std::ptr::with_exposed_provenance_mut(tensor);
        // SAFETY: as in read.
        failed("read_tensor", unsafe { (self.read_tensor)(self.user, tensor, offset, bytes as u64) })?;
        self.offset += bytes as u64;
        Ok(())
    }
}

/// The caller's layout of a mirrored cache's source.
pub(super) unsafe fn slots_in(view: &kvs_kv_view, sinfos: *const kvs_slot_info) -> Result<Option<SlotInfos>> {
    if sinfos.is_null() {
        return Ok(None);
    }
    // SAFETY: the contract of all calls.
    let sinfos = unsafe { super::handle::array("sinfos_in", sinfos, view.n_stream as usize) }?;
    let cells = |(i, sinfo): (usize, &kvs_slot_info)| {
        if sinfo.n > view.kv_size {
            let reason = format!("{}, a stream has kv_size {} cells", sinfo.n, view.kv_size);
            return Err(Error::arg(format!("sinfos_in[{i}].n"), reason));
        }
        // SAFETY: the contract of all calls.
        let idxs = unsafe { super::handle::array("sinfos_in.idxs", sinfo.idxs, sinfo.n as usize) }?;
        Ok(idxs.to_vec())
    };
    sinfos.iter().enumerate().map(cells).collect::<Result<_>>().map(Some)
}

/// The caller's room for a layout, checked before anything changes.
pub(super) struct SlotsOut<'a>(&'a mut [kvs_slot_info]);

impl SlotsOut<'_> {
    pub(super) unsafe fn new(view: &kvs_kv_view, sinfos: *mut kvs_slot_info) -> Result<Self> {
        let n = if sinfos.is_null() { 0 } else { view.n_stream as usize };
        // SAFETY: the contract of all calls.
        let sinfos = unsafe { super::handle::array_mut("sinfos_out", sinfos, n) }?;
        for (i, sinfo) in sinfos.iter().enumerate() {
            if sinfo.capacity < view.kv_size {
                let reason = format!("{}, each stream has room for kv_size {}", sinfo.capacity, view.kv_size);
                return Err(Error::arg(format!("sinfos_out[{i}].capacity"), reason));
            }
            if sinfo.idxs.is_null() {
                return Err(Error::arg(format!("sinfos_out[{i}].idxs"), "NULL"));
            }
        }
        Ok(Self(sinfos))
    }

    pub(super) fn give(&mut self, slots: &SlotInfos) -> Result<()> {
        for (sinfo, cells) in self.0.iter_mut().zip(slots) {
            sinfo.n = u32::try_from(cells.len()).unwrap_or(u32::MAX);
            // SAFETY: `new` has checked that there is room for kv_size cells, and a stream has no more.
            unsafe { super::handle::array_mut("sinfos_out.idxs", sinfo.idxs, cells.len()) }?
                .copy_from_slice(cells);
        }
        Ok(())
    }
}
