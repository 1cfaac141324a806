"""Sharded caches: what can be done with one, its files, and processes that die, hang or disagree."""

import datetime
import json
import os
import time

import pytest
import torch
import torch.distributed as dist

import aurakv as kv
from aurakv import parallel
from aurakv.errors import AuraError, CapacityError, FileError, InputError, PeerError
from aurakv.parallel import shard_files
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import poisoned
from tests.helpers.ranks import Ranks
from tests.parallel.cases import Case, D, H, close, digest, make, rand, step

UNCOMPRESSED = Uncompressed(3, 12, torch.float32, rollback=8)
WINDOW = kv.Scoring(window=30, sinks=5)
CASES = {
    "growing": Case(),
    "uncompressed": Case(uncompressed=UNCOMPRESSED, chunk=16),
    "ring": Case(storage="ring", scoring=WINDOW, chunk=16),
    "ring uncompressed": Case(
        "k8v3", storage="ring", scoring=WINDOW, uncompressed=UNCOMPRESSED, chunk=16, offsets=True
    ),
    "paged": Case(storage="paged", uncompressed=UNCOMPRESSED),
    "first": Case(uncompressed=Uncompressed(40, 0, torch.float32)),
}


def both(caches, method, *arguments):
    for cache in caches:
        getattr(cache, method)(*arguments)
    assert caches[0].lengths == caches[1].lengths


def run_life(name):
    """Forks, rollbacks, reorders and frees, each followed by a step that is compared with one process."""
    with poisoned():
        caches, case = make(CASES[name], seqs=4), CASES[name]
        step(caches, (70, 0, 31, 5), 0, case)
        both(caches, "fork", 0, 1)
        step(caches, (1, 3, 1, 0), 10, case)  # a page that is shared is copied
        both(caches, "truncate", 0, 66)
        both(caches, "truncate", 2, 29)
        step(caches, (2, 1, 1, 1), 20, case)
        both(caches, "reorder", [3, 1, 1, 0])
        step(caches, (20, 1, 4, 17), 30, case)
        if name in ("growing", "first"):  # no window, so any length
            both(caches, "truncate", 1, 25)
            step(caches, (0, 30, 1, 1), 35, case)
        both(caches, "free", 1)
        both(caches, "reserve", 20)
        step(caches, (1, 40, 0, 1), 40, case)
        q = rand(4, 4, D, seed=7)
        wanted, got = (cache.attend(q, scoring=case.scoring, precision="float32") for cache in caches)
        close(got, wanted, torch.float32)
        both(caches, "reorder", [0, 2])
        part = step(caches, (1, 1), 50, case)
    caches[1].check()
    return digest(*part)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_life_of_a_sharded_cache(ranks, size, name):
    assert len(set(ranks(size).run(run_life, name))) == 1


def run_bytes():
    """A rank holds its share of the tokens and not more."""
    cache = parallel.ShardedCache.growing(kv.Format.parse("k4v4", 128), 1, 8, block=64)
    x = rand(4096, 8, 128)
    cache.append(x, x, [0, 4096])
    return cache.bytes_held


def test_ranks_hold_their_share(ranks):
    tokens = kv.Format.parse("k4v4", 128).bytes_per_token * 8 * 4096
    for held in ranks(4).run(run_bytes):
        assert held == pytest.approx(tokens / 4, rel=0.03)


def run_refusals():
    format = kv.Format.parse("k4v4", D)
    cache = parallel.ShardedCache.growing(format, 1, H, block=16, uncompressed=UNCOMPRESSED, chunk=8)
    x = rand(40, H, D)
    cache.append(x, x, [0, 40])
    before = cache.lengths, cache.local.lengths
    for sentence, call in {
        "multiple of 16": lambda: parallel.ShardedCache.growing(format, 1, H, block=24, uncompressed=UNCOMPRESSED),
        "multiple of 64": lambda: parallel.ShardedCache.growing(format, 1, H, block=32, page_size=64),
        "block must be": lambda: parallel.ShardedCache.paged(kv.PagePool(format, 1, 1, H), 1, block=0),
        "fixed size": lambda: parallel.ShardedCache.paged(kv.PagePool(format, 1, 1, H, growable=True), 1),
        "at most 8 queries": lambda: cache.attend(x[:9], [0, 9]),
        "as many queries": lambda: cache.step(x[:1], x[:2], x[:2], [0, 2]),
        "rolled back by 8": lambda: cache.truncate(0, 20),
        "truncated to 0": lambda: cache.truncate(0, 41),
        "uncompressed tokens": lambda: cache.attend(x[:1], scoring=kv.Scoring(first=1)),
        "sequences 0 … 0": lambda: cache.fork(0, 1),
        "reserve needs": lambda: cache.reserve([1, 2]),
        "k must be": lambda: cache.append(x[:, :1], x),
    }.items():
        with pytest.raises(AuraError, match=sentence):
            call()
    assert (cache.lengths, cache.local.lengths) == before
    with pytest.raises(InputError, match="40 tokens, got 41 queries"):
        kv_plain = parallel.ShardedCache.growing(format, 1, H, block=16)
        kv_plain.append(x, x, [0, 40])
        kv_plain.attend(rand(41, H, D), [0, 41])


