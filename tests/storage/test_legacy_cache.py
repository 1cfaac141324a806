"""Whole caches of the original kernels against legacy_oracle, which shares nothing with the library."""

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv.errors import InputError
from aurakv.storage import legacy_cache
from aurakv.storage.uncompressed import Uncompressed

from . import legacy_oracle as oracle

LENGTH, CAPACITY, KV_HEADS, HEADS = 37, 40, 2, 4
CODEBOOKS = {bits: np.linspace(-3, 3, 2**bits).astype(np.float32) for bits in (2, 3, 4, 5, 6, 8)}


def torch_side(side, device="cpu"):
    packed = side.packed.view(np.int32) if side.packed.dtype == np.uint32 else side.packed
    return torch.from_numpy(packed.copy()).to(device), torch.from_numpy(side.norms.copy()).to(device)


def on(device, q):
    return torch.from_numpy(q).float()[None].to(device)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def shuffled(codebook, dim, seed):
    """A codebook for coordinates of unit vectors, in no order."""
    order = np.random.default_rng(seed).permutation(len(codebook))
    return (codebook[order] / np.sqrt(dim)).astype(np.float32)


def aura(dim, key_bits, value_bits, length=LENGTH, capacity=CAPACITY, ring_start=0):
    rng = np.random.default_rng(dim * key_bits + value_bits)
    sides = []
    for bits, seed in ((key_bits, 1), (value_bits, 2)):
        vectors = rng.standard_normal((length, KV_HEADS, dim)) @ oracle.orthogonal(dim, seed).T
        book = shuffled(CODEBOOKS[bits], dim, bits + seed)
        sides.append(oracle.make_side(vectors, "aura", bits, capacity, ring_start, book))
    return *sides, rng.standard_normal((HEADS, dim))


def read_aura(keys, values, length=LENGTH, device="cpu", **options):
    books = (torch.from_numpy(keys.codebook), torch.from_numpy(values.codebook))
    return legacy_cache.from_aura(
        torch_side(keys, device), torch_side(values, device), books, length, head_dim=keys.dim, **options
    ).cache


def turboquant(dim, length=LENGTH, capacity=CAPACITY, ring_start=0, blocks=1, uneven=False):
    rng = np.random.default_rng(dim)
    sides = []
    for _ in range(2):
        vectors = rng.standard_normal((length, KV_HEADS, dim)) + 0.3
        vectors = oracle.walsh_hadamard(vectors)
        side = oracle.make_side(vectors, "turboquant", 4, capacity, ring_start, oracle.LLOYD_MAX_4, blocks)
        if blocks > 1 and not uneven:
            side.norms[:] = side.norms[..., :1]
        sides.append(side)
    return *sides, rng.standard_normal((HEADS, dim))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("bits", [(4, 2), (4, 4), (2, 3), (3, 6), (5, 4), (6, 8), (8, 5)])
def test_aura(dim, bits, backend, device):
    keys, values, q = aura(dim, *bits)
    cache = read_aura(keys, values, device=device, backend=backend)
    scaled = q / np.sqrt(dim)
    want = oracle.attend(scaled, keys, values, LENGTH, 0, scale=1.0)
    part = cache.attend(on(device, scaled), scoring=kv.Scoring(scale=1.0), precision="float32")
    assert relative(part.out[0].cpu().numpy(), want) < 2e-5


RINGS = [
    *((64, 4, 2, ring_start, window) for ring_start in (0, 1, 17, 39) for window in (0, 1, 9, 40, 100)),
    *((dim, *bits, 17, 9) for dim in (80, 96, 128, 256, 512) for bits in ((2, 3), (4, 4), (5, 6), (8, 2))),
]


