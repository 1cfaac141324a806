"""The decode kernel against the reference in float64: rows in pieces, tables of any levels, scales of float32. Needs a
GPU, or an emulated one (`pytest --emulate 8.0`)."""

from __future__ import annotations

import pytest
import torch

from aurakv.attention.partial import Partial
from aurakv.attention.scoring import Scoring
from aurakv.storage.pages import Pages

pytest.importorskip("triton")
from tests.backends.triton.decode_cases import (
    PIECES,
    TABLES,
    WIDE_SCALES,
    close,
    launches,
    make_pages,
    make_queries,
    run,
    with_offsets,
)
from tests.helpers.gpu import DEVICE, on_gpu


def check(name: str, dim: int, group: int, page_size: int) -> None:
    """All tokens; a window with sinks; several queries a sequence with offsets."""
    lengths = [200, page_size, 3, 0, 133] if page_size < 133 else [page_size, 7, 120, 0, page_size - 1]
    pages = make_pages(name, dim, lengths, 2, page_size)
    q = make_queries(pages, group)
    close(*run(q, pages), limit=1e-3)
    close(*run(q, pages, Scoring(window=70, sinks=5, first=2, recent=3)), limit=1e-3)
    several = torch.randn(8, 2 * group, dim, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    close(*run(several, with_offsets(pages), Scoring(window=66, sinks=65), starts=[0, 2, 3, 3, 5, 8]), limit=1e-3)


@on_gpu
@pytest.mark.parametrize(("name", "dim"), PIECES)
@pytest.mark.parametrize(("group", "page_size"), [(1, 64), (4, 16), (4, 133), (8, 32)])
def test_pieces(name: str, dim: int, group: int, page_size: int) -> None:
    check(name, dim, group, page_size)


@on_gpu
@pytest.mark.parametrize(("name", "dim"), [case for case in PIECES if case[1] < 128])
def test_sixteen_rows_of_pieces(name: str, dim: int) -> None:
    check(name, dim, 16, 64)


@on_gpu
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 4), (128, 8), (256, 16), (96, 8), (512, 4)])
def test_tables_of_any_levels(name: str, dim: int, group: int) -> None:
    check(name, dim, group, 64)


