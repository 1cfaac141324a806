"""NVIDIA GPUs, in Triton. Importing this imports no triton and starts no CUDA.

Products of codes run in float16 with float32 sums (those of keys of up to 4 bits mostly in int8), or in float32 with
precision="float32"; float64 arguments are computed in float32. With TRITON_INTERPRET=1 set before triton is first
imported, the kernels run on the CPU: slowly, for tests.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ...attention.partial import Partial
from ...attention.scoring import Scoring
from ...attention.step import Attention, Rows, Run, Step, written
from ...format.codec import Codec, Codes, Format, unknown_width
from ...storage.pages import Pages
from .common.target import LEAST_CAPABILITY, device_type

name = "triton"

fast_error = 0.005
float64 = False

WIDTHS = (2, 3, 4, 5, 6, 8, 16)  # bits that the kernels know

_Result = TypeVar("_Result")


def _where_it_lies(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Triton launches on the current device, whichever the tensors are on: layers of a model may be on several."""

    @functools.wraps(function)
    def guarded(first: Tensor | Codes | Pages, *others: object) -> _Result:
        device = first.device if isinstance(first, Tensor) else first.data.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(first, *others)
        with torch.cuda.device(device):
            return function(first, *others)

    return guarded


def why_not(format: Format | None, device: torch.device) -> str | None:
    if (width := unknown_width(format, WIDTHS)) is not None:
        return width
    if _interpreted():
        return None if device.type == "cpu" else f"with TRITON_INTERPRET=1 tensors must be on the CPU, got {device}"
    if device.type != device_type():
        return f"it needs a CUDA device, got {device}"
    return _why_not_cuda(device) if device.type == "cuda" else None


def path(device: torch.device) -> str:
    """Which kernels a device gets on which this backend runs, and why, in one sentence."""
    from .common.target import target_of, warp_groups
    from .dispatch import why_no_gluon_paths

    reason = why_no_gluon_paths()
    if reason is not None:
        return f"with the portable kernels only: {reason}"
    bulk = "TMA (by copies of 16 bytes in pages of 16 tokens)"
    copies = bulk if target_of(device).bulk else "copies of 16 bytes (TMA needs compute capability 9.0)"
    groups = "warp groups" if warp_groups(device) else "single warps (those of warp groups are for 9.x)"
    return f"decode kernel, with tiles by {copies}; for many queries the kernel with products of {groups}"


def kernel(q: Tensor, attention: Attention) -> str:
    """Which kernel computes `attend` of these, in a few words."""
    from . import dispatch

    return dispatch.kernel(q, attention)


def workspace_bytes(pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
    from . import dispatch

    return dispatch.workspace_bytes(pages, tokens, heads, splits)


@_where_it_lies
def encode(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None = None) -> Codes:
    from .append import launch

    return launch.encode(_single(x), codec, offset, fit)


@_where_it_lies
def decode(codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
    from .vectors import launch

    work = torch.float32 if dtype == torch.float64 else dtype
    return launch.decode(codes, codec, offset, rotated, work).to(dtype)


@_where_it_lies
def scores(q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
    from .vectors import launch

    return launch.scores(_single(q), codes, codec, offset).to(q.dtype)


@_where_it_lies
def values(weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
    from .vectors import launch

    return launch.values(_single(weights), codes, codec, offset, threshold).to(weights.dtype)


@_where_it_lies
def append(pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
    from .append import launch

    launch.append(pages, _single(k), _single(v), rows)


@_where_it_lies
def append_codes(pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
    from .append import launch

    launch.append_codes(pages, keys, values, rows)


@_where_it_lies
def attend(q: Tensor, attention: Attention) -> Partial:
    from . import dispatch

    if q.dtype == torch.float64:
        part = dispatch.attend(q.float(), dataclasses.replace(attention, precision="float32"))
        return Partial(part.out.double(), part.lse.double())
    return dispatch.attend(q, attention)


@_where_it_lies
def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    key_starts: Tensor,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
) -> Partial:
    from .portable import launch as portable

    k, v = _single(k), _single(v)
    part = portable.attend_dense(_single(q), k, v, rows, key_starts, ends, scoring, sink_logits)
    return Partial(part.out.to(q.dtype), part.lse.double() if q.dtype == torch.float64 else part.lse)


def prepare_step(step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run:
    from . import step as steps

    double = q.dtype == torch.float64
    if double:
        step = dataclasses.replace(step, precision="float32")
    run = steps.prepare(step, _single(q), _single_or_none(k), _single_or_none(v))

    @_where_it_lies
    def whole_step(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial:
        if not double and (k is None or k.dtype != torch.float64):
            return run(q, k, v, out)
        part = run(_single(q), _single_or_none(k), _single_or_none(v))
        return written(Partial(part.out.double(), part.lse.double()) if double else part, out)

    return whole_step


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _single_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _single(x)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1" and _installed()


@functools.cache
def _installed() -> bool:
    return "triton" in sys.modules or importlib.util.find_spec("triton") is not None


@functools.cache
def _why_not_cuda(device: torch.device) -> str | None:
    if not _installed():
        return "it needs the package triton, which is not installed"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    return None
