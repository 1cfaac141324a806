"""What the commands accept: how they are declared, and the kinds of their arguments. torch is not needed for it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import FileError, InputError, cut, short

Run = Callable[[argparse.Namespace], None]
ECHO = 300  # characters of a message of argparse, which repeats what it was given
DTYPES = ("f32", "f16", "bf16")  # of models, as names of formats spell them
UNCOMPRESSED = "none"  # the format that is no format
AUTO = "auto"  # the format that a cache chooses by itself
POLICIES = Path(__file__).parents[1] / "calibration" / "policies"
MAX_THREADS = 1024  # far above it, OpenMP ends the process without a sentence


class Parser(argparse.ArgumentParser):
    """Help keeps its line breaks, a wrong argument gets one sentence, and options are never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {cut(' '.join(message.split()), ECHO)} (see {self.prog} --help)\n")


def command(
    subparsers: Any,
    name: str,
    run: Run,
    summary: str,
    description: str,
    examples: Sequence[str],
    check: Run = lambda args: None,
) -> Parser:
    """Declare a command; its own options are added to the parser. Examples are lines `aurakv …  # what it does`.

    `check` refuses what can be told from the arguments alone, before `run` imports torch."""
    lines = "\n".join(f"  {line}" for line in examples)
    made: Parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{description}",
        epilog=f"examples:\n{lines}",
    )
    made.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    made.set_defaults(run=run, check=check, parser=made)
    return made


# argument types: argparse shows the message of an ArgumentTypeError


def size(text: str) -> int:
    """Bytes: 1.5e9, 8GB (10^9 each), 8GiB or 8G (2^30 each)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?)(B|iB|)", text.strip(), re.IGNORECASE | re.ASCII)
    found = 0
    if match is not None:
        unit = 1000 if match[3].upper() == "B" else 1024
        wanted = float(match[1]) * unit ** " KMGT".index(match[2].upper() or " ")
        found = int(wanted) if wanted < 2**63 else 0  # 1e400 is infinite
    if not 0 < found < 2**63:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MB, 8GiB or 1.5e9, got {short(text)}")
    return found


def tokens(text: str) -> int:
    """A number of tokens: 4352, 32K (32 · 1024)."""
    match = re.fullmatch(r"(\d[\d_,]{0,30})(K|M|)", text.strip(), re.IGNORECASE | re.ASCII)
    found = int(re.sub("[_,]", "", match[1])) * 1024 ** " KM".index(match[2].upper() or " ") if match else 0
    if not 0 < found < 2**31:
        raise argparse.ArgumentTypeError(f"must be a number of tokens such as 4352 or 32K, got {short(text)}")
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
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {short(text)}")
    return int(text)


def fraction(text: str) -> float:
    number = _number(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {short(text)}")
    return number


def share(text: str) -> float:
    number = _number(text)
    if number is None or not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {short(text)}")
    return number


def _number(text: str) -> float | None:
    try:
        number = float(text) if text.isascii() else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def names(text: str) -> list[str]:
    """Names separated by commas; commas inside brackets (levels) belong to a name."""
    found = [name.strip() for name in re.split(r",(?![^\[]*\])", text)]
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names separated by commas, got {short(text)}")
    return found


def check_formats(
    formats: Sequence[str],
    option: str = "--formats",
    others: Sequence[str] = (),
    policies: bool = True,
    prefixes: Sequence[str] = (),
    instead: str = "",
) -> None:
    """Refuse names that are neither formats nor policies nor among the others, and widths that do not exist: as far as
    that can be told without torch. The rest is said when a name is parsed.

    prefixes: names.PLAIN and names.RECENT, where they may stand before a name; instead: the option for recent tokens.
    """
    from ..format import names

    for given in formats:
        with entry(given, option):
            recent, name = names.recent_and_name(given)
            if recent is not None and names.RECENT not in prefixes:
                use = f"use {option} {name} {instead} {recent}" if instead else f"this command takes {name} alone"
                raise InputError(f"{names.RECENT}<n>: does not belong to {option}: {use}, got {short(given)}")
            if recent is not None and name in others and name != AUTO:
                raise InputError(f"{names.RECENT}<n>: belongs to formats and policies, got {short(given)}")
        if name in others or (policies and name in shipped()):
            continue
        if policies and name.endswith(".json"):
            if not Path(name).exists():
                raise FileError(f"{cut(name)} cannot be read: {os.strerror(errno.ENOENT)}")
            continue
        with entry(given, option):
            try:
                key, _, value, _ = names.parts(name.removeprefix(names.PLAIN) if names.PLAIN in prefixes else name)
            except InputError as error:
                if not policies or re.match(r"k\d", name):
                    raise
                raise InputError(f"{error}; a policy is a .json file or one of {shipped()}") from None
            for bits in map(int, (key, value)):
                if bits not in names.BITS:
                    raise InputError(f"bits must be one of {list(names.BITS)}, got {bits}")


def shipped() -> list[str]:
    """Policies that come with the package."""
    return sorted(file.stem for file in POLICIES.glob("*.json"))


@contextlib.contextmanager
def entry(name: str, option: str = "--formats") -> Iterator[None]:
    """What is wrong with one entry of a list says which one."""
    try:
        yield
    except InputError as error:
        if cut(name) in str(error):
            raise
        raise type(error)(f"{cut(name)} in {option}: {error}") from error


def in_folder(path: Path) -> Path:
    """A path where a file can be written: checked before the work that leads to it."""
    if not path.parent.is_dir():
        raise InputError(f"{cut(str(path.parent), 200)} must be a folder that exists, to save {cut(path.name)} in it")
    if path.is_dir():
        raise InputError(f"{cut(str(path), 200)} must be a file, got a folder")
    return path


def picture(path: Path) -> Path:
    """A path that matplotlib, if it is installed, can write to: checked before the work that leads to a picture."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"a picture must end with .png, .svg or .pdf, got {short(str(path))}")
    in_folder(path)
    import matplotlib  # noqa: F401

    return path


def read_text(path: Path) -> str:
    """A text file in UTF-8, or the sentence why it is not one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be text in UTF-8, got another byte at {error.start}") from None
