"""Pictures of what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, MUTED, PAPER, GRID = "#1f2430", "#6b7280", "#ffffff", "#e5e7eb"
COLOURS = ("#2563eb", "#0d9488", "#d97706", "#be185d", "#7c3aed", "#4d7c0f", "#b91c1c")
RIVAL = "#9ca3af"


def figure(width: float, height: float, columns: int = 1, rows: int = 1) -> Any:
    """A figure on paper of its own colour, so that it reads on light and dark pages: (figure, axes)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    room = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.1)
    made = Figure(figsize=(width, height), dpi=160, facecolor=PAPER, layout=room)
    axes = made.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.set_facecolor(PAPER)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(MUTED)
        axis.tick_params(colors=INK, labelsize=10)
    return made, axes


def growth(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """The cost of a decode call over tokens; each line is named where it ends."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        lines[row["method"]][row["tokens"]] = row["us"]
    made, (axis,) = figure(8, 4.5)
    colours = iter(COLOURS * len(lines))
    ends = []
    for name, points in lines.items():
        rival = name.startswith("torch")
        colour = RIVAL if rival else next(colours)
        at = sorted(points)
        axis.loglog(at, [points[x] for x in at], marker="o", markersize=4, color=colour, linewidth=2,
                    linestyle="--" if rival else "-")  # fmt: skip
        ends.append((points[at[-1]], name, MUTED if rival else colour))
    measured = sorted({row["tokens"] for row in rows})
    _label_ends(axis, measured[-1], ends)
    axis.set_xticks(measured, [f"{x // 1024}K" if x >= 1024 else str(x) for x in measured])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    ticks = [x for x in (m * 10.0**e for e in range(-1, 8) for m in (1, 3)) if low <= x <= high]
    axis.set_yticks(ticks, [f"{x:g} µs" if x < 1000 else f"{x / 1000:g} ms" for x in ticks])
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel("tokens in the cache", color=INK, fontsize=10)
    axis.set_title(title, color=INK, fontsize=11, loc="left")
    made.savefig(path)


def _label_ends(axis: Any, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names to the right of the last points, moved apart where they would overlap (the scale is logarithmic)."""
    low, high = axis.get_ylim()
    least = (high / low) ** 0.055
    at = 0.0
    for y, name, colour in sorted(ends):
        at = max(y, at * least)
        axis.annotate(name, (x, at), xytext=(8, 0), textcoords="offset points", va="center", color=colour, fontsize=10,
                      annotation_clip=False)  # fmt: skip
