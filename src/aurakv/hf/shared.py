"""What the layers of a cache have in common: options, the mask of a forward, and what a user is told once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from .layer import AuraLayer

FOREVER = 2**31 - 1  # the reach of tokens without a window


class Options(NamedTuple):
    """What the layers of a cache have in common."""

    first: int
    recent: int
    rollback: int
    calibrate: bool  # layers without a policy take their offset and key_scale from the first tokens they get
    widen: bool  # keys that would be lost are stored wider; otherwise somebody is told
    backend: str | None
    precision: str


class Shared:
    """State of one cache that all its layers use."""

    def __init__(self) -> None:
        self.warned = False
        self.lost: dict[int, str] = {}  # by the number of a layer whose keys do not survive its format, a sentence
        self.told = False
        self._read: tuple[Tensor, int, int, Tensor | None] | None = None

    def real(self, reach: Tensor | None, layer: AuraLayer, count: int) -> Tensor | None:
        """Which of the new tokens [seqs, count] are real; None: all. A mask is read once for all layers."""
        far, real, past = FOREVER, None, layer.columns.total
        if reach is not None:
            if self._read is None or self._read[0] is not reach or self._read[1] != past:
                self._read = (reach, past, *_read_reach(reach, layer, count))
            far, real = self._read[2:]
        if far != (layer.window or FOREVER) and far > 0:
            asked = "all tokens" if far == FOREVER else f"a window of {far}"
            raise InputError(f"this cache was made for another model: {layer} in a layer that attends to {asked}")
        return real

    def warn(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                "the attention function of this model is not 'aurakv', so the compressed cache is decoded at every"
                " step, which is slow, and keys are stored without a look at queries, which costs quality:"
                " use aurakv.hf.attach(model) or model.set_attn_implementation('aurakv')",
                stacklevel=2,
            )

    def tell(self, layer: AuraLayer, finding: str, better: str) -> None:
        """Warn once for a cache; all sentences are kept."""
        self.lost[layer.index] = (
            f"keys do not survive {layer.policy.format} in layer {layer.index} of this model ({finding}): {better}"
            " would keep them, or AuraCache without a format, which chooses by itself"
        )
        if not self.told:
            self.told = True
            warnings.warn(self.lost[layer.index], stacklevel=2)

    def forget(self, layer: AuraLayer) -> None:
        """What was said of a layer that begins anew."""
        self.lost.pop(layer.index, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        clone = memo[id(self)] = Shared()
        clone.lost, clone.told = dict(self.lost), self.told
        return clone


def _read_reach(reach: Tensor, layer: AuraLayer, count: int) -> tuple[int, Tensor | None]:
    """How far back the new tokens are seen, and which of them are real."""
    past, columns = layer.columns.total, reach.shape[1]
    if columns != past + count:
        raise InputError(f"the attention mask must cover all {past + count} tokens, past and new, got {columns}")
    held = [0] * reach.shape[0] if layer.cache is None else layer.cache.lengths
    counts = (reach[:, :past] > 0).sum(1, keepdim=True, dtype=torch.int32)
    read = torch.cat([counts, reach[:, past:]], 1).cpu()
    if read[:, 0].tolist() != held:
        raise InputError(
            f"the attention mask must show the {held} tokens that the sequences of this cache hold,"
            f" got {read[:, 0].tolist()}"
        )
    real = read[:, 1:] > 0
    return int(read[:, 1:].max()), None if bool(real.all()) else real
