"""Statements of PTX, one family at a time: from how they are written to what the machine has."""

from __future__ import annotations

import re
from collections.abc import Callable

from .parse import Statement, split
from .program import Assembler

SPACES = {"global": 1, "const": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 2, "local": 3, "param": 4}
WINDOWS = {"shared": 1 << 56, "param": 2 << 56, "local": 3 << 56, "global": 0, "const": 0}
IGNORED = {  # orders and hints: the machine does one thing after the other, and has no caches
    "relaxed", "acquire", "release", "acq_rel", "volatile", "weak", "gpu", "cta", "sys", "cluster", "nc", "ca", "cg",
    "cs", "lu", "cv", "wb", "wt", "noftz", "unified",
}  # fmt: skip
NOTHING = ("createpolicy", "prefetch", "prefetchu", "membar", "griddepcontrol", "nanosleep", "setmaxnreg")
COMBINATIONS = {"and": 1, "or": 2, "xor": 3}
WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8}


def assemble_statement(made: Assembler, statement: Statement) -> None:
    first = statement.name.split(".")[0]
    if first in NOTHING:
        made.put(statement, "nothing", [])
    elif first in FAMILIES:
        FAMILIES[first](made, statement)
    else:
        made.plain(statement, statement.name, statement.operands)


def _vector(text: str) -> list[str]:
    return split(text.strip()[1:-1]) if text.startswith("{") else [text]


def _pair(text: str) -> list[str]:
    """d|p: the second one may be missing."""
    return [*text.split("|"), "_"][:2]


def _bytes_of(kind: str) -> int:
    return WIDTHS[re.sub(r"\D", "", kind)]


def _branch(made: Assembler, statement: Statement) -> None:
    target = statement.scope.label(statement.operands[0])
    if target is None:
        raise made.error(statement, "there is no such label")
    made.put(statement, "bra", [], target=target)


def _switch(made: Assembler, statement: Statement) -> None:
    which, name = statement.operands
    targets = [statement.scope.label(each) for each in statement.scope.table(name) or ()]
    if not targets or None in targets:
        raise made.error(statement, "there are no such labels")
    made.put(statement, "brx.idx", [made.operand(which, "w", statement)], [len(targets), *(x or 0 for x in targets)])


def _return(made: Assembler, statement: Statement) -> None:
    made.put(statement, "ret", [])


def _move(made: Assembler, statement: Statement) -> None:
    to, source = statement.operands
    bits = re.sub(r"\D", "", statement.name)
    if source.startswith("{"):
        made.plain(statement, f"pack.b{bits}", [to, *_vector(source)])
    elif to.startswith("{"):
        made.plain(statement, f"unpack.b{bits}", [*_vector(to), source])
    else:
        made.plain(statement, statement.name, statement.operands)


def _rounded(made: Assembler, statement: Statement) -> None:
    """Rounding to nearest is what there is. Pairs of float32 (of 10.0 and newer) are two operations."""
    name = statement.name.replace(".rn", "")
    if not name.endswith(".f32x2"):
        made.plain(statement, name, statement.operands)
        return
    halves = [(made.slot("w"), made.slot("w")) for _ in statement.operands]
    pairs = [made.operand(text, "q", statement) for text in statement.operands]
    for half, pair in zip(halves[1:], pairs[1:], strict=True):
        made.put(statement, "unpack.b64", [*half, pair])
    for low_or_high in zip(*halves, strict=True):
        made.put(statement, name.removesuffix("x2"), list(low_or_high))
    made.put(statement, "pack.b64", [pairs[0], *halves[0]])


def _convert(made: Assembler, statement: Statement) -> None:
    """The register of an integer may be wider than its type: then its lowest bits count."""
    to, source = statement.operands[0], statement.operands[-1]
    kind = statement.name.rsplit(".", 1)[1]
    if kind[0] in "su" and kind[1:] != "64" and made.sort_of(source, statement.scope) == "q":
        low = made.slot("w")
        made.put(statement, "cvt.u32.u64", [low, made.operand(source, "q", statement)])
        wide = "q" if re.fullmatch(r"cvt(\.\w+)*\.[sufb]64\.\w+", statement.name) else "w"
        made.put(statement, statement.name, [made.operand(to, wide, statement), low])
    else:
        made.plain(statement, statement.name, statement.operands)


