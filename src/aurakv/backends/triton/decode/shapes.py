"""Which widths and dimensions the decode kernel serves, and how their rows lie in shared memory: the one list."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....format.levels import CODE_BITS
from ....format.rotation import base_order

DIMS = (64, 80, 96, 128, 256, 512)  # each at all of CODE_BITS
MOST_ROWS = {dim: 16 if dim <= 128 else 8 for dim in DIMS}  # of a job: as many as registers hold the sums of
_ORDERS = gl.constexpr({dim: base_order(dim) for dim in DIMS})

__all__ = ["CODE_BITS", "DIMS", "MOST_ROWS", "flat", "in_pieces", "order", "padded"]


@gluon.constexpr_function
def flat(bits, dim=128):
    """Rows that lie as in memory; others are lines of 128 bytes whose pieces of 16 are exchanged."""
    return bits not in ((4, 8) if dim == 64 else (2, 4, 8) if dim in (128, 256) else ())


@gluon.constexpr_function
def in_pieces(bits, dim):
    """Flat rows that are read by `pieces`; those of 128 and 256 codes have their own arithmetic for most tables."""
    return flat(bits, dim) and dim not in (128, 256)


@gluon.constexpr_function
def order(dim):
    """Of the matrix that, doubled, rotates: dim = order · 2^k."""
    return _ORDERS.value[dim]


@gluon.constexpr_function
def padded(dim):
    """Coordinates of a vector as lanes hold it for rotation: each run of `order` takes a power of two of them."""
    run = order(dim)
    return dim // run << (run - 1).bit_length()
