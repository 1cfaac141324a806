"""The assembly that turns codes into levels, on the emulator for 32 lanes, against the tables of levels."""

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

from tests.helpers.ptx import why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from aurakv.backends.triton.common import specialise
from aurakv.backends.triton.decode import codes as decode_codes
from aurakv.backends.triton.decode import levels as decode_levels
from aurakv.backends.triton.decode import pieces, tables
from aurakv.backends.triton.extend import codes as extend_decode
from tests.helpers.ptx.program import SHARED_BEGIN
from tests.helpers.ptx.snippets import LANES, lanes

Words = np.ndarray  # uint32, one of each lane


def halves(word: Words) -> np.ndarray:
    """The float16 numbers of each lane's register: [lanes, 2]."""
    return word.view(np.float16).reshape(LANES, 2)


def run(assembly: str, given: dict[str, int | Words], memory: bytes = b"") -> dict[str, Words]:
    """Registers of all lanes after the assembly."""
    wanted = sorted(set(re.findall(r"\$\d+", assembly)) - set(given))
    return lanes(assembly, given, wanted, memory)


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
    made = run(rows[bits - 5], {"$16": at + SHARED_BEGIN, "$18": c["b"], "$20": c["c"], "$22": c["d"]}, memory)
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
    made = run(decode_codes._VALUE_CUBIC3.value, {"$16": at + SHARED_BEGIN, "$18": c["b"]}, memory)
    for i in range(16):
        wanted = np.array([format.value.levels[n] for n in tokens_of(codes, i).ravel()])
        found = halves(made[f"${i}"]).ravel().astype(np.float64) * levels.value.step
        assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max(), i


def test_minifloat_of_3_bits() -> None:
    format = Format.parse("k3/v3:minifloat", 128)
    codes, memory, at = octet(3)
    made = run(decode_codes._VALUE_MINIFLOAT3.value, {"$16": at + SHARED_BEGIN}, memory)
    for i in range(16):
        wanted = [decode_levels.minifloat(n, 3) for n in tokens_of(codes, i).ravel()]
        assert halves(made[f"${i}"]).ravel().tolist() == wanted, (i, format)


def test_keys_of_3_bits() -> None:
    """Registers 2r and 2r + 1 have the levels of codes 4k + r, k in the order 0 3 6 1 and 4 7 2 5."""
    format = Format.parse("k3v3", 128)
    levels = decode_levels.levels(format)
    assert levels is not None
    codes, memory, at = octet(3)
    given = {"$8": at + SHARED_BEGIN, "$16": levels.key.words[0], "$24": levels.key.words[1]}
    made = run(decode_codes._KEY3.value, given, memory)
    mine = codes.reshape(LANES, 32)
    for r in range(4):
        for j, order in enumerate(((0, 3, 6, 1), (4, 7, 2, 5))):
            octets = made[f"${2 * r + j}"].view(np.int8).reshape(LANES, 4)
            wanted = np.array(format.key.levels)[mine[:, [4 * k + r for k in order]]]
            assert np.allclose(octets * levels.key.step, wanted, rtol=1e-6)


def piece_of(dim: int, n: int, bits: int) -> tuple[np.ndarray, bytes, Words]:
    """Codes [8 tokens, codes of a piece], where none is there −1; the bytes of their rows and some behind them; where
    each lane has its codes."""
    piece = pieces.cut(dim)[n]
    random = np.random.default_rng(dim + bits)
    codes = random.integers(0, 1 << bits, (8, dim))
    memory = pack(torch.from_numpy(codes), bits).numpy().tobytes() + random.bytes(128)
    mine = np.full((8, 4 * piece.codes), -1)
    mine[:, : dim - piece.start] = codes[:, piece.start : piece.start + 4 * piece.codes]
    lane = np.arange(LANES)
    at = lane // 4 * (dim * bits // 8) + (piece.start + lane % 4 * piece.codes) * bits // 8
    return mine, memory + bytes(-len(memory) % 4), (at + SHARED_BEGIN).astype(np.uint32)


