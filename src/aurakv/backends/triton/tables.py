"""What kernels are specialised by: how a side decodes, and the constant tensors that go with it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ...codebook import Levels, boundaries
from ...codec import Codec
from ...rotation import hadamard, signs
from .codes import INTERPRETED

FAST_ERROR = 3e-5  # of a level, relative: below what rounding to float16 costs
KEY_ERROR = 1.5e-4  # of a key's level in float16, relative
PAIR_UNIT = 16.0  # keeps the second float16 of a level out of the subnormal range
MAX_TERMS = 8
CELLS = 32  # of a grid over boundaries: the lanes of a warp

# Sums of products run over at least this many elements: the smaller the pieces that an operand is made from, the more
# elements Triton 3.6 lays out at a time (16 for pieces of 16 bits), and shorter sums count some of them several times.
LEAST_TILE = 32

DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Side(NamedTuple):
    """Constexpr of attention and decoding: how keys or values are stored and multiplied."""

    dim: int
    bits: int
    bytes: int  # of a row
    dtype: Any  # of scales, or of raw vectors
    columns: int  # of a tile: 8·groups, or dim rounded up to a power of two for raw vectors
    groups: int
    coef: tuple[float, ...]
    asm: str
    unit: float  # what levels are multiplied by, so that they are close to float16 numbers
    pairs: bool  # whether a key's level is the sum of two float16 numbers
    operand: Any  # dtype of matrix products; keys in float16 are multiplied by queries in two parts
    precision: str  # of float32 products; tf32x3 is as good as float32


class Call(NamedTuple):
    """Constexpr of attention: what a call asks for."""

    place: int  # where keys lie, see attend_kernels
    page: int  # tokens
    ring: bool
    seqs: int  # see slots.find_block
    causal: bool
    window: bool
    exact: int  # see masks
    cap: bool
    sparse: bool
    fused: bool  # queries are rotated here
    final: bool  # results are rotated back here


class Encoder(NamedTuple):
    """Constexpr of encoding."""

    dim: int
    bits: int
    columns: int
    groups: int
    chunk: int  # coordinates rotated at a time
    coef: tuple[float, ...]
    lsq: bool
    post: float  # factor after the rotation, see `matrix`
    halvings: int  # likewise
    largest: float  # scale that is stored
    operand: Any  # dtype of the rotation's product
    parts: int  # numbers of that dtype that add up to a coordinate


class Writer(NamedTuple):
    """Constexpr of append and encode: an Encoder, and how it quantises."""

    how: Encoder
    alone: bool = False  # each warp has vectors of its own, see encode_warp
    groups: str = ""  # PTX that quantises groups by cells, "" to look boundaries and levels up
    grid: tuple[float, ...] = ()  # slope and start of Cells, and their number, to look boundaries up by; () to search
    square: float = 0.0  # see codes.energy_of


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def operand_of(dtype: torch.dtype) -> Any:
    """What products of this dtype are computed in; the interpreter multiplies no bfloat16."""
    return tl.float32 if dtype == torch.bfloat16 and INTERPRETED.value else DTYPES[dtype]


def columns(codec: Codec) -> int:
    """Width of a tile, at least LEAST_TILE."""
    return _columns(codec.dim)


def _columns(dim: int) -> int:
    return max(LEAST_TILE, 1 << (dim - 1).bit_length())


@functools.cache
def side(codec: Codec, exact: bool, query: torch.dtype, key: bool = False) -> Side:
    """Products with codes run in float16. A peaked softmax magnifies errors of keys: if float16 does not hold their
    table nearly exactly, each level is a sum of two. Products with raw vectors run in their own type if the query has
    it, else in float32."""
    width, shape = columns(codec), (codec.dim, codec.bits, codec.row_bytes, DTYPES[codec.dtype])
    if codec.coded:
        if exact:  # tensor cores cut sums off instead of rounding them: long ones take the format with fewer steps
            precision = "bf16x6" if key and codec.dim > 256 else "tf32x3"
            return Side(*shape, width, width // 8, (), "", 1.0, False, tl.float32, precision)
        factor = float16_unit(codec.levels) if key else 1.0
        if not factor:
            coef = curve(codec.levels)
            return Side(*shape, width, width // 8, coef, "", PAIR_UNIT, True, tl.float16, "tf32x3")
        asm = "" if INTERPRETED.value else _nibble_asm(codec.levels, codec.bits, factor)
        coef = () if asm else curve(codec.levels)
        return Side(*shape, width, width // 8, coef, asm, factor, False, tl.float16, "tf32x3")
    same = operand_of(codec.dtype) != tl.float32 and codec.dtype == query and not exact
    single = not exact and torch.float32 not in (codec.dtype, query)  # both fit into tf32
    operand = DTYPES[codec.dtype] if same else tl.float32
    return Side(*shape, width, 0, (), "", 1.0, False, operand, "tf32" if single else "tf32x3")


@functools.cache
def float16_unit(levels: Levels) -> float:
    """A factor in [1, 2) that takes the levels closest to float16 numbers; 0.0 if none takes them close enough."""
    if len(levels) > 16:
        return 0.0
    table = np.abs(np.array([x for x in levels if x != 0]))
    whole = np.outer(1 / table, np.arange(1, 129)).ravel()  # takes some level to a small whole number
    units = np.concatenate([whole, np.linspace(1, 2, 1 << 17)])
    units = np.float32(units / 2.0 ** np.floor(np.log2(units))).astype(np.float64)
    error = np.zeros(len(units))
    for level in table:
        error = np.maximum(error, np.abs(np.float16(level * units).astype(np.float64) / (level * units) - 1))
    best = int(error.argmin())
    return float(units[best]) if error[best] <= KEY_ERROR else 0.0


@functools.cache
def encoder(codec: Codec, source: torch.dtype, changed: bool) -> Encoder:
    """changed: vectors get a balance or an offset in float32, which three bfloat16 numbers hold as well."""
    width = columns(codec)
    if not codec.coded:
        return Encoder(codec.dim, 16, width, 0, 16, (), False, 1.0, 0, 0.0, tl.float32, 1)
    operand = operand_of(torch.bfloat16 if changed else source)
    chunk = min(codec.dim & -codec.dim, max(16, (8192 if operand == tl.float32 else 16384) // width))
    return Encoder(
        codec.dim,
        codec.bits,
        width,
        width // 8,
        chunk,
        cubic(codec.levels),
        codec.scale == "lsq",
        unit(codec),
        _halvings(codec.dim),
        torch.finfo(codec.dtype).max,
        operand,
        3 if changed and operand == tl.bfloat16 else 1,
    )


def bounds(codec: Codec, writer: Writer, device: torch.device) -> Tensor:
    """What p_bounds points to."""
    if writer.groups:
        return _cell_tensor(codec.levels, writer.square > 0, device)
    return _grid_tensor(codec.levels, device) if writer.grid else codec.boundary_tensor(torch.float32, device)


class Cells(NamedTuple):
    """A grid over a table's boundaries: z belongs to cell rint((len(bounds) − 2) · clamp(slope·z + start, 0, 1))."""

    slope: float
    start: float
    bounds: tuple[float, ...]  # the boundary inside each cell, +inf where there is none
    below: tuple[int, ...]  # how many boundaries are below those


