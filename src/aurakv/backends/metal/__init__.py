"""Apple GPUs, in Metal through torch. Emulated on Linux; not yet run on an Apple GPU (docs/apple.md).

Arithmetic is float32 whatever the precision. Kernels are Metal source in `shaders/`, specialised by constants and compiled by
`torch.mps.compile_shader` when a format is first used. Importing this starts no device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.partial import Partial
from ...attention.scoring import Scoring
from ...attention.step import Rows, Run, Step, in_two_calls
from ...errors import InputError
from ...format.codec import Codec, Codes, Format, unknown_width
from ...storage.pages import Pages
from .launch import Compiler, Launcher
from .source import WIDTHS

LIMIT = "emulated on Linux; not yet run on an Apple GPU"


class Metal:
    """The kernels on one type of device, by one compiler. A stand-in for both runs them without an Apple GPU."""

    fast_error = 0.0
    float64 = False

    def __init__(self, name: str = "metal", device_type: str = "mps", compiler: Compiler | None = None) -> None:
        self.name = name
        self._device_type, self._compiler = device_type, compiler
        self._made: Launcher | None = None

    @property
    def _launcher(self) -> Launcher:
        if self._made is None:
            self._made = Launcher(self._compiler or torch.mps.compile_shader)
        return self._made

    def why_not(self, format: Format | None, device: torch.device) -> str | None:
        if (width := unknown_width(format, WIDTHS)) is not None:
            return width
        if device.type != self._device_type:
            return f"it computes on {self._device_type}, got {device}"
        if self._compiler is not None:
            return None
        if not hasattr(torch.mps, "compile_shader"):
            return f"it needs torch 2.7 or newer, which compiles Metal source, got {torch.__version__}"
        return None if torch.backends.mps.is_available() else "torch finds no Apple GPU"

    def workspace_bytes(self, pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
        return 0  # torch's allocator keeps what calls need

    def encode(self, x: Tensor, codec: Codec, offset: Tensor | None) -> Codes:
        return self._launcher.encode(_single(x), codec, offset)

    def decode(self, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float64 and codes.data.device.type == "mps":
            raise InputError("an Apple GPU decodes to float32, float16 or bfloat16, got torch.float64")
        work = torch.float32 if dtype == torch.float64 else dtype
        return self._launcher.decode(codes, codec, offset, rotated, work).to(dtype)

    def scores(self, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
        return self._launcher.scores(_single(q), codes, codec, offset).to(q.dtype)

    def values(self, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
        return self._launcher.values(_single(weights), codes, codec, offset, threshold).to(weights.dtype)

    def append(self, pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
        self._launcher.append(pages, _single(k), _single(v), rows)

    def append_codes(self, pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
        self._launcher.append_codes(pages, keys, values, rows)

    def attend(
        self,
        q: Tensor,
        pages: Pages,
        rows: Rows,
        ends: Tensor,
        scoring: Scoring,
        sink_logits: Tensor | None,
        splits: int | None,
        precision: str,
        workspace: Tensor | None,
    ) -> Partial:
        return _like(q, self._launcher.attend(_single(q), pages, rows, ends, scoring, sink_logits, splits))

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
    ) -> Partial:
        launcher = self._launcher
        return _like(q, launcher.attend_dense(_single(q), _single(k), _single(v), rows, key_starts, ends, scoring, sink_logits))

    def prepare_step(self, step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run:
        return in_two_calls(self, step)


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _like(q: Tensor, part: Partial) -> Partial:
    return Partial(part.out.double(), part.lse.double()) if q.dtype == torch.float64 else part


backends = {"metal": Metal()}
