"""Caches: growth, sharing, rings, uncompressed tokens, and that the storage never changes a result."""

import copy
import dataclasses
import itertools

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.errors import CapacityError, InputError
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import poisoned

FMT = kv.Format.parse("k4v3", 64)
H = 2


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(n, seed=0):
    return rand(n, H, 64, seed=seed), rand(n, H, 64, seed=seed + 1)


def make(kind, seqs=3, device="cpu", **options):
    if kind == "contiguous":
        return kv.KVCache.contiguous(FMT, seqs, H, device=device, **options)
    if kind == "ring":
        return kv.KVCache.ring(FMT, seqs, H, window=40, sinks=3, device=device, page_size=16, rollback=8, **options)
    return kv.KVCache.paged(kv.PagePool(FMT, 100, 16, H, device), seqs, **options)


def held(cache, seq):
    keys, values = cache.codes(seq)
    return [keys.data.clone(), keys.scale.clone(), values.data.clone(), values.scale.clone()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def poison():
    with poisoned():
        yield


STORAGES = ["contiguous", "ring", "paged"]


def test_contiguous_grows_amortised():
    cache = kv.KVCache.contiguous(FMT, 1, H)
    assert cache.bytes_held < 300
    copies, last = 0, None
    for step in range(2000):
        k, v = tokens(1, seed=step)
        cache.append(k, v)
        if cache.pages.data.data_ptr() != last:
            copies, last = copies + 1, cache.pages.data.data_ptr()
    assert copies < 45  # logarithmic in the length
    assert cache.lengths == [2000]
    assert cache.bytes_held < 2000 * 1.2 * H * FMT.bytes_per_token
    k, _ = cache.decode(0)
    assert torch.equal(k[1234], kv.decode(kv.encode(tokens(1, seed=1234)[0], FMT.key), FMT.key)[0])


def test_contiguous_capacity_is_there_from_the_start():
    cache = kv.KVCache.contiguous(FMT, 4, H, capacity=100)
    where = cache.pages.data.data_ptr()
    cache.append(*tokens(400), [0, 100, 200, 300, 400])
    assert cache.pages.data.data_ptr() == where


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("uncompressed", [None, Uncompressed(3, 10, torch.float32), Uncompressed(4, 0, torch.float32)])
def test_any_chunking_gives_the_same_numbers(kind, uncompressed):
    """One prefill, chunks and single tokens: the same queries get the same answers."""
    q, (k, v) = rand(150, 4, 64, seed=9), tokens(150)
    scoring = kv.Scoring(window=40, sinks=3, softcap=20.0)
    answers = []
    for chunks in ([150], [1] * 150, [7] * 21 + [3], [100, 1, 49], [64, 64, 22]):
        cache = make(kind, seqs=1, uncompressed=uncompressed)
        parts, at = [], 0
        for n in chunks:
            rows = slice(at, at + n)
            parts.append(cache.step(q[rows], k[rows], v[rows], [0, n], scoring, precision="float32"))
            at += n
        answers.append(kv.Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])))
    for answer in answers[1:]:
        torch.testing.assert_close(answer.out, answers[0].out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(answer.lse, answers[0].lse, atol=2e-5, rtol=1e-4)


def test_all_storages_give_the_same_numbers():
    scoring = kv.Scoring(window=40, sinks=3)
    caches = [make(kind) for kind in STORAGES]
    for step, new in enumerate(([90, 0, 5], [1, 1, 1], [3, 50, 0], [1, 1, 1])):
        starts = [0, *itertools.accumulate(new)]
        q, (k, v) = rand(starts[-1], 4, 64, seed=step), tokens(starts[-1], seed=10 + step)
        parts = [cache.step(q, k, v, starts, scoring, precision="float32") for cache in caches]
        for part in parts[1:]:
            torch.testing.assert_close(part.out, parts[0].out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", STORAGES)
def test_a_single_sequence_owns_all_rows(kind):
    """`starts` says nothing new then: prompts, drafts and tokens without it are those with it."""
    plain, told = make(kind, 1), make(kind, 1)
    with torch.no_grad():
        for n in (7, 1, 3, 3, 3, 1, 1, 0, 3):
            q, (k, v) = rand(n, 4, 64, seed=n), tokens(n, seed=n)
            got, wanted = plain.step(q, k, v), told.step(q, k, v, [0, n])
            assert torch.equal(got.out, wanted.out)
            assert torch.equal(got.lse, wanted.lse)
    plain.append(*tokens(5, seed=5))
    told.append(*tokens(5, seed=5), [0, 5])
    assert same(held(plain, 0), held(told, 0))


@pytest.mark.parametrize("kind", STORAGES)
def test_fork_shares_until_written(kind):
    cache = make(kind)
    cache.append(*tokens(60), [0, 60, 60, 60])
    used = cache.pool.num_pages - cache.pool.free_pages
    cache.fork(0, 2)
    assert cache.pool.num_pages - cache.pool.free_pages == used
    assert same(held(cache, 0), held(cache, 2))
    before = held(cache, 0)
    cache.append(*tokens(5, seed=7), [0, 0, 0, 5])
    assert cache.lengths == [60, 0, 65]
    assert same(held(cache, 0), before)
    assert same([x[:43] for x in held(cache, 2)], [x[:43] for x in before]) or kind == "ring"
    cache.append(*tokens(1, seed=8), [0, 1, 1, 1])
    assert cache.lengths == [61, 0, 65]


@pytest.mark.parametrize("kind", STORAGES)
def test_reorder_repeats_drops_and_adds(kind):
    cache = make(kind, uncompressed=Uncompressed(2, 5))
    cache.append(*tokens(75), [0, 30, 45, 75])
    parts = [held(cache, seq) for seq in range(3)]
    cache.reorder([2, 0, 2, 1])
    assert cache.lengths == [30, 30, 30, 15]
    assert all(same(held(cache, i), parts[j]) for i, j in enumerate([2, 0, 2, 1]))
    cache.reorder(torch.tensor([3]))
    assert cache.lengths == [15]
    q, (k, v) = rand(1, 4, 64), tokens(1, seed=3)
    assert cache.step(q, k, v).out.isfinite().all()
    cache.reorder([])
    assert cache.seqs == 0
    assert cache.pool.free_pages == cache.pool.num_pages


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_truncate_and_go_on(kind):
    cache = make(kind, seqs=1)
    k, v = tokens(100)
    cache.append(k, v, [0, 100])
    cache.truncate(0, 37)
    cache.append(k[37:], v[37:], [0, 63])
    again = make(kind, seqs=1)
    again.append(k, v, [0, 100])
    assert same(held(cache, 0), held(again, 0))


def test_a_ring_rolls_back_as_far_as_it_promises():
    scoring = kv.Scoring(window=40, sinks=3)
    for length in (50, 100, 333):
        cache, plain = make("ring", seqs=1), make("contiguous", seqs=1)
        k, v = tokens(length)
        for each in (cache, plain):
            each.append(k, v, [0, length])
            each.truncate(0, length - 8)
        q, new = rand(1, 4, 64), tokens(1, seed=5)
        got = cache.step(q, *new, precision="float32").out
        wanted = plain.step(q, *new, scoring=scoring, precision="float32").out
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(CapacityError, match="rolled back by 8"):
        cache.truncate(0, 200)
    cache.truncate(0, 0)
    assert cache.lengths == [0]
    cache.append(*tokens(500), [0, 500])
    assert cache.lengths == [500]


def test_a_ring_holds_no_more_than_it_needs():
    cache = kv.KVCache.ring(FMT, 1, H, window=1024, sinks=4, chunk=64)
    cache.append(*tokens(5000), [0, 5000])
    limit = (64 + 1024 + 63 + 2 * 64) * H * FMT.bytes_per_token + 1000
    assert cache.bytes_held < limit


def test_a_page_pool_is_shared_by_caches():
    pool = kv.PagePool(FMT, 10, 16, H)
    a, b = kv.KVCache.paged(pool, 2), kv.KVCache.paged(pool, 1)
    a.append(*tokens(100), [0, 60, 100])
    assert pool.free_pages == 3
    with pytest.raises(CapacityError, match="needs 4 free pages, got 3 of 10"):
        b.append(*tokens(49), [0, 49])
    assert pool.free_pages == 3
    assert b.lengths == [0]
    a.free(0)
    b.append(*tokens(49), [0, 49])
    assert pool.free_pages == 3
    assert a.bytes_held + b.bytes_held >= 7 * pool.data[:1].nbytes


def test_a_dropped_cache_gives_its_pages_back():
    pool = kv.PagePool(FMT, 10, 16, H)
    cache, other = kv.KVCache.paged(pool, 2), kv.KVCache.paged(pool, 1)
    cache.append(*tokens(50), [0, 50, 50])
    cache.fork(0, 1)
    other.append(*tokens(20), [0, 20])
    del cache
    assert pool.free_pages == 8
    assert other.lengths == [20]


def test_uncompressed_tokens_come_back_as_they_were():
    """With everything uncompressed, attention equals attention over the vectors themselves."""
    k, v = tokens(40)
    q = rand(40, 4, 64, seed=3)
    wanted = ops.attend_dense(q, k, v, [0, 40])
    for uncompressed in (Uncompressed(0, 100, torch.float32), Uncompressed(100, 0, torch.float32)):
        cache = make("paged", seqs=1, uncompressed=uncompressed)
        got = cache.step(q, k, v, [0, 40])
        torch.testing.assert_close(got.out, wanted.out, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got.lse, wanted.lse, atol=1e-5, rtol=1e-4)


def test_first_tokens_alone_take_only_their_room():
    cache = make("contiguous", seqs=2, uncompressed=Uncompressed(4, 0, torch.float32))
    plain = make("contiguous", seqs=2)
    for new in ([3, 0], [1, 3], [500, 2], [1, 1]):
        starts = [0, *itertools.accumulate(new)]
        k, v = tokens(starts[-1])
        for each in (cache, plain):
            each.append(k, v, starts)
    room = 2 * 4 * H * 2 * 64 * 4
    assert room <= cache.bytes_held - plain.bytes_held <= room + 200
    cache.reserve(3)
    kv.append(cache.pages, *tokens(3), [0, 3, 3])  # the first tokens are complete, so this loses none
    assert cache.lengths == [508, 6]
    cache.truncate(0, 2)
    kv.append(cache.pages, *tokens(3), [0, 3, 3])
    with pytest.raises(InputError, match="keeps uncompressed tokens"):
        _ = cache.lengths
    assert cache.lengths == [2, 6], "what the table of uncompressed tokens has not seen is dropped"


def test_uncompressed_tokens_survive_truncation_within_their_rollback():
    uncompressed = Uncompressed(2, 10, torch.float32, rollback=12)
    k, v = tokens(200)
    caches = [make("contiguous", seqs=1, uncompressed=uncompressed) for _ in range(2)]
    caches[0].append(k, v, [0, 200])
    caches[0].truncate(0, 188)
    caches[1].append(k[:188], v[:188], [0, 188])
    q, new = rand(1, 4, 64), tokens(1, seed=5)
    outs = [cache.step(q, *new).out for cache in caches]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-6, rtol=1e-5)
    with pytest.raises(CapacityError, match="rolled back by 12"):
        caches[0].truncate(0, 30)
    assert caches[0].lengths == [189]


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("length", [190, 150, 99, 40, 17, 3, 0])
def test_recent_tokens_come_back_from_codes(kind, length, backend, device):
    """The last ones as they were where they are still held, else as what their codes stand for."""
    k, v = (x.to(device) for x in tokens(200))
    cache = make(
        kind, seqs=2, device=device, backend=backend, uncompressed=Uncompressed(2, 10, torch.float32, rollback=0)
    )
    cache.append(k, v, [0, 200, 200])
    cache.fork(0, 1)
    before = cache.decode(0, query=200)
    lost = 16 < length < 190
    if lost:
        with pytest.raises(CapacityError, match="rolled back by 0"):
            cache.truncate(1, length)
    cache.truncate(1, length, from_codes=True)
    assert cache.lengths == [200, length]
    assert same(cache.decode(0, query=200), before), "the sequence that it was forked from stays"
    for got, wanted, exact in zip(cache.decode(1, query=length), cache.decode(1), (k, v), strict=True):
        wanted[:2] = exact[:2][:length]
        recent = torch.arange(max(0, length - 9), length, device=device)  # the query at this length is the tenth
        kept = recent if not lost else recent[recent < 16]  # the first page of the ring always stays
        wanted[kept] = exact[kept]
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    new = [x.to(device) for x in tokens(2, seed=5)]
    cache.append(*new, [0, 1, 2])
    assert cache.lengths == [201, length + 1]
    for got, exact in zip(cache.decode(1, query=length + 1), new, strict=True):
        assert torch.equal(got[-1], exact[1]), "what follows is recent again"


def test_a_ring_truncates_from_codes_within_its_own_rollback():
    cache = make("ring", uncompressed=Uncompressed(2, 10, torch.float32, rollback=0))
    cache.append(*tokens(200), [0, 200, 200, 200])
    cache.truncate(0, 193, from_codes=True)
    with pytest.raises(CapacityError, match="rolled back by 8"):
        cache.truncate(0, 100, from_codes=True)
    assert cache.lengths == [193, 0, 0]


def test_bytes_held_counts_what_tensors_hold():
    cache = make("contiguous", seqs=2, uncompressed=Uncompressed(4, 32))
    cache.append(*tokens(300), [0, 200, 300])
    tensors = []
    for table in cache.page_tables:
        tensors += [table.pool.data, table.pages.table, table.pages.lengths, table.pages.overflow]
    assert cache.bytes_held == sum(t.untyped_storage().nbytes() for t in tensors)


def test_codes_can_be_appended():
    k, v = tokens(50)
    cache, copy = make("paged", seqs=1), make("ring", seqs=1)
    cache.append(k, v, [0, 50])
    copy.append_codes(*cache.codes(0), [0, 50])
    part = held(cache, 0)
    at = copy.positions(0)
    assert same([x[at] for x in part], held(copy, 0))


def test_uncompressed_tokens_and_pages_cannot_drift_apart():
    cache = make("paged", seqs=1, uncompressed=Uncompressed(2, 5))
    cache.append(*tokens(10), [0, 10])
    cache.reserve(5)
    kv.append(cache.pages, *tokens(3), [0, 3])  # the uncompressed tokens know nothing of these
    with pytest.raises(InputError, match="keeps uncompressed tokens"):
        cache.attend(rand(1, 4, 64))
    assert cache.lengths == [10]


def test_pages_of_a_ring_refuse_a_scoring_beyond_what_they_hold():
    cache = make("ring", seqs=1)
    cache.append(*tokens(500), [0, 500])
    for scoring in (kv.Scoring(), kv.Scoring(window=1000), kv.Scoring(window=9, sinks=99)):
        with pytest.raises(InputError, match="this ring holds"):
            kv.attend(rand(1, 4, 64), cache.pages, scoring=scoring)


def test_pages_from_outside_are_range_checked():
    """A table of someone else's making never sends a kernel out of bounds."""
    cache = make("paged", seqs=1)
    cache.append(*tokens(40), [0, 40])
    own = cache.pages
    q = rand(1, 4, 64)
    wanted = cache.attend(q).out
    assert torch.equal(kv.attend(q, dataclasses.replace(own)).out, wanted)
    for entry in (-2, -1, 100, 2**31 - 1):
        table = own.table.clone()
        table[0, 1] = entry
        with pytest.raises(InputError, match=r"table .* pages outside|table entries"):
            kv.attend(q, dataclasses.replace(own, table=table))
    for length in (-1, 2**30):
        with pytest.raises(InputError, match="length of sequence 0 must be"):
            kv.attend(q, dataclasses.replace(own, lengths=own.lengths * 0 + length))


def test_a_compiled_step_is_seen_by_the_cache():
    cache = make("paged", seqs=2)
    cache.reserve(20)
    step = torch.compile(lambda pages, k, v: kv.append(pages, k, v), fullgraph=True, backend="aot_eager")
    for n in range(17):
        step(cache.pages, *tokens(2, seed=n))
    assert cache.lengths == [17, 17]
    cache.append(*tokens(2))
    assert cache.lengths == [18, 18]


def test_empty_caches():
    for kind in STORAGES:
        cache = make(kind, seqs=0)
        assert cache.lengths == []
        out, lse = cache.step(rand(0, 4, 64), *tokens(0), [0])
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)
        cache = make(kind, seqs=2)
        out, lse = cache.attend(rand(0, 4, 64), [0, 0, 0])
        assert out.shape == (0, 4, 64)
        nothing = kv.attend(rand(2, 4, 64), cache.pages, scoring=kv.Scoring(window=9))
        assert not nothing.out.any()
        assert torch.isneginf(nothing.lse).all()


