"""merge forms a commutative monoid with lse = −inf as its neutral element; sink is one of its elements."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aurakv as kv
from aurakv.attention.partial import join
from aurakv.errors import InputError

TOKENS, HEADS, DIM = 3, 2, 4
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def partial(seed: int, dtype: torch.dtype, spread: float = 5.0, empty: float = 0.2) -> kv.Partial:
    """Random results, some rows without any key; their out is NaN, which must not matter."""
    generator = torch.Generator().manual_seed(seed)
    lse = spread * torch.randn(TOKENS, HEADS, generator=generator, dtype=torch.float64)
    lse[torch.rand(TOKENS, HEADS, generator=generator) < empty] = -torch.inf
    out = torch.randn(TOKENS, HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype)
    out[lse.isneginf()] = torch.nan
    return kv.Partial(out, lse.to(torch.float64 if dtype == torch.float64 else torch.float32))


def oracle(*parts: kv.Partial) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row in Python's floats: lse and weighted mean from the definition."""
    out, lse = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.float64), torch.zeros(TOKENS, HEADS, dtype=torch.float64)
    for t, h in itertools.product(range(TOKENS), range(HEADS)):
        logs = [float(part.lse[t, h]) for part in parts]
        top = max(logs)
        if top == -math.inf:
            lse[t, h] = top
            continue
        total = math.fsum(math.exp(x - top) for x in logs)
        lse[t, h] = top + math.log(total)
        for x, part in zip(logs, parts, strict=True):
            if x > -math.inf:
                out[t, h] += math.exp(x - top) / total * part.out[t, h].double()
    return out, lse


def close(
    a: kv.Partial, b: kv.Partial | tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, n: int, lse: float = 0.0
) -> None:
    """Equal within n roundings of out, and of lse; where an lse of this size was rounded, its weight is as wrong."""
    eps, weight = torch.finfo(dtype).eps, torch.finfo(a.lse.dtype).eps
    atol = 4 * n * (eps + lse * weight)
    torch.testing.assert_close(a.out.double(), b[0].double(), rtol=0, atol=atol, equal_nan=True)
    atol = 4 * n * weight
    torch.testing.assert_close(a.lse.double(), b[1].double(), rtol=atol, atol=atol, equal_nan=True)


seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
spreads = st.sampled_from([0.01, 5.0, 100.0, 3000.0])
many = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@many
@given(st.lists(seeds, min_size=1, max_size=6), dtypes, spreads)
def test_merge_is_the_weighted_mean(seeds, dtype, spread):
    parts = [partial(seed, dtype, spread) for seed in seeds]
    merged = kv.merge(*parts)
    assert merged.out.dtype == dtype
    assert merged.lse.dtype == parts[0].lse.dtype
    close(merged, oracle(*parts), dtype, len(parts))


@many
@given(st.lists(seeds, min_size=2, max_size=6), st.randoms(use_true_random=False), dtypes, spreads)
def test_merge_is_commutative(seeds, random, dtype, spread):
    parts = [partial(seed, dtype, spread) for seed in seeds]
    shuffled = list(parts)
    random.shuffle(shuffled)
    close(kv.merge(*parts), kv.merge(*shuffled), dtype, len(parts))


@many
@given(st.lists(seeds, min_size=3, max_size=6), st.data(), dtypes, spreads)
def test_merge_is_associative(seeds, data, dtype, spread):
    """Whatever the tree of merges, the result is that of one merge."""
    parts = [partial(seed, dtype, spread) for seed in seeds]
    flat, tree = kv.merge(*parts), list(parts)
    while len(tree) > 1:
        at = data.draw(st.integers(0, len(tree) - 2))
        tree[at : at + 2] = [kv.merge(*tree[at : at + 2])]
    largest = float(flat.lse[flat.lse.isfinite()].abs().max()) if bool(flat.lse.isfinite().any()) else 0.0
    close(flat, tree[0], dtype, len(parts), largest)


@many
@given(seeds, dtypes, st.sampled_from([0.0, 7.0, math.inf, math.nan]), st.booleans())
def test_nothing_is_neutral(seed, dtype, garbage, first):
    part = partial(seed, dtype, empty=0.0)
    nothing = kv.Partial(torch.full_like(part.out, garbage), torch.full_like(part.lse, -torch.inf))
    merged = kv.merge(nothing, part) if first else kv.merge(part, nothing, nothing)
    assert torch.equal(merged.lse, part.lse)
    assert torch.equal(merged.out, part.out)
    both = kv.merge(nothing, nothing)
    assert torch.equal(both.lse, nothing.lse)
    assert not both.out.any(), "no visible key: out is 0"


@many
@given(st.lists(seeds, min_size=1, max_size=4), dtypes, st.integers(0, 3), st.sampled_from(["out", "lse", "both"]))
def test_nan_propagates_and_damages_only_its_row(seeds, dtype, at, where):
    parts = [partial(seed, dtype, empty=0.0) for seed in seeds]
    clean = kv.merge(*parts)
    out, lse = (x.clone() for x in parts[at % len(parts)])
    if where != "lse":
        out[1, 0, 2] = torch.nan
    if where != "out":
        lse[1, 0] = torch.nan
    parts[at % len(parts)] = kv.Partial(out, lse)
    merged = kv.merge(*parts)
    damaged = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bool)
    damaged[1, 0, 2 if where == "out" else slice(None)] = True
    assert torch.equal(merged.out.isnan(), damaged)
    assert torch.equal(merged.lse.isnan(), damaged.all(-1))
    assert torch.equal(merged.out[~damaged], clean.out[~damaged])
    assert torch.equal(merged.lse[~damaged.all(-1)], clean.lse[~damaged.all(-1)])


