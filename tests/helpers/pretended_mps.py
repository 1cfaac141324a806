"""A device "mps" without an Apple GPU: tensors on the CPU that say they are there, and Metal kernels in the emulator.

They refuse what an Apple GPU refuses: float64, tensors of the CPU beside them, `numpy`. So a test for the hardware
shows here what it forgot to move. For the whole suite of the hardware:
    pytest -p tests.helpers.pretended_mps_plugin -m "mps and not full" -k "not compile and not inductor and not threads"
(torch.compile and other threads know nothing of it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from aurakv import backends
from aurakv.backends import metal
from aurakv.backends.metal import Metal

TO_ANOTHER = ("to", "type", "copy_", "__getitem__", "__setitem__", "index_put_")  # may take tensors of both
INTO_FIRST = ("copy_", "__setitem__", "index_put_")


class OnMps(Tensor):
    """Its numbers lie on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("mps:0")


def there(x: Tensor) -> Tensor:
    return x if isinstance(x, OnMps) else Tensor.as_subclass(x, OnMps)


def on_cpu(x: Tensor) -> Tensor:
    return Tensor.as_subclass(x, Tensor)


def _names(x: object, device: str) -> bool:
    return isinstance(x, (str, torch.device)) and str(x).split(":")[0] == device


class Pretending(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.device or name == "as_subclass":
            return func(*args, **kwargs)
        given = tree_leaves((list(args), dict(kwargs)))
        tensors = [x for x in given if isinstance(x, Tensor)]
        some = any(isinstance(x, OnMps) for x in tensors)
        asked = any(_names(x, "mps") for x in given)
        leaves = name == "cpu" or any(_names(x, "cpu") for x in given)
        if name == "to" and len(tensors) == 2:  # where another tensor is
            asked, leaves = isinstance(tensors[1], OnMps), not isinstance(tensors[1], OnMps)
        if some and name == "numpy":
            raise TypeError("an Apple GPU's tensor has no numpy array")
        beside = any(not isinstance(x, OnMps) and x.dim() > 0 for x in tensors)
        if some and beside and not leaves and name not in TO_ANOTHER:
            raise RuntimeError(f"{name}: tensors on mps:0 and on the CPU")
        if name == "__deepcopy__" and some:
            return args[1].setdefault(id(args[0]), there(on_cpu(args[0]).clone()))
        stays = isinstance(args[0], OnMps) if name in INTO_FIRST else asked or (some and not leaves)
        if asked:
            args, kwargs = tree_map(lambda x: "cpu" if _names(x, "mps") else x, (list(args), dict(kwargs)))
        return self._placed(func(*args, **kwargs), stays)

    def _placed(self, x: Any, stays: bool) -> Any:
        if isinstance(x, (tuple, list)) and any(isinstance(y, Tensor) for y in x):
            return type(x)([self._placed(y, stays) for y in x])
        if not isinstance(x, Tensor):
            return x
        if not stays:
            return on_cpu(x).clone() if isinstance(x, OnMps) else x
        if x.dtype in (torch.float64, torch.complex128):
            raise TypeError("an Apple GPU has no float64")
        return there(x)


class _Library:
    """The emulator's, whose kernels take tensors of this device alone."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(self._library, name)

        def call(*args: Any, **options: Any) -> None:
            if any(isinstance(x, Tensor) and not isinstance(x, OnMps) for x in args):
                raise RuntimeError(f"the kernel {name} was given a tensor of the CPU")
            kernel(*(on_cpu(x) if isinstance(x, Tensor) else x for x in args), **options)

        return call


def _compiler(source: str) -> _Library:
    from tests.backends.metal import emulator

    return _Library(emulator.compile_shader(source))


def _move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if not (args and _names(args[0], "mps")):
        return _to(module, *args, **kwargs)
    for part in module.modules():
        for group in (part._parameters, part._buffers):
            group.update({name: x if x is None else there(x.detach()) for name, x in group.items()})
    return module


_to = torch.nn.Module.to


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.backends.mps, "is_available", lambda: True),
            (torch.backends.mps, "get_name", lambda: "a pretended Apple GPU"),
            (torch.backends.mps, "get_core_count", lambda: 1),
            (torch.mps, "synchronize", lambda: None),
            (torch.nn.Module, "to", _move),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(mock.patch.dict(metal.backends, {"metal": Metal("metal", "mps", _compiler)}))
        backends._best.cache_clear()
        stack.callback(backends._best.cache_clear)
        stack.enter_context(Pretending())
        yield