@functools.cache
def cells(levels: Levels, count: int = CELLS) -> Cells | None:
    """None where no grid of this many cells has at most one boundary in each, none of them next to the cell's edge."""
    edges = np.array(boundaries(levels), np.float64)
    if len(levels) > count // 2 or not np.all(np.diff(edges) > 0):
        return None
    for widening in np.linspace(0.01, 0.5, 50):
        first, last = edges[0], edges[-1]
        margin = widening * (last - first) if last > first else 1.0
        slope = float(np.float32(1 / (last - first + margin)))
        start = float(np.float32(0.5 - slope * (first + last) / 2))
        place = (count - 2) * (slope * edges + start)
        cell = np.rint(place).astype(int)
        if len(set(cell)) == len(cell) and np.abs(place - cell).max() < 0.49:
            bounds = np.full(count, np.inf)
            bounds[cell] = edges
            below = np.searchsorted(cell, np.arange(count))
            return Cells(slope, start, tuple(float(x) for x in bounds), tuple(int(n) for n in below))
    return None


@functools.cache
def wide_cells(levels: Levels) -> Cells | None:
    """The smallest grid for a table in memory, if there is one."""
    found = (cells(levels, 1 << bits) for bits in range(5, 14))
    return next((grid for grid in found if grid), None)


