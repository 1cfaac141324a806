"""vLLM for CPUs whose layers of ours are on an emulated GPU (`pytest --emulate 9.0 tests/vllm`): the model runs on the
CPU, and every kernel of ours as on a GPU.

What of vLLM itself only CUDA has is stood in for: flash attention, which is computed in float32 here, and scratch
memory. Steps are not captured in graphs, and the runner is that of CPUs.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor


class Platform:
    """The platform as our modules see it: CUDA, where they ask for that, and a CPU, where they ask for that."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def is_cuda(self) -> bool:
        return True


class Workspace:
    """Memory that has NaN in it at first, and then what the last layer left."""

    def __init__(self) -> None:
        self.known: dict[Any, list[Tensor]] = {}

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        if wanted not in self.known:
            self.known[wanted] = [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in wanted]
        return self.known[wanted]


def flash(self: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, key_starts: Tensor,
          most: tuple[int, int], *, causal: bool, sinks: bool) -> Tensor:  # fmt: skip
    """`adapter_cuda.FlashAttention`, in float32. What it is told of the largest sequence must be true."""
    lse, group = torch.empty(q.shape[1], q.shape[0]), q.shape[1] // k.shape[1]
    rows, tokens = (list(itertools.pairwise(x.tolist())) for x in (starts, key_starts))
    assert max(b - a for a, b in rows) <= most[0]
    assert max(b - a for a, b in tokens) <= min(most[1], len(k))
    for (a, b), (first, last) in zip(rows, tokens, strict=True):
        keys, values = (x[first:last].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if causal:
            key, query = torch.arange(last - first), (last - first) - (b - a) + torch.arange(b - a)[:, None]
            hidden = key > query
            if self.window is not None:
                hidden |= key <= query - self.window
            scores = scores.masked_fill(hidden, -torch.inf)
        sums = scores.logsumexp(-1)
        if sinks:
            sums = torch.logaddexp(sums, self.sink_logits.float()[:, None])
        lse[:, a:b] = sums
        out[a:b] = torch.einsum("hqk,khd->qhd", (scores - sums[:, :, None]).exp(), values).to(out.dtype)
    return lse


def over_pages(self: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, lengths: Tensor,
               table: Tensor, most: tuple[int, int]) -> Tensor:  # fmt: skip
    """`adapter_cuda.FlashAttention.over_pages`."""
    assert k.is_contiguous()
    assert len(table) == len(lengths) == len(starts) - 1
    kept = [each[:n] for each, n in zip(table.long(), (-(-lengths // k.shape[1])).tolist(), strict=True)]
    rows = [torch.cat([x[pages].flatten(0, 1)[:n] for pages, n in zip(kept, lengths.tolist(), strict=True)])
            for x in (k, v)]  # fmt: skip
    key_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return flash(self, q, *rows, out, starts, key_starts, most, causal=False, sinks=False)


def merge(self: Any, out: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    lse = torch.logaddexp(a[1], b[1])
    parts = [part.float() * (own - lse).exp().T[:, :, None] for part, own in (a, b)]
    out.copy_(parts[0] + parts[1])
    return lse


def start(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, layers of ours in engines of this process are on the GPU that `--emulate` names."""
    from aurakv.vllm import adapter, adapter_builder, adapter_cuda, worker
    from aurakv.vllm.beginnings import Beginnings

    adapter.install()
    _register_kernels_once()
    workspace = Workspace()
    for module in (adapter, adapter_builder, adapter_cuda, worker):
        monkeypatch.setattr(module, "current_platform", Platform(module.current_platform))
    monkeypatch.setattr(Beginnings, "on_gpu", True)
    monkeypatch.setattr(adapter_cuda, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(adapter_cuda, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(adapter_cuda.FlashAttention, "__call__", flash)
    monkeypatch.setattr(adapter_cuda.FlashAttention, "over_pages", over_pages)
    monkeypatch.setattr(adapter_cuda.FlashAttention, "merge", merge)
    monkeypatch.setattr(adapter_cuda._KERNELS, "register_warmup", lambda work: None)


def _register_kernels_once() -> None:
    """vLLM replaces its own kernels wherever any module has them, at every start; it fails over Triton's modules."""
    from vllm.platforms import current_platform

    owner = type(current_platform)
    stock = owner.register_triton_kernel_overrides
    if not hasattr(stock, "cache_info"):
        owner.register_triton_kernel_overrides = staticmethod(functools.cache(stock))
    owner.register_triton_kernel_overrides()
