"""The ring of tiles where keys or values have 3 bits: shared memory of its own, which Triton does not know.

Rows of 48 bytes fit no layout of Triton, whose sizes are powers of two. Here a tile lies as in memory: bulk copies of
whole sectors, no padding. Lane l reads the 96 bits of 32 codes at 12·l of eight rows, three words without a bank
conflict, by inline assembly that has the address from `open_ring`. A slot holds the parts of a tile in the order of a
page (codes of other widths travel by TMA); behind the slots are their barriers. The size is a multiple of 1024, so that
what Triton puts behind it is aligned as it expects.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROW = gl.constexpr(48)  # bytes


class Slot(NamedTuple):
    """Constexpr: where the parts of a tile begin in its slot, how many bytes there are, and how many copies."""

    keys: int
    key_scales: int
    values: int
    value_scales: int
    bytes: int
    copies: int


@gluon.constexpr_function
def make_slot(key_bits, value_bits, tile, one):
    """Without bytes where no side has 3 bits. one: pages are tiles, so that all parts are one where both sides have."""
    if 3 not in (key_bits, value_bits):
        return Slot(0, 0, 0, 0, 0, 0)
    sizes = [ROW.value * tile * (key_bits == 3), 2 * tile, ROW.value * tile * (value_bits == 3), 2 * tile]
    copies = 1 if one and key_bits == value_bits else sum(size > 0 for size in sizes)
    return Slot(*(sum(sizes[:i]) for i in range(5)), copies)


@gluon.constexpr_function
def _open(slot, stages):
    """$0: the address of the ring. Barriers count one arrival for each copy."""
    end = slot.bytes * stages
    lines = [f"{{ .shared .align 1024 .b8 ring[{-(-(end + 8 * stages) // 1024) * 1024}];", ".reg .pred one;"]
    lines += ["elect.sync _|one, 0xffffffff;"]
    lines += [f"@one mbarrier.init.shared::cta.b64 [ring+{end + 8 * i}], {slot.copies};" for i in range(stages)]
    return "\n".join([*lines, "fence.proxy.async.shared::cta;", "bar.warp.sync 0xffffffff;", "mov.u32 $0, ring; }"])


# $1: from; $2: bytes; $3: to; $4: barrier. Every lane has read what was there before.
_COPY = gl.constexpr("""{ .reg .pred one;
bar.warp.sync 0xffffffff;
elect.sync _|one, 0xffffffff;
@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $2;
@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$3], [$1], $2, [$4];
mov.b32 $0, 0; }""")

_WAIT = gl.constexpr("""{ .reg .pred done;
again: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
@!done bra.uni again;
mov.b32 $0, $3; }""")


@gluon.jit
def open_ring(SLOT: gl.constexpr, STAGES: gl.constexpr):
    """The address of the ring, its barriers ready. Once for each program."""
    ASM: gl.constexpr = _open(SLOT, STAGES)
    return gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy(source, size, target, bar):
    gl.inline_asm_elementwise(_COPY, "=r,l,r,r,r", [source, size, target, bar], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_side(side, row, count, page_size, codes, scales, bar, BITS: gl.constexpr, DIM: gl.constexpr):
    """Start the copies of `count` tokens of a side whose codes begin at `side` (int16); codes only of 3 bits."""
    UNITS: gl.constexpr = DIM * BITS // 16
    if BITS == 3:
        copy(side + row * UNITS, count * (2 * UNITS), codes, bar)
    copy(side + page_size * UNITS + row, (count + 7) // 8 * 16, scales, bar)


@gluon.jit
def wait_for(ring, slot, phase, SLOT: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the copies into a slot; its address."""
    return gl.inline_asm_elementwise(
        _WAIT, "=r,r,r,r", [ring + SLOT.bytes * STAGES + 8 * slot, phase, ring + SLOT.bytes * slot],
        dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


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


@gluon.constexpr_function
def _scale_operands(registers):
    return ",".join(["=&r"] * registers + ["r"] * (2 * registers))


@gluon.jit
def read_scales(at, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, TILE: gl.constexpr, HEADS: gl.constexpr,
                TURNED: gl.constexpr):  # fmt: skip
    """The scales of a tile as weights (or where TURNED, scores of 4 heads) are laid out."""
    REGISTERS: gl.constexpr = TILE // 16 if HEADS == 4 else TILE // 8
    return gl.inline_asm_elementwise(
        _scales(REGISTERS, HEADS, TURNED), _scale_operands(REGISTERS), [gl.full(SHAPE, at, gl.int32, LAYOUT)],
        dtype=gl.float16, is_pure=False, pack=2 * REGISTERS)  # fmt: skip


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
def triples(tile, TILE: gl.constexpr, N: gl.constexpr):
    """Where each lane has its three words of each octet of tokens, N times: [octets, 8, 4, N] int32."""
    octet = gl.arange(0, TILE // 8, layout=octet_slice(TILE, N, 0))
    g = gl.arange(0, 8, layout=octet_slice(TILE, N, 1))
    c = gl.arange(0, 4, layout=octet_slice(TILE, N, 2))
    n = gl.arange(0, N, layout=octet_slice(TILE, N, 3))
    lane = tile + (4 * ROW // 16) * (4 * g[None, :, None, None] + c[None, None, :, None])
    return lane + (8 * ROW * octet[:, None, None, None] + 0 * n[None, None, None, :])


@gluon.jit
def in_octets(x):
    """A constant [1, 1] of `octet_slice` beside tensors of `octet_layout`."""
    return gl.expand_dims(gl.expand_dims(x, 1), 2)
