"""AuraCache: a compressed cache for `past_key_values=`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .. import backends, checks
from ..arguments import index, instance, shown, whole
from ..calibration.policy import FIRST, ROLLBACK, LayerPolicy, Policy, format_of
from ..errors import InputError, counted, short
from ..format.names import recent_and_name
from .attention import NAME, register
from .context import Context, Options
from .key_guard import KeyGuard
from .layer import AuraLayer
from .support import shapes, slots, turns, uniform_shape

Formats = str | Path | Policy | Callable[[int, int], str]
AUTO, AUTO_FORMAT = "auto", "k4v4"
_RENAMED = {"centre": "calibrate"}


class AuraCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers of a model at the formats asked for, e.g. "k4v4".

    format: "auto" is k4v4, with wider keys in layers where the first tokens show that 4 bits would lose them. Or the
        name for all attention layers, or a function (layer, attention layers) -> name, or a policy: itself,
        its .json file or the name of one that comes with the package.
    layers: other names for some attention layers, counted from 0 or, below 0, from the last; "k16v16" leaves a layer
        uncompressed, in the dtype of the model.
    first, recent: so many first tokens of a sequence, and tokens before each query, are used uncompressed; by default
        what the policy says, without one 4 and 0.
    calibrate: without a policy, the first 68 tokens or more give each layer its key offset and key scale, which stay
        until `reset`; a shorter prompt stays uncompressed until more has come. A policy brings its own.
    fitted: whether keys and values of up to 6 bits are rounded so that errors cancel where queries look, or to the
        nearest codes: less is lost, and a token takes longer to store. By default on CPUs.
    rollback: how many tokens can be cropped where only a window is kept.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: Formats = AUTO,
        *,
        layers: Mapping[int, str] | None = None,
        first: int | None = None,
        recent: int | None = None,
        calibrate: bool = True,
        fitted: bool | None = None,
        rollback: int = ROLLBACK,
        backend: str | None = None,
        precision: str = "fast",
        **others: Any,
    ) -> None:
        for name in others:
            if name in _RENAMED:
                raise InputError(f"the option {name} of AuraCache is called {_RENAMED[name]}")
            raise TypeError(f"AuraCache has no option {name}")
        instance("calibrate", calibrate, bool)
        if fitted is not None:
            instance("fitted", fitted, bool)
        asked, name = recent_and_name(format) if isinstance(format, str) else (None, "")
        if asked is not None:
            raise InputError(f"recent tokens are an option of AuraCache: use {short(name)} and recent={asked}")
        auto = isinstance(format, str) and format == AUTO
        policy = _policy(AUTO_FORMAT if auto else format)
        first = (FIRST if policy is None else policy.first) if first is None else whole("first", first, 0)
        recent = (0 if policy is None else policy.recent) if recent is None else whole("recent", recent, 0)
        rollback = whole("rollback", rollback, 0)
        checks.precision(precision)
        if backend is not None:
            backends.why_not(backend)  # refuses a name that does not exist; layers find out whether it can run
        if layers is not None and not isinstance(layers, Mapping):
            raise InputError(f"layers must be a mapping such as {{0: 'k8v8', -1: 'k16v16'}}, got {shown(layers)}")
        used = (AUTO_FORMAT if auto else format) if policy is None else policy
        planned, shaped = slots(config), shapes(config)
        dims = [shape.head_dim for shape in shaped if shape is not None]
        policies = _policies(used, layers or {}, config, [dim for dim, _ in dims])
        coded = [format_of(layer.format, dim).key.coded for layer, dim in zip(policies, dims, strict=True)]
        weighted = calibrate and policy is None
        if fitted and not weighted and all(layer.key_weight is None for layer in policies):
            raise InputError(
                "fitted=True needs what queries read: keys that are calibrated, or a policy with key_weight"
            )
        options = Options(first, recent, rollback, weighted, auto, backend, precision, fitted)
        self._context = Context(options, KeyGuard(_name(format), sum(coded), auto))
        made: list[Any] = []
        attention = iter(policies)
        for slot, turned in zip(planned, turns(config), strict=True):
            if slot.other is not None:
                made.append(slot.other())
                continue
            made.append(AuraLayer(len(made), next(attention), slot.window, turned, self._context, slot.shared))
        super().__init__(layers=made)

    @property
    def compressed(self) -> list[AuraLayer]:
        """The attention layers, which are ours; the others stay as transformers makes them."""
        return [layer for layer in self.layers if isinstance(layer, AuraLayer)]

    @property
    def lost(self) -> list[str]:
        """One sentence for each layer whose keys, judged by the first 68 or more tokens, do not survive its format, or
        one for all layers, where only together they lose too much."""
        return self._context.guard.lost

    @property
    def waits_for(self) -> int | None:
        """From how many tokens on they are compressed, while there are fewer: keys, values and queries lie there as
        they came, because keys are measured first. None: nothing waits."""
        waits = (layer.tokens.calibration.waits_for for layer in self.compressed)
        return next((count for count in waits if count is not None), None)

    @property
    def bytes_held(self) -> int:
        """Every byte that the attention layers occupy."""
        return sum(layer.bytes_held for layer in self.compressed)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        cache = self.compressed[0].cache
        return [] if cache is None else cache.lengths

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx >= len(self.layers):
            raise InputError(
                f"this cache was made for a model of {counted(len(self.layers), 'layer')}, got layer {layer_idx}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −n columns (older versions: keep the first n) from all layers, or from none."""
        for layer in self.compressed:
            layer.check_crop(tokens_to_remove)
        # layers of transformers, which may refuse, before those that will not
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, AuraLayer)):
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        index = beam_idx.tolist()  # once for all layers
        for layer in self.layers:
            if isinstance(layer, AuraLayer):
                layer.select(index)
            else:
                layer.reorder_cache(beam_idx)

    def __repr__(self) -> str:
        return f"AuraCache({', '.join(map(repr, self.layers))})"


def attach(model: PreTrainedModel, format: Formats = AUTO, **options: Any) -> AuraCache:
    """Let a model compute attention on codes, and return a cache for `model.generate(past_key_values=...)`."""
    if not hasattr(model, "set_attn_implementation"):
        raise InputError(f"attach needs a model of transformers, got {type(model).__name__}")
    cache = AuraCache(model.config, format, **options)
    register()
    model.set_attn_implementation(NAME)
    return cache


def _policy(format: Formats) -> Policy | None:
    if isinstance(format, Policy):
        return format
    return Policy.find(format) if isinstance(format, str | Path) else None


def _name(format: Formats) -> str:
    """In the words of the user."""
    if isinstance(format, Policy):
        return "this policy"
    return str(format) if isinstance(format, str | Path) else "these formats"


def _policies(
    format: Formats, layers: Mapping[int, str], config: PreTrainedConfig, dims: list[int]
) -> list[LayerPolicy]:
    """What each attention layer, with keys of these dimensions, gets; `layers` changes formats only."""
    count = len(dims)
    if isinstance(format, Policy):
        format.check_model(count, *uniform_shape(config))
        made = list(format.layers)
    else:
        named = [format(layer, count) if callable(format) else str(format) for layer in range(count)]
        made = [LayerPolicy(name) for name in named]
    seen = set()
    for given, name in layers.items():
        layer = index(given)
        if layer is None or not -count <= layer < count:
            raise InputError(f"this model has attention layers 0 … {count - 1} (or −{count} … −1), got {shown(given)}")
        if layer % count in seen:
            raise InputError(f"layers name attention layer {layer % count} twice, the second time as {layer}")
        seen.add(layer % count)
        made[layer] = made[layer].with_format(name, dims[layer])
    return made
