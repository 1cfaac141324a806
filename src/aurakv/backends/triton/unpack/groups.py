"""Gather: tokens that prompts read as they came, from the rows of a step and from the entries of their groups.

In:  k, v [rows, HEADS, dim] of the step, strided, keys neither scaled nor without offset; starts [n + 1] the rows of
     each sequence; slots, held: the entry of each and how many tokens there come before its rows; data: vectors of 16
     bits, scaled keys and, `at` numbers further, values; to [n + 1] where the tokens of each sequence go.
Out: keys, values [room, HEADS, dim] as unpack leaves them: keys not scaled, without the offset that is given, values
     behind the last sequence 0; where a vector is damaged, the key is NaN and the value 0.
Program (ROWS rows of the result, head).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....storage.pages import Pages
from ..append.beginnings import vectors_of
from ..common.launcher import on
from .launch import BEHIND, MAX_SEQS, TOKENS

ROWS = 16


@triton.jit
def damaged(x):
    """Which rows [rows, columns] are not finite."""
    return tl.max((~(tl.abs(x.to(tl.float32)) < float("inf"))).to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=["seqs", "room"])
def gather_kernel(k, k_token, k_head, k_dim, v, v_token, v_head, v_dim, starts, slots, held, data, piece, at, to,
                  key_scale, key_offset, keys, values, seqs, room, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
                  VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_seq = tl.arange(0, SEQS)
    b_end = tl.load(to + 1 + o_seq, mask=o_seq < seqs, other=2147483647)
    i_seq = tl.minimum(tl.sum((b_end[None, :] <= o_row[:, None]).to(tl.int32), 1), seqs - 1)
    m_row = o_row < tl.load(to + seqs)
    token = o_row - tl.load(to + i_seq)
    before = tl.load(held + i_seq)
    m_old = m_row & (token < before)
    row = (tl.load(starts + i_seq) + token - before).to(tl.int64)
    p_old = data + (tl.load(slots + i_seq).to(tl.int64) * HEADS + head) * piece
    o_out = (o_row.to(tl.int64) * HEADS + head)[:, None]
    d = tl.arange(0, COLUMNS)[None, :]

    m = d < KEY_DIM
    old = tl.load((p_old + token * KEY_DIM)[:, None] + d, mask=m_old[:, None] & m, other=0.0).to(tl.float32)
    new = tl.load(k + (row * k_token + head * k_head)[:, None] + d * k_dim, mask=(m_row & ~m_old)[:, None] & m, other=0)
    new = new.to(tl.float32)
    offset = tl.zeros([1, COLUMNS], tl.float32)
    if key_offset is not None:
        offset = tl.load(key_offset + head * KEY_DIM + d, mask=m, other=0.0)
    if key_scale is not None:
        scale = tl.load(key_scale + head * KEY_DIM + d, mask=m, other=1.0)
        old, offset = old / scale, offset / scale
    key = tl.where(m_old[:, None], old, new) - offset
    m_value = d < VALUE_DIM
    old = tl.load((p_old + at + token * VALUE_DIM)[:, None] + d, mask=m_old[:, None] & m_value, other=0)
    p_new = v + (row * v_token + head * v_head)[:, None] + d * v_dim
    new = tl.load(p_new, mask=(m_row & ~m_old)[:, None] & m_value, other=0)
    value = tl.where(m_old[:, None], old.to(values.dtype.element_ty), new.to(values.dtype.element_ty))
    bad = damaged(value)
    key = tl.where((bad | damaged(key))[:, None], float("nan"), key)
    tl.store(keys + o_out * KEY_DIM + d, key.to(keys.dtype.element_ty), mask=m_row[:, None] & m)
    value = tl.where(bad[:, None], 0.0, value)
    tl.store(values + o_out * VALUE_DIM + d, value, mask=(o_row < room)[:, None] & m_value)


def gather(k: Tensor, v: Tensor, opened: Pages, first: int, starts: Tensor, to: Tensor, most: int,
           key_scale: Tensor | None, key_offset: Tensor | None, keys: Tensor, values: Tensor) -> None:  # fmt: skip
    """Of the sequences from `first` on, whose rows begin where k and v do; at most so many tokens."""
    data, at, sizes = vectors_of(opened)
    on(gather_kernel, (-(-most // ROWS) + BEHIND * TOKENS // ROWS, opened.kv_heads))(
        k, *k.stride(), v, *v.stride(), starts, opened.table[first:], opened.lengths[first:], data, data.shape[2], at,
        to, key_scale, key_offset, keys, values, len(to) - 1, keys.shape[0], *sizes, MAX_SEQS, ROWS, num_warps=4,
    )  # fmt: skip
