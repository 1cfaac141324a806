"""vLLM on loopback with aurakv beside vLLM with its own backend: capacity and tokens a second. Run: make serve-demo

Starts the real OpenAI server once for each backend, with the same memory for the KV cache, sends the same requests to
both, and stops what it started. Needs vLLM; the model is SmolLM2-135M-Instruct unless another is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

STARTING = 600.0  # seconds a server may take
NAME = "model"


class Server:
    """vLLM's OpenAI server in processes of its own; `stop` ends all of them."""

    def __init__(self, model: Path | str, aurakv: str | None = None, *options: str, env: dict[str, str] | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        switch = () if aurakv is None else ("--additional-config", json.dumps({"aurakv": aurakv}))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME, *switch, *options]
        self.log = Path(tempfile.mkstemp(prefix="vllm-", suffix=".log")[1])
        # Threads are as many as cores but not bound to them: two servers and a client can share a small machine.
        settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Until it answers; raises with the end of its log if it dies."""
        last = time.monotonic() + STARTING
        while time.monotonic() < last:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start within {STARTING:.0f} s:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.unlink(missing_ok=True)

    def post(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read()
        return json.loads(text) if text else {}

    def complete(self, prompt: str | list[int], tokens: int, **options: Any) -> dict[str, Any]:
        """The first choice of a greedy completion."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
        return self.post("/v1/completions", body)["choices"][0]

    def stream(self, prompt: str | list[int], tokens: int, **options: Any) -> Iterator[float]:
        """The moment at which each token arrives."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **options}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield time.perf_counter()

    def metric(self, name: str) -> float:
        """The sum of a counter or gauge over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        return sum(float(x) for x in re.findall(rf"^{re.escape(name)}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE))

    def capacity(self) -> int:
        """How many tokens the KV cache holds, as vLLM reports."""
        found = re.search(r"KV cache size: ([\d,]+) tokens", self.log.read_text())
        if found is None:
            raise RuntimeError("vLLM did not report the size of its KV cache")
        return int(found[1].replace(",", ""))


class Speed(NamedTuple):
    prompt: float  # tokens a second until every request has its first
    decode: float  # tokens a second from there on
    total: float  # generated tokens a second over all


def prompts(count: int, tokens: int, vocabulary: int = 40_000) -> list[list[int]]:
    """Token ids without a common prefix."""
    return [[1000 + (i * 7919 + t * 104_729) % (vocabulary - 1000) for t in range(tokens)] for i in range(count)]


def speed(server: Server, given: Sequence[list[int]], tokens: int) -> Speed:
    """All requests at once; each generates exactly `tokens`."""
    with ThreadPoolExecutor(len(given)) as pool:
        start = time.perf_counter()
        times = list(pool.map(lambda prompt: list(server.stream(prompt, tokens, ignore_eos=True)), given))
    first, last = max(each[0] for each in times), max(each[-1] for each in times)
    late = sum(t > first for each in times for t in each)
    prompt = sum(len(each) for each in given)
    return Speed(prompt / (first - start), late / (last - first), len(given) * tokens / (last - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--model", help="folder of a model; default: SmolLM2-135M-Instruct, made on first use")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=1100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes for the KV cache")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped

    from aurakv import models

    model = given.model or models.smollm2(report=print)
    length = given.context + given.tokens + 64
    options = ["--dtype", given.dtype, "--max-model-len", str(length), "--kv-cache-memory-bytes", str(given.memory)]
    batch = prompts(given.requests, given.context)
    results = {}
    for name, switch in (("stock", None), (given.format, given.format)):
        print(f"starting vLLM, {name} …", flush=True)
        with Server(model, switch, *options, "--max-num-seqs", str(given.requests), "--enforce-eager") as server:
            text = server.complete("The three primary colours are", 24)["text"]
            print(f"  The three primary colours are{text!r}")
            server.post("/v1/completions", {"model": NAME, "prompt": batch[0][:64], "max_tokens": 2})
            results[name] = server.capacity(), speed(server, batch, given.tokens)
    print(f"\n{given.memory / 2**20:.0f} MiB of KV cache; {given.requests} requests of {given.context} tokens at once")
    print(f"{'':10}{'capacity':>12}{'prompt tok/s':>15}{'decode tok/s':>15}{'all tok/s':>12}")
    for name, (capacity, rate) in results.items():
        print(f"{name:10}{capacity:>12,}{rate.prompt:>15.0f}{rate.decode:>15.1f}{rate.total:>12.1f}")
    stock, ours = results["stock"], results[given.format]
    print(
        f"{'ratio':10}{ours[0] / stock[0]:>12.2f}{ours[1].prompt / stock[1].prompt:>15.2f}"
        f"{ours[1].decode / stock[1].decode:>15.2f}{ours[1].total / stock[1].total:>12.2f}"
    )


if __name__ == "__main__":
    main()
