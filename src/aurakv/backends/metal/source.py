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
from ...format.fit import SCALES
from ...format.levels import CUBIC, POLY7, UNIFORM, boundaries
from ...format.rotation import base_order, hadamard

WIDTHS = (2, 3, 4, 5, 6, 8, 16)  # bits that the kernels know
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as numbers.metal has them
LEVELS = ("BY_SHUFFLE", "BY_UNIFORM", "BY_CUBIC", "BY_POLY7", "BY_TABLE")
GROUP_BYTES = 32768  # of threadgroup memory
SHUFFLED_BITS = 5  # a simdgroup holds as many levels as it has lanes

# What launches pass as the list `numbers`, in this order.
NUMBERS = (
    "SEQS", "TOKENS", "HEADS", "KV_HEADS", "GROUP", "ROWS", "KEYS", "STRIDE", "HEAD_STRIDE", "PAGE_SIZE", "WIDTH",
    "PINNED", "PAGES", "PIECE", "RING", "COUNTED", "ROW", "SCALE", "CODES", "SCALES", "KEY_CODES", "KEY_SCALES",
    "VALUE_CODES", "VALUE_SCALES", "CAUSAL", "WINDOW", "SINKS", "FIRST", "RECENT", "ONLY_UNCOMPRESSED", "SKIPS",
    "SPLITS", "MORE_SPLITS", "ROTATED", "HAS_OFFSET", "HAS_FACTOR", "HAS_LOGITS",
)  # fmt: skip


def lanes(codec: Codec) -> int:
    """How many lanes read a row together: one per unit of 16 channels, rounded up to a power of two, at most all."""
    return min(32, 1 << (-(-codec.dim // 16) - 1).bit_length())


def chunk(codec: Codec, most: int) -> int:
    """The widest equal pieces of a vector's channels, padded to 16, that are at most so wide."""
    units = -(-codec.dim // 16)
    together = 2 if units % 2 == 0 else 1  # as threads read them
    return 16 * max(n for n in range(together, most // 16 + 1, together) if units % n == 0)


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
    text = _constants(codec) + _files(*files)
    return text.replace("SIDE_", f"{name.upper()}_").replace("side_", f"{name}_")


def _constants(codec: Codec) -> str:
    constants: dict[str, object] = {
        "SIDE_BITS": codec.bits,
        "SIDE_DIM": codec.dim,
        "SIDE_ROW": codec.row_bytes,
        "SIDE_SCALE": codec.scale_bytes,
        "SIDE_DTYPE": DTYPES[codec.dtype],
        "SIDE_LANES": lanes(codec),
        "SIDE_ROTATES": int(codec.rotates),
    }
    arrays = ""
    if codec.coded:
        kind, polynomial = _arithmetic(codec)
        constants["SIDE_LEVELS"] = kind
        constants.update(zip(("SIDE_A", "SIDE_B", "SIDE_C", "SIDE_D"), map(_float, polynomial), strict=False))
        constants["SIDE_LEAST_SQUARES"] = int(codec.scale == "lsq")
        constants["SIDE_LARGEST"] = _float(torch.finfo(codec.dtype).max)
        arrays += _array("float SIDE_TABLE", map(_float, codec.levels))
        arrays += _array("float SIDE_BOUNDARIES", map(_float, boundaries(codec.levels)))
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
    return "BY_TABLE", ()


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
    scales = _array("float FIT_SCALES", map(_float, SCALES))
    return _one(codec, constants | {"TRIED": len(SCALES)}, "quantise", "fitted", arrays=scales)


@functools.lru_cache(maxsize=64)
def queries(codec: Codec, dtype: torch.dtype) -> str:
    return _one(codec, {"IN_DTYPE": DTYPES[dtype]}, "queries")


@functools.lru_cache(maxsize=64)
def vectors(codec: Codec, dtype: torch.dtype) -> str:
    """Codes to vectors, scores and weighted sums of this dtype."""
    return _one(codec, {"OUT_DTYPE": DTYPES[dtype]}, "vectors")


@functools.lru_cache(maxsize=64)
def merge(codec: Codec, dtype: torch.dtype) -> str:
    return _one(codec, {"OUT_DTYPE": DTYPES[dtype]}, "merge")


def _one(codec: Codec, constants: dict[str, int], *kernels: str, arrays: str = "") -> str:
    side = _side("side", codec, "codes", "rotation")
    return _HEAD + _defines(dict(constants)) + arrays + _files("numbers", "slots") + side + _files(*kernels)


@functools.lru_cache(maxsize=64)
def attend_rows(format: Format, group: int) -> str:
    return _attend(format, {"DENSE": 0, "GROUP": group}, "attend_rows")


@functools.lru_cache(maxsize=64)
def attend_tiles(format: Format, simds: int, dense: bool) -> str:
    widest = 128 if simds == 4 else 64  # fewer simdgroups: less threadgroup memory, more groups at a time
    constants = {"DENSE": int(dense), "SIMDS": simds}
    pieces = {"KEY_CHUNK": chunk(format.key, widest), "VALUE_CHUNK": chunk(format.value, widest)}
    return _attend(format, constants | pieces, "attend_tiles")


def _attend(format: Format, constants: dict[str, int], kernel: str) -> str:
    sides = _side("key", format.key, "codes") + _side("value", format.value, "codes")
    return _HEAD + _defines(dict(constants)) + _files("numbers", "slots") + sides + _files("scoring", kernel)
