"""What kvstate changes in llama.cpp, as a table: scripts/llama-effects. Fails where an effect is not there."""

import os
import pathlib
import subprocess
import sys
import tempfile

from llama_server import ADAPTER, GEMMA, MODELS, LlamaServer

PROGRAM = sys.argv[1]

STORY = "The lighthouse keeper counted the ships that passed in the night and wrote each of them into the book. "
PROMPT_TOKENS = 1252


def measured(what, model, adapter):
    environment = os.environ | ({"LD_PRELOAD": str(ADAPTER)} if adapter else {})
    answer = subprocess.run([PROGRAM, what, model], env=environment, check=True, capture_output=True, text=True)
    return float(answer.stdout.split()[1])


def continuation(folder, adapter):
    """A prompt in one slot: saved, erased, restored, and continued. What of it is computed again, in ms, and the text."""
    options = ("--parallel", 1, "--ctx-size", 2048)
    with LlamaServer(GEMMA, folder, *options, adapter=adapter, threads=2) as server:
        prompt = server.tokenize(STORY * 80)[:PROMPT_TOKENS]
        first = server.complete(0, prompt, n_predict=8)
        for action in ("save", "erase", "restore"):
            status, answer = server.slot(0, action, None if action == "erase" else "slot.bin")
            assert status == 200, (action, answer)
        body = {"prompt": prompt + first.tokens + prompt[1:3], "n_predict": 12, "temperature": 0, "id_slot": 0}
        status, answer = server.request("POST", "/completion", body | {"cache_prompt": True})
        assert status == 200, answer
        return answer["timings"]["prompt_n"], answer["timings"]["prompt_ms"], answer["content"]


def main():
    with tempfile.TemporaryDirectory(prefix="effects.") as folder:
        pathlib.Path(folder, "stock").mkdir()
        stock_n, stock_ms, stock_text = continuation(f"{folder}/stock", False)
        ours_n, ours_ms, our_text = continuation(folder, True)
    cut = [measured("cut", GEMMA, adapter) for adapter in (False, True)]
    llama = MODELS / "llama-dense.gguf"
    checkpoint = [int(measured("checkpoint", llama, adapter)) for adapter in (False, True)]

    print("| | llama.cpp b11434 | with kvstate in front |")
    print("|---|---|---|")
    print(f"| llama-server, Gemma 3 270M: slot saved, erased, restored; tokens computed to continue {PROMPT_TOKENS} "
          f"| {stock_n} ({stock_ms:,.0f} ms) | {ours_n} ({ours_ms:,.0f} ms) |")
    print(f"| the text that follows | | {'the same' if stock_text == our_text else 'another'} |")
    print(f"| Gemma 3 270M, swa_full: largest difference of a logit, restored and cut to its prompt "
          f"| {cut[0]:g} | {cut[1]:g} |")
    print(f"| full attention (a tiny llama): bytes of a partial checkpoint | {checkpoint[0]:,} | {checkpoint[1]:,} |")

    shown = stock_text == our_text and ours_n < 10 < stock_n and cut[1] == 0 < cut[0] and checkpoint[1] == 8
    sys.exit(0 if shown else "an effect is not there")


main()
