"""From parsed PTX to a program of the machine: registers become slots, names become numbers."""

from __future__ import annotations

import ctypes
import re
import struct
from array import array
from typing import NamedTuple

from . import library
from .errors import EmulationError
from .parse import Kernel, Scope, Statement, Variable, parse

SHARED_BEGIN = 1024  # as in machine.hpp
SPECIALS = [
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x",
    "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%lanemask_lt", "%lanemask_le", "%lanemask_gt",
    "%lanemask_ge", "%lanemask_eq", "%smid",
]  # fmt: skip
BYTES = {"w": 4 * 32, "q": 8 * 32, "p": 4}
ALIGNED = 64  # of slots
WITH_MEMBERS = ("shfl", "vote", "match", "elect", "redux", "bar.warp")  # the last operand says which lanes meet


class Address(NamedTuple):
    slot: int
    wide: int
    offset: int


class Assembler:
    """Slots of a kernel, and the code so far."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.registers = 0
        self.known: dict[tuple[int, str], int] = {}
        self.constants: dict[tuple[str, int], int] = {}
        self.specials: dict[str, int] = {}
        self.names: list[bytes] = []
        self.table, self.slots, self.extra = array("i"), array("i"), array("q")
        self.places: dict[int, int] = {}  # of variables, by identity
        self.buffers: list[ctypes.Array[ctypes.c_char]] = []
        self.local = 0
        self.shared = SHARED_BEGIN  # where static variables end
        self.dynamic: Variable | None = None
        self._place()
        self.sinks = {sort: self.slot(sort) for sort in "wqp"}

    def _place(self) -> None:
        offset = 0
        for each in self.kernel.parameters:
            offset = -(-offset // each.align) * each.align
            self.places[id(each)] = offset
            offset += each.size
        self.parameter_bytes = offset
        for each in self.kernel.variables:
            if each.space == "shared" and each.size:
                self.shared = -(-self.shared // each.align) * each.align
                self.places[id(each)] = self.shared
                self.shared += each.size
            elif each.space == "local":
                self.local = -(-self.local // each.align) * each.align
                self.places[id(each)] = self.local
                self.local += each.size
            elif each.space in ("global", "const"):
                buffer = ctypes.create_string_buffer(each.value or b"", each.size + each.align)
                self.buffers.append(buffer)
                at = ctypes.addressof(buffer)
                skip = -at % each.align
                ctypes.memmove(at + skip, each.value or bytes(each.size), each.size)
                self.places[id(each)] = at + skip
        for each in self.kernel.variables:
            if each.space == "shared" and not each.size:
                self.shared = -(-self.shared // each.align) * each.align
                self.places[id(each)] = self.shared

    def slot(self, sort: str) -> int:
        self.registers = -(-self.registers // ALIGNED) * ALIGNED
        slot = self.registers
        self.registers += BYTES[sort]
        return slot

    def constant(self, value: int, sort: str) -> int:
        """p: all lanes or none."""
        value %= 1 << (64 if sort == "q" else 32)
        if (sort, value) not in self.constants:
            self.constants[sort, value] = self.slot(sort)
        return self.constants[sort, value]

    def sort_of(self, name: str, scope: Scope) -> str | None:
        """w, q or p for a register, None for what is none."""
        if name in SPECIALS:
            return "w"
        found = scope.register(name)
        if found is None:
            return None
        bits = re.sub(r"\D", "", found[1])
        return "p" if found[1] == "pred" else "q" if bits == "64" else "w"

    def operand(self, text: str, sort: str, statement: Statement) -> int:
        """The slot of a register, a number or a name."""
        scope = statement.scope
        if text == "_":
            return self.sinks[sort]
        if text in SPECIALS:
            return self.specials[text] if text in self.specials else self._special(text)
        found = scope.register(text)
        if found is not None:
            if self.sort_of(text, scope) != sort:
                raise self.error(statement, f"{text} is a .{found[1]}")
            key = (id(found[0]), text)
            if key not in self.known:
                self.known[key] = self.slot(sort)
            return self.known[key]
        return self.constant(self.number(text, statement), sort)

    def _special(self, name: str) -> int:
        self.specials[name] = self.slot("w")
        return self.specials[name]

    def number(self, text: str, statement: Statement) -> int:
        """An immediate, or the address of a variable."""
        variable = statement.scope.variable(text)
        if variable is not None:
            return self.places[id(variable)]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return int(text[2:], 16)
        if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
            wide = statement.name.endswith("f64")
            return int.from_bytes(struct.pack("<d" if wide else "<f", float(text)), "little")
        try:
            return int(text.rstrip("U"), 0)
        except ValueError:
            raise self.error(statement, f"{text!r} is not known") from None

    def address(self, text: str, statement: Statement) -> Address:
        """Of [register], [register + number], [variable + number] or [number]."""
        inside = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if not inside:
            raise self.error(statement, f"{text!r} is no address")
        base, offset = inside[1], int(inside[2] or "0", 0)
        sort = self.sort_of(base, statement.scope)
        if sort is None:
            return Address(self.constant(self.number(base, statement), "q"), 1, offset)
        return Address(self.operand(base, sort, statement), int(sort == "q"), offset)

    def error(self, statement: Statement, what: str) -> EmulationError:
        shown = f"{statement.name} {', '.join(statement.operands)}"
        return EmulationError(f"{self.kernel.name}, PTX line {statement.line}: {shown}: {what}")

    def put(
        self, statement: Statement, name: str, slots: list[int], extra: list[int] | None = None, target: int = -1,
        members: int = -1,
    ) -> None:  # fmt: skip
        guard, negated = -1, 0
        if statement.guard is not None:
            negated = int(statement.guard.startswith("!"))
            guard = self.operand(statement.guard.lstrip("!"), "p", statement)
        row = (len(self.slots), len(slots), len(self.extra), guard, negated, target, members, statement.line)
        self.table.extend(row)
        self.slots.extend(slots)
        self.extra.extend(extra or ())
        self.names.append(name.encode())

    def plain(self, statement: Statement, name: str, operands: list[str], extra: list[int] | None = None) -> None:
        """An instruction whose operands are as the machine says."""
        known = library.operands(name)
        if known is None:
            raise self.error(statement, "the emulator does not know this instruction")
        sorts, _ = known
        if "*" in sorts:
            at = sorts.index("*")
            sorts = sorts[:at] + sorts[at - 1] * (len(operands) - len(sorts) + 1) + sorts[at + 1 :]
        if len(sorts) > len(operands):
            raise self.error(statement, f"takes {len(sorts)} operands")
        sorts += "p" * (len(operands) - len(sorts))  # of setp that combines
        slots = [self.operand(text, sort, statement) for text, sort in zip(operands, sorts, strict=True)]
        members = slots[-1] if name.startswith(WITH_MEMBERS) else -1
        self.put(statement, name, slots, extra, members=members)


def assemble(ptx: str) -> Program:
    return Program(ptx)


class Program:
    """A kernel that can run, as often as wanted."""

    def __init__(self, ptx: str) -> None:
        from .instructions import assemble_statement

        self.lines = ptx.splitlines()
        kernel = parse(ptx)
        self.name = kernel.name
        self.parameters = kernel.parameters
        made = Assembler(kernel)
        begins = []  # of each statement, of which some are several instructions, and of the end
        for statement in kernel.statements:
            begins.append(len(made.names))
            assemble_statement(made, statement)
        begins.append(len(made.names))
        for i, name in enumerate(made.names):  # labels are numbers of statements
            _, _, extra, _, _, target, *_ = made.table[8 * i : 8 * i + 8]
            if target >= 0:
                made.table[8 * i + 5] = begins[target]
            if name == b"brx.idx":
                for at in range(extra + 1, extra + 1 + made.extra[extra]):
                    made.extra[at] = begins[made.extra[at]]
        made.names.append(b"ret")  # what falls off the end
        made.table.extend((len(made.slots), 0, len(made.extra), -1, 0, -1, -1, 0))
        self.places = [made.places[id(each)] for each in kernel.parameters]
        self.parameter_bytes, self.shared, self.buffers = made.parameter_bytes, made.shared, made.buffers
        sizes = {"w": 4, "q": 8, "p": 1}
        constants, specials = array("q"), array("q")
        for (sort, value), slot in made.constants.items():
            constants.extend((slot, sizes[sort], value - (1 << 64) if value >> 63 else value))
        for name, slot in made.specials.items():
            specials.extend((slot, SPECIALS.index(name)))
        names = (ctypes.c_char_p * len(made.names))(*made.names)
        self.handle = ctypes.c_void_p(
            library.library().ptx_program(
                len(made.names), names, _pointer(made.table), _pointer(made.slots), len(made.slots),
                _pointer(made.extra), len(made.extra), _pointer(constants), len(constants), _pointer(specials),
                len(specials), made.registers, made.local,
            )
        )  # fmt: skip

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            library.library().ptx_forget(self.handle)


def _pointer(numbers: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0] if len(numbers) else None)
