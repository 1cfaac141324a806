"""What a threshold for values gains and loses in a real model on the CPU: SmolLM2-135M-Instruct at a long context.

    python benchmarks/sparse_values_model.py --json benchmarks/baselines/sparse_values_model.json

A text is read once into a `k4v4` cache; copies of it then decode the same next tokens, each with another threshold,
taking turns. The loss is the KL divergence of their predictions from those without a threshold. The gain is the time in
attention, and how many tiles of 64 values drop out, head by head. One thread; the ratios are what counts.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import aurakv as kv
from aurakv import models
from aurakv.attention import ops
from aurakv.bench import machine
from aurakv.calibration.key_scale import scaled_queries
from aurakv.evaluation import builtin, ids_of
from aurakv.hf.attention import NAME, register
from aurakv.hf.cache_names import cache_named

THRESHOLDS = (0.0, 1e-30, 1e-6, 1e-5, 1e-4, 1e-3)  # 1e-30 drops nothing: what rounding in another order does
TILE = 64  # tokens whose values drop out together


class Meter:
    """Stands in for `KVCache.step`: sets the threshold, adds up the time, looks at the weights where it is told to."""

    def __init__(self) -> None:
        self.threshold, self.seconds, self.look = 0.0, 0.0, False
        self.tiles = {threshold: [0, 0] for threshold in THRESHOLDS}  # dropped, of all; a tile is that of a KV head
        self._step = kv.KVCache.step

    def step(self, cache: kv.KVCache, q: Any, k: Any, v: Any, starts: Any, scoring: kv.Scoring, **options: Any) -> Any:
        scoring = dataclasses.replace(scoring, threshold=self.threshold)
        begin = time.perf_counter()
        part = self._step(cache, q, k, v, starts, scoring, **options)
        self.seconds += time.perf_counter() - begin
        if self.look and self.threshold == 0:
            self._count(cache, scaled_queries(q, options["key_scale"]), part.lse)
        return part

    def _count(self, cache: kv.KVCache, q: torch.Tensor, lse: torch.Tensor) -> None:
        scores = ops.scores(q, cache.codes(0)[0], cache.format.key, cache.pool.key_offset) * q.shape[-1] ** -0.5
        weights = (scores - lse[..., None]).exp()[0].unflatten(0, (cache.pool.kv_heads, -1)).amax(1)
        most = torch.nn.functional.pad(weights, (0, -weights.shape[1] % TILE)).unflatten(1, (-1, TILE)).amax(2)
        for threshold, counts in self.tiles.items():
            counts[0] += int((most < threshold).sum())
            counts[1] += most.numel()


@torch.no_grad()
def measure(context: int, steps: int) -> list[dict[str, object]]:
    model, tokenizer = models.load()
    ids = ids_of(builtin(), tokenizer, model.config, context + steps)
    register()
    model.set_attn_implementation(NAME)
    first = cache_named(model, "k4v4")
    for part in ids[:, :context].split(512, 1):
        model(part, past_key_values=first, use_cache=True, logits_to_keep=1)
    caches = {threshold: copy.deepcopy(first) for threshold in THRESHOLDS}
    meter, kl, same = Meter(), {t: [] for t in THRESHOLDS}, dict.fromkeys(THRESHOLDS, 0)  # type: ignore[var-annotated]
    times: dict[float, list[float]] = {threshold: [] for threshold in THRESHOLDS}
    kv.KVCache.step = lambda cache, *args, **options: meter.step(cache, *args, **options)  # type: ignore[method-assign]
    for at in range(context, context + steps):
        meter.look = at % 8 == 0
        expected = None
        for threshold, cache in caches.items():
            meter.threshold, meter.seconds = threshold, 0.0
            logits = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0, -1].double()
            found = logits.log_softmax(-1)
            expected = found if expected is None else expected
            kl[threshold].append(float((expected.exp() * (expected - found)).sum()))
            same[threshold] += int(found.argmax() == expected.argmax())
            times[threshold].append(meter.seconds)
    base = statistics.median(times[0.0])
    return [
        {
            "threshold": threshold,
            "context": context,
            "steps": steps,
            "attention_ms": round(1e3 * statistics.median(times[threshold]), 3),
            "time_ratio": round(statistics.median(times[threshold]) / base, 3),
            "tiles_dropped": round(meter.tiles[threshold][0] / meter.tiles[threshold][1], 4),
            "kl_nats": float(f"{statistics.mean(kl[threshold]):.3g}"),
            "kl_most": float(f"{max(kl[threshold]):.3g}"),
            "same_choice": same[threshold] / steps,
        }
        for threshold in THRESHOLDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4700)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(args.context, args.steps)
    for result in results:
        print(result)
    if args.json:
        machine.save(args.json, torch.device("cpu"), results)


if __name__ == "__main__":
    main()
