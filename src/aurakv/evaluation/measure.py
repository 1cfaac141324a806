"""Teacher-forced measurement of what decoding sees.

A text goes through the model chunk by chunk, with the real cache: every query reads the keys as they are stored, by
position, and its prediction is compared with that of the uncompressed model after the same text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..errors import InputError
from ..hf import AuraCache, register
from ..hf.attention import NAME
from ..hf.progress import forward
from .reads import reads_of
from .tensors import bytes_of

REFERENCE = "uncompressed"
HELD = 2 << 30
_LOGITS = 1 << 21  # compared at once, whatever the vocabulary: 8 MB in float32

Progress = Callable[[float, int], None]


@dataclass(frozen=True)
class Row:
    """What one cache did to one text."""

    name: str
    tokens: int  # that were read
    predictions: int  # that were compared: every token but the last predicts the next one
    perplexity: float
    kl: float  # mean KL divergence of the predictions from those of the uncompressed model, in nats
    top1: float  # share of positions where both find the same token most likely
    bytes_per_token: float  # tensors that the cache holds in the end, divided by the tokens
    tokens_from_codes: int  # whose keys queries read from codes, in every layer that has codes
    reads_from_codes: float  # share of all reads of a key by a query that were from codes
    seconds: float  # of the forward passes


def compare(
    model: PreTrainedModel,
    ids: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    *,
    chunk: int = 128,
    every: int = 1,
    reference: Callable[[], Cache] | None = None,
    expected: Expected | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """The row of the uncompressed model, then one for each of the caches, over the ids [1, n] of a text.

    All caches advance side by side, so that logits of one chunk are all that is held. A cache of another class than
    AuraCache says with a method `reads(start, stop)` how often it read codes, else none are counted. With `every` = n
    only each n-th prediction is compared, which saves time where the vocabulary is large. `reference` makes the
    cache of the uncompressed model, for a caller who goes on with it. `expected` holds what the uncompressed model
    predicted from one call to the next, with the same text, chunk and `every`. `progress` is told how many of all
    forward passes are done, after each layer of one.
    """
    ids = ids.view(1, -1).to(model.device)
    count = ids.shape[1]
    if count < 2:
        raise InputError(f"a text needs at least 2 tokens to be measured, got {count}")
    if chunk < 1 or every < 1:
        raise InputError(f"chunk and every must be at least 1, got {chunk} and {every}")
    if REFERENCE in caches:
        raise InputError(f"the name {REFERENCE!r} stands for the model itself")
    register()
    before = model.config._attn_implementation
    held = Expected() if expected is None else expected
    runs = []
    if held.row is None:
        held.clear()
        runs = [_Run(REFERENCE, DynamicCache(config=model.config) if reference is None else reference())]
    runs += [_Run(name, make()) for name, make in caches.items()]
    total, done = len(runs) * math.ceil(count / chunk), 0.0

    def more(amount: float) -> None:
        nonlocal done
        done += amount
        if progress is not None:
            progress(round(done, 6), total)

    try:
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            at = torch.arange(-start % every, min(stop, count - 1) - start, every, device=ids.device)
            targets = ids[0, start + at + 1]
            wanted = held.chunks.get(start)
            for run in runs:
                logits = run.forward(model, ids[:, start:stop], at, start, before, more if progress else None)
                if wanted is None:
                    wanted = _Predictions(logits)
                    held.keep(start, wanted, expected is not None)
                run.add(logits, wanted, targets)
    finally:
        model.set_attn_implementation(before)
    if held.row is not None:
        return [held.row, *(run.row(count) for run in runs)]
    rows = [run.row(count) for run in runs]
    held.row = rows[0] if held.chunks else None
    return rows


class Expected:
    """What the uncompressed model predicts of a text, if that fits into HELD bytes; otherwise it is computed anew."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self.chunks: dict[int, _Predictions] = {}  # by the position of their first token
        self._bytes = 0

    def keep(self, start: int, chunk: _Predictions, wanted: bool) -> None:
        self._bytes += chunk.logits.nbytes
        if wanted and self._bytes <= HELD:
            self.chunks[start] = chunk
        else:
            self.chunks.clear()

    def clear(self) -> None:
        self.chunks.clear()
        self._bytes = 0


@dataclass
class _Run:
    """One cache on its way through the text, and the sums over positions so far."""

    name: str
    cache: Cache
    predictions: int = 0
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    tokens: int = 0
    coded: int = 0
    reads: int = 0
    seconds: float = 0.0

    @torch.no_grad()
    def forward(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        at: Tensor,
        start: int,
        implementation: str,
        progress: Callable[[float], None] | None,
    ) -> Tensor:
        """Logits [len(at), vocabulary] of some of the next tokens."""
        model.set_attn_implementation(NAME if isinstance(self.cache, AuraCache) else implementation)
        began = time.perf_counter()
        keep = at if len(at) else 1  # the last chunk may have nothing to predict
        options = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": keep}
        logits: Tensor = forward(model, progress, 1.0, ids, **options).logits[0, : len(at)]
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.seconds += time.perf_counter() - began
        reads = reads_of(self.cache, start, start + ids.shape[1])
        self.tokens, self.coded, self.reads = reads.tokens, self.coded + reads.coded, self.reads + reads.all
        return logits

    def add(self, logits: Tensor, expected: _Predictions, targets: Tensor) -> None:
        """Compare predictions with those of the uncompressed model and with the text."""
        self.predictions += len(targets)
        for rows in _blocks(*logits.shape):
            z, theirs = logits[rows].float(), expected.logits[rows].float()
            lse = z.logsumexp(1)
            self.nll += float((lse - z.gather(1, targets[rows, None])[:, 0]).cpu().double().sum())
            self.same += int((z.argmax(1) == expected.choice[rows]).sum())
            # KL = Σ p·(log p − log q): differences of logits, so that nothing large cancels
            inner = torch.einsum("ij,ij->i", (theirs - expected.lse[rows, None]).exp(), theirs - z)
            self.kl += float((inner + lse - expected.lse[rows]).cpu().double().sum())

    def row(self, count: int) -> Row:
        return Row(
            self.name,
            count,
            self.predictions,
            math.exp(self.nll / self.predictions),
            self.kl / self.predictions,
            self.same / self.predictions,
            bytes_of(self.cache) / count,
            self.tokens,
            self.coded / self.reads if self.reads else 0.0,
            self.seconds,
        )


class _Predictions:
    """What the uncompressed model predicts in a chunk."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        blocks = list(_blocks(*logits.shape))
        none = logits.new_empty(0)
        self.lse = torch.cat([none.float(), *(logits[rows].float().logsumexp(1) for rows in blocks)])
        self.choice = torch.cat([none.long(), *(logits[rows].argmax(1) for rows in blocks)])


def _blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    """Rows that are compared at once."""
    step = max(1, _LOGITS // vocabulary)
    for lo in range(0, rows, step):
        yield slice(lo, min(lo + step, rows))
