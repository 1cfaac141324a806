"""First tokens that an append stores a second time: interpreted, emulated, and compiled for GPUs that are not here."""

import random
import re
from dataclasses import replace

import pytest
import torch

from aurakv.attention import ops
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Copies, Rows
from aurakv.format.codec import Codec, Format
from aurakv.format.fit import equal, fit
from aurakv.storage.pages import Pages, allocate
from tests.backends.triton.test_interpreter import interpret, needs_triton
from tests.helpers.gpu import WHY_NOT_COMPILED, compiles
from tests.helpers.ptx import library as ptx

REASON = WHY_NOT_COMPILED or ptx.why_not()
emulates = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")

APPEND = """
import numpy
import torch
numpy.seterr(all="ignore")
torch.set_num_threads(1)
from tests.backends.triton.test_first_tokens import KINDS, check_append

torch.manual_seed(0)
for name, kind in KINDS.items():
    if name != "fitted-one-by-one":  # all fits are here
        check_append(*kind)
"""

# An engine's life with `find` and appends of Triton is that of the reference.
LIVES = """
import numpy
import torch
numpy.seterr(all="ignore")
torch.set_num_threads(1)
from aurakv import backends
from aurakv.vllm.beginnings import Beginnings
from tests.vllm import test_beginnings as cases

backends.select = lambda *_: backends._load("reference")
here, _ = cases.lives(cases.Engine(format="k8v8"), 0, 8)
backends.select = lambda *_: backends._load("triton")
Beginnings.on_gpu = True
there, errors = cases.lives(cases.Engine(format="k8v8", dtype=torch.bfloat16), 0, 8)
assert there == here
assert max(errors) < 0.02
"""
FIRST = 4
KINDS = {  # of appends: format, dim, heads, rows of four sequences, fitted codes, single rows
    "token": ("k4v4", 64, 2, [1, 1, 1, 1], "", True),
    "token-many-heads": ("k4v3", 80, 17, [1, 1, 1, 1], "", True),
    "blocks": ("k8v8", 64, 3, [3, 1, 0, 9], "", False),
    "fitted": ("k4v4", 32, 2, [5, 1, 7, 2], "at once", False),
    "fitted-one-by-one": ("k4v4", 32, 2, [5, 1, 7, 2], "one by one", False),
}
ALONE = ("k4v4", 128, 2, [8300, 1, 2, 9], "", False)  # warps work alone where vectors are many and as they are


ONE_BY_ONE = pytest.param("fitted-one-by-one", marks=pytest.mark.full)


def fits_of(format, heads, weights):
    """Of keys, with weights, and of values."""
    if not weights:
        return None, None
    return fit(format.key, torch.rand(heads, format.key.dim) + 0.1, weights == "at once"), equal(heads)


