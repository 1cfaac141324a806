"""values(weights, threshold) drops exactly the weights below it, whether it reads their values or not."""

import math

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops

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
