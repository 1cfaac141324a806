"""The fast decode path: which calls it serves, and their launch. Everything else is the portable kernel's.

Accuracy ("fast" precision): queries enter the scores as 16-bit integers per head, weights times value scales are
float16, sums are float32.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import checks
from ...codec import Codec, Format
from ...pages import Pages
from ...partial import Partial
from ...rotation import signs
from ...scoring import Scoring
from . import fast_kernel, fast_merge
from .fast_primitives import MINIFLOAT_TAIL, half2

DIMS = (64, 128, 256)
MAX_SEQS = 1024
MAX_GROUP = 8
STAGES = 2
WARPS = {64: 12, 128: 8, 256: 8}  # programs that fit a multiprocessor, by dim


class Levels(NamedTuple):
    """How the kernel makes the level tables of a format."""

    key_step: float  # a key level is an integer times this
    value_kind: int
    value_step: float
    constants: tuple[int, ...]  # 32-bit words


def why_not_fast(q: Tensor, pages: Pages, starts: Tensor, scoring: Scoring, precision: str) -> str | None:
    """None if `attend_fast` serves this call, else one sentence that says why not."""
    format, device = pages.format, pages.data.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs an NVIDIA GPU of compute capability 9.0 or higher"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"queries are float16, bfloat16 or float32, got {q.dtype}"
    if precision != "fast":
        return f"its precision is 'fast', got {precision!r}"
    if not 1 <= pages.seqs <= MAX_SEQS:
        return f"it takes 1 to {MAX_SEQS} sequences, got {pages.seqs}"
    if q.shape[0] != pages.seqs or starts is not checks.starts("starts", None, pages.seqs, pages.seqs, device):
        return "it takes one query a sequence, in order"
    if q.shape[1] // pages.kv_heads > MAX_GROUP:
        return f"it takes at most {MAX_GROUP} query heads per KV head, got {q.shape[1] // pages.kv_heads}"
    if pages.page_size % 32 and pages.table.shape[1] > 1:
        return f"pages must be multiples of 32 tokens, got {pages.page_size}"
    if pages.key_offset is not None or pages.value_offset is not None:
        return "it knows no offsets"
    if scoring.softcap is not None or scoring.exact or (scoring.window is not None and scoring.sinks > 0):
        return "it knows no soft cap, no positional sinks and no exact tokens"
    return why_not_format(format)


@functools.cache
def why_not_format(format: Format) -> str | None:
    """Why the kernel cannot read a format."""
    key, value = format.key, format.value
    if key.dim != value.dim or key.dim not in DIMS:
        return f"keys and values must have the same dim, one of {list(DIMS)}, got {key.dim} and {value.dim}"
    if (key.bits, value.bits) != (4, 4) or key.dtype != torch.float16 or value.dtype != torch.float16:
        return f"it reads 4-bit codes with float16 scales, got {format}"
    return None if _levels(format) is not None else f"it has no arithmetic for the level tables of {format}"


def workspace_bytes_fast(pages: Pages, heads: int, splits: int | None) -> int:
    return _slots(pages, splits) * (heads // pages.kv_heads) * (pages.format.value.dim + 1) * 4


def attend_fast(
    q: Tensor,
    pages: Pages,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
    splits: int | None,
    workspace: Tensor | None,
) -> Partial:
    """`reference.attend` for the calls that `why_not_fast` lets pass. Reads no device memory on the host."""
    seqs, heads, dim = q.shape
    group = heads // pages.kv_heads
    levels = _levels(pages.format)
    assert levels is not None
    if q.stride(2) != 1 or q.stride(1) != dim or q.stride(0) < heads * dim:
        q = q.contiguous()
    device, ends = q.device, ends.contiguous()
    programs, slots = _programs(pages, splits), _slots(pages, splits)
    size = slots * group * (dim + 1) * 4
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if workspace is None else workspace[:size]
    floats = workspace.view(torch.float32)
    pieces, lses = floats, floats[slots * group * dim :]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(seqs, heads, dtype=torch.float32, device=device)
    scan = (scoring.first, scoring.recent, scoring.window or 0)
    flags = {
        "GROUP": group,
        "DIM": dim,
        "TILE": _tile(pages),
        "SEQS": max(32, triton.next_power_of_2(seqs)),
        "CLIP": scoring.causal or scoring.recent > 0,
        "WINDOW": scoring.window is not None,
    }
    units, scales = _descriptors(pages)
    fast_kernel.fast_decode[(programs,)](
        units, scales, q, _signs(pages.format.key, device),
        _constants(levels, device), pages.table, pages.lengths, ends, pieces, lses,
        seqs, pages.kv_heads, pages.table.shape[1], pages.pinned, _page_tiles(pages), *scan,
        scoring.multiplier(dim) * math.log2(math.e) * levels.key_step, levels.value_step, q.stride(0), programs,
        LEVELS=levels.value_kind, STAGES=STAGES, UNITS_LAYOUT=units.layout, SCALES_LAYOUT=scales.layout, **flags,
        num_warps=1, maxnreg=_registers(dim, group),
    )  # fmt: skip
    pairs = seqs * pages.kv_heads
    chunk = min(256, max(4, triton.next_power_of_2(programs // pairs + 2)))
    together = 1 if pairs * group <= 4 * _multiprocessors(device) else triton.next_power_of_2(group)
    across = min(16, max(4, chunk * dim // 2048)) if together == 1 else 1
    fast_merge.fast_merge[(pairs, -(-group // together))](
        pieces, lses, out, lse, lse if sink_logits is None else sink_logits, _signs(pages.format.value, device),
        pages.lengths, ends, seqs, pages.kv_heads, *scan, programs, out.stride(0),
        SINKS=sink_logits is not None, CHUNK=chunk, HEADS=together, ACROSS=across, **flags,
        num_warps=max(across, min(4, together)), launch_pdl=True,
    )  # fmt: skip
    return Partial(out, lse)


def _programs(pages: Pages, splits: int | None) -> int:
    """How many programs share the tiles: from shapes and the device alone, so that a captured graph stays right."""
    pairs = pages.seqs * pages.kv_heads
    if splits is not None:
        return pairs * splits
    most = pairs * pages.table.shape[1] * _page_tiles(pages)
    return max(1, min(most, _multiprocessors(pages.data.device) * WARPS[pages.format.key.dim]))


def _tile(pages: Pages) -> int:
    """Tokens of a tile: no page boundary inside, and 8 programs with two tiles each fit a multiprocessor."""
    return 32 if pages.format.key.dim == 256 or (pages.page_size % 64 and pages.table.shape[1] > 1) else 64


def _page_tiles(pages: Pages) -> int:
    return -(-pages.page_size // _tile(pages))


def _registers(dim: int, group: int) -> int:
    """Registers of a thread: as many as the programs that share a multiprocessor leave, and help."""
    return {64: 168, 128: 168 if group <= 4 else 216, 256: 255}[dim]


def _slots(pages: Pages, splits: int | None) -> int:
    return 2 * _programs(pages, splits) + pages.seqs * pages.kv_heads


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _descriptors(pages: Pages) -> tuple[TensorDescriptor, ...]:
    """What TMA needs to know about codes and scales: [pages · kv_heads, key or value, …]; kept with the pages."""
    known = pages.__dict__.get("_fast_descriptors")
    if known is None:
        layout = pages.format.layout(pages.page_size)
        words = pages.data.view(torch.int16)  # [pages, kv_heads, bytes / 2]
        units, tile = pages.format.key.dim // 4, _tile(pages)
        shape, strides = (words.shape[0] * words.shape[1], 2), (words.shape[2], layout.value_codes // 2)
        lines = -(-pages.page_size * units // 64)  # of 128 bytes, the widest that TMA swizzles
        codes = words.as_strided((*shape, lines, 64), (*strides, 64, 1))
        at = words.storage_offset() + layout.key_scales // 2
        factors = words.as_strided((*shape, pages.page_size), (*strides, 1), at).view(torch.float16)
        known = (
            TensorDescriptor.from_tensor(codes, [1, 2, tile * units // 64, 64], gl.NVMMASharedLayout(128, 16, rank=4)),
            TensorDescriptor.from_tensor(factors, [1, 2, tile], gl.NVMMASharedLayout(0, 16, rank=3)),
        )
        object.__setattr__(pages, "_fast_descriptors", known)
    return known


@functools.cache
def _signs(codec: Codec, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(signs(codec.dim, codec.seed), dtype=torch.float32, device=device) / math.sqrt(codec.dim)


@functools.cache
def _constants(levels: Levels, device: torch.device) -> Tensor:
    """One row of 32 equal words for each constant, and the lanes whose column of the weights is even."""
    rows = [[word - (1 << 32) if word >> 31 else word] * 32 for word in levels.constants]
    even = [-1 if lane // 4 % 2 == 0 else 0 for lane in range(32)]
    with torch.inference_mode(False):
        return torch.tensor([*rows, even], dtype=torch.int32, device=device)


@functools.cache
def _levels(format: Format) -> Levels | None:
    key, value = _key_integers(format.key.levels), _value_arithmetic(format.value.levels)
    if key is None or value is None:
        return None
    integers, step = key
    kind, value_step, bend = value
    negative, positive = integers[:8], [n + 1 for n in integers[8:]]
    quarters = [part[at : at + 4] for part in (negative, positive) for at in (0, 4)]
    words = [sum((n & 255) << 8 * i for i, n in enumerate(quarter)) for quarter in quarters]
    cubic = (0.5 + bend / 8, 1 + 0.75 * bend, 1.5 * bend, bend)  # of code − 8
    return Levels(step, kind, value_step, (*words, 0xFFFFFFFF, *(int(half2(c), 16) for c in cubic)))


def _key_integers(levels: tuple[float, ...]) -> tuple[list[int], float] | None:
    """The levels as integers times a step: below zero for codes under 8 and at most 126, else None."""
    for top in range(1, 127):
        step = levels[15] / top
        if step <= 0:
            return None
        integers = [round(x / step) for x in levels]
        exact = all(abs(n * step - x) <= 1e-6 * levels[15] for n, x in zip(integers, levels, strict=True))
        if exact and integers[0] >= -128 and integers[7] < 0 <= integers[8]:
            return integers, step
    return None


def _value_arithmetic(levels: tuple[float, ...]) -> tuple[int, float, float] | None:
    """(kind, step, bend) of a table that is a difference of minifloats or an odd cubic of the code, else None."""
    small = [_minifloat(n) - _minifloat(15 - n) for n in range(16)]
    x = [n - 7.5 for n in range(16)]
    ratio = levels[8] * 15 / levels[15] if levels[15] > 0 else 0.0  # (1 + b/4) / (1 + 225 b/4)
    bend = 4 * (1 - ratio) / (225 * ratio - 1) if ratio * 225 > 1 else 0.0
    cubic = [y * (1 + bend * y * y) for y in x]
    for kind, table in ((fast_kernel.MINIFLOAT.value, small), (fast_kernel.CUBIC.value, cubic)):
        step = levels[15] / table[15]
        if all(abs(t * step - level) <= 2e-6 * abs(levels[15]) for t, level in zip(table, levels, strict=True)):
            return kind, step * (65536.0 if kind == fast_kernel.MINIFLOAT.value else 1.0), bend
    return None


def _minifloat(n: int) -> float:
    exponent, mantissa = n >> 2, (n & 3) + MINIFLOAT_TAIL / 256
    return mantissa if exponent == 0 else (4 + mantissa) * 2.0 ** (exponent - 1)
