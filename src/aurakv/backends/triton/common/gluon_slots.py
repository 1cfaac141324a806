"""The slot rule in Gluon; `slots` has it for Triton."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def table_entry(page, width, pinned):
    """The table entry of page number `page` of a sequence, forced into the table."""
    wrapped = pinned + (page - pinned) % gl.maximum(width - pinned, 1)
    return gl.minimum(gl.where(page < pinned, page, wrapped), width - 1)
