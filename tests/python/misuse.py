"""ffi-examples/python/kvstate: what must not crash: closed twice, closed while a job runs, arguments that make no sense.

With caches where TEST_DEVICE says. Run by tests/abi.rs, which sets PYTHONPATH.
"""

import ctypes
import gc
import os
import tempfile
import threading

import kvstate
from check import decode_rows, device, fails, new_context, raises

os.chdir((folder := tempfile.TemporaryDirectory()).name)
CLOSED = "not a live handle"


class Gate:
    """A progress callback that holds its job until it is opened."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, done, total):
        self.reached.set()
        self.open.wait()


ctx = new_context()
decode_rows(ctx, range(12))
state = ctx.state_seq_get_data(0)

# What is closed raises, whatever is asked of it, and may be closed again.

snapshot, checkpoints, autosave = ctx.snapshot(0), kvstate.Checkpoints(), kvstate.Autosave("slots")
job = snapshot.save_file_start("job.bin")
job.wait()
gone = new_context()
for one in (snapshot, checkpoints, autosave, job, gone):
    one.close()
    one.close()
    one.__exit__(None, None, None)
for call, *arguments in [
    (snapshot.get_data,),
    (snapshot.save_file, "x.bin"),
    (snapshot.save_file_start, "x.bin"),
    (snapshot.get_data_start, bytearray(8)),
    (getattr, snapshot, "size"),
    (getattr, snapshot, "device_size"),
    (ctx.restore, snapshot, 0),
    (job.poll,),
    (job.wait,),
    (job.cancel,),
    (job.progress,),
    (len, checkpoints),
    (checkpoints.resume, ctx, 0),
    (checkpoints.truncate, 0),
    (checkpoints.verdict, ctx, 0, 0),
    (getattr, checkpoints, "size"),
    (getattr, autosave, "notes"),
    (autosave.slots,),
    (autosave.mark, 0, 1),
    (autosave.is_dirty, 0),
    (autosave.save, ctx, 0, 0),
    (autosave.save_start, ctx, 0, 0),
    (autosave.restore, ctx, 0, 0),
    (autosave.poll, 0),
    (autosave.progress, 0),
    (autosave.cancel, 0),
    (autosave.wait, 0),
    (autosave.flush,),
    (autosave.remove, 0),
    (gone.decode, [0]),
    (gone.planes, 0, 0),
    (gone.kv_get, 0, 0, 0, 0, 8),
    (gone.kv_set, 0, 0, 0, 0, bytes(8)),
    (gone.section_kind, 0),
    (gone.clear,),
    (gone.seq_rm, 0),
    (gone.seq_cp, 0, 1),
    (gone.seq_keep, 0),
    (gone.seq_add, 0, 0, -1, 1),
    (gone.seq_pos_min, 0),
    (gone.seq_pos_max, 0),
    (gone.can_seq_rm, 0),
    (gone.max_cut, 0),
    (gone.can_shift,),
    (gone.shift_apply,),
    (gone.can_rewind, 0, 0),
    (gone.rewind_pos, 0, 0),
    (gone.rewind_obstacle, 0, 0),
    (gone.state_get_data,),
    (gone.state_set_data, state),
    (gone.state_seq_get_data, 0),
    (gone.state_seq_get_data_into, bytearray(8), 0),
    (gone.state_seq_set_data, state, 0),
    (gone.state_seq_save_file, "x.bin", 0),
    (gone.state_seq_load_file, "job.bin", 0),
    (gone.state_seq_get_data_range, 0),
    (gone.state_seq_save_file_range, "x.bin", 0),
    (gone.state_seq_load_file_range, "job.bin", 0),
    (gone.snapshot, 0),
    (gone.memory_usage,),
    (gone.set_stream, 0, None),
    (kvstate.slot_save, gone, "x.bin", 0),
    (kvstate.slot_save_start, gone, "x.bin", 0),
    (kvstate.slot_load, gone, "job.bin", 0),
]:
    fails(kvstate.STATUS_INVALID_HANDLE, CLOSED, call, *arguments)
assert not os.path.exists("x.bin")

# One thing in place of another.

for call, *arguments in [
    (kvstate.slot_save, kvstate.Checkpoints(), "x.bin", 0),
    (kvstate.Checkpoints().take, ctx.snapshot(0), 1),
    (ctx.restore, ctx, 0),
]:
    fails(kvstate.STATUS_INVALID_HANDLE, CLOSED, call, *arguments)
raises(AttributeError, kvstate.slot_save, None, "x.bin", 0)
raises(AttributeError, kvstate.slot_save, ctx, "x.bin", 0, draft="draft")
raises(AttributeError, kvstate.slot_save, ctx, "x.bin", 0, checkpoints=[b"state"])
raises(AttributeError, kvstate.slot_save, ctx, "x.bin", 0, identity=b"model")
raises(AttributeError, kvstate.Context, [kvstate.Layer(4, 4)])

# None, nothing, and numbers that C would have cut.

for kind, call, *arguments in [
    (TypeError, ctx.state_seq_set_data, None, 0),
    (TypeError, ctx.state_set_data, 5),
    (TypeError, ctx.kv_set, 0, 0, 0, 0, None),
    (TypeError, ctx.state_seq_get_data_into, None, 0),
    (TypeError, ctx.state_seq_get_data_into, state, 0),
    (TypeError, ctx.snapshot(0).get_data_start, None),
    (TypeError, ctx.snapshot(0).get_data_start, memoryview(bytearray(len(state) * 2))[::2]),
    (TypeError, ctx.decode, None),
    (TypeError, ctx.state_seq_save_file, None, 0),
    (TypeError, ctx.state_seq_save_file, "x.bin", 0, None),
    (TypeError, ctx.state_seq_save_file, "x.bin", 0, ["1"]),
    (OverflowError, ctx.state_seq_save_file, "x.bin", 0, [1 << 31]),
    (ValueError, ctx.state_seq_save_file, "x\0.bin", 0),
    (ctypes.ArgumentError, ctx.seq_rm, None),
    (ctypes.ArgumentError, ctx.seq_rm, 0.0),
    (ctypes.ArgumentError, ctx.seq_rm, 1 << 32),
    (ctypes.ArgumentError, ctx.state_seq_get_data, 0, -1),
    (ctypes.ArgumentError, ctx.kv_get, 0, 0, 0, -1, 8),
    (OverflowError, kvstate.Kv(1 << 32, [])._describe, kvstate._structs.SectionParams()),
    (TypeError, kvstate.Context, None),
]:
    raises(kind, call, *arguments)
raises(TypeError, kvstate.slot_save, ctx, "x.bin", 0, driver=None)
raises(TypeError, kvstate.Context, [kvstate.Kv(8, [])], n_seq=1)
assert not os.path.exists("x.bin") and ctx.state_seq_get_data(0) == state
assert ctx.decode([]) == [[]]
fails(kvstate.STATUS_TRUNCATED, "truncated", ctx.state_seq_set_data, b"", 0)
fails(kvstate.STATUS_TRUNCATED, "truncated", ctx.state_seq_set_data, bytearray(), 0)
fails(kvstate.STATUS_BUFFER_TOO_SMALL, "too small", ctx.state_seq_get_data_into, bytearray(), 0)
assert ctx.kv_get(0, 0, kvstate.KV_K, 0, 0) == b"" and ctx.kv_set(0, 0, kvstate.KV_K, 0, b"") is None
assert kvstate.slot_save(ctx, "none.bin", 0, tokens=[], checkpoints=[], driver=bytearray()) > 0
assert kvstate.slot_load(ctx, "none.bin", 0).tokens == [] and ctx.state_seq_load_file("none.bin", 0, 0)[0] == []
assert ctx.state_seq_get_data(0) == state

# A buffer is let go at once, not when the garbage collector comes by.

gc.disable()
buffer = bytearray(len(state))
ctx.state_seq_get_data_into(buffer, 0)
ctx.state_seq_set_data(buffer, 0)
kvstate.slot_save(ctx, "none.bin", 0, driver=buffer)
buffer.extend(b"more")
gc.enable()

# A job goes on without what it was begun with, and keeps what it writes to.

gate, buffer, own = Gate(), bytearray(len(state)), new_context()
own.state_seq_set_data(state, 0)
job = own.snapshot(0).get_data_start(buffer, gate)
gate.reached.wait()
own.close()
del own
gc.collect()
raises(BufferError, buffer.extend, b"more")
gate.open.set()
assert job.wait() == len(state) and buffer == state
del job
buffer.extend(b"more")

# Gone while it runs: it is cancelled, and its callback is not called afterwards.
gate = Gate()
job = kvstate.slot_save_start(ctx, "gone.bin", 0, gate)
gate.reached.wait()
threading.Timer(0.05, gate.open.set).start()
del job
gc.collect()
assert gate.open.is_set()

# Another thread waits for it.
gate = Gate()
job = kvstate.slot_save_start(ctx, "gone.bin", 0, gate)
ended = []
waiting = threading.Thread(target=lambda: ended.append(job.wait()))
waiting.start()
gate.reached.wait()
gate.open.set()
waiting.join()
job.close()
assert ended == [os.path.getsize("gone.bin")]

# Auto-save closed while saves run: it waits for them, and a context may be closed before.
own = new_context()
own.state_seq_set_data(state, 0)
autosave = kvstate.Autosave("slots")
for slot_id in range(4):
    autosave.save_start(own, slot_id, 0, tokens=range(12))
own.close()
del autosave
gc.collect()
with kvstate.Autosave("slots") as autosave:
    assert len(autosave.slots()) == 4 and autosave.restore(ctx, 3, 0).restored
assert ctx.state_seq_get_data(0) == state

# What a failed constructor leaves is no handle.
for make in (lambda: kvstate.Context([]), lambda: kvstate.Autosave("none.bin"), lambda: kvstate.Checkpoints(n_max=0)):
    try:
        make()
    except kvstate.KvsError:
        gc.collect()
    else:
        raise AssertionError("it was made")

# Pinned memory lives as long as what looks at it.
if device >= 0:
    gate, pinned = Gate(), kvstate.PinnedBuffer(len(state), device)
    job = ctx.snapshot(0).get_data_start(pinned.buffer, gate)
    gate.reached.wait()
    view = pinned.buffer[:4]
    pinned.close()
    pinned.close()
    assert pinned.buffer is None
    gc.collect()
    gate.open.set()
    assert job.wait() == len(state) and view == state[:4]
