"""Beginnings of sequences that an engine's blocks have no place for: which entry each has, and what lies there.

`aurakv.vllm.beginnings` says what it is for, and has the same in Python for the CPU. Appends store the tokens.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....storage.pages import Pages
from ..common.launcher import on

NONE = tl.constexpr(-1)


@triton.jit
def key_word(p_row, WHOLE: tl.constexpr):
    """The first 8 bytes of keys. WHOLE: these can be read at once; else two at a time, for rows of dims such as 80
    begin at any even byte."""
    if WHOLE:
        return tl.load(p_row.to(tl.pointer_type(tl.int64)))
    word = tl.load(p_row.to(tl.pointer_type(tl.int16))).to(tl.int64) & 0xFFFF
    for i in tl.static_range(1, 4):
        word |= (tl.load(p_row.to(tl.pointer_type(tl.int16)) + i).to(tl.int64) & 0xFFFF) << 16 * i
    return word


@triton.jit
def tag_of(data, block, stride, offset, row_bytes, FIRST: tl.constexpr, WHOLE: tl.constexpr):
    """A number that tells what the first tokens of blocks are, from the first bytes of their keys."""
    tag = tl.zeros_like(block)
    for t in tl.static_range(FIRST):
        tag = tag * 6364136223846793005 + key_word(data + block * stride + offset + t * row_bytes, WHOLE)
    return tag & 0x7FFFFFFFFFFFFFFF


@triton.jit
def list_entries(used, order, first, step, entries, AGES: tl.constexpr, ENTRIES: tl.constexpr):
    """In which order entries are given away that no sequence of this step has: those that were not used for more than
    AGES[0] steps, then for more than AGES[1], …, each part from the entry `first` on."""
    o_entry = tl.arange(0, ENTRIES)
    o_free = (first + o_entry) % entries
    age = step - tl.load(used + o_free, mask=o_entry < entries, other=step)
    listed = 0
    for i in tl.static_range(len(AGES)):
        part = age > AGES[i]
        if i > 0:
            part &= age <= AGES[i - 1]
        tl.store(order + listed + tl.cumsum(part.to(tl.int32), 0) - 1, o_free, mask=part)
        listed += tl.sum(part.to(tl.int32), 0)


@triton.jit
def take_entries(missing, place, o_seq, entry_of, place_of, used, order, pointer, step, entries, AGES: tl.constexpr,
                 ENTRIES: tl.constexpr):  # fmt: skip
    """An entry for each place that has none; of sequences that share a place one asks. Gives which asked, and what
    they took."""
    tl.debug_barrier()
    tl.store(entry_of + place, -2 - o_seq, mask=missing)
    tl.debug_barrier()
    asks = missing & (tl.load(entry_of + place, mask=missing, other=NONE) == -2 - o_seq)
    first = tl.load(pointer)
    if tl.sum(asks.to(tl.int32), 0) > 0:
        list_entries(used, order, first, step, entries, AGES, ENTRIES)
    tl.debug_barrier()
    rank = tl.cumsum(asks.to(tl.int32), 0) - 1
    taken = tl.load(order + rank, mask=asks, other=0)
    lost = tl.load(place_of + taken, mask=asks, other=NONE)
    tl.debug_barrier()
    tl.store(pointer, (first + tl.sum(asks.to(tl.int32), 0)) % entries)
    tl.store(entry_of + lost, NONE, mask=asks & (lost >= 0))
    tl.store(entry_of + place, taken, mask=asks)
    tl.store(place_of + taken, place, mask=asks)
    tl.store(used + taken, step, mask=asks)
    return asks, taken


@triton.jit
def settle_kernel(data, stride, offset, row_bytes, block_of, tag, filled, entries, FIRST: tl.constexpr,
                  ENTRIES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Behind an append: note what blocks of entries have that were written."""
    o_entry = tl.arange(0, ENTRIES)
    m_entry = o_entry < entries
    b_block = tl.load(block_of + o_entry, mask=m_entry, other=NONE)
    written = m_entry & (b_block >= 0) & (tl.load(filled + o_entry, mask=m_entry, other=0) > 0)
    written &= tl.load(tag + o_entry, mask=m_entry, other=0) == NONE
    now = tag_of(data, tl.where(written, b_block, 0), stride, offset, row_bytes, FIRST, WHOLE)
    tl.store(tag + o_entry, now, mask=written)


