"""Finds and loads the library, checks its calls, and hands it bytes."""

import array
import ctypes as C
import os
import pathlib

from ._calls import declare


def _load():
    path = os.environ.get("KVSTATE_LIB")
    if path is None:
        target = pathlib.Path(__file__).resolve().parents[3] / "target"
        found = [target / profile / "libkvstate.so" for profile in ("release", "debug")]
        found = [file for file in found if file.exists()]
        if not found:
            raise OSError("no libkvstate.so under target/: cargo build, or set KVSTATE_LIB")
        path = max(found, key=lambda file: file.stat().st_mtime)
    library = C.CDLL(os.fspath(path))
    declare(library)
    return library


lib = _load()


class KvsError(Exception):
    """A call failed; status is its KVS_STATUS_*, the text is kvs_last_error()."""

    def __init__(self):
        self.status = lib.kvs_last_status()
        super().__init__(lib.kvs_last_error().decode(errors="replace"))


def check(ok):
    if not ok:
        raise KvsError


def checked(status):
    check(status == 0)


def by_status(call, *arguments):
    """Runs a call of which only the thread's last status tells whether it failed."""
    lib.kvs_clear_last_error()
    result = call(*arguments)
    check(lib.kvs_last_status() == 0)
    return result


def init(struct, **fields):
    """A struct with the defaults of its init call, and fields set."""
    value = struct()
    checked(getattr(lib, f"{struct.c_name}_init")(C.byref(value), C.sizeof(value)))
    for name, field in fields.items():
        if not hasattr(struct, name):
            raise TypeError(f"{struct.c_name} has no field {name}")
        setattr(value, name, field)
        # ctypes cuts what is out of range.
        if isinstance(field, int) and (getattr(value, name) or 0) != field:
            raise OverflowError(f"{struct.c_name}.{name}: {field} is out of range")
    return value


def pointer(buffer):
    """Address and size of a bytes-like object, and what keeps it alive."""
    if isinstance(buffer, bytes):
        return C.cast(buffer, C.c_void_p).value, len(buffer), buffer
    view = memoryview(buffer)
    if view.readonly or view.nbytes == 0:
        return pointer(bytes(view))
    return _writable(view)


def writable(buffer):
    """The same of a buffer that is written to."""
    view = memoryview(buffer)
    if view.readonly:
        raise TypeError("the buffer is read-only")
    return _writable(view) if view.nbytes else pointer(b"")


def _writable(view):
    view = view.cast("B")
    memory = (C.c_uint8 * len(view)).from_buffer(view)
    # cast would make a cycle of it, and keep the buffer until the garbage collector comes by.
    return C.addressof(memory), len(view), memory


def i32s(values):
    """A C array of 32-bit integers. array refuses those that are out of range, which ctypes cuts."""
    values = array.array("i", list(values))
    return (C.c_int32 * len(values)).from_buffer_copy(values)


def c_string(value):
    """Bytes, or a str as UTF-8, as C takes it: up to its end, which the first NUL would be."""
    value = value.encode() if isinstance(value, str) else value
    if not isinstance(value, bytes):
        raise TypeError(f"str or bytes are expected, not {type(value).__name__}")
    if b"\0" in value:
        raise ValueError(f"{value!r} has a NUL within")
    return value


def path_bytes(path):
    return c_string(os.fsencode(path))


def text(value):
    return value.decode(errors="replace")
