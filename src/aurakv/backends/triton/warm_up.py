"""Compile kernels before they are needed: what a piece of work would launch is compiled instead, in threads."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton
from torch import Tensor

from .common.launcher import redirected


class Launched(NamedTuple):
    """A launch that did not happen."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def launches(work: Callable[[], None]) -> dict[tuple[Any, ...], Launched]:
    """One launch for each kernel that the work would have compiled, by what Triton specialises it on."""
    found: dict[tuple[Any, ...], Launched] = {}

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.setdefault(specialisation(kernel, arguments, options), Launched(kernel, grid, arguments, options))

    with redirected(note):
        work()
    return found


def compile_all(found: dict[tuple[Any, ...], Launched], threads: int) -> None:
    """Compile kernels, or read them from Triton's cache, and load them."""

    def compile_each() -> None:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
            made = [each.kernel.warmup(*each.arguments, grid=each.grid, **each.options) for each in found.values()]
        for kernel, each in zip(made, found.values(), strict=True):
            compiled = kernel.result() if hasattr(kernel, "result") else kernel
            _ = compiled[(*each.grid, 1, 1)[:3]]  # loads it

    contextvars.copy_context().run(compile_each)  # an error leaves the mode on in its context


def specialisation(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What of the arguments of a launch makes it a kernel of its own."""
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    others = tuple(sorted((name, value) for name, value in given.items() if name not in kernel.arg_names))
    return (kernel.fn.__module__, kernel.fn.__name__, *(_of(x, given[x.name]) for x in kernel.params), *others)


def _of(parameter: Any, value: Any) -> Any:
    if parameter.is_constexpr or value is None:
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return "float" if isinstance(value, float) else repr((type(value).__name__, _described(value)))
    if parameter.do_not_specialize:
        return "int", _wide(value)
    aligned = value % 16 == 0 and not parameter.do_not_specialize_on_alignment
    return "int", 1 if value == 1 else (_wide(value), aligned)


def _wide(value: int) -> bool:
    return not -(2**31) <= value < 2**31


def _described(value: Any) -> Any:
    """Of a tensor descriptor what its type has."""
    if hasattr(value, "block_shape"):
        return value.base.dtype, value.block_shape, getattr(value, "layout", None)
    return value
