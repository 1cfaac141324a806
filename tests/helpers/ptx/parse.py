"""From the text of PTX to statements: what is declared, and instructions with their operands and scopes."""

from __future__ import annotations

import dataclasses
import re

from .errors import EmulationError

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
PIECE = re.compile(r"\s+|//[^\n]*|(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<statement>[^;]*;)")
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
VARIABLE = re.compile(
    r"\.(?P<space>shared|global|local|const|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?(?:\.ptr\s.*)?\.[a-z]+(?P<bits>\d+)\s+"
    r"(?:\.ptr\s+)?(?:\.(?:global|shared)\s+)?(?:\.align\s+\d+\s+)?(?P<name>[\w$]+)(?P<count>\[\d*\])?(?:\s*=\s*(?P<value>.*))?",
    re.S,
)


@dataclasses.dataclass
class Variable:
    """Bytes that have a name."""

    space: str
    name: str
    size: int  # 0: as many as the launch says
    align: int
    value: bytes | None = None


@dataclasses.dataclass
class Scope:
    """What a block in braces declares, and where it lies."""

    outer: Scope | None
    registers: dict[str, str] = dataclasses.field(default_factory=dict)  # type by name
    families: dict[str, str] = dataclasses.field(default_factory=dict)  # type by name without number
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    tables: dict[int, list[str]] = dataclasses.field(default_factory=dict)  # labels to go to, by where they are listed
    variables: dict[str, Variable] = dataclasses.field(default_factory=dict)

    def register(self, name: str) -> tuple[Scope, str] | None:
        """The scope that declares a register, and its type."""
        family = name.rstrip("0123456789")
        if name in self.registers:
            return self, self.registers[name]
        if family in self.families:
            return self, self.families[family]
        return self.outer.register(name) if self.outer else None

    def label(self, name: str) -> int | None:
        return self.labels[name] if name in self.labels else self.outer.label(name) if self.outer else None

    def table(self, name: str) -> list[str] | None:
        """The labels that are listed where this one is."""
        if name in self.labels:
            return self.tables.get(self.labels[name])
        return self.outer.table(name) if self.outer else None

    def variable(self, name: str) -> Variable | None:
        return self.variables[name] if name in self.variables else self.outer.variable(name) if self.outer else None


@dataclasses.dataclass
class Statement:
    """An instruction."""

    name: str  # such as add.s32
    operands: list[str]
    guard: str | None  # a predicate, with ! where it is negated
    scope: Scope
    line: int


@dataclasses.dataclass
class Kernel:
    name: str
    parameters: list[Variable]
    statements: list[Statement]
    variables: list[Variable]


def split(text: str) -> list[str]:
    """Operands: at commas that no bracket encloses."""
    found, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in ")}]")
        if c == "," and depth == 0:
            found.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*found, last] if last or found else []


def variable(text: str) -> Variable:
    found = VARIABLE.fullmatch(text.replace(".visible", "").replace(".extern", "").strip())
    if not found:
        raise EmulationError(f"the emulator does not know the declaration {text!r}")
    size, count = SIZES[found["bits"]], found["count"]
    value = None
    if found["value"] is not None:
        numbers = re.sub(r"[{}\s]", "", found["value"]).split(",")
        value = b"".join((int(n, 0) % (1 << 8 * size)).to_bytes(size, "little") for n in numbers)
    elements = 1 if count is None else int(count[1:-1] or 0)
    align = int(found["align"] or size)
    if value is not None:
        value = value.ljust(size * elements, b"\0")
    return Variable(found["space"], found["name"], size * elements, align, value)


def _declare_registers(text: str, scope: Scope) -> None:
    kind, names = text.removeprefix(".reg").split(None, 1)
    for name in split(names):
        family = re.fullmatch(r"([%\w$]+)<\d+>", name)
        (scope.families if family else scope.registers)[family[1] if family else name] = kind.lstrip(".")


def parse(text: str) -> Kernel:
    entry = ENTRY.search(text)
    if not entry:
        raise EmulationError("the PTX has no kernel")
    if re.search(r"\.func\b", text):
        raise EmulationError("the emulator knows no functions")
    outside, variables = Scope(None), []
    for declared in re.findall(r"(?m)^[^\n/]*\.(?:shared|global|const)\s[^;]*;", text[: entry.start()]):
        found = variable(declared.rstrip(";"))
        outside.variables[found.name] = found
        variables.append(found)
    parameters = [variable(each) for each in split(re.sub(r"//[^\n]*", "", entry[2]))]
    for each in parameters:
        outside.variables[each.name] = each
    scope, statements = Scope(outside), []
    at, line, depth = entry.end(), text.count("\n", 0, entry.end()) + 1, 1
    while depth:
        piece = PIECE.match(text, at)
        if not piece:
            raise EmulationError(f"line {line} of the PTX is not known: {text[at : at + 80]!r}")
        at = piece.end()
        if piece["open"]:
            scope, depth = Scope(scope), depth + 1
        elif piece["close"]:
            assert scope.outer
            scope, depth = scope.outer, depth - 1
        elif piece["label"]:
            scope.labels[piece["label"]] = len(statements)
        elif piece["statement"]:
            body = re.sub(r"//[^\n]*", "", piece["statement"][:-1]).strip()
            if body.startswith(".reg"):
                _declare_registers(body, scope)
            elif re.match(r"\.(shared|local)\b", body):
                found = variable(body)
                scope.variables[found.name] = found
                variables.append(found)
            elif body.startswith(".branchtargets"):
                scope.tables[len(statements)] = split(body.removeprefix(".branchtargets"))
            elif body and not re.match(r"\.(loc|file|pragma)\b", body):
                statements.append(_statement(body, scope, line))
        line += piece[0].count("\n")
    return Kernel(entry[1], parameters, statements, variables)


def _statement(body: str, scope: Scope, line: int) -> Statement:
    guard = None
    if body[0] == "@":
        guard, body = body[1:].split(None, 1)
    name, *rest = body.split(None, 1)
    return Statement(name, split(rest[0]) if rest else [], guard, scope, line)
