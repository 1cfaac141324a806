"""The shaders through clang's front end, with Metal's address spaces. g++ in the emulator erases these.

C++ for OpenCL is the language nearest to Metal's that a public compiler reads: `device`, `threadgroup` and `constant`
are types of pointers that do not convert to each other, a pointer without one points to the thread's own memory,
threadgroup memory belongs into kernels, and there is no double. Metal's library is in `front_end/`, as declarations.
"""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

import pytest
import torch

import aurakv as kv
from aurakv.backends.metal import source
from tests.backends.metal.emulator.translate import line_of
from tools import metal_sources

cindex = pytest.importorskip("clang.cindex", reason="libclang is not installed")

LACKING = ("__opencl_c_generic_address_space", "__opencl_c_pipes", "__opencl_c_device_enqueue")
ARGUMENTS = [
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-nostdinc", "-target", "spir64",
    "-Xclang", "-cl-ext=-all,+cl_khr_fp16" + "".join(f",-{name}" for name in LACKING),
    "-Wall", "-Wextra", "-Wno-unknown-attributes", "-Wno-unused-parameter", "-Wno-unused-function",
    "-I", str(Path(__file__).parent / "front_end"),
]  # fmt: skip
PARTS = 32
FORMAT = kv.Format.parse("k4v4", 128)
MAKER = re.compile(r"\b((?:u?(?:char|short|int|long)|half|float)[234])\(")  # OpenCL has no int2(x, y)


def complaints(text: str) -> list[str]:
    """Errors and warnings, with the shader's file and line."""
    text = MAKER.sub(r"make_\1(", text)
    unit = cindex.Index.create().parse("shader.cl", ARGUMENTS, [("shader.cl", text)])
    places = [sum(map(len, text.splitlines(keepends=True)[: d.location.line])) - 1 for d in unit.diagnostics]
    return [f"{line_of(text, at)}: {d.spelling}" for at, d in zip(places, unit.diagnostics, strict=True)]


@pytest.mark.parametrize("part", [pytest.param(i, marks=[] if i == 0 else pytest.mark.full) for i in range(PARTS)])
def test_shaders_are_accepted(part):
    chosen = dict(list(metal_sources.sources().items())[part::PARTS])
    assert len(chosen) > 30
    assert {name: found for name, text in chosen.items() if (found := complaints(text))} == {}


def intact(where):
    """That of the kernels named so."""
    if where == "tiles":
        return source.attend_tiles(FORMAT, 4, False)
    return {"vectors": source.vectors, "merge": source.merge}[where](FORMAT.value, torch.float16)


BROKEN = {  # what: what is said, where, what is replaced, by what
    "a pointer without device": (
        "no matching function for call to 'side_fetch'", "vectors",
        "(device const uchar* row, uint unit",
        "(const uchar* row, uint unit",
    ),
    "a cast that loses device": (
        "mismatching address spaces", "vectors",
        "(device const uint2*)row",
        "(const uint2*)row",
    ),
    "threadgroup memory as the thread's": (
        "no matching function", "vectors",
        "side_rotate_back(threadgroup float* x",
        "side_rotate_back(thread float* x",
    ),
    "device memory as constant": (
        "no matching function", "tiles",
        "int seq, device const int* table",
        "int seq, constant int* table",
    ),
    "numbers without constant": (
        "no matching function", "tiles",
        "int length, constant int* numbers",
        "int length, device int* numbers",
    ),
    "a write to constant memory": (
        "read-only", "tiles",
        "int3 blocks = blocks_of(",
        "N_WINDOW = 1; int3 blocks = blocks_of(",
    ),
    "a table outside constant memory": (
        "must reside in constant", "tiles",
        "constant float KEY_TABLE",
        "float KEY_TABLE",
    ),
    "threadgroup memory in a function": (
        "non-kernel function", "tiles",
        "bool seen = !N_CAUSAL",
        "threadgroup int more[2]; bool seen = !N_CAUSAL",
    ),
    "threadgroup memory in a loop": (
        "outermost scope of a kernel", "tiles",
        "int first_key =",
        "threadgroup int more[2]; int first_key =",
    ),
    "a double": (
        "use of type 'double'", "merge",
        "bool endless",
        "double more = total; bool endless",
    ),
    "numbers of two types": (
        "call to 'min' is ambiguous", "tiles",
        "min(length, highest + 1)",
        "min(length, uint(highest) + 1)",
    ),
    "a shuffled bool": (
        "deleted function", "tiles",
        "simd_shuffle_xor(harm, 1)",
        "simd_shuffle_xor(damaged, 1)",
    ),
    "matrices of two types": (
        "simdgroup_multiply_accumulate", "tiles",
        "simdgroup_float8x8 a, b;",
        "simdgroup_float8x8 b; simdgroup_half8x8 a;",
    ),
    "a matrix stored to const memory": (
        "simdgroup_store", "tiles",
        "threadgroup float scores[SIMDS]",
        "threadgroup const float scores[SIMDS]",
    ),
    "an atomic written as a number": (
        "no viable overloaded '='", "tiles",
        "atomic_store_explicit(&bad[key], 1, memory_order_relaxed);",
        "bad[key] = 1;",
    ),
    "bits of another size": (
        "sizes of .* must match", "merge",
        "as_type<uint>(x)",
        "as_type<ushort>(x)",
    ),
    "a function of another library": (
        "undeclared identifier 'isnanf'", "merge",
        "is_finite(logit)",
        "isnanf(logit)",
    ),
    "a name of the library": (
        "reference to 'level' is ambiguous", "merge",
        "static inline float sum_of",
        "struct level {}; constant level none = {}; static inline float sum_of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_shaders_are_refused(what):
    said, where, old, new = BROKEN[what]
    text = intact(where)
    assert old in text
    assert any(re.search(said, line) for line in complaints(text.replace(old, new)))


def test_the_line_is_that_of_the_file():
    file = importlib.resources.files("aurakv.backends.metal").joinpath("shaders").joinpath("merge.metal").read_text()
    line = file[: file.index("bool endless")].count("\n") + 1
    text = intact("merge").replace("bool endless", "int more = missing; bool endless")
    assert complaints(text) == [f"merge.metal, line {line}: use of undeclared identifier 'missing'"]
