"""A conversation with llama-server, with slot files in the middle of it or without."""

import random
import subprocess
from dataclasses import dataclass

from llama_server import LLAMA, LlamaServer, Reply

N_VOCAB = 128

# Two servers hold the same cells in other places, so their sums differ in the last bits, with flash attention by up
# to 0.005.
TOLERANCE = 1e-2

# Weights of the default deviation, 0.1, make models that hardly look at what came before.
DEVIATION = 0.5


def make_models(directory, architectures):
    """Random models with a vocabulary of 128 tokens, 256 positions, and a window of 32 where there is one."""
    command = [LLAMA / "build/bin/test-llama-archs", "-s", "1", "-d", str(DEVIATION), "-o", directory]
    subprocess.run([*command, "-a", f"^({'|'.join(architectures)})$"], check=True, capture_output=True)


def tokens(n, seed):
    source = random.Random(seed)
    return [source.randrange(N_VOCAB) for _ in range(n)]


PROMPT = tokens(60, 1)
OTHER_PROMPT = tokens(50, 2)
QUESTION = tokens(5, 3)
EDIT = tokens(7, 4)


@dataclass
class Script:
    """What is said in a conversation, in tokens."""

    prompt: list
    other_prompt: list
    question: list
    edit: list

    def altered_prompt(self):
        """The prompt with another token in three places."""
        altered = list(self.prompt)
        for i in (10, 40, 50):
            altered[i] = (altered[i] + 1) % N_VOCAB
        return altered


RANDOM = Script(PROMPT, OTHER_PROMPT, QUESTION, EDIT)


def difference(a, b):
    """How far two replies are apart: the largest difference of log-probabilities; infinite if a token differs."""
    if a.tokens != b.tokens:
        return float("inf")
    return max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs))


@dataclass
class Conversation:
    """Replies of one server, in the order they were asked for."""

    first: Reply
    other: Reply
    continued: Reply
    edited: Reply
    other_continued: Reply
    altered: Reply
    logs: list


def hold(script, model, directory, options, *, adapter, files):
    """
    Two slots are filled. The first conversation goes on, then it is cut back to its prompt and gets another tail,
    then the other one goes on; at last a prompt that differs from the first in three tokens is answered. With
    files, the first is saved, erased and restored in another slot before it goes on, and before the edit both are
    saved, the server is killed, and both are restored in a new one.
    """

    def must(answer):
        status, body = answer
        if status != 200:
            raise AssertionError(f"slot action: {status} {body}\n{server.log_tail()}")
        return body

    def move(source, target, name):
        saved = must(server.slot(source, "save", name))
        must(server.slot(source, "erase"))
        restored = must(server.slot(target, "restore", name))
        if (saved["n_saved"], saved["n_written"]) != (restored["n_restored"], restored["n_read"]):
            raise AssertionError(f"saved {saved}, restored {restored}")

    slot, other_slot = 0, 1
    server = LlamaServer(model, directory, *options, adapter=adapter)
    try:
        first = server.complete(slot, script.prompt)
        other = server.complete(other_slot, script.other_prompt)
        if files:
            move(slot, 2, "first.bin")
            slot = 2
        continued = server.complete(slot, script.prompt + first.tokens + script.question)
        logs = [server.log_text()]
        if files:
            must(server.slot(slot, "save", "first.bin"))
            must(server.slot(other_slot, "save", "other.bin"))
            server.kill()
            server = LlamaServer(model, directory, *options, adapter=adapter)
            slot, other_slot = 3, 0
            must(server.slot(slot, "restore", "first.bin"))
            must(server.slot(other_slot, "restore", "other.bin"))
        edited = server.complete(slot, script.prompt + script.edit)
        other_continued = server.complete(other_slot, script.other_prompt + other.tokens + script.question)
        altered = server.complete(2, script.altered_prompt())
        logs.append(server.log_text())
    except BaseException:
        server.process.kill()
        server.process.wait()
        raise
    server.stop()
    return Conversation(first, other, continued, edited, other_continued, altered, logs)
