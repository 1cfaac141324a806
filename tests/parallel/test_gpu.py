"""Several processes with caches on one GPU: gloo moves them through the host, NCCL as they are."""

import pytest
import torch
import torch.distributed as dist

import aurakv as kv
from aurakv import parallel
from aurakv.parallel.group import Group
from aurakv.storage.uncompressed import Uncompressed
from tests.helpers.ranks import Ranks
from tests.parallel.cases import D, H, rand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_steps(scoring, uncompressed, dtype):
    format = kv.Format.parse("k4v4", D)
    whole = kv.KVCache.contiguous(format, 2, H, device="cuda", uncompressed=uncompressed)
    cache = parallel.ShardedCache.growing(format, 2, H, "cuda", block=64, chunk=64, uncompressed=uncompressed)
    for i, bounds in enumerate(([0, 300, 390], [0, 1, 2], [0, 5, 9])):
        q, k, v = (rand(bounds[-1], n, D, seed=n + i).to("cuda", dtype) for n in (4, H, H))
        wanted, got = (each.step(q, k, v, bounds, scoring, precision="float32") for each in (whole, cache))
        eps = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
        torch.testing.assert_close(got.out, wanted.out, atol=eps, rtol=eps)
        torch.testing.assert_close(got.lse, wanted.lse, atol=1e-3, rtol=1e-3)
    return cache, whole


def run_context_parallel(scoring, uncompressed, dtype):
    run_steps(scoring, uncompressed, dtype)


def run_transfer():
    cache = kv.KVCache.contiguous(kv.Format.parse("k4v3", D), 1, H, device="cuda", uncompressed=Uncompressed(2, 9))
    x = rand(200, H, D).cuda()
    cache.append(x, x, [0, 200])
    if dist.get_rank() == 0:
        parallel.send(cache, 0, 1)
        return
    pool = kv.PagePool(kv.Format.parse("k4v3", D), 40, 16, H, "cuda")
    received = kv.KVCache.paged(pool, 1, uncompressed=Uncompressed(2, 9))
    assert parallel.receive(received, 0, 0) == 200
    for ours, theirs in zip(received.codes(0), cache.codes(0), strict=True):
        assert torch.equal(ours.data, theirs.data)
        assert torch.equal(ours.scale, theirs.scale)


@pytest.fixture(scope="module")
def pair():
    group = Ranks(2)
    yield group
    group.close()


@pytest.mark.parametrize(
    ("scoring", "uncompressed", "dtype"),
    [
        (kv.Scoring(), None, torch.bfloat16),
        (kv.Scoring(window=100, sinks=4, softcap=20.0), None, torch.float32),
        (kv.Scoring(), Uncompressed(4, 30), torch.float16),
    ],
)
def test_context_parallel(pair, scoring, uncompressed, dtype):
    pair.run(run_context_parallel, scoring, uncompressed, dtype)


def test_transfer(pair):
    pair.run(run_transfer)


def run_nccl(store):
    """Two ranks cannot share a GPU under NCCL: one rank, and its collectives called directly."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    group = Group()
    assert group.wire(torch.device("cuda", 0)).type == "cuda"
    assert group.wire(torch.device("cpu")).type == "cuda"
    x = torch.arange(24, dtype=torch.uint8, device="cuda").view(3, 8)
    assert torch.equal(group.gather(x, "gather")[0], x)
    assert torch.equal(group.exchange(x[None], "exchange")[0], x)
    assert group.numbers(7, torch.device("cpu"), "numbers") == [7]
    cache, _ = run_steps(kv.Scoring(), None, torch.bfloat16)
    cache.check()


def test_nccl(tmp_path):
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    group = Ranks(1)
    try:
        group.run(run_nccl, str(tmp_path / "store"))
    finally:
        group.close()
