"""Rows of the original kernels, turned into Codes for `append_codes`. `legacy_cache` has whole caches.

Both families store codes and one norm per vector, x̂ = Rᵀ · norm · level / divisor, so our scale is norm / divisor.
AURA has no divisor: its codebook is given by the caller and holds any 1/√dim itself. TurboQuant divides by √dim. The
bytes do not say which levels and which rotation they mean: the codec must have those that the cache was made with,
otherwise the result is noise. TurboQuant's rotation is plain (`signs="plain"`; from mlx-native 0.4 on it has signs);
AURA's callers rotate (`signs="unrotated"`, or the signs with which they do).
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from .. import checks
from ..arguments import finite, shown
from ..errors import InputError
from ..format.codec import Codec, Codes

BLOCK = 256  # coordinates that share a norm where a vector has several


def codes_from_u32(words: Tensor, norms: Tensor, codec: Codec, *, divisor: float = 1.0) -> Codes:
    """AURA: words [..., kv_heads, ⌈dim·bits/32⌉] of 32 bits, norms [..., kv_heads].

    A row is one little-endian bit-stream, codes straddle words, and the bits that pad it to a whole word are 0. The
    codec must have the levels and the rotation that the cache was made with. Pass a divisor of √dim if its levels are
    those of N(0, 1) and the norms those of whole vectors.
    """
    _check_coded(codec)
    divisor = check_divisor(divisor)
    count = -(-codec.dim * codec.bits // 32)
    if not isinstance(words, Tensor) or words.dtype not in (torch.uint32, torch.int32):
        raise InputError(f"words must be uint32 or int32, got {_kind(words)}")
    if words.ndim < 2 or words.shape[-1] != count:
        raise InputError(
            f"words must be [..., kv_heads, {count}] for {codec.dim} codes of {codec.bits} bits,"
            f" got {list(words.shape)}"
        )
    check_norms(norms, words, words.shape[:-1])
    octets = words.contiguous().view(torch.uint8)
    if bool((octets[..., codec.row_bytes :] != 0).any()):
        raise InputError(f"the bits of a row after its {codec.dim} codes of {codec.bits} bits must be 0")
    return Codes(octets[..., : codec.row_bytes].contiguous(), _scale(norms, codec, divisor))


def codes_from_nibbles(data: Tensor, norms: Tensor, codec: Codec, *, divisor: float | None = None) -> Codes:
    """mlx-native TurboQuant: data [..., kv_heads, dim/2] uint8, the even coordinate in the low nibble; norms
    [..., kv_heads], or one for each block of 256 coordinates: [..., kv_heads, dim/256].

    A vector has one scale here, so the norms of its blocks must be equal (`legacy_cache` encodes others again). Those
    kernels can be told to decode blocks as norm · level / divisor with a divisor other than √dim (such as 1): pass the
    one that the cache was made with. The codec must have the levels and the rotation that the cache was made with.
    """
    _check_coded(codec)
    if codec.bits != 4:
        raise InputError(f"nibbles need a codec of 4 bits, got {codec.bits}")
    divisor = check_divisor(math.sqrt(codec.dim) if divisor is None else divisor)
    if not isinstance(data, Tensor) or data.dtype != torch.uint8:
        raise InputError(f"data must be uint8, got {_kind(data)}")
    if data.ndim < 2 or data.shape[-1] != codec.row_bytes:
        raise InputError(f"data must be [..., kv_heads, {codec.row_bytes}], got {list(data.shape)}")
    blocks = codec.dim // BLOCK if codec.dim % BLOCK == 0 else 1
    per_block = isinstance(norms, Tensor) and norms.ndim == data.ndim and blocks > 1
    check_norms(norms, data, data.shape[:-1] + ((blocks,) if per_block else ()))
    if per_block:
        if bool((norms != norms[..., :1]).any()):
            raise InputError(f"norms of the {blocks} blocks of a vector must be equal to become one scale")
        norms = norms[..., 0]
    return Codes(data.contiguous(), _scale(norms, codec, divisor))


def _check_coded(codec: Codec) -> None:
    if not codec.coded:
        raise InputError("caches of the original kernels hold codes: the codec must not be one of 16 bits")


def check_divisor(divisor: float) -> float:
    """As a float, whatever kind of number it is."""
    with contextlib.suppress(InputError):
        number = finite("divisor", divisor)
        if number > 0:
            return number
    raise InputError(f"divisor must be positive and finite, got {shown(divisor)}")


def check_norms(norms: Tensor, data: Tensor, shape: tuple[int, ...]) -> None:
    checks.floating("norms", norms)
    if norms.shape != shape:
        raise InputError(f"norms must be {list(shape)} like the rows, got {list(norms.shape)}")
    if norms.device != data.device:
        raise InputError(f"norms must be on {data.device} like the codes, got {norms.device}")
    if not bool((norms.isfinite() & (norms >= 0)).all()):
        raise InputError("norms must be finite and not negative")


def _scale(norms: Tensor, codec: Codec, divisor: float) -> Tensor:
    """In the codec's dtype; beyond its range saturated, as encode does."""
    scale = (wide(norms) / divisor).clamp(max=torch.finfo(codec.dtype).max).to(codec.dtype)
    return scale.to(norms.device).contiguous()


def wide(x: Tensor) -> Tensor:
    """x in float64, on the CPU where it comes from an Apple GPU, which has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
