"""Context parallel and a transfer, in as many processes as torchrun starts:

torchrun --nproc-per-node 2 examples/parallel.py
"""

import torch
import torch.distributed as dist

import aurakv as kv
from aurakv import parallel

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
torch.manual_seed(0)  # queries, keys and values are the same on every rank

fmt = kv.Format.parse("k4v4", head_dim=128)
whole = kv.KVCache.contiguous(fmt, seqs=2, kv_heads=8, device=device)
cache = parallel.ShardedCache.growing(fmt, seqs=2, kv_heads=8, device=device, block=64)
starts = [0, 700, 1000]  # a prefill: 700 tokens of one sequence, 300 of another
for _ in range(3):
    tokens = starts[-1]
    q, k, v = (torch.randn(tokens, heads, 128, device=device) for heads in (32, 8, 8))
    one = whole.step(q, k, v, starts, precision="float32")
    all_ranks = cache.step(q, k, v, starts, precision="float32")
    torch.testing.assert_close(all_ranks.out, one.out, atol=1e-4, rtol=1e-4)
    starts = [0, 1, 2]  # then one token each
held = f"{cache.local.lengths} of {cache.lengths} tokens, {cache.bytes_held:,} bytes"
print(f"rank {rank} of {ranks} holds {held}", flush=True)

if ranks > 1 and rank == 0:  # prefill here …
    parallel.send(whole, 0, dst=1)
elif rank == 1:  # … decode there
    pool = kv.PagePool(fmt, num_pages=64, page_size=64, kv_heads=8, device=device)
    decoding = kv.KVCache.paged(pool, seqs=4)
    length = parallel.receive(decoding, 3, src=0)
    assert length == whole.lengths[0]
    same = [torch.equal(a.data, b.data) for a, b in zip(decoding.codes(3), whole.codes(0), strict=True)]
    print(f"rank 1 received {length} tokens, bit for bit: {all(same)}", flush=True)
dist.destroy_process_group()
