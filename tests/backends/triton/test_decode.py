"""The decode kernel against the reference in float64 on the same pages: shapes, widths and storage. Needs a GPU.

`pytest --capability 8.0`, or the same of tools/gpu_conformance.py, runs what a GPU of that capability would."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aurakv.attention.partial import Partial
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention
from aurakv.backends import reference
from aurakv.checks import rows_of

pytest.importorskip("triton")
from aurakv.backends.triton.decode import launch
from tests.backends.triton.decode_cases import (
    CUBIC,
    DEFAULT,
    FLAT,
    FORMATS,
    MINIFLOAT,
    UNIFORM,
    close,
    launches,
    limit_of,
    make_pages,
    make_queries,
    run,
    with_offsets,
)
from tests.helpers.gpu import DEVICE, on_gpu, on_real_gpu


@on_gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 12, 16])
def test_groups(name: str, group: int) -> None:
    pages = make_pages(name, 128, [1, 64, 63, 0, 200, 1000], 2, 64)
    close(*run(make_queries(pages, group), pages), limit=limit_of(name))


@on_gpu
@pytest.mark.parametrize("name", [*FORMATS, UNIFORM])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 12])
def test_short_contexts_take_one_launch(name: str, group: int) -> None:
    """By what pages can hold or by what a window shows; the same as in pieces."""
    limit = limit_of(name)
    short = with_offsets(make_pages(name, 128, [1, 64, 63, 0, 33, 40], 2, 64, capacity=64))
    long = make_pages(name, 128, [700, 1000, 3, 0, 90, 64], 2, 64)
    sinks = torch.randn(2 * group, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    several = torch.randn(9, 2 * group, 128, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
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


@on_gpu
def test_many_short_contexts_take_one_launch() -> None:
    """Where sequences alone keep the device busy, up to 512 tokens."""
    pages = make_pages(CUBIC, 128, [(37 * i) % 513 for i in range(256)], 2, 64, capacity=512)
    with launches() as ran:
        close(*run(make_queries(pages, 4), pages))
    assert ran == ["decode_attention"]


@on_gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 96, 192])
@pytest.mark.parametrize("lengths", [[4096], [0], [0, 0, 5000], [65, 129, 1, 777, 3000], [64] * 40])
def test_lengths(lengths: list[int], page_size: int) -> None:
    pages = make_pages(MINIFLOAT, 128, lengths, 3, page_size)
    close(*run(make_queries(pages, 4), pages))


@on_gpu
@pytest.mark.parametrize("group", [4, 8])
def test_contiguous_of_any_size(group: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [700, 1000, 3], 2, 1000)
    close(*run(make_queries(pages, group), pages))


@on_gpu
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
    q = torch.randn(8, 2 * group, 128, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    close(*run(q, with_offsets(pages), Scoring(window=66, sinks=65), starts=[0, 2, 3, 3, 5, 8]), limit=limit)


@on_gpu
@pytest.mark.parametrize("seqs", [1, 70, 200])
def test_many_sequences(seqs: int) -> None:
    """Many heads share a merge, few have many pieces each."""
    pages = make_pages(MINIFLOAT, 128, [(37 * i) % 400 if seqs > 1 else 20000 for i in range(seqs)], 4, 64)
    close(*run(make_queries(pages, 3), pages))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [4, 8])
def test_dims(dim: int, dtype: torch.dtype, group: int) -> None:
    pages = make_pages(MINIFLOAT if dtype != torch.float16 else CUBIC, dim, [100, 1500], 2, 64)
    close(*run(make_queries(pages, group, dtype), pages))


@on_gpu
@pytest.mark.parametrize(("name", "dim"), [(n, 256) for n in FORMATS] + [("k8v8", 64), ("k8:cubic/v4", 64)])
@pytest.mark.parametrize("group", [4, 8])
def test_widths_of_other_dims(name: str, dim: int, group: int) -> None:
    pages = make_pages(name, dim, [100, 1500], 2, 32)
    close(*run(make_queries(pages, group), pages), limit=limit_of(name))


@on_gpu
def test_ring_with_pinned_pages() -> None:
    pages = make_pages(MINIFLOAT, 128, [1000, 100, 700], 2, 64, ring=(6, 1))
    close(*run(make_queries(pages, 4), pages, Scoring(window=200)))


@on_gpu
@pytest.mark.parametrize(("name", "dim"), [(CUBIC, 64), (CUBIC, 128), ("k8v4", 128), ("k2v2", 128), ("k3v4", 256)])
@pytest.mark.parametrize("group", [4, 8, 16])
def test_pages_of_16(name: str, dim: int, group: int) -> None:
    """Several make a tile; those behind the last token are not there, others wrap in the middle of a tile."""
    pages = make_pages(name, dim, [1, 16, 17, 0, 200, 999], 2, 16, capacity=1100)
    for seq, length in enumerate(pages.lengths.tolist()):
        pages.table[seq, -(-length // 16) :] = -1
    close(*run(make_queries(pages, group), pages))
    close(*run(make_queries(pages, group), pages, Scoring(window=150, sinks=20)))
    q = torch.randn(9, 2 * group, dim, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    close(*run(q, pages, starts=[0, 1, 2, 3, 3, 5, 9]))
    for width, pinned in ((17, 0), (21, 3)):
        ring = make_pages(name, dim, [1000, 100, 700, 333], 2, 16, ring=(width, pinned))
        close(*run(make_queries(ring, group), ring, Scoring(window=200, sinks=16 * pinned)))


@on_gpu
@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_splits_change_nothing(splits: int) -> None:
    pages = make_pages(MINIFLOAT, 128, [3000, 10, 500], 2, 64)
    close(*run(make_queries(pages, 4), pages, splits=splits))


@on_gpu
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


@on_gpu
def test_strided_queries() -> None:
    pages = make_pages(MINIFLOAT, 128, [100, 300], 2, 64)
    wide = torch.randn(2, 8, 2 * 128, device=DEVICE)
    close(*run(wide[:, :, 128:], pages))
    packed = torch.randn(2, 24, 128, device=DEVICE)
    close(*run(packed[:, 8:16], pages))


@on_real_gpu
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
        truth = reference.attend(q.double(), Attention(pages, starts, Scoring()))
        close(part, truth)
