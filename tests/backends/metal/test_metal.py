"""The Metal backend beside conformance: broken kernels are found, wild numbers stay in bounds, and what it says."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re

import pytest
import torch

import aurakv as kv
from aurakv import backends, cli
from aurakv.attention import ops
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention, Rows, Step, in_two_calls
from aurakv.backends import reference
from aurakv.backends.metal import Metal, source
from aurakv.format.fit import equal, fit
from aurakv.format.rotation import hadamard
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import CASES, Case, run
from tests.backends.metal import emulator
from tests.backends.metal.emulator import EmulationError, compile_shader
from tests.backends.metal.emulator.translate import translate
from tools import metal_sources

needs_emulator = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

# Beside the suite's: rows that share pieces of 16 bytes.
ODD = [
    Case("odd-rows", "k3v5", (80, 80), storage="paged", phase="decode"),
    Case("odd-tiles", "k3v5", (80, 80), storage="paged", phase="verify"),
]
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMDGROUP_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
BROKEN = {  # what: error, the case that finds it, what is replaced, by what
    "a barrier behind expanded values is missing": (
        "race|uninitialised", "all-keys",
        f"      {BARRIER}\n      UNROLL for (uint c = 0; c < VALUE_CHUNK / 8; ++c)",
        "      for (uint c = 0; c < VALUE_CHUNK / 8; ++c)",
    ),
    "a barrier behind page numbers is missing": (
        "race|uninitialised", "all-keys",
        f"memory_order_relaxed);\n    }}\n    {BARRIER}", "memory_order_relaxed);\n    }",
    ),
    "scores are read before the simdgroup has stored them": (
        "race", "all-keys",
        "scores[team] + k * 8, BLOCK);\n    simdgroup_barrier(mem_flags::mem_threadgroup);",
        "scores[team] + k * 8, BLOCK);",
    ),
    "a key past the page": (
        "out of range: read", "all-keys", "+ N_KEY_CODES + ulong(row) *", "+ N_PIECE + ulong(row) *",
    ),
    "a table that is not there": (
        "out of range: read", "all-keys", "table[seq * N_WIDTH + page]", "table[(seq + 1) * N_WIDTH + page]",
    ),
    "a shuffle in divergent code": (
        "divergence", "sink-logits-minus-inf",
        "float level = key_number(words[u] + t * KEY_PART_WORDS, i, key_levels);",
        "float level = 0; if (its_place != ABSENT) level = key_number(words[u] + t * KEY_PART_WORDS, i, key_levels);",
    ),
    "a misaligned row of codes": (
        "misaligned", "all-keys",
        "data, page, kv_head, numbers) + N_KEY_CODES +", "data, page, kv_head, numbers) + 4 + N_KEY_CODES +",
    ),
    "a row that is somewhere else": (
        "out of range: read", "sink-logits-minus-inf", "uint(N_PIECE) + uint(N_KEY_CODES);", "uint(N_PIECE) * 9;",
    ),
    "staged codes that are read too early": (
        "race|uninitialised", "dim-80-80",
        f"staged[piece] = four;\n  }}\n  {SIMDGROUP_BARRIER}", "staged[piece] = four;\n  }\n",
    ),
    "staged codes of a tile that are read too early": (
        "race|uninitialised", "odd-tiles",
        f"if (chunk > 0 || KEY_STAGED) {BARRIER}", f"if (chunk > 0) {BARRIER}",
    ),
    "staged codes that are replaced too early": (
        "race", "dim-80-80", f"{SIMDGROUP_BARRIER}\n  UNROLL for (uint first", "UNROLL for (uint first",
    ),
    "a staged unit in the middle of a word": (
        "differs by", "odd-rows", "words[i] = from[i] >> shift;", "words[i] = from[i];",
    ),
    "a fold that gives the wrong row away": (
        "differs by", "sink-logits-minus-inf", "simd_shuffle_xor(upper ? first : second,",
        "simd_shuffle_xor(upper ? second : first,",
    ),
    "a fold that comes too early": (
        "differs by|is NaN", "sink-logits-minus-inf", "due && ((step + t) & d) != 0", "due",
    ),
    "splits that write one result": (
        "race: .* writes device", "splits-7", "ulong to = ulong(split) *", "ulong to = ulong(0) *",
    ),
    "a mask that sees the future": ("differs by", "sink-logits-minus-inf", "!N_CAUSAL || key <= query", "true"),
    "halves of codes that are not exchanged": (
        "differs by", "sink-logits-minus-inf", "simd_shuffle_xor(upper ? all[low] : all[high]",
        "simd_shuffle_xor(upper ? all[high] : all[low]",
    ),
    "halves of units that are not exchanged": (
        "differs by", "dim-128-128",
        "simd_shuffle_xor(upper ? low : high, 1)", "simd_shuffle_xor(upper ? high : low, 1)",
    ),
    "a threshold that keeps light keys": (
        "differs by", "threshold", "needed = needed || (page >= 0 && !(s < least))", "needed = page >= 0 && s < least",
    ),
    "a maximum that is not carried": ("differs by|NaN", "peaked", "total *= keep;", ""),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(what):
    kind, name, old, new = BROKEN[what]
    found = []

    def compiler(source):
        found.append(old in source)
        return compile_shader(source.replace(old, new))

    broken = Metal(f"broken {what}", "cpu", compiler)
    backends.register(broken)
    with pytest.raises((EmulationError, AssertionError), match=kind):
        run(next(case for case in [*CASES, *ODD] if case.name == name), broken.name)
    assert any(found)


def filled(metal, storage="paged", name="k4v4", **options):
    """A cache with three ragged sequences."""
    backend, device = metal
    format = kv.Format.parse(name, 64)
    if storage == "ring":
        cache = kv.KVCache.ring(format, 3, 2, 24, 3, device, page_size=8, backend=backend, **options)
    else:
        cache = kv.KVCache.paged(kv.PagePool(format, 40, 8, 2, torch.device(device)), 3, backend=backend, **options)
    k, v = torch.randn(2, 60, 2, 64).to(device)
    cache.append(k, v, [0, 30, 31, 60])
    return cache


@pytest.mark.parametrize("key_scale", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_a_step_is_an_append_and_an_attend(metal, key_scale, counted):
    """With everything that a step may bring, against the reference, into a given tensor."""
    torch.manual_seed(0)
    backend, device = metal
    cache = filled(metal, uncompressed=Uncompressed(2, 5, torch.float16))
    cache.reserve(1)
    pages, beside = cache.pages, cache.uncompressed_table.pages
    copies = [
        dataclasses.replace(x, **{n: getattr(x, n).cpu().clone() for n in ("data", "lengths", "table", "overflow")})
        for x in (pages, beside)
    ]
    rows = Rows(torch.arange(4, dtype=torch.int32, device=device), single=True)
    factors = torch.rand(2, 64) + 0.5 if key_scale else None
    step = Step(
        pages, rows, Scoring(first=2, recent=5, softcap=9.0), torch.randn(4).to(device), uncompressed=beside,
        uncompressed_too=True, counted=counted, key_scale=None if factors is None else factors.to(device),
    )  # fmt: skip
    q, k, v = torch.randn(3, 4, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    there = [x.to(device) for x in (q, k, v)]
    if counted:
        for x in (pages.lengths, copies[0].lengths):
            x += 1
    out = torch.empty(3, 4, 64, device=device)
    got = backends.select(backend, pages.format, pages.data.device).prepare_step(step, *there)(*there, out)
    like = dataclasses.replace(
        step, pages=copies[0], uncompressed=copies[1], rows=Rows(rows.starts.cpu(), True), key_scale=factors,
        sink_logits=step.sink_logits.cpu(),
    )  # fmt: skip
    want = in_two_calls(reference, like)(q, k, v)
    assert got.out is out
    torch.testing.assert_close(out.cpu(), want.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got.lse.cpu(), want.lse, atol=2e-6, rtol=1e-5)
    for mine, theirs in zip((pages, beside), copies, strict=True):
        assert mine.lengths.tolist() == theirs.lengths.tolist()
        for seq in range(3):
            last = torch.tensor([int(theirs.lengths[seq]) - 1])
            for a, b in zip(mine.stored(seq, last.to(device)), theirs.stored(seq, last), strict=True):
                assert torch.equal(a.data.cpu(), b.data)


def test_a_long_append_keeps_the_end_of_a_ring(metal):
    """Longer than the ring: of tokens that share a slot only the last is written. Codes and vectors alike."""
    torch.manual_seed(0)
    backend, device = metal
    pages = filled(metal, "ring").pages
    k, v = torch.randn(2, 150, 2, 64)
    starts = [0, 100, 100, 150]
    twin = dataclasses.replace(
        pages, **{n: getattr(pages, n).cpu().clone() for n in ("data", "lengths", "table", "overflow")}
    )
    third = dataclasses.replace(pages, data=pages.data.clone(), lengths=pages.lengths.clone())
    kv.append(pages, k.to(device), v.to(device), starts, backend=backend)
    kv.append(twin, k, v, starts, backend="reference")
    codes = [kv.encode(x.to(device), c, backend=backend) for x, c in ((k, twin.format.key), (v, twin.format.value))]
    backends.select(backend, twin.format, third.data.device).append_codes(
        third, *codes, Rows(torch.tensor(starts, dtype=torch.int32, device=device))
    )
    assert pages.lengths.tolist() == twin.lengths.tolist() == third.lengths.tolist()
    assert torch.equal(pages.data.cpu(), third.data.cpu())
    for seq in range(3):
        n = int(twin.lengths[seq])
        held = torch.tensor([t for t in range(n) if t < 8 or t >= n - twin.wrap])
        for a, b in zip(pages.stored(seq, held.to(device)), twin.stored(seq, held), strict=True):
            assert torch.equal(a.data.cpu(), b.data)


def test_what_does_not_fit_is_not_written(metal):
    backend, device = metal
    cache = filled(metal)
    before, lengths = cache.pages.data.clone(), cache.pages.lengths.tolist()
    x = torch.randn(101, 2, 64, device=device)
    kv.append(cache.pages, x, x, [0, 1, 1, 101], backend=backend)  # the last one has no pages for so many
    assert cache.pages.lengths.tolist() == [lengths[0] + 1, *lengths[1:]]
    assert int(cache.pages.overflow) == 1
    changed = (cache.pages.data != before).any(-1).any(-1).nonzero().flatten().tolist()
    assert len(changed) <= 1


@needs_emulator
@pytest.mark.parametrize("seed", range(3))
def test_wild_numbers_stay_in_bounds(metal, seed):
    """Nobody reads starts, ends, lengths and tables on a GPU before a kernel does."""
    rng = torch.Generator().manual_seed(seed)
    cache = filled(metal, ["paged", "ring"][seed % 2])
    device = cache.pages.data.device

    def wild(*shape):
        some = torch.randint(-(2**31), 2**31, shape, generator=rng)
        near = torch.randint(-9, 60, shape, generator=rng)
        return torch.where(torch.rand(shape, generator=rng) < 0.2, some, near).to(device, torch.int32)

    pages = dataclasses.replace(cache.pages, table=wild(*cache.pages.table.shape), lengths=wild(3))
    chosen = backends.select(metal[0], pages.format, device)
    q, x = torch.randn(9, 4, 64, device=device), torch.randn(9, 2, 64, device=device)
    for single in (False, True):
        scoring = Scoring(window=20, sinks=2)
        chosen.attend(q, Attention(pages, Rows(wild(4), single), scoring, splits=2, ends=wild(3)))
    chosen.attend_dense(q, x, x, Rows(wild(4)), wild(4), wild(3), Scoring(), None)
    chosen.append(pages, x, x, Rows(wild(4)))
    fits = {"key_fit": fit(pages.format.key, torch.ones(2, 64)).to(device), "value_fit": equal(2, device)}
    chosen.append(dataclasses.replace(pages, **fits), x, x, Rows(wild(4)))


@needs_emulator
@pytest.mark.full
def test_the_order_of_threads_does_not_matter(metal):
    results = []
    for backwards in (False, True):
        torch.manual_seed(0)
        name = f"metal-backwards-{backwards}"
        backends.register(Metal(name, "cpu", lambda source, b=backwards: compile_shader(source, b)))
        cache = filled((name, "cpu"), uncompressed=Uncompressed(2, 5, torch.float16))
        part = cache.step(*torch.randn(1, 60, 4, 64), *torch.randn(2, 60, 2, 64), [0, 20, 21, 60])
        results.append((part.out, part.lse, *(codes.data for seq in range(3) for codes in cache.codes(seq))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention(metal, causal):
    torch.manual_seed(0)
    backend, device = metal
    q, k, v = torch.randn(12, 6, 20), torch.randn(30, 2, 20), torch.randn(30, 2, 36)
    v[3, 1, 5] = torch.nan
    starts, key_starts, scoring = [0, 5, 12], [0, 9, 30], Scoring(causal=causal, window=8, sinks=1)
    want = ops.attend_dense(q, k, v, starts, key_starts, scoring, ends=[9, 40], backend="reference")
    there = [x.to(device) for x in (q, k, v)]
    got = ops.attend_dense(*there, starts, key_starts, scoring, ends=[9, 40], backend=backend)
    torch.testing.assert_close(got.out.cpu(), want.out, atol=2e-6, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(got.lse.cpu(), want.lse, atol=2e-6, rtol=1e-5)


def test_it_says_what_is_missing(monkeypatch):
    assert "computes on mps, got cpu" in kv.why_not("metal")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert kv.why_not("metal", None, "mps") == "torch finds no Apple GPU"
    monkeypatch.delattr(torch.mps, "compile_shader")
    assert re.match("it needs torch 2.7 or newer", kv.why_not("metal", None, "mps"))


def test_it_says_that_there_is_no_float64(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "compile_shader", lambda source: None, raising=False)
    assert kv.why_not("metal", None, "mps", torch.bfloat16) is None
    for backend in ("metal", "reference"):
        assert kv.why_not(backend, None, "mps", torch.float64) == "it computes in float32: an Apple GPU has no float64"
    assert backends._best.__wrapped__(None, torch.device("mps"), True).name == "reference"


def test_it_is_chosen_for_apple_gpus(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "compile_shader", lambda source: None, raising=False)
    chosen = backends._best.__wrapped__(kv.Format.parse("k4v4", 128), torch.device("mps"), False)
    assert chosen.name == "metal"


def test_info_says_that_no_apple_gpu_has_run_it(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "compile_shader", lambda source: None, raising=False)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M9")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 10)
    assert cli.main(["info", "--json"]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out)["devices"] if row["device"] == "mps")
    assert row["name"] == "Apple M9, 10 GPU cores"
    assert (row["chosen"], row["paths"]) == ("metal", {"metal": "emulated on Linux; not yet run on an Apple GPU"})


def test_info_and_bench_take_it_by_themselves(by_itself, capsys):
    device, sources = by_itself
    assert cli.main(["info", "--json"]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out)["devices"] if row["device"] == device)
    assert (row["chosen"], row["paths"]["metal"]) == ("metal", "emulated on Linux; not yet run on an Apple GPU")
    shape = "--tokens 64 --heads 4 --kv-heads 1 --head-dim 64 --formats k4v4 --rounds 1"
    assert cli.main(["bench", "--device", device, *shape.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limit"] == "metal: emulated on Linux; not yet run on an Apple GPU"
    assert any(row.get("format") == "k4v4" and row["us"] > 0 for row in found["rows"]), found
    assert device == "mps" or {"encode", "attend_rows"} <= {
        name for source in sources for name in re.findall(r"kernel void (\w+)", source)
    }
    assert cli.main(["bench", "--device", device, *shape.split()]) == 0
    assert f"\n{found['limit']}\n" in capsys.readouterr().out
    assert cli.main(["bench", "--device", device, *shape.split(), "--backend", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit"] is None


def test_source_does_not_depend_on_the_default_device():
    """Some set it to an Apple GPU, which has no float64; the signs of rotations have."""
    codec = kv.Codec.key(80, 3)
    source.encode.cache_clear(), source._side.cache_clear(), hadamard.cache_clear()
    with torch.device("meta"):
        there = source.encode(codec, torch.float16)
    source.encode.cache_clear(), source._side.cache_clear(), hadamard.cache_clear()
    assert there == source.encode(codec, torch.float16)


def test_infinity_and_nan_are_told_by_their_bits():
    """Fast math, which an environment variable of torch turns on, takes neither for possible."""
    by_value = r"\b(?:isnan|isinf|isfinite|INFINITY|NAN)\b|[=<>]\s*-?infinity\("
    for file in importlib.resources.files("aurakv.backends.metal").joinpath("shaders").iterdir():
        assert not re.search(by_value, re.sub("//.*", "", file.read_text(encoding="utf-8"))), file.name


def test_the_sources_for_apples_compiler_are_whole():
    """A covering set of specialisations is ASCII, says no word that Metal refuses, and is made of every file."""
    found = metal_sources.sources()
    assert len(found) > 400
    assert all(text.isascii() for text in found.values())
    for text in list(found.values())[::20]:
        translate(text)
    shaders = importlib.resources.files("aurakv.backends.metal").joinpath("shaders").iterdir()
    together = "".join(found.values())
    assert all(f'#line 1 "{file.name}"' in together for file in shaders)
