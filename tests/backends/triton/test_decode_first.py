"""First tokens uncompressed, which the decode path scores by the way, against the reference in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from aurakv.attention.partial import Partial, merge
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.checks import rows_of
from aurakv.format.codec import Codec, Format
from aurakv.storage.pages import Pages

pytest.importorskip("triton")
from aurakv.backends.triton.decode import launch
from tests.backends.triton.decode_cases import CUBIC, close, launches, make_pages, with_offsets
from tests.helpers.gpu import DEVICE, generator, on_gpu

FIRST = 4


def beside(pages: Pages, held: list[int]) -> Pages:
    """So many first tokens of each sequence as vectors, in entries of any order; what no sequence has is NaN."""
    raw = Codec(pages.format.key.dim, 16, dtype=torch.bfloat16)
    size = len(held) + 1, pages.kv_heads, Format(raw, raw).layout(FIRST).bytes
    found = Pages(
        Format(raw, raw), FIRST, torch.zeros(size, dtype=torch.uint8, device=DEVICE),
        torch.arange(len(held), 0, -1, dtype=torch.int32, device=DEVICE)[:, None].contiguous(),
        torch.tensor(held, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    found.data.view(torch.bfloat16).fill_(torch.nan)
    for seq, count in enumerate(held):
        for side in found.vectors():
            side[found.table[seq, 0], :, :count].normal_(generator=generator(seq))
    return found


def both(
    pages: Pages, first: Pages, group: int, counts: list[int] | None, dtype: torch.dtype, causal: bool = True
) -> tuple[Partial, Partial]:
    """With learned sinks and a key scale: what is prepared gives, and what separate calls of the reference give."""
    scoring, dim = Scoring(first=FIRST, causal=causal), pages.format.key.dim
    starts = list(range(pages.seqs + 1)) if counts is None else [0, *itertools.accumulate(counts)]
    rows = rows_of("starts", None if counts is None else starts, pages.seqs, starts[-1], pages.data.device)
    q = torch.randn(starts[-1], 2 * group, dim, generator=generator(1), device=DEVICE).to(dtype)
    key_scale = torch.rand(2, dim, generator=generator(4), device=DEVICE) + 0.5
    sinks = torch.randn(2 * group, generator=generator(5), device=DEVICE)
    assert launch.why_not_call(q, pages, scoring, "fast") is None
    assert launch.serves_uncompressed(first, scoring)
    prepared = launch.prepare(q, pages, rows, pages.lengths, scoring, sinks, None, first, key_scale)
    got, again = prepared(q, None), prepared(q.clone(), None)
    assert torch.equal(got.out, again.out)

    x = (q.double().unflatten(1, (2, -1)) / key_scale[:, None]).flatten(1, 2)
    found = []
    for seq, (a, b) in enumerate(itertools.pairwise(starts)):  # each with the first tokens that it has there
        held, end = int(first.lengths[seq]), pages.lengths[seq : seq + 1]
        one = Rows(torch.tensor([0, b - a], dtype=torch.int32, device=DEVICE))
        rest = replace(scoring, first=held)
        part = reference.attend(x[a:b], Attention(only(pages, seq), one, rest, sinks))
        if held:
            rest = replace(rest, only_uncompressed=True)
            part = merge(part, reference.attend(x[a:b], Attention(only(first, seq), one, rest, ends=end)))
        found.append(part)
    return got, Partial(torch.cat([part.out for part in found]), torch.cat([part.lse for part in found]))


def only(pages: Pages, seq: int) -> Pages:
    """One sequence."""
    return replace(pages, table=pages.table[seq : seq + 1], lengths=pages.lengths[seq : seq + 1])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("dim", "group"), [(64, 1), (64, 8), (128, 1), (128, 4), (128, 8), (80, 4), (96, 4), (512, 4), (64, 20)]
)
def test_one_query_of_each_sequence(dim: int, group: int, dtype: torch.dtype) -> None:
    """The third has none there, and reads its codes."""
    pages = with_offsets(make_pages(CUBIC, dim, [300, 2, 65, 70], 2, 64))
    close(*both(pages, beside(pages, [4, 2, 0, 4]), group, None, dtype))


@on_gpu
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (64, 20), (128, 4), (128, 7), (256, 2), (96, 3), (512, 1)])
@pytest.mark.parametrize("alone", [False, True])
def test_several_queries(dim: int, group: int, alone: bool) -> None:
    """Each sees the first tokens up to its own position: drafts, and prompts that are shorter than these."""
    lengths = [60, 2, 64, 5, 40, 6] if alone else [700, 2, 65, 5, 40, 6]
    pages = with_offsets(make_pages(CUBIC, dim, lengths, 2, 64))
    first = beside(pages, [4, 2, 0, 4, 4, 0])
    with launches() as ran:
        close(*both(pages, first, group, [3, 2, 2, 5, 0, 4], torch.bfloat16))
    assert ("merge_pieces" in ran) != alone


@on_gpu
def test_queries_that_see_all_keys() -> None:
    """Without a causal mask."""
    pages = with_offsets(make_pages(CUBIC, 64, [200, 2, 5], 2, 64))
    close(*both(pages, beside(pages, [4, 2, 4]), 4, [3, 2, 4], torch.bfloat16, causal=False))
