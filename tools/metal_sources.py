"""Writes the Metal sources of many formats for Apple's compiler: `python tools/metal_sources.py build/metal`.

Every width, level table and head dimension, every number of query heads and simdgroups. On a Mac:
    for f in build/metal/*.metal; do xcrun -sdk macosx metal -std=metal3.1 -fno-fast-math -c $f -o /dev/null; done
"""

from __future__ import annotations

import pathlib
import sys

import torch

import aurakv as kv
from aurakv.backends.metal import source
from aurakv.format.levels import CODE_BITS, TABLES, widths

DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 576)


def sources() -> dict[str, str]:
    """Metal source by a name that says what is in it."""
    names = [f"k{bits}v{bits}" for bits in (*CODE_BITS, 16)]
    found = {"claim": source.claim()}
    for i, dim in enumerate(DIMS):
        for j, name in enumerate(names):
            dtype = (torch.float32, torch.float16, torch.bfloat16)[(i + j) % 3]
            found |= _of(
                f"{name}-{dim}", kv.Format.parse(name, dim, dtype), dtype, 1 + (i + j) % 4, (1, 2, 4, 8)[(i + j) % 4]
            )
    for table in TABLES:
        for bits in widths(table):
            name = f"k{bits}:{table}:f32/v{bits}:{table}:l2"
            found |= _of(name.replace(":", "-").replace("/", ""), kv.Format.parse(name, 128), torch.float16, 4, 4)
    for bits in CODE_BITS:  # pages that split pieces of 16 bytes
        format = kv.Format.parse(f"k{bits}v{bits}", 80)
        found[f"k{bits}v{bits}-80-odd-pages-rows"] = source.attend_rows(format, 2, (False, False))
        found[f"k{bits}v{bits}-80-odd-pages-tiles"] = source.attend_tiles(format, 2, False, (False, False))
    odd = kv.Format.parse("k16v16:f32", (20, 72), torch.float16)
    return found | _of("odd-vectors", odd, torch.bfloat16, 3, 2) | {"dense": source.attend_tiles(odd, 4, True)}


def _of(name: str, format: kv.Format, dtype: torch.dtype, group: int, simds: int) -> dict[str, str]:
    found = {
        f"{name}-rows": source.attend_rows(format, group),
        f"{name}-tiles": source.attend_tiles(format, simds, False),
        f"{name}-merge": source.merge(format.value, dtype),
        f"{name}-encode": source.encode(format.key, dtype),
        f"{name}-queries": source.queries(format.key, dtype),
        f"{name}-vectors": source.vectors(format.value, dtype),
    }
    if format.key.coded:
        found[f"{name}-fitted"] = source.fitted(format.key, dtype, True)
        found[f"{name}-fitted-equal"] = source.fitted(format.value, dtype, False)
    return found


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sources().items():
        (folder / f"{name}.metal").write_text(text, encoding="utf-8")
