"""Where the numbers of a tile lie in registers, as they are read and as the tensor cores want them.

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
def value_unit_layout(tile, units):
    """[units, tile]: units of values as `ldmatrix.trans` reads them, four 8×8 matrices at a time: lane 4g + c holds
    units 8j + g of tokens 8i + 2c, 8i + 2c + 1."""
    regs = [[0, 1], [8, 0], [0, 8]]
    regs += [[0, 16 << i] for i in range((tile // 16 - 1).bit_length())]
    regs += [[16 << i, 0] for i in range((units // 16 - 1).bit_length())]
    return gl.DistributedLinearLayout(regs, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [units, tile])


@gluon.constexpr_function
def weight_layout(tile):
    """Weights by [m, g // 2, g % 2, c, r]: lane 4g + c holds tokens 16m + 8(g % 2) + 2c + r."""
    regs = [[0, 0, 0, 0, 1]] + [[1 << i, 0, 0, 0, 0] for i in range((tile // 16 - 1).bit_length())]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [], [], [tile // 16, 4, 2, 4, 2])
