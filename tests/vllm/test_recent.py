"""Recent tokens of sequences, uncompressed beside blocks: against softmax in float64, and what blocks go through."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import aurakv as kv
from aurakv.attention.step import Rows
from aurakv.calibration.policy import LayerPolicy
from aurakv.vllm import recent as module
from aurakv.vllm.beginnings import Beginnings, Entries, entries_for
from aurakv.vllm.layer import Batch, Layer, Memory
from aurakv.vllm.prefill import Prefill, find_prompts, most_rows
from aurakv.vllm.recent import SPARE, Recent, group_size
from aurakv.vllm.recent_gpu import RecentOnGpu
from tests.vllm.test_prefill import TorchFlash

HEADS, GROUPED, DIM, SEQS, FIRST = 2, 2, 64, 6, 4
CPU = torch.device("cpu")
SCORINGS = {"plain": kv.Scoring(), "window": kv.Scoring(window=50), "softcap": kv.Scoring(softcap=3.0)}


class Engine:
    """Blocks and tables as an engine has them, and what each query should see."""

    def __init__(
        self,
        scoring: kv.Scoring,
        format: str = "k2v2",
        *,
        group: int = 16,
        block: int = 32,
        first: int = FIRST,
        policy: LayerPolicy | None = None,
        sink_logits: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        on_gpu: bool = False,
        device: torch.device = CPU,
        room: int = 0,
        unknown: int = 0,
        rows: int = 1,
    ) -> None:
        """room: tokens of scratch memory, where prompts attend by flash attention; unknown: by how many tokens the host
        takes sequences for longer; rows: of a sequence that decodes."""
        self.device, self.unknown = device, unknown
        self.rows, self.prompt = rows, 1 + most_rows(GROUPED, DIM, rows)  # rows that make one
        parsed = kv.Format.parse(format, DIM)
        self.block, self.group, self.first, self.dtype, self.scoring = block, group, first, dtype, scoring
        self.sink_logits = sink_logits
        self.memory, beginnings = Memory(device), None
        if first:
            self.memory.beginnings = Beginnings(first, SEQS, device)
            beginnings = Entries.for_pages(parsed, first, entries_for(SEQS), HEADS, dtype, device)
        self.memory.recent = RecentOnGpu(group, SEQS, device) if on_gpu else Recent(group, SEQS)
        count = entries_for(SEQS, SPARE)
        scratch = [torch.full((room * HEADS * DIM,), torch.nan, dtype=dtype, device=device) for _ in range(2)]
        self.flash = TorchFlash(scoring, sink_logits)
        self.layer = Layer(
            parsed,
            scoring,
            sink_logits=sink_logits,
            policy=policy,
            beginnings=beginnings,
            recent=Entries.for_pages(parsed, group, count, HEADS, dtype, device),
            prefill=Prefill(self.flash, lambda: (scratch[0], scratch[1])) if room else None,
        )
        for each in (self.memory.beginnings, self.memory.recent):
            if each is not None:
                each.layer = self.layer
        shape = 82, HEADS, block, parsed.bytes_per_token
        self.blocks = torch.zeros(shape, dtype=torch.uint8, device=device)

    def step(
        self, tables: list[list[int]], lengths: list[int], q: list[Tensor], k: list[Tensor], v: list[Tensor]
    ) -> Any:
        counts = [len(x) for x in k]
        table = torch.zeros(len(tables), max(map(len, tables)) + 1, dtype=torch.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=self.device)
        rows, table = Rows(starts, single=set(counts) == {1}), table.to(self.device)
        lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        known = [length + self.unknown for length in lengths]
        on_gpu = isinstance(self.memory.recent, RecentOnGpu)
        prompts = find_prompts(starts.tolist(), known, self.prompt) if on_gpu else None
        batch = Batch(sum(counts), rows, lens, table, self.memory, prompts)
        pages = self.layer.pages(self.blocks, batch)
        if self.memory.beginnings is not None:
            self.memory.beginnings.find(table, batch.lengths, rows, pages)
        assert self.memory.recent is not None
        batch.cut = self.memory.recent.find(table, batch.lengths, rows, pages)
        x, y, z = (torch.cat(list(each)).to(self.device, self.dtype) for each in (q, k, v))
        out = torch.empty_like(x)
        self.layer.forward(x, y, z, self.blocks, batch, out)
        assert batch.lengths.tolist() == lengths
        return out.cpu().split(counts)

    def wanted(
        self, blocks: list[int], q: Tensor, k: Tensor, v: Tensor, first: bool = True, recent: bool = True
    ) -> Tensor:
        """Of queries at the last positions: first tokens and those of their group as they came, others, and these
        without `first` and `recent`, as they are stored."""
        format, policy = self.layer.format, self.layer.policy
        rows = Rows(torch.zeros(2, dtype=torch.int32, device=self.device))
        numbers = (torch.tensor(each, dtype=torch.int32, device=self.device) for each in ([len(k)], [blocks]))
        pages = self.layer.pages(self.blocks, Batch(0, rows, *numbers, self.memory))
        keys, values = pages.stored(0, torch.arange(len(k), device=self.device))
        at = torch.arange(len(k))
        coded = kv.decode(keys, format.key, pages.key_offset, dtype=torch.float64).cpu()
        if policy.key_scale is not None:
            coded = coded / policy.key_scale
        coded_v = kv.decode(values, format.value, pages.value_offset, dtype=torch.float64).cpu()
        out = []
        for i, query in enumerate(q.double()):
            p = len(k) - len(q) + i
            near = (at < self.first * first) | (at >= (p // self.group * self.group if recent else len(k)))
            near = near[:, None, None]
            mine, theirs = torch.where(near, k.double(), coded), torch.where(near, v.double(), coded_v)
            scores = torch.einsum("hgd,thd->hgt", query.view(HEADS, GROUPED, DIM), mine) * DIM**-0.5
            if self.scoring.softcap is not None:
                scores = self.scoring.softcap * torch.tanh(scores / self.scoring.softcap)
            seen = at <= p if self.scoring.window is None else (at <= p) & (at > p - self.scoring.window)
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sink_logits is not None:
                scores = torch.cat([scores, self.sink_logits.double().view(HEADS, GROUPED, 1)], -1)
            weights = scores.softmax(-1)[..., : len(k)]
            out.append(torch.einsum("hgt,thd->hgd", weights, theirs).flatten(0, 1))
        return torch.stack(out)


def tokens(*counts: int, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(count, heads, DIM) for count in counts]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def one(engine: Engine, blocks: list[int], k: Tensor, v: Tensor, count: int = 1) -> tuple[float, Tensor, Tensor]:
    """Some more tokens of one sequence: the error, and all its keys and values."""
    (q,), (a,), (b,) = tokens(count, heads=HEADS * GROUPED), tokens(count), tokens(count)
    k, v = torch.cat([k, a]), torch.cat([v, b])
    (out,) = engine.step([blocks], [len(k)], [q], [a], [b])
    return error(out, engine.wanted(blocks, q, k, v)), k, v


NOTHING = torch.zeros(0, HEADS, DIM)


def lives(engine: Engine, seed: int, steps: int = 25) -> float:
    """Sequences that come, grow and go, with drafts of which some are rejected: the largest error."""
    torch.manual_seed(seed)
    draw, free = random.Random(seed), list(range(1, 80))
    running: list[dict[str, Any]] = []
    worst = 0.0
    for _ in range(steps):
        for each in [each for each in running if draw.random() < 0.1]:
            free += each["blocks"]
            running.remove(each)
        while len(running) < draw.randint(1, SEQS):
            running.append({"blocks": [], "k": NOTHING, "v": NOTHING})
        counts = [draw.choice([1, 1, 1, 2, 5, 16, 70]) for _ in running]
        q, k, v = tokens(*counts, heads=HEADS * GROUPED), tokens(*counts), tokens(*counts)
        for each, keys, values in zip(running, k, v, strict=True):
            each["k"], each["v"] = torch.cat([each["k"], keys]), torch.cat([each["v"], values])
            while len(each["blocks"]) * engine.block < len(each["k"]):
                each["blocks"].append(free.pop(draw.randrange(len(free))))
        out = engine.step([each["blocks"] for each in running], [len(each["k"]) for each in running], q, k, v)
        for each, queries, mine, count in zip(running, q, out, counts, strict=True):
            worst = max(worst, error(mine, engine.wanted(each["blocks"], queries, each["k"], each["v"])))
            rejected = draw.choice([0, 0, 1, 3])  # they stay in their block until others are written there
            if rejected < count and len(each["k"]) % engine.group >= rejected:
                each["k"], each["v"] = each["k"][: len(each["k"]) - rejected], each["v"][: len(each["v"]) - rejected]
                while (len(each["blocks"]) - 1) * engine.block >= len(each["k"]):
                    free.append(each["blocks"].pop())
    return worst


def in_one_group(engine: Engine, end: int, rows: int) -> bool:
    """Else a GPU's decode reads the codes of all of them."""
    return (end - rows) // engine.group == (end - 1) // engine.group