def _compare(made: Assembler, statement: Statement) -> None:
    _, how, *rest = statement.name.split(".")
    combined = next((x for x in rest if x in COMBINATIONS), None)
    name = ".".join(["setp", how, *(x for x in rest if x not in COMBINATIONS)])
    p, q = _pair(statement.operands[0])
    others = statement.operands[1:]
    negated = int(len(others) > 2 and others[2].startswith("!"))
    made.plain(
        statement,
        name,
        [p, q, *(x.lstrip("!") for x in others)],
        [COMBINATIONS[combined] if combined else 0, negated],
    )


def _access(made: Assembler, statement: Statement) -> None:
    """ld and st."""
    kind, *parts = statement.name.split(".")
    space = next((SPACES[x] for x in parts if x in SPACES), 0)
    count = next((int(x[1:]) for x in parts if re.fullmatch(r"v[248]", x)), 1)
    strange = {x for x in parts[:-1] if x not in SPACES and x not in IGNORED and not re.match(r"v[248]$|L[12]::", x)}
    if strange:
        raise made.error(statement, f"the emulator does not know {sorted(strange)}")
    registers, address = statement.operands[:2] if kind == "ld" else statement.operands[1::-1]
    names = _vector(registers)
    if len(names) == 1:
        count = 1
    if len(names) != count:
        raise made.error(statement, f"takes {count} registers")
    sort = next((made.sort_of(x, statement.scope) for x in names if made.sort_of(x, statement.scope)), None)
    sort = sort or ("q" if _bytes_of(parts[-1]) == 8 else "w")
    slots = [made.operand(x, sort, statement) for x in names]
    at = made.address(address, statement)
    signed = int(parts[-1].startswith("s"))
    extra = [space, _bytes_of(parts[-1]), count, signed, at.wide, at.offset, int(sort == "q")]
    made.put(statement, kind, [*slots, at.slot], extra)


def _atomic(made: Assembler, statement: Statement) -> None:
    """atom, and red, which wants no old value."""
    kind, *parts = statement.name.split(".")
    space = next((SPACES[x] for x in parts if x in SPACES), 0)
    *_, how, width = (x for x in parts if x not in SPACES and x not in IGNORED)
    operands = statement.operands if kind == "atom" else ["_", *statement.operands]
    sort = "q" if width.endswith("64") else "w"
    at = made.address(operands[1], statement)
    others = [made.operand(x, sort, statement) for x in (operands[0], *operands[2:])]
    name = f"atom.{how}.{width}"
    _known(made, statement, name)
    extra = [space, at.wide, at.offset, int(kind == "atom" and operands[0] != "_")]
    made.put(statement, name, [others[0], at.slot, *others[1:]], extra)


def _known(made: Assembler, statement: Statement, name: str) -> None:
    from . import library

    if library.operands(name) is None:
        raise made.error(statement, "the emulator does not know this instruction")


def _to_generic(made: Assembler, statement: Statement) -> None:
    parts = statement.name.split(".")
    name, space = ("cvta.to", parts[2]) if parts[1] == "to" else ("cvta", parts[1])
    made.plain(statement, name, statement.operands, [WINDOWS[space]])


def _shuffle(made: Assembler, statement: Statement) -> None:
    """shfl and elect: the first operand is a pair."""
    made.plain(statement, statement.name, [*_pair(statement.operands[0]), *statement.operands[1:]])


def _vote(made: Assembler, statement: Statement) -> None:
    to, source, members = statement.operands
    made.plain(statement, statement.name, [to, source.lstrip("!"), members], [int(source.startswith("!"))])


def _multiply(made: Assembler, statement: Statement) -> None:
    kept = [x for x in statement.name.split(".") if x not in ("sync", "aligned", "row", "col")]
    names = [x for operand in statement.operands for x in _vector(operand)]
    made.plain(statement, ".".join(kept), names)


