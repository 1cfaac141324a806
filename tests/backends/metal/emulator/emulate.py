"""`compile_shader(source).kernel(*args, threads=, group_size=, arg_casts=)` as in torch.mps, on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .translate import MOST_THREADS, EmulationError, Kernel, line_of, refuse_recursion, translate

SHIM = Path(__file__).parent / "shim"
CASTS = {"fp16": "e", "bf16": "bf16", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}  # torch's names
SIZES = {
    "char": 1, "uchar": 1, "bool": 1, "short": 2, "ushort": 2, "half": 2, "int": 4, "uint": 4, "float": 4, "long": 8,
    "ulong": 8,
}  # fmt: skip
ALONE = threading.RLock()  # one compiler or launch at a time: fibers and marks are a library's, not a thread's
MOST_BYTES = 4096  # of a list or number: Metal copies them into the command
FLAGS = [
    "-std=c++14", "-Werror=vla", "-Werror=c++17-extensions", "-O1", "-g1", "-fPIC", "-ffp-contract=off",
    "-fsingle-precision-constant", "-fsanitize=thread,bounds,alignment,shift-exponent", "-fcallgraph-info",
]  # fmt: skip


def why_not() -> str | None:
    """What this machine lacks to emulate, in one sentence."""
    for program in ("g++", "addr2line"):
        if shutil.which(program) is None:
            return f"the emulator of Metal needs {program}"
    return None if os.uname().sysname == "Linux" else "the emulator of Metal runs on Linux"


@functools.cache
def flags() -> list[str]:
    """What a thread does not write holds no zeros by chance, where g++ can see to it."""
    return FLAGS + ["-ftrivial-auto-var-init=pattern"] * (int(_run("g++", "-dumpversion").split(".")[0]) >= 12)


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{command[0]} refused the source:\n{done.stderr}")
    return done.stdout


@functools.cache
def _folder() -> Path:
    """Where libraries are kept, by what they are made of, with the runtime and the compiled headers."""
    made_of = _run("g++", "--version") + " ".join(flags()) + "".join(p.read_text() for p in sorted(SHIM.iterdir()))
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"aurakv-metal-{os.getuid()}" / digest
    folder.mkdir(parents=True, exist_ok=True)
    _once(
        folder / "runtime.o",
        lambda out: _run("g++", "-std=c++17", "-O3", "-g", "-fPIC", "-I", SHIM, "-c", SHIM / "runtime.cpp", "-o", out),
    )
    (folder / "include").mkdir(exist_ok=True)
    header = folder / "include" / "metal_stdlib"
    _once(header, lambda out: shutil.copy(SHIM / "metal_stdlib", out))
    for name in ("metal_groups.h", "metal_types.h"):
        _once(folder / "include" / name, functools.partial(shutil.copy, SHIM / name))
    _once(header.with_suffix(".gch"), lambda out: _run("g++", *flags(), "-x", "c++-header", header, "-o", out))
    return folder


def _once(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file unless it is there; several processes may do so at a time."""
    if not path.exists():
        own = path.with_name(f"{path.name}.{os.getpid()}")
        make(own)
        own.replace(path)