def make(name, dim, heads, counts, weights, single):
    """Pages of four sequences, of which the first has no token yet, the second lacks one, the third is complete and
    the last has lost its entry."""
    format, starts = Format.parse(name, dim), torch.tensor([0, *counts]).cumsum(0).int()
    old = torch.tensor([0, 3, 20, 7], dtype=torch.int32)
    lengths = old + starts.diff()
    width = -(-int(lengths.max()) // 16) + 1
    table = torch.randperm(4 * width).view(4, width).int()
    key_fit, value_fit = fits_of(format, heads, weights)
    data = allocate(format, 16, 4 * width, heads, torch.device("cpu")).fill_(0)
    overflow = torch.zeros(1, dtype=torch.int32)
    pages = Pages(format, 16, data, table, lengths, overflow, key_fit=key_fit, value_fit=value_fit)
    vectors = Format(*[Codec(dim, 16, dtype=torch.bfloat16)] * 2)
    data = torch.randint(0, 100, (7, heads, vectors.layout(FIRST).bytes), dtype=torch.uint8)
    held = torch.where(old == 7, 0, lengths.clamp(max=FIRST)).int()
    entries = Pages(vectors, FIRST, data, torch.tensor([[6], [2], [3], [0]], dtype=torch.int32), held, overflow)
    before = torch.where(old < FIRST, old, FIRST).int()
    return pages, Copies(entries, before), Rows(starts, single), torch.rand(heads, dim) + 0.5


def check_append(name, dim, heads, counts, weights, single, scaled=True):
    """Which vectors an append has to leave where, and that it writes nothing else there."""
    from aurakv.backends.triton.append.launch import prepare_append

    pages, first, rows, scale = make(name, dim, heads, counts, weights, single)
    k, v = (torch.randn(sum(counts), heads, 2 * dim)[:, :, ::2].bfloat16() for _ in range(2))
    if not scaled:
        scale, k, v = None, k.contiguous(), v.contiguous()
    wanted = first.pages.data.clone()
    wanted_keys, wanted_values = replace(first.pages, data=wanted).vectors()
    stored = 0
    for seq, slot in enumerate(first.pages.table[:, 0].tolist()):
        old = int(first.before[seq])
        for t in range(old, int(first.pages.lengths[seq])):
            at = int(rows.starts[seq]) + t - old
            wanted_keys[slot, :, t] = (k[at].float() * (1 if scale is None else scale)).bfloat16()
            wanted_values[slot, :, t] = v[at]
            stored += 1
    launch = prepare_append(pages, k, v, rows, scale, True, first)
    if not scaled:
        assert launch.options["num_warps"] == 1
    launch(k=k, v=v)
    assert stored
    assert int(pages.overflow) == 0
    assert torch.equal(first.pages.data, wanted), name


@emulates
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", ["token", "blocks", "fitted", ONE_BY_ONE])
def test_emulated_append(kind, capability):
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(0)
    with emulating(capability):
        check_append(*KINDS[kind])


@emulates
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", ["token", "token-many-heads", "fitted", ONE_BY_ONE])
def test_emulated_append_beside_padding(kind, capability):
    """vLLM counts up the lengths of all sequences between the steps of a draft model, also of those that pad a graph:
    these have no rows, so nothing is written where their tables point, which may be anywhere."""
    from aurakv.backends.triton.append.launch import prepare_append
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(0)
    name, dim, heads, _, weights, _ = KINDS[kind]
    pages, _, _, scale = make(name, dim, heads, [1, 1, 1, 1], weights, True)
    pages.data.random_()
    k, v = (torch.randn(4, heads, dim).bfloat16() for _ in range(2))
    found = []
    with emulating(capability):
        for seqs in (2, 4):
            starts = torch.arange(seqs + 1, dtype=torch.int32).clamp_(max=2)
            each = replace(
                pages, data=pages.data.clone(), table=pages.table[:seqs].contiguous(),
                lengths=pages.lengths[:seqs].clone(),
            )  # fmt: skip
            new = {"k": k[:seqs].clone(), "v": v[:seqs].clone()}
            prepare_append(each, *new.values(), Rows(starts, single=True), scale, True)(**new)
            found.append(each.data)
    assert int(pages.overflow) == 0
    assert not torch.equal(found[0], pages.data)
    assert torch.equal(found[0], found[1])


@emulates
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_emulated_append_of_single_warps(capability):
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(0)
    with emulating(capability):
        check_append(*ALONE, scaled=False)


@emulates
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("seqs", "first", "pages_each", "group"), [(1, 4, 9, 4), (5, 4, 9, 4), (5, 4, 1, 2), (24, 4, 9, 1), (3, 7, 9, 8)]
)
def test_emulated_merge(capability, seqs, first, pages_each, group):
    """Sequences with all first tokens uncompressed, with some of them because they have no more, and with none."""
    from aurakv.backends.triton.decode import launch
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(seqs)
    heads, dim = 2, 128
    format = Format.parse("k8v8", dim)
    longest = pages_each * 64
    lengths = torch.tensor([max(1, longest - 37 * i) if i % 3 else min(longest, 2 + i) for i in range(seqs)]).int()
    table = torch.randperm(seqs * pages_each).view(seqs, pages_each).int()
    data = allocate(format, 64, seqs * pages_each, heads, torch.device("cpu")).fill_(0)
    pages = Pages(format, 64, data, table, torch.zeros(seqs).int(), torch.zeros(1).int())
    k, v = (torch.randn(int(lengths.sum()), heads, dim) for _ in range(2))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ops.append(pages, k, v, starts.tolist(), backend="reference")
    held = torch.where(torch.arange(seqs) % 4 == 1, 0, lengths.clamp(max=first)).int()
    vectors = Format(*[Codec(dim, 16, dtype=torch.bfloat16)] * 2)
    entries = torch.randint(0, 256, (seqs + 3, heads, vectors.layout(first).bytes), dtype=torch.uint8)  # may be NaN
    slots = torch.randperm(seqs + 3)[:seqs].int().view(seqs, 1)
    uncompressed = Pages(vectors, first, entries, slots, held, pages.overflow)
    keys, values = uncompressed.vectors()
    for seq in range(seqs):
        for t in range(int(held[seq])):
            keys[slots[seq, 0], :, t], values[slots[seq, 0], :, t] = k[starts[seq] + t], v[starts[seq] + t]
    q = 2 * torch.randn(seqs, heads * group, dim)
    wanted = ops.attend_dense(q, k, v, list(range(seqs + 1)), starts.tolist())
    rows = Rows(torch.arange(seqs + 1, dtype=torch.int32), single=True)
    with emulating(capability):
        run = launch.prepare(q, pages, rows, pages.lengths, Scoring(first=first), None, None, uncompressed, None)
        found = run(q)
    assert float((found.out - wanted.out).norm() / wanted.out.norm()) < 0.01
    torch.testing.assert_close(found.lse, wanted.lse, atol=0.02, rtol=0)


