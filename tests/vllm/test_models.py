"""Kinds of models in vLLM's engine, with random weights: sinks, pictures, lengths side by side. Run: make test-vllm"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
from tests.helpers.vllm_answers import LIKELY, equal, wrong
from tests.vllm.test_engine import GPU, LENGTH, engine, random_model, random_prompts, token_ids
from tests.vllm.test_operators import most_likely, predicted

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("calibrations")]

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": LENGTH,
}  # fmt: skip


def test_learned_sinks_and_windows(tmp_path: Path) -> None:
    """As in gpt-oss: every head has a logit that takes part in the softmax, every second layer a window."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(0)
    config = GptOssConfig(
        **COMMON, head_dim=64, num_local_experts=4, num_experts_per_tok=4, sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip  # all experts: a rounded number never chooses another one
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0)
    model.save_pretrained(tmp_path / "model")
    prompts = random_prompts()
    options = {"max_num_batched_tokens": 128}
    expected = predicted(tmp_path / "model", None, prompts, **options)
    assert wrong(predicted(tmp_path / "model", "k16v16", prompts, **options), expected) == []
    assert equal(predicted(tmp_path / "model", "k8v8", prompts, **options), expected) >= 560  # of 784


@pytest.mark.parametrize("kind", ["falcon-h1", "granite"])
def test_mamba_beside_attention(tmp_path: Path, kind: str) -> None:
    """Falcon H1 has both in every layer, Granite in turns."""
    from transformers import AutoModelForCausalLM, FalconH1Config, GraniteMoeHybridConfig

    torch.manual_seed(0)
    mamba: dict[str, Any] = {
        "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 64,
    }  # fmt: skip
    if kind == "falcon-h1":
        config: Any = FalconH1Config(**COMMON, **mamba, head_dim=64, mamba_d_ssm=256, mamba_n_heads=4)
    else:
        config = GraniteMoeHybridConfig(
            **COMMON, **mamba, layer_types=["mamba", "attention"] * 2, num_local_experts=0,
            shared_intermediate_size=512, mamba_n_heads=8,
        )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    prompts = random_prompts()
    options = {"max_num_batched_tokens": 512 if GPU else 128}  # on a GPU at least a block, which has a whole state
    expected = predicted(tmp_path / "model", None, prompts, **options)
    assert wrong(predicted(tmp_path / "model", "k16v16", prompts, **options), expected) == []
    assert equal(predicted(tmp_path / "model", "k8v8", prompts, **options), expected) >= 700  # of 784


def test_one_token_beside_long_contexts(tmp_path: Path) -> None:
    """In one batch, read in chunks: each prompt gets the text of the stock backend."""
    draw = random.Random(2)
    lengths = (1, 1900, 2, 17, 1024, 3, 4, 5, 640, 64)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in lengths]
    folder = random_model(tmp_path / "model", "llama")
    found = {}
    for switch in (None, "k16v16"):
        with engine(folder, switch, skip_tokenizer_init=True, max_num_batched_tokens=256) as llm:
            found[switch] = token_ids(llm, prompts, 24, detokenize=False)
    assert wrong(found["k16v16"], found[None]) == []


def pictured(folder: Path) -> Path:
    """Like LLaVA: a picture becomes 16 tokens of a text that a causal decoder reads; words w0 … w510."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    seen = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14,
        initializer_range=0.5,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=seen, text_config=LlamaConfig(**COMMON), image_token_index=511, vision_feature_layer=-1
    )
    model = LlavaForConditionalGeneration(config).float()
    for weight in model.model.multi_modal_projector.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")  # under the names that LLaVA's own files have
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    words = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(511)}, "<image>": 511}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    size = {"height": 56, "width": 56}
    pictures = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=size)
    LlavaProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def test_pictures_in_a_text(tmp_path: Path) -> None:
    """Prompts with a picture and without one, in one batch: what the stock backend predicts, which sees the picture."""
    pytest.importorskip("torchvision", reason="vLLM needs torchvision to look at pictures", exc_type=ImportError)
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams

    folder = pictured(tmp_path / "model")
    draw = random.Random(3)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(3, 511)}" for _ in range(count))

    def picture(seed: int) -> Any:
        return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8))

    texts = [f"{words(5 + 10 * i)} <image> {words(150)}" for i in range(4)]
    alone = [{"prompt": words(200)}]

    def prompts(first: int) -> list[Any]:
        shown = enumerate(texts, first)
        return [{"prompt": text, "multi_modal_data": {"image": picture(seed)}} for seed, text in shown] + alone

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=LIKELY or 1)
    found = {}
    seen: dict[str, Any] = {"mm_encoder_attn_backend": "TORCH_SDPA"} if GPU else {}
    for switch in (None, "k16v16", "k8v8"):
        with engine(folder, switch, **seen) as llm:
            for first in (0, 10) if switch is None else (0,):
                outputs = llm.generate(prompts(first), params, use_tqdm=False)
                found[switch, first] = [most_likely(out) for out in outputs]
    expected = found[None, 0]
    count = sum(map(len, expected))
    assert equal(found[None, 10][:4], expected[:4]) < 0.8 * count, "other pictures were meant to change predictions"
    assert wrong(found["k16v16", 0], expected) == []
    assert equal(found["k8v8", 0], expected) >= 0.88 * count