class Library:
    """A compiled source. `backwards` runs lanes and simdgroups in the opposite order: results must not change."""

    def __init__(self, source: str, backwards: bool = False) -> None:
        if not source.isascii():
            at = next(i for i, c in enumerate(source) if ord(c) > 127)
            raise EmulationError(f"torch takes source for ASCII, got {source[at]!r} at {line_of(source, at)}")
        self._backwards = backwards
        self.counts: dict[str, int] = {}
        text, kernels = translate(source)
        self._kernels = {kernel.name: kernel for kernel in kernels}
        folder = _folder()
        digest = hashlib.sha256(source.encode()).hexdigest()[:24]
        self._file = folder / f"{digest}.so"
        _once(self._file, lambda out: self._build(folder, digest, text, out))
        self._dll = ctypes.CDLL(str(self._file))
        self._dll.mtl_memory.restype = ctypes.c_size_t
        self._dll.mtl_alloc.restype = ctypes.c_void_p
        self._dll.mtl_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]

    def _build(self, folder: Path, digest: str, text: str, out: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            unit = Path(own) / "source.metal"
            glue = "".join(kernel.glue for kernel in self._kernels.values())
            unit.write_text(f'#line 1 "source.metal"\n{text}\n#line 1 "glue"\n{glue}')
            include = folder / "include"
            _run(
                "g++",
                *flags(),
                "-I",
                include,
                "-include",
                include / "metal_stdlib",
                "-x",
                "c++",
                "-c",
                unit,
                "-o",
                f"{unit}.o",
            )
            refuse_recursion("".join(file.read_text() for file in Path(own).glob("*.ci")))
            _run("g++", "-shared", "-Wl,-Bsymbolic", f"{unit}.o", folder / "runtime.o", "-o", out)

    def __getattr__(self, name: str) -> Function:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._kernels:  # torch raises a RuntimeError, too
            raise EmulationError(f"no kernel {name}, there are {list(self._kernels)}")
        return Function(self, self._kernels[name])

    def __dir__(self) -> list[str]:
        return list(self._kernels)

    def _memory(self, kernel: Kernel) -> tuple[int, int]:
        """Where the list of its threadgroup arrays begins and ends."""
        low, high = (getattr(self._dll, f"{end}_{kernel.name}") for end in ("lo", "hi"))
        low.restype = high.restype = ctypes.c_void_p
        return low() or 0, high() or 0

    def _launch(self, kernel: Kernel, args: tuple[Any, ...], threads: Any, group_size: Any, arg_casts: Any) -> None:
        if len(args) != len(kernel.buffers):
            raise EmulationError(f"{kernel.name} takes {len(kernel.buffers)} arguments, got {len(args)}")
        pointers, back = (ctypes.c_void_p * len(args))(), []
        error = ctypes.create_string_buffer(512)
        try:
            for i, value in enumerate(args):
                name, kind, constant = kernel.buffers[i]
                where = f"{kernel.name}: {name}"
                if isinstance(value, torch.Tensor):
                    origin, size, offset = _tensor(where, value)
                    threads = value.numel() if threads is None else threads
                else:
                    cast = arg_casts.get(i, "") if isinstance(arg_casts, dict) else arg_casts or ""
                    origin, size, offset, constant = _bytes(where, kind, value, cast), 0, 0, True
                    size = len(origin)
                pointers[i] = self._dll.mtl_alloc(size, offset, i, int(constant))
                ctypes.memmove(pointers[i], origin, size)
                if not constant:
                    back.append((origin, pointers[i], size))
            most = Function(self, kernel).max_threads_per_threadgroup
            grid, group = _sizes(kernel.name, threads, group_size, most)
            run = ctypes.cast(getattr(self._dll, f"run_{kernel.name}"), ctypes.c_void_p)
            memory = map(ctypes.c_void_p, self._memory(kernel))
            self._dll.mtl_launch(run, pointers, grid, group, *memory, int(self._backwards), error)
            self.counts = self._counts(kernel)
            for origin, pointer, size in back:
                ctypes.memmove(origin, pointer, size)
        finally:
            self._dll.mtl_free_all()
        if error.value:
            told = re.sub(r"@([0-9a-f]+)", lambda m: self._line(m[1]), error.value.decode())
            raise EmulationError(f"{kernel.name}: {told}")

    def _counts(self, kernel: Kernel) -> dict[str, int]:
        """What a launch did: bytes read (of these: 16 at a time) and written by argument, operations of simdgroups,
        barriers of threadgroups."""
        found, out = {}, (ctypes.c_uint64 * 5)()
        for index, name in [(-1, "threadgroup"), *((i, buffer[0]) for i, buffer in kernel.buffers.items())]:
            self._dll.mtl_counts(index, out)
            found[f"{name} read"], found[f"{name} written"] = out[0], out[1]
            found[f"{name} read by 16"] = out[4]
        return found | {"simd operations": out[2], "barriers": out[3]}

    def _line(self, offset: str) -> str:
        """The innermost frame in the source, not in the shim."""
        frames = _run("addr2line", "-i", "-e", self._file, "0x" + offset).split("\n")
        frame = next((f for f in frames if ".metal:" in f), frames[0])
        file, _, line = frame.partition(" (discriminator")[0].rpartition(":")
        return f"line {line}" if file.endswith("source.metal") else f"{Path(file).name}, line {line}"


class Function:
    """A kernel as torch hands it out: called with arguments in order, and asked for its limits."""

    thread_execution_width = 32

    def __init__(self, library: Library, kernel: Kernel) -> None:
        self._library, self._kernel = library, kernel

    @property
    def max_threads_per_threadgroup(self) -> int:
        return min(MOST_THREADS, getattr(self._library._dll, f"most_{self._kernel.name}")())

    @property
    def static_thread_group_memory_length(self) -> int:
        return self._library._dll.mtl_memory(*map(ctypes.c_void_p, self._library._memory(self._kernel)))

    def __call__(
        self,
        *args: Any,
        threads: Any = None,
        group_size: Any = None,
        arg_casts: Any = None,
        error_buf_idx: Any = None,
    ) -> None:
        if error_buf_idx is not None:
            raise EmulationError(f"{self._kernel.name}: an error buffer is not emulated")
        if arg_casts is not None and not isinstance(arg_casts, (str, dict)):
            raise EmulationError(f"{self._kernel.name}: arg_casts is a name or a dict of names, got {arg_casts!r}")
        with ALONE:
            self._library._launch(self._kernel, args, threads, group_size, arg_casts)


def _tensor(where: str, x: torch.Tensor) -> tuple[int, int, int]:
    """Address, bytes up to the last element, and where in 16 bytes it starts: kernels see no strides."""
    if x.device.type != "cpu":
        raise EmulationError(f"{where}: the emulator takes CPU tensors, got {x.device}")
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), (last + 1) * x.element_size(), x.storage_offset() * x.element_size() % 16


