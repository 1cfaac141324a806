"""Recent tokens that an append stores a second time and a decode reads: emulated, and compiled for GPUs not here."""

import random
import re
from dataclasses import replace

import pytest
import torch

from aurakv.attention import ops
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Copies, Rows, Step
from aurakv.format.codec import Codec, Format
from aurakv.storage.pages import Pages, allocate
from tests.backends.triton.test_first_tokens import ONE_BY_ONE, fits_of
from tests.helpers.gpu import WHY_NOT_COMPILED, compiles
from tests.helpers.ptx import library as ptx
from tests.vllm.test_recent import PROMPTS, damage_spreads, lost_before_a_prompt, prompts_beside

REASON = WHY_NOT_COMPILED or ptx.why_not()
emulates = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")
BLOCK, GROUP, HEADS = 64, 32, 2


def vectors_of(dim, tokens, count):
    format = Format(*[Codec(dim, 16, dtype=torch.bfloat16)] * 2)
    return format, torch.randint(0, 100, (count, HEADS, format.layout(tokens).bytes), dtype=torch.uint8)


APPENDS = {  # rows of four sequences, fitted codes, single rows
    "token": ([1, 1, 1, 1], "", True),
    "blocks": ([3, 1, 40, 9], "", False),
    "fitted": ([5, 1, 7, 2], "at once", False),
    "fitted-one-by-one": ([5, 1, 7, 2], "one by one", False),
}


@emulates
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", ["token", "blocks", "fitted", ONE_BY_ONE])
def test_emulated_append(kind, capability):
    """The last rows of sequences, behind what lies there, and nothing else; the last sequence has lost its entry."""
    from aurakv.backends.triton.append.launch import prepare_append
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(0)
    counts, weights, single = APPENDS[kind]
    dim = 32 if weights else 64
    format, starts = Format.parse("k4v4", dim), torch.tensor([0, *counts]).cumsum(0).int()
    old = torch.tensor([0, 35, 20, 7], dtype=torch.int32)
    lengths = old + starts.diff()
    fits = fits_of(format, HEADS, weights)
    data = allocate(format, BLOCK, 8, HEADS, torch.device("cpu")).fill_(0)
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    pages = Pages(format, BLOCK, data, table, lengths, torch.zeros(1).int(), key_fit=fits[0], value_fit=fits[1])
    begins = (lengths - 1) // GROUP * GROUP
    held, before = lengths - begins, (old - begins).clamp(min=0).int()
    held[3] = before[3] = 0
    stored, data = vectors_of(dim, GROUP, 7)
    slots = torch.tensor([[6], [2], [3], [0]], dtype=torch.int32)
    entries = Pages(stored, GROUP, data, slots, held.int(), pages.overflow)
    k, v = (torch.randn(sum(counts), HEADS, dim).bfloat16() for _ in range(2))
    scale = torch.rand(HEADS, dim) + 0.5
    wanted = Pages(stored, GROUP, data.clone(), slots, held.int(), pages.overflow)
    keys, values = wanted.vectors()
    for seq, slot in enumerate(slots[:, 0].tolist()):
        for t in range(int(before[seq]), int(held[seq])):
            row = int(starts[seq + 1]) - int(held[seq]) + t
            keys[slot, :, t], values[slot, :, t] = (k[row].float() * scale).bfloat16(), v[row]
    with emulating(capability):
        copies = None, Copies(entries, before, last=True)
        prepare_append(pages, k, v, Rows(starts, single), scale, True, *copies)(k=k, v=v)
    assert torch.equal(entries.data, wanted.data)
    assert int(pages.overflow) == 0


