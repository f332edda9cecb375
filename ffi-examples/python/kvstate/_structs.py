"""Structs and callbacks of kvstate.h, field by field."""

import ctypes as C

REASON_SIZE = 160


class Struct(C.Structure):
    """c_name: what the header calls it. One that begins with struct_size has an init call of that name and _init."""


class RopeParams(Struct):
    c_name = "kvs_rope_params"
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


class LayerParams(Struct):
    c_name = "kvs_kv_layer_params"
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
        ("rope", C.POINTER(RopeParams)),
    ]


class KvParams(Struct):
    c_name = "kvs_kv_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kv_size", C.c_uint32),
        ("n_layer", C.c_uint32),
        ("layers", C.POINTER(LayerParams)),
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


class RecurrentLayerParams(Struct):
    c_name = "kvs_recurrent_layer_params"
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


class RecurrentParams(Struct):
    c_name = "kvs_recurrent_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_layer", C.c_uint32),
        ("n_rs_seq", C.c_uint32),
        ("layers", C.POINTER(RecurrentLayerParams)),
    ]


class RecurrentState(Struct):
    c_name = "kvs_recurrent_state"
    _fields_ = [("pos", C.c_int32), ("row", C.c_uint32), ("rollback", C.c_uint32), ("n_older", C.c_int32)]


class Dsv4CompressorParams(Struct):
    c_name = "kvs_dsv4_compressor_params"
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


class Dsv4Params(Struct):
    c_name = "kvs_dsv4_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("csa", C.POINTER(Dsv4CompressorParams)),
        ("hca", C.POINTER(Dsv4CompressorParams)),
        ("lid", C.POINTER(Dsv4CompressorParams)),
        ("devices", C.POINTER(C.c_int32)),
        ("n_device", C.c_uint32),
        ("n_rs_seq", C.c_uint32),
    ]


class SectionParams(Struct):
    c_name = "kvs_section_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kind", C.c_uint32),
        ("reserved", C.c_uint32),
        ("kv", C.POINTER(KvParams)),
        ("recurrent", C.POINTER(RecurrentParams)),
        ("dsv4", C.POINTER(Dsv4Params)),
    ]


ShiftCallback = C.CFUNCTYPE(
    C.c_int32, C.c_void_p, C.c_uint32, C.c_uint32, C.POINTER(C.c_uint32), C.POINTER(C.c_int32), C.c_size_t
)


class ContextParams(Struct):
    c_name = "kvs_context_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_seq_max", C.c_uint32),
        ("unified", C.c_uint32),
        ("sections", C.POINTER(SectionParams)),
        ("n_section", C.c_uint32),
        ("legacy_rotation", C.c_uint32),
        ("arch", C.c_char_p),
        ("shift", ShiftCallback),
        ("shift_user_data", C.c_void_p),
        ("shift_by_engine", C.c_uint32),
        ("max_masked_cells", C.c_uint32),
        ("unsynced_files", C.c_uint32),
        ("convert_types", C.c_uint32),
        ("n_staging", C.c_uint32),
        ("staging_size", C.c_uint64),
    ]


class Ubatch(Struct):
    c_name = "kvs_ubatch"
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


class Plane(Struct):
    c_name = "kvs_plane"
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


ProgressCallback = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_uint64, C.c_uint64)


class TransferParams(Struct):
    c_name = "kvs_transfer_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_threads", C.c_uint32),
        ("reserved", C.c_uint32),
        ("progress", ProgressCallback),
        ("progress_user_data", C.c_void_p),
    ]


class MemoryUsage(Struct):
    c_name = "kvs_memory_usage"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kv_host", C.c_uint64),
        ("kv_device", C.c_uint64),
        ("on_device_states_host", C.c_uint64),
        ("on_device_states_device", C.c_uint64),
        ("staging_pinned", C.c_uint64),
        ("staging_device", C.c_uint64),
    ]


class RewindObstacle(Struct):
    c_name = "kvs_rewind_obstacle"
    _fields_ = [
        ("kind", C.c_uint32),
        ("need_min", C.c_int32),
        ("need_max", C.c_int32),
        ("has_min", C.c_int32),
        ("has_max", C.c_int32),
        ("text", C.c_char * REASON_SIZE),
    ]


