"""Fitted codes: against a plain numpy version of the definition in docs/format.md, and what they are good for."""

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.calibration.policy import LayerPolicy
from aurakv.errors import InputError
from aurakv.format import fit as fitting
from aurakv.format.codec import Codec
from aurakv.format.packing import unpack
from aurakv.storage.cache import KVCache

FITTING = [
    name for name in ("native", "native-avx2", "native-generic", "reference") if backends.why_not(name) is None
]  # whose encoders fit


def weights(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(heads, dim, generator=torch.Generator().manual_seed(seed)) ** 4 + 0.01


def vectors(count: int, heads: int, dim: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed))


def by_definition(x: np.ndarray, codec: Codec, weight: np.ndarray, at_once: int = 1) -> tuple[np.ndarray, float, float]:
    """Codes and scale of one vector, and how well they fit: each coordinate is rounded to where the cost of all
    errors so far is least if those after it could still be anything. Of at_once neighbours none knows the others'
    errors, nor what two of them cost together."""
    dim = codec.dim
    rotation = codec.rotate(torch.eye(dim, dtype=torch.float64)).numpy().T
    weight = weight / weight.mean() + 1e-6
    cost = rotation @ np.diag(weight) @ rotation.T
    wanted, alone = (
        np.zeros((dim, dim)),
        np.zeros(dim),
    )  # the best errors of neighbours for those before; what one costs
    for i in range(0, dim, at_once):
        done, now, rest = slice(0, i), slice(i, i + at_once), slice(i + at_once, dim)
        left = cost[: i + at_once, : i + at_once]
        if (
            i + at_once < dim
        ):  # the rest makes up for errors as far as it can: what remains is quadratic in those so far
            left = left - left_over(cost, rest)
        wanted[now, done] = -np.linalg.solve(left[now, now], left[now, done])
        alone[now] = np.diag(left)[now]
    apart = np.eye(dim) - wanted
    cost = apart.T @ np.diag(alone) @ apart
    levels = np.array(codec.levels)
    bounds = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)
    y = rotation @ x
    rms, best = np.sqrt((y**2).mean()), None
    for scale in fitting.SCALES:
        target, chosen = y / (scale * rms), np.zeros(dim)
        for i in range(dim):
            before = slice(0, i - i % at_once)
            aim = target[i] - wanted[i, before] @ (target - chosen)[before]
            chosen[i] = levels[np.searchsorted(bounds, aim, side="left")]
        fits = (y @ cost @ chosen) ** 2 / (chosen @ cost @ chosen)
        if best is None or fits > best[1]:
            best = chosen, fits
    chosen, fits = best
    own, mixed = y @ cost @ y, y @ cost @ chosen
    return np.searchsorted(levels, chosen), float(own / mixed), fits / own  # its part along y is y itself


def left_over(cost: np.ndarray, rest: slice) -> np.ndarray:
    """What the cost of errors falls by when those of the rest make up for them."""
    return cost[: rest.start, rest] @ np.linalg.solve(cost[rest, rest], cost[rest, : rest.start])


@pytest.mark.parametrize("at_once", [1, fitting.AT_ONCE])
@pytest.mark.parametrize("encoder", FITTING)
@pytest.mark.parametrize(("dim", "bits", "scale"), [(16, 3, "l2"), (32, 4, "lsq"), (48, 2, "l2"), (32, 6, "l2")])
def test_as_defined(encoder, dim, bits, scale, at_once):
    codec = Codec.key(dim, bits, scale=scale, dtype=torch.float32)
    weight, x = weights(2, dim), vectors(6, 2, dim)
    codes = kv.encode(x, codec, fit=fitting.fit(codec, weight, at_once > 1), backend=encoder)
    found = unpack(codes.data, bits)
    same = 0
    for token in range(6):
        for head in range(2):
            vector, costs = x[token, head].double().numpy(), weight[head].double().numpy()
            expected, stored, _ = by_definition(vector, codec, costs, at_once)
            if np.array_equal(found[token, head].numpy(), expected):
                same += 1
                assert float(codes.scale[token, head]) == pytest.approx(stored, rel=2e-3)
    assert same >= 11  # a fit in float16 may turn a code near a boundary, and then those after it


