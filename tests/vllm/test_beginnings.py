"""First tokens of sequences, uncompressed beside blocks: against dense attention, and what blocks go through."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import aurakv as kv
from aurakv.attention import ops
from aurakv.attention.step import Rows
from aurakv.vllm import beginnings as module
from aurakv.vllm.beginnings import Beginnings, Entries, entries_for
from aurakv.vllm.layer import Batch, Layer, Memory

FIRST, BLOCK, HEADS, DIM, SEQS = 4, 64, 2, 128, 8
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Engine:
    """Blocks, tables and one layer with beginnings, as an engine has them."""

    def __init__(self, device: str = "cpu", format: str = "k4v4", dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = torch.device(device), dtype
        parsed = kv.Format.parse(format, DIM)
        self.memory = Memory(self.device)
        self.memory.beginnings = self.beginnings = Beginnings(FIRST, SEQS, self.device)
        entries = Entries.for_pages(parsed, FIRST, entries_for(SEQS), HEADS, dtype, self.device)
        self.layer = self.beginnings.layer = Layer(parsed, kv.Scoring(), beginnings=entries)
        shape = 64, HEADS, BLOCK, parsed.bytes_per_token
        self.blocks = torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def step(self, tables: list[list[int]], lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sequences of these blocks and lengths with the new tokens; q, k, v by sequence [n, heads, dim]."""
        counts = [len(x) for x in k]
        table = torch.zeros(len(tables), max(map(len, tables)) + 1, dtype=torch.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32).to(self.device)
        rows = Rows(starts, single=set(counts) == {1})
        lens = torch.tensor(lengths, dtype=torch.int32).to(self.device)
        batch = Batch(sum(counts), rows, lens, table.to(self.device), self.memory)
        self.beginnings.find(batch.table, batch.lengths, rows, self.layer.pages(self.blocks, batch))
        x, y, z = (torch.cat(list(each)).to(self.device, self.dtype) for each in (q, k, v))
        out = torch.empty_like(x)
        self.layer.forward(x, y, z, self.blocks, batch, out)
        return out.float().cpu()

    def of(self, name: str, seqs: int) -> list[int]:
        found: list[int] = self.beginnings.state[name][:seqs].tolist()
        return found


def tokens(*counts: int, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(count, heads, DIM) for count in counts]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attend_dense(q, k, v, [0, len(q)], [0, len(k)]).out


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def prompt(engine: Engine, blocks: list[int], count: int) -> tuple[Tensor, Tensor]:
    (q,), (k,), (v,) = tokens(count, heads=4), tokens(count), tokens(count)
    engine.step([blocks], [count], [q], [k], [v])
    return k, v


def sharp(engine: Engine, blocks: list[int], k: Tensor, v: Tensor, at: int = 0) -> float:
    """How far a query that looks at one token alone is from its value: at 2 bits codes are far off."""
    q = (8 * k[at : at + 1]).repeat_interleave(2, 1)
    new = tokens(1), tokens(1)
    found = engine.step([blocks], [len(k) + 1], [q], *new)
    return error(found, v[at : at + 1].repeat_interleave(2, 1))


def test_first_tokens_are_used_as_they_are() -> None:
    torch.manual_seed(0)
    engine = Engine(format="k2v2")
    k, v = prompt(engine, [5, 9], 70)
    assert engine.of("held", 1) == [FIRST]
    assert sharp(engine, [5, 9], k, v) < 1e-3
    without = Engine(format="k2v2")
    without.layer = Layer(without.layer.format, kv.Scoring())
    assert sharp(without, [5, 9], *prompt(without, [5, 9], 70)) > 0.1


def test_sequences_that_begin_with_one_block_share_an_entry() -> None:
    """Also in the step that fills the block."""
    torch.manual_seed(1)
    engine = Engine(format="k2v2")
    (k, also), (v, other) = tokens(64, 1), tokens(64, 1)
    q = tokens(64, 1, heads=4)
    engine.step([[3], [3, 7]], [64, 65], q, [k, also], [v, other])
    assert engine.of("slots", 2) == [engine.of("slots", 1)[0]] * 2
    assert engine.of("held", 2) == [FIRST, FIRST]
    assert sharp(engine, [3, 7], torch.cat([k, also]), torch.cat([v, other])) < 1e-3


def test_a_block_that_was_filled_without_us_has_its_codes() -> None:
    """As a connector or a copy does. The entry of what was there before is not used."""
    torch.manual_seed(2)
    engine, source = Engine(format="k8v8"), Engine(format="k8v8")
    prompt(engine, [5], 60)
    k, v = prompt(source, [5], 60)
    engine.blocks[5] = source.blocks[5]  # in the next step already
    assert sharp(engine, [5], k, v) < 0.02  # 8 bits; with the first tokens of another sequence it is about 1.4


def test_blocks_that_were_discarded() -> None:
    """As sleep does: the memory of blocks comes back at the same addresses without what was in it; entries stay."""
    torch.manual_seed(6)
    engine = Engine(format="k2v2")
    prompt(engine, [5, 9], 70)
    engine.blocks.random_()
    k, v = prompt(engine, [9, 5], 70)
    assert engine.of("held", 1) == [FIRST]
    assert sharp(engine, [9, 5], k, v) < 1e-3
    k, v = prompt(engine, [5, 7], 3)
    assert sharp(engine, [5, 7], k, v) < 1e-3