@on_gpu
@pytest.mark.parametrize("name", WIDE_SCALES)
@pytest.mark.parametrize(
    ("dim", "group", "page_size"), [(128, 4, 64), (128, 8, 16), (64, 4, 133), (80, 8, 32), (256, 16, 64)]
)
def test_scales_of_float32(name: str, dim: int, group: int, page_size: int) -> None:
    check(name, dim, group, page_size)


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("factor", [1e-25, 1e-6, 1e6, 1e25])
def test_value_scales_beyond_float16(group: int, factor: float) -> None:
    """Then some that are larger than those before them."""
    pages = make_pages("k4v4:f32", 128, [300], 2, 64, spread=1.0)
    scale = pages.value_parts().scale
    assert scale is not None
    scale.mul_(factor)
    close(*run(make_queries(pages, group), pages), limit=1e-3)
    page, row = pages.slots(0, torch.arange(200, 300, device=DEVICE))
    scale[page, :, row] *= 100.0
    close(*run(make_queries(pages, group), pages), limit=2e-3)


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damage_in_float32_scales(bad: float, side: str, group: int) -> None:
    """It reaches the queries that see it, and no others."""
    pages = make_pages("k4v4:f32", 128, [300, 300], 2, 64)
    part = pages.key_parts() if side == "key" else pages.value_parts()
    page, row = pages.slots(1, torch.tensor([298], device=DEVICE))
    assert part.scale is not None
    part.scale[page, 1, row] = bad
    q = torch.randn(8, 2 * group, 128, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    for fast, truth in (run(q, pages, starts=[0, 4, 8]), run(make_queries(pages, group), pages)):
        assert torch.equal(fast.out.isnan().any(-1), truth.out.isnan().any(-1))
        assert torch.equal(fast.lse.isnan(), truth.lse.isnan())


@on_gpu
@pytest.mark.parametrize(("name", "dim"), [("k4v4", 80), ("k5v5", 96), ("k4v4", 512), ("k3v3", 64)])
@pytest.mark.parametrize("group", [3, 8])
def test_one_launch_and_soft_caps(name: str, dim: int, group: int) -> None:
    pages = with_offsets(make_pages(name, dim, [1, 32, 31, 0, 33, 40], 2, 64, capacity=64))
    sinks = torch.randn(2 * group, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    for scoring in (Scoring(window=20), Scoring(window=20, softcap=30.0)):
        with launches() as ran:
            close(*run(make_queries(pages, group), pages, scoring, sinks=sinks), limit=1e-3)
        assert ran == ["decode_attention"]
        close(*run(make_queries(pages, group), pages, scoring, sinks=sinks, splits=2), limit=1e-3)


@on_gpu
@pytest.mark.parametrize("name", ["k4v4", "k4v4:f32", "k3v3"])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 16])
def test_values_below_a_threshold_are_not_decoded(name: str, group: int) -> None:
    """Tiles that weigh nothing: what would damage results there does not, unless some weight reaches the threshold."""
    pages, q, truth = tail_without_weight(name, group, 320, 64)
    fast, _ = run(q, pages, Scoring(threshold=1e-5), splits=1)
    close(Partial(fast.out[1], fast.lse[1]), Partial(truth.out[1], truth.lse[1]), limit=2e-3)
    far = truth.lse[0] > 20  # e^20 times what each of those tokens weighs
    assert bool(far.any())
    assert bool(fast.out[0][far].isfinite().all())
    assert torch.allclose(fast.lse[0].double(), truth.lse[0], atol=2e-3, rtol=1e-3)
    assert bool(run(q, pages, splits=1)[0].out[0].isnan().all())


@on_gpu
@pytest.mark.parametrize("group", [1, 2, 3])
def test_threshold_of_several_queries(group: int) -> None:
    """Their rows do not fill a job."""
    pages, q, truth = tail_without_weight("k4v4", group, 192, 64)  # few tiles: a program has all of a head
    several = (q * (12 / truth.lse[..., None])).repeat_interleave(2, 0).float()  # of scores that are 8 to 12 at most
    every, some = (run(several, pages, Scoring(threshold=x), starts=[0, 2, 4])[0].out[:2] for x in (0.0, 1e-2))
    assert bool(every.isnan().all())
    assert bool(some.isfinite().all())


def tail_without_weight(name: str, group: int, tokens: int, heavy: int) -> tuple[Pages, torch.Tensor, Partial]:
    """Two sequences, queries, and what they should find; in the first sequence, tokens from `heavy` on have scores of
    0, and value scales that are NaN."""
    pages = make_pages(name, 128, [tokens, tokens], 2, heavy)
    key, value = pages.key_parts().scale, pages.value_parts().scale
    assert key is not None
    assert value is not None
    page, row = pages.slots(0, torch.arange(heavy, tokens, device=DEVICE))
    key[page, :, row] = 0.0
    q = make_queries(pages, group, size=8.0)
    _, truth = run(q, pages)
    value[page, :, row] = torch.nan
    return pages, q, truth


@on_gpu
@pytest.mark.parametrize("threshold", [1e-6, 1e-3])
def test_threshold_changes_little(threshold: float) -> None:
    pages = make_pages("k4v4", 128, [1000, 3, 0], 2, 64, spread=1.0)
    q = make_queries(pages, 4, size=4.0)
    every, some = (run(q, pages, Scoring(threshold=x))[0] for x in (0.0, threshold))
    assert torch.equal(every.lse, some.lse)
    assert bool(((every.out - some.out).abs() <= 1000 * threshold * 40).all())
