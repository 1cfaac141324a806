"""What an append of fitted codes costs, from the machine code that a GPU would get. Calculated, not measured.

    PYTHONPATH=src python tools/gpu_fitted.py [--format k4v4] [--dim 128] [--capability 9.0] [--one-by-one]

Prints for each loop of the kernel, by address, its instructions and how many cycles a turn takes a warp that nothing
else delays: instructions issue in order, one a cycle, each when its operands are there. Latencies are rounded from what
microbenchmarks of others found, with every load a hit in L1. docs/lab/gpu.md says what follows for whole appends.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from aurakv.backends.triton.append import fit_launch, launch
from aurakv.backends.triton.common import target
from aurakv.checks import rows_of
from aurakv.format import fit as fitting
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate
from tests.helpers.compile_only import CompileOnly, disassemble

LATENCY = {
    "LDG": 36, "LDS": 26, "LDL": 36, "LDSM": 30, "LDC": 30, "S2R": 30, "SHFL": 24, "MUFU": 22, "HMMA": 33, "IMMA": 33,
    "F2F": 14, "I2F": 14, "F2I": 14, "POPC": 14, "ISETP": 12, "FSETP": 12, "PLOP3": 12,
}  # fmt: skip
OTHERS = 5
NO_RESULT = ("STG", "STS", "STL", "BRA", "BAR", "EXIT", "RED", "ATOMG", "WARPSYNC", "NOP", "BSYNC", "BSSY")
SEQS, HEADS = 32, 8


def compiled(name: str, dim: int, capability: tuple[int, int], at_once: bool) -> bytes:
    """The append of one token to each of 32 sequences."""
    format, device = Format.parse(name, dim), torch.device("cpu")
    numbers = (torch.zeros(shape, dtype=torch.int32) for shape in ((SEQS, 1), (SEQS,), (1,)))
    weights = torch.rand(HEADS, dim) + 0.1
    fits = {"key_fit": fitting.fit(format.key, weights, at_once), "value_fit": fitting.equal(HEADS)}
    pages = Pages(format, 64, allocate(format, 64, SEQS, HEADS, device), *numbers, **fits)
    x = torch.empty(SEQS, HEADS, dim, dtype=torch.bfloat16)
    seen: dict[str, tuple[object, int]] = {}
    kernel = CompileOnly(launch.append_kernel, 10 * capability[0] + capability[1], seen)
    with (
        mock.patch.object(launch, "append_kernel", kernel),
        mock.patch.object(launch, "multiprocessors", return_value=132),
        mock.patch.object(fit_launch, "multiprocessors", return_value=132),
        target.assuming(capability),
    ):
        launch.append(pages, x, x, rows_of("starts", None, SEQS, SEQS, device))
    cubin: bytes = seen["append_kernel"][0].asm["cubin"]  # type: ignore[attr-defined]
    return cubin


def names(text: str, count: int = 1) -> list[str]:
    """Registers in an operand, the first of `count` neighbours."""
    found = re.findall(r"\b(U?R|U?P)(\d+)\b", text)
    return [f"{kind}{int(number) + i}" for kind, number in found for i in range(count)]


def cycles(body: list[str], turns: int = 3) -> int:
    """Of one turn, once the loop runs."""
    ready: dict[str, int] = collections.defaultdict(int)
    now, ends = 0, []
    for _ in range(turns):
        for text in body:
            condition = re.match(r"@!?(U?P\d)\s", text)
            operation, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
            kind, operands = operation.split(".")[0], rest.split(",")
            if kind == "SHFL":  # a predicate comes first
                operands = operands[1:]
            if kind in NO_RESULT:
                to, used = [], [x for each in operands for x in names(each)]
            elif kind in ("HMMA", "IMMA"):
                to = names(operands[0], 4)
                used = [x for each, n in zip(operands[1:4], (4, 2, 4), strict=False) for x in names(each, n)]
            else:
                wide = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
                to, used = names(operands[0], wide), [x for each in operands[1:] for x in names(each)]
            now = max(now + 1, *(ready[x] for x in [*used, *([condition[1]] if condition else [])]), 0)
            ready.update(dict.fromkeys(to, now + LATENCY.get(kind, OTHERS)))
        ends.append(now)
    return ends[-1] - ends[-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--one-by-one", action="store_true", help="a fit of which no coordinates are rounded at once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = compiled(args.format, args.dim, target.parsed(args.capability), not args.one_by_one)
        sass = disassemble(made, Path(folder))
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    for at, text in code:
        jump = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            body = [other for where, other in code if int(jump[1], 16) <= where <= at]
            products = sum("MMA" in x and "HFMA2" not in x for x in body)
            print(f"{jump[1]} to {at:x}: {len(body)} instructions, {products} products, {cycles(body)} cycles")


if __name__ == "__main__":
    main()
