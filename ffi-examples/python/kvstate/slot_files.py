"""Slot files: a sequence with its tokens, checkpoints, draft, and whose state it is."""

import ctypes as C
from dataclasses import dataclass

from . import _structs as S
from ._library import c_string, checked, i32s, init, lib, path_bytes, pointer, text
from .constants import FINGERPRINT_SIZE
from .jobs import Job


@dataclass(frozen=True)
class SlotCheckpoint:
    """A checkpoint after n_tokens tokens: states as bytes, target one with FLAGS_PARTIAL_ONLY."""

    n_tokens: int
    pos_min: int
    pos_max: int
    target: bytes
    draft: bytes = b""
    driver: bytes = b""


@dataclass(frozen=True)
class SlotIdentity:
    """Whose state it is, any bytes: model (see fingerprint) and salt are compared, metadata is not."""

    model: bytes = b""
    salt: bytes = b""
    metadata: bytes = b""


@dataclass(frozen=True)
class SlotResult:
    """What a slot file gave, as kvs_slot_result names it; sizes in bytes."""

    tokens: list
    n_token_kept: int
    pos_min: int
    pos_max: int
    target_size: int
    append_start: int
    checkpoints: list
    n_checkpoint_in_file: int
    draft: int
    verified: int
    draft_reason: str
    draft_size: int
    driver: bytes
    identity: SlotIdentity
    notes: list


def fingerprint(ggufs=(), settings=()):
    """The fingerprint, 32 bytes, of a model's GGUF files, by path, and of settings: a dict or pairs of str."""
    if isinstance(ggufs, (str, bytes)):
        raise TypeError("ggufs is a list of paths")
    paths = [path_bytes(path) for path in ggufs]
    pairs = list(settings.items() if hasattr(settings, "items") else settings)
    paths = (C.c_char_p * len(paths))(*paths)
    settings = (S.Setting * len(pairs))(*((c_string(key), c_string(value)) for key, value in pairs))
    out = (C.c_uint8 * FINGERPRINT_SIZE)()
    checked(lib.kvs_fingerprint(paths, len(paths), settings, len(settings), out))
    return bytes(out)


def slot_save(ctx, filename, seq_id, **contents):
    """Writes a slot file, which begins as state_seq_save_file writes it; returns its size.

    contents: tokens; checkpoints, SlotCheckpoints, oldest first; draft, the Context of a draft model, and draft_seq_id;
    sidecar, True: the draft is in a file of its own beside; driver, bytes; identity, a SlotIdentity; directory: filename is
    a name in it and has no separator.
    """
    params, _alive = save_params(**contents)
    size = C.c_size_t()
    checked(lib.kvs_slot_save(ctx._handle, path_bytes(filename), seq_id, C.byref(params), C.byref(size)))
    return size.value


def slot_save_start(ctx, filename, seq_id, progress=None, **contents):
    """Begins slot_save of the slot as it is now; returns a Job. The contexts may go on, or be closed.

    progress: as for Snapshot.get_data_start.
    """
    params, _alive = save_params(**contents)
    return Job(progress, lib.kvs_slot_save_start, ctx._handle, path_bytes(filename), seq_id, C.byref(params))


def slot_load(ctx, filename, dest_seq_id, **expected):
    """Replaces a sequence by the one in a slot file, or in any sequence file; returns a SlotResult.

    expected: draft and draft_seq_id, directory, as for slot_save; identity, whose state it has to be; verify, VERIFY_*;
    require, REQUIRE_*; p1: only positions below are restored; n_token_capacity; n_ctx_checkpoints: the last ones.

    Raises, and nothing has changed, for another model, salt or geometry, and for damage before the end of the state. What
    is damaged behind it is left out, and said in notes; so is a draft that does not fit, in draft_reason.
    """
    params, _alive = load_params(**expected)
    return loaded(lib.kvs_slot_load, ctx._handle, path_bytes(filename), dest_seq_id, C.byref(params))


# What auto-save has in common with slot files


def save_params(tokens=(), checkpoints=(), driver=b"", draft=None, identity=SlotIdentity(), directory=None, **fields):
    """kvs_slot_save_params, and what they point to, which has to live until the call returns."""
    alive = []
    tokens, checkpoints = i32s(tokens), [checkpoint_struct(checkpoint, alive) for checkpoint in checkpoints]
    checkpoints = (S.SlotCheckpoint * len(checkpoints))(*checkpoints)
    params = init(S.SlotSaveParams, tokens=tokens, n_tokens=len(tokens), checkpoints=checkpoints,
                  n_checkpoint=len(checkpoints), **_common(draft, directory), **fields)  # fmt: skip
    _set_bytes(params, alive, driver=driver)
    _set_identity(params, alive, identity)
    return params, alive


def load_params(draft=None, identity=SlotIdentity(), directory=None, **fields):
    """kvs_slot_load_params, and what they point to, which has to live until the call returns."""
    alive = []
    params = init(S.SlotLoadParams, **_common(draft, directory), **fields)
    _set_identity(params, alive, identity)
    return params, alive


def loaded(load, *arguments):
    """The SlotResult of a call that fills a kvs_slot_result behind these arguments."""
    result = init(S.SlotResult)
    try:
        checked(load(*arguments, C.byref(result)))
        return _slot_result(result)
    finally:
        lib.kvs_slot_result_free(C.byref(result))


def checkpoint_struct(checkpoint, alive):
    """kvs_slot_checkpoint; what it points to goes to alive."""
    struct = init(S.SlotCheckpoint, n_tokens=checkpoint.n_tokens, pos_min=checkpoint.pos_min, pos_max=checkpoint.pos_max)
    _set_bytes(struct, alive, target=checkpoint.target, draft=checkpoint.draft, driver=checkpoint.driver)
    return struct


def _common(draft, directory):
    if draft is not None and draft._handle is None:
        raise ValueError("draft: the context is closed")
    return dict(
        draft=None if draft is None else draft._handle.value,
        directory=None if directory is None else path_bytes(directory),
    )


def _set_identity(params, alive, identity):
    _set_bytes(params.identity, alive, model=identity.model, salt=identity.salt, metadata=identity.metadata)


def _set_bytes(struct, alive, **fields):
    for name, buffer in fields.items():
        address, size, kept = pointer(buffer)
        setattr(struct, name, address)
        setattr(struct, f"{name}_size", size)
        alive.append(kept)


def _bytes(struct, name):
    size = getattr(struct, f"{name}_size")
    return C.string_at(getattr(struct, name), size) if size else b""


def _slot_result(result):
    checkpoints = [
        SlotCheckpoint(one.n_tokens, one.pos_min, one.pos_max, *(_bytes(one, name) for name in ("target", "draft", "driver")))
        for one in result.checkpoints[: result.n_checkpoint]
    ]
    return SlotResult(
        tokens=result.tokens[: result.n_tokens],
        n_token_kept=result.n_token_kept,
        pos_min=result.pos_min,
        pos_max=result.pos_max,
        target_size=result.target_size,
        append_start=result.append_start,
        checkpoints=checkpoints,
        n_checkpoint_in_file=result.n_checkpoint_in_file,
        draft=result.draft,
        verified=result.verified,
        draft_reason=text(result.draft_reason or b""),
        draft_size=result.draft_size,
        driver=_bytes(result, "driver"),
        identity=SlotIdentity(*(_bytes(result.identity, name) for name in ("model", "salt", "metadata"))),
        notes=[text(note) for note in result.notes[: result.n_note]],
    )
