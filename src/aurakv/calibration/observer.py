"""KeyObserver: watches the keys and queries of one layer while a model reads a text."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.scoring import Scoring
from .calibration import WIDTHS, KeyCalibration
from .guard import KEYS, Check
from .policy import LayerPolicy
from .statistics import SINKS, Moments, Turns


class KeyObserver:
    """The first few tokens, which are unlike all others, do not enter the moments."""

    def __init__(self, turns: Turns | None, scoring: Scoring) -> None:
        self.moments = Moments(turns)
        self.scoring = scoring
        self.tokens = 0
        self._device = torch.device("cpu")  # of the model
        self._k: list[Tensor] = []  # kept in main memory, which has more room
        self._q: list[Tensor] = []

    @torch.no_grad()
    def add(self, k: Tensor, q: Tensor) -> None:
        """The next tokens of the text: keys [tokens, kv_heads, dim], queries [tokens, heads, dim]."""
        position = torch.arange(self.tokens, self.tokens + k.shape[0], device=k.device)
        rows = position >= SINKS
        self.moments.add(k[rows], q[rows], position[rows])
        room = max(0, KEYS - self.tokens)
        self._k.append(k[:room].cpu())
        self._q.append(q[:room].cpu())
        self._device = k.device
        self.tokens += k.shape[0]

    def calibration(self, first: int, device_type: str) -> KeyCalibration:
        """Movements are of a cache whose first tokens are uncompressed, on such a device."""
        found = self.moments.layer("k4v4").on(device_type)
        assert found.key_offset is not None
        assert found.key_scale is not None
        offset, scale = _as_in_files(found.key_offset), _as_in_files(found.key_scale)
        weight = None if found.key_weight is None else _as_in_files(found.key_weight)
        layer = LayerPolicy("k4v4", offset, key_scale=scale, key_weight=weight)
        k, q = (torch.cat(parts).to(self._device).transpose(0, 1) for parts in (self._k, self._q))
        dim = k.shape[2]
        check = Check(k, q, self.scoring, first)
        names = [f"k{bits}v4" for bits in WIDTHS]
        measured = check.all_moved([layer.with_format(name, dim) for name in names])
        moved = dict(zip(WIDTHS, measured, strict=True))
        plain = dict(zip(WIDTHS, check.all_moved([LayerPolicy(name) for name in names]), strict=True))
        return KeyCalibration(offset, scale, moved, plain, weight)


def _as_in_files(tensor: Tensor) -> Tensor:
    """A calibration that was just made says the same as one that was kept."""
    return tensor.to(torch.float16).float()
