"""What of the fast decode path needs no GPU: which formats it serves, its arithmetic, its kernels compiled."""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import pytest
import torch

from aurakv.attention.scoring import Scoring
from aurakv.format.codec import Codec, Format
from aurakv.storage.pages import Pages, allocate

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from aurakv.backends.triton import backend  # noqa: E402
from aurakv.backends.triton.common import target  # noqa: E402
from aurakv.backends.triton.decode import launch  # noqa: E402
from aurakv.backends.triton.decode.kernel import decode_attention  # noqa: E402
from aurakv.backends.triton.decode.levels import levels as level_arithmetic  # noqa: E402
from aurakv.backends.triton.decode.merge import merge_pieces  # noqa: E402
from aurakv.backends.triton.decode.shapes import CODE_BITS, DIMS, flat  # noqa: E402
from aurakv.backends.triton.extend import launch as extend  # noqa: E402

MINIFLOAT, CUBIC = "k4/v4:minifloat", "k4v4"
UNIFORM = "k2/v2:uniform"


def test_says_why_not() -> None:
    assert launch.why_not_format(Format.parse(MINIFLOAT, 128)) is None
    assert launch.why_not_format(Format.parse(CUBIC, 256)) is None
    assert launch.why_not_format(Format.parse("k3v3", 128)) is None
    assert launch.why_not_format(Format.parse("k5v6", 128)) is None
    assert launch.why_not_format(Format.parse("k8v8", 64)) is None
    assert "level tables" in (launch.why_not_format(Format.parse("k8:lloyd-max/v4", 128)) or "")
    for name in ("k5:lloyd-max/v4", "k6:cubic/v4", "k4/v5:cubic", "k4/v6:lloyd-max"):
        assert "level tables" in (launch.why_not_format(Format.parse(name, 128)) or "")
    assert "level tables" in (
        launch.why_not_format(Format.parse("k8:cubic/v4", 96)) or ""
    )  # polynomials of pieces only
    for name, dim in (("k4v4", 112), ("k4v4", 32), ("k2v2", 1024)):
        assert "bits and dims" in (launch.why_not_format(Format.parse(name, dim)) or "")
    assert "shared memory" in (launch.why_not_format(Format.parse("k8v8", 512)) or "")
    assert "same dim" in (launch.why_not_format(Format.parse("k4v4", (128, 64))) or "")


@pytest.mark.parametrize("dim", DIMS)
def test_every_width_is_served(dim: int) -> None:
    for key, value in itertools.product(CODE_BITS, CODE_BITS):
        if (dim, key, value) != (512, 8, 8):
            assert launch.why_not_format(Format.parse(f"k{key}v{value}", dim)) is None
            assert launch.why_not_format(Format.parse(f"k{key}:f32/v{value}:f32", dim)) is None
    for bits in (2, 3, 4):
        uneven = table([-1.0 + 0.01 * i * i for i in range(1 << bits)])
        for name in (f"k{bits}:lloyd-max/v{bits}:lloyd-max", f"k{bits}:{uneven}/v{bits}:{uneven}"):
            assert launch.why_not_format(Format.parse(name, dim)) is None


def table(levels: list[float]) -> str:
    return str(levels).replace(" ", "")


@pytest.mark.parametrize(
    "name",
    [
        f"k8:{table([(i - 127.5) * (1 + 10 * (i - 127.5) ** 2) for i in range(256)])}/v4",
        f"k4/v8:{table([(i - 127.5) * (1 + 10 * (i - 127.5) ** 2) for i in range(256)])}",
        "k2v2:[-1.00001,-1,1,1.00001]",
        "k2:[0,0,0,0]/v2",
        f"k4v4:{table([(i - 7.5) * 1e30 for i in range(16)])}",
    ],
)  # fmt: skip
def test_tables_beyond_float16_are_refused_or_served(name: str) -> None:
    """Legal tables of users: a reason or an arithmetic, never an error."""
    format = Format.parse(name, 128)
    assert (level_arithmetic(format) is None) == (launch.why_not_format(format) is not None)
    assert (extend.why_not_format(format) is None) == (format.value.bits == 2 and any(format.key.levels))


