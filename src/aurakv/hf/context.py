"""Context: what all layers of one cache share: options, the mask of a forward, the guard over their keys."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from .key_guard import KeyGuard
from .mask_reader import MaskReader


class Options(NamedTuple):
    first: int
    recent: int
    rollback: int
    calibrate: bool  # layers without a policy take their offset and key_scale from the first tokens they get
    widen: bool  # keys that would be lost are stored wider; otherwise the user is warned
    backend: str | None
    precision: str
    fitted: bool | None  # whether codes are fitted; None: as is the default of the device


class Context:
    def __init__(self, options: Options, guard: KeyGuard) -> None:
        self.options, self.guard = options, guard
        self.masks = MaskReader()
        self._warned = False

    def warn_of_decoding(self) -> None:
        """Once for a cache."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the attention function of this model is not 'aurakv', so the compressed cache is decoded at every"
                " step, which is slow, and keys are stored without a look at queries, which costs quality:"
                " use aurakv.hf.attach(model) or model.set_attn_implementation('aurakv')",
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        clone = memo[id(self)] = Context(self.options, self.guard.copy())
        return clone