@functools.cache
def _grid_tensor(levels: Levels, device: torch.device) -> Tensor:
    """Boundaries by cell, then the numbers of those below them."""
    grid = wide_cells(levels)
    assert grid is not None
    with torch.inference_mode(False):
        return torch.tensor([grid.bounds, grid.below], dtype=torch.float32, device=device)


@functools.cache
def _cell_tensor(levels: Levels, squared: bool, device: torch.device) -> Tensor:
    """32 times the bits of: boundaries by cell with the number of those below in their lowest bits; levels by code, or
    with integer squares the first word of `_square_words`, for ptxas copies what it knows to be the same in all lanes.
    """
    grid = cells(levels)
    assert grid is not None
    marked = np.array(grid.bounds, np.float32).view(np.int32) & ~15 | np.array(grid.below, np.int32)
    known = np.resize(np.array(levels, np.float32), CELLS).view(np.int32)
    if squared:
        known = np.full(CELLS, _square_words(levels)[0], np.int32)
    with torch.inference_mode(False):
        return torch.from_numpy(np.stack([marked, known])).to(device)


@functools.cache
def writer(codec: Codec, source: torch.dtype, changed: bool, alone: bool = False) -> Writer:
    """alone: for warps with vectors of their own, if `factored` says that they can have them."""
    how = encoder(codec, source, changed)
    if not codec.coded:
        return Writer(how)
    lsq = codec.scale == "lsq"
    groups = "" if INTERPRETED.value else _groups_asm(codec.levels, lsq)
    if not groups:
        grid = wide_cells(codec.levels)
        return Writer(how, grid=(grid.slope, grid.start, len(grid.bounds)) if grid else ())
    found = None if lsq else _square_table(codec.levels)
    return Writer(how, alone, groups, square=found[1] ** 2 if found else 0.0)


def single_product(how: Encoder) -> bool:
    """Whether a rotation is one product of 16-bit numbers."""
    return how.operand != tl.float32 and how.parts == 1


def factored(codec: Codec, source: torch.dtype, changed: bool) -> bool:
    """Whether one warp can rotate vectors without the help of others, and quantises them by cells."""
    chosen = writer(codec, source, changed)
    return bool(chosen.groups) and codec.dim in (64, 128) and single_product(chosen.how)


@functools.cache
def _groups_asm(levels: Levels, lsq: bool) -> str:
    """PTX for a group of 8 coordinates y $3 … $10: $0 their codes, packed; $1 the sum of the squares of the levels and
    $15; $2 that of their products with y and $16 (lsq). $11 is the inverse of the size $12 that y is divided by; lane i
    holds the marked boundary of cell i in $13 and the level of code i mod n in $14.

    The low bits of 2^23 + n are n, and a shuffle reads no others. The sign of a difference is the comparison. Codes are
    pushed into the word from above, so that the bits above them are lost. Marks move boundaries by up to 2e-6 of them
    (and infinity to NaN, which nothing exceeds either)."""
    grid, bits = cells(levels), len(levels).bit_length() - 1
    if grid is None:
        return ""
    slope, start, last, magic = (_hex(x) for x in (grid.slope, grid.start, CELLS - 2.0, 2.0**23))
    squares = [] if lsq else _squares_asm(levels)
    lines = [".reg .f32 a, d, l, p, s; .reg .b32 e, n, t, w;", f"mul.rn.f32 a, $11, {slope};"]
    lines += ["mov.b32 w, 0; mov.b32 e, $15; mov.f32 p, $16;"]
    for y in (f"${i}" for i in range(3, 11)):
        lines += [f"fma.rn.sat.f32 s, {y}, a, {start};", f"fma.rn.f32 s, s, {last}, {magic};", "mov.b32 n, s;"]
        lines += ["shfl.sync.idx.b32 n, $13, n, 31, 0xffffffff;", "mov.b32 s, n;"]
        lines += [f"neg.f32 d, {y};", "fma.rn.f32 s, s, $12, d;", "mov.b32 t, s;", "shr.u32 t, t, 31;"]
        lines += ["add.u32 n, n, t;", f"shf.r.wrap.b32 w, w, n, {bits};"]
        if not squares:
            lines += ["shfl.sync.idx.b32 l, $14, n, 31, 0xffffffff;", "fma.rn.f32 e, l, l, e;"]
        if lsq:
            lines.append(f"fma.rn.f32 p, {y}, l, p;")
    lines.append(f"shr.u32 w, w, {32 - 8 * bits};")
    return "\n".join(["{", *lines, *squares, "mov.b32 $0, w; mov.b32 $1, e; mov.f32 $2, p;", "}"])


