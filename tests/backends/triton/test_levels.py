"""The assembly that turns codes into levels, run here for 32 lanes, against the specialise."""

from __future__ import annotations

import importlib.util
import re

import numpy as np
import pytest
import torch

from aurakv.format import levels as level_tables
from aurakv.format.codec import Format
from aurakv.format.packing import pack

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from aurakv.backends.triton.common import specialise
from aurakv.backends.triton.decode import codes as decode_codes
from aurakv.backends.triton.decode import levels as decode_levels
from aurakv.backends.triton.extend import codes as extend_decode

LANES = 32
Words = np.ndarray  # uint32, one of each lane


def halves(word: Words) -> np.ndarray:
    """The float16 numbers of each lane's register: [lanes, 2]."""
    return word.view(np.float16).reshape(LANES, 2)


def run(assembly: str, given: dict[str, int | Words], memory: bytes = b"") -> dict[str, Words]:
    """Registers of all lanes after the assembly."""
    known = {name: np.full(LANES, x, np.uint32) if isinstance(x, int) else x for name, x in given.items()}
    words = np.frombuffer(memory, np.uint32)

    def value(name: str) -> Words:
        return known[name] if name in known else np.full(LANES, int(name, 0), np.uint32)

    def arithmetic(name: str, a: Words, b: Words, *c: Words) -> Words:
        exact = halves(a).astype(np.float64) * halves(b) + (halves(c[0]) if c else 0)  # exact in float64
        return exact.astype(np.float16).view(np.uint32).ravel()

    def prmt(a: Words, b: Words, picks: Words) -> Words:
        octets = np.stack([a, b], 1).view(np.uint8)  # [lanes, 8]
        found = np.zeros((LANES, 4), np.uint8)
        for i in range(4):
            pick = picks >> 4 * i & 15
            one = octets[np.arange(LANES), pick & 7]
            found[:, i] = np.where(pick & 8, (one >> 7) * 255, one)
        return found.view(np.uint32).ravel()

    def transposed(a: Words) -> Words:
        matrix = a.view(np.uint16).reshape(8, 8)  # lane 4g + c has columns 2c and 2c + 1 of row g
        return np.ascontiguousarray(matrix.T).view(np.uint32).ravel()

    for statement in filter(None, (x.strip() for x in assembly.strip("{}\n").replace("\n", " ").split(";"))):
        name, rest = statement.split(None, 1)
        if name == ".reg":
            continue
        if name.startswith("ld.shared"):
            to, address, offset = re.fullmatch(r"\{?([\w, ]+)\}?, \[(\S+)\+(\d+)\]", rest).groups()
            at = value(address) + np.uint32(offset)
            assert not (at % (4 * len(to.split(",")))).any(), "a load that is not aligned"
            for i, register in enumerate(to.split(",")):
                known[register.strip()] = words[at // 4 + i]
            continue
        to, *operands = (x.strip() for x in rest.split(","))
        a, *others = map(value, operands)
        kind = name.split(".")[0]
        if kind == "mov":
            known[to] = a
        elif kind == "shl":
            known[to] = a << others[0]
        elif kind == "shr":
            known[to] = a >> others[0]
        elif kind == "and":
            known[to] = a & others[0]
        elif kind == "shf":  # right, of one word
            known[to] = a >> others[1] % 32 | a << (32 - others[1] % 32) % 32
        elif kind == "lop3":
            assert (others[2] == 0xEA).all()
            known[to] = a & others[0] | others[1]
        elif kind == "prmt":
            known[to] = prmt(a, *others)
        elif kind == "movmatrix":
            known[to] = transposed(a)
        else:
            assert name in ("mul.rn.f16x2", "fma.rn.f16x2"), name
            known[to] = arithmetic(name, a, *others)
    return known


def words_of(format: Format) -> tuple[decode_levels.Levels, dict[str, int]]:
    levels = decode_levels.levels(format)
    assert levels is not None
    return levels, dict(zip("bcd", levels.value.words, strict=False))


def same(made: np.ndarray, step: float, levels: list[float]) -> bool:
    return np.array_equal(np.float32(made.astype(np.float64) * step), np.float32(levels))


def test_poly7_of_8_bits() -> None:
    """The assembly makes exactly the table's levels but for their step."""
    format = Format.parse("k8v8", 128)
    levels, c = words_of(format)
    codes = np.arange(256, dtype=np.uint8)
    for some in codes.reshape(2, LANES, 4):
        made = run(decode_codes._POLY7_OF_8.value, {"$2": some.copy().view(np.uint32).ravel()} |
                   {"$3": c["b"], "$5": c["c"], "$7": c["d"]})  # fmt: skip
        for i in range(2):  # code i of both units
            wanted = [format.key.levels[n] for n in some[:, i::2].ravel()]
            assert same(halves(made[f"${i}"]).ravel(), levels.key.step, wanted)


def octet(bits: int, seed: int = 0) -> tuple[np.ndarray, bytes, Words]:
    """Codes [8 tokens, 128], their bytes, and where each lane has its 32 of them."""
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (8, 128))
    codes[0], codes[1] = np.arange(128) % (1 << bits), (127 - np.arange(128)) % (1 << bits)
    memory = pack(torch.from_numpy(codes), bits).numpy().tobytes()
    return codes, memory, np.arange(LANES, dtype=np.uint32) * 4 * bits


