"""Which kernels a layer launches in an engine on a GPU, found without one: launches go to a list instead."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import aurakv as kv
from aurakv import backends
from aurakv.attention.step import Rows
from aurakv.calibration.policy import LayerPolicy
from aurakv.vllm.beginnings import Beginnings, Entries, entries_for
from aurakv.vllm.layer import Batch, Layer, Memory
from aurakv.vllm.prefill import Prefill, find_prompts, most_rows
from aurakv.vllm.recent import SPARE
from aurakv.vllm.recent_gpu import RecentOnGpu
from aurakv.vllm.warmup import Limits, WarmUp, shape_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from aurakv.backends.triton import backend, dispatch
from aurakv.backends.triton.append import fit_launch
from aurakv.backends.triton.append import launch as append
from aurakv.backends.triton.common import target
from aurakv.backends.triton.common.launcher import redirected
from aurakv.backends.triton.decode import launch as decode
from aurakv.backends.triton.extend import launch as extend
from aurakv.backends.triton.portable import launch as portable
from aurakv.backends.triton.unpack import launch as unpack
from aurakv.backends.triton.warm_up import launches

CPU = torch.device("cpu")
LIMITS = Limits(seqs=300, tokens=8192, rows=1, width=130, page_size=64)
LONG = Limits(seqs=64, tokens=2048, rows=1, width=2048, page_size=64)  # 128K


class Case(NamedTuple):
    """A layer of an engine, and what that may put into a batch."""

    format: str = "k4v4"
    dim: int = 128
    heads: tuple[int, int] = (8, 2)
    scoring: kv.Scoring = kv.Scoring()
    limits: Limits = LIMITS
    flash: bool = True  # whether prompts are unpacked for flash attention
    changed: bool = False  # key scales and offsets
    first: bool = False  # uncompressed first tokens
    recent: int = 0  # uncompressed recent tokens: of a group
    weight: bool = False  # fitted keys
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] = (9, 0)
    padding: int = 0  # bytes behind a block and KV head


CASES = {
    "plain": Case(),
    "calibrated": Case(changed=True, first=True),
    "calibrated-8.0": Case(changed=True, first=True, capability=(8, 0)),
    "calibrated-long": Case(changed=True, first=True, limits=LONG),
    "calibrated-blocks-16": Case(changed=True, first=True, limits=LONG._replace(width=8192, page_size=16)),
    "calibrated-drafts": Case(changed=True, first=True, limits=LIMITS._replace(rows=4)),
    "calibrated-many": Case(changed=True, first=True, limits=Limits(1024, 16384, 1, 34, 64)),
    "calibrated-one": Case(changed=True, first=True, heads=(8, 8), limits=Limits(1, 512, 1, 66, 64)),
    "calibrated-dim-64": Case(dim=64, heads=(9, 3), changed=True, first=True),
    "calibrated-dim-80": Case("k3v3", 80, (8, 8), changed=True, first=True, limits=LIMITS._replace(page_size=32)),
    "calibrated-dim-96": Case("k5v4", 96, changed=True, first=True, limits=LIMITS._replace(page_size=128)),
    "calibrated-dim-512": Case("k8v8", dim=512, heads=(8, 1), changed=True, first=True),
    "changed": Case("k8v4", changed=True),
    "fitted": Case(changed=True, first=True, weight=True),
    "recent": Case(changed=True, first=True, recent=64),
    "recent-8.0": Case("k3v3", changed=True, recent=64, capability=(8, 0), limits=LIMITS._replace(page_size=16)),
    "recent-drafts": Case(changed=True, first=True, recent=32, limits=LIMITS._replace(rows=4)),
    "float16": Case("k5v4", changed=True, first=True, dtype=torch.float16),
    "one-head": Case("k3v3", heads=(7, 1), changed=True, first=True),
    "window": Case(dim=64, heads=(16, 2), scoring=kv.Scoring(window=128)),
    "drafts": Case("k2v2", limits=LIMITS._replace(rows=8)),
    "cap": Case(dim=256, heads=(4, 2), scoring=kv.Scoring(softcap=20.0)),
    "large-blocks": Case("k8v8", dim=256, heads=(16, 2), limits=LIMITS._replace(width=132, page_size=264)),
    "padded-blocks": Case(changed=True, first=True, padding=16 * 5),
    "portable": Case("k6v16", dim=96),
    "without-flash": Case(flash=False),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, case: str) -> Iterator[None]:
    """Launchers take the CPU for an H200, or an A100."""
    found = CASES[case].capability
    for module in (append, fit_launch, decode, extend, portable, unpack):
        for name, value in (("capability", found), ("multiprocessors", 132 if found == (9, 0) else 108)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda device, value=value: value)
    monkeypatch.setattr(dispatch, "decode_path", lambda: decode)
    monkeypatch.setattr(dispatch, "extend_path", lambda: extend)
    monkeypatch.setattr(backends, "select", lambda *_: backend)
    monkeypatch.setattr(Beginnings, "on_gpu", True)
    with target.assuming(found):
        yield


class NoFlash:
    """Its kernels are the engine's."""

    def __call__(self, q: Any, *_: Any, **__: Any) -> Any:
        return q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)

    def over_pages(self, q: Any, *_: Any) -> Any:
        return self(q)

    def merge(self, out: Any, a: Any, b: Any) -> Any:
        return a[1]


