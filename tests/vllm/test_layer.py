"""The attention of the vLLM plugin over memory that an engine owns, with hand-made steps: vLLM is not needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops
from aurakv.attention.step import Rows
from aurakv.backends import reference
from aurakv.calibration.policy import LayerPolicy, Policy, shipped
from aurakv.errors import InputError
from aurakv.vllm.layer import TOKENS, Batch, Layer, Memory
from aurakv.vllm.switch import Switch, shard

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 64, 32
CPU = torch.device("cpu")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


class Engine:
    """What an engine does around a layer: blocks of a shared memory, tables, ragged batches."""

    def __init__(
        self,
        format: kv.Format,
        scoring: kv.Scoring,
        *,
        blocks: int = 24,
        seqs: int = 4,
        width: int = 8,
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.layer = Layer(format, scoring)
        shape = (blocks, KV_HEADS, BLOCK, format.bytes_per_token)
        self.memory = torch.randint(256, shape, dtype=torch.uint8, device=device)
        self.free = torch.randperm(blocks - 1).add(1).tolist()  # block 0 stays empty, as engines keep it
        self.table = torch.zeros(seqs, width, dtype=torch.int32)
        self.lengths = [0] * seqs
        self.owned = Memory(self.device)

    def step(self, rows: dict[int, tuple[Tensor, Tensor, Tensor]], *, padding: int = 0) -> dict[int, Tensor]:
        """One pass over some sequences: new (q, k, v) rows each; gives their attention."""
        order = list(rows)
        for seq in order:
            before, self.lengths[seq] = self.lengths[seq], self.lengths[seq] + len(rows[seq][0])
            for entry in range(-(-before // BLOCK), -(-self.lengths[seq] // BLOCK)):
                self.table[seq, entry] = self.free.pop()
        counts = torch.tensor([0, *(len(rows[seq][0]) for seq in order)])
        tokens = int(counts.sum())
        q, k, v = (torch.cat([*(rows[seq][i] for seq in order)]) for i in range(3))
        q, k, v = (torch.cat([x, x.new_full((padding, *x.shape[1:]), float("nan"))]) for x in (q, k, v))
        q, k, v = q.to(self.device), k.to(self.device), v.to(self.device)
        single = tokens == len(order) and int(counts.max()) == 1
        batch = Batch(
            tokens,
            Rows(counts.cumsum(0).int().to(self.device), single),
            torch.tensor([self.lengths[seq] for seq in order], dtype=torch.int32, device=self.device),
            self.table[order].to(self.device).contiguous(),
            self.owned,
        )
        out = torch.full((tokens + padding, HEADS, DIM), 7.0, device=self.device)
        self.layer.forward(q, k, v, self.memory, batch, out)
        assert bool((out[tokens:] == 7).all()), "rows behind the batch are not ours"
        parts = out[:tokens].cpu().split(counts[1:].tolist())
        return dict(zip(order, parts, strict=True))


def rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, HEADS, DIM), torch.randn(n, KV_HEADS, DIM), torch.randn(n, KV_HEADS, DIM)


SCORINGS = {
    "plain": kv.Scoring(),
    "window": kv.Scoring(window=40),
    "softcap": kv.Scoring(scale=0.3, softcap=5.0),
}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", ["k16:f32/v16:f32", "k4v4", "k8v3"])
def test_chunks_and_mixed_batches_equal_a_cache(name: str, scoring: str, device: str) -> None:
    """Prefill in chunks, decode beside prefill, sequences that pause: each equals a cache of its own."""
    torch.manual_seed(0)
    format = kv.Format.parse(name, DIM)
    engine = Engine(format, SCORINGS[scoring], device=device)
    caches = [kv.KVCache.contiguous(format, seqs=1, capacity=256, kv_heads=KV_HEADS) for _ in range(4)]
    for batch in ({0: 50}, {0: 1, 1: 70}, {0: 1, 1: 1, 2: 33, 3: 5}, {3: 60, 1: 1}, {0: 1, 1: 1, 2: 1, 3: 1}, {2: 90}):
        new = {seq: rows(n) for seq, n in batch.items()}
        for seq, out in engine.step(new, padding=3).items():
            q, k, v = new[seq]
            caches[seq].append(k, v, [0, len(k)])
            expected = caches[seq].attend(q, [0, len(q)], SCORINGS[scoring]).out
            torch.testing.assert_close(out, expected, atol=4e-3 if device == "cpu" else 1e-2, rtol=0)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", ["k16v16", "k4v4", "k8v4"])
@pytest.mark.parametrize("single", [True, False])
def test_captured_decode_sees_what_changes(name: str, single: bool, device: str) -> None:
    """A graph of one decode step is replayed: lengths and tables change, one row of the batch is padding."""
    torch.manual_seed(6)
    format, seqs, width = kv.Format.parse(name, DIM), 4, 8
    make = {"dtype": torch.int32, "device": device}
    starts, ends = torch.tensor([0, 1, 2, 3, 3], **make), torch.zeros(seqs, **make)
    table = torch.randperm(seqs * width, device=device).int().view(seqs, width)
    memory = torch.zeros(seqs * width, KV_HEADS, BLOCK, format.bytes_per_token, dtype=torch.uint8, device=device)
    layer, owned = Layer(format, kv.Scoring()), Memory(torch.device(device))
    q, k, v = (x.to(device, torch.bfloat16) for x in rows(seqs))
    out = torch.zeros(seqs, HEADS, DIM, dtype=torch.bfloat16, device=device)
    ends[:3] = 1
    batch = Batch(seqs, Rows(starts, single), ends, table, owned)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.forward(q, k, v, memory, batch, out)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(q, k, v, memory, batch, out)
    caches = [kv.KVCache.contiguous(format, seqs=1, capacity=256, kv_heads=KV_HEADS, device=device) for _ in range(3)]
    untouched = memory[table[3].long()].clone()  # of the sequence that pads
    for position in range(1, 70):
        new = [x.to(device, torch.bfloat16) for x in rows(seqs)]
        for held, fresh in zip((q, k, v), new, strict=True):
            held.copy_(fresh)
        ends[:3] = position
        graph.replay()
        for seq, cache in enumerate(caches):
            cache.append(k[seq : seq + 1], v[seq : seq + 1])
            expected = cache.attend(q[seq : seq + 1]).out[0]
            torch.testing.assert_close(out[seq], expected, atol=2e-2, rtol=0)
    assert torch.equal(memory[table[3].long()], untouched)
    assert not bool(owned.overflow)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", ["k16:f32/v16:f32", "k4v4", "k8v3"])
def test_blocks_with_padding(name: str, device: str) -> None:
    """An engine whose layers need blocks of different sizes pads the smaller ones."""
    format = kv.Format.parse(name, DIM)
    results = []
    for padding in (0, 16 * KV_HEADS, 4096):
        torch.manual_seed(8)
        engine = Engine(format, kv.Scoring(), device=device)
        count, *block = engine.memory.shape
        whole = torch.randint(256, (count, engine.memory[0].numel() + padding), dtype=torch.uint8, device=device)
        engine.memory = whole[:, : engine.memory[0].numel()].unflatten(1, block)
        torch.manual_seed(9)
        steps = ({0: rows(50), 1: rows(3)}, {0: rows(1), 1: rows(70)}, {0: rows(1), 1: rows(1)})
        results.append([out for step in steps for out in engine.step(step).values()])
    for padded in results[1:]:
        for found, expected in zip(padded, results[0], strict=True):
            assert torch.equal(found, expected)


def test_padding_that_heads_cannot_share_is_refused() -> None:
    engine = Engine(kv.Format.parse("k4v4", DIM), kv.Scoring())
    count, *block = engine.memory.shape
    size = engine.memory[0].numel()
    engine.memory = torch.zeros(count, size + 16, dtype=torch.uint8)[:, :size].unflatten(1, block)
    with pytest.raises(InputError, match="padded to a multiple of 32 bytes"):
        engine.step({0: rows(1)})


def test_blocks_that_sequences_share() -> None:
    """A prefix that another request computed: its blocks stand in both tables, and only new tokens are written."""
    torch.manual_seed(1)
    engine = Engine(kv.Format.parse("k8v8", DIM), kv.Scoring())
    prefix, tail = rows(2 * BLOCK), rows(10)
    alone = engine.step({0: tuple(torch.cat(pair) for pair in zip(prefix, tail, strict=True))})[0][-10:]
    engine.table[1, :2] = engine.table[0, :2]
    engine.lengths[1] = 2 * BLOCK
    torch.testing.assert_close(engine.step({1: tail})[1], alone, atol=2e-3, rtol=0)


def test_blocks_that_left_the_window_are_not_read() -> None:
    torch.manual_seed(2)
    engine = Engine(kv.Format.parse("k4v4", DIM), kv.Scoring(window=20))
    engine.step({0: rows(4 * BLOCK)})
    engine.memory[0] = 255  # NaN in every scale
    engine.table[0, :2] = 0  # the engine gave them back
    assert bool(engine.step({0: rows(1)})[0].isfinite().all())


def test_layer_that_shares_keys_writes_nothing() -> None:
    torch.manual_seed(3)
    engine = Engine(kv.Format.parse("k4v4", DIM), kv.Scoring())
    new = rows(40)
    expected = engine.step({0: new})[0]
    before = engine.memory.clone()
    batch = Batch(
        40,
        Rows(torch.tensor([0, 40], dtype=torch.int32)),
        torch.tensor([40], dtype=torch.int32),
        engine.table[:1].contiguous(),
        engine.owned,
    )
    out = torch.empty(40, HEADS, DIM)
    engine.layer.forward(new[0], None, None, engine.memory, batch, out)
    torch.testing.assert_close(out, expected)
    assert torch.equal(engine.memory, before)


def test_sink_logits() -> None:
    torch.manual_seed(4)
    engine = Engine(kv.Format.parse("k16:f32/v16:f32", DIM), kv.Scoring())
    engine.layer.sink_logits = torch.randn(HEADS)
    q, k, v = rows(20)
    expected = ops.attend_dense(q, k, v, [0, 20], sink_logits=engine.layer.sink_logits).out
    torch.testing.assert_close(engine.step({0: (q, k, v)})[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("ends", "table", "message"),
    [([40], [[99, 1]], "names pages outside"), ([-3], [[1, 2]], "length of sequence 0"), ([5], [[1, 2]], "more new")],
)
def test_contents_out_of_range_are_refused_before_anything_is_written(
    ends: list[int], table: list[list[int]], message: str
) -> None:
    engine = Engine(kv.Format.parse("k4v4", DIM), kv.Scoring())
    before = engine.memory.clone()
    q, k, v = rows(8)
    batch = Batch(
        8,
        Rows(torch.tensor([0, 8], dtype=torch.int32)),
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        engine.owned,
    )
    with pytest.raises(InputError, match=message):
        engine.layer.forward(q, k, v, engine.memory, batch, torch.empty(8, HEADS, DIM))
    assert torch.equal(engine.memory, before)


def test_step_with_wrong_shapes_is_refused() -> None:
    with pytest.raises(InputError, match="3 sequences need"):
        Batch(3, Rows(torch.arange(4).int()), torch.ones(3).int(), torch.zeros(2, 2).int(), Memory(CPU))


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory with a guard page behind it, made here for Linux")
@pytest.mark.parametrize("name", ["k4v4", "k3v2", "k8v5", "k16v16"])
def test_memory_without_spare_bytes(name: str) -> None:
    """An engine's memory ends with its last page: reading past it would end the process."""
    torch.manual_seed(5)
    format = kv.Format.parse(name, DIM)
    engine = Engine(format, kv.Scoring(), blocks=3, seqs=1, width=2)
    engine.memory = guarded(engine.memory.numel()).view(engine.memory.shape)
    engine.step({0: rows(2 * BLOCK - 1)})
    assert bool(engine.step({0: rows(1)})[0].isfinite().all())


