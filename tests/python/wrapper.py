"""ffi-examples/python/kvstate.py: buffers, errors, shifts. Run by tests/abi.rs, which sets PYTHONPATH."""

import array
import math
import struct

import kvstate


def fails(status, text, call, *arguments):
    try:
        call(*arguments)
    except kvstate.KvsError as error:
        assert (error.status, text in str(error)) == (status, True), (error.status, str(error))
    else:
        raise AssertionError(f"{call.__name__}{arguments} did not fail")


rotations = []


def rotate(section, stream, cells, shifts):
    rotations.append((section, stream, cells, shifts))


with kvstate.Context([kvstate.Kv(8, [kvstate.Layer(4, 4)], v_trans=1)], n_seq_max=2, shift=rotate) as ctx:
    assert ctx.decode(range(5)) == [[0, 1, 2, 3, 4]]
    k, v = ctx.planes(0, 0)
    assert (len(k), len(k[0]), len(v), len(v[0]), len(v[0][0])) == (8, 8, 4, 8, 2)
    k[1][:] = [1, 2, 3, 4, 5, 6, 7, 8]
    v[3][1][:] = [9, 10]
    state = ctx.state_seq_get_data(0)
    assert bytes([1, 2, 3, 4, 5, 6, 7, 8]) in state

    # Whatever holds bytes is taken.
    for same in (state, bytearray(state), memoryview(state), memoryview(bytearray(state)), array.array("B", state)):
        ctx.clear()
        assert ctx.state_seq_set_data(same, 1) == len(state)
        assert ctx.seq_pos_max(1) == 4 and ctx.seq_pos_max(0) == -1
    k, v = ctx.planes(0, 0)
    assert list(k[1]) == [1, 2, 3, 4, 5, 6, 7, 8] and list(v[3][1]) == [9, 10]

    # A buffer of the caller; what is behind the state stays.
    buffer = bytearray(b"\xa5" * (len(state) + 2))
    assert ctx.state_seq_get_data_into(buffer, 1) == len(state)
    assert buffer[-2:] == b"\xa5\xa5" and buffer[:-2] == ctx.state_seq_get_data(1)
    fails(kvstate.STATUS_BUFFER_TOO_SMALL, "buffer too small", ctx.state_seq_get_data_into, bytearray(3), 1)

    # Calls without a return value raise as well, every time.
    for _ in range(2):
        fails(1, "seq_id 9", ctx.seq_keep, 9)
        fails(1, "seq_id 9", ctx.seq_cp, 0, 9)
        fails(1, "d: 0", ctx.seq_div, 1, -1, -1, 0)
    ctx.seq_keep(1)
    fails(1, "seq_id 9", ctx.seq_rm, 9)
    fails(15, "/none", ctx.state_seq_load_file, "/none", 0)

    assert ctx.can_shift()
    ctx.seq_add(1, 2, -1, 4)
    whole = ctx.state_get_data()
    assert rotations == [(0, 0, [2, 3, 4], [4, 4, 4])]
    ctx.clear()
    assert ctx.state_set_data(whole) == len(whole) and ctx.seq_pos_max(1) == 8

fails(1, "0 sections", kvstate.Context, [])


def broken(section, stream, cells, shifts):
    raise RuntimeError("no device")


# An exception in the callback is no success: K would be saved unrotated. Its traceback is printed.
with kvstate.Context([kvstate.Kv(8, [kvstate.Layer(4, 4)])], shift=broken) as ctx:
    ctx.decode(range(5))
    ctx.seq_add(0, 2, -1, 4)
    fails(13, "the shift callback returned -1", ctx.state_seq_get_data, 0)

# Without a callback kvstate rotates K: here by half a turn.
layer = kvstate.Layer(2, 2, rope=dict(n_embd_head=2, freq_factors=[1 / math.pi]))
with kvstate.Context([kvstate.Kv(8, [layer])]) as ctx:
    ctx.decode(range(5))
    k, _ = ctx.planes(0, 0)
    k[4][:] = struct.pack("<2e", 1, 2)
    ctx.seq_add(0, 4, -1, 1)
    ctx.shift_apply()
    assert struct.unpack("<2e", bytes(k[4])) == (-1, -2)
    assert bytes(k[3]) == bytes(4)
