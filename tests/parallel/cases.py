"""Small caches of one process and of several, and what both are given."""

import dataclasses
import hashlib
import itertools

import torch

import aurakv as kv
from aurakv import parallel
from aurakv.storage.uncompressed import Uncompressed

H, D = 2, 64


INF = float("inf")


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def digest(*tensors):
    return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Case:
    format: str = "k4v4"
    storage: str = "growing"
    scoring: kv.Scoring = dataclasses.field(default_factory=kv.Scoring)
    uncompressed: Uncompressed | None = None
    offsets: bool = False
    sink_logits: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32
    backend: str | None = None
    block: int = 16
    chunk: int = 32
    splits: int | None = None
    damaged: bool = False
    steps: tuple[tuple[int, ...], ...] = ((70, 0, 31), (1, 1, 1), (5, 2, 0), (40, 1, 90), (1, 1, 1))


def make(case, seqs=3):
    """The case as one process keeps it, and as ranks share it."""
    format = kv.Format.parse(case.format, D, torch.float32)
    offsets = {"key_offset": rand(H, D, seed=50), "value_offset": rand(H, D, seed=51)} if case.offsets else {}
    options = {"uncompressed": case.uncompressed, "backend": case.backend}
    sharing = {"block": case.block, "chunk": case.chunk}
    if case.storage == "ring":
        ring = (format, seqs, H, case.scoring.window, case.scoring.sinks)
        return (
            kv.KVCache.ring(*ring, page_size=16, rollback=8, **options, **offsets),
            parallel.ShardedCache.ring(*ring, page_size=16, rollback=8, **options, **offsets, **sharing),
        )
    whole = kv.KVCache.contiguous(format, seqs, H, **options, **offsets)
    if case.storage == "paged":
        pool = kv.PagePool(format, 60, 8, H, **offsets)
        return whole, parallel.ShardedCache.paged(pool, seqs, 1000, **options, **sharing)
    return whole, parallel.ShardedCache.growing(format, seqs, H, **options, **offsets, **sharing)


def close(got, wanted, dtype):
    eps = max(8 * torch.finfo(dtype).eps, 1e-12) if dtype != torch.float32 else 2e-5
    torch.testing.assert_close(got.out, wanted.out, atol=eps, rtol=eps, equal_nan=True)
    eps = 1e-4 if dtype != torch.float64 else 1e-12
    torch.testing.assert_close(got.lse, wanted.lse, atol=eps, rtol=eps, equal_nan=True)


def step(caches, new, seed, case):
    """Both caches take the same step; the difference must be rounding."""
    bounds = [0, *itertools.accumulate(new)]
    k, v = (rand(bounds[-1], H, D, seed=seed + i).to(case.dtype) for i in range(2))
    q = rand(bounds[-1], 4, D, seed=seed + 2).to(case.dtype)
    if case.damaged and len(k) > 20:  # outputs that see these tokens are NaN, and no others
        k[18, 0, 5], v[9, 1, 7] = torch.nan, torch.inf
    logits = None if case.sink_logits is None else torch.tensor(case.sink_logits)
    options = {"scoring": case.scoring, "sink_logits": logits, "splits": case.splits, "precision": "float32"}
    wanted, got = (cache.step(q, k, v, bounds, **options) for cache in caches)
    close(got, wanted, case.dtype)
    assert caches[0].lengths == caches[1].lengths
    return got