@pytest.mark.parametrize(("key", "value"), [(160, 160), (576, 512), (32, 32), (128, 64)])
def test_other_dims_are_refused_in_a_sentence(key: int, value: int) -> None:
    """Of calls, too: the portable kernel serves them."""
    format = Format(Codec.key(key, 4), Codec.value(value, 4))
    data = allocate(format, 64, 1, 2, torch.device("cpu"))
    pages = Pages(format, 64, data, *(torch.zeros(shape, dtype=torch.int32) for shape in ((1, 1), (1,), (1,))))
    with target.assuming((8, 0), device_type="cpu", multiprocessors=4):
        q = torch.zeros(1, 4, key)
        assert "dim" in (launch.why_not_call(q, pages, Scoring(), "fast") or "")
        assert backend.workspace_bytes(pages, 1, 4, None) >= 0


def test_uniform_tables_are_served() -> None:
    for name in ("k8:uniform/v8:uniform", "k4:uniform/v4:uniform", "k3:uniform/v3:uniform", UNIFORM):
        assert launch.why_not_format(Format.parse(name, 128)) is None


EVEN = {3: "[-3.5,-2.5,-1.5,-0.5,0.5,1.5,2.5,3.5]", 4: str([i - 7.5 for i in range(16)]).replace(" ", "")}


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("even", [False, True])
def test_odd_cubics(bits: int, even: bool) -> None:
    """The kernel's arithmetic in float16, also for evenly spaced levels, is nearer than float16 weights are."""
    format = Format.parse(f"k4/v{bits}:{EVEN[bits] if even else 'cubic'}", 128)
    levels = level_arithmetic(format)
    assert levels is not None
    r = torch.tensor([levels.value.words[0] & 0xFFFF], dtype=torch.uint16).view(torch.float16).float()
    x = (2 * torch.arange(1 << bits) - (1 << bits) + 1) / (1 << bits)
    made = ((x * x + r).half().float() * x).half().double() * levels.value.step
    exact = torch.tensor(format.value.levels, dtype=torch.float64)
    assert (made - exact).norm() <= 4e-4 * exact.norm(), float((made - exact).norm() / exact.norm())


BESIDE = ("u_table", "u_lengths", "r_table", "r_lengths")  # where uncompressed tokens lie


