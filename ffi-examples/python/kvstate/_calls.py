"""Signatures of the calls of kvstate.h that the package uses."""

import ctypes as C
import operator

from . import _structs as S


def _integer(ctype, low, high):
    """An integer argument. ctypes cuts what is out of range, so that sequence 1 << 32 were sequence 0."""

    class Integer:
        @staticmethod
        def from_param(value):
            value = operator.index(value)
            if not low <= value <= high:
                raise OverflowError(f"{value} is out of range [{low}, {high}]")
            return ctype(value)

    return Integer


_i32 = _seq = _pos = _integer(C.c_int32, -(2**31), 2**31 - 1)
_u32 = _integer(C.c_uint32, 0, 2**32 - 1)
_i64 = _integer(C.c_int64, -(2**63), 2**63 - 1)
_u64 = _integer(C.c_uint64, 0, 2**64 - 1)
_size = _integer(C.c_size_t, 0, C.c_size_t(-1).value)
_handle = _pointer = C.c_void_p
_path = C.c_char_p
_i32s, _u32s, _i64s, _u64s = (C.POINTER(t) for t in (C.c_int32, C.c_uint32, C.c_int64, C.c_uint64))
_sizes, _pointers = C.POINTER(C.c_size_t), C.POINTER(C.c_void_p)
_status = C.c_int32


def _of(struct):
    return C.POINTER(struct)