def _bytes(where: str, kind: str, value: Any, cast: str) -> bytes:
    """A number or list as torch sends it: int64 and float32 unless a cast says otherwise."""
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if not values or not all(isinstance(x, (int, float)) for x in values):  # torch's lists of tensors are not emulated
        raise EmulationError(f"{where}: an argument is a tensor, a number or a list of numbers, got {value!r}")
    if isinstance(values[0], int) and not all(isinstance(x, int) for x in values):  # the first one says what all are
        raise EmulationError(f"{where}: a list that begins with an int has ints only, got {value!r}")
    if cast and cast not in CASTS:
        raise EmulationError(f"{where}: a cast is one of {list(CASTS)}, got {cast}")
    code = CASTS[cast] if cast else "f" if isinstance(values[0], float) else "q"
    if code == "bf16":
        data = torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    else:
        data = struct.pack(f"<{len(values)}{code}", *(x if code in "fe" else int(x) for x in values))
    size, floating = len(data) // len(values), code in ("f", "e", "bf16")
    if SIZES.get(kind) != size or floating != (kind in ("float", "half")):
        raise EmulationError(f"{where} is {kind}, got {len(values)} of {cast or ('float32' if floating else 'int64')}")
    if len(data) > MOST_BYTES:
        raise EmulationError(f"{where}: a list has at most {MOST_BYTES} bytes, got {len(data)}")
    return data


def _sizes(name: str, threads: Any, group_size: Any, most: int) -> tuple[Any, Any]:
    def row(given: Any) -> tuple[int, ...]:
        return (given,) if isinstance(given, int) else tuple(given)

    if threads is None:
        raise EmulationError(f"{name}: the number of threads is undefined")
    grid = row(threads)
    widest = min(grid[0], most) if len(grid) == 1 else most  # torch's defaults
    group = row(group_size) if group_size is not None else (widest, 1, 1)[: len(grid)]
    if not 1 <= len(grid) == len(group) <= 3 or min(*grid, *group) < 1:
        raise EmulationError(f"{name}: threads and group_size must be as many positive numbers, got {grid} and {group}")
    if math.prod(group) > most:
        raise EmulationError(f"{name}: a threadgroup of {math.prod(group)} threads: at most {most}")
    return tuple((ctypes.c_uint * 3)(*(*size, 1, 1)[:3]) for size in (grid, group))


def compile_shader(source: str, backwards: bool = False) -> Library:
    with ALONE:
        return _compiled(source, backwards)


_compiled = functools.cache(Library)
