"""How fast this machine reads memory that is in no cache."""

from __future__ import annotations

import torch

from .timing import Timer, timer_for


def read(device: torch.device | str, timer: Timer | None = None) -> float:
    """Bytes a second, all threads: sums over a tensor larger than the caches."""
    device = torch.device(device)
    words = (
        torch.ones(50_000_000, dtype=torch.int64) if device.type == "cpu" else torch.ones(_count(device), device=device)
    )
    times = (timer or timer_for(device, 5)).compare({"read": lambda _: words.sum()})["read"]
    return words.nbytes / times["us"] * 1e6


def copy(device: torch.device | str, timer: Timer | None = None) -> float:
    """Bytes a second, read and written."""
    device = torch.device(device)
    source = torch.ones(_count(device), device=device)
    target = torch.empty_like(source)
    # in a CUDA graph copy_ becomes a node of its own kind that reaches two thirds of what a kernel does
    step = (lambda _: torch.add(source, 1, out=target)) if device.type == "cuda" else (lambda _: target.copy_(source))
    times = (timer or timer_for(device, 5)).compare({"copy": step})["copy"]
    return 2 * source.nbytes / times["us"] * 1e6


def _count(device: torch.device) -> int:
    """Numbers of 4 bytes: on a large GPU 4 GiB, so that starting the kernel does not count."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > 2**35
    return 1 << (30 if large else 26)
