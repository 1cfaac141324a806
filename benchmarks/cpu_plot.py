"""Growth of the cost of a decode step over tokens, batch and heads, from the JSON of benchmarks/cpu.py.

python benchmarks/cpu_plot.py benchmarks/baselines/cpu-growth.json docs/images/cpu-growth.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

BASE = {"batch": 1, "heads": 32, "tokens": 4096}


def main() -> None:
    source, target = sys.argv[1:]
    data = json.loads(Path(source).read_text())
    rows = [row for row in data["rows"] if row["what"] == "growth"]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, varied in zip(axes, ("tokens", "batch", "heads"), strict=True):
        lines: dict[str, dict[int, float]] = defaultdict(dict)
        for row in rows:
            if all(row[name] == value for name, value in BASE.items() if name != varied):
                lines[row["method"]][row[varied]] = row["us"]
        for method, points in lines.items():
            if len(points) > 1:
                axis.loglog(sorted(points), [points[x] for x in sorted(points)], marker="o", label=method)
        axis.set_xlabel({"tokens": "tokens", "batch": "sequences", "heads": "query heads (8 KV heads)"}[varied])
        axis.set_ylabel("µs a call")
        measured = sorted({x for points in lines.values() for x in points})
        axis.set_xticks(measured, [f"{x // 1024}K" if x >= 1024 else str(x) for x in measured])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"{data['cpu']}, {data['threads']} threads, head dim 128")
    figure.savefig(target, **({"metadata": {"Date": None}} if target.endswith("svg") else {}))


if __name__ == "__main__":
    main()
