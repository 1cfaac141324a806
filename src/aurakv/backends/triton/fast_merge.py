"""The second kernel of the fast decode path: pieces of heads to results.

In: pieces and lses as `fast_decode` leaves them; lengths, ends as there; sinks: learned logits [heads] if SINKS.
Out: out [seqs, heads, DIM] in its dtype, lse_out float32 [seqs, heads], natural logarithm.
The launcher guarantees: the same programs, scan and TILE as for `fast_decode`; launched to overlap its end.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .fast_primitives import hadamard
from .fast_schedule import seen


@gluon.jit
def fast_merge(
    pieces, lses, out, lse_out, sinks, signs, lengths, ends,
    seqs, kv_heads, first, recent, window, programs, out_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, SEQS: gl.constexpr, CLIP: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr, CHUNK: gl.constexpr, HEADS: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Put the pieces of HEADS query heads of a KV head together, CHUNK at a time, and rotate the results back.

    signs: value signs / √DIM. ACROSS of the warps share the pieces, the others the heads."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 1, DIM // 32], [1, 1, 32], [ACROSS, WARPS // ACROSS, 1], [2, 1, 0])
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    COORDINATE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    OUT: gl.constexpr = gl.SliceLayout(0, layout)  # [head, coordinate]
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    ALL: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    )  # the same in each warp
    SCAN: gl.constexpr = (CLIP, WINDOW, TILE)
    scan = (first, recent, window)
    pair = gl.program_id(0)
    seq = pair // kv_heads
    head0 = (pair - seq * kv_heads) * GROUP
    o_seq = gl.arange(0, SEQS, layout=ALL)
    _, _, b_t0, b_t1 = seen(gl.minimum(o_seq, seqs - 1), ends, lengths, scan, SCAN)
    b_tiles = gl.where(o_seq < seqs, b_t1 - b_t0, 0)
    total = gl.sum(b_tiles, 0) * kv_heads
    before = gl.sum(gl.where(o_seq < seq, b_tiles, 0), 0) * kv_heads
    tiles = gl.sum(gl.where(o_seq == seq, b_tiles, 0), 0)
    start = before + (pair - seq * kv_heads) * tiles
    last = start + gl.maximum(tiles, 1) - 1
    each = total // programs
    extra = total - each * programs
    cut = extra * (each + 1)  # up to here programs have one tile more
    p0 = gl.where(start < cut, start // (each + 1), extra + (start - cut) // gl.maximum(each, 1))
    p1 = gl.where(last < cut, last // (each + 1), extra + (last - cut) // gl.maximum(each, 1))
    count = gl.where(tiles > 0, p1 - p0 + 1, 0)

    o_row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    member = gl.program_id(1) * HEADS + gl.arange(0, HEADS, layout=HEAD)
    m_head = member < GROUP
    d = gl.arange(0, DIM, layout=COORDINATE)
    b_sign = gl.load(signs + d)
    if SINKS:
        top = gl.load(sinks + head0 + member, mask=m_head, other=0.0).to(gl.float32) * 1.4426950408889634
        mass = gl.where(top == -float("inf"), 0.0, 1.0)
    else:
        top = gl.full([HEADS], -float("inf"), gl.float32, HEAD)
        mass = gl.zeros([HEADS], gl.float32, HEAD)
    b_out = gl.zeros([HEADS, DIM], gl.float32, OUT)
    gdc_wait()
    for i in range(0, count, CHUNK):
        row = i + o_row
        piece = gl.where(row == 0, 2 * p0 + 1, 2 * (p0 + row))
        piece = gl.where(count == 1, 2 * programs + pair, piece)
        index = piece[:, None] * GROUP + member[None, :]
        m_piece = (row < count)[:, None] & m_head[None, :]
        b_lse = gl.load(lses + index, mask=m_piece, other=-float("inf"))
        m_piece = gl.expand_dims(m_piece, 2) & (d >= 0)[None, None, :]
        b_piece = gl.load(pieces + gl.expand_dims(index, 2) * DIM + d[None, None, :], mask=m_piece, other=0.0)
        new = gl.maximum(top, gl.max(b_lse, 0))
        old = gl.where(top == new, 1.0, gl.exp2(top - new))
        weight = gl.where(b_lse == -float("inf"), 0.0, gl.exp2(b_lse - new[None, :]))
        mass = mass * old + gl.sum(weight, 0)
        b_out = b_out * gl.convert_layout(old, ROW)[:, None] + gl.sum(b_piece * gl.expand_dims(weight, 2), 0)
        top = new
    inverse = gl.where(mass == 0.0, 0.0, 1.0 / mass)
    b_out = b_out * gl.convert_layout(inverse, ROW)[:, None]
    b_out = b_out + (b_out - b_out)  # an infinity is damage: NaN
    y = hadamard(b_out, HEADS, DIM) * gl.convert_layout(b_sign, COLUMN)[None, :]
    o_head = gl.convert_layout(member, ROW)[:, None]
    o_column = gl.convert_layout(d, COLUMN)[None, :]
    p_out = out + seq * out_stride + (head0 + o_head) * DIM + o_column
    gl.store(p_out, y.to(out.dtype.element_ty), mask=(o_head < GROUP) & (o_column >= 0))
    p_lse = lse_out + seq * (kv_heads * GROUP) + head0 + member
    gl.store(p_lse, (top + gl.log2(mass)) * 0.6931471805599453, mask=m_head)
