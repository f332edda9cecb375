"""The prompt cache of llama-server, which keeps states in memory, with kvstate in front."""

import pathlib
import tempfile
import unittest

from conversation import EDIT, OTHER_PROMPT, PROMPT, QUESTION, TOLERANCE, difference, make_models
from llama_server import LlamaServer, must_be_built

ANY_SLOT = -1

models = None


def setUpModule():
    global models
    must_be_built()
    models = tempfile.TemporaryDirectory(prefix="models.")
    unittest.addModuleCleanup(models.cleanup)
    make_models(models.name, ["llama", "gemma3", "falcon-h1"])


def hold(model, cache_mib, adapter):
    """Two conversations take turns in the only slot."""
    path = pathlib.Path(models.name, f"{model}.gguf")
    options = ("--parallel", 1, "--ctx-size", 256, "--cache-ram", cache_mib)
    with LlamaServer(path, models.name, *options, adapter=adapter) as server:
        first = server.complete(ANY_SLOT, PROMPT)
        server.complete(ANY_SLOT, OTHER_PROMPT)
        continued = server.complete(ANY_SLOT, PROMPT + first.tokens + QUESTION)
        edited = server.complete(ANY_SLOT, OTHER_PROMPT + EDIT)
    return continued, edited


class PromptCache(unittest.TestCase):
    def assert_turns(self, model, computed, stock_computed):
        """Both answer as without a cache; this many tokens are computed for the continuation and for the edit."""
        reference = hold(model, 0, adapter=False)
        for adapter, expected in ((False, stock_computed), (True, computed)):
            with self.subTest(adapter=adapter):
                replies = hold(model, 64, adapter)
                for reply, same in zip(replies, reference):
                    self.assertLess(difference(reply, same), TOLERANCE)
                self.assertEqual([reply.computed for reply in replies], expected)

    def test_full_attention_computes_only_the_new_tokens(self):
        new = [len(QUESTION) + 1, len(EDIT)]
        self.assert_turns("llama-dense", computed=new, stock_computed=new)

    def test_a_sliding_window_computes_only_the_new_tokens(self):
        # llama.cpp goes back to a checkpoint 4 tokens before the end of the prompt.
        new = [len(QUESTION) + 1, len(EDIT)]
        back = [4 + 12 + len(QUESTION) + 1, 4 + len(EDIT) + 1]
        self.assert_turns("gemma3-dense", computed=new, stock_computed=back)

    def test_a_hybrid_goes_back_to_its_checkpoint(self):
        new = [len(QUESTION) + 1, 4 + len(EDIT)]
        self.assert_turns("falcon-h1-dense", computed=new, stock_computed=new)


if __name__ == "__main__":
    unittest.main()
