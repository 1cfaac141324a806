"""Teacher-forced measurement of what decoding sees.

A text goes through the model chunk by chunk, with the real cache: every query reads the keys as they are stored, by
position, and its prediction is compared with that of the uncompressed model after the same text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..errors import InputError
from ..hf import AuraCache, register
from ..hf.attention import NAME
from .tensors import bytes_of

REFERENCE = "uncompressed"
_LOGITS = 1 << 23  # compared at once, whatever the vocabulary: 32 MB in float32

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """What one cache did to one text."""

    name: str
    tokens: int  # that were read; each but the last predicts the next one
    perplexity: float
    kl: float  # mean KL divergence of the predictions from those of the uncompressed model, in nats
    top1: float  # share of positions where both find the same token most likely
    bytes_per_token: float  # tensors that the cache holds in the end, divided by the tokens
    tokens_from_codes: int  # whose keys queries read from codes, in every layer that has codes
    reads_from_codes: float  # share of all reads of a key by a query that were from codes
    seconds: float  # of the forward passes


class Reads(NamedTuple):
    """How the queries of one chunk read keys, all layers together."""

    tokens: int  # read from codes so far
    coded: int  # reads from codes, of the layer sum
    all: int


def compare(
    model: PreTrainedModel,
    ids: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    *,
    chunk: int = 128,
    progress: Progress | None = None,
) -> list[Row]:
    """The row of the uncompressed model, then one for each of the caches, over the ids [1, n] of a text.

    All caches advance side by side, so that logits of one chunk are all that is held. A cache of another class than
    AuraCache says with a method `reads(start, stop)` how often it read codes, else none are counted. `progress` is told
    how many of all forward passes are done.
    """
    ids = ids.view(1, -1).to(model.device)
    count = ids.shape[1]
    if count < 2:
        raise InputError(f"a text needs at least 2 tokens to be measured, got {count}")
    if chunk < 1:
        raise InputError(f"chunk must be at least 1, got {chunk}")
    if REFERENCE in caches:
        raise InputError(f"the name {REFERENCE!r} stands for the model itself")
    register()
    before = model.config._attn_implementation
    runs = [_Run(REFERENCE, DynamicCache(config=model.config))]
    runs += [_Run(name, make()) for name, make in caches.items()]
    total, done = len(runs) * math.ceil(count / chunk), 0
    try:
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            targets = ids[0, start + 1 : stop + 1]
            expected = None
            for run in runs:
                logits = run.forward(model, ids[:, start:stop], start, before)
                expected = logits if expected is None else expected
                run.add(logits, expected, targets)
                done += 1
                if progress is not None:
                    progress(done, total)
    finally:
        model.set_attn_implementation(before)
    return [run.row(count) for run in runs]


@dataclass
class _Run:
    """One cache on its way through the text, and the sums over positions so far."""

    name: str
    cache: Cache
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    tokens: int = 0
    coded: int = 0
    reads: int = 0
    seconds: float = field(default=0.0)

    @torch.no_grad()
    def forward(self, model: PreTrainedModel, ids: Tensor, start: int, implementation: str) -> Tensor:
        """Logits [t, vocabulary] of the next t tokens."""
        model.set_attn_implementation(NAME if isinstance(self.cache, AuraCache) else implementation)
        began = time.perf_counter()
        logits: Tensor = model(ids, past_key_values=self.cache, use_cache=True).logits[0]
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.seconds += time.perf_counter() - began
        reads = reads_of(self.cache, start, start + ids.shape[1])
        self.tokens, self.coded, self.reads = reads.tokens, self.coded + reads.coded, self.reads + reads.all
        return logits

    def add(self, logits: Tensor, expected: Tensor, targets: Tensor) -> None:
        """Compare predictions; the last token of a text has no target."""
        rows = max(1, _LOGITS // logits.shape[1])
        for lo in range(0, len(targets), rows):
            at = slice(lo, min(lo + rows, len(targets)))
            ours = logits[at].float().log_softmax(1)
            self.nll -= float(ours.gather(1, targets[at, None]).double().sum())
            if logits is expected:
                self.same += ours.shape[0]
                continue
            theirs = expected[at].float().log_softmax(1)
            self.same += int((ours.argmax(1) == theirs.argmax(1)).sum())
            self.kl += float((theirs.exp() * (theirs - ours)).sum(1).double().sum())

    def row(self, count: int) -> Row:
        predicted = count - 1
        return Row(
            self.name,
            count,
            math.exp(self.nll / predicted),
            self.kl / predicted,
            self.same / predicted,
            bytes_of(self.cache) / count,
            self.tokens,
            self.coded / self.reads if self.reads else 0.0,
            self.seconds,
        )


def reads_of(cache: Cache, start: int, stop: int) -> Reads:
    """How the queries at positions start … stop − 1, the last that the cache took, read their keys."""
    if isinstance(cache, AuraCache):
        return _aura_reads(cache, start, stop)
    reads = getattr(cache, "reads", None)
    return Reads(0, 0, 0) if reads is None else reads(start, stop)


def _aura_reads(cache: AuraCache, start: int, stop: int) -> Reads:
    query = torch.arange(start, stop)
    tokens: list[int] = []
    coded = total = 0
    for layer in cache.compressed:
        held: Any = layer.cache
        if held is None or held.lengths != [stop]:
            raise InputError(f"{layer} must hold {stop} tokens of one sequence: was it fed by something else?")
        oldest = (query - (layer.window or stop) + 1).clamp(min=0)
        seen = query - oldest + 1
        total += int(seen.sum())
        if not held.format.key.coded:
            continue
        first, recent = held.exact.first, held.exact.recent
        middle = torch.maximum(oldest, torch.tensor(first))  # keys from here up to query − recent come from codes
        coded += int((query - recent - middle + 1).clamp(min=0).sum())
        tokens.append(max(0, stop - first - recent) if recent < (layer.window or stop) else 0)
    return Reads(min(tokens, default=0), coded, total)
