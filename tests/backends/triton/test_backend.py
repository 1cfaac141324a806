"""The Triton backend: what needs no GPU, and, where there is one, graphs, appends and steps of caches on it."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.backends.triton import backend as triton_backend
from aurakv.errors import BackendError
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate
from aurakv.storage.uncompressed import Uncompressed
from tests.helpers.gpu import DEVICE, on_gpu, on_real_gpu


def test_import_is_light():
    script = "import sys, aurakv; aurakv.why_not('triton'); sys.exit('triton' in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


def test_launches_go_where_the_tensors_are(monkeypatch):
    """Triton launches on the current device; a layer of a model may be on another one."""
    entered = []

    @contextlib.contextmanager
    def device(where):
        entered.append(where)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    run = triton_backend._where_it_lies(lambda first, *others: others)
    for index, guarded in ((0, False), (1, True)):
        entered.clear()
        place = torch.device("cuda", index)
        assert run(types.SimpleNamespace(data=types.SimpleNamespace(device=place)), 2, 3) == (2, 3)
        assert entered == ([place] if guarded else [])
    assert run(torch.ones(1)) == ()
    assert {"encode", "decode", "scores", "values", "append", "append_codes", "attend", "attend_dense"} <= {
        name for name, function in vars(triton_backend).items() if hasattr(function, "__wrapped__")
    }


def test_why_not():
    assert next(iter(backends.names())) == "triton"
    if os.environ.get("TRITON_INTERPRET") != "1" and DEVICE == "cuda":
        assert backends.why_not("triton", None, "cpu") == "it needs a CUDA device, got cpu"
        with pytest.raises(BackendError, match="needs a CUDA device"):
            kv.encode(torch.zeros(1, 1, 64), Format.parse("k4v4", 64).key, backend="triton")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_constants():
    """Arithmetic meets the levels, and the rotation matrix is R but for its unit."""
    from aurakv.backends.triton.common import arithmetic, specialise
    from aurakv.format import levels as level_tables
    from aurakv.format.rotation import rotation

    for name, bits in (("cubic", 4), ("cubic", 8), *(("lloyd-max", bits) for bits in (4, 5, 6, 8))):
        levels = level_tables.table(name, bits)
        power, *coef = arithmetic.curve(levels)
        assert power == {"cubic": 2, "lloyd-max": 0}[name]
        x = (2 * torch.arange(2**bits, dtype=torch.float64) + 1) / 2**bits - 1
        t = x**power if power else torch.log2(1 + 2.0**-bits - x**2)
        y = x * sum(c * t**i for i, c in enumerate(coef))
        truth = torch.tensor(levels, dtype=torch.float64)
        assert ((y - truth).abs() <= 1.1 * arithmetic.FAST_ERROR * truth.abs()).all(), (name, bits)
    assert arithmetic.curve((-3.0, -1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 4.0)) == ()  # looked up
    for dim in (64, 80, 128):
        codec = Format.parse("k4v4", dim).key
        made = specialise.matrix(codec, torch.float64, torch.device("cpu")) * specialise.unit(codec)
        column = torch.arange(made.shape[1])
        coordinate = column % (len(column) // 8) * 8 + column // (len(column) // 8)
        real = coordinate < dim
        truth = rotation(dim, codec.seed, torch.float64, torch.device("cpu")).T
        assert torch.allclose(made[:, real], truth[:, coordinate[real]], atol=1e-12)
        assert not made[:, ~real].any()


def make_pages(name: str, dim: int, seqs: int, tokens: int, kv_heads: int, page_size: int) -> Pages:
    width, device = -(-tokens // page_size), torch.device(DEVICE)
    format = Format.parse(name, dim)
    order = torch.randperm(seqs * width, device=device, dtype=torch.int32)
    return Pages(
        format,
        page_size,
        allocate(format, page_size, seqs * width, kv_heads, device).fill_(255),
        order.view(seqs, width).contiguous(),
        torch.zeros(seqs, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


def error_of(got, truth) -> float:
    return ((got.out.double() - truth.out).norm() / truth.out.norm()).item()


@pytest.mark.gpu
@on_real_gpu
@pytest.mark.parametrize(("name", "page_size"), [("k4v4", 16), ("k4v4", 1024), ("k8v3", 48)])
def test_graph_of_decode_steps(name, page_size):
    """One captured append and attend, replayed while lengths grow on the device, against float64."""
    torch.manual_seed(0)
    seqs, kv_heads, group, dim, start, steps = 3, 2, 4, 128, 100, 70
    pages = make_pages(name, dim, seqs, 192, kv_heads, page_size)
    first = torch.randn(seqs * start, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    ops.append(pages, first, first, [i * start for i in range(seqs + 1)], backend="triton")
    q = torch.randn(seqs, kv_heads * group, dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, seqs, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)

    def step():
        ops.append(pages, k, v, backend="triton")
        return kv.attend(q, pages, backend="triton")

    saved = pages.lengths.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part = step()
    pages.lengths.copy_(saved)
    one_each = Rows(torch.arange(seqs + 1, device=DEVICE, dtype=torch.int32))
    for number in range(steps):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert pages.lengths.tolist() == [start + number + 1] * seqs
        everything = Attention(pages, one_each, kv.Scoring())
        assert error_of(part, reference.attend(q.double(), everything)) < 0.004
    assert int(pages.overflow) == 0


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "dim"),
    [("k4v4", 128), ("k4v4", 64), ("k4v4", 256), ("k4:lsq/v4:l2", 128), ("k3v2", 128), ("k2v3", 64), ("k8v4", 128)],
)
def test_long_append(name, dim, dtype):
    """Many tokens of ragged sequences, some of them damaged, empty or too many, against the reference."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    before, new, kv_heads = [5, 0, 130, 9], [3001, 4090, 0, 1500], 4
    pages = make_pages(name, dim, 4, 4096, kv_heads, 64)
    pages.lengths.copy_(torch.tensor(before))
    pages.table[3, 20] = -1  # the last sequence has no room
    untouched = pages.data[pages.table[3, 0]].clone()
    shape = (sum(new), kv_heads, dim)
    k, v = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in "kv")
    k *= torch.exp(2 * torch.randn(shape[:2], generator=generator, device=DEVICE))[..., None].to(dtype)
    k[7], k[8, :, 3], k[9], k[10] = 0, float("nan"), 1e4, 1e-7
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    ops.append(pages, k, v, starts, backend="triton")
    assert pages.lengths.tolist() == [3006, 4090, 130, 9]
    assert int(pages.overflow) == 1
    assert torch.equal(pages.data[pages.table[3, 0]], untouched)
    for seq in range(2):
        at = slice(starts[seq], starts[seq + 1])
        stored = pages.stored(seq, torch.arange(before[seq], before[seq] + new[seq], device=DEVICE))
        sides = (k, pages.format.key), (v, pages.format.value)
        for codes, (x, codec) in zip(stored, sides, strict=True):
            wanted = ops.encode(x[at], codec, backend="reference")
            sound = wanted.scale.isfinite()
            assert torch.equal(codes.scale.isfinite(), sound)
            same = codes.data == wanted.data
            assert same[sound].float().mean() > 0.9999
            sound &= same.all(-1)
            torch.testing.assert_close(codes.scale[sound], wanted.scale[sound], rtol=2e-3, atol=1e-7)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize(("name", "precision"), [("k4v4", "fast"), ("k4v4", "float32"), ("k5v3", "fast")])