@triton.jit(do_not_specialize=["seqs", "width", "step"])
def find_kernel(table, lengths, starts, seqs, width, data, stride, offset, row_bytes, entry_of, block_of, tag, used,
                filled, order, pointer, slots, held, before, step, entries, FIRST: tl.constexpr, AGES: tl.constexpr,
                SEQS: tl.constexpr, ENTRIES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """One program: every phase sees what the one before has written."""
    o_seq = tl.arange(0, SEQS)
    m_seq = o_seq < seqs
    length = tl.load(lengths + o_seq, mask=m_seq, other=0)
    rows = tl.load(starts + 1 + o_seq, mask=m_seq, other=0) - tl.load(starts + o_seq, mask=m_seq, other=0)
    real = m_seq & (length > 0) & (rows > 0)
    block = tl.load(table + o_seq.to(tl.int64) * width, mask=real, other=0).to(tl.int64)
    old = length - rows
    entry = tl.load(entry_of + block, mask=real, other=NONE)
    tl.store(used + entry, step, mask=real & (entry >= 0))
    asks, taken = take_entries(
        real & (entry < 0), block, o_seq, entry_of, block_of, used, order, pointer, step, entries, AGES, ENTRIES
    )
    tl.store(filled + taken, 0, mask=asks)
    tl.store(tag + taken, NONE, mask=asks)
    tl.debug_barrier()
    entry = tl.load(entry_of + block, mask=real, other=0)
    fresh = real & (old == 0)
    tl.store(filled + entry, 0, mask=fresh)
    tl.store(tag + entry, NONE, mask=fresh)
    tl.debug_barrier()
    known = tl.load(tag + entry, mask=real, other=NONE)
    now = tag_of(data, tl.where(real, block, 0), stride, offset, row_bytes, FIRST, WHOLE)
    stale = real & (known != now)
    tl.store(filled + entry, 0, mask=stale)
    tl.debug_barrier()
    tl.store(tag + entry, NONE, mask=stale)
    lying = tl.load(filled + entry, mask=real, other=FIRST)
    writes = real & (old < FIRST) & (lying >= old)  # more than that lies there where drafts were rejected
    most = tl.minimum(length, FIRST)
    tl.debug_barrier()
    tl.store(filled + entry, most, mask=writes)
    tl.store(tag + entry, NONE, mask=writes)
    tl.debug_barrier()
    lies = tl.load(filled + entry, mask=real, other=0)
    tl.store(slots + o_seq, entry, mask=real)
    tl.store(held + o_seq, tl.where(lies >= most, lies, 0), mask=m_seq)
    tl.store(before + o_seq, tl.where(writes, old, FIRST), mask=m_seq)


@triton.jit
def place_kernel(slots, held, data, piece, values, begins, key_starts, key_scale, key_offset, k, v, HEADS: tl.constexpr,
                 KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """First tokens to their places among unpacked ones [rows, HEADS, dim]: program (sequence, head). Keys there are not
    scaled, and without the offset that is given."""
    seq, head = tl.program_id(0), tl.program_id(1)
    begin, row = tl.load(begins + seq), tl.load(key_starts + seq)
    count = tl.minimum(tl.load(held + seq), tl.load(key_starts + seq + 1) - row + begin)
    p_piece = data + (tl.load(slots + seq).to(tl.int64) * HEADS + head) * piece
    d = tl.arange(0, COLUMNS)
    for t in range(begin, count):
        at = (row + t - begin).to(tl.int64) * HEADS + head
        key = tl.load(p_piece + t * KEY_DIM + d, mask=d < KEY_DIM, other=0.0).to(tl.float32)
        if key_offset is not None:
            key = key - tl.load(key_offset + head * KEY_DIM + d, mask=d < KEY_DIM, other=0.0)
        if key_scale is not None:
            key = key / tl.load(key_scale + head * KEY_DIM + d, mask=d < KEY_DIM, other=1.0)
        value = tl.load(p_piece + values + t * VALUE_DIM + d, mask=d < VALUE_DIM, other=0.0)
        bad = tl.max((~(tl.abs(value.to(tl.float32)) < float("inf"))).to(tl.int32), 0) > 0  # as `unpack` does it
        bad_key = bad | (tl.max((~(tl.abs(key) < float("inf"))).to(tl.int32), 0) > 0)
        key, value = tl.where(bad_key, float("nan"), key), tl.where(bad, 0.0, value)
        tl.store(k + at * KEY_DIM + d, key.to(k.dtype.element_ty), mask=d < KEY_DIM)
        tl.store(v + at * VALUE_DIM + d, value.to(v.dtype.element_ty), mask=d < VALUE_DIM)


def settle(state: dict[str, Tensor], pages: Pages, first: int) -> None:
    """See `settle_kernel`. pages: of the layer whose contents tell blocks apart."""
    entries = len(state["used"])
    on(settle_kernel, (1,))(
        pages.data, pages.data.stride(0), pages.format.layout(pages.page_size).key_codes, pages.format.key.row_bytes,
        *(state[name] for name in ("block_of", "tag", "filled")), entries, first, triton.next_power_of_2(entries),
        reads_words(pages), num_warps=8,
    )  # fmt: skip


def find(state: dict[str, Tensor], table: Tensor, lengths: Tensor, starts: Tensor, pages: Pages, step: int, first: int,
         seqs: int, ages: tuple[int, ...]) -> None:  # fmt: skip
    """See `find_kernel`. pages: of the layer whose contents tell blocks apart; seqs: at most in any step."""
    layout, entries = pages.format.layout(pages.page_size), len(state["used"])
    on(find_kernel, (1,))(
        table, lengths, starts, len(lengths), table.shape[1], pages.data, pages.data.stride(0), layout.key_codes,
        pages.format.key.row_bytes, *(state[name] for name in NAMES), step, entries, first, ages,
        triton.next_power_of_2(seqs), triton.next_power_of_2(entries), reads_words(pages), num_warps=8,
    )  # fmt: skip


def reads_words(pages: Pages) -> bool:
    """WHOLE of `key_word`."""
    places = pages.data.data_ptr(), pages.data.stride(0), pages.format.layout(pages.page_size).key_codes
    return not any(place % 8 for place in (*places, pages.format.key.row_bytes))


NAMES = ("entry_of", "block_of", "tag", "used", "filled", "order", "pointer", "slots", "held", "before")


def place(entries: Pages, first: int, begins: Tensor, key_starts: Tensor, k: Tensor, v: Tensor,
          key_scale: Tensor | None, key_offset: Tensor | None) -> None:  # fmt: skip
    """See `place_kernel`; of the sequences from `first` on."""
    data, values, sizes = vectors_of(entries)
    on(place_kernel, (len(begins), entries.kv_heads))(
        entries.table[first:], entries.lengths[first:], data, data.shape[2], values, begins, key_starts, key_scale,
        key_offset, k, v, *sizes, num_warps=1,
    )  # fmt: skip


def vectors_of(entries: Pages) -> tuple[Tensor, int, tuple[int, int, int, int]]:
    """The numbers of entries, where values begin, and HEADS, KEY_DIM, VALUE_DIM, COLUMNS."""
    key, value = entries.format.key, entries.format.value
    data = entries.data.view(key.dtype)
    values = entries.format.layout(entries.page_size).value_codes // data.element_size()
    return data, values, (entries.kv_heads, key.dim, value.dim, triton.next_power_of_2(max(key.dim, value.dim)))
