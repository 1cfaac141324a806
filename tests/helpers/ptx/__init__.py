"""Kernels of NVIDIA GPUs on a CPU, from the PTX that Triton compiles: an interpreter with a watch on every access.

`emulating(capability)` gives Triton a device on which CPU tensors lie; `pytest --emulate 8.0` does so for a whole run.
What a GPU would do wrong raises `EmulationError`: accesses beyond tensors, shared memory that a copy under way is to
fill (what nothing wrote is NaN), races between warps, lanes and warps that wait for each other. It cannot tell speed,
what ptxas makes of the PTX, how tensor cores round sums, or effects of weak memory order.
"""

from .errors import EmulationError
from .library import why_not

__all__ = ["EmulationError", "why_not"]