def test_refusals(ranks):
    ranks(2).run(run_refusals)


def run_full():
    """Rank 1 has the smaller pool. All refuse together and nothing has changed."""
    rank, format = dist.get_rank(), kv.Format.parse("k4v4", D)
    pool = kv.PagePool(format, 3 if rank == 1 else 9, 8, H)
    cache = parallel.ShardedCache.paged(pool, 1, 60, block=8)
    x = rand(70, H, D)
    cache.append(x[:45], x[:45], [0, 45])  # 24 tokens on rank 0, 21 on rank 1
    with pytest.raises(CapacityError, match=r"ranks \[1\]"):
        cache.append(x[:14], x[:14], [0, 14])
    assert cache.lengths == [45]
    cache.step(x[:3], x[:3], x[:3], [0, 3])
    with pytest.raises(CapacityError, match="at most 60 tokens"):
        cache.reserve(13)
    cache.append(x[:8], x[:8], [0, 8])
    assert cache.lengths == [56]
    cache.free(0)
    assert pool.free_pages == pool.num_pages
    cache.check()


def test_a_full_rank_stops_all(ranks):
    ranks(2).run(run_full)


def run_disagree():
    rank, format = dist.get_rank(), kv.Format.parse("k4v4", D)
    for make_one in (
        lambda: parallel.ShardedCache.growing(kv.Format.parse("k4v4" if rank else "k8v8", D), 1, H),
        lambda: parallel.ShardedCache.growing(kv.Format.parse("k4v4", D if rank else 2 * D), 1, H),
        lambda: parallel.ShardedCache.growing(format, 1, H + rank),
        lambda: parallel.ShardedCache.growing(format, 1, H, block=256 + 256 * rank, page_size=256),
        lambda: parallel.ShardedCache.growing(format, 1, H, uncompressed=UNCOMPRESSED if rank else None),
        lambda: parallel.ShardedCache.growing(format, 1, H, key_offset=torch.full((H, D), float(rank))),
        lambda: parallel.ShardedCache.ring(format, 1, H, 100 + rank),
    ):
        with pytest.raises(InputError, match="same on all ranks"):
            make_one()
    cache = parallel.ShardedCache.growing(kv.Format.parse("k4v4", D), 1, H)
    if dist.get_rank():
        cache._lengths[0] += 1
    with pytest.raises(InputError, match="same on all ranks"):
        cache.check()


def test_ranks_that_disagree(ranks):
    ranks(2).run(run_disagree)


def refuse(call, *words):
    """All ranks raise PeerError, and each says what it has and what another one has."""
    with pytest.raises(PeerError) as raised:
        call()
    said = str(raised.value)
    assert "needs the same arguments on all ranks" in said
    assert all(word in said for word in words), said


def run_different_arguments():
    """One rank gives another shape, dtype, start or scoring. Nothing is stored, and the cache goes on."""
    rank, format = dist.get_rank(), kv.Format.parse("k4v4", D)
    cache = parallel.ShardedCache.growing(format, 2, H, block=16)
    x, q = rand(40, H, D), rand(40, 2 * H, D)
    cache.step(q, x, x, [0, 30, 40])
    n, odd = 2 + 2 * (rank == 1), rank == 1
    shapes = ("[2, 4, 64]", "[4, 4, 64]")
    refuse(lambda: cache.step(q[:n], x[:n], x[:n], [0, 1, n]), *shapes, "step of a sharded cache")
    refuse(lambda: cache.append(x[:n], x[:n], [0, 1, n]), "[2, 2, 64]", "[4, 2, 64]", "append of a sharded cache")
    refuse(lambda: cache.attend(q[:n], [0, 1, n]), *shapes, "attend of a sharded cache")
    refuse(lambda: cache.attend(q[:2, : H if odd else 2 * H]), "[2, 2, 64]", "[2, 4, 64]")
    refuse(lambda: cache.attend(q[:2].to(torch.float64 if odd else torch.float32)), "float64", "float32")
    refuse(lambda: cache.append(x[:4], x[:4], [0, 1 + odd, 4]), "[0, 1, 4]", "[0, 2, 4]")
    refuse(lambda: cache.attend(q[:2], scoring=kv.Scoring(window=9 + odd)), "window=9", "window=10")
    refuse(lambda: cache.reserve(5 + odd), "[5, 5]", "[6, 6]")
    refuse(lambda: cache.append(x[:2], x[:2]) if odd else cache.attend(q[:2]), "append", "attend")
    refuse(lambda: cache.step(q[:2], x[:2, : 1 if odd else H], x[:2]), "refuses: k must be [tokens, 2, 64]")
    assert cache.lengths == [30, 10]
    cache.check()
    return digest(*cache.step(q[:2], x[:2], x[:2]))


@pytest.mark.parametrize("size", [2, 4])
def test_different_arguments_stop_all_ranks(ranks, size):
    assert len(set(ranks(size).run(run_different_arguments))) == 1


# files


