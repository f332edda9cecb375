"""kvstate through ctypes: nothing to install, numpy only if it is there.

The library is the one that KVSTATE_LIB names, or else the newest one under target/.

Calls that fail raise KvsError, which carries the status and the library's own reason. States are bytes; whatever
supports the buffer protocol (bytes, bytearray, memoryview, numpy arrays) is taken back.
"""

import ctypes as C
import os
import pathlib
import traceback

try:
    import numpy
except ImportError:
    numpy = None

TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_BF16 = 0, 1, 2, 8, 30
SWA_TYPE_NONE, SWA_TYPE_STANDARD, SWA_TYPE_CHUNKED, SWA_TYPE_SYMMETRIC = range(4)
FLAGS_NONE, FLAGS_PARTIAL_ONLY, FLAGS_ON_DEVICE = 0, 1, 2
DEVICE_HOST = -1
KV_K, KV_V = 0, 1
SECTION_KV, SECTION_RECURRENT, SECTION_SHARED, SECTION_DSV4 = range(1, 5)
RECURRENT_R, RECURRENT_P, RECURRENT_S = range(3)
DSV4_CSA, DSV4_HCA, DSV4_LID = range(3)
DSV4_K, DSV4_STATE_KV, DSV4_STATE_SCORE = range(3)
STATUS_BUFFER_TOO_SMALL, STATUS_CANCELLED = 4, 19
STATUS_NO_CUDA, STATUS_NO_DEVICE, STATUS_DRIVER_TOO_OLD, STATUS_DEVICE = range(20, 24)


class KvsError(Exception):
    """A call failed; status is its KVS_STATUS_*, the text is kvs_last_error()."""

    def __init__(self):
        self.status = _lib.kvs_last_status()
        super().__init__(_lib.kvs_last_error().decode(errors="replace"))


# Structs, as in kvstate.h


class _RopeParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("rope_type", C.c_uint32),
        ("n_embd_head", C.c_uint32),
        ("n_rope_dims", C.c_uint32),
        ("n_embd_nope", C.c_uint32),
        ("freq_base", C.c_float),
        ("freq_scale", C.c_float),
        ("freq_factors", C.POINTER(C.c_float)),
        ("ext_factor", C.c_float),
        ("beta_fast", C.c_float),
        ("beta_slow", C.c_float),
        ("n_ctx_orig", C.c_uint32),
    ]


class _LayerParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("type_k", C.c_int32),
        ("type_v", C.c_int32),
        ("n_embd_k_gqa", C.c_uint32),
        ("n_embd_v_gqa", C.c_uint32),
        ("k", C.c_void_p),
        ("v", C.c_void_p),
        ("k_cell_stride", C.c_uint64),
        ("k_stream_stride", C.c_uint64),
        ("v_cell_stride", C.c_uint64),
        ("v_channel_stride", C.c_uint64),
        ("v_stream_stride", C.c_uint64),
        ("device", C.c_int32),
        ("reserved", C.c_uint32),
        ("rope", C.POINTER(_RopeParams)),
    ]


class _KvParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kv_size", C.c_uint32),
        ("n_layer", C.c_uint32),
        ("layers", C.POINTER(_LayerParams)),
        ("swa_type", C.c_uint32),
        ("n_swa", C.c_uint32),
        ("v_trans", C.c_uint32),
        ("cell_ext", C.c_uint32),
        ("n_rot_k", C.c_uint32),
        ("n_rot_v", C.c_uint32),
        ("n_embd_head_k", C.c_uint32),
        ("n_embd_head_v", C.c_uint32),
        ("mirrors", C.c_int32),
        ("reserved", C.c_uint32),
    ]


class _RecurrentLayerParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("has_r", C.c_uint32),
        ("has_s", C.c_uint32),
        ("type_r", C.c_int32),
        ("type_s", C.c_int32),
        ("n_embd_r", C.c_uint32),
        ("n_embd_s", C.c_uint32),
        ("n_embd_p", C.c_uint32),
        ("device", C.c_int32),
        ("r", C.c_void_p),
        ("s", C.c_void_p),
        ("p", C.c_void_p),
    ]


class _RecurrentParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_layer", C.c_uint32),
        ("n_rs_seq", C.c_uint32),
        ("layers", C.POINTER(_RecurrentLayerParams)),
    ]


class _RecurrentState(C.Structure):
    _fields_ = [("pos", C.c_int32), ("row", C.c_uint32), ("rollback", C.c_uint32), ("n_older", C.c_uint32)]


