"""Every refusal: the type of the error, a sentence with what, what is allowed and what came, and nothing changed."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops, torch_ops
from aurakv.errors import BackendError, CapacityError, InputError
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import poisoned

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 32
FORMAT = kv.Format.parse("k4v3", (KEY_DIM, VALUE_DIM))
RAW = kv.Format.parse("k16v4", (KEY_DIM, VALUE_DIM))
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


@pytest.fixture
def world() -> SimpleNamespace:
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


# formats, codecs, level tables

FORMATS = [
    case("bits", lambda w: kv.Codec(64, 7), "bits", "[2, 3, 4, 5, 6, 8, 16]", "7"),
    case("bits 1", lambda w: kv.Format.parse("k1v4", 64), "bits", "[2, 3, 4, 5, 6, 8, 16]", "1"),
    case("bits 0", lambda w: kv.Codec.value(64, 0), "bits", "0"),
    case("bits float", lambda w: kv.Codec(64, 4.0), "bits", "4.0"),
    case("bits bool", lambda w: kv.Codec(64, True), "bits", "True"),
    case("bits text", lambda w: kv.Codec(64, "4"), "bits", "4"),
    case("dim", lambda w: kv.Codec(100, 4), "head_dim", "m·2^k", "576", "100"),
    case("dim 0", lambda w: kv.Codec(0, 4), "head_dim", "0"),
    case("dim negative", lambda w: kv.Codec(-64, 4), "head_dim", "-64"),
    case("dim 8", lambda w: kv.Format.parse("k4v4", 8), "head_dim", "16", "8"),
    case("dim large", lambda w: kv.Codec(2048, 4), "head_dim", "1024", "2048"),
    case("dim float", lambda w: kv.Codec(64.0, 4), "head_dim", "64.0"),
    case("dim bool", lambda w: kv.Codec(True, 16), "head_dim", "True"),
    case("dim bool in parse", lambda w: kv.Format.parse("k4v4", True), "head_dim", "True"),
    case("dims list", lambda w: kv.Format.parse("k4v4", [64, 64]), "(key dim, value dim)", "[64, 64]"),
    case("seed bool", lambda w: kv.Codec(64, 4, seed=True), "seed", "True"),
    case("codecs", lambda w: kv.Format("k4", "v4"), "key must be a Codec", "'k4'"),
    case("dim 16 bits", lambda w: kv.Codec(0, 16), "head_dim", "1 to 1024", "0"),
    case("dims one", lambda w: kv.Format.parse("k4v4", (64,)), "head_dim", "(key dim, value dim)", "(64,)"),
    case("dims none", lambda w: kv.Format.parse("k4v4", None), "head_dim", "None"),
    case("value dim", lambda w: kv.Format.parse("k4v4", (64, 72)), "head_dim", "72"),
    case("name", lambda w: kv.Format.parse("4bit", 64), "k<bits>v<bits>", "k4:lsq/v4:f32", "'4bit'"),
    case("name none", lambda w: kv.Format.parse(None, 64), "k<bits>v<bits>", "None"),
    case("name empty", lambda w: kv.Format.parse("", 64), "k<bits>v<bits>", "''"),
    case("name order", lambda w: kv.Format.parse("v4k4", 64), "k<bits>v<bits>", "'v4k4'"),
    case("name newline", lambda w: kv.Format.parse("k4v4\n", 64), "k<bits>v<bits>"),
    case("option", lambda w: kv.Format.parse("k4:fast/v4", 64), "option of k4", "lloyd-max", "'fast'"),
    case("option at 16 bits", lambda w: kv.Format.parse("k16:lsq/v4", 64), "option of k16", "bf16", "'lsq'"),
    case("option twice", lambda w: kv.Format.parse("k4:l2:lsq/v4", 64), "k4", "scale twice", "l2:lsq"),
    case("scale", lambda w: kv.Codec(64, 4, scale="max"), "scale", "['l2', 'lsq']", "'max'"),
    case("scale dtype", lambda w: kv.Codec(64, 4, dtype=torch.bfloat16), "f16 or f32", "bf16"),
    case("scale float64", lambda w: kv.Codec(64, 4, dtype=torch.float64), "f16 or f32", "float64"),
    case("vector dtype", lambda w: kv.Codec(64, 16, dtype=torch.float64), "['f32', 'f16', 'bf16']", "float64"),
    case("parse dtype", lambda w: kv.Format.parse("k16v4", 64, dtype=torch.int8), "f32", "int8"),
    case("seed", lambda w: kv.Codec(64, 4, seed=2**64), "seed", f"from 0 to {2**64 - 1}", f"got {2**64}"),
    case("seed negative", lambda w: kv.Codec(64, 4, seed=-1), "seed", "-1"),
    case("seed in name", lambda w: kv.Format.parse(f"k4:seed{2**64}/v4", 64), "seed", str(2**64)),
    case("table", lambda w: kv.Codec(64, 4, table="gauss"), "level table", "minifloat", "'gauss'"),
    case("table width", lambda w: kv.Codec(64, 2, table="minifloat"), "'minifloat'", "[3, 4] bits", "2"),
    case("table int8 at 8", lambda w: kv.Codec(64, 8, table="int8"), "'int8'", "[2, 3, 4, 5, 6] bits", "8"),
    case("levels few", lambda w: kv.Codec(64, 2, table=(0.0, 1.0)), "4 levels", "2 bits", "got 2"),
    case("levels NaN", lambda w: kv.Codec(64, 2, table=(-1.0, 0.0, 1.0, math.nan)), "levels", "finite"),
    case("levels inf", lambda w: kv.Codec(64, 2, table=(-1.0, 0.0, 1.0, math.inf)), "levels", "finite"),
    case("levels huge", lambda w: kv.Codec(64, 2, table=(-1.0, 0.0, 1.0, 1e39)), "levels", "finite float32"),
    case("levels unsorted", lambda w: kv.Codec(64, 2, table=(-1.0, 1.0, 0.0, 2.0)), "levels", "ascending"),
    case("levels in name", lambda w: kv.Format.parse("k2:[-1,0,1,x]/v4", 64), "numbers", "commas", "x]"),
    case("levels count in name", lambda w: kv.Format.parse("k2:[-1,0,1]/v4", 64), "4 levels", "got 3"),
]

# scoring

SCORINGS = [
    case("window 0", lambda w: kv.Scoring(window=0), "window", "at least 1", "0"),
    case("window negative", lambda w: kv.Scoring(window=-3), "window", "at least 1", "-3"),
    case("window float", lambda w: kv.Scoring(window=2.5), "window", "whole", "2.5"),
    case("window NaN", lambda w: kv.Scoring(window=math.nan), "window", "whole", "nan"),
    case("softcap 0", lambda w: kv.Scoring(softcap=0.0), "softcap", "positive", "0.0"),
    case("softcap negative", lambda w: kv.Scoring(softcap=-30.0), "softcap", "positive", "-30"),
    case("softcap NaN", lambda w: kv.Scoring(softcap=math.nan), "softcap", "finite", "nan"),
    case("softcap inf", lambda w: kv.Scoring(softcap=math.inf), "softcap", "finite", "inf"),
    case("scale", lambda w: kv.Scoring(scale=math.inf), "scale", "finite", "inf"),
    case("scale NaN", lambda w: kv.Scoring(scale=math.nan), "scale", "finite", "nan"),
    case("sinks", lambda w: kv.Scoring(window=4, sinks=-1), "sinks", "-1"),
    case("first", lambda w: kv.Scoring(first=-1), "first", "-1"),
    case("recent", lambda w: kv.Scoring(recent=-2), "recent", "-2"),
    case("window bool", lambda w: kv.Scoring(window=True), "window", "whole", "True"),
    case("sinks text", lambda w: kv.Scoring(window=4, sinks="1"), "sinks", "whole", "'1'"),
    case("sinks none", lambda w: kv.Scoring(window=4, sinks=None), "sinks", "whole", "None"),
    case("softcap text", lambda w: kv.Scoring(softcap="5"), "softcap", "finite number", "'5'"),
    case("softcap bool", lambda w: kv.Scoring(softcap=True), "softcap", "finite number", "True"),
    case("scale text", lambda w: kv.Scoring(scale="5"), "scale", "finite number", "'5'"),
    case("scale many", lambda w: kv.Scoring(scale=torch.ones(2)), "scale", "finite number", "a tensor [2]"),
    case("scale huge", lambda w: kv.Scoring(scale=10**400), "scale", "finite number"),
    case("causal", lambda w: kv.Scoring(causal="no"), "causal must be a bool", "'no'"),
    case("causal number", lambda w: kv.Scoring(causal=0), "causal must be a bool", "0"),
    case("only_uncompressed", lambda w: kv.Scoring(only_uncompressed=None), "only_uncompressed must be a bool", "None"),
    case("threshold none", lambda w: kv.Scoring(threshold=None), "threshold", "finite number", "None"),
    case("threshold text", lambda w: kv.Scoring(threshold="0"), "threshold", "finite number", "'0'"),
    case("threshold 1", lambda w: kv.Scoring(threshold=1.0), "threshold", "below 1", "1.0"),
    case("threshold negative", lambda w: kv.Scoring(threshold=-0.1), "threshold", "at least 0", "-0.1"),
    case("threshold NaN", lambda w: kv.Scoring(threshold=math.nan), "threshold", "nan"),
]

# operations on vectors and codes

KEYS, VALUES = codes(3)
NO_HEADS = kv.encode(ramp(3, 0, KEY_DIM), FORMAT.key)
PART = kv.Partial(torch.zeros(3, HEADS, VALUE_DIM), torch.zeros(3, HEADS))


def encoded(**changes: object) -> kv.Codes:
    return KEYS._replace(**changes)


def with_grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


OPERATIONS = [
    case(
        "encode dtype", lambda w: kv.encode(torch.ones(2, 16, dtype=torch.int32), FORMAT.key), "x", "float32", "int32"
    ),
    case("encode shape", lambda w: kv.encode(ramp(3, 2, 17), FORMAT.key), "x", "[..., kv_heads, 16]", "[3, 2, 17]"),
    case("encode 1-d", lambda w: kv.encode(ramp(16), FORMAT.key), "kv_heads", "[16]"),
    case("encode list", lambda w: kv.encode([[1.0] * 16], FORMAT.key), "x", "tensor", "list"),
    case("encode grad", lambda w: kv.encode(with_grad(ramp(2, 16)), FORMAT.key), "x", "requires grad", "no_grad"),
    case(
        "encode backend", lambda w: kv.encode(ramp(2, 16), FORMAT.key, backend="gpu"), "backend", "reference", "'gpu'"
    ),
    case(
        "offset shape",
        lambda w: kv.encode(ramp(3, 2, 16), FORMAT.key, ramp(3, 16)),
        *("offset", "float32 [2, 16]", "[3, 16]"),
    ),
    case(
        "offset dtype",
        lambda w: kv.encode(ramp(3, 2, 16), FORMAT.key, ramp(2, 16).double()),
        *("offset", "float32 [2, 16]", "float64"),
    ),
    case(
        "offset device",
        lambda w: kv.encode(ramp(3, 2, 16), FORMAT.key, ramp(2, 16).to(META)),
        *("offset", "cpu", "meta"),
    ),
    case(
        "offset strides",
        lambda w: kv.encode(ramp(3, 2, 16), FORMAT.key, ramp(16, 2).T),
        *("offset", "contiguous"),
    ),
    case("offset grad", lambda w: kv.encode(ramp(3, 2, 16), FORMAT.key, with_grad(ramp(2, 16))), "offset", "grad"),
    case("offset at 16 bits", lambda w: kv.encode(ramp(3, 2, 16), RAW.key, ramp(2, 16)), "offset", "16 bits"),
    case(
        "decode width",
        lambda w: kv.decode(encoded(data=KEYS.data[..., :-1]), FORMAT.key),
        *("codes data", "uint8 [..., kv_heads, 8]", "[3, 2, 7]"),
    ),
    case(
        "decode dtype of codes",
        lambda w: kv.decode(encoded(data=KEYS.data.int()), FORMAT.key),
        *("uint8", "int32"),
    ),
    case("decode no scale", lambda w: kv.decode(encoded(scale=None), FORMAT.key), "scale", "float16 [3, 2]", "none"),
    case(
        "decode scale dtype",
        lambda w: kv.decode(encoded(scale=KEYS.scale.float()), FORMAT.key),
        *("scale", "float16", "float32"),
    ),
    case(
        "decode scale shape",
        lambda w: kv.decode(encoded(scale=KEYS.scale[:2]), FORMAT.key),
        *("scale", "[3, 2]", "[2, 2]"),
    ),
    case(
        "decode scale device",
        lambda w: kv.decode(encoded(scale=KEYS.scale.to(META)), FORMAT.key),
        *("scale", "cpu", "meta"),
    ),
    case(
        "decode scale at 16 bits",
        lambda w: kv.decode(kv.Codes(codes(3, RAW)[0].data, KEYS.scale), RAW.key),
        *("16 bits", "no scale"),
    ),
    case("decode dtype", lambda w: kv.decode(KEYS, FORMAT.key, dtype=torch.int8), "dtype", "bfloat16", "int8"),
    case(
        "scores heads",
        lambda w: ops.scores(ramp(1, 3, 16), KEYS, FORMAT.key),
        *("q must be", "multiple of 2 KV heads", "[1, 3, 16]"),
    ),
    case("scores no heads", lambda w: ops.scores(ramp(1, 0, 16), KEYS, FORMAT.key), "q must be", "[1, 0, 16]"),
    case("scores dim", lambda w: ops.scores(ramp(1, 4, 32), KEYS, FORMAT.key), "[tokens, heads, 16]", "[1, 4, 32]"),
    case("scores grad", lambda w: ops.scores(with_grad(queries(1)), KEYS, FORMAT.key), "q requires grad"),
    case(
        "scores ndim of keys",
        lambda w: ops.scores(queries(1), kv.encode(ramp(2, 16), FORMAT.key), FORMAT.key),
        *("keys data", "[n, kv_heads, 8]", "[2, 8]"),
    ),
    case(
        "values shape",
        lambda w: ops.values(ramp(1, 4, 5), VALUES, FORMAT.value),
        *("weights must be", "[tokens, heads, 3]", "[1, 4, 5]"),
    ),
    case(
        "values heads", lambda w: ops.values(ramp(1, 3, 3), VALUES, FORMAT.value), "weights", "2 KV heads", "[1, 3, 3]"
    ),
    case(
        "values threshold",
        lambda w: ops.values(ramp(1, 4, 3), VALUES, FORMAT.value, threshold=1.5),
        *("threshold", "below 1", "1.5"),
    ),
    case("values grad", lambda w: ops.values(with_grad(ramp(1, 4, 3)), VALUES, FORMAT.value), "weights requires grad"),
    case("values threshold text", lambda w: ops.values(ramp(1, 4, 3), VALUES, FORMAT.value, threshold="0"), "finite"),
    case("decode tuple", lambda w: kv.decode(tuple(KEYS), FORMAT.key), "codes must be a Codes", "a tuple of tensors"),
    case("encode codec", lambda w: kv.encode(ramp(3, 2, 16), FORMAT), "codec must be a Codec", "Format("),
    case("offset list", lambda w: kv.encode(ramp(3, 2, 16), FORMAT.key, [0.0]), "offset must be a Tensor", "[0.0]"),
    case("scores no KV heads", lambda w: ops.scores(queries(1), NO_HEADS, FORMAT.key), "keys", "at least one KV head"),
    case("values no KV heads", lambda w: ops.values(ramp(1, 4, 3), NO_HEADS, FORMAT.key), "stored", "one KV head"),
    case("merge nothing", lambda w: kv.merge(), "merge", "at least one"),
    case("merge list", lambda w: kv.merge([PART, PART]), "merge", "one by one", "list"),
    case("merge tuples", lambda w: kv.merge(PART, tuple(PART)), "merge", "one by one", "tuple"),
    case("sink list", lambda w: kv.sink([0.0] * 4, PART), "logits must be a Tensor", "[0.0, 0.0"),
    case("sink like", lambda w: kv.sink(ramp(4), PART.lse), "like must be a Partial", "a tensor [3, 4]"),
]


def dense(n: int = 3, m: int = 3, **changes: object) -> None:
    arguments = {"q": queries(n), "k": tokens(m)[0], "v": tokens(m)[1], "starts": [0, n], "key_starts": [0, m]}
    ops.attend_dense(**{**arguments, **changes})


OPERATIONS += [
    case("dense heads", lambda w: dense(q=ramp(3, 3, 16)), "q must be", "2 KV heads", "[3, 3, 16]"),
    case("dense k and v", lambda w: dense(v=ramp(2, 2, 32)), "k and v", "equal tokens and heads", "[2, 2, 32]"),
    case("dense k ndim", lambda w: dense(k=ramp(3, 16)), "k and v", "[tokens, kv_heads, dim]", "[3, 16]"),
    case("dense device", lambda w: dense(v=tokens(3)[1].to(META)), "v must be on cpu", "meta"),
    case("dense grad", lambda w: dense(k=with_grad(tokens(3)[0])), "k requires grad"),
    case("dense starts", lambda w: dense(starts=[0, 2]), "starts must rise from 0 to 3", "[0, 2]"),
    case("dense key_starts", lambda w: dense(key_starts=[0, 4]), "key_starts must rise from 0 to 3", "[0, 4]"),
    case("dense no key_starts", lambda w: dense(m=5, key_starts=None), "key_starts must rise from 0 to 5", "[0, 3]"),
    case("dense ends", lambda w: dense(ends=[3, 3]), "ends must be 1 numbers", "[3, 3]"),
    case("dense sinks", lambda w: dense(sink_logits=ramp(2)), "sink_logits must be [4]", "[2]"),
    case("dense scoring", lambda w: dense(scoring={"window": 3}), "scoring must be a Scoring", "'window'"),
    case("dense backend", lambda w: dense(backend="none"), "backend", "reference", "'none'"),
]

# operations on pages


def attend(w: SimpleNamespace, n: int = 2, **changes: object) -> kv.Partial:
    return kv.attend(**{"q": queries(n), "pages": w.paged.pages, **changes})


PAGES = [
    case("q ndim", lambda w: attend(w, q=ramp(2, 64)), "q must be", "[tokens, heads, 16]", "[2, 64]"),
    case("q heads", lambda w: attend(w, q=ramp(2, 5, 16)), "multiple of 2 KV heads", "[2, 5, 16]"),
    case("q dim", lambda w: attend(w, q=ramp(2, 4, 32)), "[tokens, heads, 16]", "[2, 4, 32]"),
    case("q dtype", lambda w: attend(w, q=queries(2).long()), "q must be float32", "int64"),
    case("q device", lambda w: attend(w, q=queries(2).to(META)), "q must be on cpu", "meta"),
    case("q grad", lambda w: attend(w, q=with_grad(queries(2))), "q requires grad", "q.detach()"),
    case("q none", lambda w: attend(w, q=None), "q must be a tensor", "NoneType"),
    case("no starts", lambda w: attend(w, 3), "3 tokens for 2 sequences need starts"),
    case("starts short", lambda w: attend(w, starts=[0, 2]), "starts", "3 numbers", "[0, 2]"),
    case("starts end", lambda w: attend(w, starts=[0, 1, 1]), "from 0 to 2 tokens", "[0, 1, 1]"),
    case("starts begin", lambda w: attend(w, starts=[1, 1, 2]), "from 0 to 2 tokens", "[1, 1, 2]"),
    case("starts falling", lambda w: attend(w, starts=[0, 3, 2]), "rise", "[0, 3, 2]"),
    case("starts tensor", lambda w: attend(w, starts=torch.tensor([0, 5, 2])), "rise", "[0, 5, 2]"),
    case("starts dtype", lambda w: attend(w, starts=torch.tensor([0.0, 1.0, 2.0])), "starts must be int32", "float32"),
    case("starts shape", lambda w: attend(w, starts=torch.tensor([[0, 1, 2]])), "[3]", "[1, 3]"),
    case("starts device", lambda w: attend(w, starts=torch.zeros(3, dtype=torch.int32, device=META)), "cpu", "meta"),
    case("ends count", lambda w: attend(w, ends=[1]), "ends must be 2 numbers", "[1]"),
    case("ends float", lambda w: attend(w, ends=[1.5, 2]), "ends must be 2 whole numbers", "1.5"),
    case("ends shape", lambda w: attend(w, ends=torch.tensor([1])), "ends must be int32 or int64 [2]", "[1]"),
    case("ends dtype", lambda w: attend(w, ends=torch.tensor([1.0, 2.0])), "ends", "int32", "float32"),
    case("ends negative", lambda w: attend(w, ends=[-1, 2]), "ends", "0", "-1"),
    case("ends huge", lambda w: attend(w, ends=[2**40, 2]), "ends", str(2**40)),
    case("ends huge tensor", lambda w: attend(w, ends=torch.tensor([2**32 + 5, 2])), "ends", str(2**32 + 5)),
    case("sinks shape", lambda w: attend(w, sink_logits=ramp(2)), "sink_logits must be [4]", "[2]"),
    case("sinks dtype", lambda w: attend(w, sink_logits=torch.ones(4).int()), "sink_logits", "float32", "int32"),
    case("sinks device", lambda w: attend(w, sink_logits=ramp(4).to(META)), "sink_logits", "cpu", "meta"),
    case("sinks grad", lambda w: attend(w, sink_logits=with_grad(ramp(4))), "sink_logits requires grad"),
    case("precision that is long", lambda w: attend(w, precision="half" * 9999), "precision", "'halfhalf", "…"),
    case("starts that are many", lambda w: attend(w, starts=[0] * 9999), "starts must rise", "[0, 0, 0", "…"),
    case("sparse queries", lambda w: w.paged.attend(queries(2).to_sparse()), "q must be a dense tensor", "sparse_coo"),
    case("precision", lambda w: attend(w, precision="half"), "precision", "['fast', 'float32']", "'half'"),
    case("splits 0", lambda w: attend(w, splits=0), "splits", "at least 1", "0"),
    case("splits negative", lambda w: attend(w, splits=-4), "splits", "-4"),
    case("splits float", lambda w: attend(w, splits=1.5), "splits", "1.5"),
    case("workspace dtype", lambda w: attend(w, workspace=ramp(8)), "workspace", "uint8", "float32"),
    case(
        "workspace device",
        lambda w: attend(w, workspace=torch.zeros(8, dtype=torch.uint8, device=META)),
        *("workspace", "cpu", "meta"),
    ),
    case(
        "workspace strides",
        lambda w: attend(w, workspace=torch.zeros(8, dtype=torch.uint8)[::2]),
        *("workspace", "contiguous"),
    ),
    case("scoring", lambda w: attend(w, scoring={}), "scoring must be a Scoring", "{}"),
    case("starts bool", lambda w: attend(w, starts=[False, True, 2]), "starts must be 3 whole numbers", "True"),
    case("ends bool", lambda w: attend(w, ends=[True, 2]), "ends must be 2 whole numbers", "True"),
    case("splits bool", lambda w: attend(w, splits=True), "splits", "True"),
    case("backend", lambda w: attend(w, backend="fast"), "backend", "reference", "'fast'"),
    case("append backend", lambda w: kv.append(w.ring.pages, *tokens(2), backend="?"), "backend", "reference", "'?'"),
    case("append heads", lambda w: kv.append(w.ring.pages, ramp(2, 3, 16), tokens(2)[1]), "k must be [tokens, 2, 16]"),
    case("append starts", lambda w: kv.append(w.ring.pages, *tokens(2), [0, 0, 1]), "from 0 to 2 tokens", "[0, 0, 1]"),
    case("append codes", lambda w: ops.append_codes(w.ring.pages, *codes(2), [0, 1]), "3 numbers", "[0, 1]"),
    case(
        "compiled starts",
        lambda w: torch_ops.append(w.ring.pages, *tokens(2), [0, 1, 2], None),
        *("torch.compile", "starts must be a tensor", "list"),
    ),
    case(
        "compiled ends",
        lambda w: torch_ops.attend(
            queries(2), w.ring.pages, None, kv.Scoring(), [1, 2], None, None, "fast", None, False, None
        ),
        *("torch.compile", "ends must be a tensor", "list"),
    ),
]

# caches


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

# making pools and caches


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
    case("offset at 16 bits", make_pool(format=RAW, key_offset=ramp(2, 16)), "key_offset", "16 bits"),
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
    case("uncompressed number", make_contiguous(uncompressed=4), "uncompressed must be an Uncompressed", "got 4"),
    case("uncompressed tuple", make_ring(uncompressed=(1, 1)), "uncompressed must be an Uncompressed", "(1, 1)"),
    case(
        "uncompressed bool",
        lambda w: kv.KVCache.paged(w.pool, 1, uncompressed=Uncompressed(True)),
        "first",
        "whole number",
        "True",
    ),
    case("why_not", lambda w: kv.why_not("gpu"), "backend", "reference", "'gpu'"),
    case("why_not format", lambda w: kv.why_not("native", "k99v99"), "format must be a Format", "'k99v99'"),
    case("table kind", lambda w: kv.Codec.key(64, 2, table=5), "level table", "lloyd-max", "5"),
    case("levels kind", lambda w: kv.Codec.key(64, 2, table=["a"] * 4), "level table", "numbers", "'a'"),
    case("tables of a width", lambda w: kv.Format.parse("k8:int/v8", 64), "option of k8", "poly7", "'int'"),
    case("register", lambda w: backends.register(SimpleNamespace(name="reference")), "'reference' is taken"),
]

ALL = [*FORMATS, *SCORINGS, *OPERATIONS, *PAGES, *CACHES, *MAKING]


@pytest.mark.parametrize(("call", "error", "words"), ALL)
def test_refused(world, call, error, words):
    check(world, call, error, *words)


def test_a_backend_that_cannot_run_is_not_replaced(world, monkeypatch):
    monkeypatch.setattr(backends, "_registered", {})
    name = "cannot"
    backends.register(SimpleNamespace(name=name, why_not=lambda format, device: f"{format} is not for it"))
    calls = (
        lambda w: kv.attend(queries(2), w.paged.pages, backend=name),
        lambda w: kv.append(w.contiguous.pages, *tokens(2), backend=name),
        lambda w: kv.KVCache.paged(w.pool, 1, backend=name),
    )
    for call in calls:
        check(world, call, BackendError, "'cannot'", "k4v3", "cpu", "is not for it")


def test_a_workspace_must_be_large_enough(world, monkeypatch):
    """The reference needs none, so this asks for a backend that does."""
    monkeypatch.setattr(backends, "_registered", {})
    reference = backends._load("reference")
    needy = SimpleNamespace(**{name: getattr(reference, name) for name in dir(reference) if name[0] != "_"})
    needy.name, needy.workspace_bytes = "needy", lambda pages, tokens, heads, splits: 1000 * tokens
    backends.register(needy)
    assert ops.attend_workspace(world.paged.pages, 2, HEADS, backend="needy") == 2000

    def call(w, size):
        return attend(w, workspace=torch.empty(size, dtype=torch.uint8), backend="needy")

    check(world, lambda w: call(w, 1999), InputError, "workspace", "at least 2000 bytes", "with 1999")
    assert call(world, 2000).out.isfinite().all()


# pages from outside


def description(**changes: object) -> kv.Pages:
    """Pages of three sequences, right but for the changes."""
    right = {
        "format": FORMAT,
        "page_size": 8,
        "data": torch.zeros(4, KV_HEADS, FORMAT.layout(8).bytes, dtype=torch.uint8),
        "table": torch.tensor([[0, 1], [2, -1], [-1, -1]], dtype=torch.int32),
        "lengths": torch.tensor([16, 3, 0], dtype=torch.int32),
        "overflow": torch.zeros(1, dtype=torch.int32),
    }
    return kv.Pages(**{**right, **changes})


def integers(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


SIZE = FORMAT.layout(8).bytes
MISALIGNED = torch.zeros(4 * KV_HEADS * SIZE + 1, dtype=torch.uint8)[1:].view(4, KV_HEADS, SIZE)
DESCRIPTIONS = [
    ("page size", {"page_size": 0}, ("page_size", "positive", "0")),
    ("page size fits", {"page_size": 16}, ("16 tokens a page", "uint8 [pages, kv_heads,", f"[4, 2, {SIZE}]")),
    ("data dtype", {"data": torch.zeros(4, KV_HEADS, SIZE)}, ("uint8", "float32")),
    ("data ndim", {"data": torch.zeros(4, KV_HEADS * SIZE, dtype=torch.uint8)}, ("[pages, kv_heads,", "[4, ")),
    ("data strides", {"data": torch.zeros(4, KV_HEADS, 2 * SIZE, dtype=torch.uint8)[..., ::2]}, ("contiguous",)),
    ("data alignment", {"data": MISALIGNED}, ("aligned to 16 bytes",)),
    ("table dtype", {"table": torch.zeros(3, 2, dtype=torch.int64)}, ("table", "int32", "int64")),
    ("table ndim", {"table": integers(0, 1, 2)}, ("table", "2 dimensions", "[3]")),
    ("table strides", {"table": integers([0, 2, -1], [1, -1, -1]).T}, ("table", "contiguous")),
    ("table device", {"table": torch.zeros(3, 2, dtype=torch.int32, device=META)}, ("table must be on cpu", "meta")),
    ("lengths dtype", {"lengths": torch.zeros(3)}, ("lengths", "int32", "float32")),
    ("lengths count", {"lengths": integers(0, 0)}, ("3 table rows need 3 lengths",)),
    ("overflow count", {"overflow": integers(0, 0)}, ("1 overflow flag",)),
    ("pinned", {"pinned": 3}, ("pinned", "width 2", "3")),
    ("pinned negative", {"pinned": -1}, ("pinned", "-1")),
    ("pinned ring", {"pinned": 2, "ring": True}, ("pinned", "width 2", "2")),
    ("offset", {"key_offset": ramp(2, 17)}, ("key_offset", "[2, 16]", "[2, 17]")),
    ("length negative", {"lengths": integers(16, -1, 0)}, ("sequence 1", "from 0 to 16", "-1")),
    ("length large", {"lengths": integers(16, 3, 17)}, ("sequence 2", "from 0 to 16", "17")),
    ("length lowest", {"lengths": integers(-(2**31), 3, 0)}, ("sequence 0", str(-(2**31)))),
    ("length highest", {"lengths": integers(2**31 - 1, 3, 0)}, ("sequence 0", str(2**31 - 1))),
    ("page missing", {"lengths": integers(16, 9, 0)}, ("table of sequence 1", "0 … 3")),
    ("page negative", {"table": integers([0, 1], [-2, -1], [-1, -1])}, ("table of sequence 1", "0 … 3")),
    ("page large", {"table": integers([0, 4], [2, -1], [-1, -1])}, ("table of sequence 0", "0 … 3")),
    ("page unused large", {"table": integers([0, 1], [2, -1], [-1, 9])}, ("sequence 2", "0 … 3")),
    ("page unused negative", {"table": integers([0, 1], [2, -7], [-1, -1])}, ("sequence 1", "0 … 3")),
    ("ring page missing", {"ring": True, "lengths": integers(99, 99, 0)}, ("table of sequence 1", "0 … 3")),
    ("ring longest", {"ring": True, "lengths": integers(99, 2**31 - 1, 0)}, ("table of sequence 1", "0 … 3")),
    ("offset NaN", {"value_offset": torch.full((2, 32), math.nan)}, ("value_offset", "finite")),
]


@pytest.mark.parametrize(("changes", "words"), [pytest.param(c, w, id=i) for i, c, w in DESCRIPTIONS])
def test_pages_from_outside(world, changes, words):
    """Refused by check or check_values, and by attend and append before they touch anything."""
    pages = description(**changes)

    def look(_: SimpleNamespace) -> None:
        pages.check()
        pages.check_values()

    window = kv.Scoring(window=8) if pages.ring else kv.Scoring()
    before = [x.clone() for x in (pages.data, pages.table, pages.lengths, pages.overflow)]
    for call in (
        look,
        lambda w: kv.attend(queries(3), pages, None, window),
        lambda w: kv.append(pages, *tokens(3)),
        lambda w: ops.append_codes(pages, *codes(3)),
    ):
        check(world, call, InputError, *words)
    for old, new in zip(before, (pages.data, pages.table, pages.lengths, pages.overflow), strict=True):
        assert old.device.type == "meta" or torch.equal(old, new)


def test_right_pages_pass():
    pages = description()
    pages.check()
    pages.check_values()
    dataclasses.replace(pages, ring=True, lengths=integers(99, 3, 0)).check_values()
    kv.append(pages, *tokens(1), [0, 0, 1, 1])
    assert pages.lengths.tolist() == [16, 4, 0]


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


def test_other_numbers_are_plain_ones_inside():
    scoring = kv.Scoring(scale=np.float32(0.5), softcap=torch.tensor(30.0), threshold=0)
    assert scoring == kv.Scoring(scale=0.5, softcap=30.0)
    assert {type(x) for x in (scoring.scale, scoring.softcap, scoring.threshold)} == {float}


@pytest.mark.parametrize("name", ["k4v3", "k8v5", "k16v16"])
@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (2, 0, 2), (0,)])
def test_no_vectors_make_no_codes(name, shape):
    """Also in dimensions where a backend could not tell how many there are."""
    codec = kv.Format.parse(name, KEY_DIM).key
    stored = kv.encode(ramp(*shape, KEY_DIM), codec)
    assert stored.data.shape == (*shape, codec.row_bytes)
    assert (stored.scale is None) == (not codec.coded)
    decoded = kv.decode(stored, codec, dtype=torch.float16)
    assert decoded.shape == (*shape, KEY_DIM)
    assert decoded.dtype == torch.float16
    for backend in ("reference", None):
        none = kv.encode(ramp(0, 2, KEY_DIM), codec, backend=backend)
        assert ops.scores(queries(3), none, codec, backend=backend).shape == (3, HEADS, 0)
        summed = ops.values(torch.zeros(3, HEADS, 0), none, codec, backend=backend)
        assert torch.equal(summed, torch.zeros(3, HEADS, KEY_DIM))


def test_a_file_is_not_blamed_for_a_backend(world, tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    kv.save(world.ring, path, torch.tensor([1, 0]))
    assert kv.load(path).lengths == world.ring.lengths[::-1]
    check(world, lambda w: kv.load(path, backend="foo"), InputError, "backend must be one of", "'foo'")
    check(world, lambda w: kv.load(tmp_path / "none", backend="foo"), InputError, "backend", "'foo'")
    check(world, lambda w: kv.save(w.ring, path, torch.tensor([True, False])), InputError, "seqs", "whole numbers")
    check(world, lambda w: kv.save(w.ring, path, 1), InputError, "seqs must be whole numbers", "got 1")
    check(world, lambda w: kv.save("cache", path), InputError, "cache must be a KVCache", "'cache'")
    monkeypatch.setattr(backends, "_registered", {})
    backends.register(SimpleNamespace(name="cannot", why_not=lambda format, device: None if format is None else "no"))
    check(world, lambda w: kv.load(path, backend="cannot"), BackendError, "'cannot' cannot run k4v3", "cpu", "no")
