"""Codes to bytes and back: code i fills bits [i·b, (i+1)·b) of a little-endian bit-stream, for every width b."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., n] integer codes, n a multiple of 8 -> [..., n·bits/8] uint8. Eight codes fill `bits` whole bytes."""
    groups = codes.to(torch.int64).unflatten(-1, (-1, 8))
    word = (groups << (bits * torch.arange(8, device=codes.device))).sum(-1)  # bits are disjoint: the sum is an OR
    octets = (word[..., None] >> (8 * torch.arange(bits, device=codes.device))) & 255
    return octets.flatten(-2).to(torch.uint8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """[..., n·bits/8] uint8 -> [..., n] int64 codes."""
    groups = data.to(torch.int64).unflatten(-1, (-1, bits))
    word = (groups << (8 * torch.arange(bits, device=data.device))).sum(-1)
    codes = (word[..., None] >> (bits * torch.arange(8, device=data.device))) & (2**bits - 1)
    return codes.flatten(-2)
