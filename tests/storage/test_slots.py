"""The slot rule, which is written once in Python, C++, Triton and Gluon: each against the sentence of the format."""

import random

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.storage.pages import Pages, allocate, table_entry


def test_one_rule_for_numbers_and_tensors():
    """Pinned entries come once; the others are taken in turn. Counted entry by entry, without the formula."""
    for width in range(1, 7):
        for pinned in range(width):
            expected = list(range(width))
            while len(expected) < 40:
                expected += range(pinned, width)
            assert [table_entry(page, pinned, width) for page in range(40)] == expected[:40]
            assert table_entry(torch.arange(40), pinned, width).tolist() == expected[:40]


def rings(device):
    """Rings of random shapes, with page sizes that GPU kernels read as tiles among them."""
    draw = random.Random(5)
    for page_size in (4, 16, 64):
        width = draw.randrange(2, 5)
        pinned = draw.randrange(width)
        format = kv.Format.parse("k4v4", 128)
        table = torch.randperm(2 * width).view(2, width).int().to(device)
        data = allocate(format, page_size, 2 * width, 2, torch.device(device))
        make = {"dtype": torch.int32, "device": device}
        yield Pages(
            format, page_size, data.zero_(), table, torch.zeros(2, **make), torch.zeros(1, **make), True, pinned
        )


def test_every_backend_writes_and_reads_by_the_rule(backend, device):
    torch.manual_seed(0)
    for pages in rings(device):
        width, size = pages.table.shape[1], pages.page_size
        window, position = (width - pages.pinned) * size, 0
        while position < 2 * width * size + 3:
            count = 1 if position % 3 else min(size - 1, window)
            k, v = torch.randn(2, 2 * count, 2, 128, device=device)
            before = pages.data.clone()
            ops.append(pages, k, v, [0, count, 2 * count], backend=backend)
            for seq in range(2):
                changed = {int(page) for page in (pages.data != before).flatten(1).any(1).nonzero()}
                own = {int(page) for page in pages.table[seq]}
                touched = range(position // size, (position + count - 1) // size + 1)
                wanted = {int(pages.table[seq, table_entry(page, pages.pinned, width)]) for page in touched}
                assert changed & own == wanted
            position += count
        q = torch.randn(2, 4, 128, device=device)
        scoring = kv.Scoring(window=window, sinks=pages.pinned * size)
        got, truth = (kv.attend(q, pages, None, scoring, backend=name) for name in (backend, "reference"))
        torch.testing.assert_close(got.out, truth.out, atol=5e-3, rtol=0)


@pytest.mark.parametrize("width", [1, 3])
def test_pages_without_a_ring_take_entries_in_order(width):
    assert [table_entry(page, 0, width) for page in range(width)] == list(range(width))