def _matrices(made: Assembler, statement: Statement) -> None:
    """ldmatrix and stmatrix of 8 × 8 of 16 bits."""
    kind, *parts = statement.name.split(".")
    if "m8n8" not in parts or parts[-1] != "b16":
        raise made.error(statement, "the emulator knows matrices of 8 x 8 of 16 bits")
    count = next(int(x[1:]) for x in parts if re.fullmatch(r"x[124]", x))
    registers, address = statement.operands if kind == "ldmatrix" else statement.operands[::-1]
    at = made.address(address, statement)
    slots = [made.operand(x, "w", statement) for x in _vector(registers)]
    if len(slots) != count:
        raise made.error(statement, f"takes {count} registers")
    made.put(statement, kind, [*slots, at.slot], [count, int("trans" in parts), at.wide, at.offset])


def _transpose(made: Assembler, statement: Statement) -> None:
    if statement.name != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise made.error(statement, "the emulator does not know this instruction")
    made.plain(statement, "movmatrix", statement.operands)


def _barrier(made: Assembler, statement: Statement) -> None:
    parts = statement.name.split(".")
    if parts[1] == "warp":
        made.plain(statement, "bar.warp.sync", statement.operands)
        return
    how = next((x for x in parts if x in ("sync", "arrive")), None)
    if how is None:
        raise made.error(statement, "the emulator does not know this barrier")
    numbers = [*statement.operands, "0"][:2]
    made.put(statement, "bar.sync", [made.operand(x, "w", statement) for x in numbers], [int(how == "sync")])


def _copy(made: Assembler, statement: Statement) -> None:
    name, operands = statement.name, statement.operands
    if name == "cp.async.commit_group":
        made.put(statement, name, [])
    elif name == "cp.async.wait_all":
        made.put(statement, "cp.async.wait_group", [], [0, 1])
    elif name == "cp.async.wait_group":
        made.put(statement, name, [], [int(operands[0], 0), 0])
    elif name.startswith("cp.async.bulk.tensor"):
        _copy_tensor(made, statement)
    elif name.startswith("cp.async.bulk"):
        _copy_bulk(made, statement)
    elif re.match(r"cp\.async\.c[ag]\.shared", name):
        given = operands[:-1] if "cache_hint" in name else operands
        to, source = made.address(given[0], statement), made.address(given[1], statement)
        some = [made.operand(given[3], "w", statement)] if len(given) > 3 else []
        extra = [to.wide, to.offset, source.offset, int(given[2], 0), len(some)]
        made.put(statement, "cp.async", [to.slot, source.slot, *some], extra)
    else:
        raise made.error(statement, "the emulator does not know this instruction")


def _copy_tensor(made: Assembler, statement: Statement) -> None:
    parts = statement.name.split(".")
    if parts[6] != "global" or "mbarrier::complete_tx::bytes" not in parts or any("im2col" in x for x in parts):
        raise made.error(statement, "the emulator knows copies of tiles to shared memory that arrive at a barrier")
    to, place, barrier = statement.operands[:3]
    described, coordinates = split(place[1:-1])
    target, at = made.address(to, statement), made.address(barrier, statement)
    slots = [made.operand(x, "w", statement) for x in _vector(coordinates)]
    named = made.address(f"[{described}]", statement)
    made.put(
        statement,
        "cp.async.bulk.tensor",
        [target.slot, named.slot, at.slot, *slots],
        [target.wide, target.offset, at.wide, at.offset, len(slots)],
    )


