"""The switch: what a user writes after `--additional-config`, as a policy for each layer. Knows nothing of vLLM."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, replace

from torch import Tensor

from ..calibration.calibration import DEFAULT
from ..calibration.policy import FIRST, LayerPolicy, Policy, shipped
from ..errors import InputError, short
from ..format.codec import Format
from ..format.names import PLAIN, RECENT, recent_and_name
from .recent import MOST as MOST_RECENT

KEY = "aurakv"  # of the switch: {"aurakv": "k4v4"}
MOST = 16  # first tokens that the kernels take: as many as the smallest block has


@dataclass(frozen=True)
class Switch:
    """What each layer stores: one format for all, calibrated or plain, or a policy."""

    name: str  # as a user wrote it
    format: str | None = None  # None: the default, with wider keys in layers that need them
    plain: bool = False  # codes without key offsets and key scales
    first: int = 0  # tokens of a sequence that stay uncompressed
    recent: int = 0  # and so do about as many before each query
    policy: Policy | None = None
    note: str | None = None  # what is not served as it was asked for

    @classmethod
    def parse(cls, options: object) -> Switch | None:
        """The switch in an engine's additional options, or None without the switch."""
        if not isinstance(options, dict) or KEY not in options or options[KEY] is False:
            return None
        given = options[KEY]
        if given is True:
            return cls("true", first=FIRST)
        if not isinstance(given, str):
            raise _unknown(given)
        return _parse(given, _stamp(given))

    @property
    def measured(self) -> bool:
        """Whether the keys of the model decide what is stored, or whether it may be."""
        return self.policy is None and (self.format is None or Format.parse(self.format, 64).key.coded)

    def check_model(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """Refuse a model that the switch is not for."""
        if self.policy is None:
            Format.parse(self.format or DEFAULT, head_dim)
        else:
            self.policy.check_model(layers, kv_heads, head_dim)


@functools.lru_cache(maxsize=8)  # every layer asks
def _parse(given: str, stamp: tuple[int, ...]) -> Switch:
    recent, name = recent_and_name(given)
    policy, note = Policy.find(name), None
    if policy is None:
        plain = name.startswith(PLAIN)
        format = name.removeprefix(PLAIN)
        try:
            Format.parse(format, 64)
        except InputError:
            if re.match(r"k\d", format):  # it was meant to be one
                raise
            raise _unknown(given) from None
        return Switch(given, format, plain, 0 if plain else FIRST, recent or 0, note=_fewer(recent or 0))
    if policy.first > MOST:
        note = f"policy {name} keeps its first {policy.first} tokens uncompressed; in vLLM they are the first {MOST}"
    first, recent = min(policy.first, MOST), policy.recent if recent is None else recent
    note = "; ".join(filter(None, (note, _fewer(recent)))) or None
    return Switch(f"policy {name}", first=first, recent=recent, policy=replace(policy, first=first), note=note)


def _fewer(recent: int) -> str | None:
    """What of so many recent tokens is not served, in one sentence."""
    if 4 * recent < 2 * MOST_RECENT:
        return None
    return (
        f"{recent} recent tokens were asked for; vLLM keeps groups of at most {MOST_RECENT} tokens, as with {RECENT}16:"
    )


def _unknown(given: object) -> InputError:
    return InputError(
        f"{KEY} must be true, a format such as k4v4, {PLAIN}k4v4, a policy (a .json file or one of {shipped()}) or"
        f" {RECENT}16: and one of these but true, got {short(given)}"
    )


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
        key_weight=part(layer.key_weight),
    )
