"""What a cache refuses: one sentence, and not a byte changed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import aurakv as kv
from aurakv.errors import CapacityError, InputError
from tests.helpers.refusals import (
    FORMAT,
    KEY_DIM,
    KV_HEADS,
    META,
    VALUE_DIM,
    case,
    check,
    codes,
    queries,
    ramp,
    tokens,
    with_grad,
)


def grow(k: torch.Tensor | None = None, v: torch.Tensor | None = None, starts: object = None, name: str = "paged"):
    """An append in which the given parts are wrong."""

    def call(w: SimpleNamespace) -> None:
        right = tokens(2)
        getattr(w, name).append(right[0] if k is None else k, right[1] if v is None else v, starts)

    return call


def on(name: str, call):
    return lambda w: call(getattr(w, name))


def grow_codes(keys: kv.Codes | None = None, values: kv.Codes | None = None):
    def call(w: SimpleNamespace) -> None:
        right = codes(2)
        w.contiguous.append_codes(right[0] if keys is None else keys, right[1] if values is None else values)

    return call


NAMES = ("paged", "contiguous", "ring", "uncompressed")
K2, V2 = tokens(2)
CK2, CV2 = codes(2)
CACHES = [
    *(
        case(f"{name} {what}", call(name), *words)
        for name in NAMES
        for what, call, words in (
            ("heads", lambda n: grow(k=ramp(2, 3, 16), name=n), ("k must be [tokens, 2, 16]", "[2, 3, 16]")),
            ("dim", lambda n: grow(v=ramp(2, 2, 16), name=n), ("v must be [tokens, 2, 32]", "[2, 2, 16]")),
            ("ndim", lambda n: grow(k=ramp(2, 32), name=n), ("k must be [tokens, 2, 16]", "[2, 32]")),
            ("dtype", lambda n: grow(k=K2.int(), name=n), ("k must be float32", "int32")),
            ("v dtype", lambda n: grow(v=V2.bool(), name=n), ("v must be float32", "bool")),
            ("device", lambda n: grow(v=V2.to(META), name=n), ("v must be on cpu", "meta")),
            ("grad", lambda n: grow(v=with_grad(V2), name=n), ("v requires grad", "v.detach()")),
            ("k grad", lambda n: grow(k=with_grad(K2), name=n), ("k requires grad", "no_grad")),
            ("tokens", lambda n: grow(k=ramp(3, 2, 16), name=n), ("k and v", "as many tokens", "3 and 2")),
            ("starts", lambda n: grow(starts=[0, 3, 2], name=n), ("starts must rise", "[0, 3, 2]")),
            ("starts count", lambda n: grow(starts=[0, 2], name=n), ("starts", "3 numbers", "[0, 2]")),
            ("starts tensor", lambda n: grow(starts=torch.tensor([0, 1, 3]), name=n), ("from 0 to 2", "[0, 1, 3]")),
            (
                "starts float",
                lambda n: grow(starts=torch.tensor([0.0, 1.0, 2.0]), name=n),
                ("starts must be 3 whole numbers",),
            ),
            ("starts scalar", lambda n: grow(starts=torch.tensor(2), name=n), ("starts must be 3 whole numbers",)),
            ("no starts", lambda n: grow(*tokens(3), name=n), ("3 tokens for 2 sequences", "starts")),
        )
    ),
    *(
        case(f"{name} {what}", on(name, call), *words)
        for name in NAMES
        for what, call, words in (
            ("attend heads", lambda c: c.attend(ramp(2, 3, 16)), ("q must be", "2 KV heads", "[2, 3, 16]")),
            ("attend starts", lambda c: c.attend(queries(3)), ("3 tokens for 2 sequences",)),
            ("attend grad", lambda c: c.attend(with_grad(queries(2))), ("q requires grad",)),
            ("attend precision", lambda c: c.attend(queries(2), precision=""), ("precision", "fast", "''")),
            ("attend splits", lambda c: c.attend(queries(2), splits=0), ("splits", "at least 1", "0")),
            ("attend sinks", lambda c: c.attend(queries(2), sink_logits=ramp(3)), ("sink_logits must be [4]", "[3]")),
            (
                "attend too many",
                lambda c: c.attend(queries(200), [0, 199, 200]),
                ("sequence 0 has", "tokens, got 199 queries"),
            ),
            (
                "scoring first",
                lambda c: c.attend(queries(2), None, kv.Scoring(window=4, first=1)),
                ("first, recent or only_uncompressed",),
            ),
            (
                "scoring recent",
                lambda c: c.attend(queries(2), None, kv.Scoring(window=4, recent=1)),
                ("own uncompressed tokens",),
            ),
            (
                "scoring uncompressed",
                lambda c: c.step(queries(2), K2, V2, None, kv.Scoring(window=4, only_uncompressed=True)),
                ("own uncompressed tokens",),
            ),
            ("step q", lambda c: c.step(queries(3), K2, V2), ("as many queries as keys", "3 and 2")),
            ("step q dim", lambda c: c.step(ramp(2, 4, 17), K2, V2), ("[tokens, heads, 16]", "[2, 4, 17]")),
            ("step k", lambda c: c.step(queries(2), ramp(2, 2, 17), V2), ("k must be [tokens, 2, 16]",)),
            ("step starts", lambda c: c.step(queries(2), K2, V2, [0, 2, 1]), ("rise", "[0, 2, 1]")),
            ("step precision", lambda c: c.step(queries(2), K2, V2, precision="x"), ("precision", "'x'")),
            ("step splits", lambda c: c.step(queries(2), K2, V2, splits=-1), ("splits", "-1")),
            ("step sinks", lambda c: c.step(queries(2), K2, V2, sink_logits=ramp(4, 1)), ("[4]", "[4, 1]")),
            (
                "step key_scale",
                lambda c: c.step(queries(2), K2, V2, key_scale=ramp(2, 8)),
                ("key_scale must be [2, 16]", "[2, 8]"),
            ),
            ("step grad", lambda c: c.step(queries(2), with_grad(K2), V2), ("k requires grad",)),
            ("truncate seq", lambda c: c.truncate(2, 0), ("sequences 0 … 1", "got 2")),
            ("truncate negative seq", lambda c: c.truncate(-1, 0), ("sequences 0 … 1", "got -1")),
            ("truncate seq type", lambda c: c.truncate("0", 0), ("sequences 0 … 1", "got '0'")),
            ("truncate long", lambda c: c.truncate(0, 199), ("sequence 0", "0 … ", "got 199")),
            ("truncate negative", lambda c: c.truncate(0, -1), ("sequence 0", "0 … ", "got -1")),
            ("truncate float", lambda c: c.truncate(0, 6.5), ("sequence 0", "got 6.5")),
            ("truncate bool", lambda c: c.truncate(0, True), ("sequence 0", "0 … ", "got True")),
            ("truncate seq bool", lambda c: c.truncate(True, 0), ("sequences 0 … 1", "got True")),
            ("free", lambda c: c.free(7), ("sequences 0 … 1", "got 7")),
            ("fork source", lambda c: c.fork(5, 0), ("sequences 0 … 1", "got 5")),
            ("fork target", lambda c: c.fork(0, 2), ("sequences 0 … 1", "got 2")),
            ("reorder", lambda c: c.reorder([0, 2]), ("sequences 0 … 1", "got 2")),
            ("reorder negative", lambda c: c.reorder(torch.tensor([1, -1])), ("sequences 0 … 1", "got -1")),
            ("reorder float", lambda c: c.reorder(torch.tensor([1.0])), ("index must be whole numbers", "got [1.0]")),
            ("reorder mask", lambda c: c.reorder(torch.tensor([True, False])), ("whole numbers", "[True, False]")),
            ("reorder bools", lambda c: c.reorder([True, False]), ("index must be whole numbers", "[True, False]")),
            ("reorder number", lambda c: c.reorder(1), ("index must be whole numbers", "got 1")),
            ("reorder scalar", lambda c: c.reorder(torch.tensor(1)), ("index must be whole numbers", "got 1")),
            ("reorder square", lambda c: c.reorder(torch.tensor([[1]])), ("index must be whole numbers", "[[1]]")),
            ("scoring", lambda c: c.attend(queries(2), None, {}), ("scoring must be a Scoring", "{}")),
            ("step scoring", lambda c: c.step(queries(2), K2, V2, None, "x"), ("scoring must be a Scoring", "'x'")),
            ("reserve bool", lambda c: c.reserve(True), ("tokens must be 2 whole numbers", "True")),
            ("reserve bools", lambda c: c.reserve([True, 1]), ("tokens must be 2 whole numbers", "True")),
            ("reserve number", lambda c: c.reserve(5.0), ("tokens must be 2 whole numbers", "5.0")),
            ("reserve count", lambda c: c.reserve([1]), ("reserve needs 2 whole numbers", "[1]")),
            ("reserve negative", lambda c: c.reserve(-1), ("at least 0", "-1")),
            ("reserve float", lambda c: c.reserve([1.5, 0]), ("tokens", "1.5")),
            ("positions", lambda c: c.positions(2), ("sequences 0 … 1", "got 2")),
            ("codes", lambda c: c.codes(-1), ("sequences 0 … 1", "got -1")),
            ("decode query", lambda c: c.decode(0, query="x"), ("query", "whole number", "'x'")),
            ("decode query huge", lambda c: c.decode(0, query=10**20), ("query", "2147483647", str(10**20))),
            ("decode", lambda c: c.decode(3), ("sequences 0 … 1", "got 3")),
        )
    ),
    case(
        "codes with uncompressed tokens",
        lambda w: w.uncompressed.append_codes(*codes(2)),
        "codes",
        "uncompressed tokens",
        "vectors",
    ),
    case("codes rows", grow_codes(CK2._replace(data=CK2.data[..., :-1])), "keys data", "[n, kv_heads, 8]", "[2, 2, 7]"),
    case("codes scale", grow_codes(None, CV2._replace(scale=None)), "values scale", "float16 [2, 2]", "none"),
    case("codes heads", grow_codes(kv.encode(ramp(2, 3, 16), FORMAT.key)), "keys must have 2 KV heads", "got 3"),
    case("codes count", grow_codes(None, codes(3)[1]), "keys and values", "equally many", "2 and 3"),
    case("codes ndim", grow_codes(kv.encode(ramp(1, 2, 2, 16), FORMAT.key)), "keys data", "[n, kv_heads, 8]"),
    case("sparse tokens", grow(tokens(2)[0].to_sparse()), "k must be a dense tensor", "sparse_coo"),
    case("no room", grow(*tokens(60), [0, 60, 60]), "pool", "free pages", "of 6", error=CapacityError),
    case("no copy", grow(*tokens(17), [0, 15, 17]), "pool", "free pages", "of 6", error=CapacityError),
    case("no room to reserve", lambda w: w.paged.reserve(30), "pool", "of 6", error=CapacityError),
    case(
        "no room in a step",
        lambda w: w.paged.step(queries(60), *tokens(60), [0, 60, 60]),
        *("pool", "free pages", "of 6"),
        error=CapacityError,
    ),
    case(
        "longer than the table",
        grow(*tokens(14), [0, 14, 14], "limited"),
        *("at most 16 tokens", "got 17"),
        error=CapacityError,
    ),
    case("reserve too long", lambda w: w.limited.reserve([0, 8]), "at most 16", "17", error=CapacityError),
    case(
        "reserve beyond int32",
        lambda w: w.ring.reserve([2**31, 0]),
        *("at most 2147483647 tokens", str(2**31 + 60)),
        error=CapacityError,
    ),
    case("rollback", lambda w: w.ring.truncate(0, 40), "60 tokens", "by 2", "to 40", error=CapacityError),
    case(
        "uncompressed rollback",
        lambda w: w.uncompressed.truncate(0, 20),
        "120 tokens",
        "by 3",
        "to 20",
        error=CapacityError,
    ),
    case(
        "ring reach",
        lambda w: w.ring.attend(queries(20), [0, 20, 20]),
        *("20 queries of sequence 0", "no longer held", "at most 4 queries", "step"),
    ),
    case(
        "uncompressed reach",
        lambda w: w.uncompressed.attend(queries(50), [0, 50, 50]),
        *("50 queries of sequence 0", "no longer held", "at most 16 queries", "step"),
    ),
    case("ring without window", lambda w: w.ring.attend(queries(2), None, kv.Scoring()), "window of 10", "None"),
    case(
        "ring window",
        lambda w: w.ring.attend(queries(2), None, kv.Scoring(window=11)),
        *("keeps a window of 10 and 3 sinks", "window of 11"),
    ),
    case(
        "ring sinks",
        lambda w: w.ring.step(queries(2), K2, V2, None, kv.Scoring(window=10, sinks=4)),
        *("keeps a window of 10 and 3 sinks", "4 sinks"),
    ),
    case(
        "ring not causal",
        lambda w: w.ring.attend(queries(2), None, kv.Scoring(window=4, causal=False)),
        *("ring", "causal"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), CACHES)
def test_refused(world, call, error, words):
    check(world, call, error, *words)


def test_an_append_that_does_not_fit_is_reported_by_the_next_call(world):
    """As in a captured graph: the sequence without room stays, its neighbour is written, the host hears of it once."""
    cache = world.paged
    cache.free(1)
    cache.reserve([0, 0])
    n = sum(page >= 0 for page in cache.page_table.rows[0]) * 8 - 9
    kv.append(cache.pages, *tokens(n + 1), [0, n, n + 1])
    assert cache.pages.lengths.tolist() == [9 + n, 0]
    assert cache.pages.overflow.tolist() == [1]
    calls = (lambda: cache.append(*tokens(2)), lambda: cache.attend(queries(2)), lambda: cache.lengths)
    for call in calls:
        cache.pages.overflow.fill_(1)
        with pytest.raises(CapacityError, match="did not fit its pages and wrote nothing: reserve room"):
            call()
    assert cache.lengths == [9 + n, 0]
    for stored, wanted in zip(cache.codes(0), codes(n), strict=True):
        assert torch.equal(stored.data[9:], wanted.data[:n])


def test_sentences_name_no_tensor_contents(world):
    """An error about a large tensor stays one short sentence."""
    with pytest.raises(InputError) as caught:
        world.paged.append(ramp(2000, KV_HEADS, KEY_DIM), ramp(2000, KV_HEADS, VALUE_DIM + 1))
    assert len(str(caught.value)) < 200
    assert not re.search(r"tensor\(", str(caught.value))


def test_no_grad_accepts_what_grad_mode_refuses(world):
    k, v = tokens(2)
    with torch.no_grad():
        world.contiguous.append(with_grad(k), v)
        out = world.contiguous.attend(with_grad(queries(2))).out
    assert not out.requires_grad
    assert world.contiguous.lengths == [8, 1]
