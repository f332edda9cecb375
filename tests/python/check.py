"""What the tests of the Python wrapper share. TEST_DEVICE, a CUDA device, says where caches are; without it, in host memory."""

import os

import kvstate

device = int(os.environ.get("TEST_DEVICE", kvstate.DEVICE_HOST))


def fails(status, text, call, *arguments, **fields):
    """The call raises KvsError, with the status and with the text in its reason."""
    try:
        call(*arguments, **fields)
    except kvstate.KvsError as error:
        assert (error.status, text in str(error)) == (status, True), (error.status, str(error))
    else:
        raise AssertionError(f"{call.__name__}{arguments} did not fail")


def raises(kind, call, *arguments, **fields):
    """The call does not get as far as the library."""
    try:
        call(*arguments, **fields)
    except kind:
        return
    raise AssertionError(f"{call.__name__}{arguments} did not raise {kind.__name__}")


def new_context(kv_size=64, n_embd=4, **fields):
    """One layer of f16; rows of 8 bytes if n_embd is 4."""
    layer = kvstate.Layer(n_embd, n_embd, device=device)
    return kvstate.Context([kvstate.Kv(kv_size, [layer])], **dict(dict(n_seq_max=3), **fields))


def decode_rows(ctx, pos, seq_id=0, section=0):
    """Tokens whose K and V say their position."""
    pos = list(pos)
    for p, cell in zip(pos, ctx.decode(pos, seq_id)[section]):
        ctx.kv_set(section, 0, kvstate.KV_K, cell * 8, b"K%7d" % p)
        ctx.kv_set(section, 0, kvstate.KV_V, cell * 8, b"V%7d" % p)


def forget_sequence(state):
    """A state of one unified attention cache without its sequence: behind the magic, and of each cell."""
    state = bytearray(state)
    state[4:8] = bytes(4)
    for cell in range(int.from_bytes(state[12:16], "little")):
        state[16 + 12 * cell + 8 : 16 + 12 * cell + 12] = bytes(4)
    return bytes(state)