@pytest.mark.parametrize(("dim", "key_bits", "value_bits", "ring_start", "window"), RINGS)
def test_aura_in_a_ring_with_sinks(dim, key_bits, value_bits, ring_start, window):
    keys, values, q = aura(dim, key_bits, value_bits, CAPACITY, CAPACITY, ring_start)
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    want = oracle.attend(q, keys, values, CAPACITY, ring_start, scale=0.1, window=window, sinks=sinks)
    caches = [read_aura(keys, values, CAPACITY, ring_start=ring_start)]
    if window:
        caches.append(read_aura(keys, values, CAPACITY, ring_start=ring_start, window=window))
    for cache in caches:
        scoring = kv.Scoring(scale=0.1, window=window or None)
        part = cache.attend(torch.from_numpy(q)[None], scoring=scoring, sink_logits=torch.from_numpy(sinks))
        assert relative(part.out[0].numpy(), want) < 1e-6


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize(("ring_start", "window", "softcap"), [(0, 0, 0.0), (0, 11, 5.0), (23, 0, 0.0), (23, 11, 30.0)])
def test_turboquant(dim, ring_start, window, softcap, backend, device):
    length = CAPACITY if ring_start else LENGTH
    keys, values, q = turboquant(dim, length, ring_start=ring_start)
    scale = dim**-0.5
    rotated = oracle.attend(
        oracle.walsh_hadamard(q), keys, values, length, ring_start, scale=scale, window=window, softcap=softcap
    )
    sides = torch_side(keys, device), torch_side(values, device)
    imported = legacy_cache.from_turboquant(*sides, length, head_dim=dim, ring_start=ring_start, backend=backend)
    assert imported.encoded_again == 0
    scoring = kv.Scoring(window=window or None, softcap=softcap or None)
    for precision, tolerance in (("float32", 2e-5), ("fast", 2e-3)):
        part = imported.cache.attend(on(device, q), scoring=scoring, precision=precision)
        assert relative(part.out[0].cpu().numpy(), oracle.walsh_hadamard(rotated)) < tolerance
    # queries that the caller has rotated and scaled, an output that the caller rotates back
    ready = on(device, oracle.walsh_hadamard(q) * scale)
    scoring = kv.Scoring(scale=1.0, window=window or None, softcap=softcap or None)
    part = kv.attend(ready, imported.cache.pages, scoring=scoring, precision="float32", rotated=True, backend=backend)
    assert relative(part.out[0].cpu().numpy(), rotated) < 2e-5


@pytest.mark.parametrize("uneven", [False, True])
def test_norms_of_blocks(uneven):
    keys, values, q = turboquant(512, blocks=2, uneven=uneven)
    sides = (torch_side(keys), torch_side(values), LENGTH)
    if uneven:
        with pytest.warns(UserWarning, match="148 vectors have blocks of unequal norms and were encoded again"):
            imported = legacy_cache.from_turboquant(*sides, head_dim=512)
    else:
        imported = legacy_cache.from_turboquant(*sides, head_dim=512)
    assert imported.encoded_again == (2 * LENGTH * KV_HEADS if uneven else 0)
    want = oracle.attend(oracle.walsh_hadamard(q), keys, values, LENGTH, 0, scale=512**-0.5)
    out = imported.cache.attend(torch.from_numpy(q)[None]).out[0].numpy()
    assert relative(oracle.walsh_hadamard(out), want) < (0.15 if uneven else 1e-6)


def test_only_vectors_with_unequal_norms_are_encoded_again():
    keys, values, _ = turboquant(512, blocks=2)
    plain = legacy_cache.from_turboquant(torch_side(keys), torch_side(values), LENGTH, head_dim=512).cache.codes(0)
    keys.norms[1, 3, 1] *= 1.05
    with pytest.warns(UserWarning, match="1 vectors"):
        imported = legacy_cache.from_turboquant(torch_side(keys), torch_side(values), LENGTH, head_dim=512)
    got = imported.cache.codes(0)
    changed = (got[0].scale != plain[0].scale) | (got[0].data != plain[0].data).any(-1)
    assert changed.nonzero().tolist() == [[3, 1]]
    assert torch.equal(got[1].data, plain[1].data)
    assert torch.equal(got[1].scale, plain[1].scale)


def test_blocks_told_another_divisor():
    keys, values, q = turboquant(512, blocks=2)
    want = oracle.attend(oracle.walsh_hadamard(q), keys, values, LENGTH, 0, scale=512**-0.5)
    for side in (keys, values):
        side.norms *= 16 / np.float32(np.sqrt(512))
    cache = legacy_cache.from_turboquant(torch_side(keys), torch_side(values), LENGTH, head_dim=512, divisor=16.0).cache
    assert relative(oracle.walsh_hadamard(cache.attend(torch.from_numpy(q)[None]).out[0].numpy()), want) < 1e-6


