"""The GPU and the Triton that kernels are launched with: what it has, and what it lacks."""

from __future__ import annotations

import functools
import importlib.util

import torch

DECODE_CAPABILITY = (9, 0)  # of GPUs that the decode kernel is for


def why_no_gluon() -> str | None:
    """The decode and extend kernels are written in Gluon, which older Tritons lack."""
    if importlib.util.find_spec("triton.experimental") and importlib.util.find_spec("triton.experimental.gluon"):
        return None
    return "this Triton has no Gluon (it comes with Triton 3.6)"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
