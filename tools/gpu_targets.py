"""What GPUs that are not here could reach: the decode kernel compiled for them, its instructions counted, the time that
its bytes and its instructions allow. Calculated, not measured.

    PYTHONPATH=src python tools/gpu_targets.py [--formats k4v4 k8v4] [--dim 64] [--cards H200]

Prints a table for docs/lab/gpu.md: 8 sequences of 32K tokens, 8 KV heads, groups of 4, pages of 64.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from aurakv.attention.scoring import Scoring
from aurakv.backends.triton.decode import launch
from aurakv.checks import rows_of
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate
from tests.helpers.compile_only import compiling, disassemble, main_loop


class Card(NamedTuple):
    """From the vendor's data sheets."""

    capability: int
    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float  # Hz, boost


CARDS = {
    "A100 80 GB": Card(80, 2039e9, 108, 1.41e9),
    "RTX 3090": Card(86, 936e9, 82, 1.695e9),
    "L40S": Card(89, 864e9, 142, 2.52e9),
    "RTX 4090": Card(89, 1008e9, 128, 2.52e9),
    "RTX 5090": Card(120, 1792e9, 170, 2.407e9),
    "B200": Card(100, 8000e9, 148, 1.965e9),
    "H200": Card(90, 4800e9, 132, 1.98e9),
}
FORMATS = ["k2v2", "k3v3", "k4v4", "k5v4", "k6v6", "k8v4", "k8v8"]
SEQS, KV_HEADS, GROUP, TOKENS = 8, 8, 4, 32768


def instructions(name: str, dim: int, capability: int) -> tuple[int, int]:
    """Of a warp for a tile, and the tokens of a tile."""
    format, page = Format.parse(name, dim), 64
    pages = Pages(
        format, page, allocate(format, page, 128, KV_HEADS, torch.device("cpu")),
        torch.zeros(1, 128, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    q = torch.empty(1, KV_HEADS * GROUP, dim, dtype=torch.bfloat16)
    with compiling(capability) as seen, tempfile.TemporaryDirectory() as folder:
        where = rows_of("starts", None, 1, 1, q.device)
        launch.attend(q, pages, where, pages.lengths, Scoring(), None, None, None)
        _, loop = main_loop(disassemble(seen["decode_attention"][0].asm["cubin"], Path(folder)))
        return len(loop), launch._tile(pages, GROUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    args = parser.parse_args()
    print("| GPU | GB/s, multiprocessors, GHz | bf16 |", " | ".join(f"`{name}`" for name in args.formats), "|")
    print("|" + " --- |" * (3 + len(args.formats)))
    found = {}
    for card in args.cards:
        capability, bandwidth, multiprocessors, clock = CARDS[card]
        cells = []
        for name in args.formats:
            if (name, capability) not in found:
                found[name, capability] = instructions(name, args.dim, capability)
            count, tile = found[name, capability]
            vectors = SEQS * KV_HEADS * TOKENS
            read = vectors * Format.parse(name, args.dim).bytes_per_token / bandwidth
            issue = vectors / tile * count / (4 * multiprocessors * clock)  # one a cycle in each of four parts
            cells.append(f"{1e6 * read:.0f}, {1e6 * issue:.0f}")
        plain = SEQS * KV_HEADS * TOKENS * 4 * args.dim / bandwidth
        about = f"{bandwidth / 1e9:.0f}, {multiprocessors}, {clock / 1e9:.2f}"
        print(f"| {card} | {about} | {1e6 * plain:.0f} |", " | ".join(cells), "|", flush=True)
    codes = {key: 32 * n / tile / args.dim / 2 for key, (n, tile) in found.items()}
    print({f"{name} {capability}": f"{each:.2f}" for (name, capability), each in codes.items()})


if __name__ == "__main__":
    main()
