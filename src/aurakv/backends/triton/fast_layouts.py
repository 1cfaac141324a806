"""Where the numbers of a tile lie: in shared memory as TMA leaves them, in registers as the tensor cores want them.

A unit is 16 bits of a row: four 4-bit codes. Lanes are 4g + c.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def key_unit_layout(tile, units):
    """Units of keys as the tensor cores want them: lane 4g + c holds of rows 8j + g the units 8c … 8c + 7 (mod 32), or
    4c … 4c + 3 of 16."""
    regs = [[0, 1], [0, 2], [0, 4], [0, 32]][: {16: 2, 32: 3, 64: 4}[units]] + [[8, 0], [16, 0], [32, 0]][
        : 2 if tile == 32 else 3
    ]
    lanes = [[0, 4], [0, 8]] if units == 16 else [[0, 8], [0, 16]]
    return gl.DistributedLinearLayout(regs, [*lanes, [1, 0], [2, 0], [4, 0]], [], [], [tile, units])


@gluon.constexpr_function
def key_layout(tile, units):
    """What `raw_scores` makes of key_unit_layout: lane 4g + c with units 4c … 4c + 3 of each 16."""
    regs = [[0, 1], [0, 2], [0, 16], [0, 32]][: {16: 2, 32: 3, 64: 4}[units]] + [[8, 0], [16, 0], [32, 0]][
        : 2 if tile == 32 else 3
    ]
    return gl.DistributedLinearLayout(regs, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [], [], [tile, units])


@gluon.constexpr_function
def shared_unit_layout(tile, units):
    """[tile, units] as TMA leaves it: lines of 128 bytes hold 1, 2 or 4 tokens, their 16-byte pieces swizzled."""
    line = {16: [[1, 0], [2, 0]], 32: [[1, 0]], 64: []}[units]  # tokens of a line
    pieces = [[0, 8], [0, 16], [0, 32]][: 3 - len(line)] + line
    bases = [[0, 1], [0, 2], [0, 4], *pieces]
    token = 1 << len(line)
    for i in range((tile // token - 1).bit_length()):
        twist = pieces[i] if i < 3 else [0, 0]
        bases.append([(token << i) + twist[0], twist[1]])
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.constexpr_function
def weight_layout(tile):
    """Weights by [m, g // 2, g % 2, c, r]: lane 4g + c holds tokens 16m + 8(g % 2) + 2c + r."""
    regs = [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]][: 2 if tile == 32 else 3]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [], [], [tile // 16, 4, 2, 4, 2])
