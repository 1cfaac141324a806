"""Transfer: a sequence moves between processes in its stored bytes, or is refused on both sides with one sentence."""

import json
import os

import pytest
import torch
import torch.distributed as dist

import aurakv as kv
from aurakv import parallel
from aurakv.errors import AuraError, InputError, PeerError
from aurakv.parallel import transfer
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import poisoned
from tests.helpers.ranks import Ranks
from tests.parallel.cases import D, H, rand

UNCOMPRESSED = Uncompressed(3, 40, torch.float32, rollback=8)


def make(storage, format="k4v3", kv_heads=H, dim=D, uncompressed=None, **options):
    format = kv.Format.parse(format, dim)
    if storage == "ring":
        return kv.KVCache.ring(
            format, 3, kv_heads, 30, 5, page_size=16, rollback=8, uncompressed=uncompressed, **options
        )
    if storage == "contiguous":
        return kv.KVCache.contiguous(format, 3, kv_heads, uncompressed=uncompressed, **options)
    pages, size = (90, 7) if storage == "paged" else (2, 16)
    return kv.KVCache.paged(kv.PagePool(format, pages, size, kv_heads, **options), 3, uncompressed=uncompressed)


def fill(cache, length=100):
    k, v = rand(length, H, D), rand(length, H, D, seed=1)
    cache.step(rand(length, 4, D, seed=2), k, v, [0, 0, length, length])
    if length > 5:
        cache.truncate(1, length - 5)
    return cache


def stored(cache, seq):
    tables = [table.pages.stored(seq, table.positions(seq)) for table in cache.page_tables]
    return [x for pair in tables for codes in pair for x in codes if x is not None]


def run_move(source, target, options, length):
    with poisoned():
        offsets = {"key_offset": rand(H, D, seed=8), "value_offset": rand(H, D, seed=9)} if options == "all" else {}
        uncompressed = {"all": UNCOMPRESSED, "first": Uncompressed(4, 0, torch.float32)}.get(options)
        sent = fill(make(source, uncompressed=uncompressed, **offsets), length)
        if dist.get_rank() == 0:
            before = [x.clone() for x in stored(sent, 1)]
            parallel.send(sent, 1, 1)
            assert all(torch.equal(a, b) for a, b in zip(before, stored(sent, 1), strict=True))
            return
        cache = make(target, uncompressed=uncompressed, **offsets)
        other = rand(9, H, D, seed=3)
        cache.append(other, other, [0, 9, 9, 9])
        assert parallel.receive(cache, 1, 0) == sent.lengths[1]
        assert cache.lengths == [9, sent.lengths[1], 0]
        assert all(torch.equal(a, b) for a, b in zip(stored(cache, 1), stored(sent, 1), strict=True))
        for _ in range(20):  # both go on
            x, q = rand(2, H, D, seed=4), rand(2, 4, D, seed=5)
            got, wanted = (each.step(q, x, x, [0, 0, 2, 2], precision="float32") for each in (cache, sent))
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
        cache.truncate(1, cache.lengths[1] - 8)
        assert cache.lengths[0] == 9


@pytest.mark.parametrize("options", ["plain", "all", "first"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("contiguous", "contiguous"), ("contiguous", "paged"), ("paged", "contiguous"), ("ring", "ring")],
)
def test_round_trip(ranks, source, target, options):
    for length in (100, 12, 1, 0) if options == "all" else (100, 3) if options == "first" else (100,):
        ranks(2).run(run_move, source, target, options, length)


def run_pieces():
    """Pages that travel are cut; the cuts lie anywhere in the pages of both sides."""
    transfer._PIECE_BYTES = 16 * 2 * 70
    run_move("contiguous", "paged", "all", 333)
    run_move("ring", "ring", "all", 333)


def test_long_sequences_travel_in_pieces(ranks):
    ranks(2).run(run_pieces)


REFUSED = {
    "format": ({}, {"format": "k4v4"}, "same format"),
    "levels": ({"format": "k4v4:minifloat"}, {"format": "k4v4"}, "same format"),
    "dimensions": ({}, {"dim": 128}, "same dimensions"),
    "heads": ({}, {"kv_heads": 4}, "same KV heads"),
    "uncompressed": ({"uncompressed": UNCOMPRESSED}, {}, "same uncompressed tokens"),
    "offsets": ({"key_offset": torch.ones(H, D)}, {"key_offset": torch.zeros(H, D)}, "same offsets"),
    "no offsets": ({}, {"value_offset": torch.ones(H, D)}, "same offsets"),
    "ring": ({}, {"storage": "ring"}, "same ring"),
    "room": ({}, {"storage": "small"}, "free pages"),
}


