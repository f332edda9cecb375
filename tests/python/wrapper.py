"""ffi-examples/python/kvstate: buffers, errors, shifts; then snapshots, jobs and bytes of K and V where TEST_DEVICE says.

Run by tests/abi.rs, which sets PYTHONPATH.
"""

import array
import math
import os
import struct
import tempfile
import threading

import kvstate
from check import device, fails

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
    k[4][:] = list(struct.pack("<2e", 1, 2))
    ctx.seq_add(0, 4, -1, 1)
    ctx.shift_apply()
    assert struct.unpack("<2e", bytes(k[4])) == (-1, -2)
    assert bytes(k[3]) == bytes(4)
layer = kvstate.Layer(1024, 1024, kvstate.TYPE_F32, kvstate.TYPE_F32, device=device)
ROW = kvstate.row_size(kvstate.TYPE_F32, 1024)


def new_large():
    return kvstate.Context([kvstate.Kv(256, [layer])], n_seq_max=2, staging_size=64 << 10)


with tempfile.TemporaryDirectory() as folder:
    blocking, background = os.path.join(folder, "blocking"), os.path.join(folder, "background")
    with new_large() as ctx:
        ctx.decode(range(192))
        ctx.kv_set(0, 0, kvstate.KV_K, 0, bytes(range(256)) * (192 * ROW // 256))
        ctx.kv_set(0, 0, kvstate.KV_V, 5 * ROW, b"five")
        assert ctx.kv_get(0, 0, kvstate.KV_V, 5 * ROW - 1, 6) == b"\0five\0"
        assert ctx.kv_get(0, 0, kvstate.KV_K, ROW + 254, 4) == bytes([254, 255, 0, 1])
        fails(1, "3 bytes at", ctx.kv_get, 0, 0, kvstate.KV_K, 256 * ROW - 2, 3)

        state, usage = ctx.state_seq_get_data(0), ctx.memory_usage()
        ctx.state_seq_save_file(blocking, 0, [1, 2])
        n_tensor = 2 * 192 * ROW
        assert usage["kv_device" if device >= 0 else "kv_host"] == 2 * 256 * ROW
        assert (usage["staging_pinned"] > 0) == (device >= 0)

        snapshot = ctx.snapshot(0)
        assert snapshot.size == len(state) and snapshot.device_size == (n_tensor if device >= 0 else 0)
        reports, buffer = [], bytearray(len(state))
        jobs = [snapshot.get_data_start(buffer, lambda done, total: reports.append((done, total)))]
        jobs.append(snapshot.save_file_start(background, [1, 2]))
        # The server goes on meanwhile.
        ctx.seq_rm(0, 100)
        ctx.decode(range(100, 120))
        ctx.kv_set(0, 0, kvstate.KV_K, 0, bytes(200 * ROW))
        assert [job.wait() for job in jobs] == [len(state), os.path.getsize(blocking)]
        assert bytes(buffer) == state == snapshot.get_data() and reports[-1] == (len(state), len(state))
        assert open(background, "rb").read() == open(blocking, "rb").read()
        for job in jobs:
            assert job.poll() and job.progress()[0] == job.progress()[1]
            fails(1, "has been waited for", job.wait)
            job.close()
        assert snapshot.save_file(background, [1, 2]) == os.path.getsize(blocking)

        # Cancelled by its progress, by an exception there, and while it is at work.
        before = open(background, "rb").read()
        for progress in (lambda done, total: True, lambda done, total: 1 / 0):
            fails(kvstate.STATUS_CANCELLED, "cancelled after", snapshot.save_file_start(background, (), progress).wait)
        reached, go_on = threading.Event(), threading.Event()

        def hold(done, total):
            reached.set()
            go_on.wait()

        with snapshot.save_file_start(background, (), hold) as job:
            reached.wait()
            assert not job.poll() and 0 < job.progress()[0] < job.progress()[1]
            job.cancel()
            go_on.set()
            fails(kvstate.STATUS_CANCELLED, "cancelled after", job.wait)
            assert job.poll()
        assert open(background, "rb").read() == before
        fails(15, "none", snapshot.save_file_start(os.path.join(folder, "none", "x")).wait)

        whole = ctx.snapshot()
        fails(1, "snapshot: is of a whole context", ctx.restore, whole, 0)
        fails(1, "unknown state flags", ctx.snapshot, 0, 8)

    # Both outlive the context.
    with new_large() as other:
        other.restore(snapshot, 0)
        assert other.state_seq_get_data(0) == state
        other.restore(whole)
        assert other.seq_pos_max(0) == 119
    snapshot.close()
    whole.close()

if device >= 0:
    kvstate.device_check(device)
    with kvstate.PinnedBuffer(len(state), device) as pinned, new_large() as ctx:
        assert bytes(pinned.buffer) == bytes(len(state))
        ctx.set_stream(device, 0)
        assert ctx.state_seq_set_data(state, 1) == len(state)
        assert ctx.state_seq_get_data_into(pinned.buffer, 1) == len(state)
        ctx.set_stream(device, None)
        # A state names its sequence: as sequence 0 again it has the same bytes.
        ctx.clear()
        assert ctx.state_seq_set_data(pinned.buffer, 0) == len(state)
        assert ctx.state_seq_get_data(0) == state
        try:
            ctx.planes(0, 0)
        except TypeError as error:
            assert f"on device {device}" in str(error)
        else:
            raise AssertionError("the host has addresses of a device")
    fails(kvstate.STATUS_NO_DEVICE, "no CUDA device 99", kvstate.device_check, 99)
    fails(kvstate.STATUS_NO_DEVICE, "no CUDA device 99", kvstate.PinnedBuffer, 8, 99)
    far = kvstate.Layer(4, 4, device=99)
    fails(kvstate.STATUS_NO_DEVICE, "no CUDA device 99", kvstate.Context, [kvstate.Kv(8, [far])])
fails(1, "devices are counted from 0", kvstate.PinnedBuffer, 8, -1)
