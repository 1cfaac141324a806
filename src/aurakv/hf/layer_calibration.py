"""LayerCalibration: how a layer stores its tokens, decided by the first ones.

Where keys are measured before they are stored, tokens stay uncompressed until there are enough of them; then all are
compressed, once. A layer whose numbers come from a policy is compressed at once, and its keys are judged when there
are enough to judge.
"""

from __future__ import annotations

from typing import NamedTuple

from ..attention.scoring import Scoring
from ..calibration.guard import Check
from ..calibration.policy import LayerPolicy
from ..calibration.statistics import ENOUGH, Turns, measured
from ..format.codec import Format
from .context import Context
from .held_tokens import NEEDED, HeldTokens

UNCOMPRESSED = LayerPolicy("k16v16")


class Decision(NamedTuple):
    policy: LayerPolicy
    stored: HeldTokens  # tokens that lie there uncompressed and are to be stored again


class LayerCalibration:
    def __init__(self, index: int, policy: LayerPolicy, turns: Turns | None, context: Context) -> None:
        self.index, self.policy, self.turns, self.context = index, policy, turns, context
        self.held: HeldTokens | None = None  # None: nothing came yet, or it is decided

    @property
    def waiting(self) -> bool:
        """Whether tokens stay uncompressed until enough of them were seen."""
        return self.held is not None and (self.context.options.calibrate or self.context.options.widen)

    @property
    def waits_for(self) -> int | None:
        return NEEDED if self.waiting else None

    @property
    def bytes_held(self) -> int:
        return 0 if self.held is None else self.held.bytes_held

    def begin(self, new: HeldTokens, scoring: Scoring | None) -> LayerPolicy:
        """How an empty layer stores tokens, of which `new` are the first."""
        self.held = None if new.enough or not self._coded(new) else new.first(0)
        return UNCOMPRESSED if self.waiting else self._decide(new, scoring)

    def add(self, new: HeldTokens, columns: int, scoring: Scoring | None) -> Decision | None:
        """Hold tokens that are about to follow the columns stored so far; a decision, if they are stored anew."""
        if self.held is None:
            return None
        stored = self.held.first(columns)  # what was held and then refused is not stored
        self.held = stored.followed(new)
        if not self.held.enough:
            return None
        seen, waiting, self.held = self.held, self.waiting, None
        policy = self._decide(seen, scoring)
        return Decision(policy, stored) if waiting else None

    def crop(self, columns: int) -> None:
        if self.held is not None:
            self.held = self.held.first(columns)

    def select(self, index: list[int]) -> None:
        if self.held is not None:
            self.held = self.held.selected(index)

    def reset(self) -> None:
        self.held = None
        self.context.guard.forget(self.index)

    def _coded(self, tokens: HeldTokens) -> bool:
        return Format.parse(self.policy.format, (tokens.k.shape[3], tokens.v.shape[3])).key.coded

    def _decide(self, seen: HeldTokens, scoring: Scoring | None) -> LayerPolicy:
        policy, dim = self.policy, seen.k.shape[3]
        if not self._coded(seen):
            return policy
        if self.context.options.calibrate:
            turns = self.turns if self.turns is not None and self.turns.dim == dim else None
            policy = measured(policy.format, seen.k, seen.q, seen.real, turns)
        device_type, fitted = seen.k.device.type, self.context.options.fitted
        policy = policy.on(device_type, fitted)
        k, q = seen.longest()
        if k.shape[1] < ENOUGH:
            return policy
        judged = self.context.guard.judge(self.index, policy, Check(k, q, scoring, self.context.options.first))
        return judged.on(device_type, fitted)  # it may have wider keys now
