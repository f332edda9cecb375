"""One sequence in an iSWA cache: decoded, saved, restored, checkpointed, filed.

    python3 ffi-examples/python/example.py DIR

The same steps as ffi-examples/c/example.c; the states that it writes to DIR (default: here) are the same bytes.
"""

import os
import sys

import kvstate

N_LAYER, N_EMBD, N_UBATCH = 2, 32, 8


def new_context():
    """A model with full-attention and sliding-window layers: two sections, the SWA one smaller."""
    layers = [kvstate.Layer(N_EMBD, N_EMBD)] * N_LAYER
    base = kvstate.Kv(64, layers)
    swa = kvstate.Kv(48, layers, swa_type=kvstate.SWA_TYPE_STANDARD, n_swa=8)
    return kvstate.Context([base, swa], n_seq_max=2, arch="example")


def write_row(row, salt, pos):
    """Stands in for what a model computes: bytes that depend on the layer and the position."""
    row[:] = [(salt * 57 + pos * 31 + i) % 256 for i in range(len(row))]


def decode(ctx, p0, n):
    """Decodes n tokens of sequence 0 from position p0, a ubatch at a time."""
    for done in range(0, n, N_UBATCH):
        pos = range(p0 + done, p0 + min(n, done + N_UBATCH))
        for section, cells in enumerate(ctx.decode(pos)):
            for il in range(N_LAYER):
                k, v = ctx.planes(section, il)
                salt = (section * N_LAYER + il) * 2
                for cell, p in zip(cells, pos):
                    write_row(k[cell], salt, p)
                    write_row(v[cell], salt + 1, p)


def main(directory):
    def write_file(name, data):
        with open(os.path.join(directory, name), "wb") as file:
            file.write(data)

    with new_context() as ctx:
        decode(ctx, 0, 20)
        whole = ctx.state_seq_get_data(0)
        write_file("sequence.bin", whole)
        print(f"saved positions {ctx.seq_pos_min(0)} to {ctx.seq_pos_max(0)}: {len(whole)} bytes")

        ctx.clear()
        assert ctx.state_seq_set_data(whole, 0) == len(whole)
        assert ctx.state_seq_get_data(0) == whole
        print("cleared, restored and saved again: the same bytes")

        # A checkpoint holds what seq_rm cannot bring back. Go on, then go back: cut, and restore the window.
        checkpoint = ctx.state_seq_get_data(0, kvstate.FLAGS_PARTIAL_ONLY)
        write_file("checkpoint.bin", checkpoint)
        decode(ctx, 20, 30)
        ctx.seq_rm(0, 20, -1)
        assert ctx.state_seq_set_data(checkpoint, 0, kvstate.FLAGS_PARTIAL_ONLY) == len(checkpoint)
        print(
            f"went back to the checkpoint of {len(checkpoint)} bytes: "
            f"positions {ctx.seq_pos_min(0)} to {ctx.seq_pos_max(0)}"
        )

        slot = os.path.join(directory, "slot.bin")
        n_written = ctx.state_seq_save_file(slot, 0, range(1000, 1020))
        tokens, n_read = ctx.state_seq_load_file(slot, 1, n_token_capacity=32)
        assert n_read == n_written
        print(f"slot file of {n_read} bytes loaded into sequence 1: {len(tokens)} tokens, the last one {tokens[-1]}")

        damaged = bytearray(whole)
        damaged[8] ^= 1  # a state is untrusted input
        try:
            ctx.state_seq_set_data(damaged, 0)
        except kvstate.KvsError as error:
            print(f"damaged state refused with status {error.status}: {error}")
        else:
            raise AssertionError("the damaged state was restored")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