class _Dsv4CompressorParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("ratio", C.c_uint32),
        ("kv_size", C.c_uint32),
        ("layers", C.POINTER(C.c_uint32)),
        ("n_layer", C.c_uint32),
        ("type_k", C.c_int32),
        ("n_embd_k", C.c_uint32),
        ("state_size", C.c_uint32),
        ("n_embd_state", C.c_uint32),
        ("reserved", C.c_uint32),
        ("k", C.POINTER(C.c_void_p)),
        ("kv", C.POINTER(C.c_void_p)),
        ("score", C.POINTER(C.c_void_p)),
    ]


class _Dsv4Params(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("csa", C.POINTER(_Dsv4CompressorParams)),
        ("hca", C.POINTER(_Dsv4CompressorParams)),
        ("lid", C.POINTER(_Dsv4CompressorParams)),
        ("devices", C.POINTER(C.c_int32)),
        ("n_device", C.c_uint32),
        ("n_rs_seq", C.c_uint32),
    ]


class _SectionParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kind", C.c_uint32),
        ("reserved", C.c_uint32),
        ("kv", C.POINTER(_KvParams)),
        ("recurrent", C.POINTER(_RecurrentParams)),
        ("dsv4", C.POINTER(_Dsv4Params)),
    ]


_ShiftCallback = C.CFUNCTYPE(
    C.c_int32, C.c_void_p, C.c_uint32, C.c_uint32, C.POINTER(C.c_uint32), C.POINTER(C.c_int32), C.c_size_t
)


class _ContextParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_seq_max", C.c_uint32),
        ("unified", C.c_uint32),
        ("sections", C.POINTER(_SectionParams)),
        ("n_section", C.c_uint32),
        ("legacy_rotation", C.c_uint32),
        ("arch", C.c_char_p),
        ("shift", _ShiftCallback),
        ("shift_user_data", C.c_void_p),
        ("shift_by_engine", C.c_uint32),
        ("max_masked_cells", C.c_uint32),
        ("unsynced_files", C.c_uint32),
        ("convert_types", C.c_uint32),
        ("n_staging", C.c_uint32),
        ("staging_size", C.c_uint64),
    ]


class _Ubatch(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_tokens", C.c_uint32),
        ("reserved", C.c_uint32),
        ("pos", C.POINTER(C.c_int32)),
        ("n_seq_id", C.POINTER(C.c_int32)),
        ("seq_id", C.POINTER(C.POINTER(C.c_int32))),
        ("token", C.POINTER(C.c_int32)),
        ("x", C.POINTER(C.c_int32)),
        ("y", C.POINTER(C.c_int32)),
    ]


class _Plane(C.Structure):
    _fields_ = [
        ("tensor", C.c_void_p),
        ("data", C.c_void_p),
        ("device", C.c_int32),
        ("ggml_type", C.c_int32),
        ("n_embd", C.c_uint32),
        ("reserved", C.c_uint32),
        ("cell_stride", C.c_uint64),
        ("channel_stride", C.c_uint64),
    ]


_ProgressCallback = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_uint64, C.c_uint64)


class _TransferParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_threads", C.c_uint32),
        ("reserved", C.c_uint32),
        ("progress", _ProgressCallback),
        ("progress_user_data", C.c_void_p),
    ]


class _MemoryUsage(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kv_host", C.c_uint64),
        ("kv_device", C.c_uint64),
        ("on_device_states_host", C.c_uint64),
        ("on_device_states_device", C.c_uint64),
        ("staging_pinned", C.c_uint64),
        ("staging_device", C.c_uint64),
    ]


# The library