def run_files(name, folder):
    pytest.importorskip("safetensors")
    caches, case = make(CASES[name]), CASES[name]
    step(caches, (70, 0, 31), 0, case)
    both(caches, "fork", 0, 1)
    step(caches, (1, 3, 1), 10, case)
    both(caches, "truncate", 0, 67)
    parallel.save_shards(caches[1], folder)
    spare = {"spare_pages": 30} if case.storage == "paged" else {}
    loaded = parallel.load_shards(folder, backend=case.backend, **spare)
    assert loaded.lengths == caches[1].lengths
    again = (caches[0], loaded)
    both(again, "truncate", 1, 70)
    return digest(*step(again, (5, 1, 60), 20, case))


@pytest.mark.parametrize("name", CASES)
def test_files(ranks, name, tmp_path):
    assert len(set(ranks(2).run(run_files, name, tmp_path))) == 1


def run_wrong_files(folder):
    """Rank 1 finds a part of another save, half a part, the part of rank 0; both ranks refuse."""
    rank = dist.get_rank()
    cache = parallel.ShardedCache.growing(kv.Format.parse("k4v4", D), 1, H, block=16)
    x = rand(40, H, D)
    cache.append(x, x, [0, 40])
    parallel.save_shards(cache, folder)
    mine, other = (folder / f"rank-{r}-of-2.safetensors" for r in (rank, 1 - rank))
    with pytest.raises(FileError, match="metadata must be"):
        kv.load(mine)  # a part is no cache
    dist.barrier()
    good = mine.read_bytes()
    for spoil, sentence in {
        lambda: shard_files.write(
            cache.local, mine, [0], {"aurakv-shard": shard_files._text(cache, 1)}
        ): "different saves",
        lambda: mine.write_bytes(good[:-1]): "whole safetensors",
        lambda: mine.write_bytes(other.read_bytes()): "part of rank 0 of 2, got rank 1 of 2",
    }.items():
        if rank == 1:
            spoil()
        dist.barrier()
        both_see = sentence == "different saves"
        with pytest.raises(
            FileError if rank == 1 or both_see else PeerError,
            match=sentence if rank == 1 or both_see else r"ranks \[1\] could not load",
        ):
            parallel.load_shards(folder)
        dist.barrier()


def run_missing(folder):
    with pytest.raises(FileError, match="cannot be read: No such file"):
        parallel.load_shards(folder)


def test_wrong_files(ranks, tmp_path):
    ranks(2).run(run_missing, tmp_path / "nothing")
    ranks(2).run(run_wrong_shards, tmp_path)


def run_wrong_shards(folder):
    """Every field of the shard is checked on the rank that reads it, and all ranks refuse."""
    cache = parallel.ShardedCache.ring(kv.Format.parse("k4v4", D), 2, H, 20, 2, block=16, uncompressed=UNCOMPRESSED)
    x = rand(50, H, D)
    cache.append(x, x, [0, 40, 50])
    good = json.loads(shard_files._text(cache, 5))
    del good["checksum"]
    for name, value in {
        "version": 2, "number": -1, "ranks": 3, "rank": 1 - good["rank"], "block": 32, "chunk": 0, "window": 50,
        "sinks": 0.5, "lengths": [40], "highest": [39, 10], "homes": [0, 2], "exact_first": 4, "exact_dtype": "int8",
        "growing": 1, "kind": "x",
    }.items():  # fmt: skip
        fields = {**good, name: value}
        fields["checksum"] = shard_files._checksum(fields)
        path = folder / f"rank-{dist.get_rank()}-of-2.safetensors"
        shard_files.write(cache.local, path, [0, 1], {"aurakv-shard": json.dumps(fields)})
        with pytest.raises(FileError):
            parallel.load_shards(folder)
    parallel.save_shards(cache, folder)
    assert parallel.load_shards(folder).lengths == [40, 10]


def test_parts_that_do_not_belong_together(ranks, tmp_path):
    ranks(2).run(run_wrong_files, tmp_path)


# processes that die or hang


def run_death(victim, hang):
    """The victim is gone before the second step; the others get one sentence soon."""
    format = kv.Format.parse("k4v4", D)
    x = rand(40, H, D)
    parallel.ShardedCache.growing(format, 1, H, block=16).step(x, x, x, [0, 40])  # whatever takes long the first time
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    cache = parallel.ShardedCache.growing(format, 1, H, block=16, group=group)
    cache.step(x, x, x, [0, 40])
    if dist.get_rank() == victim:
        if not hang:
            os._exit(1)
        time.sleep(8)
        return None
    start = time.monotonic()
    with pytest.raises(PeerError, match="another process is gone or did not answer"):
        for _ in range(3):  # the death of a process may be noticed by the next message only
            cache.step(x[:1], x[:1], x[:1])
    return time.monotonic() - start


@pytest.mark.parametrize(("size", "hang"), [(2, False), (4, False), (2, True), (4, True)])
def test_a_rank_that_dies_or_hangs(size, hang):
    group = Ranks(size)
    try:
        times = group.run(run_death, size - 1, hang, dies=None if hang else size - 1)
        assert all(seconds < 15 for seconds in times[:-1])  # some notice at once, some after the timeout
    finally:
        group.close()