def compile_kernel(kernel: Any, types: dict[str, str], fixed: dict[str, Any], capability: int, options: Any) -> Any:
    names = kernel.arg_names
    signature = {n: types.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): value for n, value in fixed.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_decode(
    capability: int,
    group: int,
    dim: int,
    name: str,
    tile: int,
    several: bool,
    alone: bool = False,
    show: str = "-res-usage",
) -> str:
    """What cuobjdump shows of the decode kernel, compiled without a GPU."""
    format = Format.parse(name, dim)
    levels = level_arithmetic(format)
    assert levels is not None
    key, value = format.key, format.value
    fixed = {"GROUP": group, "ROWS": group, "DIM": dim, "TILE": tile, "SEQS": 32, "CLIP": True, "WINDOW": True}
    fixed |= {"STAGES": 2, "KEY_LEVELS": levels.key.kind, "VALUE_LEVELS": levels.value.kind}
    fixed |= {"KEY_BITS": key.bits, "VALUE_BITS": value.bits}
    fixed |= {"SINKS": several, "SOFTCAP": several, "OFFSET": several, "SEVERAL": several, "WHOLE": 0 if several else 2}
    fixed |= {"KEY_SCALE": several, "ALONE": alone, "LOGITS": alone, "KEY_OFFSET": alone and not several}
    fixed |= {"VALUE_OFFSET": alone, "BULK": True, "EARLY": True, "PAGES": 1}
    fixed |= dict.fromkeys(("UNCOMPRESSED", "RECENT"), alone and not several)
    fixed |= {"KEY_SCALES": key.scale_bytes, "VALUE_SCALES": value.scale_bytes, "THRESHOLD": False}
    swizzled, plain = gl.NVMMASharedLayout(128, 16, rank=4), gl.NVMMASharedLayout(0, 16, rank=3)
    both = 2 if key.bits == value.bits and not flat(key.bits, dim) else 1

    def codes(side: Codec) -> str:
        if flat(side.bits, dim):
            return f"tensordesc<i16[1, 1, {tile}, 32],{gl.NVMMASharedLayout(64, 16, rank=4)!r}>"
        return f"tensordesc<i16[1, {both}, {tile * side.row_bytes // 128}, 64],{swizzled!r}>"

    types = {
        "keys": codes(key),
        "values": codes(value),
        "scales": f"tensordesc<fp16[1, 2, {tile}],{plain!r}>",
        **dict.fromkeys(("signs", "value_signs", "pieces", "lses", "lse_out", "offset", "value_offset"), "*fp32"),
        **dict.fromkeys(("constants", "table", "lengths", "ends", "starts", *BESIDE), "*i32"),
        **dict.fromkeys(("cap", "score_scale", "bias_scale", "value_scale", "value_shift", "least"), "fp32"),
        **dict.fromkeys(fixed, "constexpr"),
        **dict.fromkeys(("q", "out", "u_data", "r_data", "sink_logits"), "*bf16"),
        "key_scale": "*fp32",
        "codes": "*i16",
    }
    if fixed["UNCOMPRESSED"]:
        types["first"] = "*i32"  # of each sequence
    options = {"num_warps": 1, "maxnreg": launch._registers(format, group)}
    compiled = compile_kernel(decode_attention, types, fixed, capability, options)
    names = re.findall(r"\.param \.align \d+ \.b8 (\w+)\[128\]", compiled.asm["ptx"])
    assert names == [f"decode_attention_param_{i}" for i in (0, 9, 18)], "the descriptors that `tile_ring` names"
    binaries = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(binaries / "cuobjdump"), show, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("capability", "name", "dim", "tile", "group", "several"),
    [
        (90, MINIFLOAT, 128, 64, 4, False), (90, CUBIC, 128, 64, 8, False), (90, MINIFLOAT, 128, 32, 8, True),
        (90, MINIFLOAT, 64, 64, 4, False), (90, CUBIC, 256, 32, 8, False), (100, MINIFLOAT, 128, 64, 4, False),
        (90, "k2v2", 128, 64, 4, False), (90, "k2v2", 256, 64, 8, True), (90, "k8:cubic/v4", 128, 32, 4, False),
        (90, "k8:cubic/v4", 64, 64, 8, True), (90, "k8:cubic/v8:cubic", 128, 32, 8, True),
        (90, "k8v4", 128, 32, 4, False), (90, "k8v8", 128, 32, 8, True), (90, "k8v4", 64, 64, 4, False),
        (90, "k3v3", 128, 64, 4, False), (90, "k3v3", 128, 64, 8, True),
        (90, "k5v4", 128, 64, 4, False), (90, "k6v6", 128, 32, 8, True), (90, "k4v5", 128, 32, 16, True),
        (90, "k5v6", 128, 32, 16, False), (90, "k3v3", 256, 32, 4, False), (90, "k5v5", 256, 32, 8, True),
        (90, "k3/v3:minifloat", 128, 64, 4, False), (90, "k3v4", 128, 64, 8, False), (90, CUBIC, 64, 64, 4, False),
        (90, CUBIC, 128, 32, 16, True), (90, "k8:cubic/v8:cubic", 128, 32, 16, False), (90, "k2v4", 128, 32, 16, True),
    ],
)  # fmt: skip
def test_compiles_without_spills(capability: int, name: str, dim: int, tile: int, group: int, several: bool) -> None:
    usage = compile_decode(capability, group, dim, name, tile, several)
    print(usage.strip().splitlines()[-1])
    assert "STACK:0" in usage
    assert "LOCAL:0" in usage
    shared = re.search(r"SHARED:(\d+)", usage)  # before Triton's own, which it takes to be aligned
    assert shared is not None
    assert int(shared[1]) % 128 == 0


