"""ffi-examples/python/kvstate: ranges of positions, where a sequence can go on, and checkpoints, where TEST_DEVICE says.

Run by tests/abi.rs, which sets PYTHONPATH.
"""

import ctypes
import dataclasses
import os
import tempfile

import kvstate
from check import decode_rows, device, fails, forget_sequence, new_context, raises

os.chdir((folder := tempfile.TemporaryDirectory()).name)
N_TOKENS = 12
tokens = list(range(100, 100 + N_TOKENS))

# Pieces that are added are the whole.

with new_context() as ctx:
    decode_rows(ctx, range(N_TOKENS))
    whole = ctx.state_seq_get_data(0)
    assert ctx.state_seq_get_data_range(0) == whole
    for p0, p1 in ((0, 5), (5, 6), (6, -1)):
        piece = ctx.state_seq_get_data_range(0, p0, p1)
        assert len(piece) == ctx.state_seq_get_size_range(0, p0, p1)
        assert ctx.state_seq_set_data(piece, 1, kvstate.FLAGS_APPEND) == len(piece)
    assert forget_sequence(ctx.state_seq_get_data(1)) == forget_sequence(whole)
    assert ctx.state_seq_set_data(ctx.state_seq_get_data_range(0, 3, 7), 1)
    assert (ctx.seq_pos_min(1), ctx.seq_pos_max(1)) == (3, 6)

    before, flags = ctx.state_get_data(), kvstate.FLAGS_APPEND
    meets = "position 6 of the state is not behind 6"
    fails(kvstate.STATUS_POSITIONS_MEET, meets, ctx.state_seq_set_data, piece, 1, flags)
    fails(1, "APPEND is for calls that restore", ctx.state_seq_get_data_range, 0, 0, 4, flags)
    fails(1, "APPEND with PARTIAL_ONLY", ctx.state_seq_set_data, piece, 1, flags | kvstate.FLAGS_PARTIAL_ONLY)
    raises(ctypes.ArgumentError, ctx.state_seq_get_data_range, 0, 0, 1 << 31)
    assert ctx.state_get_data() == before

    # In files: pieces, and the prompt without the reply.
    sizes = [
        ctx.state_seq_save_file_range(f"piece{p0}.bin", 0, p0, p1, tokens[p0:p1]) for p0, p1 in ((0, 5), (5, N_TOKENS))
    ]
    ctx.clear()
    first = ctx.state_seq_load_file_range("piece0.bin", 2)
    assert first == (tokens[:5], 5, sizes[0]) and first.n_token_kept == 5
    second = ctx.state_seq_load_file_range("piece5.bin", 2, flags=kvstate.FLAGS_APPEND)
    assert second == (tokens[5:], 7, sizes[1])
    assert forget_sequence(ctx.state_seq_get_data(2)) == forget_sequence(whole)
    size = ctx.state_seq_save_file("whole.bin", 2, tokens)
    assert ctx.state_seq_load_file_range("whole.bin", 0, 0, 7) == (tokens, 7, size) and ctx.seq_pos_max(0) == 6
    assert forget_sequence(ctx.state_seq_get_data(0)) == forget_sequence(ctx.state_seq_get_data_range(2, 0, 7))
    assert ctx.state_seq_load_file_range("whole.bin", 0, p1=0) == (tokens, 0, size) and ctx.seq_pos_max(0) == -1
    fails(kvstate.STATUS_BUFFER_TOO_SMALL, "12 > 11", ctx.state_seq_load_file_range, "whole.bin", 0, n_token_capacity=11)
    fails(kvstate.STATUS_IO, "none.bin", ctx.state_seq_load_file_range, "none.bin", 0)
    assert ctx.state_seq_save_file_range("empty.bin", 0) and ctx.state_seq_load_file_range("empty.bin", 2).tokens == []

# A history that diverges: full attention of 128 cells, and a window of 8 positions in 12 cells.


def new_iswa(n_swa=8):
    layers = [kvstate.Layer(4, 4, device=device)]
    window = kvstate.Kv(12, layers, swa_type=kvstate.SWA_TYPE_STANDARD, n_swa=n_swa)
    return kvstate.Context([kvstate.Kv(128, layers), window], n_seq_max=2)


def generate(ctx, begin, end):
    for pos in range(begin, end):
        decode_rows(ctx, [pos], section=1)


def window(ctx):
    """Positions and K of the cells that the window still has."""
    state = ctx.state_seq_get_data(0, kvstate.FLAGS_PARTIAL_ONLY)
    return [pos for pos in range(64) if b"K%7d" % pos in state and b"V%7d" % pos in state]