def tokens_of(codes: np.ndarray, i: int) -> np.ndarray:
    """Codes of coordinate 16g + i of tokens 2c and 2c + 1, for lane 4g + c: [lanes, 2]."""
    return np.stack([[codes[2 * (lane % 4) + e, 16 * (lane // 4) + i] for e in range(2)] for lane in range(LANES)])


@pytest.mark.parametrize("bits", [5, 6])
@pytest.mark.parametrize("rows", [decode_codes._KEY_ROWS.value, decode_codes._VALUE_ROWS.value], ids=["keys", "values"])
def test_poly7_of_flat_rows(bits: int, rows: tuple[str, str]) -> None:
    """Lane 4g + c: of keys codes i and i + 16 of the 32 from 32c on of token g, values as in `tokens_of`."""
    format = Format.parse(f"k{bits}v{bits}", 128)
    levels, c = words_of(format)
    codes, memory, at = octet(bits)
    made = run(rows[bits - 5], {"$16": at, "$18": c["b"], "$20": c["c"], "$22": c["d"]}, memory)
    for i in range(16):
        mine = codes.reshape(LANES, 2, 16)[:, :, i] if rows is decode_codes._KEY_ROWS.value else tokens_of(codes, i)
        wanted = [format.key.levels[n] for n in mine.ravel()]
        assert same(halves(made[f"${i}"]).ravel(), levels.key.step, wanted), i


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_wide_codes_of_many_queries(bits: int) -> None:
    """What the extend kernel makes of 32 codes of a row, in the order that `specialise.coordinates` says."""
    format = Format.parse(f"k{bits}v{bits}", 128)
    levels, _ = words_of(format)
    codes, memory, at = octet(bits)
    words = np.frombuffer(memory, np.uint32)
    given = {f"${16 + i}": words[at // 4 + i] for i in range(bits)}
    numbers = level_tables.POLY7[bits][1:]
    order = specialise.coordinates(32, "bytes" if bits == 8 else "halves").numpy()
    mine = codes.reshape(LANES, 32)[:, order].reshape(LANES, 16, 2)
    plain = run(extend_decode.wide_asm(bits, numbers, False), given)
    half = {f"${16 + bits}": int(np.array([0.5, 0.5], np.float16).view(np.uint32)[0])}
    scaled = run(extend_decode.wide_asm(bits, numbers, True), given | half)
    for i in range(16):
        wanted = [format.key.levels[n] for n in mine[:, i].ravel()]
        assert same(halves(plain[f"${i}"]).ravel(), levels.key.step, wanted), i
        assert same(2 * halves(scaled[f"${i}"]).ravel(), levels.key.step, wanted), i


def test_cubic_of_3_bits() -> None:
    format = Format.parse("k3v3", 128)
    levels, c = words_of(format)
    codes, memory, at = octet(3)
    made = run(decode_codes._VALUE_CUBIC3.value, {"$16": at, "$18": c["b"]}, memory)
    for i in range(16):
        wanted = np.array([format.value.levels[n] for n in tokens_of(codes, i).ravel()])
        found = halves(made[f"${i}"]).ravel().astype(np.float64) * levels.value.step
        assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max(), i


def test_minifloat_of_3_bits() -> None:
    format = Format.parse("k3/v3:minifloat", 128)
    codes, memory, at = octet(3)
    made = run(decode_codes._VALUE_MINIFLOAT3.value, {"$16": at}, memory)
    for i in range(16):
        wanted = [decode_levels.minifloat(n, 3) for n in tokens_of(codes, i).ravel()]
        assert halves(made[f"${i}"]).ravel().tolist() == wanted, (i, format)


def test_keys_of_3_bits() -> None:
    """Registers 2r and 2r + 1 have the levels of codes 4k + r, k in the order 0 3 6 1 and 4 7 2 5."""
    format = Format.parse("k3v3", 128)
    levels = decode_levels.levels(format)
    assert levels is not None
    codes, memory, at = octet(3)
    made = run(decode_codes._KEY3.value, {"$8": at, "$16": levels.key.words[0], "$24": levels.key.words[1]}, memory)
    mine = codes.reshape(LANES, 32)
    for r in range(4):
        for j, order in enumerate(((0, 3, 6, 1), (4, 7, 2, 5))):
            octets = made[f"${2 * r + j}"].view(np.int8).reshape(LANES, 4)
            wanted = np.array(format.key.levels)[mine[:, [4 * k + r for k in order]]]
            assert np.allclose(octets * levels.key.step, wanted, rtol=1e-6)