def decodes(engine: Engine, seed: int, steps: int = 12) -> float:
    """As on a GPU without flash attention: prompts, which read codes, drafts, and steps of one token a sequence. The
    largest error."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tables = [[1 + 26 * i + j for j in range(26)] for i in range(3)]
    k, v, worst = [NOTHING] * 3, [NOTHING] * 3, 0.0
    for number in range(steps):
        counts = [draw.randint(engine.prompt, 60) for _ in k]
        if number:
            counts = [1, 4, 1] if number % 5 == 4 else [1, 1, 1]
        q, new_k, new_v = tokens(*counts, heads=HEADS * GROUPED), tokens(*counts), tokens(*counts)
        k = [torch.cat(pair) for pair in zip(k, new_k, strict=True)]
        v = [torch.cat(pair) for pair in zip(v, new_v, strict=True)]
        assert max(map(len, k)) <= 26 * engine.block
        out = engine.step(tables, [len(x) for x in k], q, new_k, new_v)
        for i in range(3):
            recent = number > 0 and in_one_group(engine, len(k[i]), counts[i])
            wanted = engine.wanted(tables[i], q[i], k[i], v[i], first=number > 0, recent=recent)
            worst = max(worst, error(out[i], wanted))
    return worst


def serves(engine: Engine, seed: int, steps: int = 10) -> float:
    """As on a GPU: prompts that are cut anywhere behind drafts and single tokens. The largest error. Without flash
    attention prompts read codes."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tables = [[1 + 13 * i + j for j in range(13)] for i in range(SEQS)]
    k, v, worst = [NOTHING] * SEQS, [NOTHING] * SEQS, 0.0
    for _ in range(steps):
        chosen = draw.sample(range(SEQS), SEQS)
        kinds = [1, 1, 1, 2, 4, 33, 34, 60] if engine.rows == 1 else [33, engine.rows, engine.rows, 60]
        counts = sorted(draw.choice(kinds) for _ in chosen)
        q, new_k, new_v = tokens(*counts, heads=HEADS * GROUPED), tokens(*counts), tokens(*counts)
        for i, keys, values in zip(chosen, new_k, new_v, strict=True):
            k[i], v[i] = torch.cat([k[i], keys]), torch.cat([v[i], values])
        lengths = [len(k[i]) for i in chosen]
        assert max(lengths) <= 13 * engine.block
        out = engine.step([tables[i] for i in chosen], lengths, q, new_k, new_v)
        for i, n, queries, mine in zip(chosen, counts, q, out, strict=True):
            end = len(k[i])
            flash, prompt = engine.layer.prefill is not None, n >= engine.prompt
            recent = flash if prompt else in_one_group(engine, end, n)
            wanted = engine.wanted(tables[i], queries, k[i], v[i], first=flash or not prompt, recent=recent)
            worst = max(worst, error(mine, wanted))
            rejected = draw.choice([0, 1, 2])
            if rejected < n < engine.prompt and end % engine.group >= rejected:
                k[i], v[i] = k[i][: end - rejected], v[i][: end - rejected]
    return worst


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(3))
def test_any_batches(scoring: str, seed: int) -> None:
    """At 2 bits a token that is read from its codes, and should not be, is an error of a tenth and more."""
    assert lives(Engine(SCORINGS[scoring], first=0 if scoring != "plain" else FIRST), seed) < 4e-3


