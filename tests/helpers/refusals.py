"""Refused calls: caches of every kind to call on, and the check that nothing changed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import aurakv as kv
from aurakv.errors import InputError
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import poisoned

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 32
FORMAT = kv.Format.parse("k4v3", (KEY_DIM, VALUE_DIM))
UNCOMPRESSED = kv.Format.parse("k16v4", (KEY_DIM, VALUE_DIM))
META = torch.device("meta")


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).sin().view(shape)


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ramp(n, KV_HEADS, KEY_DIM), ramp(n, KV_HEADS, VALUE_DIM)


def codes(n: int, format: kv.Format = FORMAT) -> tuple[kv.Codes, kv.Codes]:
    k, v = tokens(n)
    return kv.encode(k, format.key), kv.encode(v, format.value)


def queries(n: int) -> torch.Tensor:
    return ramp(n, HEADS, KEY_DIM)


def every_kind() -> SimpleNamespace:
    """Caches of every kind with tokens in them. Two share a pool that is nearly full."""
    with poisoned():
        pool = kv.PagePool(FORMAT, 6, 8, KV_HEADS)
        w = SimpleNamespace(
            pool=pool,
            paged=kv.KVCache.paged(pool, 2),
            limited=kv.KVCache.paged(pool, 2, max_tokens=16),
            contiguous=kv.KVCache.contiguous(FORMAT, 2, KV_HEADS, 64),
            ring=kv.KVCache.ring(FORMAT, 2, KV_HEADS, 10, 3, page_size=4, chunk=4, rollback=2),
            uncompressed=kv.KVCache.contiguous(
                FORMAT, 2, KV_HEADS, uncompressed=Uncompressed(first=2, recent=4, rollback=3)
            ),
        )
        for cache, new in ((w.paged, [11, 5]), (w.limited, [3, 9]), (w.contiguous, [7, 0]), (w.ring, [60, 9])):
            cache.append(*tokens(sum(new)), [0, new[0], sum(new)])
        w.uncompressed.append(*tokens(140), [0, 120, 140])
        w.paged.truncate(0, 9)
        w.paged.fork(0, 1)
    return w


def everything(w: SimpleNamespace) -> list[object]:
    state: list[object] = []
    for cache in vars(w).values():
        for table in getattr(cache, "page_tables", []):
            pages, pool = table.pages, table.pool
            state += [pages.data.numpy().tobytes(), pages.table.tolist(), pages.lengths.tolist()]
            state += [pages.overflow.tolist(), [list(row) for row in table.rows], list(table.lengths)]
            state += [list(table.highest), list(pool._references), list(pool._free), pool.page_size]
            state += [id(pages), id(pool.data)]
    return state


def check(w: SimpleNamespace, call, error: type[Exception], *words: str) -> None:
    """`call` raises exactly this error, its one sentence has all the words, and not a byte changed."""
    before = everything(w)
    with pytest.raises(error) as caught:
        call(w)
    assert type(caught.value) is error
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, f"{word!r} is missing in: {sentence}"
    assert everything(w) == before


def case(name: str, call, *words: str, error: type[Exception] = InputError) -> object:
    return pytest.param(call, error, words, id=name)


def with_grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()
