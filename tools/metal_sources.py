"""Writes a covering set of Metal sources for Apple's compiler: `python tools/metal_sources.py build/metal`.

Every pair of values of any two parameters of `DOMAIN`, every level table, and for the usual formats at dimension 128
all that launches ask for: each number of query heads and of simdgroups, each dtype. On a Mac:
    for f in build/metal/*.metal; do xcrun -sdk macosx metal -std=metal3.1 -fno-fast-math -c $f -o /dev/null; done
"""

from __future__ import annotations

import functools
import pathlib
import sys

import torch

import aurakv as kv
from aurakv.backends.metal import source
from aurakv.backends.metal.attend import GROUP_ROWS
from aurakv.format.levels import TABLES, widths
from aurakv.testing.cases import covering_rows

USUAL = ("k4v4", "k8v4", "k5v4", "k4v2")  # the default, and formats whose sides differ
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = tuple(
    range(1, GROUP_ROWS + 1)
)  # of attend_rows; more query heads go to attend_tiles, whose source has no group
SIMDS = (1, 2, 4, 8)  # that share a tile
EQUAL_DIMS = tuple((dim, dim) for dim in (64, 80, 96, 112, 128, 192, 256, 512, 576))
DOMAIN = {
    "key": source.WIDTHS,
    "value": source.WIDTHS,
    "dims": (*EQUAL_DIMS, (192, 128), (576, 512)),
    "group": GROUPS,
    "simds": SIMDS,
    "dtype": DTYPES,
    "fits": ((True, True), (True, False), (False, True), (False, False)),
}


@functools.cache
def sources() -> dict[str, str]:
    """Metal source by a name that says what is in it; none is there twice."""
    found: dict[str, str] = {}
    texts: set[str] = set()

    def add(name: str, text: str) -> None:
        if text not in texts:
            assert name not in found, name
            found[name] = text
            texts.add(text)

    def attend(name: str, format: kv.Format, group: int, simds: int, fits: tuple[bool, bool] = (True, True)) -> None:
        name += "" if all(fits) else "".join("-pages" if fit else "-odd-pages" for fit in fits)
        add(f"{name}-rows-{group}", source.attend_rows(format, group, fits))
        add(f"{name}-tiles-{simds}", source.attend_tiles(format, simds, False, fits))

    def vectors(name: str, format: kv.Format, dtype: torch.dtype, weights: tuple[bool, ...] = (True, False)) -> None:
        """Both sides; codes of keys and of values are fitted with these weights."""
        name += f"-of-{short(dtype)}"
        add(f"{name}-queries", source.queries(format.key, dtype))
        add(f"{name}-merge", source.merge(format.value, dtype))
        for side, codec, weighted in zip(("key", "value"), (format.key, format.value), weights, strict=True):
            add(f"{name}-{side}-encode", source.encode(codec, dtype))
            add(f"{name}-{side}-vectors", source.vectors(codec, dtype))
            if codec.coded:
                kind = "fitted" if weighted else "fitted-equal"
                add(f"{name}-{side}-{kind}", source.fitted(codec, dtype, weighted))

    add("claim", source.claim())
    for name in USUAL:
        format = kv.Format.parse(name, 128)
        for group, simds in zip(GROUPS, SIMDS, strict=True):
            attend(f"{name}-128", format, group, simds)
        for dtype in DTYPES:
            vectors(f"{name}-128", format, dtype, (True, False))
            vectors(f"{name}-128", format, dtype, (False, True))
    for dtype in DTYPES:  # of uncompressed tokens
        format, name = kv.Format.parse("k16v16", 128, dtype), f"{short(dtype)}-128"
        for given in DTYPES:
            vectors(name, format, given)
        for group, simds in zip(GROUPS, SIMDS, strict=True):
            attend(name, format, group, simds)
            add(f"{name}-dense-{simds}", source.attend_tiles(format, simds, True))
    for row in covering_rows(DOMAIN):
        format = kv.Format.parse(f"k{row['key']}v{row['value']}", row["dims"], row["dtype"])
        name = f"k{row['key']}v{row['value']}-{'-'.join(map(str, row['dims']))}-{short(row['dtype'])}"
        attend(name, format, row["group"], row["simds"], row["fits"])
        vectors(name, format, row["dtype"])
    for table in TABLES:
        for bits in widths(table):
            format = kv.Format.parse(f"k{bits}:{table}:f32/v{bits}:{table}:l2", 128)
            attend(f"k{bits}v{bits}-{table}", format, 4, 4)
            vectors(f"k{bits}v{bits}-{table}", format, torch.float16)
    for bits in source.WIDTHS:  # 80 channels below 8 bits: pages may split pieces of 16 bytes
        attend(f"k{bits}v{bits}-80-even", kv.Format.parse(f"k{bits}v{bits}", 80), 2, 2, (False, False))
    odd = kv.Format.parse("k16v16:f32", (20, 72), torch.float16)
    attend("odd-vectors", odd, 3, 2)
    vectors("odd-vectors", odd, torch.bfloat16)
    add("odd-vectors-dense", source.attend_tiles(odd, 4, True))
    return found


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sources().items():
        (folder / f"{name}.metal").write_text(text, encoding="utf-8")
