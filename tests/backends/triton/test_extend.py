"""Many queries a sequence, against float64 on the same codes; what the path refuses."""

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter knows no Gluon", allow_module_level=True)

from aurakv.backends.triton.common import target  # noqa: E402
from aurakv.backends.triton.extend import launch as extend  # noqa: E402
from tests.helpers.gpu import DEVICE, on_gpu, on_real_gpu  # noqa: E402


def make_pages(name, dim, seqs, tokens, page_size, kv_heads=2, device=DEVICE, ring=False, pinned=0):
    page_size = page_size or tokens
    width, format, device = -(-tokens // page_size), Format.parse(name, dim), torch.device(device)
    order = torch.randperm(seqs * width, device=device, dtype=torch.int32)
    return Pages(
        format,
        page_size,
        allocate(format, page_size, seqs * width, kv_heads, device).fill_(255),
        order.view(seqs, width).contiguous(),
        torch.zeros(seqs, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        ring=ring,
        pinned=pinned,
    )


def starts_of(counts):
    return torch.tensor([0, *counts], device=DEVICE, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def check(name="k4v4", dim=128, lengths=(1000, 333), queries=(200, 100), page=128, group=4, scoring=None, splits=None,
          dtype=torch.float32, stretch=1.0, damage=None, size=1.0, sinks=False, worst=0.002):  # fmt: skip
    """Append, attend, compare with the reference."""
    torch.manual_seed(0)
    pages = make_pages(name, dim, len(lengths), max(lengths), page)
    k, v = torch.randn(2, sum(lengths), 2, dim, device=DEVICE, dtype=dtype)
    v = v * torch.exp(torch.randn(sum(lengths), 2, 1, device=DEVICE)).to(dtype) * size
    if damage is not None:
        v[damage, 0, 3] = torch.nan
    ops.append(pages, k, v, starts_of(lengths), backend="triton")
    q = torch.randn(sum(queries), 2 * group, dim, device=DEVICE, dtype=dtype) * stretch
    scoring = scoring or Scoring()
    logits = torch.randn(2 * group, device=DEVICE) if sinks else None
    assert extend.why_not_call(q, pages, scoring, "fast") is None
    starts = starts_of(queries)
    part = kv.attend(q, pages, starts, scoring, sink_logits=logits, splits=splits, backend="triton")
    again = kv.attend(q, pages, starts, scoring, sink_logits=logits, splits=splits, backend="triton")
    assert torch.equal(part.out.nan_to_num(7.0), again.out.nan_to_num(7.0))
    deep = None if logits is None else logits.double()
    truth = reference.attend(q.double(), Attention(pages, Rows(starts), scoring, deep))
    assert torch.equal(part.out.isnan(), truth.out.isnan())
    assert torch.equal(part.lse.isinf(), truth.lse.isinf())
    good = ~truth.out.isnan().any(-1) & ~truth.lse.isinf()
    error = (part.out.double() - truth.out)[good].norm(dim=-1) / truth.out[good].norm(dim=-1)
    assert error.max().item() < worst + 2 * torch.finfo(dtype).eps, error.max().item()
    assert (part.lse.double() - truth.lse)[good].abs().max().item() < 2e-4 * (1 + 20 * (stretch > 1))
    assert not part.out[truth.lse.isinf()].any()
    return pages, part


CASES = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "one-page": {"page": 0, "lengths": (1000,), "queries": (200,)},
    "ragged": {"lengths": (1000, 333, 64, 70), "queries": (200, 100, 64, 0)},
    "splits": {"splits": 3},
    "many-splits": {"splits": 40},
    "window-sinks": {"scoring": Scoring(window=100, sinks=5)},
    "window-near-sinks": {"lengths": (150, 300), "queries": (150, 200), "scoring": Scoring(window=24, sinks=5)},
    "window-beside-sinks": {"lengths": (300,), "queries": (300,), "scoring": Scoring(window=30, sinks=65, first=3)},
    "all-keys": {"scoring": Scoring(causal=False)},
    "first-recent": {"scoring": Scoring(first=3, recent=40)},
    "only-uncompressed": {"scoring": Scoring(first=3, recent=40, only_uncompressed=True)},
    "negative-scale": {"scoring": Scoring(scale=-0.1)},
    "prefill": {"lengths": (500, 333), "queries": (500, 333)},
    "learned-sinks": {"sinks": True, "group": 7},
    "damage": {"lengths": (500,), "queries": (400,), "damage": 250},
    "damage-all-see": {"lengths": (1500,), "queries": (100,), "damage": 50},
    "tiny-values": {"size": 1e-3},
    "large-values": {"size": 1e3},
    "peaked": {"stretch": 20.0, "worst": 0.005},
    "d64": {"dim": 64},
    "k2v2": {"name": "k2v2", "page": 64},
    "k3v3": {"name": "k3v3", "page": 64},
    "k3v2-d64": {"name": "k3v2", "dim": 64},
    "k2v4-minifloat": {"name": "k2/v4:minifloat"},
    "k8v4": {"name": "k8v4"},
    "k8v8-bfloat16": {"name": "k8v8", "dtype": torch.bfloat16, "page": 64},
    "k5v4-one-page": {"name": "k5v4", "page": 0, "lengths": (1000,), "queries": (200,)},
    "k6v8-window": {"name": "k6v8", "scoring": Scoring(window=100, sinks=5)},
    "k4v5": {"name": "k4v5"},
    "k3v6-prefill": {"name": "k3v6", "lengths": (500, 333), "queries": (500, 333)},
    "k5v6-d64": {"name": "k5v6", "dim": 64},
    "k8v8-d64": {"name": "k8v8", "dim": 64, "splits": 3},
    "k6v4-damage": {"name": "k6v4", "lengths": (500,), "queries": (400,), "damage": 250},
    "k8v4-peaked": {"name": "k8v4", "stretch": 20.0, "worst": 0.005},
    "k5v5-peaked": {"name": "k5v5", "stretch": 20.0, "worst": 0.005},
    "k8v4-negative-scale": {"name": "k8v4", "scoring": Scoring(scale=-0.1)},
    "k4-user": {"name": "k4:[-7,-6,-5,-4,-3,-2,-1.5,-1,0,0.5,1,2,3,4,5,6]/v3:[-2,-1,-0.5,0,0.25,1,1.5,2]"},
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("case", CASES)
def test_extend(case):
    check(**CASES[case])


@pytest.mark.gpu
@on_gpu
def test_ring():
    """Pages that wrap, with pinned ones."""
    torch.manual_seed(0)
    pages = make_pages("k4v4", 128, 2, 7 * 64, 64, ring=True, pinned=1)
    scoring = Scoring(window=200, sinks=50)
    for count in (300, 150, 150):
        x = torch.randn(2 * count, 2, 128, device=DEVICE)
        starts = starts_of((count, count))
        ops.append(pages, x, x.flip(0), starts, backend="triton")
    q = torch.randn(300, 8, 128, device=DEVICE)
    assert extend.why_not_call(q, pages, scoring, "fast") is None
    part = kv.attend(q, pages, starts, scoring, backend="triton")
    truth = reference.attend(q.double(), Attention(pages, Rows(starts), scoring))
    assert ((part.out.double() - truth.out).norm(dim=-1) / truth.out.norm(dim=-1)).max().item() < 0.002


@pytest.mark.gpu
@on_real_gpu
def test_several_streams():
    """Calls on two streams at a time give what each gives alone."""
    torch.manual_seed(0)
    pages, _ = check()
    q = torch.randn(300, 8, 128, device=DEVICE)
    one = torch.randn(2, 8, 128, device=DEVICE)
    starts = starts_of((200, 100))
    want, want_one = kv.attend(q, pages, starts, backend="triton"), kv.attend(one, pages, backend="triton")
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((i, kv.attend(q, pages, starts, backend="triton") if i % 2 else kv.attend(one, pages)))
    torch.cuda.synchronize()
    for i, part in got:
        assert torch.equal(part.out, (want if i % 2 else want_one).out)


@pytest.mark.gpu
@on_real_gpu
def test_graph_of_chunks():
    """A captured append and attend of a chunk, replayed while lengths grow on the device."""
    torch.manual_seed(0)
    pages = make_pages("k4v4", 128, 2, 2048, 64)
    starts = starts_of((40, 40))
    k, v = torch.randn(2, 80, 2, 128, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(80, 8, 128, device=DEVICE, dtype=torch.bfloat16)

    def step():
        ops.append(pages, k, v, starts, backend="triton")
        return kv.attend(q, pages, starts, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part = step()
    pages.lengths.zero_()
    for number in range(40):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert pages.lengths.tolist() == [40 * (number + 1)] * 2
        truth = reference.attend(q.double(), Attention(pages, Rows(starts), Scoring()))
        assert ((part.out.double() - truth.out).norm() / truth.out.norm()).item() < 0.004


@target.assuming((7, 5))  # whatever GPU this run has or emulates
def test_says_why_not():
    pages = make_pages("k4v4", 128, 1, 1024, 64, device="cpu")
    q = torch.empty(100, 8, 128)

    def why(pages=pages, scoring=None, precision="fast", q=q):
        return extend.why_not_shape(q, pages, scoring or Scoring(), precision)

    assert why() is None
    assert why(make_pages("k8v5", 128, 1, 1024, 64, device="cpu")) is None
    assert "float16 scales" in why(make_pages("k4:f32/v4", 128, 1, 1024, 64, device="cpu"))
    assert "float16 scales" in why(make_pages("k16v4", 128, 1, 1024, 64, device="cpu"))
    assert "no arithmetic" in why(make_pages("k8:cubic/v4", 128, 1, 1024, 64, device="cpu"))
    assert "same dim" in why(make_pages("k4v4", 256, 1, 1024, 64, device="cpu"), q=torch.empty(100, 8, 256))
    assert "no arithmetic" in why(make_pages("k4v4:lloyd-max", 128, 1, 1024, 64, device="cpu"))
    assert "multiples of 32" in why(make_pages("k4v4", 128, 1, 1024, 16, device="cpu"))
    assert why(make_pages("k4v4", 128, 1, 1000, 0, device="cpu")) is None
    assert "soft cap" in why(scoring=Scoring(softcap=3.0))
    assert "precision" in why(precision="float32")
    assert "many queries" in why(q=torch.empty(16, 8, 128))
    assert "compute capability 8.0" in extend.why_not_call(q, pages, Scoring(), "fast")
