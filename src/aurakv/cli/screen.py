"""What the commands print: text and tables on stdout, progress on stderr, or one JSON document."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0  # between lines of progress in a file
TEXT_WIDTH = 16  # characters that a column of text needs at least


class Screen:
    """Where a command writes: text and tables on stdout, progress on stderr. With --json only the document."""

    def __init__(self, args: argparse.Namespace) -> None:
        from rich.console import Console

        self.json: bool = args.json
        self.out = Console(highlight=False)
        if not self.out.is_terminal:  # a file or a pipe has no edge
            self.out.width = 200
        self.err = Console(stderr=True, highlight=False)

    def say(self, text: str = "") -> None:
        if not self.json:
            self.out.print(_at_words(text, self.out), markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """What is going on, while it does; not part of the result."""
        self.err.print(_at_words(text, self.err), markup=False, soft_wrap=True, style="dim")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns whose name starts with > are numbers. What does not fit side by side is stacked: nothing is cut."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        if self.json:
            return
        if title:
            self.out.print(Text(title, style="bold"), soft_wrap=True)  # a title of the table would break at its width
        cells = [[str(cell) for cell in row] for row in rows]
        widths = _widths(columns, cells, self.out.width)
        if widths is None:
            self._stack([name.removeprefix(">") for name in columns], cells)
            return
        made = Table(box=SIMPLE_HEAD)
        for name, width in zip(columns, widths, strict=True):
            justify: Literal["right", "left"] = "right" if name.startswith(">") else "left"
            made.add_column(Text(name.removeprefix(">")), justify=justify, width=width, overflow="fold")
        for row in cells:
            made.add_row(*map(Text, row))
        self.out.print(made)

    def _stack(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Each row as lines of a name and a cell, under its first cell."""
        from rich.text import Text

        names = max(map(len, columns[1:]), default=0)
        for row in rows:
            self.out.print(Text(row[0], style="bold"), soft_wrap=True)
            for name, cell in zip(columns[1:], row[1:], strict=True):
                before = f"  {name:{names}}  " if name else "  "
                lines = textwrap.wrap(cell, max(TEXT_WIDTH, self.out.width - len(before)))
                for number, line in enumerate(lines):
                    self.out.print(Text((before if number == 0 else " " * len(before)) + line), soft_wrap=True)
        self.out.print()

    def result(self, document: object) -> None:
        """The JSON of a command; says nothing without --json."""
        if self.json:
            sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def progress(
        self, description: str, total: float | None = None, *, lines: bool = False
    ) -> Iterator[Callable[..., None]]:
        """A bar on stderr, if that is a terminal, while the block runs: call step(), step(5), step(text="…").

        With `lines` a file gets a line now and then instead."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        known = [BarColumn(), MofNCompleteColumn()] if total is not None else []
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), *known, TimeElapsedColumn()]
        lines = lines and not self.err.is_terminal
        began = said = time.monotonic()
        done = 0.0
        with Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal) as bar:
            task = bar.add_task(description, total=total)

            def step(amount: float = 1, *, text: str | None = None) -> None:
                nonlocal done, said
                done += amount
                bar.update(task, advance=amount, description=description if text is None else text)
                if lines and time.monotonic() - said >= LINE_SECONDS:
                    said = time.monotonic()
                    share = f" of {total:g}" if total is not None else ""
                    self.note(f"{text or description}: {math.floor(done + 1e-6)}{share}, {said - began:.0f} s")

            yield step


def up_to(step: Callable[..., None]) -> Callable[..., None]:
    """The step of a progress bar for who knows how much is done in all, not how much more."""
    last = 0.0

    def report(done: float, total: float = 0, *, text: str | None = None) -> None:
        nonlocal last
        step(done - last, text=text)
        last = done

    return report


def _at_words(text: str, console: Console) -> str:
    """Lines that break between words on a terminal, which would break anywhere; a path stays in one piece."""
    if not console.is_terminal:
        return text
    lines = textwrap.TextWrapper(
        console.width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(map(lines.fill, text.split("\n")))


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[int] | None:
    """How wide columns are side by side: as wide as they like where there is room, and no word of a heading, no number
    and no first cell is ever broken. None: they do not fit."""
    least, wanted = [], []
    for at, name in enumerate(columns):
        heading, widest = name.removeprefix(">"), max((len(row[at]) for row in rows), default=0)
        whole = name.startswith(">") or at == 0
        words = max(map(len, heading.split()), default=0)
        least.append(max(words, widest if whole else min(widest, TEXT_WIDTH)))
        wanted.append(max(len(heading), widest))
    room = most - sum(least) - 3 * len(columns) - 1  # a column has a space on both sides and a gap
    if room < 0:
        return None
    found = []
    for small, large in zip(least, wanted, strict=True):
        found.append(min(large, small + room))
        room -= found[-1] - small
    return found


def bytes_text(number: float) -> str:
    """27.4 MiB, 820 B."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return (
                f"{number:.0f} B"
                if unit == "B"
                else f"{number:.3g} {unit}"
                if number < 1000
                else f"{number:.0f} {unit}"
            )
        number /= 1024
    return f"{number:,.2f} TiB"


def time_text(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
