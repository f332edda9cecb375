"""Saves in the background."""

import ctypes as C
import traceback

from . import _structs as S
from ._handle import Handle
from ._library import check, checked, init, lib


class Job(Handle):
    """A save in the background. Closed, or gone, before it has ended, it is cancelled and waited for."""

    def __init__(self, progress, start, *arguments, alive=None):
        """alive: what the job uses until it has ended."""
        params = init(S.TransferParams)
        if progress is not None:
            params.progress = S.ProgressCallback(_progress_callback(progress))
        self._alive = alive, params
        job = C.c_void_p()
        checked(start(*arguments, C.byref(params), C.byref(job)))
        self._handle = job

    def _free(self, handle):
        lib.kvs_job_free(handle)
        self._alive = None

    def poll(self):
        """Whether it has ended, well or not."""
        ended = lib.kvs_job_poll(self._handle)
        check(ended >= 0)
        return ended == 1

    def wait(self):
        """Waits for its end, once; returns the bytes written, or raises what the save failed with."""
        size = C.c_size_t()
        checked(lib.kvs_job_wait(self._handle, C.byref(size)))
        return size.value

    def cancel(self):
        """Asks it to end: wait raises STATUS_CANCELLED then, unless it was done before."""
        checked(lib.kvs_job_cancel(self._handle))

    def progress(self):
        """Bytes done, and bytes in all."""
        done, total = C.c_uint64(), C.c_uint64()
        checked(lib.kvs_job_progress(self._handle, C.byref(done), C.byref(total)))
        return done.value, total.value


def _progress_callback(progress):
    """What ctypes calls, on the job's thread. An exception is printed, and cancels the job."""

    def call(_, done, total):
        try:
            return 1 if progress(done, total) else 0
        except BaseException:
            traceback.print_exc()
            return -1

    return call
