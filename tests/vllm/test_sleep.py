"""Sleep mode: what vLLM discards, and that nothing of ours is there. A CPU has no sleep: there a list takes the place
of the memory pools that it discards. Run: make test-vllm"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
from tests.helpers.vllm_answers import wrong
from tests.vllm.test_engine import GPU, cpu_only, engine, random_model, random_prompts, token_ids

pytestmark = pytest.mark.vllm
DISCARDED = ("weights", "kv_cache", "workspace")  # at level 2, but for parameters and buffers, which come back


class Pool(TorchDispatchMode):
    """Remembers the memory of every tensor that is made in it."""

    def __init__(self, made: dict[int, Any]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in before:
                self.made[x.untyped_storage().data_ptr()] = x.untyped_storage()  # kept: no address comes twice
        return found


def ours(worker: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the plugin keeps."""
    from aurakv.vllm.adapter import AuraImpl

    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        if isinstance(getattr(layer, "impl", None), AuraImpl):
            known = layer.impl.layer
            kept = [x for each in known._constants.values() for x in each if x is not None and x.numel()]
            yield from ((name, x) for x in (*kept, known.beginnings.data))
    for groups in worker.model_runner.attn_groups:
        for group in groups:
            memory = group.get_metadata_builder(0).memory
            yield from (("builder", x) for x in (memory.overflow, *memory.beginnings.state.values()))


@cpu_only
def test_nothing_of_ours_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aurakv.vllm.worker import AuraWorker

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pools: dict[str, dict[int, Any]] = {}
    monkeypatch.setattr(
        AuraWorker, "_maybe_get_memory_pool_context", lambda _, tag: Pool(pools.setdefault(tag, {})), raising=True
    )
    with engine(random_model(tmp_path / "model", "llama"), "k4v4", skip_tokenizer_init=True) as llm:
        token_ids(llm, random_prompts(), 8, detokenize=False)
        lost = {address for tag in DISCARDED for address in pools.get(tag, {})}
        (found,) = llm.collective_rpc(lambda worker: (list(ours(worker)), _theirs(worker)))
        mine, (weights, caches) = found
        assert {x.untyped_storage().data_ptr() for x in weights} <= set(pools["weights"])
        assert {x.untyped_storage().data_ptr() for x in caches} <= set(pools["kv_cache"])
        assert len(mine) > 4 * 3  # offset, key scale and first tokens of each layer
        assert [name for name, x in mine if x.untyped_storage().data_ptr() in lost] == []


def _theirs(worker: Any) -> tuple[list[Tensor], list[Tensor]]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    weights = [x for name, x in worker.get_model().named_parameters() if "norm" in name]  # others may be packed
    return weights, [layer.kv_cache for layer in layers]


@pytest.mark.skipif(not GPU, reason="vLLM sleeps on a GPU only")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("switch", ["k4v4", "k16v16"])
def test_an_engine_that_slept_says_the_same(tmp_path: Path, level: int, switch: str, monkeypatch: Any) -> None:
    """Level 1 keeps the weights on the host, level 2 throws them away. Blocks are lost at both."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"enable_sleep_mode": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 6 << 30}
    with engine(random_model(tmp_path / "model", "llama"), switch, **options) as llm:
        expected = token_ids(llm, random_prompts(), 24, detokenize=False)
        for _ in range(2):
            before = torch.cuda.mem_get_info()[0]
            llm.sleep(level)
            assert torch.cuda.mem_get_info()[0] - before > 3 << 30, "memory was meant to become free"
            if level == 2:
                llm.wake_up(["weights"])
                llm.collective_rpc("reload_weights")
            llm.wake_up()
            assert wrong(token_ids(llm, random_prompts(), 24, detokenize=False), expected) == []