def guarded(size: int) -> Tensor:
    """Memory whose end is the start of a page that cannot be read."""
    page = mmap.PAGESIZE
    whole = -(-size // page) * page
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, whole + page, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    assert libc.mprotect(start + whole, page, 0) == 0
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(start + whole - size), dtype=torch.uint8)


def test_plan_of_a_format() -> None:
    assert Switch.parse({}) is None
    assert Switch.parse({"another plugin": 1}) is None
    switch = Switch.parse({"aurakv": "k4v16"})
    assert switch is not None
    assert (switch.format, switch.plain, switch.policy, switch.measured) == ("k4v16", False, None, True)
    plain, chosen = Switch.parse({"aurakv": "plain:k4v4"}), Switch.parse({"aurakv": True})
    assert plain is not None
    assert (plain.format, plain.plain, plain.measured) == ("k4v4", True, True)
    assert chosen is not None
    assert (chosen.format, chosen.plain, chosen.measured) == (None, False, True)
    assert Switch.parse({"aurakv": False}) is None
    uncompressed = Switch.parse({"aurakv": "k16v4"})
    assert uncompressed is not None
    assert not uncompressed.measured
    switch.check_model(30, 3, 64)
    with pytest.raises(InputError, match="dim"):
        switch.check_model(30, 3, 44)
    for wrong in (4, None, {"format": "k4v4"}, "k4", "k7v4", "plain:", "plain:plain:k4v4"):
        with pytest.raises(InputError):
            Switch.parse({"aurakv": wrong})


