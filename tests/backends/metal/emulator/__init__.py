"""Metal kernels on a CPU: a C++ compiler behind a shim, a fiber per thread, a watch on every memory access.

`compile_shader(source)` stands in for `torch.mps.compile_shader`; what the device would have done wrong raises
`EmulationError`. It cannot tell speed, registers, Apple's compiler errors, Apple's rounding, or effects of weak memory
order.
"""

from .emulate import compile_shader, why_not
from .translate import EmulationError

__all__ = ["EmulationError", "compile_shader", "why_not"]
