"""Compiled kernels, and what every launch needs: numbers, tensors in one piece, something for what is not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...format.codec import Codec, Codes
from ...storage.pages import Pages
from . import source
from .source import NUMBERS

Compiler = Callable[[str], Any]


class Kernels:
    """Libraries by their source, from `torch.mps.compile_shader` or a stand-in with the same rules."""

    def __init__(self, compiler: Compiler) -> None:
        self.library = functools.lru_cache(maxsize=None)(compiler)


def numbers(**given: int) -> list[int]:
    """The list `numbers` of a kernel by names; those it does not ask for are 0. Windows stop at 2^31 − 1."""
    assert given.keys() <= set(NUMBERS), given.keys() - set(NUMBERS)
    return [min(int(given.get(name, 0)), 2**31 - 1) for name in NUMBERS]


def per_vector(
    kernel: Any, tensors: tuple[Tensor, ...], given: list[int], vectors: int, *factors: float, teams: int = 4
) -> None:
    """Launch a kernel that has one simdgroup per vector, so many to a threadgroup."""
    more = (given, list(factors)) if factors else (given,)
    sizes = {"threads": vectors * 32, "group_size": min(vectors, teams) * 32}
    kernel(*tensors, *more, **sizes, arg_casts={len(tensors): "int32"})


def encoder(kernels: Kernels, x: Tensor, codec: Codec, fit: Tensor | None) -> tuple[Any, tuple[Tensor, ...], int]:
    """The library that encodes vectors like x, what its kernels take behind the factor, and simdgroups of a group."""
    if fit is None:
        return kernels.library(source.encode(codec, x.dtype)), (), 4
    weighted = fit.shape[1] > 0
    teams, _ = source.fitting(codec, weighted)
    return kernels.library(source.fitted(codec, x.dtype, weighted)), (optional(fit if weighted else None, x),), teams


def by_rows(x: Tensor) -> Tensor:
    """x with the numbers of a vector side by side; vectors may be apart."""
    return x if x.stride(-1) == 1 and max(x.stride()) < 2**31 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """x in one piece, from an address on that reads of 16 bytes may start at."""
    x = x.contiguous()
    return x if x.storage_offset() * x.element_size() % 16 == 0 else x.clone()


def aligned_codes(codes: Codes) -> tuple[Tensor, Tensor]:
    return aligned(codes.data), optional(None if codes.scale is None else aligned(codes.scale), codes.data)


def optional(x: Tensor | None, like: Tensor) -> Tensor:
    """x, or what stands for it: kernels are told whether to read it."""
    return _nothing(like.device) if x is None else x


@functools.lru_cache(maxsize=8)
def _nothing(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached: must not become an inference tensor
        return torch.zeros(4, dtype=torch.float32, device=device)


def strides(x: Tensor) -> dict[str, int]:
    """Of x [tokens, heads, dim]."""
    return {"STRIDE": x.stride(0), "HEAD_STRIDE": x.stride(1)}


def slots(pages: Pages, tokens: int) -> dict[str, int]:
    """Where tokens of these pages lie."""
    return {
        "SEQS": pages.seqs,
        "TOKENS": tokens,
        "KV_HEADS": pages.kv_heads,
        "PAGE_SIZE": pages.page_size,
        "WIDTH": pages.table.shape[1],
        "PINNED": pages.pinned,
        "PAGES": pages.data.shape[0],
        "PIECE": pages.data.shape[2],
        "RING": pages.ring,
    }
