"""Calls that all ranks make together: what has to be the same on each of them is compared before anything moves.

Collectives of different sizes are no error that can be caught: gloo ends a process, or leaves it waiting.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..attention.scoring import Scoring
from ..errors import AuraError, PeerError
from .group import Group

Found = TypeVar("Found")
DIGEST, HEADER = 16, 256  # bytes of one small message: a digest, then as much of the description as fits
_REFUSED = bytes(DIGEST)


def together(
    group: Group, what: str, check: Callable[[], Found], describe: Callable[[Found], tuple[object, ...]]
) -> Found:
    """What `check` finds here, once every rank found its arguments right and described the same.

    Where all ranks refuse, each raises its own error; where they differ, all raise PeerError. A group that moves memory
    of GPUs alone compares nothing: the host would have to wait for the device.
    """
    try:
        found = check()
    except AuraError as error:
        _compare(group, what, _REFUSED, f"refuses: {error}", error)
        raise
    if group.size > 1 and group.host:
        text = _shown(describe(found))
        _compare(group, what, hashlib.blake2b(f"{what} {text}".encode(), digest_size=DIGEST).digest(), f"has {text}")
    return found


def _compare(group: Group, what: str, digest: bytes, text: str, cause: AuraError | None = None) -> None:
    if group.size == 1 or not group.host:
        return
    header = digest + f"{what} {text}".encode()[: HEADER - DIGEST].ljust(HEADER - DIGEST)
    everyone = group.gather(torch.frombuffer(bytearray(header), dtype=torch.uint8), what)
    headers = [bytes(row.tolist()) for row in everyone]
    other = next((rank for rank, theirs in enumerate(headers) if theirs[:DIGEST] != digest), None)
    if other is not None:
        mine, theirs = (_read(headers[rank]) for rank in (group.rank, other))
        raise PeerError(
            f"{what} needs the same arguments on all ranks, but rank {group.rank} {mine} and rank {other} {theirs}"
        ) from cause


def _read(header: bytes) -> str:
    text = header[DIGEST:].decode(errors="ignore")
    return text.rstrip() + "…" * (not text.endswith(" "))


def _shown(given: object) -> str:
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    if isinstance(given, tuple):
        return ", ".join(map(_shown, given))
    return _scoring(given) if isinstance(given, Scoring) else str(given)


@functools.lru_cache(maxsize=64)  # every step has the same few
def _scoring(given: Scoring) -> str:
    return repr(given)