@pytest.mark.parametrize(
    ("name", "dim", "group", "several"),
    [(CUBIC, 128, 4, False), (MINIFLOAT, 64, 1, False), (CUBIC, 256, 8, True), ("k3v3", 128, 8, True),
     ("k2v2", 128, 2, False), (UNIFORM, 128, 4, False)],
)  # fmt: skip
def test_one_launch_compiles_without_spills(name: str, dim: int, group: int, several: bool) -> None:
    usage = compile_decode(90, group, dim, name, 32 if dim == 256 else 64, several, alone=True)
    print(usage.strip().splitlines()[-1])
    assert "STACK:0" in usage


def instructions(sass: str) -> tuple[list[str], range]:
    """All of them, and where the loop over tiles is: the shortest backward jump over as many products as any."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    where = {int(address, 16): i for i, (address, _) in enumerate(found)}
    code = [text for _, text in found]
    loops = []
    for i, text in enumerate(code):
        jump = re.search(r"BRA(?:\.U)?\s+(?:!?U?P\w+,\s*)?`?\(?0x([0-9a-f]+)", text)
        start = where.get(int(jump[1], 16), i) if jump else i
        if start < i:
            loops.append((-sum("MMA" in x for x in code[start:i]), i - start, range(start, i + 1)))
    return code, min(loops, key=lambda loop: loop[:2])[2]


@pytest.mark.parametrize(
    ("name", "dim", "group", "several"),
    [(CUBIC, 128, 16, True), ("k8v8", 128, 16, False), ("k8v8", 256, 8, True)],
)  # fmt: skip
def test_one_launch_of_many_rows_spills_only_before_the_loop(name: str, dim: int, group: int, several: bool) -> None:
    code, loop = instructions(compile_decode(90, group, dim, name, 32, several, alone=True, show="-sass"))
    spills = [i for i, text in enumerate(code) if re.search(r"\b(STL|LDL)\b", text)]
    assert sum("MMA" in code[i] for i in loop) > 40
    assert sum(i in loop for i in spills) <= (0 if triton.__version__.startswith("3.6.") else 4)  # 3.9: 2 of some 1600


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("several", [False, True])
def test_merge_compiles(together: int, several: bool) -> None:
    across = 4 if together == 1 else 1
    fixed = {
        "GROUP": 8,
        "ROWS": 8,
        "DIM": 128,
        "TILE": 64,
        "SEQS": 32,
        "CLIP": True,
        "WINDOW": several,
        "SINKS": several,
    }
    fixed |= {"SEVERAL": several, "LOGITS": several, "KEY_OFFSET": several, "VALUE_OFFSET": several, "CHUNK": 32}
    fixed |= {"HEADS": together, "ACROSS": across, "KEY_SCALE": not several}
    fixed |= dict.fromkeys(("UNCOMPRESSED", "RECENT"), not several)
    fixed |= {"ALONE": False, "EARLY": True}
    floats = ("pieces", "lses", "lse_out", "sink_logits", "signs", "key_offset", "value_offset", "key_scale")
    types = {
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("lengths", "ends", "starts", *BESIDE), "*i32"),
        **dict.fromkeys(("q", "out", "u_data", "r_data"), "*bf16"),
        **dict.fromkeys(fixed, "constexpr"),
        "bias_scale": "fp32",
    }
    if not several:
        types["first"] = "*i32"  # of each sequence
    options = {"num_warps": max(across, min(4, together)), "launch_pdl": True}
    assert "cubin" in compile_kernel(merge_pieces, types, fixed, 90, options).asm