@pytest.mark.parametrize(("dim", "blocks"), [(256, 1), (512, 1), (512, 2)])
def test_signs_before_the_transform(dim, blocks):
    """As mlx-native has it from 0.4 on: signs, and norms of blocks that are not divided by √dim."""
    keys, values, q = turboquant(dim, CAPACITY, ring_start=7, blocks=blocks)
    signs = np.random.default_rng(5).choice([-1, 1], dim)
    rotated = oracle.attend(oracle.walsh_hadamard(q * signs), keys, values, CAPACITY, 7, scale=dim**-0.5)
    divisor = 1.0 if blocks > 1 else None
    for side in (keys, values):
        side.norms /= np.float32(np.sqrt(dim)) if divisor else 1
    given = {"divisor": divisor, "signs": signs.tolist()}
    sides = torch_side(keys), torch_side(values)
    cache = legacy_cache.from_turboquant(*sides, CAPACITY, head_dim=dim, ring_start=7, **given).cache
    out = cache.attend(torch.from_numpy(q)[None]).out[0].numpy()
    assert relative(out, oracle.walsh_hadamard(rotated) * signs) < 1e-6
    back = legacy_cache.to_turboquant(cache, ring_start=7, blocks=blocks > 1, **given)
    for (data, norms), (packed, wanted) in zip((back.keys, back.values), sides, strict=True):
        assert torch.equal(data, packed)
        assert torch.allclose(norms, wanted, rtol=1e-6)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("name", ["k4:f32/v4:f32", "k4:f32/v2:f32", "k3/v6", "k8:plain/v5:unrotated"])
def test_ours_in_the_layout_of_aura(dim, name):
    """Its reader, with queries rotated by our codec, gives our attention, rotated by our codec."""
    torch.manual_seed(dim)
    format = kv.Format.parse(name, dim)
    cache = kv.KVCache.contiguous(format, 1, KV_HEADS, backend="reference")
    cache.append(torch.randn(CAPACITY, KV_HEADS, dim), torch.randn(CAPACITY, KV_HEADS, dim))
    q = torch.randn(1, HEADS, dim, dtype=torch.float64)
    for capacity, ring_start in ((None, 0), (CAPACITY + 5, 0), (CAPACITY, 7)):
        made = legacy_cache.to_aura(cache, capacity=capacity, ring_start=ring_start)
        sides = [
            oracle.Side(words.numpy().view(np.uint32), norms.numpy(), book.numpy(), dim, codec.bits, "aura")
            for (words, norms), book, codec in zip(
                (made.keys, made.values), made.codebooks, (format.key, format.value), strict=True
            )
        ]
        scaled = (format.key.rotate(q)[0] / dim**0.5).numpy()
        got = oracle.attend(scaled, *sides, made.length, made.ring_start, scale=1.0)
        assert relative(got, format.value.rotate(cache.attend(q).out)[0].numpy()) < 1e-6


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("blocks", [False, True])
def test_ours_in_the_layout_of_turboquant(dim, blocks):
    torch.manual_seed(dim)
    format = kv.Format.parse("k4:lloyd-max:plain/v4:lloyd-max:f32:plain", dim)
    cache = kv.KVCache.ring(format, 1, KV_HEADS, window=20, backend="reference")
    cache.append(torch.randn(300, KV_HEADS, dim), torch.randn(300, KV_HEADS, dim))
    held = len(cache.positions(0))
    made = legacy_cache.to_turboquant(cache, capacity=held, ring_start=9, blocks=blocks)
    sides = [
        oracle.Side(data.numpy(), norms.numpy() if dim == 512 else norms.numpy().reshape(KV_HEADS, -1),
                    oracle.LLOYD_MAX_4, dim, 4, "turboquant")
        for data, norms in (made.keys, made.values)
    ]  # fmt: skip
    q = torch.randn(1, HEADS, dim, dtype=torch.float64)
    got = oracle.attend(oracle.walsh_hadamard(q[0].numpy()), *sides, made.length, 9, scale=dim**-0.5, window=20)
    assert relative(oracle.walsh_hadamard(got), cache.attend(q).out[0].numpy()) < 1e-6
    back = legacy_cache.from_turboquant(made.keys, made.values, made.length, head_dim=dim, ring_start=9).cache
    for mine, theirs in zip(cache.codes(0), back.codes(0), strict=True):
        assert torch.equal(mine.data, theirs.data)
        assert torch.allclose(mine.scale.float(), theirs.scale, rtol=1e-6)


def cache_of(name, dim=64, **options):
    cache = kv.KVCache.contiguous(kv.Format.parse(name, dim), 1, 1, **options)
    cache.append(torch.randn(40, 1, dim), torch.randn(40, 1, dim))
    return cache


def with_sinks():
    cache = kv.KVCache.ring(kv.Format.parse("k4v4", 64), 1, 1, window=4, sinks=2, page_size=4, chunk=1)
    cache.append(torch.randn(400, 1, 64), torch.randn(400, 1, 64))
    return cache


