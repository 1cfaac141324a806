"""Named conformance cases: about a hundred chosen ones, and a pairwise covering set of all parameters."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from ..format.names import BITS

DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 128),
    (192, 192),
    (256, 256),
    (512, 512),
    (576, 512),
)
GROUPS = (1, 2, 3, 4, 7, 8, 16)

# New tokens of each sequence in each step; one step appends them and attends with their queries.
PHASES: dict[str, tuple[tuple[int, ...], ...]] = {
    "decode": ((9, 33, 0), (1, 1, 1), (1, 0, 1)),
    "verify": ((20, 3, 0), (5, 2, 4), (1, 3, 1)),
    "extend": ((17, 40, 1), (30, 1, 33)),
    "prefill": ((70, 0, 31),),
    "mixed": ((20, 9, 0), (1, 1, 1), (5, 0, 3), (40, 1, 2), (0, 0, 1)),
    "long": ((150, 10, 0), (1, 1, 1)),
}


@dataclass(frozen=True)
class Case:
    """One configuration of everything. `name` is unique and says what is special."""

    name: str
    format: str = "k4v4"
    dims: tuple[int, int] = (64, 64)
    kv_heads: int = 2
    group: int = 2
    storage: str = "contiguous"
    page_size: int = 16
    phase: str = "mixed"
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    sink_logits: str = "none"  # none, normal, -inf, +inf
    uncompressed: tuple[int, int] = (0, 0)  # first, recent
    offset: bool = False
    threshold: float = 0.0
    splits: int | None = None
    damage: str = "none"  # none, key, value: NaN in one stored vector
    stretch: float = 1.0  # of the queries: large values make a peaked softmax

    def __post_init__(self) -> None:
        if self.storage == "ring" and self.window is None:
            object.__setattr__(self, "window", 24)


def _widths() -> list[Case]:
    """Every pair of widths, with the other parameters taking turns."""
    turns = itertools.cycle(
        itertools.product(("contiguous", "ring", "paged"), ("decode", "verify", "extend"), (1, 4, 3))
    )
    cases = []
    for (key, value), (storage, phase, group) in zip(itertools.product(BITS, BITS), turns, strict=False):
        format = f"k{key}v{value}"
        cases.append(Case(f"width-{format}", format, (128, 128), storage=storage, phase=phase, group=group, sinks=3))
    return cases


def _special() -> list[Case]:
    f16, bf16 = torch.float16, torch.bfloat16
    cases = [Case(f"dim-{a}-{b}", "k4v3", (a, b), group=3, storage="paged", phase="decode") for a, b in DIMS]
    cases += [Case(f"group-{g}", group=g, dims=(96, 96), phase="verify") for g in GROUPS]
    cases += [
        Case("multi-head-many", kv_heads=5, group=1, storage="paged"),
        Case("single-kv-head", kv_heads=1, group=8, phase="long"),
        Case("float16", dtype=f16, storage="paged"),
        Case("bfloat16", dtype=bf16, storage="ring"),
        Case("float16-prefill", "k8v4", dtype=f16, phase="prefill", softcap=30.0),
        Case("bfloat16-extend", "k3v2", dtype=bf16, phase="extend"),
        Case("window", window=11, phase="extend"),
        Case("window-sinks", window=11, sinks=3, storage="paged"),
        Case("window-one", window=1, phase="verify"),
        Case("window-sinks-cap-logits", window=20, sinks=4, softcap=5.0, sink_logits="normal", storage="paged"),
        Case("softcap", softcap=2.0, stretch=5.0),
        Case("softcap-offset", softcap=3.0, offset=True, stretch=3.0, storage="paged"),
        Case("sink-logits", sink_logits="normal"),
        Case("sink-logits-minus-inf", sink_logits="-inf", phase="decode"),
        Case("sink-logits-plus-inf", sink_logits="+inf", phase="decode"),
        Case("sink-logits-nothing-visible", sink_logits="normal", phase="decode", uncompressed=(0, 0), window=1),
        Case("ring-wraps", storage="ring", window=13, sinks=5, phase="long"),
        Case("ring-no-sinks", "k2v2", storage="ring", window=24, phase="long"),
        Case("ring-pinned-pages", storage="ring", window=10, sinks=17, phase="long", group=7),
        Case("ring-odd-page", storage="ring", window=10, sinks=3, page_size=48, phase="long"),
        Case("pages-large", storage="paged", page_size=256, phase="mixed"),
        Case("pages-odd", storage="paged", page_size=24, phase="long"),
        Case("pages-64", "k3v3", (128, 128), storage="paged", page_size=64, phase="long"),
        Case("all-keys", causal=False, phase="extend"),
        Case("all-keys-window", causal=False, window=9, sinks=2, phase="verify", storage="paged"),
        Case("uncompressed-first-recent", uncompressed=(4, 12), storage="paged"),
        Case("uncompressed-recent-prefill", uncompressed=(0, 20), phase="prefill"),
        Case("uncompressed-first-only", uncompressed=(6, 0), phase="verify"),
        Case(
            "uncompressed-first-offset", uncompressed=(4, 0), offset=True, storage="paged", phase="mixed", softcap=6.0
        ),
        Case(
            "uncompressed-first-ring",
            uncompressed=(4, 0),
            storage="ring",
            window=11,
            sinks=2,
            phase="long",
            offset=True,
        ),
        Case("uncompressed-ring", uncompressed=(3, 9), storage="ring", sinks=5, phase="long", sink_logits="normal"),
        Case("uncompressed-cap-logits-offset", uncompressed=(2, 7), softcap=4.0, sink_logits="normal", offset=True),
        Case("offset", offset=True),
        Case("offset-5-bits", "k5v5", (80, 80), offset=True, storage="ring", sinks=2),
        Case("splits-1", splits=1, phase="long"),
        Case("splits-7", splits=7, phase="long", storage="paged", window=50, sinks=2),
        Case("splits-more-than-tokens", splits=64, phase="decode"),
        Case("threshold", threshold=1e-3, phase="long"),
        Case("peaked", stretch=20.0, phase="long"),
        Case("peaked-bfloat16", "k8v8", stretch=20.0, dtype=bf16, storage="paged"),
        Case("damaged-key", damage="key", window=15, sinks=2, phase="extend"),
        Case("damaged-value", damage="value", window=15, sinks=2, phase="extend", storage="paged"),
        Case("damaged-key-16", "k16v16:f32", damage="key", phase="verify"),
        Case("damaged-value-16", "k4v16", damage="value", window=9, phase="mixed", storage="ring"),
        Case("16-as-float32", "k16:f32/v16:f32", dtype=torch.float32),
        Case("16-as-float16", "k16:f16/v4", dtype=f16, storage="paged"),
        Case("scale-float32", "k4:f32/v4:f32", storage="ring"),
        Case("scale-lsq-l2", "k4:lsq/v4:l2"),
        Case("table-lloyd-max", "k4:lloyd-max/v4:lloyd-max", dims=(128, 128)),
        Case("table-cubic-minifloat", "k4:cubic/v4:minifloat", dims=(128, 128), storage="paged"),
        Case("table-wide", "k8:lloyd-max/v8:cubic", storage="paged"),
        Case("table-wide-5-6", "k5:lloyd-max/v6:lloyd-max", storage="ring", sinks=2),
        Case("table-uniform", "k2:uniform/v2:uniform", dims=(128, 128), storage="paged"),
        Case("table-of-a-user", "k2:[-1.5,-0.25,0.5,2.0]/v3:[-2,-1,-0.5,0,0.25,1,1.5,2]"),
        Case("seeds", "k4:seed7/v4:seed123456789"),
    ]
    return cases


CASES: tuple[Case, ...] = (*_widths(), *_special())

_DOMAIN: dict[str, tuple[Any, ...]] = {
    "key": BITS,
    "value": BITS,
    "dims": DIMS,
    "group": GROUPS,
    "storage": ("contiguous", "ring", "paged"),
    "page_size": (16, 24, 64),
    "phase": tuple(PHASES),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ((True, None, 0), (True, 12, 0), (True, 24, 5), (False, None, 0), (False, 20, 3)),
    "softcap": (None, 6.0),
    "sink_logits": ("none", "normal"),
    "uncompressed": ((0, 0), (4, 12), (0, 9)),
    "offset": (False, True),
    "splits": (None, 3),
    "damage": ("none", "key", "value"),
}


def covering_set(seed: int = 0) -> list[Case]:
    """Cases in which every pair of values of any two parameters occurs."""
    return [_from_row(number, row) for number, row in enumerate(covering_rows(_DOMAIN, seed))]


def covering_rows(domain: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Values by name such that every pair of values of any two names occurs, built greedily."""
    rng = random.Random(seed)
    names = list(domain)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(domain[names[a]]))
        for y in range(len(domain[names[b]]))
    }
    rows: list[list[int]] = []
    while missing:
        a, x, b, y = min(missing)
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(30):
            row = [rng.randrange(len(domain[name])) for name in names]
            row[a], row[b] = x, y
            gain = sum((i, row[i], j, row[j]) in missing for i, j in itertools.combinations(range(len(names)), 2))
            best = max(best, (gain, row))
        rows.append(best[1])
        missing -= {(i, best[1][i], j, best[1][j]) for i, j in itertools.combinations(range(len(names)), 2)}
    return [{name: domain[name][i] for name, i in zip(names, row, strict=True)} for row in rows]


def _from_row(number: int, row: dict[str, Any]) -> Case:
    causal, window, sinks = row.pop("mask")
    causal = causal or row["storage"] == "ring"  # a ring has no future to see
    key, value, dims = row.pop("key"), row.pop("value"), row["dims"]
    case = Case("", f"k{key}v{value}", causal=causal, window=window, sinks=sinks, **row)
    offset = case.offset and key != 16 and value != 16
    parts = [
        case.storage,
        case.phase,
        f"d{dims[0]}-{dims[1]}",
        f"g{case.group}",
        str(case.dtype).removeprefix("torch."),
    ]
    return dataclasses.replace(case, name=f"cover-{number}-{case.format}-" + "-".join(parts), offset=offset)
