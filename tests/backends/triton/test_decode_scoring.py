"""The decode kernel against the reference in float64: masks, offsets, soft caps, sinks, many rows. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from aurakv.attention.scoring import Scoring

pytest.importorskip("triton")
from tests.backends.triton.decode_cases import (
    CUBIC,
    DEFAULT,
    MINIFLOAT,
    close,
    limit_of,
    make_pages,
    make_queries,
    run,
    with_offsets,
)
from tests.helpers.gpu import DEVICE, on_gpu


@on_gpu
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize(("key", "value"), [(True, True), (True, False), (False, True)])
def test_offsets(group: int, key: bool, value: bool) -> None:
    pages = with_offsets(make_pages(CUBIC, 128, [300, 0, 64, 1000], 2, 64), key, value)
    close(*run(make_queries(pages, group), pages))
    sinks = torch.linspace(-2, 5, 2 * group, device=DEVICE)
    close(*run(make_queries(pages, group), pages, Scoring(first=4, recent=40, window=200), sinks=sinks))


@on_gpu
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("name", [CUBIC, "k8:cubic/v4"])
def test_soft_cap(name: str, group: int, offsets: bool) -> None:
    pages = make_pages(name, 128, [300, 0, 64, 1000], 2, 64)
    pages = with_offsets(pages) if offsets else pages
    close(*run(make_queries(pages, group), pages, Scoring(softcap=20.0)), limit=limit_of(name))
    close(*run(make_queries(pages, group, size=5.0), pages, Scoring(softcap=3.0)), limit=limit_of(name))


@on_gpu
@pytest.mark.parametrize("group", [4, 8, 12])
@pytest.mark.parametrize("sinks", [1, 64, 65, 130, 5000])
def test_positional_sinks(group: int, sinks: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [1, 64, 300, 1000, 0, 90, 2000], 2, 64)
    for scoring in (Scoring(window=70, sinks=sinks), Scoring(window=500, sinks=sinks, first=3, recent=20)):
        close(*run(make_queries(pages, group), pages, scoring))
    ring = make_pages(MINIFLOAT, 128, [1000, 100, 700], 2, 64, ring=(6, 2))
    close(*run(make_queries(ring, group), ring, Scoring(window=200, sinks=min(sinks, 128))))


@on_gpu
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("counts", [[2, 2, 2, 2], [1, 3, 0, 5], [16, 0, 2, 1], [0, 0, 0, 1]])
@pytest.mark.parametrize(
    "scoring",
    [
        DEFAULT, Scoring(window=40), Scoring(window=70, sinks=5), Scoring(first=4, recent=3), Scoring(causal=False),
        Scoring(softcap=10.0), Scoring(window=66, recent=7, first=2, sinks=65),
    ],
    ids=str,
)  # fmt: skip
def test_several_queries(scoring: Scoring, counts: list[int], group: int) -> None:
    pages = with_offsets(make_pages(CUBIC, 128, [300, 65, 16, 1000], 2, 64))
    starts = [sum(counts[:i]) for i in range(5)]
    generator = torch.Generator(DEVICE).manual_seed(7)
    q = torch.randn(starts[-1], 2 * group, 128, generator=generator, device=DEVICE)
    if q.shape[0] * group <= 128:
        close(*run(q, pages, scoring, starts=starts))


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(window=100), Scoring(window=64), Scoring(window=1), Scoring(first=5), Scoring(recent=70),
        Scoring(first=65, recent=200, window=500), Scoring(causal=False), Scoring(scale=0.3), Scoring(first=5000),
    ],
    ids=str,
)  # fmt: skip
def test_scoring(scoring: Scoring, group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [1, 64, 300, 1000], 2, 64)
    close(*run(make_queries(pages, group), pages, scoring))


@on_gpu
def test_ends_before_the_length() -> None:
    pages = make_pages(MINIFLOAT, 128, [500, 640], 2, 64)
    ends = torch.tensor([130, 64], dtype=torch.int32, device=DEVICE)
    close(*run(make_queries(pages, 4), pages, ends=ends))


@on_gpu
def test_sink_logits() -> None:
    pages = make_pages(MINIFLOAT, 128, [300, 0, 64], 2, 64)
    sinks = torch.tensor([0.0, 3.0, -torch.inf, torch.inf, -2.0, 20.0, 1.0, 0.5], device=DEVICE)
    q = make_queries(pages, 4)
    fast, truth = run(q, pages, sinks=sinks)
    assert torch.allclose(fast.lse.double(), truth.lse, atol=2e-3)
    assert torch.allclose(fast.out.double(), truth.out, atol=2e-3)
