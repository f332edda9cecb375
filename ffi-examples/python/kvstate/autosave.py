"""Auto-save: a folder that keeps the slots of a server from one run to the next."""

import ctypes as C
from typing import NamedTuple

from . import _structs as S
from ._handle import Handle
from ._library import by_status, check, checked, init, lib, path_bytes, text
from .slot_files import SlotResult, load_params, loaded, save_params


class AutosavedSlot(NamedTuple):
    """A slot that the folder has; size in bytes, last_use_ms since 1970."""

    slot_id: int
    n_tokens: int
    size: int
    last_use_ms: int


class Restored(NamedTuple):
    """restored False: a cold start, nothing has changed; result.notes say why, if the folder has the slot."""

    restored: bool
    result: SlotResult


class Autosave(Handle):
    """A folder of slots. Its calls may be made from any thread; close waits for the saves that run.

    fields: max_bytes, every_n_tokens and unsynced_files of kvs_autosave_params. Raises STATUS_LOCKED if somebody else has
    the folder. contents and expected of calls are those of slot_save and slot_load, without directory.
    """

    def __init__(self, directory, **fields):
        params, autosave = init(S.AutosaveParams, directory=path_bytes(directory), **fields), C.c_void_p()
        checked(lib.kvs_autosave_open(C.byref(params), C.byref(autosave)))
        self._handle = autosave

    def _free(self, handle):
        lib.kvs_autosave_free(handle)

    @property
    def notes(self):
        """What was odd when the folder was opened."""
        notes = []
        while (note := by_status(lib.kvs_autosave_note, self._handle, len(notes))) is not None:
            notes.append(text(note))
        return notes

    def slots(self):
        """The slots that the folder has, AutosavedSlots by number."""
        found = []
        for i in range(by_status(lib.kvs_autosave_count, self._handle)):
            slot = init(S.AutosavedSlot)
            checked(lib.kvs_autosave_get(self._handle, i, C.byref(slot)))
            found.append(AutosavedSlot(slot.slot_id, slot.n_tokens, slot.size, slot.last_use_ms))
        return found

    def mark(self, slot_id, n_tokens):
        """The slot has n_tokens tokens more than at the last call; returns whether a save is due."""
        return by_status(lib.kvs_autosave_mark, self._handle, slot_id, n_tokens)

    def is_dirty(self, slot_id):
        """Whether the slot was marked since the state that its file has."""
        return by_status(lib.kvs_autosave_is_dirty, self._handle, slot_id)

    def save(self, ctx, slot_id, seq_id, **contents):
        """Saves a slot; returns the size of its files. Raises STATUS_OVER_BUDGET beside slots that were used later."""
        params, _alive = save_params(**contents)
        size = C.c_size_t()
        checked(
            lib.kvs_autosave_save(self._handle, ctx._handle, slot_id, seq_id, C.byref(params), C.byref(size))
        )
        return size.value

    def save_start(self, ctx, slot_id, seq_id, **contents):
        """Begins save of the slot as it is now; the contexts may go on. wait tells of its failure."""
        params, _alive = save_params(**contents)
        checked(lib.kvs_autosave_save_start(self._handle, ctx._handle, slot_id, seq_id, C.byref(params)))

    def poll(self, slot_id):
        """Whether no save of the slot runs in the background."""
        ended = lib.kvs_autosave_poll(self._handle, slot_id)
        check(ended >= 0)
        return ended == 1

    def progress(self, slot_id):
        """Bytes done, and bytes in all, until the save has been waited for; 0 and 0 without one."""
        done, total = C.c_uint64(), C.c_uint64()
        checked(lib.kvs_autosave_progress(self._handle, slot_id, C.byref(done), C.byref(total)))
        return done.value, total.value

    def cancel(self, slot_id):
        """Asks the save in the background to end."""
        checked(lib.kvs_autosave_cancel(self._handle, slot_id))

    def wait(self, slot_id):
        """Waits for the save in the background; returns the size of its files, 0 without one, or raises its failure."""
        size = C.c_size_t()
        checked(lib.kvs_autosave_wait(self._handle, slot_id, C.byref(size)))
        return size.value

    def flush(self):
        """Waits for all saves in the background, and brings the manifest up to date; raises the last failure."""
        checked(lib.kvs_autosave_flush(self._handle))

    def restore(self, ctx, slot_id, dest_seq_id, **expected):
        """Replaces a sequence by that of a slot; returns Restored. What is wrong with the file is a cold start."""
        params, _alive = load_params(**expected)
        restored = C.c_int32()

        def restore(*arguments):
            return lib.kvs_autosave_restore(*arguments, C.byref(restored))

        result = loaded(restore, self._handle, ctx._handle, slot_id, dest_seq_id, C.byref(params))
        return Restored(bool(restored.value), result)

    def remove(self, slot_id):
        """Removes a slot from the folder, if it has it."""
        checked(lib.kvs_autosave_remove(self._handle, slot_id))
