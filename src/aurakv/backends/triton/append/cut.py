"""How an append is cut into programs: what `launch` and `fit_launch` decide."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..common.specialise import Writer


class Cut(NamedTuple):
    """Constants and counts of `append_kernel` under its names, and what it is launched with."""

    key: Writer
    value: Writer
    rows: int
    grid: tuple[int, ...]
    blocks: int
    options: dict[str, int]
    own: bool = False
    long: bool = False
    fits: tuple[Any, ...] = (None,) * 6
    fitted_blocks: int | None = None
    together: int = 0
    scratch: int = 0  # float32 numbers, of all programs
