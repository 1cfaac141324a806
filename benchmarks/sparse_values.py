"""What a threshold for values saves on the CPU: `attend` and `values` with and without one, interleaved, in one run.

    python benchmarks/sparse_values.py --json benchmarks/baselines/sparse_values.json

One query over 16K tokens of k4v4, one thread. One key in the middle has nearly all the weight, as in heads that look a
token up. The ratios are what counts: other work on the machine changes the times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.bench import machine

TOKENS, DIM, THRESHOLD = 16384, 128, 1e-6
HEADS = ((1, 1), (4, 1), (8, 2))  # query heads, KV heads


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each call; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= 3:
                times[name].append(1e6 * (time.perf_counter() - begin))
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


def measure(heads: int, kv_heads: int, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    cache = kv.KVCache.contiguous(kv.Format.parse("k4v4", DIM), 1, kv_heads, TOKENS, backend="native")
    q = torch.randn(1, heads, DIM)
    k = torch.randn(TOKENS, kv_heads, DIM)
    k[TOKENS // 2] = 3 * q[0].view(kv_heads, -1, DIM).sum(1)  # a score of about 34 for every head
    cache.append(k, torch.randn(TOKENS, kv_heads, DIM))
    keys, stored = cache.codes(0)
    weights = (ops.scores(q, keys, cache.format.key) * DIM**-0.5).softmax(-1)
    below = float((weights < THRESHOLD).float().mean())
    sparse, value = kv.Scoring(threshold=THRESHOLD), cache.format.value
    times = interleaved(
        {
            "attend": lambda: cache.attend(q),
            "attend_threshold": lambda: cache.attend(q, scoring=sparse),
            "attend_one_piece": lambda: cache.attend(q, splits=1),
            "attend_one_piece_threshold": lambda: cache.attend(q, scoring=sparse, splits=1),
            "values": lambda: ops.values(weights, stored, value, backend="native"),
            "values_threshold": lambda: ops.values(weights, stored, value, threshold=THRESHOLD, backend="native"),
        },
        rounds,
    )
    names = ("attend", "attend_one_piece", "values")
    ratios = {name: round(times[f"{name}_threshold"] / times[name], 3) for name in names}
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": TOKENS,
        "format": "k4v4",
        "below": round(below, 6),
        "us": times,
        "ratio": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(*heads, args.rounds) for heads in HEADS]
    for result in results:
        print(result)
    if args.json:
        machine.save(args.json, torch.device("cpu"), results)


if __name__ == "__main__":
    main()
