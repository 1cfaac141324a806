"""A ring that was truncated far keeps working: what is appended afterwards is held."""

import torch

import aurakv as kv


def ring(window, sinks):
    return kv.KVCache.ring(kv.Format.parse("k4v4", 64), 1, 1, window, sinks, page_size=16, chunk=16, rollback=4)


def same_as_fresh(cache, tokens, keep):
    """Truncate to `keep`, append 30 others one by one, and compare each step with a cache that never was longer."""
    q, new = torch.randn(30, 2, 64), torch.randn(30, 1, 64)
    fresh = ring(cache.page_table.kept.window, cache.page_table.kept.sinks)
    cache.append(tokens, tokens, [0, len(tokens)])
    fresh.append(tokens[:keep], tokens[:keep], [0, keep])
    cache.truncate(0, keep)
    for i in range(30):
        a, b = (c.step(q[i : i + 1], new[i : i + 1], new[i : i + 1]) for c in (cache, fresh))
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)


def test_into_the_pinned_sinks():
    torch.manual_seed(0)
    same_as_fresh(ring(32, 16), torch.randn(1000, 1, 64), 10)


def test_a_window_of_one_needs_nothing_before():
    torch.manual_seed(0)
    same_as_fresh(ring(1, 0), torch.randn(1000, 1, 64), 500)


def test_positions_of_a_truncated_ring():
    cache = ring(1, 16)
    tokens = torch.randn(1000, 1, 64)
    cache.append(tokens, tokens, [0, 1000])
    cache.truncate(0, 500)
    assert cache.positions(0).tolist() == list(range(16))
    cache.append(tokens[:2], tokens[:2], [0, 2])
    assert cache.positions(0).tolist() == [*range(16), 500, 501]
