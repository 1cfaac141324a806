"""What the commands share: how they are declared, what they accept, where they write."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..errors import InputError

Run = Callable[[argparse.Namespace], None]
MAX_THREADS = 1024  # far above it, OpenMP ends the process without a sentence


class Parser(argparse.ArgumentParser):
    """Help keeps its line breaks, a wrong argument gets one sentence, and options are never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def command(subparsers: Any, name: str, run: Run, summary: str, description: str, examples: Sequence[str]) -> Parser:
    """Declare a command; its own options are added to the parser. Examples are lines `aurakv …  # what it does`."""
    lines = "\n".join(f"  {line}" for line in examples)
    made: Parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{description}",
        epilog=f"examples:\n{lines}",
    )
    made.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    made.set_defaults(run=run, parser=made)
    return made


# argument types: argparse shows the message of an ArgumentTypeError


def size(text: str) -> int:
    """Bytes: 1.5e9, 8GB (10^9 each), 8GiB or 8G (2^30 each)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?)(B|iB|)", text.strip(), re.IGNORECASE)
    found = 0
    if match is not None:
        unit = 1000 if match[3].upper() == "B" else 1024
        found = int(float(match[1]) * unit ** " KMGT".index(match[2].upper() or " "))
    if not 0 < found < 2**63:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MB, 8GiB or 1.5e9, got {text!r}")
    return found


def tokens(text: str) -> int:
    """A number of tokens: 4352, 32K (32 · 1024)."""
    match = re.fullmatch(r"(\d[\d_,]*)(K|M|)", text.strip(), re.IGNORECASE)
    found = int(re.sub("[_,]", "", match[1])) * 1024 ** " KM".index(match[2].upper() or " ") if match else 0
    if not 0 < found < 2**31:
        raise argparse.ArgumentTypeError(f"must be a number of tokens such as 4352 or 32K, got {text!r}")
    return found


def token_list(text: str) -> list[int]:
    return [tokens(part) for part in text.split(",")]


def count(text: str) -> int:
    return _whole(text, 1, 2**31 - 1, "of at least 1")


def threads(text: str) -> int:
    return _whole(text, 1, MAX_THREADS, f"from 1 to {MAX_THREADS}")


def natural(text: str) -> int:
    return _whole(text, 0, 2**31 - 1, "of at least 0")


def _whole(text: str, least: int, most: int, allowed: str) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    number = _number(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return number


def share(text: str) -> float:
    number = _number(text)
    if number is None or not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return number


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def names(text: str) -> list[str]:
    """Names separated by commas; commas inside brackets (levels) belong to a name."""
    found = [name.strip() for name in re.split(r",(?![^\[]*\])", text)]
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names separated by commas, got {text!r}")
    return found


@contextlib.contextmanager
def entry(name: str, option: str = "--formats") -> Iterator[None]:
    """What is wrong with one entry of a list says which one."""
    try:
        yield
    except InputError as error:
        if name in str(error):
            raise
        raise type(error)(f"{name} in {option}: {error}") from error


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
            self.out.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """What is going on, while it does; not part of the result."""
        self.err.print(text, markup=False, soft_wrap=True, style="dim")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns whose name starts with > are numbers, which are never cut."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        if self.json:
            return
        if title:
            self.out.print(Text(title, style="bold"), soft_wrap=True)  # a title of the table would break at its width
        made = Table(box=SIMPLE_HEAD)
        cells = [[str(cell) for cell in row] for row in rows]
        for at, name in enumerate(columns):
            number = name.startswith(">")
            widest = max((len(row[at]) for row in cells), default=0) if number or at == 0 else None
            justify: Literal["right", "left"] = "right" if number else "left"
            made.add_column(Text(name.removeprefix(">")), justify=justify, min_width=widest, overflow="fold")
        for row in cells:
            made.add_row(*map(Text, row))
        self.out.print(made)

    def result(self, document: object) -> None:
        """The JSON of a command; says nothing without --json."""
        if self.json:
            sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Callable[..., None]]:
        """A bar on stderr, if that is a terminal, while the block runs: call step(), step(5), step(text="…")."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        known = [BarColumn(), MofNCompleteColumn()] if total is not None else []
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), *known, TimeElapsedColumn()]
        with Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal) as bar:
            task = bar.add_task(description, total=total)

            def step(amount: float = 1, *, text: str | None = None) -> None:
                bar.update(task, advance=amount, description=description if text is None else text)

            yield step


def in_folder(path: Path) -> Path:
    """A path where a file can be written: checked before the work that leads to it."""
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} must be a folder that exists, to save {path.name} in it")
    if path.is_dir():
        raise InputError(f"{path} must be a file, got a folder")
    return path


def picture(path: Path) -> Path:
    """A path that matplotlib, if it is installed, can write to: checked before the work that leads to a picture."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"a picture must end with .png, .svg or .pdf, got {path}")
    in_folder(path)
    import matplotlib  # noqa: F401

    return path


def read_text(path: Path) -> str:
    """A text file in UTF-8, or the sentence why it is not one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be text in UTF-8, got another byte at {error.start}") from None


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
