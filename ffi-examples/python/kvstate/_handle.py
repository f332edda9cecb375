"""What C frees."""


class Handle:
    """Something of the library's. close frees it, once; so do the end of a with and the garbage collector.

    No other thread may be in a call of it then. Calls of a closed one raise KvsError.
    """

    _handle = None

    def _free(self, handle):
        raise NotImplementedError

    def close(self):
        handle, self._handle = self._handle, None
        if handle is not None:
            self._free(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()