@pytest.mark.parametrize("encoder", [name for name in FITTING if name != "reference"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_backends_agree(encoder, bits):
    for dim, side in ((64, Codec.key), (80, Codec.value), (128, Codec.key)):
        codec = side(dim, bits)
        x, offset = vectors(40, 3, dim), vectors(1, 3, dim, 5)[0]
        given = weights(3, dim)
        for fit in (fitting.fit(codec, given), fitting.fit(codec, given, at_once=True), fitting.equal(3)):
            mine = kv.encode(x, codec, offset, fit=fit, backend=encoder)
            theirs = kv.encode(x, codec, offset, fit=fit, backend="reference")
            same = (mine.data == theirs.data).all(-1)
            assert same.float().mean() > (0.8 if bits == 8 else 0.97)  # at 8 bits several scales fit alike
            both = [kv.decode(codes, codec, offset) - x for codes in (mine, theirs)]
            assert both[0].square().sum() == pytest.approx(float(both[1].square().sum()), rel=0.02)


@pytest.mark.parametrize("encoder", FITTING)
def test_errors_go_where_they_cost_little(encoder):
    codec, weight, x = Codec.key(64, 3), weights(3, 64), vectors(100, 3, 64)
    error = {}
    fits = {"nearest": None, "equal": fitting.equal(3), "fit": fitting.fit(codec, weight)}
    fits["at once"] = fitting.fit(codec, weight, at_once=True)
    for name, fit in fits.items():
        difference = kv.decode(kv.encode(x, codec, fit=fit, backend=encoder), codec) - x
        error[name] = float((difference.square() * weight).mean()), float(difference.square().mean())
    assert error["fit"][0] < 0.5 * error["nearest"][0]
    assert error["fit"][0] < error["at once"][0] < 0.7 * error["nearest"][0]
    assert error["equal"][1] < 0.95 * error["nearest"][1]
    assert error["fit"][1] > error["nearest"][1]  # the other channels pay for it


@pytest.mark.parametrize("encoder", FITTING)
@pytest.mark.parametrize("mode", ["l2", "lsq"])
def test_no_error_along_a_vector(encoder, mode):
    codec, weight, x = Codec.value(64, 2, scale=mode, dtype=torch.float32), weights(3, 64), vectors(50, 3, 64)
    for fit, cost in ((fitting.equal(3), torch.ones(3, 64)), (fitting.fit(codec, weight), weight)):
        error = kv.decode(kv.encode(x, codec, fit=fit, backend=encoder), codec) - x
        along = (error * cost * x).sum(-1) / (x * cost * x).sum(-1)
        assert along.abs().max() < 2e-3  # a fit is rounded to float16
        assert (error * cost * error).sum() > 0.01 * (x * cost * x).sum()  # there are errors


@pytest.mark.parametrize("encoder", FITTING)
def test_vectors_that_levels_hardly_follow_do_not_explode(encoder):
    codec = Codec(64, 2, table=(1.0, 1.01, 1.02, 1.03), scale="lsq", dtype=torch.float32)
    x = vectors(50, 2, 64)
    near = kv.decode(kv.encode(x, codec, backend=encoder), codec)  # the nearest multiple: almost nothing is alike
    fitted = kv.decode(kv.encode(x, codec, fit=fitting.equal(2), backend=encoder), codec)
    assert bool((near.norm(dim=-1) < 0.5 * x.norm(dim=-1)).all())
    assert bool((fitted.norm(dim=-1) < 2.2 * near.norm(dim=-1) + 0.1).all())


@pytest.mark.parametrize("encoder", FITTING)
def test_how_tokens_are_cut_changes_nothing(encoder):
    fmt, count = kv.Format.parse("k3v4", 64), 37
    k, v = vectors(count, 3, 64), vectors(count, 3, 64, 2)
    fits = LayerPolicy("k3v4", key_weight=weights(3, 64)).fits(fmt, 3, "cpu")
    caches = []
    for pieces in ([count], [1] * count, [5, 16, 1, 15]):
        cache = KVCache.contiguous(fmt, 1, 3, key_fit=fits[0], value_fit=fits[1], backend=encoder)
        at = 0
        for size in pieces:
            cache.append(k[at : at + size], v[at : at + size])
            at += size
        caches.append(cache.codes(0))
    for other in caches[1:]:
        for mine, theirs in zip(caches[0], other, strict=True):
            assert torch.equal(mine.data, theirs.data)
            assert torch.equal(mine.scale, theirs.scale)


@pytest.mark.parametrize("encoder", FITTING)
def test_zero_damaged_and_large_vectors(encoder):
    codec = Codec.key(64, 4)
    x = vectors(6, 2, 64)
    x[0], x[1, 0, 3], x[2, 1, 5], x[3] = 0, torch.nan, torch.inf, 1e30
    codes = kv.encode(x, codec, fit=fitting.fit(codec, weights(2, 64)), backend=encoder)
    assert bool((codes.scale[0] == 0).all())
    assert codes.scale[1].isnan().tolist() == [True, False]
    assert codes.scale[2].isnan().tolist() == [False, True]
    assert bool((codes.scale[3] == torch.finfo(torch.float16).max).all())
    assert bool(codes.scale[4:].isfinite().all())


def test_a_file_keeps_how_codes_are_fitted(tmp_path):
    pytest.importorskip("safetensors")
    fmt = kv.Format.parse("k3v3", 64)
    key_fit, value_fit = LayerPolicy("k3v3", key_weight=weights(2, 64)).fits(fmt, 2, "cpu")
    cache = KVCache.contiguous(fmt, 1, 2, key_fit=key_fit, value_fit=value_fit)
    k, v = vectors(20, 2, 64), vectors(20, 2, 64, 2)
    cache.append(k[:12], v[:12])
    kv.save(cache, tmp_path / "cache.safetensors")
    loaded = kv.load(tmp_path / "cache.safetensors")
    assert loaded.bytes_held >= key_fit.nbytes
    for each in (cache, loaded):
        each.append(k[12:], v[12:])
    for mine, theirs in zip(cache.codes(0), loaded.codes(0), strict=True):
        assert torch.equal(mine.data, theirs.data)


def test_wrong_fits_are_refused():
    fmt = kv.Format.parse("k4v16", 64)
    good = fitting.fit(fmt.key, weights(2, 64))
    for wrong in (good.float(), good[:1], good[:, :-1], good.T):
        with pytest.raises(InputError, match="key_fit must be"):
            KVCache.contiguous(fmt, 1, 2, key_fit=wrong)
    with pytest.raises(InputError, match="value_fit is made by"):
        KVCache.contiguous(fmt, 1, 2, value_fit=good)
    for bad in (-weights(2, 64), weights(2, 32), torch.full((2, 64), torch.nan), torch.zeros(2, 64)):
        with pytest.raises(InputError, match="weights must be"):
            fitting.fit(fmt.key, bad)
