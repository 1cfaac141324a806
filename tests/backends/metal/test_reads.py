"""What the kernels read: every stored byte once for a whole group of query heads, and nothing that no query sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import aurakv as kv
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.backends.metal import Metal
from aurakv.format.levels import CODE_BITS
from aurakv.storage.cache import KVCache
from tests.backends.metal import emulator

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))
TOKENS, DIM = 96, 128
LAB = (Path(__file__).parents[3] / "docs" / "lab" / "metal.md").read_text(encoding="utf-8")


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
    found, format, _ = launched(kernel, group, queries, scoring or kv.Scoring(), name)
    return found, format


def launched(kernel, group, queries, scoring, name="k4v4", heavy=None, damaged=None, splits=None, tokens=TOKENS):
    """What a launch did, the format, and the differences of out and lse from the reference without a threshold. All
    queries look for one heavy key; a value is damaged."""
    counting = Counting()
    backend = Metal("counted", "cpu", counting)
    torch.manual_seed(0)
    cache = KVCache.contiguous(kv.Format.parse(name, DIM), 1, 2, backend="reference")
    k, v = torch.randn(2, tokens, 2, DIM)
    q = torch.randn(queries, 2 * group, DIM)
    if heavy is not None:
        q = 3 * k[heavy].repeat_interleave(group, 0).expand(queries, -1, -1)
    if damaged is not None:
        v[damaged] = torch.nan
    cache.append(k, v, [0, tokens])
    rows = Rows(torch.tensor([0, queries], dtype=torch.int32), single=queries == 1)
    got = backend.attend(q, Attention(cache.pages, rows, scoring, splits=splits))
    want = reference.attend(q, Attention(cache.pages, rows, dataclasses.replace(scoring, threshold=0.0)))
    return counting.counts(kernel), cache.format, kv.Partial(got.out - want.out, got.lse - want.lse)


@pytest.mark.parametrize(
    ("kernel", "group", "queries", "times"),
    [("attend_rows", 4, 1, 1), ("attend_tiles", 8, 1, 1), ("attend_tiles", 4, 8, 1), ("attend_tiles", 48, 1, 1),
     ("attend_tiles", 71, 1, 2)],
)  # fmt: skip
def test_stored_bytes_are_read_once(kernel, group, queries, times):
    """For up to 64 query heads of a KV head."""
    found, format, difference = launched(kernel, group, queries, kv.Scoring(), splits=1)
    assert found["keys read"] == times * TOKENS * 2 * format.key.bytes_per_vector
    assert found["values read"] == times * TOKENS * 2 * format.value.bytes_per_vector
    assert difference.out.abs().max() < 2e-6


def test_only_the_window_is_read():
    found, format = counts("attend_rows", 4, scoring=kv.Scoring(window=20, sinks=3))
    assert found["keys read"] == 23 * 2 * format.key.bytes_per_vector
    assert found["values read"] == 23 * 2 * format.value.bytes_per_vector


KERNELS = [("attend_rows", 4, 1), ("attend_tiles", 8, 1), ("attend_tiles", 4, 8)]


@pytest.mark.parametrize(("kernel", "group", "queries"), KERNELS)
@pytest.mark.parametrize(("heavy", "splits"), [(0, 3), (TOKENS - 9, 3), (40, 1)])
def test_values_that_do_not_count_are_not_read(kernel, group, queries, heavy, splits):
    """A split knows of heavy keys in its own blocks, the first and the last: of other values it reads only scales."""
    scoring = kv.Scoring(threshold=1e-4)
    found, format, difference = launched(kernel, group, queries, scoring, heavy=heavy, splits=splits)
    rows = 1 if heavy != 40 else 32 + 1  # what lies before it was read before it was known
    read = (found["values read"] - TOKENS * 2 * format.value.scale_bytes) // (2 * format.value.row_bytes)
    assert 1 <= read <= rows
    assert difference.out.abs().max() < 1e-4 * TOKENS
    assert difference.lse.abs().max() < 1e-4  # of about 38


@pytest.mark.parametrize(("kernel", "group", "queries"), KERNELS)
def test_all_values_are_read_that_may_count(kernel, group, queries):
    """Weights above the threshold, damaged values whatever their weight, and vectors: reading shows their damage."""
    scoring = kv.Scoring(threshold=1e-6)
    found, format, difference = launched(kernel, group, queries, scoring)
    assert found["values read"] == TOKENS * 2 * format.value.bytes_per_vector
    assert difference.out.abs().max() < 1e-5
    for name in ("k4v4", "k4v16"):
        *_, difference = launched(kernel, group, queries, scoring, name, heavy=0, damaged=50)
        assert difference.out.isnan().all()
        assert difference.lse.abs().max() < 1e-4  # of about 38


ROWS = {  # of the table in docs/lab/metal.md: kernel, query heads per KV head, queries
    "simd operations, 1 query head (`attend_rows`)": ("attend_rows", 1, 1),
    "4 query heads (`attend_rows`)": ("attend_rows", 4, 1),
    "8 query heads (`attend_tiles`)": ("attend_tiles", 8, 1),
    "a prompt's 32 rows (`attend_tiles`)": ("attend_tiles", 4, 8),
}


@pytest.mark.parametrize(
    ("bits", "row"),
    [
        pytest.param(bits, row, marks=[] if bits == 3 else pytest.mark.full, id=f"{bits}-{ROWS[row]}")
        for bits in CODE_BITS
        for row in ROWS
    ],
)
def test_operations_and_bytes_of_a_token(bits, row):
    """The table of docs/lab/metal.md: what 32 tokens more take."""
    kernel, group, queries = ROWS[row]
    few, many = (
        launched(kernel, group, queries, kv.Scoring(), f"k{bits}v{bits}", splits=1, tokens=tokens)[0]
        for tokens in (64, 96)
    )
    taken = {name: (many[name] - few[name]) / 32 / 2 for name in few}  # of each of 2 KV heads
    at = [line for line in LAB.splitlines() if line.startswith("| bits |")][-1].split("|").index(f" {bits} ")
    cells = {line.split("|")[1].strip(): line.split("|") for line in LAB.splitlines() if line.startswith("| ")}
    assert f"{taken['keys read'] + taken['values read']:.0f}" == cells["bytes read"][at].strip()
    assert f"{taken['simd operations']:.2f}" == cells[row][at].strip()


def test_simd_operations_of_a_decode():
    """The numbers of docs/lab/metal.md: per block of 32 tokens and KV head."""
    found, _ = counts("attend_rows", 4)
    blocks = TOKENS // 32 * 2
    # 16 lanes a row, 8 channels each: a lane has 16 rows. It loads 4 times, exchanges units, then halves of them.
    keys = 4 + 4 * (2 + 2) + 16 * 8 + 4 * 15  # places, exchanged words, levels, sums of scores: 15 folds of 16 rows
    values = 4 + 4 * (2 + 2) + 16 * 8 + 16 * 4  # places, exchanged words, levels, weights
    ends = 2 * (4 + 4 * 4)  # of each KV head: sums of weights, sums of 8 channels over 2 rows
    assert found["simd operations"] == blocks * (keys + values + 4) + ends
    assert found["barriers"] == 0
