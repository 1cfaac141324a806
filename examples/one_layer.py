"""Compress keys and values, attend over the codes, compare with exact attention: sizes, errors and times.

    python examples/one_layer.py [--tokens 8192] [--format k4v4 k8v4 …]

The vectors imitate what models produce: every head has a mean key, norms vary from token to token, a few channels
are much larger than the rest, and each query looks for one token among the noise, with scores of deviation 2.
"""

import argparse
import statistics
import time

import torch

import aurakv as kv
from aurakv.attention import ops

HEADS, KV_HEADS, DIM = 32, 8, 128
FORMATS = ["k16v16", "k8v8", "k8v4", "k6v4", "k4v4", "k3v3", "k2v2"]


def vectors(tokens: int, rng: torch.Generator) -> torch.Tensor:
    """[tokens, kv_heads, dim] with a mean, outlier channels and log-normal norms."""
    mean = torch.randn(1, KV_HEADS, DIM, generator=rng) / 2
    channel = torch.ones(DIM)
    channel[torch.randperm(DIM, generator=rng)[:4]] = 6
    norm = torch.exp(torch.randn(tokens, KV_HEADS, 1, generator=rng) / 4)
    return (torch.randn(tokens, KV_HEADS, DIM, generator=rng) * channel + mean) * norm


def microseconds(call) -> float:
    """Median time of a call."""
    call()
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--format", nargs="+", default=FORMATS, help="format names such as k4v4")
    options = parser.parse_args()

    rng = torch.Generator().manual_seed(0)
    k, v = vectors(options.tokens, rng), vectors(options.tokens, rng)
    target = torch.randint(options.tokens, (HEADS,), generator=rng)
    group = torch.arange(HEADS) // (HEADS // KV_HEADS)
    q = k[target, group] + 2 * torch.randn(HEADS, DIM, generator=rng)
    q = (q / torch.einsum("hd,thd->ht", q, k[:, group]).std(-1, keepdim=True) * 2 * DIM**0.5)[None]  # scores of std 2

    exact = ops.attend_dense(q, k, v, [0, 1], [0, options.tokens], backend="reference").out
    bf16 = [x.bfloat16().transpose(0, 1).contiguous()[None] for x in (k, v)]
    rows = q.bfloat16().view(1, KV_HEADS, HEADS // KV_HEADS, DIM)  # the fastest way to ask torch: the group as queries
    torch_time = microseconds(lambda: torch.nn.functional.scaled_dot_product_attention(rows, *bf16))

    print(f"{options.tokens} tokens, {HEADS} query heads, {KV_HEADS} KV heads of dimension {DIM}, one layer")
    print(f"uncompressed bfloat16: {2 * k.numel() * 2 / 2**20:.1f} MiB; torch attends in {torch_time:.0f} µs\n")
    print(f"{'format':8} {'bytes/token':>11} {'MiB held':>9} {'smaller':>8} {'key error':>10} {'value error':>11}"
          f" {'output error':>12} {'attend µs':>10}  backend")  # fmt: skip
    for name in options.format:
        fmt = kv.Format.parse(name, head_dim=DIM)
        cache = kv.KVCache.contiguous(fmt, seqs=1, kv_heads=KV_HEADS, capacity=options.tokens)
        cache.append(k, v, [0, options.tokens])
        out = cache.attend(q).out
        decoded = cache.decode(0)
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip((*decoded, out), (k, v, exact), strict=True)]
        spent = microseconds(lambda cache=cache: cache.attend(q))
        backend = kv.backends.select(None, fmt, q.device).name
        print(
            f"{fmt!s:8} {fmt.bytes_per_token * KV_HEADS:11d} {cache.bytes_held / 2**20:9.2f} {fmt.compression:7.2f}x"
            f" {errors[0]:10.2%} {errors[1]:11.2%} {errors[2]:12.2%} {spent:10.0f}  {backend}"
        )
    print("\nErrors are relative to norms; the output is compared with attention on the vectors themselves.")


if __name__ == "__main__":
    main()