@emulates
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("seqs", "first", "pages_each", "group", "dim", "offset"),
    [(1, 4, 9, 4, 128, True), (5, 0, 9, 4, 128, False), (5, 4, 1, 2, 64, True), (24, 4, 9, 1, 128, False),
     (3, 4, 9, 8, 96, True)],
)  # fmt: skip
def test_emulated_step(capability, seqs, first, pages_each, group, dim, offset):
    """Codes up to the group, first tokens below it, the group as it came; some sequences have lost their entry."""
    from aurakv.backends import reference
    from aurakv.backends.triton import backend
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(seqs)
    format, longest = Format.parse("k4v4", dim), pages_each * BLOCK
    lengths = torch.tensor([max(1, longest - 37 * i) if i % 3 else min(longest, 2 + i) for i in range(seqs)]).int()
    table = torch.randperm(seqs * pages_each).view(seqs, pages_each).int()
    data = allocate(format, BLOCK, seqs * pages_each, HEADS, torch.device("cpu")).fill_(0)
    bias = torch.randn(HEADS, dim) if offset else None
    pages = Pages(format, BLOCK, data, table, torch.zeros(seqs).int(), torch.zeros(1).int(), key_offset=bias)
    old = lengths - 1
    starts = torch.tensor([0, *old]).cumsum(0).int()
    k, v = (torch.randn(int(old.sum()), HEADS, dim) for _ in range(2))
    ops.append(pages, k, v, starts.tolist(), backend="reference")
    pages.lengths.copy_(lengths)
    begins = (lengths - 1) // GROUP * GROUP
    lost = torch.arange(seqs) % 5 == 4
    held, before = torch.where(lost, 0, lengths - begins).int(), torch.where(lost, 0, old - begins).clamp(min=0).int()
    coded = torch.where(lost, lengths, begins).int()
    stored, entries = vectors_of(dim, GROUP, seqs + 3)
    slots = torch.randperm(seqs + 3)[:seqs].int().view(seqs, 1)
    recent = Pages(stored, GROUP, entries, slots, held, pages.overflow)
    keys, values = recent.vectors()
    for seq in range(seqs):
        rows = slice(int(starts[seq]) + int(begins[seq]), int(starts[seq + 1]))
        count = 0 if lost[seq] else int(before[seq])
        keys[slots[seq, 0], :, :count], values[slots[seq, 0], :, :count] = (
            x[rows][:count].transpose(0, 1).bfloat16() for x in (k, v)
        )
    uncompressed, places = None, None
    if first:
        places, more = vectors_of(dim, first, seqs)
        own = torch.arange(seqs).int().view(seqs, 1)
        uncompressed = Pages(places, first, more, own, lengths.clamp(max=first).int(), pages.overflow)
        keys, values = uncompressed.vectors()
        keys.normal_(), values.normal_()
    q, new_k, new_v = (torch.randn(seqs, heads, dim).bfloat16() for heads in (HEADS * group, HEADS, HEADS))
    scale = torch.rand(HEADS, dim) + 0.5

    def step(pages, recent):
        rows = Rows(torch.arange(seqs + 1, dtype=torch.int32), single=True)
        part = replace(pages, lengths=coded).trust()
        return Step(pages, rows, Scoring(first=first), key_scale=scale, uncompressed=uncompressed, counted=True,
                    recent_tokens=Copies(recent, before, last=True), recent=recent, coded=part)  # fmt: skip

    there = Pages(format, BLOCK, data.clone(), table, lengths.clone(), torch.zeros(1).int(), key_offset=bias)
    wanted = reference.prepare_step(
        step(there, Pages(stored, GROUP, entries.clone(), slots, held, pages.overflow)), q.double(), new_k, new_v
    )(q.double(), new_k, new_v)
    with emulating(capability):
        found = backend.prepare_step(step(pages, recent), q, new_k, new_v)(q, new_k, new_v)
    assert float((found.out.double() - wanted.out).norm() / wanted.out.norm()) < 0.01
    torch.testing.assert_close(found.lse.double(), wanted.lse, atol=0.02, rtol=0)


@emulates
@pytest.mark.parametrize("capability", [pytest.param((8, 0), marks=pytest.mark.full), (9, 0)])
def test_emulated_engine(monkeypatch, capability):
    """An engine's steps with every kernel that they launch, against softmax in float64."""
    from aurakv import backends
    from aurakv.vllm.beginnings import Beginnings
    from tests.helpers.ptx.driver import emulating
    from tests.vllm import test_recent as cases

    chosen = backends._load("triton")
    monkeypatch.setattr(backends, "select", lambda *_: chosen)
    monkeypatch.setattr(Beginnings, "on_gpu", True)
    with emulating(capability):
        assert cases.decodes(cases.Engine(Scoring(), dtype=torch.bfloat16, group=16, block=32, on_gpu=True), 3) < 0.03


@emulates
@pytest.mark.parametrize("capability", [pytest.param((8, 0), marks=pytest.mark.full), (9, 0)])
@pytest.mark.parametrize("kind", PROMPTS)
def test_emulated_prompts(monkeypatch, kind, capability):
    """Each row reads its own group as it came, wherever a prompt is cut."""
    from aurakv import backends
    from aurakv.vllm.beginnings import Beginnings
    from tests.helpers.ptx.driver import emulating

    chosen = backends._load("triton")
    monkeypatch.setattr(backends, "select", lambda *_: chosen)
    monkeypatch.setattr(Beginnings, "on_gpu", True)
    with emulating(capability):
        assert prompts_beside(kind, 3) < 0.01
        if kind == "plain":
            assert 1e-3 < lost_before_a_prompt() < 0.02


@emulates
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("room", "rows"), [(0, 12), (512, 40)])
def test_emulated_damage(monkeypatch, room, rows, side):
    """A number that is not finite makes NaN of the rows that see its token, in drafts and prompts, and of no other."""
    from aurakv import backends
    from aurakv.vllm.beginnings import Beginnings
    from tests.helpers.ptx.driver import emulating

    chosen = backends._load("triton")
    monkeypatch.setattr(backends, "select", lambda *_: chosen)
    monkeypatch.setattr(Beginnings, "on_gpu", True)
    with emulating((9, 0)):
        for at in (3, 9):
            assert damage_spreads(room, side, at, rows) == [row >= at for row in range(rows)], at


