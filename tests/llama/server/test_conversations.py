"""Slot files of llama-server with kvstate in front: answers, and how much of a prompt is computed again."""

import pathlib
import tempfile
import unittest

from conversation import RANDOM, TOLERANCE, Script, difference, hold, make_models, tokens
from llama_server import GEMMA, LlamaServer, kvstate_lines, must_be_built

# What is computed after the cut back to the prompt.
TAIL = "tail"  # only what is new
WHOLE = "whole"  # everything: the state of a recurrent layer cannot be cut

ALL_WAYS = tuple((flash, cells) for flash in ("on", "off") for cells in ("--kv-unified", "--no-kv-unified"))
ONE_WAY = (("auto", "--no-kv-unified"),)

MODELS = {
    "llama-dense": (TAIL, ALL_WAYS),
    "gemma3-dense": (TAIL, ALL_WAYS),
    "falcon-h1-dense": (WHOLE, ALL_WAYS),
    "qwen3next-moe": (WHOLE, ALL_WAYS),
    "mamba-dense": (WHOLE, ONE_WAY),
    "gpt-oss-moe": (TAIL, ONE_WAY),
    "qwen2vl-dense": (TAIL, ONE_WAY),
    "deepseek2-moe": (TAIL, ONE_WAY),
    "glm-dsa-moe": (TAIL, ONE_WAY),
    "minimax-m3-moe": (TAIL, ONE_WAY),
    "qwen4exp-moe": (WHOLE, ONE_WAY),
    "deepseek4-moe": (WHOLE, ONE_WAY),
}

OPTIONS = ("--parallel", 4, "--ctx-size", 4096, "--cache-ram", 0)

models = None


def setUpModule():
    global models
    must_be_built()
    models = tempfile.TemporaryDirectory(prefix="models.")
    unittest.addModuleCleanup(models.cleanup)
    make_models(models.name, {name.rpartition("-")[0] for name in MODELS})


class Conversations(unittest.TestCase):
    """One model in one configuration: with kvstate and files, held against llama.cpp that never saved."""

    model, options, computed_after_edit, script = None, (), None, RANDOM

    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="slots.")
        cls.addClassCleanup(directory.cleanup)
        cls.directory = directory.name
        cls.path = pathlib.Path(models.name, f"{cls.model}.gguf")
        cls.prepare()
        cls.reference = cls.hold(adapter=False, files=False)
        cls.kvstate = cls.hold(adapter=True, files=True)

    @classmethod
    def prepare(cls):
        pass

    @classmethod
    def hold(cls, *, adapter, files):
        return hold(cls.script, cls.path, cls.directory, (*OPTIONS, *cls.options), adapter=adapter, files=files)

    def assert_same(self, reply, reference):
        self.assertEqual(reply.tokens, reference.tokens)
        self.assertLess(difference(reply, reference), TOLERANCE)

    def test_the_adapter_says_that_it_is_there(self):
        self.assertEqual([bool(kvstate_lines(log)) for log in self.kvstate.logs], [True, True])
        self.assertEqual([bool(kvstate_lines(log)) for log in self.reference.logs], [False, False])

    def test_an_altered_history_is_told_apart(self):
        self.assertGreater(difference(self.reference.first, self.reference.altered), 2 * TOLERANCE)

    def test_without_files_the_answer_is_the_same(self):
        self.assert_same(self.kvstate.first, self.reference.first)
        self.assert_same(self.kvstate.other, self.reference.other)

    def test_a_restored_slot_goes_on_as_if_never_saved(self):
        self.assert_same(self.kvstate.continued, self.reference.continued)

    def test_a_restored_slot_computes_only_the_new_tokens(self):
        # The last token of a reply is sampled and not yet in the cache.
        self.assertEqual(self.reference.continued.computed, len(self.script.question) + 1)
        self.assertEqual(self.kvstate.continued.computed, len(self.script.question) + 1)

    def test_a_slot_restored_by_a_new_process_is_edited_as_if_never_saved(self):
        self.assert_same(self.kvstate.edited, self.reference.edited)

    def test_after_the_edit_no_more_is_computed_than_has_to_be(self):
        expected = {TAIL: len(self.script.edit), WHOLE: len(self.script.prompt) + len(self.script.edit)}[self.computed_after_edit]
        self.assertEqual(self.kvstate.edited.computed, expected)

    def test_another_slot_goes_on_beside_it(self):
        self.assert_same(self.kvstate.other_continued, self.reference.other_continued)
        self.assertEqual(self.kvstate.other_continued.computed, len(self.script.question) + 1)


