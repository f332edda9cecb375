"""Checkpoints: partial states of a sequence to go back to when its history diverges."""

import ctypes as C
from typing import NamedTuple, Optional

from . import _structs as S
from ._handle import Handle
from ._library import by_status, check, checked, init, lib, pointer, text
from .slot_files import SlotCheckpoint, checkpoint_struct


class Checkpoint(NamedTuple):
    """Of a history of n_tokens tokens; size in bytes."""

    n_tokens: int
    size: int
    pos_min: int
    pos_max: int


class CheckpointVerdict(NamedTuple):
    """kind: CHECKPOINT_*; pos: where the sequence could go on, 0 if the checkpoint does not serve."""

    kind: int
    pos: int
    text: str


class Resumed(NamedTuple):
    """The sequence holds exactly the positions below pos; n_tokens of the checkpoint that was restored, None without one."""

    pos: int
    n_tokens: Optional[int]


class Checkpoints(Handle):
    """The checkpoints of a sequence, by position; len and indices tell of them. They outlive their context.

    fields: n_max, min_step, max_bytes and memory (CHECKPOINT_MEMORY_*) of kvs_checkpoints_params.
    """

    def __init__(self, seq_id=0, **fields):
        params, checkpoints = init(S.CheckpointsParams, **fields), C.c_void_p()
        checked(lib.kvs_checkpoints_new(seq_id, C.byref(params), C.byref(checkpoints)))
        self._handle = checkpoints

    def _free(self, handle):
        lib.kvs_checkpoints_free(handle)

    def __len__(self):
        return by_status(lib.kvs_checkpoints_count, self._handle)

    def __getitem__(self, index):
        checkpoint, n = S.Checkpoint(), len(self)
        if not -n <= index < n:
            raise IndexError(f"checkpoint {index} of {n}")
        checked(lib.kvs_checkpoints_get(self._handle, index % n, C.byref(checkpoint)))
        return Checkpoint(*(getattr(checkpoint, name) for name, _ in checkpoint._fields_))

    @property
    def size(self):
        """Bytes of all their states."""
        return by_status(lib.kvs_checkpoints_size, self._handle)

    def take(self, ctx, n_tokens):
        """Takes one of the sequence as it is, with n_tokens tokens in its history; others make room for it."""
        checked(lib.kvs_checkpoints_take(self._handle, ctx._handle, n_tokens))

    def put(self, ctx, checkpoint):
        """Adds one that was taken before, a SlotCheckpoint as slot_load gives it back, for the sequence restored with it."""
        alive = []
        checked(lib.kvs_checkpoints_put(self._handle, ctx._handle, C.byref(checkpoint_struct(checkpoint, alive))))

    def slot_checkpoint(self, index):
        """One as slot_save takes it: a SlotCheckpoint, without draft and driver."""
        one = self[index]
        target = bytearray(one.size)
        address, size, _alive = pointer(target)
        check(lib.kvs_checkpoints_get_data(self._handle, index % len(self), address, size))
        return SlotCheckpoint(one.n_tokens, one.pos_min, one.pos_max, bytes(target))

    def resume(self, ctx, pos):
        """Brings the sequence back to where it can go on, at most at pos, the first position that differs; a Resumed."""
        resumed, n_tokens = C.c_int32(), C.c_int64()
        checked(lib.kvs_checkpoints_resume(self._handle, ctx._handle, pos, C.byref(resumed), C.byref(n_tokens)))
        return Resumed(resumed.value, None if n_tokens.value < 0 else n_tokens.value)

    def truncate(self, pos):
        """The history goes on at pos: drops those that hold this position or a later one."""
        checked(lib.kvs_checkpoints_truncate(self._handle, pos))

    def verdict(self, ctx, index, pos):
        """What one is worth if the history diverges at pos, a CheckpointVerdict."""
        verdict = S.CheckpointVerdict()
        checked(lib.kvs_checkpoints_verdict(self._handle, ctx._handle, index, pos, C.byref(verdict)))
        return CheckpointVerdict(verdict.kind, verdict.pos, text(verdict.text))