def test_plan_of_a_policy(tmp_path: Path) -> None:
    layers = (
        LayerPolicy("k8v4", key_offset=torch.randn(4, DIM)),
        LayerPolicy("k4v4", key_scale=torch.rand(4, DIM) + 1),
    )
    Policy(4, DIM, layers).save(tmp_path / "policy.json")
    switch = Switch.parse({"aurakv": str(tmp_path / "policy.json")})
    assert switch is not None
    assert switch.policy is not None
    first_layer, second_layer = switch.policy.layers
    assert [first_layer.format, second_layer.format] == ["k8v4", "k4v4"]
    assert not switch.measured
    switch.check_model(2, 4, DIM)
    with pytest.raises(InputError, match="2 KV layers"):
        switch.check_model(3, 4, DIM)
    offset, key_scale = first_layer.key_offset, second_layer.key_scale
    assert offset is not None
    assert key_scale is not None
    for ranks, rank, heads, first in ((1, 0, 4, 0), (2, 1, 2, 2), (4, 3, 1, 3), (8, 5, 1, 2)):
        torch.testing.assert_close(shard(first_layer, rank, ranks, heads).key_offset, offset[first : first + heads])
        torch.testing.assert_close(shard(second_layer, rank, ranks, heads).key_scale, key_scale[first : first + heads])
    Policy(4, DIM, layers, first=4).save(tmp_path / "uncompressed.json")
    uncompressed = Switch.parse({"aurakv": str(tmp_path / "uncompressed.json")})
    assert uncompressed is not None
    assert uncompressed.policy is not None
    assert (uncompressed.first, uncompressed.policy.first, uncompressed.note) == (4, 4, None)
    assert switch.first == 0
    Policy(4, DIM, layers, first=4, recent=32).save(tmp_path / "recent.json")
    recent = Switch.parse({"aurakv": str(tmp_path / "recent.json")})
    assert recent is not None
    assert (recent.first, recent.recent) == (4, 32)
    assert recent.note == "32 recent tokens were asked for; vLLM keeps groups of at most 64 tokens, as with recent16:"
    fewer = Switch.parse({"aurakv": f"recent16:{tmp_path / 'recent.json'}"})
    assert fewer is not None
    assert (fewer.first, fewer.recent, fewer.note) == (4, 16, None)
    Policy(4, DIM, layers, first=20).save(tmp_path / "long.json")
    long = Switch.parse({"aurakv": str(tmp_path / "long.json")})
    assert long is not None
    assert long.first == 16
    assert "keeps its first 20 tokens uncompressed" in str(long.note)