def _load():
    path = os.environ.get("KVSTATE_LIB")
    if path is None:
        target = pathlib.Path(__file__).resolve().parents[2] / "target"
        found = [target / profile / "libkvstate.so" for profile in ("release", "debug")]
        found = [file for file in found if file.exists()]
        if not found:
            raise OSError("no libkvstate.so under target/: cargo build, or set KVSTATE_LIB")
        path = max(found, key=lambda file: file.stat().st_mtime)
    lib = C.CDLL(os.fspath(path))
    ctx, seq, pos, size, u32, i32, path = C.c_void_p, C.c_int32, C.c_int32, C.c_size_t, C.c_uint32, C.c_int32, C.c_char_p
    i32s, u32s, sizes = C.POINTER(i32), C.POINTER(u32), C.POINTER(size)
    u64, u64s, pointers = C.c_uint64, C.POINTER(C.c_uint64), C.POINTER(C.c_void_p)
    snapshot = job = pointer = C.c_void_p
    for name, result, *arguments in [
        ("kvs_last_error", C.c_char_p),
        ("kvs_last_status", i32),
        ("kvs_clear_last_error", None),
        ("kvs_version", u32),
        ("kvs_row_size", C.c_uint64, i32, u32),
        ("kvs_rope_params_init", i32, C.POINTER(_RopeParams), size),
        ("kvs_kv_layer_params_init", i32, C.POINTER(_LayerParams), size),
        ("kvs_kv_params_init", i32, C.POINTER(_KvParams), size),
        ("kvs_recurrent_layer_params_init", i32, C.POINTER(_RecurrentLayerParams), size),
        ("kvs_recurrent_params_init", i32, C.POINTER(_RecurrentParams), size),
        ("kvs_dsv4_compressor_params_init", i32, C.POINTER(_Dsv4CompressorParams), size),
        ("kvs_dsv4_params_init", i32, C.POINTER(_Dsv4Params), size),
        ("kvs_section_params_init", i32, C.POINTER(_SectionParams), size),
        ("kvs_context_params_init", i32, C.POINTER(_ContextParams), size),
        ("kvs_ubatch_init", i32, C.POINTER(_Ubatch), size),
        ("kvs_context_new", i32, C.POINTER(_ContextParams), C.POINTER(ctx)),
        ("kvs_context_free", None, ctx),
        ("kvs_n_stream", u32, ctx),
        ("kvs_slot_prepare", i32, ctx, C.POINTER(_Ubatch), C.POINTER(C.c_void_p)),
        ("kvs_slot_cells", i32, C.c_void_p, u32, u32s, size),
        ("kvs_slot_commit", i32, ctx, C.c_void_p),
        ("kvs_slot_free", None, C.c_void_p),
        ("kvs_kv_plane", i32, ctx, u32, u32, u32, C.POINTER(_Plane), C.POINTER(_Plane)),
        ("kvs_get_memory", ctx, ctx),
        ("kvs_memory_clear", None, ctx, C.c_bool),
        ("kvs_memory_seq_rm", C.c_bool, ctx, seq, pos, pos),
        ("kvs_memory_can_seq_rm", C.c_bool, ctx, seq, pos, pos),
        ("kvs_memory_max_cut", i32, ctx, seq),
        ("kvs_memory_seq_cp", None, ctx, seq, seq, pos, pos),
        ("kvs_memory_seq_keep", None, ctx, seq),
        ("kvs_memory_seq_add", None, ctx, seq, pos, pos, pos),
        ("kvs_memory_seq_div", None, ctx, seq, pos, pos, i32),
        ("kvs_memory_seq_pos_min", pos, ctx, seq),
        ("kvs_memory_seq_pos_max", pos, ctx, seq),
        ("kvs_memory_can_shift", C.c_bool, ctx),
        ("kvs_shift_apply", i32, ctx),
        ("kvs_state_get_size", size, ctx),
        ("kvs_state_get_data", size, ctx, C.c_void_p, size),
        ("kvs_state_set_data", size, ctx, C.c_void_p, size),
        ("kvs_state_save_file", C.c_bool, ctx, path, i32s, size),
        ("kvs_state_load_file", C.c_bool, ctx, path, i32s, size, sizes),
        ("kvs_state_seq_get_size_ext", size, ctx, seq, u32),
        ("kvs_state_seq_get_data_ext", size, ctx, C.c_void_p, size, seq, u32),
        ("kvs_state_seq_set_data_ext", size, ctx, C.c_void_p, size, seq, u32),
        ("kvs_state_seq_save_file", size, ctx, path, seq, i32s, size),
        ("kvs_state_seq_load_file", size, ctx, path, seq, i32s, size, sizes),
        ("kvs_transfer_params_init", i32, C.POINTER(_TransferParams), size),
        ("kvs_memory_usage_init", i32, C.POINTER(_MemoryUsage), size),
        ("kvs_memory_usage_get", i32, ctx, C.POINTER(_MemoryUsage)),
        ("kvs_device_check", i32, i32),
        ("kvs_stream_set", i32, ctx, i32, pointer),
        ("kvs_stream_clear", i32, ctx, i32),
        ("kvs_pinned_alloc", i32, i32, size, pointers),
        ("kvs_pinned_free", i32, pointer),
        ("kvs_kv_get", i32, ctx, u32, u32, u32, C.c_int, u64, pointer, size),
        ("kvs_kv_set", i32, ctx, u32, u32, u32, C.c_int, u64, pointer, size),
        ("kvs_section_kind", u32, ctx, u32),
        ("kvs_recurrent_state_get", i32, ctx, u32, seq, C.POINTER(_RecurrentState)),
        ("kvs_recurrent_get", i32, ctx, u32, u32, u32, u64, pointer, size),
        ("kvs_recurrent_set", i32, ctx, u32, u32, u32, u64, pointer, size),
        ("kvs_dsv4_get", i32, ctx, u32, u32, u32, u32, u32, u64, pointer, size),
        ("kvs_dsv4_set", i32, ctx, u32, u32, u32, u32, u32, u64, pointer, size),
        ("kvs_snapshot_take", i32, ctx, seq, u32, pointers),
        ("kvs_snapshot_free", None, snapshot),
        ("kvs_snapshot_size", size, snapshot),
        ("kvs_snapshot_device_size", size, snapshot),
        ("kvs_snapshot_restore", i32, ctx, snapshot, seq),
        ("kvs_snapshot_get_data", size, snapshot, pointer, size),
        ("kvs_snapshot_save_file", size, snapshot, path, i32s, size),
        ("kvs_snapshot_get_data_start", i32, snapshot, pointer, size, C.POINTER(_TransferParams), pointers),
        ("kvs_snapshot_save_file_start", i32, snapshot, path, i32s, size, C.POINTER(_TransferParams), pointers),
        ("kvs_job_poll", i32, job),
        ("kvs_job_progress", i32, job, u64s, u64s),
        ("kvs_job_cancel", i32, job),
        ("kvs_job_wait", i32, job, sizes),
        ("kvs_job_free", None, job),
    ]:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


