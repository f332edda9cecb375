"""CUDA devices, and host memory that is pinned for them."""

import ctypes as C
import weakref

from ._library import checked, lib


def device_check(device):
    """Raises if the CUDA device cannot be used, with the reason."""
    checked(lib.kvs_device_check(device))


class PinnedBuffer:
    """Pinned host memory, zeroed: states of devices go there, and come from there, without another copy.

    buffer is a writable memoryview, None after close. The memory is freed once nothing looks at it any more: a job that
    writes to it does.
    """

    def __init__(self, size, device=0):
        address = C.c_void_p()
        checked(lib.kvs_pinned_alloc(device, size, C.byref(address)))
        memory = (C.c_uint8 * size).from_address(address.value)
        # Not at the end of the process, where jobs may still write.
        weakref.finalize(memory, lib.kvs_pinned_free, address).atexit = False
        self.buffer = memoryview(memory).cast("B")

    def close(self):
        self.buffer = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
