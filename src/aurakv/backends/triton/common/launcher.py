"""How kernels are launched: at once, again and again with other tensors of the same kind, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from ....errors import BackendError

SEQS = (32, 128, 512, 1024)  # see `most_seqs`

Receiver = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_receiver: ContextVar[Receiver | None] = ContextVar("receiver of launches", default=None)


@contextlib.contextmanager
def redirected(receiver: Receiver) -> Iterator[None]:
    """Launches of this thread go to the receiver instead of a device: kernel, grid, arguments, options."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def on(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, unless launches are redirected."""
    receiver = _receiver.get()
    if receiver is not None:
        return lambda *arguments, **options: receiver(kernel, grid, arguments, options)

    def launch(*arguments: Any, **options: Any) -> Any:
        try:
            return kernel[grid](*arguments, **options)
        except OutOfResources as error:  # as float32 tiles of more than 256 coordinates do where a program has 99 KB
            raise BackendError(
                f"{kernel.__name__} takes {error.required} bytes of {error.name}, and this GPU has {error.limit} for a"
                " program: take 16-bit queries with precision='fast', or backend='reference'"
            ) from None

    return launch


def most_seqs(seqs: int) -> int:
    """A power of two that is at least this many sequences, one of few: each is a kernel of its own."""
    return next((size for size in SEQS if size >= seqs), triton.next_power_of_2(seqs))


class Launch:
    """A kernel with all arguments but some tensors, None in their places, which every call names.

    To find what it has compiled, Triton looks at all arguments of a call, which takes longer than a short kernel runs.
    Here it does so in the first call only: tensors of further calls have the same dtype.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        self.kernel, self.grid, self.arguments, self.options = kernel, grid, arguments, options
        self.again: Any = None

    def __call__(self, **tensors: Tensor) -> None:
        arguments = list(self.arguments)
        for name, tensor in tensors.items():
            arguments[self.kernel.arg_names.index(name)] = tensor
        if self.again is not None and all(tensor.data_ptr() % 16 == 0 for tensor in tensors.values()):
            self.again(*arguments)
            return
        compiled = on(self.kernel, self.grid)(*arguments, **self.options)
        if isinstance(compiled, CompiledKernel):  # compiled for these or less aligned tensors
            self.arguments = tuple(self._named(i) for i in range(len(self.kernel.arg_names)))
            self.again = compiled[(*self.grid, 1, 1)[:3]]

    def _named(self, i: int) -> Any:
        return self.arguments[i] if i < len(self.arguments) else self.options[self.kernel.arg_names[i]]
