"""From Metal source to C++: what Metal would refuse, kernels' signatures, threadgroup memory."""

from __future__ import annotations

import re
from collections.abc import Callable

POSITIONS = {
    "thread_position_in_grid": "position",
    "threadgroup_position_in_grid": "group",
    "thread_position_in_threadgroup": "local",
    "threads_per_threadgroup": "group_size",
    "threadgroups_per_grid": "groups",
    "threads_per_grid": "threads",
}
NUMBERS = {
    "thread_index_in_threadgroup": "i.flat",
    "thread_index_in_simdgroup": "i.lane",
    "simdgroup_index_in_threadgroup": "i.simd",
    "threads_per_simdgroup": "32",
}
MOST_BUFFERS = 31
MOST_THREADS = 1024
LIMIT = r"(?:\[\[\s*max_total_threads_per_threadgroup\((.*?)\)\s*\]\]\s*)?"
FORBIDDEN = (
    "double", r"long\s+long", "goto", "try", "catch", "throw", "noexcept", "new", "delete", "virtual", "dynamic_cast",
    "typeid", "std", "asm", "register", "thread_local", "malloc", "calloc", "realloc", "alloca", "wchar_t",
    r"__(?:builtin_|asm|float|int|fp|bf)\w*", r"_(?:Float|Decimal)\w+", "_Complex",
)  # fmt: skip
SCALARS = "bool|char|uchar|short|ushort|int|uint|long|ulong|float|half|size_t|atomic_int|atomic_uint"
TYPE = rf"(?:(?:packed_)?(?:{SCALARS})[234]?|simdgroup_(?:float|half)8x8|auto|T)"
SPACES = "device|constant|threadgroup|thread"
CALL = r"\b(\w+)(?=(\s*(?:<(?:[^<>;{}]|<[^<>;{}]*>)*>\s*)?)\()"  # of a function, perhaps a template
BODY = r"\s*(?:\b(?:const|device|constant|threadgroup|thread)\b\s*)*\{"  # of a function, behind its arguments
LACKING = {  # what else Metal has not, and how it looks
    "long double": r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)[lL]\b",
    "pointers to functions": r"\(\s*\*\s*\w+\s*\)\s*\(",
    "lambdas before 3.2": r"\[[&=\w\s,]*\]\s*\([^()]*\)\s*(?:mutable\s*)?(?:->\s*\w+\s*)?\{",
    "static variables": rf"\bstatic\s+(?:const\s+)?{TYPE}\s+\w+\s*[=;\[]",
    "derived classes": r"\b(?:struct|class)\s+\w+\s*:(?!:)",
}


class EmulationError(RuntimeError):
    """What Apple's compiler would have refused, or the device done wrong, silently or not."""