class CheckpointsParams(Struct):
    c_name = "kvs_checkpoints_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_max", C.c_uint32),
        ("min_step", C.c_uint32),
        ("max_bytes", C.c_uint64),
        ("memory", C.c_uint32),
        ("reserved", C.c_uint32),
    ]


class Checkpoint(Struct):
    c_name = "kvs_checkpoint"
    _fields_ = [("n_tokens", C.c_int64), ("size", C.c_uint64), ("pos_min", C.c_int32), ("pos_max", C.c_int32)]


class CheckpointVerdict(Struct):
    c_name = "kvs_checkpoint_verdict"
    _fields_ = [("kind", C.c_uint32), ("pos", C.c_int32), ("text", C.c_char * REASON_SIZE)]


class Setting(Struct):
    c_name = "kvs_setting"
    _fields_ = [("key", C.c_char_p), ("value", C.c_char_p)]


class SlotCheckpoint(Struct):
    c_name = "kvs_slot_checkpoint"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n_tokens", C.c_int64),
        ("pos_min", C.c_int32),
        ("pos_max", C.c_int32),
        ("target", C.c_void_p),
        ("target_size", C.c_size_t),
        ("draft", C.c_void_p),
        ("draft_size", C.c_size_t),
        ("driver", C.c_void_p),
        ("driver_size", C.c_size_t),
    ]


class SlotIdentity(Struct):
    c_name = "kvs_slot_identity"
    _fields_ = [
        ("model", C.c_void_p),
        ("model_size", C.c_size_t),
        ("salt", C.c_void_p),
        ("salt_size", C.c_size_t),
        ("metadata", C.c_void_p),
        ("metadata_size", C.c_size_t),
    ]


class SlotSaveParams(Struct):
    c_name = "kvs_slot_save_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("directory", C.c_char_p),
        ("tokens", C.POINTER(C.c_int32)),
        ("n_tokens", C.c_size_t),
        ("checkpoints", C.POINTER(SlotCheckpoint)),
        ("n_checkpoint", C.c_size_t),
        ("draft", C.c_void_p),
        ("draft_seq_id", C.c_int32),
        ("sidecar", C.c_uint32),
        ("driver", C.c_void_p),
        ("driver_size", C.c_size_t),
        ("identity", SlotIdentity),
    ]


class SlotLoadParams(Struct):
    c_name = "kvs_slot_load_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("directory", C.c_char_p),
        ("n_token_capacity", C.c_size_t),
        ("n_ctx_checkpoints", C.c_size_t),
        ("draft", C.c_void_p),
        ("draft_seq_id", C.c_int32),
        ("verify", C.c_int32),
        ("p1", C.c_int32),
        ("require", C.c_uint32),
        ("identity", SlotIdentity),
    ]


class SlotResult(Struct):
    c_name = "kvs_slot_result"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("tokens", C.POINTER(C.c_int32)),
        ("n_tokens", C.c_size_t),
        ("n_token_kept", C.c_size_t),
        ("pos_min", C.c_int32),
        ("pos_max", C.c_int32),
        ("target_size", C.c_uint64),
        ("append_start", C.c_uint64),
        ("checkpoints", C.POINTER(SlotCheckpoint)),
        ("n_checkpoint", C.c_size_t),
        ("n_checkpoint_in_file", C.c_size_t),
        ("draft", C.c_int32),
        ("verified", C.c_int32),
        ("draft_reason", C.c_char_p),
        ("draft_size", C.c_uint64),
        ("driver", C.c_void_p),
        ("driver_size", C.c_size_t),
        ("identity", SlotIdentity),
        ("notes", C.POINTER(C.c_char_p)),
        ("n_note", C.c_size_t),
        ("memory", C.c_void_p),
    ]


class AutosaveParams(Struct):
    c_name = "kvs_autosave_params"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("directory", C.c_char_p),
        ("max_bytes", C.c_uint64),
        ("every_n_tokens", C.c_uint64),
        ("unsynced_files", C.c_uint32),
        ("reserved", C.c_uint32),
    ]


class AutosavedSlot(Struct):
    c_name = "kvs_autosaved_slot"
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("slot_id", C.c_uint32),
        ("n_tokens", C.c_uint32),
        ("size", C.c_uint64),
        ("last_use_ms", C.c_uint64),
    ]
