"""Time the fast decode path with other registers, programs and tiles than it chooses, correctness first.

python benchmarks/gpu_tune.py --formats k5v4 k8v4 --registers 128 168 255 --programs 16 12 8 --tiles 32 64
python benchmarks/gpu_tune.py --formats k4v4 --shapes 3 --seqs 96 --registers 255 216 168 --programs 8 9 12 --tiles 64

Registers of a thread and programs of a multiprocessor go together, first with first. What `decode.launch` chooses by
itself comes first. Times as in gpu_decode.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import gpu_decode
import torch

from aurakv.attention.scoring import Scoring
from aurakv.backends.triton.common import target
from aurakv.backends.triton.decode import launch
from aurakv.checks import rows_of


@contextlib.contextmanager
def chosen(registers: int, programs: int, tile: int) -> Iterator[None]:
    """In place of what `decode.launch` would choose."""
    names = {"_registers_of": registers, "_residents": programs, "_tile": tile}
    with contextlib.ExitStack() as stack:
        for name, number in names.items():
            stack.enter_context(mock.patch.object(launch, name, lambda *_, number=number: number))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["k4v4"])
    parser.add_argument("--registers", nargs="+", type=int, default=[128, 168, 255])
    parser.add_argument("--programs", nargs="+", type=int, default=[16, 12, 8])
    parser.add_argument("--tiles", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--shapes", nargs="+", type=int, default=[2], help="of gpu_decode.SHAPES")
    parser.add_argument("--seqs", type=int, help="instead of the shape's, for batches as engines have them")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--capability", help="kernels as on a GPU of this compute capability, such as 8.0")
    parser.add_argument("--flush", choices=("write", "read"), default="write")
    args = parser.parse_args()
    if args.capability:
        target.assume(target.parsed(args.capability))
    if len(args.registers) != len(args.programs):
        parser.error("as many --registers as --programs")
    for shape in (gpu_decode.SHAPES[i] for i in args.shapes):
        seqs, kv_heads, group, tokens = args.seqs or shape[0], *shape[1:]
        _, base = gpu_decode.sdpa_bf16(seqs, kv_heads, group, tokens, args.dim, args.flush)
        print(f"({seqs},{kv_heads},{group},{tokens}) D={args.dim} cuDNN bf16 {base:.1f} us", flush=True)
        q = torch.randn(seqs, kv_heads * group, args.dim, device=gpu_decode.DEVICE, dtype=torch.bfloat16)
        starts = rows_of("starts", None, seqs, seqs, q.device)
        for name in args.formats:
            pages = gpu_decode.random_pages(name, args.dim, seqs, kv_heads, tokens, 64)
            call = gpu_decode.Call(q, pages, starts)
            about, tile = (target.target_of(pages.data.device), pages.format, group), launch._tile(pages, group)
            own = (launch._registers_of(*about, tile), launch._residents(*about, tile), tile)
            pairs = zip(args.registers, args.programs, strict=True)
            others = [(registers, programs, tile) for registers, programs in pairs for tile in args.tiles]
            for how in [own, *(other for other in others if other != own)]:
                with chosen(*how):
                    wrong = gpu_decode.error(call, Scoring())
                    decode = functools.partial(gpu_decode.decode, call, Scoring())
                    time = gpu_decode.microseconds(decode, args.flush) if wrong < 6e-3 else float("nan")
                registers, programs, tile = how
                mark = " (chosen)" if how == own else ""
                print(f"  {name}: {registers} registers, {programs} programs, tiles of {tile}: {time:.1f} us{mark}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