@pytest.mark.parametrize(("group", "block"), [(64, 64), (64, 128), (64, 16), (32, 48)])
def test_groups_and_blocks(group: int, block: int) -> None:
    """Blocks hold whole groups: smaller ones where a block holds no whole number of those that were asked for."""
    engine = Engine(kv.Scoring(), group=group, block=block)
    engine.group = {(64, 16): 16, (32, 48): 16}.get((group, block), group)
    assert lives(engine, 5) < 4e-3


def test_with_offsets_scales_and_sinks() -> None:
    torch.manual_seed(8)
    policy = LayerPolicy(
        "k2v2", key_offset=torch.randn(HEADS, DIM), key_scale=torch.rand(HEADS, DIM) + 0.5,
        key_weight=torch.rand(HEADS, DIM) + 0.1,
    )  # fmt: skip
    sinks = torch.randn(HEADS * GROUPED)
    assert lives(Engine(kv.Scoring(), policy=policy, sink_logits=sinks), 9) < 4e-3


def test_models_in_bfloat16() -> None:
    torch.manual_seed(12)
    assert lives(Engine(kv.Scoring(), dtype=torch.bfloat16), 12) < 3e-2  # the rounding of q, k, v and the output


def test_results_do_not_depend_on_where_a_prompt_is_cut() -> None:
    torch.manual_seed(1)
    (q,), (k,), (v,) = tokens(150, heads=HEADS * GROUPED), tokens(150), tokens(150)
    blocks = [7, 3, 9, 4, 8]
    found = []
    for cuts in ([150], [1, 40, 9, 100], [16] * 9 + [6]):
        engine, out, at = Engine(kv.Scoring()), [], 0
        for count in cuts:
            rows = slice(at, at := at + count)
            out += engine.step([blocks], [at], [q[rows]], [k[rows]], [v[rows]])
        found.append(torch.cat(out))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=0)