_CALLS = [
    ("kvs_last_error", C.c_char_p),
    ("kvs_last_status", _status),
    ("kvs_clear_last_error", None),
    ("kvs_row_size", C.c_uint64, _i32, _u32),
    # Contexts, cells and planes
    ("kvs_context_new", _status, _of(S.ContextParams), _pointers),
    ("kvs_context_free", None, _handle),
    ("kvs_slot_prepare", _status, _handle, _of(S.Ubatch), _pointers),
    ("kvs_slot_cells", _status, _handle, _u32, _u32s, _size),
    ("kvs_slot_commit", _status, _handle, _handle),
    ("kvs_slot_free", None, _handle),
    ("kvs_kv_plane", _status, _handle, _u32, _u32, _u32, _of(S.Plane), _of(S.Plane)),
    ("kvs_kv_get", _status, _handle, _u32, _u32, _u32, _i32, _u64, _pointer, _size),
    ("kvs_kv_set", _status, _handle, _u32, _u32, _u32, _i32, _u64, _pointer, _size),
    ("kvs_section_kind", C.c_uint32, _handle, _u32),
    ("kvs_recurrent_state_get", _status, _handle, _u32, _seq, _of(S.RecurrentState)),
    ("kvs_recurrent_get", _status, _handle, _u32, _u32, _u32, _u64, _pointer, _size),
    ("kvs_recurrent_set", _status, _handle, _u32, _u32, _u32, _u64, _pointer, _size),
    ("kvs_dsv4_get", _status, _handle, _u32, _u32, _u32, _u32, _u32, _u64, _pointer, _size),
    ("kvs_dsv4_set", _status, _handle, _u32, _u32, _u32, _u32, _u32, _u64, _pointer, _size),
    # Memory
    ("kvs_get_memory", _handle, _handle),
    ("kvs_memory_clear", None, _handle, C.c_bool),
    ("kvs_memory_seq_rm", C.c_bool, _handle, _seq, _pos, _pos),
    ("kvs_memory_can_seq_rm", C.c_bool, _handle, _seq, _pos, _pos),
    ("kvs_memory_max_cut", C.c_int32, _handle, _seq),
    ("kvs_memory_seq_cp", None, _handle, _seq, _seq, _pos, _pos),
    ("kvs_memory_seq_keep", None, _handle, _seq),
    ("kvs_memory_seq_add", None, _handle, _seq, _pos, _pos, _pos),
    ("kvs_memory_seq_div", None, _handle, _seq, _pos, _pos, _i32),
    ("kvs_memory_seq_pos_min", C.c_int32, _handle, _seq),
    ("kvs_memory_seq_pos_max", C.c_int32, _handle, _seq),
    ("kvs_memory_can_shift", C.c_bool, _handle),
    ("kvs_shift_apply", _status, _handle),
    ("kvs_memory_can_rewind", C.c_bool, _handle, _seq, _pos),
    ("kvs_memory_rewind_pos", C.c_int32, _handle, _seq, _pos),
    ("kvs_memory_rewind_obstacle", _status, _handle, _seq, _pos, _of(S.RewindObstacle)),
    # States
    ("kvs_state_get_size", C.c_size_t, _handle),
    ("kvs_state_get_data", C.c_size_t, _handle, _pointer, _size),
    ("kvs_state_set_data", C.c_size_t, _handle, _pointer, _size),
    ("kvs_state_seq_get_size_ext", C.c_size_t, _handle, _seq, _u32),
    ("kvs_state_seq_get_data_ext", C.c_size_t, _handle, _pointer, _size, _seq, _u32),
    ("kvs_state_seq_set_data_ext", C.c_size_t, _handle, _pointer, _size, _seq, _u32),
    ("kvs_state_seq_save_file", C.c_size_t, _handle, _path, _seq, _i32s, _size),
    ("kvs_state_seq_load_file", C.c_size_t, _handle, _path, _seq, _i32s, _size, _sizes),
    ("kvs_state_seq_get_size_range", C.c_size_t, _handle, _seq, _pos, _pos, _u32),
    ("kvs_state_seq_get_data_range", C.c_size_t, _handle, _pointer, _size, _seq, _pos, _pos, _u32),
    ("kvs_state_seq_save_file_range", C.c_size_t, _handle, _path, _seq, _pos, _pos, _i32s, _size),
    ("kvs_state_seq_load_file_range", C.c_size_t, _handle, _path, _seq, _pos, _pos, _u32, _i32s, _size, _sizes, _sizes),
    # Devices
    ("kvs_memory_usage_get", _status, _handle, _of(S.MemoryUsage)),
    ("kvs_device_check", _status, _i32),
    ("kvs_stream_set", _status, _handle, _i32, _pointer),
    ("kvs_stream_clear", _status, _handle, _i32),
    ("kvs_pinned_alloc", _status, _i32, _size, _pointers),
    ("kvs_pinned_free", _status, _pointer),
    # Snapshots and jobs
    ("kvs_snapshot_take", _status, _handle, _seq, _u32, _pointers),
    ("kvs_snapshot_free", None, _handle),
    ("kvs_snapshot_size", C.c_size_t, _handle),
    ("kvs_snapshot_device_size", C.c_size_t, _handle),
    ("kvs_snapshot_restore", _status, _handle, _handle, _seq),
    ("kvs_snapshot_get_data", C.c_size_t, _handle, _pointer, _size),
    ("kvs_snapshot_save_file", C.c_size_t, _handle, _path, _i32s, _size),
    ("kvs_snapshot_get_data_start", _status, _handle, _pointer, _size, _of(S.TransferParams), _pointers),
    ("kvs_snapshot_save_file_start", _status, _handle, _path, _i32s, _size, _of(S.TransferParams), _pointers),
    ("kvs_job_poll", C.c_int32, _handle),
    ("kvs_job_progress", _status, _handle, _u64s, _u64s),
    ("kvs_job_cancel", _status, _handle),
    ("kvs_job_wait", _status, _handle, _sizes),
    ("kvs_job_free", None, _handle),
    # Checkpoints
    ("kvs_checkpoints_new", _status, _seq, _of(S.CheckpointsParams), _pointers),
    ("kvs_checkpoints_free", None, _handle),
    ("kvs_checkpoints_take", _status, _handle, _handle, _i64),
    ("kvs_checkpoints_put", _status, _handle, _handle, _of(S.SlotCheckpoint)),
    ("kvs_checkpoints_get_data", C.c_size_t, _handle, _size, _pointer, _size),
    ("kvs_checkpoints_resume", _status, _handle, _handle, _pos, _i32s, _i64s),
    ("kvs_checkpoints_truncate", _status, _handle, _pos),
    ("kvs_checkpoints_count", C.c_size_t, _handle),
    ("kvs_checkpoints_size", C.c_size_t, _handle),
    ("kvs_checkpoints_get", _status, _handle, _size, _of(S.Checkpoint)),
    ("kvs_checkpoints_verdict", _status, _handle, _handle, _size, _pos, _of(S.CheckpointVerdict)),
    # Slot files
    ("kvs_fingerprint", _status, C.POINTER(C.c_char_p), _size, _of(S.Setting), _size, _pointer),
    ("kvs_slot_save", _status, _handle, _path, _seq, _of(S.SlotSaveParams), _sizes),
    ("kvs_slot_save_start", _status, _handle, _path, _seq, _of(S.SlotSaveParams), _of(S.TransferParams), _pointers),
    ("kvs_slot_load", _status, _handle, _path, _seq, _of(S.SlotLoadParams), _of(S.SlotResult)),
    ("kvs_slot_result_free", None, _of(S.SlotResult)),
    # Auto-save
    ("kvs_autosave_open", _status, _of(S.AutosaveParams), _pointers),
    ("kvs_autosave_free", None, _handle),
    ("kvs_autosave_note", C.c_char_p, _handle, _size),
    ("kvs_autosave_count", C.c_size_t, _handle),
    ("kvs_autosave_get", _status, _handle, _size, _of(S.AutosavedSlot)),
    ("kvs_autosave_mark", C.c_bool, _handle, _u32, _u64),
    ("kvs_autosave_is_dirty", C.c_bool, _handle, _u32),
    ("kvs_autosave_save", _status, _handle, _handle, _u32, _seq, _of(S.SlotSaveParams), _sizes),
    ("kvs_autosave_save_start", _status, _handle, _handle, _u32, _seq, _of(S.SlotSaveParams)),
    ("kvs_autosave_poll", C.c_int32, _handle, _u32),
    ("kvs_autosave_progress", _status, _handle, _u32, _u64s, _u64s),
    ("kvs_autosave_cancel", _status, _handle, _u32),
    ("kvs_autosave_wait", _status, _handle, _u32, _sizes),
    ("kvs_autosave_flush", _status, _handle),
    ("kvs_autosave_restore", _status, _handle, _handle, _u32, _seq, _of(S.SlotLoadParams), _of(S.SlotResult), _i32s),
    ("kvs_autosave_remove", _status, _handle, _u32),
]


def declare(lib):
    """Tells ctypes the types of the calls of a library, and of the init call of every struct that has one."""
    inits = [
        (f"{struct.c_name}_init", _status, _of(struct), _size)
        for struct in S.Struct.__subclasses__()
        if struct._fields_[0][0] == "struct_size"
    ]
    for name, result, *arguments in _CALLS + inits:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
