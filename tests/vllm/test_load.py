"""Engines under load: many requests at once and aborted ones, contexts of any length, whole steps in CUDA graphs, and
everything that may be named instead of a default. On a GPU larger than on a CPU. Run: make test-vllm"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
from tests.helpers.vllm_answers import Answer, how_far, near, wrong
from tests.helpers.vllm_prompts import mixture
from tests.vllm.test_engine import GPU, ON_GPU, count_preemptions, engine, random_model, random_prompts, token_ids
from tests.vllm.test_operators import eagle_head

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("calibrations")]
gpu_only = pytest.mark.skipif(not GPU, reason="needs a GPU")


# requests that come and go


def served(llm: Any, prompts: Sequence[list[int]], counts: list[int], leave: set[int]) -> dict[int, list[int]]:
    """All at once; those in `leave` are aborted at their third token. What the others say."""
    from vllm import SamplingParams

    core, found = llm.llm_engine, {}
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        core.add_request(str(number), {"prompt_token_ids": prompt}, params)
    left = set(leave)
    while core.has_unfinished_requests():
        for out in core.step():
            number, tokens = int(out.request_id), list(out.outputs[0].token_ids)
            if number in left and len(tokens) >= 3:
                core.abort_request([out.request_id])
                left.remove(number)
            elif out.finished and number not in leave:
                found[number] = tokens
    assert not left, "requests were meant to be aborted"
    return found


COUNT = 200 if GPU else 24


@pytest.mark.parametrize("switch", [None, "k16v16", "k8v8", "k4v4"])
def test_many_requests_that_come_and_go(llama: Path, switch: str | None) -> None:
    """More than the memory holds, with common prefixes, preempted ones and aborted ones: each that stays says what it
    says alone. No block is lost. With the stock backend, too: what it does not keep nobody needs to."""
    with engine(
        llama, switch, num_gpu_blocks_override=20, block_size=64, max_model_len=1024, skip_tokenizer_init=True
    ) as llm:
        requests = mixture(COUNT, ("short", "long", "prefix", "abort"))
        prompts = [list(each.prompt.encode()[::4]) for each in requests]
        counts = [max(each.tokens, 4) for each in requests]
        leave = {number for number, each in enumerate(requests) if each.kind == "abort"}
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        free, preempted = pool.get_num_free_blocks(), count_preemptions(scheduler)
        found = served(llm, prompts, counts, leave)
        assert preempted, "the memory was meant to be too small"
        assert sorted(found) == sorted(set(range(COUNT)) - leave)
        expected: dict[int, Answer] = {}
        for number in found:
            assert llm.reset_prefix_cache()
            (expected[number],) = token_ids(llm, [prompts[number]], counts[number], detokenize=False)
        assert pool.get_num_free_blocks() == free
    mine, theirs = [found[number] for number in found], [expected[number] for number in found]
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    far = max((nats for pair in zip(mine, theirs, strict=True) for _, nats in how_far(*pair)), default=0.0)
    print(
        f"{switch}: {same} of {len(mine)} answers are equal, others by {far:.2f} nats, {len(set(preempted))} preempted"
    )
    assert wrong(mine, theirs, near(switch)) == []


# lengths


def alone(llm: Any, prompts: list[list[int]]) -> list[Answer]:
    """What each prompt gets when nothing else runs and nothing of it is known."""
    found = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        found += token_ids(llm, [prompt], 24, detokenize=False)
    return found


LONGEST = 131072 if GPU else 2048
LENGTHS = (1, LONGEST - 72, 2, 17, LONGEST // 2, 3, 1024, LONGEST // 4 + 5, 640, 5)


def test_lengths_from_one_token_on(tmp_path: Path) -> None:
    """To 128K on a GPU, in one batch: each says what it says with the stock backend, or at 4 bits alone."""
    draw = random.Random(2)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in LENGTHS]
    folder = random_model(tmp_path / "model", "llama", LONGEST)
    options: dict[str, Any] = {
        "max_model_len": LONGEST, "skip_tokenizer_init": True, "max_num_batched_tokens": 8192 if GPU else 256,
        "kv_cache_memory_bytes": 3 << 30 if GPU else 1 << 28,
    }  # fmt: skip
    found = {}
    for switch in (None, "k16v16", "k4v4"):
        with engine(folder, switch, **options) as llm:
            found[switch] = token_ids(llm, prompts, 24, detokenize=False)
            if switch == "k4v4":
                assert wrong(found[switch], alone(llm, prompts), near("k4v4")) == []
    assert wrong(found["k16v16"], found[None]) == []


# CUDA graphs


def caches(llm: Any) -> list[Tensor]:
    """The memory of each layer, on the host."""

    def copied(worker: Any) -> list[Tensor]:
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return [layer.kv_cache.cpu().clone() for layer in layers]

    return llm.collective_rpc(copied)[0]


@pytest.mark.parametrize(("drafts", "head"), [(0, False), (3, False), (4, True)])
def test_rows_that_pad_a_batch_touch_nothing(llama: Path, tmp_path: Path, drafts: int, head: bool) -> None:
    """Batches that are smaller than the graphs that hold them: blocks change that belong to their requests, and no
    others, also not block 0, where tables of padding rows point to. The drafts of a head are made in a graph of its
    own, which has rows of larger batches before it."""
    tokens, draw = 20, random.Random(4)
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 120,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if drafts:
        of = {"method": "eagle", "model": str(eagle_head(tmp_path))} if head else {"method": "draft_model"}
        options["speculative_config"] = {"model": str(llama), **of, "num_speculative_tokens": drafts}
    with engine(llama, "k4v4", **options) as llm:
        config = llm.llm_engine.vllm_config
        if GPU:
            assert config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        size = config.cache_config.block_size
        for count in (13, 9, 5, 3) if head else (1, 3, 5, 7, 11, 13):
            lengths = [draw.randrange(1, 300) for _ in range(count)]
            prompts = [[draw.randrange(512) for _ in range(length)] for length in lengths]
            before = caches(llm)
            token_ids(llm, prompts, tokens, detokenize=False)
            most = sum(-(-(length + tokens + 2 * drafts) // size) for length in lengths)
            least = sum(-(-length // size) for length in lengths)
            for old, new in zip(before, caches(llm), strict=True):
                changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
                assert 0 not in changed
                assert least <= len(changed) <= most, (count, changed)


MODES: dict[str, dict[str, dict[str, Any]]] = {
    "graphs": {
        "everything by default": {"compilation_config": {}},
        "eager": {"enforce_eager": True, "compilation_config": {}},
        "in pieces": {"compilation_config": {**ON_GPU["compilation_config"], "cudagraph_mode": "PIECEWISE"}},
        "without torch.compile": {"compilation_config": {"mode": 0}},
    },
    "blocks": {f"of {tokens}": {"block_size": tokens} for tokens in (16, 32, 128)},
    "others": {"short chunks": {"max_num_batched_tokens": 128}, "the older runner": {}},
}


@gpu_only
@pytest.mark.parametrize("kind", MODES)
def test_every_mode_says_the_same(llama: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    def said(options: dict[str, Any]) -> list[Answer]:
        # at 8 bits: which steps read first tokens uncompressed depends on what runs besides
        with engine(llama, "k8v8", skip_tokenizer_init=True, **options) as llm:
            return token_ids(llm, random_prompts(), 24, detokenize=False)

    expected = said({})
    found = {}
    for mode, options in MODES[kind].items():
        if mode == "the older runner":
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
            envs.disable_envs_cache()  # the engines before have read it
        found[mode] = wrong(said(options), expected)
    assert found == {mode: [] for mode in MODES[kind]}


@gpu_only
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(llama: Path, dtype: str) -> None:
    found = {}
    for switch in (None, "k16v16", "k4v4"):
        with engine(llama, switch, skip_tokenizer_init=True, dtype=dtype) as llm:
            found[switch] = token_ids(llm, random_prompts(), 24, detokenize=False)
            if switch == "k4v4":
                assert wrong(found[switch], alone(llm, random_prompts()), near("k4v4")) == []
    assert wrong(found["k16v16"], found[None]) == []