def test_recent_tokens_of_a_format() -> None:
    for given, recent in (("k4v4", 0), ("recent16:k4v4", 16), ("recent0:k4v4", 0), ("recent8:plain:k4v4", 8)):
        switch = Switch.parse({"aurakv": given})
        assert switch is not None
        assert (switch.format, switch.recent, switch.plain) == ("k4v4", recent, "plain" in given)
    many = Switch.parse({"aurakv": "recent999999:k4v4"})
    assert many is not None
    assert "groups of at most 64 tokens" in str(many.note)
    for wrong in ("recent:k4v4", "recent-1:k4v4", "Recent16:k4v4", "recent16:", "plain:recent16:k4v4"):
        with pytest.raises(InputError, match=r"^recent<n>: needs a whole number and then a format or policy, as in"):
            Switch.parse({"aurakv": wrong})
    with pytest.raises(InputError, match="has no meaning for k16v16"):
        Switch.parse({"aurakv": "recent16:k16v16"})


@pytest.mark.parametrize("wrong", [4, None, "kiv4", "smolm2-135m", "plain:", "true", "recent16:true", "recent16:smol"])
def test_another_value_gets_the_list_of_valid_ones(wrong: object) -> None:
    with pytest.raises(InputError) as info:
        Switch.parse({"aurakv": wrong})
    said = str(info.value)
    assert said.startswith("aurakv must be true, a format such as k4v4, plain:k4v4, a policy (a .json file or one of [")
    assert "smollm2-135m-k3v2" in said
    assert said.endswith(f"or recent16: and one of these but true, got {wrong!r}")


