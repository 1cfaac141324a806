"""Random shapes, strides, page tables, widths and options: the native backend against the reference in float64.

A failing case is named by its seed. By hand: python tools/native_fuzz.py 20000 native-avx512
"""

from __future__ import annotations

import dataclasses
import random
import sys

import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.errors import InputError
from aurakv.storage.pages import Pages, allocate

BITS = (2, 3, 4, 5, 6, 8, 16)
CODED_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_codec(rng: random.Random, side: str) -> kv.Codec:
    bits = rng.choice(BITS)
    make = kv.Codec.key if side == "key" else kv.Codec.value
    if bits == 16:
        return make(rng.choice((*CODED_DIMS, 1, 3, 17, 63, 111)), 16, dtype=rng.choice(DTYPES))
    options: dict[str, object] = {"seed": rng.randrange(5)}
    if rng.random() < 0.5:
        options["scale"] = rng.choice(("l2", "lsq"))
    if rng.random() < 0.3:
        options["dtype"] = torch.float32
    if rng.random() < 0.2:
        options["table"] = tuple(sorted(rng.gauss(0, 1.3) for _ in range(2**bits)))
    elif rng.random() < 0.3:
        options["table"] = rng.choice(("lloyd-max", "cubic"))
    return make(rng.choice(CODED_DIMS), bits, **options)


def strided(rng: random.Random, *shape: int) -> torch.Tensor:
    """Normal numbers in a tensor of this shape with random strides."""
    kind = rng.randrange(4)
    if kind == 0:
        return torch.randn(shape)
    if kind == 1:
        return torch.randn(shape[1], shape[0], shape[2]).transpose(0, 1)
    if kind == 2:
        return torch.randn(shape[0] + 1, shape[1] + 2, shape[2] + 3)[1:, 1:-1, 2:-1]
    return torch.randn(shape[0], shape[1], shape[2], 2)[..., 1]


