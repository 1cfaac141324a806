"""Reads of a tile from `tile_ring`: units of 16 bits and scales, into the layouts that the tensor cores want.

Inline assembly finds the address of a lane and reads all that is its own.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import key_unit_layout, value_unit_layout


@gluon.constexpr_function
def swizzled(at):
    """Where TMA leaves byte `at` of a box: the 16-byte pieces of a line of 128 exchanged by its number."""
    return at ^ (at >> 3 & 0x70)


@gluon.constexpr_function
def _reads(lanes, steps, load, registers):
    """$0 …: what `load` reads at each of `steps`. ${registers}: where the tile begins.

    lanes: (bit, count, bytes): that many bits of the lane from `bit` on, times bytes, are where it reads. Exchanging is
    linear over bits: what a step shares no bit of with lanes is added afterwards."""
    lines = ["{ .reg .b32 l, t, a;", "mov.u32 l, %laneid;", "mov.b32 a, 0;"]
    mine = 0
    for bit, count, size in lanes:
        mine |= swizzled(((1 << count) - 1) * size)
        lines += [f"bfe.u32 t, l, {bit}, {count};", f"mad.lo.u32 a, t, {size}, a;"]
    lines += ["shr.u32 t, a, 3;", "lop3.b32 a, t, 0x70, a, 0x6A;"]  # a ^ (t & 0x70)
    mine |= 0x70
    common = sorted({swizzled(step) & mine for step in steps})
    for i in range(len(common)):
        lines += [f".reg .b32 b{i};", f"xor.b32 b{i}, a, {common[i]};", f"add.u32 b{i}, b{i}, ${registers};"]
    each = registers // len(steps)
    for i in range(len(steps)):
        some = ", ".join([f"${n}" for n in range(each * i, each * i + each)])
        at = swizzled(steps[i])
        lines.append(f"{load} {{{some}}}, [b{common.index(at & mine)}+{at & ~mine}];")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _operands(registers):
    return ",".join(["=&r"] * registers + ["r"] * (2 * registers))


@gluon.constexpr_function
def _key_reads(tile, units):
    """As in `key_unit_layout`: lane 4g + c has 8 or 16 bytes c of rows 8j + g, again every 64 bytes."""
    size = min(16, units // 2)
    steps = [16 * j * units + wide for j in range(tile // 8) for wide in range(0, 2 * units, 64)]
    return _reads([(0, 2, size), (2, 3, 2 * units)], steps, f"ld.shared.v{size // 4}.b32", tile * units // 64)


@gluon.constexpr_function
def _value_reads(tile, units):
    """As in `value_unit_layout`: lane 8i + r has row r of matrix i, of tokens r + 8·(i // 2), 16 bytes i % 2."""
    steps = [32 * k * units + 32 * m for m in range(units // 16) for k in range(tile // 16)]
    lanes = [(0, 3, 2 * units), (3, 1, 16), (4, 1, 16 * units)]
    return _reads(lanes, steps, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", tile * units // 64)


@gluon.jit
def read_keys(at, TILE: gl.constexpr, U: gl.constexpr):
    """Units of keys [TILE, U] at a multiple of 1024, in `key_unit_layout`."""
    return gl.inline_asm_elementwise(
        _key_reads(TILE, U), _operands(TILE * U // 64), [gl.full([TILE, U], at, gl.int32, key_unit_layout(TILE, U))],
        dtype=gl.int16, is_pure=False, pack=TILE * U // 32)  # fmt: skip


@gluon.jit
def read_values(at, TILE: gl.constexpr, U: gl.constexpr):
    """Units of values, transposed: [U, TILE], in `value_unit_layout`."""
    return gl.inline_asm_elementwise(
        _value_reads(TILE, U), _operands(TILE * U // 64),
        [gl.full([U, TILE], at, gl.int32, value_unit_layout(TILE, U))],
        dtype=gl.int16, is_pure=False, pack=TILE * U // 32)  # fmt: skip


@gluon.constexpr_function
def _scales(registers, heads, turned):
    """$0 …: two scales each, of tokens 8j + g and 8j + 8 + g for lane 4g + c where turned; else, of 4 heads, 2c and
    2c + 1 of octet 2i + g % 2, of 8 heads those of octet i. The octets are rows of 8×8 matrices."""
    lines = ["{ .reg .b32 l, a;", "mov.u32 l, %laneid;", "shr.u32 a, l, 3;"]
    if heads == 4:
        lines += ["and.b32 l, l, 1;", "mad.lo.u32 a, a, 2, l;"]
    lines += [f"mad.lo.u32 a, a, 16, ${registers};"]
    for i in range(0, registers, 4):
        some = [f"${n}" for n in range(i, min(i + 4, registers))]
        how = f"x{len(some)}{'.trans' if turned else ''}"
        lines.append(f"ldmatrix.sync.aligned.m8n8.{how}.shared.b16 {{{', '.join(some)}}}, [a+{16 * i}];")
    return "\n".join([*lines, "}"])


@gluon.jit
def read_scales(at, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, TILE: gl.constexpr, HEADS: gl.constexpr,
                TURNED: gl.constexpr):  # fmt: skip
    """The scales of a tile as weights (or where TURNED, scores of 4 heads) are laid out."""
    REGISTERS: gl.constexpr = TILE // 16 if HEADS == 4 else TILE // 8
    return gl.inline_asm_elementwise(
        _scales(REGISTERS, HEADS, TURNED), _operands(REGISTERS), [gl.full(SHAPE, at, gl.int32, LAYOUT)],
        dtype=gl.float16, is_pure=False, pack=2 * REGISTERS)  # fmt: skip


@gluon.constexpr_function
def _wide_scales(tile, heads):
    """$0 …: float32 scales of tokens 8j + g for lane 4g + c of 4 heads, of 8 heads those of 8j + 2c, 8j + 2c + 1."""
    each = 1 if heads == 4 else 2
    count = tile // 8 * each
    lines = ["{ .reg .b32 a;", "mov.u32 a, %laneid;", "shr.u32 a, a, 2;" if heads == 4 else "and.b32 a, a, 3;"]
    lines += [f"mad.lo.u32 a, a, {4 * each}, ${count};"]
    for j in range(tile // 8):
        names = f"${j}" if each == 1 else f"{{${2 * j}, ${2 * j + 1}}}"
        lines.append(f"ld.shared.{'' if each == 1 else 'v2.'}b32 {names}, [a+{32 * j}];")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _wide_operands(count):
    return ",".join(["=&r"] * count + ["r"] * count)


@gluon.jit
def read_wide_scales(at, LAYOUT: gl.constexpr, TILE: gl.constexpr, HEADS: gl.constexpr):
    """float32 scales of a tile, as scores are laid out."""
    COUNT: gl.constexpr = TILE // 8 if HEADS == 4 else TILE // 4
    return gl.inline_asm_elementwise(
        _wide_scales(TILE, HEADS), _wide_operands(COUNT), [gl.full([TILE], at, gl.int32, LAYOUT)],
        dtype=gl.float32, is_pure=False, pack=COUNT)  # fmt: skip


@gluon.constexpr_function
def octet_layout(tile, n):
    """[octets of tokens, 8, 4, n]: lane 4g + c has [:, g, c, :]."""
    regs = [[0, 0, 0, 1 << i] for i in range((n - 1).bit_length())]
    regs += [[1 << i, 0, 0, 0] for i in range((tile // 8 - 1).bit_length())]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [], [], [tile // 8, 8, 4, n])


@gluon.constexpr_function
def octet_slice(tile, n, dim):
    """The layout of one dimension of `octet_layout`."""
    layout = octet_layout(tile, n)
    for other in (3, 2, 1, 0):
        layout = gl.SliceLayout(other, layout) if other != dim else layout
    return layout


@gluon.jit
def octets_of(first, SIZE: gl.constexpr, ROW: gl.constexpr, TILE: gl.constexpr, N: gl.constexpr):
    """Addresses of SIZE bytes of each lane in rows of ROW bytes, of each octet of tokens, N times: [octets, 8, 4, N].
    first: that of lane 0."""
    octet = gl.arange(0, TILE // 8, layout=octet_slice(TILE, N, 0))
    g = gl.arange(0, 8, layout=octet_slice(TILE, N, 1))
    c = gl.arange(0, 4, layout=octet_slice(TILE, N, 2))
    n = gl.arange(0, N, layout=octet_slice(TILE, N, 3))
    lane = first + ROW * g[None, :, None, None] + SIZE * c[None, None, :, None]
    return lane + (8 * ROW * octet[:, None, None, None] + 0 * n[None, None, None, :])


@gluon.jit
def lane_rows(tile, BLOCK: gl.constexpr, BITS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, N: gl.constexpr):
    """Where each lane has its words of the BLOCK-th 128 codes of each octet of tokens, N times: [octets, 8, 4, N]."""
    return octets_of(tile + 16 * BITS * BLOCK, 4 * BITS, DIM * BITS // 8, TILE, N)


@gluon.jit
def in_octets(x):
    """A constant [1, 1] of `octet_slice` beside tensors of `octet_layout`."""
    return gl.expand_dims(gl.expand_dims(x, 1), 2)
