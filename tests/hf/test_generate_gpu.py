"""transformers on a GPU: a small random model gives what it gives with DynamicCache, and no copy of the cache stays."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from aurakv.hf import AuraCache, attach  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(hidden: int = 256, layers: int = 2, dtype: torch.dtype = torch.float32):
    """(model for DynamicCache, the same for AuraCache), with 8 query and 2 KV heads, on the host."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=200, hidden_size=hidden, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=40000, pad_token_id=0, eos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval().to(dtype)
    ours = copy.deepcopy(model)
    attach(ours, "k16v16")
    return model, ours


def padded(batch: int = 3, length: int = 90) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 200, (batch, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for seq in range(1, batch):
        mask[seq, : 7 * seq] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, cache, inputs, new: int = 40) -> torch.Tensor:
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    return model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=new).cpu()


@torch.no_grad()
def logits(model, cache, ids: torch.Tensor, steps: tuple[int, ...]) -> torch.Tensor:
    parts = [model(piece, past_key_values=cache).logits for piece in ids.to(model.device).split(steps, 1)]
    return torch.cat(parts, 1).cpu()


def test_uncompressed_equals_dynamic_cache():
    model, ours = (each.cuda() for each in make())
    inputs = padded()
    expected = generate(model, DynamicCache(config=model.config), inputs)
    cache = AuraCache(ours.config, "k16v16", precision="float32")
    assert torch.equal(generate(ours, cache, inputs), expected)
    assert cache.lengths == (inputs["attention_mask"].sum(1) + 39).tolist()


@pytest.mark.parametrize("format", ["k4v4", "k8v4", "k5/v3:minifloat"])
@pytest.mark.parametrize("precision", ["fast", "float32"])
def test_compressed_equals_the_host(format, precision):
    """The same logits on both devices within rounding, prompt and steps of one token."""
    _, here = make()
    there = copy.deepcopy(here).cuda()
    ids = padded()["input_ids"][:1].repeat(2, 1)
    steps = (80, 1, 1, 1, 1, 6)
    got, wanted = (
        logits(model, AuraCache(model.config, format, precision=precision), ids, steps) for model in (there, here)
    )
    error = (got - wanted).norm() / wanted.norm()
    assert error < (0.03 if precision == "fast" else 0.01), float(error)


def test_no_copy_of_the_context_stays():
    """Steps on 16K tokens take codes and small workspaces: less than a tenth of the cache in bfloat16."""
    _, model = (each.cuda() for each in make(layers=3, dtype=torch.bfloat16))
    cache = AuraCache(model.config, "k4v4")
    ids = torch.randint(1, 200, (4, 16384), generator=torch.Generator().manual_seed(6)).cuda()
    with torch.no_grad():
        for piece in ids.split(2048, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        model(ids[:, :1], past_key_values=cache)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            model(ids[:, :1], past_key_values=cache)
        torch.cuda.synchronize()
    dense = 3 * 2 * 4 * 16384 * 2 * 64 * 2
    assert cache.bytes_held < dense / 3.4
    assert torch.cuda.max_memory_allocated() - before < dense / 30


def test_layers_on_several_devices():
    """Every layer of the cache lives where its layer of the model does."""
    accelerate = pytest.importorskip("accelerate")
    _, whole = make(layers=4)
    inputs = padded()
    wanted = generate(whole, AuraCache(whole.config, "k16v16", precision="float32"), inputs)
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    places |= {f"model.layers.{number}": 0 if number % 2 else "cpu" for number in range(4)}
    spread = accelerate.dispatch_model(copy.deepcopy(whole), places, main_device="cpu")  # else the GPU runs them all
    cache = AuraCache(spread.config, "k16v16", precision="float32")
    assert torch.equal(generate(spread, cache, inputs).cpu(), wanted.cpu())
    assert [layer.cache.pool.device.type for layer in cache.compressed] == ["cpu", "cuda"] * 2
