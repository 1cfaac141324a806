"""Prompts that attend by an engine's flash attention; plain torch stands in for it, so that vLLM is not needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aurakv as kv
from aurakv.attention import ops
from aurakv.attention.step import Copies, Rows
from aurakv.calibration.key_scale import scaled_keys
from aurakv.calibration.policy import LayerPolicy
from aurakv.storage.pages import Pages
from aurakv.vllm.layer import Batch, Layer, Memory
from aurakv.vllm.prefill import Prefill, Prompts, find_prompts, most_rows, why_not

HEADS, KV_HEADS, BLOCK, WIDTH = 4, 2, 32, 8
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class TorchFlash:
    """What `prefill.Flash` says, in float32, a sequence at a time."""

    def __init__(self, scoring: kv.Scoring, sink_logits: Tensor | None) -> None:
        self.scoring, self.sink_logits, self.calls = scoring, sink_logits, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, key_starts: Tensor, most: tuple[int, int],
        *, causal: bool, sinks: bool,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
        group = q.shape[1] // k.shape[1]
        for i in range(starts.shape[0] - 1):
            rows, keys = slice(*starts[i : i + 2].tolist()), slice(*key_starts[i : i + 2].tolist())
            assert rows.stop - rows.start <= most[0]
            assert keys.stop - keys.start <= most[1]
            x, y, z = q[rows].float(), *(x[keys].float().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", x, y) * self.scoring.multiplier(q.shape[2])
            scores = self.scoring.cap(scores)
            at_key = torch.arange(y.shape[0], device=q.device)
            at_query = torch.arange(x.shape[0], device=q.device)[:, None] + y.shape[0] - x.shape[0]
            if causal:
                scores = scores.masked_fill(~self.scoring.visible(at_query, at_key), -torch.inf)
            total = scores.logsumexp(2)
            if sinks and self.sink_logits is not None:
                total = torch.logaddexp(total, self.sink_logits.float()[:, None])
            out[rows] = torch.einsum("hqk,khd->qhd", (scores - total[:, :, None]).exp(), z).to(out.dtype)
            lse[:, rows] = total
        return lse

    def over_pages(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, lengths: Tensor, table: Tensor,
        most: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        rows = [x[table.long()].flatten(1, 2) for x in (k, v)]
        keys, values = (torch.cat([x[:n] for x, n in zip(each, lengths.tolist(), strict=True)]) for each in rows)
        key_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return self(q, keys, values, out, starts, key_starts, most, causal=False, sinks=False)

    def merge(self, out: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        part = kv.merge(*(kv.Partial(x.float(), lse.T.contiguous()) for x, lse in (a, b)))
        out.copy_(part.out)
        return part.lse.T.contiguous()


class Engine:
    """Sequences of random tokens whose blocks lie anywhere; `run` appends and attends as an engine's batch."""

    def __init__(
        self,
        name: str,
        dim: int,
        scoring: kv.Scoring,
        device: str,
        *,
        changed: bool = False,
        sinks: bool = False,
        room: int = 1 << 10,
    ) -> None:
        torch.manual_seed(3)
        self.device, self.dtype = device, torch.bfloat16
        self.format = kv.Format.parse(name, dim)
        sides = self.format.key, self.format.value
        offsets = [torch.randn(KV_HEADS, dim) if changed and side.coded else None for side in sides]
        scale = torch.rand(KV_HEADS, dim) + 0.5 if changed else None
        policy = LayerPolicy(name, key_offset=offsets[0], value_offset=offsets[1], key_scale=scale)
        logits = torch.randn(HEADS, device=device) if sinks else None
        self.flash = TorchFlash(scoring, logits)
        made = [torch.full((room * KV_HEADS * dim,), torch.nan, dtype=self.dtype, device=device) for _ in range(2)]
        prefill = Prefill(self.flash, lambda: (made[0], made[1]))
        assert why_not(self.format, scoring, self.dtype) is None
        self.layer = Layer(self.format, scoring, sink_logits=logits, policy=policy, prefill=prefill)
        self.tokens = [
            tuple(
                torch.randn(WIDTH * BLOCK, heads, dim, dtype=self.dtype).to(device)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            for _ in range(4)
        ]

    def run(self, batches: list[dict[int, int]], *, least: int) -> list[Tensor]:
        """What each sequence's queries got, after batches of so many rows for some sequences."""
        torch.manual_seed(4)
        blocks = 4 * WIDTH + 1
        shape = blocks, KV_HEADS, BLOCK, self.format.bytes_per_token
        self.memory = torch.randint(256, shape, dtype=torch.uint8, device=self.device)
        table = (torch.randperm(blocks - 1) + 1).int().view(4, WIDTH).to(self.device)
        owned, done = Memory(torch.device(self.device)), [0] * 4
        found: list[list[Tensor]] = [[] for _ in range(4)]
        for batch in batches:
            order = list(batch)
            parts = [[x[done[seq] : done[seq] + batch[seq]] for x in self.tokens[seq]] for seq in order]
            for seq in order:
                done[seq] += batch[seq]
            q, k, v = (torch.cat([part[i] for part in parts]) for i in range(3))
            starts = [0, *torch.tensor([batch[seq] for seq in order]).cumsum(0).tolist()]
            lengths = [done[seq] for seq in order]
            prompts = find_prompts(starts, lengths, least)
            make = {"dtype": torch.int32, "device": self.device}
            given = Batch(
                starts[-1],
                Rows(torch.tensor(starts, **make)),
                torch.tensor(lengths, **make),
                table[torch.tensor(order, device=self.device)].contiguous(),
                owned,
                prompts,
            )
            out = torch.zeros_like(q)
            self.layer.forward(q, k, v, self.memory, given, out)
            for seq, part in zip(order, out.split([batch[seq] for seq in order]), strict=True):
                found[seq].append(part)
        assert not bool(owned.overflow)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in found]


