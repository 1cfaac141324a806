"""The picture of `aurakv demo`: bytes, speed and agreement of each cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.plot import COLOURS, INK, MUTED, RIVAL, figure
from ..errors import counted
from .screen import bytes_text


def save(results: Sequence[dict[str, Any]], facts: dict[str, Any], path: Path) -> None:
    base, rows = results[0], list(results)[::-1]  # bars count from below
    made, axes = figure(10, 1.9 + 0.42 * len(rows), 3)
    colours = [RIVAL if row is base else COLOURS[0] for row in rows]
    names = [row["cache"] for row in rows]
    panels = (
        ("Bytes (smaller than f32, bf16)", [row["bytes"] for row in rows], lambda r: _size(r, base)),
        ("Decoding, tokens/s", [row["tokens_per_second"] for row in rows], lambda r: _speed(r, base)),
        (
            "Same top choice",
            [row["top1"] for row in rows],
            lambda r: "reference" if r is base else _agreement(r),
        ),
    )
    for axis, (title, lengths, label) in zip(axes, panels, strict=True):
        axis.barh(names, lengths, color=colours, height=0.62)
        axis.set_title(title, loc="left", fontsize=11, color=INK)
        axis.set_xticks([])
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.tick_params(length=0, labelsize=11)
        axis.set_xlim(0, max(lengths) * 1.02)
        for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            _label(axis, at, length, max(lengths), label(row))
    for axis in axes[1:]:
        axis.set_yticklabels([])
    made.suptitle(
        f"{facts['model']} after {facts['prompt_tokens']:,} tokens of context", x=0.014, ha="left", fontsize=13,
        fontweight="bold", color=INK,
    )  # fmt: skip
    versions = facts["versions"]
    how = (
        f"k4v4: 4-bit keys, 4-bit values. Measured by aurakv demo on {facts['device']},"
        f" {counted(facts['threads'], 'thread')},"
        f" {facts['dtype']}; torch {versions['torch']}, transformers {versions['transformers']}"
    )
    made.supxlabel(how, x=0.014, ha="left", fontsize=8.5, color=MUTED)
    made.savefig(path)


def _label(axis: Any, at: int, length: float, longest: float, text: str) -> None:
    """Inside a long bar, behind a short one."""
    inside = length > 0.62 * longest
    axis.annotate(
        text, (length, at), xytext=(-6 if inside else 6, 0), textcoords="offset points", va="center", fontsize=10,
        ha="right" if inside else "left", color="white" if inside else INK,
    )  # fmt: skip


def _size(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Ratios of float32 and of bfloat16, in this order; the title of the panel says so."""
    times = row["times_smaller"]
    ratios = f"{times['of_float32']:.1f}x, {times['of_bfloat16']:.1f}x"
    return bytes_text(row["bytes"]) if row is base else f"{bytes_text(row['bytes'])}: {ratios}"


def _speed(row: dict[str, Any], base: dict[str, Any]) -> str:
    if row is base:
        return f"{row['tokens_per_second']:.1f}"
    times = row["times_faster"]
    return f"{row['tokens_per_second']:.1f}, {times:.2f}x {'faster' if times > 1 else 'as fast'}"


def _agreement(row: dict[str, Any]) -> str:
    return f"{row['top1']:.1%}, KL {row['kl']:.2g}"
