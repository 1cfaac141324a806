"""What operations on vectors and codes refuse, and with which sentence."""

from __future__ import annotations

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from tests.helpers.refusals import (
    FORMAT,
    HEADS,
    KEY_DIM,
    META,
    UNCOMPRESSED,
    VALUE_DIM,
    case,
    check,
    codes,
    queries,
    ramp,
    tokens,
    with_grad,
)

KEYS, VALUES = codes(3)
NO_HEADS = kv.encode(ramp(3, 0, KEY_DIM), FORMAT.key)
PART = kv.Partial(torch.zeros(3, HEADS, VALUE_DIM), torch.zeros(3, HEADS))


def encoded(**changes: object) -> kv.Codes:
    return KEYS._replace(**changes)


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
    case("offset at 16 bits", lambda w: kv.encode(ramp(3, 2, 16), UNCOMPRESSED.key, ramp(2, 16)), "offset", "16 bits"),
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
        lambda w: kv.decode(kv.Codes(codes(3, UNCOMPRESSED)[0].data, KEYS.scale), UNCOMPRESSED.key),
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
    case("dense ends", lambda w: dense(ends=[3, 3]), "ends must be 1 number ", "[3, 3]"),
    case("dense sinks", lambda w: dense(sink_logits=ramp(2)), "sink_logits must be [4]", "[2]"),
    case("dense scoring", lambda w: dense(scoring={"window": 3}), "scoring must be a Scoring", "'window'"),
    case("dense backend", lambda w: dense(backend="none"), "backend", "reference", "'none'"),
]


@pytest.mark.parametrize(("call", "error", "words"), OPERATIONS)
def test_refused(world, call, error, words):
    check(world, call, error, *words)


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