NEVER = 1 << 30
BATCHES = [{0: 3, 1: 70}, {1: 1, 0: 2, 2: 90, 3: 75}, {0: 1, 3: 1, 2: 80, 1: 100}]
CASES = {  # format, dim, scoring, changed, sinks, room
    "plain": ("k4v4", 64, kv.Scoring(), False, False, 1024),
    "changed": ("k4v4", 64, kv.Scoring(), True, False, 1024),
    "pieces": ("k8v4", 128, kv.Scoring(), True, True, 120),
    "window": ("k4v4", 64, kv.Scoring(window=40), True, False, 256),
    "window-too-large": ("k4v4", 64, kv.Scoring(window=150), False, False, 60),
    "cap": ("k8v5", 96, kv.Scoring(scale=0.3, softcap=5.0), True, False, 1024),
    "sinks": ("k16v4", 80, kv.Scoring(), True, True, 200),
    "raw": ("k16v16", 128, kv.Scoring(), False, False, 1024),
}


def check(case: str, device: str) -> None:
    """The same as without the way of prompts, and as prompts that are cut elsewhere."""
    name, dim, scoring, changed, sinks, room = CASES[case]
    engine = Engine(name, dim, scoring, device, changed=changed, sinks=sinks, room=room)
    expected = engine.run(BATCHES, least=NEVER)
    assert engine.flash.calls == 0
    memory = engine.memory
    outs = engine.run(BATCHES, least=60)
    assert (engine.flash.calls > 0) == (case != "window-too-large")
    assert torch.equal(engine.memory, memory)
    cut = engine.run([{1: 70, 2: 100}, {2: 70, 1: 101}, {0: 6, 3: 76}], least=60)
    for seq in range(4):
        scale = expected[seq].float().norm()
        assert (outs[seq].float() - expected[seq].float()).norm() <= 1e-2 * scale, (case, seq)
        assert (outs[seq].float() - cut[seq].float()).norm() <= 1e-2 * scale, (case, seq)


