"""The plugin in the real server of vLLM with the real model, over loopback. Run: make test-vllm

Every test starts servers of its own and stops them. What needs no server is in test_vllm_engine.py.
"""

from __future__ import annotations

import random
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm_prompts import BEGINNINGS, LENGTH, TEXT

from aurakv import models

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from serving import Server, prompts, speed  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model() -> Path:
    return models.smollm2(report=print)


def server(model: Path, format: str | None, *options: str, memory: int = 1 << 28, dtype: str = "float32") -> Server:
    common = ("--max-model-len", str(LENGTH), "--max-num-seqs", "16", "--enforce-eager", "--dtype", dtype)
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # the prefix cache can be emptied
    return Server(model, format, *common, "--kv-cache-memory-bytes", str(memory), *options, env=env)


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
    """8 requests at once with 1,100 tokens of context each, both servers up, turn by turn; the best of three each."""
    batch = prompts(8, 1100)
    with server(model, None) as stock, server(model, "k4v4") as ours:
        best = {}
        for _ in range(3):
            for name, running in (("stock", stock), ("k4v4", ours)):
                running.post("/reset_prefix_cache", {})
                rate = speed(running, batch, 32)
                print(name, rate)
                best[name] = max(best.get(name, 0), rate.total)
    assert best["k4v4"] >= best["stock"]


class Request(NamedTuple):
    kind: str
    prompt: str
    tokens: int


def mixture(count: int = 200) -> list[Request]:
    """Short, long, with a common prefix, aborted midway, beyond the limits."""
    draw = random.Random(0)

    def piece(low: int, high: int) -> str:
        start, length = draw.randrange(len(TEXT) - high), draw.randrange(low, high)
        return TEXT[start : start + length]

    made = []
    for i in range(count):
        kind = ("short", "long", "prefix", "short", "abort", "long", "prefix", "short", "prefix", "limit")[i % 10]
        prompt = {
            "short": lambda: piece(20, 120),
            "long": lambda: piece(1200, 2800),
            "prefix": lambda: TEXT[:1500] + piece(20, 200),
            "abort": lambda: piece(200, 1500),
            "limit": lambda: 2 * TEXT,
        }[kind]()
        made.append(Request(kind, prompt, 64 if kind == "abort" else draw.randrange(4, 60)))
    return made


def answer(running: Server, request: Request) -> Any:
    """The tokens of the answer and how far ahead the best was at each; nothing for what is meant to fail."""
    if request.kind == "abort":
        arrived = running.stream(request.prompt, request.tokens, ignore_eos=True)
        next(arrived), next(arrived)
        arrived.close()  # closes the connection
        return None
    if request.kind == "limit":
        with pytest.raises(urllib.error.HTTPError, match="400"):
            running.complete(request.prompt, request.tokens)
        return None
    found = running.complete(request.prompt, request.tokens, logprobs=2, return_tokens_as_token_ids=True)["logprobs"]
    gaps = []
    for top in found["top_logprobs"]:
        ranked = sorted(top.values(), reverse=True)
        gaps.append(ranked[0] - ranked[1])
    return found["tokens"], gaps


def differences(running: Server, requests: list[Request]) -> list[float]:
    """All requests at once, then each alone: how far ahead the best token was where answers part."""
    with ThreadPoolExecutor(32) as pool:
        mixed = list(pool.map(lambda request: answer(running, request), requests))
    parted = []
    for request, found in zip(requests, mixed, strict=True):
        if found is not None:
            running.post("/reset_prefix_cache", {})
            tokens, gaps = answer(running, request)
            if tokens != found[0]:
                at = next(i for i, pair in enumerate(zip(tokens, found[0], strict=False)) if pair[0] != pair[1])
                parted.append(gaps[at])
    return parted


def test_two_hundred_mixed_requests(model: Path) -> None:
    """In a memory of 66 blocks of 32 tokens, less than 16 requests at once need."""
    options = ("--block-size", "32", "--num-gpu-blocks-override", "66", "--enable-prefix-caching")
    requests = mixture()
    with server(model, "k8v8", *options) as ours:
        parted = differences(ours, requests)
        assert ours.metric("vllm:num_preemptions_total") > 0
        assert ours.metric("vllm:prefix_cache_hits_total") > 0
        assert ours.metric("vllm:num_requests_running") == 0
        assert ours.metric("vllm:kv_cache_usage_perc") == 0
    print(f"how far ahead the best token was where answers depend on the batch: {parted}")
    if parted:
        with server(model, None, *options) as stock:
            theirs = differences(stock, requests)
        print(f"stock: {theirs}")
        assert len(parted) <= len(theirs) + 3
    assert all(gap < 0.02 for gap in parted), "rounding decides only between tokens of all but equal probability"


def test_tensor_parallel(model: Path) -> None:
    """SmolLM2 has 9 heads and 3 KV heads: three processes with one KV head each say what one says."""
    found = []
    for size in ("1", "3"):
        with server(model, "k8v8", "--tensor-parallel-size", size) as running:
            found.append([running.complete(prompt, 16)["text"] for prompt in BEGINNINGS])
    assert found[0] == found[1]
