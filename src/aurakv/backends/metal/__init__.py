"""Apple GPUs, in Metal through torch. Emulated on Linux; not yet run on an Apple GPU (docs/apple.md).

Arithmetic is float32 whatever the precision. Kernels are Metal source in `shaders/`, specialised by constants and
compiled by `torch.mps.compile_shader` when a format is first used. Importing this starts no device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.partial import Partial
from ...attention.scoring import Scoring, scoring_uncompressed
from ...attention.step import Attention, Rows, Run, Step, in_two_calls, written
from ...format.codec import Codec, Codes, Format, unknown_width
from ...storage.pages import Pages
from . import append, vectors
from .attend import dense, prepare_attend, stored
from .kernels import Compiler, Kernels
from .source import WIDTHS

LIMIT = "emulated on Linux; not yet run on an Apple GPU"


class Metal:
    """The kernels on one type of device, by one compiler. A stand-in for both runs them without an Apple GPU."""

    fast_error = 0.0
    float64 = False

    def __init__(self, name: str = "metal", device_type: str = "mps", compiler: Compiler | None = None) -> None:
        self.name = name
        self._device_type, self._compiler = device_type, compiler
        self._made: Kernels | None = None

    @property
    def _kernels(self) -> Kernels:
        if self._made is None:
            self._made = Kernels(self._compiler or torch.mps.compile_shader)
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

    def encode(self, x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None = None) -> Codes:
        return vectors.encode(self._kernels, _single(x), codec, offset, fit)

    def decode(self, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
        work = torch.float32 if dtype == torch.float64 else dtype
        return vectors.decode(self._kernels, codes, codec, offset, rotated, work).to(dtype)

    def scores(self, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
        return vectors.scores(self._kernels, _single(q), codes, codec, offset).to(q.dtype)

    def values(self, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
        return vectors.values(self._kernels, _single(weights), codes, codec, offset, threshold).to(weights.dtype)

    def append(self, pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
        k, v = _single(k), _single(v)
        append.prepare_append(self._kernels, pages, k, v, rows)(k, v)

    def append_codes(self, pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
        append.append_codes(self._kernels, pages, keys, values, rows)

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        x, place = _single(q), stored(attention.pages, attention.scoring, q.shape[0])
        rows, ends, splits = attention.rows, attention.query_ends, attention.splits
        return _like(q, prepare_attend(self._kernels, x, [place], rows, ends, attention.sink_logits, splits)(x, None))

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
        x, place = _single(q), dense(_single(k), _single(v), key_starts, scoring, q.shape[0])
        return _like(q, prepare_attend(self._kernels, x, [place], rows, ends, sink_logits, None)(x, None))

    def prepare_step(self, step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run:
        """All kernels and numbers are chosen here. A decode takes six launches: room, keys, values, queries, attention
        and merge; with uncompressed tokens five more, and one merge for both."""
        if step.recent_tokens is not None or step.recent is not None:
            return in_two_calls(self, step)
        pages, rows, also = step.pages, step.rows, step.uncompressed
        factor = None if step.key_scale is None else step.key_scale.to(torch.float32).contiguous()
        appends = []
        if k is not None and v is not None:
            new = _single(k), _single(v)
            appends.append(append.prepare_append(self._kernels, pages, *new, rows, factor, step.counted))
            if also is not None and step.uncompressed_too:
                appends.append(append.prepare_append(self._kernels, also, *new, rows, factor))
        places = [stored(pages, step.scoring, q.shape[0])]
        if also is not None:
            places.append(stored(also, scoring_uncompressed(step.scoring), q.shape[0]))
        attend = prepare_attend(
            self._kernels, _single(q), places, rows, step.query_ends, step.sink_logits, step.splits, factor
        )

        def run(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial:
            if k is not None and v is not None:
                for each in appends:
                    each(_single(k), _single(v))
                if step.first_tokens is not None:
                    step.first_tokens.store(k, v, factor, rows.starts)
            part = _like(q, attend(_single(q), out))
            return part if out is None or part.out is out else written(part, out)

        return run


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _like(q: Tensor, part: Partial) -> Partial:
    return Partial(part.out.double(), part.lse.double()) if q.dtype == torch.float64 else part


backends = {"metal": Metal()}
