"""Where the numbers of a tile lie: in shared memory as TMA leaves them, in registers as the tensor cores want them.

A unit is 16 bits of a row: eight, four or two codes. Lanes are 4g + c.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _rows(tile):
    """The registers of a lane that hold rows 8 and more apart."""
    return [[8 << i, 0] for i in range((tile // 8 - 1).bit_length())]


@gluon.constexpr_function
def key_unit_layout(tile, units):
    """Units of keys as lanes load them, 16 bytes at a time: lane 4g + c holds of rows 8j + g the units 8c … 8c + 7 (mod
    32), or 4c … 4c + 3 of 16."""
    wide = {16: [], 32: [[0, 4]], 64: [[0, 4], [0, 32]], 128: [[0, 4], [0, 32], [0, 64]]}[units]
    lanes = [[0, 4], [0, 8]] if units == 16 else [[0, 8], [0, 16]]
    regs = [[0, 1], [0, 2], *wide, *_rows(tile)]
    return gl.DistributedLinearLayout(regs, [*lanes, [1, 0], [2, 0], [4, 0]], [], [], [tile, units])


@gluon.constexpr_function
def key_layout(tile, units):
    """What `raw_scores` makes of key_unit_layout: lane 4g + c with units 4c … 4c + 3 of each 16."""
    wide = [[0, 16 << i] for i in range((units // 16 - 1).bit_length())]
    regs = [[0, 1], [0, 2], *wide, *_rows(tile)]
    return gl.DistributedLinearLayout(regs, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [], [], [tile, units])


@gluon.constexpr_function
def key_half_layout(tile, units):
    """The same for codes of 8 bits: lane 4g + c with units 2c, 2c + 1 of each 8."""
    wide = [[0, 8 << i] for i in range((units // 8 - 1).bit_length())]
    regs = [[0, 1], *wide, *_rows(tile)]
    return gl.DistributedLinearLayout(regs, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [tile, units])


@gluon.constexpr_function
def copy_units(bits, dim):
    """Units that TMA copies for a row: none of 3 bits, which `fast_ring` copies."""
    return 0 if bits == 3 else dim * bits // 16


@gluon.constexpr_function
def shared_unit_layout(tile, units):
    """[tile, units] as TMA leaves it: lines of 128 bytes hold 4 tokens to half a one, 16-byte pieces swizzled among
    8."""
    count = (tile * units - 1).bit_length()
    inner = (units - 1).bit_length()
    flat = [[0, 1 << i] if i < inner else [1 << i - inner, 0] for i in range(count)]
    bases = [list(base) for base in flat]
    for i in range(3):  # bits of the line's number, and the pieces that they exchange
        if 6 + i < count:
            bases[6 + i] = [flat[6 + i][0] + flat[3 + i][0], flat[6 + i][1] + flat[3 + i][1]]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.constexpr_function
def weight_layout(tile):
    """Weights by [m, g // 2, g % 2, c, r]: lane 4g + c holds tokens 16m + 8(g % 2) + 2c + r."""
    regs = [[0, 0, 0, 0, 1]] + [[1 << i, 0, 0, 0, 0] for i in range((tile // 16 - 1).bit_length())]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [], [], [tile // 16, 4, 2, 4, 2])
