"""The emulator of PTX against numpy and Python's integers: what each instruction does, by the manual of PTX."""

from __future__ import annotations

import fractions
import importlib.util
import struct

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tests.helpers.ptx import why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from tests.helpers.ptx.snippets import LANES, lanes

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 1 << 32, (3, LANES), dtype=np.uint32)
WORDS[:, :4] = [[0, 1, 0x80000000, 0xFFFFFFFF], [0xFFFFFFFF, 31, 32, 0], [0, 33, 7, 0x80000000]]


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def prmt(a: int, b: int, c: int) -> int:
    octets, out = (a | b << 32).to_bytes(8, "little"), 0
    for i in range(4):
        pick = c >> 4 * i & 15
        octet = octets[pick & 7]
        out |= (255 * (octet >> 7) if pick & 8 else octet) << 8 * i
    return out


def bfe(a: int, b: int, c: int, sign: bool) -> int:
    at, n = b & 255, c & 255
    if n == 0:
        return 0
    last = min(at + n - 1, 31)
    bits = [a >> i & 1 if i < 32 else (a >> last & 1 if sign else 0) for i in range(at, at + n)][:32]
    bits += [a >> last & 1 if sign else 0] * (32 - len(bits))
    return sum(bit << i for i, bit in enumerate(bits))


def dot(a: int, b: int, c: int) -> int:
    pairs = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    return sum((x - 256 * (x >> 7)) * (y - 256 * (y >> 7)) for x, y in pairs) + c


INTEGERS = {
    "add.s32 d, a, b;": lambda a, b, c: a + b,
    "sub.s32 d, a, b;": lambda a, b, c: a - b,
    "mul.lo.s32 d, a, b;": lambda a, b, c: a * b,
    "mul.hi.s32 d, a, b;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.hi.u32 d, a, b;": lambda a, b, c: a * b >> 32,
    "mad.lo.u32 d, a, b, c;": lambda a, b, c: a * b + c,
    "min.s32 d, a, b;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 d, a, b;": lambda a, b, c: max(a, b),
    "max.relu.s32 d, a, b;": lambda a, b, c: max(signed(a), signed(b), 0),
    "min.relu.s32 d, a, b;": lambda a, b, c: max(min(signed(a), signed(b)), 0),
    "shl.b32 d, a, b;": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 d, a, b;": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 d, a, b;": lambda a, b, c: signed(a) >> min(b, 31),
    "shf.r.wrap.b32 d, a, b, c;": lambda a, b, c: (a | b << 32) >> (c & 31),
    "shf.l.wrap.b32 d, a, b, c;": lambda a, b, c: (a | b << 32) << (c & 31) >> 32,
    "shf.l.clamp.b32 d, a, b, c;": lambda a, b, c: (a | b << 32) << min(c, 32) >> 32,
    "prmt.b32 d, a, b, c;": prmt,
    "bfe.u32 d, a, b, c;": lambda a, b, c: bfe(a, b, c, False),
    "bfe.s32 d, a, b, c;": lambda a, b, c: bfe(a, b, c, True),
    "bfi.b32 d, a, b, 5, 9;": lambda a, b, c: b & ~(511 << 5) | (a & 511) << 5,
    "lop3.b32 d, a, b, c, 0xEA;": lambda a, b, c: a & b | c,
    "lop3.b32 d, a, b, c, 0x96;": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 d, a, b, c, 0xE4;": lambda a, b, c: a & c | b & ~c,
    "add.s16x2 d, a, b;": lambda a, b, c: (a + b) % 65536 | ((a >> 16) + (b >> 16)) % 65536 << 16,
    "popc.b32 d, a;": lambda a, b, c: bin(a).count("1"),
    "clz.b32 d, a;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 d, a;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "dp4a.s32.s32 d, a, b, c;": dot,
    "cvt.s32.s8 d, a;": lambda a, b, c: (a & 255) - (256 if a & 128 else 0),
    "cvt.u32.u16 d, a;": lambda a, b, c: a & 65535,
    "not.b32 d, a;": lambda a, b, c: ~a,
    "{ .reg .b16 l, h; mov.b32 {l, h}, a; mov.b32 d, {h, l}; }": lambda a, b, c: a >> 16 | a << 16,
    "{ .reg .b64 x; mul.wide.s32 x, a, b; shr.u64 x, x, 32; cvt.u32.u64 d, x; }":
        lambda a, b, c: signed(a) * signed(b) >> 32,
    "{ .reg .b64 x, y; mul.wide.u32 x, a, b; cvt.s64.s32 y, x; shr.s64 y, y, 32; cvt.u32.u64 d, y; }":
        lambda a, b, c: -(a * b >> 31 & 1),
    "{ .reg .b64 x; mul.wide.u32 x, a, b; cvt.u32.u16 d, x; }": lambda a, b, c: a * b & 65535,
    "{ .reg .pred p; setp.lt.s32 p, a, b; selp.b32 d, b, c, p; }": lambda a, b, c: b if signed(a) < signed(b) else c,
    "{ .reg .pred p, q; setp.gt.u32 p|q, a, b; @p mov.b32 d, a; @q mov.b32 d, c; }": lambda a, b, c: a if a > b else c,
}  # fmt: skip


