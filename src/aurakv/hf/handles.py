"""Handles: what `update` returns instead of keys and values, and what carries a layer to the attention function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from .layer import AuraLayer


class Step:
    """New tokens of a layer [seqs, kv_heads, t, dim], used once: by attention on codes, or decoded."""

    __slots__ = ("dense", "layer", "new")

    def __init__(self, layer: AuraLayer, k: Tensor, v: Tensor) -> None:
        self.layer, self.new = layer, (k, v)
        self.dense: tuple[Tensor, Tensor] | None = None

    def decoded(self) -> tuple[Tensor, Tensor]:
        if self.dense is None:
            self.dense = self.layer.decoded(*self.new)
        return self.dense


class Handle:
    """What `update` returns for keys or values: no tensor, but one for every torch function, by decoding."""

    __slots__ = ("side", "step")

    def __init__(self, step: Step, side: int) -> None:
        self.step, self.side = step, side

    @property
    def tensor(self) -> Tensor:
        return self.step.decoded()[self.side]

    @property
    def dtype(self) -> torch.dtype:
        return self.step.new[self.side].dtype

    @property
    def device(self) -> torch.device:
        return self.step.new[self.side].device

    @property
    def shape(self) -> torch.Size:
        if self.step.dense is not None:
            return self.tensor.shape
        new = self.step.new[self.side]
        return torch.Size((*new.shape[:2], self.step.layer.get_mask_sizes(new.shape[2])[0], new.shape[3]))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("step", "side"):
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def __mul__(self, other: Any) -> Any:
        return self.tensor * other

    __rmul__ = __mul__

    def __matmul__(self, other: Any) -> Any:
        return self.tensor @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.tensor if isinstance(x, Handle) else x, (args, kwargs or {}))
        return function(*args, **kwargs)
