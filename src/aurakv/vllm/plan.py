"""The switch: what a user writes after `--additional-config`, as a format for each layer. Knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codec import Format
from ..errors import InputError

KEY = "aurakv"  # of the switch: {"aurakv": "k4v4"}


@dataclass(frozen=True)
class Plan:
    """Which format each layer stores."""

    format: str

    @classmethod
    def parse(cls, options: object) -> Plan | None:
        """The plan in an engine's additional options, or None without the switch."""
        if not isinstance(options, dict) or KEY not in options:
            return None
        given = options[KEY]
        if not isinstance(given, str):
            raise InputError(f'{KEY} must be the name of a format, as in {{"{KEY}": "k4v4"}}, got {given!r}')
        Format.parse(given, 64)
        return cls(given)

    def layer(self, head_dim: tuple[int, int], dtype: torch.dtype) -> Format:
        """The format of a layer; 16-bit sides store `dtype`, that of the model."""
        return Format.parse(self.format, head_dim, dtype)