@pytest.mark.parametrize("assembly", INTEGERS)
def test_integers(assembly: str) -> None:
    a, b, c = (list(map(int, row)) for row in WORDS)
    made = lanes(assembly, {"a": WORDS[0], "b": WORDS[1], "c": WORDS[2]}, ["d"])["d"]
    wanted = [INTEGERS[assembly](*each) % (1 << 32) for each in zip(a, b, c, strict=True)]
    assert made.tolist() == wanted


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def nearest(x: fractions.Fraction) -> float:
    """To float32, by the neighbours of a float64 that is near."""
    guess = np.float32(float(x))
    near = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda y: (abs(fractions.Fraction(float(y)) - x), int(np.float32(y).view(np.uint32)) & 1))


def test_fma_rounds_once() -> None:
    """Also where the product needs more than 53 bits with the summand."""
    a = (1 + RANDOM.integers(0, 1 << 23, LANES) * 2.0**-23).astype(np.float32)
    b = (1 + RANDOM.integers(0, 1 << 23, LANES) * 2.0**-23).astype(np.float32)
    c = (RANDOM.standard_normal(LANES) * 2.0 ** RANDOM.integers(-40, 40, LANES)).astype(np.float32)
    made = floats(
        lanes("fma.rn.f32 d, a, b, c;", {n: x.view(np.uint32) for n, x in zip("abc", (a, b, c), strict=True)}, ["d"])[
            "d"
        ]
    )
    for x, y, z, got in zip(a, b, c, made, strict=True):
        exact = fractions.Fraction(float(x)) * fractions.Fraction(float(y)) + fractions.Fraction(float(z))
        assert got == nearest(exact)


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_float32(name: str) -> None:
    a, b = RANDOM.standard_normal((2, LANES)).astype(np.float32)
    a[:6], b[:6] = [np.inf, -np.inf, np.nan, 1e-42, 3e38, -0.0], [np.inf, 1, 1, 1e-42, 3e38, 0.0]
    with np.errstate(all="ignore"):
        wanted = {"add": a + b, "sub": a - b, "mul": a * b}[name]
    given = {"a": a.view(np.uint32), "b": b.view(np.uint32)}
    np.testing.assert_array_equal(floats(lanes(f"{name}.f32 d, a, b;", given, ["d"])["d"]), wanted)
    flushed = floats(lanes(f"{name}.ftz.f32 d, a, b;", given, ["d"])["d"])
    assert flushed[3] == 0
    np.testing.assert_array_equal(np.delete(flushed, 3), np.delete(wanted, 3))


@pytest.mark.parametrize("name", ["add.f16x2 d, a, b;", "mul.f16x2 d, a, b;", "fma.rn.f16x2 d, a, b, c;"])
def test_float16(name: str) -> None:
    x = (RANDOM.standard_normal((3, 2 * LANES)) * 2.0 ** RANDOM.integers(-12, 9, (3, 2 * LANES))).astype(np.float16)
    given = {n: row.view(np.uint32) for n, row in zip("abc", x, strict=True)}
    a, b, c = x.astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = (a + b if name.startswith("add") else a * b if name.startswith("mul") else a * b + c).astype(
            np.float16
        )
    np.testing.assert_array_equal(lanes(name, given, ["d"])["d"].view(np.float16), wanted)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_pairs_of_float32(name: str) -> None:
    """They round each half as the operation on one number does, also where they write what they read."""
    registers = {"a": ("a", "b"), "x": ("c", "d"), "y": ("e", "f")}
    given = {n: RANDOM.standard_normal(LANES).astype(np.float32).view(np.uint32) for n in "abcdef"}
    read = list(registers)[: 3 if name == "fma" else 2]
    rounding = ".rn" if name == "fma" else ""
    packed = "".join(f"mov.b64 p{x}, {{{low}, {high}}};" for x, (low, high) in registers.items())
    both = f"{{ .reg .b64 pa, px, py; {packed} {name}{rounding}.f32x2 pa, {', '.join('p' + x for x in read)};"
    got = lanes(f"{both} mov.b64 {{g, h}}, pa; }}", given, ["g", "h"])
    for half, out in enumerate("gh"):
        one = lanes(f"{name}{rounding}.f32 g, {', '.join(registers[x][half] for x in read)};", given, ["g"])["g"]
        np.testing.assert_array_equal(got[out], one)


