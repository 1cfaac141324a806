"""A codec names its signs: a seed's, plain, given ones, or none at all because the caller rotates."""

import dataclasses

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.errors import InputError
from aurakv.format.rotation import signs as seeded_signs

from ..storage.legacy_oracle import walsh_hadamard

GIVEN = [1, -1, -1, 1] + [1] * 11 + [-1] + [-1, 1] * 24  # of 64


def codecs(dim=64, **options):
    given = (GIVEN * 8)[:dim]
    return [kv.Codec(dim, 4, signs=signs, **options) for signs in ("plain", given, "unrotated")]


def relative(got, want):
    got, want = got.cpu(), want.cpu()  # an Apple GPU has no float64
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_names():
    plain, given, unrotated = codecs()
    assert (plain.name, unrotated.name) == ("4:lloyd-max:l2:f16:plain", "4:lloyd-max:l2:f16:unrotated")
    assert given.name == "4:lloyd-max:l2:f16:signs6001aaaaaaaaaaaa"
    for name in ("k4:plain/v4:plain", "k4:signs6001aaaaaaaaaaaa/v4", "k2:f32:unrotated/v16", "k4v3:plain"):
        format = kv.Format.parse(name, 64)
        assert kv.Format.parse(format.name, 64) == format
        assert kv.Format.parse(format.full_name, 64) == format
    assert kv.Format.parse("k4:plain/v4:plain", 64).name == "k4:plain/v4:plain"
    assert kv.Format.parse("k4v4", 64).name == "k4v4"


def test_equal_signs_are_equal_codecs():
    plain, given, _ = codecs()
    assert kv.Codec(64, 4, signs=[1] * 64) == plain == kv.Codec(64, 4, signs="0" * 16, seed=9)
    assert kv.Codec.key(64, 4, signs="plain").seed == kv.Codec.value(64, 4, signs="plain").seed == 0
    for same in (np.array(GIVEN), torch.tensor(GIVEN), torch.tensor(GIVEN).float(), tuple(GIVEN), "6001aaaaaaaaaaaa"):
        assert kv.Codec(64, 4, signs=same) == given
    assert len({hash(codec) for codec in codecs()} | {hash(kv.Codec(64, 4))}) == 4


@pytest.mark.parametrize("signs", ["", "seeds", "plain ", [1] * 63, [1] * 63 + [0], [True] * 64, "6001AAAAAAAAAAAA", 3])
def test_wrong_signs(signs):
    if signs == [True] * 64:
        signs = [None] * 64
    with pytest.raises(InputError, match='signs must be "seed", "plain", "unrotated", 64 numbers of ±1 or 16 hexa'):
        kv.Codec(64, 4, signs=signs)


@pytest.mark.parametrize("options", ["plain:seed1", "seed1:unrotated", "plain:plain", "signs6001aaaaaaaaaaaa:plain"])
def test_signs_named_twice(options):
    with pytest.raises(InputError, match="k4 names its signs twice"):
        kv.Format.parse(f"k4:{options}/v4", 64)


def test_transforms():
    x = torch.randn(5, 64, dtype=torch.float64)
    plain, given, unrotated = codecs()
    assert np.allclose(plain.rotate(x).numpy(), walsh_hadamard(x.numpy()))
    assert np.allclose(given.rotate(x).numpy(), walsh_hadamard(x.numpy() * np.array(GIVEN)))
    assert torch.equal(unrotated.rotate(x), x)
    assert given.sign_list() == GIVEN
    assert kv.Codec(64, 4, seed=5).sign_list() == seeded_signs(64, 5)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_backends_agree(backend, device, which, dim):
    """Bytes, decoded vectors, scores and weighted sums, with an offset."""
    torch.manual_seed(dim + which)
    codec = codecs(dim, dtype=torch.float32)[which]
    x, offset = torch.randn(40, 2, dim, device=device), torch.randn(2, dim, device=device)
    want, got = (kv.encode(x, codec, offset, backend=name) for name in ("reference", backend))
    assert (want.data != got.data).float().mean() < 1e-3
    assert relative(got.scale, want.scale) < 1e-4
    for rotated in (False, True):
        a, b = (kv.decode(want, codec, offset, rotated=rotated, backend=name) for name in ("reference", backend))
        assert relative(b, a) < 1e-3
    q, weights = torch.randn(3, 4, dim, device=device), torch.rand(3, 4, 40, device=device)
    for function, argument in ((ops.scores, q), (ops.values, weights)):
        a, b = (function(argument, want, codec, offset, backend=name) for name in ("reference", backend))
        assert relative(b, a) < 3e-3


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("name", ["k4v4", "k4:plain/v3:plain", "k8:unrotated/v4", "k16v4"])
def test_callers_who_rotate(backend, device, name, queries):
    """attend(R q, rotated=True) is R attend(q), offsets included, whatever the codec's own rotation is."""
    torch.manual_seed(queries)
    format = kv.Format.parse(name, 64, torch.float32)
    offsets = {"value_offset": torch.randn(2, 64, device=device)}
    if format.key.coded:
        offsets["key_offset"] = torch.randn(2, 64, device=device)
    cache = kv.KVCache.contiguous(format, 1, 2, device=device, backend=backend, **offsets)
    cache.append(torch.randn(90, 2, 64, device=device), torch.randn(90, 2, 64, device=device))
    q = torch.randn(queries, 4, 64, device=device)
    want = cache.attend(q, precision="float32")
    ready = format.key.rotate(q) / 8
    scoring = kv.Scoring(scale=1.0)
    got = kv.attend(ready, cache.pages, None, scoring, precision="float32", rotated=True, backend=backend)
    assert relative(got.out, format.value.rotate(want.out)) < 1e-4
    assert relative(got.lse, want.lse) < 1e-4
    with pytest.raises(InputError, match="rotated must be a bool"):
        kv.attend(q, cache.pages, rotated=1)


def test_under_compile():
    cache = kv.KVCache.contiguous(kv.Format.parse("k4:plain/v4", 64), 1, 2, backend="reference")
    cache.append(torch.randn(20, 2, 64), torch.randn(20, 2, 64))
    pages, q = cache.pages, torch.randn(1, 4, 64)
    compiled = torch.compile(lambda q: kv.attend(q, pages, rotated=True).out, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q), kv.attend(q, pages, rotated=True).out)


@pytest.mark.parametrize("name", ["k4:plain/v4:plain", "k4:signs6001aaaaaaaaaaaa/v3:unrotated"])
def test_files(tmp_path, name):
    cache = kv.KVCache.contiguous(kv.Format.parse(name, 64), 1, 2)
    cache.append(torch.randn(20, 2, 64), torch.randn(20, 2, 64))
    kv.save(cache, tmp_path / "cache")
    loaded = kv.load(tmp_path / "cache")
    assert loaded.format == cache.format
    assert all(torch.equal(a, b) for a, b in zip(loaded.decode(0), cache.decode(0), strict=True))


def test_unrotated_is_the_same_bytes():
    codec = kv.Codec.key(64, 4)
    codes = kv.encode(torch.randn(9, 2, 64), codec)
    assert torch.equal(kv.decode(codes, codec.unrotated()), kv.decode(codes, codec, rotated=True))
    assert dataclasses.replace(codec.unrotated(), signs="seed", seed=0) == codec
