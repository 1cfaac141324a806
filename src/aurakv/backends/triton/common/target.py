"""The GPU and the Triton that kernels are launched with: what it has, and what it lacks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

import torch

LEAST_CAPABILITY = (8, 0)  # of GPUs that the kernels are for
BULK_CAPABILITY = (9, 0)  # … that have TMA, barriers in shared memory that copies arrive at, and early launches

# KiB of shared memory of a multiprocessor; what is not named here has at least the least of them
SHARED = {(8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (9, 0): 228, (10, 0): 228, (10, 3): 228, (12, 0): 100}
OWN_SHARED = 1024  # bytes of it that the system takes for each program


class Target(NamedTuple):
    """What kernels are chosen and cut by."""

    bulk: bool  # tiles can travel by TMA, and a kernel can begin while the one before it ends
    shared: int  # bytes of shared memory of a multiprocessor


class Assumed(NamedTuple):
    """A GPU that is not asked."""

    capability: tuple[int, int]
    device_type: str  # of its tensors
    multiprocessors: int | None  # None: those of the GPU that is there


_assumed: Assumed | None = None


def assume(capability: tuple[int, int] | None, device_type: str = "cuda", multiprocessors: int | None = None) -> None:
    """Choose and cut kernels as for a GPU of this compute capability, None: as for the one that is there.

    For tests and benchmarks: a newer GPU runs what an older one would. With another type of device, whoever assumes has
    given Triton a driver that runs kernels on its tensors."""
    global _assumed
    _assumed = None if capability is None else Assumed(capability, device_type, multiprocessors)


@contextlib.contextmanager
def assuming(
    capability: tuple[int, int], device_type: str = "cuda", multiprocessors: int | None = None
) -> Iterator[None]:
    """`assume` meanwhile; then as before."""
    global _assumed
    before = _assumed
    assume(capability, device_type, multiprocessors)
    try:
        yield
    finally:
        _assumed = before


def device_type() -> str:
    """Of tensors that kernels run on."""
    return "cuda" if _assumed is None else _assumed.device_type


def available() -> bool:
    return device_type() != "cuda" or _cuda_available()


@functools.cache
def _cuda_available() -> bool:
    return torch.cuda.is_available()


def parsed(capability: str) -> tuple[int, int]:
    """Of "8.0"."""
    major, minor = capability.split(".")
    return int(major), int(minor)


@functools.cache
def why_no_gluon() -> str | None:
    """The decode and extend kernels are written in Gluon, which older Tritons lack."""
    if importlib.util.find_spec("triton.experimental") and importlib.util.find_spec("triton.experimental.gluon"):
        return None
    return "this Triton has no Gluon (it comes with Triton 3.6)"


def multiprocessors(device: torch.device) -> int:
    known = None if _assumed is None else _assumed.multiprocessors
    return _multiprocessors(device) if known is None else known


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def capability(device: torch.device) -> tuple[int, int]:
    return _capability(device) if _assumed is None else _assumed.capability


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def warp_groups(device: torch.device) -> bool:
    """Whether there are products of warp groups; later GPUs than Hopper have others instead."""
    return capability(device)[0] == 9


def target_of(device: torch.device) -> Target:
    return target(capability(device))


@functools.cache
def target(capability: tuple[int, int]) -> Target:
    return Target(capability >= BULK_CAPABILITY, 1024 * SHARED.get(capability, min(SHARED.values())))
