"""Operations one by one on every backend, and their registered operators."""

import dataclasses
import threading

import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops
from aurakv.backends import reference
from aurakv.errors import BackendError, CapacityError, InputError
from aurakv.format.fit import equal
from aurakv.format.levels import CODE_BITS
from aurakv.testing import check_codes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codec_of(bits, dim, side="key"):
    return (kv.Codec.key if side == "key" else kv.Codec.value)(dim, bits)


def tolerance(backend, dtype):
    return max(backends.fast_error(backend), 4 * torch.finfo(dtype).eps, 1e-5)


def on_cpu(codes):
    return kv.Codes(codes.data.cpu(), None if codes.scale is None else codes.scale.cpu())


def in_float64(codes, codec, offset):
    """On the CPU: an Apple GPU has no float64."""
    moved = None if offset is None else offset.cpu()
    return kv.decode(on_cpu(codes), codec, moved, dtype=torch.float64, backend="reference")


@pytest.mark.parametrize("bits", [*CODE_BITS, 16])
@pytest.mark.parametrize("dim", [64, 80, 112, 128, 192, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_and_decode(backend, device, bits, dim, dtype):
    for side in ("key", "value"):
        codec = codec_of(bits, dim, side)
        offset = rand(3, dim, seed=1) if codec.coded else None
        x = rand(2, 35, 3, dim + 16, dtype=dtype)[..., 16:]  # leading dimensions, rows of a wider tensor
        on = [None if t is None else t.to(device) for t in (x, offset)]
        codes = kv.encode(on[0], codec, on[1], backend=backend)
        check_codes(codes, x, codec, offset)
        stored = on_cpu(codes)
        for rotated in (False, True):
            got = kv.decode(codes, codec, on[1], rotated=rotated, dtype=dtype, backend=backend).cpu()
            wanted = reference.decode(stored, codec, offset, rotated, torch.float64)
            assert got.dtype == dtype
            error = (got.double() - wanted).norm() / wanted.norm()
            assert error <= 2 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("bits", [*CODE_BITS, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (7, 1, 96), (4, 4, 128)])
def test_scores(backend, device, bits, heads, kv_heads, dim):
    codec = codec_of(bits, dim)
    offset = rand(kv_heads, dim, seed=1).to(device) if codec.coded else None
    keys = kv.encode(rand(77, kv_heads, dim, seed=2).to(device), codec, offset, backend=backend)
    q = rand(5, heads, dim, seed=3)
    got = ops.scores(q.to(device), keys, codec, offset, backend=backend).cpu().double()
    decoded = in_float64(keys, codec, offset)
    wanted = torch.einsum("thd,nhd->thn", q.double(), decoded.repeat_interleave(heads // kv_heads, 1))
    assert (got - wanted).norm() / wanted.norm() <= tolerance(backend, torch.float32)


@pytest.mark.parametrize("bits", [*CODE_BITS, 16])
@pytest.mark.parametrize("threshold", [0.0, 0.01])
def test_values_drop_exactly_what_is_below(backend, device, bits, threshold):
    codec = codec_of(bits, 80, "value")
    offset = rand(2, 80, seed=1).to(device) if codec.coded else None
    stored = kv.encode(rand(60, 2, 80, seed=2).to(device), codec, offset, backend=backend)
    weights = rand(3, 6, 60, seed=3).softmax(-1)
    weights[0, 0, 5] = threshold  # not below: stays
    got = ops.values(weights.to(device), stored, codec, offset, threshold=threshold, backend=backend).cpu().double()
    decoded = in_float64(stored, codec, offset)
    kept = torch.where(weights < threshold, 0, weights).double()
    wanted = torch.einsum("thn,nhd->thd", kept, decoded.repeat_interleave(3, 1))
    assert (got - wanted).norm() / wanted.norm() <= tolerance(backend, torch.float32)
    assert threshold == 0 or (kept == 0).any()


def test_values_never_skip_nan_weights(backend, device):
    codec = codec_of(4, 64, "value")
    stored = kv.encode(rand(10, 1, 64).to(device), codec, backend=backend)
    weights = torch.full((1, 2, 10), 0.1)
    weights[0, 1, 3] = torch.nan
    out = ops.values(weights.to(device), stored, codec, threshold=0.5, backend=backend).cpu()
    assert not out[0, 0].any()
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scoring", [kv.Scoring(), kv.Scoring(window=7, sinks=2, softcap=4.0), kv.Scoring(causal=False)]
)
def test_attend_dense(backend, device, dtype, scoring):
    starts, key_starts = [0, 3, 3, 8], [0, 9, 12, 20]
    q, k, v = rand(8, 6, 64, dtype=dtype), rand(20, 2, 64, seed=1, dtype=dtype), rand(20, 2, 48, seed=2, dtype=dtype)
    logits = rand(6, seed=3)
    got = ops.attend_dense(
        q.to(device), k.to(device), v.to(device), starts, key_starts, scoring,
        ends=[9, 3, 30], sink_logits=logits.to(device), backend=backend,
    )  # fmt: skip
    for seq, end in enumerate((9, 3, 30)):
        a, b, c, d = *starts[seq : seq + 2], *key_starts[seq : seq + 2]
        query = torch.arange(end - (b - a), end)[:, None]
        key = torch.arange(end - (d - c), end)[None]
        seen = (key <= query) | (not scoring.causal)
        if scoring.window:
            seen = seen & ((key > query - scoring.window) | (key < scoring.sinks))
        s = torch.einsum("thd,nhd->htn", q[a:b].double(), k[c:d].double().repeat_interleave(3, 1)) / 8
        s = scoring.cap(s).masked_fill(~seen, -torch.inf)
        s = torch.cat([s, logits.double()[:, None, None].expand(-1, b - a, 1)], -1)
        wanted = torch.einsum("htn,nhd->thd", s.softmax(-1)[..., :-1], v[c:d].double().repeat_interleave(3, 1))
        torch.testing.assert_close(got.out[a:b].cpu().double(), wanted, atol=8 * torch.finfo(dtype).eps, rtol=0.01)
        torch.testing.assert_close(got.lse[a:b].cpu().double(), s.logsumexp(-1).T, atol=1e-4, rtol=1e-4)


def test_attend_dense_prefill_is_ordinary_attention(backend, device):
    q, k, v = rand(50, 4, 64).to(device), rand(50, 2, 64, seed=1).to(device), rand(50, 2, 64, seed=2).to(device)
    got = ops.attend_dense(q, k, v, [0, 50], backend=backend)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(got.out, wanted.transpose(0, 1), atol=1e-4, rtol=1e-4)


def filled(device="cpu", name="k4v3", lengths=(50, 0, 20), **options):
    fmt = kv.Format.parse(name, 64)
    pool = kv.PagePool(fmt, 40, 16, kv_heads=2, device=device)
    cache = kv.KVCache.paged(pool, len(lengths), **options)
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    cache.append(rand(starts[-1], 2, 64, seed=5).to(device), rand(starts[-1], 2, 64, seed=6).to(device), starts)
    return cache


def test_splits_and_workspace_change_nothing_but_rounding(backend, device):
    cache = filled(device, lengths=(500, 3, 20))
    q = rand(3, 6, 64).to(device)
    one = kv.attend(q, cache.pages, splits=1, backend=backend)
    for splits in (2, 3, 16, 100):
        size = ops.attend_workspace(cache.pages, 3, 6, splits=splits, backend=backend)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        many = kv.attend(q, cache.pages, splits=splits, workspace=workspace, backend=backend)
        limit = tolerance(backend, torch.float32)
        torch.testing.assert_close(many.out, one.out, atol=limit, rtol=limit)
        torch.testing.assert_close(many.lse, one.lse, atol=limit, rtol=limit)


def test_repeats_bit_for_bit(backend, device):
    cache = filled(device, lengths=(500, 3, 20))
    q = rand(3, 6, 64).to(device)
    a, b = (kv.attend(q, cache.pages, backend=backend) for _ in range(2))
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)


def test_ends_move_the_queries(backend, device):
    """Queries at earlier or later positions than the last stored token, as shards and pieces need it."""
    cache = filled(device, lengths=(50, 4, 20))
    q = rand(3, 6, 64).to(device)
    window = kv.Scoring(window=10)
    got = kv.attend(q, cache.pages, scoring=window, ends=[30, 4, 100], backend=backend)
    for seq, end in ((0, 30), (1, 4)):
        k, v = (x[:end].to(device) for x in cache.decode(seq))
        wanted = ops.attend_dense(q[seq : seq + 1], k, v, [0, 1], [0, end], window, backend="reference")
        torch.testing.assert_close(got.out[seq], wanted.out[0], atol=tolerance(backend, torch.float32), rtol=1e-2)
    assert not got.out[2].any()
    assert torch.isneginf(got.lse[2]).all()


def test_context_parallel_shards_merge_to_the_whole(backend, device):
    """Positions of a shard are shifted by its base: queries move by −base, sinks and first shrink by it."""
    fmt = kv.Format.parse("k4v4", 64)
    k, v, q = rand(70, 2, 64).to(device), rand(70, 2, 64, seed=1).to(device), rand(5, 6, 64, seed=2).to(device)
    scoring = kv.Scoring(window=30, sinks=4, softcap=5.0)
    whole = kv.KVCache.contiguous(fmt, 1, 2, device=device)
    whole.append(k, v, [0, 70])
    wanted = kv.attend(q, whole.pages, [0, 5], scoring, backend=backend)
    parts = []
    for base, stop in ((0, 2), (2, 45), (45, 70)):
        shard = kv.KVCache.contiguous(fmt, 1, 2, device=device)
        shard.append(k[base:stop], v[base:stop], [0, stop - base])
        local = dataclasses.replace(scoring, sinks=max(0, scoring.sinks - base))
        parts.append(kv.attend(q, shard.pages, [0, 5], local, ends=[70 - base], backend=backend))
    got = kv.merge(*parts)
    limit = tolerance(backend, torch.float32)
    torch.testing.assert_close(got.out, wanted.out, atol=limit, rtol=limit)
    torch.testing.assert_close(got.lse, wanted.lse, atol=limit, rtol=limit)


def test_float64_is_exact():
    """Without a named backend the reference computes it, whatever else is installed."""
    cache = filled()
    q = rand(3, 6, 64).double()
    out, lse = kv.attend(q, cache.pages)
    assert out.dtype == lse.dtype == torch.float64
    k, v = cache.decode(0, torch.float64)
    wanted = ops.attend_dense(q[:1], k, v, [0, 1], [0, 50])
    torch.testing.assert_close(out[:1], wanted.out, atol=1e-12, rtol=1e-12)


def test_low_level_append_reports_what_does_not_fit(backend, device):
    cache = filled(device, lengths=(30, 0, 20))
    before = cache.pages.data.clone()
    kv.append(cache.pages, rand(3, 2, 64).to(device), rand(3, 2, 64).to(device), [0, 0, 3, 3], backend=backend)
    assert int(cache.pages.overflow) == 1  # sequence 1 has no page
    assert torch.equal(cache.pages.data, before)
    assert cache.pages.lengths.tolist() == [30, 0, 20]
    with pytest.raises(CapacityError, match="did not fit"):
        cache.sync()
    cache.sync()  # reported once
    cache.reserve(3)
    kv.append(cache.pages, rand(3, 2, 64).to(device), rand(3, 2, 64).to(device), [0, 0, 3, 3], backend=backend)
    cache.sync()
    assert cache.lengths == [30, 3, 20]


# registered operators


def decode_step(pages, q, k, v):
    kv.append(pages, k, v)
    return kv.attend(q, pages, scoring=kv.Scoring(window=40, sinks=2, softcap=30.0))


@pytest.mark.parametrize("name", ["k4v3", "k16v4", "k2:[-1.5,-0.4,0.5,1.6]/v4:minifloat"])
def test_a_decode_step_compiles_without_a_graph_break(backend, device, name):
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    eager, traced = filled(device, name, backend=backend), filled(device, name, backend=backend)
    for step in range(4):
        for cache in (eager, traced):
            cache.reserve(1)
        q, k, v = (rand(3, h, 64, seed=step + h).to(device) for h in (6, 2, 2))
        wanted, got = decode_step(eager.pages, q, k, v), compiled(traced.pages, q, k, v)
        assert torch.equal(wanted.out, got.out)
        assert torch.equal(wanted.lse, got.lse)
    assert traced.lengths == [54, 4, 24]


@pytest.mark.skipif(" " in torch.__file__, reason="torch's Inductor does not quote paths, and this one has a space")
def test_inductor_runs_a_decode_step(backend, device):
    compiled = torch.compile(decode_step, fullgraph=True)
    cache, again = filled(device), filled(device)
    cache.reserve(1)
    again.reserve(1)
    q, k, v = (rand(3, h, 64, seed=h).to(device) for h in (6, 2, 2))
    torch.testing.assert_close(compiled(cache.pages, q, k, v).out, decode_step(again.pages, q, k, v).out)


def test_all_operations_trace():
    key, value = codec_of(4, 64), codec_of(3, 64, "value")

    def everything(q, x):
        keys, values = kv.encode(x, key), kv.encode(x, value)
        weights = ops.scores(q, keys, key).softmax(-1)
        out = ops.values(weights, values, value, threshold=1e-6)
        return out + kv.decode(values, value)[:3].repeat_interleave(3, 1), ops.attend_dense(q[:0], x[:0], x[:0], None)

    q, x = rand(3, 6, 64), rand(20, 2, 64)
    wanted, _ = everything(q, x)
    got, empty = torch.compile(everything, fullgraph=True, backend="aot_eager")(q, x)
    torch.testing.assert_close(got, wanted)
    assert empty.out.shape == (0, 6, 64)


def operator_calls():
    cache = filled()
    cache.reserve(1)
    pages, q = cache.pages, rand(3, 6, 64)
    k, v = rand(3, 2, 64), rand(3, 2, 64)
    tensors = (pages.data, pages.table, pages.lengths, pages.overflow, None, None, None, equal(2))
    flat = (*tensors, "k4v3", 64, 64, 16, False, 0)
    scoring = (None, True, 40, 2, 30.0, 0, 0, False, 0.0)
    codec = codec_of(4, 64)
    codes = kv.encode(k, codec)
    starts = torch.arange(4, dtype=torch.int32)
    workspace = torch.empty(10**6, dtype=torch.uint8)
    operators = torch.ops.aurakv
    return {
        "encode": (operators.encode, (k, None, equal(2), codec.name, 64, None)),
        "encode at 16": (operators.encode, (k, None, None, "16:f32", 64, None)),
        "decode": (operators.decode, (*codes, None, codec.name, 64, False, torch.float16, None)),
        "scores": (operators.scores, (q, *codes, None, codec.name, 64, None)),
        "values": (operators.values, (q[..., :3].contiguous(), *codes, None, codec.name, 64, 0.1, None)),
        "append": (operators.append, (k, v, starts, *flat, None)),
        "attend": (operators.attend, (q, starts, None, None, None, *flat, *scoring, None, "fast", False, None)),
        "attend with all": (
            operators.attend,
            (q, starts, pages.lengths.clone(), rand(6), workspace, *flat, *scoring, 2, "float32", False, None),
        ),
        "attend_dense": (operators.attend_dense, (q, k, v, starts, starts, None, None, *scoring, None)),
    }  # fmt: skip


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name):
    operator, arguments = operator_calls()[name]
    torch.library.opcheck(operator.default, arguments)


# what users expect of torch software


def test_inputs_that_require_grad_are_refused():
    cache = filled()
    q = rand(3, 6, 64).requires_grad_()
    with pytest.raises(InputError, match="requires grad"):
        kv.attend(q, cache.pages)
    with torch.no_grad():
        assert not kv.attend(q, cache.pages).out.requires_grad


def test_inference_mode_and_back():
    """Constants that are made and kept inside inference mode still work outside, and the reverse."""
    with torch.inference_mode():
        cache = filled(name="k5v6")
        inside = kv.attend(rand(3, 6, 64), cache.pages).out.clone()
    outside = kv.attend(rand(3, 6, 64), filled(name="k5v6").pages).out
    assert torch.equal(inside, outside)
    for made_inside in (True, False):
        with torch.inference_mode(made_inside):
            cache = filled()
        with torch.inference_mode():
            cache.append(rand(3, 2, 64), rand(3, 2, 64))
        cache.append(rand(3, 2, 64), rand(3, 2, 64))
        cache.truncate(0, 40)
        cache.fork(0, 1)
        cache.append(rand(300, 2, 64), rand(300, 2, 64), [0, 100, 200, 300])
        assert cache.lengths == [140, 140, 122]


def test_python_threads_do_not_disturb_each_other(backend, device):
    cache = filled(device, lengths=(300, 5, 20))
    q = rand(3, 6, 64).to(device)
    wanted = kv.attend(q, cache.pages, backend=backend).out
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(kv.attend(q, cache.pages, backend=backend).out, wanted):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_backends_are_chosen_best_first_and_explain_themselves():
    assert kv.why_not("reference", None, "cpu") is None
    assert kv.why_not("reference", None, "cpu", torch.float64) is None
    assert "reference" in backends.names()
    with pytest.raises(InputError, match="backend must be one of"):
        kv.why_not("nonsense")

    class Never:
        name, fast_error = "never", 0.0

        def why_not(self, format, device):
            return "it is a test"

    backends.register(Never())
    cache = filled()
    with pytest.raises(BackendError, match="'never' cannot run k4v3 on cpu: it is a test"):
        kv.attend(rand(3, 6, 64), cache.pages, backend="never")
    backends._registered.pop("never")