_lib = _load()


def _check(ok):
    if not ok:
        raise KvsError


def _checked(status):
    _check(status == 0)


def _init(struct, init, **fields):
    value = struct()
    _checked(init(C.byref(value), C.sizeof(value)))
    for name, field in fields.items():
        setattr(value, name, field)
    return value


def _pointer(buffer):
    """Address and size of a bytes-like object, and what keeps it alive."""
    if isinstance(buffer, bytes):
        return C.cast(buffer, C.c_void_p), len(buffer), buffer
    view = memoryview(buffer).cast("B")
    if view.readonly:
        copy = bytes(view)
        return C.cast(copy, C.c_void_p), len(copy), copy
    array = (C.c_uint8 * len(view)).from_buffer(view)
    return C.cast(array, C.c_void_p), len(view), array


def _i32s(values):
    values = list(values)
    return (C.c_int32 * len(values))(*values)


def row_size(ggml_type, n):
    """Bytes of n elements of a ggml type; 0: no whole number of its blocks."""
    return _lib.kvs_row_size(ggml_type, n)


def device_check(device):
    """Raises if the CUDA device cannot be used, with the reason."""
    _checked(_lib.kvs_device_check(device))


class Layer:
    """K and V of a layer; n_embd_v 0: no V; rope: fields of kvs_rope_params as a dict, if kvstate rotates K;
    device: the number of a CUDA device, or DEVICE_HOST."""

    def __init__(self, n_embd_k, n_embd_v, type_k=TYPE_F16, type_v=TYPE_F16, rope=None, device=DEVICE_HOST):
        self.fields = dict(n_embd_k_gqa=n_embd_k, n_embd_v_gqa=n_embd_v, type_k=type_k, type_v=type_v, device=device)
        if rope is not None:
            rope = dict(rope)
            if "freq_factors" in rope:
                rope["freq_factors"] = (C.c_float * len(rope["freq_factors"]))(*rope["freq_factors"])
            self.fields["rope"] = C.pointer(_init(_RopeParams, _lib.kvs_rope_params_init, **rope))


class Kv:
    """An attention cache; fields are those of kvs_kv_params (swa_type, n_swa, v_trans, mirrors, ...)."""

    def __init__(self, kv_size, layers, **fields):
        self.kv_size, self.layers, self.fields = kv_size, list(layers), fields

    def _describe(self, section):
        layers = _structs(_LayerParams, _lib.kvs_kv_layer_params_init, self.layers)
        section.kv = C.pointer(_init(_KvParams, _lib.kvs_kv_params_init, kv_size=self.kv_size, layers=layers,
                                     n_layer=len(layers), **self.fields))  # fmt: skip


class RecurrentLayer:
    """R and S of a layer, None: the layer has none, and P beside R; fields: type_r, type_s, device."""

    def __init__(self, n_embd_r=None, n_embd_s=None, n_embd_p=0, **fields):
        self.fields = dict(has_r=n_embd_r is not None, n_embd_r=n_embd_r or 0, has_s=n_embd_s is not None,
                           n_embd_s=n_embd_s or 0, n_embd_p=n_embd_p, **fields)  # fmt: skip


class Recurrent:
    """Recurrent states: every layer of the model, also those without one, and the number of rollback planes."""

    def __init__(self, layers, n_rs_seq=0):
        self.layers, self.n_rs_seq = list(layers), n_rs_seq

    def _describe(self, section):
        section.kind = SECTION_RECURRENT
        layers = _structs(_RecurrentLayerParams, _lib.kvs_recurrent_layer_params_init, self.layers)
        section.recurrent = C.pointer(_init(_RecurrentParams, _lib.kvs_recurrent_params_init, layers=layers,
                                            n_layer=len(layers), n_rs_seq=self.n_rs_seq))  # fmt: skip


class Shared:
    """Layers of a draft that read the cells of the target's cache."""

    def _describe(self, section):
        section.kind = SECTION_SHARED