@emulates
@pytest.mark.parametrize("group", [4, 24])
def test_emulated_step_of_lost_entries(group):
    """Where the merge does not score first tokens, as with many query heads, no sequence goes without them."""
    from aurakv import backends
    from aurakv.attention.step import Step
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(group)
    pages, first, rows, _ = make("k8v8", 64, 2, [1, 1, 1, 1], False, True)
    k, v = (torch.randn(int(pages.lengths.sum()), 2, 64) for _ in range(2))
    ends = pages.lengths.cumsum(0)
    starts = [0, *ends.tolist()]
    k[[0, *starts[1:-1]]] *= 5  # of the first tokens
    codes = replace(pages, lengths=torch.zeros_like(pages.lengths))
    ops.append(codes, k, v, starts, backend="reference")
    keys, values = first.pages.vectors()
    for seq, slot in enumerate(first.pages.table[:, 0].tolist()):
        for t in range(int(first.pages.lengths[seq])):
            keys[slot, :, t], values[slot, :, t] = k[starts[seq] + t], v[starts[seq] + t]
    assert not first.pages.lengths[3]
    assert pages.lengths[3] > FIRST
    q = 2 * torch.randn(4, 2 * group, 64)
    wanted = ops.attend_dense(q, k, v, [0, 1, 2, 3, 4], starts)
    step = Step(pages, rows, Scoring(first=FIRST), uncompressed=first.pages, counted=True, first_tokens=first)
    x, y = k[ends - 1], v[ends - 1]
    with emulating((9, 0)):
        found = backends._load("triton").prepare_step(step, q, x, y)(q, x, y)
    assert float((found.out - wanted.out).norm() / wanted.out.norm()) < 0.02
    torch.testing.assert_close(found.lse, wanted.lse, atol=0.3, rtol=0)  # of 8-bit keys


@emulates
@pytest.mark.parametrize(("name", "dim"), [("k4v4", 128), ("k3v3", 80), ("k5v4", 96)])
def test_emulated_find(name, dim):
    """The kernel finds what the CPU finds, also where drafts are rejected; rows of some dims begin at any even byte."""
    from aurakv.vllm.beginnings import Beginnings
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(0)
    format, draw = Format.parse(name, dim), random.Random(dim)
    data = torch.randint(0, 256, (40, 2, 16 * format.bytes_per_token), dtype=torch.uint8)
    here, there = (Beginnings(FIRST, 6, torch.device("cpu")) for _ in range(2))
    running, free, written = [], list(range(1, 40)), 0
    with emulating((9, 0)):
        for _ in range(12):
            running = [each for each in running if draw.random() < 0.8 or free.append(each["block"])]
            while len(running) < draw.randint(1, 5):
                running.append({"block": free.pop(draw.randrange(len(free))), "length": 0})
            news = [draw.choice([1, 2, 4]) for _ in running]
            lengths = torch.tensor([each["length"] + new for each, new in zip(running, news, strict=True)] + [0]).int()
            starts = torch.tensor([0, *news, 0]).cumsum(0).int()
            table = torch.tensor([[each["block"], 3] for each in running] + [[0, 0]]).int()
            pages = Pages(format, 16, data, table, lengths, torch.zeros(1).int())
            here.find(table, lengths, Rows(starts), pages)
            Beginnings.find(_OnGpu(there), table, lengths, Rows(starts), pages)
            for what in ("slots", "before", "held"):
                assert torch.equal(here.state[what][: len(lengths)], there.state[what][: len(lengths)]), what
            written += int((here.state["before"][: len(running)] < FIRST).sum())
            assert not here.state["coded"].any()
            for each, new in zip(
                running, news, strict=True
            ):  # the append, of which some tokens are drafts that are rejected
                row = format.key.row_bytes
                data[each["block"], :, each["length"] * row : FIRST * row].random_()
                each["length"] += draw.randint(1, new)
            here.settle(pages)
            Beginnings.settle(_OnGpu(there), pages)
            assert torch.equal((here.state["tag"] < 0), (there.state["tag"] < 0))
    assert written > 10


@emulates
@pytest.mark.full
def test_emulated_engine(monkeypatch):
    """An engine's steps with every kernel that they launch: rejected drafts, and sequences that come and go."""
    from aurakv import backends
    from aurakv.vllm.beginnings import Beginnings
    from tests.helpers.ptx.driver import emulating
    from tests.vllm import test_beginnings as cases

    chosen = backends._load("triton")
    monkeypatch.setattr(backends, "select", lambda *_: chosen)
    monkeypatch.setattr(Beginnings, "on_gpu", True)
    torch.manual_seed(7)
    with emulating((9, 0)):
        cases.check_drafts(cases.Engine(format="k2v2", dtype=torch.bfloat16), 2, most=0.02)
        _, errors = cases.lives(cases.Engine(format="k8v8", dtype=torch.bfloat16), 0, 5)
    assert max(errors) < 0.02


