"""Metal source: the files of `shaders/` one after the other, with the constants of a format in front.

A file is written for one "side". Where a kernel reads keys and values it is taken twice, with other names and
constants.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
from collections.abc import Iterable

import numpy as np
import torch

from ...format.codec import Codec, Format
from ...format.fit import LONGEST, SCALES
from ...format.levels import CUBIC, POLY7, UNIFORM, boundaries
from ...format.rotation import base_order, hadamard
from . import loads
from .loads import GROUP_BYTES, Fits

WIDTHS = (2, 3, 4, 5, 6, 8, 16)  # bits that the kernels know
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as numbers.metal has them
LEVELS = ("BY_SHUFFLE", "BY_UNIFORM", "BY_CUBIC", "BY_POLY7")
SHUFFLED_BITS = 5  # lanes hold one level each; wider tables are arithmetic if they can be

# What launches pass as the list `numbers`, in this order.
NUMBERS = (
    "SEQS", "TOKENS", "HEADS", "KV_HEADS", "GROUP", "ROWS", "KEYS", "STRIDE", "HEAD_STRIDE", "PAGE_SIZE", "WIDTH",
    "PINNED", "PAGES", "PIECE", "RING", "COUNTED", "ROW", "SCALE", "CODES", "SCALES", "KEY_CODES", "KEY_SCALES",
    "VALUE_CODES", "VALUE_SCALES", "CAUSAL", "WINDOW", "SINKS", "FIRST", "RECENT", "ONLY_UNCOMPRESSED", "SKIPS",
    "SPLITS", "MORE_SPLITS", "ROTATED", "HAS_OFFSET", "HAS_FACTOR", "HAS_LOGITS",
)  # fmt: skip


def fitting(codec: Codec, weighted: bool) -> tuple[int, int]:
    """How many vectors a threadgroup fits, a simdgroup each, and how many scales of each at once: the most for which
    there is memory, where by weights every scale keeps a level of each coordinate."""
    if not weighted:
        return 4, len(SCALES)
    choices = (4, 8), (2, 8), (1, 8), (1, 4)  # 1,024 channels need the last one
    rounded = -(-codec.dim // 32) * 32
    return next((teams, n) for teams, n in choices if teams * (5 * codec.dim + 4 * n * rounded) <= GROUP_BYTES)


@functools.cache
def _file(name: str) -> str:
    """A file without its comments, line for line: torch reads source as ASCII and would compile nothing else."""
    file = importlib.resources.files(__package__).joinpath("shaders").joinpath(f"{name}.metal")
    return re.sub(r"[ \t]*//[^\n]*", "", file.read_text(encoding="utf-8"))


def _files(*names: str) -> str:
    return "".join(f'#line 1 "{name}.metal"\n{_file(name)}' for name in names)


def _defines(constants: dict[str, object]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in constants.items())


@functools.lru_cache(maxsize=256)
def _side(name: str, codec: Codec, *files: str) -> str:
    """Constants and functions of one side under its name."""
    return _named(name, _constants(codec) + _files(*files))


def _named(side: str, text: str) -> str:
    return text.replace("SIDE_", f"{side.upper()}_").replace("side_", f"{side}_")


def _constants(codec: Codec) -> str:
    constants: dict[str, object] = {
        "SIDE_BITS": codec.bits,
        "SIDE_DIM": codec.dim,
        "SIDE_ROW": codec.row_bytes,
        "SIDE_SCALE": codec.scale_bytes,
        "SIDE_DTYPE": DTYPES[codec.dtype],
        "SIDE_ROTATES": int(codec.rotates),
    }
    arrays, held = "", 1
    if codec.coded:
        kind, polynomial = _arithmetic(codec)
        mirrored = kind == "BY_SHUFFLE" and codec.bits == 8 and _mirrored(codec)
        if kind == "BY_SHUFFLE":
            held = max(1, len(codec.levels) // (64 if mirrored else 32))
        constants["SIDE_MIRRORED"] = int(mirrored)
        constants["SIDE_LEVELS"] = kind
        constants.update(zip(("SIDE_A", "SIDE_B", "SIDE_C", "SIDE_D"), map(_float, polynomial), strict=False))
        constants["SIDE_LEAST_SQUARES"] = int(codec.scale == "lsq")
        constants["SIDE_LARGEST"] = _float(torch.finfo(codec.dtype).max)
        arrays += _array("float SIDE_TABLE", map(_float, codec.levels))
        arrays += _array("float SIDE_BOUNDARIES", map(_float, boundaries(codec.levels)))
    constants["SIDE_HOLDS"] = held
    if codec.rotates:
        order = base_order(codec.dim)
        paley = hadamard(codec.dim)[:order, :order] < 0
        negative = [sign < 0 for sign in codec.sign_list()]
        constants["SIDE_ORDER"], constants["SIDE_ROOT"] = order, _float(codec.dim**-0.5)
        words = [negative[i : i + 32] for i in range(0, codec.dim, 32)]
        arrays += _array("uint SIDE_SIGNS", (f"{_bits(word):#x}u" for word in words))
        if order > 1:
            arrays += _array("ulong SIDE_PALEY_ROWS", (f"{_bits(row):#x}ul" for row in paley.tolist()))
            arrays += _array("ulong SIDE_PALEY_COLUMNS", (f"{_bits(row):#x}ul" for row in paley.T.tolist()))
    return _defines(constants) + arrays


def _arithmetic(codec: Codec) -> tuple[str, tuple[float, ...]]:
    """How a code becomes its level, and the numbers that takes."""
    if codec.bits <= SHUFFLED_BITS:
        return "BY_SHUFFLE", ()
    if codec.table == "uniform":
        return "BY_UNIFORM", (UNIFORM[codec.bits],)
    if codec.table == "cubic":
        return "BY_CUBIC", CUBIC[codec.bits]
    if codec.table == "poly7":
        return "BY_POLY7", POLY7[codec.bits]
    return "BY_SHUFFLE", ()


def _mirrored(codec: Codec) -> bool:
    """Whether half of the levels say all. At 8 bits that saves four of eight shuffles; at 6 the sign would cost as much
    as the second shuffle."""
    return codec.levels == tuple(-x for x in reversed(codec.levels))


def _bits(flags: list[bool]) -> int:
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def _float(x: float) -> str:
    """A float32 that reads back exactly."""
    text = str(np.float32(x))
    assert math.isfinite(float(text))
    return f"{text}f" if set(text) & set(".e") else f"{text}.0f"


def _array(declaration: str, values: Iterable[str]) -> str:
    listed = list(values)
    return f"constant {declaration}[{len(listed)}] = {{{', '.join(listed)}}};\n"


# The library comes before our constants, whose names it does not know.
_HEAD = "#include <metal_stdlib>\nusing namespace metal;\n" + _defines(
    {name: i for i, name in enumerate(LEVELS)} | {f"N_{name}": f"numbers[{i}]" for i, name in enumerate(NUMBERS)}
)


@functools.cache
def claim() -> str:
    """Room for new tokens, and those that already are codes."""
    return _HEAD + _files("numbers", "slots", "claim")


@functools.lru_cache(maxsize=64)
def encode(codec: Codec, dtype: torch.dtype) -> str:
    """Vectors of this dtype to codes, in tensors and in pages."""
    return _one(codec, {"IN_DTYPE": DTYPES[dtype]}, "quantise", "encode")


@functools.lru_cache(maxsize=64)
def fitted(codec: Codec, dtype: torch.dtype, weighted: bool) -> str:
    """As `encode`, with codes that are fitted by weights or by equal ones."""
    teams, at_once = fitting(codec, weighted)
    constants = {"IN_DTYPE": DTYPES[dtype], "WEIGHTED": int(weighted), "TEAMS": teams, "AT_ONCE": at_once}
    scales = _array("float FIT_SCALES", map(_float, SCALES)) + f"constant float FIT_LONGEST = {_float(LONGEST)};\n"
    return _one(codec, constants | {"TRIED": len(SCALES)}, "quantise", "fitted", arrays=scales)


@functools.lru_cache(maxsize=64)
def queries(codec: Codec, dtype: torch.dtype) -> str:
    return _one(codec, {"IN_DTYPE": DTYPES[dtype]}, "queries")


@functools.lru_cache(maxsize=64)
def vectors(codec: Codec, dtype: torch.dtype) -> str:
    """Codes to vectors, scores and weighted sums of this dtype."""
    return _one(codec, {"OUT_DTYPE": DTYPES[dtype], "SIDE_LANES": loads.lanes(codec)}, "vectors")


@functools.lru_cache(maxsize=64)
def merge(codec: Codec, dtype: torch.dtype) -> str:
    return _one(codec, {"OUT_DTYPE": DTYPES[dtype]}, "merge")


def _one(codec: Codec, constants: dict[str, int], *kernels: str, arrays: str = "") -> str:
    side = _side("side", codec, "codes", "rotation")
    return _HEAD + _defines(dict(constants)) + arrays + _files("numbers", "slots") + side + _files(*kernels)


@functools.lru_cache(maxsize=64)
def attend_rows(format: Format, group: int, fits: Fits = (True, True)) -> str:
    constants = {"DENSE": 0, "GROUP": group, "TEAMS": loads.teams(format, fits)}
    for side, codec, fit in zip(("KEY", "VALUE"), (format.key, format.value), fits, strict=True):
        made = loads.row_loads(codec, group, fit)
        constants |= {f"{side}_LANES": made.lanes, f"{side}_SHARES": made.shares}
        constants |= {f"{side}_TAKEN": made.taken, f"{side}_STAGED": int(made.staged)}
        constants |= {f"{side}_SPAN": made.span, f"{side}_GRAIN": made.grain}
    return _attend(format, constants | {"STAGED": loads.staged_pieces(format, fits)}, "rows")


@functools.lru_cache(maxsize=64)
def attend_tiles(format: Format, simds: int, dense: bool, fits: Fits = (True, True)) -> str:
    constants, pieces = {"DENSE": int(dense), "SIMDS": simds}, 1
    for side, made in zip(("KEY", "VALUE"), loads.tiles(format, simds, fits), strict=True):
        constants |= {f"{side}_CHUNK": made.chunk, f"{side}_PAIRED": int(made.paired)}
        constants |= {f"{side}_STAGED": int(made.staged), f"{side}_SPAN": made.span}
        constants |= {f"{side}_PART": made.part, f"{side}_WHOLE": int(made.whole)}
        pieces = max(pieces, made.pieces)
    return _attend(format, constants | {"STAGED": pieces}, "tiles")


def _attend(format: Format, constants: dict[str, int], kind: str) -> str:
    """Codes of both sides, how they are loaded, and the kernel: `rows.metal` with `attend_rows.metal`, or of tiles."""
    sides = (("key", format.key), ("value", format.value))
    codes = "".join(_side(name, codec, "codes") for name, codec in sides)
    loaded = "".join(_named(name, _files(kind)) for name, _ in sides)
    shared = _files("numbers", "slots") + codes + _files("scoring") + loaded
    return _HEAD + _defines(dict(constants)) + shared + _files(f"attend_{kind}")
