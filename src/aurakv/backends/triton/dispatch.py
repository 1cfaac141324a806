"""Which kernel attends: decode for a few queries a sequence, extend for many, the portable one for everything else."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.partial import Partial
from ...attention.step import Attention
from ...storage.pages import Pages
from .common.codes import INTERPRETED
from .common.target import available, why_no_gluon
from .portable import launch as portable


def workspace_bytes(pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
    """Enough for whichever kernel serves a call of this size."""
    if tokens == 0:
        return 0
    sizes = [portable.workspace_bytes(pages, tokens, heads, splits)]
    for path in (decode_path(), extend_path()):
        if path is not None and path.why_not_format(pages.format) is None:
            sizes.append(path.workspace_bytes(pages, tokens, heads, splits))
    return max(sizes)


def attend(q: Tensor, attention: Attention) -> Partial:
    part: Partial
    pages, scoring, precision, workspace = attention.pages, attention.scoring, attention.precision, attention.workspace
    given = (pages, attention.rows, attention.query_ends, scoring, attention.sink_logits, attention.splits)
    path = _serving(q, attention)
    if path is None:
        return portable.attend(q, *given, precision, workspace)
    part = path.attend(q, *given, workspace)
    return part


def kernel(q: Tensor, attention: Attention) -> str:
    """Which kernel `attend` takes, in a few words."""
    path = _serving(q, attention)
    return "portable kernel" if path is None else str(path.kernel_of(attention.pages))


def _serving(q: Tensor, attention: Attention) -> Any:
    """The launcher of the decode or the extend kernel, whichever serves a call; None: the portable kernel does."""
    for path in (decode_path(), extend_path()):
        if path is not None and path.why_not_call(q, attention.pages, attention.scoring, attention.precision) is None:
            return path
    return None


def decode_path() -> Any:
    """The launcher of the decode kernel, or None where a process cannot have it."""
    if why_no_gluon_paths() is not None:
        return None
    from .decode import launch

    return launch


def extend_path() -> Any:
    """The launcher of the extend kernel, or None where a process cannot have it."""
    if why_no_gluon_paths() is not None:
        return None
    from .extend import launch

    return launch


def why_no_gluon_paths() -> str | None:
    """Why this process takes the portable kernel for every call; None: it need not."""
    if INTERPRETED.value:
        return "Triton's interpreter runs plain Triton only"
    if not available():
        return "torch finds no CUDA device"
    return why_no_gluon()
