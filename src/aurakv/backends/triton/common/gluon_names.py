"""What Gluon calls differently from one version of Triton to the next."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from Triton 3.9 on
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # before Triton 3.7


@gluon.jit
def reinterpret(x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as other numbers."""
    if REINTERPRET:
        return x.reinterpret(dtype, shape, layout)
    else:
        return x._reinterpret(dtype, shape, layout)
