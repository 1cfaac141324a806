"""Which tiles of keys a block of queries walks over: every visible key once. In Triton's interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch

from aurakv.attention.scoring import Scoring

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from aurakv.backends.triton.common import masks

KEYS = 16
SCORINGS = [
    Scoring(), Scoring(causal=False), Scoring(window=5), Scoring(window=20), Scoring(window=5, sinks=3),
    Scoring(window=7, sinks=17), Scoring(window=40, sinks=16), Scoring(first=3, recent=4),
    Scoring(window=9, sinks=5, first=2, recent=3), Scoring(window=9, sinks=20, first=18, recent=30),
    Scoring(first=3, recent=4, only_uncompressed=True), Scoring(first=20, recent=1, only_uncompressed=True),
    Scoring(window=9, sinks=5, first=2, recent=3, only_uncompressed=True),
]  # fmt: skip


@triton.jit
def probe(
    given, found, length, window, sinks, first, recent,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, UNCOMPRESSED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    lowest, highest = tl.load(given + 2 * i), tl.load(given + 2 * i + 1)
    a_start, a_stop, b_start, b_stop = masks.key_spans(
        lowest, highest, length * 0, length, window, sinks, first, recent, CAUSAL, WINDOW, UNCOMPRESSED
    )
    a_base, a_tiles, b_base, tiles = masks.tiles_of(a_start, a_stop, b_start, b_stop, KEYS)
    whole, edge = masks.whole_tiles(
        b_base, b_start, b_stop, lowest, highest, window, recent, CAUSAL, WINDOW, UNCOMPRESSED, KEYS
    )
    tl.store(found + 6 * i, a_base)
    tl.store(found + 6 * i + 1, a_tiles)
    tl.store(found + 6 * i + 2, b_base)
    tl.store(found + 6 * i + 3, tiles)
    tl.store(found + 6 * i + 4, whole)
    tl.store(found + 6 * i + 5, edge)


def check(scoring: Scoring, length: int) -> None:
    blocks = [(low, high) for low in range(length) for high in (low, low + 10) if high < length]
    given = torch.tensor(blocks, dtype=torch.int32)
    found = torch.zeros(len(blocks), 6, dtype=torch.int32)
    uncompressed = 2 if scoring.only_uncompressed else 1 if scoring.first or scoring.recent else 0
    probe[(len(blocks),)](
        given, found, length, scoring.window or 0, scoring.sinks if scoring.window else 0, scoring.first,
        scoring.recent, scoring.causal, scoring.window is not None, uncompressed, KEYS,
    )  # fmt: skip
    key = torch.arange(length)
    for (low, high), (a_base, a_tiles, b_base, tiles, whole, edge) in zip(blocks, found.tolist(), strict=True):
        starts = [a_base + KEYS * i for i in range(a_tiles)] + [b_base + KEYS * i for i in range(tiles - a_tiles)]
        walked = list(itertools.chain(*(range(start, start + KEYS) for start in starts)))
        assert len(walked) == len(set(walked)), (scoring, length, low, high, "a key twice")
        seen = scoring.visible(torch.arange(low, high + 1)[:, None], key)
        assert set(key[seen.any(0)].tolist()) <= set(walked), (scoring, length, low, high, "a key is missing")
        for tile in range(whole, min(edge, tiles - a_tiles)):
            begin = b_base + KEYS * tile
            assert begin + KEYS <= length, (scoring, low, high)
            assert bool(seen[:, begin : begin + KEYS].all()), (scoring, low, high, "not whole")


def test_every_visible_key_once() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    for scoring, length in itertools.product(SCORINGS, (1, 50)):
        check(scoring, length)
