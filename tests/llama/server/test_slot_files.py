"""What slot files hold, and slots without anything to save."""

import os
import pathlib
import struct
import tempfile
import unittest

from conversation import PROMPT, QUESTION, TOLERANCE, difference, make_models
from llama_server import LlamaServer, must_be_built
from slot_file import state_of

OPTIONS = ("--parallel", 4, "--ctx-size", 1024, "--cache-ram", 0)

models = None


def setUpModule():
    global models
    must_be_built()
    models = tempfile.TemporaryDirectory(prefix="models.")
    unittest.addModuleCleanup(models.cleanup)
    make_models(models.name, ["llama", "gemma3", "falcon-h1"])


class SlotFiles(unittest.TestCase):
    def start(self, model, adapter=True):
        directory = tempfile.TemporaryDirectory(prefix="slots.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        server = LlamaServer(pathlib.Path(models.name, f"{model}.gguf"), self.directory, *OPTIONS, adapter=adapter)
        self.addCleanup(server.kill)
        return server

    def test_a_plain_token_list_of_an_older_server_is_restored(self):
        server = self.start("gemma3-dense")
        reply = server.complete(0, PROMPT)
        n_tokens = len(PROMPT) + len(reply.tokens) - 1
        status, saved = server.slot(0, "save", "packed.bin")
        self.assertEqual((status, saved["n_saved"]), (200, n_tokens))

        # Magic, version and the number of words; the words are -1, a version, the number of tokens, the tokens, padding.
        packed = state_of((self.directory / "packed.bin").read_bytes())
        header, words = packed[:8], struct.unpack_from("<I", packed, 8)[0]
        self.assertEqual(struct.unpack_from("<iII", packed, 12), (-1, 1, n_tokens))
        plain = header + struct.pack("<I", n_tokens) + packed[24 : 24 + 4 * n_tokens] + packed[12 + 4 * words :]
        (self.directory / "plain.bin").write_bytes(plain)

        status, restored = server.slot(1, "restore", "plain.bin")
        self.assertEqual((status, restored["n_restored"], restored["n_read"]), (200, n_tokens, len(plain)))
        continuation = PROMPT + reply.tokens + QUESTION
        expected, answer = server.complete(0, continuation), server.complete(1, continuation)
        self.assertLess(difference(answer, expected), TOLERANCE)
        self.assertEqual(answer.computed, len(QUESTION) + 1)

    def test_a_file_of_version_3_is_restored(self):
        server = self.start("llama-dense")
        reply = server.complete(0, PROMPT)
        self.assertEqual(server.slot(0, "save", "4.bin")[0], 200)
        data = state_of((self.directory / "4.bin").read_bytes())

        # Version 3 has no rotations behind the number of layers; three of four streams have no cells, and so no header.
        state = 12 + 4 * struct.unpack_from("<I", data, 8)[0]
        n_stream, n_cells = struct.unpack_from("<II", data, state)
        rotations = state + 8 + 12 * n_cells + 8
        self.assertEqual((n_stream, struct.unpack_from("<IIII", data, rotations - 8)), (4, (0, 2, 0, 0)))
        version_3 = data[:4] + struct.pack("<I", 3) + data[8:rotations] + data[rotations + 8 :]
        (self.directory / "3.bin").write_bytes(version_3)

        status, restored = server.slot(1, "restore", "3.bin")
        self.assertEqual((status, restored.get("n_read")), (200, len(version_3)), restored)
        continuation = PROMPT + reply.tokens + QUESTION
        expected, answer = server.complete(0, continuation), server.complete(1, continuation)
        self.assertLess(difference(answer, expected), TOLERANCE)
        self.assertEqual(answer.computed, len(QUESTION) + 1)

    def test_llama_cpp_restores_what_is_before_the_checksums(self):
        server = self.start("llama-dense")
        server.complete(0, PROMPT)
        self.assertEqual(server.slot(0, "save", "slot.bin")[0], 200)
        data = (self.directory / "slot.bin").read_bytes()
        stock = self.start("llama-dense", adapter=False)
        (self.directory / "slot.bin").write_bytes(data)
        status, restored = stock.slot(1, "restore", "slot.bin")
        self.assertEqual((status, restored.get("n_read")), (200, len(state_of(data))), restored)
        # Saved again, it has as many bytes.
        self.assertEqual(stock.slot(1, "save", "again.bin")[0], 200)
        again = self.directory / "again.bin"
        self.assertEqual(again.stat().st_size, len(state_of(data)))

    def test_what_a_newer_server_appends_begins_where_the_restore_has_ended(self):
        server = self.start("llama-dense")
        server.complete(0, PROMPT)
        saved = server.slot(0, "save", "slot.bin")[1]
        with open(self.directory / "slot.bin", "ab") as file:
            file.write(b"SCKP" + struct.pack("<II", 1, 0))
        status, restored = server.slot(1, "restore", "slot.bin")
        self.assertEqual((status, restored.get("n_read")), (200, saved["n_written"]), restored)

    def test_a_pipe_is_refused_without_waiting_for_its_other_end(self):
        server = self.start("llama-dense")
        os.mkfifo(self.directory / "pipe")
        said = len(server.log_text())
        status, answer = server.slot(1, "restore", "pipe")
        self.assertEqual(status, 400, answer)
        self.assertIn("not a regular file", server.log_after(said, "not a regular file"))
        self.assertEqual(len(server.complete(0, PROMPT).tokens), 12)

    def test_an_erased_slot_computes_its_prompt_again(self):
        server = self.start("gemma3-dense")
        first = server.complete(0, PROMPT)
        self.assertEqual(server.slot(0, "erase")[0], 200)
        again = server.complete(0, PROMPT)
        self.assertLess(difference(again, first), TOLERANCE)
        self.assertEqual(again.computed, len(PROMPT))

    def test_an_empty_slot_is_saved_and_empties_the_slot_that_it_is_restored_in(self):
        for model in ("llama-dense", "gemma3-dense", "falcon-h1-dense"):
            with self.subTest(model):
                server = self.start(model)
                first = server.complete(0, PROMPT)
                server.complete(1, PROMPT)
                status, saved = server.slot(2, "save", "empty.bin")
                self.assertEqual((status, saved["n_saved"]), (200, 0))
                status, restored = server.slot(1, "restore", "empty.bin")
                self.assertEqual((status, restored["n_restored"], restored["n_read"]), (200, 0, saved["n_written"]))
                again = server.complete(1, PROMPT)
                self.assertLess(difference(again, first), TOLERANCE)
                self.assertEqual(again.computed, len(PROMPT))

    def test_a_slot_restored_over_another_conversation_replaces_it(self):
        server = self.start("gemma3-dense")
        first = server.complete(0, PROMPT)
        server.complete(1, list(reversed(PROMPT)) + PROMPT)
        self.assertEqual(server.slot(0, "save", "first.bin")[0], 200)
        self.assertEqual(server.slot(1, "restore", "first.bin")[0], 200)
        continuation = PROMPT + first.tokens + QUESTION
        expected, answer = server.complete(0, continuation), server.complete(1, continuation)
        self.assertLess(difference(answer, expected), TOLERANCE)
        self.assertEqual((answer.computed, expected.computed), (len(QUESTION) + 1, len(QUESTION) + 1))


if __name__ == "__main__":
    unittest.main()
