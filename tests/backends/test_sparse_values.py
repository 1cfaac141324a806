"""A threshold: `values` drops exactly the weights below it, `attend` of the native backend reads no such tile."""

import copy
import math

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.backends import native
from aurakv.storage.uncompressed import Uncompressed

N, DIM = 150, 64


@pytest.mark.parametrize("name", ["k4v4", "k4v16"])
def test_dropped_values_are_not_there(backend, device, name):
    torch.manual_seed(0)
    codec = kv.Format.parse(name, DIM, torch.float32).value
    v = torch.randn(N, 2, DIM)
    v[7] = math.nan  # every row drops it
    v[9, 1] = math.inf  # one row of its head keeps it
    stored = kv.encode(v.to(device), codec, backend="reference")
    weights = torch.rand(3, 4, N) * 1e-4
    weights[:, :, 100:] += 0.01
    weights[:, :, 7] = 0.5e-3
    weights[:, :, 9] = 0.9e-3
    weights[1, 3, 9] = 1e-3  # at the threshold: kept
    weights[2, 0, 30] = math.nan  # never dropped
    clean = torch.where(v.isfinite(), v, 0)
    decoded = kv.decode(kv.encode(clean, codec, backend="reference"), codec, dtype=torch.float64)
    kept = weights.double().masked_fill(weights < 1e-3, 0).view(3, 2, 2, N)
    want = torch.einsum("thgn,nhd->thgd", kept, decoded).flatten(1, 2)
    want[1, 3] = math.nan
    got = ops.values(weights.to(device), stored, codec, threshold=1e-3, backend=backend).cpu()
    assert torch.equal(got.isnan().all(-1), want.isnan().all(-1))
    good = ~want.isnan()
    assert (got[good] - want[good]).norm() < 2e-3 * want[good].norm()


@pytest.mark.parametrize(("dtype", "threshold"), [(torch.bfloat16, 1e-3), (torch.float16, 3e-4)])
def test_weights_of_16_bits_do_not_round_the_threshold(backend, device, dtype, threshold):
    """The numbers of this type next to the threshold, which it does not hold itself."""
    codec = kv.Codec.value(DIM, 4)
    stored = kv.encode(torch.randn(2, 1, DIM, device=device), codec, backend="reference")
    near = torch.tensor(threshold).to(dtype)
    other = torch.nextafter(near, torch.tensor(float(near) < threshold, dtype=dtype))
    low, high = sorted((near, other), key=float)
    assert float(low) < threshold < float(high)
    weights = torch.stack([low, high]).view(1, 1, 2).to(device)
    got = ops.values(weights, stored, codec, threshold=threshold, backend=backend)
    want = ops.values(weights * torch.tensor([0, 1], dtype=dtype, device=device), stored, codec, backend=backend)
    assert torch.equal(got, want)


NATIVE = [name for name in native.backends if kv.why_not(name) is None]


def one_needle(tokens: int, heads: int, at: int, **options: object) -> tuple[kv.KVCache, torch.Tensor]:
    """A cache in which every query gives nearly all its weight to one key."""
    torch.manual_seed(0)
    format = kv.Format(kv.Codec.key(DIM, 4), kv.Codec.value(DIM, 4, dtype=torch.float32))
    cache = kv.KVCache.contiguous(format, 1, 2, tokens, **options)
    q, k, v = torch.randn(1, heads, DIM), torch.randn(tokens, 2, DIM), torch.randn(tokens, 2, DIM)
    k[at] = 5 * q[0].view(2, -1, DIM).sum(1)
    cache.append(k, v)
    return cache, q


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("precision", ["fast", "float32"])
@pytest.mark.parametrize(("heads", "splits"), [(2, None), (8, None), (8, 1), (8, 7)])
def test_attention_does_not_read_what_drops_out(name, precision, heads, splits):
    """Values that would ruin the sum lie in every part of a long sequence: none of them is there with a threshold."""
    cache, q = one_needle(9000, heads, at=4500)
    options = {"splits": splits, "precision": precision, "backend": name}
    plain = kv.attend(q, cache.pages, **options)
    scale = cache.pages.value_parts().scale
    scale[:, :, : 4500 // 64 * 64] = scale[:, :, 4500 // 64 * 64 + 64 :] = 1e30
    ruined = kv.attend(q, cache.pages, **options)
    sparse = kv.attend(q, cache.pages, scoring=kv.Scoring(threshold=1e-4), **options)
    assert (sparse.out - plain.out).abs().max() < 1e-3 < 0.1 < (ruined.out - plain.out).abs().max()
    torch.testing.assert_close(sparse.lse, plain.lse)  # counts every key


@pytest.mark.parametrize("name", NATIVE)
def test_damage_shows_where_it_drops_out(name):
    cache, q = one_needle(300, 4, at=150)
    cache.pages.value_parts().scale[0, 1, 7] = math.nan
    out = kv.attend(q, cache.pages, scoring=kv.Scoring(threshold=1e-3), backend=name).out
    assert out[0, :2].isfinite().all()
    assert out[0, 2:].isnan().all()


@pytest.mark.parametrize("name", NATIVE)
def test_weights_are_those_of_the_whole_call(name):
    """In a step, tokens that are kept uncompressed take weight, too: beside them the others drop out."""
    sparse = kv.Scoring(threshold=1e-4)
    cache, q = one_needle(300, 4, at=0, uncompressed=Uncompressed(first=16), backend=name)
    new = torch.randn(2, 1, 2, DIM)
    plain = copy.deepcopy(cache).step(q, *new)
    cache.pages.value_parts().scale.fill_(1e30)
    assert (cache.step(q, *new, scoring=sparse).out - plain.out).abs().max() < 1e-3
