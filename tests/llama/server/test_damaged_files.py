"""Slot files that are no good: each is refused with its reason, and everything else goes on."""

import pathlib
import struct
import tempfile
import unittest

from conversation import OTHER_PROMPT, PROMPT, QUESTION, TOLERANCE, difference, make_models
from llama_server import LlamaServer, ServerDied, must_be_built
from slot_file import flipped, state_of

OPTIONS = ("--parallel", 4, "--ctx-size", 1024, "--cache-ram", 0)

models = None


def setUpModule():
    global models
    must_be_built()
    models = tempfile.TemporaryDirectory(prefix="models.")
    unittest.addModuleCleanup(models.cleanup)
    make_models(models.name, ["llama", "gemma3", "falcon-h1", "mamba", "qwen2vl"])


NO_STATE_FILE = r"unknown \(magic, version\)"
# llama-server asks for the number of tokens first, which llama.cpp may answer itself.
CUT_HEADER = r"truncated state: .* needs|token count in sequence state file exceeds|unknown \(magic, version\)"
NO_FIT = "failed to restore sequence state"

# Metadata behind the cells of the first attention section, in order, and what is said about another value.
HEADER = {
    "v_trans": "mismatched value (element|row) size: the state has",
    "n_layer": "mismatched layer count: the state has",
    "n_rot_k": "incompatible key rotation: the state has",
    "n_rot_v": "incompatible value rotation: the state has",
    "type of K": "mismatched key type: the state has",
    "row size of K": "mismatched key row size: the state has",
}


def flips(data):
    """As damages, of a file with checksums."""
    state, end = 12 + 4 * struct.unpack_from("<I", data, 8)[0], len(state_of(data))
    yield "a token", flipped(data, 12), "crc32c of header and tokens: "
    for offset in (state, state + 4, (state + end) // 2, end - 1):
        yield f"byte {offset} of {len(data)}", flipped(data, offset), "crc32c of the memory state: "


def damages(data, attention):
    """Of each damaged copy of a file without checksums: its name, its bytes, and a pattern of the reason in the log."""
    state = 12 + 4 * struct.unpack_from("<I", data, 8)[0]
    for length in (0, 3, 11, 12, state - 4, state, state + 4, state + 20, len(data) // 2, len(data) - 1):
        reason = CUT_HEADER if length < state else "truncated state: .* needs"
        yield f"cut to {length} of {len(data)} bytes", data[:length], reason
    yield "zeros", bytes(len(data)), NO_STATE_FILE
    yield "a text", b"The quick brown fox jumps over the lazy dog.\n" * 100, NO_STATE_FILE
    yield "magic", flipped(data, 0), NO_STATE_FILE
    yield "version", flipped(data, 4), NO_STATE_FILE
    yield "number of tokens", flipped(data, 11, 0x80), CUT_HEADER
    if attention:
        # A slot file is saved from stream 0, whose cells come first. Without ext, a cell has 12 bytes.
        count, cells = state + 4, state + 8
        header = cells + 12 * struct.unpack_from("<I", data, count)[0]
        yield "n_stream", flipped(data, state), NO_FIT
        yield "cell count", flipped(data, count), NO_FIT
        yield "cell count of a gigabyte", flipped(data, count + 3, 0x7F), "truncated state: .* needs"
        yield "position of a cell", flipped(data, cells + 3, 0x80), "pos: -2147483648"
        yield "number of sequences of a cell", flipped(data, cells + 4), "n_seq_id: 0"
        for i, (name, reason) in enumerate(HEADER.items()):
            yield name, flipped(data, header + 4 * i), reason


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

    def assert_refused(self, filename, reason):
        said = len(self.server.log_text())
        status, answer = self.server.slot(2, "restore", filename)
        self.assertEqual(status, 400, answer)
        self.assertIn("Unable to restore slot", answer["error"]["message"])
        self.assertRegex(self.server.log_after(said, reason), reason)
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

    def assert_all_refused(self, cases):
        for name, filename, reason in cases:
            with self.subTest(name):
                self.assert_refused(filename, reason)
            if self.server.has_ended():
                return
        self.assert_undisturbed()

    def test_damaged_files_are_refused_and_the_other_slots_go_on(self):
        cases = []
        damaged = (*damages(state_of(self.good), self.attention), *flips(self.good))
        for i, (name, data, reason) in enumerate(damaged):
            cases.append((name, f"{i}.bin", reason))
            (self.directory / f"{i}.bin").write_bytes(data)
        self.assert_all_refused(cases)

    def test_llama_cpp_ends_at_a_file_that_lacks_a_byte(self):
        (self.directory / "bad.bin").write_bytes(state_of(self.good)[:-1])
        stock = self.start(self.model, self.options, adapter=False)
        with self.assertRaisesRegex(ServerDied, "the server ended with -6"):
            stock.slot(2, "restore", "bad.bin")

    def test_a_file_without_its_checksums_is_restored_with_a_word_in_the_log(self):
        for name, data in (("plain.bin", state_of(self.good)), ("cut.bin", self.good[:-1])):
            (self.directory / name).write_bytes(data)
            said = len(self.server.log_text())
            self.assertEqual(self.server.slot(2, "restore", name)[0], 200)
            self.assertRegex(self.server.log_after(said, "nothing was compared"), "nothing was compared")
        self.assert_undisturbed()

    def test_a_file_of_another_model_is_refused_and_the_other_slots_go_on(self):
        self.assert_refused("foreign.bin", NO_FIT)
        self.assert_undisturbed()

    def test_what_is_no_file_is_refused_and_the_other_slots_go_on(self):
        (self.directory / "directory").mkdir()
        cases = (("missing", "missing", "No such file or directory"), ("directory", "directory", "directory"))
        self.assert_all_refused(cases)

    def test_a_save_that_fails_is_reported_and_the_other_slots_go_on(self):
        (self.directory / "taken").mkdir()
        status, answer = self.server.slot(0, "save", "taken")
        self.assertEqual((status, answer["error"]["message"]), (500, "Unable to save slot"))
        self.assertEqual(self.server.slot(2, "restore", "good.bin")[0], 200)
        self.assert_undisturbed()


class DamagedFilesOfTransposedV(DamagedFiles):
    options, foreign = ("--flash-attn", "off"), ("gemma3-dense", ("--flash-attn", "off"))

    def test_a_file_with_V_in_rows_is_restored(self):
        rows = self.start(self.model, ("--flash-attn", "on"))
        rows.complete(0, PROMPT)
        self.assertEqual(rows.slot(0, "save", "rows.bin")[0], 200)
        rows.stop()
        self.assertEqual(self.server.slot(2, "restore", "rows.bin")[0], 200)
        self.assert_undisturbed()


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