class Dsv4:
    """The compressed half of a DSV4 memory: three dicts of the fields of kvs_dsv4_compressor_params, layers as a list."""

    def __init__(self, csa, hca, lid, n_rs_seq=0, devices=()):
        self.compressors, self.n_rs_seq, self.devices = dict(csa=csa, hca=hca, lid=lid), n_rs_seq, _i32s(devices)

    def _describe(self, section):
        section.kind = SECTION_DSV4
        described = {}
        for name, fields in self.compressors.items():
            layers = (C.c_uint32 * len(fields["layers"]))(*fields["layers"])
            fields = dict(fields, layers=layers, n_layer=len(layers))
            described[name] = C.pointer(
                _init(_Dsv4CompressorParams, _lib.kvs_dsv4_compressor_params_init, **fields)
            )
        devices = dict(devices=self.devices, n_device=len(self.devices)) if len(self.devices) else {}
        section.dsv4 = C.pointer(_init(_Dsv4Params, _lib.kvs_dsv4_params_init, n_rs_seq=self.n_rs_seq, **devices,
                                       **described))  # fmt: skip


def _structs(struct, init, described):
    values = (struct * len(described))()
    for i, one in enumerate(described):
        values[i] = _init(struct, init, **one.fields)
    return values


class Context:
    """The KV cache of a model's sequences, in memory that kvstate allocates.

    sections: Kv, Recurrent, Shared and Dsv4 in write order, see kvs_context_params; shift(section, stream, cells, shifts), if given, rotates K.
    """

    def __init__(self, sections, n_seq_max=1, unified=True, arch="", shift=None, **fields):
        self._ctx = None
        self.sections = list(sections)
        # What a struct points to is kept by ctypes, as long as the struct is.
        structs = (_SectionParams * len(self.sections))()
        for struct, section in zip(structs, self.sections):
            _checked(_lib.kvs_section_params_init(C.byref(struct), C.sizeof(struct)))
            section._describe(struct)
        params = _init(_ContextParams, _lib.kvs_context_params_init, n_seq_max=n_seq_max, unified=unified,
                       sections=structs, n_section=len(structs), arch=arch.encode(), **fields)  # fmt: skip
        if shift is not None:
            self._shift = params.shift = _ShiftCallback(_shift_callback(shift))
        ctx = C.c_void_p()
        _checked(_lib.kvs_context_new(C.byref(params), C.byref(ctx)))
        self._ctx = ctx
        self._mem = _lib.kvs_get_memory(ctx)

    def close(self):
        """Frees the context; the views of its planes must not be used afterwards."""
        ctx, self._ctx, self._mem = self._ctx, None, None
        _lib.kvs_context_free(ctx)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._ctx is not None:
            self.close()

    # Cells and planes

    def decode(self, pos, seq_id=0):
        """Gives cells to tokens of a sequence at the positions pos; returns the cells of each section: none in shared and
        DSV4 sections, in a recurrent one that of the sequence.

        Write K and V of the tokens into them next.
        """
        pos, seq_ids = _i32s(pos), _i32s([seq_id])
        lists = (C.POINTER(C.c_int32) * len(pos))(*[seq_ids] * len(pos))
        ubatch = _init(_Ubatch, _lib.kvs_ubatch_init, n_tokens=len(pos), pos=pos, seq_id=lists)
        slot = C.c_void_p()
        _checked(_lib.kvs_slot_prepare(self._ctx, C.byref(ubatch), C.byref(slot)))
        try:
            _checked(_lib.kvs_slot_commit(self._ctx, slot))
            cells = [
                (C.c_uint32 * (len(pos) if isinstance(section, (Kv, Recurrent)) else 0))()
                for section in self.sections
            ]
            for section, found in enumerate(cells):
                _checked(_lib.kvs_slot_cells(slot, section, found, len(found)))
            return [list(found) for found in cells]
        finally:
            _lib.kvs_slot_free(slot)

    def planes(self, section, layer, stream=0):
        """K and V of a layer as bytes: [cell][byte of the row], or [channel][cell][byte] for transposed V.

        numpy views of uint8 if numpy can be imported, else arrays of ctypes. V is None if the layer has none. Of a layer
        on a device there are no views, only kv_get and kv_set.
        """
        k, v = _Plane(), _Plane()
        _checked(_lib.kvs_kv_plane(self._ctx, section, stream, layer, C.byref(k), C.byref(v)))
        if k.device != DEVICE_HOST:
            raise TypeError(f"layer {layer} is on device {k.device}, which the host cannot read: kv_get, kv_set")
        kv_size = self.sections[section].kv_size
        return _view(k, kv_size), _view(v, kv_size) if v.data else None

    def kv_get(self, section, layer, which, offset, size, stream=0):
        """size bytes of K or V (KV_K, KV_V) of a layer from offset on, wherever they are."""
        data = bytearray(size)
        pointer, size, _alive = _pointer(data)
        _checked(_lib.kvs_kv_get(self._ctx, section, stream, layer, which, offset, pointer, size))
        return bytes(data)

    def kv_set(self, section, layer, which, offset, data, stream=0):
        """Writes bytes into K or V of a layer from offset on."""
        pointer, size, _alive = _pointer(data)
        _checked(_lib.kvs_kv_set(self._ctx, section, stream, layer, which, offset, pointer, size))

    def section_kind(self, section):
        kind = _lib.kvs_section_kind(self._ctx, section)
        _check(kind)
        return kind

    def recurrent_state(self, section, seq_id):
        """Where the state of a sequence is, by the names of kvs_recurrent_state; None: there is none."""
        state = _RecurrentState()
        _checked(_lib.kvs_recurrent_state_get(self._ctx, section, seq_id, C.byref(state)))
        return {name: getattr(state, name) for name, _ in state._fields_} if state.pos >= 0 else None

    def recurrent_get(self, section, layer, which, offset, size):
        """size bytes of R, P or S (RECURRENT_*) of a layer from offset on, wherever they are."""
        data = bytearray(size)
        pointer, size, _alive = _pointer(data)
        _checked(_lib.kvs_recurrent_get(self._ctx, section, layer, which, offset, pointer, size))
        return bytes(data)

    def recurrent_set(self, section, layer, which, offset, data):
        """Writes bytes into R, P or S of a layer from offset on."""
        pointer, size, _alive = _pointer(data)
        _checked(_lib.kvs_recurrent_set(self._ctx, section, layer, which, offset, pointer, size))

    def dsv4_get(self, compressor, which, layer, offset, size, stream=0, rollback=0):
        """size bytes of a tensor (DSV4_CSA..., DSV4_K...) of a layer of the compressed half from offset on."""
        data = bytearray(size)
        pointer, size, _alive = _pointer(data)
        _checked(_lib.kvs_dsv4_get(self._ctx, compressor, which, layer, stream, rollback, offset, pointer, size))
        return bytes(data)

    def dsv4_set(self, compressor, which, layer, offset, data, stream=0, rollback=0):
        """Writes bytes into a tensor of a layer of the compressed half from offset on."""
        pointer, size, _alive = _pointer(data)
        _checked(_lib.kvs_dsv4_set(self._ctx, compressor, which, layer, stream, rollback, offset, pointer, size))

    # Devices

    def set_stream(self, device, stream):
        """Names the stream (its address, as torch.cuda.Stream.cuda_stream has it) of the work on a device; None: none."""
        if stream is None:
            _checked(_lib.kvs_stream_clear(self._ctx, device))
        else:
            _checked(_lib.kvs_stream_set(self._ctx, device, stream))

    def memory_usage(self):
        """Bytes of memory taken, by the names of kvs_memory_usage."""
        usage = _init(_MemoryUsage, _lib.kvs_memory_usage_init)
        _checked(_lib.kvs_memory_usage_get(self._ctx, C.byref(usage)))
        return {name: getattr(usage, name) for name, _ in usage._fields_[1:]}

    # Memory

    def clear(self, data=True):
        _lib.kvs_memory_clear(self._mem, data)

    def seq_rm(self, seq_id, p0=-1, p1=-1):
        """False if a section cannot remove just that range."""
        return _by_status(_lib.kvs_memory_seq_rm, self._mem, seq_id, p0, p1)

    def can_seq_rm(self, seq_id, p0=-1, p1=-1):
        return _by_status(_lib.kvs_memory_can_seq_rm, self._mem, seq_id, p0, p1)

    def max_cut(self, seq_id):
        """Positions that can be cut off the end so that the recurrent state is there; INT32_MAX: any number."""
        return _by_status(_lib.kvs_memory_max_cut, self._mem, seq_id)

    def seq_cp(self, src, dst, p0=-1, p1=-1):
        _by_status(_lib.kvs_memory_seq_cp, self._mem, src, dst, p0, p1)

    def seq_keep(self, seq_id):
        _by_status(_lib.kvs_memory_seq_keep, self._mem, seq_id)

    def seq_add(self, seq_id, p0, p1, delta):
        _by_status(_lib.kvs_memory_seq_add, self._mem, seq_id, p0, p1, delta)

    def seq_div(self, seq_id, p0, p1, d):
        _by_status(_lib.kvs_memory_seq_div, self._mem, seq_id, p0, p1, d)

    def seq_pos_min(self, seq_id):
        return _lib.kvs_memory_seq_pos_min(self._mem, seq_id)

    def seq_pos_max(self, seq_id):
        return _lib.kvs_memory_seq_pos_max(self._mem, seq_id)

    def can_shift(self):
        return _lib.kvs_memory_can_shift(self._mem)

    def shift_apply(self):
        """Rotates K of cells whose position was changed, before a decode."""
        _checked(_lib.kvs_shift_apply(self._ctx))

    # States

    def state_seq_get_size(self, seq_id, flags=FLAGS_NONE):
        size = _lib.kvs_state_seq_get_size_ext(self._ctx, seq_id, flags)
        _check(size)
        return size

    def state_seq_get_data(self, seq_id, flags=FLAGS_NONE):
        """The state of a sequence, as bytes."""
        data = bytearray(self.state_seq_get_size(seq_id, flags))
        return bytes(data[: self.state_seq_get_data_into(data, seq_id, flags)])

    def state_seq_get_data_into(self, buffer, seq_id, flags=FLAGS_NONE):
        """Writes the state into a writable buffer; returns its size."""
        if memoryview(buffer).readonly:
            raise TypeError("the buffer is read-only")
        data, size, _alive = _pointer(buffer)
        written = _lib.kvs_state_seq_get_data_ext(self._ctx, data, size, seq_id, flags)
        _check(written)
        return written

    def state_seq_set_data(self, state, seq_id, flags=FLAGS_NONE):
        """Replaces a sequence by a state; returns the bytes consumed."""
        data, size, _alive = _pointer(state)
        consumed = _lib.kvs_state_seq_set_data_ext(self._ctx, data, size, seq_id, flags)
        _check(consumed)
        return consumed

    def state_seq_save_file(self, path, seq_id, tokens=()):
        """Writes a sequence and its tokens to a file; returns the size of the file."""
        tokens = _i32s(tokens)
        size = _lib.kvs_state_seq_save_file(self._ctx, os.fsencode(path), seq_id, tokens, len(tokens))
        _check(size)
        return size

    def state_seq_load_file(self, path, seq_id, n_token_capacity=1 << 20):
        """Replaces a sequence by the one in a file; returns its tokens and the bytes read."""
        tokens, n = (C.c_int32 * max(1, n_token_capacity))(), C.c_size_t()
        size = _lib.kvs_state_seq_load_file(self._ctx, os.fsencode(path), seq_id, tokens, n_token_capacity, C.byref(n))
        _check(size)
        return tokens[: n.value], size

    def state_get_data(self):
        """The state of the whole context, as bytes."""
        size = _lib.kvs_state_get_size(self._ctx)
        _check(size)
        data = bytearray(size)
        pointer, size, _alive = _pointer(data)
        written = _lib.kvs_state_get_data(self._ctx, pointer, size)
        _check(written)
        return bytes(data[:written])

    def state_set_data(self, state):
        """Replaces all sequences; returns the bytes consumed."""
        data, size, _alive = _pointer(state)
        consumed = _lib.kvs_state_set_data(self._ctx, data, size)
        _check(consumed)
        return consumed


    # Snapshots

    def snapshot(self, seq_id=-1, flags=FLAGS_NONE):
        """The state of a sequence, or by default of the whole context, copied where the cache is."""
        snapshot = C.c_void_p()
        _checked(_lib.kvs_snapshot_take(self._ctx, seq_id, flags, C.byref(snapshot)))
        return Snapshot(snapshot)

    def restore(self, snapshot, seq_id=-1):
        """Replaces a sequence, or by default all of them, by what a snapshot holds."""
        _checked(_lib.kvs_snapshot_restore(self._ctx, snapshot._snapshot, seq_id))


