"""Running a program over a grid, on tensors."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import torch

from . import library
from .errors import EmulationError
from .program import Program

MOST = 200_000_000  # instructions of warps of one program of the grid
NUMBERS = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
           "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}  # fmt: skip

Parameter = tuple[str, Any]  # pointer and a tensor or None, map and a TensorMap with its tensor, or a type and a number


class TensorMap(NamedTuple):
    """What TMA knows about a tensor, as Triton describes it: the outermost dimension first."""

    address: int
    swizzle: int
    element: int
    block: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nan: bool


class _Range(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("number", ctypes.c_int32),
    ]


class _Map(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64), ("parameter", ctypes.c_uint64), ("rank", ctypes.c_int32),
        ("swizzle", ctypes.c_int32), ("element", ctypes.c_int32), ("nan", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5), ("box", ctypes.c_int64 * 5),
    ]  # fmt: skip


def extent(x: torch.Tensor) -> tuple[int, int]:
    """From the first to behind the last byte of a tensor."""
    if x.device.type != "cpu":
        raise EmulationError(f"the emulator takes CPU tensors, got {x.device}")
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _map(tensor_map: TensorMap, at: int) -> _Map:
    rank = len(tensor_map.shape)
    strides = [n * tensor_map.element for n in tensor_map.strides[:-1]] + [tensor_map.element]

    def five(numbers: Any) -> Any:
        return (ctypes.c_int64 * 5)(*reversed(numbers))

    return _Map(
        tensor_map.address, at, rank, tensor_map.swizzle, tensor_map.element, int(tensor_map.nan),
        five(tensor_map.shape), five(strides), five(tensor_map.block),
    )  # fmt: skip


def launch(program: Program, grid: tuple[int, int, int], warps: int, shared: int, given: list[Parameter]) -> int:
    """Runs to the end; how many instructions warps executed."""
    if len(given) != len(program.parameters):
        raise EmulationError(f"{program.name} takes {len(program.parameters)} parameters, got {len(given)}")
    block, ranges, maps = bytearray(program.parameter_bytes), [], []
    for number, ((kind, value), variable, at) in enumerate(zip(given, program.parameters, program.places, strict=True)):
        if kind == "map":
            tensor_map, base = value
            maps.append(_map(tensor_map, at))
            ranges.append(_Range(*extent(base), 0, number))
            continue
        if kind == "pointer":
            data = struct.pack("<Q", value.data_ptr() if value is not None else 0)
            if value is not None:
                ranges.append(_Range(*extent(value), 1, number))
        else:
            data = _number(kind, value)
        if len(data) != variable.size:
            raise EmulationError(f"{program.name}: parameter {number} has {variable.size} bytes, got {kind}")
        block[at : at + len(data)] = data
    for buffer in program.buffers:
        at = ctypes.addressof(buffer)
        ranges.append(_Range(at, at + len(buffer), 0, -1))
    error, numbers = ctypes.create_string_buffer(2048), (ctypes.c_int64 * 8)()
    failed = library.library().ptx_run(
        program.handle, (ctypes.c_uint32 * 3)(*grid), 32 * warps, program.shared + shared,
        (ctypes.c_ubyte * len(block)).from_buffer(block), ctypes.c_int64(len(block)), (_Range * len(ranges))(*ranges),
        len(ranges), (_Map * max(1, len(maps)))(*maps), len(maps), 1, ctypes.c_uint64(MOST), error, len(error), numbers,
    )  # fmt: skip
    if failed:
        line, x, y, z, warp = numbers[:5]
        shown = program.lines[line - 1].strip() if 0 < line <= len(program.lines) else "?"
        raise EmulationError(
            f"{program.name}, program ({x}, {y}, {z}), warp {warp}, PTX line {line}, {shown}: {error.value.decode()}"
        )
    return numbers[0]


def _number(kind: str, value: Any) -> bytes:
    if kind in ("fp16", "bf16"):
        dtype = torch.float16 if kind == "fp16" else torch.bfloat16
        return bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist())
    if kind not in NUMBERS:
        raise EmulationError(f"the emulator does not know parameters of type {kind}")
    return struct.pack("<" + NUMBERS[kind], int(value) if NUMBERS[kind] not in "fd" else value)