def make_layer(case: Case) -> Layer:
    format, kv_heads = kv.Format.parse(case.format, case.dim), case.heads[1]
    scratch = torch.empty(1 << 22, dtype=case.dtype)
    numbers = torch.rand(kv_heads, case.dim) + 0.1
    changes = {"key_offset": numbers, "key_scale": numbers} if case.changed else {}
    policy = LayerPolicy(case.format, **changes, key_weight=numbers if case.weight else None)

    def entries(tokens: int, count: int) -> Entries:
        return Entries.for_pages(format, tokens, count, kv_heads, case.dtype, CPU)

    return Layer(
        format,
        case.scoring,
        policy=policy,
        beginnings=entries(4, entries_for(case.limits.seqs)) if case.first else None,
        recent=entries(case.recent, entries_for(case.limits.seqs, SPARE)) if case.recent else None,
        prefill=Prefill(NoFlash(), lambda: (scratch, scratch)) if case.flash else None,
    )


def random_batch(numbers: random.Random, limits: Limits) -> list[int]:
    """Rows of each sequence of a batch as schedulers make them, decodes first."""
    seqs = min(limits.seqs, int(2 ** numbers.uniform(0, limits.seqs.bit_length())))
    kind = numbers.random()
    if kind < 0.4:  # also as graphs hold them, where sequences pad the batch
        return [limits.rows if kind < 0.2 else 1] * seqs
    rows = [numbers.randint(1, limits.rows) for _ in range(seqs)]  # not every sequence has all drafts
    left = limits.tokens - sum(rows)
    for i in range(seqs - 1, -1, -1):
        if left <= 0 or numbers.random() < 0.5:
            break
        most = min(left, limits.width * limits.page_size)
        rows[i] = min(most, int(2 ** numbers.uniform(0, limits.tokens.bit_length())))
        left -= rows[i]
    return sorted(rows)


