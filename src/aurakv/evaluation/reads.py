"""How often a cache was read from codes, by the rule of positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from ..errors import InputError
from ..hf import AuraCache


class Reads(NamedTuple):
    """How the queries of one chunk read keys, all layers together."""

    tokens: int  # read from codes so far
    coded: int  # reads of a key from codes
    all: int  # reads of a key


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
        first, recent = held.uncompressed.first, held.uncompressed.recent
        middle = torch.maximum(oldest, torch.tensor(first))  # keys from here up to query − recent come from codes
        coded += int((query - recent - middle + 1).clamp(min=0).sum())
        tokens.append(max(0, stop - first - recent) if recent < (layer.window or stop) else 0)
    return Reads(min(tokens, default=0), coded, total)