REFUSED = [
    (lambda: legacy_cache.to_aura(cache_of("k16v4")), "hold codes on both sides, got k16v4"),
    (lambda: legacy_cache.to_aura(cache_of("k4v4", uncompressed=Uncompressed(2))), "no uncompressed tokens"),
    (lambda: legacy_cache.to_aura(cache_of("k4v4", key_offset=torch.ones(1, 64))), "have no offsets"),
    (lambda: legacy_cache.to_aura(with_sinks()), "hold neighbouring tokens, and this ring holds sinks apart"),
    (lambda: legacy_cache.to_aura(cache_of("k4v4"), capacity=39), "capacity must be a whole number of at least 40"),
    (lambda: legacy_cache.to_aura(cache_of("k4v4"), capacity=41, ring_start=1), "ring_start is 0 until a ring is full"),
    (lambda: legacy_cache.to_turboquant(cache_of("k4v4")), "behind a plain transform .* got 4:int8:l2:f16:seed0 of 64"),
    (lambda: legacy_cache.to_turboquant(cache_of("k4:lloyd-max:plain/v4:lloyd-max:plain", 80)), r"of 2\^k coordinates"),
    (
        lambda: legacy_cache.to_turboquant(cache_of("k4:lloyd-max:plain/v4:lloyd-max:plain"), signs=[-1] * 64),
        r"behind a transform with the given signs of 2\^k coordinates, got 4:lloyd-max:l2:f16:plain of 64",
    ),
    (
        lambda: legacy_cache.to_turboquant(cache_of("k4:lloyd-max:plain/v4:lloyd-max:plain"), divisor=0),
        "divisor must be positive and finite, got 0",
    ),
    (lambda: legacy_cache.to_turboquant(None), "cache must be a KVCache, got None"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_their_layout_cannot_hold(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()


def test_wrong_input():
    data, norms = torch.zeros(2, 8, 32, dtype=torch.uint8), torch.ones(2, 8)

    def read(keys=(data, norms), values=(data, norms), length=5, **options):
        return legacy_cache.from_turboquant(keys, values, length, head_dim=64, **options)

    assert read().cache.lengths == [5]
    assert read(length=0).cache.lengths == [0]
    for sentence, options in [
        ("keys hold 8 tokens at most, got a length of 9", {"length": 9}),
        ("length must be a whole number of at least 0, got -1", {"length": -1}),
        ("ring_start must be a whole number from 0 to 7, got 8", {"ring_start": 8, "length": 8}),
        ("ring_start is 0 until a ring is full, got 3 with 5 tokens of 8", {"ring_start": 3}),
        ("keys must be a pair of tensors", {"keys": data}),
        (r"values must be codes \[kv_heads, capacity, words\]", {"values": (data, norms[:, :7])}),
        ("keys and values must have equal KV heads, got 2 and 1", {"values": (data[:1], norms[:1])}),
        (r"data must be \[..., kv_heads, 32\]", {"keys": (data[..., :16], norms)}),
        ("divisor must be positive and finite, got 0", {"divisor": 0}),
        ("keys and values must be on one device, got cpu and meta", {"values": (data.to("meta"), norms.to("meta"))}),
    ]:
        with pytest.raises(InputError, match=sentence):
            read(**options)
    wide, blocks = torch.zeros(1, 4, 256, dtype=torch.uint8), torch.ones(1, 4, 2)
    for bad in ([torch.nan, torch.nan], [torch.inf, 1.0], [-1.0, 2.0]):
        blocks[0, 2] = torch.tensor(bad)
        with pytest.raises(InputError, match="norms must be finite and not negative"):
            legacy_cache.from_turboquant((wide, blocks), (wide, torch.ones(1, 4, 2)), 4, head_dim=512)
    with pytest.raises(InputError, match=r"TurboQuant's kernels write vectors of 2\^k coordinates, got 80"):
        legacy_cache.from_turboquant((data, norms), (data, norms), 5, head_dim=80)
    words = (data.view(torch.int32), norms)
    with pytest.raises(InputError, match="a value codebook must have one of"):
        legacy_cache.from_aura(words, words, (torch.ones(16), torch.ones(15)), 5, head_dim=64)
    for books in (None, (torch.ones(16),), torch.ones(2, 16)):
        with pytest.raises(InputError, match="codebooks must be a pair of tensors"):
            legacy_cache.from_aura(words, words, books, 5, head_dim=64)
