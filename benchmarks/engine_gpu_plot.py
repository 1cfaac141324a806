"""Tokens a second against concurrency, from the JSON of benchmarks/engine_gpu.py.

    python benchmarks/engine_gpu_plot.py benchmarks/baselines/engine_gpu-h200.json docs/images/engine-gpu.png \
        --more benchmarks/baselines/engine_gpu-h200-386.json

Points of --more are added to those of the same cache. A line ends with a bar where no more sequences fit into memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aurakv.bench.plot import COLOURS, GRID, INK, MUTED, RIVAL, figure

NAMES = {"bf16": "vLLM bf16", "fp8": "vLLM fp8", "turboquant_4bit_nc": "vLLM turboquant_4bit_nc"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="other files of engine_gpu.py")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--caches", help="which of them, separated by commas (default all)")
    args = parser.parse_args()
    rows = joined([json.loads(file.read_text("utf-8")) for file in (args.source, *args.more)], args.tokens)
    if args.caches:
        rows = [row for name in args.caches.split(",") for row in rows if row["cache"] == name]
    if not rows:
        raise SystemExit(f"{args.source} has no cache with more than one batch of prompts of {args.tokens} tokens")
    made, (axis,) = figure(7, 4.2)
    ours = iter(COLOURS)
    for row in rows:
        points, fits = sorted(row["points"].items()), row["fits"][str(args.tokens)]
        colour = RIVAL if row["cache"] in NAMES else next(ours)
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=2, color=colour)
        if points[-1][0] == fits:
            axis.plot(*points[-1], marker="|", markersize=22, markeredgewidth=2, color=colour)
        name = f"{NAMES.get(row['cache'], row['cache'])}: {fits} fit"
        ink = MUTED if colour == RIVAL else colour
        axis.annotate(
            name, points[-1], xytext=(0, -32), textcoords="offset points", fontsize=10, ha="center", color=ink
        )
    axis.set_xlabel(f"sequences of {args.tokens:,} tokens at once", color=INK, fontsize=10)
    axis.set_xlim(left=0, right=1.1 * max(count for row in rows for count in row["points"]))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    where = f"{rows[0]['model']}, {rows[0]['device']}, vLLM {rows[0]['versions']['vllm']}"
    axis.set_title(f"Tokens generated a second: {where}", color=INK, fontsize=11, loc="left")
    made.savefig(args.target)


def joined(files: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """The caches of all files, with their points: sequences of so many tokens, and tokens a second."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for file in files for row in file["rows"]):
        points = rows.get(row["cache"], {"points": {}})["points"]
        for name, step in row.get("steps", {}).items():
            count, length = map(int, name.split("x"))
            if length == tokens:
                points.setdefault(count, step["tokens_per_s"])
        rows[row["cache"]] = {**row, "points": points}
    return [row for row in rows.values() if len(row["points"]) > 1]


if __name__ == "__main__":
    main()