def test_a_lost_entry_is_decoded_from_its_block() -> None:
    """It costs accuracy, and nothing else."""
    torch.manual_seed(2)
    engine = Engine(kv.Scoring(), "k8v8")
    _, k, v = one(engine, [5], NOTHING, NOTHING, 10)
    engine.memory.recent = Recent(engine.group, SEQS)  # nothing is known any more
    engine.memory.recent.layer = engine.layer
    lost, k, v = one(engine, [5], k, v)
    assert 1e-3 < lost < 2e-2
    assert engine.memory.recent.entries[0].filled == 11


def test_a_block_that_was_filled_without_us_has_its_codes() -> None:
    """As a connector or a copy does: what lies in the entry is of the tokens that were there before."""
    torch.manual_seed(3)
    engine, source = Engine(kv.Scoring(), "k8v8"), Engine(kv.Scoring(), "k8v8")
    one(engine, [5], NOTHING, NOTHING, 10)
    _, k, v = one(source, [5], NOTHING, NOTHING, 10)
    engine.blocks[5] = source.blocks[5]
    found, _, _ = one(engine, [5], k, v)
    assert found < 2e-2  # with the tokens of the other sequence it is about 1


def test_sequences_that_run_keep_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others come and go in all entries that are left."""
    torch.manual_seed(4)
    monkeypatch.setattr(module, "SPARE", 0)
    engine = Engine(kv.Scoring())
    worst, k, v = one(engine, [1, 2, 3], NOTHING, NOTHING, 3)
    for other in range(10, 70):
        found, k, v = one(engine, [1, 2, 3], k, v)
        worst = max(worst, found)
        one(engine, [other], NOTHING, NOTHING, 5)
    assert worst < 4e-3


def test_all_sequences_begin_a_group_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many entries as sequences, each reads its old group and takes another entry."""
    torch.manual_seed(6)
    monkeypatch.setattr(module, "SPARE", 0)
    engine = Engine(kv.Scoring(), block=16)
    tables = [[1 + 4 * i + j for j in range(4)] for i in range(SEQS)]
    k, v = [NOTHING] * SEQS, [NOTHING] * SEQS
    for count in (14, 4, 1, 13, 2, 1):
        counts = [count] * SEQS
        q, new_k, new_v = tokens(*counts, heads=HEADS * GROUPED), tokens(*counts), tokens(*counts)
        k = [torch.cat(pair) for pair in zip(k, new_k, strict=True)]
        v = [torch.cat(pair) for pair in zip(v, new_v, strict=True)]
        assert max(map(len, k)) <= 26 * engine.block
        out = engine.step(tables, [len(x) for x in k], q, new_k, new_v)
        for i in range(SEQS):
            assert error(out[i], engine.wanted(tables[i], q[i], k[i], v[i])) < 4e-3


def test_rejected_drafts_come_back_to_their_group() -> None:
    """Also where the group was full with them."""
    torch.manual_seed(7)
    engine = Engine(kv.Scoring())
    for other in range(10, 30):  # have come and gone: every entry was used once
        one(engine, [other], NOTHING, NOTHING, 3)
    _, k, v = one(engine, [1, 2, 3], NOTHING, NOTHING, 30)
    for _ in range(12):
        found, more_k, more_v = one(engine, [1, 2, 3], k, v, 4)
        assert found < 4e-3
        k, v = more_k[: len(k) + 1], more_v[: len(v) + 1]


