"""An unmodified llama-server, with kvstate in front of its libllama.so or without."""

import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass

LLAMA = pathlib.Path(os.environ["LLAMA_CPP_DIR"])
ADAPTER = LLAMA / "libkvstate-llama.so"
MODELS = LLAMA / "models"
GEMMA = LLAMA / "gemma" / "gemma-3-270m-q4_k_m.gguf"

START_SECONDS = 120
REQUEST_SECONDS = 60
SLOT_SECONDS = 20


def must_be_built():
    if not ADAPTER.exists():
        raise FileNotFoundError(f"{ADAPTER}: make -C ffi-examples/llama.cpp builds it")


def kvstate_lines(log):
    """What kvstate says in the text of a log."""
    return [line for line in log.splitlines() if "kvstate" in line]


@dataclass
class Reply:
    """What a completion answered, and how much of the prompt it computed."""

    tokens: list
    logprobs: list
    computed: int
    cached: int


class ServerDied(AssertionError):
    """The server is gone or hangs; the message ends with the last lines of its log."""


class LlamaServer:
    """A running server; `with` stops it. One slot directory may be given to several, one after the other."""

    def __init__(self, model, slot_dir, *options, adapter, threads=1):
        self.slot_dir = pathlib.Path(slot_dir)
        self.log = pathlib.Path(tempfile.mkstemp(prefix="llama-server.", suffix=".log", dir=slot_dir)[1])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        if adapter:
            environment["LD_PRELOAD"] = str(ADAPTER)
        command = [str(LLAMA / "build/bin/llama-server"), "--model", str(model), "--port", str(self.port)]
        command += ["--slot-save-path", f"{self.slot_dir}/", "--threads", str(threads), "--no-warmup", "--offline"]
        command += map(str, options)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._wait_until_healthy()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Ends the server; one that crashed before or while it ends is a failure."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise ServerDied(f"the server does not end\n{self.log_tail()}") from None
        if self.process.returncode != 0:
            raise ServerDied(f"the server ended with {self.process.returncode}\n{self.log_tail()}")

    def kill(self):
        """Ends the server without giving it time for anything."""
        self.process.kill()
        self.process.wait()

    def has_ended(self):
        return self.process.poll() is not None

    def log_text(self):
        return self.log.read_text(errors="replace")

    def log_after(self, start, pattern):
        """The log from start on; waits for the pattern, since a thread of its own writes the log."""
        end = time.monotonic() + 5
        while not re.search(pattern, self.log_text()[start:]) and time.monotonic() < end:
            time.sleep(0.02)
        return self.log_text()[start:]

    def log_tail(self, lines=40):
        return "\n".join(self.log_text().splitlines()[-lines:])

    def request(self, method, path, body=None, seconds=REQUEST_SECONDS):
        """The status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except TimeoutError:
            # Nothing else would get an answer either.
            self.kill()
            raise ServerDied(f"{method} {path}: no answer within {seconds} s\n{self.log_tail()}") from None
        except (OSError, http.client.HTTPException) as error:
            try:
                ended = f"ended with {self.process.wait(10)}"
            except subprocess.TimeoutExpired:
                ended = "is still there"
            raise ServerDied(f"{method} {path}: {error!r}, the server {ended}\n{self.log_tail()}") from None
        finally:
            connection.close()

    def complete(self, slot, prompt, n_predict=12, **options):
        """Greedy tokens after the tokens of the prompt, in this slot."""
        body = {"id_slot": slot, "prompt": prompt, "n_predict": n_predict, "temperature": 0, "cache_prompt": True}
        body |= {"return_tokens": True, "n_probs": 1, "ignore_eos": True, "seed": 1}
        status, answer = self.request("POST", "/completion", body | options)
        if status != 200:
            raise AssertionError(f"/completion: {status} {answer}")
        timings = answer["timings"]
        logprobs = [token["logprob"] for token in answer["completion_probabilities"]]
        return Reply(answer["tokens"], logprobs, timings["prompt_n"], timings["cache_n"])

    def tokenize(self, text):
        return self.request("POST", "/tokenize", {"content": text, "add_special": True})[1]["tokens"]

    def slot(self, slot, action, filename=None):
        """The status and the answer of a slot action: save, restore or erase."""
        body = {"filename": filename} if filename else {}
        return self.request("POST", f"/slots/{slot}?action={action}", body, SLOT_SECONDS)

    def _wait_until_healthy(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServerDied(f"the server ended with {self.process.returncode} at its start\n{self.log_tail()}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise ServerDied(f"the server is not healthy after {START_SECONDS} s\n{self.log_tail()}")
