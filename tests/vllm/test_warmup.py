"""Which kernels a layer launches in an engine on an H200, found without one: launches go to a list instead."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import aurakv as kv
from aurakv import backends
from aurakv.attention.step import Rows
from aurakv.calibration.policy import LayerPolicy
from aurakv.vllm.layer import Batch, Layer, Memory
from aurakv.vllm.prefill import Prefill, find_prompts, most_rows
from aurakv.vllm.warmup import Limits, WarmUp, shape_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from aurakv.backends.triton import backend, dispatch
from aurakv.backends.triton.append import launch as append
from aurakv.backends.triton.common import target
from aurakv.backends.triton.decode import launch as decode
from aurakv.backends.triton.extend import launch as extend
from aurakv.backends.triton.portable import launch as portable
from aurakv.backends.triton.unpack import launch as unpack
from aurakv.backends.triton.warm_up import launches

CPU = torch.device("cpu")
LIMITS = Limits(seqs=300, tokens=8192, rows=1, width=130, page_size=64)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launchers take the CPU for an H200."""
    target.assume((9, 0))
    for module in (append, decode, extend, portable, unpack):
        for name, value in (("capability", (9, 0)), ("multiprocessors", 132)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda device, value=value: value)
    monkeypatch.setattr(dispatch, "decode_path", lambda: decode)
    monkeypatch.setattr(dispatch, "extend_path", lambda: extend)
    monkeypatch.setattr(backends, "select", lambda *_: backend)
    yield
    target.assume(None)


class NoFlash:
    """Its kernels are the engine's."""

    def __call__(self, q: Any, *_: Any, **__: Any) -> Any:
        return q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)

    def merge(self, out: Any, a: Any, b: Any) -> Any:
        return a[1]


def make_layer(
    name: str, dim: int, scoring: kv.Scoring, flash: bool, changed: bool, weight: Tensor | None = None
) -> Layer:
    scratch = torch.empty(1 << 22, dtype=torch.bfloat16)
    numbers = torch.rand(2, dim) if changed else None
    return Layer(
        kv.Format.parse(name, dim),
        scoring,
        policy=LayerPolicy(name, key_offset=numbers, key_scale=numbers, key_weight=weight),
        prefill=Prefill(NoFlash(), lambda: (scratch, scratch)) if flash else None,
    )


def random_batch(numbers: random.Random, limits: Limits) -> list[int]:
    """Rows of each sequence of a batch as schedulers make them, decodes first."""
    seqs = min(limits.seqs, int(2 ** numbers.uniform(0, 8.3)))
    kind = numbers.random()
    if kind < 0.4:
        return [limits.rows if kind < 0.2 else 1] * seqs
    rows = [1] * seqs
    left = limits.tokens - seqs
    for i in range(seqs - 1, -1, -1):
        if left <= 0 or numbers.random() < 0.5:
            break
        rows[i] = min(left, int(2 ** numbers.uniform(0, 13)))
        left -= rows[i]
    return sorted(rows)


def specialisations(layer: Layer, limits: Limits, heads: int, dtype: torch.dtype, count: int) -> set[tuple[Any, ...]]:
    """What batches of all kinds launch."""
    numbers, memory = random.Random(5), Memory(CPU)
    short = most_rows(heads // 2, layer.format.key.dim, limits.rows)
    dim, size = layer.format.key.dim, layer.format.bytes_per_token
    blocks = torch.zeros(7, 2, limits.page_size, size, dtype=torch.uint8)
    fused = torch.empty(limits.tokens, heads + 4, dim, dtype=dtype)  # as projections give queries, keys and values
    out = torch.empty(limits.tokens, heads, dim, dtype=dtype)
    tables = torch.zeros(limits.seqs, limits.width, dtype=torch.int32)

    def work() -> None:
        for _ in range(count):
            rows = random_batch(numbers, limits)
            starts = torch.tensor([0, *rows]).cumsum(0).int()
            lengths = [numbers.randint(n, limits.width * limits.page_size) for n in rows]
            seqs, tokens = len(rows), int(starts[-1])
            if tokens > limits.tokens:
                continue
            batch = Batch(
                tokens,
                Rows(starts, single=tokens == seqs),
                torch.tensor(lengths, dtype=torch.int32),
                tables[:seqs],
                memory,
                find_prompts(starts.tolist(), lengths, short + 1) if layer.prefill is not None else None,
            )
            q, k, v = fused[:tokens].split([heads, 2, 2], 1)
            layer.forward(q, k, v, blocks, batch, out[:tokens])

    return set(launches(work))


CASES = {  # format, dim, heads, scoring, flash attention, offsets and key scales, rows that decode
    "plain": ("k4v4", 128, 8, kv.Scoring(), True, False, 1),
    "changed": ("k8v4", 128, 8, kv.Scoring(), True, True, 1),
    "fitted": ("k4v4", 128, 8, kv.Scoring(), True, True, 1),
    "window": ("k4v4", 64, 16, kv.Scoring(window=128), True, False, 1),
    "drafts": ("k4v4", 128, 8, kv.Scoring(), True, False, 4),
    "cap": ("k4v4", 256, 4, kv.Scoring(softcap=20.0), True, False, 1),
    "portable": ("k6v16", 96, 8, kv.Scoring(), True, False, 1),
    "without-flash": ("k4v4", 128, 8, kv.Scoring(), False, False, 1),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_is_warmed_up(case: str) -> None:
    name, dim, heads, scoring, flash, changed, rows = CASES[case]
    layer = make_layer(name, dim, scoring, flash, changed, torch.rand(2, dim) + 0.1 if case == "fitted" else None)
    limits, dtype = LIMITS._replace(rows=rows), torch.bfloat16
    warm = launches(WarmUp(shape_of(layer, heads, 2, dtype), limits, CPU, layer).run)
    needed = specialisations(layer, limits, heads, dtype, 400)
    missing = {key[1] for key in needed - set(warm)}
    assert not missing
    kernels = {key[1] for key in warm}
    assert ("unpack_kernel" in kernels) == flash
    assert ("append_fitted_kernel" in kernels) == (case == "fitted")
    assert ("extend_kernel" in kernels) == (not flash)
    assert len(warm) <= (40 if flash else 60), sorted(key[1] for key in warm)  # without it prompts take all kernels
