"""Handles: what `update` returns instead of keys and values, and what carries a layer to the attention function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import InputError

if TYPE_CHECKING:
    from .layer import AuraLayer


class Update:
    """New tokens of a layer [seqs, kv_heads, t, dim], stored once: by attention on codes, or when they are decoded."""

    __slots__ = ("attended", "dense", "layer", "new")

    def __init__(self, layer: AuraLayer, k: Tensor, v: Tensor) -> None:
        self.layer, self.new = layer, (k, v)
        self.attended = False  # on codes: the tokens are stored
        self.dense: tuple[Tensor, Tensor] | None = None

    def decoded(self) -> tuple[Tensor, Tensor]:
        if self.attended:
            raise InputError("keys and values that the attention function 'aurakv' has used cannot be decoded as well")
        if self.dense is None:
            self.dense = self.layer.decoded(*self.new)
        return self.dense


class Handle:
    """What `update` returns for keys or values: no tensor, but one for every torch function, by decoding."""

    __slots__ = ("side", "update")

    def __init__(self, update: Update, side: int) -> None:
        self.update, self.side = update, side

    @property
    def tensor(self) -> Tensor:
        return self.update.decoded()[self.side]

    @property
    def dtype(self) -> torch.dtype:
        return self.update.new[self.side].dtype

    @property
    def device(self) -> torch.device:
        return self.update.new[self.side].device

    @property
    def shape(self) -> torch.Size:
        if self.update.dense is not None:
            return self.tensor.shape
        new = self.update.new[self.side]
        return torch.Size((*new.shape[:2], self.update.layer.get_mask_sizes(new.shape[2])[0], new.shape[3]))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Layers that share keys ask for them on the device where they already lie."""
        if not kwargs and args == (self.device,):
            return self
        return self.tensor.to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("update", "side"):
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
