"""Random operations on caches against a model that knows only lists of tokens and the specified slot rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import aurakv as kv
from aurakv.errors import CapacityError
from aurakv.storage.uncompressed import Uncompressed
from tests.storage.machines import MACHINES, Machine


def explore(machine: type[Machine], page_size: int, backend: str, device: str, examples: int, steps: int) -> None:
    chosen = type(machine.__name__, (machine,), {"page_size": page_size, "backend": backend, "device": device})
    run_state_machine_as_test(
        chosen,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],  # add Phase.shrink to find a shorter failure, in minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("machine", "page_size"), MACHINES)
def test_random_operations(machine, page_size, backend, device):
    explore(machine, page_size, backend, device, 10, 60)


@pytest.mark.full
@pytest.mark.parametrize(("machine", "page_size"), MACHINES)
def test_many_random_operations(machine, page_size, backend, device):
    explore(machine, page_size, backend, device, 100, 100)


def test_the_last_sequence_to_write_a_shared_page_keeps_it():
    """Three sequences that share a page need two more to go their ways, not three; with one less nothing changes."""
    format = kv.Format.parse("k4v4", 16)
    x = torch.arange(7.0 * 16).sin().view(7, 1, 16)
    for pages in (3, 2):
        pool = kv.PagePool(format, pages, 8, 1)
        cache = kv.KVCache.paged(pool, 1)
        cache.append(x[:4], x[:4], [0, 4])
        cache.reorder([0, 0, 0])
        assert pool.free_pages == pages - 1
        if pages == 3:
            cache.append(x[4:], x[4:])
            assert pool.free_pages == 0
            for seq in range(3):
                wanted = kv.encode(x[[0, 1, 2, 3, 4 + seq]], format.key)
                assert torch.equal(cache.codes(seq)[0].data, wanted.data)
        else:
            with pytest.raises(CapacityError, match="needs 2 free pages, got 1 of 2"):
                cache.append(x[4:], x[4:])
            assert (cache.lengths, pool.free_pages) == ([4, 4, 4], 1)


def test_a_cache_without_sequences():
    """It is legal, takes nothing and gives nothing."""
    for cache in (
        kv.KVCache.paged(kv.PagePool(kv.Format.parse("k4v4", 16), 2, 8, 1), 2),
        kv.KVCache.contiguous(kv.Format.parse("k4v4", 16), 2, 1, uncompressed=Uncompressed(first=2, recent=2)),
        kv.KVCache.ring(kv.Format.parse("k4v4", 16), 2, 1, 8),
    ):
        x = torch.ones(2, 1, 16)
        cache.append(x, x)
        cache.reorder([])
        assert cache.lengths == []
        assert cache.pool.free_pages == cache.pool.num_pages
        cache.append(x[:0], x[:0])
        cache.reserve(5)
        part = cache.step(x[:0], x[:0], x[:0])
        assert part.out.shape == (0, 1, 16)
        assert part.lse.shape == (0, 1)
