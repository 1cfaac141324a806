"""Times of calls that take turns in one process: on the host, as CUDA graphs, or in bursts on an Apple GPU."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

Call = Callable[[int], object]  # gets the number of the call, to walk through buffers
Times = dict[str, float]  # microseconds: us (median), low and high (quartiles)


@contextlib.contextmanager
def alone(realtime: bool = True) -> Iterator[None]:
    """Keep other processes of this machine out of the block, which must be short. Needs the right to it."""
    if realtime:
        _schedule(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if realtime:
            _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, level: int) -> None:
    for task in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(task), policy, os.sched_param(level))


class Timer(Protocol):
    """Buffers of `cycle` bytes keep what is read out of the caches from call to call."""

    cycle: int

    def compare(self, calls: Mapping[str, Call]) -> dict[str, Times]: ...


class HostTimer:
    """Methods take turns in short windows. With `realtime` (needs the right to it) other processes of a shared machine
    stay out of the windows."""

    cycle = 200_000_000

    def __init__(self, rounds: int = 11, window: float = 0.04, realtime: bool = False) -> None:
        self.rounds, self.window, self.realtime = rounds, window, realtime

    def compare(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call(0)
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self._sample(call))
                time.sleep(0.005)
        return {name: summary(x) for name, x in samples.items()}

    def _sample(self, call: Call) -> float:
        with alone(self.realtime):
            call(0)
            count, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < self.window or count == 0:
                call(count)
                count += 1
            return passed / count * 1e6


class BurstTimer(HostTimer):
    """Calls that a device does later: windows of whole bursts, each until the device is done."""

    burst = 16

    def __init__(self, device: torch.device, rounds: int = 11, window: float = 0.04) -> None:
        super().__init__(rounds, window)
        self.device = device

    def _sample(self, call: Call) -> float:
        call(0)
        wait(self.device)
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < self.window or count == 0:
            for _ in range(self.burst):
                call(count)
                count += 1
            wait(self.device)
        return passed / count * 1e6


class GraphTimer:
    """Replays of CUDA graphs with a cold L2 cache: a large buffer is written before each."""

    cycle = 0

    def __init__(self, device: torch.device | str = "cuda", repeats: int = 15, flush_bytes: int = 512 << 20) -> None:
        self.repeats = repeats
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def compare(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        graphs = {name: _capture(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.repeats):
            for name, graph in graphs.items():
                self.flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                samples[name].append(start.elapsed_time(end) * 1e3)
        return {name: summary(x) for name, x in samples.items()}

    def seconds(self, call: Callable[[], object]) -> float:
        """The median of one call."""
        return self.compare({"call": lambda _: call()})["call"]["us"] / 1e6


def timer_for(device: torch.device, rounds: int) -> Timer:
    if device.type == "mps":
        return BurstTimer(device, rounds)
    return GraphTimer(device, rounds) if device.type == "cuda" else HostTimer(rounds)


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def summary(samples: list[float]) -> Times:
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return {"us": round(middle, 1), "low": round(low, 1), "high": round(high, 1)}


def _capture(call: Call) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(0)
    return graph