def test_entries_of_sequences_that_run_are_kept() -> None:
    torch.manual_seed(3)
    engine = Engine(format="k2v2")
    held = [prompt(engine, [block], 10) for block in (1, 2)]
    for block in range(10, 10 + 2 * engine.beginnings.entries):  # many others come and go
        new = tokens(1, 1, 5), tokens(1, 1, 5)
        held = [(torch.cat([a, x]), torch.cat([b, y])) for (a, b), x, y in zip(held, *new, strict=False)]
        lengths = [len(held[0][0]), len(held[1][0]), 5]
        engine.step([[1], [2], [block % 60 + 3]], lengths, tokens(1, 1, 5, heads=4), *new)
    for block, (k, v) in zip((1, 2), held, strict=True):
        assert sharp(engine, [block], k, v) < 1e-3


def test_entries_of_sequences_that_pause_are_kept() -> None:
    """A sequence that runs need not be in every step: stages of a pipeline take turns."""
    torch.manual_seed(8)
    engine = Engine(format="k2v2")
    k, v = prompt(engine, [1], 10)
    for block in range(2, 2 + 3 * engine.beginnings.entries):
        prompt(engine, [block % 60 + 2], 5)
        if block % 3 == 0:
            new = tokens(1), tokens(1)
            k, v = torch.cat([k, new[0][0]]), torch.cat([v, new[1][0]])
            engine.step([[1]], [len(k)], tokens(1, heads=4), *new)
    assert sharp(engine, [1], k, v) < 1e-3


def test_a_lost_entry_costs_accuracy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    monkeypatch.setattr(module, "SPARE", 0)
    engine = Engine(format="k8v8")
    k, v = prompt(engine, [1], 10)
    for block in range(2, 2 + engine.beginnings.entries):
        prompt(engine, [block], 10)
    assert sharp(engine, [1], k, v) < 0.02


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_shorter_than_their_first_tokens(length: int) -> None:
    torch.manual_seed(5)
    engine = Engine(format="k2v2")
    k, v = prompt(engine, [8], length)
    for _ in range(4):
        new = tokens(1), tokens(1)
        q = tokens(1, heads=4)
        k, v = torch.cat([k, new[0][0]]), torch.cat([v, new[1][0]])
        out = engine.step([[8]], [len(k)], q, *new)
        if len(k) <= FIRST:
            assert error(out, attended(q[0], k, v)) < 1e-5  # nothing is coded
    assert engine.of("held", 1) == [FIRST]


@pytest.mark.parametrize("prompted", [1, 2, 3])
def test_drafts_that_were_rejected_are_no_first_tokens(prompted: int) -> None:
    """Those of a sequence that is shorter than its first tokens are written again, and the block's codes with them."""
    torch.manual_seed(7)
    check_drafts(Engine(format="k2v2"), prompted)


def check_drafts(engine: Engine, prompted: int, most: float = 1e-5) -> None:
    k, v = prompt(engine, [8], prompted)
    for _ in range(5):
        drafts = tokens(4), tokens(4), tokens(4, heads=4)
        out = engine.step([[8]], [len(k) + 4], drafts[2], drafts[0], drafts[1])
        k, v = torch.cat([k, drafts[0][0][:1]]), torch.cat([v, drafts[1][0][:1]])  # three are rejected
        if len(k) <= FIRST and not engine.beginnings.on_gpu:  # where kernels for many rows take the codes
            assert error(out[:1], attended(drafts[2][0][:1], k, v)) < most
        assert engine.of("before", 1) == [min(len(k) - 1, FIRST)]
        assert engine.of("held", 1) == [min(len(k) + 3, FIRST)]
    for at in range(FIRST):  # each step writes another token at the same place
        assert sharp(engine, [8], k, v, at) < max(most, 1e-3)


def lives(engine: Engine, seed: int, steps: int = 30) -> tuple[list[Any], list[float]]:
    """Sequences that come, grow and go; what `find` found, and errors against dense attention."""
    torch.manual_seed(seed)
    draw, free = random.Random(seed), list(range(1, 64))
    running: list[dict[str, Any]] = []
    found, errors = [], []
    for number in range(steps):
        for each in [each for each in running if draw.random() < 0.15]:
            free += each["blocks"]
            running.remove(each)
        while len(running) < draw.randint(1, 6):
            running.append({"blocks": [], "k": torch.zeros(0, HEADS, DIM), "v": torch.zeros(0, HEADS, DIM)})
        single = number % 3 != 0 and all(len(each["k"]) for each in running)
        counts = [1 if single else draw.choice([1, 2, 3, 5, 40]) for _ in running]
        q, k, v = tokens(*counts, heads=4), tokens(*counts), tokens(*counts)
        for each, keys, values in zip(running, k, v, strict=True):
            each["k"], each["v"] = torch.cat([each["k"], keys]), torch.cat([each["v"], values])
            while len(each["blocks"]) * BLOCK < len(each["k"]):
                each["blocks"].append(free.pop(draw.randrange(len(free))))
        lengths = [len(each["k"]) for each in running]
        out = engine.step([each["blocks"] for each in running], lengths, q, k, v)
        found.append([engine.of(name, len(running)) for name in ("slots", "before")])
        for each, queries, mine in zip(running, q, out.split(counts), strict=True):
            errors.append(error(mine, attended(queries, each["k"], each["v"])))
    return found, errors


@pytest.mark.parametrize("seed", range(3))
def test_any_batches(seed: int) -> None:
    _, errors = lives(Engine(format="k8v8"), seed)
    assert max(errors) < 0.02


@GPU
@pytest.mark.parametrize("seed", range(3))
def test_on_a_gpu_it_is_the_same(seed: int) -> None:
    here, _ = lives(Engine(format="k8v8"), seed)
    there, errors = lives(Engine("cuda", "k8v8", torch.bfloat16), seed)
    assert there == here
    assert max(errors) < 0.02