class Snapshot:
    """A state as it was when Context.snapshot took it; it outlives its context."""

    def __init__(self, snapshot):
        self._snapshot = snapshot

    def close(self):
        """Frees its memory; jobs go on."""
        snapshot, self._snapshot = self._snapshot, None
        _lib.kvs_snapshot_free(snapshot)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._snapshot is not None:
            self.close()

    @property
    def size(self):
        """Bytes of the state."""
        size = _lib.kvs_snapshot_size(self._snapshot)
        _check(size)
        return size

    @property
    def device_size(self):
        """Bytes of it in the memory of devices."""
        return _lib.kvs_snapshot_device_size(self._snapshot)

    def get_data(self):
        """The state, as bytes."""
        data = bytearray(self.size)
        pointer, size, _alive = _pointer(data)
        _check(_lib.kvs_snapshot_get_data(self._snapshot, pointer, size))
        return bytes(data)

    def save_file(self, path, tokens=()):
        """Writes the state and tokens to a file; returns the size of the file."""
        tokens = _i32s(tokens)
        size = _lib.kvs_snapshot_save_file(self._snapshot, os.fsencode(path), tokens, len(tokens))
        _check(size)
        return size

    def get_data_start(self, buffer, progress=None):
        """Begins to write the state into a writable buffer, which is the job's until it has ended; returns a Job.

        progress(done, total) runs on the job's thread; what it returns cancels the job unless it is None or 0.
        """
        if memoryview(buffer).readonly:
            raise TypeError("the buffer is read-only")
        data, size, alive = _pointer(buffer)
        return Job(alive, progress, _lib.kvs_snapshot_get_data_start, self._snapshot, data, size)

    def save_file_start(self, path, tokens=(), progress=None):
        """Begins to write the state and tokens to a file; returns a Job. progress: as for get_data_start."""
        tokens = _i32s(tokens)
        start = _lib.kvs_snapshot_save_file_start
        return Job(None, progress, start, self._snapshot, os.fsencode(path), tokens, len(tokens))