def blank(source: str) -> str:
    """Comments to spaces; every line keeps its number."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)


def closing(text: str, at: int, pair: str) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if not depth:
            return i
    raise EmulationError(f"no closing {pair[1]}")


def line_of(text: str, at: int) -> str:
    """The line of a place, counted from the last `#line` directive."""
    before = text[:at]
    marks = list(re.finditer(r'^#line (\d+) "([^"]*)"\n', before, re.M))
    if not marks:
        return f"line {before.count(chr(10)) + 1}"
    return f"{marks[-1][2]}, line {int(marks[-1][1]) + before[marks[-1].end() :].count(chr(10))}"


class Kernel:
    """One signature: the buffers in order, and the call that glue makes for each thread."""

    def __init__(self, name: str, parameters: list[str], most: str | None = None) -> None:
        self.name = name
        self.buffers: dict[int, tuple[str, str, bool]] = {}  # index: name, type, constant
        call, kinds = [], set()
        for text in parameters:
            attribute = re.search(r"\[\[\s*(\w+)(?:\((\d+)\))?\s*\]\]", text)
            words = re.sub(r"\[\[.*?\]\]", "", text).strip()
            match = re.fullmatch(r"(.*?)(\w+)", words, re.S)
            if match is None:
                raise EmulationError(f"{name}: cannot read the parameter {words}")
            kind, argument = match.groups()
            plain = re.sub(rf"\b({SPACES})\b", "", kind).strip()
            what = attribute[1] if attribute else "buffer"
            if what == "buffer":
                if not re.search(r"\b(device|constant)\b", kind):
                    raise EmulationError(f"{name}: the buffer {argument} must be device or constant")
                index = int(attribute[2]) if attribute else len(self.buffers)
                self.buffers[index] = (argument, _element(plain), bool({"const", "constant"} & set(kind.split())))
                call.append(f"({plain})a[{index}]" if "*" in plain else f"*({plain.rstrip('& ')}*)a[{index}]")
            elif what in POSITIONS:
                kinds.add(plain)
                at = f"i.{POSITIONS[what]}"
                call.append(f"mtl::Pick<{plain}>::of({at}.x, {at}.y, {at}.z)")
            elif what in NUMBERS:
                call.append(NUMBERS[what])
            else:
                raise EmulationError(f"{name}: the attribute {what} is not emulated")
        if sorted(self.buffers) != list(range(len(self.buffers))) or len(self.buffers) > MOST_BUFFERS:
            raise EmulationError(f"{name}: buffers must be numbered 0, 1, … and be at most {MOST_BUFFERS}")
        if len(kinds) > 1:
            raise EmulationError(f"{name}: positions and sizes must share one type, not {', '.join(sorted(kinds))}")
        section = f"mtl_tg_{name}"
        self.glue = (
            f'extern "C" {{ extern const mtl::Array __start_{section}[] __attribute__((weak)), __stop_{section}[]'
            " __attribute__((weak));\n"
            f"unsigned most_{name}() {{ return {most or MOST_THREADS}; }}\n"
            f"const void *lo_{name}() {{ return __start_{section}; }}\n"
            f"const void *hi_{name}() {{ return __stop_{section}; }}\n"
            f"MTL_QUIET void run_{name}(void** a) {{ const auto& i = mtl::ids(); (void)i; {name}({', '.join(call)}); }}"
            " }\n"
        )


def _element(kind: str) -> str:
    return re.sub(r"\bconst\b|[&*]", "", kind).strip()


def translate(source: str) -> tuple[str, list[Kernel]]:
    """C++ with the same lines, and the kernels in it."""
    text = blank(source)
    refuse(text)
    kernels, out, last = [], [], 0
    for match in re.finditer(LIMIT + r"\bkernel\s+void\s+(\w+)\s*\(", text):
        end = closing(text, match.end() - 1, "()")
        inner = re.sub(r"\[\[.*?\]\]", lambda m: m[0].replace(",", " "), text[match.end() : end])
        kernels.append(Kernel(match[2], [p for p in inner.split(",") if p.strip()], match[1]))
        start = text.index("{", end)
        stop = closing(text, start, "{}")
        out += [_outside(text[last:start]), _memory(match[2], text[start:stop])]
        last = stop
    return "".join(out) + _outside(text[last:]), kernels


def _memory(kernel: str, text: str) -> str:
    """Threadgroup memory: a section lists a kernel's arrays; the runtime gives each a place, poisons and watches it."""
    declared = (
        rf'static __attribute__((section("mtl_tg_{kernel}"), used)) const mtl::Array \2_made ='
        r" {sizeof(\1\3), alignof(\1)};"
        r" auto& \2 = *(\1(*)\3)mtl::shared_array(&\2_made);"
    )
    result = re.sub(r"\bthreadgroup\s+([\w:]+)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;", declared, text)
    if odd := re.search(r"\bthreadgroup\s+[\w:]+\s+\w+[^;(){}]*;", result):
        raise EmulationError(f"{kernel}: declare one threadgroup array a statement, not {odd[0]}")
    return result


