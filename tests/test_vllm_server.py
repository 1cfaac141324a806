"""The plugin in the real server of vLLM with the real model, over loopback. Run: make test-vllm

Every test starts servers of its own and stops them; the whole file takes about 20 minutes on two quiet cores.
"""

from __future__ import annotations

import random
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aurakv import models

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from serving import Server, prompts, speed  # noqa: E402

pytestmark = pytest.mark.vllm

LENGTH = 2048
TEXT = "\n".join((ROOT / "docs" / name).read_text() for name in ("design.md", "format.md", "cpu.md"))
BEGINNINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    TEXT[:2500],
    TEXT[3000:6000],
)


@pytest.fixture(scope="module")
def model() -> Path:
    return models.smollm2(report=print)


def server(model: Path, format: str | None, *options: str, memory: int = 1 << 28, dtype: str = "float32") -> Server:
    common = ("--max-model-len", str(LENGTH), "--max-num-seqs", "16", "--enforce-eager", "--dtype", dtype)
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # allows to empty the prefix cache
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


def predictions(running: Server, text: str, tokens: int = 1001) -> list[str]:
    """What the model would say after each of the first tokens of a text: teacher-forced, in one prefill."""
    choice = running.complete(text, 1, prompt_logprobs=1, truncate_prompt_tokens=tokens)
    best = []
    for position in choice["prompt_logprobs"][1:]:
        best.append(min(position, key=lambda token: position[token]["rank"]))
    return best


def test_eight_bits_predict_the_same_tokens(model: Path) -> None:
    with server(model, None) as stock:
        expected = predictions(stock, TEXT[:9000])
    with server(model, "k8v8") as ours:
        found = predictions(ours, TEXT[:9000])
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    print(f"{equal} of {len(expected)} next tokens are equal")
    assert len(expected) >= 1000
    assert equal >= 0.98 * len(expected)


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
            "limit": lambda: TEXT[: 8 * LENGTH],
        }[kind]()
        made.append(Request(kind, prompt, 64 if kind == "abort" else draw.randrange(4, 16)))
    return made


def answer(running: Server, request: Request) -> Any:
    """The tokens of the answer and how far ahead the best was at each; nothing for what is meant to fail."""
    if request.kind == "abort":
        arrived = running.stream(request.prompt, request.tokens)
        next(arrived), next(arrived)
        arrived.close()  # closes the connection
        return None
    if request.kind == "limit":
        with pytest.raises(urllib.error.HTTPError, match="400"):
            running.complete(request.prompt, request.tokens)
        return None
    found = running.complete(request.prompt, request.tokens, logprobs=2)["logprobs"]
    gaps = []
    for top in found["top_logprobs"]:
        ranked = sorted(top.values(), reverse=True)
        gaps.append(ranked[0] - ranked[1] if len(ranked) > 1 else float("inf"))
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


@pytest.mark.parametrize("format", ["k8v8"])
def test_two_hundred_mixed_requests(model: Path, format: str) -> None:
    """With a memory of 120 blocks of 32 tokens: less than 16 requests at once need."""
    options = ("--block-size", "32", "--num-gpu-blocks-override", "120", "--enable-prefix-caching")
    requests = mixture()
    with server(model, format, *options) as ours:
        parted = differences(ours, requests)
        assert ours.metric("vllm:num_preemptions_total") > 0
        assert ours.metric("vllm:prefix_cache_hits_total") > 0
        assert ours.metric("vllm:num_requests_running") == 0
        assert ours.metric("vllm:kv_cache_usage_perc") == 0
        assert ours.process.poll() is None
    print(f"{format}: answers that depend on the batch: {parted}")
    with server(model, None, *options) as stock:
        theirs = differences(stock, requests)
    print(f"stock: answers that depend on the batch: {theirs}")
    assert all(gap < 0.02 for gap in parted), "rounding decides only between tokens of all but equal probability"
    assert len(parted) <= len(theirs) + 3


def random_model(folder: Path, kind: str) -> Path:
    """A small model of random weights, with token ids as its text."""
    from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

    torch.manual_seed(0)
    common = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.2,
        "max_position_embeddings": LENGTH,
    }
    config = (
        LlamaConfig(**common)
        if kind == "llama"
        else Gemma2Config(**common, sliding_window=48, attn_logit_softcapping=20.0, query_pre_attn_scalar=64)
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def token_texts(running: Server, count: int = 6) -> list[list[int]]:
    draw = random.Random(1)
    given = [[draw.randrange(512) for _ in range(length)] for length in (3, 40, 100, 250, 333, 64)[:count]]
    options = {"return_token_ids": True, "ignore_eos": True, "detokenize": False}
    return [running.complete(prompt, 24, **options)["token_ids"] for prompt in given]


@pytest.mark.parametrize("kind", ["gemma2"])
def test_sliding_windows_and_soft_cap(tmp_path: Path, kind: str) -> None:
    """Layers with and without a window, a soft cap, prefill in chunks of 128."""
    folder = random_model(tmp_path / "model", kind)
    options = ("--skip-tokenizer-init", "--max-num-batched-tokens", "128")
    with server(folder, None, *options) as stock:
        expected = token_texts(stock)
    with server(folder, "k16v16", *options) as ours:
        assert token_texts(ours) == expected


def test_tensor_parallel(tmp_path: Path) -> None:
    """Two processes, each with half of the KV heads, say what one says."""
    folder = random_model(tmp_path / "model", "llama")
    found = []
    for size in ("1", "2"):
        with server(folder, "k8v8", "--skip-tokenizer-init", "--tensor-parallel-size", size) as running:
            found.append(token_texts(running))
    assert found[0] == found[1]


def test_tensor_parallel_real_model(model: Path) -> None:
    """SmolLM2 has 9 heads and 3 KV heads: three processes with one KV head each."""
    found = []
    for size in ("1", "3"):
        with server(model, "k8v8", "--tensor-parallel-size", size) as running:
            found.append([running.complete(prompt, 16)["text"] for prompt in BEGINNINGS])
    assert found[0] == found[1]


REFUSED = {
    "unknown format": ({}, "k7v4", "bits must be one of"),
    "not a name": ({}, 4, "must be a format"),
    "other cache dtype": ({"kv_cache_dtype": "fp8"}, "k4v4", "--kv-cache-dtype must be auto"),
    "other backend": ({"attention_backend": "TRITON_ATTN"}, "k4v4", "names another backend"),
    "embedding model": ({"runner": "pooling"}, "k4v4", "must generate text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start(model: Path, name: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    options, switch, message = REFUSED[name]
    with pytest.raises(Exception, match=message):
        EngineArgs(str(model), additional_config={"aurakv": switch}, **options).create_engine_config()


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    from transformers import DeepseekV2Config
    from vllm.engine.arg_utils import EngineArgs

    config = DeepseekV2Config(hidden_size=64, num_hidden_layers=2, architectures=["DeepseekV2ForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="multi-head latent attention"):
        EngineArgs(str(tmp_path), additional_config={"aurakv": "k4v4"}, skip_tokenizer_init=True).create_engine_config()


def test_without_the_switch_nothing_changes(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(model), dtype="float32").create_engine_config()
    assert config.attention_config.backend is None


def test_block_size_must_fit(model: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="block-size must be a multiple of 16"),
        server(model, "k4v4", "--block-size", "8"),
    ):
        pass