def run_refused(name):
    ours, theirs, sentence = REFUSED[name]
    if dist.get_rank() == 0:
        cache = fill(make("contiguous", **ours))
        with pytest.raises(PeerError, match=f"rank 1 refused sequence 1: .*{sentence}"):
            parallel.send(cache, 1, 1)
    else:
        cache = make(**{"storage": "paged", **theirs})
        with pytest.raises(AuraError, match=sentence):
            parallel.receive(cache, 1, 0)
        assert cache.lengths == [0, 0, 0]
        assert cache.pool.free_pages == cache.pool.num_pages
    run_move("contiguous", "paged", "plain", 20)  # the group is still good


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_both_sides(ranks, name):
    ranks(2).run(run_refused, name)


def run_wrong_arguments():
    rank = dist.get_rank()
    cache = fill(make("contiguous"))
    for peer in (rank, 2, -1, None):
        with pytest.raises(InputError, match="another rank"):
            parallel.send(cache, 1, peer)
        with pytest.raises(InputError, match="another rank"):
            parallel.receive(cache, 1, peer)
    if rank == 0:
        with pytest.raises(InputError, match=r"sequences 0 … 2"):
            parallel.send(cache, 3, 1)
        for sentence in (r"sequences 0 … 2", "must be empty"):
            with pytest.raises(PeerError, match=sentence):
                parallel.send(cache, 1, 1)
    else:
        with pytest.raises(PeerError, match=r"rank 0 could not send: .*sequences 0 … 2"):
            parallel.receive(cache, 0, 0)
        with pytest.raises(InputError, match=r"sequences 0 … 2"):
            parallel.receive(cache, 3, 0)
        with pytest.raises(InputError, match="must be empty"):
            parallel.receive(cache, 1, 0)
        assert cache.lengths == [0, 95, 0]


def test_wrong_arguments_on_one_side_reach_the_other(ranks):
    ranks(2).run(run_wrong_arguments)


def forged():
    """Descriptions that no sender of this version makes."""
    good = json.loads(transfer._describe(fill(make("contiguous")), 1))
    manifest = json.loads(good["manifest"])
    return {
        "version": json.dumps({**good, "version": 2}),
        "JSON": "{",
        "none": "[]",
        "fields": json.dumps({**good, "more": 1}),
        "length": json.dumps({**good, "length": -1}),
        "huge": json.dumps({**good, "length": 2**40, "highest": [2**40]}),
        "highest": json.dumps({**good, "highest": [3]}),
        "tables": json.dumps({**good, "highest": [95, 95]}),
        "manifest": json.dumps({**good, "manifest": json.dumps({**manifest, "kv_heads": 3})}),
        "file version": json.dumps({**good, "manifest": json.dumps({**manifest, "version": 2})}),
    }


def run_forged():
    for name, text in forged().items():
        if dist.get_rank() == 0:
            transfer._describe = lambda cache, seq, text=text: text
            with pytest.raises(PeerError, match="rank 1 refused"):
                parallel.send(make("contiguous"), 0, 1)
        else:
            cache = make("paged")
            with pytest.raises(InputError) as caught:
                parallel.receive(cache, 1, 0)
            assert name not in ("version", "file version") or "version" in str(caught.value)
            assert cache.lengths == [0, 0, 0]


def run_noise():
    """Something else arrives where a sequence should."""
    if dist.get_rank() == 0:
        dist.send(torch.tensor([1, 2]), 1)
    else:
        with pytest.raises(PeerError, match="not a sequence"):
            parallel.receive(make("paged"), 1, 0)


def test_forged_descriptions():
    group = Ranks(2)
    try:
        group.run(run_noise)
        group.run(run_forged)
    finally:
        group.close()


def run_broken_off(victim):
    """One side dies in the middle of the pages."""
    transfer._PIECE_BYTES = 16 * 2 * 70
    rank = dist.get_rank()
    cache = fill(make("contiguous"), 333) if rank == 0 else make("paged")
    if rank == victim:
        copy = transfer._copy
        left = [3]

        def dying(*arguments, **options):
            left[0] -= 1
            if not left[0]:
                os._exit(1)
            copy(*arguments, **options)

        transfer._copy = dying
    with pytest.raises(PeerError, match="another process is gone"):
        parallel.send(cache, 1, 1) if rank == 0 else parallel.receive(cache, 1, 0)
    if rank == 1:
        assert cache.lengths == [0, 0, 0]
        assert cache.pool.free_pages == cache.pool.num_pages
    return "told"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_in_between(victim):
    group = Ranks(2, timeout=20)
    try:
        assert group.run(run_broken_off, victim, dies=victim)[1 - victim] == "told"
    finally:
        group.close()