class Engine:
    """The tensors of an engine, and its steps with one layer."""

    def __init__(self, case: Case, layer: Layer) -> None:
        limits, (heads, kv_heads) = case.limits, case.heads
        self.case, self.layer, self.memory = case, layer, Memory(CPU)
        self.settles = True  # as the last layer does
        if case.first:
            self.memory.beginnings = Beginnings(4, limits.seqs, CPU)
        if case.recent:
            self.memory.recent = RecentOnGpu(case.recent, limits.seqs, CPU)
        self.short = most_rows(heads // kv_heads, case.dim, limits.rows)
        size = layer.format.bytes_per_token
        block = kv_heads * (limits.page_size * size + case.padding)
        memory = torch.zeros(48 * block, dtype=torch.uint8)
        strides = block, limits.page_size * size, size, 1
        self.blocks = memory.as_strided((48, kv_heads, limits.page_size, size), strides)
        # as projections give queries, keys and values
        self.fused = torch.empty(limits.tokens, heads + 2 * kv_heads, case.dim, dtype=case.dtype)
        self.out = torch.empty(limits.tokens, heads, case.dim, dtype=case.dtype)
        self.tables = torch.zeros(limits.seqs, limits.width, dtype=torch.int32)

    def step(
        self, rows: list[int], lengths: list[int], shares: bool = False, before: Callable[[], None] = lambda: None
    ) -> None:
        """shares: a layer that reads the keys of another one. before: called before the layer runs."""
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        seqs, tokens, single = len(rows), int(starts[-1]), max(rows) == 1
        if not lengths[-1]:  # the batch is padded: to as many rows as a graph has
            tokens = seqs * max(rows)
        prompts = None
        if rows[-1] > self.short:
            prompts = find_prompts(starts.tolist(), lengths, self.short + 1)
        where = Rows(starts, single=single and tokens == seqs)
        batch = Batch(tokens, where, torch.tensor(lengths).int(), self.tables[:seqs], self.memory, prompts)
        for each in (self.memory.beginnings, self.memory.recent):
            if each is not None:
                each.layer = self.layer if self.settles else None
                each.find(batch.table, batch.lengths, where, self.layer.pages(self.blocks, batch))
        q, k, v = self.fused[:tokens].split([self.case.heads[0], *[self.case.heads[1]] * 2], 1)
        new = (None, None) if shares else (k, v)
        batch.seen = True  # the host does not look at what is on a GPU
        before()
        self.layer.forward(q, *new, self.blocks, batch, self.out[:tokens])

    def life(self, steps: int) -> None:
        numbers, limits = random.Random(5), self.case.limits
        longest = limits.width * limits.page_size
        for i in range(steps):
            rows = random_batch(numbers, limits)
            if sum(rows) <= limits.tokens:
                self.step(rows, [numbers.randint(min(n, longest), longest) for n in rows], i % 8 == 0)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_is_warmed_up(case: str) -> None:
    given = CASES[case]
    layer = make_layer(given)
    engine = Engine(given, layer)
    shape = shape_of(layer, *given.heads, given.dtype)
    warm = launches(WarmUp(shape, given.limits, CPU, layer, lambda: engine.blocks).run)
    needed = launches(lambda: engine.life(400))
    missing = {(key[1], launch.grid) for key, launch in needed.items() if key not in warm}
    assert not missing
    kernels = {key[1] for key in warm}
    assert ("unpack_kernel" in kernels) == given.flash
    assert "append_kernel" in kernels
    assert ("find_kernel" in kernels) == ("place_kernel" in kernels) == given.first
    assert ("find_recent_kernel" in kernels) == ("gather_kernel" in kernels) == (given.recent > 0)
    assert ("extend_kernel" in kernels or "extend_warps_kernel" in kernels) == (not given.flash)
    assert len(warm) <= (50 if given.flash else 60), sorted(key[1] for key in warm)  # without it prompts take all


class Work(TorchDispatchMode):
    """Names of torch's operators that would launch a kernel on a GPU."""

    FREE = ("empty", "view", "slice", "as_strided", "select", "split", "detach", "alias", "unsqueeze", "expand", "t")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].removeprefix("new_").removeprefix("_").removesuffix("_like")
        if name not in self.FREE and name.removesuffix("_strided") not in self.FREE:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "case",
    ["plain", "calibrated", "calibrated-8.0", "calibrated-blocks-16", "calibrated-drafts", "drafts", "fitted", "window",
     "padded-blocks", "recent", "recent-8.0", "recent-drafts"],
)  # fmt: skip
def test_a_decode_of_a_layer_is_three_launches(case: str) -> None:
    """And nothing of torch's. Which entries uncompressed tokens have is found, and settled, once for all layers."""
    given, names = CASES[case], []
    engine = Engine(given, make_layer(given))
    engine.settles = False
    k = given.limits.rows
    batches = [([1] * 32, [8192] * 32), ([1], [3]), ([1, 1, 0, 0], [700, 5, 0, 0])]  # the last two pad a batch
    batches += [([k] * 16, [8192] * 16), ([k, 1, k - 1, 0], [90, 1, k + 3, 0])] if k > 1 else []
    for rows, lengths in batches:
        for _ in range(2):  # the first one makes constants
            names.clear()
            with redirected(lambda kernel, *_: names.append(kernel.fn.__name__)), Work() as work:
                engine.step(rows, lengths, before=work.names.clear)
        if given.first:
            assert names.pop(0) == "find_kernel"
        if given.recent:
            assert names.pop(0) == "find_recent_kernel"
        alone = given.scoring.window is not None  # a window of few tiles needs no merge
        assert names == ["append_kernel", "decode_attention", *([] if alone else ["merge_pieces"])], (rows, names)
        assert work.names == [], rows
