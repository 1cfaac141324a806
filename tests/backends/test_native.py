"""The native backend: accuracy, threads, fork, memory bounds and what it says when it cannot run."""

from __future__ import annotations

import copy
import ctypes
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.backends import native
from aurakv.backends.native import abi
from aurakv.errors import InputError
from aurakv.storage.pages import Pages
from aurakv.storage.uncompressed import Uncompressed
from tools import native_fuzz

NAMES = [name for name in native.backends if kv.why_not(name) is None]
BITS = (2, 3, 4, 5, 6, 8)

pytestmark = pytest.mark.skipif(kv.why_not("native") is not None, reason="the native library is not built")


@pytest.fixture
def threads():
    """Set torch's thread count; put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def filled(format: str, tokens: int, dim: int = 128, kv_heads: int = 2, spread: float = 0.0) -> kv.KVCache:
    cache = kv.KVCache.contiguous(kv.Format.parse(format, dim), 1, kv_heads, capacity=tokens)
    norm = torch.exp(spread * torch.randn(2, tokens, kv_heads, 1))
    k, v = torch.randn(2, tokens, kv_heads, dim) * norm
    cache.append(k, v, [0, tokens])
    return cache


def filled_keys(pages: Pages) -> kv.Codes:
    return pages.stored(0, torch.arange(int(pages.lengths[0])))[0]


def relative_error(q: torch.Tensor, pages: Pages, scoring: kv.Scoring, name: str, precision: str) -> float:
    got = kv.attend(q, pages, scoring=scoring, backend=name, precision=precision).out.double()
    truth = kv.attend(q.double(), pages, scoring=scoring, backend="reference").out
    return ((got - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_accuracy(name, bits):
    torch.manual_seed(bits)
    pages = filled(f"k{bits}v{bits}", 3000, spread=0.5).pages
    q = torch.randn(1, 8, 128)
    assert relative_error(q, pages, kv.Scoring(), name, "fast") <= 3e-4
    assert relative_error(q, pages, kv.Scoring(), name, "float32") <= 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_accuracy_of_a_table_without_symmetry(name, bits):
    torch.manual_seed(bits)
    levels = tuple((torch.linspace(-2.5, 3.5, 1 << bits) ** 3 / 12 + 0.1).tolist())
    format = kv.Format(kv.Codec.key(128, bits, table=levels), kv.Codec.value(128, bits, table=levels))
    cache = kv.KVCache.contiguous(format, 1, 2, capacity=1000)
    cache.append(*torch.randn(2, 1000, 2, 128), [0, 1000])
    assert relative_error(torch.randn(1, 8, 128), cache.pages, kv.Scoring(), name, "fast") <= 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", BITS)
def test_accuracy_in_the_worst_case(name, bits):
    """Scores of standard deviation 40, log-normal norms, outliers in the query."""
    for seed in range(5):
        torch.manual_seed(seed)
        pages = filled(f"k{bits}v{bits}", 2000, spread=1.0).pages
        q = torch.randn(1, 8, 128)
        q[..., torch.randperm(128)[:3]] *= 30
        scale = 40 / ops.scores(q, filled_keys(pages), pages.format.key).std().item()
        assert relative_error(q, pages, kv.Scoring(scale=scale), name, "fast") <= 2e-3
        assert relative_error(q, pages, kv.Scoring(scale=scale), name, "float32") <= 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("table", [None, "lloyd-max"])
@pytest.mark.parametrize("bits", BITS)
def test_accuracy_of_large_scores(name, bits, table):
    """What int16 cannot hold of queries and levels is added where it counts: scores are as good as in float32."""
    torch.manual_seed(bits)
    options = {"table": table} if table else {}
    format = kv.Format(kv.Codec.key(128, bits, **options), kv.Codec.value(128, 16, dtype=torch.float32))
    cache = kv.KVCache.contiguous(format, 1, 2, capacity=2000)
    k, v = torch.randn(2, 2000, 2, 128)
    cache.append(k * torch.exp(torch.randn(2000, 2, 1) / 4), v, [0, 2000])
    for deviation, bound in ((8, 3e-4), (40, 3e-5), (150, 3e-5)):
        for heads in (6, 8, 22):
            q = torch.randn(1, heads, 128) * deviation
            assert relative_error(q, cache.pages, kv.Scoring(), name, "fast") <= bound


SCORINGS = {
    "plain": kv.Scoring(),
    "window": kv.Scoring(window=90),
    "sinks": kv.Scoring(window=90, sinks=5),
    "softcap": kv.Scoring(softcap=20.0),
    "threshold": kv.Scoring(threshold=3e-3),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("format", ["k4v4", "k8v3", "k5v16:f32", "k16:f32/v16:f32"])
def test_a_query_gets_the_same_bits_in_every_batch(name, scoring, format):
    """Alone or with others, token by token, in chunks or in one prefill: an engine's answers do not depend on load."""
    torch.manual_seed(0)
    parsed, tokens, heads, kv_heads, dim = kv.Format.parse(format, 64), 333, 6, 2, 64
    q, k, v = (torch.randn(2 * tokens, h, dim) for h in (heads, kv_heads, kv_heads))
    q *= torch.exp(torch.randn(2 * tokens, heads, 1))  # of some, the scores are too large for int16
    k *= torch.exp(torch.randn(2 * tokens, kv_heads, 1) / 2)

    def outputs(page_size: int, cuts: list[int], together: bool) -> torch.Tensor:
        pool = kv.PagePool(parsed, 2 * (tokens // page_size + 1), page_size, kv_heads)
        cache = kv.KVCache.paged(pool, 2)
        found, at = [], 0
        for n in cuts:
            rows = slice(at, at + n)
            new, starts = [(x[rows], x[:0]) for x in (q, k, v)], [0, n, n]
            if together:
                new = [(x[rows], x[tokens + at : tokens + at + n]) for x in (q, k, v)]
                starts = [0, n, 2 * n]
            q_, k_, v_ = (torch.cat(pair) for pair in new)
            cache.append(k_, v_, starts)
            found.append(kv.attend(q_, cache.pages, starts, SCORINGS[scoring], backend=name).out[:n])
            at += n
        return torch.cat(found)

    for page_size in (24, 32):
        expected = outputs(page_size, [tokens], False)
        for cuts in ([1] * tokens, [7, 100, 1, 1, 64, 17, 130, 13], [128, 128, 77]):
            assert torch.equal(outputs(page_size, cuts, True), expected)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_come_from_the_own_sequence(name):
    """A long sequence is cut the same way alone and among many others."""
    torch.manual_seed(1)
    format, seqs, tokens = kv.Format.parse("k4v4", 64), 70, 9000
    lengths = [tokens, *[40] * (seqs - 1)]
    q, k, v = torch.randn(seqs, 4, 64), *torch.randn(2, sum(lengths), 2, 64)
    alone, among = (kv.KVCache.contiguous(format, n, 2, backend=name) for n in (1, seqs))
    alone.append(k[:tokens], v[:tokens], [0, tokens])
    among.append(k, v, native_fuzz.starts_of(lengths))
    assert torch.equal(alone.attend(q[:1]).out[0], among.attend(q).out[0])


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_threads(name, threads, monkeypatch):
    cache = filled("k4v3", 9000)
    one, many = torch.randn(1, 8, 128), torch.randn(70, 8, 128)
    x = torch.randn(3000, 2, 128)

    def results() -> list[torch.Tensor]:
        decode, extend = kv.attend(one, cache.pages, backend=name), kv.attend(many, cache.pages, [0, 70], backend=name)
        sparse = kv.attend(one, cache.pages, scoring=kv.Scoring(threshold=2e-4), backend=name)
        return [*decode, *extend, *sparse, *kv.encode(x, cache.format.key, backend=name)]

    threads(1)
    expected = results()
    for count in (2, 3, 4):
        threads(count)
        assert all(map(torch.equal, expected, results()))
    monkeypatch.setattr(abi, "pool", lambda: 0)  # as with a torch that does not lend its threads
    assert all(map(torch.equal, expected, results()))


def test_several_python_threads(threads):
    threads(2)
    cache = filled("k4v4", 5000)
    q = [torch.randn(1, 8, 128) for _ in range(16)]
    expected = [kv.attend(x, cache.pages).out for x in q]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(map(torch.equal, expected, pool.map(lambda x: kv.attend(x, cache.pages).out, q)))


def _child(cache, q, queue):
    queue.put(kv.attend(q, cache.pages).out.tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_fork(threads):
    """A child of a process whose threads have run computes the same and does not hang."""
    threads(2)
    cache, q = filled("k4v4", 20000), torch.randn(1, 8, 128)
    expected = kv.attend(q, cache.pages).out
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(cache, q, queue))
    child.start()
    got = queue.get(timeout=60)
    child.join(timeout=60)
    assert torch.equal(torch.tensor(got), expected)
    assert torch.equal(kv.attend(q, cache.pages).out, expected)


def _before_a_guard(size: int) -> torch.Tensor:
    """Bytes that end where memory that must not be touched begins."""
    step = mmap.PAGESIZE
    whole = -(-size // step) * step
    area = mmap.mmap(-1, whole + step)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(memory.data_ptr() + whole), step, 0) == 0
    return memory[whole - size : whole]


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs mprotect")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize("bits", [*BITS, 16])
def test_reads_stay_inside_the_pages(name, bits, dim):
    format = kv.Format.parse(f"k{bits}v{bits}", dim)
    for page_size in (1, 5, 33):
        size = format.layout(page_size).bytes
        data = _before_a_guard(3 * size).view(3, 1, size)
        table, zeros = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        pages = Pages(format, page_size, data, table, zeros.clone(), zeros)
        for length in range(1, 3 * page_size + 1, max(1, page_size // 2)):
            pages.lengths.zero_()
            kv.append(pages, torch.randn(length, 1, dim), torch.randn(length, 1, dim), [0, length], backend=name)
            q = torch.randn(1, 5, dim)
            got, truth = (kv.attend(q, pages, backend=b).out for b in (name, "reference"))
            torch.testing.assert_close(got, truth, rtol=2e-3, atol=2e-3)


def step_caches(name: str, kind: str, uncompressed: Uncompressed | None) -> list[kv.KVCache]:
    """Equal caches of 3 sequences: for fused steps, for append and attend one after the other, for the reference."""
    format, made = kv.Format.parse("k4v3", 64), []
    key_offset, value_offset = torch.randn(2, 64), torch.randn(2, 64)
    for backend in (name, name, "reference"):
        if kind == "paged":
            pool = kv.PagePool(format, 40, 16, 2, key_offset=key_offset, value_offset=value_offset)
            made.append(kv.KVCache.paged(pool, 3, uncompressed=uncompressed, backend=backend))
        elif kind == "ring":
            made.append(kv.KVCache.ring(format, 3, 2, 40, 4, uncompressed=uncompressed, page_size=8, backend=backend))
        else:
            offsets = {"key_offset": key_offset, "value_offset": value_offset}
            made.append(kv.KVCache.contiguous(format, 3, 2, uncompressed=uncompressed, backend=backend, **offsets))
    return made


@pytest.mark.parametrize(
    "uncompressed", [None, Uncompressed(4, 0, torch.float32), Uncompressed(3, 9, torch.float32)], ids=str
)
@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_append_and_attend(name, kind, uncompressed):
    """One call of the library for both: uncompressed tokens, offsets, soft cap, learned sinks, from empty caches on."""
    torch.manual_seed(3)
    fused, plain, reference = step_caches(name, kind, uncompressed)
    cap, sinks = kv.Scoring(softcap=20.0, window=40, sinks=4), torch.randn(6)
    for counts in ([5, 0, 1], [1, 1, 1], [1, 1, 1], [2, 3, 12], [1, 1, 1], [30, 1, 0], [1, 1, 1], [1, 1, 1]):
        starts = native_fuzz.starts_of(counts)
        q, k, v = torch.randn(starts[-1], 6, 64), *torch.randn(2, starts[-1], 2, 64)
        for scoring, logits in ((None, None), (cap, sinks)) if counts[0] == 1 else ((None, None),):
            options = {"sink_logits": logits, "precision": "float32"}
            part = fused.step(q, k, v, starts, scoring, **options)
            truth = reference.step(q.double(), k, v, starts, scoring, **options)
            if kind != "ring" or max(counts) <= 16:
                plain.append(k, v, starts)
                apart = plain.attend(q, starts, scoring, **options)
            else:  # a ring serves that many queries in pieces only
                apart = plain.step(q, k, v, starts, scoring, **options)
            assert fused.lengths == plain.lengths == reference.lengths
            torch.testing.assert_close(part, apart, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(part.out, truth.out.float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(part.lse, truth.lse.float(), rtol=1e-4, atol=1e-4)
    for seq in range(3):
        for ours, theirs in zip(fused.codes(seq), plain.codes(seq), strict=True):
            assert torch.equal(ours.data, theirs.data)
            assert torch.equal(ours.scale, theirs.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*NAMES, "reference"])
def test_a_balance_gives_the_same_codes_however_tokens_come(name, dtype):
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 40, 2, 64).to(dtype)
    key_scale = torch.rand(2, 64) + 0.5
    uncompressed = Uncompressed(0, 4, dtype)
    format = kv.Format.parse("k8v8", 64)
    whole, single = (kv.KVCache.contiguous(format, 1, 2, uncompressed=uncompressed, backend=name) for _ in range(2))
    assert whole.step(q, k, v, [0, 40], key_scale=key_scale).out.dtype == dtype
    for at in range(40):
        single.step(q[at : at + 1], k[at : at + 1], v[at : at + 1], key_scale=key_scale)
    for ours, theirs in zip(whole.codes(0), single.codes(0), strict=True):
        assert torch.equal(ours.data, theirs.data)
        assert torch.equal(ours.scale, theirs.scale)


@pytest.mark.parametrize(
    "uncompressed", [None, Uncompressed(4, 0, torch.float32), Uncompressed(3, 9, torch.float32)], ids=str
)
@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@pytest.mark.parametrize("name", [*NAMES, "reference"])
def test_a_balance_moves_from_queries_to_keys(name, kind, uncompressed):
    """The same as keys multiplied and queries divided by hand, whatever stores them; the key_scale may change."""
    torch.manual_seed(5)
    given, by_hand, _ = step_caches(name, kind, uncompressed)
    for key_scale in (torch.rand(2, 64) * 4 + 0.25, torch.rand(2, 64) + 0.5):
        for counts in ([5, 0, 1], [1, 1, 1], [1, 1, 1], [2, 3, 12], [1, 1, 1]):
            starts = native_fuzz.starts_of(counts) if counts[0] != 1 else None
            tokens = sum(counts)
            q, k, v = torch.randn(tokens, 6, 64), *torch.randn(2, tokens, 2, 64)
            part = given.step(q, k, v, starts, key_scale=key_scale, precision="float32")
            divided = q / key_scale.repeat_interleave(3, 0)
            wanted = by_hand.step(divided, k * key_scale, v, starts, precision="float32")
            torch.testing.assert_close(part, wanted, rtol=1e-5, atol=1e-5)
    for seq in range(3):
        assert torch.equal(given.codes(seq)[0].data, by_hand.codes(seq)[0].data)


def test_a_step_remembers_no_address_too_long():
    """Arguments of the same kind at other addresses, other kinds in between, and pages that grow."""
    torch.manual_seed(4)
    cache, other = (kv.KVCache.contiguous(kv.Format.parse("k4v4", 64), 1, 2) for _ in range(2))
    for i in range(150):
        dtype = torch.bfloat16 if i % 7 == 3 else torch.float32
        q = torch.randn(1, 64, 4).transpose(1, 2) if i % 5 == 2 else torch.randn(1, 4, 64)
        k, v = torch.randn(2, 1, 2, 64).to(dtype)
        precision = "float32" if i % 11 == 5 else "fast"
        got = cache.step(q.to(dtype), k, v, precision=precision).out
        other.append(k, v)
        torch.testing.assert_close(got, other.attend(q.to(dtype).clone(), precision=precision).out)


def test_a_prepared_step_belongs_to_its_cache():
    """A copy computes on its own memory, and old pages are not kept once they have grown."""
    torch.manual_seed(6)
    q, k, v = torch.randn(1, 4, 64), *torch.randn(2, 1, 2, 64)
    with torch.inference_mode():
        cache = kv.KVCache.contiguous(kv.Format.parse("k4v4", 64), 1, 2, uncompressed=Uncompressed(1))
        for _ in range(3):
            cache.step(q, k, v)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            before = cache.codes(0)[0].data.clone()
            other.step(-q, -k, v)
            assert (cache.lengths, other.lengths) == ([3], [4])
            assert torch.equal(cache.codes(0)[0].data, before)
        old = weakref.ref(cache.pages)
        cache.append(k.expand(100, 2, 64), v.expand(100, 2, 64), [0, 100])
        assert old() is None


def test_damaged_exact_tokens():
    """NaN in a token that is read uncompressed damages the queries that see it, and those only."""
    cache = kv.KVCache.contiguous(kv.Format.parse("k4v4", 64), 2, 1, uncompressed=Uncompressed(4))
    k = torch.randn(4, 1, 64)
    k[1, 0, 5] = float("nan")
    out = cache.step(torch.randn(4, 1, 64), k, torch.randn(4, 1, 64), [0, 2, 4]).out
    assert [bool(row.isnan().all()) for row in out] == [False, True, False, False]
    assert not out[[0, 2, 3]].isnan().any()


def test_float64_is_computed_in_float32():
    cache = filled("k4v4", 100)
    q = torch.randn(1, 4, 128, dtype=torch.float64)
    part = kv.attend(q, cache.pages, backend="native")
    assert part.out.dtype == part.lse.dtype == torch.float64
    truth = kv.attend(q, cache.pages, backend="reference")
    torch.testing.assert_close(part.out, truth.out, rtol=1e-5, atol=1e-5)


def test_a_page_that_is_not_there_damages():
    """A length beyond the pages of a table never becomes a number."""
    cache = filled("k4v4", 64, kv_heads=1)
    pages = cache.pages
    pages.table.fill_(-1)
    for name in NAMES:
        part = kv.attend(torch.randn(1, 2, 128), pages, backend=name)
        assert part.out.isnan().all()
        assert part.lse.isnan().all()


def test_why_not(monkeypatch):
    assert "on the CPU" in str(kv.why_not("native", device="cuda"))
    assert kv.why_not("native", dtype=torch.float64) == "it computes in float32: float64 arguments, too"
    assert kv.backends.select(None, None, torch.device("cpu")).name == "native"
    with pytest.raises(InputError, match="native-generic"):
        kv.why_not("native-sse")
    monkeypatch.setattr(abi, "library", lambda: "there is no library")
    assert native.Native().why_not(None, torch.device("cpu")) == "there is no library"


def test_without_a_library(monkeypatch):
    monkeypatch.setattr(abi, "LIBRARY", "_other.so")
    assert "compiler" in str(abi.library.__wrapped__())


@pytest.mark.parametrize("name", NAMES)
def test_random_cases(name):
    for seed in range(80):
        native_fuzz.check(1_000_000 + seed, name)


def test_the_library_that_was_built_last(tmp_path, monkeypatch):
    """An editable package has a place for the one that was installed, and one for that of `make native`."""
    places = [tmp_path / name for name in ("installed", "sources", "none")]
    monkeypatch.setattr(sys.modules["aurakv.backends"], "__path__", [str(place) for place in places])
    assert abi._built() is None
    for place in places[:2]:
        place.mkdir()
        (place / abi.LIBRARY).touch()
    for last, first in (places[:2], places[1::-1]):
        os.utime(first / abi.LIBRARY, (1e9, 1e9))
        os.utime(last / abi.LIBRARY, (2e9, 2e9))
        assert abi._built() == last / abi.LIBRARY


def test_a_run_refuses_another_library(tmp_path):
    """As `make sanitize` needs it: what is imported from an editable package has not been sanitized."""
    own = Path(abi.library()._name).parent
    for folder, status in ((own, 0), (tmp_path, 4)):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
        command += ["tests/format/test_signs.py", "--native-from", str(folder)]
        run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert run.returncode == status, run.stdout + run.stderr
        assert (f"the native library is to come from {folder}, got {own}" in run.stderr) == (status != 0)
