"""Warm-up: every kernel that a layer may launch in an engine, compiled before requests come. Knows nothing of vLLM.

The layer's own `forward` runs over batches of all kinds, with launches redirected: what it would launch is compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.scoring import Scoring
from ..attention.step import Rows
from .beginnings import Beginnings
from .layer import Batch, Layer, Memory
from .prefill import Prefill, find_prompts, most_rows
from .recent_gpu import RecentOnGpu


class Limits(NamedTuple):
    """Of an engine's batches."""

    seqs: int
    tokens: int
    rows: int  # of a sequence that decodes: one, and drafts
    width: int  # of page tables
    page_size: int


class Shape(NamedTuple):
    """What a layer's kernels depend on; layers that agree are warmed up once."""

    format: str
    heads: int
    kv_heads: int
    dtype: torch.dtype
    scoring: Scoring
    given: tuple[bool, ...]  # sink logits, offsets, key scale, key weight, another way for prompts, uncompressed tokens


def shape_of(layer: Layer, heads: int, kv_heads: int, dtype: torch.dtype) -> Shape:
    policy = layer.policy
    tensors = policy.key_offset, policy.value_offset, policy.key_scale, policy.key_weight
    given = layer.sink_logits, *tensors, layer.prefill, layer.beginnings, layer.recent
    return Shape(layer.format.name, heads, kv_heads, dtype, layer.scoring, tuple(x is not None for x in given))


@dataclass(frozen=True)
class WarmUp:
    """The kernels of one layer."""

    shape: Shape
    limits: Limits
    device: torch.device
    layer: Layer = field(compare=False)
    blocks: Callable[[], Tensor] = field(compare=False)  # the layer's memory, once the engine has allocated it

    def run(self) -> None:
        """A forward pass of every kind of batch. To be called with launches redirected."""
        shape, limits, device = self.shape, self.limits, self.device
        key, value = self.layer.format.key.dim, self.layer.format.value.dim
        blocks = self.blocks()  # how they are padded matters, too
        numbers = torch.zeros(limits.seqs * max(limits.width, 2), dtype=torch.int32, device=device)
        q, k, v, out = (
            torch.empty(limits.tokens, heads, dim, dtype=shape.dtype, device=device)
            for heads, dim in ((shape.heads, key), (shape.kv_heads, key), (shape.kv_heads, value), (shape.heads, value))
        )
        memory, layer = Memory(device), copy.copy(self.layer)
        if layer.beginnings is not None:
            memory.beginnings = Beginnings(layer.beginnings.tokens, limits.seqs, device)
        if layer.recent is not None:
            memory.recent = RecentOnGpu(layer.recent.tokens, limits.seqs, device)
        if layer.prefill is not None:
            layer.prefill = Prefill(_NoFlash(), layer.prefill.scratch)
        short = most_rows(shape.heads // shape.kv_heads, key, limits.rows)
        for seqs, tokens, prompt in batches(limits, short, layer.prefill is None):
            table = numbers[: seqs * limits.width].view(seqs, limits.width)
            batch = _batch(seqs, tokens, prompt, limits, numbers, table, memory)
            for each in (memory.beginnings, memory.recent):
                if each is not None:
                    each.layer = layer
                    each.find(table, batch.lengths, batch.rows, layer.pages(blocks, batch))
            layer.forward(q[:tokens], k[:tokens], v[:tokens], blocks, batch, out[:tokens])


class _NoFlash:
    """An engine's own kernels are not ours to warm up."""

    def __call__(self, q: Tensor, *_: object, **__: object) -> Tensor:
        return q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def over_pages(self, q: Tensor, *_: object) -> Tensor:
        return self(q)

    def merge(self, out: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return a[1]


def _batch(
    seqs: int, tokens: int, prompt: int, limits: Limits, numbers: Tensor, table: Tensor, memory: Memory
) -> Batch:
    """With a prompt the sequences before it have one row each; without so many rows all are prompts. What is on the
    device is never read."""
    rows = Rows(numbers[: seqs + 1], single=tokens == seqs and not prompt)
    prompts = None
    if prompt:
        lengths = [limits.width * limits.page_size] * seqs
        prompts = find_prompts([*range(seqs), tokens], lengths, 1 if prompt < tokens - (seqs - 1) else prompt)
    return Batch(tokens, rows, numbers[:seqs], table, memory, prompts)


def batches(limits: Limits, short: int, codes: bool) -> Iterator[tuple[int, int, int]]:
    """Sequences, rows of all of them, and rows of the last one if it is a prompt, with more than `short` rows; 1 says
    that all are prompts. codes: whether these attend from codes, by kernels that depend on how many there are."""
    for seqs in _sizes(1, limits.seqs, 16):
        yield seqs, seqs, 0
        yield seqs, min(limits.tokens, seqs * limits.rows), 0
    for seqs in _sizes(1, limits.seqs, 2):
        for tokens in _sizes(seqs, min(limits.tokens, seqs * short), 8):
            yield seqs, tokens, 0
        for tokens in _sizes(short + seqs, limits.tokens, 1):
            yield seqs, tokens, tokens - (seqs - 1)
        for tokens in _sizes(short + seqs, limits.tokens, 8) if codes else ():
            yield seqs, tokens, 1


def _sizes(first: int, last: int, steps: int) -> list[int]:
    """From the first to the last one, so many steps to twice as much at least, with the neighbours of powers of two."""
    if first > last:
        return []
    found, n = {first, last}, first
    while n < last:
        found.add(n)
        n += max(1, n // steps)
    powers = (1 << i for i in range(last.bit_length() + 1))
    found |= {n + d for n in powers for d in (0, 1) if first <= n + d <= last}
    return sorted(found)