def test_a_sequence_that_pads_the_batch() -> None:
    """Beside one whose rows are in two groups."""
    torch.manual_seed(8)
    engine = Engine(kv.Scoring(), "k8v8")
    _, k, v = one(engine, [1, 2, 3], NOTHING, NOTHING, 12)
    none = torch.zeros(0, HEADS, DIM)
    (q,), (new_k,), (new_v,) = tokens(8, heads=HEADS * GROUPED), tokens(8), tokens(8)
    padded = [q, none.repeat(1, GROUPED, 1)], [new_k, none], [new_v, none]
    (out, _) = engine.step([[1, 2, 3], [0]], [20, 0], *padded)
    assert error(out, engine.wanted([1, 2, 3], q, torch.cat([k, new_k]), torch.cat([v, new_v]))) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("group", "block"), [(64, 64), (64, 16), (32, 128)])
def test_on_a_gpu(group: int, block: int) -> None:
    engine = Engine(
        kv.Scoring(), dtype=torch.bfloat16, group=group, block=block, on_gpu=True, device=torch.device("cuda")
    )
    engine.group = min(group, block)
    assert decodes(engine, 3, steps=100) < 0.03


PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {"group": 16, "block": 32, "room": 2048},
    "whole-blocks": {"group": 64, "block": 64, "room": 2048, "unknown": 4},
    "little-room": {"group": 16, "block": 32, "room": 110, "first": 0, "unknown": 3},
    "calibrated": {"group": 32, "block": 64, "room": 600, "changed": True},
    "sinks": {"group": 16, "block": 16, "room": 2048, "changed": True, "sinks": True},
    "without-flash": {"group": 32, "block": 64, "changed": True},
    "many-drafts": {"group": 64, "block": 64, "room": 2048, "rows": 40},
}


def prompts_beside(kind: str, seed: int, steps: int = 8, device: torch.device = CPU) -> float:
    options = dict(PROMPTS[kind])
    torch.manual_seed(seed)
    if options.pop("changed", False):
        offsets = torch.randn(2, HEADS, DIM)
        options["policy"] = LayerPolicy(
            "k2v2", key_offset=offsets[0], value_offset=offsets[1], key_scale=torch.rand(HEADS, DIM) + 0.5
        )
    if options.pop("sinks", False):
        options["sink_logits"] = torch.randn(HEADS * GROUPED).to(device)
    engine = Engine(kv.Scoring(), dtype=torch.bfloat16, on_gpu=True, device=device, **options)
    worst = serves(engine, seed, steps)
    assert (engine.flash.calls > 0) == ("room" in options)
    return worst


def lost_before_a_prompt(device: torch.device = CPU) -> float:
    """The group that a prompt was cut in is read from its codes where its entry is unknown."""
    torch.manual_seed(5)
    engine = Engine(kv.Scoring(), "k8v8", dtype=torch.bfloat16, on_gpu=True, device=device, room=512)
    k, v, found = NOTHING, NOTHING, 0.0
    for count in (40, 34, 60):  # up to the middle of a group, into another one, into the next block
        error, k, v = one(engine, [1, 2, 3, 4, 5], k, v, count)
        found = max(found, error)
        assert isinstance(engine.memory.recent, RecentOnGpu)
        engine.memory.recent.state["entry_of"].fill_(-1)
    return found


def damage_spreads(room: int, side: int, at: int, rows: int) -> list[bool]:
    """Which of so many rows of a sequence, behind others, are not finite where a key or a value is not; all of a
    vector is, or nothing. In the group that the rows begin in, or as a first token."""
    torch.manual_seed(9)
    engine = Engine(kv.Scoring(), "k8v8", dtype=torch.bfloat16, on_gpu=True, room=room)
    (q,), new = tokens(rows, heads=HEADS * GROUPED), [tokens(rows)[0] for _ in range(2)]
    new[side][at, :, 5] = torch.nan if side else torch.inf
    out = engine.step([[1, 2, 3]], [rows], [q], [new[0]], [new[1]])[0]
    finite = out.isfinite()
    assert torch.equal(finite.all(2), finite.any(2))
    return (~finite.all(2)).any(1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_on_a_gpu(kind: str) -> None:
    assert prompts_beside(kind, 3, device=torch.device("cuda")) < 0.01
    assert lost_before_a_prompt(torch.device("cuda")) < 0.02


@pytest.mark.parametrize(("recent", "group"), [(0, 0), (1, 16), (4, 16), (8, 32), (16, 64), (100, 64)])
def test_how_many_tokens_a_group_has(recent: int, group: int) -> None:
    assert group_size(recent) == group
