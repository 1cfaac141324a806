"""A step: append, then attend, with the uncompressed tokens that lie next to the codes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...attention.partial import Partial, in_dtype
from ...attention.step import Run, Step, written
from ...calibration.key_scale import scaled_queries
from . import dispatch
from .append.launch import prepare_append


def prepare(step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run:
    """Of tensors that are not float64. A decode takes three launches: append, attend and merge."""
    pages, rows, scoring, uncompressed, recent = step.pages, step.rows, step.scoring, step.uncompressed, step.recent
    factors = None if step.key_scale is None else step.key_scale.to(torch.float32).contiguous()
    appends = []
    if k is not None and v is not None and k.shape[0]:
        copies = step.first_tokens, step.recent_tokens
        appends.append(prepare_append(pages, k, v, rows, factors, step.counted, *copies))
        if uncompressed is not None and step.uncompressed_too:
            appends.append(prepare_append(uncompressed, k, v, rows, factors))
    decode = dispatch.decode_path()
    most = (decode.MOST_JOBS,) if decode is not None and step.copies else ()
    alone = (
        decode is not None
        and decode.why_not_call(q, pages, scoring, step.precision, *most) is None
        and all(each is None or decode.serves_uncompressed(each, scoring) for each in (uncompressed, recent))
    )
    if not alone and step.first_tokens is not None:  # a sequence may lack them, which only `merge_pieces` looks at
        step = replace(step, scoring=replace(scoring, first=0), uncompressed=None)
    if not alone and not rows.single:  # and only this knows which recent ones each of several queries sees
        step = replace(step, recent=None, coded=None)
    if alone:
        options = (step.query_ends, scoring, step.sink_logits, step.splits)
        attend = decode.prepare(q, step.over_codes().pages, rows, *options, uncompressed, factors, recent)
    else:
        by_parts = step.by_parts(dispatch.attend)

    def run(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial:
        if k is not None and v is not None:
            for append in appends:
                append(k=k, v=v)
        if alone:
            fits = out is not None and out.is_contiguous() and out.dtype == q.dtype
            part: Partial = attend(q, None, out if fits else None)
            return part if fits else written(part, out)
        return written(in_dtype(by_parts(scaled_queries(q, factors)), q.dtype), out)

    return run
