"""Backends: who computes. Best first; a backend says in one sentence why it cannot run something."""

from __future__ import annotations

import functools
import importlib
from typing import Protocol

import torch
from torch import Tensor

from ..arguments import device_of, instance
from ..attention.partial import Partial
from ..attention.scoring import Scoring
from ..attention.step import Attention, Rows, Run, Step
from ..errors import BackendError, InputError, short
from ..format.codec import Codec, Codes, Format
from ..storage.pages import Pages


class Backend(Protocol):
    """What a backend implements; `reference` states what each function computes."""

    name: str
    fast_error: float  # largest error of attend with precision="fast", relative to the norm of the values; 0: exact
    float64: bool  # whether float64 arguments are computed in float64

    def why_not(self, format: Format | None, device: torch.device) -> str | None: ...
    def workspace_bytes(self, pages: Pages, tokens: int, heads: int, splits: int | None) -> int: ...
    def encode(self, x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None = None) -> Codes: ...
    def decode(
        self, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype
    ) -> Tensor: ...
    def scores(self, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor: ...
    def values(
        self, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float
    ) -> Tensor: ...
    def append(self, pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None: ...
    def append_codes(self, pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None: ...
    def attend(self, q: Tensor, attention: Attention) -> Partial: ...
    def attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        key_starts: Tensor,
        ends: Tensor,
        scoring: Scoring,
        sink_logits: Tensor | None,
    ) -> Partial: ...
    def prepare_step(self, step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run: ...


# Where a backend lives: a module is one, or has several in its dict `backends`. Imported when first asked.
_AUTOMATIC = {
    "triton": ".triton.backend",
    "metal": ".metal",
    "native": ".native",
    "reference": ".reference",
}  # best first
_NAMED = {f"native-{name}": ".native" for name in ("avx512", "avx2", "neon", "generic")}  # only when asked for
_MODULES = {**_AUTOMATIC, **_NAMED}
_registered: dict[str, Backend] = {}


def names() -> list[str]:
    """The backends that can be asked for by name, best first."""
    return [*_MODULES, *_registered]


def register(backend: Backend) -> None:
    """Add a backend that is used only when asked for by name."""
    if backend.name in _MODULES:
        raise InputError(f"backend name {short(backend.name)} is taken")
    _registered[backend.name] = backend


def why_not(
    backend: str,
    format: Format | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> str | None:
    """None if the backend can run this format on this device, and compute tensors of this dtype in float64 if that is
    the dtype; else one sentence that says why not."""
    if format is not None:
        instance("format", format, Format)
    if dtype is not None:
        instance("dtype", dtype, torch.dtype)
        if not dtype.is_floating_point:
            raise InputError(f"dtype must be one of floating-point numbers, got {dtype}")
    chosen, where = _load(backend), device_of(device)
    reason = chosen.why_not(format, where)
    if reason is None and dtype == torch.float64 and not (chosen.float64 and where.type != "mps"):
        lacking = "an Apple GPU has no float64" if where.type == "mps" else "float64 arguments, too"
        reason = f"it computes in float32: {lacking}"
    return reason


def fast_error(backend: str) -> float:
    """The error that this backend states for precision="fast", relative to the norm of the values."""
    return _load(backend).fast_error


def select(
    backend: str | None, format: Format | None, device: torch.device, dtype: torch.dtype | None = None
) -> Backend:
    """The named backend, or the best one that can run and computes in float64 if that is the dtype.

    A named one never falls back; it may compute float64 arguments in float32.
    """
    if backend is None:
        return _best(format, device, dtype == torch.float64)
    chosen = _load(backend)
    reason = chosen.why_not(format, device)
    if reason is not None:
        raise BackendError(f"backend {short(backend)} cannot run {format} on {device}: {reason}")
    return chosen


@functools.lru_cache(maxsize=256)
def _best(format: Format | None, device: torch.device, float64: bool) -> Backend:
    for name in _AUTOMATIC:
        backend = _load(name)
        if backend.why_not(format, device) is None and (backend.float64 or not float64):
            return backend
    raise BackendError(f"no backend can run {format} on {device}")


def _load(name: str) -> Backend:
    if name in _registered:
        return _registered[name]
    if name not in _MODULES:
        raise InputError(f"backend must be one of {names()}, got {short(name)}")
    module = importlib.import_module(_MODULES[name], __package__)
    return getattr(module, "backends", {}).get(name, module)
