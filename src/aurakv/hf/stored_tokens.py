"""StoredTokens: what one layer holds. Its cache, which columns of the padded batch are real, and how a sequence begins:
where keys are measured first, tokens stay uncompressed until `LayerCalibration` has seen enough of them."""

from __future__ import annotations

from torch import Tensor

from ..attention.scoring import Scoring
from ..calibration.policy import LayerPolicy
from ..calibration.statistics import Turns
from ..errors import InputError, counted
from .context import Context
from .held_tokens import HeldTokens
from .layer_calibration import LayerCalibration
from .padding import Padding
from .rows import Rows
from .scaled_cache import ScaledCache


class StoredTokens:
    """Tensors are [seqs, heads, t, dim]; where nothing says which tokens are real, all are."""

    def __init__(
        self, index: int, policy: LayerPolicy, window: int | None, turns: Turns | None, context: Context
    ) -> None:
        self.policy, self.window, self.context = policy, window, context
        self.calibration = LayerCalibration(index, policy, turns, context)
        self.scaled: ScaledCache | None = None  # None: nothing came yet
        self.padding = Padding(0)

    @property
    def format(self) -> str:
        """How tokens are stored, or will be."""
        if self.scaled is None or self.calibration.waiting:
            return self.policy.format
        return self.scaled.cache.format.name

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each sequence; none before the first came."""
        return [] if self.scaled is None else self.scaled.cache.lengths

    @property
    def bytes_held(self) -> int:
        parts = (self.scaled, self.padding, self.calibration)
        return sum(part.bytes_held for part in parts if part is not None)

    def check_batch(self, k: Tensor) -> None:
        if self.scaled is not None and k.shape[0] != self.padding.seqs:
            held = counted(self.padding.seqs, "sequence")
            raise InputError(f"this cache holds {held}, got a batch of {k.shape[0]}")

    def ready(
        self,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
        real: Tensor | None = None,
        scoring: Scoring | None = None,
    ) -> ScaledCache:
        """The cache for tokens that are about to be stored: compressed from now on, if they complete the first ones."""
        if self.scaled is not None and self.calibration.held is None:
            return self.scaled
        new = HeldTokens.of(k, v, q, real)
        if self.scaled is None:
            self.padding = Padding(k.shape[0])
            self.scaled = self._empty(self.calibration.begin(new, scoring), new)
        decision = self.calibration.add(new, self.padding.total, scoring)
        if decision is not None:
            self.scaled = self._empty(decision.policy, new)
            self.scaled.append_rows(*decision.stored.rows())
        return self.scaled

    def append(self, k: Tensor, v: Tensor) -> None:
        """What the cache is ready for."""
        assert self.scaled is not None
        seqs, _, count, _ = k.shape
        self.scaled.append(k, v, Rows.of(seqs, count, None, k.device))
        self.padding.add(count, None)

    def cropped(self, count: int) -> tuple[Padding, list[int]]:
        """Padding and lengths without the last `count` columns, or the refusal; nothing changes."""
        if self.scaled is None or not count:
            return self.padding, []
        padding = self.padding.copy()
        lengths = [length - gone for length, gone in zip(self.lengths, padding.crop(count), strict=True)]
        for seq, length in enumerate(lengths):
            self.scaled.cache.check_truncate(seq, length, from_codes=True)
        return padding, lengths

    def crop(self, count: int) -> None:
        """Remove the last columns."""
        padding, lengths = self.cropped(count)
        if self.scaled is not None:
            for seq, length in enumerate(lengths):
                self.scaled.cache.truncate(seq, length, from_codes=True)
        self.padding = padding
        self.calibration.crop(padding.total)

    def select(self, index: list[int]) -> None:
        """Sequence i becomes what sequence index[i] was; codes are shared until one of two is written to."""
        if self.scaled is not None:
            self.scaled.cache.reorder(index)
            self.padding.select(index)
        self.calibration.select(index)

    def reset(self) -> None:
        self.scaled, self.padding = None, Padding(0)
        self.calibration.reset()

    def _empty(self, policy: LayerPolicy, new: HeldTokens) -> ScaledCache:
        return ScaledCache.empty(policy, new.k, new.v, self.window, self.context.options)
