"""Tokens a second of SmolLM2-135M-Instruct at long contexts: transformers' caches and ours, token by token in turns.

    python benchmarks/hf_decode.py --threads 2 --realtime --json benchmarks/baselines/hf_decode.json

The text is read once with the uncompressed cache; the others are given its keys and values, so that all hold the same.
Caches of transformers with 4 bits take part if the package they need is installed. Medians of single steps, with
quartiles; `almost empty` is a step of the model with hardly any cache, which bounds what any cache can reach.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import QuantizedCache

from aurakv import models
from aurakv.bench import machine
from aurakv.bench.model import WARM, Run, decode
from aurakv.bench.timing import summary
from aurakv.evaluation import builtin, ids_of
from aurakv.evaluation.tensors import bytes_of
from aurakv.hf.cache_names import UNCOMPRESSED, cache_named


def runs(model: Any, ids: torch.Tensor, formats: list[str]) -> list[Run]:
    """A run for each cache, all holding the same keys and values."""
    base = Run(UNCOMPRESSED, model, cache_named(model, UNCOMPRESSED), model.config._attn_implementation)
    base.prefill(ids)
    made = [base]
    for name in formats:
        made.append(Run(name, model, cache_named(model, name), model.config._attn_implementation))
    try:
        quanto = QuantizedCache("quanto", model.config, nbits=4)
    except ImportError as error:
        print(f"without QuantizedCache: {error}", file=sys.stderr)
    else:
        made.append(Run("QuantizedCache quanto 4", model, quanto, base.attention))
    for run in made[1:]:
        for number, layer in enumerate(base.cache.layers):
            run.cache.update(layer.keys, layer.values, number)
        run.prefill(ids)
        assert run.cache.get_seq_length() == ids.shape[1] - 1
    empty = Run("almost empty", model, cache_named(model, UNCOMPRESSED), base.attention)
    empty.prefill(ids[:, :2])
    return [*made, empty]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4352, 8000])
    parser.add_argument("--format", nargs="*", default=["k4v4"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--realtime", action="store_true", help="keep other processes out of the timed steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models.quiet()
    model, tokenizer = models.load()
    text = ids_of(builtin(), tokenizer, model.config)
    rows = []
    for tokens in args.tokens:
        made = runs(model, text.repeat(1, -(-tokens // text.shape[1]))[:, :tokens], args.format)
        decode(made, args.steps + WARM, realtime=args.realtime)
        for run in made:
            times = summary([1e6 * x for x in run.seconds[WARM:]])
            rows.append(
                {
                    "tokens": tokens,
                    "cache": run.name,
                    **times,
                    "tokens/s": round(1e6 / times["us"], 2),
                    "times uncompressed": round(run.tokens_per_second / made[0].tokens_per_second, 3),
                    "bytes a token": round(bytes_of(run.cache) / run.cache.get_seq_length()),
                }
            )
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        machine.save(args.json, torch.device("cpu"), rows)


if __name__ == "__main__":
    main()
