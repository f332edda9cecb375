"""A context: cells, K and V, and states of sequences."""

import ctypes as C
import traceback
from typing import NamedTuple

from . import _structs as S
from ._handle import Handle
from ._library import by_status, c_string, check, checked, i32s, init, lib, path_bytes, pointer, text, writable
from .constants import DEVICE_HOST, FLAGS_NONE
from .sections import Kv, Recurrent, row_size
from .snapshots import Snapshot

try:
    import numpy
except ImportError:
    numpy = None


class RewindObstacle(NamedTuple):
    """Why a sequence cannot be rewound: kind is REWIND_*; positions that do not belong to it, or are none, are -1."""

    kind: int
    need_min: int
    need_max: int
    has_min: int
    has_max: int
    text: str


class LoadedRange(NamedTuple):
    """All tokens of a file, how many of them belong to what was restored, and the bytes up to the end of the state."""

    tokens: list
    n_token_kept: int
    size: int


class Context(Handle):
    """The KV cache of a model's sequences, in memory that kvstate allocates.

    sections: Kv, Recurrent, Shared and Dsv4 in write order; fields: others of kvs_context_params. shift(section, stream,
    cells, shifts), if given, rotates K. Once the context is closed the views of its planes must not be used.
    """

    def __init__(self, sections, n_seq_max=1, unified=True, arch="", shift=None, **fields):
        self.sections = list(sections)
        # What a struct points to is kept by ctypes, as long as the struct is.
        structs = (S.SectionParams * len(self.sections))()
        for struct, section in zip(structs, self.sections):
            checked(lib.kvs_section_params_init(C.byref(struct), C.sizeof(struct)))
            section._describe(struct)
        fields.update(n_seq_max=n_seq_max, unified=unified, sections=structs, n_section=len(structs), arch=c_string(arch))
        params = init(S.ContextParams, **fields)
        if shift is not None:
            self._shift = params.shift = S.ShiftCallback(_shift_callback(shift))
        ctx = C.c_void_p()
        checked(lib.kvs_context_new(C.byref(params), C.byref(ctx)))
        self._handle = ctx

    def _free(self, handle):
        lib.kvs_context_free(handle)

    @property
    def _mem(self):
        return lib.kvs_get_memory(self._handle)

    # Cells and planes

    def decode(self, pos, seq_id=0):
        """Gives cells to tokens of a sequence at the positions pos; returns the cells of each section: none in shared and
        DSV4 sections, in a recurrent one that of the sequence.

        Write K and V of the tokens into them next.
        """
        pos, seq_ids = i32s(pos), i32s([seq_id])
        lists = (C.POINTER(C.c_int32) * len(pos))(*[seq_ids] * len(pos))
        ubatch = init(S.Ubatch, n_tokens=len(pos), pos=pos, seq_id=lists)
        slot = C.c_void_p()
        checked(lib.kvs_slot_prepare(self._handle, C.byref(ubatch), C.byref(slot)))
        try:
            checked(lib.kvs_slot_commit(self._handle, slot))
            cells = [
                (C.c_uint32 * (len(pos) if isinstance(section, (Kv, Recurrent)) else 0))()
                for section in self.sections
            ]
            for section, found in enumerate(cells):
                checked(lib.kvs_slot_cells(slot, section, found, len(found)))
            return [list(found) for found in cells]
        finally:
            lib.kvs_slot_free(slot)

    def planes(self, section, layer, stream=0):
        """K and V of a layer as bytes: [cell][byte of the row], or [channel][cell][byte] for transposed V.

        numpy views of uint8 if numpy can be imported, else arrays of ctypes. V is None if the layer has none. Of a layer
        on a device there are no views, only kv_get and kv_set.
        """
        k, v = S.Plane(), S.Plane()
        checked(lib.kvs_kv_plane(self._handle, section, stream, layer, C.byref(k), C.byref(v)))
        if k.device != DEVICE_HOST:
            raise TypeError(f"layer {layer} is on device {k.device}, which the host cannot read: kv_get, kv_set")
        kv_size = self.sections[section].kv_size
        return _view(k, kv_size), _view(v, kv_size) if v.data else None

    def kv_get(self, section, layer, which, offset, size, stream=0):
        """size bytes of K or V (KV_K, KV_V) of a layer from offset on, wherever they are."""
        data = bytearray(size)
        address, size, _alive = pointer(data)
        checked(lib.kvs_kv_get(self._handle, section, stream, layer, which, offset, address, size))
        return bytes(data)

    def kv_set(self, section, layer, which, offset, data, stream=0):
        """Writes bytes into K or V of a layer from offset on."""
        address, size, _alive = pointer(data)
        checked(lib.kvs_kv_set(self._handle, section, stream, layer, which, offset, address, size))

    def section_kind(self, section):
        kind = lib.kvs_section_kind(self._handle, section)
        check(kind)
        return kind

    def recurrent_state(self, section, seq_id):
        """Where the state of a sequence is, by the names of kvs_recurrent_state; None: there is none."""
        state = S.RecurrentState()
        checked(lib.kvs_recurrent_state_get(self._handle, section, seq_id, C.byref(state)))
        return {name: getattr(state, name) for name, _ in state._fields_} if state.pos >= 0 else None

    def recurrent_get(self, section, layer, which, offset, size):
        """size bytes of R, P or S (RECURRENT_*) of a layer from offset on, wherever they are."""
        data = bytearray(size)
        address, size, _alive = pointer(data)
        checked(lib.kvs_recurrent_get(self._handle, section, layer, which, offset, address, size))
        return bytes(data)

    def recurrent_set(self, section, layer, which, offset, data):
        """Writes bytes into R, P or S of a layer from offset on."""
        address, size, _alive = pointer(data)
        checked(lib.kvs_recurrent_set(self._handle, section, layer, which, offset, address, size))

    def dsv4_get(self, compressor, which, layer, offset, size, stream=0, rollback=0):
        """size bytes of a tensor (DSV4_CSA..., DSV4_K...) of a layer of the compressed half from offset on."""
        data = bytearray(size)
        address, size, _alive = pointer(data)
        checked(lib.kvs_dsv4_get(self._handle, compressor, which, layer, stream, rollback, offset, address, size))
        return bytes(data)

    def dsv4_set(self, compressor, which, layer, offset, data, stream=0, rollback=0):
        """Writes bytes into a tensor of a layer of the compressed half from offset on."""
        address, size, _alive = pointer(data)
        checked(lib.kvs_dsv4_set(self._handle, compressor, which, layer, stream, rollback, offset, address, size))

    # Devices

    def set_stream(self, device, stream):
        """Names the stream (its address, as torch.cuda.Stream.cuda_stream has it) of the work on a device; None: none."""
        if stream is None:
            checked(lib.kvs_stream_clear(self._handle, device))
        else:
            checked(lib.kvs_stream_set(self._handle, device, stream))

    def memory_usage(self):
        """Bytes of memory taken, by the names of kvs_memory_usage."""
        usage = init(S.MemoryUsage)
        checked(lib.kvs_memory_usage_get(self._handle, C.byref(usage)))
        return {name: getattr(usage, name) for name, _ in usage._fields_[1:]}

    # Memory

    def clear(self, data=True):
        by_status(lib.kvs_memory_clear, self._mem, data)

    def seq_rm(self, seq_id, p0=-1, p1=-1):
        """False if a section cannot remove just that range."""
        return by_status(lib.kvs_memory_seq_rm, self._mem, seq_id, p0, p1)

    def can_seq_rm(self, seq_id, p0=-1, p1=-1):
        return by_status(lib.kvs_memory_can_seq_rm, self._mem, seq_id, p0, p1)

    def max_cut(self, seq_id):
        """Positions that can be cut off the end so that the recurrent state is there; INT32_MAX: any number."""
        return by_status(lib.kvs_memory_max_cut, self._mem, seq_id)

    def seq_cp(self, src, dst, p0=-1, p1=-1):
        by_status(lib.kvs_memory_seq_cp, self._mem, src, dst, p0, p1)

    def seq_keep(self, seq_id):
        by_status(lib.kvs_memory_seq_keep, self._mem, seq_id)

    def seq_add(self, seq_id, p0, p1, delta):
        by_status(lib.kvs_memory_seq_add, self._mem, seq_id, p0, p1, delta)

    def seq_div(self, seq_id, p0, p1, d):
        by_status(lib.kvs_memory_seq_div, self._mem, seq_id, p0, p1, d)

    def seq_pos_min(self, seq_id):
        """Smallest position of a sequence; -1: it is empty."""
        return by_status(lib.kvs_memory_seq_pos_min, self._mem, seq_id)

    def seq_pos_max(self, seq_id):
        """Largest position of a sequence; -1: it is empty."""
        return by_status(lib.kvs_memory_seq_pos_max, self._mem, seq_id)

    def can_shift(self):
        return by_status(lib.kvs_memory_can_shift, self._mem)

    def shift_apply(self):
        """Rotates K of cells whose position was changed, before a decode."""
        checked(lib.kvs_shift_apply(self._handle))

    # Where a sequence can go on

    def can_rewind(self, seq_id, pos):
        """Whether seq_rm(seq_id, pos) leaves a sequence that can go on at pos as in a fresh run."""
        return by_status(lib.kvs_memory_can_rewind, self._mem, seq_id, pos)

    def rewind_pos(self, seq_id, pos):
        """The largest position, at most pos, to which the sequence can be rewound; 0: all has to be computed anew."""
        return by_status(lib.kvs_memory_rewind_pos, self._mem, seq_id, pos)

    def rewind_obstacle(self, seq_id, pos):
        """Why a sequence cannot be rewound to pos, a RewindObstacle."""
        obstacle = S.RewindObstacle()
        checked(lib.kvs_memory_rewind_obstacle(self._mem, seq_id, pos, C.byref(obstacle)))
        return RewindObstacle(*(getattr(obstacle, name) for name, _ in obstacle._fields_[:-1]), text(obstacle.text))

    # States

    def state_seq_get_size(self, seq_id, flags=FLAGS_NONE):
        size = lib.kvs_state_seq_get_size_ext(self._handle, seq_id, flags)
        check(size)
        return size

    def state_seq_get_data(self, seq_id, flags=FLAGS_NONE):
        """The state of a sequence, as bytes."""
        data = bytearray(self.state_seq_get_size(seq_id, flags))
        self.state_seq_get_data_into(data, seq_id, flags)
        return bytes(data)

    def state_seq_get_data_into(self, buffer, seq_id, flags=FLAGS_NONE):
        """Writes the state into a writable buffer; returns its size."""
        address, size, _alive = writable(buffer)
        written = lib.kvs_state_seq_get_data_ext(self._handle, address, size, seq_id, flags)
        check(written)
        return written

    def state_seq_set_data(self, state, seq_id, flags=FLAGS_NONE):
        """Replaces a sequence by a state, or with FLAGS_APPEND adds it behind; returns the bytes consumed."""
        address, size, _alive = pointer(state)
        consumed = lib.kvs_state_seq_set_data_ext(self._handle, address, size, seq_id, flags)
        check(consumed)
        return consumed

    def state_seq_save_file(self, path, seq_id, tokens=()):
        """Writes a sequence and its tokens to a file; returns the size of the file."""
        tokens = i32s(tokens)
        size = lib.kvs_state_seq_save_file(self._handle, path_bytes(path), seq_id, tokens, len(tokens))
        check(size)
        return size

    def state_seq_load_file(self, path, seq_id, n_token_capacity=1 << 20):
        """Replaces a sequence by the one in a file; returns its tokens and the bytes read."""
        tokens, n = (C.c_int32 * max(1, n_token_capacity))(), C.c_size_t()
        size = lib.kvs_state_seq_load_file(self._handle, path_bytes(path), seq_id, tokens, n_token_capacity, C.byref(n))
        check(size)
        return tokens[: n.value], size

    def state_seq_get_size_range(self, seq_id, p0=-1, p1=-1, flags=FLAGS_NONE):
        size = lib.kvs_state_seq_get_size_range(self._handle, seq_id, p0, p1, flags)
        check(size)
        return size

    def state_seq_get_data_range(self, seq_id, p0=-1, p1=-1, flags=FLAGS_NONE):
        """The state of the positions p0 <= pos < p1 (-1: from 0, to the end), as bytes; FLAGS_APPEND adds it to others."""
        data = bytearray(self.state_seq_get_size_range(seq_id, p0, p1, flags))
        address, size, _alive = pointer(data)
        check(lib.kvs_state_seq_get_data_range(self._handle, address, size, seq_id, p0, p1, flags))
        return bytes(data)

    def state_seq_save_file_range(self, path, seq_id, p0=-1, p1=-1, tokens=()):
        """Writes the positions p0 <= pos < p1 and the tokens as they are to a file; returns the size of the file."""
        tokens = i32s(tokens)
        size = lib.kvs_state_seq_save_file_range(self._handle, path_bytes(path), seq_id, p0, p1, tokens, len(tokens))
        check(size)
        return size

    def state_seq_load_file_range(self, path, seq_id, p0=-1, p1=-1, flags=FLAGS_NONE, n_token_capacity=1 << 20):
        """Replaces a sequence by the positions p0 <= pos < p1 of a file, or with FLAGS_APPEND adds them; a LoadedRange.

        Raises STATUS_CANNOT_CUT where the sequence could not go on at p1.
        """
        tokens, n, n_kept = (C.c_int32 * max(1, n_token_capacity))(), C.c_size_t(), C.c_size_t()
        size = lib.kvs_state_seq_load_file_range(
            self._handle, path_bytes(path), seq_id, p0, p1, flags, tokens, n_token_capacity, C.byref(n), C.byref(n_kept)
        )
        check(size)
        return LoadedRange(tokens[: n.value], n_kept.value, size)

    def state_get_data(self):
        """The state of the whole context, as bytes."""
        size = lib.kvs_state_get_size(self._handle)
        check(size)
        data = bytearray(size)
        address, size, _alive = pointer(data)
        check(lib.kvs_state_get_data(self._handle, address, size))
        return bytes(data)

    def state_set_data(self, state):
        """Replaces all sequences; returns the bytes consumed."""
        address, size, _alive = pointer(state)
        consumed = lib.kvs_state_set_data(self._handle, address, size)
        check(consumed)
        return consumed

    # Snapshots

    def snapshot(self, seq_id=-1, flags=FLAGS_NONE):
        """The state of a sequence, or by default of the whole context, copied where the cache is."""
        snapshot = C.c_void_p()
        checked(lib.kvs_snapshot_take(self._handle, seq_id, flags, C.byref(snapshot)))
        return Snapshot(snapshot)

    def restore(self, snapshot, seq_id=-1):
        """Replaces a sequence, or by default all of them, by what a snapshot holds."""
        checked(lib.kvs_snapshot_restore(self._handle, snapshot._handle, seq_id))


def _shift_callback(shift):
    """What ctypes calls. An exception must not be taken for success: it is printed, and the save fails."""

    def call(_, section, stream, cells, shifts, n):
        try:
            return 1 if shift(section, stream, cells[:n], shifts[:n]) else 0
        except BaseException:
            traceback.print_exc()
            return -1

    return call


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
