"""MaskReader: which new tokens are real, read from the mask of a forward once for all layers of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from .layer import AuraLayer

FOREVER = 2**31 - 1  # the reach of tokens without a window


class MaskReader:
    def __init__(self) -> None:
        self._read: tuple[Tensor, int, int, Tensor | None] | None = None

    def real(self, reach: Tensor | None, layer: AuraLayer, count: int) -> Tensor | None:
        """Which of the new tokens [seqs, count] are real; None: all."""
        far, real, past = FOREVER, None, layer.tokens.padding.total
        if reach is not None:
            if self._read is None or self._read[0] is not reach or self._read[1] != past:
                self._read = (reach, past, *_read(reach, layer, count))
            far, real = self._read[2:]
        if far != (layer.window or FOREVER) and far > 0:
            asked = "all tokens" if far == FOREVER else f"a window of {far}"
            raise InputError(f"this cache was made for another model: {layer} in a layer that attends to {asked}")
        return real


def _read(reach: Tensor, layer: AuraLayer, count: int) -> tuple[int, Tensor | None]:
    """How far back the new tokens are seen, and which of them are real."""
    past, columns = layer.tokens.padding.total, reach.shape[1]
    if columns != past + count:
        raise InputError(f"the attention mask must cover all {past + count} tokens, past and new, got {columns}")
    held = layer.tokens.lengths or [0] * reach.shape[0]
    counts = (reach[:, :past] > 0).sum(1, keepdim=True, dtype=torch.int32)
    read = torch.cat([counts, reach[:, past:]], 1).cpu()
    if read[:, 0].tolist() != held:
        raise InputError(
            f"the attention mask must show the {held} tokens that the sequences of this cache hold,"
            f" got {read[:, 0].tolist()}"
        )
    real = read[:, 1:] > 0
    return int(read[:, 1:].max()), None if bool(real.all()) else real
