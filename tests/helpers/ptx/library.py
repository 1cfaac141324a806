"""The machine that runs programs: C++ in machine/, compiled once."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import EmulationError

SOURCES = Path(__file__).parent / "machine"
BUILD = Path(__file__).parents[3] / "build" / "ptx"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror"]


def why_not() -> str | None:
    """What this machine lacks to emulate, in one sentence."""
    return None if shutil.which("g++") else "the emulator of PTX needs g++"


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


@functools.cache
def library() -> ctypes.CDLL:
    files = sorted(SOURCES.iterdir())
    cpu = _run("g++", "-march=native", "-Q", "--help=target")  # another CPU may lack what this one has
    made_of = "".join(file.read_text() for file in files) + " ".join(FLAGS) + cpu
    folder = BUILD / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    made = folder / "machine.so"
    if not made.exists():
        own = folder / str(os.getpid())  # several processes may build at a time
        own.mkdir(parents=True)
        sources = [file for file in files if file.suffix == ".cpp"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda file: _run("g++", *FLAGS, "-c", file, "-o", own / f"{file.stem}.o"), sources))
        _run("g++", "-shared", *(own / f"{file.stem}.o" for file in sources), "-o", own / "machine.so")
        (own / "machine.so").replace(made)
        shutil.rmtree(own)
    dll = ctypes.CDLL(str(made))
    dll.ptx_operands.restype = ctypes.c_char_p
    dll.ptx_program.restype = ctypes.c_void_p
    dll.ptx_forget.argtypes = [ctypes.c_void_p]
    return dll


@functools.cache
def operands(name: str) -> tuple[str, int] | None:
    """What an instruction takes, and its kind; None where there is no such instruction."""
    kind = ctypes.c_int32()
    found = library().ptx_operands(name.encode(), ctypes.byref(kind))
    return None if found is None else (found.decode(), kind.value)
