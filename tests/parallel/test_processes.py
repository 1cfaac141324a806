"""One process among others: workers of a DataLoader, and Python threads that each have caches of their own."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import aurakv as kv
from aurakv import backends

FORMAT = kv.Format.parse("k4v3", 64)
CPU = [name for name in ("native", "reference") if backends.why_not(name) is None]


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def life(seed, backend):
    """A cache from its first token to a decode; what it answered."""
    cache = kv.KVCache.contiguous(FORMAT, 2, 2, backend=backend)
    k, v, q = rand(200, 2, 64, seed=seed), rand(200, 2, 64, seed=seed + 1), rand(200, 4, 64, seed=seed + 2)
    parts = [cache.step(q[:150], k[:150], v[:150], [0, 120, 150])]
    parts += [cache.step(*(x[i : i + 2] for x in (q, k, v))) for i in range(150, 156, 2)]
    cache.fork(0, 1)
    parts.append(cache.step(*(x[156:186] for x in (q, k, v)), [0, 1, 30]))
    return torch.cat([part.out for part in parts])


class Lives(Dataset):
    def __init__(self, backend, shared):
        self.backend, self.shared, self.parent = backend, shared, os.getpid()

    def __len__(self):
        return 4

    def __getitem__(self, i):
        assert os.getpid() != self.parent
        q = rand(1, 4, 64, seed=i)
        return life(10 * i, self.backend), kv.attend(q, self.shared.pages, backend=self.backend).out


@pytest.mark.parametrize("name", CPU)
def test_workers_of_a_data_loader(name):
    """Forked after the threads of this process have run, with a cache that they inherit."""
    shared = kv.KVCache.contiguous(FORMAT, 1, 2, backend=name)
    x = rand(5000, 2, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared.append(x, x, [0, 5000])
        wanted = kv.attend(rand(1, 4, 64), shared.pages, backend=name).out
        loader = DataLoader(Lives(name, shared), batch_size=None, num_workers=2, timeout=120)
        epochs = [list(loader) for _ in range(2)]  # workers come and go
        assert torch.equal(kv.attend(rand(1, 4, 64), shared.pages, backend=name).out, wanted)
    finally:
        torch.set_num_threads(threads)
    for epoch in epochs:
        for i, (lived, seen) in enumerate(epoch):
            torch.testing.assert_close(lived, life(10 * i, name))
            torch.testing.assert_close(seen, kv.attend(rand(1, 4, 64, seed=i), shared.pages, backend=name).out)


@pytest.mark.parametrize("name", CPU)
def test_threads_with_caches_of_their_own(name):
    wanted = [life(10 * i, name) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda i: life(10 * i, name), range(4)))
            assert all(map(torch.equal, got, wanted))
