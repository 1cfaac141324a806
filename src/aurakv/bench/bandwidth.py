"""How fast this machine reads memory that is in no cache."""

from __future__ import annotations

import statistics
import time

import torch


def read(device: torch.device | str, repeats: int = 5) -> float:
    """Bytes a second, all threads: the median of some sums over a tensor larger than the caches."""
    device = torch.device(device)
    words = torch.ones(50_000_000 if device.type == "cpu" else 1 << 28, dtype=torch.int64, device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        words.sum()
        wait()
        times.append(time.perf_counter() - start)
    return words.nbytes / statistics.median(times[1:])
