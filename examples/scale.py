"""How context parallel decoding scales: bytes a rank holds, time to read them, time to merge, and how even the load is.

python examples/scale.py --tokens 10_000_000 --ranks 1 2 4 8 16 32 64

Nothing is measured here. Sizes come from the formats and the placement from the code of ShardedCache; speeds of memory
and links are arguments. docs/lab/parallel.md has the formulae.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from aurakv import Format
from aurakv.parallel.collective import LATENCY_BYTES
from aurakv.parallel.placement import Share


@dataclass(frozen=True)
class Model:
    """What the cache of a model depends on."""

    layers: int
    heads: int
    kv_heads: int
    dim: int

    def cache_bytes(self, format: str, tokens: int) -> int:
        return Format.parse(format, self.dim).bytes_per_token * self.kv_heads * self.layers * tokens

    def message(self, queries: int) -> int:
        """Bytes of a partial result in bfloat16 with a float32 lse, in one layer."""
        return queries * self.heads * (2 * self.dim + 4)


@dataclass(frozen=True)
class Link:
    """Between ranks: seconds until a message starts to arrive, and bytes a second into one rank."""

    latency: float
    rate: float

    def gather(self, ranks: int, size: int) -> float:
        return 0.0 if ranks == 1 else self.latency + (ranks - 1) * size / self.rate

    def all_merge(self, ranks: int, size: int) -> float:
        """The path that `all_merge` takes for this size."""
        if size * (ranks - 2) <= LATENCY_BYTES:  # also of one rank, which has nothing to do
            return self.gather(ranks, size)
        return 2 * self.latency + 2 * (ranks - 1) / ranks * size / self.rate


@dataclass(frozen=True)
class Machine:
    """Ranks of a node are joined by the fast link, nodes by the slow one."""

    node: int
    inside: Link
    between: Link

    def flat(self, ranks: int, size: int) -> float:
        """One all_merge over all ranks."""
        return (self.inside if ranks <= self.node else self.between).all_merge(ranks, size)

    def nested(self, ranks: int, size: int) -> float:
        """One inside each node, then one between the nodes: the merge is associative."""
        if ranks <= self.node:
            return self.flat(ranks, size)
        return self.inside.all_merge(self.node, size) + self.between.all_merge(-(-ranks // self.node), size)

    def mixed(self, ranks: int, size: int) -> float:
        """KV heads split over the ranks of a node, positions over the nodes: ranks merge their own heads only."""
        return self.between.all_merge(-(-ranks // self.node), -(-size // min(ranks, self.node)))


def slowest(lengths: list[int], ranks: int, block: int) -> int:
    """Tokens of the rank that holds most, placed as ShardedCache places them."""
    held = [0] * ranks
    for seq, length in enumerate(lengths):
        for rank in range(ranks):
            held[rank] += Share(block, ranks, (rank - seq) % ranks).count(length)
    return max(held)


def scaling(args: argparse.Namespace, model: Model, machine: Machine) -> None:
    rates = dict(zip(args.formats, args.rates, strict=True))
    print(
        f"{args.sequences} sequence(s) of {args.tokens:,} tokens; {model.layers} layers, {model.heads} heads,"
        f" {model.kv_heads} KV heads of {model.dim}; blocks of {args.block}\n"
    )
    print("| ranks | format | GiB a rank | read ms | merge ms: flat | nested | mixed | step ms | merging |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for format in args.formats:
            held = model.cache_bytes(format, slowest([args.tokens] * args.sequences, ranks, args.block))
            read = held / rates[format]
            size = model.message(args.sequences)
            ways = (machine.flat, machine.nested, machine.mixed)
            merges = [model.layers * way(ranks, size) for way in ways]
            step = read + min(merges[:2])
            fits = "" if held <= args.memory else " (too much)"
            merging = " | ".join(f"{seconds * 1e3:.2f}" for seconds in merges)
            print(
                f"| {ranks} | {format} | {held / 2**30:,.1f}{fits} | {read * 1e3:,.2f} | {merging} |"
                f" {step * 1e3:,.2f} | {min(merges[:2]) / step:.0%} |"
            )


def balance(args: argparse.Namespace) -> None:
    """A ragged batch that decodes: the slowest rank against the mean, for our placement and two simpler ones."""
    pick = random.Random(0)
    print("\nRagged batch of 16, lengths from 1K to 128K, decoding 4,096 tokens each: slowest rank over the mean\n")
    print("| ranks | blocks going round | whole sequences | equal parts |")
    print("|---|---|---|---|")
    for ranks in (4, 16, 64):
        lengths = [int(1024 * 128 ** pick.random()) for _ in range(16)]
        worst = [0.0, 0.0, 0.0]
        for decoded in range(0, 4097, 512):
            now = [length + decoded for length in lengths]
            mean = sum(now) / ranks
            whole = [sum(now[rank::ranks]) for rank in range(ranks)]
            part = -(-max(now) // ranks)  # rank r has positions r·part … of every sequence
            split = [sum(min(max(length - rank * part, 0), part) for length in now) for rank in range(ranks)]
            for i, most in enumerate((slowest(now, ranks, args.block), max(whole), max(split))):
                worst[i] = max(worst[i], most / mean)
        print(f"| {ranks} | {worst[0]:.2f} | {worst[1]:.2f} | {worst[2]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of each sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--formats", nargs="+", default=["k16v16", "k8:cubic/v8:cubic", "k4v4"])
    parser.add_argument("--rates", type=float, nargs="+", default=[4.5e12, 3.6e12, 3.3e12], help="bytes a second read")
    parser.add_argument(
        "--model", type=int, nargs=4, default=[80, 64, 8, 128], metavar=("LAYERS", "HEADS", "KV", "DIM")
    )
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--node", type=int, default=8, help="ranks that the fast link joins")
    parser.add_argument("--inside", type=float, nargs=2, default=[10e-6, 400e9], metavar=("LATENCY", "RATE"))
    parser.add_argument("--between", type=float, nargs=2, default=[25e-6, 50e9], metavar=("LATENCY", "RATE"))
    parser.add_argument("--memory", type=float, default=120e9, help="bytes of a rank that the cache may take")
    args = parser.parse_args()
    if len(args.rates) != len(args.formats):
        parser.error(f"{len(args.formats)} formats need as many rates, got {len(args.rates)}")
    scaling(args, Model(*args.model), Machine(args.node, Link(*args.inside), Link(*args.between)))
    balance(args)


if __name__ == "__main__":
    main()
