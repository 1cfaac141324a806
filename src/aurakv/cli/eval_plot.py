"""The picture of `aurakv eval`: the loss of each cache against its bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.plot import COLOURS, GRID, INK, MUTED, RIVAL, figure
from ..format.names import PLAIN, recent_and_name

MOST_COLUMNS = 3  # of panels; more come in pairs
_KINDS = {  # of caches: colour, mark, what the legend says
    "format": (COLOURS[0], "o", "aurakv"),
    "recent": (COLOURS[3], "D", "aurakv, recent tokens uncompressed"),
    "policy": (COLOURS[2], "*", "aurakv, tuned policy"),
    "plain": (COLOURS[1], "s", "aurakv, codes alone"),
    "rival": (RIVAL, "X", "other libraries"),
}


def save(models: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """One panel per model; KL and bytes are means over the texts that all of its caches read."""
    columns = len(models) if len(models) <= MOST_COLUMNS else 2
    lines = -(-len(models) // columns)
    made, axes = figure(5.6 * columns if columns > 1 else 8, 4.8 * lines, columns, lines)
    for axis, (name, rows) in zip(axes, models.items(), strict=False):
        _panel(axis, name, shared(rows))
    for axis in axes[len(models) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("mean KL divergence from uncompressed, nats", color=INK, fontsize=10)
    found = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    marks = [found[legend] for _, _, legend in _KINDS.values() if legend in found]
    made.legend(handles=marks, loc="outside lower center", ncols=5, frameon=False, fontsize=9, labelcolor=INK)
    made.savefig(path)


def shared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of texts that all caches read; all rows where there is no such text."""
    texts = defaultdict(set)
    for row in rows:
        texts[row["name"]].add(row["text"])
    common = set.intersection(*texts.values())
    return [row for row in rows if row["text"] in common or not common]


def means(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """(bytes per token, KL) of each cache, averaged over texts; without the uncompressed one."""
    found = defaultdict(list)
    for row in rows:
        if row["kl"] > 0:
            found[row["name"]].append((row["bytes_per_token"], row["kl"]))
    return {name: (sum(x for x, _ in at) / len(at), sum(y for _, y in at) / len(at)) for name, at in found.items()}


def kind(name: str) -> str:
    from ..evaluation import rivals

    if name in rivals.names():
        return "rival"
    recent, name = recent_and_name(name)
    if recent:
        return "recent"
    if name.startswith(PLAIN):
        return "plain"
    return "format" if name[0] == "k" and name[1:2].isdigit() else "policy"


def _panel(axis: Any, title: str, rows: Sequence[dict[str, Any]]) -> None:
    points = means(rows)
    for what, (colour, mark, legend) in _KINDS.items():
        mine = [at for name, at in points.items() if kind(name) == what]
        if mine:
            xs, ys = zip(*sorted(mine), strict=True)
            if what != "rival":
                axis.plot(xs, ys, color=colour, linewidth=1, alpha=0.4)
            axis.scatter(xs, ys, color=colour, marker=mark, s=130 if mark == "*" else 42, label=legend, zorder=3)
    axis.set_yscale("log")
    axis.set_xscale("log")
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.2, y=0.16)
    _ticks(axis, points)
    _labels(axis, points)
    texts = len({row["text"] for row in rows})
    tokens = rows[0]["tokens"]
    axis.set_xlabel("bytes per token that the cache holds", color=INK, fontsize=10)
    axis.set_title(f"{title}, {tokens:,} tokens of {texts} text{'s' * (texts > 1)}", loc="left", color=INK, fontsize=11)


def _ticks(axis: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Round numbers on both axes."""
    xs, ys = zip(*points.values(), strict=True)
    steps = (1, 1.5, 2, 3, 4, 6) if max(xs) > 4 * min(xs) else (1, 1.5, 2, 3, 4, 5, 6, 8)  # names need room
    sizes = [m * 10**e for e in range(1, 7) for m in steps]
    losses = [m * 10.0**e for e in range(-6, 2) for m in (1, 2, 5)]
    axis.set_xticks(_between(sizes, xs), [f"{x:,.0f}" for x in _between(sizes, xs)])
    axis.set_yticks(_between(losses, ys), [f"{y:g}" for y in _between(losses, ys)])
    axis.minorticks_off()


def _between(steps: Sequence[float], values: Sequence[float]) -> list[float]:
    return [x for x in steps if 0.8 * min(values) <= x <= 1.2 * max(values)]


def _labels(axis: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Beside each point, on the first side where the name covers no other name and no point."""
    axis.figure.canvas.draw()  # the layout is known now
    to_points = 72 / axis.figure.dpi
    at = {name: axis.transData.transform(place) * to_points for name, place in points.items()}
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in at.values()]
    for name, (x, y) in sorted(at.items(), key=lambda item: item[1][1]):
        text, colour = _short(name), _KINDS[kind(name)][0]
        width = 5.0 * len(text)
        sides = [(8, 0), (-8 - width, 0), (-width / 2, 11), (-width / 2, -11), (8, 9), (8, -9), (-8 - width, 9)]
        if kind(name) == "policy":  # lines to smaller caches go up
            sides = [sides[3], *sides]
        boxes = [(x + dx, y + dy - 5, x + dx + width, y + dy + 5) for dx, dy in sides]
        best = min(range(len(sides)), key=lambda n: sum(_overlap(boxes[n], other) for other in taken))
        taken.append(boxes[best])
        axis.annotate(text, points[name], xytext=sides[best], textcoords="offset points", fontsize=8.5, va="center",
                      color=MUTED if colour == RIVAL else colour)  # fmt: skip


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """The area that two boxes (left, bottom, right, top) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _short(name: str) -> str:
    name = recent_and_name(name)[1].removeprefix(PLAIN)
    return Path(name).stem if name.endswith(".json") else name.replace("turboquant_", "tq ")
