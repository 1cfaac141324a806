"""Pages and queries for the decode kernel, and its results next to those of the reference in float64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aurakv.attention.partial import Partial
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention
from aurakv.backends import reference
from aurakv.checks import rows_of
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate, parts

pytest.importorskip("triton")
from aurakv.backends.triton.decode import launch
from tests.helpers.gpu import DEVICE

DEFAULT = Scoring()
MINIFLOAT, CUBIC = "k4/v4:minifloat", "k4v4"
# rows that lie as in memory
FLAT = ["k3v3", "k3/v3:minifloat", "k3v4", "k4v3", "k8v3", "k5v4", "k6v6", "k4v5", "k5v3"]
FORMATS = [MINIFLOAT, CUBIC, "k2v2", "k8v4", "k8v8", "k8:cubic/v8:cubic", "k4v2", "k2v4", *FLAT]
UNIFORM = "k2/v2:uniform"
# rows that are read in pieces: of other dimensions than 128 and 256, and at 64 of other widths than 4 and 8 bits
OTHER_WIDTHS = ["k2v2", "k3v3", "k4v2", "k5v5", "k6v6", "k8v3"]
PIECES = [
    *((name, 64) for name in OTHER_WIDTHS),
    *((name, dim) for dim in (80, 96) for name in ("k4v4", "k8v8", *OTHER_WIDTHS)),
    *((name, 512) for name in ("k4v4", "k8v4", *OTHER_WIDTHS)),
]  # fmt: skip
UNEVEN = {
    bits: str([round(-1 + 0.01 * i + 0.008 * i * i, 3) for i in range(1 << bits)]).replace(" ", "")
    for bits in (2, 3, 4)
}
TABLES = [f"k{bits}:{table}/v{bits}:{table}" for bits in (2, 3, 4) for table in ("lloyd-max", UNEVEN[bits])]
WIDE_SCALES = ["k4v4:f32", "k4:f32/v4", "k3:f32/v8:f32", "k2v2:f32"]


def make_pages(
    name: str, dim: int, lengths: list[int], kv_heads: int, page_size: int, seed: int = 0, spread: float = 0.5,
    ring: tuple[int, int] | None = None, capacity: int | None = None,
) -> Pages:  # fmt: skip
    """Random codes in pages of random order; everything beyond the lengths is NaN."""
    device = torch.device(DEVICE)
    format = Format.parse(name, dim)
    generator = torch.Generator(device).manual_seed(seed)
    width = -(-max([*lengths, 1]) // page_size) if ring is None else ring[0]
    if capacity is not None:
        width = -(-capacity // page_size)
    count = len(lengths) * width + 3
    data = allocate(format, page_size, count, kv_heads, device)
    data.fill_(255)  # NaN scales
    order = torch.randperm(count, generator=generator, device=device)[: len(lengths) * width]
    table = order.view(len(lengths), width).to(torch.int32)
    pages = Pages(
        format, page_size, data, table.contiguous(), torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device), ring=ring is not None, pinned=0 if ring is None else ring[1],
    )  # fmt: skip
    for seq, length in enumerate(lengths):
        page, row = pages.slots(seq, torch.arange(length, device=device))
        for part in parts(format, data, page_size):
            codes = torch.randint(0, 256, (length, kv_heads, part.data.shape[-1]), generator=generator, device=device)
            part.data[page, :, row] = codes.to(torch.uint8)
            scale = torch.exp(spread * torch.randn(length, kv_heads, generator=generator, device=device))
            assert part.scale is not None
            part.scale[page, :, row] = scale.to(part.scale.dtype)
    return pages


def make_queries(
    pages: Pages, group: int, dtype: torch.dtype = torch.float32, seed: int = 1, size: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (pages.seqs, pages.kv_heads * group, pages.format.key.dim)
    return (size * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


def run(
    q: torch.Tensor, pages: Pages, scoring: Scoring = DEFAULT, ends=None, sinks=None, splits=None, starts=None
) -> tuple[Partial, Partial]:
    """(fast, reference in float64)"""
    starts = rows_of("starts", starts, pages.seqs, q.shape[0], q.device)
    ends = pages.lengths if ends is None else ends
    reason = launch.why_not_call(q, pages, scoring, "fast")
    assert reason is None, reason
    fast = launch.attend(q, pages, starts, ends, scoring, sinks, splits, None)
    truth = reference.attend(q.double(), Attention(pages, starts, scoring, sinks, ends=ends))
    return fast, truth


def close(fast: Partial, truth: Partial, limit: float = 1.5e-3) -> None:
    assert torch.equal(torch.isneginf(fast.lse), torch.isneginf(truth.lse))
    seen = ~torch.isneginf(truth.lse)
    assert torch.allclose(fast.lse[seen].double(), truth.lse[seen], atol=2e-3, rtol=1e-3)
    assert bool(fast.out.isfinite().all())
    norm = truth.out.norm(dim=-1)
    error = (fast.out.double() - truth.out).norm(dim=-1)
    rounding = {torch.float32: 0.0, torch.float16: 5e-4, torch.bfloat16: 4e-3}[fast.out.dtype]
    assert bool((error <= (limit + rounding) * norm + 1e-6).all()), float((error / norm.clamp_min(1e-9)).max())


def limit_of(name: str) -> float:
    """float16 arithmetic makes cubic levels of 8 bits to 1e-4, all others exactly."""
    return 4e-3 if name.startswith("k8:cubic") else 1e-3


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that run meanwhile."""
    names: list[str] = []
    original = launch.Launch.__call__

    def note(self: Any, **tensors: torch.Tensor) -> None:
        names.append(self.kernel.__name__)
        original(self, **tensors)

    launch.Launch.__call__ = note
    try:
        yield names
    finally:
        launch.Launch.__call__ = original


def with_offsets(pages: Pages, key: bool = True, value: bool = True) -> Pages:
    generator = torch.Generator(DEVICE).manual_seed(5)
    shape = (2, pages.kv_heads, pages.format.key.dim)
    offsets = torch.randn(shape, generator=generator, device=DEVICE)
    return dataclasses.replace(
        pages,
        key_offset=offsets[0].contiguous() if key else None,
        value_offset=offsets[1].contiguous() if value else None,
    )
