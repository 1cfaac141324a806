"""Whole caches of the original kernels, as they lie in memory: read into a KVCache, and written from one.

A side is packed [kv_heads, capacity, words] with norms [kv_heads, capacity]. The token i of `length`, counted from the
oldest, lies in slot (ring_start + i) mod capacity. Slots without a token may hold anything.

    AURA        words of 32 bits, a codebook of any order for each side; x̂ = norm · codebook[code], in the space
                into which its callers rotated
    TurboQuant  bytes of two codes, the 4-bit Lloyd-Max levels; x̂ = Hᵀ/√dim · norm · level / √dim, H without signs;
                norms of blocks of 256 coordinates [kv_heads, capacity, dim / 256] where a vector is longer.
                From mlx-native 0.4 on coordinates are multiplied by fixed signs before the transform, and blocks are
                x̂ = Hᵀ/√dim · norm · level / scale_factor_d512
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import instance, shown, whole
from ..attention import ops
from ..errors import InputError
from ..format import levels as level_tables
from ..format.codec import Codec, Codes, Format
from ..format.packing import pack, unpack
from ..format.rotation import PLAIN, UNROTATED, named_signs
from .cache import KVCache
from .legacy import BLOCK, check_divisor, check_norms, codes_from_nibbles, codes_from_u32, wide

Packed = tuple[Tensor, Tensor]  # codes and norms of one side


class Imported(NamedTuple):
    cache: KVCache  # one sequence, its oldest token at position 0
    encoded_again: int  # vectors whose blocks had unequal norms: one scale cannot say what they were


class Exported(NamedTuple):
    """A cache as the original kernels read it. Codebooks are None where the kernels have them built in."""

    keys: Packed
    values: Packed
    codebooks: tuple[Tensor, Tensor] | None
    length: int
    ring_start: int


def from_aura(
    keys: Packed,
    values: Packed,
    codebooks: tuple[Tensor, Tensor],
    length: int,
    *,
    head_dim: int,
    ring_start: int = 0,
    divisor: float = 1.0,
    signs: str | Sequence[int] = UNROTATED,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> Imported:
    """A cache of AURA's kernels. Codebooks of 2^bits entries say how wide codes are; they need no order.

    `signs` is the rotation of its callers if it is one of ours; the default leaves it to them: queries are rotated by
    the caller, and so is what `attend` returns. With a window the cache is a ring. `dtype` is that of the scales.
    """
    codecs, rows = [], []
    for name, side, table in zip(("keys", "values"), _pair(keys, values), _codebooks(codebooks), strict=True):
        bits = len(table).bit_length() - 1
        order = sorted(range(len(table)), key=table.__getitem__)
        codec = Codec(head_dim, bits, tuple(table[i] for i in order), dtype=dtype, signs=signs)
        words, norms = _logical(name, side, length, ring_start)
        codes = codes_from_u32(words, norms, codec, divisor=divisor)
        if order != list(range(len(table))):
            rank = torch.tensor(order, device=words.device).argsort()
            codes = Codes(pack(rank[unpack(codes.data, bits)], bits), codes.scale)
        codecs.append(codec)
        rows.append(codes)
    return Imported(_fill(Format(*codecs), rows, window, backend), 0)


def from_turboquant(
    keys: Packed,
    values: Packed,
    length: int,
    *,
    head_dim: int,
    ring_start: int = 0,
    divisor: float | None = None,
    signs: str | Sequence[int] = PLAIN,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> Imported:
    """A cache of mlx-native's TurboQuant kernels. The divisor of norms is √head_dim unless they were told another.

    `signs` are those of a cache whose coordinates were multiplied by ±1 before the transform, as mlx-native does from
    0.4 on; the divisor of its norms of blocks is `scale_factor_d512`, 1.0 unless it was set. Where the norms of the
    blocks of a vector differ, it is decoded and encoded again; `encoded_again` counts such vectors and a warning says
    so.
    """
    codec = Codec(head_dim, 4, "lloyd-max", dtype=dtype, signs=signs)
    if codec.dim.bit_count() != 1:
        raise InputError(f"TurboQuant's kernels write vectors of 2^k coordinates, got {codec.dim}")
    divisor = math.sqrt(codec.dim) if divisor is None else check_divisor(divisor)
    again, rows = 0, []
    for name, side in zip(("keys", "values"), _pair(keys, values), strict=True):
        data, norms = _logical(name, side, length, ring_start)
        if norms.ndim < 3 or norms.shape != (*data.shape[:2], head_dim // BLOCK) or head_dim % BLOCK:
            rows.append(codes_from_nibbles(data, norms, codec, divisor=divisor))
            continue
        check_norms(norms, data, norms.shape)
        unequal = (norms != norms[..., :1]).any(-1)
        equal = torch.where(unequal[..., None], 1.0, norms)
        codes = codes_from_nibbles(data, equal, codec, divisor=divisor)
        if bool(unequal.any()):
            again += int(unequal.sum())
            fresh = _encode_again(data[unequal], norms[unequal], codec, divisor)
            assert codes.scale is not None
            assert fresh.scale is not None
            codes.data[unequal], codes.scale[unequal] = fresh.data, fresh.scale
        rows.append(codes)
    if again:
        warnings.warn(
            f"{again} vectors have blocks of unequal norms and were encoded again with one scale each", stacklevel=2
        )
    return Imported(_fill(Format(codec, codec), rows, window, backend), again)


def to_aura(cache: KVCache, seq: int = 0, *, capacity: int | None = None, ring_start: int = 0) -> Exported:
    """A sequence as AURA's kernels read it. Their callers rotate: with `cache.format.key.rotate` and so on."""
    rows, length, capacity = _held(cache, seq, capacity, ring_start)
    sides, tables = [], []
    for codes, codec in zip(rows, (cache.format.key, cache.format.value), strict=True):
        count = -(-codec.dim * codec.bits // 32)
        words = codes.data.new_zeros(*codes.data.shape[:2], 4 * count)
        words[..., : codec.row_bytes] = codes.data
        sides.append(_physical(words.view(torch.int32), _norms(codes, 1.0), capacity, ring_start))
        tables.append(codec.level_tensor(torch.float32, codes.data.device).clone())
    return Exported(sides[0], sides[1], (tables[0], tables[1]), length, ring_start)


def to_turboquant(
    cache: KVCache,
    seq: int = 0,
    *,
    capacity: int | None = None,
    ring_start: int = 0,
    blocks: bool = False,
    divisor: float | None = None,
    signs: str | Sequence[int] = PLAIN,
) -> Exported:
    """A sequence as mlx-native's kernels read it, told this divisor (√dim by default) and these signs.

    `blocks`: a norm for each block of 256 coordinates of a longer vector.
    """
    instance("cache", cache, KVCache)
    levels = level_tables.table("lloyd-max", 4)
    for codec in (cache.format.key, cache.format.value):
        wanted = named_signs(codec.dim, signs)
        if codec.bits != 4 or codec.levels != levels or codec.signs != wanted or codec.dim.bit_count() != 1:
            transform = "a plain transform" if wanted == PLAIN else "a transform with the given signs"
            raise InputError(
                f"TurboQuant's kernels read 4-bit lloyd-max codes behind {transform} of 2^k coordinates,"
                f" got {codec.name} of {codec.dim}"
            )
    rows, length, capacity = _held(cache, seq, capacity, ring_start)
    sides = []
    for codes, codec in zip(rows, (cache.format.key, cache.format.value), strict=True):
        norms = _norms(codes, math.sqrt(codec.dim) if divisor is None else check_divisor(divisor))
        if blocks and codec.dim > BLOCK:
            norms = norms[..., None].repeat(1, 1, codec.dim // BLOCK)
        sides.append(_physical(codes.data, norms, capacity, ring_start))
    return Exported(sides[0], sides[1], None, length, ring_start)


def _pair(keys: Packed, values: Packed) -> tuple[Packed, Packed]:
    for name, side in (("keys", keys), ("values", values)):
        if not (isinstance(side, tuple) and len(side) == 2 and all(isinstance(x, Tensor) for x in side)):
            raise InputError(f"{name} must be a pair of tensors (codes, norms), got {shown(side)}")
        if side[0].ndim != 3 or side[1].shape[:2] != side[0].shape[:2]:
            raise InputError(
                f"{name} must be codes [kv_heads, capacity, words] and norms [kv_heads, capacity],"
                f" got {list(side[0].shape)} and {list(side[1].shape)}"
            )
    if keys[0].device != values[0].device:
        raise InputError(f"keys and values must be on one device, got {keys[0].device} and {values[0].device}")
    return keys, values


def _codebooks(given: tuple[Tensor, Tensor]) -> list[list[float]]:
    """As numbers, one list for each side."""
    tables = []
    if not (isinstance(given, tuple) and len(given) == 2):
        raise InputError(f"codebooks must be a pair of tensors (keys, values), got {shown(given)}")
    for name, table in zip(("key", "value"), given, strict=True):
        widths = [2**bits for bits in level_tables.CODE_BITS]
        instance(f"{name} codebook", table, Tensor)
        if table.ndim != 1 or len(table) not in widths or not table.is_floating_point():
            raise InputError(f"a {name} codebook must have one of {widths} numbers, got {shown(table)}")
        tables.append(table.float().tolist())
    return tables


def _logical(name: str, side: Packed, length: int, ring_start: int) -> Packed:
    """Codes and norms of the tokens, oldest first: [length, kv_heads, …]."""
    capacity = side[0].shape[1]
    length = whole("length", length, 0)
    if length > capacity:
        raise InputError(f"{name} hold {capacity} tokens at most, got a length of {length}")
    slot = _slots(length, capacity, ring_start).to(side[0].device)
    data, norms = (x.transpose(0, 1)[slot] for x in side)
    return data.contiguous(), norms.contiguous()


def _physical(data: Tensor, norms: Tensor, capacity: int, ring_start: int) -> Packed:
    """[tokens, kv_heads, …] -> [kv_heads, capacity, …], 0 where no token lies."""
    slot = _slots(data.shape[0], capacity, ring_start).to(data.device)

    def place(x: Tensor) -> Tensor:
        whole_side = x.new_zeros(capacity, *x.shape[1:])
        whole_side[slot] = x
        return whole_side.transpose(0, 1).contiguous()

    return place(data), place(norms)


def _slots(length: int, capacity: int, ring_start: int) -> Tensor:
    ring_start = whole("ring_start", ring_start, 0, max(0, capacity - 1))
    if ring_start and length < capacity:
        raise InputError(f"ring_start is 0 until a ring is full, got {ring_start} with {length} tokens of {capacity}")
    return (ring_start + torch.arange(length)) % max(1, capacity)


def _encode_again(data: Tensor, norms: Tensor, codec: Codec, divisor: float) -> Codes:
    """Vectors [n, bytes] with norms of their blocks [n, blocks], as codes with one scale. Nothing is rotated."""
    factors = (wide(norms) / divisor).repeat_interleave(BLOCK, -1)
    levels = codec.level_tensor(torch.float64, factors.device)[unpack(data.to(factors.device), 4)]
    codes = ops.encode((levels * factors)[:, None], codec.unrotated())
    assert codes.scale is not None
    return Codes(codes.data[:, 0].to(data.device), codes.scale[:, 0].to(data.device))


def _fill(format: Format, rows: list[Codes], window: int | None, backend: str | None) -> KVCache:
    keys, values = rows
    if keys.data.shape[:2] != values.data.shape[:2]:
        raise InputError(
            f"keys and values must have equal KV heads, got {keys.data.shape[1]} and {values.data.shape[1]}"
        )
    length, kv_heads, device = *keys.data.shape[:2], keys.data.device
    if window is None:
        cache = KVCache.contiguous(format, 1, kv_heads, length, device, backend=backend)
    else:
        cache = KVCache.ring(format, 1, kv_heads, window, device=device, backend=backend)
    cache.append_codes(keys, values, [0, length])
    return cache


def _held(cache: KVCache, seq: int, capacity: int | None, ring_start: int) -> tuple[tuple[Codes, Codes], int, int]:
    """What a sequence holds, if the original kernels could hold it; its length and their capacity."""
    instance("cache", cache, KVCache)
    if not (cache.format.key.coded and cache.format.value.coded):
        raise InputError(f"caches of the original kernels hold codes on both sides, got {cache.format}")
    if cache.uncompressed_table is not None:
        raise InputError("caches of the original kernels hold no uncompressed tokens, and this one does")
    if cache.pool.key_offset is not None or cache.pool.value_offset is not None:
        raise InputError("caches of the original kernels have no offsets, and this one has")
    positions = cache.positions(seq)
    length = len(positions)
    if length and int(positions[-1]) - int(positions[0]) + 1 != length:
        raise InputError("caches of the original kernels hold neighbouring tokens, and this ring holds sinks apart")
    most = whole("capacity", max(1, length) if capacity is None else capacity, max(1, length))
    _slots(length, most, ring_start)
    return cache.codes(seq), length, most


def _norms(codes: Codes, factor: float) -> Tensor:
    assert codes.scale is not None
    return (wide(codes.scale) * factor).float().to(codes.scale.device)
