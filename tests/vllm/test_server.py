"""The plugin in the real server of vLLM with the real model, over loopback. Run: make test-vllm

Every test starts servers of its own and stops them. What needs no server is in test_vllm_engine.py.
"""

from __future__ import annotations

import os
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aurakv import models
from tests.helpers.vllm_prompts import BEGINNINGS, LENGTH, Request, mixture

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from serving import Server, prompts, speed  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model() -> Path:
    return models.smollm2(report=print)


def server(
    model: Path,
    format: str | None,
    *options: str,
    memory: int = 1 << 28,
    dtype: str = "float32",
    env: dict[str, str] | None = None,
) -> Server:
    common = ("--max-model-len", str(LENGTH), "--max-num-seqs", "16", "--enforce-eager", "--dtype", dtype)
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the prefix cache can be emptied
    settings |= env or {}
    return Server(model, format, *common, "--kv-cache-memory-bytes", str(memory), *options, env=settings)


def texts(running: Server, tokens: int = 32) -> list[str]:
    """One after the other, then all at once: both must be the same."""
    alone = [running.complete(prompt, tokens)["text"] for prompt in BEGINNINGS]
    with ThreadPoolExecutor(len(BEGINNINGS)) as pool:
        together = list(pool.map(lambda prompt: running.complete(prompt, tokens)["text"], BEGINNINGS))
    assert together == alone
    return alone


def test_sixteen_bits_give_the_text_of_the_stock_backend(model: Path) -> None:
    with server(model, None) as stock:
        expected = texts(stock)
    with server(model, "k16v16") as ours:
        assert texts(ours) == expected


def test_capacity(model: Path) -> None:
    """As vLLM reports it, in the same memory."""
    capacity = {}
    for name, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("k4v4", "float32")):
        with server(model, "k4v4" if name == "k4v4" else None, dtype=dtype) as running:
            capacity[name] = running.capacity()
    print(capacity)
    assert capacity["k4v4"] >= 6 * capacity["float32"]
    assert capacity["k4v4"] >= 3.5 * capacity["bfloat16"]


def test_throughput(model: Path) -> None:
    """8 requests at once with 1,100 tokens of context each, both servers up, turn by turn; the best of three each.

    Where others use the machine, what a server gets of it is luck: then tokens for each second that its processes ran
    are compared, with threads that do not spin while they wait."""
    batch, tokens = prompts(8, 1100), 32
    busy = os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    env = {"OMP_WAIT_POLICY": "passive"} if busy else {}
    with server(model, None, env=env) as stock, server(model, "k4v4", env=env) as ours:
        best = {}
        for _ in range(3):
            for name, running in (("stock", stock), ("k4v4", ours)):
                running.post("/reset_prefix_cache", {})
                before = seconds_run(running)
                rate = speed(running, batch, tokens)
                ran = seconds_run(running) - before
                print(name, rate, f"{ran:.1f} s of processors, {'busy' if busy else 'idle'} machine")
                best[name] = max(best.get(name, 0), len(batch) * tokens / ran if busy else rate.total)
    assert best["k4v4"] >= best["stock"]


def seconds_run(running: Server) -> float:
    """By all processes of a server."""
    import psutil

    main = psutil.Process(running.process.pid)
    times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def answer(running: Server, request: Request) -> list[str] | None:
    """The tokens of the answer; nothing for what is meant to fail."""
    if request.kind == "abort":
        arrived = running.stream(request.prompt, 64, ignore_eos=True)
        next(arrived), next(arrived)
        arrived.close()  # closes the connection
        return None
    if request.kind == "limit":
        with pytest.raises(urllib.error.HTTPError, match="400"):
            running.complete(request.prompt, request.tokens)
        return None
    options = {"logprobs": 1, "return_tokens_as_token_ids": True, "ignore_eos": True}
    return running.complete(request.prompt, request.tokens, **options)["logprobs"]["tokens"]


def differing(running: Server, requests: list[Request]) -> set[int]:
    """All requests at once, then each alone: whose answers differ. Nothing leaks."""
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda request: answer(running, request), requests))
    assert running.metric("vllm:num_preemptions_total") > 0
    assert running.metric("vllm:prefix_cache_hits_total") > 0
    found = set()
    for number, (request, tokens) in enumerate(zip(requests, together, strict=True)):
        if tokens is not None:
            running.post("/reset_prefix_cache", {})
            if answer(running, request) != tokens:
                found.add(number)
    assert running.metric("vllm:num_requests_running") == 0
    assert running.metric("vllm:kv_cache_usage_perc") == 0
    return found


def test_two_hundred_mixed_requests(model: Path) -> None:
    """In a memory of 34 blocks of 32 tokens, less than 16 requests at once need. Answers depend on what else the server
    does only where those of the stock backend do."""
    kinds = ("short", "long", "prefix", "short", "abort", "long", "prefix", "short", "prefix", "limit")
    options = ("--block-size=32", "--num-gpu-blocks-override=34", "--enable-prefix-caching", "--max-model-len=1024")
    with server(model, "k16v16", *options) as ours:
        found = differing(ours, mixture(200, kinds))
    if found:
        with server(model, None, *options) as stock:
            assert found <= differing(stock, mixture(200, kinds))


def test_tensor_parallel(model: Path) -> None:
    """SmolLM2 has 9 heads and 3 KV heads: three processes with one KV head each say what one says.

    At 16 bits, because the sum over processes is rounded differently, and fewer bits would turn that into other codes.
    """
    found = []
    for size in ("1", "3"):
        with server(model, "k16v16", "--tensor-parallel-size", size) as running:
            found.append([running.complete(prompt, 16)["text"] for prompt in BEGINNINGS])
    assert found[0] == found[1]