def test_steps_of_a_cache(name, precision, recent):
    """Uncompressed tokens, offset and key_scale over a prompt and steps of one token, like the reference in float32."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    seqs, kv_heads, dim = 3, 2, 128
    offset = torch.randn(kv_heads, dim, generator=generator, device=DEVICE)
    key_scale = torch.rand(kv_heads, dim, generator=generator, device=DEVICE) + 0.5

    def cache(backend, dtype):
        options = {"key_offset": offset, "backend": backend, "device": DEVICE}
        kept = Uncompressed(4, recent, dtype)
        return kv.KVCache.contiguous(Format.parse(name, dim), seqs, kv_heads, uncompressed=kept, **options)

    ours, other = cache("triton", torch.bfloat16), cache("reference", torch.float32)
    for count in (2, 90, *[1] * 40):
        q, k, v = (
            torch.randn(seqs * count, heads, dim, generator=generator, device=DEVICE).bfloat16()
            for heads in (8, kv_heads, kv_heads)
        )
        starts = None if count == 1 else [i * count for i in range(seqs + 1)]
        with torch.inference_mode():
            got = ours.step(q, k, v, starts, key_scale=key_scale, precision=precision)
            wanted = other.step(q.float(), k.float(), v.float(), starts, key_scale=key_scale)
        error = (got.out.float() - wanted.out).norm() / wanted.out.norm()
        assert error < 0.01, (count, float(error))  # bfloat16 results alone are 2e-3
    assert ours.lengths == other.lengths


@pytest.mark.gpu
@on_real_gpu
def test_graph_append_that_does_not_fit():
    pages = make_pages("k4v4", 64, 2, 32, 2, 16)
    pages.lengths.copy_(torch.tensor([31, 5]))
    k = torch.randn(2, 2, 64, device=DEVICE)
    ops.append(pages, k, k, backend="triton")  # compiles
    pages.lengths.copy_(torch.tensor([31, 5]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.append(pages, k, k, backend="triton")
    graph.replay()
    assert (pages.lengths.tolist(), int(pages.overflow)) == ([32, 6], 0)
    before = pages.data.clone()
    graph.replay()
    assert (pages.lengths.tolist(), int(pages.overflow)) == ([32, 7], 1)
    page = int(pages.table[0, 1])
    assert torch.equal(pages.data[page], before[page])


@pytest.mark.gpu
@on_gpu
def test_repeats_bit_for_bit_and_alone():
    """The same call gives the same bits; a sequence alone gives what it gives in a batch, but for rounding."""
    torch.manual_seed(0)
    pages = make_pages("k4v4", 128, 5, 4096, 2, 64)
    counts = [4096, 7, 900, 2048, 0]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    x = torch.randn(starts[-1], 2, 128, device=DEVICE, dtype=torch.float16)
    ops.append(pages, x, x.flip(0), starts, backend="triton")
    q = torch.randn(5, 8, 128, device=DEVICE, dtype=torch.float16)
    a, b = (kv.attend(q, pages, backend="triton") for _ in range(2))
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)
    assert not a.out[4].any()
    assert torch.isneginf(a.lse[4]).all()
    for seq in range(4):
        alone = Pages(
            pages.format, 64, pages.data, pages.table[seq : seq + 1], pages.lengths[seq : seq + 1], pages.overflow
        )
        part = kv.attend(q[seq : seq + 1], alone, backend="triton")
        assert torch.allclose(part.out, a.out[seq : seq + 1], atol=2e-3)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("format", ["k4v4", "k3v5", "k8v2", "k4:lloyd-max/v4:minifloat"])
def test_adversarial_error(format):
    """Peaked softmax, log-normal scales, outlier query coordinates: within the stated error of the fast default."""
    torch.manual_seed(0)
    pages = make_pages(format, 128, 2, 2048, 2, 64)
    k, v = torch.randn(2, 4096, 2, 128, device=DEVICE)
    k *= torch.exp(torch.randn(4096, 2, 1, device=DEVICE))
    v *= torch.exp(2 * torch.randn(4096, 2, 1, device=DEVICE))
    ops.append(pages, k, v, [0, 2048, 4096], backend="triton")
    q = torch.randn(2, 8, 128, device=DEVICE)
    q[..., 5] *= 50
    one_each = Rows(torch.arange(3, device=DEVICE, dtype=torch.int32))
    everything = Attention(pages, one_each, kv.Scoring())
    truth = reference.attend(q.double(), everything)

    def error(part):
        return ((part.out.double() - truth.out).norm(dim=-1) / truth.out.norm(dim=-1)).max().item()

    usual = error(reference.attend(q, everything))  # float32
    for precision, limit in (("fast", 0.005), ("float32", 2 * usual + 1e-6)):
        found = error(kv.attend(q, pages, precision=precision, backend="triton"))
        print(format, precision, f"{found:.1e}, float32 torch {usual:.1e}")
        assert found < limit, (precision, found, usual)


@pytest.mark.gpu
@on_gpu
def test_workspace_is_enough():
    pages = make_pages("k4v4", 128, 1, 8192, 2, 64)
    x = torch.randn(8192, 2, 128, device=DEVICE, dtype=torch.float16)
    ops.append(pages, x, x, [0, 8192], backend="triton")
    for tokens in (1, 5, 300):
        q = torch.randn(tokens, 8, 128, device=DEVICE, dtype=torch.float16)
        size = ops.attend_workspace(pages, tokens, 8, backend="triton")
        space = torch.full((size + 256,), 255, dtype=torch.uint8, device=DEVICE)
        for precision in ("fast", "float32"):
            given = kv.attend(q, pages, [0, tokens], precision=precision, workspace=space[:size], backend="triton")
            free = kv.attend(q, pages, [0, tokens], precision=precision, backend="triton")
            assert torch.equal(given.out, free.out)
        assert (space[size:] == 255).all()