class WindowConversations(Conversations):
    """Beside kvstate, llama.cpp's own slot files, which lack what the window masks: they show what kvstate changes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.stock = cls.hold(adapter=False, files=True)

    def test_llama_cpp_computes_the_whole_conversation_after_a_restore(self):
        continued = len(self.script.prompt) + len(self.stock.first.tokens) + len(self.script.question)
        self.assertEqual(self.stock.continued.computed, continued)
        self.assertEqual(self.stock.edited.computed, len(self.script.prompt) + len(self.script.edit))


class Gemma3SwaFull(Conversations):
    """With a full-size window cache, llama.cpp trusts cells that its slot file never had."""

    model, options, computed_after_edit = "gemma3-dense", ("--swa-full",), TAIL

    def test_llama_cpp_answers_otherwise_after_a_restore(self):
        stock = self.hold(adapter=False, files=True)
        self.assertEqual(stock.edited.computed, len(self.script.edit))
        self.assertGreater(difference(stock.edited, self.reference.edited), 2 * TOLERANCE)


class Gemma3Crowded(Conversations):
    """A window cache of 256 cells for four slots: cells that a window masks are taken by others."""

    model = "gemma3-dense"
    options = ("--kv-unified", "--ubatch-size", 64)
    script = Script(RANDOM.prompt, tokens(180, 5), RANDOM.question, RANDOM.edit)

    # What is still there to go on from depends on who took which cell.
    test_a_restored_slot_computes_only_the_new_tokens = None
    test_after_the_edit_no_more_is_computed_than_has_to_be = None


@unittest.skipUnless(GEMMA.exists(), "needs a real model: scripts/llama-cpp gemma")
class Gemma3Of270M(WindowConversations):
    """A real model and real text. Both prompts are longer than the window of 512: shorter ones llama-server computes
    again after a restore, whatever is in the cache."""

    options, computed_after_edit = ("--threads", 2), TAIL

    @classmethod
    def prepare(cls):
        cls.path = GEMMA
        text = pathlib.Path(__file__).parents[3].joinpath("README.md").read_text()
        with LlamaServer(cls.path, cls.directory, adapter=False) as server:
            words = server.tokenize(text)
        cls.script = Script(words[:560], words[560:1100], words[1100:1110], words[1110:1120])


def _classes():
    for model, (computed_after_edit, ways) in MODELS.items():
        for flash, cells in ways:
            words = [*model.split("-")[:-1], "flash", flash, "unified" if cells == "--kv-unified" else "streams"]
            name = "".join(word.capitalize() for word in words)
            base = WindowConversations if model in ("gemma3-dense", "gpt-oss-moe") else Conversations
            attributes = {"model": model, "options": ("--flash-attn", flash, cells)}
            attributes["computed_after_edit"] = computed_after_edit
            yield name, type(name, (base,), attributes)


globals().update(_classes())


def load_tests(loader, suite, _):
    """All but the bases of the others."""
    cases = [case for case in globals().values() if isinstance(case, type) and issubclass(case, Conversations)]
    cases = [case for case in cases if case not in (Conversations, WindowConversations)]
    return unittest.TestSuite(map(loader.loadTestsFromTestCase, cases))


if __name__ == "__main__":
    unittest.main()
