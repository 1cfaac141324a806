"""The switch: what a user writes after `--additional-config`, as a policy for each layer. Knows nothing of vLLM."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

from torch import Tensor

from ..calibration.policy import LayerPolicy, Policy
from ..errors import InputError, short
from ..format.codec import Format

KEY = "aurakv"  # of the switch: {"aurakv": "k4v4"}


@dataclass(frozen=True)
class Switch:
    """What each layer stores: one format for all, or a policy."""

    format: str
    policy: Policy | None = None
    note: str | None = None  # what of the policy is not served, in one sentence

    @classmethod
    def parse(cls, options: object) -> Switch | None:
        """The switch in an engine's additional options, or None without the switch."""
        if not isinstance(options, dict) or KEY not in options:
            return None
        given = options[KEY]
        if not isinstance(given, str):
            raise InputError(
                f'{KEY} must be a format, a policy or a policy file, as in {{"{KEY}": "k4v4"}}, got {short(given)}'
            )
        return _parse(given, _stamp(given))

    def check_model(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """Refuse a model that the switch is not for."""
        if self.policy is None:
            Format.parse(self.format, head_dim)
        else:
            self.policy.check_model(layers, kv_heads, head_dim)

    def layer(self, number: int) -> LayerPolicy:
        return LayerPolicy(self.format) if self.policy is None else self.policy.layers[number]


@functools.lru_cache(maxsize=8)  # every layer asks
def _parse(given: str, stamp: tuple[int, ...]) -> Switch:
    policy, note = Policy.find(given), None
    if policy is None:
        Format.parse(given, 64)
        return Switch(given)
    if policy.first or policy.recent:
        note = (
            f"policy {given} keeps its first {policy.first} and most recent {policy.recent} tokens uncompressed; vLLM's"
            " blocks have no place for them, so all tokens are stored in the formats of their layers"
        )
    return Switch(f"policy {given}", replace(policy, first=0, recent=0), note)


def _stamp(given: str) -> tuple[int, ...]:
    """Another one when a file of this name, if there is one, was written again."""
    try:
        found = os.stat(given)
    except (OSError, ValueError):
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def shard(layer: LayerPolicy, rank: int, ranks: int, kv_heads: int) -> LayerPolicy:
    """What one rank of a tensor-parallel group keeps: its KV heads; with more ranks than KV heads some share one."""

    def part(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        first = rank * tensor.shape[0] // ranks
        return tensor[first : first + kv_heads].contiguous()

    return replace(
        layer,
        key_offset=part(layer.key_offset),
        value_offset=part(layer.value_offset),
        key_scale=part(layer.key_scale),
    )