class Job:
    """A save in the background. Closed, or gone, before it has ended, it is cancelled and waited for."""

    def __init__(self, alive, progress, start, *arguments):
        self._job = None
        params = _init(_TransferParams, _lib.kvs_transfer_params_init)
        if progress is not None:
            params.progress = _ProgressCallback(_progress_callback(progress))
        self._alive = alive, params
        job = C.c_void_p()
        _checked(start(*arguments, C.byref(params), C.byref(job)))
        self._job = job

    def close(self):
        job, self._job = self._job, None
        _lib.kvs_job_free(job)
        self._alive = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._job is not None:
            self.close()

    def poll(self):
        """Whether it has ended, well or not."""
        ended = _lib.kvs_job_poll(self._job)
        _check(ended >= 0)
        return ended == 1

    def wait(self):
        """Waits for its end, once; returns the bytes written, or raises what the save failed with."""
        size = C.c_size_t()
        _checked(_lib.kvs_job_wait(self._job, C.byref(size)))
        return size.value

    def cancel(self):
        _checked(_lib.kvs_job_cancel(self._job))

    def progress(self):
        """Bytes done, and bytes in all."""
        done, total = C.c_uint64(), C.c_uint64()
        _checked(_lib.kvs_job_progress(self._job, C.byref(done), C.byref(total)))
        return done.value, total.value


