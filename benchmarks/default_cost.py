"""What the defaults of AuraCache (key offset, key scale, uncompressed first tokens) cost: a decode step of one layer,
with and without them, in turns.

    python benchmarks/default_cost.py --threads 2 --realtime --json benchmarks/baselines/default_cost.json
    python benchmarks/default_cost.py --device cuda --batch 8 --json benchmarks/baselines/default_cost-h200.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from aurakv.bench import machine
from aurakv.bench.timing import alone, summary
from aurakv.hf import AuraCache
from aurakv.hf.attention import attention
from aurakv.hf.layer import AuraLayer

SHAPES = ((32, 8, 128), (9, 3, 64))  # heads, KV heads, dim
PROMPT = 600  # tokens that the offset and the key_scale are taken from
VARIANTS = {"plain": {"first": 0, "calibrate": False}, "default": {}}


def step(layer: AuraLayer, q: Tensor, k: Tensor, v: Tensor) -> None:
    attention(torch.nn.Module(), q, *layer.update(k, v), None)


def vectors(heads: int, tokens: int, dim: int, args: argparse.Namespace) -> Tensor:
    """[batch, heads, tokens, dim] as a model hands them over."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    return torch.randn(args.batch, tokens, heads, dim, device=args.device, dtype=dtype).transpose(1, 2)


def filled(heads: int, kv_heads: int, dim: int, args: argparse.Namespace) -> dict[str, AuraLayer]:
    """A layer of each variant with the same keys and values."""
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        hidden_size=heads * dim,
    )
    k, v = (vectors(kv_heads, args.tokens, dim, args) for _ in range(2))
    q = vectors(heads, PROMPT, dim, args)
    made = {name: AuraCache(config, "k4v4", **options).layers[0] for name, options in VARIANTS.items()}
    for layer in made.values():
        step(layer, q, k[:, :, :PROMPT], v[:, :, :PROMPT])
        layer.update(k[:, :, PROMPT:], v[:, :, PROMPT:])
        assert layer.get_seq_length() == args.tokens
    assert made["plain"].key_scale is None
    assert made["default"].key_scale is not None
    return made


def measure(layers: dict[str, AuraLayer], heads: int, kv_heads: int, dim: int, args: argparse.Namespace) -> dict:
    q, (k, v) = vectors(heads, 1, dim, args), (vectors(kv_heads, 1, dim, args) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name in layers}
    for i in range(args.steps + 10):
        for name, layer in layers.items():
            with alone(args.realtime):
                start = time.perf_counter()
                for _ in range(args.repeat):  # without waiting for a GPU in between
                    step(layer, q, k, v)
                if args.device != "cpu":
                    torch.cuda.synchronize()
                if i >= 10:
                    times[name].append((time.perf_counter() - start) / args.repeat * 1e6)
    found = {name: summary(x) for name, x in times.items()}
    return {
        "batch": args.batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "tokens": args.tokens,
        **found,
        "default / plain": round(found["default"]["us"] / found["plain"]["us"], 4),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=1, help="steps that are timed together")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--realtime", action="store_true", help="keep other processes out of the timed steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for shape in SHAPES:
        rows.append(measure(filled(*shape, args), *shape, args))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        machine.save(args.json, torch.device(args.device), rows)


if __name__ == "__main__":
    main()
