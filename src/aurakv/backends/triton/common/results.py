"""Finishing results: merge splits, rotate back, add offsets and learned sinks.

In: `means` [rows, splits, columns] float32 in the rotated domain and `sums` [rows, splits], log2 of summed weights,
−inf where a split saw nothing. Out: out [rows, dim], lse [rows]. Constexprs: V (specialise.Side), UNIT what sums that
were rotated back are multiplied by, CHUNK coordinates rotated back at a time, G heads per KV head, ROWS.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....format.codec import Codec
from . import specialise
from .codes import INTERPRETED, cast
from .launcher import on

FEW_RESULTS = 0 if INTERPRETED.value else 2048  # up to this many get a program each when splits are merged
MANY_RESULTS = 16384  # from this many on 64 share a program

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_sink(top, total, logit):
    """Log2 of the largest weight and the sum relative to it, with one more key; and the share of the others."""
    logit = logit.to(tl.float32) * LOG2E
    m = tl.maximum(top, logit)
    base = tl.where(tl.abs(m) < float("inf"), m, 0.0)
    others = tl.where(total == 0, 0.0, total * tl.exp2(top - base))  # nothing visible: top is −inf
    whole = others + tl.exp2(logit - base)
    infinite = (logit == float("inf")) & (total == total)
    whole = tl.where(logit == logit, tl.where(infinite, float("inf"), whole), float("nan"))
    share = tl.where(infinite | (others == 0), 0.0, others / whole)
    return base, whole, tl.where(whole == whole, share, float("nan"))


@triton.jit
def unrotate_store(
    p_out,
    m_row,
    mean,
    share,
    p_matrix,
    p_offset,
    offset_share,
    UNIT: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """share · Rᵀ mean + offset_share · offset of rows [rows, columns] to p_out [rows]; values of 16 bits have no R."""
    if V.bits == 16:
        o_coordinate = tl.arange(0, V.columns)
        m = m_row[:, None] & (o_coordinate < V.dim)[None, :]
        y = mean * share[:, None]
        tl.store(p_out[:, None] + o_coordinate[None, :], cast(y, p_out.dtype.element_ty), mask=m)
    else:
        o_chunk = tl.arange(0, CHUNK)
        o_column = tl.arange(0, V.columns)
        HALVES: tl.constexpr = V.operand == tl.float16 and mean.shape[0] >= 16  # each number as the sum of two
        if HALVES:
            peak = tl.max(tl.abs(mean), 1)
            peak = tl.where((peak > 0) & (peak < float("inf")), peak, 1.0)
            mean = mean * (1.0 / peak)[:, None]
            rough = mean.to(tl.float16)
            rest = (mean - rough.to(tl.float32)).to(tl.float16)
            share = share * peak
        for c in range(0, V.dim, CHUNK):
            b_matrix = tl.load(p_matrix + o_column[:, None] * V.dim + (c + o_chunk)[None, :])
            if HALVES:
                y = tl.dot(rough, b_matrix, tl.dot(rest, b_matrix))
            elif mean.shape[0] < 16:
                y = tl.sum(mean[:, :, None] * b_matrix.to(tl.float32)[None, :, :], 1)
            else:
                y = tl.dot(mean, b_matrix.to(tl.float32), input_precision="tf32x3")
            y *= (share * UNIT)[:, None]
            if p_offset is not None:
                y += offset_share[:, None] * tl.load(p_offset[:, None] + (c + o_chunk)[None, :])
            p = p_out[:, None] + (c + o_chunk)[None, :]
            tl.store(p, cast(y, p_out.dtype.element_ty), mask=m_row[:, None])


@triton.jit(do_not_specialize=["n", "splits"])
def finish_kernel(
    means,
    sums,
    value_matrix,
    value_offset,
    sink_logits,
    out,
    lse,
    n,
    splits,
    heads,
    G: tl.constexpr,
    V: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SOME: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the splits of n = tokens·heads rows, rotate back, add learned sinks.

    SPLITS: a power of two ≥ splits, of which SOME are read at a time."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n
    head = (o_row % heads).to(tl.int32)
    o_split = tl.arange(0, SPLITS)
    m_split = m_row[:, None] & (o_split < splits)[None, :]
    b_sums = tl.load(sums + o_row[:, None] * splits + o_split[None, :], mask=m_split, other=float("-inf"))
    top = tl.max(b_sums, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(b_sums - base[:, None]), 1)
    COLUMNS: tl.constexpr = V.columns
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    o_column = tl.arange(0, V.columns)
    for i in range(0, splits, SOME):
        o_some = i + tl.arange(0, SOME)
        o_part = o_row[:, None] * splits + o_some[None, :]
        m_some = m_row[:, None] & (o_some < splits)[None, :]
        b_sum = tl.load(sums + o_part, mask=m_some, other=float("-inf"))
        m_some = m_some & ~(b_sum == float("-inf"))  # what no key contributed to was never written
        p = means + o_part[:, :, None] * V.columns + o_column[None, None, :]
        b_mean = tl.load(p, mask=m_some[:, :, None], other=0)
        weight = tl.where(m_some, tl.exp2(b_sum - base[:, None]), 0.0)
        mean += tl.sum(b_mean * weight[:, :, None], 1)
    mean = mean * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    share = tl.where(total == 0, 0.0, 1.0)
    if sink_logits is not None:
        base, total, share = add_sink(base, total, tl.load(sink_logits + head, mask=m_row, other=0))
    p_offset = None
    if value_offset is not None:
        p_offset = value_offset + (head // G) * V.dim
    unrotate_store(out + o_row * V.dim, m_row, mean, share, value_matrix, p_offset, share, UNIT, V, CHUNK)
    tl.store(lse + o_row, (base + tl.log2(total)) * LN2, mask=m_row)


def finish(
    means: Tensor,
    sums: Tensor,
    codec: Codec,
    float32: bool,
    offset: Tensor | None,
    sink_logits: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kv_heads: int,
    splits: int,
) -> None:
    """Launch finish_kernel for out [tokens, heads, dim]."""
    n, heads = lse.numel(), lse.shape[1]
    how = specialise.side(codec, float32, out.dtype)
    matrix = specialise.matrix(codec, torch.float16, out.device, transposed=True) if codec.coded else None
    padded = triton.next_power_of_2(splits)
    rows = 1 if n <= FEW_RESULTS else 64 if n >= MANY_RESULTS and not float32 and codec.dim <= 128 else 16
    on(finish_kernel, (triton.cdiv(n, rows),))(
        means,
        sums,
        matrix,
        offset,
        sink_logits,
        out,
        lse,
        n,
        splits,
        heads,
        heads // kv_heads,
        how,
        specialise.unit(codec) if codec.coded else 1.0,
        specialise.unrotate_chunk(codec),
        padded,
        max(1, min(padded, 4096 // (how.columns * rows))),
        rows,
    )