def _copy_bulk(made: Assembler, statement: Statement) -> None:
    if not re.match(r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes", statement.name):
        raise made.error(statement, "the emulator does not know this instruction")
    to, source, size, barrier = statement.operands[:4]
    target, origin, at = (made.address(x, statement) for x in (to, source, barrier))
    made.put(
        statement,
        "cp.async.bulk",
        [target.slot, origin.slot, made.operand(size, "w", statement), at.slot],
        [target.wide, target.offset, origin.offset, at.wide, at.offset],
    )


def _mbarrier(made: Assembler, statement: Statement) -> None:
    parts, operands = statement.name.split("."), statement.operands
    where = next(i for i, x in enumerate(operands) if x.startswith("["))
    at = made.address(operands[where], statement)
    rest = operands[where + 1 :]
    number = [made.operand(x, "w", statement) for x in rest]
    place = [at.wide, at.offset]
    if parts[1] == "init":
        made.put(statement, "mbarrier.init", [at.slot, number[0]], place)
    elif parts[1] == "inval":
        made.put(statement, "mbarrier.inval", [at.slot], place)
    elif parts[1] in ("arrive", "expect_tx"):
        expects = "expect_tx" in parts
        if where and operands[0] != "_":
            raise made.error(statement, "the emulator gives out no state of a barrier")
        count = made.constant(int(parts[1] == "arrive"), "w") if expects or not number else number[0]
        made.put(statement, "mbarrier.arrive", [at.slot, count, number[0] if expects else made.constant(0, "w")], place)
    elif parts[1] in ("try_wait", "test_wait") and parts[2] == "parity":
        done = made.operand(operands[0], "p", statement)
        made.put(statement, "mbarrier.wait", [done, at.slot, number[0]], place)
    else:
        raise made.error(statement, "the emulator does not know this instruction")


def _fence(made: Assembler, statement: Statement) -> None:
    shows = statement.name.startswith("fence.proxy.async")
    made.put(statement, "fence.proxy.async" if shows else "nothing", [])


def _warp_group(made: Assembler, statement: Statement) -> None:
    parts, operands = statement.name.split("."), statement.operands
    if parts[1] == "fence":
        made.put(statement, "nothing", [])
        return
    if parts[1] in ("commit_group", "wait_group"):
        made.put(statement, f"wgmma.{parts[1]}", [], [int(x, 0) for x in operands])
        return
    shape = re.fullmatch(r"m64n(\d+)k\d+", parts[4])
    name = "wgmma." + ".".join(parts[5:])
    _known(made, statement, name)
    results, a, b, adds, *rest = operands
    numbers = [int(x, 0) for x in rest]  # signs of a and b, then which are transposed: a only in shared memory
    inside = a.startswith("{")
    signs = [int(x < 0) for x in numbers[:2]] or [0, 0]
    across = numbers[2:]
    across = [0, *across] if inside and across else across or [0, 0]
    slots = [made.operand(x, "w", statement) for x in _vector(results)]
    left = [made.operand(x, "w" if inside else "q", statement) for x in _vector(a)]
    if not shape or len(slots) != int(shape[1]) // 2 or len(left) != (4 if inside else 1):
        raise made.error(statement, "the emulator knows products of 64 rows with 32-bit results")
    last = [made.operand(b, "q", statement), _predicate(made, adds, statement)]
    made.put(statement, name, [*slots, *left, *last], [int(shape[1]), int(inside), *across, *signs])


def _predicate(made: Assembler, text: str, statement: Statement) -> int:
    """A register, or a number."""
    if made.sort_of(text, statement.scope) is None:
        return made.constant(int(text, 0) != 0, "p")
    return made.operand(text, "p", statement)


FAMILIES: dict[str, Callable[[Assembler, Statement], None]] = {
    "bra": _branch,
    "brx": _switch,
    "ret": _return,
    "exit": _return,
    "mov": _move,
    "add": _rounded,
    "sub": _rounded,
    "mul": _rounded,
    "fma": _rounded,
    "setp": _compare,
    "ld": _access,
    "st": _access,
    "atom": _atomic,
    "red": _atomic,
    "cvt": _convert,
    "cvta": _to_generic,
    "shfl": _shuffle,
    "elect": _shuffle,
    "vote": _vote,
    "mma": _multiply,
    "ldmatrix": _matrices,
    "stmatrix": _matrices,
    "movmatrix": _transpose,
    "bar": _barrier,
    "barrier": _barrier,
    "cp": _copy,
    "mbarrier": _mbarrier,
    "fence": _fence,
    "wgmma": _warp_group,
}
