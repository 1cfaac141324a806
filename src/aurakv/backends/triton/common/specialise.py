"""What kernels are specialised by: how a side decodes, and the constant tensors that go with it."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ....format.codec import Codec
from ....format.fit import SCALES
from ....format.levels import Levels
from ....format.rotation import hadamard
from ..append.fit_tables import cell_asm, level_unit
from ..append.grids import cell_tensor, grid_tensor, groups_asm, square_table, wide_cells
from .arithmetic import curve, float16_unit, nibble_asm, polynomial
from .codes import INTERPRETED

PAIR_UNIT = 16.0  # keeps the second float16 of a level out of the subnormal range

# Sums of products run over at least this many elements: the smaller the pieces that an operand is made from, the more
# elements Triton 3.6 lays out at a time (16 for pieces of 16 bits), and shorter sums count some of them several times.
LEAST_TILE = 32

DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Side(NamedTuple):
    """Constexpr of attention and decoding: how keys or values are stored and multiplied."""

    dim: int
    bits: int
    bytes: int  # of a row
    dtype: Any  # of scales, or of 16-bit vectors
    columns: int  # of a tile: 8·groups, or dim rounded up to a power of two for 16-bit vectors
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
    uncompressed: int  # see masks
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
    scales: tuple[float, ...] = ()  # that are tried, times the root mean square of a vector; () for that alone
    fitted: bool = False  # a block of vectors of a head at a time, see append/fit.py
    fours: bool = False  # fitted, four coordinates at once, see append/fit_fours.py
    equal: bool = False  # in fours, where weights are equal, so that no coordinate makes up for the error of another
    cell: str = ""  # in fours: PTX that finds a cell, "" where there are none
    unit: float = 1.0  # what levels are over if fitted, as sums of so many float16 numbers
    parts: int = 1


def operand_of(dtype: torch.dtype) -> Any:
    """What products of this dtype are computed in; the interpreter multiplies no bfloat16."""
    return tl.float32 if dtype == torch.bfloat16 and INTERPRETED.value else DTYPES[dtype]


def columns(codec: Codec) -> int:
    """Width of a tile, at least LEAST_TILE."""
    return _columns(codec.dim)


def _columns(dim: int) -> int:
    return max(LEAST_TILE, 1 << (dim - 1).bit_length())


@functools.cache
def side(codec: Codec, float32: bool, query: torch.dtype, key: bool = False) -> Side:
    """Products with codes run in float16. A peaked softmax magnifies errors of keys: if float16 does not hold their
    table nearly exactly, each level is a sum of two. Products with 16-bit vectors run in their own type if the query
    has it, else in float32."""
    width, shape = columns(codec), (codec.dim, codec.bits, codec.row_bytes, DTYPES[codec.dtype])
    if codec.coded:
        if float32:  # tensor cores cut sums off instead of rounding them: long ones take the format with fewer steps
            precision = "bf16x6" if key and codec.dim > 256 else "tf32x3"
            return Side(*shape, width, width // 8, (), "", 1.0, False, tl.float32, precision)
        factor = float16_unit(codec.levels) if key else 1.0
        if not factor:
            return Side(*shape, width, width // 8, curve(codec.levels), "", PAIR_UNIT, True, tl.float16, "tf32x3")
        asm = "" if INTERPRETED.value else nibble_asm(codec.levels, codec.bits, factor)
        coef = () if asm else curve(codec.levels)
        return Side(*shape, width, width // 8, coef, asm, factor, False, tl.float16, "tf32x3")
    same = operand_of(codec.dtype) != tl.float32 and codec.dtype == query and not float32
    single = not float32 and torch.float32 not in (codec.dtype, query)  # both fit into tf32
    operand = DTYPES[codec.dtype] if same else tl.float32
    return Side(*shape, width, 0, (), "", 1.0, False, operand, "tf32" if single else "tf32x3")


@functools.cache
def encoder(codec: Codec, source: torch.dtype, changed: bool, few_warps: bool = False) -> Encoder:
    """changed: vectors get a key_scale or an offset in float32, which three bfloat16 numbers hold as well. few_warps: a
    warp for each 128 coordinates, whose registers hold no whole rotation matrix."""
    width = columns(codec)
    if not codec.coded:
        return Encoder(codec.dim, 16, width, 0, 16, (), False, 1.0, 0, 0.0, tl.float32, 1)
    operand = operand_of(torch.bfloat16 if changed else source)
    chunk = min(codec.dim & -codec.dim, max(16, (8192 if operand == tl.float32 else 16384) // width))
    chunk = min(chunk, 32) if few_warps else chunk
    return Encoder(
        codec.dim,
        codec.bits,
        width,
        width // 8,
        chunk,
        polynomial(codec.levels),
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
        return cell_tensor(codec.levels, writer.square > 0, device)
    return grid_tensor(codec.levels, device) if writer.grid else codec.boundary_tensor(torch.float32, device)


Fit = Literal["", "scales", "weights", "fours", "scales in fours"]


def fit_of(fit: Tensor | None) -> Fit:
    """How vectors with such a fit are rounded (format/fit.py)."""
    return "" if fit is None else "weights" if fit.shape[1] else "scales"


@functools.cache
def writer(
    codec: Codec, source: torch.dtype, changed: bool, alone: bool = False, fit: Fit = "", few_warps: bool = False
) -> Writer:
    """alone: for warps with vectors of their own, if `factored` says that they can have them. few_warps: see
    `encoder`."""
    how = encoder(codec, source, changed, few_warps)
    if not codec.coded:
        return Writer(how)
    lsq = codec.scale == "lsq" or fit != ""
    scales, grid = SCALES if fit else (), wide_cells(codec.levels)
    cells = (grid.slope, grid.start, len(grid.bounds)) if grid else ()
    if fit == "weights":
        return Writer(how, False, "", cells, 0.0, scales, True, False, False, "", *level_unit(codec.levels))
    if fit in ("fours", "scales in fours"):
        equal, asm = fit != "fours", cell_asm(codec.levels)
        return Writer(how, False, "", cells, 0.0, scales, True, True, equal, asm, *level_unit(codec.levels))
    groups = "" if INTERPRETED.value else groups_asm(codec.levels, lsq)
    if not groups:
        return Writer(how, grid=cells, scales=scales)
    found = None if lsq else square_table(codec.levels)
    return Writer(how, alone, groups, square=found[1] ** 2 if found else 0.0, scales=scales)


def constants(codec: Codec, writer: Writer, device: torch.device) -> tuple[Tensor | None, ...]:
    """Rotation matrix, levels and boundaries for a Writer."""
    if not codec.coded:
        return None, None, None
    dtype = next(dtype for dtype, name in DTYPES.items() if name == writer.how.operand)
    if writer.alone:
        rotation = lane_matrix(codec, dtype, device)
    else:
        rotation = matrix(codec, dtype, device, order="natural" if writer.fitted else "planes")
    if writer.fitted:
        return rotation, codec.level_tensor(torch.float32, device), codec.boundary_tensor(torch.float32, device)
    return rotation, codec.level_tensor(torch.float32, device), bounds(codec, writer, device)


def single_product(how: Encoder) -> bool:
    """Whether a rotation is one product of 16-bit numbers."""
    return how.operand != tl.float32 and how.parts == 1


def factored(codec: Codec, source: torch.dtype, changed: bool) -> bool:
    """Whether one warp can rotate vectors without the help of others, and quantises them by cells."""
    chosen = writer(codec, source, changed)
    return bool(chosen.groups) and codec.rotates and codec.dim in (64, 128) and single_product(chosen.how)


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
    sign = torch.where(torch.tensor(codec.sign_list()) < 0, -0.0, 0.0).to(dtype)
    with torch.inference_mode(False):
        return torch.cat([x.contiguous().flatten().view(torch.int32) for x in (entries, sign)]).to(device)


def encode_bits(dim: int) -> tuple[list[int], list[int]]:
    """The bits of a coordinate that are the bits of a row and of a column of `lane_matrix`, from the lowest on.

    A lane reads 8 neighbours at a time (its four share 32), two in a word, and gets dim / 4 neighbours as results:
    bits 1 and 2 of a column are its quarter. The bits that are missing count the products.
    """
    return ([0, 3, 4, 5, 6], [0, 5, 6, 3, 4]) if dim == 128 else ([0, 3, 4, 5, 2], [0, 4, 5, 2, 3])


Order = Literal["planes", "natural", "halves", "bytes"]


def coordinates(width: int, order: Order) -> Tensor:
    """The coordinate of each column of a tile: by planes of codes (see codes.py); the same number; of every 32 one of
    the lower half and one of the upper in turn; of every four 0 2 1 3; both as extend_decode.over_banks has them."""
    column = torch.arange(width)
    if order == "natural":
        return column
    if order != "planes" and width == 128:
        column = column.view(4, 2, 16).transpose(0, 1).flatten()
    if order == "halves":
        return column // 32 * 32 + column % 2 * 16 + column // 2 % 16
    if order == "bytes":
        return column // 4 * 4 + column % 2 * 2 + column // 2 % 2
    return column % (width // 8) * 8 + column // (width // 8)


@functools.cache
def matrix(
    codec: Codec, dtype: torch.dtype, device: torch.device, transposed: bool = False, order: Order = "planes"
) -> Tensor:
    """R·√dim / 2^halvings: ± a power of two, so exact in every dtype, and no sum overflows that R's would not. 1 where
    the caller rotates.

    [dim, columns] with entry (c, i) of coordinate c of x and column i of a rotated tile; or transposed.
    """
    dim, width = codec.dim, _columns(codec.dim)
    signed = torch.eye(dim, dtype=torch.float64)  # [rotated, c]
    if codec.rotates:
        signed = hadamard(dim) * torch.tensor(codec.sign_list(), dtype=torch.float64) * 2.0 ** -_halvings(dim)
    padded = torch.zeros(dim, width, dtype=torch.float64)
    coordinate = coordinates(width, order)
    padded[:, coordinate < dim] = signed.T[:, coordinate[coordinate < dim]]
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
    whole = np.array(levels) * PAIR_UNIT
    first = whole.astype(np.float16)
    pairs = np.stack([first, (whole - first.astype(np.float64)).astype(np.float16)], 1)
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(pairs).view(np.int32)[:, 0].copy()).to(device)


def unrotate_chunk(codec: Codec) -> int:
    """How many coordinates are rotated back at a time: a power of two that divides the dimension."""
    return min(codec.dim & -codec.dim, max(16, 4096 // columns(codec)))


def unit(codec: Codec) -> float:
    """What a product with `matrix` is to be multiplied by."""
    return 2.0 ** _halvings(codec.dim) / math.sqrt(codec.dim) if codec.rotates else 1.0


def _halvings(dim: int) -> int:
    return math.isqrt(dim).bit_length() - 1