def _square_table(levels: Levels) -> tuple[list[int], float] | None:
    """The positive levels of 4 bits as integers, and their step; None where levels are no integers times a step, or not
    the same on both sides."""
    found = integers(levels) if len(levels) == 16 and _symmetric(levels) else None
    return None if found is None else (found[0][8:], found[1])


def _square_words(levels: Levels) -> list[int]:
    """The integers of `_square_table` as bytes of two words; [] where there are none."""
    found = _square_table(levels)
    return [sum(n << 8 * i for i, n in enumerate(found[0][at : at + 4])) for at in (0, 4)] if found else []


def _squares_asm(levels: Levels) -> list[str]:
    """PTX: e plus the squares of the integers that are the levels of the 8 codes of w, without a shuffle; $14 has the
    first of _square_words. [] where there are none."""
    words = _square_words(levels)
    if not words:
        return []
    return [
        "not.b32 n, w;", "and.b32 n, n, 0x88888888;", "shr.u32 t, n, 3;", "sub.u32 n, n, t;",  # 7 for codes under 8
        "lop3.b32 n, w, n, 0x77777777, 0x28;",  # (w ^ n) & 7…: the place in the upper half of the table
        f"prmt.b32 t, $14, {words[1]}, n;", "dp4a.u32.u32 e, t, t, e;",
        "shr.u32 n, n, 16;", f"prmt.b32 n, $14, {words[1]}, n;", "dp4a.u32.u32 e, n, n, e;",
    ]  # fmt: skip


