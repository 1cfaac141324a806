"""Recent tokens that an engine's blocks have no place for: which entry each sequence's last group has.

`aurakv.vllm.recent` says what it is for. Here all happens on the device. Appends store the tokens.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....storage.pages import Pages
from ..common.launcher import on
from .beginnings import NONE, key_word, reads_words, take_entries


@triton.jit
def group_tag(data, stride, offset, row_bytes, place, filled, groups, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """A number that tells what groups of so many tokens are, from the keys of the first and of the last token."""
    block, at = place // groups, place % groups * GROUP
    p_key = data + block * stride + offset + at * row_bytes
    last = tl.maximum(filled - 1, 0).to(tl.int64) * row_bytes
    tag = key_word(p_key, WHOLE) * 6364136223846793005 + key_word(p_key + last, WHOLE)
    return tag & 0x7FFFFFFFFFFFFFFF


@triton.jit
def settle_recent_kernel(page_size, data, stride, offset, row_bytes, place_of, tag, filled, entries,
                         GROUP: tl.constexpr, ENTRIES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Behind an append: note what blocks have where groups of entries were written."""
    o_entry = tl.arange(0, ENTRIES)
    m_entry = o_entry < entries
    b_place = tl.load(place_of + o_entry, mask=m_entry, other=NONE)
    written = m_entry & (b_place >= 0) & (tl.load(tag + o_entry, mask=m_entry, other=0) == NONE)
    b_filled = tl.load(filled + o_entry, mask=written, other=0)
    b_place = tl.where(written, b_place, 0)
    now = group_tag(data, stride, offset, row_bytes, b_place, b_filled, page_size // GROUP, GROUP, WHOLE)
    tl.store(tag + o_entry, now, mask=written)


@triton.jit(do_not_specialize=["seqs", "width", "step"])
def find_recent_kernel(table, lengths, starts, seqs, width, page_size, data, stride, offset, row_bytes, entry_of,
                       place_of, tag, used, filled, order, pointer, slots, held, before, coded, open_slots, opened,
                       step, entries, GROUP: tl.constexpr, AGES: tl.constexpr, SEQS: tl.constexpr,
                       ENTRIES: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """One program: every phase sees what the one before has written. A place is a group of a block."""
    groups = page_size // GROUP
    o_seq = tl.arange(0, SEQS)
    m_seq = o_seq < seqs
    length = tl.load(lengths + o_seq, mask=m_seq, other=0)
    rows = tl.load(starts + 1 + o_seq, mask=m_seq, other=0) - tl.load(starts + o_seq, mask=m_seq, other=0)
    real = m_seq & (length > 0) & (rows > 0)
    begin = tl.maximum(length - 1, 0) // GROUP * GROUP
    row = length - rows  # the position of the first one
    old = tl.maximum(row - begin, 0)  # tokens of the group that came before
    block = tl.load(table + o_seq.to(tl.int64) * width + begin // page_size, mask=real, other=0).to(tl.int64)
    place = block * groups + begin % page_size // GROUP
    entry = tl.load(entry_of + place, mask=real, other=NONE)
    has = real & (entry >= 0)
    lying = tl.load(filled + entry, mask=has, other=0)
    known = tl.load(tag + entry, mask=has, other=NONE)
    now = group_tag(data, stride, offset, row_bytes, tl.where(has, place, 0), lying, groups, GROUP, WHOLE)
    same = has & ((old == 0) | ((lying >= old) & (known == now)))
    tl.store(used + entry, step, mask=same)
    tl.store(filled + entry, 0, mask=has & (old > 0) & (known != now))  # for good: appends leave such entries alone
    # the group of the first row, if it is an earlier one: as it was, and nobody takes its entry in this step
    open_begin = row // GROUP * GROUP
    crosses = real & (open_begin < begin)
    b_open = tl.load(table + o_seq.to(tl.int64) * width + open_begin // page_size, mask=crosses, other=0).to(tl.int64)
    open_place = b_open * groups + open_begin % page_size // GROUP
    open_entry = tl.load(entry_of + open_place, mask=crosses & (row > open_begin), other=NONE)
    has_open = open_entry >= 0
    open_filled = tl.load(filled + open_entry, mask=has_open, other=0)
    open_known = tl.load(tag + open_entry, mask=has_open, other=NONE)
    now = group_tag(
        data, stride, offset, row_bytes, tl.where(has_open, open_place, 0), open_filled, groups, GROUP, WHOLE
    )
    has_open &= (open_filled >= row - open_begin) & (open_known == now)
    has_open &= tl.cumsum(has_open.to(tl.int32), 0) <= entries - tl.sum(real.to(tl.int32), 0)  # the others need theirs
    tl.store(used + open_entry, step, mask=has_open)
    take_entries(
        real & (old == 0) & (entry < 0), place, o_seq, entry_of, place_of, used, order, pointer, step, entries, AGES,
        ENTRIES,
    )  # fmt: skip
    tl.debug_barrier()
    valid = real & (same | (old == 0))
    entry = tl.load(entry_of + place, mask=valid, other=0)
    tl.store(filled + entry, length - begin, mask=valid)
    tl.store(tag + entry, NONE, mask=valid)
    tl.store(slots + o_seq, entry, mask=valid)
    tl.store(held + o_seq, tl.where(valid, length - begin, 0), mask=m_seq)
    tl.store(before + o_seq, tl.where(valid, old, 0), mask=m_seq)
    tl.store(coded + o_seq, tl.where(valid & ~crosses, begin, length), mask=m_seq)
    tl.store(open_slots + o_seq, tl.where(has_open, open_entry, tl.where(valid, entry, 0)), mask=m_seq)
    tl.store(opened + o_seq, tl.where(has_open, row - open_begin, tl.where(valid, old, 0)), mask=m_seq)


NAMES = (
    "entry_of", "place_of", "tag", "used", "filled", "order", "pointer", "slots", "held", "before", "coded",
    "open_slots", "opened",
)  # fmt: skip


def settle(state: dict[str, Tensor], pages: Pages, group: int) -> None:
    """See `settle_recent_kernel`. pages: of the layer whose contents tell blocks apart."""
    entries = len(state["used"])
    on(settle_recent_kernel, (1,))(
        pages.page_size, pages.data, pages.data.stride(0), pages.format.layout(pages.page_size).key_codes,
        pages.format.key.row_bytes, *(state[name] for name in ("place_of", "tag", "filled")), entries, group,
        triton.next_power_of_2(entries), reads_words(pages), num_warps=8,
    )  # fmt: skip


def find(state: dict[str, Tensor], table: Tensor, lengths: Tensor, starts: Tensor, pages: Pages, step: int, group: int,
         seqs: int, ages: tuple[int, ...]) -> None:  # fmt: skip
    """See `find_recent_kernel`. pages: of the layer whose contents tell blocks apart; seqs: at most in any step."""
    layout, entries = pages.format.layout(pages.page_size), len(state["used"])
    on(find_recent_kernel, (1,))(
        table, lengths, starts, len(lengths), table.shape[1], pages.page_size, pages.data, pages.data.stride(0),
        layout.key_codes, pages.format.key.row_bytes, *(state[name] for name in NAMES), step, entries, group, ages,
        triton.next_power_of_2(seqs), triton.next_power_of_2(entries), reads_words(pages), num_warps=8,
    )  # fmt: skip
