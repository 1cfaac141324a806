"""Caches to save, and files of them to damage."""

import torch

import aurakv as kv
from aurakv.storage.uncompressed import Uncompressed
from tools.fuzz_files import File, append, saved

LEVELS = (-2.0, -0.5, 0.25, 1.5)
OWN = kv.Format(kv.Codec.key(32, 2, table=LEVELS, seed=2**64 - 1), kv.Codec.value(16, 3, dtype=torch.float32))
UNCOMPRESSED = Uncompressed(first=3, recent=5, dtype=torch.float16, rollback=6)


def fmt(name, dims=32):
    return kv.Format.parse(name, dims)


def pool(format, page_size, **options):
    return kv.PagePool(format, 1000, page_size, 2, **options)


def offset(dim):
    return torch.randn(2, dim, generator=torch.Generator().manual_seed(3))


CACHES = {
    "contiguous": lambda: kv.KVCache.contiguous(fmt("k4v3"), 4, 2),
    "contiguous with capacity": lambda: kv.KVCache.contiguous(fmt("k8v2"), 4, 2, capacity=500),
    "contiguous uncompressed": lambda: kv.KVCache.contiguous(fmt("k5v6", (64, 32)), 4, 2, uncompressed=UNCOMPRESSED),
    "own levels": lambda: kv.KVCache.contiguous(OWN, 4, 2, uncompressed=Uncompressed(recent=20, dtype=torch.float32)),
    "offsets": lambda: kv.KVCache.contiguous(fmt("k4v4"), 4, 2, key_offset=offset(32), value_offset=offset(32)),
    "16 bits": lambda: kv.KVCache.contiguous(fmt("k16:f32/v16:f16", (24, 7)), 4, 2),
    "mixed": lambda: kv.KVCache.contiguous(fmt("k16/v4"), 4, 2, value_offset=offset(32)),
    "ring": lambda: kv.KVCache.ring(fmt("k4v4"), 4, 2, window=20, page_size=8, chunk=4, rollback=3),
    "ring with sinks": lambda: kv.KVCache.ring(fmt("k3v5"), 4, 2, window=9, sinks=5, page_size=4, chunk=8, rollback=2),
    "ring uncompressed": lambda: kv.KVCache.ring(
        OWN, 4, 2, window=17, sinks=2, page_size=5, rollback=6, uncompressed=UNCOMPRESSED
    ),
    "first tokens": lambda: kv.KVCache.contiguous(fmt("k4v4"), 4, 2, uncompressed=Uncompressed(first=4)),
    "paged by 7, many first tokens": lambda: kv.KVCache.paged(
        pool(fmt("k4v4"), 7, key_offset=offset(32)), 4, uncompressed=Uncompressed(100, 0, torch.float16)
    ),
    "ring first tokens": lambda: kv.KVCache.ring(
        fmt("k4v4"), 4, 2, window=9, page_size=4, uncompressed=Uncompressed(first=2)
    ),
    "ring of one": lambda: kv.KVCache.ring(fmt("k4v4"), 4, 2, window=1, page_size=1, chunk=1),
    "paged": lambda: kv.KVCache.paged(pool(fmt("k4v4"), 16), 4),
    "paged by 1": lambda: kv.KVCache.paged(pool(fmt("k6v8"), 1), 4),
    "paged by 7 uncompressed": lambda: kv.KVCache.paged(
        pool(OWN, 7, key_offset=offset(32)), 4, uncompressed=UNCOMPRESSED
    ),
    "paged fixed width": lambda: kv.KVCache.paged(pool(fmt("k4v16"), 8), 4, max_tokens=300),
}


def ring_file():
    torch.manual_seed(0)
    cache = kv.KVCache.ring(
        fmt("k4v4"), 3, 2, window=8, sinks=3, page_size=4, chunk=4, rollback=2, uncompressed=UNCOMPRESSED
    )
    append(cache, [100, 3, 0])
    return File(saved(cache))


def paged_file():
    torch.manual_seed(0)
    cache = kv.KVCache.paged(pool(fmt("k4v4"), 8, key_offset=offset(32)), 3, max_tokens=40)
    append(cache, [20, 9, 0])
    cache.fork(0, 2)
    return File(saved(cache))


def contiguous_file():
    torch.manual_seed(0)
    cache = kv.KVCache.contiguous(fmt("k4v4"), 2, 2)
    append(cache, [20, 9])
    return File(saved(cache))
