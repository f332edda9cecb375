"""Slot files that are no good: each is refused with its reason, and everything else goes on."""

import os
import pathlib
import struct
import tempfile
import unittest

from conversation import OTHER_PROMPT, PROMPT, QUESTION, TOLERANCE, difference, make_models
from llama_server import LlamaServer, ServerDied, kvstate_lines, must_be_built

OPTIONS = ("--parallel", 4, "--ctx-size", 1024, "--cache-ram", 0)

models = None


def setUpModule():
    global models
    must_be_built()
    models = tempfile.TemporaryDirectory(prefix="models.")
    unittest.addModuleCleanup(models.cleanup)
    make_models(models.name, ["llama", "gemma3", "falcon-h1", "mamba", "qwen2vl"])


def attention_fields(data):
    """Offsets of the metadata of the first attention section, of one stream, without ext."""
    state = 12 + 4 * struct.unpack_from("<I", data, 8)[0]
    count = struct.unpack_from("<I", data, state + 4)[0]
    cells = state + 8
    header = cells + 12 * count
    names = ("v_trans", "n_layer", "n_rot_k", "n_rot_v", "type of K", "row size of K")
    fields = {"magic": 0, "version": 4, "number of tokens": 8, "n_stream": state, "cell count": state + 4}
    fields |= {"number of sequences of a cell": cells + 4}
    return fields | {name: header + 4 * i for i, name in enumerate(names)}


def flipped(data, offset, mask=1):
    return data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]


def damages(data, attention):
    """Name and bytes of each damaged copy of a slot file."""
    state = 12 + 4 * struct.unpack_from("<I", data, 8)[0]
    for length in (0, 3, 11, 12, state - 4, state, state + 4, state + 20, len(data) // 2, len(data) - 1):
        yield f"cut to {length} of {len(data)} bytes", data[:length]
    yield "zeros", bytes(len(data))
    yield "a text", b"The quick brown fox jumps over the lazy dog.\n" * 100
    yield "magic", flipped(data, 0)
    yield "version", flipped(data, 4)
    yield "number of tokens", flipped(data, 11, 0x80)
    if attention:
        fields = attention_fields(data)
        for name, offset in fields.items():
            yield name, flipped(data, offset)
        yield "position of a cell", flipped(data, fields["cell count"] + 4 + 3, 0x80)
        yield "cell count over a gigabyte", flipped(data, fields["cell count"] + 3, 0x7F)


class DamagedFiles(unittest.TestCase):
    """One server goes through all of it; beside it, two slots hold conversations."""

    model, options, attention, foreign = "llama-dense", (), True, ("gemma3-dense", ())

    def start(self, model, options, adapter=True):
        path = pathlib.Path(models.name, f"{model}.gguf")
        server = LlamaServer(path, self.directory, *OPTIONS, *options, adapter=adapter)
        self.addCleanup(server.kill)
        return server

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="slots.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        other = self.start(*self.foreign)
        other.complete(0, PROMPT)
        self.assertEqual(other.slot(0, "save", "foreign.bin")[0], 200)
        other.stop()

        # What the two conversations will answer at the end, if nothing disturbs them.
        reference = self.start(self.model, self.options)
        self.first, self.other = reference.complete(0, PROMPT), reference.complete(1, OTHER_PROMPT)
        self.continuations = [(0, PROMPT + self.first.tokens + QUESTION), (1, OTHER_PROMPT + self.other.tokens + QUESTION)]
        self.expected = [reference.complete(slot, prompt) for slot, prompt in self.continuations]
        reference.stop()

        self.server = self.start(self.model, self.options)
        for slot, prompt, reply in ((0, PROMPT, self.first), (1, OTHER_PROMPT, self.other)):
            self.assertLess(difference(self.server.complete(slot, prompt), reply), TOLERANCE)
        self.assertEqual(self.server.slot(0, "save", "good.bin")[0], 200)
        self.good = (self.directory / "good.bin").read_bytes()

    def assert_refused(self, filename):
        said = len(kvstate_lines(self.server.log_text()))
        status, answer = self.server.slot(2, "restore", filename)
        self.assertEqual(status, 400, answer)
        self.assertIn("Unable to restore slot", answer["error"]["message"])
        reasons = kvstate_lines(self.server.log_text())[said:]
        self.assertTrue(reasons, "kvstate gave no reason in the log")
        # The slot that was to be restored is empty now, and takes what is good.
        self.assertEqual(self.server.slot(2, "restore", "good.bin")[0], 200)

    def assert_undisturbed(self):
        for (slot, prompt), expected in zip(self.continuations, self.expected):
            reply = self.server.complete(slot, prompt)
            self.assertLess(difference(reply, expected), TOLERANCE)
            self.assertEqual(reply.computed, len(QUESTION) + 1)
        reply = self.server.complete(2, self.continuations[0][1])
        self.assertLess(difference(reply, self.expected[0]), TOLERANCE)
        self.assertEqual(reply.computed, len(QUESTION) + 1)
        self.server.stop()

    def test_damaged_files_are_refused_and_the_other_slots_go_on(self):
        for name, data in damages(self.good, self.attention):
            with self.subTest(name):
                (self.directory / "bad.bin").write_bytes(data)
                self.assert_refused("bad.bin")
            if self.server.has_ended():
                return
        self.assert_undisturbed()

    def test_llama_cpp_ends_at_a_file_that_lacks_a_byte(self):
        (self.directory / "bad.bin").write_bytes(self.good[:-1])
        stock = self.start(self.model, self.options, adapter=False)
        with self.assertRaisesRegex(ServerDied, "the server ended with -6"):
            stock.slot(2, "restore", "bad.bin")

    def test_a_file_of_another_model_is_refused_and_the_other_slots_go_on(self):
        self.assert_refused("foreign.bin")
        self.assert_undisturbed()

    def test_what_is_no_file_is_refused_and_the_other_slots_go_on(self):
        (self.directory / "directory").mkdir()
        os.mkfifo(self.directory / "pipe")
        for name in ("missing", "directory", "pipe"):
            with self.subTest(name):
                self.assert_refused(name)
            if self.server.has_ended():
                return
        self.assert_undisturbed()

    def test_a_save_that_fails_is_reported_and_the_other_slots_go_on(self):
        (self.directory / "taken").mkdir()
        status, answer = self.server.slot(0, "save", "taken")
        self.assertEqual((status, answer["error"]["message"]), (500, "Unable to save slot"))
        self.assertEqual(self.server.slot(2, "restore", "good.bin")[0], 200)
        self.assert_undisturbed()


class DamagedFilesOfTransposedV(DamagedFiles):
    options, foreign = ("--flash-attn", "off"), ("llama-dense", ("--flash-attn", "on"))


class DamagedFilesOfOtherTypes(DamagedFiles):
    foreign = ("llama-dense", ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"))


class DamagedFilesOfASlidingWindow(DamagedFiles):
    model, foreign = "gemma3-dense", ("llama-dense", ())


class DamagedFilesOfAHybrid(DamagedFiles):
    model, foreign = "falcon-h1-dense", ("qwen2vl-dense", ())


class DamagedFilesOfARecurrentModel(DamagedFiles):
    model, attention, foreign = "mamba-dense", False, ("falcon-h1-dense", ())


if __name__ == "__main__":
    unittest.main()
