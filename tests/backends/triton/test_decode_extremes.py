"""The decode kernel on scales and scores of any size, and on damage. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from aurakv.attention.partial import Partial
from aurakv.attention.scoring import Scoring

pytest.importorskip("triton")
from tests.backends.triton.decode_cases import (
    CUBIC,
    FORMATS,
    MINIFLOAT,
    close,
    make_pages,
    make_queries,
    run,
)
from tests.helpers.gpu import DEVICE, on_gpu


@on_gpu
@pytest.mark.parametrize("side", ["key", "value"])
def test_damage_beside_other_queries(side: str) -> None:
    """A damaged token reaches the queries at and after it, not those before."""
    pages = make_pages(MINIFLOAT, 128, [300, 300], 2, 64)
    part = pages.key_parts() if side == "key" else pages.value_parts()
    page, row = pages.slots(1, torch.tensor([298], device=DEVICE))
    assert part.scale is not None
    part.scale[page, 1, row] = torch.nan
    q = torch.randn(8, 8, 128, device=DEVICE)
    fast, truth = run(q, pages, starts=[0, 4, 8])
    assert torch.equal(fast.out.isnan().any(-1), truth.out.isnan().any(-1))
    assert torch.equal(fast.lse.isnan(), truth.lse.isnan())


@on_gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group", [4, 8])
def test_adversarial_errors(name: str, group: int) -> None:
    """Peaked softmax, log-normal scales, outlier query coordinates: at most 0.5% of the output."""
    pages = make_pages(name, 128, [4000], 2, 64, spread=1.0)
    worst = []
    for size in (1.0, 4.0):
        q = make_queries(pages, group, size=size)
        outlier = q.clone()
        outlier[..., 5] *= 50
        rotated = torch.zeros_like(q)
        rotated[..., 7] = 12 * size
        for x in (q, outlier, pages.format.key.unrotate(rotated)):
            fast, truth = run(x.contiguous(), pages)
            error = (fast.out.double() - truth.out).norm(dim=-1) / truth.out.norm(dim=-1)
            worst.append(float(error.max()))
    print(name, group, "errors", " ".join(f"{x:.1e}" for x in worst))
    assert max(worst) <= 5e-3, worst


@on_gpu
@pytest.mark.parametrize("name", [MINIFLOAT, CUBIC])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1.0, 100.0, 10000.0])
def test_value_scales_of_any_size(name: str, group: int, factor: float) -> None:
    pages = make_pages(name, 128, [1000], 2, 64, spread=1.0)
    scale = pages.value_parts().scale
    assert scale is not None
    scale.copy_((scale.float() * factor).clamp(max=65504))
    close(*run(make_queries(pages, group), pages), limit=2e-3)


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
def test_growing_value_scales_and_peaked_softmax(group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [2000], 2, 64)
    page, row = pages.slots(0, torch.arange(1000, 2000, device=DEVICE))
    scale = pages.value_parts().scale
    assert scale is not None
    scale[page, :, row] = 30000.0
    close(*run(make_queries(pages, group, size=6.0), pages), limit=3e-3)


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_damage_reaches_who_sees_it(bad: float, side: str, group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [300, 300, 300], 2, 64)
    part = pages.key_parts() if side == "key" else pages.value_parts()
    page, row = pages.slots(1, torch.tensor([70], device=DEVICE))
    assert part.scale is not None
    part.scale[page, 1, row] = bad
    fast, truth = run(make_queries(pages, group), pages)
    assert torch.equal(fast.out.isnan().any(-1), truth.out.isnan().any(-1))
    assert torch.equal(fast.lse.isnan(), truth.lse.isnan())
    close(Partial(fast.out[0], fast.lse[0]), Partial(truth.out[0], truth.lse[0]))
    hidden, _ = run(make_queries(pages, group), pages, Scoring(window=200))
    assert bool(hidden.out.isfinite().all())


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damaged_query_stays_alone(bad: float, group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [300, 100], 2, 64)
    q = make_queries(pages, group)
    q[0, 1, 3] = bad
    fast, _ = run(q, pages)
    lost = torch.zeros(fast.lse.shape, dtype=torch.bool, device=DEVICE)
    lost[0, 1] = True
    assert torch.equal(fast.out.isnan().any(-1), lost)
    assert torch.equal(fast.lse.isnan(), lost)