def test_jumps_over_statements_of_several_instructions() -> None:
    given = {n: RANDOM.standard_normal(LANES).astype(np.float32).view(np.uint32) for n in "ab"}
    got = lanes(
        "{ .reg .b64 pa; mov.b64 pa, {a, b}; add.f32x2 pa, pa, pa; mov.u32 d, 1; bra done; mov.u32 d, 2;"
        " add.f32x2 pa, pa, pa; done: mov.b64 {e, f}, pa; }",
        given, ["d", "e", "f"],
    )  # fmt: skip
    assert (got["d"] == 1).all()
    np.testing.assert_array_equal(floats(got["e"]), 2 * floats(given["a"]))
    np.testing.assert_array_equal(floats(got["f"]), 2 * floats(given["b"]))


def test_largest_and_smallest() -> None:
    a = np.array([1, np.nan, np.nan, -0.0, 0.0, -np.inf, 5, -7], np.float32)
    b = np.array([2, 3, np.nan, 0.0, -0.0, np.nan, -6, 2], np.float32)
    given = {"a": np.tile(a, 4).view(np.uint32), "b": np.tile(b, 4).view(np.uint32)}

    def of(assembly: str) -> np.ndarray:
        return floats(lanes(assembly, given, ["d"])["d"])[:8]

    np.testing.assert_array_equal(of("max.f32 d, a, b;"), [2, 3, np.nan, 0, 0, -np.inf, 5, 2])
    np.testing.assert_array_equal(np.signbit(of("min.f32 d, a, b;")[3:5]), [True, True])
    np.testing.assert_array_equal(of("max.NaN.f32 d, a, b;"), [2, np.nan, np.nan, 0, 0, np.nan, 5, 2])
    np.testing.assert_array_equal(of("min.xorsign.abs.f32 d, a, b;")[[0, 6, 7]], [1, -5, -2])
    for how, wanted in (
        ("lt", 0b10000001),
        ("ltu", 0b10100111),
        ("equ", 0b00111110),
        ("num", 0b11011001),
        ("ne", 0b11000001),
    ):
        got = lanes(f"{{ .reg .pred p; setp.{how}.f32 p, a, b; selp.b32 d, 1, 0, p; }}", given, ["d"])["d"][:8]
        assert got.tolist() == [wanted >> i & 1 for i in range(8)], how


def test_conversions() -> None:
    x = (RANDOM.standard_normal(LANES) * 2.0 ** RANDOM.integers(-20, 20, LANES)).astype(np.float32)
    x[:8] = [np.nan, np.inf, 3e9, -3e9, 2.5, 3.5, -2.5, 65519.0]
    given = {"a": x.view(np.uint32), "b": np.roll(x, 1).view(np.uint32)}

    def of(assembly: str) -> np.ndarray:
        return lanes(assembly, given, ["d"])["d"]

    with np.errstate(all="ignore"):
        pairs = np.stack([np.roll(x, 1), x], 1).astype(np.float16)  # the second operand is the lower half
    np.testing.assert_array_equal(of("cvt.rn.f16x2.f32 d, a, b;").view(np.float16).reshape(LANES, 2), pairs)
    clipped = np.clip(np.nan_to_num(x.astype(np.float64), nan=0, posinf=1e30, neginf=-1e30), -(2**31), 2**31 - 1)
    assert of("cvt.rzi.s32.f32 d, a;").view(np.int32).tolist() == np.trunc(clipped).astype(np.int64).tolist()
    assert of("cvt.rni.s32.f32 d, a;").view(np.int32).tolist() == np.rint(clipped).astype(np.int64).tolist()
    np.testing.assert_array_equal(floats(of("cvt.rni.f32.f32 d, a;")), np.rint(x))
    exact = floats(of("{ .reg .b16 h; cvt.rn.bf16.f32 h, a; cvt.f32.bf16 d, h; }"))
    np.testing.assert_array_equal(exact, torch.from_numpy(x).bfloat16().float().numpy())
    tf32 = floats(of("cvt.rna.tf32.f32 d, a;"))
    assert (np.abs(tf32[4:] - x[4:]) <= np.abs(x[4:]) * 2.0**-11).all()
    truncated = of("{ .reg .b16 h; cvt.rz.f16.f32 h, a; cvt.u32.u16 d, h; }").astype(np.uint16).view(np.float16)
    assert (np.abs(truncated[4:].astype(np.float64)) <= np.abs(x[4:])).all()
    assert np.isfinite(truncated[2:]).all()
    integers = np.array([2**31 - 1, -(2**31), 16777217, -5] * 8, np.int32)
    made = lanes("cvt.rn.f32.s32 d, a;", {"a": integers.view(np.uint32)}, ["d"])["d"]
    np.testing.assert_array_equal(floats(made), integers.astype(np.float32))