@pytest.mark.parametrize("kind", ["contiguous", "ring"])
def test_deepcopy_is_independent(backend, device, kind):
    """A copy has memory of its own, also for backends that remember addresses."""
    format, uncompressed = kv.Format.parse("k4v4", 16), Uncompressed(recent=3, dtype=torch.float32)
    x, q = torch.randn(40, 2, 16, device=device), torch.randn(40, 4, 16, device=device)

    def filled():
        options = {"uncompressed": uncompressed, "backend": backend, "device": device}
        if kind == "ring":
            cache = kv.KVCache.ring(format, 1, 2, 10, rollback=32, **options)
        else:
            cache = kv.KVCache.contiguous(format, 1, 2, **options)
        cache.step(q[:20], x[:20], x[:20], [0, 20])
        return cache

    expected = filled().step(q[20:], x[20:], x[20:], [0, 20]).out
    original = filled()
    clone = copy.deepcopy(original)
    for cache in (original, clone):
        assert torch.equal(cache.step(q[20:], x[20:], x[20:], [0, 20]).out, expected)


def test_decode_with_the_uncompressed_tokens_of_a_query():
    cache = kv.KVCache.contiguous(kv.Format.parse("k2v2", 16), 1, 2, uncompressed=Uncompressed(2, 3, torch.float32))
    k, v = torch.randn(2, 20, 2, 16)
    cache.append(k, v, [0, 20])
    for x, coded, seen in zip((k, v), cache.decode(0), cache.decode(0, query=20), strict=True):
        uncompressed = [0, 1, 18, 19]  # the query at 20 is itself one of the three most recent
        rest = list(range(2, 18))
        assert torch.equal(seen[uncompressed], x[uncompressed])
        assert torch.equal(seen[rest], coded[rest])
        assert not torch.equal(coded[uncompressed], x[uncompressed])


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@pytest.mark.parametrize("kept", [None, Uncompressed(first=4, recent=9)], ids=["coded", "uncompressed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_caller_may_rotate(kind, kept, dtype):
    cache = make(kind, seqs=1, uncompressed=kept)
    cache.append(*tokens(70))
    q = rand(3, 2 * H, 64).to(dtype)
    wanted = cache.attend(q, [0, 3])
    key, value = cache.format.key, cache.format.value
    got = cache.attend(key.rotate(q.float()).to(dtype), [0, 3], rotated=True)
    error = (value.unrotate(got.out.float()) - wanted.out.float()).norm() / wanted.out.float().norm()
    assert got.out.dtype == dtype
    assert error < (1e-3 if dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(got.lse, wanted.lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_a_copy_made_in_inference_mode_lives_on(kind):
    cache, q = make(kind, seqs=1, uncompressed=Uncompressed(first=4)), rand(1, H, 64)
    cache.append(*tokens(30))
    with torch.inference_mode():
        made = copy.deepcopy(cache)
        made.step(q, *tokens(1, seed=5))
    cache.step(q, *tokens(1, seed=5))
    for n in range(40):  # to pages of its own, and to new ones
        new = tokens(1, seed=n)
        assert torch.equal(made.step(q, *new).out, cache.step(q, *new).out)
