"""What a threshold for values gains and loses in a real model on the CPU: SmolLM2-135M-Instruct at a long context.

    python benchmarks/sparse_values_model.py [--text lcet10.txt --context 8000] --json FILE

A text is read once into a `k4v4` cache. Each of the next tokens is then decoded with every threshold, from the same
cache: codes of later tokens would else differ by rounding alone, which costs more than a threshold does. The loss is
the KL divergence of predictions from those without a threshold. The gain is the time in attention, and how many tiles
of 64 values drop out, head by head: here, and in programs of a GPU, which have all of a head or a part of 2048 tokens
and compare with the largest weight that they have seen. One thread; the ratios are what counts.
"""

from __future__ import annotations

import argparse
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
PART = 32  # tiles of a program, where a context is split among programs of a GPU


class Meter:
    """Stands in for `KVCache.step`: sets the threshold, adds up the time, looks at the weights where it is told to."""

    def __init__(self) -> None:
        self.threshold, self.seconds, self.look = 0.0, 0.0, False
        # tiles of a KV head that drop out: here, in programs that have all of a head, in programs of parts; of how many
        self.tiles = {threshold: [0, 0, 0, 0] for threshold in THRESHOLDS}
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
        least = -torch.inf
        most = torch.nn.functional.pad(scores[0], (0, -scores.shape[-1] % TILE), value=least)
        most = most.unflatten(1, (-1, TILE)).amax(2)  # [heads, tiles]
        parts = torch.nn.functional.pad(most, (0, -most.shape[1] % PART), value=least).unflatten(1, (-1, PART))
        seen = parts.cummax(2).values.flatten(1)[:, : most.shape[1]]
        for threshold, counts in self.tiles.items():
            for i, against in enumerate((lse[0, :, None], most.cummax(1).values, seen)):
                below = (most - against).exp() < threshold
                counts[i] += int(below.unflatten(0, (cache.pool.kv_heads, -1)).all(1).sum())
            counts[3] += most.numel() * cache.pool.kv_heads // most.shape[0]


@torch.no_grad()
def measure(text: str, context: int, steps: int) -> list[dict[str, object]]:
    model, tokenizer = models.load()
    ids = ids_of(text, tokenizer, model.config, context + steps)
    register()
    model.set_attn_implementation(NAME)
    cache = cache_named(model, "k4v4")
    for part in ids[:, :context].split(512, 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    meter, kl, same = Meter(), {t: [] for t in THRESHOLDS}, dict.fromkeys(THRESHOLDS, 0)  # type: ignore[var-annotated]
    times: dict[float, list[float]] = {threshold: [] for threshold in THRESHOLDS}
    kv.KVCache.step = lambda cache, *args, **options: meter.step(cache, *args, **options)  # type: ignore[method-assign]
    for at in range(context, context + steps):
        meter.look = at % 8 == 0
        found = {}
        for threshold in reversed(THRESHOLDS):  # the cache keeps what was found without one
            meter.threshold, meter.seconds = threshold, 0.0
            logits = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits[0, -1].double()
            found[threshold] = logits.log_softmax(-1)
            times[threshold].append(meter.seconds)
            if threshold > 0:
                cache.crop(-1)
        for threshold, log in found.items():
            kl[threshold].append(float((found[0.0].exp() * (found[0.0] - log)).sum()))
            same[threshold] += int(log.argmax() == found[0.0].argmax())
    base = statistics.median(times[0.0])
    return [
        {
            "threshold": threshold,
            "context": context,
            "steps": steps,
            "attention_ms": round(1e3 * statistics.median(times[threshold]), 3),
            "time_ratio": round(statistics.median(times[threshold]) / base, 3),
            **{
                name: round(meter.tiles[threshold][i] / meter.tiles[threshold][3], 4)
                for i, name in enumerate(("tiles_dropped", "tiles_dropped_on_gpu", "tiles_dropped_in_parts"))
            },
            "kl_nats": float(f"{statistics.mean(kl[threshold]):.3g}"),
            "kl_most": float(f"{max(kl[threshold]):.3g}"),
            "same_choice": same[threshold] / steps,
        }
        for threshold in THRESHOLDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="Alice in Wonderland otherwise")
    parser.add_argument("--context", type=int, default=4700)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = builtin() if args.text is None else args.text.read_text(encoding="utf-8")
    about = {"text": "alice" if args.text is None else args.text.stem}
    results = [{**about, **row} for row in measure(text, args.context, args.steps)]
    for result in results:
        print(result)
    if args.json:
        machine.save(args.json, torch.device("cpu"), results)


if __name__ == "__main__":
    main()