def _outside(text: str) -> str:
    if odd := re.search(r"\bthreadgroup\s+[\w:]+\s+\w+\s*(?:\[[^\]]*\]\s*)*;", text):
        raise EmulationError(f"threadgroup memory belongs into a kernel, not outside: {odd[0]}")
    return text


def refuse(text: str) -> None:
    """What Metal refuses and a C++ compiler would not, as far as words tell."""
    for match in re.finditer(rf"\b({'|'.join(FORBIDDEN)})\b", text):
        raise EmulationError(f"Metal has no {match[0]}, at {line_of(text, match.start())}")
    for what, looks in LACKING.items():
        if match := re.search(looks, text):
            raise EmulationError(f"Metal has no {what}, at {line_of(text, match.start())}")
    pointer = rf"(?:\b({SPACES})\s+)?(?:(?:const|volatile)\s+)*\b(?<![<.:]){TYPE}(?:\s+const)?\s*[*&](?!&)"
    for match in re.finditer(pointer, text):
        if match[1] is None and not re.search(rf"\b({SPACES})\s+(?:const\s+)?$", text[: match.start()]):
            raise EmulationError(f"a pointer or reference has no address space, at {line_of(text, match.start())}")
    flat = _flattened(text)
    for match in re.finditer(
        rf"^[ \t]*((?:(?:static|const|constexpr)\s+)*){TYPE}\s+\w+\s*(?:\[[^\]]*\]\s*)*[=;]", flat, re.M
    ):
        raise EmulationError(f"a variable outside functions must be constant, at {line_of(text, match.start())}")
    _refuse_recursion(text)


def _flattened(text: str) -> str:
    """The source with everything inside braces blanked."""
    depth, result = 0, []
    for c in text:
        depth -= c == "}"
        result.append(c if depth == 0 or c == "\n" else " ")
        depth += c == "{"
    return "".join(result)


def _refuse_recursion(text: str) -> None:
    """Functions, methods and macros that come back to themselves; where a name has several meanings, by any of them."""
    macros = re.findall(r"^[ \t]*#define[ \t]+(\w+)(.*(?:\\\n.*)*)", text, re.M)
    calls = {name: set(re.findall(r"\w+", body)) for name, body in macros}
    for match in re.finditer(CALL, text):
        end = closing(text, match.end(2), "()") + 1
        if match[1] not in ("if", "for", "while", "switch") and (brace := re.compile(BODY).match(text, end)):
            body = text[brace.end() - 1 : closing(text, brace.end() - 1, "{}")]
            called = {m[1] for m in re.finditer(CALL, body)}
            calls.setdefault(match[1], set()).update(called | set(re.findall(r"\w+", body)) & {m[0] for m in macros})
    _refuse_cycles(calls, lambda name: name)


def refuse_recursion(graph: str) -> None:
    """As above in what g++ compiled, by its graph of calls: templates, operators and constructors that are used."""
    graph = re.sub(r"([CD])1E", r"\g<1>2E", graph)  # names of a constructor
    nodes = dict(re.findall(r'^node: { title: "([^"]*)" label: "([^"]*)"', graph, re.M))
    calls: dict[str, set[str]] = {name: set() for name in nodes}
    for caller, callee in re.findall(r'^edge: { sourcename: "([^"]*)" targetname: "([^"]*)"', graph, re.M):
        calls.setdefault(caller, set()).add(callee)

    def told(name: str) -> str:
        what, _, place = nodes[name].partition("\\n")
        file, line, _ = place.rsplit(":", 2)
        return f"{what} ({file}, line {line})"

    _refuse_cycles(calls, told)


def _refuse_cycles(calls: dict[str, set[str]], told: Callable[[str], str]) -> None:
    finished: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise EmulationError(f"recursion: {' calls '.join(map(told, (*above[above.index(name) :], name)))}")
        for callee in sorted(calls[name] & calls.keys() - finished):
            visit(callee, (*above, name))
        finished.add(name)

    for name in calls:
        visit(name, ())
