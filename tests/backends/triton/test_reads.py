"""Where lanes read codes in shared memory: the assembly, run here for each lane, against TMA's order and layouts."""

from __future__ import annotations

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from aurakv.backends.triton.decode import layouts, reads

BASE = 5 * 1024
OPERATIONS = {
    "mov": lambda a: a,
    "bfe": lambda a, start, count: a >> start & (1 << count) - 1,
    "mad": lambda a, b, c: a * b + c,
    "shr": lambda a, b: a >> b,
    "lop3": lambda a, b, c, table: {0x6A: a & b ^ c}[table],
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
