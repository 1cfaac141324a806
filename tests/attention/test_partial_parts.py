"""Partial results as split kernels of others have them: unnormalised output, maximum, sum."""

import math

import pytest
import torch

import aurakv as kv
from aurakv.errors import InputError


def split(scores, values, base):
    """(o, m, l) of scores [heads, n] and values [n, dim], as a kernel with this base of exponentials keeps them."""
    scores = scores / math.log(base)
    m = scores.amax(-1)
    weight = base ** (scores - m[:, None])
    return weight @ values, m, weight.sum(-1)


@pytest.mark.parametrize("base", [math.e, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_splits_of_others(base, dtype):
    torch.manual_seed(0)
    scores, values = 30 * torch.randn(4, 90, dtype=torch.float64), torch.randn(90, 16, dtype=torch.float64)
    pieces = [
        kv.Partial.of(*(x.to(dtype)[None] for x in split(scores[:, a:b], values[a:b], base)), base=base)
        for a, b in ((0, 20), (20, 21), (21, 90))
    ]
    part = kv.merge(*pieces)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    want = scores.softmax(-1) @ values
    assert (part.out[0] - want).norm() < tolerance * want.norm()
    assert torch.allclose(part.lse[0].double(), scores.logsumexp(-1), rtol=tolerance)


@pytest.mark.parametrize("base", [math.e, 2])
def test_there_and_back(base):
    lse = torch.tensor([[3.0, -200.0, -math.inf, 88.0]])
    part = kv.Partial(torch.randn(1, 4, 8).masked_fill(torch.isneginf(lse)[..., None], 0), lse)
    o, m, l = part.parts(base=base)  # noqa: E741
    assert l.tolist() == [[1, 1, 0, 1]]
    assert torch.allclose(torch.tensor(base) ** m[0, :1], lse[0, :1].exp(), rtol=1e-5)
    back = kv.Partial.of(o, m, l, base=base)
    assert torch.allclose(back.out, part.out)
    assert torch.allclose(back.lse, part.lse)


def test_nothing_visible():
    """Whatever an empty split left in its output and maximum."""
    o, m, l = torch.full((1, 2, 4), math.nan), torch.tensor([[-1e30, -math.inf]]), torch.zeros(1, 2)  # noqa: E741
    part = kv.Partial.of(o, m, l)
    assert torch.equal(part.out, torch.zeros(1, 2, 4))
    assert torch.equal(part.lse, torch.full((1, 2), -math.inf))


def test_half_precision_is_refused():
    out, lse = torch.randn(1, 2, 4), torch.randn(1, 2)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(InputError, match=f"lse of a partial result must be float32 or float64, got {dtype}"):
            kv.merge(kv.Partial(out, lse), kv.Partial(out, lse.to(dtype)))
        with pytest.raises(InputError, match=r"m must be float32 or float64 \[1, 2\] for o \[1, 2, 4\]"):
            kv.Partial.of(out, lse.to(dtype), lse)
    half = kv.Partial.of(out.bfloat16(), lse, lse.exp())  # an output in half precision is fine
    assert half.out.dtype == torch.bfloat16
    assert half.lse.dtype == torch.float32


def test_wrong_input():
    out, lse = torch.randn(1, 2, 4), torch.randn(1, 2)
    with pytest.raises(InputError, match="l must be float32 or float64"):
        kv.Partial.of(out, lse, lse[:, :1])
    with pytest.raises(InputError, match="base must be e or 2, got 10"):
        kv.Partial.of(out, lse, lse, base=10)
    with pytest.raises(InputError, match="m must be a Tensor, got 3"):
        kv.Partial.of(out, 3, lse)
    with pytest.raises(InputError, match="l must be on cpu like o, got meta"):
        kv.Partial.of(out, lse, lse.to("meta"))
    with pytest.raises(InputError, match="o must hold floating-point numbers"):
        kv.Partial.of(out.int(), lse, lse)
