"""Tokens a second against concurrency, from the JSON of benchmarks/engine_gpu.py.

    python benchmarks/engine_gpu_plot.py benchmarks/baselines/engine_gpu-h200.json docs/images/engine-gpu.png \
        --more benchmarks/baselines/engine_gpu-h200-386.json

A row of --more takes the place of that of the same cache. A line ends with a bar where no more sequences fit into
memory. The legend says how many fit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

NAMES = {"bf16": "vLLM bf16", "fp8": "vLLM fp8", "turboquant_4bit_nc": "vLLM turboquant_4bit_nc"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="other files of engine_gpu.py")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--caches", help="which of them, separated by commas (default all)")
    args = parser.parse_args()
    found = (row for file in (args.source, *args.more) for row in json.loads(file.read_text("utf-8"))["rows"])
    rows = list({row["cache"]: row for row in found}.values())
    for row in rows:
        named = (name.split("x") for name in row.get("steps", {}))
        counts = [int(count) for count, tokens in named if int(tokens) == args.tokens]
        row["points"] = [(n, row["steps"][f"{n}x{args.tokens}"]["tokens_per_s"]) for n in sorted(counts)]
    rows = [row for row in rows if len(row["points"]) > 1]
    if args.caches:
        rows = [row for name in args.caches.split(",") for row in rows if row["cache"] == name]
    if not rows:
        raise SystemExit(f"{args.source} has no cache with more than one batch of prompts of {args.tokens} tokens")
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        points, fits = row["points"], row["fits"][str(args.tokens)]
        name = f"{NAMES.get(row['cache'], row['cache'])} ({fits} fit)"
        (line,) = axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        if points[-1][0] == fits:
            axis.plot(*points[-1], marker="|", markersize=22, markeredgewidth=2, color=line.get_color())
    axis.set_xlabel(f"sequences of {args.tokens:,} tokens at once")
    axis.set_ylabel("tokens generated a second")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(f"{rows[0]['model']}, {rows[0]['device']}, vLLM {rows[0]['versions']['vllm']}", fontsize=10)
    figure.savefig(args.target, dpi=160)


if __name__ == "__main__":
    main()
