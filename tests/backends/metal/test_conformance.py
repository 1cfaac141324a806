"""The conformance suite, golden bytes and random shapes through the launchers and kernels of the Metal backend."""

from __future__ import annotations

import json
import random

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.format.levels import CODE_BITS, TABLES, widths
from aurakv.format.packing import pack
from aurakv.testing import CASES, Case, covering_set, run
from aurakv.testing.cases import GROUPS, PHASES
from tools.make_golden import DIMS, PATH, vector

CHOSEN = {
    "width-k8v16", "dim-80-80", "group-8", "window-sinks-cap-logits",
    "uncompressed-ring", "damaged-value", "float16",
}  # fmt: skip
assert {case.name for case in CASES} >= CHOSEN
GOLDEN = {(64, 4), (80, 3), (576, 5)}  # of dimensions and bits, in the default run


def marked(values, chosen, name):
    return [pytest.param(x, id=name(x), marks=[] if x in chosen else [pytest.mark.full]) for x in values]


@pytest.mark.parametrize("case", marked(CASES, [c for c in CASES if c.name in CHOSEN], lambda case: case.name))
def test_case(case, metal):
    run(case, *metal)


FRESH = [case for case in CASES if case.name == "splits-more-than-tokens"]  # partial results of no keys


@pytest.mark.parametrize("case", marked([*FRESH, *CASES[::7]], FRESH, lambda case: case.name))
def test_fresh_memory_is_written_before_it_is_read(case, metal):
    """What launches allocate for results holds NaN and the largest integers before."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty fills then
    try:
        assert torch.empty(3).isnan().all()
        run(case, *metal)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.full
@pytest.mark.parametrize("case", covering_set(), ids=lambda case: case.name)
def test_covering_set(case, metal):
    run(case, *metal)


@pytest.mark.parametrize("shape", marked([(d, b) for d in DIMS for b in CODE_BITS], GOLDEN, str))
def test_golden_bytes(shape, metal):
    """The bytes that every backend writes, and the same vector back."""
    (dim, bits), (backend, device), golden = shape, metal, json.loads(PATH.read_text())
    for side, codec in (("key", kv.Codec.key(dim, bits)), ("value", kv.Codec.value(dim, bits))):
        wanted, x = golden[f"{side} {dim} {bits}"], vector(dim).float()
        codes = kv.encode(x.to(device), codec, backend=backend)
        assert bytes(codes.data.flatten().tolist()).hex() == wanted["bytes"]
        assert abs(codes.scale.cpu().view(torch.int16).item() - wanted["scale"]) <= 1  # rounded to float16 from float32
        decoded, truth = kv.decode(codes, codec, backend=backend).cpu(), kv.decode(
            kv.Codes(*(y.cpu() for y in codes)), codec, dtype=torch.float64, backend="reference"
        )  # fmt: skip
        assert (decoded - truth).abs().max() < 2e-6 * truth.abs().max()


def random_case(seed: int) -> Case:
    """Anything that a cache can be asked for, dimensions of vectors at 16 bits included that have no rotation."""
    rng = random.Random(seed)
    bits = [rng.choice((*CODE_BITS, 16)) for _ in "kv"]
    dims = [rng.choice((16, 32, 48, 144, 224, 320, 1024) if b != 16 else (2, 20, 72, 100, 300)) for b in bits]
    storage = rng.choice(("contiguous", "ring", "paged"))
    return Case(
        f"random-{seed}", f"k{bits[0]}v{bits[1]}", (dims[0], dims[1]), rng.choice((1, 2, 3)), rng.choice(GROUPS),
        storage, rng.choice((1, 5, 16, 33)), rng.choice(list(PHASES)),
        rng.choice((torch.float32, torch.float16, torch.bfloat16)), causal=storage == "ring" or rng.random() < 0.8,
        window=rng.choice((None, 1, 7, 30)), sinks=rng.choice((0, 2, 40)), softcap=rng.choice((None, 4.0)),
        sink_logits=rng.choice(("none", "normal", "+inf")), uncompressed=rng.choice(((0, 0), (3, 0), (0, 5), (2, 17))),
        offset=16 not in bits and rng.random() < 0.5, splits=rng.choice((None, 2, 5)),
        damage=rng.choice(("none", "key", "value")),
    )  # fmt: skip


@pytest.mark.parametrize("seed", marked(range(60), [50], str))
def test_random_shapes(seed, metal):
    run(random_case(seed), *metal)


@pytest.mark.parametrize(
    "name", marked(["k4v4", "k16v16", "k8:lloyd-max/v6:int8", "k6:cubic/v8:uniform", "k3v5"], ["k4v4"], str)
)
def test_scores_and_values(name, metal):
    backend, device = metal
    torch.manual_seed(0)
    format = kv.Format.parse(name, 64, torch.float32)
    x, q = torch.randn(70, 2, 64), torch.randn(3, 6, 64)
    for codec in (format.key, format.value):
        offset = torch.randn(2, 64) if codec.coded else None
        codes = kv.encode(x, codec, offset, backend="reference")
        there = kv.Codes(*(None if y is None else y.to(device) for y in codes))
        moved = None if offset is None else offset.to(device)
        for rotated in (False, True):
            got = ops.decode(there, codec, moved, rotated=rotated, backend=backend).cpu()
            torch.testing.assert_close(got, ops.decode(codes, codec, offset, rotated=rotated, backend="reference"))
        got = ops.scores(q.to(device), there, codec, moved, backend=backend).cpu()
        want = ops.scores(q, codes, codec, offset, backend="reference")
        torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)
        weights = want.softmax(-1)
        for threshold in (None, 0.02):
            got = ops.values(weights.to(device), there, codec, moved, threshold=threshold, backend=backend).cpu()
            want_sum = ops.values(weights, codes, codec, offset, threshold=threshold, backend="reference")
            torch.testing.assert_close(got, want_sum, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("table", marked(TABLES, ["poly7"], str))
def test_every_code_of_every_table_becomes_its_level(table, metal):
    """By shuffle or by arithmetic, at each width that the table has."""
    backend, device = metal
    for bits in widths(table):
        codec = kv.Codec(64, bits, table=table, dtype=torch.float32)
        every = torch.arange(256).reshape(4, 1, 64) % 2**bits
        codes = kv.Codes(pack(every, bits).to(device), torch.ones(4, 1, device=device))
        got = ops.decode(codes, codec, rotated=True, backend=backend).cpu()
        torch.testing.assert_close(got, torch.tensor(codec.levels)[every], atol=0, rtol=3e-7)
