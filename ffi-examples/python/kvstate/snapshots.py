"""Snapshots: states that are copied where the cache is."""

from ._handle import Handle
from ._library import by_status, check, i32s, lib, path_bytes, pointer, writable
from .jobs import Job


class Snapshot(Handle):
    """A state as it was when Context.snapshot took it; it outlives its context. Jobs go on without it."""

    def __init__(self, snapshot):
        self._handle = snapshot

    def _free(self, handle):
        lib.kvs_snapshot_free(handle)

    @property
    def size(self):
        """Bytes of the state."""
        size = lib.kvs_snapshot_size(self._handle)
        check(size)
        return size

    @property
    def device_size(self):
        """Bytes of it in the memory of devices."""
        return by_status(lib.kvs_snapshot_device_size, self._handle)

    def get_data(self):
        """The state, as bytes."""
        data = bytearray(self.size)
        address, size, _alive = pointer(data)
        check(lib.kvs_snapshot_get_data(self._handle, address, size))
        return bytes(data)

    def save_file(self, path, tokens=()):
        """Writes the state and tokens to a file; returns the size of the file."""
        tokens = i32s(tokens)
        size = lib.kvs_snapshot_save_file(self._handle, path_bytes(path), tokens, len(tokens))
        check(size)
        return size

    def get_data_start(self, buffer, progress=None):
        """Begins to write the state into a writable buffer, which is the job's until it has ended; returns a Job.

        progress(done, total) runs on the job's thread; what it returns cancels the job unless it is None or 0.
        """
        address, size, alive = writable(buffer)
        return Job(progress, lib.kvs_snapshot_get_data_start, self._handle, address, size, alive=alive)

    def save_file_start(self, path, tokens=(), progress=None):
        """Begins to write the state and tokens to a file; returns a Job. progress: as for get_data_start."""
        tokens = i32s(tokens)
        start = lib.kvs_snapshot_save_file_start
        return Job(progress, start, self._handle, path_bytes(path), tokens, len(tokens))
