"""The decode kernel against the reference in float64 on the same pages. Needs a GPU.

`pytest --capability 8.0`, or the same of tools/gpu_conformance.py, runs what a GPU of that capability would."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aurakv.attention.partial import Partial, merge
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention
from aurakv.backends import reference
from aurakv.checks import rows_of
from aurakv.format.codec import Codec, Format
from aurakv.storage.pages import Pages, allocate, parts

pytest.importorskip("triton")
from aurakv.backends.triton.decode import launch

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU"
)
DEFAULT = Scoring()
MINIFLOAT, CUBIC = "k4/v4:minifloat", "k4v4"
# rows that lie as in memory
FLAT = ["k3v3", "k3/v3:minifloat", "k3v4", "k4v3", "k8v3", "k5v4", "k6v6", "k4v5", "k5v3"]
FORMATS = [MINIFLOAT, CUBIC, "k2v2", "k8v4", "k8v8", "k8:cubic/v8:cubic", "k4v2", "k2v4", *FLAT]
UNIFORM = "k2/v2:uniform"


def make_pages(
    name: str, dim: int, lengths: list[int], kv_heads: int, page_size: int, seed: int = 0, spread: float = 0.5,
    ring: tuple[int, int] | None = None, capacity: int | None = None,
) -> Pages:  # fmt: skip
    """Random codes in pages of random order; everything beyond the lengths is NaN."""
    device = torch.device("cuda")
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
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (pages.seqs, pages.kv_heads * group, pages.format.key.dim)
    return (size * torch.randn(shape, generator=generator, device="cuda")).to(dtype)


def run(
    q: torch.Tensor, pages: Pages, scoring: Scoring = DEFAULT, ends=None, sinks=None, splits=None, starts=None
) -> tuple[Partial, Partial]:
    """(fast, reference in float64)"""
    starts = rows_of("starts", starts, pages.seqs, q.shape[0], q.device)
    ends = pages.lengths if ends is None else ends
    reason = launch.why_not_call(q, pages, scoring, "fast")
    assert reason is None, reason
    fast = launch.attend(q, pages, starts, ends, scoring, sinks, splits, None)
    uncompressed = reference.attend(q.double(), Attention(pages, starts, scoring, sinks, ends=ends))
    return fast, uncompressed


def close(fast: Partial, uncompressed: Partial, limit: float = 1.5e-3) -> None:
    assert torch.equal(torch.isneginf(fast.lse), torch.isneginf(uncompressed.lse))
    seen = ~torch.isneginf(uncompressed.lse)
    assert torch.allclose(fast.lse[seen].double(), uncompressed.lse[seen], atol=2e-3, rtol=1e-3)
    assert bool(fast.out.isfinite().all())
    norm = uncompressed.out.norm(dim=-1)
    error = (fast.out.double() - uncompressed.out).norm(dim=-1)
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


@needs_gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 12, 16])
def test_groups(name: str, group: int) -> None:
    pages = make_pages(name, 128, [1, 64, 63, 0, 200, 1000], 2, 64)
    close(*run(make_queries(pages, group), pages), limit=limit_of(name))


@needs_gpu
@pytest.mark.parametrize("name", [*FORMATS, UNIFORM])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 12])
def test_short_contexts_take_one_launch(name: str, group: int) -> None:
    """By what pages can hold or by what a window shows; the same as in pieces."""
    limit = limit_of(name)
    short = with_offsets(make_pages(name, 128, [1, 64, 63, 0, 33, 40], 2, 64, capacity=64))
    long = make_pages(name, 128, [700, 1000, 3, 0, 90, 64], 2, 64)
    sinks = torch.randn(2 * group, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    several = torch.randn(9, 2 * group, 128, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    for pages, scoring in ((short, DEFAULT), (long, Scoring(window=20, sinks=4, first=2))):
        q = make_queries(pages, group)
        with launches() as ran:
            close(*run(q, pages, scoring, sinks=sinks), limit=limit)
            close(*run(several, pages, scoring, starts=[0, 2, 3, 3, 5, 8, 9]), limit=limit)
            close(*run(q, pages, dataclasses.replace(scoring, softcap=30.0)), limit=limit)
        assert ran == ["decode_attention"] * 3
        with launches() as ran:
            close(*run(q, pages, scoring, sinks=sinks, splits=2), limit=limit)
        assert ran == ["decode_attention", "merge_pieces"]


@needs_gpu
def test_many_short_contexts_take_one_launch() -> None:
    """Where sequences alone keep the device busy, up to 512 tokens."""
    pages = make_pages(CUBIC, 128, [(37 * i) % 513 for i in range(256)], 2, 64, capacity=512)
    with launches() as ran:
        close(*run(make_queries(pages, 4), pages))
    assert ran == ["decode_attention"]


@needs_gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 96, 192])
@pytest.mark.parametrize("lengths", [[4096], [0], [0, 0, 5000], [65, 129, 1, 777, 3000], [64] * 40])
def test_lengths(lengths: list[int], page_size: int) -> None:
    pages = make_pages(MINIFLOAT, 128, lengths, 3, page_size)
    close(*run(make_queries(pages, 4), pages))


@needs_gpu
@pytest.mark.parametrize("group", [4, 8])
def test_contiguous_of_any_size(group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [700, 1000, 3], 2, 1000)
    close(*run(make_queries(pages, group), pages))


@needs_gpu
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("page_size", [16, 32, 128, 333])
@pytest.mark.parametrize("group", [4, 8])
def test_flat_rows(name: str, page_size: int, group: int) -> None:
    """Pages of whole tiles of 32 and 64 tokens, and contexts of which the last tile is not whole."""
    lengths = [700, page_size, 3, 0, 333] if page_size < 333 else [page_size, 7, 320, 0, page_size - 1]
    pages = make_pages(name, 128, lengths, 2, page_size)
    limit = limit_of(name)
    close(*run(make_queries(pages, group), pages), limit=limit)
    close(*run(make_queries(pages, group), pages, Scoring(window=70, sinks=5, first=2, recent=3)), limit=limit)
    q = torch.randn(8, 2 * group, 128, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    close(*run(q, with_offsets(pages), Scoring(window=66, sinks=65), starts=[0, 2, 3, 3, 5, 8]), limit=limit)


@needs_gpu
@pytest.mark.parametrize("seqs", [1, 70, 200])
def test_many_sequences(seqs: int) -> None:
    """Many heads share a merge, few have many pieces each."""
    pages = make_pages(MINIFLOAT, 128, [(37 * i) % 400 if seqs > 1 else 20000 for i in range(seqs)], 4, 64)
    close(*run(make_queries(pages, 3), pages))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [4, 8])
def test_dims(dim: int, dtype: torch.dtype, group: int) -> None:
    pages = make_pages(MINIFLOAT if dtype != torch.float16 else CUBIC, dim, [100, 1500], 2, 64)
    close(*run(make_queries(pages, group, dtype), pages))


@needs_gpu
@pytest.mark.parametrize(("name", "dim"), [(n, 256) for n in FORMATS] + [("k8v8", 64), ("k8:cubic/v4", 64)])
@pytest.mark.parametrize("group", [4, 8])
def test_widths_of_other_dims(name: str, dim: int, group: int) -> None:
    pages = make_pages(name, dim, [100, 1500], 2, 32)
    close(*run(make_queries(pages, group), pages), limit=limit_of(name))


def with_offsets(pages: Pages, key: bool = True, value: bool = True) -> Pages:
    generator = torch.Generator("cuda").manual_seed(5)
    shape = (2, pages.kv_heads, pages.format.key.dim)
    offsets = torch.randn(shape, generator=generator, device="cuda")
    return dataclasses.replace(
        pages,
        key_offset=offsets[0].contiguous() if key else None,
        value_offset=offsets[1].contiguous() if value else None,
    )


@needs_gpu
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize(("key", "value"), [(True, True), (True, False), (False, True)])
def test_offsets(group: int, key: bool, value: bool) -> None:
    pages = with_offsets(make_pages(CUBIC, 128, [300, 0, 64, 1000], 2, 64), key, value)
    close(*run(make_queries(pages, group), pages))
    sinks = torch.linspace(-2, 5, 2 * group, device="cuda")
    close(*run(make_queries(pages, group), pages, Scoring(first=4, recent=40, window=200), sinks=sinks))


@needs_gpu
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("name", [CUBIC, "k8:cubic/v4"])
def test_soft_cap(name: str, group: int, offsets: bool) -> None:
    pages = make_pages(name, 128, [300, 0, 64, 1000], 2, 64)
    pages = with_offsets(pages) if offsets else pages
    close(*run(make_queries(pages, group), pages, Scoring(softcap=20.0)), limit=limit_of(name))
    close(*run(make_queries(pages, group, size=5.0), pages, Scoring(softcap=3.0)), limit=limit_of(name))


@needs_gpu
@pytest.mark.parametrize("group", [4, 8, 12])
@pytest.mark.parametrize("sinks", [1, 64, 65, 130, 5000])
def test_positional_sinks(group: int, sinks: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [1, 64, 300, 1000, 0, 90, 2000], 2, 64)
    for scoring in (Scoring(window=70, sinks=sinks), Scoring(window=500, sinks=sinks, first=3, recent=20)):
        close(*run(make_queries(pages, group), pages, scoring))
    ring = make_pages(MINIFLOAT, 128, [1000, 100, 700], 2, 64, ring=(6, 2))
    close(*run(make_queries(ring, group), ring, Scoring(window=200, sinks=min(sinks, 128))))


@needs_gpu
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
    generator = torch.Generator("cuda").manual_seed(7)
    q = torch.randn(starts[-1], 2 * group, 128, generator=generator, device="cuda")
    if q.shape[0] * group <= 128:
        close(*run(q, pages, scoring, starts=starts))


@needs_gpu
@pytest.mark.parametrize("side", ["key", "value"])
def test_damage_beside_other_queries(side: str) -> None:
    """A damaged token reaches the queries at and after it, not those before."""
    pages = make_pages(MINIFLOAT, 128, [300, 300], 2, 64)
    part = pages.key_parts() if side == "key" else pages.value_parts()
    page, row = pages.slots(1, torch.tensor([298], device="cuda"))
    assert part.scale is not None
    part.scale[page, 1, row] = torch.nan
    q = torch.randn(8, 8, 128, device="cuda")
    fast, uncompressed = run(q, pages, starts=[0, 4, 8])
    assert torch.equal(fast.out.isnan().any(-1), uncompressed.out.isnan().any(-1))
    assert torch.equal(fast.lse.isnan(), uncompressed.lse.isnan())


@needs_gpu
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
            fast, uncompressed = run(x.contiguous(), pages)
            error = (fast.out.double() - uncompressed.out).norm(dim=-1) / uncompressed.out.norm(dim=-1)
            worst.append(float(error.max()))
    print(name, group, "errors", " ".join(f"{x:.1e}" for x in worst))
    assert max(worst) <= 5e-3, worst


@needs_gpu
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


@needs_gpu
def test_ends_before_the_length() -> None:
    pages = make_pages(MINIFLOAT, 128, [500, 640], 2, 64)
    ends = torch.tensor([130, 64], dtype=torch.int32, device="cuda")
    close(*run(make_queries(pages, 4), pages, ends=ends))


@needs_gpu
def test_ring_with_pinned_pages() -> None:
    pages = make_pages(MINIFLOAT, 128, [1000, 100, 700], 2, 64, ring=(6, 1))
    close(*run(make_queries(pages, 4), pages, Scoring(window=200)))


@needs_gpu
@pytest.mark.parametrize(("name", "dim"), [(CUBIC, 64), (CUBIC, 128), ("k8v4", 128), ("k2v2", 128), ("k3v4", 256)])
@pytest.mark.parametrize("group", [4, 8, 16])
def test_pages_of_16(name: str, dim: int, group: int) -> None:
    """Several make a tile; those behind the last token are not there, others wrap in the middle of a tile."""
    pages = make_pages(name, dim, [1, 16, 17, 0, 200, 999], 2, 16, capacity=1100)
    for seq, length in enumerate(pages.lengths.tolist()):
        pages.table[seq, -(-length // 16) :] = -1
    close(*run(make_queries(pages, group), pages))
    close(*run(make_queries(pages, group), pages, Scoring(window=150, sinks=20)))
    q = torch.randn(9, 2 * group, dim, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    close(*run(q, pages, starts=[0, 1, 2, 3, 3, 5, 9]))
    for width, pinned in ((17, 0), (21, 3)):
        ring = make_pages(name, dim, [1000, 100, 700, 333], 2, 16, ring=(width, pinned))
        close(*run(make_queries(ring, group), ring, Scoring(window=200, sinks=16 * pinned)))


@needs_gpu
def test_sink_logits() -> None:
    pages = make_pages(MINIFLOAT, 128, [300, 0, 64], 2, 64)
    sinks = torch.tensor([0.0, 3.0, -torch.inf, torch.inf, -2.0, 20.0, 1.0, 0.5], device="cuda")
    q = make_queries(pages, 4)
    fast, uncompressed = run(q, pages, sinks=sinks)
    assert torch.allclose(fast.lse.double(), uncompressed.lse, atol=2e-3)
    assert torch.allclose(fast.out.double(), uncompressed.out, atol=2e-3)


@needs_gpu
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_first_tokens_uncompressed_and_key_scale(group: int, dim: int) -> None:
    """Raw first tokens scored by the way, and scaled queries, are what separate calls give."""
    lengths, first = [300, 2, 0, 65], 4
    pages = make_pages(CUBIC, dim, lengths, 2, 64)
    offsets = torch.randn(2, 2, dim, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    pages = dataclasses.replace(pages, key_offset=offsets[0], value_offset=offsets[1])
    raw = Codec(dim, 16, dtype=torch.bfloat16)
    uncompressed = Pages(
        Format(raw, raw), 4, torch.zeros(5, 2, Format(raw, raw).layout(4).bytes, dtype=torch.uint8, device="cuda"),
        torch.tensor([[3], [0], [2], [4]], dtype=torch.int32, device="cuda"),
        torch.tensor([min(n, first) for n in lengths], dtype=torch.int32, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    uncompressed.data.view(torch.bfloat16).normal_()
    q, scoring = make_queries(pages, group, torch.bfloat16), Scoring(first=first)
    key_scale = torch.rand(2, dim, device="cuda") + 0.5
    assert launch.serves_uncompressed(q, pages, uncompressed, scoring)
    starts = rows_of("starts", None, 4, 4, q.device)
    sinks = torch.randn(2 * group, device="cuda")
    prepared = launch.prepare(q, pages, starts, pages.lengths, scoring, sinks, None, uncompressed, key_scale)
    got, again = prepared(q, None), prepared(q.clone(), None)
    assert torch.equal(got.out, again.out)
    x = (q.double().unflatten(1, (2, -1)) / key_scale[:, None]).flatten(1, 2)
    rest = dataclasses.replace(scoring, only_uncompressed=True)
    parts = [
        reference.attend(x, Attention(pages, starts, scoring, sinks)),
        reference.attend(x, Attention(uncompressed, starts, rest, ends=pages.lengths)),
    ]
    close(got, merge(*parts))


@needs_gpu
@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_splits_change_nothing(splits: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [3000, 10, 500], 2, 64)
    close(*run(make_queries(pages, 4), pages, splits=splits))


@needs_gpu
@pytest.mark.parametrize("name", [MINIFLOAT, CUBIC])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1.0, 100.0, 10000.0])
def test_value_scales_of_any_size(name: str, group: int, factor: float) -> None:
    pages = make_pages(name, 128, [1000], 2, 64, spread=1.0)
    scale = pages.value_parts().scale
    assert scale is not None
    scale.copy_((scale.float() * factor).clamp(max=65504))
    close(*run(make_queries(pages, group), pages), limit=2e-3)


@needs_gpu
@pytest.mark.parametrize("group", [4, 8])
def test_growing_value_scales_and_peaked_softmax(group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [2000], 2, 64)
    page, row = pages.slots(0, torch.arange(1000, 2000, device="cuda"))
    scale = pages.value_parts().scale
    assert scale is not None
    scale[page, :, row] = 30000.0
    close(*run(make_queries(pages, group, size=6.0), pages), limit=3e-3)


@needs_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_damage_reaches_who_sees_it(bad: float, side: str, group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [300, 300, 300], 2, 64)
    part = pages.key_parts() if side == "key" else pages.value_parts()
    page, row = pages.slots(1, torch.tensor([70], device="cuda"))
    assert part.scale is not None
    part.scale[page, 1, row] = bad
    fast, uncompressed = run(make_queries(pages, group), pages)
    assert torch.equal(fast.out.isnan().any(-1), uncompressed.out.isnan().any(-1))
    assert torch.equal(fast.lse.isnan(), uncompressed.lse.isnan())
    close(Partial(fast.out[0], fast.lse[0]), Partial(uncompressed.out[0], uncompressed.lse[0]))
    hidden, _ = run(make_queries(pages, group), pages, Scoring(window=200))
    assert bool(hidden.out.isfinite().all())


@needs_gpu
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damaged_query_stays_alone(bad: float, group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [300, 100], 2, 64)
    q = make_queries(pages, group)
    q[0, 1, 3] = bad
    fast, _ = run(q, pages)
    lost = torch.zeros(fast.lse.shape, dtype=torch.bool, device="cuda")
    lost[0, 1] = True
    assert torch.equal(fast.out.isnan().any(-1), lost)
    assert torch.equal(fast.lse.isnan(), lost)


@needs_gpu
def test_repeats_bit_for_bit_and_ignores_neighbours() -> None:
    pages = make_pages(MINIFLOAT, 128, [3000, 500, 2000], 4, 64)
    q = make_queries(pages, 4)
    first, _ = run(q, pages)
    second, _ = run(q, pages)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
    alone = dataclasses.replace(pages, table=pages.table[1:2].contiguous(), lengths=pages.lengths[1:2].contiguous())
    single, _ = run(q[1:2], alone)
    assert torch.allclose(single.out[0], first.out[1], atol=1e-3, rtol=1e-3)
    assert torch.allclose(single.lse[0], first.lse[1], atol=1e-3)


@needs_gpu
def test_strided_queries() -> None:
    pages = make_pages(MINIFLOAT, 128, [100, 300], 2, 64)
    wide = torch.randn(2, 8, 2 * 128, device="cuda")
    close(*run(wide[:, :, 128:], pages))
    packed = torch.randn(2, 24, 128, device="cuda")
    close(*run(packed[:, 8:16], pages))


@needs_gpu
def test_graph_replay_while_lengths_grow() -> None:
    pages = make_pages(MINIFLOAT, 128, [900, 640, 1000], 2, 64, capacity=1024)
    q = make_queries(pages, 4)
    starts = rows_of("starts", None, 3, 3, q.device)
    full = pages.lengths.clone()
    pages.lengths.copy_(torch.tensor([0, 64, 100], dtype=torch.int32))

    def step() -> Partial:
        return launch.attend(q, pages, starts, pages.lengths, Scoring(), None, None, None)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part = step()
    for length in range(1, 900, 37):
        pages.lengths.copy_(torch.minimum(full, torch.full_like(full, length)))
        graph.replay()
        uncompressed = reference.attend(q.double(), Attention(pages, starts, Scoring()))
        close(part, uncompressed)
