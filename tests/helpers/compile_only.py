"""Kernels compiled for GPUs that are not here, exactly as launchers would launch them; what they then need."""

import contextlib
import re
import subprocess
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from aurakv.backends.triton.common import results, target
from aurakv.backends.triton.decode import launch as decode
from aurakv.backends.triton.extend import launch as extend

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int16: "*i16",
}


class CompileOnly:
    """Stands where a kernel is launched: specialises on the arguments as Triton does, compiles, remembers."""

    def __init__(self, kernel, capability, seen):
        self.kernel, self.capability, self.seen, self.arg_names = kernel, capability, seen, kernel.arg_names

    def __getitem__(self, grid):
        assert all(isinstance(n, int) and n > 0 for n in grid), "grids come from shapes"
        return self.launch

    def launch(self, *args, num_warps=4, **options):
        args = [*args, *(options.pop(name) for name in self.arg_names[len(args) :])]
        assert len(args) == len(self.kernel.params), self.kernel.fn.__name__
        signature, constants, attributes = {}, {}, {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=True)):
            one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or one:
                signature[parameter.name] = "constexpr"
                constants[(i,)] = value
                continue
            if isinstance(value, TensorDescriptor):
                kind = TYPES[value.base.dtype][1:]
                signature[parameter.name] = f"tensordesc<{kind}{value.block_shape},{value.layout!r}>"
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                aligned = value.data_ptr() % 16 == 0
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
                aligned = aligned and not parameter.do_not_specialize_on_alignment
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, signature, constants, attributes)
        options = {"num_warps": num_warps, **{name: x for name, x in options.items() if x is not None}}
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        self.seen[self.kernel.fn.__name__] = (compiled, num_warps)
        if self.kernel.is_gluon():  # its layouts are its own
            return
        for length, width in re.findall(
            r"tensor<\d+x(\d+)x\w+, #ttg.dot_op<.opIdx = 0, [^>]*kWidth = (\d+)", compiled.asm["ttgir"]
        ):
            assert int(length) >= 4 * int(width), "Triton would count the elements of this sum several times"


@contextlib.contextmanager
def compiling(capability):
    """Meanwhile, the launchers of decode and extend compile for a GPU of this capability (80 for 8.0) instead of
    launching. Yields what they have compiled: {kernel: (compiled, warps)}."""
    kernels = {
        decode: ("decode_attention", "merge_pieces"),
        extend: ("extend_kernel", "extend_warps_kernel", "prepare_kernel", "prepare_integers_kernel"),
        results: ("finish_kernel",),
    }
    seen = {}
    with contextlib.ExitStack() as stack:
        for module, names in kernels.items():
            for name in names:
                kernel = CompileOnly(getattr(module, name), capability, seen)
                stack.enter_context(mock.patch.object(module, name, kernel))
        for module in (decode, extend):
            stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=108))
        stack.enter_context(target.assuming(divmod(capability, 10)))
        yield seen


def disassemble(cubin: bytes, directory: Path, option: str = "-sass") -> str:
    file = directory / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes, directory: Path) -> tuple[int, int, int]:
    """Registers and bytes of stack of a kernel, and how often its main loop goes to the stack.

    The main loop is the shortest one with matrix products.
    """
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", disassemble(cubin, directory, "-res-usage"))[0]
    code = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", disassemble(cubin, directory))
    ]
    bodies = []
    for at, text in code:
        target = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = [other for where, other in code if int(target[1], 16) <= where <= at]
            if any("MMA" in other and "HFMA2" not in other for other in body):
                bodies.append(body)
    main = min(bodies, key=len, default=[])
    return int(registers), int(stack), sum(" LDL" in " " + text or " STL" in " " + text for text in main)


def main_loop(sass: str) -> tuple[list[str], list[int]]:
    """All instructions, and the numbers of those that a usual turn of the loop over tiles runs.

    The loop is the shortest backward jump over as many products as any. What a jump forward leaves out and that has
    neither products nor copies is rare: masks, larger weights than before, the next sequence."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    where = {int(address, 16): i for i, (address, _) in enumerate(found)}
    code = [text for _, text in found]

    def target(i: int) -> int:
        jump = re.search(r"BRA(?:\.U)?\s+(?:!?U?P\w+,\s*)?`?\(?0x([0-9a-f]+)", code[i])
        return where.get(int(jump[1], 16), i) if jump else i

    loops = [range(target(i), i + 1) for i in range(len(code)) if target(i) < i]
    loop = min(loops, key=lambda loop: (-sum("MMA" in code[i] for i in loop), len(loop)))
    usual, i = [], loop.start
    while i < loop.stop:
        usual.append(i)
        skipped = range(i + 1, min(target(i), loop.stop))
        rare = not any(re.search(r"MMA|LDGSTS|UTMALDG|UBLKCP", code[j]) for j in skipped)
        i = skipped.stop if len(skipped) and rare else i + 1
    return code, usual
