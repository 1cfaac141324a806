"""KeyGuard: what is done about keys that do not survive their format, layer by layer and over all layers of a cache."""

from __future__ import annotations

import copy
import warnings

from ..calibration.guard import ON_AVERAGE, Check, more_than, width_for
from ..calibration.policy import LayerPolicy


class KeyGuard:
    def __init__(self, given: str, layers: int, widen: bool) -> None:
        self.given = given  # the format, as the user named it
        self.layers = layers  # with keys that are coded
        self.widen = widen  # keys that move attention too far are stored wider; otherwise the user is warned
        self._moved: dict[int, float] = {}  # nats by which attention moves, by layer
        self._lost: dict[int, str] = {}  # a sentence for each layer whose keys are lost
        self._together: str | None = None  # and one where only all layers together lose too much
        self._warned = False

    @property
    def lost(self) -> list[str]:
        return [*self._lost.values(), *([] if self._together is None else [self._together])]

    def judge(self, index: int, policy: LayerPolicy, check: Check) -> LayerPolicy:
        """How a layer stores its keys: as the policy says, or wider."""
        if self.widen:  # no layer may use what others leave: each decides when it comes, whatever the order
            return check.widened(policy, ON_AVERAGE) if check.lost(policy, ON_AVERAGE) else policy
        self._moved[index] = check.moved(policy)
        if check.lost(policy):
            self._lost[index] = self._sentence(
                f"keys do not survive {policy.format} in layer {index} of this model ({check.finding(policy)})",
                check.widened(policy).format,
            )
            self._warn(self._lost[index])
        mean = sum(self._moved.values()) / self.layers
        if len(self._moved) == self.layers and mean > ON_AVERAGE and not self._lost:
            self._together = self._sentence(
                f"keys do not survive {self.given} in this model (the attention of its {self.layers} layers moves by"
                f" {more_than(mean, ON_AVERAGE)} nats on average where {ON_AVERAGE} are tolerated)",
                width_for(policy.format, check.k, ON_AVERAGE / mean),
            )
            self._warn(self._together)
        return policy

    def forget(self, index: int) -> None:
        """What is known of a layer that begins anew."""
        self._moved.pop(index, None)
        self._lost.pop(index, None)
        self._together = None

    def copy(self) -> KeyGuard:
        clone = copy.copy(self)
        clone._moved, clone._lost = dict(self._moved), dict(self._lost)
        return clone

    def _sentence(self, finding: str, better: str) -> str:
        return f"{finding}: {better} would keep them, or AuraCache without a format, which chooses by itself"

    def _warn(self, sentence: str) -> None:
        """Once for a cache; all sentences are kept."""
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=2)
