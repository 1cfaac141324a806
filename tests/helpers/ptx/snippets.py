"""Pieces of PTX on the emulator, for tests: registers of 32 lanes in, registers out."""

from __future__ import annotations

import numpy as np
import torch

from .launch import launch
from .program import Program

LANES = 32


def kernel(body: str, parameters: int = 2) -> Program:
    """A kernel with pointers p0, p1, … of 64 bits; %lane is the number of a thread."""
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.b64 %p{i}, [p{i}];" for i in range(parameters))
    return Program(
        f".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n"
        f".visible .entry snippet({declared})\n{{\n.reg .b64 %p<{parameters}>;\n.reg .b32 %lane, %from;\n"
        f"mov.u32 %lane, %tid.x;\n{loads}\n{body}\nret;\n}}\n"
    )


def run(
    body: str, *tensors: torch.Tensor, warps: int = 1, shared: int = 0, grid: tuple[int, int, int] = (1, 1, 1)
) -> int:
    return launch(kernel(body, len(tensors)), grid, warps, shared, [("pointer", each) for each in tensors])


def lanes(
    assembly: str, given: dict[str, np.ndarray | int], wanted: list[str], memory: bytes = b"", declared: str = ""
) -> dict[str, np.ndarray]:
    """Words of all lanes after the assembly. given: words by the names of their registers; memory: what is shared."""
    names = list(dict.fromkeys([*given, *wanted]))
    rows = np.zeros((len(names) + 1, LANES), np.uint32)
    for i, name in enumerate(names):
        rows[i] = given.get(name, 0)
    data = np.frombuffer(memory.ljust(-(-len(memory) // 128) * 128, b"\0") or bytes(128), np.uint32)
    registers, words = torch.from_numpy(rows.view(np.int32)), torch.from_numpy(data.view(np.int32).copy())
    fill = "".join(
        f"add.u64 %a, %in, {128 * i}; ld.global.b32 %w, [%a]; st.shared.b32 [%to+{128 * i}], %w;\n"
        for i in range(len(data) // LANES)
    )
    body = (
        f".reg .b64 %at, %in, %a; .reg .b32 %w, %to; .reg .b32 {', '.join(names)}; {declared}\n"
        "mad.wide.u32 %at, %lane, 4, %p0; mad.wide.u32 %in, %lane, 4, %p1; mov.u32 %to, dynamic;\n"
        f"mad.lo.u32 %to, %lane, 4, %to;\n{fill}bar.sync 0;\n"
    )
    body += "".join(f"ld.global.b32 {name}, [%at+{128 * i}];\n" for i, name in enumerate(names) if name in given)
    body += assembly + "\n"
    body += "".join(f"st.global.b32 [%at+{128 * names.index(name)}], {name};\n" for name in wanted)
    run(body, registers, words, shared=len(memory) + 128)
    return {name: registers[names.index(name)].numpy().view(np.uint32).copy() for name in wanted}