class _OnGpu:
    """Beginnings whose kernels run, with tensors of the CPU."""

    on_gpu = True

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)


@needs_triton
@pytest.mark.parametrize(
    "script", [pytest.param(APPEND, id="append"), pytest.param(LIVES, id="lives", marks=pytest.mark.full)]
)
def test_interpreted(script):
    interpret(script)


def test_reference_and_native_store_them():
    """What the append of Triton does, other backends do in a step."""
    from aurakv import backends
    from aurakv.attention.step import Step

    for name in ("reference", "native"):
        if backends.why_not(name) is not None:
            continue
        torch.manual_seed(1)
        pages, first, rows, scale = make("k8v8", 64, 3, [3, 1, 0, 9], False, False)
        k, v, q = (torch.randn(13, 3, 64) for _ in range(3))
        step = Step(pages, rows, Scoring(), key_scale=scale, counted=True, first_tokens=first)
        lengths, old = pages.lengths.clone(), first.pages.data.clone()
        backends._load(name).prepare_step(step, q, k, v)(q, k, v)
        keys, values = first.pages.vectors()
        assert torch.equal(pages.lengths, lengths)
        assert torch.equal(values[6, :, :3], v[:3].transpose(0, 1).bfloat16()), name
        assert torch.equal(keys[6, :, :3], (k[:3] * scale).transpose(0, 1).bfloat16()), name
        assert torch.equal(values[2, :, 3], v[3].bfloat16()), name
        assert torch.equal(first.pages.data[[0, 1, 3, 4, 5]], old[[0, 1, 3, 4, 5]]), name


@compiles
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [1, 4, 4096])
def test_compiled_append(monkeypatch, tmp_path, capability, rows):
    """No warp waits for another one because of them, and nothing goes to the stack."""
    from aurakv.backends.triton.append import launch
    from tests.helpers.compile_only import CompileOnly, disassemble, resources

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "append_kernel", CompileOnly(launch.append_kernel, capability, seen := {}))
    pages, first, _, scale = make("k4v4", 128, 8, [rows] * 4, False, False)
    starts = torch.arange(5, dtype=torch.int32) * rows
    x = torch.empty(4 * rows, 8, 128, dtype=torch.bfloat16)
    barriers = []
    for tokens in (None, first):
        options = None if rows == 4096 else scale, True, tokens  # without a scale single warps do it
        launch.prepare_append(pages, x, x, Rows(starts, single=rows == 1), *options)(k=x, v=x)
        kernel, warps = seen["append_kernel"]
        assert warps == (1 if rows == 4096 else 4)
        assert resources(kernel.asm["cubin"], tmp_path)[1] == 0
        barriers.append(len(re.findall(r"\bBAR\.", disassemble(kernel.asm["cubin"], tmp_path))))
    assert barriers[0] == barriers[1]


@compiles
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("seqs", [1, 64])
def test_compiled_merge(tmp_path, capability, seqs):
    """They are read at once, by each warp for itself: as many loads of keys and of values as there are tokens."""
    from aurakv.backends.triton.decode import launch
    from tests.helpers.compile_only import compiling, disassemble, resources

    pages, first, _, scale = make("k4v4", 128, 8, [1] * 4, False, False)
    table, lengths = torch.zeros(seqs, 130, dtype=torch.int32), torch.zeros(seqs, dtype=torch.int32)
    data = torch.empty(2, 8, pages.format.layout(64).bytes, dtype=torch.uint8)
    pages = Pages(pages.format, 64, data, table, lengths, pages.overflow)
    entries = Pages(first.pages.format, FIRST, first.pages.data, table[:, :1].contiguous(), lengths, pages.overflow)
    q, rows = torch.empty(seqs, 32, 128, dtype=torch.bfloat16), Rows(torch.arange(seqs + 1, dtype=torch.int32), True)
    found = []
    for uncompressed in (None, entries):
        with compiling(capability) as seen:
            scoring = Scoring(first=FIRST if uncompressed else 0)
            launch.prepare(q, pages, rows, lengths, scoring, None, None, uncompressed, scale)(q)
        cubin = seen["merge_pieces"][0].asm["cubin"]
        sass = disassemble(cubin, tmp_path)
        assert resources(cubin, tmp_path)[1] == 0
        found.append([len(re.findall(pattern, sass)) for pattern in (r"\bBAR\.", r"\bLDG\.E\.64")])
    assert found[0][0] == found[1][0]
    assert found[1][1] - found[0][1] >= 2 * FIRST