@functools.cache
def lane_matrix(codec: Codec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What encode_warp loads: int32 [4, 32, 4], the words of the tensor cores' second operand, a Hadamard matrix of 32
    coordinates scaled like `matrix`, [column quarter, lane, 2·k-step + half]; then signs of coordinates, two in a word,
    as those of zeros."""
    lane, tile, step, half, pair = torch.meshgrid(*(torch.arange(n) for n in (32, 4, 2, 2, 2)), indexing="ij")
    k = 16 * step + 8 * half + 2 * (lane % 4) + pair  # of the coordinate's bits
    n = 8 * tile + lane // 4
    rows, columns = encode_bits(codec.dim)
    meet = torch.stack([(k >> rows.index(bit)) & (n >> columns.index(bit)) & 1 for bit in rows]).sum(0)
    entries = ((1 - 2 * (meet % 2)) * 2.0 ** -_halvings(codec.dim)).permute(1, 0, 2, 3, 4).to(dtype)
    sign = torch.where(torch.tensor(signs(codec.dim, codec.seed)) < 0, -0.0, 0.0).to(dtype)
    with torch.inference_mode(False):
        return torch.cat([x.contiguous().flatten().view(torch.int32) for x in (entries, sign)]).to(device)


def encode_bits(dim: int) -> tuple[list[int], list[int]]:
    """The bits of a coordinate that are the bits of a row and of a column of `lane_matrix`, from the lowest on.

    A lane reads 8 neighbours at a time (its four share 32), two in a word, and gets dim / 4 neighbours as results:
    bits 1 and 2 of a column are its quarter. The bits that are missing count the products.
    """
    return ([0, 3, 4, 5, 6], [0, 5, 6, 3, 4]) if dim == 128 else ([0, 3, 4, 5, 2], [0, 4, 5, 2, 3])


def _hex(x: float) -> str:
    """A float32 constant of PTX."""
    return f"0f{int(np.float32(x).view(np.uint32)):08X}"


@functools.cache
def matrix(
    dim: int, seed: int, dtype: torch.dtype, device: torch.device, transposed: bool = False, natural: bool = False
) -> Tensor:
    """R·√dim / 2^halvings: ± a power of two, so exact in every dtype, and no sum overflows that R's would not.

    [dim, columns] with entry (c, i) of coordinate c of x and column i of a rotated tile; or transposed. `natural`:
    column i is coordinate i.
    """
    width = _columns(dim)
    signed = hadamard(dim) * torch.tensor(signs(dim, seed), dtype=torch.float64)  # [rotated, c]
    padded = torch.zeros(dim, width, dtype=torch.float64)
    column = torch.arange(width)
    coordinate = column if natural else column % (width // 8) * 8 + column // (width // 8)
    padded[:, coordinate < dim] = signed.T[:, coordinate[coordinate < dim]]
    padded *= 2.0 ** -_halvings(dim)
    with torch.inference_mode(False):  # cached: must not become an inference tensor
        return (padded.T if transposed else padded).contiguous().to(device=device, dtype=dtype)


def level_tensor(codec: Codec, how: Side, device: torch.device) -> Tensor | None:
    """What p_levels points to."""
    if not codec.coded:
        return None
    return _pairs(codec.levels, device) if how.pairs else codec.level_tensor(torch.float32, device)


@functools.cache
def _pairs(levels: Levels, device: torch.device) -> Tensor:
    """Each level times PAIR_UNIT as two float16 numbers, the larger one in the lower half of a word."""
    exact = np.array(levels) * PAIR_UNIT
    first = exact.astype(np.float16)
    pairs = np.stack([first, (exact - first.astype(np.float64)).astype(np.float16)], 1)
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(pairs).view(np.int32)[:, 0].copy()).to(device)


def unrotate_chunk(codec: Codec) -> int:
    """How many coordinates are rotated back at a time: a power of two that divides the dimension."""
    return min(codec.dim & -codec.dim, max(16, 4096 // columns(codec)))


def unit(codec: Codec) -> float:
    """What a product with `matrix` is to be multiplied by."""
    return 2.0 ** _halvings(codec.dim) / math.sqrt(codec.dim)


def _halvings(dim: int) -> int:
    return math.isqrt(dim).bit_length() - 1


@functools.cache
def curve(levels: Levels) -> tuple[float, ...]:
    """Coefficients of an arithmetic for the levels, within FAST_ERROR; () if there is none short enough.

    Two are those of `cubic`. More are those of a polynomial p with level = x·p(log2(1 + 1/n − x²)),
    x = (2·code + 1)/n − 1: the best levels for a normal distribution follow its quantiles, which grow like that.
    """
    coef = cubic(levels)
    if coef or not _symmetric(levels):
        return coef
    n, half = len(levels), np.array(levels[len(levels) // 2 :])
    if half[0] <= 0:
        return ()
    x = (np.arange(len(half)) + 0.5) / len(half)
    for terms in range(3, min(len(half), MAX_TERMS) + 1):
        powers = np.stack([x * np.log2(1 + 1 / n - x * x) ** i for i in range(terms)], 1)
        weight = 1 / half
        for _ in range(40):  # reweighted least squares approach the smallest maximum
            found = np.linalg.lstsq(powers * weight[:, None], half * weight, rcond=None)[0]
            error = np.abs(powers @ np.float32(found) - half) / half
            if error.max() <= FAST_ERROR:
                return tuple(float(np.float32(c)) for c in found)
            weight = weight * (0.3 + error / error.max())
    return ()


@functools.cache
def cubic(levels: Levels) -> tuple[float, ...]:
    """(a, b) with level = x·(a + b·x²), x = 2·code + 1 − n, if that is exact but for rounding."""
    if not _symmetric(levels):
        return ()
    half = np.array(levels[len(levels) // 2 :])
    x = 2 * np.arange(len(half)) + 1.0
    found = np.linalg.lstsq(np.stack([x, x**3], 1) / x[:, None], half / x, rcond=None)[0]
    exact = np.abs(np.stack([x, x**3], 1) @ found - half) <= 1e-7 * half
    return tuple(float(np.float32(c)) for c in found) if exact.all() else ()


@functools.cache
def integers(levels: Levels) -> tuple[list[int], float] | None:
    """The levels as integers from −128 to 127 times a step, if they are that but for rounding."""
    largest = max(abs(x) for x in levels)
    for top in range(1, 128):
        step = largest / top
        found = [round(x / step) for x in levels]
        if all(abs(n * step - x) <= 1e-6 * largest for n, x in zip(found, levels, strict=True)):
            return found, step
    return None


def _symmetric(levels: Levels) -> bool:
    return all(a == -b for a, b in zip(levels, reversed(levels), strict=True))


def _nibble_words(levels: Levels, factor: float) -> list[int]:
    """The table of _nibble_asm: high bytes of eight float16 entries, then low bytes. [] if it cannot hold the levels.

    Up to 3 bits the entries are the levels themselves; at 4 bits the magnitudes of a symmetric table.
    """
    if len(levels) > 16 or (len(levels) == 16 and not _symmetric(levels)):
        return []
    chosen = (np.array(levels[8:] if len(levels) == 16 else levels) * factor).astype(np.float16)
    if not np.isfinite(chosen).all():
        return []
    entries = np.zeros(8, np.float16)
    entries[: len(chosen)] = chosen
    octets = entries.view(np.uint8).reshape(8, 2)
    return [int(x) for part in (1, 0) for x in octets[:, part].copy().view(np.int32)]


@functools.cache
def _nibble_asm(levels: Levels, bits: int, factor: float) -> str:
    """PTX for two words of 8 nibbles each: $j gets the float16 levels of nibble j of $8 and of $9. "" if it cannot be.

    `prmt` selects four bytes of eight at once. At 4 bits the code's top bit gives the sign.
    """
    words = _nibble_words(levels, factor)
    if not words:
        return ""
    lines = [".reg .b32 a,b,xe,xo,te,to,s,t,h,l;"]
    if bits == 4:  # a, b: 7 − n below 8, n − 8 above
        for source, name in (("$8", "a"), ("$9", "b")):
            lines += [
                f"and.b32 s, {source}, 0x88888888;",
                "shr.b32 t, s, 3;",
                "sub.s32 s, s, t;",
                f"lop3.b32 {name}, {source}, s, 0x77777777, 0x82;",  # ~(word ^ s) & 7…
            ]
        lines += ["prmt.b32 te, $8, $9, 0x5140;", "prmt.b32 to, $8, $9, 0x7362;"]
    else:
        lines += ["mov.b32 a, $8;", "mov.b32 b, $9;"]
    lines += [  # selectors: nibbles of a and b in turn, even ones in xe, odd ones in xo
        "shl.b32 t, b, 4;",
        "lop3.b32 xe, a, t, 0x0F0F0F0F, 0xE4;",
        "shr.b32 t, a, 4;",
        "lop3.b32 xo, t, b, 0x0F0F0F0F, 0xE4;",
    ]
    for half, signs_of in enumerate(("te", "to")):
        for parity, selector in enumerate(("xe", "xo")):
            if half:
                lines.append(f"shr.b32 {selector}, {selector}, 16;")
            lines += [
                f"prmt.b32 h, {words[0]}, {words[1]}, {selector};",
                f"prmt.b32 l, {words[2]}, {words[3]}, {selector};",
            ]
            if bits == 4:
                source = signs_of
                if parity == 0:
                    lines.append(f"shl.b32 s, {signs_of}, 4;")
                    source = "s"
                lines.append(f"lop3.b32 h, {source}, 0x80808080, h, 0xAE;")  # (~word & sign bits) | h
            first = 4 * half + parity
            lines += [f"prmt.b32 ${first}, l, h, 0x5140;", f"prmt.b32 ${first + 2}, l, h, 0x7362;"]
    return "{\n" + "\n".join(lines) + "\n}"
