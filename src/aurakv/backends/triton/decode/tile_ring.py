"""The ring of tiles: shared memory of its own, which Triton does not know, and the copies into it.

Triton's copies take no cache hints. These do: their lines are the first to leave L2, because a step reads them once,
and what others keep there, or have yet to write to memory, stays. Codes of 2, 4 and 8 bits and their scales come by TMA
in lines of 128 bytes whose pieces of 16 it exchanges, so that reads have no bank conflicts (`reads.swizzled`).
Flat rows (`shapes`) lie as in memory: bulk copies, without padding; of 128 codes of 3, 5 or 6 bits a lane reads 32, 12,
20 or 24 bytes from its neighbour. Scales of float32, and those beside a flat side, come by bulk copies, too.

GPUs before Hopper have neither: `lane_copies` fills the same ring there.

First come the boxes of all slots (the codes that travel by TMA, keys before values), then the rest of all slots, then
their barriers. Boxes are multiples of 1024, as exchanging needs it.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shapes import flat


class Slot(NamedTuple):
    """Constexpr: where the parts of a tile begin, those of TMA in its box and others in the rest of its slot."""

    keys: int
    key_scales: int
    values: int
    value_scales: int
    box: int  # bytes
    rest: int
    copies: int  # arrivals at its barrier
    boxed: bool  # the scales come by TMA, too


@gluon.constexpr_function
def make_slot(key_bits, value_bits, dim, tile, one, key_scale=2, value_scale=2):
    """one: pages are tiles, so that all parts are one copy where both sides are flat. key_scale, value_scale: bytes."""
    lies = [flat(bits, dim) for bits in (key_bits, value_bits)]
    codes = [tile * dim * bits // 8 for bits in (key_bits, value_bits)]
    sizes = [codes[0] * lies[0], key_scale * tile, codes[1] * lies[1], value_scale * tile]
    key_scales, values, value_scales, rest = (sum(sizes[:i]) for i in range(1, 5))
    box = codes[0] * (not lies[0]) + codes[1] * (not lies[1])
    if not lies[1]:
        values = codes[0] * (not lies[0])
    boxed = not any(lies) and key_scale == value_scale == 2
    copies = 1 if boxed or (one and all(lies)) else sum(size > 0 for size in sizes) + (not all(lies))
    return Slot(0, key_scales, values, value_scales, box, rest, copies, boxed)


@gluon.constexpr_function
def after_tiles(size, stages):
    """Where a ring of slots of so many bytes has room behind tiles and barriers, for queries."""
    return -(-((size + 8) * stages) // 16) * 16


@gluon.constexpr_function
def _open(slot, stages, bulk, more, clear):
    """$0: the address of the ring. more: bytes behind it. clear: it is zero at first."""
    end = (slot.box + slot.rest) * stages
    size = after_tiles(slot.box + slot.rest, stages) + more if more else end + 8 * stages * bulk
    size = -(-size // (512 if clear else 128)) * (512 if clear else 128)
    lines = [f"{{ .shared .align 1024 .b8 ring[{size}];", ".reg .pred one;"]
    if clear:
        lines += [".reg .b32 a, zero;", "mov.b32 zero, 0;", "mov.u32 a, %laneid;", "shl.b32 a, a, 4;"]
        lines += [".reg .b32 begin;", "mov.u32 begin, ring;", "add.u32 a, a, begin;"]
        lines += [f"st.shared.v4.b32 [a+{at}], {{zero, zero, zero, zero}};" for at in range(0, size, 512)]
        lines += ["bar.warp.sync 0xffffffff;"]
    if bulk:
        lines += ["elect.sync _|one, 0xffffffff;"]
        lines += [f"@one mbarrier.init.shared::cta.b64 [ring+{end + 8 * i}], {slot.copies};" for i in range(stages)]
        lines += ["fence.proxy.async.shared::cta;", "bar.warp.sync 0xffffffff;"]
    return "\n".join([*lines, "mov.u32 $0, ring; }"])


# Every lane has read what was there before; one starts copies whose lines leave L2 first.
_BEGIN = """{ .reg .pred one; .reg .b64 hint, keys, values, scales;
bar.warp.sync 0xffffffff;
elect.sync _|one, 0xffffffff;
createpolicy.fractional.L2::evict_first.b64 hint, 1.0;"""

# $1: from; $2: bytes; $3: to; $4: barrier
_COPY = gl.constexpr(
    _BEGIN
    + """
@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $2;
@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$3], [$1], $2, [$4], hint;
mov.b32 $0, 0; }"""
)

_WAIT = gl.constexpr("""{ .reg .pred done;
again: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
@!done bra.uni again;
mov.b32 $0, 0; }""")


# The descriptors are the first parameters of `decode_attention`, with 4, 4 and 3 sizes and strides: their addresses,
# each under its name.
DESCRIPTORS = {"keys": 0, "values": 9, "scales": 18}
_FIND = "\n".join(
    f"mov.b64 {name}, decode_attention_param_{number};\ncvta.param.u64 {name}, {name};"
    for name, number in DESCRIPTORS.items()
)

_PREFETCH = gl.constexpr(
    "\n".join([
        f"{{ .reg .b64 {', '.join(DESCRIPTORS)};", _FIND, *(f"prefetch.tensormap [{name}];" for name in DESCRIPTORS),
        "mov.b32 $0, $1; }",
    ])
)  # fmt: skip


@gluon.constexpr_function
def _copy_boxes(slot, key_bits, value_bits, dim, tile):
    """$1: piece; $2 $3: lines of the keys and of the values; $4: token; $5: box; $6: rest of the slot; $7: barrier."""
    scales = slot.boxed
    size = slot.box + scales * 4 * tile
    how = "shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
    lines = [_BEGIN, f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$7], {size};", _FIND]
    lines += [".reg .b32 zero, at;", "mov.b32 zero, 0;"]
    if scales:
        lines.append(f"@one cp.async.bulk.tensor.3d.{how} [$6], [scales, {{$4, zero, $1}}], [$7], hint;")
    if not flat(key_bits, dim):  # with the values, where both have as many bits
        lines.append(f"@one cp.async.bulk.tensor.4d.{how} [$5], [keys, {{zero, $2, zero, $1}}], [$7], hint;")
    if not flat(value_bits, dim) and value_bits != key_bits:
        lines.append(f"add.u32 at, $5, {slot.values};")
        lines.append(f"@one cp.async.bulk.tensor.4d.{how} [at], [values, {{zero, $3, zero, $1}}], [$7], hint;")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.jit
def open_ring(SLOT: gl.constexpr, STAGES: gl.constexpr, BULK: gl.constexpr, MORE: gl.constexpr, CLEAR: gl.constexpr):
    """The address of the ring, if BULK its barriers ready. Once for each program. MORE: bytes behind it. CLEAR: copies
    may leave parts of it as they are, which are read all the same."""
    ASM: gl.constexpr = _open(SLOT, STAGES, BULK, MORE, CLEAR)
    return gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch_descriptors():
    """Ask for them before they are used."""
    gl.inline_asm_elementwise(_PREFETCH, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def places(ring, slot, SLOT: gl.constexpr, STAGES: gl.constexpr):
    """Where a slot has its box, its rest and its barrier."""
    rest = ring + SLOT.box * STAGES
    return ring + SLOT.box * slot, rest + SLOT.rest * slot, rest + SLOT.rest * STAGES + 8 * slot


@gluon.jit
def copy(source, size, target, bar):
    gl.inline_asm_elementwise(_COPY, "=r,l,r,r,r", [source, size, target, bar], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_boxes(piece, row, box, rest, bar, SLOT: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr,
               DIM: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Start the copies of what travels by TMA."""
    ASM: gl.constexpr = _copy_boxes(SLOT, KEY_BITS, VALUE_BITS, DIM, TILE)
    lines = (row * (DIM * KEY_BITS // 16) // 64, row * (DIM * VALUE_BITS // 16) // 64)
    gl.inline_asm_elementwise(
        ASM, "=r,r,r,r,r,r,r,r", [piece, lines[0], lines[1], row, box, rest, bar],
        dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def pieces_of(count, SIZE: gl.constexpr):
    """Pieces of 16 bytes that `count` rows of SIZE bytes need."""
    if SIZE % 16 == 0:
        return count * (SIZE // 16)
    elif 16 % SIZE == 0:
        return (count + (16 // SIZE - 1)) // (16 // SIZE)
    else:
        return (count * (SIZE // 2) + 7) // 8


@gluon.jit
def copy_side(side, row, count, page_size, codes, scales, bar, BITS: gl.constexpr, SCALE: gl.constexpr,
              DIM: gl.constexpr):  # fmt: skip
    """Start the copies of `count` tokens of a side whose codes begin at `side` (int16); codes only if flat. SCALE:
    bytes of a scale."""
    UNITS: gl.constexpr = DIM * BITS // 16
    if flat(BITS, DIM):
        copy(side + row * UNITS, pieces_of(count, 2 * UNITS) * 16, codes, bar)
    copy(scales_of(side, page_size, UNITS) + row * (SCALE // 2), pieces_of(count, SCALE) * 16, scales, bar)


@gluon.jit
def scales_of(side, page_size, UNITS: gl.constexpr):
    """Where the scales of a side begin, behind its codes."""
    if UNITS % 8 == 0:
        return side + page_size * UNITS
    else:
        return side + (page_size * UNITS + 7) // 8 * 8


@gluon.jit
def wait_for(bar, phase):
    """Wait for the copies into a slot."""
    gl.inline_asm_elementwise(_WAIT, "=r,r,r", [bar, phase], dtype=gl.int32, is_pure=False, pack=1)