@many
@given(seeds, dtypes, st.permutations([0, 1, 2]))
def test_an_infinite_sink_takes_everything(seed, dtype, order):
    part = partial(seed, dtype)
    parts = [part, kv.sink(torch.tensor([torch.inf, 0.0]), part), partial(seed + 1, dtype)]
    merged = kv.merge(*(parts[i] for i in order))
    assert bool(torch.isposinf(merged.lse[:, 0]).all())
    assert not merged.out[:, 0].any()
    assert bool(merged.lse[:, 1].isfinite().all())
    again = kv.merge(merged, kv.sink(torch.tensor([torch.inf, torch.inf]), part))
    assert bool(torch.isposinf(again.lse).all())
    assert not again.out.any()
    nan = part._replace(lse=torch.full_like(part.lse, torch.nan))
    assert bool(kv.merge(parts[1], nan).out.isnan().all()), "not even that hides a NaN"


@many
@given(seeds, dtypes, st.lists(st.floats(-50, 50), min_size=HEADS, max_size=HEADS))
def test_sink_is_a_key_with_the_value_zero(seed, dtype, logits):
    part = partial(seed, dtype)
    sink = kv.sink(torch.tensor(logits), part)
    assert sink.out.shape == part.out.shape
    assert sink.lse.dtype == part.lse.dtype
    assert torch.equal(sink.lse, torch.tensor(logits).to(part.lse.dtype).expand(TOKENS, HEADS))
    assert not sink.out.any()
    merged = kv.merge(part, sink)
    share = torch.sigmoid(part.lse.double() - sink.lse.double())[..., None]  # 0 where the part is empty
    expected = torch.where(share > 0, part.out.double(), 0) * share
    lse = torch.logaddexp(part.lse.double(), sink.lse.double())
    close(merged, (expected, lse), dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_minus_infinity_does_nothing(dtype):
    part = partial(5, dtype)
    merged = kv.merge(part, kv.sink(torch.full((HEADS,), -torch.inf), part))
    seen = ~part.lse.isneginf()
    assert torch.equal(merged.lse, part.lse)
    assert torch.equal(merged.out[seen], part.out[seen])
    assert not merged.out[~seen].any()
    assert not seen.all(), "some rows are empty"


def test_merging_many_equal_parts():
    """Rounding does not pile up: 4096 parts with equal lse add log 4096 and leave the mean."""
    part = partial(1, torch.float32, empty=0.0)
    merged = kv.merge(*([part] * 4096))
    close(merged, (part.out, part.lse.double() + math.log(4096)), torch.float32, 8)


def test_a_single_part_is_itself():
    part = partial(2, torch.float16, empty=0.0)
    merged = kv.merge(part)
    assert torch.equal(merged.out, part.out)
    assert torch.equal(merged.lse, part.lse)


def test_what_does_not_fit_is_refused():
    part = partial(3, torch.float32)
    with pytest.raises(InputError, match="at least one"):
        kv.merge()
    with pytest.raises(InputError, match=r"equal shapes, got out \(3, 2, 4\) and \(3, 2, 3\)"):
        kv.merge(part, kv.Partial(part.out[..., :3], part.lse))
    with pytest.raises(InputError, match=r"lse \(3, 2\) and \(3, 1\)"):
        kv.merge(part, kv.Partial(part.out, part.lse[:, :1]))
    with pytest.raises(InputError, match=r"\[2\] \(query heads\), got \[3\]"):
        kv.sink(torch.zeros(3), part)


def test_join_is_merge():
    """Of two parts as attention returns them: empty ones and those behind an infinite sink have out 0."""
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a, b = (
            kv.Partial(
                torch.randn(40, 4, 8, generator=generator).to(dtype),
                (20 * torch.randn(40, 4, generator=generator)).to(
                    torch.float64 if dtype == torch.float64 else torch.float32
                ),
            )
            for _ in range(2)
        )
        for part, rows in ((a, slice(0, 10)), (b, slice(5, 15))):
            part.out[rows], part.lse[rows] = 0, -torch.inf
        for part, rows in ((a, slice(15, 20)), (b, slice(18, 22))):
            part.out[rows], part.lse[rows] = 0, torch.inf
        a.lse[22], b.lse[23], a.out[24] = torch.nan, torch.nan, torch.nan
        b.lse[24] = a.lse[24] - 3
        got, expected = join(a, b), kv.merge(a, b)
        torch.testing.assert_close(got.lse, expected.lse, equal_nan=True)
        torch.testing.assert_close(got.out, expected.out, equal_nan=True)


def test_outputs_of_different_dtypes():
    """In any order: the dtype that holds all of them."""
    for a, b, both in ((1, 2, torch.float32), (2, 3, torch.float32), (0, 3, torch.float64)):
        parts = partial(1, DTYPES[a]), partial(2, DTYPES[b])
        assert kv.merge(*parts).out.dtype == kv.merge(*reversed(parts)).out.dtype == both
