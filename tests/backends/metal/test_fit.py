"""Fitted codes in the Metal kernels: those of the reference, in tensors and in pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention.step import Rows, Step
from aurakv.backends.metal import Metal, source
from aurakv.format import fit as fitting
from aurakv.format.codec import Codec
from tests.backends.metal import emulator
from tests.backends.metal.emulator import EmulationError
from tests.format.test_fit import vectors, weights

needs_emulator = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))
SHAPES = [  # bits, side, dimension, whether there are weights
    (2, "key", 64, True), (3, "value", 80, True), (4, "key", 128, True), (8, "key", 64, True), (3, "key", 64, False),
    (4, "value", 80, False), (2, "value", 128, False), (8, "value", 64, False),
]  # fmt: skip
MORE = [
    (bits, side, dim, weighted)
    for bits in (2, 3, 4, 5, 6, 8) for side in ("key", "value") for dim in (64, 80, 128) for weighted in (True, False)
    if (bits, side, dim, weighted) not in SHAPES
]  # fmt: skip


def fit_of(codec: Codec, heads: int, weighted: bool) -> torch.Tensor:
    return fitting.fit(codec, weights(heads, codec.dim)) if weighted else fitting.equal(heads)


def compare(metal, codec: Codec, fit: torch.Tensor, x: torch.Tensor, offset: torch.Tensor | None) -> None:
    """Codes of the reference in float64: at 8 bits several scales fit alike, and float32 sums do not tell the best.
    Where one within rounding of a boundary changed those after it, they are as good."""
    backend, device = metal
    there = [None if y is None else y.to(device) for y in (offset, fit)]
    mine = kv.encode(x.to(device), codec, there[0], fit=there[1], backend=backend)
    mine = kv.Codes(mine.data.cpu(), mine.scale.cpu())
    theirs = kv.encode(x.double(), codec, offset, fit=fit, backend="reference")
    same = (mine.data == theirs.data).all(-1)
    assert same.float().mean() >= 0.97
    torch.testing.assert_close(mine.scale[same], theirs.scale[same], atol=0, rtol=1e-3)
    errors = [kv.decode(codes, codec, offset, backend="reference").sub(x).square().sum() for codes in (mine, theirs)]
    assert float(errors[0]) == pytest.approx(float(errors[1]), rel=0.02)


@pytest.mark.parametrize(
    ("bits", "side", "dim", "weighted"), [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.full) for shape in MORE)]
)
def test_codes_are_those_of_the_reference(metal, bits, side, dim, weighted):
    codec = getattr(Codec, side)(dim, bits)
    compare(metal, codec, fit_of(codec, 3, weighted), vectors(12, 3, dim), vectors(1, 3, dim, 5)[0])


@pytest.mark.parametrize(
    ("dim", "shared"),
    [
        (16, (4, 8)),
        (256, (2, 8)),
        pytest.param(512, (1, 8), marks=pytest.mark.full),
        pytest.param(576, (1, 8), marks=pytest.mark.full),
        (1024, (1, 4)),
    ],
)
def test_every_way_to_share_out_memory(metal, dim, shared):
    codec = Codec.key(dim, 3)
    assert source.fitting(codec, True) == shared
    compare(metal, codec, fit_of(codec, 2, True), vectors(2 if dim > 256 else 5, 2, dim), None)


@pytest.mark.parametrize("table", ["k4:uniform/v4", "k6:cubic/v4", "k8:lloyd-max/v4"])
def test_other_tables_of_levels(metal, table):
    codec = kv.Format.parse(table, 64).key
    compare(metal, codec, fit_of(codec, 2, True), vectors(8, 2, 64), None)


def cache_of(metal, name: str, dim: int, **options) -> kv.KVCache:
    backend, device = metal
    format = kv.Format.parse(name, dim)
    fits = {"key_fit": fit_of(format.key, 3, True).to(device), "value_fit": fitting.equal(3, device)}
    return kv.KVCache.contiguous(format, 1, 3, device=device, backend=backend, **fits, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_tokens_are_cut_changes_nothing(metal, dtype):
    backend, device = metal
    k, v = (x.to(device, dtype) for x in (vectors(11, 3, 64), vectors(11, 3, 64, 2)))
    found = []
    for pieces in ([11], [1] * 11, [4, 1, 6]):
        cache = cache_of(metal, "k3v4", 64)
        for x, y in zip(k.split(pieces), v.split(pieces), strict=True):
            cache.append(x, y)
        found.append(cache.codes(0))
    format = cache.format
    found.append([
        kv.encode(k, format.key, fit=cache.pages.key_fit, backend=backend),
        kv.encode(v, format.value, fit=cache.pages.value_fit, backend=backend),
    ])  # fmt: skip
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert torch.equal(mine.data, theirs.data)
            assert torch.equal(mine.scale, theirs.scale)
    nearest = kv.encode(k, format.key, backend=backend)
    assert not torch.equal(nearest.data, found[0][0].data)


def test_a_step_fits_scaled_keys(metal):
    """The factor comes before the fit, and pages that are full stay as they are."""
    backend, device = metal
    cache = cache_of(metal, "k4v4", 64)
    cache.reserve(2)
    pages = cache.pages
    factor, q, k, v = torch.rand(3, 64) + 0.5, vectors(2, 6, 64), vectors(2, 3, 64, 3), vectors(2, 3, 64, 4)
    rows = Rows(torch.tensor([0, 2], dtype=torch.int32, device=device))
    step = Step(pages, rows, kv.Scoring(), None, key_scale=factor.to(device))
    there = [x.to(device) for x in (q, k, v)]
    backends.select(backend, pages.format, pages.data.device).prepare_step(step, *there)(*there)
    wanted = kv.encode((k * factor).to(device), pages.format.key, fit=pages.key_fit, backend=backend)
    assert torch.equal(pages.stored(0, torch.arange(2, device=device))[0].data, wanted.data)
    full = dataclasses.replace(pages, table=torch.full_like(pages.table, -1))
    before = pages.data.clone()
    backends.select(backend, pages.format, pages.data.device).append(full, *there[1:], rows)
    assert int(pages.overflow) == 1
    assert torch.equal(pages.data, before)


@pytest.mark.parametrize("weighted", [True, False])
def test_zero_damaged_and_large_vectors(metal, weighted):
    backend, device = metal
    codec, x = Codec.key(64, 4), vectors(6, 2, 64)
    x[0], x[1, 0, 3], x[2, 1, 5], x[3], x[4, 0] = 0, torch.nan, torch.inf, 1e30 * x[3], 1e-30
    codes = kv.encode(x.to(device), codec, fit=fit_of(codec, 2, weighted).to(device), backend=backend)
    scale = codes.scale.cpu()
    assert bool((scale[0] == 0).all())
    assert scale[1].isnan().tolist() == [True, False]
    assert scale[2].isnan().tolist() == [False, True]
    assert bool((scale[3] == torch.finfo(torch.float16).max).all())
    assert bool(scale[4:].isfinite().all())
    whole = kv.encode(x, codec, fit=fit_of(codec, 2, weighted), backend="reference")
    assert torch.equal(codes.data.cpu()[[0, 3, 5]], whole.data[[0, 3, 5]])


BROKEN = {  # what: error, what is replaced, by what
    "levels of another lane before a barrier": (
        "race|uninitialised", "simdgroup_barrier(mem_flags::mem_threadgroup);\n    if (first == 0", "if (first == 0",
    ),
    "aims are read before all are there": (
        "race|uninitialised", "energy = 0.0f;\n  simdgroup_barrier(mem_flags::mem_threadgroup);", "energy = 0.0f;",
    ),
    "a row behind the last head": ("out of range: read", "? ulong(head) *", "? ulong(head + 1) *"),
    "a shuffle of some parts only": (
        "divergence", "made += simd_shuffle_xor(made, ushort(distance))",
        "{ if (part) made += simd_shuffle_xor(made, ushort(distance)); }",
    ),
    "nothing makes up for errors": ("assert", "- made)]", ")]"),
    "the worst scale": ("assert", "best = simd_min(left)", "best = simd_max(left)"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(what):
    kind, old, new = BROKEN[what]

    def compiler(text):
        assert text.count(old) == 1
        return emulator.compile_shader(text.replace(old, new))

    backends.register(Metal(f"broken: {what}", "cpu", compiler))
    codec = Codec.key(64, 3)
    with pytest.raises((EmulationError, AssertionError), match=kind):
        compare((f"broken: {what}", "cpu"), codec, fit_of(codec, 2, True), vectors(5, 2, 64), None)


@needs_emulator
def test_the_order_of_threads_does_not_matter():
    codec, found = Codec.key(80, 4), []
    for backwards in (False, True):
        name = f"metal-fit-backwards-{backwards}"
        backends.register(Metal(name, "cpu", lambda text, b=backwards: emulator.compile_shader(text, b)))
        found += [kv.encode(vectors(5, 2, 80), codec, fit=fit_of(codec, 2, w), backend=name) for w in (True, False)]
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        assert torch.equal(mine.data, theirs.data)
        assert torch.equal(mine.scale, theirs.scale)
