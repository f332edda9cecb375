"""ffi-examples/python/kvstate: auto-save, with caches where TEST_DEVICE says.

Run by tests/abi.rs, which sets PYTHONPATH.
"""

import os
import subprocess
import sys
import tempfile
import time

import kvstate
from check import decode_rows, fails, new_context, raises

os.chdir((folder := tempfile.TemporaryDirectory()).name)
N_TOKENS = 12
tokens = list(range(100, 100 + N_TOKENS))


def size_of(*names):
    return sum(os.path.getsize(os.path.join("slots", name)) for name in names)


# A run of a server: a slot is used, saved when it is due, and again at the end.

target, draft = new_context(), new_context()
decode_rows(target, range(N_TOKENS))
decode_rows(draft, range(N_TOKENS), 1)
contents = dict(tokens=tokens, draft=draft, draft_seq_id=1, driver=b"driver")
state = target.state_seq_get_data(0)

with kvstate.Autosave("slots", every_n_tokens=10) as autosave:
    assert autosave.notes == [] and autosave.slots() == []
    assert not autosave.is_dirty(2) and not autosave.mark(2, 9)
    assert autosave.mark(2, 1) and autosave.is_dirty(2)
    autosave.save_start(target, 2, 0, **contents)
    # The server goes on.
    target.seq_rm(0, 3)
    done, total = autosave.progress(2)
    assert 0 <= done <= total and autosave.poll(2) in (True, False)
    size = autosave.wait(2)
    assert size == total == size_of("auto-slot2.bin")
    assert autosave.poll(2) and not autosave.is_dirty(2)
    assert autosave.progress(2) == (0, 0) and autosave.wait(2) == 0

    before = time.time_ns() // 1_000_000
    assert autosave.save(target, 0, 0, sidecar=True, **contents) == size_of("auto-slot0.bin", "auto-slot0.drft")
    first, second = autosave.slots()
    assert (first.slot_id, first.n_tokens, first.size) == (0, 12, size_of("auto-slot0.bin", "auto-slot0.drft"))
    assert second[:3] == (2, 12, size) and second.last_use_ms < first.last_use_ms
    assert abs(first.last_use_ms - before) < 60_000

    # One keeper: not this process once more, nor another one.
    fails(kvstate.STATUS_LOCKED, "auto-slots.lock is locked", kvstate.Autosave, "slots")
    program = [sys.executable, "-Bc", "import kvstate; kvstate.Autosave('slots')"]
    other = subprocess.run(program, capture_output=True, text=True)
    assert other.returncode == 1 and "auto-slots.lock is locked" in other.stderr, other.stderr

    # Cancelled, unless it was done before.
    autosave.save_start(target, 0, 0)
    autosave.cancel(0)
    try:
        autosave.wait(0)
    except kvstate.KvsError as error:
        assert error.status == kvstate.STATUS_CANCELLED
    autosave.save_start(target, 1, 0, **contents)
    autosave.flush()
    assert [slot.slot_id for slot in autosave.slots()] == [0, 1, 2]
    autosave.remove(0)
    autosave.remove(7)
    assert sorted(os.listdir("slots")) == ["auto-slot1.bin", "auto-slot2.bin", "auto-slots.json", "auto-slots.lock"]
    # Left to the end: close waits for it.
    autosave.save_start(target, 3, 0, tokens=tokens[:3])
target.close()
draft.close()
fails(kvstate.STATUS_INVALID_HANDLE, "autosave is not a live handle", autosave.flush)
fails(kvstate.STATUS_INVALID_HANDLE, "autosave is not a live handle", autosave.slots)
fails(kvstate.STATUS_INVALID_HANDLE, "autosave is not a live handle", autosave.mark, 0, 1)
autosave.close()

# The next run.

with kvstate.Autosave("slots", every_n_tokens=10) as autosave, new_context() as ctx, new_context() as other:
    assert [slot.slot_id for slot in autosave.slots()] == [1, 2, 3]
    restored, result = autosave.restore(ctx, 2, 0, draft=other, draft_seq_id=2, verify=kvstate.VERIFY_FULL)
    assert restored and ctx.state_seq_get_data(0) == state and other.seq_pos_max(2) == N_TOKENS - 1
    assert (result.tokens, result.driver, result.verified) == (tokens, b"driver", kvstate.VERIFY_FULL)
    assert (result.draft, result.notes) == (kvstate.SLOT_DRAFT_RESTORED, [])
    # The file is one as any other.
    assert kvstate.slot_load(ctx, "slots/auto-slot2.bin", 1).tokens == tokens
    restored, result = autosave.restore(ctx, 3, 1)
    assert restored and result.tokens == tokens[:3] and ctx.seq_pos_max(1) == 2
    assert autosave.restore(ctx, 2, 1, p1=5).restored and ctx.seq_pos_max(1) == 4

    # A cold start changes nothing: a slot that is not there, one that does not fit, a file that is damaged.
    whole = ctx.state_get_data()
    restored, result = autosave.restore(ctx, 9, 0)
    assert not restored and (result.tokens, result.notes, result.target_size) == ([], [], 0)
    with new_context(8) as small:
        restored, result = autosave.restore(small, 2, 0)
        assert not restored and len(result.notes) == 1 and "failed to find 12 available cells" in result.notes[0]
        assert small.seq_pos_max(0) == -1
    restored, result = autosave.restore(ctx, 2, 0, identity=kvstate.SlotIdentity(salt=b"another"))
    assert not restored and "salt" in result.notes[0]
    with open("slots/auto-slot2.bin", "r+b") as file:
        file.truncate(100)
    restored, result = autosave.restore(ctx, 2, 0)
    assert not restored and "truncated state" in result.notes[-1]
    assert ctx.state_get_data() == whole

    # What is the caller's raises.
    fails(1, "seq_id 3", autosave.restore, ctx, 1, 3)
    fails(1, "seq_id 3", autosave.save, ctx, 1, 3)
    fails(1, "directory: given", autosave.restore, ctx, 1, 0, directory="slots")
    fails(1, "directory: given", autosave.save, ctx, 1, 0, directory="slots")
    raises(ValueError, autosave.save_start, ctx, 1, 0, draft=draft)
    raises(TypeError, autosave.save, ctx, 1, 0, n_most=5)

# What was odd is said, and the budget is kept.

with open("slots/auto-slots.json", "w") as file:
    file.write("{")
with kvstate.Autosave("slots", max_bytes=100) as autosave, new_context() as ctx:
    assert any("auto-slots.json is not used: " in note for note in autosave.notes), autosave.notes
    decode_rows(ctx, range(N_TOKENS))
    fails(kvstate.STATUS_OVER_BUDGET, "bytes do not fit max_bytes: 100", autosave.save, ctx, 0, 0)
    fails(kvstate.STATUS_OVER_BUDGET, "bytes do not fit max_bytes: 100", autosave.save_start, ctx, 0, 0)
raises(TypeError, kvstate.Autosave, None)
raises(TypeError, kvstate.Autosave, "slots", max_byte=5)
