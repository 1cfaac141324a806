"""Every error aurakv raises on purpose: one root, one clear sentence each (what, what is allowed, what came)."""

import contextlib
from collections.abc import Iterator


class AuraError(Exception):
    """Root of all errors raised by aurakv."""


class InputError(AuraError, ValueError):
    """An argument is wrong: bits, dimensions, shapes, dtypes, devices, options."""


class FileError(InputError):
    """A file is not a cache this version can read: wrong version, truncated, corrupted or hostile.

    Or it cannot be written where it was asked for.
    """


class CapacityError(AuraError, RuntimeError):
    """There is no room: pages, capacity, or the rollback of a ring."""


class BackendError(AuraError, RuntimeError):
    """A backend that was asked for by name cannot run this."""


class PeerError(AuraError, RuntimeError):
    """Another process is gone, did not answer in time, or refused what this one sent."""


@contextlib.contextmanager
def needing(package: str, extra: str) -> Iterator[None]:
    """Imports whose failure says which extra of aurakv brings the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(missing(package, extra), name=package) from None


def missing(package: str, *extras: str) -> str:
    """What brings a package that is not installed."""
    return f'this needs the package {package}: pip install "aurakv[{",".join(sorted(extras))}]"'


def short(given: object) -> str:
    """What an error repeats of what it was given: on one line, and not much of it."""
    return cut(" ".join(repr(given).split()))


def cut(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "…"


def counted(number: int, noun: str) -> str:
    """1 thread, 2 threads, 1,024 queries."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"