def test_a_policy_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    for number, format in enumerate(("k8v4", "k4v3", "k4v3")):
        Policy(4, DIM, (LayerPolicy(format),)).save(path)
        os.utime(path, ns=(number, number))  # two writes may fall into one tick of the clock
        switch = Switch.parse({"aurakv": str(path)})
        assert switch is not None
        assert switch.policy is not None
        assert switch.policy.layers[0].format == format
    assert Switch.parse({"aurakv": str(path)}) is switch, "every layer of an engine asks for it"


@pytest.mark.parametrize("name", shipped())
def test_plan_of_a_shipped_policy(name: str) -> None:
    switch, policy = Switch.parse({"aurakv": name}), Policy.load(name)
    assert switch is not None
    switch.check_model(len(policy.layers), policy.kv_heads, policy.head_dim)
    assert switch.policy is not None
    assert [layer.format for layer in switch.policy.layers] == [layer.format for layer in policy.layers]


def test_offsets_and_balance_leave_attention_as_it_is() -> None:
    """At 8 bits the result is close to uncompressed attention, with keys that need both."""
    torch.manual_seed(7)
    policy = LayerPolicy(
        "k8v8",
        key_offset=3 * torch.randn(KV_HEADS, DIM),
        value_offset=torch.randn(KV_HEADS, DIM),
        key_scale=torch.rand(KV_HEADS, DIM) + 0.5,
    )
    engine = Engine(kv.Format.parse("k8v8", DIM), kv.Scoring())
    engine.layer = Layer(kv.Format.parse("k8v8", DIM), kv.Scoring(), policy=policy)
    q, k, v = rows(90)
    assert policy.key_offset is not None
    assert policy.key_scale is not None
    k += policy.key_offset / policy.key_scale
    out = torch.cat([engine.step({0: (q[:60], k[:60], v[:60])})[0], engine.step({0: (q[60:], k[60:], v[60:])})[0]])
    torch.testing.assert_close(out, ops.attend_dense(q, k, v, [0, 90]).out, atol=5e-2, rtol=0)


