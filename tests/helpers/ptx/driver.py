"""A driver for Triton whose device is the interpreter of PTX: kernels are compiled and launched as on a GPU, with CPU
tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import make_tensordesc_arg

from aurakv.backends.triton.common import target

from .errors import EmulationError
from .launch import Parameter, TensorMap, launch
from .program import SHARED_BEGIN, Program, assemble

MULTIPROCESSORS = 4  # few, so that work is shared by few programs
MOST_THREADS = 1024
DEFAULT_SHARED = 48 * 1024  # bytes of a program, unless it asks for more than that, as Triton's driver does it
OPT_IN = 1024  # bytes of a multiprocessor's shared memory that no program can have
BUILD = Path(__file__).parents[3] / "build" / "ptx"
UNUSED = [None] * (make_tensordesc_arg.__code__.co_argcount - 2)  # parameters that later Tritons have for others


Change = Callable[[str], str]
_changes = itertools.count(1)


class Utils:
    """What Triton asks of a loaded device."""

    def __init__(self, capability: tuple[int, int], change: Change | None) -> None:
        self.capability, self.change = capability, change

    def get_device_properties(self, device: int) -> dict[str, int]:
        shared = target.SHARED.get(self.capability, min(target.SHARED.values())) * 1024 - OPT_IN
        return {"max_shared_mem": shared, "multiprocessor_count": MULTIPROCESSORS, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        ptx = binary.decode()
        program = _assembled(self.change(ptx) if self.change else ptx)
        own = program.shared - SHARED_BEGIN  # what the kernel declares itself
        most = DEFAULT_SHARED if shared <= DEFAULT_SHARED else self.get_device_properties(device)["max_shared_mem"]
        if own + shared > most:
            raise EmulationError(f"{name} declares {own} bytes of shared memory and asks for {shared}: over {most}")
        return self, program, 0, 0, MOST_THREADS

    def fill_tma_descriptor(
        self, address: int, swizzle: int, size: int, kind: int, block: list[int], shape: Any, strides: Any, padding: int
    ) -> TensorMap:
        return TensorMap(address, swizzle, size, tuple(block), tuple(shape), tuple(strides), bool(padding))

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name from Triton 3.7 on


@functools.cache
def _assembled(ptx: str) -> Program:
    return assemble(ptx)


class Launcher:
    """Of one compiled kernel: from Python arguments to the parameters of its PTX."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = list(source.signature.values())
        self.metadata = metadata
        self.warps = metadata.num_warps

    def __call__(
        self, x: int, y: int, z: int, stream: int, program: Program, packed: Any, launch_metadata: Any,
        enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        if x * y * z == 0:
            return
        given: list[Parameter] = []
        described = iter(getattr(self.metadata, "tensordesc_meta", None) or ())
        for kind, value in zip(self.signature, arguments, strict=True):
            _flatten(kind, value, described, given)
        for size in (self.metadata.global_scratch_size, self.metadata.profile_scratch_size):
            scratch = torch.empty(size * x * y * z, dtype=torch.uint8) if size else None
            given.append(("pointer", scratch))
        launch(program, (x, y, z), self.metadata.num_warps, self.metadata.shared, given)


def _flatten(kind: Any, value: Any, described: Iterator[Any], into: list[Parameter]) -> None:
    """Parameters in the order of the launchers that Triton makes."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, value, strict=True):
            _flatten(inner, part, described, into)
    elif kind == "constexpr":
        return
    elif kind.startswith("tensordesc"):
        tensor_map, *numbers = make_tensordesc_arg(value, next(described), *UNUSED)
        rank = len(numbers) // 2
        into.append(("map", (tensor_map, value.base)))
        into.extend(("i32", int(n)) for n in numbers[:rank])
        into.extend(("i64", int(n)) for n in numbers[rank:])
    elif kind[0] == "*":
        into.append(("pointer", value))
    else:
        into.append((kind, value))


class Driver(DriverBase):
    """Stands where Triton's CUDA driver would. A capability is a device of its own, and so is each that changes PTX:
    Triton keeps kernels by device."""

    launcher_cls = Launcher

    def __init__(self, capability: tuple[int, int], change: Change | None = None) -> None:
        super().__init__()
        self.capability, self.utils = capability, Utils(capability, change)
        self.device = 10 * capability[0] + capability[1] + (1000 * next(_changes) if change else 0)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the emulator compiles no launchers")

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the emulator has no time")


def _keep_ptx(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str] | None:
    """Instead of a binary: nothing here would read one. File names are left out, so that copies share kernels.

    Without arguments, as from Triton 3.7 on: what tells kernels apart that are made like this."""
    if stages is None:
        return "ptx", repr("ptx")
    stages["cubin"] = lambda ptx, metadata: re.sub(r"(?m)^\s*\.(loc|file)\b.*\n", "", ptx).encode()
    return None


def start(capability: tuple[int, int], change: Change | None = None) -> None:
    """From now on this process has an emulated GPU of this capability, whose tensors are on the CPU."""
    target.assume(capability, device_type="cpu", multiprocessors=MULTIPROCESSORS)
    triton.runtime.driver.set_active(Driver(capability, change))
    triton.knobs.cache.dir = str(BUILD / "cache")  # apart from kernels that have binaries
    triton.knobs.runtime.add_stages_inspection_hook = _keep_ptx


@contextlib.contextmanager
def emulating(capability: tuple[int, int], change: Change | None = None) -> Iterator[None]:
    """Meanwhile, Triton's kernels run on an emulated GPU of this capability, on CPU tensors.

    change: what is done to their PTX before, for faults on purpose."""
    before = triton.runtime.driver._active, triton.knobs.cache.dir
    hook = triton.knobs.runtime.add_stages_inspection_hook
    with target.assuming(capability):  # start assumes more; this restores
        start(capability, change)
        try:
            yield
        finally:
            triton.runtime.driver._active, triton.knobs.cache.dir = before
            triton.knobs.runtime.add_stages_inspection_hook = hook