@pytest.mark.parametrize(("dim", "n", "bits"), sorted({key[:3] for key in pieces._ALL.value}))
def test_pieces(dim: int, n: int, bits: int) -> None:
    """Every assembly of `pieces`: keys as bytes, or pairs of codes i and i + half of a lane; values as pairs of tokens
    2c and 2c + 1, of the g-th of eight runs of codes of the piece."""
    codes, memory, at = piece_of(dim, n, bits)
    lane, half = codes.shape[1] // 4, codes.shape[1] // 8
    numbers = np.arange(1, 1 + (1 << bits)) if bits <= 4 else None
    for (*shape, kind, turned), assembly in pieces._ALL.value.items():
        if shape != [dim, n, bits]:
            continue
        if kind == decode_levels.INTEGER:  # at 4 bits the upper eight are another table, whose registers are added
            words = numbers.astype(np.uint8).view(np.uint32)
            first = lane // 4 * (2 if bits == 4 else 1)
            made = run(
                assembly, {f"${first}": at} | {f"${first + 8 * (i + 1)}": int(w) for i, w in enumerate(words)}, memory
            )
            found = np.stack([made[f"${i}"].view(np.uint8).reshape(LANES, 4) for i in range(lane // 4)], 1)
            if bits == 4:
                found += np.stack(
                    [made[f"${i + lane // 4}"].view(np.uint8).reshape(LANES, 4) for i in range(lane // 4)], 1
                )
            mine = codes.reshape(LANES, lane)
            assert (found.reshape(LANES, lane) == mine + 1)[mine >= 0].all()
            continue
        name = {decode_levels.CUBIC: "cubic", decode_levels.TABLE: "lloyd-max", decode_levels.POLY7: "poly7"}[kind]
        levels, _ = words_of(Format.parse(f"k4/v{bits}:{name}", dim))
        assert levels.value.kind == kind
        words = [word for i, word in enumerate([*levels.value.words, *[0] * 8][:8]) if pieces.needs(i, kind, bits)]
        made = run(assembly, {f"${half}": at} | {f"${half + 2 * (i + 1)}": w for i, w in enumerate(words)}, memory)
        found = np.stack([halves(made[f"${i}"]) for i in range(half)], 1).astype(np.float64) * levels.value.step
        if turned:
            mine = np.array([[[codes[2 * (i % 4) + e, i // 4 * half + m] for e in range(2)] for m in range(half)]
                             for i in range(LANES)])  # fmt: skip
        else:
            mine = codes.reshape(LANES, 2, half).transpose(0, 2, 1)
        table = np.array(Format.parse(f"k4/v{bits}:{name}", dim).value.levels)
        assert np.abs(found - table[mine])[mine >= 0].max() <= 1e-3 * table.max()


@pytest.mark.parametrize("bits", [2, 4])
def test_tables_of_units(bits: int) -> None:
    """Lookups of what `ldmatrix` reads: a unit of a token and the same of the next one."""
    format = Format.parse(f"k4/v{bits}:{[round(0.3 * i * i - 2, 2) for i in range(1 << bits)]}".replace(" ", ""), 128)
    levels, _ = words_of(format)
    units = np.random.default_rng(0).integers(0, 1 << 16, (LANES, 2)).astype(np.uint16)
    count = 16 // bits
    words = levels.value.words if bits == 4 else (levels.value.words[0], levels.value.words[4])
    assembly = (tables._UNITS4 if bits == 4 else tables._UNITS2).value
    given = {f"${count + 1 + 2 * i}": w for i, w in enumerate(words)}
    made = run(assembly, {f"${count}": units.view(np.uint32).ravel()} | given)
    for i in range(count):
        wanted = np.array(format.value.levels)[units >> bits * i & (1 << bits) - 1]
        assert np.abs(halves(made[f"${i}"]) * levels.value.step - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("table", ["lloyd-max", str([round(0.3 * i * i - 9, 2) for i in range(16)]).replace(" ", "")])
def test_keys_of_any_table_add_up(table: str) -> None:
    """Two tables of bytes give the upper, two the lower part of a level; each pair, as in `codes`, by a sum."""
    format = Format.parse(f"k4:{table}/v4", 128)
    levels, _ = words_of(format)
    assert levels.key.kind == decode_levels.TABLE
    total = np.zeros(16)
    for factor, words in ((256, levels.key.words[:4]), (1, levels.key.words[4:])):
        stored = np.array(words, np.uint32).view(np.int8).astype(int)
        for code in range(16):  # PRMT copies the sign of a byte of the other eight
            other = stored[(code + 8) % 16]
            total[code] += factor * (stored[code] + (-1 if other < 0 else 0))
    assert np.abs(total * levels.key.step - np.array(format.key.levels)).max() <= 6e-5 * np.abs(format.key.levels).max()
