"""The bytes of a slot file."""

import struct


def state_of(data):
    """A slot file without the identity and the checksums behind the state: what llama.cpp would have saved."""
    tag, _, size, _ = struct.unpack_from("<4sIQI", data, len(data) - 20)
    if tag != b"SIZE":
        raise AssertionError(f"no checksums, but {data[-20:]}")
    return data[:-size]


def flipped(data, offset, mask=1):
    return data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]