def decode_all(
    pages: Pages, first: int, begins: Tensor, starts: Tensor, tiles: int, keys: Tensor, values: Tensor,
    key_scale: Tensor | None, offset: bool,
) -> None:  # fmt: skip
    """What `unpack` does, by `decode`."""
    assert sum(-(-n // 64) for n in starts.diff().tolist()) <= tiles
    for i, begin in enumerate(begins.tolist()):
        rows = slice(*starts[i : i + 2].tolist())
        k, v = pages.stored(first + i, begin + torch.arange(rows.stop - rows.start))
        k_hat = ops.decode(k, pages.format.key, pages.key_offset if offset else None)
        keys[rows] = (k_hat if key_scale is None else k_hat / key_scale).to(keys.dtype)
        values[rows] = ops.decode(v, pages.format.value, pages.value_offset).to(values.dtype)


def append_later(
    pages: Pages, k: Tensor, v: Tensor, rows: Rows, key_scale: Tensor | None, counted: bool, *copies: Copies | None
) -> Callable[..., None]:
    def append(k: Tensor, v: Tensor) -> None:
        assert counted
        assert copies == (None, None)
        pages.lengths.sub_(rows.starts.diff())
        ops.append(pages, scaled_keys(k, key_scale), v, rows.starts.tolist())

    return append


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_on_a_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other kernels: which sequences and tokens go which way."""
    monkeypatch.setattr("aurakv.backends.triton.unpack.launch.unpack", decode_all)
    monkeypatch.setattr("aurakv.backends.triton.append.launch.prepare_append", append_later)
    check(case, "cpu")


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, device: str) -> None:
    check(case, device)


def test_prompts_are_the_end_of_a_batch() -> None:
    assert find_prompts([0, 1, 2], [9, 9], 17) is None
    found = find_prompts([0, 1, 40, 43, 80], [90, 39, 3, 37], 17)  # with a short one among them
    assert found == Prompts(1, 1, [39, 3, 37], [39, 3, 37], singles=True)
    found = find_prompts([0, 1, 3, 20, 60], [9, 9, 17, 300], 17)
    assert found == Prompts(2, 3, [17, 40], [17, 300], singles=False)
    assert find_prompts([0, 1, 2, 60], [9, 9, 70], 17) == Prompts(2, 2, [58], [70], singles=True)
    found = find_prompts([0, 20, 60], [20, 60], 17)
    assert found is not None
    assert (found.first, found.row, found.singles) == (0, 0, True)


def test_rows_that_graphs_capture_are_no_prompts() -> None:
    assert [most_rows(group, 128, 1) for group in (1, 4, 8, 128)] == [64, 16, 8, 1]
    assert [most_rows(8, dim, 1) for dim in (64, 256)] == [8, 4]
    assert most_rows(8, 128, 13) == 13


@needs_triton
def test_sequences_that_pad_a_batch_of_prompts() -> None:
    """One that needs several pieces, and one without rows behind it."""
    starts, lengths = torch.tensor([0, 40, 40], dtype=torch.int32), torch.tensor([150, 0], dtype=torch.int32)
    found = find_prompts([0, 40, 40], [150, 0], 17)
    assert found is not None
    runs = found.plan(None, 100, starts, lengths)
    assert runs is not None
    assert [(run.first, run.rows) for run in runs] == [(0, slice(0, 40))]


@needs_triton
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("more", [0, 4, 60])
def test_every_key_is_read_once(window: int | None, more: int) -> None:
    """Runs and pieces together: what each row's sequence needs, within the room. The host may think that sequences
    are longer."""
    counts, lengths, room = [20, 150, 130, 30, 30], [20, 900, 140, 1030, 30], 200
    starts = torch.tensor([0, 1, *counts]).cumsum(0).int()
    prompts = Prompts(1, 1, counts, [length + more for length in lengths], singles=True)
    on_device = torch.tensor([7, *lengths], dtype=torch.int32)
    runs = prompts.plan(window, room, starts, on_device)
    assert runs is not None
    assert prompts.plan(window, room, starts, on_device) is runs
    seq, row = 1, 1
    for run in runs:
        seqs = run.starts.shape[0] - 1
        assert (run.first, run.rows.start) == (seq, row)
        assert run.starts.diff().tolist() == counts[seq - 1 : seq - 1 + seqs]
        for i in range(seqs):
            length, count = lengths[seq - 1 + i], counts[seq - 1 + i]
            read = [
                (int(piece.begins[i]), int(piece.begins[i] + piece.key_starts.diff()[i]), piece.causal)
                for piece in run.pieces
                if int(piece.key_starts.diff()[i])
            ]
            first = 0 if window is None else max(0, length - count - window + 1)
            assert sorted(read)[0][0] == first
            assert sorted(read)[-1][1] == length
            assert all(a[1] == b[0] for a, b in zip(sorted(read), sorted(read)[1:], strict=False))
            assert [causal for *_, causal in sorted(read)] == [False] * (len(read) - 1) + [True]
            assert sorted(read)[-1][0] <= length - count
        assert all(int(piece.key_starts[-1]) <= piece.rows <= room for piece in run.pieces)
        seq, row = seq + seqs, row + sum(counts[seq - 1 : seq - 1 + seqs])
    assert (seq, row) == (6, 1 + sum(counts))
    assert Prompts(0, 0, [300], [400], singles=True).plan(window, room, starts, on_device) is None