@emulates
def test_emulated_find():
    """A group that is as it was left is used again; one whose block has other codes, or that is unknown, is not."""
    from aurakv.vllm.recent_gpu import RecentOnGpu
    from tests.helpers.ptx.driver import emulating

    torch.manual_seed(0)
    format, draw = Format.parse("k3v3", 80), random.Random(0)
    data = torch.randint(0, 256, (40, HEADS, 32 * format.bytes_per_token), dtype=torch.uint8)
    recent = RecentOnGpu(16, 4, torch.device("cpu"))
    row = format.key.row_bytes

    def find(blocks, olds, news, runs=True):
        lengths = torch.tensor([old + new for old, new in zip(olds, news, strict=True)] + [0]).int()
        starts = torch.tensor([0, *news, 0]).cumsum(0).int()
        table = torch.tensor([*blocks, [0] * len(blocks[0])]).int()
        pages = Pages(format, 32, data, table, lengths, torch.zeros(1).int())
        recent.find(table, lengths, Rows(starts), pages)
        for each, old, new in zip(blocks, olds, news, strict=True):  # the append
            for t in range(old, old + new if runs else old):
                data[each[t // 32], :, t % 32 * row : (t % 32 + 1) * row].random_()
        if runs:
            recent.settle(pages)
        return [recent.state[name][: len(lengths)].tolist() for name in ("held", "before", "coded")]

    with emulating((9, 0)):
        assert find([[3, 4], [7, 8]], [0, 0], [5, 40]) == [[5, 8, 0], [0, 0, 0], [0, 40, 0]]
        assert find([[3, 4], [7, 8]], [5, 40], [1, 1]) == [[6, 9, 0], [5, 8, 0], [0, 32, 0]]
        slot = recent.state["slots"][:2].tolist()
        assert len(set(slot)) == 2
        data[8] = torch.randint(0, 256, data[8].shape, dtype=torch.uint8)  # a connector fills the block
        assert find([[3, 4], [7, 8]], [6, 41], [1, 1]) == [[7, 0, 0], [6, 0, 0], [0, 42, 0]]
        assert find([[7, 8]], [42], [1]) == [[0, 0], [0, 0], [43, 0]]  # until the group is full
        assert find([[7, 8]], [43], [4]) == [[0, 0], [0, 0], [47, 0]]
        assert find([[7, 8]], [47], [2]) == [[1, 0], [0, 0], [49, 0]]  # in two groups, so codes are read
        assert recent.state["opened"][0] == 0, "it was lost"
        assert find([[7, 8]], [48], [2]) == [[2, 0], [0, 0], [48, 0]]  # from the beginning of a group
        assert find([[3, 4]], [7], [4]) == [[11, 0], [7, 0], [0, 0]]  # drafts, of which one is taken
        assert find([[3, 4]], [8], [4]) == [[12, 0], [8, 0], [0, 0]]
        assert find([[3, 4]], [12], [6]) == [[2, 0], [0, 0], [18, 0]]
        assert (recent.state["opened"][0], recent.state["open_slots"][0]) == (12, slot[0])
        assert recent.state["slots"][0] != slot[0]
        find([[7, 8]], [50], [1], runs=False)  # a step that is prepared and does not run
        assert find([[7, 8]], [50], [1]) == [[0, 0], [0, 0], [51, 0]]
        assert find([[7, 8]], [51], [1]) == [[0, 0], [0, 0], [52, 0]], "a token of it is missing"
        for _ in range(20):  # others come and go in all other entries
            find([[3, 4], [draw.randrange(10, 40), 1]], [18, 0], [1, 3])
            assert recent.state["held"][0] == 3


@compiles
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_kernels(monkeypatch, tmp_path, capability, queries):
    """Nothing goes to the stack, and what reads no recent tokens is what it was."""
    from aurakv.backends.triton.decode import launch
    from tests.helpers.compile_only import compiling, disassemble, resources

    format, seqs = Format.parse("k4v4", 128), 32
    table, lengths = torch.zeros(seqs, 130, dtype=torch.int32), torch.zeros(seqs, dtype=torch.int32)
    data = torch.empty(2, 8, format.layout(64).bytes, dtype=torch.uint8)
    pages = Pages(format, 64, data, table, lengths, lengths[:1])
    vectors = Format(*[Codec(128, 16, dtype=torch.bfloat16)] * 2)
    data = torch.empty(3, 8, vectors.layout(64).bytes, dtype=torch.uint8)
    recent = Pages(vectors, 64, data, table[:, :1].contiguous(), lengths, lengths[:1])
    q = torch.empty(seqs * queries, 32, 128, dtype=torch.bfloat16)
    rows = Rows(torch.arange(seqs + 1, dtype=torch.int32) * queries, single=queries == 1)
    loads = []
    for each in (None, recent):
        with compiling(capability) as seen:
            launch.prepare(q, pages, rows, lengths, Scoring(), None, None, None, None, each)(q)
        cubin = seen["merge_pieces"][0].asm["cubin"]
        assert resources(cubin, tmp_path)[1] == 0
        loads.append(len(re.findall(r"\bLDG\.E\.64", disassemble(cubin, tmp_path))))
    assert loads[1] - loads[0] >= 16  # eight keys and eight values at once
