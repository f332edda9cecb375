"""ffi-examples/python/kvstate: slot files and fingerprints, with caches where TEST_DEVICE says.

Run by tests/abi.rs, which sets PYTHONPATH.
"""

import ctypes
import dataclasses
import os
import struct
import tempfile
import threading

import kvstate
from check import decode_rows, fails, new_context, raises
from kvstate import SlotCheckpoint, SlotIdentity

os.chdir((folder := tempfile.TemporaryDirectory()).name)
N_TOKENS = 12


def gguf(name, value):
    """The smallest model: a GGUF of version 3 with one string and no tensors."""
    key = b"general.name"
    with open(name, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1))
        file.write(struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value)
    return name


def flip(name, at):
    with open(name, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def read(name):
    with open(name, "rb") as file:
        return file.read()


# A fingerprint is of files and settings.

model = gguf("model.gguf", b"first")
settings = {"type_k": "f16", "rope_freq_scale": "0.5"}
fingerprint = kvstate.fingerprint([model], settings)
assert len(fingerprint) == kvstate.FINGERPRINT_SIZE
assert fingerprint == kvstate.fingerprint([model.encode()], [("rope_freq_scale", b"0.5"), ("type_k", "f16")])
others = [
    kvstate.fingerprint([model], dict(settings, type_k="q8_0")),
    kvstate.fingerprint([model]),
    kvstate.fingerprint(settings=settings),
    kvstate.fingerprint([gguf("other.gguf", b"other")], settings),
    kvstate.fingerprint([gguf("same.gguf", b"first"), model], settings),
]
assert len({fingerprint, *others}) == 6
assert kvstate.fingerprint(["same.gguf"], settings) == fingerprint
fails(1, "'type_k' comes twice", kvstate.fingerprint, [model], [("type_k", "f16")] * 2)
fails(1, "no GGUF and no setting", kvstate.fingerprint)
fails(kvstate.STATUS_IO, "missing.gguf", kvstate.fingerprint, ["missing.gguf"])
raises(ValueError, kvstate.fingerprint, [model], {"type\0k": "f16"})
raises(TypeError, kvstate.fingerprint, [model], {"n": 5})
raises(TypeError, kvstate.fingerprint, model)

# Everything is saved, and comes back in contexts that are new.

tokens = [-1, *range(1, N_TOKENS)]
target, draft = new_context(), new_context()
checkpoints = []
for end in (4, 8):
    decode_rows(target, range(end - 4, end))
    partial = target.state_seq_get_data(0, kvstate.FLAGS_PARTIAL_ONLY)
    checkpoints.append(SlotCheckpoint(end, 0, end - 1, partial, b"draft\0%d" % end, b"driver"))
decode_rows(target, range(8, N_TOKENS))
decode_rows(draft, range(N_TOKENS), 1)
identity = SlotIdentity(fingerprint, b"a \0 salt", b"of the caller")
contents = dict(tokens=tokens, checkpoints=checkpoints, draft=draft, draft_seq_id=1, driver=b"spec\0ulative", identity=identity)
size = kvstate.slot_save(target, "slot.bin", 0, **contents)
assert size == os.path.getsize("slot.bin")
state, draft_state = target.state_seq_get_data(0), draft.state_seq_get_data(1)


def load(ctx, name="slot.bin", seq_id=0, **expected):
    return kvstate.slot_load(ctx, name, seq_id, **dict(dict(identity=identity), **expected))


with new_context() as ctx, new_context() as other:
    result = load(ctx, draft=other, draft_seq_id=1, verify=kvstate.VERIFY_FULL)
    assert ctx.state_seq_get_data(0) == state and other.state_seq_get_data(1) == draft_state
    assert result == kvstate.SlotResult(
        tokens=tokens,
        n_token_kept=N_TOKENS,
        pos_min=0,
        pos_max=N_TOKENS - 1,
        # Without the magic and the sequence of a blob.
        target_size=len(state) - 8,
        append_start=12 + 4 * N_TOKENS + len(state) - 8,
        checkpoints=checkpoints,
        n_checkpoint_in_file=2,
        draft=kvstate.SLOT_DRAFT_RESTORED,
        verified=kvstate.VERIFY_FULL,
        draft_reason="",
        draft_size=len(draft_state),
        driver=b"spec\0ulative",
        identity=identity,
        notes=[],
    )
    # Any reader of sequence files reads it.
    assert ctx.state_seq_load_file("slot.bin", 1)[0] == tokens

    for verify in (kvstate.VERIFY_NONE, kvstate.VERIFY_HEADERS, kvstate.VERIFY_FULL):
        assert load(ctx, verify=verify, require=kvstate.REQUIRE_IDENTITY | kvstate.REQUIRE_CHECKSUMS).verified == verify
    assert [one.n_tokens for one in load(ctx, n_ctx_checkpoints=1).checkpoints] == [8]
    fails(kvstate.STATUS_BUFFER_TOO_SMALL, "12 > 11", load, ctx, n_token_capacity=11)

    # Whose state it is. The cache is as it was.
    before = ctx.state_get_data()
    for field, value in dict(model=others[0], salt=b"a \0 solt").items():
        wrong = dataclasses.replace(identity, **{field: value})
        fails(kvstate.STATUS_MISMATCH, f"{field}: the state has", load, ctx, identity=wrong)
    fails(kvstate.STATUS_MISMATCH, "salt: the state has", load, ctx, identity=SlotIdentity(fingerprint))
    assert ctx.state_get_data() == before

    # A prompt without its reply: the driver and a checkpoint have seen more.
    result = load(ctx, p1=6, draft=other)
    assert (result.n_token_kept, result.pos_min, result.pos_max, ctx.seq_pos_max(0)) == (6, 0, 5, 5)
    assert result.tokens == tokens and result.driver == b"" and [one.n_tokens for one in result.checkpoints] == [4]
    assert result.draft == kvstate.SLOT_DRAFT_RESTORED and other.seq_pos_max(0) == 5 and len(result.notes) == 2
    result = load(ctx, p1=0)
    assert (result.n_token_kept, result.pos_min, result.pos_max, ctx.seq_pos_max(0)) == (0, -1, -1, -1)

    # Contents that are few, or none.
    kvstate.slot_save(target, "bare.bin", 0)
    result = load(ctx, "bare.bin", identity=SlotIdentity())
    assert (result.tokens, result.checkpoints, result.draft, result.driver) == ([], [], kvstate.SLOT_DRAFT_ABSENT, b"")
    assert result.identity == SlotIdentity() and ctx.state_seq_get_data(0) == state
    target.state_seq_save_file("plain.bin", 0, tokens)
    result = load(ctx, "plain.bin", identity=SlotIdentity())
    assert len(result.notes) == 1 and "no identity and no checksums" in result.notes[0]
    fails(kvstate.STATUS_MISMATCH, "required", load, ctx, "plain.bin", identity=SlotIdentity(fingerprint), require=1)

# A draft that does not fit is dropped, and the target stands.

with new_context() as ctx, new_context(n_embd=8) as other:
    other.decode(range(3))
    result = load(ctx, draft=other)
    assert result.draft == kvstate.SLOT_DRAFT_DROPPED and "mismatched key row size" in result.draft_reason
    assert (result.driver, result.draft_size) == (b"", 0)
    assert other.seq_pos_max(0) == -1 and ctx.state_seq_get_data(0) == state

# Damage in the state is refused, if it is looked for; damage of an appendix is left out and said.

with new_context() as ctx, new_context() as other:
    decode_rows(ctx, range(3))
    before = ctx.state_get_data()
    in_state, in_checkpoints = 12 + 4 * N_TOKENS + 40, read("slot.bin").index(b"SCKP") + 16
    flip("slot.bin", in_state)
    fails(kvstate.STATUS_CORRUPT, "crc32c of the memory state", load, ctx, verify=kvstate.VERIFY_FULL)
    assert ctx.state_get_data() == before
    flip("slot.bin", in_state)
    flip("slot.bin", in_checkpoints)
    result = load(ctx, verify=kvstate.VERIFY_FULL, draft=other)
    assert (result.checkpoints, result.n_checkpoint_in_file) == ([], 0) and len(result.notes) == 1
    assert result.notes[0].startswith("checkpoints are ignored: crc32c"), result.notes
    assert ctx.state_seq_get_data(0) == state and result.driver == b"spec\0ulative"
    flip("slot.bin", in_checkpoints)

# In a folder, with the draft beside.

with new_context() as ctx, new_context() as other:
    os.mkdir("slots")
    both = kvstate.slot_save(target, "one.bin", 0, directory="slots", sidecar=True, **contents)
    assert sorted(os.listdir("slots")) == ["one.bin", "one.drft"]
    result = load(ctx, "one.bin", directory="slots", draft=other)
    assert result.draft == kvstate.SLOT_DRAFT_RESTORED and other.seq_pos_max(0) == N_TOKENS - 1
    fails(1, "separator", kvstate.slot_save, target, "slots/one.bin", 0, directory=".")

# In the background: what is saved is what was there when it began.

reports, reached, go_on = [], threading.Event(), threading.Event()


def hold(done, total):
    reports.append((done, total))
    reached.set()
    go_on.wait()


salt = bytearray(identity.salt)
own = dict(contents, tokens=list(tokens), identity=SlotIdentity(fingerprint, salt, identity.metadata))
job = kvstate.slot_save_start(target, "background.bin", 0, hold, **own)
salt[:] = bytes(len(salt))
target.seq_rm(0, 5)
decode_rows(target, range(5, 9))
target.close()
draft.close()
reached.wait()
assert not os.path.exists("background.bin")
go_on.set()
assert job.wait() == size and reports[-1] == (size, size) and job.progress() == (size, size)
job.close()
assert read("background.bin") == read("slot.bin")

with new_context() as ctx:
    decode_rows(ctx, range(5))
    for progress in (lambda done, total: True, lambda done, total: 1 / 0):
        with kvstate.slot_save_start(ctx, "background.bin", 0, progress) as job:
            fails(kvstate.STATUS_CANCELLED, "cancelled after", job.wait)
    assert read("background.bin") == read("slot.bin")
    fails(1, "is the target's context", kvstate.slot_save, ctx, "x.bin", 0, draft=ctx)
    fails(1, "checkpoints[0].target: 0 bytes", kvstate.slot_save, ctx, "x.bin", 0, checkpoints=[SlotCheckpoint(1, 0, 0, b"")])
    raises(ValueError, kvstate.slot_save, ctx, "x.bin", 0, draft=draft)
    raises(TypeError, kvstate.slot_save, ctx, "x.bin", 0, tokenz=[])
    raises(OverflowError, kvstate.slot_save, ctx, "x.bin", 0, tokens=[1 << 31])
    raises(ctypes.ArgumentError, kvstate.slot_save, ctx, "x.bin", 1 << 32)
    assert not os.path.exists("x.bin")
fails(2, "not a live handle", kvstate.slot_load, target, "slot.bin", 0)