with new_iswa() as ctx:
    for memory in (kvstate.CHECKPOINT_MEMORY_CACHE, kvstate.CHECKPOINT_MEMORY_HOST):
        ctx.clear()
        checkpoints = kvstate.Checkpoints(memory=memory)
        for end in (16, 32, 48):
            generate(ctx, end - 16, end)
            checkpoints.take(ctx, end)
        size = len(ctx.state_seq_get_data(0, kvstate.FLAGS_PARTIAL_ONLY))
        generate(ctx, 48, 64)

        # Where the sequence can go on as it is.
        assert ctx.can_rewind(0, 59) and not ctx.can_rewind(0, 58) and not ctx.can_rewind(0, 65)
        assert [ctx.rewind_pos(0, pos) for pos in (100, 60, 58)] == [64, 60, 0] and ctx.rewind_pos(1, 5) == 0
        obstacle = ctx.rewind_obstacle(0, 40)
        assert obstacle == (kvstate.REWIND_CELLS_GONE, 33, 39, 52, 63, obstacle.text)
        assert obstacle.text == "section swa has positions 52 to 63, and a token at 40 needs positions 33 to 39"
        assert ctx.rewind_obstacle(0, 70)[:5] == (kvstate.REWIND_PAST_END, -1, -1, -1, 63)
        assert ctx.rewind_obstacle(0, 60) == (kvstate.REWIND_POSSIBLE, -1, -1, -1, -1, "")

        # What the checkpoints are worth.
        assert len(checkpoints) == 3 and checkpoints.size == 3 * size
        assert list(checkpoints) == [(end, size, end - 8, end - 1) for end in (16, 32, 48)]
        assert checkpoints[-1].n_tokens == 48
        raises(IndexError, checkpoints.__getitem__, 3)
        assert checkpoints.verdict(ctx, 1, 40) == (kvstate.CHECKPOINT_SERVES, 32, "serves at position 32")
        verdict = checkpoints.verdict(ctx, 2, 40)
        assert verdict.kind == kvstate.CHECKPOINT_PAST_DIVERGENCE and "past the divergence" in verdict.text
        with new_iswa(9) as other:
            assert checkpoints.verdict(other, 1, 40).kind == kvstate.CHECKPOINT_UNFIT

        # Through a slot file into another context.
        stored = [checkpoints.slot_checkpoint(i) for i in range(3)]
        assert checkpoints.slot_checkpoint(-1) == stored[2] and len(stored[2].target) == size
        raises(IndexError, checkpoints.slot_checkpoint, 3)
        kvstate.slot_save(ctx, "checkpoints.bin", 0, checkpoints=stored)
        with new_iswa() as other, kvstate.Checkpoints(memory=memory) as put:
            for one in kvstate.slot_load(other, "checkpoints.bin", 0).checkpoints:
                put.put(other, one)
            assert list(put) == list(checkpoints)
            fails(1, "pos_max: 40, the state ends at 47", put.put, other, dataclasses.replace(stored[2], pos_max=40))
            assert put.resume(other, 40) == (32, 32) and other.seq_pos_max(0) == 31

        # Back as it is, then by a checkpoint, then from the start.
        assert checkpoints.resume(ctx, 60) == (60, None) and len(checkpoints) == 3 and ctx.seq_pos_max(0) == 59
        assert checkpoints.resume(ctx, 40) == (32, 32) and len(checkpoints) == 2 and ctx.seq_pos_max(0) == 31
        assert window(ctx) == list(range(24, 32))
        generate(ctx, 32, 40)
        checkpoints.truncate(20)
        assert [one.n_tokens for one in checkpoints] == [16]
        assert checkpoints.resume(ctx, 10) == (0, None) and ctx.seq_pos_max(0) == -1 and len(checkpoints) == 0
        fails(1, "empty", checkpoints.take, ctx, 0)
        checkpoints.close()
        checkpoints.close()
        fails(kvstate.STATUS_INVALID_HANDLE, "checkpoints is not a live handle", len, checkpoints)
        fails(kvstate.STATUS_INVALID_HANDLE, "checkpoints is not a live handle", checkpoints.take, ctx, 1)

    # As many as there may be, and no others make room for one that is too large.
    generate(ctx, 0, 40)
    few = kvstate.Checkpoints(n_max=2, min_step=1)
    for end in range(41, 46):
        generate(ctx, end - 1, end)
        few.take(ctx, end)
    assert len(few) == 2 and few[-1].n_tokens == 45
    with kvstate.Checkpoints(max_bytes=size - 1) as small:
        fails(kvstate.STATUS_OUT_OF_MEMORY, f"{size} bytes", small.take, ctx, 45)
    fails(1, "n_max: 0", kvstate.Checkpoints, n_max=0)
    raises(OverflowError, kvstate.Checkpoints, n_max=1 << 32)
    raises(TypeError, kvstate.Checkpoints, n_most=1)
    whole = ctx.state_seq_get_data(0)

# They outlive their context.
with few, new_iswa() as ctx:
    ctx.state_seq_set_data(whole, 0)
    generate(ctx, 45, 60)
    assert few.resume(ctx, 50) == (45, 45) and window(ctx) == list(range(37, 45))
fails(kvstate.STATUS_INVALID_HANDLE, "ctx is not a live handle", kvstate.Checkpoints().take, ctx, 1)
