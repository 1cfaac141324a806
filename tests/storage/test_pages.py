"""Pages from outside are looked at before anything touches them."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.errors import InputError
from tests.helpers.refusals import FORMAT, KV_HEADS, META, check, codes, queries, ramp, tokens


def description(**changes: object) -> kv.Pages:
    """Pages of three sequences, right but for the changes."""
    right = {
        "format": FORMAT,
        "page_size": 8,
        "data": torch.zeros(4, KV_HEADS, FORMAT.layout(8).bytes, dtype=torch.uint8),
        "table": torch.tensor([[0, 1], [2, -1], [-1, -1]], dtype=torch.int32),
        "lengths": torch.tensor([16, 3, 0], dtype=torch.int32),
        "overflow": torch.zeros(1, dtype=torch.int32),
    }
    return kv.Pages(**{**right, **changes})


def integers(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


SIZE = FORMAT.layout(8).bytes
MISALIGNED = torch.zeros(4 * KV_HEADS * SIZE + 1, dtype=torch.uint8)[1:].view(4, KV_HEADS, SIZE)
DESCRIPTIONS = [
    ("page size", {"page_size": 0}, ("page_size", "positive", "0")),
    ("page size fits", {"page_size": 16}, ("16 tokens a page", "uint8 [pages, kv_heads,", f"[4, 2, {SIZE}]")),
    ("data dtype", {"data": torch.zeros(4, KV_HEADS, SIZE)}, ("uint8", "float32")),
    ("data ndim", {"data": torch.zeros(4, KV_HEADS * SIZE, dtype=torch.uint8)}, ("[pages, kv_heads,", "[4, ")),
    ("data strides", {"data": torch.zeros(4, KV_HEADS, 2 * SIZE, dtype=torch.uint8)[..., ::2]}, ("contiguous",)),
    ("data alignment", {"data": MISALIGNED}, ("aligned to 16 bytes",)),
    ("table dtype", {"table": torch.zeros(3, 2, dtype=torch.int64)}, ("table", "int32", "int64")),
    ("table ndim", {"table": integers(0, 1, 2)}, ("table", "2 dimensions", "[3]")),
    ("table strides", {"table": integers([0, 2, -1], [1, -1, -1]).T}, ("table", "contiguous")),
    ("table device", {"table": torch.zeros(3, 2, dtype=torch.int32, device=META)}, ("table must be on cpu", "meta")),
    ("lengths dtype", {"lengths": torch.zeros(3)}, ("lengths", "int32", "float32")),
    ("lengths count", {"lengths": integers(0, 0)}, ("3 table rows need 3 lengths",)),
    ("overflow count", {"overflow": integers(0, 0)}, ("1 overflow flag",)),
    ("pinned", {"pinned": 3}, ("pinned", "width 2", "3")),
    ("pinned negative", {"pinned": -1}, ("pinned", "-1")),
    ("pinned ring", {"pinned": 2, "ring": True}, ("pinned", "width 2", "2")),
    ("offset", {"key_offset": ramp(2, 17)}, ("key_offset", "[2, 16]", "[2, 17]")),
    ("length negative", {"lengths": integers(16, -1, 0)}, ("sequence 1", "from 0 to 16", "-1")),
    ("length large", {"lengths": integers(16, 3, 17)}, ("sequence 2", "from 0 to 16", "17")),
    ("length lowest", {"lengths": integers(-(2**31), 3, 0)}, ("sequence 0", str(-(2**31)))),
    ("length highest", {"lengths": integers(2**31 - 1, 3, 0)}, ("sequence 0", str(2**31 - 1))),
    ("page missing", {"lengths": integers(16, 9, 0)}, ("table of sequence 1", "0 … 3")),
    ("page negative", {"table": integers([0, 1], [-2, -1], [-1, -1])}, ("table of sequence 1", "0 … 3")),
    ("page large", {"table": integers([0, 4], [2, -1], [-1, -1])}, ("table of sequence 0", "0 … 3")),
    ("page unused large", {"table": integers([0, 1], [2, -1], [-1, 9])}, ("sequence 2", "0 … 3")),
    ("page unused negative", {"table": integers([0, 1], [2, -7], [-1, -1])}, ("sequence 1", "0 … 3")),
    ("ring page missing", {"ring": True, "lengths": integers(99, 99, 0)}, ("table of sequence 1", "0 … 3")),
    ("ring longest", {"ring": True, "lengths": integers(99, 2**31 - 1, 0)}, ("table of sequence 1", "0 … 3")),
    ("offset NaN", {"value_offset": torch.full((2, 32), math.nan)}, ("value_offset", "finite")),
]


@pytest.mark.parametrize(("changes", "words"), [pytest.param(c, w, id=i) for i, c, w in DESCRIPTIONS])
def test_pages_from_outside(world, changes, words):
    """Refused by check or check_values, and by attend and append before they touch anything."""
    pages = description(**changes)

    def look(_: SimpleNamespace) -> None:
        pages.check()
        pages.check_values()

    window = kv.Scoring(window=8) if pages.ring else kv.Scoring()
    before = [x.clone() for x in (pages.data, pages.table, pages.lengths, pages.overflow)]
    for call in (
        look,
        lambda w: kv.attend(queries(3), pages, None, window),
        lambda w: kv.append(pages, *tokens(3)),
        lambda w: ops.append_codes(pages, *codes(3)),
    ):
        check(world, call, InputError, *words)
    for old, new in zip(before, (pages.data, pages.table, pages.lengths, pages.overflow), strict=True):
        assert old.device.type == "meta" or torch.equal(old, new)


def test_right_pages_pass():
    pages = description()
    pages.check()
    pages.check_values()
    dataclasses.replace(pages, ring=True, lengths=integers(99, 3, 0)).check_values()
    kv.append(pages, *tokens(1), [0, 0, 1, 1])
    assert pages.lengths.tolist() == [16, 4, 0]
