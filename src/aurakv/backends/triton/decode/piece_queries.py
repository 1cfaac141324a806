"""Queries beside keys that `pieces` reads: operands of the tensor cores in shared memory, behind the ring of tiles.

A plane is one product: 32 coordinates as int8, or 16 as float16. In it a lane has 8 bytes for columns of 4 heads
(head · 2 + part), 16 for each 8 heads (part · 8 + head), in the order of its registers, and reads them with one load
for every tile. A coordinate's place follows from that of its code: lane c of its piece, and where its register has it.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pieces import first_of, lane_of, piece_count, reach
from .shapes import order, padded


@gluon.constexpr_function
def _store(size):
    return f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b{size} [$1], $2; mov.b32 $0, 0; }}"


@gluon.constexpr_function
def _load(words):
    """$0 …: what a lane has at the address behind them."""
    names = ", ".join(f"${i}" for i in range(words))
    return f"{{ .reg .b32 a; mov.u32 a, %laneid; mad.lo.u32 a, a, {4 * words}, ${words};\n" + (
        f"ld.shared.v{words}.b32 {{{names}}}, [a+0]; }}"
    )


@gluon.constexpr_function
def _operands(words, inputs):
    return ",".join(["=&r"] * words + ["r"] * inputs)


@gluon.constexpr_function
def query_bytes(dim, bits, heads):
    return reach(dim) * 2 * heads * (2 if bits > 4 else 1)


@gluon.jit
def natural(d, DIM: gl.constexpr):
    """The coordinate at place d of a padded vector; from DIM on those that are none."""
    RUN: gl.constexpr = order(DIM)
    PAD: gl.constexpr = padded(DIM) // (DIM // RUN)
    if RUN == 1:
        return d
    else:
        run = d // PAD
        inside = d % PAD
        return gl.where(inside < RUN, run * RUN + inside, DIM + run * (PAD - RUN) + inside - RUN)


@gluon.jit
def load_coordinates(numbers, i, mask, other, DIM: gl.constexpr):
    """Numbers of coordinates i, of which a padded vector has some that are none."""
    if padded(DIM) > DIM:
        return gl.load(numbers + i, mask=mask, other=other)
    else:
        return gl.load(numbers + i)


@gluon.jit
def place(i, BITS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Where coordinates i of head 0 and its first part go, from the first plane on."""
    at = 0 * i
    for n in gl.static_range(piece_count(DIM)):
        at = gl.where(i >= first_of(DIM, n), place_in(i, first_of(DIM, n), lane_of(DIM, n), BITS, HEADS), at)
    return at


@gluon.jit
def place_in(i, START: gl.constexpr, CODES: gl.constexpr, BITS: gl.constexpr, HEADS: gl.constexpr):
    """The same in a piece."""
    lane = (i - START) // CODES
    code = (i - START) % CODES
    if BITS > 4:  # a register has codes m and m + CODES / 2
        m = code % (CODES // 2)
        plane = START // 16 + m // 2
        register = m % 2
        byte = code // (CODES // 2) * 2
    else:
        plane = START // 32 + code // 8
        register = code % 8 // 4
        byte = code % 4
    return plane * (HEADS * 64) + lane * (8 if HEADS == 4 else 16) + register * (4 if HEADS == 4 else 8) + byte


@gluon.jit
def store_parts(high, low, at, BITS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Parts of rotated queries [HEADS, padded], as integers or as bits of float16 numbers, to the planes at `at`."""
    layout: gl.constexpr = high.type.layout
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    i = natural(gl.arange(0, padded(DIM), layout=gl.SliceLayout(0, layout)), DIM)
    if HEADS == 4:
        row = h * 64
        PART: gl.constexpr = 32
    else:
        row = h // 8 * 512 + h % 8 * 64
        PART: gl.constexpr = 4
    to = at + place(i, BITS, HEADS, DIM)[None, :] + row[:, None]
    some = (i < reach(DIM)).to(gl.int32)[None, :]
    ASM: gl.constexpr = _store(16 if BITS > 4 else 8)
    gl.inline_asm_elementwise(ASM, "=r,r,r,r", [to, high, some], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(ASM, "=r,r,r,r", [to + PART, low, some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_operand(at, PLANE: gl.constexpr, BITS: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    """A plane of the queries at `at`, as `keys.multiply` takes it."""
    K: gl.constexpr = 16 if BITS > 4 else 32
    first = at + PLANE * (HEADS * 64)
    if HEADS == 4:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=K // 8)
        where = gl.full([K, 8], first, gl.int32, layout)
        WORDS: gl.constexpr = 2
    else:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=K // 8)
        row = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(1, layout))
        k = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
        where = first + (row // 16 * 512)[:, None] + 0 * k[None, :]
        WORDS: gl.constexpr = 4
    PACK: gl.constexpr = WORDS * K // 8
    if BITS > 4:
        return gl.inline_asm_elementwise(
            _load(WORDS), _operands(WORDS, PACK), [where], dtype=gl.float16, is_pure=False, pack=PACK
        )
    else:
        return gl.inline_asm_elementwise(
            _load(WORDS), _operands(WORDS, PACK), [where], dtype=gl.int8, is_pure=False, pack=PACK
        )
