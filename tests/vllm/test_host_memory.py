"""Blocks that leave the GPU and come back by vLLM's own connectors, with what was in them. Run: make test-vllm"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
from tests.helpers.vllm_answers import LIKELY, answer, near, wrong
from tests.vllm.test_engine import GPU, engine, token_ids

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("calibrations"),
    pytest.mark.skipif(not GPU, reason="vLLM's connectors copy from a GPU"),
]


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(512) for _ in range(length)] for length in (333, 700, 1200, 129)]


def transfer(name: str, **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    given = {"cpu_bytes_to_use": 1 << 28, **extra}
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=given)


OPTIONS: dict[str, Any] = {
    "--kv-offloading-size": lambda: {"kv_offloading_size": 0.25},
    "OffloadingConnector": lambda: {"kv_transfer_config": transfer("OffloadingConnector")},
    "SimpleCPUOffloadConnector": lambda: {"kv_transfer_config": transfer("SimpleCPUOffloadConnector")},
}


def forget(llm: Any) -> None:
    """All blocks on the GPU, once those that are being copied are free: what is in them, and that they were known."""
    for _ in range(50):
        token_ids(llm, [[1, 2, 3]], 4, detokenize=False)  # steps, in which copies are seen to have ended
        if llm.reset_prefix_cache():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("blocks were meant to become free")

    def emptied(worker: Any) -> None:
        torch.cuda.synchronize()
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            layer.kv_cache.fill_(77)
        torch.cuda.synchronize()  # copies from the host are on a stream of their own

    llm.collective_rpc(emptied)


def found_again(llm: Any, given: list[list[int]], tokens: int = 16) -> tuple[int, list[Any]]:
    """How many tokens of prompts were in memory somewhere, and the answers."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=LIKELY or None
    )
    outs = llm.generate([{"prompt_token_ids": each} for each in given], params, use_tqdm=False)
    said = [answer(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs]
    return sum(out.num_cached_tokens or 0 for out in outs), said


@pytest.mark.parametrize("switch", ["k16v16", "k8v8"])  # blocks come back without their uncompressed first tokens
@pytest.mark.parametrize("how", OPTIONS)
def test_blocks_come_back_from_the_host(llama: Path, how: str, switch: str) -> None:
    with engine(llama, switch, skip_tokenizer_init=True, **OPTIONS[how]()) as llm:
        size = llm.llm_engine.vllm_config.cache_config.block_size
        given = prompts(1)
        cached, expected = found_again(llm, given)
        assert cached == 0
        forget(llm)
        cached, said = found_again(llm, given)
        assert cached >= sum((len(each) - 1) // size * size for each in given) * 0.9
        assert wrong(said, expected, near(switch)) == []
        again, others = found_again(llm, prompts(2))
        assert again == 0
        forget(llm)
        assert wrong(found_again(llm, prompts(2))[1], others, near(switch)) == []


def test_blocks_on_disk_are_found_by_another_engine(llama: Path, tmp_path: Path) -> None:
    """Of the same format; with another one nothing is found."""
    found: dict[tuple[str, int], tuple[int, list[Any]]] = {}
    for switch in ("k8v8", "k8v4"):
        with engine(llama, switch, skip_tokenizer_init=True) as llm:  # calibrates, which must be done before
            found[switch, 0] = found_again(llm, prompts(1))
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "blocks")}]
    for number, switch in ((1, "k8v8"), (2, "k8v8"), (1, "k8v4")):
        how = transfer("OffloadingConnector", spec_name="TieringOffloadingSpec", secondary_tiers=tiers)
        with engine(llama, switch, skip_tokenizer_init=True, kv_transfer_config=how) as llm:
            found[switch, number] = found_again(llm, prompts(1))
            forget(llm)
            time.sleep(2.0)  # files are written behind the engine's back
            token_ids(llm, [[1, 2, 3]], 4, detokenize=False)
    cached = {key: count for key, (count, _) in found.items()}
    assert cached["k8v8", 1] == cached["k8v4", 1] == 0
    assert cached["k8v8", 2] >= 1000, cached
    for key, (_, said) in found.items():
        assert wrong(said, found[key[0], 0][1], near("k4v4")) == []  # k8v4 among them
