"""Where lanes read codes in shared memory, and copy them to without TMA: the assembly, run here for each lane, against
TMA's order and layouts."""

from __future__ import annotations

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from aurakv.backends.triton.decode import lane_copies, layouts, reads

BASE = 5 * 1024
OPERATIONS = {
    "mov": lambda a: a,
    "bfe": lambda a, start, count: a >> start & (1 << count) - 1,
    "mad": lambda a, b, c: a * b + c,
    "shr": lambda a, b: a >> b,
    "lop3": lambda a, b, c, table: {0x6A: a & b ^ c, 0x96: a ^ b ^ c}[table],
    "shl": lambda a, b: a << b,
    "cvt": lambda a: a,
    "sub": lambda a, b: a - b,
    "max": max,
    "xor": lambda a, b: a ^ b,
    "add": lambda a, b: a + b,
}


def left_by_tma(row: int, unit: int, units: int) -> int:
    """The address of 16 bits of a box with lines of 128 bytes, whose 16-byte pieces are exchanged by the line."""
    line, byte = divmod(2 * (row * units + unit), 128)
    return BASE + 128 * line + 16 * (byte // 16 ^ line % 8) + byte % 16


def addresses(assembly: str, lane: int) -> list[tuple[list[int], int]]:
    """(numbers of registers, address) of each load."""
    known, loads = {"%laneid": lane}, []

    def value(name: str) -> int:
        return BASE if name.startswith("$") else known[name] if name in known else int(name, 0)

    for line in assembly.removeprefix("{").removesuffix("}").splitlines():
        found = re.fullmatch(r"(?:ld|ldmatrix)[.\w:]+ \{(.*)\}, \[(\w+)\+(\d+)\];", line.strip())
        if found:
            loads.append(([int(name[1:]) for name in found[1].split(", ")], known[found[2]] + int(found[3])))
            continue
        for statement in filter(None, map(str.strip, line.split(";"))):
            name, rest = statement.split(None, 1)
            if name == ".reg":
                continue
            to, *given = (word.strip() for word in rest.split(","))
            known[to] = OPERATIONS[name.split(".")[0]](*map(value, given))
    return loads


def element(layout: object, register: int, lane: int) -> list[int]:
    at = [0, 0]
    for number, bases in ((register, layout.reg_bases), (lane, layout.lane_bases)):
        for i, base in enumerate(bases):
            if number >> i & 1:
                at = [x ^ y for x, y in zip(at, base, strict=True)]
    return at


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("units", [16, 32, 64, 128])
def test_keys(tile: int, units: int) -> None:
    assembly, layout = reads._key_reads(tile, units), layouts.key_unit_layout(tile, units)
    for lane in range(32):
        found = {}
        for registers, at in addresses(assembly, lane):
            assert at % (4 * len(registers)) == 0
            found |= {register: at + 4 * i for i, register in enumerate(registers)}
        for half in range(tile * units // 32):
            row, unit = element(layout, half, lane)
            assert found[half // 2] + 2 * (half % 2) == left_by_tma(row, unit, units)


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("units", [16, 32, 64, 128])
def test_values(tile: int, units: int) -> None:
    """Lane 4g + c gets column g of rows 2c and 2c + 1 of each of four matrices, whose rows lanes 8i … 8i + 7 name."""
    assembly, layout = reads._value_reads(tile, units), layouts.value_unit_layout(tile, units)
    loads = [addresses(assembly, lane) for lane in range(32)]
    for step, (registers, _) in enumerate(loads[0]):
        for matrix, register in enumerate(registers):
            rows = [loads[8 * matrix + r][step][1] for r in range(8)]
            assert all(at % 16 == 0 for at in rows)
            if units < 128:
                assert len({at // 16 % 8 for at in rows}) == 8, "rows share banks"
            for lane in range(32):
                for half in range(2):
                    unit, token = element(layout, 2 * register + half, lane)
                    assert rows[2 * (lane % 4) + half] + 2 * (lane // 4) == left_by_tma(token, unit, units)


def copied(assembly: str, lane: int, source: int, pieces: int) -> list[tuple[int, int]]:
    """(from, to) of the 16 bytes of each copy that a lane starts."""
    known, found = {"%laneid": lane}, []
    operands = {"$1": source, "$2": BASE, "$3": pieces}

    def value(name: str) -> int:
        return operands[name] if name in operands else known[name] if name in known else int(name, 0)

    for statement in filter(None, map(str.strip, assembly.strip("{} ").replace("\n", "").split(";"))):
        copy = re.fullmatch(r"(@some )?cp\.async\S+ \[(\w+)\+(\d+)\], \[(\w+)\+(\d+)\], 16, hint", statement)
        if copy:
            if copy[1] is None or known["some"]:
                found.append((known[copy[4]] + int(copy[5]), known[copy[2]] + int(copy[3])))
            continue
        name, rest = statement.split(None, 1)
        if name.startswith((".reg", "createpolicy")) or rest.startswith("$0"):
            continue
        to, *given = (word.strip() for word in rest.split(","))
        if name.startswith("setp"):
            a, b = map(value, given)
            known[to] = a > b if ".gt." in name else a < b
        else:
            known[to] = OPERATIONS[name.split(".")[0]](*map(value, given))
    return found


@pytest.mark.parametrize("run", [16, 32, 64])
@pytest.mark.parametrize("units", [16, 32, 64, 128])
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("known", [None, 64, 7])
def test_lanes_copy_to_where_tma_would(run: int, units: int, number: int, known: int | None) -> None:
    """Rows of runs of a tile that has several; `known` rows are there."""
    size, rows = 2 * units * run, run if known is None else min(run, known)
    assembly = lane_copies._copies(number * size, size, True, True, known is not None)
    places = [place for lane in range(32) for place in copied(assembly, lane, 4096, rows * units // 8)]
    wanted = {
        4096 + 2 * (row * units + unit): left_by_tma(number * run + row, unit, units)
        for row in range(rows)
        for unit in range(0, units, 8)
    }
    assert len(places) == len(wanted)
    assert dict(places) == wanted


@pytest.mark.parametrize("size", [48 * 16, 48 * 64, 80 * 32, 32, 64, 128])
def test_lanes_copy_rows_as_they_lie(size: int) -> None:
    for begin in (0, size):
        assembly = lane_copies._copies(begin, size, False, size <= 128, False)
        places = sorted(place for lane in range(32) for place in copied(assembly, lane, 4096, 0))
        assert places == [(4096 + at, BASE + begin + at) for at in range(0, size, 16)]