def test_pages_of_whole_blocks_have_no_padding() -> None:
    """vLLM counts bytes per token; our pages must be exactly that many times their tokens."""
    for name in ("k2v2", "k3v3", "k4v5", "k6v8", "k16v16"):
        for dim in (64, 80, 96, 128, 160, 256):
            format = kv.Format.parse(name, dim)
            assert format.layout(3 * TOKENS).bytes == 3 * TOKENS * format.bytes_per_token


def test_key_weights_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are fitted as the policy says; its fits are made once, however many tables there are."""
    torch.manual_seed(0)
    format, weight = kv.Format.parse("k4v4", DIM), torch.rand(KV_HEADS, DIM) ** 4 + 0.01
    policy, made = LayerPolicy("k4v4", key_weight=weight), []
    wanted = policy.fits(format, KV_HEADS, CPU)
    original = LayerPolicy.fits
    monkeypatch.setattr(backends, "select", lambda *_: reference)
    monkeypatch.setattr(LayerPolicy, "fits", lambda *given: made.append(given) or original(*given))
    layer, memory = Layer(format, kv.Scoring(), policy=policy), Memory(CPU)
    blocks = torch.zeros(3, KV_HEADS, BLOCK, format.bytes_per_token, dtype=torch.uint8)
    x, out = torch.randn(5, KV_HEADS, DIM), torch.empty(5, KV_HEADS, DIM)
    for block in (1, 2):
        table, lengths = torch.tensor([[block]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
        batch = Batch(5, Rows(torch.tensor([0, 5], dtype=torch.int32)), lengths, table, memory)
        layer.forward(x, x, x, blocks, batch, out)
        stored = layer.pages(blocks, batch).stored(0, torch.arange(5))
        for codes, codec, fit in zip(stored, (format.key, format.value), wanted, strict=True):
            assert torch.equal(codes.data, kv.encode(x, codec, fit=fit, backend="reference").data)
    assert len(made) == 1


def test_what_graphs_read_outlives_the_tables_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy from a file is in main memory. Its copy on the device must be one, and stay: captured graphs know its
    address, and nobody asks for it again when they are replayed."""
    from aurakv.vllm import layer as module

    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    numbers = torch.rand(KV_HEADS, DIM) + 0.5
    policy = LayerPolicy("k4v4", key_offset=numbers, value_offset=numbers, key_scale=numbers)
    format, meta = kv.Format.parse("k4v4", DIM), torch.device("meta")  # of tensors without memory, as another device
    layer, memory = Layer(format, kv.Scoring(), policy=policy), Memory(meta)
    blocks = torch.zeros(9, KV_HEADS, BLOCK, format.bytes_per_token, dtype=torch.uint8, device=meta)
    seen = []
    for seqs in range(1, 9):
        table = torch.zeros(seqs, 4, dtype=torch.int32, device=meta)
        starts = torch.zeros(seqs + 1, dtype=torch.int32, device=meta)
        batch = Batch(seqs, Rows(starts, True), table[:, 0].contiguous(), table, memory)
        pages = layer.pages(blocks, batch)
        assert pages.key_offset is not None
        assert pages.key_offset.device == meta
        seen.append((pages.key_offset, pages.value_offset, layer._stored(blocks, batch).key_scale))
    assert len(memory.stored) <= 3
    assert all(mine is first for each in seen for mine, first in zip(each, seen[0], strict=True))
