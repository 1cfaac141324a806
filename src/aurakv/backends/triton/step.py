"""A step of a cache: append, then attend, with the uncompressed tokens that lie beside the codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import checks
from ...attention.partial import Partial, in_dtype, join
from ...attention.scoring import Scoring, scoring_uncompressed
from ...calibration.key_scale import scaled_queries
from ...storage.pages import Pages
from . import attend as dispatch
from .append import launch as store

Step = Callable[[Tensor, Tensor, Tensor], Partial]


def prepare(
    pages: Pages,
    beside: Pages | None,
    beside_too: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    scoring: Scoring,
    sink_logits: Tensor | None,
    splits: int | None,
    precision: str,
    key_scale: Tensor | None,
) -> Step:
    """A function that does a step for arguments with just these shapes, strides and dtypes, none of them float64.

    Uncompressed tokens lie in `beside`, if any, which may get the new tokens, too. In a decode
    they cost no launch."""
    one_each = bounds == list(range(len(bounds)))
    starts = checks.starts("starts", None if one_each else bounds, pages.seqs, q.shape[0], pages.data.device)
    factors = None if key_scale is None else key_scale.to(torch.float32).contiguous()
    fast = dispatch.decode_path()
    fused = (
        one_each
        and fast is not None
        and fast.why_not_call(q, pages, starts, scoring, precision) is None
        and (beside is None or fast.serves_uncompressed(q, pages, beside, scoring))
    )

    def in_pieces(q: Tensor, k: Tensor, v: Tensor) -> Partial:
        store.append(pages, k, v, starts, factors)
        if beside is not None and beside_too:
            store.append(beside, k, v, starts, factors)
        x = scaled_queries(q, factors)
        part = dispatch.attend(x, pages, starts, pages.lengths, scoring, sink_logits, splits, precision, None)
        if beside is not None:
            raw = scoring_uncompressed(scoring)  # sinks count once
            part = join(part, dispatch.attend(x, beside, starts, pages.lengths, raw, None, splits, precision, None))
        return in_dtype(part, q.dtype)

    if not fused:
        return in_pieces
    append = store.prepare_append(pages, k, v, starts, factors)
    attend = fast.prepare(q, pages, starts, pages.lengths, scoring, sink_logits, splits, beside, factors)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Partial:
        append(k=k, v=v)
        part: Partial = attend(q, None)
        return part

    return whole
