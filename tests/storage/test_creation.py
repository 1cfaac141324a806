"""Making pools and caches: what is refused, and which numbers are taken."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops
from aurakv.errors import CapacityError
from aurakv.storage.uncompressed import Uncompressed
from tests.helpers.refusals import FORMAT, KV_HEADS, META, UNCOMPRESSED, case, check, queries, ramp, tokens, with_grad


def make_ring(**changes: object):
    return lambda w: kv.KVCache.ring(**{"format": FORMAT, "seqs": 1, "kv_heads": 2, "window": 8, **changes})


def make_pool(**changes: object):
    return lambda w: kv.PagePool(**{"format": FORMAT, "num_pages": 2, "page_size": 8, "kv_heads": 2, **changes})


def make_contiguous(**changes: object):
    return lambda w: kv.KVCache.contiguous(**{"format": FORMAT, "seqs": 1, "kv_heads": 2, **changes})


MAKING = [
    case("pages", make_pool(num_pages=-1), "num_pages", "at least 0", "-1"),
    case("pages float", make_pool(num_pages=2.0), "num_pages", "whole number", "2.0"),
    case("pages int32", make_pool(num_pages=2**31), "num_pages", "at most 2147483647", str(2**31)),
    case("page size", make_pool(page_size=0), "page_size", "at least 1", "0"),
    case("kv heads", make_pool(kv_heads=0), "kv_heads", "at least 1", "0"),
    case("key offset", make_pool(key_offset=ramp(2, 32)), "key_offset", "float32 [2, 16]", "[2, 32]"),
    case("value offset", make_pool(value_offset=ramp(2, 32).half()), "value_offset", "float32 [2, 32]", "float16"),
    case("offset device", make_pool(key_offset=ramp(2, 16).to(META)), "key_offset must be on cpu", "meta"),
    case("offset NaN", make_pool(key_offset=torch.full((2, 16), math.nan)), "key_offset", "finite"),
    case("offset inf", make_contiguous(value_offset=torch.full((2, 32), math.inf)), "value_offset", "finite"),
    case("offset grad", make_pool(key_offset=with_grad(ramp(2, 16))), "key_offset", "grad"),
    case("offset at 16 bits", make_pool(format=UNCOMPRESSED, key_offset=ramp(2, 16)), "key_offset", "16 bits"),
    case("seqs", make_contiguous(seqs=-1), "seqs", "at least 0", "-1"),
    case("capacity", make_contiguous(capacity=-5), "capacity", "at least 0", "-5"),
    case("contiguous heads", make_contiguous(kv_heads=0), "kv_heads", "at least 1", "0"),
    case("contiguous backend", make_contiguous(backend="gpu"), "backend", "reference", "'gpu'"),
    case("ring window", make_ring(window=0), "window", "at least 1", "0"),
    case("ring window none", make_ring(window=None), "window", "at least 1", "None"),
    case("ring sinks", make_ring(sinks=-1), "sinks", "at least 0", "-1"),
    case("ring chunk", make_ring(chunk=0), "chunk", "at least 1", "0"),
    case("ring rollback", make_ring(rollback=-1), "rollback", "at least 0", "-1"),
    case("ring page size", make_ring(page_size=0), "page_size", "at least 1", "0"),
    case("ring seqs", make_ring(seqs=1.0), "seqs", "whole number", "1.0"),
    case("ring too large", make_ring(window=2**31), "ring", "at most 2147483647", str(2**31)),
    case("ring backend", make_ring(backend="gpu"), "backend", "reference", "'gpu'"),
    case("paged seqs", lambda w: kv.KVCache.paged(w.pool, -1), "seqs", "at least 0", "-1"),
    case("paged max_tokens", lambda w: kv.KVCache.paged(w.pool, 1, 0), "max_tokens", "at least 1", "0"),
    case("paged growable", lambda w: kv.KVCache.paged(w.ring.pool, 1), "pool of fixed size"),
    case("paged backend", lambda w: kv.KVCache.paged(w.pool, 1, backend="gpu"), "backend", "reference", "'gpu'"),
    case("no memory", make_contiguous(capacity=2**62), "must fit into the memory of cpu", "bytes", error=CapacityError),
    case("too little memory", make_contiguous(capacity=2**50), "must fit into the memory of cpu", error=CapacityError),
    case("uncompressed first", make_contiguous(uncompressed=Uncompressed(first=-1)), "first", "at least 0", "-1"),
    case(
        "uncompressed recent",
        make_contiguous(uncompressed=Uncompressed(recent=1.5)),
        "recent",
        "whole number",
        "1.5",
    ),
    case(
        "uncompressed rollback",
        make_ring(uncompressed=Uncompressed(recent=2, rollback=-1)),
        "rollback",
        "at least 0",
        "-1",
    ),
    case("uncompressed dtype", make_ring(uncompressed=Uncompressed(recent=2, dtype=torch.float64)), "f32", "float64"),
    case("format text", make_contiguous(format="k4v4"), "format must be a Format", "'k4v4'"),
    case("ring format", make_ring(format="k4v4"), "format must be a Format", "'k4v4'"),
    case("pool format", make_pool(format=FORMAT.key), "format must be a Format", "Codec"),
    case("pages bool", make_pool(num_pages=True), "num_pages", "whole number", "True"),
    case("seqs bool", make_contiguous(seqs=True), "seqs", "whole number", "True"),
    case("ring window bool", make_ring(window=True), "window", "whole number", "True"),
    case("key offset list", make_contiguous(key_offset=[0.0]), "key_offset must be a Tensor", "[0.0]"),
    case("paged pool", lambda w: kv.KVCache.paged(FORMAT, 1), "pool must be a PagePool", "Format"),
    case("device", make_contiguous(device="banana"), "device must be a torch.device or the name of one", "'banana'"),
    case(
        "uncompressed number", make_contiguous(uncompressed=4), "an aurakv.storage.uncompressed.Uncompressed", "got 4"
    ),
    case("uncompressed tuple", make_ring(uncompressed=(1, 1)), "uncompressed must be an aurakv.storage", "(1, 1)"),
    case(
        "uncompressed bool",
        lambda w: kv.KVCache.paged(w.pool, 1, uncompressed=Uncompressed(True)),
        "first",
        "whole number",
        "True",
    ),
    case("why_not", lambda w: kv.why_not("gpu"), "backend", "reference", "'gpu'"),
    case(
        "why_not dtype", lambda w: kv.why_not("reference", None, "cpu", "float64"), "dtype must be a dtype", "'float64'"
    ),
    case("why_not format", lambda w: kv.why_not("native", "k99v99"), "format must be a Format", "'k99v99'"),
    case("table kind", lambda w: kv.Codec.key(64, 2, table=5), "level table", "lloyd-max", "5"),
    case("levels kind", lambda w: kv.Codec.key(64, 2, table=["a"] * 4), "level table", "numbers", "'a'"),
    case("tables of a width", lambda w: kv.Format.parse("k8:int/v8", 64), "option of k8", "poly7", "'int'"),
    case("register", lambda w: backends.register(SimpleNamespace(name="reference")), "'reference' is taken"),
]


@pytest.mark.parametrize(("call", "error", "words"), MAKING)
def test_refused(world, call, error, words):
    check(world, call, error, *words)


WHOLE = [np.int64, np.uint8, torch.tensor]


@pytest.mark.parametrize("number", WHOLE)
def test_whole_numbers_of_any_kind_are_plain_ones_inside(world, number):
    """What is accepted once is accepted everywhere, and nothing else than an int is kept."""
    codec = kv.Codec(number(64), number(4), seed=number(1))
    assert codec == kv.Codec(64, 4, seed=1)
    assert {type(x) for x in (codec.dim, codec.bits, codec.seed)} == {int}
    assert kv.Format.parse("k4v4", number(64)) == kv.Format.parse("k4v4", 64)
    scoring = kv.Scoring(window=number(5), sinks=number(1), first=number(2), recent=number(3))
    assert scoring == kv.Scoring(window=5, sinks=1, first=2, recent=3)
    assert type(scoring.window) is int
    heads, options = number(KV_HEADS), {"chunk": number(4), "rollback": number(2)}
    ring = kv.KVCache.ring(FORMAT, number(2), heads, number(8), number(1), **options)
    uncompressed = Uncompressed(number(2), number(3), torch.float32, number(4))
    contiguous = kv.KVCache.contiguous(FORMAT, number(2), heads, number(9), uncompressed=uncompressed)
    paged = kv.KVCache.paged(kv.PagePool(FORMAT, number(8), number(8), heads), number(2), number(16))
    assert {type(x) for x in (*ring.page_table.kept, *contiguous.uncompressed[:2])} == {int}
    assert ops.attend_workspace(paged.pages, number(2), heads, splits=number(3)) >= 0
    plain = kv.KVCache.contiguous(FORMAT, number(2), heads, backend="reference")
    for cache in (ring, contiguous, paged, plain):
        for _ in range(4):
            part = cache.step(queries(2), *tokens(2), splits=number(1))
        assert part.out.isfinite().all()
        cache.reserve(number(5))
        cache.reserve([number(1), number(0)])
        cache.truncate(number(1), number(3))
        cache.fork(number(1), number(0))
        cache.reorder([number(1), number(0)])
        assert cache.lengths == [3, 3]
        assert {type(length) for length in cache.lengths} == {int}
        assert len(cache.positions(number(0))) == 3
        cache.step(queries(2), *tokens(2))
