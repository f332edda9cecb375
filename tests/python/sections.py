"""ffi-examples/python/kvstate: sections of every kind, where TEST_DEVICE says.

Run by tests/abi.rs, which sets PYTHONPATH.
"""

import struct

import kvstate
from check import device, fails

ROW = 4 * 6


def hybrid():
    kv = kvstate.Kv(16, [kvstate.Layer(4, 4, device=device)])
    layers = [kvstate.RecurrentLayer(), kvstate.RecurrentLayer(6, 0, device=device)]
    return kvstate.Context([kv, kvstate.Recurrent(layers, n_rs_seq=1)], n_seq_max=2)


def state(number):
    return struct.pack("<6f", *[number] * 6)


with hybrid() as ctx:
    assert [ctx.section_kind(i) for i in range(2)] == [kvstate.SECTION_KV, kvstate.SECTION_RECURRENT]
    assert ctx.recurrent_state(1, 0) is None and ctx.max_cut(0) == 2**31 - 1
    assert ctx.decode(range(4)) == [[0, 1, 2, 3], [0, 0, 0, 0]]
    # The state of the last token, and in the rollback plane that of the token before.
    ctx.recurrent_set(1, 1, kvstate.RECURRENT_R, 0, state(4))
    ctx.recurrent_set(1, 1, kvstate.RECURRENT_R, 2 * ROW, state(3))
    assert ctx.recurrent_state(1, 0) == dict(pos=3, row=0, rollback=0, n_older=1)
    blob = ctx.state_seq_get_data(0)
    assert state(4) in blob and state(3) not in blob

    # One token can be cut off, two cannot.
    assert ctx.max_cut(0) == 1 and not ctx.can_seq_rm(0, 2) and not ctx.seq_rm(0, 2)
    assert ctx.can_seq_rm(0, 3) and ctx.seq_rm(0, 3)
    assert ctx.recurrent_state(1, 0) == dict(pos=2, row=2, rollback=1, n_older=0)
    assert state(3) in ctx.state_seq_get_data(0)
    assert ctx.can_rewind(0, 3) and not ctx.can_rewind(0, 2)
    assert ctx.rewind_obstacle(0, 2).kind == kvstate.REWIND_NO_STATE

    assert ctx.state_seq_set_data(blob, 1) == len(blob)
    found = ctx.recurrent_state(1, 1)
    assert (found["pos"], found["rollback"]) == (3, 0) and ctx.seq_pos_max(1) == 3
    assert ctx.recurrent_get(1, 1, kvstate.RECURRENT_R, found["row"] * ROW, ROW) == state(4)
    # llama.cpp's answer does not ask whether the plane holds a state, and after a restore none does.
    assert ctx.seq_rm(1, 3) and ctx.recurrent_state(1, 1)["n_older"] == -1 and not ctx.can_rewind(1, 3)
    fails(1, "layer 0 has no elements", ctx.recurrent_get, 1, 0, kvstate.RECURRENT_S, 0, 4)
    fails(1, "section: 0 is kv, not recurrent", ctx.recurrent_state, 0, 0)
    fails(1, "section: 2 is out of range", ctx.section_kind, 2)
    fails(1, "seq_id 2", ctx.can_seq_rm, 2)

# An indexer on the cells of its attention cache, and a draft's shared layers.
attention, indexer = [kvstate.Kv(8, [kvstate.Layer(4, 0, device=device)], mirrors=mirrors) for mirrors in (-1, 0)]
with kvstate.Context([attention, indexer, kvstate.Shared()]) as ctx:
    assert ctx.section_kind(2) == kvstate.SECTION_SHARED
    assert ctx.decode(range(3)) == [[0, 1, 2], [0, 1, 2], []]
fails(1, "mirrors: 0 is no attention cache before section 0", kvstate.Context, [indexer])


def dsv4(**fields):
    base = kvstate.Kv(64, [])
    layers = [kvstate.Layer(4, 0, device=device)]
    window = kvstate.Kv(64, layers, swa_type=kvstate.SWA_TYPE_STANDARD, n_swa=8)
    one = dict(ratio=4, kv_size=16, layers=[0], n_embd_k=4, state_size=8, n_embd_state=2)
    half = kvstate.Dsv4(one, dict(one, ratio=16, kv_size=4, **fields), one, devices=[device])
    return kvstate.Context([base, window, half], unified=False)


with dsv4() as ctx:
    assert ctx.section_kind(2) == kvstate.SECTION_DSV4
    assert ctx.decode(range(4))[2] == []
    ctx.dsv4_set(kvstate.DSV4_LID, kvstate.DSV4_K, 0, 0, b"a row of")
    blob = ctx.state_seq_get_data(0)
    assert b"a row of" in blob
    ctx.clear()
    assert ctx.dsv4_get(kvstate.DSV4_LID, kvstate.DSV4_K, 0, 0, 8) == bytes(8)
    assert ctx.state_seq_set_data(blob, 0) == len(blob)
    assert ctx.dsv4_get(kvstate.DSV4_LID, kvstate.DSV4_K, 0, 0, 8) == b"a row of"
fails(1, "dsv4.hca.n_embd_state: 0", dsv4, n_embd_state=0)
