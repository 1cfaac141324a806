"""Context parallel: a cache whose positions lie with several processes gives what one process gives."""

import itertools

import pytest
import torch
import torch.distributed as dist

import aurakv as kv
from aurakv import parallel
from aurakv.errors import InputError, PeerError
from aurakv.parallel import collective
from aurakv.parallel.placement import Share, seen
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import poisoned
from tests.parallel.cases import INF, Case, D, H, digest, make, rand, step

# shares


@pytest.mark.parametrize("seed", range(3))
def test_every_visible_key_is_attended_once(seed):
    """Runs are seen by all queries, edges may be cut; together they are what Scoring.visible says."""
    pick = torch.Generator().manual_seed(seed)

    def one(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=pick))]

    for _ in range(300):
        block, ranks, length = one(1, 2, 4), one(1, 2, 3, 4), one(*range(1, 40))
        scoring = kv.Scoring(
            causal=one(True, True, False),
            window=one(None, 1, 3, 7, 20),
            sinks=one(0, 1, 3, 9, 30),
            first=one(0, 0, 2, 9),
            recent=one(0, 0, 1, 5, 12),
            only_uncompressed=one(False, False, True),
        )
        queries = range(length - one(*range(1, length + 1)), length)
        visible = scoring.visible(torch.tensor(queries)[:, None], torch.arange(length)[None])
        for turn in range(ranks):
            share = Share(block, ranks, turn)
            own = [t for t in range(length) if t // block % ranks == turn]
            assert share.count(length) == len(own)
            assert [t for piece in share.pieces(length // 3, length) for t in piece] == [
                t for t in own if t >= length // 3
            ]
            found = seen(share, queries, length, scoring)
            whole = [own[j] for run in found.runs for j in run]
            cut = [t for b in found.edges for t in range(share.base(b), min(share.base(b) + block, length))]
            assert len({*whole, *cut}) == len(whole) + len(cut)
            assert bool(visible[:, whole].all())
            assert {t for t in own if visible[:, t].any()} <= {*whole, *cut} <= {*own}


def test_blocks_are_spread_evenly():
    for length in (0, 1, 100, 1000, 5000):
        counts = [Share(64, 4, turn).count(length) for turn in range(4)]
        assert sum(counts) == length
        assert max(counts) - min(counts) <= 64


# all_merge


def partials(kind, dtype, size, rows=5):
    """The partial result of each rank, with rows that have special values somewhere."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [kv.Partial(rand(rows, 3, 8, seed=r).to(dtype), rand(rows, 3, seed=9 + r).to(work)) for r in range(size)]
    parts[0].lse[0] = -INF
    parts[0].out[0] = 0
    for part in parts:
        part.lse[1, 0] = -INF  # nowhere a key
        part.out[1, 0] = 0
    if kind == "infinite":
        parts[-1].lse[2, 1] = INF  # a learned sink
        parts[-1].out[2, 1] = 0
    if kind == "damaged":
        parts[size // 2].out[3] = torch.nan
        parts[0].lse[4, 2] = torch.nan
    return parts


def run_all_merge(kind, dtype, rows, threshold):
    size = dist.get_world_size()
    parts = partials(kind, dtype, size, rows)
    collective.LATENCY_BYTES = threshold
    got = parallel.all_merge(parts[dist.get_rank()])
    wanted = kv.merge(*parts)
    assert got.out.dtype == dtype
    assert got.out.shape == wanted.out.shape
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.out, wanted.out, equal_nan=True, atol=4 * eps, rtol=4 * eps)
    torch.testing.assert_close(got.lse, wanted.lse, equal_nan=True, atol=1e-6, rtol=1e-6)
    return digest(*got)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("threshold", [0, 2**19], ids=["scattered", "gathered"])
def test_all_merge(ranks, size, threshold):
    for kind, dtype in itertools.product(
        ("plain", "infinite", "damaged"), (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    ):
        assert len(set(ranks(size).run(run_all_merge, kind, dtype, 5, threshold))) == 1  # bit for bit on all ranks
    assert len(set(ranks(size).run(run_all_merge, "plain", torch.float32, 301, threshold))) == 1


def run_no_rows():
    part = parallel.all_merge(kv.Partial(torch.empty(0, 3, 8), torch.empty(0, 3)))
    assert part.out.shape == (0, 3, 8)
    with pytest.raises(InputError, match="partial result is out"):
        parallel.all_merge(kv.Partial(torch.empty(2, 3, 8), torch.empty(2, 4)))
    with pytest.raises(InputError, match="requires grad"):
        parallel.all_merge(kv.Partial(torch.empty(2, 3, 8, requires_grad=True), torch.empty(2, 3)))


def run_different_partials():
    rank = dist.get_rank()
    for rows, dtype, said in ((2 + rank, torch.float32, "[3, 3, 8]"), (2, (torch.float16, torch.bfloat16)[rank], "bf")):
        with pytest.raises(PeerError, match="all_merge needs the same arguments on all ranks") as raised:
            parallel.all_merge(kv.Partial(torch.zeros(rows, 3, 8, dtype=dtype), torch.zeros(rows, 3)))
        assert said in str(raised.value)
    parallel.all_merge(kv.Partial(torch.zeros(2, 3, 8), torch.zeros(2, 3)))


def test_all_merge_of_different_shapes(ranks):
    ranks(2).run(run_different_partials)


def run_subgroups():
    """Two groups of two, each on its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    rank = dist.get_rank()
    mine, members = (groups[0], (0, 2)) if rank in (0, 2) else (groups[1], (1, 3))
    parts = partials("plain", torch.float32, 4)
    torch.testing.assert_close(parallel.all_merge(parts[rank], mine), kv.merge(*(parts[r] for r in members)))
    with pytest.raises(InputError, match="no member"):
        parallel.all_merge(parts[rank], groups[1] if rank in (0, 2) else groups[0])


def test_all_merge_of_nothing_and_in_subgroups(ranks):
    ranks(2).run(run_no_rows)
    ranks(4).run(run_subgroups)


def test_one_process_or_none(tmp_path, monkeypatch):
    part = kv.Partial(torch.ones(2, 3, 8), torch.zeros(2, 3))
    with pytest.raises(InputError, match="init_process_group"):
        parallel.all_merge(part)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert parallel.all_merge(part) is part
        cache = parallel.ShardedCache.growing(kv.Format.parse("k4v4", D), 1, H)
        x = rand(9, H, D)
        cache.step(x, x, x, [0, 9])
        assert cache.lengths == [9]
    finally:
        dist.destroy_process_group()
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"without torch\.distributed"):
        parallel.all_merge(part)


# the same results as one process


WINDOW = kv.Scoring(window=30, sinks=5)
CASES = {
    "decode": Case(steps=((9, 33, 0), (1, 1, 1), (1, 0, 1))),
    "mixed": Case(),
    "short": Case(steps=((1, 0, 2), (1, 1, 1)), block=64),
    "native": Case(backend="native"),
    "reference": Case(backend="reference"),
    "k16v16": Case("k16v16"),
    "k3v2": Case("k3v2"),
    "k6v5": Case("k6v5"),
    "k2v16": Case("k2:lsq/v16"),
    "k8v4": Case("k8v4", dtype=torch.bfloat16),
    "half": Case("k8v8", dtype=torch.float16),
    "double": Case("k4v4", dtype=torch.float64),
    "window": Case(scoring=kv.Scoring(window=30)),
    "narrow": Case(scoring=kv.Scoring(window=3)),
    "sinks": Case(scoring=WINDOW),
    "many sinks": Case(scoring=kv.Scoring(window=20, sinks=40)),
    "soft cap": Case(scoring=kv.Scoring(window=30, sinks=5, softcap=5.0, scale=0.3)),
    "cross": Case(scoring=kv.Scoring(causal=False)),
    "cross window": Case(scoring=kv.Scoring(causal=False, window=25, sinks=3)),
    "sparse": Case(scoring=kv.Scoring(threshold=1e-7)),
    "splits": Case(splits=3),
    "damaged": Case(damaged=True, scoring=WINDOW),
    "damaged uncompressed": Case(damaged=True, uncompressed=Uncompressed(5, 20, torch.float32)),
    "learned sinks": Case(sink_logits=(0.5, -INF, INF, 2.0), scoring=WINDOW),
    "offsets": Case(offsets=True, scoring=kv.Scoring(softcap=20.0)),
    "uncompressed": Case(uncompressed=Uncompressed(5, 20, torch.float32)),
    "uncompressed first": Case(uncompressed=Uncompressed(40, 0, torch.float32)),
    "uncompressed many": Case(uncompressed=Uncompressed(100, 0, torch.float32), scoring=WINDOW, block=32),
    "uncompressed recent": Case(uncompressed=Uncompressed(0, 7, torch.bfloat16), dtype=torch.bfloat16),
    "uncompressed window": Case(
        uncompressed=Uncompressed(5, 20, torch.float32), scoring=WINDOW, offsets=True, sink_logits=(1.0,) * 4
    ),
    "ring": Case(storage="ring", scoring=WINDOW),
    "ring narrow": Case(storage="ring", scoring=kv.Scoring(window=9), chunk=7),
    "ring uncompressed": Case(
        storage="ring", scoring=WINDOW, uncompressed=Uncompressed(2, 50, torch.float32), block=32
    ),
    "ring all": Case(
        "k3v2",
        "ring",
        kv.Scoring(window=30, sinks=40, softcap=9.0),
        Uncompressed(3, 12, torch.float32),
        offsets=True,
        sink_logits=(0.0, 1.0, -INF, 3.0),
    ),
    "paged": Case(storage="paged"),
    "paged all": Case(
        "k8v4",
        "paged",
        kv.Scoring(window=60, sinks=2, softcap=9.0),
        Uncompressed(3, 12, torch.float32),
        offsets=True,
        sink_logits=(0.0, 1.0, -INF, 3.0),
    ),
}


def run_case(name):
    with poisoned():
        caches = make(CASES[name])
        results = [step(caches, new, 10 * i, CASES[name]) for i, new in enumerate(CASES[name].steps)]
    caches[1].check()
    local = caches[1].local.lengths
    assert local == [caches[1].share(seq).count(length) for seq, length in enumerate(caches[0].lengths)]
    return digest(*(x for part in results for x in part))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_sharded_cache_equals_one_process(ranks, size, name):
    if CASES[name].backend == "native" and kv.why_not("native"):
        pytest.skip(kv.why_not("native"))
    assert len(set(ranks(size).run(run_case, name))) == 1  # bit for bit on all ranks