def test_functions() -> None:
    x = np.abs(RANDOM.standard_normal(LANES)).astype(np.float32) + np.float32(0.1)
    given = {"a": x.view(np.uint32)}
    wide = x.astype(np.float64)
    functions = {"ex2": 2**wide, "lg2": np.log2(wide), "rcp": 1 / wide, "sqrt": wide**0.5, "rsqrt": wide**-0.5}
    functions |= {"tanh": np.tanh(wide)}
    for function, wanted in functions.items():
        name = f"{function}.approx" + ("" if function == "tanh" else ".ftz")
        made = floats(lanes(f"{name}.f32 d, a;", given, ["d"])["d"])
        np.testing.assert_allclose(made, wanted, rtol=2e-7, atol=1e-7)


def test_lanes_part_and_meet() -> None:
    """Each lane goes round a loop as often as its number says, then all exchange what they have."""
    assembly = """
    { .reg .pred p; .reg .b32 n; mov.b32 n, 0; mov.b32 d, 0;
    again: setp.ge.u32 p, n, %lane; @p bra done;
    add.u32 n, n, 1; add.u32 d, d, n; bra again;
    done: shfl.sync.bfly.b32 d, d, 1, 31, -1; }"""
    wanted = [(lane ^ 1) * ((lane ^ 1) + 1) // 2 for lane in range(LANES)]
    assert lanes(assembly, {}, ["d"])["d"].tolist() == wanted


def test_lanes_of_a_branch_meet_where_they_say() -> None:
    """A shuffle in one side of a branch, among the lanes that are there; the others come later."""
    assembly = """
    { .reg .pred p; mov.b32 d, %lane; setp.lt.u32 p, %lane, 16; @!p bra other;
    shfl.sync.idx.b32 d, d, 3, 31, 0xffff; bra both;
    other: shfl.sync.idx.b32 d, d, 20, 31, 0xffff0000;
    both: bar.warp.sync -1; }"""
    assert lanes(assembly, {}, ["d"])["d"].tolist() == [3] * 16 + [20] * 16


@pytest.mark.parametrize(
    ("assembly", "wanted"),
    [
        ("shfl.sync.up.b32 d, a, 3, 0, -1;", [max(i, 0) if i >= 0 else i + 3 for i in range(-3, 29)]),
        ("shfl.sync.down.b32 d, a, 5, 31, -1;", [i + 5 if i + 5 < 32 else i for i in range(32)]),
        ("shfl.sync.bfly.b32 d, a, 20, 31, -1;", [i ^ 20 for i in range(32)]),
        ("shfl.sync.idx.b32 d, a, 9, 0x181f, -1;", [i // 8 * 8 + 1 for i in range(32)]),
        ("redux.sync.add.s32 d, a, -1;", [496] * 32),
        ("redux.sync.max.s32 d, a, -1;", [31] * 32),
        ("{ .reg .pred p; setp.gt.u32 p, a, 20; vote.sync.ballot.b32 d, p, -1; }", [0xFFE00000] * 32),
        ("{ .reg .pred p; setp.gt.u32 p, a, 30; vote.sync.any.pred p, p, -1; selp.b32 d, 1, 0, p; }", [1] * 32),
        ("{ .reg .pred p; setp.gt.u32 p, a, 0; vote.sync.all.pred p, p, -1; selp.b32 d, 1, 0, p; }", [0] * 32),
        ("{ .reg .pred p; elect.sync _|p, -1; selp.b32 d, 1, 0, p; }", [1] + [0] * 31),
        ("{ .reg .b32 h; shr.u32 h, a, 3; match.any.sync.b32 d, h, -1; }", [0xFF << i // 8 * 8 for i in range(32)]),
    ],
)  # fmt: skip
def test_together(assembly: str, wanted: list[int]) -> None:
    assert lanes(assembly, {"a": np.arange(LANES, dtype=np.uint32)}, ["d"])["d"].tolist() == wanted


def test_matrices() -> None:
    """ldmatrix of four matrices of 8 x 8, plain and transposed; movmatrix; stmatrix puts them back."""
    matrices = RANDOM.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    rows = {"at": np.arange(LANES, dtype=np.uint32) * 16}
    names = ["w", "x", "y", "z"]
    for flag, wanted in (("", matrices), (".trans", matrices.transpose(0, 2, 1))):
        load = f"add.u32 at, at, {1024}; ldmatrix.sync.aligned.m8n8.x4{flag}.shared.b16 {{w, x, y, z}}, [at];"
        made = lanes(load, rows, names, matrices.tobytes())
        for i, name in enumerate(names):
            assert np.array_equal(made[name].view(np.uint16).reshape(8, 8), wanted[i])
    one = np.ascontiguousarray(matrices[0]).view(np.uint32).ravel()
    moved = lanes("movmatrix.sync.aligned.m8n8.trans.b16 d, a;", {"a": one}, ["d"])["d"]
    assert np.array_equal(moved.view(np.uint16).reshape(8, 8), matrices[0].T)
    back = (
        f"add.u32 at, at, 1024; and.b32 at, at, {1024 + 127}; bar.warp.sync -1; "
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [at], {a}; mad.lo.u32 at, %lane, 4, 1024; ld.shared.b32 d, [at];"
    )
    assert np.array_equal(lanes(back, {**rows, "a": one}, ["d"], bytes(512))["d"], one)


def fragments(matrix: np.ndarray, each: int) -> list[np.ndarray]:
    """Registers of lanes 4g + c: `each` neighbours from each · c on, of row g and, of 16, g + 8; then the next half
    of k."""
    found = []
    k = matrix.shape[1]
    for half in range(k // (4 * each)):
        for block in range(matrix.shape[0] // 8):
            words = np.zeros((LANES, each), matrix.dtype)
            for lane in range(LANES):
                begin = 4 * each * half + each * (lane % 4)
                words[lane] = matrix[8 * block + lane // 4, begin : begin + each]
            found.append(words.view(np.uint32).ravel())
    return found


@pytest.mark.parametrize(
    ("name", "kind", "k"),
    [("m16n8k16.row.col.f32.f16.f16.f32", np.float16, 16), ("m16n8k8.row.col.f32.f16.f16.f32", np.float16, 8),
     ("m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, 8), ("m16n8k32.row.col.satfinite.s32.s8.s8.s32", np.int8, 32),
     ("m16n8k16.row.col.f32.bf16.bf16.f32", np.uint16, 16)],
)  # fmt: skip
def test_products(name: str, kind: type, k: int) -> None:
    a, b, c = RANDOM.integers(-9, 9, (16, k)), RANDOM.integers(-9, 9, (8, k)), RANDOM.integers(-99, 99, (16, 8))
    wanted = a @ b.T + c

    def stored(x: np.ndarray) -> np.ndarray:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if kind == np.uint16 else x.astype(kind)

    each = 4 // np.dtype(kind).itemsize
    left, right = fragments(stored(a), each), fragments(stored(b), each)
    sums = np.int32 if kind == np.int8 else np.float32
    start = [
        np.array([c[8 * (r // 2) + lane // 4, 2 * (lane % 4) + r % 2] for lane in range(LANES)]).astype(sums)
        for r in range(4)
    ]
    given = {f"a{i}": x for i, x in enumerate(left)} | {f"b{i}": x for i, x in enumerate(right)}
    given |= {f"c{i}": x.view(np.uint32) for i, x in enumerate(start)}

    def vector(letter: str, count: int) -> str:
        return "{" + ", ".join(f"{letter}{i}" for i in range(count)) + "}"

    operands = [vector("c", 4), vector("a", len(left)), vector("b", len(right)), vector("c", 4)]
    assembly = f"mma.sync.aligned.{name} {', '.join(operands)};"
    made = lanes(assembly, given, ["c0", "c1", "c2", "c3"])
    for r in range(4):
        got = made[f"c{r}"].view(sums)
        assert [wanted[8 * (r // 2) + lane // 4, 2 * (lane % 4) + r % 2] for lane in range(LANES)] == got.tolist()


def test_doubles_of_constants() -> None:
    """Immediates of floats, as LLVM and as people write them."""
    (one,) = struct.unpack("<I", struct.pack("<f", 1.5))
    assert lanes("mov.f32 d, 0f3FC00000;", {}, ["d"])["d"][0] == one
    assert lanes("add.f32 d, a, 1.5;", {"a": np.zeros(LANES, np.uint32)}, ["d"])["d"][0] == one
