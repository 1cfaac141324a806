"""Tensor parallel needs nothing special: each rank keeps its own KV heads. The examples for several processes run."""

import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aurakv as kv
from aurakv.storage.uncompressed import Uncompressed
from tests.parallel.cases import rand

ROOT = Path(__file__).parents[2]
GENERATE = """
import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from aurakv.hf import attach

torch.set_num_threads(1)
folder, size = sys.argv[1], int(sys.argv[2])
options = {}
if size > 1:
    try:
        from transformers.distributed import DistributedConfig
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=size)
    except (ImportError, TypeError):  # before 5.18
        options["tp_plan"] = "auto"
model = LlamaForCausalLM.from_pretrained(folder, **options).eval()
inputs = torch.randint(1, 256, (2, 40), generator=torch.Generator().manual_seed(0))
cache = attach(model, "k8v8", first=4, recent=8)
mask = torch.ones_like(inputs)
text = model.generate(inputs, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False)
if size == 1 or dist.get_rank() == 0:
    print("RESULT", json.dumps([cache.layers[0].cache.pool.kv_heads, cache.bytes_held, text[:, 40:].tolist()]))
if size > 1:
    dist.barrier()  # a process may abort as it ends, "terminate called without an active exception", if the other one
    dist.destroy_process_group()  # still talks, or if nobody says that the group is at its end, and sometimes even then
    sys.stdout.flush()
    os._exit(0)
"""


def launch(*command, processes=1):
    """Run a program under torchrun; what it printed."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, *map(str, command)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_heads(format, uncompressed):
    """Rank r keeps KV heads 2r and 2r + 1 and their queries in a plain cache; no process talks to another."""
    rank = dist.get_rank()
    heads, queries = slice(2 * rank, 2 * rank + 2), slice(6 * rank, 6 * rank + 6)
    offset = rand(4, 64, seed=7)
    whole = kv.KVCache.contiguous(format, 2, 4, uncompressed=uncompressed, key_offset=offset)
    mine = kv.KVCache.contiguous(format, 2, 2, uncompressed=uncompressed, key_offset=offset[heads].contiguous())
    for lengths in ([0, 50, 61], [0, 1, 2], [0, 5, 5]):
        q, k, v = (rand(lengths[-1], n, 64, seed=n + lengths[-1]) for n in (12, 4, 4))
        scoring = kv.Scoring(window=20, sinks=2, softcap=20.0)
        wanted = whole.step(q, k, v, lengths, scoring, precision="float32")
        got = mine.step(q[:, queries], k[:, heads], v[:, heads], lengths, scoring, precision="float32")
        torch.testing.assert_close(got.out, wanted.out[:, queries], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(got.lse, wanted.lse[:, queries], atol=2e-5, rtol=2e-5)
    for seq, side in itertools.product(range(2), range(2)):
        assert torch.equal(mine.codes(seq)[side].data, whole.codes(seq)[side].data[:, heads])


def test_each_rank_its_heads(ranks):
    for uncompressed in (None, Uncompressed(2, 9, torch.float32)):
        ranks(2).run(run_heads, kv.Format.parse("k4v3", 64), uncompressed)


def test_transformers_tensor_parallel(tmp_path, monkeypatch, capsys):
    """`tp_plan` splits the model; AuraCache takes the KV heads that the rank has and the text stays the same."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "model"), "1"])
    runpy.run_path(str(script))
    outs = capsys.readouterr().out, launch(script, tmp_path / "model", 2, processes=2)
    lines = [line for out in outs for line in out.splitlines() if line.startswith("RESULT")]
    (heads, held, text), (local_heads, local_held, local_text) = (json.loads(line[7:]) for line in lines)
    assert (heads, local_heads) == (4, 2)
    assert local_held < 0.6 * held
    assert local_text == text


def test_example():
    out = launch(ROOT / "examples" / "parallel.py", processes=2)
    assert "rank 1 of 2" in out
    assert "bit for bit: True" in out


def test_scale():
    """The table of docs/lab/parallel.md is what examples/scale.py prints."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "scale.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert run.returncode == 0, run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    document = (ROOT / "docs" / "lab" / "parallel.md").read_text(encoding="utf-8")
    for row in rows:
        assert row in document, row
    held = kv.Format.parse("k4v4", 128).bytes_per_token * 8 * 80 * 10_000_000 / 64 / 2**30
    assert f"| 64 | k4v4 | {held:.1f} |" in run.stdout