_WRITABLE = 0x200
_memory_view = C.pythonapi.PyMemoryView_FromMemory
_memory_view.restype, _memory_view.argtypes = C.py_object, (C.c_void_p, C.c_ssize_t, C.c_int)


class PinnedBuffer:
    """Pinned host memory, zeroed: states of devices go there, and come from there, without another copy.

    buffer is a writable memoryview, not to be used after close, or when this object has gone.
    """

    def __init__(self, size, device=0):
        self._ptr = None
        ptr = C.c_void_p()
        _checked(_lib.kvs_pinned_alloc(device, size, C.byref(ptr)))
        self._ptr = ptr
        self.buffer = _memory_view(ptr, size, _WRITABLE)

    def close(self):
        """Frees the memory; views of it must not be used afterwards."""
        ptr, self._ptr, self.buffer = self._ptr, None, None
        _checked(_lib.kvs_pinned_free(ptr))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if self._ptr is not None:
            self.close()


def _progress_callback(progress):
    """What ctypes calls, on the job's thread. An exception is printed, and cancels the job."""

    def call(_, done, total):
        try:
            return progress(done, total) or 0
        except Exception:
            traceback.print_exc()
            return -1

    return call


def _shift_callback(shift):
    """What ctypes calls. An exception must not be taken for success: it is printed, and the save fails."""

    def call(_, section, stream, cells, shifts, n):
        try:
            return shift(section, stream, cells[:n], shifts[:n]) or 0
        except Exception:
            traceback.print_exc()
            return -1

    return call


def _by_status(call, *arguments):
    """Runs a call of which only the thread's last status tells whether it failed."""
    _lib.kvs_clear_last_error()
    result = call(*arguments)
    _check(_lib.kvs_last_status() == 0)
    return result


def _view(plane, kv_size):
    if plane.channel_stride:
        size = row_size(plane.ggml_type, 1)
        shape, strides = (plane.n_embd, kv_size, size), (plane.channel_stride, plane.cell_stride, 1)
    else:
        size = row_size(plane.ggml_type, plane.n_embd)
        shape, strides = (kv_size, size), (plane.cell_stride, 1)
    span = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1
    if numpy is not None:
        memory = (C.c_uint8 * span).from_address(plane.data)
        return numpy.lib.stride_tricks.as_strided(numpy.frombuffer(memory, numpy.uint8), shape, strides)
    row = C.c_uint8 * size
    if len(shape) == 2:
        return [row.from_address(plane.data + cell * strides[0]) for cell in range(kv_size)]
    return [
        [row.from_address(plane.data + channel * strides[0] + cell * strides[1]) for cell in range(kv_size)]
        for channel in range(shape[0])
    ]
