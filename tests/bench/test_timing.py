"""Times of calls that a device does later."""

import torch

from aurakv.bench import timing


def test_bursts_wait_for_the_device(monkeypatch):
    """A window ends with a wait, and the time is that of one call."""
    events = []
    monkeypatch.setattr(timing, "wait", lambda device: events.append("wait"))
    timer = timing.BurstTimer(torch.device("mps"), rounds=2, window=0.0)
    times = timer.compare({"call": lambda i: events.append(i)})
    assert times["call"]["us"] > 0
    burst = [*range(timer.burst), "wait"]
    assert events == [0, *([0, "wait", *burst] * 2)]
    assert isinstance(timing.timer_for(torch.device("mps"), 3), timing.BurstTimer)
