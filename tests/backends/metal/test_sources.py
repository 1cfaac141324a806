"""tools/metal_sources.py: the covering set of specialisations that Apple's compiler and clang's front end read."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict

import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention.step import Rows
from aurakv.backends.metal import Metal, source
from aurakv.storage.uncompressed import Uncompressed
from tools import metal_sources

DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 576)


def constants(text):
    return dict(re.findall(r"^#define (\w+) (\w+)$", text, re.M))


@pytest.fixture(scope="module")
def pairs():
    """Values that two constants of a source have together, by kernel and the two names."""
    found = defaultdict(set)
    for text in metal_sources.sources().values():
        kernels, given = re.findall(r"^kernel void (\w+)|\]\] kernel void (\w+)", text, re.M), constants(text)
        kernel = kernels[0][0] or kernels[0][1]
        for a, b in itertools.permutations(given, 2):
            found[kernel, a, b].add((given[a], given[b]))
    return found


def every(*values):
    return set(itertools.product(*(map(str, each) for each in values)))


def test_it_has_every_pair_of_values(pairs):
    for side, other in (("KEY", "VALUE"), ("VALUE", "KEY")):
        for kernel, name, values in (("attend_rows", "GROUP", (1, 2, 3, 4)), ("attend_tiles", "SIMDS", (1, 2, 4, 8))):
            assert every(source.WIDTHS, source.WIDTHS) <= pairs[kernel, f"{side}_BITS", f"{other}_BITS"]
            assert every(source.WIDTHS, DIMS) <= pairs[kernel, f"{side}_BITS", f"{side}_DIM"]
            assert every(source.WIDTHS, values) <= pairs[kernel, f"{side}_BITS", name]
            assert every(DIMS, values) <= pairs[kernel, f"{side}_DIM", name]
    coded = source.WIDTHS[:-1]
    for kernel, dtype, widths in (("encode", "IN_DTYPE", source.WIDTHS), ("decode", "OUT_DTYPE", source.WIDTHS)):
        assert every(widths, range(3)) <= pairs[kernel, "SIDE_BITS", dtype]
        assert every(widths, DIMS) <= pairs[kernel, "SIDE_BITS", "SIDE_DIM"]
    assert every(coded, (0, 1)) <= pairs["encode", "SIDE_BITS", "WEIGHTED"]


class Recording:
    """A compiler whose kernels do nothing."""

    def __init__(self):
        self.sources = []

    def __call__(self, text):
        self.sources.append(text)
        return self

    def __getattr__(self, name):
        return lambda *args, **options: None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["k4v4", "k8v4", "k5v4", "k4v2"])
def test_it_has_what_launches_of_usual_formats_ask_for(name, dtype, monkeypatch):
    recording, format = Recording(), kv.Format.parse(name, 128, dtype)
    backend = Metal("recorded", "cpu", recording)
    monkeypatch.setitem(backends._registered, backend.name, backend)
    uncompressed = (None, *(Uncompressed(4, 8, kept) for kept in metal_sources.DTYPES))
    for group, queries, kept in itertools.product((1, 2, 3, 4, 8, 16, 64), (1, 2, 5, 40), uncompressed):
        cache = kv.KVCache.contiguous(format, 1, 1, uncompressed=kept, backend=backend.name)
        (k, v), q = torch.zeros(2, queries, 1, 128, dtype=dtype), torch.zeros(queries, group, 128, dtype=dtype)
        cache.step(q, k, v, [0, queries])
        cache.step(q[:1], k[:1], v[:1], [0, 1])
        starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, queries], [queries] * queries))
        backend.attend_dense(q, k, v, Rows(starts, single=queries == 1), starts, ends, kv.Scoring(), None)
    for size in (0, 128 * 129 // 2):
        fit = torch.zeros(1, size, dtype=torch.float16)
        kv.KVCache.contiguous(format, 1, 1, key_fit=fit, value_fit=fit, backend=backend.name).append(k, v)
    keys, values = backend.encode(k, format.key, None), backend.encode(v, format.value, None)
    for codes, codec in ((keys, format.key), (values, format.value)):
        backend.decode(codes, codec, None, False, torch.float32)
    backend.scores(q, keys, format.key, None)
    backend.values(torch.zeros(40, 64, 40, dtype=dtype), values, format.value, None, 0.0)
    found = [constants(text) for text in recording.sources]
    assert {given["GROUP"] for given in found if "GROUP" in given} == {"1", "2", "3", "4"}
    assert {given["SIMDS"] for given in found if "SIMDS" in given} == {"1", "2", "4", "8"}
    assert set(recording.sources) <= set(metal_sources.sources().values())
