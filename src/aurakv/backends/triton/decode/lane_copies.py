"""Tiles that travel without TMA: every lane copies 16 bytes at a time into the ring, past the registers (cp.async).

The ring and its slots are those of `tile_ring`, with the same exchange of 16-byte pieces, but no barriers: the copies
of a tile are a group of each lane, and groups end in the order in which they began. A tile may consist of several
pages, a run of tokens each.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .reads import swizzled
from .shapes import flat
from .tile_ring import pieces_of, scales_of

LINE = 512  # bytes that the lanes of a warp copy at once

_MEET = gl.constexpr("bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;")
_COMMIT = gl.constexpr("cp.async.commit_group;\nmov.b32 $0, $1;")


@gluon.constexpr_function
def _wait(pending):
    """Until all groups but the last `pending` of every lane have arrived."""
    return f"cp.async.wait_group {pending};\nbar.warp.sync 0xffffffff;\nmov.b32 $0, $1;"


@gluon.constexpr_function
def _copies(begin, size, exchanged, aligned, guarded):
    """$1: from; $2: where a part of the slot lies, of which bytes begin … begin + size − 1 are copied; $3: pieces of 16
    bytes that there are, if guarded. Their lines leave L2 first. aligned: $2 shares no bit with where lanes copy to.

    No target is a sum in the end: from a sum of a lane's and a uniform register, ptxas 12.8 makes, where a copy has a
    hint, an instruction that GPUs refuse as illegal."""
    lines = ["{ .reg .b32 lane, mine, t, left; .reg .b64 from, hint; .reg .pred some;"]
    lines += ["mov.u32 lane, %laneid;", "shl.b32 mine, lane, 4;", "cvt.u64.u32 from, mine;", "add.u64 from, from, $1;"]
    lines += ["createpolicy.fractional.L2::evict_first.b64 hint, 1.0;"]
    if exchanged:  # as `reads.swizzled` has it, of the lane's part alone: exchanging is linear over bits
        lines += ["shr.u32 t, mine, 3;", "lop3.b32 mine, t, 0x70, mine, 0x6A;"]
    if guarded:
        lines += ["sub.s32 left, $3, lane;"]
    known = {}
    for at in range(begin, begin + size, LINE):
        to = swizzled(at) if exchanged else at
        low = to & (LINE - 1) if exchanged else 0
        if low not in known:
            known[low] = f"to{len(known)}"
            lines.append(f".reg .b32 {known[low]};")
            if aligned:
                lines.append(f"lop3.b32 {known[low]}, mine, {low}, $2, 0x96;")
            else:
                lines += ["add.u32 t, mine, $2;", f"max.s32 {known[low]}, t, 0;"]
        condition = ""
        if guarded:
            lines.append(f"setp.gt.s32 some, left, {(at - begin) // 16};")
            condition = "@some "
        elif begin + size - at < LINE:
            lines.append(f"setp.lt.u32 some, lane, {(begin + size - at) // 16};")
            condition = "@some "
        where = f"[{known[low]}+{to - low}], [from+{at - begin}]"
        lines.append(f"{condition}cp.async.cg.shared.global.L2::cache_hint {where}, 16, hint;")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.jit
def meet_lanes():
    """Every lane has read what it had to read before any goes on."""
    gl.inline_asm_elementwise(_MEET, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_group():
    """What was copied since the last time is a group."""
    gl.inline_asm_elementwise(_COMMIT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_groups(PENDING: gl.constexpr):
    """Wait for all groups but the last PENDING."""
    ASM: gl.constexpr = _wait(PENDING)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_run(source, target, pieces, BEGIN: gl.constexpr, SIZE: gl.constexpr, EXCHANGED: gl.constexpr,
             ALIGNED: gl.constexpr, GUARDED: gl.constexpr):  # fmt: skip
    ASM: gl.constexpr = _copies(BEGIN, SIZE, EXCHANGED, ALIGNED, GUARDED)
    gl.inline_asm_elementwise(
        ASM, "=r,l,r,r", [source, target, pieces], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def copy_side_run(side, row, page_size, codes, scales, RUN: gl.constexpr, NUMBER: gl.constexpr, BITS: gl.constexpr,
                  SCALE: gl.constexpr, DIM: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """Start the copies of RUN tokens from `row` on of a side of a page that begins at `side` (int16): the NUMBER-th run
    of a tile whose codes and scales have their places in the ring. SCALE: bytes of a scale. Not WHOLE: the page may end
    before."""
    UNITS: gl.constexpr = DIM * BITS // 16
    LINES: gl.constexpr = not flat(BITS, DIM)
    count = RUN if WHOLE else gl.minimum(RUN, page_size - row)
    copy_run(side + row * UNITS, codes, pieces_of(count, 2 * UNITS), NUMBER * RUN * 2 * UNITS, RUN * 2 * UNITS,
             LINES, LINES, not WHOLE)  # fmt: skip
    copy_run(
        scales_of(side, page_size, UNITS) + row * (SCALE // 2), scales, pieces_of(count, SCALE), NUMBER * RUN * SCALE,
        RUN * SCALE, False, SCALE == 2, not WHOLE)  # fmt: skip
