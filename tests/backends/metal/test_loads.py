"""How kernels load codes and make levels of them: 16 bytes a lane, and no table in memory."""

from __future__ import annotations

import pytest
import torch

import aurakv as kv
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.backends.metal import Metal, loads
from aurakv.format.levels import CODE_BITS
from tests.backends.metal import emulator
from tests.backends.metal.test_reads import Counting

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))
DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 576)
CHOSEN = {(64, 5), (80, 3), (128, 3)}  # in the default run
TOKENS = 64


def launched(format, group, queries, page_size, kernel=None):
    """What attention over 64 tokens did, beside the reference."""
    torch.manual_seed(0)
    counting = Counting()
    pool = kv.PagePool(format, -(-TOKENS // page_size), page_size, 1)
    cache = kv.KVCache.paged(pool, 1, backend="reference")
    cache.append(torch.randn(TOKENS, 1, format.key.dim), torch.randn(TOKENS, 1, format.value.dim), [0, TOKENS])
    q = torch.randn(queries, group, format.key.dim)
    call = Attention(
        cache.pages, Rows(torch.tensor([0, queries], dtype=torch.int32), single=queries == 1), kv.Scoring()
    )
    got, want = Metal("loads", "cpu", counting).attend(q, call), reference.attend(q, call)
    torch.testing.assert_close(got.out, want.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-6, rtol=1e-5)
    return counting.counts(kernel or ("attend_rows" if queries == 1 else "attend_tiles"))


def wide(found, codec, side):
    """The share of the bytes of codes that came 16 at a time; each was read once."""
    assert found[f"{side} read"] == TOKENS * codec.bytes_per_vector
    return found[f"{side} read by 16"] / (TOKENS * codec.row_bytes)


SHAPES = [
    pytest.param(dim, bits, id=f"{dim}-{bits}", marks=[] if (dim, bits) in CHOSEN else [pytest.mark.full])
    for dim in DIMS
    for bits in (*CODE_BITS, 16)
]


GROUPS = [(2, 1), (4, 1), (2, 9)]  # heads and queries: lanes with 16 channels, with 8, tiles


@pytest.mark.parametrize(("group", "queries"), GROUPS)
@pytest.mark.parametrize(("dim", "bits"), SHAPES)
def test_codes_are_loaded_16_bytes_a_lane(dim, bits, group, queries):
    """At every width and dimension, where pages hold a multiple of 8 tokens."""
    format = kv.Format.parse(f"k{bits}v{bits}", dim)
    found = launched(format, group, queries, 8)
    assert wide(found, format.key, "keys") == 1
    assert wide(found, format.value, "values") == 1


@pytest.mark.parametrize(("group", "queries"), GROUPS)
@pytest.mark.parametrize(
    ("dim", "bits", "page_size", "share"),
    [
        (80, 4, 1, 0), (80, 4, 2, 1),  # 40 bytes: two tokens are whole pieces
        (80, 3, 4, 0),  # 30 bytes: eight are
        (128, 5, 1, 1),  # whole rows
    ],
)  # fmt: skip
def test_pages_that_split_pieces_are_loaded_by_units(dim, bits, page_size, share, group, queries):
    format = kv.Format.parse(f"k{bits}v{bits}", dim)
    found = launched(format, group, queries, page_size)
    assert wide(found, format.key, "keys") == share
    assert wide(found, format.value, "values") == share


def test_pools_that_are_too_large_go_to_the_other_kernel(monkeypatch):
    """Rows are named by 32 bits."""
    whole, odd = kv.Format.parse("k4v4", 128), kv.Format.parse("k3v3", 80)
    assert loads.reach(whole, loads.fits(whole, 1)) == loads.reach(odd, loads.fits(odd, 16)) == 64 << 30
    assert loads.reach(odd, loads.fits(odd, 3)) == 8 << 30
    monkeypatch.setattr(loads, "reach", lambda format, fits: TOKENS * whole.bytes_per_token)
    assert launched(whole, 2, 1, 32, "attend_tiles")["keys read"] == TOKENS * whole.key.bytes_per_vector


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dim", [16, 48])
def test_small_vectors(dim, group):
    """More rows side by side than a lane has channels: the last sums are in several lanes, and one writes them."""
    launched(kv.Format.parse("k4v4", dim), group, 1, 8)


def uneven(bits):
    """A table of a user's: not mirrored."""
    return tuple(((i + 0.7) / 2 ** (bits - 1) - 1) ** 3 + 0.01 * i for i in range(2**bits))


@pytest.mark.parametrize(
    ("bits", "table", "shuffles"),
    [
        (6, "lloyd-max", 2), (6, "int8", 2), (6, uneven(6), 2), (6, "poly7", 0),
        (8, "lloyd-max", 4), (8, uneven(8), 8), (8, "uniform", 0),
    ],
    ids=["lloyd-max-6", "int8-6", "uneven-6", "poly7-6", "lloyd-max-8", "uneven-8", "uniform-8"],
)  # fmt: skip
def test_wide_levels_come_by_arithmetic_or_shuffles(bits, table, shuffles):
    """So many simd operations a code more than by arithmetic (test_reads.py has 4 bits); none is read from memory."""
    found, without = (
        launched(kv.Format(kv.Codec(64, bits, table=name), kv.Codec(64, 16)), 1, 1, 32)["simd operations"]
        for name in (table, "cubic")
    )
    assert found - without == TOKENS // 32 * 4 * 16 * shuffles  # of a block each lane has 16 codes of 4 rows
