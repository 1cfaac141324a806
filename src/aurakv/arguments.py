"""Numbers and types that come from outside: one rule each, so that all that is made of them is judged alike."""

from __future__ import annotations

import contextlib
import math
import operator

import torch
from torch import Tensor

from .errors import InputError, cut, short


def index(number: object) -> int | None:
    """A whole number of any kind (Python, numpy, a tensor without dimensions) as an int; None: it is no such number.

    True and False are answers, not numbers.
    """
    if type(number) is int:
        return number
    if isinstance(number, bool) or (isinstance(number, Tensor) and (number.ndim > 0 or number.dtype == torch.bool)):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # a tensor without contents raises the latter
        return None


def whole(name: str, number: object, least: int, most: int | None = None) -> int:
    """The number as an int."""
    found = index(number)
    if found is None or found < least or (most is not None and found > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {allowed}, got {shown(number)}")
    return found


def finite(name: str, number: object) -> float:
    """The number as a float, of any kind that knows how to become one; a text or True does not count."""
    found = math.nan
    if type(number) is float:
        found = number
    elif hasattr(number, "__float__") and not isinstance(number, bool):
        try:
            found = float(number)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # several numbers, or one beyond all floats
            found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{name} must be a finite number, got {shown(number)}")
    return found


def device_of(given: torch.device | str, name: str = "device") -> torch.device:
    """The device of this name; whether torch can use it here is not asked."""
    if isinstance(given, torch.device | str | int) and not isinstance(given, bool):
        with contextlib.suppress(RuntimeError):
            return torch.device(given)
    raise InputError(f"{name} must be a torch.device or the name of one, such as cpu or cuda:0, got {shown(given)}")


def usable_device(given: torch.device | str, name: str = "device") -> torch.device:
    """The same, with its index, where torch can use it."""
    where = device_of(given, name)
    try:
        return torch.empty(0, device=where).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = cut(str(error).strip().split("\n")[0], 200)
        raise InputError(f"{name} must be a device that torch can use here, got {shown(given)}: {reason}") from None


def instance(name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise InputError(f"{name} must be {article} {kind.__name__}, got {shown(given)}")


def shown(given: object) -> str:
    """For an error: on one line, short, without the contents of a tensor."""
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)} of {given.dtype}"
    return f"a {type(given).__name__} of tensors" if "tensor(" in repr(given) else short(given)
