"""What the kernels read: every stored byte once for a whole group of query heads, and nothing that no query sees."""

from __future__ import annotations

import pytest
import torch

import aurakv as kv
from aurakv.attention.step import Attention, Rows
from aurakv.backends.metal import Metal
from aurakv.storage.cache import KVCache
from tests.backends.metal import emulator

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))
TOKENS, DIM = 96, 128


class Counting:
    """A compiler whose kernels remember what their last launch did."""

    def __init__(self):
        self.libraries = []

    def __call__(self, source):
        self.libraries.append(emulator.compile_shader(source))
        return self.libraries[-1]

    def counts(self, kernel):
        return next(library.counts for library in self.libraries if kernel in library._kernels)


def counts(kernel, group, queries=1, scoring=None, name="k4v4"):
    counting = Counting()
    backend = Metal("counted", "cpu", counting)
    torch.manual_seed(0)
    cache = KVCache.contiguous(kv.Format.parse(name, DIM), 1, 2, backend="reference")
    k, v = torch.randn(2, TOKENS, 2, DIM)
    cache.append(k, v, [0, TOKENS])
    rows = Rows(torch.tensor([0, queries], dtype=torch.int32), single=queries == 1)
    q, scoring = torch.randn(queries, 2 * group, DIM), scoring or kv.Scoring()
    backend.attend(q, Attention(cache.pages, rows, scoring))
    return counting.counts(kernel), cache.format


@pytest.mark.parametrize(
    ("kernel", "group", "queries"), [("attend_rows", 4, 1), ("attend_tiles", 8, 1), ("attend_tiles", 4, 8)]
)
def test_stored_bytes_are_read_once(kernel, group, queries):
    found, format = counts(kernel, group, queries)
    assert found["keys read"] == TOKENS * 2 * format.key.bytes_per_vector
    assert found["values read"] == TOKENS * 2 * format.value.bytes_per_vector


def test_only_the_window_is_read():
    found, format = counts("attend_rows", 4, scoring=kv.Scoring(window=20, sinks=3))
    assert found["keys read"] == 23 * 2 * format.key.bytes_per_vector
    assert found["values read"] == 23 * 2 * format.value.bytes_per_vector


def test_simd_operations_of_a_decode():
    """The numbers of docs/lab/metal.md: per block of 32 tokens and KV head."""
    found, _ = counts("attend_rows", 4)
    blocks = TOKENS // 32 * 2
    steps = 8 * (2 + 16 + 4 * 4) + 8 * (2 + 4 + 16)  # keys: slot, levels, sums of scores; values: slot, weights, levels
    ends = 2 * (4 + 4 * 16 * 2)  # of each KV head: sums of weights, sums of values over lanes
    assert found["simd operations"] == blocks * (steps + 4) + ends
    assert found["barriers"] == 0