def random_pages(rng: random.Random) -> tuple[Pages, list[int]]:
    """Empty pages with a scrambled table, and how many tokens each sequence will get."""
    format = kv.Format(random_codec(rng, "key"), random_codec(rng, "value"))
    page_size, kv_heads, seqs = (
        rng.choice((1, 2, 3, 7, 16, 24, 32, 64, 100, 300)),
        rng.choice((1, 1, 2, 3)),
        rng.randint(1, 3),
    )
    counts = [rng.choice((0, 1, 2, 5, 17, 40, 64, 130, 200)) for _ in range(seqs)]
    ring = rng.random() < 0.2
    width = rng.randint(2, 6) if ring else max(1, -(-max(counts) // page_size) + rng.randrange(2))
    pinned = rng.randrange(width) if ring else 0
    num_pages = seqs * width + 2
    order = list(range(num_pages))
    rng.shuffle(order)
    table = torch.tensor(order[: seqs * width], dtype=torch.int32).view(seqs, width)
    data = allocate(format, page_size, num_pages, kv_heads, torch.device("cpu"))
    data.fill_(0xFF)  # NaN in every float format
    offsets = [
        torch.randn(kv_heads, codec.dim) if codec.coded and rng.random() < 0.3 else None
        for codec in (format.key, format.value)
    ]
    lengths, overflow = torch.zeros(seqs, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return Pages(format, page_size, data, table, lengths, overflow, ring, pinned, *offsets), counts


def random_scoring(rng: random.Random, pages: Pages) -> kv.Scoring:
    options: dict[str, object] = {}
    if pages.ring or rng.random() < 0.4:
        options["window"] = rng.randint(1, max(1, pages.wrap - pages.page_size) if pages.ring else 150)
        options["sinks"] = (
            rng.randrange(pages.pinned * pages.page_size + 1) if pages.ring else rng.choice((0, 0, 4, 30))
        )
    if not pages.ring and rng.random() < 0.15:
        options["causal"] = False
    if rng.random() < 0.3:
        options["softcap"] = rng.choice((0.5, 5.0, 50.0))
    if rng.random() < 0.3:
        first = min(rng.choice((0, 3, 20)), pages.pinned * pages.page_size if pages.ring else 20)
        options |= {"first": first, "recent": rng.choice((0, 1, 9)), "only_uncompressed": rng.random() < 0.4}
    if rng.random() < 0.2:
        options["threshold"] = rng.choice((1e-9, 1e-6, 1e-4))
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.0, 0.02, 0.3))
    return kv.Scoring(**options)  # type: ignore[arg-type]


def starts_of(counts: list[int]) -> list[int]:
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Same NaN, same infinities, and errors within `relative` of the largest number."""
    got, expected = got.double(), expected.double()
    assert torch.equal(got.isnan(), expected.isnan()), f"{name}: NaN in different places"
    finite = expected.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), expected[~finite].nan_to_num()), f"{name}: infinities differ"
    if finite.any():
        error, size = (got - expected)[finite].abs().max().item(), expected[finite].abs().max().item()
        assert error <= relative * max(size, 1e-3), f"{name}: error {error:.3g} of {size:.3g}, allowed {relative:.3g}"


def check_append(rng: random.Random, pages: Pages, counts: list[int], backend: str) -> None:
    """Append in pieces; the native bytes stand for the same vectors as those of the reference."""
    f, heads = pages.format, pages.kv_heads
    reference = dataclasses.replace(
        pages, data=pages.data.clone(), lengths=pages.lengths.clone(), overflow=pages.overflow.clone()
    )
    done = [0] * len(counts)
    while done != counts:
        piece = [rng.randint(0, n - d) if rng.random() < 0.5 else n - d for n, d in zip(counts, done, strict=True)]
        dtype, bounds = rng.choice(DTYPES), starts_of(piece)
        k, v = (
            strided(rng, bounds[-1], heads, f.key.dim).to(dtype),
            strided(rng, bounds[-1], heads, f.value.dim).to(dtype),
        )
        if bounds[-1] and rng.random() < 0.15:
            k[rng.randrange(bounds[-1]), 0, 0] = float("nan")
        if bounds[-1] and rng.random() < 0.15:
            v[rng.randrange(bounds[-1]), 0, 0] = float("inf")
        kv.append(pages, k, v, bounds, backend=backend)
        kv.append(reference, k, v, bounds, backend="reference")
        done = [a + b for a, b in zip(done, piece, strict=True)]
    assert torch.equal(pages.lengths, reference.lengths)
    for ours, theirs, codec, offset in (
        (pages.key_parts(), reference.key_parts(), f.key, pages.key_offset),
        (pages.value_parts(), reference.value_parts(), f.value, pages.value_offset),
    ):
        # pages [pages, heads, size, …]: decode wants heads before the row
        swap = [
            kv.Codes(x.data.transpose(1, 2), None if x.scale is None else x.scale.transpose(1, 2))
            for x in (ours, theirs)
        ]
        a, b = (kv.decode(x, codec, offset, rotated=True, backend="reference") for x in swap)
        assert torch.equal(a.isnan(), b.isnan()), "append: NaN in different places"
        differ = ((a - b).abs() > 2e-3 * b.abs() + 1e-3).sum().item()  # a coordinate on a boundary may round either way
        assert differ <= 2e-3 * a.numel() + codec.dim, f"append: {differ} of {a.numel()} coordinates differ"
        c = kv.decode(swap[0], codec, offset, backend=backend)
        compare("decode", c, kv.decode(swap[0], codec, offset, dtype=torch.float64, backend="reference"), 1e-5)


def check(seed: int, backend: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pages, counts = random_pages(rng)
    check_append(rng, pages, counts, backend)
    group, dim = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 12, 33)), pages.format.key.dim
    queries = [min(count, rng.choice((0, 1, 1, 1, 2, 5, 30))) for count in counts]
    if pages.ring:
        queries = [min(n, 1 + pages.page_size // 2) for n in queries]
    if rng.random() < 0.5:
        queries = [min(1, n) for n in queries]
    dtype, bounds = rng.choice(DTYPES), starts_of(queries)
    q = (strided(rng, bounds[-1], pages.kv_heads * group, dim) * rng.choice((0.1, 1, 3, 30))).to(dtype)
    if bounds[-1] and rng.random() < 0.05:
        q[rng.randrange(bounds[-1]), 0, 0] = rng.choice((float("nan"), float("inf")))
    scoring = random_scoring(rng, pages)
    precision = rng.choice(("fast", "float32"))
    options: dict[str, object] = {"splits": rng.choice((None, None, 1, 2, 5)), "precision": precision}
    if rng.random() < 0.3:
        options["sink_logits"] = torch.randn(q.shape[1]) * 3
    if rng.random() < 0.1:
        options["ends"] = [max(0, count - rng.randrange(3)) for count in counts]
    if rng.random() < 0.2:
        needed = ops.attend_workspace(pages, q.shape[0], q.shape[1], splits=options["splits"], backend=backend)
        options["workspace"] = torch.empty(needed + 4, dtype=torch.uint8)
    try:
        out, lse = kv.attend(q, pages, bounds, scoring, **options, backend=backend)  # type: ignore[arg-type]
    except InputError as error:
        if str(error).startswith("this ring holds"):  # the random window does not fit the random ring
            return
        raise
    options.pop("workspace", None)
    expected = kv.attend(q.double(), pages, bounds, scoring, **options, backend="reference")  # type: ignore[arg-type]
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    tolerance = 2e-5 if precision == "float32" else 2e-3
    compare("out", out, expected.out, tolerance + EPS[dtype] + scoring.threshold * 300)
    compare("lse", lse, expected.lse, tolerance)


def main() -> None:
    cases, names = int(sys.argv[1]), sys.argv[2:] or ["native"]
    first, all_failed = 0, 0
    for name in names:
        failed = 0
        for seed in range(first, first + cases):
            try:
                check(seed, name)
            except Exception as error:
                failed += 1
                print(f"{name} seed {seed}: {type(error).__name__}: {error}", flush=True)
                if failed > 15:
                    break
            if (seed + 1 - first) % 500 == 0:
                print(f"{name}: {seed + 1 - first} cases so far, {failed} failed", flush=True)
        print(f"{name}: {cases} cases, {failed} failed")
        all_failed += failed
    sys.exit(1 if all_failed else 0)


if __name__ == "__main__":
    main()
